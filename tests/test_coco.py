"""COCO: raw files to records, odd people, hostile files; records to examples; the shipped samples."""

import json
import os
import pathlib
import struct
import zlib

import numpy as np
import pytest
from data_pipelines import DataError, coco, coco_raw, images, pipeline, prepare, prepared, warp
from lab import config as core
from lab.systems.pose import config as pose
from ml_collections import ConfigDict
from PIL import Image

from tests import coco_fixture
from tests.coco_fixture import RawCoco

IMAGE = ConfigDict({'size': 96})
AUGMENT = pose.get_config().augment
SHARED = pathlib.Path(__file__).parents[1].parent / 'shared' / 'data' / 'pose' / 'coco2017_subset'
SAMPLES = pathlib.Path(coco.SAMPLE)


def make(raw_root, out, shards=1):
  return coco.prepare(str(raw_root), str(out), shards=shards)[0]


def batches(source, count, batch_size=4, rows=None, train=False, **options):
  config = core.core().input
  config.update(options)
  it = iter(pipeline.Batches(source, config, batch_size, rows or range(batch_size), train=train))
  return [next(it) for _ in range(count)]


def one(raw, out, **source_options):
  """The single evaluated example of a raw folder."""
  folder = make(raw.write(), out)
  split = next(iter(prepared.manifest(folder)['splits']))
  found, = batches(coco.source(folder, split, IMAGE, None, 8, **source_options), 1, batch_size=1)
  return {k: v[0] for k, v in found.items()}


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """A prepared folder of 12 noise pictures in the split 'train'."""
  root = tmp_path_factory.mktemp('small')
  return make(coco_fixture.small_set(root / 'raw'), root / 'out', shards=2)


def test_example_shapes_and_types(small):
  batch, = batches(coco.source(small, 'train', IMAGE, AUGMENT, 8, 5), 1)
  got = {k: (v.shape, v.dtype.name) for k, v in batch.items()}
  f, i = 'float32', 'int32'
  assert got == {
      'image': ((4, 96, 96, 3), 'uint8'), 'keypoints': ((4, 5, 17, 3), f), 'ignore': ((4, 12, 12), 'uint8'),
      'person': ((4, 5), f), 'truth': ((4, 5, 17, 3), f), 'boxes': ((4, 5, 4), f), 'areas': ((4, 5), f),
      'crowd': ((4, 5), f), 'num': ((4, 5), i), 'matrix': ((4, 2, 3), f),
      'size': ((4, 2), i), 'image_id': ((4,), i), 'mask': ((4,), f), 'record': ((4,), i)}


def test_record_keeps_what_coco_says(tmp_path):
  raw = RawCoco(tmp_path / 'raw', 'val')
  joints = coco_fixture.pose()
  joints[4] = 0
  joints[5, 2] = 1
  raw.add(coco_fixture.noise(64, 96), [{'area': 50.0}, {'joints': joints, 'area': 30.0, 'bbox': (1, 2, 3.5, 4)},
                                       {'joints': joints, 'area': 90.0}, {'iscrowd': 1, 'area': 40.0}])
  e = one(raw, tmp_path / 'out', people=6)
  assert e['person'].tolist() == [1, 1, 1, 1, 0, 0]
  assert e['areas'].tolist() == [90, 30, 50, 40, 0, 0] and e['num'].tolist() == [16, 16, 0, 0, 0, 0]
  assert e['crowd'].tolist() == [0, 0, 0, 1, 0, 0] and e['boxes'][1].tolist() == [1, 2, 3.5, 4]
  assert (e['truth'][0] == joints).all() and e['size'].tolist() == [64, 96] and e['image_id'] == 1
  assert not e['keypoints'][2:].any() and (e['keypoints'][0, :, 2] == joints[:, 2]).all()
  homogeneous = np.concatenate([e['keypoints'][0, :, :2], np.ones((17, 1))], 1)
  seen = joints[:, 2] > 0
  np.testing.assert_allclose((homogeneous @ e['matrix'].T)[seen], joints[seen, :2], atol=1e-3)


