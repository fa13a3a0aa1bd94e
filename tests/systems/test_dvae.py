"""dVAE: tokens and their canvas, what anneals, the networks' sizes, settings, training and prediction."""

import collections
import contextlib
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import dvae
from data_pipelines import arc
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lab import main, metrics, optim, schedules, sharding, train
from lab.checkpoint import Checkpoints, split
from lab.metrics import objective
from lab.systems.dvae import anneal, bottleneck, canvas, config as shape, model, monitors, settings, show, task
from lab.task import ConfigError, TrainState
from ml_collections import ConfigDict

GRID = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)
TURNS = (lambda x: x, np.flipud, np.fliplr, lambda x: x[::-1, ::-1])
SYMMETRIES = [turn(g) for g in (GRID, GRID.T) for turn in TURNS]


def on_canvas(cells, side):
  out = np.full((1, side, side), canvas.OUTSIDE, np.uint8)
  out[0, :cells.shape[0], :cells.shape[1]] = cells
  return jnp.array(out), jnp.array([cells.shape], jnp.int32)


def small(**values):
  config = dvae.get_config('smoke')
  config.update_from_flattened_dict(values)
  return config


# tokens


@pytest.mark.parametrize('layout', ['projected', 'sequence'])
@pytest.mark.parametrize('cells', [GRID, GRID.T, np.zeros((1, 1), np.uint8), np.full((5, 5), 9, np.uint8),
                                   np.zeros((5, 1), np.uint8), np.full((1, 5), 3, np.uint8)])
def test_layouts_can_be_read_back(layout, cells):
  ids, places = canvas.tokens(*on_canvas(cells, 5), layout)
  assert ids.shape == (1, canvas.length(5, layout)) and places.shape == (*ids.shape, 2)
  np.testing.assert_array_equal(canvas.grid_of(np.asarray(ids[0]), layout), cells)


def test_what_the_layouts_are():
  ids, places = canvas.tokens(*on_canvas(GRID, 3), 'projected')
  assert ids[0].tolist() == [1, 2, 3, 4, 5, 6, 15, 15, 15]
  assert places[0].tolist() == [[i, j] for i in range(3) for j in range(3)]
  ids, places = canvas.tokens(*on_canvas(GRID.T, 3), 'sequence')
  assert ids[0].tolist() == [1, 4, 10, 2, 5, 10, 3, 6, 10, 15, 15, 15]
  assert places[0].tolist()[:4] == [[0, 0], [0, 1], [0, 2], [1, 0]] and places[0].tolist()[-1] == [0, 0]


def test_training_sees_all_eight_symmetries_equally_often_and_nothing_else():
  number = np.stack([np.full(4000, 7), np.arange(4000)], 1).astype(np.uint32)
  grid, size = (jnp.repeat(x, 4000, 0) for x in on_canvas(GRID, 4))
  options = ConfigDict({'colours': False, 'symmetries': True, 'joined': 0.0, 'translate': 0.0})
  grids, sizes = jax.jit(lambda g, s, n: canvas.augmented(g, s, n, options))(grid, size, number)
  counts = np.zeros(8)
  for g, (h, w) in zip(np.asarray(grids), np.asarray(sizes)):
    cells = g[:h, :w]
    assert (np.delete(g.ravel(), [i * 4 + j for i in range(h) for j in range(w)]) == canvas.OUTSIDE).all()
    counts[[x.shape == cells.shape and (x == cells).all() for x in SYMMETRIES].index(True)] += 1
  assert abs(counts - 500).max() < 5 * (4000 * 7 / 64)**.5            # binomial: 5 deviations


