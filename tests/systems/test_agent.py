"""Text trees: what is decoded from where, and that each loss is right for every row by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import packs, trees
from lab.systems.agent import config as shape, model, objectives, passes

TEXT = b'The cat sat. A dog ran off.\n\nThe cat sat. So it goes on and on for a while. Yes.'


def small():
  config = shape.get_config()
  config.unlock()
  config.data.update({'rows': (24, 8, 4), 'lengths': (8, 6, 4)})
  config.model.update({'widths': (16, 16, 16, 32), 'heads': 2})
  return config


def batch(config, text=TEXT):
  """Two packs: one of the text, one with nothing in it."""
  packer = packs.Packer(config.data.rows, config.data.lengths, config.data.joined)
  for node in trees.nodes(text, 2):
    assert not list(packer.add(node, 0))
  pack, = packer.rest()
  out = {'mask': np.ones(2, np.float32)}
  for level in range(3):
    for name, array in zip(('ids', 'counts', 'documents'), (x[level] for x in pack)):
      out[f'{name}_{level}'] = np.stack([array, np.zeros_like(array)])
  return out


@pytest.fixture(scope='module')
def found():
  """Config, levels, what they become on the way up and down, and the network with its parameters."""
  config = small()
  net, rows = model.make(config), batch(config)
  params = jax.jit(net.init)(jax.random.key(0))

  @jax.jit
  def run(params):
    levels = [passes.rows(rows, level) for level in range(3)]
    ups = passes.up(net, params, levels)
    return levels, ups, passes.down(net, params, levels, [u.vectors for u in ups], [x.counts for x in levels], True)
  return (config, net, params, *jax.device_get(run(params)))       # of which slices are compared: JAX compiles each


def test_units_decoded_from_above_stand_for_their_rows(found):
  _, _, _, levels, _, downs = found
  assert [tuple(zip(d.origin, d.parts)) for d in downs] == [
      ((0, 24), (1, 8 * 6), (2, 4 * 4 * 6)), ((1, 8), (2, 4 * 4)), ((2, 4),)]
  words = [(np.asarray(r[:n]) - packs.FIRST).astype(np.uint8).tobytes()
           for r, n in zip(levels[0].ids[0], levels[0].last[0])]
  for part, start in ((1, 24), (2, 24 + 48)):          # every word, once for every sentence and paragraph that has it
    size = downs[0].parts[part]
    rows, weights = (np.asarray(x[0, start:start + size]) for x in (downs[0].row, downs[0].weight))
    spelt = [words[r] for r, w in zip(rows, weights) for _ in range(int(w))]
    said = [w for line in TEXT.split(b'\n\n') for w in line.split(b' ')]
    assert sorted(spelt) == sorted(said)
  assert float(sum(d.weight[1].sum() for d in downs)) == 0


def test_places_that_are_no_node_may_be_left_out(found):
  """Of words there are 20 below the sentences and 20 below the paragraphs, of sentences 6: the rest is nothing."""
  config, net, params, levels, ups, downs = found

  @jax.jit
  def run(params):
    few = passes.down(net, params, levels, [u.vectors for u in ups], [x.counts for x in levels], True, None, (21, 7))
    return few, passes.read(net, params, few)
  few, text = run(params)
  assert [d.units.shape[1] for d in few] == [24 + 21 + 21, 8 + 7, 4]
  every = [d._replace(parts=tuple(map(int, d.parts))) for d in downs]
  whole = jax.jit(lambda p: passes.read(net, p, every))(params)
  few, text, whole = jax.device_get((few, text, whole))
  compared = jax.jit(jax.vmap(passes.compared))
  for level in range(3):
    truth = jax.jit(jax.vmap(lambda rows, level=level: passes.spelt(rows, level)))(levels[:level + 1])
    there, same = jax.device_get(compared(truth, text[level]))
    assert [a.shape for a in jax.tree.leaves(text[level])] == [a.shape for a in jax.tree.leaves(whole[level])]
    # compared with a text, what is left out makes no difference
    for a, b, t in zip(same, jax.device_get(compared(truth, whole[level])).exact, there):
      assert ((a == b) | ~t).all()
  for low, all_of_it in zip(few, every):
    for part, origin in enumerate(low.origin):
      (a, b), (c, d) = ((sum(x.parts[:part]), sum(x.parts[:part + 1])) for x in (low, all_of_it))
      kept, wanted = np.asarray(low.weight[0, a:b]) > 0, np.asarray(all_of_it.weight[0, c:d]) > 0
      assert kept.sum() == wanted.sum() and (low.row[0, a:b][kept] == all_of_it.row[0, c:d][wanted]).all()
      assert (low.place[0, a:b][kept] == np.flatnonzero(wanted)).all()
      np.testing.assert_allclose(low.units[0, a:b][kept], all_of_it.units[0, c:d][wanted], atol=1e-5)


def test_losses_of_padding_are_nothing(found):
  config, net, params, levels, *_ = found

  @jax.jit
  def run(params):
    odd = objectives.altered(levels, jnp.ones((2, 2), jnp.uint32))
    ups = passes.up(net, params, levels, [jnp.concatenate([x.seen, x.changed], 1) for x in odd])
    downs = passes.down(net, params, levels, [u.vectors for u in ups], [x.counts for x in levels], True)
    return objectives.losses_of(net, params, levels, ups, downs, odd, config)
  terms, raw = run(params)
  names = {f'{n}_{level}' for n in ('reconstruct', 'length', 'masked', 'coherence') for level in range(3)}
  paths = {f'{n}_{a}_from_{b}' for n in ('reconstruct', 'length') for a, b in ((0, 1), (0, 2), (1, 2))}
  assert raw.keys() == terms.keys() == names | paths | {'difference_1', 'difference_2'}
  assert all(np.isfinite(x) for pair in raw.values() for x in pair)
  assert float(raw['length_2'][1]) == levels[2].valid.sum() == 3
  assert float(raw['length_1'][1]) == levels[1].counts.sum() == 6
  assert float(raw['length_0_from_1'][1]) == len(TEXT.replace(b'\n\n', b' ').split(b' '))


def test_every_row_has_its_own_terminator():
  """A target that is the first row's place for all would cost the third row nothing here."""
  ids = jnp.array([[[7, 8, 9, 1], [7, 1, 0, 0], [1, 0, 0, 0]]])
  rows = passes.Rows(ids, jnp.ones((1, 3)))
  assert rows.last.tolist() == [[3, 1, 0]]
  logits = 50.0 * jax.nn.one_hot(ids, 12)
  assert objectives.reconstruct(logits, ids, rows.real, rows.last).max() < 1e-6
  wrong = 50.0 * jax.nn.one_hot(jnp.broadcast_to(ids[:, :1], ids.shape), 12)
  cost = objectives.reconstruct(wrong, ids, rows.real, rows.last)[0]
  # a terminator costs threefold; the mean is over a row's own units: 0, 3 x 50 / 2, 3 x 50 / 1
  np.testing.assert_allclose(cost, [0, 75, 150], atol=1e-4)


