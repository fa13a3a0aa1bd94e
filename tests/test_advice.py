"""What is advised where a step does not fit: every setting is one that the program takes."""

import copy
import importlib
import re

import jax
import numpy as np
import pytest

from lab import advice, memory, mesh as meshes, optim, topology, train
from lab.config import override
from lab.task import load

SPEC = {**{name: jax.ShapeDtypeStruct((1, 16), np.int32) for name in ('ids', 'segments', 'targets')},
        'mask': jax.ShapeDtypeStruct((1,), np.float32)}
ADAFACTOR = 'config.optim.name=adafactor with config.optim.beta2=-1'      # the recipe's own beta2 is AdamW's


@pytest.fixture
def config():
  """A recipe of four heads, updated by 64 windows."""
  found = importlib.import_module('configs.gpt').get_config('smoke')
  found.model.heads, found.input.batch_size = 4, 64
  return found


def advised(config, mesh, slices=1, limit=1.0, rows=64):
  """The settings for eight devices, filled by the state if the limit is 1 byte; each of them is tried."""
  config.mesh.update(dict(zip(meshes.AXES, mesh)))
  config.input.batch_size, config.optim.accumulate = rows, 64 // rows
  machine = topology.Topology('x', jax.devices(), slices, limit)
  task, mesh = load(config), meshes.make(config.mesh, machine.devices)
  like = train.abstract(task, optim.make(config.optim, config.total_steps), config, SPEC, mesh)
  found = advice.settings(task, config, like, mesh, machine)
  assert len(found) <= 3 and len({*found}) == len(found)
  for told in found:
    accepted(config, machine, told, memory.on_device(like))
  return [told.partition(' (')[0] for told in found]


def accepted(config, machine, told, most):
  """Whether the program takes it, the update is the same, and the state is as small as is said."""
  config, before = copy.deepcopy(config), config.to_json()
  assert not override(config, [f'--{flag}' for flag in re.findall(r'config\.[^ ,]+', told)])
  assert config.to_json() != before
  train.check(config)
  task, mesh = load(config), meshes.make(config.mesh, machine.devices)
  assert mesh.shape['data'] % machine.slices == 0 and config.model.heads % mesh.shape['tensor'] == 0
  assert config.input.batch_size * config.optim.accumulate == 64
  meshes.rows(mesh, config.input.batch_size)      # raises where the mesh can't split it
  state = memory.on_device(train.abstract(task, optim.make(config.optim, config.total_steps), config, SPEC, mesh))
  assert state < most if 'the state takes' in told else state == most
  assert state == most or f'{memory.size(state)} of a device, now {memory.size(most)}' in told


@pytest.mark.parametrize('mesh, slices', [
    ((1, -1, 1), 1), ((8, 1, 1), 1), ((-1, 2, 1), 1), ((4, 2, 1), 2), ((2, 4, 1), 2), ((2, 2, 2), 1), ((2, 2, 2), 2),
    ((-1, 1, 4), 1), ((1, 2, 4), 1), ((8, 1, -1), 2)])
@pytest.mark.parametrize('rows, limit', [(64, None), (8, 1.0)])
def test_what_is_advised_is_accepted(config, mesh, slices, rows, limit):
  assert len(advised(config, mesh, slices, limit, rows)) == 3


def test_a_full_mesh_of_fsdp_is_not_asked_for_more(config):
  assert advised(config, (1, -1, 1)) == [
      ADAFACTOR, 'config.input.batch_size=32 with config.optim.accumulate=2', 'config.model.remat=True']


def test_more_fsdp_takes_devices_from_data_but_none_of_another_slice(config):
  more = 'config.mesh.data=2 with config.mesh.fsdp=4'
  assert advised(config, (4, 2, 1))[0] == more
  assert advised(config, (4, 2, 1), slices=2)[0] == more
  assert advised(config, (2, 4, 1), slices=2)[0] == ADAFACTOR


def test_a_batch_of_one_example_a_device_is_halved_over_heads(config):
  config.model.remat = True
  rest = 'config.input.batch_size=4, config.optim.accumulate=16'
  of = lambda mesh: [told for told in advised(config, mesh, rows=8, limit=None) if 'batch_size' in told]
  assert of((8, 1, 1)) == [f'config.mesh.data=4 with config.mesh.tensor=2, {rest}']
  assert of((1, 8, 1)) == [f'config.mesh.fsdp=4 with config.mesh.tensor=2, {rest}']
  config.model.heads = 1
  assert not of((1, 8, 1))


def test_what_is_set_already_is_not_advised(config):
  config.model.remat, config.optim.name, config.optim.beta2 = True, 'adafactor', -1.0
  assert advised(config, (1, -1, 1)) == ['config.input.batch_size=32 with config.optim.accumulate=2']
  config.optim.ema = 0.9
  assert advised(config, (1, -1, 1))[0] == 'config.optim.ema=0'
  config.optim.ema, config.optim.name = 0.0, 'sgd'
  assert not [told for told in advised(config, (1, -1, 1)) if 'optim.name' in told]


def test_what_takes_the_room_comes_first(config):
  assert 'mesh.fsdp' in advised(config, (8, 1, 1), limit=1.0)[0]
  assert 'batch_size' in advised(config, (8, 1, 1), limit=1e12)[0]


def test_fsdp_that_would_split_less_is_not_advised(config):
  config.model.width, config.model.heads, config.model.hidden = 12, 1, 12      # 4 devices divide it, 8 do not
  assert not [told for told in advised(config, (2, 4, 1)) if 'fsdp' in told]
