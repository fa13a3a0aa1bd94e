"""An LSTM's step, and its gradient: by hand, and as one kernel for NVIDIA GPUs (Pallas, compiled by Triton).

Of a step only the cell before it and its gates are kept, as they came out of a product; all else is made again. XLA
makes five passes of the gradient, whose four parts it writes in float32 and joins after that, and a sum over the batch
for each diagonal in between. The kernel reads what there is once, and writes the gradient of the gates as one array.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from lab.nn import kernels
from lab.systems.video.products import row as _row

COLUMNS, ROWS = 128, 16      # of a tile; powers of two, as all sizes in Triton


@jax.custom_vjp
def step(peepholes: jax.Array | None, c: jax.Array, gates: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(h', c') of c f32[B, ...W] and gates [B, ...4W], i, f, g, o side by side before they are squashed.

  i, f, o sigmoid, g tanh; c' = f c + i g, h' = o tanh(c') (Hochreiter & Schmidhuber 1997; Gers et al. 2000). With
  peepholes f32[3, W] the gates see the cell through diagonals, i and f the old, o the new (Graves 2013, arXiv
  1308.0850). Float32 but for the gates. Reverse-mode derivatives only.
  """
  i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, -1)
  if peepholes is not None:
    i, f = i + _row(peepholes[0], c) * c, f + _row(peepholes[1], c) * c
  c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
  o = o if peepholes is None else o + _row(peepholes[2], c) * c
  return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _forward(peepholes, c, gates):
  return step(peepholes, c, gates), (peepholes, c, gates)


def _backward(kept, slopes):
  peepholes, c, gates = kept
  shared = () if peepholes is None else (peepholes,)
  to_c, to_gates, *sums = kernels.choose(_plain_gradient, gradient, (c, gates, *slopes), shared, sums=len(shared))
  return sums[0] if sums else None, to_c, to_gates


step.defvjp(_forward, _backward)


def _slopes(sigmoid, tanh, c, i, f, g, o, to_h, to_c, peepholes=None):
  """The gradients of c and of the gates before they are squashed, and the cell after the step: all f32[..., W]."""
  if peepholes is not None:
    i, f = i + peepholes[0] * c, f + peepholes[1] * c
  i, f, g = sigmoid(i), sigmoid(f), tanh(g)
  after = f * c + i * g
  o = sigmoid(o if peepholes is None else o + peepholes[2] * after)
  out = tanh(after)
  to_o = to_h * out * o * (1 - o)
  to_c = to_c + to_h * o * (1 - out * out)
  if peepholes is not None:
    to_c = to_c + to_o * peepholes[2]
  to_i, to_f, to_g = to_c * g * i * (1 - i), to_c * c * f * (1 - f), to_c * i * (1 - g * g)
  to_c = to_c * f
  if peepholes is not None:
    to_c = to_c + to_i * peepholes[0] + to_f * peepholes[1]
  return to_c, (to_i, to_f, to_g, to_o), after


def _sigmoid(x):
  """By a power of two, which a GPU has."""
  return 1 / (1 + jnp.exp2(-kernels.LOG2_E * x))


def _tanh(x):
  """By `_sigmoid`, and near 0, where that would be a difference of near numbers, by its series (to 1e-7)."""
  square = x * x
  return jnp.where(square < 1 / 64, x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))),
                   2 * _sigmoid(2 * x) - 1)


def _plain_gradient(c, gates, to_h, to_c, peepholes=None):
  rows = None if peepholes is None else [_row(each, c) for each in peepholes]
  gates_of = jnp.split(gates.astype(jnp.float32), 4, -1)
  to_c, parts, after = _slopes(jax.nn.sigmoid, jnp.tanh, c, *gates_of, to_h, to_c, rows)
  found = to_c, jnp.concatenate(parts, -1).astype(gates.dtype)
  if peepholes is None:
    return found
  lead, (to_i, to_f, _, to_o) = tuple(range(c.ndim - 1)), parts
  return *found, jnp.stack([(part * cell).sum(lead) for part, cell in ((to_i, c), (to_f, c), (to_o, after))])


def gradient(c: jax.Array, gates: jax.Array, to_h: jax.Array, to_c: jax.Array, peepholes: jax.Array | None = None, *,
             interpret: bool = False):
  """The gradients of `step`: of c, of the gates, and of peepholes, if there are any, as sums over shares of the rows.

  c, and the gradients to_h and to_c of its results: f32[B, ...W]; gates [B, ...4W]; peepholes f32[3, W].
  Returns f32[B, ...W], [B, ...4W] as gates are, f32[R, 3, W]. interpret: run without a GPU, for tests.
  """
  width, diagonals = c.shape[-1], peepholes is not None
  rows, blocks = math.prod(c.shape[:-1]), pl.cdiv(width, COLUMNS)
  programs = max(1, min(kernels.PROGRAMS // blocks, pl.cdiv(rows, ROWS)))
  shapes = [jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((rows, 4 * width), gates.dtype)]
  shapes += [jax.ShapeDtypeStruct((programs, 3, width), jnp.float32)] * diagonals
  flat = lambda x: x.reshape(rows, x.shape[-1])
  made = pl.pallas_call(
      functools.partial(_gradient, rows=rows, width=width, programs=programs, diagonals=diagonals), shapes,
      grid=(blocks, programs), interpret=interpret, name='lstm_gradient',
      compiler_params=triton.CompilerParams(num_warps=4, num_stages=1))(
          *map(flat, (c, gates, to_h, to_c)), *([peepholes] * diagonals))
  return made[0].reshape(c.shape), made[1].reshape(gates.shape), *made[2:]


def _gradient(c_of, gates_of, to_h_of, to_c_of, *refs, rows, width, programs, diagonals):
  start, first = pl.program_id(0) * COLUMNS, pl.program_id(1)
  there = start + jnp.arange(COLUMNS) < width
  beside = lambda part: pl.ds(part * width + start, COLUMNS)
  vectors = None
  if diagonals:
    vectors = [triton.load(refs[0].at[pl.ds(n, 1), beside(0)], mask=there[None], other=0.0) for n in range(3)]
  to_old, to_gates = refs[diagonals:2 + diagonals]

  def further(i, sums):
    row = (i * programs + first) * ROWS
    inside = (row + jnp.arange(ROWS) < rows)[:, None] & there[None]
    place = lambda part: (pl.ds(row, ROWS), beside(part))
    read = lambda ref, part=0: triton.load(ref.at[place(part)], mask=inside, other=0.0).astype(jnp.float32)

    def write(ref, value, part=0):
      triton.store(ref.at[place(part)], value.astype(ref.dtype), mask=inside)
    c = read(c_of)
    to_c, parts, after = _slopes(_sigmoid, _tanh, c, *(read(gates_of, part) for part in range(4)), read(to_h_of),
                                 read(to_c_of), vectors)
    write(to_old, to_c)
    for part, value in enumerate(parts):
      write(to_gates, value, part)
    return tuple(total + parts[part] * cell for total, part, cell in zip(sums, (0, 1, 3), (c, c, after)))

  none = (jnp.zeros((ROWS, COLUMNS), jnp.float32),) * (3 * diagonals)
  sums = jax.lax.fori_loop(0, pl.cdiv(pl.cdiv(rows, ROWS), programs), further, none)
  for n, value in enumerate(sums):
    triton.store(refs[-1].at[first, pl.ds(n, 1), beside(0)], jnp.sum(value, 0, keepdims=True), mask=there[None])
