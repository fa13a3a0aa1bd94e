"""Is this sentence acceptable? A body that has learnt to fill gaps, fine-tuned on CoLA.

  launch/run.sh --config=configs/cola.py --workdir=runs/cola --config.init_from=runs/mlm
      sentences of the shipped book, half of them with two neighbouring words exchanged; the body of configs/mlm.py;
      2 CPU cores, 4 minutes: MCC .358
  launch/run.sh --config=configs/cola.py:full --workdir=runs/cola2 --config.init_from=RUN --config.data.dir=data/cola
      CoLA, for an accelerator; its score is `mcc` on the 527 + 516 sentences of GLUE's dev set
  launch/run.sh --config=configs/cola.py:minilm --workdir=runs/cola3 --config.init_from=F --config.data.dir=data/cola
      the same from a BERT of 6 layers 384 wide, such as MiniLM, whose weights `python -m lab.systems.language.weights
      import --length=64` has turned into F, a .safetensors file; one H200, 35 s: MCC .323 on the dev set (median of
      three seeds)

  python -m data_pipelines.prepare cola --raw_dir=COLA --out_dir=data/cola --tokenizer=data/corpus
"""

from ml_collections import ConfigDict

from lab.systems.language import config as shape
from lab.task import ConfigError

VARIANTS = ('smoke', 'full', 'minilm')


def get_config(variant: str = '') -> ConfigDict:
  """'': shipped text; 'smoke': the tests' size; 'full' and 'minilm': CoLA on an accelerator."""
  config = shape.get_config()
  config.objective = 'classify'
  config.checkpoint.best = 'mcc'
  config.optim.update({'name': 'adamw', 'learning_rate': 5e-5, 'decay': 0.01, 'decay_not': '(tokens|positions|types)$'})
  config.model.dropout = 0.1
  if variant in ('full', 'minilm'):
    if variant == 'minilm':
      config.data.length = 64
      config.model.update({'width': 384, 'norm': 'post', 'norm_eps': 1e-12, 'embed_norm': True, 'types': 2,
                           'pool': 'mean', 'attention_dropout': 0.1})
    config.model.unroll = 6
    config.total_steps, config.optim.warmup_steps = 1608, 96     # six epochs
    config.data.eval = 'dev'
    config.input.update({'batch_size': 32, 'eval_batch_size': 128})
    config.log_steps, config.eval_steps, config.checkpoint.steps = 20, 134, 134
    return config
  if variant and variant not in VARIANTS:
    raise ConfigError(f'configs/cola.py has no variant {variant!r}; there are {", ".join(VARIANTS)}')
  config.data.length = 64
  config.model.update({'width': 128, 'layers': 2, 'heads': 4, 'positions': 'rope', 'pool': 'mean', 'dtype': 'float32'})
  config.optim.learning_rate = 1e-3
  config.total_steps, config.optim.warmup_steps = 1000, 60
  config.input.eval_batch_size = 128
  config.log_steps, config.eval_steps, config.checkpoint.steps = 50, 250, 250
  if variant == 'smoke':
    config.data.length = 16
    config.model.update({'width': 32, 'heads': 2, 'dropout': 0.0})
    config.optim.learning_rate, config.optim.warmup_steps = 1e-2, 0
    config.total_steps, config.log_steps, config.eval_steps, config.checkpoint.steps = 12, 1, 4, 4
    config.input.update({'batch_size': 4, 'eval_batch_size': 512})
  return config
