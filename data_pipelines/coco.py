"""COCO person keypoints: raw files -> TFRecord -> examples for multi-person pose.

A record holds one upright picture as RGB JPEG, everybody's joints, boxes, areas, crowd flags and ids as COCO gives
them, and `ignore`: a 1-bit PNG of the people without joints, crowds included.

'train' keeps the pictures where somebody has joints. 'val' keeps every picture, for COCO's score counts what is found
on the empty ones too.
"""

import functools
import io
import os

import numpy as np

from data_pipelines import DataError, coco_raw, images, pictures, prepared, warp
from data_pipelines.pipeline import Source, available_bytes, tensorflow

NAME, VERSION = 'coco_pose', '1.0.0'
SAMPLE = os.path.join(os.path.dirname(__file__), 'samples', 'pose')
EMPTY_BYTES = 150            # of a PNG that may well be an empty mask
PEOPLE = {                   # field -> shape and dtype of a person's row in a record
    'keypoints': ((17, 3), 'float32'), 'boxes': ((4,), 'float32'), 'areas': ((), 'float32'), 'crowd': ((), 'int64'),
    'num': ((), 'int64'), 'ann_id': ((), 'int64')}


@functools.cache
def builder():
  """The TFDS builder class of these records."""
  def features(kinds):
    rows = {k: kinds.Tensor(shape=(None, *shape), dtype=np.dtype(dtype)) for k, (shape, dtype) in PEOPLE.items()}
    return {'image': kinds.Image(shape=(None, None, 3), encoding_format='jpeg'),
            'ignore': kinds.Image(shape=(None, None, 1), encoding_format='png'),
            'image_id': kinds.Scalar(np.int64), 'size': kinds.Tensor(shape=(2,), dtype=np.int64), **rows}
  return prepared.builder(NAME, VERSION, 'COCO person keypoints', features, shuffled=True)


def prepare(raw_dir: str, out_dir: str, *, shards: int = 64) -> tuple[str, dict]:
  """Writes a raw COCO folder's records, at most `shards` files a split: (prepared folder, report), or DataError."""
  if shards < 1:
    raise DataError(f'--shards={shards}: at least one')
  found, report = coco_raw.read(raw_dir), coco_raw.Report()
  kept, most = {}, {}
  for split, images in found.items():
    keep = [split != 'train' or any(a['num_keypoints'] for a in i.people) for i in images]
    for image, k in zip(images, keep):
      report.add(split, image, k)
    kept[split] = [i for i, k in zip(images, keep) if k]
    if not kept[split]:
      raise DataError(f'{raw_dir}: no picture for the split {split!r}')
    most[split] = {'people_max': max(len(i.people) for i in kept[split])}
  shards = min(shards, *map(len, kept.values()))       # a shard has at least one record
  options = {'annotations': {s: prepared.sha256(p) for s, (p, _) in coco_raw.files(raw_dir).items()}, 'shards': shards}
  folder = prepared.write(
      builder(), out_dir, {s: functools.partial(_records, s, images) for s, images in kept.items()}, dataset='coco',
      options=options, shards=shards, describe=lambda: (most, report.summary()))
  return folder, report.summary()


def _records(split: str, images: list[coco_raw.Picture]):
  for image in prepared.progress(images, split, len(images)):
    yield image.id, record(image)


def record(image: coco_raw.Picture) -> dict:
  """The fields of a picture's record. Raises DataError naming the file."""
  data, height, width = pictures.jpeg(image.path)
  if (height, width) != (image.height, image.width):
    raise DataError(f'{image.path}: {width} x {height} pixels when upright, the annotations say {image.width} x '
                    f'{image.height}; joints would land elsewhere')
  p = len(image.people)
  take = lambda key, shape, dtype: np.array([a[key] for a in image.people], dtype).reshape(p, *shape)
  source = {'boxes': 'bbox', 'areas': 'area', 'crowd': 'iscrowd', 'num': 'num_keypoints', 'ann_id': 'id'}
  rows = {k: take(source.get(k, k), shape, dtype) for k, (shape, dtype) in PEOPLE.items()}
  return {'image': data, 'ignore': _png(coco_raw.unlabelled(image)), 'image_id': image.id,
          'size': np.array([height, width], np.int64), **rows}


def _png(mask: np.ndarray) -> bytes:
  from PIL import Image
  out = io.BytesIO()
  Image.fromarray(mask).save(out, 'PNG')       # bool becomes mode '1', one bit a pixel
  return out.getvalue()


