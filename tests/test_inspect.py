"""--mode=inspect: what a run holds, read from plain files, whatever state they are in."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from lab import inspect, ledger, logs, train
from lab.checkpoint import CheckpointError
from lab.task import ConfigError
from tests import toy

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SPENT = {'wall_s': 3700.0, 'seconds': dict.fromkeys(ledger.BUCKETS, 0.0) | {'step': 2775.0, 'idle': 925.0},
         'goodput': 0.75, 'starts': 3, 'lost_steps': 4, 'compilations': 2, 'peak': 5 << 20}


@pytest.fixture(scope='module')
def trained(tmp_path_factory, toy_data):
  """A finished run that kept all its steps: 5, 10, 15 and 20."""
  config = toy.get_config()
  config.data.dir = toy_data
  config.checkpoint.keep = -1
  workdir = str(tmp_path_factory.mktemp('trained'))
  train.run(toy.make_task(config), config, workdir)
  return workdir


@pytest.fixture
def copy(trained, tmp_path):
  """A copy of that run to break."""
  return shutil.copytree(trained, str(tmp_path / 'run'))


def edit(workdir, step, change):
  """Rewrites what a step says of itself."""
  path = os.path.join(workdir, 'checkpoints', str(step), 'meta', 'metadata')
  with open(path, encoding='utf-8') as f:
    meta = json.load(f)
  change(meta)
  with open(path, 'w', encoding='utf-8') as f:
    json.dump(meta, f)


def line(text, *words):
  """The fields of the only line that has all these words."""
  found = [x for x in text.splitlines() if all(w in x.split() for w in words)]
  assert len(found) == 1, (words, found)
  return found[0].split()


def test_a_run_and_where_it_is(trained):
  d = inspect.describe(trained)
  assert d['workdir'] == trained and d['task'] == 'tests.toy'
  assert (d['step'], d['total_steps'], d['state']) == (20, 20, 'finished, step 20')
  assert [s['step'] for s in d['steps']] == [5, 10, 15, 20]
  assert d['chosen'] == d['latest'] == 20 and d['set_aside'] == d['incomplete'] == []
  for s in d['steps']:
    evaluated = next(r for r in logs.rows(trained) if r['split'] == 'eval' and r['step'] == s['step'])
    assert s['scores']['error'] == evaluated['error']
    files = [os.path.join(f, n) for f, _, names in os.walk(os.path.join(trained, 'checkpoints', str(s['step'])))
             for n in names]
    assert s['bytes'] == sum(map(os.path.getsize, files)) > 160


def test_arrays_and_their_totals_by_hand(trained):
  d = inspect.describe(trained)
  assert d['arrays']['params/dense/kernel'] == {'dtype': 'float32', 'shape': [4, 8], 'size': 32, 'bytes': 128}
  assert d['arrays']['params/dense/bias'] == {'dtype': 'float32', 'shape': [8], 'size': 8, 'bytes': 32}
  assert d['arrays']['step'] == {'dtype': 'int32', 'shape': [], 'size': 1, 'bytes': 4}
  assert d['parameters'] == 4 * 8 + 8
  assert d['groups']['params'] == d['groups']['ema'] == {'arrays': 2, 'size': 40, 'bytes': 160}
  assert d['groups']['stats'] == {'arrays': 1, 'size': 1, 'bytes': 4}
  rest = [a for p, a in d['arrays'].items() if not p.startswith(('params/', 'stats/', 'opt/ema/'))]
  assert d['groups']['opt']['arrays'] == len(rest) and d['groups']['opt']['size'] == sum(a['size'] for a in rest)
  assert d['groups']['opt']['size'] > 2 * 40          # both moments of every parameter, and the step
  assert sum(g['arrays'] for g in d['groups'].values()) == len(d['arrays'])


def test_other_types_have_other_sizes(copy):
  arrays = {'params/a': ['bfloat16', [1000, 3], [0, 0]], 'params/b': ['float64', [2], [0, 0]],
            'stats/c': ['bool', [0, 7], [0, 0]]}
  edit(copy, 20, lambda meta: meta.update(arrays=arrays))
  d = inspect.describe(copy)
  assert d['groups'] == {'params': {'arrays': 2, 'size': 3002, 'bytes': 6016},
                         'stats': {'arrays': 1, 'size': 0, 'bytes': 0}}
  assert line(inspect.text(d), 'params/a') == ['params/a', 'bfloat16', '1000x3', '3,000', '6.0', 'kB']


def test_which_step(copy):
  for step, error in ((5, 3.0), (10, 1.0), (15, 1.0), (20, 2.0)):
    edit(copy, step, lambda meta, error=error: meta['scores'].update(error=error))
  edit(copy, 5, lambda meta: meta['arrays'].pop('params/dense/bias'))
  best = inspect.describe(copy, 'best')
  assert best['chosen'] == best['best'] == 15 and best['best_metric'] == '-error'       # the later of equals
  assert inspect.describe(copy)['chosen'] == 20 and inspect.describe(copy)['best'] == 15
  assert inspect.describe(copy, '5')['parameters'] == 32 and inspect.describe(copy, '10')['parameters'] == 40
  edit(copy, 20, lambda meta: meta['config']['checkpoint'].update(best='error'))          # now more is better
  assert inspect.describe(copy)['best'] == 5
  edit(copy, 20, lambda meta: meta['config']['checkpoint'].update(best=''))
  assert inspect.describe(copy)['best'] is None
  with pytest.raises(CheckpointError, match=r"has no best step: checkpoint.best = ''; steps: \[5, 10, 15, 20\]"):
    inspect.describe(copy, 'best')


def test_a_step_that_is_not_there_names_the_nearest(trained):
  with pytest.raises(CheckpointError, match=r"no step '14'; nearest: \[10, 15, 20\]"):
    inspect.describe(trained, '14')
  with pytest.raises(CheckpointError, match=r"no step 'newest'; nearest: \[5, 10, 15, 20\]"):
    inspect.describe(trained, 'newest')
  with pytest.raises(CheckpointError, match=r"no step '400'; nearest: \[10, 15, 20\]"):
    inspect.describe(os.path.join(trained, 'checkpoints', '400'))


def test_the_folder_of_a_checkpoint_will_do(trained, tmp_path, monkeypatch):
  folder = os.path.join(trained, 'checkpoints')
  assert inspect.describe(os.path.join(folder, '10')) == inspect.describe(trained, '10')
  assert inspect.describe(os.path.join(folder, '10') + '/', '15') == inspect.describe(trained, '15')
  assert inspect.describe(folder) == inspect.describe(trained)
  monkeypatch.chdir(os.path.join(folder, '5'))
  assert inspect.describe('.') == inspect.describe(trained, '5')
  alone = inspect.describe(shutil.copytree(os.path.join(folder, '10'), str(tmp_path / 'sent')))
  assert alone['chosen'] == 10 and alone['arrays'] == inspect.describe(trained, '10')['arrays']
  assert alone['state'] == 'at step 10 of 20' and not alone['metrics'] and not alone['goodput']


def test_a_run_may_have_the_name_of_a_step(trained, tmp_path):
  run = shutil.copytree(trained, str(tmp_path / 'checkpoints' / '7'))
  assert inspect.describe(run)['workdir'] == run and inspect.describe(run)['chosen'] == 20


def test_what_differs_is_marked(copy):
  edit(copy, 20, lambda meta: meta['versions'].update(jax='0.1.2', gone='3'))
  d = inspect.describe(copy)
  here = logs.versions()
  assert d['versions']['jax'] == {'saved': '0.1.2', 'here': here['jax']}
  assert d['versions']['gone'] == {'saved': '3', 'here': None}
  assert d['versions']['numpy'] == {'saved': here['numpy'], 'here': here['numpy']}
  assert d['config']['optim.ema'] == 0.9 and d['config']['data.train'] == 'train' and d['config']['seed'] == 0
  assert {'task', 'total_steps', 'optim.ema', 'checkpoint.best'} <= set(d['changed'])
  assert not {'seed', 'data.train', 'optim.clip', 'prng'} & set(d['changed'])     # defaults, and the task's own
  text = inspect.text(d)
  assert line(text, 'jax') == ['*', 'jax', '0.1.2', 'here', here['jax']]
  assert line(text, 'numpy') == ['numpy', here['numpy']]
  assert line(text, 'optim.ema') == ['*', 'optim.ema', '0.9'] and line(text, 'seed') == ['seed', '0']


def test_metrics_are_summed_up(copy):
  path = os.path.join(copy, 'metrics.jsonl')
  rows = [{'step': 1, 'split': 'train', 'loss': 2.0}, {'step': 2, 'split': 'train', 'loss': None},
          {'step': 5, 'split': 'eval', 'error': 0.25}, {'step': 7, 'split': 'eval', 'error': None},
          {'step': 9, 'split': 'eval', 'error': 0.5}]
  with open(path, 'w', encoding='utf-8') as f:
    f.write(''.join(json.dumps(r) + '\n' for r in rows) + '{"step": 10, "spl')      # cut off by a kill
  d = inspect.describe(copy)
  assert d['metrics'] == {'train': {'rows': 2, 'last': rows[1]},
                          'eval': {'rows': 3, 'last': rows[4], 'best': {'step': 5, 'value': 0.25}}}
  text = inspect.text(d)
  assert line(text, 'train', 'last,') == ['train', '2', 'rows', 'last,', 'step', '2', 'loss', 'not', 'finite']
  assert line(text, 'best,') == ['best,', 'step', '5', 'error', '0.25']
  with open(path, 'w', encoding='utf-8') as f:
    f.write('{"step": 1\n[]\n')
  d = inspect.describe(copy)
  assert not d['metrics'] and 'metrics.jsonl is broken' in d['metrics_error'] and d['metrics_error'] in inspect.text(d)


def test_notes_and_goodput_are_told(copy, monkeypatch):
  bad = list(range(100, 112))
  edit(copy, 20, lambda meta: meta.update(notes={'bad_records': bad, 'evaluation_due': True}))
  monkeypatch.setattr(ledger, 'summary', lambda workdir: SPENT if workdir == copy else {})
  d = inspect.describe(copy)
  assert d['notes']['bad_records'] == bad and d['goodput'] == SPENT
  text = inspect.text(d)
  assert '12: 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, ...\n' in text
  assert line(text, 'evaluation', 'due') == ['evaluation', 'due', 'True']
  assert ledger.table(SPENT) in text


def test_a_broken_description_hides_no_other(copy):
  for step, content in ((10, '{"step": 10, "config"'), (15, '[]'), (20, '{"arrays": {"a": ["float33", [2], []]}}')):
    with open(os.path.join(copy, 'checkpoints', str(step), 'meta', 'metadata'), 'w', encoding='utf-8') as f:
      f.write(content)
  d = inspect.describe(copy)
  assert [s['step'] for s in d['steps'] if s.get('error') == 'its description is broken'] == [10, 15, 20]
  assert d['chosen'] == 20 and d['arrays'] == {} and d['task'] == 'tests.toy' and d['best'] == 5
  text = inspect.text(d)
  assert 'step 20: its description is broken' in text and text.count('its description is broken') == 4
  assert inspect.describe(copy, '5')['parameters'] == 40
  sent = shutil.copytree(os.path.join(copy, 'checkpoints', '15'), os.path.join(os.path.dirname(copy), 'sent'))
  with pytest.raises(CheckpointError, match='sent: its description is broken'):
    inspect.describe(sent)


def test_what_is_no_step_is_listed_apart(copy):
  folder = os.path.join(copy, 'checkpoints')
  os.rename(os.path.join(folder, '15'), os.path.join(folder, 'broken-15'))
  os.remove(os.path.join(folder, '20', 'meta', 'metadata'))
  os.mkdir(os.path.join(folder, '30.orbax-checkpoint-tmp-1'))
  os.mkdir(os.path.join(folder, '007'))
  os.mkdir(os.path.join(folder, 'notes'))
  d = inspect.describe(copy)
  assert [s['step'] for s in d['steps']] == [5, 10]
  assert d['set_aside'] == ['broken-15'] and d['incomplete'] == ['007', '20', '30.orbax-checkpoint-tmp-1']
  assert d['state'] == 'at step 20 of 20; saved up to step 10'        # the log knows the steps after it
  assert 'broken, set aside: broken-15' in inspect.text(d)
  assert inspect.describe(os.path.join(folder, 'broken-15'))['chosen'] == 15


def test_a_run_without_checkpoints(copy):
  shutil.rmtree(os.path.join(copy, 'checkpoints'))
  d = inspect.describe(copy)
  assert d['steps'] == [] and d['chosen'] is None and d['arrays'] == {} and d['task'] == 'tests.toy'
  assert d['state'] == 'at step 20 of 20; saved up to step 0' and d['metrics']['eval']['rows'] == 4
  assert 'no checkpoint yet' in inspect.text(d)
  with pytest.raises(CheckpointError, match='no checkpoint in'):
    inspect.describe(copy, '5')


def test_what_is_no_run_is_said_to_be_none(tmp_path):
  with pytest.raises(CheckpointError, match='no such folder'):
    inspect.describe(str(tmp_path / 'missing'))
  (tmp_path / 'config.json').write_text('{"model_type": "other"}')
  with pytest.raises(CheckpointError, match='is no run: it has neither checkpoints nor logs'):
    inspect.describe(str(tmp_path))


def test_numbers_are_readable_and_columns_aligned(copy):
  arrays = {'params/large': ['float32', [1234, 1000], [0, 0]], 'params/s': ['float16', [], [0, 0]]}
  edit(copy, 20, lambda meta: meta.update(arrays=arrays))
  text = inspect.text(inspect.describe(copy))
  assert line(text, 'parameters') == ['parameters', '1,234,001']
  assert line(text, 'params/large') == ['params/large', 'float32', '1234x1000', '1,234,000', '4.9', 'MB']
  assert line(text, 'params/s') == ['params/s', 'float16', 'scalar', '1', '2', 'B']
  rows = [x for x in text.splitlines() if x.startswith('  params/')]
  assert len(rows) == 2 and len(set(map(len, rows))) == 1             # the last column ends alike
  assert line(text, 'latest,') == ['20', *line(text, 'latest,')[1:]] and 'best -error' in text


def test_every_array_and_every_key_is_in_the_text(trained):
  d = inspect.describe(trained)
  text = inspect.text(d)
  for name in (*d['arrays'], *d['config'], *d['versions']):
    assert re.search(rf'^ +(\* +)?{re.escape(name)} ', text, re.MULTILINE), name


def test_the_file_holds_what_describe_returns(trained, tmp_path, capsys):
  path = str(tmp_path / 'out.json')
  inspect.run(trained, '10', path)
  with open(path, encoding='utf-8') as f:
    assert json.load(f) == inspect.describe(trained, '10')
  assert capsys.readouterr().out == inspect.text(inspect.describe(trained, '10')) + '\n'
  assert os.listdir(tmp_path) == ['out.json']


def test_the_folder_of_the_file_is_made_or_refused(trained, tmp_path):
  inspect.run(trained, '10', str(tmp_path / 'a' / 'b' / 'out.json'))
  assert (tmp_path / 'a' / 'b' / 'out.json').exists()
  for path in (tmp_path / 'a' / 'b' / 'out.json' / 'c.json', tmp_path / 'a'):
    with pytest.raises(ConfigError, match=f'--output={re.escape(str(path))}: '):
      inspect.run(trained, '10', str(path))


def test_nothing_is_changed_and_no_device_is_touched(trained, tmp_path):
  def files():
    return {p: os.stat(p).st_mtime_ns for f, _, names in os.walk(trained) for p in (os.path.join(f, n) for n in names)}
  before = files()
  code = ('import sys; from lab import inspect; inspect.run(sys.argv[1], "best", sys.argv[2]);'
          'from jax._src import xla_bridge; assert not xla_bridge._backends')
  subprocess.run([sys.executable, '-c', code, trained, str(tmp_path / 'out.json')], cwd=ROOT, check=True,
                 env={**os.environ, 'JAX_PLATFORMS': 'nothing'}, stdout=subprocess.DEVNULL)
  assert (tmp_path / 'out.json').exists() and files() == before
