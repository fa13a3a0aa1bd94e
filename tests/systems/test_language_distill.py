"""Distillation: the loss, a teacher that stays what it is, a student that begins as its layers and comes to agree."""

import contextlib
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import corpus, pipeline

from configs import mlm
from lab import accumulate, main, mesh as meshes, optim, sharding, train
from lab.checkpoint import CheckpointError, Checkpoints
from lab.systems.language import distill, model
from lab.task import ConfigError, load

LETTERS, CLS, SEP, MASK = 16, 16, 17, 18
SPECIAL = {'cls': CLS, 'sep': SEP, 'mask': MASK, 'pad': 19}


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  """Ids of a Markov source: nine times in ten a letter tells the next one."""
  draw = np.random.default_rng(0)
  ids = draw.integers(0, LETTERS, (2, 20_000)).astype(np.int32)
  for split, told in zip(ids, draw.random(ids.shape) < .9):
    for t in np.flatnonzero(told[1:]) + 1:
      split[t] = (5 * split[t - 1] + 3) % LETTERS
  return corpus.write_ids(str(tmp_path_factory.mktemp('ids')), {'train': ids[:1], 'validation': ids[1:, :2000]},
                          vocabulary=20, length=16, special=SPECIAL)


def recipe(data, **values):
  config = mlm.get_config('smoke')
  config.data.dir = data
  config.model.update({'layers': 4, 'deviation': 0.2})
  config.input.update({'batch_size': 32, 'cache': True})
  config.total_steps, config.eval_steps, config.checkpoint.steps, config.eval_pictures = 6, 0, 0, 0
  config.update_from_flattened_dict(values)
  return config


def student(data, teacher, **values):
  return recipe(data, **{'model.layers': 2, 'distill.teacher': str(teacher), **values})


def run(config, workdir):
  train.run(load(config), config, str(workdir))
  with contextlib.closing(Checkpoints(str(workdir))) as checkpoints:
    return checkpoints.arrays(config.total_steps), checkpoints.meta(config.total_steps)['arrays']


def rows(workdir):
  return [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]


@pytest.fixture(scope='module')
def teacher(data, tmp_path_factory):
  """The folder of a run that has learnt the source, and its weights."""
  workdir = tmp_path_factory.mktemp('teacher')
  config = recipe(data, total_steps=100, log_steps=50)
  config.optim.update({'learning_rate': 5e-3, 'warmup_steps': 10})
  weights, _ = run(config, workdir)
  assert rows(workdir)[-1]['loss'] < 1.5         # ln 16 = 2.77 for who knows nothing but the letters
  return workdir, weights


@pytest.fixture(scope='module')
def taught(data, teacher, tmp_path_factory):
  """A run of a student that began as layers of the teacher: its folder, weights and what its checkpoint says."""
  workdir = tmp_path_factory.mktemp('taught')
  return workdir, *run(student(data, teacher[0]), workdir)


def batch_of(rows, length=16, seed=0):
  """Rows of which the last one doesn't count and the first ends early."""
  draw = np.random.default_rng(seed)
  ids = draw.integers(0, 20, (rows, length)).astype(np.int32)
  segments, weights, mask = np.ones_like(ids), draw.random((rows, 3)).astype(np.float32), np.ones(rows, np.float32)
  segments[0, 9:], mask[-1] = 0, 0
  places = np.sort(draw.integers(0, 9, (rows, 3))).astype(np.int32)
  labels = draw.integers(0, 20, places.shape).astype(np.int32)
  return {'ids': ids, 'segments': segments, 'places': places, 'labels': labels, 'weights': weights, 'mask': mask}


def pair(data, seed=0, **values):
  """Two networks of random weights, the student's and the teacher's; and the parameters of both."""
  config, batch = recipe(data, **values), batch_of(4)
  inputs = [batch[k] for k in ('ids', 'segments', 'places')]
  deep, shallow = model.make(recipe(data), 20, 0), model.make(config, 20, 0)
  params, own = (jax.jit(n.init)(jax.random.key(seed + i), *inputs)['params'] for i, n in enumerate((shallow, deep)))
  return config, shallow, deep, {**params, 'teacher': own}


# the loss


