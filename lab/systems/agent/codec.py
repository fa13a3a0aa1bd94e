"""Any bytes as a file of vectors and of what they leave open, and back, byte for byte.

Text becomes the rows of level K, the top one, and each row one vector, of int8s. What the vector is taken apart to
gives distributions of everything in the row, by which an arithmetic coder writes it. The cost of a text is all of it:

  bits = vectors + structure and bytes given the vectors + header

The vectors' bits are counted. No model predicts them; they are packed by zlib, about 6 bits a number where they are
Gaussian, and usually dominate: a network that rebuilds its text well still has d_(K+1) numbers a row to pay for. One
that is untrained pays about 8 bits a byte beside that. A sentence's memory of its document (memory.py) is not used.

Distributions depend on the vectors and on which places there are, never on the text before. They come from floating
point, so text is decoded by the program that coded it, on the same kind of device; where arithmetic differs a checksum
tells.

The file: LABTREE1; u32, little-endian, the length of the header; the header, JSON; then the parts, one after another:

  groups      zlib of JSON: of levels 4 to K + 1 the number of each node's children. Lists may be empty, never nodes
  vectors     zlib of i8[rows, d_(K+1)]
  structure   of each batch of rows, level K first: every node's number of units, then of each whether it goes on, then,
              where neighbours share rows, of each unit whether it is JOIN
  bytes       of each batch of rows: the words' bytes
"""

import json
import struct
import zlib
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from data_pipelines import DataError, packs, trees

from lab.systems.agent import arithmetic, passes

MAGIC, VERSION = b'LABTREE1', 1
SCALE = 16           # int8s a unit of a vector, which has a mean square of 1: clipped beyond 127 / 16 = 7.9 deviations
MOST = 1 << 30       # bytes of a text
PLACES = 1 << 14     # for bytes, of a batch of vectors that is taken apart at once ...
BATCH = 256          # ... and vectors of it, at most
_PARTS = ('groups', 'vectors', 'structure', 'bytes')
_HEADER = 1 << 16    # bytes of a header, at most
_DIFFERS = ('the text does not come back: the file is damaged, or arithmetic on this device differs; decode on the '
            'kind of device that coded')
_Code = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


class Header(NamedTuple):
  """What a file says of itself, as in its JSON; numbers are checked before they are believed."""
  version: int
  digest: str          # of the model's parameters
  lengths: list[int]   # L_l of each level
  rows: int            # of level K
  size: int            # bytes of the text
  crc32: int           # of the text
  parts: list[int]     # bytes of each part