def test_train_needs_joints_and_val_keeps_all(tmp_path):
  for name in ('train2017', 'val2017'):
    raw = RawCoco(tmp_path / 'raw', name)
    raw.add(coco_fixture.noise(32, 32), [{'joints': coco_fixture.pose()}])
    raw.add(coco_fixture.noise(32, 32), [{}])
    raw.add(coco_fixture.noise(32, 32))
    raw.write()
  folder, report = coco.prepare(str(tmp_path / 'raw'), str(tmp_path / 'out'), shards=1)
  assert {k: s['records'] for k, s in prepared.manifest(folder)['splits'].items()} == {'train': 1, 'val': 3}
  assert report['splits']['train']['left_out_without_joints'] == 2


def test_general_layout_with_an_images_folder(tmp_path):
  raw = RawCoco(tmp_path / 'raw', 'mine')
  raw.add(coco_fixture.noise(32, 32))
  raw.write()
  os.rename(tmp_path / 'raw' / 'mine', tmp_path / 'raw' / 'images')
  assert list(prepared.manifest(make(tmp_path / 'raw', tmp_path / 'out'))['splits']) == ['val']


@pytest.mark.parametrize('orientation', range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
  upright = np.zeros((64, 96, 3), np.uint8)
  upright[16:24, 72:80] = 255, 0, 0                       # centred on (75.5, 19.5)
  stored = {1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.swapaxes(0, 1),
            6: upright.swapaxes(0, 1)[::-1], 7: upright[::-1, ::-1].swapaxes(0, 1),
            8: upright.swapaxes(0, 1)[:, ::-1]}
  # EXIF 6: turn by 90 degrees clockwise to view; 8: anticlockwise
  assert (np.rot90(stored[6], -1) == upright).all() and (np.rot90(stored[8]) == upright).all()
  joints = np.zeros((17, 3))
  joints[0] = 75.5, 19.5, 2
  raw = RawCoco(tmp_path / 'raw', 'val')
  raw.add(np.ascontiguousarray(stored[orientation]), [{'joints': joints}], orientation=orientation, size=(96, 64))
  e = one(raw, tmp_path / 'out')
  yy, xx = np.nonzero(e['image'][..., 0].astype(int) - e['image'][..., 1] > 128)
  np.testing.assert_allclose([xx.mean(), yy.mean()], e['keypoints'][0, 0, :2], atol=0.6)


def test_stated_size_must_be_the_upright_size(tmp_path):
  raw = RawCoco(tmp_path / 'raw')
  path = raw.add(coco_fixture.noise(64, 96), [{'joints': coco_fixture.pose()}], orientation=6)
  with pytest.raises(DataError, match='64 x 96 pixels when upright, the annotations say 96 x 64') as e:
    make(raw.write(), tmp_path / 'out')
  assert str(path) in str(e.value)


@pytest.mark.parametrize('mode, suffix', [('L', '.jpg'), ('CMYK', '.jpg'), ('RGBA', '.png'), ('P', '.png'),
                                          ('I;16', '.png'), ('RGB', '.bmp')])
def test_other_pictures_become_rgb_jpeg(tmp_path, mode, suffix):
  raw = RawCoco(tmp_path / 'raw', 'val')
  grey = np.tile(np.arange(96, dtype=np.uint8) * 2, (64, 1))
  image = (Image.fromarray(grey.astype(np.uint16) * 257) if mode == 'I;16' else
           Image.fromarray(grey).convert(mode) if mode == 'P' else      # a palette of greys
           Image.fromarray(np.stack([grey] * 3, -1)).convert(mode))
  raw.add(image, suffix=suffix)
  e = one(raw, tmp_path / 'out')
  np.testing.assert_allclose(e['image'][48, :, 0], grey[0], atol=6)


def test_one_pixel(tmp_path):
  raw = RawCoco(tmp_path / 'raw', 'val')
  raw.add(np.full((1, 1, 3), 200, np.uint8))
  assert abs(int(one(raw, tmp_path / 'out')['image'][48, 48, 0]) - 200) < 4


def png_bomb():
  chunk = lambda kind, data: struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
  head = struct.pack('>IIBBBBB', 20000, 20000, 8, 2, 0, 0, 0)
  return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(bytes(1000))) + chunk(b'IEND', b'')


