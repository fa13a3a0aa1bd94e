"""What a text tree minimises. All in float32, nats; a loss is a (total, weight) of nodes.

Axes: B packs, R nodes, L units, V rows of a table.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from data_pipelines.packs import FIRST, JOIN, MASK

from lab.nn import losses
from lab.systems.agent import memory, passes

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


class Altered(NamedTuple):
  """What is made of a level's rows for its checks."""
  rows: passes.Rows      # these
  seen: jax.Array        # i32[B, U, L]: a unit of each row is hidden
  place: jax.Array       # i32[B, U]: this one
  changed: jax.Array     # i32[B, U, L]: some units of some rows are others
  share: jax.Array       # f32[B, U]: so many of a row's


def altered(levels, numbers) -> list[Altered]:
  """Of each level, by the packs' u32[B, 2] numbers alone. Everything is drawn at once: it compiles sooner."""
  shapes = [shape for x in levels for shape in ((4, *x.last.shape[1:]), (3, *x.ids.shape[1:]))]
  ends = np.cumsum([math.prod(shape) for shape in shapes])
  chances = jax.vmap(lambda key: jax.random.uniform(key, (int(ends[-1]),)))(keys(numbers, 0))
  parts = [x.reshape(len(numbers), *shape) for x, shape in zip(jnp.split(chances, ends[:-1], 1), shapes)]
  out = []
  for x, rows, units in zip(levels, parts[::2], parts[1::2]):
    place, seen = hidden(x.ids, x.last, rows[:, 0], rows[:, 1], units[:, 0])
    out.append(Altered(x, seen, place, *replaced(x.ids, x.last, rows[:, 2], rows[:, 3], units[:, 1], units[:, 2])))
  return out


def mixed(levels, shares, numbers):
  """Rows of which each unit is another of its level with the chance shares[l]: text that nobody wrote, to rebuild.

  Drawn anew for every batch, by the packs' u32[B, 2] numbers. Few books are soon known by heart, their words in any
  other order are not.
  """
  out = []
  for level, (found, share) in enumerate(zip(levels, shares)):
    chances = jax.vmap(lambda key: jax.random.uniform(key, (2, *found.ids.shape[1:])))(keys(numbers, 3 + level))
    flat = found.ids.reshape(len(found.ids), -1)
    unit = flat >= FIRST
    units = jnp.take_along_axis(flat, jnp.argsort(~unit, axis=1, stable=True), 1)          # units come first
    at = (chances[:, 1].reshape(flat.shape) * unit.sum(1, keepdims=True)).astype(jnp.int32)
    other = jnp.take_along_axis(units, at, 1).reshape(found.ids.shape)
    out.append(found._replace(ids=jnp.where((found.ids >= FIRST) & (chances[:, 0] < share), other, found.ids)))
  return out


def hidden(ids, last, where, how, other):
  """A place of every row, and the ids that are seen there: i32[B, R, L] -> place i32[B, R], seen i32[B, R, L].

  where, how f32[B, R] and other f32[B, R, L] are uniform from 0 to 1.
  """
  place = jnp.minimum((where * (last + 1)).astype(jnp.int32), last)
  seen = jnp.where(how[..., None] < HIDDEN, MASK, _other(other, ids))
  return place, jnp.where(_places(ids) == place[..., None], seen, ids)


def replaced(ids, last, rate, which, each, other):
  """Rows i32[B, R, L] of which some have units of others: ids i32[B, R, L], the share that are another f32[B, R].

  rate, which f32[B, R] and each, other f32[B, R, L] are uniform from 0 to 1.
  """
  chance = rate * MOST * (which < CORRUPTED)
  unit = _places(ids) < last[..., None]
  out = jnp.where(unit & (each < chance[..., None]), _other(other, ids), ids)
  return out, (out != ids).sum(-1) / jnp.maximum(last, 1)


def _places(ids):
  return jax.lax.broadcasted_iota(jnp.int32, (1, 1, ids.shape[-1]), 2)


def _other(chance, ids):
  """Units of other places of the pack, i32[B, R, L]: each from a row and place of its own, which may be no unit too."""
  flat = ids.reshape(len(ids), -1)
  at = jnp.minimum((chance * flat.shape[1]).astype(jnp.int32), flat.shape[1] - 1).reshape(len(ids), -1)
  drawn = jnp.take_along_axis(flat, at, 1).reshape(ids.shape)
  return jnp.where(drawn >= FIRST, drawn, ids)


def sure(logit, label):
  """Cross-entropy of a yes or no: logits f32[...], bool[...] -> f32[...]."""
  return jnp.maximum(logit, 0) - logit * label + jnp.log1p(jnp.exp(-jnp.abs(logit)))


def coherence(share, logit, wanted):
  """(share - wanted)^2 and a hundredth of the cross-entropy of whether any is replaced: f32[B, R]."""
  return jnp.square(share - wanted) + 0.01 * sure(logit, wanted > 0)


def known(changed, rows):
  """Which altered words i32[B, R, L] are another word of the pack: bool[B, R]. Nobody could tell that they are wrong.

  By a hash of 32 bits: one pair of words in four thousand millions is taken for the same.
  """
  # odd multipliers of a congruential generator (Steele and Vigna 2022, arXiv 2001.05304), one a place
  factors = jnp.asarray(np.cumprod(np.full(changed.shape[-1], 0x915f77f5, np.uint64)).astype(np.uint32) | 1)
  code = lambda ids: ((ids.astype(jnp.uint32) + 1) * factors.reshape(1, 1, -1)).sum(-1)
  here = (code(changed)[:, :, None] == code(rows.ids)[:, None]) & rows.valid[:, None]
  return here.any(-1) & (changed != rows.ids).any(-1)


