"""One affine warp an example: picture, ignore mask and joints go through the same matrix; then colour.

Coordinates are (x, y) with pixel centres at whole numbers, as COCO's joints are: x = 0 is the centre of the leftmost
column, a picture of width W spans [-0.5, W - 0.5), mirroring is x -> W - 1 - x, and the centre of label cell i at
stride s lies at s * (i + 0.5) - 0.5.

A picture is first resized, antialiased, to the scale it will have (the letterbox scale times the drawn one), then
turned, mirrored and shifted without a change of scale; so shrinking never aliases. What lies outside is FILL.
"""

from typing import Any, NamedTuple

import numpy as np

from data_pipelines.pipeline import tensorflow

FILL = 128                 # mid grey, outside the picture
IGNORE_SHARE = 0.01        # of a cell's area, above which the cell is ignored

# COCO order: nose, then left and right by turns (eyes, ears, shoulders, elbows, wrists, hips, knees, ankles)
MIRRORED = (0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15)


class Draw(NamedTuple):
  """What chance decides for one example; scalars, Python's or TensorFlow's."""
  mirror: Any = False      # bool[]
  scale: Any = 1.0         # relative to the letterbox
  angle: Any = 0.0         # radians
  shift_x: Any = 0.0       # of the picture, share of the side
  shift_y: Any = 0.0
  brightness: Any = 0.0    # added, share of full range
  contrast: Any = 1.0      # factor around the mean grey
  saturation: Any = 1.0    # factor
  hue: Any = 0.0           # turns


class Placement(NamedTuple):
  """Where the resized picture lies in the square, and the affine maps that follow; float64 tensors."""
  height: Any              # i32[] of the resized picture
  width: Any
  to_resized: Any          # f64[2, 3]: the square -> the resized picture
  to_original: Any         # f64[2, 3]: the square -> the original picture
  to_square: Any           # f64[2, 3]: the original picture -> the square


def draw(seed, augment) -> Draw:
  """Draws from seed i64[2] with the strengths of a configuration's `augment` section."""
  tf = tensorflow()
  u = tf.random.stateless_uniform([9], seed)
  spread = 2 * u - 1                                     # uniform in +-1
  return Draw(
      mirror=u[0] < augment.mirror,
      scale=augment.scale_min + u[1] * (augment.scale_max - augment.scale_min),
      angle=spread[2] * np.float32(np.deg2rad(augment.rotate_deg)),
      shift_x=spread[3] * augment.shift,
      shift_y=spread[4] * augment.shift,
      brightness=spread[5] * augment.brightness,
      contrast=1 + spread[6] * augment.contrast,
      saturation=1 + spread[7] * augment.saturation,
      hue=spread[8] * augment.hue)


def place(height, width, size: int, drawn: Draw) -> Placement:
  """The maps of one example from its original height and width, i32[] or int, to a square of `size` pixels."""
  tf = tensorflow()
  f64 = lambda x: tf.cast(x, tf.float64)
  long = tf.maximum(f64(height), f64(width))
  fitted = lambda side: tf.maximum(tf.floor(f64(side) * size * f64(drawn.scale) / long + 0.5), 1)
  new_h, new_w = fitted(height), fitted(width)
  left, top = tf.floor((size - new_w) / 2), tf.floor((size - new_h) / 2)
  # square -> resized: turn around the square's centre, after taking the shift back
  flip = tf.where(drawn.mirror, f64(-1), f64(1))
  cos, sin = tf.cos(f64(drawn.angle)), tf.sin(f64(drawn.angle))
  turn = tf.stack([[flip * cos, flip * sin], [-sin, cos]])
  centre = f64([(size - 1) / 2] * 2)
  middle = centre + tf.stack([f64(drawn.shift_x), f64(drawn.shift_y)]) * size
  corner = tf.stack([left, top])
  to_resized = tf.concat([turn, (centre - corner - _times(tf, turn, middle))[:, None]], 1)
  # resized -> original: the outer edges coincide, pixel centres are half a pixel inside
  grow = tf.stack([f64(width) / new_w, f64(height) / new_h])
  to_original = to_resized * grow[:, None] + tf.stack([f64([0, 0]), f64([0, 0]), 0.5 * grow - 0.5], 1)
  back = tf.transpose(turn) / grow[None]                 # a rotation's inverse is its transpose
  to_square = tf.concat([back, -_times(tf, back, to_original[:, 2])[:, None]], 1)
  return Placement(tf.cast(new_h, tf.int32), tf.cast(new_w, tf.int32), to_resized, to_original, to_square)


def _times(tf, matrix, vector):
  return tf.reduce_sum(matrix * vector[None], 1)


def picture(image, where: Placement, size: int, *, moved: bool):
  """Warps image u8[H, W, 3] to f32[size, size, 3]; `moved` = False: there is nothing but the letterbox."""
  tf = tensorflow()
  small = tf.image.resize(image, [where.height, where.width], 'bilinear', antialias=True)
  if not moved:
    left, top = (-tf.cast(where.to_resized[i, 2], tf.int32) for i in (0, 1))
    below, right = size - top - where.height, size - left - where.width
    square = tf.pad(small, [[top, below], [left, right], [0, 0]], constant_values=float(FILL))
  else:
    square = tf.raw_ops.ImageProjectiveTransformV3(
        images=small[None], transforms=_flat(tf, where.to_resized), output_shape=[size, size], fill_value=FILL,
        interpolation='BILINEAR', fill_mode='CONSTANT')[0]
  return tf.ensure_shape(square, [size, size, 3])


