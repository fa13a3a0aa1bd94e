"""The lattice of a dVAE: every cell has one place, a header tells sizes and colours, and the rest is learnt."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import dvae
from lab import main, optim, sharding, train
from lab.systems.dvae import canvas, header, lattice, model, settings, show, task
from lab.task import ConfigError, TrainState
from tests.systems.test_dvae import batch, on_canvas


def small(**values):
  config = dvae.get_config('smoke')
  config.model.update({'pool': 'lattice', 'pool_layers': 2})
  config.update_from_flattened_dict(values)
  return config


@pytest.mark.parametrize('latents, side', [(1, 6), (5, 7), (12, 32), (17, 9), (119, 32), (256, 12)])
def test_a_grid_is_cut_into_no_more_blocks_than_latents_and_none_is_too_long(latents, side):
  found, most = lattice.divisions(latents, side), lattice.longest(latents, side)
  for height in range(1, side + 1):
    for width in range(1, side + 1):
      rows, columns = found[height, width].tolist()
      assert 1 <= rows <= height and 1 <= columns <= width and rows * columns <= latents
      assert -(-height // rows) <= most and -(-width // columns) <= most
      if height * width <= latents:
        assert (rows, columns) == (height, width)


def test_of_all_divisions_the_least_crowded_is_taken():
  def crowd(size, parts):
    return sum(len(part) ** 2 for part in np.array_split(np.arange(size), parts))
  for height, width in ((5, 7), (7, 7), (1, 7), (3, 6), (7, 2)):
    options = {(a, b): crowd(height, a) * crowd(width, b) for a in range(1, height + 1) for b in range(1, width + 1)
               if a * b <= 6 and -(-height // a) <= 4 and -(-width // b) <= 4}
    found = tuple(lattice.divisions(6, 7)[height, width].tolist())
    assert options[found] == min(options.values())
    slant = lambda parts: abs(np.log(height / parts[0] * parts[1] / width))
    assert slant(found) == pytest.approx(min(slant(k) for k, cost in options.items() if cost == options[found]))


@pytest.mark.parametrize('distinct', [False, True])
def test_every_cell_is_read_and_drawn_in_its_own_block(distinct):
  """What is put into a cell of the readout comes out in the cell of the grid that was read there."""
  latents, side = 7, 6
  net, params, places = network(**{'model.latents': latents, 'data.side': side, 'model.distinct': distinct,
                                   'model.slots': False, 'model.width': 32})
  rng = np.random.default_rng(0)
  sizes = [(h, w) for h in range(1, side + 1) for w in range(1, side + 1)]
  grids = [rng.integers(0, 2, size).astype(np.uint8) for size in sizes]
  ids = jnp.concatenate([canvas.tokens(*on_canvas(g, side), 'projected')[0] for g in grids])
  head = header.of(ids, distinct)
  most = lattice.longest(latents, side)
  still(params['body'], ('encoder', 'decoder'))
  body = params['body']
  body['extents'] = jnp.zeros_like(body['extents'])
  body['places'] = jnp.zeros_like(body['places'])
  # a cell of rank 1 lights a feature of its own number in its block; the readout turns it into that rank
  width = body['tokens'].shape[-1]
  lit = jnp.zeros_like(body['tokens']).at[jnp.arange(most ** 2), 1, jnp.arange(most ** 2)].set(1.0)
  body['tokens'] = lit.at[jnp.arange(most ** 2), 0, jnp.arange(most ** 2)].set(-1.0)
  kernel = np.zeros((width, most ** 2, canvas.VOCABULARY), np.float32)
  kernel[np.arange(most ** 2), np.arange(most ** 2), 1] = 1
  body['readout']['kernel'] = jnp.asarray(kernel.reshape(width, -1))
  found = net.apply({'params': params}, ids, places, head, method=lambda m, *a: m.body.look(*a))
  logits = net.apply({'params': params}, found, head, method=lambda m, *a: m.body.draw(*a))
  ranks = jnp.take_along_axis(jnp.argsort(head.colours, 1), jnp.minimum(ids, 9), 1)
  lights = jnp.take_along_axis(logits, jnp.broadcast_to(head.colours[:, 1, None, None], (*ids.shape, 1)), 2)[..., 0]
  inside = np.asarray(ids) < canvas.COLOURS
  assert (np.asarray(lights > 0) == np.asarray(ranks == 1))[inside].all()
  assert (np.asarray(lights)[inside] != 0).all()


def still(body, parts):
  """Takes away what a Transformer's layers do, so that each place keeps to itself."""
  for part in parts:
    blocks = body[part]['blocks']
    for layer, name in (('attention', 'out'), ('mlp', 'down')):
      blocks[layer][name]['kernel'] = jnp.zeros_like(blocks[layer][name]['kernel'])


