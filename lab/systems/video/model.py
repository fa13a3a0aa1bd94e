"""The networks: Seq2Frames, an encoder whose states start a decoder and a predictor; and the way to SimVP's.

Srivastava, Mansimov & Salakhutdinov 2015, arXiv 1502.04681, section 2. The modules here declare parameters and return
pure functions of them (lab/systems/video/cells.py), so that a loop over time is a plain jax.lax.scan.
"""

import math
from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from lab.systems.video import cells, output, registry, simvp

check = registry.check   # of a configuration, before anything is built


def make(config, activate: Callable[[jax.Array], jax.Array]) -> nn.Module:
  """The network of the whole configuration; activate maps its logits to frames in the range of config.loss.combo.

  See Seq2Frames.__call__ and simvp.SimVP.__call__, which have one interface. A readout starts from the bias of the mean
  pixel: cross-entropy is then 804 nats a frame of 64 px, not 2839. With init = uniform it is 0, as in the paper.
  """
  model = ml_collections.FrozenConfigDict(config.model)
  bias = output.parse(config.loss.combo, config.loss.multiply).mean_bias()
  if model.kind == 'simvp':
    return simvp.SimVP(model, config.video.past, activate, config.loss.multiply, bias)
  return Seq2Frames(model, config.video.size, activate, config.loss.multiply, 0.0 if model.init == 'uniform' else bias)


def _kernel_init(init: str, relu: bool = False) -> Callable:
  """U(+-.01) as in the paper; or Glorot's, and He's before a ReLU, which would otherwise fade over five layers."""
  if init == 'uniform':
    return _uniform(0.01)
  return nn.initializers.he_uniform() if relu else nn.initializers.glorot_uniform()


