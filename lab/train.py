"""The only loop. Exact: the same config, seed and step give the same bits on one mesh, however often it stopped."""

import contextlib
import math
import os
import re
from typing import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from ml_collections import ConfigDict

from data_pipelines import pipeline
from lab import accumulate, beginning, evaluate, files, flops, ledger as ledgers, logs, memory, mesh as meshes, metrics
from lab import optim, peers, programs, sharding, workers
from lab.checkpoint import Checkpoints
from lab.checksums import digest
from lab.config import choice, core, flatten
from lab.graft import continued, fill, graft
from lab.ledger import Ledger
from lab.nn import kernels
from lab.programs import Program
from lab.task import ConfigError, Task, TrainState


ASSETS = 'assets'      # folder in the workdir of what a task keeps


class NonFinite(Exception):
  """More updates in a row than allowed had a loss or gradient that is not finite."""
  exit_code = 4


def check(config) -> None:
  """Raises ConfigError for core settings that can't run; needs no device."""
  optim.check(config)
  choice(config, 'platform', ('', 'cpu', 'gpu', 'tpu'))
  choice(config, 'prng', ('threefry2x32', 'rbg'))
  for key, least in (('total_steps', 1), ('log_steps', 1), ('eval_steps', 0), ('eval_pictures', 0),
                     ('input.batch_size', 1), ('input.eval_batch_size', 1), ('input.prefetch', 1), ('input.threads', 0),
                     ('input.workers', 0),
                     ('input.bad_limit', 0), ('checkpoint.steps', 0), ('checkpoint.keep', -1), ('profile.start', 0),
                     ('profile.steps', 0), ('peak_tflops', 0), ('processes.start_s', 1),
                     ('processes.heartbeat_s', 4), ('lr_find.steps', 5), ('early_stop.patience', 0),
                     ('early_stop.delta', 0)):
    if flatten(config)[key] < least:
      raise ConfigError(f'config.{key} = {flatten(config)[key]}: expected at least {least}')
  if config.checkpoint.keep == 0:
    raise ConfigError('config.checkpoint.keep = 0: expected at least 1, or -1 for all')
  if [*config.mesh.values()].count(-1) > 1 or any(n < 1 and n != -1 for n in config.mesh.values()):
    raise ConfigError(f'config.mesh = {config.mesh.to_dict()}: sizes are positive, and at most one is -1')
  if not 0 < config.lr_find.low < config.lr_find.high:
    raise ConfigError(f'config.lr_find.low = {config.lr_find.low}: expected more than 0 and less than lr_find.high = '
                      f'{config.lr_find.high}')
  if config.early_stop.patience and not config.checkpoint.best:
    raise ConfigError(f'config.early_stop.patience = {config.early_stop.patience}: expected 0, for checkpoint.best is '
                      'not set: there is no metric to wait for')
  if config.early_stop.delta != (default := core().early_stop.delta) and not config.early_stop.patience:
    raise ConfigError(f'config.early_stop.delta = {config.early_stop.delta}: expected {default}, for patience is 0')
  if config.init_from and config.continue_from:
    raise ConfigError('config.init_from and config.continue_from are both set: weights come from one of them')
  try:
    re.compile(config.init_only)
  except re.error as e:
    raise ConfigError(f'config.init_only = {config.init_only!r}: not a regular expression: {e}') from None
  if not config.init_from and config.init_only != (default := core().init_only):
    raise ConfigError(f'config.init_only = {config.init_only!r}: expected {default!r}, for init_from is not set')
  if not all(isinstance(x, tuple) and [*map(type, x)] == [str, str] and x[1] for x in config.init_parts):
    raise ConfigError(f'config.init_parts = {config.init_parts!r}: expected ((prefix, run or .safetensors file), ...)')
  if 'data' in config:
    files.check('config.data.dir', config.data.dir, records=True)
  for key in ('init_from', 'continue_from', 'runs_root'):
    files.check(f'config.{key}', config[key])
  for prefix, path in config.init_parts:
    files.check(f'config.init_parts[{prefix!r}]', path)
  prefixes = [prefix for prefix, _ in config.init_parts]
  if len({*prefixes}) < len(prefixes):
    raise ConfigError(f'config.init_parts = {config.init_parts!r}: a prefix is there twice')
  for key in ('init_from', 'continue_from') if '' in prefixes else ():
    if config[key]:
      raise ConfigError(f'config.{key} = {config[key]!r}: expected \'\', for all weights come from init_parts')


