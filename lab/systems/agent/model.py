"""A tree of vectors: each level makes one vector of a node's units, and takes it apart again.

Level l has nodes of at most L_l units of width d_l, whose vectors have width d_(l+1). Units of level 0 are bytes, those
above are nodes of the level below: the vectors that the pack's own rows have, found by their number. Axes: B packs,
R rows, L units of a row, d width.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from data_pipelines.packs import CONT, END, FIRST
from ml_collections import FrozenConfigDict

from lab.nn.products import contract
from lab.nn.transformer import Shape, Transformer
from lab.systems.agent.memory import Memory

BYTES = 256
NEVER = -1e9         # logit of what can't be
MEANS = 8            # that the attention compressor takes of a row


class Decoded(NamedTuple):
  """What becomes of vectors [B, R, d_(l+1)]."""
  units: jax.Array       # f32[B, R, L, d_l], of unit mean square
  length: jax.Array      # f32[B, R, L]: logits of the terminator's place


def make(config) -> 'Tree':
  """The network of a configuration."""
  return Tree(FrozenConfigDict(config.model), tuple(config.data.lengths), config.data.joined)


class Tree(nn.Module):
  """All levels; each method is one step up or down."""
  model: Any           # the section config.model
  lengths: tuple[int, ...]
  joined: bool = False     # neighbours may share a row: units of all levels between words and the top may be JOIN

  def setup(self):
    m = self.model
    start = nn.initializers.normal(1.0)
    self.bytes = self.param('bytes', start, (FIRST + BYTES, m.widths[0]), jnp.float32)
    self.specials = [self.param(f'specials{l}', start, (FIRST, m.widths[l]), jnp.float32)
                     for l in range(1, len(self.lengths))]
    self.levels = [Level(m, m.widths[l], m.widths[l + 1], n) for l, n in enumerate(self.lengths)]
    if self.joined:
      self.joins = [nn.Dense(1, dtype=jnp.float32) for _ in self.lengths[1:-1]]
    if m.questions:
      self.memory = Memory(m.widths[1], m.questions)
    if m.noise:
      top = m.widths[-1]
      self.generator = [nn.Dense(n, dtype=m.dtype) for n in (4 * top, 4 * top, top)]
      self.critic = [nn.Dense(n, dtype=m.dtype) for n in (4 * top, 4 * top, 1)]

  def table(self, level, below, valid):
    """What the units of a level are: f32[B, V, d_l], and a logit to add, f32[B, V]; of level 0 f32[V, d_0] and f32[V].

    below: f32[B, U, d_l], vectors of the level below; at level 0 None. valid: bool[B, U], which of them there are.
    """
    if not level:
      return self.bytes, jnp.zeros(len(self.bytes), jnp.float32)
    specials = jnp.broadcast_to(self.specials[level - 1][None], (len(below), FIRST, below.shape[-1]))
    there = jnp.concatenate([jnp.ones((len(below), FIRST), bool), valid], 1)
    return jnp.concatenate([specials, below], 1), jnp.where(there, 0.0, NEVER)

  def up(self, level, units, real, train: bool = False):
    """f32[B, R, L, d_l] of which bool[B, R, L] are real -> states [B, R, L, d_l], vectors f32[B, R, d_(l+1)]."""
    return self.levels[level].up(units, real, train)

  def down(self, level, vectors, train: bool = False) -> Decoded:
    """f32[B, R, d_(l+1)] -> what it is taken apart to."""
    return self.levels[level].down(vectors, train)

  def logits(self, level, units, table, extra):
    """f32[B, R, L, d_l] against a table f32[B, V, d_l] -> f32[B, R, L, V]."""
    return self.levels[level].logits(units, table) + extra.reshape(-1, 1, 1, extra.shape[-1])

  def spelt(self, units):
    """Units of words f32[B, R, L, d_0] -> logits f32[B, R, L, 256] of bytes."""
    return self.levels[0].logits(units, self.bytes[FIRST:])

  def ended(self, level, units):
    """f32[B, R, L, d_l] -> logits f32[B, R, L, 2] of the terminator, were it there: END, CONT."""
    specials = self.specials[level - 1] if level else self.bytes
    return self.levels[level].logits(units, specials[END:CONT + 1])

  def parted(self, level, units):
    """f32[B, R, L, d_l] -> logits f32[B, R, L] that units are JOIN; None at levels that have none."""
    if not self.joined or not 0 < level < len(self.lengths) - 1:
      return None
    return self.joins[level - 1](units)[..., 0]

  def guess(self, level, states, table, extra):
    """States of hidden units [B, R, d_l] -> logits f32[B, R, V] of what they were."""
    return self.levels[level].guess(states, table) + extra.reshape(-1, 1, extra.shape[-1])

  def check(self, level, vectors):
    """f32[B, R, d_(l+1)] -> share of replaced units f32[B, R], 0 to 0.8, and the logit that there is one."""
    return self.levels[level].check(vectors)

  def write(self, units, real):
    """What each sentence holds for the others: f32[B, U, L, d_1], bool[B, U, L] -> f32[B, U, Q, d_1]; see memory.py."""
    return self.memory.write(units, real)

  def recall(self, units, memory, there):
    """Decoded units of sentences f32[B, R, L, d_1] with what others of their document hold; the gate f32[B, R, L]."""
    units, gate = self.memory.read(units, memory, there)
    return _normed(units), gate

  def draw(self, noise):
    """N(0, 1) numbers f32[N, model.noise] -> vectors of the top level, f32[N, d]: a generator (arXiv 1406.2661)."""
    for layer in self.generator[:-1]:
      noise = jnp.tanh(layer(noise))
    return _normed(self.generator[-1](noise))

  def criticise(self, vectors):
    """Vectors of the top level f32[N, d] -> logits f32[N] that they are of text."""
    for layer in self.critic[:-1]:
      vectors = jnp.tanh(layer(vectors))
    return self.critic[-1](vectors).astype(jnp.float32)[:, 0]

  def __call__(self):
    """All of it, for the parameters' sake."""
    if self.model.questions:
      self.memory()
    if self.model.noise:
      self.criticise(self.draw(jnp.zeros((1, self.model.noise))))
    below = None
    for level, length in enumerate(self.lengths):
      ones = jnp.ones((1, 1, length), bool)
      table, extra = self.table(level, below, ones[..., 0])
      units = jnp.zeros((1, 1, length, table.shape[-1]))
      states, below = self.up(level, units, ones)
      found = self.down(level, below)
      self.parted(level, found.units)
      out = (self.logits(level, found.units, table, extra), self.guess(level, states[:, :, 0], table, extra),
             self.check(level, below), found.length)
    return out


