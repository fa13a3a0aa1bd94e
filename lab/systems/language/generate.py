"""Text that goes on: tokens drawn one after another, with keys and values of those before kept."""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp


class Options(NamedTuple):
  """How a token is drawn from logits."""
  temperature: float     # 0: the likeliest
  top_k: int             # among so many; 0: all
  top_p: float           # among the likeliest that together have this probability (Holtzman et al. 2019, 1904.09751)


def draw(logits: jax.Array, key: jax.Array, options: Options) -> jax.Array:
  """f32[B, V] -> i32[B]: an id a row."""
  if options.temperature == 0:
    return logits.argmax(-1).astype(jnp.int32)
  return jax.random.categorical(key, allowed(logits / options.temperature, options)).astype(jnp.int32)


def allowed(logits: jax.Array, options: Options) -> jax.Array:
  """Logits f32[B, V] with -inf where top_k or top_p leave an id out; the likeliest always stays."""
  falling = -jnp.sort(-logits, -1)
  if options.top_k:
    floor = falling[:, min(options.top_k, logits.shape[-1]) - 1]
    logits = jnp.where(logits < floor[:, None], -jnp.inf, logits)
    falling = jnp.where(jnp.arange(logits.shape[-1])[None] < options.top_k, falling, -jnp.inf)
  if options.top_p < 1:
    chance = jax.nn.softmax(falling, -1)
    kept = chance.cumsum(-1) - chance < options.top_p      # what lies before it is not yet enough
    floor = jnp.where(kept, falling, jnp.inf).min(-1)
    logits = jnp.where(logits < floor[:, None], -jnp.inf, logits)
  return logits


def extend(step: Callable, empty: Callable[[int], Any], ids: jax.Array, count: jax.Array, key: jax.Array, tokens: int,
           length: int, options: Options) -> jax.Array:
  """Draws `tokens` ids after each row's own: i32[B, tokens].

  Where a window of `length` is full, its second half begins the next one.

  Args:
    step: (ids i32[B, s], segments i32[B, s], cache, index i32[B], last i32[B]) -> (logits f32[B, V] after id `last`,
      cache); the ids get the places index, index + 1, ...
    empty: batch size -> a cache without anything.
    ids: i32[B, S] prompts from the left, S < length; each has count i32[B] of them, at least one.
  """
  found, rows = [], jnp.arange(ids.shape[0])
  while sum(x.shape[1] for x in found) < tokens:
    size = min(length - ids.shape[1], tokens - sum(x.shape[1] for x in found))
    key, own = jax.random.split(key)
    new = _window(step, empty(ids.shape[0]), ids, count, own, size, options)
    found.append(new)
    # all ids so far, from the left, then the last half window of each row
    held = jnp.zeros((ids.shape[0], ids.shape[1] + size), jnp.int32).at[:, :ids.shape[1]].set(ids)
    held = held.at[rows[:, None], count[:, None] + jnp.arange(size)[None]].set(new)
    count = count + size
    half = min(max(length // 2, 1), held.shape[1])
    first = jnp.maximum(count - half, 0)
    ids = jnp.take_along_axis(held, jnp.minimum(first[:, None] + jnp.arange(half)[None], held.shape[1] - 1), 1)
    count = jnp.minimum(count, half)
  return jnp.concatenate(found, 1)


def _window(step, cache, ids, count, key, size, options):
  """`size` ids drawn after the prompts ids i32[B, S], of which each row has `count`."""
  real = (jnp.arange(ids.shape[1])[None] < count[:, None]).astype(jnp.int32)
  logits, cache = step(ids, real, cache, jnp.zeros_like(count), count - 1)
  first = draw(logits, jax.random.fold_in(key, 0), options)

  def one(carry, i):
    cache, new = carry
    logits, cache = step(new[:, None], jnp.ones_like(new)[:, None], cache, count + i - 1, jnp.zeros_like(count))
    new = draw(logits, jax.random.fold_in(key, i), options)
    return (cache, new), new
  _, rest = jax.lax.scan(one, (cache, first), jnp.arange(1, size))
  return jnp.concatenate([first[:, None], rest.T], 1)
