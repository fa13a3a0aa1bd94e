"""Decoding: derived numbers for the fields, degenerate maps, and how well perfect labels come back as people."""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from lab.systems.pose import assemble, config, decode, draw, score, skeleton, targets
from tests.conftest import FAST

SIZE, CELLS, STRIDE = 368, 46, 8.0
COCO = pathlib.Path(__file__).parents[2].parent / 'shared' / 'data' / 'pose' / 'coco2017_subset'
# (y, x) of a standing figure one high, our order
FIGURE = np.array([
    [.08, .50], [.20, .50], [.20, .38], [.36, .34], [.50, .36], [.52, .43],
    [.74, .42], [.96, .42], [.05, .47], [.07, .43], [.20, .62], [.36, .66],
    [.50, .64], [.52, .57], [.74, .58], [.96, .58], [.05, .53], [.07, .57]])


def options(**changes):
  out = config.get_config().decode
  out.update(changes)
  return out


def stand(*places):
  """f32[1, 3, 17, 3] (x, y, v) from figures (top, left, height), px."""
  out = np.zeros((1, 3, 17, 3), np.float32)
  for i, (top, left, height) in enumerate(places):
    body = np.c_[top + FIGURE[:, 0] * height, left + FIGURE[:, 1] * height, np.full(18, 2)]
    out[0, i] = skeleton.to_coco(body)
  return out


@functools.cache
def labeller(cells=CELLS, redundant=True, paf='hard', paf_width_px=8.0):
  target = config.get_config().target
  target.update(redundant_limbs=redundant, paf=paf, paf_width_px=paf_width_px)

  @functools.partial(jax.jit, compiler_options=FAST)      # a hundred photographs
  def maps(keypoints):
    made = targets.make(keypoints, jnp.zeros((keypoints.shape[0], cells, cells), jnp.uint8), SIZE / cells, target)
    return made.paf, made.heatmap
  return maps


@functools.cache
def decoder():
  chosen = options()
  return jax.jit(lambda paf, heatmap: decode.candidates(paf, heatmap, SIZE, chosen), compiler_options=FAST)


def gather(paf, heatmap, matrix=((1, 0, 0), (0, 1, 0)), **changes):
  """People of the first picture of the maps."""
  found = jax.tree.map(lambda a: np.asarray(a)[0], decoder()(paf, heatmap))
  assert all(np.isfinite(a).all() for a in found)
  return assemble.people(*found, np.array(matrix, float), options(**changes))


def alike(found, keypoints, tolerance=1.0):
  """Every figure is found once, whole, within `tolerance` px."""
  wanted = [k for k in keypoints[0] if k[:, 2].any()]
  assert len(found) == len(wanted)
  for k in wanted:
    off = [np.abs(p['keypoints'][:, :2] - k[:, :2]).max() + 1e9 * (p['keypoints'][:, 2] == 0).any() for p in found]
    assert sorted(off)[0] < tolerance


# --- numbers that can be derived


def test_alignment_in_a_constant_field():
  # F = (r, r), r = sqrt(1/2), everywhere. Along (1, 1) the mean of F.u is 1, across it 0, against it -1: only the first
  # is a limb. From (10, 10), by 10 cells: length 10 sqrt 2 < N / 2 = 20, so nothing is taken off for length.
  paf = jnp.full((1, 40, 40, 1, 2), np.sqrt(0.5), jnp.float32)
  cell = np.zeros((1, 18, 4, 2), np.float32)
  start, end = skeleton.LIMBS[0]
  cell[0, start, 0] = [20, 20]
  cell[0, end, :3] = [30, 30], [30, 10], [10, 10]
  heat = np.zeros((1, 18, 4), np.float32)
  heat[0, start, :1] = heat[0, end, :3] = 1
  for refuse in ({}, {'sample_min': -2.0}):      # also where no point is called invalid
    got = decode.limbs(paf, jnp.asarray(cell), jnp.asarray(heat), options(**refuse))
    np.testing.assert_allclose(got[0, 0, 0], [1, 0, 0, 0], atol=1e-6)
  back = decode.limbs(-paf, jnp.asarray(cell), jnp.asarray(heat), options())
  np.testing.assert_allclose(back[0, 0, 0], [0, 0, 1, 0], atol=1e-6)
  # a field that ends at column 24, 8 points at columns 20 + 10 i / 7: the first four are valid, with 1, 1, 1 and, read
  # between columns, 25 - 24.286 = .714. Half of the points are too few at .8; at .4 the mean is 3.714 / 8
  half = paf * (jnp.arange(40) < 25)[None, None, :, None, None]
  for share, expected in ((0.8, 0.0), (0.4, 3.714 / 8)):
    got = decode.limbs(half, jnp.asarray(cell), jnp.asarray(heat), options(valid_share=share, samples=8))
    np.testing.assert_allclose(got[0, 0, 0, 0], expected, atol=1e-3)


