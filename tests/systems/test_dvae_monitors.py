"""What is measured and shown of a discrete VAE on the host: numbers derived by hand, pictures by the pixel."""

import json
import math
import os

import numpy as np
import pytest

from lab.systems.dvae import monitors, pictures
from lab.systems.dvae.canvas import MASK, NEWLINE, PAD

EVALUATION = os.path.join(os.path.dirname(__file__), '../../../shared/data/dvae/arc_agi_1_evaluation.json')
LN2 = math.log(2)


def record(codes=(), pair=0, is_input=1, exact=False, right=0, cells=4, **factors):
  return {'codes': list(codes), 'pair': pair, 'is_input': is_input, 'height': 2, 'width': 2, 'colours': 2,
          'background': 0, 'exact': exact, 'right': right, 'cells': cells, **factors}


def grids_of(*slots, **factors):
  """A record a grid, from what each slot and factor holds over the grids; none has a partner."""
  return [record(code, pair=i, **{k: v[i] for k, v in factors.items()}) for i, code in enumerate(zip(*slots))]


def noise(n, slots, codes, seed=0):
  """Records of independent random codes, pairs, factors and cells."""
  rng = np.random.default_rng(seed)
  return [record(rng.integers(0, codes, slots).tolist(), pair=i // 2, is_input=i % 2, exact=bool(rng.integers(2)),
                 right=int(rng.integers(5)), height=int(rng.integers(3)), background=int(rng.integers(2)))
          for i in range(n)]


# --- grids

def test_grids_and_cells_are_shares_of_all_inputs_and_outputs():
  got = monitors.score([record(is_input=1, exact=True, right=4, cells=4), record(is_input=0, right=3, cells=6),
                        record(is_input=0, exact=True, right=10, cells=10)], codes=8)
  # cells: (4 + 3 + 10) / (4 + 6 + 10), not the mean of the grids' shares; outputs 13 / 16
  want = {'exact_grids': 2 / 3, 'exact_inputs': 1.0, 'exact_outputs': 0.5, 'non_pad_accuracy': 17 / 20,
          'non_pad_accuracy_inputs': 1.0, 'non_pad_accuracy_outputs': 13 / 16}
  assert got == pytest.approx(want)                           # and nothing of codes without a quantizer
  assert json.loads(json.dumps(got)) == got


def test_what_has_no_data_is_left_out():
  assert monitors.score([], codes=8) == {}
  one = monitors.score(iter([record([3], right=1)]), codes=8)                    # no output, no pair, no second slot
  assert set(one) == {'exact_grids', 'exact_inputs', 'non_pad_accuracy', 'non_pad_accuracy_inputs', 'bits',
                      'code_usage', 'dead_codes', 'code_perplexity', 'code_perplexity/slot_00',
                      'code_perplexity_per_slot', 'mi_nats_per_latent', 'tc_nats_per_latent', 'dwkl_nats_per_latent'}
  assert all(math.isfinite(v) for v in one.values())
  assert one['code_perplexity'] == one['code_perplexity_per_slot'] == 1          # a constant has no entropy


# --- codes

def test_usage_and_perplexity():
  got = monitors.score(grids_of([0, 0, 1, 1], [5, 5, 5, 5]), codes=8)
  assert got['bits'] == 6                                     # 2 slots of log2 8 = 3 bits
  assert got['code_usage'] == 3 / 8 and got['dead_codes'] == 5
  # all slots: 0, 1 and 5 with shares 1/4, 1/4, 1/2: H = 2 (1/4) ln 4 + (1/2) ln 2 = 1.5 ln 2
  assert got['code_perplexity'] == pytest.approx(2**1.5)
  assert got['code_perplexity/slot_00'] == pytest.approx(2) and got['code_perplexity/slot_01'] == pytest.approx(1)
  assert got['code_perplexity_per_slot'] == pytest.approx(1.5)


def test_codes_differ_in_pairs_that_are_whole():
  records = [record([1, 2, 3, 4], pair=7, is_input=1), record([1, 2, 3, 5], pair=7, is_input=0),
             record([0, 0, 0, 0], pair=8, is_input=1), record([1, 1, 1, 1], pair=9, is_input=0),
             record([6, 6, 6, 6], pair=3, is_input=0), record([7, 7, 7, 6], pair=3, is_input=1)]
  # pair 7: 1 of 4 slots; pair 3: 3 of 4; pairs 8 and 9 lack a side
  assert monitors.score(records, codes=8)['codes_differ_in_pair'] == pytest.approx((1 / 4 + 3 / 4) / 2)
  assert 'codes_differ_in_pair' not in monitors.score(records[2:4], codes=8)


