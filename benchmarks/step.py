"""How fast is a recipe's training step by itself? The very step that `train` runs, with its data on the device.

    python -m benchmarks.step --config=configs/gpt.py:full --config.data.dir=data/corpus [--steps=30]
                              [--profile=FOLDER] [--cache=FOLDER] [--config.KEY=VALUE ...]

One JSON line: items a second (tokens, images, sequences, grids, packs), ms a step (median, minimum), MFU, bytes of
device memory at most and as foretold, seconds of compilation with an empty cache of programs, or that in the folder
--cache, and with a full one. A step is timed from the end of the one before it to its own, while the next one waits.
--profile tells, in a table before that line, where the device's time goes, kernel by kernel; FOLDER gets the trace, for
TensorBoard or Perfetto.

MFU counts what the step must multiply: three times the forward pass, of causal attention the half that is seen, and
nothing that is computed twice.
"""

import contextlib
import glob
import json
import os
import re
import statistics
import sys
import tempfile
import time

from absl import flags

from lab import config as configs
from lab.main import exit_code
from lab.task import ConfigError

FLAGS = flags.FlagValues()
flags.DEFINE_string('config', None, 'The recipe.', flag_values=FLAGS)
flags.DEFINE_integer('steps', 30, 'Updates that are timed, after five that are not.', flag_values=FLAGS)
flags.DEFINE_string('profile', '', 'Folder for a trace of three more updates.', flag_values=FLAGS)
flags.DEFINE_string('cache', '', 'Folder that keeps compiled programs.', flag_values=FLAGS)
WARM_UP, TRACED, SHOWN = 5, 3, 40
UNITS = {'language': 'tokens', 'pose': 'images', 'video': 'sequences', 'dvae': 'grids', 'agent': 'packs'}


def main(argv: list[str]) -> int:
  """Runs the program and returns its exit code."""
  given = [a for a in argv if a.startswith('--config.')]
  try:
    FLAGS([a for a in argv if a not in given])
    return run(given)
  except Exception as e:
    code = 2 if isinstance(e, flags.Error) else exit_code(e)
    if code is None:
      raise
    print(f'error: {e}', file=sys.stderr)
    return code


def run(given: list[str]) -> int:
  """As main, but failures are raised; given: the arguments that change keys."""
  if not FLAGS.config:
    raise ConfigError('--config is missing, such as --config=configs/pose.py')
  config = configs.read(FLAGS.config)
  configs.override(config, ['', *given])
  from lab import train
  train.check(config)
  with tempfile.TemporaryDirectory() as empty:
    print(json.dumps({'config': FLAGS.config, 'settings': [a.removeprefix('--config.') for a in given],
                      **measured(config, FLAGS.steps, FLAGS.profile, FLAGS.cache or empty)}), flush=True)
  return 0


def measured(config, steps: int, profile: str, cache: str) -> dict:
  """What the module says, of a configuration; programs are kept in the folder `cache`."""
  import jax
  from lab import beginning, flops, memory, mesh as meshes, optim, train
  from lab.ledger import Ledger
  from lab.task import load
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  task, size, micro = load(config), config.input.batch_size, config.optim.accumulate
  mesh = meshes.make(config.mesh)
  with jax.set_mesh(mesh):
    config.input.workers = 0
    batches = train.feed(task.source('train'), config, meshes.rows(mesh, size).fed)
    tx = optim.make(config.optim, config.total_steps)
    like = train.abstract(task, tx, config, batches.spec(1), mesh)
    with contextlib.closing(iter(batches)) as stream:
      data = meshes.place_stacked(mesh, [next(stream) for _ in range(micro)], size)
    data = jax.device_put(data, jax.sharding.NamedSharding(mesh, meshes.MICRO))
    step, seconds = compiled(lambda: train.make_step(task, tx, config, like, mesh), like, data)
    layout = jax.tree.map(lambda x: x.sharding, like)
    state = jax.jit(train.initial(task, tx, config, batches.spec(1)), out_shardings=layout)()
    jax.block_until_ready((state, data))
    need = memory.check_step(step, state, data)
    first = beginning.before(task, step, config, like, mesh, Ledger('', writes=False))
    state, times, sums = timed(first, state, data, steps)
    peak = (jax.local_devices()[0].memory_stats() or {}).get('peak_bytes_in_use', 0)
    if profile:
      traced(step, state, data, profile)
  device, median = jax.devices()[0], statistics.median(times)
  items = size * micro * (config.data.length if config.task.endswith('language.task') else 1)
  work, limit = model_flops(config, batches, like), flops.peak(device.device_kind)
  loss = float(sums['loss'][0])
  return {'card': device.device_kind, 'devices': jax.device_count(), 'jax': jax.__version__,
          'unit': UNITS.get(config.task.split('.')[-2], 'examples'), 'items': items,
          'items_per_s': round(items / median, 1), 'ms': round(1e3 * median, 3), 'ms_min': round(1e3 * min(times), 3),
          'flops': work, 'mfu': round(work / median / (limit * jax.device_count()), 4) if limit else None,
          'peak_bytes': peak, 'foretold_bytes': need.in_use + need.activations,
          'compile_s': round(seconds[0], 1), 'compile_warm_s': round(seconds[1], 1), 'loss': loss}


