"""What a user wants predicted: grids to rebuild, codes to decode, two grids to interpolate between."""

import itertools
import os
import re
from typing import Any, Callable, Iterator

import numpy as np

from data_pipelines import DataError, arc, arc_raw, images

_NAME_MAX = 120      # characters of a picture's name
_Named = tuple[str, dict[str, np.ndarray]]


def grids(source: str, output: str, stop: Callable[[], bool], side: int, verb: str,
          codes: tuple[int, int], header: bool = False, distinct: bool = False) -> Iterator[dict[str, Any] | DataError]:
  """Batches of one item each, of fixed shapes; an item that can't be used comes as the DataError that says why.

  Args:
    source: a file, or a folder of files and its folders: .json or .jsonl, plain or .gz; or a JSON text.
      rebuild: ARC tasks (see arc_raw.py), of which all grids are taken; or a grid, a list of rows.
      decode: a list of codes, or several of them; each may also be an object that has it as "codes", and with a header
        must be, with "size", [height, width], and "colours", those of the grid by how many cells have them; where equal
        rows are told once, also with "rows" and "columns", which of the different ones each is, from 0 as they first
        occur.
      interpolate: a list of two grids; or a task, of which the first pair is taken.
    output: folder in which the results are drawn.
    stop: asked before each item.
    side: of the canvas.
    verb: rebuild, decode or interpolate.
    codes: how many an item has, N, and how many there are to choose from.
    header: whether codes come with size and colours; distinct: and with rows and columns.

  Yields:
    mask f32[1], and for the host name [str] and write(picture), which puts u8[H, W, 3] at output/NAME.png. rebuild:
    grid u8[1, side, side], 255 outside, and size i32[1, 2]. interpolate: also other and other_size. decode: codes
    i32[1, N], with a header extents i32[1, 2] and colours i32[1, 10], all ten; rows and columns i32[1, side].

  Raises:
    DataError: nothing is there.
  """
  read = {'rebuild': lambda: _rebuilt(source, side),
          'decode': lambda: _decoded(source, *codes, side if header else 0, distinct),
          'interpolate': lambda: _between(source, side)}
  taken = set()
  for item in read[verb]():
    if stop():
      return
    if isinstance(item, DataError):
      yield item
      continue
    label, arrays = item
    name = _free(re.sub(r'[^\w.#-]', '_', label)[:_NAME_MAX], taken)       # an id may be a path, or two tasks'
    yield {**arrays, 'mask': np.ones(1, np.float32), 'name': [name], 'write': _writer(os.path.join(output, name))}


def _free(name: str, taken: set[str]) -> str:
  found = next(n for n in itertools.chain([name], (f'{name}~{i}' for i in itertools.count(2))) if n not in taken)
  taken.add(found)
  return found


def _writer(path: str) -> Callable[[np.ndarray], None]:
  def write(picture):
    images.write(f'{path}.png', picture)
  return write


def _values(source: str) -> Iterator[tuple[arc_raw.File, str, int, Any]]:
  """(file, place, line or 0, value) of each JSON text; the value is a DataError where it can't be read."""
  if not os.path.exists(source):
    if source.lstrip()[:1] not in ('[', '{'):
      raise DataError(f'--input={source}: no such file or folder; expected {", ".join(arc_raw.SUFFIXES)}, or a '
                      'JSON text')
    yield arc_raw.File('--input', 'input', 'evaluation', 'input'), '--input', 0, arc_raw.parse(source, '--input')
    return
  for file in arc_raw.files(source)[0]:
    try:
      for found in arc_raw.values(file.path):
        yield file, *found
    except DataError as e:
      yield file, file.path, 0, e


def _label(file: arc_raw.File, line: int) -> str:
  return f'{file.stem}#{line}' if line else file.stem


def _rebuilt(source: str, side: int) -> Iterator[_Named | DataError]:
  for file, where, line, value in _values(source):
    if _is_grid(value):
      yield _tried(lambda: (_label(file, line), _canvas(arc_raw.grid(value, where), side, where)))
      continue
    for task in arc_raw.told(file, where, line, value):
      if isinstance(task, DataError):
        yield task
        continue
      for pair in task.pairs:
        for kind, grid in (('input', pair.input), ('output', pair.output)):
          if grid is not None:
            place = f'{task.where}, {pair.part} pair {pair.number}, {kind}'
            label = f'{task.id[:_NAME_MAX // 2]}_{pair.part}{pair.number}_{kind}'
            yield _tried(lambda: (label, _canvas(grid, side, place)))


def _is_grid(value: Any) -> bool:
  """Whether it is a grid, or a list of them, and not the examples of a task."""
  return isinstance(value, list) and not (value and isinstance(value[0], dict))


def _tried(make: Callable[[], _Named]) -> _Named | DataError:
  try:
    return make()
  except DataError as e:
    return e


