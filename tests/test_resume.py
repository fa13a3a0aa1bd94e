"""Stopped anywhere and started again equals never stopped, bit for bit."""

import contextlib
import errno
import json
import os
import random
import re
import signal
import time

import jax
import numpy as np
import pytest

from lab import checksums, evaluate, logs, mesh as meshes, plot, train
from lab.checkpoint import Checkpoints
from tests import toy

DIGEST = re.compile(r'state digest +(\w+)')


def run(config, workdir):
  return train.run(toy.make_task(config), config, str(workdir))


def read(workdir, name='metrics.jsonl'):
  with open(os.path.join(workdir, name), encoding='utf-8') as f:
    return f.read()


def arrays(workdir, step):
  """Every array of a checkpoint: type, shape and checksum, by path."""
  return Checkpoints(str(workdir)).meta(step)['arrays']


@pytest.fixture(scope='module')
def whole(tmp_path_factory, toy_data):
  """The uninterrupted run."""
  config = toy.get_config()
  config.data.dir = toy_data
  workdir = tmp_path_factory.mktemp('whole')
  run(config, workdir)
  return workdir


# warm-up ends at 3; an epoch of 30 records ends within step 4; 10 and 11 lie about a checkpoint; 19 is the last but one
@pytest.mark.parametrize('stops', [(1,), (2, 3, 4), (10, 11), (7, 19)])
def test_a_stopped_run_continues_bit_for_bit(toy_config, tmp_path, whole, monkeypatch, stops):
  for stop in stops:
    monkeypatch.setattr(meshes, 'preempted', lambda step, stop=stop: step == stop)
    with pytest.raises(meshes.Preempted, match=f'step {stop} '):
      run(toy_config, tmp_path)
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  run(toy_config, tmp_path)
  assert arrays(tmp_path, 20) == arrays(whole, 20)      # params, optimizer, averaged weights, stats, step
  assert read(tmp_path) == read(whole)                  # losses, learning rates and evaluations of every step


def test_the_same_records_come_after_a_stop(toy_config, tmp_path, monkeypatch):
  seen = []
  place = meshes.place_stacked

  def note(mesh, batches, size):
    seen.extend(batch['x'].tobytes() for batch in batches)
    return place(mesh, batches, size)
  monkeypatch.setattr(meshes, 'place_stacked', note)
  toy_config.eval_steps = 0
  run(toy_config, tmp_path / 'a')
  uninterrupted, seen[:] = list(seen), []
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 6)      # in the middle of the second epoch
  with pytest.raises(meshes.Preempted):
    run(toy_config, tmp_path / 'b')
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  run(toy_config, tmp_path / 'b')
  assert seen == uninterrupted and len(set(seen)) == 20


def test_each_evaluation_is_there_once_after_a_death_in_one(toy_config, tmp_path, monkeypatch, whole):
  make = evaluate.make

  def dying(*args):
    judge, calls = make(*args), []

    def call(*args):
      calls.append(1)
      if len(calls) == 2:
        raise KeyboardInterrupt      # step 10: its checkpoint is not yet written
      return judge(*args)
    return call
  monkeypatch.setattr(evaluate, 'make', dying)
  with pytest.raises(KeyboardInterrupt):
    run(toy_config, tmp_path)
  monkeypatch.setattr(evaluate, 'make', make)
  run(toy_config, tmp_path)
  steps = [r['step'] for r in map(json.loads, read(tmp_path).splitlines()) if r['split'] == 'eval']
  assert steps == [5, 10, 15, 20]
  assert read(tmp_path) == read(whole)


def values(workdir, tag):
  """(step, value) of a scalar in TensorBoard's files."""
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  events = EventAccumulator(str(workdir / 'tensorboard'), size_guidance={'tensors': 0})
  events.Reload()
  return [(e.step, np.frombuffer(e.tensor_proto.tensor_content, np.float32)[0]) for e in events.Tensors(tag)]


def test_tensorboard_has_one_value_a_step_after_a_resume(toy_config, tmp_path, monkeypatch):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  make = evaluate.make
  monkeypatch.setattr(evaluate, 'make', lambda *a: (lambda judge: lambda *b: _die_at(3, judge, *b))(make(*a)))
  _calls.clear()
  with pytest.raises(KeyboardInterrupt):
    run(toy_config, tmp_path)             # dies in the evaluation of step 15, after steps 11 to 15 were logged
  monkeypatch.setattr(evaluate, 'make', make)
  run(toy_config, tmp_path)
  events = EventAccumulator(str(tmp_path / 'tensorboard'), size_guidance={'tensors': 0})
  events.Reload()
  got = events.Tensors('train/loss')
  assert [e.step for e in got] == list(range(1, 21))
  times = [e.wall_time for e in got]
  assert times == sorted(times)
  rows = [json.loads(line) for line in read(tmp_path).splitlines()]
  logged = {r['step']: r['loss'] for r in rows if r['split'] == 'train'}
  for e in got:
    assert np.float32(logged[e.step]) == np.frombuffer(e.tensor_proto.tensor_content, np.float32)[0]


