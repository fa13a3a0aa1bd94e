"""Gradients of the loops over time: those of an explicit loop in Python, kernels' made once, and in float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from lab.systems.video import products, registry
from tests.systems.test_video_model import BATCH, MLP, PAST, TINY, build, drawn, fast, flat, frames, settings

CNN = {'video.size': 12, 'model.embed': 'cnn', 'model.channels': (2, 3), 'model.kernels': (5, 3),
       'model.strides': (2, 1)}                           # 12, 4 (the last column unseen), 2
MAP = {'video.size': 4, 'model.cell': 'convlstm', 'model.embed': 'patch', 'model.patch': 2, 'model.kernel': 3,
       'model.encoder': (2, 3), 'model.head': (2, 3)}
NETWORKS = {
    'lstm output': {},
    'lstm hidden': {'model.feed': 'hidden', 'model.handover': 'h_only'},
    'lstm teacher': {'model.feed': 'teacher', 'model.fuse_input': False, 'model.unroll': 2},
    'lstm scheduled': {'model.feed': 'scheduled'},
    'lstm scheduled, as many frames': {'model.feed': 'scheduled', 'video.future': PAST},
    'lstm zero': {'model.feed': 'zero'},
    'lstm zero, step by step': {'model.feed': 'zero', 'model.fuse_input': False, 'model.handover': 'top_only'},
    'lstm mlp': {**MLP, 'model.readout': 'mlp', 'model.readout_width': 9, 'model.fuse_input': False},
    'lstm cnn': {**CNN, 'model.readout': 'deconv'},
    'lstm copy': {'model.readout': 'copy', 'model.encoder': (5, 16), 'model.head': (5, 16)},
    'peephole output, as many frames': {'model.cell': 'peephole', 'video.future': PAST},
    'peephole zero': {'model.cell': 'peephole', 'model.feed': 'zero', 'model.unroll': 99},
    'gru output': {'model.cell': 'gru'},
    'gru hidden, as many frames': {'model.cell': 'gru', 'model.feed': 'hidden', 'video.future': PAST},
    'gru scheduled, step by step': {'model.cell': 'gru', 'model.feed': 'scheduled', 'model.fuse_input': False},
    'gru zero, step by step': {'model.cell': 'gru', 'model.feed': 'zero', 'model.fuse_input': False},
    'convlstm patch': MAP,
    'convlstm patch zero': {**MAP, 'model.feed': 'zero'},
    'convlstm patch scheduled, step by step': {**MAP, 'model.feed': 'scheduled', 'model.fuse_input': False},
    'convlstm cnn': {**CNN, 'model.cell': 'convlstm', 'model.kernel': 3, 'model.readout': 'deconv',
                     'video.future': PAST, 'model.encoder': (2, 3), 'model.head': (2, 3)},
}


# The networks once more, a step and a product at a time.

def conv(x, kernel, stride=1, padding='SAME'):
  return jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC'))


def plain_step(w, cell, carry, x):
  times = conv if cell == 'convlstm' else jnp.dot
  row = lambda v: v.reshape((1,) * (carry[0].ndim - 1) + (-1,))
  gates = row(w['bias']) + (times(x, w['input']) if 'input' in w and x is not None else 0)
  h = carry[0]
  state = times(h, w['recurrent'])
  if cell == 'gru':
    (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(gates, 3, -1), jnp.split(state, 3, -1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    return ((1 - z) * jnp.tanh(x_n + r * (h_n + row(w['recurrent_bias']))) + z * h,)
  i, f, g, o = jnp.split(gates + state, 4, -1)
  c = carry[1]
  if cell == 'peephole':
    i, f = i + row(w['peephole_i']) * c, f + row(w['peephole_f']) * c
  c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
  if cell == 'peephole':
    o = o + row(w['peephole_o']) * c
  return jax.nn.sigmoid(o) * jnp.tanh(c), c


def plain_embed(m, w, x):
  if m.embed == 'patch':
    b, s, p = len(x), x.shape[1], m.patch
    return x.reshape(b, s // p, p, s // p, p).transpose(0, 1, 3, 2, 4).reshape(b, s // p, s // p, p * p)
  if m.embed == 'cnn':
    x = x[..., None]
    for i, stride in enumerate(m.strides):
      x = jax.nn.relu(conv(x, w[f'conv{i}']['kernel'], stride, 'VALID') + w[f'conv{i}']['bias'].reshape(1, 1, 1, -1))
    return x if m.cell == 'convlstm' else x.reshape(len(x), -1)
  x = x.reshape(len(x), -1)
  for i in range(len(m.embed_widths) if m.embed == 'mlp' else 0):
    x = jax.nn.relu(x @ w[f'dense{i}']['kernel'] + w[f'dense{i}']['bias'].reshape(1, -1))
  return x


def plain_read(m, size, w, h):
  if m.readout == 'copy':
    return h.reshape(-1, size, size)
  if 'dense0' in w:
    h = jax.nn.relu(h @ w['dense0']['kernel'] + w['dense0']['bias'].reshape(1, -1))
  if m.readout == 'deconv':
    sides = registry.map_sides(size, m.kernels, m.strides)
    x = h.reshape(len(h), sides[-1], sides[-1], -1)
    for i in reversed(range(len(m.strides))):
      layer = w[f'deconv{i}' if i else 'out']
      x = jax.lax.conv_transpose(x, layer['kernel'], (m.strides[i],) * 2, 'VALID')
      rest = sides[i] - x.shape[1]
      x = jnp.pad(x, ((0, 0), (0, rest), (0, rest), (0, 0))) + layer['bias'].reshape(1, 1, 1, -1)
      x = jax.nn.relu(x) if i else x
    return x[..., 0]
  y = jnp.dot(h, w['out']['kernel']) + w['out']['bias'].reshape((1,) * (h.ndim - 1) + (-1,))
  if m.embed == 'patch':
    b, s, p = len(y), y.shape[1], m.patch
    y = y.reshape(b, s, s, p, p).transpose(0, 1, 3, 2, 4)
  return y.reshape(-1, size, size)


def plain(c, params, past, lengths, truth, use):
  """head -> logits [B, n, S, S]."""
  m, size = c.model, c.video.size
  where = plain_embed(m, params['encoder'].get('embed'), past[:, 0]).shape[1:-1] if m.cell == 'convlstm' else ()
  zeros = [(jnp.zeros((BATCH, *where, width)),) * (1 if m.cell == 'gru' else 2) for width in m.encoder]

  def climb(w, carries, x):
    out = []
    for i, carry in enumerate(carries):
      out.append(plain_step(w[f'layer{i}'], m.cell, carry, x))
      x = out[-1][0]
    return out

  states = zeros
  for t in range(past.shape[1]):
    states = climb(params['encoder'], states, plain_embed(m, params['encoder'].get('embed'), past[:, t]))
  made = {}
  for head, steps in lengths.items():
    w, x, logits = params[head], None, []
    kept = {'all': lambda i, s: s, 'h_only': lambda i, s: (s[0], *zeros[i][1:]),
            'top_only': lambda i, s: s if i == len(states) - 1 else zeros[i]}[m.handover]
    carries = [kept(i, state) for i, state in enumerate(states)]
    for t in range(steps):
      carries = climb(w, carries, x)
      logits.append(plain_read(m, size, w.get('readout'), carries[-1][0]))
      if m.feed == 'hidden':
        x = carries[-1][0]
      elif m.feed != 'zero':
        fed = jax.nn.sigmoid(logits[-1])
        if truth is not None and t + 1 < steps:
          fed = jnp.where(use[head][:, t + 1].reshape(-1, 1, 1), truth[head][:, t], fed)
        x = plain_embed(m, w.get('embed'), fed)
    made[head] = jnp.stack(logits, 1)
  return made


def both(name, dtype):
  """Logits and gradients, ours and the plain ones, at the same parameters; the plain ones are float32."""
  change = {**TINY, **NETWORKS[name], 'model.dtype': dtype}
  c = settings(change)
  net, lengths, shapes = build(change)
  params, size, rng = drawn(shapes), c.video.size, np.random.default_rng(3)
  past, truth, use = frames(size=size), None, None
  if c.model.feed in ('teacher', 'scheduled'):
    truth = {h: frames(n, size, 4 + n) for h, n in lengths.items()}
    use = {h: np.ones((BATCH, n), bool) if c.model.feed == 'teacher' else rng.random((BATCH, n)) < 0.5
           for h, n in lengths.items()}
  aim = {h: rng.normal(size=(BATCH, n, size, size)).astype(np.float32) for h, n in lengths.items()}

  def slope(run):
    def loss(params):
      made = run(params)
      return sum((made[h] * aim[h]).sum() for h in lengths), made
    (_, made), grads = fast(jax.value_and_grad(loss, has_aux=True))(params)
    return made, flat(grads)

  def ours(params):
    found = net.apply({'params': params}, past, lengths, truth, use)
    return {h: found[h][0] for h in lengths}
  return slope(ours), slope(lambda params: plain(c, params, past, lengths, truth, use))


@pytest.mark.parametrize('name', NETWORKS)
def test_gradients_are_those_of_an_explicit_loop(name):
  (made, grads), (plain_made, plain_grads) = both(name, 'float32')
  for head in made:
    np.testing.assert_allclose(made[head], plain_made[head], rtol=1e-5, atol=1e-5)
  assert grads.keys() == plain_grads.keys()
  for key, want in plain_grads.items():
    np.testing.assert_allclose(grads[key], want, rtol=1e-5, atol=1e-5 * np.abs(want).max(), err_msg=key)


@pytest.mark.parametrize('name', ['lstm scheduled, as many frames', 'peephole zero', 'gru output', 'convlstm patch',
                                  'lstm mlp'])
def test_gradients_in_bfloat16_are_near(name):
  # rounding is wrong by up to 2^-9 = .2 %, at random signs: by .1 % of a typical number. There are up to seven steps of
  # two layers before the last, each with two roundings, and the way back: .1 % * sqrt(56) = .8 %. The few numbers of a
  # vector are sums that can cancel
  (made, grads), (plain_made, plain_grads) = both(name, 'bfloat16')
  for head in made:
    assert np.abs(made[head] - plain_made[head]).max() < 0.005 * np.abs(plain_made[head]).max()
  for key, want in plain_grads.items():
    assert np.linalg.norm(grads[key] - want) < (0.015 if want.ndim > 1 else 0.05) * np.linalg.norm(want), key


def results(jaxpr):
  """The shape of all that a step of any loop hands to the next, or to the end."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'pallas_call':      # a loop over tiles, of which nothing is handed on
      continue
    if eqn.primitive.name == 'scan':
      yield from (v.aval.shape for v in eqn.params['jaxpr'].jaxpr.outvars)
    for sub in jaxprs_in_params(eqn.params):
      yield from results(sub)


