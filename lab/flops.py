"""Model FLOPs of a step and peak FLOP/s of a device; their ratio over time is MFU (PaLM, arXiv 2204.02311, appendix B).

  MFU = training(loss, ...) * steps a second / (peak(device_kind) * devices)
Counted on the traced program: before any partitioning, so for all devices together, and without any device.
"""

import math
import re
from typing import Any, Callable

import jax
from jax.extend.core import jaxprs_in_params

# (names as in jax.Device.device_kind, dense FLOP/s in bf16 with f32 sums); NVIDIA's tables often tell twice as much,
# which holds for sparse matrices
PEAKS = (
    (r'NVIDIA H100 80GB HBM3', 989e12),             # SXM; nvidia.com/en-us/data-center/h100
    (r'NVIDIA H100 PCIe', 756e12),                  # same page, before NVL took its column
    (r'NVIDIA H200', 989e12),                       # SXM; nvidia.com/en-us/data-center/h200
    (r'NVIDIA A100[- ](SXM\d?-|PCIE-)?(40|80)GB( PCIe)?', 312e12),    # nvidia.com/en-us/data-center/a100
    (r'Tesla V100-SXM\d-(16|32)GB(-LS)?', 125e12),  # fp16, it has no bf16; nvidia.com/en-us/data-center/v100
    (r'Tesla V100-PCIE-(16|32)GB', 112e12),         # fp16; same page
    (r'NVIDIA L40S', 362e12),                       # nvidia.com/en-us/data-center/l40s
    (r'NVIDIA L4', 121e12),                         # nvidia.com/en-us/data-center/l4
    (r'NVIDIA A10', 125e12),                        # nvidia.com/en-us/data-center/products/a10-gpu; A10G is another
    (r'NVIDIA GeForce RTX 4090', 165e12),           # Ada architecture whitepaper, appendix A
    (r'TPU v3', 61.5e12),                           # 123 a chip of two devices; cloud.google.com/tpu/docs/v3
    (r'TPU v4', 275e12),                            # cloud.google.com/tpu/docs/v4
    (r'TPU v5 ?lite|TPU v5e', 197e12),              # cloud.google.com/tpu/docs/v5e
    (r'TPU v5p?', 459e12),                          # cloud.google.com/tpu/docs/v5p
    (r'TPU v6 ?lite|TPU v6e', 918e12),              # cloud.google.com/tpu/docs/v6e
)


def peak(device_kind: str) -> float:
  """Peak FLOP/s of one device by its jax.Device.device_kind, dense, bf16; 0.0 if unknown: then there is no MFU.

  The whole name must match: a slice of a GPU ('... MIG 1g.5gb') or a laptop's variant is not the device that it is
  named after.
  """
  return next((value for names, value in PEAKS if re.fullmatch(names, device_kind)), 0.0)


def training(function: Callable, *abstract_args: Any) -> float:
  """Model FLOPs of one training step whose loss is `function`: three times forward.

  The backward pass does each product twice, once for the gradient of either factor. Recomputation (remat) does not
  count: it is the machine's work, not the model's, which is what sets MFU apart from hardware utilisation.
  """
  return 3 * forward(function, *abstract_args)


def forward(function: Callable, *abstract_args: Any) -> float:
  """FLOPs, two a multiply-add, of the matrix products and convolutions of function(*abstract_args).

  The arguments are trees of arrays or jax.ShapeDtypeStructs. Elementwise work is left out, as is usual. A scan counts
  its body times its length, a cond its dearest branch, a while loop one turn, since nobody knows how many it takes.
  Attention counts in full, whatever a mask hides of it, and so does a convolution's padding. Kernels written by hand
  (Pallas) count their body once; library calls behind a primitive of their own (cuDNN attention) count nothing.
  """
  # a function of its own, for JAX remembers what it traced, and what is counted may be traced in another way
  return float(_total(jax.make_jaxpr(lambda *args: function(*args))(*abstract_args).jaxpr))


def _total(jaxpr) -> int:
  return sum(_cost(eqn) for eqn in jaxpr.eqns)


def _cost(eqn) -> int:
  name, params = eqn.primitive.name, eqn.params
  if name == 'dot_general':
    (contracted, _), _ = params['dimension_numbers']
    left = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
  if name == 'conv_general_dilated':
    return _convolution(eqn)
  inside = [_total(j) for j in jaxprs_in_params(params)]
  if name == 'cond':
    return max(inside)
  if name == 'scan':
    return sum(inside) * params['length']
  if name == 'shard_map':
    return sum(inside) * _shards(params)
  return sum(inside)


def _convolution(eqn) -> int:
  """Output elements x kernel elements that meet in one; for a transposed convolution, input elements x kernel elements.

  In the latter (lhs_dilation) the output also meets the zeros between the inputs, which are no work. The count is exact
  but for the edges: padding counts as input, and what a transposed convolution computes and cuts off counts as well.
  """
  left, kernel = (v.aval.shape for v in eqn.invars)
  p = eqn.params
  filters = p['dimension_numbers'].rhs_spec[0]       # axis of the output features; the input features are a group's
  if math.prod(p['lhs_dilation']) == 1:
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // kernel[filters]
  taps = math.prod(n for i, n in enumerate(kernel) if i != p['dimension_numbers'].rhs_spec[1])
  groups = p['feature_group_count'] * p['batch_group_count']
  return 2 * math.prod(left) * taps // (groups * math.prod(p['window_strides']))


def _shards(params) -> int:
  """Devices over which a shard_map splits any of its inputs; along the other axes all do the same work."""
  axes = {name for spec in params['in_specs'] for entry in spec
          for name in ((entry,) if isinstance(entry, str) else entry or ())}
  return math.prod(params['mesh'].shape[name] for name in axes)