def test_the_loss_equals_a_computation_in_float64(data):
  config, net, deep, params = pair(data, **{'model.layers': 2})
  config.distill.update({'temperature': 3.0, 'kl': 1.5, 'states': 0.25})
  batch = batch_of(4)
  inputs = [batch[k] for k in ('ids', 'segments', 'places')]
  found, *both = jax.device_get(jax.jit(lambda p: (
      distill.masked(net, deep, config.distill, p, batch, {}), net.apply({'params': p}, *inputs, method='both'),
      deep.apply({'params': p['teacher']}, *inputs, method='both')))(params))
  (terms, sums), ((s, z), (t, y)) = found, jax.tree.map(np.float64, both)

  def softmax(x):
    e = np.exp(x[..., :20] - x[..., :20].max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
  weights = batch['weights'] * batch['mask'][:, None]
  nats = -np.log(np.take_along_axis(softmax(z), batch['labels'][..., None], -1)[..., 0])
  p, q = softmax(y / 3), softmax(z / 3)
  kl = (p * np.log(p / q)).sum(-1)
  real = (batch['segments'] > 0) * batch['mask'][:, None]
  cos = (s * t).sum(-1) / np.sqrt((s * s).sum(-1) * (t * t).sum(-1))
  want = {'mlm': (nats * weights).sum() / weights.sum(), 'kl': 1.5 * 9 * (kl * weights).sum() / weights.sum(),
          'states': 0.25 * ((1 - cos) * real).sum() / real.sum()}
  assert terms.keys() == want.keys() and min(want.values()) > .01
  for name, (total, weight) in terms.items():
    np.testing.assert_allclose(total / weight, want[name], rtol=1e-5, err_msg=name)
  np.testing.assert_allclose(sums['kl'][0] / sums['kl'][1], want['kl'] / 13.5, rtol=1e-5)
  np.testing.assert_allclose(sums['cosine'][0] / sums['cosine'][1], 1 - want['states'] * 4, rtol=1e-4)
  assert sums['mlm'] == terms['mlm'] and 'accuracy' in sums


def test_a_student_that_is_its_teacher_has_nothing_to_learn_from_it(data):
  config, net, deep, params = pair(data)
  params = {**params['teacher'], 'teacher': params['teacher']}
  loss = lambda p, name: distill.masked(net, deep, config.distill, p, batch_of(4), {})[0][name][0]
  for name in ('kl', 'states'):
    value, slope = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, name)
    assert abs(value) < 1e-4 and max(float(jnp.abs(g).max()) for g in jax.tree.leaves(slope)) < 1e-3, name


def test_zero_states_have_no_cosine_and_no_nan():
  value, slope = jax.value_and_grad(lambda x: distill.cosine(x, jnp.ones((1, 4))).sum())(jnp.zeros((1, 4)))
  assert value == 0 and np.isfinite(slope).all()


