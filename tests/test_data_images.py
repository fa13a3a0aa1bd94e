"""Pictures and films at the edge of the lab: every common kind is read, every broken one is named."""

import io
import logging
import os
import pathlib
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from data_pipelines import DataError, films, images


def dotted(height=24, width=36, at=(5, 9)):
  """Dark, with a red square of 4x4 px whose upper left corner is at (row, column)."""
  out = np.full((height, width, 3), 20, np.uint8)
  out[at[0]:at[0] + 4, at[1]:at[1] + 4] = [250, 10, 10]
  return out


def stored(path, picture, **options):
  Image.fromarray(picture).save(path, **options)
  return str(path)


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('suffix', ['.jpg', '.png'])
def test_all_eight_orientations_come_out_upright(tmp_path, orientation, suffix):
  upright = dotted()
  # how a camera held that way stores it: the inverse of what the tag asks a viewer to do
  turn = {1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
          5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a, 1), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
          8: lambda a: np.rot90(a, -1)}[orientation]
  exif = Image.Exif()
  exif[0x0112] = orientation
  path = stored(tmp_path / f'a{suffix}', np.ascontiguousarray(turn(upright)), exif=exif,
                **({'quality': 100, 'subsampling': 0} if suffix == '.jpg' else {}))
  got = images.read(path)
  assert got.shape == upright.shape and got.dtype == np.uint8 and got.flags.c_contiguous
  assert np.abs(got.astype(int) - upright).max() <= (30 if suffix == '.jpg' else 0)


def test_odd_orientation_blocks_are_taken_as_upright(tmp_path, caplog):
  exif = Image.Exif()
  exif[0x0112] = 77
  assert (images.read(stored(tmp_path / 'a.png', dotted(), exif=exif)) == dotted()).all()
  broken = stored(tmp_path / 'b.png', dotted(), exif=b'Exif\0\0MM\0*\xff\xff\xff')
  with caplog.at_level(logging.WARNING):
    assert (images.read(broken) == dotted()).all()


def test_every_common_kind_of_pixel(tmp_path):
  grey = np.arange(24 * 36, dtype=np.uint8).reshape(24, 36)
  rgb = np.repeat(grey[..., None], 3, -1)
  assert (images.read(stored(tmp_path / 'grey.png', grey)) == rgb).all()
  assert (images.read(stored(tmp_path / 'deep.png', grey.astype(np.uint16) * 257)) == rgb).all()
  assert (images.read(stored(tmp_path / 'deep.tif', grey.astype(np.uint16) * 257)) == rgb).all()
  Image.fromarray(grey > 99).save(tmp_path / 'bits.png')
  assert (images.read(tmp_path / 'bits.png') == np.where(rgb > 99, 255, 0)).all()
  Image.fromarray(dotted()).convert('CMYK').save(tmp_path / 'cmyk.jpg', quality=100, subsampling=0)
  assert np.abs(images.read(tmp_path / 'cmyk.jpg').astype(int) - dotted()).max() < 40
  Image.fromarray(dotted()).quantize(8).save(tmp_path / 'palette.png')
  assert np.abs(images.read(tmp_path / 'palette.png').astype(int) - dotted()).max() < 8
  Image.fromarray(dotted()).save(tmp_path / 'moving.gif', save_all=True, append_images=[Image.fromarray(dotted() + 5)])
  assert images.read(tmp_path / 'moving.gif').shape == (24, 36, 3)
  assert images.read(stored(tmp_path / 'one.png', dotted()[5:6, 9:10])).tolist() == [[[250, 10, 10]]]
  wide = np.zeros((1, 5000, 3), np.uint8)
  assert images.read(stored(tmp_path / 'wide.png', wide)).shape == wide.shape


def test_transparency_lies_on_white(tmp_path):
  alpha = np.dstack([dotted(), np.full((24, 36), 255, np.uint8)])
  alpha[:, :18, 3], alpha[:, 18:27, 3] = 0, 128
  got = images.read(stored(tmp_path / 'a.png', alpha))
  assert (got[:, :18] == 255).all() and (got[:, 27:] == 20).all() and np.abs(got[:, 18:27].astype(int) - 137).max() <= 1
  grey = np.dstack([np.full((4, 4), 60, np.uint8), np.array([[0, 255, 255, 0]] * 4, np.uint8)])
  assert images.read(stored(tmp_path / 'la.png', grey))[0, :, 0].tolist() == [255, 60, 60, 255]
  palette = Image.fromarray(np.array([[0, 1]], np.uint8), 'L').convert('P')
  palette.putpalette([10, 20, 30, 40, 50, 60])
  palette.save(tmp_path / 'p.png', transparency=0)
  assert images.read(tmp_path / 'p.png').tolist() == [[[255] * 3, [40, 50, 60]]]


