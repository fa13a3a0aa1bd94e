"""Arrays and films: odd layouts and types, hostile files, fixed sets made of them, and what prediction sees."""

import os

import numpy as np
import pytest
from data_pipelines import DataError, clip_inputs, clips, films, images, moving_mnist, pipeline, prepare, prepared
from lab import config as core
from ml_collections import ConfigDict
from PIL import Image

from tests.conftest import ROOT

SHARED = os.path.join(ROOT, '..', 'shared', 'data', 'video', 'clips')
GREY = np.random.default_rng(0).integers(0, 256, (3, 20, 6, 8), np.uint8)      # [N, T, H, W]


def save(path, array, **options):
  np.save(path, array, **options)
  return str(path)


def taken(path, **options):
  """All clips of a file, u8[N, T, H, W]."""
  view = clips.array(path, **options)
  return np.stack([clips.clip(path, view, i) for i in range(len(view))])


def header(text, data=b'', version=b'\1\0'):
  """The bytes of a .npy file with a hand-made header."""
  return b'\x93NUMPY' + version + (len(text) + 1).to_bytes(2, 'little') + text.encode() + b'\n' + data


def fields(shape, descr='|u1'):
  return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"


UNIT = GREY / 255


@pytest.mark.parametrize('array', [
    GREY, GREY.swapaxes(0, 1), GREY[..., None], GREY.swapaxes(0, 1)[..., None], np.asfortranarray(GREY),
    np.asfortranarray(GREY.swapaxes(0, 1)), np.repeat(GREY, 2, 0)[::2], GREY.astype(np.int64), GREY.astype('>u2'),
    GREY.astype('>i4'), UNIT, UNIT.astype(np.float32), UNIT.astype(np.float16), UNIT.astype('>f4'), UNIT.astype('>f8'),
    np.asfortranarray(UNIT.astype('>f4'))], ids=lambda a: f'{list(a.shape)} {a.dtype}')
def test_layouts_types_and_orders_give_the_same_clips(tmp_path, array):
  assert np.array_equal(taken(save(tmp_path / 'a.npy', array)), GREY)


def test_layouts_that_are_stated_and_single_clips(tmp_path):
  square = np.arange(16, dtype=np.uint8).reshape(4, 4, 1, 1).repeat(2, 2).repeat(2, 3)
  path = save(tmp_path / 'a.npy', square)
  assert np.array_equal(taken(path, layout='NTHW'), square)
  assert np.array_equal(taken(path, layout='TNHW'), square.swapaxes(0, 1))
  for frames in (4, 5):
    with pytest.raises(DataError, match=rf'a.npy: .*may be \[T, N, H, W\] or .*is {frames}, .*--layout=TNHW or NTHW'):
      clips.array(path, frames=frames)
  for one in (GREY[0], GREY[0][..., None]):
    assert np.array_equal(taken(save(tmp_path / 'b.npy', one)), GREY[:1])
  assert taken(save(tmp_path / 'c.npy', np.array([[[True, False]]]))).tolist() == [[[[255, 0]]]]
  assert taken(save(tmp_path / 'd.npy', np.array([[[0, 1]]]))).tolist() == [[[[0, 1]]]]
  (tmp_path / 'e.npy').write_bytes(header(fields('(1L, 2L, 2L)'), bytes([1, 2, 3, 4])))      # as Python 2 wrote them
  assert taken(str(tmp_path / 'e.npy')).tolist() == [[[[1, 2], [3, 4]]]]


def test_public_file_is_read_where_it_lies(tmp_path):
  path = save(tmp_path / 'mnist_test_seq.npy', np.zeros((20, 50, 64, 64), np.uint8))
  view = clips.array(path)
  assert view.shape == (50, 20, 64, 64) and isinstance(view, np.memmap) and not view.flags.owndata


