"""People on pictures. The strokes themselves are drawn behind the data pipelines' door to OpenCV."""

import colorsys
from typing import Mapping, Sequence

import numpy as np
from data_pipelines import images

from lab.systems.pose import skeleton

_EDGE = (24, 24, 28)


def _palette() -> list[tuple[int, int, int]]:
  """A colour a limb of the tree: the right side warm, the left side cool, each limb of a side a hue of its own."""
  sides = {'right': (0.95, 0.15), 'left': (0.44, 0.80)}       # hue from the first to the last limb of a side, turns
  out = []
  for start, end in skeleton.LIMBS[:skeleton.TREE_LIMBS]:
    side, _, _ = skeleton.KEYPOINTS[end].partition('_')
    if side not in sides:
      out.append((235, 235, 240))
      continue
    first, last = sides[side]
    number = sum(skeleton.KEYPOINTS[e].startswith(side) for e in skeleton.LIMBS[:len(out), 1])
    hue = first + number / 7 * ((last - first) % 1 if side == 'right' else last - first)
    out.append(tuple(int(255 * c) for c in colorsys.hsv_to_rgb(hue % 1, 0.75, 1.0)))
  return out


COLOURS = _palette()


def people(image: np.ndarray, found: Sequence[Mapping], names: bool = False, scores: bool = False) -> np.ndarray:
  """Draws people on a copy of a picture: a line a limb, coloured by limb, and a dot a keypoint.

  Args:
    image: u8[H, W, 3], RGB.
    found: {'keypoints': [17, 3] (x, y, score or v) in px of the image, 'score': float} each; keypoints of score 0
      are left out. The neck is put between the shoulders where both were found.
    names: write each keypoint's name beside it.
    scores: write each person's score above it.

  Returns:
    u8[H, W, 3]; lines grow with the picture, and are thinner on small people.
  """
  images.check(image)
  under, over, labels = [], [], []
  for person in found:
    points = np.asarray(person['keypoints'], np.float32).reshape(17, 3)
    body = skeleton.from_coco(points).astype(float)                        # [18, 3], (y, x, v)
    there = body[:, 2] > 0
    if not there.any():
      continue
    width = _width(image, body[there])
    for colour, (a, b) in zip(COLOURS, skeleton.LIMBS):
      if there[a] and there[b]:
        ends = tuple(body[a, 1::-1]), tuple(body[b, 1::-1])
        under.append(images.Stroke(*ends, _EDGE, width + max(width / 2, 2)))
        over.append(images.Stroke(*ends, colour, width))
    over += _dots(body, there, width)
    labels += _labels(person, body, there, width, names, scores)
  # lines shine through, so that the person below stays visible; an edge keeps them apart from any background
  out = _blend(images.draw(image, under), image, 0.45)
  out = images.draw(out, over)
  for text, at, height in labels:
    images.label(out, text, at, height)
  return out


def _width(image, body):
  """Line width in px: 1/160 of the picture, at most 1/28 of the person."""
  extent = np.ptp(body[:, :2], axis=0).max()
  return max(min(max(image.shape[:2]) / 160, extent / 28), 1.0)


def _dots(body, there, width):
  colour = {int(e): c for c, (_, e) in zip(COLOURS, skeleton.LIMBS)} | {skeleton.NOSE: (255, 255, 255)}
  out = []
  for k in np.flatnonzero(there):
    at = tuple(body[k, 1::-1])
    out += [images.Stroke(at, at, _EDGE, 2.1 * width + 1), images.Stroke(at, at, colour[int(k)], 1.6 * width)]
  return out


def _labels(person, body, there, width, names, scores):
  height = max(4.0 * width, 11.0)
  out = []
  if names:
    out += [(skeleton.KEYPOINTS[k].replace('_', ' '), (body[k, 1] + 2 * width, body[k, 0]), 0.7 * height)
            for k in np.flatnonzero(there)]
  if scores:
    top = body[there][:, :2].min(0)
    out.append((f'{person["score"]:.1f}', (top[1], top[0] - 2 * width), height))
  return out


def _blend(top, bottom, share):
  return (top * np.float32(share) + bottom * np.float32(1 - share) + 0.5).astype(np.uint8)


def side_by_side(image: np.ndarray, truth: Sequence[Mapping], found: Sequence[Mapping]) -> np.ndarray:
  """The labelled people on the left, those found on the right: u8[H, W, 3] -> u8[H, 2 W + 4, 3]."""
  return _row(_titled(people(image, truth), 'truth'), _titled(people(image, found, scores=True), 'found'))


def heat(image: np.ndarray, heatmap: np.ndarray) -> np.ndarray:
  """Lays heat over a darkened picture, from blue (low) over red to yellow (1).

  Args:
    image: u8[H, W, 3]; heatmap: [N, M], f32 in 0..1 or u8 in 0..255, stretched to the picture.
  """
  value = np.nan_to_num(np.asarray(heatmap, np.float32)) / (255 if heatmap.dtype == np.uint8 else 1)
  grey = (np.clip(value, 0, 1) * 255).astype(np.uint8)
  warm = images.resize(np.repeat(grey[..., None], 3, -1), *image.shape[:2])[..., 0].astype(np.float32) / 255
  colour = np.stack([np.interp(warm, [0, 0.5, 1], [0, 255, 255]), np.interp(warm, [0, 0.5, 1], [0, 40, 235]),
                     np.interp(warm, [0, 0.25, 0.6, 1], [0, 200, 60, 60])], -1).astype(np.float32)
  dark = image.mean(-1, keepdims=True).astype(np.float32) * 0.55
  share = np.minimum(warm * 1.5, 0.85)[..., None]
  return (dark * (1 - share) + colour * share + 0.5).astype(np.uint8)


def panel(image: np.ndarray, truth: np.ndarray, found: Sequence[Mapping], matrix: np.ndarray,
          heatmap: np.ndarray) -> np.ndarray:
  """Truth, prediction and heat in a row, for TensorBoard.

  Args:
    image: u8[S, S, 3], as the network saw it.
    truth: f32[P, 17, 3], (x, y, v) in its px; rows of padding have v = 0.
    found: people in px of the original picture.
    matrix: f32[2, 3], maps px of the network's picture to the original's.
    heatmap: u8[N, N], the hottest channel of every cell.

  Returns:
    u8[S, 3 S + 8, 3].
  """
  back = np.linalg.inv(np.vstack([np.asarray(matrix, np.float64), [0, 0, 1]]))
  inside = []
  for person in found:
    points = np.asarray(person['keypoints'], np.float64).reshape(17, 3)
    xy = np.c_[points[:, :2], np.ones(17)] @ back[:2].T
    inside.append({**person, 'keypoints': np.c_[xy, points[:, 2]]})
  image = np.asarray(image)
  pair = side_by_side(image, [{'keypoints': t} for t in np.asarray(truth)], inside)
  return _row(pair, _titled(heat(image, np.asarray(heatmap)), 'heat'))


def _titled(image, text):
  height = max(image.shape[0] / 24, 11)
  images.label(image, text, (height / 2, 2 * height), height)
  return image


def _row(left, right):
  gap = np.full((left.shape[0], 4, 3), 255, np.uint8)
  return np.concatenate([left, gap, right], 1)
