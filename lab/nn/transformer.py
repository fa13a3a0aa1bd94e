"""The Transformer's layers, pre- or post-norm, and their cache for generation.

Vaswani et al. 2017, arXiv 1706.03762 (post-norm, as in BERT, 1810.04805); pre-norm as in GPT-2. Embeddings and heads
are the callers'. With dtype bfloat16, products and activations are bfloat16; parameters, the residual stream that the
layers add to, norms and the softmax stay float32, as under PyTorch's autocast: small additions to a large stream would
be rounded away.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental import layout
from jax.sharding import PartitionSpec as P

from lab.nn import attention, target
from lab.nn.activations import ACTIVATIONS, GATED, activated, swiglu, takes_joined
from lab.nn.norms import AddNorm
from lab.nn.products import shared


NORMS = ('pre', 'post')

# of a layer that is recomputed: the results of its four products with weights, or only what goes into it
KEPT = {'nothing': None, 'products': jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


class Shape(NamedTuple):
  """What a Transformer is made of."""
  width: int                       # D
  heads: int                       # H, of D / H features each
  layers: int                      # L
  hidden: int = 0                  # F, width inside the MLP; 0: 4 D
  activation: str = 'gelu'         # a key of ACTIVATIONS
  norm: str = 'pre'                # pre: x + f(norm x); post: norm(x + f x)
  final_norm: bool = True          # after the last layer; of pre only, since the layers of post end in a norm
  bias: bool = True                # in every Dense and LayerNorm
  rms: bool = False                # norms by the root mean square alone (arXiv 1910.07467), in place of LayerNorm
  qk_norm: bool = False            # RMS norm of queries and keys, a head at a time, with learnt scale
  rope: bool = False               # rotary positions
  dropout: float = 0.0             # of what each half of a layer adds to the stream
  attention_dropout: float = 0.0   # of attention weights
  eps: float = 1e-5                # of norms
  deviation: float = 0.02          # of kernels at the start (GPT-2, BERT); 1 / sqrt(D) suits narrow ones
  dtype: str = 'float32'           # of products and activations: bfloat16 or float32
  attention: str = 'auto'          # implementation, see attention.attend
  remat: bool = False              # recompute a layer in the backward pass instead of remembering its inside
  remat_keep: str = 'nothing'      # a key of KEPT: what is remembered all the same
  unroll: int = 1                  # layers an iteration of the loop over them
  cublas: bool = False             # in training, a GPU's products are cuBLAS's alone: Task.gpu of the caller says so


class Transformer(nn.Module):
  """L layers by a loop over parameters stacked as [L, ...] under `blocks`; `final_norm`. Kernels N(0, deviation).

  The kernels whose products join the stream, attention/out and mlp/down, start as N(0, deviation / sqrt(2 L)) (GPT-2);
  biases as 0. Columns of attention/qkv are [H, 3, D/H], so that a split of the axis over devices keeps heads whole;
  those of mlp/up with geglu or swiglu are [2, F], the gate's first.
  """
  shape: Shape

  @nn.compact
  def __call__(self, x: jax.Array, segments: jax.Array | None = None, *, lengths: jax.Array | None = None,
               causal: bool = False, positions: jax.Array | None = None, train: bool = False, cache: Any = None,
               index: jax.Array | int | None = None):
    """x [B, S, D] -> [B, S, D] in the shape's dtype; with a cache (x, cache).

    segments i32[B, S] or lengths i32[B]: see lab.nn.attention; positions i32[B, S], or i32[B, S, 2] on a plane (for
    B also 1), are read by rope alone, and count from 0 in each segment unless given. Training, dropout takes the
    'dropout' key. With a cache the S tokens take its places index..index + S - 1, index i32[] or, row by row,
    i32[B], and see the tokens of their segment up to their own place: causal must be True. Rows of different
    lengths are padded on the right with segment 0, and a row's next token takes the place of its first padding.
    Places beyond the cache's length are dropped: the caller must not go there.
    """
    c = self.shape
    _check(c)
    if cache is not None:
      cached = {'key': cache['key'], 'value': cache['value']}
      where, held = _in_cache(c, x, segments, positions, cache, index, causal)
    else:
      cached = None
      where = _Where(segments, lengths, _turn(c, _count(c, x, segments, positions)), None, None)
    # where no loop is left between them, the compiler would take what is computed again for what was there before
    block = nn.remat(Block, prevent_cse=c.unroll >= c.layers, policy=KEPT[c.remat_keep]) if c.remat else Block
    blocks = nn.scan(block, variable_axes={'params': 0}, split_rngs={'params': True, 'dropout': True},
                     in_axes=(0, nn.broadcast), length=c.layers, unroll=c.unroll)
    (x, *more), cached = blocks(c, causal, train, name='blocks')(_start(c, x, train), cached, where)
    if c.norm == 'pre' and c.final_norm:
      x = _norm(c, 'final_norm')(x, *_added(c, x, *more))[1]
    elif c.norm == 'pre':
      x = _sum(x, *_added(c, x, *more))
    x = x.astype(c.dtype)
    return x if cache is None else (x, {**cached, 'segments': held})


def by_batch(x: jax.Array) -> jax.Array:
  """[B, ...] split over the axes data and fsdp of the mesh, as batches are; as it is without them, or if B doesn't fit.

  Left to itself the compiler may gather the batch instead of parameters that are split over fsdp, and sum products of
  all of it: many times the traffic and the memory.
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes = tuple(a for a in ('data', 'fsdp') if a in mesh.shape)
  if not axes or x.shape[0] % math.prod(mesh.shape[a] for a in axes):
    return x
  return jax.lax.with_sharding_constraint(x, P(axes))


