"""Recurrent cells, and layers of them over time, as pure functions over trees of parameters.

Products are rounded to the layer's dtype and come back as float32 (lab/systems/video/products.py); gates are rounded
before a cell gets them, carries and everything else are float32. Maps are channels-last.

A gate's parameters are side by side on the last axis: i, f, g, o of an LSTM; r, z, n of a GRU.
"""

import dataclasses
import functools
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp

from lab.systems.video import lstm, products
from lab.systems.video.products import row, static

Carry = tuple[jax.Array, ...]   # (h, c) or (h,), each f32[B, width] or f32[B, m, m, channels]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
  """The parameters of a recurrent layer: a key of CELLS, and the dtype of its products.

  input is f32[D, N] or f32[k, k, C, N], or f32[0, N] where the layer is fed nothing; vectors are the cell's own.
  """
  cell: str = static()
  dtype: Any = static()
  input: jax.Array
  recurrent: jax.Array           # f32[W, N] or f32[k, k, W, N]
  bias: jax.Array                # f32[N]
  vectors: dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
  """What a step of a layer reads: its products, a kernel each, whose sum or sequence are the gates."""
  cell: str = static()
  dtype: Any = static()
  kernels: tuple[products.Affine, ...]
  vectors: dict[str, jax.Array]


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


def long_short(vectors: dict, carry: Carry, gates: jax.Array) -> Carry:
  """lstm.step, with peepholes where vectors has them.

  With a 4-d recurrent kernel it is the ConvLSTM of Shi et al. 2015 (arXiv 1506.04214), without peepholes.
  """
  peepholes = jnp.stack([vectors[f'peephole_{gate}'] for gate in 'ifo']) if vectors else None
  return lstm.step(peepholes, carry[1], gates)


@jax.checkpoint      # in an unrolled loop too, so it may not be taken for what was there before
def gru(vectors: dict, carry: Carry, seen: jax.Array, recalled: jax.Array) -> Carry:
  """r, z sigmoid; n = tanh(x_n + r (U_n h + b)), h' = (1 - z) n + z h (Cho et al. 2014, arXiv 1406.1078).

  The reset comes after the recurrent product, as in cuDNN; hence the bias of its own there, 'recurrent_bias', and the
  gates in two parts: of the input, and of the state.
  """
  (h,) = carry
  x_r, x_z, x_n = jnp.split(seen.astype(jnp.float32), 3, -1)
  h_r, h_z, h_n = jnp.split(recalled.astype(jnp.float32), 3, -1)
  z = jax.nn.sigmoid(x_z + h_z)
  n = jnp.tanh(x_n + jax.nn.sigmoid(x_r + h_r) * (h_n + row(vectors['recurrent_bias'], h_n)))
  return ((1 - z) * n + z * h,)


class Cell(NamedTuple):
  """(vectors, carry, gates in the layer's dtype) -> carry; how many gates it has, and arrays its carry.

  Whether the input's part of the gates and the state's are added to each other, or come one after the other.
  """
  step: Callable[..., Carry]
  gates: int
  carries: int
  adds: bool


CELLS = {
    'lstm': Cell(long_short, 4, 2, True),
    'peephole': Cell(long_short, 4, 2, True),
    'gru': Cell(gru, 3, 1, False),
    'convlstm': Cell(long_short, 4, 2, True),
}


def _affine(layer: Layer, kernel: jax.Array, bias: jax.Array | None = None) -> products.Affine:
  return products.Affine(kernel, bias, layer.dtype, window=products.Window() if kernel.ndim == 4 else None)


def _awaiting(layer: Layer) -> Step:
  """A step to which the input's part of the gates is given."""
  return Step(layer.cell, layer.dtype, (_affine(layer, layer.recurrent),), layer.vectors)


def joined(layer: Layer) -> Step:
  """A step to which the input is given: x W + h U is one product of x beside h, where the cell adds the two."""
  if not CELLS[layer.cell].adds:
    kernels = _affine(layer, layer.input, layer.bias), _affine(layer, layer.recurrent)
  else:
    kernel = jnp.concatenate([layer.input, layer.recurrent], -2) if layer.input.size else layer.recurrent
    kernels = (_affine(layer, kernel, layer.bias),)
  return Step(layer.cell, layer.dtype, kernels, layer.vectors)


def _turn(step: Step, carry: Carry, *gates: jax.Array) -> Carry:
  """The carry after a step, of all parts of its gates.

  They are rounded here, and what the cell makes of them is made again for its gradient: a step then keeps half of its
  gates' bytes for that, and not the dozen arrays of float32 that all the sigmoids and products would.
  """
  cell = CELLS[step.cell]
  if cell.adds:
    gates = (functools.reduce(jnp.add, gates),)
  return cell.step(step.vectors, carry, *(part.astype(step.dtype) for part in gates))


def advance(steps: list[Step], carries: tuple[Carry, ...], x: jax.Array) -> tuple[Carry, ...]:
  """One step of all layers, the lowest first; x [B, ...] is the input of the lowest, the others are `joined`."""
  out = []
  for step, carry in zip(steps, carries):
    if CELLS[step.cell].adds:
      gates = (step.kernels[0](jnp.concatenate([x, carry[0]], -1)),)
    else:
      gates = step.kernels[0](x), step.kernels[1](carry[0])
    carry = _turn(step, carry, *gates)
    out.append(carry)
    x = carry[0]
  return tuple(out)


def sweep(layers: list[Layer], carries: tuple[Carry, ...], x: jax.Array, unroll: int):
  """All steps of a layer, then of the next, so that its input is projected in one product before its loop.

  x is f32[B, T, D] or f32[B, T, m, m, C]; D or C may be 0; unroll: steps of an iteration, see products.over_time.
  -> (carries, h of the top layer f32[B, T, ...]).
  """
  def body(step, carry, gates):
    carry = _turn(step, carry, gates, step.kernels[0](carry[0]))
    return carry, carry[0]

  out, x = [], jnp.swapaxes(x, 0, 1)
  for layer, carry in zip(layers, carries):
    # rounded, for all steps of them are written and read, and their gradients too
    gates = _affine(layer, layer.input, layer.bias).over_time(x).astype(layer.dtype)
    carry, x = products.scan(body, len(x), unroll, _awaiting(layer), carry, gates)
    out.append(carry)
  return tuple(out), jnp.swapaxes(x, 0, 1)


def climb(layers: list[Layer], carries: tuple[Carry, ...], xs: jax.Array, unroll: int,
          embed: Callable = lambda weights, x: x, weights=()):
  """What `sweep` does, one step of all layers after the other, as an explicit cell would.

  The lowest layer is fed embed(weights, x) of each x [B, ...] of xs [B, T, ...].
  """
  def body(network, carries, x):
    steps, weights = network
    carries = advance(steps, carries, embed(weights, x))
    return carries, carries[-1][0]

  network = [joined(layer) for layer in layers], weights
  return products.over_time(body, xs.shape[1], unroll, network, carries, xs)
