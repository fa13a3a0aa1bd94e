"""BERT and GPT on one body: embeddings, blocks, and a head for masked words, next words or labels.

Vaswani et al. 2017, arXiv 1706.03762; Devlin et al. 2018, arXiv 1810.04805; Radford et al. 2019 (GPT-2).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from ml_collections import FrozenConfigDict

from lab.nn import attention, losses
from lab.nn.products import lookup
from lab.nn.transformer import Shape, Transformer

MULTIPLE = 128       # the vocabulary is filled up to one, for the sake of the matrix units


def make(config, vocabulary: int, labels: int) -> 'Language':
  """The network of a configuration, for so many ids and labels."""
  m = config.model
  shape = Shape(
      width=m.width, heads=m.heads, layers=m.layers, hidden=m.hidden, activation=m.activation, norm=m.norm, bias=m.bias,
      qk_norm=m.qk_norm, rope=m.positions == 'rope', dropout=m.dropout, attention_dropout=m.attention_dropout,
      eps=m.norm_eps, deviation=m.deviation, dtype=m.dtype, attention=m.attention, remat=m.remat,
      remat_keep=m.remat_keep, unroll=m.unroll, cublas=True)
  whole = config.objective == 'classify' or config.data.documents == 'together'
  return Language(shape, FrozenConfigDict(m), vocabulary, labels, config.data.length, whole)


def sinusoids(length: int, width: int) -> jax.Array:
  """f32[length, width]: sines, then cosines, of position / 10000^(2 i / width) (Vaswani et al., section 3.5)."""
  angle = jnp.arange(length)[:, None] / 10000.0**(2 * jnp.arange(width // 2) / width)[None]
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], 1)


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
  """Rows of x [B, S, D] at places i32[B, n], as a product with ones and zeros: its gradient is one too, no scatter."""
  chosen = jax.nn.one_hot(places, x.shape[1], dtype=x.dtype)
  return jnp.einsum('bns,bsd->bnd', chosen, x, precision='highest')


class Language(nn.Module):
  """The body with all heads that its configuration has; each method is one way to use it."""
  shape: Shape
  model: Any           # the section config.model
  vocabulary: int      # ids that there are
  labels: int          # 0: no classifier
  length: int          # tokens of the longest window
  whole: bool          # a row is one document, with padding behind: attention needs its length alone

  def setup(self):
    m, dtype = self.model, jnp.dtype(self.shape.dtype)
    start = nn.initializers.normal(m.deviation)
    self.rows = -(-self.vocabulary // MULTIPLE) * MULTIPLE
    self.tokens = self.param('tokens', start, (self.rows, m.width), jnp.float32)
    if m.positions == 'learned':
      self.places = self.param('positions', start, (self.length, m.width), jnp.float32)
    if m.types:
      self.types = self.param('types', start, (m.types, m.width), jnp.float32)
    if m.embed_norm:
      self.embed_norm = self._norm()
    self.drop = nn.Dropout(m.dropout)
    self.body = Transformer(self.shape)
    if self.labels:
      if m.pooler:
        self.pooler = nn.Dense(m.width, kernel_init=start, dtype=dtype)
      self.classifier = nn.Dense(self.labels, kernel_init=start, dtype=jnp.float32)
      return
    if m.transform and not m.causal:
      self.transform = nn.Dense(m.width, kernel_init=start, dtype=dtype)
      self.transform_norm = self._norm()
    if not m.tied:
      self.head = self.param('head', start, (self.rows, m.width), jnp.float32)
    if not m.causal:
      self.head_bias = self.param('head_bias', nn.initializers.zeros_init(), (self.rows,), jnp.float32)

  def _norm(self):
    return nn.LayerNorm(self.shape.eps, use_bias=self.shape.bias, dtype=jnp.float32)

  def states(self, ids, segments, train: bool = False, cache=None, index=None):
    """ids, segments i32[B, S] (0: padding) -> [B, S, width]; and the cache, where one is given.

    With a cache, `index` i32[B] is the place of the first id of each row.
    """
    m = self.model
    at = jnp.arange(ids.shape[1])[None] if self.whole else attention.positions(segments)
    if cache is not None:
      at = jnp.arange(ids.shape[1])[None] + index[:, None]
    x = lookup(self.tokens, ids)
    if m.positions == 'learned':
      x = x + jnp.take(self.places, at, 0, mode='clip')
    elif m.positions == 'sinusoid':
      # their size is 1: Vaswani et al., section 3.4, enlarge the words, which would drown
      x = x * m.width**0.5 + jnp.take(sinusoids(self.length, m.width), at, 0, mode='clip')
    if m.types:
      x = x + self.types[0][None, None]
    if m.embed_norm:
      x = self.embed_norm(x)
    x = self.drop(x, deterministic=not train)
    if not self.whole or cache is not None:
      return self.body(x, segments, causal=m.causal, positions=at, train=train, cache=cache, index=index)
    # padding comes last: no token of a causal model sees it
    lengths = None if m.causal else (segments > 0).sum(1, dtype=jnp.int32)
    return self.body(x, lengths=lengths, causal=m.causal, positions=at, train=train)

  def logits(self, states):
    """[..., width] -> f32[..., rows]: of every id; those that fill the vocabulary up can't be drawn."""
    m, dtype = self.model, jnp.dtype(self.shape.dtype)
    matrix = self.tokens if m.tied else self.head
    found = jnp.einsum('...d,vd->...v', self._features(states).astype(dtype), matrix.astype(dtype),
                       preferred_element_type=jnp.float32)
    lead = (None,) * (found.ndim - 1)
    if not m.causal:
      found = found + self.head_bias[lead]
    return jnp.where((jnp.arange(self.rows) < self.vocabulary)[lead], found, -1e9)

  def _features(self, states):
    """What the head's matrix takes, of states [..., width]."""
    m = self.model
    if m.transform and not m.causal:
      return self.transform_norm(nn.gelu(self.transform(states), approximate=False))
    return states

  def nats(self, ids, segments, labels, places=None, train: bool = False):
    """Cross-entropy of labels i32[B, n], at the places i32[B, n] or at all n = S, and whether each is the likeliest.

    f32[B, n] nats, bool[B, n], as lab.nn.losses.projected gives them: from logits that are never float32.
    """
    x = self.states(ids, segments, train)
    x = self._features(x if places is None else _at(x, places)).astype(self.shape.dtype)
    matrix, bias = self.tokens if self.model.tied else self.head, None if self.model.causal else self.head_bias
    return losses.projected(x, matrix, bias, labels, self.vocabulary)

  def masked(self, ids, segments, places, train: bool = False):
    """Logits f32[B, n, rows] at the places i32[B, n]."""
    return self.both(ids, segments, places, train)[1]

  def both(self, ids, segments, places, train: bool = False):
    """The last states [B, S, width], and logits f32[B, n, rows] at the places i32[B, n]."""
    x = self.states(ids, segments, train)
    return x, self.logits(_at(x, places))

  def following(self, ids, segments, train: bool = False):
    """Logits f32[B, S, rows] of the id that follows each."""
    return self.logits(self.states(ids, segments, train))

  def classify(self, ids, segments, train: bool = False):
    """Logits f32[B, labels] of each row, pooled over its tokens that are no padding."""
    m, x = self.model, self.states(ids, segments, train)
    real = (segments > 0).astype(jnp.float32)
    if m.pool == 'mean':
      x = (x * real[..., None]).sum(1) / jnp.maximum(real.sum(1), 1)[:, None]
    elif m.pool == 'last':
      last = jnp.maximum(real.sum(1).astype(jnp.int32) - 1, 0)
      x = jnp.take_along_axis(x, last[:, None, None], 1)[:, 0]
    else:
      x = x[:, 0]
    if m.pooler:
      x = jnp.tanh(self.pooler(x))
    return self.classifier(self.drop(x.astype(jnp.float32), deterministic=not train))

  def step(self, ids, segments, cache, index, last):
    """Logits f32[B, rows] after id number `last` i32[B] of each row, and the cache with these ids in it."""
    x, cache = self.states(ids, segments, cache=cache, index=index)
    return self.logits(jnp.take_along_axis(x, last[:, None, None], 1)[:, 0]), cache

  def __call__(self, ids, segments, places=None):
    """What the objective needs, for the parameters' sake."""
    if self.labels:
      return self.classify(ids, segments)
    return self.following(ids, segments) if self.model.causal else self.masked(ids, segments, places)
