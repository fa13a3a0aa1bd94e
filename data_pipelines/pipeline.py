"""The order of every pipeline, in one place.

  number n = step * batch + row
    -> record   index_shuffle(n mod size; seed, n div size): a new permutation each epoch, computed, not stored
    -> host     keeps the rows of the batch that its devices own
    -> bytes    from RAM (cached before any transform) or from the shard at the record's offset; CRC checked
    -> decode   -> augment, stateless, keyed by (seed, n)
    -> batch    -> prefetch

A batch is a pure function of (seed, step, data set): no buffer is shuffled and no iterator is saved, so a run
resumes at any step without reading a skipped byte, and any number of processes sees the same global batches.
"""

import contextlib
import copy
import hashlib
import logging
import os
import queue
import re
import struct
import threading
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from data_pipelines import DataError, TooLarge

log = logging.getLogger('data_pipelines')
CLOSING_S = 10.0
Example = Mapping[str, Any]    # leaves of fixed shape, once augmented


class Source(NamedTuple):
  """A split of a data set, as the pipeline needs it; decode and augment are TensorFlow ops, or NumPy in one."""
  read: tuple[str, ...]                          # paths of its TFRecord shards, in order
  decode: Callable[[Any], Example]               # serialized record, string[] -> example
  augment: Callable[[Example, Any], Example]     # example, seed i64[2] -> example of fixed shapes
  size: int                                      # records in all shards


class Index(NamedTuple):
  """Where every record lies: file number i32[N] and byte offset i64[N]."""
  file: np.ndarray
  offset: np.ndarray


class Spec(NamedTuple):
  """Shape and NumPy type of an array."""
  shape: tuple[int, ...]
  dtype: Any


def tensorflow():
  """TensorFlow, kept off the accelerators; imported late, for it costs seconds."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')     # else every start prints a notice about it
  import tensorflow as tf
  tf.config.set_visible_devices([], 'GPU')
  return tf


@contextlib.contextmanager
def reading(path: str):
  """Raises DataError where what is done inside can't read, as of a bucket that is not there or does not answer."""
  tf = tensorflow()
  try:
    yield
  except tf.errors.OpError as e:
    raise DataError(f'{path} can\'t be read: {type(e).__name__}: {_reason(e)}') from None


def framing(path: str) -> tuple[list[int], str]:
  """Offsets of the records of a TFRecord file, and what is wrong with its framing ('' if nothing).

  A record is length u64, CRC u32, payload, CRC u32 (little endian); payload CRCs are checked when it is read.
  """
  tf = tensorflow()
  offsets, at, total = [], 0, tf.io.gfile.stat(path).length
  with tf.io.gfile.GFile(path, 'rb') as f:
    while at < total:
      f.seek(at)
      head = f.read(12)
      if len(head) < 12:
        return offsets, f'record {len(offsets)} is cut off at byte {total}'
      length, crc = struct.unpack('<QI', head)
      if crc != _masked_crc32c(head[:8]):
        return offsets, f'record {len(offsets)} at byte {at} has a broken length field'
      if at + length + 16 > total:
        return offsets, f'record {len(offsets)} is cut off at byte {total}'
      offsets.append(at)
      at += length + 16
  return offsets, ''


def _masked_crc32c(data: bytes) -> int:
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def scan(source: Source) -> Index:
  """Reads the framing of all shards. Raises DataError for a missing or broken one, or a wrong count."""
  tf = tensorflow()
  file, offset = [], []
  for i, path in enumerate(source.read):
    if not tf.io.gfile.exists(path):
      raise DataError(f'{path}: this shard is missing; prepare the data set again or restore the file')
    found, wrong = framing(path)
    if wrong:
      raise DataError(f'{path}: {wrong}; run `python -m data_pipelines.prepare verify` on its folder')
    file += [i] * len(found)
    offset += found
  if len(file) != source.size:
    raise DataError(f'{os.path.dirname(source.read[0])}: {len(file)} records found, {source.size} promised by the '
                    'metadata; a shard was replaced or belongs to another version')
  return Index(np.array(file, np.int32), np.array(offset, np.int64))


