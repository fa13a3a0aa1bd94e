"""Fixed sequences of grey frames: .npy arrays -> TFRecord. `moving_mnist` writes this data set too.

A record holds `video`, the bytes of u8[T, H, W] as they lie in memory; `shape` i64[3]; `clip_id` i64, its number in its
source; and what is known of how it was made, else empty: `labels` and `digit_ids` i64[n], `start` and `velocity`
f32[n, 2] (see `moving_mnist.paths`). Records lie in the order of `clip_id`; all of a split have the same shape.
"""

import functools
import math
import os
import warnings
from typing import Callable, Iterable, Mapping, NamedTuple

import numpy as np

from data_pipelines import DataError, prepared
from data_pipelines.pipeline import tensorflow

NAME, VERSION = 'video_clips', '1.0.0'
SPLITS = ('train', 'validation', 'test')
LAYOUTS = ('auto', 'TNHW', 'NTHW')
SHARD_RECORDS = 1000         # a shard, where --shards allows as many


@functools.cache
def builder():
  """The TFDS builder class of these records."""
  def features(kinds):
    numbers = {k: kinds.Tensor(shape=(None,), dtype=np.int64) for k in ('labels', 'digit_ids')}
    pairs = {k: kinds.Tensor(shape=(None, 2), dtype=np.float32) for k in ('start', 'velocity')}
    return {'video': kinds.Tensor(shape=(None,), dtype=np.uint8, encoding='bytes'),
            'shape': kinds.Tensor(shape=(3,), dtype=np.int64), 'clip_id': kinds.Scalar(np.int64), **numbers, **pairs}
  return prepared.builder(NAME, VERSION, 'Grey frames', features)


class Sequences(NamedTuple):
  """A split to be written: how many records, made by whom, and its `facts` (frames, height, width, digits_max)."""
  count: int
  records: Callable[[], Iterable[dict]]
  facts: dict[str, int]


def record(video: np.ndarray, clip_id: int, labels=(), digit_ids=(), start=(), velocity=()) -> dict:
  """The fields of a record of u8[T, H, W]."""
  pairs = {k: np.asarray(v, np.float32).reshape(-1, 2) for k, v in (('start', start), ('velocity', velocity))}
  return {'video': np.ascontiguousarray(video).reshape(-1), 'shape': np.array(video.shape, np.int64),
          'clip_id': clip_id, 'labels': np.asarray(labels, np.int64), 'digit_ids': np.asarray(digit_ids, np.int64),
          **pairs}


