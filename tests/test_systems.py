"""What every system promises the core, on its smoke recipe."""

import functools
import glob
import importlib
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import pipeline

from lab import accumulate, evaluate, mesh as meshes, metrics, optim, sharding, train
from lab.checkpoint import Checkpoints
from lab.ledger import Ledger
from lab.task import load
from tests.conftest import ROOT

ONE = {'data': 1, 'fsdp': 1, 'tensor': 1}
RECIPES = sorted(os.path.basename(p)[:-3] for p in glob.glob(os.path.join(ROOT, 'configs', '*.py')) if '__' not in p)
SAME = {'sst2': 'cola'}                          # the same task on other data: once is enough
# mlm stands for the others of its body; two compile for minutes, and so does pose on eight devices
LONG = [r for r in RECIPES if r not in ('cola', 'gpt', 'sst2') + ('agent', 'dvae') * (not os.environ.get('LAB_LONG'))]
LONG += ['dvae:'] * bool(os.environ.get('LAB_LONG'))     # as shipped, which has another body and quantizer
EIGHT = [r for r in LONG if r != 'pose' or os.environ.get('LAB_LONG')]


@pytest.fixture(params=[r for r in RECIPES if r not in SAME])
def config(request):
  name, colon, variant = request.param.partition(':')
  config = importlib.import_module(f'configs.{name}').get_config(variant if colon else 'smoke')
  if colon:
    config.log_steps, config.optim.warmup_steps = 1, 0
  return config


FULL = {'pose': 'coco', 'video': 'paper'}        # the variant for an accelerator


@pytest.mark.parametrize('recipe, variant', [(r, v) for r in RECIPES for v in ('', 'smoke', FULL.get(r, 'full'))])
def test_every_variant_is_a_valid_configuration(recipe, variant):
  config = importlib.import_module(f'configs.{recipe}').get_config(variant)
  train.check(config)
  load(config)
  assert config.is_locked and json.loads(config.to_json())['task'] == config.task


def on(shape, devices, config, monkeypatch):
  """The mesh of a shape on so many devices, wherever the core makes one."""
  make = meshes.make
  mesh = make(shape, jax.devices()[:devices])
  monkeypatch.setattr(meshes, 'make', lambda *a: mesh)
  return mesh


def exactness(name):
  """How far sums may differ that were added in another order; of a precision, a place beside the threshold may go."""
  return 1e-4 if '/precision' in name else 1e-5


def first_batch(task, config, split='train'):
  batches = pipeline.Batches(task.source(split), config.input, config.input.batch_size,
                             range(config.input.batch_size), train=split == 'train', seed=config.seed)
  return batches, next(iter(batches))


def initial(task, config, batches):
  tx = optim.make(config.optim, config.total_steps)
  return tx, jax.jit(train.initial(task, tx, config, batches.spec(1)))()


@pytest.mark.parametrize('config', EIGHT, indirect=True)
def test_one_device_equals_eight(config, tmp_path, monkeypatch):
  config.input.batch_size = 8
  config.total_steps = config.eval_steps = 5
  config.eval_pictures = 0                       # drawn from one process alone
  shapes = {'one': (ONE, 1), 'all': ({'data': 2, 'fsdp': 2, 'tensor': 2}, 8)}
  if config.task == 'lab.systems.language.task':   # once is enough: it is the data axis of the other
    shapes['data'] = {'data': 8, 'fsdp': 1, 'tensor': 1}, 8
  rows, sums = {}, {}
  for name, (shape, devices) in shapes.items():
    with monkeypatch.context() as patch:
      mesh = on(shape, devices, config, patch)
      train.run(load(config), config, str(tmp_path / name))
      rows[name] = [json.loads(line) for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
      # evaluation of one and the same state, on each mesh: every sum
      task = load(config)
      task = task._replace(finish=lambda totals: {f'{k}/{i}': v for k, p in totals.items() for i, v in enumerate(p)})
      with jax.set_mesh(mesh):
        _, first = initial(task, config, first_batch(task, config)[0])
        found, _ = evaluate.make(task, config, mesh, Ledger('', writes=False))({'eval': first.params}, first.stats)
        sums[name] = found['eval']
  for name in list(shapes)[1:]:
    for a, b in zip(rows['one'], rows[name], strict=True):
      assert a.keys() == b.keys() and (a['step'], a['split']) == (b['step'], b['split'])
      if a['split'] == 'train':
        np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-5)
    assert sums['one'].keys() == sums[name].keys()
    for k in sums['one']:
      np.testing.assert_allclose(sums['one'][k], sums[name][k], rtol=exactness(k), err_msg=k)


