"""Attention over packed sequences, and rotary positions.

Several documents share a row: `segments` i32[B, S] names each token's document, 0 is padding. A token sees its own
document alone, and padding sees and is seen by nobody.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lab.nn import few_attention, kernels, long_attention, short_attention, target
from lab.nn.products import contract

IMPLEMENTATIONS = ('auto', 'plain', 'flash')
MAX_HEAD = 128   # of cuDNN's kernels on every GPU that has them


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = False, segments: jax.Array | None = None,
           key_segments: jax.Array | None = None, mask: jax.Array | None = None, lengths: jax.Array | None = None,
           implementation: str = 'auto', dropout: float = 0.0, key: jax.Array | None = None) -> jax.Array:
  """softmax(q k / sqrt(Dh)) v over what a query sees: q [B, S, H, Dh], k and v [B, T, H, Dh] -> [B, S, H, Dh].

  The result has q's dtype, the softmax is float32 (Vaswani et al. 2017, arXiv 1706.03762, equation 1). A query sees key
  t if all of these allow it: causal, t <= s; segments i32[B, S] and key_segments i32[B, T] (those of the queries where
  not given), equal and not 0; lengths i32[B], t below them, of which 0 counts as 1: what padding itself gets is of no
  use, but costs nothing; mask, bool, broadcastable to [B, H, S, T]. A query that sees no key gives exactly 0, and
  gradients of exactly 0. dropout is the share of weights set to 0, drawn from key.

  implementation: 'plain', einsums; 'flash', a kernel on an NVIDIA GPU (ValueError where none applies: see `_obstacle`),
  the lab's own for few tokens (short_attention.fits), else cuDNN's; 'auto', flash where it applies. Many tokens of
  rotary positions see `together`, few see many `across`. Reverse-mode derivatives only.
  """
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(f'implementation = {implementation!r}: expected one of {IMPLEMENTATIONS}')
  if segments is None and key_segments is not None:
    raise ValueError('key_segments without segments')
  if dropout and key is None:
    raise ValueError(f'dropout = {dropout} without a key')
  if segments is not None and lengths is not None:
    raise ValueError('segments and lengths: expected one of them')
  if lengths is not None:
    lengths = jnp.maximum(lengths, 1)      # to see nothing is what kernels are bad at
  if segments is not None and key_segments is None:
    key_segments = segments
  if implementation != 'plain' and not kernels.counting():
    obstacle = _obstacle(q, k, segments, mask, dropout)
    if not obstacle and segments is None and short_attention.fits(q, k) and kernels.takes(len(q)):
      return _short(q, k, v, lengths, causal)
    if not obstacle:
      return _flash(q, k, v, causal, segments, key_segments, lengths)
    if implementation == 'flash':
      raise ValueError(f'flash attention: {obstacle}')
  return _plain(q, k, v, _visible(q, k, causal, segments, key_segments, mask, lengths), dropout, key)


def takes_together(qkv: jax.Array) -> bool:
  """Whether `together` takes queries, keys and values [B, S, H, 3, Dh]."""
  return long_attention.fits(qkv) and kernels.takes(len(qkv))


@jax.custom_vjp
def together(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """`attend` where all see all, of queries and keys `turned` by angles that get no gradient, and of values.

  A kernel of the lab's on an NVIDIA GPU, and its gradient two, which read and write qkv [B, S, H, 3, Dh] as it is: only
  where `takes_together`. Reverse-mode derivatives only.
  """
  return _together_forward(qkv, cos, sin)[0]


def positions(segments: jax.Array) -> jax.Array:
  """i32[B, S] -> i32[B, S]: how many tokens of its own segment come before each; of padding 0."""
  steps = segments.shape[1]
  s, t = (jax.lax.broadcasted_iota(jnp.int32, (1, steps, steps), axis) for axis in (1, 2))
  before = jnp.sum((segments[:, :, None] == segments[:, None]) & (t < s), -1, dtype=jnp.int32)
  return jnp.where(segments > 0, before, 0)


def rope(x: jax.Array, positions: jax.Array, base: float = 10000.0) -> jax.Array:
  """Rotates pairs of features by angles that grow with the position: x [B, S, H, Dh], positions i32[B, S].

  Su et al. 2021, arXiv 2104.09864, equation 34: products of rotated queries and keys depend on the distance alone.
  Feature i is paired with i + Dh/2, as in LLaMA. Angles are float32, the result has x's dtype. On a plane, positions
  are i32[B, S, 2]: the first half of the features turns by the row, the second by the column.
  """
  return turned(x, *angles(positions, x.shape[-1], base))


def angles(positions: jax.Array, features: int, base: float = 10000.0) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines for `turned`, the same for all heads and layers; features: Dh.

  f32[B, S, 1, A, Dh/2A] each, of A axes: 1, or 2 on a plane.
  """
  parts = positions.shape[2] if positions.ndim == 3 else 1
  if features % (2 * parts):
    raise ValueError(f'rope: heads of {features} features; expected a multiple of {2 * parts}')
  half = features // (2 * parts)
  frequencies = (base ** -(np.arange(half) / half)).astype(np.float32).reshape(1, 1, 1, 1, half)
  angle = positions.astype(jnp.float32).reshape(*positions.shape[:2], 1, parts, 1) * frequencies
  return jnp.cos(angle), jnp.sin(angle)


