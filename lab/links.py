"""Files that a run writes, never through a link, so that a workdir from elsewhere leads to nothing outside of it.

Folders may be links, for checkpoints on another disk.
"""

import contextlib
import errno
import os
import stat
from typing import IO

from lab.task import ConfigError


def fresh(path: str, mode: str = 'w') -> IO:
  """Opens a new file, 'w' for text or 'wb', in the place of whatever has its name; a link goes, what it names stays."""
  with contextlib.suppress(FileNotFoundError):
    os.unlink(path)
  return open(path, mode.replace('w', 'x'), encoding=None if 'b' in mode else 'utf-8')


def append(path: str, mode: str = 'a') -> IO:
  """Opens a file to add to it, 'a', 'a+' or 'a+b', made if need be. Raises ConfigError where the name is a link."""
  def no_link(name, flags):
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)
  try:
    return open(path, mode, encoding=None if 'b' in mode else 'utf-8', opener=no_link)
  except OSError as e:
    if e.errno != errno.ELOOP:
      raise
    raise ConfigError(f'{path} is a link, through which nothing is written: remove it, or choose another folder'
                      ) from None


def read(path: str, most: int) -> bytes:
  """The bytes of a file, at most that many. Raises OSError where it is a link, a pipe or the like, or has more."""
  with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), 'rb') as f:
    if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
      raise OSError(errno.EINVAL, 'no file', path)
    data = f.read(most + 1)
  if len(data) > most:
    raise OSError(errno.EFBIG, f'more than {most} bytes', path)
  return data