def test_training_permutes_colours_and_moves_grids():
  number = np.stack([np.full(3000, 7), np.arange(3000)], 1).astype(np.uint32)
  grid, size = (jnp.repeat(x, 3000, 0) for x in on_canvas(GRID, 4))
  options = ConfigDict({'colours': True, 'symmetries': False, 'joined': 0.0, 'translate': 1.0})
  run = jax.jit(lambda g, s, n: canvas.augmented(g, s, n, options))
  grids, _ = map(np.asarray, run(grid, size, number))
  firsts, places = np.zeros(10), np.zeros((3, 2))
  for g in grids:
    i, j = np.argwhere(g != canvas.OUTSIDE)[0]
    cells = g[i:i + 2, j:j + 3]
    assert len(set(cells.ravel())) == 6 and cells.max() < 10 and (g != canvas.OUTSIDE).sum() == 6
    firsts[cells[0, 0]] += 1
    places[i, j] += 1
  assert abs(firsts - 300).max() < 5 * (3000 * .09)**.5 and abs(places - 500).max() < 5 * (3000 * 5 / 36)**.5
  # what was done can be told again
  done = canvas.augmentation(size, number, options, 4)
  for i in (0, 5, 9):
    row, column = np.asarray(done.offset[i])
    np.testing.assert_array_equal(grids[i, row:row + 2, column:column + 3], np.asarray(done.colours[i])[GRID])
    assert not done.flips[i].any()
  # a grid's draw hangs on its number alone, not on its batch
  np.testing.assert_array_equal(run(grid[:3], size[:3], number[5:8])[0], grids[5:8])


def beside(first, second, cut, side):
  """The first `cut` columns of one grid and those of another, as many as fit, of the rows that both have."""
  height = min(len(first), len(second))
  return np.concatenate([first[:height, :cut], second[:height]], 1)[:, :side]


def test_joined_grids_are_the_first_columns_of_one_and_those_of_the_next_or_rows():
  number = np.stack([np.full(600, 3), np.arange(600)], 1).astype(np.uint32)
  first, second = np.arange(12).reshape(3, 4) % 7, 7 + np.arange(6).reshape(2, 3) % 3
  parts = [on_canvas(x.astype(np.uint8), 5) for x in (first, second)]
  grid, size = (jnp.tile(jnp.concatenate(x), (300, *[1] * (x[0].ndim - 1))) for x in zip(*parts))
  options = ConfigDict({'colours': False, 'symmetries': False, 'joined': 0.5, 'translate': 0.0})
  grids, sizes = map(np.asarray, jax.jit(lambda *x: canvas.augmented(*x, options))(grid, size, number))
  for start, (one, other) in enumerate(((first, second), (second, first))):
    made = {('beside', cut): beside(one, other, cut, 5) for cut in range(1, one.shape[1] + 1)}
    made |= {('below', cut): beside(one.T, other.T, cut, 5).T for cut in range(1, one.shape[0] + 1)}
    seen = collections.Counter()
    for cells, (height, width) in zip(grids[start::2], sizes[start::2]):
      inside = cells[:height, :width]
      found = [k for k, wanted in {**made, 'apart': one}.items() if np.array_equal(inside, wanted)]
      assert len(found) == 1 and (cells != canvas.OUTSIDE).sum() == height * width
      seen[found[0]] += 1
    assert seen.keys() == {*made, 'apart'} and abs(seen['apart'] - 150) < 5 * 75**.5


def test_joining_is_the_same_on_eight_devices():
  rng = np.random.default_rng(0)
  grid, size = (np.concatenate(x) for x in zip(*(on_canvas(rng.integers(0, 10, shape).astype(np.uint8), 6)
                                                 for shape in rng.integers(1, 7, (16, 2)))))
  number = np.stack([np.full(16, 7), np.arange(16)], 1).astype(np.uint32)
  options = ConfigDict({'colours': True, 'symmetries': True, 'joined': 0.8, 'translate': 0.0})
  run = jax.jit(lambda *x: canvas.augmented(*x, options))
  spread = NamedSharding(Mesh(np.array(jax.devices()), ('data',)), PartitionSpec('data'))
  jax.tree.map(np.testing.assert_array_equal, run(*jax.device_put((grid, size, number), spread)),
               run(grid, size, number))


