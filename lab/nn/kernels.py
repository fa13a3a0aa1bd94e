"""Kernels for NVIDIA GPUs of what XLA makes several passes over memory of (Pallas, compiled by Triton).

Each has its like in plain JAX, which every other device runs, and the same arguments and results as that. A kernel
works on the rows that a device holds: where a mesh splits more than the batch, or rows do not share evenly, the plain
way is taken, which XLA can split. JAX says that a version to come will be without this compiler; the versions that the
lab takes, up to 0.12, have it.
"""

import contextlib
import functools
import math
import struct
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P

AXES = ('data', 'fsdp')      # of a mesh, over which batches are split
LANES = 1024                 # logits that are looked at side by side; a power of two, as all sizes in Triton
ABREAST = 4                  # times LANES, between two looks at their maxima
LOG2_E = math.log2(math.e)   # a GPU has powers of two
TILE = 2048                  # numbers of a tile of rows that are normed, where a row is not wider
PROGRAMS = 8 * 132           # that add up gradients of scales and biases, each a share of the rows: 8 a multiprocessor
ABEAM = 512                  # columns of a tile of GELU's gradient, which is added up over rows for the bias
GELU_SLOPE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
_counting = False            # whether products are being counted, see `counted`


@contextlib.contextmanager
def counted():
  """Within, there are no kernels but plain JAX, so that a traced program shows what it multiplies."""
  global _counting
  before, _counting = _counting, True
  try:
    yield
  finally:
    _counting = before


def counting() -> bool:
  """Whether this is within `counted`."""
  return _counting


def takes(rows: int) -> bool:
  """Whether devices can work on rows of their own: nothing else is split by the mesh, and they share evenly.

  Not so within `counted`.
  """
  split = _split()
  return not _counting and not set(split) - set(AXES) and rows % math.prod(split.values()) == 0


def exp2(interpret: bool) -> Callable:
  """f(x, factor, offset) = 2 ** (factor x + offset) of f32 arrays and a number, in a kernel: two instructions.

  By the hardware's powers of two, which are 2 ulp off and 0 below 2 ** -126; jnp.exp2's take five instructions there.
  """
  if interpret:
    return lambda x, factor, offset: jnp.exp2(x * factor + offset)

  def power(x, factor, offset):
    word = struct.pack('>f', factor).hex()
    return triton.elementwise_inline_asm(
        f'{{ .reg .f32 y; fma.rn.ftz.f32 y, $1, 0f{word}, $2; ex2.approx.ftz.f32 $0, y; }}',
        args=[x, jnp.broadcast_to(offset, x.shape)], constraints='=f,f,f', pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)])[0]
  return power


def dot(a, b, axis: int = 1, other: int = 0) -> jax.Array:
  """The product over an axis of a and the other of b, in float32."""
  return jax.lax.dot_general(a, b, (((axis,), (other,)), ((), ())), preferred_element_type=jnp.float32)


def _split():
  """The axes of the mesh that has been set, and their sizes, where these are more than 1."""
  return {axis: size for axis, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1}


def choose(plain: Callable, kernel: Callable, rows: tuple, shared: tuple = (), sums: int = 0):
  """kernel(*rows, *shared) where it is compiled for an NVIDIA GPU, plain of the same elsewhere.

  rows: arrays [N, ...], of which a device works on its own N; so are the results. The last `sums` of these are sums
  over all rows; of the kernel, shares [n, ...] of them.
  """
  if not takes(len(rows[0])):
    return plain(*rows, *shared)
  split = _split()
  if split:
    spec, mesh = P(tuple(split)), jax.sharding.get_abstract_mesh()
    kernel = jax.shard_map(kernel, mesh=mesh, in_specs=(spec,) * len(rows) + (P(),) * len(shared), out_specs=spec,
                           check_vma=False)

  def whole(*args):
    found = kernel(*args)
    first = len(found) - sums
    return (*found[:first], *(shares.sum(0) for shares in found[first:]))
  return jax.lax.platform_dependent(*rows, *shared, cuda=whole, default=plain)


