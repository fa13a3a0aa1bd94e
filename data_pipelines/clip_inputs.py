"""What a user wants forecast: arrays and films as batches of one grey, square clip."""

import itertools
import os
from typing import Any, Callable, Iterator

import numpy as np

from data_pipelines import DataError, clips as arrays, films, folders, images

FILMS = (*films.CODECS, '.mkv', '.webm', '.mpg', '.mpeg')      # looked for in a folder
ARRAYS = ('.npy', '.npz')                                      # .npz to be told what to do with it
LAYOUTS = ('TNHW', 'NTHW')                                     # in an array's name: digits.TNHW.npy


def clips(source: str, output: str, stop: Callable[[], bool], size: int, past: int,
          future: int) -> Iterator[dict[str, Any] | DataError]:
  """Batches of one clip each; a clip or file that can't be used comes as the DataError that says why.

  Args:
    source: a .npy file (see `clips.array`), a film, the number of a camera, or a folder of films and .npy files, with
      its subfolders, in sorted order.
    output: folder in which the results are drawn.
    stop: asked before each clip.
    size: px, side of a frame; other sizes are cropped and resized.
    past: frames that a clip must have.
    future: frames behind them that it may have; what follows is not looked at.

  Yields:
    video u8[1, past + future, size, size], a shorter clip filled up with its last frame; known i32[1], how many frames
    are its own; mask f32[1]; and for the host: name [str] ('carphone#3' is clip 3 of carphone.npy), and write(picture),
    which puts u8[H, W, 3] at output/NAME.png and u8[T, H, W, 3] at output/NAME.gif.

  Raises:
    DataError: nothing is there.
  """
  for path, name in _listed(source):
    for label, video in _opened(path, name, size, past + future):
      if stop():
        return
      if not isinstance(video, DataError) and len(video) < past:
        video = DataError(f'{path}: {label} has {len(video)} frames, config.video.past = {past} are needed')
      if isinstance(video, DataError):
        yield video
        continue
      known = len(video)
      video = np.concatenate([video, np.repeat(video[-1:], past + future - known, 0)])
      yield {'video': video[None], 'known': np.array([known], np.int32), 'mask': np.ones(1, np.float32),
             'name': [label], 'write': _writer(os.path.join(output, label))}


def _listed(source: str) -> list[tuple[str, str]]:
  """The files of a source and the names of their clips: the file's own, with its suffix where two would be the same."""
  if source.isdecimal() and not os.path.exists(source):
    return [(source, f'camera{source}')]
  if not os.path.isdir(source):
    if not os.path.isfile(source):
      raise DataError(f'{source}: no such file or folder; name a .npy array, a film, or a folder of them')
    return [(source, os.path.splitext(os.path.basename(source))[0])]
  found = [os.path.relpath(path, source) for path in folders.files(source)
           if path.lower().endswith(ARRAYS + FILMS) and not os.path.basename(path).startswith('.')]
  if not found:
    raise DataError(f'{source}: no array and no film in this folder; known suffixes are {" ".join((*ARRAYS, *FILMS))}')
  stems = [os.path.splitext(name)[0] for name in found]
  return [(os.path.join(source, name), stem if stems.count(stem) == 1 else name) for name, stem in zip(found, stems)]


def _opened(path, name, size, frames):
  """`open_video`, whose errors are items."""
  try:
    yield from open_video(path, size, frames, name)
  except DataError as e:
    yield name, e


def open_video(path: str, size: int, frames: int, name: str = '') -> Iterator[tuple[str, np.ndarray | DataError]]:
  """The clips of a .npy array or a film: names and u8[T, size, size], T at most `frames`.

  Frames of another size are cropped to the square in their middle and resized by the mean over areas; colours become
  grey as ITU-R BT.601 weighs them. Of an array [T, N, H, W] or [N, T, H, W] the axis of `frames` entries is the time,
  if the other one has fewer; a file that is called something.TNHW.npy or .NTHW.npy says it itself.

  Args:
    name: of the clips; the file's own without its suffix. Of an array with several they are NAME#0, NAME#1, ...

  Yields:
    a DataError instead of the frames, where some of a clip's values are wrong; the other clips follow.

  Raises:
    DataError: a file that can't be read, or an array of which either axis may be the time.
  """
  name = name or os.path.splitext(os.path.basename(path))[0]
  if not path.lower().endswith(ARRAYS):
    with films.opened(path) as film:
      found = [_square(grey(f), size) for f in itertools.islice(film.frames, frames)]
    yield name, np.stack(found)
    return
  view = _clips(path, frames)
  for i in range(len(view)):
    try:
      video = np.stack([_square(f, size) for f in arrays.clip(path, view, i, 0, frames)])
    except DataError as e:
      video = e
    yield (f'{name}#{i}' if len(view) > 1 else name), video


def _clips(path: str, frames: int) -> np.ndarray:
  """The view [N, T, H, W] of an array. Where either of its axes may be the time neither is taken: one is nonsense."""
  stem, suffix = os.path.splitext(os.path.basename(path))
  stated = stem.rpartition('.')[2] in LAYOUTS
  view = arrays.array(path, stem.rpartition('.')[2] if stated else 'NTHW')
  first, second = view.shape[:2]
  if stated or first == 1 or second == frames > first:
    return view
  if first == frames > second:
    return view.swapaxes(0, 1)
  raise DataError(f'{path}: an array {list(view.shape)} may be [T, N, H, W] or [N, T, H, W]; it tells by itself only '
                  f'where one of the first two axes is {frames}, the frames of a clip, and the other is less. Call it '
                  f'{stem}.TNHW{suffix} or {stem}.NTHW{suffix}, or save each clip as an array [T, H, W]')


def grey(frame: np.ndarray) -> np.ndarray:
  """u8[H, W, 3] RGB -> u8[H, W]: luma of ITU-R BT.601 in OpenCV's whole numbers."""
  weighed = frame.astype(np.uint32) @ np.array([9798, 19235, 3735], np.uint32)
  return (weighed + (1 << 14) >> 15).astype(np.uint8)


def _square(frame: np.ndarray, size: int) -> np.ndarray:
  """u8[H, W] -> u8[size, size]."""
  height, width = frame.shape
  side = min(height, width)
  top, left = (height - side) // 2, (width - side) // 2
  frame = frame[top:top + side, left:left + side]
  return frame if side == size else images.resize(np.ascontiguousarray(frame), size, size)


def _writer(path: str) -> Callable[[np.ndarray], None]:
  def write(picture):
    if picture.ndim == 3:
      images.write(f'{path}.png', picture)
    else:
      for frame in picture:
        images.check(frame)
      with images.whole(f'{path}.gif') as part, open(part, 'wb') as f:
        f.write(films.gif(picture))
  return write
