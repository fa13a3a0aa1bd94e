"""SimVP: all frames at once, by a spatial encoder, a translator over time and channels, and a decoder.

Gao et al. 2022, arXiv 2206.05099, with the gated attention of SimVPv2 (Tan et al. 2022, arXiv 2211.12509). Layers are
as in the authors' code; but where it has BatchNorm there is GroupNorm, because examples must not mix: a forecast would
depend on what else is in its batch, on padding, on how many devices share it and in how many parts it is accumulated.

Maps are channels-last. Convolutions run in the dtype of the configuration; norms, residual sums and the readout are
float32.
"""

import math
from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from lab.systems.video import cells

LAYER_SCALE = 1e-2   # of a branch, at the start
MLP_RATIO = 8        # inner channels of a block's second branch
GROUPS = 8           # of the translator's norms


def _conv(features: int, side: int, dtype, name: str, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv:
  # padded alike on both sides, as the authors' code does
  pad = dilation * (side - 1) // 2
  return nn.Conv(features, (side, side), stride, [(pad, pad)] * 2, kernel_dilation=dilation, feature_group_count=groups,
                 dtype=dtype, name=name)


def _norm(channels: int, groups: int, name: str) -> nn.GroupNorm:
  return nn.GroupNorm(math.gcd(groups, channels), epsilon=1e-5, dtype=jnp.float32, name=name)


class Spatial(nn.Module):
  """A 3x3 convolution, GroupNorm(2), SiLU: [N, H, W, C] -> f32[N, H', W', features]; sides halve, stay or double."""
  features: int
  change: str     # half, same or double
  dtype: Any

  @nn.compact
  def __call__(self, x):
    if self.change == 'double':
      x = cells.depth_to_space(_conv(4 * self.features, 3, self.dtype, 'conv')(x), 2)
    else:
      x = _conv(self.features, 3, self.dtype, 'conv', stride=2 if self.change == 'half' else 1)(x)
    return nn.silu(_norm(self.features, 2, 'norm')(x))


class Attention(nn.Module):
  """A large kernel in parts, gating itself: [N, h, w, C] -> [N, h, w, C] (SimVPv2, equation 5)."""
  dtype: Any

  @nn.compact
  def __call__(self, x):
    channels = x.shape[-1]
    y = nn.gelu(_conv(channels, 1, self.dtype, 'before')(x), approximate=False)
    y = _conv(channels, 5, self.dtype, 'near', groups=channels)(y)
    y = _conv(channels, 7, self.dtype, 'far', dilation=3, groups=channels)(y)
    value, gate = jnp.split(_conv(2 * channels, 1, self.dtype, 'mix')(y), 2, -1)
    return _conv(channels, 1, self.dtype, 'after')(nn.sigmoid(gate) * value) + x


class Block(nn.Module):
  """Gated attention, then an MLP with a depthwise 3x3: f32[N, h, w, C] -> f32[N, h, w, features].

  Each branch is scaled by a learnt number a channel and added to what it saw; a 1x1 convolution changes the channels.
  """
  features: int
  dtype: Any

  @nn.compact
  def __call__(self, x):
    channels = x.shape[-1]
    y = Attention(self.dtype, name='attention')(_norm(channels, GROUPS, 'norm0')(x))
    x = x + self._scale('scale0', y)
    inner = MLP_RATIO * channels
    y = _conv(inner, 1, self.dtype, 'up')(_norm(channels, GROUPS, 'norm1')(x))
    y = nn.gelu(_conv(inner, 3, self.dtype, 'depthwise', groups=inner)(y), approximate=False)
    x = x + self._scale('scale1', _conv(channels, 1, self.dtype, 'down')(y))
    if channels != self.features:
      x = _conv(self.features, 1, self.dtype, 'change')(x).astype(jnp.float32)
    return x

  def _scale(self, name: str, y):
    scale = self.param(name, nn.initializers.constant(LAYER_SCALE), y.shape[-1:], jnp.float32)
    return cells.row(scale, y) * y.astype(jnp.float32)


class SimVP(nn.Module):
  """f32[B, P, S, S] -> logits f32[B, n, S, S]. Of the model section only kind, dtype, hid_s, hid_t, n_s, n_t apply."""
  model: Any        # the frozen section config.model
  past: int         # P
  activate: Callable
  multiply: float
  bias: float       # of the readout, at the start

  def setup(self):
    m, dtype = self.model, jnp.dtype(self.model.dtype)
    halves = [i % 2 == 1 for i in range(m.n_s)]
    self.encoder = [Spatial(m.hid_s, 'half' if half else 'same', dtype) for half in halves]
    widths = [m.hid_t] * (m.n_t - 1) + [self.past * m.hid_s]
    self.translator = [Block(width, dtype) for width in widths]
    self.decoder = [Spatial(m.hid_s, 'double' if half else 'same', dtype) for half in reversed(halves)]
    self.readout = nn.Dense(1, bias_init=nn.initializers.constant(self.bias), dtype=jnp.float32)

  def frames(self, past: jax.Array) -> jax.Array:
    """f32[B, P, S, S] -> logits of the next P frames."""
    batch, steps, side, _ = past.shape
    x = past.reshape(batch * steps, side, side, 1)
    for i, layer in enumerate(self.encoder):
      x = layer(x)
      skip = x if i == 0 else skip
    _, h, w, c = x.shape
    # time beside channels: [B, P, h, w, C] -> [B, h, w, P C]
    x = jnp.moveaxis(x.reshape(batch, steps, h, w, c), 1, 3).reshape(batch, h, w, steps * c)
    for block in self.translator:
      x = block(x)
    x = jnp.moveaxis(x.reshape(batch, h, w, steps, c), 3, 1).reshape(batch * steps, h, w, c)
    for i, layer in enumerate(self.decoder):
      x = layer(x + skip if i == len(self.decoder) - 1 else x)
    return self.multiply * self.readout(x).reshape(batch, steps, side, side)

  def __call__(self, past: jax.Array, lengths: dict, truth: dict | None = None, use: dict | None = None) -> dict:
    """{'pred': (logits f32[B, n, S, S], None), 'encoder': None} for lengths {'pred': n}; truth and use go unread.

    The network gives P frames; for more it is run again on those (activated) that it gave, for fewer they are cut.
    The places of the states that Seq2Frames returns hold None: there are none.
    """
    if set(lengths) != {'pred'}:
      raise ValueError(f"lengths = {lengths}: simvp only has the head 'pred'")
    runs = -(-lengths['pred'] // self.past)
    if runs == 1:
      logits = self.frames(past)
    else:
      def again(network, frames, _):
        logits = network.frames(frames)
        return network.activate(logits), logits
      roll = nn.scan(again, variable_broadcast='params', split_rngs={'params': False}, length=runs, out_axes=1)
      _, logits = roll(self, past, None)                    # [B, runs, P, S, S]
      logits = logits.reshape(past.shape[0], runs * self.past, *past.shape[2:])
    return {'pred': (logits[:, :lengths['pred']], None), 'encoder': None}
