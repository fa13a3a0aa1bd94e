"""dVAE: a grid as a few codes, and back."""

import functools
import math

import jax
import jax.numpy as jnp
from data_pipelines import arc, grid_inputs
from jax.sharding import PartitionSpec as P

from lab.config import choice, flatten
from lab.nn import losses
from lab.systems.dvae import anneal, bottleneck, canvas, model, objectives, quantizers, show
from lab.task import ConfigError, Task

KINDS = ('none', 'gumbel', 'st_gumbel', 'reinmax', 'vq_ema', 'fsq')
MIXTURES = ('batch', 'mws', 'mss', 'running')
PARTS = ('mi', 'tc', 'dwkl')
CHOICES = {
    'quantizer.kind': KINDS, 'loss.mixture': MIXTURES, 'data.layout': ('projected', 'sequence'),
    'model.pool': ('perceiver', 'chain'), 'model.attention': ('auto', 'plain', 'flash'),
    'model.dtype': ('float32', 'bfloat16'), 'predict.verb': ('rebuild', 'decode', 'interpolate'),
    'quantizer.tau.kind': anneal.KINDS, 'loss.beta.kind': anneal.KINDS, 'mask.most.kind': anneal.KINDS,
}
LEAST = {'data.side': 1, 'model.width': 1, 'model.heads': 1, 'model.layers': 1, 'model.latents': 1, 'model.codes': 2,
         'model.pool_layers': 1, 'model.unroll': 1, 'quantizer.reinmax_tau': 1, 'quantizer.least': 0,
         'quantizer.hard_from': -1, 'predict.steps': 2, 'loss.gamma': 0, 'loss.pad_weight': 0}


def make_task(config) -> Task:
  """The dVAE task of a configuration. Raises ConfigError for settings that don't fit together."""
  check(config)
  net = model.make(config)
  source = functools.cache(lambda split: arc.source(config.data.dir, config.data[split], side=config.data.side))

  def init(key, batch):
    del batch
    return net.init(key, *model.forms(config))['params'], bottleneck.empty(config)

  def encode(params, grid, size):
    ids, places = canvas.tokens(grid, size, config.data.layout)
    return ids, net.apply({'params': params}, ids, places, method='encode')

  def loss(params, stats, batch, key, step):
    grid, size, number = batch['grid'], batch['size'], batch['number']
    if config.augment.on:
      grid, size = canvas.augmented(grid, size, number, config.augment)
    ids, places = canvas.tokens(grid, size, config.data.layout)
    most, drop = anneal.value(config.mask.most, step), {'dropout': key}
    seen = canvas.hidden(ids, number, most)
    found = net.apply({'params': params}, seen, places, True, method='encode', rngs=drop)
    start, renew = jax.random.split(key)
    stats = bottleneck.begun(config, stats, found, batch['mask'], start)
    passage = bottleneck.sampled(net, config, params, stats, found, number, step)
    logits = net.apply({'params': params}, passage.words, True, method='decode', rngs=drop)
    stats, marginal = bottleneck.kept(config, stats, passage, batch['mask'], renew)
    terms, sums = judge(config, logits, ids, batch['mask'])
    more = regular(config, passage, marginal, batch['mask'], lambda: source('train').size)
    beta = anneal.value(config.loss.beta, step)
    for name, (weight, scheduled, each) in more.items():
      terms[name] = ((beta if scheduled else 1) * weight * (each * batch['mask']).sum(), batch['mask'].sum())
      sums[name] = ((each * batch['mask']).sum(), batch['mask'].sum())
    return terms, (stats, sums | {'hidden': (((seen != ids) * batch['mask'][:, None]).sum(), batch['mask'].sum() *
                                             ids.shape[1])})

  def measure(params, stats, batch):
    ids, found = encode(params, batch['grid'], batch['size'])
    passage = bottleneck.hard(net, config, params, stats, found)
    logits = net.apply({'params': params}, passage.words, method='decode')
    terms, sums = judge(config, logits, ids, batch['mask'])
    marginal = stats.get('marginal')
    more = regular(config, passage, marginal, batch['mask'], lambda: source('eval').size, always=True)
    return {'loss': terms['ce'], **sums,
            **{k: ((each * batch['mask']).sum(), batch['mask'].sum()) for k, (_, _, each) in more.items()}}

  return Task(init=init, loss=loss, measure=measure, predict=functools.partial(predict, config, net, encode),
              source=source, rules=rules(config), records=functools.partial(show.records, config),
              score=functools.partial(show.score, config), picture=functools.partial(show.picture, config),
              inputs=lambda path, output, stop: grid_inputs.grids(
                  path, output, stop, side=config.data.side, verb=config.predict.verb,
                  codes=(config.model.latents, config.model.codes)))


