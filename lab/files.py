"""Files on this machine and in a bucket, gs://BUCKET/FOLDER: one door for both, through gcsfs.

A bucket knows no folder, no append and no renaming at one stroke: an object is there whole, or not at all. So what a
run writes line by line lies in a scratch folder of its process. It is fetched from the bucket at the start, and what
changed is sent, whole files, before each checkpoint and at the end. No process reads another's scratch folder: a run
goes on from its bucket alone, on whatever machine. Orbax writes checkpoints there, TensorFlow reads records, without
this door.
"""

import atexit
import contextlib
import errno
import functools
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time

from lab import links
from lab.task import ConfigError

log = logging.getLogger('lab')
# Both are read once, when they are first needed. Orbax's paths would load TensorFlow for a bucket, which takes seconds,
os.environ.setdefault('EPATH_USE_TF', 'false')
# and gcsfs would ask another service, by another protocol, of which kind the bucket is
os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
MARK = 'commit_success.txt'                          # Orbax's last word on a checkpoint in a bucket
CHECKPOINTS = 'checkpoints'
KEPT = ('assets', 'pictures', 'tensorboard')         # folders of a run, beside its files, that a next start reads
AWAY = 'UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAUTHENTICATED|ABORTED'
_scratch: dict[str, tuple[str, dict[str, tuple[int, int]]]] = {}      # workdir -> its folder here; name -> size, time
_claims: dict[str, bytes] = {}                       # workdir -> what this process has written into its .lock


class StorageError(Exception):
  """Storage that can't be used: no such bucket, no permission, or no answer after all tries."""
  exit_code = 5


def remote(path: str) -> bool:
  """Whether a path is in a bucket."""
  return path.startswith('gs://')


def check(key: str, path: str, records: bool = False) -> None:
  """Raises ConfigError for the address of another service, and where gcsfs is missing; records are read without it."""
  if '://' not in path:
    return
  if not re.match('gs://[^/]', path):
    raise ConfigError(f'{key} = {path}: expected a path on this machine, or gs://BUCKET/FOLDER')
  if not records and importlib.util.find_spec('gcsfs') is None:
    raise ConfigError(f'{key} = {path}: buckets need gcsfs, which is not installed: pip install \'.[gcs]\' in the '
                      'project, or LAB_EXTRAS=gcs for launch/run.sh')


# one path


def make_folder(key: str, path: str) -> None:
  """Makes the folder of a file of this machine. Raises ConfigError where the file can't be written, before any work."""
  folder, name = os.path.split(path)
  if not name or os.path.isdir(path):
    raise ConfigError(f'{key}={path}: expected the name of a file, not of a folder')
  try:
    os.makedirs(folder or '.', exist_ok=True)
  except OSError as e:
    raise ConfigError(f'{key}={path}: its folder can\'t be made: {e.strerror}') from None
  if not os.access(folder or '.', os.W_OK):
    raise ConfigError(f'{key}={path}: its folder can\'t be written')


