"""What a user wants predicted: photographs, folders, films and cameras as batches of one square picture."""

import os
from typing import Any, Callable, Iterator

import numpy as np

from data_pipelines import DataError, films, images, warp


def pictures(source: str, output: str, stop: Callable[[], bool], size: int) -> Iterator[dict[str, Any] | DataError]:
  """Batches of one picture or frame each; a picture that can't be read comes as the DataError that says why.

  Args:
    source: a picture, a folder, a film, or the number of a camera.
    output: folder in which the results are drawn.
    stop: asked before each frame; a camera has no other end.
    size: px, side of the square.

  Yields:
    image u8[1, size, size, 3], mask f32[1], matrix f32[1, 2, 3] (square to original pixels), size i32[1, 2] (original
    height, width), image_id i32[1]; and for the host: name [str], picture [u8[H, W, 3]], and write(picture), which
    puts a drawn picture where it belongs: output/NAME.png, or the next frame of output/NAME.mp4.
  """
  found = images.list_inputs(source)
  if found.kind == 'pictures':
    for i, path in enumerate(found.names):
      if stop():
        return
      name = os.path.relpath(path, source) if os.path.isdir(source) else os.path.basename(path)
      try:
        picture = images.read(path)
      except DataError as e:
        yield e
        continue
      yield _batch(picture, size, _number(path, i), name, _still(os.path.join(output, f'{name}.png')))
    return
  name = f'camera{source}' if found.kind == 'camera' else os.path.basename(source)
  with films.opened(source) as film, films.writer(os.path.join(output, f'{os.path.splitext(name)[0]}.mp4'), film.fps,
                                                 film.size) as write:
    for i, frame in enumerate(film.frames):
      yield _batch(frame, size, i, f'{name}#{i}', write)
      if stop():
        return


def _still(path):
  def write(picture):
    images.write(path, picture)
  return write


def _number(path: str, otherwise: int) -> int:
  """COCO names its files by image id; other names get their place."""
  stem = os.path.splitext(os.path.basename(path))[0]
  return int(stem) if stem.isdigit() and int(stem) < 1 << 31 else otherwise


def _batch(picture, size, number, name, write):
  square, matrix = warp.letterbox(picture, size)
  return {'image': square[None], 'mask': np.ones(1, np.float32), 'matrix': matrix[None],
          'size': np.array([picture.shape[:2]], np.int32), 'image_id': np.array([number], np.int32),
          'name': [name], 'picture': [picture], 'write': write}
