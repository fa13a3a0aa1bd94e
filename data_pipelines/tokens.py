"""Tokenizers: text <-> ids. Three kinds, all kept as a tokenizer.json of the `tokenizers` library:

  wordpiece  BERT's, uncased: lower case, accents stripped, words divided into pieces
  bpe        GPT-2's: byte pairs, any text comes back exactly
  chars      an id a character, as in nanoGPT's Shakespeare

Control tokens written in a text ("[MASK]", "<|endoftext|>") are plain text to all of them.
"""

import collections
import hashlib
import json
import os
import re
from typing import Iterable, Iterator, Mapping, Sequence

import numpy as np

from data_pipelines import DataError, documents
from data_pipelines.pipeline import tensorflow

KINDS = ('wordpiece', 'bpe', 'chars')
FILE = 'tokenizer.json'
_NAMES = {'wordpiece': {'pad': '[PAD]', 'cls': '[CLS]', 'sep': '[SEP]', 'mask': '[MASK]', 'unk': '[UNK]'},
          'bpe': {'eos': '<|endoftext|>'}, 'chars': {}}
_MODELS = {'WordPiece': 'wordpiece', 'BPE': 'bpe', 'WordLevel': 'chars'}
_PIECE = 1 << 16             # characters that go to a trainer at once
_ENDLESS = re.compile(r'\S{1000}')     # is cut there for a trainer, whose time is the square of a word's length
_WORD = 100                  # characters of a word; BERT knows no longer one
_SHIFT = 0xF0000             # private code points; BERT's cleaning removes them from texts


class Tokenizer:
  """Text <-> ids.

  Attributes:
    kind: 'wordpiece', 'bpe' or 'chars'.
    size: number of ids.
    pad, unk, cls, sep, mask, eos: ids of control tokens, -1 where there is none.
    special: those of them that there are.
    fingerprint: a short hash of the JSON.
  """

  def __init__(self, text: str, where: str):
    """From the text of a tokenizer.json; `where` it comes from, for messages. Raises DataError."""
    self._text = text
    self.fingerprint = hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]
    found = _parsed(text, where)
    self.kind = _kind(found, where)
    names = _NAMES[self.kind] or {'unk': found['model'].get('unk_token')}
    for added in found.get('added_tokens') or ():
      added['special'] |= added['content'] in names.values()      # else they would be found in texts
    self._library = _library(found, where)
    vocabulary = self._library.get_vocab(with_added_tokens=True)
    self.size = len(vocabulary)
    if sorted(vocabulary.values()) != list(range(self.size)):
      raise DataError(f'{where}: its {self.size} ids are not 0 to {self.size - 1}; one is missing or used twice')
    for name in ('pad', 'unk', 'cls', 'sep', 'mask', 'eos'):
      setattr(self, name, vocabulary.get(names.get(name), -1))
    for word in (w for w in names.values() if self.kind != 'chars' and w not in vocabulary):
      raise DataError(f'{where}: no token {word}; a vocabulary of kind {self.kind} needs {" ".join(names.values())}')
    self.special = frozenset(i for i in (self.pad, self.unk, self.cls, self.sep, self.mask, self.eos) if i >= 0)
    if self.kind == 'chars':
      self._characters(vocabulary, where)

  def _characters(self, vocabulary: Mapping[str, int], where: str) -> None:
    """Tables between code points and ids; NumPy does what would need a Python object a character."""
    single = {ord(w): i for w, i in vocabulary.items() if len(w) == 1}
    wrong = [w for w, i in vocabulary.items() if len(w) != 1 and i not in self.special]
    if wrong:
      raise DataError(f'{where}: a vocabulary of words ({wrong[0]!r}); of that model only single characters are read')
    self._codes = np.array(sorted(single), np.uint32)
    self._ids = np.array([single[c] for c in sorted(single)], np.int32)

  def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Ids i32[n] of each text, without control tokens. Raises DataError for a character that can't be encoded."""
    if self.kind == 'chars':
      return [self._places(text) for text in texts]
    try:
      found = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
    except (UnicodeEncodeError, TypeError):
      for text in texts:
        _utf32(text)
      raise
    return [np.array(e.ids, np.int32) for e in found]

  def _places(self, text: str) -> np.ndarray:
    codes = np.frombuffer(_utf32(text), '<u4')
    at = np.searchsorted(self._codes, codes).clip(max=len(self._codes) - 1)
    known = self._codes[at] == codes
    if self.unk < 0 and not known.all():
      first = int(np.argmin(known))
      raise DataError(f'the character {text[first]!r} (U+{ord(text[first]):04X}), at {first} of a text, is none of the '
                      f'{self.size} of the tokenizer; train one on texts that have it, or use one of kind bpe')
    return np.where(known, self._ids[at], np.int32(self.unk))

  def decode(self, ids: Sequence[int]) -> str:
    """The text of ids i[n], control tokens left out. Raises ValueError for an id that there is not."""
    ids = [int(i) for i in ids]
    if ids and not 0 <= min(ids) <= max(ids) < self.size:
      raise ValueError(f'ids {min(ids)} to {max(ids)}; the tokenizer has 0 to {self.size - 1}')
    ids = [i for i in ids if i not in self.special]
    if self.kind == 'chars':
      return ''.join(self._library.id_to_token(i) for i in ids)
    return self._library.decode(ids, skip_special_tokens=False)

  def word(self, token: int) -> str:
    """A token as the vocabulary writes it: '##ing', or 'Ġthe' where Ġ is a space (bpe writes bytes as letters)."""
    found = self._library.id_to_token(int(token))
    if found is None:
      raise ValueError(f'id {token}; the tokenizer has 0 to {self.size - 1}')
    return found

  def json(self) -> str:
    """The text of its tokenizer.json."""
    return self._text

  def save(self, path: str) -> None:
    """Writes its tokenizer.json under that name."""
    with open(path, 'w', encoding='utf-8', newline='') as f:
      f.write(self._text)

  def files(self) -> dict[str, str]:
    """Name -> text of the vocabulary's files as BERT and GPT-2 were published, which transformers and `load` read.

    Raises DataError for characters, which neither has.
    """
    if self.kind == 'chars':
      raise DataError('a tokenizer of characters: there are no files of that kind; keep its tokenizer.json')
    found = json.loads(self._text)
    entries = found['model']['vocab']
    if self.kind == 'wordpiece':
      facts = {'tokenizer_class': 'BertTokenizer', 'do_lower_case': bool(found['normalizer']['lowercase'])}
      own = {'vocab.txt': ''.join(f'{w}\n' for w in sorted(entries, key=entries.get))}
    else:
      pairs = [m if isinstance(m, str) else ' '.join(m) for m in found['model']['merges']]
      own = {'vocab.json': json.dumps(entries, ensure_ascii=False),
             'merges.txt': ''.join(f'{line}\n' for line in ('#version: 0.2', *pairs))}
      end = self.word(self.eos)
      facts = {'tokenizer_class': 'GPT2Tokenizer', 'unk_token': end, 'bos_token': end, 'eos_token': end}
    return own | {'tokenizer_config.json': json.dumps(facts, indent=2)}


