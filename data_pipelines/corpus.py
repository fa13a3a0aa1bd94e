"""Text -> windows of token ids, for pretraining.

A record holds `ids`, i32 (in four bytes each, whatever the vocabulary), and `count`, how many they are. The ids of a
split's documents form one stream, in order. With a tokenizer that has CLS and SEP, SEP lies between documents and the
stream is cut into `length` - 2 ids a record; what is left of a document goes on in the next one. With others, eos
(where there is one) ends a document; record r starts at r * `length` and holds 2 * `length` + 1 ids, so a window can
begin anywhere in its first half. The last records are shorter; nothing is left out.
"""

import contextlib
import functools
import hashlib
import os
from typing import BinaryIO, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from data_pipelines import DataError, documents, prepared, tokens, windows
from data_pipelines.pipeline import Source

NAME, VERSION = 'text_corpus', '1.0.0'
SAMPLE = os.path.join(os.path.dirname(__file__), 'samples', 'language')
SAMPLE_VOCABULARY = 2048     # of the sample's WordPiece
SHARD_RECORDS = 1000         # a shard, where --shards allows as many
_PIECE, _BATCH = 1 << 15, 1 << 20      # characters: of a part of a document, of what is tokenized at once
_PASSAGE = 10_000            # characters of a document of the sample
check = windows.check


@functools.cache
def builder():
  """The TFDS builder class of these records."""
  return prepared.builder(NAME, VERSION, 'Windows of token ids', lambda kinds: {
      'ids': kinds.Tensor(shape=(None,), dtype=np.int32, encoding='bytes'), 'count': kinds.Scalar(np.int64)})


def prepare(raw_dir: str, out_dir: str, *, shards: int = 64, tokenizer: str = '', vocabulary: int = 8192,
            length: int = 128, parity_split: bool = False) -> tuple[str, dict]:
  """Writes text as windows of ids: (prepared folder, report), or DataError.

  Args:
    raw_dir: a folder or a file of text; see documents.py.
    shards: files a split, at most.
    tokenizer: path of one, see `load_tokenizer`; or 'wordpiece', 'bpe', 'chars': one is trained on the documents of
      train (chars: on all, so that it knows every character). It is kept in the prepared folder as tokenizer.json.
    vocabulary: ids of a trained one, at most.
    length: ids of a window.
    parity_split: the first nine tenths of the one document become 'train', the rest 'validation'.
  """
  if not tokenizer:
    raise DataError(f'--tokenizer is missing: the path of one, or {", ".join(tokens.KINDS)} to train one')
  read = functools.partial(documents.parted if parity_split else documents.read, raw_dir)
  return _prepare(read, raw_dir, out_dir, shards, tokenizer, vocabulary, length, 'halves' if parity_split else 'whole')


def _passages(raw_dir: str, out_dir: str, *, shards: int, length: int) -> tuple[str, dict]:
  """The sample: its books are cut into passages, so that all splits have some of each."""
  read = functools.partial(documents.passages, raw_dir, _PASSAGE)
  return _prepare(read, raw_dir, out_dir, shards, 'wordpiece', SAMPLE_VOCABULARY, length, f'passages of {_PASSAGE}')


def _prepare(read: Callable[[], Iterator[documents.Document]], raw_dir: str, out_dir: str, shards: int, tokenizer: str,
             vocabulary: int, length: int, division: str) -> tuple[str, dict]:
  texts, others = documents.files(raw_dir)
  found = documents.survey(read, raw_dir)
  if tokenizer in tokens.KINDS:
    if 'train' not in found.documents:
      raise DataError(f'{raw_dir}: no documents in train to train a tokenizer on; name the path of one: --tokenizer')
    chosen = tokens.train((d.text for d in read() if tokenizer == 'chars' or d.split == 'train'), tokenizer, vocabulary)
  else:
    chosen = load_tokenizer(tokenizer)
  special = {k: getattr(chosen, k) for k in windows.CONTROL}
  top = raw_dir if os.path.isdir(raw_dir) else os.path.dirname(raw_dir)
  options = {'files': {os.path.relpath(p, top): prepared.sha256(p) for p in texts}, 'documents': division,
             'kind': chosen.kind, 'vocabulary': chosen.size, 'length': length, 'fingerprint': chosen.fingerprint,
             'special': special, 'shards': shards}
  report = {'empty_documents': found.empty, 'other_files': [os.path.relpath(p, top) for p in others]}
  with _streams(out_dir, found.documents, special) as streams:
    for split, last, ids in _encoded(chosen, (d for d in read() if d.text.strip())):
      streams[split].add(ids, last)
    for split, stream in streams.items():
      stream.facts['bytes'] = found.bytes[split]
    return _write(out_dir, streams, options, report, {tokens.FILE: chosen.json()})


