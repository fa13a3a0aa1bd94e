"""What stands between the two products of an MLP."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from lab.nn import kernels, target


def gelu_tanh(x: jax.Array) -> jax.Array:
  """x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + .044715 x^3) (arXiv 1606.08415): quicker, on a GPU."""
  z = x.astype(jnp.float32)
  return (z * jax.nn.sigmoid(2 * kernels.GELU_SLOPE * (z + kernels.GELU_CUBE * z * z * z))).astype(x.dtype)


ACTIVATIONS = {
    'gelu': functools.partial(nn.gelu, approximate=False),     # with the exact erf (arXiv 1606.08415)
    'gelu_tanh': gelu_tanh,
    'relu2': lambda x: jnp.square(nn.relu(x)),                 # So et al. 2021, arXiv 2109.08668
    'geglu': functools.partial(nn.gelu, approximate=False),    # of the gate (Shazeer 2020, arXiv 2002.05202)
    'swiglu': nn.silu,                                         # the same
}
GATED = ('geglu', 'swiglu')


def activated(name: str, made: list[jax.Array], biases: list[jax.Array | None], cublas: bool = False) -> jax.Array:
  """The activation of a product [B, S, F] with its bias f32[F]; with GATED of the first, times the second.

  cublas: on a GPU the product is cuBLASLt's, which can do gelu_tanh as well.

  Kept for the backward pass is what goes in, which the products have written anyway; of gelu_tanh with the bias, which
  a GPU's product adds itself. Of gelu_tanh reverse-mode derivatives only.
  """
  if name == 'gelu_tanh':
    (x,), (bias,) = made, biases
    return _gelu_tanh(x, jnp.zeros(x.shape[-1]) if bias is None else bias, cublas)
  return _other(name, made, biases)


def takes_joined(name: str, x: jax.Array) -> bool:
  """Whether an MLP of x [B, S, D] without biases has a product for both halves, and `swiglu` of that."""
  return name == 'swiglu' and target.nvidia() and kernels.takes(len(x))


@jax.custom_vjp
def swiglu(made: jax.Array) -> jax.Array:
  """silu(g) u (Shazeer 2020, arXiv 2002.05202) of made [B, S, 2F], g and u side by side, computed in float32.

  The gradient is side by side as well, so that one product takes it on. Reverse-mode derivatives only.
  """
  gate, value = (half.astype(jnp.float32) for half in jnp.split(made, 2, -1))
  return (nn.silu(gate) * value).astype(made.dtype)


swiglu.defvjp(lambda made: (swiglu(made), made), lambda made, slope: tuple(
    kernels.choose(_plain_swiglu_gradient, kernels.swiglu_gradient, (made, slope))))


def _plain_swiglu_gradient(made, slope):
  gate, value, slope = (x.astype(jnp.float32) for x in (*jnp.split(made, 2, -1), slope))
  share = nn.sigmoid(gate)
  # in this order both are 0 far below, not infinity times 0
  halves = slope * value * share * (1 + gate * (1 - share)), slope * (gate * share)
  return jnp.concatenate(halves, -1).astype(made.dtype),


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _other(name, made, biases):
  made = [x if bias is None else _biased(x, bias) for x, bias in zip(made, biases)]
  y = ACTIVATIONS[name](made[0])
  return y * made[1] if name in GATED else y


def _biased(x, bias):
  return x + bias.astype(x.dtype)[(None,) * (x.ndim - 1)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gelu_tanh(x, bias, cublas):
  return _forward(x, bias, cublas)[0]


def _forward(x, bias, cublas):
  z = _biased(x, bias)
  return jax.lax.platform_dependent(z, cuda=_epilogue, default=gelu_tanh) if cublas else gelu_tanh(z), z


def _epilogue(z):
  """gelu_tanh in the words that XLA knows it by, so that one product gives it and z, computed in float32.

  Left alone, each step of this would be rounded as z is, which for z far below 0 leaves little.
  """
  inner = (z + z * (z * z) * kernels.GELU_CUBE) * kernels.GELU_SLOPE
  return z * ((jnp.tanh(inner) + 1) * 0.5)


def _backward(cublas, z, slope):
  del cublas
  return tuple(kernels.choose(_plain_gradient, kernels.gelu_gradient, (z, slope), sums=1))


_gelu_tanh.defvjp(_forward, _backward)


def _plain_gradient(z, slope):
  turned = slope.astype(jnp.float32) * kernels.gelu_slope(z.astype(jnp.float32), jnp.tanh)
  return turned.astype(z.dtype), turned.sum(tuple(range(z.ndim - 1)))