# -- the loss of a vocabulary


def label_statistics(logits: jax.Array, labels: jax.Array, *, classes: int, interpret: bool = False):
  """What a cross-entropy needs of each row of logits, which is read once.

  Args:
    logits: [N, V], of which the first `classes` columns count.
    labels: i32[N]; where one is none of the classes its logit is 0.
    classes: as above.
    interpret: run without a GPU, for tests.

  Returns:
    f32[N] the log of the sum of exponentials, f32[N] the label's logit, bool[N] whether that is the largest, the first
    of equal ones. A running maximum and a sum that is scaled to it (Milakov and Gimelshein 2018, arXiv 1805.02867).
  """
  rows = logits.shape[0]
  shapes = [jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32)]
  total, picked, right = pl.pallas_call(
      functools.partial(_label_statistics, classes=classes), shapes, grid=(rows,), interpret=interpret,
      compiler_params=triton.CompilerParams(num_warps=4), name='label_statistics')(logits, labels)
  return total, picked, right > 0


def _label_statistics(logits, labels, total_of, picked_of, right_of, *, classes):
  row = pl.program_id(0)
  label = labels[row]

  def read(start, last):
    mask = start + jnp.arange(LANES) < classes if last else None
    other = -jnp.inf if last else None
    return triton.load(logits.at[row, pl.ds(start, LANES)], mask=mask, other=other).astype(jnp.float32)

  def further(i, seen, last=False):
    # each lane has a maximum and a sum of its own until the end
    most, total = seen
    parts = [read((i * ABREAST + j) * LANES, last) for j in range(ABREAST)]
    now = functools.reduce(jnp.maximum, parts, most)
    return now, total * _exp(most - now) + sum(_exp(x - now) for x in parts)

  whole = classes // (ABREAST * LANES)
  # not -inf, for a logit may be that
  seen = jnp.full((LANES,), jnp.finfo(jnp.float32).min), jnp.zeros((LANES,), jnp.float32)
  seen = jax.lax.fori_loop(0, whole, further, seen)
  lanes, sums = jax.lax.fori_loop(
      whole, pl.cdiv(classes, ABREAST * LANES), functools.partial(further, last=True), seen)
  most = jnp.max(lanes)
  total = jnp.sum(sums * _exp(lanes - most))
  there = (label >= 0) & (label < classes)
  picked = jnp.where(there, logits[row, jnp.where(there, label, 0)].astype(jnp.float32), 0.0)

  def earlier(i, found):
    at = i * LANES + jnp.arange(LANES)
    x = triton.load(logits.at[row, pl.ds(i * LANES, LANES)], mask=at < label, other=-jnp.inf).astype(jnp.float32)
    return jnp.maximum(found, jnp.max(x))

  largest = there & (picked >= most)      # then equal ones are looked for before it, and seldom else
  before = jax.lax.fori_loop(0, jnp.where(largest, pl.cdiv(label, LANES), 0), earlier, jnp.float32(-jnp.inf))
  total_of[row] = most + jnp.log2(total) / LOG2_E
  picked_of[row] = picked
  right_of[row] = (largest & (before < picked)).astype(jnp.int32)


def _exp(x):
  return jnp.exp2(x * LOG2_E)


def label_gradient(logits: jax.Array, labels: jax.Array, total: jax.Array, slope: jax.Array, *, classes: int,
                   interpret: bool = False) -> jax.Array:
  """slope (softmax(logits) - one at the label), of the first `classes` columns and 0 behind: [N, V] as logits are.

  logits [N, V], labels i32[N], total f32[N] the log of the sum of exponentials, slope f32[N].
  """
  rows, columns = logits.shape
  block = ABREAST * LANES
  return pl.pallas_call(
      functools.partial(_label_gradient, classes=classes, columns=columns, block=block),
      jax.ShapeDtypeStruct(logits.shape, logits.dtype), grid=(rows * pl.cdiv(columns, block),), interpret=interpret,
      compiler_params=triton.CompilerParams(num_warps=4), name='label_gradient')(logits, labels, total, slope)


