"""What the sentences of a document remember for each other: a memory a document, made anew for every batch.

A sentence writes its units under questions that all documents share; a sentence that is decoded reads what the other
ones wrote, never what it wrote itself: that would be a way around its vector. Nothing here hangs on where a unit stands
in its sentence. All is float32. Axes: B packs, U rows of sentences, R rows that are decoded, L units of a row, d width
of the units, Q questions.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lab.nn.transformer import Shape, Transformer

NEVER = -1e9         # logit of what can't be
CLOSED = -3.46       # the read gate's bias at the start: it lets 3 % through
SMALL = 1e-8         # added to a variance: the root's slope ends at 1 / (2e-4)


class Memory(nn.Module):
  """Questions, what writes under them, and what reads by them; see `others` for what lies between."""
  width: int           # d
  questions: int       # Q

  def setup(self):
    self.asked = self.param('asked', nn.initializers.normal(1.0), (self.questions, self.width), jnp.float32)
    self.keys = nn.Dense(self.width, use_bias=False, dtype=jnp.float32)
    self.wanted = nn.Dense(self.width, use_bias=False, dtype=jnp.float32)
    self.writer = Transformer(Shape(
        width=self.width, heads=1, layers=2, activation='gelu_tanh', rms=True, eps=1e-6, deviation=self.width**-0.5))
    self.written = nn.Dense(1, dtype=jnp.float32)
    # 0 at the start, so that the gate is the same everywhere
    self.from_decoded, self.from_memory = (
        nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros_init(), dtype=jnp.float32) for _ in range(2))
    self.bias = self.param('bias', nn.initializers.constant(CLOSED), (), jnp.float32)

  def write(self, units, real):
    """What each row holds: A = softmax(Q (x W_k)^T / sqrt(d)) (x g), over its real units alone.

    g, 0 to 1 a unit, is what a small Transformer makes of the row's units.

    Args:
      units: f32[B, U, L, d], x. real: bool[B, U, L]; what isn't real may be anything finite.

    Returns:
      f32[B, U, Q, d], of rows without real units 0.
    """
    batch, rows, length, width = units.shape
    x = units.astype(jnp.float32)
    states = self.writer(x.reshape(batch * rows, length, width), real.reshape(batch * rows, length).astype(jnp.int32))
    gate = jax.nn.sigmoid(self.written(states)).reshape(batch, rows, length, 1)
    scores = jnp.einsum('buld,qd->buql', self.keys(x), self.asked) * self.width**-0.5
    seen = real[:, :, None]
    weights = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, NEVER)), 0)
    return jnp.einsum('buql,buld->buqd', weights, x * gate)

  def read(self, decoded, memory, there):
    """Decoded units with what the memory has for them: y <- (1 - g) y + g R, R = softmax((y W_o) Q^T / sqrt(Q)) memory.

    The gate is g = sigmoid(f(y) + h(R) + b), f and h linear.

    Args:
      decoded: f32[B, R, L, d], y. memory: f32[B, R, Q, d], of each row. there: bool[B, R], whether the row has one.

    Returns:
      f32[B, R, L, d], whose mean square is any; and the gate, f32[B, R, L]. Without a memory y as it was, and 0.
    """
    y = decoded.astype(jnp.float32)
    scores = jnp.einsum('brld,qd->brlq', self.wanted(y), self.asked) * self.questions**-0.5
    found = jnp.einsum('brlq,brqd->brld', jax.nn.softmax(scores), memory.astype(jnp.float32))
    gate = jax.nn.sigmoid(self.from_decoded(y) + self.from_memory(found) + self.bias.reshape(1, 1, 1, 1))
    gate = jnp.where(there[..., None, None], gate, 0)
    return jnp.where(there[..., None, None], (1 - gate) * y + gate * found, y), gate[..., 0]

  def __call__(self):
    """All of it, for the parameters' sake."""
    units, ones = jnp.zeros((1, 1, 1, self.width)), jnp.ones((1, 1, 1), bool)
    return self.read(units, self.write(units, ones), ones[..., 0])


