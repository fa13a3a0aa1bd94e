"""Attention over many tokens with narrow heads as kernels for NVIDIA GPUs of Hopper's kind (Pallas, by Triton).

FlashAttention-2 (Dao 2023, arXiv 2307.08691) with two changes. With heads of 32 features exponentials and what is
around them take longer than the products. So no maximum follows the scores: that of the first keys stays, which serves
as any number does that keeps the sums finite, and where it doesn't a block is done again with a maximum that does
follow. And the gradient is two kernels, of the queries and of keys and values, which add nothing up in memory: the same
numbers every time.

One number a row of scores is what the gradient knows of their size, as in FlashAttention-2: where scores go beyond some
100,000, its float32 is too coarse, and gradients are wrong by a hundredth and more.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lab.nn import target
from lab.nn.kernels import LOG2_E, dot, exp2

WIDTH = 32                   # features of a head: with more, products take longer than exponentials
LEAST = 1024                 # tokens of a row: as many were timed
BLOCK = 128                  # tokens of the largest blocks, of which a row is a multiple
MUCH = 2.0**50               # sums of exponentials up to here are as exact as small ones, and so are values times these
NONE = -1e30                 # below all scores, and finite


def fits(q: jax.Array, k: jax.Array) -> bool:
  """Whether these can be queries and keys [N, S, H, D]."""
  steps, width = q.shape[1], q.shape[-1]
  return (q.shape == k.shape and width == WIDTH and steps >= LEAST and steps % BLOCK == 0
          and q.dtype == jnp.bfloat16 and target.hopper())


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """What lab.nn.attention.attend gives where all see all: of q, k, v bf16[N, S, H, D].

  Returns that, bf16[N, S, H, D], and for `gradient` f32[N H S], logarithms to base 2 of 1 / sums of exponentials.
  """
  return tuple(_call(_forward, q.shape, (q, k, v), [q, jnp.float32], 'forward', queries=BLOCK, keys=32,
                     interpret=interpret))


def gradient(q: jax.Array, k: jax.Array, v: jax.Array, y: jax.Array, slope: jax.Array, logs: jax.Array, *,
             interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The gradients of q, k and v, of the slope [N, S, H, D] of the result y; y and logs as `attend` gave them."""
  call = functools.partial(_call, shape=q.shape, interpret=interpret)
  to_q, means = call(_to_queries, args=(q, k, v, y, slope, logs), results=[q, jnp.float32], name='to_queries',
                     queries=64, keys=64)
  to_k, to_v = call(_to_keys, args=(q, k, v, slope, logs, means), results=[q, q], name='to_keys',
                    queries=64, keys=BLOCK)
  return to_q, to_k, to_v


