"""From the network's maps to candidates, on the device: peaks of every keypoint and scores of every possible limb.

Shapes are static, so one compilation serves every picture of a size; what leaves the device is small (about 110 kB a
picture with 32 peaks and 24 limbs, where the maps are 570 kB). People are put together on the host, by `assemble`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lab.systems.pose import skeleton

Array = jax.Array
_LEAST = 1e-3    # heat below this counts as this: its logarithm must stay finite, and noise there must not steer


class Candidates(NamedTuple):
  """What the maps propose. Entries past the last peak of a channel have score 0 and no limb."""
  position: Array    # f32[B, 18, K, 2], (y, x) in px of the picture that the network sees
  score: Array       # f32[B, 18, K], heat at the peak's cell, highest first; 0 = no peak
  limb: Array        # f32[B, L, K, K], score of the limb from peak i of its start to peak j of its end; 0 = refused


def candidates(paf: Array, heatmap: Array, size: int, config) -> Candidates:
  """Finds peaks and scores limbs.

  Args:
    paf: f32[B, N, N, L, 2], part affinity fields, (y, x); L may be 17 (the tree) or 24 (with the redundant limbs).
    heatmap: f32[B, N, N, 18 or 19], the background last where there is one; it is not read.
    size: px, side of the square picture that the maps cover; cell i lies at (i + 1/2) size / N - 1/2, for pixel
      centres are whole numbers.
    config: the section `decode` of a pose configuration.

  Values that are not finite count as 0. Cao et al., arXiv 1812.08008, section 3.3; the penalty for long limbs is that
  of its published code.
  """
  paf = jnp.where(jnp.isfinite(paf), paf, 0).astype(jnp.float32)
  heatmap = heatmap[..., :len(skeleton.KEYPOINTS)].astype(jnp.float32)
  stride = size / heatmap.shape[1]
  cell, score = peaks(heatmap, config.peaks, config.peak_min)
  limb = limbs(paf, cell, score, config)
  return Candidates((cell + 0.5) * stride - 0.5, score, limb)


def peaks(heatmap: Array, count: int, least: float) -> tuple[Array, Array]:
  """The `count` highest local maxima above `least` of every channel, to a fraction of a cell.

  A cell is a peak if no cell of the 3x3 around it is hotter, and none before it in reading order is as hot: a plateau
  gives one peak. A parabola through the logarithm of the heat, exact for a Gaussian blob, refines each axis.

  Args:
    heatmap: f32[B, N, N, C].
    count: peaks kept a channel, K; at most N * N.
    least: heat a peak must exceed.

  Returns:
    cell f32[B, C, K, 2], (y, x) in cells, whole numbers at cell centres; score f32[B, C, K], 0 = no peak.
  """
  b, n, m, c = heatmap.shape
  heat = jnp.where(jnp.isfinite(heatmap), heatmap, 0).transpose(0, 3, 1, 2)            # [B, C, N, N]
  padded = jnp.pad(heat, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-jnp.inf)
  top = heat > least
  for i in range(3):
    for j in range(3):
      around = padded[:, :, i:i + n, j:j + m]
      if (i, j) < (1, 1):
        top &= heat > around
      elif (i, j) > (1, 1):
        top &= heat >= around
  score, flat = lax.top_k(jnp.where(top, heat, 0).reshape(b, c, n * m), count)          # [B, C, K]
  y, x = flat // m, flat % m
  log = jnp.log(jnp.maximum(heat, _LEAST)).reshape(b, c, n * m)
  cell = jnp.stack([_vertex(log, y, x * 1, n, m), _vertex(log, x, y * m, m, 1)], -1)
  return jnp.where(score[..., None] > 0, cell, 0), jnp.maximum(score, 0)


def _vertex(log, at, rest, length, step):
  """Where the parabola through three cells of one axis has its top, at most half a cell from `at`.

  The cells are `rest + step * i` of the flat map. At the border the three cells lie inside, beside the peak.
  """
  middle = jnp.clip(at, 1, length - 2) if length > 2 else at
  near = [jnp.take_along_axis(log, rest + step * jnp.clip(middle + d, 0, length - 1), -1) for d in (-1, 0, 1)]
  bend = 2 * near[1] - near[0] - near[2]
  off = jnp.where(bend > 1e-6, (near[2] - near[0]) / jnp.where(bend > 1e-6, 2 * bend, 1), at - middle)
  return at + jnp.clip(middle + off - at, -0.5, 0.5)


def limbs(paf: Array, cell: Array, score: Array, config) -> Array:
  """Scores every pair of candidates of every limb by a line integral of the field along it.

  score = mean_s <F(p_s), u> + min(N / 2l - 1, 0), with u the unit vector and l the length from start to end, in cells,
  at `samples` points p_s from end to end, the field interpolated between cells. A pair is refused (0) where fewer than
  `valid_share` of the points exceed `sample_min`, and where the score isn't positive.

  Ends less than a cell apart may have no field between them, and coinciding ends have no direction: such a pair scores
  at least near_score * (1 - l / 2), so that it is taken only where nothing better claims its ends.

  Args:
    paf: f32[B, N, N, L, 2]; cell: f32[B, 18, K, 2]; score: f32[B, 18, K]; config: the section `decode`.

  Returns:
    f32[B, L, K, K].
  """
  n = paf.shape[1]
  pairs = jnp.asarray(skeleton.LIMBS[:paf.shape[3]])                                    # [L, 2]
  start, end = cell[:, pairs[:, 0]], cell[:, pairs[:, 1]]                               # [B, L, K, 2]
  across = end[:, :, None] - start[:, :, :, None]                                       # [B, L, K, K, 2]
  square = jnp.sum(across**2, -1)
  apart = square > 1e-6
  length = jnp.sqrt(jnp.where(apart, square, 1))         # no division by 0, whatever is masked later
  unit = across / length[..., None]
  t = jnp.linspace(0, 1, config.samples).reshape(1, 1, 1, 1, -1, 1)
  points = start[:, :, :, None, None] + across[..., None, :] * t                        # [B, L, K, K, S, 2]
  field = jax.vmap(jax.vmap(_sample, (2, 0)))(paf, points)
  along = jnp.sum(field * unit[..., None, :], -1)                                       # [B, L, K, K, S]
  valid = jnp.mean(along > config.sample_min, -1) >= config.valid_share - 1e-6
  total = jnp.where(apart & valid, along.mean(-1) + jnp.minimum(n / (2 * length) - 1, 0), 0)
  far = jnp.where(apart, length, 0)
  near = jnp.where(far < 1, config.near_score * (1 - far / 2), 0)
  there = (score[:, pairs[:, 0]] > 0)[..., :, None] & (score[:, pairs[:, 1]] > 0)[..., None, :]
  return jnp.where(there, jnp.maximum(jnp.maximum(total, near), 0), 0)


def _sample(field, points):
  """Bilinear values of field [N, M, 2] at points [..., 2] (y, x) in cells; the border's value outside."""
  n, m, _ = field.shape
  y, x = jnp.clip(points[..., 0], 0, n - 1), jnp.clip(points[..., 1], 0, m - 1)
  top, left = jnp.floor(y).astype(jnp.int32), jnp.floor(x).astype(jnp.int32)
  below, right = jnp.minimum(top + 1, n - 1), jnp.minimum(left + 1, m - 1)
  fy, fx = (y - top)[..., None], (x - left)[..., None]
  flat = field.reshape(n * m, 2)
  upper = flat[top * m + left] * (1 - fx) + flat[top * m + right] * fx
  lower = flat[below * m + left] * (1 - fx) + flat[below * m + right] * fx
  return upper * (1 - fy) + lower * fy


def merge_flipped(paf: Array, heatmap: Array, paf_flipped: Array, heatmap_flipped: Array) -> tuple[Array, Array]:
  """Averages the maps of a picture with those of its mirror image, mirrored back.

  Args:
    paf, paf_flipped: f32[B, N, N, L, 2]; heatmap, heatmap_flipped: f32[B, N, N, 18 or 19].
  """
  heat, field = skeleton.mirror_maps(heatmap_flipped, paf_flipped)
  return (paf + field) / 2, (heatmap + heat) / 2
