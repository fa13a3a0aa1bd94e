"""Checksums of arrays: what a checkpoint says of its contents, and one hash of a whole state."""

import functools
import hashlib
import json
from typing import Any, Mapping

import jax
import jax.numpy as jnp

from lab import programs
from lab.sharding import paths

PIECE = 64      # arrays whose sums come from the device in one


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
def _programs():
  """(array -> its sums, PIECE of these -> one array)."""
  return tuple(jax.jit(f, compiler_options=programs.options()) for f in (_sums, lambda *rows: jnp.stack(rows)))


def checksums(state: Any) -> dict[str, list[int]]:
  """path -> two numbers that change with any single changed bit of the array and with any swap.

  By a program of each kind of array, for a network has a thousand arrays of thirty kinds, and one program of them all
  takes long to compile. What they give is brought together first: each copy from a device takes its time.
  """
  single, together = _programs()
  named = list(paths(state))
  sums = [single(x) for _, x in named]
  pieces = [sums[i:i + PIECE] for i in range(0, len(sums), PIECE)]
  rows = jax.device_get([together(*piece, *[piece[0]] * (PIECE - len(piece))) for piece in pieces])
  return {path: [int(v) for v in row] for (path, _), row in zip(named, (row for piece in rows for row in piece))}


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


def below(head: str, arrays: Mapping[str, list]) -> dict[str, list]:
  """The descriptions of the arrays under a path, by the rest of their paths."""
  return {p[len(head) + 1:]: a for p, a in arrays.items() if p.startswith(head + '/')}
