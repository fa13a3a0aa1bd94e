"""Files of ARC tasks: every form that they come in, splits by names, and what is said of broken ones."""

import gzip
import json
import os
import re

import pytest
from data_pipelines import DataError, arc, arc_raw, prepare

A, B, C = [[1, 2, 3], [4, 5, 6]], [[7]], [[0, 8], [9, 0], [0, 0]]
TASK = {'train': [{'input': A, 'output': B}, {'input': C, 'output': A}], 'test': [{'input': B, 'output': C}]}
OTHER = {'train': [{'input': C, 'output': B}], 'test': [{'input': A}]}


def save(root, files):
  """Writes JSON values; of a .jsonl file a list of lines; bytes and texts as they are."""
  for name, content in files.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list) and '.jsonl' in name:
      content = '\n'.join(map(json.dumps, content))
    if not isinstance(content, (str, bytes)):
      content = json.dumps(content)
    data = content if isinstance(content, bytes) else content.encode()
    (root / name).write_bytes(gzip.compress(data) if name.endswith('.gz') and data[:2] != b'\x1f\x8b' else data)
  return str(root)


def listed(tasks):
  """(id, [(input, output)]) of tasks."""
  return [(t.id, [(p.input.tolist(), p.output if p.output is None else p.output.tolist()) for p in t.pairs])
          for t in tasks]


def make(capsys, raw, out, *flags):
  code = prepare.main(['prepare', 'arc', f'--raw_dir={raw}', f'--out_dir={out}', *flags])
  found, err = capsys.readouterr()
  return code, json.loads(found) if code == 0 else ''.join(x for x in err.splitlines(True) if ' s left' not in x)


PAIRS = [(A, B), (C, A), (B, C)]
EXAMPLES = [{'input': i, 'output': o} for i, o in PAIRS]


@pytest.mark.parametrize('name, content, wanted', [
    ('x.json', TASK, [('x', PAIRS)]), ('x.json.gz', TASK, [('x', PAIRS)]), ('x.JSON', TASK, [('x', PAIRS)]),
    ('x.json', b'\xef\xbb\xbf' + json.dumps(TASK).encode(), [('x', PAIRS)]),
    ('x.json', json.dumps(TASK, indent=2).replace('\n', '\r\n'), [('x', PAIRS)]),
    ('x.json', {'a': TASK, 'b': OTHER}, [('a', PAIRS), ('b', [(C, B), (A, None)])]),
    ('x.json', {'train': EXAMPLES}, [('x', PAIRS)]), ('x.json', {'test': [{'input': A}]}, [('x', [(A, None)])]),
    ('x.json', {'a': {'examples': EXAMPLES}}, [('a', PAIRS)]), ('x.json', EXAMPLES, [('x', PAIRS)]),
    ('x.json', {'test': [{'input': A, 'output': None}]}, [('x', [(A, None)])]),
    ('x.json', {**TASK, 'name': 'draw', 'seeds': [1, 2], 'meta': {'a': []}}, [('x', PAIRS)]),
    ('x.jsonl', [{**TASK, 'task_id': 'a'}, OTHER], [('a', PAIRS), ('x#2', [(C, B), (A, None)])]),
    ('x.jsonl.gz', [{'task_id': 'a', 'examples': EXAMPLES, 'seed': 3}], [('a', PAIRS)]),
    ('x.jsonl', '\n' + json.dumps({'examples': PAIRS}) + '\r\n \n', [('x#2', PAIRS)]),
    ('x.jsonl', b'\xef\xbb\xbf' + json.dumps({'examples': PAIRS + PAIRS}).encode(), [('x#1', PAIRS + PAIRS)])])
def test_forms_of_tasks(tmp_path, name, content, wanted):
  files, others = arc_raw.files(save(tmp_path, {name: content, 'a.tar.gz': b'\x1f\x8b'}))
  assert listed(arc_raw.read(files)) == wanted
  assert others == [str(tmp_path / 'a.tar.gz')]


