"""Self-attention over many tokens with narrow heads as kernels for NVIDIA GPUs of Hopper's kind (Pallas, by Triton).

FlashAttention-2 (Dao 2023, arXiv 2307.08691) with three changes. With heads of 32 features exponentials and what is
around them take longer than the products. So no maximum follows the scores: that of the first keys stays, which serves
as any number does that keeps the sums finite, and where it doesn't a block is done again with a maximum that does
follow. The gradient is two kernels, of the queries and of keys and values, which add nothing up in memory: the same
numbers every time. And queries, keys and values are read where one product leaves them, their gradients are written
where one product wants them, and rotary positions turn both in place.

One number a row of scores is what the gradient knows of their size, as in FlashAttention-2: where scores go beyond some
100,000, its float32 is too coarse, and gradients are wrong by a hundredth and more.

Of arrays here N are examples, S tokens, H heads of D features.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lab.nn import kernels, target
from lab.nn.kernels import LOG2_E, dot

WIDTH = 32                   # features of a head: with more, products take longer than exponentials
LEAST = 1024                 # tokens of a row: as many were timed
BLOCK = 128                  # tokens of the largest blocks, of which a row is a multiple
MUCH = 2.0**50               # sums of exponentials up to here are as exact as small ones, and so are values times these
TOKENS, HEADS = 16, 8        # that are turned by one program, heads at most
NONE = -1e30                 # below all scores, and finite
QUERY, KEY, VALUE = range(3)


def fits(qkv: jax.Array) -> bool:
  """Whether these can be queries, keys and values [N, S, H, 3, D]."""
  steps, width = qkv.shape[1], qkv.shape[-1]
  return (width == WIDTH and steps >= LEAST and steps % BLOCK == 0 and qkv.dtype == jnp.bfloat16
          and target.hopper())


def turn(qkv: jax.Array, cos: jax.Array, sin: jax.Array, *, interpret: bool = False) -> tuple[jax.Array]:
  """qkv [N, S, H, 3, D] with queries and keys as lab.nn.attention.turned has them, for which its own memory is used.

  cos, sin: f32[N or 1, S, 1, A, D/2A], of lab.nn.attention.angles.
  """
  (number, steps, heads), (axes, half) = qkv.shape[:3], cos.shape[3:]
  pairs = qkv.reshape(number * steps, heads, 3, axes, 2, half)
  abreast = min(heads & -heads, HEADS)      # Triton takes powers of two
  made = pl.pallas_call(
      functools.partial(_turn, abreast=abreast), jax.ShapeDtypeStruct(pairs.shape, pairs.dtype),
      grid=(number * steps // TOKENS, heads // abreast), interpret=interpret, input_output_aliases={0: 0},
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=1), name='long_attention_turn')(
          pairs, *(a.reshape(-1, axes, half) for a in (cos, sin)))
  return made.reshape(qkv.shape),


def attend(qkv: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """Attention where all see all, of queries, keys and values [N, S, H, 3, D].

  Returns [N, S, H, D], and for `gradient` f32[N H S], logarithms to base 2 of 1 / sums of exponentials.
  """
  y = jax.ShapeDtypeStruct((*qkv.shape[:3], WIDTH), qkv.dtype)
  return tuple(_call(_forward, (qkv,), [y, jnp.float32], queries=BLOCK, keys=32, interpret=interpret))


def gradient(qkv: jax.Array, y: jax.Array, slope: jax.Array, logs: jax.Array, *,
             interpret: bool = False) -> tuple[jax.Array]:
  """That of qkv, of the slope of the result y [N, S, H, D]; y and logs as `attend` gave them."""
  call = functools.partial(_call, interpret=interpret, queries=64)
  to_qkv, means = call(_to_queries, (qkv, y, slope, logs), [qkv, jnp.float32], keys=64)
  return tuple(call(_to_keys, (to_qkv, qkv, slope, logs, means), [qkv], keys=BLOCK, aliases={0: 0}))


def _call(kernel, args, results, queries, keys, interpret, aliases=()):
  number, steps, heads = args[0].shape[:3]
  flat = lambda x: x.reshape(number * steps, *x.shape[2:]) if x.ndim > 1 else x
  shapes = [jax.ShapeDtypeStruct((number * heads * steps,), r) if r is jnp.float32
            else jax.ShapeDtypeStruct((number * steps, *r.shape[2:]), r.dtype) for r in results]
  own = keys if kernel is _to_keys else queries
  made = pl.pallas_call(
      functools.partial(kernel, steps=steps, queries=queries, keys=keys, exp2=kernels.exp2(interpret)), shapes,
      grid=(number * heads * (steps // own),), interpret=interpret, input_output_aliases=dict(aliases),
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
      name='long_attention' + kernel.__name__)(*map(flat, args))
  return [m.reshape(number, steps, *m.shape[1:]) if m.ndim > 1 else m for m in made]


class _Rows:
  """The block of rows that is this program's, of one head of one example, and how to find others of these."""

  def __init__(self, ref, steps: int, own: int):
    self.steps, self.heads, self.width = steps, ref.shape[1], ref.shape[-1]
    blocks = steps // own
    self.number, self.at = pl.program_id(0) // blocks, pl.program_id(0) % blocks      # of head and example
    self.size, self.own, self.of_own = own, self.block(self.at, own), self.numbers(self.at, own)

  def block(self, i, size: int):
    """The i-th block of so many rows, of arrays [N S, H, D]."""
    return self._span(i, size), self.number % self.heads, slice(None)

  def part(self, which: int, i=None, size: int = 0):
    """The same of one of queries, keys and values [N S, H, 3, D]; without i the program's own."""
    return self._span(*((self.at, self.size) if i is None else (i, size))), self.number % self.heads, which, slice(None)

  def numbers(self, i, size: int):
    """The same of arrays [N H S]."""
    return pl.ds(self.number * self.steps + i * size, size)

  def _span(self, i, size):
    return pl.ds(self.number // self.heads * self.steps + i * size, size)


def _turn(_, cos_of, sin_of, out, *, abreast):
  rows, heads = pl.ds(pl.program_id(0) * TOKENS, TOKENS), pl.ds(pl.program_id(1) * abreast, abreast)
  # angles of one row of tokens serve for all
  which = pl.ds(pl.program_id(0) * TOKENS % cos_of.shape[0], TOKENS), slice(None), slice(None)
  cos, sin = (angle[which][:, None, :, None] for angle in (cos_of, sin_of))
  parts = [(rows, heads, part, slice(None), slice(None), slice(None)) for part in (QUERY, KEY)]
  first = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, 2, 1), 3) == 0
  sin = jnp.where(first, -sin, sin)
  # what a feature is paired with, exactly: of both one's bits less its own
  bits = lambda x, dtype=jnp.int32: jax.lax.bitcast_convert_type(x, dtype)
  partner = lambda x: bits(jnp.sum(bits(x), 3, keepdims=True) - bits(x), jnp.float32)
  # whole heads are read and written, all before any: memory takes 32 bytes at a time
  for part, x in [(part, out[part].astype(jnp.float32)) for part in parts]:
    out[part] = (x * cos + partner(x) * sin).astype(out.dtype)