def _label_gradient(logits, labels, total, slope, out, *, classes, columns, block):
  # one number of both, for a second axis of a grid ends at 65,535
  blocks = pl.cdiv(columns, block)
  first, row = pl.program_id(0) % blocks * block, pl.program_id(0) // blocks
  at = first + jnp.arange(block)
  place = row, pl.ds(first, block)
  x = triton.load(logits.at[place], mask=at < classes, other=-jnp.inf).astype(jnp.float32)
  chance = _exp(x - total[row])
  value = (chance - (at == labels[row]).astype(jnp.float32)) * slope[row]
  triton.store(out.at[place], value.astype(out.dtype), mask=at < columns)


# -- norms of a stream that is added to


def add_norm(x: jax.Array, y: jax.Array, *vectors: jax.Array, eps: float, rms: bool, post: bool,
             interpret: bool = False):
  """(x + y, its norm in float32, or None, its norm in y's dtype): x f32[N, ...D], y [N, ...D].

  The second is wanted with post alone. vectors: scale and bias f32[D], and before them, if there is one, a bias f32[D]
  that is still to be added to y.
  """
  width = x.shape[-1]
  rows, tile, columns = _tiles(x)
  outs = [jnp.float32] + [jnp.float32] * post + [y.dtype]
  made = pl.pallas_call(
      functools.partial(_add_norm, vectors=len(vectors), rows=rows, tile=tile, columns=columns, width=width, eps=eps,
                        rms=rms),
      [jax.ShapeDtypeStruct((rows, width), dtype) for dtype in outs], grid=(pl.cdiv(rows, tile),), interpret=interpret,
      compiler_params=triton.CompilerParams(num_warps=_warps(tile * columns)), name='add_norm')(
          x.reshape(rows, width), y.reshape(rows, width), *vectors)
  made = [m.reshape(x.shape) for m in made]
  return (made[0], made[1], made[2]) if post else (made[0], None, made[1])


def _add_norm(x_of, y_of, *refs, vectors, rows, tile, columns, width, eps, rms):
  place, inside = _place(pl.program_id(0), rows, tile, columns, width)
  *shift, scale, bias = (_vector(v, columns, width) for v in refs[:vectors])
  sum_of, *norms = refs[vectors:]
  y = _read(y_of, place, inside)
  x = _read(x_of, place, inside) + (y + shift[0][None] if shift else y)
  _write(sum_of, place, inside, x)
  y = _standard(x, inside, width, eps, rms)[0] * scale[None] + bias[None]
  for norm in norms:
    _write(norm, place, inside, y)


def add_norm_gradient(x: jax.Array, onward: jax.Array, slope: jax.Array, scale: jax.Array, *, eps: float, rms: bool,
                      post: bool, shifted: bool, interpret: bool = False):
  """The gradients of add_norm: of x, of y, and of its vectors as sums over shares of the rows.

  Args:
    x: f32[N, ...D], the sum that was normed.
    onward: f32[N, ...D], the gradient of the stream that goes on: the sum, or with post its norm.
    slope: [N, ...D], that of the norm in y's dtype.
    shifted: whether a bias was added to y.
    scale, eps, rms, post, interpret: as of add_norm.

  Returns:
    f32[N, ...D], the same in slope's dtype, and f32[R, V, D] for the V vectors in their order: one array, for to sum
    three takes three times as long.
  """
  width = x.shape[-1]
  rows, tile, columns = _tiles(x)
  programs = min(PROGRAMS, pl.cdiv(rows, tile))
  shapes = [jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((rows, width), slope.dtype)]
  shapes.append(jax.ShapeDtypeStruct((programs, 2 + shifted, width), jnp.float32))
  to_x, to_y, shares = pl.pallas_call(
      functools.partial(_add_norm_gradient, rows=rows, tile=tile, columns=columns, width=width, eps=eps, rms=rms,
                        post=post, programs=programs),
      shapes, grid=(programs,), interpret=interpret,
      compiler_params=triton.CompilerParams(num_warps=_warps(tile * columns), num_stages=2), name='add_norm_gradient')(
          *(a.reshape(rows, width) for a in (x, onward, slope)), scale)
  return to_x.reshape(x.shape), to_y.reshape(x.shape), shares


