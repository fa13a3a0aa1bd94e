"""python -m lab.main --config=configs/pose.py --workdir=runs/pose [--mode=MODE] [--config.KEY=VALUE ...]

Modes: train, eval, predict, lr_find (a learning-rate range test); inspect and page (what a workdir holds, as text or as
an HTML page) need no --config. Without one, eval and predict take that of the run. compile, which needs no workdir,
tells what a step needs on a machine that need not be there: --topology=v5e:16x16.

Exit codes: 0 done; 2 configuration; 3 data; 4 numbers that are not finite; 5 checkpoint; 6 memory or disk;
7 distributed; 75 preempted: start the same command again.
"""

import contextlib
import errno
import logging
import os
import re
import signal
import sys
import traceback

from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_string('config', '', 'recipe: configs/NAME.py[:variant]; --config.KEY=VALUE changes one of its keys')
flags.DEFINE_string('workdir', '', 'folder of the run, on a disk or gs://BUCKET/FOLDER: checkpoints, logs, pictures')
flags.DEFINE_enum('mode', 'train', ['train', 'eval', 'predict', 'lr_find', 'inspect', 'page', 'compile'],
                  'what to do')
flags.DEFINE_string('step', 'latest', 'eval, predict and inspect: latest, best or the number of a checkpoint')
flags.DEFINE_string('input', '', 'predict: a file, a folder, a camera number or a text')
flags.DEFINE_string('output', '', 'folder for the results; if empty, predict: WORKDIR/predictions, eval: WORKDIR; '
                    'inspect and compile: a JSON file')
flags.DEFINE_string('topology', '', 'compile: v5e:16x16, v5p:4x4x4, ...; with *4 four slices; gpu:2 or cpu:8 for '
                    'devices of this machine')
flags.DEFINE_bool('distributed', False, 'find the other processes as the platform tells (Cloud TPU, Slurm, ...)')


def main(argv: list[str]) -> int:
  """Runs one command and returns its exit code; every expected failure is one message."""
  signal.signal(signal.SIGTERM, lambda *_: os._exit(75))      # until training listens, there is nothing to save
  logging.basicConfig(format='%(levelname).1s %(message)s', level=logging.WARNING)
  for ours in ('lab', 'data_pipelines'):
    logging.getLogger(ours).setLevel(logging.INFO)
  try:
    return run(argv)
  except KeyboardInterrupt:
    _leave(130, 'Ctrl-C')
    return 130
  except Exception as e:
    code = exit_code(e)
    if code is None:
      if _processes() > 1:
        traceback.print_exc()
      _leave(1, repr(e))
      raise
    print(f'{"stopped" if code == 75 else "error"}: {e}', file=sys.stderr, flush=True)
    if code not in (0, 75):
      _leave(code, str(e))
    return code


def _leave(code, why):
  """Of several processes, tells the others why this one ends, and ends it: a clean end would wait for them."""
  if _processes() > 1:
    from lab import peers
    peers.fail(code, why)
    os._exit(code)


def run(argv: list[str]) -> int:
  """As main, but failures are raised."""
  if {'--help', '-help', '-h'} & {*argv}:
    print(_help())
    return 0
  from lab import config as configs, files
  from lab.task import ConfigError, load
  argv, name = _config_name(argv)
  files.check('--workdir', _workdir(argv))
  mode = re.search(r'--?mode[= ](inspect|page|eval|predict)\b', ' '.join(argv))
  if not name and not mode:
    raise ConfigError('--config is missing, such as --config=configs/pose.py')
  if name:
    config = configs.read(name)
  else:
    config = configs.of_run(files.local(_workdir(argv))) if mode[1] in ('eval', 'predict') else None
  argv = configs.override(config, argv) if config else argv
  try:
    rest = FLAGS(argv)
  except flags.Error as e:
    raise ConfigError(str(e)) from None
  if rest[1:]:
    raise ConfigError(f'unknown argument {rest[1]!r}')
  if '://' in FLAGS.output:
    raise ConfigError(f'--output={FLAGS.output}: expected a path of this machine')
  if FLAGS.mode == 'compile':
    return _compile(config)
  if not FLAGS.workdir:
    raise ConfigError('--workdir is missing, such as --workdir=runs/pose')
  if FLAGS.mode == 'predict' and not FLAGS.input:
    raise ConfigError('--mode=predict needs --input: a file, a folder, a camera number or a text')
  if FLAGS.mode in ('inspect', 'page'):
    return _report()
  from lab import train
  try:
    train.check(config)
    if not config.assets and os.path.isdir(kept := os.path.join(files.local(FLAGS.workdir), train.ASSETS)):
      config.assets = kept
    task = load(config)
  except (AttributeError, KeyError, TypeError) as e:
    if name:
      raise
    raise ConfigError(f'{FLAGS.workdir}/config.json is of another version of the lab, or broken '
                      f'({e!r:.100}): give --config with the recipe of the run') from e
  config.lock()
  return _run(task, config)


def _help() -> str:
  """How the program is used and all its flags; nothing is imported for it."""
  ours = FLAGS.get_key_flags_for_module(sys.argv[0] if __name__ == '__main__' else __name__)
  lines = [f'  --{f.name}={f.default_as_str or repr("")}: {f.help}' for f in ours]
  return '\n'.join([__doc__, *lines, '', 'The keys that --config.KEY=VALUE takes, with their units, are in '
                    'lab/config.py and lab/systems/*/config.py.'])


