"""Micro-batches add up to exactly the batch they make together; updates, not micro-batches, are counted."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import accumulate, train
from tests import toy


def rows(workdir, split='train'):
  found = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [r for r in found if r['split'] == split]


def token_loss(params, stats, batch, key, step):
  """Mean squared error over the tokens of mask 1, and a second term with other weights."""
  del key, step
  error = batch['mask'] * jnp.square(batch['x'] * params['w'] - batch['y'])
  terms = {'tokens': (error.sum(), batch['mask'].sum()), 'rows': (3 * params['w'] ** 2 * len(batch['x']) / 2.0,
                                                                 jnp.float32(len(batch['x'])))}
  return terms, ({'average': stats['average'] + 0.1 * batch['x'].mean()}, {'error': terms['tokens']})


@pytest.fixture(scope='module')
def sentences():
  """Two sentences of 11 and of 101 tokens, padded to 128."""
  draw = np.random.default_rng(0)
  mask = (np.arange(128)[None] < np.array([[11], [101]])).astype(np.float32)
  return {'x': draw.standard_normal((2, 128)).astype(np.float32),
          'y': draw.standard_normal((2, 128)).astype(np.float32), 'mask': mask}


def test_sentences_of_11_and_101_tokens_weigh_by_their_tokens(sentences):
  params, stats = {'w': jnp.float32(0.7)}, {'average': jnp.float32(0)}
  both, alone = ({k: v.reshape(n, 2 // n, 128) for k, v in sentences.items()} for n in (1, 2))
  run = jax.jit(lambda batches: accumulate.gradients(token_loss, params, stats, batches, jax.random.key(0), 0))
  (loss, grads, new, sums), (loss2, grads2, new2, sums2) = run(both), run(alone)
  x, y, m = (sentences[k].astype(np.float64) for k in ('x', 'y', 'mask'))
  error = m * (x * 0.7 - y)
  want = (2 * error * x).sum() / 112 + 3 * 0.7
  for value in (grads['w'], grads2['w']):
    np.testing.assert_allclose(value, want, rtol=1e-6)
  for value in (loss, loss2):
    np.testing.assert_allclose(value, (error**2).sum() / 112 + 1.5 * 0.49, rtol=1e-6)
  np.testing.assert_allclose(new['average'], new2['average'], rtol=1e-6)
  np.testing.assert_allclose(sums['error'], sums2['error'], rtol=1e-6)
  means = np.mean([(2 * error[i] * x[i]).sum() / m[i].sum() for i in range(2)]) + 3 * 0.7
  assert abs(means - want) > 0.01            # what the mean of the means would have given


def test_a_batch_without_weight_has_no_loss_and_no_gradient(sentences):
  empty = {k: (0 * v if k == 'mask' else v).reshape(2, 1, 128) for k, v in sentences.items()}
  only_tokens = lambda *a: (lambda terms, rest: ({'tokens': terms['tokens']}, rest))(*token_loss(*a))
  loss, grads, _, _ = accumulate.gradients(only_tokens, {'w': jnp.float32(1)}, {'average': jnp.float32(0)}, empty,
                                           jax.random.key(0), 0)
  assert float(loss) == 0 and float(grads['w']) == 0


def test_forty_micro_batches_are_ten_updates(toy_config, tmp_path):
  toy_config.total_steps, toy_config.optim.accumulate, toy_config.optim.warmup_steps = 10, 4, 5
  toy_config.optim.end_rate = 1e-5
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  found = rows(tmp_path)
  assert [r['step'] for r in found] == list(range(1, 11))
  assert [r['micro_batches'] for r in found] == [4 * u for u in range(1, 11)]
  assert found[-1]['examples_seen'] == 40 * 8
  assert found[4]['learning_rate'] == pytest.approx(toy_config.optim.learning_rate)
  assert found[9]['learning_rate'] == pytest.approx(1e-5)


def test_a_run_of_4_x_2_equals_one_of_8(toy_config, tmp_path):
  toy_config.noise = 0.0
  toy_config.mesh.data, toy_config.mesh.fsdp = 2, 4         # of the eight devices
  runs = {}
  for name, (size, parts) in {'one': (32, 1), 'four': (8, 4)}.items():
    toy_config.input.batch_size, toy_config.optim.accumulate = size, parts
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path / name))
    runs[name] = rows(tmp_path / name), rows(tmp_path / name, 'eval')
  for a, b in zip(*(r[0] for r in runs.values()), strict=True):
    np.testing.assert_allclose(b['loss'], a['loss'], rtol=1e-5)
    assert a['examples_seen'] == b['examples_seen'] and a['learning_rate'] == b['learning_rate']
  for a, b in zip(*(r[1] for r in runs.values()), strict=True):
    np.testing.assert_allclose(b['error'], a['error'], rtol=1e-5)


def test_accumulation_may_start_later_and_resumes_in_the_right_place(toy_config, tmp_path, monkeypatch, caplog):
  toy_config.optim.accumulate, toy_config.optim.accumulate_from, toy_config.total_steps = 3, 4, 8
  seen, place = [], train.meshes.place_stacked
  monkeypatch.setattr(train.meshes, 'place_stacked', lambda mesh, batches, size: (
      seen.append([b['x'].tobytes() for b in batches]), place(mesh, batches, size))[1])
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'whole'))
  assert [len(s) for s in seen] == [1, 1, 1, 1, 3, 3, 3, 3]
  whole, seen[:] = list(seen), []
  monkeypatch.setattr(train.meshes, 'preempted', lambda step: step == 6)
  with pytest.raises(train.meshes.Preempted):
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'stopped'))
  monkeypatch.setattr(train.meshes, 'preempted', lambda step: False)
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'stopped'))
  assert seen == whole and rows(tmp_path / 'stopped') == rows(tmp_path / 'whole')
  assert [r['examples_seen'] for r in rows(tmp_path / 'whole')] == [8, 16, 24, 32, 56, 80, 104, 128]
  assert 'compiled again' not in caplog.text              # two shapes are expected here