def write_ids(out_dir: str, splits: Mapping[str, Iterable[np.ndarray]], *, vocabulary: int, length: int,
              special: Mapping[str, int], shards: int = 1) -> str:
  """Writes documents that are ids already, as `prepare` does with text; returns the prepared folder.

  Args:
    splits: name -> the ids i32[n] of each of its documents, without control tokens.
    vocabulary: number of ids, those of control tokens included.
    special: ids of pad, unk, cls, sep, mask, eos; -1 or left out where there is none. With cls and sep the windows are
      for 'mlm', else for 'gpt'.

  Raises:
    DataError: an id outside the vocabulary, or a control token (other than unk) inside a document.
  """
  special = {k: int(special.get(k, -1)) for k in windows.CONTROL}
  control = [i for k, i in special.items() if i >= 0 and k != 'unk']
  with _streams(out_dir, splits, special) as streams:
    for split, arrays in splits.items():
      for number, ids in enumerate(arrays):
        ids = np.asarray(ids)
        wrong = (ids < 0) | (ids >= vocabulary) | np.isin(ids, control)
        if wrong.any():
          at = int(np.argmax(wrong))
          raise DataError(f'{split}, document {number}: the id {ids[at]} at {at} is a control token, or not one of the '
                          f'vocabulary of {vocabulary}')
        streams[split].add(ids, True)
    options = {'files': {k: hashlib.sha256(s.ids()).hexdigest() for k, s in streams.items()}, 'documents': 'ids',
               'kind': 'ids', 'vocabulary': vocabulary, 'length': length, 'fingerprint': '', 'special': special,
               'shards': shards}
    return _write(out_dir, streams, options, {}, {})[0]


@contextlib.contextmanager
def _streams(out_dir: str, splits: Iterable[str], special: Mapping[str, int]):
  """An empty stream for each split; what they hold is deleted in the end."""
  with contextlib.ExitStack() as files, prepared.space(out_dir):
    yield {split: _Stream(files.enter_context(prepared.scratch(out_dir)), special) for split in splits}


class _Stream:
  """The ids of a split, on disk, for they need not fit in memory; and the `facts` about them."""

  def __init__(self, file: BinaryIO, special: Mapping[str, int]):
    self.file, self.special, self.joined = file, special, windows.objective(special) == 'mlm'
    self.facts = {'tokens': 0, 'documents': 0, 'documents_without_tokens': 0, 'unknown_tokens': 0}
    self._begun = False

  def add(self, ids: np.ndarray, last: bool) -> None:
    """Adds ids of the present document; `last`: it ends with them."""
    if len(ids):
      if self.joined and self.facts['documents'] and not self._begun:
        self._put([self.special['sep']])
      self._put(ids)
      self._begun = True
    if last and self._begun:
      self.facts['documents'] += 1
      if not self.joined and self.special['eos'] >= 0:
        self._put([self.special['eos']])
    elif last:
      self.facts['documents_without_tokens'] += 1
    self._begun &= not last

  def _put(self, ids: Sequence[int] | np.ndarray) -> None:
    ids = np.asarray(ids, '<i4')
    self.file.write(ids.tobytes())
    self.facts['tokens'] += len(ids)
    self.facts['unknown_tokens'] += int((ids == self.special['unk']).sum())

  def ids(self) -> np.ndarray:
    """The whole stream, i32[tokens], as a view of the file."""
    self.file.flush()
    size = self.facts['tokens']
    return np.memmap(self.file, '<i4', 'r', shape=(size,)) if size else np.zeros(0, '<i4')


