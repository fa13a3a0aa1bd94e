"""Checksums of arrays: what a checkpoint says of its contents, and one hash of a whole state."""

import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp

from lab import programs
from lab.sharding import paths


@jax.jit      # traced once of each shape: a network has a thousand arrays of thirty
def _sums(x):
  """Two wrapping u32 sums of an array's bits, one of them weighted by position: exact on any sharding."""
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f'uint{8 * x.dtype.itemsize}')).astype(jnp.uint32)
  at, stride = jnp.zeros(x.shape, jnp.uint32), 1
  for axis in reversed(range(x.ndim)):
    at += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % (1 << 32))
    stride *= x.shape[axis]
  return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(bits * (2 * at + 1), dtype=jnp.uint32)])


@functools.cache
def _program():
  return jax.jit(lambda tree: jax.tree.map(_sums, tree), compiler_options=programs.options())


def checksums(state: Any) -> dict[str, list[int]]:
  """path -> two numbers that change with any single changed bit of the array and with any swap."""
  return {p: [int(v) for v in s] for p, s in paths(jax.device_get(_program()(state)))}


def digest(state: Any) -> str:
  """One hash over names, types, shapes and contents of all arrays: equal digests are equal states."""
  return hashlib.sha256(json.dumps(described(state), sort_keys=True).encode()).hexdigest()[:16]


def shape(x) -> list:
  """[type, shape] of an array, as a description has them."""
  return [x.dtype.name, list(x.shape)]


def described(state: Any) -> dict[str, list]:
  """path -> [type, shape, checksum] of every array."""
  sums = checksums(state)
  return {p: [*shape(x), sums[p]] for p, x in paths(state)}
