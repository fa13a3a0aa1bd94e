"""Sweeps: wrong files, states, tables, and workers that stop, die, share and go on."""

import csv
import fcntl
import glob
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lab import points, sweep as sweeps
from tests.conftest import ROOT
from tests.test_points import TOY, write

RATES = '[values]\noptim.learning_rate = [0.1, 0.2]\n'


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, toy_data):
  """A worker in this process, as a console would start it; its signal handlers go again."""
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv('TOY_DATA', toy_data)
  monkeypatch.setenv('XLA_FLAGS', '--xla_force_host_platform_device_count=1')
  before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
  yield
  for number, handler in before.items():
    signal.signal(number, handler)


def read(folder, file):
  with open(os.path.join(folder, file), encoding='utf-8') as f:
    return f.read()


# the file


@pytest.mark.parametrize('content, said', [
    ('metrc = "AP"\n', "unknown key 'metrc'; did you mean metric?"),
    ('config = "tests/toy.py"\n' + RATES, 'metric is missing'),
    ('metric = "error"\n' + RATES, 'config is missing'),
    (TOY, 'values is missing'),
    (TOY + '[values]\n', 'values is missing or empty'),
    (TOY + 'seeds = []\n' + RATES, 'seeds is missing or empty'),
    (TOY + 'seeds = 3\n' + RATES, 'seeds = 3: expected a list'),
    (TOY + 'seeds = [0, 1.5]\n' + RATES, 'seeds = [0, 1.5]: expected whole numbers'),
    (TOY + 'seeds = [1, 1]\n' + RATES, 'are the same configuration'),
    (TOY + 'kind = "gird"\n' + RATES, "kind = 'gird': expected"),
    (TOY + 'samples = 3\n' + RATES, 'samples is only for kind = "random"'),
    (TOY + 'kind = "random"\n' + RATES, 'needs at least one sample'),
    (TOY + 'kind = "random"\nsamples = true\n' + RATES, 'samples = True: expected a whole number'),
    (TOY + 'kind = "random"\nsamples = 3\n' + RATES, 'only 2 different points'),
    (TOY + '[values]\nseed = [1]\n', 'values.seed: the seed is set by seeds'),
    (TOY + '[fixed]\nseed = 1\n' + RATES, 'fixed.seed'),
    (TOY + '[fixed.optim]\nlearning_rate = 1.0\n' + RATES, 'fixed.optim.learning_rate'),
    (TOY + RATES + '[values.optim.learning_rate]\n', 'not TOML'),
    (TOY + '[values]\n"optim.clip" = [1]\noptim.clip = [2]\n', 'values.optim.clip is there twice'),
    (TOY + '[values]\noptim.clip = []\n', 'values.optim.clip = []: expected at least one'),
    (TOY + '[values]\noptim.clip = 1\n', 'values.optim.clip = 1: expected a list'),
    (TOY + '[values]\noptim.clip = [1979-05-27]\n', 'values.optim.clip'),
    (TOY + '[values]\noptim.clip = {low = 1, high = 2}\n', 'optim.clip: a range is only for kind = "random"'),
    (TOY + 'kind = "random"\nsamples = 1\n[values]\noptim.clip = {low = 2, high = 2}\n', 'low = 2, high = 2'),
    (TOY + 'kind = "random"\nsamples = 1\n[values]\noptim.clip = {low = 0, high = 2, scale = "log"}\n', 'low > 0'),
    (TOY + 'kind = "random"\nsamples = 1\n[values]\noptim.clip = {low = 0, hihg = 2}\n', 'did you mean high?'),
    (TOY + 'kind = "random"\nsamples = 1\n[values]\noptim.clip = {low = 1, high = inf}\n', 'expected two numbers'),
    ('config = "tests/tyo.py"\nmetric = "error"\n' + RATES, 'did you mean tests/toy.py?'),
    (TOY + '[values]\noptim.learning_rte = [1]\n', 'did you mean --config.optim.learning_rate?'),
    (TOY + '[values]\noptim.warmup_steps = [1, 2.5]\n', 'optim.warmup_steps=2.5: expected int'),
    (TOY + '[values]\nlog_steps = [20, 0]\n', 'log_steps=0,seed=0: config.log_steps = 0: expected at least 1'),
    (TOY + '[fixed]\nlog_step = 3\n' + RATES, 'did you mean --config.log_steps?'),
    (TOY + '[values]\noptim.clip = [1, 1.0]\n', 'are the same configuration'),
    (TOY + 'seeds = [0\n', 'not TOML'),
])
def test_a_wrong_file_is_one_line_and_code_2(tmp_path, capsys, monkeypatch, content, said):
  monkeypatch.setattr(subprocess, 'Popen', lambda *a, **k: pytest.fail('a run was started'))
  code = sweeps.main(['sweep', write(tmp_path, content), f'--workdir={tmp_path}/sweep'])
  err = capsys.readouterr().err
  assert code == 2 and said in err and err.startswith('error: ') and err.count('\n') == 1
  assert not os.path.exists(tmp_path / 'sweep')