def test_extents_go_to_the_last_cell_inside():
  sizes = [(1, 1), (2, 3), (5, 5), (4, 1)]
  made = [canvas.tokens(*on_canvas(np.full(size, 3, np.uint8), 5), 'projected')[0] for size in sizes]
  ids = jnp.concatenate([*made, jnp.full((1, 25), canvas.PAD), jnp.full((1, 25), canvas.PAD).at[0, 13].set(7)])
  assert canvas.extents(ids).tolist() == [*map(list, sizes), [0, 0], [3, 4]]


def test_the_header_of_a_grid():
  cells = np.array([[7, 7, 2], [7, 2, 0]], np.uint8)
  ids, _ = canvas.tokens(*on_canvas(cells, 5), 'projected')
  head = header.of(ids, False)
  assert head.rows is None and head.extents.tolist() == [[2, 3]]
  assert head.colours.tolist() == [[7, 2, 0, 1, 3, 4, 5, 6, 8, 9]]
  assert header.bits(32, False) == pytest.approx(10 + 21.79, abs=0.01)
  hidden = ids.at[0, 0].set(canvas.MASK)
  assert header.of(hidden, False).colours.tolist() == [[2, 7, 0, 1, 3, 4, 5, 6, 8, 9]]       # of two, the lower one


def test_the_header_tells_which_rows_and_columns_are_alike():
  cells = np.array([[1, 2, 1, 2], [3, 3, 3, 3], [1, 2, 1, 2], [0, 2, 0, 5]], np.uint8)
  ids, _ = canvas.tokens(*on_canvas(cells, 6), 'projected')
  head = header.of(ids, True)
  assert head.rows[0, :4].tolist() == [0, 1, 0, 2] and head.columns[0, :4].tolist() == [0, 1, 0, 2]
  assert header.folded(head).tolist() == [[3, 3]] and header.folded(header.of(ids, False)).tolist() == [[4, 4]]
  assert header.firsts(head.rows)[0, :3].tolist() == [0, 1, 3]
  assert header.firsts(head.columns)[0, :3].tolist() == [0, 1, 3]


@pytest.mark.parametrize('side, ways', [(1, 1), (2, 3), (3, 8), (4, 23), (5, 75)])
def test_a_header_counts_the_ways_to_part_rows(side, ways):
  """1 + 2 + 5 + 15 + 52, Bell's numbers: https://oeis.org/A000110; those counted here go through all numberings."""
  counted = {n: {tuple(np.unique(each, return_inverse=True)[1]) for each in np.ndindex((n,) * n)
                 if all(each[i] <= max(each[:i], default=-1) + 1 for i in range(n))} for n in range(1, side + 1)}
  assert sum(map(len, counted.values())) == ways
  assert header.bits(side, True) == pytest.approx(2 * np.log2(ways) + np.log2(3628800))


