"""The networks: Seq2Frames, an encoder whose states start a decoder and a predictor; and the way to SimVP's.

Srivastava, Mansimov & Salakhutdinov 2015, arXiv 1502.04681, section 2. The modules here declare parameters and return
what pure functions take (cells.py, ends.py), so that a loop over time knows every array in it (products.py).
"""

import functools
import math
from typing import Any, Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections

from lab.systems.video import cells, ends, output, products, registry, simvp

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


class Product(nn.Module):
  """Declares kernel [..., in, out] and bias [out]; returns the Affine of them."""
  shape: tuple
  kernel_init: Callable
  dtype: Any
  bias: float = 0.0
  exact: bool = False
  window: products.Window | None = None

  @nn.compact
  def __call__(self) -> products.Affine:
    kernel = self.param('kernel', self.kernel_init, self.shape, jnp.float32)
    bias = self.param('bias', nn.initializers.constant(self.bias), self.shape[-1:], jnp.float32)
    return products.Affine(kernel, bias, jnp.dtype(self.dtype), self.exact, self.window)


class Recurrent(nn.Module):
  """Declares a layer of width units (channels) that sees `inputs` features (channels); 0: no kernel for any."""
  model: Any
  width: int
  inputs: int

  @nn.compact
  def __call__(self) -> cells.Layer:
    m, gates = self.model, cells.CELLS[self.model.cell].gates
    window = (m.kernel, m.kernel) if m.cell == 'convlstm' else ()
    uniform = m.init == 'uniform'
    orthogonal = _uniform(0.01) if uniform else _orthogonal
    declare = lambda name, init, *shape: self.param(name, init, shape, jnp.float32)
    recurrent = declare('recurrent', _by_gate(orthogonal, gates), *window, self.width, gates * self.width)
    kernel = jnp.zeros((0, gates * self.width))
    if self.inputs:
      kernel = declare('input', _by_gate(_kernel_init(m.init), gates), *window, self.inputs, gates * self.width)
    bias, vectors = declare('bias', self._bias, gates * self.width), {}
    if m.cell == 'gru':
      vectors['recurrent_bias'] = declare('recurrent_bias', nn.initializers.zeros, self.width)
    if m.cell == 'peephole':
      diagonal = _uniform(0.1) if uniform else nn.initializers.zeros
      vectors = {f'peephole_{gate}': declare(f'peephole_{gate}', diagonal, self.width) for gate in 'ifo'}
    return cells.Layer(m.cell, jnp.dtype(m.dtype), kernel, recurrent, bias, vectors)

  def _bias(self, key, shape, dtype):
    """Zeros; but 1 for the forget gate, which keeps the cell at first (Jozefowicz et al. 2015)."""
    zeros = jnp.zeros(shape, dtype)
    if self.model.cell == 'gru' or self.model.init == 'uniform':
      return zeros
    return zeros.at[self.width:2 * self.width].set(1.0)


