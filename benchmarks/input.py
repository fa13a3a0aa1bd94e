"""How fast is a recipe's training input, without any device? And where does its time go?

    python -m benchmarks.input --config=configs/pose.py:coco [--seconds=10] [--peer] [--config.KEY=VALUE ...]

The batches are those that training iterates. Printed are items/s, the CPU cores that they took, items/s a core, and the
CPU time of each stage: `read` picks records and fetches their bytes, `decode` and `augment` are the data set's, and
`rest` is batching, prefetching and handing over. A stage's time is that of a pipeline that ends with it, less that of
one that ends before it. The last line is JSON.

With --peer, for pose, a PyTorch DataLoader does the same work on the same photographs in the same run (input_peer.py);
both take turns, three each, and the medians count. PyTorch is no dependency of the lab.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time

STAGES = ('read', 'decode', 'augment', 'rest')
ROUNDS = 3


def main(argv: list[str]) -> int:
  """Runs the program and returns its exit code."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.input', description=__doc__, allow_abbrev=False,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--config', default='', help='recipe: configs/NAME.py[:variant]')
  parser.add_argument('--seconds', type=float, default=10.0, help='measured for each side, and for the stages')
  parser.add_argument('--peer', action='store_true', help='measure a PyTorch DataLoader beside it (pose)')
  given, overrides = parser.parse_known_args(argv[1:])
  from lab.main import exit_code
  try:
    found = run(given.config, overrides, given.seconds, given.peer)
  except Exception as e:
    code = exit_code(e)
    if code is None:
      raise
    print(f'error: {e}', file=sys.stderr)
    return code
  print(table(found))
  print(json.dumps(found))
  return 0


def run(recipe: str, overrides: list[str], seconds: float, peer: bool = False) -> dict:
  """The measurements of a recipe, as main prints them. Raises ConfigError, also where the peer can't run."""
  from lab import config as configs, train
  from lab.task import ConfigError, load
  if not recipe:
    raise ConfigError('--config is missing, such as --config=configs/pose.py:coco')
  config = configs.read(recipe)
  if rest := configs.override(config, overrides):
    raise ConfigError(f'unknown argument {rest[0]!r}')
  train.check(config)
  task = load(config)
  if peer:
    _check_peer(config)
  source = task.source('train')
  batches = train.feed(source, config, range(config.input.batch_size))
  workers = batches.begin()
  cores = len(os.sched_getaffinity(0))
  with contextlib.closing(batches), tempfile.TemporaryDirectory() as folder:
    sides = {'lab': (_endless(batches), lambda: time.process_time() + sum(map(_cpu_seconds, workers)))}
    if peer:
      sides['peer'] = _peer(config, source, folder, cores)
    windows = {name: [] for name in sides}
    for _ in range(ROUNDS):
      for name, side in sides.items():
        windows[name].append(_window(*side, config.input.batch_size, seconds / ROUNDS))
  speeds = {name: _medians(found) for name, found in windows.items()}
  del sides
  found = {'config': recipe, 'batch_size': config.input.batch_size, 'cores': cores, 'seconds': seconds, **speeds['lab'],
           'stages': _stages(source, config, speeds['lab'], seconds)}
  if peer:
    found |= {'peer': speeds['peer'],
              'ratio_per_core': speeds['lab']['items_per_s_per_core'] / speeds['peer']['items_per_s_per_core']}
  return found


def _check_peer(config):
  """Raises ConfigError where there is no peer, or no PyTorch."""
  import importlib.util
  from lab.task import ConfigError
  if config.task != 'lab.systems.pose.task' or not config.augment.on:
    raise ConfigError('--peer: there is one for pose with augmentation alone, such as --config=configs/pose.py:coco')
  if importlib.util.find_spec('torch') is None:
    raise ConfigError('--peer needs PyTorch, which is no dependency of the lab: install torch (a CPU build does) for '
                      'this Python, or leave --peer out')


def _endless(batches):
  while True:
    yield from batches