def test_a_file_that_is_not_there(tmp_path, capsys):
  write(tmp_path, TOY + RATES)
  assert sweeps.main(['sweep', f'{tmp_path}/sweeep.toml']) == 2
  assert 'no such file; did you mean sweep.toml?' in capsys.readouterr().err
  assert sweeps.main(['sweep', f'{tmp_path}/sweep.toml']) == 2
  assert 'workdir is missing' in capsys.readouterr().err


def test_the_example_can_run():
  sweep = points.read('configs/pose_sweep.toml')
  sweeps.check(sweep)
  assert len(sweep.points) > 1 and len(sweep.seeds) > 1 and sweep.workdir.startswith('runs/')


# the worker, with a process that pretends to train


PRETEND = r'''
import json, os, signal, sys
folder, score, code = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
with open(os.path.join(folder, 'metrics.jsonl'), 'w') as f:
  for step, split, error in (10, 'eval', 99), (20, 'eval', score), (20, 'eval_raw', 77), (20, 'train', 55):
    f.write(json.dumps({'step': step, 'split': split, 'error': error, 'examples': 13}) + '\n')
print('started', flush=True)
if code == 1000:        # asks the worker to stop, which must ask this process
  signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
  os.kill(os.getppid(), signal.SIGTERM)
  while True:
    signal.pause()
if code < 0:
  os.kill(os.getpid(), -code)
if code:
  print('error: as wished\nafterwards')
sys.exit(code)
'''


@pytest.fixture
def pretend(monkeypatch, tmp_path):
  """pretend({(value, seed): (score, code)}, file, flags...) -> exit code; the sweep lies in tmp_path/sweep."""
  def run(ends, content, *flags):
    def command(sweep, run):
      score, code = ends[next(iter(run.values.values())), run.seed]
      return ['python', '-I', '-S', '-c', PRETEND, run.folder, json.dumps(score), str(code)]
    with monkeypatch.context() as m:
      m.setattr(sweeps, 'command', command)
      return sweeps.main(['sweep', write(tmp_path, content), f'--workdir={tmp_path}/sweep', *flags])
  return run


def starts(folder):
  """Run -> how often it was started."""
  return {os.path.basename(os.path.dirname(p)): read(os.path.dirname(p), 'output.txt').count('started')
          for p in glob.glob(os.path.join(glob.escape(str(folder)), '*', 'output.txt'))}


GRID = TOY + 'seeds = [0, 1, 2]\n[values]\noptim.learning_rate = [0.1, 0.2, 0.3, 0.4]\n'
ENDS = {(0.1, 0): (1, 0), (0.1, 1): (5, 0), (0.1, 2): (2, 0), (0.2, 0): (4, 0), (0.2, 1): (3, 0), (0.2, 2): (0, 3),
        (0.3, 0): (0, 5), (0.3, 1): (0, -9), (0.3, 2): (0, 2), (0.4, 0): (9, 0), (0.4, 1): (None, 0), (0.4, 2): (9, 0)}
# 0.1: 1, 2, 5; 0.2: 3, 4 and a failure; 0.3: failures; 0.4: 9, 9 and one that is not finite
CSV = '''optim.learning_rate,runs,failed,error_median,error_min,error_max,examples_median,examples_min,examples_max
0.1,3,0,2,1,5,13,13,13
0.2,2,1,3.5,3,4,13.0,13,13
0.3,0,3,,,,,,
0.4,3,0,,,,13,13,13
'''
ROWS = {'0.1': '| 0.1 | 2 | 1 to 5 | 3 |', '0.2': '| 0.2 | 3.5 | 3 to 4 | 2 |', '0.3': '| 0.3 |  |  | 0 |',
        '0.4': '| 0.4 |  |  | 3 |'}