def _uniform(bound: float) -> Callable:
  return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def _by_gate(init: Callable, gates: int) -> Callable:
  """An initialiser [..., gates N] of as many initialisers [..., N]: each gate has the fan and is orthogonal alone."""
  def draw(key, shape, dtype):
    each = (*shape[:-1], shape[-1] // gates)
    kernels = jax.vmap(lambda k: init(k, each, dtype))(jax.random.split(key, gates))
    return jnp.moveaxis(kernels, 0, -2).reshape(shape)
  return draw


def _orthogonal(key: jax.Array, shape: tuple, dtype) -> jax.Array:
  """Orthonormal columns: the polar factor of a normal matrix, by Newton-Schulz iteration (Bjorck & Bowie 1971).

  In products alone, for two QR factorisations that XLA runs side by side on the CPU may wait for each other for ever:
  each splits its batch over the threads that they both hold.
  """
  rows, columns = math.prod(shape[:-1]), shape[-1]
  x = jax.random.normal(key, (rows, columns), dtype) / (rows**0.5 + columns**0.5)      # singular values up to about 1
  exact = jax.lax.Precision.HIGHEST
  step = lambda _, x: 1.5 * x - 0.5 * jnp.matmul(x, jnp.matmul(x.T, x, precision=exact), precision=exact)
  return jax.lax.fori_loop(0, 40, step, x).reshape(shape)      # each grows the small ones by half: 1e-6 becomes 1


class Affine(nn.Module):
  """Declares and returns (kernel [..., in, out], bias [out])."""
  shape: tuple
  kernel_init: Callable
  bias: float = 0.0

  @nn.compact
  def __call__(self) -> tuple[jax.Array, jax.Array]:
    kernel = self.param('kernel', self.kernel_init, self.shape, jnp.float32)
    return kernel, self.param('bias', nn.initializers.constant(self.bias), self.shape[-1:], jnp.float32)


def _dense(x: jax.Array, affine: tuple, dtype=jnp.float32) -> jax.Array:
  y = cells.product(x, affine[0], dtype)
  return y + cells.row(affine[1], y)


class Recurrent(nn.Module):
  """Declares a layer of width units (channels) that sees `inputs` features (channels); 0: no kernel for any."""
  model: Any
  width: int
  inputs: int

  @nn.compact
  def __call__(self) -> cells.Layer:
    m, (_, gates, _) = self.model, cells.CELLS[self.model.cell]
    window = (m.kernel, m.kernel) if m.cell == 'convlstm' else ()
    uniform = m.init == 'uniform'
    orthogonal = _uniform(0.01) if uniform else _orthogonal
    weights = {'recurrent': self._param('recurrent', _by_gate(orthogonal, gates), *window, self.width,
                                        gates * self.width)}
    if self.inputs:
      weights['input'] = self._param('input', _by_gate(_kernel_init(m.init), gates), *window, self.inputs,
                                     gates * self.width)
    weights['bias'] = self._param('bias', self._bias, gates * self.width)
    if m.cell == 'gru':
      weights['recurrent_bias'] = self._param('recurrent_bias', nn.initializers.zeros, self.width)
    if m.cell == 'peephole':
      diagonal = _uniform(0.1) if uniform else nn.initializers.zeros
      weights.update({f'peephole_{gate}': self._param(f'peephole_{gate}', diagonal, self.width) for gate in 'ifo'})
    return cells.Layer(m.cell, weights, jnp.dtype(m.dtype))

  def _param(self, name: str, init: Callable, *shape: int) -> jax.Array:
    return self.param(name, init, shape, jnp.float32)

  def _bias(self, key, shape, dtype):
    """Zeros; but 1 for the forget gate, which keeps the cell at first (Jozefowicz et al. 2015)."""
    zeros = jnp.zeros(shape, dtype)
    if self.model.cell == 'gru' or self.model.init == 'uniform':
      return zeros
    return zeros.at[self.width:2 * self.width].set(1.0)


class Embed(nn.Module):
  """Declares what turns frames f32[..., S, S] into features, f32[..., D] or a map f32[..., m, m, C]; returns it."""
  model: Any
  size: int   # S

  @nn.compact
  def __call__(self) -> Callable[[jax.Array], jax.Array]:
    m, dtype = self.model, jnp.dtype(self.model.dtype)
    if m.embed == 'patch':
      return lambda frames: cells.space_to_depth(frames[..., None], m.patch)
    if m.embed == 'flatten':
      return _flat
    init = _kernel_init(m.init, relu=True)
    if m.embed == 'mlp':
      widths = (self.size**2, *m.embed_widths)
      dense = [Affine(widths[i:i + 2], init, name=f'dense{i}')() for i in range(len(m.embed_widths))]

      def layers(frames):
        x = _flat(frames)
        for affine in dense:
          x = jax.nn.relu(_dense(x, affine, dtype))
        return x
      return layers
    channels = (1, *m.channels)
    conv = [Affine((k, k, *channels[i:i + 2]), init, name=f'conv{i}')() for i, k in enumerate(m.kernels)]

    def convolutions(frames):
      x = frames[..., None]
      for (kernel, bias), stride in zip(conv, m.strides):
        x = cells.convolve(x, kernel, stride, 'VALID', dtype)
        x = jax.nn.relu(x + cells.row(bias, x))
      return x if m.cell == 'convlstm' else x.reshape(x.shape[0], -1)
    return lambda frames: cells.over_leading(convolutions, frames, 2)


def _flat(frames: jax.Array) -> jax.Array:
  return frames.reshape(*frames.shape[:-2], -1)


def _feature(m, size: int) -> tuple[int, ...]:
  """The shape of an embedded frame: (D,) or (m, m, C)."""
  if m.embed == 'patch':
    return (size // m.patch, size // m.patch, m.patch**2)
  if m.embed == 'cnn':
    side = registry.map_sides(size, m.kernels, m.strides)[-1]
    shape = (side, side, m.channels[-1])
    return shape if m.cell == 'convlstm' else (math.prod(shape),)
  return (m.embed_widths[-1] if m.embed == 'mlp' else size**2,)


class Readout(nn.Module):
  """Declares what turns top states h, f32[..., W] or f32[..., m, m, C], into logits f32[..., S, S]; returns it.

  In float32 throughout. On the map of patch, linear and mlp are convolutions of side 1.
  """
  model: Any
  size: int
  multiply: float
  bias: float     # of the last layer, at the start

  @nn.compact
  def __call__(self) -> Callable[[jax.Array], jax.Array]:
    m, width = self.model, self.model.head[-1]
    patched = m.embed == 'patch'
    outputs = m.patch**2 if patched else self.size**2
    if m.readout == 'deconv':
      layers = self._deconvolutions()
      axes = 3 if m.cell == 'convlstm' else 1
      return lambda h: self.multiply * cells.over_leading(layers, h, axes)
    dense = []
    if m.readout == 'mlp':
      dense.append(Affine((width, m.readout_width), _kernel_init(m.init, relu=True), name='dense0')())
      width = m.readout_width
    if m.readout != 'copy':
      dense.append(Affine((width, outputs), _kernel_init(m.init), self.bias, name='out')())

    def layers(h):
      for i, affine in enumerate(dense):
        h = _dense(jax.nn.relu(h) if i else h, affine)
      if patched:
        return self.multiply * cells.depth_to_space(h, m.patch)[..., 0]
      return self.multiply * h.reshape(*h.shape[:-1], self.size, self.size)
    return layers

  def _deconvolutions(self) -> Callable:
    """The mirror of the cnn embedding, [N, ...] -> [N, S, S]: ReLU between its layers; each restores the size before.

    A dense layer makes the map first where a vector is not already one of a pixel.
    """
    m, sides = self.model, registry.map_sides(self.size, self.model.kernels, self.model.strides)
    shape = (sides[-1], sides[-1], m.channels[-1])
    width = m.head[-1]
    dense = None
    if m.cell == 'convlstm' or (sides[-1] == 1 and width == shape[-1]):
      shape = (*shape[:2], width)
    else:
      dense = Affine((width, math.prod(shape)), _kernel_init(m.init, relu=True), name='dense0')()
    channels = (1, *m.channels[:-1], shape[-1])
    deconv = [
        Affine((m.kernels[i], m.kernels[i], channels[i + 1], channels[i]), _kernel_init(m.init, relu=i > 0),
               0.0 if i else self.bias, name=f'deconv{i}' if i else 'out')()
        for i in reversed(range(len(m.channels)))]

    def layers(h):
      x = h if dense is None else jax.nn.relu(_dense(h, dense))
      x = x.reshape(-1, *shape)
      for i, (kernel, bias) in zip(reversed(range(len(deconv))), deconv):
        x = cells.deconvolve(x, kernel, m.strides[i], sides[i], jnp.float32)
        x = x + cells.row(bias, x)
        x = jax.nn.relu(x) if i else x
      return x[..., 0]
    return layers


def _stack(m, widths: tuple, inputs: int) -> list[cells.Layer]:
  """Declares layer0, layer1, ... in the module that calls; the lowest sees `inputs` features."""
  inputs = (inputs, *widths[:-1])
  return [Recurrent(m, width, inputs[i], name=f'layer{i}')() for i, width in enumerate(widths)]


def _zeros(m, widths: tuple, size: int, batch: int) -> tuple[cells.Carry, ...]:
  """Carries of zeros, f32[B, width] or f32[B, m, m, channels] an array."""
  where = _feature(m, size)[:-1] if m.cell == 'convlstm' else ()
  count = cells.CELLS[m.cell].carries
  return tuple((jnp.zeros((batch, *where, width), jnp.float32),) * count for width in widths)


class Encoder(nn.Module):
  """f32[B, P, S, S] -> (a carry a layer, h of the top layer at all steps f32[B, P, ...])."""
  model: Any
  size: int

  @nn.compact
  def __call__(self, past: jax.Array):
    m = self.model
    embed = Embed(m, self.size, name='embed')()
    layers = _stack(m, m.encoder, _feature(m, self.size)[-1])
    carries = _zeros(m, m.encoder, self.size, past.shape[0])
    return (cells.sweep if m.fuse_input else cells.climb)(layers, carries, past, past.shape[1], embed)


class Head(nn.Module):
  """The encoder's carries -> (logits f32[B, n, S, S], h of the top layer f32[B, n, ...]), as Seq2Frames.unroll says."""
  model: Any
  size: int
  activate: Callable
  multiply: float
  bias: float

  @nn.compact
  def __call__(self, states: tuple, steps: int, truth: jax.Array | None, use: jax.Array | None):
    m = self.model
    inputs = {'zero': 0, 'hidden': m.head[-1]}.get(m.feed, _feature(m, self.size)[-1])
    embed = None if m.feed in ('zero', 'hidden') else Embed(m, self.size, name='embed')()
    layers = _stack(m, m.head, inputs)
    readout = Readout(m, self.size, self.multiply, self.bias, name='readout')()
    carries = self._start(states)
    if m.feed == 'zero':
      _, tops = (cells.sweep if m.fuse_input else cells.climb)(layers, carries, None, steps)
      return readout(tops), tops
    # the first step is on its own: it sees nothing, not even what embed would make of a frame of zeros
    carries = cells.advance(layers, carries, None)

    def feed_hidden(carries, _):
      carries = cells.advance(layers, carries, carries[-1][0])
      return carries, carries[-1][0]

    if m.feed == 'hidden':
      _, tops = cells.over_time(feed_hidden, carries, None, steps - 1)
      tops = _after(carries[-1][0], tops)
      return readout(tops), tops

    def feed_frame(state, true):
      carries, logits = state
      fed = self.activate(logits)
      if true is not None:
        fed = jnp.where(true[1][:, None, None], true[0], fed)
      carries = cells.advance(layers, carries, embed(fed))
      logits = readout(carries[-1][0])
      return (carries, logits), (logits, carries[-1][0])

    first = readout(carries[-1][0])
    true = None
    if truth is not None:
      use = jnp.ones(truth.shape[:2], bool) if use is None else use
      true = truth[:, :steps - 1], use[:, 1:steps]     # the frame before a step, and whether it is fed there
    _, (logits, tops) = cells.over_time(feed_frame, (carries, first), true, steps - 1)
    return _after(first, logits), _after(carries[-1][0], tops)

  def _start(self, states: tuple) -> tuple[cells.Carry, ...]:
    """The carries at the start, of the encoder's and zeros, as config.model.handover says."""
    m = self.model
    zeros = _zeros(m, m.head, self.size, states[0][0].shape[0])
    if m.handover == 'top_only':
      return (*zeros[:-1], states[-1])
    start = list(zeros)
    for i, state in enumerate(states):
      if m.encoder[i] == m.head[i]:     # elsewhere a layer has no counterpart: the copy models' last
        start[i] = (state[0], *zeros[i][1:]) if m.handover == 'h_only' else state
    return tuple(start)


def _after(first: jax.Array, rest: jax.Array) -> jax.Array:
  """[B, ...] and [B, n - 1, ...] -> [B, n, ...]."""
  return jnp.concatenate([first[:, None], rest], 1)


class Seq2Frames(nn.Module):
  """An encoder, and a decoder of the past ('recon') and a predictor of the future ('pred'), each with its own weights.

  Parameters: encoder, recon, pred / embed, layer0, layer1, ..., readout / input, recurrent, bias, kernel, ... A head
  that init's lengths leave out has none. Frames are f32[B, T, S, S] in the range of config.loss.combo.
  """
  model: Any        # the frozen section config.model
  size: int         # S, px
  activate: Callable
  multiply: float
  bias: float       # of the readouts, at the start

  def setup(self):
    self.encoder = Encoder(self.model, self.size)
    head = (self.model, self.size, self.activate, self.multiply, self.bias)
    self.recon = Head(*head)
    self.pred = Head(*head)

  def encode(self, past: jax.Array) -> tuple[tuple[cells.Carry, ...], jax.Array]:
    """f32[B, P, S, S] -> (states: (h, c) or (h,) a layer after the last frame, top h at all steps f32[B, P, ...])."""
    return self.encoder(past)

  def unroll(self, states: tuple, lengths: dict, truth: dict | None = None, use: dict | None = None) -> dict:
    """Head -> (logits f32[B, n, S, S], top h f32[B, n, ...]) for each head of lengths (head -> n, static).

    Every head starts from the encoder's states, as config.model.handover says, and its first step has no input. What a
    later step t is fed, config.model.feed says: nothing (zero), the head's last top state as it is (hidden), or a
    frame: truth[head][:, t - 1] (f32[B, n, S, S], in data range) where use[head][:, t] (bool[B, n]) is True, and
    activate of its own last logits elsewhere. Without truth (None) a head runs free; a use of None is True everywhere.
    """
    truth, use = truth or {}, use or {}
    return {head: self._head(head)(states, n, truth.get(head), use.get(head)) for head, n in lengths.items()}

  def __call__(self, past: jax.Array, lengths: dict, truth: dict | None = None, use: dict | None = None) -> dict:
    """What unroll gives for the states of past; and 'encoder', its top h f32[B, P, ...]."""
    states, top = self.encode(past)
    return {**self.unroll(states, lengths, truth, use), 'encoder': top}

  def _head(self, name: str) -> nn.Module:
    if self.model.heads not in ('both', name):
      raise ValueError(f'no head {name!r} with config.model.heads = {self.model.heads!r}')
    return {'recon': self.recon, 'pred': self.pred}[name]
