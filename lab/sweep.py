"""python -m lab.sweep FILE.toml [--workdir=DIR] [--status] [--retry]: many settings of one recipe, and their table.

  config = "configs/pose.py:smoke"     # recipe[:variant], as for lab.main
  workdir = "runs/sweep"               # folder of the sweep; --workdir replaces it
  metric = "AP"                        # of the last evaluation; "-loss" where less is better
  kind = "grid"                        # all combinations; or "random", or "list"
  seeds = [0, 1]                       # every point is run with each
  samples = 10                         # random: points drawn ...
  draw_seed = 0                        # ... from this seed

  [fixed]                              # set in every run
  total_steps = 12

  [values]                             # lists, or for random {low=, high=, scale="log" or "linear"} as well
  "optim.learning_rate" = [1e-3, 3e-3]

  [[points]]                           # list, instead of values: one point each; they may set different keys
  variant = "coco"                     # of the recipe, where points differ in that
  "optim.name" = "lion"
  "optim.decay" = 0.1

Every run is a process of lab.main with a folder of its own, named after its values. All state is in these folders:
the same command typed again goes on, and several workers may share a sweep:
  run.json     what it was started with          result.json  the scores of the run that is done
  output.txt   what it said                      failed.json  how it failed; --retry tries again
  .worker      locked while a worker or its process lives
Exit codes: those of lab.main; that of the first failed run where some failed; 75 stopped: start it again.
"""

import argparse
import csv
import fcntl
import io
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time

from lab import links, logs
from lab.points import Run, Sweep, name, near, read, text
from lab.task import ConfigError

STOPPED = 75
POLL_S = 1.0             # between looks at the runs of other workers
# The process that trains must not outlive its worker, kill -9 included: it asks Linux for SIGTERM on that day, makes
# sure that the day has not been, and becomes lab.main. (A preexec_fn would fork this process, threads and all.)
FOLLOW = ('import ctypes, os, sys\n'
          'if sys.platform == "linux": ctypes.CDLL(None).prctl(1, 15)\n'
          'if os.getppid() != int(sys.argv[1]): sys.exit(75)\n'
          'os.execv(sys.argv[2], sys.argv[2:])')


def command(sweep: Sweep, run: Run) -> list[str]:
  """What trains a run, as it would be typed."""
  return ['python', '-m', 'lab.main', f'--config={sweep.recipe(run)}', f'--workdir={run.folder}',
          *_settings(sweep, run)]


def _settings(sweep, run):
  keys = {**sweep.fixed, **run.values, 'seed': run.seed}
  keys.pop('variant', None)      # of the recipe, no key of it
  return [f'--config.{k}={v if isinstance(v, str) else repr(v)}' for k, v in keys.items()]


def check(sweep: Sweep) -> None:
  """Builds the configuration of every run, touching no device. Raises ConfigError for the first that can't run."""
  from lab import config as configs, task, train
  configs.read(sweep.config)
  seen = {}
  for run in sweep.runs():
    try:
      config = configs.read(sweep.recipe(run))
      configs.override(config, _settings(sweep, run))
      train.check(config)
      task.load(config)
    except ConfigError as e:
      raise ConfigError(f'{run.name}: {e}') from None
    same = seen.setdefault(config.to_json(), run.name)
    if same is not run.name:
      raise ConfigError(f'{same} and {run.name} are the same configuration')
    have, want = _json(run, 'run.json'), _origin(sweep, run)
    for key in want if have else ():
      if have.get(key) != want[key]:
        raise ConfigError(f'{run.folder} was started with {key} = {have.get(key)!r}, not {want[key]!r}: choose another '
                          'workdir')


def _origin(sweep, run):
  return {'config': sweep.config, 'fixed': sweep.fixed, 'values': run.values, 'seed': run.seed}


# the state of a run is what its folder says


def state(run: Run) -> str:
  """done, running (a worker or its process holds the lock), failed or pending."""
  if _json(run, 'result.json'):
    return 'done'
  try:
    with open(os.path.join(run.folder, '.worker'), encoding='ascii') as f:
      fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except FileNotFoundError:
    pass
  except BlockingIOError:
    return 'running'
  return 'failed' if _json(run, 'failed.json') else 'pending'


def _json(run, file):
  try:
    with open(os.path.join(run.folder, file), encoding='utf-8') as f:
      return json.load(f)
  except FileNotFoundError:
    return {}
  except (ValueError, RecursionError) as e:
    raise ConfigError(f'{os.path.join(run.folder, file)} is broken ({e}): remove it, and the run is looked at anew'
                      ) from None


def _write(run, file, content):
  logs.write_atomically(os.path.join(run.folder, file), json.dumps(content, indent=2) + '\n')


def _ended(run):
  return bool(_json(run, 'result.json') or _json(run, 'failed.json'))


def _claim(run):
  """The run's lock as an open file, or None where another worker, or the process of one that died, holds it."""
  os.makedirs(run.folder, exist_ok=True)
  f = links.append(os.path.join(run.folder, '.worker'))
  try:
    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    f.close()
    return None
  return f


