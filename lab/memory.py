"""What a step needs of a device's memory, told before the first one runs."""

import math
import os
import resource
from typing import Any, Mapping, NamedTuple

import jax
from data_pipelines import TooLarge
from data_pipelines.pipeline import available_bytes

# version 2, then version 1: folder, limit, what is used, how memory.stat marks the sums over the groups below
CGROUPS = (('/sys/fs/cgroup', 'memory.max', 'memory.current', ''),
           ('/sys/fs/cgroup/memory', 'memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_'))
ADVICE = {
    'activations': 'a smaller config.input.batch_size with config.optim.accumulate for the rest of the batch, '
                   'recomputation (config.model.remat=True where a model has it), or more devices on config.mesh.data',
    'state': 'a larger config.mesh.fsdp, which splits parameters and moments over devices, an optimizer with smaller '
             'moments (config.optim.name=adafactor or lion), or config.optim.ema=0',
}


class Need(NamedTuple):
  """Bytes on each device; `free` is what the device has beside what is already in use."""
  parameters: int
  optimizer: int         # moments and averaged weights
  batch: int
  activations: int       # and gradients and whatever else a step holds for a while
  free: int | None       # None: nobody knows
  in_use: int

  def text(self) -> str:
    """One line for people."""
    parts = ', '.join(f'{k} {size(v)}' for k, v in self._asdict().items() if k not in ('free', 'in_use'))
    return f'memory a device: {parts}' + (
        '' if self.free is None else f'; {size(self.in_use)} in use, {size(self.free)} free')


def size(n: float) -> str:
  """Bytes in a unit that suits them."""
  for unit in ('B', 'KiB', 'MiB', 'GiB'):
    if n < 1024 or unit == 'GiB':
      return f'{n:.3g} {unit}'
    n /= 1024


def on_device(tree: Any) -> int:
  """Bytes that a tree of arrays, abstract ones with shardings too, takes on each device."""
  return sum(_shard(x) for x in jax.tree.leaves(tree))


def _shard(x) -> int:
  shape = x.sharding.shard_shape(x.shape) if getattr(x, 'sharding', None) is not None else x.shape
  return math.prod(shape) * x.dtype.itemsize


def free() -> tuple[int | None, int]:
  """(free, in use) bytes of each of this process's devices. Fake devices of a CPU share what the machine has left.

  (None, 0) for an accelerator that keeps no statistics: the memory of its host says nothing about its own.
  """
  device = jax.local_devices()[0]
  stats = device.memory_stats() or {}
  if 'bytes_limit' in stats:
    return stats['bytes_limit'] - stats['bytes_in_use'], stats['bytes_in_use']
  if device.platform != 'cpu':
    return None, 0
  left, used = available_bytes(), 0
  with open('/proc/self/statm', encoding='ascii') as f:
    virtual, resident = (int(n) * os.sysconf('SC_PAGE_SIZE') for n in f.read().split()[:2])
  limit = resource.getrlimit(resource.RLIMIT_AS)[0]
  if limit != resource.RLIM_INFINITY:
    left = min(left, limit - virtual)
  left = min(left, _container())
  used = resident
  return max(left, 0) // jax.local_device_count(), used // jax.local_device_count()


def peak() -> int:
  """The most bytes that a device of this process had in use so far; on a CPU, all of the process."""
  most = max((d.memory_stats() or {}).get('peak_bytes_in_use', 0) for d in jax.local_devices())
  return most or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _container() -> int:
  """What the container's own limit leaves, in bytes; files that it keeps in memory can go, and count as free."""
  left = 1 << 62
  for folder, limit, used, mark in CGROUPS:
    try:
      limit, used, kept = (_read(os.path.join(folder, name)) for name in (limit, used, 'memory.stat'))
      kept = dict(line.split() for line in kept.splitlines())
      files = sum(int(kept.get(f'{mark}{kind}_file', 0)) for kind in ('inactive', 'active'))
      left = left if limit == 'max' else min(left, int(limit) - int(used) + files)
    except OSError:
      continue
  return left


def _read(path):
  with open(path, encoding='ascii') as f:
    return f.read().strip()


def check_state(like: Any) -> None:
  """Raises TooLarge where parameters and moments alone don't fit; before any of them is made."""
  state, (left, _) = on_device(like), free()
  if left is not None and state > left:
    raise TooLarge(f'parameters and optimizer need {size(state)} on each device, {size(left)} are free. What helps: '
                   f'{ADVICE["state"]}')


def check_step(compiled: Any, state: Any, batch: Mapping[str, Any]) -> Need:
  """What a compiled step (state, batch) needs. Raises TooLarge, with advice, if the device does not have it.

  The state is there already, and a donated one takes no second place.
  """
  found = compiled.memory_analysis()
  left, used = free()
  need = Need(parameters=on_device(state.params), optimizer=on_device(state.opt), batch=on_device(batch),
              activations=int(found.temp_size_in_bytes), free=left, in_use=used)
  extra = need.activations + max(found.output_size_in_bytes - found.alias_size_in_bytes, 0)
  if left is not None and extra > left:
    worst = 'activations' if need.activations > need.parameters + need.optimizer else 'state'
    raise TooLarge(f'a step does not fit: it needs {size(extra)} more on each device. {need.text()}. What helps: '
                   f'{ADVICE[worst]}')
  return need
