"""Moving MNIST: splits by digit, the same bytes for the same seed, the figures of the generator, written sets."""

import gzip
import os
import struct

import numpy as np
import pytest
from data_pipelines import DataError, clips, mnist, moving_mnist, pipeline, prepare, prepared
from lab import config as core
from ml_collections import ConfigDict

from tests import coco_fixture
from tests.conftest import ROOT

VIDEO = ConfigDict({'size': 64, 'past': 10, 'future': 10})
SHARED = os.path.join(ROOT, '..', 'shared', 'data', 'video')
SPLITS = ('train', 'validation', 'test')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """The sample's 10,000 digits, prepared."""
  return mnist.prepare(mnist.SAMPLE, str(tmp_path_factory.mktemp('digits')), shards=3)[0]


@pytest.fixture(scope='module')
def bank():
  """All digits of the sample, in the order of their file."""
  parts = mnist.Digits(*map(np.concatenate, zip(*mnist.read(mnist.SAMPLE).values())))
  return mnist.Digits(*(a[np.argsort(parts.ids)] for a in parts))


def source(folder, split='train', digits=2, video=VIDEO):
  return moving_mnist.source(str(folder), split, ConfigDict({'digits': digits}), video)


def batches(source, count=None, batch_size=100, rows=None, train=True, **place):
  found = iter(pipeline.Batches(source, core.core().input, batch_size, rows or range(batch_size), train=train, **place))
  return [b for b, _ in zip(found, range(count))] if count else list(found)


def equal(a, b):
  return all(a[k].dtype == b[k].dtype and (a[k] == b[k]).all() for k in a.keys() | b.keys())


def test_example_shapes_and_types(folder):
  batch, = batches(source(folder, digits=3), 1, 4)
  assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
      'digits': ((4, 3, 28, 28), 'uint8'), 'number': ((4, 2), 'uint32'), 'digit_ids': ((4, 3), 'int32'),
      'mask': ((4,), 'float32'), 'record': ((4,), 'int32')}


def test_splits_share_no_digit_whatever_the_seed(folder):
  used = {split: {int(i) for seed in range(10) for b in batches(source(folder, split), 4, 250, train=split == 'train',
                                                                seed=seed) for i in b['digit_ids'].ravel()}
          for split in SPLITS}
  assert not used['train'] & (used['validation'] | used['test']) and not used['validation'] & used['test']
  assert len(used['train']) > 7000 and len(used['validation']) == len(used['test']) == 1000


def test_digits_are_those_of_their_ids(folder, bank):
  for batch in batches(source(folder, digits=3), 3):
    assert (bank.images[batch['digit_ids'] - mnist.TEST_ID] == batch['digits']).all()


def test_same_seed_same_bytes_on_any_number_of_processes(folder):
  whole, again, other = (batches(source(folder), 6, 16, seed=s) for s in (3, 3, 4))
  halves = [batches(source(folder), 6, 16, rows, seed=3) for rows in (range(8), range(8, 16))]
  for i, batch in enumerate(whole):
    assert equal(batch, again[i]) and not (batch['digit_ids'] == other[i]['digit_ids']).all()
    assert equal(batch, {k: np.concatenate([h[i][k] for h in halves]) for k in batch})
    assert (batch['number'] == [[3, n] for n in range(16 * i, 16 * i + 16)]).all()
  assert equal(batches(source(folder), 1, 16, seed=3, start=4)[0], whole[4])


def test_an_epoch_has_every_digit_once_and_the_next_other_company(folder):
  first, second = np.split(np.concatenate([b['digit_ids'] for b in batches(source(folder), 32, 500)]), 2)
  for epoch in (first, second):
    assert (np.sort(epoch[:, 0]) == mnist.TEST_ID + np.flatnonzero(np.arange(10000) % 10 < 8)).all()
  assert (first[np.argsort(first[:, 0]), 1] == second[np.argsort(second[:, 0]), 1]).mean() < 0.01


def test_validation_counts_all_and_stays_the_same(folder):
  one, two = (batches(source(folder, 'validation'), None, 96, train=False) for _ in range(2))
  assert len(one) == 11 and sum(b['mask'].sum() for b in one) == 1000 and all(map(equal, one, two))
  assert (np.concatenate([b['digit_ids'][b['mask'] > 0, 0] for b in one]) == 60008 + 10 * np.arange(1000)).all()
  assert (one[-1]['number'][:, 0] == 1 << 30).all() and (one[3]['number'][:, 1] == one[3]['record']).all()


