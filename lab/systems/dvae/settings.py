"""Which settings of a dVAE can run together; and that none is set which nothing reads."""

import math

from lab.config import choice, flatten
from lab.systems.dvae import anneal, config as shape, model, objectives, pictures
from lab.task import ConfigError

KINDS = ('none', 'gumbel', 'st_gumbel', 'reinmax', 'vq_ema', 'fsq')
TEMPERED = ('gumbel', 'st_gumbel')
PARTS = ('mi', 'tc', 'dwkl')
CHOICES = {
    'quantizer.kind': KINDS, 'loss.mixture': (*objectives.MIXTURES, 'running'),
    'data.layout': ('projected', 'sequence'), 'model.pool': ('lattice', 'perceiver', 'chain'),
    'model.attention': ('auto', 'plain', 'flash'), 'model.dtype': ('float32', 'bfloat16'),
    'predict.verb': ('rebuild', 'decode', 'interpolate'), 'quantizer.tau.kind': anneal.KINDS,
    'loss.beta.kind': anneal.KINDS, 'mask.most.kind': anneal.KINDS,
}
LEAST = {'data.side': 1, 'model.width': 1, 'model.heads': 1, 'model.layers': 1, 'model.latents': 1, 'model.codes': 2,
         'model.pool_layers': 1, 'model.unroll': 1, 'quantizer.reinmax_tau': 1, 'quantizer.least': 0,
         'quantizer.hard_from': -1, 'predict.steps': 2, 'loss.gamma': 0, 'loss.pad_weight': 0, 'loss.commitment': 0,
         'loss.kl': 0, 'loss.usage': 0, 'loss.beta.start': 0, 'loss.beta.end': 0, 'model.deviation': 0}


def check(config) -> None:
  """Raises ConfigError for settings that can't run, before any device or file is touched."""
  for key, options in CHOICES.items():
    choice(config, key, options)
  flat, m = flatten(config), config.model
  for key, least in LEAST.items():
    if not flat[key] >= least:       # which holds for NaN, too
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least {least}')
  if config.predict.verb == 'interpolate' and config.predict.steps > (most := pictures.most(config.data.side)):
    raise ConfigError(f'config.predict.steps = {config.predict.steps}: a picture has room for {most} grids of '
                      f'data.side = {config.data.side}; expected at most so many')
  for key in ('augment.joined', 'augment.translate', 'mask.most.start', 'mask.most.end'):
    if not 0 <= flat[key] <= 1:
      raise ConfigError(f'config.{key} = {flat[key]}: expected 0 to 1')
  for key, low in (('quantizer.decay', 0.5), ('loss.marginal_decay', 0), ('model.dropout', 0)):
    if not low <= flat[key] < 1:
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least {low} and less than 1')
  if m.width % m.heads or m.width // m.heads % 4:
    raise ConfigError(f'config.model.width = {m.width}: expected a multiple of 4 x model.heads = {4 * m.heads}, for '
                      'positions turn pairs of features by row and by column')
  for section, positive in (('quantizer.tau', True), ('loss.beta', False), ('mask.most', False)):
    _annealed(flat, section, positive)
  _quantizer(config)
  _together(config)
  _unread(config)


def _annealed(flat, section, positive) -> None:
  for end in ('start', 'end'):
    value, exponential = flat[f'{section}.{end}'], flat[f'{section}.kind'] == 'exponential'
    if not value > 0 and (positive or exponential):
      raise ConfigError(f'config.{section}.{end} = {value}: expected more than 0' + ', for kind = exponential' *
                        exponential)
  for key in ('steps', 'delay'):
    if not flat[f'{section}.{key}'] >= 0:
      raise ConfigError(f'config.{section}.{key} = {flat[f"{section}.{key}"]}: expected at least 0')


def _quantizer(config) -> None:
  q, o = config.quantizer, config.loss
  if q.kind == 'fsq' and (min(q.levels, default=0) < 2 or math.prod(q.levels) != config.model.codes):
    raise ConfigError(f'config.quantizer.levels = {q.levels}: expected numbers of 2 or more whose product is '
                      f'model.codes = {config.model.codes}')
  if q.kind not in model.CODEBOOK:
    if wrong := [k for k in (*PARTS, 'kl', 'usage') if o[k]]:
      raise ConfigError(f'config.loss.{wrong[0]} = {o[wrong[0]]}: {q.kind} has no distribution over codes; expected 0')
    if o.mixture != 'batch':
      raise ConfigError(f'config.loss.mixture = {o.mixture!r}: {q.kind} has no distribution over codes; expected batch')
  if q.kind == 'none' and config.predict.verb == 'decode':
    raise ConfigError("config.predict.verb = 'decode': there are no codes with quantizer.kind = none")
  if q.kind == 'vq_ema' and config.optim.accumulate > 1:
    raise ConfigError(f'config.optim.accumulate = {config.optim.accumulate}: codebooks of micro-batches have no mean; '
                      'expected 1 with quantizer.kind = vq_ema')
  if q.kind == 'vq_ema' and config.init_from:
    raise ConfigError(f'config.init_from = {config.init_from!r}: the codebook of vq_ema is no parameter and would be '
                      'left behind; continue_from takes all of a run')