def names(folder: str) -> list[str]:
  """The names in a folder, in order; none where there is no such folder."""
  if not remote(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  with _asking(folder), contextlib.suppress(FileNotFoundError):
    return sorted({os.path.basename(n) for n in _service().ls(folder, detail=False)} - {''})
  return []


def exists(path: str) -> bool:
  """Whether a file or folder is there."""
  return os.path.basename(path) in names(os.path.dirname(path)) if remote(path) else os.path.exists(path)


def isdir(path: str) -> bool:
  """Whether a folder is there."""
  return bool(names(path)) if remote(path) else os.path.isdir(path)


def read(path: str) -> bytes:
  """The content of a file. Raises FileNotFoundError where there is none."""
  if remote(path):
    with _asking(path):
      return _service().cat_file(path)
  with open(path, 'rb') as f:
    return f.read()


def replace(path: str, content: bytes) -> None:
  """Gives a file another content at one stroke: whatever happens, it has the one or the other. Raises StorageError."""
  if remote(path):
    _write(path, content)
    return
  try:
    with links.fresh(path + '.new', 'wb') as f:
      f.write(content)
      f.flush()
      os.fsync(f.fileno())
    os.replace(path + '.new', path)
  except OSError as e:
    if e.errno == errno.ENOSPC:      # which is another message, and code
      raise
    raise StorageError(f'{path} can\'t be written: {reason(e)}') from None


def rename(old: str, new: str) -> None:
  """Renames a checkpoint. In a bucket its mark goes first, so that no half of it looks whole."""
  if not remote(old):
    os.rename(old, new)
    return
  _remove(os.path.join(old, MARK))
  with _asking(old):
    _service().mv(old, new, recursive=True)


def remove(path: str) -> None:
  """Removes a checkpoint, as far as it is there. In a bucket its mark goes first, so that no half of it looks whole."""
  if remote(path):
    _remove(os.path.join(path, MARK))
    _remove(path)
  else:
    shutil.rmtree(path, ignore_errors=True)


def _remove(path):
  with _asking(path), contextlib.suppress(FileNotFoundError):
    _service().rm(path, recursive=True)


def _write(path, content):
  with _asking(path):
    try:
      _service().pipe_file(path, content)
    except FileNotFoundError:
      raise StorageError(f'{path}: there is no such bucket') from None


# one workdir


def local(workdir: str) -> str:
  """The folder here that has a workdir's files, less its checkpoints; of one in a bucket they are fetched once."""
  if not remote(workdir):
    return workdir
  if workdir not in _scratch:
    top = tempfile.mkdtemp(prefix='lab-')
    atexit.register(shutil.rmtree, top, ignore_errors=True)
    folder = os.path.join(top, workdir.removeprefix('gs://').strip('/'))
    os.makedirs(folder)
    wanted = [n for n in _objects(workdir) if '/' not in n or n.split('/')[0] in KEPT]
    for path in {os.path.dirname(os.path.join(folder, n)) for n in wanted}:
      os.makedirs(path, exist_ok=True)
    if wanted:
      with _asking(workdir):
        _service().get([f'{workdir.rstrip("/")}/{n}' for n in wanted], [os.path.join(folder, n) for n in wanted])
    _scratch[workdir] = folder, _state(folder)
  return _scratch[workdir][0]


def push(workdir: str) -> None:
  """Sends what has changed in a workdir that is in a bucket, whole files, and removes there what is gone here.

  Raises StorageError where that can't be done, and where another process has claimed the workdir meanwhile.
  """
  if workdir not in _scratch:
    return
  _still_ours(workdir)
  folder, sent = _scratch[workdir]
  now = _state(folder)
  for name in sorted(now.keys() | sent.keys()):
    path = os.path.join(workdir, name)
    if name not in now:
      _remove(path)
      del sent[name]
    elif now[name] != sent.get(name):
      _write(path, read(os.path.join(folder, name)))
      sent[name] = now[name]
  _still_ours(workdir)       # or a checkpoint would follow that has no rows in the log of the other


def outline(workdir: str) -> str:
  """As `local`, with the checkpoints that are there now, for who describes a run.

  Their descriptions are whole; of the arrays there are only sizes and dates. Unfinished ones have no description.
  """
  folder = local(workdir)
  if not remote(workdir):
    return folder
  shutil.rmtree(os.path.join(folder, CHECKPOINTS), ignore_errors=True)
  objects = _objects(os.path.join(workdir, CHECKPOINTS))
  for name, about in objects.items():
    path, step = os.path.join(folder, CHECKPOINTS, name), name.split('/')[0]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not name.endswith('/meta/metadata'):
      with links.fresh(path, 'wb') as f:
        f.truncate(about['size'])          # a hole, which takes no room
    elif f'{step}/{MARK}' in objects:
      with links.fresh(path, 'wb') as f:
        f.write(read(os.path.join(workdir, CHECKPOINTS, name)))
      os.utime(path, (about['mtime'].timestamp(),) * 2)
  return folder


def fetch(path: str) -> str:
  """A file of this machine with the content of `path`; that itself where it is one."""
  if not remote(path):
    return path
  with tempfile.NamedTemporaryFile(prefix='lab-', delete=False) as f:
    atexit.register(os.remove, f.name)
    f.write(read(path))
  return f.name


def claim(workdir: str):
  """Takes a workdir in a bucket for this process, as a context. Raises StorageError.

  There nothing can be locked so that a dead process sets it free: the last one to come has it, and an earlier one that
  still lives ends when it is about to write its next checkpoint.
  """
  lock = os.path.join(workdir, '.lock')
  with contextlib.suppress(FileNotFoundError):
    log.warning('%s: a process did not end in order there: %s. If it still lives, it ends at its next checkpoint',
                workdir, read(lock).decode(errors='replace'))
  ours = json.dumps({'host': platform.node(), 'process': os.getpid(), 'time': time.time()}).encode()
  _write(lock, ours)
  _claims[workdir] = ours
  _scratch.pop(workdir, None)        # the other may have written since it was fetched
  stack = contextlib.ExitStack()
  stack.callback(_release, workdir)
  return stack


def _release(workdir):
  try:
    _still_ours(workdir)
    _remove(os.path.join(workdir, '.lock'))
  except StorageError as e:
    log.warning('%s', e)
  del _claims[workdir]


def _still_ours(workdir):
  if workdir in _claims:
    there = b'a process that has ended'
    with contextlib.suppress(FileNotFoundError):
      there = read(os.path.join(workdir, '.lock'))
    if there != _claims[workdir]:
      raise StorageError(f'--workdir={workdir} was taken over by {there.decode(errors="replace")}; nothing more is '
                         'written there by this process')


def _state(folder):
  """name -> size and time of every file of a scratch folder that belongs into the bucket."""
  found = {}
  for where, folders, files in os.walk(folder):
    if where == folder:
      folders[:] = [n for n in folders if n != CHECKPOINTS]
    for name in files:
      path = os.path.join(where, name)
      found[os.path.relpath(path, folder)] = os.stat(path).st_size, os.stat(path).st_mtime_ns
  return found


def _objects(folder):
  """name below a folder of a bucket -> what is known of the object; names that lead out of a folder are left out."""
  start = folder.removeprefix('gs://').rstrip('/') + '/'
  with _asking(folder), contextlib.suppress(FileNotFoundError):
    found = _service().find(folder, detail=True)
    below = {n.removeprefix(start): about for n, about in found.items() if n.startswith(start)}
    return {n: about for n, about in below.items() if not {'', '.', '..'} & {*n.split('/')}}
  return {}


# the service


@functools.cache
def _service():
  """gcsfs, which Orbax's paths share; it tries again for half a minute what is refused for the moment."""
  import fsspec
  fsspec.config.conf.setdefault('gs', {})['use_listings_cache'] = False    # we are not alone there
  gcsfs = logging.getLogger('gcsfs')
  gcsfs.handlers, gcsfs.propagate = [_Retries()], False
  gcsfs.setLevel(logging.DEBUG)
  return fsspec.filesystem('gs', finalize_on_close=True)


class _Retries(logging.Handler):
  """Tells of each request that is made again. gcsfs's own log and traces are left out, for its errors come anyway."""
  count = 0

  def emit(self, record):
    _, again, why = record.getMessage().partition(' retrying after exception: ')
    if again:
      self.count += 1
      log.warning('a bucket refused a request, which is made again (%d so far): %s', self.count, reason(why))


def retries(before: int = 0) -> int:
  """How often tensorstore, which writes the arrays of checkpoints, had to ask again; warns if more than `before`."""
  import tensorstore
  found = tensorstore.experimental_collect_matching_metrics('/tensorstore/kvstore/gcs/retries')
  count = sum(value['value'] for metric in found for value in metric['values'])
  if count > before:
    log.warning('a bucket refused requests for arrays, which were made again (%d so far)', count)
  return count


def away(path: str, error: Exception) -> bool:
  """Whether an error says that a bucket can't be reached or read, and nothing about what lies there."""
  if not remote(path) or isinstance(error, FileNotFoundError):
    return False
  return (isinstance(error, (StorageError, OSError)) or type(error).__module__.split('.')[0] in ('aiohttp', 'gcsfs') or
          bool(re.match(AWAY, str(error))))


def reason(error) -> str:
  """An error in one line, without what tensorstore adds about itself."""
  text = ' '.join(re.sub(r" \[\w+='.*", '', str(error), flags=re.DOTALL).split())
  return (text or repr(error))[:500]


@contextlib.contextmanager
def _asking(path):
  """Whatever fails for good is a StorageError that names the object; what is not there is a FileNotFoundError."""
  try:
    yield
  except (FileNotFoundError, StorageError):
    raise
  except Exception as e:
    raise StorageError(f'{path}: {reason(e)}') from e
