"""The files below a folder of somebody's; none is passed over without a word."""

import os

from data_pipelines import DataError

LINK = 'a link to a folder, which is not followed; put the folder itself there'

def files(folder: str) -> list[str]:
  """Paths of the files of a folder and its folders, in the order of their names; hidden ones too.

  Raises DataError naming a folder that can't be read, or that is a link: links may lead round in circles, so none is
  followed. What lies in hidden folders, such as .git, is of no concern.
  """
  found = []
  for where, folders, names in os.walk(folder, onerror=_unread):
    for name in (f for f in folders if not f.startswith('.') and os.path.islink(os.path.join(where, f))):
      raise DataError(f'{os.path.join(where, name)}: {LINK}')
    folders[:] = [f for f in folders if not f.startswith('.')]
    found += [os.path.join(where, name) for name in names]
  return sorted(found)


def regular(path: str) -> None:
  """Raises DataError unless `path` is a file, or a link to one: a pipe would be waited for without end."""
  if not os.path.isfile(path):
    raise DataError(f'{path}: cannot be read: it is no file, or a link to none')


def _unread(error: OSError) -> None:
  raise DataError(f'{error.filename}: cannot be read: {error.strerror}') from None
