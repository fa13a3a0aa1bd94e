"""Pictures of grids, their codes and their reconstructions, u8 RGB, as a function of the numbers alone."""

import colorsys
import math
from typing import Sequence

import numpy as np

from lab.systems.dvae.canvas import PAD

# ARC's ten colours
COLOURS = ((0x00, 0x00, 0x00), (0x00, 0x74, 0xD9), (0xFF, 0x41, 0x36), (0x2E, 0xCC, 0x40), (0xFF, 0xDC, 0x00),
           (0xAA, 0xAA, 0xAA), (0xF0, 0x12, 0xBE), (0xFF, 0x85, 0x1B), (0x7F, 0xDB, 0xFF), (0x87, 0x0C, 0x25))
MID, HATCH = (128, 128, 128), (208, 208, 208)
LINE, OUTSIDE = (64, 64, 64), (240, 240, 240)
WHITE, RED = (255, 255, 255), (255, 0, 0)
LINED_PX = 4                              # smaller cells have no lines between them
GAP_PX = 6
LONGEST_PX = 1200                         # no side of a panel or strip is longer
_PALETTE = np.array(COLOURS + (MID,) * (PAD + 1 - len(COLOURS)), np.uint8)


def grid(cells: np.ndarray, size_px: int) -> np.ndarray:
  """A grid u8[h, w] in the middle of a neutral square: u8[size_px, size_px, 3].

  Tokens that are no colour are mid grey, and hatched unless they are outside of the grid: PAD, or anything above it.
  ValueError unless size_px > h and w.
  """
  return _draw_grid(cells, size_px, np.zeros(cells.shape, bool))


def _draw_grid(cells, size_px, wrong):
  cells = np.minimum(cells, PAD)
  hatched = (cells >= len(COLOURS)) & (cells != PAD)
  return _draw(_PALETTE[cells], size_px, hatched, wrong)


def codes(code: np.ndarray, count: int, size_px: int, columns: int = 0) -> np.ndarray:
  """A code i32[N] as a map of tiles, row by row: u8[size_px, size_px, 3]; tiles left over are empty.

  columns: of the map; 0: as many as make it nearly square.

  Each of `count` codes has a colour of its own, neighbours in number far apart in hue: equal codes look equal, while of
  hundreds some look alike. ValueError for codes outside 0..count-1 or a size_px too small for the tiles.
  """
  code = np.asarray(code)
  columns = columns or max(1, math.ceil(math.sqrt(len(code))))
  rows = max(1, math.ceil(len(code) / columns))
  tiles = np.full((rows * columns, 3), OUTSIDE, np.uint8)
  for i, number in enumerate(code.tolist()):
    tiles[i] = _code_colour(number, count)
  none = np.zeros((rows, columns), bool)
  return _draw(tiles.reshape(rows, columns, 3), size_px, none, none)


def _code_colour(number, count):
  """One of `count` hues; a stride near the golden section, without a common divisor, takes each of them once."""
  if not 0 <= number < count:
    raise ValueError(f'code {number} is not one of {count} codes, 0..{count - 1}')
  stride = max(1, round(count * (math.sqrt(5) - 1) / 2))
  while math.gcd(stride, count) > 1:
    stride += 1
  hue = number * stride % count
  saturation, value = ((0.9, 0.95), (0.55, 1.0), (0.95, 0.6))[hue % 3]    # the next hue has another shade
  return [round(255 * c) for c in colorsys.hsv_to_rgb(hue / count, saturation, value)]


