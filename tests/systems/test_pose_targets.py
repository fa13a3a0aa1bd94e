"""Skeleton, labels and losses against NumPy in double precision and against numbers derived by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import metrics
from lab.systems.pose import config, losses, skeleton, targets

SHARED = Path(__file__).parents[2].parent / 'shared' / 'data' / 'pose' / 'coco2017_subset' / 'annotations'
SIDE, STRIDE = 96, 4
N = SIDE // STRIDE


def settings(**changes):
  section = config.get_config().target
  section.update(sigma_px=5.0, paf_width_px=4.0, paf_s_px2=30.0, **changes)
  return section


@pytest.fixture(scope='module')
def draw():
  """make(...) jitted for both kinds of fields, so that the tests share two compilations."""
  both = {kind: jax.jit(lambda k, i, s=settings(paf=kind): targets.make(k, i, STRIDE, s))
          for kind in ('hard', 'gaussian')}
  return lambda keypoints, kind, ignore=None: both[kind](
      keypoints, np.zeros((len(keypoints), N, N), np.uint8) if ignore is None else ignore)


def crowd(batch=2, people=3, seed=0):
  """f32[batch, people, 17, 3]: random people, some joints unlabelled, some outside, multiples of 1/64 px."""
  rng = np.random.default_rng(seed)
  centre = rng.uniform(0.2, 0.8, (batch, people, 1, 2)) * SIDE
  xy = np.round((centre + rng.normal(0, 0.2, (batch, people, 17, 2)) * SIDE) * 64) / 64
  v = rng.choice([0, 1, 2], (batch, people, 17, 1), p=[0.2, 0.2, 0.6])
  return np.concatenate([xy, v], -1).astype(np.float32)


# --- skeleton

def test_index_maps_are_involutions():
  for index in (skeleton.KEYPOINT_MIRROR, skeleton.COCO_MIRROR, skeleton.LIMB_MIRROR):
    np.testing.assert_array_equal(index[index], np.arange(len(index)))
  np.testing.assert_array_equal(skeleton.LIMB_MIRROR_SIGN[skeleton.LIMB_MIRROR], skeleton.LIMB_MIRROR_SIGN)
  blocks = np.r_[0:2, 10:18, 2:10]                       # centre stays, right and left change places
  np.testing.assert_array_equal(skeleton.KEYPOINT_MIRROR, blocks)
  assert (skeleton.LIMB_MIRROR[:17] < 17).all()          # the tree is closed under mirroring


def test_table_is_the_published_one():
  assert len(skeleton.KEYPOINTS) == 18 and skeleton.LIMBS.shape == (24, 2) and skeleton.TREE_LIMBS == 17
  assert skeleton.COCO == (0, -1, 6, 8, 10, 12, 14, 16, 2, 4, 5, 7, 9, 11, 13, 15, 1, 3)
  reached = {0}
  for a, b in skeleton.LIMBS[:17]:                       # 17 edges that reach 18 keypoints from the nose: a tree
    assert a in reached and b not in reached
    reached.add(b)
  assert len(reached) == 18
  assert skeleton.COCO_KEYPOINTS[9:11] == ('left_wrist', 'right_wrist')
  assert skeleton.LIMB_NAMES[17:20] == ('right_eye-left_eye', 'right_shoulder-left_shoulder', 'right_hip-left_hip')


def test_neck_and_coco_order():
  coco = crowd()
  ours = skeleton.from_coco(coco)
  right, left = coco[..., 6, :], coco[..., 5, :]
  labelled = (right[..., 2] > 0) & (left[..., 2] > 0)
  np.testing.assert_array_equal(ours[..., 1, 2], np.minimum(right[..., 2], left[..., 2]) * labelled)
  np.testing.assert_allclose(ours[..., 1, 1], (right[..., 0] + left[..., 0]) / 2 * labelled, rtol=1e-6)
  np.testing.assert_array_equal(skeleton.to_coco(ours), np.where(coco[..., 2:] > 0, coco, 0))
  traced, back = jax.jit(lambda c: (skeleton.from_coco(c), skeleton.to_coco(skeleton.from_coco(c))))(coco)
  np.testing.assert_array_equal(traced, ours)            # the same functions on the device
  np.testing.assert_array_equal(back, skeleton.to_coco(ours))
  assert isinstance(ours, np.ndarray) and ours.dtype == traced.dtype == np.float32


def test_mirrored_twice_is_identity_and_sides_are_exchanged():
  coco = crowd()
  ours = skeleton.from_coco(coco)
  once = skeleton.mirror(ours, SIDE)
  np.testing.assert_array_equal(skeleton.mirror(once, SIDE), ours)
  back = skeleton.to_coco(once)
  for name in skeleton.COCO_KEYPOINTS:                   # the right wrist of the mirrored is the mirrored left wrist
    i = skeleton.COCO_KEYPOINTS.index(name)
    other = name.replace('left', 'RIGHT').replace('right', 'left').replace('RIGHT', 'right')
    j = skeleton.COCO_KEYPOINTS.index(other)
    assert skeleton.COCO_MIRROR[i] == j
    there = coco[..., j, 2] > 0
    np.testing.assert_array_equal(back[..., i, 2], coco[..., j, 2])
    np.testing.assert_array_equal(back[..., i, 0], np.where(there, SIDE - 1 - coco[..., j, 0], 0))


@pytest.mark.parametrize('kind', ['hard', 'gaussian'])
def test_mirrored_coordinates_give_mirrored_maps(draw, kind):
  coco = crowd()
  mirrored = skeleton.to_coco(skeleton.mirror(skeleton.from_coco(coco), SIDE))
  plain, turned = draw(coco, kind), draw(mirrored, kind)
  heatmap, paf = skeleton.mirror_maps(plain.heatmap, plain.paf)
  np.testing.assert_allclose(turned.heatmap, heatmap, rtol=0, atol=1e-6)
  np.testing.assert_allclose(turned.paf, paf, rtol=0, atol=1e-6)
  np.testing.assert_array_equal(turned.heatmap[..., 4], plain.heatmap[..., ::-1, 12])     # wrists, right and left
  np.testing.assert_array_equal(turned.paf[..., 2, 1], -plain.paf[..., ::-1, 10, 1])      # shoulder to elbow, x
  for again, first in zip(skeleton.mirror_maps(heatmap, paf), plain):
    np.testing.assert_array_equal(again, first)


# --- labels

def reference(coco, kind, s):
  """The labels by their definition, in float64, one person, limb and cell after the other."""
  ours = skeleton.from_coco(coco.astype(np.float64))
  c = (np.arange(N) + 0.5) * STRIDE - 0.5
  p = np.stack(np.meshgrid(c, c, indexing='ij'), -1)
  b = len(coco)
  heat, field, count = np.zeros((b, N, N, 18)), np.zeros((b, N, N, 24, 2)), np.zeros((b, N, N, 24, 1))
  for i, person in ((i, person) for i in range(b) for person in ours[i]):
    for k in np.flatnonzero(person[:, 2] > 0):
      blob = np.exp(-((p - person[k, :2])**2).sum(-1) / (2 * s.sigma_px**2))
      heat[i, ..., k] = np.maximum(heat[i, ..., k], np.where(blob < 0.01, 0, blob))
    for j, (a, e) in enumerate(skeleton.LIMBS):
      start, end = person[a, :2], person[e, :2]
      length = np.linalg.norm(end - start)
      if min(person[a, 2], person[e, 2]) == 0 or length == 0:
        continue
      u = (end - start) / length
      t, n = (p - start) @ u, (p - start) @ np.array([u[1], -u[0]])
      beside = (t >= 0) & (t <= length)
      if kind == 'hard':
        strength = (beside & (np.abs(n) <= s.paf_width_px)).astype(float)
        count[i, ..., j, 0] += strength
      else:
        ends = [np.exp(-((p - q)**2).sum(-1) / s.paf_s_px2) for q in (start, end)]
        strength = np.maximum(np.maximum(*ends), beside * np.exp(-n**2 / s.paf_s_px2))
      field[i, ..., j, :] += strength[..., None] * u
  if kind == 'hard':
    field /= np.maximum(count, 1)
  else:
    field[np.linalg.norm(field, axis=-1) < 0.001] = 0
  return np.concatenate([heat, 1 - heat.max(-1, keepdims=True)], -1), field


@pytest.mark.parametrize('kind', ['hard', 'gaussian'])
def test_labels_equal_their_definition(draw, kind):
  coco = crowd(people=6, seed=1)
  out = draw(coco, kind)
  heatmap, paf = reference(coco, kind, settings())
  for got, wanted in ((out.heatmap, heatmap), (out.paf, paf)):
    off = np.abs(got - wanted) > 1e-5
    # at a sharp edge (the cut, a hard limb's border) rounding may put a value on the other side
    assert off.mean() < 1e-4 and np.abs(wanted).max() > 0.9
  assert (np.abs(paf).max((0, 1, 2)) > 0).all()          # no limb went untested


def test_normalised_coordinates():
  # spec: from (.5, .2) to (.5, .8) the field is (0, 1) at the middle and falls to .5 at sqrt(.0015 ln 2) = .0322
  # beside it; a heatmap falls to .5 at sqrt(.008 ln 2) = .0745. Derived with s = .0015 and sigma^2 = .008.
  person = jnp.array([[[[.5, .2, 2], [.5, .8, 2], [.5, .5, 2], [.5, .5, 2]]]])
  grid = jnp.array([.5, .5 + .032243, .5 + .074466])
  field, cover = targets.gaussian_fields(person, grid, np.array([[0, 1], [2, 3]]), .0015, .001)
  np.testing.assert_allclose(field[0, 0, 0, 0], [0, 1], atol=1e-6)
  np.testing.assert_allclose(field[0, 1, 0, 0], [0, .5], atol=1e-4)
  np.testing.assert_array_equal(field[..., 1, :], 0)     # start = end: no direction, and finite
  assert np.isfinite(cover).all()
  heat = targets.heatmaps(person[:, :, 2:3], grid, .008, .001)
  np.testing.assert_allclose([heat[0, 0, 0, 0], heat[0, 2, 0, 0], heat[0, 0, 2, 0]], [1, .5, .5], atol=1e-4)


def degenerate():
  """f32[1, 7, 17, 3]: a whole person, then every way of having no size."""
  coco = np.zeros((1, 7, 17, 3), np.float32)
  coco[:, 0] = crowd(1, 1, 2)[:, 0]
  coco[0, 0, :, 2] = 2
  coco[0, 1] = coco[0, 0]
  coco[0, 1, 8, :2] = coco[0, 1, 6, :2]                  # shoulder = elbow
  coco[0, 2, 5:9] = [[20, 30, 2], [20.4, 30, 2], [20, 30.4, 1], [20, 30, 1]]
  coco[0, 3] = [40, 40, 2]                               # all joints on one spot: a box of 0 x 0
  coco[0, 4, 0] = [50, 50, 1]                            # a single joint
  coco[0, 5, 5:11] = [[-500, 10, 2], [9999, 10, 2], [5, -80, 2], [1e6, 1e6, 2], [np.nan, 3, 2], [np.inf, 3, 2]]
  return coco                                            # the last row is nobody


@pytest.mark.parametrize('kind', ['hard', 'gaussian'])
def test_degenerate_people_stay_finite_and_alone(draw, kind):
  coco = degenerate()
  out = draw(coco, kind)
  assert all(np.isfinite(leaf).all() for leaf in out)
  alone, together = coco.copy(), coco.copy()
  alone[0, 2:, :, 2] = together[0, 2:, :, 2] = 0
  together[0, 1, 8, 2] = alone[0, 1, 8, 2] = 0           # the right elbow of the second person
  alone, together = draw(alone, kind), together
  together[0, 1, 8] = coco[0, 1, 8]                      # there again, on the shoulder
  together = draw(together, kind)
  arm = skeleton.LIMB_NAMES.index('right_shoulder-right_elbow')
  forearm = skeleton.LIMB_NAMES.index('right_elbow-right_wrist')
  np.testing.assert_array_equal(together.paf[..., arm, :], alone.paf[..., arm, :])   # adds a zero field
  others = [i for i in range(24) if i not in (arm, forearm)]
  np.testing.assert_array_equal(together.paf[..., others, :], alone.paf[..., others, :])
  noise = np.random.default_rng(5).normal(size=out.paf.shape).astype(np.float32)
  for prediction in (noise, 0 * noise):
    value, gradient = field_loss(prediction, out)
    assert np.isfinite(value) and np.isfinite(gradient).all()


@jax.jit
@jax.value_and_grad
def field_loss(paf, labels):
  return metrics.objective(losses.training_loss([paf], [], labels, jnp.ones(1), config.get_config().loss)[0])


@pytest.mark.parametrize('kind', ['hard', 'gaussian'])
def test_ignored_cells_open_under_labels(draw, kind):
  coco = np.zeros((1, 2, 17, 3), np.float32)
  coco[0, 0, 5], coco[0, 0, 7] = [10, 20, 2], [60, 20, 1]          # one arm, along row 4 (pixels 16 to 20) and 5
  ignore = np.ones((1, N, N), np.uint8)
  ignore[:, 20] = 0
  out = draw(coco, kind, ignore)
  use = np.asarray(out.use[0])
  labelled = (np.asarray(out.heatmap[0, ..., :18]) > 0).any(-1) | (np.abs(out.paf[0]) > 0).any((-1, -2))
  np.testing.assert_array_equal(use, np.maximum(labelled, ignore[0] == 0))
  assert use[5, 8] == 1 and use[20].all() and use[12:20].sum() == 0


def test_zero_output_on_photographs():
  # measured by others on these photographs: .0160 for heatmaps and .0043 for fields, with labels on the grid
  # i / 45 in shares of the stretched picture, sigma^2 = .008, s = .0015, 17 limbs, no background
  if not SHARED.exists():
    pytest.skip(f'{SHARED} is absent')
  people = [skeleton.from_coco(p) for p in photographs()]
  padded = np.zeros((len(people), max(map(len, people)), 18, 3), np.float32)
  for row, p in zip(padded, people):
    row[:len(p)] = p
  grid = jnp.arange(46, dtype=jnp.float32) / 45
  heat = jax.jit(lambda p: jnp.square(targets.heatmaps(p, grid, .008, .001)).mean())
  paf = jax.jit(lambda p: jnp.square(targets.gaussian_fields(p, grid, skeleton.limbs(False), .0015, .001)[0]).mean())
  parts = [np.array([heat(p[None]), paf(p[None])]) for p in padded]
  np.testing.assert_allclose(np.mean(parts, 0), [.0160, .0043], rtol=0.1)


def photographs():
  """f32[P, 17, 3] of each picture with labelled people, coordinates in shares of the picture's sides."""
  out = []
  for path in sorted(SHARED.glob('*.json')):
    data = json.loads(path.read_text())
    size = {i['id']: (i['width'], i['height']) for i in data['images']}
    people = {}
    for a in data['annotations']:
      if a.get('num_keypoints', 0) > 0:
        w, h = size[a['image_id']]
        keypoints = np.array(a['keypoints'], np.float32).reshape(17, 3) / np.array([w, h, 1], np.float32)
        people.setdefault(a['image_id'], []).append(keypoints)
    out += [np.stack(p) for p in people.values()]
  return out


