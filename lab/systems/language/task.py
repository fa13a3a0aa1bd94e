"""Language: masked words, next words or labels of texts, by one body."""

import functools
import json
import os

import jax.numpy as jnp
from data_pipelines import DataError, corpus, glue, text_inputs, tokens
from jax.sharding import PartitionSpec as P

from lab.config import choice, flatten
from lab.nn import transformer
from lab.systems.language import distill, model, objectives, text
from lab.task import ConfigError, Task

VERBS = {'mlm': ('fill',), 'gpt': ('generate', 'score'), 'classify': ('classify',)}
# Where a kernel that XLA made for a product lost against cuBLAS's, neither bias nor GELU are made part of that: passes
# more. Shape.cublas in model.py counts on it
CUBLAS = {'xla_gpu_enable_triton_gemm': False}
CHOICES = {
    'objective': tuple(VERBS),
    'data.documents': ('apart', 'together'),
    'data.sample': ('cola', 'sst2'),
    'model.activation': tuple(transformer.ACTIVATIONS),
    'model.norm': transformer.NORMS,
    'model.positions': ('learned', 'sinusoid', 'rope'),
    'model.pool': ('cls', 'mean', 'last'),
    'model.attention': ('auto', 'plain', 'flash'),
    'model.dtype': ('float32', 'bfloat16'),
    'model.remat_keep': tuple(transformer.KEPT),
}


def make_task(config) -> Task:
  """The language task of a configuration. Raises ConfigError for settings that don't fit together."""
  check(config)
  teacher = distill.find(config)
  distill.check(config, teacher)
  distill.settle(config)
  data = Data(config)
  network = functools.cache(lambda: model.make(config, data.vocabulary(), len(data.labels())))
  mentor = functools.cache(lambda: distill.make(config, teacher, data.tokenizer(), data.vocabulary()))
  judge = objectives.OBJECTIVES[config.objective]

  def init(key, batch):
    net, batch = network(), {k: batch[k] for k in ('ids', 'segments', 'places') if k in batch}
    if config.objective == 'mlm' and 'places' not in batch:          # an input of --mode=predict
      batch['places'] = jnp.zeros((len(batch['ids']), 1), jnp.int32)
    params = net.init(key, **batch)['params']
    return {**params, distill.PREFIX: distill.empty(mentor(), key, batch)} if teacher else params, {}

  def loss(params, stats, batch, key, step):
    del step
    if teacher:
      terms, sums = distill.masked(network(), mentor(), config.distill, params, batch, {'dropout': key})
    else:
      terms, sums = judge(network(), params, batch, {'dropout': key})
    return terms, (stats, {k: v for k, v in sums.items() if not k.startswith('confusion/')})

  def measure(params, stats, batch):
    del stats
    terms, sums = judge(network(), params, batch)
    return {'loss': terms[config.objective], **sums}

  def predict(params, stats, batch, key):
    del stats
    return text.outputs(network(), config, params, batch, key)

  def files():
    if not teacher:
      return data.files()
    mentor()      # a teacher that doesn't fit is told before anything is kept
    return data.files() | {distill.FILE: teacher.to_json()}

  models = [c.model for c in (config, teacher) if c]
  return Task(init=init, loss=loss, measure=measure, predict=predict, source=data.source,
              rules=rules(config.objective, *models),
              finish=lambda totals: objectives.finish(config.objective, data.bytes(), totals),
              records=lambda outputs, batch: text.records(config, data, outputs, batch),
              picture=lambda outputs, batch: text.panels(config, data, outputs, batch),
              inputs=lambda source, output, stop: text_inputs.texts(
                  source, data.tokenizer(), config.predict.verb or VERBS[config.objective][0], config.data.length),
              files=files, gpu=CUBLAS)


