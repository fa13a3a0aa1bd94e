"""Checkpoints: what counts as one, what is kept, what happens to broken ones, other meshes, grafting."""

import contextlib
import glob
import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from lab import checkpoint, files, graft, locks, mesh as meshes, optim, train
from lab.checkpoint import CheckpointError, Checkpoints, DiskFull
from lab.task import ConfigError, TrainState
from tests import toy

MESHES = {'4x2': ({'data': 4, 'fsdp': 2, 'tensor': 1}, 8), '1x8': ({'data': 1, 'fsdp': 8, 'tensor': 1}, 8),
          '8x1': ({'data': -1, 'fsdp': 1, 'tensor': 1}, 8), '2': ({'data': 1, 'fsdp': 2, 'tensor': 1}, 2),
          '1': ({'data': 1, 'fsdp': 1, 'tensor': 1}, 1)}


def make_mesh(name):
  shape, devices = MESHES[name]
  return meshes.make(shape, jax.devices()[:devices])


def state_of(config, mesh, value=0.0):
  """A toy state on a mesh, every float raised by value."""
  task = toy.make_task(config)
  tx = optim.make(config.optim, config.total_steps)
  like = train.abstract(task, tx, config, {'x': jax.ShapeDtypeStruct((1, 4), jnp.float32)}, mesh)
  layout = jax.tree.map(lambda x: x.sharding, like)
  state = jax.jit(train.initial(task, tx, config, {}), out_shardings=layout)()
  return jax.tree.map(lambda x: x + np.asarray(value, x.dtype), state), like


@pytest.fixture
def store(toy_config, tmp_path):
  checkpoints = Checkpoints(str(tmp_path), toy_config)
  yield checkpoints
  checkpoints.close()


@pytest.fixture
def state(toy_config):
  return state_of(toy_config, make_mesh('4x2'))[0]


def save(store, *steps, state):
  for step in steps:
    store.save(step, state._replace(step=jnp.int32(step)), {'error': float(step)})
  store.settle()


def test_steps_are_numbers_and_only_numbers_are_steps(store, state, toy_config):
  toy_config.checkpoint.keep = -1
  save(store, 900, 1000, 9000, 10000, state=state)
  os.mkdir(os.path.join(store.folder, 'handpicked'))
  os.mkdir(os.path.join(store.folder, '20000'))            # empty: an interrupted copy, not a checkpoint
  assert store.steps() == [900, 1000, 9000, 10000]
  _, like = state_of(toy_config, make_mesh('4x2'))
  assert int(store.resume(like).step) == 10000


def test_keeps_the_newest_and_the_best(store, state, toy_config):
  toy_config.checkpoint.keep = 2
  toy_config.checkpoint.best = '-error'
  save(store, 9, 10, 100, 1000, state=state)
  assert store.steps() == [9, 100, 1000]                   # 9 has the least error
  assert store.best('-error') == 9 and store.best('error') == 1000 and store.best('loss') is None
  toy_config.checkpoint.best = ''
  save(store, 2000, state=state)
  assert store.steps() == [1000, 2000]