def _together(config) -> None:
  o = config.loss
  if o.mixture == 'running' and o.tc:
    raise ConfigError(f'config.loss.tc = {o.tc}: with mixture = running the three parts cancel and it is always 0; '
                      'expected mixture = batch, mws or mss')
  if config.model.pool == 'lattice':
    if config.data.layout != 'projected':
      raise ConfigError(f"config.model.pool = 'lattice': a lattice lies on the layout projected, which "
                        f'data.layout = {config.data.layout} is not; expected perceiver or chain')
    if config.model.latents > config.data.side ** 2:
      raise ConfigError(f'config.model.latents = {config.model.latents}: a lattice has no more than a latent a cell; '
                        f'expected at most data.side x data.side = {config.data.side ** 2}')
  if not o.pad_weight and (config.model.pool != 'lattice' or config.augment.on and config.augment.translate):
    raise ConfigError('config.loss.pad_weight = 0.0: nothing would teach where a grid ends; expected more than 0, but '
                      'with model.pool = lattice and augment.translate = 0')
  if config.data.layout == 'sequence' and config.augment.translate:
    raise ConfigError(f'config.augment.translate = {config.augment.translate}: the layout sequence has no room around '
                      'a grid; expected 0')
  if config.augment.joined and config.augment.translate:
    raise ConfigError(f'config.augment.joined = {config.augment.joined}: grids are joined at the top left; expected 0 '
                      f'with augment.translate = {config.augment.translate}')
  if config.augment.joined and (config.input.batch_size < 2 or config.optim.accumulate > 1):
    raise ConfigError(f'config.augment.joined = {config.augment.joined}: grids are joined to others of their batch, '
                      'and micro-batches are other batches; expected 0, or input.batch_size of 2 or more and '
                      'optim.accumulate = 1')
  if config.model.attention == 'flash' and (config.model.pool == 'chain' or config.model.dtype == 'float32'):
    raise ConfigError("config.model.attention = 'flash': it takes neither float32 nor the single wide head of pool = "
                      'chain; expected auto or plain')


def _unread(config) -> None:
  """Refuses a key that was set although the others leave it unread."""
  kind, o = config.quantizer.kind, config.loss
  default, flat = flatten(shape.get_config()), flatten(config)
  parts = any(o[k] for k in PARTS)
  held = [(s, flat[f'{s}.kind'] == 'constant') for s in ('quantizer.tau', 'loss.beta', 'mask.most')]
  for keys, read, why in (
      *(([f'{s}.{k}' for k in ('start', 'steps', 'delay')], not constant, f'{s}.kind = constant')
        for s, constant in held),
      ([f'mask.most.{k}' for k in ('steps', 'delay', 'kind')], flat['mask.most.start'] or flat['mask.most.end'],
       'mask.most is 0 from start to end'),
      (['predict.steps'], config.predict.verb == 'interpolate', f'predict.verb = {config.predict.verb}'),
      ([k for k in flat if k.startswith('quantizer.tau.')], kind in TEMPERED, f'quantizer.kind = {kind}'),
      (['quantizer.hard_from'], kind == 'gumbel', f'quantizer.kind = {kind}'),
      (['quantizer.reinmax_tau'], kind == 'reinmax', f'quantizer.kind = {kind}'),
      (['quantizer.levels'], kind == 'fsq', f'quantizer.kind = {kind}'),
      (['quantizer.decay', 'quantizer.least', 'loss.commitment'], kind == 'vq_ema', f'quantizer.kind = {kind}'),
      (['loss.relu', 'loss.mixture'], parts, 'the weights of mi, tc and dwkl are 0'),
      (['loss.marginal_decay'], o.mixture == 'running', f'loss.mixture = {o.mixture}'),
      ([k for k in flat if k.startswith('loss.beta.')], parts or o.kl, 'the weights of kl, mi, tc and dwkl are 0'),
      (['model.distinct'], config.model.pool == 'lattice', f'model.pool = {config.model.pool}'),
      (['model.pool_layers'], config.model.pool == 'perceiver', f'model.pool = {config.model.pool}'),
      ([f'augment.{k}' for k in ('colours', 'symmetries', 'joined', 'translate')], config.augment.on,
       'augment.on is False')):
    for key in keys if not read else ():
      if flat[key] != default[key]:
        raise ConfigError(f'config.{key} = {flat[key]!r}: nothing reads it, for {why}; expected {default[key]!r}')
