"""The networks: against NumPy, what flows where between encoder and heads, published sizes, and what can't be built."""

import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.systems.video import cells, config, model, output, products, registry
from lab.task import ConfigError

KEY = jax.random.key(0, impl='unsafe_rbg')               # compiles several times faster than threefry
SIZE, PAST, FUTURE, BATCH = 4, 3, 4, 2
TINY = {'video.size': SIZE, 'video.past': PAST, 'video.future': FUTURE, 'model.encoder': (5, 6), 'model.head': (5, 6),
        'model.dtype': 'float32', 'model.feed': 'output'}
MLP = {'model.embed': 'mlp', 'model.embed_widths': (8, 7)}
# a 64 px frame through the five convolutions, with few channels
SMALL_CNN = {'model.channels': (3, 4, 4, 4, 5), 'model.encoder': (5, 5), 'model.head': (5, 5)}


def fast(f, **more):
  """jax.jit for a call or two: compiled in half the time, slower to run."""
  options = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
  return jax.jit(f, compiler_options=options, **more)


def settings(*changes, **more):
  """The whole configuration with {dotted key: value} changes; more are keys of the model section."""
  found = config.get_config()
  for change in (*changes, {f'model.{k}': v for k, v in more.items()}):
    found.update_from_flattened_dict(change)
  return found


def build(*changes, **more):
  """(network, lengths, abstract parameters); nothing is computed."""
  c = settings(*changes, **more)
  model.check(c)
  net = model.make(c, output.parse(c.loss.combo, c.loss.multiply).activate)
  heads = ('recon', 'pred') if c.model.heads == 'both' else (c.model.heads,)
  lengths = {h: {'recon': c.video.past, 'pred': c.video.future}[h] for h in heads}
  past = jax.ShapeDtypeStruct((1, c.video.past, c.video.size, c.video.size), np.float32)
  return net, lengths, jax.eval_shape(lambda x: net.init(KEY, x, lengths), past)['params']


def drawn(shapes, scale=0.5):
  """Parameters of these shapes, without compiling an initialiser."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda s: rng.normal(0, scale / math.sqrt(max(s.shape[-2:])), s.shape).astype(np.float32) if (
      s.ndim > 1) else rng.normal(0, scale, s.shape).astype(np.float32), shapes)


def frames(steps=PAST, size=SIZE, seed=1, batch=BATCH):
  return np.random.default_rng(seed).uniform(0, 1, (batch, steps, size, size)).astype(np.float32)


def flat(tree):
  return flax.traverse_util.flatten_dict(tree, sep='/')


def count(tree):
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


# An independent model in float64, one vector at a time.

def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def reference_step(w, cell, carry, x):
  gates = w['bias'] + (0 if x is None else x @ w['input'])
  h = carry[0]
  if cell == 'gru':
    n = len(h)
    u = w['recurrent'].reshape(n, 3, n)
    r, z = (sigmoid(gates[k * n:(k + 1) * n] + h @ u[:, k]) for k in (0, 1))
    new = np.tanh(gates[2 * n:] + r * (h @ u[:, 2] + w['recurrent_bias']))
    return ((1 - z) * new + z * h,)
  c = carry[1]
  i, f, g, o = (gates + h @ w['recurrent']).reshape(4, -1)
  if cell == 'peephole':
    i, f = i + w['peephole_i'] * c, f + w['peephole_f'] * c
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  if cell == 'peephole':
    o = o + w['peephole_o'] * c
  return sigmoid(o) * np.tanh(c), c


def reference(params, cell, past, steps, feed, truth=None, layers=2):
  """(encoder's carries, its top h, logits, top h) of one sequence, for vector cells and a linear readout."""
  p = jax.tree.map(np.float64, params)
  carries = []
  for i in range(layers):
    n = p['encoder'][f'layer{i}']['recurrent'].shape[0]
    carries.append((np.zeros(n),) * (1 if cell == 'gru' else 2))
  tops = []

  def step(part, carries, x):
    out = []
    for i in range(layers):
      out.append(reference_step(p[part][f'layer{i}'], cell, carries[i], x))
      x = out[-1][0]
    return out

  for frame in np.float64(past):
    carries = step('encoder', carries, frame.ravel())
    tops.append(carries[-1][0])
  states, x, logits, heads = carries, None, [], []
  for t in range(steps):
    carries = step('pred', carries, x)
    heads.append(carries[-1][0])
    logits.append(heads[-1] @ p['pred']['readout']['out']['kernel'] + p['pred']['readout']['out']['bias'])
    x = {'zero': None, 'hidden': heads[-1], 'output': sigmoid(logits[-1])}.get(feed)
    if truth is not None:
      x = np.float64(truth[t]).ravel()
  return states, np.array(tops), np.array(logits), np.array(heads)


@pytest.mark.parametrize('cell,feed,fuse', [
    ('lstm', 'output', True), ('lstm', 'output', False), ('lstm', 'zero', True), ('lstm', 'zero', False),
    ('peephole', 'hidden', True), ('gru', 'teacher', False), ('gru', 'zero', True)])
def test_cells_equal_numpy(cell, feed, fuse):
  net, _, shapes = build(TINY, cell=cell, feed=feed, fuse_input=fuse, heads='pred')
  params, past, future = drawn(shapes, 2.0), frames(), frames(FUTURE, seed=2)
  truth = {'pred': future} if feed == 'teacher' else None

  @fast
  def run(params):
    states, top = net.apply({'params': params}, past, method='encode')
    return states, top, net.apply({'params': params}, states, {'pred': FUTURE}, truth, method='unroll')['pred']

  states, top, (logits, tops) = run(params)
  for b in range(BATCH):
    want = reference(params, cell, past[b], FUTURE, feed, None if truth is None else future[b])
    got = jax.tree.map(lambda a: a[b], (list(states), top, logits.reshape(BATCH, FUTURE, -1), tops))
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=0, atol=1e-5), got, want)