def _forward(qkv_of, out, logs_of, *, steps, queries, keys, exp2):
  # two halves, side by side in each turn of a loop: so they take fewer registers than as one block, and a GPU more
  # programs at once
  rows, half = _Rows(qkv_of, steps, queries), queries // 2
  at = [2 * rows.at + j for j in (0, 1)]
  qs = [qkv_of[rows.part(QUERY, i, half)] for i in at]
  factor, blocks, dtype = LOG2_E * rows.width**-0.5, steps // keys, out.dtype

  def fixed(i, held):
    k, v = qkv_of[rows.part(KEY, i, keys)], qkv_of[rows.part(VALUE, i, keys)]
    ps = [exp2(s, factor, -factor * most[:, None]) for s, (most, _, _) in zip([dot(q, k, 1, 1) for q in qs], held)]
    return tuple((most, total + jnp.sum(p, 1), y + dot(p.astype(dtype), v)) for (most, total, y), p in zip(held, ps))

  def running(i, held):
    k, v = qkv_of[rows.part(KEY, i, keys)], qkv_of[rows.part(VALUE, i, keys)]
    made = []
    for q, (most, total, y) in zip(qs, held):
      s = dot(q, k, 1, 1)
      now = jnp.maximum(most, jnp.max(s, 1))
      less, p = exp2(most - now, factor, 0.0), exp2(s - now[:, None], factor, 0.0)
      made.append((now, total * less + jnp.sum(p, 1), y * less[:, None] + dot(p.astype(dtype), v)))
    return tuple(made)

  nothing = jnp.zeros((half,), jnp.float32), jnp.zeros((half, rows.width), jnp.float32)
  first = qkv_of[rows.part(KEY, 0, keys)]
  held = jax.lax.fori_loop(0, blocks, fixed, tuple((jnp.max(dot(q, first, 1, 1), 1), *nothing) for q in qs))
  fine = [(jnp.max(total) < MUCH) & (jnp.min(total) > 0.5) for _, total, _ in held]      # NaN is not
  again, start = ~(fine[0] & fine[1]), (jnp.full((half,), NONE), *nothing)
  held = tuple(tuple(jnp.where(again, a, b) for a, b in zip(start, each)) for each in held)
  held = jax.lax.fori_loop(0, again.astype(jnp.int32) * blocks, running, held)
  for i, (most, total, y) in zip(at, held):
    out[rows.block(i, half)] = (y / total[:, None]).astype(dtype)
    logs_of[rows.numbers(i, half)] = -factor * most - jnp.log2(total)


