"""--mode=predict and --mode=eval from a checkpoint: pictures, folders, films, what is broken, which step."""

import json
import os
import signal
import struct
import zlib

import numpy as np
import pytest
from data_pipelines import coco, films, images
from PIL import Image

from lab import main
from lab.systems.pose import skeleton
from tests.coco_fixture import ORIENTATION, noise
from tests.conftest import ROOT

CONFIG = f'--config={os.path.join(ROOT, "configs", "pose.py")}:smoke'
PHOTO = os.path.join(coco.SAMPLE, 'val', '000000252219.jpg')
# a network of twelve steps finds nobody: whatever peak it has counts as a person
ANYBODY = ('--config.decode.peak_min=1e-6', '--config.decode.parts_min=1', '--config.decode.score_min=0',
           '--config.decode.peaks=4')


def run(workdir, mode, *arguments, source='', output='', step='latest'):
  """The program's exit code. Every flag is given, for absl keeps those of the call before; handlers are put back."""
  before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
  try:
    # eight devices share a batch here
    return main.main(['lab', CONFIG, f'--workdir={workdir}', f'--mode={mode}', f'--step={step}', f'--input={source}',
                      f'--output={output}', '--config.input.batch_size=8', *arguments])
  finally:
    for number, how in before.items():
      signal.signal(number, how)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The folder of a run of twelve steps, with checkpoints 8 and 12."""
  workdir = tmp_path_factory.mktemp('pose') / 'run'
  assert run(workdir, 'train') == 0
  return workdir


def lines(folder):
  return [json.loads(line) for line in (folder / 'predictions.jsonl').read_text().splitlines()]


def by_file(folder):
  """file name -> its people, [17, 3] each."""
  out = {}
  for line in lines(folder):
    out.setdefault(line['file_name'], []).append(np.reshape(line['keypoints'], (17, 3)))
  return out


def drawn(path):
  with Image.open(path) as image:
    return image.size


def errors(caplog):
  return [r.getMessage() for r in caplog.records if r.levelname == 'ERROR']


def claims(path, width, height):
  """A PNG that says it is that large, and holds no pixel."""
  def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
  header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
  path.write_bytes(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', b'') + chunk(b'IEND', b''))


def good_pictures(folder):
  """Writes pictures of every ordinary kind; returns file name -> (width, height) as a viewer shows it."""
  with open(PHOTO, 'rb') as f:
    (folder / '000000252219.jpg').write_bytes(f.read())
  photo = Image.fromarray(images.read(PHOTO))
  width, height = photo.size
  lying = Image.Exif()
  lying[ORIENTATION] = 6                                       # to be turned clockwise by who shows it
  photo.rotate(90, expand=True).save(folder / 'lying.png', exif=lying)
  photo.convert('L').save(folder / 'grey.jpg')
  photo.convert('CMYK').save(folder / 'ink.jpg')
  glass = photo.resize((90, 60))
  glass.putalpha(Image.fromarray(noise(60, 90)[..., 0]))
  (folder / 'below').mkdir()
  glass.save(folder / 'below' / 'glass.png')
  Image.new('RGB', (1, 1), (200, 30, 30)).save(folder / 'dot.png')
  Image.fromarray(noise(40, 50)).save(folder / '4.png')        # a number, and the place of another
  return {'000000252219.jpg': (width, height), 'lying.png': (width, height), 'grey.jpg': (width, height),
          'ink.jpg': (width, height), 'below/glass.png': (90, 60), 'dot.png': (1, 1), '4.png': (50, 40)}


def test_a_folder_of_all_kinds(trained, tmp_path, caplog, capsys):
  folder, output = tmp_path / 'in', tmp_path / 'out'
  folder.mkdir()
  good = good_pictures(folder)
  with open(PHOTO, 'rb') as f:
    (folder / 'cut.jpg').write_bytes(f.read()[:2000])
  claims(folder / 'huge.png', 30000, 30000)
  (folder / 'letter.jpg').write_text('Dear Sir or Madam')
  (folder / 'notes.txt').write_text('no picture, and not named like one')
  assert run(trained, 'predict', *ANYBODY, source=folder, output=output) == 3

  found = lines(output)
  assert {line['file_name'] for line in found} == set(good)
  assert len({line['image_id'] for line in found}) == len(good)       # COCO's server takes equal ids for one picture
  assert {line['image_id'] for line in found if line['file_name'] in ('000000252219.jpg', '4.png')} == {252219, 4}
  for line in found:
    assert set(line) == {'image_id', 'file_name', 'category_id', 'keypoints', 'score'}
    assert line['category_id'] == 1 and isinstance(line['image_id'], int) and line['score'] > 0
    assert len(line['keypoints']) == 51 and np.isfinite(line['keypoints']).all()
  assert {name: drawn(output / f'{name}.png') for name in good} == good
  pictures = [p for p in output.rglob('*') if p.is_file()]
  assert len(pictures) == len(good) + 1                               # and the lines; nothing half written
  # turned back losslessly, it is the same picture
  people = by_file(output)
  np.testing.assert_array_equal(people['lying.png'], people['000000252219.jpg'])

  said = errors(caplog)
  assert len(said) == 3 and all('\n' not in s for s in said)
  for name in ('cut.jpg', 'huge.png', 'letter.jpg'):
    assert sum(str(folder / name) in s for s in said) == 1
  assert '3 input(s) could not be read' in capsys.readouterr().err.splitlines()[-1]


def test_nothing_that_can_be_read(trained, tmp_path, capsys):
  (tmp_path / 'broken.jpg').write_bytes(b'\xff\xd8\xff')
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'film.mp4').write_bytes(b'no film')
  for name, said in (('broken.jpg', 'not a readable picture'), ('missing.jpg', 'no such file'),
                     ('empty', 'no picture in this folder'), ('film.mp4', 'not a film')):
    assert run(trained, 'predict', source=tmp_path / name, output=tmp_path / 'out') == 3
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and said in err[0] and str(tmp_path / name) in err[0], err
    assert not (tmp_path / 'out' / 'predictions.jsonl').exists()


def test_an_absent_camera_is_one_message(trained, tmp_path, capsys):
  assert run(trained, 'predict', source='97', output=tmp_path / 'out') == 3
  err = capsys.readouterr().err.splitlines()
  assert len(err) == 1 and 'there is no camera 97' in err[0], err


def test_an_output_that_is_no_folder(trained, tmp_path, capsys):
  (tmp_path / 'file').write_text('mine')
  assert run(trained, 'predict', source=PHOTO, output=tmp_path / 'file') == 3
  err = capsys.readouterr().err.splitlines()
  assert len(err) == 1 and f'--output={tmp_path / "file"}' in err[0], err
  assert (tmp_path / 'file').read_text() == 'mine'


@pytest.mark.parametrize('suffix', ['.mp4', '.avi'])
def test_a_film_stays_as_long_as_it_was(trained, tmp_path, suffix):
  film, output = tmp_path / f'walk{suffix}', tmp_path / 'out'
  with films.writer(str(film), 12.5, (48, 80)) as write:
    for i in range(5):
      write(np.roll(noise(48, 80), 3 * i, 1))
  assert run(trained, 'predict', *ANYBODY, source=film, output=output) == 0
  with films.opened(str(output / 'walk.mp4')) as got:
    assert got.fps == pytest.approx(12.5) and got.size == (48, 80)
    assert len(list(got.frames)) == 5
  assert {(line['image_id'], line['file_name']) for line in lines(output)} == {
      (i, f'walk{suffix}#{i}') for i in range(5)}


def test_a_film_is_never_written_over(trained, tmp_path, capsys):
  film = tmp_path / 'walk.mp4'
  with films.writer(str(film), 10, (48, 80)) as write:
    write(noise(48, 80))
  before = film.read_bytes()
  assert run(trained, 'predict', source=film, output=tmp_path) == 3
  assert '--output' in capsys.readouterr().err
  assert film.read_bytes() == before


def test_results_are_no_input_of_the_next_time(trained, tmp_path):
  """Where --output lies inside --input, what was drawn is left alone."""
  Image.fromarray(noise(64, 64)).save(tmp_path / 'a.png')
  for _ in range(2):
    assert run(trained, 'predict', *ANYBODY, source=tmp_path, output=tmp_path / 'out') == 0
    assert set(by_file(tmp_path / 'out')) == {'a.png'}
    assert sorted(os.listdir(tmp_path / 'out')) == ['a.png.png', 'predictions.jsonl']


def test_the_step_is_chosen(trained, tmp_path, capsys):
  Image.fromarray(noise(64, 64)).save(tmp_path / 'a.png')
  rows = [json.loads(line) for line in (trained / 'metrics.jsonl').read_text().splitlines()]
  best = max((r['AP'], r['step']) for r in rows if r['split'] == 'eval')[1]
  for step, number in (('latest', 12), ('12', 12), ('best', best), ('8', 8)):
    assert run(trained, 'predict', source=tmp_path / 'a.png', output=tmp_path / 'out', step=step) == 0
    assert f'predicting with step {number} of' in capsys.readouterr().err
  for mode in ('predict', 'eval'):
    assert run(trained, mode, source=tmp_path / 'a.png', output=tmp_path / 'none', step='13') == 5
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and "no step '13'" in err[0] and '12' in err[0], err
  assert not (tmp_path / 'none' / 'predictions.jsonl').exists()


def test_evaluation_repeats_the_scores_of_training(trained, capsys):
  assert run(trained, 'eval', step='12') == 0
  got = json.loads((trained / 'eval_12.json').read_text())
  rows = [json.loads(line) for line in (trained / 'metrics.jsonl').read_text().splitlines()]
  want = next(r for r in rows if r['split'] == 'eval' and r['step'] == 12)
  del want['split']
  assert got == pytest.approx(want, rel=1e-5) and got['examples'] == 17
  assert 'step 12: examples 17' in capsys.readouterr().err


def test_the_flip_test_does_not_know_left_from_right(trained, tmp_path):
  """With it, the people on a mirrored picture are the mirrored people, whatever the network says; without, not."""
  size = 64                                                   # what the network sees: no letterbox blurs the comparison
  picture, folder = noise(size, size, 3), tmp_path / 'in'
  folder.mkdir()
  Image.fromarray(picture).save(folder / 'a.png')
  Image.fromarray(picture[:, ::-1]).save(folder / 'b.png')
  same = {}
  for flip in (False, True):
    output = tmp_path / f'out{flip}'
    arguments = (*ANYBODY, f'--config.decode.flip={flip}')
    assert run(trained, 'predict', *arguments, source=folder, output=output) == 0
    got = by_file(output)
    a, b = (np.array(got[name]) for name in ('a.png', 'b.png'))
    mirrored = b[:, skeleton.COCO_MIRROR]
    there = mirrored[..., 2:] > 0
    mirrored = np.where(there, mirrored * [-1, 1, 1] + [size - 1, 0, 0], 0)
    same[flip] = a.shape == b.shape and np.allclose(a, mirrored, atol=2e-3)
  assert same == {False: False, True: True}