def _canvas(grid: np.ndarray, side: int, where: str) -> dict[str, np.ndarray]:
  height, width = grid.shape
  if max(height, width) > side:
    raise DataError(f'{where}: a grid of {height} x {width}; the canvas of the model has {side} x {side}')
  canvas = np.full((1, side, side), arc.OUTSIDE, np.uint8)
  canvas[0, :height, :width] = grid
  return {'grid': canvas, 'size': np.array([grid.shape], np.int32)}


def _decoded(source: str, length: int, count: int, side: int, distinct: bool) -> Iterator[_Named | DataError]:
  for file, where, line, value in _values(source):
    if isinstance(value, DataError):
      yield value
      continue
    several = isinstance(value, list) and bool(value) and all(isinstance(v, (list, dict)) for v in value)
    for number, found in enumerate(value if several else [value], 1):
      label, place = _label(file, line) + f'#{number}' * several, where + f', list {number}' * several
      yield _tried(lambda: (label, {'codes': _codes(found, length, count, place)}
                            | (_header(found, side, place) if side else {})
                            | (_alike(found, side, place) if distinct else {})))


def _codes(found: Any, length: int, count: int, where: str) -> np.ndarray:
  found = found.get('codes') if isinstance(found, dict) else found
  if not isinstance(found, list):
    raise DataError(f'{where}: no codes; expected a list of {length} integers, or an object with it as "codes"')
  if len(found) != length:
    raise DataError(f'{where}: {len(found)} codes, the model has {length}')
  for place, code in enumerate(found, 1):
    if type(code) is not int or not 0 <= code < count:       # True is an int to Python
      raise DataError(f'{where}, code {place}: {str(code)[:40]!r} is no code; expected an integer of 0 to {count - 1}')
  return np.array([found], np.int32)


def _header(found: Any, side: int, where: str) -> dict[str, np.ndarray]:
  if not isinstance(found, dict) or not {'size', 'colours'} <= found.keys():
    raise DataError(f'{where}: no "size" and "colours" beside the codes; expected them as in the predictions of '
                    'rebuild')
  size, colours = found['size'], found['colours']
  if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 1 <= n <= side for n in size):
    raise DataError(f'{where}: size {str(size)[:40]}; expected [height, width], each 1 to {side}')
  if not isinstance(colours, list) or not all(type(c) is int and 0 <= c < arc_raw.COLOURS for c in colours) or (
      len(set(colours)) < len(colours)):
    raise DataError(f'{where}: colours {str(colours)[:40]}; expected different integers of 0 to {arc_raw.COLOURS - 1}')
  others = [c for c in range(arc_raw.COLOURS) if c not in colours]
  return {'extents': np.array([size], np.int32), 'colours': np.array([colours + others], np.int32)}


def _alike(found: dict[str, Any], side: int, where: str) -> dict[str, np.ndarray]:
  out = {}
  for key, length in zip(('rows', 'columns'), found['size']):
    numbers = found.get(key)
    if not isinstance(numbers, list) or len(numbers) != length or not all(type(n) is int for n in numbers) or any(
        not 0 <= n <= max(numbers[:i], default=-1) + 1 for i, n in enumerate(numbers)):
      raise DataError(f'{where}: {key} {str(numbers)[:40]}; expected {length} integers, 0 for the first and for '
                      'those like it, 1 for the next different one, and so on')
    out[key] = np.array([numbers + [0] * (side - length)], np.int32)
  return out


def _between(source: str, side: int) -> Iterator[_Named | DataError]:
  found = list(itertools.islice(_values(source), 2))
  if len(found) != 1:
    raise DataError(f'--input={source}: {"several files or lines" if found else "nothing in it"}; expected one file '
                    'with two grids or a task')
  (file, where, line, value), = found
  yield _tried(lambda: (_label(file, line), _two(file, where, line, value, side)))


def _two(file: arc_raw.File, where: str, line: int, value: Any, side: int) -> dict[str, np.ndarray]:
  if _is_grid(value):
    if len(value) != 2:
      raise DataError(f'{where}: a list of {len(value)}; expected one of two grids, or a task')
    parts = [(arc_raw.grid(rows, f'{where}, grid {i}'), f'{where}, grid {i}') for i, rows in enumerate(value, 1)]
  else:
    found = list(arc_raw.told(file, where, line, value))
    if isinstance(found[0], DataError):
      raise found[0]
    if len(found) > 1:
      raise DataError(f'{where}: {len(found)} tasks; expected one')
    pair = found[0].pairs[0]
    if pair.output is None:
      raise DataError(f'{found[0].where}: its first pair has no output; expected two grids')
    parts = [(getattr(pair, kind), f'{found[0].where}, first pair, {kind}') for kind in ('input', 'output')]
  first, other = (_canvas(grid, side, place) for grid, place in parts)
  return {**first, 'other': other['grid'], 'other_size': other['size']}
