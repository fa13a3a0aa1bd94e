"""What a user wants predicted by a text tree: texts, two sentences to go between, vectors, how many texts to draw."""

import itertools
import math
import os
import re
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from data_pipelines import DataError, arc_raw, folders, packs, trees

_MIB = 64                # of a file; larger ones are refused
_DRAWS = 1000
_LARGEST = float(np.finfo(np.float32).max)
_PAIR = 'a list of two texts, or a list of such'
_VECTOR = '{"level": NUMBER, "vector": [NUMBER, ...]}, or a list of such'
_Named = tuple[str, dict[str, Any]]


def texts(source: str, verb: str, rows: Sequence[int], lengths: Sequence[int], widths: Sequence[int],
          buckets: Sequence[float] = (1 / 4, 1 / 2, 1), joined: bool = False) -> Iterator[dict[str, Any] | DataError]:
  """Batches of one item each, of few shapes; an item that can't be used comes as the DataError that says why.

  Args:
    source: by verb:
      rebuild, encode, neighbours: a .txt file, all of which is one text, of whatever bytes; or a folder of such and
        its folders, hidden ones left out; a link to a folder is not followed, one to a file outside is an error; or a
        text.
      interpolate: a .json or .jsonl file (a value a line), or a JSON text: a list of two texts, or a list of such
        lists; or a .txt file with a text in each of two lines. A text is one sentence that fits into a row of level 1;
        where words are the top level, one word that fits into a row.
      decode: such a file or JSON text: {"level": l, "vector": [...]}, or a list of such; of level l, 0 to K,
        widths[l + 1] numbers. What else an object has is not read.
      generate: how many texts to draw, 1 to 1000.
    verb: rebuild, encode, neighbours, interpolate, decode or generate.
    rows: U_l, rows of a pack of each level, 0 (words) to K.
    lengths: L_l, units of such a row with its terminator.
    widths: d_0 to d_(K+1), of vectors.
    buckets: shares of the rows. A text is packed with the smallest in which it is one pack, or else with the largest;
      U below is max(ceil(share U_l), what one row of level K may need). A share is more than 0 and at most 1.
    joined: neighbours share a row where they fit; see packs.rows.

  Yields:
    mask f32[1], and for the host name [str], which no two have, and write(text), which prints it; and by verb:
      rebuild, encode, neighbours: a pack of the text, which is one document: ids_l i32[1, U, L_l], counts_l and
        documents_l i32[1, U] of each level; for the host text [bytes], what its rows of level K are, equal ones once.
        Packs of a text are NAME, NAME#2, ...
      interpolate: that of the first text, and other_ids_l, other_counts_l of the other, of the same shapes.
      decode: level i32[1] and vector f32[1, d_(l+1)], and for the host at [int], the level.
      generate: draw i32[1], 0, 1, ...

  Raises:
    DataError: nothing is there, or it is of a kind that the verb doesn't read.
    ValueError: rows and lengths that packs.Packer refuses.
  """
  sizes = _sizes(rows, lengths, buckets)
  read = {'interpolate': lambda: _between(source, sizes, lengths, joined), 'decode': lambda: _vectors(source, widths),
          'generate': lambda: _draws(source),
          **dict.fromkeys(('rebuild', 'encode', 'neighbours'), lambda: _packed(source, sizes, lengths, joined))}
  taken = set()
  for item in read[verb]():
    if isinstance(item, DataError):
      yield item
      continue
    label, found = item
    yield {**found, 'mask': np.ones(1, np.float32), 'name': [_free(label, taken)], 'write': print}


def _free(name: str, taken: set[str]) -> str:
  found = next(n for n in itertools.chain([name], (f'{name}~{i}' for i in itertools.count(2))) if n not in taken)
  taken.add(found)
  return found


def _tried(make: Callable[[], Any]) -> Any:
  try:
    return make()
  except DataError as e:
    return e


# texts as packs