class Data:
  """The data set of a configuration, or what a run keeps of it; read when it is first asked for."""

  def __init__(self, config):
    self.config, self.kept = config, config.assets
    for name in ('folder', 'vocabulary', 'labels', 'tokenizer', 'facts'):
      setattr(self, name, functools.cache(getattr(self, f'_{name}')))

  def source(self, split: str):
    """The split as the pipeline reads it."""
    c = self.config
    if c.objective == 'classify':
      return glue.source(self.folder(), c.data[split], length=c.data.length, labels=self.labels())
    return corpus.source(self.folder(), c.data[split], c.objective, length=c.data.length,
                         documents=c.data.documents, share=c.mlm.share)

  def bytes(self) -> int:
    """Of the text of the evaluation split; 0 where that is not known."""
    c = self.config
    if c.objective != 'gpt' or self.kept and c.data.dir != 'sample' and not os.path.isdir(c.data.dir):
      return 0
    return self.facts()['splits'].get(c.data.eval, {}).get('bytes', 0)

  def files(self) -> dict[str, str]:
    """What a run keeps, so that its checkpoints can be used without the data set."""
    found = {'labels.json': json.dumps(self.labels())} if self.config.objective == 'classify' else {}
    words = self.tokenizer()
    return found | ({'tokenizer.json': words.json()} if words else {})

  def _folder(self) -> str:
    c = self.config
    if c.data.dir != 'sample':
      return c.data.dir
    if c.objective == 'classify':
      return glue.sample(c.data.sample)
    return corpus.sample(c.objective, c.data.length)

  def _facts(self) -> dict:
    return corpus.facts(self.folder())

  def _tokenizer(self) -> tokens.Tokenizer | None:
    if self.kept:
      path = os.path.join(self.kept, 'tokenizer.json')
      return tokens.load(path) if os.path.exists(path) else None
    if self.config.objective == 'classify':
      return glue.tokenizer(self.folder())
    return corpus.tokenizer(self.folder()) if self.facts()['fingerprint'] else None      # its ids came without one

  def _vocabulary(self) -> int:
    words = self.tokenizer()
    return words.size if words else self.facts()['vocabulary']

  def _labels(self) -> tuple[str, ...]:
    if self.config.objective != 'classify':
      return ()
    if self.config.data.labels:
      return tuple(self.config.data.labels)
    if self.kept:
      path = os.path.join(self.kept, 'labels.json')
      try:
        with open(path, encoding='utf-8') as f:
          found = json.load(f)
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
          raise ValueError('no list of names')
        return tuple(found)
      except (OSError, ValueError, RecursionError) as e:
        raise DataError(f'{path}: the labels of the run can\'t be read: {e}') from None
    return glue.labels(self.folder())


def check(config) -> None:
  """Raises ConfigError for settings that can't run, before any device or file is touched."""
  for key, options in CHOICES.items():
    choice(config, key, options)
  flat, m = flatten(config), config.model
  if config.predict.verb:
    choice(config, 'predict.verb', VERBS[config.objective])
  for key, least in (('data.length', 4), ('model.width', 1), ('model.layers', 1), ('model.heads', 1),
                     ('model.hidden', 0), ('model.types', 0), ('model.unroll', 1), ('predict.top', 1),
                     ('predict.tokens', 1), ('predict.temperature', 0), ('predict.top_k', 0)):
    if flat[key] < least:
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least {least}')
  if m.width % m.heads or m.positions == 'rope' and m.width // m.heads % 2:
    raise ConfigError(f'config.model.width = {m.width}: expected a multiple of model.heads = {m.heads}' +
                      ', an even one for rope' * (m.positions == 'rope'))
  for key in ('model.dropout', 'model.attention_dropout'):
    if not 0 <= flat[key] < 1:
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least 0 and less than 1')
  for key in ('mlm.share', 'predict.top_p'):
    if not 0 < flat[key] <= 1:
      raise ConfigError(f'config.{key} = {flat[key]}: expected more than 0 and at most 1')
  if m.remat_keep != 'nothing' and not m.remat:
    raise ConfigError(f"config.model.remat_keep = {m.remat_keep!r}: expected 'nothing', for model.remat is not set")
  if config.objective != 'classify' and m.causal != (config.objective == 'gpt'):
    raise ConfigError(f'config.model.causal = {m.causal}: expected {not m.causal} for objective = {config.objective}')
  if config.objective == 'classify' and m.causal and m.pool == 'cls':
    raise ConfigError("config.model.pool = 'cls': the first token of a causal model sees no other; expected last or "
                      'mean')


def rules(objective, *models):
  """Which axis of which array may be split over devices; only what these sections config.model have."""
  found = [
      (r'(^|/)(tokens|head)$', P(('fsdp', 'tensor')), 'rows are words, independent of each other'),
      (r'(^|/)(tokens|head)$', P(None, ('fsdp', 'tensor')), 'features, where so many devices do not divide the rows'),
      (r'blocks/(attention/qkv|mlp/up)/kernel$', P(None, 'fsdp', 'tensor'), 'heads and hidden units are independent'),
      (r'blocks/(attention/out|mlp/down)/kernel$', P(None, 'tensor', 'fsdp'), 'takes what the tensor axis holds apart'),
  ]
  if any(m.positions == 'learned' for m in models):
    found.append((r'(^|/)positions$', P(None, ('fsdp', 'tensor')), 'features are independent'))
  if objective == 'mlm' and any(m.transform for m in models):
    found.append((r'(^|/)transform/kernel$', P(None, ('fsdp', 'tensor')), 'features are independent'))
  if objective == 'classify' and any(m.pooler for m in models):
    found.append((r'(^|/)pooler/kernel$', P(None, ('fsdp', 'tensor')), 'features are independent'))
  return tuple(found)