def _utf32(text: str) -> bytes:
  try:
    return text.encode('utf-32-le')
  except UnicodeEncodeError as e:
    raise DataError(f'half of a surrogate pair ({text[e.start]!r}) at {e.start} of a text; that is no character'
                    ) from None


def _unique(pairs: list[tuple]) -> dict:
  found = dict(pairs)
  if len(found) != len(pairs):
    twice, = [k for k, n in collections.Counter(k for k, _ in pairs).most_common(1) if n > 1]
    raise ValueError(f'{twice!r} is there twice')
  return found


def _parsed(text: str, where: str) -> dict:
  try:
    found = json.loads(text, object_pairs_hook=_unique)
    if not isinstance(found, dict):
      raise ValueError('no object')
    return found
  except json.JSONDecodeError as e:
    raise DataError(f'{where}:{e.lineno}: no JSON ({e.msg}, column {e.colno})') from None
  except (ValueError, RecursionError) as e:
    raise DataError(f'{where}: broken ({e})') from None


def _kind(found: dict, where: str) -> str:
  model = found.get('model')
  name = model.get('type') if isinstance(model, dict) else None
  if name not in _MODELS:
    raise DataError(f'{where}: a tokenizer with the model {name!r}; expected {", ".join(_MODELS)}')
  if name == 'BPE' and '"ByteLevel"' not in json.dumps([found.get('pre_tokenizer'), found.get('decoder')]):
    raise DataError(f'{where}: byte pairs of characters; only those of bytes (GPT-2 and its kind) are read')
  return _MODELS[name]


def _library(found: dict, where: str):
  os.environ.setdefault('TOKENIZERS_PARALLELISM', 'true')      # else it warns where a process is started later
  import tokenizers
  try:
    library = tokenizers.Tokenizer.from_str(json.dumps(found))
  except Exception as e:     # the library raises nothing narrower
    raise DataError(f'{where}: no tokenizer ({" ".join(str(e).split())[:150]})') from None
  library.no_truncation()
  library.no_padding()
  library.encode_special_tokens = True         # control tokens in a text are text
  return library


