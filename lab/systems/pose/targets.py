"""Labels, drawn on the device from coordinates: part-confidence maps, part-affinity fields and where they count.

Maps have N x N cells. Coordinates are (y, x) in the unit of `grid`, the coordinate of each cell's centre; with
`cell_centres` that is px of the picture that the network sees, with `jnp.arange(n) / (n - 1)` it is the share of the
side. People are folded one at a time: no array has both a people axis and a map's axes.

Cao et al. 2017, arXiv 1611.08050, eq. 6-9; the Gaussian field with its two end blobs keeps limbs visible that are
shorter than a cell.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab.systems.pose import skeleton

CUT = 0.01          # a heatmap below this is 0, as in the paper's own training code
UNROLL = 8          # people an iteration: maps are then read and written once for all of them
FIELD_CUT = 0.001   # a Gaussian field shorter than this is 0


class Targets(NamedTuple):
  """What the network should say, and where that counts."""
  heatmap: jax.Array  # f32[B, N, N, 18], or 19 with the background
  paf: jax.Array      # f32[B, N, N, L, 2], last axis (y, x)
  use: jax.Array      # f32[B, N, N], 1 = counts in the loss, 0 = ignored


def cell_centres(cells: int, stride_px: float) -> jax.Array:
  """f32[N], px: cell i covers the pixels i * stride to (i + 1) * stride - 1, whose centres are whole numbers."""
  return (jnp.arange(cells, dtype=jnp.float32) + 0.5) * stride_px - 0.5


def make(keypoints: jax.Array, ignore: jax.Array, stride_px: float, target) -> Targets:
  """The labels of a batch.

  Args:
    keypoints: f32[B, P, 17, 3], COCO's order, (x, y, v) in px; rows without a person have v = 0.
    ignore: u8[B, N, N], not 0 where unlabelled people stand.
    stride_px: px of the picture a cell.
    target: the `target` section of the configuration.

  Returns:
    Targets. A cell under any labelled blob or limb counts, whatever `ignore` says: there we know the answer.

  Raises:
    ValueError: target.paf is neither 'hard' nor 'gaussian'.
  """
  people = skeleton.from_coco(keypoints)
  grid = cell_centres(ignore.shape[1], stride_px)
  limbs = skeleton.limbs(target.redundant_limbs)
  heatmap = heatmaps(people, grid, 2 * target.sigma_px**2, CUT)
  if target.paf == 'hard':
    paf, cover = hard_fields(people, grid, limbs, target.paf_width_px)
  elif target.paf == 'gaussian':
    paf, cover = gaussian_fields(people, grid, limbs, target.paf_s_px2, FIELD_CUT)
  else:
    raise ValueError(f"target.paf = {target.paf!r}: expected 'hard' or 'gaussian'")
  most = heatmap.max(-1)
  use = (ignore == 0) | (most > 0) | (cover > 0)
  if target.background:
    heatmap = jnp.concatenate([heatmap, 1 - most[..., None]], -1)
  return Targets(heatmap, paf, use.astype(jnp.float32))


def heatmaps(people: jax.Array, grid: jax.Array, s: float, cut: float) -> jax.Array:
  """exp(-d^2 / s) around each labelled keypoint; the maximum over people; 0 below `cut`.

  Args:
    people: [B, P, K, 3], (y, x, v).
    grid: [N], the cells' centres, in the unit of the coordinates.
    s: that unit squared; 2 sigma^2 for a Gaussian of deviation sigma.
    cut: smallest value that is kept.

  Returns:
    f32[B, N, N, K].
  """
  def draw(most, person):
    y, x, v = (person[..., i] for i in range(3))                                  # [B, K]
    # the Gaussian is separable: 2 N exponentials a blob, not N^2
    rows = jnp.exp(-(grid[None, :, None] - y[:, None])**2 / s)                    # [B, N, K]
    columns = jnp.exp(-(grid[None, :, None] - x[:, None])**2 / s) * (v > 0)[:, None]
    return jnp.maximum(most, rows[:, :, None] * columns[:, None]), None

  b, _, k, _ = people.shape
  n = grid.shape[0]
  most, _ = jax.lax.scan(draw, jnp.zeros((b, n, n, k), jnp.float32), jnp.moveaxis(people, 1, 0), unroll=UNROLL)
  return jnp.where(most < cut, 0, most)


class _Limb(NamedTuple):
  """One person's limbs, seen from every cell."""
  uy: jax.Array      # [B, 1, 1, L], unit vector from start to end, 0 where there is no limb
  ux: jax.Array
  t: jax.Array       # [B, N, N, L], way along the limb
  n: jax.Array       # [B, N, N, L], distance from its line, with a sign
  length: jax.Array  # [B, 1, 1, L]; 1 where there is no limb
  there: jax.Array   # bool[B, 1, 1, L]: both ends are labelled and apart


