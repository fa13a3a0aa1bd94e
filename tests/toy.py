"""A task of one matrix on numbers in TFRecords: everything the core does, in a second."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from data_pipelines import pipeline
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from lab import config as core
from lab.task import Task


def get_config(variant: str = '') -> ConfigDict:
  """Twenty steps on the records in config.data.dir."""
  config = core.core()
  config.task = 'tests.toy'
  config.data = ConfigDict({'dir': os.environ.get('TOY_DATA', ''), 'train': 'train', 'eval': 'eval'})
  config.poison = -1             # step whose loss is made infinite
  config.noise = 0.1             # of the loss, by the step's key
  config.eval_times = 1          # an evaluation reads its records so many times
  config.total_steps = 20
  config.log_steps = 1
  config.eval_steps = 5
  config.input.batch_size = config.input.eval_batch_size = 8
  config.input.threads = 2
  config.optim.warmup_steps = 3
  config.optim.ema = 0.9
  config.checkpoint.steps = 5
  config.checkpoint.best = '-error'
  return config


def write(folder: str, sizes=(('train', 30), ('eval', 13)), features: int = 4) -> str:
  """Records (x f32[features], y f32) in two shards a split."""
  tf = pipeline.tensorflow()
  draw = np.random.default_rng(0)
  for split, size in sizes:
    parts = np.array_split(np.arange(size), 2)
    for shard, part in enumerate(parts):
      with tf.io.TFRecordWriter(os.path.join(folder, f'{split}-{shard}.tfrecord')) as w:
        for _ in part:
          x = draw.standard_normal(features).astype(np.float32)
          w.write(tf.io.serialize_tensor(np.append(x, x.sum() + 0.5).astype(np.float32)).numpy())
  return folder


def shards(folder: str, split: str) -> tuple[str, ...]:
  """The files of a split, in order."""
  return tuple(sorted(pipeline.tensorflow().io.gfile.glob(os.path.join(folder, f'{split}-*.tfrecord'))))


def source(folder: str, split: str, size: int, noise: float = 0.0) -> pipeline.Source:
  """The split as the pipeline sees it."""
  tf = pipeline.tensorflow()

  def decode(serialized):
    v = tf.ensure_shape(tf.io.parse_tensor(serialized, tf.float32), [5])
    return {'x': v[:4], 'y': v[4]}

  def augment(example, seed):
    return {**example, 'x': example['x'] + noise * tf.random.stateless_normal([4], seed)}
  return pipeline.Source(shards(folder, split), decode, augment, size)


def make_task(config) -> Task:
  """y = x @ w + b, squared error; 'big' is there to be sharded."""
  def init(key, batch):
    del batch
    return {'dense': {'kernel': jax.random.normal(key, (4, 8)) * 0.1, 'bias': jnp.zeros(8)}}, {'error': jnp.zeros(())}

  def error(params, batch):
    y = (batch['x'] @ params['dense']['kernel'] + params['dense']['bias'][None]).sum(-1)
    return batch['mask'] * jnp.square(y - batch['y'])

  def loss(params, stats, batch, key, step):
    e = error(params, batch) * (1 + config.noise * jax.random.uniform(key, batch['y'].shape))
    total, weight = e.sum(), batch['mask'].sum()
    terms = {'error': (total * jnp.where(step == config.poison, jnp.inf, 1), weight)}
    return terms, ({'error': 0.9 * stats['error'] + 0.1 * total / weight}, {'error': (total, weight)})

  def predict(params, stats, batch, key):
    del stats, key
    return {'y': (batch['x'] @ params['dense']['kernel'] + params['dense']['bias'][None]).sum(-1)}

  sizes = {'train': 30, 'eval': 13}

  def split_source(split):
    if split == 'eval' and os.environ.get('TOY_DEFECT'):
      raise TypeError('a defect')      # on whichever process has it
    got = source(config.data.dir, config.data[split], sizes[split], 0.01 if split == 'train' else 0.0)
    times = config.eval_times if split == 'eval' else 1
    return got._replace(read=times * got.read, size=times * got.size)

  return Task(
      init=init, loss=loss, measure=lambda p, s, b: {'error': (error(p, b).sum(), b['mask'].sum())}, predict=predict,
      source=split_source,
      records=lambda outputs, batch: ({'y': float(y)} for y in outputs['y']),
      rules=(('kernel', P(None, 'fsdp'), 'columns are independent'),))
