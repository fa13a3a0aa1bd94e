"""What is predicted of packs and vectors: text from vectors, vectors of text, likenesses, ways between."""

import jax
import jax.numpy as jnp

from lab.systems.agent import objectives, passes


def run(config, net, params, stats, batch, key):
  """Of a split's packs what `show` judges and draws; of a user's what config.predict.verb says.

  Outputs of text are those of passes.Spelt, under the names of `_text`: with leaves [B, U, ...] of every row, or
  [B, steps, ...] of the way from one to another.
  """
  del stats
  variables, count = {'params': params}, len(config.data.rows)
  verb = 'evaluate' if 'number' in batch else config.predict.verb
  if verb == 'decode':
    levels = [level for level in range(count) if config.model.widths[level + 1] == batch['vector'].shape[-1]]
    return _texts({level: unfolded(net, variables, level, batch['vector'][:, None]) for level in levels})
  if verb == 'generate':
    noise = jax.vmap(lambda n: jax.random.normal(jax.random.fold_in(key, n), (config.model.noise,)))(batch['draw'])
    vectors = net.apply(variables, noise, method='draw')
    return _texts({count - 1: unfolded(net, variables, count - 1, vectors[:, None])})
  levels = [passes.rows(batch, level) for level in range(count)]
  if verb == 'evaluate':
    odd = objectives.altered(levels, batch['number'])
    ups = passes.up(net, variables, levels, [x.changed for x in odd])
    found = _rebuilt(config, net, variables, levels, ups, batch)
    for level, u in enumerate(ups):
      share, _ = net.apply(variables, level, u.others, method='check')
      found |= {f'share_{level}': share, f'replaced_{level}': odd[level].share}
    return found
  ups = passes.up(net, variables, levels)
  if verb == 'encode':
    return {f'vector_{level}': u.vectors for level, u in enumerate(ups)}
  if verb == 'neighbours':
    found = {}
    for level, (x, u) in enumerate(zip(levels, ups)):
      found |= _nearest(level, u.vectors, x.valid, min(config.predict.nearest, x.ids.shape[1] - 1))
    return found
  if verb == 'interpolate':
    level = min(1, count - 1)
    others = [passes.Rows(batch[f'other_ids_{k}'], batch[f'other_counts_{k}'].astype(jnp.float32))
              for k in range(count)]
    start, end = ups[level].vectors[:, 0], passes.up(net, variables, others)[level].vectors[:, 0]
    share = jnp.linspace(0, 1, config.predict.steps)[None, :, None]
    return _texts({level: unfolded(net, variables, level, _unit(start[:, None] * (1 - share) + end[:, None] * share))})
  return _rebuilt(config, net, variables, levels, ups, batch)


def _rebuilt(config, net, variables, levels, ups, batch):
  """Texts of all rows; sentences with what others of their document hold, where the model has a memory."""
  held = (passes.remembered(net, variables, levels[1], batch['documents_1'], ups[1]) if config.model.questions
          else None)
  downs = passes.down(net, variables, levels, [u.vectors for u in ups], [x.counts for x in levels], True, held)
  return _texts(dict(enumerate(passes.read(net, variables, downs))))


def unfolded(net, variables, level, vectors, recalled: passes.Remembered | None = None) -> passes.Spelt:
  """The likeliest text of vectors f32[B, U, d] of a level: leaves [B, U, ...]. recalled: of sentences, or None."""
  every = vectors.reshape(-1, vectors.shape[-1])
  if recalled is not None:
    recalled = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), recalled)
  flat = passes.likeliest(passes.unfold(net, variables, level, every, recalled))
  return jax.tree.map(lambda x: x.reshape(*vectors.shape[:2], *x.shape[1:]), flat)


def _texts(found):
  """level -> Spelt, as one flat dict: bytes_l u8, and of each level k up to l last_l_k, cont_l_k and maybe join_l_k."""
  out = {}
  for level, text in found.items():
    out[f'bytes_{level}'] = text.bytes.astype(jnp.uint8)
    for k in range(level + 1):
      out |= {f'last_{level}_{k}': text.last[k], f'cont_{level}_{k}': text.cont[k]}
      if text.joins[k] is not None:
        out[f'join_{level}_{k}'] = text.joins[k]
  return out


def _nearest(level, vectors, valid, count):
  """Of each row the others by cosine, the nearest first: near_l i32[B, U, n], likeness_l f32[B, U, n], -1: no row."""
  unit = _unit(vectors) * vectors.shape[-1]**-0.5
  cosine = jnp.einsum('bud,bvd->buv', unit, unit)
  there = valid[:, None] & ~jnp.eye(valid.shape[1], dtype=bool)[None]
  likeness, near = jax.lax.top_k(jnp.where(there, cosine, -2.0), count)
  return {f'near_{level}': jnp.where(likeness > -1.5, near, -1), f'likeness_{level}': likeness}


def _unit(vectors):
  """To a mean square of 1, as vectors of nodes have."""
  return vectors * jax.lax.rsqrt(jnp.square(vectors).mean(-1, keepdims=True) + 1e-6)