def _limb(person: jax.Array, grid: jax.Array, limbs: np.ndarray) -> _Limb:
  a, b = person[:, None, None, limbs[:, 0]], person[:, None, None, limbs[:, 1]]   # [B, 1, 1, L, 3]
  dy, dx = b[..., 0] - a[..., 0], b[..., 1] - a[..., 1]
  square = dy**2 + dx**2
  there = (a[..., 2] > 0) & (b[..., 2] > 0) & (square > 1e-12)
  # two joints on one spot have no direction: 0 / 0 must not be computed at all, as NaN * 0 is still NaN
  length = jnp.sqrt(jnp.where(there, square, 1))
  uy, ux = jnp.where(there, dy / length, 0), jnp.where(there, dx / length, 0)
  py = grid[None, :, None, None] - a[..., 0]                                      # [B, N, 1, L]
  px = grid[None, None, :, None] - a[..., 1]                                      # [B, 1, N, L]
  return _Limb(uy, ux, py * uy + px * ux, py * ux - px * uy, length, there)


def hard_fields(people: jax.Array, grid: jax.Array, limbs: np.ndarray, width: float) -> tuple[jax.Array, jax.Array]:
  """The unit vector of a limb where 0 <= t <= length and |n| <= width; people on one cell are averaged (eq. 8-9).

  Args:
    people: [B, P, K, 3], (y, x, v).
    grid: [N], the cells' centres, in the unit of the coordinates.
    limbs: i[L, 2], start and end keypoints.
    width: half of the limb's width, in that unit.

  Returns:
    (field f32[B, N, N, L, 2] with (y, x) last, cover f32[B, N, N] > 0 where any limb lies).
  """
  def draw(carry, person):
    fy, fx, count = carry
    limb = _limb(person, grid, limbs)
    on = (limb.there & (limb.t >= 0) & (limb.t <= limb.length) & (jnp.abs(limb.n) <= width)).astype(jnp.float32)
    return (fy + on * limb.uy, fx + on * limb.ux, count + on), None

  fy, fx, count = _fold(draw, people, grid, limbs)
  each = jnp.maximum(count, 1)
  return jnp.stack([fy / each, fx / each], -1), count.max(-1)


def gaussian_fields(people: jax.Array, grid: jax.Array, limbs: np.ndarray, s: float,
                    cut: float) -> tuple[jax.Array, jax.Array]:
  """The unit vector times max(exp(-|p - a|^2 / s), exp(-|p - b|^2 / s), exp(-n^2 / s) beside the limb), summed.

  Args:
    people: [B, P, K, 3], (y, x, v).
    grid: [N], the cells' centres, in the unit of the coordinates.
    limbs: i[L, 2], start a and end b.
    s: that unit squared.
    cut: vectors shorter than this are 0.

  Returns:
    (field f32[B, N, N, L, 2] with (y, x) last, cover f32[B, N, N] > 0 where any limb lies).
  """
  def draw(carry, person):
    fy, fx, most = carry
    limb = _limb(person, grid, limbs)
    # distance beyond the nearer end, 0 beside the limb: one exponential gives tube and end blobs, since
    # |p - a|^2 = t^2 + n^2, and beside the limb the tube is at least as high as the blobs
    beyond = jnp.maximum(jnp.maximum(-limb.t, limb.t - limb.length), 0)
    strength = jnp.where(limb.there, jnp.exp(-(beyond**2 + limb.n**2) / s), 0)
    return (fy + strength * limb.uy, fx + strength * limb.ux, jnp.maximum(most, strength)), None

  fy, fx, most = _fold(draw, people, grid, limbs)
  keep = fy**2 + fx**2 >= cut**2
  field = jnp.where(keep[..., None], jnp.stack([fy, fx], -1), 0)
  most = most.max(-1)
  return field, jnp.where(most < cut, 0, most)


def _fold(draw, people: jax.Array, grid: jax.Array, limbs: np.ndarray):
  b, n = people.shape[0], grid.shape[0]
  empty = jnp.zeros((b, n, n, len(limbs)), jnp.float32)
  carry, _ = jax.lax.scan(draw, (empty, empty, empty), jnp.moveaxis(people, 1, 0), unroll=UNROLL)
  return carry