@pytest.mark.parametrize('other', ['8x1', '1x8', '2', '1'])
def test_restores_on_another_mesh(store, state, toy_config, other):
  state = jax.tree.map(lambda x: x + np.asarray(0.3, x.dtype), state)
  save(store, 3, state=state)
  _, like = state_of(toy_config, make_mesh(other))
  got = store.resume(like)
  for a, b, c in zip(*map(jax.tree.leaves, (got, state._replace(step=jnp.int32(3)), like)), strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.sharding == c.sharding
  step, weights, stats = store.weights('latest', like)
  assert step == 3 and jax.tree.structure(weights) == jax.tree.structure(state.params)
  np.testing.assert_array_equal(weights['dense']['kernel'], state.opt.ema['dense']['kernel'])


def test_what_an_interrupted_save_left_is_ignored_and_cleaned(store, state, toy_config):
  save(store, 5, state=state)
  shutil.copytree(store.path(5), store.path(7) + '.orbax-checkpoint-tmp')
  shutil.copytree(store.path(5), os.path.join(store.folder, 'removed-3'))
  assert store.steps() == [5]
  store.clean()
  assert sorted(os.listdir(store.folder)) == ['5']


def largest(folder):
  return max(glob.glob(f'{folder}/**/d/*', recursive=True), key=os.path.getsize)


def test_a_broken_newest_checkpoint_gives_way_to_the_one_before(store, state, toy_config, caplog):
  save(store, 5, 10, state=state)
  for path in glob.glob(f'{store.path(10)}/params/**/d/*', recursive=True):
    with open(path, 'r+b') as f:
      f.truncate(max(os.path.getsize(path) // 2, 1))
  _, like = state_of(toy_config, make_mesh('4x2'))
  assert int(store.resume(like).step) == 5
  assert f'{store.path(10)} is broken' in caplog.text


def test_what_another_process_cannot_read_none_takes(store, state, toy_config, monkeypatch, caplog):
  save(store, 5, 10, state=state)
  others = iter(['', 'cut', '', '', ''])       # of step 10 another reads the description alone, of step 5 all
  monkeypatch.setattr(checkpoint.meshes, 'gather',
                      lambda items: [*items, next(others)] if [*items] == [''] else [*items])
  _, like = state_of(toy_config, make_mesh('4x2'))
  assert int(store.resume(like).step) == 5 and next(others, None) is None
  assert f'{store.path(10)} is broken for process 1, trying the one before: cut' in caplog.text
  assert os.path.isdir(os.path.join(store.folder, 'broken-10'))


def test_a_broken_step_is_set_aside_and_can_be_written_again(store, state, toy_config):
  save(store, 5, 10, state=state)
  with open(os.path.join(store.path(10), 'meta', 'metadata'), 'w', encoding='utf-8') as f:
    f.write('{')
  os.mkdir(store.path(7))
  _, like = state_of(toy_config, make_mesh('4x2'))
  store.clean()
  assert int(store.resume(like).step) == 5
  assert store.steps() == [5] and {'broken-7', 'broken-10'} < set(os.listdir(store.folder))
  save(store, 10, state=state)
  assert store.steps() == [5, 10]


def test_incomplete_checkpoints_alone_are_no_reason_to_start_at_0(store, state, toy_config):
  save(store, 5, state=state)
  shutil.rmtree(os.path.join(store.path(5), 'meta'))
  with pytest.raises(CheckpointError, match=r'incomplete checkpoints \[5\] and no complete one'):
    store.clean()


def test_another_size_is_told_as_such(store, state, toy_config):
  save(store, 5, state=state)
  _, like = state_of(toy_config, make_mesh('4x2'))
  wide = like._replace(params={'dense': {**like.params['dense'], 'kernel': jax.ShapeDtypeStruct((4, 16), jnp.float32)}})
  with pytest.raises(CheckpointError, match=r"params/dense/kernel \['float32', \[4, 8\]\] is not"):
    store.resume(wide)


def test_never_starts_at_0_where_checkpoints_are(store, state, toy_config):
  save(store, 5, 10, state=state)
  for step in (5, 10):
    shutil.rmtree(os.path.join(store.path(step), 'params'))
  _, like = state_of(toy_config, make_mesh('4x2'))
  with pytest.raises(CheckpointError, match=r'none of the checkpoints \[5, 10\]'):
    store.resume(like)


def test_a_changed_bit_is_named(store, state, toy_config):
  save(store, 5, state=state)
  meta = os.path.join(store.path(5), 'meta', 'metadata')
  with open(meta, encoding='utf-8') as f:
    told = json.load(f)
  told['arrays']['opt/inner/1/0/mu/dense/kernel'][2][0] ^= 1      # as if the array's bit had flipped
  with open(meta, 'w', encoding='utf-8') as f:
    json.dump(told, f)
  got = store.restore(5, checkpoint.split(state_of(toy_config, make_mesh('4x2'))[1]))
  with pytest.raises(CheckpointError, match='array opt/inner/1/0/mu/dense/kernel differs'):
    checkpoint.verify(checkpoint.join(got, state), told['arrays'], store.path(5))


def test_an_empty_workdir_says_that_it_starts_fresh(toy_config, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(meshes, 'preempted', lambda step: True)
  with pytest.raises(meshes.Preempted):
    train.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  assert f'no checkpoint in {tmp_path}/checkpoints: starting at step 0' in capsys.readouterr().err


def test_a_foreign_checkpoint_is_refused(store, state, toy_config):
  save(store, 5, state=state)
  other = toy.get_config()
  other.data.dir, other.task = toy_config.data.dir, 'tests.other'
  foreign = Checkpoints(os.path.dirname(store.folder), other)
  _, like = state_of(toy_config, make_mesh('4x2'))
  told = "belongs to another run: task tests.toy.*task: 'tests.toy' -> 'tests.other'"
  with pytest.raises(CheckpointError, match=told):
    foreign.resume(like)
  foreign.close()


def test_stats_that_the_program_does_not_have_are_named(store, state):
  save(store, 5, state=state._replace(stats={**state.stats, 'old': state.stats['error']}))
  for read in (lambda: store.resume(state), lambda: store.weights('latest', state)):
    with pytest.raises(CheckpointError, match=r"unknown here \['stats/old'\]"):
      read()


def test_missing_steps_are_named_with_the_nearest(store, state, toy_config):
  with pytest.raises(CheckpointError, match='no checkpoint in'):
    store.find('latest')
  toy_config.checkpoint.keep = -1
  save(store, 900, 1000, 9000, state=state)
  with pytest.raises(CheckpointError, match=r"no step '950'; nearest: \[900, 1000, 9000\]"):
    store.find('950')
  assert (store.find('latest'), store.find('best'), store.find('1000')) == (9000, 900, 1000)


# saving that fails

def test_a_failed_background_write_is_told_and_made_again(store, state, toy_config, caplog, monkeypatch):
  save(store, 10, state=state)
  store.save(20, state)
  wait = store.orbax.wait_until_finished
  monkeypatch.setattr(store.orbax, 'wait_until_finished', lambda: (wait(), shutil.rmtree(store.path(20)), _io_error()))
  store.settle()
  monkeypatch.undo()
  assert store.steps() == [10]
  assert caplog.text.count('checkpoint 20 was not written') == 1
  save(store, 20, 30, state=state)
  assert store.steps() == [10, 20, 30]                      # 10 has the least error


def _io_error():
  raise OSError(5, 'Input/output error')


def test_three_failed_writes_end_the_run(store, state, toy_config, monkeypatch):
  monkeypatch.setattr(store.orbax, 'save', lambda *a, **k: _io_error())
  store.save(1, state)
  store.save(2, state)
  with pytest.raises(CheckpointError, match='3 checkpoints in a row'):
    store.save(3, state)


def test_a_full_disk_leaves_the_last_checkpoint_and_tells_the_bytes(store, state, toy_config, monkeypatch):
  save(store, 5, state=state)
  usage = shutil.disk_usage(store.folder)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=1000))
  with pytest.raises(DiskFull, match=r'needs 1,04\d,\d+ bytes in .*, 1,000 are free; complete steps: \[5\]'):
    store.save(10, state)
  free = iter([1000, 1000, usage.free])                       # space is made while it waits
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=next(free)))
  monkeypatch.setattr(checkpoint.time, 'sleep', lambda s: None)
  toy_config.checkpoint.space_wait_s = 60.0
  store.save(10, state)
  store.settle()
  assert store.steps() == [5, 10]


