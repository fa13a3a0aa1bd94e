"""Checksums of arrays: what a checkpoint says of its contents, and one hash of a whole state."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent import futures
from typing import Any, Mapping

import jax
import jax.numpy as jnp

from lab import programs
from lab.sharding import paths

PIECE = 64      # arrays whose sums come from the device in one
_known: dict[tuple, Callable] = {}


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


def _kind(x) -> tuple:
  """(shape, type, sharding); the last is None of arrays of NumPy, and of those that go where others are."""
  return x.shape, x.dtype, x.sharding if getattr(x, 'committed', False) else None


def _compiled(kinds: Iterable[tuple]) -> dict[tuple, Callable]:
  """The program of each kind of array; new ones are compiled side by side.

  In the order in which they come, for processes compile parts of a program for each other, and wait for these.
  """
  new = [kind for kind in dict.fromkeys(kinds) if kind not in _known]
  if new:
    single = _programs()[0]
    with futures.ThreadPoolExecutor(min(len(new), os.cpu_count() or 1)) as pool:
      begun = [pool.submit(single.lower(jax.ShapeDtypeStruct(*kind[:2], sharding=kind[2])).compile) for kind in new]
    _known.update(zip(new, [each.result() for each in begun]))
  return _known


def checksums(state: Any) -> dict[str, list[int]]:
  """path -> two numbers that change with any single changed bit of the array and with any swap.

  By a program of each kind of array, for a network has a thousand arrays of thirty kinds, and one program of them all
  takes long to compile. What they give is brought together first: each copy from a device takes its time.
  """
  named = [(path, x, _kind(x)) for path, x in paths(state)]
  single, together = _compiled(kind for *_, kind in named), _programs()[1]
  sums = [single[kind](x) for _, x, kind in named]
  pieces = [sums[i:i + PIECE] for i in range(0, len(sums), PIECE)]
  rows = jax.device_get([together(*piece, *[piece[0]] * (PIECE - len(piece))) for piece in pieces])
  return {path: [int(v) for v in row] for (path, *_), row in zip(named, (row for piece in rows for row in piece))}


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