def test_sample_is_prepared_once_into_the_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  small = raw_mnist(tmp_path / 'raw', t10k=20)
  monkeypatch.setattr(mnist, 'SAMPLE', small)
  assert mnist.sample() == mnist.sample() and mnist.sample().startswith(str(tmp_path / 'lab'))
  assert [source('sample', split).size for split in SPLITS] == [16, 2, 2]


def test_samples_are_attributed():
  with open(os.path.join(mnist.SAMPLE, '..', 'ATTRIBUTION.md'), encoding='utf-8') as f:
    text = f.read()
  assert all(name in text for name in os.listdir(mnist.SAMPLE)) and 'licenses/by-sa/3.0' in text


def test_broken_digit_stops_training_and_is_named(folder, tmp_path):
  out = mnist.prepare(raw_mnist(tmp_path / 'raw', t10k=40), str(tmp_path / 'out'), shards=1)[0]
  shard, = source(out).read
  coco_fixture.flip(shard, pipeline.framing(shard)[0][5] + 300)
  config = core.core().input
  config.bad_limit = 0.5
  with pytest.raises(DataError, match='prepare verify'):
    next(iter(pipeline.Batches(source(out), config, 4, range(4), train=True)))
  assert next(iter(pipeline.Batches(source(out, digits=1), config, 32, range(32), train=True)))['mask'].sum() == 31
  assert any(f'{shard}#5' in line for line in prepared.problems(out, mnist.check))


# MNIST's files

def raw_mnist(root, **counts):
  """idx files of noise: part -> digits. Returns the folder."""
  root.mkdir(exist_ok=True)
  draw = np.random.default_rng(0)
  for part, count in counts.items():
    pixels, labels = draw.integers(0, 256, (count, 28, 28), np.uint8), draw.integers(0, 10, count, np.uint8)
    (root / f'{part}-images-idx3-ubyte').write_bytes(struct.pack('>4I', 0x803, *pixels.shape) + pixels.tobytes())
    (root / f'{part}-labels-idx1-ubyte').write_bytes(struct.pack('>2I', 0x801, count) + labels.tobytes())
  return str(root)


def test_training_files_make_the_usual_splits(tmp_path):
  found = mnist.read(raw_mnist(tmp_path, train=60, t10k=10))
  assert {k: (d.ids[0], d.ids[-1], len(d.images), len(d.labels)) for k, d in found.items()} == {
      'train': (0, 49, 50, 50), 'validation': (50, 59, 10, 10), 'test': (60000, 60009, 10, 10)}
  assert list(mnist.read(raw_mnist(tmp_path / 'only', train=60))) == ['train', 'validation']


@pytest.mark.skipif(not os.path.exists(SHARED), reason='the complete MNIST in ../shared/data is not there')
def test_complete_mnist():
  found = mnist.read(os.path.join(SHARED, 'mnist'))
  assert {k: len(d.ids) for k, d in found.items()} == {'train': 50000, 'validation': 10000, 'test': 10000}
  assert len({i for d in found.values() for i in d.ids.tolist()}) == 70000
  assert found['train'].labels[:3].tolist() == [5, 0, 4]


def compressed(change=lambda data: data):
  def apply(path):
    path.with_name(path.name + '.gz').write_bytes(change(gzip.compress(path.read_bytes())))
    path.unlink()
  return apply


def bytewise(change):
  return lambda path: path.write_bytes(change(path.read_bytes()))


IMAGES, LABELS = 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte'


@pytest.mark.parametrize('name, change, words', [
    (IMAGES, lambda p: p.unlink(), 'neither train-images-idx3-ubyte nor'), (LABELS, lambda p: p.unlink(), 'missing'),
    (IMAGES, bytewise(lambda d: d[:-1]), 'cut off; 15679 of'), (IMAGES, bytewise(lambda d: d[:9]), 'in its header'),
    (IMAGES, bytewise(lambda d: b''), 'in its header'), (LABELS, bytewise(lambda d: d + b'\0'), 'garbage behind'),
    (IMAGES, bytewise(lambda d: b'\0\0\x0c\3' + d[4:]), 'magic number 0x00000c03, expected 0x00000803'),
    (LABELS, bytewise(lambda d: b'\0\0\x08\3' + d[4:]), 'expected 0x00000801'),
    (IMAGES, bytewise(lambda d: d[:4] + b'\xff' * 12 + d[16:]), 'no MNIST file'),
    (IMAGES, bytewise(lambda d: struct.pack('>4I', 0x803, 20, 14, 56) + d[16:]), '14 x 56, expected 28 x 28'),
    (LABELS, bytewise(lambda d: struct.pack('>2I', 0x801, 19) + d[8:-1]), '19 labels for the 20 digits'),
    (LABELS, bytewise(lambda d: d[:-1] + b'\n'), 'label 19 is 10'),
    (IMAGES, compressed(lambda d: d[:-200]), 'gzip stream'),
    (IMAGES, compressed(lambda d: d[:-8] + b'\0' * 8), 'gzip stream'),
    (IMAGES, compressed(lambda d: d + b'garbage'), 'gzip stream'), (IMAGES, compressed(lambda d: b'x'), 'gzip stream'),
    (LABELS, lambda p: raw_mnist(p.parent, t10k=5), 'none is left for the split')])