def test_the_table_and_what_failed(pretend, tmp_path, capsys):
  assert pretend(ENDS, GRID) == 3                # of the first that failed; the others ran nevertheless
  out, err = capsys.readouterr()
  folder = tmp_path / 'sweep'
  assert read(folder, 'table.csv') == CSV
  page = read(folder, 'table.md')
  assert page in out and page.splitlines()[2:8] == [
      '| optim.learning_rate | error | min to max | seeds |', '|---|---|---|---|', *(ROWS[k] for k in ('0.2', '0.1',
                                                                                                 '0.4', '0.3'))]
  for part in ('optim.learning_rate swept', '4 points, each with seeds 0, 1, 2', '8 of 12 runs done', 'greatest median',
               '- optim.learning_rate=0.2,seed=2: exit code 3', '- optim.learning_rate=0.3,seed=1: exit code 137'):
    assert part in page
  assert 'Best: optim.learning_rate=0.2\n' in out
  assert '12/12  optim.learning_rate=0.4,seed=2  done  error 9  elapsed' in err and err.count('ETA') == 12
  assert '6/12  optim.learning_rate=0.2,seed=2  failed  exit code 3: error: as wished  elapsed' in err
  assert set(starts(folder).values()) == {1}
  # again, and less is better: nothing runs
  assert pretend(ENDS, GRID.replace('"error"', '"-error"')) == 3
  assert read(folder, 'table.md').splitlines()[4:8] == [ROWS[k] for k in ('0.1', '0.2', '0.4', '0.3')]
  assert 'Best: optim.learning_rate=0.1\n' in capsys.readouterr().out and set(starts(folder).values()) == {1}
  # again, and only what failed runs
  good = {**ENDS, (0.2, 2): (8, 0), (0.3, 0): (6, 0), (0.3, 1): (6, 0), (0.3, 2): (6, 0)}
  assert pretend(good, GRID, '--retry') == 0
  assert {n for n, k in starts(folder).items() if k == 2} == {
      'optim.learning_rate=0.2,seed=2', *(f'optim.learning_rate=0.3,seed={s}' for s in range(3))}
  assert '0.2,3,0,4,3,8,13,13,13' in read(folder, 'table.csv') and 'Failed' not in read(folder, 'table.md')


def test_the_best_command_is_that_of_lab_main(tmp_path):
  sweep = points.read(write(tmp_path, TOY + 'workdir = "w"\n[fixed]\ntotal_steps = 3\n' + RATES))
  assert sweeps.command(sweep, sweep.runs()[1]) == [
      'python', '-m', 'lab.main', '--config=tests/toy.py', '--workdir=w/optim.learning_rate=0.2,seed=0',
      '--config.total_steps=3', '--config.optim.learning_rate=0.2', '--config.seed=0']


def test_a_metric_that_is_not_measured(pretend, tmp_path, capsys):
  ends = {(0.1, 0): (1, 0), (0.2, 0): (2, 0)}
  assert pretend(ends, TOY.replace('"error"', '"eror"') + RATES) == 2
  assert "metric = 'eror': evaluation gives error, examples; did you mean error?" in capsys.readouterr().err
  assert pretend(ends, TOY + RATES) == 0         # corrected, it goes on
  assert starts(tmp_path / 'sweep') == {'optim.learning_rate=0.1,seed=0': 1, 'optim.learning_rate=0.2,seed=0': 1}


def test_a_worker_asked_to_stop_asks_its_process(pretend, tmp_path, capsys):
  before = signal.getsignal(signal.SIGINT)
  assert pretend({(0.1, 0): (1, 0), (0.2, 0): (2, 1000)}, TOY + RATES) == 75
  assert 'start the same command again' in capsys.readouterr().err
  assert [sweeps.state(r) for r in points.read(f'{tmp_path}/sweep.toml', f'{tmp_path}/sweep').runs()] == [
      'done', 'pending']
  assert signal.getsignal(signal.SIGINT) is before
  assert pretend({(0.1, 0): (1, 0), (0.2, 0): (2, 75)}, TOY + RATES) == 75       # one that stops by itself
  assert pretend({(0.1, 0): (1, 0), (0.2, 0): (2, 0)}, TOY + RATES) == 0
  assert starts(tmp_path / 'sweep') == {'optim.learning_rate=0.1,seed=0': 1, 'optim.learning_rate=0.2,seed=0': 3}