def test_hidden_tokens_are_a_share_of_the_grid_and_never_padding():
  ids, _ = canvas.tokens(*on_canvas(np.zeros((20, 20), np.uint8), 30), 'projected')
  number = np.stack([np.zeros(500), np.arange(500)], 1).astype(np.uint32)
  seen = np.asarray(canvas.hidden(jnp.repeat(ids, 500, 0), number, jnp.float32(.5)))
  share = (seen == canvas.MASK).sum(1) / 400
  assert ((seen == canvas.PAD) == (np.asarray(ids) == canvas.PAD)).all()
  # uniform in (0, .5): mean .25, deviation .5 / sqrt(12) = .144
  assert abs(share.mean() - .25) < 5 * .144 / 500**.5 and share.max() < .6 and share.std() > .12
  assert (canvas.hidden(ids, number[:1], jnp.float32(0)) == ids).all()


# what anneals


def test_temperature_falls_as_published():
  section = shape.get_config().quantizer.tau
  # 1 + (1/16 - 1) (1 - cos(pi s)) / 2 at s = 1/4, 1/2, and behind the end
  for step, wanted in ((0, 1.0), (37_500, .862706), (75_000, .53125), (150_000, .0625), (10**6, .0625)):
    np.testing.assert_allclose(jax.jit(lambda s: anneal.value(section, s))(step), wanted, rtol=2e-6)


def test_the_rate_warms_up_and_falls_as_published():
  config = dvae.get_config('full')
  config.optim.update({'learning_rate': 1e-3, 'end_rate': 1e-5, 'warmup_steps': 10_000, 'schedule': 'cosine'})
  rate = schedules.base(config.optim, 1_000_000)
  for update, wanted in ((5_000, 5e-4), (10_000, 1e-3), (505_000, 5.05e-4), (1_000_000, 1e-5)):
    np.testing.assert_allclose(rate(update - 1), wanted, rtol=1e-5)


def test_kinds_of_annealing():
  at = lambda kind, step, delay=0: float(anneal.value(ConfigDict(
      {'start': 1.0, 'end': .25, 'steps': 10, 'kind': kind, 'delay': delay}), step))
  assert at('constant', 0) == .25 and at('linear', 4) == pytest.approx(.7) and at('threshold', 9) == 1
  assert at('threshold', 10) == .25 and at('exponential', 5) == pytest.approx(.5)
  assert at('cosine', 5) == pytest.approx(.625) and at('linear', 4, delay=4) == 1 and at('linear', 14, delay=4) == .25


# networks


def test_the_published_network_has_as_many_parameters():
  config = shape.get_config()
  config.model.update({'latents': 16, 'pool': 'chain', 'slots': False, 'absolute': False})
  net = model.make(config)
  params = jax.eval_shape(net.init, jax.random.key(0), *model.forms(config))['params']
  assert sum(x.size for x in jax.tree.leaves(params)) == 12_583_936


WITHOUT = {'loss.kl': 0.0, 'loss.usage': 0.0, 'loss.beta.steps': 10_000}      # of quantizers without a distribution