def parse(serialized) -> dict:
  """A record, string[] -> its fields; pictures still encoded, one row a person."""
  tf = tensorflow()
  rows = {k: tf.io.FixedLenSequenceFeature(shape, getattr(tf, dtype), allow_missing=True)
          for k, (shape, dtype) in PEOPLE.items()}
  return tf.io.parse_single_example(serialized, {
      'image': tf.io.FixedLenFeature([], tf.string), 'ignore': tf.io.FixedLenFeature([], tf.string),
      'image_id': tf.io.FixedLenFeature([], tf.int64), 'size': tf.io.FixedLenFeature([2], tf.int64), **rows})


def decode(serialized, kept: images.Kept = images.Kept(0)) -> dict:
  """A record, string[] -> its fields, with image u8[H, W, 3] and ignore u8[H, W, 1] (0 or 255), kept if they fit."""
  tf = tensorflow()
  fields = parse(serialized)
  image, ignore = tf.numpy_function(functools.partial(_pixels, kept),
                                    [fields[k] for k in ('image_id', 'image', 'ignore')], [tf.uint8, tf.uint8])
  image.set_shape([None, None, 3])
  ignore.set_shape([None, None, 1])
  return {**fields, 'image': image, 'ignore': ignore}


# a mask of nobody is a few bytes, and the same for all pictures of a size
_empty = functools.lru_cache(64)(images.decode_mask)


def _pixels(kept, number, *encoded):
  def make():
    jpeg, png = (np.asarray(x, object).item() for x in encoded)      # bytes in a graph, arrays outside
    return images.decode(jpeg), (_empty if len(png) < EMPTY_BYTES else images.decode_mask)(png)
  return kept.get(int(number), make)


def check(serialized: bytes) -> str:
  """What is wrong with a record; '' if nothing. For `prepare verify`."""
  tf = tensorflow()
  try:
    fields = parse(serialized)
  except tf.errors.OpError:
    return 'not a record of this data set, or fields are missing'
  name = f'image {int(fields["image_id"])}: '
  wrong = pictures.problem(fields['image'].numpy())
  if wrong:
    return name + wrong
  try:
    mask = tf.io.decode_png(fields['ignore'], channels=1)
  except tf.errors.OpError:
    return name + 'its ignore mask is no PNG'
  size = tuple(fields['size'].numpy())
  shape = tuple(tf.io.extract_jpeg_shape(fields['image']).numpy()[:2])
  if shape != size or tuple(mask.shape[:2]) != size:
    return name + f'picture {shape}, mask {tuple(mask.shape[:2])}, stated size {size} (height, width) differ'
  return ''


def source(folder: str, split: str, image, augment, stride: int, people: int = 32,
           decoded_gib: float = 0.0, processes: int = 1) -> Source:
  """A split as the pipeline reads it.

  An example, with S = image.size and N = S / stride (pixel centres at whole numbers, see warp.py):
    image      u8[S, S, 3]      RGB, letterboxed or augmented; warp.FILL outside the picture
    keypoints  f32[people, 17, 3]  x, y in pixels of `image`, visibility 0, 1, 2; COCO's order; outside: 0, 0, 0
    ignore     u8[N, N]         1: unlabelled people or a crowd cover over 1 % of the cell
    person     f32[people]      1: the row is used; people with joints first, then the larger first
    truth      f32[people, 17, 3], boxes f32[people, 4] (x, y, w, h), areas f32[people]: in original pixels, as COCO
    crowd      f32[people], num i32[people] (labelled joints)
    matrix     f32[2, 3]        maps (x, y, 1) of `image` to original pixels
    size       i32[2]           original height, width;  image_id i32[]

  Args:
    folder: a prepared folder, or 'sample': the photographs that ship with the lab, prepared once into the user's cache.
    split: 'train' or 'val'.
    image: a configuration's `image` section (size).
    augment: its `augment` section; None: the letterbox without chance, for evaluation.
    stride: pixels a label cell.
    people: rows; in training the last ones are dropped where a picture has more, in evaluation that is an error.
    decoded_gib: memory for decoded pictures, GiB, at most half of what is free; those that fit are decoded once.
    processes: how many have such a source, and share that memory.

  Raises:
    DataError: not prepared, no such split, or more people in an evaluated picture than rows.
  """
  if image.size % stride:
    raise ValueError(f'image.size {image.size} is no multiple of the stride {stride}')
  path = sample() if folder == 'sample' else prepared.find(folder, NAME, VERSION)
  if path is None:
    raise DataError(f'{folder}: no prepared data set there. Prepare it with `python -m data_pipelines.prepare coco '
                    f'--raw_dir=COCO_FOLDER --out_dir={folder}`')
  found = prepared.manifest(path)
  if split not in found['splits']:
    raise DataError(f'{path}: no split {split!r}; there are {", ".join(sorted(found["splits"]))}')
  entry = found['splits'][split]
  most = entry['facts']['people_max']
  if augment is None and most > people:
    raise DataError(f'{path}: a picture of {split!r} has {most} people, and evaluation may drop none: '
                    f'set people >= {most} (now {people})')
  shards = tuple(os.path.join(path, name) for name in sorted(entry['shards']))
  kept = images.Kept(int(min(decoded_gib * 2**30, available_bytes() / 2) / processes))
  return Source(shards, functools.partial(decode, kept=kept),
                functools.partial(_example, image.size, stride, people, augment), entry['records'])