@pytest.mark.parametrize('array, words', [
    (np.array([None, {}], object), 'Python objects; those are never unpickled'),
    (GREY[0].astype(complex), 'an array of complex128'), (np.array([[['a']]]), 'an array of <U1'),
    (np.array([[[b'a']]]), r'an array of \|S1'), (np.zeros((2, 2, 2), 'M8[s]'), 'datetime64'),
    (np.zeros((2, 2, 2), [('a', 'u1')]), "'a', 'u1'"), (np.zeros((2, 2, 2), [('é', 'u1')]), 'a.npy: '),
    (np.uint8(1), r'an array \[\];'), (GREY[0, 0], r'an array \[6, 8\]; grey'),
    (np.zeros((2, 20, 4, 4, 3), np.uint8), r'an array \[2, 20, 4, 4, 3\], its last axis colours; grey'),
    (np.zeros((20, 8, 8, 3), np.uint8), r'an array \[20, 8, 8, 3\], its last axis colours; grey'),
    (np.zeros((0, 20, 4, 4), np.uint8), r'\[0, 20, 4, 4\] holds no frame'),
    (np.zeros((20, 4, 0), np.uint8), r'\[20, 4, 0\] holds no frame')])
def test_arrays_that_are_no_clips_are_named(tmp_path, array, words):
  with pytest.raises(DataError, match=words) as e:
    clips.array(save(tmp_path / 'a.npy', array, allow_pickle=True))
  assert str(tmp_path / 'a.npy') in str(e.value) and '\n' not in str(e.value)


def whole(tmp_path):
  with open(save(tmp_path / 'whole.npy', GREY), 'rb') as f:
    return f.read()


@pytest.mark.parametrize('content, words', [
    (lambda d: d[:-1], 'cut off; an array'), (lambda d: d[:50], 'header is cut off'), (lambda d: d[:7], 'is cut off'),
    (lambda d: b'', 'no .npy file'), (lambda d: b'x' + d, 'no .npy file'), (lambda d: d + b'more', '4 bytes lie'),
    (lambda d: b'PK\3\4' + d, 'an .npz archive'), (lambda d: b'\x80\x04' + d, 'no .npy file'),
    (lambda d: header('(' * 9000), 'header is cut off or broken'), (lambda d: header('{}'), 'cut off or broken'),
    (lambda d: header("__import__('os').abort()"), 'header is cut off or broken'),
    (lambda d: header(fields('(99999999999, 8, 8)')), 'cut off'), (lambda d: header(fields('(-1, 8, 8)')), 'no frame'),
    (lambda d: header(fields('(1, 1, 1)', '|O'), b'\x80\x04.'), 'never unpickled'),
    (lambda d: header(fields('(1, 1, 1)'), b'0', b'\7\0'), '.npy')])
def test_broken_files_are_named(tmp_path, content, words):
  path = tmp_path / 'a.npy'
  path.write_bytes(content(whole(tmp_path)))
  with pytest.raises(DataError, match=words) as e:
    clips.array(str(path))
  assert str(path) in str(e.value) and '\n' not in str(e.value)


def test_archives_and_folders_are_refused(tmp_path):
  np.savez(tmp_path / 'a.npz', GREY)
  for path, words in ((tmp_path / 'a.npz', 'save its array alone'), (tmp_path, 'Is a directory'),
                      (tmp_path / 'none.npy', 'No such file')):
    with pytest.raises(DataError, match=words):
      clips.array(str(path))


@pytest.mark.parametrize('dtype, value, words', [
    (np.float32, np.nan, 'the value nan at row 3, column 7; float32 is read from 0 to 1'), (np.float64, np.inf, 'inf'),
    (np.float16, 1.5, 'the value 1.5'), (np.float32, -0.25, 'value -0.25'), (np.int16, 256, '256 at row 3, column 7'),
    (np.int8, -1, 'the value -1 at row 3, column 7; int8 is read from 0 to 255'), (np.uint64, 2**63, str(2**63))])
