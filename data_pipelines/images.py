"""Pictures in files, moved pixels, and strokes on pictures: the door to Pillow, and to OpenCV.

Inside the lab a picture is u8[H, W, 3], RGB, upright. Policy on EXIF orientation: it is applied when a file is read, so
whatever looks at pixels sees what a viewer shows.
"""

import contextlib
import functools
import logging
import math
import os
import secrets
import threading
import warnings
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from data_pipelines import DataError, folders

SUFFIXES = ('.jpg', '.jpeg', '.png', '.webp', '.bmp', '.tif', '.tiff', '.gif', '.ppm', '.pgm')
PIXELS_MAX = 80_000_000           # of a picture; more is refused before it is decoded (240 MB as RGB)
BACKGROUND = (255, 255, 255)      # transparent pictures lie on white, as on a page
_ORIENTATION = 0x0112


def read(path: str | os.PathLike, pixels_max: int = PIXELS_MAX) -> np.ndarray:
  """Reads a picture file: u8[H, W, 3], RGB, upright.

  Grey, palette, CMYK and 16-bit pictures are converted, transparency is laid on white, of an animation the first
  picture is taken.

  Raises:
    DataError: a file that is missing, no picture, cut off, of an unknown depth, or of more than `pixels_max` pixels.
  """
  from PIL import Image
  path = os.fspath(path)
  if not os.path.isfile(path):
    raise DataError(f'{path}: {"a folder, not a picture" if os.path.isdir(path) else "no such file"}')
  try:
    with warnings.catch_warnings(action='error', category=Image.DecompressionBombWarning), Image.open(path) as image:
      width, height = image.size
      if width * height <= pixels_max:
        return _upright(_rgb(image, path), _orientation(image, path))
  except DataError:
    raise
  except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
    raise DataError(f'{path}: {e}; at most {pixels_max} pixels are read; make the picture smaller') from None
  except Exception as e:    # Pillow's parsers raise whatever a broken file leads them to
    raise DataError(f'{path}: not a readable picture ({type(e).__name__}: {e})') from e
  raise DataError(f'{path}: {width}x{height} px are too large; at most {pixels_max} pixels are read; '
                  'make the picture smaller')


def _rgb(image, path):
  from PIL import Image
  if image.mode.startswith('I;16') or image.mode == 'I':    # Pillow would clip 16 bits to 8
    deep = np.asarray(image).astype(np.int64)
    if deep.min() < 0 or deep.max() > 0xFFFF:
      raise DataError(f'{path}: grey values {deep.min()}..{deep.max()}; 8 or 16 bits without sign are read')
    return np.repeat((deep * 255 + 0x7FFF) // 0xFFFF, 3).reshape(*deep.shape, 3).astype(np.uint8)
  if image.mode == 'F':
    raise DataError(f'{path}: a picture of floating-point numbers; save it with 8 or 16 bits')
  if 'A' in image.mode or 'a' in image.mode or 'transparency' in image.info:
    image = image.convert('RGBA')
    image = Image.alpha_composite(Image.new('RGBA', image.size, (*BACKGROUND, 255)), image)
  return np.array(image.convert('RGB'))


def _orientation(image, path):
  """EXIF's number 1..8; 1 where there is none, or none that can be read."""
  try:
    found = image.getexif().get(_ORIENTATION, 1)
  except Exception as e:    # a broken block beside good pixels
    logging.warning('%s: unreadable EXIF block (%s); taken as upright', path, e)
    return 1
  return found if found in range(1, 9) else 1


def _upright(pixels, orientation):
  """Undoes EXIF orientation: u8[H, W, 3] -> u8[H, W, 3] or u8[W, H, 3]."""
  if orientation >= 5:
    pixels = pixels.swapaxes(0, 1)
  if orientation in (2, 3, 6, 7):
    pixels = pixels[:, ::-1]
  if orientation in (3, 4, 7, 8):
    pixels = pixels[::-1]
  return np.ascontiguousarray(pixels)


class Inputs(NamedTuple):
  """What a user named: kind is 'pictures', 'film' or 'camera'."""
  kind: str
  names: tuple[str, ...]    # files, or the camera's number


def list_inputs(path: str) -> Inputs:
  """Tells what `path` is: a picture, a folder of pictures (sorted, with its subfolders), a film, or a camera's number.

  In a folder only files with a known suffix count, hidden ones don't. A single file is a picture if its suffix says so,
  else a film. Raises DataError where nothing is found.
  """
  if path.isdecimal() and not os.path.exists(path):
    return Inputs('camera', (path,))
  if os.path.isdir(path):
    names = [p for p in folders.files(path) if p.lower().endswith(SUFFIXES) and not os.path.basename(p).startswith('.')]
    if not names:
      raise DataError(f'{path}: no picture in this folder; known suffixes are {" ".join(SUFFIXES)}')
    return Inputs('pictures', tuple(names))
  if not os.path.isfile(path):
    raise DataError(f'{path}: no such file or folder; name a picture, a folder, a film or the number of a camera')
  return Inputs('pictures' if path.lower().endswith(SUFFIXES) else 'film', (path,))


@contextlib.contextmanager
def whole(path: str | os.PathLike) -> Iterator[str]:
  """Gives a new, randomly named file beside `path` to write; it gets that name once written, or else vanishes."""
  folder, name = os.path.split(os.path.abspath(path))
  os.makedirs(folder, exist_ok=True)
  stem, suffix = os.path.splitext(name)
  part = os.path.join(folder, f'.{stem}.{secrets.token_hex(6)}{suffix}')
  os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
  try:
    yield part
    os.replace(part, path)
  finally:
    with contextlib.suppress(FileNotFoundError):
      os.unlink(part)


def write(path: str | os.PathLike, image: np.ndarray, quality: int = 92) -> None:
  """Writes u8[H, W, 3] RGB as .png, .jpg or .jpeg; nothing half-written stays under the name."""
  from PIL import Image
  check(image)
  path = os.fspath(path)
  formats = {'.png': 'PNG', '.jpg': 'JPEG', '.jpeg': 'JPEG'}
  suffix = os.path.splitext(path)[1].lower()
  if suffix not in formats:
    raise DataError(f'{path}: pictures are written as {", ".join(formats)}')
  with whole(path) as part:
    Image.fromarray(image).save(part, formats[suffix], **({'quality': quality} if suffix != '.png' else {}))


def check(image: np.ndarray) -> None:
  """Raises ValueError unless image is u8[H, W, 3] with at least one pixel."""
  if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
    raise ValueError(f'a picture is uint8 [H, W, 3], got {image.dtype} {list(image.shape)}')


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
  """u8[H, W, 3] -> u8[height, width, 3], averaging when it shrinks and interpolating when it grows."""
  cv2 = opencv()
  shrinks = height * width < image.shape[0] * image.shape[1]
  return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


@functools.cache
def opencv():
  """OpenCV on the calling thread alone, for the input pipeline has a thread a core already; it prints nothing."""
  os.environ.setdefault('OPENCV_IO_MAX_IMAGE_PIXELS', str(PIXELS_MAX))      # read once, at its import
  import cv2
  cv2.setNumThreads(1)
  cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)         # what it would print, our message says
  return cv2


