"""Folders of prepared data: written whole or not at all, described by a manifest, checked against it.

  OUT_DIR/NAME/VERSION/   TFRecord shards and TFDS metadata; manifest.json is written last
  OUT_DIR/.incomplete/    what a killed run left behind; the next one starts over

The manifest: dataset, options (what the records were made from), report, `beside` (other files of the folder), and for
each split `records`, `facts` and `shards`; files are name -> sha256.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import types
from typing import Any, Callable, Iterable, Iterator, Mapping

import numpy as np

from data_pipelines import DataError, TooLarge
from data_pipelines.pipeline import framing, reading, tensorflow

MANIFEST = 'manifest.json'


def write(builder_class, out_dir: str, splits: Mapping[str, Callable[[], Iterable]], *, dataset: str,
          options: Mapping[str, Any], shards: int, describe: Callable[[], tuple[dict, dict]],
          beside: Mapping[str, str] = types.MappingProxyType({})) -> str:
  """Runs a TFDS builder into OUT_DIR/NAME/VERSION; returns that folder.

  Args:
    builder_class: its constructor takes data_dir and splits (name -> function that yields (key, example)).
    options: what tells this data set from another made by the same builder; a folder that holds another is refused.
    shards: how many files each split gets.
    describe: called after the last example; returns (facts of each split, report).
    beside: other files of the folder, name -> text; a tokenizer, say.
  """
  version = str(builder_class.VERSION)
  final = os.path.join(out_dir, builder_class.name, version)
  with _locked(out_dir):
    if os.path.isdir(final):
      if manifest(final)['options'] != json.loads(json.dumps(options)):
        raise DataError(f'{final} holds data made from other files or options; choose another --out_dir or delete it')
      return final
    work = os.path.join(out_dir, '.incomplete')
    if os.path.islink(work):
      os.unlink(work)
    shutil.rmtree(work, ignore_errors=True)
    try:
      with space(out_dir):
        folder = _build(builder_class, work, splits, shards)
        facts, report = describe()
        for name, text in beside.items():
          with open(os.path.join(folder, name), 'w', encoding='utf-8', newline='') as f:
            f.write(text)
        others = {name: sha256(os.path.join(folder, name)) for name in beside}
        _describe(folder, {'dataset': dataset, 'options': options, 'report': report, 'beside': others}, facts)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        os.rename(folder, final)
    finally:
      shutil.rmtree(work, ignore_errors=True)
  return final


@contextlib.contextmanager
def space(out_dir: str):
  """Raises TooLarge where what is done inside finds the disk full."""
  try:
    yield
  except OSError as e:
    if e.errno == errno.ENOSPC:
      raise TooLarge(f'{out_dir}: no space left on the disk') from None
    raise


def builder(name: str, version: str, description: str, features: Callable[[Any], dict], *, shuffled: bool = False):
  """A TFDS builder class for `write`; it takes seconds to import TFDS, so make it when it is first needed.

  Args:
    features: tfds.features -> the fields of a record.
    shuffled: whether TFDS mixes the records; they lie in the order of the examples otherwise.
  """
  import tensorflow_datasets as tfds
  registered = name                # TFDS notes a class by its name as soon as it is there

  class Builder(tfds.core.GeneratorBasedBuilder):
    """Writes the examples that it is given."""
    VERSION = tfds.core.Version(version)
    name = registered

    def __init__(self, *, splits=None, **kwargs):
      self.splits = splits or {}
      super().__init__(**kwargs)

    def _info(self):
      return tfds.core.DatasetInfo(builder=self, description=description, disable_shuffling=not shuffled,
                                   features=tfds.features.FeaturesDict(features(tfds.features)))

    def _split_generators(self, dl_manager):
      return {split: self._generate_examples(split) for split in self.splits}

    def _generate_examples(self, split):
      return self.splits[split]()
  return Builder


def _opened(out_dir: str, open_it: Callable[[], Any]):
  """A file in a folder that is made if need be; DataError where that can't be."""
  if '://' in out_dir:
    raise DataError(f'--out_dir={out_dir}: prepare into a local folder, then copy it there')
  try:
    os.makedirs(out_dir, exist_ok=True)
    return open_it()
  except OSError as e:
    raise DataError(f'{out_dir}: cannot write there: {e.strerror}') from None