class Level(nn.Module):
  """One level: encoder and compressor, decompressor and decoder, heads."""
  model: Any
  width: int           # d_l
  above: int           # d_(l+1)
  length: int          # L_l

  def setup(self):
    m = self.model
    shape = Shape(width=self.width, heads=m.heads, layers=m.layers, hidden=m.hidden * self.width,
                  activation='gelu_tanh', rms=True, dropout=m.dropout, eps=1e-6, deviation=self.width**-0.5,
                  dtype=m.dtype, remat=m.remat, unroll=m.layers)      # few, so a loop would cost more
    self.encoder, self.decoder = Transformer(shape), Transformer(shape)
    normal = nn.initializers.normal(1.0)
    self.places = self.param('places', normal, (self.length, self.width), jnp.float32)
    self.slots = self.param('slots', normal, (self.length, self.width), jnp.float32)
    self.compressor = Compressor(m.compressor, self.above, m.dtype)
    if m.decompressor == 'lstm':
      self.spread = Unrolled(self.above, self.length, m.dtype)
      self.narrow = nn.Dense(self.width, dtype=m.dtype)
    else:
      self.spread = nn.Dense(self.length * self.width, dtype=m.dtype)
    self.ends = nn.Dense(self.length, dtype=jnp.float32)
    self.hidden = nn.Dense(self.width, use_bias=False, dtype=jnp.float32)
    self.scale = self.param('scale', nn.initializers.zeros_init(), (2,), jnp.float32)
    self.checker = [nn.Dense(m.checker * self.above, dtype=m.dtype) for _ in range(2)] + [nn.Dense(2)]

  def up(self, units, real, train):
    """See Tree.up."""
    batch, rows, length, width = units.shape
    x = (units + self.places[None, None]).reshape(batch * rows, length, width)
    flat = real.reshape(batch * rows, length)
    states = self._through(self.encoder, x, flat.sum(1, dtype=jnp.int32), train)
    vectors = _normed(self.compressor(states, flat))
    return states.reshape(units.shape), vectors.reshape(batch, rows, self.above)

  def down(self, vectors, train):
    """See Tree.down."""
    batch, rows, width = vectors.shape
    flat = vectors.reshape(batch * rows, width)
    x = self.spread(flat)
    x = self.narrow(x) if self.model.decompressor == 'lstm' else x.reshape(len(flat), self.length, self.width)
    x = self._through(self.decoder, x.astype(jnp.float32) + self.slots[None], None, train)
    return Decoded(_normed(x).reshape(batch, rows, self.length, self.width),
                   self.ends(flat).reshape(batch, rows, self.length))

  def _through(self, layers, x, lengths, train):
    for _ in range(self.model.repeats):
      x = layers(x, lengths=lengths, train=train)
    return x

  def logits(self, units, table):
    """See Tree.logits; units and table have a mean square of about 1, products grow with the root of the width."""
    dtype = jnp.dtype(self.model.dtype)
    rule = 'brld,vd->brlv' if table.ndim == 2 else 'brld,bvd->brlv'
    found = contract(rule, units.astype(dtype), table.astype(dtype))
    return found * (jnp.exp(self.scale[0]) * self.width**-0.5)

  def guess(self, states, table):
    """See Tree.guess."""
    rule = 'brd,vd->brv' if table.ndim == 2 else 'brd,bvd->brv'
    found = jnp.einsum(rule, self.hidden(states.astype(jnp.float32)), table)
    return found * (jnp.exp(self.scale[1]) * self.width**-0.5)

  def check(self, vectors):
    """See Tree.check."""
    x = vectors
    for layer in self.checker[:-1]:
      x = jnp.tanh(layer(x))
    x = self.checker[-1](x.astype(jnp.float32))
    return 0.8 * jax.nn.sigmoid(x[..., 0]), x[..., 1]


