"""Checksums of arrays, wherever these are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from lab import checksums


def wanted(x):
  bits = np.asarray(x).view(f'u{x.dtype.itemsize}').astype(np.uint64).ravel()
  at = 2 * np.arange(bits.size, dtype=np.uint64) + 1
  return [int(bits.sum() % 2**32), int((bits * at).sum() % 2**32)]


def arrays():
  """Of NumPy, on the first device without having to stay there, split over eight, and on each of these."""
  mesh, x = jax.make_mesh((8,), ('data',)), np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
  places = {'split': NamedSharding(mesh, P('data')), 'everywhere': NamedSharding(mesh, P())}
  return {'numpy': x, 'loose': jnp.asarray(x), 'bfloat16': jnp.asarray(x, jnp.bfloat16), 'flags': jnp.asarray(x > 0),
          'number': jnp.int32(-7), **{k: jax.device_put(x, place) for k, place in places.items()}}


def test_sums_are_those_of_numpy_wherever_an_array_is():
  state = arrays()
  assert checksums.checksums(state) == {k: wanted(x) for k, x in state.items()}
  x = state['numpy']
  for other in (x + np.float32(1e-6) * (np.arange(96) == 5).reshape(16, 6), x[::-1]):
    assert checksums.checksums({'x': other})['x'] != wanted(x)


def test_a_program_a_kind_of_array_is_compiled_once(monkeypatch):
  compiled, single = [], checksums._programs()[0]

  class Counted:
    def lower(self, like):
      compiled.append((like.shape, like.dtype.name))
      return single.lower(like)
  monkeypatch.setattr(checksums, '_known', {})
  monkeypatch.setattr(checksums, '_programs', lambda: (Counted(), jax.jit(lambda *rows: jnp.stack(rows))))
  state = {f'{i}': jnp.full((3, 1 + i % 2), i, jnp.float32) for i in range(2 * checksums.PIECE)}
  for _ in range(2):
    assert checksums.checksums(state) == {k: wanted(x) for k, x in state.items()}
  assert compiled == [((3, 1), 'float32'), ((3, 2), 'float32')]      # in their order, which processes share


def test_a_program_that_cannot_be_compiled_is_no_checksum(monkeypatch):
  class Broken:
    def lower(self, like):
      raise RuntimeError('no space left for programs')
  monkeypatch.setattr(checksums, '_known', {})
  monkeypatch.setattr(checksums, '_programs', lambda: (Broken(), None))
  with pytest.raises(RuntimeError, match='no space'):
    checksums.checksums({'x': jnp.ones(3)})
  assert not checksums._known
