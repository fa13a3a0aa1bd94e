"""Training batches made by processes of their own: one alone makes no more than its one lock of Python lets it.

Each worker makes some rows of every batch, as pipeline.Batches does for one host of several; so batches are the same
for any number of workers. It gets the run's config as a line of JSON, its job as another, and writes to a pipe, a batch
after the other: JSON behind its length, then the bytes of the arrays in the order of their names. Once nobody reads its
pipe it ends, so that no worker outlives a run, however that ended.
"""

import contextlib
import fcntl
import json
import logging
import os
import select
import signal
import struct
import subprocess
import sys
import traceback

import numpy as np
from data_pipelines import DataError, TooLarge, pipeline

from lab import config as configs, files
from lab.task import ConfigError, load

PIPE_BYTES = 1 << 20
SILENCE_S = 300.0               # after which a worker is taken for one that stands still
HEAD = struct.Struct('<I')      # bytes of the JSON that follows
RAISED = {e.__name__: e for e in (ConfigError, DataError, TooLarge)}      # what a worker tells of, by its name


class WorkerLost(DataError):
  """A worker that ended by itself, or stands still."""


class WorkerBatches(pipeline.Batches):
  """The training batches of pipeline.Batches, made by config.input.workers processes; `rows` as there."""

  def __init__(self, source: pipeline.Source, config, rows):
    options = configs.from_json(config.to_json()).unlock().input
    options.cache = False
    super().__init__(source, options, options.batch_size, rows, train=True, seed=config.seed)
    self.whole, self.idle, self.busy, self.over = config.to_json(), [], [], False
    self.parts = [p.tolist() for p in np.array_split(self.rows, min(options.workers, len(self.rows)))]

  def begin(self) -> list[int]:
    """Starts the workers, which take seconds to import what they need, where iterating has not; their processes."""
    while len(self.idle) < len(self.parts):
      self.idle.append(Worker(self.whole))
    return [w.process.pid for w in self.idle]

  def close(self) -> None:
    """Ends the workers that were started and never used."""
    while self.idle:
      self.idle.pop().close()

  def hurry(self) -> None:
    """Kills the workers; whoever reads what they make is told at once."""
    self.over = True
    for worker in self.busy:
      worker.process.kill()

  def _made(self):
    spec = self.spec(len(self.rows))
    self.begin()
    try:
      for part in range(len(self.parts)):
        self.busy.append(self.idle.pop())
        self._give(part)
      while True:
        batch, at = {k: np.empty(s.shape, s.dtype) for k, s in sorted(spec.items())}, 0
        for part, rows in enumerate(self.parts):
          self._told(self._read(part, [v[at:at + len(rows)] for v in batch.values()]))
          at += len(rows)
        self.step += 1
        yield batch
    finally:
      while self.busy:
        self.busy.pop().close()

  def _give(self, part):
    self.busy[part].begin({'step': self.step, 'bad': self.bad, 'rows': self.parts[part], 'workers': len(self.parts)})

  def _read(self, part, arrays):
    """The next rows of a part; where its worker is lost another one makes them, for they depend on the step alone."""
    try:
      return self.busy[part].read(arrays)
    except WorkerLost as e:
      if self.over:
        raise
      pipeline.log.warning('%s; another one goes on in its place', e)
    self.busy[part].close()
    self.busy[part] = Worker(self.whole)
    self._give(part)
    return self.busy[part].read(arrays)

  def _told(self, head):
    """Takes in what a worker found: records that are bad, and what it said of them."""
    for text in head['said']:
      pipeline.log.warning(text)
    known, self.bad = self.bad, sorted({*self.bad, *head['bad']})
    if len(self.bad) > max(len(known), self.config.bad_limit * self.source.size):
      raise DataError(f'{len(self.bad)} bad records of {self.source.size}, found by several workers; '
                      f'config.input.bad_limit = {self.config.bad_limit}')


