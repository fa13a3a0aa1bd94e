"""Two tasks of GLUE, raw files -> TFRecord: labelled sentences, for fine-tuning.

  cola   whether a sentence is acceptable English (Warstadt et al. 2019, arXiv 1805.12471). The published files:
         in_domain_train.tsv is 'train', in_domain_dev.tsv 'validation', out_of_domain_dev.tsv 'test'; both dev files,
         in that order, are GLUE's 'dev'.
  sst2   whether a phrase of a review is positive (Socher et al. 2013), as GLUE has it. Of train.tsv or .parquet nine
         tenths, by a hash of the sentence, are 'train', the rest 'validation'; dev.tsv or validation.parquet is 'dev'.
         The labels of GLUE's own test files are secret, so those files are not read.

A record holds `ids`, i32 bytes, of the whole sentence without control tokens; `label`, a place among the names that the
manifest lists; `text`; and `row`, the line of its file (a row of a Parquet file, from 1 on; in CoLA's 'dev' the rows of
the second file go on behind those of the first).
"""

import collections
import functools
import os
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from data_pipelines import DataError, corpus, documents, prepared, sentences, tokens, windows
from data_pipelines.pipeline import Source, tensorflow, within

VERSION = '1.0.0'
LABELS = {'cola': ('unacceptable', 'acceptable'), 'sst2': ('negative', 'positive')}
_SHARD_RECORDS = 1000        # a shard, where --shards allows as many
_BATCH = 4096                # sentences that are tokenized at once


class Row(NamedTuple):
  """A labelled sentence: its text, label, number, and its place for a message."""
  text: str
  label: int
  number: int
  where: str


@functools.cache
def builder(task: str):
  """The TFDS builder class of the records of 'cola' or 'sst2'."""
  return prepared.builder(f'{task}_sentences', VERSION, 'Labelled sentences', lambda kinds: {
      'ids': kinds.Tensor(shape=(None,), dtype=np.int32, encoding='bytes'), 'label': kinds.Scalar(np.int64),
      'text': kinds.Text(), 'row': kinds.Scalar(np.int64)})


def prepare(raw_dir: str, out_dir: str, *, task: str, shards: int = 64, tokenizer: str = '') -> tuple[str, dict]:
  """Writes a task's sentences as ids: (prepared folder, report), or DataError naming file and line.

  Args:
    raw_dir: folder of the raw files; or the name under which TFDS has them, if it has prepared them on this machine:
      glue/cola, glue/sst2. There GLUE's train is divided as of sst2, its validation is 'dev'.
    task: 'cola' or 'sst2'.
    tokenizer: path of one, see `corpus.load_tokenizer`.
  """
  if not tokenizer:
    raise DataError('--tokenizer is missing: the path of one, or the folder of a prepared corpus')
  chosen = corpus.load_tokenizer(tokenizer)
  if os.path.isdir(raw_dir):
    splits, files = _cola(raw_dir) if task == 'cola' else _sst2(raw_dir)
  else:
    splits, files = _tfds(raw_dir), [raw_dir]
  digests = {os.path.basename(p): prepared.sha256(p) if os.path.isfile(p) else '' for p in files}
  return _write(out_dir, task, splits, LABELS[task], chosen, shards, digests)