def test_between_two_headers():
  one = header.Header(jnp.array([[2, 3]]), jnp.arange(10)[None], None, None)
  other = header.Header(jnp.array([[6, 3]]), jnp.arange(10)[None, ::-1], None, None)
  same = jnp.zeros((1, 6), jnp.int32)
  told = [x._replace(rows=same + i, columns=same) for i, x in enumerate((one, other))]
  assert [header.between(*told, jnp.float32(s)).extents[0, 0] for s in (0, .49, .5, 1)] == [2, 2, 6, 6]
  assert [header.between(*told, jnp.float32(s)).rows[0, 0] for s in (0, .49, .5, 1)] == [0, 0, 1, 1]
  sizes = [header.between(one, other, jnp.float32(s)) for s in (0, .25, .5, 1)]
  assert [h.extents[0].tolist() for h in sizes] == [[2, 3], [3, 3], [4, 3], [6, 3]]
  assert [int(h.colours[0, 0]) for h in sizes] == [0, 0, 9, 9]


def network(**values):
  config = small(**values)
  net, (ids, places) = model.make(config), model.forms(config)
  return net, jax.jit(net.init)(jax.random.key(0), ids, places)['params'], places


@pytest.mark.parametrize('distinct', [False, True])
def test_a_permutation_of_colours_changes_nothing_but_the_header(distinct):
  net, params, places = network(**{'model.distinct': distinct})
  cells = np.array([[0, 0, 1], [0, 2, 1], [0, 2, 0], [0, 1, 1]], np.uint8)          # no two equally often
  table = np.array([4, 0, 9, 8, 1, 2, 3, 5, 6, 7], np.uint8)
  (ids, _), (other, _) = (canvas.tokens(*on_canvas(x, 4), 'projected') for x in (cells, table[cells]))

  @jax.jit
  def run(ids):
    head = header.of(ids, distinct)
    found = net.apply({'params': params}, ids, places, head, method='encode')
    words = net.apply({'params': params}, jax.nn.softmax(found), method='words')
    return found, net.apply({'params': params}, words, head, method='decode')
  (found, logits), (again, renamed) = run(ids), run(other)
  np.testing.assert_array_equal(found, again)
  there = list(np.unique(cells))                  # what the grid has not, no cell can name
  np.testing.assert_array_equal(logits[..., there], renamed[..., table[there]])
  np.testing.assert_array_equal(logits[..., 10:], renamed[..., 10:])


def test_outside_of_the_extents_all_is_padding():
  net, params, _ = network()
  head = header.Header(jnp.array([[2, 3], [4, 1]]), jnp.broadcast_to(jnp.arange(10)[None], (2, 10)), None, None)
  logits = net.apply({'params': params}, jax.random.normal(jax.random.key(1), (2, 8, 32)), head, method='decode')
  p = np.asarray(jax.nn.softmax(logits)).reshape(2, 4, 4, -1)
  for i, (h, w) in enumerate(np.asarray(head.extents)):
    inside = np.zeros((4, 4), bool)
    inside[:h, :w] = True
    assert (p[i][~inside][:, canvas.PAD] == 1).all() and (p[i][inside][:, canvas.PAD] < .5).all()