def feed(source: pipeline.Source, config, rows) -> pipeline.Batches:
  """The training batches of the source of this config; of each global one the `rows` that this process feeds."""
  if config.input.workers:
    return workers.WorkerBatches(source, config, rows)
  return pipeline.Batches(source, config.input, config.input.batch_size, rows, train=True, seed=config.seed)


def initial(task: Task, tx: optim.Optimizer, config, spec: dict) -> Callable[[], TrainState]:
  """A function that makes the state of step 0 for batches like `spec` (name -> ShapeDtypeStruct)."""
  def make():
    batch = {k: jnp.zeros(s.shape, s.dtype) for k, s in spec.items()}
    params, stats = task.init(jax.random.key(config.seed, impl=config.prng), batch)
    return TrainState(jnp.int32(0), params, stats, tx.init(params))
  return make


def abstract(task: Task, tx: optim.Optimizer, config, spec: dict, mesh) -> TrainState:
  """The state's shapes, types and shardings, without any array."""
  shapes = jax.eval_shape(initial(task, tx, config, spec))
  layout = sharding.layout(task.rules, shapes, mesh)
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout)


def make_step(task: Task, tx: optim.Optimizer, config, like: TrainState, mesh) -> Callable:
  """The jitted training step (state, batches [micro-batches, B, ...]) -> (state, sums); state is donated."""
  def step(state, batches):
    key = jax.random.fold_in(jax.random.key(config.seed, impl=config.prng), state.step)
    loss, grads, stats, sums = accumulate.gradients(task.loss, state.params, state.stats, batches, key, state.step)
    params, opt, ok, norms = tx.update(loss, grads, state.opt, state.params, state.step)
    stats = optim.select(ok, stats, state.stats)
    return TrainState(state.step + 1, params, stats, opt), {'loss': (loss, jnp.float32(1)), **sums, **norms}

  layout = jax.tree.map(lambda x: x.sharding, like)
  return jax.jit(step, donate_argnums=0, in_shardings=(layout, NamedSharding(mesh, meshes.MICRO)),
                 out_shardings=(layout, NamedSharding(mesh, P())),
                 compiler_options=programs.options(mesh.devices.flat, task.gpu))


def run(task: Task, config, workdir: str, began: float | None = None) -> dict[str, float]:
  """Trains to config.total_steps, from the newest checkpoint in workdir if there is one; returns the last scores.

  `began`, in seconds since the epoch, is when the program was started; the ledger counts from there.
  """
  mesh, folder = meshes.make(config.mesh), files.local(workdir)
  os.makedirs(folder, exist_ok=True)
  if task.files and jax.process_index() == 0:
    _keep(os.path.join(folder, ASSETS), task.files())
  with jax.set_mesh(mesh), contextlib.closing(Ledger(folder, jax.process_index() == 0, began)) as ledger:
    source = task.source('train')
    with contextlib.closing(feed(source, config, meshes.rows(mesh, config.input.batch_size).fed)) as batches:
      batches.begin()      # workers load what they need while the run does
      return _trained(task, config, workdir, mesh, source, batches, ledger)


