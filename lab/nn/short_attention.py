"""Self-attention over at most 128 tokens as one kernel for NVIDIA GPUs, its gradient as another (Pallas, by Triton).

All scores of a row and head are in one tile there, so nothing of them is written, and the gradient needs neither the
result nor the sums of exponentials: it reads q, k, v and the slope, and writes three gradients. Kernels for rows of any
length (FlashAttention-2, Dao 2023, arXiv 2307.08691) make four passes of that. Rows shorter than half a tile lie side
by side in one.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lab.nn import kernels, target
from lab.nn.kernels import LOG2_E, dot

MOST = 128                   # tokens of a row
TILE = 64                    # at least
WIDTHS = (16, 32, 64)        # of heads: powers of two, of which a tile's arrays fit into a multiprocessor
SHARED = 128 << 10           # bytes of its memory that the largest tiles want; GPUs for desktops have 99 KiB
HIDDEN = -1e30               # finite: where all is hidden, nothing is NaN


def fits(q: jax.Array, k: jax.Array) -> bool:
  """Whether these can be queries and keys [N, S, H, D]."""
  small = q.shape[1] <= TILE or target.shared_memory() >= SHARED
  return q.shape == k.shape and q.shape[1] <= MOST and q.shape[-1] in WIDTHS and small


def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None, *, causal: bool,
           interpret: bool = False) -> jax.Array:
  """What lab.nn.attention.attend gives: all [N, S, H, D], lengths i32[N], at least 1, of keys."""
  return _call(_forward, causal, interpret, 1, q, k, v, lengths)[0]


def gradient(q: jax.Array, k: jax.Array, v: jax.Array, slope: jax.Array, lengths: jax.Array | None = None, *,
             causal: bool, interpret: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The gradients of q, k and v, of the slope [N, S, H, D] of the result."""
  return tuple(_call(_backward, causal, interpret, 3, q, k, v, lengths, slope))


def _call(kernel, causal, interpret, results, q, k, v, lengths, *slope):
  number, steps, heads, width = q.shape
  tile = max(TILE, pl.next_power_of_2(steps))
  rows = tile // steps
  flat = lambda x: x.reshape(number * steps, *x.shape[2:])
  keys = [] if lengths is None else [flat((jnp.arange(steps)[None] < lengths[:, None]).astype(jnp.int32))]
  # with 4 warps for a large tile and lengths, over a kilobyte a thread of the gradient has to be kept in memory
  made = pl.pallas_call(
      functools.partial(kernel, causal=causal, steps=steps, held=rows * steps, tile=tile, tokens=number * steps,
                        masked=lengths is not None, exp2=kernels.exp2(interpret)),
      [jax.ShapeDtypeStruct((number * steps, heads, width), q.dtype)] * results,
      grid=(heads * pl.cdiv(number, rows),), interpret=interpret,
      compiler_params=triton.CompilerParams(num_warps=8 if tile > TILE else 2 if width > 32 else 1, num_stages=1),
      name='short_attention' + kernel.__name__)(*map(flat, (q, k, v, *slope)), *keys)
  return [m.reshape(q.shape) for m in made]


def _forward(q_of, k_of, v_of, *refs, masked, **options):
  out = refs[-1]
  read, write, chances, _ = _loaded(q_of, k_of, refs[0] if masked else None, **options)
  p, total = chances
  y = dot(p.astype(v_of.dtype), read(v_of)) * (1 / total)
  write(out, y)


def _backward(q_of, k_of, v_of, slope_of, *refs, masked, **options):
  to_q, to_k, to_v = refs[-3:]
  read, write, (p, total), (q, k) = _loaded(q_of, k_of, refs[0] if masked else None, **options)
  slope, dtype = read(slope_of), q.dtype
  p = p * (1 / total)
  write(to_v, dot(p.astype(dtype), slope, 0, 0))
  steep = dot(slope, read(v_of), 1, 1)
  steep = (p * (steep - jnp.sum(p * steep, 1, keepdims=True)) * q.shape[-1] ** -0.5).astype(dtype)
  write(to_q, dot(steep, k))
  write(to_k, dot(steep, q, 0, 0))


def _loaded(q_of, k_of, keys_of, *, causal, steps, held, tile, tokens, exp2):
  """What reads and writes a tile of a head, its exponentials and their sums, and queries and keys."""
  heads, width = q_of.shape[1:]
  # one number of both, for a second axis of a grid ends at 65,535
  head, first = pl.program_id(0) % heads, pl.program_id(0) // heads * held
  at = jnp.arange(tile)
  inside = (at < held) & (first + at < tokens)
  place = pl.ds(first, tile), head, pl.ds(0, width)
  whole = jnp.broadcast_to(inside[:, None], (tile, width))
  read = lambda ref: triton.load(ref.at[place], mask=whole, other=0.0)

  def write(ref, value):
    triton.store(ref.at[place], value.astype(ref.dtype), mask=whole)
  q, k = read(q_of), read(k_of)
  seen = inside
  if keys_of is not None:
    seen = seen & (triton.load(keys_of.at[pl.ds(first, tile)], mask=inside, other=0) > 0)
  seen = jnp.broadcast_to(seen[None], (tile, tile))
  if held > steps:
    seen = seen & ((at // steps)[:, None] == (at // steps)[None])
  if causal:
    seen = seen & (at[None] <= at[:, None])
  scores = jnp.where(seen, dot(q, k, 1, 1), HIDDEN)
  p = exp2(scores - jnp.max(scores, 1, keepdims=True), LOG2_E * width ** -0.5, 0.0)
  return read, write, (p, jnp.sum(p, 1, keepdims=True)), (q, k)
