"""Devices and processes: the mesh, who owns which rows of a batch, and what processes tell each other."""

import contextlib
import json
import logging
import os
import signal
import sys
from typing import Any, Iterable, Mapping, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from lab import peers
from lab.config import flatten
from lab.logs import versions
from lab.peers import DistributedError
from lab.task import ConfigError

AXES = ('data', 'fsdp', 'tensor')
BATCH = P(('data', 'fsdp'))          # a batch is split over the first two axes
MICRO = P(None, ('data', 'fsdp'))    # a stack of them
LEAVE = 75, 'stopped: there was nothing to save yet; start the same command again'
log = logging.getLogger('lab')


class Preempted(Exception):
  """The run was asked to stop and has saved: the same command continues it."""
  exit_code = 75


_stop = {'alone': True, 'wanted': False, 'presses': 0, 'asked': 0}      # presses: of Ctrl-C; asked: how often by us


def listen(alone: bool) -> None:
  """Takes SIGTERM and SIGINT as wishes to stop after the next step or batch. A second SIGINT stops at once.

  Of several processes (not `alone`) JAX's own handler of SIGTERM tells all the others.
  """
  _stop['alone'] = alone

  def note(number, frame):
    del frame
    _stop['wanted'] = True
    _stop['presses'] += number == signal.SIGINT
    if number == signal.SIGINT and _stop['presses'] > 1:
      raise KeyboardInterrupt
  for number in (signal.SIGTERM, signal.SIGINT) if alone else ():
    signal.signal(number, note)


def interrupted() -> bool:
  """Whether the run was asked to stop; yes stays yes. Of several processes each gets the same answer at the same call.

  So all of them call this and `preempted` equally often, in the same order. It waits for nobody: only once one of them
  was asked do they tell each other how far they are, and stop one call after the foremost.
  """
  if not _stop['alone'] and not _stop['wanted']:
    from jax.experimental import multihost_utils
    _stop['asked'] += 1      # a step has but one number and an evaluation many batches; JAX wants one more each time
    _stop['wanted'] = multihost_utils.reached_preemption_sync_point(_stop['asked'])
  return _stop['wanted']


def preempted(step: int) -> bool:
  """Whether to stop after this step, as `interrupted` has it."""
  del step      # all processes ask after the same one
  return interrupted()


def start(config, workdir: str, distributed: bool = False, command: Mapping[str, str] | None = None) -> None:
  """Joins the other processes, if there are any, and checks that the wanted platform is there.

  Processes are found by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or, with `distributed`,
  by JAX itself (Cloud TPU, Slurm, ...); all of them must have the same packages, code, `config` and `command`.
  Raises ConfigError for a missing platform, DistributedError for processes.
  """
  platform = config.platform
  if platform == 'cpu':
    jax.config.update('jax_platforms', 'cpu')
  if distributed or 'JAX_COORDINATOR_ADDRESS' in os.environ:
    _join(config.processes, workdir)
    settings = {f'config.{k}': v for k, v in flatten(json.loads(config.to_json())).items() if k != 'assets'}
    peers.agree('program', {**versions(), 'code': peers.code(), 'python': sys.version, **(command or {}), **settings})
  try:
    found = jax.devices()[0].platform
  except RuntimeError as e:
    raise ConfigError(f'no device can be used: {e}. Is another process holding it?') from e
  if platform and platform != found:
    raise ConfigError(f'config.platform = {platform!r}, but JAX sees only {sorted({str(d) for d in jax.devices()})}. '
                      f'Likely causes: the driver or the {"cuda" if platform == "gpu" else platform} extra is not '
                      'installed, another process holds the device, JAX_PLATFORMS hides it, or a stale lock file '
                      '(/tmp/libtpu_lockfile)')
  if jax.process_index() == 0:
    log.info('running on %s: %d x %s, %d process(es)', found.upper(), jax.device_count(),
             jax.devices()[0].device_kind, jax.process_count())
    if found == 'cpu' and not platform and os.path.exists('/dev/nvidia0'):
      log.warning('this machine has a GPU that JAX does not use; install the cuda extra')


def _join(limits, workdir):
  """Finds the other processes and listens to them from then on."""
  address = os.environ.get('JAX_COORDINATOR_ADDRESS')
  try:
    known = {'coordinator_address': address, 'num_processes': int(os.environ['JAX_NUM_PROCESSES']),
             'process_id': int(os.environ['JAX_PROCESS_ID'])} if address else {}
  except KeyError as e:
    raise DistributedError(f'JAX_COORDINATOR_ADDRESS is set, {e} is not') from None
  except ValueError as e:
    raise DistributedError(f'JAX_NUM_PROCESSES and JAX_PROCESS_ID must be whole numbers: {e}') from None
  peers.end_on_abort()
  peers.end_on(signal.SIGTERM, *LEAVE)
  roll = peers.RollCall(workdir, str(known.get('process_id', '')), known.get('num_processes', 0), limits.start_s)
  try:
    with roll if '://' not in workdir else contextlib.nullcontext():
      jax.distributed.initialize(**known, initialization_timeout=int(limits.start_s) + 60,
                                 heartbeat_timeout_seconds=int(2.5 * limits.heartbeat_s),   # JAX looks twice as often
                                 shutdown_timeout_seconds=3600)      # the first may have much to send to a bucket
  except (RuntimeError, ValueError) as e:
    raise DistributedError(f'the processes did not find each other: {e}') from e
  if _stop['alone']:      # nothing to save; otherwise JAX listens to SIGTERM now
    peers.end_on(signal.SIGTERM, *LEAVE)
  peers.watch(limits.heartbeat_s)