def fingerprint(source: Source, index: Index) -> str:
  """A short hash of a split's records, made of the checksums that lie behind each: equal for equal data sets."""
  tf = tensorflow()
  found = hashlib.sha256()
  for i, path in enumerate(source.read):
    starts = index.offset[index.file == i][1:]
    with reading(path), tf.io.gfile.GFile(path, 'rb') as f:
      for end in [*starts.tolist(), tf.io.gfile.stat(path).length]:
        f.seek(end - 4)
        found.update(f.read(4))
  return found.hexdigest()[:16]


def within(values, size: int, name: str):
  """The values [...] of a record, all from 0 to size - 1. Others make it a bad one: a device would clamp them."""
  tf = tensorflow()
  with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all((values >= 0) & (values < size)), [
      f'{name} from', tf.reduce_min(values), 'to', tf.reduce_max(values), f'where 0 to {size - 1} are known'])]):
    return tf.identity(values)


def place(source: Source, index: Index, record: int) -> str:
  """The name of a record for a message: shard#record, counted within the shard."""
  f = index.file[record]
  return f'{source.read[f]}#{record - int(np.searchsorted(index.file, f))}'


def records_at(source: Source, seed: int, step: int, batch_size: int) -> np.ndarray:
  """Record numbers i64[batch_size] of the global training batch at `step`."""
  tf = tensorflow()
  n = tf.range(step * batch_size, (step + 1) * batch_size, dtype=tf.int64)
  return tf.map_fn(lambda i: _shuffled(tf, i, seed, source.size), n).numpy()


