"""Machines by name: the devices of a TPU slice that nobody here owns, or of this machine; and what a chip can do."""

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax

from lab.task import ConfigError

GB = 1e9
MIB = 1 << 20
FORMS = ('v5e:16x16, v5p:4x4x4, v4:4x4x4, v6e:16x16; with *4 behind for four slices; h100:8, h200:8 for GPUs of one '
         'host; gpu:2 or cpu:8 for devices of this machine')


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
# names and memory of GPUs, as the driver tells them; of it JAX lets a program fill three quarters
GPUS = {'h100': ('NVIDIA H100 80GB HBM3', 81559 * MIB), 'h200': ('NVIDIA H200', 143771 * MIB)}
# What XLA compiles for them by: openxla/xla, xla/backends/gpu/target_config, whose figures for H100 and H200 these are
HOPPER = '''
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f} l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" name: "{name}" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
'''
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
  """The machine of a name such as v5e:16x16, v5e:16x16*2, h200:8, gpu:2 or cpu:8. Raises ConfigError for others.

  A TPU needs libtpu, which the lab's extra `tpu` brings, but no TPU; h100 and h200 the extra `cuda`, but no GPU.
  """
  found = re.fullmatch(r'(v\w+):(\d+(?:x\d+)+)(?:\*(\d+))?', name)
  if found:
    return _slices(name, found[1], found[2], int(found[3] or 1))
  found = re.fullmatch(r'(h[12]00):(\d)', name)
  if found:
    return _gpus(name, found[1], int(found[2]))
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


def _gpus(name, kind, count) -> Topology:
  from jax.experimental import topologies
  title, memory = GPUS[kind]
  bandwidth = next(chip.hbm for names, chip in CHIPS if re.fullmatch(names, title))
  if not 1 <= count <= 8:
    raise ConfigError(f'--topology={name}: a host has 1 to 8 of them')
  try:
    found = topologies.get_topology_desc(platform='cuda', topology=f'1x1x{count}', target_config=HOPPER.format(
        bandwidth=bandwidth, memory=memory, name=title))
  except Exception as e:       # of the plugin, or of its absence
    raise ConfigError(f'--topology={name}: the compiler for NVIDIA GPUs is not there: {_line(e)}. Install the extra: '
                      "pip install '.[cuda]'") from None
  return Topology(name, list(found.devices), 1, 0.75 * memory)


def _line(error) -> str:
  return next(iter(str(error).splitlines()), type(error).__name__)
