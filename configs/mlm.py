"""BERT learns to fill gaps in text.

  launch/run.sh --config=configs/mlm.py --workdir=runs/mlm
      two public-domain books, 2 layers 128 wide, windows of 64 WordPieces; 2 CPU cores, minutes: 27 % of the
      masked pieces right, perplexity 53
  launch/run.sh --config=configs/mlm.py:full --workdir=runs/mlm-full --config.data.dir=data/corpus
      6 layers 768 wide, windows of 128 tokens, for an accelerator; the body of the fine-tuning recipes. On 10 MB of
      books, speeches and articles, 4000 updates: 42 % of the masked pieces right (benchmarks/RESULTS.md)
  launch/run.sh --config=configs/mlm.py:modern --workdir=runs/mlm-modern --config.data.dir=data/corpus
      the same with rotary positions, normed queries and keys, squared ReLU, and no biases
  launch/run.sh --config=configs/mlm.py:distil --workdir=runs/mlm-distil --config.data.dir=data/corpus
      3 layers learn from the 6 of runs/mlm-full, which has to be there (or --config.distill.teacher=RUN)

Distillation by hand, of the first: --config.distill.teacher=runs/mlm --config.model.layers=1, in another workdir.

  python -m data_pipelines.prepare corpus --raw_dir=TEXTS --out_dir=data/corpus --tokenizer=VOCABULARY --length=128
"""

from ml_collections import ConfigDict

from lab.systems.language import config as shape
from lab.task import ConfigError

VARIANTS = ('smoke', 'full', 'modern', 'distil')


def get_config(variant: str = '') -> ConfigDict:
  """'': shipped text; 'smoke': the tests' size; 'full', 'modern' and 'distil': for an accelerator."""
  config = shape.get_config()
  config.checkpoint.best = '-loss'
  config.optim.update({'name': 'adamw', 'learning_rate': 1e-3, 'end_rate': 5e-5, 'decay': 0.01})
  if variant in ('full', 'modern', 'distil'):
    config.total_steps, config.optim.warmup_steps = 45_000, 1000
    config.input.batch_size = config.input.eval_batch_size = 256
    config.model.unroll = 6
    config.log_steps, config.eval_steps, config.checkpoint.steps = 100, 2500, 2500
    if variant == 'modern':
      config.model.update({'positions': 'rope', 'qk_norm': True, 'activation': 'relu2', 'bias': False})
    if variant == 'distil':
      config.model.layers, config.distill.teacher, config.optim.learning_rate = 3, 'runs/mlm-full', 5e-4
      config.model.unroll = 3
    return config
  if variant and variant not in VARIANTS:
    raise ConfigError(f'configs/mlm.py has no variant {variant!r}; there are {", ".join(VARIANTS)}')
  config.data.length = 64
  config.model.update({'width': 128, 'layers': 2, 'heads': 4, 'dropout': 0.0, 'positions': 'rope', 'dtype': 'float32'})
  config.total_steps, config.optim.warmup_steps = 2000, 100
  config.optim.learning_rate = 3e-3
  config.input.eval_batch_size = 128
  config.log_steps, config.eval_steps, config.checkpoint.steps = 50, 500, 500
  if variant == 'smoke':
    config.data.length = 16
    config.model.update({'width': 32, 'heads': 2})
    config.optim.learning_rate, config.optim.warmup_steps = 1e-2, 0
    config.total_steps, config.log_steps, config.eval_steps, config.checkpoint.steps = 12, 1, 4, 4
    config.input.update({'batch_size': 4, 'eval_batch_size': 512})
  return config
