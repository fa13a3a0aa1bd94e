"""What a traced program is compiled for: the devices of the mesh that is set, which may be elsewhere, or those here."""

import jax


def platform() -> str:
  """cpu, gpu or tpu."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device is not None else jax.default_backend()


def nvidia() -> bool:
  """Whether it is an NVIDIA GPU of compute capability 8.0 or more, as those of lab/topology.py are."""
  return platform() == 'gpu' and (_capability() or (0, 0)) >= (8, 0)


def hopper() -> bool:
  """Whether it is one of compute capability 9.0."""
  return platform() == 'gpu' and _capability() == (9, 0)


def shared_memory() -> int:
  """Bytes of it that a program on an NVIDIA GPU can have (CUDA C++ Programming Guide, compute capabilities)."""
  return {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}.get(_capability(), 99) << 10


def _capability() -> tuple[int, int] | None:
  """Of the GPU; that of an H100 where it is elsewhere, None where it has none: AMD's have names, such as gfx942."""
  if jax.default_backend() != 'gpu':
    return 9, 0
  major, _, minor = getattr(jax.devices()[0], 'compute_capability', '').partition('.')
  return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