def _add_norm_gradient(x_of, onward_of, slope_of, scale_of, to_x, to_y, shares, *, rows, tile, columns, width, eps,
                       rms, post, programs):
  scale, first = _vector(scale_of, columns, width), pl.program_id(0)

  def further(i, sums):
    place, inside = _place(i * programs + first, rows, tile, columns, width)
    x, onward, slope = (_read(a, place, inside) for a in (x_of, onward_of, slope_of))
    slope = slope + onward if post else slope
    y, deviation = _standard(x, inside, width, eps, rms)
    steep = slope * scale[None]
    mean = 0.0 if rms else jnp.sum(steep, 1, keepdims=True) / width
    turned = (steep - mean - y * (jnp.sum(steep * y, 1, keepdims=True) / width)) * deviation
    turned = turned if post else turned + onward
    _write(to_x, place, inside, turned)
    _write(to_y, place, inside, turned)
    more = (jnp.where(inside, turned, 0.0), slope * y, slope)[-len(sums):]      # outside, eps may be all there is
    return tuple(total + each for total, each in zip(sums, more))

  none = jnp.zeros((tile, columns), jnp.float32)
  sums = jax.lax.fori_loop(0, pl.cdiv(pl.cdiv(rows, tile), programs), further, (none,) * shares.shape[1])
  for i, value in enumerate(sums):
    triton.store(shares.at[first, pl.ds(i, 1), pl.ds(0, columns)], jnp.sum(value, 0, keepdims=True),
                 mask=jnp.arange(columns)[None] < width)


# -- an activation's gradient