def _json(model: dict, normalizer, pre_tokenizer, decoder) -> str:
  return json.dumps({
      'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': [], 'normalizer': normalizer,
      'pre_tokenizer': pre_tokenizer, 'post_processor': None, 'decoder': decoder, 'model': model},
                    ensure_ascii=False, separators=(',', ':'))


_BERT = {'type': 'BertNormalizer', 'clean_text': True, 'handle_chinese_chars': True, 'strip_accents': None,
         'lowercase': True}
_BYTES = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}


def _wordpiece(words: Sequence[str], where: str) -> Tokenizer:
  model = {'type': 'WordPiece', 'unk_token': '[UNK]', 'continuing_subword_prefix': '##',
           'max_input_chars_per_word': _WORD, 'vocab': {w: i for i, w in enumerate(words)}}
  return Tokenizer(_json(model, _BERT, {'type': 'BertPreTokenizer'},
                         {'type': 'WordPiece', 'prefix': '##', 'cleanup': True}), where)


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], where: str) -> Tokenizer:
  model = {'type': 'BPE', 'dropout': None, 'unk_token': None, 'continuing_subword_prefix': None,
           'end_of_word_suffix': None, 'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
           'vocab': vocabulary, 'merges': [list(m) for m in merges]}
  return Tokenizer(_json(model, None, _BYTES, _BYTES), where)


def _chars(characters: Sequence[str], where: str) -> Tokenizer:
  model = {'type': 'WordLevel', 'vocab': {c: i for i, c in enumerate(characters)}, 'unk_token': ''}
  each = {'type': 'Split', 'pattern': {'Regex': r'[\s\S]'}, 'behavior': 'Isolated', 'invert': False}
  return Tokenizer(_json(model, None, each, {'type': 'Fuse'}), where)


def load(path: str) -> Tokenizer:
  """Reads a tokenizer. Raises DataError naming file and line of what is broken.

  Args:
    path: a tokenizer.json; BERT's vocab.txt (uncased); one of GPT-2's vocab.json or encoder.json and merges.txt or
      vocab.bpe; or a folder of one of these three.
  """
  folder, name = (path, '') if os.path.isdir(path) else os.path.split(path)
  inside = {n: os.path.join(folder, n) for n in os.listdir(folder or '.')} if os.path.isdir(folder or '.') else {}
  pair = [next((inside[n] for n in names if n in inside), '') for names in (
      ('vocab.json', 'encoder.json'), ('merges.txt', 'vocab.bpe'))]
  if not name:
    name = next((n for n in (FILE, 'vocab.txt') if n in inside), '')
    if not name and not any(pair):
      raise DataError(f'{path}: no tokenizer there; expected {FILE}, vocab.txt, or vocab.json and merges.txt')
  elif not os.path.isfile(path):
    raise DataError(f'{path}: no such file or folder; expected a tokenizer, or one of {", ".join(KINDS)} to train one')
  if not name or name in ('vocab.json', 'encoder.json', 'merges.txt', 'vocab.bpe'):
    return _gpt2(folder, *pair)
  found = os.path.join(folder, name)
  if name.endswith('.txt'):
    return _wordpiece(_vocabulary(found), found)
  return Tokenizer(''.join(line for _, line in documents.lines(found)), found)


def kept(folder: str) -> Tokenizer:
  """The tokenizer.json of a prepared folder, which may lie in the cloud. Raises DataError where there is none."""
  path, tf = os.path.join(folder, FILE), tensorflow()
  try:
    with tf.io.gfile.GFile(path, 'rb') as f:
      return Tokenizer(f.read().decode('utf-8'), path)
  except tf.errors.NotFoundError:
    raise DataError(f'{path} is missing: what lies there was made without a tokenizer') from None
  except UnicodeDecodeError:
    raise DataError(f'{path} is not UTF-8; it has changed since it was prepared') from None


def _vocabulary(path: str) -> list[str]:
  """The words of a vocab.txt, one a line."""
  found = {}
  for number, line in documents.lines(path):
    word = line.removesuffix('\n')
    if not word:
      raise DataError(f'{path}:{number}: an empty line; a vocabulary has a token a line')
    if word in found:
      raise DataError(f'{path}:{number}: {word!r} is there already, in line {found[word]}')
    found[word] = number
  return list(found)