def test_long_limbs_are_taken_off():
  # N = 40, length 32: 40 / 64 - 1 = -.375
  paf = jnp.zeros((1, 40, 40, 1, 2)).at[..., 0].set(1)
  cell, heat = np.zeros((1, 18, 1, 2), np.float32), np.ones((1, 18, 1), np.float32)
  cell[0, skeleton.LIMBS[0][0], 0], cell[0, skeleton.LIMBS[0][1], 0] = [4, 7], [36, 7]
  got = decode.limbs(paf, jnp.asarray(cell), jnp.asarray(heat), options())
  np.testing.assert_allclose(got[0, 0, 0, 0], 0.625, atol=1e-6)


def test_the_field_is_read_between_cells():
  # F = (y, x) of each cell: bilinear reading is exact for it, and outside the border's value holds
  y, x = np.mgrid[:5, :7]
  field = jnp.asarray(np.stack([y, x], -1), jnp.float32)
  at = np.array([[1.25, 2.75], [0, 6], [4, 0], [-3, 9], [3.999, 0.001]], np.float32)
  np.testing.assert_allclose(decode._sample(field, jnp.asarray(at)), np.clip(at, 0, [4, 6]), atol=1e-5)


def test_peaks_of_gaussians_are_exact():
  # the logarithm of a Gaussian is a parabola, also at the border, where three cells inside give its top
  yx = np.array([[10.3, 7.8], [0.0, 5.45], [-0.4, 45.3], [30.5, 20.5], [45.2, 0.1]])
  grid = np.arange(CELLS)
  heat = np.exp(-((grid[:, None, None] - yx[:, 0])**2 + (grid[:, None] - yx[:, 1])**2) / (2 * 1.2**2)).max(-1)
  cell, value = decode.peaks(jnp.asarray(heat[None, ..., None], jnp.float32), 8, 0.1)
  assert (np.asarray(value)[0, 0] > 0).sum() == len(yx) and (np.diff(value[0, 0]) <= 0).all()
  for p in yx:
    assert np.abs(np.asarray(cell)[0, 0, :5] - p).max(-1).min() < 2e-3


def test_plateaus_give_one_peak_and_flat_maps_no_nan():
  heat = np.zeros((1, 9, 9, 3), np.float32)
  heat[0, 3:5, 3:6, 0] = 0.8                      # a plateau
  heat[0, :, :, 1] = 1.0                          # all hot
  heat[0, 4, 4] = [0.8, np.nan, np.inf]
  cell, value = decode.peaks(jnp.asarray(heat), 4, 0.1)
  assert np.isfinite(cell).all() and np.isfinite(value).all()
  assert (np.asarray(value)[0] > 0).sum(-1).tolist() == [1, 1, 0]
  assert (np.abs(cell - np.round(cell)) <= 0.5).all()


# --- degenerate input


@pytest.mark.parametrize('matching', ['greedy', 'hungarian'])
def test_coincident_candidates_change_nobody_else(matching):
  keypoints = stand((20, 10, 200), (100, 190, 220))
  plain = gather(*labeller()(keypoints), matching=matching, parts_min=3)
  alike(plain, keypoints)
  wrist, elbow = skeleton.KEYPOINTS.index('right_wrist'), skeleton.KEYPOINTS.index('right_elbow')
  paf, heatmap = (np.array(a) for a in labeller()(keypoints))
  at = (slice(None), slice(32, 42), slice(2, 12))  # a corner without people: the same blob in both channels
  blob = np.exp(-((np.arange(10) - 4.5)[:, None]**2 + (np.arange(10) - 4.6)**2) / 2)
  for k in (wrist, elbow):
    heatmap[(*at, k)] = blob
  odd = gather(paf, heatmap, matching=matching, parts_min=3)     # the blobs themselves make a pair
  assert len(odd) == 2 and all(np.isfinite(p['score']) for p in odd)
  for a, b in zip(plain, odd):
    np.testing.assert_array_equal(a['keypoints'], b['keypoints'])
  # and a hand over the own elbow: the person stays whole
  over = keypoints.copy()
  coco = skeleton.COCO[wrist], skeleton.COCO[elbow]
  over[0, 0, coco[0]] = over[0, 0, coco[1]]
  alike(gather(*labeller()(over), matching=matching), over)


