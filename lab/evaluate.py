"""Evaluation: masked sums over a whole split, and a score on the host; every example counts once."""

import itertools
from typing import Any, Callable

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from data_pipelines.pipeline import Batches
from lab import logs, mesh as meshes, metrics
from lab.ledger import Ledger
from lab.programs import Program
from lab.task import Scalars, Task


class Interrupted(Exception):
  """The run was asked to stop in the middle of an evaluation."""


def make(task: Task, config, mesh, ledger: Ledger) -> Callable[[Any, Any], tuple[Scalars, dict]]:
  """(params, stats) -> (scalars, pictures) on the evaluation split; compiled once for all calls, timed by the ledger.

  Raises Interrupted between two batches when this lone process is asked to stop.
  """
  size = meshes.padded(mesh, config.input.eval_batch_size)
  rows = meshes.rows(mesh, size, 'input.eval_batch_size')
  batches = Batches(task.source('eval'), config.input, size, rows.fed, train=False)
  measure = jax.jit(lambda p, s, b: {**task.measure(p, s, b), 'examples': (b['mask'].sum(), 1.0)},
                    out_shardings=NamedSharding(mesh, P()))
  predict = jax.jit(lambda p, s, k, b: task.predict(p, s, b, k), out_shardings=NamedSharding(mesh, meshes.BATCH))
  measure, predict = Program('evaluation', measure, ledger), Program('prediction', predict, ledger)
  key = jax.random.key(config.seed, impl=config.prng)

  def run(params, stats):
    totals, pictures, records = {}, {}, []
    batches.step, progress = 0, logs.Progress('evaluating', batches.steps)
    for i, batch in enumerate(batches):
      if meshes.interrupted():
        raise Interrupted
      placed = meshes.place(mesh, batch, size)
      sums = jax.device_get(measure(params, stats, placed))
      totals = metrics.merge(totals, sums)
      draw = task.picture and i * size < config.eval_pictures      # by number: alike on every process
      if task.score or draw:
        outputs = meshes.local(predict(params, stats, jax.random.fold_in(key, i), placed))
        outputs, batch = real_rows(outputs, batch, rows.speaks)
        if draw and len(batch['mask']):
          drawn = task.picture(outputs, batch).items()
          pictures.update(itertools.islice(drawn, config.eval_pictures - len(pictures)))
        if task.score:
          records += task.records(outputs, batch)
      progress(i + 1)
    examples = totals.pop('examples')[0]
    scalars = {'examples': examples, **task.finish(totals)}
    if batches.bad:
      scalars['bad_records'] = float(len(batches.bad))
    if task.score:
      scalars |= task.score(meshes.gather(records))
    return scalars, pictures

  return run


def real_rows(outputs: Any, batch: dict, speaks) -> tuple[Any, dict]:
  """Outputs and batch [rows, ...] without the rows of mask 0 and those that another process speaks for, bool[rows]."""
  keep = (batch['mask'] > 0) & speaks
  return jax.tree.map(lambda x: x[keep], outputs), {k: v[keep] for k, v in batch.items()}


def summary(scalars: Scalars) -> str:
  """The scores of an evaluation in one line; those of single stages or layers, named with a slash, stay in the log."""
  return '  '.join(f'{k} {v:.4g}' for k, v in scalars.items() if '/' not in k and v is not None)


def run(task: Task, config, workdir: str, which: str) -> Scalars:
  """--mode=eval: the scores of a checkpoint (latest, best or a step), printed and written to workdir/eval_STEP.json."""
  import json
  import os
  from lab import train
  with train.restored(task, config, workdir, which) as (mesh, step, params, stats):
    scalars, pictures = make(task, config, mesh, Ledger(workdir, writes=False))(params, stats)
  if jax.process_index() == 0:
    path = os.path.join(workdir, f'eval_{step}.json')
    logs.write_atomically(path, json.dumps(logs.finite({'step': step, **scalars}), indent=2) + '\n')
    logs.write_pictures(os.path.join(workdir, f'eval_{step}'), pictures)
    logs.say(f'step {step}: {summary(scalars)}\nwritten to {path}')
  return scalars
