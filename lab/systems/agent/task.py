"""Text trees: words, sentences and what is above them as one vector each, and back."""

import functools

import jax
import jax.numpy as jnp
from data_pipelines import books, trees
from jax.sharding import PartitionSpec as P

from lab import metrics
from lab.systems.agent import model, objectives, passes, settings, show
from lab.task import Task

TERM = 'term/'       # sums that the loss is made of; see `finish`


def make_task(config) -> Task:
  """The text tree's task of a configuration. Raises ConfigError for settings that don't fit together."""
  settings.check(config)
  net, count = model.make(config), len(config.data.rows)

  @functools.cache
  def source(split):
    return books.source(config.data.dir, config.data[split], rows=config.data.rows, lengths=config.data.lengths)

  def init(key, batch):
    del batch
    return net.init(key)['params'], {}

  def both(params, batch, rngs=None):
    """Levels, what they become on the way up and down, and the terms and raw losses of it."""
    variables = {'params': params}
    levels = [passes.rows(batch, level) for level in range(count)]
    odd = [objectives.altered(level, x, batch['number']) for level, x in enumerate(levels)]
    others = [jnp.concatenate([x.seen, x.changed], 1) for x in odd]
    ups = passes.up(net, variables, levels, others, rngs)
    weights = [jnp.sqrt(x.counts) if not level else x.valid.astype(jnp.float32) for level, x in enumerate(levels)]
    downs = passes.down(net, variables, levels, [u.vectors for u in ups], weights, config.loss.path > 0, rngs)
    return levels, ups, downs, *objectives.losses_of(net, variables, levels, ups, downs, odd, config)

  def loss(params, stats, batch, key, step):
    del step
    *_, terms, raw = both(params, batch, {'dropout': key})
    return terms, (stats, raw)

  def measure(params, stats, batch):
    del stats
    levels, ups, downs, terms, raw = both(params, batch)
    sums = raw | {TERM + name: pair for name, pair in terms.items()}
    for level, (x, u, d) in enumerate(zip(levels, ups, downs)):
      sums |= _rebuilt(levels, level, unfolded(params, level, u.vectors))
      if level:
        own = slice(0, d.parts[0])
        logits = net.apply({'params': params}, level, d.units[:, own], u.table, u.extra, method='logits')
        there = x.real & x.valid[..., None]
        sums[f'table_accuracy_{level}'] = (((logits.argmax(-1) == x.ids) & there).sum(), there.sum())
    return sums

  def unfolded(params, level, vectors):
    """Vectors f32[B, U, d] -> the likeliest text of each, leaves [B, U, ...]."""
    flat = passes.unfold(net, {'params': params}, level, vectors.reshape(-1, vectors.shape[-1]))
    return jax.tree.map(lambda x: x.reshape(*vectors.shape[:2], *x.shape[1:]), passes.likeliest(flat))

  def predict(params, stats, batch, key):
    del stats, key
    levels = [passes.rows(batch, level) for level in range(count)]
    odd = [objectives.altered(level, x, batch['number']) for level, x in enumerate(levels)]
    ups, found = passes.up(net, {'params': params}, levels, [x.changed for x in odd]), {}
    for level, u in enumerate(ups):
      text = unfolded(params, level, u.vectors)
      found[f'bytes_{level}'] = text.bytes.astype(jnp.uint8)
      for k in range(level + 1):
        found |= {f'last_{level}_{k}': text.last[k], f'cont_{level}_{k}': text.cont[k]}
      share, _ = net.apply({'params': params}, level, u.others, method='check')
      found |= {f'share_{level}': share, f'replaced_{level}': odd[level].share}
    return found

  return Task(init=init, loss=loss, measure=measure, predict=predict, source=source, rules=rules(config), finish=finish,
              records=functools.partial(show.records, config), score=functools.partial(show.score, config),
              picture=functools.partial(show.picture, config))


def finish(totals):
  """Ratios; and the loss, the sum of those of its terms."""
  terms = {k: totals[k] for k in totals if k.startswith(TERM)}
  return {'loss': sum(metrics.ratios(terms).values()),
          **metrics.ratios({k: v for k, v in totals.items() if k not in terms})}


def _rebuilt(levels, level, found):
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


def rules(config):
  """Which axis of which array may be split over devices."""
  del config
  return (
      (r'blocks/(attention/qkv|mlp/up)/kernel$', P(None, 'fsdp', 'tensor'), 'heads and hidden units are independent'),
      (r'blocks/(attention/out|mlp/down)/kernel$', P(None, 'tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
      (r'(spread|narrow|compressor|checker_\d|ends|hidden)(/.*)?/kernel$', P(None, ('fsdp', 'tensor')),
       'features are independent'),
  )
