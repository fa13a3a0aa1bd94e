"""Moving MNIST (Srivastava et al. 2015, arXiv 1502.04681): what the video system trains on.

Two data sets can lie in the folder. Of digits (`mnist`) the source hands out which digits meet in a sequence, and the
device draws where they go: training never repeats, and bytes that would only be copied are not moved. Of fixed
sequences (`clips`) it hands out the frames. Of digits, and of sequences made of them here, train, validation and test
share none; of imported clips that is up to the files.

`motion`, `paths` and `render` are the generator in NumPy. It writes fixed sets, and says what the device has to draw.
"""

import functools
import os

import numpy as np

from data_pipelines import DataError, clips, mnist, prepared
from data_pipelines.pipeline import Source, tensorflow

SPEED = 0.1                  # canvas sides a frame, of written sets, as in the paper's code
_APART = {'train': 0, 'validation': 1 << 30, 'test': 1 << 31}
check = clips.check          # of what `prepare` writes


def source(folder: str, split: str, data, video) -> Source:
  """A split as the pipeline reads it.

  Of digits, sequence n is made of the digit of its record and, drawn by (seed, n), others of the same split:
    digits     u8[data.digits, 28, 28]
    number     u32[2]              seed and n; in evaluation 0 and the record, so it stays the same over epochs. Splits
                                   other than 'train' add a constant to the seed, for their own motions
    digit_ids  i32[data.digits]    places in MNIST's files; see mnist.py
  Of fixed sequences:
    video      u8[video.past + video.future, video.size, video.size]    the first frames of the record

  Args:
    folder: of a prepared data set of either kind; or 'sample': MNIST's test digits, which ship with the lab.
    split: 'train', 'validation' or 'test'.
    data: a configuration's `data` section (digits).
    video: its `video` section (size, past, future).

  Raises:
    DataError: not prepared, no such split, or sequences that are too short or of another size.
  """
  path = mnist.sample() if folder == 'sample' else _find(folder)
  found = prepared.manifest(path)
  if split not in found['splits']:
    raise DataError(f'{path}: no split {split!r}; there are {", ".join(sorted(found["splits"]))}')
  entry = found['splits'][split]
  shards = tuple(os.path.join(path, name) for name in sorted(entry['shards']))
  if found['dataset'] == 'mnist':
    bank = functools.cache(functools.partial(_bank, shards))
    return Source(shards, mnist.decode, functools.partial(_company, bank, data.digits, _APART[split]), entry['records'])
  facts, frames, size = entry['facts'], video.past + video.future, video.size
  if facts['frames'] < frames or (facts['height'], facts['width']) != (size, size):
    raise DataError(f'{path}: the sequences of {split!r} have {facts["frames"]} frames of {facts["height"]} x '
                    f'{facts["width"]} px, wanted are {frames} of {size} x {size}: set config.video.size, and '
                    'config.video.past + config.video.future to at most their frames')
  return Source(shards, clips.decode, functools.partial(_frames, frames, size), entry['records'])


def _find(folder: str) -> str:
  paths = {p for p in (prepared.find(folder, m.NAME, m.VERSION) for m in (mnist, clips)) if p}
  if not paths:
    raise DataError(f'{folder}: no prepared data set there. Prepare it with `python -m data_pipelines.prepare mnist '
                    f'--raw_dir=MNIST_FOLDER --out_dir={folder}`, or import sequences: prepare clips')
  if len(paths) > 1:
    raise DataError(f'{folder}: two data sets, {" and ".join(sorted(paths))}; name the one that is meant')
  path, = paths
  dataset = prepared.manifest(path)['dataset']
  if dataset not in ('mnist', 'clips'):
    raise DataError(f'{path}: a data set of {dataset!r}; expected one prepared as mnist, moving_mnist or clips')
  return path


def _bank(shards: tuple[str, ...]):
  """All digits of a split, u8[N, 28, 28], and their ids, i32[N], in memory."""
  tf = tensorflow()
  with tf.init_scope():      # outside the graph that is being built, which then refers to them
    try:
      found = mnist.decode(tf.data.TFRecordDataset(list(shards)).batch(1 << 30).get_single_element())
    except tf.errors.OpError as e:
      raise DataError(f'{os.path.dirname(shards[0])}: a digit can\'t be read ({e.message.splitlines()[0][-100:]}), and '
                      'sequences are drawn from all of them; run `python -m data_pipelines.prepare verify` on this '
                      'folder') from None
    return found['digit'], tf.cast(found['digit_id'], tf.int32)


def _company(bank, count: int, apart: int, fields: dict, seed) -> dict:
  """A decoded digit and seed i64[2] -> the example of `count` digits that `source` describes."""
  tf = tensorflow()
  digits, ids = fields['digit'][None], tf.cast(fields['digit_id'], tf.int32)[None]
  if count > 1:
    images, numbers = bank()
    drawn = tf.random.stateless_uniform([count - 1], seed, 0, len(numbers), tf.int32, alg='philox')
    digits = tf.concat([digits, tf.gather(images, drawn)], 0)
    ids = tf.concat([ids, tf.gather(numbers, drawn)], 0)
  number = (seed + tf.constant([apart, 0], tf.int64)) % (1 << 32)
  return {'digits': digits, 'number': tf.cast(number, tf.uint32), 'digit_ids': ids}


