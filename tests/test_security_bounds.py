"""Input from elsewhere takes bounded memory; runs keep no secret, reach no network and write through no link."""

import gzip
import io
import json
import os
import socket
import struct
import tracemalloc

import numpy as np
import pytest
from data_pipelines import (DataError, arc_raw, books_raw, coco, corpus, documents, images, mnist, pipeline, prepared,
                            text_inputs, tokens)

from lab import (checkpoint, config as configs, inspect, ledger, links, locks, logs, page, plot, plot_plan, points,
                 predict, sweep, train)
from lab.systems.language import weights
from lab.task import ConfigError
from tests import toy

MIB = 1 << 20
ARRAYS, OBJECTS = '[' * 100_000, '{"a":' * 100_000


# texts that are nested, long or packed

def put(folder, name, text):
  path = os.path.join(folder, name)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w', encoding='utf-8') as f:
    f.write(text + '\n')
  return path


def plan(folder):
  path = put(folder, 'p.toml', f'root = "{folder}/runs"\noutput = "{folder}/out"\n[[picture]]\nname = "x"\n'
             '[[picture.panel]]\nmetrics = ["a"]')
  put(folder, 'runs/one/metrics.jsonl', '{"step": 1, "split": "eval", "a": 1.0}')
  return ['lab.plot', path]


# file, what reads it, what it raises
READERS = {
    'of_run': ('config.json', lambda d: configs.of_run(d), ConfigError),
    'meta': ('checkpoints/5/meta/metadata', lambda d: checkpoint.Checkpoints(d).meta(5), checkpoint.CheckpointError),
    'rows': ('metrics.jsonl', lambda d: plot.rows(d), ConfigError),
    'plan': ('runs/one/config.json', lambda d: plot_plan.run(plan(d)), ConfigError),
    'sweep': ('result.json', lambda d: sweep.state(points.Run('x', d, {}, 0)), ConfigError),
    'manifest': ('manifest.json', lambda d: prepared.manifest(d), DataError),
    'corpus': ('a.jsonl', lambda d: list(documents.read(d)), DataError),
    'books': ('a.jsonl', lambda d: list(books_raw.read(d)), DataError),
    'arc': ('a.json', lambda d: list(arc_raw.read(arc_raw.files(d)[0])), DataError),
    'tokenizer': ('tokenizer.json', lambda d: tokens.load(d), DataError),
}


@pytest.mark.parametrize('text', [ARRAYS, OBJECTS], ids=['arrays', 'objects'])
@pytest.mark.parametrize('reader', READERS)
def test_deep_json_is_told(tmp_path, reader, text):
  name, read, error = READERS[reader]
  put(tmp_path, name, text)
  with pytest.raises(error) as e:
    read(str(tmp_path))
  assert str(tmp_path) in str(e.value) and len(str(e.value)) < 1000


@pytest.mark.parametrize('text', [ARRAYS, OBJECTS], ids=['arrays', 'objects'])
def test_deep_json_hides_nothing_else_of_a_run(tmp_path, text):
  row = '{"step": 1, "split": "eval", "loss": 1.0}'
  for name in ('config.json', 'environment.json', 'memory.json', 'ledger.jsonl', 'checkpoints/5/meta/metadata'):
    put(tmp_path, name, text)
  put(tmp_path, 'metrics.jsonl', row)
  folder = str(tmp_path)
  with open(page.write(folder), encoding='utf-8') as f:
    assert 'config.json can&#x27;t be read' in f.read()
  assert inspect.describe(folder)['step'] == 5 and ledger.summary(folder) == {} and plot.usual(folder, ['eval/loss'])
  put(tmp_path, 'metrics.jsonl', f'{row}\n{text}')
  logs.cut(folder, 9)
  assert logs.rows(folder) == [json.loads(row)]