@pytest.mark.parametrize('second, want', [
    ([0, 0, 1, 1] * 25, LN2),            # a copy: H(a) of a fair bit
    ([7, 7, 3, 3] * 25, LN2),            # a copy under other names
    ([0, 1, 0, 1] * 25, 0.0),            # independent: all four pairs equally often
    # joint shares (0,0) 1/2, (1,0) 1/4, (1,1) 1/4: H(b) = ln 4 - (3/4) ln 3, H(b | a) = (1/2) ln 2
    ([0, 0, 0, 1] * 25, math.log(4) - 0.75 * math.log(3) - 0.5 * LN2)])
def test_slots_that_copy_share_their_entropy(second, want):
  got = monitors.score(grids_of([0, 0, 1, 1] * 25, second), codes=8)
  assert got['slot_mi'] == pytest.approx(want, abs=1e-12)
  # shuffled, two bits share about (2 - 1)(2 - 1) / (2 n) = 0.005 nats in 100 grids
  assert 0 <= got['slot_mi_floor'] < 0.05


def test_slot_mi_is_the_mean_over_pairs():
  bit, other = [0, 0, 1, 1], [0, 1, 0, 1]
  # of the pairs (0, 1), (0, 2), (1, 2) only the first are copies
  assert monitors.score(grids_of(bit, bit, other), codes=2)['slot_mi'] == pytest.approx(LN2 / 3)


def test_mutual_information_equals_its_definition():
  """Against sum p(a, b) ln p(a, b) / (p(a) p(b)) over a table, in float64."""
  taken = np.random.default_rng(3).integers(0, 5, (4, 60))
  taken[2] = (taken[0] + taken[1]) // 2
  found = []
  for a in range(4):
    for b in range(a + 1, 4):
      joint = np.zeros((5, 5))
      np.add.at(joint, (taken[a], taken[b]), 1 / 60)
      alone = joint.sum(1, keepdims=True) @ joint.sum(0, keepdims=True)
      found.append((joint[joint > 0] * np.log(joint[joint > 0] / alone[joint > 0])).sum())
  assert monitors.score(grids_of(*taken.tolist()), codes=5)['slot_mi'] == pytest.approx(np.mean(found))


def test_the_floor_is_the_bias_of_independent_slots():
  got = monitors.score(noise(300, 6, 16), codes=16)
  # plug-in bias (Miller 1955, to first order): 15 * 15 / (2 * 300) = 0.375 nats, though nothing is shared
  assert got['slot_mi_floor'] == pytest.approx(0.375, rel=0.2)
  assert got['slot_mi'] == pytest.approx(got['slot_mi_floor'], rel=0.1)


def test_a_factor_that_one_slot_alone_knows_has_gap_1():
  bit, other = [0, 0, 1, 1], [0, 1, 0, 1]
  got = monitors.score(grids_of(bit, other, height=[3, 3, 9, 9]), codes=2)
  # width, colours and background do not vary: nothing to know, and no part of the mean
  assert {k: v for k, v in got.items() if k.startswith('mig')} == pytest.approx({'mig': 1.0, 'mig/height': 1.0})
  # a second slot that knows it too closes the gap: 0; half of what `width` is (4 values, ln 4) each: 0
  got = monitors.score(grids_of(bit, bit, other, height=[3, 3, 9, 9], width=[1, 2, 3, 4]), codes=2)
  assert got['mig/height'] == pytest.approx(0) and got['mig/width'] == pytest.approx(0)
  # a lone slot of one bit knows ln 2 of ln 4, and no other anything: 1/2; with height's 1 the mean is 3/4
  got = monitors.score(grids_of(bit, height=[3, 3, 9, 9], width=[1, 2, 3, 4]), codes=2)
  assert got['mig/width'] == pytest.approx(0.5) and got['mig'] == pytest.approx(0.75)


def test_factors_may_be_others():
  records = grids_of([0, 0, 1, 1], [0, 1, 0, 1], turned=[0, 1, 0, 1], height=[1, 1, 2, 2])
  got = monitors.score(records, codes=2, factors=('turned',))
  assert got['mig/turned'] == pytest.approx(1) and 'mig/height' not in got