def in_order(x: jax.Array) -> jax.Array:
  """[B, S, D] as it is, on a GPU stored row after row.

  Left to itself the compiler may store a stream token after token, and transpose it for every product and kernel.
  """
  if target.platform() != 'gpu':
    return x
  return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def cache(shape: Shape, batch: int, length: int, dtype: str | None = None) -> dict[str, jax.Array]:
  """An empty cache of T = length places: key and value [L, B, T, H, Dh] in dtype (the shape's), segments i32[B, T]."""
  size = (shape.layers, batch, length, shape.heads, shape.width // shape.heads)
  dtype = shape.dtype if dtype is None else dtype
  return {'key': jnp.zeros(size, dtype), 'value': jnp.zeros(size, dtype),
          'segments': jnp.zeros((batch, length), jnp.int32)}


class _Where(NamedTuple):
  """Who sees whom, the same in all layers."""
  segments: jax.Array | None     # i32[B, S]
  lengths: jax.Array | None      # i32[B]
  angles: Any                    # of rope, see attention.angles; None without
  places: jax.Array | None       # i32[B, S], in the cache
  mask: jax.Array | None         # bool[B, 1, S, T], of the cache


class Block(nn.Module):
  """A layer: attention, then an MLP, each added to the stream; and its cache.

  What it takes and gives is the stream x f32[B, S, D], y [B, S, D] in the shape's dtype, and shift f32[D]. Pre-norm:
  y + shift is still to be added to the stream, for sum and norm are one kernel on a GPU; shift is None without biases
  and with dropout, and with remat both are. Post-norm: y is the stream rounded, and shift None.
  """
  shape: Shape
  causal: bool
  train: bool

  @nn.compact
  def __call__(self, stream, cached, where):
    c = self.shape
    pre, (x, y, shift) = c.norm == 'pre', stream
    x, y = in_order(by_batch(x)), jax.tree.map(by_batch, y)
    norm0, norm1 = (_norm(c, name) for name in ('norm0', 'norm1'))
    if pre:
      x, y = norm0(x, *_added(c, x, y, shift))
    *y, cached = Attention(c, self.causal, self.train, name='attention')(y, cached, where)
    x, y = (norm1 if pre else norm0)(x, *self.dropped(*y))
    y, shift = self.dropped(*MLP(c, self.train, name='mlp')(y))
    if not pre:
      (x, y), shift = norm1(x, y, shift), None
    elif c.remat:        # one array is remembered then, not two
      x, y, shift = _sum(x, y, shift), None, None
    return (x, y, shift), cached

  def dropped(self, y, shift):
    """A product and its bias, or None, after dropout, if there is any; the bias is in it then."""
    if not _drops(self.shape, self.train):
      return y, shift
    y = y if shift is None else y + shift.astype(y.dtype)[None, None]
    return nn.Dropout(self.shape.dropout, deterministic=False)(y), None


class Attention(nn.Module):
  """Self-attention of H heads: [B, S, D] -> [B, S, D], its last bias f32[D] or None, which is not in it yet, and the
  cache with these tokens in it."""
  shape: Shape
  causal: bool
  train: bool

  @nn.compact
  def __call__(self, x, cached, where):
    c = self.shape
    batch, steps, width = x.shape
    x = x.astype(c.dtype)
    kernel, bias = Weights(c, 3 * width, name='qkv')(width)
    form = jax.ShapeDtypeStruct((batch, steps, c.heads, 3, width // c.heads), c.dtype)
    if cached is None and self._all_see_all(where) and attention.takes_together(form):
      y = attention.together(_product(x, kernel).reshape(form.shape), *where.angles)
    else:
      y, cached = self._apart(x, kernel, bias, cached, where)
    kernel, bias = Weights(c, width, joins=True, name='out')(width)
    return _product(y.reshape(batch, steps, width), kernel), bias, cached

  def _all_see_all(self, where):
    """Whether nothing but rotary positions is asked for."""
    c = self.shape
    more = c.bias or c.qk_norm or self.causal or (self.train and c.attention_dropout) or c.attention == 'plain'
    return c.rope and not more and where.segments is None and where.lengths is None

  def _apart(self, x, kernel, bias, cached, where):
    """Attention by q, k and v from a product each, and the cache with these in it."""
    c = self.shape
    batch, steps, width = x.shape
    biases = _parts(bias, c.heads, 3) if c.bias else [None] * 3
    if c.bias and not c.rope and not c.qk_norm:
      # what is added to all keys is added to all scores of a query, which their softmax does not see: no gradient
      biases[1] = jax.lax.stop_gradient(biases[1])
    # a product each: what one of all would give had to be copied apart
    q, k, v = (_product(x, part, each) for x, part, each in zip(shared(x, 3), _parts(kernel, c.heads, 3), biases))
    q, k, v = (y.reshape(batch, steps, c.heads, width // c.heads) for y in (q, k, v))
    if c.qk_norm:      # Henry et al. 2020, arXiv 2010.04245, with RMS in place of length
      norm = functools.partial(nn.RMSNorm, epsilon=c.eps, dtype=c.dtype)
      q, k = norm(name='query_norm')(q), norm(name='key_norm')(k)
    if c.rope:
      q, k = attention.turned(q, *where.angles), attention.turned(k, *where.angles)
    rate = c.attention_dropout if self.train else 0.0
    see = functools.partial(attention.attend, dropout=rate, key=self.make_rng('dropout') if rate else None)
    if cached is None:
      return see(q, k, v, causal=self.causal, segments=where.segments, lengths=where.lengths,
                 implementation=c.attention), None
    cached = {'key': _write(cached['key'], k, where.places), 'value': _write(cached['value'], v, where.places)}
    # flash takes no mask
    return see(q, *(cached[name].astype(q.dtype) for name in ('key', 'value')), mask=where.mask,
               implementation='plain'), cached


class MLP(nn.Module):
  """Two products with an activation between: [B, S, D] -> [B, S, D], and its last bias f32[D] or None, not in it."""
  shape: Shape
  train: bool = False

  @nn.compact
  def __call__(self, x):
    c, number = self.shape, 1 + (self.shape.activation in GATED)
    x = x.astype(c.dtype)
    kernel, bias = Weights(c, number * (c.hidden or 4 * c.width), name='up')(x.shape[-1])
    if not c.bias and takes_joined(c.activation, x):
      y = swiglu(_product(x, kernel))
    else:
      made = [_product(x, part) for part in _parts(kernel, 1, number)]
      biases = _parts(bias, 1, number) if c.bias else [None] * number
      # where what cuBLAS's product alone gives is remembered, it does nothing more
      alone = c.remat and c.remat_keep == 'products'
      y = activated(c.activation, made, biases, c.cublas and self.train and not alone)
    kernel, bias = Weights(c, c.width, joins=True, name='down')(y.shape[-1])
    return _product(y, kernel), bias


class Weights(nn.Module):
  """Declares a kernel f32[inputs, features] and a bias f32[features], or None, and gives them back."""
  shape: Shape
  features: int
  joins: bool = False      # whether the product joins the stream

  @nn.compact
  def __call__(self, inputs: int):
    c = self.shape
    start = nn.initializers.normal(c.deviation / (2 * c.layers)**0.5 if self.joins else c.deviation)
    kernel = self.param('kernel', start, (inputs, self.features), jnp.float32)
    return kernel, self.param('bias', nn.initializers.zeros_init(), (self.features,), jnp.float32) if c.bias else None


def _parts(x, groups: int, number: int):
  """Columns [..., groups, number, F] of kernels and biases -> number arrays [..., groups F]."""
  split = x.reshape(*x.shape[:-1], groups, number, -1)
  return [split[..., i, :].reshape(*x.shape[:-1], -1) for i in range(number)]


def _product(x, kernel, bias=None):
  y = jnp.dot(x, kernel.astype(x.dtype))
  return y if bias is None else y + bias.astype(x.dtype)[None, None]


def _norm(c: Shape, name: str) -> AddNorm:
  return AddNorm(c.eps, c.rms, c.bias, post=c.norm == 'post', name=name)


def _drops(c: Shape, train: bool) -> bool:
  return bool(c.dropout) and train


def _start(c: Shape, x, train):
  """What the first layer takes, of embeddings."""
  x = x.astype(jnp.float32)
  if c.norm == 'post':
    return x, x.astype(c.dtype), None
  shift = jnp.zeros(c.width) if c.bias and not c.remat and not _drops(c, train) else None
  return x, None if c.remat else jnp.zeros(x.shape, c.dtype), shift


def _added(c: Shape, x, y, shift):
  """What a layer has left to be added to the stream x."""
  return jnp.zeros(x.shape, c.dtype) if y is None else y, shift


def _sum(x, y, shift):
  y = y.astype(jnp.float32)
  return x + (y if shift is None else y + shift[None, None])


def _check(c: Shape):
  if c.activation not in ACTIVATIONS:
    raise ValueError(f'activation = {c.activation!r}: expected one of {tuple(ACTIVATIONS)}')
  if c.norm not in NORMS:
    raise ValueError(f'norm = {c.norm!r}: expected one of {NORMS}')
  if c.width % c.heads:
    raise ValueError(f'width = {c.width}: expected a multiple of heads = {c.heads}')


def _count(c: Shape, x, segments, positions):
  """Positions for rope, if there are to be any."""
  if not c.rope or positions is not None:
    return positions
  if segments is not None:
    return attention.positions(segments)
  return jnp.arange(x.shape[1])[None]


def _turn(c: Shape, positions):
  """Angles of rope, made once for all layers."""
  return attention.angles(positions, c.width // c.heads) if c.rope else None


def _in_cache(c, x, segments, positions, cache, index, causal) -> tuple[_Where, jax.Array]:
  """Where new tokens go and what they see there; and the cache's segments with them, i32[B, T]."""
  if not causal or index is None:
    raise ValueError('a cache needs causal=True and an index')
  batch, steps, _ = x.shape
  if segments is None:
    segments = jnp.ones((batch, steps), jnp.int32)
  first = jnp.broadcast_to(jnp.asarray(index, jnp.int32).reshape(-1, 1), (batch, 1))
  places = jnp.broadcast_to(first, (batch, steps)) + jnp.broadcast_to(jnp.arange(steps)[None], (batch, steps))
  held = _write(cache['segments'], segments, places)
  own = segments[:, :, None]
  earlier = jnp.arange(held.shape[1])[None, None] <= places[:, :, None]
  visible = (own == held[:, None]) & (own > 0) & earlier      # [B, S, T]
  if positions is None:
    positions = jnp.maximum(jnp.sum(visible, -1, dtype=jnp.int32) - 1, 0)
  return _Where(None, None, _turn(c, positions), places, visible[:, None]), held


def _write(held, new, places):
  """held [B, T, ...] with new [B, S, ...] at places i32[B, S]."""
  return held.at[jnp.arange(held.shape[0])[:, None], places].set(new.astype(held.dtype), mode='drop')