# running


class _Stop:
  """A signal handler: notes the wish to stop and passes it on to the process that trains."""

  def __init__(self):
    self.asked, self.child = False, None

  def __call__(self, *_):
    self.asked = True
    if self.child is not None:
      self.child.send_signal(signal.SIGTERM)


def work(sweep: Sweep, retry: bool = False) -> int:
  """Runs whatever has not ended; returns the exit code. The table is rewritten after each run."""
  runs, stop = sweep.runs(), _Stop()
  os.makedirs(sweep.workdir, exist_ok=True)
  for run in runs if retry else ():
    if _json(run, 'failed.json') and (lock := _claim(run)):
      with lock:
        os.remove(os.path.join(run.folder, 'failed.json'))
  old = [n for n in sorted(os.listdir(sweep.workdir)) if os.path.exists(os.path.join(sweep.workdir, n, 'run.json'))]
  if gone := sorted(set(old) - {r.name for r in runs}):
    _say(f'left alone, not in the sweep any more: {" ".join(gone)}')
  before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
  try:
    _publish(sweep)
    if not _run_all(sweep, runs, stop):
      _say('stopped; start the same command again to go on')
      return STOPPED
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
  print(table(sweep)[1])
  best, scores, _ = _ranked(sweep)[0]
  if scores:
    run = next(r for r in runs if r.values is best and _json(r, 'result.json'))
    print(f'Best: {name(best)}\n  {shlex.join(command(sweep, run))}')
  return next((f['code'] for r in runs if (f := _json(r, 'failed.json'))), 0)


def _run_all(sweep, runs, stop) -> bool:
  """True when every run has ended, False when asked to stop before."""
  began, before, told = time.monotonic(), sum(map(_ended, runs)), False
  _say(f'{len(runs)} runs in {sweep.workdir}, {before} of them have ended; what each says is in its output.txt')
  while left := [r for r in runs if not _ended(r)]:
    idle = True
    for run in left:
      lock = None if stop.asked else _claim(run)
      if lock is None:
        continue
      with lock:
        if _ended(run):
          continue
        idle = False
        if _train(sweep, run, stop, lock) in (STOPPED, -signal.SIGTERM):
          return False
      _publish(sweep)
      ended, seconds = sum(map(_ended, runs)), time.monotonic() - began
      _say(f'{ended}/{len(runs)}  {_line(sweep, run)}  elapsed {logs.duration(seconds)}  '
           f'ETA {logs.duration(seconds / max(ended - before, 1) * (len(runs) - ended))}')
    if stop.asked and not all(map(_ended, runs)):
      return False
    if idle:
      if not told:
        _say(f'waiting for the runs of other workers: {" ".join(r.name for r in left)}')
      told = True
      time.sleep(POLL_S)
  return True


def _train(sweep, run, stop, lock) -> int:
  """Trains in a process of its own and writes down how that ended; returns its exit code."""
  _write(run, 'run.json', _origin(sweep, run))
  root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, (root, os.environ.get('PYTHONPATH'))))}
  follow = [sys.executable, '-I', '-S', '-c', FOLLOW, str(os.getpid()), sys.executable]
  with links.append(os.path.join(run.folder, 'output.txt'), 'a+b') as output:
    begin = output.tell()
    stop.child = subprocess.Popen(        # it holds the lock, too; Ctrl-C reaches it as SIGTERM only
        [*follow, *command(sweep, run)[1:]], env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        pass_fds=[lock.fileno()], process_group=0)
    if stop.asked:
      stop()
    code = stop.child.wait()
    stop.child = None
    output.seek(begin)
    lines = [line.strip() for line in output.read().decode('utf-8', 'replace').splitlines() if line.strip()]
  evals = [r for r in logs.rows(run.folder) if r['split'] == 'eval']
  if code == 0 and evals:
    scores = {k: v for k, v in evals[-1].items() if k not in ('step', 'split')}
    _write(run, 'result.json', {'values': run.values, 'seed': run.seed, 'scores': scores})
  elif code not in (STOPPED, -signal.SIGTERM):
    said = [line for line in lines if line.startswith('error:')] or lines or ['it said nothing']
    _write(run, 'failed.json', {'code': code if code > 0 else 128 - code if code else 1,
                                'error': said[-1] if code else 'no evaluation in metrics.jsonl'})
  return code


# the table: a pure function of the results, without times and folders


def _rows(sweep):
  """(point, scores of its finished runs, number of failed ones), in the order of the sweep."""
  rows, runs = [], iter(sweep.runs())
  for point in sweep.points:
    ends = [_json(r, 'result.json') or _json(r, 'failed.json') for r in itertools.islice(runs, len(sweep.seeds))]
    rows.append((point, [e['scores'] for e in ends if 'scores' in e], sum('code' in e for e in ends)))
    for scores in rows[-1][1]:
      if sweep.metric not in scores:
        raise ConfigError(f'metric = {sweep.metric!r}: evaluation gives {", ".join(scores)}'
                          f'{near(sweep.metric, scores)}')
  return rows


