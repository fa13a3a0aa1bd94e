"""What a lattice tells of a grid beside its codes: its size, its colours, and which of its rows and columns are alike.

Shapes: B grids on a canvas of M x M cells, S = M^2 tokens.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lab.systems.dvae import canvas


class Header(NamedTuple):
  """What the codes of grids don't tell. rows and columns are None where each is told by itself."""
  extents: jax.Array             # i32[B, 2], rows and columns
  colours: jax.Array             # i32[B, 10], the colour of each rank: all ten, in the end those that the grid has not
  rows: jax.Array | None         # i32[B, M], which of its different rows each row is, numbered as they first occur
  columns: jax.Array | None      # i32[B, M], the same of columns; of those outside of the grid, anything within range


def of(ids: jax.Array, distinct: bool) -> Header:
  """Of tokens i32[B, S], projected. Of colours that a grid has equally often the lower one comes first."""
  counts = jax.nn.one_hot(ids, canvas.COLOURS, dtype=jnp.int32).sum(1)
  extents = canvas.extents(ids)
  colours = jnp.argsort(-counts, axis=1, stable=True).astype(jnp.int32)
  if not distinct:
    return Header(extents, colours, None, None)
  side = math.isqrt(ids.shape[1])
  grid = ids.reshape(-1, side, side)
  return Header(extents, colours, _numbers(grid), _numbers(grid.swapaxes(1, 2)))


def _numbers(rows):
  """i32[B, M, M] -> i32[B, M], which of the different rows each is; those outside of the grid are one."""
  first = (rows[:, :, None] == rows[:, None]).all(-1).argmax(-1)
  new = jnp.cumsum(first == jnp.arange(rows.shape[1])[None], 1) - 1
  return jnp.take_along_axis(new, first, 1).astype(jnp.int32)


def folded(head: Header) -> jax.Array:
  """i32[B, 2]: how many different rows and columns there are; without `rows` and `columns` all of them."""
  if head.rows is None:
    return head.extents
  inside = jnp.arange(head.rows.shape[1])[None]
  return jnp.stack([jnp.where(inside < head.extents[:, axis, None], each + 1, 0).max(1)
                    for axis, each in enumerate((head.rows, head.columns))], -1)


def firsts(numbers: jax.Array) -> jax.Array:
  """rows or columns of a header -> i32[B, M], where each of the different ones first occurs; 0 where there is none."""
  return (numbers[:, None] == jnp.arange(numbers.shape[1])[None, :, None]).argmax(-1).astype(jnp.int32)


def bits(side: int, distinct: bool) -> float:
  """Its length on a canvas of side x side cells: log2 10!, and for rows as for columns log2 M, or, where it says which
  are alike, the logarithm of the number of ways to part 1 to M rows: the sum of Bell's numbers."""
  ways = sum(_bell(side)) if distinct else side
  return 2 * math.log2(ways) + math.log2(math.factorial(canvas.COLOURS))


def _bell(most):
  """How many ways there are to part 1, 2, ... `most` things, by Bell's triangle."""
  row, found = [1], []
  for _ in range(most):
    found.append(row[-1])
    row = [row[-1]] + row
    for i in range(1, len(row)):
      row[i] += row[i - 1]
  return found


def between(start: Header, end: Header, share: jax.Array) -> Header:
  """A header on the way, share 0 to 1: all changes in the middle, but sizes evenly where each row is told by itself."""
  nearer = jax.tree.map(lambda a, b: jnp.where(share < 0.5, a, b), start, end)
  if start.rows is not None:
    return nearer
  size = start.extents * (1 - share) + end.extents * share
  return nearer._replace(extents=jnp.round(size).astype(jnp.int32))
