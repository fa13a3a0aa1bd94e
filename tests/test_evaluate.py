"""Evaluation counts every example once, on any mesh and batch size; training agrees between meshes."""

import io
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import films, pipeline

from lab import evaluate, logs, mesh as meshes, metrics, sharding, train
from lab.ledger import Ledger
from lab.task import ConfigError
from tests import toy

ONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """103 evaluation records: a prime, so that no batch size fits."""
  return toy.write(str(tmp_path_factory.mktemp('103')), (('train', 30), ('eval', 103)))


def task_of(config):
  task = toy.make_task(config)
  return task._replace(source=lambda split: toy.source(config.data.dir, split, {'train': 30, 'eval': 103}[split]))


def dense(value):
  """The toy's weights."""
  return {'dense': {'kernel': np.full((4, 8), value, np.float32), 'bias': np.full(8, 0.01, np.float32)}}


def evaluated(task, config, mesh, weights):
  return evaluate.make(task, config, mesh, Ledger('', writes=False))(weights, {'error': np.float32(0)})


@pytest.mark.parametrize('devices', [1, 8])
@pytest.mark.parametrize('batch', [1, 8, 64, 128])
def test_103_examples_are_103(toy_config, folder, devices, batch):
  toy_config.data.dir = folder
  toy_config.input.eval_batch_size = batch
  mesh = meshes.make({**ONE, 'data': devices}, jax.devices()[:devices])
  task = task_of(toy_config)
  records = []
  task = task._replace(score=lambda items: records.extend(items) or {'predicted': float(len(records))})
  params = dense(0.1)
  with jax.set_mesh(mesh):
    scalars = evaluated(task, toy_config, mesh, {'eval': params})[0]['eval']
  assert scalars['examples'] == 103 and scalars['predicted'] == 103
  x, y = everything(folder)
  predicted = 0.8 * x.sum(-1) + 0.08                      # eight columns of 0.1 and of 0.01
  np.testing.assert_allclose(scalars['error'], np.mean((predicted - y) ** 2), rtol=1e-6)
  np.testing.assert_allclose([r['y'] for r in records], predicted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('scored', [False, True])
def test_several_weights_are_judged_on_batches_that_are_made_once(toy_config, folder, monkeypatch, scored):
  toy_config.data.dir, toy_config.input.eval_batch_size, toy_config.eval_pictures = folder, 32, 3
  task, placed, place, seen = task_of(toy_config), [], meshes.place, []
  if scored:
    task = task._replace(score=lambda items: {'mean': float(np.mean([r['y'] for r in items]))})
  monkeypatch.setattr(meshes, 'place', lambda *a: placed.append(1) or place(*a))

  def picture(outputs, rows):
    seen.append(float(outputs['y'][0] if isinstance(outputs, dict) else outputs[0]))
    return {f'{i}': film(1)[0] for i in range(len(rows['mask']))}
  task = task._replace(picture=picture)
  mesh = meshes.make(ONE, jax.devices()[:1])
  with jax.set_mesh(mesh):
    both, pictures = evaluated(task, toy_config, mesh, {'eval': dense(0.1), 'raw': dense(0.2)})
    assert len(placed) == 4 and len(pictures) == 3 and len(seen) == 1
    alone = {k: evaluated(task, toy_config, mesh, {k: v})[0][k] for k, v in (('eval', dense(0.1)), ('raw', dense(0.2)))}
  assert seen[0] == seen[1] != seen[2]            # of the first weights
  assert both == alone and both['eval'] != both['raw']
  assert both['eval']['examples'] == 103 and ('mean' in both['raw']) == scored


def test_sums_are_packed_in_one_array():
  sums = {'b': (jnp.float32(3), 2.0), 'a': (jnp.int32(1), jnp.float32(0))}
  packed = jax.jit(metrics.packed)(sums)
  assert packed.values.shape == (2, 2) and packed.unpacked() == {'a': (1, 0), 'b': (3, 2)}
  assert metrics.ratios(metrics.merge({}, packed.unpacked())) == {'b': 1.5}


def test_a_batch_is_begun_before_the_one_before_it_is_used():
  begun = []
  used = [(item, list(begun)) for item in evaluate.ahead(begun.append(i) or i for i in range(3))]
  assert used == [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2])]
  assert not list(evaluate.ahead([]))


def everything(folder):
  """All evaluation records in one pass, as float64."""
  tf = pipeline.tensorflow()
  rows = [tf.io.parse_tensor(r, tf.float32).numpy() for r in tf.data.TFRecordDataset(list(toy.shards(folder, 'eval')))]
  rows = np.array(rows, np.float64)
  return rows[:, :4], rows[:, 4]


@pytest.mark.parametrize('shape', [{'data': 8, 'fsdp': 1, 'tensor': 1}, {'data': 2, 'fsdp': 2, 'tensor': 2},
                                   {'data': 1, 'fsdp': 8, 'tensor': 1}])