def _trained(task, config, workdir, mesh, source, batches, ledger) -> dict[str, float]:
  """As run, of the batches of the source."""
  folder, tx = files.local(workdir), optim.make(config.optim, config.total_steps)
  like = abstract(task, tx, config, batches.spec(1), mesh)
  memory.check_state(like)
  data = pipeline.fingerprint(source, batches.index)
  peers.agree('data', {'the training split': data})
  with contextlib.closing(Checkpoints(workdir, config, data)) as checkpoints:
    ledger.enter('restore' if checkpoints.steps() else 'start')
    state = start(task, tx, config, like, batches.spec(1), checkpoints)
    ledger.at(int(state.step), 'resumed')
    ledger.enter('start')
    batches.step = accumulate.before(config.optim, int(state.step))
    batches.bad = list(checkpoints.notes.get('bad_records', ()))
    due = bool(checkpoints.notes.get('evaluation_due'))
    with contextlib.closing(logs.Log(workdir, config, int(state.step), ledger, due)) as log:
      step = _program(make_step(task, tx, config, like, mesh), config, ledger, log)
      if int(state.step) == 0:
        step = beginning.before(task, step, config, like, mesh, ledger)
      log.utilisation = _flops(task, config, batches, like)
      judge = evaluate.make(task, config, mesh, ledger)
      state, reason = _loop(config, mesh, batches, step, state, checkpoints, log, judge)
    scores = next((r for r in reversed(logs.rows(folder)) if r['split'] == 'eval'), {})
    scores = {k: v for k, v in scores.items() if k not in ('step', 'split')}
    ledger.at(int(state.step), 'end')
    _close(workdir, folder, checkpoints, state, scores, reason)
    return scores


def _keep(folder, files):
  """Writes what a run keeps beside its checkpoints. Raises ConfigError where other files are kept there already."""
  os.makedirs(folder, exist_ok=True)
  for name, text in files.items():
    path = os.path.join(folder, name)
    if not os.path.exists(path):
      logs.write_atomically(path, text)
    with open(path, encoding='utf-8', newline='') as f:
      if f.read() != text:
        raise ConfigError(f'{path}: the run began with another {name} than that of its data set now; choose another '
                          '--workdir')


def _program(function, config, ledger, log) -> Program:
  """The step as a program that tells at each compilation what memory it needs."""
  def look(compiled, args):
    need = memory.check_step(compiled, *args)
    logs.log.info('%s', need.text())
    log.write('memory.json', {**need._asdict(), 'limit': None if need.free is None else need.free + need.in_use})
  o = config.optim
  shapes = 2 if o.accumulate > 1 and 0 < o.accumulate_from < config.total_steps else 1
  return Program('the training step', function, ledger, shapes, look)


def _flops(task, config, batches, like) -> float:
  """Seconds that a micro-batch would take at the devices' peak: model FLOPs over FLOP/s; 0 if the peak is unknown."""
  peak = 1e12 * config.peak_tflops or flops.peak(jax.devices()[0].device_kind)
  if not peak:
    return 0.0
  batch = {k: jax.ShapeDtypeStruct(s.shape, s.dtype) for k, s in batches.spec(config.input.batch_size).items()}
  key = jax.eval_shape(lambda: jax.random.key(0, impl=config.prng))
  with kernels.counted():
    return flops.training(task.loss, like.params, like.stats, batch, key, like.step) / (peak * jax.device_count())


def start(task, tx, config, like, spec, checkpoints) -> TrainState:
  """The state to go on from: the newest good checkpoint, or a new one, grafted or continued as the config says."""
  checkpoints.clean()
  state = checkpoints.resume(like)
  if state is not None:
    logs.say(f'resumed at step {int(state.step)} from {checkpoints.path(int(state.step))}')
  else:
    layout = jax.tree.map(lambda x: x.sharding, like)
    state = jax.jit(initial(task, tx, config, spec), out_shardings=layout)()
    if config.init_from:
      params = graft(state.params, config.init_from, config.init_only, config, config.runs_root)
      ema = jax.tree.map(jnp.copy, params) if config.optim.ema else {}
      state = state._replace(params=params, opt=state.opt._replace(ema=ema))
    if config.continue_from:
      state = continued(state, config.continue_from, config.optim.keep_moments, config.runs_root)
    if config.init_parts:      # last: wherever the rest comes from
      params, ema = (fill(x, config.init_parts, config.optim.stacked, config.runs_root) if x else x
                     for x in (state.params, state.opt.ema))
      state = state._replace(params=params, opt=state.opt._replace(ema=ema))
    logs.say(f'no checkpoint in {checkpoints.folder}: starting at step {int(state.step)}')
  if int(state.step) > config.total_steps or not checkpoints.agreed() and int(state.step) == config.total_steps:
    raise ConfigError(f'the run is at step {int(state.step)}, beyond config.total_steps = {config.total_steps}'
                      f'{" or there already; a larger one goes on" * bool(config.continue_from)}')
  o, joint = config.optim, int(state.opt.joint.step)
  if joint >= 0 and o.continuation == 'restart' and config.total_steps - joint < o.continuation_steps:
    raise ConfigError(f'config.optim.continuation_steps = {o.continuation_steps}: expected at most the '
                      f'{config.total_steps - joint} updates from step {joint} to config.total_steps, for '
                      'optim.continuation = \'restart\' would never reach its peak')
  return state


