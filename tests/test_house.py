"""The house: who may import whom, one door a library, short files, no key that nothing reads."""

import ast
import glob
import importlib
import os
import re

import pytest

from lab import config as core

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FILES = sorted(os.path.relpath(p, ROOT) for folder in ('lab', 'data_pipelines', 'configs', 'tests', 'benchmarks')
               for p in glob.glob(os.path.join(ROOT, folder, '**', '*.py'), recursive=True))
PRODUCT = [f for f in FILES if f.startswith(('lab/', 'data_pipelines/', 'configs/'))]
SYSTEMS = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(ROOT, 'lab/systems/*/task.py')))

# room (regex on the path) -> modules of ours that it may import
ROOMS = (
    (r'data_pipelines/', ('data_pipelines',)),
    (r'lab/nn/', ('lab.nn',)),
    (r'lab/systems/(\w+)/(?:weights|compress)\.py',                                                       # programs
     ('lab.task', 'lab.config', 'lab.checkpoint', 'lab.checksums', 'data_pipelines', r'lab.systems.\1')),
    (r'lab/systems/(\w+)/', ('lab.task', 'lab.metrics', 'lab.config', 'lab.nn', 'data_pipelines', r'lab.systems.\1')),
    (r'lab/(task|metrics|config)\.py', ('lab.task', 'lab.metrics', 'data_pipelines')),
    (r'lab/main\.py', ('lab',)),
    (r'lab/\w+\.py', ('lab', 'data_pipelines')),
    (r'configs/', ('configs', 'lab.systems', 'lab.task')),
)
# library -> where its door is (regex)
DOORS = {
    'absl': r'lab/main\.py|data_pipelines/prepare\.py',
    'clu': r'lab/logs\.py',
    'cv2': r'data_pipelines/images\.py',
    'flax': r'lab/nn/|lab/systems/\w+/(model|simvp|pools|lattice|memory)\.py',
    'fsspec': r'lab/files\.py',
    'gcsfs': r'lab/files\.py',
    'jax': r'lab/|configs/',
    'optax': r'lab/(optim|schedules)\.py',
    'orbax': r'lab/checkpoint\.py',
    'matplotlib': r'lab/plot\.py',
    'PIL': r'data_pipelines/|lab/logs\.py',
    'pyarrow': r'data_pipelines/glue\.py',
    'pycocotools': r'lab/systems/pose/score\.py|data_pipelines/coco_raw\.py',
    'safetensors': r'lab/(graft|systems/(pose|language)/weights)\.py',
    'scipy': r'lab/systems/pose/assemble\.py',
    'tensorboard': r'lab/logs\.py',
    'tensorflow': r'data_pipelines/',
    'tensorflow_datasets': r'data_pipelines/',
    'tensorstore': r'lab/files\.py',
    'tokenizers': r'data_pipelines/tokens\.py',
}
# slow
LATE = ('tensorflow', 'tensorflow_datasets', 'tokenizers', 'clu', 'cv2', 'matplotlib', 'PIL', 'pyarrow', 'tensorboard',
        'fsspec', 'gcsfs', 'tensorstore')


def tree(path):
  with open(os.path.join(ROOT, path), encoding='utf-8') as f:
    return ast.parse(f.read())


