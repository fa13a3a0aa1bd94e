"""Encoder and decoder of a discrete VAE, without what lies between, the choice of codes: that is in bottleneck.py.

Shapes: B grids, S tokens, N latents, D width, C codes, V words of the vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import FrozenConfigDict

from lab.nn.transformer import Shape
from lab.systems.dvae import canvas, header, lattice
from lab.systems.dvae.pools import Pooled

CODEBOOK = ('gumbel', 'st_gumbel', 'reinmax')     # kinds of quantizers with logits over a codebook that is learnt


def make(config) -> 'DVAE':
  """The network of a configuration."""
  m = config.model
  shape = Shape(width=m.width, heads=m.heads, layers=m.layers, activation='swiglu', rms=True, bias=False, rope=True,
                dropout=m.dropout, eps=1e-6, deviation=m.deviation, dtype=m.dtype, attention=m.attention, remat=m.remat,
                unroll=m.unroll)
  return DVAE(shape, FrozenConfigDict(m), config.quantizer.kind, len(config.quantizer.levels), config.data.side,
              config.data.layout)


class DVAE(nn.Module):
  """Tokens -> what codes are chosen by -> words of codes -> tokens; each method is one of these steps."""
  shape: Shape
  model: Any           # the section config.model
  kind: str            # of the quantizer
  channels: int        # of fsq
  side: int            # of the canvas
  layout: str

  def setup(self):
    m = self.model
    if m.pool == 'lattice':
      self.body = lattice.Lattice(self.shape, m, self.side)
    else:
      self.body = Pooled(self.shape, m, self.side, self.layout)
    self.numbered = m.slots and m.pool != 'lattice'         # which tells its latents apart itself, by where they lie
    if self.numbered:
      # as large as the words of a codebook: otherwise the decoder can't tell one latent from another for a long time
      self.slots = self.param('slots', nn.initializers.normal(1.0), (m.latents, m.width), jnp.float32)
    if self.kind in CODEBOOK:
      self.head = nn.Dense(m.codes, kernel_init=nn.initializers.normal(m.deviation), dtype=jnp.float32)
      self.codebook = self.param('codebook', nn.initializers.normal(1.0), (m.codes, m.width), jnp.float32)
    elif self.kind == 'fsq':
      self.head = nn.Dense(self.channels, kernel_init=nn.initializers.lecun_normal(), dtype=jnp.float32)
      self.expand = nn.Dense(m.width, kernel_init=nn.initializers.lecun_normal(), dtype=jnp.float32)

  def encode(self, ids, places, head=None, train: bool = False):
    """ids i32[B, S], places i32[B or 1, S, 2] -> f32[B, N, .]: logits of codes, channels of fsq, or else latents.

    head: a lattice's header of the grids (see `told`); None for a pool.
    """
    x = self.body.look(ids, places, head, train).astype(jnp.float32)
    return self.head(x) if self.kind in CODEBOOK + ('fsq',) else x

  def words(self, choice):
    """Weights of codes f32[B, N, C], or values of fsq's channels f32[B, N, L], -> words f32[B, N, D]."""
    if self.kind == 'fsq':
      return self.expand(choice)
    return jnp.einsum('bnc,cd->bnd', choice, self.codebook)

  def decode(self, words, head=None, train: bool = False):
    """Words f32[B, N, D] and a lattice's header -> logits f32[B, S, V]."""
    if self.numbered:
      words = words + self.slots[None]
    return self.body.draw(words, head, train)

  def __call__(self, ids, places):
    """All of it, for the parameters' sake."""
    head = told(self.model, ids)
    found = self.encode(ids, places, head)
    return self.decode(self.words(found) if self.kind in CODEBOOK + ('fsq',) else found, head)


def told(section, ids) -> header.Header | None:
  """What the network of a section config.model has to be told of tokens i32[B, S], beside their codes."""
  return header.of(ids, section.distinct) if section.pool == 'lattice' else None


def forms(config) -> tuple[jax.Array, jax.Array]:
  """Tokens and places of no grid, for the parameters' sake: i32[1, S], i32[1, S, 2]."""
  size = canvas.length(config.data.side, config.data.layout)
  return jnp.zeros((1, size), jnp.int32), jnp.zeros((1, size, 2), jnp.int32)
