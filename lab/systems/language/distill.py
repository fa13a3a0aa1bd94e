"""Distillation: a student learns to fill gaps from what a deeper model that has learnt it, its teacher, thinks of them.

Hinton et al. 2015, arXiv 1503.02531; DistilBERT: Sanh et al. 2019, 1910.01108. The teacher is a run of objective 'mlm'.
Its weights lie among the parameters, below teacher/, and are frozen: a checkpoint has all that the next step needs, and
the run may be deleted once the student's has begun.
"""

import json
import os
import re

import jax
import jax.numpy as jnp
from data_pipelines import tokens
from ml_collections import ConfigDict

from lab.config import choice
from lab.nn import losses
from lab.systems.language import config as shape, model, objectives
from lab.task import ConfigError

PREFIX = 'teacher'           # of its parameters' paths
FILE = 'teacher.json'        # its configuration, as the student's run keeps it
FROZEN = f'^{PREFIX}/'
# of config.model: what has to be alike for a layer of the teacher to be one of the student
ALIKE = ('width', 'heads', 'hidden', 'activation', 'norm', 'embed_norm', 'bias', 'qk_norm', 'positions', 'types',
         'tied', 'transform')


def find(config) -> ConfigDict | None:
  """The teacher's configuration, from its run or as the student's run has kept it; None without a teacher.

  Raises ConfigError where there is none, where it fills no gaps, or where another version of the lab wrote it.
  """
  if not config.distill.teacher:
    return None
  kept = os.path.join(config.assets, FILE) if config.assets else ''
  path = kept if os.path.exists(kept) else os.path.join(_folder(config), 'config.json')
  try:
    with open(path, encoding='utf-8') as f:
      found = json.load(f)
    good = (found['task'], found['objective']) == (config.task, 'mlm') and set(found['model']) == set(config.model)
  except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
    raise _wrong(config, 'teacher', f'the folder of a run, or RUN:STEP; {path} can\'t be read ({type(e).__name__})'
                 ) from None
  if not good:
    raise _wrong(config, 'teacher', f'a run of this version of the lab with objective = mlm; {path} is of another')
  return ConfigDict(found)


def check(config, teacher) -> None:
  """Raises ConfigError for settings of the section `distill` that can't run, or that nothing would read."""
  d, default = config.distill, shape.get_config().distill
  choice(config, 'distill.begin', ('layers', 'afresh'))
  if teacher is None:
    for key in d:
      if d[key] != default[key]:
        raise _wrong(config, key, f'{default[key]!r}, for distill.teacher is not set')
    return
  if config.objective != 'mlm':
    raise _wrong(config, 'teacher', f'\'\', for objective = {config.objective}: only mlm learns from a teacher')
  for key, good, what in (('temperature', d.temperature > 0, 'more than 0'), ('kl', d.kl > 0, 'more than 0'),
                          ('states', d.states >= 0, '0 or more')):
    if not good:
      raise _wrong(config, key, what)
  if config.data.length > teacher.data.length:
    raise ConfigError(f'config.data.length = {config.data.length}: expected at most the teacher\'s, '
                      f'{teacher.data.length}')
  if d.states and teacher.model.width != config.model.width:
    raise _wrong(config, 'states', f'0: the teacher is {teacher.model.width} wide, the student {config.model.width}')
  if d.begin == 'layers' and not config.continue_from:
    if why := _unlike(config, teacher):
      raise _wrong(config, 'begin', f'\'afresh\', for {why}')
    if config.init_from:
      raise ConfigError(f'config.init_from = {config.init_from!r}: expected \'\', for distill.begin = \'layers\' takes '
                        'the student from the teacher')


def settle(config) -> None:
  """Sets what follows from distill.teacher: where the core finds weights (init_parts), and that they do not learn.

  Doing it twice changes nothing. Raises ConfigError where init_parts says otherwise.
  """
  d = config.distill
  if not d.teacher:
    return
  parts = ((PREFIX, d.teacher),)
  if d.begin == 'layers' and not config.continue_from:
    parts = (('', d.teacher), *parts)
  if config.init_parts not in ((), parts):
    raise ConfigError(f'config.init_parts = {config.init_parts!r}: expected (), for distill.teacher sets it')
  config.init_parts = parts
  if FROZEN not in config.optim.frozen.split('|'):
    config.optim.frozen = '|'.join(filter(None, (config.optim.frozen, FROZEN)))


