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

from lab import train, workers
from lab.task import ConfigError
from tests import toy

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def batches_of(config, rows, count, workers_, start=0):
  config.input.workers = workers_
  found = train.feed(toy.make_task(config).source('train'), config, rows)
  found.step = start
  with contextlib.closing(iter(found)) as stream:
    return found, [next(stream) for _ in range(count)]


def children(pid):
  """The living processes that `pid` started."""
  found = []
  for name in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError), open(f'/proc/{name}/stat', encoding='ascii') as f:
      state, parent = f.read().rpartition(')')[2].split()[:2]
      found += [int(name)] * (int(parent) == pid and state != 'Z')
  return found


@pytest.fixture
def toy_data(toy_config, tmp_path, monkeypatch):
  toy_config.data.dir = toy.write(str(tmp_path))
  return toy_config


@pytest.mark.parametrize('rows, start', [(range(8), 0), ((1, 2, 5), 3)])
def test_workers_make_the_batches_of_one_process(toy_data, rows, start):
  _, plain = batches_of(toy_data, rows, 6, 0, start)
  found, made = batches_of(toy_data, rows, 6, 3, start)
  assert found.step == start + 6
  for a, b in zip(plain, made, strict=True):
    assert a.keys() == b.keys()
    for k in a:
      assert a[k].dtype == b[k].dtype
      np.testing.assert_array_equal(a[k], b[k])
  assert not children(os.getpid())


def test_no_more_workers_than_rows(toy_data):
  toy_data.input.workers = 9
  assert train.feed(toy.make_task(toy_data).source('train'), toy_data, range(8)).parts == [[i] for i in range(8)]


def test_workers_that_began_and_were_not_used_are_ended(toy_data):
  toy_data.input.workers = 2
  batches = train.feed(toy.make_task(toy_data).source('train'), toy_data, range(8))
  found = batches.begin()
  assert sorted(found) == sorted(children(os.getpid())) and len(found) == 2
  batches.close()
  assert not children(os.getpid())


def test_bad_records_of_all_workers_are_counted_and_told(toy_data, caplog):
  broken(toy_data)
  toy_data.input.bad_limit = 0.1
  found, made = batches_of(toy_data, range(8), 8, 2)
  assert found.bad == [3] and sum(int((b['mask'] == 0).sum()) for b in made) == 2      # two epochs and a bit
  assert [r.getMessage() for r in caplog.records if 'bad record left out' in r.getMessage()]


def test_too_many_bad_records_stop(toy_data):
  broken(toy_data)
  with pytest.raises(DataError, match='bad record at step'):
    batches_of(toy_data, range(8), 8, 1)
  assert not children(os.getpid())


def broken(config):
  """Changes a byte of the fourth training record."""
  path = toy.shards(config.data.dir, 'train')[0]
  at = pipeline.framing(path)[0][3]
  with open(path, 'r+b') as f:
    f.seek(at + 20)
    byte = f.read(1)
    f.seek(at + 20)
    f.write(bytes([byte[0] ^ 255]))


def test_bad_records_of_several_workers_are_too_many_together(toy_data):
  batches = train.feed(toy.make_task(toy_data).source('train'), with_workers(toy_data, 2), range(8))
  batches.config.bad_limit, batches.bad = 0.05, [1]
  with pytest.raises(DataError, match='2 bad records of 30'):
    batches._told({'said': [], 'bad': [1, 7]})


def with_workers(config, count):
  config.input.workers = count
  return config


def test_a_worker_that_is_killed_ends_the_run_with_3(toy_data):
  batches = train.feed(toy.make_task(toy_data).source('train'), with_workers(toy_data, 2), range(8))
  os.kill(batches.begin()[0], signal.SIGKILL)
  with pytest.raises(workers.WorkerLost, match='killed by signal 9') as e:
    next(iter(batches))
  assert e.value.exit_code == 3
  del e
  assert not children(os.getpid())


def test_a_worker_that_stands_still_is_told():
  with contextlib.closing(workers.Worker(limit=1)) as worker:
    os.kill(worker.process.pid, signal.SIGSTOP)
    worker.begin({})
    with pytest.raises(workers.WorkerLost, match='silent for 1 s'):
      worker.read([])


def test_what_a_worker_raises_is_raised(toy_data):
  toy_data.input.workers = 1
  batches = train.feed(toy.make_task(toy_data).source('train'), toy_data, range(8))
  batches.whole.unlock().task = 'tests.no_such'
  with pytest.raises(ConfigError, match='no such module'):
    next(iter(batches))


PARENT = '''
import os, sys
from tests import toy
from lab import train
config = toy.get_config()
config.data.dir, config.input.workers = sys.argv[1], 1
stream = iter(train.feed(toy.make_task(config).source('train'), config, range(8)))
next(stream)
print('ready', flush=True)
sys.stdin.read()
'''


def test_no_worker_outlives_a_run_that_is_killed(toy_data):
  parent = subprocess.Popen([sys.executable, '-c', PARENT, toy_data.data.dir], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, 'PYTHONPATH': ROOT})
  assert parent.stdout.readline() == b'ready\n'
  found = children(parent.pid)
  assert len(found) == 1
  parent.kill()
  parent.wait()
  parent.stdin.close()
  parent.stdout.close()
  end = time.monotonic() + 60
  while time.monotonic() < end and any(os.path.exists(f'/proc/{p}') for p in found):
    time.sleep(0.05)
  assert not [p for p in found if os.path.exists(f'/proc/{p}')]


def test_a_run_with_workers_has_the_bits_of_one_without(toy_data, tmp_path, capsys):
  digests = []
  for count in (0, 2):
    train.run(toy.make_task(with_workers(toy_data, count)), toy_data, str(tmp_path / f'run{count}'))
    digests.append(next(line for line in ''.join(capsys.readouterr()).splitlines() if 'state digest' in line))
  assert digests[0] == digests[1]
  assert not children(os.getpid())