def test_no_order_of_grids_and_no_name_of_a_code_changes_a_score():
  records = noise(60, 5, 7)
  got = monitors.score(records, codes=7)
  mixed = [records[i] for i in np.random.default_rng(1).permutation(60)]
  assert monitors.score(mixed, codes=7) == pytest.approx(got, rel=1e-12)
  renamed = [{**r, 'codes': [6 - c for c in r['codes']]} for r in records]
  again = monitors.score(renamed, codes=7)
  # the floor is another draw: shuffling starts from other names
  assert again.pop('slot_mi_floor') > 0 and got.pop('slot_mi_floor') > 0
  assert again == pytest.approx(got, rel=1e-9)


def test_codes_that_are_none_are_refused():
  with pytest.raises(ValueError, match=r'codes 0\.\.8; a codebook of 8 has 0\.\.7'):
    monitors.score([record([0, 8])], codes=8)
  with pytest.raises(ValueError, match='-1'):
    monitors.score([record([-1])], codes=8)
  with pytest.raises(ValueError, match='different lengths'):
    monitors.score([record([1, 2]), record([])], codes=8)


# --- length of a code

def test_deflate_counts_whole_bytes_of_cells():
  constant, random = np.full((30, 30), 7, np.uint8), np.random.default_rng(0).integers(0, 10, (30, 30), np.uint8)
  few, many = monitors.deflate_bits([constant, random])
  # ten symbols need log2 10 = 3.32 bits each in noise; a Huffman code of them and its table need somewhat more
  assert 8 < few < 200 and 900 * 3.32 < many < 900 * 4
  # one cell: a final block of the fixed code is 3 bits, 8 of a symbol below 144, 7 of its end: 18 bits in 3 bytes
  assert monitors.deflate_bits([np.zeros((1, 1), np.uint8)]).tolist() == [24]
  wide = np.asfortranarray(random)                                    # rows first, however the memory lies
  assert monitors.deflate_bits([wide, wide.astype(np.int64)]).tolist() == [many, many]


def test_capacity_adds_two_deviations_and_the_augmentation():
  # of 24 and 224 the mean is 124 and the standard deviation 100
  found = monitors.capacity(100, np.array([24, 224]))
  assert found == pytest.approx({'bits_needed': 124 + 200 + math.log2(math.factorial(10)) + 3, 'deflate_fits': 0.5})
  assert found['bits_needed'] - 324 == pytest.approx(24.79, abs=0.005)


def test_the_divergence_of_codes_is_cut_in_three():
  # two slots of two codes that copy each other, as often 0 as 1: H(z) = H(z_1) = H(z_2) = ln 2
  two = [record(codes=[i % 2] * 2) for i in range(8)]
  found = monitors.score(two, 2)
  assert [found[f'{k}_nats_per_latent'] for k in ('mi', 'tc', 'dwkl')] == pytest.approx([math.log(2) / 2] * 2 + [0])
  # always the same code: nothing is told, and the divergence is all of ln 2 a latent
  found = monitors.score([record(codes=[1, 0])] * 5, 2)
  assert [found[f'{k}_nats_per_latent'] for k in ('mi', 'tc', 'dwkl')] == pytest.approx([0, 0, math.log(2)], abs=1e-12)


def test_capacity_of_arc_agi_1_evaluation():
  if not os.path.exists(EVALUATION):
    pytest.skip('ARC-AGI-1 evaluation is not at ../shared/data/dvae')
  with open(EVALUATION, encoding='utf-8') as f:
    tasks = json.load(f).values()
  grids = [np.array(pair[side], np.uint8) for task in tasks for part in ('train', 'test') for pair in task[part]
           for side in ('input', 'output')]
  assert len(grids) == 3564
  # another release of zlib may find other matches: tolerances of 2 %
  bits = monitors.deflate_bits(grids)
  assert bits.mean() == pytest.approx(325, rel=0.02) and np.median(bits) == pytest.approx(232, rel=0.02)
  for code, share in ((16 * 9, 0.28), (64 * 9, 0.88), (128 * 9, 0.97), (256 * 9, 0.997)):
    assert (bits <= code).mean() == pytest.approx(share, abs=0.01)
  assert monitors.capacity(64 * 9, bits)['deflate_fits'] == (bits <= 576).mean()


# --- pictures

