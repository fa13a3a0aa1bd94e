"""Goodput: where a run's wall time went, over all its starts.

ledger.jsonl has a line a second and one at each checkpoint: seconds a phase since the start of the process, and the
most memory that a device had in use. The work of steps that a later start does again is lost, whatever it was; what no
line accounts for is idle, such as the time between two starts. The buckets add up to the wall time.
"""

import contextlib
import json
import os
import time

from lab import links, memory

PHASES = ('start', 'compile', 'restore', 'wait', 'step', 'evaluate', 'save')
BUCKETS = (*PHASES, 'lost', 'idle')
DONE_AGAIN = ('wait', 'step', 'evaluate', 'save')      # phases that are lost with their steps
NAME = 'ledger.jsonl'


def process_began() -> float:
  """When this process was started, in seconds since the epoch."""
  with open('/proc/self/stat', encoding='ascii') as f:
    ticks = int(f.read().rpartition(')')[2].split()[19])
  with open('/proc/uptime', encoding='ascii') as f:
    uptime = float(f.read().split()[0])
  return time.time() - (uptime - ticks / os.sysconf('SC_CLK_TCK'))


class Ledger:
  """The clock of one process, always in exactly one phase. Only `writes` ones write; `began` is the epoch's seconds."""

  def __init__(self, workdir: str, writes: bool = True, began: float | None = None):
    now = time.time()
    self.began = now if began is None else began
    self.seconds = dict.fromkeys(PHASES, 0.0)
    self.phase, self.mark = 'start', time.monotonic() - (now - self.began)
    self.compilations, self.step, self.written = 0, 0, 0.0
    self.file = links.append(os.path.join(workdir, NAME)) if writes else None
    if writes and self.file.tell():
      self.file.write('\n')       # whatever a kill cut off stays a line of its own

  def enter(self, phase: str) -> str:
    """Ends the phase that is on and begins another; returns the one that ended."""
    now = time.monotonic()
    self.seconds[self.phase] += now - self.mark
    self.mark, last, self.phase = now, self.phase, phase
    return last

  @contextlib.contextmanager
  def during(self, phase: str):
    """A phase inside another, which goes on after it."""
    last = self.enter(phase)
    try:
      yield
    finally:
      self.enter(last)

  def at(self, step: int, event: str = '') -> None:
    """Notes that `step` is reached, and what happened there ('resumed', 'saved', ...); if nothing, a line a second."""
    self.enter(self.phase)
    self.step = step
    if self.file is None or not event and self.mark - self.written < 1:
      return
    self.written = self.mark
    line = {'began': self.began, 'time': time.time(), 'step': step, 'event': event,
            'seconds': {k: round(v, 4) for k, v in self.seconds.items()}, 'compilations': self.compilations,
            'peak': memory.peak()}
    self.file.write(json.dumps(line) + '\n')
    self.file.flush()

  def close(self) -> None:
    """The last line."""
    self.at(self.step, 'end')
    if self.file is not None:
      self.file.close()


def summary(workdir: str) -> dict:
  """Of all starts together: wall_s, seconds a bucket, goodput (share of the wall time in steps that count), starts,
  lost_steps, compilations, peak (bytes, the most of all starts). {} where there is no ledger."""
  lines = _lines(os.path.join(workdir, NAME))
  if not lines:
    return {}
  total, parts, last = dict.fromkeys(BUCKETS, 0.0), [], {}
  starts = lost_steps = compilations = peak = 0
  end = lines[0]['began']
  for line in lines:
    if line['began'] != last.get('began'):
      starts += 1
      total['idle'] += line['began'] - end       # below 0 where two clocks differ; the sum holds all the same
      end, last = line['began'], {'seconds': dict.fromkeys(PHASES, 0.0), 'compilations': 0, 'time': line['began']}
    spent = {k: line['seconds'][k] - last['seconds'][k] for k in PHASES}
    total['idle'] += line['time'] - last['time'] - sum(spent.values())
    compilations += line['compilations'] - last['compilations']
    peak = max(peak, line.get('peak', 0))      # lines of an older lab have none
    if line['event'] == 'resumed':
      again = [p for p in parts if p[0] > line['step']]
      lost_steps += max((step for step, _ in again), default=line['step']) - line['step']
      parts = [p for p in parts if p[0] <= line['step']]
      for _, gone in again:
        for k in DONE_AGAIN:
          total[k] -= gone[k]
          total['lost'] += gone[k]
    parts.append((line['step'], spent))
    for k in PHASES:
      total[k] += spent[k]
    end, last = line['time'], line
  wall = end - lines[0]['began']
  return {'wall_s': wall, 'seconds': total, 'goodput': total['step'] / wall if wall else 0.0, 'starts': starts,
          'lost_steps': lost_steps, 'compilations': compilations, 'peak': peak}


def _lines(path) -> list[dict]:
  """The lines of a ledger; one that a kill cut off is left out."""
  found = []
  if os.path.exists(path):
    with open(path, encoding='utf-8') as f:
      for line in f:
        with contextlib.suppress(ValueError, RecursionError):
          found.append(json.loads(line))
  return found


def table(found: dict) -> str:
  """A summary in one line, the largest buckets first; '' of an empty one, such as where another machine writes it."""
  if not found:
    return ''
  shares = sorted(found['seconds'].items(), key=lambda kv: -kv[1])
  spent = ', '.join(f'{name} {s:.1f} s' for name, s in shares if s >= 0.05)
  return (f'{found["goodput"]:.0%} of {found["wall_s"]:.1f} s in steps that count ({spent}); '
          f'{found["starts"]} start(s), {found["lost_steps"]} step(s) done again; {found["compilations"]} '
          f'compilation(s), {memory.size(found["peak"])} in use at most')
