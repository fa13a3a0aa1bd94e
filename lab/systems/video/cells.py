"""Recurrent cells and the layers around them, as pure functions over dictionaries of parameters.

Products and convolutions run in the layer's dtype and come back as float32 (the units accumulate in float32 and round
their result); gates, carries and everything else are float32. Maps are channels-last.

A gate's parameters are side by side on the last axis: i, f, g, o of an LSTM; r, z, n of a GRU.
"""

import math
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

Carry = tuple[jax.Array, ...]   # (h, c) or (h,), each f32[B, width] or f32[B, m, m, channels]


class Layer(NamedTuple):
  """A recurrent layer: a key of CELLS, its parameters (input, recurrent, bias, ...) and the dtype of its products."""
  cell: str
  weights: dict[str, jax.Array]
  dtype: Any


def product(x: jax.Array, kernel: jax.Array, dtype) -> jax.Array:
  """f32[..., D] x [D, N] -> f32[..., N]; or, with a kernel [k, k, C, N], a 'same' convolution of [..., m, m, C]."""
  if kernel.ndim == 4:
    return over_leading(lambda x: convolve(x, kernel, 1, 'SAME', dtype), x, 3)
  # rounded to dtype and cast back, because with preferred_element_type the products of the gradient would be float32
  return jnp.dot(x.astype(dtype), kernel.astype(dtype)).astype(jnp.float32)


def convolve(x: jax.Array, kernel: jax.Array, stride: int, padding, dtype, dilate: int = 1) -> jax.Array:
  """f32[N, H, W, C] -> f32[N, H', W', C']; dilate puts zeros between the cells of x, as transposed ones need."""
  return jax.lax.conv_general_dilated(
      x.astype(dtype), kernel.astype(dtype), (stride,) * 2, padding, lhs_dilation=(dilate,) * 2,
      dimension_numbers=('NHWC', 'HWIO', 'NHWC')).astype(jnp.float32)


def deconvolve(x: jax.Array, kernel: jax.Array, stride: int, size: int, dtype) -> jax.Array:
  """The shape of a VALID convolution undone: f32[N, m, m, C] -> f32[N, size, size, C'].

  Where the stride left rest = size - ((m - 1) stride + k) px at the end unseen, those become zeros here.
  """
  side = kernel.shape[0]
  rest = size - ((x.shape[1] - 1) * stride + side)
  return convolve(x, kernel, 1, [(side - 1, side - 1 + rest)] * 2, dtype, dilate=stride)


def row(vector: jax.Array, like: jax.Array) -> jax.Array:
  """[C] with axes of 1 before it, as many as `like` has."""
  return vector.reshape((1,) * (like.ndim - 1) + (-1,))


def over_leading(f: Callable, x: jax.Array, keep: int) -> jax.Array:
  """f of x [..., *keep axes] with the axes before them made one; batch first, which keeps a split batch split."""
  lead = x.shape[:x.ndim - keep]
  y = f(x.reshape(math.prod(lead), *x.shape[x.ndim - keep:]))
  return y.reshape(*lead, *y.shape[1:])


