"""Encoder and decoder in which each latent has its own share of the grid: no pool has to be learnt.

A grid is cut into blocks of neighbouring rows and columns, as equal as can be and no more of them than there are
latents, and each latent has a block, but for those that are left over. What the network sees of a cell is the rank of
its colour, 0 for the one that the grid has most of; and with `model.distinct` it sees each of the grid's rows and
columns once, however often it occurs. What is lost so is in a header (see header.py), told beside the codes.

Shapes: B grids on a canvas of M x M cells, S = M^2 tokens, N latents, P rows or columns at most of a block, D width, V
words of the vocabulary.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lab.nn.products import lookup
from lab.nn.transformer import Shape, Transformer
from lab.systems.dvae import canvas, header
from lab.systems.dvae.header import Header

NEVER = -1e4      # logit of what is no PAD outside of the grid


def longest(latents: int, side: int) -> int:
  """P, rows or columns of the largest block: what a square grid of side x side cells needs."""
  return -(-side // math.isqrt(latents))


@functools.cache
def divisions(latents: int, side: int) -> np.ndarray:
  """i32[M + 1, M + 1, 2]: how many blocks the rows and the columns of a grid are cut into, by its size.

  Of all that make no more blocks than latents and none too long, the one whose cells have the fewest others in their
  block, on average; of equal ones that with the squarer blocks.
  """
  most, found = longest(latents, side), np.ones((side + 1, side + 1, 2), np.int32)
  crowd = np.full((side + 1, side + 1), np.inf)          # sum of squares of the sizes of so many parts of a length
  for size in range(1, side + 1):
    for parts in range(-(-size // most), size + 1):
      low, more = divmod(size, parts)
      crowd[size, parts] = (parts - more) * low ** 2 + more * (low + 1) ** 2
  rows, columns = np.meshgrid(np.arange(side + 1), np.arange(side + 1), indexing='ij')
  for height in range(1, side + 1):
    for width in range(1, side + 1):
      cost = np.where(rows * columns <= latents, crowd[height][:, None] * crowd[width][None], np.inf)
      one, other = height * columns, width * rows          # a block's sides, both times rows x columns
      slant = np.maximum(one, other) / np.maximum(np.minimum(one, other), 1)
      best = np.lexsort((slant.ravel(), cost.ravel()))[0]
      found[height, width] = np.unravel_index(best, cost.shape)
  return found


def bounds(place: jax.Array, extent: jax.Array, parts: jax.Array) -> jax.Array:
  """The first of `extent` cells along an axis that part number `place` of `parts` equal ones has."""
  return -(-place * extent // jnp.maximum(parts, 1))


class Lattice(nn.Module):
  """A Transformer over the blocks of a grid to encode, and one to decode."""
  shape: Shape
  model: Any           # the section config.model
  side: int            # of the canvas

  def setup(self):
    m = self.model
    start = nn.initializers.normal(m.deviation)
    self.most = longest(m.latents, self.side)
    held = self.most ** 2
    self.tokens = self.param('tokens', start, (held, canvas.VOCABULARY, m.width), jnp.float32)
    if m.absolute:
      self.places = self.param('places', start, (2, self.side + 1, m.width), jnp.float32)
    self.extents = self.param('extents', start, (2 + 2 * m.distinct, self.side + 1, m.width), jnp.float32)
    if m.slots:
      # as large as the words of a codebook: otherwise the decoder can't tell one latent from another for a long time
      self.slots = self.param('slots', nn.initializers.normal(0.7), (2, self.side + 1, m.width), jnp.float32)
    self.encoder, self.decoder = Transformer(self.shape), Transformer(self.shape)
    self.readout = nn.Dense(held * canvas.VOCABULARY, use_bias=False, kernel_init=start, dtype=self.shape.dtype)

  def look(self, ids, places, head: Header, train: bool = False):
    """ids i32[B, S] -> [B, N, D]; places are the canvas's own."""
    del places
    batch, size = len(ids), header.folded(head)
    at, ends = self._blocks(size)
    i, j = (at[..., axis, None] + jnp.arange(self.most)[None, None] for axis in (0, 1))                # [B, N, P]
    there = (i < ends[..., :1])[..., None] & (j < ends[..., 1:])[..., None, :]             # [B, N, P, P]
    i, j = (jnp.minimum(x, self.side - 1) for x in (i, j))
    if head.rows is not None:
      i, j = (_each(header.firsts(numbers), x) for numbers, x in ((head.rows, i), (head.columns, j)))
    grid = _renamed(ids, jnp.argsort(head.colours, 1)).reshape(batch, self.side, self.side)
    held = jnp.where(there, _each(grid, i[..., None], j[..., None, :]), canvas.PAD).reshape(*at.shape[:2], -1)
    x = sum(lookup(self.tokens[n], held[..., n]) for n in range(held.shape[-1])) + self._size(head, size)
    if self.model.absolute:
      x = x + self._by_place(self.places, at)
    return self.encoder(x, positions=at, train=train)

  def draw(self, x, head: Header, train: bool = False):
    """f32[B, N, D] -> logits f32[B, S, V]."""
    batch, side, size = len(x), self.side, header.folded(head)
    at, _ = self._blocks(size)
    if self.model.slots:
      x = x + self._by_place(self.slots, at)
    x = self.decoder(x + self._size(head, size), positions=at, train=train)
    logits = self.readout(x).astype(jnp.float32).reshape(batch, -1, self.most, self.most, canvas.VOCABULARY)
    parts = self._parts(size)
    cells = jnp.broadcast_to(jnp.arange(side)[None], (batch, side))
    (i, m), (j, n) = (_owner(cells if told is None else told, size[:, axis, None], parts[:, axis, None], self.most)
                      for axis, told in enumerate((head.rows, head.columns)))
    place = jnp.minimum(i[:, :, None] * parts[:, 1, None, None] + j[:, None], logits.shape[1] - 1)      # [B, M, M]
    logits = _each(logits, place, m[:, :, None], n[:, None])
    logits = jnp.take_along_axis(logits, _names(jnp.argsort(head.colours, 1))[:, None, None], -1)
    row, column = (jnp.arange(side)[None] < head.extents[:, axis, None] for axis in (0, 1))
    outside = jnp.where(jnp.arange(canvas.VOCABULARY) == canvas.PAD, 0.0, NEVER).reshape(1, 1, 1, -1)
    return jnp.where((row[:, :, None] & column[:, None])[..., None], logits, outside).reshape(batch, side * side, -1)

  def _parts(self, size):
    return jnp.asarray(divisions(self.model.latents, self.side))[size[:, 0], size[:, 1]]

  def _blocks(self, size):
    """Sizes i32[B, 2] -> the first row and column of each latent's block, and what ends it: i32[B, N, 2] both.

    Latents that are left over have blocks below the grid, with nothing in them.
    """
    parts = self._parts(size)
    place = jnp.stack(jnp.divmod(jnp.arange(self.model.latents)[None], parts[:, 1:]), -1)
    size, parts = size[:, None], parts[:, None]
    return tuple(jnp.minimum(bounds(n, size, parts), size).astype(jnp.int32) for n in (place, place + 1))

  def _by_place(self, tables, at):
    return sum(lookup(tables[axis], at[..., axis]) for axis in (0, 1))

  def _size(self, head, size):
    sizes = jnp.concatenate([head.extents, size], 1) if self.model.distinct else head.extents
    return sum(lookup(table, sizes[:, axis]) for axis, table in enumerate(self.extents))[:, None]


def _owner(cell, extent, parts, most):
  """Cells along an axis i32[B, M] -> the part that has each, and its number there; outside, anything within range."""
  part = jnp.clip(cell * parts // jnp.maximum(extent, 1), 0, parts - 1)
  return part, jnp.clip(cell - bounds(part, extent, parts), 0, most - 1)


def _each(x, *places):
  """x[b, *places[b]] of every example b: by vmap, so that the compiler knows that devices need no others' examples."""
  return jax.vmap(lambda x, *places: x[places])(x, *places)


def _names(colours):
  """What each word of the vocabulary is called, where the ten colours have these names: i32[B, 10] -> i32[B, V]."""
  others = jnp.arange(canvas.COLOURS, canvas.VOCABULARY, dtype=jnp.int32)[None]
  return jnp.concatenate([colours.astype(jnp.int32), jnp.broadcast_to(others, (len(colours), others.shape[1]))], 1)


def _renamed(ids, colours):
  return jnp.take_along_axis(_names(colours), ids, 1)