def _compile(config) -> int:
  """What a step of a configuration needs on a machine; devices of this one are only used if they are asked for."""
  import jax
  from lab.task import ConfigError, load
  if not FLAGS.topology:
    raise ConfigError('--mode=compile needs --topology, such as --topology=v5e:16x16')
  if not FLAGS.topology.startswith('gpu'):
    jax.config.update('jax_platforms', 'cpu')
  from lab import compile as compiler, train
  train.check(config)
  compiler.run(load(config), config, FLAGS.topology, FLAGS.output)
  return 0


def _report() -> int:
  """What a workdir holds; no device is touched, so that it can be read beside a run that has them all."""
  import jax
  jax.config.update('jax_platforms', 'cpu')
  if FLAGS.mode == 'inspect':
    from lab import inspect
    inspect.run(FLAGS.workdir, FLAGS.step, FLAGS.output)
  else:
    from lab import page
    print(page.write(FLAGS.workdir))
  return 0


def _run(task, config) -> int:
  from lab import checkpoint, evaluate, files, ledger, lr_find, mesh, predict
  if FLAGS.mode in ('eval', 'predict') and not files.isdir(FLAGS.workdir):
    raise checkpoint.CheckpointError(f'--workdir={FLAGS.workdir}: no such folder; train first, or correct it')
  began = ledger.process_began()
  _compilation_cache()
  if FLAGS.mode == 'train' or FLAGS.input.isdecimal():
    mesh.listen(alone=not (FLAGS.distributed or 'JAX_COORDINATOR_ADDRESS' in os.environ))
  mesh.start(config, FLAGS.workdir, FLAGS.distributed, {
      f'--{name}': FLAGS[name].value for name in ('mode', 'workdir', 'step', 'input', 'output')})
  if FLAGS.mode == 'eval':
    evaluate.run(task, config, FLAGS.workdir, FLAGS.step, FLAGS.output)
  elif FLAGS.mode == 'predict':
    predict.run(task, config, FLAGS.workdir, FLAGS.step, FLAGS.input, FLAGS.output)
  elif FLAGS.mode == 'lr_find':
    lr_find.run(task, config, FLAGS.workdir)
  else:
    _train(task, config, began)
  return 0


def _train(task, config, began):
  """Trains, alone in the workdir, and leaves a page about it however far it came."""
  import jax
  from lab import files, locks, logs, mesh, peers, train
  first = jax.process_index() == 0

  def stopped():
    if peers.count() == 1 and mesh.interrupted():      # several have to ask equally often
      raise mesh.Preempted('there was nothing to save yet; start the same command again')

  def page():
    if first and os.path.exists(os.path.join(files.local(FLAGS.workdir), 'config.json')):
      logs.page(FLAGS.workdir)
      files.push(FLAGS.workdir)
  with locks.claim(FLAGS.workdir, stopped) if first else contextlib.nullcontext():
    peers.meet()      # the first one may have to wait for the lock, longer than others wait for its collectives
    try:
      train.run(task, config, FLAGS.workdir, began)
    except BaseException as e:
      if (code := getattr(e, 'exit_code', 1)) != 75:      # the others need not wait for the page
        peers.fail(code, repr(e) if code == 1 else str(e))
      try:
        page()
      except files.StorageError as other:
        logs.log.warning('%s', other)
      raise
    page()


def _config_name(argv):
  """Takes --config=NAME or --config NAME out of argv: the overrides can't be read before the recipe is."""
  rest, name, args = [], '', iter(argv)
  for arg in args:
    key, equals, value = arg.lstrip('-').partition('=')
    if arg.startswith('-') and key == 'config':
      name = value if equals else next(args, '')
    else:
      rest.append(arg)
  return rest, name


def _workdir(argv):
  """--workdir=FOLDER or --workdir FOLDER; the overrides can't be read before the run's configuration is."""
  found = re.findall(r'(?:^|\0)--?workdir[=\0]([^\0]*)', '\0'.join(argv))
  return found[-1] if found else ''


def _compilation_cache():
  """Compiled programs are kept for the next start, unless the environment says where or jax is told otherwise."""
  import jax
  if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    jax.config.update('jax_compilation_cache_dir', os.path.join(home, 'lab', 'jax'))


def exit_code(error: Exception) -> int | None:
  """The exit code that an exception asks for; None for a defect of the lab, which shows its trace."""
  if getattr(error, 'exit_code', None) is not None:
    return error.exit_code
  text = str(error)
  if isinstance(error, OSError) and error.errno == errno.ENOSPC:
    return 6
  if isinstance(error, MemoryError) or 'RESOURCE_EXHAUSTED' in text or 'Out of memory' in text:
    print('error: out of memory. What helps most: a smaller config.input.batch_size, a larger '
          'config.mesh.fsdp, recomputation (config.model.remat=True)', file=sys.stderr)
    return 6
  if type(error).__name__ == 'JaxRuntimeError' and _processes() > 1:
    print('error: the processes of this run lost each other; the message of the one that ended first tells why',
          file=sys.stderr)
    return 7
  return None


def _processes() -> int:
  if 'jax' not in sys.modules or 'JAX_COORDINATOR_ADDRESS' not in os.environ and not FLAGS.is_parsed():
    return 1
  import jax
  from lab import peers
  return peers.count() if jax.distributed.is_initialized() else 1


if __name__ == '__main__':
  sys.exit(main(sys.argv))