# --- losses

def predictions(like, seed=3):
  """Two PAF and two heatmap stages of noise around the labels."""
  rng = np.random.default_rng(seed)
  noisy = lambda a: (np.asarray(a) + rng.normal(0, 0.2, a.shape)).astype(np.float32)
  return [noisy(like.paf), noisy(like.paf)], [noisy(like.heatmap), noisy(like.heatmap)]


@jax.jit
def value_gradients_sums(pafs, heatmaps, labels, mask):
  def loss(pafs, heatmaps):
    terms, sums = losses.training_loss(pafs, heatmaps, labels, mask, config.get_config().loss)
    return metrics.objective(terms), sums
  (value, sums), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(pafs, heatmaps)
  return value, gradients, sums


@pytest.fixture(scope='module')
def labelled(draw):
  """Labels of two pictures, the lower half of the first one ignored where nobody is labelled."""
  ignore = np.zeros((2, N, N), np.uint8)
  ignore[0, N // 2:] = 1
  coco = crowd(people=1, seed=4)
  coco[..., 1] *= 0.6
  return draw(np.pad(coco, ((0, 0), (0, 2), (0, 0), (0, 0))), 'hard', ignore)


def test_sums_equal_their_definition(labelled):
  pafs, heatmaps = predictions(labelled)
  mask = np.array([1, 0], np.float32)                    # the second picture is padding
  value, _, sums = value_gradients_sums(pafs, heatmaps, labelled, mask)
  m = np.asarray(labelled.use, np.float64)[..., None] * mask[:, None, None, None]
  total = 0
  stages = [('stage1_paf', pafs[0], labelled.paf), ('stage2_paf', pafs[1], labelled.paf),
            ('stage3_heatmap', heatmaps[0], labelled.heatmap), ('stage4_heatmap', heatmaps[1], labelled.heatmap)]
  for name, p, y in stages:
    p, y = (np.asarray(a, np.float64).reshape(2, N, N, -1) for a in (p, y))
    nobody = np.zeros_like(y)
    nobody[..., 18:] = 1 if 'heatmap' in name else 0
    wanted = {'loss': (m * (p - y)**2).sum() / (N * N * y.shape[-1]),
              'zero': (m * (nobody - y)**2).sum() / (N * N * y.shape[-1])}
    total += wanted['loss'] * (5 if 'paf' in name else 1)
    if 'heatmap' in name:
      p, y = p[..., :18], y[..., :18]
    a, b = m * np.abs(p), m * np.abs(y)
    wanted |= {'mae': (m * np.abs(p - y)).sum() / (N * N * y.shape[-1]), 'ratio': a.sum() / b.sum(),
               'recall': 1 - np.maximum(b - a, 0)[b > .01].sum() / b[b > .01].sum(),
               'precision': 1 - np.maximum(a - b, 0)[a > .01].sum() / a[a > .01].sum()}
    for key, number in wanted.items():
      got, weight = sums[f'{name}/{key}']
      np.testing.assert_allclose(got / weight, number, rtol=2e-5, err_msg=f'{name}/{key}')
  np.testing.assert_allclose(value, total, rtol=2e-5)
  np.testing.assert_allclose(sums['loss'], [total, 1], rtol=2e-5)
  assert len(sums) == 1 + 4 * 6 and list(sums)[1:] == sorted(list(sums)[1:], key=lambda k: k.split('/')[0])


def test_ignored_regions_have_no_loss_and_no_gradient(labelled):
  pafs, heatmaps = predictions(labelled)
  hidden = np.asarray(labelled.use) == 0
  assert hidden.sum() > 50
  mask = np.ones(2, np.float32)
  value, gradients, sums = value_gradients_sums(pafs, heatmaps, labelled, mask)
  shouting = [[np.where(hidden.reshape(2, N, N, *[1] * (p.ndim - 3)), np.float32(1e6), p) for p in kind]
              for kind in (pafs, heatmaps)]
  louder = value_gradients_sums(*shouting, labelled, mask)
  assert louder[0] == value                              # exactly
  for a, b in zip(jax.tree.leaves((gradients, sums)), jax.tree.leaves(louder[1:])):
    np.testing.assert_array_equal(a, b)
  for g in jax.tree.leaves(gradients):
    assert (np.asarray(g)[hidden] == 0).all()
  # outside the region nothing is forgiven: the gradient is that of a picture without ignored regions
  everywhere = labelled._replace(use=jnp.ones_like(labelled.use))
  unmasked = value_gradients_sums(pafs, heatmaps, everywhere, mask)[1]
  for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(unmasked)):
    np.testing.assert_array_equal(np.asarray(a)[~hidden], np.asarray(b)[~hidden])
  firing = [pafs[0].copy(), pafs[1]], heatmaps
  firing[0][0][~hidden] += 1
  assert value_gradients_sums(*firing, labelled, mask)[0] > value + 1


