"""Several real processes on one machine: one run, one log, one decision to stop."""

import json
import signal
import socket

import numpy as np

from lab.checkpoint import Checkpoints


def cluster(lab, count, workdir, *arguments):
  """Starts `count` processes of one run; they find each other on the loopback."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  return [lab(f'--workdir={workdir}', *arguments, JAX_COORDINATOR_ADDRESS=f'127.0.0.1:{port}',
              JAX_NUM_PROCESSES=str(count), JAX_PROCESS_ID=str(i)) for i in range(count)]


def finish(processes):
  outputs = [p.communicate(timeout=600)[0] for p in processes]
  return [p.returncode for p in processes], outputs


def rows(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


def test_two_processes_equal_one_and_stop_together(lab, tmp_path):
  steps = '--config.total_steps=60'        # the processes agree on a step some way ahead
  one = lab(f'--workdir={tmp_path}/one', steps, devices=2)
  codes, outputs = finish([one])
  assert codes == [0], outputs

  processes = cluster(lab, 2, tmp_path / 'two', steps)
  for line in processes[0].stdout:
    if line.startswith('step 2/'):
      break
  processes[1].send_signal(signal.SIGTERM)                 # the platform takes one host: both must agree on a step
  codes, outputs = finish(processes)
  assert codes == [75, 75], outputs
  stopped = Checkpoints(str(tmp_path / 'two')).steps()[-1]
  assert 2 <= stopped < 60

  codes, outputs = finish(cluster(lab, 2, tmp_path / 'two', steps))
  assert codes == [0, 0], outputs
  assert f'resumed at step {stopped}' in outputs[0]
  assert not any(line.startswith('step ') for line in outputs[1].splitlines())       # one process talks
  ours, theirs = rows(tmp_path / 'two'), rows(tmp_path / 'one')
  assert [(r['step'], r['split']) for r in ours] == [(r['step'], r['split']) for r in theirs]
  for a, b in zip(ours, theirs):
    np.testing.assert_allclose([v for v in a.values() if isinstance(v, float)],
                               [v for v in b.values() if isinstance(v, float)], rtol=1e-5, atol=1e-7)
