"""Several real processes on one machine: one run, one log, one decision to stop, one end."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from lab.checkpoint import Checkpoints
from tests.conftest import ROOT

FOREVER = ('--config.total_steps=1000000', '--config.eval_steps=0', '--config.checkpoint.steps=50')


def free_port():
  """A port that nobody listens on."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def cluster(lab, count, workdir, *arguments):
  """Starts `count` processes of one run; they find each other on the loopback."""
  port = free_port()
  return [lab(f'--workdir={workdir}', *arguments, JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}',
              JAX_NUM_PROCESSES=str(count), JAX_PROCESS_ID=str(i)) for i in range(count)]


@pytest.fixture
def local_cluster(toy_data):
  """launch/local_cluster.sh: (processes, devices of each, arguments of the lab...) -> Popen with merged output."""
  started = []      # each the first of a group of processes, which all go at the end

  def start(count, devices, *arguments, command=(sys.executable, '-m', 'lab.main')):
    process = subprocess.Popen(
        ['launch/local_cluster.sh', str(count), f'--devices={devices}', '--', *command, *arguments], cwd=ROOT,
        env={**os.environ, 'TOY_DATA': toy_data, 'XLA_FLAGS': '', 'PYTHONUNBUFFERED': '1'}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    started.append(process)
    return process

  yield start
  for process in started:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def finish(processes):
  outputs = [p.communicate(timeout=600)[0] for p in processes]
  return [p.returncode for p in processes], outputs


def until(process, words):
  """Reads the output of a process up to a line with these words."""
  seen = []
  for line in process.stdout:
    seen.append(line)
    if words in line:
      return
  raise AssertionError(f'{words!r} never came:\n{"".join(seen)}')


def rows(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def alike(ours, theirs):
  assert [(r['step'], r['split']) for r in ours] == [(r['step'], r['split']) for r in theirs]
  for a, b in zip(ours, theirs):
    np.testing.assert_allclose([v for v in a.values() if isinstance(v, float)],
                               [v for v in b.values() if isinstance(v, float)], rtol=1e-5, atol=1e-7)


# four processes, and all systems, take minutes: LAB_LONG=1
LONG = bool(os.environ.get('LAB_LONG'))
SYSTEMS = ('pose', 'video', 'gpt', 'dvae', 'agent') if LONG else ()
EQUAL = ('--config.total_steps=20', '--config.input.batch_size=8', '--config.input.eval_batch_size=8',
         '--config.log_steps=1', '--config.eval_steps=0')


@pytest.mark.parametrize('config, arguments', [
    ('tests/toy.py', ('--config.mesh.fsdp=2', '--config.mesh.tensor=2')),
    *((f'configs/{name}.py:smoke', EQUAL) for name in SYSTEMS)])
def test_eight_devices_of_one_two_or_four_processes(local_cluster, tmp_path, config, arguments):
  counts = (1, 2, 4) if LONG else (1, 2)
  for count in counts:
    process = local_cluster(count, 8 // count, f'--config={config}', f'--workdir={tmp_path}/{count}', *arguments)
    codes, (output,) = finish([process])
    assert codes == [0], output
    assert f'8 x cpu, {count} process(es)' in output
    assert not any(line.startswith('[1] step ') for line in output.splitlines())       # one process talks
  for count in counts[1:]:
    alike(rows(tmp_path / str(count)), rows(tmp_path / '1'))


def test_processes_stop_together_and_go_on_as_one(lab, tmp_path):
  steps = '--config.total_steps=60'        # the processes agree on a step some way ahead
  one = lab(f'--workdir={tmp_path}/one', steps, devices=2)
  codes, outputs = finish([one])
  assert codes == [0], outputs

  processes = cluster(lab, 2, tmp_path / 'two', steps)
  until(processes[0], 'step 2/')
  processes[1].send_signal(signal.SIGTERM)                 # the platform takes one host: both must agree on a step
  codes, outputs = finish(processes)
  assert codes == [75, 75], outputs
  stopped = Checkpoints(str(tmp_path / 'two')).steps()[-1]
  assert 2 <= stopped < 60

  codes, outputs = finish([lab(f'--workdir={tmp_path}/two', steps, devices=2)])      # two processes' checkpoint
  assert codes == [0], outputs
  assert f'resumed at step {stopped}' in outputs[0]
  alike(rows(tmp_path / 'two'), rows(tmp_path / 'one'))


def test_processes_leave_an_evaluation_together_and_save(lab, tmp_path):
  longer = ('--config.eval_times=400', '--config.input.eval_batch_size=1')      # 2,600 batches an evaluation
  processes = cluster(lab, 2, tmp_path, '--config.checkpoint.steps=0', *longer)
  until(processes[0], 'step 5/')                           # behind which both evaluate
  processes[1].send_signal(signal.SIGTERM)
  codes, outputs = finish(processes)
  assert codes == [75, 75] and 'stopped at step 5 and saved' in outputs[0], outputs
  assert 'evaluation at step 5' not in outputs[0]
  saved = Checkpoints(str(tmp_path)).meta(5)
  assert saved['notes']['evaluation_due'] and not saved['scores']


@pytest.mark.skipif(not LONG, reason='three processes start: LAB_LONG=1')
def test_no_process_restores_what_another_does_not_see(lab, tmp_path):
  toy = os.path.join(ROOT, 'tests/toy.py')
  codes, outputs = finish([lab(f'--workdir={tmp_path}/0/run', '--config.total_steps=10')])
  assert codes == [0], outputs
  shutil.copytree(tmp_path / '0', tmp_path / '1')                       # a shared disk that shows one an older list
  shutil.rmtree(tmp_path / '1' / 'run' / 'checkpoints' / '10')
  port = free_port()
  codes, outputs = finish([lab('--workdir=run', '--config.total_steps=12', config=toy, cwd=tmp_path / str(i),
                               JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}', JAX_NUM_PROCESSES='2',
                               JAX_PROCESS_ID=str(i), PYTHONPATH=ROOT) for i in range(2)])
  assert codes == [0, 0], outputs
  assert 'resumed at step 5' in outputs[0]
  assert 'checkpoints/10 is broken for process 1, trying the one before' in outputs[0]
  assert [r['step'] for r in rows(tmp_path / '0' / 'run') if r['split'] == 'train'] == [*range(1, 13)]


@pytest.mark.parametrize('lost', [1, 0] if LONG else [0])
def test_a_lost_process_ends_the_others_with_7(lab, tmp_path, lost):
  processes = cluster(lab, 2, tmp_path, *FOREVER)
  until(processes[0], 'step 110/')      # the save at step 100 waits for that at step 50, which is whole then
  processes[lost].send_signal(signal.SIGKILL)
  codes, outputs = finish(processes)
  assert codes[lost] == -signal.SIGKILL and codes[1 - lost] == 7, outputs
  assert 'lost' in outputs[1 - lost]
  step = Checkpoints(str(tmp_path)).steps()[-1]
  (again,) = [lab(f'--workdir={tmp_path}', *FOREVER)]          # what two began, one goes on with
  until(again, f'resumed at step {step}')


def test_a_process_that_stands_still_is_named(lab, tmp_path):
  processes = cluster(lab, 2, tmp_path, *FOREVER, '--config.processes.heartbeat_s=12')
  until(processes[0], 'step 60/')
  processes[1].send_signal(signal.SIGSTOP)
  until(processes[0], 'process 1 has been silent for')
  processes[1].send_signal(signal.SIGCONT)
  until(processes[0], 'process 1 is back after')
  processes[1].send_signal(signal.SIGSTOP)
  codes, outputs = finish(processes[:1])
  assert codes == [7], outputs
  assert re.search(r'error: process 1 has been silent for 1\d s; its last step was \d', outputs[0])
  assert 'lab/train.py:' in outputs[0]             # where this process waited for it


def test_processes_that_do_not_run_the_same_end_with_7(lab, tmp_path):
  address = f'127.0.0.1:{free_port()}'
  processes = [lab(f'--workdir={tmp_path}', f'--config.seed={i}', JAX_COORDINATOR_ADDRESS=address,
                   JAX_NUM_PROCESSES='2', JAX_PROCESS_ID=str(i)) for i in range(2)]
  codes, outputs = finish(processes)
  assert codes == [7, 7], outputs
  assert 'do not run the same program: config.seed is 1 on process 1, 0 on process 0' in outputs[0]
  assert not os.path.exists(tmp_path / 'checkpoints')


def test_who_does_not_come_is_named(lab, tmp_path):
  codes, outputs = finish([lab(f'--workdir={tmp_path}', '--config.processes.start_s=6', JAX_NUM_PROCESSES='4',
                               JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{free_port()}', JAX_PROCESS_ID='2')])
  assert codes == [7], outputs
  assert 'after 6 s 1 of 4 processes arrived; missing: 0, 1, 3' in outputs[0]


@pytest.mark.parametrize('argument, said', [
    ('--config.input.batch_size=7', 'config.input.batch_size = 7 is not a multiple'),
    ('--config.platform=gpu', "config.platform = 'gpu', but JAX sees only")])
def test_one_process_s_error_is_everyone_s(lab, tmp_path, argument, said):
  processes = cluster(lab, 2, tmp_path, argument)
  codes, outputs = finish(processes)
  assert sorted(codes) in ([2, 2], [2, 7]), outputs
  assert all(said in o for o in outputs)


def test_a_defect_on_one_process_ends_all_at_once(lab, tmp_path):
  address = f'127.0.0.1:{free_port()}'
  processes = [lab(f'--workdir={tmp_path}', JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES='2',
                   JAX_PROCESS_ID=str(i), TOY_DEFECT=str(i or '')) for i in range(2)]
  codes, outputs = finish(processes)
  assert codes == [7, 1], outputs
  assert "process 1 failed with code 1: TypeError('a defect')" in outputs[0] and 'Traceback' in outputs[1]


def test_sigterm_while_others_are_waited_for_ends_with_75(lab, tmp_path):
  process = lab(f'--workdir={tmp_path}', JAX_NUM_PROCESSES='2', JAX_PROCESS_ID='1',
                JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{free_port()}')
  while not (tmp_path / '.processes' / '1').exists() and process.poll() is None:
    time.sleep(.1)
  process.send_signal(signal.SIGTERM)
  codes, outputs = finish([process])
  assert codes == [75], outputs


@pytest.mark.parametrize('arguments, said', [
    ([], 'the number of processes is missing'), (['x', '--', 'true'], 'the number of processes is x'),
    (['2', 'true'], '-- is missing'), (['2', '--devices=2', '--'], 'no command')])
def test_a_wrong_call_of_the_cluster_is_one_line(arguments, said):
  done = subprocess.run(['launch/local_cluster.sh', *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize('version, code', [('5 0', 2), ('3 2', 2), ('4 4', 2), ('5 1', 0), ('6 0', 0)])
def test_the_cluster_needs_a_bash_that_tells_which_process_ended(tmp_path, version, code):
  with open(os.path.join(ROOT, 'launch/local_cluster.sh'), encoding='utf-8') as f:
    script = f.read().replace('BASH_VERSINFO', 'VERSION')      # bash's own can't be set
  (tmp_path / 'cluster.sh').write_text(f'VERSION=({version})\n{script}')
  done = subprocess.run(['bash', tmp_path / 'cluster.sh', '1', '--', 'true'], capture_output=True, text=True,
                        check=False)
  assert done.returncode == code and ('needs bash 5.1 or newer' in done.stderr) == (code == 2)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_cluster_is_one_to_all(local_cluster, number):
  process = local_cluster(2, 1, command=('bash', '-c', 'trap "exit 75" TERM; echo ready; while :; do sleep .05; done'))
  for _ in range(2):
    until(process, 'ready')
  process.send_signal(number)
  codes, outputs = finish([process])
  assert codes == [75], outputs


@pytest.mark.parametrize('program, code', [
    ('exit 0', 0), ('exit $((JAX_PROCESS_ID ? 7 : 3))', 3), ('exit 75', 75), ('[ $JAX_PROCESS_ID = 0 ] || exit 7', 7)])
def test_the_cluster_ends_with_the_code_that_says_most(local_cluster, program, code):
  words = 'echo "it\'s $JAX_PROCESS_ID of $JAX_NUM_PROCESSES"'
  process = local_cluster(2, 1, command=('bash', '-c', f'{words}; {program}'))
  codes, (output,) = finish([process])
  assert codes == [code]
  assert sorted(output.splitlines()) == ["[0] it's 0 of 2", "[1] it's 1 of 2"]
