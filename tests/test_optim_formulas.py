"""Every optimizer against its published formula in float64, and every setting around it."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lab import optim
from lab.config import core
from lab.task import ConfigError
from tests.conftest import FAST

SHAPES = {'kernel': (4, 3), 'bias': (3,), 'embed': (5, 2)}


def settings(**changes):
  config = core()
  plain = {'schedule': 'constant', 'learning_rate': 0.1, 'clip': 0.0, 'decay': 0.0}
  config.update_from_flattened_dict({f'optim.{k}': v for k, v in {**plain, **changes}.items()})
  return config


def draw(shapes, steps=6):
  """Parameters, and a gradient an update."""
  random = np.random.default_rng(0)
  normal = lambda: {k: random.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
  return normal(), [normal() for _ in range(steps)]


def learn(config, params, grads, options=None):
  """The parameters after every update, the optimizer's state and the last sums; one compilation."""
  optim.check(config)
  tx = optim.make(config.optim, len(grads))
  update, opt, seen = jax.jit(tx.update, compiler_options=options), tx.init(jax.tree.map(jnp.asarray, params)), []
  for step, g in enumerate(grads):
    params, opt, ok, sums = update(jnp.float32(1), g, opt, params, jnp.int32(step))
    assert ok
    seen.append(params)
  return seen, opt, {k: float(total / weight) for k, (total, weight) in sums.items()}


def follow(formulas, params, grads, rate):
  """The parameters after every update in float64: w -= rate formula(gradient, memory, update, w)."""
  w, seen = {k: v.astype(np.float64) for k, v in params.items()}, []
  memory = {k: collections.defaultdict(float) for k in params}
  for t, g in enumerate(grads, 1):
    w = {k: w[k] - rate * formulas[k](g[k].astype(np.float64), memory[k], t, w[k]) for k in w}
    seen.append(w)
  return seen


def agree(config, formulas, params, grads, rtol=2e-4, atol=4e-6):
  """Compares the ways from the start, whose numbers are about 1: 4e-6 is their rounding over some updates."""
  (seen, opt, _), want = learn(config, params, grads), follow(formulas, params, grads, config.optim.learning_rate)
  for found, expected in zip(seen, want, strict=True):
    for k, start in params.items():
      np.testing.assert_allclose(np.asarray(found[k], np.float64) - start, expected[k] - start, rtol, atol, err_msg=k)
  for k, start in params.items():
    moved = np.abs(want[-1][k] - start).max()
    assert moved == 0 and (seen[-1][k] == start).all() if formulas[k] is still else moved > 0.01
  return opt


def still(g, m, t, w):
  return 0 * w


def held(opt):
  """The shapes of what the optimizer remembers, but for its counts."""
  return sorted(x.shape for x in jax.tree.leaves(opt.inner) if x.ndim)


def sgd(g, m, t, w):
  return g


def rms(x):
  return np.sqrt(np.mean(x**2))


def momentum(g, m, t, w, beta1=0.9, nesterov=False):
  m['v'] = beta1 * m['v'] + g
  return g + beta1 * m['v'] if nesterov else m['v']


def rmsprop(g, m, t, w, beta1=0.0, beta2=0.9, eps=1e-8, nesterov=False):
  m['s'] = beta2 * m['s'] + (1 - beta2) * g**2
  return momentum(g / (np.sqrt(m['s']) + eps), m, t, w, beta1, nesterov)


def moments(g, m, t, beta1, beta2):
  """First and second moment, both without their bias to zero."""
  m['m'] = beta1 * m['m'] + (1 - beta1) * g
  m['v'] = beta2 * m['v'] + (1 - beta2) * g**2
  return m['m'] / (1 - beta1**t), m['v'] / (1 - beta2**t)


def adam(g, m, t, w, beta1=0.9, beta2=0.999, eps=1e-8):
  first, second = moments(g, m, t, beta1, beta2)
  return first / (np.sqrt(second) + eps)


def adafactor(g, m, t, w, beta2=0.8, eps=1e-30):
  keep, square = 1 - t**-beta2, g**2 + eps
  if g.ndim == 2 and min(g.shape) >= 128:
    m['r'] = keep * m['r'] + (1 - keep) * square.sum(1)
    m['c'] = keep * m['c'] + (1 - keep) * square.sum(0)
    second = np.outer(m['r'], m['c']) / m['r'].sum()
  else:
    second = m['v'] = keep * m['v'] + (1 - keep) * square
  u = g / np.sqrt(second)
  return max(1e-3, rms(w)) * u / max(1, rms(u))


