"""--mode=lr_find: the learning-rate range test (Smith, arXiv 1506.01186, section 3.3), over a few updates from scratch.

The rate grows exponentially from lr_find.low to lr_find.high. Where the smoothed loss falls fastest against the
logarithm of the rate, a peak is suggested. Nothing is applied and no checkpoint written; workdir/lr_find gets the
report and a picture.
"""

import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from data_pipelines import pipeline

from lab import accumulate, beginning, files, logs, memory, mesh as meshes, metrics, optim, train
from lab.graft import fill, graft
from lab.ledger import Ledger
from lab.programs import Program
from lab.task import ConfigError

SMOOTH = 0.9         # of the loss's moving average
WORSE = 4.0          # times the best smoothed loss: the test ends


def run(task, config, workdir: str) -> dict:
  """Runs the test, writes lr_find/report.json, .svg and .png, and returns the report."""
  if config.continue_from:
    raise ConfigError('config.continue_from: --mode=lr_find starts from scratch, or from config.init_from')
  mesh = meshes.make(config.mesh)
  with jax.set_mesh(mesh):
    rates, losses = _measure(task, config, workdir, mesh)
  report = analyse(rates, losses) | {'configured': config.optim.learning_rate}
  if jax.process_index() == 0:
    folder = os.path.join(files.local(workdir), 'lr_find')
    os.makedirs(folder, exist_ok=True)
    logs.write_atomically(os.path.join(folder, 'report.json'), json.dumps(report, indent=2) + '\n')
    pictures = _picture(report, os.path.join(folder, 'loss'))
    files.push(workdir)
    written = [os.path.join(workdir, 'lr_find', os.path.basename(p)) for p in ('report.json', *pictures)]
    logs.say(_text(report) + '\nwritten to ' + ', '.join(written))
  return report


def _measure(task, config, workdir, mesh) -> tuple[list[float], list[float]]:
  """The loss at each rate, until it explodes."""
  find, size = config.lr_find, config.input.batch_size
  source = task.source('train')
  batches = pipeline.Batches(source, config.input, size, meshes.rows(mesh, size).fed, train=True, seed=config.seed)
  growth = math.log(find.high / find.low) / (find.steps - 1)
  tx = optim.make(config.optim, find.steps, lambda step, joint: find.low * jnp.exp(growth * step.astype(jnp.float32)))
  like = train.abstract(task, tx, config, batches.spec(1), mesh)
  memory.check_state(like)
  layout = jax.tree.map(lambda x: x.sharding, like)
  state = jax.jit(train.initial(task, tx, config, batches.spec(1)), out_shardings=layout)()
  if config.init_from:
    state = state._replace(params=graft(state.params, config.init_from, config.init_only, config, config.runs_root))
  if config.init_parts:
    state = state._replace(params=fill(state.params, config.init_parts, config.optim.stacked, config.runs_root))
  ledger = Ledger(workdir, writes=False)
  step = Program('the training step', train.make_step(task, tx, config, like, mesh), ledger,
                 look=lambda compiled, args: memory.check_step(compiled, *args))
  step = beginning.before(task, step, config, like, mesh, ledger)
  rates, losses, stream, best, mean = [], [], iter(batches), math.inf, 0.0
  progress = logs.Progress('trying rates', find.steps)
  for i in range(find.steps):
    # always as many micro-batches as the run will have in the end
    micro = [next(stream) for _ in range(accumulate.count(config.optim, config.optim.accumulate_from))]
    state, sums = step(state, meshes.place_stacked(mesh, micro, size))
    loss = metrics.ratios(jax.device_get({'loss': sums['loss']})).get('loss', math.nan)
    if not math.isfinite(loss):
      break
    rates.append(float(sums['learning_rate'][0]))
    losses.append(loss)
    progress(i + 1)
    mean = SMOOTH * mean + (1 - SMOOTH) * loss
    smoothed = mean / (1 - SMOOTH**(i + 1))
    best = min(best, smoothed)
    if smoothed > best + (WORSE - 1) * abs(best) and i > 10:
      break
  stream.close()
  return rates, losses


def analyse(rates: list[float], losses: list[float]) -> dict:
  """Losses at growing rates -> smoothed losses, the rate where they fall fastest, and the one where they are lowest.

  `suggested` is the former; null where the loss never falls. Slopes are central differences against ln(rate), and the
  first tenth and the last twentieth, where the average is young or the loss explodes, have no say.
  """
  raw, mean, smoothed = np.asarray(losses, np.float64), 0.0, []
  for i, loss in enumerate(raw):
    mean = SMOOTH * mean + (1 - SMOOTH) * loss
    smoothed.append(mean / (1 - SMOOTH**(i + 1)))
  suggested = lowest = None
  if len(raw) >= 5:
    slope = np.gradient(np.asarray(smoothed), np.log(rates))
    first, last = len(raw) // 10, len(raw) - max(len(raw) // 20, 1)
    steepest, deepest = first + int(slope[first:last].argmin()), int(np.argmin(smoothed))
    lowest = rates[deepest]
    suggested = rates[steepest] if slope[steepest] < 0 else None
  return {'suggested': suggested, 'lowest': lowest, 'rates': list(rates), 'losses': raw.tolist(), 'smoothed': smoothed}


def _text(report) -> str:
  if report['suggested'] is None:
    return 'the loss fell at no rate; try other bounds (config.lr_find.low, .high) or more steps (config.lr_find.steps)'
  return (f'the loss falls fastest at a rate of {report["suggested"]:.2g}, and is lowest at {report["lowest"]:.2g}; '
          f'configured: {report["configured"]:.2g}. To use it: --config.optim.learning_rate={report["suggested"]:.2g}')


def _picture(report, path) -> list[str]:
  from lab import plot
  marks = {'falls fastest': report['suggested'], 'lowest': report['lowest'], 'configured': report['configured']}
  figure = plot.lines({'loss': (report['rates'], report['losses']), 'smoothed': (report['rates'], report['smoothed'])},
                      x_label='learning rate (per update)', y_label='training loss', title='Learning-rate range test',
                      log_x=True, log_y=min(report['losses'], default=0) > 0,
                      marks={k: v for k, v in marks.items() if v is not None})
  return plot.save(figure, path)
