"""Where arrays lie that a rule's axes don't divide, and what is told of it."""

import importlib
import logging

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

from lab import memory, mesh as meshes, optim, sharding, train
from lab.systems.language import model, task as language
from lab.task import load
from tests.test_systems import ONE, first_batch

TABLE = (('table$', P(('fsdp', 'tensor')), 'rows'), ('table$', P(None, ('fsdp', 'tensor')), 'or features'))


def array(*shape):
  return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.fixture
def mesh():
  return meshes.make({'data': 1, 'fsdp': 8, 'tensor': 1})


def test_the_next_rule_takes_what_the_first_does_not_divide(mesh):
  got = sharding.layout(TABLE, {'even': {'table': array(16, 24)}, 'odd': {'table': array(12, 24)},
                                'none': {'table': array(12, 12)}, 'row': {'table': array(12)}}, mesh)
  specs = {name: found['table'].spec for name, found in got.items()}
  assert specs == {'even': P(('fsdp', 'tensor')), 'odd': P(None, ('fsdp', 'tensor')), 'none': P(None), 'row': P(None)}


def test_a_rule_that_splits_nothing_is_kept_before_one_that_would(mesh):
  assert sharding.layout((('table$', P(), 'whole'), *TABLE), {'table': array(16, 16)}, mesh)['table'].spec == P()


def test_a_large_array_that_is_split_less_than_its_rule_says_is_told_once(mesh, caplog):
  odd = array((1 << 16) + 1, 4)                        # 1 MiB and 16 bytes
  state = {'params': {'table': odd}, 'opt': {'mu': {'table': odd}, 'row': {'table': array(12)}}, 'b': array(3)}
  with caplog.at_level(logging.WARNING):
    sharding.layout(TABLE[:1], state, mesh)
  told = [r.getMessage() for r in caplog.records]
  assert [t.split()[0] for t in told] == ['opt/mu/table', 'params/table']
  assert 'float32[65537, 4], 1 MiB, is in 1 part(s), (None,), where its rule says 8, (' in told[0]
  caplog.clear()
  with caplog.at_level(logging.WARNING):
    sharding.layout(TABLE[:1], {'table': array(1 << 16, 8)}, mesh)                          # divides
    sharding.layout(TABLE[:1], {'table': array(3, 5)}, mesh)                                # small
    sharding.layout(TABLE, {'table': array((1 << 16) + 1, 8)}, mesh)                        # the other rule does it
    sharding.layout(TABLE[:1], state, meshes.make({'data': 8, 'fsdp': 1, 'tensor': 1}))     # nothing to split
  assert not caplog.records


@pytest.mark.parametrize('fsdp, tensor', [(16, 1), (64, 1), (256, 1), (128, 2), (512, 1), (1024, 1)])
def test_gpt2s_table_is_split_on_every_pod(fsdp, tensor, caplog):
  rows = -(-50_257 // model.MULTIPLE) * model.MULTIPLE
  config = importlib.import_module('configs.gpt').get_config('xl')
  like = {'tokens': array(rows, config.model.width)}
  mesh = AbstractMesh((1, fsdp, tensor), meshes.AXES)
  found = sharding.split(language.rules('gpt', config.model), like, mesh)['tokens']
  assert np.prod(found.shard_shape((rows, 2048))) == rows * 2048 // (fsdp * tensor)


def test_a_table_split_by_features_learns_what_a_whole_one_does(monkeypatch):
  monkeypatch.setattr(model, 'MULTIPLE', 1)            # the sample's characters are no multiple of 8
  config = importlib.import_module('configs.gpt').get_config('smoke')
  config.input.batch_size = 8
  losses = {}
  for name, shape in (('one', ONE), ('eight', {'data': 1, 'fsdp': 8, 'tensor': 1})):
    task, tx = load(config), optim.make(config.optim, config.total_steps)
    mesh = meshes.make(shape, jax.devices()[:np.prod([*shape.values()])])
    batches, batch = first_batch(task, config)
    with jax.set_mesh(mesh):
      like = train.abstract(task, tx, config, batches.spec(1), mesh)
      rows, width = like.params['tokens'].shape
      assert rows % 8
      layout = jax.tree.map(lambda x: x.sharding, like)
      state = jax.jit(train.initial(task, tx, config, batches.spec(1)), out_shardings=layout)()
      assert memory.on_device(state.params['tokens']) == 4 * rows * width // mesh.size
      step = train.make_step(task, tx, config, like, mesh)
      placed = meshes.place_stacked(mesh, [batch], 8)
      for _ in range(3):
        state, sums = step(state, placed)
        losses.setdefault(name, []).append(float(sums['loss'][0]))
      losses[name].append(jax.device_get(state.params['tokens']))
  np.testing.assert_allclose(losses['eight'][:3], losses['one'][:3], rtol=1e-5)
  np.testing.assert_allclose(losses['eight'][3], losses['one'][3], rtol=1e-4, atol=1e-5)