def cells(mask, where: Placement, size: int, stride: int):
  """Samples a mask u8[H, W, 1] of 0 and 255 at every pixel of the square; u8[N, N], N = size / stride.

  A cell is 1 where over IGNORE_SHARE of its samples are masked.
  """
  tf = tensorflow()
  n = size // stride

  def share():
    sampled = tf.raw_ops.ImageProjectiveTransformV3(
        images=mask[None], transforms=_flat(tf, where.to_original), output_shape=[size, size], fill_value=0.0,
        interpolation='NEAREST', fill_mode='CONSTANT')
    square = tf.reshape(tf.cast(sampled > 0, tf.float32), [n, stride, n, stride])
    return tf.cast(tf.reduce_mean(square, [1, 3]) > IGNORE_SHARE, tf.uint8)
  return tf.cond(tf.reduce_any(mask > 0), share, lambda: tf.zeros([n, n], tf.uint8))


def _flat(tf, matrix):
  """f64[2, 3] -> f32[1, 8], as the projective transform takes it."""
  return tf.cast(tf.concat([tf.reshape(matrix, [1, 6]), [[0.0, 0.0]]], 1), tf.float32)


def joints(keypoints, where: Placement, size: int, mirror):
  """Moves keypoints f32[P, 17, 3] of the original picture into the square; a joint outside it becomes 0, 0, 0."""
  tf = tensorflow()
  xy = tf.linalg.matmul(tf.cast(keypoints[..., :2], tf.float64), where.to_square[:, :2], transpose_b=True)
  xy = tf.cast(xy + where.to_square[:, 2], tf.float32)
  inside = tf.reduce_all((xy >= -0.5) & (xy < size - 0.5), -1, keepdims=True) & (keypoints[..., 2:] > 0)
  moved = tf.where(inside, tf.concat([xy, keypoints[..., 2:]], -1), 0.0)
  return exchanged(moved, mirror)


def exchanged(keypoints, mirror):
  """Left joints become right ones and the reverse, [..., 17, 3], where mirror bool[] is true."""
  tf = tensorflow()
  return tf.where(mirror, tf.gather(keypoints, MIRRORED, axis=-2), keypoints)


def colour(image, drawn: Draw):
  """Contrast around the mean grey, saturation, hue (a rotation of the chroma plane) and brightness, f32[H, W, 3].

  The first three are one matrix; no step clips, so their order loses nothing.
  """
  tf = tensorflow()
  to_yiq = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
  to_yiq[1:] -= to_yiq[1:].mean(1, keepdims=True)        # grey has no chroma, exactly
  grey = tf.reduce_sum(tf.reduce_mean(image[::4, ::4], [0, 1]) * np.float32(to_yiq[0]))   # of every 16th pixel
  angle = 2 * np.pi * tf.cast(drawn.hue, tf.float32)
  c, s = drawn.saturation * tf.cos(angle), drawn.saturation * tf.sin(angle)
  # all as differences from doing nothing, so that zero strengths add exact zeros
  chroma = tf.stack([[0.0, 0.0, 0.0], [0.0, c - 1, -s], [0.0, s, c - 1]])
  change = np.float32(np.linalg.inv(to_yiq)) @ chroma @ np.float32(to_yiq) * drawn.contrast
  change += (drawn.contrast - 1) * tf.eye(3)
  level = grey * (1 - drawn.contrast) + 255 * drawn.brightness
  flat = tf.reshape(image, [-1, 3])
  return tf.reshape(flat + (flat @ tf.transpose(change) + level), tf.shape(image))


def to_bytes(image):
  """f32 -> u8, rounded and clipped."""
  tf = tensorflow()
  return tf.saturate_cast(tf.round(image), tf.uint8)


def letterbox(image: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
  """The evaluation's warp for any picture, without TensorFlow.

  Args:
    image: u8[H, W, 3], upright.
    size: side of the square in pixels.

  Returns:
    u8[size, size, 3], and f32[2, 3] that maps (x, y, 1) of the square to pixels of `image`.
  """
  from PIL import Image
  height, width = image.shape[:2]
  long = max(height, width)
  new_h, new_w = (max(int(np.floor(side * size / long + 0.5)), 1) for side in (height, width))
  top, left = (size - new_h) // 2, (size - new_w) // 2
  square = np.full((size, size, 3), FILL, np.uint8)
  square[top:top + new_h, left:left + new_w] = Image.fromarray(image).resize((new_w, new_h), Image.Resampling.BILINEAR)
  grow_x, grow_y = width / new_w, height / new_h
  matrix = [[grow_x, 0, (0.5 - left) * grow_x - 0.5], [0, grow_y, (0.5 - top) * grow_y - 0.5]]
  return square, np.array(matrix, np.float32)