def make(config: Mapping[str, int], devices: list | None = None) -> Mesh:
  """config.mesh -> a mesh with axes data, fsdp, tensor over all devices. Raises ConfigError if it doesn't fit them."""
  devices = jax.devices() if devices is None else devices
  sizes = [config[a] for a in AXES]
  if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
    raise ConfigError(f'config.mesh = {dict(config)}: sizes are positive, and at most one is -1')
  known = int(np.prod([s for s in sizes if s != -1]))
  sizes = [len(devices) // known if s == -1 else s for s in sizes]
  if int(np.prod(sizes)) != len(devices):
    raise ConfigError(f'config.mesh = {dict(config)} needs a multiple of {known} devices, there are {len(devices)}')
  slices = len({getattr(d, 'slice_index', 0) for d in devices}) if devices[0].platform == 'tpu' else 1
  if slices > 1:
    return _hybrid(config, sizes, devices, slices)
  if devices[0].platform == 'tpu':      # jax.make_mesh splits a side of the torus on v5e alone
    found = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(found, AXES, axis_types=(AxisType.Auto,) * 3)
  return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def _hybrid(config, sizes, devices, slices) -> Mesh:
  """Over TPU slices, between which there is but a slow network: only the data axis goes across, once a step."""
  if sizes[0] % slices:
    raise ConfigError(f'config.mesh = {dict(config)}: data is {sizes[0]}; expected a multiple of the {slices} slices, '
                      'for fsdp and tensor send too much to reach from one to another')
  found = mesh_utils.create_hybrid_device_mesh((sizes[0] // slices, *sizes[1:]), (slices, 1, 1), devices,
                                               allow_split_physical_axes=True)
  return Mesh(found, AXES, axis_types=(AxisType.Auto,) * 3)


class Rows(NamedTuple):
  """The rows of a global batch that this process feeds, ascending, and which of them it speaks for.

  Processes along the tensor axis feed the same rows; only one of them makes records of a row.
  """
  fed: tuple[int, ...]
  speaks: np.ndarray      # bool[len(fed)]
  first: int              # how many rows the first process speaks for


def rows(mesh: Mesh, batch_size: int, key: str = 'input.batch_size') -> Rows:
  """Which rows of a global batch are this process's. Raises ConfigError if the mesh can't split it."""
  parts = mesh.shape['data'] * mesh.shape['fsdp']
  if batch_size % parts:
    raise ConfigError(f'config.{key} = {batch_size} is not a multiple of data x fsdp = {parts} devices')
  fed, speaker, us = set(), {}, jax.process_index()
  for device, (span,) in NamedSharding(mesh, BATCH).devices_indices_map((batch_size,)).items():
    for row in range(*span.indices(batch_size)):
      speaker[row] = min(process_of(device), speaker.get(row, process_of(device)))
      if process_of(device) == us:
        fed.add(row)
  fed = tuple(sorted(fed))
  return Rows(fed, np.array([speaker[r] == us for r in fed], bool), [*speaker.values()].count(0))


def process_of(device) -> int:
  """The number of the process that a device belongs to."""
  return device.process_index


def padded(mesh: Mesh, batch_size: int) -> int:
  """The smallest batch of at least this size that the mesh can split."""
  parts = mesh.shape['data'] * mesh.shape['fsdp']
  return -(-batch_size // parts) * parts


def place(mesh: Mesh, batch: Mapping[str, np.ndarray], batch_size: int) -> dict[str, jax.Array]:
  """This process's rows [rows, ...] -> global arrays [batch_size, ...], split over data and fsdp."""
  return _put(NamedSharding(mesh, BATCH), batch, (batch_size,))


def place_stacked(mesh: Mesh, batches: list[Mapping[str, np.ndarray]], batch_size: int
                  ) -> dict[str, jax.Array | np.ndarray]:
  """This process's rows of several batches -> global arrays [len(batches), batch_size, ...], each batch split.

  Where there is one device they stay on the host: a program that is called with them moves what it reads of them, in a
  fraction of the time.
  """
  n = len(batches)
  stacked = {k: np.stack([b[k] for b in batches]) if n > 1 else batches[0][k][None] for k in batches[0]}
  return stacked if mesh.size == 1 else _put(NamedSharding(mesh, MICRO), stacked, (n, batch_size))


def _put(sharding, arrays, first):
  """This process's parts of global arrays, whose first dimensions are `first`."""
  if sharding.is_fully_addressable:      # one call for all of them takes half the time of one for each
    return jax.device_put(arrays, sharding)
  return {k: jax.make_array_from_process_local_data(sharding, v, (*first, *v.shape[len(first):]))
          for k, v in arrays.items()}


def local(tree: Any) -> Any:
  """Global arrays [B, ...] split by batch -> this process's rows, as NumPy arrays."""
  def rows_of(x):
    if x.is_fully_addressable:
      return np.asarray(x)
    shards = {s.index[0].start or 0: s.data for s in x.addressable_shards}
    return np.concatenate([np.asarray(shards[k]) for k in sorted(shards)])
  return jax.tree.map(rows_of, tree)


def gather(items: Iterable[Any]) -> list[Any]:
  """JSON-able items of all processes, in process order, on every process."""
  items = list(items)
  if jax.process_count() == 1:
    return items
  from jax.experimental import multihost_utils
  peers.meet()
  data = np.frombuffer(json.dumps(items).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.array([data.size]))
  sent = np.zeros(int(sizes.max()), np.uint8)
  sent[:data.size] = data
  every = multihost_utils.process_allgather(sent)
  return [item for got, size in zip(every, sizes.ravel()) for item in json.loads(got[:int(size)].tobytes())]
