"""Stops runs of all five systems at random moments; each must go on to the very bits of a run that nothing stopped.

  python -m tests.kills --kills=200 --terms=25 [--systems=pose,gpt] [--seed=0]

A start is a process forked from this one, which has imported the packages but has no device, so that it takes a second
or two, not ten. Half of the kills wait for a checkpoint that is being written, the others come at any moment from the
start of the process to its end. SIGTERM comes at any moment too: the run ends with 75 in less than 30 seconds.
"""

import argparse
import collections
import glob
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time

SYSTEMS = {name: f'configs/{name}.py:smoke' for name in ('pose', 'video', 'gpt', 'dvae', 'agent')}
OVERRIDES = ('--config.total_steps=12', '--config.checkpoint.steps=2', '--config.eval_steps=4', '--config.log_steps=1',
             '--config.platform=cpu')
GRACE_S = 30          # from SIGTERM to the end
COLUMNS = ('starts', 'kills', 'in a save', 'SIGTERM', 'failed starts', 'runs', 'other bits')


def preload() -> None:
  """Imports what takes long. Raises AssertionError if a device was touched: it would not survive a fork."""
  from data_pipelines import pipeline
  pipeline.tensorflow()
  import clu.metric_writers, clu.parameter_overview      # noqa: F401, E401
  from lab import artifact, checkpoint, evaluate, graft, logs, main, mesh, page, train      # noqa: F401
  from lab.systems.agent import task as agent            # noqa: F401
  from lab.systems.dvae import task as dvae              # noqa: F401
  from lab.systems.language import task as language      # noqa: F401
  from lab.systems.pose import task as pose              # noqa: F401
  from lab.systems.video import task as video            # noqa: F401
  from jax._src import xla_bridge
  assert not xla_bridge.backends_are_initialized()


