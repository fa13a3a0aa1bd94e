"""Text as a tree: book -> chapters -> paragraphs -> sentences -> words, and back, byte for byte.

A word is bytes; a node above it is the tuple of its children. Splitting only chooses separators, so that joining puts
back what was there, whatever the text: chapters and paragraphs are joined by an empty line, sentences by a space, but
for those that end in a line feed, and words by a space. A word may be empty (two spaces in a row), and bytes that are
no UTF-8 are bytes like others.
"""

import re
from typing import Iterable, Sequence, Union

Node = Union[bytes, tuple['Node', ...]]
LEVELS = ('word', 'sentence', 'paragraph', 'chapter', 'book')

_HEADING = re.compile(r'(?:(?:chapter|book|part|letter|stave|volume|act|canto)\b[^\n]{0,80}|[ivxlc]+\.?)\n?',
                      re.IGNORECASE)
_LINE = re.compile(r'[^\n]*\n|[^\n]+')
_BORDER = re.compile(r'(?<=[.!?…])["”’\')\]]* (?=["“‘\'(\[—]*[^\W_a-z])')
_ABBREVIATED = re.compile(r'(?:^|[\s"“‘\'(])(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Capt|Col|Gen|Lieut|Sergt|Messrs|Mme|'
                          r'Mlle|vs|etc|[^\W\d_])\.$')


def nodes(text: bytes, level: int) -> list[Node]:
  """The nodes of a level that a text has, in order; whatever is above the level is taken apart.

  ValueError unless level is 0 (words) to 4 (the book).
  """
  if not 0 <= level < len(LEVELS):
    raise ValueError(f'level {level}: expected 0 to {len(LEVELS) - 1}')
  found = [_chapters(text.decode('utf-8', 'surrogateescape'))]
  for _ in range(len(LEVELS) - 1 - level):
    found = [child for node in found for child in node]
  return found


def join(node: Node, level: int) -> bytes:
  """The text of a node of this level: what `nodes` made it of."""
  if level == 0:
    return node
  parts = [join(child, level - 1) for child in node]
  if level == 2:
    return b''.join(part if not i or parts[i - 1].endswith(b'\n') else b' ' + part for i, part in enumerate(parts))
  return (b' ' if level == 1 else b'\n\n').join(parts)


def cut(units: Sequence, most: int) -> list[tuple[Sequence, bool]]:
  """Units in pieces of at most `most`, each with whether it is the last; no units are one empty piece."""
  starts = range(0, max(len(units), 1), most)
  return [(units[i:i + most], i + most >= len(units)) for i in starts]


def _chapters(text: str) -> Node:
  chapters = [[]]
  for paragraph in text.split('\n\n'):
    if chapters[-1] and _HEADING.fullmatch(paragraph):
      chapters.append([])
    chapters[-1].append(_sentences(paragraph))
  return tuple(tuple(chapter) for chapter in chapters)


def _sentences(paragraph: str) -> Node:
  return tuple(_words(sentence) for line in _LINE.findall(paragraph) or [''] for sentence in _bordered(line))


def _bordered(line: str) -> Iterable[str]:
  start = 0
  for found in _BORDER.finditer(line):
    end = found.end() - 1
    if not _ABBREVIATED.search(line[max(start, end - 10):end]):
      yield line[start:end]
      start = end + 1
  yield line[start:]


def _words(sentence: str) -> Node:
  return tuple(word.encode('utf-8', 'surrogateescape') for word in sentence.split(' '))
