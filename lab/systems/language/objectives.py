"""What is learnt and measured: masked words, next words, labels. All numbers are sums (total, weight) over a batch."""

import logging
import math

from lab.metrics import ratios
from lab.nn import losses


def masked(net, params, batch, rngs=None):
  """'mlm': cross-entropy in nats at the masked places, and how many are guessed right.

  In training from logits in the dtype of the products, in evaluation from float32 ones.
  """
  if rngs is not None:
    return counted(*net.apply({'params': params}, batch['ids'], batch['segments'], batch['labels'], batch['places'],
                              True, method='nats', rngs=rngs), batch, 'mlm')
  logits = net.apply({'params': params}, batch['ids'], batch['segments'], batch['places'], method='masked')
  return counted(*judged(logits, batch['labels']), batch, 'mlm')


def following(net, params, batch, rngs=None):
  """'gpt': cross-entropy in nats of every next token, and how many are the likeliest; as `masked`."""
  if rngs is not None:
    return counted(*net.apply({'params': params}, batch['ids'], batch['segments'], batch['labels'], None, True,
                              method='nats', rngs=rngs), batch, 'gpt')
  logits = net.apply({'params': params}, batch['ids'], batch['segments'], method='following')
  return counted(*judged(logits, batch['labels']), batch, 'gpt')


def labelled(net, params, batch, rngs=None):
  """'classify': cross-entropy in nats of the label, and the confusion matrix as confusion/TRUE_GUESSED."""
  logits = net.apply({'params': params}, batch['ids'], batch['segments'], rngs is not None, method='classify',
                     rngs=rngs)
  mask, weight = batch['mask'], batch['mask'].sum()
  nats, guess = losses.cross_entropy(logits, batch['label']), logits.argmax(-1)
  counts = {f'confusion/{t}_{g}': (((batch['label'] == t) & (guess == g)) * mask).sum()
            for t in range(net.labels) for g in range(net.labels)}
  return {'classify': ((nats * mask).sum(), weight)}, {
      'accuracy': (((guess == batch['label']) * mask).sum(), weight),
      'truncated': ((batch['truncated'] * mask).sum(), weight), **{k: (v, weight) for k, v in counts.items()}}


log = logging.getLogger(__name__)
OBJECTIVES = {'mlm': masked, 'gpt': following, 'classify': labelled}


def judged(logits, labels):
  """Nats f32[B, n] and whether right bool[B, n], of logits f32[B, n, V] for labels i32[B, n]."""
  return losses.cross_entropy(logits, labels), logits.argmax(-1) == labels


def counted(nats, right, batch, name):
  """Terms and sums of what labels cost, f32[B, n], and whether they were guessed, bool[B, n], by their weights."""
  weights = batch['weights'] * batch['mask'][:, None]
  return ({name: ((nats * weights).sum(), weights.sum())},
          {'accuracy': ((right * weights).sum(), weights.sum())})


def finish(objective: str, size: float, totals) -> dict[str, float]:
  """The scores of a whole split.

  Args:
    size: bytes of the split's text, for bits_per_byte; 0: not known.
    totals: sums of `loss` (nats) and of what the objective's function gives.
  """
  found = ratios({k: v for k, v in totals.items() if not k.startswith('confusion/')})
  if objective == 'classify':
    counts = {k.removeprefix('confusion/'): v[0] for k, v in totals.items() if k.startswith('confusion/')}
    number = math.isqrt(len(counts))
    confusion = [[counts[f'{t}_{g}'] for g in range(number)] for t in range(number)]
    found['mcc'] = matthews(confusion)
    _doubt(confusion, found['accuracy'])
  elif 'loss' in found:
    found['perplexity'] = math.exp(min(found['loss'], 700.0))
    if objective == 'gpt' and size:
      found['bits_per_byte'] = totals['loss'][0] / math.log(2) / size
  return found


def _doubt(confusion, accuracy: float) -> None:
  """Says so where the accuracy is so far below chance that the labels may be in another order than the model's.

  Chance is 1 / K for K classes of about one size: none has half as much again as its share. Far is three deviations of
  as many guesses.
  """
  sizes, chance = [sum(row) for row in confusion], 1 / max(1, len(confusion))
  total = sum(sizes)
  if total and max(sizes) <= 1.5 * chance * total and accuracy < chance - 3 * (chance * (1 - chance) / total)**0.5:
    log.warning('an accuracy of %.3g is below chance, %.3g: are the labels of the data those of the model, in the same '
                'order (config.data.labels)?', accuracy, chance)


def matthews(confusion) -> float:
  """Matthews' correlation of a confusion matrix [true][guessed] of counts; 0 where a factor is 0.

  Of two classes (TP TN - FP FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)) (Matthews 1975); of more the form of
  Gorodkin 2004, R_K, which is the same for two.
  """
  true = [sum(row) for row in confusion]
  guessed = [sum(column) for column in zip(*confusion)]
  total, right = sum(true), sum(confusion[i][i] for i in range(len(confusion)))
  covariance = right * total - sum(t * g for t, g in zip(true, guessed))
  factors = (total**2 - sum(g * g for g in guessed)) * (total**2 - sum(t * t for t in true))
  return covariance / math.sqrt(factors) if factors > 0 else 0.0
