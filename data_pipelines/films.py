"""Films and cameras: frames in, frames out. OpenCV's BGR order stays in this file."""

import contextlib
import logging
import os
import struct
from typing import Callable, Iterator, NamedTuple

import numpy as np

from data_pipelines import DataError, images

CODECS = {'.mp4': 'mp4v', '.m4v': 'mp4v', '.mov': 'mp4v', '.avi': 'MJPG'}
_CAMERA_FPS = 30.0    # where a camera doesn't say


class Film(NamedTuple):
  """An open film or camera."""
  fps: float
  size: tuple[int, int]              # (height, width) px
  frames: Iterator[np.ndarray]       # u8[H, W, 3], RGB; read once


@contextlib.contextmanager
def opened(name: str) -> Iterator[Film]:
  """Opens a film file, or the camera whose number `name` is, and closes it afterwards.

  Raises DataError for what can't be opened, has no frame or doesn't tell its frame rate. Rotation noted in a file is
  applied. A film that ends before its announced length gives the frames there are, with a warning.
  """
  cv2 = images.opencv()
  camera = name.isdecimal() and not os.path.exists(name)
  if not camera and not os.path.isfile(name):
    raise DataError(f'{name}: no such film')
  capture = cv2.VideoCapture(int(name)) if camera else cv2.VideoCapture(name)
  try:
    there, first = capture.read() if capture.isOpened() else (False, None)
    if not there:
      raise DataError(f'there is no camera {name}, or another program holds it; cameras are numbered from 0' if camera
                      else f'{name}: no frame could be read; not a film, broken, or of an unknown codec')
    fps = capture.get(cv2.CAP_PROP_FPS)
    if not 0 < fps < 1000:
      if not camera:
        raise DataError(f'{name}: its frame rate reads {fps}; write the film again with a rate')
      fps = _CAMERA_FPS
    promised = 0 if camera else int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    yield Film(fps, first.shape[:2], _frames(capture, first, promised, name))
  finally:
    capture.release()


def _frames(capture, frame, promised, name):
  cv2 = images.opencv()
  count, there = 0, True
  while there:
    count += 1
    yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    there, frame = capture.read()
  if count < promised:
    logging.warning('%s: %d frames, though its header promises %d', name, count, promised)


@contextlib.contextmanager
def writer(path: str, fps: float, size: tuple[int, int]) -> Iterator[Callable[[np.ndarray], None]]:
  """Gives write(frame), frame u8[H, W, 3] RGB of that size; the film gets its name once it is whole.

  The suffix chooses the codec: .mp4 .m4v .mov MPEG-4, .avi Motion JPEG. There is no silent replacement. These codecs
  store even sides only: an odd side is one px longer in the film, its last line repeated.

  Raises:
    DataError: another suffix, a codec this OpenCV can't write, or no frame written.
    ValueError: a frame of another size.
  """
  cv2 = images.opencv()
  path = os.fspath(path)
  suffix = os.path.splitext(path)[1].lower()
  if suffix not in CODECS:
    raise DataError(f'{path}: films are written as {", ".join(CODECS)}')
  height, width = size
  written = 0

  def write(frame):
    nonlocal written
    images.check(frame)
    if frame.shape[:2] != (height, width):
      raise ValueError(f'{path}: frames are {height}x{width}, got {frame.shape[0]}x{frame.shape[1]}')
    bgr = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
    out.write(np.pad(bgr, ((0, height % 2), (0, width % 2), (0, 0)), 'edge') if height % 2 or width % 2 else bgr)
    written += 1

  with images.whole(path) as part:
    out = cv2.VideoWriter(part, cv2.VideoWriter_fourcc(*CODECS[suffix]), fps,
                          (width + width % 2, height + height % 2))
    try:
      if not out.isOpened():
        raise DataError(f'{path}: this OpenCV can\'t write {width}x{height} px as {CODECS[suffix]}; '
                        f'try another of {", ".join(CODECS)}')
      yield write
    finally:
      out.release()
    if not written:
      raise DataError(f'{path}: no frame was written')


def gif(film: np.ndarray) -> bytes:
  """A film u8[T, H, W, 3] as a GIF of T frames, 8 a second, that plays for ever.

  Frame by frame, each with a palette of its own: Pillow's writer of films drops a frame that equals the one before.
  """
  from PIL import GifImagePlugin, Image
  size = struct.pack('<HH', film.shape[2], film.shape[1])
  parts = [b'GIF89a', size, b'\0\0\0', b'!\xff\x0bNETSCAPE2.0\x03\x01\0\0\0']     # no palette for all; no last round
  for i, frame in enumerate(film):
    parts += GifImagePlugin.getdata(      # a GIF counts in 10 ms: 120 and 130 in turn are 125 on average
        Image.fromarray(frame).quantize(), duration=120 + 10 * (i % 2), disposal=2, include_color_table=True)
  return b''.join([*parts, b';'])
