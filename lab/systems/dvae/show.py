"""Rebuilt grids as records, scores of a whole split, and pictures."""

import functools
import math

import numpy as np

from lab.systems.dvae import canvas, header, lattice, monitors, pictures

THINNEST = 6      # times as high as wide a map of codes may be


def records(config, outputs, batch):
  """A record a grid: its codes, what they show, and, of an evaluation, what the scores are made of."""
  if 'name' not in batch:
    yield from _judged(outputs, batch, config.data.layout)
    return
  for i in range(len(batch['mask'])):
    codes = np.asarray(outputs['codes'][i]).tolist() if 'codes' in outputs else []
    if 'between' in outputs:
      yield {'name': batch['name'][i], 'grids': [canvas.grid_of(x, config.data.layout).tolist()
                                                 for x in outputs['between'][i]]}
    else:
      used = codes if 'tokens' in outputs else [int(c) for c in batch['codes'][i]]
      exact = {'exact': bool((outputs['cells'][i] == outputs['tokens'][i]).all())} if 'tokens' in outputs else {}
      yield {'name': batch['name'][i], 'codes': used, **_header(outputs if 'tokens' in outputs else batch, i),
             'grid': canvas.grid_of(outputs['cells'][i], config.data.layout).tolist(), **exact}


def _header(found, i):
  """What a lattice's codes need beside them, as `decode` takes it."""
  if 'extents' not in found:
    return {}
  size = [int(n) for n in found['extents'][i]]
  alike = {k: [int(n) for n in found[k][i][:length]] for k, length in zip(('rows', 'columns'), size) if k in found}
  return {'size': size, 'colours': [int(c) for c in found['colours'][i]], **alike}


def _judged(outputs, batch, layout):
  wanted, right = np.asarray(outputs['tokens'], np.uint8), np.asarray(outputs['tokens'] == outputs['cells'])
  codes = np.asarray(outputs['codes']).tolist() if 'codes' in outputs else [[]] * len(wanted)
  columns = (batch['pair'], batch['is_input'], right.all(1), (right & (wanted < canvas.COLOURS)).sum(1))
  for tokens, used, *told in zip(wanted, codes, *(np.asarray(x).tolist() for x in columns)):
    judged = dict(zip(('pair', 'is_input', 'exact', 'right'), told))
    yield {'codes': used, **judged, **_of_truth(tokens.tobytes(), layout)}


@functools.lru_cache(1 << 16)
def _of_truth(tokens, layout):
  """What a record says of a grid that was to be rebuilt: the same in every evaluation, and most of a record's time."""
  wanted = np.frombuffer(tokens, np.uint8)
  grid = canvas.grid_of(wanted, layout)
  counts = np.bincount(grid.ravel())
  return {'height': grid.shape[0], 'width': grid.shape[1], 'colours': int((counts > 0).sum()),
          'background': int(counts.argmax()), 'cells': int((wanted < canvas.COLOURS).sum()),
          'deflate_bits': int(monitors.deflate_bits([grid])[0])}


def score(config, found):
  """Scores of the records of a whole split; see monitors.py."""
  told = header.bits(config.data.side, config.model.distinct) if config.model.pool == 'lattice' else 0.0
  return monitors.score(found, config.model.codes, header_bits=told)


def _drawn(tokens, layout):
  """What is drawn of tokens: the canvas, so that a cell of the truth and the same one rebuilt lie in one place."""
  side = math.isqrt(len(tokens))
  return np.asarray(tokens).reshape(side, side) if layout == 'projected' else canvas.grid_of(tokens, layout)


def _columns(config, found, i):
  """Of a map of codes: as many as there are blocks beside each other in a lattice; 0 where that were a strip."""
  if 'extents' not in found:
    return 0
  told = _header(found, i)
  size = [1 + max(told[k]) for k in ('rows', 'columns')] if 'rows' in told else told['size']
  latents = config.model.latents
  columns = int(lattice.divisions(latents, config.data.side)[tuple(size)][1])
  return columns if latents <= THINNEST * columns ** 2 else 0


def picture(config, outputs, batch):
  """name -> u8[H, W, 3]: grid, codes and rebuilt grid side by side; or the grids from one to another."""
  layout, found, m = config.data.layout, {}, config.model
  for i, number in enumerate(batch.get('record', range(len(batch['mask'])))):
    if 'between' in outputs:
      found[f'{number:06d}'] = pictures.strip([canvas.grid_of(x, layout) for x in outputs['between'][i]])
      continue
    codes = outputs['codes'][i] if 'codes' in outputs else batch['codes'][i] if 'codes' in batch else None
    rebuilt = _drawn(outputs['cells'][i], layout)
    truth = _drawn(outputs['tokens'][i], layout) if 'tokens' in outputs else rebuilt
    found[f'{number:06d}'] = pictures.panel(truth, codes, rebuilt, count=m.codes,
                                            columns=_columns(config, outputs if 'tokens' in outputs else batch, i))
  return found