def others(written, documents, counts):
  """For each row the mean over the occurrences of the other rows of its document in its pack.

  With n occurrences of all rows of the document, (sum_j c_j A_j - c_i A_i) / (n - c_i); but row i is left out of the
  sum instead of being taken away from it, so that nothing of it is left in the last digits, nor in gradients.

  Args:
    written: f32[B, U, Q, d], A. documents: i32[B, U], equal where rows are of one document. counts: f32[B, U], c, of
      padding 0.

  Returns:
    f32[B, U, Q, d] and bool[B, U], whether there are others; of padding, and where a document has no other row, zeros
    and False.
  """
  counts = counts.astype(jnp.float32)
  same = documents[:, :, None] == documents[:, None]
  weights = jnp.where(same & ~jnp.eye(documents.shape[1], dtype=bool)[None], counts[:, None], 0)      # [B, U, U]
  total = weights.sum(-1)
  there = (total > 0) & (counts > 0)
  # a product instead of a scatter, whose sums have another order every time on a GPU; rounded factors are no mean
  memory = jnp.einsum('bij,bjqd->biqd', weights, written.astype(jnp.float32), precision='highest')
  return jnp.where(there[..., None, None], memory / jnp.maximum(total, 1)[..., None, None], 0), there


def cost(gate, real):
  """E[g] (1 - std g) over the real units of a row: small for gates that are seldom open, and then wide.

  The deviation is sqrt(variance + e) - sqrt(e), e = 1e-8: 0 where all gates are equal, and with a slope of 0 there, for
  that of the square root alone is infinite, and its gradient NaN. It is less than the root by 1e-4 at most.

  Args:
    gate: f32[B, R, L]. real: bool[B, R, L].

  Returns:
    f32[B, R], 0 to 1; of rows without real units 0.
  """
  number = jnp.maximum(real.sum(-1), 1)
  mean = jnp.where(real, gate, 0).sum(-1) / number
  variance = jnp.where(real, jnp.square(gate - mean[..., None]), 0).sum(-1) / number
  return mean * (1 - (jnp.sqrt(variance + SMALL) - SMALL**0.5))


def shuffled(memory, there, key, documents=None):
  """Memories of other rows, for the diagnostic: what a memory is good for has to be gone with that of another document.

  In each pack the rows that have a memory are put in order by document and trade memories around this circle, at a
  distance that is drawn. Where no document has more than half of them, every row gets another document's; where one
  has, as many as possible do.

  Args:
    memory: f32[B, U, Q, d]. there: bool[B, U]; what isn't there stays as it is. documents: i32[B, U]; without it, a row
      gets any other row's, also its own document's. key: one for all packs, or [B], so that what a pack trades doesn't
      hang on the others.

  Returns:
    f32[B, U, Q, d].
  """
  if documents is None:
    documents = jnp.broadcast_to(jnp.arange(there.shape[1])[None], there.shape)
  keys = key if key.ndim else jax.random.split(key, len(there))
  source = jax.vmap(_traded)(there, documents, keys)
  return jnp.take_along_axis(memory, source[..., None, None], 1)


def _traded(there, documents, key):
  """bool[U], i32[U] -> i32[U]: whose memory each row gets."""
  rows = jnp.arange(len(there))
  same = (documents[:, None] == documents[None]) & there[None]
  number, most = there.sum(), jnp.where(there, same.sum(-1), 0).max()
  order = jnp.argsort(jnp.where(there, documents, jnp.iinfo(jnp.int32).max))
  # a document of `most` rows in a row has moved off itself at these distances; at half the circle if any does
  distance = jax.random.randint(key, (), jnp.minimum(most, number // 2), jnp.maximum(number - most, number // 2) + 1)
  source = order[jnp.where(rows < number, (rows + distance) % jnp.maximum(number, 1), rows)]
  return source[jnp.argsort(order)]
