"""MNIST digits: raw idx files -> TFRecord.

A record holds `digit`, the 28 x 28 grey bytes of one digit, row by row; `label`; and `digit_id`, its place in its
original file, those of the t10k files counted on from 60,000. Records lie in that order.

Splits are made of whole digits. With MNIST's training files there: 'train' is their first five sixths (50,000),
'validation' the last sixth, 'test' the t10k files. With the t10k files alone, as they ship with the lab: of every ten,
the first eight, the ninth and the tenth; the files begin with the neater writers.
"""

import functools
import gzip
import math
import os
import zlib
from typing import NamedTuple

import numpy as np

from data_pipelines import DataError, prepared
from data_pipelines.pipeline import tensorflow

NAME, VERSION = 'mnist_digits', '1.0.0'
SAMPLE = os.path.join(os.path.dirname(__file__), 'samples', 'video')
SIDE = 28                    # px
TEST_ID = 60_000             # digit_id of the first t10k digit
_DIGITS_MAX = 1_000_000      # of a file; a header that promises more is taken for nonsense


class Digits(NamedTuple):
  """Some digits: u8[N, 28, 28], their labels i64[N] and their numbers i64[N]."""
  images: np.ndarray
  labels: np.ndarray
  ids: np.ndarray


@functools.cache
def builder():
  """The TFDS builder class of these records."""
  return prepared.builder(NAME, VERSION, 'MNIST digits', lambda kinds: {
      'digit': kinds.Tensor(shape=(SIDE, SIDE), dtype=np.uint8, encoding='bytes'),
      'label': kinds.Scalar(np.int64), 'digit_id': kinds.Scalar(np.int64)})


def prepare(raw_dir: str, out_dir: str, *, shards: int = 64) -> tuple[str, dict]:
  """Writes the records of MNIST's files, at most `shards` files a split: (prepared folder, report), or DataError."""
  splits = read(raw_dir)
  shards = min(shards, *(len(d.ids) for d in splits.values()))       # a shard has at least one record
  report = {s: {'digits': len(d.ids), 'first_id': int(d.ids[0]), 'last_id': int(d.ids[-1]),
                'of_each_label': np.bincount(d.labels, minlength=10).tolist()} for s, d in splits.items()}
  folder = prepared.write(builder(), out_dir, {s: functools.partial(_records, s, d) for s, d in splits.items()},
                          dataset='mnist', options={'files': digests(raw_dir), 'shards': shards}, shards=shards,
                          describe=lambda: ({}, report))
  return folder, report


def _records(split: str, digits: Digits):
  for image, label, number in prepared.progress(zip(*digits), split, len(digits.ids)):
    yield int(number), {'digit': image, 'label': label, 'digit_id': number}


def read(raw_dir: str) -> dict[str, Digits]:
  """The splits that the files of a folder make. Raises DataError naming the file that is missing or broken."""
  train, test = (_digits(raw_dir, part, first) for part, first in (('train', 0), ('t10k', TEST_ID)))
  if train is None and test is None:
    raise DataError(f'{raw_dir}: neither train-images-idx3-ubyte nor t10k-images-idx3-ubyte is there, plain or .gz')
  if train is not None:
    cut = len(train.ids) * 5 // 6
    splits = {'train': _part(train, 0, cut), 'validation': _part(train, cut, None)}
    splits |= {'test': test} if test is not None else {}
  else:
    place = test.ids % 10
    splits = {s: Digits(*(a[rows] for a in test)) for s, rows in (
        ('train', place < 8), ('validation', place == 8), ('test', place == 9))}
  for split, digits in splits.items():
    if not len(digits.ids):
      raise DataError(f'{raw_dir}: too few digits; none is left for the split {split!r}')
  return splits


def digests(raw_dir: str) -> dict[str, str]:
  """File name -> SHA-256 of the files that `read` reads."""
  paths = [_path(raw_dir, part, kind) for part in ('train', 't10k') for kind in ('images-idx3', 'labels-idx1')]
  return {os.path.basename(p): prepared.sha256(p) for p in paths if p}


def _part(digits: Digits, start: int, stop: int | None) -> Digits:
  return Digits(*(a[start:stop] for a in digits))