def make(config, teacher, words: tokens.Tokenizer | None, vocabulary: int) -> model.Language:
  """The teacher's network. Raises ConfigError unless its words are the student's, `words`; None: ids without words.

  A run that has kept its teacher's configuration has been checked when it began.
  """
  if not (config.assets and os.path.exists(os.path.join(config.assets, FILE))):
    path = os.path.join(_folder(config), 'assets', tokens.FILE)
    theirs = tokens.load(path) if os.path.exists(path) else None
    if (words and words.fingerprint) != (theirs and theirs.fingerprint):
      raise _wrong(config, 'teacher', f'a run with the tokenizer of data.dir = {config.data.dir!r}; {path} is another')
  teacher = teacher.copy_and_resolve_references()
  teacher.model.attention = config.model.attention      # where the student learns there may be no kernel
  teacher.data.documents = config.data.documents        # it reads the student's windows
  return model.make(teacher, vocabulary, 0)


def empty(net, key, batch):
  """Zeros in place of the teacher's weights, which init_parts brings."""
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(net.init, key, **batch)['params'])


def masked(net, teacher, d, params, batch, rngs):
  """'mlm' with a teacher: kl T^2 KL(teacher || student) + cross-entropy + states (1 - cosine of the last states).

  The first two are means over the masked places, both distributions softened by T = d.temperature; the third is one
  over the tokens that are no padding. As `objectives.masked`, and sums of mlm (the cross-entropy), kl (in nats, without
  its factors) and cosine.
  """
  inputs = [batch[k] for k in ('ids', 'segments', 'places')]
  theirs = {'params': jax.lax.stop_gradient(params[PREFIX])}
  goal_states, goal = teacher.apply(theirs, *inputs, method='both')
  states, logits = net.apply({'params': params}, *inputs, True, method='both', rngs=rngs)
  weights = batch['weights'] * batch['mask'][:, None]
  terms, sums = objectives.counted(*objectives.judged(logits, batch['labels']), batch, 'mlm')
  apart, count = (losses.kl(goal, logits, d.temperature) * weights).sum(), weights.sum()
  terms['kl'], sums['kl'] = (d.kl * d.temperature**2 * apart, count), (apart, count)
  sums['mlm'] = terms['mlm']
  if d.states:
    real = (batch['segments'] > 0) * batch['mask'][:, None]
    near, count = (cosine(goal_states, states) * real).sum(), real.sum()
    terms['states'], sums['cosine'] = (d.states * (count - near), count), (near, count)
  return terms, sums


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
  """[..., D] and [..., D] -> f32[...]; 0 where one of them is 0, and a gradient without NaN there."""
  a, b = (x.astype(jnp.float32) for x in (a, b))
  a, b = (x * jax.lax.rsqrt(jnp.maximum((x * x).sum(-1, keepdims=True), 1e-16)) for x in (a, b))
  return (a * b).sum(-1)


def _unlike(config, teacher) -> str:
  """Why the student can't begin with layers of the teacher, or ''."""
  here, there = ({**m, 'hidden': m['hidden'] or 4 * m['width']} for m in (config.model, teacher.model))
  for key in ALIKE:
    if here[key] != there[key]:
      return f'model.{key} of the teacher is {there[key]!r} and the student\'s {here[key]!r}'
  if here['positions'] == 'learned' and config.data.length != teacher.data.length:
    return f'the teacher has learnt {teacher.data.length} positions and the student has {config.data.length}'
  if there['layers'] % here['layers']:
    return f'the teacher\'s {there["layers"]} layers are no multiple of the student\'s {here["layers"]}'
  return ''


def _folder(config) -> str:
  return re.sub(r':(best|latest|\d+)$', '', config.distill.teacher)


def _wrong(config, key, what) -> ConfigError:
  return ConfigError(f'config.distill.{key} = {config.distill[key]!r}: expected {what}')
