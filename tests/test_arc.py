"""ARC grids: leaks between the splits, records, the source, the sample, the published tasks."""

import itertools
import json
import os
import tarfile

import numpy as np
import pytest
from data_pipelines import DataError, arc, arc_raw, pipeline, prepare, prepared

from tests.conftest import ROOT
from tests.test_arc_raw import A, B, C, OTHER, TASK, listed, make, save
from tests.test_corpus import examples

SHARED = os.path.join(ROOT, '..', 'shared', 'data', 'dvae')
shared = pytest.mark.skipif(not os.path.exists(SHARED), reason='the data sets in ../shared/data are not there')


def records(folder, split):
  """The records of a split of a prepared folder, which is checked on the way."""
  assert not list(prepared.problems(folder, arc.check))
  tf, shards = pipeline.tensorflow(), prepared.manifest(folder)['splits'][split]['shards']
  read = tf.data.TFRecordDataset([os.path.join(folder, n) for n in sorted(shards)]).map(arc.decode)
  return [{k: v.tolist() if k == 'grid' else v.decode() if isinstance(v, bytes) else int(v) for k, v in r.items()}
          for r in read.as_numpy_iterator()]


# leaks

def changed(task, turn=0, names=None):
  """A task under map `turn` of the square and other colours."""
  names = np.arange(10) if names is None else np.array(names)
  grid = lambda g: names[np.rot90(np.array(g).T if turn >= 4 else np.array(g), turn % 4)].tolist()
  return {part: [{k: grid(g) for k, g in pair.items()} for pair in pairs] for part, pairs in task.items()}


PERMUTED = [3, 9, 0, 1, 5, 4, 7, 6, 2, 8]
SECRET = {'train': [{'input': [[1, 2], [3, 1]], 'output': C}, {'input': [[2, 2], [3, 1]], 'output': A}],
          'test': [{'input': B, 'output': A}]}
LEAKING = {'training/a.json': TASK, 'evaluation/v.json': SECRET, 'training/v.json': OTHER,
           'training/same.json': {'train': SECRET['test'] + SECRET['train'][::-1] * 2, 'test': []},
           'training/turned.json': changed(SECRET, 1), 'training/mirrored.json': changed(SECRET, 6, PERMUTED),
           'training/coloured.json': changed(SECRET, 0, PERMUTED),
           # 0 in place of 7: the same grids, one by one, but not with one renaming, for 0 is in C too
           'training/close.json': {**SECRET, 'test': [{'input': [[0]], 'output': A}]}}
LEAKS = [('coloured', 'v', 'symmetry'), ('mirrored', 'v', 'symmetry'), ('same', 'v', 'content'),
         ('turned', 'v', 'symmetry'), ('v', 'v', 'id')]


def told(report):
  return [(leak['train'], leak['evaluation'], leak['kind']) for leak in report['leaks']]


def test_leaks_are_dropped_and_reported(tmp_path, capsys):
  raw = save(tmp_path / 'raw', LEAKING)
  code, report = make(capsys, raw, tmp_path / 'out')
  assert code == 0 and told(report) == LEAKS and {x['done'] for x in report['leaks']} == {'left out of train'}
  folder = str(tmp_path / 'out' / arc.NAME / arc.VERSION)
  assert {r['task'] for r in records(folder, 'train')} == {'a', 'close'}
  assert {r['task'] for r in records(folder, 'evaluation')} == {'v'}
  assert prepared.manifest(folder)['report'] == report
  code, report = make(capsys, raw, tmp_path / 'out2', '--noinvariant')
  assert code == 0 and told(report) == [x for x in LEAKS if x[2] != 'symmetry']
  assert report['splits']['train']['tasks'] == 5


def test_leaks_may_be_kept_or_refused(tmp_path, capsys):
  raw = save(tmp_path / 'raw', LEAKING)
  code, report = make(capsys, raw, tmp_path / 'out', '--leaks=keep')
  assert code == 0 and told(report) == LEAKS and {x['done'] for x in report['leaks']} == {'kept'}
  assert report['splits']['train']['tasks'] == 7
  code, err = make(capsys, raw, tmp_path / 'out3', '--leaks=refuse')
  assert code == 3 and err.count('\n') == 1
  assert 'coloured.json: task coloured of train and' in err and 'v.json: task v of evaluation are one' in err
  for name in ('coloured', 'mirrored', 'same', 'turned', 'v'):
    os.unlink(os.path.join(raw, 'training', f'{name}.json'))
  assert make(capsys, raw, tmp_path / 'out3', '--leaks=refuse')[1]['leaks'] == []


