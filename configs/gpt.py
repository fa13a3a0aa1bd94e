"""GPT learns to go on.

  launch/run.sh --config=configs/gpt.py --workdir=runs/gpt
      tiny Shakespeare by characters: 4 layers 128 wide, 64 characters seen, 2000 updates of 12; 2 CPU cores, 6 minutes:
      1.756 nats a character on its validation part
  launch/run.sh --config=configs/gpt.py:shakespeare --workdir=runs/shakespeare
      6 layers 384 wide, 256 characters seen; one H200, 94 s with start and compilation: 1.435 nats a character
  launch/run.sh --config=configs/gpt.py:full --workdir=runs/gpt-full --config.data.dir=data/corpus
      GPT-2's 124 M parameters on windows of 1024 tokens, for an accelerator; on 10 MB of books, speeches and articles
      1.598 bits a byte of unseen ones in 2 minutes (benchmarks/RESULTS.md)
  launch/run.sh --config=configs/gpt.py:modern --workdir=runs/gpt-modern --config.data.dir=data/corpus
      the same with rotary positions, normed queries and keys, squared ReLU, no biases, and Muon for the matrices
  launch/run.sh --config=configs/gpt.py:xl --workdir=runs/gpt-xl --config.data.dir=data/corpus --distributed
      1.2 billion parameters in 24 layers of 2048, split over all devices, 2048 tokens seen; GPT-3 XL's rate and batch
      (arXiv 2005.14165, table 2.1), 20 tokens a parameter; never trained here, but compiled for pods (docs/pods.md)

  python -m data_pipelines.prepare corpus --raw_dir=TEXTS --out_dir=data/corpus --tokenizer=VOCABULARY --length=1024
"""

from ml_collections import ConfigDict

from lab.systems.language import config as shape
from lab.task import ConfigError

VARIANTS = ('smoke', 'shakespeare', 'full', 'modern', 'xl')


def get_config(variant: str = '') -> ConfigDict:
  """'': Shakespeare on a CPU; 'smoke': the tests' size; the others are for an accelerator."""
  config = shape.get_config()
  config.objective = 'gpt'
  config.checkpoint.best = '-loss'
  config.model.update({'causal': True, 'transform': False})
  config.optim.update({'name': 'adamw', 'learning_rate': 1e-3, 'end_rate': 1e-4, 'decay': 0.1, 'beta2': 0.99})
  if variant in ('full', 'modern'):
    config.data.length = 1024
    config.model.update({'width': 768, 'layers': 12, 'heads': 12, 'dropout': 0.0, 'activation': 'gelu_tanh',
                         'unroll': 12})
    config.total_steps, config.optim.warmup_steps = 20_000, 700
    config.optim.update({'learning_rate': 6e-4, 'end_rate': 6e-5, 'beta2': 0.95})
    config.input.batch_size = config.input.eval_batch_size = 32
    config.log_steps, config.eval_steps, config.checkpoint.steps = 100, 2000, 1000
    if variant == 'modern':
      config.model.update({'positions': 'rope', 'qk_norm': True, 'activation': 'relu2', 'bias': False})
      config.optim.update({'name': 'muon', 'learning_rate': 3e-3, 'beta2': -1.0})
      config.optim.second.update({'params': '(tokens|norm)', 'name': 'adamw'})
    return config
  if variant == 'xl':
    config.data.length = 2048
    config.model.update({'width': 2048, 'layers': 24, 'heads': 16, 'dropout': 0.0, 'activation': 'gelu_tanh',
                         'positions': 'rope', 'remat': True})
    config.mesh.update({'data': 1, 'fsdp': -1})
    config.total_steps, config.optim.warmup_steps = 25_000, 500
    config.optim.update({'learning_rate': 2e-4, 'end_rate': 2e-5, 'beta2': 0.95})
    config.input.batch_size = config.input.eval_batch_size = 512
    config.log_steps, config.eval_steps, config.checkpoint.steps = 100, 1000, 500
    return config
  if variant and variant not in VARIANTS:
    raise ConfigError(f'configs/gpt.py has no variant {variant!r}; there are {", ".join(VARIANTS)}')
  if variant == 'shakespeare':     # nanoGPT's size for a GPU
    config.data.length = 256
    config.model.update({'width': 384, 'layers': 6, 'heads': 6, 'bias': False, 'positions': 'rope', 'dropout': 0.25,
                         'attention_dropout': 0.2, 'unroll': 6})
    config.total_steps, config.optim.warmup_steps, config.optim.ema = 3000, 100, 0.998
    config.input.batch_size = config.input.eval_batch_size = 64
    config.log_steps, config.eval_steps, config.checkpoint.steps = 50, 250, 250
    return config
  config.data.length = 64
  config.model.update({'width': 128, 'layers': 4, 'heads': 4, 'dropout': 0.0, 'positions': 'rope', 'dtype': 'float32'})
  config.total_steps, config.optim.warmup_steps = 2000, 100
  config.input.update({'batch_size': 12, 'eval_batch_size': 128})
  config.log_steps, config.eval_steps, config.checkpoint.steps = 50, 500, 500
  if variant == 'smoke':
    config.data.length, config.predict.tokens = 16, 24      # drawn in three windows, each compiled by itself
    config.model.update({'width': 32, 'layers': 2, 'heads': 2})
    config.optim.learning_rate, config.optim.warmup_steps = 1e-2, 0
    config.total_steps, config.log_steps, config.eval_steps, config.checkpoint.steps = 12, 1, 4, 4
    config.input.update({'batch_size': 4, 'eval_batch_size': 512})
  return config
