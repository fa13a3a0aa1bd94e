"""Picture files as records hold them: upright RGB JPEG, checked to decode, inside their folder."""

import io
import os
import warnings

from data_pipelines import DataError, images
from data_pipelines.pipeline import tensorflow

BYTES_MAX = 256 << 20      # of a picture file; images.PIXELS_MAX limits what it may decode to
QUALITY = 95               # of a re-encoded JPEG
_ORIENTATION = 0x0112      # EXIF


def inside(root: str, name: str) -> str:
  """Joins a file name that a data set gives to its folder. Raises DataError where it would leave the folder."""
  path = os.path.join(root, name)
  if not name or os.path.isabs(name) or '..' in name.replace('\\', '/').split('/') or '\0' in name:
    raise DataError(f'{name!r} is no file name inside {root}; absolute names and ".." are refused')
  if os.path.commonpath([os.path.realpath(root), os.path.realpath(path)]) != os.path.realpath(root):
    raise DataError(f'{path} is a link that leaves {root}; such links are refused')
  return path


def jpeg(path: str) -> tuple[bytes, int, int]:
  """An upright RGB JPEG of a picture file: its own bytes where they are one, else re-encoded.

  Returns:
    bytes, height, width.

  Raises:
    DataError: the file is missing, too large, cut off or no picture; the message names it.
  """
  from PIL import Image
  with warnings.catch_warnings():
    warnings.simplefilter('error', Image.DecompressionBombWarning)
    data, height, width = _as_it_is(path)
    if not data:
      pixels = images.read(path)
      out = io.BytesIO()
      Image.fromarray(pixels).save(out, 'JPEG', quality=QUALITY, subsampling=0)
      data, (height, width) = out.getvalue(), pixels.shape[:2]
  wrong = problem(data)
  if wrong:
    raise DataError(f'{path}: {wrong}')
  return data, height, width


def _as_it_is(path: str) -> tuple[bytes, int, int]:
  """Bytes, height and width of a file that needs no change; no bytes for one that does, or can't be read."""
  from PIL import Image
  try:
    if os.path.getsize(path) > BYTES_MAX:
      raise DataError(f'{path}: {os.path.getsize(path)} bytes; pictures over {BYTES_MAX} bytes are refused')
    with open(path, 'rb') as f:
      data = f.read()
    image = Image.open(io.BytesIO(data))         # the header only
    upright = image.getexif().get(_ORIENTATION, 1) not in range(2, 9)
  except DataError:
    raise
  except Exception:                              # images.read finds the words for it
    return b'', 0, 0
  fits = image.width * image.height <= images.PIXELS_MAX
  plain = image.format == 'JPEG' and image.mode == 'RGB' and upright and fits
  return (data if plain else b''), image.height, image.width


def problem(data: bytes) -> str:
  """What keeps JPEG bytes from being decoded in training; '' if nothing."""
  tf = tensorflow()
  try:
    tf.io.decode_jpeg(data, channels=3, dct_method='INTEGER_ACCURATE')
  except tf.errors.InvalidArgumentError:
    kind = 'a JPEG that is cut off or broken' if data[:2] == b'\xff\xd8' else 'no JPEG'
    return f'the picture is {kind} ({len(data)} bytes)'
  return ''