def batch(count=6):
  grids = arc.drawn(count, 4)
  cells = np.full((count, 4, 4), canvas.OUTSIDE, np.uint8)
  for i, g in enumerate(grids):
    cells[i, :g.shape[0], :g.shape[1]] = g
  return {'grid': cells, 'size': np.array([g.shape for g in grids], np.int32), 'mask': np.ones(count, np.float32),
          'number': np.stack([np.zeros(count), np.arange(count)], 1).astype(np.uint32),
          'pair': np.arange(count) // 2, 'is_input': np.arange(count) % 2}


@pytest.mark.parametrize('kind', settings.KINDS)
def test_every_quantizer_teaches_all_of_the_network(kind):
  values = {'quantizer.kind': kind, 'augment.translate': .5, 'mask.most.end': .5, 'mask.most.steps': 1}
  if kind in model.CODEBOOK:
    values |= {'loss.usage': .1, 'loss.tc': .1, 'loss.mi': -.1, 'loss.dwkl': .1, 'loss.relu': kind == 'gumbel',
               'loss.mixture': 'mws' if kind == 'reinmax' else 'batch'}
  else:
    values |= WITHOUT | ({'quantizer.levels': (4, 4)} if kind == 'fsq' else {})
  built = task.make_task(small(**values))
  params, stats = jax.jit(built.init)(jax.random.key(0), None)

  @jax.jit
  def step(params, stats, rows, number):
    total = lambda p: (lambda terms, rest: (objective(terms), (terms, rest)))(
        *built.loss(p, stats, rows, jax.random.key(1), number))
    return jax.grad(total, has_aux=True)(params), built.measure(params, stats, rows), built.predict(
        params, stats, rows, jax.random.key(0))
  rows = batch()
  arrays = {k: v for k, v in rows.items() if k not in ('pair', 'is_input')}
  if built.begin:
    stats = jax.jit(built.begin)(params, stats, arrays, jax.random.key(1))
  for number in range(1, 4):                      # and in the third nothing is compiled any more
    (grads, (terms, (new, said))), sums, outputs = step(params, stats, arrays, jnp.int32(number))
    stats = new
  assert step._cache_size() == 1
  for path, g in sharding.paths(grads):
    assert np.isfinite(g).all() and np.abs(g).max() > 0, path
  assert ({'kl', 'usage', 'tc', 'mi', 'dwkl'} <= terms.keys()) == (kind in model.CODEBOOK)
  for name, weight in (('kl', .02), ('tc', .1), ('mi', -.1), ('usage', .1)) if kind in model.CODEBOOK else ():
    raw = float(said[name + ('_nats' if name == 'usage' else '_nats_per_latent')][0])      # and beta is 1
    wanted = weight * (max(raw, 0) if kind == 'gumbel' and name in settings.PARTS else raw)
    assert float(terms[name][0]) == pytest.approx(wanted, rel=1e-5, abs=1e-7)
  assert ('commitment' in terms) == (kind == 'vq_ema')
  scores = monitors.score(list(show.records(small(**values), jax.device_get(outputs), rows)), 16)
  assert 0 <= scores['exact_grids'] <= 1 and ('code_usage' in scores) == (kind != 'none')
  assert np.isfinite(metrics.ratios(jax.device_get(sums))['loss'])


def test_the_codebook_begins_with_what_the_first_update_looks_up():
  config = small(**{'quantizer.kind': 'vq_ema', 'augment.translate': .5, 'mask.most.start': .5, 'mask.most.end': .5,
                    'loss.commitment': 1.0, **WITHOUT})
  built, key = task.make_task(config), jax.random.key(3)
  params, stats = jax.jit(built.init)(jax.random.key(0), None)
  rows = {k: jnp.asarray(v) for k, v in batch().items() if k not in ('pair', 'is_input')}
  rows['mask'] = rows['mask'].at[4:].set(0)
  begun = jax.jit(built.begin)(params, stats, rows, key)
  assert jax.tree.map(jnp.shape, begun) == jax.tree.map(jnp.shape, stats)
  # as many codes as there are latents would leave nothing to commit to; with fewer it is what k-means leaves
  loss = jax.jit(lambda stats: built.loss(params, stats, rows, key, jnp.int32(0))[0]['commitment'])
  left, other = (float(total / weight) for total, weight in (loss(begun), loss(jax.jit(built.begin)(
      params, stats, {**rows, 'number': rows['number'] + 9}, key))))
  assert 0 < left < .5 * other      # of other augmentations of the same grids the words are further away
  assert float(begun['vq'].count.sum()) >= 4 * 8      # real latents alone: four grids of eight


def test_the_codebook_of_vq_is_kept(tmp_path):
  config = small(**{'quantizer.kind': 'vq_ema', **WITHOUT})
  built, tx = task.make_task(config), optim.make(config.optim, 10)
  params, _ = jax.jit(built.init)(jax.random.key(0), None)
  latents = jnp.array(np.random.default_rng(0).normal(size=(6, 8, 32)), jnp.float32)
  stats = bottleneck.begun(config, latents, jnp.ones(6), jax.random.key(1))
  state = TrainState(jnp.int32(1), params, stats, tx.init(params))
  with contextlib.closing(Checkpoints(str(tmp_path), config)) as store:
    store.save(1, state, {})
    store.settle()
    items = split(state)
    found = store.restore(1, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items))
  assert np.ptp(stats['vq'].codebook) > 0
  jax.tree.map(np.testing.assert_array_equal, found['stats'], stats)