def test_deep_toml_and_weights_are_told(tmp_path, capsys):
  from safetensors.numpy import save_file
  with pytest.raises(ConfigError, match='not TOML'):
    points.load(put(tmp_path, 's.toml', f'config = {ARRAYS}'))
  save_file({'w': np.zeros(2, np.float32)}, str(tmp_path / 'w.safetensors'))
  put(tmp_path, 'config.json', ARRAYS)
  assert weights.main(['import', f'--from={tmp_path}/w.safetensors', f'--to={tmp_path}/o.safetensors']) == 3
  assert 'config.json' in capsys.readouterr().err
  save_file({'w': np.zeros(2, np.float32)}, str(tmp_path / 'w.safetensors'),
            {'width': '-' * 100_000 + '1', 'layers': '1', 'heads': '1', 'vocabulary': '9'})
  assert weights.main(['export', f'--from={tmp_path}/w.safetensors', f'--to={tmp_path}/out']) == 2


@pytest.mark.parametrize('name, read', [
    ('a.txt', lambda p: list(documents.read(p))), ('a.jsonl', lambda p: list(documents.read(p))),
    ('a.txt', lambda p: list(books_raw.read(p))), ('a.jsonl', lambda p: list(books_raw.read(p))),
    ('vocab.txt', tokens.load), ('a.json', lambda p: list(arc_raw.read(arc_raw.files(p)[0]))),
    ('a.jsonl', lambda p: list(arc_raw.read(arc_raw.files(p)[0])))])
def test_long_texts_are_refused_before_they_are_read_whole(tmp_path, monkeypatch, name, read):
  monkeypatch.setattr(documents, 'BYTES_MAX', MIB)
  monkeypatch.setattr(arc_raw, 'BYTES_MAX', MIB)
  path = str(tmp_path / name)
  with open(path, 'wb') as f:
    f.truncate(64 * MIB)                   # sparse: zeros in a single line
  tracemalloc.start()
  try:
    with pytest.raises(DataError, match=f'more than {MIB} bytes') as e:
      read(path)
    assert tracemalloc.get_traced_memory()[1] < 16 * MIB
  finally:
    tracemalloc.stop()
  assert path in str(e.value)


def test_a_long_line_to_predict_is_left_out(tmp_path, monkeypatch):
  monkeypatch.setattr(text_inputs, '_LINE', 9)
  path = str(tmp_path / 'a.txt')
  with open(path, 'wb') as f:
    f.truncate(64 * MIB)
  tracemalloc.start()
  try:
    found = list(text_inputs.texts(path, object(), 'score', 4))
    assert tracemalloc.get_traced_memory()[1] < 16 * MIB
  finally:
    tracemalloc.stop()
  assert [str(e) for e in found] == [f'{path}:1: more than 9 characters in a line; the rest of the file is not read']


def test_gzip_bombs_are_not_unpacked(tmp_path, monkeypatch):
  monkeypatch.setattr(arc_raw, 'BYTES_MAX', MIB)
  bomb = gzip.compress(bytes(64 * MIB), mtime=0)
  assert len(bomb) < MIB
  for name in ('a.json.gz', 'a.jsonl.gz'):
    (tmp_path / name).write_bytes(bomb)
  header = struct.pack('>4I', 0x803, 1, 28, 28)
  (tmp_path / 'train-images-idx3-ubyte.gz').write_bytes(gzip.compress(header + bytes(64 * MIB), mtime=0))
  (tmp_path / 'train-labels-idx1-ubyte.gz').write_bytes(gzip.compress(struct.pack('>2I', 0x801, 1) + b'\0', mtime=0))
  tracemalloc.start()
  try:
    for name in ('a.json.gz', 'a.jsonl.gz'):
      with pytest.raises(DataError, match=f'{name}.* more than {MIB} bytes'):
        list(arc_raw.values(str(tmp_path / name)))
    with pytest.raises(DataError, match='garbage behind the end'):
      mnist.read(str(tmp_path))
    assert tracemalloc.get_traced_memory()[1] < 16 * MIB
  finally:
    tracemalloc.stop()


