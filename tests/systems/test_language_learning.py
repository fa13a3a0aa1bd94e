"""BERT and GPT learn a Markov source as well as its entropy allows, and what BERT learnt carries over."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import accumulate, optim
from lab.systems.language import config as shape, model, objectives
from tests.conftest import FAST

LETTERS, PAD, CLS, SEP, MASK = 16, 16, 17, 18, 19
LENGTH, BATCH = 32, 32


@pytest.fixture(scope='module')
def source():
  """The transition matrix f64[16, 16] and its stationary law."""
  rows = np.random.default_rng(0).dirichlet(np.full(LETTERS, .3), LETTERS) + .002
  rows /= rows.sum(1, keepdims=True)
  law = np.linalg.matrix_power(rows, 200)[0]
  return rows, law


def sequences(source, count, seed, length=LENGTH):
  """i32[count, length] drawn from the source."""
  rows, law = source
  draw = np.random.default_rng(seed)
  out = np.empty((count, length), np.int32)
  out[:, 0] = draw.choice(LETTERS, count, p=law)
  steps = rows.cumsum(1)
  for t in range(1, length):
    out[:, t] = (draw.random(count)[:, None] > steps[out[:, t - 1]]).sum(1).clip(0, LETTERS - 1)
  return out


def settings(objective, steps, rate, positions='learned'):
  config = shape.get_config()
  config.objective = objective
  config.data.length = LENGTH
  config.model.update({'width': 64, 'layers': 2, 'heads': 4, 'dropout': 0.0, 'dtype': 'float32',
                       'causal': objective == 'gpt', 'transform': False})
  if objective != 'gpt':
    config.model.update({'positions': positions, 'deviation': 0.1})
  config.total_steps = steps
  config.optim.update({'learning_rate': rate, 'warmup_steps': steps // 20, 'decay': 0.01, 'stacked': 'blocks/'})
  return config


def fit(config, labels, batches, params=None):
  """Trains on an iterator of batches; returns the network, its parameters and (params, batch) -> sums."""
  net = model.make(config, MASK + 1, labels)
  judge = functools.partial(objectives.OBJECTIVES[config.objective], net)
  first = next(batches)
  inputs = [first[k] for k in ('ids', 'segments', 'places') if k in first]
  fresh = jax.jit(net.init)(jax.random.key(0), *inputs)['params']
  params = fresh if params is None else {**fresh, **params}
  tx = optim.make(config.optim, config.total_steps)

  def loss(params, stats, batch, key, step):
    del step
    terms, sums = judge(params, batch, {'dropout': key})
    return terms, (stats, sums)

  # hundreds of updates: worth what it takes to make them fast
  @functools.partial(jax.jit, compiler_options=FAST)
  def step(params, opt, i, batch):
    value, grads, _, _ = accumulate.gradients(loss, params, {}, {k: v[None] for k, v in batch.items()},
                                              jax.random.key(1), i)
    params, opt, _, _ = tx.update(value, grads, opt, params, i)
    return params, opt, value
  opt, losses = jax.jit(tx.init)(params), []
  for i, batch in zip(range(config.total_steps), batches):
    params, opt, value = step(params, opt, jnp.int32(i), batch)
    losses.append(value)
  return net, params, jax.jit(judge), float(losses[0])


def ones(rows):
  return {'segments': np.ones((len(rows), LENGTH), np.int32), 'mask': np.ones(len(rows), np.float32)}


def windows(data, seed):
  """Batches of next tokens for ever."""
  draw = np.random.default_rng(seed)
  while True:
    rows = data[draw.integers(0, len(data), BATCH)]
    yield following(rows)


def following(rows):
  return {'ids': rows[:, :-1], 'labels': rows[:, 1:], 'weights': np.ones((len(rows), LENGTH), np.float32), **ones(rows)}


def masked(rows, seed):
  """Rows of 30 letters between cls and sep; of 4 places drawn from all 32, those on letters are to be guessed."""
  draw, places = np.random.default_rng(seed), np.empty((len(rows), 4), np.int32)
  ids = np.concatenate([np.full((len(rows), 1), CLS), rows[:, :LENGTH - 2], np.full((len(rows), 1), SEP)], 1)
  ids = ids.astype(np.int32)
  for i in range(len(rows)):
    places[i] = np.sort(draw.choice(LENGTH, 4, replace=False))
  labels, how = np.take_along_axis(ids, places, 1), draw.random(places.shape)
  weights = labels < LETTERS
  new = np.where(how < .8, MASK, np.where(how < .9, draw.integers(0, LETTERS, places.shape), labels))
  new = np.where(weights, new, labels)
  np.put_along_axis(ids, places, new.astype(np.int32), 1)
  return {'ids': ids, 'places': places, 'labels': labels, 'weights': weights.astype(np.float32), **ones(rows)}


def score(judge, params, batch, name):
  terms, sums = judge(params, batch)
  return float(terms[name][0] / terms[name][1]), float(sums['accuracy'][0] / sums['accuracy'][1])


def test_gpt_reaches_the_entropy_rate(source):
  """2.0311 nats a token; an independent implementation reached 2.027 on its validation sequences after 800 steps."""
  rows, law = source
  rate = -(law[:, None] * rows * np.log(rows)).sum()
  assert rate == pytest.approx(2.0311, abs=1e-4)
  train, test = sequences(source, 20_000, 1, LENGTH + 1), sequences(source, 4096, 2, LENGTH + 1)
  _, params, judge, first = fit(settings('gpt', 800, 3e-3), 0, windows(train, 3))
  assert first == pytest.approx(np.log(MASK + 1), abs=.05)
  nats, accuracy = score(judge, params, following(test), 'gpt')
  assert abs(nats - 2.031) <= .02 and accuracy <= .3258 + .01


def bert(source, positions):
  """A body that has learnt to fill gaps: as `fit` returns it."""
  train = sequences(source, 60_000, 4)

  def batches():
    for seed in range(10**9):
      rows = train[np.random.default_rng((5, seed)).integers(0, len(train), BATCH)]
      yield masked(rows, (6, seed))
  return fit(settings('mlm', 2000, 3e-3, positions), 0, batches())


@pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='2,000 updates: LAB_LONG=1')
def test_bert_reaches_what_both_neighbours_tell(source):
  """1.4381 nats for a lone gap between known letters (accuracy .5131). Gaps beside gaps and letters that were replaced
  cost more: 1.4696 are left to one who knows the source and how it is masked (forward-backward, on these sequences).
  """
  _, params, judge, first = bert(source, 'rope')
  assert first == pytest.approx(np.log(MASK + 1), abs=.5)         # wide weights: not yet even
  nats, accuracy = score(judge, params, masked(sequences(source, 4096, 7), 8), 'mlm')
  assert nats <= 1.50 and accuracy >= .49
  assert nats >= 1.465     # less would mean that it sees what it has to guess


@pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='it trains three times: LAB_LONG=1')
def test_what_bert_learnt_carries_over(source):
  """Sequences of the source against some with 12 of 32 letters redrawn: which is which?"""
  def labelled(count, seed):
    rows, draw = sequences(source, count, seed)[:, :LENGTH - 2], np.random.default_rng((seed, 1))
    label = np.arange(count, dtype=np.int32) % 2
    for i in np.flatnonzero(label == 0):
      places = draw.choice(LENGTH - 2, 12, replace=False)
      rows[i, places] = draw.choice(LETTERS, 12, p=source[1])
    ids = np.concatenate([np.full((count, 1), CLS), rows, np.full((count, 1), SEP)], 1).astype(np.int32)
    return {'ids': ids, 'label': label, 'truncated': np.zeros(count, np.int32), **ones(rows)}
  train, test = labelled(8192, 9), labelled(4096, 10)

  def batches():
    draw = np.random.default_rng(11)
    while True:
      rows = draw.integers(0, 8192, BATCH)
      yield {k: v[rows] for k, v in train.items()}
  config = settings('classify', 600, 1e-3)
  config.model.pool = 'mean'
  found = {}
  learnt = bert(source, 'learned')[1]      # with rotary positions the task is learnt from scratch too
  body = {k: learnt[k] for k in ('tokens', 'positions', 'body')}
  for name, start in (('transferred', body), ('scratch', None)):
    _, params, judge, _ = fit(config, 2, batches(), start)
    terms, sums = jax.device_get(judge(params, test))
    scores = objectives.finish('classify', 0, {'loss': terms['classify'], **sums})
    found[name] = scores
  assert found['transferred']['accuracy'] >= .90
  assert found['transferred']['mcc'] >= found['scratch']['mcc'] + .5


def test_32_sequences_are_learnt_by_heart():
  """Under .05 nats; the first letters leave about .02 open, for two sequences may begin alike."""
  rows = np.random.default_rng(12).integers(0, LETTERS, (BATCH, LENGTH + 1)).astype(np.int32)

  def batches():
    while True:
      yield following(rows)
  _, params, judge, _ = fit(settings('gpt', 400, 3e-3), 0, batches())
  assert score(judge, params, following(rows), 'gpt')[0] < .05
