"""The video task: what is learnt, from what, and what can't be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import pipeline

from configs import video
from lab import accumulate, optim, sharding, train
from lab.systems.video import draw, output, registry, task as video_task
from lab.task import load


def smoke(**keys):
  config = video.get_config('smoke')
  config.update_from_flattened_dict({k.replace('__', '.'): v for k, v in keys.items()})
  return config


def start(config):
  """task, one training batch, and the state of step 0."""
  task = load(config)
  size = config.input.batch_size
  batches = pipeline.Batches(task.source('train'), config.input, size, range(size), train=True, seed=config.seed)
  tx = optim.make(config.optim, config.total_steps)
  state = jax.jit(train.initial(task, tx, config, batches.spec(1)))()
  return task, tx, next(iter(batches)), state


def gradients(task, state, batch, step=0):
  key = jax.random.key(1)
  micro = {k: v[None] for k, v in batch.items()}
  run = jax.jit(lambda s: accumulate.gradients(task.loss, s.params, s.stats, micro, key, jnp.int32(step)))
  return run(state)


@pytest.fixture(scope='module')
def gradient():
  """The state of step 0 without an optimizer's, and the loss and gradients there."""
  task, _, batch, state = start(smoke())
  return state, *gradients(task, state, batch)[:2]


@pytest.mark.parametrize('name', optim.KINDS)
def test_one_step_moves_every_tensor(name, gradient):
  config = smoke(optim__name=name, optim__learning_rate=0.1 if name in ('sgd', 'momentum') else 1e-3)
  state, loss, grads = gradient
  tx = optim.make(config.optim, config.total_steps)
  moved, _, ok, _ = tx.update(loss, grads, tx.init(state.params), state.params, jnp.int32(0))
  assert bool(ok)
  for (path, a), (_, b) in zip(sharding.paths(state.params), sharding.paths(moved), strict=True):
    assert float(jnp.abs(a - b).max()) > 0, path


def test_the_papers_rule_steps_no_further_than_its_clip():
  rule = video.get_config('paper-rule').optim
  config = smoke(loss__scale=800.0, model__cell='peephole', model__init='uniform')
  config.optim = rule
  task, tx, batch, state = start(config)
  for step in range(3):
    loss, grads, _, _ = gradients(task, state, batch, step)
    moved, opt, _, norms = jax.jit(tx.update)(loss, grads, state.opt, state.params, jnp.int32(step))
    biggest = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(state.params)))
    assert 0.5e-4 < biggest <= 1.0001e-4               # the sum of a weight and its step is rounded
    state = state._replace(params=moved, opt=opt)
  _, _, _, norms = tx.update(loss, grads, state.opt, state.params, jnp.int32(10_000))
  np.testing.assert_allclose(norms['learning_rate'][0], 9e-5, rtol=1e-5)


@pytest.mark.parametrize('combo, heads', [*((c, 'both') for c in output.COMBOS), ('0sb', 'recon'), ('1nm', 'pred')])
def test_every_combination_gives_its_heads_metrics_and_no_others(combo, heads):
  config = smoke(loss__combo=combo, model__heads=heads)
  task, _, batch, state = start(config)
  (terms, (_, sums)), found = jax.jit(lambda s, b: (task.loss(s.params, s.stats, b, jax.random.key(0), s.step),
                                                    task.measure(s.params, s.stats, b)))(state, batch)
  own = set(video_task.HEADS[heads])
  assert set(terms) == own and {k.split('_')[0] for k in sums} == own
  assert {k.split('_')[0] for k in task.finish(jax.device_get(found))} & {'recon', 'pred'} == own    # an evaluation row
  for head in ('recon', 'pred'):
    for metric in ('mse_per_frame', 'bce_nats_per_frame'):
      assert (f'{head}_{metric}' in sums) == (f'{head}_{metric}' in found) == (head in own)
  assert {'loss', 'copy_last_mse_per_frame', 'zero_mse_per_frame'} <= set(found)
  assert ('recon_teacher_forced_mse_per_frame' in found) == ('recon' in own)     # the smoke recipe is taught
  assert all(np.isfinite(t) and w > 0 for t, w in found.values())


