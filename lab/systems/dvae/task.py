"""dVAE: a grid as a few codes, and back."""

import functools

import jax
import jax.numpy as jnp
from data_pipelines import arc, grid_inputs
from jax.sharding import PartitionSpec as P

from lab.systems.dvae import anneal, bottleneck, canvas, header, model, objectives, quantizers, settings, show
from lab.systems.dvae.settings import PARTS, TEMPERED
from lab.task import Task


def make_task(config) -> Task:
  """The dVAE task of a configuration. Raises ConfigError for settings that don't fit together."""
  settings.check(config)
  net = model.make(config)
  source = functools.cache(lambda split: arc.source(config.data.dir, config.data[split], side=config.data.side))

  def init(key, batch):
    del batch
    return net.init(key, *model.forms(config))['params'], bottleneck.empty(config)

  def encode(params, grid, size):
    ids, places = canvas.tokens(grid, size, config.data.layout)
    head = model.told(config.model, ids)
    return ids, head, net.apply({'params': params}, ids, places, head, method='encode')

  def begin(params, stats, batch, key):
    del stats
    *_, found = trained_on(config, net, params, batch, key, jnp.int32(0))
    return bottleneck.begun(config, found, batch['mask'], jax.random.split(key)[0])

  def loss(params, stats, batch, key, step):
    ids, head, seen, found = trained_on(config, net, params, batch, key, step)
    passage = bottleneck.sampled(net, config, params, stats, found, batch['number'], step)
    logits = net.apply({'params': params}, passage.words, head, True, method='decode', rngs={'dropout': key})
    stats, marginal = bottleneck.kept(config, stats, passage, batch['mask'], jax.random.split(key)[1])
    terms, sums = judge(config, logits, ids, batch['mask'])
    more, raw = regular(config, passage, marginal, batch['mask'], lambda: source('train').size, step)
    rows = (ids != canvas.PAD) * batch['mask'][:, None]
    sums |= raw | progress(config, step, batch['mask'].sum()) | {'hidden': (((seen != ids) * rows).sum(), rows.sum())}
    return terms | more, (stats, sums)

  def measure(params, stats, batch):
    ids, head, found = encode(params, batch['grid'], batch['size'])
    passage = bottleneck.hard(net, config, params, stats, found)
    terms, sums = judge(config, net.apply({'params': params}, passage.words, head, method='decode'), ids, batch['mask'])
    if passage.log_q is not None:
      q = jnp.exp(passage.log_q)
      for name, each in (('kl_nats_per_latent', objectives.kl_uniform(passage.log_q) / config.model.latents),
                         ('posterior_perplexity', jnp.exp(-(q * passage.log_q).sum(-1)).mean(-1)),
                         ('peakiness', q.max(-1).mean(-1))):
        sums[name] = ((each * batch['mask']).sum(), batch['mask'].sum())
    return {'loss': terms['ce'], **sums}

  return Task(init=init, loss=loss, measure=measure, begin=begin if config.quantizer.kind == 'vq_ema' else None,
              predict=functools.partial(predict, config, net, encode),
              source=source, rules=rules(config), records=functools.partial(show.records, config),
              score=functools.partial(show.score, config), picture=functools.partial(show.picture, config),
              inputs=lambda path, output, stop: grid_inputs.grids(
                  path, output, stop, side=config.data.side, verb=config.predict.verb,
                  codes=(config.model.latents, config.model.codes),
                  header=config.model.pool == 'lattice', distinct=config.model.distinct))


def trained_on(config, net, params, batch, key, step):
  """What training makes of a batch up to the bottleneck: tokens, header, tokens as seen, and what the encoder says."""
  grid, size, number = batch['grid'], batch['size'], batch['number']
  if config.augment.on:
    grid, size = canvas.augmented(grid, size, number, config.augment)
  ids, places = canvas.tokens(grid, size, config.data.layout)
  head, seen = model.told(config.model, ids), canvas.hidden(ids, number, anneal.value(config.mask.most, step))
  return ids, head, seen, net.apply({'params': params}, seen, places, head, True, method='encode',
                                    rngs={'dropout': key})


def predict(config, net, encode, params, stats, batch, key):
  """What the grids of a batch become by their codes; or what codes show; or grids on the way to `other` ones."""
  del key
  decode = lambda words, head: net.apply({'params': params}, words, head, method='decode').argmax(-1).astype(jnp.uint8)
  if 'codes' in batch:
    told = header.Header(*(batch.get(k) for k in header.Header._fields)) if 'extents' in batch else None
    return {'cells': decode(bottleneck.of_codes(net, config, params, stats, batch['codes']), told)}
  ids, head, found = encode(params, batch['grid'], batch['size'])
  passage = bottleneck.hard(net, config, params, stats, found)
  codes = {} if passage.codes is None else {'codes': passage.codes}
  if 'other' not in batch:
    told = {} if head is None else {k: v for k, v in head._asdict().items() if v is not None}
    return {**codes, **told, 'cells': decode(passage.words, head), 'tokens': ids.astype(jnp.uint8)}
  _, other, found = encode(params, batch['other'], batch['other_size'])
  end = bottleneck.hard(net, config, params, stats, found)

  def between(share):
    return decode(passage.words * (1 - share) + end.words * share,
                  None if head is None else header.between(head, other, share))
  return {**codes, 'between': jax.vmap(between, 0, 1)(jnp.linspace(0, 1, config.predict.steps))}


