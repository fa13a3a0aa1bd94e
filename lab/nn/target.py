"""What a traced program is compiled for: the devices of the mesh that is set, which may be elsewhere, or those here."""

import jax


def platform() -> str:
  """cpu, gpu or tpu."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device is not None else jax.default_backend()


def nvidia() -> bool:
  """Whether it is an NVIDIA GPU of compute capability 8.0 or more, as those of lab/topology.py are."""
  if platform() != 'gpu':
    return False
  if jax.default_backend() != 'gpu':
    return True
  major = getattr(jax.devices()[0], 'compute_capability', '').split('.')[0]     # AMD's have names: gfx942
  return major.isdigit() and int(major) >= 8
