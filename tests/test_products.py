"""Products with cheap gradients against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import products


def draw(seed, *shapes, dtype='f'):
  rng = np.random.default_rng(seed)
  return [jnp.array(rng.normal(size=s), dtype) for s in shapes]


@pytest.mark.parametrize('rule, a, b', [
    ('bshd,bthd->bhst', (2, 3, 4, 5), (2, 6, 4, 5)), ('brld,vd->brlv', (2, 3, 4, 5), (7, 5)),
    ('brld,bvd->brlv', (2, 3, 4, 5), (2, 7, 5))])
def test_a_contraction_has_the_gradient_of_einsum(rule, a, b):
  factors = draw(0, a, b)
  run = lambda f: jax.grad(lambda *x: jnp.sin(f(rule, *x)).sum(), (0, 1))(*factors)
  for x, y in zip(run(products.contract), run(jnp.einsum)):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_a_contraction_of_bfloat16_is_float32_and_multiplies_nothing_in_float32():
  a, b = draw(1, (2, 3, 5), (7, 5), dtype=jnp.bfloat16)
  run = lambda a, b: jnp.sin(products.contract('brd,vd->brv', a, b)).sum()
  assert products.contract('brd,vd->brv', a, b).dtype == jnp.float32
  text = str(jax.make_jaxpr(jax.grad(run, (0, 1)))(a, b))
  factors = [line for line in text.splitlines() if 'dot_general' in line]
  assert len(factors) == 3 and [x.dtype for x in jax.grad(run, (0, 1))(a, b)] == [jnp.bfloat16] * 2
  wide = jax.grad(run, (0, 1))(a.astype('f'), b.astype('f'))
  for x, y in zip(jax.grad(run, (0, 1))(a, b), wide):
    np.testing.assert_allclose(x.astype('f'), y, atol=.03 * float(jnp.abs(y).max()))


@pytest.mark.parametrize('platform, small, multiplies', [('cpu', 100, False), ('tpu', 100, True), ('cuda', 100, True),
                                                         ('tpu', 0, False)])
def test_the_gradient_of_a_lookup_adds_what_each_row_got(monkeypatch, platform, small, multiplies):
  """By a product for a small table, row by row for a large one and on a CPU: by where it will run."""
  monkeypatch.setattr(products, 'SMALL', small)
  table, = draw(2, (7, 5))
  ids = jnp.array(np.random.default_rng(3).integers(7, size=(3, 4)))
  gradient = lambda f: jax.grad(lambda t: jnp.sin(f(t)).sum())
  traced = jax.jit(gradient(lambda t: products.lookup(t, ids))).trace(table)
  text = traced.lower(lowering_platforms=(platform,)).as_text()
  assert ('scatter' in text) == (not multiplies) and ('dot_general' in text) == multiplies
  wanted = gradient(lambda t: t[ids])(table)
  np.testing.assert_allclose(gradient(lambda t: products.lookup(t, ids))(table), wanted, rtol=1e-5, atol=1e-6)
  slope = jnp.cos(table[ids]).reshape(-1, 5)
  for way in (products._added, products._multiplied):
    np.testing.assert_allclose(way(ids.reshape(-1), slope, rows=7), wanted, rtol=1e-5, atol=1e-6)


def test_gradients_of_a_shared_factor_are_summed_with_the_last_first():
  x, factors = jnp.ones((2, 3)), (2.0, 3.0, 5.0)
  slope = jax.grad(lambda x: sum(factor * part.sum() for factor, part in zip(factors, products.shared(x, 3))))(x)
  np.testing.assert_array_equal(slope, np.full((2, 3), 10.0))
  made = jax.make_jaxpr(lambda *slopes: products._shared_backward(3, None, slopes))(1.0, 2.0, 3.0).jaxpr
  first, second = made.eqns
  assert first.invars == made.invars[1::-1] and second.invars == [made.invars[2], first.outvars[0]]


def test_the_gradient_of_a_split_table_is_summed_and_no_device_gathers_the_batch():
  mesh = jax.make_mesh((1, 8, 1), ('data', 'fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 3)
  table, ids = jnp.asarray(np.random.default_rng(0).normal(size=(512, 6)), jnp.float32), jnp.arange(8 * 72) % 99
  loss = lambda table, ids: jnp.square(products.lookup(table, ids.reshape(8, 72))).sum()
  expected = jax.grad(loss)(table, ids)
  for small in (products.SMALL, 0):
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
      patch.setattr(products, 'SMALL', small)
      patch.setattr(jax.lax, 'platform_dependent', lambda *args, cpu, default: default(*args))      # a product
      split = lambda x: jax.NamedSharding(mesh, jax.P('fsdp', *[None] * (x.ndim - 1)))
      step = jax.jit(jax.grad(loss), in_shardings=(split(table), split(ids)), out_shardings=split(table))
      text = step.lower(table, ids).compile().as_text()
      np.testing.assert_allclose(step(table, ids), expected, rtol=1e-6)
    assert 'f32[576,6]' not in text and 'f32[8,72,6]' not in text and 'all-reduce' in text and 'all-gather' in text