def compiled(make, like, data):
  """The step as a program, and the seconds that it takes to compile it at first and from the cache."""
  import jax
  seconds = []
  for _ in range(2):
    jax.clear_caches()
    began = time.perf_counter()
    program = make().lower(like, data).compile()
    seconds.append(time.perf_counter() - began)
  return program, seconds


def timed(step, state, data, steps: int):
  """The state after the warm-up and `steps` updates, the seconds of each, and the sums of the last."""
  import jax
  ends, waiting = [], None
  for _ in range(WARM_UP + steps + 1):
    state, sums = step(state, data)
    if waiting is not None:
      jax.block_until_ready(waiting)      # the update before this one, which is on the device by now
      ends.append(time.perf_counter())
    waiting = sums['loss']
  jax.block_until_ready(state)
  return state, [b - a for a, b in zip(ends[WARM_UP - 1:], ends[WARM_UP:])], jax.device_get(sums)


def model_flops(config, batches, like) -> float:
  """FLOPs of an update by the module's count."""
  import jax
  from lab import flops
  from lab.nn.kernels import counted
  from lab.task import load
  batch = {k: jax.ShapeDtypeStruct(s.shape, s.dtype) for k, s in batches.spec(config.input.batch_size).items()}
  key = jax.eval_shape(lambda: jax.random.key(0, impl=config.prng))
  with counted():
    work = flops.training(load(config).loss, like.params, like.stats, batch, key, like.step)
  if config.get('model', {}).get('causal'):
    m, length = config.model, config.data.length
    work -= 3 * config.input.batch_size * m.layers * 2 * m.width * length**2
  return work * config.optim.accumulate


def traced(step, state, data, folder: str) -> None:
  """Prints where the time of the device goes, and leaves the trace in the folder."""
  import jax
  with jax.profiler.trace(folder):
    for _ in range(TRACED):
      state, sums = step(state, data)
    jax.block_until_ready(sums)
  path = max(glob.glob(os.path.join(folder, '**', '*.xplane.pb'), recursive=True), key=os.path.getmtime)
  names = dict(instructions(step.as_text()))
  rows = sorted(kernels(path).items(), key=lambda x: -x[1][0])
  for name, (seconds, count) in rows[:SHOWN]:
    print(f'{1e3 * seconds / TRACED:9.3f} ms {count / TRACED:7.1f} x  {name[:70]:<70} {names.get(name, "")[:150]}')
  print(f'{1e3 * sum(seconds for _, (seconds, _) in rows) / TRACED:9.3f} ms of kernels a step')


def kernels(path: str) -> dict[str, tuple[float, int]]:
  """Name of an HLO instruction, or else of a kernel -> its seconds on the first device, and how often it ran."""
  from jax.profiler import ProfileData
  found: dict[str, tuple[float, int]] = {}
  planes = [p for p in ProfileData.from_file(path).planes if p.name.startswith('/device:')]
  for line in planes[0].lines if planes else ():
    if not line.name.startswith('Stream'):
      continue
    for event in line.events:
      stats = dict(event.stats)
      name = str(stats.get('hlo_op') or event.name)
      name = event.name if name.startswith('command_buffer') else name
      seconds, count = found.get(name, (0.0, 0))
      found[name] = seconds + 1e-9 * event.duration_ns, count + 1
  return found


def instructions(text: str):
  """(name, shape and where it comes from) of the instructions of a compiled program."""
  for line in text.splitlines():
    match = re.match(r'\s*(?:ROOT )?%?([\w.\-]+) = (\S+)', line)
    if match:
      where = re.search(r'op_name="([^"]*)"', line)
      call = re.search(r'custom_call_target="([^"]*)"', line)
      yield match[1], ' '.join(filter(None, (match[2], call and call[1], where and where[1])))


if __name__ == '__main__':
  with contextlib.suppress(BrokenPipeError):
    sys.exit(main(sys.argv))
