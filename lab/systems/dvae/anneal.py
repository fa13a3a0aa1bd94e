"""Values that change while training: pure functions of the update."""

import jax
import jax.numpy as jnp

KINDS = ('constant', 'linear', 'cosine', 'exponential', 'threshold')


def value(section, step: jax.Array | int) -> jax.Array:
  """f32[] at an update: `start` until `delay`, then to `end` in `steps` updates, and `end` from there on.

  With s the share of the way: linear start + (end - start) s; cosine start + (end - start) (1 - cos pi s) / 2;
  exponential start^(1 - s) end^s; threshold start until s = 1; constant end.
  """
  start, end = section.start, section.end
  s = jnp.clip((jnp.asarray(step, jnp.float32) - section.delay) / max(section.steps, 1), 0, 1)
  return {
      'constant': lambda: jnp.full_like(s, end),
      'linear': lambda: start + (end - start) * s,
      'cosine': lambda: start + (end - start) * (1 - jnp.cos(jnp.pi * s)) / 2,
      'exponential': lambda: start ** (1 - s) * end ** s,
      'threshold': lambda: jnp.where(s < 1, start, end).astype(jnp.float32),
  }[section.kind]()
