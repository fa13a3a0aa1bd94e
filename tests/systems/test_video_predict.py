"""--mode=predict on arrays and films, and evaluations beyond what was trained: more digits, longer forecasts."""

import json
import os
import signal

import numpy as np
import pytest
from PIL import Image

from data_pipelines import DataError, clip_inputs, films
from lab import main
from tests.conftest import ROOT

CONFIG = f'--config={os.path.join(ROOT, "configs", "video.py")}:smoke'
CLIPS = os.path.join(ROOT, '..', 'shared', 'data', 'video', 'clips')


def run(workdir, mode, *arguments, source='', output='', step='latest'):
  """The program's exit code. Every flag is given, for absl keeps those of the call before; handlers are put back."""
  before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
  try:
    return main.main(['lab', CONFIG, f'--workdir={workdir}', f'--mode={mode}', f'--step={step}', f'--input={source}',
                      f'--output={output}', '--config.input.batch_size=8', *arguments])
  finally:
    for number, how in before.items():
      signal.signal(number, how)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The folder of a run of twelve steps."""
  workdir = tmp_path_factory.mktemp('video') / 'run'
  assert run(workdir, 'train') == 0
  return workdir


def lines(folder):
  return [json.loads(line) for line in (folder / 'predictions.jsonl').read_text().splitlines()]


def frames(path):
  with Image.open(path) as image:
    return image.n_frames, image.size


def test_training_draws_strips_and_films(trained):
  names = sorted(os.listdir(trained / 'pictures'))
  assert {'0000012_000000.png', '0000012_000000_film.gif'} <= set(names)
  assert frames(trained / 'pictures' / '0000012_000000_film.gif') == (10, (6 + 3 * 66, 66))
  assert 'data:image/gif' in (trained / 'run.html').read_text()


def test_rows_have_both_errors_and_the_baselines(trained):
  rows = [json.loads(line) for line in (trained / 'metrics.jsonl').read_text().splitlines()]
  train = [r for r in rows if r['split'] == 'train'][-1]
  last = [r for r in rows if r['split'] == 'eval'][-1]
  assert last['examples'] == 1000
  for head in ('recon', 'pred'):
    for metric in ('mse_per_frame', 'bce_nats_per_frame'):
      assert train[f'{head}_{metric}'] > 0 and last[f'{head}_{metric}'] > 0
    np.testing.assert_allclose(last[f'{head}_mse_per_pixel'], last[f'{head}_mse_per_frame'] / 256, rtol=1e-5)
    each = [last[f'{head}_mse_per_frame/{i:02d}'] for i in range(1, 6)]
    np.testing.assert_allclose(np.mean(each), last[f'{head}_mse_per_frame'], rtol=1e-5)
  assert 3 < last['zero_mse_per_frame'] < 4 and 4 < last['copy_last_mse_per_frame'] < 6


def test_arrays_and_films_of_a_folder(trained, tmp_path, caplog):
  folder, out = tmp_path / 'in', tmp_path / 'out'
  folder.mkdir()
  draw = np.random.default_rng(0)
  whole = draw.integers(0, 256, (10, 16, 16), np.uint8)
  np.save(folder / 'whole.npy', whole)
  np.save(folder / 'short.npy', whole[:7])                        # five seen, two of the forecast known
  np.save(folder / 'seen.npy', whole[:5])
  np.save(folder / 'few.npy', whole[:4])
  np.save(folder / 'objects.npy', np.array([{'frames': 5}], object))
  np.save(folder / 'nan.npy', np.full((10, 16, 16), np.nan, np.float32))
  with films.writer(str(folder / 'film.mp4'), 25.0, (48, 64)) as write:
    for _ in range(12):
      write(draw.integers(0, 256, (48, 64, 3), np.uint8))
  assert run(trained, 'predict', source=folder, output=out) == 3   # the others are done, and it says that some are not
  found = {line['name']: line for line in lines(out)}
  assert set(found) == {'whole', 'short', 'seen', 'film'}
  for name, known in (('whole', 5), ('short', 2), ('film', 5)):
    assert len(found[name]['pred_mse_per_frame']) == known and len(found[name]['recon_mse_per_frame']) == 5
    assert np.shape(found[name]['forecast']) == (5, 16, 16)
  assert 'pred_mse_per_frame' not in found['seen'] and np.shape(found['seen']['forecast']) == (5, 16, 16)
  guess = np.array(found['whole']['forecast']) / 255 - whole[5:] / 255
  np.testing.assert_allclose(found['whole']['pred_mse_per_frame'], (guess**2).sum((1, 2)), atol=1e-4)
  assert frames(out / 'whole.gif')[0] == 10 and frames(out / 'whole.png')[1] == (6 + 5 * 66, 5 * 66)
  assert frames(out / 'seen.png')[1] == (6 + 5 * 66, 3 * 66)      # input, reconstruction, forecast
  for name in ('few', 'objects', 'nan'):
    assert f'{name}.npy' in caplog.text


@pytest.mark.parametrize('shape', [(10, 12), (12, 10), (10, 10), (12, 4), (10, 300)])
def test_an_array_with_two_readings_is_refused_until_its_name_says_which(shape, tmp_path):
  """5 + 5 frames: the axis of 10 may be the time, or the other one's clips may be ten and cut."""
  array = np.random.default_rng(0).integers(0, 256, (*shape, 16, 16), np.uint8)
  read = lambda path: list(clip_inputs.clips(str(path), str(tmp_path), lambda: False, 16, 5, 5))
  np.save(tmp_path / 'a.npy', array)
  error, = read(tmp_path / 'a.npy')
  assert isinstance(error, DataError) and f'array [{shape[0]}, {shape[1]}, 16, 16] may be' in str(error)
  assert 'Call it a.TNHW.npy or a.NTHW.npy, or save each clip as an array [T, H, W]' in str(error)
  for name, clips in (('a.NTHW', array), ('a.TNHW', array.swapaxes(0, 1))):
    np.save(tmp_path / f'{name}.npy', array)
    found = read(tmp_path / f'{name}.npy')
    assert len(found) == len(clips)
    if clips.shape[1] < 5:
      assert all('config.video.past = 5 are needed' in str(e) for e in found)
      continue
    assert [b['name'] for b in found] == [[f'{name}#{i}'] for i in range(len(clips))]
    assert all(np.array_equal(b['video'][0, :b['known'][0]], c[:10]) for b, c in zip(found, clips))


