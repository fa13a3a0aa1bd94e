"""Encoder and decoder over all tokens of a canvas, with a pool down to N latents and back.

Shapes: B grids, S tokens, N latents, D width, V words of the vocabulary.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from lab.nn import attention
from lab.nn.norms import AddNorm
from lab.nn.products import lookup
from lab.nn.transformer import MLP, Shape, Transformer
from lab.systems.dvae import canvas


class Pooled(nn.Module):
  """A Transformer over the tokens, then the pool; and the pool's mirror, then a Transformer."""
  shape: Shape
  model: Any           # the section config.model
  side: int            # of the canvas
  layout: str

  def setup(self):
    m, size = self.model, canvas.length(self.side, self.layout)
    start = nn.initializers.normal(m.deviation)
    self.tokens = self.param('tokens', start, (canvas.VOCABULARY, m.width), jnp.float32)
    if m.absolute:
      self.places = self.param('places', start, (2, self.side + 1, m.width), jnp.float32)
    self.encoder, self.decoder = Transformer(self.shape), Transformer(self.shape)
    self.pool, self.unpool = (_pool(m, self.shape, a, b) for a, b in ((size, m.latents), (m.latents, size)))
    self.readout = nn.Dense(canvas.VOCABULARY, use_bias=False, kernel_init=start, dtype=self.shape.dtype)

  def look(self, ids, places, head=None, train: bool = False):
    """ids i32[B, S], places i32[B or 1, S, 2] -> f32[B, N, D]; there is no header."""
    del head
    x = lookup(self.tokens, ids)
    if self.model.absolute:      # rotations tell how tokens lie to each other; the pool has to find them by their place
      x = x + lookup(self.places[0], places[..., 0]) + lookup(self.places[1], places[..., 1])
    return self.pool(self.encoder(x, positions=places, train=train), train)

  def draw(self, x, head=None, train: bool = False):
    """f32[B, N, D] -> logits f32[B, S, V]."""
    del head
    x = self.unpool(x, train)
    places = canvas.raster(self.side, self.layout)[None]
    return self.readout(self.decoder(x, positions=places, train=train)).astype(jnp.float32)


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
    x = queries[None]            # of all grids, until what they see is added
    context, y = _norm(c, 'context_norm')(context), _norm(c, 'norm0a')(x)
    added = lambda name, x, y: AddNorm(c.eps, rms=True, use_bias=False, post=False, name=name)(x, y)
    drop = nn.Dropout(c.dropout, deterministic=not train)
    for i in range(self.layers):
      if i:
        x, y = added(f'norm{i}a', x, y)
      y = drop(Cross(c, name=f'cross{i}')(y, context))
      x, y = added(f'norm{i}b', jnp.broadcast_to(x, y.shape), y)
      y, bias = MLP(c, name=f'mlp{i}')(y)
      assert bias is None
      y = drop(y)
    return added('norm', x, y)[1]


class Cross(nn.Module):
  """Attention of x [B or 1, m, D] to a context [B, n, D], H heads: [B, m, D]."""
  shape: Shape

  @nn.compact
  def __call__(self, x, context):
    c = self.shape
    heads = lambda y, n: y.reshape(*y.shape[:2], c.heads, n, c.width // c.heads)
    q = heads(_dense(c, c.width, 'query')(x), 1)[:, :, :, 0]
    # in float32, in which its gradient is summed over the batch then: some GPUs would sum bfloat16
    q = jnp.broadcast_to(q.astype(jnp.float32), (len(context), *q.shape[1:])).astype(q.dtype)
    kv = heads(_dense(c, 2 * c.width, 'key_value')(context), 2)
    if c.attention != 'plain' and attention.takes_across(q, kv):
      y = attention.across(q, kv)
    else:
      y = attention.attend(q, kv[:, :, :, 0], kv[:, :, :, 1], implementation=c.attention)
    return _dense(c, c.width, 'out')(y.reshape(*y.shape[:2], c.width))


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
      x = Cross(one, name=f'stage{i}')(queries[None], x)
      if number == self.behind:
        return x.astype(jnp.float32)


def _norm(c, name):
  return nn.RMSNorm(epsilon=c.eps, dtype=c.dtype, name=name)


def _dense(c, features, name):
  return nn.Dense(features, use_bias=False, dtype=c.dtype, kernel_init=nn.initializers.normal(c.deviation), name=name)