@jax.custom_vjp
def turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """x [B, S, H, Dh] rotated by `angles`, in float32; the result has x's dtype. Angles get no gradient.

  Reverse-mode derivatives only.
  """
  pairs = x.reshape(*x.shape[:3], cos.shape[3], 2, cos.shape[4])
  whole = lambda a, b: jnp.concatenate([a, b], -1).reshape(*a.shape[:3], -1)
  # each feature and its partner are multiplied where they are: in other orders a GPU takes half as long again
  partner = whole(pairs[..., 1, :], pairs[..., 0, :]).astype(jnp.float32)
  return (x.astype(jnp.float32) * whole(cos, cos) + partner * whole(-sin, sin)).astype(x.dtype)


# to turn back is to turn by the angles' negatives
turned.defvjp(lambda *args: (turned(*args), args[1:]),
              lambda angles, slope: (turned(slope, angles[0], -angles[1]), None, None))


def _visible(q, k, causal, segments, key_segments, mask, lengths=None) -> jax.Array | None:
  """Which keys each query sees, bool, broadcastable to [B, H, S, T]; None: all of them."""
  parts = []
  if causal:
    s, t = (jax.lax.broadcasted_iota(jnp.int32, (1, 1, q.shape[1], k.shape[1]), axis) for axis in (2, 3))
    parts.append(t <= s)
  if segments is not None:
    own = segments[:, None, :, None]
    parts.append((own == key_segments[:, None, None]) & (own > 0))
  if lengths is not None:
    parts.append(jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, k.shape[1]), 3) < lengths.reshape(-1, 1, 1, 1))
  if mask is not None:
    parts.append(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
  visible = None
  for part in parts:
    visible = part if visible is None else visible & part
  return visible


def _plain(q, k, v, visible, dropout, key):
  scores = contract('bshd,bthd->bhst', q, k) * q.shape[-1]**-0.5
  if visible is None:
    weights = jax.nn.softmax(scores)
  else:
    # a finite number in place of -inf, and 0 after the softmax: rows that see nothing have no 0/0, even in gradients
    weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, np.finfo(np.float32).min)), 0)
  if dropout:
    kept = jax.random.bernoulli(key, 1 - dropout, weights.shape)
    weights = jnp.where(kept, weights / (1 - dropout), 0)
  return jnp.einsum('bhst,bthd->bshd', weights.astype(v.dtype), v).astype(q.dtype)


