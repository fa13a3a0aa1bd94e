"""A stream that is added to, and its norm: what stands between the halves of a Transformer's layers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from lab.nn import kernels


class AddNorm(nn.Module):
  """x + y, and the norm of that: LayerNorm (Ba et al. 2016, arXiv 1607.06450), or by the root mean square alone.

  Parameters and statistics are float32. Reverse-mode derivatives only.
  """
  eps: float
  rms: bool            # RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)
  use_bias: bool       # of LayerNorm; RMSNorm has none
  post: bool           # the norm is what the stream goes on as

  @nn.compact
  def __call__(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x f32[B, ...D], y [B, ...D] -> the stream that goes on f32[B, ...D], and the norm in y's dtype."""
    width = x.shape[-1:]
    scale = self.param('scale', nn.initializers.ones_init(), width, jnp.float32)
    biased = self.use_bias and not self.rms
    bias = self.param('bias', nn.initializers.zeros_init(), width, jnp.float32) if biased else jnp.zeros(width)
    return add_norm(x, y, scale, bias, self.eps, self.rms, self.post)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def add_norm(x, y, scale, bias, eps, rms, post):
  """What AddNorm computes, of its parameters scale and bias f32[D]."""
  return _forward(x, y, scale, bias, eps, rms, post)[0]


def _forward(x, y, scale, bias, eps, rms, post):
  options = {'eps': eps, 'rms': rms, 'post': post}
  total, stream, branch = kernels.choose(
      functools.partial(_plain, **options), functools.partial(kernels.add_norm, **options), (x, y), (scale, bias))
  return (stream if post else total, branch), (total, scale)


def _backward(eps, rms, post, kept, slopes):
  options = {'eps': eps, 'rms': rms, 'post': post}
  total, scale = kept
  to_x, to_y, to_scale, to_bias = kernels.choose(
      functools.partial(_plain_gradient, **options), functools.partial(kernels.add_norm_gradient, **options),
      (total, *slopes), (scale,), sums=2)
  return to_x, to_y, to_scale, to_bias


add_norm.defvjp(_forward, _backward)


def _standard(x, eps, rms):
  """x with mean 0, unless rms, and mean square 1; and what it was multiplied with."""
  if not rms:
    x = x - x.mean(-1, keepdims=True)
  deviation = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
  return x * deviation, deviation


def _plain(x, y, scale, bias, *, eps, rms, post):
  x = x + y.astype(jnp.float32)
  lead = (None,) * (x.ndim - 1)
  norm = _standard(x, eps, rms)[0] * scale[lead] + bias[lead]
  return x, norm if post else None, norm.astype(y.dtype)


def _plain_gradient(x, onward, slope, scale, *, eps, rms, post):
  dtype, slope = slope.dtype, slope.astype(jnp.float32)
  slope = slope + onward if post else slope
  y, deviation = _standard(x, eps, rms)
  steep = slope * scale[(None,) * (x.ndim - 1)]
  turned = steep - y * (steep * y).mean(-1, keepdims=True)
  turned = (turned if rms else turned - steep.mean(-1, keepdims=True)) * deviation
  turned = turned if post else turned + onward
  axes = tuple(range(x.ndim - 1))
  return turned, turned.astype(dtype), (slope * y).sum(axes), slope.sum(axes)
