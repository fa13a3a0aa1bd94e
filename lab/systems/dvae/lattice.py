"""Encoder and decoder in which each latent has its own share of the grid: no pool has to be learnt.

N latents stand on a lattice of a x b places, as square as N allows. Along an axis a grid of no more cells than places
puts one cell on a place; a larger one is shared out evenly. What the network sees of a cell is the rank of its colour,
0 for the one that the grid has most of. So a grid's code is its N codes and a header: height, width, and which colour
has which rank, 2 log2 M + log2 10! bits. A permutation of the colours changes nothing but the header.

Shapes: B grids on a canvas of M x M cells, S = M^2 tokens, P cells at most on a place, D width, V words of the
vocabulary.
"""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from lab.nn.products import lookup
from lab.nn.transformer import Shape, Transformer
from lab.systems.dvae import canvas

NEVER = -1e4      # logit of what is no PAD outside of the grid


class Header(NamedTuple):
  """What the codes of grids don't tell."""
  extents: jax.Array     # i32[B, 2], rows and columns
  colours: jax.Array     # i32[B, 10], the colour of each rank: all ten, in the end those that the grid has not


def header(ids: jax.Array) -> Header:
  """Of tokens i32[B, S], projected. Of colours that a grid has equally often the lower one comes first."""
  counts = jax.nn.one_hot(ids, canvas.COLOURS, dtype=jnp.int32).sum(1)
  return Header(canvas.extents(ids), jnp.argsort(-counts, axis=1, stable=True).astype(jnp.int32))


def header_bits(side: int) -> float:
  """Its length on a canvas of side x side cells."""
  return 2 * math.log2(side) + math.log2(math.factorial(canvas.COLOURS))


def between(start: Header, end: Header, share: jax.Array) -> Header:
  """A header on the way, share 0 to 1: sizes change evenly, colours in the middle."""
  size = start.extents * (1 - share) + end.extents * share
  return Header(jnp.round(size).astype(jnp.int32), jnp.where(share < 0.5, start.colours, end.colours))


def sides(latents: int) -> tuple[int, int]:
  """Rows and columns of the lattice of so many places."""
  columns = max(n for n in range(1, latents + 1) if latents % n == 0 and n * n <= latents)
  return latents // columns, columns


def shares(extent: jax.Array, places: int, side: int) -> jax.Array:
  """Sizes of an axis i32[B] -> which of its cells each place has, i32[B, places, most], -1 where it has fewer."""
  i, extent = jnp.arange(places + 1)[None], extent[:, None]
  ends = jnp.where(extent > places, -(-i * extent // places), jnp.minimum(i, extent))
  cell = ends[:, :-1, None] + jnp.arange(-(-side // places))[None, None]
  return jnp.where(cell < ends[:, 1:, None], cell, -1)


def owners(extent: jax.Array, places: int, side: int) -> tuple[jax.Array, jax.Array]:
  """Sizes of an axis i32[B] -> of each cell the place that has it and its number there, both i32[B, side].

  Cells outside get some place and number within range.
  """
  cell, extent = jnp.arange(side)[None], extent[:, None]
  shared = extent > places
  place = jnp.minimum(jnp.where(shared, cell * places // jnp.maximum(extent, 1), cell), places - 1)
  first = jnp.where(shared, -(-place * extent // places), place)
  return place, jnp.clip(cell - first, 0, -(-side // places) - 1)


class Lattice(nn.Module):
  """A Transformer over the places of the lattice to encode, and one to decode."""
  shape: Shape
  model: Any           # the section config.model
  side: int            # of the canvas

  def setup(self):
    m = self.model
    start = nn.initializers.normal(m.deviation)
    self.axes = sides(m.latents)
    self.cells = tuple(-(-self.side // n) for n in self.axes)
    held = self.cells[0] * self.cells[1]
    self.tokens = self.param('tokens', start, (held, canvas.VOCABULARY, m.width), jnp.float32)
    if m.absolute:
      self.places = self.param('places', start, (2, max(self.axes), m.width), jnp.float32)
    self.extents = self.param('extents', start, (2, self.side + 1, m.width), jnp.float32)
    self.encoder, self.decoder = Transformer(self.shape), Transformer(self.shape)
    self.readout = nn.Dense(held * canvas.VOCABULARY, use_bias=False, kernel_init=start, dtype=self.shape.dtype)

  def look(self, ids, places, head: Header, train: bool = False):
    """ids i32[B, S] -> [B, N, D]; places are the canvas's own."""
    del places
    batch, (rows, columns) = len(ids), self.axes
    i, j = (shares(head.extents[:, axis], self.axes[axis], self.side) for axis in (0, 1))
    i, j = i[:, :, None, :, None], j[:, None, :, None]                                     # [B, rows, columns, P, P]
    grid = _renamed(ids, jnp.argsort(head.colours, 1)).reshape(batch, self.side, self.side)
    held = jnp.where((i >= 0) & (j >= 0), _each(grid, i, j), canvas.PAD)
    held = held.reshape(batch, rows * columns, -1)
    x = sum(lookup(self.tokens[n], held[..., n]) for n in range(held.shape[-1])) + self._size(head)
    if self.model.absolute:
      x = x + (self.places[0, :rows, None] + self.places[1, None, :columns]).reshape(1, rows * columns, -1)
    return self.encoder(x, positions=self._where(), train=train)

  def draw(self, x, head: Header, train: bool = False):
    """f32[B, N, D] -> logits f32[B, S, V]."""
    batch, side, (rows, columns) = len(x), self.side, self.axes
    x = self.decoder(x + self._size(head), positions=self._where(), train=train)
    logits = self.readout(x).astype(jnp.float32).reshape(batch, rows, columns, *self.cells, -1)
    (i, m), (j, n) = (owners(head.extents[:, axis], self.axes[axis], side) for axis in (0, 1))
    i, m, j, n = i[:, :, None], m[:, :, None], j[:, None], n[:, None]                      # [B, M, M]
    logits = _each(logits, i, j, m, n)
    logits = jnp.take_along_axis(logits, _names(jnp.argsort(head.colours, 1))[:, None, None], -1)
    row, column = (jnp.arange(side)[None] < head.extents[:, axis, None] for axis in (0, 1))
    outside = jnp.where(jnp.arange(canvas.VOCABULARY) == canvas.PAD, 0.0, NEVER).reshape(1, 1, 1, -1)
    return jnp.where((row[:, :, None] & column[:, None])[..., None], logits, outside).reshape(batch, side * side, -1)

  def _size(self, head):
    return sum(lookup(self.extents[axis], head.extents[:, axis]) for axis in (0, 1))[:, None]

  def _where(self):
    at = jnp.stack(jnp.divmod(jnp.arange(self.axes[0] * self.axes[1]), self.axes[1]), -1)
    return at.astype(jnp.int32)[None]


def _each(x, *places):
  """x[b, *places[b]] of every example b: by vmap, so that the compiler knows that devices need no others' examples."""
  return jax.vmap(lambda x, *places: x[places])(x, *places)


def _names(colours):
  """What each word of the vocabulary is called, where the ten colours have these names: i32[B, 10] -> i32[B, V]."""
  others = jnp.arange(canvas.COLOURS, canvas.VOCABULARY, dtype=jnp.int32)[None]
  return jnp.concatenate([colours.astype(jnp.int32), jnp.broadcast_to(others, (len(colours), others.shape[1]))], 1)


def _renamed(ids, colours):
  return jnp.take_along_axis(_names(colours), ids, 1)