_calls = []


def _die_at(count, judge, *args):
  _calls.append(1)
  if len(_calls) == count:
    raise KeyboardInterrupt
  return judge(*args)


def test_a_finished_run_started_again_changes_nothing(toy_config, whole):
  before = read(whole)
  scores = run(toy_config, whole)
  assert read(whole) == before and scores['examples'] == 13


def test_a_longer_schedule_is_announced(toy_config, tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 4)
  with pytest.raises(meshes.Preempted):
    run(toy_config, tmp_path)
  toy_config.total_steps = 24
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 6)
  with pytest.raises(meshes.Preempted):
    run(toy_config, tmp_path)
  assert 'total_steps: 20 -> 24' in caplog.text


def finish(process):
  output = process.communicate(timeout=600)[0]
  return process.returncode, output


def kill_at_random(lab, workdir, rng, config):
  """Starts the program and kills it with -9 at a random moment, from the first step's compilation to the last save."""
  process = lab(f'--workdir={workdir}', config=config)
  begun = time.monotonic()
  for line in process.stdout:
    if 'training from step' in line:
      break
  time.sleep(rng.uniform(0, 0.5) * (time.monotonic() - begun))     # in units of the start, whatever the machine's speed
  process.send_signal(signal.SIGKILL)
  process.wait()


# of the systems `python -m tests.kills` kills all, and LAB_LONG=1 pose
CONFIGS = ('tests/toy.py', *(('configs/pose.py:smoke',) if os.environ.get('LAB_LONG') else ()))


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  """config -> the digest and metric rows of a run that nothing stopped; made once."""
  made = {}

  def get(lab, config):
    if config not in made:
      workdir = tmp_path_factory.mktemp('uninterrupted')
      code, output = finish(lab(f'--workdir={workdir}', config=config))
      assert code == 0, output
      made[config] = DIGEST.findall(output), read(workdir)
    return made[config]
  return get


@pytest.mark.timeout(3600)
@pytest.mark.parametrize('config', CONFIGS)
@pytest.mark.parametrize('moment', range(int(os.environ.get('LAB_KILLS', '1'))))
def test_kill_9_at_a_random_moment_changes_no_bit(lab, tmp_path, uninterrupted, config, moment):
  kill_at_random(lab, tmp_path, random.Random(moment), config)
  code, output = finish(lab(f'--workdir={tmp_path}', config=config))
  assert code == 0, output
  assert (DIGEST.findall(output), read(tmp_path)) == uninterrupted(lab, config)


@pytest.mark.parametrize('config', CONFIGS[:1])
def test_sigterm_saves_and_exits_75(lab, tmp_path, uninterrupted, config):
  process = lab(f'--workdir={tmp_path}', config=config)
  for line in process.stdout:
    if line.startswith('step 2/'):
      break
  process.send_signal(signal.SIGTERM)
  process.send_signal(signal.SIGTERM)      # an impatient platform repeats itself
  code, output = finish(process)
  assert code == 75, output
  assert 'start the same command again' in output
  step = Checkpoints(str(tmp_path)).steps()[-1]
  assert step >= 2
  code, output = finish(lab(f'--workdir={tmp_path}', config=config))
  assert code == 0 and f'resumed at step {step}' in output
  assert (DIGEST.findall(output), read(tmp_path)) == uninterrupted(lab, config)


@pytest.mark.parametrize('presses', [1, 2])
def test_ctrl_c_saves_and_a_second_one_leaves_at_once(toy_config, tmp_path, monkeypatch, whole, presses):
  handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
  stop = dict(meshes._stop)

  def press(self, step, total):
    for _ in range(presses if step == 12 else 0):
      signal.raise_signal(signal.SIGINT)
  try:
    meshes.listen(alone=True)
    with monkeypatch.context() as m:
      m.setattr(logs.Pace, '__call__', press)
      with pytest.raises(meshes.Preempted if presses == 1 else KeyboardInterrupt):
        run(toy_config, tmp_path)
  finally:
    meshes._stop.update(stop)
    for number, before in handlers.items():
      signal.signal(number, before)
  assert Checkpoints(str(tmp_path)).steps() == ([10, 12] if presses == 1 else [5, 10])
  run(toy_config, tmp_path)
  assert read(tmp_path) == read(whole) and arrays(tmp_path, 20) == arrays(whole, 20)


def test_a_full_disk_of_tensorboard_s_is_told_once_and_ends_nothing(toy_config, tmp_path, monkeypatch, caplog, whole):
  from clu import metric_writers

  def full(*_):
    raise OSError(errno.ENOSPC, 'No space left on device')
  monkeypatch.setattr(metric_writers.SummaryWriter, 'write_scalars', full)
  run(toy_config, tmp_path)
  assert [r.getMessage() for r in caplog.records if 'TensorBoard' in r.getMessage()] == [
      'TensorBoard: write_scalars failed, and further failures will not be told: [Errno 28] No space left on device']
  assert read(tmp_path) == read(whole) and Checkpoints(str(tmp_path)).steps()[-1] == 20