@pytest.mark.parametrize('change', [
    lambda data: data[:len(data) // 2], lambda data: b'', lambda data: b'no picture at all\n' * 20,
    lambda data: png_bomb(), lambda data: data[:20]])
def test_broken_picture_is_named(tmp_path, change):
  raw = RawCoco(tmp_path / 'raw')
  raw.add(coco_fixture.noise(64, 96), [{'joints': coco_fixture.pose()}])
  path = raw.add(coco_fixture.noise(64, 96, 1), [{'joints': coco_fixture.pose()}])
  path.write_bytes(change(path.read_bytes()))
  with pytest.raises(DataError) as e:
    make(raw.write(), tmp_path / 'out')
  assert str(path) in str(e.value) and '\n' not in str(e.value)
  assert not (tmp_path / 'out' / coco.NAME).exists() and not (tmp_path / 'out' / '.incomplete').exists()


@pytest.mark.parametrize('name', ['../secret.jpg', '/etc/passwd', 'a/../../secret.jpg', '', 'link.jpg', 'none.jpg'])
def test_file_name_stays_in_its_folder(tmp_path, name):
  raw = RawCoco(tmp_path / 'raw')
  secret = tmp_path / 'raw' / 'secret.jpg'
  raw.add(coco_fixture.noise(64, 96), [{'joints': coco_fixture.pose()}]).rename(secret)
  os.symlink(secret, tmp_path / 'raw' / 'train' / 'link.jpg')
  raw.images[0]['file_name'] = name
  with pytest.raises(DataError, match='image 1|none.jpg'):
    make(raw.write(), tmp_path / 'out')


@pytest.mark.parametrize('field', ['image', 'ignore'])
def test_broken_picture_in_a_record_is_named_or_left_out(tmp_path, monkeypatch, field):
  real = coco.record

  def cut(image):
    fields = real(image)
    return {**fields, field: fields[field][:len(fields[field]) // 2]} if image.id == 2 else fields
  monkeypatch.setattr(coco, 'record', cut)
  raw = RawCoco(tmp_path / 'raw')
  for i in range(3):
    raw.add(coco_fixture.noise(64, 96, i), [{'joints': coco_fixture.pose()}])
  source = coco.source(make(raw.write(), tmp_path / 'out'), 'train', IMAGE, AUGMENT, 8)
  with pytest.raises(DataError, match=r'#\d.*is cut off, broken, too large') as e:
    batches(source, 1, 3, train=True)
  assert '\n' not in str(e.value)
  found = batches(source, 4, 3, train=True, bad_limit=0.5)
  assert all(b['mask'].sum() == 2 and (b['image_id'][b['mask'] > 0] != 2).all() for b in found)


def faulty(change):
  def apply(data):
    change(data)
    return json.dumps(data)
  return apply


@pytest.mark.parametrize('change, words', [
    (lambda d: '{"images": [', 'Expecting value'),
    (lambda d: '[' * 100000 + ']' * 100000, 'nested too deeply'),
    (lambda d: '[]', "no list 'images'"),
    (faulty(lambda d: d.pop('categories')), "no list 'categories'"),
    (faulty(lambda d: d['categories'].clear()), 'no category "person"'),
    (faulty(lambda d: d['categories'][0]['keypoints'].reverse()), "17 in COCO's order"),
    (faulty(lambda d: d['images'].append(d['images'][0])), 'image 1 is there twice'),
    (faulty(lambda d: d['images'][0].update(id=2**40)), '31 bits'),
    (faulty(lambda d: d['images'][0].pop('height')), "image 1 has no 'height'"),
    (faulty(lambda d: d['images'][0].update(width='wide')), "'width' is 'wide'"),
    (faulty(lambda d: d['annotations'].append(d['annotations'][0])), 'annotation 1 is there twice'),
    (faulty(lambda d: d['annotations'][0].update(image_id=77)), 'image 77'),
    (faulty(lambda d: d['annotations'][0].pop('area')), "annotation 1 has no 'area'"),
    (faulty(lambda d: d['annotations'][0]['keypoints'].pop()), 'must be 51 finite numbers'),
    (faulty(lambda d: d['annotations'][0].update(bbox=[0, 0, float('nan'), 1])), 'must be 4 finite numbers'),
    (faulty(lambda d: d['annotations'][0].update(num_keypoints=3)), 'num_keypoints is 3'),
    (faulty(lambda d: d['annotations'][0]['keypoints'].__setitem__(2, 7)), 'visibility'),
    (faulty(lambda d: d['annotations'][1].update(segmentation={'size': [9, 9], 'counts': [81]})), 'annotation 2'),
    (faulty(lambda d: d['annotations'][1].update(segmentation={'size': [64, 96], 'counts': [9]})), 'annotation 2'),
    (faulty(lambda d: d['annotations'][1].update(segmentation=[[1, 2, 3, 4]])), 'annotation 2'),
    (faulty(lambda d: d['annotations'][1].update(segmentation='nonsense')), 'annotation 2'),
])
def test_faulty_json_is_named(tmp_path, change, words):
  raw = RawCoco(tmp_path / 'raw')
  raw.add(coco_fixture.noise(64, 96), [{'joints': coco_fixture.pose()}, {}])
  raw.write()
  raw.json.write_text(change(json.loads(raw.json.read_text())))
  with pytest.raises(DataError, match=words) as e:
    make(tmp_path / 'raw', tmp_path / 'out')
  assert str(raw.json) in str(e.value) and '\n' not in str(e.value)


def test_degenerate_people_are_counted_and_stay(tmp_path):
  raw = RawCoco(tmp_path / 'raw')
  same, near, outside, single = (coco_fixture.pose() for _ in range(4))
  same[7] = same[5]                                       # shoulder = elbow
  near[7, :2] = near[5, :2] + [0.4, 0]
  outside[0] = 500, -20, 2
  single[1:] = 0
  people = [{'joints': same}, {'joints': near}, {'joints': outside}, {'joints': single},
            {'joints': coco_fixture.pose(), 'bbox': (5, 5, 0, 0), 'area': 0.0}, {}]
  raw.add(coco_fixture.noise(64, 96), people)
  folder, report = coco.prepare(raw.write(), str(tmp_path / 'out'), shards=1)
  counts = {k: v for k, v in report['splits']['train'].items() if k.startswith('odd_')}
  assert counts == {'odd_limb_of_length_zero': 1, 'odd_limb_under_a_pixel': 1, 'odd_joint_outside_picture': 1,
                    'odd_single_joint': 1, 'odd_box_empty': 1, 'odd_area_zero': 1}
  assert report['examples']['limb_of_length_zero'] == [1] and report['examples']['area_zero'] == [5]
  assert prepared.manifest(folder)['report'] == report and report['splits']['train']['people'] == 6
  batch, = batches(coco.source(folder, 'train', IMAGE, AUGMENT, 8), 1, 1, train=True)
  assert batch['person'].sum() == 6 and all(np.isfinite(v).all() for v in batch.values())


def test_ignore_is_the_union_of_people_without_joints():
  runs = [10 * 64 + 20, 8] + [56, 8] * 9                  # column-wise: rows 20..28 of columns 10..20
  runs.append(64 * 96 - sum(runs))
  crowd = {'iscrowd': 1, 'segmentation': {'size': [64, 96], 'counts': runs}}
  people = [{}, crowd, {'bbox': (70, 40, 10, 10), 'segmentation': []},
            {'joints': coco_fixture.pose(), 'bbox': (0, 0, 96, 64)}]
  found = [coco_fixture.annotation(i + 1, 1, **p) for i, p in enumerate(people)]
  for a in found:
    a['where'] = 'here'
  mask = coco_raw.unlabelled(coco_raw.Picture(1, '', 64, 96, found))
  expected = np.zeros((64, 96), bool)
  expected[10:40, 10:50] = expected[20:28, 10:20] = expected[40:50, 70:80] = True
  assert (mask != expected).sum() <= 4                    # a polygon's corners may round
  from pycocotools import mask as coder
  found[1]['segmentation'] = dict(coder.frPyObjects(crowd['segmentation'], 64, 96))
  assert (coco_raw.unlabelled(coco_raw.Picture(1, '', 64, 96, found)) == mask).all()


def test_evaluation_drops_nobody_and_training_the_last(tmp_path):
  raw = RawCoco(tmp_path / 'raw')
  raw.add(coco_fixture.noise(64, 96), [{'joints': coco_fixture.pose(), 'area': float(a)} for a in (10, 30, 20)] + [{}])
  folder = make(raw.write(), tmp_path / 'out')
  with pytest.raises(DataError, match=r'set people >= 4 \(now 3\)'):
    coco.source(folder, 'train', IMAGE, None, 8, people=3)
  batch, = batches(coco.source(folder, 'train', IMAGE, AUGMENT, 8, people=2), 1, 1, train=True)
  assert batch['areas'].tolist() == [[30, 20]]


def test_source_names_the_command_and_the_splits(tmp_path, small):
  with pytest.raises(DataError, match='python -m data_pipelines.prepare coco --raw_dir=') as e:
    coco.source(str(tmp_path), 'train', IMAGE, None, 8)
  assert f'--out_dir={tmp_path}' in str(e.value)
  with pytest.raises(DataError, match="no split 'val'; there are train"):
    coco.source(small, 'val', IMAGE, None, 8)
  assert coco.source(str(pathlib.Path(small).parents[1]), 'train', IMAGE, None, 8).size == 12


def test_augmentation_never_repeats_and_replays(tmp_path):
  """One picture 64 times, 2 epochs, 2 hosts: 128 different examples; the same again with another thread count."""
  raw = RawCoco(tmp_path / 'raw')
  for _ in range(64):
    raw.add(coco_fixture.noise(48, 64), [{'joints': coco_fixture.pose()}])
  source = coco.source(make(raw.write(), tmp_path / 'out'), 'train', IMAGE, AUGMENT, 8)

  def hashes(threads):
    found = [batches(source, 8, 16, rows, train=True, threads=threads) for rows in (range(8), range(8, 16))]
    return [zlib.crc32(image.tobytes()) for host in found for b in host for image in b['image']]
  first = hashes(1)
  assert len(set(first)) == len(first) == 128 and hashes(4) == first


def test_kept_pictures_are_decoded_once_and_change_nothing(small, monkeypatch):
  decoded, real = [], images.decode
  monkeypatch.setattr(images, 'decode', lambda data: decoded.append(len(data)) or real(data))
  def run(gib):      # batches of two passes over all 12, and how often one was decoded in the second
    source = coco.source(small, 'train', IMAGE, AUGMENT, 8, decoded_gib=gib)
    made = batches(source, 6, train=True)
    decoded.clear()
    return made + batches(source, 6, train=True), len(decoded)
  (plain, each), (kept, none), (_, some) = map(run, (0, 1, 2.5 * 64 * 96 * 4 / 2**30))     # none fit, all, two
  assert all((a[k] == b[k]).all() for a, b in zip(plain, kept) for k in a)
  assert none == 0 and each >= 24 and some >= 24 - 2 * 2 - 2      # some are made ready before they are asked for


def test_photograph_looks_the_same_to_evaluation_and_prediction(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  image = ConfigDict({'size': 368})
  batch, = batches(coco.source('sample', 'val', image, None, 8), 1, batch_size=7)
  for i, number in enumerate(batch['image_id']):
    square, matrix = warp.letterbox(images.read(SAMPLES / 'val' / f'{number:012d}.jpg'), 368)
    difference = np.abs(square.astype(int) - batch['image'][i])
    assert difference.mean() < 0.3 and difference.max() <= 3, (number, difference.mean(), difference.max())
    np.testing.assert_allclose(matrix, batch['matrix'][i], rtol=1e-6, atol=1e-5)


def test_evaluation_has_no_chance(small):
  source = coco.source(small, 'train', IMAGE, None, 8)
  example = source.decode(next(iter(pipeline.tensorflow().data.TFRecordDataset(list(source.read)))))
  a, b = (source.augment(example, np.array([0, n], np.int64)) for n in (1, 2))
  assert all((a[k].numpy() == b[k].numpy()).all() for k in a)


def test_killed_run_leaves_nothing_and_starts_over(tmp_path, monkeypatch):
  raw, out = coco_fixture.small_set(tmp_path / 'raw'), tmp_path / 'out'
  made, real = [], coco.record

  def dying(image):
    made.append(image.id)
    if len(made) == 5:
      raise KeyboardInterrupt
    return real(image)
  monkeypatch.setattr(coco, 'record', dying)
  with pytest.raises(KeyboardInterrupt):
    make(raw, out)
  assert not (out / coco.NAME).exists()
  monkeypatch.setattr(coco, 'record', real)
  (out / '.incomplete' / coco.NAME / coco.VERSION).mkdir(parents=True)      # as SIGKILL would leave it
  (out / '.incomplete' / coco.NAME / coco.VERSION / 'coco_pose-train.tfrecord-00000-of-00001').write_bytes(b'half')
  assert prepare.verify(make(raw, out)) == 0
  assert sorted(os.listdir(out)) == ['.lock', coco.NAME]


def test_samples_are_openly_licensed_and_attributed(tmp_path):
  text = (SAMPLES.parent / 'ATTRIBUTION.md').read_text()
  files = set()
  for split in ('train', 'val'):
    data = json.loads((SAMPLES / 'annotations' / f'person_keypoints_{split}.json').read_text())
    urls = {x['id']: x['url'] for x in data['licenses']}
    for image in data['images']:
      assert image['license'] in (4, 5, 7, 8)
      row = next(line for line in text.splitlines() if f'pose/{split}/{image["file_name"]} ' in line)
      assert image['flickr_url'] in row and urls[image['license']] in row
      files.add(f'{split}/{image["file_name"]}')
    listed = {i['id'] for i in data['images']}
    assert {a['image_id'] for a in data['annotations']} <= listed
  assert files == {f'{p.parent.name}/{p.name}' for p in SAMPLES.rglob('*.jpg')}
  assert 'Creative Commons Attribution' in text
  assert sum(p.stat().st_size for p in SAMPLES.rglob('*') if p.is_file()) < 4e6


def test_samples_prepare_once_and_verify_clean(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  folder = coco.sample()
  stamp = os.stat(os.path.join(folder, prepared.MANIFEST)).st_mtime_ns
  assert coco.sample() == folder and os.stat(os.path.join(folder, prepared.MANIFEST)).st_mtime_ns == stamp
  assert folder.startswith(str(tmp_path / 'lab')) and prepare.verify(folder) == 0
  assert '24 records, all good' in capsys.readouterr().out
  assert coco.source('sample', 'train', IMAGE, AUGMENT, 8).size == 17
  assert coco.source('sample', 'val', IMAGE, None, 8).size == 7


def test_unwritable_cache_is_named(tmp_path, monkeypatch):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  with pytest.raises(DataError, match='cannot write there'):
    coco.sample()


@pytest.mark.skipif(not SHARED.exists(), reason='the COCO subset in ../shared/data is not there')
def test_samples_are_copies_of_coco():
  source = {i['id']: (s, i) for s in ('train', 'val') for i in json.loads(
      (SHARED / 'annotations' / f'person_keypoints_{s}2017.json').read_text())['images']}
  for path in SAMPLES.rglob('*.jpg'):
    split, image = source[int(path.stem)]
    assert path.read_bytes() == (SHARED / f'{split}2017' / image['file_name']).read_bytes()