def test_empty_maps_give_nobody():
  assert gather(np.zeros((1, CELLS, CELLS, 24, 2), np.float32), np.zeros((1, CELLS, CELLS, 19), np.float32)) == []
  nothing = np.full((1, CELLS, CELLS, 24, 2), np.nan, np.float32)
  assert gather(nothing, nothing[..., :19, 0]) == []


@pytest.mark.parametrize('merge', [True, False])
def test_random_maps_end_and_never_repeat_a_part(merge):
  for seed in range(6):
    rng = np.random.default_rng(seed)
    heatmap = rng.uniform(0, 1, (1, CELLS, CELLS, 19)).astype(np.float32)**(1 + seed)
    paf = rng.normal(0, 1, (1, CELLS, CELLS, 24, 2)).astype(np.float32) + (1 if seed % 2 else 0)
    found = jax.tree.map(lambda a: np.asarray(a)[0], decoder()(paf, heatmap))
    assert (found.score > 0).sum() > 400                       # hundreds of peaks
    people = assemble.people(*found, np.eye(2, 3), options(merge=merge))
    scores = [p['score'] for p in people]
    assert scores == sorted(scores, reverse=True) and all(np.isfinite(p['keypoints']).all() for p in people)
    used = [tuple(k[:2]) + (j,) for p in people for j, k in enumerate(p['keypoints']) if k[2] > 0]
    assert len(used) == len(set(used))                         # no peak in two people


# --- matching and fragments


def test_greedy_and_hungarian_differ_where_they_should():
  # greedy takes .9 and is left with .1; the best sum is .8 + .8
  scores = np.array([[.9, .8], [.8, .1]])
  assert [m[:2] for m in assemble.match(scores)] == [(0, 0), (1, 1)]
  assert sorted(m[:2] for m in assemble.match(scores, 'hungarian')) == [(0, 1), (1, 0)]
  for method in ('greedy', 'hungarian'):
    assert assemble.match(np.zeros((3, 3)), method) == []
    assert assemble.match(np.array([[.5, 0], [0, 0]]), method) == [(0, 0, .5)]
  with pytest.raises(ValueError, match='greedy or hungarian'):
    assemble.match(scores, 'random')


def connection(start, end, value, i=0, j=0):
  return assemble.Connection((skeleton.KEYPOINTS.index(start), i), (skeleton.KEYPOINTS.index(end), j), value)


def test_fragments_join_only_without_a_common_part():
  heat = np.ones((18, 2))
  shoulder, elbow = skeleton.KEYPOINTS.index('right_shoulder'), skeleton.KEYPOINTS.index('right_elbow')
  tree = [connection('neck', 'right_shoulder', .9), connection('right_shoulder', 'right_elbow', .8, 0, 1),
          connection('right_elbow', 'right_wrist', .7), connection('right_elbow', 'right_wrist', .6, 1, 0),
          connection('neck', 'right_hip', .5, 1, 0)]
  redundant = [connection('right_shoulder', 'right_hip', .9)]
  parts = assemble.fragments(tree, redundant, heat)
  assert all(len({(k, n) for k, n in p.items()}) == len(p) for p in parts)
  home = next(p for p in parts if p.get(shoulder) == 0)
  # elbow 1 belongs to shoulder 0; wrist 0 was taken by elbow 0 (.7), whose fragment has an elbow of its own; and the
  # hip hangs on neck 1 while the shoulder hangs on neck 0: neither may join
  assert home == {1: 0, shoulder: 0, elbow: 1}
  free = assemble.fragments(tree[:2], redundant, heat)
  assert next(p for p in free if p.get(shoulder) == 0)[skeleton.KEYPOINTS.index('right_hip')] == 0


def test_merging_can_be_switched_off():
  heat = np.zeros((18, 1))
  for name in ('right_shoulder', 'right_elbow', 'right_hip', 'right_knee', 'left_hip'):
    heat[skeleton.KEYPOINTS.index(name)] = 1
  tree = [connection('right_shoulder', 'right_elbow', .8), connection('right_hip', 'right_knee', .9)]
  redundant = [connection('right_hip', 'left_hip', .7), connection('right_shoulder', 'right_hip', .9)]
  assert [len(p) for p in assemble.fragments(tree, redundant, heat)] == [5]
  assert sorted(map(len, assemble.fragments(tree, redundant, heat, merge=False))) == [2, 3]


