"""Multi-person pose, bottom-up: the network's maps on the device, people and their score on the host."""

import functools

import jax.numpy as jnp
import numpy as np
from data_pipelines import coco, inputs
from jax.sharding import PartitionSpec as P

from lab.config import choice, flatten
from lab.systems.pose import assemble, decode, draw, losses, model, score, skeleton, targets
from lab.task import ConfigError, Task

RULES = (
    (r'(paf|heatmap)\d+/out/kernel$', P(None, ('fsdp', 'tensor')), 'a 1x1 convolution; its outputs are independent'),
    (r'kernel$', P(None, None, None, ('fsdp', 'tensor')), 'output channels of a convolution are independent'),
)


def make_task(config) -> Task:
  """The pose task of a configuration. Raises ConfigError for settings that don't fit together."""
  check(config)
  stride = model.stride(config)
  channels = len(skeleton.KEYPOINTS) + config.target.background
  net = model.make(config.model, len(skeleton.limbs(config.target.redundant_limbs)), channels)

  def init(key, batch):
    return net.init(key, batch['image'])['params'], {}

  def labels(batch):
    return targets.make(batch['keypoints'], batch['ignore'], stride, config.target)

  def loss(params, stats, batch, key, step):
    del step
    pafs, heatmaps = net.apply({'params': params}, batch['image'], train=True, rngs={'dropout': key})
    terms, sums = losses.training_loss(pafs, heatmaps, labels(batch), batch['mask'], config.loss)
    return terms, (stats, sums)

  def measure(params, stats, batch):
    del stats
    pafs, heatmaps = net.apply({'params': params}, batch['image'])
    return losses.training_loss(pafs, heatmaps, labels(batch), batch['mask'], config.loss)[1]

  def predict(params, stats, batch, key):
    del stats, key
    def maps(image):
      pafs, heatmaps = net.apply({'params': params}, image)
      return pafs[-1], heatmaps[-1]
    paf, heatmap = maps(batch['image'])
    if config.decode.flip:
      paf, heatmap = decode.merge_flipped(paf, heatmap, *maps(batch['image'][:, :, ::-1]))
    heat = jnp.clip(heatmap[..., :len(skeleton.KEYPOINTS)].max(-1), 0, 1)
    return {'found': decode.candidates(paf, heatmap, config.image.size, config.decode),
            'heat': (255 * jnp.nan_to_num(heat)).astype(jnp.uint8)}

  def source(split):
    train = split == 'train'
    return coco.source(config.data.dir, config.data[split], config.image,
                       config.augment if train and config.augment.on else None, stride, config.data.people,
                       config.data.decoded_gib if train else 0.0, max(config.input.workers, 1))

  return Task(init=init, loss=loss, measure=measure, predict=predict, source=source, rules=RULES, score=score.score,
              records=functools.partial(records, config.decode), picture=functools.partial(picture, config.decode),
              inputs=functools.partial(inputs.pictures, size=config.image.size), lines=lines)


def check(config) -> None:
  """Raises ConfigError for settings that can't run, before any device or file is touched."""
  choice(config, 'model.backbone', tuple(model.STRIDE))
  choice(config, 'model.preprocess', tuple(model.PREPROCESS))
  choice(config, 'model.norm', ('none', 'group'))
  choice(config, 'model.dtype', ('float32', 'bfloat16'))
  choice(config, 'target.paf', ('hard', 'gaussian'))
  choice(config, 'decode.matching', ('greedy', 'hungarian'))
  for key in ('train', 'eval'):
    choice(config, f'data.{key}', ('train', 'val'))
  multiple = model.MULTIPLE[config.model.backbone]
  if config.image.size % multiple or config.image.size < 1:
    raise ConfigError(f'config.image.size = {config.image.size}: {config.model.backbone} takes multiples of {multiple}')
  flat = flatten(config)
  for key in ('model.paf_stages', 'model.heatmap_stages', 'model.blocks', 'data.people', 'decode.peaks',
              'decode.samples'):
    if flat[key] < 1:
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least 1')
  if config.data.decoded_gib < 0:
    raise ConfigError(f'config.data.decoded_gib = {config.data.decoded_gib}: expected at least 0')
  for key in ('target.sigma_px', 'target.paf_width_px', 'target.paf_s_px2', 'augment.scale_min'):
    if flat[key] <= 0:
      raise ConfigError(f'config.{key} = {flat[key]}: expected more than 0')
  if not 0 <= config.model.dropout < 1:
    raise ConfigError(f'config.model.dropout = {config.model.dropout}: expected at least 0 and less than 1')
  if config.augment.scale_min > config.augment.scale_max:
    raise ConfigError(f'config.augment.scale_min = {config.augment.scale_min} is more than scale_max')
  cells = config.image.size // model.stride(config)
  if config.decode.peaks > cells**2:
    raise ConfigError(f'config.decode.peaks = {config.decode.peaks}: there are only {cells} x {cells} cells')


def _people(options, outputs, batch, i) -> list[dict]:
  found = outputs['found']
  return assemble.people(found.position[i], found.score[i], found.limb[i], batch['matrix'][i], options)


def records(options, outputs, batch):
  """A record a picture: its id, size, the people found and, where they are known, the labelled ones."""
  for i, image_id in enumerate(batch['image_id']):
    people = [{'keypoints': p['keypoints'].ravel().tolist(), 'score': float(p['score'])}
              for p in _people(options, outputs, batch, i)]
    record = {'image_id': int(image_id), 'size': batch['size'][i].tolist(), 'people': people}
    if 'truth' in batch:
      record['truth'] = [
          {'id': int(j), 'keypoints': batch['truth'][i][j].ravel().tolist(),
           'num_keypoints': int(batch['num'][i][j]), 'area': float(batch['areas'][i][j]),
           'bbox': batch['boxes'][i][j].tolist(), 'iscrowd': int(batch['crowd'][i][j])}
          for j in np.flatnonzero(batch['person'][i])]
    else:
      record['name'] = batch['name'][i]
    yield record


def lines(record):
  """COCO's results format, a line a person, with the file's name beside it."""
  for person in record['people']:
    yield {'image_id': record['image_id'], 'file_name': record['name'], 'category_id': 1,
           'keypoints': [round(v, 3) for v in person['keypoints']], 'score': round(person['score'], 5)}


def picture(options, outputs, batch):
  """name -> drawn picture: the people found on a photograph; for a labelled batch beside the true ones and the heat."""
  out = {}
  for i, image_id in enumerate(batch['image_id']):
    people = _people(options, outputs, batch, i)
    if 'picture' in batch:
      out[batch['name'][i]] = draw.people(batch['picture'][i], people)
    else:
      out[f'{int(image_id):012d}'] = draw.panel(batch['image'][i], batch['keypoints'][i], people, batch['matrix'][i],
                                                outputs['heat'][i])
  return out