@pytest.mark.parametrize('wait_s', [0.0, 60.0])
def test_a_disk_that_fills_up_in_the_middle_of_a_write(store, state, toy_config, monkeypatch, wait_s):
  def full(path, **_):
    os.makedirs(os.path.join(path + '.orbax-checkpoint-tmp-1', 'params'))
    raise OSError(28, 'No space left on device')
  save(store, 5, state=state)
  before = store.meta(5)
  toy_config.checkpoint.space_wait_s = wait_s
  monkeypatch.setattr(store.orbax, 'save', full)
  with contextlib.nullcontext() if wait_s else pytest.raises(DiskFull, match=r'no space left .*steps: \[5\]'):
    store.save(10, state)
  assert os.listdir(store.folder) == ['5'] and store.meta(5) == before       # what was half written is gone
  monkeypatch.undo()
  save(store, 10, state=state)
  assert store.steps() == [5, 10]


def test_an_unwritable_workdir_is_one_message(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(files.StorageError, match="can't be written"):
    locks.claim(str(tmp_path / 'file' / 'run'))


# grafting

@pytest.fixture
def fresh():
  place = NamedSharding(make_mesh('4x2'), P())
  shapes = {'dense': {'kernel': (4, 8), 'bias': (8,)}, 'head': {'kernel': (3,)}}
  return jax.tree.map(lambda s: jax.device_put(jnp.zeros(s), place), shapes, is_leaf=lambda s: isinstance(s, tuple))


def test_graft_names_every_array(store, state, fresh, caplog):
  caplog.set_level('INFO')
  state = state._replace(opt=state.opt._replace(ema={}))
  save(store, 5, state=state)
  fresh['dense']['bias'] = jnp.zeros(9)
  got = graft.graft(fresh, os.path.dirname(store.folder))
  np.testing.assert_array_equal(got['dense']['kernel'], state.params['dense']['kernel'])
  np.testing.assert_array_equal(got['dense']['bias'], np.zeros(9))
  assert '1 taken: dense/kernel' in caplog.text
  assert '1 fresh: head/kernel' in caplog.text
  assert '1 mismatched: dense/bias (8,) is not (9,)' in caplog.text
  assert got['dense']['kernel'].sharding == fresh['dense']['kernel'].sharding


def test_graft_takes_only_what_is_wanted_and_the_averaged_weights(store, state, fresh):
  state = state._replace(opt=state.opt._replace(ema=jax.tree.map(lambda x: x + 1, state.params)))
  save(store, 5, state=state)
  got = graft.graft(fresh, f'{os.path.dirname(store.folder)}:5', 'bias')
  np.testing.assert_array_equal(got['dense']['bias'], np.ones(8))
  np.testing.assert_array_equal(got['dense']['kernel'], np.zeros((4, 8)))


def test_graft_from_a_wrong_place_is_an_error(store, state, fresh, tmp_path):
  save(store, 5, state=state)
  run = os.path.dirname(store.folder)
  with pytest.raises(CheckpointError, match=f'no such folder; did you mean {run}'):
    graft.graft(fresh, run + 'x')
  with pytest.raises(CheckpointError, match=r"no step '6'; nearest: \[5\]"):
    graft.graft(fresh, run + ':6')
  with pytest.raises(CheckpointError, match='none of its 2 arrays fits'):
    graft.graft({'other': jnp.zeros(3)}, run)
  path = tmp_path / 'weights.safetensors'
  with pytest.raises(CheckpointError, match='no such file'):
    graft.graft(fresh, str(path))
  path.write_bytes(b'\x80\x04cposix\nsystem\n.')             # a pickle under another name
  with pytest.raises(CheckpointError, match='not a safetensors file'):
    graft.graft(fresh, str(path))


def test_graft_from_safetensors(fresh, tmp_path):
  from safetensors.numpy import save_file
  save_file({'dense/bias': np.arange(8, dtype=np.float32)}, str(tmp_path / 'w.safetensors'))
  got = graft.graft(fresh, str(tmp_path / 'w.safetensors'))
  np.testing.assert_array_equal(got['dense']['bias'], np.arange(8))
  save_file({'dense/bias': np.zeros(8, np.float32)}, str(tmp_path / 'w.safetensors'), {'preprocess': 'caffe'})
  config = ml_collections.ConfigDict({'model': {'preprocess': 'imagenet'}})
  with pytest.raises(CheckpointError, match="need config.model.preprocess = 'caffe', not 'imagenet'"):
    graft.graft(fresh, str(tmp_path / 'w.safetensors'), config=config)


def test_split_and_join_are_inverse(state):
  again = checkpoint.join(checkpoint.split(state), state)
  assert isinstance(again, TrainState) and jax.tree.structure(again) == jax.tree.structure(state)


# parts from elsewhere

@pytest.fixture
def stack(tmp_path):
  """A file with a stack of six layers, and one without its bias."""
  from safetensors.numpy import save_file
  arrays = {'blocks/kernel': np.arange(24, dtype=np.float32).reshape(6, 4), 'bias': np.full(3, 7, np.float32)}
  save_file(arrays, str(tmp_path / 'whole.safetensors'))
  save_file({k: v for k, v in arrays.items() if k != 'bias'}, str(tmp_path / 'half.safetensors'))
  return tmp_path / 'whole.safetensors', tmp_path / 'half.safetensors', arrays


def parts(layers=3):
  return {'blocks': {'kernel': jnp.zeros((layers, 4))}, 'bias': jnp.zeros(3),
          'old': {'blocks': {'kernel': jnp.zeros((6, 4))}, 'bias': jnp.zeros(3)}, 'older': jnp.zeros(2)}


def test_a_part_is_filled_by_the_rest_of_its_paths(stack):
  whole, _, arrays = stack
  got = graft.fill(parts(), (('old', str(whole)),), 'blocks/')
  np.testing.assert_array_equal(got['old']['blocks']['kernel'], arrays['blocks/kernel'])
  assert np.all(got['old']['bias'] == 7) and not np.any(got['bias']) and not np.any(got['older'])


def test_the_longest_prefix_decides_and_a_shallow_stack_takes_every_second_layer(stack):
  whole, _, arrays = stack
  tree = {k: v for k, v in parts().items() if k != 'older'}
  got = graft.fill(tree, (('', str(whole)), ('old', str(whole))), 'blocks/')
  np.testing.assert_array_equal(got['blocks']['kernel'], arrays['blocks/kernel'][[0, 2, 4]])
  np.testing.assert_array_equal(got['old']['blocks']['kernel'], arrays['blocks/kernel'])
  for layers, stacked in ((3, ''), (4, 'blocks/')):
    tree['blocks'] = {'kernel': jnp.zeros((layers, 4))}
    with pytest.raises(CheckpointError, match=rf'blocks/kernel \({layers}, 4\) should come from .* has \(6, 4\)'):
      graft.fill(tree, (('', str(whole)), ('old', str(whole))), stacked)


def test_half_a_part_is_refused(stack, tmp_path):
  whole, half, _ = stack
  with pytest.raises(CheckpointError, match=r'init_parts: old/bias \(3,\) .* has no such array \(bias\)'):
    graft.fill(parts(), (('old', str(half)),))
  with pytest.raises(CheckpointError, match='init_parts = .*: no such file'):
    graft.fill(parts(), (('old', str(tmp_path / 'none.safetensors')),))
  with pytest.raises(ConfigError, match="no parameter is below 'ol'; there are"):
    graft.fill(parts(), (('ol', str(whole)),))


@pytest.mark.parametrize('values, message', [
    ({'init_parts': ('old', 'run')}, r'expected \(\(prefix, run or .safetensors file\), ...\)'),
    ({'init_parts': (('old', ''),)}, r'expected \(\(prefix'),
    ({'init_parts': (('old', 'a'), ('old', 'b'))}, 'a prefix is there twice'),
    ({'init_parts': (('', 'a'),), 'init_from': 'b'}, "init_from = 'b': expected '', for all weights come from"),
    ({'init_parts': (('', 'a'),), 'continue_from': 'b'}, "continue_from = 'b': expected ''"),
])
def test_parts_that_cannot_be_are_told(toy_config, values, message):
  toy_config.update(values)
  with pytest.raises(ConfigError, match=message):
    train.check(toy_config)
