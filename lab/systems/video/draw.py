"""Pictures of what was seen, rebuilt and forecast: a strip to look at frame by frame, and a film."""

import numpy as np

GAP_PX = 2
SIDE_PX = 64                   # frames are drawn at least so large
PAPER = 255
SEEN, FORECAST = (0, 114, 178), (213, 94, 0)      # blue and vermilion of Okabe and Ito (2008)


def strip(past: np.ndarray, recon: np.ndarray | None, future: np.ndarray | None, pred: np.ndarray | None) -> np.ndarray:
  """u8[H, W, 3]: a row each of frames u8[T, S, S], in the order of time; what is None has no row.

  From the top: the input (blue mark) and its reconstruction; the truth (vermilion mark), the forecast, and the absolute
  error of the forecast.
  """
  rows = [(past, SEEN), (recon, SEEN), (future, FORECAST), (pred, FORECAST)]
  if future is not None and pred is not None:
    rows.append((error(pred, future), FORECAST))
  rows = [(frames, colour) for frames, colour in rows if frames is not None]
  columns = max(len(frames) for frames, _ in rows)
  return np.concatenate([_row(frames, colour, columns) for frames, colour in rows])


def film(past: np.ndarray, recon: np.ndarray | None, future: np.ndarray | None, pred: np.ndarray | None) -> np.ndarray:
  """u8[T, H, W, 3]: the truth, what the network makes of it, and the absolute error, side by side.

  While the mark is blue the network rebuilds what it has seen; while it is vermilion it forecasts.
  """
  parts = []
  for truth, made, colour in ((past, recon, SEEN), (future, pred, FORECAST)):
    shown = [x for x in (truth, made) if x is not None]
    wrong = error(made, truth) if len(shown) == 2 else None
    for t in range(max(map(len, shown), default=0)):
      parts.append(_row([x[t] if x is not None and t < len(x) else np.zeros_like(past[0])
                         for x in (truth, made, wrong)], colour, 3))
  return np.stack(parts)


def error(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """|a - b| of the frames u8[T, S, S] that both have, as u8."""
  both = min(len(a), len(b))
  return np.abs(a[:both].astype(np.int16) - b[:both]).astype(np.uint8)


def _row(frames, colour, columns) -> np.ndarray:
  """Frames u8[S, S] side by side behind a mark of a colour, with a gap below: u8[h, w, 3]."""
  side = frames[0].shape[0]
  times = max(1, -(-SIDE_PX // side))
  side *= times
  row = np.full((side + GAP_PX, 3 * GAP_PX + columns * (side + GAP_PX), 3), PAPER, np.uint8)
  row[:side, :2 * GAP_PX] = colour
  for i, frame in enumerate(frames):
    at = 3 * GAP_PX + i * (side + GAP_PX)
    row[:side, at:at + side] = np.repeat(np.repeat(frame, times, 0), times, 1)[..., None]
  return row