def lion(g, m, t, w, beta1=0.9, beta2=0.99):
  u = np.sign(beta1 * m['m'] + (1 - beta1) * g)
  m['m'] = beta2 * m['m'] + (1 - beta2) * g
  return u


def radam(g, m, t, w, beta1=0.9, beta2=0.999, eps=1e-8, branches=None):
  first, second = moments(g, m, t, beta1, beta2)
  limit = 2 / (1 - beta2) - 1
  rho = limit - 2 * t * beta2**t / (1 - beta2**t)
  if branches is not None:
    branches.add(rho > 5)
  if rho <= 5:      # the authors' program; the paper says 4
    return first
  r = np.sqrt((rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho))
  return r * first / (np.sqrt(second) + eps)


def adadelta(g, m, t, w, beta2=0.9, eps=1e-6):
  m['g'] = beta2 * m['g'] + (1 - beta2) * g**2
  u = np.sqrt(m['x'] + eps) / np.sqrt(m['g'] + eps) * g
  m['x'] = beta2 * m['x'] + (1 - beta2) * u**2
  return u


def adagrad(g, m, t, w, eps=1e-7):
  m['s'] = m['s'] + g**2
  return g / np.sqrt(m['s'] + eps)


def adamax(g, m, t, w, beta1=0.9, beta2=0.999):
  m['m'] = beta1 * m['m'] + (1 - beta1) * g
  m['u'] = np.maximum(beta2 * m['u'], np.abs(g))
  return m['m'] / (1 - beta1**t) / m['u']


def muon(g, m, t, w, beta1=0.95):
  """Nesterov's momentum, each part without its bias (Dozat 2016, algorithm 2), of a matrix of all inputs x outputs."""
  m['m'] = beta1 * m['m'] + (1 - beta1) * g
  x = beta1 * m['m'] / (1 - beta1**(t + 1)) + (1 - beta1) * g / (1 - beta1**t)
  x = x.reshape(-1, x.shape[-1])
  sides = x.shape
  x = x / np.linalg.norm(x)
  for _ in range(5):
    a = x @ x.T
    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
  return (0.2 * np.sqrt(max(sides)) * x).reshape(g.shape)


def each_layer(formula):
  """The formula on every layer of a stack by itself."""
  def stacked(g, m, t, w):
    layers = m.setdefault('layers', [collections.defaultdict(float) for _ in g])
    return np.stack([formula(*x, t, v) for *x, v in zip(g, layers, w)])
  return stacked


def fixed(formula, **own):
  return lambda *x: formula(*x, **own)


@pytest.mark.parametrize('formula, own, rate', [
    (sgd, {}, 0.1),
    (momentum, {}, 0.1), (momentum, {'beta1': 0.6}, 0.1), (momentum, {'nesterov': True}, 0.1),
    (rmsprop, {}, 0.1), (rmsprop, {'beta2': 0.7, 'eps': 0.3}, 0.1), (rmsprop, {'beta1': 0.5}, 0.1),
    (rmsprop, {'beta1': 0.8, 'nesterov': True}, 0.1),
    (adam, {}, 0.1), (adam, {'beta1': 0.6, 'beta2': 0.8, 'eps': 0.3}, 0.1),
    (lion, {}, 0.1), (lion, {'beta1': 0.5, 'beta2': 0.7}, 0.1),
    (radam, {}, 0.1), (radam, {'beta1': 0.6, 'beta2': 0.9, 'eps': 0.3}, 0.1),
    (adadelta, {}, 20.0), (adadelta, {'beta2': 0.6, 'eps': 0.1}, 1.0),
    (adagrad, {}, 0.1), (adagrad, {'eps': 0.5}, 0.1),
    (adamax, {}, 0.1), (adamax, {'beta1': 0.6, 'beta2': 0.7}, 0.1),
])
def test_an_optimizer_is_its_formula(formula, own, rate):
  params, grads = draw(SHAPES, 8)
  config = settings(name=formula.__name__, learning_rate=rate, **own)
  branches, formulas = set(), {k: fixed(formula, **own) for k in params}
  if formula is radam:      # both sides of rho = 5 must be met: with 0.999 rho is about t
    formulas['kernel'] = fixed(radam, **own, branches=branches)
  # 1 - 0.999^t keeps four digits in float32: radam's rho is off by 0.03, its factor (about 0.03) by up to 1 %
  agree(config, formulas, params, grads, atol=6e-5 if formula is radam and not own else 4e-6)
  assert formula is not radam or branches == {False, True}