def _spread(scores, metric):
  """(median, least, greatest) over the runs; nothing where one of them is missing or not finite (null)."""
  values = [s.get(metric) for s in scores]
  return () if not values or None in values else (statistics.median(values), min(values), max(values))


def _ranked(sweep):
  """The rows, best first; those without a number last."""
  def rank(row):
    spread = _spread(row[1], sweep.metric)
    return not row[1], not spread, (spread[0] if sweep.less else -spread[0]) if spread else 0
  return sorted(_rows(sweep), key=rank)


def table(sweep: Sweep) -> tuple[str, str]:
  """What table.csv (in the order of the sweep, every metric) and table.md (best first) hold."""
  rows, runs, metric = _rows(sweep), sweep.runs(), sweep.metric
  keys = list(dict.fromkeys(k for point in sweep.points for k in point))
  cells_of = lambda point: [text(point[k]) if k in point else '' for k in keys]
  metrics = sorted({m for _, scores, _ in rows for s in scores for m in s})
  out = io.StringIO()
  write = csv.writer(out, lineterminator='\n').writerow
  write([*keys, 'runs', 'failed', *(f'{m}_{part}' for m in metrics for part in ('median', 'min', 'max'))])
  for point, scores, failed in rows:
    spreads = (_spread(scores, m) or ('', '', '') for m in metrics)
    write([*cells_of(point), len(scores), failed, *itertools.chain(*spreads)])
  done = sum(len(scores) for _, scores, _ in rows)
  lines = [f'{sweep.config}{"".join(f", {k}={text(v)}" for k, v in sweep.fixed.items())}: {", ".join(keys)} swept; '
           f'{len(rows)} points, each with seeds {", ".join(map(str, sweep.seeds))}; {done} of {len(runs)} runs done; '
           f'{"least" if sweep.less else "greatest"} median of {metric} first.', '']
  lines += [f'| {" | ".join([*keys, metric, "min to max", "seeds"])} |', '|---' * (len(keys) + 3) + '|']
  for point, scores, _ in _ranked(sweep):
    spread = [f'{x:.4g}' for x in _spread(scores, metric)]
    cells = [cell.replace('|', '\\|') for cell in cells_of(point)]
    cells += [spread[0], f'{spread[1]} to {spread[2]}'] if spread else ['', '']
    lines.append(f'| {" | ".join([*cells, str(len(scores))])} |')
  ends = {r.name: _json(r, 'failed.json') for r in runs if not _json(r, 'result.json')}
  for title, names in (('Failed', [f'{n}: exit code {f["code"]}' for n, f in ends.items() if f]),
                       ('Pending', [n for n, f in ends.items() if not f])):
    if names:
      lines += ['', f'{title}:', '', *(f'- {n}' for n in names)]
  return out.getvalue(), '\n'.join(lines) + '\n'


def _publish(sweep):
  with links.append(os.path.join(sweep.workdir, '.table')) as f:
    fcntl.flock(f, fcntl.LOCK_EX)       # the last of several workers to write has seen all results
    for file, content in zip(('table.csv', 'table.md'), table(sweep)):
      logs.write_atomically(os.path.join(sweep.workdir, file), content)


def _line(sweep, run):
  value = _json(run, 'result.json').get('scores', {}).get(sweep.metric)
  failed = _json(run, 'failed.json')
  said = f'exit code {failed["code"]}: {failed["error"]:.100}' if failed else ''
  if value is not None:
    said = f'{sweep.metric} {value:.4g}'
  return f'{run.name}  {state(run)}  {said}'.rstrip()


def _say(line):
  print(line, file=sys.stderr, flush=True)       # logs.say would take the devices


def main(argv: list[str]) -> int:
  """Runs the command and returns its exit code; every expected failure is one line."""
  signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))      # until a run starts
  parser = argparse.ArgumentParser('python -m lab.sweep', description='Many settings of one recipe, and their table.')
  parser.add_argument('file', metavar='FILE.toml', help='the sweep, such as configs/pose_sweep.toml')
  parser.add_argument('--workdir', default='', help='folder of the sweep, instead of that of the file')
  parser.add_argument('--status', action='store_true', help='print the state of every run and change nothing')
  parser.add_argument('--retry', action='store_true', help='run failed runs again')
  args = parser.parse_args(argv[1:])
  try:
    sweep = read(args.file, args.workdir)
    if args.status:
      states = [state(r) for r in sweep.runs()]
      counts = ', '.join(f'{states.count(s)} {s}' for s in ('done', 'failed', 'running', 'pending'))
      print(f'{counts} of {len(states)} runs in {sweep.workdir}', *(_line(sweep, r) for r in sweep.runs()), sep='\n')
      return 0
    check(sweep)
    return work(sweep, args.retry)
  except KeyboardInterrupt:
    return STOPPED
  except Exception as e:
    code = getattr(e, 'exit_code', 6 if isinstance(e, OSError) else None)
    if code is None:
      raise
    _say(f'error: {e}')
    return code


if __name__ == '__main__':
  sys.exit(main(sys.argv))
