"""The other processes of a run: who has come, whether all run the same, who has gone silent.

JAX ends every process of a run that has lost one, by abort() and without saying which. Here all of them end with code 7
and a line that names it. Processes tell each other what they do through the store of JAX's coordinator, the first one.
"""

import atexit
import contextlib
import ctypes
import hashlib
import itertools
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from typing import Mapping

import jax

from lab import links
from lab.files import StorageError

log = logging.getLogger('lab')
BEATS, FOLDER = 'lab/beats/', '.processes'
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LIMIT_S = 86_400      # of waiting for processes that live
FRESH_S = 5           # a file of the roll call that was touched within these is of a process that waits
_kept = []            # what C calls
_beats = []           # of this process: one, or none where it is alone
_meetings = itertools.count()


class DistributedError(Exception):
  """Processes that did not find each other or no longer agree."""
  exit_code = 7


def end(text: str) -> None:
  """Ends this process at once with code 7: a clean end would wait for the others."""
  try:
    print(f'error: {text}', file=sys.stderr, flush=True)
  finally:      # also where nobody reads it
    os._exit(DistributedError.exit_code)


def end_on(number: int, code: int, text: str) -> None:
  """Ends this process with a code when this signal comes, also while JAX waits and Python handles no signal."""
  @ctypes.CFUNCTYPE(None, ctypes.c_int)
  def ended(_):
    try:
      os.write(2, f'{text}\n'.encode())
    finally:
      os._exit(code)
  libc = ctypes.CDLL(None)
  libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, type(ended)), ctypes.c_void_p
  libc.signal(number, ended)
  _kept.append(ended)


def end_on_abort() -> None:
  """Makes 7 of the 134 with which JAX ends a process that has lost the others."""
  end_on(signal.SIGABRT, DistributedError.exit_code, 'error: this process has lost the others of its run; the one that '
         'ended first tells why. Start all of them again: they go on from the newest checkpoint')


class RollCall:
  """While processes wait for each other: who has come? Each has a file in a folder that all see, and touches it.

  After `seconds` the process ends with code 7 and tells who is missing. `name` is the process's number, or, where
  the platform only tells it later, '' for the host's name; `count` is how many there are, 0 if that is unknown.
  """

  def __init__(self, workdir: str, name: str, count: int, seconds: float):
    self.folder, self.count, self.seconds = os.path.join(workdir, FOLDER), count, seconds
    self.path = os.path.join(self.folder, name or f'{platform.node()}-{os.getpid()}')
    self.done = threading.Event()
    self.thread = threading.Thread(target=self._wait, daemon=True)

  def __enter__(self):
    try:
      if os.path.islink(self.folder):
        raise OSError(f'{self.folder} is a link')
      os.makedirs(self.folder, exist_ok=True)
      with links.fresh(self.path) as f:
        f.write(f'{platform.node()} {os.getpid()}\n')
    except OSError as e:
      raise StorageError(f'--workdir={os.path.dirname(self.folder)} can\'t be written: {e}') from None
    self.thread.start()
    return self

  def __exit__(self, *_):
    self.done.set()
    self.thread.join()
    self._leave()

  def _leave(self):
    with contextlib.suppress(OSError):      # others are still in the folder
      os.remove(self.path)
      os.rmdir(self.folder)

  def _wait(self):
    until = time.monotonic() + self.seconds
    while not self.done.wait(min(0.5, self.seconds / 4)):
      os.utime(self.path, follow_symlinks=False)
      if time.monotonic() > until:
        end(self.text())      # the file stays, for the others to see that this one had come

  def text(self) -> str:
    """Who has come and who is missing, by the clock of the folder's machine."""
    now, here = os.path.getmtime(self.path), []
    for name in sorted(os.listdir(self.folder)):
      with contextlib.suppress(OSError):      # it left just now
        if now - os.path.getmtime(os.path.join(self.folder, name)) < FRESH_S:
          here.append(name)
    missing = [str(i) for i in range(self.count) if str(i) not in here]
    came = (f'{len(here)} of {self.count} processes arrived; missing: {", ".join(missing)}' if missing else
            f'{len(here)} process(es) arrived: {", ".join(here)}')
    return (f'after {self.seconds:g} s {came}. Start all of them, with one address of the first '
            '(JAX_COORDINATOR_ADDRESS) that all can reach; config.processes.start_s is how long they wait')


def code() -> str:
  """A short hash of the lab's source: processes with another one would compute something else."""
  found = hashlib.sha256()
  for room in ('lab', 'data_pipelines'):
    for folder, folders, names in os.walk(os.path.join(ROOT, room)):
      folders.sort()
      for name in sorted(n for n in names if n.endswith('.py')):
        with open(os.path.join(folder, name), 'rb') as f:
          found.update(f'{name} '.encode() + f.read())
  return found.hexdigest()[:16]