def _sizes(rows: Sequence[int], lengths: Sequence[int], buckets: Sequence[float]) -> list[tuple[int, ...]]:
  """U_l of each level for each bucket, the smallest first, those of small rows being one."""
  need = [math.prod(n - 1 for n in lengths[level + 1:]) for level in range(len(rows))]
  found = [tuple(min(max(math.ceil(share * u), n), u) for u, n in zip(rows, need)) for share in sorted(buckets)]
  return list(dict.fromkeys(found))


def _packed(source: str, sizes: list[tuple[int, ...]], lengths: Sequence[int],
            joined: bool) -> Iterator[_Named | DataError]:
  for label, where, text in _texts(source):
    if isinstance(text, DataError):
      yield text
      continue
    if not text.strip():
      yield DataError(f'{where}: no text in it')
      continue
    for number, pack in enumerate(_packs(text, sizes, lengths, joined), 1):
      yield label + f'#{number}' * (number > 1), _fields(pack)


def _packs(text: bytes, sizes: list[tuple[int, ...]], lengths: Sequence[int], joined: bool) -> Iterator[packs.Pack]:
  nodes = trees.nodes(text, len(lengths) - 1)
  for most in sizes[:-1]:
    # the second pack is enough to know that a bucket is too small: a long text is not packed to its end for each
    found = list(itertools.islice(_filled(nodes, most, lengths, joined), 2))
    if len(found) == 1:
      return iter(found)
  return _filled(nodes, sizes[-1], lengths, joined)


def _filled(nodes: list[trees.Node], most: Sequence[int], lengths: Sequence[int],
            joined: bool) -> Iterator[packs.Pack]:
  packer = packs.Packer(most, lengths, joined)
  for node in nodes:
    yield from packer.add(node, 0)
  yield from packer.rest()


def _fields(pack: packs.Pack) -> dict[str, Any]:
  top = len(pack.ids) - 1
  nodes = packs.split(packs.unpacked(pack)[top], top)
  return {**{f'{key}_{level}': x[None] for key, arrays in pack._asdict().items() for level, x in enumerate(arrays)},
          'text': [trees.join(tuple(nodes), top + 1)]}


def _texts(source: str) -> Iterator[tuple[str, str, bytes | DataError]]:
  """(name, place, text) of each text."""
  if os.path.isdir(source):
    for path in _files(source):
      yield ('', '', path) if isinstance(path, DataError) else (_stem(path), path, _tried(lambda: _bytes(path)))
  elif os.path.exists(source):
    _expect(source, ('.txt',), 'a folder of them, or a text')
    yield _stem(source), source, _tried(lambda: _bytes(source))
  elif _suffix(source) in ('.txt', '.json', '.jsonl') and len(source.split()) == 1:
    raise DataError(f'--input={source}: no such file; expected a .txt file, a folder of them, or a text')
  else:
    # bytes of a command line that are no UTF-8 come as halves of surrogate pairs
    yield 'input', '--input', _tried(lambda: _encoded(source, '--input', 'surrogateescape'))


def _files(folder: str) -> list[str | DataError]:
  """The .txt files of a folder and its folders, in the order of their names, behind what can't be read of it."""
  found, broken, linked, top = [], [], [], os.path.realpath(folder)
  for where, below, names in os.walk(folder, onerror=broken.append):
    below[:] = [n for n in below if not n.startswith('.')]
    linked += [os.path.join(where, n) for n in below if os.path.islink(os.path.join(where, n))]
    found += [os.path.join(where, n) for n in names if not n.startswith('.') and _suffix(n) == '.txt']
  if not found and not broken and not linked:
    raise DataError(f'--input={folder}: no text there; expected .txt files, whose names do not begin with a dot')
  return [*(DataError(f'{e.filename}: cannot be read: {e.strerror}') for e in broken),
          *(DataError(f'{path}: {folders.LINK}') for path in sorted(linked)),
          *(path if os.path.commonpath([os.path.realpath(path), top]) == top else
            DataError(f'{path}: a link that leaves {folder}; put a copy of the file in its place')
            for path in sorted(found))]


# files