def _shuffled(tf, n, seed, size):
  top = tf.constant(size - 1, tf.int64)
  if size == 1:
    return tf.zeros_like(n)
  return tf.random.experimental.index_shuffle(n % size, seed=tf.stack([tf.constant(seed, tf.int64), n // size]),
                                              max_index=top)


class Batches:
  """Batches of one split as NumPy arrays, with 'mask' f32[rows] and 'record' i32[rows] added.

  `rows` of the global batch are made, those that this process feeds. Training (`train=True`): endless, from `start`
  on, in the order of (seed, epoch). Evaluation: every record once, in order; the last batch is filled up under mask 0.

  Attributes:
    bad: records that could not be read or decoded so far. They stay in their place under mask 0; more than
      config.bad_limit * size of them raise DataError (0: the first one does).
  """

  def __init__(self, source: Source, config, batch_size: int, rows: Sequence[int], *, train: bool,
               seed: int = 0, start: int = 0):
    self.source, self.config, self.batch_size, self.rows = source, config, batch_size, sorted(rows)
    self.train, self.seed, self.step = train, seed, start
    self.bad: list[int] = []
    with reading(os.path.dirname(source.read[0]) if source.read else ''):
      self.index = scan(source)
      self._cached = _cache(source, self.index) if config.cache else None

  def spec(self, rows: int) -> dict[str, 'Spec']:
    """name -> shape and type of a batch of `rows`; reads no record."""
    tf = tensorflow()
    saved, self._cached = self._cached, None
    try:
      element = self._dataset(tf).element_spec
    finally:
      self._cached = saved
    return {k: Spec((rows, *v.shape[1:]), v.dtype.as_numpy_dtype) for k, v in element.items()}

  def names(self, step: int) -> list[str]:
    """Where the records of the global training batch at `step` lie, for a message."""
    return [place(self.source, self.index, r) for r in records_at(self.source, self.seed, step, self.batch_size)]

  def begin(self) -> list[int]:
    """Starts the processes that make batches, for whoever wants these later: none here, where threads do."""
    return []

  def close(self) -> None:
    """Ends what was begun and not used."""

  def hurry(self) -> None:
    """Lets a batch that is being made fail, for nobody wants it any more; called by another thread."""

  @property
  def steps(self) -> int:
    """Batches that cover the split once."""
    return -(-self.source.size // self.batch_size)

  def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
    maker = copy.copy(self)
    maker.bad = list(self.bad)        # the maker is a batch or two ahead, and may know of more
    made = ((batch, tuple(maker.bad)) for batch in maker._made())
    try:
      with contextlib.closing(in_thread(made, maker.hurry)) as stream:
        for batch, bad in stream:
          self.step, self.bad = self.step + 1, list(bad)
          yield batch
    except DataError:
      self.bad = maker.bad
      raise

  def _made(self):
    tf = tensorflow()
    broken = (tf.errors.DataLossError, tf.errors.InvalidArgumentError)
    while self.train or self.step < self.steps:
      try:
        for batch in self._dataset(tf):
          self.step += 1
          yield {k: np.asarray(v) for k, v in batch.items()}
        return
      except broken as e:
        self._isolate(tf, e)        # then go on at the same step, without the bad records
      except tf.errors.OpError as e:
        folder = os.path.dirname(self.source.read[0])
        raise DataError(f'batch {self.step} of {folder} can\'t be read: {_reason(e)}') from e

  def _dataset(self, tf):
    """The tf.data pipeline from self.step on."""
    first, last = self.step * self.batch_size, (1 << 62 if self.train else self.steps * self.batch_size)
    numbers = tf.data.Dataset.range(first, last)
    if len(self.rows) < self.batch_size:
      ours = tf.constant(np.isin(np.arange(self.batch_size), self.rows))
      numbers = numbers.filter(lambda n: tf.gather(ours, n % self.batch_size))
    threads = self.config.threads or os.cpu_count()
    plain = tf.autograph.experimental.do_not_convert     # TensorFlow ops as they stand, no Python rewritten
    ds = self._bytes(tf, numbers.map(plain(self._pick)))
    ds = ds.map(plain(self._example), num_parallel_calls=threads, deterministic=True)
    ds = ds.batch(len(self.rows), drop_remainder=True).prefetch(self.config.prefetch)
    options = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = threads
    options.threading.max_intra_op_parallelism = 1
    return ds.with_options(options)

  def _pick(self, n):
    """number i64[] -> number, record i64[], mask f32[]; a bad or padding place takes a good record's bytes."""
    tf = tensorflow()
    record = _shuffled(tf, n, self.seed, self.source.size) if self.train else n
    good = self._filler()
    use = record < self.source.size
    if self.bad:
      use &= ~tf.reduce_any(record == tf.constant(self.bad, tf.int64))
    return n, tf.where(use, record, tf.constant(good, tf.int64)), tf.cast(use, tf.float32)

  def _filler(self) -> int:
    """The first record not known to be bad, whose bytes stand under mask 0."""
    return next(i for i in range(self.source.size) if i not in self.bad)

  def _bytes(self, tf, picked):
    """(number, record, mask) -> (number, record, mask, serialized string[])."""
    if self._cached is not None:
      return picked.map(lambda n, r, m: (n, r, m, tf.gather(self._cached, r)))
    files, file, offset = (tf.constant(x) for x in (self.source.read, self.index.file, self.index.offset))

    def read(n, r, m):
      variant = tf.raw_ops.TFRecordDatasetV2(
          filenames=tf.gather(files, tf.gather(file, r))[None], compression_type='',
          buffer_size=tf.constant(1 << 18, tf.int64), byte_offsets=tf.gather(offset, r)[None])
      one = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(1)
      return one.map(lambda serialized: (n, r, m, serialized))
    return picked.interleave(read, cycle_length=8, block_length=1, num_parallel_calls=2, deterministic=True)

  def _example(self, n, record, mask, serialized):
    tf = tensorflow()
    seed = tf.stack([tf.constant(self.seed, tf.int64), n])
    example = self.source.augment(self.source.decode(serialized), seed)
    return {**example, 'mask': mask, 'record': tf.cast(record, tf.int32)}

  def _isolate(self, tf, error):
    """Finds the bad records of the batch at self.step by trying each alone; raises if there are too many."""
    wanted = (records_at(self.source, self.seed, self.step, self.batch_size) if self.train else
              range(self.step * self.batch_size, min(self.source.size, (self.step + 1) * self.batch_size)))
    found = {}
    for record in sorted({self._filler(), *map(int, wanted)} - set(self.bad)):
      alone = tf.data.Dataset.from_tensors((np.int64(record), np.int64(record), np.float32(1)))
      try:
        for _ in self._bytes(tf, alone).map(tf.autograph.experimental.do_not_convert(self._example)):
          pass
      except tf.errors.OpError as e:
        found[record] = _reason(e)
    if not found:
      raise DataError(f'batch {self.step} of {self.source.read[0]} failed, though each record alone is good: '
                      f'{_reason(error)}') from error
    self.bad += sorted(found)
    names = '; '.join(f'{place(self.source, self.index, r)}: {why}' for r, why in sorted(found.items()))
    if len(self.bad) > self.config.bad_limit * self.source.size or len(self.bad) == self.source.size:
      raise DataError(f'bad record at step {self.step}: {names}. {len(self.bad)} bad of {self.source.size}, '
                      f'config.input.bad_limit = {self.config.bad_limit}. Run `python -m data_pipelines.prepare '
                      'verify` on its folder, or raise the limit to leave bad records out') from None
    log.warning('bad record left out (%d so far): %s', len(self.bad), names)


def in_thread(items: Iterable, hurry: Callable[[], None] = lambda: None) -> Iterator:
  """The items in order, made by a thread that is one ahead, so that one that is ready is there at once.

  Without it whoever takes a batch stands in line for Python's lock behind all threads that make examples. What making
  them raises is raised in the item's place. Closed, it calls `hurry` and waits for the item
  that is being made, but no longer than CLOSING_S: one that reads what does not answer would hold up the end of a run.
  """
  ready, stop, end = queue.Queue(1), threading.Event(), object()

  def put(item, error=None):
    while not stop.is_set():
      with contextlib.suppress(queue.Full):
        ready.put((item, error), timeout=0.1)
        return

  def make():
    try:
      for item in items:
        put(item)
        if stop.is_set():
          return
      put(end)
    except BaseException as e:      # for whoever takes it
      put(end, e)

  thread = threading.Thread(target=make, name='batches', daemon=True)
  thread.start()
  try:
    while True:
      item, error = ready.get()
      if error is not None:
        raise error
      if item is end:
        return
      yield item
  finally:
    stop.set()
    hurry()
    thread.join(CLOSING_S)


def _reason(error) -> str:
  """The first line of TensorFlow's message, without its graph names."""
  text = error.message.split('\n')[0]
  text = re.sub(r'^Error in user-defined function.*?Iterator::\S+: ', '', text)
  return text.split('}} ')[-1].split(' [Op:')[0]


def _cache(source: Source, index: Index):
  """All serialized records as one string tensor in RAM; None where a payload is broken (then only it is left out)."""
  tf = tensorflow()
  need = sum(tf.io.gfile.stat(p).length for p in source.read)
  free = available_bytes()
  if need > 0.7 * free:
    raise TooLarge(f'caching {os.path.dirname(source.read[0])} needs {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB of '
                   'memory are free; set config.input.cache=False to read records from disk as they are needed')
  try:
    return tf.data.TFRecordDataset(list(source.read)).batch(source.size).get_single_element()
  except tf.errors.DataLossError as e:
    log.warning('%s: %s; records are read one by one instead of from RAM', os.path.dirname(source.read[0]), _reason(e))
    return None


def available_bytes() -> int:
  """Memory that can be taken without swapping, in bytes."""
  with open('/proc/meminfo', encoding='ascii') as f:
    return next(int(line.split()[1]) << 10 for line in f if line.startswith('MemAvailable'))
