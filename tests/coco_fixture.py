"""Writes small raw COCO folders, and records that are broken on purpose."""

import json
import os
import pathlib

import numpy as np
from data_pipelines import coco_raw, pipeline
from PIL import Image

ORIENTATION = 0x0112    # EXIF


def noise(height, width, seed=0):
  """A smooth random picture, u8[height, width, 3]."""
  rng = np.random.default_rng(seed)
  small = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
  return np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def pose(x=20.0, y=10.0, step=4.0):
  """17 visible joints on a slanted line, f32[17, 3]."""
  k = np.arange(17)
  return np.stack([x + step * (k % 5), y + step * k / 2, np.full(17, 2)], 1).astype(np.float32)


class RawCoco:
  """A raw folder in the making: add pictures, then write."""

  def __init__(self, root, name='train'):
    self.root, self.name = pathlib.Path(root), name
    self.images, self.annotations = [], []
    (self.root / name).mkdir(parents=True)
    (self.root / 'annotations').mkdir(exist_ok=True)

  def add(self, pixels, people=(), suffix='.jpg', orientation=1, size=None, **save):
    """One picture, stored with an EXIF orientation (pixels are stored as given); people are annotation fields."""
    number = len(self.images) + 1
    path = self.root / self.name / f'{number:012d}{suffix}'
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    if orientation != 1:
      exif = Image.Exif()
      exif[ORIENTATION] = orientation
      save['exif'] = exif
    image.save(path, **({'quality': 95, 'subsampling': 0} if suffix == '.jpg' else {}), **save)
    width, height = size or image.size
    self.images.append({'id': number, 'file_name': path.name, 'height': height, 'width': width, 'license': 4})
    for person in people:
      self.annotations.append(annotation(len(self.annotations) + 1, number, **person))
    return path

  def write(self):
    """Writes the JSON; returns the root."""
    data = {'images': self.images, 'annotations': self.annotations,
            'categories': [{'id': 1, 'name': 'person', 'keypoints': list(coco_raw.JOINTS)}]}
    self.json.write_text(json.dumps(data))
    return str(self.root)

  @property
  def json(self):
    return self.root / 'annotations' / f'person_keypoints_{self.name}.json'


def annotation(number, image_id, joints=None, bbox=(10, 10, 40, 30), area=600.0, iscrowd=0, segmentation=None):
  """A COCO annotation; without joints, all are unlabelled."""
  joints = np.zeros((17, 3)) if joints is None else np.asarray(joints, float)
  x, y, w, h = bbox
  if segmentation is None:
    segmentation = [[x, y, x + w, y, x + w, y + h, x, y + h]]
  return {'id': number, 'image_id': image_id, 'category_id': 1, 'keypoints': joints.reshape(-1).tolist(),
          'num_keypoints': int((joints[:, 2] > 0).sum()), 'bbox': list(bbox), 'area': area, 'iscrowd': iscrowd,
          'segmentation': segmentation}


def small_set(root, pictures=12, name='train'):
  """A raw folder of noise pictures with one or two people each."""
  raw = RawCoco(root, name)
  for i in range(pictures):
    people = [{'joints': pose(20 + i)}] + [{'joints': pose(40, 15, 3), 'area': 100.0}] * (i % 2)
    raw.add(noise(64, 96, i), people)
  return raw.write()


def rewrite(path, record, change):
  """Replaces the picture of one record of a shard by change(bytes); checksums are right again."""
  tf = pipeline.tensorflow()
  payloads = [r.numpy() for r in tf.data.TFRecordDataset(path)]
  with tf.io.TFRecordWriter(path) as f:
    for i, payload in enumerate(payloads):
      if i == record:
        example = tf.train.Example.FromString(payload)
        value = example.features.feature['image'].bytes_list.value
        value[0] = change(value[0])
        payload = example.SerializeToString()
      f.write(payload)


def flip(path, at):
  """Inverts the byte of a file at an offset."""
  with open(path, 'r+b') as f:
    f.seek(at)
    byte = f.read(1)[0]
    f.seek(at)
    f.write(bytes([byte ^ 0xFF]))


def cut(path, count):
  """Cuts the last bytes off a file."""
  os.truncate(path, os.path.getsize(path) - count)
