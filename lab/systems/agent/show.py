"""Text beside what its vectors say; records of predictions, and scores of a whole split."""

import numpy as np
from data_pipelines import packs, trees

SHOWN = 3        # nodes of a level and pack


def text(last, cont, joins, spelt, level) -> bytes:
  """The text of a node of a level: last, cont and joins, which may be None, lists by level k of [P_k], and spelt
  u8[P_0, L_0]; see passes.py."""
  def row(k, place):
    if joins[k] is not None and joins[k][place]:
      return None
    count = int(last[k][place])
    if not k:
      units = spelt[place, :count].tobytes()
    else:
      width = len(last[k - 1]) // len(last[k])
      units = tuple(row(k - 1, place * width + i) for i in range(count))
    return packs.Row(units, not cont[k][place])
  return trees.join(tuple(packs.split([row(level, 0)], level)), level + 1)


def _found(outputs, i, level, n) -> bytes:
  """Text n of a level of pack i; see predict.py for the outputs."""
  last, cont, joins = ([outputs[f'{name}_{level}_{k}'][i, n] if f'{name}_{level}_{k}' in outputs else None
                        for k in range(level + 1)] for name in ('last', 'cont', 'join'))
  return text(last, cont, joins, outputs[f'bytes_{level}'][i, n], level)


def _true(batch, i, level) -> list[bytes]:
  """The text of each row of a level."""
  ids, counts = ([batch[f'{name}_{k}'][i] for k in range(level + 1)] for name in ('ids', 'counts'))
  rows = packs.unpacked(packs.Pack(tuple(ids), tuple(counts), ()))[level]
  return [trees.join(tuple(packs.split([row], level)), level + 1) for row in rows]


def readable(data: bytes) -> str:
  """Bytes as a text in one line; what is no UTF-8, or can't be seen, as an escape."""
  told = data.decode('utf-8', 'backslashreplace').replace('\n', '\\n').replace('\r', '\\r')
  return ''.join(c if c.isprintable() else f'\\x{ord(c):02x}' for c in told)


def records(config, outputs, batch):
  """A record a pack: of an evaluation what the scores are made of, else what the verb asks for."""
  levels = range(len(config.data.rows))
  for i in range(len(batch['mask'])):
    if 'name' in batch:
      yield {'name': batch['name'][i], **_predicted(config, outputs, batch, i)}
      continue
    record = {}
    for level in levels:
      there = batch[f'counts_{level}'][i] > 0
      record[f'share_{level}'], record[f'replaced_{level}'] = (
          [round(float(x), 4) for x in outputs[f'{name}_{level}'][i][there]] for name in ('share', 'replaced'))
    yield record


def _predicted(config, outputs, batch, i):
  """What a verb found of one item, JSON-able; texts are told as `readable`."""
  verb, names = config.predict.verb, [f'{name}s' for name in trees.LEVELS]
  if verb in ('decode', 'generate'):
    level = batch['at'][i] if verb == 'decode' else len(config.data.rows) - 1
    return {'text': readable(_found(outputs, i, level, 0))}
  if verb == 'interpolate':
    level = min(1, len(config.data.rows) - 1)
    return {'texts': [readable(_found(outputs, i, level, n)) for n in range(config.predict.steps)]}
  record = {}
  for level in range(len(config.data.rows) - 1, -1, -1):
    truth = _true(batch, i, level)
    told = [readable(t) for t in truth]
    if verb == 'encode':
      nodes = [{'text': t, 'vector': [round(float(x), 6) for x in v]}
               for t, v in zip(told, outputs[f'vector_{level}'][i])]
    elif verb == 'neighbours':
      nodes = [{'text': t, 'near': [{'text': told[n], 'cosine': round(float(c), 4)} for n, c in zip(*near) if n >= 0]}
               for t, *near in zip(told, outputs[f'near_{level}'][i], outputs[f'likeness_{level}'][i])]
    else:
      found = [_found(outputs, i, level, n) for n in range(len(truth))]
      nodes = [{'text': t, 'rebuilt': readable(f), 'exact': f == w} for t, w, f in zip(told, truth, found)]
    record[names[level]] = nodes
  return record


def score(config, found):
  """Of each level how well the checker tells rows with replaced units from others: the area under its ROC curve."""
  found, scores = list(found), {}
  for level in range(len(config.data.rows)):
    share, label = (np.concatenate([np.array(r[f'{name}_{level}']) for r in found]) for name in ('share', 'replaced'))
    area = auc(share, label > 0)
    if area is not None:
      scores[f'coherence_auc_{level}'] = area
  return scores


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
  """The chance that one that is labelled, bool[N], scores f64[N] more than one that is not; of ties a half.

  None where one of the two kinds is missing. By ranks (Mann and Whitney 1947).
  """
  positive = int(labels.sum())
  negative = len(labels) - positive
  if not positive or not negative:
    return None
  _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
  rank = (np.cumsum(count) - (count - 1) / 2)[place]
  return float((rank[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))


def picture(config, outputs, batch):
  """name -> text: nodes of each level beside what their vectors say, of an evaluation a few; or the way between two."""
  drawn, verb = {}, config.predict.verb if 'name' in batch else 'rebuild'
  for i, number in enumerate(batch.get('record', range(len(batch['mask'])))):
    if verb == 'rebuild':
      drawn[f'{number:06d}'] = '\n'.join(_beside(config, outputs, batch, i, None if 'name' in batch else SHOWN))
    elif verb in ('interpolate', 'decode', 'generate'):
      found = _predicted(config, outputs, batch, i)
      drawn[f'{number:06d}'] = '\n'.join(found.get('texts', []) or [found['text']])
  return drawn


def _beside(config, outputs, batch, i, most):
  for level in range(len(config.data.rows) - 1, -1, -1):
    yield trees.LEVELS[level].upper()
    for n, truth in enumerate(_true(batch, i, level)[:most]):
      said = _found(outputs, i, level, n)
      yield f'  text    {readable(truth)}'
      yield f'  vector  {readable(said) if said != truth else "(the same)"}'
