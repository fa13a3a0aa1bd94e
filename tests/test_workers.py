"""Batches that other processes make: the same ones, and no worker is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from data_pipelines import DataError, pipeline

from lab import mesh as meshes, train, workers
from tests import toy

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def batches_of(config, rows, count, start=0):
  found = train.feed(toy.make_task(config).source('train'), config, rows)
  found.step = start
  with contextlib.closing(iter(found)) as stream:
    return found, [next(stream) for _ in range(count)]


def children(pid=None):
  """The living processes that `pid` started, or this process: its workers."""
  return [int(name) for name in filter(str.isdigit, os.listdir('/proc')) if parent_of(name) == (pid or os.getpid())]


def parent_of(process):
  """0 of one that is over."""
  with contextlib.suppress(OSError), open(f'/proc/{process}/stat', encoding='ascii') as f:
    state, parent = f.read().rpartition(')')[2].split()[:2]
    return 0 if state == 'Z' else int(parent)
  return 0


@pytest.fixture
def prepared(toy_config, tmp_path):
  toy_config.data.dir = toy.write(str(tmp_path))
  return toy_config


def test_workers_make_the_batches_of_one_process(prepared, caplog, monkeypatch):
  """Though a record is bad, one is told to end as the run is, and both are killed."""
  monkeypatch.setattr(workers, 'PIPE_BYTES', 4096)      # holds far fewer batches than are taken after the kills
  broken(prepared)
  prepared.input.bad_limit = 0.1
  plain, expected = batches_of(prepared, (1, 2, 5), 150, start=3)
  prepared.input.workers = 2
  found = train.feed(toy.make_task(prepared).source('train'), prepared, (1, 2, 5))
  found.step = 3
  first, second = found.begin()
  for number in (signal.SIGTERM, signal.SIGINT):
    os.kill(first, number)
  with contextlib.closing(iter(found)) as stream:
    for i, batch in enumerate(expected):
      made = next(stream)
      assert batch.keys() == made.keys()
      for k in batch:
        assert batch[k].dtype == made[k].dtype
        np.testing.assert_array_equal(batch[k], made[k])
      if i == 1:
        assert first in children()
        os.kill(second, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
  assert not children()
  assert found.step == plain.step == 153 and found.bad == plain.bad == [3]
  said = [r.getMessage() for r in caplog.records]
  assert sum('killed by signal 9; ' in text for text in said) == 2
  assert sum('bad record left out' in text for text in said) >= 2      # by both ways
  assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}


def test_no_more_workers_than_rows(prepared):
  prepared.input.workers = 9
  assert train.feed(toy.make_task(prepared).source('train'), prepared, range(8)).parts == [[i] for i in range(8)]


def test_workers_that_began_and_were_not_used_are_ended(prepared):
  prepared.input.workers = 2
  batches = train.feed(toy.make_task(prepared).source('train'), prepared, range(8))
  with contextlib.closing(batches):
    found = batches.begin()
    assert sorted(found) == sorted(children()) and len(found) == 2
  assert not children()


def test_too_many_bad_records_stop(prepared):
  broken(prepared)
  prepared.input.workers = 1
  with pytest.raises(DataError, match='bad record at step'):
    batches_of(prepared, range(8), 8)
  assert not children()


def broken(config):
  """Changes a byte of the fourth training record."""
  path = toy.shards(config.data.dir, 'train')[0]
  at = pipeline.framing(path)[0][3]
  with open(path, 'r+b') as f:
    f.seek(at + 20)
    byte = f.read(1)
    f.seek(at + 20)
    f.write(bytes([byte[0] ^ 255]))


def test_bad_records_of_several_workers_are_too_many_together(prepared):
  batches = train.feed(toy.make_task(prepared).source('train'), with_workers(prepared, 2), range(8))
  batches.config.bad_limit, batches.bad = 0.05, [1]
  batches._told({'said': [], 'bad': [1]})
  with pytest.raises(DataError, match='2 bad records of 30'):
    batches._told({'said': [], 'bad': [1, 7]})


def with_workers(config, count):
  config.input.workers = count
  return config


def test_a_worker_that_is_lost_again_ends_the_run_with_3(prepared, monkeypatch):
  monkeypatch.setattr(workers.sys, 'executable', '/bin/false')
  batches = train.feed(toy.make_task(prepared).source('train'), with_workers(prepared, 1), range(8))
  with pytest.raises(workers.WorkerLost, match='ended with code 1') as e:
    next(iter(batches))
  assert e.value.exit_code == 3


def test_a_worker_that_stands_still_is_told():
  with contextlib.closing(workers.Worker('{}', limit=1)) as worker:
    os.kill(worker.process.pid, signal.SIGSTOP)
    worker.begin({})
    with pytest.raises(workers.WorkerLost, match='silent for 1 s'):
      worker.read([])


PARENT = '''
import sys
from lab import workers
from tests import toy
config = toy.get_config()
config.data.dir, config.input.workers = sys.argv[1], 1
worker = workers.Worker(config.to_json())
worker.begin({'step': 0, 'bad': [], 'rows': list(range(8)), 'workers': 1})
print('ready', flush=True)
sys.stdin.read()
'''


def test_no_worker_outlives_a_run_that_is_killed(prepared):
  parent = subprocess.Popen([sys.executable, '-c', PARENT, prepared.data.dir], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, 'PYTHONPATH': ROOT})
  assert parent.stdout.readline() == b'ready\n'
  found = children(parent.pid)
  assert len(found) == 1
  parent.kill()
  parent.wait()
  parent.stdin.close()
  parent.stdout.close()
  end = time.monotonic() + 60
  while time.monotonic() < end and any(map(parent_of, found)):
    time.sleep(0.05)
  assert not any(map(parent_of, found))


def test_a_run_with_workers_has_the_bits_of_one_without(prepared, tmp_path, capsys, monkeypatch):
  def digest(folder, count):
    train.run(toy.make_task(with_workers(prepared, count)), prepared, str(tmp_path / folder))
    return next(line for line in ''.join(capsys.readouterr()).splitlines() if 'state digest' in line)
  whole = digest('whole', 0)
  with monkeypatch.context() as patch:
    patch.setattr(meshes, 'preempted', lambda step: step == 7)
    with pytest.raises(meshes.Preempted):
      digest('stopped', 0)
  assert digest('stopped', 2) == whole
  assert not children()
