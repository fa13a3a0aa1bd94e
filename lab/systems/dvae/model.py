"""Encoder and decoder of a discrete VAE: a Transformer over tokens, a pool down to N latents, and both backwards.

What lies between, the choice of codes, is in bottleneck.py. Shapes: B grids, S tokens, N latents, D width, C codes.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import FrozenConfigDict

from lab.nn import attention
from lab.nn.transformer import MLP, Shape, Transformer
from lab.systems.dvae import canvas

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
    m, dtype = self.model, jnp.dtype(self.shape.dtype)
    start = nn.initializers.normal(m.deviation)
    self.tokens = self.param('tokens', start, (canvas.VOCABULARY, m.width), jnp.float32)
    if m.absolute:
      self.places = self.param('places', start, (2, self.side + 1, m.width), jnp.float32)
    self.encoder, self.decoder = Transformer(self.shape), Transformer(self.shape)
    size = canvas.length(self.side, self.layout)
    self.pool, self.unpool = (_pool(m, self.shape, a, b) for a, b in ((size, m.latents), (m.latents, size)))
    if m.slots:
      # as large as the words of a codebook: otherwise the decoder can't tell one latent from another for a long time
      self.slots = self.param('slots', nn.initializers.normal(1.0), (m.latents, m.width), jnp.float32)
    if self.kind in CODEBOOK:
      self.head = nn.Dense(m.codes, kernel_init=start, dtype=jnp.float32)
      self.codebook = self.param('codebook', nn.initializers.normal(1.0), (m.codes, m.width), jnp.float32)
    elif self.kind == 'fsq':
      self.head = nn.Dense(self.channels, kernel_init=nn.initializers.lecun_normal(), dtype=jnp.float32)
      self.expand = nn.Dense(m.width, kernel_init=nn.initializers.lecun_normal(), dtype=jnp.float32)
    self.readout = nn.Dense(canvas.VOCABULARY, use_bias=False, kernel_init=start, dtype=dtype)

  def encode(self, ids, places, train: bool = False):
    """ids i32[B, S], places i32[B, S, 2] -> f32[B, N, .]: logits of codes, channels of fsq, or else latents."""
    x = jnp.take(self.tokens, ids, 0)
    if self.model.absolute:      # rotations tell how tokens lie to each other; the pool has to find them by their place
      x = x + jnp.take(self.places[0], places[..., 0], 0) + jnp.take(self.places[1], places[..., 1], 0)
    x = self.encoder(x, positions=places, train=train)
    x = self.pool(x, train).astype(jnp.float32)
    return self.head(x) if self.kind in CODEBOOK + ('fsq',) else x

  def words(self, choice):
    """Weights of codes f32[B, N, C], or values of fsq's channels f32[B, N, L], -> words f32[B, N, D]."""
    if self.kind == 'fsq':
      return self.expand(choice)
    return jnp.einsum('bnc,cd->bnd', choice, self.codebook)

  def decode(self, words, train: bool = False):
    """Words f32[B, N, D] -> logits f32[B, S, V]."""
    if self.model.slots:
      words = words + self.slots[None]
    x = self.unpool(words, train)
    places = jnp.broadcast_to(canvas.raster(self.side, self.layout)[None], (*x.shape[:2], 2))
    return self.readout(self.decoder(x, positions=places, train=train)).astype(jnp.float32)

  def __call__(self, ids, places):
    """All of it, for the parameters' sake."""
    found = self.encode(ids, places)
    return self.decode(self.words(found) if self.kind in CODEBOOK + ('fsq',) else found)


def _pool(m, shape, before, behind):
  return (Chain if m.pool == 'chain' else Perceiver)(shape, before, behind, m.pool_layers)


class Perceiver(nn.Module):
  """Learnt queries [m, D] that look at a context [B, n, D] through blocks of cross-attention and an MLP: [B, m, D].

  Jaegle et al. 2021, arXiv 2103.03206.
  """
  shape: Shape
  before: int
  behind: int
  layers: int

  @nn.compact
  def __call__(self, context, train: bool = False):
    c = self.shape
    queries = self.param('queries', nn.initializers.normal(c.deviation), (self.behind, c.width), jnp.float32)
    x = jnp.broadcast_to(queries[None], (len(context), *queries.shape))
    context = _norm(c, 'context_norm')(context)
    drop = nn.Dropout(c.dropout, deterministic=not train)
    for i in range(self.layers):
      x = x + drop(Cross(c, name=f'cross{i}')(_norm(c, f'norm{i}a')(x), context)).astype(jnp.float32)
      x = x + drop(MLP(c, name=f'mlp{i}')(_norm(c, f'norm{i}b')(x))).astype(jnp.float32)
    return _norm(c, 'norm')(x)


class Cross(nn.Module):
  """Attention of x [B, m, D] to a context [B, n, D], H heads: [B, m, D]."""
  shape: Shape

  @nn.compact
  def __call__(self, x, context):
    c = self.shape
    heads = lambda y, n: y.reshape(*y.shape[:2], c.heads, n, c.width // c.heads)
    q = heads(_dense(c, c.width, 'query')(x), 1)[:, :, :, 0]
    kv = heads(_dense(c, 2 * c.width, 'key_value')(context), 2)
    y = attention.attend(q, kv[:, :, :, 0], kv[:, :, :, 1], implementation=c.attention)
    return _dense(c, c.width, 'out')(y.reshape(x.shape))


class Chain(nn.Module):
  """n -> m tokens by halving, or doubling, their number: a single head of attention a stage, and nothing else.

  The form before there were blocks; it trains badly, for no stage can leave its input as it is.
  """
  shape: Shape
  before: int
  behind: int
  layers: int

  @nn.compact
  def __call__(self, x, train: bool = False):
    del train
    c, number = self.shape, self.before
    one = c._replace(heads=1)
    for i in range(64):
      number = min(number * 2, self.behind) if self.behind > self.before else max(-(-number // 2), self.behind)
      queries = self.param(f'queries{i}', nn.initializers.normal(c.deviation), (number, c.width), jnp.float32)
      x = Cross(one, name=f'stage{i}')(jnp.broadcast_to(queries[None], (len(x), *queries.shape)), x)
      if number == self.behind:
        return x.astype(jnp.float32)


def _norm(c, name):
  return nn.RMSNorm(epsilon=c.eps, dtype=c.dtype, name=name)


def _dense(c, features, name):
  return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=nn.initializers.normal(c.deviation), name=name)


def forms(config) -> tuple[jax.Array, jax.Array]:
  """Tokens and places of no grid, for the parameters' sake: i32[1, S], i32[1, S, 2]."""
  size = canvas.length(config.data.side, config.data.layout)
  return jnp.zeros((1, size), jnp.int32), jnp.zeros((1, size, 2), jnp.int32)
