"""An LSTM's step: its gradient by hand, and the kernel of that, run step by step on the CPU; where it is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import kernels
from lab.systems.video import lstm
from tests.test_kernels import gpu, lowered, mesh      # noqa: F401 (a fixture)

# rows and features: less than a tile, no whole number of tiles each way, a map of 2 x 3 cells
SHAPES = {'few': (3, 7), 'odd': (37, 200), 'map': (2, 2, 3, 5)}


def draw(shape, dtype=jnp.float32, peepholes=True, scale=1.0):
  rng = np.random.default_rng(0)
  normal = lambda *size: jnp.asarray(rng.normal(0, scale, size), jnp.float32)
  *lead, width = shape
  shared = (normal(3, width),) * peepholes
  return (normal(*shape), normal(*lead, 4 * width).astype(dtype), normal(*shape), normal(*shape)), shared


def derived(peepholes, c, gates, to_h, to_c):
  """By JAX's own derivative, of the step without its custom one."""
  def plain(c, gates, *vectors):
    return lstm.step.__wrapped__(vectors[0] if vectors else None, c, gates)
  back = jax.vjp(plain, c, gates, *peepholes)[1]
  return back((to_h, to_c))


def near(got, wanted, bound):
  for a, b in zip(got, wanted, strict=True):
    assert a.shape == b.shape and np.linalg.norm(np.float32(a) - np.float32(b)) <= bound * np.linalg.norm(np.float32(b))


@pytest.mark.parametrize('peepholes', [False, True])
@pytest.mark.parametrize('shape', SHAPES)
def test_the_gradient_by_hand_and_the_kernel_are_jax_s_own(shape, peepholes, monkeypatch):
  monkeypatch.setattr(kernels, 'PROGRAMS', 4)      # so that a program has several tiles
  rows, shared = draw(SHAPES[shape], peepholes=peepholes)
  wanted = derived(shared, *rows)
  near(lstm._plain_gradient(*rows, *shared), wanted, 1e-6)
  *arrays, shares = lstm.gradient(*rows, *shared, interpret=True) if peepholes else (
      *lstm.gradient(*rows, interpret=True), None)
  near((*arrays, *([shares.sum(0)] if peepholes else [])), wanted, 1e-6)
  near(jax.vjp(lambda c, gates: lstm.step(*(shared or (None,)), c, gates), *rows[:2])[1](rows[2:]), wanted[:2], 1e-6)


def test_gates_of_half_precision_have_such_a_gradient_and_are_computed_with_in_float32():
  rows, shared = draw(SHAPES['odd'], jnp.bfloat16)
  to_c, to_gates, shares = lstm.gradient(*rows, *shared, interpret=True)
  assert to_gates.dtype == jnp.bfloat16 and to_c.dtype == shares.dtype == jnp.float32
  exact = derived(shared, rows[0], rows[1].astype(jnp.float32), *rows[2:])
  near((to_c, shares.sum(0)), (exact[0], exact[2]), 1e-6)
  near((to_gates,), (exact[1],), 3e-3)


@pytest.mark.parametrize('scale', [0.1, 1e-2, 1e-4])
def test_near_zero_no_digits_are_lost(scale):
  rows, shared = draw(SHAPES['odd'], scale=scale)
  wanted = derived(shared, *rows)
  *arrays, shares = lstm.gradient(*rows, *shared, interpret=True)
  near((*arrays, shares.sum(0)), wanted, 2e-6)
  near(lstm._plain_gradient(*rows, *shared), wanted, 1e-6)


def test_far_gates_have_no_gradient_and_nothing_is_nan():
  rows, shared = draw(SHAPES['few'], scale=1e3)
  for found in (lstm._plain_gradient(*rows, *shared), lstm.gradient(*rows, *shared, interpret=True)):
    assert all(np.isfinite(x).all() for x in found)


def test_a_gpu_takes_the_kernel_of_two_heads_at_once_too(gpu):      # noqa: F811
  rows, (vectors,) = draw((16, 128), jnp.bfloat16)

  def loss(vectors, c, gates):
    h, c = lstm.step(vectors, c, gates)
    return (h * rows[2] + c * rows[3]).sum()
  turn = jax.grad(loss, (0, 1, 2))
  made = turn(vectors, *rows[:2])
  assert [name for name, _ in gpu] == ['lstm_gradient']
  both = jax.jit(jax.vmap(turn))(*(jnp.stack([x, 0 * x]) for x in (vectors, *rows[:2])))
  assert [name for name, _ in gpu] == ['lstm_gradient'] * 2
  near([x[0] for x in both], made, 1e-6)


@pytest.mark.parametrize('width, peepholes', [(2048, True), (129, False)])
def test_the_kernel_compiles_for_a_gpu_as_far_as_that_goes_without_one(width, peepholes):
  cell, gates = ((2, 512, width), jnp.float32), ((2, 512, 4 * width), jnp.bfloat16)
  vectors = [((2, 3, width), jnp.float32)] * peepholes
  assert lowered(jax.vmap(lstm.gradient), cell, gates, cell, cell, *vectors).count('__gpu$xla.gpu.triton') == 1


def test_devices_of_a_mesh_work_on_their_own_rows(gpu):      # noqa: F811
  rows, (vectors,) = draw((8, 16))
  turn = lambda *x: jax.vjp(lstm.step, *x)[1](rows[2:])
  wanted = turn(vectors, *rows[:2])
  gpu.clear()
  with jax.set_mesh(mesh(2, 2, 1)):
    near(jax.jit(turn)(vectors, *rows[:2]), wanted, 1e-6)
  assert gpu == [('lstm_gradient', 2)]
