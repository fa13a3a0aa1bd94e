"""How much of a text comes back, as sums over its nodes."""

import jax
import jax.numpy as jnp
from data_pipelines import trees
from data_pipelines.packs import FIRST

from lab.systems.agent import memory, passes, predict


def rebuilt(levels, level, found):
  """Sums of how many nodes come back exactly from the vectors of a level, which `found` was made of.

  What is compared is the node's place in the one above. Rows count as often as they are in the text, but words once.
  """
  truth = jax.vmap(lambda rows: passes.spelt(rows, level))(levels[:level + 1])
  same = jax.vmap(passes.compared)(truth, found)
  weight = (levels[level].counts if level else levels[level].valid.astype(jnp.float32))[..., None]
  sums, names = {}, [f'{name}s' for name in trees.LEVELS]
  for k, (there, exact) in enumerate(zip(same.there, same.exact)):
    name = f'{names[k]}_in_{names[level]}' if k < level else f'exact_{names[level]}' if level else 'exact_word_types'
    sums[name] = ((exact & there) * weight).sum(), (there * weight).sum()
  return sums


def recalled(net, variables, levels, documents, vectors, found: passes.Remembered, keys):
  """Sums of how many names in sentences come back: with the memory, with none, and with that of another document.

  levels, documents i32[B, U] and vectors f32[B, U, d] of level 1; keys [B]; see `names` for what a name is.
  """
  truth = jax.vmap(lambda rows: passes.spelt(rows, 1))(levels[:2])
  ids, named = levels[1].ids, names(levels, documents)
  word = jnp.where(ids >= FIRST, ids - FIRST, 0)
  name = jnp.take_along_axis(named, word.reshape(len(ids), -1), 1).reshape(ids.shape) & (ids >= FIRST)     # [B, U, L]
  other = memory.shuffled(found.memory, found.there, keys, documents)
  sums = {}
  for tail, held in (('', found), ('_without_memory', None), ('_other_memory', found._replace(memory=other))):
    same = jax.vmap(passes.compared)(truth, predict.unfolded(net, variables, 1, vectors, held))
    weight = name * same.there[0] * levels[1].counts[..., None]
    sums['names_in_sentences' + tail] = (same.exact[0] * weight).sum(), weight.sum()
  return sums


def names(levels, documents):
  """Words that one document of a pack has, in two sentences or more: bool[B, U_0]. documents: i32[B, U_1]."""
  count = levels[0].ids.shape[1]
  has = (levels[1].ids[:, None] == (FIRST + jnp.arange(count)).reshape(1, -1, 1, 1)).any(-1)            # [B, U_0, U_1]
  has = has & levels[1].valid[:, None]
  of = documents[:, None] == jnp.arange(1, documents.shape[1] + 1).reshape(1, -1, 1)                    # [B, D, U_1]
  sentences = (has * levels[1].counts[:, None]).sum(-1)
  homes = (jnp.einsum('bws,bds->bwd', has.astype(jnp.float32), of.astype(jnp.float32)) > 0).sum(-1)
  return (homes == 1) & (sentences >= 2)
