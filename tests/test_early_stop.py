"""A run ends when its metric stops improving: at the same step, however often it was stopped before."""

import json

import jax
import pytest

from lab import evaluate, mesh as meshes, page, train
from lab.checkpoint import Checkpoints
from lab.task import ConfigError
from tests import toy

# of the evaluations at 5, 10, ...: 3 improves on 4 and 2.9 does not by 0.05 of it, nor do 2.99 and 5; 1 would
ERRORS = (4.0, 3.0, 2.9, 2.99, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0)


@pytest.fixture
def config(toy_config):
  toy_config.total_steps, toy_config.log_steps, toy_config.optim.ema = 50, 5, 0.0
  toy_config.early_stop.update({'patience': 3, 'delta': 0.05})
  return toy_config


@pytest.fixture(autouse=True)
def errors(monkeypatch):
  """Evaluations that give ERRORS, whatever the weights are; the n-th of them is that of step 5 n."""
  def make(*args):
    del args
    return lambda weights, stats: ({name: {'error': ERRORS[now[0] // 5 - 1]} for name in weights}, {})
  now, judge = [0], train._evaluate

  def at(i, *args):
    now[0] = i
    return judge(i, *args)
  monkeypatch.setattr(evaluate, 'make', make)
  monkeypatch.setattr(train, '_evaluate', at)


def run(config, workdir):
  return train.run(toy.make_task(config), config, str(workdir))


def ended(workdir):
  """The steps of the evaluations, and every array of the newest checkpoint."""
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  checkpoints = Checkpoints(str(workdir))
  return [r['step'] for r in rows if r['split'] == 'eval'], checkpoints.meta(checkpoints.steps()[-1])['arrays']


@pytest.mark.parametrize('best, values, patience, end', [
    ('-error', (4, 3, 2.9, 2.99, 5), 3, True), ('-error', (4, 3, 2.9, 2.99), 3, False), ('-error', (), 1, False),
    ('-error', (4, 3, 2.9, 2.86), 2, True), ('-error', (4, 3, 2.9, 2.86), 0, False),
    ('-error', (4, 3, 2.9, 2.8, 2.7), 2, False),                       # small gains add up: measured from the last best
    ('error', (1, 2, 2.05), 1, True), ('error', (1, 2, 2.2), 1, False), ('error', (-2, -1.95), 1, True),
    ('error', (-2, -1.8), 1, False), ('-error', (None, None), 2, True), ('-error', (None, 3, None), 2, False),
    ('-error', (0, 0), 1, True)])
def test_when_a_run_has_to_end(config, best, values, patience, end):
  config.checkpoint.best, config.early_stop.patience = best, patience
  rows = [{'step': 5 * i, 'split': split, 'error': v if split == 'eval' else 0.1 * v if v else 7}
          for i, v in enumerate(values, 1) for split in ('eval', 'eval_raw', 'train')]
  assert bool(evaluate.stalled(config, rows)) == end
  assert evaluate.stalled(config, rows * 2) == evaluate.stalled(config, rows)      # an evaluation counts once


def test_it_ends_early_stays_ended_and_says_why(config, tmp_path, capsys):
  run(config, tmp_path)
  said, why = capsys.readouterr().err, 'the last 3 evaluations did not improve error by 5.00% on the 3 of step 10'
  steps, arrays = ended(tmp_path)
  assert steps == [5, 10, 15, 20, 25] and f'Done: 25 steps, stopped early: {why}. error 5' in said
  assert f'The run stopped early: {why}.' in page.page(page.read(str(tmp_path)))
  rows = (tmp_path / 'metrics.jsonl').read_text()
  run(config, tmp_path)                                                 # again: nothing but the summary
  said = capsys.readouterr().err
  assert 'Done: 25 steps, stopped early' in said and 'training from' not in said
  assert (tmp_path / 'metrics.jsonl').read_text() == rows and ended(tmp_path)[1] == arrays
  config.early_stop.patience = 4                                        # the sixth evaluation improves; four follow it
  run(config, tmp_path)
  said = capsys.readouterr().err
  assert 'training from step 25 to 50' in said and 'Done: 50 steps, stopped early' in said
  assert ended(tmp_path)[0] == [*range(5, 51, 5)]


@pytest.mark.parametrize('stops', [(12,), (20, 21), (25,)])
def test_stopped_in_between_it_ends_at_the_same_step(config, tmp_path, monkeypatch, stops):
  run(config, tmp_path / 'whole')
  for stop in stops:
    monkeypatch.setattr(meshes, 'preempted', lambda step, stop=stop: step == stop)
    if stop == 25:                                                      # where it ends anyway
      run(config, tmp_path / 'stopped')
    else:
      with pytest.raises(meshes.Preempted, match=f'step {stop} '):
        run(config, tmp_path / 'stopped')
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  run(config, tmp_path / 'stopped')
  assert ended(tmp_path / 'stopped') == ended(tmp_path / 'whole')
  assert (tmp_path / 'stopped' / 'metrics.jsonl').read_text() == (tmp_path / 'whole' / 'metrics.jsonl').read_text()


@pytest.mark.parametrize('death', [20, 25])
def test_killed_between_an_evaluation_and_its_checkpoint(config, tmp_path, monkeypatch, death):
  run(config, tmp_path / 'whole')
  with monkeypatch.context() as m:
    for name in ('save', 'finish'):
      save = getattr(Checkpoints, name)

      def dying(self, step, *args, save=save):
        if step == death:
          raise KeyboardInterrupt
        return save(self, step, *args)
      m.setattr(Checkpoints, name, dying)
    with pytest.raises(KeyboardInterrupt):
      run(config, tmp_path / 'killed')
  run(config, tmp_path / 'killed')
  assert ended(tmp_path / 'killed') == ended(tmp_path / 'whole')


def test_processes_agree_with_the_first(config, tmp_path, monkeypatch):
  """Only the first process has the rows; the others take its word."""
  run(config, tmp_path)
  reason = train._stalled(config, str(tmp_path))
  told = []
  monkeypatch.setattr(meshes, 'gather', lambda items: told.extend(items) or [reason, *items])
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  assert train._stalled(config, str(tmp_path / 'elsewhere')) == reason != '' and told == ['']


@pytest.mark.parametrize('changes, said', [
    ({'early_stop.patience': -1}, 'config.early_stop.patience = -1: expected at least 0'),
    ({'early_stop.delta': -0.1}, 'config.early_stop.delta = -0.1: expected at least 0'),
    ({'checkpoint.best': ''}, 'config.early_stop.patience = 3: expected 0, for checkpoint.best is not set'),
    ({'early_stop.patience': 0}, 'config.early_stop.delta = 0.05: expected 0.005, for patience is 0')])
def test_settings_that_cannot_run_are_refused(config, changes, said):
  train.check(config)
  config.update_from_flattened_dict(changes)
  with pytest.raises(ConfigError, match=said):
    train.check(config)