@pytest.mark.parametrize('variant', ['', *dvae.VARIANTS])
@pytest.mark.parametrize('kind, pool', [('reinmax', ''), ('vq_ema', ''), ('reinmax', 'lattice')])
def test_every_large_array_has_a_rule(variant, kind, pool):
  config = dvae.get_config(variant)
  if pool and variant != 'chain':
    config.model.update({'pool': pool, 'pool_layers': 2})
  if kind == 'vq_ema':
    config.update_from_flattened_dict({'quantizer.kind': kind, **WITHOUT})
  else:
    config.update_from_flattened_dict({'quantizer.kind': kind, 'loss.mi': .1, 'loss.mixture': 'running'})
  config.model.codes, built = 8192, task.make_task(config)
  params, stats = jax.eval_shape(built.init, jax.random.key(0), None)
  tx = optim.make(config.optim, 10)
  sharding.audit(built.rules, TrainState(jnp.int32(0), params, stats, jax.eval_shape(tx.init, params)))


def test_the_sequence_layout_learns_and_draws_whatever_it_says():
  config = small(**{'data.layout': 'sequence'})
  built, rows = task.make_task(config), batch()
  params, stats = jax.jit(built.init)(jax.random.key(0), None)
  arrays = {k: v for k, v in rows.items() if k not in ('pair', 'is_input')}
  outputs = jax.device_get(jax.jit(built.predict)(params, stats, arrays, jax.random.key(0)))
  for cells in (outputs['cells'], np.full_like(outputs['cells'], canvas.PAD), np.full_like(
      outputs['cells'], canvas.NEWLINE)):
    made = {**outputs, 'cells': cells}
    assert len(list(show.records(config, made, rows))) == len(show.picture(config, made, rows)) == 6
    named = show.picture(config, made, {**rows, 'record': np.arange(10, 16)})      # of an evaluation, batch by batch
    assert list(named) == [f'0000{n}' for n in range(10, 16)]
  truth = {**outputs, 'cells': outputs['tokens']}
  assert all(r['exact'] and r['right'] == r['cells'] == r['height'] * r['width']
             for r in show.records(config, truth, rows))


def test_padding_alone_rebuilds_nothing():
  rows = batch()
  ids, _ = canvas.tokens(jnp.array(rows['grid']), jnp.array(rows['size']), 'projected')
  logits = jnp.broadcast_to(jax.nn.one_hot(canvas.PAD, canvas.VOCABULARY) * 9, (*ids.shape, canvas.VOCABULARY))
  found = metrics.ratios(jax.device_get(task.judge(small(), logits, ids, jnp.ones(6))[1]))
  assert found['non_pad_accuracy'] == found['exact_grids'] == 0
  assert found['padding_share'] == found['token_accuracy'] == pytest.approx(float((ids == canvas.PAD).mean()))


# settings


