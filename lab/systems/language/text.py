"""Predictions as text: words for the masks, texts that go on, labels; records of them and panels to read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lab.nn import losses, transformer
from lab.systems.language import generate


def outputs(net, config, params, batch, key):
  """What an objective predicts of a batch, on the device.

  mlm: top i32[B, n, k] ids for each place and their chance f32[B, n, k]. gpt: new i32[B, T], drawn to go on after
  `count` ids of each row, or after the first third of a window; of inputs to be scored nats f32[B, S] of each next id.
  classify: chance f32[B, labels].
  """
  if config.objective == 'classify':
    logits = net.apply({'params': params}, batch['ids'], batch['segments'], method='classify')
    return {'chance': jax.nn.softmax(logits)}
  if config.objective == 'mlm':
    logits = net.apply({'params': params}, batch['ids'], batch['segments'], batch['places'], method='masked')
    chance, top = jax.lax.top_k(jax.nn.softmax(logits), min(config.predict.top, net.vocabulary))
    return {'top': top, 'chance': chance}
  if config.predict.verb == 'score' and 'count' in batch:
    logits = net.apply({'params': params}, batch['ids'], batch['segments'], method='following')
    return {'nats': losses.cross_entropy(logits, batch['labels']) * batch['weights']}
  return {'new': _sampled(net, config, params, batch, key)}


def _sampled(net, config, params, batch, key):
  p, length = config.predict, net.length
  options = generate.Options(p.temperature, p.top_k, p.top_p)
  if 'count' in batch:
    ids, count, number = batch['ids'][:, :length - 1], jnp.minimum(batch['count'], length - 1), p.tokens
  else:
    ids, number = batch['ids'][:, :length // 3], length // 3
    count = jnp.full(len(ids), length // 3, jnp.int32)
  step = functools.partial(net.apply, {'params': params}, method='step')
  return generate.extend(step, lambda rows: transformer.cache(net.shape, rows, length), ids, count, key, number, length,
                         options)


def records(config, data, made, batch):
  """A record a row: its number or text, and what was predicted."""
  words = data.tokenizer()
  for i in range(len(batch['ids'])):
    record = {'text': batch['text'][i]} if 'text' in batch else {'record': int(batch['record'][i])}
    if config.objective == 'mlm':
      record['words'] = [[[_word(words, t), round(float(c), 4)] for t, c in zip(top, chance)]
                         for top, chance, w in zip(made['top'][i], made['chance'][i], batch['weights'][i]) if w]
    elif config.objective == 'classify':
      best = int(made['chance'][i].argmax())
      record |= {'label': data.labels()[best], 'chance': round(float(made['chance'][i][best]), 4)}
    elif 'nats' in made:
      total, count = float(made['nats'][i].sum()), float(batch['weights'][i].sum())
      record |= {'nats': round(total, 4), 'tokens': int(count), 'perplexity': round(float(np.exp(total / count)), 4)}
    else:
      record['continuation'] = continuation(config, words, made['new'][i])
    yield record


def continuation(config, words, new) -> str:
  """The text of drawn ids, up to the end of the text or the stop word."""
  new = [int(t) for t in new]
  if words is None:
    return ' '.join(map(str, new))
  if words.eos >= 0 and words.eos in new:
    new = new[:new.index(words.eos)]
  found = words.decode(new)
  stop = config.predict.stop
  return found.split(stop)[0] if stop else found


def panels(config, data, made, batch):
  """name -> a text to read: masked words guessed right and wrong, a text going on, a label and its chance."""
  words, found = data.tokenizer(), {}
  for i in range(len(batch['ids'])):
    name = f'text{i}' if 'text' in batch else f'{int(batch["record"][i]):06d}'
    if config.objective == 'mlm':
      found[name] = _filled(words, made, batch, i)
    elif config.objective == 'classify':
      best, true = int(made['chance'][i].argmax()), batch['label'][i] if 'label' in batch else None
      mark = '' if true is None else ('right' if best == true else f'wrong, it is {data.labels()[int(true)]}')
      found[name] = (f'{_decode(words, batch["ids"][i][batch["segments"][i] > 0])}\n'
                     f'{data.labels()[best]} {made["chance"][i][best]:.3f} {mark}')
    elif 'new' in made:
      count = int(batch['count'][i]) if 'count' in batch else len(batch['ids'][i]) // 3
      found[name] = (f'{_decode(words, batch["ids"][i][:count])}\n---\n'
                     f'{continuation(config, words, made["new"][i])}')
  return found


def _filled(words, made, batch, i) -> str:
  """The text with each guess as /word/ where it is right and as /word|true/ where it is not."""
  ids = [_word(words, t) for t in batch['ids'][i][batch['segments'][i] > 0]]
  for j, place in enumerate(batch['places'][i]):
    if batch['weights'][i][j]:
      guess = int(made['top'][i][j][0])
      true = int(batch['labels'][i][j]) if 'labels' in batch else guess
      ids[place] = f'/{_word(words, guess)}/' if guess == true else f'/{_word(words, guess)}|{_word(words, true)}/'
  return ' '.join(ids).replace('[CLS] ##', '[CLS] ..').replace(' ##', '')


def _word(words, number) -> str:
  return str(int(number)) if words is None else words.word(int(number))


def _decode(words, ids) -> str:
  return ' '.join(str(int(t)) for t in ids) if words is None else words.decode([int(t) for t in ids])
