"""One affine warp an example: picture, ignore mask and joints go through the same matrix; then colour.

Coordinates are (x, y) with pixel centres at whole numbers, as COCO's joints are: x = 0 is the centre of the leftmost
column, a picture of width W spans [-0.5, W - 0.5), mirroring is x -> W - 1 - x, and the centre of label cell i at
stride s lies at s * (i + 0.5) - 0.5.

Training looks a picture's pixels up once, softened so that shrinking never aliases (images.moved); evaluation resizes,
antialiased, and pads. What lies outside is FILL. All but evaluation's resizing is NumPy: an example's few numbers would
cost more as TensorFlow's operations than its pixels do.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from data_pipelines import images
from data_pipelines.pipeline import tensorflow

FILL = 128                 # mid grey, outside the picture
IGNORE_SHARE = 0.01        # of a cell's area, above which the cell is ignored

# COCO order: nose, then left and right by turns (eyes, ears, shoulders, elbows, wrists, hips, knees, ankles)
TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
TO_YIQ[1:] -= TO_YIQ[1:].mean(1, keepdims=True)            # grey has no chroma, exactly
FROM_YIQ = np.linalg.inv(TO_YIQ)

MIRRORED = (0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15)


class Draw(NamedTuple):
  """What chance decides for one example."""
  mirror: bool = False
  scale: float = 1.0         # relative to the letterbox
  angle: float = 0.0         # radians
  shift_x: float = 0.0       # of the picture, share of the side
  shift_y: float = 0.0
  brightness: float = 0.0    # added, share of full range
  contrast: float = 1.0      # factor around the mean grey
  saturation: float = 1.0    # factor
  hue: float = 0.0           # turns


class Placement(NamedTuple):
  """Where the picture lies in the square, and the affine maps that follow."""
  height: int                # of the picture at the square's scale, pixels
  width: int
  top: int                   # of that picture, before it is turned and shifted
  left: int
  to_original: np.ndarray    # f64[2, 3]: the square -> the original picture
  to_square: np.ndarray      # f64[2, 3]: the original picture -> the square


def chance(seed) -> Any:
  """What `draw` draws from: uniform in [0, 1), f32[9], a function of seed i64[2] alone."""
  return tensorflow().random.stateless_uniform([len(Draw._fields)], seed)


def draw(uniform: np.ndarray, augment) -> Draw:
  """Draws from numbers f32[9] in [0, 1) with the strengths of a configuration's `augment` section."""
  u = uniform.tolist()
  spread = [2 * x - 1 for x in u]                        # uniform in +-1
  return Draw(
      mirror=u[0] < augment.mirror,
      scale=augment.scale_min + u[1] * (augment.scale_max - augment.scale_min),
      angle=spread[2] * math.radians(augment.rotate_deg),
      shift_x=spread[3] * augment.shift,
      shift_y=spread[4] * augment.shift,
      brightness=spread[5] * augment.brightness,
      contrast=1 + spread[6] * augment.contrast,
      saturation=1 + spread[7] * augment.saturation,
      hue=spread[8] * augment.hue)


def place(height: int, width: int, size: int, drawn: Draw) -> Placement:
  """The maps of one example from its original height and width to a square of `size` pixels."""
  long = max(height, width)
  new_h, new_w = (max(math.floor(side * size * drawn.scale / long + 0.5), 1) for side in (height, width))
  left, top = math.floor((size - new_w) / 2), math.floor((size - new_h) / 2)
  # square -> resized: turn around the square's centre, after taking the shift back
  flip, cos, sin = (-1 if drawn.mirror else 1), math.cos(drawn.angle), math.sin(drawn.angle)
  turn = np.array([[flip * cos, flip * sin], [-sin, cos]])
  centre = (size - 1) / 2
  middle = np.array([centre + drawn.shift_x * size, centre + drawn.shift_y * size])
  corner = centre - np.array([left, top]) - turn @ middle
  # resized -> original: the outer edges coincide, pixel centres are half a pixel inside
  grow = np.array([width / new_w, height / new_h])
  to_original = np.column_stack([turn * grow[:, None], corner * grow + 0.5 * grow - 0.5])
  back = turn.T / grow                                   # a rotation's inverse is its transpose
  to_square = np.column_stack([back, -back @ to_original[:, 2]])
  return Placement(new_h, new_w, top, left, to_original, to_square)


def picture(image: np.ndarray, where: Placement, size: int, drawn: Draw) -> np.ndarray:
  """A training picture: image u8[H, W, 3] of the original, moved and recoloured, u8[size, size, 3]."""
  return colour(images.moved(image, where.to_original, size, FILL), drawn)


def boxed(image, height, width, top, left, size: int):
  """Evaluation's picture, for TensorFlow: image u8[H, W, 3] letterboxed to u8[size, size, 3]; i32[] as in Placement."""
  tf = tensorflow()
  small = tf.image.resize(image, [height, width], 'bilinear', antialias=True)
  square = tf.pad(small, [[top, size - top - height], [left, size - left - width], [0, 0]], constant_values=float(FILL))
  return tf.ensure_shape(tf.saturate_cast(tf.round(square), tf.uint8), [size, size, 3])


def cells(mask: np.ndarray, where: Placement, size: int, stride: int) -> np.ndarray:
  """Samples a mask u8[H, W, 1] of 0 and 255 at every pixel of the square; u8[N, N], N = size / stride.

  A cell is 1 where over IGNORE_SHARE of its samples are masked.
  """
  n = size // stride
  if not mask.max(initial=0):
    return np.zeros((n, n), np.uint8)
  sampled = images.sampled(mask, where.to_original, size) > 0
  rows = np.add.reduce(sampled.reshape(n, stride, size), 1, np.int32)
  return (rows.reshape(n, n, stride).sum(2) > IGNORE_SHARE * stride**2).astype(np.uint8)


def joints(keypoints: np.ndarray, where: Placement, size: int, mirror: bool) -> np.ndarray:
  """Moves keypoints f32[P, 17, 3] of the original picture into the square; a joint outside it becomes 0, 0, 0."""
  moved = keypoints.copy()
  moved[..., :2] = keypoints[..., :2] @ where.to_square[:, :2].T + where.to_square[:, 2]
  xy = moved[..., :2]
  inside = ((xy >= -0.5) & (xy < size - 0.5)).all(-1) & (keypoints[..., 2] > 0)
  moved[~inside] = 0
  return exchanged(moved) if mirror else moved


def exchanged(keypoints: np.ndarray) -> np.ndarray:
  """Left joints become right ones and the reverse, [..., 17, 3]."""
  return keypoints[..., MIRRORED, :]


def colour(image: np.ndarray, drawn: Draw) -> np.ndarray:
  """Contrast around the mean grey, saturation, hue (a rotation of the chroma plane) and brightness; type as before.

  All are one matrix, and bytes are rounded and clipped once, at the end, so the order of the first three loses nothing.
  """
  grey = images.mean(image) @ TO_YIQ[0]
  angle = 2 * math.pi * drawn.hue
  c, s = drawn.saturation * math.cos(angle), drawn.saturation * math.sin(angle)
  matrix = np.empty((3, 4))
  matrix[:, :3] = drawn.contrast * (FROM_YIQ @ [[1, 0, 0], [0, c, -s], [0, s, c]] @ TO_YIQ)
  matrix[:, 3] = grey * (1 - drawn.contrast) + 255 * drawn.brightness
  return images.mixed(image, matrix)


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
