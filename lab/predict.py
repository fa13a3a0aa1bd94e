"""--mode=predict: user input -> predictions as JSON lines, and pictures of them."""

import itertools
import json
import os

import jax
import numpy as np

from data_pipelines import DataError
from lab import files, links, logs, mesh as meshes, programs, train
from lab.task import ConfigError, Task


def run(task: Task, config, workdir: str, which: str, source: str, output: str) -> int:
  """Predicts every input in `source` (a file, a folder, a camera) with a checkpoint's weights.

  Writes predictions.jsonl and what task.picture draws into `output`, or where it is empty into the workdir's folder
  predictions. An input that can't be used is named and left out, and makes the program end with code 3 after the
  others. Returns the number of inputs that were used.
  """
  if task.inputs is None:
    raise ConfigError(f'{config.task} has no --mode=predict')
  if jax.process_count() > 1:
    raise ConfigError('--mode=predict runs as one process')
  told, output = (output or os.path.join(w, 'predictions') for w in (workdir, files.local(workdir)))
  try:
    os.makedirs(output, exist_ok=True)
  except OSError as e:
    raise DataError(f'--output={output}: {e.strerror}; name a folder that can be written') from None
  stream, seen = task.inputs(source, output, lambda: meshes.preempted(0)), []
  for batch in stream:
    seen.append(batch)
    if not isinstance(batch, DataError):
      break
  else:
    raise DataError(f'--input={source}: nothing there can be read' + ''.join(f'; {e}' for e in seen))
  spec = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in numeric(seen[-1]).items()}
  with train.restored(task, config, workdir, which, spec) as (_, step, params, stats):
    logs.say(f'predicting with step {step} of {workdir}')
    used, broken = _write(task, config, params, stats, itertools.chain(seen, stream), output)
  files.push(workdir)
  logs.say(f'{used} input(s) predicted, {broken} left out; see {told}')
  if broken:
    raise DataError(f'{broken} input(s) could not be read; they are named above')
  return used


def numeric(batch: dict) -> dict[str, np.ndarray]:
  """The leaves of a host batch that go to the device."""
  return {k: v for k, v in batch.items() if isinstance(v, np.ndarray) and v.dtype != object and v.dtype.kind in 'biuf'}


def _write(task, config, params, stats, stream, output) -> tuple[int, int]:
  """Runs every batch and writes its records and pictures; returns how many inputs were used and how many left out."""
  predict = jax.jit(task.predict, compiler_options=programs.options(gpu=task.gpu))
  key = jax.random.key(config.seed, impl=config.prng)
  used = broken = 0
  path = os.path.join(output, 'predictions.jsonl')
  with links.fresh(path + '.new') as f:
    for batch in stream:
      if isinstance(batch, DataError):
        logs.log.error('%s', batch)
        broken += 1
        continue
      outputs = jax.device_get(predict(params, stats, numeric(batch), key))
      for record in task.records(outputs, batch):
        for line in task.lines(record) if task.lines else (record,):
          f.write(json.dumps(line) + '\n')
      if task.picture:
        for image in task.picture(outputs, batch).values():
          batch['write'](image)
      used += 1
  os.replace(path + '.new', path)
  return used, broken
