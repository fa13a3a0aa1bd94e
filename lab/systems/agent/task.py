"""Text trees: words, sentences and what is above them as one vector each, and back."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from data_pipelines import books, tree_inputs
from jax.sharding import PartitionSpec as P

from lab import metrics
from lab.systems.agent import model, objectives, passes, predict, scores, settings, show
from lab.task import Sums, Task, Terms

TERM = 'term/'       # sums that the loss is made of; see `finish`


def make_task(config) -> Task:
  """The text tree's task of a configuration. Raises ConfigError for settings that don't fit together."""
  settings.check(config)
  net = model.make(config)

  @functools.cache
  def source(split):
    return books.source(config.data.dir, config.data[split], rows=config.data.rows, lengths=config.data.lengths,
                        nodes=config.data.nodes, joined=config.data.joined)

  def init(key, batch):
    del batch
    return net.init(key)['params'], {}

  def loss(params, stats, batch, key, step):
    del step
    made = passed(config, net, {'params': params}, batch, config.loss.path > 0, {'dropout': key})
    return made.terms, (stats, made.raw)

  return Task(init=init, loss=loss, measure=functools.partial(measure, config, net),
              predict=functools.partial(predict.run, config, net), source=source, rules=rules(config), finish=finish,
              records=functools.partial(show.records, config), score=functools.partial(show.score, config),
              picture=functools.partial(show.picture, config),
              inputs=lambda path, output, stop: tree_inputs.texts(
                  path, config.predict.verb, config.data.rows, config.data.lengths, config.model.widths,
                  joined=config.data.joined))


class Passed(NamedTuple):
  """What a batch becomes, up and down the tree, and what it costs."""
  levels: list[passes.Rows]
  ups: list[passes.Up]
  downs: list[passes.Down]
  recalled: passes.Remembered | None
  terms: Terms
  raw: Sums              # the terms without their weights, and those of weight 0


def passed(config, net, variables, batch, path: bool, rngs=None) -> Passed:
  """Both ways and all losses of a batch; with `path` also from above. rngs: of dropout, in training, or None."""
  levels = [passes.rows(batch, level) for level in range(len(config.data.rows))]
  odd = objectives.altered(levels, batch['number'])
  if rngs is not None and config.data.mixed:
    levels = objectives.mixed(levels, config.data.mixed, batch['number'])
  ups = passes.up(net, variables, levels, [jnp.concatenate([x.seen, x.changed], 1) for x in odd], rngs)
  recalled = None
  if config.model.questions:
    recalled = passes.remembered(net, variables, levels[1], batch['documents_1'], ups[1])
  # common words would drown the others, and seldom ones are needed most
  weights = [jnp.sqrt(x.counts) if not level else x.valid.astype(jnp.float32) for level, x in enumerate(levels)]
  downs = passes.down(net, variables, levels, [u.vectors for u in ups], weights, path, recalled,
                      config.data.nodes, rngs)
  terms, raw = objectives.losses_of(net, variables, levels, ups, downs, odd, config)
  if config.model.noise:
    top = ups[-1].vectors
    draw = lambda key: jax.random.normal(key, (top.shape[1], config.model.noise))
    noise = jax.vmap(draw)(objectives.keys(batch['number'], 1)).reshape(-1, config.model.noise)
    found = objectives.rivals(net, variables, top.reshape(-1, top.shape[-1]), levels[-1].valid.reshape(-1), noise)
    terms, raw = terms | found, raw | found
  return Passed(levels, ups, downs, recalled, terms, raw)


def measure(config, net, params, stats, batch):
  """Sums of all losses, and of how much of the text comes back."""
  del stats
  variables = {'params': params}
  made = passed(config, net, variables, batch, True)
  sums = made.raw | {TERM + name: pair for name, pair in made.terms.items()}
  texts = passes.read(net, variables, made.downs)
  for level, (x, u, d) in enumerate(zip(made.levels, made.ups, made.downs)):
    sums |= scores.rebuilt(made.levels, level, texts[level])
    if level:
      own = slice(0, d.parts[0])
      logits = net.apply(variables, level, d.units[:, own], u.table, u.extra, method='logits')
      there = x.real & x.valid[..., None]
      sums[f'table_accuracy_{level}'] = (((logits.argmax(-1) == x.ids) & there).sum(), there.sum())
  if made.recalled is not None:
    keys = objectives.keys(batch['number'], 2)
    sums |= scores.recalled(net, variables, made.levels, batch['documents_1'], made.ups[1].vectors, made.recalled, keys)
  return sums


def finish(totals):
  """Ratios; and the loss, the sum of those of its terms."""
  terms = {k: totals[k] for k in totals if k.startswith(TERM)}
  return {'loss': sum(metrics.ratios(terms).values()),
          **metrics.ratios({k: v for k, v in totals.items() if k not in terms})}


def rules(config):
  """Which axis of which array may be split over devices.

  Vectors of nodes are never split by feature: tables are made of them, and XLA's partitioner (jax 0.10.2, eight CPU
  devices) got products with tables wrong that were split by feature on one side and by pack on the other.
  """
  found = (
      (r'blocks/(attention/qkv|mlp/up)/kernel$', P(None, 'fsdp', 'tensor'), 'heads and hidden units are independent'),
      (r'blocks/(attention/out|mlp/down)/kernel$', P(None, 'tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
      (r'(spread|narrow|compressor|checker_\d|ends|hidden)(/.*)?/kernel$', P(('fsdp', 'tensor')),
       'vectors stay whole: they are rows of a table'),
  )
  return found + ((r'(generator|critic)_\d/kernel$', P(None, ('fsdp', 'tensor')), 'features are independent'),
                  ) * (config.model.noise > 0)
