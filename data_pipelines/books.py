"""Text trees, raw files -> TFRecord: writings as packs of rows (see trees.py and packs.py). The files: books_raw.py.

Of a writing the nodes of level K are packed, one after another in the order of the files, each split for itself; a pack
may hold several writings, and a writing may be in several packs. A record is one pack of levels 0 to K:

  ids, counts, documents   i32 bytes, as packs.Pack has them: level after level, row by row
  rows, lengths            i32 bytes: U_l and L_l of each level
  writing                  the name of its first writing
"""

import collections
import contextlib
import functools
import os
from typing import BinaryIO, Iterable, Iterator, Mapping, Sequence

import numpy as np

from data_pipelines import DataError, books_raw, documents, packs, prepared, trees
from data_pipelines import templates as made_up
from data_pipelines.pipeline import Source, tensorflow

NAME, VERSION = 'text_trees', '1.0.0'
SAMPLE = os.path.join(os.path.dirname(__file__), 'samples', 'language', 'books')
_ARRAYS = ('ids', 'counts', 'documents')
_SIZES = ('rows', 'lengths')
_SHARD_RECORDS = 1000        # a shard, where --shards allows as many
_NAMES = 10                  # of writings, that a report tells
_CONTROL = bytes(b for b in (*range(32), 127) if b not in b'\t\n\r')


@functools.cache
def builder(name: str = NAME):
  """The TFDS builder class of these records."""
  return prepared.builder(name, VERSION, 'Text as packs of rows', lambda kinds: {
      **{k: kinds.Tensor(shape=(None,), dtype=np.int32, encoding='bytes') for k in (*_ARRAYS, *_SIZES)},
      'writing': kinds.Text()})


def prepare(raw_dir: str, out_dir: str, *, shards: int = 64, rows: Sequence[int] = (160, 32, 12),
            lengths: Sequence[int] = (12, 12, 4), nodes: Sequence[int] = (), joined: bool = False, whole: bool = False,
            longest_word: int = 200, most_control: float = 0.01, outliers: str = 'drop') -> tuple[str, dict]:
  """Writes the texts of a file or folder as packs: (prepared folder, report), or DataError naming file and line.

  Args:
    rows: U_l, rows of a pack of each level, 0 (words) to K, at most 4 (books).
    lengths: L_l, units of such a row with its terminator.
    nodes: N_l, nodes of each level but K in the rows of any level above; () as many as fit. See packs.Packer.
    joined: neighbours share a row where they fit; see packs.rows.
    whole: a book is one writing; its chapters are, otherwise.
    longest_word: bytes between white space, at most; a writing with more in a row is an outlier.
    most_control: the share of control bytes, at most (tab, LF and CR are none); a writing with more is an outlier.
    outliers: what becomes of them: 'drop' or 'keep'. They are in the report either way.

  A text that was there before, in whatever split, is left out and counted.
  """
  found, others = books_raw.files(raw_dir)
  top = raw_dir if os.path.isdir(raw_dir) else os.path.dirname(raw_dir)
  options = {'files': {os.path.relpath(p, top): prepared.sha256(p) for p in found}, 'rows': list(rows),
             'lengths': list(lengths), 'nodes': list(nodes), 'joined': joined, 'whole': whole,
             'longest_word': longest_word, 'most_control': most_control, 'outliers': outliers, 'shards': shards}
  report = {'empty': 0, 'duplicates': 0, 'outliers': {k: {'count': 0, 'names': []} for k in ('long_word', 'control')},
            'other_files': [os.path.relpath(p, top) for p in others]}
  return _write(builder(), out_dir, _kept(raw_dir, options, report), options, report)