def test_adamw_is_adam_with_decay_beside_it():
  params, grads = draw(SHAPES)
  agree(settings(name='adamw', beta2=0.95), {k: fixed(adam, beta2=0.95) for k in params}, params, grads)


@pytest.mark.parametrize('own', [{}, {'beta2': 0.5, 'eps': 0.1}])
def test_adafactor_factors_large_matrices_only(own):
  params, grads = draw({'large': (130, 128), 'small': (127, 140), 'bias': (3,), 'tiny': (2, 2)}, 4)
  params['tiny'] *= 1e-6      # its root mean square counts as 1e-3
  slope = (1 + np.arange(128, dtype=np.float32)[None]) / 64      # columns of different sizes
  grads = [{**g, 'large': g['large'] * slope} for g in grads]
  formulas = {k: fixed(adafactor, **own) for k in params}
  opt = agree(settings(name='adafactor', learning_rate=10.0, **own), formulas, params, grads, atol=1e-4)
  assert (130, 128) not in held(opt) and {(130,), (128,), (127, 140)} <= set(held(opt))


def test_muon_takes_matrices_kernels_and_stacks_and_leaves_the_rest_to_the_second():
  params, grads = draw({'matrix': (6, 4), 'conv': (3, 3, 2, 4), 'layers': (2, 5, 4), 'layers_bias': (2, 4),
                        'bias': (4,), 'embed': (5, 2)})
  config = settings(name='muon', stacked='layers', **{'second.params': 'embed', 'second.name': 'lion'})
  formulas = {'matrix': muon, 'conv': muon, 'layers': each_layer(muon), 'layers_bias': lion, 'bias': lion}
  formulas['embed'] = lion
  agree(config, formulas, params, grads, rtol=1e-3, atol=1e-4)
  # the other side, and another beta; the second is adamw where nothing is said
  params, grads = draw({'wide': (3, 7), 'bias': (4,)})
  formulas = {'wide': fixed(muon, beta1=0.8), 'bias': fixed(adam)}
  agree(settings(name='muon', beta1=0.8), formulas, params, grads, rtol=1e-3, atol=1e-4)


def test_a_second_optimizer_takes_its_group_with_its_own_betas():
  params, grads = draw(SHAPES)
  own = {'second.params': 'embed|bias', 'second.name': 'adam', 'second.beta2': 0.9}
  other = fixed(adam, beta2=0.9)
  agree(settings(name='sgd', **own), {'kernel': sgd, 'bias': other, 'embed': other}, params, grads)


def decayed(formula, decay, before):
  return lambda g, m, t, w: formula(g + decay * w, m, t, w) if before else formula(g, m, t, w) + decay * w


@pytest.mark.parametrize('name, formula, before, changes', [
    ('adamw', adam, False, {}), ('sgd', sgd, False, {}), ('lion', lion, False, {}), ('adagrad', adagrad, False, {}),
    ('adam', adam, True, {}), ('sgd', sgd, True, {'decay_kind': 'l2'}),
    ('rmsprop', rmsprop, True, {'decay_kind': 'l2'}),
])
def test_decay_of_matrices_that_are_not_excepted(name, formula, before, changes):
  params, grads = draw({**SHAPES, 'layers_bias': (2, 3)})
  config = settings(name=name, decay=0.3, decay_not='embed', stacked='layers', **changes)
  formulas = {k: formula for k in params} | {'kernel': decayed(formula, 0.3, before)}
  agree(config, formulas, params, grads)


def test_decay_goes_through_both_optimizers():
  params, grads = draw(SHAPES)
  config = settings(name='sgd', decay=0.3, decay_kind='l2', **{'second.params': 'embed'})      # adamw's is decoupled
  formulas = {'kernel': decayed(sgd, 0.3, True), 'bias': sgd, 'embed': decayed(adam, 0.3, False)}
  agree(config, formulas, params, grads)


def one(*x):
  return np.array(x, np.float32)


