"""Text trees: settings, what is measured, and that a small one learns its text by heart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from configs import agent
from lab import metrics, optim, sharding
from lab.systems.agent import model, objectives, passes, scores, show, task
from lab.task import ConfigError, TrainState
from tests.systems.test_agent import TEXT, batch, small


def made(**values):
  config = small()
  config.update_from_flattened_dict(values)
  return config


def numbered(config):
  return {**batch(config), 'number': np.arange(4, dtype=np.uint32).reshape(2, 2)}


@pytest.mark.parametrize('key, value, told', [
    ('data.rows', (8, 8), 'config.data.rows'), ('data.rows', (9, 8, 4), 'level 0 needs at least'),
    ('data.lengths', (8, 6, 1), 'lengths of 2 or more'), ('data.rows', (99,) * 6, '1 to 5 levels'),
    ('model.widths', (16, 16, 16), 'expected 4'), ('model.widths', (16, 15, 16, 32), 'multiples of model.heads = 2'),
    ('model.compressor', 'mean', 'attention'), ('model.dropout', 1.0, 'less than 1'), ('loss.path', -1.0, 'at least 0'),
    ('model.repeats', 0, 'at least 1'), ('predict.verb', 'guess', 'rebuild'), ('predict.steps', 4, 'nothing reads it'),
    ('predict.verb', 'generate', 'no generator'), ('loss.levels', (1.0, 2.0), 'expected 3 numbers'),
    ('predict.nearest', 9, 'nothing reads it'), ('data.nodes', (14, 9), 'level 0 needs at least 15'),
    ('data.nodes', (14,), 'expected 2'), ('data.mixed', (.1,), 'expected 3 shares'),
    ('data.mixed', (.1, 1.0, 0.0), 'less than 1')])
def test_settings_that_do_not_fit_are_refused(key, value, told):
  config = made()
  config.unlock()
  section, name = key.split('.')
  config[section][name] = value
  with pytest.raises(ConfigError, match='config.') as e:
    task.make_task(config)
  assert told in str(e.value)


def by_heart(built, rows):
  """Parameters that know a batch by heart, and the losses on the way."""
  params, stats = jax.jit(built.init)(jax.random.key(0), rows)
  tx = optax.adam(optax.cosine_decay_schedule(1e-2, 250))

  @jax.jit
  def run(params):
    def one(carry, i):
      params, state = carry
      loss = lambda p: metrics.objective(built.loss(p, stats, rows, jax.random.key(1), i)[0])
      value, grads = jax.value_and_grad(loss)(params)
      updates, state = tx.update(grads, state)
      return (optax.apply_updates(params, updates), state), value
    return jax.lax.scan(one, (params, tx.init(params)), jnp.arange(250))
  (params, _), values = run(params)
  return params, np.asarray(values)


@pytest.fixture(scope='module')
def learnt():
  """Configuration, task, batch, parameters that know the batch by heart, and the losses on the way."""
  config = made()
  built, rows = task.make_task(config), numbered(config)
  return config, built, rows, *by_heart(built, rows)


def test_a_text_is_learnt_and_rebuilt_from_one_vector_a_paragraph(learnt):
  config, built, rows, params, values = learnt
  found = built.finish(metrics.merge({}, jax.device_get(jax.jit(built.measure)(params, {}, rows))))
  assert values[-1] < values[0] / 4
  assert min(found[k] for k in ('exact_word_types', 'words_in_sentences', 'words_in_paragraphs')) > 0.95
  outputs = jax.device_get(jax.jit(built.predict)(params, {}, rows, jax.random.key(0)))
  drawn = built.picture(outputs, {**rows, 'mask': np.ones(1)})['000000']
  assert '  text    So it goes on and\n' in drawn and '  text    on for a while.' not in drawn      # three of a level
  assert '  text    The cat sat. A dog ran off.\n  vector  (the same)' in drawn
  record, = list(built.records(outputs, {**rows, 'mask': np.ones(1)}))
  assert [len(record[f'share_{level}']) for level in range(3)] == [len(set(TEXT.split())), 5, 3]


def test_the_loss_is_the_sum_of_its_terms(learnt):
  config, built, rows, params, _ = learnt
  terms, _ = jax.jit(built.loss)(params, {}, rows, jax.random.key(0), 0)
  sums = jax.device_get(jax.jit(built.measure)(params, {}, rows))
  found = built.finish(metrics.merge({}, sums))
  np.testing.assert_allclose(found['loss'], metrics.objective(terms), rtol=1e-5)
  weights = {'reconstruct': 1.0, 'length': 0.3, 'difference': 0.05, 'masked': 0.1, 'coherence': 0.1}
  assert found['loss'] == pytest.approx(sum(weights[k.split('_')[0]] * found[k] for k in terms), rel=1e-5)
  assert not any(k.startswith(task.TERM) for k in found)


def test_training_mixes_units_and_nothing_else_does():
  config = made(**{'data.mixed': (.2, .2, .2)})
  plain, built, rows = task.make_task(made()), task.make_task(config), numbered(config)
  params = jax.jit(lambda: built.init(jax.random.key(0), rows)[0])()
  terms, others = (jax.jit(x.loss)(params, {}, rows, jax.random.key(1), 0)[0] for x in (built, plain))
  differ = {name for name in terms if float(terms[name][0]) != float(others[name][0])}
  assert {'reconstruct_0', 'reconstruct_1', 'reconstruct_2', 'reconstruct_0_from_2', 'difference_1'} <= differ
  sums, same = (str(jax.make_jaxpr(x.measure)(params, {}, rows)) for x in (built, plain))
  assert sums == same
  # hidden units are those of the text, and so are the labels of what was replaced
  levels = [passes.rows(rows, level) for level in range(3)]
  mixed = jax.jit(objectives.mixed, static_argnums=1)(levels, config.data.mixed, rows['number'])
  variables, net = {'params': params}, model.make(config)
  raw = jax.jit(lambda v: task.passed(config, net, v, rows, True, {'dropout': jax.random.key(1)}).raw)(variables)
  odd = jax.jit(objectives.altered)(levels, rows['number'])
  ups = jax.jit(lambda v: passes.up(net, v, mixed, [x.changed for x in odd]))(variables)
  for level in (1, 2):
    check = jax.jit(lambda v, x, level=level: net.apply(v, level, x, method='check'))
    judged = objectives.coherence(*check(variables, ups[level].others), odd[level].share)
    np.testing.assert_allclose(raw[f'coherence_{level}'][0], (judged * levels[level].valid).sum(), rtol=1e-4)


def test_without_the_path_loss_nothing_is_decoded_from_above():
  config = made(**{'loss.path': 0.0})
  built, rows = task.make_task(config), numbered(config)
  params = jax.eval_shape(lambda: built.init(jax.random.key(0), rows)[0])
  terms, _ = jax.eval_shape(built.loss, params, {}, rows, jax.random.key(0), 0)
  assert terms and not any('_from_' in name for name in terms)


def test_how_much_comes_back_is_counted_by_occurrence():
  """Twice the sentence 'The cat sat.' in one document is one row that counts twice; a word type counts once."""
  config, rows = small(), batch(small())
  levels = [passes.rows(rows, level) for level in range(3)]
  truth = jax.jit(jax.vmap(lambda x: passes.spelt(x, 1)))(levels[:2])
  spoilt = truth._replace(bytes=truth.bytes.at[0, 0, 1, 0].add(1))        # 'cat' in the first row
  rebuilt = jax.jit(scores.rebuilt, static_argnums=1)
  sums = rebuilt(levels, 1, spoilt)
  assert int(levels[1].counts[0, 0]) == 2
  assert {k: tuple(map(float, v)) for k, v in sums.items()} == {
      'words_in_sentences': (18, 20), 'exact_sentences': (4, 6)}
  truth = jax.jit(jax.vmap(lambda x: passes.spelt(x, 0)))(levels[:1])
  sums = rebuilt(levels, 0, truth)
  assert {k: tuple(map(float, v)) for k, v in sums.items()} == {'exact_word_types': (len(set(TEXT.split())),) * 2}


def test_the_area_under_the_roc_curve_is_that_of_all_pairs():
  random = np.random.default_rng(0)
  scores, labels = random.integers(0, 9, 60) / 8, random.random(60) < .4
  wins = [(a > b) + .5 * (a == b) for a in scores[labels] for b in scores[~labels]]
  assert show.auc(scores, labels) == pytest.approx(np.mean(wins), abs=1e-12)
  assert show.auc(scores, labels | True) is None


def test_generator_and_critic_have_their_own_gradients():
  config = made(**{'model.noise': 8})
  built, rows = task.make_task(config), numbered(config)
  params, _ = jax.jit(built.init)(jax.random.key(0), rows)

  @jax.jit
  def slopes(params):
    def one(name):
      return jax.grad(lambda p: built.loss(p, {}, rows, jax.random.key(1), 0)[0][name][0])(params)
    return one('critic'), one('generator')
  for name, grads in zip(('critic', 'generator'), slopes(params)):
    moved = {path.split('_')[0] for path, g in sharding.paths(grads) if np.abs(g).max() > 0}
    assert moved == {name}


@pytest.mark.parametrize('variant', ['', *agent.VARIANTS])
def test_every_large_array_has_a_rule(variant):
  config = agent.get_config(variant)
  built = task.make_task(config)
  params = jax.eval_shape(lambda: built.init(jax.random.key(0), None)[0])
  tx = optim.make(config.optim, 10)
  sharding.audit(built.rules, TrainState(jnp.int32(0), params, {}, jax.eval_shape(tx.init, params)))


def test_readable_text_is_one_line():
  assert show.readable(b'a\nb\x00\xff\xc3\xa9') == 'a\\nb\\x00\\xffé'


def test_levels_have_a_factor_of_their_own():
  rows = numbered(made())
  terms = {}
  for levels in ((), (1.0, 0.0, 2.0)):
    built = task.make_task(made(**{'loss.levels': levels, 'loss.plausible': 0.5}))
    params, _ = jax.jit(lambda key: built.init(key, None))(jax.random.key(0))
    terms[levels] = jax.device_get(jax.jit(built.loss)(params, {}, rows, jax.random.key(0), 0))[0]
  plain, scaled = terms.values()
  assert scaled.keys() == {k for k in plain if k.split('_')[1] != '1'} and 'plausible_2' in scaled
  for name in scaled:
    assert scaled[name][0] == pytest.approx(plain[name][0] * (2 if name.split('_')[1] == '2' else 1), rel=1e-5)


def test_a_memory_is_read_trained_and_scored():
  config = made(**{'model.questions': 4})
  built, rows = task.make_task(config), numbered(config)
  params = jax.eval_shape(lambda: built.init(jax.random.key(0), rows)[0])
  terms, _ = jax.eval_shape(built.loss, params, {}, rows, jax.random.key(0), 0)
  sums = jax.eval_shape(built.measure, params, {}, rows)
  assert 'gate' in terms and 'gate' in sums
  assert {f'names_in_sentences{tail}' for tail in ('', '_without_memory', '_other_memory')} <= sums.keys()
  assert 'bytes_1' in jax.eval_shape(built.predict, params, {}, rows, jax.random.key(0))
