"""Text files -> documents, and the split that each belongs to.

A line of a .jsonl file, {"text": ...}, is a document. So is a text file (.txt, or .raw and .tokens as WikiText has
them), unless it has heading lines as WikiText writes them, ` = Title = ` behind a blank line: each of level 1 starts a
new one.

Files or folders named train, valid, validation, val or test (with a number or the like behind it) are that split. All
other documents are divided by the SHA-256 of their text, 80 / 10 / 10: the same text is always in the same split,
whatever the seed and wherever it lies.
"""

import functools
import hashlib
import json
import os
import re
from typing import Callable, Iterable, Iterator, NamedTuple, Sequence

from data_pipelines import DataError, folders

SPLITS = ('train', 'validation', 'test')
TEXT = ('.txt', '.raw', '.tokens')
BYTES_MAX = 256 << 20      # of a line, and of a file that can only be read whole; larger ones are refused
_NAMED = re.compile(r'(?:wiki\.)?(train|valid|validation|val|test)(?![a-z])', re.IGNORECASE)
_HEADING = re.compile(r' ?= (?!= )\S(?:.*\S)?(?<! =) = ?')
_BORDER = re.compile(r'(?<=[^\W_])[ \n\t]')


class Document(NamedTuple):
  """A text, its split, where it begins (file, and line from 1 on), and whether a name says the split, not its hash."""
  text: str
  split: str
  file: str
  line: int
  named: bool = False


class Survey(NamedTuple):
  """What `survey` counts."""
  documents: dict[str, int]    # of each split that has any
  bytes: dict[str, int]        # of their texts, in UTF-8
  empty: int                   # documents of nothing but white space, which are left out


def lines(path: str) -> Iterator[tuple[int, str]]:
  """Numbers from 1 on and lines of a UTF-8 file, each with its line end, which is always a single line feed.

  A byte order mark is left out. Raises DataError naming file, line and byte where that is no UTF-8.
  """
  at = 0
  folders.regular(path)
  try:
    with open(path, 'rb') as f:
      for number, line in enumerate(iter(functools.partial(f.readline, BYTES_MAX + 1), b''), 1):
        if len(line) > BYTES_MAX:
          raise DataError(f'{path}:{number}: a line of more than {BYTES_MAX} bytes; break it into several')
        try:
          text = line.decode('utf-8')
        except UnicodeDecodeError as e:
          what = 'UTF-16; save it as UTF-8' if number == 1 and line[:2] in (b'\xff\xfe', b'\xfe\xff') else 'not UTF-8'
          raise DataError(f'{path}:{number}: byte {at + e.start} ({line[e.start]:#04x}) is {what}') from None
        at += len(line)
        text = text.removeprefix('\ufeff') if number == 1 else text
        yield number, text[:-2] + '\n' if text.endswith('\r\n') else text
  except OSError as e:
    raise DataError(f'{path}: cannot be read: {e.strerror}') from None


def files(raw_dir: str, kinds: Sequence[str] = (*TEXT, '.jsonl')) -> tuple[dict[str, str], list[str]]:
  """The text files of a folder and its folders, or one file: (path -> split named, or ''), and files of other kinds.

  `kinds` are the ends of names of text files. Paths are in the order of their names. Raises DataError where there is no
  text file, and as folders.files does.
  """
  if os.path.isfile(raw_dir):
    found = [raw_dir]
  else:
    found = folders.files(raw_dir)
  texts = {p: _named(os.path.relpath(p, raw_dir) if p != raw_dir else os.path.basename(p)) for p in found
           if os.path.splitext(p)[1].lower() in kinds and not os.path.basename(p).startswith('.')}
  if not texts:
    raise DataError(f'{raw_dir}: no text there; expected {", ".join(kinds[:-1])} or {kinds[-1]} files')
  return texts, [p for p in found if p not in texts]


def _named(path: str) -> str:
  """The split that a relative path names: its file, or the innermost folder that names one."""
  for part in reversed(path.split(os.sep)):
    found = _NAMED.match(part)
    if found:
      word = found[1].lower()
      return 'validation' if word.startswith('val') else word
  return ''


def read(raw_dir: str) -> Iterator[Document]:
  """All documents, file by file, empty ones too. Raises DataError naming file and line of what is broken."""
  for path, split in files(raw_dir)[0].items():
    whole = _jsonl if path.lower().endswith('.jsonl') else _headed
    for line, text in whole(path):
      yield Document(text, split or by_hash(text), path, line, bool(split))