@pytest.mark.parametrize('values, said', [
    ({'quantizer.kind': 'fsq', 'quantizer.levels': (3, 4), **WITHOUT}, 'quantizer.levels'),
    ({'quantizer.kind': 'vq_ema'}, 'loss.kl'), ({'quantizer.hard_from': 5}, 'quantizer.hard_from'),
    ({'quantizer.tau.end': .5}, 'quantizer.tau.end'), ({'loss.relu': True}, 'loss.relu'),
    ({'quantizer.kind': 'vq_ema', **WITHOUT, 'optim.accumulate': 2}, 'optim.accumulate'),
    ({'quantizer.kind': 'vq_ema', **WITHOUT, 'init_from': 'runs/x'}, 'init_from'),
    ({'loss.beta.kind': 'exponential'}, 'loss.beta.start'),
    ({'augment.on': False, 'augment.colours': False}, 'augment.colours'),
    ({'model.pool': 'chain', 'model.pool_layers': 1, 'model.attention': 'flash'}, 'model.attention'),
    ({'loss.mixture': 'running', 'loss.tc': 1.0}, 'loss.tc'),
    ({'model.heads': 3}, 'model.width'), ({'quantizer.reinmax_tau': .5}, 'quantizer.reinmax_tau'),
    ({'data.layout': 'sequence', 'augment.translate': .1}, 'augment.translate'),
    ({'quantizer.tau.kind': 'sine'}, 'quantizer.tau.kind'), ({'loss.mixture': 'mws'}, 'loss.mixture'),
    ({'mask.most.end': 2.0}, 'mask.most.end'), ({'model.pool': 'lattice', 'data.layout': 'sequence'}, 'model.pool'),
    ({'model.pool': 'lattice', 'model.latents': 17}, 'model.latents'), ({'loss.pad_weight': 0.0}, 'loss.pad_weight'),
    ({'quantizer.kind': 'none', **WITHOUT, 'predict.verb': 'decode'}, 'predict.verb'),
    ({'loss.kl': math.nan}, 'loss.kl'),
    ({'quantizer.kind': 'gumbel', 'quantizer.tau.end': math.nan}, 'quantizer.tau.end'),
    ({'loss.beta.kind': 'constant', 'loss.beta.start': .5}, 'loss.beta.start'),
    ({'mask.most.delay': 5}, 'mask.most.delay'), ({'predict.steps': 9}, 'predict.steps'),
    ({'predict.verb': 'interpolate', 'predict.steps': 99_999}, 'predict.steps')])
def test_settings_that_cannot_run_are_named(values, said):
  with pytest.raises(ConfigError, match=said.replace('.', r'\.')):
    task.make_task(small(**values))


# prediction


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('dvae')
  config = small(**{'input.batch_size': 8, 'total_steps': 2, 'checkpoint.steps': 0, 'eval_steps': 0})
  train.run(task.make_task(config), config, str(folder))
  return folder


def predicted(run, tmp_path, content, *options):
  source = tmp_path / 'in.json'
  source.write_text(json.dumps(content))
  code = main.main(['main', f'--workdir={run}', '--mode=predict', f'--input={source}', f'--output={tmp_path / "out"}',
                    '--step=latest', '--config=', *options])
  path = tmp_path / 'out' / 'predictions.jsonl'
  return code, [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_grids_are_rebuilt_and_codes_decoded(run, tmp_path):
  code, (record,) = predicted(run, tmp_path, [[1, 2], [3, 4]])
  assert code == 0 and len(record['codes']) == 8 and all(0 <= c < 16 for c in record['codes'])
  assert record['exact'] == (record['grid'] == [[1, 2], [3, 4]])
  assert [p for p in os.listdir(tmp_path / 'out') if p.endswith('.png')]
  code, (again,) = predicted(run, tmp_path, record['codes'], '--config.predict.verb=decode')
  assert code == 0 and again['grid'] == record['grid']


def test_between_two_grids(run, tmp_path):
  code, (record,) = predicted(run, tmp_path, [[[1, 2], [3, 4]], [[5, 5, 5]]], '--config.predict.verb=interpolate')
  assert code == 0 and len(record['grids']) == 8


def test_nats_are_those_of_the_distribution_that_is_trained():
  ids, logits = jnp.zeros((1, 16), jnp.int32), jnp.zeros((1, 16, canvas.VOCABULARY)).at[..., 0].set(100.0)
  for stablemax, wanted in ((False, 0.0), (True, math.log((101 + 15) / 101))):
    _, sums = task.judge(small(**{'loss.stablemax': stablemax, 'loss.gamma': 2.0}), logits, ids, jnp.ones(1))
    assert sums['nats_per_token'][0] / sums['nats_per_token'][1] == pytest.approx(wanted, abs=1e-6)
