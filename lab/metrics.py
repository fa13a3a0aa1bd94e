"""Metrics are masked (total, weight) pairs: they add over batches, devices and processes without loss."""

import dataclasses
from typing import Mapping

import jax
import jax.numpy as jnp
import numpy as np


def objective(terms: Mapping[str, tuple[jax.Array, jax.Array]]) -> jax.Array:
  """The loss f32[] of its terms: the sum of total / weight. A term without any weight is 0, and so is its gradient."""
  return sum((jnp.where(w > 0, t / jnp.where(w > 0, w, 1), 0) for t, w in terms.values()), jnp.float32(0))


def ratios(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
  """name -> total / weight; a metric without any weight is left out, for it has no value."""
  return {k: float(total) / float(weight) for k, (total, weight) in totals.items() if weight != 0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Packed:
  """Sums as one array: a system may have a hundred, and each array costs a copy from the device."""
  values: jax.Array      # f32[K, 2]: total and weight
  names: tuple[str, ...] = dataclasses.field(metadata={'static': True})

  def unpacked(self) -> dict[str, tuple[np.float32, np.float32]]:
    """name -> (total, weight), on the host."""
    return dict(zip(self.names, map(tuple, np.asarray(self.values))))


def packed(sums: Mapping[str, tuple[jax.Array, jax.Array]]) -> Packed:
  """The sums as one array, in the order of their names."""
  values = jnp.stack([jnp.asarray(x, jnp.float32) for _, pair in sorted(sums.items()) for x in pair])
  return Packed(values.reshape(-1, 2), tuple(sorted(sums)))


def merge(totals: Mapping[str, tuple[float, float]], sums: Mapping[str, tuple]) -> dict[str, tuple[float, float]]:
  """Adds a batch's sums to the totals, in float64 on the host."""
  out = dict(totals)
  for k, (total, weight) in sums.items():
    t, w = out.get(k, (0.0, 0.0))
    out[k] = t + float(np.float64(total)), w + float(np.float64(weight))
  return out
