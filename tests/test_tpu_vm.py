"""Runs on Cloud TPU VMs, against a stand-in for gcloud whose workers are folders of this machine."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lab.checkpoint import Checkpoints
from tests.conftest import ROOT

LAUNCHER = os.path.join(ROOT, 'launch/tpu_vm.sh')
# instead of the lab: what the next line of the worker's plan says, and exit code 0 without one
STUB = r"""#!/usr/bin/env bash
printf '%s\0' "$LAB_EXTRAS" "$@" > ~/arguments
plan=$FAKE_GCLOUD/plan-$JAX_PROCESS_ID
line=$(head -n 1 "$plan" 2>/dev/null)
sed -i 1d "$plan" 2>/dev/null
echo "stub: ${line:-exit 0}"
eval "${line:-exit 0}"
"""
ENVIRONMENT = 'find_python() { :; }\nmake_environment() { echo "$1" > ~/environment; }\n'
FOREVER = 'exec sleep 1000'


def commit(folder):
  """Makes a git checkout of a folder."""
  for arguments in (['init', '-q'], ['add', '-A'],
                    ['-c', 'user.name=a', '-c', 'user.email=a@b', 'commit', '-q', '-m', 'all']):
    subprocess.run(['git', '-C', str(folder), *arguments], check=True)


class Cloud:
  """The stand-in's folder, and the launcher with it on the PATH."""

  def __init__(self, folder, repo):
    self.folder, self.repo = folder / 'cloud', repo
    (self.folder / 'bin').mkdir(parents=True)
    program = self.folder / 'bin/gcloud'
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {ROOT}/tests/fake_gcloud.py "$@"\n')
    program.chmod(0o755)
    self.environment = {**os.environ, 'PATH': f'{program.parent}:{os.environ["PATH"]}',
                        'FAKE_GCLOUD': str(self.folder), 'XLA_FLAGS': '--xla_force_host_platform_device_count=1'}

  def __call__(self, command, *arguments, name='x', code=0, stdin='', **environment):
    """Runs a command of the launcher, checks its exit code and returns what it printed."""
    more = {'create': ['--type=v5litepod-16', '--poll=0'], 'setup': [f'--repo={self.repo}'],
            'babysit': ['--type=v5litepod-16', f'--repo={self.repo}', '--poll=0', '--backoff=0', '--grace=0']}
    done = subprocess.run([LAUNCHER, command, f'--name={name}', *more.get(command, []), *arguments],
                          env={**self.environment, **environment}, input=stdin, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout
    return done.stdout

  def calls(self):
    path = self.folder / 'calls.jsonl'
    return [json.loads(line)[2:] for line in path.read_text().splitlines()] if path.exists() else []

  def verbs(self):
    return [call[1] for call in self.calls()]

  def home(self, worker, name='x'):
    return self.folder / name / f'w-{worker}'

  def plan(self, *starts):
    """What both workers of a slice do at each start: a shell command, or one for each."""
    starts = [(s, s) if isinstance(s, str) else s for s in starts]
    for worker in (0, 1):
      (self.folder / f'plan-{worker}').write_text(''.join(s[worker] + '\n' for s in starts))

  def starts(self, worker=0):
    return re.findall('^stub: (.*)$', (self.home(worker) / 'lab.run/log').read_text(), re.M)

  def wait(self, *texts):
    """Returns the status when it has each of the texts."""
    deadline = time.monotonic() + 300
    while not all(t in (status := self('status')) for t in texts):
      assert time.monotonic() < deadline, status
    return status


@pytest.fixture
def stub(tmp_path):
  """A checkout of the stub."""
  launch = tmp_path / 'repo/launch'
  launch.mkdir(parents=True)
  (launch / 'run.sh').write_text(STUB)
  (launch / 'run.sh').chmod(0o755)
  (launch / 'environment.sh').write_text(ENVIRONMENT)
  commit(tmp_path / 'repo')
  return tmp_path / 'repo'


@pytest.fixture
def cloud(tmp_path, stub):
  """An empty cloud; nothing runs there afterwards."""
  yield (made := Cloud(tmp_path, stub))
  for pid in made.folder.glob('**/*.run/pid'):
    try:
      os.killpg(int(pid.read_text()), signal.SIGKILL)
    except ProcessLookupError:
      pass


@pytest.fixture
def ready(cloud):
  """A cloud with a TPU VM that is set up."""
  cloud('create')
  cloud('setup')
  return cloud


@pytest.mark.parametrize('arguments, message', [
    (['fly'], 'unknown command fly'), ([], 'a command is missing'), (['status'], '--name is missing'),
    (['status', '--name=x', '--sopt'], 'unknown flag --sopt'),
    (['status', '--name=x', '--zone'], '--zone needs a value'),
    (['create', '--name=x'], '--type is missing'), (['run', '--name=x'], 'run needs arguments'),
    (['run', '--name=x', '--workdir=a'], 'arguments of launch/run.sh go after --'),
    (['status', '--name=x', '--', 'a'], 'takes no arguments'), (['status', '--name=x', 'a'], 'unexpected argument a'),
    (['create', '--name=x', '--type=v4-8', '--slices=0'], '--slices=0'),
    (['babysit', '--name=x', '--type=v4-8', '--retries=-1', '--', 'a'], '--retries=-1')])
def test_a_wrong_command_line_is_one_message(cloud, arguments, message):
  done = subprocess.run([LAUNCHER, *arguments], env=cloud.environment, capture_output=True, text=True, check=False)
  assert done.returncode == 2 and message in done.stderr and done.stderr.count('\n') == 1
  assert not cloud.calls()


def test_help_lists_every_command_and_flag(cloud):
  text = cloud('--help')
  with open(LAUNCHER, encoding='utf-8') as f:
    source = f.read()
  taken = re.search(r'--name \| --zone.*?\) ;;', source, re.S)[0]
  assert all(flag in text for flag in re.findall(r'--\w+', taken)) and len(re.findall(r'--\w+', taken)) > 15
  assert all(f'\n  {command} ' in text for command in ('create', 'setup', 'run', 'logs', 'status', 'stop', 'babysit'))


@pytest.mark.parametrize('flags, expected', [
    ([], ['tpu-vm', 'create', 'x', '--accelerator-type=v5litepod-16', '--version=v2-alpha-tpuv5-lite']),
    (['--queued', '--spot', '--version=v'], ['queued-resources', 'create', 'x', '--accelerator-type=v5litepod-16',
                                             '--runtime-version=v', '--node-id=x', '--spot']),
    (['--slices=2', '--create_flag=--network=n'], [
        'queued-resources', 'create', 'x', '--accelerator-type=v5litepod-16', '--runtime-version=v2-alpha-tpuv5-lite',
        '--node-count=2', '--node-prefix=x', '--network=n'])])
def test_create_and_delete(cloud, flags, expected):
  out = cloud('create', '--zone=z', *flags, LAB_TPU_PROJECT='p')
  assert cloud.calls()[0] == [*expected, '--quiet', '--zone=z', '--project=p']
  assert 'ACTIVE' in out if expected[0] == 'queued-resources' else 'READY' in out
  queued = [f for f in flags if 'queued' in f or 'slices' in f]
  assert 'not deleted' in cloud('delete', *queued, stdin='\n', code=2)
  assert cloud.home(0).exists() and 'delete' not in cloud.verbs()
  cloud('delete', *queued, stdin='y\n')
  assert not cloud.home(0).exists()
  assert ('--force' in cloud.calls()[-1]) == bool(queued)


def test_a_run_from_nothing_to_its_end(ready):
  ready.plan(FOREVER, 'exit 75')
  assert ready('status').splitlines() == ['x: READY', 'w-0: nothing started', 'w-1: nothing started']
  assert 'nothing was started' in ready('logs', code=2)
  ready('run', '--', '--config=c')
  ready.wait('w-0: running', 'w-1: running')
  assert 'a run is going on' in ready('run', '--', '--config=c', code=2)
  assert 'a run is going on' in ready('setup', code=2)      # its files may still be read
  ready('stop')
  assert ready.wait('w-0: exit code 143', 'w-1: exit code 143')
  ready('run', '--', '--config=c')
  ready.wait('w-0: exit code 75', 'w-1: exit code 75')
  assert ready.starts() == [FOREVER, 'exit 75']
  assert 'w-1' in ready('logs', '--worker=1') and 'stub: exit 75' in ready('logs', '--lines=1')
  assert (ready.home(1) / 'arguments').read_bytes() == b'tpu,gcs\0--config=c\0--distributed\0'


def test_all_workers_of_all_slices(cloud):
  cloud('create', '--slices=2')
  assert 'not set up' in cloud('run', '--slices=2', '--', 'a', code=2)
  cloud('setup', '--slices=2')
  cloud('run', '--slices=2', '--', 'a')
  for worker in range(4):
    cloud.wait(f'w-{worker}: exit code 0')
  assert 'w-3' in cloud('logs', '--slices=2', '--node=1', '--worker=1')


def test_setup_copies_what_is_tracked_and_keeps_what_is_not_its_own(ready, stub):
  (ready.home(0) / 'lab/runs').mkdir()
  (ready.home(0) / 'lab/runs/checkpoint').write_text('precious')
  (stub / 'old').write_text('1')
  commit(stub)
  (stub / 'old').write_text('edited')
  (stub / 'untracked').write_text('1')
  ready('setup')
  assert (ready.home(1) / 'lab/old').read_text() == 'edited'
  assert not (ready.home(1) / 'lab/untracked').exists()
  assert (ready.home(1) / 'environment').read_text() == 'tpu,gcs\n'
  (stub / 'old').unlink()
  ready('setup', '--prepare=echo "$(hostname) is prepared" > ~/prepared')
  assert not (ready.home(0) / 'lab/old').exists()
  assert (ready.home(0) / 'lab/runs/checkpoint').read_text() == 'precious'
  assert (ready.home(1) / 'prepared').read_text() == 'w-1 is prepared\n'
  assert 'not a git checkout' in ready('setup', f'--repo={stub.parent / "cloud"}', code=2)
  ready('setup', '--prepare=false', code=1)
  assert 'not set up' in ready('status')      # half of it is none


def test_a_broken_connection_is_no_state_of_the_run(ready):
  (ready.folder / 'broken').write_text('ssh\n')
  assert 'no more capacity' in ready('status', code=1)
  assert 'no more capacity' in ready('run', '--', 'a', code=1)


HOSTILE = ['--workdir=x; touch canary', "it's $(touch canary) `touch canary`", 'two  spaces', 'a\nb; touch canary\n',
           '', '"', '\\', '&', '*', '--config.note=$HOME']


def test_hostile_words_arrive_as_they_were(cloud, tmp_path):
  name, zone = 'x; touch canary', "a zone $(touch canary) 'of \"mine"
  cloud('create', '--zone', zone, name=name)
  flags = ['--zone', zone, '--dir=the lab $(touch canary)']
  cloud('setup', *flags, name=name)
  cloud('run', *flags, '--', *HOSTILE, name=name)
  while not (cloud.home(1, name) / 'arguments').exists():
    assert 'w-1: ' in cloud('status', *flags, name=name)
  given = (cloud.home(1, name) / 'arguments').read_bytes().decode().split('\0')
  assert given == ['tpu,gcs', *HOSTILE, '--distributed', '']
  cloud('delete', '--yes', '--zone', zone, name=name)
  assert all(f'--zone={zone}' in call for call in cloud.calls())
  assert not list(tmp_path.glob('**/canary')) and not os.path.exists('canary')


@pytest.mark.parametrize('command, verbs', [
    ('create', ['create']), ('setup', ['scp', 'ssh']), ('status', ['describe', 'ssh']), ('run', ['ssh', 'ssh']),
    ('logs', ['ssh']), ('stop', ['ssh']), ('delete', ['delete']),
    ('babysit', ['describe', 'create', 'scp', 'ssh', 'ssh', 'ssh'])])
def test_a_dry_run_prints_what_it_would_run(cloud, command, verbs):
  more = ['--', *HOSTILE] if command in ('run', 'babysit') else []
  out = cloud(command, '--dry_run', '--queued', '--zone=a b', *more, name='x; touch canary')
  assert not cloud.calls() and not list(cloud.folder.glob('**/canary'))
  # a shell takes each line apart to the words that gcloud would be given
  read = subprocess.run(['bash', '-c', 'gcloud() { printf "%s\\0" "$@"; printf "\\1"; }\n' + out.replace(
      'x; touch canary: \n', '')], capture_output=True, text=True, check=True)
  calls = [call.split('\0')[:-1] for call in read.stdout.split('\1')[:-1]]
  assert [call[3] for call in calls] == verbs
  assert all(call[:3] == ['compute', 'tpus', 'queued-resources'] and '--zone=a b' in call for call in calls)


def test_the_commands_of_the_documentation_can_be_given(cloud):
  with open(os.path.join(ROOT, 'docs/tpu_vm.md'), encoding='utf-8') as f:
    blocks = '\n'.join(line[4:] for line in f if line.startswith('    ')).replace('\n\n', '\n').replace('\\\n', '')
  lines = [re.sub(r'^(launch/tpu_vm.sh \w+)', r'\1 --dry_run', line) for line in blocks.splitlines()
           if line.startswith(('launch/tpu_vm.sh ', 'export ', 'mount='))]
  script = '\n'.join(['set -euo pipefail', *lines])
  done = subprocess.run(['bash', '-c', script], cwd=ROOT, env=cloud.environment, capture_output=True, text=True,
                        check=True)
  assert not cloud.calls() and len(lines) >= 11
  assert {line.split()[4] for line in done.stdout.splitlines() if line.startswith('gcloud')} == {
      'create', 'describe', 'delete', 'scp', 'ssh'}


def test_babysit_does_everything_and_starts_again_after_75(cloud):
  cloud.plan('exit 75', ('exit 0', 'exit 75'), 'exit 0')
  out = cloud('babysit', '--queued', '--', '--config=c')
  assert cloud.starts() == ['exit 75', 'exit 0', 'exit 0']
  assert [w in out for w in ('WAITING_FOR_RESOURCES; waiting', 'setting up', 'exit code 75', 'done')] == [True] * 4
  assert cloud.verbs().count('create') == cloud.verbs().count('scp') == 1
  assert all(re.match(r'\d{4}-\d\d-\d\dT', line) or 'ready' in line for line in out.splitlines())


def test_babysit_makes_a_preempted_tpu_anew(cloud):
  cloud.plan(('echo PREEMPTED > $FAKE_GCLOUD/x.states; ' + FOREVER, FOREVER), 'exit 0')
  out = cloud('babysit', '--', '--config=c')
  verbs = [v for v in cloud.verbs() if v in ('create', 'delete', 'scp')]
  assert verbs == ['create', 'scp', 'delete', 'create', 'scp']
  assert 'x: PREEMPTED; making it anew' in out and cloud.starts() == ['exit 0']


@pytest.mark.parametrize('other, code', [
    *[('kill -ABRT $$', c) for c in (1, 2, 3, 4, 5, 6)], ('exit 1', 3), ('exit 7', 2), ('exit 75', 5)])
def test_babysit_ends_with_a_code_that_starting_again_does_not_mend(ready, other, code):
  # the other worker only lost this one
  ready.plan((other, f'echo "error: this is why"; exit {code}'))
  out = ready('babysit', '--', '--config=c', code=code)
  assert f'ended with exit code {code}' in out and 'w-1: error: this is why' in out and 'w-0: stub' not in out
  assert ready.starts() == [other]


def test_babysit_ends_workers_that_wait_for_one_that_has_ended(ready):
  ready.plan((FOREVER, 'exit 75'), 'exit 0')
  out = ready('babysit', '--', '--config=c')
  assert 'ending the workers that are left' in out and ready.starts() == [FOREVER, 'exit 0']


@pytest.mark.parametrize('ending, code', [('exit 7', 7), ('kill -KILL $PPID', 7), ('exit 75', 75)])
def test_babysit_gives_up_after_too_many_restarts_in_a_row(ready, ending, code):
  ready.plan(*[ending] * 9)
  out = ready('babysit', '--retries=2', '--', '--config=c', code=code)
  assert '2 restarts in a row did not help: giving up' in out
  assert ready.starts() == [ending] * 3


def test_babysit_forgets_restarts_once_a_run_goes_steadily(ready):
  until = 'until [ -e $FAKE_GCLOUD/$n ]; do sleep 0.01; done; exit 75'
  ready.plan(*[f'n={n}; {until}' for n in range(3)])
  process = subprocess.Popen([LAUNCHER, 'babysit', '--name=x', '--type=v5litepod-16', f'--repo={ready.repo}',
                              '--poll=0', '--backoff=0', '--retries=1', '--steady=0', '--', 'a'],
                             env=ready.environment, text=True, stdout=subprocess.PIPE)
  out = []
  for line in process.stdout:
    out.append(line)
    if line.endswith('running\n'):
      (ready.folder / str(sum('running' in o for o in out) - 1)).touch()
  assert process.wait() == 0, out
  process.stdout.close()
  assert sum('exit code 75' in line for line in out) == 3


def test_babysit_gives_up_where_no_tpu_can_be_had(cloud):
  (cloud.folder / 'broken').write_text('create\n')
  out = cloud('babysit', '--retries=3', '--', 'a', code=1)
  assert cloud.verbs().count('create') == 3 and 'no more capacity' in out
  assert 'unusable' not in out
  (cloud.folder / 'broken').write_text('describe\n')
  assert 'gcloud does not tell' in cloud('babysit', '--retries=1', '--', 'a', code=1)


def test_babysit_watches_a_run_of_its_own_command_and_no_other(ready):
  ready.plan(FOREVER)
  ready('run', '--', 'this')
  assert 'running another command' in ready('babysit', '--', 'other', code=2)
  (ready.folder / 'x.states').write_text('STOPPED\n')
  assert 'someone has to look' in ready('babysit', '--', 'this', code=1)
  (ready.folder / 'x.states').write_text('READY\n')
  ready('stop')
  ready.wait('w-0: exit code 143', 'w-1: exit code 143')
  assert 'done' in ready('babysit', '--', 'other')      # what ended before was another command's
  assert ready.starts() == [FOREVER, 'exit 0']


def project(folder):
  """A checkout of this project, without the samples."""
  for name in ('lab', 'data_pipelines', 'configs', 'launch'):
    shutil.copytree(os.path.join(ROOT, name), folder / name, ignore=shutil.ignore_patterns('samples', '__pycache__'))
  (folder / 'tests').mkdir()
  for name in ('pyproject.toml', 'constraints.txt', 'tests/__init__.py', 'tests/toy.py'):
    shutil.copy(os.path.join(ROOT, name), folder / name)
  commit(folder)


@pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='two minutes: LAB_LONG=1')
def test_two_hosts_train_stop_and_end(tmp_path, toy_data, cloud):
  project(tmp_path / 'project')
  cloud.repo = tmp_path / 'project'
  cloud.environment['TOY_DATA'] = toy_data
  pins = b''.join((tmp_path / 'project' / f).read_bytes() for f in ('pyproject.toml', 'constraints.txt'))
  (cloud.folder / 'stamp').write_text(hashlib.sha256(pins).hexdigest())      # the workers have an environment
  workdir = tmp_path / 'shared'
  arguments = ['--', '--config=tests/toy.py', f'--workdir={workdir}', '--config.total_steps=60']
  cloud('create', '--queued')
  cloud('setup', '--queued')
  cloud('run', '--queued', *arguments)
  log = cloud.home(0) / 'lab.run/log'
  while '\nstep 2/' not in log.read_text():
    assert not list(cloud.folder.glob('x/*/lab.run/code')), log.read_text()      # nobody has ended
    time.sleep(0.01)
  os.killpg(int((cloud.home(1) / 'lab.run/pid').read_text()), signal.SIGTERM)      # the platform takes one host
  cloud.wait('w-0: exit code 75', 'w-1: exit code 75')
  stopped = Checkpoints(str(workdir)).steps()[-1]
  assert 2 <= stopped < 60
  out = cloud('babysit', '--queued', '--grace=300', *arguments)
  assert 'done' in out
  assert cloud('status', '--queued').splitlines() == ['x: ACTIVE', 'w-0: exit code 0', 'w-1: exit code 0']
  log = cloud('logs', '--queued')
  assert f'resumed at step {stopped}' in log and 'Done: 60 steps' in log and '2 process(es)' in log
  assert '\nstep ' not in cloud('logs', '--queued', '--worker=1')      # one process talks
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  assert [r['step'] for r in rows if r['split'] == 'train'] == list(range(1, 61))
  assert Checkpoints(str(workdir)).steps()[-1] == 60
