"""Stick people on noise, whose joints are known exactly: pictures that a small pose network learns in two minutes."""

import os

import numpy as np
from data_pipelines import images, pipeline

from configs import pose as recipe
from lab.systems.pose import draw, skeleton, task as pose

SIZE, PEOPLE = 96, 2                    # px, side of a picture; people in it at most
COUNTS = {'train': 800, 'val': 100}
EDGE = 4                                # px that every joint stays away from the border
OVERLAP = 0.15                          # of the smaller of two people's boxes: both stay visible
LINE = 3.0                              # px, width of a limb
AREA_MIN = 1200.0                       # px^2; lines have no area, so a person's is half the box, and at least this


def get_config(variant: str = ''):
  """The sample's recipe on these pictures, whose folder the environment names: one device, 450 steps."""
  del variant
  config = recipe.get_config()
  config.task = 'tests.stick_figures'
  config.data.update({'dir': os.environ.get('STICK_FIGURES', ''), 'eval': 'val', 'people': PEOPLE})
  config.image.size = SIZE
  config.target.update({'paf': 'gaussian', 'sigma_px': 2.5, 'paf_s_px2': 3.0, 'background': False,
                        'redundant_limbs': False})
  config.total_steps, config.eval_steps, config.checkpoint.steps = 450, 150, 0
  config.input.update({'batch_size': 16, 'eval_batch_size': 50})
  config.optim.update({'learning_rate': 1.5e-3, 'warmup_steps': 0, 'decay': 0.0})      # without decay, AdamW is Adam
  return config


def make_task(config):
  """The pose task itself, on another source."""
  return pose.make_task(config)._replace(source=lambda split: source(config.data.dir, config.data[split]))


def body(rng) -> np.ndarray:
  """Somebody who stands and faces us, arms and legs anyhow: f64[17, 2], (x, y), COCO's order, about 1 unit tall."""
  def along(start, length, degrees, side):
    angle = np.deg2rad(degrees)         # 0 hangs down, positive is outwards
    return np.add(start, (side * length * np.sin(angle), length * np.cos(angle)))

  at = {'nose': (0, 0.12)}
  for name, side in (('right', -1), ('left', 1)):
    at[f'{name}_eye'], at[f'{name}_ear'] = (side * 0.045, 0.07), (side * 0.085, 0.09)
    at[f'{name}_shoulder'], at[f'{name}_hip'] = shoulder, hip = (side * 0.13, 0.24), (side * 0.09, 0.55)
    upper, thigh = rng.uniform(-15, 150), rng.uniform(-10, 40)
    at[f'{name}_elbow'] = along(shoulder, 0.17, upper, side)
    at[f'{name}_wrist'] = along(at[f'{name}_elbow'], 0.16, upper + rng.uniform(-20, 90), side)
    at[f'{name}_knee'] = along(hip, 0.22, thigh, side)
    at[f'{name}_ankle'] = along(at[f'{name}_knee'], 0.22, thigh - rng.uniform(-5, 35), side)
  points = np.array([at[k] for k in skeleton.COCO_KEYPOINTS]) + rng.normal(0, 0.008, (17, 2))
  lean = np.deg2rad(rng.uniform(-12, 12))
  return points @ np.array([[np.cos(lean), np.sin(lean)], [-np.sin(lean), np.cos(lean)]])


def crowd(rng) -> np.ndarray:
  """One or two people, 45 to 70 px tall, somewhere in the picture: f32[P, 17, 3], (x, y, v)."""
  count = rng.integers(1, PEOPLE + 1)
  while True:
    people = []
    for _ in range(count):
      points = body(rng)
      points = (points - points.min(0)) * rng.uniform(45, 70) / np.ptp(points[:, 1])
      room = SIZE - 1 - 2 * EDGE - points.max(0)
      if room.min() >= 0:
        people.append(np.c_[points + EDGE + rng.uniform(0, 1, 2) * room, np.full(17, 2)])
    if len(people) == count and (count == 1 or overlap(*(box(p) for p in people)) <= OVERLAP):
      return np.array(people, np.float32)


