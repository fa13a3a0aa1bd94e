"""Where the time went: the buckets add up, over all starts, and what is done again is lost."""

import itertools
import json
import time

import pytest

from lab import evaluate, ledger as ledgers, logs, mesh as meshes, train
from lab.ledger import BUCKETS, PHASES, Ledger, summary
from tests import toy


def line(began, at, step_, event='', compilations=0, peak=0, **seconds):
  return json.dumps({'began': began, 'time': at, 'step': step_, 'event': event, 'compilations': compilations,
                     **({'peak': peak} if peak else {}), 'seconds': {**dict.fromkeys(PHASES, 0.0), **seconds}})


def test_lost_and_idle_by_hand(tmp_path):
  (tmp_path / 'ledger.jsonl').write_text('\n'.join((
      line(100, 110, 0, 'resumed', start=10),
      line(100, 121, 1, '', 1, start=10, compile=8, wait=1, step=2),
      line(100, 131, 5, 'saved', 1, 3 << 20, start=10, compile=8, wait=2, step=9, save=2),
      line(100, 141, 9, '', 1, start=10, compile=8, wait=3, step=17, save=2, evaluate=1),   # 10 s, then killed
      line(160, 165, 5, 'resumed', start=4, restore=1),
      line(160, 180, 12, 'end', 1, 2 << 20, start=4, restore=1, compile=5, step=10),
      '{"began": 160, "ti')) + '')
  found = summary(str(tmp_path))
  # the four steps after the save at 5 are done again: 1 s waiting, 8 s stepping, 1 s evaluating
  want = {'start': 14, 'compile': 13, 'restore': 1, 'wait': 2, 'step': 19, 'evaluate': 0, 'save': 2, 'lost': 10,
          'idle': 19}
  assert found['seconds'] == want and found['wall_s'] == 80 == sum(want.values())
  assert (found['starts'], found['lost_steps'], found['compilations']) == (2, 4, 2)
  assert found['goodput'] == 19 / 80
  assert found['peak'] == 3 << 20
  told = ledgers.table(found)
  assert '24% of 80.0 s' in told and '4 step(s) done again; 2 compilation(s), 3 MiB in use at most' in told
  assert summary(str(tmp_path / 'nothing')) == {}


def test_a_phase_inside_another_is_counted_once(tmp_path, monkeypatch):
  clock = [1000.0]
  monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
  monkeypatch.setattr(time, 'time', lambda: clock[0])
  book = Ledger(str(tmp_path), began=990.0)
  book.enter('step')
  clock[0] += 5
  with book.during('evaluate'):
    clock[0] += 2
    with book.during('compile'):
      clock[0] += 3
    clock[0] += 1
  clock[0] += 4
  book.close()
  found = summary(str(tmp_path))
  assert {k: v for k, v in found['seconds'].items() if v} == {'start': 10, 'step': 9, 'evaluate': 3, 'compile': 3}
  assert found['wall_s'] == 25


def test_the_buckets_of_a_run_killed_and_resumed_add_up_to_its_wall_time(toy_config, tmp_path, monkeypatch):
  began = time.time()
  make, calls = evaluate.make, []

  def dying(*args):
    judge = make(*args)

    def call(*a):
      calls.append(1)
      if len(calls) == 3:                      # the one at step 15
        raise KeyboardInterrupt
      return judge(*a)
    return call
  monkeypatch.setattr(evaluate, 'make', dying)
  with pytest.raises(KeyboardInterrupt):
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  monkeypatch.setattr(evaluate, 'make', make)
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  ended = time.time()
  found = summary(str(tmp_path))
  assert set(found['seconds']) == set(BUCKETS)
  assert sum(found['seconds'].values()) == pytest.approx(found['wall_s'], rel=0.01)
  # what a run does after its last line is not in it, however long a busy machine takes for that
  assert 0.5 * (ended - began) < found['wall_s'] <= ended - began + 0.01
  assert found['starts'] == 2 and found['lost_steps'] == 5 and found['seconds']['lost'] > 0
  assert found['peak'] > 1 << 26               # the whole process: fake devices keep no statistics
  assert found['compilations'] == 4            # step and evaluation, in two processes
  assert min(found['seconds'].values()) >= 0


def test_a_run_that_saves_and_stops_loses_nothing(toy_config, tmp_path, monkeypatch):
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 7)
  with pytest.raises(meshes.Preempted):
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  monkeypatch.setattr(meshes, 'preempted', lambda step: False)
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  found = summary(str(tmp_path))
  assert found['starts'] == 2 and found['lost_steps'] == 0 and found['seconds']['lost'] == 0


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path):
  (tmp_path / 'ledger.jsonl').write_text(line(100, 110, 3, 'saved', start=10) + '\n{"began": 100, "ti')
  Ledger(str(tmp_path), began=120.0).close()
  assert summary(str(tmp_path))['starts'] == 2


def test_the_first_step_and_one_of_ten_times_the_median_are_told(caplog, capsys, monkeypatch):
  monkeypatch.setattr(logs.time, 'time', lambda: 1012.34)
  pace, seconds = logs.Pace(1000), itertools.accumulate([9] + [.1] * 11 + [.9, .1, 1.2])     # the first step compiles
  for step, total in enumerate(seconds, 1):
    pace(step, total)
  assert capsys.readouterr().err == 'first step 12.3 s after the start of the program\n'
  assert [r.getMessage() for r in caplog.records] == ['step 15 took 1.2 s, 12 times the median of 0.1 s']