def _example(size: int, stride: int, people: int, augment, fields: dict, seed) -> dict:
  """A decoded record and seed i64[2] -> the example that `source` describes."""
  tf, moved = tensorflow(), augment is not None
  names = ['ignore', 'size', 'image_id', *PEOPLE]
  f32, i32, n = tf.float32, tf.int32, size // stride
  kinds = {'image': (tf.uint8, [size, size, 3]), 'keypoints': (f32, [people, 17, 3]), 'ignore': (tf.uint8, [n, n]),
           'person': (f32, [people]), 'truth': (f32, [people, 17, 3]), 'boxes': (f32, [people, 4]),
           'areas': (f32, [people]), 'crowd': (f32, [people]), 'num': (i32, [people]), 'matrix': (f32, [2, 3]),
           'size': (i32, [2]), 'image_id': (i32, []), 'where': (i32, [4])}
  kinds.pop('where' if moved else 'image')

  def make(uniform, image, *values):
    made = _arrays(size, stride, people, augment, uniform, image, dict(zip(names, values)))
    return [made[k] for k in kinds]
  chance = warp.chance(seed) if moved else np.zeros(0, np.float32)
  found = tf.numpy_function(make, [chance, fields['image'], *(fields[k] for k in names)],
                            [dtype for dtype, _ in kinds.values()])
  for tensor, (_, shape) in zip(found, kinds.values()):
    tensor.set_shape(shape)      # said, not checked: an operation each would cost as much as the joints
  made = dict(zip(kinds, found))
  return made if moved else {'image': warp.boxed(fields['image'], *tf.unstack(made.pop('where')), size), **made}


def _arrays(size, stride, people, augment, uniform, image, fields) -> dict[str, np.ndarray]:
  """All of an example but evaluation's image, for which 'where' tells its place."""
  drawn = warp.Draw() if augment is None else warp.draw(uniform, augment)
  where = warp.place(*fields['size'].tolist(), size, drawn)
  rows = {k: _padded(fields[k], people) for k in PEOPLE}
  made = {'image': warp.picture(image, where, size, drawn)} if augment is not None else {}
  return {
      **made, 'keypoints': warp.joints(rows['keypoints'], where, size, drawn.mirror),
      'ignore': warp.cells(fields['ignore'], where, size, stride),
      'person': (np.arange(people) < len(fields['num'])).astype(np.float32), 'truth': rows['keypoints'],
      'boxes': rows['boxes'], 'areas': rows['areas'], 'crowd': rows['crowd'].astype(np.float32),
      'num': rows['num'].astype(np.int32), 'matrix': where.to_original.astype(np.float32),
      'size': fields['size'].astype(np.int32), 'image_id': np.int32(fields['image_id']),
      'where': np.array(where[:4], np.int32)}


def _padded(rows: np.ndarray, people: int) -> np.ndarray:
  out = np.zeros((people, *rows.shape[1:]), rows.dtype)
  out[:len(rows)] = rows[:people]
  return out


def sample() -> str:
  """The folder of the prepared samples; made on first use, in $XDG_CACHE_HOME/lab or ~/.cache/lab."""
  return prepared.sample(SAMPLE, NAME, VERSION, prepare)