def test_broken_files_are_named(tmp_path, capsys, name, change, words):
  raw = raw_mnist(tmp_path / 'raw', t10k=20)
  change(tmp_path / 'raw' / name)
  assert prepare.main(['prepare', 'mnist', f'--raw_dir={raw}', f'--out_dir={tmp_path}/out']) == 3
  err = capsys.readouterr().err
  assert raw in err and words in err and err.count('\n') == 1 and not (tmp_path / 'out' / mnist.NAME).exists()


# the generator in NumPy

def test_statistics_are_those_of_the_papers_generator(bank):
  """Mean, share of pixels that are not black, and copy-last as measured with the paper's code on these digits."""
  mean, share, copied = [], [], []
  for n in range(4000):
    video = moving_mnist.sequence(bank, 0, n, 2, 20, 64)['video'].reshape(20, 64, 64)
    mean.append(video.mean() / 255)
    share.append((video > 0).mean())
    copied.append(((video[10:] / 255 - video[9] / 255)**2).sum((1, 2)).mean())
  assert abs(np.mean(mean) - 0.0493) < 0.0007 and abs(np.mean(share) - 0.0709) < 0.001
  assert abs(np.mean(copied) - 286) < 3


@pytest.mark.parametrize('bounce', ['clamp', 'reflect'])
def test_digits_never_leave_the_frame(bank, bounce):
  for n in range(50):
    start, velocity = moving_mnist.motion(0, n, 1, 0.0, 1.0)
    found = moving_mnist.paths(start, velocity, 60, bounce)
    assert found.dtype == np.float32 and found.min() >= 0 and found.max() <= 1
    digit = bank.images[n:n + 1]
    assert (moving_mnist.render(digit, found, 40).sum((1, 2), dtype=int) == digit.sum(dtype=int)).all()


def test_walls():
  start, velocity = np.array([[0.75, 0.25]], np.float32), np.array([[0.5, -0.375]], np.float32)
  clamp, reflect = (moving_mnist.paths(start, velocity, 3, b)[:, 0].tolist() for b in ('clamp', 'reflect'))
  assert clamp == [[1, 0], [0.5, 0.375], [0, 0.75]]               # 1.25 -> 1, -.125 -> 0; then back at the same speed
  assert reflect == [[0.75, 0.125], [0.25, 0.5], [0.25, 0.875]]   # 1.25 -> .75, -.125 -> .125; ... -.25 -> .25
  assert velocity.tolist() == [[0.5, -0.375]]


def test_motion_has_all_directions_and_the_stated_speeds():
  start, velocity = moving_mnist.motion(5, 0, 10000, 0.1, 0.3)
  speed, angle = np.hypot(*velocity.T), np.arctan2(*velocity.T[::-1])
  assert speed.min() > 0.0999 and speed.max() < 0.3001 and abs(speed.mean() - 0.2) < 0.002
  # the mean direction of 10,000 has length 1 / 100 by chance
  assert np.hypot(np.cos(angle).mean(), np.sin(angle).mean()) < 0.03 and np.abs(start.mean(0) - 0.5).max() < 0.01
  assert all(map(np.array_equal, moving_mnist.motion(5, 7, 2, 0.1, 0.1), moving_mnist.motion(5, 7, 2, 0.1, 0.1)))


def test_render_truncates_and_keeps_the_brighter():
  digits = np.array([[[9, 5]] * 2, [[7, 7]] * 2], np.uint8)
  frame, = moving_mnist.render(digits, np.array([[[0.99, 0], [0.5, 0.5]]], np.float32), 4)    # canvas 2: (1, 0), (1, 1)
  assert frame.tolist() == [[0, 9, 5, 0], [0, 9, 7, 0], [0, 7, 7, 0], [0, 0, 0, 0]]


