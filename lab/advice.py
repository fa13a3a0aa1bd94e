"""What helps where a training step does not fit a machine: settings that are accepted as they stand."""

import copy
from typing import Iterator

import jax
from jax.sharding import Mesh

from lab import memory, mesh as meshes, optim, sharding, train
from lab.config import override
from lab.task import ConfigError, Task, TrainState, load
from lab.topology import Topology

MOST = 3             # settings that are told
WORTH = 0.9          # of what the state takes now, where it is to become smaller
Flags = tuple[str, ...]      # 'config.KEY=VALUE', to be set together


def settings(task: Task, config, like: TrainState, mesh: Mesh, machine: Topology) -> list[str]:
  """Up to three settings, that first which helps most: what makes the state smaller, where it takes most of the room.

  Each was tried: it is none that is set already, it would not be refused, and the state does not grow by it.
  """
  now, found = memory.on_device(like), []
  state = [(flags, True) for flags in _of_state(config, mesh, machine.slices)]
  step = [(flags, False) for flags in _of_step(config, mesh, machine.slices)]
  heavy = machine.memory is not None and 2 * now > machine.memory
  # lion's rates are not those of others, so it comes last
  for flags, smaller in [*(state + step if heavy else step + state), (_optimizer(config, 'lion'), True)]:
    after = _state(task, config, like, machine, flags)
    if after is not None and after <= (WORTH if smaller else 1) * now:
      told = f' (the state takes {memory.size(after)} of a device, now {memory.size(now)})' * (after < now)
      found.append(flags[0] + ' with ' * (len(flags) > 1) + ', '.join(flags[1:]) + told)
  return found[:MOST]


def _of_state(config, mesh, slices) -> Iterator[Flags]:
  """What makes parameters, moments and averages of a device smaller."""
  data = mesh.shape['data']
  if (parts := _factor(data // slices)) > 1:      # only data reaches from one slice to another
    yield f'config.mesh.data={data // parts}', f'config.mesh.fsdp={mesh.shape["fsdp"] * parts}'
  yield _optimizer(config, 'adafactor')
  if config.optim.ema:
    yield 'config.optim.ema=0',


def _of_step(config, mesh, slices) -> Iterator[Flags]:
  """What makes smaller what a step holds for a while."""
  size, accumulate, shape = config.input.batch_size, config.optim.accumulate, mesh.shape
  model = config.get('model', {})
  heads = model.get('heads')
  if (parts := _factor(size // (shape['data'] * shape['fsdp']))) > 1:
    yield f'config.input.batch_size={size // parts}', f'config.optim.accumulate={parts * accumulate}'
  elif isinstance(heads, int) and heads % (2 * shape['tensor']) == 0:      # an example a device: two share two
    axis = next((a for a, least in (('data', slices), ('fsdp', 1)) if shape[a] // least % 2 == 0), None)
    if axis:
      yield (f'config.mesh.{axis}={shape[axis] // 2}', f'config.mesh.tensor={2 * shape["tensor"]}',
             f'config.input.batch_size={size // 2}', f'config.optim.accumulate={2 * accumulate}')
  if 'remat' in model and not model.remat:
    yield 'config.model.remat=True',


def _optimizer(config, name) -> Flags:
  """Another optimizer, at its own constants."""
  own = [f'config.optim.{key}=-1' for key in ('beta1', 'beta2', 'eps') if config.optim[key] != -1]
  return f'config.optim.name={name}', *own, *(['config.optim.nesterov=False'] if config.optim.nesterov else [])


def _state(task, config, like, machine, flags) -> int | None:
  """Bytes of a device that the state takes with these settings; None where they are refused."""
  config = copy.deepcopy(config)
  override(config, [f'--{flag}' for flag in flags])
  try:
    train.check(config)
    load(config)
    mesh = meshes.make(config.mesh, machine.devices)
    opt = jax.eval_shape(optim.make(config.optim, config.total_steps).init, like.params)
  except ConfigError:
    return None
  if meshes.padded(mesh, config.input.batch_size) != config.input.batch_size:
    return None
  state = like._replace(opt=opt)
  return memory.on_device(jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state,
                                       sharding.split(task.rules, state, mesh)))


def _factor(n: int) -> int:
  """The smallest prime factor; 1 of 1."""
  return next((k for k in range(2, n + 1) if n % k == 0), 1)
