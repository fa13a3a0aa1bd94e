"""Multi-person pose, bottom-up (part affinity fields).

  launch/run.sh --config=configs/pose.py --workdir=runs/pose
      the 17 photographs that ship with the lab, learnt by heart; 2 busy CPU cores, 10.6 minutes: AP .634 on them
  launch/run.sh --config=configs/pose.py:coco --workdir=runs/coco --config.data.dir=data/coco
      COCO 2017, the full network (VGG-19, 4 PAF and 2 heatmap stages, 26 M parameters), an accelerator. Not yet run on
      the complete COCO; on 63 of its photographs it reaches a training AP of .812 in 6.5 minutes on one H100
      (benchmarks/RESULTS.md)
"""

from ml_collections import ConfigDict

from lab.systems.pose import config as shape
from lab.task import ConfigError


def get_config(variant: str = '') -> ConfigDict:
  """'': the embedded sample; 'coco': the full network; 'smoke': the tests' size."""
  config = shape.get_config()
  if variant == 'coco':
    config.total_steps = 180_000        # about 100 epochs of the 56,600 pictures with labelled people
    config.optim.update({'learning_rate': 5e-4, 'warmup_steps': 1000, 'ema': 0.999})
    config.model.norm = 'group'         # from scratch the network needs it; weights of a VGG go in by init_from
    config.log_steps = 100
    # by an estimate an evaluation of COCO's 5,000 pictures takes as long as some 400 updates
    config.eval_steps, config.checkpoint.steps, config.checkpoint.best = 15_000, 3000, 'AP'
    config.input.workers = 4            # one process makes no more than 570 pictures a second
    return config
  if variant not in ('', 'smoke'):
    raise ConfigError(f'configs/pose.py has no variant {variant!r}; there are coco and smoke')
  config.data.eval = 'train'          # the sample is there to be learnt by heart: scored on what it is trained on
  config.image.size = 192
  config.augment.on = False
  config.model.update({'backbone': 'small', 'dtype': 'float32', 'paf_stages': 1, 'heatmap_stages': 1, 'blocks': 1,
                       'width_first': 32, 'width': 32, 'head_first': 64, 'head': 64, 'feature': 64})
  config.target.update({'sigma_px': 4.0, 'paf_width_px': 4.0})
  config.total_steps = 1600
  config.input.update({'batch_size': 4, 'eval_batch_size': 8})
  config.optim.update({'learning_rate': 2e-3, 'warmup_steps': 30})
  config.log_steps = 20
  config.eval_steps = config.checkpoint.steps = 400
  if variant == 'smoke':
    config.image.size = 64
    config.total_steps = 12
    config.model.update({'width_first': 8, 'width': 8, 'head_first': 8, 'head': 8, 'feature': 8})
    config.optim.warmup_steps = 2
    config.input.update({'batch_size': 4, 'eval_batch_size': 8})
    config.log_steps = 1
    config.eval_steps = config.checkpoint.steps = 4
  config.checkpoint.best = 'AP'
  return config