def _stem(path: str) -> str:
  return os.path.splitext(os.path.basename(path))[0]


def _suffix(path: str) -> str:
  return os.path.splitext(path)[1].lower()


def _expect(path: str, suffixes: Sequence[str], other: str) -> None:
  if os.path.isdir(path) or _suffix(path) not in suffixes:
    raise DataError(f'--input={path}: {"a folder" if os.path.isdir(path) else "a file of another kind"}; expected a '
                    f'{" or ".join(suffixes)} file, {other}')


def _check(path: str) -> None:
  """Raises DataError for what is no file, a pipe for example, which may never end; and for large ones."""
  if not os.path.isfile(path):
    raise DataError(f'{path}: cannot be read: it is no file, or a link to none')
  size = os.path.getsize(path)
  if size > _MIB << 20:
    raise DataError(f'{path}: {size} bytes; at most {_MIB} MiB are read of a file. Cut it into several')


def _bytes(path: str) -> bytes:
  _check(path)
  try:
    with open(path, 'rb') as f:
      return f.read()
  except OSError as e:
    raise DataError(f'{path}: cannot be read: {e.strerror}') from None


def _encoded(text: str, where: str, errors: str = 'strict') -> bytes:
  try:
    return text.encode('utf-8', errors)
  except UnicodeEncodeError:
    raise DataError(f'{where}: half of a surrogate pair in it, which is no character; write the whole') from None


def _values(source: str, forms: str, other: str = '') -> Iterator[tuple[str, str, Any]]:
  """(name, place, value) of each JSON text; the value is a DataError where it can't be read."""
  expected = f'{forms} as a JSON text{other}'
  if not os.path.exists(source):
    if source.lstrip()[:1] not in ('[', '{'):
      raise DataError(f'--input={source}: no such file; expected a .json or .jsonl file, or {expected}')
    yield 'input', '--input', arc_raw.parse(source, '--input')
    return
  _expect(source, ('.json', '.jsonl'), f'or {expected}')
  empty = True
  try:
    _check(source)
    for where, line, value in arc_raw.values(source):
      empty = False
      yield _stem(source) + f'#{line}' * (line > 0), where, value
  except DataError as e:
    yield _stem(source), source, e
    return
  if empty:
    raise DataError(f'{source}: nothing in it; expected in each line {forms}')


def _parts(label: str, where: str, value: Any, kind: type, word: str) -> Iterator[tuple[str, str, Any]]:
  """(name, place, part) of a list of such parts, or of the value itself."""
  several = isinstance(value, list) and any(isinstance(part, kind) for part in value)
  for number, part in enumerate(value if several else [value], 1):
    yield label + f'#{number}' * several, where + f', {word} {number}' * several, part


def _short(value: Any) -> str:
  if isinstance(value, (dict, list)):
    return 'an object' if isinstance(value, dict) else f'a list of {len(value)}'
  return repr(value)[:40]


# two sentences

def _between(source: str, sizes: list[tuple[int, ...]], lengths: Sequence[int],
             joined: bool) -> Iterator[_Named | DataError]:
  for label, pair in _pairs(source):
    yield pair if isinstance(pair, DataError) else _tried(lambda: (label, _two(pair, sizes, lengths, joined)))


def _two(pair: list[tuple[str, bytes]], sizes: list[tuple[int, ...]], lengths: Sequence[int],
         joined: bool) -> dict[str, Any]:
  for where, text in pair:
    _check_sentence(text, where, lengths)
  # one row of level K fits into every bucket, so both fit into the smallest
  first, other = (_fields(next(_packs(text, sizes[:1], lengths, joined))) for _, text in pair)
  return first | {f'other_{k}': x for k, x in other.items() if k.startswith(('ids_', 'counts_'))}


