"""The affine warp: picture, mask and joints move as one; every strength does something; zero strengths do nothing."""

import numpy as np
import pytest
from data_pipelines import coco, coco_raw, images, warp
from lab.systems.pose import config as pose
from ml_collections import ConfigDict

from tests import coco_fixture

SIZE, STRIDE = 96, 8
PHOTOGRAPH = f'{coco.SAMPLE}/train/000000000790.jpg'
STILL = {'mirror': 0.0, 'scale_min': 1.0, 'scale_max': 1.0, 'rotate_deg': 0.0, 'shift': 0.0, 'brightness': 0.0,
         'contrast': 0.0, 'saturation': 0.0, 'hue': 0.0}


def placed(image, drawn):
  return warp.place(*image.shape[:2], SIZE, drawn)


def draw(augment, seed=0, stream=0):
  return warp.draw(warp.chance(np.array([stream, seed], np.int64)).numpy(), augment)


def warped(image, augment, seed=0):
  """A training picture u8[SIZE, SIZE, 3] before its colours change, and the placement."""
  drawn = draw(augment, seed)
  where = placed(image, drawn)
  return images.moved(image, where.to_original, SIZE, warp.FILL), where, drawn


def coloured(image, augment, seed=0):
  drawn = draw(augment, seed)
  return warp.picture(image, placed(image, drawn), SIZE, drawn)


def letterboxed(image):
  """Evaluation's picture u8[SIZE, SIZE, 3] and its placement."""
  where = placed(image, warp.Draw())
  return warp.boxed(image, *where[:4], SIZE).numpy(), where


def test_mirrored_indices_are_coco_names():
  for i, j in enumerate(warp.MIRRORED):
    side, _, part = coco_raw.JOINTS[i].partition('_')
    other = {'left': 'right_', 'right': 'left_'}.get(side, side)
    assert coco_raw.JOINTS[j] == other + part


def test_exchange_twice_is_identity():
  k = np.random.default_rng(0).normal(size=(3, 17, 3)).astype(np.float32)     # all kinds of v, seen or not
  once = warp.exchanged(k)
  assert (warp.exchanged(once) == k).all() and (once != k).any()
  left, right = coco_raw.JOINTS.index('left_wrist'), coco_raw.JOINTS.index('right_wrist')
  assert (once[:, right] == k[:, left]).all() and (once[:, left] == k[:, right]).all()


def test_mirrored_joints():
  image = np.zeros((64, 80, 3), np.uint8)
  joints = coco_fixture.pose()[None]
  joints[0, [3, 10], 2] = [0, 1]                                             # one unlabelled, one hidden
  plain = warp.joints(joints, placed(image, warp.Draw()), SIZE, False)
  mirror = warp.joints(joints, placed(image, warp.Draw(mirror=True)), SIZE, True)
  expected = plain[:, list(warp.MIRRORED)]
  seen = expected[..., 2] > 0
  expected[..., 0] = np.where(seen, SIZE - 1 - expected[..., 0], 0)
  np.testing.assert_allclose(mirror, expected, atol=1e-4)
  assert mirror[0, 4, 2] == 0 and mirror[0, 9, 2] == 1


def test_mirrored_picture():
  image = coco_fixture.noise(96, 96)
  plain, mirror = (images.moved(image, placed(image, warp.Draw(mirror=m)).to_original, SIZE, warp.FILL)
                   for m in (False, True))
  assert (plain == image).all() and (mirror == plain[:, ::-1]).all()


@pytest.mark.parametrize('shape', [(64, 96), (96, 41), (96, 96)])
def test_zero_strengths_equal_the_letterbox_where_nothing_is_resized(shape):
  image = coco_fixture.noise(*shape)
  evaluated, still = letterboxed(image)
  assert (coloured(image, ConfigDict(STILL), seed=3) == evaluated).all()
  assert all(np.array_equal(a, b) for a, b in zip(placed(image, draw(ConfigDict(STILL))), still))