def _flash(q, k, v, causal, segments, key_segments, lengths):
  """cuDNN's kernel; segments become a bias [B, 1, S, T] there, so that memory is one H-th of the plain path's."""
  if lengths is not None:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, key_value_seq_lengths=lengths,
                                        implementation='cudnn')
  mask = _visible(q, k, False, segments, key_segments, None)      # causal is the kernel's own: it skips what is hidden
  if mask is None:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation='cudnn')
  # a row without keys would be a mean of values, and in some of the kernels NaN in the gradients: it gets all keys, and
  # its result is taken away
  alive = jnp.any(_visible(q, k, causal, segments, key_segments, None), -1, keepdims=True)      # [B, 1, S, 1]
  y = jax.nn.dot_product_attention(q, k, v, mask=mask | ~alive, is_causal=causal, implementation='cudnn')
  return jnp.where(alive[:, 0, :, :, None], y, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _short(q, k, v, lengths, causal):
  """One kernel of the lab's, and its gradient another."""
  return _short_forward(q, k, v, lengths, causal)[0]


def _short_forward(q, k, v, lengths, causal):
  held = (q, k, v) if lengths is None else (q, k, v, lengths)
  whole = lambda q, k, v, lengths=None: (_flash(q, k, v, causal, None, None, lengths),)
  return kernels.choose(whole, lambda *x: (short_attention.attend(*x, causal=causal),), held)[0], held


def _short_backward(causal, held, slope):
  q, k, v, *lengths = held

  def whole(q, k, v, slope, *lengths):
    return jax.vjp(lambda *x: _flash(*x, causal, None, None, *(lengths or (None,))), q, k, v)[1](slope)
  kernel = functools.partial(short_attention.gradient, causal=causal)
  return *kernels.choose(whole, kernel, (q, k, v, slope, *lengths)), None


_short.defvjp(_short_forward, _short_backward)


def _together_forward(qkv, cos, sin):
  def plain(qkv):
    return _plain(*(qkv[..., i, :] for i in range(3)), None, 0, None), jnp.zeros((qkv.size // qkv.shape[-1] // 3,))
  qkv = _turned_together(qkv, cos, sin)
  y, logs = kernels.choose(plain, long_attention.attend, (qkv,))
  return y, (qkv, y, logs, cos, sin)


def _together_backward(held, slope):
  def plain(qkv, y, slope, logs):
    return jax.vjp(lambda qkv: _plain(*(qkv[..., i, :] for i in range(3)), None, 0, None), qkv)[1](slope)
  qkv, y, logs, cos, sin = held
  to_qkv, = kernels.choose(plain, long_attention.gradient, (qkv, y, slope, logs))
  return _turned_together(to_qkv, cos, -sin), None, None


def _turned_together(qkv, cos, sin):
  # angles of their own for each row are shared among devices as rows are
  own = len(cos) == len(qkv)
  rows, shared = ((qkv, cos, sin), ()) if own else ((qkv,), (cos, sin))
  return kernels.choose(_plainly_turned, long_attention.turn, rows, shared)[0]


def _plainly_turned(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array]:
  return jnp.stack([*(turned(qkv[..., i, :], cos, sin) for i in (0, 1)), qkv[..., 2, :]], 3),


together.defvjp(_together_forward, _together_backward)


def takes_across(q: jax.Array, kv: jax.Array) -> bool:
  """Whether `across` takes queries [B, S, H, Dh], keys and values [B, T, H, 2, Dh]."""
  return few_attention.fits(q, kv) and kernels.takes(len(q))


@jax.custom_vjp
def across(q: jax.Array, kv: jax.Array) -> jax.Array:
  """`attend` of few to many or many to few where all see all: a kernel of the lab's, and its gradient another.

  Only where `takes_across`. Reverse-mode derivatives only.
  """
  return _across_forward(q, kv)[0]


def _across_forward(q, kv):
  def plain(q, kv):
    return _plain(q, kv[..., 0, :], kv[..., 1, :], None, 0, None), jnp.zeros((q.size // q.shape[-1],))
  y, logs = kernels.choose(plain, few_attention.attend, (q, kv))
  return y, (q, kv, y, logs)


def _across_backward(held, slope):
  def plain(q, kv, y, slope, logs):
    return jax.vjp(lambda q, kv: _plain(q, kv[..., 0, :], kv[..., 1, :], None, 0, None), q, kv)[1](slope)
  return kernels.choose(plain, few_attention.gradient, (*held[:3], slope, held[3]))


across.defvjp(_across_forward, _across_backward)


def _obstacle(q, k, segments, mask, dropout) -> str:
  """Why cuDNN's kernel can't do this; '' if it can."""
  if not target.nvidia():
    return 'it needs an NVIDIA GPU of compute capability 8.0 or more'
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    return f'{q.dtype}; expected bfloat16 or float16'
  if dropout or mask is not None:
    return 'it takes neither dropout nor a mask'
  if q.shape[-1] > MAX_HEAD or q.shape[-1] % 8:
    return f'heads of {q.shape[-1]} features; expected a multiple of 8 up to {MAX_HEAD}'
  if q.shape[1] % 2 or k.shape[1] % 2:
    return f'{q.shape[1]} queries and {k.shape[1]} keys; expected even numbers'
  return ''
