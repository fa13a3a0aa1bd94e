"""Is this review kind? A body that has learnt to fill gaps, fine-tuned on SST-2.

  launch/run.sh --config=configs/sst2.py --workdir=runs/sst2 --config.init_from=runs/mlm
      who wrote this, Stoker or Shakespeare? on shipped text; the body of configs/mlm.py; 2 CPU cores, 4 minutes: 94 %
  launch/run.sh --config=configs/sst2.py:full --workdir=runs/sst2b --config.init_from=RUN --config.data.dir=data/sst2
      SST-2, for an accelerator; its score is `accuracy` on GLUE's 872 dev sentences
  launch/run.sh --config=configs/sst2.py:minilm --workdir=runs/sst2c --config.init_from=F --config.data.dir=data/sst2
      the same from MiniLM's weights, see configs/cola.py; one H200, 59 s: .900 (median of three seeds)

  python -m data_pipelines.prepare sst2 --raw_dir=SST2 --out_dir=data/sst2 --tokenizer=data/corpus
"""

from ml_collections import ConfigDict

from configs import cola
from lab.task import ConfigError


def get_config(variant: str = '') -> ConfigDict:
  """'': shipped text; 'smoke': the tests' size; 'full' and 'minilm': SST-2 on an accelerator."""
  if variant and variant not in cola.VARIANTS:
    raise ConfigError(f'configs/sst2.py has no variant {variant!r}; there are {", ".join(cola.VARIANTS)}')
  config = cola.get_config(variant)
  config.data.sample = 'sst2'
  config.checkpoint.best = 'accuracy'
  if variant in ('full', 'minilm'):
    config.data.train = 'train+validation'      # all that GLUE gives for training; `dev` is what is reported
    config.total_steps, config.optim.warmup_steps = 3157, 190    # three epochs
    config.optim.learning_rate = 6e-5
    config.input.batch_size = 64
    config.eval_steps = config.checkpoint.steps = 250
    if variant == 'minilm':
      config.model.update({'pool': 'cls', 'pooler': True})
  return config