def test_names_say_splits_and_data_sets(tmp_path):
  wanted = {'arc_evaluation.json': ('evaluation', 'arc_evaluation'), 'arc_training.json.gz': ('train', 'arc_training'),
            'data/evaluation/a.json': ('evaluation', 'data'), 'data/training/a.json': ('train', 'data'),
            'contest/b.json': ('train', 'contest'), 'easy/Validation/c.jsonl': ('evaluation', 'easy'),
            'test/d.json': ('evaluation', 'test'), 'valid.jsonl.gz': ('evaluation', 'valid'),
            'tests/e.json': ('train', 'tests'), 'contest_1.json': ('train', 'contest_1'),
            'arc-agi_test_challenges.json': ('evaluation', 'arc-agi_test_challenges'),
            'training_evaluation.json': ('evaluation', 'training_evaluation')}
  found, others = arc_raw.files(save(tmp_path / 'raw', {**dict.fromkeys(wanted, TASK), '.hid.json': TASK}))
  assert {os.path.relpath(f.path, tmp_path / 'raw'): (f.split, f.dataset) for f in found} == wanted
  assert [f.path for f in found] == sorted(f.path for f in found) and len(others) == 1
  one, = arc_raw.files(str(tmp_path / 'raw' / 'contest' / 'b.json'))[0]
  assert one[1:] == ('b', 'train', 'b')
  # the nearest name that says one: the folder that is given, too
  inside, _ = arc_raw.files(save(tmp_path / 'evaluation', {'a.json': TASK, 'training/b.json': TASK}))
  assert [f.split for f in inside] == ['evaluation', 'train']


def test_what_comes_beside_tasks_is_no_task(tmp_path):
  beside = ['arc-agi_test_solutions.json', 'metadata.json', 'sample_submission.json']
  found, others = arc_raw.files(save(tmp_path, {'tasks/a.json': EXAMPLES, **{name: {'a': [A]} for name in beside}}))
  assert [f.stem for f in found] == ['a'] and others == [str(tmp_path / name) for name in beside]


def test_folders_and_files_that_are_not_read_are_named(tmp_path, monkeypatch):
  raw, scan = save(tmp_path / 'raw', {'a.json': TASK, 'b/x.json': TASK, '.git/x.json': TASK}), os.scandir
  os.symlink(save(tmp_path / 'far', {'y.json': TASK}) + '/y.json', tmp_path / 'raw' / 'c.json')       # of the user's
  assert [f.stem for f in arc_raw.files(raw)[0]] == ['a', 'x', 'c']
  os.mkfifo(tmp_path / 'raw' / 'p.json')
  with pytest.raises(DataError, match=f'{raw}/p.json: cannot be read: it is no file, or a link to none'):
    list(arc_raw.read(arc_raw.files(raw)[0]))
  os.symlink(tmp_path / 'far', tmp_path / 'raw' / 'd')
  with pytest.raises(DataError, match=f'{raw}/d: a link to a folder, which is not followed; put the folder itself'):
    arc_raw.files(raw)

  def refuse(path):
    if str(path).endswith('b'):
      raise PermissionError(13, 'Permission denied', str(path))
    return scan(path)
  os.remove(tmp_path / 'raw' / 'd')
  monkeypatch.setattr(os, 'scandir', refuse)
  with pytest.raises(DataError, match=f'{raw}/b: cannot be read: Permission denied'):
    arc_raw.files(raw)


def broken(rows):
  """TASK with another first grid."""
  return {**TASK, 'train': [{'input': rows, 'output': B}]}


def row(*cells):
  """TASK with another second row."""
  return broken([A[0], list(cells)])