def _to_queries(qkv_of, y_of, slope_of, logs_of, to_qkv, means_of, *, steps, queries, keys, exp2):
  rows = _Rows(qkv_of, steps, queries)
  q, slope, logs, scale = qkv_of[rows.part(QUERY)], slope_of[rows.own], logs_of[rows.of_own], rows.width**-0.5
  # of the slopes of a query's weights, by these
  means = jnp.sum(y_of[rows.own].astype(jnp.float32) * slope.astype(jnp.float32), 1)
  means_of[rows.of_own] = means

  def further(i, total):
    k, v = qkv_of[rows.part(KEY, i, keys)], qkv_of[rows.part(VALUE, i, keys)]
    p = exp2(dot(q, k, 1, 1), scale * LOG2_E, logs[:, None])
    steep = p * (dot(slope, v, 1, 1) - means[:, None])
    return total + dot(steep.astype(q.dtype), k)

  total = jax.lax.fori_loop(0, steps // keys, further, jnp.zeros((queries, rows.width), jnp.float32))
  to_qkv[rows.part(QUERY)] = (total * scale).astype(to_qkv.dtype)


def _to_keys(_, qkv_of, slope_of, logs_of, means_of, to_qkv, *, steps, queries, keys, exp2):
  rows = _Rows(qkv_of, steps, keys)
  k, v, scale = qkv_of[rows.part(KEY)], qkv_of[rows.part(VALUE)], rows.width**-0.5

  def further(i, held):
    of_k, of_v = held
    q, slope = qkv_of[rows.part(QUERY, i, queries)], slope_of[rows.block(i, queries)]
    logs, means = logs_of[rows.numbers(i, queries)], means_of[rows.numbers(i, queries)]
    # [keys, queries]; both products before anything else, which is a tenth faster
    s, of_p = dot(k, q, 1, 1), dot(v, slope, 1, 1)
    p = exp2(s, scale * LOG2_E, logs[None])
    steep = p * (of_p - means[None])
    return of_k + dot(steep.astype(q.dtype), q), of_v + dot(p.astype(q.dtype), slope)

  nothing = jnp.zeros((keys, rows.width), jnp.float32)
  of_k, of_v = jax.lax.fori_loop(0, steps // queries, further, (nothing, nothing))
  to_qkv[rows.part(KEY)] = (of_k * scale).astype(to_qkv.dtype)
  to_qkv[rows.part(VALUE)] = of_v.astype(to_qkv.dtype)