def test_the_free_run_is_evaluated_whatever_was_fed_in_training():
  found = {}
  for feed in ('output', 'teacher', 'scheduled'):
    task, _, batch, state = start(smoke(model__feed=feed))
    found[feed] = jax.device_get(jax.jit(task.measure)(state.params, state.stats, batch))
  for feed in ('teacher', 'scheduled'):
    for k, v in found['output'].items():
      np.testing.assert_allclose(found[feed][k], v, rtol=1e-6, err_msg=k)


def test_scheduled_feeding_goes_from_true_frames_to_own_ones():
  config = smoke(model__feed='scheduled', loss__scheduled_steps=8, total_steps=100)
  truth = {'recon': jnp.zeros((64, 5, 16, 16)), 'pred': jnp.zeros((64, 5, 16, 16))}
  shares = [float(jnp.mean(video_task._use(config, truth, jax.random.key(0), jnp.int32(s))['pred']))
            for s in (0, 4, 8, 50)]
  assert shares[0] == 1 and 0.35 < shares[1] < 0.65 and shares[2:] == [0, 0]


def test_a_reversed_target_is_shown_in_the_order_of_time():
  made = {}
  for order in ('reversed', 'forward'):
    config = smoke(model__recon_order=order)
    task, _, batch, state = start(config)
    past, truth = video_task.frames(config, batch)
    np.testing.assert_array_equal(truth['recon'], past[:, ::-1] if order == 'reversed' else past)
    made[order] = jax.device_get(jax.jit(task.predict)(state.params, state.stats, batch, jax.random.key(0)))
  np.testing.assert_array_equal(made['reversed']['past'], made['forward']['past'])
  np.testing.assert_array_equal(made['reversed']['recon'], made['forward']['recon'][:, ::-1])     # the same weights


@pytest.mark.parametrize('order', ['reversed', 'forward'])
def test_errors_of_a_reconstruction_are_in_the_order_of_time(order, monkeypatch):
  """A network that draws the first frame seen as it was, and each later one brighter by ten more of 255."""
  video = np.random.default_rng(0).integers(0, 128, (2, 10, 16, 16), np.uint8)
  shift = np.array([0, 10, 20, 30, 40], np.uint8)[None, :, None, None]
  rebuilt = (video[:, :5] + shift)[:, ::-1 if order == 'reversed' else 1]

  class Stub:
    def apply(self, variables, past, lengths, truth, use):
      return {'recon': (jnp.float32(rebuilt / 255.0), past), 'encoder': past}
  monkeypatch.setattr(video_task.model, 'make', lambda *a: Stub())
  task = load(smoke(loss__combo='0nm', model__heads='recon', model__feed='output', model__recon_order=order))
  batch = {'video': video, 'mask': jnp.ones(2), 'record': np.arange(2)}
  want = 256 * (np.array([0, 10, 20, 30, 40]) / 255)**2
  found = {k: float(t / w) for k, (t, w) in task.measure({}, {}, batch).items()}
  got = [found[f'recon_mse_per_frame/{t:02d}'] for t in range(1, 6)]
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(found['recon_mse_per_frame'], want.mean(), rtol=1e-4)
  for record in task.records(jax.device_get(task.predict({}, {}, batch, None)), batch):
    np.testing.assert_allclose(record['recon_mse_per_frame'], want, atol=1e-4)