def test_what_else_has_the_id_of_a_leak_is_one(tmp_path, capsys):
  raw = save(tmp_path / 'raw', {'evaluation/v.json': SECRET, 'training/same.json': LEAKING['training/same.json'],
                                'training/generated.json': {'same': OTHER, 'fresh': TASK}})
  code, report = make(capsys, raw, tmp_path / 'out')
  assert code == 0 and told(report) == [('same', 'v', 'id'), ('same', 'v', 'content')]
  assert {r['task'] for r in records(str(tmp_path / 'out' / arc.NAME / arc.VERSION), 'train')} == {'fresh'}


def test_a_line_is_no_id(tmp_path, capsys):
  """The first task of two files need not be the same program; a task that is all that train has must stay."""
  raw = save(tmp_path / 'raw', {'train/x.jsonl': [TASK], 'valid/x.jsonl': [OTHER]})
  assert make(capsys, raw, tmp_path / 'out')[1]['leaks'] == []
  raw = save(tmp_path / 'raw2', {'train/x.jsonl': [OTHER], 'valid/y.jsonl': [OTHER]})
  code, err = make(capsys, raw, tmp_path / 'out2')
  assert code == 3 and 'no grid of train remains; 1 tasks are left out as leaks' in err


def task_of(pairs):
  """A Task of arrays."""
  return arc_raw.Task('t', True, arc_raw.File('', '', 'train', ''), '',
                      tuple(arc_raw.Pair(np.array(i, np.uint8), np.array(o, np.uint8), 'train', 1) for i, o in pairs))


def exhaustive(pairs, others):
  """Whether one of all maps and all renamings makes the one set of pairs the other."""
  used = [sorted({int(v) for pair in p for g in pair for v in g.ravel()}) for p in (pairs, others)]
  if len(used[0]) != len(used[1]):
    return False
  key = lambda p: frozenset(tuple((g.shape, g.tobytes()) for g in pair) for pair in p)
  table = np.zeros(10, np.uint8)
  for k, new in itertools.product(range(8), itertools.permutations(used[1])):
    table[used[0]] = new
    if key([[np.rot90(table[g].T if k >= 4 else table[g], k % 4) for g in pair] for pair in pairs]) == key(others):
      return True
  return False


def test_likeness_is_what_all_maps_and_renamings_find():
  draw, found = np.random.default_rng(0), []
  for n in range(300):
    shape, colours = draw.integers(1, 3, 2), draw.permutation(10)[:draw.integers(2, 5)]
    pairs = [[draw.choice(colours, shape).astype(np.uint8) for _ in range(2)] for _ in range(draw.integers(1, 5))]
    k, names = n % 8, draw.permutation(10).astype(np.uint8)
    others = [[np.rot90(names[g].T if k >= 4 else names[g], k % 4).copy() for g in pair] for pair in pairs[::-1]]
    if n % 2:                # one or two cells of another colour
      for _ in range(draw.integers(1, 3)):
        grid = others[draw.integers(len(others))][draw.integers(2)]
        grid[tuple(draw.integers(grid.shape))] = names[draw.choice(colours)]
    wanted = exhaustive(pairs, others)
    assert bool(arc.likeness(task_of(pairs), task_of(others), True)) == wanted, (pairs, others)
    assert not wanted or arc._signature(task_of(pairs)) == arc._signature(task_of(others))
    found.append(wanted)
  assert all(found[::2]) and 20 < sum(found[1::2]) < 130        # cells may get the colour that they had


def test_likeness_of_tasks_whose_pairs_look_alike():
  """Pairs of one pattern in different colours: which goes to which is for the renaming to say."""
  ring = lambda order: [([[a]], [[b]]) for a, b in zip(order, order[1:] + order[:1])]
  one = task_of(ring(list(range(10))))
  assert arc.likeness(one, task_of(ring([3, 9, 0, 1, 5, 4, 7, 6, 2, 8])), True) == 'symmetry'
  two = task_of(ring([0, 1, 2, 3, 4]) + ring([5, 6, 7, 8, 9]))       # every colour's role is the same
  assert arc._signature(one) == arc._signature(two) and arc.likeness(one, two, True) == ''
  solid = lambda colours: task_of([([[c]], [[c]]) for c in colours])
  assert arc.likeness(solid(range(9)), solid(range(1, 10)), True) == 'symmetry'
  assert arc.likeness(solid(range(9)), solid(range(9)), False) == 'content'
  assert arc.likeness(solid(range(9)), solid(range(1, 10)), False) == ''
  assert arc.likeness(solid(range(9)), solid(range(8)), True) == ''


