"""Runs in a bucket, against a stand-in for the service: the same bits as on a disk, whatever happens on the way."""

import json
import os
import re
import subprocess
import sys

import fsspec
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from data_pipelines import arc
from lab import artifact, evaluate, files, graft, inspect, locks, main, mesh as meshes, page, points, train
from lab.checkpoint import CheckpointError, Checkpoints
from lab.files import StorageError
from lab.task import ConfigError
from tests import toy
from tests.bucket import Bucket
from tests.test_stop import stop_in_evaluation

long = pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='the whole file takes five minutes: LAB_LONG=1')

pytest.importorskip('gcsfs', reason='buckets need the extra gcs')
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DIGEST = re.compile(r'state digest +(\w+)')


@pytest.fixture(scope='module')
def service():
  """The service, for every client in this process."""
  with Bucket() as bucket, pytest.MonkeyPatch.context() as patch:
    for key, value in bucket.environment.items():
      patch.setenv(key, value)
    patch.setitem(fsspec.config.conf, 'gs', {'token': 'anon', 'project': 'none'})     # as the environment, read before
    yield bucket


@pytest.fixture
def bucket(service):
  """The service, empty; no scratch folder is left of another test."""
  service.clear()
  elsewhere()
  yield service
  elsewhere()


def elsewhere():
  """What a start on another machine finds here: nothing."""
  files._scratch.clear()
  files._claims.clear()


def run(config, workdir='gs://lab/run'):
  return train.run(toy.make_task(config), config, workdir)


def stopped(config, monkeypatch, step, workdir='gs://lab/run'):
  monkeypatch.setattr(meshes, 'preempted', lambda i: i == step)
  with pytest.raises(meshes.Preempted):
    run(config, workdir)
  monkeypatch.setattr(meshes, 'preempted', lambda i: False)


@pytest.fixture(scope='module')
def whole(tmp_path_factory, toy_data):
  """The uninterrupted run on a disk."""
  config = toy.get_config()
  config.data.dir = toy_data
  workdir = str(tmp_path_factory.mktemp('whole'))
  run(config, workdir)
  return workdir


def same(bucket, whole, name='run'):
  """Whether a run in the bucket ended as the one on the disk did: every array and every row."""
  with open(os.path.join(whole, 'metrics.jsonl'), 'rb') as f:
    assert bucket.objects[f'{name}/metrics.jsonl'] == f.read()
  assert Checkpoints(f'gs://lab/{name}').meta(20)['arrays'] == Checkpoints(whole).meta(20)['arrays']
  return True


# the whole program


@long
def test_killed_and_started_elsewhere_it_ends_with_the_same_bits(lab, bucket, toy_data, tmp_path):
  for name in os.listdir(toy_data):
    with open(os.path.join(toy_data, name), 'rb') as f:
      bucket.put(f'data/{name}', f.read())
  machines = 0

  def start(workdir, data='gs://lab/data'):
    nonlocal machines
    machines += 1
    (tmp_path / str(machines)).mkdir()
    return lab(f'--workdir={workdir}', f'--config.data.dir={data}', TMPDIR=str(tmp_path / str(machines)),
               **bucket.environment, **bucket.proxy(tmp_path))
  for step in (7, 13):
    process = start('gs://lab/run')
    said = [next(line for line in process.stdout if line.startswith(f'step {step}/'))]
    process.kill()
    process.wait()
  process = start('gs://lab/run')
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, (said, output)
  assert 'did not end in order there' in output and 'resumed at step' in output
  local = start(tmp_path / 'local', toy_data)
  expected, _ = local.communicate(timeout=300)
  assert DIGEST.search(output)[1] == DIGEST.search(expected)[1]
  assert same(bucket, str(tmp_path / 'local'))
  assert 'run/run.html' in bucket.objects and 'run/.lock' not in bucket.objects
  assert os.listdir(tmp_path / '3') == []                    # nothing is left on a machine whose run ended in order