def _loop(config, mesh, batches, step, state, checkpoints, log, judge) -> tuple[TrainState, str]:
  """From state.step to the end, and why that came early; what is due at a step is written before its checkpoint."""
  log.describe(state.params)
  ledger, watch, pace = log.ledger, _Watch(config, batches), logs.Pace(log.ledger.began)
  i, total, stream = int(state.step), config.total_steps, iter(batches)
  if checkpoints.notes.get('evaluation_due'):
    _make_up(i, state, checkpoints, log, judge)
  reason = _stalled(config, log.workdir)
  if i < total and not reason:
    checkpoints.settle()                  # as before each save, what is not kept goes
    checkpoints.wait_for_space(state)     # or it would end at its first save, with all that it had done
    logs.say(f'training from step {i} to {total}; the first step compiles')
  with contextlib.closing(logs.Profile(config.profile, log.workdir, i)) as profile, contextlib.closing(stream):
    while i < total and not reason:
      ledger.enter('save')
      profile(i)
      ledger.enter('wait')
      micro = [next(stream) for _ in range(accumulate.count(config.optim, i))]
      ledger.enter('step')
      state, sums = step(state, meshes.place_stacked(mesh, micro, config.input.batch_size))
      i += 1
      watch(i, sums)
      ledger.at(i)
      peers.note(i)
      pace(i, ledger.seconds['wait'] + ledger.seconds['step'])
      if i % config.log_steps == 0 or i == total:
        _log(i, sums, batches, config, log)
      due = i == total or config.eval_steps and i % config.eval_steps == 0
      scores = _evaluate(i, state, judge, log) if due else None
      reason = '' if scores is None else _stalled(config, log.workdir)
      end = i == total or bool(reason)
      stop = meshes.preempted(i) and (not end or scores is None)
      if stop or end or config.checkpoint.steps and i % config.checkpoint.steps == 0:
        watch.settle()
        log.flush()
        with ledger.during('save'):
          checkpoints.notes = {'bad_records': sorted(set(meshes.gather(batches.bad))),
                               'evaluation_due': bool(due and scores is None)}
          (checkpoints.finish if stop or end else checkpoints.save)(i, state, scores)
        ledger.at(i, 'saved')
      if stop:
        raise meshes.Preempted(f'stopped at step {i} and saved; start the same command again to go on')
  ledger.enter('save')
  return state, reason


def _make_up(i, state, checkpoints, log, judge):
  """Does the evaluation in which the run was stopped at step i; its checkpoint has the scores from then on."""
  scores = _evaluate(i, state, judge, log)
  if scores is None:
    raise meshes.Preempted(f'stopped at step {i}, whose evaluation is still due; start the same command again to go on')
  log.flush()
  with log.ledger.during('save'):
    checkpoints.evaluated(i, scores)


def _stalled(config, workdir) -> str:
  """Why the run has to end by config.early_stop, or ''; alike on all processes, of which only the first has the log."""
  if not config.early_stop.patience:
    return ''
  return meshes.gather([evaluate.stalled(config, logs.rows(workdir) if jax.process_index() == 0 else [])])[0]


def _log(i, sums, batches, config, log):
  """The row of a training step, with both counters: examples seen, and the micro-batches they came in."""
  micro = accumulate.before(config.optim, i)
  scalars = metrics.ratios(jax.device_get(sums)) | {'examples_seen': micro * config.input.batch_size}
  if config.optim.accumulate > 1:
    scalars['micro_batches'] = micro
  if batches.bad:
    scalars['bad_records'] = len(batches.bad)
  log.row(i, 'train', scalars)
  log.progress(i, scalars, micro)