@pytest.mark.parametrize('feed', ['output', 'scheduled', 'hidden', 'zero'])
def test_no_step_of_a_loop_makes_a_kernels_gradient(feed):
  net, lengths, shapes = build(TINY, feed=feed, cell='peephole')
  loss = lambda p: sum((net.apply({'params': p}, frames(), lengths)[h][0]**2).sum() for h in lengths)
  found = [math.prod(shape) for shape in results(jax.make_jaxpr(jax.grad(loss))(drawn(shapes)).jaxpr)]
  # a frame for each example, or what four gates are made of, are the largest; the smallest kernel has 96 numbers
  assert found and max(found) < 96 == min(math.prod(s.shape) for s in jax.tree.leaves(shapes) if len(s.shape) > 1)


@pytest.mark.parametrize('change, loops', [
    ({}, 2 + 2), ({'video.future': PAST}, 2 + 1), ({'model.heads': 'pred'}, 2 + 1),
    ({**MAP, 'video.future': PAST}, 2 + 2)])
def test_heads_that_are_alike_share_a_loop(change, loops):
  # a loop for each of the encoder's layers, and for each head; convolutions stay apart
  net, lengths, shapes = build(TINY, change)
  text = str(jax.make_jaxpr(lambda p: net.apply({'params': p}, frames(), lengths))(drawn(shapes)))
  assert text.count('= scan[') == loops


