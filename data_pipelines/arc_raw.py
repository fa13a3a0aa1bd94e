"""ARC tasks as they are published (Chollet 2019, arXiv 1911.01547): JSON, checked row by row.

  .json    one task {"train": [{"input": GRID, "output": GRID}...], "test": [...]}, whose id is the file's stem; or
           its examples alone, [{"input": GRID, "output": GRID}...] (re-arc); or several, {ID: task}
  .jsonl   a task a line; its id is its "task_id", or else STEM#LINE

In place of "train" and "test" a task may have "examples", of which each may also be [GRID, GRID] (re-arc, BARC). A GRID
is a list of rows of colours 0 to 9. A pair of "test" may lack its output, or have null in its place. Each file may be
compressed, with .gz behind its name. No tasks are in what comes beside them: re-arc's metadata.json, and
sample_submission.json and ..._solutions.json of Kaggle's competitions.

The split of a file hangs on its name, or else that of the nearest folder on the way to it, --raw_dir included, that
says one: 'evaluation' if it contains evaluation, or is valid, validation, val or test, with a number behind it or not,
or is a file that has one of these words between - and _; else 'train' if it contains training, or is train. Where none
says one, it is 'train'.
"""

import collections
import functools
import gzip
import json
import os
import re
import zlib
from typing import Any, Iterable, Iterator, NamedTuple

import numpy as np

from data_pipelines import DataError, folders

SPLITS = ('train', 'evaluation')
SUFFIXES = ('.json', '.jsonl', '.json.gz', '.jsonl.gz')
COLOURS = 10
BYTES_MAX = 256 << 20      # of a JSON text, which is parsed whole; larger ones are refused
_HELD_OUT = re.compile(r'evaluation|^(?:valid|validation|val|test)[-_.]?\d*$')
_HELD_OUT_FILE = re.compile(r'(?:^|[-_])(?:valid|validation|val|test)(?:$|[-_])')
_TRAIN = re.compile(r'training|^train[-_.]?\d*$')
_COMPANION = re.compile(r'metadata|sample_submission|.*_solutions')
_PARTS = ('train', 'test', 'examples')


class File(NamedTuple):
  """A file of tasks: its path, its name without suffixes, its split, and its data set (its top folder, or its stem)."""
  path: str
  stem: str
  split: str
  dataset: str


class Pair(NamedTuple):
  """Two grids u8[H, W], the second None where it is not told; which list of the task has them, and where, from 1 on."""
  input: np.ndarray
  output: np.ndarray | None
  part: str
  number: int


class Task(NamedTuple):
  """The pairs of a program; whether the file tells its id, or only its line does; and its place for a message."""
  id: str
  named: bool
  file: File
  where: str
  pairs: tuple[Pair, ...]


def files(raw_dir: str) -> tuple[list[File], list[str]]:
  """The files of tasks of a folder and its folders, or one file, in the order of their names; and files of other kinds.

  Raises DataError where there is no file of tasks, and as folders.files does.
  """
  if os.path.isfile(raw_dir):
    top, found = os.path.dirname(raw_dir), [raw_dir]
  else:
    top, found = raw_dir, folders.files(raw_dir)
  paths = [p for p in found if p.lower().endswith(SUFFIXES) and not os.path.basename(p).startswith('.')
           and (p == raw_dir or not _COMPANION.fullmatch(_stem(os.path.basename(p))))]
  if not paths:
    raise DataError(f'{raw_dir}: no ARC tasks there; expected {", ".join(SUFFIXES)}')
  return [_file(p, os.path.relpath(p, top), top) for p in paths], [p for p in found if p not in set(paths)]


def _file(path: str, name: str, top: str) -> File:
  *above, last = name.split(os.sep)
  stem = _stem(last)
  split = 'evaluation' if _HELD_OUT_FILE.search(stem.lower()) else ''
  for word in (stem, *reversed(above), os.path.basename(os.path.abspath(top))):      # the name itself, then its folders
    split = split or _said(word.lower())
  return File(path, stem, split or 'train', above[0] if above else stem)