def decode(data: bytes) -> np.ndarray:
  """An RGB JPEG -> u8[H, W, 3], the pixels that Pillow and TensorFlow's accurate transform give, in less time.

  Raises ValueError where it is cut off, broken, too large or no picture.
  """
  cv2 = opencv()
  return _decoded(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION, 'picture', b'\xff\xd8\xff')


def decode_mask(data: bytes) -> np.ndarray:
  """A PNG of one channel -> u8[H, W, 1], 0 or 255 where it has one bit. Raises ValueError as `decode` does."""
  return _decoded(data, opencv().IMREAD_GRAYSCALE, 'mask', b'\x89PNG\r\n\x1a\n')[..., None]


def _decoded(data, flags, name, magic):
  cv2 = opencv()
  with contextlib.suppress(cv2.error):        # too large
    # it would try every format that it knows
    found = data.startswith(magic) and cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if isinstance(found, np.ndarray):
      return found
  raise ValueError(f'the {name} is cut off, broken, too large or of another format ({len(data)} bytes)')


class Kept:
  """Decoded arrays by number, as many as fit into so many bytes; threads share them, and nobody writes into them."""

  def __init__(self, limit: int):
    self.left, self.found, self.lock = limit, {}, threading.Lock()

  def get(self, number: int, make: Callable[[], tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """The arrays of this number, made where they are not kept yet."""
    found = self.found.get(number)
    if found is None:
      found = make()
      size = sum(x.nbytes for x in found)
      with self.lock:
        if size <= self.left and number not in self.found:
          self.left -= size
          self.found[number] = found
    return found


def moved(image: np.ndarray, matrix: np.ndarray, size: int, fill: int) -> np.ndarray:
  """Looks up every pixel of a square in a picture, once, and softens before what shrinking would alias.

  An antialiased lookup weighs a pixel's neighbours by a triangle as wide as the pixels that fall into one, of
  variance g^2 / 6 where g of them do. Bilinear lookup alone has 1 / 6; a box over the picture, as wide as it takes,
  adds the rest. Where g is 4 or more, the picture is shrunk by a whole number before.

  Args:
    image: u8[H, W, 3].
    matrix: f64[2, 3], (x, y, 1) of the square -> pixels of `image`; a turn times a growth g, with or without a mirror.
    size: side of the square in pixels.
    fill: value outside the picture.

  Returns:
    u8[size, size, 3].
  """
  cv2 = opencv()
  (height, width), matrix = image.shape[:2], np.array(matrix)
  growth = np.linalg.norm(matrix[:, :2], axis=1)        # along x and along y of `image`
  variance = (growth**2 - 1) / 6
  if growth.min() >= 4:
    times = int(growth.min() / 2)
    new = np.array([max(width // times, 1), max(height // times, 1)])
    shrunk = np.array([width, height]) / new
    image = cv2.resize(image, new, interpolation=cv2.INTER_AREA)
    matrix = (matrix + [[0, 0, 0.5]] * 2) / shrunk[:, None] - [[0, 0, 0.5]] * 2
    variance = variance / shrunk**2 - (1 - 1 / shrunk**2) / 4     # less that of the area, and of a wider lookup
  if variance.max() > 0:
    image = cv2.sepFilter2D(image, -1, *map(_box, variance), borderType=cv2.BORDER_REPLICATE)
  return cv2.warpAffine(image, matrix, (size, size), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
                        borderMode=cv2.BORDER_CONSTANT, borderValue=(fill,) * 3)


def _box(variance: float) -> np.ndarray:
  """Taps f32[odd] of a box with so much variance in square pixels, its ends a share of a pixel; 0: one tap."""
  m = int(math.sqrt(3 * max(variance, 0) + 0.25) - 0.5)           # a box of 2m + 1 has m (m + 1) / 3
  n = 2 * m + 1
  end = n * (max(variance, 0) - m * (m + 1) / 3) / (2 * ((m + 1)**2 - max(variance, 0)))
  return np.array([end, *[1] * n, end], np.float32) / np.float32(n + 2 * end)


def sampled(mask: np.ndarray, matrix: np.ndarray, size: int) -> np.ndarray:
  """The nearest pixel of a mask u8[H, W, 1] at every pixel of a square, u8[size, size], or 0; `matrix` as in moved."""
  cv2 = opencv()
  return cv2.warpAffine(mask, matrix, (size, size), flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP)


def mean(image: np.ndarray) -> np.ndarray:
  """The mean of each channel of [H, W, 3], of every 16th pixel."""
  return np.array(opencv().mean(image[::4, ::4])[:3])


def mixed(image: np.ndarray, matrix: np.ndarray) -> np.ndarray:
  """Channels [H, W, 3] times matrix [3, 4], whose last column is added; type as before, u8 rounded and clipped."""
  return opencv().transform(image, matrix)


class Stroke(NamedTuple):
  """A line from start to end, or a dot where both are equal: (x, y) in px, width in px."""
  start: tuple[float, float]
  end: tuple[float, float]
  colour: tuple[int, int, int]
  width: float


def draw(image: np.ndarray, strokes: Sequence[Stroke]) -> np.ndarray:
  """A copy of u8[H, W, 3] with round-ended, smooth strokes in the order given; what lies outside is cut off."""
  cv2 = opencv()
  out, fine = image.copy(), 4                                 # 4 bits of a pixel's fraction
  limit = 4 * max(image.shape)
  for s in strokes:
    a, b = ([int(round(min(max(v, -limit), limit) * 2**fine)) for v in p] for p in (s.start, s.end))
    if a != b:
      cv2.line(out, a, b, s.colour, max(int(round(s.width)), 1), cv2.LINE_AA, fine)
    else:
      cv2.circle(out, a, int(round(s.width / 2 * 2**fine)), s.colour, cv2.FILLED, cv2.LINE_AA, fine)
  return out


def label(image: np.ndarray, text: str, at: tuple[float, float], height: float,
          colour: tuple[int, int, int] = (255, 255, 255)) -> None:
  """Writes text, dark-edged, into image, its lower left corner at (x, y); moved inside where it would stick out.

  The height is that of a line, in px. OpenCV's fonts differ between its versions, so Pillow writes.
  """
  from PIL import Image, ImageDraw
  edge = max(round(height / 10), 1)
  font = _font(max(round(height), 6))
  left, top, right, bottom = font.getbbox(text, stroke_width=edge)
  x = max(min(round(at[0]), image.shape[1] - (right - left)), 0)
  y = max(min(round(at[1]) - (bottom - top), image.shape[0] - (bottom - top)), 0)
  patch = image[y:y + bottom - top, x:x + right - left]
  paper = Image.fromarray(patch)
  ImageDraw.Draw(paper).text((-left, -top), text, colour, font, stroke_width=edge, stroke_fill=(20, 20, 20))
  patch[...] = np.asarray(paper)


@functools.lru_cache(16)
def _font(height):
  from PIL import ImageFont
  return ImageFont.load_default(height)
