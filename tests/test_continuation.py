"""A run that goes on from another one's checkpoint: its rate starts where the other's ended, without a jump."""

import contextlib
import json

import jax
import numpy as np
import pytest

from lab import mesh as meshes, train
from lab.checkpoint import CheckpointError, Checkpoints
from lab.task import ConfigError
from tests import toy


def run(config, workdir):
  return train.run(toy.make_task(config), config, str(workdir))


def rates(workdir):
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return {r['step']: r['learning_rate'] for r in rows if r['split'] == 'train'}


def arrays(workdir, step):
  return Checkpoints(str(workdir)).meta(step)['arrays']


@pytest.fixture(scope='module')
def first(tmp_path_factory, toy_data):
  """A run of twenty steps, whose cosine has nearly ended at step 15."""
  config = toy.get_config()
  config.data.dir = toy_data
  config.checkpoint.keep = -1
  workdir = tmp_path_factory.mktemp('first')
  run(config, workdir)
  return workdir


def onward(config, first, step, kind, **changes):
  """The configuration of a run of sixty steps, with a rate three times as high, from `step` on."""
  config.continue_from, config.total_steps, config.eval_steps, config.checkpoint.steps = f'{first}:{step}', 60, 0, 0
  config.optim.update({'continuation': kind, 'continuation_steps': 10, 'learning_rate': 3e-3, 'end_rate': 1e-5})
  config.optim.update(changes)
  return config


@pytest.mark.parametrize('kind', ['blend', 'restart'])
def test_both_joints_are_continuous(toy_config, tmp_path, first, kind):
  run(onward(toy_config, first, 15, kind), tmp_path)
  before, after = rates(first), rates(tmp_path)
  assert list(after) == list(range(16, 61))
  r, peak = before[15], 3e-3
  schedule = lambda u: 1e-5 + (peak - 1e-5) * 0.5 * (1 + np.cos(np.pi * (u - 3) / 57))
  if kind == 'blend':
    want = {u: r + (schedule(u) - r) * min((u - 15) / 10, 1) for u in after}
  else:
    want = {u: r + (peak - r) * (u - 15) / 10 if u <= 25 else
            1e-5 + (peak - 1e-5) * 0.5 * (1 + np.cos(np.pi * (u - 25) / 35)) for u in after}
  np.testing.assert_allclose(list(after.values()), list(want.values()), rtol=1e-5)
  whole = np.array([r, *after.values()])
  assert np.abs(np.diff(whole)).max() <= peak / 10        # no step is larger than the climb's own
  assert after[16] - r == pytest.approx((want[16] - r), rel=1e-4) and after[60] == pytest.approx(1e-5)


def test_none_jumps_to_the_schedule(toy_config, tmp_path, first):
  run(onward(toy_config, first, 15, 'none'), tmp_path)
  assert rates(tmp_path)[16] == pytest.approx(1e-5 + (3e-3 - 1e-5) * 0.5 * (1 + np.cos(np.pi * 13 / 57)), rel=1e-5)


def test_a_second_continuation_starts_from_the_rate_that_was_applied(toy_config, tmp_path, first):
  onward(toy_config, first, 15, 'blend').checkpoint.update({'steps': 20, 'keep': -1})
  run(toy_config, tmp_path / 'second')                     # saved at step 20, in the middle of the blend
  at_20 = rates(tmp_path / 'second')[20]
  run(onward(toy_config, tmp_path / 'second', 20, 'restart'), tmp_path / 'third')
  third = rates(tmp_path / 'third')
  assert third[21] == pytest.approx(at_20 + (3e-3 - at_20) / 10, rel=1e-5)


def test_a_continued_run_resumes_bit_for_bit(toy_config, tmp_path, first, monkeypatch):
  onward(toy_config, first, 15, 'blend')
  toy_config.total_steps = 30
  run(toy_config, tmp_path / 'whole')
  for stop in (17, 24):
    monkeypatch.setattr(meshes, 'preempted', lambda step, stop=stop: step == stop)
    with pytest.raises(meshes.Preempted):
      run(toy_config, tmp_path / 'stopped')
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  run(toy_config, tmp_path / 'stopped')
  assert arrays(tmp_path / 'stopped', 30) == arrays(tmp_path / 'whole', 30)
  assert rates(tmp_path / 'stopped') == rates(tmp_path / 'whole')