def _call(kernel, shape, args, results, name, queries, keys, interpret):
  number, steps, heads, width = shape
  flat = lambda x: x.reshape(number * steps, heads, width) if x.ndim == 4 else x
  shapes = [jax.ShapeDtypeStruct((number * heads * steps,), r) if r is jnp.float32
            else jax.ShapeDtypeStruct((number * steps, heads, width), r.dtype) for r in results]
  own = keys if kernel is _to_keys else queries
  made = pl.pallas_call(
      functools.partial(kernel, steps=steps, queries=queries, keys=keys, exp2=exp2(interpret)), shapes,
      grid=(number * heads * (steps // own),), interpret=interpret,
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=3), name='long_attention_' + name)(*map(flat, args))
  return [m.reshape(shape) if m.ndim == 3 else m for m in made]


class _Rows:
  """The block of rows that is this program's, of one head of one example, and how to find others of these."""

  def __init__(self, ref, steps: int, own: int):
    self.steps, self.heads, self.width = steps, *ref.shape[1:]
    blocks = steps // own
    self.number, at = pl.program_id(0) // blocks, pl.program_id(0) % blocks      # of head and example
    self.own, self.of_own = self.block(at, own), self.numbers(at, own)

  def block(self, i, size: int):
    """The i-th block of so many rows, of arrays [N S, H, D]."""
    return pl.ds(self.number // self.heads * self.steps + i * size, size), self.number % self.heads, slice(None)

  def numbers(self, i, size: int):
    """The same of arrays [N H S]."""
    return pl.ds(self.number * self.steps + i * size, size)


def _forward(q_of, k_of, v_of, out, logs_of, *, steps, queries, keys, exp2):
  rows = _Rows(q_of, steps, queries)
  q, factor, blocks = q_of[rows.own], LOG2_E * rows.width**-0.5, steps // keys
  scores = lambda i: dot(q, k_of[rows.block(i, keys)], 1, 1)

  def add(i, total, y, p):
    return total + jnp.sum(p, 1), y + dot(p.astype(q.dtype), v_of[rows.block(i, keys)])

  def fixed(i, held):
    most, total, y = held
    return most, *add(i, total, y, exp2(scores(i), factor, -factor * most[:, None]))

  def running(i, held):
    most, total, y = held
    s = scores(i)
    now = jnp.maximum(most, jnp.max(s, 1))
    less = exp2(most - now, factor, 0.0)
    return now, *add(i, total * less, y * less[:, None], exp2(s - now[:, None], factor, 0.0))

  nothing = jnp.zeros((queries,), jnp.float32), jnp.zeros((queries, rows.width), jnp.float32)
  held = jax.lax.fori_loop(0, blocks, fixed, (jnp.max(scores(0), 1), *nothing))
  again = ~((jnp.max(held[1]) < MUCH) & (jnp.min(held[1]) > 0.5))      # NaN too
  start = jnp.full((queries,), NONE), *nothing
  most, total, y = jax.lax.fori_loop(0, again.astype(jnp.int32) * blocks, running,
                                     tuple(jnp.where(again, a, b) for a, b in zip(start, held)))
  out[rows.own] = (y / total[:, None]).astype(out.dtype)
  logs_of[rows.of_own] = -factor * most - jnp.log2(total)


def _to_queries(q_of, k_of, v_of, y_of, slope_of, logs_of, to_q, means_of, *, steps, queries, keys, exp2):
  rows = _Rows(q_of, steps, queries)
  q, slope, logs, scale = q_of[rows.own], slope_of[rows.own], logs_of[rows.of_own], rows.width**-0.5
  # of the slopes of a query's weights, by these
  means = jnp.sum(y_of[rows.own].astype(jnp.float32) * slope.astype(jnp.float32), 1)
  means_of[rows.of_own] = means

  def further(i, total):
    k, v = k_of[rows.block(i, keys)], v_of[rows.block(i, keys)]
    p = exp2(dot(q, k, 1, 1), scale * LOG2_E, logs[:, None])
    steep = p * (dot(slope, v, 1, 1) - means[:, None])
    return total + dot(steep.astype(q.dtype), k)

  total = jax.lax.fori_loop(0, steps // keys, further, jnp.zeros((queries, rows.width), jnp.float32))
  to_q[rows.own] = (total * scale).astype(to_q.dtype)


def _to_keys(q_of, k_of, v_of, slope_of, logs_of, means_of, to_k, to_v, *, steps, queries, keys, exp2):
  rows = _Rows(q_of, steps, keys)
  k, v, scale = k_of[rows.own], v_of[rows.own], rows.width**-0.5

  def further(i, held):
    of_k, of_v = held
    q, slope = q_of[rows.block(i, queries)], slope_of[rows.block(i, queries)]
    logs, means = logs_of[rows.numbers(i, queries)], means_of[rows.numbers(i, queries)]
    # [keys, queries]; both products before anything else, which is a tenth faster
    s, of_p = dot(k, q, 1, 1), dot(v, slope, 1, 1)
    p = exp2(s, scale * LOG2_E, logs[None])
    steep = p * (of_p - means[None])
    return of_k + dot(steep.astype(q.dtype), q), of_v + dot(p.astype(q.dtype), slope)

  nothing = jnp.zeros((keys, rows.width), jnp.float32)
  of_k, of_v = jax.lax.fori_loop(0, steps // queries, further, (nothing, nothing))
  to_k[rows.own] = (of_k * scale).astype(to_k.dtype)
  to_v[rows.own] = of_v.astype(to_v.dtype)