class Codec:
  """Codes texts with one model.

  Args:
    net: model.make(config). params: its parameters, {'params': ...}, without which no file of theirs can be read.
    config: config.data.rows and lengths are read, a number a level, 0 to K.
    digest: what tells these parameters from others, at most 64 characters; a file keeps it.
  """

  def __init__(self, net, params: Any, config, digest: str):
    if len(digest) > 64:
      raise ValueError(f'a digest of {len(digest)} characters; expected at most 64')
    self.params, self.digest = params, digest
    self.rows, self.lengths = tuple(config.data.rows), tuple(config.data.lengths)
    self.joined = config.data.joined
    self.level, self.width = len(self.lengths) - 1, config.model.widths[-1]
    self.batch = max(1, min(BATCH, PLACES // int(np.prod(self.lengths))))
    top = self.level
    self._up = jax.jit(lambda params, levels: passes.up(net, params, levels)[top].vectors[0])
    self._unfold = jax.jit(lambda params, q: passes.unfold(net, params, top, q.astype(jnp.float32) / SCALE))

  def encode(self, text: bytes) -> bytes:
    """The file of a text. DataError where the text is too long, or the model gives what is no number."""
    if len(text) > MOST:
      raise DataError(f'a text of {len(text)} bytes; at most {MOST} are coded: cut it')
    nodes, groups = taken_apart(text, self.level)
    rows = [row for node in nodes for row in packs.rows(node, self.level, self.lengths, self.joined)]
    vectors = self._vectors(nodes, rows)
    structure, spelt = arithmetic.Encoder(), arithmetic.Encoder()
    for start in range(0, len(rows), self.batch):
      piece = slice(start, start + self.batch)
      _coded(self._unfolded(vectors[piece]), len(rows[piece]), _putting(structure), _putting(spelt),
             _laid_out(rows[piece], self.lengths))
    parts = (zlib.compress(json.dumps(groups, separators=(',', ':')).encode(), 9), zlib.compress(vectors.tobytes(), 9),
             structure.done(), spelt.done())
    header = Header(VERSION, self.digest, list(self.lengths), len(rows), len(text), zlib.crc32(text),
                    [len(part) for part in parts])
    head = json.dumps(header._asdict(), separators=(',', ':')).encode()
    return b''.join((MAGIC, struct.pack('<I', len(head)), head, *parts))

  def decode(self, data: bytes) -> bytes:
    """The text of a file. DataError where it is none, is damaged, or was coded with another model or device."""
    header, parts = opened(data)
    if header.digest != self.digest:
      raise DataError(f'the file was coded with another model, {header.digest!r}; this one is {self.digest!r}: decode '
                      'with that one')
    if header.lengths != list(self.lengths):
      raise DataError(f'the file has rows of {header.lengths} units, the model of {list(self.lengths)}')
    vectors = np.frombuffer(_unzipped(parts['vectors'], header.rows * self.width, 'vectors'), np.int8)
    if vectors.size != header.rows * self.width:
      raise DataError(f'{vectors.size} numbers for {header.rows} vectors of {self.width}: the file is damaged')
    vectors, rows, room = vectors.reshape(header.rows, self.width), [], header.size
    structure, spelt = (_taking(arithmetic.Decoder(parts[name])) for name in ('structure', 'bytes'))
    for start in range(0, header.rows, self.batch):
      piece = vectors[start:start + self.batch]
      found = _coded(self._unfolded(piece), len(piece), structure, spelt, None)
      room -= int(found.last[0].sum())
      if room < 0:                                     # lest a file that is wrong fill the memory
        raise DataError(_DIFFERS)
      rows.extend(_rows(found))
    text = put_together(packs.split(rows, self.level), _groups(parts['groups'], header.size, self.level), self.level)
    if len(text) != header.size or zlib.crc32(text) != header.crc32:
      raise DataError(_DIFFERS)
    return text

  def report(self, data: bytes) -> dict[str, float]:
    """What a file costs: 'bytes' of the text, 'coded_bytes' of the file, and in bits per byte of text all,
    'bits_per_byte', and its parts, which sum to it: 'vectors', 'structure' (groups too), 'bytes_given_vectors',
    'header'. Of an empty text bits in all. DataError as for `decode`, but the model may be another, and what the parts
    hold is not read.
    """
    header, parts = opened(data)
    bits = {name: 8 * len(part) / max(header.size, 1) for name, part in parts.items()}
    whole = 8 * len(data) / max(header.size, 1)
    return {'bytes': header.size, 'coded_bytes': len(data), 'bits_per_byte': whole, 'vectors': bits['vectors'],
            'structure': bits['groups'] + bits['structure'], 'bytes_given_vectors': bits['bytes'],
            'header': whole - sum(bits.values())}

  def _vectors(self, nodes, rows) -> np.ndarray:
    """i8[R, d_(K+1)] of rows of level K, those of the nodes. A vector depends on its row alone: equal rows have one."""
    found, packer = {}, packs.Packer(self.rows, self.lengths, self.joined)

    def add(pack):
      levels = [passes.Rows(ids[None], counts[None].astype(np.float32)) for ids, counts in zip(pack.ids, pack.counts)]
      vectors = np.asarray(self._up(self.params, levels))
      if not np.isfinite(vectors).all():
        raise DataError('the vectors of the text are not finite: the model can code nothing; take another checkpoint')
      for row, vector in zip(packs.unpacked(pack)[self.level], vectors):
        found.setdefault(row, np.rint(vector * SCALE).clip(-127, 127).astype(np.int8))
    for node in nodes:
      for pack in packer.add(node, 0):
        add(pack)
    for pack in packer.rest():
      add(pack)
    return np.stack([found[row] for row in rows])

  def _unfolded(self, vectors) -> passes.Unfolded:
    """Of i8[n, d_(K+1)], n up to a batch, on the host. It is always a whole batch that is taken apart: one program."""
    batch = np.zeros((self.batch, self.width), np.int8)
    batch[:len(vectors)] = vectors
    found = jax.tree.map(np.asarray, self._unfold(self.params, batch))
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(found)):
      raise DataError('what the vectors are taken apart to is not finite: the model can code nothing; take another '
                      'checkpoint')
    return found


def taken_apart(text: bytes, level: int) -> tuple[list[trees.Node], list[list[int]]]:
  """The nodes of a level, in order, and of each level above, 4 first, how many children each node has."""
  nodes, groups = trees.nodes(text, len(trees.LEVELS) - 1), []
  for _ in range(len(trees.LEVELS) - 1 - level):
    groups.append([len(node) for node in nodes])
    nodes = [child for node in nodes for child in node]
  return nodes, groups


def put_together(nodes: list[trees.Node], groups: list[list[int]], level: int) -> bytes:
  """The inverse of `taken_apart`. DataError where groups are not of so many nodes."""
  for above, counts in enumerate(reversed(groups), level + 1):
    if sum(counts) != len(nodes):
      raise DataError(f'{len(nodes)} nodes of level {above - 1} in place of {sum(counts)}: {_DIFFERS}')
    units = iter(nodes)
    nodes = [tuple(next(units) for _ in range(count)) for count in counts]
  if len(nodes) != 1:
    raise DataError(f'{len(nodes)} texts in place of one: {_DIFFERS}')
  return trees.join(nodes[0], len(trees.LEVELS) - 1)


def opened(data: bytes) -> tuple[Header, dict[str, bytes]]:
  """The header of a file, and its parts by name. DataError where it is no such file, or was cut or damaged."""
  if data[:len(MAGIC)] != MAGIC:
    raise DataError(f'no coded text: it does not begin with {MAGIC.decode()}')
  start = len(MAGIC) + 4
  size = struct.unpack('<I', data[len(MAGIC):start])[0] if len(data) >= start else _HEADER + 1
  if size > min(_HEADER, len(data) - start):
    raise DataError('the file ends inside of its header, or the header is damaged')
  found = _json(data[start:start + size], 'header')
  if not isinstance(found, dict) or type(found.get('version')) is not int:
    raise DataError('the header is damaged: it has no version')
  if found['version'] != VERSION:
    raise DataError(f'the file has format version {found["version"]}; expected {VERSION}: decode with the version that '
                    'coded it')
  if found.keys() != set(Header._fields):
    raise DataError(f'the header is damaged: it has {sorted(found)}; expected {sorted(Header._fields)}')
  header = Header(**found)
  if not isinstance(header.digest, str) or not (
      _whole(header.size, MOST) and _whole(header.crc32, 0xffffffff) and _each(header.lengths, 1 << 16)
      and 1 <= len(header.lengths) <= len(trees.LEVELS) and _each(header.parts, len(data))
      # a row has a byte or is an empty word, which a byte parts from the next: no more rows than bytes, and one
      and len(header.parts) == len(_PARTS) and _whole(header.rows, header.size + 1)):
    raise DataError('the header is damaged: a number in it is none that is possible')
  start += size
  if sum(header.parts) != len(data) - start:
    raise DataError(f'the file has {len(data)} bytes in place of {start + sum(header.parts)}: it was cut or damaged')
  parts = {}
  for name, count in zip(_PARTS, header.parts):
    parts[name], start = data[start:start + count], start + count
  return header, parts


def _whole(value, most) -> bool:
  return type(value) is int and 0 <= value <= most


def _each(values, most) -> bool:
  return isinstance(values, list) and all(_whole(value, most) for value in values)


def _json(data, name):
  try:
    return json.loads(data)
  except (ValueError, RecursionError):
    raise DataError(f'the {name} is damaged: no JSON') from None


def _unzipped(data, most, name) -> bytes:
  """At most so many bytes, whatever the data say."""
  stream = zlib.decompressobj()
  try:
    out = stream.decompress(data, most + 1)
  except zlib.error as e:
    raise DataError(f'the {name} are damaged: {e}') from None
  if not stream.eof or stream.unused_data:
    raise DataError(f'the {name} are damaged: more or less than expected')
  return out


def _groups(data, size, level) -> list[list[int]]:
  """See `taken_apart`. A text has no more nodes of a level than bytes, and one; each is named in 12 characters."""
  above = len(trees.LEVELS) - 1 - level
  found = _json(_unzipped(data, 16 + above * 12 * (size + 1), 'groups'), 'list of groups')
  if not isinstance(found, list) or len(found) != above or not all(_each(counts, size + 1) for counts in found):
    raise DataError(f'the list of groups is damaged: expected numbers of {above} levels')
  return found


def _putting(encoder) -> _Code:
  def code(logits, symbols):
    encoder.put(symbols, arithmetic.frequencies(logits))
    return symbols
  return code


def _taking(decoder) -> _Code:
  return lambda logits, _: decoder.take(arithmetic.frequencies(logits))


def _coded(found: passes.Unfolded, count: int, structure: _Code, spelt: _Code,
           known: passes.Spelt | None) -> passes.Spelt:
  """Goes through the rows of a batch, of which the first `count` are there, in the order of the file.

  Coding and decoding are this one walk. structure and spelt get logits [M, S] and the symbols [M], None where they
  are not known, and give the symbols. Leaves are of `count` rows; what is behind a terminator is 0.
  """
  last, cont, joins, there = [], [], [None], np.ones((count, 1), bool)
  for k in range(len(found.places) - 1, -1, -1):
    at = np.nonzero(there)
    size, goes = np.zeros(there.shape, np.int64), np.zeros(there.shape, bool)
    size[at] = structure(found.places[k][at], None if known is None else known.last[k][at])
    goes[at] = structure(found.ends[k][(*at, size[at])], None if known is None else known.cont[k][at])
    last.append(size)
    cont.append(goes)
    inside = there[..., None] & (np.arange(found.places[k].shape[-1])[None, None] < size[..., None])
    there = inside.reshape(count, -1)
    if k:
      joins.append(_joined(found.joins[k - 1], there, structure, None if known is None else known.joins[k - 1]))
      there = there & ~joins[-1]
  out = np.zeros(inside.shape, np.uint8)
  out[inside] = spelt(found.bytes[:count][inside], None if known is None else known.bytes[inside])
  return passes.Spelt(last[::-1], cont[::-1], out, joins[::-1])


def _joined(logits, there, code: _Code, known) -> np.ndarray:
  """Which places hold JOIN, bool[n, P]; of those that are `there` it is coded, by logits f32[N, P]; None: none does."""
  out = np.zeros(there.shape, bool)
  if logits is not None:
    at = np.nonzero(there)
    yes = logits[at] / 2
    out[at] = code(np.stack([-yes, yes], 1), None if known is None else known[at])
  return out


def _laid_out(rows, lengths) -> passes.Spelt:
  """Rows of level K by place, as `passes.unfold` has them."""
  here, last, cont, joins, places = [(n, 0, row) for n, row in enumerate(rows)], [], [], [None], 1
  for k in range(len(lengths) - 1, -1, -1):
    size, goes = np.zeros((len(rows), places), np.int64), np.zeros((len(rows), places), bool)
    for n, place, row in here:
      size[n, place], goes[n, place] = len(row.units), not row.last
    last.append(size)
    cont.append(goes)
    if k:
      here = [(n, place * lengths[k] + i, unit) for n, place, row in here for i, unit in enumerate(row.units)]
      places *= lengths[k]
      joins.append(np.zeros((len(rows), places), bool))
      joins[-1][[n for n, _, unit in here if unit is None], [place for _, place, unit in here if unit is None]] = True
      here = [(n, place, unit) for n, place, unit in here if unit is not None]
  out = np.zeros((len(rows), places, lengths[0]), np.uint8)
  for n, place, row in here:
    out[n, place, :len(row.units)] = np.frombuffer(row.units, np.uint8)
  return passes.Spelt(last[::-1], cont[::-1], out, joins[::-1])


def _rows(found: passes.Spelt) -> list[packs.Row]:
  """The inverse of `_laid_out`."""
  top = len(found.last) - 1

  def row(k, n, place):
    if k < top and found.joins[k][n, place]:
      return None
    count = int(found.last[k][n, place])
    if not k:
      units = found.bytes[n, place, :count].tobytes()
    else:
      width = found.last[k - 1].shape[1] // found.last[k].shape[1]
      units = tuple(row(k - 1, n, place * width + i) for i in range(count))
    return packs.Row(units, not found.cont[k][n, place])
  return [row(top, n, 0) for n in range(len(found.last[top]))]