def test_tensorboard_gets_settings_and_parameters_once(toy_config, tmp_path, first, monkeypatch):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  onward(toy_config, first, 15, 'blend')
  toy_config.total_steps = 30
  for stop in (16, 20):
    monkeypatch.setattr(meshes, 'preempted', lambda step, stop=stop: step == stop)
    with pytest.raises(meshes.Preempted):
      run(toy_config, tmp_path)
  events = EventAccumulator(str(tmp_path / 'tensorboard'), size_guidance={'tensors': 0})
  events.Reload()
  assert [e.step for e in events.Tensors('parameters')] == [15]
  assert events.summary_metadata['_hparams_/session_start_info'].plugin_data.plugin_name == 'hparams'


def taken(config, first, monkeypatch):
  """The state with which a continued run starts."""
  states, start = [], train.start

  def stop(*args):
    states.append(start(*args))
    raise KeyboardInterrupt
  monkeypatch.setattr(train, 'start', stop)
  with pytest.raises(KeyboardInterrupt):
    run(config, first.parent / 'never')
  return jax.device_get(states[0])


def test_moments_are_kept_or_started_afresh(toy_config, first, monkeypatch):
  there = arrays(first, 15)
  kept = taken(onward(toy_config, first, 15, 'blend'), first, monkeypatch)
  monkeypatch.undo()
  moments = jax.tree.leaves(kept.opt.inner)
  assert int(kept.step) == 15 and any(np.any(m != 0) for m in moments) and 'opt/ema/dense/kernel' in there
  fresh = taken(onward(toy_config, first, 15, 'blend', keep_moments=False), first, monkeypatch)
  assert all(np.all(m == 0) for m in jax.tree.leaves(fresh.opt.inner))
  jax.tree.map(np.testing.assert_array_equal, (fresh.params, fresh.opt.ema), (kept.params, kept.opt.ema))
  assert float(fresh.opt.rate) == float(fresh.opt.joint.rate) == np.float32(rates(first)[15])


def test_another_optimizer_needs_fresh_moments(toy_config, tmp_path, first):
  onward(toy_config, first, 15, 'blend', name='lion')
  with pytest.raises(CheckpointError, match='keep_moments=False leaves the moments out'):
    run(toy_config, tmp_path)
  toy_config.optim.keep_moments = False
  toy_config.total_steps = 17
  run(toy_config, tmp_path)
  assert list(rates(tmp_path)) == [16, 17]


def test_a_restart_needs_the_updates_of_its_climb(toy_config, tmp_path, first):
  onward(toy_config, first, 15, 'restart')
  toy_config.total_steps = 24
  with pytest.raises(ConfigError, match='continuation_steps = 10: expected at most the 9 updates from step 15') as e:
    run(toy_config, tmp_path)
  assert e.value.exit_code == 2
  toy_config.total_steps = 25
  run(toy_config, tmp_path)
  assert rates(tmp_path)[25] == pytest.approx(3e-3)


def test_what_cannot_be_continued_is_told(toy_config, tmp_path, first):
  onward(toy_config, first, 15, 'blend')
  toy_config.total_steps = 12
  with pytest.raises(ConfigError, match='at step 15, beyond config.total_steps = 12'):
    run(toy_config, tmp_path)
  built = toy.make_task(toy_config)
  other = built._replace(init=lambda key, batch: (built.init(key, batch)[0], {}))
  toy_config.total_steps = 60
  with pytest.raises(CheckpointError, match=r"stats/error there is \['float32', \[\]\], here missing"):
    train.run(other, toy_config, str(tmp_path))
  toy_config.total_steps, toy_config.continue_from = 12, f'{first}:7'
  with pytest.raises(CheckpointError, match=r"no step '7'; nearest: \[5, 10, 15\]"):
    run(toy_config, tmp_path)
  toy_config.continue_from = str(first) + 'x'
  with pytest.raises(CheckpointError, match='no such folder; did you mean'):
    run(toy_config, tmp_path)
  toy_config.init_from = str(first)
  with pytest.raises(ConfigError, match='both set'):
    train.check(toy_config)
  with contextlib.closing(Checkpoints(str(tmp_path))) as checkpoints:
    assert not checkpoints.steps()