def test_only_the_student_gets_a_gradient(data, teacher):
  config = student(data, teacher[0], **{'distill.begin': 'afresh', 'model.width': 16, 'distill.states': 0.0})
  task = load(config)
  batches = pipeline.Batches(task.source('train'), config.input, 32, range(32), train=True, seed=0)
  batch = {k: v.copy() for k, v in next(iter(batches)).items()}
  params = jax.jit(task.init)(jax.random.key(0), batch)[0]
  params['teacher'] = jax.tree.map(lambda x: x + .1, params['teacher'])
  batch['mask'][[0, 1, 9]] = 0
  slope = jax.jit(lambda b: accumulate.gradients(task.loss, params, {}, b, jax.random.key(0), 0))
  one, four = (slope({k: v.reshape(n, 32 // n, *v.shape[1:]) for k, v in batch.items()}) for n in (1, 4))
  assert params['tokens'].shape == (128, 16) and params['teacher']['tokens'].shape == (128, 32)
  for (path, a), (_, b) in zip(sharding.paths(one[1]), sharding.paths(four[1]), strict=True):
    assert path.startswith('teacher/') == (not np.any(a)), path
    np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * float(jnp.abs(a).max()) + 1e-12, err_msg=path)


# runs


def test_the_teacher_stays_what_it_is_and_takes_no_moments(teacher, taught):
  _, weights, arrays = taught
  _, own = teacher
  assert {p.removeprefix('teacher/') for p in weights if p.startswith('teacher/')} == own.keys()
  for path, x in own.items():
    np.testing.assert_array_equal(weights[f'teacher/{path}'], x, err_msg=path)
  moments = [p for p in arrays if p.startswith('opt/inner/')]
  assert any('mu/body/blocks' in p for p in moments) and not any('teacher' in p for p in moments)
  assert np.abs(weights['tokens'] - own['tokens']).max() > 1e-3         # while the student has moved on


@pytest.fixture
def begun(monkeypatch, tmp_path):
  """config -> (step, weights, averaged weights) with which its run starts."""
  states, start = [], train.start

  def stop(*args):
    states.append(start(*args))
    raise KeyboardInterrupt

  def of(config):
    monkeypatch.setattr(train, 'start', stop)
    with pytest.raises(KeyboardInterrupt):
      run(config, tmp_path / 'begun')
    return jax.device_get((states[-1].step, states[-1].params, states[-1].opt.ema))
  return of


def test_a_student_begins_as_every_second_layer(data, teacher, begun):
  for begin, same in (('layers', True), ('afresh', False)):
    _, params, ema = begun(student(data, teacher[0], **{'distill.begin': begin, 'optim.ema': 0.9}))
    jax.tree.map(np.testing.assert_array_equal, params, ema)
    for path, x in sharding.paths(params):
      there = teacher[1][path.removeprefix('teacher/')]
      if 'blocks/' in path and not path.startswith('teacher/'):
        there = there[[0, 2]]
      assert x.shape == there.shape
      if same or path.startswith('teacher/'):
        np.testing.assert_array_equal(x, there, err_msg=path)
    assert np.array_equal(params['tokens'], teacher[1]['tokens']) == same


def test_a_continued_student_goes_on_with_its_own_weights(data, teacher, taught, begun):
  config = student(data, teacher[0], continue_from=str(taught[0]), total_steps=7)
  step, params, _ = begun(config)
  assert step == 6 and config.init_parts == (('teacher', str(teacher[0])),)
  for path, x in sharding.paths(params):
    np.testing.assert_array_equal(x, taught[1][path], err_msg=path)


def test_it_resumes_bit_for_bit_without_the_teachers_run(data, teacher, taught, tmp_path, monkeypatch):
  moved = tmp_path / 'teacher'
  shutil.copytree(teacher[0], moved)
  config = student(data, f'{moved}:best')
  monkeypatch.setattr(meshes, 'preempted', lambda step: step == 2)
  with pytest.raises(meshes.Preempted):
    run(config, tmp_path / 'run')
  monkeypatch.undo()
  shutil.rmtree(moved)
  config.assets = str(tmp_path / 'run' / train.ASSETS)        # as the program does where there are some
  weights, _ = run(config, tmp_path / 'run')
  for path, x in taught[1].items():
    np.testing.assert_array_equal(weights[path], x, err_msg=path)


def test_evaluation_and_prediction_need_no_teachers_run(taught, teacher, tmp_path, capsys):
  copy, gone = tmp_path / 'run', tmp_path / 'gone'
  shutil.copytree(taught[0], copy)
  written = (copy / 'config.json').read_text()
  (copy / 'config.json').write_text(written.replace(str(teacher[0]), str(gone)))
  scores = [r for r in rows(copy) if r['split'] == 'eval'][-1]
  assert main.main(['lab', f'--workdir={copy}', '--mode=eval', '--step=latest', '--output=']) == 0, capsys.readouterr()
  found = json.loads((copy / 'eval_6.json').read_text())
  assert found['loss'] == pytest.approx(scores['loss'], rel=1e-6)
  assert 'kl' not in found        # what is measured is the student's own, as of one without a teacher


def test_a_student_comes_to_agree_with_its_teacher(data, teacher, tmp_path):
  """From its own beginning: the distance at the end is under a fourth of the first one."""
  config = student(data, teacher[0], **{'distill.begin': 'afresh', 'total_steps': 100, 'optim.learning_rate': 5e-3})
  run(config, tmp_path)
  found = [r for r in rows(tmp_path) if r['split'] == 'train']
  first, last = found[0], {k: np.mean([r[k] for r in found[-20:]]) for k in ('kl', 'cosine', 'mlm')}
  assert last['kl'] < first['kl'] / 4 and last['cosine'] > first['cosine'] + .2 and last['mlm'] < first['mlm'] - .5
  weights = {'mlm': last['mlm'], 'kl': 2.5 * 4 * last['kl'], 'states': .5 * (1 - last['cosine'])}
  assert sum(weights.values()) == pytest.approx(np.mean([r['loss'] for r in found[-20:]]), rel=1e-4)


# what can't be


@pytest.mark.parametrize('values, message', [
    ({'objective': 'gpt', 'model.causal': True}, "teacher = .*: expected '', for objective = gpt"),
    ({'objective': 'classify'}, "expected '', for objective = classify"),
    ({'distill.teacher': '/nowhere/run'}, r"teacher = '/nowhere/run': expected the folder of a run.*nowhere/run/conf"),
    ({'distill.begin': 'middle'}, "begin = 'middle': expected one of 'layers', 'afresh'"),
    ({'distill.kl': 0.0}, 'kl = 0.0: expected more than 0'),
    ({'distill.temperature': 0.0}, 'temperature = 0.0: expected more than 0'),
    ({'distill.states': -1.0}, 'states = -1.0: expected 0 or more'),
    ({'data.length': 32}, "length = 32: expected at most the teacher's, 16"),
    ({'model.layers': 3}, "expected 'afresh', for the teacher's 4 layers are no multiple of the student's 3"),
    ({'model.hidden': 64}, "expected 'afresh', for model.hidden of the teacher is 128 and the student's 64"),
    ({'model.width': 16}, 'states = 0.5: expected 0: the teacher is 32 wide, the student 16'),
    ({'model.width': 16, 'distill.states': 0.0}, "expected 'afresh', for model.width"),
    ({'init_from': 'other'}, "init_from = 'other': expected '', for distill.begin = 'layers'"),
    ({'init_parts': (('body', 'x'),)}, r"init_parts = .*: expected \(\), for distill.teacher sets it"),
    ({'distill.teacher': '', 'distill.kl': 1.0}, 'kl = 1.0: expected 2.5, for distill.teacher is not set'),
    ({'distill.teacher': '', 'distill.begin': 'afresh'}, "begin = 'afresh': expected 'layers', for"),
])
def test_settings_that_cannot_be_are_told(data, teacher, values, message):
  with pytest.raises(ConfigError, match=message):
    load(student(data, teacher[0], **values))


def test_a_teacher_of_another_task_or_version_is_told(data, teacher, tmp_path):
  text = json.loads((teacher[0] / 'config.json').read_text())
  for change in ({'task': 'lab.systems.pose.task'}, {'objective': 'classify'},
                 {'model': {k: v for k, v in text['model'].items() if k != 'norm'}}):
    (tmp_path / 'config.json').write_text(json.dumps(text | change))
    with pytest.raises(ConfigError, match='expected a run of this version of the lab with objective = mlm'):
      load(student(data, tmp_path))


def test_learnt_positions_are_taken_whole_or_not_at_all(data, teacher):
  config = student(data, teacher[0], **{'data.length': 8, 'model.positions': 'learned'})
  found = distill.find(config)
  found.model.positions = 'learned'
  with pytest.raises(ConfigError, match="expected 'afresh', for the teacher has learnt 16 positions and the .* 8"):
    distill.check(config, found)
  config.distill.begin = 'afresh'
  distill.check(config, found)


def test_what_follows_is_set_once(data, teacher):
  config = student(data, teacher[0], **{'optim.frozen': 'positions'})
  load(config)
  parts = (('', str(teacher[0])), ('teacher', str(teacher[0])))
  assert (config.init_parts, config.optim.frozen) == (parts, 'positions|^teacher/')
  load(config)
  train.check(config)
  assert (config.init_parts, config.optim.frozen) == (parts, 'positions|^teacher/')
  optim.make(config.optim, 1).init({'positions': jnp.zeros(2), 'teacher': {'tokens': jnp.zeros(2)},
                                    'blocks': {'kernel': jnp.zeros((2, 2))}})


def test_a_teacher_that_lacks_a_weight_is_refused(data, teacher, tmp_path):
  copy = tmp_path / 'teacher'
  shutil.copytree(teacher[0], copy)
  text = json.loads((copy / 'config.json').read_text())
  text['model']['tied'] = False                # says that it has a head of its own, and it has none
  (copy / 'config.json').write_text(json.dumps(text))
  with pytest.raises(CheckpointError, match=r'teacher/head \(128, 32\) should come from .* has no such array \(head\)'):
    run(student(data, copy, **{'distill.begin': 'afresh'}), tmp_path / 'run')


def test_a_teacher_of_other_words_is_refused_before_anything_is_kept(teacher, tmp_path):
  """The runs are of texts; the fingerprint of the tokenizers tells them apart."""
  folders, own = {}, tmp_path / 'teacher'
  for name, words in (('one', 'the quick brown fox jumps over a lazy dog'), ('two', 'sphinx of black quartz judge my')):
    raw, draw = tmp_path / f'{name}-raw', np.random.default_rng(0)
    raw.mkdir()
    (raw / 'text.txt').write_text('\n\n'.join(' '.join(draw.choice(words.split(), 60)) for _ in range(40)))
    folders[name] = corpus.prepare(str(raw), str(tmp_path / name), tokenizer='wordpiece', vocabulary=64, length=16)[0]
  (own / train.ASSETS).mkdir(parents=True)
  shutil.copy(teacher[0] / 'config.json', own)
  shutil.copy(os.path.join(folders['one'], 'tokenizer.json'), own / train.ASSETS)
  assert load(student(folders['one'], own)).files().keys() == {'tokenizer.json', distill.FILE}
  for other in (student(folders['two'], own), student(folders['one'], teacher[0])):
    with pytest.raises(ConfigError, match='teacher = .*: expected a run with the tokenizer of data.dir'):
      run(other, tmp_path / 'other')
  assert not os.listdir(tmp_path / 'other')