@pytest.mark.parametrize('content, words', [
    ({'train': [{'input': B, 'output': B}, {'input': B, 'output': [[1, 2, 3], [1, 2, 3], [1, 2]]}]},
     'x.json: task x, train pair 2, output, row 3: 2 cells, the rows above have 3'),
    ({'train': [], 'test': [{'input': [[1], [1, 2]]}]}, 'task x, test pair 1, input, row 2: 2 cells, the rows ab'),
    (row(1, 10, 3), 'train pair 1, input, row 2, cell 2: 10 is no colour; expected an integer of 0 to 9'),
    (row(1, 2, -1), 'row 2, cell 3: -1 is no colour'), (row(1.0, 2, 3), 'row 2, cell 1: 1.0 is no colour'),
    (row(1, True, 3), 'row 2, cell 2: true is no'), (row(1, '2', 3), 'row 2, cell 2: "2" is no'),
    (row(1, None, 3), 'cell 2: null is no'), (row(1, [2], 3), 'cell 2: a list of 1 is no'),
    (row(1, float('nan'), 3), 'cell 2: NaN is no'), (row(), 'row 2: a list of 0 is no row'),
    (broken([A[0], '123']), 'row 2: "123" is no row'), (broken([]), 'train pair 1, input: a list of 0 is no grid'),
    (broken([[]]), 'row 1: a list of 0 is no row'), (broken('A'), 'input: "A" is no grid'),
    (broken({'a': 1}), "input: an object with 'a' is no grid"), (broken(None), 'input: null is no grid'),
    ({'train': [{'input': A}]}, """train pair 1: no "input" and "output", but an object with 'input'"""),
    ({'train': [], 'test': [{'output': A}]}, 'test pair 1: no "input"'), ({'train': [3]}, 'train pair 1: no "input"'),
    ({'train': [[A, B]]}, 'train pair 1: no "input" and "output", but a list of 2'),
    ({'train': [], 'test': []}, 'task x: it has no pair'), ({'a': TASK, 'b': 3}, 'task b: no lists "train" and'),
    ({'a': {'train': TASK}}, 'task a: no lists "train"'), ({}, 'no task; expected .*found an object with no key'),
    ([TASK], 'x.json: no task; expected .*, found a list of 1'), (3, 'found 3'), ({'': TASK}, "'' is no id of a task"),
    ({'a\nb': TASK}, r"'a\\nb' is no id"), ('{"\\ud800": {"train": []}}', r"'\\ud800' is no id of a task"),
    (json.dumps(TASK)[:-40], 'x.json: no JSON, or cut off: .*line 1, column'), ('', 'no JSON, or cut off'),
    ('[' * 100_000, 'nested too deeply'), (json.dumps(TASK).encode('utf-16'), r'byte 0 \(0xff\) is not UTF-8'),
    ('{"a": {"train": []}, "a": 3}', "the key 'a' is there twice"),
    ({'a': TASK, **TASK}, "x.json: a task itself, and with 'a' a task in it, which would be lost"),
    ({**TASK, 'tset': EXAMPLES}, "task x: a list 'tset' of pairs, which nothing reads; expected"),
    ({'test': [{'input': A, 'output': 3}]}, 'test pair 1, output: 3 is no grid'),
    ({'train': [{'input': A, 'output': None}]}, 'train pair 1, output: null is no grid'),
    ('{"train": ' + '1' * 5000 + '}', 'x.json: a number of thousands of digits')])
def test_broken_tasks_are_named(tmp_path, capsys, content, words):
  raw = save(tmp_path / 'raw', {'x.json': content})
  code, err = make(capsys, raw, tmp_path / 'out')
  assert code == 3 and raw in err and err.count('\n') == 1, err
  assert re.search(words, err), err
  assert not os.path.exists(tmp_path / 'out' / arc.NAME)


@pytest.mark.parametrize('name, content, words', [
    ('x.jsonl', [TASK, {'task_id': 7, **TASK}], 'x.jsonl:2: "task_id" is 7, expected a text'),
    ('x.jsonl', [TASK, {'task_id': 'a', 'examples': [[A, B], [A]]}], 'x.jsonl:2: task a, examples pair 2: no "input"'),
    ('x.jsonl', [TASK, {'examples': [[A, [[1, 2], [3]]]]}], 'x.jsonl:2: task x#2, examples pair 1, output, row 2: 1'),
    ('x.jsonl', [TASK, 3], 'x.jsonl:2: no task'), ('x.jsonl', json.dumps(TASK) + '\n{"a', 'x.jsonl:2: no JSON, or cut'),
    ('x.jsonl', json.dumps(TASK).encode() + b'\n\xe9', r'x.jsonl:2: byte 0 \(0xe9\)'),
    ('x.json.gz', gzip.compress(b'[' * 99, mtime=0)[:-9], 'x.json.gz: its gzip stream is cut off'),
    ('x.json.gz', b'\x1f\x8bxxxxxxxxxxx', 'x.json.gz: its gzip stream'), ('x.txt', '', 'no ARC tasks there; expected'),
    ('x.jsonl', '', 'no grid of train remains')])
def test_broken_files_are_named(tmp_path, capsys, name, content, words):
  raw = save(tmp_path / 'raw', {name: content})
  code, err = make(capsys, raw, tmp_path / 'out')
  assert code == 3 and raw in err and err.count('\n') == 1, err
  assert re.search(words, err), err
