"""What a user wants predicted: photographs, folders, films and cameras as batches of one square picture."""

import itertools
import os
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from data_pipelines import DataError, films, images, warp


def pictures(source: str, output: str, stop: Callable[[], bool], size: int) -> Iterator[dict[str, Any] | DataError]:
  """Batches of one picture or frame each; a picture that can't be read comes as the DataError that says why.

  Args:
    source: a picture, a folder, a film, or the number of a camera.
    output: folder in which the results are drawn; where it lies inside `source`, what is there is no input.
    stop: asked before each frame; a camera has no other end.
    size: px, side of the square.

  Yields:
    image u8[1, size, size, 3], mask f32[1], matrix f32[1, 2, 3] (square to original pixels), size i32[1, 2] (original
    height, width), image_id i32[1]; and for the host: name [str], picture [u8[H, W, 3]], and write(picture), which
    puts a drawn picture where it belongs: output/NAME.png, or the next frame of output/NAME.mp4.

  Raises:
    DataError: nothing is there, or the film or camera can't be read, or the drawn film would take the film's own place.
  """
  found = images.list_inputs(source)
  if found.kind == 'pictures':
    within = os.path.realpath(output) != os.path.realpath(source) and _inside(output, source)
    paths = [p for p in found.names if not (within and _inside(p, output))]
    for path, number in zip(paths, _numbers(paths)):
      if stop():
        return
      name = os.path.relpath(path, source) if os.path.isdir(source) else os.path.basename(path)
      try:
        picture = images.read(path)
      except DataError as e:
        yield e
        continue
      yield _batch(picture, size, number, name, _still(os.path.join(output, f'{name}.png')))
    return
  name = f'camera{source}' if found.kind == 'camera' else os.path.basename(source)
  drawn = os.path.join(output, f'{os.path.splitext(name)[0]}.mp4')
  if os.path.exists(drawn) and os.path.exists(source) and os.path.samefile(drawn, source):
    raise DataError(f'{source}: the drawn film would take its place; choose another --output')
  with films.opened(source) as film, films.writer(drawn, film.fps, film.size) as write:
    for i, frame in enumerate(film.frames):
      yield _batch(frame, size, i, f'{name}#{i}', write)
      if stop():
        return


def _still(path):
  def write(picture):
    images.write(path, picture)
  return write


def _inside(path: str, folder: str) -> bool:
  folder = os.path.realpath(folder)
  return os.path.commonpath([os.path.realpath(path), folder]) == folder


def _numbers(paths: Sequence[str]) -> list[int]:
  """COCO names its files by image id; other names, and a number's second file, get numbers that are free."""
  stems = [os.path.splitext(os.path.basename(p))[0] for p in paths]
  own = [int(s) if s.isdecimal() and int(s) < 1 << 31 else -1 for s in stems]
  taken, out = {-1, *own}, []
  free, used = (n for n in itertools.count() if n not in taken), {-1}
  for number in own:
    out.append(next(free) if number in used else number)
    used.add(number)
  return out


def _batch(picture, size, number, name, write):
  square, matrix = warp.letterbox(picture, size)
  return {'image': square[None], 'mask': np.ones(1, np.float32), 'matrix': matrix[None],
          'size': np.array([picture.shape[:2]], np.int32), 'image_id': np.array([number], np.int32),
          'name': [name], 'picture': [picture], 'write': write}