def _evaluate(i, state, judge, log):
  """Evaluates and logs the weights, and the raw ones beside averaged ones; returns the scores.

  None if the run was asked to stop meanwhile: then the next start does it. Raises ConfigError if they lack the best.
  """
  both = {'eval': optim.weights(state.params, state.opt)}
  if both['eval'] is not state.params:
    both['eval_raw'] = state.params
  with log.ledger.during('evaluate'):
    try:
      found, pictures = judge(both, state.stats)
    except evaluate.Interrupted:
      return None
    log.pictures(i, pictures)
    for split, scores in found.items():
      log.row(i, split, scores)
      logs.say(f'evaluation at step {i}{" of the raw weights" * (split != "eval")}: {evaluate.summary(scores)}')
  peers.meet()      # the others have no pictures to write
  log.ledger.at(i, 'evaluated')
  scores, best = found['eval'], log.config.checkpoint.best.lstrip('-')
  if best and best not in scores:
    raise ConfigError(f'config.checkpoint.best = {best!r}: evaluation gives {", ".join(sorted(scores))}')
  return scores


class _Watch:
  """Ends the run after too many non-finite updates in a row; looks one step back, so as not to wait for the device."""

  def __init__(self, config, batches):
    self.optim, self.batches, self.last = config.optim, batches, None

  def __call__(self, step, sums):
    self.settle()
    self.last = step, sums

  def settle(self):
    """Looks at the last step that was noted."""
    if self.last is None:
      return
    step, sums = self.last
    self.last = None
    row = int(sums['skipped_in_a_row'][0])
    if not row:
      return
    sums = jax.device_get(sums)
    bad = sorted((k for k, (total, _) in sums.items() if not math.isfinite(total)), key=lambda k: (k != 'loss', k))
    micro = range(accumulate.before(self.optim, step - 1), accumulate.before(self.optim, step))
    names = ', '.join(name for i in micro for name in self.batches.names(i))
    text = (f'step {step}: {", ".join(bad)} not finite ({row} in a row); the update was skipped. Records of the batch: '
            f'{names}')
    if row > self.optim.max_nonfinite:
      raise NonFinite(f'{text}. The parameters are still those of the last good step. Look at these records and the '
                      'learning rate, then start the same command again: it resumes from the newest checkpoint')
    logs.log.warning(text)


def _close(workdir, folder, checkpoints, state, scores, reason):
  """The summary: what was reached, where it lies, what to type next."""
  step = int(state.step)
  logs.say('\n'.join((
      '', f'Done: {step} steps{f", stopped early: {reason}" * bool(reason)}. {evaluate.summary(scores)}',
      f'  state digest    {digest(state)}',
      f'  checkpoint      {checkpoints.path(step)}',
      f'  metrics         {workdir}/metrics.jsonl and {workdir}/tensorboard',
      f'  pictures        {workdir}/pictures',
      f'  goodput         {ledgers.table(ledgers.summary(folder))}',
      'Next:',
      f'  tensorboard --logdir={workdir}/tensorboard',
      '  the same command with --mode=predict --input=<file, folder or text>, or with --mode=eval',
  )))


@contextlib.contextmanager
def restored(task: Task, config, workdir: str, which: str, spec: dict | None = None):
  """(mesh, step, params, stats) of a checkpoint, for evaluation and prediction; weights only, no optimizer."""
  mesh = meshes.make(config.mesh)
  with jax.set_mesh(mesh):
    tx = optim.make(config.optim, config.total_steps)
    if spec is None:
      uncached = ConfigDict({**config.input.to_dict(), 'cache': False})
      spec = pipeline.Batches(task.source('eval'), uncached, 1, (0,), train=False).spec(1)
    like = abstract(task, tx, config, spec, mesh)
    with contextlib.closing(Checkpoints(workdir, config)) as checkpoints:
      step, params, stats = checkpoints.weights(which, like)
    yield mesh, step, params, stats
