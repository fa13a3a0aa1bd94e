"""What a metadata server announces reaches the run, against a stand-in for curl that answers from files."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from lab.checkpoint import Checkpoints
from tests.conftest import ROOT
from tests.test_tpu_vm import FOREVER, cloud, commit, stub      # noqa: F401

NOTICE = os.path.join(ROOT, 'launch/notice.sh')
# curl of this host: ~/metadata has what the server says, a file a key; a file that is not there is an error 404, one
# that says "error" a 503; without the folder there is no server, and with ~/hangs no answer, nor an end by SIGTERM
CURL = r"""#!/bin/bash
for url; do :; done
key=${url#http://metadata.google.internal/computeMetadata/v1/instance/}
[[ $key != http* && " $* " == *" -H Metadata-Flavor: Google "* && " $* " == *" -sf "* ]] || exit 2
trap '' TERM
while [ -e ~/hangs ]; do touch ~/hanging; sleep 0.01; done
if [ ! -e ~/metadata ]; then code=6
elif ! value=$(cat ~/metadata/"${key%\?*}" 2>/dev/null) || [ "$value" = error ]; then code=22
else code=0; printf %s "$value"
fi
echo "$code $key" >> ~/asked
exit $code
"""
GOING = [('preempted', 'TRUE'), ('maintenance-event', 'TERMINATE_ON_HOST_MAINTENANCE'),
         ('upcoming-maintenance', '{"maintenance_status": "ONGOING", "can_reschedule": "false"}')]
PENDING = '{"maintenance_status": "PENDING", "window_start_time": "2031-01-01T00:00:00Z"}'
# a run that counts its SIGTERMs from ~/began on, and ends when it has one and ~/end is there
SAVES = ('trap "echo TERM >> ~/signals" TERM; touch ~/began; '
         'until [ -e ~/signals ] && [ -e ~/end ]; do sleep 0.01; done; exit 75')


def until(condition):
  """Waits for a condition and returns its value."""
  deadline = time.monotonic() + 300
  while not (value := condition()):
    assert time.monotonic() < deadline
    time.sleep(0.01)
  return value


def running(folder):
  """Processes that have their current folder in this one."""
  found = []
  for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
      if os.readlink(f'/proc/{pid}/cwd').startswith(str(folder)):
        found.append(int(pid))
    except OSError:      # gone by now, or another user's
      pass
  return found


def text(path):
  return path.read_text() if path.exists() else ''


class Host:
  """A home folder with a metadata server and its curl."""

  def __init__(self, home, answers=True):
    self.home = home
    home.mkdir(exist_ok=True)
    if answers:
      (home / 'metadata').mkdir()
      self.says('preempted', 'FALSE')
      self.says('maintenance-event', 'NONE')

  def says(self, key, value):
    """Lets the server say so, from one moment to the next."""
    (self.home / 'new').write_text(value)
    os.rename(self.home / 'new', self.home / 'metadata' / key)

  def rounds(self):
    return text(self.home / 'asked').count('upcoming-maintenance')

  def asked(self, rounds=2):
    """Waits for the end of so many more rounds; the second of them began after what was said before."""
    before = self.rounds()
    until(lambda: self.rounds() >= before + rounds)


@pytest.fixture
def watch(tmp_path):
  """Starts the watcher of a process, or a process and its watcher, on a host; none is left afterwards."""
  started = []
  (tmp_path / 'bin').mkdir()
  (tmp_path / 'bin/curl').write_text(CURL)
  (tmp_path / 'bin/curl').chmod(0o755)

  def popen(host, command, path=f'{tmp_path}/bin:{os.environ["PATH"]}', **options):
    process = subprocess.Popen(command, cwd=host.home, env={**os.environ, 'HOME': str(host.home), 'PATH': path},
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    started.append(process)
    return process

  def start(host, run=('sleep', '1000'), own_group=True, **options):
    if not isinstance(run, subprocess.Popen):
      run = popen(host, run, start_new_session=own_group)
    return run, popen(host, [NOTICE, str(run.pid), '0.01'], start_new_session=True, **options)

  yield start
  for process in started:
    if process.poll() is None:
      process.kill()
    process.communicate()


def end(run, watcher):
  """Kills the run and returns what the watcher said, which ends by itself."""
  run.kill()
  run.wait()
  out = watcher.communicate(timeout=300)[0]
  assert watcher.returncode == 0
  return out


@pytest.mark.parametrize('own_group', [True, False])
@pytest.mark.parametrize('key, value', GOING)
def test_an_announcement_is_one_line_and_one_sigterm(tmp_path, watch, key, value, own_group):
  host = Host(tmp_path / 'home')
  run, watcher = watch(host, ['bash', '-c', SAVES], own_group)
  until((host.home / 'began').exists)
  host.asked()
  assert run.poll() is None and watcher.poll() is None
  host.says(key, value)
  out, _ = watcher.communicate(timeout=300)
  assert re.fullmatch(rf'notice: \S+Z: {key} is \w+: the host is about to go, and the run gets SIGTERM.*\n', out)
  assert watcher.returncode == 0
  (host.home / 'end').touch()
  assert run.wait(timeout=300) == 75
  assert (host.home / 'signals').read_text() == 'TERM\n'
  until(lambda: not running(host.home))


def test_the_lab_saves_what_it_has(tmp_path, watch, lab):
  host = Host(tmp_path / 'home')
  run = lab(f'--workdir={tmp_path}/run', '--config.total_steps=100000')
  _, watcher = watch(host, run)
  for line in run.stdout:
    if line.startswith('step 2/'):
      break
  host.says('preempted', 'TRUE')
  output = run.communicate(timeout=600)[0]
  assert run.returncode == 75 and 'start the same command again' in output
  assert 2 <= Checkpoints(f'{tmp_path}/run').steps()[-1] < 100000
  assert 'preempted is TRUE' in watcher.communicate(timeout=300)[0]


def test_what_may_still_take_days_or_only_moves_the_host_ends_no_run(tmp_path, watch):
  host = Host(tmp_path / 'home')
  run, watcher = watch(host)
  host.says('upcoming-maintenance', PENDING)
  host.asked()
  for event in ('MIGRATE_ON_HOST_MAINTENANCE', 'NONE', 'MIGRATE_ON_HOST_MAINTENANCE', 'NONE', 'SOMETHING_NEW'):
    host.says('maintenance-event', event)
    host.asked()
  assert run.poll() is None
  out = end(run, watcher)
  assert len(re.findall('MIGRATE_ON_HOST_MAINTENANCE: the host moves', out)) == out.count('\n') == 2


@pytest.mark.parametrize('key, value', GOING[1:])
def test_maintenance_that_was_announced_before_does_not_end_each_run_that_begins(tmp_path, watch, key, value):
  host = Host(tmp_path / 'home')
  host.says(key, value)
  run, watcher = watch(host)
  host.asked()
  assert run.poll() is None
  host.says('preempted', 'TRUE')
  first, second = watcher.communicate(timeout=300)[0].splitlines()
  assert 'since before the run began' in first and 'preempted is TRUE: the host is about to go' in second
  assert run.wait(timeout=300) == -signal.SIGTERM


@pytest.mark.parametrize('key, value', GOING[1:])
def test_a_first_answer_may_come_late(tmp_path, watch, key, value):
  """What stood before a run began is not taken for news because the server failed at first."""
  host = Host(tmp_path / 'home')
  host.says('maintenance-event', 'error')
  host.says('upcoming-maintenance', 'error')
  run, watcher = watch(host)
  host.asked()
  host.says(key, value)
  host.asked()
  assert run.poll() is None and 'since before the run began' in end(run, watcher)


def test_a_bad_pause_is_refused_at_once(tmp_path, watch):
  run, _ = watch(Host(tmp_path / 'home'))
  done = subprocess.run([NOTICE, str(run.pid), 'soon'], stderr=subprocess.PIPE, text=True, check=False)
  assert done.returncode == 2 and done.stderr.startswith('usage: ')


def test_seconds_are_left_where_preemption_was_announced_before(tmp_path, watch):
  host = Host(tmp_path / 'home')
  host.says('preempted', 'TRUE')
  run, _ = watch(host)
  assert run.wait(timeout=300) == -signal.SIGTERM


def test_a_server_that_fails_is_asked_again_and_told_of_once(tmp_path, watch):
  host = Host(tmp_path / 'home')
  host.says('preempted', 'error')
  host.says('maintenance-event', 'error')
  run, watcher = watch(host)
  host.asked(20)
  shutil.move(host.home / 'metadata', host.home / 'away')      # not even an error for a while
  host.asked(20)
  shutil.move(host.home / 'away', host.home / 'metadata')
  host.says('preempted', 'FALSE')
  host.says('maintenance-event', 'NONE')
  host.asked()
  assert run.poll() is None
  host.says('maintenance-event', 'TERMINATE_ON_HOST_MAINTENANCE')
  first, second = watcher.communicate(timeout=300)[0].splitlines()
  assert 'the metadata server fails, and is asked again' in first and 'TERMINATE_ON_HOST_MAINTENANCE' in second
  assert run.wait(timeout=300) == -signal.SIGTERM


def test_without_a_server_or_curl_one_line_and_the_run_is_left_alone(tmp_path, watch):
  (tmp_path / 'few').mkdir()
  for name in ('bash', 'env', 'date', 'sleep'):
    (tmp_path / 'few' / name).symlink_to(shutil.which(name))
  for home, more, message in (('a', {}, 'no metadata server answers'),
                              ('b', {'path': str(tmp_path / 'few')}, 'no curl here')):
    host = Host(tmp_path / home, answers=False)
    run, watcher = watch(host, **more)
    out, _ = watcher.communicate(timeout=300)
    assert message in out and out.count('\n') == 1 and watcher.returncode == 0
    assert run.poll() is None


@pytest.mark.parametrize('arguments', [[], ['1'], ['-1'], ['0'], ['x'], ['2; touch canary']])
def test_what_is_no_process_is_refused(tmp_path, arguments):
  done = subprocess.run([NOTICE, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
  assert done.returncode == 2 and 'usage' in done.stderr and not os.listdir(tmp_path)


@pytest.fixture
def ready(cloud, stub):      # noqa: F811
  """A cloud with a TPU VM that is set up, whose two hosts have metadata servers."""
  shutil.copy(NOTICE, stub / 'launch')
  commit(stub)
  (cloud.folder / 'bin/curl').write_text(CURL)
  (cloud.folder / 'bin/curl').chmod(0o755)
  cloud('create')
  cloud('setup')
  cloud.hosts = [Host(cloud.home(worker)) for worker in (0, 1)]
  yield cloud
  for host in cloud.hosts:
    (host.home / 'hangs').unlink(missing_ok=True)


def log(cloud, worker=0):      # noqa: F811
  return (cloud.home(worker) / 'lab.run/log').read_text()


def test_a_preempted_host_ends_its_run_with_75(ready):
  ready.plan(SAVES)
  ready('run', '--', '--config=c')      # returns: the watcher holds no connection
  for host in ready.hosts:
    until((host.home / 'began').exists)
    host.asked(1)
  assert ready('status').count('running') == 2
  ready.hosts[0].says('preempted', 'TRUE')
  until(lambda: 'preempted is TRUE: the host is about to go' in log(ready))
  assert 'about to go' not in log(ready, 1)
  ready.hosts[1].says('maintenance-event', 'TERMINATE_ON_HOST_MAINTENANCE')
  for host in ready.hosts:
    until((host.home / 'signals').exists)
    (host.home / 'end').touch()
  ready.wait('w-0: exit code 75', 'w-1: exit code 75')
  assert [(host.home / 'signals').read_text() for host in ready.hosts] == ['TERM\n'] * 2
  until(lambda: not running(ready.folder))


def test_babysit_starts_again_what_an_announcement_ended(ready):
  going = ('until [ -e ~/asked ]; do sleep 0.01; done; trap "echo FALSE > ~/metadata/preempted; exit 75" TERM; '
           'echo TRUE > ~/metadata/preempted; while :; do sleep 0.01; done')
  ready.plan(going, 'exit 0')
  out = ready('babysit', '--', '--config=c')
  assert 'ended with exit code 75' in out and 'done' in out
  assert ready.starts() == [going, 'exit 0'] and log(ready).count('preempted is TRUE') == 1
  until(lambda: not running(ready.folder))


def test_the_watcher_ends_with_the_run_and_is_no_part_of_it(ready):
  ready.plan('until [ -e ~/end ]; do sleep 0.01; done', FOREVER, 'echo $$ > ~/lab.pid; ' + FOREVER)
  for host in ready.hosts:
    (host.home / 'hangs').touch()
  ready('run', '--', 'a')
  for host in ready.hosts:
    until((host.home / 'hanging').exists)
    (host.home / 'end').touch()
  ready.wait('w-0: exit code 0', 'w-1: exit code 0')
  assert running(ready.folder)
  for host in ready.hosts:
    (host.home / 'hangs').unlink()
  until(lambda: not running(ready.folder))
  ready('run', '--', 'a')
  for host in ready.hosts:      # kill -9 for all of the run: there's no one left to end the watcher
    host.asked(1)
    os.killpg(int((host.home / 'lab.run/pid').read_text()), signal.SIGKILL)
  ready.wait('w-0: ended without an exit code', 'w-1: ended without an exit code')
  until(lambda: not running(ready.folder))
  ready('run', '--', 'a')
  for host in ready.hosts:      # kill -9 for the lab alone
    host.asked(1)
    os.kill(int(until(lambda: text(host.home / 'lab.pid'))), signal.SIGKILL)
  ready.wait('w-0: exit code 137', 'w-1: exit code 137')
  until(lambda: not running(ready.folder))
  assert 'about to go' not in log(ready)