def test_one_device_equals_eight(toy_config, tmp_path, monkeypatch, shape):
  losses = {}
  make = meshes.make
  toy_config.total_steps = 10
  for name, mesh in (('one', (ONE, jax.devices()[:1])), ('eight', (shape, jax.devices()))):
    monkeypatch.setattr(meshes, 'make', lambda config, mesh=mesh: make(*mesh))
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path / name))
    rows = [json.loads(line) for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
    losses[name] = [(r['step'], r['split'], r.get('loss', r.get('error'))) for r in rows]
  assert [r[:2] for r in losses['one']] == [r[:2] for r in losses['eight']]
  np.testing.assert_allclose([r[2] for r in losses['one']], [r[2] for r in losses['eight']], rtol=1e-5)


def test_sums_merge_by_weight_not_by_batch():
  totals = metrics.merge(metrics.merge({}, {'loss': (10.0, 1.0)}), {'loss': (2.0, 99.0), 'rare': (1.0, 0.0)})
  assert metrics.ratios(totals) == {'loss': 12 / 100}


# the mesh

def test_meshes_that_do_not_fit_are_refused():
  assert dict(meshes.make({'data': -1, 'fsdp': 2, 'tensor': 1}).shape) == {'data': 4, 'fsdp': 2, 'tensor': 1}
  for shape in ({'data': 3, 'fsdp': 1, 'tensor': 1}, {'data': -1, 'fsdp': 3, 'tensor': 1},
                {'data': -1, 'fsdp': -1, 'tensor': 1}, {'data': 0, 'fsdp': 8, 'tensor': 1}):
    with pytest.raises(ConfigError, match='config.mesh'):
      meshes.make(shape)
  mesh = meshes.make({'data': 4, 'fsdp': 2, 'tensor': 1})
  assert meshes.rows(mesh, 32).fed == tuple(range(32)) and meshes.rows(mesh, 32).speaks.all()
  with pytest.raises(ConfigError, match='input.batch_size = 12 is not a multiple of data x fsdp = 8'):
    meshes.rows(mesh, 12)
  assert meshes.padded(mesh, 12) == 16


@pytest.mark.parametrize('order, shape, fed, speaks', [
    (range(8), (8, 1, 1), [(0, 1, 2, 3), (4, 5, 6, 7)], [4, 4]),
    ((0, 4, 1, 5, 2, 6, 3, 7), (8, 1, 1), [(0, 2, 4, 6), (1, 3, 5, 7)], [4, 4]),        # as on a torus
    (range(8), (1, 1, 8), [range(8), range(8)], [8, 0]),                                # both feed, one speaks
    ((0, 4, 1, 5, 2, 6, 3, 7), (4, 1, 2), [range(8), range(8)], [8, 0])])
def test_every_row_is_spoken_for_once(monkeypatch, order, shape, fed, speaks):
  devices = [jax.devices()[i] for i in order]
  mesh = meshes.make(dict(zip(meshes.AXES, shape)), devices)
  monkeypatch.setattr(meshes, 'process_of', lambda device: device.id // 4)             # two processes of four devices
  for process in range(2):
    monkeypatch.setattr(jax, 'process_index', lambda process=process: process)
    rows = meshes.rows(mesh, 8)
    assert rows.fed == tuple(fed[process]) and rows.speaks.sum() == speaks[process] and rows.first == speaks[0]


def test_rules_decide_shardings_and_the_audit_finds_dead_ones():
  P = jax.sharding.PartitionSpec
  mesh = meshes.make({'data': 4, 'fsdp': 2, 'tensor': 1})
  of = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
  shapes = {'params': {'a': {'kernel': of(4, 6)}, 'b': of(6)}, 'opt': {'mu': {'a': {'kernel': of(4, 6)}},
            'count': of()}}
  rules = ((r'kernel$', P(None, 'fsdp'), 'columns'),)
  got = sharding.layout(rules, shapes, mesh)
  assert got['params']['a']['kernel'].spec == got['opt']['mu']['a']['kernel'].spec == P(None, 'fsdp')
  assert got['params']['b'].spec == got['opt']['count'].spec == P()
  odd = {'kernel': jax.ShapeDtypeStruct((4, 5), np.float32)}
  assert sharding.layout(rules, odd, mesh)['kernel'].spec == P(None, None)    # 5 columns don't split in 2
  with pytest.raises(sharding.ShardingError, match='matches no array'):
    sharding.layout((*rules, ('typo', P(), 'never')), shapes, mesh)
  with pytest.raises(sharding.ShardingError, match='no reason'):
    sharding.layout(((r'kernel$', P(), ''),), shapes, mesh)
  with pytest.raises(sharding.ShardingError, match='1 large array.*: big'):
    sharding.layout((), {'big': jax.ShapeDtypeStruct((1 << 19,), np.float32)}, mesh)


# pictures and films


def film(frames, shade=0):
  """u8[frames, 6, 8, 3]: all alike but the last."""
  out = np.full((frames, 6, 8, 3), shade, np.uint8)
  out[-1, :, 2:4] = 255
  return out


@pytest.mark.parametrize('frames', [1, 2, 5])
def test_a_film_keeps_every_frame(frames):
  from PIL import Image, ImageSequence
  with Image.open(io.BytesIO(films.gif(film(frames)))) as image:
    assert image.n_frames == frames and image.size == (8, 6) and image.info['loop'] == 0
    seen = [(np.asarray(f.convert('RGB')), f.info['duration'], f.disposal_method)
            for f in ImageSequence.Iterator(image)]
  np.testing.assert_array_equal([pixels for pixels, _, _ in seen], film(frames))
  # 8 frames a second are 125 ms each, of which the format can only say tens
  assert [ms for _, ms, _ in seen] == [120, 130, 120, 130, 120][:frames] and {d for _, _, d in seen} == {2}


def test_films_lie_beside_pictures_and_in_tensorboard(toy_config, tmp_path, caplog):
  from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
  task = toy.make_task(toy_config)._replace(picture=lambda outputs, batch: {'still': film(1)[0], 'moving': film(3)})
  toy_config.total_steps = 10
  train.run(task, toy_config, str(tmp_path))
  names = sorted(os.listdir(tmp_path / 'pictures'))
  assert names == [f'00000{s}_{n}' for s in ('05', '10') for n in ('moving.gif', 'still.png')]
  events = EventAccumulator(str(tmp_path / 'tensorboard'), size_guidance={'tensors': 0})
  events.Reload()
  assert events.SummaryMetadata('moving').plugin_data.plugin_name == 'images'
  width, height, data = events.Tensors('moving')[1].tensor_proto.string_val
  assert (width, height) == (b'8', b'6') and data == (tmp_path / 'pictures' / '0000010_moving.gif').read_bytes()
  assert [e.step for e in events.Tensors('still')] == [5, 10] and 'TensorBoard' not in caplog.text
  logs.cut(str(tmp_path), 5)
  assert sorted(os.listdir(tmp_path / 'pictures')) == names[:2]


@pytest.mark.parametrize('batch', [1, 8])
def test_no_more_rows_are_drawn_than_there_are_pictures_of(toy_config, folder, batch):
  toy_config.data.dir, toy_config.eval_pictures, toy_config.input.eval_batch_size = folder, 5, batch
  drawn = []

  def picture(outputs, rows):
    assert {len(x) for x in jax.tree.leaves((outputs, rows))} == {len(rows['mask'])}
    drawn.append(len(rows['mask']))
    return {f'{sum(drawn)}_{i}_{kind}': film(1)[0] for i in range(len(rows['mask'])) for kind in ('still', 'other')}
  mesh = meshes.make(ONE, jax.devices()[:1])
  params = dense(0.1)
  with jax.set_mesh(mesh):
    pictures = evaluated(task_of(toy_config)._replace(picture=picture), toy_config, mesh, {'eval': params})[1]
  assert len(pictures) == 5 and drawn == ([1, 1, 1] if batch == 1 else [5])


def test_the_first_process_draws_enough_of_its_own_rows(toy_config, folder, monkeypatch):
  """Of each batch of 8 it has 2 where there are four processes; it alone writes pictures."""
  toy_config.data.dir, toy_config.eval_pictures, toy_config.input.eval_batch_size = folder, 8, 8
  drawn, rows = [], meshes.rows
  monkeypatch.setattr(meshes, 'rows', lambda *a: rows(*a)._replace(speaks=np.arange(8) < 2, first=2))

  def picture(outputs, batch):
    drawn.append(len(batch['mask']))
    return {f'{len(drawn)}_{i}': film(1)[0] for i in range(len(batch['mask']))}
  mesh = meshes.make(ONE, jax.devices()[:1])
  params = dense(0.1)
  with jax.set_mesh(mesh):
    pictures = evaluated(task_of(toy_config)._replace(picture=picture), toy_config, mesh, {'eval': params})[1]
  assert len(pictures) == 8 and drawn == [2, 2, 2, 2]


def test_an_evaluation_elsewhere_leaves_the_workdir_s_own(toy_config, tmp_path):
  toy_config.total_steps = 5
  task = toy.make_task(toy_config)._replace(picture=lambda outputs, batch: {'moving': film(3)})
  run, there = tmp_path / 'run', tmp_path / 'stress' / 'test'
  train.run(task, toy_config, str(run))
  usual = evaluate.run(task, toy_config, str(run), 'latest')
  before = {p: p.read_bytes() for p in run.rglob('eval_5*') if p.is_file()}
  other = evaluate.run(task._replace(finish=lambda totals: {'stress': 7.0}), toy_config, str(run), 'latest', str(there))
  assert json.loads((there / 'eval_5.json').read_text()) == {'step': 5, **other} != {'step': 5, **usual}
  assert os.listdir(there / 'eval_5') == ['moving.gif']
  assert {p: p.read_bytes() for p in run.rglob('eval_5*') if p.is_file()} == before != {}