@pytest.mark.parametrize('config', LONG, indirect=True)
def test_a_stopped_run_continues_bit_for_bit(config, tmp_path, monkeypatch):
  config.input.batch_size = 8
  config.total_steps, config.eval_steps = 6, 3
  rows = {}
  for name, stops in (('whole', ()), ('stopped', (4,))):
    for stop in stops:
      monkeypatch.setattr(meshes, 'preempted', lambda step, stop=stop: step == stop)
      with pytest.raises(meshes.Preempted):
        train.run(load(config), config, str(tmp_path / name))
    monkeypatch.setattr(meshes, 'preempted', lambda step: False)
    train.run(load(config), config, str(tmp_path / name))
    rows[name] = (tmp_path / name / 'metrics.jsonl').read_text(), Checkpoints(str(tmp_path / name)).meta(6)['arrays']
  assert rows['whole'] == rows['stopped']


def test_padding_leaves_every_sum_unchanged(config):
  task = load(config)
  batches, batch = first_batch(task, config)
  _, state = initial(task, config, batches)
  padded = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in batch.items()}
  measure = jax.jit(task.measure)
  a, b = (jax.device_get(measure(state.params, state.stats, x)) for x in (batch, padded))
  for k in a:
    np.testing.assert_allclose(a[k], b[k], rtol=1e-5, atol=1e-7, err_msg=k)
  nothing = jax.device_get(measure(state.params, state.stats, {**batch, 'mask': np.zeros_like(batch['mask'])}))
  assert all(weight == 0 and total == 0 for total, weight in nothing.values())


def test_four_micro_batches_of_8_equal_one_batch_of_32(config):
  config.input.batch_size = 32
  task = load(config)
  batches, batch = first_batch(task, config)
  _, state = initial(task, config, batches)
  batch = {k: v.copy() for k, v in batch.items()}
  batch['mask'][[0, 3, 4, 5, 6, 7, 30]] = 0                # micro-batches of 2, 8, 8 and 7 examples
  for name, x in batch.items():
    if name == 'ignore':
      x[8:10, : 9 * x.shape[1] // 10] = 1                  # nine tenths of two pictures
  gradients = jax.jit(functools.partial(accumulate.gradients, task.loss))
  one, four = (gradients(state.params, state.stats, {k: v.reshape(n, 32 // n, *v.shape[1:]) for k, v in batch.items()},
                         jax.random.key(0), state.step) for n in (1, 4))
  np.testing.assert_allclose(four[0], one[0], rtol=1e-6)
  for (path, a), (_, b) in zip(sharding.paths(one[1]), sharding.paths(four[1]), strict=True):
    np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()) + 1e-12, err_msg=path)
  for name in one[3]:
    np.testing.assert_allclose(four[3][name], one[3][name], rtol=exactness(name), atol=1e-6, err_msg=name)


def test_one_batch_is_learnt(config):
  task = load(config)
  batches, batch = first_batch(task, config)
  tx, state = initial(task, config, batches)

  @jax.jit
  def step(state, batch):
    key = jax.random.fold_in(jax.random.key(0), state.step)
    loss, grads, stats, _ = accumulate.gradients(task.loss, state.params, state.stats, batch, key, state.step)
    params, opt, _, _ = tx.update(loss, grads, state.opt, state.params, jnp.int32(2))
    return state._replace(step=state.step + 1, params=params, stats=stats, opt=opt), loss
  losses = []
  for _ in range(40):
    state, loss = step(state, {k: v[None] for k, v in batch.items()})
    losses.append(float(loss))
  assert losses[-1] < 0.8 * losses[0]


def test_records_serialise_and_rules_live(config):
  task = load(config)
  batches, batch = first_batch(task, config, 'eval')
  _, state = initial(task, config, batches)
  outputs = jax.device_get(jax.jit(task.predict)(state.params, state.stats, batch, jax.random.key(0)))
  records = list(task.records(outputs, batch))
  assert len(records) == len(batch['mask']) and json.loads(json.dumps(records)) == records
  sharding.audit(task.rules, state)
  assert metrics.ratios(metrics.merge({}, jax.device_get(jax.jit(task.measure)(state.params, state.stats, batch))))