def test_people_in_original_pixels_and_pruned():
  keypoints = stand((20, 20, 300))
  maps = labeller()(keypoints)
  matrix = np.array([[2.0, 0, -10], [0, 2.0, 5]])
  person, = gather(*maps, matrix=matrix)
  np.testing.assert_allclose(person['keypoints'][:, :2], keypoints[0, 0, :, :2] * 2 + [-10, 5], atol=1)
  # 18 parts, none fainter than exp(-32 / 98) = .72 (the farthest a peak can be from a cell's centre: 4 px each way)
  assert 18 * .72 < person['score'] <= 18
  assert gather(*maps, parts_min=19) == [] and gather(maps[0], maps[1] * .15) == []
  # without the nose the head hangs on ears and shoulders; without redundant limbs it falls apart
  hidden = keypoints.copy()
  hidden[0, 0, 0] = 0
  assert len(gather(*labeller()(hidden))) == 1
  assert max((p['keypoints'][:, 2] > 0).sum() for p in gather(*labeller(redundant=False)(hidden))) == 12


# --- flip test


def test_flipped_maps_merge_to_the_direct_ones():
  keypoints = stand((30, 40, 250), (150, 180, 180))
  mirrored = keypoints[:, :, skeleton.COCO_MIRROR].copy()
  mirrored[..., 0] = np.where(mirrored[..., 2] > 0, SIZE - 1 - mirrored[..., 0], 0)
  for paf in ('hard', 'gaussian'):
    direct, flipped = labeller(paf=paf)(keypoints), labeller(paf=paf)(mirrored)
    for a, b in zip(decode.merge_flipped(*direct, *flipped), direct):
      np.testing.assert_allclose(a, b, atol=1e-4)
  small = [a for paf, heatmap in (direct, flipped) for a in (paf[..., :17, :], heatmap[..., :18])]
  tree = decode.merge_flipped(*small)
  np.testing.assert_allclose(tree[0], direct[0][..., :17, :], atol=1e-4)


# --- drawing


def test_drawing_keeps_shape_and_input():
  picture = np.full((90, 120, 3), 100, np.uint8)
  keypoints = stand((5, 20, 80))
  found = [{'keypoints': keypoints[0, 0], 'score': 9.5}, {'keypoints': np.zeros((17, 3)), 'score': 0.0},
           {'keypoints': keypoints[0, 0] + np.float32([1e6, -1e6, 0]), 'score': 1.0}]
  drawn = draw.people(picture, found, names=True, scores=True)
  assert drawn.shape == picture.shape and drawn.dtype == np.uint8 and (picture == 100).all() and (drawn != 100).any()
  assert (draw.people(picture, []) == picture).all()
  assert draw.people(np.zeros((1, 1, 3), np.uint8), found, names=True, scores=True).shape == (1, 1, 3)
  assert draw.side_by_side(picture, found[:1], []).shape == (90, 244, 3)
  assert len(set(draw.COLOURS)) == skeleton.TREE_LIMBS
  heat = np.zeros((9, 12), np.float32)
  heat[4, 6], heat[0, 0] = 1, np.nan
  hot = draw.heat(picture, heat)
  assert hot.shape == picture.shape and hot[45, 65].astype(int).sum() > hot[80, 5].astype(int).sum()
  square = picture[:, :90]
  panel = draw.panel(square, keypoints[0], found[:1], np.array([[2, 0, 3], [0, 2, 1]]), (heat[:, :9] > 0) * np.uint8(9))
  assert panel.shape == (90, 278, 3)


# --- perfect labels of COCO photographs, decoded


@functools.cache
def photographs():
  """[(image, its people, keypoints f32[32, 17, 3] in the letterboxed square, matrix)] of both splits."""
  out = []
  for split in ('train', 'val'):
    data = json.loads((COCO / 'annotations' / f'person_keypoints_{split}2017.json').read_text())
    for image in data['images']:
      truth = [a for a in data['annotations'] if a['image_id'] == image['id']]
      scale = SIZE / max(image['height'], image['width'])
      x, y = (SIZE - image['width'] * scale) / 2, (SIZE - image['height'] * scale) / 2
      keypoints = np.zeros((32, 17, 3), np.float32)
      for i, a in enumerate([a for a in truth if a['num_keypoints'] and not a['iscrowd']][:32]):
        k = np.array(a['keypoints'], float).reshape(17, 3)
        keypoints[i] = np.where(k[:, 2:] > 0, k * [scale, scale, 1] + [x, y, 0], 0)
      out.append((image, truth, keypoints, np.array([[1 / scale, 0, -x / scale], [0, 1 / scale, -y / scale]])))
  return out


