"""Up and down the tree: what a pack's rows become, and what is decoded from their vectors and from rows above."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from data_pipelines.packs import CONT, FIRST, JOIN, PAD

from lab.nn.products import lookup
from lab.systems.agent import memory


class Rows(NamedTuple):
  """What a pack has of one level. U rows of L units."""
  ids: jax.Array         # i32[B, U, L]
  counts: jax.Array      # f32[B, U], 0: no row

  @property
  def real(self):
    """bool[B, U, L]: units and terminator."""
    return self.ids != PAD

  @property
  def last(self):
    """i32[B, U]: place of the terminator."""
    return jnp.maximum(self.real.sum(-1), 1) - 1

  @property
  def valid(self):
    """bool[B, U]."""
    return self.counts > 0


class Up(NamedTuple):
  """What a level's U rows become, and n U others of the same lengths, made of them."""
  table: jax.Array       # f32[B, V, d], see Tree.table
  extra: jax.Array       # f32[B, V]
  units: jax.Array       # f32[B, U, L, d]
  vectors: jax.Array     # f32[B, U, D]
  states: jax.Array      # f32[B, n U, L, d], the others' units after the encoder
  others: jax.Array      # f32[B, n U, D], their vectors


class Down(NamedTuple):
  """What is decoded at a level: R vectors, of its own rows and of places in rows above.

  Places that are no node, or whose row is none, have weight 0.
  """
  units: jax.Array       # f32[B, R, L, d]
  length: jax.Array      # f32[B, R, L], logits
  row: jax.Array         # i32[B, R]: the row of this level that each stands for
  place: jax.Array       # i32[B, R]: the place of each among all that its origin's rows have at this level
  weight: jax.Array      # f32[B, R]
  origin: tuple[int, ...]    # level from which each part was decoded: its own, then those above, from below
  parts: tuple[int, ...]     # vectors of each part
  gate: jax.Array | None     # f32[B, R, L]: how much of a unit came from the memory; None without one


def rows(batch, level) -> Rows:
  """A level of a batch."""
  return Rows(batch[f'ids_{level}'], batch[f'counts_{level}'].astype(jnp.float32) * batch['mask'][:, None])


def taken(table, ids):
  """Rows of tables [B, V, ...] by i32[B, n...] -> [B, n..., ...]; of one for all, [V, d], the same."""
  if table.ndim == 2:
    return jnp.take(table, ids, 0)
  return jax.vmap(lambda t, i: jnp.take(t, i, 0))(table, ids)


