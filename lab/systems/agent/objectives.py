"""What a text tree minimises. All in float32, nats; a loss is a (total, weight) of nodes.

Axes: B packs, R nodes, L units, V rows of a table.
"""

import math

import jax
import jax.numpy as jnp
from data_pipelines.packs import FIRST, MASK, PAD

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


def hidden(key, ids, last):
  """A place of every row, and the ids that are seen there: i32[B, R, L] -> place i32[B, R], seen i32[B, R, L]."""
  where, how, other = jax.random.split(key, 3)
  place = jnp.minimum((jax.random.uniform(where, last.shape) * (last + 1)).astype(jnp.int32), last)
  at = _places(ids) == place[..., None]
  drawn = _other(other, ids)
  seen = jnp.where(jax.random.uniform(how, last.shape)[..., None] < HIDDEN, MASK, drawn)
  return place, jnp.where(at, seen, ids)


def replaced(key, ids, last):
  """Rows of which some have units of others: ids i32[B, R, L] and the share of units that are another, f32[B, R]."""
  which, rate, each, other = jax.random.split(key, 4)
  chance = jax.random.uniform(rate, last.shape) * MOST * (jax.random.uniform(which, last.shape) < CORRUPTED)
  unit = _places(ids) < last[..., None]
  out = jnp.where(unit & (jax.random.uniform(each, ids.shape) < chance[..., None]), _other(other, ids), ids)
  return out, (out != ids).sum(-1) / jnp.maximum(last, 1)


def _places(ids):
  return jax.lax.broadcasted_iota(jnp.int32, (1, 1, ids.shape[-1]), 2)


def _other(key, ids):
  """Units of other places of the pack, i32[B, R, L]: each from a row and place of its own, which may be no unit too."""
  batch, count, length = ids.shape
  flat = ids.reshape(batch, -1)
  drawn = jnp.take_along_axis(flat, jax.random.randint(key, flat.shape, 0, flat.shape[1]), 1).reshape(ids.shape)
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


def losses_of(net, params, levels, ups, downs, config, key, rngs):
  """All terms: name -> (total, weight), weighted by config.loss; and raw ones, for the log."""
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
    mask_key, change_key = jax.random.split(jax.random.fold_in(key, level))
    place, seen = hidden(mask_key, found.ids, found.last)
    changed, share = replaced(change_key, found.ids, found.last)
    both = jnp.concatenate([seen, changed], 1)
    units = passes.taken(high.table, both)
    real = jnp.concatenate([found.real] * 2, 1)
    states, vectors = net.apply(params, level, units, real, True, method='up', rngs=rngs)
    count = found.ids.shape[1]
    at = jnp.take_along_axis(states[:, :count], place[:, :, None, None], 2)[:, :, 0]
    wanted = jnp.take_along_axis(found.ids, place[..., None], 2)[..., 0]
    guess = net.apply(params, level, at, high.table, high.extra, method='guess')
    add(f'masked_{level}', total(kappa * losses.cross_entropy(guess, wanted), weight), o.masked)
    judged = net.apply(params, level, vectors[:, count:], method='check')
    add(f'coherence_{level}', total(coherence(*judged, share), weight), o.coherence)
  return terms, raw