class Worker:
  """A process that makes batches of a config, given as JSON, and the pipe that they come through.

  It loads what it needs at once, and then waits for its work; after that it may be silent for `limit` seconds.
  """

  def __init__(self, config: str, limit: float = SILENCE_S):
    self.limit = limit
    read, write = os.pipe()
    with contextlib.suppress(OSError):      # it is slower, no more, where the system grants no pipes of this size
      fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    self.pipe = os.fdopen(read, 'rb', 0)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, (root, os.environ.get('PYTHONPATH'))))
    # whoever stops a run may tell all of its processes, but it needs its workers until it has saved: signals are held
    # back while it starts one, which inherits that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
      self.process = subprocess.Popen([sys.executable, '-m', 'lab.workers', str(write)], stdin=subprocess.PIPE,
                                      pass_fds=[write], start_new_session=True,
                                      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path})
    except OSError:
      self.pipe.close()
      raise
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, before)
      os.close(write)
    self._tell(config)

  def begin(self, job: dict) -> None:
    """Gives it its work; see _work."""
    self._tell(json.dumps(job))

  def _tell(self, line):
    with contextlib.suppress(BrokenPipeError):      # it is lost, as read() will tell
      self.process.stdin.write(line.encode() + b'\n')
      self.process.stdin.flush()

  def read(self, arrays: list[np.ndarray]) -> dict:
    """Fills the arrays with its next rows and returns what it says of them. Raises what it raised, or WorkerLost."""
    length = bytearray(HEAD.size)
    self._fill(length)
    text = bytearray(*HEAD.unpack(length))
    self._fill(text)
    head = json.loads(text)
    if 'error' in head:
      raise RAISED.get(head['kind'], RuntimeError)(head['error'])
    for array in arrays:
      self._fill(array.reshape(-1).view(np.uint8))
    return head

  def _fill(self, buffer):
    view, ready = memoryview(buffer), select.poll()
    ready.register(self.pipe, select.POLLIN)
    while view:
      if not ready.poll(1000 * self.limit):
        self._lost(f'has been silent for {self.limit:g} s')
      count = self.pipe.readinto(view)
      if not count:
        code = self.process.wait()
        self._lost(f'was killed by signal {-code}' if code < 0 else f'ended with code {code}')
      view = view[count:]

  def _lost(self, what):
    raise WorkerLost(f'a worker that makes batches (process {self.process.pid}) {what}; if memory is short, lower '
                     'config.input.workers')

  def close(self) -> None:
    """Ends it."""
    self.process.kill()
    self.process.wait()
    self.pipe.close()
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.close()


class _Said(logging.Handler):
  """Keeps the warnings of the pipeline, for the run to say."""

  def __init__(self):
    super().__init__(logging.WARNING)
    self.texts = []

  def emit(self, record):
    self.texts.append(record.getMessage())

  def taken(self) -> list[str]:
    """What was said since the last call; the pipeline's thread may be saying more."""
    return [self.texts.pop(0) for _ in range(len(self.texts))]


def main(argv: list[str]) -> int:
  """The worker: argv[1] is the pipe's number, the config and the job come on standard input."""
  pipeline.tensorflow()
  with contextlib.suppress(BrokenPipeError), os.fdopen(int(argv[1]), 'wb') as out:
    if config := sys.stdin.readline():
      try:
        _work(config, out)
      except BrokenPipeError:
        raise
      except Exception as e:
        if type(e).__name__ not in RAISED:
          traceback.print_exc()
        _write(out, {'error': str(e) or repr(e), 'kind': type(e).__name__})
  return 0


def _work(config, out):
  """The job that comes once the run knows its step: rows to make, step to begin with, bad records, workers in all."""
  said = _Said()
  pipeline.log.addHandler(said)
  pipeline.log.propagate = False
  config = configs.from_json(config).unlock()
  options, source = config.input, load(config).source('train')
  line = sys.stdin.readline()
  if not line:      # the run ended before
    return
  job = json.loads(line)
  options.threads = max((options.threads or os.cpu_count()) // job['workers'], 1)
  options.cache &= files.remote(source.read[0])      # of files the system has one copy in memory for all workers
  batches = pipeline.Batches(source, options, options.batch_size, job['rows'], train=True, seed=config.seed,
                             start=job['step'])
  batches.bad = job['bad']
  for batch in batches:
    _write(out, {'bad': batches.bad, 'said': said.taken()}, [v for _, v in sorted(batch.items())])


def _write(out, head, arrays=()):
  text = json.dumps(head).encode()
  out.write(HEAD.pack(len(text)) + text)
  for array in arrays:
    out.write(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
  out.flush()


if __name__ == '__main__':
  os._exit(main(sys.argv))      # TensorFlow's threads may still make examples, and would be waited for
