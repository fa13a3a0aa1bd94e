"""Trees as arrays of constant shape: documents packed until the rows of some level are used up.

A node of level l is a row of at most L_l - 1 units and a terminator: END where the node ends, CONT where it goes on in
the next row, for it has more units than fit. Units of level 0 are bytes, those above are rows of the level below; ids
below FIRST are specials. Equal rows are one, with a count: words wherever they are, the others within their document.
"""

from typing import Iterator, NamedTuple, Sequence, Union

import numpy as np

from data_pipelines import trees

PAD, END, CONT, MASK, JOIN, FIRST = range(6)


class Row(NamedTuple):
  """What one row holds, with all that is below it."""
  units: Union[bytes, tuple['Row | None', ...]]     # None: JOIN
  last: bool                                        # ends in END, not CONT


class Pack(NamedTuple):
  """Rows of levels 0 to K, as arrays of U_l rows; behind the last one all are 0."""
  ids: tuple[np.ndarray, ...]        # i32[U_l, L_l] a level: units, terminator, PAD
  counts: tuple[np.ndarray, ...]     # i32[U_l]: how often the row is in the text
  documents: tuple[np.ndarray, ...]  # i32[U_l]: 1, 2, ... the document that has it; of words 0


def rows(node: trees.Node, level: int, lengths: Sequence[int], joined: bool = False) -> list[Row]:
  """The rows of a node of a level, L_l = lengths[l] units each with the terminator.

  joined: neighbours below the level, sentences and what is above them, share a row where they fit into one.
  """
  if not level:
    return [Row(units, last) for units, last in trees.cut(node, lengths[0] - 1)]
  children = [rows(child, level - 1, lengths, joined) for child in node]
  if joined and level > 1:
    children = _joined(children, lengths[level - 1] - 1)
  units = tuple(row for child in children for row in child)
  return [Row(part, last) for part, last in trees.cut(units, lengths[level] - 1)]


def _joined(children, most):
  out = []
  for child in children:
    if len(child) == 1 and out and len(out[-1]) == 1 and len(out[-1][0].units) + 1 + len(child[0].units) <= most:
      out[-1] = [Row((*out[-1][0].units, None, *child[0].units), True)]
    else:
      out.append(child)
  return out


def node(found: Sequence[Row], level: int) -> trees.Node:
  """The node that has these rows; the inverse of `rows`. ValueError where the last one goes on."""
  parts = split(found, level)
  if len(parts) != 1:
    raise ValueError(f'{len(parts)} nodes; expected 1')
  return parts[0]


def split(found: Sequence[Row], level: int) -> list[trees.Node]:
  """The nodes that rows in a row hold: one ends at END, and at JOIN inside of a row.

  Whatever was made up is read as well as it goes: rows that go on although none follows end there.
  """
  out, units = [], []
  for i, row in enumerate(found):
    units.extend(row.units)
    if row.last or i + 1 == len(found):
      out.append(units)
      units = []
  if not level:
    return [bytes(units) for units in out]
  return [tuple(split(part, level - 1)) for units in out for part in _parted(units)]


def _parted(units):
  parts = [[]]
  for unit in units:
    if unit is None:
      parts.append([])
    else:
      parts[-1].append(unit)
  return parts


