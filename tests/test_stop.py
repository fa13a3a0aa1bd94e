"""A wish to stop, whenever it comes: what is saved, what remains, which is best are as if nothing had stopped."""

import os
import shutil
import signal

import jax
import pytest
from jax.experimental import multihost_utils

from lab import logs, mesh as meshes, train
from lab.checkpoint import Checkpoints, DiskFull
from tests import toy
from tests.test_checkpoint import save, state, store      # noqa: F401


def run(config, workdir):
  return train.run(toy.make_task(config), config, str(workdir))


def left(workdir, best):
  """The checkpoints of a run, the best of them, what each says of scores and of what is due; the rows of the log."""
  checkpoints = Checkpoints(str(workdir))
  said = [(s, checkpoints.meta(s)['scores'], checkpoints.meta(s)['notes']) for s in checkpoints.steps()]
  return checkpoints.best(best), said, (workdir / 'metrics.jsonl').read_text()


def stop_in_evaluation(monkeypatch, at):
  """From now on a run is asked to stop in the evaluation of step `at`."""
  evaluate, now = train._evaluate, []
  monkeypatch.setattr(train, '_evaluate', lambda i, *rest: now.append(i) or evaluate(i, *rest))
  monkeypatch.setattr(meshes, 'interrupted', lambda: now[-1:] == [at])
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == at)


# the error falls: by 'error' the first checkpoint is the best, by '-error' the last
@pytest.mark.parametrize('at, best, remain', [(5, 'error', [5, 20]), (5, '-error', [20]), (20, '-error', [20])])
def test_a_stop_in_an_evaluation_takes_no_score_from_a_checkpoint(toy_config, tmp_path, monkeypatch, at, best, remain):
  toy_config.checkpoint.update({'keep': 1, 'best': best})
  run(toy_config, tmp_path / 'whole')
  with monkeypatch.context() as m:
    stop_in_evaluation(m, at)
    with pytest.raises(meshes.Preempted, match=f'step {at} '):
      run(toy_config, tmp_path / 'stopped')
  run(toy_config, tmp_path / 'stopped')
  whole, stopped = (left(tmp_path / name, best) for name in ('whole', 'stopped'))
  assert stopped == whole and whole[0] == remain[0] and [s for s, *_ in whole[1]] == remain
  monkeypatch.setattr(train, '_evaluate', None)      # the next start has nothing to evaluate
  run(toy_config, tmp_path / 'stopped')
  assert left(tmp_path / 'stopped', best) == whole


def test_scores_that_come_later_are_there_whole_or_not_at_all(store, state, monkeypatch):      # noqa: F811
  store.notes = {'bad_records': [3], 'evaluation_due': True}
  store.save(5, state)
  store.settle()
  before, scores = store.meta(5), {'error': 2.0, 'loss': float('nan')}
  names = sorted(os.listdir(os.path.join(store.path(5), 'meta')))
  with monkeypatch.context() as m:
    m.setattr(jax, 'process_index', lambda: 1)      # another one writes
    store.evaluated(5, scores)
    assert store.meta(5) == before
  with monkeypatch.context() as m:
    m.setattr(os, 'replace', lambda *_: 1 / 0)      # killed before the last act
    with pytest.raises(ZeroDivisionError):
      store.evaluated(5, scores)
    assert store.meta(5) == before and store.best('error') is None
  store.evaluated(5, scores)
  notes = {'bad_records': [3], 'evaluation_due': False}
  assert store.meta(5) == {**before, 'scores': {'error': 2.0}, 'notes': notes} and store.best('error') == 5
  assert sorted(os.listdir(os.path.join(store.path(5), 'meta'))) == names
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
  assert store.resume(like) is not None and store.notes == notes      # all arrays have their checksums


def test_several_processes_agree_by_counting_how_often_they_asked(monkeypatch):
  asked = []
  monkeypatch.setattr(meshes, '_stop', {**meshes._stop, 'alone': False})
  monkeypatch.setattr(multihost_utils, 'reached_preemption_sync_point', lambda n: asked.append(n) or n == 5)
  # after steps 1 and 2, before each of three batches: JAX knows no other order than one more each time
  got = [meshes.preempted(1), meshes.preempted(2), meshes.interrupted(), meshes.interrupted(), meshes.interrupted()]
  assert got == [False] * 4 + [True] and asked == [1, 2, 3, 4, 5]
  assert meshes.preempted(4) and meshes.interrupted() and asked == [1, 2, 3, 4, 5]      # the answer from then on


@pytest.mark.parametrize('signals, ends', [
    ((signal.SIGTERM, signal.SIGINT), meshes.Preempted), ((signal.SIGINT, signal.SIGTERM), meshes.Preempted),
    ((signal.SIGTERM, signal.SIGTERM), meshes.Preempted),
    ((signal.SIGINT, signal.SIGTERM, signal.SIGINT), KeyboardInterrupt)])
def test_only_a_second_ctrl_c_leaves_at_once(toy_config, tmp_path, monkeypatch, signals, ends):
  handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  monkeypatch.setattr(meshes, '_stop', dict(meshes._stop))
  toy_config.total_steps = 5

  def send(self, step, total):
    for number in signals if step == 2 else ():
      signal.raise_signal(number)
  monkeypatch.setattr(logs.Pace, '__call__', send)
  try:
    meshes.listen(alone=True)
    with pytest.raises(ends):
      run(toy_config, tmp_path)
  finally:
    for number, before in handlers.items():
      signal.signal(number, before)
  assert Checkpoints(str(tmp_path)).steps() == ([2] if ends is meshes.Preempted else [])


def test_a_run_that_could_not_save_does_not_begin(toy_config, tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)
  full = pytest.raises(DiskFull, match=r'next checkpoint needs 1,04\d,\d+ bytes in .*, 1,000 are free')
  with monkeypatch.context() as m:
    m.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=1000))
    with full as error:
      run(toy_config, tmp_path)
    assert error.value.exit_code == 6 and not (tmp_path / 'metrics.jsonl').read_text()
  toy_config.total_steps = 5
  run(toy_config, tmp_path)
  rows = (tmp_path / 'metrics.jsonl').read_text()
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=1000))
  run(toy_config, tmp_path)      # nothing is left to save
  toy_config.total_steps = 10
  with pytest.raises(DiskFull, match=r'1,000 are free; complete steps: \[5\]'):
    run(toy_config, tmp_path)
  assert (tmp_path / 'metrics.jsonl').read_text() == rows and Checkpoints(str(tmp_path)).steps() == [5]


def test_what_the_next_save_would_remove_first_counts_as_free(toy_config, tmp_path, monkeypatch):
  toy_config.checkpoint.update({'keep': 2, 'best': ''})
  toy_config.total_steps = 10
  run(toy_config, tmp_path)      # [5, 10]: as if it had been killed before the older one was removed
  toy_config.total_steps, toy_config.checkpoint.keep = 15, 1
  usage = shutil.disk_usage(tmp_path)
  crowded = lambda path: usage._replace(free=1000 if os.path.exists(tmp_path / 'checkpoints' / '5') else 1 << 30)
  monkeypatch.setattr(shutil, 'disk_usage', crowded)
  run(toy_config, tmp_path)
  assert Checkpoints(str(tmp_path)).steps() == [15]
