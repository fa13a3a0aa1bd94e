"""Moving MNIST: an LSTM that rebuilds the frames it saw and forecasts the next ones.

  launch/run.sh --config=configs/video.py --workdir=runs/video
      one small digit on 16 x 16 px, 5 frames seen and 5 forecast; 2 CPU cores, a minute: squared error of the forecast
      1.86 a frame (copying the last frame: 4.90); strips and GIFs in runs/video/pictures
  launch/run.sh --config=configs/video.py:paper --workdir=runs/paper --config.data.dir=data/mnist
      the composite conditional model of Srivastava et al. 2015 on 64 x 64 px, two layers of 2048 (268 M parameters):
      270 nats a forecast frame after 16 minutes on one H200 (the paper: 341); true frames are fed less and less often
  launch/run.sh --config=configs/video.py:simvp --workdir=runs/simvp --config.data.dir=data/mnist
      a convolutional forecast: 195 nats, squared error 34.7 after 24 minutes
  launch/run.sh --config=configs/video.py:convlstm --workdir=runs/convlstm --config.data.dir=data/mnist
      for an accelerator too, and not trained to the end yet
  launch/run.sh --config=configs/video.py:parity=copy --workdir=runs/copy --config.data.dir=data/mnist
      any model of lab/systems/video/registry.py with the setup that its author used
"""

from ml_collections import ConfigDict

from lab.systems.video import config as shape
from lab.systems.video.registry import PARITY
from lab.task import ConfigError

VARIANTS = ('smoke', 'paper', 'paper-rule', 'convlstm', 'simvp', 'parity=NAME')


def get_config(variant: str = '') -> ConfigDict:
  """'': the micro set; 'smoke': the tests' size; the others are for an accelerator."""
  config = shape.get_config()
  config.checkpoint.best = '-loss'
  if variant in ('', 'smoke'):
    return _micro(config, variant == 'smoke')
  config.log_steps, config.input.eval_batch_size = 100, 200
  config.eval_steps = config.checkpoint.steps = 2500
  name, _, model = variant.partition('=')
  if name == 'parity' and model in PARITY:
    return _parity(config, model)
  if name == 'parity':
    raise ConfigError(f'configs/video.py:parity={model}: expected one of {", ".join(PARITY)}')
  if variant not in VARIANTS:
    raise ConfigError(f'configs/video.py has no variant {variant!r}; there are {", ".join(VARIANTS)}')
  if variant in ('paper', 'paper-rule'):
    config.update_from_flattened_dict(PARITY['paper'])
  if variant == 'paper-rule':              # the update of the paper's code, which sums over the batch and its frames
    config.input.batch_size, config.loss.scale, config.total_steps = 80, 800.0, 200_000
    config.optim.update({'name': 'momentum', 'beta1': 0.9, 'learning_rate': 1e-4, 'schedule': 'staircase',
                         'factor': 0.9, 'factor_steps': 10_000, 'decay': 1e-4, 'decay_kind': 'l2', 'clip': 0.0,
                         'clip_step': 1e-4})
    return config
  config.optim.update({'name': 'adam', 'learning_rate': 1e-3, 'warmup_steps': 500, 'decay': 0.0, 'ema': 0.999})
  if variant == 'paper':                   # with the usual initialisation, and fed so that forecasts learn to run free
    config.model.update({'init': 'default', 'feed': 'scheduled', 'unroll': 10})
    config.loss.scheduled_steps = 10_000
    config.input.batch_size, config.total_steps = 256, 30_000
    config.eval_steps = config.checkpoint.steps = 5000      # an evaluation took as long as 190 updates or more
  if variant == 'convlstm':
    config.model.update({'cell': 'convlstm', 'embed': 'patch', 'encoder': (128,) * 4, 'head': (128,) * 4,
                         'heads': 'pred', 'feed': 'scheduled'})
    config.input.batch_size, config.total_steps = 128, 40_000
    config.optim.learning_rate = 3e-4
  if variant == 'simvp':
    config.model.update({'kind': 'simvp', 'heads': 'pred'})
    config.input.batch_size, config.total_steps = 64, 14_000
  return config


def _micro(config: ConfigDict, smoke: bool) -> ConfigDict:
  config.data.update({'digits': 1, 'pool': 4})
  config.video.update({'size': 16, 'past': 5, 'future': 5})
  config.model.update({'encoder': (256,), 'head': (256,), 'feed': 'teacher', 'dtype': 'float32'})
  config.optim.update({'name': 'adam', 'schedule': 'constant', 'decay': 0.0})
  config.input.eval_batch_size = 200
  config.log_steps = 50
  config.eval_steps = config.checkpoint.steps = 250
  if smoke:
    config.model.update({'encoder': (32,), 'head': (32,)})
    config.optim.learning_rate = 5e-3
    config.total_steps = 12
    config.input.update({'batch_size': 4, 'eval_batch_size': 200})
    config.log_steps = 1
    config.eval_steps = config.checkpoint.steps = 4
  return config


def _parity(config: ConfigDict, model: str) -> ConfigDict:
  """A model of the notes on 64 x 64 px; 90 updates there were an epoch, and 200 epochs a run.

  Where both heads were trained the reconstruction weighed 0.8: a matter of the run, as the choice of heads is.
  """
  config.update_from_flattened_dict(PARITY[model])
  config.total_steps = 18_000
  config.eval_steps = config.checkpoint.steps = 900
  config.input.batch_size = 100
  config.early_stop.patience = 10
  config.optim.update({'name': 'adam', 'schedule': 'staircase', 'factor': 0.9, 'factor_steps': 2700, 'decay': 0.0,
                       'clip': 0.25})
  return config
