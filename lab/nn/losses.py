"""Losses of categorical predictions, in nats, always computed in float32."""

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """-log softmax(logits)[label]: logits [..., V], labels i32[...] in 0..V-1 -> f32[...] nats."""
  logits = logits.astype(jnp.float32)
  picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  return jax.nn.logsumexp(logits, -1) - picked


def kl(teacher_logits: jax.Array, student_logits: jax.Array, temperature: float) -> jax.Array:
  """KL(teacher || student), both softened: softmax(logits / temperature) (Hinton et al. 2015, arXiv 1503.02531).

  [..., V] and [..., V] -> f32[...] nats. For gradients that keep their size multiply by temperature^2 (section 2).
  """
  teacher = jax.nn.log_softmax(teacher_logits.astype(jnp.float32) / temperature)
  student = jax.nn.log_softmax(student_logits.astype(jnp.float32) / temperature)
  # a class that the teacher rules out (log 0) adds 0, not 0 times infinity
  return jnp.sum(jnp.where(teacher > -jnp.inf, jnp.exp(teacher) * (teacher - student), 0), -1)