def progress(config, step, weight):
  """What anneals, as sums of this weight."""
  found = {'beta': config.loss.beta, 'mask_most': config.mask.most}
  if config.quantizer.kind in TEMPERED:
    found['tau'] = config.quantizer.tau
  return {name: (anneal.value(section, step) * weight, weight) for name, section in found.items()}


def judge(config, logits, ids, mask):
  """The reconstruction's term, and sums: token accuracies, and grids that are right in every token."""
  o, rows = config.loss, mask[:, None]
  nats, weights = objectives.cross_entropy(logits, ids, pad=canvas.PAD, pad_weight=o.pad_weight, gamma=o.gamma,
                                           stablemax=o.stablemax)
  plain, _ = objectives.cross_entropy(logits, ids, pad=canvas.PAD, pad_weight=1.0, gamma=0.0, stablemax=o.stablemax)
  right = (logits.argmax(-1) == ids).astype(jnp.float32)
  inside = (ids < canvas.COLOURS) * rows
  every = jnp.ones(ids.shape, jnp.float32) * rows
  term = ((nats * rows).sum(), (weights * rows).sum())
  return {'ce': term}, {
      'ce': term, 'nats_per_token': ((plain * rows).sum(), every.sum()),
      'token_accuracy': ((right * rows).sum(), every.sum()),
      'non_pad_accuracy': ((right * inside).sum(), inside.sum()),
      'padding_share': (((ids == canvas.PAD) * rows).sum(), every.sum()),
      'exact_grids': ((right.min(1) * mask).sum(), mask.sum())}


def regular(config, passage, marginal, mask, size, step):
  """What holds the codes in shape: its terms, weighted, and the same as sums without any weight.

  kl, mi, tc and dwkl are nats a latent, usage is nats, commitment a squared distance; all are means over the grids, and
  those of weight 0 are left out. size: () -> grids of the split.
  """
  o, n, weight = config.loss, config.model.latents, mask.sum()
  beta, terms, sums = anneal.value(o.beta, step), {}, {}

  def add(name, each, factor, unit=''):
    total = (each * mask).sum()
    sums[name + unit] = (total, weight)
    terms[name] = (o[name] * factor * (jax.nn.relu(total) if o.relu and name in PARTS else total), weight)
  if passage.latents is not None:      # words pass gradients straight through, so they are the codes
    add('commitment', quantizers.commitment(passage.latents, jax.lax.stop_gradient(passage.words), mask), 1)
  if passage.log_q is None:
    return terms, sums
  if o.kl:
    add('kl', objectives.kl_uniform(passage.log_q) / n, beta, '_nats_per_latent')
  if o.usage:
    add('usage', jnp.broadcast_to(objectives.usage(passage.log_q, mask), mask.shape), 1, '_nats')
  if any(o[k] for k in PARTS):
    if o.mixture == 'running':
      parts = objectives.running_parts(passage.log_q, marginal)
    else:
      parts = objectives.decomposition(passage.log_q, passage.choice, mask, mixture=o.mixture, size=size())
    for name in PARTS:
      if name in parts:
        add(name, parts[name] / n, beta, '_nats_per_latent')
  return terms, sums


def rules(config):
  """Which axis of which array may be split over devices; only what this configuration has."""
  found = [
      (r'blocks/(attention/qkv|mlp/up)/kernel$', P(None, 'fsdp', 'tensor'), 'heads and hidden units are independent'),
      (r'blocks/(attention/out|mlp/down)/kernel$', P(None, 'tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
  ]
  if config.model.pool == 'lattice':
    found += [(r'body/readout/kernel$', P(None, ('fsdp', 'tensor')), 'tokens are independent'),
              (r'body/tokens$', P(None, None, ('fsdp', 'tensor')), 'features of a token are independent')]
  else:
    found += [
        (r'(pool|unpool)/.*/(query|key_value)/kernel$', P('fsdp', 'tensor'), 'heads are independent'),
        (r'(pool|unpool)/.*/out/kernel$', P('tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
        (r'(pool|unpool)/queries\d*$', P(('fsdp', 'tensor')), 'queries are independent'),
    ]
  if config.model.pool == 'perceiver':
    found += [(r'(pool|unpool)/mlp\d+/up/kernel$', P('fsdp', 'tensor'), 'hidden units are independent'),
              (r'(pool|unpool)/mlp\d+/down/kernel$', P('tensor', 'fsdp'), 'takes what the tensor axis holds apart')]
  if config.quantizer.kind == 'vq_ema':
    found.append((r'vq/(codebook|total)$', P(), 'every device looks up every code'))
  if config.loss.mixture == 'running':
    found.append((r'(^|/)marginal$', P(), 'every device reads all of it'))
  if config.quantizer.kind in model.CODEBOOK:
    found += [(r'(^|/)head/kernel$', P(None, ('fsdp', 'tensor')), 'codes are independent'),
              (r'(^|/)codebook$', P(('fsdp', 'tensor')), 'codes are independent')]
  return tuple(found)