def write(out_dir: str, splits: Mapping[str, Sequences], *, options: dict, report: dict, shards: int) -> str:
  """Writes the splits, at most `shards` files each, SHARD_RECORDS records in the largest one's; returns the folder."""
  counts = [s.count for s in splits.values()]
  shards = min(shards, -(-max(counts) // SHARD_RECORDS), *counts)       # a shard has at least one record

  def counted(split, found):
    return lambda: ((int(r['clip_id']), r) for r in prepared.progress(found.records(), split, found.count))
  return prepared.write(builder(), out_dir, {k: counted(k, s) for k, s in splits.items()}, dataset='clips',
                        options={**options, 'shards': shards}, shards=shards,
                        describe=lambda: ({k: s.facts for k, s in splits.items()}, report))


def prepare(raw_dir: str, out_dir: str, *, shards: int = 64, layout: str = 'auto', frames: int = 20,
            parity_split: bool = False) -> tuple[str, dict]:
  """Writes arrays as sequences of `frames` frames: (prepared folder, report), or DataError.

  Args:
    raw_dir: a .npy file, or a folder of them. Files named train, validation and test are those splits; a single file of
      another name is 'test'.
    layout: of arrays of four axes, 'TNHW', 'NTHW' or 'auto'; see `array`.
    frames: of a sequence. A longer clip gives several, one behind the other; what is left at its end is dropped.
    parity_split: the first nine tenths of the clips of the one file become 'train', the rest 'validation'.
  """
  found = _files(raw_dir, parity_split)
  views = {split: array(path, layout, frames) for split, path in found.items()}
  for split, view in views.items():
    if view.shape[1] < frames:
      raise DataError(f'{found[split]}: its clips have {view.shape[1]} frames, fewer than --frames={frames}')
  parts = {split: (0, len(view)) for split, view in views.items()}
  if parity_split:
    (only, path), = found.items()
    count = len(views[only])
    if count < 2:
      raise DataError(f'{path}: one clip; --parity_split needs at least two')
    cut = count * 9 // 10
    found, views = dict.fromkeys(('train', 'validation'), path), dict.fromkeys(('train', 'validation'), views[only])
    parts = {'train': (0, cut), 'validation': (cut, count)}
  splits, report = {}, {}
  for split, view in views.items():
    first, last = parts[split]
    each = view.shape[1] // frames
    facts = {'frames': frames, 'height': view.shape[2], 'width': view.shape[3], 'digits_max': 0}
    splits[split] = Sequences((last - first) * each,
                              functools.partial(_records, found[split], view, first, last, frames), facts)
    report[split] = {'file': os.path.basename(found[split]), 'type': view.dtype.name, 'clips': last - first,
                     'sequences': (last - first) * each, 'frames_left_out_a_clip': view.shape[1] % frames, **facts}
  options = {'files': {os.path.basename(p): prepared.sha256(p) for p in found.values()}, 'layout': layout,
             'frames': frames, 'parity_split': parity_split}
  return write(out_dir, splits, options=options, report=report, shards=shards), report


def _files(raw_dir: str, parity_split: bool) -> dict[str, str]:
  """split -> path."""
  if os.path.isfile(raw_dir):
    paths = [raw_dir]
  else:
    paths = sorted(os.path.join(raw_dir, n) for n in os.listdir(raw_dir) if n.lower().endswith('.npy') and n[0] != '.')
  stems = [os.path.splitext(os.path.basename(p))[0] for p in paths]
  if not paths:
    raise DataError(f'{raw_dir}: no .npy file in this folder')
  if parity_split and len(paths) > 1:
    raise DataError(f'{raw_dir}: {", ".join(stems)}; --parity_split divides one file, so name it as --raw_dir')
  if len(paths) > 1 and not set(stems) <= set(SPLITS):
    raise DataError(f'{raw_dir}: {", ".join(stems)}; several files must be named {", ".join(SPLITS)} (.npy), '
                    'or name one of them as --raw_dir')
  return {stem if stem in SPLITS else 'test': path for stem, path in zip(stems, paths)}


def _records(path: str, view: np.ndarray, first: int, last: int, frames: int):
  each = view.shape[1] // frames
  for i in range(first, last):
    for j in range(each):
      yield record(clip(path, view, i, j * frames, (j + 1) * frames), i * each + j)


def array(path: str, layout: str = 'auto', frames: int = 20) -> np.ndarray:
  """The array of a .npy file as a view [N, T, H, W] of the file's own type; only its header is read.

  A view's values are checked where they are taken, in `clip`.

  Args:
    layout: of an array of four axes: 'TNHW' (the public Moving MNIST file), 'NTHW', or 'auto', which tells them apart
      where exactly one of the first two axes is `frames`. Three axes are one clip [T, H, W]. A last axis of size 1, a
      channel, is left out.

  Raises:
    DataError: no .npy file, cut off, of objects or anything else but numbers, empty, or of an unclear layout.
  """
  data = _mapped(path)
  shape = list(data.shape)
  if data.ndim in (4, 5) and data.shape[-1] == 1:
    data = data[..., 0]
  if data.ndim == 3:
    return data[None]
  colours = data.ndim > 3 and data.shape[-1] in (3, 4) and data.shape[-2] != data.shape[-1]
  if data.ndim != 4 or colours:
    raise DataError(f'{path}: an array {shape}{", its last axis colours" * colours}; grey clips are [T, H, W], '
                    '[T, N, H, W] or [N, T, H, W]')
  if layout == 'auto':
    fits = [n == frames for n in data.shape[:2]]
    if sum(fits) != 1:
      raise DataError(f'{path}: an array {shape} may be [T, N, H, W] or [N, T, H, W]; it tells by itself only where '
                      f'one of the first two axes is {frames}, the frames of a clip. Prepare it with --layout=TNHW or '
                      'NTHW, or save each clip as an array [T, H, W]')
    layout = 'TNHW' if fits[0] else 'NTHW'
  return data.swapaxes(0, 1) if layout == 'TNHW' else data


def _mapped(path: str) -> np.memmap:
  """The array as it lies in the file, read-only. Nothing is unpickled: an array of objects is refused by its header."""
  heads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
  try:
    with open(path, 'rb') as f, warnings.catch_warnings(action='ignore'):     # headers of Python 2 are read with one
      magic = f.read(6)
      if magic != np.lib.format.MAGIC_PREFIX:
        kind = ('an .npz archive; save its array alone with numpy.save' if magic[:2] == b'PK' else
                f'no .npy file (it starts with {magic!r})')
        raise DataError(f'{path}: {kind}')
      f.seek(0)
      version = np.lib.format.read_magic(f)
      if version not in heads:
        raise DataError(f'{path}: .npy version {version[0]}.{version[1]}, which no array of numbers needs')
      shape, fortran, dtype = heads[version](f)
      at, size = f.tell(), os.fstat(f.fileno()).st_size
  except DataError:
    raise
  except OSError as e:
    raise DataError(f'{path}: cannot be read: {e.strerror}') from None
  except Exception as e:    # NumPy's parser raises whatever a broken header leads it to
    raise DataError(f'{path}: its .npy header is cut off or broken ({" ".join(str(e).split())[:80]})') from None
  if dtype.hasobject:
    raise DataError(f'{path}: an array of Python objects; those are never unpickled. Save numbers, all clips of one '
                    'length and size')
  if dtype.kind not in 'buif':
    raise DataError(f'{path}: an array of {dtype}; expected whole numbers 0 to 255 or fractions 0 to 1')
  if min(shape, default=1) < 1:
    raise DataError(f'{path}: an array {list(shape)} holds no frame')
  need = at + math.prod(shape) * dtype.itemsize
  if size < need:
    raise DataError(f'{path}: cut off; an array {list(shape)} of {dtype} needs {need} bytes, {size} are there')
  if size > need:
    raise DataError(f'{path}: {size - need} bytes lie behind the end of its array {list(shape)} of {dtype}')
  return np.memmap(path, dtype, 'r', at, shape, 'F' if fortran else 'C')


def clip(path: str, view: np.ndarray, number: int, first: int = 0, last: int | None = None) -> np.ndarray:
  """Frames first to last of a clip of `array(path)`, as u8[T, H, W].

  Whole numbers are taken as they are; fractions, and truth values, are multiplied by 255 and rounded. Raises DataError
  naming clip and frame of the first value outside 0..255 or 0..1, or that is no number.
  """
  frames = np.array(view[number, first:last])
  if frames.dtype == np.uint8:
    return frames
  unit = frames.dtype.kind in 'bf'
  good = (frames >= 0) & (frames <= (1 if unit else 255))     # neither holds for NaN
  if not good.all():
    at = tuple(np.argwhere(~good)[0])
    raise DataError(f'{path}: clip {number}, frame {first + at[0]}: the value {frames[at]} at row {at[1]}, column '
                    f'{at[2]}; {frames.dtype.name} is read from 0 to {1 if unit else 255}')
  return (np.rint(frames.astype(np.float64) * 255) if unit else frames).astype(np.uint8)


def parse(serialized) -> dict:
  """A record, string[] -> its fields, the video still as bytes."""
  tf = tensorflow()
  rows = {k: tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True) for k in ('labels', 'digit_ids')}
  rows |= {k: tf.io.FixedLenSequenceFeature([2], tf.float32, allow_missing=True) for k in ('start', 'velocity')}
  return tf.io.parse_single_example(serialized, {
      'video': tf.io.FixedLenFeature([], tf.string), 'shape': tf.io.FixedLenFeature([3], tf.int64),
      'clip_id': tf.io.FixedLenFeature([], tf.int64), **rows})


def decode(serialized) -> dict:
  """A record, string[] -> its fields, with video u8[T, H, W]."""
  tf = tensorflow()
  fields = parse(serialized)
  return {**fields, 'video': tf.reshape(tf.io.decode_raw(fields['video'], tf.uint8), fields['shape'])}


def check(serialized: bytes) -> str:
  """What is wrong with a record; '' if nothing. For `prepare verify`."""
  tf = tensorflow()
  try:
    fields = parse(serialized)
  except tf.errors.OpError:
    return 'not a record of this data set, or fields are missing'
  name, shape = f'clip {int(fields["clip_id"])}: ', fields['shape'].numpy().tolist()
  size = len(fields['video'].numpy())
  if min(shape) < 1 or size != math.prod(shape):
    return name + f'{size} bytes of video, its shape is {shape}'
  counts = {k: len(fields[k]) for k in ('labels', 'digit_ids', 'start', 'velocity')}
  return '' if len(set(counts.values())) == 1 else name + f'differing counts of digits: {counts}'
