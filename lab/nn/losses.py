"""Losses of categorical predictions, in nats, always computed in float32."""

import functools

import jax
import jax.numpy as jnp

from lab.nn import kernels


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  """-log softmax(logits)[label]: logits [..., V], labels i32[...] in 0..V-1 (not checked) -> f32[...] nats."""
  logits = logits.astype(jnp.float32)
  # chosen by comparison, for the gradient of a gather is a scatter
  one = jax.lax.broadcasted_iota(jnp.int32, (1,) * labels.ndim + logits.shape[-1:], labels.ndim)
  picked = jnp.where(one == labels[..., None], logits, 0).sum(-1)
  return jax.nn.logsumexp(logits, -1) - picked


def projected(states: jax.Array, matrix: jax.Array, bias: jax.Array | None, labels: jax.Array, classes: int
              ) -> tuple[jax.Array, jax.Array]:
  """cross_entropy of logits = states matrix^T + bias, and whether the label's is the largest, without f32[..., V].

  Of a large vocabulary the logits are most of a step's memory and traffic. Here they are rounded to the dtype of the
  states and read twice; so is their gradient. Sums, both losses and the gradients of matrix and bias are float32.

  Args:
    states: [..., D], in the dtype of the products.
    matrix: f32[V, D].
    bias: f32[V], or None.
    labels: i32[...] in 0..classes - 1.
    classes: rows of the matrix that can be meant; those behind fill it up.

  Returns:
    (nats f32[...], bool[...]); of equal logits, and rounding makes many, the first is the largest, as argmax has it.
  """
  lead = states.shape[:-1]
  nats, right = _projected(states.reshape(-1, states.shape[-1]), matrix, bias, labels.reshape(-1), classes)
  return nats.reshape(lead), right.reshape(lead)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _projected(states, matrix, bias, labels, classes):
  return _projected_forward(states, matrix, bias, labels, classes)[0]


def _projected_forward(states, matrix, bias, labels, classes):
  logits = jnp.einsum('nd,vd->nv', states, matrix.astype(states.dtype))
  if bias is not None:
    logits = logits + bias.astype(logits.dtype)[None]
  total, picked, right = kernels.choose(
      functools.partial(_label_statistics, classes=classes),
      functools.partial(kernels.label_statistics, classes=classes), (logits, labels))
  return (total - picked, right), (states, matrix, bias, labels, logits, total)


def _label_statistics(logits, labels, *, classes):
  """As kernels.label_statistics."""
  one = jnp.arange(logits.shape[1])[None]
  wide = jnp.where(one < classes, logits.astype(jnp.float32), jnp.finfo(jnp.float32).min)
  most = wide.max(-1)
  total = most + jnp.log(jnp.exp(wide - most[:, None]).sum(-1))
  picked = jnp.where((one == labels[:, None]) & (one < classes), wide, 0).sum(-1)
  earlier = ((wide == most[:, None]) & (one < labels[:, None])).any(-1)
  return total, picked, (picked >= most) & ~earlier & (labels >= 0) & (labels < classes)


def _projected_backward(classes, kept, slopes):
  states, matrix, bias, labels, logits, total = kept
  wrong, = kernels.choose(
      lambda *given: (_label_gradient(*given, classes=classes),),
      lambda *given: (kernels.label_gradient(*given, classes=classes),), (logits, labels, total, slopes[0]))
  to_states = jnp.einsum('nv,vd->nd', wrong, matrix.astype(states.dtype))
  to_matrix = jnp.einsum('nv,nd->vd', wrong, states, preferred_element_type=jnp.float32)
  return to_states, to_matrix, None if bias is None else wrong.astype(jnp.float32).sum(0), None


def _label_gradient(logits, labels, total, slope, *, classes):
  """As kernels.label_gradient."""
  one = jnp.arange(logits.shape[1])[None]
  chance = jnp.where(one < classes, jnp.exp(logits.astype(jnp.float32) - total[:, None]), 0)
  return (jnp.where(one == labels[:, None], chance - 1, chance) * slope[:, None]).astype(logits.dtype)


_projected.defvjp(_projected_forward, _projected_backward)


def kl(teacher_logits: jax.Array, student_logits: jax.Array, temperature: float) -> jax.Array:
  """KL(teacher || student), both softened: softmax(logits / temperature) (Hinton et al. 2015, arXiv 1503.02531).

  [..., V] and [..., V] -> f32[...] nats. For gradients that keep their size multiply by temperature^2 (section 2).
  """
  teacher = jax.nn.log_softmax(teacher_logits.astype(jnp.float32) / temperature)
  student = jax.nn.log_softmax(student_logits.astype(jnp.float32) / temperature)
  # a class that the teacher rules out (log 0) adds 0, not 0 times infinity
  return jnp.sum(jnp.where(teacher > -jnp.inf, jnp.exp(teacher) * (teacher - student), 0), -1)
