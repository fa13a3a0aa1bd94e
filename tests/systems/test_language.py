"""Language: numbers against references, texts that go on, predictions from a run alone, settings that can't be."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import cola, gpt, mlm
from lab import main, optim, schedules, train
from lab.checkpoint import Checkpoints
from lab.nn import transformer
from lab.systems.language import config as shape, generate, model, objectives, task
from lab.task import ConfigError

FLAGS = ('--mode=train', '--step=latest', '--input=', '--output=', '--nodistributed')


def small(objective, **values):
  config = shape.get_config()
  config.objective = objective
  config.data.length = 16
  config.model.update({'width': 32, 'layers': 2, 'heads': 2, 'dropout': 0.0, 'dtype': 'float32',
                       'causal': objective == 'gpt', **values})
  return config


def batch_of(rows, length=16, vocabulary=50, seed=0):
  draw = np.random.default_rng(seed)
  ids = draw.integers(0, vocabulary, (rows, length)).astype(np.int32)
  return {'ids': ids, 'segments': np.ones_like(ids), 'labels': draw.integers(0, vocabulary, ids.shape).astype(np.int32),
          'weights': np.ones(ids.shape, np.float32), 'mask': np.ones(rows, np.float32)}


def made(config, batch, vocabulary=50):
  net = model.make(config, vocabulary, 0)
  return net, jax.jit(net.init)(jax.random.key(0), batch['ids'], batch['segments'], batch.get('places'))['params']


# scores


def test_matthews_correlation():
  """(TP TN - FP FN) / sqrt(...) of 6, 3, 1, 2 is .47809; who always says the same gets 0."""
  assert objectives.matthews([[3, 1], [2, 6]]) == pytest.approx(.47809, abs=1e-5)
  assert objectives.matthews([[0, 4], [0, 8]]) == 0 and objectives.matthews([[0, 0], [0, 0]]) == 0
  draw = np.random.default_rng(0)
  true, guess = draw.integers(0, 3, 200), draw.integers(0, 3, 200)
  guess[:80] = true[:80]
  confusion = [[int(((true == t) & (guess == g)).sum()) for g in range(3)] for t in range(3)]
  x, y = (np.eye(3)[v] - np.eye(3)[v].mean(0) for v in (true, guess))
  assert objectives.matthews(confusion) == pytest.approx((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def test_a_split_is_weighed_by_its_tokens():
  """100 tokens at 2.0 and 4 at 4.0 make 2.0769, not 3.0; 104 tokens of 52 bytes."""
  found = objectives.finish('gpt', 52, {'loss': (100 * 2.0 + 4 * 4.0, 104), 'accuracy': (26, 104)})
  assert found['loss'] == pytest.approx(2.0769, abs=1e-4) and found['accuracy'] == .25
  assert found['perplexity'] == pytest.approx(np.exp(216 / 104))
  assert found['bits_per_byte'] == pytest.approx(216 / np.log(2) / 52)


def test_the_rate_of_masked_pretraining():
  """Linear to 1e-3 at 1k, cosine to 5e-5 at 45k; the first update is number 1."""
  config = mlm.get_config('full')
  rate = schedules.make(config.optim, 45_000)
  for step, want in ((500, 5e-4), (1000, 1e-3), (23_000, 5.25e-4), (45_000, 5e-5)):
    assert float(rate(jnp.int32(step - 1), schedules.nowhere())) == pytest.approx(want, rel=1e-4)


# the network


@pytest.mark.parametrize('positions', ['learned', 'sinusoid', 'rope'])
def test_a_causal_model_sees_nothing_ahead_and_no_padding(positions):
  config, batch = small('gpt', positions=positions), batch_of(2)
  net, params = made(config, batch)
  run = jax.jit(lambda ids, segments: net.apply({'params': params}, ids, segments, method='following'))
  whole = run(batch['ids'], batch['segments'])
  other = batch['ids'].copy()
  other[:, 9:] = (other[:, 9:] + 1) % 50
  np.testing.assert_allclose(run(other, batch['segments'])[:, :9], whole[:, :9], atol=1e-6)
  assert np.abs(run(other, batch['segments'])[:, 9:] - whole[:, 9:]).max() > 1e-3
  padded = batch['segments'].copy()
  padded[:, 9:] = 0
  np.testing.assert_allclose(run(other, padded)[:, :9], whole[:, :9], atol=1e-5)


@pytest.mark.parametrize('objective', ['mlm', 'gpt'])
def test_rows_of_one_document_need_no_segments(objective):
  """With documents = together the same loss and gradients, padding behind included, and no mask of all pairs."""
  config, batch = small(objective), batch_of(3)
  batch['segments'] = (np.arange(16)[None] < np.array([16, 9, 4])[:, None]).astype(np.int32)
  batch['weights'] = batch['weights'] * batch['segments']
  if objective == 'mlm':
    batch |= {'places': np.tile(np.arange(4, dtype=np.int32), (3, 1)), 'labels': batch['labels'][:, :4],
              'weights': batch['weights'][:, :4]}
  net, params = made(config, batch)
  config.data.documents = 'together'
  whole, _ = made(config, batch)
  assert whole.whole and not net.whole

  def run(net):
    def loss(params):
      (total, weight), = objectives.OBJECTIVES[objective](net, params, batch, {})[0].values()
      return total / weight
    return jax.jit(jax.value_and_grad(loss))(params)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run(net), run(whole))


@pytest.mark.parametrize('dtype, bound', [('float32', 1e-5), ('bfloat16', 3e-3)])
@pytest.mark.parametrize('objective', ['mlm', 'gpt'])
def test_training_s_loss_is_evaluation_s(objective, dtype, bound):
  config, batch = small(objective, dtype=dtype), batch_of(8)
  if objective == 'mlm':
    batch |= {'places': np.tile(np.arange(4, dtype=np.int32), (8, 1)), 'labels': batch['labels'][:, :4],
              'weights': batch['weights'][:, :4]}
  net, params = made(config, batch)
  judge = jax.jit(lambda *x: objectives.OBJECTIVES[objective](net, *x)[0])
  a, b = (judge(params, batch, *rngs) for rngs in ((), ({},)))
  np.testing.assert_allclose(a[objective], b[objective], rtol=bound)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('objective', ['mlm', 'gpt'])
def test_a_row_of_padding_adds_exactly_nothing(objective, dtype):
  config, batch = small(objective, dtype=dtype), batch_of(3)
  if objective == 'mlm':
    batch |= {'places': np.tile(np.arange(4, dtype=np.int32), (3, 1)), 'labels': batch['labels'][:, :4],
              'weights': batch['weights'][:, :4]}
  net, params = made(config, batch)
  batch['segments'][2], batch['weights'][2] = 0, 0

  def loss(params, batch):
    (total, weight), = objectives.OBJECTIVES[objective](net, params, batch)[0].values()
    return total, weight
  both = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (one, weight), with_row = both(params, batch)
  (two, same), without = both(params, {k: v[:2] for k, v in batch.items()})
  assert np.isfinite(one) and float(weight) == float(same)
  np.testing.assert_allclose(one, two, rtol=1e-6)
  tolerance = 1e-6 if dtype == 'float32' else 1e-2
  for a, b in zip(jax.tree.leaves(with_row), jax.tree.leaves(without)):
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.abs(b).max() + 1e-9))


def test_padding_and_batch_size_change_no_score():
  """50 rows of 1 to 16 ids: alone or together, and with more padding behind."""
  config, batch = small('gpt'), batch_of(50)
  config.data.length = 32
  net, params = made(config, batch)
  count = 1 + np.arange(50) % 16
  batch['segments'] = (np.arange(16)[None] < count[:, None]).astype(np.int32)
  following = jax.jit(lambda ids, segments: net.apply({'params': params}, ids, segments, method='following'))
  run = lambda *x: jax.device_get(following(*x))         # JAX would compile a slice of each length
  together = run(batch['ids'], batch['segments'])
  longer = run(*(np.pad(batch[k], ((0, 0), (0, 16))) for k in ('ids', 'segments')))
  for i in range(50):
    alone = run(batch['ids'][i:i + 1], batch['segments'][i:i + 1])[0, :count[i]]
    for found in (together[i, :count[i]], longer[i, :count[i]]):
      np.testing.assert_allclose(found, alone, atol=1e-5)
      assert (found.argmax(-1) == alone.argmax(-1)).all()


@pytest.mark.parametrize('objective', ['mlm', 'gpt'])
def test_before_training_all_words_are_alike(objective):
  config, batch = small(objective), batch_of(64)
  if objective == 'mlm':
    batch |= {'places': np.tile(np.arange(4, dtype=np.int32), (64, 1)), 'labels': batch['labels'][:, :4],
              'weights': batch['weights'][:, :4]}
  net, params = made(config, batch)
  (total, weight), = jax.jit(lambda *x: objectives.OBJECTIVES[objective](net, *x)[0])(params, batch).values()
  assert float(total / weight) == pytest.approx(np.log(50), abs=.05)


# texts that go on


def test_cached_drawing_equals_drawing_without_a_cache():
  """Greedy, prompts of different lengths, past the end of a window."""
  config, batch = small('gpt'), batch_of(3, 7)
  net, params = made(config, batch)
  params = jax.tree.map(lambda x: 8 * x, params)                         # decided answers
  count = np.array([7, 3, 1], np.int32)
  step = lambda *a: net.apply({'params': params}, *a, method='step')
  drawn = jax.jit(lambda ids, count: generate.extend(
      step, lambda rows: transformer.cache(net.shape, rows, 16), ids, count, jax.random.key(0), 24, 16,
      generate.Options(0.0, 0, 1.0)))(batch['ids'], count)
  whole = jax.jit(lambda *a: net.apply({'params': params}, *a, method='following'))
  following = lambda *a: jax.device_get(whole(*a))
  assert drawn.shape == (3, 24)
  for row in range(3):
    held = list(batch['ids'][row, :count[row]])
    full = 9                                                             # 16 less the longest prompt
    for t in range(24):
      if t == full:
        held, full = held[-8:], full + 8                                 # the half window that goes on
      ids = np.array([held + [0] * (16 - len(held))], np.int32)
      logits = following(ids, (np.arange(16)[None] < len(held)).astype(np.int32))[0, len(held) - 1]
      assert int(logits.argmax()) == int(drawn[row, t]), (row, t)
      held.append(int(drawn[row, t]))


def test_top_k_and_top_p():
  logits = jnp.log(jnp.array([[.5, .3, .15, .05]]))
  def kept(*options):
    return np.flatnonzero(np.isfinite(generate.allowed(logits, generate.Options(1.0, *options))[0])).tolist()
  assert kept(0, 1.0) == [0, 1, 2, 3] and kept(2, 1.0) == [0, 1] and kept(0, .6) == [0, 1] and kept(0, .81) == [0, 1, 2]
  assert kept(3, .55) == [0, 1] and kept(1, .99) == [0] and kept(0, .01) == [0]
  one, other = (generate.draw(jnp.zeros((200, 4)), jax.random.key(s), generate.Options(1.0, 0, 1.0)) for s in (0, 1))
  assert (one != other).any() and len(set(one.tolist())) == 4


# from a run alone


def predict(capfd, workdir, *flags):
  assert main.main(['lab', *FLAGS, f'--workdir={workdir}', '--mode=predict', f'--output={workdir}/out', *flags]) == 0
  with open(os.path.join(workdir, 'out', 'predictions.jsonl'), encoding='utf-8') as f:
    return [json.loads(line) for line in f], capfd.readouterr().out


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """A run of every objective, of a few updates."""
  folder = tmp_path_factory.mktemp('runs')
  for name, recipe in (('mlm', mlm), ('gpt', gpt), ('cola', cola)):
    config = recipe.get_config('smoke')
    config.input.batch_size = 8
    config.total_steps = config.eval_steps = config.checkpoint.steps = 4
    if name == 'cola':
      config.init_from = str(folder / 'mlm')
    train.run(task.make_task(config), config, str(folder / name))
  return folder


def test_gaps_are_filled(runs, capfd):
  (record,), shown = predict(capfd, runs / 'mlm', '--input=the [MASK] was [MASK].')
  assert [len(x) for x in record['words']] == [5, 5] and '/' in shown
  assert main.main(['lab', *FLAGS, f'--workdir={runs}/mlm', '--mode=predict', '--input=nothing to fill']) == 3
  assert 'no [MASK] in it' in capfd.readouterr().err


def test_text_goes_on_and_is_scored(runs, capfd, caplog, tmp_path):
  flags = ('--input=ROMEO:', '--config.predict.tokens=24')
  one, two = (predict(capfd, runs / 'gpt', *flags)[0][0]['continuation'] for _ in range(2))
  assert len(one) == 24 and one == two
  assert predict(capfd, runs / 'gpt', *flags, '--config.seed=5')[0][0]['continuation'] != one
  assert predict(capfd, runs / 'gpt', *flags, f'--config.predict.stop={one[9]}')[0][0]['continuation'] == (
      one[:one.index(one[9])])
  lines = tmp_path / 'lines.txt'
  lines.write_text('What, ho!\n\nGo to, sir.\n')
  scored, _ = predict(capfd, runs / 'gpt', f'--input={lines}', '--config.predict.verb=score')
  assert [r['tokens'] for r in scored] == [8, 10]
  assert all(r['perplexity'] == pytest.approx(np.exp(r['nats'] / r['tokens']), rel=1e-3) for r in scored)
  lines.write_bytes(b'fine\n\xff\xfe\n')
  assert main.main(['lab', *FLAGS, f'--workdir={runs}/gpt', '--mode=predict', f'--input={lines}']) == 3
  assert 'lines.txt:2: byte 0 of the line is not UTF-8' in caplog.text


def test_sentences_are_labelled(runs, capfd):
  (record,), _ = predict(capfd, runs / 'cola', '--input=the door was opened.')
  assert record['label'] in ('acceptable', 'unacceptable') and .5 <= record['chance'] <= 1


@pytest.mark.parametrize('confusion, said', [
    ([[10, 40], [40, 10]], True), ([[24, 26], [26, 24]], False), ([[1, 0], [80, 19]], False), ([[0, 1], [1, 0]], False),
    ([[2, 30, 1], [1, 2, 30], [30, 1, 2]], True)])
def test_an_accuracy_far_below_chance_is_told_with_its_likely_cause(caplog, confusion, said):
  """Labels in another order than the model's; not where one class is most of the data, nor for a few guesses."""
  total = float(sum(map(sum, confusion)))
  totals = {f'confusion/{t}_{g}': (float(n), total) for t, row in enumerate(confusion) for g, n in enumerate(row)}
  right = float(sum(row[i] for i, row in enumerate(confusion)))
  objectives.finish('classify', 0, {'loss': (0.0, total), 'accuracy': (right, total), **totals})
  assert [('below chance' in r.message and 'config.data.labels' in r.message) for r in caplog.records] == [True] * said