def _headed(path: str) -> Iterator[tuple[int, str]]:
  start, parts, empty, after_blank = 1, [], True, True
  for number, line in lines(path):
    if after_blank and not empty and _HEADING.fullmatch(line.rstrip('\n')):
      yield start, ''.join(parts)
      start, parts = number, []
    after_blank = not line.strip()
    empty = empty and after_blank       # white space before the first heading belongs to it
    parts.append(line)
  yield start, ''.join(parts)


def _jsonl(path: str) -> Iterator[tuple[int, str]]:
  for number, line in lines(path):
    if not line.strip():
      continue
    try:
      found = json.loads(line)
      text = found['text']
      text.encode('utf-8')
    except UnicodeEncodeError:
      raise DataError(f'{path}:{number}: "text" has half of a surrogate pair, which is no character') from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
      raise DataError(f'{path}:{number}: expected an object {{"text": "..."}} on a line of its own, found '
                      f'{line.strip()[:60]!r}') from None
    yield number, text


def passages(raw_dir: str, characters: int) -> Iterator[Document]:
  """The files cut, at blank lines, into documents of about that many characters: several from a single book."""
  for path in files(raw_dir)[0]:
    start, parts, size = 1, [], 0
    for number, line in lines(path):
      if size >= characters and not line.strip():
        text = ''.join(parts)
        yield Document(text, by_hash(text), path, start)
        start, parts, size = number, [], 0
      parts.append(line)
      size += len(line)
    text = ''.join(parts)
    yield Document(text, by_hash(text), path, start)


def parted(raw_dir: str) -> Iterator[Document]:
  """One lone document as two: its first nine tenths of characters train, the rest validation (as nanoGPT does)."""
  found = [d for d, _ in zip(read(raw_dir), range(2))]
  if len(found) != 1:
    more = f'several documents (one more at {found[1].file}:{found[1].line})' if found else 'no document'
    raise DataError(f'{raw_dir}: {more}; --parity_split divides a single one')
  text, _, file, line, _ = found[0]
  cut = len(text) * 9 // 10
  yield Document(text[:cut], 'train', file, line)
  yield Document(text[cut:], 'validation', file, line + text.count('\n', 0, cut))


def digest(text: str | bytes) -> bytes:
  """The SHA-256 of a text, in UTF-8 or of whatever bytes it is."""
  return hashlib.sha256(text if isinstance(text, bytes) else text.encode('utf-8')).digest()


def by_hash(text: str | bytes) -> str:
  """The split of a text: of ten, eight go to train, one to validation and one to test."""
  place = int.from_bytes(digest(text)[:8]) % 10
  return SPLITS[max(0, place - 7)]


def survey(documents: Callable[[], Iterable[Document]], raw_dir: str) -> Survey:
  """Counts documents. Raises DataError where one text is in two splits, or train is empty without being left out."""
  counts, size, empty, seen, wanted = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0), 0, {}, False
  for text, split, file, line, named in documents():
    wanted |= split == 'train' or not named
    if not text.strip():
      empty += 1
      continue
    found = digest(text)
    before, place = seen.setdefault(found[:16], (split, f'{file}:{line}'))
    if before != split:
      raise DataError(f'{place} ({before}) and {file}:{line} ({split}) hold the same document; a text in two splits '
                      'makes their scores worthless: delete one of them')
    counts[split] += 1
    size[split] += len(text.encode('utf-8'))
  counts = {k: n for k, n in counts.items() if n}
  if not counts:
    raise DataError(f'{raw_dir}: no document but empty ones')
  if wanted and 'train' not in counts:
    raise DataError(f'{raw_dir}: none of its {sum(counts.values())} documents is in the split train, they are divided '
                    'by their hash; name files train, valid and test, or divide a single one with --parity_split')
  return Survey(counts, {k: size[k] for k in counts}, empty)


def pieces(text: str, characters: int) -> Iterator[str]:
  """A text in parts of at least that many characters (the last may be shorter), cut where no token can go across.

  That is before the white space behind a letter or digit: ids of the parts are those of the whole.
  """
  start = 0
  while start < len(text):
    cut = _BORDER.search(text, start + characters)
    stop = cut.start() if cut else len(text)
    yield text[start:stop]
    start = stop