def box(person) -> np.ndarray:
  """[17, 3] -> f64[4], (x, y, w, h)."""
  return np.r_[person[:, :2].min(0), np.ptp(person[:, :2], axis=0)]


def overlap(a, b) -> float:
  """The common area of two boxes, as a share of the smaller."""
  sides = np.minimum(a[:2] + a[2:], b[:2] + b[2:]) - np.maximum(a[:2], b[:2])
  return np.prod(np.maximum(sides, 0)) / min(np.prod(a[2:]), np.prod(b[2:]))


def picture(rng, people) -> np.ndarray:
  """u8[SIZE, SIZE, 3]: noise around a random colour, and on it a coloured line a limb."""
  image = rng.uniform(40, 215, 3) + rng.normal(0, 25, (SIZE, SIZE, 3))
  strokes = []
  for person in people:
    joints = skeleton.from_coco(person)
    strokes += [images.Stroke(tuple(joints[a, 1::-1].tolist()), tuple(joints[b, 1::-1].tolist()), colour, LINE)
                for colour, (a, b) in zip(draw.COLOURS, skeleton.LIMBS)]
  return images.draw(np.clip(image, 0, 255).astype(np.uint8), strokes)


def write(folder: str) -> str:
  """Writes both splits, a shard each; returns the folder."""
  tf = pipeline.tensorflow()
  rng = np.random.default_rng(0)
  floats = lambda values: tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(values)))
  for split, count in COUNTS.items():
    with tf.io.TFRecordWriter(os.path.join(folder, f'{split}.tfrecord')) as records:
      for number in range(count):
        people = crowd(rng)
        raw = tf.train.Feature(bytes_list=tf.train.BytesList(value=[picture(rng, people).tobytes()]))
        there = np.zeros((PEOPLE, 17, 3))
        there[:len(people)] = people
        boxes = [box(p) for p in there]
        areas = [max(w * h / 2, AREA_MIN) for _, _, w, h in boxes]
        ids = tf.train.Feature(int64_list=tf.train.Int64List(value=[number + 1]))
        records.write(tf.train.Example(features=tf.train.Features(feature={
            'image': raw, 'keypoints': floats(there), 'boxes': floats(boxes), 'areas': floats(areas),
            'image_id': ids})).SerializeToString())
  return folder


def source(folder: str, split: str) -> pipeline.Source:
  """The split as the pipeline reads it; examples as those of data_pipelines.coco.source."""
  tf = pipeline.tensorflow()
  fixed = lambda shape, kind: tf.io.FixedLenFeature(shape, kind)
  fields = {'image': fixed([], tf.string), 'keypoints': fixed([PEOPLE, 17, 3], tf.float32),
            'boxes': fixed([PEOPLE, 4], tf.float32), 'areas': fixed([PEOPLE], tf.float32),
            'image_id': fixed([], tf.int64)}

  def decode(serialized):
    found = tf.io.parse_single_example(serialized, fields)
    return {**found, 'image': tf.reshape(tf.io.decode_raw(found['image'], tf.uint8), [SIZE, SIZE, 3]),
            'image_id': tf.cast(found['image_id'], tf.int32)}

  def example(found, seed):
    del seed
    labelled = tf.reduce_sum(tf.cast(found['keypoints'][..., 2] > 0, tf.int32), 1)
    cells = SIZE // 4
    return {**found, 'truth': found['keypoints'], 'num': labelled, 'person': tf.cast(labelled > 0, tf.float32),
            'ignore': tf.zeros([cells, cells], tf.uint8), 'crowd': tf.zeros(PEOPLE),
            'matrix': tf.eye(2, 3), 'size': tf.constant([SIZE, SIZE])}
  return pipeline.Source((os.path.join(folder, f'{split}.tfrecord'),), decode, example, COUNTS[split])
