"""Attention of a few queries to many keys, or of many to a few, as kernels for NVIDIA GPUs (Pallas, by Triton).

A program has one head of an example: it holds the few and passes over the many once, forward and backward, so nothing
is added up in memory. Keys and values are read where one product leaves them, and their gradients are written there.

Of arrays here N are examples, H heads of D features; S queries [N, S, H, D], T keys and values [N, T, H, 2, D].
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lab.nn import kernels, target
from lab.nn.kernels import LOG2_E, dot

FEW = (16, 32, 64)           # powers of two, at least what a product takes
BLOCK = 128                  # of the many, which are a multiple of this
LEAST = 512                  # of the many: fewer pass by quickly anyhow
WIDTHS = (16, 32, 64)        # of heads
NONE = -1e30                 # below all scores, and finite


def fits(q: jax.Array, kv: jax.Array) -> bool:
  """Whether these can be queries [N, S, H, D], keys and values [N, T, H, 2, D]."""
  few, many = sorted((q.shape[1], kv.shape[1]))
  return (few in FEW and many >= LEAST and many % BLOCK == 0 and q.shape[-1] in WIDTHS and q.dtype == jnp.bfloat16
          and target.hopper())


def attend(q: jax.Array, kv: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """What lab.nn.attention.attend gives where all see all: [N, S, H, D], and for `gradient` f32[N H S].

  The latter are logarithms to base 2 of 1 / sums of exponentials, where queries are few, and else not written.
  """
  return tuple(_call(_forward, (q, kv), [q, jnp.float32], interpret))


def gradient(q: jax.Array, kv: jax.Array, y: jax.Array, slope: jax.Array, logs: jax.Array, *,
             interpret: bool = False) -> tuple[jax.Array, jax.Array]:
  """Those of q and kv, of the slope [N, S, H, D] of the result y; y and logs as `attend` gave them."""
  return tuple(_call(_backward, (q, kv, y, slope, logs), [q, kv], interpret))


def _call(kernel, args, results, interpret):
  (number, queries, heads, width), keys = args[0].shape, args[1].shape[1]
  flat = lambda x: x.reshape(number * x.shape[1], *x.shape[2:]) if x.ndim > 1 else x
  shapes = [jax.ShapeDtypeStruct((number * heads * queries,), r) if r is jnp.float32
            else jax.ShapeDtypeStruct(flat(r).shape, r.dtype) for r in results]
  made = pl.pallas_call(
      functools.partial(kernel, queries=queries, keys=keys, factor=width**-0.5, exp2=kernels.exp2(interpret)), shapes,
      grid=(number * heads,), interpret=interpret, compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
      name='few_attention' + kernel.__name__)(*map(flat, args))
  return [m.reshape(getattr(r, 'shape', m.shape)) for m, r in zip(made, results)]


def _places(ref, queries, keys):
  """Of a program what finds rows of queries, of keys (0) or values (1), and of numbers; all of them or a block."""
  head, example = pl.program_id(0) % ref.shape[1], pl.program_id(0) // ref.shape[1]
  span = lambda size, i: pl.ds(example * size, size) if i is None else pl.ds(example * size + i * BLOCK, BLOCK)
  return (lambda i=None: (span(queries, i), head, slice(None)),
          lambda which, i=None: (span(keys, i), head, which, slice(None)), pl.ds(pl.program_id(0) * queries, queries))


def _forward(q_of, kv_of, out, logs_of, *, queries, keys, factor, exp2):
  query, key, numbers = _places(q_of, queries, keys)
  factor *= LOG2_E
  if keys < queries:
    k, v = kv_of[key(0)], kv_of[key(1)]

    def each(i, _):
      p, total = _chances(dot(q_of[query(i)], k, 1, 1), factor, exp2, 1)
      out[query(i)] = (dot(p.astype(v.dtype), v) * (1 / total)).astype(out.dtype)
    jax.lax.fori_loop(0, queries // BLOCK, each, None)
    return
  q = q_of[query()]

  def further(i, held):
    most, total, y = held
    s = dot(q, kv_of[key(0, i)], 1, 1)
    now = jnp.maximum(most, jnp.max(s, 1))
    less, p = exp2(most - now, factor, 0.0), exp2(s - now[:, None], factor, 0.0)
    return now, total * less + jnp.sum(p, 1), y * less[:, None] + dot(p.astype(q.dtype), kv_of[key(1, i)])

  start = jnp.full((queries,), NONE), jnp.zeros((queries,), jnp.float32), jnp.zeros(q.shape, jnp.float32)
  most, total, y = jax.lax.fori_loop(0, keys // BLOCK, further, start)
  out[query()] = (y / total[:, None]).astype(out.dtype)
  logs_of[numbers] = -factor * most - jnp.log2(total)


def _chances(scores, factor, exp2, axis):
  """Exponentials of scores, less the largest along an axis, and their sums."""
  p = exp2(scores - jnp.max(scores, axis, keepdims=True), factor, 0.0)
  return p, jnp.sum(p, axis, keepdims=True)


def _backward(q_of, kv_of, y_of, slope_of, logs_of, to_q, to_kv, *, queries, keys, factor, exp2):
  query, key, numbers = _places(q_of, queries, keys)
  if keys < queries:
    k, v = kv_of[key(0)], kv_of[key(1)]

    def further(i, held):
      of_k, of_v = held
      q, slope = q_of[query(i)], slope_of[query(i)]
      p, total = _chances(dot(k, q, 1, 1), factor * LOG2_E, exp2, 0)      # [keys, queries]
      p, steep = p * (1 / total), dot(v, slope, 1, 1)
      steep = (p * (steep - jnp.sum(p * steep, 0, keepdims=True)) * factor).astype(q.dtype)
      to_q[query(i)] = dot(steep, k, 0, 0).astype(to_q.dtype)
      return of_k + dot(steep, q), of_v + dot(p.astype(q.dtype), slope)

    nothing = jnp.zeros(k.shape, jnp.float32)
    of_k, of_v = jax.lax.fori_loop(0, queries // BLOCK, further, (nothing, nothing))
    to_kv[key(0)], to_kv[key(1)] = of_k.astype(to_kv.dtype), of_v.astype(to_kv.dtype)
    return
  q, slope, logs = q_of[query()], slope_of[query()], logs_of[numbers]
  means = jnp.sum(y_of[query()].astype(jnp.float32) * slope.astype(jnp.float32), 1)

  def each(i, of_q):
    k, v = kv_of[key(0, i)], kv_of[key(1, i)]
    p = exp2(dot(q, k, 1, 1), factor * LOG2_E, logs[:, None])
    steep = (p * (dot(slope, v, 1, 1) - means[:, None]) * factor).astype(q.dtype)
    to_kv[key(0, i)] = dot(steep, q, 0, 0).astype(to_kv.dtype)
    to_kv[key(1, i)] = dot(p.astype(q.dtype), slope, 0, 0).astype(to_kv.dtype)
    return of_q + dot(steep, k)

  to_q[query()] = jax.lax.fori_loop(0, keys // BLOCK, each, jnp.zeros(q.shape, jnp.float32)).astype(to_q.dtype)