def _check_sentence(text: bytes, where: str, lengths: Sequence[int]) -> None:
  """Raises DataError unless a text is one row of level 1, or of level 0, the only one."""
  if not text.strip():
    raise DataError(f'{where}: no text in it')
  level = min(1, len(lengths) - 1)
  nodes, most, name = trees.nodes(text, level), lengths[level] - 1, trees.LEVELS[level]
  units = sum(len(row.units) for row in packs.rows(nodes[0], level, lengths))
  if len(nodes) > 1 or units > most:
    found = f'{len(nodes)} {name}s' if len(nodes) > 1 else f'one of {units}'
    limit = f'words, of which one of more than {lengths[0] - 1} bytes counts as several' if level else 'bytes'
    raise DataError(f'{where}: {found}; expected a single {name} of at most {most} {limit}')


def _pairs(source: str) -> Iterator[tuple[str, list[tuple[str, bytes]] | DataError]]:
  """Of each pair its name, and place and bytes of both texts."""
  if _suffix(source) == '.txt' and os.path.isfile(source):
    yield _stem(source), _tried(lambda: _lines(source))
    return
  for label, where, value in _values(source, _PAIR, ', or a .txt file with a text in each of two lines'):
    if isinstance(value, DataError):
      yield label, value
      continue
    for name, place, part in _parts(label, where, value, list, 'pair'):
      yield name, _tried(lambda: _strings(part, place))


def _lines(path: str) -> list[tuple[str, bytes]]:
  found = [(f'{path}:{number}', line.removesuffix(b'\r')) for number, line in enumerate(_bytes(path).split(b'\n'), 1)
           if line.strip()]
  if len(found) != 2:
    raise DataError(f'{path}: {len(found)} lines that are not blank; expected two, with a text in each')
  return found


def _strings(value: Any, where: str) -> list[tuple[str, bytes]]:
  if not isinstance(value, list) or len(value) != 2:
    raise DataError(f'{where}: {_short(value)}; expected {_PAIR}')
  found = []
  for number, text in enumerate(value, 1):
    place = f'{where}, text {number}'
    if not isinstance(text, str):
      raise DataError(f'{place}: {_short(text)} is no text; expected {_PAIR}')
    found.append((place, _encoded(text, place)))
  return found


# vectors and numbers

def _vectors(source: str, widths: Sequence[int]) -> Iterator[_Named | DataError]:
  for label, where, value in _values(source, _VECTOR):
    if isinstance(value, DataError):
      yield value
      continue
    for name, place, part in _parts(label, where, value, dict, 'object'):
      yield _tried(lambda: (name, _vector(part, place, widths)))


def _vector(found: Any, where: str, widths: Sequence[int]) -> dict[str, Any]:
  if not isinstance(found, dict) or not {'level', 'vector'} <= found.keys():
    raise DataError(f'{where}: no "level" and "vector", but {_short(found)}; expected {_VECTOR}')
  level, vector, top = found['level'], found['vector'], len(widths) - 2
  if type(level) is not int or not 0 <= level <= top:            # True is an int to Python
    raise DataError(f'{where}: {_short(level)} is no level; expected an integer of 0 to {top}')
  if not isinstance(vector, list) or len(vector) != widths[level + 1]:
    raise DataError(f'{where}: "vector" is {_short(vector)}; expected a list of {widths[level + 1]} numbers, as level '
                    f'{level} has them')
  for number, value in enumerate(vector, 1):
    if type(value) not in (int, float):
      raise DataError(f'{where}, number {number}: {_short(value)} is no number; expected numbers in "vector"')
    if not abs(value) <= _LARGEST:                               # of NaN neither this nor the opposite is true
      raise DataError(f'{where}, number {number}: {_short(value)} is not finite, or too large for float32; expected '
                      'finite numbers in "vector"')
  return {'level': np.array([level], np.int32), 'vector': np.array([vector], np.float64).astype(np.float32),
          'at': [level]}


def _draws(source: str) -> Iterator[_Named]:
  if not re.fullmatch('[1-9][0-9]{0,3}', source) or int(source) > _DRAWS:
    raise DataError(f'--input={source[:40]}: expected how many texts to draw, 1 to {_DRAWS}')
  for number in range(int(source)):
    yield f'draw{number}', {'draw': np.array([number], np.int32)}