@pytest.mark.parametrize('kind', ['jpeg', 'png'])
def test_huge_pictures_in_records_are_refused_before_they_are_decoded(kind):
  from PIL import Image
  tf, out = pipeline.tensorflow(), io.BytesIO()
  Image.new('RGB' if kind == 'jpeg' else '1', (8, 8)).save(out, kind)
  data, big = bytearray(out.getvalue()), 65_500
  at = data.index(b'\xff\xc0') + 5 if kind == 'jpeg' else 16         # where height, or width, is written
  data[at:at + (4 if kind == 'jpeg' else 8)] = struct.pack('>HH' if kind == 'jpeg' else '>II', big, big)
  assert big ** 2 > images.PIXELS_MAX
  with pytest.raises(tf.errors.InvalidArgumentError, match='(?i)too large|invalid'):
    (tf.io.decode_jpeg if kind == 'jpeg' else tf.io.decode_png)(bytes(data), channels=3 if kind == 'jpeg' else 1)
  assert 'JPEG' in coco.pictures.problem(bytes(data))
  with pytest.raises(ValueError, match='too large'):
    (images.decode if kind == 'jpeg' else images.decode_mask)(bytes(data))


# secrets and sockets

def listening():
  """Sockets of this process that wait for connections."""
  waiting = set()
  for table in ('tcp', 'tcp6'):
    with open(f'/proc/self/net/{table}', encoding='ascii') as f:
      waiting |= {line.split()[9] for line in f.readlines()[1:] if line.split()[3] == '0A'}
  mine = set()
  for fd in os.listdir('/proc/self/fd'):
    try:
      mine.add(os.readlink(f'/proc/self/fd/{fd}'))
    except FileNotFoundError:
      pass
  return {inode for inode in waiting if f'socket:[{inode}]' in mine}


def test_a_listening_socket_is_noticed():
  before = listening()
  with socket.create_server(('127.0.0.1', 0)):
    assert len(listening() - before) == 1


SECRETS = {'WANDB_API_KEY': 'w4ndb-53cr3t', 'AWS_SECRET_ACCESS_KEY': 'aw5/53cr3t+key', 'HF_TOKEN': 'hf_53cr3tTOKEN',
           'GITHUB_TOKEN': 'ghp_53cr3tTOKEN', 'HTTPS_PROXY': 'http://me:pr0xy-53cr3t@proxy:3128'}


def test_a_run_keeps_no_secret_and_needs_no_network(toy_config, tmp_path, monkeypatch, capfd, caplog):
  for name, value in SECRETS.items():
    monkeypatch.setenv(name, value)
  reached = []
  monkeypatch.setattr(socket.socket, 'connect', lambda self, address: reached.append(address))
  before, workdir = listening(), str(tmp_path / 'run')
  toy_config.total_steps, toy_config.profile.start, toy_config.profile.steps = 6, 2, 2
  batch = {'x': np.zeros((1, 4), np.float32), 'write': print}
  task = toy.make_task(toy_config)._replace(inputs=lambda source, output, stop: iter([batch]))
  train.run(task, toy_config, workdir)
  logs.page(workdir)
  inspect.run(workdir, output=f'{workdir}/inspect.json')
  predict.run(task, toy_config, workdir, 'latest', 'x', f'{workdir}/predictions')
  assert listening() == before and not reached
  names = [os.path.join(f, n) for f, _, found in os.walk(workdir) for n in found]
  for name in ('environment.json', 'run.html', 'inspect.json', 'predictions/predictions.jsonl',
               'checkpoints/6/meta/metadata'):
    assert os.path.join(workdir, name) in names
  assert any('/tensorboard/' in n for n in names)
  told = ''.join(capfd.readouterr()) + caplog.text
  assert 'total_steps' in told
  for value in SECRETS.values():
    assert value not in told
    for name in names:
      with open(name, 'rb') as f:
        data = f.read()
      data = gzip.decompress(data) if name.endswith('.gz') else data
      assert value.encode() not in data and value.encode() not in name.encode(), name
  with open(f'{workdir}/environment.json', encoding='utf-8') as f:
    assert set(json.load(f)) == {'command', 'python', 'platform', 'devices', 'processes', 'versions', 'commit'}


# links

@pytest.fixture
def victim(tmp_path):
  """A file outside of every workdir, which has to stay as it is."""
  path = tmp_path / 'victim'
  path.write_text('mine')
  yield str(path)
  assert path.read_text() == 'mine'


