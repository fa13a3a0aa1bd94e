"""Losses against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import losses


def log_softmax(x):
  x = np.float64(x)
  return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


def test_cross_entropy_is_minus_the_label_s_log_probability():
  rng = np.random.default_rng(0)
  logits, labels = rng.normal(size=(2, 3, 7)).astype('f') * 3, rng.integers(7, size=(2, 3))
  expected = -np.take_along_axis(log_softmax(logits), labels[..., None], -1)[..., 0]
  np.testing.assert_allclose(losses.cross_entropy(logits, labels), expected, rtol=1e-5)


def test_cross_entropy_of_no_opinion_is_ln_v_and_float32_of_large_bfloat16_logits():
  assert np.allclose(losses.cross_entropy(jnp.zeros((1, 50)), jnp.array([3])), np.log(50))
  loss = losses.cross_entropy(jnp.array([[1e4, -1e4, 0]], jnp.bfloat16), jnp.array([1]))
  assert loss.dtype == jnp.float32
  np.testing.assert_allclose(loss, 2e4, rtol=1e-2)


def test_kl_softens_both_and_is_0_for_equals():
  rng = np.random.default_rng(1)
  teacher, student = rng.normal(size=(2, 4, 5)).astype('f')
  t, s = log_softmax(teacher / 2), log_softmax(student / 2)
  np.testing.assert_allclose(losses.kl(teacher, student, 2.0), (np.exp(t) * (t - s)).sum(-1), rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(losses.kl(teacher, teacher, 2.0), 0, atol=1e-7)
  # d KL / d student = (softmax(s / T) - softmax(t / T)) / T
  gradient = jax.grad(lambda s: losses.kl(jnp.array(teacher), s, 2.0).sum())(jnp.array(student))
  np.testing.assert_allclose(gradient, (np.exp(s) - np.exp(t)) / 2, atol=1e-6)


def test_kl_of_a_class_that_the_teacher_rules_out_is_finite():
  teacher, student = jnp.array([0.0, 0.0, -jnp.inf]), jnp.zeros(3)
  np.testing.assert_allclose(losses.kl(teacher, student, 1.0), np.log(1.5), rtol=1e-6)   # ln(1/2 / 1/3)
  assert np.isfinite(jax.grad(lambda s: losses.kl(teacher, s, 1.0))(student)).all()


@pytest.mark.parametrize('dtype, bound', [('float32', 1e-5), ('bfloat16', 2e-2)])
@pytest.mark.parametrize('biased', [False, True])
def test_a_projected_cross_entropy_has_the_values_and_gradients_of_the_plain_one(dtype, bound, biased):
  """Five classes and three rows that fill the matrix up; relative to the largest number of each gradient."""
  rng = np.random.default_rng(2)
  states, matrix, bias = (jnp.array(rng.normal(size=s), 'f') for s in ((2, 6, 16), (8, 16), (8,)))
  states, bias = states.astype(dtype), bias if biased else None
  labels, slope = jnp.array(rng.integers(5, size=(2, 6))), jnp.array(rng.normal(size=(2, 6)), 'f')

  def plain(states, matrix, bias):
    logits = states.astype('f') @ matrix[:5].astype(dtype).astype('f').T + (0 if bias is None else bias[None, None, :5])
    return (losses.cross_entropy(logits, labels) * slope).sum(), logits.argmax(-1) == labels

  def ours(states, matrix, bias):
    nats, right = losses.projected(states, matrix, bias, labels, 5)
    return (nats * slope).sum(), right
  which = (0, 1, 2) if biased else (0, 1)
  (a, hits), found = jax.value_and_grad(ours, which, has_aux=True)(states, matrix, bias)
  (b, wanted), expected = jax.value_and_grad(plain, which, has_aux=True)(states, matrix, bias)
  assert (hits == wanted).all() and found[1].dtype == jnp.float32 and found[0].dtype == states.dtype
  np.testing.assert_allclose(a, b, rtol=bound, atol=bound)
  for x, y in zip(found, expected):
    np.testing.assert_allclose(np.float32(x), np.float32(y), atol=bound * float(jnp.abs(y).max()))
  assert not np.asarray(found[1])[5:].any()


def test_of_equal_logits_the_first_counts_as_the_largest():
  nats, right = losses.projected(jnp.ones((3, 2)), jnp.ones((4, 2)), None, jnp.array([0, 1, 2]), 3)
  np.testing.assert_allclose(nats, np.log(3), rtol=1e-6)
  assert right.tolist() == [True, False, False]
