"""Products with kernels, and loops over time that multiply for a kernel's gradient once, after their last step.

Differentiated in reverse, a loop carries the gradient of every kernel in it and adds to it in each step. For wide
layers and small batches that moves more bytes than all else: a step reads and writes each gradient in float32, and
reads the kernel itself in bfloat16. Yet the gradient is a sum over steps of x_t^T g_t, of what the product was given
and of the gradient of what it gave. So `over_time` keeps x_t and g_t, and multiplies all of them when the loop is done.

For that a loop must know its products: all arrays that its body reads come in one tree, with an `Affine` for every
kernel. In this way a body may hold any number of them, whatever they are for, and needs no derivative of its own.
"""

import dataclasses
import functools
import math
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp


class Window(NamedTuple):
  """How a convolution goes over its input; dilate puts zeros between its cells, as a transposed one needs."""
  stride: int = 1
  padding: Any = 'SAME'
  dilate: int = 1


def mirror(kernel: int, stride: int, side: int, size: int) -> Window:
  """The shape of a VALID convolution undone: of a kernel of so many cells a side, from maps of `side` to `size` cells.

  Where the stride left rest = size - ((side - 1) stride + kernel) cells at the end unseen, those become zeros.
  """
  rest = size - ((side - 1) * stride + kernel)
  return Window(1, ((kernel - 1, kernel - 1 + rest),) * 2, stride)


def static(**default):
  """A field of a tree's dataclass that is no array."""
  return dataclasses.field(metadata={'static': True}, **default)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Affine:
  """x -> x W + b, f32[..., D] -> f32[..., N]; with a window a convolution, [..., m, m, C] -> [..., m', m', N].

  Factors are rounded to dtype, sums are float32. The product is rounded to dtype once more, as the gradient of x is,
  which halves what is written; if exact, it is not: logits keep their digits. The kernel's gradient is never rounded
  where it is a dense one. Reverse-mode derivatives only.
  """
  kernel: jax.Array              # f32[D, N] or f32[k, k, C, N]
  bias: jax.Array | None         # f32[N]
  dtype: Any = static()
  exact: bool = static(default=False)
  window: Window | None = static(default=None)

  def __call__(self, x: jax.Array) -> jax.Array:
    return _apply(self, x)

  def over_time(self, x: jax.Array) -> jax.Array:
    """The same of a stack [T, B, ...]."""
    return _batch_first(self, self(_batch_first(self, x)))


def row(vector: jax.Array, like: jax.Array) -> jax.Array:
  """[C] with axes of 1 before it, as many as `like` has."""
  return vector.reshape((1,) * (like.ndim - 1) + (-1,))


def _apply_plain(affine: Affine, x: jax.Array) -> jax.Array:
  y = _multiply(affine, x.astype(affine.dtype), affine.kernel.astype(affine.dtype)).astype(jnp.float32)
  return y if affine.bias is None else y + row(affine.bias, y)


_apply = jax.custom_vjp(_apply_plain)


def _apply_forward(affine, x):
  affine = _cast(affine)
  return _apply_plain(affine, x), (affine, x.astype(affine.dtype))


def _apply_backward(kept, g):
  affine, x = kept
  return _gradient(affine, x, g), _pull(affine, g, x.shape)


_apply.defvjp(_apply_forward, _apply_backward)


def _cast(affine: Affine) -> Affine:
  return dataclasses.replace(affine, kernel=affine.kernel.astype(affine.dtype))


