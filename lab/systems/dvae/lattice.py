"""Encoder and decoder in which each latent has its own share of the grid: no pool has to be learnt.

N latents stand on a lattice of a x b places, as square as N allows. Along an axis a grid of no more cells than places
puts one cell on a place; a larger one is shared out evenly. Which cells a place has hangs on the grid's height and
width, so the decoder first reads these from the codes, and from what it reads comes the chance that a cell lies
outside. Training tells it the true ones for where cells lie, but not for that chance: reading them is learnt.

Shapes: B grids on a canvas of M x M cells, S = M^2 tokens, P cells at most on a place, D width, V words of the
vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lab.nn.transformer import Shape, Transformer
from lab.systems.dvae import canvas

CERTAIN = -1e-6      # ln of the largest chance that a cell is inside: that of outside must have a logarithm


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
    m, (rows, columns) = self.model, sides(self.model.latents)
    start = nn.initializers.normal(m.deviation)
    self.axes = (rows, columns)
    self.cells = -(-self.side // rows), -(-self.side // columns)
    held = self.cells[0] * self.cells[1]
    self.tokens = self.param('tokens', start, (held, canvas.VOCABULARY, m.width), jnp.float32)
    if m.absolute:
      self.places = self.param('places', start, (2, max(self.axes), m.width), jnp.float32)
    self.extents = self.param('extents', start, (2, self.side + 1, m.width), jnp.float32)
    self.encoder, self.decoder = Transformer(self.shape), Transformer(self.shape)
    self.reader = Transformer(self.shape._replace(layers=1))
    self.extent = nn.Dense(2 * (self.side + 1), kernel_init=start, dtype=jnp.float32)
    self.readout = nn.Dense(held * canvas.VOCABULARY, use_bias=False, kernel_init=start, dtype=self.shape.dtype)

  def look(self, ids, places, train: bool = False):
    """ids i32[B, S] -> [B, N, D]; places are the canvas's own."""
    del places
    batch, (rows, columns) = len(ids), self.axes
    extents = canvas.extents(ids)
    i, j = (shares(extents[:, axis], self.axes[axis], self.side) for axis in (0, 1))
    i, j = i[:, :, None, :, None], j[:, None, :, None]                                     # [B, rows, columns, P, P]
    grid = ids.reshape(batch, self.side, self.side)
    held = jnp.where((i >= 0) & (j >= 0), grid[jnp.arange(batch).reshape(-1, 1, 1, 1, 1), i, j], canvas.PAD)
    held = held.reshape(batch, rows * columns, -1)
    x = sum(jnp.take(self.tokens[n], held[..., n], 0) for n in range(held.shape[-1])) + self._told(extents)
    if self.model.absolute:
      x = x + (self.places[0, :rows, None] + self.places[1, None, :columns]).reshape(1, rows * columns, -1)
    return self.encoder(x, positions=self._where(batch), train=train)

  def draw(self, x, extents=None, train: bool = False):
    """f32[B, N, D] -> logits f32[B, S, V], normalised; extents i32[B, 2], None: as read."""
    batch, side, (rows, columns) = len(x), self.side, self.axes
    read = self.reader(x, positions=self._where(batch), train=train).astype(jnp.float32).mean(1)
    read = self.extent(read).reshape(batch, 2, side + 1)
    extents = read.argmax(-1) if extents is None else extents
    x = self.decoder(x + self._told(extents), positions=self._where(batch), train=train)
    logits = self.readout(x).astype(jnp.float32).reshape(batch, rows, columns, *self.cells, -1)
    (i, m), (j, n) = (owners(extents[:, axis], self.axes[axis], side) for axis in (0, 1))
    i, m, j, n = i[:, :, None], m[:, :, None], j[:, None], n[:, None]                      # [B, M, M]
    logits = logits[jnp.arange(batch).reshape(-1, 1, 1), i, j, m, n].reshape(batch, side * side, -1)
    inside = _inside(read).reshape(batch, -1, 1)
    logits = jax.nn.log_softmax(logits) + inside
    outside = jnp.where(jnp.arange(canvas.VOCABULARY) == canvas.PAD, jnp.log(-jnp.expm1(inside)), -jnp.inf)
    return jnp.logaddexp(logits, outside)

  def _told(self, extents):
    return (jnp.take(self.extents[0], extents[:, 0], 0) + jnp.take(self.extents[1], extents[:, 1], 0))[:, None]

  def _where(self, batch):
    at = jnp.stack(jnp.divmod(jnp.arange(self.axes[0] * self.axes[1]), self.axes[1]), -1).astype(jnp.int32)
    return jnp.broadcast_to(at[None], (batch, *at.shape))


def _inside(read):
  """Logits of height and width f32[B, 2, M + 1] -> ln of the chance that a cell is inside, f32[B, M, M]."""
  beyond = jax.lax.cumlogsumexp(jax.nn.log_softmax(read), 2, reverse=True)[..., 1:]        # ln P(more than r cells)
  return jnp.minimum(beyond[:, 0, :, None] + beyond[:, 1, None], CERTAIN)
