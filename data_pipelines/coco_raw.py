"""COCO's person keypoints as they are published: JSON and folders of pictures, checked field by field.

  RAW_DIR/annotations/person_keypoints_<NAME>.json
  RAW_DIR/<NAME>/*.jpg       or RAW_DIR/images/*.jpg

A NAME that begins with 'train' is the split 'train', any other is 'val'.
"""

import glob
import json
import math
import os
import warnings
from typing import Any, Iterable, Mapping, NamedTuple

import numpy as np

from data_pipelines import DataError, pictures

JOINTS = ('nose', 'left_eye', 'right_eye', 'left_ear', 'right_ear', 'left_shoulder', 'right_shoulder', 'left_elbow',
          'right_elbow', 'left_wrist', 'right_wrist', 'left_hip', 'right_hip', 'left_knee', 'right_knee', 'left_ankle',
          'right_ankle')
LIMBS = ((0, 1), (0, 2), (1, 3), (2, 4), (5, 7), (7, 9), (6, 8), (8, 10), (5, 11), (6, 12), (11, 13), (13, 15),
         (12, 14), (14, 16), (5, 6), (11, 12))
JSON_BYTES_MAX = 2 << 30
ID_MAX = 2**31 - 1         # picture ids travel as int32


class Picture(NamedTuple):
  """One picture and everybody in it."""
  id: int
  path: str
  height: int
  width: int
  people: list[Mapping[str, Any]]    # checked annotations; with joints first, then larger first


def read(raw_dir: str) -> dict[str, list[Picture]]:
  """All pictures of each split, sorted by id. Raises DataError naming the file and record that is wrong."""
  found: dict[str, list[Picture]] = {}
  for split, (path, folder) in files(raw_dir).items():
    data = _json(path)
    person = _person(path, data)
    by_picture: dict[int, list] = {}
    for a in _annotations(path, data, person):
      by_picture.setdefault(a['image_id'], []).append(a)
    images = _images(path, data, folder)
    strangers = sorted(set(by_picture) - {i.id for i in images})
    if strangers:
      raise DataError(f'{path}: annotation {by_picture[strangers[0]][0]["id"]} is of image {strangers[0]}, '
                      'which the file does not list')
    order = lambda a: (a['num_keypoints'] == 0, -a['area'], a['id'])
    found[split] = [i._replace(people=sorted(by_picture.get(i.id, []), key=order)) for i in images]
  return found


def files(raw_dir: str) -> dict[str, tuple[str, str]]:
  """split -> (JSON path, picture folder)."""
  prefix = os.path.join(raw_dir, 'annotations', 'person_keypoints_')
  found: dict[str, tuple[str, str]] = {}
  for path in sorted(glob.glob(glob.escape(prefix) + '*.json')):
    name = path[len(prefix):-len('.json')]
    split = 'train' if name.startswith('train') else 'val'
    if split in found:
      raise DataError(f'{found[split][0]} and {path} are both the split {split!r}; leave one of them there')
    folders = [os.path.join(raw_dir, name), os.path.join(raw_dir, 'images')]
    folder = next((f for f in folders if os.path.isdir(f)), None)
    if folder is None:
      raise DataError(f'{path}: neither {folders[0]} nor {folders[1]} is a folder of pictures')
    found[split] = path, folder
  if not found:
    raise DataError(f'{prefix}<NAME>.json: no such file; --raw_dir is the folder that has COCO\'s `annotations` folder')
  return found


def _json(path: str) -> dict:
  try:
    if os.path.getsize(path) > JSON_BYTES_MAX:
      raise DataError(f'{path}: {os.path.getsize(path)} bytes; files over {JSON_BYTES_MAX} are refused')
    with open(path, encoding='utf-8') as f:
      data = json.load(f)
  except (OSError, ValueError) as e:
    raise DataError(f'{path}: {e}') from None
  except RecursionError:
    raise DataError(f'{path}: nested too deeply') from None
  for key in ('images', 'annotations', 'categories'):
    if not isinstance(data, dict) or not isinstance(data.get(key), list):
      raise DataError(f'{path}: no list {key!r}; it is not in the COCO person_keypoints format')
  return data