class Packer:
  """Fills packs, one after another.

  Args:
    most: U_l, rows a level, 0 to K.
    lengths: L_l, units of a row with its terminator, 2 or more.
    joined: as for `rows`.
    nodes: N_l, 0 to K - 1: all rows of any one level above l have together at most so many nodes of level l below them,
      equal ones counted each time. (): as many as there may be.

  Has `largest`: as nodes, the most that a pack had so far.

  ValueError where a pack might not hold one row of level K with all that is below it.
  """

  def __init__(self, most: Sequence[int], lengths: Sequence[int], joined: bool = False, nodes: Sequence[int] = ()):
    if len(most) != len(lengths) or min(lengths) < 2:
      raise ValueError(f'rows {tuple(most)}, lengths {tuple(lengths)}: expected as many of both, and lengths of 2 or '
                       'more')
    self.most, self.lengths, self.joined, self.top = tuple(most), tuple(lengths), joined, len(most) - 1
    if nodes and len(nodes) != self.top:
      raise ValueError(f'nodes {tuple(nodes)}: expected {self.top}, one for each level but the highest, or none')
    self.nodes, self.largest = tuple(nodes) or (float('inf'),) * self.top, [0] * self.top
    need = 1
    for level in range(self.top, -1, -1):
      if most[level] < need or level < self.top and self.nodes[level] < need:
        name, given = ('rows', most) if most[level] < need else ('nodes', nodes)
        raise ValueError(f'{name} {tuple(given)}: level {level} needs at least {need} for lengths {tuple(lengths)}')
      need *= lengths[level] - 1
    self._clear()

  def add(self, tree: trees.Node, document: int) -> Iterator[Pack]:
    """Puts a node of level K in; yields the packs that it fills. Documents are told apart by any number."""
    for row in rows(tree, self.top, self.lengths, self.joined):
      if not self._try(row, document):
        yield self._take()
        self._try(row, document)

  def rest(self) -> Iterator[Pack]:
    """The last pack, if anything is in it."""
    if self._counts[self.top]:
      yield self._take()

  def _clear(self):
    self._found = [{} for _ in self.most]           # (document, ids, last) -> row number
    self._counts = [[] for _ in self.most]
    self._below = [[] for _ in self.most]           # of each row, how many nodes of each level are below it
    self._nodes = [np.zeros(level, np.int64) for level in range(len(self.most))]     # the sum over a level's rows
    self._documents = {}

  def _try(self, row, document) -> bool:
    """Whether a row of level K went in; if not, nothing of it did."""
    journal, known = [], document in self._documents
    number = self._documents.setdefault(document, len(self._documents) + 1)
    self._place(row, self.top, number, journal)
    if (all(len(c) <= most for c, most in zip(self._counts, self.most))
        and all(number <= most for found in self._nodes for number, most in zip(found, self.nodes))):
      return True
    for level, key in reversed(journal):
      at = self._found[level][key]
      self._counts[level][at] -= 1
      if not self._counts[level][at]:               # it was new, so it is the last one
        self._counts[level].pop()
        self._nodes[level] -= self._below[level].pop()
        del self._found[level][key]
    if not known:
      del self._documents[document]
    return False

  def _place(self, row, level, document, journal) -> int:
    """The number of a row among those of its level, new or not."""
    if level:
      units = tuple(JOIN if u is None else FIRST + self._place(u, level - 1, document, journal) for u in row.units)
    else:
      units = tuple(FIRST + byte for byte in row.units)
    key = (document if level else 0, units, row.last)
    at = self._found[level].setdefault(key, len(self._counts[level]))
    if at == len(self._counts[level]):
      self._counts[level].append(0)
      self._below[level].append(self._inside(level, units))
      self._nodes[level] += self._below[level][at]
    self._counts[level][at] += 1
    journal.append((level, key))
    return at

  def _inside(self, level, units) -> np.ndarray:
    """How many nodes of each level below, 0 first, are below a row of these units."""
    if not level:
      return np.zeros(0, np.int64)
    children = [u - FIRST for u in units if u != JOIN]
    return np.append(sum((self._below[level - 1][c] for c in children), np.zeros(level - 1, np.int64)), len(children))

  def _take(self) -> Pack:
    ids = [np.zeros((u, n), np.int32) for u, n in zip(self.most, self.lengths)]
    counts, documents = ([np.zeros(u, np.int32) for u in self.most] for _ in range(2))
    for level, found in enumerate(self._found):
      for (document, units, last), at in found.items():
        ids[level][at, :len(units)] = units
        ids[level][at, len(units)] = END if last else CONT
        counts[level][at], documents[level][at] = self._counts[level][at], document
    self.largest = [max(most, *(int(found[level]) for found in self._nodes[level + 1:]))
                    for level, most in enumerate(self.largest)]
    self._clear()
    return Pack(tuple(ids), tuple(counts), tuple(documents))


def unpacked(pack: Pack) -> list[list[Row]]:
  """The rows of each level of a pack, as the numbers in the level above mean them."""
  levels = []
  for level, ids in enumerate(pack.ids):
    found = []
    for line in ids[:int((pack.counts[level] > 0).sum())].tolist():
      end = next(i for i, unit in enumerate(line) if unit in (END, CONT))
      inside = [unit - FIRST for unit in line[:end]]
      units = tuple(None if u < 0 else levels[-1][u] for u in inside) if level else bytes(inside)
      found.append(Row(units, line[end] == END))
    levels.append(found)
  return levels