def gelu_gradient(x: jax.Array, slope: jax.Array, *, interpret: bool = False):
  """The gradient of gelu_tanh(x) (activations.py), and its sums over shares of the rows.

  Unless x is float32, by the hardware's hyperbolic tangent, which is a 2048th off: less than the result is rounded by.
  x and slope, the gradient of the result: [N, ...F]. Returns [N, ...F] as x is, and f32[R, F].
  """
  width = x.shape[-1]
  rows, columns = math.prod(x.shape[:-1]), min(ABEAM, pl.next_power_of_2(width))
  tile, blocks = TILE // columns, pl.cdiv(width, columns)
  programs = max(1, min(PROGRAMS // blocks, pl.cdiv(rows, tile)))
  to_x, shares = pl.pallas_call(
      functools.partial(_gelu_gradient, rows=rows, tile=tile, columns=columns, width=width, programs=programs,
                        tanh=jnp.tanh if interpret or x.dtype == jnp.float32 else triton.approx_tanh),
      [jax.ShapeDtypeStruct((rows, width), x.dtype), jax.ShapeDtypeStruct((programs, width), jnp.float32)],
      grid=(blocks, programs), interpret=interpret,
      compiler_params=triton.CompilerParams(num_warps=8, num_stages=2), name='gelu_gradient')(
          x.reshape(rows, width), slope.reshape(rows, width))
  return to_x.reshape(x.shape), shares


def _gelu_gradient(x_of, slope_of, to_x, share_of, *, rows, tile, columns, width, programs, tanh):
  start, first = pl.program_id(0) * columns, pl.program_id(1)
  beside = pl.ds(start, columns)
  there = start + jnp.arange(columns) < width

  def further(i, total):
    row = (i * programs + first) * tile
    place, inside = (pl.ds(row, tile), beside), (row + jnp.arange(tile) < rows)[:, None] & there[None]
    slope = gelu_slope(_read(x_of, place, inside), tanh)
    turned = _read(slope_of, place, inside) * slope
    _write(to_x, place, inside, turned)
    return total + turned

  total = jax.lax.fori_loop(0, pl.cdiv(pl.cdiv(rows, tile), programs), further, jnp.zeros((tile, columns), jnp.float32))
  triton.store(share_of.at[first, beside], jnp.sum(total, 0), mask=there)


def swiglu_gradient(made: jax.Array, slope: jax.Array, *, interpret: bool = False) -> tuple[jax.Array]:
  """The gradient of silu(g) u (activations.py) of made [N, ...2F], g and u side by side; slope is [N, ...F]."""
  width = slope.shape[-1]
  rows, columns = math.prod(slope.shape[:-1]), min(ABEAM, pl.next_power_of_2(width))
  tile = TILE // columns
  to_made = pl.pallas_call(
      functools.partial(_swiglu_gradient, rows=rows, tile=tile, columns=columns, width=width),
      jax.ShapeDtypeStruct((rows, 2 * width), made.dtype), grid=(pl.cdiv(rows, tile), pl.cdiv(width, columns)),
      interpret=interpret, compiler_params=triton.CompilerParams(num_warps=_warps(TILE)), name='swiglu_gradient')(
          made.reshape(rows, 2 * width), slope.reshape(rows, width))
  return to_made.reshape(made.shape),


def _swiglu_gradient(made_of, slope_of, to_made, *, rows, tile, columns, width):
  row, start = pl.program_id(0) * tile, pl.program_id(1) * columns
  inside = (row + jnp.arange(tile) < rows)[:, None] & (start + jnp.arange(columns) < width)[None]
  gates, values = ((pl.ds(row, tile), pl.ds(first + start, columns)) for first in (0, width))
  gate, value, slope = _read(made_of, gates, inside), _read(made_of, values, inside), _read(slope_of, gates, inside)
  share = 1 / (1 + _exp(-gate))
  _write(to_made, gates, inside, slope * value * share * (1 + gate * (1 - share)))
  _write(to_made, values, inside, slope * (gate * share))


def gelu_slope(z: jax.Array, tanh: Callable) -> jax.Array:
  """The derivative of z (1 + tanh u) / 2, u = a (z + b z^3), which gelu_tanh is."""
  square = z * z
  turn = tanh(z * (GELU_SLOPE + GELU_SLOPE * GELU_CUBE * square))
  gate = 0.5 * (1 + turn)
  # in this order it is 0 far below, not 0 times infinity
  return gate + gate * (1 - turn) * z * (GELU_SLOPE + 3 * GELU_SLOPE * GELU_CUBE * square)


def _tiles(x) -> tuple[int, int, int]:
  """Rows that there are, rows of a tile, and its columns: powers of two, as Triton wants them."""
  columns = pl.next_power_of_2(x.shape[-1])
  return math.prod(x.shape[:-1]), max(1, TILE // columns), columns


def _warps(numbers: int) -> int:
  return max(1, min(8, numbers // 512))


def _place(number, rows, tile, columns, width):
  """A tile's slices, and which of its places are inside of the array."""
  at = number * tile + jnp.arange(tile)
  return (pl.ds(number * tile, tile), pl.ds(0, columns)), (at < rows)[:, None] & (jnp.arange(columns) < width)[None]


def _read(ref, place, inside):
  return triton.load(ref.at[place], mask=inside, other=0.0).astype(jnp.float32)


def _write(ref, place, inside, value):
  triton.store(ref.at[place], value.astype(ref.dtype), mask=inside)


def _vector(ref, columns, width):
  return triton.load(ref.at[pl.ds(0, columns)], mask=jnp.arange(columns) < width, other=0.0)


def _standard(x, inside, width, eps, rms):
  """x with mean 0, unless rms, and mean square 1; and what it was multiplied with."""
  if not rms:
    x = jnp.where(inside, x - jnp.sum(x, 1, keepdims=True) / width, 0.0)
  deviation = jax.lax.rsqrt(jnp.sum(x * x, 1, keepdims=True) / width + eps)
  return jnp.where(inside, x * deviation, 0.0), deviation
