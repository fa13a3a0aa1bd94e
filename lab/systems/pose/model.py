"""The network: a backbone, then stages that predict part-affinity fields, then stages that predict heatmaps.

Cao et al. 2018, arXiv 1812.08008, section 3.2: three 3x3 convolutions whose outputs are concatenated take the place
of a 7x7 one, and each stage sees the backbone's features and what the stages before it said. Arrays are channels-last.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

SLOPE = 0.25   # of PReLU, at the start

# (name, channels) in order; 'pool' halves the sides
VGG16_7 = (('conv1_1', 64), ('conv1_2', 64), 'pool', ('conv2_1', 128), ('conv2_2', 128), 'pool', ('conv3_1', 256),
           ('conv3_2', 256), ('conv3_3', 256), 'pool')
VGG19_10 = (('conv1_1', 64), ('conv1_2', 64), 'pool', ('conv2_1', 128), ('conv2_2', 128), 'pool', ('conv3_1', 256),
            ('conv3_2', 256), ('conv3_3', 256), ('conv3_4', 256), 'pool', ('conv4_1', 512), ('conv4_2', 512))
# (channels, convolutions) at strides 2, 4, 8, 16, 32; what is deep is small, so most of the weights cost little work
SMALL = ((24, 1), (48, 2), (96, 2), (128, 2), (160, 2))

STRIDE = {'vgg19_10': 8, 'vgg16_7': 8, 'small': 4}      # px a cell
MULTIPLE = {'vgg19_10': 8, 'vgg16_7': 8, 'small': 32}   # of which the picture's side is one

# preprocessing -> (channel order, mean, deviation), in units of uint8 pixels and the order after reordering
PREPROCESS = {
    'imagenet': ((0, 1, 2), (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),   # torchvision: RGB
    'caffe': ((2, 1, 0), (103.939, 116.779, 123.68), (1.0, 1.0, 1.0)),             # Caffe and Keras: BGR
    'unit': ((0, 1, 2), (128.0, 128.0, 128.0), (256.0, 256.0, 256.0)),             # (x - 128) / 256, RGB
}


def stride(config) -> int:
  """px of the picture a cell of the maps; config is the whole configuration."""
  return STRIDE[config.model.backbone]


def make(model, limbs: int, channels: int) -> 'OpenPose':
  """The network of the `model` section of a configuration, with L = limbs fields and K = channels heatmaps."""
  return OpenPose(**model, limbs=limbs, channels=channels)


def preprocess(image: jax.Array, kind: str) -> jax.Array:
  """u8[B, H, W, 3] RGB -> f32[B, H, W, 3] as the weights expect it; kind is a key of PREPROCESS.

  It is not folded into the first convolution, though mean and deviation could be: the border is padded with zeros,
  which must mean the mean colour, and would mean black if the mean sat in the bias.
  """
  order, mean, deviation = PREPROCESS[kind]
  mean, deviation = np.array([[[mean]]], np.float32), np.array([[[deviation]]], np.float32)
  image = image.astype(jnp.float32)
  if order != (0, 1, 2):
    image = image[..., np.array(order)]
  return (image - mean) / deviation


def _channels(values: jax.Array, like: jax.Array) -> jax.Array:
  return values.astype(like.dtype)[None, None, None]


class PReLU(nn.Module):
  """[B, H, W, C]: max(x, 0) + slope min(x, 0) with a learnt slope a channel (He et al. 2015, arXiv 1502.01852)."""

  @nn.compact
  def __call__(self, x):
    slope = self.param('slope', nn.initializers.constant(SLOPE), (x.shape[-1],), jnp.float32)
    return jnp.where(x > 0, x, x * _channels(slope, x))


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
  """max(x, 0), of which the backward pass keeps the result alone: what came in need not be written to memory at all."""
  return jnp.maximum(x, 0)


def _relu_forward(x):
  y = relu(x)
  return y, y


relu.defvjp(_relu_forward, lambda y, slope: (jnp.where(y > 0, slope, 0),))


class Conv(nn.Module):
  """A 'same' convolution, group norm where asked for, and PReLU or ReLU. Its parameters: kernel, bias, norm, prelu."""
  features: int
  size: int
  dtype: Any
  norm: str = 'none'
  stride: int = 1
  prelu: bool = True

  @nn.compact
  def __call__(self, x):
    # He's scale for what follows; without pretrained weights nor norm, anything else fades over some hundred layers
    gain = 2 / (1 + SLOPE**2) if self.prelu else 2.0
    init = nn.initializers.variance_scaling(gain, 'fan_in', 'truncated_normal')
    kernel = self.param('kernel', init, (self.size, self.size, x.shape[-1], self.features), jnp.float32)
    bias = self.param('bias', nn.initializers.zeros, (self.features,), jnp.float32)
    # padded alike on both sides, as PyTorch and Caffe do; 'SAME' would shift strided convolutions by half a pixel
    pad = (self.size - 1) // 2
    x = jax.lax.conv_general_dilated(
        x.astype(self.dtype), kernel.astype(self.dtype), (self.stride,) * 2, [(pad, pad)] * 2,
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
    x = x + _channels(bias, x)
    if self.norm == 'group':
      x = nn.GroupNorm(num_groups=math.gcd(8, self.features), dtype=self.dtype, name='norm')(x)
    return PReLU(name='prelu')(x) if self.prelu else relu(x)


class VGG(nn.Module):
  """The first convolutions of a VGG network (Simonyan & Zisserman 2014, arXiv 1409.1556), then new ones.

  u8-like f32[B, S, S, 3] -> [B, S / 8, S / 8, feature]. The layers that pretrained weights fill have no norm.
  """
  layers: tuple
  fresh: tuple       # (name, channels, size) of the new convolutions
  norm: str
  dtype: Any

  @nn.compact
  def __call__(self, x):
    for layer in self.layers:
      x = _halve(x) if layer == 'pool' else Conv(layer[1], 3, self.dtype, prelu=False, name=layer[0])(x)
    for name, channels, size in self.fresh:
      x = Conv(channels, size, self.dtype, self.norm, name=name)(x)
    return x


class Small(nn.Module):
  """A feature pyramid for training from scratch on a CPU: f32[B, S, S, 3] -> [B, S / 4, S / 4, feature].

  Convolutions down to stride 32, and back up to stride 4 by adding (Lin et al. 2017, arXiv 1612.03144): a cell sees the
  whole picture. S is a multiple of 32.
  """
  feature: int
  norm: str
  dtype: Any

  @nn.compact
  def __call__(self, x):
    levels = []
    for i, (channels, count) in enumerate(SMALL):
      for j in range(count):
        x = Conv(channels, 3, self.dtype, self.norm, stride=2 if j == 0 else 1, name=f'down{i + 1}_{j + 1}')(x)
      levels.append(x)
    up = None
    for i in range(len(SMALL) - 1, 0, -1):
      side = Conv(self.feature, 1, self.dtype, self.norm, name=f'side{i + 1}')(levels[i])
      up = side if up is None else side + _double(up)
    return Conv(self.feature, 3, self.dtype, self.norm, name='out')(up)


def _double(x: jax.Array) -> jax.Array:
  """Each cell four times: [B, H, W, C] -> [B, 2 H, 2 W, C]."""
  return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


def _halve(x: jax.Array) -> jax.Array:
  """2x2 maximum, [B, H, W, C] -> [B, H / 2, W / 2, C]; an odd last row or column is dropped."""
  return _pool(x[:, :x.shape[1] // 2 * 2, :x.shape[2] // 2 * 2])


@jax.custom_vjp
def _pool(x):
  """Of equals the first gets the gradient. It is elementwise, not the select-and-scatter of a pooling operation."""
  return _pool_forward(x)[0]


def _pool_forward(x):
  quarters = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
  y = functools.reduce(jnp.maximum, quarters)
  which = jnp.full(y.shape, 3, jnp.int8)
  for i in (2, 1, 0):
    which = jnp.where(quarters[i] == y, jnp.int8(i), which)
  return y, which


def _pool_backward(which, slope):
  quarter = jnp.arange(4, dtype=jnp.int8).reshape(1, 1, 2, 1, 2, 1)
  x = jnp.where(which[:, :, None, :, None] == quarter, slope[:, :, None, :, None], 0)
  b, h, _, w, _, c = x.shape
  return (x.reshape(b, 2 * h, 2 * w, c),)


_pool.defvjp(_pool_forward, _pool_backward)


class Stage(nn.Module):
  """Blocks of three 3x3 convolutions with concatenated outputs, a 1x1 convolution, and a linear 1x1 output.

  [B, N, N, C] -> f32[B, N, N, outputs].
  """
  outputs: int
  width: int
  head: int
  blocks: int
  norm: str
  dropout: float
  dtype: Any
  train: bool

  @nn.compact
  def __call__(self, x):
    for b in range(self.blocks):
      x = nn.Dropout(self.dropout, deterministic=not self.train)(x)
      x = Block(self.width, self.norm, self.dtype, name=f'block{b}')(x)
    x = Conv(self.head, 1, self.dtype, self.norm, name='head')(x)
    # small at the start, so that the first predictions are near 0 and the first losses near those of no prediction
    return nn.Dense(self.outputs, kernel_init=nn.initializers.normal(0.01), dtype=jnp.float32, name='out')(x)


class Block(nn.Module):
  """Three 3x3 convolutions in sequence, [B, N, N, C] -> [B, N, N, 3 width]: the outputs of all three."""
  width: int
  norm: str
  dtype: Any

  @nn.compact
  def __call__(self, x):
    outputs = []
    for i in range(3):
      x = Conv(self.width, 3, self.dtype, self.norm, name=f'conv{i}')(x)
      outputs.append(x)
    return jnp.concatenate(outputs, -1)


class OpenPose(nn.Module):
  """u8[B, S, S, 3] RGB -> ([f32[B, N, N, L, 2]] a PAF stage, [f32[B, N, N, K]] a heatmap stage), N = S / stride.

  The fields are those of the `model` section of the configuration; parameters are float32. Dropout, when training,
  takes the 'dropout' key.
  """
  backbone: str
  preprocess: str
  paf_stages: int
  heatmap_stages: int
  width_first: int
  width: int
  blocks: int
  head_first: int
  head: int
  feature: int
  cascade: bool
  norm: str
  dropout: float
  remat: bool
  dtype: str
  limbs: int      # L
  channels: int   # K

  @nn.compact
  def __call__(self, image: jax.Array, train: bool = False) -> tuple[list[jax.Array], list[jax.Array]]:
    features = self._backbone()(preprocess(image, self.preprocess).astype(self.dtype))
    pafs, heatmaps = [], []
    for i in range(self.paf_stages):
      paf = self._stage('paf', i, 2 * self.limbs, train)(self._inputs(features, pafs[-1:]))
      pafs.append(paf)
    for i in range(self.heatmap_stages):
      heatmaps.append(
          self._stage('heatmap', i, self.channels, train)(self._inputs(features, heatmaps[-1:] + pafs[-1:])))
    return [paf.reshape(*paf.shape[:-1], self.limbs, 2) for paf in pafs], heatmaps

  def _inputs(self, features: jax.Array, earlier: list[jax.Array]) -> jax.Array:
    """What a stage sees: the newest heatmaps, the newest fields, the features; only the last without cascade."""
    if not self.cascade:
      return features
    return jnp.concatenate([e.astype(features.dtype) for e in earlier] + [features], -1)

  def _stage(self, kind: str, index: int, outputs: int, train: bool) -> nn.Module:
    width, head = (self.width_first, self.head_first) if index == 0 else (self.width, self.head)
    stage = nn.remat(Stage) if self.remat else Stage
    return stage(outputs, width, head, self.blocks, self.norm, self.dropout, jnp.dtype(self.dtype), train,
                 name=f'{kind}{index + 1}')

  def _backbone(self) -> nn.Module:
    dtype = jnp.dtype(self.dtype)
    if self.backbone == 'vgg19_10':
      fresh = (('conv4_3', 2 * self.feature, 3), ('conv4_4', self.feature, 3))
      return VGG(VGG19_10, fresh, self.norm, dtype, name='backbone')
    if self.backbone == 'vgg16_7':
      fresh = tuple((f'adapt{i}', c, 1) for i, c in enumerate((512, 512, 256, self.feature), 1))
      return VGG(VGG16_7, fresh, self.norm, dtype, name='backbone')
    if self.backbone == 'small':
      return Small(self.feature, self.norm, dtype, name='backbone')
    raise ValueError(f"model.backbone = {self.backbone!r}: expected 'vgg19_10', 'vgg16_7' or 'small'")