class Compressor(nn.Module):
  """States [R, L, d] of which bool[R, L] are real -> f32[R, D].

  attention: means of the states, each by weights of its own; max: the largest of every feature.
  """
  kind: str
  above: int
  dtype: str

  @nn.compact
  def __call__(self, states, real):
    rows, length, width = states.shape
    if self.kind == 'max':
      x = nn.Dense(self.above, dtype=self.dtype)(states)
      x = jnp.where(real[..., None], x, NEVER).max(1)
      return nn.Dense(self.above, dtype=jnp.float32)(nn.gelu(x))
    # a bias would be the same for all places, and softmax does not see that
    scores = nn.Dense(MEANS, use_bias=False, dtype=jnp.float32)(states)                  # [R, L, Q]
    weights = jnp.where(real[..., None], jax.nn.softmax(jnp.where(real[..., None], scores, NEVER), 1), 0)
    pooled = jnp.einsum('rlq,rld->rqd', weights.astype(states.dtype), states).reshape(rows, MEANS * width)
    return nn.Dense(self.above, dtype=jnp.float32)(pooled)


class Unrolled(nn.Module):
  """An LSTM that reads its own output, a vector [R, D] first: [R, L, D]."""
  width: int
  length: int
  dtype: str

  @nn.compact
  def __call__(self, vectors):
    cell = nn.OptimizedLSTMCell(self.width, dtype=self.dtype)
    carry = cell.initialize_carry(jax.random.key(0), vectors.shape)
    out, x = [], vectors
    for _ in range(self.length):
      carry, x = cell(carry, x)
      out.append(x)
    return nn.LayerNorm(dtype=jnp.float32)(jnp.stack(out, 1))


def _normed(x):
  """To a mean square of 1, f32[..., d]; of zeros 0."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