def _path(raw_dir: str, part: str, kind: str) -> str:
  """The file, plain or compressed; '' if neither is there."""
  path = os.path.join(raw_dir, f'{part}-{kind}-ubyte')
  return next((p for p in (path, f'{path}.gz') if os.path.isfile(p)), '')


def _digits(raw_dir: str, part: str, first: int) -> Digits | None:
  path, beside = _path(raw_dir, part, 'images-idx3'), _path(raw_dir, part, 'labels-idx1')
  if not path:
    return None
  if not beside:
    raise DataError(f'{os.path.join(raw_dir, part)}-labels-idx1-ubyte: missing, plain and .gz; it belongs to {path}')
  images, labels = _idx(path, 3), _idx(beside, 1).astype(np.int64)
  if images.shape[1:] != (SIDE, SIDE):
    raise DataError(f'{path}: pictures of {images.shape[1]} x {images.shape[2]}, expected {SIDE} x {SIDE}')
  if len(labels) != len(images):
    raise DataError(f'{beside}: {len(labels)} labels for the {len(images)} digits of {path}')
  if labels.size and labels.max() > 9:
    at = int(np.argmax(labels > 9))
    raise DataError(f'{beside}: label {at} is {labels[at]}, expected 0 to 9')
  return Digits(images, labels, first + np.arange(len(images)))


def _idx(path: str, rank: int) -> np.ndarray:
  """An idx file of bytes, u8 of that rank: magic u32, a u32 an axis (big endian), then the bytes."""
  try:
    with gzip.open(path, 'rb') if path.endswith('.gz') else open(path, 'rb') as f:
      head = f.read(4 * (1 + rank))
      if len(head) < 4 * (1 + rank):
        raise DataError(f'{path}: cut off in its header, after {len(head)} bytes')
      magic, *shape = np.frombuffer(head, '>u4').tolist()
      if magic != 0x800 + rank:
        raise DataError(f'{path}: magic number {magic:#010x}, expected {0x800 + rank:#010x} (idx, unsigned bytes, '
                        f'{rank} axes)')
      size = math.prod(shape)
      if size > _DIGITS_MAX * SIDE**(2 * (rank > 1)):
        raise DataError(f'{path}: its header promises {" x ".join(map(str, shape))} bytes; that is no MNIST file')
      data = f.read(size + 1)              # one more: what lies behind the end is read, and so is gzip's checksum
  except (EOFError, zlib.error, gzip.BadGzipFile) as e:
    raise DataError(f'{path}: its gzip stream is cut off or broken ({e})') from None
  except OSError as e:
    raise DataError(f'{path}: cannot be read: {e.strerror}') from None
  if len(data) < size:
    raise DataError(f'{path}: cut off; {len(data)} of {size} bytes are there')
  if len(data) > size:
    raise DataError(f'{path}: garbage behind the end; its header promises {size} bytes')
  return np.frombuffer(data, np.uint8).reshape(shape)


def decode(serialized) -> dict:
  """Records, string[...] -> digit u8[..., 28, 28], label i64[...], digit_id i64[...]; one, or many in a vector."""
  tf = tensorflow()
  fields = tf.io.parse_example(serialized, {
      'digit': tf.io.FixedLenFeature([], tf.string), 'label': tf.io.FixedLenFeature([], tf.int64),
      'digit_id': tf.io.FixedLenFeature([], tf.int64)})
  return {**fields, 'digit': tf.reshape(tf.io.decode_raw(fields['digit'], tf.uint8), [*serialized.shape, SIDE, SIDE])}


def check(serialized: bytes) -> str:
  """What is wrong with a record; '' if nothing. For `prepare verify`."""
  tf = tensorflow()
  try:
    fields = decode(tf.constant(serialized))
  except tf.errors.OpError:
    return f'not a record of this data set, or its digit is not {SIDE} x {SIDE}'
  label = int(fields['label'])
  return '' if 0 <= label <= 9 else f'digit {int(fields["digit_id"])}: label {label}, expected 0 to 9'


def sample() -> str:
  """The folder of the prepared samples; made on first use, in $XDG_CACHE_HOME/lab or ~/.cache/lab."""
  return prepared.sample(SAMPLE, NAME, VERSION, prepare)
