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
  def __call__(self, x: jax.Array, y: jax.Array, shift: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """x f32[B, ...D], y [B, ...D] -> the stream that goes on f32[B, ...D], and the norm in y's dtype.

    shift f32[D], the bias of the product that y is, is added to y here: so its gradient is one pass less.
    """
    width = x.shape[-1:]
    scale = self.param('scale', nn.initializers.ones_init(), width, jnp.float32)
    biased = self.use_bias and not self.rms
    bias = self.param('bias', nn.initializers.zeros_init(), width, jnp.float32) if biased else jnp.zeros(width)
    return add_norm(x, y, shift, scale, bias, self.eps, self.rms, self.post)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def add_norm(x, y, shift, scale, bias, eps, rms, post):
  """What AddNorm computes, of its parameters scale and bias f32[D]."""
  return _forward(x, y, shift, scale, bias, eps, rms, post)[0]


def _forward(x, y, shift, scale, bias, eps, rms, post):
  options = {'eps': eps, 'rms': rms, 'post': post}
  vectors = (scale, bias) if shift is None else (shift, scale, bias)
  total, stream, branch = kernels.choose(
      functools.partial(_plain, **options), functools.partial(kernels.add_norm, **options), (x, y), vectors)
  return (stream if post else total, branch), (total, shift, scale)


def _backward(eps, rms, post, kept, slopes):
  total, shift, scale = kept
  shifted = shift is not None
  options = {'eps': eps, 'rms': rms, 'post': post, 'shifted': shifted}
  to_x, to_y, vectors = kernels.choose(
      functools.partial(_plain_gradient, **options), functools.partial(kernels.add_norm_gradient, **options),
      (total, *slopes), (scale,), sums=1)
  return to_x, to_y, *(vectors if shifted else (None, *vectors))


add_norm.defvjp(_forward, _backward)


def _standard(x, eps, rms):
  """x with mean 0, unless rms, and mean square 1; and what it was multiplied with."""
  if not rms:
    x = x - x.mean(-1, keepdims=True)
  deviation = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
  return x * deviation, deviation


def _plain(x, y, *vectors, eps, rms, post):
  lead = (None,) * (x.ndim - 1)
  *shift, scale, bias = vectors
  x = x + (y.astype(jnp.float32) + shift[0][lead] if shift else y.astype(jnp.float32))
  norm = _standard(x, eps, rms)[0] * scale[lead] + bias[lead]
  return x, norm if post else None, norm.astype(y.dtype)


def _plain_gradient(x, onward, slope, scale, *, eps, rms, post, shifted):
  dtype, slope = slope.dtype, slope.astype(jnp.float32)
  slope = slope + onward if post else slope
  y, deviation = _standard(x, eps, rms)
  steep = slope * scale[(None,) * (x.ndim - 1)]
  turned = steep - y * (steep * y).mean(-1, keepdims=True)
  turned = (turned if rms else turned - steep.mean(-1, keepdims=True)) * deviation
  turned = turned if post else turned + onward
  axes = tuple(range(x.ndim - 1))
  vectors = (turned, slope * y, slope) if shifted else (slope * y, slope)
  return turned, turned.astype(dtype), jnp.stack([each.sum(axes) for each in vectors])