def _stem(name: str) -> str:
  return name[:-len(max((s for s in SUFFIXES if name.lower().endswith(s)), key=len))]


def _said(word: str) -> str:
  return 'evaluation' if _HELD_OUT.search(word) else 'train' if _TRAIN.search(word) else ''


def read(found: Iterable[File]) -> Iterator[Task]:
  """All tasks, file by file. Raises DataError for the first that is broken."""
  for file in found:
    for task in tasks(file):
      if isinstance(task, DataError):
        raise task
      yield task


def tasks(file: File) -> Iterator[Task | DataError]:
  """The tasks of a file; one that is broken comes as the DataError that names file, task, pair, grid and row."""
  for where, line, value in values(file.path):
    yield from told(file, where, line, value)


def told(file: File, where: str, line: int, value: Any) -> Iterator[Task | DataError]:
  """The tasks of what `values` gives, as `tasks` has them."""
  try:
    entries = list(_entries(file, where, line, value))
  except DataError as e:
    yield e
    return
  for name, named, found in entries:
    try:
      yield _task(file, where, name, named, found)
    except DataError as e:
      yield e


def values(path: str) -> Iterator[tuple[str, int, Any]]:
  """What a JSON file holds: its path, 0 and its value; of a .jsonl file for each line PATH:LINE, LINE and its value.

  Blank lines are left out. A text that is no JSON comes as the DataError that says so. Raises DataError for a file that
  can't be read.
  """
  by_line = path.lower().endswith(('.jsonl', '.jsonl.gz'))
  folders.regular(path)
  try:
    with gzip.open(path, 'rb') if path.lower().endswith('.gz') else open(path, 'rb') as f:
      texts = iter(functools.partial(f.readline, BYTES_MAX + 1), b'') if by_line else [f.read(BYTES_MAX + 1)]
      for number, data in enumerate(texts, 1):
        where = f'{path}:{number}' if by_line else path
        if len(data) > BYTES_MAX:       # of a small .gz file, too
          raise DataError(f'{where}: a JSON text of more than {BYTES_MAX} bytes; divide it, or write a task a line')
        data = data.removeprefix(b'\xef\xbb\xbf') if number == 1 else data
        if not by_line or data.strip():
          yield where, number * by_line, parse(data, where)
  except (EOFError, zlib.error, gzip.BadGzipFile) as e:
    raise DataError(f'{path}: its gzip stream is cut off or broken ({e})') from None
  except OSError as e:
    raise DataError(f'{path}: cannot be read: {e.strerror}') from None


def parse(text: bytes | str, where: str) -> Any:
  """The value of a JSON text; a DataError, not raised, where it is none, or where an object has a key twice."""
  try:
    return json.loads(text if isinstance(text, str) else text.decode('utf-8'), object_pairs_hook=_once)
  except UnicodeDecodeError as e:
    return DataError(f'{where}: byte {e.start} ({text[e.start]:#04x}) is not UTF-8')
  except json.JSONDecodeError as e:
    return DataError(f'{where}: no JSON, or cut off: {e.msg}, line {e.lineno}, column {e.colno}')
  except RecursionError:
    return DataError(f'{where}: nested too deeply')
  except ValueError as e:
    return DataError(f'{where}: {"a number of thousands of digits" if "digits" in str(e) else e}')


def _once(members: list[tuple[str, Any]]) -> dict:
  found = dict(members)
  if len(found) < len(members):
    (twice, _), = collections.Counter(name for name, _ in members).most_common(1)
    raise ValueError(f'the key {twice!r} is there twice in one object; all but the last would be lost')
  return found


