"""Rows that neighbours share: JOIN is told from units wherever text is decoded, scored, shown and coded."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import DataError, books, packs, trees, tree_inputs
from lab import metrics
from lab.systems.agent import codec, model, passes, show, task
from lab.task import ConfigError
from tests.systems.test_agent import batch, small
from tests.systems.test_agent_task import by_heart

TEXT = b'He sat. It ran.\n\nNo. Yes. So it goes on.\n\nIt sat. So it ran.'
SENTENCES = (b'He sat. It ran.', b'No. Yes.', b'So it goes on.', b'It sat.', b'So it ran.')     # what rows hold


def shared(**values):
  config = small()
  config.data.joined = True
  config.update_from_flattened_dict(values)
  return config


def numbered(config):
  return {**batch(config, TEXT), 'number': np.arange(4, dtype=np.uint32).reshape(2, 2)}


def said(record):
  return [node['rebuilt'] for node in record['sentences']]


@pytest.fixture(scope='module')
def learnt():
  """Configuration, task, batch and parameters that know the batch by heart."""
  config = shared()
  built, rows = task.make_task(config), numbered(config)
  return config, built, rows, by_heart(built, rows)[0]


def test_a_shared_row_is_rebuilt_scored_and_shown(learnt):
  config, built, rows, params = learnt
  sums = jax.device_get(jax.jit(built.measure)(params, {}, rows))
  found = built.finish(metrics.merge({}, sums))
  assert found['words_in_sentences'] == found['words_in_paragraphs'] == found['exact_paragraphs'] == 1
  assert found['join_1'] < .05 and found['join_1_from_2'] < .05 and 'join_2' not in found
  assert float(sums['words_in_sentences'][1]) == len(TEXT.split())          # JOIN is no word
  outputs = jax.device_get(jax.jit(built.predict)(params, {}, {k: v for k, v in rows.items() if k != 'number'},
                                                  jax.random.key(0)))
  record = show.records(config, outputs, {**rows, 'mask': np.ones(1), 'name': ['a']})
  record = next(iter(record))
  assert said(record) == [s.decode() for s in SENTENCES]
  assert all(node['exact'] for level in ('words', 'sentences', 'paragraphs') for node in record[level])


def test_join_in_the_wrong_place_is_no_match(learnt):
  config, _, rows, _ = learnt
  levels = [passes.Rows(*(jnp.asarray(rows[f'{name}_{k}'][0]) for name in ('ids', 'counts'))) for k in range(3)]
  levels = [x._replace(counts=x.counts.astype(jnp.float32)) for x in levels]
  truth, compared = jax.jit(passes.spelt, static_argnums=1)(levels, 1), jax.jit(passes.compared)
  assert truth.joins[0][:3, :5].tolist() == [[False, False, True, False, False], [False, True, False, False, False],
                                             [False] * 5]
  same = compared(truth, truth)
  assert [int(x[:5].sum()) for x in same.there] == [len(TEXT.split()), 5]
  for n, place in ((0, 2), (0, 3)):                    # JOIN that is not seen, and that is seen where a word is
    other = truth._replace(joins=[truth.joins[0].at[n, place].set(~truth.joins[0][n, place]), None])
    same = compared(truth, other)
    assert same.exact[1][:5, 0].tolist() == [False, True, True, True, True]
    assert int((same.there[0] & same.exact[0])[:5].sum()) == len(TEXT.split()) - (place == 3)


def test_shared_rows_are_coded_and_come_back(learnt):
  config, _, _, params = learnt
  for variables in ({'params': params}, jax.jit(model.make(config).init)(jax.random.key(5))):
    coder = codec.Codec(model.make(config), variables, config, 'x')
    for text in (TEXT, b'', b'A. B. C.\n\n\nD. E.\r\n F', b'[JOIN] \x04 a. b. ' * 9):
      assert coder.decode(coder.encode(text)) == text
  heart = codec.Codec(model.make(config), {'params': params}, config, 'x')
  cost = heart.report(heart.encode(TEXT))
  assert cost['bytes_given_vectors'] < .5                                   # bits a byte: it knows the words by heart


def test_head_and_loss_are_there_where_rows_are_shared():
  for weight, kept in ((0.3, True), (0.0, False)):
    config = shared(**{'loss.join': weight})
    built, rows = task.make_task(config), numbered(config)
    params = jax.eval_shape(lambda: built.init(jax.random.key(0), rows)[0])
    terms, _ = jax.eval_shape(built.loss, params, {}, rows, jax.random.key(0), 0)
    assert ('join_1' in terms) == ('join_1_from_2' in terms) == kept
    assert [k for k in params if k.startswith('joins')] == ['joins_0']
  plain = model.make(small())
  assert not any(k.startswith('joins') for k in jax.eval_shape(plain.init, jax.random.key(0))['params'])


@pytest.mark.parametrize('values, told', [
    ({'data.joined': False, 'loss.join': 0.5}, 'loss.join'), ({'loss.join': -1.0}, 'at least 0'),
    ({'data.rows': (24, 8), 'data.lengths': (8, 6), 'data.nodes': (), 'model.widths': (16, 16, 16)},
     'data.joined')])
def test_settings_that_nothing_reads_are_refused(values, told):
  config = shared()
  config.unlock()
  config.update_from_flattened_dict(values)
  with pytest.raises(ConfigError, match=told):
    task.make_task(config)


def test_records_and_a_users_text_are_packed_as_the_model_reads_them(tmp_path):
  raw = tmp_path / 'raw'
  raw.mkdir()
  (raw / 'train.txt').write_bytes(TEXT * 9)
  sizes = {'rows': (24, 8, 4), 'lengths': (8, 6, 4)}
  folder, _ = books.prepare(str(raw), str(tmp_path / 'out'), shards=1, joined=True, **sizes)
  assert books.source(folder, 'train', joined=True, **sizes).size
  with pytest.raises(DataError, match=r'neighbours share rows. Prepare .*, or set data.joined = True'):
    books.source(folder, 'train', **sizes)
  for joined in (False, True):
    item, = tree_inputs.texts(TEXT.decode(), 'rebuild', *sizes.values(), (16, 16, 16, 32), joined=joined)
    assert (item['ids_1'] == packs.JOIN).any() == joined and item['text'] == [TEXT]
  assert trees.join(tuple(trees.nodes(TEXT, 2)), 3) == TEXT


CHAPTERS = b'CHAPTER I\n\nHe sat. It ran.\n\nNo. Yes.\n\nSo it goes on.\n\nCHAPTER II\n\nIt sat. So it ran.\n\nNo.'


def four():
  return shared(**{'data.rows': (160, 48, 16, 4), 'data.lengths': (10, 6, 4, 5), 'model.widths': (16, 16, 16, 16, 32)})


def test_of_four_levels_two_share_rows():
  config = four()
  packer = packs.Packer(config.data.rows, config.data.lengths, True)
  for node in trees.nodes(CHAPTERS, 3):
    assert not list(packer.add(node, 0))
  pack, = packer.rest()
  levels = [passes.Rows(jnp.asarray(ids), jnp.asarray(counts, jnp.float32))
            for ids, counts in zip(pack.ids, pack.counts)]
  assert [bool((x.ids == packs.JOIN).any()) for x in levels] == [False, True, True, False]
  truth = jax.jit(passes.spelt, static_argnums=1)(levels, 3)
  same = jax.jit(passes.compared)(truth, truth)
  assert int(same.there[0].sum()) == len(trees.nodes(CHAPTERS, 0))
  assert all(jnp.asarray(x).all() for x in same.exact)
  assert [x is not None and bool(x.any()) for x in truth.joins] == [True, True, False, False]


@pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='four levels compile for half a minute: LAB_LONG=1')
def test_four_levels_are_coded_and_come_back():
  net = model.make(config := four())
  coder = codec.Codec(net, jax.jit(net.init)(jax.random.key(5)), config, 'x')
  for text in (CHAPTERS, b'', b'\n\n\n\nIV\n\n\x04 a. B.  C\n\nV' * 3):
    assert coder.decode(coder.encode(text)) == text