def test_clipping_by_norm_then_by_value():
  params, grads = {'a': one(0, 0), 'b': one(0)}, [{'a': one(2, -4), 'b': one(4)}]
  # the norm is sqrt(4 + 16 + 16) = 6: times 3 / 6 it is 3; then within -1.5 to 1.5; the rate is 1
  for changes, a, b in (({'clip': 3.0}, [-1, 2], [-2]), ({'clip': 7.0}, [-2, 4], [-4]),
                        ({'clip_value': 1.5}, [-1.5, 1.5], [-1.5]),
                        ({'clip': 3.0, 'clip_value': 1.5}, [-1, 1.5], [-1.5])):
    seen, _, sums = learn(settings(name='sgd', learning_rate=1.0, **changes), params, grads)
    np.testing.assert_allclose(seen[0]['a'], a, rtol=1e-6)
    np.testing.assert_allclose(seen[0]['b'], b, rtol=1e-6)
    assert sums['gradient_norm'] == pytest.approx(6)      # as it came


def test_clipping_the_update_array_by_array():
  params, grads = draw(SHAPES)
  grads[0] = {**grads[0], 'bias': grads[0]['bias'] * np.float32(1e-3)}
  for name, formula, d in (('sgd', sgd, 0.5), ('adamw', adam, 0.2)):
    clip = lambda u: u / max(1, rms(u) / d)
    clipped = lambda *x: clip(formula(*x))
    matrix = decayed(clipped, 0.3, False)      # the decay is not clipped with it
    agree(settings(name=name, clip_update=d, decay=0.3),
          {'kernel': matrix, 'bias': clipped, 'embed': matrix}, params, grads)


@pytest.mark.parametrize('name', sorted(optim.KINDS))
def test_frozen_parameters_stay_bit_for_bit_and_take_no_moments(name):
  params, grads = draw(SHAPES, 3)
  config = settings(name=name, frozen='kern', decay=0.1, ema=0.5, orthograd=True, learning_rate=10.0)
  seen, opt, sums = learn(config, params, grads)
  assert [(seen[-1][k] != params[k]).all() for k in SHAPES] == [False, True, True]
  np.testing.assert_array_equal(seen[-1]['kernel'], params['kernel'])
  less = optim.make(settings(name=name).optim, 3).init({k: jnp.asarray(params[k]) for k in ('bias', 'embed')})
  assert held(opt) == held(less)
  assert sums['gradient_norm'] == pytest.approx(np.sqrt(sum((grads[-1][k]**2).sum() for k in ('bias', 'embed'))))


def test_frozen_gradients_have_no_say():
  params, grads = draw(SHAPES)
  for g in grads:
    g['kernel'][:] = np.nan      # and yet no update is skipped
  agree(settings(name='adamw', frozen='kern', clip=1e6), {'kernel': still, 'bias': adam, 'embed': adam}, params, grads)


def test_the_first_pattern_that_matches_decides_the_rate():
  params, grads = draw(SHAPES)
  config = settings(name='sgd', decay=0.3, rates=(('kern', 0.0), ('kernel|bias', 0.5), ('bias', 7)))
  formulas = {'kernel': still, 'bias': lambda *x: 0.5 * sgd(*x), 'embed': decayed(sgd, 0.3, False)}
  agree(config, formulas, params, grads)


def test_the_average_follows_at_its_own_pace():
  params, grads = draw(SHAPES)
  seen, opt, _ = learn(settings(name='sgd', ema=0.8), params, grads)
  average = params
  for w in seen:
    average = {k: 0.8 * average[k] + 0.2 * np.asarray(w[k], np.float64) for k in params}
  for k in params:
    np.testing.assert_allclose(opt.ema[k], average[k], rtol=1e-5, atol=1e-6)


def across(g, w):
  """OrthoGrad in float64."""
  side = g - (w * g).sum() / ((w * w).sum() + 1e-30) * w
  return side * np.linalg.norm(g) / (np.linalg.norm(side) + 1e-30)


def test_orthograd_by_hand():
  # w.g / w.w = 11 / 25: g - 0.44 w = (-0.32, 0.24), times sqrt(5) / 0.4; zeros stay; scales are left alone
  params = {'w': one(3, 4), 'still': one(3, 4), 'zero': one(0, 0), 'norm_scale': one(3, 4), 'scale': one(3, 4)}
  grads = {'w': one(1, 2), 'still': one(0, 0), 'zero': one(1, 2), 'norm_scale': one(1, 2), 'scale': one(1, 2)}
  seen, _, _ = learn(settings(name='sgd', learning_rate=1.0, orthograd=True), params, [grads])
  change = {k: params[k] - np.asarray(seen[0][k]) for k in params}
  turned = (-1.78885, 1.34164)
  for k, want in {'w': turned, 'still': (0, 0), 'zero': (1, 2), 'norm_scale': turned, 'scale': (1, 2)}.items():
    np.testing.assert_allclose(change[k], want, atol=1e-5, err_msg=k)


