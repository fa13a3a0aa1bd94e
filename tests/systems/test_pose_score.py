"""COCO AP and OKS against their definition, pycocotools and hand-made cases."""

import math

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from data_pipelines import DataError
from lab.systems.pose import score, skeleton


def person(number, x=50.0, y=50.0, side=100.0, labelled=17, crowd=0):
  rng = np.random.default_rng(number)
  keypoints = np.c_[x + side * rng.uniform(0, 1, 17), y + side * rng.uniform(0, 1, 17), np.full(17, 2.0)]
  keypoints[labelled:] = 0
  return {'id': number, 'keypoints': keypoints.ravel().tolist(), 'num_keypoints': labelled, 'area': side**2 / 2,
          'bbox': [x, y, side, side], 'iscrowd': crowd}


def picture(image_id, truth, people):
  return {'image_id': image_id, 'size': [400, 400], 'truth': truth, 'people': people}


def moved(truth, pixels=0.0, value=1.0):
  keypoints = np.array(truth['keypoints']).reshape(17, 3) + [pixels, 0, 0]
  return {'keypoints': keypoints.ravel().tolist(), 'score': value}


def test_similarity_of_one_keypoint_by_hand():
  # d^2 = 2 area k^2 with k = 2 sigma gives exp(-1); one keypoint labelled, so that is the mean
  area = 4000.0
  for k in (0, 6, 12):
    truth = np.zeros((1, 17, 3))
    truth[0, k] = [30, 40, 1]
    found = np.full((1, 17, 3), 1e4)
    found[0, k, :2] = [30 + math.sqrt(2 * area) * 2 * skeleton.OKS_SIGMAS[k], 40]
    np.testing.assert_allclose(score.oks(found, truth, np.array([area])), [[math.exp(-1)]], atol=1e-12)


def test_similarity_equals_pycocotools():
  rng = np.random.default_rng(0)
  truth = [person(1), person(2, 150, 20, 60, labelled=9), person(3, 10, 200, 90, labelled=0), person(4, side=9)]
  found = [moved(t, rng.uniform(-8, 8), float(v)) for t, v in zip(truth * 3, np.linspace(1, .1, 12))]
  gt = COCO()
  gt.dataset = {'info': {}, 'images': [{'id': 7}], 'categories': [{'id': 1}],
                'annotations': [{**t, 'image_id': 7, 'category_id': 1} for t in truth]}
  gt.createIndex()
  run = COCOeval(gt, gt.loadRes([{**f, 'image_id': 7, 'category_id': 1} for f in found]), 'keypoints')
  run._prepare()
  ours = score.oks(np.array([f['keypoints'] for f in found]).reshape(-1, 17, 3),
                   np.array([t['keypoints'] for t in truth]).reshape(-1, 17, 3), [t['area'] for t in truth],
                   [t['bbox'] for t in truth])
  assert 0.01 < ours.mean() < 0.99
  np.testing.assert_allclose(ours, run.computeOks(7, 1), atol=1e-6)
  # without boxes the unlabelled person is like nobody
  assert (score.oks(np.ones((2, 17, 3)), np.zeros((1, 17, 3)), [9.0]) == 0).all()
  assert score.oks(np.zeros((0, 17, 3)), np.zeros((2, 17, 3)), np.ones(2)).shape == (0, 2)


def test_perfect_and_missing_predictions(capsys):
  truth = [[person(0)], [person(0), person(1, side=200)], []]          # ids repeat, and one is 0: still all are found
  perfect = [picture(i, t, [moved(p) for p in t]) for i, t in enumerate(truth)]
  assert score.score(perfect) == pytest.approx({'AP': 1, 'AP50': 1, 'AP75': 1, 'APM': 1, 'APL': 1, 'AR': 1})
  nothing = score.score([{**p, 'people': []} for p in perfect])
  assert nothing == {'AP': 0, 'AP50': 0, 'AP75': 0, 'APM': 0, 'APL': 0, 'AR': 0}
  assert capsys.readouterr().out == ''


def test_half_right_by_hand():
  # two people, one found exactly, the other with OKS between .50 and .55: at .50 all is right; above, precision is 1 up
  # to recall 1/2, which holds for 51 of the 101 recall points: AP = (1 + 9 * 51/101) / 10. No one is of medium size
  first, second = person(1, side=200), person(2, 150, 150, side=200)
  steps = np.linspace(0, 60, 601)
  near = [score.oks(np.array(moved(second, p)['keypoints']).reshape(1, 17, 3),
                    np.array(second['keypoints']).reshape(1, 17, 3), [second['area']])[0, 0] for p in steps]
  pixels = steps[np.argmin(np.abs(np.array(near) - .525))]
  got = score.score([picture(1, [first, second], [moved(first, 0, .9), moved(second, pixels, .8)])])
  assert got == pytest.approx({'AP': (1 + 9 * 51 / 101) / 10, 'AP50': 1, 'AP75': 51 / 101,
                               'APL': (1 + 9 * 51 / 101) / 10, 'AR': (1 + 9 * .5) / 10})


def test_no_ground_truth_gives_no_number():
  assert score.score([]) == {}
  assert score.score([picture(1, [], [moved(person(1))])]) == {}
  assert score.score([picture(1, [person(1, labelled=0), person(2, crowd=1)], [moved(person(1))])]) == {}


def test_people_without_labels_do_not_punish():
  known, unknown = person(1), person(2, 250, 250, labelled=0)
  inside = {'keypoints': [v for _ in range(17) for v in (300.0, 300.0, 1.0)], 'score': 2.0}
  assert score.score([picture(1, [known, unknown], [inside, moved(known)])])['AP'] == pytest.approx(1)


def test_only_twenty_people_count():
  known = person(1)
  crowd = [moved(known, 500, 2.0)] * 20
  assert score.score([picture(1, [known], [*crowd, moved(known)])])['AR'] == 0
  assert score.score([picture(1, [known], [*crowd[:19], moved(known)])])['AR'] == pytest.approx(1)


def test_bad_predictions_are_named():
  known = person(1)
  with pytest.raises(DataError, match='picture 5 was predicted twice'):
    score.score([picture(5, [known], []), picture(5, [known], [])])
  for bad in ({'keypoints': [0.0] * 50, 'score': 1.0}, {'keypoints': [math.nan] * 51, 'score': 1.0},
              {'keypoints': [0.0] * 51, 'score': math.inf}):
    with pytest.raises(DataError, match='picture 6'):
      score.score([picture(6, [known], [bad])])