def test_first_bad_value_is_named(tmp_path, capsys, dtype, value, words):
  array = np.zeros((3, 20, 6, 8), dtype)
  array[1, 5, 3, 7] = array[2, 0, 0, 0] = value
  path = save(tmp_path / 'a.npy', array)
  assert np.array_equal(clips.clip(path, clips.array(path), 0), np.zeros((20, 6, 8)))
  code, err = make(capsys, path, tmp_path / 'out', '--frames=3', '--layout=NTHW')
  assert code == 3 and f'{path}: clip 1, frame 5: ' in err and words in err and err.count('\n') == 1
  assert not (tmp_path / 'out' / clips.NAME).exists()


# prepare clips

def make(capsys, raw, out, *options):
  """Exit code and stderr without the progress."""
  code = prepare.main(['prepare', 'clips', f'--raw_dir={raw}', f'--out_dir={out}', *options])
  return code, ''.join(line for line in capsys.readouterr().err.splitlines(True) if ' s left' not in line)


def written(out):
  """split -> (ids, videos) of the prepared folder, which is checked on the way."""
  folder = os.path.join(out, clips.NAME, clips.VERSION)
  assert not list(prepared.problems(folder, clips.check))
  tf, found = pipeline.tensorflow(), {}
  for split, entry in prepared.manifest(folder)['splits'].items():
    read = tf.data.TFRecordDataset([os.path.join(folder, n) for n in sorted(entry['shards'])])
    rows = [clips.decode(r) for r in read]
    found[split] = [int(r['clip_id']) for r in rows], np.stack([r['video'] for r in rows])
  return found


def test_one_file_is_test_and_long_clips_are_divided(capsys, tmp_path):
  path = save(tmp_path / 'a.npy', GREY.swapaxes(0, 1))
  assert make(capsys, path, tmp_path / 'out')[0] == 0
  (split, (ids, video)), = written(tmp_path / 'out').items()
  assert split == 'test' and ids == [0, 1, 2] and np.array_equal(video, GREY)
  assert make(capsys, path, tmp_path / 'short', '--frames=6', '--layout=TNHW')[0] == 0
  ids, video = written(tmp_path / 'short')['test']
  assert ids == list(range(9)) and np.array_equal(video, GREY[:, :18].reshape(9, 6, 6, 8))
  facts = prepared.manifest(str(tmp_path / 'short' / clips.NAME / clips.VERSION))
  assert facts['splits']['test']['facts'] == {'frames': 6, 'height': 6, 'width': 8, 'digits_max': 0}
  assert facts['report']['test']['frames_left_out_a_clip'] == 2


def test_files_of_a_folder_are_splits(capsys, tmp_path):
  raw = tmp_path / 'raw'
  raw.mkdir()
  code, err = make(capsys, raw, tmp_path / 'out')
  assert code == 3 and f'{raw}: no .npy file' in err
  save(raw / 'train.npy', GREY)
  save(raw / 'validation.npy', UNIT[:1])
  assert make(capsys, raw, tmp_path / 'out')[0] == 0
  found = written(tmp_path / 'out')
  assert np.array_equal(found['train'][1], GREY) and np.array_equal(found['validation'][1], GREY[:1])
  code, err = make(capsys, raw, tmp_path / 'parity', '--parity_split')
  assert code == 3 and '--parity_split divides one file' in err
  save(raw / 'other.npy', GREY)
  code, err = make(capsys, raw, tmp_path / 'three')
  assert code == 3 and 'other, train, validation; several files must be named train, validation, test' in err


def test_parity_split(capsys, tmp_path):
  path = save(tmp_path / 'a.npy', np.arange(20, dtype=np.uint8)[:, None, None, None] * np.ones((1, 4, 2, 2), np.uint8))
  assert make(capsys, path, tmp_path / 'out', '--parity_split', '--frames=2', '--layout=NTHW')[0] == 0
  found = written(tmp_path / 'out')
  assert {k: sorted({*v[:, 0, 0, 0]}) for k, (_, v) in found.items()} == {
      'train': [*range(18)], 'validation': [18, 19]}
  assert found['train'][0] + found['validation'][0] == list(range(40))
  code, err = make(capsys, save(tmp_path / 'one.npy', GREY[0]), tmp_path / 'one', '--parity_split')
  assert code == 3 and 'one clip; --parity_split needs at least two' in err


