"""COCO's average precision for keypoints, by pycocotools; and the similarity it rests on, in NumPy."""

import contextlib
import io
from typing import Iterable, Mapping

import numpy as np
from data_pipelines import DataError
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lab.systems.pose import skeleton

_NAMES = {'AP': 0, 'AP50': 1, 'AP75': 2, 'APM': 3, 'APL': 4, 'AR': 5}    # places in COCOeval.stats


def score(records: Iterable[Mapping]) -> dict[str, float]:
  """AP over OKS .50:.05:.95 with at most 20 people a picture, as COCO's server computes it.

  Args:
    records: one a picture:
      {'image_id': int, 'size': [h, w],
       'people': [{'keypoints': [x, y, score] * 17, 'score': float}],
       'truth': [{'id': int, 'keypoints': [x, y, v] * 17, 'num_keypoints': int, 'area': px2, 'bbox': [x, y, w, h],
                  'iscrowd': 0 or 1}]}, all px of the original picture.

  Returns:
    AP, AP50, AP75, APM (area 32^2..96^2), APL (larger), AR. A number without any ground truth is left out.

  Raises:
    DataError: a picture that was predicted twice, or a prediction that isn't finite or isn't 17 keypoints.
  """
  images, truth, found = {}, [], []
  for record in records:
    image = record['image_id']
    if image in images:
      raise DataError(f'picture {image} was predicted twice; every picture of a split counts once')
    height, width = record['size']
    images[image] = {'id': image, 'height': height, 'width': width}
    for person in record['truth']:
      # numbered anew: ids need not be unique in a set of one's own, and COCOeval takes id 0 for "not matched"
      truth.append({**person, 'id': len(truth) + 1, 'image_id': image, 'category_id': 1,
                    'keypoints': np.asarray(person['keypoints'], float).ravel().tolist()})
    found += [_detection(image, person) for person in record['people']]
  if not any(t['num_keypoints'] > 0 and not t['iscrowd'] for t in truth):
    return {}
  with contextlib.redirect_stdout(io.StringIO()):       # pycocotools prints its progress and a table
    stats = _stats(list(images.values()), truth, found)
  return {name: float(stats[i]) for name, i in _NAMES.items() if stats[i] >= 0}    # -1: nothing to measure on


def _detection(image, person):
  keypoints = np.asarray(person['keypoints'], float).ravel()
  if keypoints.shape != (51,) or not np.isfinite([*keypoints, person['score']]).all():
    raise DataError(f'picture {image}: a predicted person needs 51 finite numbers and a finite score, '
                    f'got {keypoints.shape} and {person["score"]}')
  return {'image_id': image, 'category_id': 1, 'keypoints': keypoints.tolist(), 'score': float(person['score'])}


def _stats(images, truth, found):
  coco = COCO()
  coco.dataset = {'info': {}, 'images': images, 'annotations': truth, 'categories': [{'id': 1, 'name': 'person'}]}
  coco.createIndex()
  if found:
    detections = coco.loadRes(found)
  else:                                                 # loadRes looks at the first detection
    detections = COCO()
    detections.dataset = {**coco.dataset, 'annotations': []}
    detections.createIndex()
  run = COCOeval(coco, detections, 'keypoints')
  run.params.kpt_oks_sigmas = skeleton.OKS_SIGMAS
  run.params.maxDets = [20]
  run.evaluate()
  run.accumulate()
  run.summarize()
  return run.stats


def oks(predicted: np.ndarray, truth: np.ndarray, area: np.ndarray, bbox: np.ndarray | None = None) -> np.ndarray:
  """Object keypoint similarity of every prediction with every person.

  OKS = mean over labelled keypoints of exp(-d_i^2 / (2 area (2 sigma_i)^2)); https://cocodataset.org/#keypoints-eval.
  A person without labelled keypoints is compared by the distance of the prediction to the box twice as large, where
  boxes are given, as COCO does for the people it ignores; else its similarity is 0.

  Args:
    predicted: float [D, 17, >=2], (x, y) in px; truth: float [G, 17, 3], (x, y, v); area: float [G], px2;
    bbox: float [G, 4], (x, y, w, h).

  Returns:
    float64 [D, G].
  """
  predicted, truth = np.asarray(predicted, np.float64), np.asarray(truth, np.float64)
  seen = truth[:, :, 2] > 0                                                             # [G, 17]
  away = np.abs(predicted[:, None, :, :2] - truth[None, :, :, :2])                      # [D, G, 17, 2]
  unlabelled = ~seen.any(1)
  if bbox is not None:
    low, side = np.split(np.asarray(bbox, np.float64)[:, None], 2, -1)                  # [G, 1, 2]
    p = predicted[:, None, :, :2]
    outside = np.maximum(0, low - side - p) + np.maximum(0, p - (low + 2 * side))
    away = np.where(unlabelled[:, None, None], outside, away)
    seen = seen | unlabelled[:, None]
  spread = 2 * (2 * skeleton.OKS_SIGMAS)**2 * (np.asarray(area, np.float64)[:, None] + np.spacing(1))    # [G, 17]
  near = np.exp(-(away**2).sum(-1) / spread)
  return (near * seen).sum(-1) / np.maximum(seen.sum(-1), 1)