def _person(path: str, data: dict) -> int:
  """The id of the category `person`, whose joints must be COCO's, in order."""
  for i, c in enumerate(data['categories']):
    if _field(path, f'category {i}', c, 'name', str) == 'person':
      names = c.get('keypoints')
      if names is not None and tuple(names) != JOINTS:
        raise DataError(f'{path}: the joints of category "person" are not COCO\'s 17 in COCO\'s order, but {names}')
      return _field(path, f'category {i}', c, 'id', int)
  raise DataError(f'{path}: no category "person"')


def _field(path: str, what: str, record, key: str, kind):
  """record[key], of the given kind and finite."""
  value = record.get(key) if isinstance(record, dict) else None
  if value is None:
    raise DataError(f'{path}: {what} has no {key!r}')
  if kind is float and isinstance(value, int):
    value = float(value)
  if not isinstance(value, kind) or isinstance(value, bool) or kind is float and not math.isfinite(value):
    raise DataError(f'{path}: {what}: {key!r} is {str(value)[:40]!r}, expected {kind.__name__}')
  return value


def _images(path: str, data: dict, folder: str) -> list[Picture]:
  seen: dict[int, Picture] = {}
  for i, image in enumerate(data['images']):
    number = _field(path, f'image record {i}', image, 'id', int)
    what = f'image {number}'
    if number in seen or not 0 <= number <= ID_MAX:
      raise DataError(f'{path}: {what} ' + ('is there twice' if number in seen else 'has no id that fits 31 bits'))
    try:
      file = pictures.inside(folder, _field(path, what, image, 'file_name', str))
    except DataError as e:
      raise DataError(f'{path}: {what}: {e}') from None
    height, width = (_field(path, what, image, k, int) for k in ('height', 'width'))
    if min(height, width) < 1:
      raise DataError(f'{path}: {what} is {width} x {height} pixels')
    seen[number] = Picture(number, file, height, width, [])
  return [seen[k] for k in sorted(seen)]


def _annotations(path: str, data: dict, person: int) -> Iterable[dict]:
  seen = set()
  for i, a in enumerate(data['annotations']):
    number = _field(path, f'annotation record {i}', a, 'id', int)
    what = f'annotation {number}'
    if number in seen:
      raise DataError(f'{path}: {what} is there twice')
    seen.add(number)
    if _field(path, what, a, 'category_id', int) != person:
      continue
    joints = _numbers(path, what, a, 'keypoints', 51).reshape(17, 3)
    if not np.isin(joints[:, 2], (0, 1, 2)).all():
      raise DataError(f'{path}: {what}: a joint\'s visibility is none of 0, 1, 2')
    counted = _field(path, what, a, 'num_keypoints', int)
    if counted != (joints[:, 2] > 0).sum():
      raise DataError(f'{path}: {what}: num_keypoints is {counted}, but {(joints[:, 2] > 0).sum()} joints are labelled')
    yield {'id': number, 'image_id': _field(path, what, a, 'image_id', int), 'keypoints': joints,
           'num_keypoints': counted, 'bbox': _numbers(path, what, a, 'bbox', 4), 'where': f'{path}: {what}',
           'area': _field(path, what, a, 'area', float), 'iscrowd': int(bool(_field(path, what, a, 'iscrowd', int))),
           'segmentation': a.get('segmentation') if counted == 0 else None}


def _numbers(path: str, what: str, record, key: str, count: int) -> np.ndarray:
  values = _field(path, what, record, key, list)
  try:
    array = np.array(values, np.float32)
  except (TypeError, ValueError, OverflowError):
    array = np.array([np.nan])
  if array.shape != (count,) or not np.isfinite(array).all():
    raise DataError(f'{path}: {what}: {key!r} must be {count} finite numbers')
  return array