def _encoded(tokenizer: tokens.Tokenizer, found: Iterable[documents.Document]):
  """Split, whether its document ends here, and the ids, part after part: few are in memory at a time."""
  batch, size = [], 0
  for document in found:
    left = len(document.text)
    for text in documents.pieces(document.text, _PIECE):
      left -= len(text)
      batch.append((document, not left, text))
      size += len(text)
      if size >= _BATCH:
        yield from _ids(tokenizer, batch)
        batch, size = [], 0
  yield from _ids(tokenizer, batch)


def _ids(tokenizer: tokens.Tokenizer, batch: list[tuple[documents.Document, bool, str]]):
  try:
    arrays = tokenizer.encode([text for *_, text in batch])
  except DataError:
    for document, _, text in batch:
      try:
        tokenizer.encode([text])
      except DataError as e:
        raise DataError(f'{document.file}: the document of line {document.line}: {e}') from None
    raise
  for (document, last, _), ids in zip(batch, arrays):
    yield document.split, last, ids


def _write(out_dir: str, streams: Mapping[str, _Stream], options: dict, report: dict,
           beside: Mapping[str, str]) -> tuple[str, dict]:
  length, special = options['length'], options['special']
  if length < 3:
    raise DataError(f'--length={length}: a window needs at least 3 ids')
  for stream in streams.values():
    stream.facts['windows'] = windows.count(stream.facts['tokens'], length, special)
  report = {**report, **{k: options[k] for k in ('kind', 'vocabulary', 'fingerprint', 'length')},
            'splits': {split: stream.facts for split, stream in streams.items()}}
  full = {split: stream for split, stream in streams.items() if stream.facts['windows']}
  if not full or 'train' in streams and 'train' not in full:
    raise DataError(f'{", ".join(streams)}: too few tokens for a single window; there is nothing to train on')
  counts = [stream.facts['windows'] for stream in full.values()]
  shards = min(options['shards'], -(-max(counts) // SHARD_RECORDS), *counts)       # a shard has at least one record

  def records(split, stream):
    found = windows.cut(stream.ids(), length, special)
    for i, ids in enumerate(prepared.progress(found, split, stream.facts['windows'])):
      yield i, {'ids': np.array(ids, np.int32), 'count': len(ids)}
  folder = prepared.write(
      builder(), out_dir, {k: functools.partial(records, k, s) for k, s in full.items()}, dataset='corpus',
      options=options, shards=shards, beside=beside,
      describe=lambda: ({k: s.facts for k, s in full.items()}, report))
  return folder, report


def sample(objective: str, length: int) -> str:
  """The prepared folder of the text that ships with the lab; made on first use, in $XDG_CACHE_HOME/lab or ~/.cache/lab.

  'mlm': both books, with a WordPiece trained on them. 'gpt': tiny Shakespeare by characters, divided as nanoGPT does.
  """
  if objective == 'gpt':
    return prepared.sample(os.path.join(SAMPLE, 'shakespeare'), NAME, VERSION, prepare, tokenizer='chars',
                           length=length, parity_split=True)
  return prepared.sample(SAMPLE, NAME, VERSION, _passages, length=length)


def find(folder: str, objective: str = 'mlm', length: int = 128) -> str:
  """FOLDER, or NAME/VERSION in it, which is prepared; of 'sample' that of the objective and length. Else DataError."""
  path = sample(objective, length) if folder == 'sample' else prepared.find(folder, NAME, VERSION)
  if not path:
    raise DataError(f'{folder}: no prepared text there. Prepare it with `python -m data_pipelines.prepare corpus '
                    f'--raw_dir=TEXT --out_dir={folder} --tokenizer=wordpiece --length={length}`')
  dataset = prepared.manifest(path)['dataset']
  if dataset != 'corpus':
    raise DataError(f'{path}: a data set of {dataset!r}; expected one prepared as corpus')
  return path


def tokenizer(folder: str) -> tokens.Tokenizer:
  """The tokenizer of a prepared folder. Raises DataError where it has none, for its ids came without one."""
  return tokens.kept(find(folder))


def load_tokenizer(path: str) -> tokens.Tokenizer:
  """The tokenizer of a prepared corpus, or one that `tokens.load` reads. Raises DataError."""
  inside = prepared.find(path, NAME, VERSION)
  return tokens.kept(inside) if inside else tokens.load(path)


def facts(folder: str) -> dict:
  """What is known of a prepared folder: kind, vocabulary (ids), length, fingerprint, special (name -> id), and splits:
  name -> tokens, documents, windows, bytes (of their text, where it was text), ...
  """
  found = prepared.manifest(find(folder))
  return {**{k: found['options'][k] for k in ('kind', 'vocabulary', 'length', 'fingerprint', 'special')},
          'splits': {split: entry['facts'] for split, entry in found['splits'].items()}}


def source(folder: str, split: str, objective: str, *, length: int, documents: str = 'apart',
           share: float = 0.15) -> Source:
  """A split as the pipeline reads it; S = length, n = max(1, floor(share * S)).

  'mlm', windows cls, S - 2 tokens, sep, masked by (seed, number); in evaluation by the record, so always alike:
    ids       i32[S]   of the chosen tokens 80 % are mask, 10 % another id (never a control token), 10 % as they were
    places    i32[n]   where they are, ascending; 0 behind the last
    labels    i32[n]   what they were; 0 behind the last
    weights   f32[n]   1, and 0 behind the last: fewer are chosen of a window that isn't full, but one at least
  'gpt', windows at r * S, in 'train' moved on by 0 to S - 1 tokens, another number each epoch:
    ids       i32[S]
    labels    i32[S]   the ids that follow
    weights   f32[S]   0 where none follows, and behind eos where documents are apart
  Both, with pad (0 if there is none) behind the end:
    segments  i32[S]   1, 2, ... the document within the window; all 1 where they are together; 0 behind the end

  Args:
    folder: of a prepared corpus; or 'sample': text that ships with the lab.
    documents: 'apart' or 'together'.

  Raises:
    DataError: not prepared, of another length, for the other objective, or no such split.
  """
  path = find(folder, objective, length)
  found = prepared.manifest(path)
  special, prepared_length = found['options']['special'], found['options']['length']
  fits = min(special['cls'], special['sep'], special['mask']) >= 0
  if objective != windows.objective(special) or objective == 'mlm' and not fits:
    kinds = 'wordpiece' if objective == 'mlm' else 'bpe or chars'
    raise DataError(f'{path}: its tokenizer ({found["options"]["kind"]}) does not fit the objective {objective!r}; '
                    f'prepare the text with `python -m data_pipelines.prepare corpus`, with one of kind {kinds}')
  if prepared_length != length:
    raise DataError(f'{path}: its windows have {prepared_length} ids, wanted are {length}: prepare the text with '
                    '`python -m data_pipelines.prepare corpus --raw_dir=TEXT --out_dir=OUT '
                    f'--tokenizer={path} --length={length}`')
  if split not in found['splits']:
    raise DataError(f'{path}: no split {split!r}; there are {", ".join(sorted(found["splits"]))}')
  entry, apart = found['splits'][split], {'apart': True, 'together': False}[documents]
  vocabulary = found['options']['vocabulary']
  if objective == 'mlm':
    most = max(1, int(share * length))
    augment = functools.partial(windows.masked, length, most, vocabulary, special, apart)
  else:
    augment = functools.partial(windows.following, length, entry['records'], split == 'train', special, apart)
  return Source(tuple(os.path.join(path, name) for name in sorted(entry['shards'])),
                functools.partial(windows.known, vocabulary), augment, entry['records'])