def scratch(out_dir: str):
  """An empty binary file on the disk of OUT_DIR, without a name: it is gone when closed, or its process is killed."""
  return _opened(out_dir, lambda: tempfile.TemporaryFile(dir=out_dir))


@contextlib.contextmanager
def _locked(out_dir: str):
  """One writer at a time; the system frees the lock of a killed process."""
  def no_link(name, flags):         # which would lead out of the folder
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)
  with _opened(out_dir, lambda: open(os.path.join(out_dir, '.lock'), 'ab', opener=no_link)) as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield


def _build(builder_class, work: str, splits, shards: int) -> str:
  tensorflow()
  import tensorflow_datasets as tfds
  tfds.disable_progress_bar()                              # we print our own, with an estimate
  builder = builder_class(data_dir=work, splits=splits)
  with contextlib.redirect_stdout(io.StringIO()):          # it would name the folder that is about to be renamed
    how = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=shards)
    builder.download_and_prepare(download_config=how)
  return str(builder.data_dir)


def _describe(folder: str, head: dict, facts: Mapping[str, dict]) -> None:
  with open(os.path.join(folder, 'dataset_info.json'), encoding='utf-8') as f:
    counts = {s['name']: sum(int(n) for n in s['shardLengths']) for s in json.load(f)['splits']}
  names = sorted(n for n in os.listdir(folder) if '.tfrecord' in n)
  splits = {split: {'records': count, 'facts': facts.get(split, {}),
                    'shards': {n: sha256(os.path.join(folder, n)) for n in names if f'-{split}.tfrecord' in n}}
            for split, count in counts.items()}
  with open(os.path.join(folder, MANIFEST), 'w', encoding='utf-8') as f:
    json.dump({**head, 'splits': splits}, f, indent=2)
    f.flush()
    os.fsync(f.fileno())