@pytest.mark.parametrize('network', ['oracle', 'copy_last', 'late'])
def test_the_evaluation_of_networks_whose_error_is_known(network, monkeypatch):
  """An oracle has no error, one that repeats the last frame that of NumPy, one that is a frame late is found out."""
  video = np.random.default_rng(0).integers(0, 256, (4, 10, 16, 16), np.uint8)
  future = {'oracle': video[:, 5:], 'copy_last': np.repeat(video[:, 4:5], 5, 1), 'late': video[:, 4:9]}[network]

  class Stub:
    def apply(self, variables, past, lengths, truth, use):
      np.testing.assert_allclose(past, 2 * (video[:, :5] / 255.0) - 1, atol=1e-6)
      assert lengths == {'pred': 5} and truth is None and use is None
      return {'pred': (jnp.float32(2 * (future / 255.0) - 1), past), 'encoder': past}
  monkeypatch.setattr(video_task.model, 'make', lambda *a: Stub())
  config = smoke(loss__combo='1nm', model__heads='pred', model__feed='output')
  found = load(config).measure({}, {}, {'video': video, 'mask': jnp.ones(4)})
  value = {k: float(t / w) for k, (t, w) in found.items()}
  expected = ((future / 255.0 - video[:, 5:] / 255.0)**2).sum((2, 3))
  np.testing.assert_allclose(value['pred_mse_per_frame'], expected.mean(), rtol=1e-5, atol=1e-6)
  for t in range(5):
    np.testing.assert_allclose(value[f'pred_mse_per_frame/{t + 1:02d}'], expected[:, t].mean(), rtol=1e-5, atol=1e-6)
  copied = ((video[:, 4:5] / 255.0 - video[:, 5:] / 255.0)**2).sum((2, 3)).mean()
  np.testing.assert_allclose(value['copy_last_mse_per_frame'], copied, rtol=1e-5)
  assert value['mse_per_frame'] == value['pred_mse_per_frame'] and (network == 'oracle') == (expected.mean() == 0)


def test_pictures_have_a_row_for_what_there_is():
  frames = np.zeros((5, 16, 16), np.uint8)
  assert draw.strip(frames, frames, frames, frames).shape == (5 * 66, 6 + 5 * 66, 3)
  assert draw.strip(frames, None, None, frames).shape == (2 * 66, 6 + 5 * 66, 3)
  assert draw.film(frames, None, frames, frames).shape == (10, 66, 6 + 3 * 66, 3)
  assert draw.film(frames, frames, None, frames[:3]).shape == (8, 66, 6 + 3 * 66, 3)
  assert draw.film(frames, None, frames[:2], frames).shape == draw.film(frames, None, frames, frames).shape


COPY = {'model__readout': 'copy', 'model__encoder': (256,), 'model__head': (256,)}


def test_states_that_cannot_reach_the_data_are_told(caplog):
  task, _, batch, state = start(smoke(**COPY))
  found = task.finish(jax.device_get(jax.jit(task.measure)(state.params, state.stats, batch)))
  assert 'only pixels of 0.269 to 0.731' in caplog.text and found['pred_mse_per_frame'] > 17.5 * 0.97     # its floor


@pytest.mark.parametrize('keys', [{}, {**COPY, 'loss__combo': '0nm'}, {**COPY, 'loss__multiply': 100.0}])
def test_states_that_can_are_not(keys, caplog):
  load(smoke(**keys)).finish({'pred_h_min': (-0.1, 1), 'pred_h_max': (0.1, 1), 'recon_h_min': (-0.1, 1)})
  assert not caplog.text


def test_the_weight_of_the_reconstruction():
  found = {}
  for weight in (1.0, 0.5):
    task, _, batch, state = start(smoke(loss__recon_weight=weight))
    terms, _ = task.loss(state.params, state.stats, batch, jax.random.key(0), state.step)
    found[weight] = {h: float(t) for h, (t, _) in terms.items()}
  np.testing.assert_allclose(found[0.5]['recon'], 0.5 * found[1.0]['recon'], rtol=1e-5)
  assert found[0.5]['pred'] == found[1.0]['pred']


@pytest.mark.parametrize('variant', ['', *(v for v in video.VARIANTS if '=' not in v),
                                     *(f'parity={n}' for n in registry.PARITY)])
def test_every_array_has_its_sharding_rule(variant):
  config = video.get_config(variant)
  config.data.dir = 'sample'
  task = load(config)
  batch = {'digits': jnp.zeros((1, config.data.digits, 28, 28), jnp.uint8), 'number': jnp.zeros((1, 2), jnp.uint32)}
  params, _ = jax.eval_shape(task.init, jax.random.key(0), batch)
  sharding.audit(task.rules, params)