def test_peepholes_at_zero_are_a_plain_lstm():
  net, lengths, shapes = build(TINY, heads='pred')
  other, _, more = build(TINY, heads='pred', cell='peephole')
  params = drawn(shapes)
  padded = {k: flat(params).get(k, np.zeros(s.shape, np.float32)) for k, s in flat(more).items()}
  padded = flax.traverse_util.unflatten_dict(padded, sep='/')
  a, b = (fast(lambda p, n=n: n.apply({'params': p}, frames(), lengths)['pred'][0])(p)
          for n, p in ((net, params), (other, padded)))
  np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_stepwise_equals_fused_for_maps():
  over = {**TINY, 'video.size': 8, 'model.encoder': (3, 4), 'model.head': (3, 4), 'model.kernel': 3}
  results = []
  for fuse in (True, False):
    net, lengths, shapes = build(over, cell='convlstm', embed='patch', feed='zero', fuse_input=fuse)
    made = fast(lambda p: net.apply({'params': p}, frames(size=8), lengths))(drawn(shapes))
    results.append(made)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), *results)
  assert results[0]['pred'][0].shape == (BATCH, FUTURE, 8, 8) and results[0]['encoder'].shape == (BATCH, PAST, 2, 2, 4)


@pytest.mark.parametrize('handover', ['all', 'h_only', 'top_only'])
def test_what_is_handed_over(handover):
  net, _, shapes = build(TINY, handover=handover)
  params = drawn(shapes)
  states = ((frames(5, 1, 3)[:, :, 0, 0],) * 2, (frames(6, 1, 4)[:, :, 0, 0],) * 2)

  def loss(states):
    made = net.apply({'params': params}, states, {'pred': FUTURE}, method='unroll')
    return (made['pred'][0]**2).sum()

  grads = fast(jax.grad(loss))(states)
  alive = [tuple(bool(np.abs(g).max() > 0) for g in layer) for layer in grads]
  assert alive == {'all': [(True, True)] * 2, 'h_only': [(True, False)] * 2,
                   'top_only': [(False, False), (True, True)]}[handover]


def test_truth_is_fed_where_it_should_be():
  net, lengths, shapes = build(TINY, feed='scheduled')
  params = drawn(shapes)
  # the states are what past left, so that a decoder's truth can be changed without changing what the encoder saw
  run = fast(lambda truth, use: net.apply({'params': params}, frames(), lengths, truth, use)['pred'][0])
  truth = {'recon': frames(), 'pred': frames(FUTURE, seed=2)}
  every = {h: np.ones((BATCH, n), bool) for h, n in lengths.items()}
  changed = {**truth, 'pred': truth['pred'].copy()}
  changed['pred'][:, 1] = 1 - changed['pred'][:, 1]
  taught, other = run(truth, every), run(changed, every)
  moved = np.abs(taught - other).max((0, 2, 3)) > 0
  assert moved.tolist() == [False, False, True, True]              # only after the frame that changed

  free = fast(lambda p: net.apply({'params': p}, frames(), lengths)['pred'][0])(params)
  never = {h: np.zeros_like(u) for h, u in every.items()}
  np.testing.assert_allclose(run(truth, never), free, rtol=0, atol=1e-6)
  np.testing.assert_array_equal(run(truth, never), run(changed, never))
  # a row and step at a time: the second row is taught at step 2 alone, so it leaves the free run there
  some = {**never, 'pred': np.zeros((BATCH, FUTURE), bool)}
  some['pred'][1, 2] = True
  mixed = np.abs(run(truth, some) - free).max((2, 3)) > 1e-6
  assert mixed.tolist() == [[False] * 4, [False, False, True, True]]