def plausible(net, params, level, units):
  """What the checker of the level below says of decoded units, f32[B, R, L, d_l], where nothing should be wrong.

  The checker learns nothing of it: the squared share and a hundredth of the cross-entropy, f32[B, R, L].
  """
  frozen = {'params': {k: jax.lax.stop_gradient(v) if k == f'levels_{level - 1}' else v
                       for k, v in params['params'].items()}}
  share, logit = net.apply(frozen, level - 1, units, method='check')
  return coherence(share, logit, jnp.zeros_like(share))


def total(values, weight):
  """(sum, weight) of nodes f32[B, R]; what has no weight may be anything."""
  return jnp.where(weight > 0, values * weight, 0).sum(), weight.sum()


def classes(level, levels, joined):
  """How many rows a table has that can be meant, f32[B]. joined: whether JOIN can."""
  if not level:
    return jnp.full(len(levels[0].ids), FIRST + 256.0)
  return levels[level - 1].valid.sum(1) + 2.0 + joined     # and the two terminators


def losses_of(net, params, levels, ups, downs, odd, config):
  """All terms: name -> (total, weight), weighted by config.loss; and raw ones, for the log.

  odd: of each level what is `altered`, of which `ups` have `seen` and `changed` as others; of the rows that `levels`
    may have been `mixed` from, lest a hidden unit be one that nothing tells, and a unit that is wrong be called right.
  """
  o, terms, raw = config.loss, {}, {}

  def add(name, pair, weight):
    raw[name] = pair
    weight *= o.levels[level] if o.levels else 1
    if weight:
      terms[name] = (pair[0] * weight, pair[1])
  for level, (found, high, low) in enumerate(zip(levels, ups, downs)):
    parted, joins = net.apply(params, level, low.units, method='parted'), None
    kappa = scale(o.unify, classes(level, levels, parted is not None))[:, None]
    weight = jnp.sqrt(found.counts) if not level else found.valid.astype(jnp.float32)
    ids, real, last = (passes.taken(x, low.row) for x in (found.ids, found.real, found.last[..., None]))
    last = last[..., 0]
    logits = net.apply(params, level, low.units, high.table, high.extra, method='logits')
    nats = kappa * reconstruct(logits, ids, real, last)
    size = losses.cross_entropy(low.length, last)
    if parted is not None:
      joins = mean(sure(parted, ids == JOIN), real)
    start = 0
    for origin, count in zip(low.origin, low.parts):
      piece = slice(start, start + count)
      factor = 1.0 if origin == level else o.path
      tail = '' if origin == level else f'_from_{origin}'
      add(f'reconstruct_{level}{tail}', total(nats[:, piece], low.weight[:, piece]), o.reconstruct * factor)
      add(f'length_{level}{tail}', total(size[:, piece], low.weight[:, piece]), o.length * factor)
      if joins is not None:
        add(f'join_{level}{tail}', total(joins[:, piece], low.weight[:, piece]), o.join * factor)
      start = piece.stop
    own = slice(0, low.parts[0])
    if low.gate is not None:
      add('gate', total(memory.cost(low.gate[:, own], found.real), weight), o.gate)
    if level:
      add(f'difference_{level}', total(difference(low.units[:, own], high.units, found.real), weight), o.difference)
    made, count = odd[level], found.ids.shape[1]
    at = jnp.take_along_axis(high.states[:, :count], made.place[:, :, None, None], 2)[:, :, 0]
    wanted = jnp.take_along_axis(made.rows.ids, made.place[..., None], 2)[..., 0]
    guess = net.apply(params, level, at, high.table, high.extra, method='guess')
    add(f'masked_{level}', total(kappa * losses.cross_entropy(guess, wanted), weight), o.masked)
    judged = net.apply(params, level, high.others[:, count:], method='check')
    sound = weight if level else weight * ~known(made.changed, made.rows)
    add(f'coherence_{level}', total(coherence(*judged, made.share), sound), o.coherence)
    if level and o.plausible:
      seems = plausible(net, params, level, low.units[:, own])
      add(f'plausible_{level}', total(mean(seems, found.real & (found.ids >= FIRST)), weight), o.plausible)
  return terms, raw


def rivals(net, params, vectors, there, noise):
  """What generator and critic minimise, by name: (total, weight). Neither's gradient reaches the other, nor the tree.

  Goodfellow et al. 2014, arXiv 1406.2661: the critic tells vectors of text from drawn ones (eq. 1), the generator
  maximises the critic's logarithm (section 3).

  Args:
    vectors: f32[N, d], of rows of the top level, of which bool[N] `there` are. noise: f32[N, model.noise].
  """
  real = there.astype(jnp.float32)
  trust = lambda logits: total(jax.nn.softplus(-logits), real)
  doubt = lambda logits: total(jax.nn.softplus(logits), real)
  drawn = net.apply(params, noise, method='draw')
  frozen = {'params': {k: jax.lax.stop_gradient(v) if k.startswith('critic') else v
                       for k, v in params['params'].items()}}
  judge = lambda variables, x: net.apply(variables, x, method='criticise')
  yes, no = trust(judge(params, jax.lax.stop_gradient(vectors))), doubt(judge(params, jax.lax.stop_gradient(drawn)))
  return {'critic': (yes[0] + no[0], real.sum()), 'generator': trust(judge(frozen, drawn))}
