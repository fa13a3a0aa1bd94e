"""What a user wants predicted of texts: a text as it is, or a file with one in each line."""

import os
from typing import Iterator

import numpy as np

from data_pipelines import DataError

MASK = '[MASK]'
_LINE = 1 << 20      # characters of a line; longer ones are refused


def texts(source: str, words, verb: str, length: int) -> Iterator[dict | DataError]:
  """Batches of one text each, of fixed shapes; a text that can't be used comes as the DataError that says why.

  Args:
    source: a file in UTF-8, a text in each line that is not blank; or a text.
    words: the Tokenizer.
    verb: fill, generate, score or classify.
    length: tokens of a window, S.

  Yields:
    ids, segments i32[1, S] (0: padding), mask f32[1], and for the host text [str]. fill: places i32[1, S] and weights
    f32[1, S] of the masks. generate: count i32[1]. score: count, labels i32[1, S] and weights f32[1, S].
  """
  if words is None:
    raise DataError('the run has no tokenizer, for its data set was made of ids: there is nothing to read a text with')
  for where, text in _lines(source):
    try:
      yield {**_row(words, verb, length, text), 'text': [text], 'write': print}
    except DataError as e:
      yield DataError(f'{where}: {e}')


def _lines(source):
  if not os.path.exists(source):
    if os.path.splitext(source)[1] in ('.txt', '.tsv', '.jsonl') and ' ' not in source:
      raise DataError(f'--input={source}: no such file')
    yield '--input', source
    return
  if os.path.isdir(source):
    raise DataError(f'--input={source}: a folder; expected a text, or a file with one in each line')
  with open(source, 'rb') as f:
    most = 4 * _LINE + 2                       # bytes: no character has more than 4
    for number, line in enumerate(iter(lambda: f.readline(most), b''), 1):
      where = f'{source}:{number}'
      if len(line) == most and not line.endswith(b'\n'):
        yield where, DataError(f'more than {_LINE} characters in a line; the rest of the file is not read')
        return
      try:
        text = line.decode('utf-8-sig' if number == 1 else 'utf-8').rstrip('\r\n')
      except UnicodeDecodeError as e:
        yield where, DataError(f'byte {e.start} of the line is not UTF-8')
        continue
      if text.strip():
        yield where, text


def _row(words, verb, length, text):
  if isinstance(text, DataError):
    raise text
  if len(text) > _LINE:
    raise DataError(f'{len(text)} characters in a line; at most {_LINE} are read')
  if verb == 'fill':
    parts = words.encode(text.split(MASK))
    ids = np.concatenate([x for part in parts for x in (part, [words.mask])][:-1])
  else:
    ids = words.encode([text])[0]
  if verb in ('fill', 'classify') and words.cls >= 0:
    ids = np.concatenate([[words.cls], ids, [words.sep]])
  elif verb == 'classify' and words.eos >= 0:
    ids = np.concatenate([ids, [words.eos]])
  if verb in ('generate', 'score') and words.eos >= 0:
    ids = np.concatenate([[words.eos], ids])             # documents begin after one
  limit = length + (verb == 'score')
  if verb == 'generate':
    ids = ids[-(length - 1):]                            # the end of a long prompt is what goes on
  if len(ids) > limit:
    raise DataError(f'{len(ids)} tokens; the model reads {limit}')
  if not len(ids) or verb == 'score' and len(ids) < 2:
    raise DataError('no text in it')
  fed = ids[:-1] if verb == 'score' else ids
  row = np.full((2, 1, length), 0, np.int32)
  row[0, 0, :] = max(words.pad, 0)
  row[0, 0, :len(fed)], row[1, 0, :len(fed)] = fed, 1
  found = {'ids': row[0], 'segments': row[1], 'mask': np.ones(1, np.float32)}
  if verb == 'fill':
    return found | _masks(ids, words.mask, length)
  if verb in ('generate', 'score'):
    found['count'] = np.array([len(fed)], np.int32)
  if verb == 'score':
    labels, weights = np.zeros((1, length), np.int32), np.zeros((1, length), np.float32)
    labels[0, :len(fed)], weights[0, :len(fed)] = ids[1:], 1
    found |= {'labels': labels, 'weights': weights}
  return found


def _masks(ids, mask, length):
  places = np.flatnonzero(ids == mask)
  if not len(places):
    raise DataError(f'no {MASK} in it: write one where a word is to be found')
  out, weights = np.zeros((1, length), np.int32), np.zeros((1, length), np.float32)
  out[0, :len(places)], weights[0, :len(places)] = places, 1
  return {'places': out, 'weights': weights}