def _kept(raw_dir: str, options: Mapping, report: dict) -> Iterator[books_raw.Writing]:
  """The writings that are packed; the report gets what is left out. DataError where there is none, or none of train."""
  seen, splits = set(), set()
  for writing in books_raw.read(raw_dir, options['whole']):
    if not writing.text.strip():
      report['empty'] += 1
      continue
    odd = _oddities(writing.text, options)
    for reason in odd:
      entry = report['outliers'][reason]
      entry['count'] += 1
      entry['names'] += [writing.name] * (len(entry['names']) < _NAMES)
    if odd and options['outliers'] == 'drop':
      continue
    digest = documents.digest(writing.text)[:16]
    if digest in seen:
      report['duplicates'] += 1
      continue
    seen.add(digest)
    splits.add(writing.split)
    yield writing
  if not seen:
    outliers = ', '.join(f'{v["count"]} {k}' for k, v in report['outliers'].items())
    raise DataError(f'{raw_dir}: no writing remains; {report["empty"]} are empty, outliers: {outliers}. See '
                    '--longest_word and --most_control, or keep them with --outliers=keep')
  if 'train' not in splits and not {'', 'train'}.isdisjoint(books_raw.files(raw_dir)[0].values()):
    raise DataError(f'{raw_dir}: none of its {len(seen)} writings is in the split train, they are divided by their '
                    'hash; name files train, valid and test, or have a book by chapters')


def _oddities(text: bytes, options: Mapping) -> list[str]:
  """What makes a text an outlier."""
  control = len(text) - len(text.translate(None, _CONTROL))
  return (['long_word'] * (max(map(len, text.split())) > options['longest_word'])
          + ['control'] * (control > options['most_control'] * len(text)))


