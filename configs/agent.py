"""A tree of vectors rebuilds text: words, sentences and paragraphs from one vector each.

  launch/run.sh --config=configs/agent.py --workdir=runs/agent
      made-up documents of 2 to 3 sentences; 2 CPU cores
  launch/run.sh --config=configs/agent.py:books --workdir=runs/agent-books
      Dracula, of which the last chapters are unseen; 2 CPU cores
  launch/run.sh --config=configs/agent.py:full --workdir=runs/agent-full --config.data.dir=data/books
      books, for an accelerator: 98 % of the words in sentences of unseen chapters after 17 minutes on one H200

  python -m data_pipelines.prepare books --raw_dir=BOOKS --out_dir=data/books --rows=1536,384,96 \\
      --lengths=16,24,12 --nodes=6144,384
"""

from ml_collections import ConfigDict

from lab.systems.agent import config as shape
from lab.task import ConfigError

VARIANTS = ('smoke', 'books', 'full')


def get_config(variant: str = '') -> ConfigDict:
  """'': made-up documents on a CPU; 'smoke': the tests' size; 'books': a book on a CPU; 'full': for an accelerator."""
  if variant and variant not in VARIANTS:
    raise ConfigError(f'configs/agent.py has no variant {variant!r}; there are {", ".join(VARIANTS)}')
  config = shape.get_config()
  config.checkpoint.best = 'words_in_sentences'
  config.optim.update({'name': 'adamw', 'learning_rate': 2e-3, 'end_rate': 0.0, 'warmup_steps': 100, 'decay': 1e-4})
  config.total_steps = 2000
  config.input.update({'batch_size': 1, 'eval_batch_size': 8})
  config.log_steps, config.eval_steps, config.checkpoint.steps = 50, 500, 500
  if variant == 'smoke':
    config.data.update({'rows': (64, 12), 'lengths': (12, 12), 'nodes': (96,)})    # two levels compile sooner
    config.model.update({'widths': (16, 16, 16), 'heads': 2})
    config.optim.update({'learning_rate': 1e-2, 'warmup_steps': 0})
    config.total_steps, config.log_steps, config.eval_steps, config.checkpoint.steps = 12, 1, 4, 4
    config.input.update({'batch_size': 4, 'eval_batch_size': 64})
  if variant == 'books':
    config.data.update({'dir': 'sample', 'rows': (224, 48, 16), 'lengths': (12, 20, 8), 'nodes': (640, 48)})
    config.model.update({'widths': (32, 64, 128, 192)})
  if variant == 'full':
    config.data.update({'rows': (1536, 384, 96), 'lengths': (16, 24, 12), 'nodes': (6144, 384),
                        'mixed': (0.1, 0.2, 0.3)})
    config.model.update({'widths': (128, 256, 1024, 1536), 'heads': 8, 'layers': 2, 'dtype': 'bfloat16'})
    config.optim.update({'learning_rate': 1e-3, 'warmup_steps': 500})
    config.total_steps = 36_000
    config.log_steps, config.eval_steps, config.checkpoint.steps = 100, 9000, 9000
  return config
