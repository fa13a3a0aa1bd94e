"""Machines by name: the devices of a TPU slice that nobody here owns, or of this machine; and what a chip can do."""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

from lab.task import ConfigError

GB = 1e9
FORMS = ('v5e:16x16, v5p:4x4x4, v4:4x4x4, v6e:16x16; with *4 behind for four slices; gpu:2 or cpu:8 for devices of '
         'this machine')


class Chip(NamedTuple):
  """What one device has; its peak FLOP/s is in flops.py. 0 where nobody says."""
  hbm: float           # bytes/s of its memory
  link: float          # bytes/s that it sends to the others of its slice, or over NVLink
  dcn: float           # bytes/s that it sends to other slices, over the data-center network


# cloud.google.com/tpu/docs/v4, v5e, v5p, v6e: memory; half of the bidirectional bandwidth between chips; the
# data-center network: 50 Gbit/s a chip of v5p, a 256th of 6.4 and 25.6 Tbit/s a pod of v5e and v6e, of v4 not said.
# H100, H200: NVIDIA's data sheets (SXM); half of NVLink's 900 GB/s.
CHIPS = (
    (r'TPU v4', Chip(1228 * GB, 300 * GB, 0)),
    (r'TPU v5 ?lite|TPU v5e', Chip(819 * GB, 200 * GB, 3.125 * GB)),
    (r'TPU v5p?', Chip(2765 * GB, 600 * GB, 6.25 * GB)),
    (r'TPU v6 ?lite|TPU v6e', Chip(1600 * GB, 400 * GB, 12.5 * GB)),
    (r'NVIDIA H100 80GB HBM3', Chip(3350 * GB, 450 * GB, 0)),
    (r'NVIDIA H200', Chip(4800 * GB, 450 * GB, 0)),
)
# bytes of memory that the compiler (libtpu 0.0.42.1) lets a program fill, as its refusal of a larger one says
MEMORY = {'v4': 30.75 * 2**30, 'v5e': 15.75 * 2**30, 'v5p': 95.74 * 2**30, 'v6e': 31.25 * 2**30}
# what libtpu wants to know beside the shape
OPTIONS = {'v4': {'chip_config_name': 'megacore'}}
# libtpu finds no TPU here and is told not to look for one, nor to leave files
QUIET = {'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
         'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0', 'TPU_MIN_LOG_LEVEL': '3',
         'TPU_STDERR_LOG_LEVEL': '3', 'TPU_LOG_DIR': 'disabled'}


class Topology(NamedTuple):
  """A machine: its devices, slice after slice."""
  name: str
  devices: list
  slices: int
  memory: float | None     # bytes of a device that a program may use; None: unknown

  @property
  def chip(self) -> Chip:
    """What each device has."""
    kind = self.devices[0].device_kind
    return next((chip for names, chip in CHIPS if re.fullmatch(names, kind)), Chip(0, 0, 0))

  def slices_of(self, devices: Iterable) -> list[int]:
    """The slice of each of these, from 0 on."""
    each = len(self.devices) // self.slices
    place = {device: i // each for i, device in enumerate(self.devices)}
    return [place[device] for device in devices]


def find(name: str) -> Topology:
  """The machine of a name such as v5e:16x16, v5e:16x16*2, gpu:2 or cpu:8. Raises ConfigError for others.

  A TPU needs libtpu, which the lab's extra `tpu` brings, but no TPU.
  """
  found = re.fullmatch(r'(v\w+):(\d+(?:x\d+)+)(?:\*(\d+))?', name)
  if found:
    return _slices(name, found[1], found[2], int(found[3] or 1))
  found = re.fullmatch(r'(gpu|cpu):(\d+)', name)
  if not found:
    raise ConfigError(f'--topology={name}: expected {FORMS}')
  kind, count = found[1], int(found[2])
  try:
    devices = jax.devices(kind)
  except RuntimeError:
    devices = []
  if not 1 <= count <= len(devices):
    raise ConfigError(f'--topology={name}: this machine has {len(devices)} such devices')
  stats = devices[0].memory_stats() or {}
  return Topology(name, devices[:count], 1, stats.get('bytes_limit'))


def _slices(name, kind, shape, count) -> Topology:
  for key, value in QUIET.items():
    os.environ.setdefault(key, value)
  from jax.experimental import topologies
  options = dict(OPTIONS.get(kind, {}), **({'num_slices': count} if count > 1 else {}))
  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=f'{kind}:{shape}', **options)
  except Exception as e:       # libtpu and jax have many words for it
    if re.search('libtpu|TPU support not installed', str(e)) or isinstance(e, ImportError):
      raise ConfigError(f'--topology={name}: the compiler for TPUs is not there: {_line(e)}. Install the extra: pip '
                        "install '.[tpu]'") from None
    raise ConfigError(f'--topology={name}: no such slice: {_line(e)}; expected such as {FORMS}') from None
  return Topology(name, list(found.devices), count, MEMORY.get(kind))


def _line(error) -> str:
  return next(iter(str(error).splitlines()), type(error).__name__)