@pytest.mark.parametrize('shape, count', [((10, 4), 4), ((4, 10), 4), ((10, 1), 1), ((1, 12), 1)])
def test_an_array_with_one_reading_is_read(shape, count, tmp_path):
  np.save(tmp_path / 'a.npy', np.zeros((*shape, 16, 16), np.uint8))
  found = list(clip_inputs.clips(str(tmp_path / 'a.npy'), str(tmp_path), lambda: False, 16, 5, 5))
  assert len(found) == count and all(batch['known'] == [10] for batch in found)


def test_more_digits_and_longer_forecasts_leave_the_evaluation_in_place(trained, tmp_path):
  assert run(trained, 'eval') == 0
  usual = json.loads((trained / 'eval_12.json').read_text())
  few = ('--config.data.digits=3', '--config.video.future=100', '--config.eval_pictures=2')
  assert run(trained, 'eval', *few, output=tmp_path) == 0
  stress = json.loads((tmp_path / 'eval_12.json').read_text())
  assert stress['examples'] == 1000 and stress['zero_mse_per_frame'] > 2 * usual['zero_mse_per_frame']
  assert 'pred_mse_per_frame/100' in stress and json.loads((trained / 'eval_12.json').read_text()) == usual
  assert frames(tmp_path / 'eval_12' / '000000_film.gif')[0] == 105


@pytest.mark.skipif(not os.path.isdir(CLIPS), reason='the real clips in ../shared/data are not there')
def test_real_clips(trained, tmp_path):
  assert run(trained, 'predict', '--config.video.past=10', '--config.video.future=10', source=CLIPS,
             output=tmp_path) == 0
  names = {line['name'] for line in lines(tmp_path)}
  assert {f'carphone_gray64#{i}' for i in range(6)} | {'carphone', 'action_320x240'} == names
