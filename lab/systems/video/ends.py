"""The two ends of a network, as pure functions of their products: frames to features, and states to frames.

m is the frozen section config.model.
"""

import jax

from lab.systems.video import cells, products, registry


def embed(m, weights: list[products.Affine], frames: jax.Array) -> jax.Array:
  """Frames f32[..., S, S] -> features, f32[..., D] or a map f32[..., m, m, C]."""
  if m.embed == 'patch':
    return cells.space_to_depth(frames[..., None], m.patch)
  x = frames[..., None] if m.embed == 'cnn' else frames.reshape(*frames.shape[:-2], -1)
  for affine in weights:
    x = jax.nn.relu(affine(x))
  return x.reshape(*x.shape[:-3], -1) if m.embed == 'cnn' and m.cell != 'convlstm' else x


def read(m, size: int, multiply: float, weights: list[products.Affine], h: jax.Array) -> jax.Array:
  """Top states f32[..., W] or f32[..., m, m, C] -> logits f32[..., S, S], times `multiply`; ReLU between the products.

  A dense product before convolutions makes their map, unless a vector is one of a pixel already.
  """
  lead = h.shape[:-3 if m.cell == 'convlstm' else -1]
  first = len(weights) - len(m.channels) if m.readout == 'deconv' else -1      # convolution
  for i, affine in enumerate(weights):
    h = jax.nn.relu(h) if i else h
    if i == first:
      side = registry.map_sides(size, m.kernels, m.strides)[-1]
      h = h.reshape(*lead, side, side, -1)
    h = affine(h)
  if m.embed == 'patch':
    h = cells.depth_to_space(h, m.patch)
  return multiply * h.reshape(*lead, size, size)
