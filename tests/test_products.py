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


@pytest.mark.parametrize('small', [0, 100])
def test_the_gradient_of_a_lookup_adds_what_each_row_got(monkeypatch, small):
  """By a product for a small table, row by row for a large one, and on a CPU."""
  monkeypatch.setattr(products, 'SMALL', small)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  table, = draw(2, (7, 5))
  ids = jnp.array(np.random.default_rng(3).integers(7, size=(3, 4)))
  run = lambda f: jax.grad(lambda t: jnp.sin(f(t)).sum())(table)
  np.testing.assert_allclose(run(lambda t: products.lookup(t, ids)), run(lambda t: t[ids]), rtol=1e-5, atol=1e-6)
  text = str(jax.make_jaxpr(jax.grad(lambda t: products.lookup(t, ids).sum()))(table))
  assert ('scatter' in text) == (not small) and ('dot_general' in text) == bool(small)