def test_grids_that_a_symmetry_and_other_colours_make_of_one_another_are_alike():
  draw = np.random.default_rng(0)
  for _ in range(50):
    grid = draw.integers(0, 4, draw.integers(1, 4, 2), np.uint8)
    turned = np.rot90(grid.T if draw.integers(2) else grid, draw.integers(4))
    assert arc.canonical(np.array(PERMUTED, np.uint8)[turned]) == arc.canonical(grid)
  assert arc.canonical(np.array([[0, 1]], np.uint8)) != arc.canonical(np.array([[1, 1]], np.uint8))
  assert arc.canonical(np.array([[0, 1, 1, 0]], np.uint8)) != arc.canonical(np.array([[0, 1], [1, 0]], np.uint8))


# records

def test_records_are_the_grids(tmp_path, capsys):
  wide = [[1] * 31]
  raw = save(tmp_path / 'raw', {
      'a.json': TASK, 'b.json': {'train': [{'input': wide, 'output': A}, {'input': wide, 'output': wide}], 'test': [
          {'input': A}]}, 'evaluation.json': {'e': OTHER}})
  code, report = make(capsys, raw, tmp_path / 'out', '--shards=2')
  assert code == 0 and report['splits'] == {
      'train': {'grids': 8, 'tasks': 2, 'pairs': 5, 'left_out': 3, 'largest_side': 3, 'left_out_first': [
          f'b.json: task b, train pair {n}: 1 x 31' for n in (1, 2, 2)]},
      'evaluation': {'grids': 3, 'tasks': 1, 'pairs': 2, 'left_out': 0, 'largest_side': 3, 'left_out_first': [],
                     'in_train': 3, 'alike_in_train': 3}}
  folder = str(tmp_path / 'out' / arc.NAME / arc.VERSION)
  keys = ('grid', 'task', 'dataset', 'pair', 'is_input', 'is_test')
  assert [tuple(r[k] for k in keys) for r in records(folder, 'train')] == [
      (A, 'a', 'a', 0, 1, 0), (B, 'a', 'a', 0, 0, 0), (C, 'a', 'a', 1, 1, 0), (A, 'a', 'a', 1, 0, 0),
      (B, 'a', 'a', 2, 1, 1), (C, 'a', 'a', 2, 0, 1), (A, 'b', 'b', 3, 0, 0), (A, 'b', 'b', 4, 1, 1)]
  assert [tuple(r[k] for k in keys) for r in records(folder, 'evaluation')] == [
      (C, 'e', 'evaluation', 5, 1, 0), (B, 'e', 'evaluation', 5, 0, 0), (A, 'e', 'evaluation', 6, 1, 1)]
  assert prepare.main(['prepare', 'verify', str(tmp_path / 'out')]) == 0
  capsys.readouterr()
  assert make(capsys, raw, tmp_path / 'out', '--shards=2')[0] == 0              # the same: the same folder
  assert make(capsys, raw, tmp_path / 'out', '--side=31')[0] == 3
  assert make(capsys, raw, tmp_path / 'out2', '--side=31')[1]['splits']['train'] == {
      'grids': 11, 'tasks': 2, 'pairs': 6, 'left_out': 0, 'largest_side': 31, 'left_out_first': []}
  code, err = make(capsys, raw, tmp_path / 'out3', '--side=0')
  assert code == 2 and '--side=0' in err
  assert make(capsys, os.path.join(raw, 'a.json'), tmp_path / 'out4')[1]['splits'].keys() == {'train'}


@pytest.mark.parametrize('change, words', [
    ({'cells': np.array([1, 2], np.uint8)}, 'not height x width'),
    ({'height': 0, 'cells': np.zeros(0, np.uint8)}, 'no cell'),
    ({'cells': np.array([1, 2, 3, 4, 5, 10], np.uint8)}, 'a colour above 9'), ({'pair': -1}, 'a negative pair'),
    ({'is_test': 2}, 'neither 0 nor 1'), ({'height': -2, 'width': -3}, 'not height x width')])
def test_check_finds_broken_records(change, words):
  tf = pipeline.tensorflow()

  def serialized(record):
    feature = lambda v: (tf.train.Feature(int64_list=tf.train.Int64List(value=[v])) if isinstance(v, int) else
                         tf.train.Feature(bytes_list=tf.train.BytesList(
                             value=[v.encode() if isinstance(v, str) else v.tobytes()])))
    return tf.train.Example(features=tf.train.Features(feature={k: feature(v) for k, v in record.items()}
                                                       )).SerializeToString()
  good = arc._record(np.array(A, np.uint8), 'a', 'd', 3, 1, 0)
  assert arc.check(serialized(good)) == '' and 'not a record' in arc.check(b'x')
  assert words in arc.check(serialized(good | change))