def test_orthograd_comes_before_adam_and_takes_each_layer_of_a_stack_by_itself():
  params, grads = draw({'kernel': (4, 3), 'layers': (2, 4, 3), 'layers_bias': (2, 3)})
  formula = lambda g, m, t, w: adam(across(g, w), m, t, w, beta2=0.9)
  formulas = {'kernel': formula, 'layers': each_layer(formula), 'layers_bias': each_layer(formula)}
  agree(settings(name='adamw', beta2=0.9, orthograd=True, stacked='layers'), formulas, params, grads)


@pytest.mark.parametrize('w, g', [((0.3,), (0.7,)), ((1.1,), (0.9,)), ((0.3, 0.6, 0.9), (0.1, 0.2, 0.3))])
def test_orthograd_drops_a_gradient_along_its_weights(w, g):
  # w.g / w.w w is g itself, so nothing is left; a rounding of it must not be brought back to the length of g
  params, grads = {'w': one(*w)}, [{'w': one(*g)}]
  seen, _, _ = learn(settings(name='sgd', learning_rate=1.0, orthograd=True), params, grads)
  np.testing.assert_allclose(seen[0]['w'], w, atol=1e-3)


@pytest.mark.parametrize('name', sorted(optim.KINDS))
def test_no_gradient_and_no_weights_give_finite_numbers(name):
  params, _ = draw(SHAPES)
  params |= {f'zero_{k}': np.zeros_like(v) for k, v in params.items()}
  config = settings(name=name, orthograd=True, clip=1.0, clip_update=1.0)
  seen, opt, sums = learn(config, params, [jax.tree.map(np.zeros_like, params)] * 3)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves((seen, opt))) and sums['update_norm'] == 0
  jax.tree.map(np.testing.assert_array_equal, seen[-1], params)


@pytest.mark.parametrize('changes', [{'name': 'adamw', 'orthograd': True}, {'name': 'muon'}])
def test_sharded_updates_are_those_of_one_device(changes):
  params, grads = draw({'rows': (16, 24), 'columns': (16, 24), 'layers': (2, 16, 8)}, 2)
  mesh = Mesh(np.array(jax.devices()), ('data',))
  assert mesh.size == 8
  cut = {'rows': P('data'), 'columns': P(None, 'data'), 'layers': P(None, 'data')}
  shard = lambda tree: {k: jax.device_put(v, NamedSharding(mesh, cut[k])) for k, v in tree.items()}
  config = settings(stacked='layers', learning_rate=1.0, **changes)
  # muon's five Newton-Schulz steps enlarge what adding in another order rounds: the bound is for sums that FAST makes
  alone, spread = (learn(config, *x, FAST)[0] for x in ((params, grads), (shard(params), [shard(g) for g in grads])))
  for k in params:
    assert len(spread[-1][k].addressable_shards) == 8 and not spread[-1][k].is_fully_replicated
    np.testing.assert_allclose(spread[-1][k], alone[-1][k], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize('key', ['stacked', 'frozen', 'decay_not', 'second.params', 'rates'])
def test_a_pattern_that_matches_nothing_is_refused(key):
  value = (('bias', 2.0), ('x', 1.0)) if key == 'rates' else 'x'
  config = settings(decay=0.1, **{key: value})
  optim.check(config)
  with pytest.raises(ConfigError, match=rf"config\.optim\.{key}: 'x' matches no parameter"):
    optim.make(config.optim, 10).init({'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)})


@pytest.mark.parametrize('changes, formula', [
    ({'name': 'adafactor'}, adafactor), ({'name': 'sgd', 'clip_update': 0.5}, lambda g, *x: g / max(1, rms(g) / 0.5))])
def test_each_layer_of_a_stack_has_its_own_root_mean_square(changes, formula):
  params, grads = draw({'layers': (2, 4, 3)}, 3)
  grads = [{'layers': g['layers'] * np.float32([[[1]], [[30]]])} for g in grads]
  params['layers'][1] *= 30
  agree(settings(stacked='layers', **changes), {'layers': each_layer(formula)}, params, grads, atol=1e-4)