def space_to_depth(x: jax.Array, side: int) -> jax.Array:
  """[..., H, W, C] -> [..., H / side, W / side, side^2 C]."""
  *lead, h, w, c = x.shape
  x = x.reshape(*lead, h // side, side, w // side, side, c)
  return jnp.moveaxis(x, -4, -3).reshape(*lead, h // side, w // side, side * side * c)


def depth_to_space(x: jax.Array, side: int) -> jax.Array:
  """[..., h, w, side^2 C] -> [..., side h, side w, C]; undoes space_to_depth."""
  *lead, h, w, c = x.shape
  x = x.reshape(*lead, h, w, side, side, c // side**2)
  return jnp.moveaxis(x, -4, -3).reshape(*lead, h * side, w * side, c // side**2)


def lstm(layer: Layer, carry: Carry, gates: jax.Array) -> Carry:
  """i, f, o sigmoid, g tanh; c' = f c + i g, h' = o tanh(c') (Hochreiter & Schmidhuber 1997; Gers et al. 2000).

  With a 4-d recurrent kernel it is the ConvLSTM of Shi et al. 2015 (arXiv 1506.04214), without peepholes.
  """
  h, c = carry
  i, f, g, o = jnp.split(gates + product(h, layer.weights['recurrent'], layer.dtype), 4, -1)
  c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
  return jax.nn.sigmoid(o) * jnp.tanh(c), c


def peephole(layer: Layer, carry: Carry, gates: jax.Array) -> Carry:
  """An LSTM whose gates see the cell through diagonals: i and f the old, o the new (Graves 2013, arXiv 1308.0850)."""
  h, c = carry
  i, f, g, o = jnp.split(gates + product(h, layer.weights['recurrent'], layer.dtype), 4, -1)
  i = i + row(layer.weights['peephole_i'], c) * c
  f = f + row(layer.weights['peephole_f'], c) * c
  c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
  o = o + row(layer.weights['peephole_o'], c) * c
  return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru(layer: Layer, carry: Carry, gates: jax.Array) -> Carry:
  """r, z sigmoid; n = tanh(x_n + r (U_n h + b)), h' = (1 - z) n + z h (Cho et al. 2014, arXiv 1406.1078).

  The reset comes after the recurrent product, as in cuDNN; hence the bias of its own there, 'recurrent_bias'.
  """
  (h,) = carry
  x_r, x_z, x_n = jnp.split(gates, 3, -1)
  h_r, h_z, h_n = jnp.split(product(h, layer.weights['recurrent'], layer.dtype), 3, -1)
  z = jax.nn.sigmoid(x_z + h_z)
  n = jnp.tanh(x_n + jax.nn.sigmoid(x_r + h_r) * (h_n + row(layer.weights['recurrent_bias'], h_n)))
  return ((1 - z) * n + z * h,)


class Cell(NamedTuple):
  """(layer, carry, gates) -> carry; how many gates it has, and arrays its carry."""
  step: Callable[[Layer, Carry, jax.Array], Carry]
  gates: int
  carries: int


CELLS = {
    'lstm': Cell(lstm, 4, 2),
    'peephole': Cell(peephole, 4, 2),
    'gru': Cell(gru, 3, 1),
    'convlstm': Cell(lstm, 4, 2),
}


def project(layer: Layer, x: jax.Array | None, rank: int) -> jax.Array:
  """What a layer's gates get from its input x [..., D] and its bias; of no input (None), the bias, with `rank` axes."""
  bias = layer.weights['bias']
  if x is None:
    return bias.reshape((1,) * (rank - 1) + (-1,))
  y = product(x, layer.weights['input'], layer.dtype)
  return y + row(bias, y)


def advance(layers: list[Layer], carries: tuple[Carry, ...], x: jax.Array | None) -> tuple[Carry, ...]:
  """One step of all layers, the lowest first; x [B, ...] or None is the input of the lowest."""
  out = []
  for layer, carry in zip(layers, carries):
    carry = CELLS[layer.cell].step(layer, carry, project(layer, x, carry[0].ndim))
    out.append(carry)
    x = carry[0]
  return tuple(out)


def over_time(body: Callable, state, xs, steps: int):
  """jax.lax.scan along the second axis: body(state, x [B, ...]) -> (state, y); xs and ys are trees of [B, T, ...]."""
  first = lambda tree: jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), tree)
  state, ys = jax.lax.scan(body, state, first(xs), length=steps)
  return state, first(ys)


def sweep(layers: list[Layer], carries: tuple[Carry, ...], frames: jax.Array | None, steps: int, embed=None):
  """All steps of a layer, then of the next, so that its input is projected in one product before its loop.

  frames [B, T, S, S], which embed makes features, or None -> (carries, h of the top layer [B, T, ...]).
  """
  out, x = [], None if frames is None else embed(frames)
  for layer, carry in zip(layers, carries):
    gates, step = project(layer, x, carry[0].ndim), CELLS[layer.cell].step

    def body(carry, now, layer=layer, gates=gates, step=step):
      carry = step(layer, carry, gates if now is None else now)
      return carry, carry[0]

    carry, x = over_time(body, carry, None if x is None else gates, steps)
    out.append(carry)
  return tuple(out), x


def climb(layers: list[Layer], carries: tuple[Carry, ...], frames: jax.Array | None, steps: int, embed=None):
  """What `sweep` does, one step of all layers after the other, as an explicit cell would."""
  def body(carries, frame):
    carries = advance(layers, carries, None if frame is None else embed(frame))
    return carries, carries[-1][0]

  return over_time(body, carries, frames, steps)