def predict(config, net, encode, params, stats, batch, key):
  """What the grids of a batch become by their codes; or what codes show; or grids on the way to `other` ones."""
  del key
  decode = lambda words: net.apply({'params': params}, words, method='decode').argmax(-1).astype(jnp.uint8)
  if 'codes' in batch:
    return {'cells': decode(bottleneck.of_codes(net, config, params, stats, batch['codes']))}
  ids, found = encode(params, batch['grid'], batch['size'])
  passage = bottleneck.hard(net, config, params, stats, found)
  codes = {} if passage.codes is None else {'codes': passage.codes}
  if 'other' not in batch:
    return {**codes, 'cells': decode(passage.words), 'tokens': ids.astype(jnp.uint8)}
  end = bottleneck.hard(net, config, params, stats, encode(params, batch['other'], batch['other_size'])[1])
  share = jnp.linspace(0, 1, config.predict.steps)[None, :, None, None]
  between = passage.words[:, None] * (1 - share) + end.words[:, None] * share
  return {**codes, 'between': jax.vmap(decode, 1, 1)(between)}


def judge(config, logits, ids, mask):
  """The reconstruction's term, and sums: token accuracies, and grids that are right in every token."""
  o, rows = config.loss, mask[:, None]
  nats, weights = objectives.cross_entropy(logits, ids, pad=canvas.PAD, pad_weight=o.pad_weight, gamma=o.gamma,
                                           stablemax=o.stablemax)
  plain = losses.cross_entropy(logits, ids)
  right = (logits.argmax(-1) == ids).astype(jnp.float32)
  inside = (ids != canvas.PAD) * rows
  every = jnp.ones(ids.shape, jnp.float32) * rows
  return {'ce': ((nats * rows).sum(), (weights * rows).sum())}, {
      'nats_per_token': ((plain * rows).sum(), every.sum()), 'token_accuracy': ((right * rows).sum(), every.sum()),
      'non_pad_accuracy': ((right * inside).sum(), inside.sum()),
      'sample_accuracy': ((right.min(1) * mask).sum(), mask.sum())}


def regular(config, passage, marginal, mask, size, always=False):
  """name -> (weight, whether beta scales it, nats or squares of each grid f32[B]) of what holds the codes in shape.

  Terms of weight 0 are left out, unless they are `always` wanted. Those of latents are means over the N of them. size:
  () -> grids of the split.
  """
  o, n, found = config.loss, config.model.latents, {}
  if passage.latents is not None:
    found['commitment'] = (o.commitment, False, _committed(passage, mask))
  if passage.log_q is None:
    return found
  if o.kl or always:
    found['kl'] = (o.kl, True, objectives.kl_uniform(passage.log_q) / n)
  if o.usage or always:
    found['usage'] = (o.usage, True, jnp.broadcast_to(objectives.usage(passage.log_q, mask), mask.shape))
  if always or any(o[k] for k in PARTS):
    if o.mixture == 'running':
      parts = objectives.running_parts(passage.log_q, marginal)
    else:
      parts = objectives.decomposition(passage.log_q, passage.choice, mask, mixture=o.mixture, size=size())
    found |= {k: (o[k], True, (jax.nn.relu(parts[k]) if o.relu else parts[k]) / n) for k in PARTS
              if k in parts and (o[k] or always)}
  return found