def test_a_kernels_gradient_is_summed_and_kept_in_float32():
  # 257 has nine bits, one more than bfloat16
  kernel, x = jnp.ones((3, 2)), jnp.ones((257, 1, 3))
  affine = products.Affine(kernel, jnp.zeros(2), jnp.bfloat16)

  def alone(affine):
    return affine(x).sum()

  def in_a_loop(affine):
    body = lambda affine, state, x: (state, affine(x))
    return products.over_time(body, 257, 1, affine, (), jnp.swapaxes(x, 0, 1))[1].sum()

  for loss in (alone, in_a_loop):
    found = fast(jax.grad(loss))(affine)
    assert found.kernel.dtype == jnp.float32
    np.testing.assert_array_equal(found.kernel, np.full((3, 2), 257))
    np.testing.assert_array_equal(found.bias, np.full(2, 257))


def test_a_product_made_twice_in_a_step_is_refused():
  affine = products.Affine(jnp.ones((3, 3)), None, jnp.float32)
  twice = lambda affine, state, x: (affine(affine(state)), None)
  loss = lambda affine: products.over_time(twice, 4, 1, affine, jnp.ones((1, 3)), None)[0].sum()
  with pytest.raises(ValueError, match='twice in a step'):
    jax.grad(loss)(affine)