def test_prepared_data_are_read_from_a_bucket(bucket, tmp_path):
  folder, _ = arc.prepare(arc.SAMPLE, str(tmp_path / 'arc'), shards=2)
  for name in os.listdir(folder):
    with open(os.path.join(folder, name), 'rb') as f:
      content = f.read()
    for place in ('good', 'slow', 'forbidden'):
      bucket.put(f'{place}/{name}', content)
  bucket.fail('GET', 'slow/', 503, 2)
  bucket.fail('GET', 'forbidden/arc_grids-train', 403, 100)
  program = ('import sys; from data_pipelines import arc, pipeline, DataError; from ml_collections import ConfigDict\n'
             'config = ConfigDict({"cache": False, "threads": 1, "prefetch": 1, "bad_limit": 0.0})\n'
             'for path in sys.argv[1:]:\n'
             '  try:\n'
             '    source = arc.source(path, "train", side=30)\n'
             '    batches = pipeline.Batches(source, config, 4, range(4), train=True)\n'
             '    print(pipeline.fingerprint(source, batches.index), next(iter(batches))["grid"].tobytes().hex())\n'
             '  except DataError as e: print(e)')
  places = [folder, 'gs://lab/good', 'gs://lab/slow', 'gs://lab/forbidden', 'gs://lab/nothing']
  done = subprocess.run([sys.executable, '-c', program, *places], cwd=ROOT, text=True, capture_output=True, check=True,
                        env={**os.environ, **bucket.environment, **bucket.proxy(tmp_path)})
  local, good, slow, forbidden, nothing = done.stdout.splitlines()
  assert local == good == slow and len(local) > 1000
  assert re.match('gs://lab/forbidden.* can\'t be read: PermissionDenied.*on purpose', forbidden)
  assert 'gs://lab/nothing: no prepared grids there' in nothing
  assert bucket.faults[0][3] == 0


@long
def test_two_processes_write_one_run(lab, bucket, tmp_path):
  from tests.test_processes import cluster, finish
  codes, outputs = finish(cluster(lambda *a, **kw: lab(*a, **kw, **bucket.environment), 2, 'gs://lab/run'))
  assert codes == [0, 0], outputs
  assert Checkpoints('gs://lab/run').steps() == [15, 20]
  steps = [json.loads(line)['step'] for line in bucket.objects['run/metrics.jsonl'].splitlines()]
  assert sorted(set(steps)) == [*range(1, 21)]
  codes, outputs = finish(cluster(lambda *a, **kw: lab(*a, **kw, **bucket.environment), 2, 'gs://lab/run'))
  assert codes == [0, 0] and 'resumed at step 20' in outputs[0], outputs


# stopping and going on


@pytest.mark.parametrize('stops', [(1,), (7, 10)] if os.environ.get('LAB_LONG') else [(7, 10)])
def test_a_stopped_run_continues_bit_for_bit(toy_config, bucket, monkeypatch, whole, stops):
  for stop in stops:
    stopped(toy_config, monkeypatch, stop)
    elsewhere()
  run(toy_config)
  assert same(bucket, whole)
  events = [n for n in bucket.names('run/tensorboard/')]
  assert len(events) == len(stops) + 1
  assert Checkpoints('gs://lab/run').steps() == [15, 20]


def test_a_stop_in_an_evaluation_takes_no_score_from_a_checkpoint(toy_config, bucket, monkeypatch, whole):
  with monkeypatch.context() as m:
    stop_in_evaluation(m, 20)
    with pytest.raises(meshes.Preempted):
      run(toy_config)
  elsewhere()
  run(toy_config)
  assert same(bucket, whole)
  there, here = Checkpoints('gs://lab/run').meta(20), Checkpoints(whole).meta(20)
  assert there['scores'] == here['scores'] != {} and there['notes'] == here['notes']


def test_what_a_run_logged_beyond_its_checkpoint_is_cut(toy_config, bucket, monkeypatch, whole):
  stopped(toy_config, monkeypatch, 10)
  files.remove('gs://lab/run/checkpoints/10')                # as if its save had been interrupted
  bucket.put('run/pictures/0000010_x.png', b'of a step that comes again')
  bucket.put('run/pictures/0000005_x.png', b'stays')
  elsewhere()
  run(toy_config)
  assert same(bucket, whole)
  assert bucket.names('run/pictures') == ['run/pictures/0000005_x.png']


# what counts as a checkpoint


@pytest.fixture
def saved(toy_config, bucket, monkeypatch):
  """A run with the checkpoints 5 and 10."""
  stopped(toy_config, monkeypatch, 10)
  elsewhere()
  return Checkpoints('gs://lab/run', toy_config)


def test_a_step_is_there_when_its_mark_is(saved, bucket):
  assert saved.steps() == [5, 10]
  del bucket.objects['run/checkpoints/10/commit_success.txt']
  assert saved.steps() == [5]
  saved.clean()
  assert not bucket.names('run/checkpoints/10') and bucket.names('run/checkpoints/5')
  del bucket.objects['run/checkpoints/5/meta/metadata']      # marked: it was complete
  with pytest.raises(CheckpointError, match=r'incomplete checkpoints \[5\]'):
    saved.clean()
  assert bucket.names('run/checkpoints/5')