def _write(out_dir: str, task: str, splits: Mapping[str, list[Row]], names: Sequence[str], chosen: tokens.Tokenizer,
           shards: int, files: Mapping[str, str]) -> tuple[str, dict]:
  facts, trained = {}, {r.text for r in splits['train']}
  for split, rows in splits.items():
    counts = collections.Counter(r.label for r in rows)
    facts[split] = {'sentences': len(rows), 'of_each_label': {name: counts[i] for i, name in enumerate(names)},
                    'also_in_train': 0 if split == 'train' else sum(r.text in trained for r in rows)}
    if split == 'train' and len(counts) < 2:
      where = rows[0].where if rows else ', '.join(files)
      raise DataError(f'{where}: the sentences of train are all of one class, or there are none; nothing can be learnt '
                      'from them')
  splits = {split: rows for split, rows in splits.items() if rows}
  sizes = [len(rows) for rows in splits.values()]
  report = {'labels': list(names), 'splits': facts}
  options = {'files': dict(files), 'fingerprint': chosen.fingerprint, 'vocabulary': chosen.size, 'kind': chosen.kind,
             'special': {k: getattr(chosen, k) for k in windows.CONTROL}, 'labels': list(names), 'shards': shards}
  folder = prepared.write(
      builder(task), out_dir, {k: functools.partial(_records, k, rows, chosen) for k, rows in splits.items()},
      dataset=task, options=options, shards=min(shards, -(-max(sizes) // _SHARD_RECORDS), *sizes),
      describe=lambda: (facts, report), beside={tokens.FILE: chosen.json()})
  return folder, report


def _records(split: str, rows: list[Row], chosen: tokens.Tokenizer):
  found = (pair for i in range(0, len(rows), _BATCH) for pair in _encoded(rows[i:i + _BATCH], chosen))
  for i, (row, ids) in enumerate(prepared.progress(found, split, len(rows))):
    yield i, {'ids': ids, 'label': row.label, 'text': row.text, 'row': row.number}


def _encoded(rows: list[Row], chosen: tokens.Tokenizer) -> Iterator[tuple[Row, np.ndarray]]:
  try:
    arrays = chosen.encode([r.text for r in rows])
  except DataError:
    for row in rows:
      try:
        chosen.encode([row.text])
      except DataError as e:
        raise DataError(f'{row.where}: {e}') from None
    raise
  for row, ids in zip(rows, arrays):
    if not len(ids):
      raise DataError(f'{row.where}: the sentence {row.text[:60]!r} has no token')
    yield row, ids


# raw files

def _cola(folder: str) -> tuple[dict[str, list[Row]], list[str]]:
  paths = {split: os.path.join(folder, f'{name}.tsv') for split, name in (
      ('train', 'in_domain_train'), ('validation', 'in_domain_dev'), ('test', 'out_of_domain_dev'))}
  for path in paths.values():
    if not os.path.isfile(path):
      raise DataError(f'{path}: missing; expected the files of CoLA as published (cola_public/raw)')
  splits = {split: list(_tsv(path, ('source', 'label', 'mark', 'sentence'), header=False))
            for split, path in paths.items()}
  first, second = splits['validation'], splits['test']
  behind = first[-1].number if first else 0
  splits['dev'] = first + [r._replace(number=behind + r.number) for r in second]
  return splits, list(paths.values())


def _sst2(folder: str) -> tuple[dict[str, list[Row]], list[str]]:
  paths = {}
  for split, stems in (('train', ('train',)), ('dev', ('dev', 'validation'))):
    names = [stem + end for stem in stems for end in ('.tsv', '.parquet', '-00000-of-00001.parquet')]
    paths[split] = next((os.path.join(folder, n) for n in names if os.path.isfile(os.path.join(folder, n))), '')
    if not paths[split]:
      raise DataError(f'{folder}: none of {", ".join(names)} is there')
  rows = {split: list(_parquet(path) if path.endswith('.parquet') else _tsv(path, (), header=True))
          for split, path in paths.items()}
  return {**_divided(rows['train']), 'dev': rows['dev']}, list(paths.values())


def _divided(rows: Iterable[Row]) -> dict[str, list[Row]]:
  """Nine tenths and one, by a hash of the sentence: equal sentences stay together."""
  splits = {'train': [], 'validation': []}
  for row in rows:
    held_out = int.from_bytes(documents.digest(row.text)[:8]) % 10 == 9
    splits['validation' if held_out else 'train'].append(row)
  return splits


def _tsv(path: str, columns: Sequence[str], header: bool) -> Iterator[Row]:
  """The rows of a file of tabs; quotes are characters like others. With a header that names the columns."""
  for number, line in documents.lines(path):
    where, fields = f'{path}:{number}', line.removesuffix('\n').split('\t')
    if header and number == 1:
      columns = [f.strip() for f in fields]
      if not {'sentence', 'label'} <= set(columns):
        raise DataError(f'{where}: a header with sentence and label was expected, found {line.strip()[:60]!r}')
      continue
    if len(fields) != len(columns):
      raise DataError(f'{where}: {len(fields)} columns, expected {len(columns)}: {", ".join(columns)}')
    found = dict(zip(columns, fields))
    yield _row(found['sentence'], found['label'].strip(), number, where)


def _parquet(path: str) -> Iterator[Row]:
  import pyarrow
  from pyarrow import parquet
  try:
    table = parquet.ParquetFile(path).read()
  except (pyarrow.ArrowException, OSError) as e:
    raise DataError(f'{path}: no Parquet file, or a broken one ({" ".join(str(e).split())[:80]})') from None
  if not {'sentence', 'label'} <= set(table.column_names):
    raise DataError(f'{path}: the columns {", ".join(table.column_names)}; expected sentence and label')
  rows = zip(*(table.column(name).to_pylist() for name in ('sentence', 'label')))
  for number, (text, label) in enumerate(rows, 1):
    where = f'{path}: row {number}'
    if not isinstance(text, str):
      raise DataError(f'{where}: the sentence is {text!r}, no text')
    yield _row(text, str(label), number, where)


def _row(text: str, label: str, number: int, where: str) -> Row:
  text = text.strip()        # GLUE's sentences end in a space
  if not text:
    raise DataError(f'{where}: the sentence is empty')
  if '\0' in text:
    raise DataError(f'{where}: a NUL character in the sentence; the file is damaged, or not UTF-8')
  if label not in ('0', '1'):
    raise DataError(f'{where}: the label {label!r}, expected 0 or 1'
                    + '; GLUE keeps the labels of its test files to itself' * (label == '-1'))
  return Row(text, int(label), number, where)


def _tfds(name: str) -> dict[str, list[Row]]:
  tensorflow()
  import tensorflow_datasets as tfds
  try:
    found = tfds.load(name, split={'train': 'train', 'dev': 'validation'}, download=False)
  except Exception as e:       # TFDS raises what its parts raise
    raise DataError(f'--raw_dir={name}: no such folder, and TFDS has no prepared data set of this name here '
                    f'({type(e).__name__}). Name the folder of the raw files, or run tfds.load({name!r}) where there '
                    'is a network') from None
  rows = {split: sorted((_row(r['sentence'].decode('utf-8'), str(r['label']), int(r['idx']) + 1,
                              f'{name}, {split}, idx {r["idx"]}') for r in tfds.as_numpy(data)), key=lambda r: r.number)
          for split, data in found.items()}
  return {**_divided(rows['train']), 'dev': rows['dev']}


# prepared folders

def sample(task: str, tokenizer_folder: str = 'sample') -> str:
  """The prepared folder of a stand-in for 'cola' or 'sst2', made of the books that ship with the lab; see sentences.py.

  Args:
    tokenizer_folder: of a prepared corpus, whose tokenizer is taken; 'sample': the one of the sample for 'mlm'.
  """
  chosen = corpus.tokenizer(tokenizer_folder)

  def make(raw_dir, out_dir, *, shards, fingerprint):
    del fingerprint
    names, found = sentences.TASKS[task](raw_dir)
    splits = {'train': [], 'validation': [], 'dev': []}
    for number, (key, text, label) in enumerate(found, 1):
      split = {'test': 'dev'}.get(documents.by_hash(key), documents.by_hash(key))
      splits[split].append(Row(text, label, number, f'sample {task}: sentence {number}'))
    return _write(out_dir, task, splits, names, chosen, shards, {'sample': task})
  return prepared.sample(corpus.SAMPLE, builder(task).name, VERSION, make, fingerprint=chosen.fingerprint)


def _find(folder: str) -> str:
  paths = {p for p in (prepared.find(folder, f'{task}_sentences', VERSION) for task in LABELS) if p}
  if len(paths) > 1:
    raise DataError(f'{folder}: two data sets, {" and ".join(sorted(paths))}; name the one that is meant')
  if not paths:
    raise DataError(f'{folder}: no prepared sentences there. Prepare them with `python -m data_pipelines.prepare cola '
                    f'--raw_dir=COLA --out_dir={folder} --tokenizer=PATH`, or sst2')
  path, = paths
  dataset = prepared.manifest(path)['dataset']
  if dataset not in LABELS:
    raise DataError(f'{path}: a data set of {dataset!r}; expected one prepared as {" or ".join(LABELS)}')
  return path


def labels(folder: str) -> tuple[str, ...]:
  """The names of the labels of a prepared folder, in their order."""
  return tuple(prepared.manifest(_find(folder))['options']['labels'])


def tokenizer(folder: str) -> tokens.Tokenizer:
  """The tokenizer that made the ids of a prepared folder."""
  return tokens.kept(_find(folder))


def source(folder: str, split: str, *, length: int, labels: Sequence[str] = ()) -> Source:
  """A split as the pipeline reads it, S = length:

    ids        i32[S]  cls, tokens, sep, pad; of a tokenizer without cls: tokens, eos if there is one, pad (or 0)
    segments   i32[S]  1, and 0 behind the end
    label      i32[]   a place in `labels`
    row        i32[]   where the sentence is from
    truncated  i32[]   1 where the sentence did not fit, so its end is missing

  Args:
    folder: of a prepared task.
    split: its name; or several, as TFDS writes them: 'train+validation'.
    labels: names in the order that the model has; () the order of the data.

  Raises:
    DataError: not prepared, no such split, or a label of the data that `labels` has not.
  """
  path = _find(folder)
  found = prepared.manifest(path)
  parts = split.split('+')
  for part in parts:
    if part not in found['splits']:
      raise DataError(f'{path}: no split {part!r}; there are {", ".join(sorted(found["splits"]))}')
  names, wanted = found['options']['labels'], list(labels or found['options']['labels'])
  if not set(names) <= set(wanted):
    raise DataError(f'{path}: the labels of the data are {", ".join(names)}, those of the model {", ".join(wanted)}; '
                    'labels go by their names')
  entries = [found['splits'][part] for part in dict.fromkeys(parts)]
  options = found['options']
  augment = functools.partial(_example, length, options['vocabulary'], options['special'],
                              [wanted.index(name) for name in names])
  shards = tuple(os.path.join(path, name) for entry in entries for name in sorted(entry['shards']))
  return Source(shards, decode, augment, sum(entry['records'] for entry in entries))


def decode(serialized) -> dict:
  """A record, string[] -> ids i32[n], label i64[], text string[], row i64[]."""
  tf = tensorflow()
  fields = tf.io.parse_single_example(serialized, {
      'ids': tf.io.FixedLenFeature([], tf.string), 'text': tf.io.FixedLenFeature([], tf.string),
      'label': tf.io.FixedLenFeature([], tf.int64), 'row': tf.io.FixedLenFeature([], tf.int64)})
  return {**fields, 'ids': tf.io.decode_raw(fields['ids'], tf.int32, little_endian=True)}


def _example(length: int, vocabulary: int, special: Mapping[str, int], places: list[int], fields: dict, seed) -> dict:
  del seed
  tf = tensorflow()
  label = within(fields['label'], len(places), 'label')
  before, behind = (('cls',), ('sep',)) if special['cls'] >= 0 else ((), ('eos',) * (special['eos'] >= 0))
  before, behind = ([special[k] for k in names] for names in (before, behind))
  room = length - len(before) - len(behind)
  parts = [tf.constant(before, tf.int32), within(fields['ids'], vocabulary, 'ids')[:room],
           tf.constant(behind, tf.int32)]
  ids = tf.concat(parts, 0)
  size = tf.size(ids)
  ids = tf.pad(ids, [[0, length - size]], constant_values=max(special['pad'], 0))
  return {'ids': tf.ensure_shape(ids, [length]), 'segments': tf.cast(tf.range(length) < size, tf.int32),
          'label': tf.gather(tf.constant(places, tf.int32), label), 'row': tf.cast(fields['row'], tf.int32),
          'truncated': tf.cast(tf.size(fields['ids']) > room, tf.int32)}


def check(serialized: bytes) -> str:
  """What is wrong with a record; '' if nothing. For `prepare verify`."""
  tf = tensorflow()
  try:
    fields = decode(tf.constant(serialized))
  except tf.errors.OpError:
    return 'not a record of this data set, or its ids are not of 4 bytes each'
  ids, label = fields['ids'].numpy(), int(fields['label'])
  if not len(ids) or ids.min() < 0:
    return f'row {int(fields["row"])}: no ids, or negative ones'
  return '' if label in (0, 1) else f'row {int(fields["row"])}: label {label}, expected 0 or 1'