def agree(what: str, mine: Mapping[str, object]) -> None:
  """Waits for all processes and raises DistributedError with what differs from the first; `mine` is JSON-able."""
  client = _client()
  if client is None:
    return
  key = f'lab/{what}/'
  client.key_value_set(f'{key}{_index()}', json.dumps(mine))
  client.wait_at_barrier(key, 1000 * LIMIT_S)
  every = {int(k.rsplit('/', 1)[1]): json.loads(v) for k, v in client.key_value_dir_get(key)}
  first = every.pop(0)
  differ = [f'{k} is {theirs.get(k)!r} on process {i}, {first.get(k)!r} on process 0' for i, theirs in
            sorted(every.items()) for k in sorted(first.keys() | theirs) if theirs.get(k) != first.get(k)]
  if differ:
    raise DistributedError(f'the processes do not run the same {what}: {"; ".join(differ[:5])}'
                           f'{f"; and {len(differ) - 5} more" * (len(differ) > 5)}. Start all of them alike')


def meet() -> None:
  """Waits for all processes, which then begin together what waits for the others for 30 seconds only (Gloo).

  All of them call it the same number of times. One that has compiled faster, or has no log to write, waits here, where
  the end of another is noticed.
  """
  client = _client()
  if client is not None:
    client.wait_at_barrier(f'lab/meet/{next(_meetings)}', 1000 * LIMIT_S)


class Beat:
  """Tells the others every second or so that this process lives, and listens to them.

  One that is silent for a sixth of `limit` seconds is told of; after all of it this process ends with code 7.
  """

  def __init__(self, limit: float):
    self.client, self.index, self.limit, self.step = _client(), _index(), limit, 0
    self.stopped, self.told, self.pause = threading.Event(), {}, min(1, limit / 20)
    self.thread = threading.Thread(target=self._run, daemon=True)
    self.thread.start()

  def stop(self) -> None:
    """This process is about to end well: from now on its silence means nothing."""
    if self.stopped.is_set():
      return
    self.stopped.set()
    self.thread.join()
    with contextlib.suppress(jax.errors.JaxRuntimeError):      # the first process has ended before
      self._tell('done')

  def fail(self, code: int, why: str) -> None:
    """This process is about to end with an error: the others end too, and say why."""
    if self.stopped.is_set():
      return
    self.stopped.set()
    self.thread.join(self.pause)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._tell(f'failed with code {code}: {why}')
      if self.index == 0:
        time.sleep(2 * self.pause)      # with the first process goes the store, and the others would not know why

  def _tell(self, text):
    self.client.key_value_set(f'{BEATS}{self.index}', text, allow_overwrite=True)

  def _run(self):
    heard, n = {}, 0
    while not self.stopped.wait(self.pause):
      n += 1
      try:
        self._tell(f'{n} {self.step}')
        for key, text in self.client.key_value_dir_get(BEATS):
          if heard.get(key, ('',))[0] != text:
            heard[key] = text, time.monotonic()
      except jax.errors.JaxRuntimeError:
        continue      # the first process does not answer; JAX itself ends this one if that lasts
      for key, (text, at) in heard.items():
        self._look(int(key.rsplit('/', 1)[1]), text, time.monotonic() - at)

  def _look(self, process, text, silent):
    if process == self.index or text == 'done':
      return
    if text.startswith('failed'):
      end(f'process {process} {text}')
    if silent > self.limit:
      stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
      ours = [f'{os.path.relpath(f.filename, ROOT)}:{f.lineno}' for f in stack if f.filename.startswith(ROOT + os.sep)]
      end(f'process {process} has been silent for {silent:.0f} s; its last step was {text.split()[1]}. This one was at '
          f'step {self.step}, in {" > ".join(ours)}. Start all of them again: they go on from the newest checkpoint')
    if silent > self.limit / 6:
      if process not in self.told:
        log.warning('process %d has been silent for %.1f s, since step %s', process, silent, text.split()[1])
      self.told[process] = max(silent, self.told.get(process, 0))
    elif process in self.told:
      log.warning('process %d is back after more than %.1f s', process, self.told.pop(process))


def watch(limit: float) -> None:
  """Starts the beat of this process, to its end."""
  _beats.append(Beat(limit))
  atexit.register(_beats[-1].stop)      # before JAX's own end, which waits for the others


def note(step: int) -> None:
  """Tells the others which step this process has reached."""
  for beat in _beats:
    beat.step = step


def fail(code: int, why: str) -> None:
  """Tells the others that this process ends with an error, and why."""
  for beat in _beats:
    beat.fail(code, why)


def count() -> int:
  """How many processes this run has; asks no device, which waits for those of all processes."""
  from jax._src import distributed
  return distributed.global_state.num_processes or 1


def _index() -> int:
  from jax._src import distributed
  return distributed.global_state.process_id or 0


def _client():
  """JAX's connection to the coordinator, None of a single process; not public, but Orbax stands on it as well."""
  from jax._src import distributed
  return distributed.global_state.client