def test_the_mark_goes_first(saved, bucket):
  bucket.seen.clear()
  saved.config.checkpoint.keep, saved.config.checkpoint.best = 1, ''
  saved.settle()
  gone = [name for method, name in bucket.seen if method == 'DELETE']
  assert gone[0] == 'run/checkpoints/5/commit_success.txt' and len(gone) > 10
  assert not bucket.names('run/checkpoints/5')


def test_a_broken_step_is_set_aside_and_written_again(saved, bucket, toy_config, whole):
  arrays = [n for n in bucket.names('run/checkpoints/10/params') if '/d/' in n]
  largest = max(arrays, key=lambda n: len(bucket.objects[n]))
  for name in arrays:
    bucket.put(name, bucket.objects[name][:len(bucket.objects[name]) // 2])
  run(toy_config)
  assert bucket.names(f'run/checkpoints/broken-10/{largest.removeprefix("run/checkpoints/10/")}')
  assert same(bucket, whole)


# faults


@pytest.mark.parametrize('status', [429, 503, 0] if os.environ.get('LAB_LONG') else [503])
def test_a_refusal_for_the_moment_is_told_and_the_request_made_again(toy_config, bucket, whole, caplog, status):
  bucket.fail('POST', 'metrics.jsonl', status)
  bucket.fail('POST', 'params/ocdbt.process_0/d/', status)
  bucket.fail('GET', 'checkpoints/', status)
  run(toy_config)
  assert same(bucket, whole)
  assert not any(times for *_, times in bucket.faults)
  assert 'a bucket refused a request, which is made again' in caplog.text or status == 0
  assert 'a bucket refused requests for arrays' in caplog.text


def test_a_log_that_may_not_be_written_ends_the_run(toy_config, bucket):
  bucket.fail('POST', 'timings.jsonl', 403, 100)
  with pytest.raises(StorageError, match='gs://lab/run/timings.jsonl: Forbidden.* on purpose') as e:
    run(toy_config)
  assert main.exit_code(e.value) == 5


@long
def test_arrays_that_may_not_be_written_end_the_run_after_three_tries(toy_config, bucket):
  bucket.fail('POST', 'params/', 403, 1000)
  with pytest.raises(CheckpointError, match='3 checkpoints in a row .* gs://lab/run/.*PERMISSION_DENIED.*params'):
    run(toy_config)
  assert Checkpoints('gs://lab/run').steps() == []


def test_a_checkpoint_that_can_not_be_reached_is_not_called_broken(saved, bucket, toy_config):
  before = bucket.names('run/checkpoints')
  for part in ('checkpoints/10/params', 'checkpoints/10/meta', 'run/checkpoints/'):
    bucket.fail('GET', part, 403, 1000)
    with pytest.raises((CheckpointError, StorageError), match='gs://lab/run/checkpoints'):
      run(toy_config)
    bucket.faults.clear()
    elsewhere()
    assert bucket.names('run/checkpoints') == before


def test_no_such_bucket(toy_config, bucket):
  with pytest.raises(StorageError, match='gs://none/run/.lock: there is no such bucket'):
    locks.claim('gs://none/run')
  with pytest.raises(StorageError, match='gs://none/run/.*: there is no such bucket'):
    run(toy_config, 'gs://none/run')


# two runs


@long
def test_the_last_to_come_has_the_workdir(toy_config, bucket, monkeypatch, whole, caplog):
  flush, count = files.push, []

  def push(workdir):
    count.append(1)
    if len(count) == 2:         # another process comes between the first and the second checkpoint
      bucket.put('run/.lock', b'{"host": "other"}')
    flush(workdir)
  monkeypatch.setattr(files, 'push', push)
  with pytest.raises(StorageError, match='taken over by {"host": "other"}'), locks.claim('gs://lab/run'):
    run(toy_config)
  assert bucket.objects['run/.lock'] == b'{"host": "other"}'
  assert Checkpoints('gs://lab/run').steps() == [5]
  monkeypatch.undo()
  elsewhere()
  with locks.claim('gs://lab/run'):
    assert '"host": "other"' in caplog.text
    run(toy_config)
  assert same(bucket, whole) and 'run/.lock' not in bucket.objects


# what else reads and writes a run


@long
def test_weights_come_from_a_bucket(toy_config, bucket, whole, tmp_path, monkeypatch):
  run(toy_config)
  elsewhere()
  state = Checkpoints(whole).arrays(20)
  template = {'dense': {'kernel': np.zeros((4, 8), np.float32), 'bias': np.zeros(8, np.float32)}}
  template = jax.tree.map(jax.numpy.asarray, template)
  save_file({'dense/bias': np.full(8, 3, np.float32)}, tmp_path / 'w.safetensors')
  bucket.put('w.safetensors', (tmp_path / 'w.safetensors').read_bytes())
  for source, root in (('gs://lab/run', '.'), ('gs://lab/run:20', '.'), ('run/best/best', 'gs://lab')):
    np.testing.assert_array_equal(graft.graft(template, source, root=root)['dense']['bias'], state['dense/bias'])
  assert float(graft.graft(template, 'gs://lab/w.safetensors')['dense']['bias'][0]) == 3
  with pytest.raises(CheckpointError, match='no such folder'):
    graft.graft(template, 'gs://lab/nothing')
  with pytest.raises(CheckpointError, match='no such file'):
    graft.graft(template, 'gs://lab/nothing.safetensors')
  with pytest.raises(ConfigError, match=r'best-1.*20 +2\.\d+ +2026-01-01'):
    artifact.find(artifact.parse('run/best'), 'gs://lab', 'init_from')
  toy_config.continue_from, toy_config.total_steps = 'gs://lab/run', 25
  run(toy_config, str(tmp_path / 'longer'))
  assert Checkpoints(str(tmp_path / 'longer')).steps() == [25]


@long
def test_it_is_described_as_on_a_disk(toy_config, bucket, whole):
  run(toy_config)
  elsewhere()
  del bucket.objects['run/checkpoints/15/commit_success.txt']
  found, expected = inspect.describe('gs://lab/run', 'best'), inspect.describe(whole, 'best')
  assert found['workdir'] == 'gs://lab/run' and found['incomplete'] == ['15']
  for key in ('arrays', 'metrics', 'state', 'best', 'config'):
    assert found[key] == expected[key]
  size = sum(len(bucket.objects[n]) for n in bucket.names('run/checkpoints/20/'))
  assert [s['bytes'] for s in found['steps']] == [size]
  with pytest.raises(CheckpointError, match='gs://lab/none: no such folder'):
    inspect.describe('gs://lab/none')
  assert page.write('gs://lab/run') == 'gs://lab/run/run.html'
  assert b'gs://lab/run' in bucket.objects['run/run.html'] and b'/lab-' not in bucket.objects['run/run.html']


def test_no_name_leads_out_of_the_scratch_folder(bucket):
  for name in ('../../x', 'pictures/../../../x', 'checkpoints/../../x', 'pictures//x', 'pictures/', 'metrics.jsonl'):
    bucket.put(f'run/{name}', b'')
  folder = files.outline('gs://lab/run')
  top = os.path.dirname(os.path.dirname(folder))
  assert [name for *_, names in os.walk(top) for name in names] == ['metrics.jsonl']


def test_scores_of_a_checkpoint_are_written_there(toy_config, bucket):
  run(toy_config)
  elsewhere()
  before = dict(bucket.objects)
  scores = evaluate.run(toy.make_task(toy_config), toy_config, 'gs://lab/run', 'latest')
  assert json.loads(bucket.objects['run/eval_20.json'])['error'] == scores['error']
  assert {k: v for k, v in bucket.objects.items() if k != 'run/eval_20.json'} == before


# configurations that can't run


@pytest.mark.parametrize('argument', ['--workdir=s3://b/run', '--workdir=gs://', '--config.init_from=hdfs://b/run',
                                      '--config.continue_from=gs:///run', '--config.runs_root=az://b',
                                      '--config.data.dir=s3://b/data', '--output=gs://b/out',
                                      '--config.init_parts=(("dense", "s3://b/run"),)'])
def test_other_addresses_are_refused(argument, capsys):
  arguments = ['main', '--config=tests/toy.py', '--workdir=/nowhere', '--mode=train', '--output=', argument]
  assert main.main(arguments) == 2
  assert re.search('[a-z0-9]+://[a-z/]*', argument)[0] in capsys.readouterr().err


def test_what_is_not_installed_is_told_first(monkeypatch, capsys):
  monkeypatch.setattr(files.importlib.util, 'find_spec', lambda name: None)
  for argument in ('--workdir=gs://lab/run', '--config.init_from=gs://lab/run'):
    arguments = ['main', '--config=tests/toy.py', '--workdir=/nowhere', '--mode=train', '--output=', argument]
    assert main.main(arguments) == 2
    assert "pip install '.[gcs]'" in capsys.readouterr().err
  files.check('config.data.dir', 'gs://lab/data', records=True)      # TensorFlow's own client reads it


def test_a_sweep_stays_on_a_disk(tmp_path):
  (tmp_path / 'a.toml').write_text('config = "tests/toy.py"\nmetric = "error"\nworkdir = "gs://lab/s"\n'
                                   '[values]\n"noise" = [0.1]\n')
  with pytest.raises(ConfigError, match='gs://lab/s: expected a folder of this machine'):
    points.read(str(tmp_path / 'a.toml'))