def _multiply(affine: Affine, x: jax.Array, kernel: jax.Array) -> jax.Array:
  """The product of factors in affine.dtype."""
  if affine.window is None:
    return jnp.dot(x, kernel, preferred_element_type=jnp.float32 if affine.exact else affine.dtype)
  stride, padding, dilate = affine.window
  lead = x.shape[:-3]
  # the batch comes first of the axes that become one, which keeps a split batch split
  y = jax.lax.conv_general_dilated(
      x.reshape(math.prod(lead), *x.shape[-3:]), kernel, (stride,) * 2, padding, lhs_dilation=(dilate,) * 2,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
  return y.reshape(*lead, *y.shape[1:])


def _pull(affine: Affine, g: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The gradient of an input of that shape, of a kernel in affine.dtype; rounded to it before it is multiplied."""
  g, kernel = g.astype(affine.dtype), affine.kernel
  if affine.window is None:
    x = jax.lax.dot_general(g, kernel, (((g.ndim - 1,), (1,)), ((), ())))
  else:
    back = jax.linear_transpose(lambda x: _multiply(affine, x, kernel), jax.ShapeDtypeStruct(shape, affine.dtype))
    x, = back(g)
  return x.astype(jnp.float32)


def _gradient(affine: Affine, x: jax.Array, g: jax.Array) -> Affine:
  """The gradients f32 of kernel and bias, sums over all leading axes; a convolution's x and g have the batch first."""
  bias = None if affine.bias is None else g.sum(tuple(range(g.ndim - 1)), dtype=jnp.float32)
  g = g.astype(affine.dtype)
  if affine.window is None:
    lead = tuple(range(x.ndim - 1))
    kernel = jax.lax.dot_general(x, g, ((lead, lead), ((), ())), preferred_element_type=jnp.float32)
  else:
    back = jax.linear_transpose(lambda kernel: _multiply(affine, x, kernel), affine.kernel)
    kernel, = back(g)
  return dataclasses.replace(affine, kernel=kernel.astype(jnp.float32), bias=bias)


def _batch_first(affine: Affine, stack: jax.Array) -> jax.Array:
  """A stack [T, B, ...] as `_multiply` wants it, and back: a dense product takes its leading axes as they are."""
  return stack if affine.window is None else jnp.swapaxes(stack, 0, 1)


class _Tap:
  """Stands for an Affine in a loop, is called once, and notes of what. Its gradient goes to `slot`, not to a kernel."""

  def __init__(self, affine: Affine, slot: jax.Array | None):
    self.affine, self.slot, self.seen, self.made = affine, slot, None, None

  def __call__(self, x):
    if self.seen is not None:
      raise ValueError('a product of a loop is made twice in a step: give it an Affine for each')
    self.seen = x.astype(self.affine.dtype)
    y = self.affine(x) if self.slot is None else _tapped(x.shape, self.affine, x, self.slot)
    self.made = y.astype(self.affine.dtype)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(shape, affine, x, slot):
  """affine(x); the slot, of the product's shape, is there for the gradient that it gets."""
  del shape, slot
  return _apply_plain(affine, x)


def _tapped_backward(shape, affine, g):
  return None, _pull(affine, g, shape), g.astype(affine.dtype)


_tapped.defvjp(lambda shape, affine, x, slot: (_apply_plain(affine, x), affine), _tapped_backward)


def over_time(body: Callable, steps: int, unroll: int, network, state, xs):
  """jax.lax.scan along the second axis: body(network, state, x [B, ...]) -> (state, y); xs and ys of [B, T, ...].

  unroll: steps of an iteration. With all of them in one there is no loop, and no copies into and out of its stacks.

  network is a tree with all arrays that the body reads, those of its products as Affine. Each is called once a step.
  Kernels are rounded to their dtype once, before the loop. Reverse-mode derivatives only.
  """
  first = lambda tree: jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)
  state, ys = scan(body, steps, unroll, network, state, first(xs))
  return state, first(ys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def scan(body: Callable, steps: int, unroll: int, network, state, xs):
  """`over_time` with the time as the first axis of xs and ys."""
  return jax.lax.scan(functools.partial(body, _round(network)), state, xs, length=steps, unroll=unroll)


def _is_affine(leaf) -> bool:
  return isinstance(leaf, Affine)


def _round(network):
  """With rounded kernels, which the compiler may not make anew for each step, as it does where there is no loop."""
  rounded = jax.tree.map(lambda leaf: _cast(leaf) if _is_affine(leaf) else leaf, network, is_leaf=_is_affine)
  return jax.lax.optimization_barrier(rounded)


def _split(network):
  """(its Affines, its other arrays, what makes a tree like it of two such lists)."""
  leaves, tree = jax.tree.flatten(network, is_leaf=_is_affine)
  ours = [_is_affine(leaf) for leaf in leaves]

  def join(affines, rest):
    affines, rest = iter(affines), iter(rest)
    return tree.unflatten([next(affines if affine else rest) for affine in ours])

  return [x for x, affine in zip(leaves, ours) if affine], [x for x, affine in zip(leaves, ours) if not affine], join


def _scan_forward(body, steps, unroll, network, state, xs):
  network = _round(network)
  affines, rest, join = _split(network)

  def tapped(rest, state, x, slots):
    taps = [_Tap(affine, slot) for affine, slot in zip(affines, slots)]
    return *body(join(taps, rest), state, x), taps

  def products(state, xs):
    taps = tapped(rest, state, jax.tree.map(lambda leaf: leaf[0], xs), [None] * len(affines))[2]
    return [tap.made for tap in taps]

  def run(rest, state, xs, slots):
    def step(state, now):
      state, y, taps = tapped(rest, state, *now)
      return state, (y, [tap.seen for tap in taps])
    state, (ys, seen) = jax.lax.scan(step, state, (xs, slots), length=steps, unroll=unroll)
    return (state, ys), seen

  slots = [jnp.zeros((steps, *made.shape), made.dtype) for made in jax.eval_shape(products, state, xs)]
  made, back, seen = jax.vjp(run, rest, state, xs, slots, has_aux=True)
  return made, (back, seen, network)


def _scan_backward(body, steps, unroll, kept, cotangent):
  del body, steps, unroll
  back, seen, network = kept
  affines, _, join = _split(network)
  rest, state, xs, slots = back(cotangent)
  found = [_gradient(affine, _batch_first(affine, x), _batch_first(affine, g))
           for affine, x, g in zip(affines, seen, slots)]
  return join(found, rest), state, xs


scan.defvjp(_scan_forward, _scan_backward)