def test_a_head_that_is_fed_nothing_has_no_input_kernel():
  _, _, shapes = build(TINY, MLP, feed='zero')
  names = set(flat(shapes))
  assert 'encoder/layer0/input' in names and 'pred/layer1/input' in names
  assert not any(n.startswith(('pred/layer0/input', 'pred/embed', 'recon/layer0/input', 'recon/embed')) for n in names)


def test_heads_are_separate():
  # the decoder's last output must not be the predictor's first input, nor anything else of it
  net, lengths, shapes = build(TINY)
  params = drawn(shapes)
  run = fast(lambda p: {h: y[0] for h, y in net.apply({'params': p}, frames(), lengths).items() if h != 'encoder'})
  before, after = run(params), run({**params, 'recon': jax.tree.map(lambda a: a + 0.1, params['recon'])})
  np.testing.assert_array_equal(before['pred'], after['pred'])
  assert np.abs(before['recon'] - after['recon']).max() > 1e-3
  assert set(build(TINY, heads='recon')[2]) == {'encoder', 'recon'}


def scaled(name):
  """An entry of the registry with small frames, a few units a layer and few channels."""
  found = dict(registry.PARITY[name])
  found.update({'video.size': SIZE, 'video.past': 2, 'video.future': 3, 'model.dtype': 'float32'})
  for key in ('model.encoder', 'model.head'):
    found[key] = tuple(min(w // 64, 4) for w in found[key])
  if found['model.readout'] == 'copy':
    found['model.head'] = (*found['model.head'][:-1], SIZE**2)
    if len(found['model.encoder']) == 1:
      found['model.encoder'] = (SIZE**2,)
  if found['model.embed'] == 'cnn':
    found['model.encoder'] = found['model.head'] = (4, 4)
    found['model.channels'] = (3,) * (len(found['model.channels']) - 1) + (4,)
    found['video.size'] = 64 if len(found['model.channels']) == 5 else 33     # 33, 15, 6, 2: with rests
  found.update({k: v for k, v in (('model.embed_widths', (6, 5)), ('model.readout_width', 6)) if k in found})
  return found


# those that are alike once; that fused and stepwise are equal, other tests show
NARROW = {str(sorted({**scaled(name), 'model.fuse_input': 0}.items())): name for name in reversed(registry.PARITY)}


@pytest.mark.parametrize('name', sorted(NARROW.values()))
def test_every_array_gets_a_gradient(name):
  over = scaled(name)
  net, lengths, shapes = build(over)
  past, side = frames(2, over['video.size'], batch=1), over['video.size']
  truth = {h: frames(n, side, batch=1) for h, n in lengths.items()} if over.get('model.feed') == 'teacher' else None

  def loss(params):
    made = net.apply({'params': params}, past, lengths, truth)
    assert {h: made[h][0].shape for h in lengths} == {h: (1, n, side, side) for h, n in lengths.items()}
    return sum((made[h][0]**2).sum() for h in lengths)

  # positive and of a mean over what comes in: no ReLU is shut and no gate saturated
  params = jax.tree.map(lambda a: np.abs(a) / (math.prod(a.shape[:-1]) if a.ndim > 2 else 1), drawn(shapes))
  grads = flat(fast(jax.grad(loss))(params))
  still = {k for k, g in grads.items() if not np.abs(g).max() > 0}
  # the copy models' heads have no layer as wide as the encoder's last, which is therefore never read
  assert all(k.startswith('encoder/layer2') for k in still) if 'copy' in over['model.readout'] else not still
  assert bool(still) == (name in ('copy', 'lstmcell-v0002'))


# Millions of parameters. The paper: 4 x 2048 x (4096 + 3 x 2048) = 83.9 a stack, and 2048 x 4097 = 8.4 to read out
SIZES = {'lstm': 268, 'lstmcell': 403, 'lstmcell-v0002': 486, 'copy': 486, 'lstm_v0001': 18, 'lstm_v0001-h512': 33,
         'cnn-lstmcell-v0001': 717, 'cnn-lstmcell-v0002': 39.4, 'cnn-lstmcell-v0003': 22.3, 'cnn-lstmcell': 39.4,
         'cnn-flatten-lstmcell': 91, 'cnn-flatten': 91, 'convlstm-noflatten': 52, 'paper': 84 + 92 + 92,
         'paper-1layer': 168}


@pytest.mark.parametrize('name', registry.PARITY)
def test_registry_sizes(name):
  shapes = build(registry.PARITY[name])[2]
  assert count(shapes) == pytest.approx(SIZES[name] * 1e6, rel=0.01)
  if name == 'paper':
    assert [round(count(shapes[part]) / 1e6) for part in ('encoder', 'recon', 'pred')] == [84, 92, 92]
  if name == 'copy':
    assert count(build(registry.PARITY[name], heads='recon')[2]) == pytest.approx(302e6, rel=0.005)


def test_convolutions_and_their_mirror():
  assert registry.map_sides(64, (4, 5, 4, 4, 3), (2, 2, 2, 1, 1)) == [64, 31, 14, 6, 3, 1]
  net, lengths, shapes = build({'model.heads': 'pred', 'video.future': 2, 'video.past': 2}, SMALL_CNN, embed='cnn',
                               readout='deconv')
  made = jax.eval_shape(lambda p, x: net.apply({'params': p}, x, lengths), shapes,
                        jax.ShapeDtypeStruct((1, 2, 64, 64), np.float32))
  assert made['pred'][0].shape == (1, 2, 64, 64) and 'dense0' not in shapes['pred']['readout']
  # a stride that does not divide: 12 -> 4 sees 11 px of 12, the last column back is nobody's
  x, kernel, want = np.ones((1, 4, 4, 1), np.float32), np.ones((5, 5, 1, 1), np.float32), np.zeros((12, 12))
  assert registry.map_sides(12, (5,), (2,)) == [12, 4]
  undo = products.Affine(kernel, None, jnp.float32, window=products.mirror(5, 2, 4, 12))
  back = np.asarray(undo(x))[0, :, :, 0]
  for i in range(4):
    for j in range(4):
      want[2 * i:2 * i + 5, 2 * j:2 * j + 5] += 1
  np.testing.assert_array_equal(back, want)


def test_patches_and_back():
  x = np.arange(2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3)
  y = cells.space_to_depth(x, 4)
  np.testing.assert_array_equal(y[1, 1, 0].reshape(4, 4, 3), x[1, 4:, :4])
  np.testing.assert_array_equal(cells.depth_to_space(y, 4), x)


def test_start():
  net, lengths, shapes = build(TINY, heads='pred', cell='peephole')
  params = fast(lambda: net.init(KEY, frames(), lengths))()['params']
  layer = jax.tree.map(np.asarray, params['encoder']['layer0'])
  np.testing.assert_array_equal(layer['bias'].reshape(4, 5), np.array([[0], [1], [0], [0]]) * np.ones((1, 5)))
  for gate in np.split(layer['recurrent'], 4, -1):
    np.testing.assert_allclose(gate.T @ gate, np.eye(5), atol=1e-5)
  assert 0.3 < np.abs(layer['input']).max() <= math.sqrt(6 / (16 + 5)) and not layer['peephole_o'].any()
  # logit(.0493): 804 nats a frame of 64 px rather than 4096 log 2 = 2839
  assert params['pred']['readout']['out']['bias'] == pytest.approx(-2.96, abs=0.005)
  net = build(TINY, heads='pred', cell='peephole', init='uniform')[0]
  uniform = flat(fast(lambda: net.init(KEY, frames(), lengths))()['params'])
  for name, leaf in uniform.items():
    bound = 0.0 if name.endswith('bias') else 0.1 if 'peephole' in name else 0.01
    assert bound / 2 <= np.abs(leaf).max() <= bound, name


def test_bfloat16_loss_is_near():
  over, losses = {**TINY, **MLP, 'model.encoder': (32, 32), 'model.head': (32, 32), 'model.readout_width': 7}, []
  for dtype in ('float32', 'bfloat16'):
    net, lengths, shapes = build(over, dtype=dtype, readout='mlp')
    made = fast(lambda p: net.apply({'params': p}, frames(), lengths))(drawn(shapes, 2.0))
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype('float32')}
    losses.append(float(output.cross_entropy(made['pred'][0], frames(FUTURE, seed=2)).mean()))
  assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_state_shown_through_a_sigmoid_keeps_its_floor():
  # |h| < 1, and sigmoid(-1) = .269, sigmoid(1) = .731
  net, lengths, shapes = build(TINY, {'model.encoder': (16,), 'model.head': (16,)}, readout='copy', heads='pred')
  made = fast(lambda p: net.apply({'params': p}, frames(), lengths)['pred'][0])(drawn(shapes, 50.0))
  shown = np.asarray(jax.nn.sigmoid(made))
  assert 0.2689 < shown.min() < 0.35 and 0.65 < shown.max() < 0.7311


SIMVP = {'video.size': 8, 'video.past': 3, 'model.heads': 'pred', 'model.kind': 'simvp', 'model.hid_s': 4,
         'model.hid_t': 6, 'model.n_t': 2, 'model.n_s': 2, 'model.dtype': 'float32'}


def test_simvp():
  # OpenSTL counts 46.8 M for Moving MNIST, 10 -> 10
  assert count(build({'model.heads': 'pred'}, kind='simvp')[2]) == pytest.approx(46.8e6, rel=0.002)
  net, _, shapes = build(SIMVP)
  params, past = drawn(shapes), frames(3, 8)
  run = fast(lambda n, x: net.apply({'params': params}, x, {'pred': n})['pred'][0], static_argnums=0)
  three, seven = run(3, past), run(7, past)
  assert (three.shape, seven.shape) == ((BATCH, 3, 8, 8), (BATCH, 7, 8, 8))
  np.testing.assert_allclose(seven[:, :3], three, rtol=0, atol=1e-5)
  np.testing.assert_allclose(seven[:, 3:6], run(3, np.asarray(jax.nn.sigmoid(three))), rtol=0, atol=1e-5)
  # an example's forecast is its own, whatever else is in the batch
  np.testing.assert_allclose(run(3, np.stack([past[0], 1 - past[1]]))[0], three[0], rtol=0, atol=1e-6)
  made = jax.eval_shape(lambda: net.apply({'params': params}, past, {'pred': 1}))
  assert made['pred'][0].shape == (BATCH, 1, 8, 8) and made['pred'][1] is None and made['encoder'] is None


def test_simvp_learns_with_every_array():
  net, _, shapes = build(SIMVP, {'model.dtype': 'bfloat16', 'model.n_s': 3})
  loss = lambda p: (net.apply({'params': p}, frames(3, 8), {'pred': 3})['pred'][0]**2).sum()
  grads = flat(fast(jax.grad(loss))(drawn(shapes)))
  assert not [k for k, g in grads.items() if not np.abs(g).max() > 0 or not np.isfinite(g).all()]


@pytest.mark.parametrize('key,changes', [
    ('model.cell', {'cell': 'rnn'}),
    ('model.feed', {'feed': 'truth'}),
    ('model.encoder', {'encoder': ()}),
    ('model.embed_widths', {'embed': 'mlp', 'embed_widths': (0,)}),
    ('model.embed', {'cell': 'convlstm', 'embed': 'flatten'}),
    ('model.embed', {'cell': 'convlstm', 'embed': 'mlp'}),
    ('model.embed', {'embed': 'patch'}),
    ('model.patch', {'cell': 'convlstm', 'embed': 'patch', 'patch': 5}),
    ('model.kernels', {'embed': 'cnn', 'kernels': (3, 3)}),
    (r'model.kernels\[3\] = 4: the map before that layer has a side of 1', {'embed': 'cnn', 'video.size': 30}),
    ('model.readout', {'cell': 'convlstm', 'embed': 'cnn', 'readout': 'linear'}),
    ('model.readout', {'cell': 'convlstm', 'embed': 'patch', 'readout': 'deconv'}),
    ('model.head ends in 2048.*expected 4096', {'readout': 'copy'}),
    ('model.head ends in 9.*expected 16', {'cell': 'convlstm', 'embed': 'patch', 'head': (2048, 9), 'readout': 'copy'}),
    ('model.head', {'handover': 'top_only', 'head': (2048, 64)}),
    ('model.head', {'head': (9, 9)}),
    ('model.encoder', {'encoder': (9, 9, 9)}),
    ('model.heads', {'kind': 'simvp'}),
    ('model.n_s', {'kind': 'simvp', 'heads': 'pred', 'video.size': 62}),
    ('model.n_t', {'kind': 'simvp', 'heads': 'pred', 'n_t': 1}),
])
def test_what_cannot_be_built(key, changes):
  with pytest.raises(ConfigError, match=f'config.{key}'):
    model.check(settings({k if '.' in k else f'model.{k}': v for k, v in changes.items()}))


def test_recurrent_kernels_start_orthogonal_gate_by_gate():
  net, lengths, _ = build(TINY, encoder=(64,), head=(64,))
  kernel = net.init(KEY, jnp.zeros((1, PAST, SIZE, SIZE)), lengths)['params']['encoder']['layer0']['recurrent']
  for gate in np.split(np.asarray(kernel), 4, -1):
    np.testing.assert_allclose(gate.T @ gate, np.eye(64), atol=1e-5)