def panel(truth: np.ndarray, code: np.ndarray | None, rebuilt: np.ndarray, count: int = 0,
          height_px: int = 240, columns: int = 0) -> np.ndarray:
  """A grid, the map of its code and what became of it, side by side: u8[H, W, 3].

  Args:
    truth: u8[h, w]; rebuilt: u8[h', w'], cut to the grid or the whole canvas. Both are drawn at one scale, on the
      smallest rectangle from the top left that holds all their tokens but PAD.
    code: i32[N], or None where the model has no quantizer: then there is no map.
    count: C, size of the codebook; only read where there is a code.
    height_px: H, made smaller where W would pass 1,200 px.
    columns: of the map of codes; 0: as many as make it nearly square.

  Cells of the reconstruction that differ from the truth have a white and a red outline. ValueError as in `grid` and
  `codes`.
  """
  height_px = min(height_px, (LONGEST_PX - 2 * GAP_PX) // 3)
  truth, rebuilt = _same_frame([truth, rebuilt])
  parts = [grid(truth, height_px), _draw_grid(rebuilt, height_px, truth != rebuilt)]
  if code is not None:
    parts.insert(1, codes(code, count, height_px, columns))
  return _mosaic(parts, len(parts))


def strip(grids: Sequence[np.ndarray], size_px: int = 120) -> np.ndarray:
  """Grids u8[h, w], at least one, in the order of reading and at one scale, such as the steps of an interpolation.

  A grid is drawn at most size_px wide; many are drawn smaller, in rows, so that no side of u8[H, W, 3] passes 1,200 px.
  ValueError for more than fit: see `most`.
  """
  frames = _same_frame(grids)
  for size in range(min(size_px, LONGEST_PX), max(frames[0].shape), -1):
    columns = min(len(grids), (LONGEST_PX + GAP_PX) // (size + GAP_PX))
    rows = -(-len(grids) // columns)
    if rows * (size + GAP_PX) - GAP_PX <= LONGEST_PX:
      return _mosaic([grid(frame, size) for frame in frames], columns)
  raise ValueError(f'{len(grids)} grids do not fit into {LONGEST_PX} x {LONGEST_PX} px')


def most(side: int) -> int:
  """How many grids of side x side cells a strip has room for, a pixel a cell."""
  return ((LONGEST_PX + GAP_PX) // (side + 1 + GAP_PX)) ** 2


def _same_frame(grids) -> list[np.ndarray]:
  """Grids of one shape: without the PAD that all have at the right and below, with PAD where one is smaller."""
  height, width = 1, 1
  for cells in grids:
    ys, xs = np.nonzero(cells < PAD)
    height, width = max([height, *(ys + 1)]), max([width, *(xs + 1)])
  out = []
  for cells in grids:
    frame = np.full((height, width), PAD, np.uint8)
    part = np.minimum(cells[:height, :width], PAD)
    frame[:part.shape[0], :part.shape[1]] = part
    out.append(frame)
  return out


def _mosaic(parts, columns) -> np.ndarray:
  """Squares u8[S, S, 3] in rows of `columns`, with gaps between them."""
  side, rows = len(parts[0]) + GAP_PX, -(-len(parts) // columns)
  out = np.full((rows * side - GAP_PX, columns * side - GAP_PX, 3), OUTSIDE, np.uint8)
  for i, part in enumerate(parts):
    y, x = divmod(i, columns)
    out[y * side:y * side + len(part), x * side:x * side + len(part)] = part
  return out


def _draw(tiles, size_px, hatched, wrong) -> np.ndarray:
  """Tiles u8[h, w, 3] as large as a square of size_px allows, in its middle, those hatched or wrong being marked."""
  h, w = tiles.shape[:2]
  out = np.full((size_px, size_px, 3), OUTSIDE, np.uint8)
  if not tiles.size:
    return out
  side = (size_px - 1) // max(h, w)
  if side < 1:
    raise ValueError(f'{h} x {w} cells do not fit into {size_px} px; give at least {max(h, w) + 1}')
  (row, y_edge), (column, x_edge) = _pixels(h, side), _pixels(w, side)
  edge = np.minimum(y_edge[:, None], x_edge[None])                       # px to the edge of the own tile; 0 = line
  at = np.ix_(row, column)
  image = tiles[at]
  stripe = (np.arange(len(row))[:, None] + np.arange(len(column))[None]) // 3 % 2 == 0
  image[hatched[at] & stripe] = HATCH
  width = max(1, side // 16)
  # white keeps the red apart from a cell that is red itself; a small cell has no room for both
  both = side >= 6
  image[wrong[at] & (edge <= width * (1 + both))] = RED
  if both:
    image[wrong[at] & (edge <= width)] = WHITE
  image[edge == 0] = LINE
  top, left = (size_px - len(row)) // 2, (size_px - len(column)) // 2
  out[top:top + len(row), left:left + len(column)] = image
  return out


def _pixels(tiles, side):
  """For each pixel along one axis, its tile and its distance to the edge of it; lines are at 0."""
  lined = side >= LINED_PX
  at = np.arange(tiles * side + lined)
  offset = at % side
  edge = np.minimum(offset, side - offset) if lined else np.minimum(offset + 1, side - offset)
  return np.minimum(at // side, tiles - 1), edge