def test_an_evaluation_that_was_interrupted_is_done_at_the_next_start(toy_config, tmp_path, monkeypatch, whole):
  asked = []
  monkeypatch.setattr(meshes, 'interrupted', lambda: asked.append(1) or len(asked) == 4)       # in that of step 10
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 10)
  with pytest.raises(meshes.Preempted, match='step 10 '):
    run(toy_config, tmp_path)
  assert Checkpoints(str(tmp_path)).meta(10)['notes']['evaluation_due']
  monkeypatch.setattr(meshes, 'interrupted', lambda: True)
  with pytest.raises(meshes.Preempted, match='still due'):      # and again, in the evaluation that is due
    run(toy_config, tmp_path)
  monkeypatch.setattr(meshes, 'interrupted', lambda: False)

  def die(step):
    raise KeyboardInterrupt      # after the evaluation that was due, before any checkpoint tells that it is done
  monkeypatch.setattr(meshes, 'preempted', die)
  with pytest.raises(KeyboardInterrupt):
    run(toy_config, tmp_path)
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  run(toy_config, tmp_path)
  assert read(tmp_path) == read(whole)
  for tag in ('train/loss', 'eval/error', 'eval_raw/error'):
    assert values(tmp_path, tag) == values(whole, tag)


def test_the_second_epoch_compiles_nothing(toy_config, tmp_path, monkeypatch):
  programs, make = [], train._program
  monkeypatch.setattr(train, '_program', lambda *a: programs.append(make(*a)) or programs[-1])
  run(toy_config, tmp_path)                 # 20 steps of 8 are more than five epochs of 30
  assert len(programs[0].compiled) == 1


def test_broken_records_are_remembered(toy_config, tmp_path, monkeypatch):
  toy_config.input.bad_limit = 0.5

  class Bad(train.pipeline.Batches):
    """Batches that know of a bad record from the second step on."""

    def _made(self):
      for batch in super()._made():
        if self.train and self.step == 2 and not self.bad:
          self.bad.append(7)
        yield batch
  monkeypatch.setattr(train.pipeline, 'Batches', Bad)
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 6)
  with pytest.raises(meshes.Preempted):
    run(toy_config, tmp_path)
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  run(toy_config, tmp_path)
  rows = [json.loads(line) for line in read(tmp_path).splitlines()]
  assert [r.get('bad_records') for r in rows if r['split'] == 'train'] == [None] + [1] * 19


def test_digest_sees_every_bit_and_every_swap():
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  state = {'a': jax.numpy.asarray(x), 'b': jax.numpy.asarray([True, False]), 'c': jax.numpy.bfloat16(1.5)}
  one = checksums.digest(state)
  assert one == checksums.digest(jax.tree.map(lambda v: v, state))
  bits = x.copy().view(np.uint32)
  bits[1, 2] ^= 1
  for other in (bits.view(np.float32), x[:, ::-1].copy(), x[::-1].copy(), x.astype(np.int32)):
    assert checksums.digest({**state, 'a': jax.numpy.asarray(other)}) != one
  assert checksums.digest({**state, 'b': jax.numpy.asarray([False, True])}) != one


@pytest.mark.parametrize('end', ['last step', 'stop', 'failure'])
def test_a_trace_is_written_however_the_run_ends(toy_config, tmp_path, monkeypatch, end):
  calls = []
  monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: calls.append('start'))
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))
  toy_config.total_steps, toy_config.eval_steps = 6, 0
  toy_config.profile.update({'start': 4, 'steps': 10})
  if end == 'stop':
    monkeypatch.setattr(meshes, 'preempted', lambda step: step == 5)
  if end == 'failure':
    toy_config.poison, toy_config.optim.max_nonfinite = 4, 0
  with contextlib.nullcontext() if end == 'last step' else pytest.raises((meshes.Preempted, train.NonFinite)):
    run(toy_config, tmp_path)
  assert calls == ['start', 'stop']


def test_seconds_go_on_after_a_restart(toy_config, tmp_path, monkeypatch):
  monkeypatch.setattr(logs.Log, '_passed', lambda self: 5.0)           # each process is as slow to its first row
  toy_config.log_steps = 10
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 12)
  with pytest.raises(meshes.Preempted):
    run(toy_config, tmp_path)
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  run(toy_config, tmp_path)
  rows = [json.loads(line) for line in read(tmp_path, 'timings.jsonl').splitlines()]
  assert [(r['step'], r['seconds']) for r in rows] == [(10, 5.0), (20, 10.0)]
  # a log of before, in which each process began at 0 again
  old = [{**r, 'seconds': 5.0} for r in rows]
  assert plot.hours(rows) == plot.hours(old) == {10: 5 / 3600, 20: 10 / 3600}