def _gpt2(folder: str, vocabulary: str, merges: str) -> Tokenizer:
  if not vocabulary or not merges:
    raise DataError(f'{folder}: {"vocab.json (encoder.json)" if merges else "merges.txt (vocab.bpe)"} is missing; '
                    'byte pairs need both files')
  ids = _parsed(''.join(line for _, line in documents.lines(vocabulary)), vocabulary)
  if not all(type(i) is int for i in ids.values()):
    raise DataError(f'{vocabulary}: expected an object of token -> id')
  found = {}
  for number, line in documents.lines(merges):
    line = line.removesuffix('\n')
    if number == 1 and line.startswith('#version'):
      continue
    parts = tuple(line.split(' '))
    if len(parts) != 2 or not all(p in ids for p in (*parts, ''.join(parts))):
      raise DataError(f'{merges}:{number}: {line[:60]!r}; expected two tokens that {vocabulary} has, and has joined')
    if parts in found:
      raise DataError(f'{merges}:{number}: {line!r} is there already, in line {found[parts]}')
    found[parts] = number
  return _bpe(ids, list(found), vocabulary)


def train(texts: Iterable[str], kind: str, size: int) -> Tokenizer:
  """A tokenizer of at most `size` ids, made of texts; equal texts give equal ones.

  wordpiece has PAD, CLS, SEP, MASK, UNK as 0 to 4, bpe <|endoftext|> as 0, and chars every character of the texts,
  sorted, and nothing else. Raises DataError where `size` is too small, or the texts hold nothing.
  """
  if kind == 'chars':
    found = sorted(set().union(*texts))
    if not 0 < len(found) <= size:
      raise DataError(f'the texts have {len(found)} characters, the vocabulary is to have {size}; --vocabulary must be '
                      'as large, or another kind of tokenizer' if found else 'no text to train a tokenizer on')
    return _chars(found, 'the trained tokenizer')
  least = {'wordpiece': 64, 'bpe': 257}[kind]
  if size < least:
    raise DataError(f'a vocabulary of {size}; a tokenizer of kind {kind} needs at least {least}')
  if kind == 'bpe':
    return _train_bpe(texts, size)
  return _train_wordpiece(texts, size)


def _train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
  from tokenizers import Tokenizer as Library, models, pre_tokenizers, trainers
  library = Library(models.BPE())
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  eos = _NAMES['bpe']['eos']
  library.train_from_iterator(_parts(texts), trainers.BpeTrainer(
      vocab_size=size, min_frequency=2, special_tokens=[eos], show_progress=False,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
  model = json.loads(library.to_str())['model']
  return _bpe(model['vocab'], model['merges'], 'the trained tokenizer')


def _parts(texts: Iterable[str]) -> Iterator[str]:
  for text in texts:
    for part in documents.pieces(text, _PIECE):
      yield _ENDLESS.sub(r'\g<0> ', part)


def _train_wordpiece(texts: Iterable[str], size: int) -> Tokenizer:
  """The library's own trainer gives another vocabulary each time, so its trainer of byte pairs does the work.

  To that a letter within a word is another one than the same letter at its beginning: a private code point.
  """
  from tokenizers import Tokenizer as Library, models, normalizers, pre_tokenizers, trainers
  clean, divide = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
  words = collections.Counter()
  for part in _parts(texts):
    words.update(word for word, _ in divide.pre_tokenize_str(clean.normalize_str(part)) if len(word) <= _WORD)
  control = list(_NAMES['wordpiece'].values())
  first, inner = collections.Counter(), collections.Counter()
  for word, count in words.items():
    first[word[0]] += count
    for c in word[1:]:
      inner[c] += count
  symbols = sorted([(-n, c) for c, n in first.items()] + [(-n, '##' + c) for c, n in inner.items()])
  kept = {s for _, s in symbols[:(size - len(control)) // 2]}       # rare letters leave room for pieces
  shift = {ord(c): _SHIFT + i for i, c in enumerate(sorted(c[2:] for c in kept if len(c) > 1))}
  back = {v: k for k, v in shift.items()}

  def fed():
    for word, count in sorted(words.items()):
      if word[0] in kept and all('##' + c in kept for c in word[1:]):
        text = word[0] + word[1:].translate(shift) + ' '
        for start in range(0, count, _PIECE):
          yield text * min(_PIECE, count - start)
  library = Library(models.BPE())
  library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  library.train_from_iterator(fed(), trainers.BpeTrainer(vocab_size=size - len(control), min_frequency=2,
                                                         show_progress=False))
  found = sorted(library.get_vocab().items(), key=lambda item: item[1])
  pieces = [('##' if ord(w[0]) in back else '') + w.translate(back) for w, _ in found]
  return _wordpiece(control + pieces, 'the trained tokenizer')