def _committed(passage, mask):
  """f32[B]: what draws latents to their codes; `words` pass gradients straight through, so they are the codes."""

  return quantizers.commitment(passage.latents, jax.lax.stop_gradient(passage.words), mask)


def check(config) -> None:
  """Raises ConfigError for settings that can't run, before any device or file is touched."""
  for key, options in CHOICES.items():
    choice(config, key, options)
  flat, m, q, o = flatten(config), config.model, config.quantizer, config.loss
  for key, least in LEAST.items():
    if flat[key] < least:
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least {least}')
  for key in ('augment.translate', 'mask.most.start', 'mask.most.end'):
    if not 0 <= flat[key] <= 1:
      raise ConfigError(f'config.{key} = {flat[key]}: expected 0 to 1')
  for key, low in (('quantizer.decay', 0.5), ('loss.marginal_decay', 0), ('model.dropout', 0)):
    if not low <= flat[key] < 1:
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least {low} and less than 1')
  if m.width % m.heads or m.width // m.heads % 4:
    raise ConfigError(f'config.model.width = {m.width}: expected a multiple of 4 x model.heads = {4 * m.heads}, for '
                      'positions turn pairs of features by row and by column')
  if min(q.tau.start, q.tau.end) <= 0:
    raise ConfigError(f'config.quantizer.tau.end = {q.tau.end}: expected more than 0')
  if q.kind == 'fsq' and (min(q.levels, default=0) < 2 or math.prod(q.levels) != m.codes):
    raise ConfigError(f'config.quantizer.levels = {q.levels}: expected numbers of 2 or more whose product is '
                      f'model.codes = {m.codes}')
  _together(config, o)


def _together(config, o) -> None:
  kind = config.quantizer.kind
  if kind not in model.CODEBOOK and (wrong := [k for k in (*PARTS, 'kl', 'usage') if o[k]]):
    raise ConfigError(f'config.loss.{wrong[0]} = {o[wrong[0]]}: {kind} has no distribution over codes; expected 0')
  if o.mixture == 'running' and o.tc:
    raise ConfigError(f'config.loss.tc = {o.tc}: with mixture = running the three parts cancel and it is always 0; '
                      'expected mixture = batch, mws or mss')
  if config.data.layout == 'sequence' and config.augment.translate:
    raise ConfigError(f'config.augment.translate = {config.augment.translate}: the layout sequence has no room around '
                      'a grid; expected 0')
  if config.predict.verb == 'decode' and kind == 'none':
    raise ConfigError("config.predict.verb = 'decode': there are no codes with quantizer.kind = none")


def rules(config):
  """Which axis of which array may be split over devices; only what this configuration has."""
  found = [
      (r'blocks/(attention/qkv|mlp/up)/kernel$', P(None, 'fsdp', 'tensor'), 'heads and hidden units are independent'),
      (r'blocks/(attention/out|mlp/down)/kernel$', P(None, 'tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
      (r'(pool|unpool)/.*/(query|key_value)/kernel$', P('fsdp', 'tensor'), 'heads are independent'),
      (r'(pool|unpool)/.*/out/kernel$', P('tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
      (r'(pool|unpool)/queries\d*$', P(('fsdp', 'tensor')), 'queries are independent'),
  ]
  if config.model.pool == 'perceiver':
    found += [(r'(pool|unpool)/mlp\d+/up/kernel$', P('fsdp', 'tensor'), 'hidden units are independent'),
              (r'(pool|unpool)/mlp\d+/down/kernel$', P('tensor', 'fsdp'), 'takes what the tensor axis holds apart')]
  if config.quantizer.kind in model.CODEBOOK:
    found += [(r'(^|/)head/kernel$', P(None, ('fsdp', 'tensor')), 'codes are independent'),
              (r'(^|/)codebook$', P(('fsdp', 'tensor')), 'codes are independent')]
  return tuple(found)
