"""Evaluation: masked sums over a whole split, and a score on the host; every example counts once."""

import contextlib
import itertools
from typing import Any, Callable, Iterable, Iterator, Mapping

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

from data_pipelines.pipeline import Batches
from lab import files, logs, mesh as meshes, metrics, programs
from lab.ledger import Ledger
from lab.programs import Program
from lab.task import Scalars, Task


class Interrupted(Exception):
  """The run was asked to stop in the middle of an evaluation."""


def make(task: Task, config, mesh, ledger: Ledger
         ) -> Callable[[Mapping[str, Any], Any], tuple[dict[str, Scalars], dict]]:
  """(name -> params, stats) -> (name -> scalars, pictures) on the evaluation split, of which a batch is made once.

  Pictures are of the first params. Compiled once for all calls, timed by the ledger. Raises Interrupted between two
  batches when the run is asked to stop; of several processes on all, at the same batch.
  """
  size = meshes.padded(mesh, config.input.eval_batch_size)
  rows = meshes.rows(mesh, size, 'input.eval_batch_size')
  batches = Batches(task.source('eval'), config.input, size, rows.fed, train=False)
  measure, judge = _programs(task, mesh, ledger)
  key = jax.random.key(config.seed, impl=config.prng)

  def drawn(i):
    # by what the first process has drawn, for only it writes pictures: alike on every process
    return bool(task.picture) and i * rows.first < config.eval_pictures

  def begun(weights, stats, i, batch):
    """name -> sums of batch i on the devices, and outputs where they are wanted; not waited for."""
    placed, found = meshes.place(mesh, batch, size), {}
    for name, params in weights.items():
      if task.score or drawn(i) and name == next(iter(weights)):
        found[name] = judge(params, stats, jax.random.fold_in(key, i), placed)
      else:
        found[name] = measure(params, stats, placed), None
    return found

  def run(weights, stats):
    first, pictures = next(iter(weights)), {}
    totals, records = {name: {} for name in weights}, {name: [] for name in weights}
    batches.step, progress = 0, logs.Progress('evaluating', batches.steps)
    with contextlib.closing(iter(batches)) as made:
      stream = ((i, batch, begun(weights, stats, i, batch)) for i, batch in enumerate(made))
      for i, batch, found in ahead(stream):
        if meshes.interrupted():
          raise Interrupted
        for name, (sums, outputs) in found.items():
          totals[name] = metrics.merge(totals[name], sums.unpacked())
          if outputs is None:
            continue
          real = real_rows(meshes.local(outputs), batch, rows.speaks)
          few = config.eval_pictures - len(pictures)      # what makes a picture at all makes one of each row, or more
          if name == first and drawn(i) and few and len(real[1]['mask']):
            new = task.picture(*jax.tree.map(lambda x: x[:few], real))
            pictures.update(itertools.islice(new.items(), few))
          if task.score:
            records[name] += task.records(*real)
        progress(i + 1)
    return {name: finished(totals[name], records[name]) for name in weights}, pictures

  def finished(totals, records):
    scalars = {'examples': totals.pop('examples')[0], **task.finish(totals)}
    if batches.bad:
      scalars['bad_records'] = float(len(batches.bad))
    if task.score:
      scalars |= task.score(meshes.gather(records))
    return scalars

  return run


def _programs(task, mesh, ledger):
  """(params, stats, batch) -> sums, and (params, stats, key, batch) -> (sums, outputs), where the network runs once."""
  summed, split = NamedSharding(mesh, P()), NamedSharding(mesh, meshes.BATCH)
  options = programs.options(mesh.devices.flat, task.gpu)

  def sums(params, stats, batch):
    return metrics.packed({**task.measure(params, stats, batch), 'examples': (batch['mask'].sum(), 1.0)})

  def both(params, stats, key, batch):
    return sums(params, stats, batch), task.predict(params, stats, batch, key)

  def program(name, function, sharding):
    return Program(name, jax.jit(function, out_shardings=sharding, compiler_options=options), ledger)
  return program('evaluation', sums, summed), program('evaluation with outputs', both, (summed, split))


def ahead(items: Iterable) -> Iterator:
  """The items in order, each one made before the one in front of it is used: devices work on it meanwhile."""
  items = iter(items)
  for last in itertools.islice(items, 1):
    for item in items:
      yield last
      last = item
    yield last


def real_rows(outputs: Any, batch: dict, speaks) -> tuple[Any, dict]:
  """Outputs and batch [rows, ...] without the rows of mask 0 and those that another process speaks for, bool[rows]."""
  keep = (batch['mask'] > 0) & speaks
  return jax.tree.map(lambda x: x[keep], outputs), {k: v[keep] for k, v in batch.items()}


def summary(scalars: Scalars) -> str:
  """The scores of an evaluation in one line; those of single stages or layers, named with a slash, stay in the log."""
  return '  '.join(f'{k} {v:.4g}' for k, v in scalars.items() if '/' not in k and v is not None)


def stalled(config: Mapping, rows: Iterable[Mapping]) -> str:
  """Why a run with these rows of metrics.jsonl has to end by config.early_stop; '' where it goes on.

  A pure function of the rows, so that a run that was stopped and started again ends where it would have.
  """
  best, patience, delta = config['checkpoint']['best'], config['early_stop']['patience'], config['early_stop']['delta']
  name, sign = best.removeprefix('-'), -1 if best.startswith('-') else 1
  values = {row['step']: row.get(name) for row in rows if row['split'] == 'eval'}
  top, at, since = None, 0, 0
  for step, value in sorted(values.items()):
    if value is not None and (top is None or sign * (value - top) > delta * abs(top)):
      top, at, since = value, step, 0
    else:      # not finite is no improvement
      since += 1
  if not patience or since < patience:
    return ''
  return (f'the last {since} evaluations did not improve {name} by {delta:.2%}' +
          ('' if top is None else f' on the {top:.4g} of step {at}'))


def run(task: Task, config, workdir: str, which: str, output: str = '') -> Scalars:
  """--mode=eval: the scores of a checkpoint (latest, best or a step), printed and written to eval_STEP.json.

  It and the pictures lie in the folder `output`, or in the workdir where that is empty: evaluations with other values
  of the configuration need not replace each other.
  """
  import json
  import os
  from lab import train
  with train.restored(task, config, workdir, which) as (mesh, step, params, stats):
    found, pictures = make(task, config, mesh, Ledger(workdir, writes=False))({'eval': params}, stats)
  scalars = found['eval']
  if jax.process_index() == 0:
    folder, name = output or files.local(workdir), f'eval_{step}.json'
    os.makedirs(folder, exist_ok=True)
    text = json.dumps(logs.finite({'step': step, **scalars}), indent=2)
    logs.write_atomically(os.path.join(folder, name), text + '\n')
    logs.write_pictures(os.path.join(folder, f'eval_{step}'), pictures)
    files.push(workdir)
    logs.say(f'step {step}: {summary(scalars)}\nwritten to {os.path.join(output or workdir, name)}')
  return scalars
