"""`launch/tpu_vm.sh stop` while a run is starting: what it ends, and what it says where it can end nothing."""

import time

import pytest

from tests.test_tpu_vm import cloud, ready, stub      # noqa: F401


def put(cloud, name, line):
  """A program of one line, before the system's on the PATH of both workers."""
  for worker in (0, 1):
    path = cloud.home(worker) / 'bin' / name
    path.write_text(f'#!/bin/sh\n{line}\n')
    path.chmod(0o755)


@pytest.fixture
def slow(ready):
  """A cloud on which a run has ended, and the next one has the lock but has not told its number; ~/go lets it go on."""
  ready.plan('exit 0', 'exec tail -f /dev/null')
  ready('run', '--', 'a')
  ready.wait('w-0: exit code 0', 'w-1: exit code 0')
  put(ready, 'setsid', 'until [ -e ~/go ]; do /bin/sleep 0.01; done; exec /usr/bin/setsid "$@"')
  ready('run', '--', 'a')
  yield ready
  deadline = time.monotonic() + 300
  for worker in (0, 1):      # those that have told their numbers are ended by the cloud
    (ready.home(worker) / 'go').touch()
    number = ready.home(worker) / 'lab.run/pid'
    while not (number.exists() and number.read_text()) and time.monotonic() < deadline:
      time.sleep(0.01)


def test_stop_waits_for_a_run_that_is_starting(slow):
  put(slow, 'sleep', 'touch ~/go; exec /bin/sleep "$@"')      # as soon as it is waited for, the run goes on
  slow('stop')
  assert all((slow.home(worker) / 'go').exists() for worker in (0, 1))
  slow.wait('w-0: exit code 143', 'w-1: exit code 143')


def test_stop_fails_where_it_can_end_nothing(slow):
  put(slow, 'sleep', 'exit 0')
  out = slow('stop', code=2)
  assert 'error: w-0: something holds' in out and 'error: w-1: something holds' in out


def test_stop_of_what_has_ended_is_done(ready):
  ready('stop')
  ready('run', '--', 'a')
  ready.wait('w-0: exit code 0', 'w-1: exit code 0')
  ready('stop')