def test_too_few_frames(capsys, tmp_path):
  path = save(tmp_path / 'a.npy', GREY[0])
  code, err = make(capsys, path, tmp_path / 'out', '--frames=21')
  assert code == 3 and f'{path}: its clips have 20 frames, fewer than --frames=21' in err


def test_a_shard_holds_a_thousand_or_more(capsys, tmp_path):
  path = save(tmp_path / 'a.npy', np.zeros((2001, 2, 1, 2), np.uint8))
  for out, options, shards in (('a', (), 3), ('b', ('--shards=2',), 2)):
    assert make(capsys, path, tmp_path / out, '--frames=2', *options)[0] == 0
    entry = prepared.manifest(str(tmp_path / out / clips.NAME / clips.VERSION))['splits']['test']
    assert len(entry['shards']) == shards and entry['records'] == 2001


def test_imported_clips_are_evaluated_whole(capsys, tmp_path):
  video = np.random.default_rng(1).integers(0, 256, (20, 100, 4, 4), np.uint8)
  make(capsys, save(tmp_path / 'a.npy', video), tmp_path / 'out')
  source = moving_mnist.source(str(tmp_path / 'out'), 'test', None, ConfigDict({'size': 4, 'past': 3, 'future': 5}))
  found = list(pipeline.Batches(source, core.core().input, 48, range(48), train=False))
  assert sum(b['mask'].sum() for b in found) == 100 and found[0]['video'].dtype == np.uint8
  kept = np.concatenate([b['video'][b['mask'] > 0] for b in found])
  assert np.array_equal(kept, video.swapaxes(0, 1)[:, :8])


# prediction

def stream(source, output='out', size=6, past=2, future=3, stop=lambda: False):
  return list(clip_inputs.clips(str(source), str(output), stop, size, past, future))


def test_arrays_become_batches_of_one(tmp_path):
  video = np.random.default_rng(1).integers(0, 256, (5, 4, 6, 6), np.uint8)       # 4 clips of 5 frames
  found = stream(save(tmp_path / 'a.npy', video))
  assert [b['name'] for b in found] == [[f'a#{i}'] for i in range(4)]
  batch = found[3]
  assert {k: (v.shape, v.dtype.name) for k, v in batch.items() if isinstance(v, np.ndarray)} == {
      'video': ((1, 5, 6, 6), 'uint8'), 'known': ((1,), 'int32'), 'mask': ((1,), 'float32')}
  assert np.array_equal(batch['video'][0], video[:, 3]) and batch['known'] == [5] and batch['mask'] == [1]


def test_short_clips_are_filled_up_and_long_ones_cut(tmp_path):
  video = np.random.default_rng(1).integers(0, 256, (9, 6, 6), np.uint8)
  for length, known in ((9, 5), (5, 5), (3, 3), (2, 2)):
    batch, = stream(save(tmp_path / 'a.npy', video[:length]))
    assert batch['name'] == ['a'] and batch['known'] == [known]
    assert np.array_equal(batch['video'][0, :known], video[:known])
    assert (batch['video'][0, known:] == video[known - 1]).all() and batch['video'].shape == (1, 5, 6, 6)
  error, = stream(save(tmp_path / 'a.npy', video[:1]))
  assert isinstance(error, DataError) and 'a has 1 frames, config.video.past = 2' in str(error)


def test_frames_are_cropped_in_their_middle_and_averaged(tmp_path):
  video = np.zeros((5, 4, 10), np.uint8)
  video[:, :2, 3:5], video[:, 2:, 5:7] = 100, 60
  video[:, :, :3] = video[:, :, 7:] = 255
  batch, = stream(save(tmp_path / 'a.npy', video), size=2)
  assert batch['video'][0, 0].tolist() == [[100, 0], [0, 60]]


