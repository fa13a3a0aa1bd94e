"""The lattice of a dVAE: every cell has one place, a header tells sizes and colours, and the rest is learnt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from configs import dvae
from lab import optim, sharding
from lab.systems.dvae import canvas, lattice, model, task
from lab.task import TrainState
from tests.systems.test_dvae import batch, on_canvas


def small(**values):
  config = dvae.get_config('smoke')
  config.model.update({'pool': 'lattice', 'pool_layers': 2})
  config.update_from_flattened_dict(values)
  return config


@pytest.mark.parametrize('latents, wanted', [(16, (4, 4)), (64, (8, 8)), (128, (16, 8)), (256, (16, 16)), (17, (17, 1)),
                                             (1, (1, 1)), (6, (3, 2))])
def test_a_lattice_is_as_square_as_it_can_be(latents, wanted):
  assert lattice.sides(latents) == wanted


@pytest.mark.parametrize('places, side', [(16, 32), (8, 32), (32, 32), (5, 7), (1, 6), (7, 4), (13, 30)])
def test_every_cell_has_one_place_and_places_share_evenly(places, side):
  extent = jnp.arange(side + 1)
  cells, (place, number) = lattice.shares(extent, places, side), lattice.owners(extent, places, side)
  cells, place, number = map(np.asarray, (cells, place, number))
  for size in range(side + 1):
    assert cells[size][cells[size] >= 0].tolist() == list(range(size))
    assert [cells[size, place[size, i], number[size, i]] for i in range(size)] == list(range(size))
    held = (cells[size] >= 0).sum(1)
    assert held.max() - held[:size].min(initial=held.max()) <= 1          # of those that have a cell at all


def test_extents_go_to_the_last_cell_inside():
  sizes = [(1, 1), (2, 3), (5, 5), (4, 1)]
  made = [canvas.tokens(*on_canvas(np.full(size, 3, np.uint8), 5), 'projected')[0] for size in sizes]
  ids = jnp.concatenate([*made, jnp.full((1, 25), canvas.PAD), jnp.full((1, 25), canvas.PAD).at[0, 13].set(7)])
  assert canvas.extents(ids).tolist() == [*map(list, sizes), [0, 0], [3, 4]]


def test_the_header_of_a_grid():
  cells = np.array([[7, 7, 2], [7, 2, 0]], np.uint8)
  ids, _ = canvas.tokens(*on_canvas(cells, 5), 'projected')
  head = lattice.header(ids)
  assert head.extents.tolist() == [[2, 3]] and head.colours.tolist() == [[7, 2, 0, 1, 3, 4, 5, 6, 8, 9]]
  assert lattice.header_bits(32) == pytest.approx(10 + 21.79, abs=0.01)
  hidden = ids.at[0, 0].set(canvas.MASK)
  assert lattice.header(hidden).colours.tolist() == [[2, 7, 0, 1, 3, 4, 5, 6, 8, 9]]       # of two, the lower one


def test_between_two_headers():
  one = lattice.Header(jnp.array([[2, 3]]), jnp.arange(10)[None])
  other = lattice.Header(jnp.array([[6, 3]]), jnp.arange(10)[None, ::-1])
  sizes = [lattice.between(one, other, jnp.float32(s)) for s in (0, .25, .5, 1)]
  assert [h.extents[0].tolist() for h in sizes] == [[2, 3], [3, 3], [4, 3], [6, 3]]
  assert [int(h.colours[0, 0]) for h in sizes] == [0, 0, 9, 9]


def network(**values):
  config = small(**values)
  net, (ids, places) = model.make(config), model.forms(config)
  return net, jax.jit(net.init)(jax.random.key(0), ids, places)['params'], places


def test_a_permutation_of_colours_changes_nothing_but_the_header():
  net, params, places = network()
  cells = np.array([[0, 0, 1], [0, 2, 1], [0, 2, 0], [0, 1, 1]], np.uint8)          # no two equally often
  table = np.array([4, 0, 9, 8, 1, 2, 3, 5, 6, 7], np.uint8)
  (ids, _), (other, _) = (canvas.tokens(*on_canvas(x, 4), 'projected') for x in (cells, table[cells]))

  @jax.jit
  def run(ids):
    head = lattice.header(ids)
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
  head = lattice.Header(jnp.array([[2, 3], [4, 1]]), jnp.broadcast_to(jnp.arange(10)[None], (2, 10)))
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
  head = lattice.header(ids)
  blocks = params['body']['encoder']['blocks']                            # without layers, places keep to themselves
  for part, name in (('attention', 'out'), ('mlp', 'down')):
    blocks[part][name]['kernel'] = jnp.zeros_like(blocks[part][name]['kernel'])
  run = jax.jit(lambda ids: net.apply({'params': params}, ids, places, head, method=lambda m, *a: m.body.look(*a)))
  before = run(ids)
  for row in range(3):
    for column in range(3):
      changed = np.argwhere(np.any(run(ids.at[0, row * 4 + column].set(9)) != before, -1)[0]).ravel().tolist()
      assert changed == [2 * (row // 2) + column // 2]                    # of 3 cells, 2 and 1


@pytest.mark.parametrize('values', [{}, {'augment.translate': 0.5, 'mask.most.start': .5, 'mask.most.end': .5}])
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
  (params, stats, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, jnp.arange(300)))((params, stats, tx.init(params)))
  right, grids = jax.jit(built.measure)(params, stats, arrays)['exact_grids']
  assert right / grids >= .9


def test_codes_and_header_give_back_what_was_rebuilt_and_interpolation_its_ends():
  config = small()
  built, rows = task.make_task(config), batch()
  params, stats = jax.jit(built.init)(jax.random.key(0), None)
  run = jax.jit(lambda rows: built.predict(params, stats, rows, jax.random.key(0)))
  arrays = {k: jnp.array(rows[k]) for k in ('grid', 'size', 'mask')}
  rebuilt = run(arrays)
  again = run({k: rebuilt[k] for k in ('codes', 'extents', 'colours')})
  np.testing.assert_array_equal(again['cells'], rebuilt['cells'])
  turned = {'other': arrays['grid'][::-1], 'other_size': arrays['size'][::-1]}
  between = run({**arrays, **turned})['between']
  assert between.shape == (6, config.predict.steps, 16)
  np.testing.assert_array_equal(between[:, 0], rebuilt['cells'])
  np.testing.assert_array_equal(between[:, -1], rebuilt['cells'][::-1])


@pytest.mark.parametrize('latents', [1, 12, 60, 120, 252])
def test_every_large_array_has_a_rule_however_large_a_share_is(latents):
  config = dvae.get_config('full')
  config.model.latents = latents
  built = task.make_task(config)
  params, stats = jax.eval_shape(built.init, jax.random.key(0), None)
  sharding.audit(built.rules, TrainState(jnp.int32(0), params, stats, ()))