def _frames(frames: int, size: int, fields: dict, seed) -> dict:
  del seed
  tf = tensorflow()
  return {'video': tf.ensure_shape(fields['video'][:frames], [frames, size, size])}


def motion(seed: int, n: int, digits: int, speed_min: float, speed_max: float) -> tuple[np.ndarray, np.ndarray]:
  """Where the digits of sequence n start, f32[digits, 2] in [0, 1], and their velocity f32[digits, 2] a frame.

  Both in canvas sides, x before y: all directions are equally likely, the speed is uniform between its bounds.
  """
  draw = np.random.default_rng((seed, n))
  start = draw.uniform(0, 1, (digits, 2))
  theta, speed = draw.uniform(0, 2 * np.pi, digits), draw.uniform(speed_min, speed_max, digits)
  velocity = speed[:, None] * np.stack([np.cos(theta), np.sin(theta)], 1)
  return start.astype(np.float32), velocity.astype(np.float32)


def paths(start: np.ndarray, velocity: np.ndarray, frames: int, bounce: str = 'clamp') -> np.ndarray:
  """Positions f32[frames, n, 2] in canvas sides of digits that start at f32[n, 2] and move by f32[n, 2] a frame.

  Each frame begins with the step. Where that leads past 0 or 1, the coordinate stops at the wall ('clamp', as the
  paper's code does) or is thrown back as far as it went beyond ('reflect'), and its velocity turns round.
  """
  position, velocity = np.array(start, np.float32), np.array(velocity, np.float32)
  found = np.empty((frames, *position.shape), np.float32)
  for t in range(frames):
    position = position + velocity
    low, high = position < 0, position > 1
    if bounce == 'clamp':
      position = np.clip(position, 0, 1)
    else:
      position = np.where(low, -position, np.where(high, 2 - position, position))
    velocity = np.where(low | high, -velocity, velocity)
    found[t] = position
  return found


def render(digits: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
  """Frames u8[T, size, size] of digits u8[n, h, h] at positions f32[T, n, 2] (x, y) in [0, 1].

  The canvas is as long as the way a digit has, size - h px; its upper left pixel is the position's whole part there.
  Where digits overlap the brighter pixel counts.
  """
  side = digits.shape[-1]
  corners = (np.float32(size - side) * positions).astype(np.int64)
  frames = np.zeros((len(positions), size, size), np.uint8)
  for frame, places in zip(frames, corners):
    for digit, (x, y) in zip(digits, places):
      patch = frame[y:y + side, x:x + side]
      np.maximum(patch, digit, out=patch)
  return frames


def pool(digits: np.ndarray, k: int) -> np.ndarray:
  """u8[..., h, w] -> u8[..., h / k, w / k]: the mean of each k x k block, rounded to nearest, half to even."""
  *rest, height, width = digits.shape
  blocks = digits.reshape(*rest, height // k, k, width // k, k)
  return np.rint(blocks.astype(np.float64).mean((-3, -1))).astype(np.uint8)


def prepare(raw_dir: str, out_dir: str, *, shards: int = 64, digits: int = 2, sequences: int = 10000, frames: int = 20,
            size: int = 64, seed: int = 0) -> tuple[str, dict]:
  """Writes fixed sequences of MNIST's digits as a `clips` data set: (prepared folder, report), or DataError.

  Args:
    raw_dir: MNIST's files, as for `mnist.prepare`; each split has `sequences` of its own digits.
    digits: of a sequence; they move by SPEED and stop at the walls.
    frames: of a sequence.
    size: px, side of a frame.
    seed: other seeds give other sequences.
  """
  options = {'files': mnist.digests(raw_dir), 'digits': digits, 'sequences': sequences, 'frames': frames, 'size': size,
             'seed': seed}
  facts = {'frames': frames, 'height': size, 'width': size, 'digits_max': digits}
  splits = {}
  for split, bank in mnist.read(raw_dir).items():
    own = len(clips.SPLITS) * seed + clips.SPLITS.index(split)        # no two splits or seeds draw alike
    splits[split] = clips.Sequences(sequences, functools.partial(_sequences, bank, own, options), facts)
  report = {k: {'sequences': sequences, **s.facts} for k, s in splits.items()}
  return clips.write(out_dir, splits, options=options, report=report, shards=shards), report


def _sequences(bank: mnist.Digits, seed: int, options: dict):
  for n in range(options['sequences']):
    yield sequence(bank, seed, n, options['digits'], options['frames'], options['size'])


def sequence(bank: mnist.Digits, seed: int, n: int, digits: int, frames: int, size: int) -> dict:
  """The record of written sequence n: digits drawn from `bank`, moving by SPEED; see clips.py."""
  drawn = np.random.default_rng((seed, n, 1)).integers(0, len(bank.ids), digits)       # apart from those of `motion`
  start, velocity = motion(seed, n, digits, SPEED, SPEED)
  video = render(bank.images[drawn], paths(start, velocity, frames), size)
  return clips.record(video, n, bank.labels[drawn], bank.ids[drawn], start, velocity)