def up(net, params, levels: list[Rows], others: list[jax.Array] | None = None, rngs=None) -> list[Up]:
  """Every level's rows, words first; one call of the encoder a level.

  others: of each level ids i32[B, n U, L] of rows to encode beside its own; row i has the length of row i mod U.
  rngs: of dropout, None without.
  """
  out, below = [], None
  for level, found in enumerate(levels):
    valid = levels[level - 1].valid if level else None
    table, extra = net.apply(params, level, below, valid, method='table')
    ids, count = jnp.asarray(found.ids), found.ids.shape[1]
    if others is not None:
      ids = jnp.concatenate([ids, others[level]], 1)
    units = lookup(table, ids) if table.ndim == 2 else jax.vmap(lookup)(table, ids)
    real = jnp.concatenate([found.real] * (ids.shape[1] // count), 1)
    states, vectors = net.apply(params, level, units, real, rngs is not None, method='up', rngs=rngs)
    below = vectors[:, :count]
    out.append(Up(table, extra, units[:, :count], below, states[:, count:], vectors[:, count:]))
  return out


class Remembered(NamedTuple):
  """What sentences may read: of each row of level 1 what the other ones of its document hold."""
  memory: jax.Array      # f32[B, U, Q, d_1]
  there: jax.Array       # bool[B, U]


def remembered(net, params, found: Rows, documents, high: Up) -> Remembered:
  """By level 1 of packs, its documents i32[B, U] and what it became."""
  written = net.apply(params, high.units, found.real, method='write')
  return Remembered(*memory.others(written, documents, found.counts))


def down(net, params, levels: list[Rows], vectors: list[jax.Array], weights: list[jax.Array], path: bool,
         recalled: Remembered | None = None, nodes: tuple[int, ...] = (), rngs=None) -> list[Down]:
  """Every level's vectors taken apart, and with `path` what comes out of them, level after level: words first.

  weights: f32[B, U] a level, of its rows' own vectors. A unit decoded from above has its origin's weight.
  recalled: what is read where sentences are taken apart, or None. rngs: of dropout, None without.
  nodes: of each level but the highest how many of the places above go on, those of weight first: as many as packs may
    have nodes, see packs.Packer. Most places are none, and cost as much as one. (): all of them.
  """
  out = [None] * len(levels)
  above = []           # parts from above: (vectors [B, R, D], row i32[B, R], weight f32[B, R], place i32[B, R], origin)
  for level in reversed(range(len(levels))):
    found = levels[level]
    batch, count, length = found.ids.shape
    every = jnp.broadcast_to(jnp.arange(count)[None], (batch, count))
    parts = [(vectors[level], every, weights[level], every, level), *above]
    x, row, weight, place = (jnp.concatenate([p[i] for p in parts], 1) for i in range(4))
    decoded = net.apply(params, level, x, rngs is not None, method='down', rngs=rngs)
    units, gate = decoded.units, None
    if recalled is not None and level == 1:
      there = jnp.take_along_axis(recalled.there, row, 1)
      units, gate = net.apply(params, units, taken(recalled.memory, row), there, method='recall')
    out[level] = Down(units, decoded.length, row, place, weight, tuple(p[4] for p in parts),
                      tuple(p[0].shape[1] for p in parts), gate)
    if path and level:
      ids = taken(found.ids, row)                                       # [B, R, L]
      unit = ids >= FIRST
      child, own_weight = jnp.where(unit, ids - FIRST, 0), weight[..., None] * unit
      below = place[..., None] * length + jnp.arange(length).reshape(1, 1, -1)
      start, above = 0, []
      for _, _, w, _, origin in parts:
        piece = slice(start, start + w.shape[1])
        flat = [x[:, piece].reshape(batch, -1, *x.shape[3:]) for x in (units, child, own_weight, below)]
        if nodes and nodes[level - 1] < flat[0].shape[1]:
          chosen = jnp.argsort(flat[2] <= 0, axis=1, stable=True)[:, :nodes[level - 1]]
          flat = [jax.vmap(lambda x, i: x[i])(x, chosen) for x in flat]
        above.append((*flat, origin))
        start = piece.stop
  return out


class Unfolded(NamedTuple):
  """What N vectors of level l are taken apart to, down to bytes, whatever comes out on the way.

  Level k has P_k places a vector, P_l = 1 and P_k = P_(k+1) L_(k+1): of each node all places for units, also those
  behind its terminator. Lists are by level, 0 to l.
  """
  places: list[jax.Array]    # f32[N, P_k, L_k]: logits of the terminator's place
  ends: list[jax.Array]      # f32[N, P_k, L_k, 2]: logits of END and CONT, were the terminator there
  bytes: jax.Array           # f32[N, P_0, L_0, 256]: logits
  joins: list[jax.Array | None]  # f32[N, P_k]: logits that the place holds no node but JOIN; None where none can


class Spelt(NamedTuple):
  """Text of N nodes of level l, spread over the places of `Unfolded`; what is behind a terminator may be anything."""
  last: list[jax.Array]      # i32[N, P_k]: the terminator's place, so many units are before it
  cont: list[jax.Array]      # bool[N, P_k]: it is CONT
  bytes: jax.Array           # i32[N, P_0, L_0]: 0 to 255
  joins: list[jax.Array | None]  # bool[N, P_k]: the place holds JOIN; None where none can


def unfold(net, params, level, vectors, recalled: Remembered | None = None) -> Unfolded:
  """Vectors f32[N, d_(l+1)] of level l, taken apart; sentences, l = 1, with a memory, f32[N, Q, d_1] and bool[N]."""
  places, ends, joins = [], [], [None]
  x = vectors[:, None]
  for k in range(level, -1, -1):
    decoded = net.apply(params, k, x, method='down')
    units = decoded.units
    if recalled is not None and level == k == 1:
      units, _ = net.apply(params, units, recalled.memory[:, None], recalled.there[:, None], method='recall')
    places.append(decoded.length)
    ends.append(net.apply(params, k, units, method='ended'))
    if k:
      parted = net.apply(params, k, units, method='parted')
      joins.append(None if parted is None else parted.reshape(len(vectors), -1))
    x = units.reshape(len(vectors), -1, units.shape[-1])
  return Unfolded(places[::-1], ends[::-1], net.apply(params, units, method='spelt'), joins[::-1])


def read(net, params, downs: list[Down]) -> list[Spelt]:
  """The likeliest text of every row of each level, from its vector alone: leaves [B, U, ...].

  downs: of `down` with `path`. Where that left places out, there are no units, and zeros.
  """
  last = [low.length.argmax(-1).astype(jnp.int32) for low in downs]
  cont, joins = [], []
  for level, (low, n) in enumerate(zip(downs, last)):
    parted = net.apply(params, level, low.units, method='parted')
    joins.append(None if parted is None else parted > 0)
    ends = net.apply(params, level, low.units, method='ended')
    cont.append(jnp.take_along_axis(ends, n[..., None, None], 2)[:, :, 0].argmax(-1) == 1)
  letters = net.apply(params, downs[0].units, method='spelt').argmax(-1).astype(jnp.int32)
  out = []
  for level, high in enumerate(downs):
    count = high.parts[0]
    sizes = {level: count}                     # places of each level below
    for k in range(level, 0, -1):
      sizes[k - 1] = sizes[k] * downs[k].units.shape[2]

    def of(k, x):
      piece = slice(sum(downs[k].parts[:level - k]), sum(downs[k].parts[:level - k + 1]))
      if sizes[k] == downs[k].parts[level - k]:
        x = x[:, piece]
      else:
        spread = lambda x, at: jnp.zeros((sizes[k], *x.shape[1:]), x.dtype).at[at].set(x)
        x = jax.vmap(spread)(x[:, piece], downs[k].place[:, piece])
      return x.reshape(len(x), count, -1, *x.shape[2:])
    inside = [None if joins[k] is None else of(k, joins[k]).reshape(len(letters), count, -1)
              for k in range(1, level + 1)]
    out.append(Spelt([of(k, last[k]) for k in range(level + 1)], [of(k, cont[k]) for k in range(level + 1)],
                     of(0, letters), [*inside, None]))
  return out


def likeliest(found: Unfolded) -> Spelt:
  """The likeliest of everything."""
  last = [x.argmax(-1).astype(jnp.int32) for x in found.places]
  at = [jnp.take_along_axis(x, n[..., None, None], 2)[:, :, 0] for x, n in zip(found.ends, last)]
  joins = [None if x is None else x > 0 for x in found.joins]
  return Spelt(last, [x.argmax(-1) == 1 for x in at], found.bytes.argmax(-1).astype(jnp.int32), joins)


def spelt(levels: list[Rows], level) -> Spelt:
  """What the rows of a level of a pack are, of one pack: levels' arrays without the axis B."""
  rows = jnp.arange(len(levels[level].ids))[:, None]                   # [N, P_k]
  last, cont, joins = [], [], [None]
  for k in range(level, -1, -1):
    found = levels[k]
    ids = found.ids[rows]                                              # [N, P_k, L_k]
    last.append(found.last[rows])
    cont.append(jnp.take_along_axis(ids, last[-1][..., None], 2)[..., 0] == CONT)
    joins.append((ids == JOIN).reshape(len(ids), -1))
    rows = jnp.where(ids >= FIRST, ids - FIRST, 0).reshape(len(ids), -1)
  return Spelt(last[::-1], cont[::-1], rows.reshape(*ids.shape), joins[-2::-1])


class Same(NamedTuple):
  """How alike two texts are, by level, 0 to l."""
  there: list[jax.Array]     # bool[N, P_k]: the first text has a node here
  exact: list[jax.Array]     # bool[N, P_k]: all units in their places, terminator included


def compared(truth: Spelt, found: Spelt) -> Same:
  """By place: what a text has at place i of a node is compared with what the other has there."""
  length = truth.bytes.shape[-1]
  inside = jnp.arange(length)[None, None] < truth.last[0][..., None]
  right = ((truth.bytes == found.bytes) | ~inside).all(-1)
  exact = []
  for k, (a, b, c, d) in enumerate(zip(truth.last, found.last, truth.cont, found.cont)):
    if k:
      below = right.reshape(*a.shape, -1)
      right = (below | (jnp.arange(below.shape[-1])[None, None] >= a[..., None])).all(-1)
    right = right & (a == b) & (c == d)
    if found.joins[k] is not None:
      right = jnp.where(truth.joins[k] | found.joins[k], truth.joins[k] & found.joins[k], right)
    exact.append(right)
  there, above = [], jnp.ones_like(truth.last[-1], bool)
  for k in range(len(truth.last) - 1, -1, -1):
    if found.joins[k] is not None:
      above = above & ~truth.joins[k]
    there.append(above)
    if k:
      length = truth.last[k - 1].shape[1] // above.shape[1]
      above = (above[..., None] & (jnp.arange(length)[None, None] < truth.last[k][..., None])).reshape(len(above), -1)
  return Same(there[::-1], exact)