def test_folder_with_broken_files(tmp_path):
  (tmp_path / 'sub').mkdir()
  bad = np.zeros((5, 2, 6, 6), np.float32)
  bad[4, 0] = 2
  save(tmp_path / 'b.npy', bad)
  save(tmp_path / 'sub' / 'c.npy', np.zeros((5, 6, 6), np.uint8))
  (tmp_path / 'a.mp4').write_bytes(b'no film')
  (tmp_path / 'd.npy').write_bytes(b'no array')
  (tmp_path / 'notes.txt').write_text('')
  found = [str(b) if isinstance(b, DataError) else b['name'][0] for b in stream(tmp_path)]
  assert len(found) == 5 and found[2::2] == ['b#1', 'sub/c']
  for text, words in zip((found[0], found[1], found[3]), (
      'a.mp4: no frame could be read', 'b.npy: clip 0, frame 4: the value 2.0', 'd.npy: no .npy file'), strict=True):
    assert words in text
  with pytest.raises(DataError, match='no such file or folder'):
    stream(tmp_path / 'none')
  assert stream(tmp_path, stop=lambda: True) == []


def test_names_that_would_be_the_same_keep_their_suffix(tmp_path):
  frame = np.zeros((16, 16, 3), np.uint8)
  for name in ('a.avi', 'a.mp4'):
    with films.writer(tmp_path / name, 10, (16, 16)) as write:
      for _ in range(3):
        write(frame)
  assert [b['name'][0] for b in stream(tmp_path)] == ['a.avi', 'a.mp4']


def test_films_are_grey(tmp_path):
  import cv2
  colours = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
  assert np.array_equal(clip_inputs.grey(colours), cv2.cvtColor(colours, cv2.COLOR_RGB2GRAY))
  with films.writer(tmp_path / 'a.avi', 10, (32, 48)) as write:
    for level in (40, 80, 120, 160, 200, 240):
      write(np.full((32, 48, 3), level, np.uint8))
  batch, = stream(tmp_path / 'a.avi', size=16)
  assert batch['known'] == [5] and np.abs(batch['video'][0, :, 8, 8] - [40., 80, 120, 160, 200]).max() < 4


@pytest.mark.skipif(not os.path.exists(SHARED), reason='the clips in ../shared/data are not there')
def test_real_clips():
  found = {b['name'][0]: b['video'][0].astype(int) for b in stream(SHARED, size=64, past=10, future=10)}
  assert list(found) == ['action_320x240', 'carphone', *(f'carphone_gray64#{i}' for i in range(6))]
  assert np.abs(found['carphone'] - found['carphone_gray64#0']).mean() < 2      # another decoder's colours


def test_write_makes_png_and_gif(tmp_path):
  batch, = stream(save(tmp_path / 'a.npy', np.zeros((5, 6, 6), np.uint8)), tmp_path / 'out')
  film = np.zeros((16, 12, 10, 3), np.uint8)
  film[np.arange(16), :, :, 0] = 15 * np.arange(16)[:, None, None]
  batch['write'](film[5])
  batch['write'](film)
  assert sorted(os.listdir(tmp_path / 'out')) == ['a.gif', 'a.png']
  assert np.array_equal(images.read(tmp_path / 'out' / 'a.png'), film[5])
  with Image.open(tmp_path / 'out' / 'a.gif') as gif:
    assert gif.n_frames == 16 and gif.size == (10, 12) and gif.info['loop'] == 0
    times = [gif.seek(i) or gif.info['duration'] for i in range(16)]
    assert sum(times) == 2000 and set(times) == {120, 130}
    assert np.abs(np.asarray(gif.convert('RGB'))[5, 5] - [225., 0, 0]).max() < 8
  with pytest.raises(ValueError, match='uint8'):
    batch['write'](film.astype(float))