def test_a_colour_that_is_none_never_reaches_a_device():
  tf = pipeline.tensorflow()
  fields = {'grid': np.array([[0, 10]], np.uint8), 'pair': 0, 'is_input': 1}
  with pytest.raises(tf.errors.InvalidArgumentError, match=r'(?s)colours from.*0.*to.*10.*where 0 to 9 are known'):
    arc._example(4, fields, tf.constant([0, 0], tf.int64))


# the source

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  root = tmp_path_factory.mktemp('arc')
  raw = save(root / 'raw', {'a.json': TASK, 'evaluation.json': {'e': OTHER}})
  return arc.prepare(raw, str(root / 'out'))[0]


def test_examples(folder):
  found = examples(arc.source(folder, 'evaluation', side=4), size=2, train=False)
  canvas = np.full((3, 4, 4), 255)
  canvas[0, :3, :2], canvas[1, :1, :1], canvas[2, :2, :3] = C, B, A
  assert np.array_equal(found['grid'], canvas) and found['size'].tolist() == [[3, 2], [1, 1], [2, 3]]
  assert found['pair'].tolist() == [3, 3, 4] and found['is_input'].tolist() == [1, 0, 1]
  assert found['number'].tolist() == [[0, 0], [0, 1], [0, 2]]
  assert {k: (v.dtype.name, v.shape) for k, v in found.items()} == {
      'grid': ('uint8', (3, 4, 4)), 'size': ('int32', (3, 2)), 'number': ('uint32', (3, 2)), 'pair': ('int32', (3,)),
      'is_input': ('int32', (3,)), 'mask': ('float32', (3,)), 'record': ('int32', (3,))}


def test_training_examples_are_numbered_by_seed_and_place(folder):
  source = arc.source(folder, 'train', side=3)
  found = examples(source, size=4, count=12, seed=7)
  assert found['number'].tolist() == [[7, n] for n in range(12)] and found['grid'].shape == (12, 3, 3)
  assert sorted(found['record'][:6]) == list(range(6)) == sorted(found['record'][6:])
  later = examples(source, size=4, count=4, seed=(1 << 32) + 7, start=1 << 31)
  assert later['number'].tolist() == [[7, (1 << 33) + n & 0xffffffff] for n in range(4)]
  assert np.array_equal(examples(source, size=4, count=4, seed=7, start=1)['grid'], found['grid'][4:8])


def test_source_says_what_is_there(folder, tmp_path, monkeypatch):
  with pytest.raises(DataError, match="no split 'test'; there are evaluation, train"):
    arc.source(folder, 'test', side=30)
  with pytest.raises(DataError, match='no prepared grids there. Prepare them with .*prepare arc --raw_dir'):
    arc.source(str(tmp_path), 'train', side=30)
  with pytest.raises(DataError, match='up to 3, the canvas has 2; prepare .*--side=2, or set config.data.side=3'):
    arc.source(folder, 'evaluation', side=2)
  assert arc.source(os.path.dirname(os.path.dirname(folder)), 'train', side=3).size == 6
  monkeypatch.setattr(prepared, 'manifest', lambda path: {'dataset': 'mnist'})
  with pytest.raises(DataError, match="a data set of 'mnist'; expected one prepared as arc"):
    arc.source(folder, 'train', side=30)