def unlabelled(picture: Picture) -> np.ndarray:
  """Where people without joints are, crowds too: bool[H, W]. Without an outline, the box counts."""
  from pycocotools import mask as coder
  out = np.zeros((picture.height, picture.width), bool)
  for a in picture.people:
    if a['num_keypoints']:
      continue
    try:
      rle = _rle(coder, a, picture.height, picture.width)
      with warnings.catch_warnings():       # the C library hands its arrays over in NumPy 1's way
        warnings.simplefilter('ignore', DeprecationWarning)
        found = coder.decode(rle).astype(bool)
    except Exception as e:    # the C library's answers to nonsense are many
      raise DataError(f'{a["where"]}: unusable segmentation ({e})') from None
    if found.shape != out.shape:
      raise DataError(f'{a["where"]}: its segmentation is for {found.shape[1]} x {found.shape[0]} pixels, the picture '
                      f'has {picture.width} x {picture.height}')
    out |= found
  return out


def _rle(coder, a: dict, height: int, width: int):
  outline = a['segmentation']
  if isinstance(outline, dict):
    size, counts = outline['size'], outline['counts']
    if list(size) != [height, width]:
      raise ValueError(f'size {size} instead of {[height, width]}')
    if isinstance(counts, list):
      if sum(counts) != height * width or min(counts) < 0:
        raise ValueError('its runs do not fill the picture')
      return coder.frPyObjects(outline, height, width)
    return {'size': size, 'counts': counts}
  if not outline:
    x, y, w, h = map(float, a['bbox'])
    outline = [[x, y, x + w, y, x + w, y + h, x, y + h]]
  if any(len(p) < 6 or len(p) % 2 or not np.isfinite(p).all() for p in outline):
    raise ValueError('a polygon needs at least 3 points')
  return coder.merge(coder.frPyObjects([list(map(float, p)) for p in outline], height, width))


class Report:
  """Counts what is in a data set, and what is odd about it, with up to 10 annotation ids each."""

  def __init__(self):
    self.counts: dict[str, dict[str, int]] = {}
    self.odd: dict[str, list[int]] = {}

  def add(self, split: str, picture: Picture, kept: bool) -> None:
    """Counts one picture."""
    people = picture.people
    labelled = sum(a['num_keypoints'] > 0 for a in people)
    now = {'pictures': 1, 'left_out_without_joints': int(not kept), 'people': len(people), 'with_joints': labelled,
           'crowds': sum(a['iscrowd'] for a in people), 'joints': sum(a['num_keypoints'] for a in people)}
    total = self.counts.setdefault(split, {})
    for name, n in now.items():
      total[name] = total.get(name, 0) + n
    for a in people:
      for oddity in oddities(a, picture.height, picture.width):
        name = f'odd_{oddity}'
        total[name] = total.get(name, 0) + 1
        if len(self.odd.setdefault(oddity, [])) < 10:
          self.odd[oddity].append(a['id'])

  def summary(self) -> dict:
    """{'splits': counts, 'examples': annotation ids of each oddity}; JSON-able."""
    return {'splits': self.counts, 'examples': self.odd}


def oddities(person: Mapping[str, Any], height: int, width: int) -> list[str]:
  """What is degenerate about a person, who stays in the data set all the same."""
  joints, box = person['keypoints'], person['bbox']
  seen = joints[:, 2] > 0
  length = [float(np.hypot(*(joints[a, :2] - joints[b, :2]))) for a, b in LIMBS if seen[a] and seen[b]]
  x, y = joints[seen, 0], joints[seen, 1]
  checks = {
      'box_empty': box[2] <= 0 or box[3] <= 0,
      'area_zero': person['area'] <= 0,
      'limb_of_length_zero': any(d == 0 for d in length),
      'limb_under_a_pixel': any(0 < d < 1 for d in length),
      'single_joint': person['num_keypoints'] == 1,
      'joint_outside_picture': bool(((x < 0) | (x >= width) | (y < 0) | (y >= height)).any()),
  }
  return [name for name, true in checks.items() if true]
