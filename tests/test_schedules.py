"""Learning rates against their formulas in float64, continuations of another run, micro-batches, and bad settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import accumulate, optim, schedules
from lab.config import core
from lab.task import ConfigError

MLM = {'schedule': 'cosine', 'learning_rate': 1e-3, 'end_rate': 5e-5, 'warmup_steps': 1000, 'schedule_steps': 45000}


def settings(total, **changes):
  config = core()
  config.total_steps = total
  config.continue_from = 'runs/other' * any(key.startswith('continuation') for key in changes)
  config.update_from_flattened_dict({f'optim.{k}': v for k, v in changes.items()})
  optim.check(config)
  return config.optim


def rates(o, total, updates, joint=None):
  """The rates of some updates: one jitted program, all updates at once."""
  at, joint = schedules.make(o, total), joint or schedules.nowhere()
  steps = jnp.asarray(np.asarray(updates) - 1, jnp.int32)      # the update u is made at state.step = u - 1
  return np.asarray(jax.jit(jax.vmap(at, (0, None)))(steps, joint))


def joint_at(step, rate):
  return schedules.Joint(jnp.int32(step), jnp.float32(rate))


def cosine(u, p, m, w, d):
  """The rate of the update u: linear to p at w, then half a cosine to m at d."""
  after = m + 0.5 * (1 + np.cos(np.pi * np.minimum(u - w, d - w) / (d - w))) * (p - m)
  return np.where(u < w, p * u / max(w, 1), after)


@pytest.mark.parametrize('total, changes, corners', [
    # masked language model: halfway up; the peak; halfway down, (1e-3 + 5e-5) / 2; the end; and after it
    (60000, MLM, {500: 5e-4, 1000: 1e-3, 23000: 5.25e-4, 45000: 5e-5, 45001: 5e-5, 60000: 5e-5, 70000: 5e-5}),
    # left to right: the same to 25,000, halfway down at (1000 + 25000) / 2
    (50000, MLM | {'schedule_steps': 25000}, {1000: 1e-3, 13000: 5.25e-4, 25000: 5e-5, 50000: 5e-5}),
    # sentences: halfway down at (300 + 8000) / 2, (6e-5 + 1e-7) / 2
    (10000, {'schedule': 'cosine', 'learning_rate': 6e-5, 'end_rate': 1e-7, 'warmup_steps': 300,
             'schedule_steps': 8000}, {1: 2e-7, 150: 3e-5, 300: 6e-5, 4150: 3.005e-5, 8000: 1e-7, 10000: 1e-7}),
    # discrete codes: halfway down at (10,000 + 1,000,000) / 2 = 505,000
    (1000000, {'schedule': 'cosine', 'learning_rate': 1e-3, 'end_rate': 1e-5, 'warmup_steps': 10000},
     {5000: 5e-4, 10000: 1e-3, 505000: 5.05e-4, 1000000: 1e-5}),
    # 512^-1/2 min(u^-1/2, u 4000^-3/2): 512^-1/2 = 0.04419417; 4000^-3/2 = 3.952847e-6; 4000^-1/2 = 0.01581139;
    # 16000^-1/2 is half of that
    (20000, {'schedule': 'noam', 'learning_rate': 1.0, 'warmup_steps': 4000, 'noam_width': 512},
     {1: 1.746928e-7, 4000: 6.987712e-4, 16000: 3.493856e-4}),
])
def test_rates_at_named_updates(total, changes, corners):
  found = rates(settings(total, **changes), total, list(corners))
  np.testing.assert_allclose(found, list(corners.values()), rtol=1e-5)


def formula(name, u, p, m, w, d, k, f, width):
  """A schedule in float64, n = u - w updates after the warm-up."""
  n = np.maximum(u - w, 0)
  after = {
      'constant': lambda: np.full(u.shape, p),
      'linear': lambda: p + (m - p) * np.minimum(n / (d - w), 1),
      'cosine': lambda: cosine(u, p, m, w, d),
      'exponential': lambda: np.maximum(m, p * f**(n / k)),
      'staircase': lambda: np.maximum(m, p * f**(n // k)),
      'rsqrt': lambda: p * np.sqrt(w / u),
      'noam': lambda: p * width**-0.5 * np.minimum(u**-0.5, u * w**-1.5),
      'onecycle': lambda: onecycle(np.minimum(u - 1, d), p, d),
  }[name]()
  return after if name in ('noam', 'onecycle') else np.where(u < w, p * u / max(w, 1), after)


def onecycle(n, p, d):
  """p/25 at n = 0, p at 0.3 d, p/250,000 at d; half a cosine between them."""
  top = int(0.3 * d)
  blend = lambda a, b, share: a + (b - a) * (1 - np.cos(np.pi * share)) / 2
  return np.where(n < top, blend(p / 25, p, n / top), blend(p, p / 250000, (n - top) / (d - top)))


DEFAULT = {'p': 0.02, 'm': 0.0, 'w': 40, 'd': 300, 'k': 1000, 'f': 0.5, 'width': 512.0}
KEYS = {'p': 'learning_rate', 'm': 'end_rate', 'w': 'warmup_steps', 'd': 'schedule_steps', 'k': 'factor_steps',
        'f': 'factor', 'width': 'noam_width'}


@pytest.mark.parametrize('name, own', [
    ('constant', {}), ('constant', {'w': 0}),
    ('linear', {'m': 0.001}), ('linear', {'d': 200}), ('linear', {'w': 0, 'd': 200, 'm': 0.05}),
    ('cosine', {'m': 0.001}), ('cosine', {'d': 200, 'm': 0.003}), ('cosine', {'w': 0, 'm': 0.001}),
    ('exponential', {'k': 30}), ('exponential', {'k': 30, 'm': 0.002}), ('exponential', {'k': 100, 'f': 1.5, 'w': 0}),
    ('staircase', {'k': 50}), ('staircase', {'k': 50, 'f': 0.1, 'm': 0.0005}), ('staircase', {'k': 60, 'w': 0}),
    ('rsqrt', {}), ('noam', {'p': 2.0, 'width': 256.0}), ('onecycle', {'w': 0}), ('onecycle', {'w': 0, 'd': 100}),
])
def test_every_update_of_a_schedule_is_its_formula(name, own):
  updates, total = np.arange(1, 321), 300      # some after the end as well
  changes = {KEYS[k]: int(v) if k == 'width' else v for k, v in own.items()} | {'learning_rate': own.get('p', 0.02)}
  o = settings(total, schedule=name, **({'warmup_steps': 40} | changes))
  want = formula(name, updates.astype(np.float64), **(DEFAULT | own))
  # 1 + cos loses digits near 0; 1e-7 of the peak is a rounding of float32
  np.testing.assert_allclose(rates(o, total, updates), want, rtol=1e-5, atol=1e-7 * own.get('p', 0.02))


@pytest.mark.parametrize('every', [3, 41, 47, 50, 55, 61, 1000])
def test_a_staircase_jumps_at_the_multiple_itself(every):
  # n (1 / every) can be rounded to less than n / every: 41 (1 / 41) is below 1 in float32
  o = settings(6000, schedule='staircase', learning_rate=1.0, factor=0.5, factor_steps=every, warmup_steps=7)
  stairs = np.arange(1, 6)
  jump = 7 + stairs * every
  found = rates(o, 6000, np.concatenate([jump - 1, jump, jump + 1])).reshape(3, 5)
  np.testing.assert_allclose(found, [2.0**(1 - stairs), 2.0**-stairs, 2.0**-stairs], rtol=1e-6)


def test_one_cycle_starts_peaks_and_ends_where_it_says():
  o = settings(100, schedule='onecycle', learning_rate=0.5)
  found = rates(o, 100, [1, 31, 101, 150])      # 0, 30 and 100 updates made before
  np.testing.assert_allclose(found, [0.5 / 25, 0.5, 0.5 / 250000, 0.5 / 250000], rtol=1e-5)
  np.testing.assert_allclose(rates(o, 100, np.arange(1, 101)).max(), 0.5, rtol=1e-6)


@pytest.mark.parametrize('name', sorted(set(schedules.SCHEDULES) - {'onecycle'}))
def test_no_schedule_jumps_at_the_end_of_its_warm_up(name):
  o = settings(1000, schedule=name, learning_rate=0.5, warmup_steps=200)
  found = rates(o, 1000, np.arange(1, 402))
  peak = 0.5 * (512**-0.5 * 200**-0.5 if name == 'noam' else 1)
  np.testing.assert_allclose(found[199], peak, rtol=1e-5)
  assert found.argmax() == 199
  # up to the peak the slope is peak / 200; of what follows, the cosine is the steepest: pi / 2 peak / 800
  assert np.abs(np.diff(found)).max() <= peak / 200 * 1.001


def test_blend_goes_from_the_last_rate_to_the_schedule():
  o, start = settings(60000, **MLM), 30000
  joint = joint_at(start, 5e-5)
  # s(30025) = 2.96613e-4, s(30050) = 2.95870e-4: 5e-5 + 0 (s - 5e-5), + 1/2, + 1; five digits are good to 3e-5
  np.testing.assert_allclose(rates(o, 60000, [start, start + 25, start + 50], joint), [5e-5, 1.7331e-4, 2.9587e-4],
                             rtol=3e-5)
  inside = np.arange(start, start + 51)
  s = cosine(inside.astype(np.float64), 1e-3, 5e-5, 1000, 45000)
  np.testing.assert_allclose(rates(o, 60000, inside, joint), 5e-5 + (s - 5e-5) * (inside - start) / 50, rtol=1e-5)
  after = np.arange(start + 50, 60100)
  plain = rates(o, 60000, after)
  for last in (joint, joint_at(start, 0.7)):      # 0.7 + (s - 0.7) would not be s in float32
    np.testing.assert_array_equal(rates(o, 60000, after, last), plain)


def test_restart_goes_to_the_peak_and_then_to_the_end():
  p, m, r, span, start, total = 1e-3, 5e-5, 3e-4, 50, 3000, 5000
  o = settings(total, schedule='cosine', learning_rate=p, end_rate=m, warmup_steps=100, schedule_steps=2000,
               continuation='restart', continuation_steps=span)
  u = np.arange(start, total + 101)
  found = rates(o, total, u, joint_at(start, r))
  share = np.clip((u - start - span) / (total - start - span), 0, 1)
  want = np.where(u < start + span, r + (p - r) * (u - start) / span, m + (p - m) * (1 + np.cos(np.pi * share)) / 2)
  np.testing.assert_allclose(found, want, rtol=1e-5)
  np.testing.assert_allclose(found[[0, span, total - start, -1]], [r, p, m, m], rtol=1e-5)
  np.testing.assert_array_less(np.abs(np.diff(found[:span + 1])), (p - r) / span * 1.001)
  np.testing.assert_array_less(np.abs(np.diff(found[span:])), np.pi / 2 * (p - m) / (total - start - span) * 1.001)


@pytest.mark.parametrize('kind', ['blend', 'restart'])
def test_a_second_continuation_inside_the_first_goes_on_from_the_rate_applied(kind):
  o = settings(60000, **MLM, continuation=kind)
  first = rates(o, 60000, [30020], joint_at(30000, 5e-5))[0]
  found = rates(o, 60000, np.arange(30020, 30071), joint_at(30020, first))
  assert found[0] == first
  goal = 1e-3 if kind == 'restart' else cosine(np.float64(30070), 1e-3, 5e-5, 1000, 45000)
  np.testing.assert_allclose(found[-1], goal, rtol=1e-5)
  # the rise in all over 50 updates; the schedule itself falls by less than 4e-8 an update
  assert np.abs(np.diff(found)).max() <= (goal - first) / 50 * 1.001 + 4e-8


@pytest.mark.parametrize('kind', ['none', 'blend', 'restart'])
def test_without_a_joint_the_schedule_is_plain(kind):
  u = np.arange(1, 1201)
  changes = {'schedule': 'cosine', 'end_rate': 1e-5, 'warmup_steps': 100}
  plain = np.asarray(jax.jit(jax.vmap(schedules.base(settings(1000, **changes), 1000)))(jnp.asarray(u - 1, jnp.int32)))
  o = settings(1000, **changes, continuation=kind)
  np.testing.assert_array_equal(rates(o, 1000, u), plain)
  continued = rates(o, 1000, u, joint_at(500, 0.7))
  assert np.array_equal(continued, plain) == (kind == 'none')


@pytest.mark.parametrize('name', sorted(schedules.SCHEDULES))
def test_rates_are_pure_functions_of_the_step(name):
  warm = {} if name == 'onecycle' else {'warmup_steps': 10}
  at = schedules.make(settings(100, schedule=name, **warm, continuation_steps=5), 100)
  joint, steps = joint_at(60, 1e-4), (0, 8, 9, 10, 29, 30, 60, 62, 64, 98, 99, 100)
  traced, together = jax.jit(at), jax.jit(jax.vmap(at, (0, None)))(jnp.array(steps, jnp.int32), joint)
  assert together.dtype == jnp.float32 and together.shape == (len(steps),)
  for i, step in enumerate(steps):
    one = float(traced(jnp.int32(step), joint))
    np.testing.assert_allclose([float(at(step, joint)), float(at(jnp.int32(step), joint)), float(together[i])],
                               [one] * 3, rtol=1e-6, atol=1e-10)      # a thousandth of the peak's rounding
  assert traced._cache_size() == 1


def test_micro_batches_are_counted():
  o = settings(100, accumulate=4, accumulate_from=3)
  assert [accumulate.count(o, step) for step in range(7)] == [1, 1, 1, 4, 4, 4, 4]
  assert [accumulate.before(o, step) for step in range(7)] == [0, 1, 2, 3, 7, 11, 15]
  o = settings(100)
  assert [accumulate.count(o, step) for step in range(3)] == [1] * 3
  assert [accumulate.before(o, step) for step in range(3)] == [0, 1, 2]


def test_forty_micro_batches_of_four_are_ten_updates_of_the_schedule():
  o = settings(10, schedule='cosine', learning_rate=0.4, end_rate=0.004, warmup_steps=5, accumulate=4, name='sgd',
               clip=0.0, decay=0.0)
  data = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
  tx = optim.make(o, 10)

  def loss(params, stats, batch, key, step):
    return {'square': (jnp.sum((params['w'] - batch)**2), jnp.float32(batch.size))}, (stats, {})

  @jax.jit
  def train(params, opt, batches, step):
    value, grads, _, _ = accumulate.gradients(loss, params, {}, batches, jax.random.key(0), step)
    params, opt, _, sums = tx.update(value, grads, opt, params, step)
    return params, opt, sums['learning_rate'][0]
  params, step, found, w = {'w': jnp.float32(1)}, 0, [], 1.0
  opt = tx.init(params)
  while accumulate.before(o, step) < len(data):
    first, n = accumulate.before(o, step), accumulate.count(o, step)
    batches = data[first:first + n]
    params, opt, rate = train(params, opt, batches, jnp.int32(step))
    w -= float(rate) * 2 * (w - batches.astype(np.float64).mean())      # the slope of the mean of (w - x)^2
    found.append(float(rate))
    step += 1
  assert step == len(found) == 10
  # u / 5 of 0.4 to the update 5, then 0.004 + 0.396 (1 + cos(pi (u - 5) / 5)) / 2
  np.testing.assert_allclose(found, cosine(np.arange(1.0, 11.0), 0.4, 0.004, 5, 10), rtol=1e-5)
  assert np.argmax(found) == 4 and found[4] == pytest.approx(0.4) and found[9] == pytest.approx(0.004, rel=1e-5)
  np.testing.assert_allclose(params['w'], w, rtol=1e-5)


@pytest.mark.parametrize('key, value, others', [
    # nothing reads it
    ('end_rate', 0.1, {'schedule': 'constant'}), ('schedule_steps', 500, {'schedule': 'constant'}),
    ('factor', 0.1, {'schedule': 'cosine'}), ('noam_width', 64, {'schedule': 'rsqrt'}),
    ('factor_steps', 5, {'schedule': 'linear'}), ('end_rate', 0.1, {'schedule': 'onecycle'}),
    ('accumulate_from', 3, {}),
    ('beta1', 0.5, {'name': 'sgd'}), ('beta2', 0.5, {'name': 'sgd'}), ('eps', 0.5, {'name': 'sgd'}),
    ('beta1', 0.5, {'name': 'adafactor'}), ('eps', 0.5, {'name': 'lion'}), ('beta1', 0.5, {'name': 'adadelta'}),
    ('beta2', 0.5, {'name': 'adagrad'}), ('beta2', 0.5, {'name': 'muon'}), ('nesterov', True, {'name': 'adam'}),
    ('nesterov', True, {'name': 'rmsprop'}),      # it has no momentum until beta1 is set
    ('second.name', 'sgd', {}), ('second.beta1', 0.5, {}),
    ('second.eps', 0.5, {'second.params': 'x', 'second.name': 'sgd'}),
    # it can't be
    ('schedule', 'cos', {}), ('continuation', 'jump', {}), ('learning_rate', 0.0, {}), ('learning_rate', -1.0, {}),
    ('learning_rate', float('nan'), {}), ('accumulate', 0, {}), ('accumulate_from', -1, {'accumulate': 2}),
    ('warmup_steps', 1001, {}), ('warmup_steps', -1, {}), ('warmup_steps', 50, {'schedule_steps': 40}),
    ('warmup_steps', 5, {'schedule': 'onecycle'}), ('noam_width', 0, {'schedule': 'noam', 'warmup_steps': 5}),
    ('factor', 0.0, {'schedule': 'staircase'}), ('factor_steps', 0, {'schedule': 'exponential'}),
    ('end_rate', -1.0, {'schedule': 'linear'}), ('schedule_steps', -1, {'schedule': 'linear'}),
    ('continuation_steps', -1, {}),
    ('name', 'adma', {}), ('decay_kind', 'L2', {}), ('second.name', 'muon', {'second.params': 'x'}),
    ('beta1', 1.0, {}), ('beta2', -0.5, {}), ('eps', 0.0, {}), ('second.beta1', 1.0, {'second.params': 'x'}),
    ('decay', -1.0, {}), ('clip', -1.0, {}), ('clip_value', -1.0, {}), ('clip_update', float('nan'), {}),
    ('ema', 1.0, {}), ('ema', -0.1, {}), ('max_nonfinite', -1, {}), ('decay_kind', 'l2', {'name': 'adamw'}),
    ('rates', ('bias', 2.0), {}), ('rates', (('bias', -1.0),), {}), ('rates', (('(', 1.0),), {}),
    ('stacked', '(', {}), ('frozen', '(', {}), ('decay_not', '(', {}), ('second.params', '(', {}),
])
def test_a_setting_that_nothing_reads_or_that_cannot_run_names_its_key(key, value, others):
  settings(1000, **others)
  with pytest.raises(ConfigError, match=rf'config\.optim\.{key} = '):
    settings(1000, **others, **{key: value})


def test_noam_needs_a_warm_up():
  with pytest.raises(ConfigError, match=r'config\.optim\.warmup_steps = 0'):
    settings(1000, schedule='noam')


@pytest.mark.parametrize('schedule', sorted(schedules.SCHEDULES))
def test_every_optimizer_goes_with_every_schedule(schedule):
  for name in optim.KINDS:
    o = settings(1000, name=name, schedule=schedule, warmup_steps=4 if schedule == 'noam' else 0)
    optim.make(o, 1000).init({'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)})