def test_sample(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  source = arc.source('sample', 'evaluation', side=5)
  folder = arc.sample(5)
  assert source.read[0].startswith(folder) and folder.startswith(str(tmp_path))
  evaluation = list(arc_raw.read([f for f in arc_raw.files(arc.SAMPLE)[0] if f.split == 'evaluation']))
  small = [g.shape for t in evaluation for p in t.pairs for g in (p.input, p.output) if max(g.shape) <= 5]
  found = examples(source, size=64, train=False)
  assert len(evaluation) == 400 and found['size'].tolist() == list(map(list, small)) and len(small) > 100
  assert told(prepared.manifest(folder)['report']) == [('40853293', '070dd51e', 'content')]
  with pytest.raises(DataError, match='no prepared grids'):
    arc.source('samples', 'train', side=5)


def test_rectangles(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  source = arc.source('rectangles', 'evaluation', side=4)
  monkeypatch.setattr(arc, 'SAMPLE', str(tmp_path))
  folder = arc.rectangles()
  assert os.path.dirname(source.read[0]) == folder and arc.source(folder, 'train', side=4).size == 20_000
  found = examples(source, size=500, train=False)
  assert found['pair'].tolist() == list(range(20_000, 22_000)) and found['is_input'].all()
  grids = arc.drawn(22_000, 4)
  for canvas, (h, w), grid in zip(found['grid'], found['size'], grids[20_000:]):
    assert np.array_equal(canvas[:h, :w], grid) and (canvas != 255).sum() == h * w
  with pytest.raises(DataError, match='sides up to 4, the canvas has 3'):
    arc.source('rectangles', 'train', side=3)


def test_drawn_grids_have_one_or_two_rectangles():
  painted = {}               # shape -> all grids of a first rectangle 1 and perhaps a second 2 or 1
  for h, w in itertools.product((2, 3, 4), repeat=2):
    spans = [list(itertools.combinations(range(n + 1), 2)) for n in (h, w)]
    places = [(slice(*a), slice(*b)) for a, b in itertools.product(*spans)]
    found = painted[h, w] = set()
    for first in places:
      grid = np.zeros((h, w), np.uint8)
      grid[first] = 1
      found.add(grid.tobytes())
      for second, colour in itertools.product(places, (1, 2)):
        both = grid.copy()
        both[second] = colour
        found.add(both.tobytes())
  grids = arc.drawn(3000, 4)
  for grid in grids:
    colours = [int(c) for c in np.unique(grid) if c]
    tables = np.zeros((2, 10), np.uint8)
    tables[0, colours], tables[1, colours] = range(1, len(colours) + 1), range(len(colours), 0, -1)
    assert len(colours) in (1, 2) and any(t[grid].tobytes() in painted[grid.shape] for t in tables), grid
  shapes, counts = np.unique([g.shape for g in grids], axis=0, return_counts=True)
  # 9 shapes alike: 333 each, with a standard deviation of sqrt(3000 * 1/9 * 8/9) = 17.2
  assert len(shapes) == 9 and np.abs(counts - 3000 / 9).max() < 4 * 17.2
  assert all(np.array_equal(a, b) for a, b in zip(grids, arc.drawn(3000, 4)))


# published tasks

@shared
def test_published_tasks(tmp_path, capsys):
  """The public folders, with a coloured and a turned copy of an evaluation task in training."""
  with tarfile.open(os.path.join(SHARED, 'arc_agi_1.tar.gz')) as tar:
    tar.extractall(tmp_path / 'raw', filter='data')
  folder = next(p for p, _, names in os.walk(tmp_path / 'raw') if 'evaluation' in p and len(names) == 400)
  with open(os.path.join(folder, '00576224.json'), encoding='utf-8') as f:
    task = json.load(f)
  training = os.path.join(os.path.dirname(folder), 'training')
  for name, copy in (('coloured', changed(task, 0, PERMUTED)), ('turned', changed(task, 3))):
    with open(os.path.join(training, f'{name}.json'), 'w', encoding='utf-8') as f:
      json.dump(copy, f)
  code, report = make(capsys, tmp_path / 'raw', tmp_path / 'out')
  assert code == 0 and told(report) == [('40853293', '070dd51e', 'content'), ('coloured', '00576224', 'symmetry'),
                                        ('turned', '00576224', 'symmetry')]
  # 1363 + 419 pairs of two grids
  assert report['splits']['train']['tasks'] == 399 and report['splits']['evaluation'] == {
      'grids': 3564, 'tasks': 400, 'pairs': 1782, 'left_out': 0, 'largest_side': 30, 'left_out_first': [],
      'in_train': 41, 'alike_in_train': 208}
  found = examples(arc.source(str(tmp_path / 'out'), 'evaluation', side=30), size=512, train=False)
  assert len(found['grid']) == 3564 and found['size'].min() == 1 and found['size'].max() == 30


@shared
def test_the_sample_is_what_was_published():
  """800 tasks; and of the other collections, all that the README of the data counts."""
  of = {f.stem: list(arc_raw.read([f])) for f in arc_raw.files(SHARED)[0] if 'arc_agi_2' not in f.stem}
  assert {k: (len(v), sum(len(t.pairs) for t in v)) for k, v in of.items()} == {
      'arc_agi_1_training': (400, 1302 + 416), 'arc_agi_1_evaluation': (400, 1363 + 419),
      'concept_arc': (160, 427 + 480), 'concept_arc_minimal': (16, 46 + 48), 'mini_arc': (149, 528 + 149),
      're_arc_400x20': (400, 8000)}
  shipped = {f.stem: listed(arc_raw.read([f])) for f in arc_raw.files(arc.SAMPLE)[0]}
  assert shipped == {k: listed(of[f'arc_agi_1_{k}']) for k in ('training', 'evaluation')}
