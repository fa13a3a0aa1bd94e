"""Labelled sentences made of the books that ship with the lab: what stands in for CoLA and SST-2 by default.

They are good for seeing fine-tuning work, not for comparing scores with anybody's.
"""

import os
import re
from typing import Iterator

from data_pipelines import documents

WORDS = range(5, 21)         # of a sentence
_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z“‘])')


def _dracula(folder: str) -> Iterator[str]:
  """The sentences of the novel; a line is a paragraph."""
  for _, line in documents.lines(os.path.join(folder, 'books', 'dracula.txt')):
    if not line.startswith(('=', 'Chapter ')):
      yield from _END.split(line.strip())


def _shakespeare(folder: str) -> Iterator[str]:
  """The sentences of the plays, without the speakers' names: a speech is a name, a colon, and lines of verse."""
  text = ''.join(line for _, line in documents.lines(os.path.join(folder, 'shakespeare', 'input.txt')))
  for speech in text.split('\n\n'):
    yield from _END.split(' '.join(line.strip() for line in speech.split('\n') if not line.endswith(':')).strip())


def _fitting(found: Iterator[str]) -> list[str]:
  """Those of the wanted length, each once."""
  return list(dict.fromkeys(' '.join(s.split()) for s in found if len(s.split()) in WORDS))


def exchanged(folder: str) -> tuple[tuple[str, ...], Iterator[tuple[str, str, int]]]:
  """Sentences of the novel, in half of them two words that stand side by side have changed places.

  Returns the labels' names, and (what the split hangs on, text, label) of each sentence. All hangs on a hash of it.
  """
  def rows():
    for text in _fitting(_dracula(folder)):
      draw, words = documents.digest(text)[8:], text.split(' ')
      # the last word stays, for it carries the full stop
      places = [i for i in range(len(words) - 2) if words[i].lower() != words[i + 1].lower()]
      good = draw[0] % 2 or not places
      if not good:
        at = places[int.from_bytes(draw[1:5]) % len(places)]
        words[at:at + 2] = words[at + 1], words[at]
      yield text, ' '.join(words), int(bool(good))
  return ('unacceptable', 'acceptable'), rows()


def authors(folder: str) -> tuple[tuple[str, ...], Iterator[tuple[str, str, int]]]:
  """Sentences of both books; the label tells which. Returns what `exchanged` does."""
  def rows():
    for label, found in enumerate((_dracula, _shakespeare)):
      for text in _fitting(found(folder)):
        yield text, text, label
  return ('stoker', 'shakespeare'), rows()


TASKS = {'cola': exchanged, 'sst2': authors}