def test_the_body_is_taken_and_the_head_is_new(runs, tmp_path):
  config = cola.get_config('smoke')
  config.input.batch_size, config.init_from, config.total_steps = 8, str(runs / 'mlm'), 1
  config.optim.learning_rate = 0.0
  train.run(task.make_task(config), config, str(tmp_path))
  old, new = (Checkpoints(str(p)).meta(s)['arrays'] for p, s in ((runs / 'mlm', 4), (tmp_path, 1)))
  same = [k for k in new if k.startswith('params/') and old.get(k) == new[k]]
  assert {k for k in new if k.startswith(('params/tokens', 'params/body'))} == set(same) and len(same) > 8
  assert any(k.startswith('params/classifier') for k in new)


def test_evaluation_draws_texts(runs):
  for name, mark in (('mlm', '/'), ('gpt', '---'), ('cola', 'acceptable')):
    texts = sorted((runs / name / 'pictures').glob('*.txt'))
    assert len(texts) == 4 and all(mark in t.read_text() for t in texts)


# what can't be


@pytest.mark.parametrize('objective, values, said', [
    ('mlm', {'model.causal': True}, 'model.causal'), ('gpt', {'predict.verb': 'fill'}, 'predict.verb'),
    ('classify', {'model.causal': True}, 'model.pool'), ('mlm', {'model.heads': 5}, 'model.width'),
    ('mlm', {'mlm.share': 0.0}, 'mlm.share'), ('gpt', {'data.documents': 'mixed'}, 'data.documents'),
    ('gpt', {'predict.top_p': 1.5}, 'predict.top_p'), ('mlm', {'model.dropout': 1.0}, 'model.dropout'),
    ('gpt', {'model.remat_keep': 'products'}, 'model.remat_keep')])
def test_settings_that_cannot_run_are_named(objective, values, said):
  config = small(objective)
  config.update_from_flattened_dict(values)
  with pytest.raises(ConfigError, match=said.replace('.', r'\.')):
    task.make_task(config)


def test_norms_and_biases_do_not_decay():
  """Parameters of all layers are stacked; a bias [layers, width] is still no matrix."""
  config, batch = small('gpt'), batch_of(2)
  _, params = made(config, batch)
  config.optim.update({'name': 'adamw', 'decay': 0.1, 'learning_rate': 1.0, 'schedule': 'constant', 'clip': 0.0})
  tx = optim.make(config.optim, 10)
  zero = jax.tree.map(jnp.zeros_like, params)
  moved, *_ = jax.jit(tx.update)(jnp.float32(0), zero, jax.jit(tx.init)(params), params, jnp.int32(0))
  still = {jax.tree_util.keystr(p): bool((a == b).all()) for (p, a), b in zip(
      jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(moved))}
  assert all(same for path, same in still.items() if path.endswith(("['bias']", "['scale']")))
  assert not any(same for path, same in still.items() if path.endswith("['kernel']"))
