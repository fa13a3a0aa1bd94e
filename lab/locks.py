"""Who has a workdir: one process writes there at a time."""

import contextlib
import errno
import fcntl
import logging
import os
import platform
import re
import time
from typing import Callable

from lab import files, links
from lab.files import StorageError

log = logging.getLogger('lab')
WAIT_S, LOOK_S = 120, 1      # NFS frees the locks of a host that vanished after 90 s


def claim(workdir: str, look: Callable[[], None] = lambda: None):
  """Takes a workdir for this process, as a context; one on the disk is locked until the process ends, however it does.

  Where a process that may be gone has it, that is waited for, WAIT_S at most; `look` is called meanwhile, and may
  raise. For one in a bucket see files.claim. Raises StorageError.
  """
  if files.remote(workdir):
    return files.claim(workdir)
  try:
    os.makedirs(workdir, exist_ok=True)
    f = links.append(os.path.join(workdir, '.lock'))
  except OSError as e:
    raise StorageError(f'--workdir={workdir} can\'t be written: {e}') from None
  with contextlib.ExitStack() as failed:
    failed.enter_context(f)
    _lock(f, workdir, look)
    f.truncate(0)
    f.write(f'{_place()} {os.getpid()}\n')
    f.flush()
    failed.pop_all()
  return f


def _lock(f, workdir, look):
  """The system frees the lock of a process that dies, a server of NFS that of a host only when it is sure."""
  began = None
  while not _locked(f, workdir):
    holder, lives = _holder(workdir)
    if began is None and not lives:
      log.warning('--workdir=%s is in use by %s, which may be gone: its lock is waited for, %g s at most', workdir,
                  holder, WAIT_S)
    began = time.monotonic() if began is None else began
    if lives or time.monotonic() - began >= WAIT_S:
      raise StorageError(f'--workdir={workdir} is in use by {holder}; choose another workdir or wait for it')
    look()
    time.sleep(LOOK_S)


def _locked(f, workdir) -> bool:
  try:
    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as e:
    if e.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
      raise StorageError(f'--workdir={workdir} can\'t be locked: {e}; see to the disk, or choose another') from None
    raise StorageError(f'--workdir={workdir} is on a disk that has no locks ({e}), without which two runs could spoil '
                       'each other\'s files. Mount it with them (Lustre: -o flock; NFS before version 4: lockd has to '
                       'run on both sides), or choose a workdir on another disk') from None
  return True


def _holder(workdir) -> tuple[str, bool]:
  """Who has the workdir, as its lock's file says, and whether that is a process of this host that lives."""
  text = b''
  with contextlib.suppress(OSError):      # opened anew: NFS may not show what others have written since
    text = links.read(os.path.join(workdir, '.lock'), 1000)
  found = re.fullmatch(r'([\w.-]*) ([\w-]*) (\d{1,10})\n', text.decode(errors='replace'))
  if not found:
    return 'a process that has not said which', False
  lives = f'{found[1]} {found[2]}' == _place() and os.path.exists(f'/proc/{found[3]}')
  return f'process {found[3]} on {found[1]}', lives


def _place() -> str:
  """This host's name, and what tells it from one of the same name, such as a pod that was started again elsewhere."""
  boot = b''
  with contextlib.suppress(OSError):
    boot = files.read('/proc/sys/kernel/random/boot_id').strip()
  return f'{platform.node()} {boot.decode()}'