def test_states_are_read_from_disk_and_status_changes_nothing(pretend, tmp_path, capsys):
  path = write(tmp_path, TOY + 'seeds = [0, 1]\n' + RATES)
  arguments = ['sweep', path, f'--workdir={tmp_path}/sweep', '--status']
  assert sweeps.main(arguments) == 0 and not os.path.exists(tmp_path / 'sweep')
  assert '0 done, 0 failed, 0 running, 4 pending of 4 runs' in capsys.readouterr().out
  ends = {(0.1, 0): (1, 0), (0.1, 1): (1, 4), (0.2, 0): (1, 75)}
  assert pretend(ends, TOY + 'seeds = [0, 1]\n' + RATES) == 75
  held = sweeps._claim(points.read(path, f'{tmp_path}/sweep').runs()[3])
  before = {p: os.stat(p).st_mtime_ns for p in glob.glob(f'{tmp_path}/**', recursive=True, include_hidden=True)}
  capsys.readouterr()
  assert sweeps.main(arguments) == 0
  assert capsys.readouterr().out.splitlines() == [
      f'1 done, 1 failed, 1 running, 1 pending of 4 runs in {tmp_path}/sweep',
      'optim.learning_rate=0.1,seed=0  done  error 1',
      'optim.learning_rate=0.1,seed=1  failed  exit code 4: error: as wished',
      'optim.learning_rate=0.2,seed=0  pending',
      'optim.learning_rate=0.2,seed=1  running']
  held.close()
  assert before == {p: os.stat(p).st_mtime_ns for p in glob.glob(f'{tmp_path}/**', recursive=True, include_hidden=True)}


def test_runs_of_another_sweep(pretend, tmp_path, capsys):
  ends = {(v, 0): (v, 0) for v in (0.1, 0.2, 0.3)}
  assert pretend(ends, TOY + RATES) == 0
  # other values: what is there and fits counts, what is not in the sweep any more is left alone
  assert pretend(ends, TOY + '[values]\noptim.learning_rate = [0.2, 0.3]\n') == 0
  assert 'not in the sweep any more: optim.learning_rate=0.1,seed=0\n' in capsys.readouterr().err
  assert '0.1' not in read(tmp_path / 'sweep', 'table.csv')
  assert set(starts(tmp_path / 'sweep').values()) == {1} and len(starts(tmp_path / 'sweep')) == 3
  # other settings: refused
  before = read(tmp_path / 'sweep', 'table.md')
  assert pretend(ends, TOY + '[fixed]\ntotal_steps = 3\n' + RATES) == 2
  assert "was started with fixed = {}, not {'total_steps': 3}: choose another workdir" in capsys.readouterr().err
  assert pretend(ends, TOY.replace('tests/toy.py', './tests/toy.py') + RATES) == 2
  assert 'was started with config' in capsys.readouterr().err
  assert before == read(tmp_path / 'sweep', 'table.md') and set(starts(tmp_path / 'sweep').values()) == {1}


# the worker, with processes that train


@pytest.fixture
def worker():
  """Starts the program in a process of its own: worker(path, flags...) -> Popen with merged output."""
  started = []

  def start(*arguments):
    started.append(subprocess.Popen([sys.executable, '-m', 'lab.sweep', *map(str, arguments)], stdout=subprocess.PIPE,
                                    stderr=subprocess.STDOUT, text=True))
    return started[-1]
  yield start
  for process in started:
    process.kill()
    process.wait()
    process.stdout.close()


def wait_for(process, ready):
  """Until ready() is true, while the process lives."""
  while not ready():
    assert process.poll() is None, process.communicate()[0]
    time.sleep(0.05)


def said(run, what):
  """How often a run's output says something."""
  return read(run.folder, 'output.txt').count(what) if os.path.exists(os.path.join(run.folder, 'output.txt')) else 0


TRAINING = TOY.replace('"error"', '"-error"') + '''
[fixed]
total_steps = 3000
log_steps = 1000
eval_steps = 1500
checkpoint.steps = 1500
optim.max_nonfinite = 0
[values]
poison = [-1, 2, -2]
'''


@pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='six programs start: LAB_LONG=1')
@pytest.mark.timeout(900)
def test_workers_die_share_and_retry(worker, tmp_path, capfd):
  arguments = [write(tmp_path, TRAINING), f'--workdir={tmp_path}/sweep']
  runs = points.read(arguments[0], f'{tmp_path}/sweep').runs()
  first = worker(*arguments)
  wait_for(first, lambda: said(runs[0], 'training from step 0'))
  assert [sweeps.state(r) for r in runs] == ['running', 'pending', 'pending']
  first.send_signal(signal.SIGKILL)
  first.wait()
  with open(os.path.join(runs[0].folder, '.worker'), encoding='ascii') as f:
    fcntl.flock(f, fcntl.LOCK_EX)           # the process that trained holds it until it has saved and ended
  assert said(runs[0], 'stopped at step ') == 1 and said(runs[0], 'Done: ') == 0
  assert [sweeps.state(r) for r in runs] == ['pending'] * 3
  # two workers at once
  other = worker(*arguments)
  wait_for(other, lambda: 'running' in map(sweeps.state, runs))
  assert sweeps.main(['sweep', *arguments]) == 4
  ours, theirs = capfd.readouterr().err, other.communicate(timeout=600)[0]
  assert other.returncode == 4, theirs
  assert ours.count('elapsed') >= 1 and theirs.count('elapsed') >= 1
  assert ours.count('elapsed') + theirs.count('elapsed') == 3
  assert [said(r, 'training from step') for r in runs] == [2, 1, 1] and said(runs[0], 'resumed at step ') == 1
  assert [said(r, 'Done: 3000 steps') for r in runs] == [1, 0, 1]
  assert [sweeps.state(r) for r in runs] == ['done', 'failed', 'done']
  # neither poison strikes, and a stop changes no bit: the same numbers
  assert len({json.dumps(sweeps._json(runs[i], 'result.json')['scores']) for i in (0, 2)}) == 1
  assert sweeps.main(['sweep', *arguments, '--retry']) == 4
  assert [said(r, 'training from step') for r in runs] == [2, 2, 1]


MANY = TOY.replace('"error"', '"-error"') + '''
seeds = [0, 1]
[values]
"optim.learning_rate" = [0.1, 0.3]
"optim.warmup_steps" = [2]
'''


@pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='two minutes: LAB_LONG=1')
@pytest.mark.timeout(900)
def test_a_sweep_killed_twice_gives_the_table_of_one_left_alone(worker, tmp_path):
  path = write(tmp_path, MANY)
  alone, killed = f'{tmp_path}/alone', f'{tmp_path}/killed'
  runs = points.read(path, killed).runs()
  other = worker(path, f'--workdir={alone}')                           # at the same time, in another folder
  one = worker(path, f'--workdir={killed}')
  wait_for(one, lambda: said(runs[0], 'training from step'))           # in the midst of a run
  one.send_signal(signal.SIGKILL)
  two = worker(path, f'--workdir={killed}')                            # at once: the run before may not have ended yet
  wait_for(two, lambda: len(glob.glob(f'{killed}/*/result.json')) == 2 and len(glob.glob(f'{killed}/*/run.json')) >= 3
           and any(sweeps.state(r) == 'running' for r in runs))        # as the third begins
  two.send_signal(signal.SIGKILL)
  assert one.wait() == two.wait() == -signal.SIGKILL
  assert sweeps.main(['sweep', path, f'--workdir={killed}']) == 0
  output = other.communicate()[0]
  assert other.returncode == 0, output
  for file in ('table.csv', 'table.md'):
    assert read(killed, file) == read(alone, file)
  rows = list(csv.DictReader(read(alone, 'table.csv').splitlines()))
  assert [r['runs'] for r in rows] == ['2'] * 2 and len({r['error_median'] for r in rows}) == 2
  assert all(float(r['error_min']) <= float(r['error_median']) <= float(r['error_max']) for r in rows)
  best = min(rows, key=lambda r: float(r['error_median']))
  assert read(alone, 'table.md').splitlines()[4].startswith(
      f'| {best["optim.learning_rate"]} | {best["optim.warmup_steps"]} | {float(best["error_median"]):.4g} |')