REPLACED = [n + end for n in ('config.json', 'environment.json', 'memory.json', 'parameters.txt', 'run.html')
            for end in ('', '.new')] + ['.events', 'pictures/0000002_x.png', 'pictures/0000002_x.gif',
                                        'pictures/0000002_x.txt', 'pictures/0000002_x.txt.new']


def test_a_run_replaces_links_and_writes_through_none(toy_config, tmp_path, victim):
  workdir = tmp_path / 'run'
  (workdir / 'pictures').mkdir(parents=True)
  for name in REPLACED:
    os.symlink(victim, workdir / name)
  toy_config.total_steps, toy_config.optim.warmup_steps = 2, 0
  train.run(toy.make_task(toy_config), toy_config, str(workdir))
  logs.page(str(workdir))
  film = np.zeros((2, 4, 4, 3), np.uint8)
  logs.write_pictures(str(workdir / 'pictures'), {'x': 'a text'}, '0000002_')
  logs.write_pictures(str(workdir / 'pictures'), {'x': film}, '0000002_')
  logs.write_pictures(str(workdir / 'pictures'), {'x': film[0]}, '0000002_')
  toy_config.total_steps = 4
  train.run(toy.make_task(toy_config), toy_config, str(workdir))       # which cuts what was logged after step 2
  left = {n for n in REPLACED if os.path.islink(workdir / n)}
  assert left <= {'.events'} and (workdir / 'config.json').is_file()


@pytest.mark.parametrize('write', [
    lambda p: logs.write_atomically(p, 'x'), lambda p: links.fresh(p + '.new').close(),
    lambda p: plot.save(plot.lines({'a': ([0, 1], [0, 1])}, x_label='x', y_label='y', title=''), p)])
def test_files_that_replace_others_are_new(tmp_path, victim, write):
  for end in ('.new', '.svg', '.svg.new', '.png', '.png.new', ''):
    os.symlink(victim, f'{tmp_path}/x{end}')
  write(f'{tmp_path}/x')


@pytest.mark.parametrize('name, write', [
    ('.lock', lambda d: locks.claim(d)), ('ledger.jsonl', lambda d: ledger.Ledger(d)),
    ('metrics.jsonl', lambda d: links.append(f'{d}/metrics.jsonl')),
    ('.worker', lambda d: sweep._claim(points.Run('x', d, {}, 0)))])
def test_files_that_grow_are_no_links(tmp_path, victim, name, write):
  (tmp_path / 'run').mkdir()
  for target in (victim, str(tmp_path / 'none')):
    os.symlink(target, tmp_path / 'run' / name)
    with pytest.raises(ConfigError, match=f'{name} is a link, through which nothing is written'):
      write(str(tmp_path / 'run'))
    os.unlink(tmp_path / 'run' / name)
  assert not (tmp_path / 'none').exists()
  write(str(tmp_path / 'run')).close() if name != 'ledger.jsonl' else ledger.Ledger(str(tmp_path / 'run')).close()


@pytest.mark.parametrize('name', ['metrics.jsonl', 'timings.jsonl', 'ledger.jsonl'])
def test_a_run_whose_log_is_a_link_does_not_start(toy_config, tmp_path, victim, name):
  (tmp_path / 'run').mkdir()
  os.symlink(victim, tmp_path / 'run' / name)
  if name != 'ledger.jsonl':             # a log is cut back first, which puts a new file in its place
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'run'))
    assert not os.path.islink(tmp_path / 'run' / name)
    return
  with pytest.raises(ConfigError, match='is a link'):
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'run'))


def test_preparing_writes_through_no_link(tmp_path, victim):
  out = tmp_path / 'out'
  out.mkdir()
  elsewhere = tmp_path / 'elsewhere'
  elsewhere.mkdir()
  make = lambda: corpus.write_ids(str(out), {'train': [np.arange(5, 25, dtype=np.int32)]}, vocabulary=99, length=8,
                                  special={})
  os.symlink(victim, out / '.lock')
  with pytest.raises(DataError, match='cannot write there'):
    make()
  os.unlink(out / '.lock')
  os.symlink(elsewhere, out / '.incomplete')
  assert os.path.realpath(make()).startswith(str(out)) and not list(elsewhere.iterdir())
