"""Losses against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np

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
