"""A dVAE rebuilds ARC grids from a few codes.

  launch/run.sh --config=configs/dvae.py --workdir=runs/dvae
      the ARC-AGI-1 grids of at most 10 x 10 cells, 20 codes of 64 and a header (176 bits) a grid; 2 CPU cores,
      1.3 minutes: 80 % of the grids of unseen tasks exact, 96 % of their cells right
  launch/run.sh --config=configs/dvae.py:full --workdir=runs/dvae-full --config.data.dir=data/arc
      all sizes, 118 codes of 256 and a header (1,139 bits), for an accelerator: 92 % exact, 97 % of the cells
  launch/run.sh --config=configs/dvae.py:dalle --workdir=runs/dvae-dalle --config.data.dir=data/arc
      the settings of DALL-E's dVAE (arXiv 2102.12092, appendix A.2), for an accelerator
  launch/run.sh --config=configs/dvae.py:chain --workdir=runs/dvae-chain --config.data.dir=data/arc
      pools that halve the tokens stage by stage, 12,583,936 parameters; trains badly, for comparison
  launch/run.sh --config=configs/dvae.py:rectangles --workdir=runs/rectangles
      made-up grids of 4 x 4; the setting of configs/dvae_table.toml; 2 CPU cores, about a minute

  python -m data_pipelines.prepare arc --raw_dir=ARC --out_dir=data/arc
"""

from ml_collections import ConfigDict

from lab.systems.dvae import config as shape
from lab.task import ConfigError

VARIANTS = ('rectangles', 'smoke', 'full', 'dalle', 'chain')


def get_config(variant: str = '') -> ConfigDict:
  """'': the small grids of ARC-AGI-1; 'rectangles' and 'smoke': made-up ones; the others are for an accelerator."""
  config = shape.get_config()
  config.checkpoint.best = 'exact_grids'
  if variant and variant not in VARIANTS:
    raise ConfigError(f'configs/dvae.py has no variant {variant!r}; there are {", ".join(VARIANTS)}')
  if variant in ('full', 'dalle', 'chain'):
    return _accelerator(config, variant)
  config.optim.update({'name': 'adamw', 'learning_rate': 1e-3, 'end_rate': 1e-5, 'decay': 1e-4})
  config.input.update({'batch_size': 32, 'eval_batch_size': 256})
  config.model.update({'dtype': 'float32', 'deviation': 0.18})
  if not variant:
    config.data.side = 10
    config.model.update({'width': 64, 'heads': 4, 'layers': 2, 'latents': 20, 'codes': 64, 'deviation': 0.125})
    _lattice(config)
    config.total_steps, config.optim.warmup_steps = 3000, 100
    config.log_steps, config.eval_steps, config.checkpoint.steps = 50, 1000, 1000
    return config
  config.data.update({'dir': 'rectangles', 'side': 4})
  config.augment.on = False
  config.model.update({'width': 32, 'heads': 2, 'layers': 1, 'latents': 8, 'codes': 16, 'pool_layers': 1})
  config.loss.update({'kl': 0.02, 'usage': 0.1, 'pad_weight': 1.0})
  config.loss.beta.steps = 1
  config.input.batch_size = 64
  config.total_steps, config.optim.end_rate = 2000, 0.0
  config.log_steps, config.eval_steps, config.checkpoint.steps = 100, 500, 500
  if variant == 'smoke':
    config.augment.on = True
    config.loss.usage = 0.0          # of a whole batch, not of its grids
    config.optim.learning_rate = 1e-2
    config.total_steps, config.log_steps, config.eval_steps, config.checkpoint.steps = 12, 1, 4, 4
    config.input.update({'batch_size': 4, 'eval_batch_size': 512})
  return config


def _lattice(config):
  config.model.update({'pool': 'lattice', 'distinct': True})
  config.quantizer.kind = 'vq_ema'
  config.augment.joined = 0.4
  # outside of the grid nothing is left to learn
  config.loss.update({'kl': 0.0, 'usage': 0.0, 'pad_weight': 0.0})


def _accelerator(config, variant):
  config.input.update({'batch_size': 64, 'eval_batch_size': 256})
  config.model.unroll = 4
  config.total_steps, config.optim.warmup_steps = 20_000, 500
  config.optim.update({'name': 'adamw', 'learning_rate': 5e-4, 'end_rate': 5e-6, 'decay': 1e-4, 'ema': 0.999})
  config.log_steps, config.eval_steps, config.checkpoint.steps = 100, 2000, 2000
  if variant == 'full':
    config.total_steps, config.optim.warmup_steps = 10_000, 300      # with 118 codes three times as many gain nothing
    config.optim.update({'learning_rate': 1e-3, 'end_rate': 1e-5, 'beta2': 0.99, 'decay': 1e-2})
    config.log_steps, config.eval_steps, config.checkpoint.steps = 500, 0, 5000      # on one H200 it ends in a minute
    config.model.update({'latents': 118, 'codes': 256, 'deviation': 0.04})
    _lattice(config)
  if variant == 'chain':
    config.model.update({'latents': 16, 'pool': 'chain', 'slots': False, 'absolute': False})
  if variant == 'dalle':
    config.quantizer.kind = 'gumbel'
    config.model.update({'codes': 8192, 'latents': 64})
    # their 6.6 times the KL of a picture, a token of it, is 6.6 N / S a latent: 64 of them, 1024 tokens
    config.loss.update({'kl': 6.6 * 64 / 1024, 'usage': 0.0, 'pad_weight': 1.0})
    config.loss.beta.steps = 5000
    config.optim.update({'learning_rate': 1e-4, 'end_rate': 1.25e-6, 'schedule_steps': 1_200_000, 'warmup_steps': 0})
    config.total_steps, config.input.batch_size = 3_000_000, 512
    config.log_steps, config.eval_steps, config.checkpoint.steps = 1000, 50_000, 50_000
  return config
