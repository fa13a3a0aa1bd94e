"""Gradients of one update, over one or several micro-batches: exactly the gradient of the batch they make together.

A loss is a sum of ratios, sum_k total_k / weight_k (masked pixels, tokens, examples). The mean of the micro-batches'
means would weigh an item of a sparse micro-batch too high; here every item is divided by the weight of all of them.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp

from lab.metrics import objective
from lab.task import Batch, Key, Loss, Params, Stats, Step, Sums


def count(o, step: int) -> int:
  """Micro-batches of the update made at `step`."""
  return o.accumulate if step >= o.accumulate_from else 1


def before(o, step: int) -> int:
  """Micro-batches of all updates before `step`: the position in the data."""
  return step + max(step - o.accumulate_from, 0) * (o.accumulate - 1)


def gradients(loss: Callable, params: Params, stats: Stats, batches: Batch, key: Key, step: Step
              ) -> tuple[Loss, Any, Stats, Sums]:
  """Loss, its gradient, new stats and sums for batches with leaves [micro-batches, B, ...].

  Stats are averages, so those of an update are the mean of what each micro-batch makes of the old ones. A single
  micro-batch uses `key` itself.
  """
  n = jax.tree.leaves(batches)[0].shape[0]

  def part(params, batch, key, weights):
    terms, (new, sums) = loss(params, stats, batch, key, step)
    terms = {k: (t, jax.lax.stop_gradient(w) if weights is None else weights[k]) for k, (t, w) in terms.items()}
    return objective(terms), (new, sums)
  slope = jax.value_and_grad(part, has_aux=True)
  if n == 1:
    (value, (new, sums)), grads = slope(params, jax.tree.map(lambda x: x[0], batches), key, None)
    return value, grads, new, sums

  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))
  # The weights come first. Only they leave this scan, so the compiler drops the network from it.
  weights = jax.lax.map(lambda x: {k: w for k, (_, w) in loss(params, stats, x[0], x[1], step)[0].items()},
                        (batches, keys))
  weights = jax.tree.map(lambda w: jax.lax.stop_gradient(w.sum(0)), weights)

  def add(carry, x):
    (value, (new, sums)), grads = slope(params, *x, weights)
    return jax.tree.map(jnp.add, carry, (value, grads, sums, new)), None
  like = jax.eval_shape(lambda b, k: slope(params, b, k, weights), *jax.tree.map(lambda x: x[0], (batches, keys)))
  (value, (new, sums)), grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
  (value, grads, sums, new), _ = jax.lax.scan(add, (value, grads, sums, new), (batches, keys))
  return value, grads, jax.tree.map(lambda x: (x / n).astype(x.dtype), new), sums
