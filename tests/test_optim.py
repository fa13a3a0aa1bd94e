"""The optimizer against numbers derived by hand, and what happens to numbers that are not finite."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lab import optim, train
from lab.checkpoint import Checkpoints
from lab.task import ConfigError
from tests import toy


def section(config, **changes):
  config.optim.update({'clip': 0.0, 'decay': 0.0, 'ema': 0.0, 'warmup_steps': 0, 'schedule': 'constant', **changes})
  return config.optim


def apply(config, grads, params, steps=1, total=10):
  tx = optim.make(config, total)
  opt = tx.init(params)
  for step in range(steps):
    params, opt, ok, sums = tx.update(jnp.float32(1), grads, opt, params, jnp.int32(step))
  return params, opt, sums


def test_adamw_first_step_is_the_sign_and_decay_spares_vectors(toy_config):
  o = section(toy_config, name='adamw', learning_rate=0.1, decay=0.5, eps=1e-12)
  params = {'w': jnp.full((1, 1), 2.0), 'b': jnp.full((1,), 2.0)}
  grads = {'w': jnp.full((1, 1), 3.0), 'b': jnp.full((1,), -3.0)}
  params, _, _ = apply(o, grads, params)
  np.testing.assert_allclose(params['w'], [[2 - 0.1 * (1 + 0.5 * 2)]], rtol=1e-6)
  np.testing.assert_allclose(params['b'], [2 + 0.1], rtol=1e-6)


def test_clipping_by_norm_and_a_zero_gradient(toy_config):
  o = section(toy_config, name='sgd', learning_rate=1.0, clip=1.0)
  params, _, sums = apply(o, {'w': jnp.array([3.0, 4.0])}, {'w': jnp.zeros(2)})
  np.testing.assert_allclose(params['w'], [-0.6, -0.8], rtol=1e-6)
  assert float(sums['gradient_norm'][0]) == 5 and float(sums['update_norm'][0]) == pytest.approx(1)
  params, _, _ = apply(o, {'w': jnp.zeros(2)}, {'w': jnp.ones(2)})
  np.testing.assert_array_equal(params['w'], np.ones(2))


@pytest.mark.parametrize('changes', [{'name': 'adamw', 'decay': 0.1, 'clip': 0.5}, {'name': 'lion'}, {'name': 'muon'}])
def test_a_change_that_is_made_twice_for_a_gpu_is_the_same(toy_config, monkeypatch, changes):
  params = {'w': jnp.linspace(-1, 1, 12).reshape(3, 4), 'b': jnp.arange(4.0)}
  grads = jax.tree.map(lambda x: jnp.cos(7 * x), params)
  config = section(toy_config, learning_rate=0.1, **changes)
  barriers = lambda: jax.jit(lambda *x: apply(config, *x)).lower(grads, params).as_text().count('optimization_barrier')
  once, few = apply(config, grads, params, steps=3), barriers()
  monkeypatch.setattr(optim.target, 'platform', lambda: 'gpu')
  assert (barriers() > few) == (changes['name'] == 'adamw')
  for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(apply(config, grads, params, steps=3)), strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('axes', [None, (8, 1, 1), (2, 4, 1)])
def test_the_norm_is_optax_s_of_arrays_of_any_shape(axes):
  rng = np.random.default_rng(0)
  shapes = ((), (3,), (20_000,), (4, 7), (130, 150), (3, 3, 64, 40), (3, 3, 2, 5), (2, 90, 100))
  tree = {str(i): jnp.asarray(rng.normal(0, 10.0**i, shape), jnp.float32) for i, shape in enumerate(shapes)}
  exact = np.sqrt(sum(np.square(np.float64(x)).sum() for x in tree.values()))
  mesh = jax.make_mesh(axes or (1, 1, 1), ('data', 'fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 3,
                       devices=jax.devices()[:math.prod(axes or (1,))])
  with jax.set_mesh(mesh):
    np.testing.assert_allclose(jax.jit(optim.norm)(tree), exact, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(optax.tree.norm)(tree), exact, rtol=1e-6)
    assert optim.norm({}) == 0 and jnp.isnan(optim.norm({'a': jnp.array([1, jnp.nan])}))


def test_averaged_weights(toy_config):
  o = section(toy_config, name='sgd', learning_rate=1.0, ema=0.75)
  params, opt, _ = apply(o, {'w': jnp.array([1.0])}, {'w': jnp.array([0.0])}, steps=2)
  np.testing.assert_allclose(opt.ema['w'], [0.75 * (0.25 * -1) + 0.25 * -2])
  np.testing.assert_array_equal(optim.weights(params, opt)['w'], opt.ema['w'])
  assert optim.weights(params, opt._replace(ema={})) is params


@pytest.mark.parametrize('values', [
    {'schedule': 'exponential', 'factor': 10.0, 'factor_steps': 1}, {'schedule': 'linear', 'end_rate': 3e38},
    {'rates': (('w', 1e30),), 'learning_rate': 1e9}])
def test_a_rate_that_grows_without_end_is_watched(toy_config, values):
  """Where the schedule, its end or a factor can make a finite gradient's change infinite, it is skipped and counted."""
  o = section(toy_config, **{'name': 'sgd', 'learning_rate': 1.0, 'decay': 0.0, **values})
  tx = optim.make(o, 60)
  params = {'w': jnp.full((2, 2), 7.0)}
  new, opt, ok, _ = tx.update(jnp.float32(1), {'w': jnp.full((2, 2), 1e2)}, tx.init(params), params, jnp.int32(59))
  assert not ok and opt.skipped.tolist() == [1, 1]
  np.testing.assert_array_equal(new['w'], params['w'])