def test_padding_adds_exactly_nothing(labelled):
  pafs, heatmaps = predictions(labelled)
  mask = np.array([1, 0], np.float32)
  one = value_gradients_sums(pafs, heatmaps, labelled, mask)
  for a in pafs + heatmaps:
    a[1] = 1e6
  two = value_gradients_sums(pafs, heatmaps, labelled, mask)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
    np.testing.assert_array_equal(a, b)
  assert all((np.asarray(g)[1] == 0).all() for g in jax.tree.leaves(one[1]))
  value, gradients, sums = value_gradients_sums(pafs, heatmaps, labelled, 0 * mask)
  assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves((value, gradients, sums)))


def test_a_collapsed_network_is_noticed(labelled):
  mask = np.ones(2, np.float32)
  nobody = np.zeros_like(labelled.heatmap)
  nobody[..., 18] = 1                                    # a background of 1 must not pass for an answer
  collapsed = value_gradients_sums([np.zeros_like(labelled.paf)] * 2, [nobody] * 2, labelled, mask)[2]
  perfect = value_gradients_sums([labelled.paf] * 2, [labelled.heatmap] * 2, labelled, mask)[2]
  for stage in losses.stage_names(2, 2):
    of = lambda sums, key: float(sums[f'{stage}/{key}'][0] / sums[f'{stage}/{key}'][1])
    assert of(collapsed, 'ratio') == of(collapsed, 'recall') == 0 and of(perfect, 'loss') == 0
    np.testing.assert_allclose([of(collapsed, 'loss'), of(perfect, 'zero')], of(collapsed, 'zero'), rtol=1e-6)
    np.testing.assert_allclose([of(perfect, key) for key in ('ratio', 'recall', 'precision')], 1, rtol=1e-6)