def _write(builder_class, out_dir: str, writings: Iterable[books_raw.Writing], options: dict,
           report: dict) -> tuple[str, dict]:
  splits, sizes = {}, _sizes()
  with contextlib.ExitStack() as files, prepared.space(out_dir):
    for place, writing in enumerate(writings):
      if writing.split not in splits:
        splits[writing.split] = _Split(files.enter_context(prepared.scratch(out_dir)), _packer(options))
      levels = _levels(writing.text)
      splits[writing.split].add(writing, place, levels)
      _measure(sizes, levels)
    splits = {split: splits[split] for split in documents.SPLITS if split in splits}
    report['splits'] = {split: found.finish() for split, found in splits.items()}
    report['statistics'] = _summary(sizes)
    counts = [facts['packs'] for facts in report['splits'].values()]
    records = {k: functools.partial(_records, k, found, options) for k, found in splits.items()}
    return prepared.write(builder_class, out_dir, records, dataset='books', options=options,
                          shards=min(options['shards'], -(-max(counts) // _SHARD_RECORDS), *counts),
                          describe=lambda: (report['splits'], report)), report


def _packer(options: Mapping) -> packs.Packer:
  try:
    if len(options['rows']) > len(trees.LEVELS):
      raise ValueError(f'{len(options["rows"])} levels; there are {len(trees.LEVELS)}: {", ".join(trees.LEVELS)}')
    return packs.Packer(options['rows'], options['lengths'], options['joined'], options['nodes'])
  except ValueError as e:
    raise DataError(f'--rows, --lengths and --nodes: {e}') from None


class _Split:
  """The packs of a split, on disk until they are written, for they need not fit in memory; and the facts about them."""

  def __init__(self, file: BinaryIO, packer: packs.Packer):
    self.file, self.packer, self.top = file, packer, packer.top
    self.names = []                  # of each pack, its first writing
    self.facts = dict.fromkeys(('writings', 'nodes', 'words', 'distinct_words', 'bytes', 'packs'), 0)
    self._first, self._words = '', set()
    self._used, self._counted = np.zeros((2, len(packer.most)), np.int64)

  def add(self, writing: books_raw.Writing, place: int, levels: list[list[trees.Node]]) -> None:
    """Packs a writing, whose nodes of each level these are."""
    for key, more in (('writings', 1), ('nodes', len(levels[self.top])), ('words', len(levels[0])),
                      ('bytes', len(writing.text))):
      self.facts[key] += more
    self._words.update(levels[0])
    self._first = self._first or writing.name
    for node in levels[self.top]:
      for pack in self.packer.add(node, place):
        self._put(pack)
        self._first = writing.name   # what did not fit begins the next pack

  def finish(self) -> dict:
    """The facts, after the last writing."""
    for pack in self.packer.rest():
      self._put(pack)
    count = len(self.names)
    fill = self._used / (count * np.array(self.packer.most))
    return self.facts | {'distinct_words': len(self._words), 'packs': count, 'fill': fill.round(3).tolist(),
                         'most_nodes': self.packer.largest,
                         'repeats': (self._counted / self._used).round(2).tolist()}

  def _put(self, pack: packs.Pack) -> None:
    self.file.write(np.concatenate([x.ravel() for arrays in pack for x in arrays]).astype('<i4').tobytes())
    self.names.append(self._first)
    for level, counts in enumerate(pack.counts):
      self._used[level] += (counts > 0).sum()
      self._counted[level] += counts.sum()

  def packed(self) -> np.ndarray:
    """All packs, i32[packs, ids, counts and documents one behind the other], as a view of the file."""
    self.file.flush()
    return np.memmap(self.file, '<i4', 'r').reshape(len(self.names), -1)


def _records(split: str, found: _Split, options: Mapping) -> Iterator[tuple[int, dict]]:
  sizes = {k: np.array(options[k], np.int32) for k in _SIZES}
  total = int(sizes['rows'].sum())
  both = prepared.progress(zip(found.packed(), found.names), split, len(found.names))
  for number, (flat, name) in enumerate(both):
    arrays = dict(zip(_ARRAYS, np.split(flat, [len(flat) - 2 * total, len(flat) - total])))
    yield number, {**arrays, **sizes, 'writing': name.encode('utf-8', 'surrogateescape')}


# what is in texts

def statistics(writings: Iterable[books_raw.Writing]) -> dict:
  """What rows and lengths may be chosen by: of each level, word to book, the number of nodes, and their sizes.

  A size is the number of children, of a word that of bytes: mean, p50, p90, p99 and max, where p90 is the least that
  nine tenths of the nodes do not exceed. Writings of nothing but white space do not count; {} where all are.
  """
  sizes = _sizes()
  for writing in writings:
    if writing.text.strip():
      _measure(sizes, _levels(writing.text))
  return _summary(sizes)


def _levels(text: bytes) -> list[list[trees.Node]]:
  """The nodes of each level, 0 to 4."""
  found = [trees.nodes(text, len(trees.LEVELS) - 1)]
  while len(found) < len(trees.LEVELS):
    found.append([child for node in found[-1] for child in node])
  return found[::-1]


def _sizes() -> list[collections.Counter]:
  """Of each level, how many nodes have a size."""
  return [collections.Counter() for _ in trees.LEVELS]


def _measure(sizes: list[collections.Counter], levels: list[list[trees.Node]]) -> None:
  for counter, nodes in zip(sizes, levels):
    counter.update(map(len, nodes))


def _summary(sizes: list[collections.Counter]) -> dict:
  out = {}
  for level, counter in enumerate(sizes):
    if counter:
      size, count = np.array(sorted(counter.items())).T
      upto = np.cumsum(count)
      told = {f'p{p}': int(size[np.searchsorted(upto, p / 100 * upto[-1])]) for p in (50, 90, 99)}
      out[trees.LEVELS[level]] = {'nodes': int(upto[-1]), 'children' if level else 'bytes': {
          'mean': round(float((size * count).sum() / upto[-1]), 2), **told, 'max': int(size[-1])}}
  return out


# prepared folders

def sample(rows: Sequence[int], lengths: Sequence[int], nodes: Sequence[int] = (), joined: bool = False) -> str:
  """The folder of the book that ships with the lab, Dracula, by chapters, in such packs; made on first use."""
  return prepared.sample(SAMPLE, NAME, VERSION, prepare, rows=rows, lengths=lengths, nodes=nodes, joined=joined)


def templates(rows: Sequence[int], lengths: Sequence[int], nodes: Sequence[int] = (), joined: bool = False) -> str:
  """The folder of made-up documents, for tests and tables: 3,000 for train, 150 for validation; made on first use.

  They are those of templates.py, of seeds 0 and 1.
  """
  return prepared.sample('', 'text_trees_templates', VERSION, _templates, rows=rows, lengths=lengths, nodes=nodes,
                         joined=joined, train=3000, validation=150)


def _templates(raw_dir: str, out_dir: str, *, shards: int, rows: Sequence[int], lengths: Sequence[int],
               nodes: Sequence[int], joined: bool, train: int, validation: int) -> tuple[str, dict]:
  del raw_dir                        # there is none
  counts = {'train': train, 'validation': validation}
  writings = (books_raw.Writing(f'{split}#{n}', text, split, 'templates', 1)
              for seed, (split, count) in enumerate(counts.items())
              for n, text in enumerate(made_up.documents(count, seed), 1))
  options = {**counts, 'rows': list(rows), 'lengths': list(lengths), 'nodes': list(nodes), 'joined': joined,
             'shards': shards}
  return _write(builder('text_trees_templates'), out_dir, writings, options, {})


def _find(folder: str, rows: Sequence[int], lengths: Sequence[int], nodes: Sequence[int], joined: bool) -> str:
  if folder in ('templates', 'sample'):
    return {'templates': templates, 'sample': sample}[folder](rows, lengths, nodes, joined)
  path = prepared.find(folder, NAME, VERSION)
  command = (f'`python -m data_pipelines.prepare books --raw_dir=TEXTS --out_dir=OUT --rows={_comma(rows)} '
             f'--lengths={_comma(lengths)}' + f' --nodes={_comma(nodes)}' * bool(nodes) + ' --joined' * joined + '`')
  if not path:
    raise DataError(f'{folder}: no packs of text there. Prepare them with {command}')
  found = prepared.manifest(path)
  if found['dataset'] != 'books':
    raise DataError(f'{path}: a data set of {found["dataset"]!r}; expected one prepared as books')
  there = [found['options'][k] for k in _SIZES]
  if there != [list(rows), list(lengths)]:
    raise DataError(f'{path}: packs of rows {_comma(there[0])} and lengths {_comma(there[1])}; wanted are rows '
                    f'{_comma(rows)} and lengths {_comma(lengths)}. Prepare such with {command}, or set those that are '
                    'there')
  if found['options']['joined'] != joined:
    raise DataError(f'{path}: packs in which neighbours {"do not " * joined}share rows. Prepare others with {command}, '
                    f'or set data.joined = {not joined}')
  held = found['options'].get('nodes', [])
  if nodes and (len(held) != len(nodes) or any(a > b for a, b in zip(held, nodes))):
    raise DataError(f'{path}: packs of {"nodes " + _comma(held) if held else "any number of nodes"}; wanted are nodes '
                    f'{_comma(nodes)}. Prepare such with {command}, or set data.nodes as those that are there, or ()')
  return path


def _comma(numbers: Iterable[int]) -> str:
  return ','.join(map(str, numbers))


def source(folder: str, split: str, *, rows: Sequence[int], lengths: Sequence[int],
           nodes: Sequence[int] = (), joined: bool = False) -> Source:
  """A split as the pipeline reads it, for each level l, 0 to K:

    ids_l        i32[U_l, L_l]   units, terminator, PAD
    counts_l     i32[U_l]        how often the row is in the text
    documents_l  i32[U_l]        1, 2, ... the writing of the pack that has it; of words 0
    number       u32[2]          seed and n, modulo 2^32; in evaluation 0 and the record

  Args:
    folder: of a prepared data set; or 'templates'; or 'sample': a book.
    split: 'train', 'validation' or 'test'.
    rows: U_l of each level; those of the prepared data set.
    lengths: L_l.
    nodes: N_l, the most that the prepared data set may have of each level but the highest; (): any.
    joined: whether neighbours share rows in the prepared data set.

  Raises:
    DataError: not prepared, no such split, or packs of other sizes.
  """
  path = _find(folder, rows, lengths, nodes, joined)
  found = prepared.manifest(path)
  if split not in found['splits']:
    raise DataError(f'{path}: no split {split!r}; there are {", ".join(sorted(found["splits"]))}')
  entry = found['splits'][split]
  shards = tuple(os.path.join(path, name) for name in sorted(entry['shards']))
  return Source(shards, decode, functools.partial(_example, tuple(rows), tuple(lengths)), entry['records'])


def decode(serialized) -> dict:
  """A record, string[] -> ids, counts, documents, rows and lengths i32[?], as above, and writing string[]."""
  tf = tensorflow()
  fields = tf.io.parse_single_example(serialized, {
      k: tf.io.FixedLenFeature([], tf.string) for k in (*_ARRAYS, *_SIZES, 'writing')})
  return {k: v if k == 'writing' else tf.io.decode_raw(v, tf.int32) for k, v in fields.items()}


def _example(rows: tuple[int, ...], lengths: tuple[int, ...], fields: dict, seed) -> dict:
  tf = tensorflow()
  example = {'number': tf.cast(seed % (1 << 32), tf.uint32)}
  for key in _ARRAYS:
    shapes = [(u, n) if key == 'ids' else (u,) for u, n in zip(rows, lengths)]
    parts = tf.split(fields[key], [int(np.prod(s)) for s in shapes])
    example |= {f'{key}_{level}': tf.reshape(part, s) for level, (part, s) in enumerate(zip(parts, shapes))}
  return example


def check(serialized: bytes) -> str:
  """What is wrong with a record; '' if nothing. For `prepare verify`."""
  tf = tensorflow()
  try:
    fields = {k: v.numpy() for k, v in decode(tf.constant(serialized)).items()}
  except tf.errors.OpError:
    return 'not a record of this data set'
  where = f'writing {fields["writing"].decode("utf-8", "replace")}'
  rows, lengths = (fields[k].tolist() for k in _SIZES)
  cells = [u * n for u, n in zip(rows, lengths)]
  wanted = [sum(cells), sum(rows), sum(rows)]
  if not rows or len(rows) != len(lengths) or min(rows + lengths) < 1 or wanted != [len(fields[k]) for k in _ARRAYS]:
    return f'{where}: its arrays are not of rows {_comma(rows)} and lengths {_comma(lengths)}'
  ids = np.split(fields['ids'], np.cumsum(cells)[:-1])
  counts, numbers = (np.split(fields[k], np.cumsum(rows)[:-1]) for k in _ARRAYS[1:])
  below = 256
  for level, length in enumerate(lengths):
    wrong = _wrong(ids[level].reshape(-1, length), counts[level], numbers[level], level, below)
    if wrong:
      return f'{where}, level {level}: {wrong}'
    below = int((counts[level] > 0).sum())
  return ''


def _wrong(ids: np.ndarray, counts: np.ndarray, numbers: np.ndarray, level: int, below: int) -> str:
  """What is wrong with the rows of a level, whose units are those of `below` rows, or bytes."""
  used = counts > 0
  if (counts < 0).any() or not used[0] or (used[1:] > used[:-1]).any() or ids[~used].any() or numbers[~used].any():
    return 'no row, a count below 0, or something behind the last row'
  ids = ids[used]
  ends = np.isin(ids, (packs.END, packs.CONT))
  if (ends.sum(1) != 1).any():
    return f'row {int(np.argmax(ends.sum(1) != 1))} has not exactly one terminator'
  inside = ends.cumsum(1) == 0
  good = (ids >= packs.FIRST) & (ids < packs.FIRST + below) | (ids == packs.JOIN) & (level > 0)
  wrong = np.where(inside, ~good, ~ends & (ids != packs.PAD)).any(1)
  if wrong.any():
    return f'row {int(np.argmax(wrong))} has an id that is out of range, or something behind its terminator'
  if ((numbers[used] > 0) != (level > 0)).any():
    return 'a row above the words without its document, or a word with one'
  return ''


def texts(ids: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> list[bytes]:
  """The text of each row of level K of a pack, in order: ids i32[U_l, L_l] and counts i32[U_l] of each level l."""
  top = len(ids) - 1
  found = packs.unpacked(packs.Pack(tuple(ids), tuple(counts), ()))[top]
  return [trees.join(tuple(packs.split([row], top)), top + 1) for row in found]
