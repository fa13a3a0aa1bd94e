"""What a text tree minimises. All in float32, nats; a loss is a (total, weight) of nodes.

Axes: B packs, R nodes, L units, V rows of a table.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from data_pipelines.packs import FIRST, MASK

from lab.nn import losses
from lab.systems.agent import passes

TERMINATOR = 3.0       # weight of a terminator's cross-entropy beside a unit's
HIDDEN = 0.9           # share of hidden units that show the mask; the others show another unit
CORRUPTED, MOST = 0.66, 0.8    # share of nodes with replaced units, and how many of them at most


def scale(unify, classes):
  """What makes the cross-entropy of V classes alike for all levels: unify / ln V. classes f32[B] -> f32[B]."""
  return unify / jnp.log(jnp.maximum(classes, 2.0)) if unify else jnp.ones_like(classes)


def mean(values, real):
  """Over the units that are real: f32[..., L], bool[..., L] -> f32[...]."""
  return (values * real).sum(-1) / jnp.maximum(real.sum(-1), 1)


def reconstruct(logits, ids, real, last):
  """Cross-entropy of units, the terminator's threefold, over their number: f32[B, R].

  Args:
    logits: f32[B, R, L, V]. ids: i32[B, R, L]. real: bool[B, R, L]. last: i32[B, R], place of the terminator.
  """
  weight = 1 + (TERMINATOR - 1) * (_places(ids) == last[..., None])
  return mean(losses.cross_entropy(logits, ids) * weight, real)


def difference(units, wanted, real):
  """How far decoded vectors are from those that they stand for: f32[B, R, L, d] twice -> f32[B, R], mean squares."""
  return mean(jnp.square(units - jax.lax.stop_gradient(wanted)).mean(-1), real)


def keys(numbers, stream):
  """A key for each pack from its u32[B, 2], seed and number; another one for each stream."""
  # the generator is named, lest config.prng change what is drawn
  make = lambda n: jax.random.fold_in(jax.random.fold_in(jax.random.key(n[0], impl='threefry2x32'), n[1]), stream)
  return jax.vmap(make)(numbers)


def hidden(key, ids, last):
  """A place of every row, and the ids that are seen there: i32[R, L] -> place i32[R], seen i32[R, L]."""
  where, how, other = jax.random.split(key, 3)
  place = jnp.minimum((jax.random.uniform(where, last.shape) * (last + 1)).astype(jnp.int32), last)
  at = _places(ids) == place[..., None]
  drawn = _other(other, ids)
  seen = jnp.where(jax.random.uniform(how, last.shape)[..., None] < HIDDEN, MASK, drawn)
  return place, jnp.where(at, seen, ids)


def replaced(key, ids, last):
  """Rows i32[R, L] of which some have units of others: ids i32[R, L] and the share that are another, f32[R]."""
  which, rate, each, other = jax.random.split(key, 4)
  chance = jax.random.uniform(rate, last.shape) * MOST * (jax.random.uniform(which, last.shape) < CORRUPTED)
  unit = _places(ids) < last[..., None]
  out = jnp.where(unit & (jax.random.uniform(each, ids.shape) < chance[..., None]), _other(other, ids), ids)
  return out, (out != ids).sum(-1) / jnp.maximum(last, 1)


def _places(ids):
  return jax.lax.broadcasted_iota(jnp.int32, (1,) * (ids.ndim - 1) + ids.shape[-1:], ids.ndim - 1)


def _other(key, ids):
  """Units of other places of the pack, i32[R, L]: each from a row and place of its own, which may be no unit too."""
  drawn = ids.reshape(-1)[jax.random.randint(key, ids.shape, 0, ids.size)]
  return jnp.where(drawn >= FIRST, drawn, ids)


def coherence(share, logit, wanted):
  """(share - wanted)^2 and a hundredth of the cross-entropy of whether any is replaced: f32[B, R]."""
  label = (wanted > 0).astype(jnp.float32)
  sure = jnp.maximum(logit, 0) - logit * label + jnp.log1p(jnp.exp(-jnp.abs(logit)))
  return jnp.square(share - wanted) + 0.01 * sure


def total(values, weight):
  """(sum, weight) of nodes f32[B, R]; what has no weight may be anything."""
  return jnp.where(weight > 0, values * weight, 0).sum(), weight.sum()


def classes(level, levels):
  """How many rows a table has that can be meant, f32[B]."""
  if not level:
    return jnp.full(len(levels[0].ids), FIRST + 256.0)
  return levels[level - 1].valid.sum(1) + 2.0            # and the two terminators


class Altered(NamedTuple):
  """What is made of a level's rows for its checks."""
  seen: jax.Array        # i32[B, U, L]: a unit of each row is hidden
  place: jax.Array       # i32[B, U]: this one
  changed: jax.Array     # i32[B, U, L]: some units of some rows are others
  share: jax.Array       # f32[B, U]: so many of a row's


def altered(level, rows, numbers) -> Altered:
  """By the packs' u32[B, 2] numbers alone, another for each level."""
  place, seen = jax.vmap(hidden)(keys(numbers, 2 * level), rows.ids, rows.last)
  return Altered(seen, place, *jax.vmap(replaced)(keys(numbers, 2 * level + 1), rows.ids, rows.last))


def losses_of(net, params, levels, ups, downs, odd, config):
  """All terms: name -> (total, weight), weighted by config.loss; and raw ones, for the log.

  odd: of each level what is `altered`, of which `ups` have `seen` and `changed` as others.
  """
  o, terms, raw = config.loss, {}, {}

  def add(name, pair, weight):
    raw[name] = pair
    if weight:
      terms[name] = (pair[0] * weight, pair[1])
  for level, (found, high, low) in enumerate(zip(levels, ups, downs)):
    kappa = scale(o.unify, classes(level, levels))[:, None]
    weight = jnp.sqrt(found.counts) if not level else found.valid.astype(jnp.float32)
    ids, real, last = (passes.taken(x, low.row) for x in (found.ids, found.real, found.last[..., None]))
    last = last[..., 0]
    logits = net.apply(params, level, low.units, high.table, high.extra, method='logits')
    nats = kappa * reconstruct(logits, ids, real, last)
    size = losses.cross_entropy(low.length, last)
    start = 0
    for origin, count in zip(low.origin, low.parts):
      piece = slice(start, start + count)
      factor = 1.0 if origin == level else o.path
      tail = '' if origin == level else f'_from_{origin}'
      add(f'reconstruct_{level}{tail}', total(nats[:, piece], low.weight[:, piece]), o.reconstruct * factor)
      add(f'length_{level}{tail}', total(size[:, piece], low.weight[:, piece]), o.length * factor)
      start = piece.stop
    own = slice(0, low.parts[0])
    if level:
      add(f'difference_{level}', total(difference(low.units[:, own], high.units, found.real), weight), o.difference)
    place, count = odd[level].place, found.ids.shape[1]
    at = jnp.take_along_axis(high.states[:, :count], place[:, :, None, None], 2)[:, :, 0]
    wanted = jnp.take_along_axis(found.ids, place[..., None], 2)[..., 0]
    guess = net.apply(params, level, at, high.table, high.extra, method='guess')
    add(f'masked_{level}', total(kappa * losses.cross_entropy(guess, wanted), weight), o.masked)
    judged = net.apply(params, level, high.others[:, count:], method='check')
    add(f'coherence_{level}', total(coherence(*judged, odd[level].share), weight), o.coherence)
  return terms, raw