def manifest(folder: str) -> dict:
  """Reads the manifest of a prepared folder. Raises DataError where there is none, or a broken one."""
  tf = tensorflow()
  path = os.path.join(folder, MANIFEST)
  try:
    with tf.io.gfile.GFile(path, 'r') as f:
      found = json.load(f)
    if not all(k in found for k in ('dataset', 'options', 'splits')):
      raise ValueError('keys are missing')
    for name in (*found.get('beside', ()), *(n for split in found['splits'].values() for n in split['shards'])):
      if os.path.basename(name) != name or name in ('', '.', '..'):
        raise DataError(f'{path}: {name!r} is no name of a file in its folder; such data sets are refused')
    return found
  except (tf.errors.OpError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
    why = 'missing' if isinstance(e, tf.errors.NotFoundError) else f'unreadable ({type(e).__name__})'
    raise DataError(f'{path} is {why}: the folder is no complete data set; prepare it again') from None


def find(folder: str, name: str, version: str) -> str | None:
  """The prepared folder: `folder` itself or NAME/VERSION in it; None if neither is one."""
  tf = tensorflow()
  for path in (folder, os.path.join(folder, name, version)):
    with reading(path):
      if tf.io.gfile.exists(os.path.join(path, 'dataset_info.json')):
        return path
  return None


def sample(folder: str, name: str, version: str, prepare: Callable[..., tuple[str, dict]], **options) -> str:
  """The prepared form of raw files that ship with the lab; made on first use, in $XDG_CACHE_HOME/lab or ~/.cache/lab.

  Args:
    folder: of the raw files; where one of them changes, they are prepared anew.
    prepare: as a data set's module has it, (raw_dir, out_dir, *, shards, OPTIONS) -> (prepared folder, report).
    options: of `prepare`, JSON values; others are another folder.
  """
  digest = hashlib.sha256(' '.join([name, version, *[json.dumps(options, sort_keys=True)] * bool(options)]).encode())
  for where, _, files in sorted(os.walk(folder)):
    for file in sorted(files):
      path = os.path.join(where, file)
      digest.update(f'{os.path.relpath(where, folder)}/{file}'.encode())
      digest.update(sha256(path).encode())
  cache = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  out_dir = os.path.join(cache, 'lab', f'{name}-sample-{digest.hexdigest()[:16]}')
  final = os.path.join(out_dir, name, version)
  return final if os.path.isdir(final) else prepare(folder, out_dir, shards=2, **options)[0]


def sha256(path: str) -> str:
  """The SHA-256 of a file, in hexadecimal."""
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def progress(items: Iterable, what: str, total: int, every_s: float = 5.0) -> Iterator:
  """Yields the items; says on stderr how many are done, how fast, and how long the rest takes."""
  start = last = time.monotonic()
  for i, item in enumerate(items):
    yield item
    now = time.monotonic()
    if now - last >= every_s or i + 1 == total:
      rate = (i + 1) / max(now - start, 1e-9)
      print(f'{what}: {i + 1}/{total}, {rate:.0f}/s, {(total - i - 1) / rate:.0f} s left', file=sys.stderr, flush=True)
      last = now


def problems(folder: str, check: Callable[[bytes], str]) -> Iterator[str]:
  """Everything that is wrong with a prepared folder, a line each, naming the file and the record.

  Args:
    check: looks into one serialized record; returns what is wrong with it, or ''.
  """
  found = manifest(folder)
  named = {n for s in found['splits'].values() for n in s['shards']}
  for name in sorted(n for n in os.listdir(folder) if '.tfrecord' in n and n not in named):
    yield f'{os.path.join(folder, name)}: not in the manifest (an extra shard)'
  for name, digest in found.get('beside', {}).items():
    path = os.path.join(folder, name)
    if not os.path.isfile(path) or sha256(path) != digest:
      yield f'{path}: missing or changed since it was prepared (sha256 differs from the manifest)'
  for split, entry in found['splits'].items():
    count, whole = 0, True
    for name, digest in progress(entry['shards'].items(), f'verify {split}, shards', len(entry['shards'])):
      path = os.path.join(folder, name)
      if not os.path.isfile(path):
        yield f'{path}: this shard is missing'
        whole = False
        continue
      if sha256(path) != digest:
        yield f'{path}: its content has changed since it was prepared (sha256 differs from the manifest)'
      offsets, wrong = framing(path)
      yield from _payloads(path, offsets, check)
      if wrong:
        yield f'{path}#{len(offsets)}: {wrong}; it and the records behind it are lost'
        whole = False
      count += len(offsets)
    if whole and count != entry['records']:
      yield f'{folder}: split {split!r} has {count} records, the manifest says {entry["records"]}'


def _payloads(path: str, offsets: list[int], check: Callable[[bytes], str]) -> Iterator[str]:
  """Reads records until one is broken, then goes on behind it."""
  tf = tensorflow()

  def behind(offset):         # the op takes its offset only inside a function
    variant = tf.raw_ops.TFRecordDatasetV2(filenames=[path], compression_type='', byte_offsets=offset[None],
                                           buffer_size=tf.constant(1 << 20, tf.int64))
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
  at = 0
  while at < len(offsets):
    start = tf.data.Dataset.from_tensors(np.int64(offsets[at]))
    records = start.flat_map(tf.autograph.experimental.do_not_convert(behind))
    try:
      for serialized in records.take(len(offsets) - at):
        wrong = check(serialized.numpy())
        if wrong:
          yield f'{path}#{at}: {wrong}'
        at += 1
    except tf.errors.DataLossError:
      yield f'{path}#{at}: its checksum is wrong (CRC), a byte has changed'
      at += 1