def test_pool_rounds_half_to_even():
  assert moving_mnist.pool(np.array([[[1, 0, 255, 254], [0, 1, 255, 254]]], np.uint8), 2).tolist() == [[[0, 254]]]
  assert moving_mnist.pool(np.full((3, 28, 28), 6, np.uint8), 7).shape == (3, 4, 4)


# fixed sets

def make(capsys, command, raw, out, *options):
  """Prepares through the command line: exit code, folder, last line on stderr."""
  code = prepare.main(['prepare', command, f'--raw_dir={raw}', f'--out_dir={out}', *options])
  return code, os.path.join(out, clips.NAME, clips.VERSION), capsys.readouterr().err.splitlines()[-1]


def records(folder, split):
  tf = pipeline.tensorflow()
  shards = prepared.manifest(folder)['splits'][split]['shards']
  read = tf.data.TFRecordDataset([os.path.join(folder, name) for name in sorted(shards)])
  return [{k: v.numpy() for k, v in clips.decode(r).items()} for r in read]


def test_written_sequences_come_back_exactly(capsys, tmp_path):
  raw = raw_mnist(tmp_path / 'raw', train=30, t10k=10)
  for out in ('a', 'b'):
    code, folder, _ = make(capsys, 'moving_mnist', raw, tmp_path / out, '--sequences=7')
    assert code == 0
  manifest = prepared.manifest(folder)
  assert manifest == prepared.manifest(os.path.join(tmp_path, 'a', clips.NAME, clips.VERSION))
  assert manifest['dataset'] == 'clips' and manifest['splits']['test']['facts'] == {
      'frames': 20, 'height': 64, 'width': 64, 'digits_max': 2}
  banks, ids = mnist.read(raw), {}
  for i, split in enumerate(SPLITS):
    found = records(folder, split)
    assert [r['clip_id'] for r in found] == list(range(7)) and found[0]['video'].nbytes == 81920
    for n, r in enumerate(found):
      expected = moving_mnist.sequence(banks[split], i, n, 2, 20, 64)
      assert equal(r, {**expected, 'video': r['video'], 'clip_id': np.int64(n)})
      again = moving_mnist.paths(r['start'], r['velocity'], 20)
      pixels = banks[split].images[r['digit_ids'] - banks[split].ids[0]]
      assert (r['video'] == moving_mnist.render(pixels, again, 64)).all()
    ids[split] = {int(j) for r in found for j in r['digit_ids']}
    batch, = batches(source(folder, split), None, 7, train=False)
    assert (batch['video'] == [r['video'] for r in found]).all() and batch['video'].dtype == np.uint8
  assert not ids['train'] & ids['validation'] and not (ids['train'] | ids['validation']) & ids['test']
  assert make(capsys, 'moving_mnist', raw, tmp_path / 'b', '--sequences=7', '--seed=1')[0] == 3    # another is there
  assert prepare.main(['prepare', 'verify', folder]) == 0 and '21 records, all good' in capsys.readouterr().out


def test_source_says_what_is_there(capsys, tmp_path, folder):
  raw = raw_mnist(tmp_path / 'raw', t10k=10)
  options = ('--sequences=2', '--frames=12', '--size=32', '--digits=1')
  _, made, _ = make(capsys, 'moving_mnist', raw, tmp_path / 'out', *options)
  short = ConfigDict({'size': 32, 'past': 4, 'future': 6})
  assert batches(source(tmp_path / 'out', video=short), 1, 2)[0]['video'].shape == (2, 10, 32, 32)
  for change, words in (({'future': 9}, 'have 12 frames of 32 x 32 px, wanted are 13 of 32 x 32: set config.video'),
                        ({'size': 64}, 'wanted are 10 of 64 x 64')):
    with pytest.raises(DataError, match=words):
      source(made, video=ConfigDict({**short, **change}))
  with pytest.raises(DataError, match="no split 'val'; there are test, train, validation"):
    source(folder, 'val')
  with pytest.raises(DataError, match='prepare mnist --raw_dir=MNIST_FOLDER'):
    source(tmp_path)
  assert make(capsys, 'mnist', raw, tmp_path / 'out')[0] == 0
  with pytest.raises(DataError, match='two data sets'):
    source(tmp_path / 'out')