def _peer(config, source, folder, cores):
  """The peer's batches, and a clock of the CPU time of this process and the workers."""
  import multiprocessing
  from benchmarks import input_peer
  from data_pipelines import coco, pipeline
  from lab.systems.pose import model
  tf = pipeline.tensorflow()
  records = ({k: v.numpy() for k, v in coco.parse(r).items()} for r in tf.data.TFRecordDataset(list(source.read)))
  photographs = input_peer.Photographs(input_peer.files(records, folder), config.augment.to_dict(), config.image.size,
                                       model.stride(config), config.data.people)
  loader = iter(input_peer.loader(photographs, config.input.batch_size, cores))
  workers = [p.pid for p in multiprocessing.active_children()]
  return loader, lambda: time.process_time() + sum(map(_cpu_seconds, workers))


def _cpu_seconds(pid: int) -> float:
  with open(f'/proc/{pid}/stat', encoding='ascii') as f:
    fields = f.read().rpartition(')')[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def _window(batches, clock, batch_size: int, seconds: float) -> tuple[float, float]:
  """Items/s and CPU cores in use over so many seconds, after what was ready before has been taken."""
  warm = time.monotonic() + min(seconds, 1.5) / 2
  next(batches)
  while time.monotonic() < warm:
    next(batches)
  count, began, spent = 0, time.monotonic(), clock()
  while (passed := time.monotonic() - began) < seconds:
    next(batches)
    count += batch_size
  return count / passed, (clock() - spent) / passed


def _medians(windows: list[tuple[float, float]]) -> dict[str, float]:
  return {'items_per_s': statistics.median(speed for speed, _ in windows),
          'cores_used': statistics.median(cores for _, cores in windows),
          'items_per_s_per_core': statistics.median(speed / max(cores, 1e-9) for speed, cores in windows)}


def _stages(source, config, speed: dict, seconds: float) -> dict[str, float]:
  """CPU milliseconds an item of each stage, all of them in this process."""
  from lab import train
  config.input.workers = 0
  unchanged = lambda example, seed: example
  ends = [source._replace(decode=_touch, augment=unchanged),
          source._replace(decode=lambda s: _touch(source.decode(s)), augment=unchanged),
          source._replace(augment=lambda e, seed: _touch(source.augment(e, seed)))]
  spent = [0.0]
  for end in ends:
    batches = train.feed(end, config, range(config.input.batch_size))
    per_s, cores = _window(_endless(batches), time.process_time, config.input.batch_size, seconds / len(ends))
    spent.append(1e3 * cores / per_s)
  spent.append(1e3 / speed['items_per_s_per_core'])
  return {name: max(b - a, 0.0) for name, a, b in zip(STAGES, spent, spent[1:])}


def _touch(example):
  """An example -> one number that hangs on every array of it, so that none is left out as unused."""
  from data_pipelines.pipeline import tensorflow
  tf = tensorflow()
  total = tf.constant(0.0)
  for x in tf.nest.flatten(example):
    x = tf.reshape(x, [-1])[:1]
    x = tf.strings.length(x) if x.dtype == tf.string else x
    total += tf.reduce_sum(tf.cast(x, tf.float32))
  return {'touched': total}


def table(found: dict) -> str:
  """The measurements for the eye."""
  rows = [('', 'items/s', 'cores used', 'items/s a core')]
  for name, side in (('lab', found), ('PyTorch', found.get('peer'))):
    if side:
      rows.append((name, *(f'{side[k]:.4g}' for k in ('items_per_s', 'cores_used', 'items_per_s_per_core'))))
  lines = [f'{found["config"]}: batches of {found["batch_size"]}, {found["cores"]} cores']
  lines += ['  ' + ''.join(f'{cell:>16}' for cell in row) for row in rows]
  if 'ratio_per_core' in found:
    lines.append(f'  lab / PyTorch, a core: {found["ratio_per_core"]:.2f}')
  total = sum(found['stages'].values()) or 1.0
  lines += [f'  {name:<8}{ms:>10.3f} ms of CPU an item{ms / total:>8.0%}' for name, ms in found['stages'].items()]
  return '\n'.join(lines)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