def _entries(file: File, where: str, line: int, value: Any) -> Iterator[tuple[str, bool, Any]]:
  """(id, whether the file tells it, task as it is in the file)."""
  if isinstance(value, DataError):
    raise value
  if line and isinstance(value, dict):
    name = value.get('task_id', f'{file.stem}#{line}')
    if not isinstance(name, str):
      raise DataError(f'{where}: "task_id" is {_short(name)}, expected a text')
    yield name, 'task_id' in value, value
  elif _is_task(value):
    if lost := [k for k in value if k not in _PARTS and _is_task(value[k])]:
      raise DataError(f'{where}: a task itself, and with {_quoted(lost[0])} a task in it, which would be lost; write '
                      'them as {ID: task}')
    yield file.stem, True, value
  elif not line and isinstance(value, list) and value and all(isinstance(x, dict) and 'input' in x for x in value):
    yield file.stem, True, {'examples': value}
  elif isinstance(value, dict) and value:
    yield from ((name, True, found) for name, found in value.items())
  else:
    raise DataError(f'{where}: no task; expected {{"train": [...], "test": [...]}}'
                    + ' or {"examples": [...]}' * bool(line) + ' or several, {ID: task}' * (not line)
                    + f', found {_short(value)}')


def _is_task(value: Any) -> bool:
  return isinstance(value, dict) and any(isinstance(value.get(k), list) for k in _PARTS)


def _task(file: File, where: str, name: str, named: bool, found: Any) -> Task:
  if not name or not name.isprintable():       # half of a surrogate pair, which no file can hold, is not printable
    raise DataError(f'{where}: {name!r} is no id of a task; it must be a text that can be printed')
  where = f'{where}: task {name}'
  parts = [k for k in _PARTS if k in found] if isinstance(found, dict) else []
  if not parts or not all(isinstance(found[k], list) for k in parts):
    raise DataError(f'{where}: no lists "train" and "test" or "examples" of pairs, but {_short(found)}')
  for key in found:
    if key not in _PARTS and isinstance(found[key], list) and any(isinstance(x, dict) and 'input' in x
                                                                  for x in found[key]):
      raise DataError(f'{where}: a list {_quoted(key)} of pairs, which nothing reads; expected "train", "test" or '
                      '"examples"')
  pairs = tuple(_pair(pair, part, n, where) for part in parts for n, pair in enumerate(found[part], 1))
  if not pairs:
    raise DataError(f'{where}: it has no pair')
  return Task(name, named, file, where, pairs)


def _pair(found: Any, part: str, number: int, where: str) -> Pair:
  where = f'{where}, {part} pair {number}'
  if part == 'examples' and isinstance(found, list) and len(found) == 2:
    found = dict(zip(('input', 'output'), found))
  if not isinstance(found, dict) or 'input' not in found or 'output' not in found and part != 'test':
    raise DataError(f'{where}: no "input" and "output", but {_short(found)}')
  told = part != 'test' or found.get('output') is not None
  output = grid(found['output'], f'{where}, output') if told else None
  return Pair(grid(found['input'], f'{where}, input'), output, part, number)


def grid(rows: Any, where: str) -> np.ndarray:
  """A matrix as JSON has it -> u8[H, W]. Raises DataError naming the row that is wrong, from 1 on."""
  if not isinstance(rows, list) or not rows:
    raise DataError(f'{where}: {_short(rows)} is no grid; expected a list of rows')
  for number, row in enumerate(rows, 1):
    if not isinstance(row, list) or not row:
      raise DataError(f'{where}, row {number}: {_short(row)} is no row; expected a list of colours')
    if len(row) != len(rows[0]):
      raise DataError(f'{where}, row {number}: {len(row)} cells, the rows above have {len(rows[0])}')
    # True is an int to Python, and 1.0 equals 1
    if set(map(type, row)) != {int} or min(row) < 0 or max(row) >= COLOURS:
      wrong = next(n for n, v in enumerate(row) if type(v) is not int or not 0 <= v < COLOURS)
      raise DataError(f'{where}, row {number}, cell {wrong + 1}: {_short(row[wrong])} is no colour; expected an '
                      f'integer of 0 to {COLOURS - 1}')
  return np.array(rows, np.uint8)


def _quoted(key: str) -> str:
  return repr(key)[:40]


def _short(value: Any) -> str:
  if isinstance(value, dict):
    return 'an object with ' + (', '.join(_quoted(k) for k in list(value)[:4]) or 'no key')
  if isinstance(value, list):
    return f'a list of {len(value)}'
  return json.dumps(value)[:40]