@pytest.mark.parametrize('bad', ['loss', 'gradient', 'update'])
def test_a_non_finite_update_changes_nothing_but_the_count(toy_config, bad):
  o = section(toy_config, name='adamw', ema=0.5, learning_rate=3e38 if bad == 'update' else 1e-3, decay=3.0)
  tx = optim.make(o, 10)
  params = {'w': jnp.ones((2, 2))}
  opt = tx.init(params)
  loss = jnp.float32(np.nan if bad == 'loss' else 1)
  grads = {'w': jnp.full((2, 2), np.inf if bad == 'gradient' else 1.0)}
  new, after, ok, _ = tx.update(loss, grads, opt, params, jnp.int32(0))
  assert not ok
  jax.tree.map(np.testing.assert_array_equal, (new, after.inner, after.ema), (params, opt.inner, opt.ema))
  assert after.skipped.tolist() == [1, 1]
  if bad != 'update':
    _, after, _, _ = tx.update(jnp.float32(1), {'w': jnp.ones((2, 2))}, after, params, jnp.int32(1))
    assert after.skipped.tolist() == [0, 1]


def test_settings_that_cannot_run_name_their_key(toy_config):
  for key, value in (('name', 'adma'), ('schedule', 'cos'), ('beta1', 1.0), ('learning_rate', -1.0),
                     ('warmup_steps', 99), ('ema', 1.5)):
    config = toy.get_config()
    config.optim[key] = value
    with pytest.raises(ConfigError, match=f'config.optim.{key} = '):
      optim.check(config)


def run(config, workdir):
  return train.run(toy.make_task(config), config, str(workdir))


def test_one_bad_step_is_skipped_counted_and_logged(toy_config, tmp_path, caplog):
  toy_config.poison = 6
  run(toy_config, tmp_path)
  rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
  skipped = [r['skipped'] for r in rows if r['split'] == 'train']
  assert skipped == [0] * 6 + [1] * 14
  assert next(r for r in rows if r['step'] == 7)['loss'] is None
  assert 'step 7: loss' in caplog.text and '.tfrecord#' in caplog.text


def test_too_many_bad_steps_end_the_run_with_the_records(toy_config, tmp_path):
  toy_config.optim.max_nonfinite = 0
  toy_config.poison = 6
  with pytest.raises(train.NonFinite) as e:
    run(toy_config, tmp_path)
  text = str(e.value)
  assert e.value.exit_code == 4
  assert 'step 7: loss' in text and text.count('.tfrecord#') == 8 and 'resumes from the newest checkpoint' in text
  assert Checkpoints(str(tmp_path)).steps() == [5]