class Embed(nn.Module):
  """Declares and returns the products of ends.embed, for frames of size x size px."""
  model: Any
  size: int

  @nn.compact
  def __call__(self) -> list[products.Affine]:
    m, init = self.model, _kernel_init(self.model.init, relu=True)
    if m.embed == 'mlp':
      widths = (self.size**2, *m.embed_widths)
      return [Product(widths[i:i + 2], init, m.dtype, name=f'dense{i}')() for i in range(len(m.embed_widths))]
    if m.embed == 'cnn':
      channels = (1, *m.channels)
      return [Product((k, k, *channels[i:i + 2]), init, m.dtype, window=products.Window(stride, 'VALID'),
                      name=f'conv{i}')() for i, (k, stride) in enumerate(zip(m.kernels, m.strides))]
    return []


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
  """Declares and returns the products of ends.read, for frames of size x size px; deconvolutions are float32.

  On the map of patch, linear and mlp are convolutions of side 1.
  """
  model: Any
  size: int
  bias: float     # of the last layer, at the start

  @nn.compact
  def __call__(self) -> list[products.Affine]:
    m, width, found = self.model, self.model.head[-1], []
    if m.readout == 'deconv':
      return self._deconvolutions()
    if m.readout == 'mlp':
      found.append(Product((width, m.readout_width), _kernel_init(m.init, relu=True), m.dtype, name='dense0')())
      width = m.readout_width
    if m.readout != 'copy':
      outputs = m.patch**2 if m.embed == 'patch' else self.size**2
      found.append(Product((width, outputs), _kernel_init(m.init), m.dtype, self.bias, exact=True, name='out')())
    return found

  def _deconvolutions(self) -> list[products.Affine]:
    """The mirror of the cnn embedding; each restores the size before."""
    m, sides, found = self.model, registry.map_sides(self.size, self.model.kernels, self.model.strides), []
    last, width = m.channels[-1], m.head[-1]
    if m.cell == 'convlstm' or (sides[-1] == 1 and width == last):
      last = width
    else:
      found.append(Product((width, sides[-1]**2 * last), _kernel_init(m.init, relu=True), jnp.float32,
                           name='dense0')())
    channels = (1, *m.channels[:-1], last)
    for i in reversed(range(len(m.channels))):
      side, window = m.kernels[i], products.mirror(m.kernels[i], m.strides[i], sides[i + 1], sides[i])
      found.append(Product((side, side, channels[i + 1], channels[i]), _kernel_init(m.init, relu=i > 0), jnp.float32,
                           0.0 if i else self.bias, window=window, name=f'deconv{i}' if i else 'out')())
    return found


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
    weights, embed = Embed(m, self.size, name='embed')(), functools.partial(ends.embed, m)
    layers = _stack(m, m.encoder, _feature(m, self.size)[-1])
    carries = _zeros(m, m.encoder, self.size, past.shape[0])
    if m.fuse_input:
      return cells.sweep(layers, carries, embed(weights, past), m.unroll)
    return cells.climb(layers, carries, past, m.unroll, embed, weights)


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
    feature = {'zero': (0,), 'hidden': (m.head[-1],)}.get(m.feed, _feature(m, self.size)[-1:])
    if m.cell == 'convlstm':
      feature = (*_feature(m, self.size)[:-1], *feature)
    weights = [] if m.feed in ('zero', 'hidden') else Embed(m, self.size, name='embed')()
    layers = _stack(m, m.head, feature[-1])
    readout = Readout(m, self.size, self.bias, name='readout')()
    read = functools.partial(ends.read, m, self.size, self.multiply)
    carries, batch = self._start(states), states[0][0].shape[0]
    if m.feed == 'zero':
      nothing = jnp.zeros((batch, steps, *feature))
      _, tops = (cells.sweep if m.fuse_input else cells.climb)(layers, carries, nothing, m.unroll)
      return read(readout, tops), tops

    def feed_hidden(layers, state, _):
      carries = cells.advance(layers, *state)
      top = carries[-1][0]
      return (carries, top), top

    def feed_frame(network, state, now):
      layers, weights, readout = network
      carries = cells.advance(layers, *state)
      top = carries[-1][0]
      logits = read(readout, top)
      fed = self.activate(logits)
      if now is not None:
        fed = jnp.where(now[1][:, None, None], now[0], fed)
      return (carries, ends.embed(m, weights, fed)), (logits, top)

    # the first step sees zeros, and not what embed would make of a frame of zeros: nothing, to a product
    state, layers = (carries, jnp.zeros((batch, *feature))), [cells.joined(layer) for layer in layers]
    if m.feed == 'hidden':
      _, tops = products.over_time(feed_hidden, steps, m.unroll, layers, state, None)
      return read(readout, tops), tops
    true = None
    if truth is not None:
      use = jnp.ones(truth.shape[:2], bool) if use is None else use
      true = truth[:, :steps], jnp.roll(use[:, :steps], -1, 1)      # a frame, and whether it is fed to the next step
    _, (logits, tops) = products.over_time(feed_frame, steps, m.unroll, (layers, weights, readout), state, true)
    # of an unrolled loop the frames are put side by side once, not in everything that is made of them
    return jax.lax.optimization_barrier(logits), tops

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
    if self._abreast(lengths, truth, use):
      return self._both(states, lengths['pred'], truth, use)
    return {head: self._head(head)(states, n, truth.get(head), use.get(head)) for head, n in lengths.items()}

  def __call__(self, past: jax.Array, lengths: dict, truth: dict | None = None, use: dict | None = None) -> dict:
    """What unroll gives for the states of past; and 'encoder', its top h f32[B, P, ...]."""
    states, top = self.encode(past)
    return {**self.unroll(states, lengths, truth, use), 'encoder': top}

  def _abreast(self, lengths: dict, truth: dict, use: dict) -> bool:
    """Whether the heads can run as one: they exist, are as long, and multiply by kernels; convolutions do not."""
    m = self.model
    alike = len(lengths) == 2 and len(set(lengths.values())) == 1 and all(len(given) != 1 for given in (truth, use))
    return alike and 'cnn' != m.embed and 'convlstm' != m.cell and 'deconv' != m.readout and not self.is_initializing()

  def _both(self, states: tuple, steps: int, truth: dict, use: dict) -> dict:
    """`unroll` of both heads in one loop over kernels [2, ...], whose products are [2, B, D] x [2, D, N].

    For a small batch one head's product leaves most of an accelerator idle. (Two convolutions side by side would be
    grouped ones, which are slow.)
    """
    names = 'recon', 'pred'
    stack = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    params = stack([self._head(name).variables['params'] for name in names])
    truth, use = (stack([given.get(name) for name in names]) for given in (truth, use))
    head = Head(self.model, self.size, self.activate, self.multiply, self.bias, parent=None)
    run = lambda params, truth, use: head.apply({'params': params}, states, steps, truth, use)
    made = jax.vmap(run)(params, truth, use)
    return {name: jax.tree.map(lambda leaf, i=i: leaf[i], made) for i, name in enumerate(names)}

  def _head(self, name: str) -> nn.Module:
    if self.model.heads not in ('both', name):
      raise ValueError(f'no head {name!r} with config.model.heads = {self.model.heads!r}')
    return {'recon': self.recon, 'pred': self.pred}[name]
