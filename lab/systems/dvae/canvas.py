"""Grids as tokens: a canvas of equal size for all, its two layouts, and what training does to a grid beforehand.

Tokens: 0 to 9 colours, 10 the end of a row, 14 a token that is hidden from the encoder, 15 outside of the grid. All is
drawn on the device, from a grid's `number` alone: the same whatever the batch it comes in, but for what it is joined
to.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COLOURS, NEWLINE, MASK, PAD, VOCABULARY = 10, 10, 14, 15, 16
OUTSIDE = 255                   # of a grid's cells as they come, outside of it


def length(side: int, layout: str) -> int:
  """Tokens of a canvas."""
  return side * (side + (layout == 'sequence'))


def keys(number: jax.Array, stream: int) -> jax.Array:
  """A key for each grid from its u32[B, 2], seed and number; another one for each stream."""
  # the generator is named, lest config.prng change the data
  make = lambda n: jax.random.fold_in(jax.random.fold_in(jax.random.key(n[0], impl='threefry2x32'), n[1]), stream)
  return jax.vmap(make)(number)


def tokens(grid: jax.Array, size: jax.Array, layout: str) -> tuple[jax.Array, jax.Array]:
  """Grids u8[B, M, M] (255 outside) of sizes i32[B, 2] -> tokens i32[B, S], and their rows and columns i32[B, S, 2].

  projected: every cell of the canvas, row by row; where they lie is the same for all, i32[1, S, 2]. sequence: the rows
  of the grid one after the other, each with a token for its end, then PAD, whose place is 0, 0.
  """
  side = grid.shape[1]
  cells = jnp.where(grid == OUTSIDE, PAD, grid).astype(jnp.int32)
  if layout == 'projected':
    return cells.reshape(len(grid), -1), raster(side, layout)[None]
  row, column = jnp.divmod(jnp.arange(length(side, layout))[None], size[:, 1:] + 1)
  inside = row < size[:, :1]
  at = (jnp.arange(len(grid))[:, None], jnp.minimum(row, side - 1), jnp.minimum(column, side - 1))
  found = jnp.where(column == size[:, 1:], NEWLINE, cells[at])
  places = jnp.where(inside[..., None], jnp.stack([row, column], -1), 0)
  return jnp.where(inside, found, PAD), places


def raster(side: int, layout: str) -> jax.Array:
  """Rows and columns i32[S, 2] of a canvas of which nothing is known: what the decoder starts from."""
  return jnp.stack(jnp.divmod(jnp.arange(length(side, layout)), side + (layout == 'sequence')), -1).astype(jnp.int32)


def extents(tokens: jax.Array) -> jax.Array:
  """Tokens i32[B, S], projected -> i32[B, 2]: rows and columns up to the last that has a cell inside of the grid."""
  side = math.isqrt(tokens.shape[1])
  inside = tokens.reshape(-1, side, side) != PAD
  last = jnp.arange(1, side + 1)[None]
  return jnp.stack([(inside.any(axis) * last).max(1) for axis in (2, 1)], -1).astype(jnp.int32)


def grid_of(tokens: np.ndarray, layout: str) -> np.ndarray:
  """Tokens [S] -> the cells that they show, u8[h, w]; the inverse of `tokens` for what it gives.

  What a network makes up may be no grid: projected, it is cut to the rows and columns that start inside; sequence, to
  rows of the first one's length. Cells that are no colour stay what they are.
  """
  if layout == 'sequence':
    inside = list(tokens[:next((i for i, t in enumerate(tokens) if t == PAD), len(tokens))])
    width = inside.index(NEWLINE) if NEWLINE in inside else len(inside)
    if not width:
      return np.zeros((0, 0), np.uint8)
    rows = [inside[i:i + width] for i in range(0, len(inside), width + 1)]
    return np.array([r for r in rows if len(r) == width], np.uint8).reshape(-1, width)
  side = math.isqrt(len(tokens))
  cells = np.asarray(tokens, np.uint8).reshape(side, side)
  inside = cells != PAD
  if not inside.any():
    return np.zeros((0, 0), np.uint8)
  rows, columns = (np.flatnonzero(inside.any(axis)) for axis in (1, 0))
  return cells[rows[0]:rows[-1] + 1, columns[0]:columns[-1] + 1]


class Augmentation(NamedTuple):
  """What training does to a grid, apart from what it joins to it."""
  colours: jax.Array     # i32[B, 10]: what each colour becomes
  flips: jax.Array       # bool[B, 3]: whether it is transposed; and whether rows, and columns, of that are turned round
  offset: jax.Array      # i32[B, 2]: rows and columns that it is moved by


def augmentation(size: jax.Array, number: jax.Array, options, side: int) -> Augmentation:
  """What config.augment does to grids of sizes i32[B, 2] and u32[B, 2] numbers on a canvas of side x side."""
  return jax.vmap(lambda s, key: _drawn(s, key, options, side))(size, keys(number, 0))


def augmented(grid: jax.Array, size: jax.Array, number: jax.Array, options) -> tuple[jax.Array, jax.Array]:
  """Grids and sizes with colours permuted, turned or mirrored, and moved or joined, as config.augment says."""
  grid, size = jax.vmap(_augment)(grid, size, augmentation(size, number, options, grid.shape[1]))
  if not options.joined:
    return grid, size
  join = functools.partial(_joined, chance=options.joined)
  return jax.vmap(join)(grid, size, jnp.roll(grid, -1, 0), jnp.roll(size, -1, 0), keys(number, 3))


def _drawn(size, key, options, side):
  names, turn, move, where = jax.random.split(key, 4)
  table = jax.random.permutation(names, COLOURS) if options.colours else jnp.arange(COLOURS)
  flips = jax.random.bernoulli(turn, 0.5, (3,)) if options.symmetries else jnp.zeros(3, bool)
  offset = jnp.zeros(2, jnp.int32)
  if options.translate:
    room = side + 1 - jnp.where(flips[0], size[::-1], size)
    drawn = jnp.minimum((jax.random.uniform(where, (2,)) * room).astype(jnp.int32), room - 1)
    offset = jnp.where(jax.random.bernoulli(move, options.translate), drawn, 0)
  return Augmentation(table, flips, offset)


def _augment(grid, size, done):
  side, (table, bits, offset) = len(grid), done
  grid = jnp.where(grid == OUTSIDE, grid, table.astype(grid.dtype)[jnp.minimum(grid, COLOURS - 1)])
  height, width = jnp.where(bits[0], size[1], size[0]), jnp.where(bits[0], size[0], size[1])
  i, j = (x - offset[axis] for axis, x in enumerate(jnp.meshgrid(jnp.arange(side), jnp.arange(side), indexing='ij')))
  inside = (i >= 0) & (j >= 0) & (i < height) & (j < width)
  # from a cell of the result to the one that it comes from
  row, column = jnp.where(bits[0], j, i), jnp.where(bits[0], i, j)
  row, column = (jnp.where(bits[1 + axis], size[axis] - 1 - x, x) for axis, x in enumerate((row, column)))
  at = tuple(jnp.clip(x, 0, side - 1) for x in (row, column))
  return jnp.where(inside, grid[at], OUTSIDE).astype(grid.dtype), jnp.stack([height, width])


def _joined(grid, size, other, other_size, key, chance):
  """With this chance the first columns of a grid u8[M, M], and beside them those of another; or rows, and below.

  How many is drawn from the canvas, so small grids stay whole mostly. Of both as many rows are kept as the lower one
  has. Returns the grid and its size i32[2].
  """
  side = len(grid)
  which, axis, where = jax.random.split(key, 3)
  below = jax.random.bernoulli(axis)
  turn = lambda g, s: (jnp.where(below, g.T, g), jnp.where(below, s[::-1], s))
  (a, s), (b, t) = turn(grid, size), turn(other, other_size)
  cut = jnp.minimum(s[1], 1 + (jax.random.uniform(where) * (side - 1)).astype(jnp.int32))
  height, width = jnp.minimum(s[0], t[0]), jnp.minimum(cut + t[1], side)
  row, column = jnp.arange(side)[:, None], jnp.arange(side)[None]
  made = jnp.where(column < cut, a, b[:, jnp.clip(column[0] - cut, 0, side - 1)])
  made, extent = turn(jnp.where((row < height) & (column < width), made, OUTSIDE), jnp.stack([height, width]))
  taken = jax.random.bernoulli(which, chance)
  return jnp.where(taken, made, grid), jnp.where(taken, extent, size)


def hidden(tokens: jax.Array, number: jax.Array, most: jax.Array) -> jax.Array:
  """Tokens of which each but PAD is MASK with a chance that is drawn for the grid, from 0 to `most` f32[]."""
  def one(row, key):
    rate, each = jax.random.split(key)
    chance = jax.random.uniform(rate) * most
    return jnp.where((jax.random.uniform(each, row.shape) < chance) & (row != PAD), MASK, row)
  return jax.vmap(one)(tokens, keys(number, 1))
