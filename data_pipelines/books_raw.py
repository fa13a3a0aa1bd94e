"""Books, songs and articles, raw files -> writings, each with its split.

  .txt     a book: its chapters (see trees.py) are writings, or the whole of it is one; of whatever bytes
  .jsonl   a writing a line:
             {"text": TEXT}
             {"title": TEXT, "stanzas": [[LINE, ...], ...]}                                    a song
             {"title": TEXT, "sections": [{"heading": TEXT, "paragraphs": [TEXT, ...]}, ...]}  an article
           What else an object has is not read. Titles, headings (where not empty), stanzas and paragraphs are joined by
           an empty line, the lines of a stanza by a line feed.

A line end of two bytes becomes a single line feed, and a byte order mark is left out; nothing else changes.

Files or folders named train, valid, validation, val or test (with a number or the like behind it) are that split. All
other writings are divided by the SHA-256 of their text, 80 / 10 / 10, as documents.py does it.
"""

import codecs
import json
import os
from typing import Any, Iterator, NamedTuple

from data_pipelines import DataError, documents, trees

KINDS = ('.txt', '.jsonl')
_FORMS = ('{"text": "..."}', '{"title": "...", "stanzas": [["...", ...], ...]}',
          '{"title": "...", "sections": [{"heading": "...", "paragraphs": ["...", ...]}, ...]}')


class Writing(NamedTuple):
  """A text under its title, or FILE#CHAPTER, or FILE:LINE; its split, and where it begins (file, line from 1 on)."""
  name: str
  text: bytes
  split: str
  file: str
  line: int


def files(raw_dir: str) -> tuple[dict[str, str], list[str]]:
  """The files of writings of a folder or one file: (path -> split named, or ''), and files of other kinds.

  Raises DataError where there is none.
  """
  return documents.files(raw_dir, KINDS)


def read(raw_dir: str, whole: bool = False) -> Iterator[Writing]:
  """All writings, file by file, in the order of their names, empty ones too.

  Args:
    raw_dir: a folder or a file. FILE of a name is the path from there.
    whole: books are one writing each.

  Raises:
    DataError: there is no file, or one can't be read, or a line has none of the forms; names file and line.
  """
  top = raw_dir if os.path.isdir(raw_dir) else os.path.dirname(raw_dir)
  for path, split in files(raw_dir)[0].items():
    name = os.path.relpath(path, top)
    found = _lines(path, name) if path.lower().endswith('.jsonl') else _book(path, name, whole)
    for title, text, line in found:
      yield Writing(title, text, split or documents.by_hash(text), path, line)


def _book(path: str, name: str, whole: bool) -> Iterator[tuple[str, bytes, int]]:
  try:
    with open(path, 'rb') as f:
      text = f.read(documents.BYTES_MAX + 1)
  except OSError as e:
    raise DataError(f'{path}: cannot be read: {e.strerror}') from None
  if len(text) > documents.BYTES_MAX:
    raise DataError(f'{path}: a book of more than {documents.BYTES_MAX} bytes; cut it into several')
  text = text.removeprefix(codecs.BOM_UTF8).replace(b'\r\n', b'\n')
  if whole:
    yield name, text, 1
    return
  line = 1
  for number, chapter in enumerate(trees.nodes(text, 3), 1):
    part = trees.join(chapter, 3)
    yield f'{name}#{number}', part, line
    line += part.count(b'\n') + 2          # and the empty line between chapters


def _lines(path: str, name: str) -> Iterator[tuple[str, bytes, int]]:
  for number, line in documents.lines(path):
    if not line.strip():
      continue
    try:
      found = json.loads(line)
      text, title = _text(found).encode('utf-8'), found.get('title')
      title = title if isinstance(title, str) else ''
      title.encode('utf-8')                # it must be possible, too
    except UnicodeEncodeError:
      raise DataError(f'{path}:{number}: a text in it has half of a surrogate pair, which is no character') from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
      raise DataError(f'{path}:{number}: expected one of {", ".join(_FORMS)} on a line of its own, found '
                      f'{line.strip()[:60]!r}') from None
    yield title or f'{name}:{number}', text.replace(b'\r\n', b'\n'), number


def _text(found: Any) -> str:
  """The text of an object; a ValueError, TypeError, KeyError or AttributeError where it has none of the forms."""
  kind, = found.keys() & {'text', 'stanzas', 'sections'}
  if kind == 'text':
    return _list([found['text']], str)[0]
  parts = [found['title']]
  for part in _list(found[kind]):
    if kind == 'stanzas':
      parts.append('\n'.join(_list(part, str)))
    else:
      parts += [part['heading']] * (part['heading'] != '') + _list(part['paragraphs'])
  return '\n\n'.join(_list(parts, str)[not parts[0]:])


def _list(found: Any, kind: type = object) -> list:
  if not isinstance(found, list) or not all(isinstance(part, kind) for part in found):
    raise TypeError
  return found
