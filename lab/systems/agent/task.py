"""Text trees: words, sentences and what is above them as one vector each, and back."""

import functools

import jax
import jax.numpy as jnp
from data_pipelines import books, tree_inputs
from jax.sharding import PartitionSpec as P

from lab import metrics
from lab.systems.agent import model, objectives, passes, predict, scores, settings, show
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
    """Levels, what they become on the way up and down, the memory, and the terms and raw losses of it."""
    variables = {'params': params}
    levels = [passes.rows(batch, level) for level in range(count)]
    odd = objectives.altered(levels, batch['number'])
    others = [jnp.concatenate([x.seen, x.changed], 1) for x in odd]
    ups = passes.up(net, variables, levels, others, rngs)
    recalled = None
    if config.model.questions:
      recalled = passes.remembered(net, variables, levels[1], batch['documents_1'], ups[1])
    weights = [jnp.sqrt(x.counts) if not level else x.valid.astype(jnp.float32) for level, x in enumerate(levels)]
    downs = passes.down(net, variables, levels, [u.vectors for u in ups], weights, config.loss.path > 0, recalled, rngs)
    terms, raw = objectives.losses_of(net, variables, levels, ups, downs, odd, config)
    if config.model.noise:
      top = ups[-1].vectors
      draw = lambda key: jax.random.normal(key, (top.shape[1], config.model.noise))
      noise = jax.vmap(draw)(objectives.keys(batch['number'], 1)).reshape(-1, config.model.noise)
      found = objectives.rivals(net, variables, top.reshape(-1, top.shape[-1]), levels[-1].valid.reshape(-1), noise)
      terms, raw = terms | found, raw | found
    return levels, ups, downs, recalled, terms, raw

  def loss(params, stats, batch, key, step):
    del step
    *_, terms, raw = both(params, batch, {'dropout': key})
    return terms, (stats, raw)

  def measure(params, stats, batch):
    del stats
    levels, ups, downs, recalled, terms, raw = both(params, batch)
    sums = raw | {TERM + name: pair for name, pair in terms.items()}
    for level, (x, u, d) in enumerate(zip(levels, ups, downs)):
      held = recalled if level == 1 else None
      sums |= scores.rebuilt(levels, level, predict.unfolded(net, {'params': params}, level, u.vectors, held))
      if level:
        own = slice(0, d.parts[0])
        logits = net.apply({'params': params}, level, d.units[:, own], u.table, u.extra, method='logits')
        there = x.real & x.valid[..., None]
        sums[f'table_accuracy_{level}'] = (((logits.argmax(-1) == x.ids) & there).sum(), there.sum())
    if recalled is not None:
      keys = objectives.keys(batch['number'], 2)
      sums |= scores.recalled(net, {'params': params}, levels, batch['documents_1'], ups[1].vectors, recalled, keys)
    return sums

  return Task(init=init, loss=loss, measure=measure, predict=functools.partial(predict.run, config, net), source=source,
              rules=rules(config), finish=finish, records=functools.partial(show.records, config),
              score=functools.partial(show.score, config), picture=functools.partial(show.picture, config),
              inputs=lambda path, output, stop: tree_inputs.texts(
                  path, config.predict.verb, config.data.rows, config.data.lengths, config.model.widths))


def finish(totals):
  """Ratios; and the loss, the sum of those of its terms."""
  terms = {k: totals[k] for k in totals if k.startswith(TERM)}
  return {'loss': sum(metrics.ratios(terms).values()),
          **metrics.ratios({k: v for k, v in totals.items() if k not in terms})}


def rules(config):
  """Which axis of which array may be split over devices."""
  found = (
      (r'blocks/(attention/qkv|mlp/up)/kernel$', P(None, 'fsdp', 'tensor'), 'heads and hidden units are independent'),
      (r'blocks/(attention/out|mlp/down)/kernel$', P(None, 'tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
      (r'(spread|narrow|compressor|checker_\d|ends|hidden)(/.*)?/kernel$', P(None, ('fsdp', 'tensor')),
       'features are independent'),
  )
  return found + ((r'(generator|critic)_\d/kernel$', P(None, ('fsdp', 'tensor')), 'features are independent'),
                  ) * (config.model.noise > 0)