def oracle(maps, candidates, **changes):
  """COCO AP of perfect maps, through candidates(paf, heatmap) and assembly."""
  records, step = [], 25
  for at in range(0, len(photographs()), step):
    group = photographs()[at:at + step]
    found = jax.tree.map(np.asarray, candidates(*maps(np.stack([g[2] for g in group]))))
    for i, (image, truth, _, matrix) in enumerate(group):
      people = assemble.people(found.position[i], found.score[i], found.limb[i], matrix, options(**changes))
      records.append({'image_id': image['id'], 'size': [image['height'], image['width']], 'people': people,
                      'truth': truth})
  return score.score(records)['AP']


coco = pytest.mark.skipif(not COCO.is_dir(), reason=f'needs the COCO photographs in {COCO}')


@coco
@pytest.mark.parametrize('cells, redundant, width, least',
                         [(46, False, 8.0, .74), (46, True, 8.0, .84), (92, True, 4.0, .87)])
def test_perfect_labels_come_back(cells, redundant, width, least):
  found = oracle(labeller(cells, redundant, 'hard', width), decoder())
  print(f'\noracle {cells}x{cells}, {24 if redundant else 17} limbs: AP {found:.3f}', file=sys.stderr)
  assert found >= least


def one_an_island(found, heatmap):
  """Keeps the hottest peak of each 4-connected island above one half, as the older decoder did."""
  score_of = np.array(found.score)
  for b, k in np.ndindex(score_of.shape[:2]):
    island, _ = ndimage.label(np.asarray(heatmap[b, :, :, k]) > 0.5)
    cell = np.clip(np.round((np.asarray(found.position[b, k]) + 0.5) / STRIDE - 0.5).astype(int), 0, CELLS - 1)
    taken = {0}
    for i in range(score_of.shape[2]):              # hottest first
      at = island[tuple(cell[i])]
      score_of[b, k, i] *= at not in taken
      taken.add(at)
  return score_of


@coco
def test_whole_cells_and_islands_are_what_limits_wide_labels():
  """The older decoder's choices, one at a time, on its own wide labels (23 px) and on ours (7 px)."""
  chosen = options()
  rescore = jax.jit(lambda paf, cell, heat: decode.limbs(paf, cell, heat, chosen), compiler_options=FAST)

  def variant(islands, whole):
    def candidates(paf, heatmap):
      found = decoder()(paf, heatmap)
      heat = one_an_island(found, heatmap) if islands else found.score
      cell = (found.position + 0.5) / STRIDE - 0.5
      cell = jnp.round(cell) if whole else cell
      return decode.Candidates((cell + 0.5) * STRIDE - 0.5, heat, rescore(paf, cell, heat))
    return candidates

  target = config.get_config().target
  target.update(redundant_limbs=False, paf='gaussian', sigma_px=float(np.sqrt(.004)) * SIZE, paf_s_px2=.0015 * SIZE**2)
  wide = jax.jit(lambda k: targets.make(k, jnp.zeros((k.shape[0], CELLS, CELLS), jnp.uint8), STRIDE, target)[1::-1],
                 compiler_options=FAST)
  got = {(islands, whole): oracle(wide, variant(islands, whole))
         for islands in (True, False) for whole in (True, False)}
  narrow = oracle(labeller(redundant=False), variant(False, True))
  print('\noracle, wide labels (islands, whole cells):', {k: round(v, 3) for k, v in got.items()},
        f'; narrow, whole cells: {narrow:.3f}', file=sys.stderr)
  # measured elsewhere on 101 other photographs of COCO: .237, .424, .311, .708
  for key, other in (((True, True), .237), ((True, False), .424), ((False, True), .311), ((False, False), .708)):
    assert abs(got[key] - other) < .08
  assert got[True, True] < min(got[True, False], got[False, True]) and narrow < got[False, False]
  assert max(got[True, False], got[False, True]) < got[False, False]
