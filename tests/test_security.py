"""What comes from elsewhere is data: never run, never a way out of its folder, never more memory than it may take."""

import ast
import json
import os
import pickle
import re
import shlex
import zipfile

import numpy as np
import pytest
from data_pipelines import DataError, clips, corpus, grid_inputs, pipeline, prepare, prepared, tokens, tree_inputs

from lab import artifact, config as configs, graft, inspect, main, page, plot_plan, points, sweep, task as tasks
from lab.checkpoint import CheckpointError, Checkpoints
from lab.systems.language import weights as language_weights
from lab.systems.pose import weights as pose_weights
from lab.task import ConfigError
from tests import toy
from tests.conftest import ROOT
from tests.test_house import PRODUCT, tree

DEEP = '[' * 100_000
EXPRESSION = "__import__('os').mkdir({!r})"


@pytest.fixture
def canary(tmp_path):
  """A folder's name; whatever makes the folder was run."""
  path = str(tmp_path / 'canary')
  yield path
  assert not os.path.exists(path), 'what a file said was run'


class Bomb:
  """An object that, unpickled, makes a folder."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (self.path,)


def said(capsys):
  """The one line of an error."""
  err = capsys.readouterr().err
  assert err.count('\n') == 1, err
  return err


# nothing in the product runs what it reads, extracts, downloads or listens

FORBIDDEN = {     # a module, a name that is called, an attribute, or a keyword with its value
    'pickles': r'import (c?[pP]ickle|dill|joblib|cloudpickle|marshal|shelve|torch)\b|(np|numpy)\.load\(|allow_pickle',
    'YAML': r'import yaml\b|import ruamel\b',
    'evaluation': r'(?<!\.)\b(eval|exec|compile|__import__|execfile)\(|import (code|runpy|pty|imp)\b',
    'shells': r'shell=|\bos\.(system|popen|exec\w+|spawn\w+|startfile)\(',
    'archives': r'import (tarfile|zipfile|py7zr|rarfile)\b|\.(unpack_archive|extract(all)?|download_and_extract)\(',
    'network': r'import (socket|ssl|http|ftplib|smtplib|telnetlib|xmlrpc|requests|httpx|aiohttp|asyncio|wget|'
               r'socketserver|huggingface_hub)\b|import urllib\.(?!parse\b)|\.(download|urlopen|urlretrieve)\(',
    'servers': r'\.(start_server|serve_forever|bind)\(|create_perfetto_link|experimental\.server',
    'guessable names': r'\.mktemp\(|gettempdir\('}


def code(parsed):
  """The code as text: no comment, no docstring, imports one by one, keywords without blanks."""
  lines = []
  for node in ast.walk(parsed):
    if isinstance(node, ast.Import):
      lines += [f'import {a.name}' for a in node.names]
    elif isinstance(node, ast.ImportFrom):
      lines += [f'import {node.module}'] + [f'import {node.module}.{a.name}' for a in node.names]
    elif isinstance(node, ast.Call):
      lines += [f'{ast.unparse(node.func)}('] + [f'{k.arg}={ast.unparse(k.value)}' for k in node.keywords]
    elif isinstance(node, ast.Attribute):
      lines.append(ast.unparse(node))
  return '\n'.join(lines)


@pytest.mark.parametrize('kind', FORBIDDEN)
def test_the_product_has_no_door_for(kind):
  for path in PRODUCT:
    found = re.search(FORBIDDEN[kind], code(tree(path)))
    assert not found, f'{path}: {found[0]}'


@pytest.mark.parametrize('kind, text', [
    ('pickles', 'import pickle'), ('pickles', 'from torch import load'), ('pickles', 'np.load(path)'),
    ('YAML', 'import yaml'), ('evaluation', 'eval (x)'), ('evaluation', '__import__("os")'),
    ('shells', 'os.system(x)'), ('shells', 'f(x, shell = 1)'), ('archives', 'import tarfile'),
    ('archives', 'shutil.unpack_archive(x)'), ('archives', 'z.extractall(x)'), ('network', 'import socket'),
    ('network', 'from urllib.request import urlopen'), ('network', 'from urllib import request'),
    ('servers', 'jax.profiler.start_server(1)'), ('guessable names', 'tempfile.mktemp()')])
def test_a_door_would_be_found(kind, text):
  assert re.search(FORBIDDEN[kind], code(ast.parse(text)))


# who may do what is dangerous: the named file of the user, a program with its words, a name of our own
DOORS = {r'importlib\.import_module\(': {'lab/task.py', 'data_pipelines/prepare.py'},
         r'exec_module\(': {'lab/config.py'}, r'os\.execv\(': set(),
         r'subprocess\.\w+\(': {'lab/logs.py', 'lab/sweep.py', 'lab/workers.py'},
         r'\bsave_file\(': {'lab/systems/language/weights.py', 'lab/systems/pose/weights.py'}}


@pytest.mark.parametrize('call', DOORS)
def test_each_danger_has_one_door(call):
  assert {path for path in PRODUCT if re.search(call, code(tree(path)))} == DOORS[call]


def test_the_core_writes_through_one_door():
  for path in (p for p in PRODUCT if re.fullmatch(r'lab/\w+\.py', p) and p != 'lab/links.py'):
    for node in ast.walk(tree(path)):
      if isinstance(node, ast.Call) and ast.unparse(node.func) == 'open':
        modes = [a.value for a in node.args[1:2]] + [k.value.value for k in node.keywords if k.arg == 'mode']
        assert all(m in ('r', 'rb') for m in modes), f'{path}:{node.lineno} writes; the door is lab/links.py'


# pickles

def disguised(folder, canary):
  """Paths of one pickle in every dress that an array or weights may wear."""
  bomb = Bomb(canary)
  pickle.loads(pickle.dumps(bomb))
  os.rmdir(canary)                                     # so the canary does sing
  for name in ('w.safetensors', 'w.pth', 'w.pkl', 'w.ckpt'):
    (folder / name).write_bytes(pickle.dumps(bomb))
  for name in ('zip.pth', 'zip.safetensors'):          # as PyTorch saves
    with zipfile.ZipFile(folder / name, 'w') as z:
      z.writestr('archive/data.pkl', pickle.dumps(bomb))
      z.writestr('archive/version', '3\n')
  np.save(folder / 'w.npy', np.array([bomb], object), allow_pickle=True)
  np.savez(folder / 'w.npz', w=np.array([bomb], object))
  return sorted(str(p) for p in folder.iterdir())


def test_weights_are_never_unpickled(tmp_path, canary, capsys):
  paths = disguised(tmp_path, canary)
  assert len(paths) == 8
  for path in paths:
    with pytest.raises(CheckpointError, match='not a safetensors file|a file of another kind') as e:
      graft.graft({'w': np.zeros(3)}, path)
    assert path in str(e.value) and e.value.exit_code == 5
    assert pose_weights.main([path, str(tmp_path / 'out')]) == 3 and path in said(capsys)
    assert language_weights.main(['import', f'--from={path}', f'--to={tmp_path}/o.safetensors']) == 3
    assert path in said(capsys)


def test_arrays_are_never_unpickled(tmp_path, canary, capsys):
  for path in disguised(tmp_path, canary):
    with pytest.raises(DataError):
      clips.array(path)
    if path.endswith(('.npy', '.npz')):
      assert prepare.main(['prepare', 'clips', f'--raw_dir={path}', f'--out_dir={tmp_path}/out']) == 3
      assert path in said(capsys)
    with pytest.raises(DataError):
      tokens.load(path)


def test_no_file_of_a_checkpoint_is_unpickled(tmp_path, canary, toy_config):
  from tests.test_checkpoint import make_mesh, save, state_of
  state, like = state_of(toy_config, make_mesh('1'))
  store = Checkpoints(str(tmp_path / 'run'), toy_config)
  save(store, 5, state=state)
  paths = sorted(os.path.join(f, n) for f, _, names in os.walk(store.path(5)) for n in names)
  assert len(paths) > 5
  good = {}
  for path in paths:
    with open(path, 'rb') as f:
      good[path] = f.read()
    with open(path, 'wb') as f:
      f.write(pickle.dumps(Bomb(canary)))
    for read in (lambda: store.resume(like), lambda: store.arrays(5), lambda: inspect.describe(str(tmp_path / 'run'))):
      try:
        read()
      except Exception as e:         # whatever it says, it ran nothing
        assert not os.path.exists(canary), e
    for back in good:                # a broken step is set aside
      aside = back.replace(f'{os.sep}5{os.sep}', f'{os.sep}broken-5{os.sep}')
      if os.path.exists(aside):
        os.rename(os.path.join(store.folder, 'broken-5'), store.path(5))
        break
    with open(path, 'wb') as f:
      f.write(good[path])
  assert int(store.resume(like).step) == 5
  store.close()


@pytest.fixture
def ids(tmp_path):
  """A prepared corpus of ids."""
  return corpus.write_ids(str(tmp_path / 'ids'), {'train': [np.arange(5, 105, dtype=np.int32)]}, vocabulary=200,
                          length=8, special={'eos': 0})


def test_metadata_of_data_sets_import_nothing(ids, tmp_path, canary, monkeypatch):
  (tmp_path / 'evil_features.py').write_text(f'import os\nos.mkdir({canary!r})\n')
  monkeypatch.syspath_prepend(tmp_path)
  for content in (pickle.dumps(Bomb(canary)), json.dumps({'type': 'evil_features.Evil', 'pythonClassName':
                                                          'evil_features.Evil'}).encode()):
    for name in ('features.json', 'dataset_info.json'):
      with open(os.path.join(ids, name), 'wb') as f:
        f.write(content)
    source = corpus.source(ids, 'train', 'gpt', length=8)
    batch = next(iter(pipeline.Batches(source, configs.core().input, 2, range(2), train=True)))
    assert batch['ids'].shape == (2, 8) and not list(prepared.problems(ids, corpus.check))


# names and values of files are never code

@pytest.mark.parametrize('key', ['optim.learning_rate', 'total_steps', 'input.cache', 'init_parts', 'init_from'])
def test_overrides_are_literals(key, canary):
  config = toy.get_config()
  value = EXPRESSION.format(canary)
  for text in (value, f'[{value}]', f'({value},)', f'lambda: {value}', f'[{value} for _ in (1,)]'):
    if key == 'init_from':
      configs.override(config, [f'--config.{key}={text}'])
      assert config.init_from == text
    else:
      with pytest.raises(ConfigError, match='expected'):
        configs.override(config, [f'--config.{key}={text}'])
  for text in (DEEP, '-' * 100_000 + '1', '(' * 300 + ')' * 300):
    with pytest.raises(ConfigError, match='expected float'):
      configs.override(config, [f'--config.optim.learning_rate={text}'])


def foreign(tmp_path, monkeypatch, canary, **content):
  """A workdir from elsewhere, with a module in it; the current folder is the one above, as in runs/foreign."""
  workdir = tmp_path / 'foreign'
  workdir.mkdir(exist_ok=True)
  (workdir / 'evil.py').write_text(f'import os\nos.mkdir({canary!r})\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (workdir / 'config.json').write_text(json.dumps(content))
  return str(workdir)


@pytest.mark.parametrize('name', ['foreign.evil', 'lab.systems.foreign.evil', 'os', 'tests.toy',
                                  'lab.systems.pose.task.x', 'lab.systems.pose..task', '', 3, None,
                                  ['lab.systems.pose.task'], '../foreign/evil'])
def test_a_run_imports_no_module_by_name(tmp_path, monkeypatch, canary, capsys, name):
  workdir = foreign(tmp_path, monkeypatch, canary, task=name)
  for mode in (['--mode=eval', '--input='], ['--mode=predict', '--input=x']):
    assert main.main(['lab', f'--workdir={workdir}', *mode]) == 2
    assert 'config.json: task = ' in said(capsys)


def test_a_recipe_that_the_user_names_may_have_any_task(tmp_path, monkeypatch):
  made = tmp_path / 'made'
  foreign(tmp_path, monkeypatch, str(made))
  config = toy.get_config()
  config.task = 'foreign.evil'
  with pytest.raises(AttributeError):                    # imported, and it has no make_task
    tasks.load(config)
  assert made.exists()


def test_a_configuration_of_another_kind_is_one_line(tmp_path, monkeypatch, canary, capsys):
  good = json.loads(configs.core().to_json()) | {'task': 'lab.systems.pose.task'}
  wrong = {**good, 'optim': {**good['optim'], 'learning_rate': EXPRESSION.format(canary)}}
  for content in ({'task': good['task']}, good, wrong, {**good, 'total_steps': '9'}, {**good, 'optim': 3}):
    workdir = foreign(tmp_path, monkeypatch, canary, **content)
    assert main.main(['lab', f'--workdir={workdir}', '--mode=predict', '--input=x']) == 2
    assert 'config' in said(capsys)


def test_sweeps_and_plans_are_data(tmp_path, canary, monkeypatch, capsys):
  value, shell = EXPRESSION.format(canary), 'x; mkdir canary `mkdir canary` $(mkdir canary)\n--workdir=/'
  monkeypatch.chdir(tmp_path)
  path = tmp_path / 's.toml'
  path.write_text(f'config = "{ROOT}/tests/toy.py"\nworkdir = "{tmp_path}/runs"\nmetric = "-error"\n[values]\n'
                  f'"optim.learning_rate" = [{json.dumps(value)}]\n')
  assert sweep.main(['sweep', str(path)]) == 2 and 'expected float' in said(capsys)
  run = points.Run(points.name({'data.dir': shell}), str(tmp_path / shell), {'data.dir': shell}, 0)
  words = sweep.command(points.Sweep('tests/toy.py', '', 'error', True, [0], {'init_from': shell}, []), run)
  assert shlex.split(shlex.join(words)) == words and f'--config.data.dir={shell}' in words
  assert all(w.startswith(('--config', '--workdir=')) for w in words[3:])
  plan = tmp_path / 'p.toml'
  for where, text in (('root', DEEP), ('name', '"../../x"'), ('x', f'"{value}"')):
    plan.write_text(f'output = "o"\nroot = "r"\n[[picture]]\n{where} = {text}\n[[picture.panel]]\nmetrics = ["a"]\n')
    with pytest.raises(ConfigError):
      plot_plan.read(str(plan))


def test_inputs_are_texts_or_json(tmp_path, canary):
  value, stop = EXPRESSION.format(canary), lambda: False
  for text in (f'[{value}]', f'[[{value}]]', '{"a": ' + value + '}', DEEP):
    for verb in ('rebuild', 'decode', 'interpolate'):
      found = list(grid_inputs.grids(text, str(tmp_path), stop, 5, verb, (4, 9)))
      assert found and all(isinstance(item, DataError) for item in found)
    for verb in ('interpolate', 'decode'):
      path = tmp_path / 'x.json'
      path.write_text(text)
      found = list(tree_inputs.texts(str(path), verb, (20, 8, 4), (8, 8, 8), (4, 4, 4, 4)))
      assert found and all(isinstance(item, DataError) for item in found)


# names stay in their folder

OUTSIDE = ('../../x', '/etc/x', '..', 'a/../../x', 'a/b', '\\..\\x', 'x\0y', '.')


def test_ids_name_files_of_the_output_only(tmp_path):
  task = {'train': [{'input': [[1]], 'output': [[2]]}]}
  path, out = tmp_path / 'in' / 'x.json', tmp_path / 'a' / 'b' / 'out'
  path.parent.mkdir()
  path.write_text(json.dumps({name: task for name in OUTSIDE if name.isprintable()}))
  before = {str(p) for p in tmp_path.rglob('*')}
  for batch in grid_inputs.grids(str(path), str(out), lambda: False, 5, 'rebuild', (4, 9)):
    batch['write'](np.zeros((2, 2, 3), np.uint8))
  made = {str(p) for p in tmp_path.rglob('*') if p.is_file()} - before
  assert len(made) == 14 and all(os.path.dirname(p) == str(out) for p in made)


@pytest.mark.parametrize('name', OUTSIDE)
def test_names_of_runs_and_points_are_no_paths(name, tmp_path):
  folder = points.name({'data.dir': name, name: 1})
  assert os.path.basename(folder) == folder and folder not in ('.', '..') and '\0' not in folder
  assert points.parse(folder) == {'data.dir': name, name: 1}
  if '..' in name.split('/') or name.startswith('/') or name == '.':
    for text in (f'{name}/best/1', f'a/{name}/best/1', f'{name}/best', f'a/best/{name}'):
      assert artifact.parse(text) is None


@pytest.mark.parametrize('name', [n for n in OUTSIDE if '/' in n or set(n) == {'.'}] + [''])
@pytest.mark.parametrize('part', ['shards', 'beside'])
def test_a_manifest_names_files_of_its_folder(ids, name, part):
  path = os.path.join(ids, prepared.MANIFEST)
  found = prepared.manifest(ids)
  (found['splits']['train']['shards'] if part == 'shards' else found.setdefault('beside', {}))[name] = '0' * 64
  with open(path, 'w', encoding='utf-8') as f:
    json.dump(found, f)
  with pytest.raises(DataError, match='is no name of a file in its folder'):
    corpus.source(ids, 'train', 'gpt', length=8)


@pytest.mark.parametrize('splits', [3, [1], {'train': 3}, {'train': {}}, {'train': {'shards': 3}},
                                    {'train': {'shards': [3]}}])
def test_a_manifest_of_another_form_is_told(ids, splits):
  with open(os.path.join(ids, prepared.MANIFEST), 'w', encoding='utf-8') as f:
    json.dump({'dataset': 'corpus', 'options': {}, 'splits': splits}, f)
  with pytest.raises(DataError, match='manifest.json is unreadable'):
    prepared.manifest(ids)


def test_a_page_shows_no_file_from_elsewhere_and_no_code(tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('{"task": "the secret"}')
  run = tmp_path / 'run'
  (run / 'pictures').mkdir(parents=True)
  (run / 'metrics.jsonl').write_text('')
  (run / 'pictures' / '0000001_text.txt').write_text('</pre><script>alert(1)</script>')
  for name in ('config.json', 'environment.json', 'memory.json', 'parameters.txt', 'pictures/0000001_other.txt'):
    os.symlink(secret, run / name)
  with open(page.write(str(run)), encoding='utf-8') as f:
    shown = f.read()
  assert 'the secret' not in shown and '<script' not in shown and '&lt;script&gt;alert(1)' in shown
  assert 'parameters.txt can&#x27;t be read' in shown.replace("can't", 'can&#x27;t')