def start(config: str, workdir: str) -> int:
  """Forks a process that trains; its output goes to WORKDIR.log. Returns its number."""
  sys.stdout.flush()
  process = os.fork()
  if process:
    return process
  out = os.open(workdir + '.log', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(out, 1)
  os.dup2(out, 2)
  from lab import main
  code = 1
  try:
    code = main.main(['main.py', f'--config={config}', f'--workdir={workdir}', *OVERRIDES])
  finally:
    sys.stderr.flush()
    os._exit(code)


def ended(process: int, until: float) -> int | None:
  """The exit code (below 0: the signal) of a process that ends before `until`, of time.monotonic(); else None."""
  while True:
    found, status = os.waitpid(process, os.WNOHANG)
    if found:
      return os.waitstatus_to_exitcode(status)
    if time.monotonic() > until:
      return None
    time.sleep(.001)


def saving(workdir: str) -> list[str]:
  """Checkpoints that are being written."""
  return glob.glob(os.path.join(workdir, 'checkpoints', '*.orbax-checkpoint-tmp*'))


def outcome(workdir: str) -> tuple:
  """(digest of the state, rows of metrics.jsonl, best and newest checkpoint) of a run that has ended."""
  with open(workdir + '.log', encoding='utf-8') as f:
    digest = re.findall(r'state digest +(\w+)', f.read())
  with open(os.path.join(workdir, 'metrics.jsonl'), encoding='utf-8') as f:
    rows = [json.loads(line) for line in f]
  return digest, rows, *kept(workdir)


def kept(workdir: str) -> tuple:
  """((value, step) of the best checkpoint, the newest step); by the files, for Orbax would ask for a device.

  Which others are there depends on when a run was stopped: SIGTERM saves at any step.
  """
  found = {}
  for path in glob.glob(os.path.join(workdir, 'checkpoints', '*', 'meta', 'metadata')):
    with open(path, encoding='utf-8') as f:
      meta = json.load(f)
    name = meta['config']['checkpoint']['best']
    found[meta['step']] = (-1 if name.startswith('-') else 1) * meta['scores'].get(name.lstrip('-'), float('nan'))
  scored = [(value, step) for step, value in found.items() if value == value]
  return max(scored, default=None), max(found)


class System:
  """The runs of one system, and what was counted."""

  def __init__(self, name: str, folder: str, draw: random.Random):
    self.config, self.draw, self.count = SYSTEMS[name], draw, collections.Counter()
    self.workdir, self.failures = os.path.join(folder, name), []
    self.finish(start(self.config, self.workdir))            # compiles, and prepares the data
    self.clear()
    began = time.monotonic()
    self.finish(start(self.config, self.workdir))
    self.seconds, self.whole = time.monotonic() - began, outcome(self.workdir)
    self.clear()

  def clear(self) -> None:
    """The next start is that of a new run."""
    shutil.rmtree(self.workdir)

  def finish(self, process: int) -> None:
    """Waits for a run that nothing stops."""
    code = ended(process, time.monotonic() + 600)
    if code != 0:
      raise RuntimeError(f'{self.config} ended with {code}:\n{open(self.workdir + ".log", encoding="utf-8").read()}')

  def stop_once(self, number: int) -> None:
    """One start that a signal may stop; one that came to its end is compared, and the next is that of a new run."""
    self.count['starts'] += 1
    process = start(self.config, self.workdir)
    code = self._wait(process, until_save=number == signal.SIGKILL and self.draw.random() < .5)
    if code is None:
      self.count['in a save'] += bool(saving(self.workdir)) and number == signal.SIGKILL
      os.kill(process, number)
      code = ended(process, time.monotonic() + GRACE_S)
      if code is None:
        os.kill(process, signal.SIGKILL)
        ended(process, time.monotonic() + GRACE_S)
      self.count['kills' if number == signal.SIGKILL else 'SIGTERM'] += code != 0
    if code == 0:
      self.compare()
    elif code != (75 if number == signal.SIGTERM else -signal.SIGKILL):
      self.count['failed starts'] += 1
      with open(self.workdir + '.log', encoding='utf-8') as f:
        self.failures.append(f'{self.config} ended with {code}:\n{f.read()[-3000:]}')

  def _wait(self, process, until_save):
    """Up to a random moment; the exit code of a run that ended before."""
    code = None
    if until_save:
      began = time.monotonic()
      while code is None and not saving(self.workdir) and time.monotonic() - began < 10 * self.seconds:
        code = ended(process, 0)
    return code if code is not None else ended(
        process, time.monotonic() + self.draw.uniform(0, .1 if until_save else self.seconds))

  def compare(self) -> None:
    """A run that came to its end has the bits and the rows of one that nothing stopped."""
    self.count['runs'] += 1
    if outcome(self.workdir) != self.whole:
      self.count['other bits'] += 1
      self.failures.append(f'{self.config}: {outcome(self.workdir)} is not {self.whole}')
    self.clear()


def run(systems: list[str], kills: int, terms: int, seed: int) -> tuple[dict, list[str]]:
  """(system -> what was counted, what failed) of so many kills and SIGTERMs, shared among the systems."""
  preload()
  counts, failures = {}, []
  for i, name in enumerate(systems):
    share = {number: total // len(systems) + (i < total % len(systems)) for number, total in
             ((signal.SIGKILL, kills), (signal.SIGTERM, terms))}
    with tempfile.TemporaryDirectory() as folder:
      system = System(name, folder, random.Random(f'{seed} {name}'))
      print(f'{name}: {system.seconds:.1f} s a run that nothing stops', flush=True)
      while (left := {n: c - system.count['kills' if n == signal.SIGKILL else 'SIGTERM'] for n, c in share.items()}
             ) and max(left.values()) > 0:
        system.stop_once(system.draw.choices(list(left), [max(c, 0) for c in left.values()])[0])
      if os.path.exists(system.workdir):
        system.count['starts'] += 1
        system.finish(start(system.config, system.workdir))
        system.compare()
    counts[name] = system.count
    failures += system.failures
    print(f'{name}: ' + ', '.join(f'{k} {system.count[k]}' for k in COLUMNS), flush=True)
  return counts, failures


def table(counts: dict) -> str:
  """The counts as a Markdown table, with their sum."""
  counts = {**counts, 'all': sum(counts.values(), collections.Counter())}
  return '\n'.join([f'| system | {" | ".join(COLUMNS)} |', '|---' * (len(COLUMNS) + 1) + '|', *(
      f'| {name} | {" | ".join(str(count[k]) for k in COLUMNS)} |' for name, count in counts.items())])


def main() -> int:
  """The command; 1 if a start failed or a run ended with other bits."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--kills', type=int, default=200, help='kill -9, of all systems together')
  parser.add_argument('--terms', type=int, default=25, help='SIGTERM, of all systems together')
  parser.add_argument('--systems', default=','.join(SYSTEMS))
  parser.add_argument('--seed', type=int, default=0)
  options = parser.parse_args()
  counts, failures = run(options.systems.split(','), options.kills, options.terms, options.seed)
  print(table(counts), *failures, sep='\n')
  return int(bool(failures))


if __name__ == '__main__':
  sys.exit(main())