def imports(path):
  """(dotted module, whether at the top of the file) of everything a file imports."""
  parsed = tree(path)
  top = set(map(id, parsed.body))
  for node in ast.walk(parsed):
    if isinstance(node, ast.Import):
      yield from ((a.name, id(node) in top) for a in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      yield node.module, id(node) in top
      yield from ((f'{node.module}.{a.name}', id(node) in top) for a in node.names)


@pytest.mark.parametrize('path', PRODUCT)
def test_imports_stay_in_their_room(path):
  if path.endswith('__init__.py') and not os.path.getsize(os.path.join(ROOT, path)):
    return
  room, allowed = next((m, a) for m, a in ((re.match(p, path), a) for p, a in ROOMS) if m)
  allowed = [room.expand(a) for a in allowed]
  for module, top in imports(path):
    first = module.split('.')[0]
    if first in ('lab', 'data_pipelines', 'configs', 'tests', 'benchmarks'):
      # `from lab import task` names lab and lab.task: the longer one decides
      parts = [m for m, _ in imports(path) if m.startswith(module + '.')]
      assert parts or any(module == a or module.startswith(a + '.') for a in allowed), f'{path} imports {module}'
      if re.match(r'lab/\w+\.py', path):
        assert not module.startswith('lab.systems'), f'{path} knows a system'
    if first in DOORS:
      assert re.match(DOORS[first], path), f'{path} imports {module}; its door is {DOORS[first]}'
    assert not (top and first in LATE), f'{path} imports {module} at its top; it costs seconds'


@pytest.mark.parametrize('path', FILES)
def test_files_and_functions_are_short(path):
  with open(os.path.join(ROOT, path), encoding='utf-8') as f:
    lines = f.read().splitlines()
  assert len(lines) <= 400
  assert max(map(len, lines), default=0) <= 120
  for node in ast.walk(tree(path)):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      assert node.end_lineno - node.lineno < 60, f'{path}: {node.name}'


@pytest.mark.parametrize('path', [f for f in FILES if '__init__' not in f])
def test_nothing_is_imported_in_vain(path):
  with open(os.path.join(ROOT, path), encoding='utf-8') as f:
    lines = f.read().splitlines()
  nodes = list(ast.walk(tree(path)))
  read = {n.id for n in nodes if isinstance(n, ast.Name)}
  for node in nodes:
    if isinstance(node, (ast.Import, ast.ImportFrom)) and 'noqa: F401' not in lines[node.end_lineno - 1]:
      for name in node.names:
        assert (name.asname or name.name).split('.')[0] in read, f'{path}: {name.name}'


@pytest.mark.parametrize('path', PRODUCT)
def test_public_names_are_documented_and_plain(path):
  parsed = tree(path)
  if os.path.getsize(os.path.join(ROOT, path)):
    assert ast.get_docstring(parsed), f'{path} does not say what it is'
  for node in parsed.body:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith('_'):
      assert ast.get_docstring(node), f'{path}: {node.name} is not documented'
  assert not re.search(r'(util|helper|manager|handler|common|misc|base)', os.path.basename(path))


def test_nothing_is_unpickled_or_evaluated():
  for path in PRODUCT:
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
      text = f.read()
    dangerous = r'import (pickle|marshal|joblib)|allow_pickle=True|(?<![\w.])eval\(|(?<![\w.])exec\(|shell=True'
    assert not re.search(dangerous, text), path


def words():
  """Every attribute, string and field name in the product, outside the files that only list keys."""
  found = set()
  for path in PRODUCT:
    if path.startswith('configs/') or path.endswith('/config.py') and path != 'lab/config.py':
      continue
    for node in ast.walk(tree(path)):
      if isinstance(node, ast.Attribute):
        found.add(node.attr)
      elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
      elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path != 'lab/config.py':
        found.add(node.value)
  return found


@pytest.mark.parametrize('system', SYSTEMS)
def test_every_key_is_read(system):
  config = importlib.import_module(f'lab.systems.{system}.config').get_config()
  read = words()
  unread = [k for k in core.flatten(config) if k.split('.')[-1] not in read]
  assert not unread, f'nothing reads {unread}'


def test_values_are_numbers_strings_booleans_and_lists():
  for system in SYSTEMS:
    config = importlib.import_module(f'lab.systems.{system}.config').get_config()
    assert all(isinstance(v, (bool, int, float, str, tuple)) for v in core.flatten(config).values())


def test_every_recipe_opens_with_its_command():
  for path in glob.glob(os.path.join(ROOT, 'configs', '*.py')):
    if os.path.basename(path) != '__init__.py':
      with open(path, encoding='utf-8') as f:
        doc = ast.get_docstring(ast.parse(f.read()))
      assert 'launch/run.sh --config=configs/' in doc