@pytest.mark.parametrize('growth', [1.1, 1.5, 1.9, 2.0, 2.7, 3.9, 4.0, 6.5, 9.3])
def test_zero_strengths_are_as_soft_as_the_letterbox(growth):
  """A photograph shrunk by so much: the same to a few levels, neither shifted, aliased nor blurred."""
  photograph = images.resize(images.read(PHOTOGRAPH), 420, 560)
  side = round(SIZE * growth)
  image = images.resize(photograph, side * 3 // 4, side)
  evaluated, where = letterboxed(image)
  trained = coloured(image, ConfigDict(STILL))
  inside = np.s_[where.top + 1:where.top + where.height - 1, 1:-1]
  difference = np.abs(trained.astype(int) - evaluated)[inside]
  assert difference.mean() < 1.5, difference.mean()
  shifted = np.abs(trained[:, 1:].astype(int) - evaluated[:, :-1])[inside]
  assert difference.mean() < shifted.mean() / 3
  sharpness = [np.abs(np.diff(x[inside].astype(int), axis=1)).mean() for x in (trained, evaluated)]
  assert 0.85 < sharpness[0] / sharpness[1] < 1.15, sharpness


@pytest.mark.parametrize('variance', [0, 0.1, 0.5, 2 / 3, 1, 2, 5, 40])
def test_a_box_has_the_variance_that_is_asked_for(variance):
  taps = images._box(variance)
  at = np.arange(len(taps)) - len(taps) // 2
  np.testing.assert_allclose([taps.sum(), (taps * at).sum(), (taps * at**2).sum()], [1, 0, variance], atol=1e-4)
  assert (taps >= 0).all() and (taps == taps[::-1]).all()


@pytest.mark.parametrize('shape', [(64, 96), (97, 41), (300, 200), (1, 1), (500, 3), (10, 12)])
def test_numpy_letterbox_equals_evaluation(shape):
  image = coco_fixture.noise(*shape)
  evaluated, where = letterboxed(image)
  square, matrix = warp.letterbox(image, SIZE)
  difference = np.abs(square.astype(int) - evaluated)
  assert square.dtype == np.uint8 and difference.max() <= 2 and difference.mean() < 0.3
  np.testing.assert_allclose(matrix, where.to_original, rtol=1e-6, atol=1e-5)
  assert coloured(image, pose.get_config().augment).shape == (SIZE, SIZE, 3)


def test_aspect_is_kept():
  for shape in ((100, 37), (480, 640), (11, 1000)):
    where = warp.place(*shape, SIZE, warp.Draw(scale=1.3))
    sides = np.array([where.height, where.width], float)
    assert (np.abs(sides - np.maximum(np.array(shape) * SIZE * 1.3 / max(shape), 1)) <= 0.5).all()


@pytest.mark.parametrize('key, value', [
    ('mirror', 1.0), ('scale_min', 0.5), ('scale_max', 2.0), ('rotate_deg', 40.0), ('shift', 0.3), ('brightness', 0.3),
    ('contrast', 0.5), ('saturation', 0.5), ('hue', 0.2)])
def test_each_strength_changes_the_picture(key, value):
  image = coco_fixture.noise(64, 96)
  still = coloured(image, ConfigDict(STILL), seed=1)
  changed = coloured(image, ConfigDict({**STILL, key: value}), seed=1)
  assert np.abs(still.astype(int) - changed).mean() > 1


def test_strengths_cover_the_configuration():
  assert set(pose.get_config().augment) - {'on'} == set(STILL)


def test_maps_are_inverse_and_joints_follow():
  augment = pose.get_config().augment
  for seed in range(20):
    drawn = draw(augment, seed, stream=1)
    where = warp.place(120, 80, SIZE, drawn)
    full = [np.vstack([m, [0, 0, 1]]) for m in (where.to_original, where.to_square)]
    np.testing.assert_allclose(full[0] @ full[1], np.eye(3), atol=1e-9)
    joints = coco_fixture.pose(30, 40)[None]
    moved = warp.joints(joints, where, SIZE, drawn.mirror)
    moved = warp.exchanged(moved) if drawn.mirror else moved
    seen = moved[..., 2] > 0
    back = np.einsum('ij,pkj->pki', full[0][:2], np.concatenate([moved[..., :2], np.ones((1, 17, 1))], -1))
    np.testing.assert_allclose(back[seen], joints[..., :2][seen], atol=1e-3)
    assert (moved[~seen] == 0).all()


def test_dot_and_joint_coincide():
  augment = pose.get_config().augment
  image = np.zeros((240, 320, 3), np.uint8)
  image[97:104, 147:154] = 255                                               # centred on (150, 100)
  joints = np.zeros((1, 17, 3), np.float32)
  joints[0, 0] = 150, 100, 2
  for seed in range(20):
    out, where, drawn = warped(image, augment, seed)
    x, y, v = warp.joints(joints, where, SIZE, drawn.mirror)[0, 0]
    weight = np.where((out > 20) & (out != warp.FILL), out, 0).mean(-1).astype(float)
    inside = v > 0 and min(x, y) > 4 and max(x, y) < SIZE - 5
    if inside:
      yy, xx = np.mgrid[:SIZE, :SIZE]
      near = weight * (np.hypot(xx - x, yy - y) < 6)
      assert near.sum() > 100
      assert np.hypot((near * xx).sum() / near.sum() - x, (near * yy).sum() / near.sum() - y) < 0.3


def test_joint_outside_the_square_is_dropped():
  where = warp.place(100, 100, SIZE, warp.Draw(scale=2.0))
  joints = np.zeros((1, 17, 3), np.float32)
  joints[0, 0], joints[0, 5] = (50, 50, 2), (5, 50, 2)
  moved = warp.joints(joints, where, SIZE, False)
  assert moved[0, 0, 2] == 2 and (moved[0, 5] == 0).all()


def test_ignore_mask_follows_the_picture():
  augment = pose.get_config().augment
  image, mask = np.zeros((150, 200, 3), np.uint8), np.zeros((150, 200, 1), np.uint8)
  image[40:90, 60:140] = 255, 0, 0
  mask[40:90, 60:140] = 255
  hit = 0
  for seed in range(30):
    out, where, _ = warped(image, augment, seed)
    cells = warp.cells(mask, where, SIZE, STRIDE)
    red = (out[..., 0].astype(int) - out[..., 1]) / 255
    n = SIZE // STRIDE
    share = red.reshape(n, STRIDE, n, STRIDE).mean((1, 3))
    assert cells[share > 0.05].all() and not cells[share == 0].any()
    hit += cells.sum()
  assert hit > 30
  still = warp.place(150, 200, SIZE, warp.Draw())
  assert warp.cells(np.zeros((150, 200, 1), np.uint8), still, SIZE, STRIDE).sum() == 0


def test_shrinking_does_not_alias():
  board = np.tile(np.indices((1500, 1500)).sum(0)[..., None] % 2 * 255, 3).astype(np.uint8)
  for out in (letterboxed(board)[0], *(warped(board, pose.get_config().augment, seed)[0] for seed in range(3))):
    assert out[32:64, 32:64].std() < 2 and abs(out[32:64, 32:64].mean() - 127.5) < 2


def test_hue_and_saturation_leave_grey_alone():
  grey = np.tile(np.arange(96, dtype=np.float32)[:, None, None], (1, 96, 3))
  out = warp.colour(grey, warp.Draw(hue=0.3, saturation=0.2))
  np.testing.assert_allclose(out, grey, atol=1e-3)


def test_hue_turns_and_comes_back():
  image = coco_fixture.noise(96, 96).astype(np.float32)
  half = warp.colour(image, warp.Draw(hue=0.5))
  assert np.abs(half - image).mean() > 10
  np.testing.assert_allclose(warp.colour(half, warp.Draw(hue=0.5)), image, atol=1e-2)


def test_contrast_and_brightness():
  image = coco_fixture.noise(96, 96).astype(np.float32)
  out = warp.colour(image, warp.Draw(contrast=0.5, brightness=0.1))
  np.testing.assert_allclose(out.std((0, 1)), image.std((0, 1)) / 2, rtol=1e-4)
  bright = warp.colour(image, warp.Draw(brightness=0.1))
  np.testing.assert_allclose(bright - image, 25.5, atol=1e-2)