def test_an_exploding_rate_never_reaches_a_checkpoint(toy_config, tmp_path):
  toy_config.optim.update({'name': 'sgd', 'learning_rate': 1e30, 'clip': 0.0, 'decay': 0.0, 'ema': 0.0,
                           'warmup_steps': 0})
  toy_config.checkpoint.steps = 1
  with pytest.raises(train.NonFinite):
    run(toy_config, tmp_path)
  for step in Checkpoints(str(tmp_path)).steps():
    task = toy.make_task(toy_config)
    with train.restored(task, toy_config, str(tmp_path), str(step)) as (_, _, params, _):
      assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_the_step_is_clipped_after_the_rate_as_in_the_papers_rule(toy_config):
  """Momentum with l2 decay, staircase, and every number of the step within 1e-4, against float64."""
  o = section(toy_config, name='momentum', learning_rate=1e-4, decay=0.5, decay_kind='l2', schedule='staircase',
              factor=0.9, factor_steps=2, clip_step=1e-4, rates=(('slow', 0.5),), frozen='still')
  draw = np.random.default_rng(0)
  shapes = {'w': (3, 2), 'slow': (2, 2), 'still': (2, 2)}
  params = {k: jnp.asarray(draw.standard_normal(s), jnp.float32) for k, s in shapes.items()}
  want = {k: np.asarray(v, np.float64) for k, v in params.items()}
  velocity, first = {k: np.zeros(s) for k, s in shapes.items()}, params['still']
  tx = optim.make(o, 10)
  opt, clipped = tx.init(params), 0
  for step in range(8):
    grads = {k: draw.standard_normal(s) for k, s in shapes.items()}
    before, square = params, 0.0
    params, opt, _, sums = tx.update(jnp.float32(1), {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}, opt,
                                     params, jnp.int32(step))
    for k, factor in (('w', 1.0), ('slow', 0.5)):
      velocity[k] = 0.9 * velocity[k] + grads[k] + 0.5 * want[k]
      delta = -1e-4 * 0.9 ** ((step + 1) // 2) * factor * velocity[k]
      clipped += np.sum(np.abs(delta) > 1e-4)
      delta = np.clip(delta, -1e-4, 1e-4)
      want[k], square = want[k] + delta, square + np.sum(delta**2)
      np.testing.assert_allclose(params[k], want[k], rtol=0, atol=2e-6)
      # a float32 near 2 is told to 1.2e-7
      assert np.abs(params[k] - before[k]).max() <= 1e-4 + 1.2e-7
    assert float(sums['update_norm'][0]) == pytest.approx(square**0.5, rel=1e-4)
  assert 10 < clipped < 80      # of 8 x 10 numbers: both kinds are there
  np.testing.assert_array_equal(params['still'], first)


def test_the_staircase_of_the_paper(toy_config):
  o = section(toy_config, name='momentum', learning_rate=1e-4, schedule='staircase', factor=0.9, factor_steps=10000)
  tx = optim.make(o, 20000)
  w = {'w': jnp.zeros(1)}
  rate = lambda step: float(tx.update(jnp.float32(1), w, tx.init(w), w, jnp.int32(step))[3]['learning_rate'][0])
  assert rate(0) == rate(9998) == pytest.approx(1e-4, rel=1e-6) and rate(9999) == pytest.approx(9e-5, rel=1e-6)
  assert rate(10000) == pytest.approx(9e-5, rel=1e-6)


def test_the_step_of_the_second_optimizer_is_clipped_too(toy_config):
  toy_config.optim.second.params = 'b'
  o = section(toy_config, name='sgd', learning_rate=0.1, clip_step=1e-3)
  params, _, _ = apply(o, {'w': jnp.ones((1, 1)), 'b': -jnp.ones(1)}, {'w': jnp.zeros((1, 1)), 'b': jnp.zeros(1)})
  np.testing.assert_allclose([params['w'][0, 0], params['b'][0]], [-1e-3, 1e-3], rtol=1e-6)


def test_a_clipped_infinite_step_is_still_skipped(toy_config):
  o = section(toy_config, name='sgd', learning_rate=3e38, clip_step=1e-3)
  params, opt, _ = apply(o, {'w': jnp.full((2, 2), 10.0)}, {'w': jnp.ones((2, 2))})
  np.testing.assert_array_equal(params['w'], np.ones((2, 2)))
  assert opt.skipped.tolist() == [1, 1]


@pytest.mark.parametrize('key, value', [
    ('optim.clip_step', -1.0), ('init_only', 'dense'), ('optim.continuation', 'restart'),
    ('optim.continuation_steps', 7), ('optim.keep_moments', False), ('optim.decay_not', 'dense'),
    ('optim.decay_kind', 'l2')])
def test_a_key_that_nothing_would_read_is_refused(toy_config, key, value):
  toy_config.optim.update({'name': 'sgd', 'decay': 0.0})
  train.check(toy_config)
  toy_config.update_from_flattened_dict({key: value})
  with pytest.raises(ConfigError, match=f'config.{key} = {value!r}: expected '):
    train.check(toy_config)
  if 'clip' not in key:
    toy_config.optim.decay = 0.1
    toy_config['init_from' if key == 'init_only' else 'continue_from'] = 'runs/other'
    train.check(toy_config)


@pytest.mark.parametrize('name', optim.BOUNDED)
def test_a_bounded_optimizer_stays_finite_for_any_gradient_of_a_finite_norm(toy_config, name):
  """Which is why it does not wait for the size of the change."""
  toy_config.optim.update({'name': name, 'beta1': -1.0, 'beta2': -1.0, 'eps': -1.0})
  o = section(toy_config, name=name, learning_rate=optim.TAME, decay=0.0, clip=0.0)
  tx = optim.make(o, 10)
  params = {'w': jnp.ones((2, 2))}
  opt = tx.init(params)
  for size in (9e18, 1e-30, 0.0, 9e18):
    params, opt, ok, _ = tx.update(jnp.float32(1), {'w': jnp.full((2, 2), size)}, opt, params, jnp.int32(0))
    assert ok and all(np.isfinite(x).all() for x in jax.tree.leaves((params, opt)))