def test_hidden_and_replaced_units():
  ids = jnp.array(np.random.default_rng(0).integers(packs.FIRST, 99, (4, 500, 9)))
  last = jnp.full((4, 500), 6)
  ids = ids.at[..., 6].set(packs.END).at[..., 7:].set(packs.PAD)
  rows = passes.Rows(ids, jnp.ones(last.shape))
  assert (rows.last == last).all()
  altered = jax.jit(objectives.altered)
  made, = altered([rows], jnp.arange(8, dtype=jnp.uint32).reshape(4, 2))
  _, seen, place, changed, share = made
  assert ((seen != ids).sum(-1) <= 1).all() and place.min() == 0 and place.max() == 6
  assert abs(float((seen == packs.MASK).sum() / 2000) - .9) < .03
  assert (changed[..., 6:] == ids[..., 6:]).all()          # neither terminators nor padding
  np.testing.assert_allclose(share, (changed != ids).sum(-1) / 6, rtol=1e-6)
  # alone, a pack has the same
  alone, = altered([passes.Rows(ids[2:3], rows.counts[2:3])], jnp.array([[4, 5]], jnp.uint32))
  assert (alone.seen == seen[2:3]).all() and (alone.changed == changed[2:3]).all()
  # 66 % of the rows, each unit with chance U(0, .8), of which 3 of 9 are drawn from no unit and stay
  assert abs(float(share.mean()) - .66 * .4 * 6 / 9) < .02 and (share == 0).mean() > .34


def test_units_are_mixed_within_their_level_and_pack():
  config = small()
  levels = [passes.rows(batch(config), level) for level in range(3)]
  levels = [x._replace(ids=jnp.concatenate([x.ids[:1]] * 200), counts=jnp.concatenate([x.counts[:1]] * 200))
            for x in levels]
  numbers = np.arange(400, dtype=np.uint32).reshape(200, 2)
  made = jax.jit(objectives.mixed, static_argnums=1)(levels, (.1, .4, 0.0), numbers)
  assert (made[2].ids == levels[2].ids).all()
  for new, old, share in zip(made, levels, (.1, .4)):
    unit = old.ids >= packs.FIRST
    assert ((new.ids == old.ids) | unit).all() and (new.ids >= packs.FIRST).sum() == unit.sum()
    assert set(np.unique(new.ids)) <= set(np.unique(old.ids[:1]))
    differ = float((new.ids != old.ids).sum() / unit.sum())
    assert .8 * share < differ < 1.05 * share                 # what is drawn may be the same
    assert len({x.tobytes() for x in np.asarray(new.ids)}) > 150      # another text for each number
  again = objectives.mixed(levels, (.1, .4, 0.0), numbers)
  assert all((a.ids == b.ids).all() for a, b in zip(made, again))