def huge(path, width, height):
  """The first bytes of a PNG that promises that many pixels."""
  def chunk(kind, data):
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
  path.write_bytes(b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)) +
                   chunk(b'IDAT', zlib.compress(b'\0' * 99)) + chunk(b'IEND', b''))
  return str(path)


@pytest.mark.parametrize('width, height, said', [(9000, 9001, '9000x9001'), (20000, 20000, '400000000'),
                                                 (10000, 10000, '100000000')])
def test_huge_pictures_are_refused_before_they_are_decoded(tmp_path, width, height, said):
  with pytest.raises(DataError, match='80000000') as e:
    images.read(huge(tmp_path / 'bomb.png', width, height))
  assert said in str(e.value) and 'bomb.png' in str(e.value)
  small = stored(tmp_path / 'a.png', dotted())
  with pytest.raises(DataError, match='36x24 .* 100 pixels'):
    images.read(small, pixels_max=100)


def test_broken_files_are_named(tmp_path):
  whole = stored(tmp_path / 'whole.jpg', np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
  data = pathlib.Path(whole).read_bytes()
  whole_png = pathlib.Path(stored(tmp_path / 'whole.png', dotted())).read_bytes()
  broken = {'empty.jpg': b'', 'half.jpg': data[:len(data) // 2], 'head.jpg': data[:30], 'text.png': b'hello ' * 20,
            'half.png': whole_png[:-30], 'zeros.png': bytes(500), 'page.jpg': b'<html><body>404</body></html>'}
  for name, content in broken.items():
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
      images.read(tmp_path / name)
  with pytest.raises(DataError, match='no such file'):
    images.read(tmp_path / 'absent.png')
  with pytest.raises(DataError, match='a folder'):
    images.read(tmp_path)
  for kind in (np.float32, np.int32):
    with pytest.raises(DataError, match='floating-point|without sign'):
      images.read(stored(tmp_path / 'odd.tif', np.full((4, 4), -3, kind)))


def test_what_the_user_named(tmp_path):
  for name in ('b.png', 'a.JPG', 'deep/c.webp', '.hidden.png', 'notes.txt', 'film.mp4'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b'')
  got = images.list_inputs(str(tmp_path))
  assert got.kind == 'pictures'
  assert [os.path.relpath(n, tmp_path) for n in got.names] == ['a.JPG', 'b.png', 'deep/c.webp']
  assert images.list_inputs(str(tmp_path / 'b.png')) == ('pictures', (str(tmp_path / 'b.png'),))
  assert images.list_inputs(str(tmp_path / 'film.mp4')).kind == 'film'
  assert images.list_inputs('0') == ('camera', ('0',))
  (tmp_path / 'none').mkdir()
  with pytest.raises(DataError, match='no picture in this folder'):
    images.list_inputs(str(tmp_path / 'none'))
  with pytest.raises(DataError, match='no such file or folder'):
    images.list_inputs(str(tmp_path / 'absent'))


def test_writing_is_whole_or_nothing(tmp_path, monkeypatch):
  images.write(tmp_path / 'new' / 'a.png', dotted())
  images.write(tmp_path / 'new' / 'a.jpg', dotted())
  assert (images.read(tmp_path / 'new' / 'a.png') == dotted()).all()
  assert np.abs(images.read(tmp_path / 'new' / 'a.jpg').astype(int) - dotted()).mean() < 12
  before = sorted(os.listdir(tmp_path / 'new'))
  with pytest.raises(DataError, match='.png, .jpg'):
    images.write(tmp_path / 'new' / 'a.bmp', dotted())
  with pytest.raises(ValueError, match='uint8'):
    images.write(tmp_path / 'new' / 'b.png', dotted().astype(np.float32))
  def fail(self, path, *_, **__):
    pathlib.Path(path).write_bytes(b'half')
    raise OSError('disk full')
  monkeypatch.setattr(Image.Image, 'save', fail)
  with pytest.raises(OSError, match='disk full'):
    images.write(tmp_path / 'new' / 'a.png', dotted())
  assert sorted(os.listdir(tmp_path / 'new')) == before
  assert (images.read(tmp_path / 'new' / 'a.png') == dotted()).all()


def test_strokes_stay_inside_and_text_too():
  page = np.zeros((20, 30, 3), np.uint8)
  line = images.draw(page, [images.Stroke((5, 5), (25, 5), (255, 0, 0), 3)])
  assert line[5, 15].tolist() == [255, 0, 0] and line[12, 15].tolist() == [0, 0, 0] and not page.any()
  dot = images.draw(page, [images.Stroke((15, 10), (15, 10), (0, 255, 0), 8)])
  assert 0.5 < (dot[..., 1] > 127).sum() / (np.pi * 16) < 1.5
  images.draw(page, [images.Stroke((-1e9, 3), (1e9, 1e9), (1, 2, 3), 1e3)])
  for at in ((0, 0), (1e6, 1e6), (-9, 12)):
    page = np.zeros((20, 30, 3), np.uint8)
    images.label(page, 'a', at, 8)
    assert page.max() > 200
  images.label(np.zeros((2, 2, 3), np.uint8), 'longer than the picture', (0, 0), 30)


# --- films


def moving(count, height=48, width=64):
  """Frames with a red square that moves right, 4 px a frame."""
  out = []
  for i in range(count):
    frame = np.full((height, width, 3), 30, np.uint8)
    frame[16:32, 4 * i:4 * i + 16] = [230, 40, 40]
    out.append(frame)
  return out


@pytest.mark.parametrize('name, fps', [('a.mp4', 25.0), ('a.avi', 12.5), ('a.mp4', 30000 / 1001)])
def test_a_film_comes_back_in_order_colour_and_rate(tmp_path, name, fps):
  frames = moving(6)
  with films.writer(tmp_path / name, fps, (48, 64)) as write:
    for f in frames:
      write(f)
  assert os.listdir(tmp_path) == [name]
  with films.opened(str(tmp_path / name)) as film:
    assert film.fps == pytest.approx(fps, rel=1e-3) and film.size == (48, 64)
    back = list(film.frames)
  assert len(back) == 6                             # the first one, too
  for a, b in zip(frames, back):
    assert a.shape == b.shape and np.abs(a.astype(int) - b).mean() < 8


def test_one_frame_and_odd_sizes(tmp_path):
  for size in ((48, 64), (47, 63)):
    with films.writer(tmp_path / 'a.mp4', 10, size) as write:
      write(np.full((*size, 3), 90, np.uint8))
    with films.opened(str(tmp_path / 'a.mp4')) as film:
      assert [f.shape for f in film.frames] == [(48, 64, 3)]


def test_unwritable_films_leave_nothing(tmp_path):
  with pytest.raises(DataError, match='.mp4'):
    with films.writer(tmp_path / 'a.webm', 10, (48, 64)):
      pass
  with pytest.raises(DataError, match='no frame was written'):
    with films.writer(tmp_path / 'a.mp4', 10, (48, 64)):
      pass
  with pytest.raises(ValueError, match='frames are 48x64, got 48x60'):
    with films.writer(tmp_path / 'a.mp4', 10, (48, 64)) as write:
      write(np.zeros((48, 60, 3), np.uint8))
  with pytest.raises(KeyError):
    with films.writer(tmp_path / 'a.avi', 10, (48, 64)) as write:
      write(np.zeros((48, 64, 3), np.uint8))
      raise KeyError('interrupted')
  assert os.listdir(tmp_path) == []


def test_broken_films_and_absent_cameras_are_named(tmp_path):
  with films.writer(tmp_path / 'a.mp4', 10, (48, 64)) as write:
    for f in moving(5):
      write(f)
  data = (tmp_path / 'a.mp4').read_bytes()
  for name, content in {'empty.mp4': b'', 'text.mp4': b'not a film ' * 50, 'half.mp4': data[:len(data) // 2]}.items():
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
      with films.opened(str(tmp_path / name)):
        pass
  with pytest.raises(DataError, match='no such film'):
    with films.opened(str(tmp_path / 'absent.mp4')):
      pass
  with pytest.raises(DataError, match='there is no camera 97'):
    with films.opened('97'):
      pass


@pytest.mark.parametrize('kind', ['BMP', 'TIFF', 'WEBP', 'GIF', 'PNG'])
def test_a_record_s_picture_is_a_jpeg_and_nothing_else(kind, capfd):
  """OpenCV would read them all, by decoders that nobody asked for."""
  buffer = io.BytesIO()
  Image.new('RGB', (8, 8)).save(buffer, kind)
  for data in (buffer.getvalue(), b'', b'\xff\xd8\xff'):
    with pytest.raises(ValueError, match='of another format'):
      images.decode(data)
  with pytest.raises(ValueError, match='of another format'):
    images.decode_mask(buffer.getvalue()[:20])
  assert capfd.readouterr() == ('', '')