def test_what_the_encoder_sees_of_a_cell_is_in_one_place():
  net, params, places = network(**{'model.latents': 4})
  grid = np.zeros((3, 3), np.uint8)
  ids, _ = canvas.tokens(*on_canvas(grid, 4), 'projected')
  head = header.of(ids, False)
  still(params['body'], ('encoder',))
  run = jax.jit(lambda ids: net.apply({'params': params}, ids, places, head, method=lambda m, *a: m.body.look(*a)))
  before = run(ids)
  for row in range(3):
    for column in range(3):
      changed = np.argwhere(np.any(run(ids.at[0, row * 4 + column].set(9)) != before, -1)[0]).ravel().tolist()
      assert changed == [2 * (row // 2) + column // 2]                    # of 3 cells, 2 and 1


def test_rows_that_are_alike_are_told_once():
  net, params, places = network(**{'model.distinct': True, 'model.latents': 4})
  grid = np.array([[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]], np.uint8)
  once, _ = canvas.tokens(*on_canvas(np.array([[0, 1], [1, 0]], np.uint8), 4), 'projected')
  ids, _ = canvas.tokens(*on_canvas(grid, 4), 'projected')
  params['body']['extents'] = jnp.zeros_like(params['body']['extents'])
  look = jax.jit(lambda ids: net.apply({'params': params}, ids, places, header.of(ids, True),
                                       method=lambda m, *a: m.body.look(*a)))
  np.testing.assert_array_equal(look(ids), look(once))
  words = jax.random.normal(jax.random.key(2), (1, 4, 32))
  cells = net.apply({'params': params}, words, header.of(ids, True), method='decode').reshape(4, 4, -1)
  np.testing.assert_array_equal(cells[0], cells[1])
  np.testing.assert_array_equal(cells[0], cells[3])
  np.testing.assert_array_equal(cells[:, 0], cells[:, 1])
  assert (cells[0] != cells[2]).any()


@pytest.mark.parametrize('values', [{}, {'model.distinct': True, 'augment.joined': 0.5},
                                    {'augment.translate': 0.5, 'mask.most.start': .5, 'mask.most.end': .5}])
def test_every_parameter_learns(values):
  config = small(**values)
  built, rows = task.make_task(config), batch()
  params, stats = jax.jit(built.init)(jax.random.key(0), None)
  arrays = {k: v for k, v in rows.items() if k not in ('pair', 'is_input')}

  @jax.jit
  def gradient(params):
    def total(params):
      terms, _ = built.loss(params, stats, arrays, jax.random.key(1), jnp.int32(1))
      return sum(t / w for t, w in terms.values())
    return jax.grad(total)(params)
  for path, g in jax.tree.leaves_with_path(gradient(params)):
    assert np.isfinite(g).all() and np.abs(g).max() > 0, path


def test_sixteen_grids_are_learnt_by_heart():
  config = dvae.get_config('rectangles')
  config.model.update({'pool': 'lattice', 'pool_layers': 2})
  config.quantizer.kind, config.total_steps = 'vq_ema', 300
  config.loss.update({'kl': 0.0, 'usage': 0.0})
  config.loss.beta.steps, config.optim.learning_rate = 10_000, 3e-3
  built, tx, rows = task.make_task(config), optim.make(config.optim, 300), batch(16)
  arrays = {k: jnp.array(v) for k, v in rows.items() if k not in ('pair', 'is_input')}

  def step(carry, i):
    params, stats, opt = carry

    def total(params):
      terms, (new, _) = built.loss(params, stats, arrays, jax.random.key(1), i)
      return sum(t / w for t, w in terms.values()), new
    (loss, stats), grads = jax.value_and_grad(total, has_aux=True)(params)
    params, opt, _, _ = tx.update(loss, grads, opt, params, i)
    return (params, stats, opt), loss
  params, stats = jax.jit(built.init)(jax.random.key(0), None)
  stats = jax.jit(built.begin)(params, stats, arrays, jax.random.key(1))
  (params, stats, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(300)))((params, stats, tx.init(params)))
  right, grids = jax.jit(built.measure)(params, stats, arrays)['exact_grids']
  assert right / grids >= .9


@pytest.mark.parametrize('distinct', [False, True])
def test_codes_and_header_give_back_what_was_rebuilt_and_interpolation_its_ends(distinct):
  config = small(**{'model.distinct': distinct})
  built, rows = task.make_task(config), batch()
  params, stats = jax.jit(built.init)(jax.random.key(0), None)
  run = jax.jit(lambda rows: built.predict(params, stats, rows, jax.random.key(0)))
  arrays = {k: jnp.array(rows[k]) for k in ('grid', 'size', 'mask')}
  rebuilt = run(arrays)
  told = ('rows', 'columns') if distinct else ()
  again = run({k: rebuilt[k] for k in ('codes', 'extents', 'colours', *told)})
  np.testing.assert_array_equal(again['cells'], rebuilt['cells'])
  turned = {'other': arrays['grid'][::-1], 'other_size': arrays['size'][::-1]}
  between = run({**arrays, **turned})['between']
  assert between.shape == (6, config.predict.steps, 16)
  np.testing.assert_array_equal(between[:, 0], rebuilt['cells'])
  np.testing.assert_array_equal(between[:, -1], rebuilt['cells'][::-1])


@pytest.mark.parametrize('latents', [1, 12, 64, 119, 251])
def test_every_large_array_has_a_rule_however_large_a_share_is(latents):
  config = dvae.get_config('full')
  config.model.latents = latents
  built = task.make_task(config)
  params, stats = jax.eval_shape(built.init, jax.random.key(0), None)
  sharding.audit(built.rules, TrainState(jnp.int32(0), params, stats, ()))


def test_what_does_not_go_with_a_lattice_is_refused():
  for values, said in (({'model.latents': 17}, 'at most data.side x data.side = 16'),
                       ({'model.pool': 'perceiver', 'loss.pad_weight': 1.0, 'model.distinct': True}, 'nothing reads'),
                       ({'augment.joined': 0.5, 'augment.translate': 0.5}, 'joined at the top left'),
                       ({'augment.joined': 0.5, 'input.batch_size': 1}, 'input.batch_size'),
                       ({'augment.joined': 0.5, 'optim.accumulate': 2}, 'optim.accumulate'),
                       ({'augment.joined': 1.5}, 'expected 0 to 1')):
    config = small(**{'model.pool_layers': 2, **values})
    with pytest.raises(ConfigError, match=said):
      settings.check(config)


@pytest.mark.parametrize('latents', [5, 262])
def test_a_map_of_codes_has_the_shape_of_the_blocks_unless_it_were_a_strip(latents):
  config = small(**{'model.latents': latents, 'model.distinct': True, 'data.side': 20})
  grids = [np.zeros((20, 20), np.uint8), np.arange(9, dtype=np.uint8).reshape(3, 3), np.arange(8, dtype=np.uint8)[None]]
  ids = jnp.concatenate([canvas.tokens(*on_canvas(g, 20), 'projected')[0] for g in grids])
  head = header.of(ids, True)
  outputs = {'tokens': np.asarray(ids, np.uint8), 'cells': np.asarray(ids, np.uint8),
             'codes': np.zeros((3, latents), np.int32), **{k: np.asarray(v) for k, v in head._asdict().items()}}
  drawn = show.picture(config, outputs, {'mask': np.ones(3, np.float32)})
  assert len(drawn) == 3 and all(x.dtype == np.uint8 and x.shape[0] == 240 for x in drawn.values())
  columns = [show._columns(config, outputs, i) for i in range(3)]
  assert columns == ([1, 2, 5] if latents == 5 else [0, 0, 8])


def test_predictions_hold_what_decoding_needs(tmp_path):
  config = small(**{'model.distinct': True, 'input.batch_size': 8, 'augment.joined': 0.5, 'total_steps': 2,
                    'checkpoint.steps': 0, 'eval_steps': 0})
  train.run(task.make_task(config), config, str(tmp_path / 'run'))

  def predicted(content, *options):
    (tmp_path / 'in.json').write_text(json.dumps(content))
    code = main.main(['main', f'--workdir={tmp_path / "run"}', '--mode=predict', f'--input={tmp_path / "in.json"}',
                      f'--output={tmp_path / "out"}', '--step=latest', '--config=', *options])
    return code, [json.loads(x) for x in (tmp_path / 'out' / 'predictions.jsonl').read_text().splitlines()]
  code, (record,) = predicted([[7, 2, 7], [7, 2, 7], [1, 2, 1]])
  assert code == 0 and record['rows'] == [0, 0, 1] and record['columns'] == [0, 1, 0] and record['size'] == [3, 3]
  code, (again,) = predicted({k: record[k] for k in ('codes', 'size', 'colours', 'rows', 'columns')},
                             '--config.predict.verb=decode')
  assert code == 0 and again['grid'] == record['grid'] and again['rows'] == record['rows']