def test_coherence_is_right_at_its_minimum():
  share, logit = jnp.array([[0.0, 0.5]]), jnp.array([[-40.0, 40.0]])
  assert objectives.coherence(share, logit, jnp.array([[0.0, 0.5]])).max() < 1e-6
  np.testing.assert_allclose(objectives.coherence(share, logit * 0, jnp.array([[1.0, 0.5]])), [[1.00693, 0.00693]],
                             atol=1e-5)


def _texts(spelt, level, n):
  """The words of node n of a level, by the places of what is spelt."""
  def words(k, place):
    if not k:
      return [bytes(np.asarray(spelt.bytes[n, place, :int(spelt.last[0][n, place])]).astype(np.uint8))]
    width = spelt.last[k - 1].shape[1] // spelt.last[k].shape[1]
    return [w for i in range(int(spelt.last[k][n, place])) for w in words(k - 1, place * width + i)]
  return words(level, 0)


def test_a_pack_is_spelt_and_compared_with_itself(found):
  levels = [jax.tree.map(lambda x: x[0], rows) for rows in found[3]]
  spelt, compared = jax.jit(passes.spelt, static_argnums=1)(levels, 2), jax.jit(passes.compared)
  assert [_texts(spelt, 2, n) for n in range(3)] == [
      b'The cat sat. A dog ran off.'.split(), b'The cat sat. So it goes on and on for a while.'.split(), [b'Yes.']]
  assert [bool(spelt.cont[2][n, 0]) for n in range(3)] == [False, True, False]
  same = compared(spelt, spelt)
  assert [int(x[:3].sum()) for x in same.there] == [20, 6, 3]
  assert all(bool((e | ~t)[:3].all()) for t, e in zip(same.there, same.exact))
  other = spelt._replace(bytes=spelt.bytes.at[1, 0, 0].add(1))          # 'The' of the second paragraph
  same = compared(spelt, other)
  assert [int((x & t)[:3].sum()) for x, t in zip(same.exact, same.there)] == [19, 5, 2]
  other = spelt._replace(last=[spelt.last[0], spelt.last[1].at[0, 1].add(-1), spelt.last[2]])
  same = compared(spelt, other)
  assert [int((x & t)[:3].sum()) for x, t in zip(same.exact, same.there)] == [20, 5, 2]
  other = spelt._replace(cont=[spelt.cont[0].at[2, 0].set(True), *spelt.cont[1:]])
  assert [int((x & t)[:3].sum()) for x, t in zip(*compared(spelt, other)[::-1])] == [19, 5, 2]


def test_unfolding_follows_the_path_of_the_loss(found):
  _, net, params, levels, ups, downs = found
  out = jax.device_get(jax.jit(lambda p: passes.unfold(net, p, 2, ups[2].vectors[0]))(params))
  lengths = [8, 6, 4]
  assert [x.shape for x in out.places] == [(4, 24, 8), (4, 4, 6), (4, 1, 4)]
  assert [x.shape for x in out.ends] == [(4, 24, 8, 2), (4, 4, 6, 2), (4, 1, 4, 2)]
  assert out.bytes.shape == (4, 24, 8, 256)
  # of real words the same as what the losses see
  start = downs[0].parts[0] + downs[0].parts[1]
  logits = net.apply(params, 0, downs[0].units, ups[0].table, ups[0].extra, method='logits')[0, start:]
  there = np.asarray(downs[0].weight[0, start:]) > 0
  np.testing.assert_allclose(np.asarray(out.bytes.reshape(-1, 8, 256))[there],
                             np.asarray(logits)[there][..., packs.FIRST:], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(np.asarray(out.ends[0].reshape(-1, 8, 2))[there],
                             np.asarray(logits)[there][..., packs.END:packs.CONT + 1], rtol=1e-4, atol=1e-4)
  got = passes.likeliest(out)
  downs = [d._replace(parts=tuple(map(int, d.parts))) for d in downs]       # numbers became arrays on their way out
  fused = jax.jit(lambda p: passes.read(net, p, downs))(params)[2]
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(fused)):
    assert (a == b[0]).all()
  assert [x.shape for x in got.last] == [x.shape[:2] for x in out.places]
  assert [int(x.max()) < n for x, n in zip(got.last, lengths)] == [True] * 3


def test_a_changed_word_that_is_another_word_is_known():
  end = packs.END
  ids = jnp.array([[[7, 8, end], [7, 9, end], [9, end, 0], [0, 0, 0]]])
  rows = passes.Rows(ids, jnp.array([[1.0, 1, 1, 0]]))
  changed = jnp.array([[[7, 9, end], [7, 7, end], [9, end, 0], [0, 0, 0]]])      # another's, no one's, its own, nothing
  assert objectives.known(changed, rows).tolist() == [[True, False, False, False]]


def test_the_checker_learns_nothing_from_what_it_says_of_decoded_units(found):
  _, net, params, levels, _, downs = found
  loss = lambda p, x: objectives.plausible(net, p, 1, x).sum()
  slopes, of_units = jax.jit(jax.grad(loss, (0, 1)))(params, downs[1].units[:, :8])
  assert all(not np.asarray(x).any() for x in jax.tree.leaves(slopes))
  assert np.abs(np.asarray(of_units)).max() > 0