def centres(picture, rows, columns):
  """u8[rows, columns, 3]: pixels in the middle of the cells of a square picture."""
  size, side = len(picture), (len(picture) - 1) // max(rows, columns)
  top, left = ((size - n * side - (side >= pictures.LINED_PX)) // 2 for n in (rows, columns))
  return picture[top + side // 2::side, left + side // 2::side][:rows, :columns]


def has(picture, colour):
  return (picture == np.array(colour, np.uint8)).all(-1).any()


@pytest.mark.parametrize('shape, size_px', [((2, 5), 101), ((5, 2), 64), ((30, 30), 100), ((30, 30), 240)])
def test_cells_have_the_colours_of_arc(shape, size_px):
  cells = (np.arange(math.prod(shape)) % 10).astype(np.uint8).reshape(shape)
  picture = pictures.grid(cells, size_px)
  assert picture.shape == (size_px, size_px, 3) and picture.dtype == np.uint8
  seen = centres(picture, *shape)
  np.testing.assert_array_equal(seen, np.array(pictures.COLOURS, np.uint8)[cells])
  assert '#{:02X}{:02X}{:02X}'.format(*seen.reshape(-1, 3)[1]) == '#0074D9'
  # lines where there is room: cells of 100 px / 30 have none
  assert has(picture, pictures.LINE) == (size_px > 30 * pictures.LINED_PX or shape != (30, 30))


def test_what_is_outside_of_a_grid_is_neutral():
  picture = pictures.grid(np.zeros((1, 4), np.uint8), 81)             # cells of 20 px: 21 rows of 81, the middle ones
  assert (picture[:30] == pictures.OUTSIDE).all() and (picture[51:] == pictures.OUTSIDE).all()
  assert (picture[30:51] != np.array(pictures.OUTSIDE)).all()


def test_other_tokens_are_grey_and_hatched_unless_outside():
  for token, hatched in ((MASK, True), (NEWLINE, True), (PAD, False), (255, False)):
    picture = pictures.grid(np.full((2, 2), token, np.uint8), 61)
    assert has(picture, pictures.MID) and has(picture, pictures.HATCH) == hatched
    assert not any(has(picture, colour) for colour in pictures.COLOURS)
  assert (pictures.grid(np.zeros((0, 0), np.uint8), 9) == pictures.OUTSIDE).all()
  with pytest.raises(ValueError, match='30 x 30 cells do not fit into 30 px; give at least 31'):
    pictures.grid(np.zeros((30, 30), np.uint8), 30)


def test_equal_codes_are_equal_tiles():
  code = np.array([5, 0, 5, 1, 511, 5, 0], np.int32)                  # 7 tiles in rows of 3
  picture = pictures.codes(code, 512, 91)
  seen = centres(picture, 3, 3).reshape(9, 3)
  for i, a in enumerate(code):
    for j, b in enumerate(code):
      assert (seen[i] == seen[j]).all() == (a == b)
  assert (seen[7:] == pictures.OUTSIDE).all()
  np.testing.assert_array_equal(picture, pictures.codes(code.tolist(), 512, 91))
  with pytest.raises(ValueError, match='code 512 is not one of 512'):
    pictures.codes(np.array([512]), 512, 91)


@pytest.mark.parametrize('count', [1, 2, 3, 16, 512, 1000])
def test_every_code_has_a_colour_of_its_own(count):
  columns = math.ceil(math.sqrt(count))
  seen = centres(pictures.codes(np.arange(count), count, 5 * columns + 1), math.ceil(count / columns), columns)
  assert len(np.unique(seen.reshape(-1, 3)[:count], axis=0)) == count


def test_neighbours_in_number_are_far_apart():
  seen = centres(pictures.codes(np.arange(64), 64, 81), 8, 8).reshape(64, 3).astype(int)
  # two hues at a golden section's distance, 0.38 turns, differ by far more than a shade
  assert np.abs(np.diff(seen, axis=0)).max(-1).min() > 90


def test_a_panel_marks_the_wrong_cells():
  truth = np.array([[0, 1], [2, 3]], np.uint8)
  rebuilt = truth.copy()
  rebuilt[1, 0] = 4
  picture = pictures.panel(truth, np.array([1, 2, 3, 4]), rebuilt, count=8, height_px=101)
  assert picture.shape == (101, 3 * 101 + 2 * pictures.GAP_PX, 3)
  left, middle, right = (picture[:, i * (101 + pictures.GAP_PX):][:, :101] for i in range(3))
  np.testing.assert_array_equal(left, pictures.grid(truth, 101))
  np.testing.assert_array_equal(middle, pictures.codes(np.array([1, 2, 3, 4]), 8, 101))
  np.testing.assert_array_equal(centres(right, 2, 2), np.array(pictures.COLOURS)[rebuilt])
  # cells of 50 px; only the lower left one has an outline
  changed = (right != pictures.grid(rebuilt, 101)).any(-1)
  assert changed[51:, :50].any() and not changed[:50].any() and not changed[:, 51:].any()
  assert has(right[51:, :50], pictures.RED) and has(right[51:, :50], pictures.WHITE)
  # nothing wrong: three pictures as they are
  whole = pictures.panel(truth, None, truth, height_px=101)
  assert whole.shape == (101, 2 * 101 + pictures.GAP_PX, 3)
  np.testing.assert_array_equal(whole[:, :101], whole[:, -101:])


def test_a_panel_shows_cells_written_outside_of_the_grid():
  truth = np.ones((2, 2), np.uint8)
  canvas = np.full((32, 32), PAD, np.uint8)
  canvas[:2, :2] = 1
  np.testing.assert_array_equal(pictures.panel(truth, None, canvas), pictures.panel(truth, None, truth))
  canvas[3, 1] = 6                                                    # now both are 4 x 2, drawn at one scale
  picture = pictures.panel(truth, None, canvas, height_px=81)
  left, right = picture[:, :81], picture[:, -81:]
  want = np.full((4, 2), PAD, np.uint8)
  want[:2] = 1
  np.testing.assert_array_equal(left, pictures.grid(want, 81))
  assert (centres(right, 4, 2)[3, 1] == pictures.COLOURS[6]).all()
  assert has(right[60:], pictures.RED) and not has(right[:60], pictures.RED)
  # nothing rebuilt at all
  empty = pictures.panel(truth, None, np.full((32, 32), PAD, np.uint8), height_px=81)
  assert (centres(empty[:, -81:], 2, 2) == pictures.MID).all()


@pytest.mark.parametrize('height_px', [64, 240, 5000])
def test_a_panel_is_bounded(height_px):
  cells = np.random.default_rng(0).integers(0, 10, (30, 30), np.uint8)
  picture = pictures.panel(cells, np.arange(64), 9 - cells, count=512, height_px=height_px)
  # the bound: (1200 - 2 * 6) / 3 = 396 px a square
  assert picture.shape[0] == min(height_px, 396) and max(picture.shape) <= pictures.LONGEST_PX
  np.testing.assert_array_equal(picture, pictures.panel(cells, np.arange(64), 9 - cells, 512, height_px))


@pytest.mark.parametrize('n, rows, columns', [(1, 1, 1), (8, 1, 8), (10, 2, 9), (200, None, None)])
def test_a_strip_reads_from_left_to_right_in_rows(n, rows, columns):
  grids = [np.full((3, 3), i % 10, np.uint8) for i in range(n)]
  picture = pictures.strip(grids)
  assert max(picture.shape) <= pictures.LONGEST_PX
  if rows:                                                            # (1200 + 6) // (120 + 6) = 9 fit into a row
    assert picture.shape == (rows * 126 - 6, columns * 126 - 6, 3)
    middles = picture[60::126, 60::126].reshape(-1, 3)
    np.testing.assert_array_equal(middles[:n], np.array(pictures.COLOURS)[np.arange(n) % 10])
    assert (middles[n:] == pictures.OUTSIDE).all()


def test_a_strip_has_one_scale():
  small = np.full((1, 1), 2, np.uint8)
  picture = pictures.strip([small, np.full((4, 4), 3, np.uint8)], size_px=81)
  want = np.full((4, 4), PAD, np.uint8)
  want[0, 0] = 2
  np.testing.assert_array_equal(picture[:, :81], pictures.grid(want, 81))
  with pytest.raises(ValueError, match='do not fit'):
    pictures.strip([np.zeros((30, 30), np.uint8)] * 1500)
  for side in (30, 7):
    grids = [np.zeros((side, side), np.uint8)] * pictures.most(side)
    assert max(pictures.strip(grids).shape) <= pictures.LONGEST_PX
    with pytest.raises(ValueError, match=f'{len(grids) + 1} grids do not fit'):
      pictures.strip([*grids, grids[0]])
