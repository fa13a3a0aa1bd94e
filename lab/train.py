"""The only loop. Exact: the same config, seed and step give the same bits on one mesh, however often it stopped."""

import contextlib
import math
import re
import time
from typing import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from ml_collections import ConfigDict

from data_pipelines import pipeline
from lab import evaluate, logs, mesh as meshes, metrics, optim, sharding
from lab.checkpoint import Checkpoints, digest
from lab.config import choice, flatten
from lab.graft import graft
from lab.task import ConfigError, Task, TrainState


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
                     ('input.bad_limit', 0), ('checkpoint.steps', 0), ('checkpoint.keep', -1)):
    if flatten(config)[key] < least:
      raise ConfigError(f'config.{key} = {flatten(config)[key]}: expected at least {least}')
  if config.checkpoint.keep == 0:
    raise ConfigError('config.checkpoint.keep = 0: expected at least 1, or -1 for all')
  if [*config.mesh.values()].count(-1) > 1 or any(n < 1 and n != -1 for n in config.mesh.values()):
    raise ConfigError(f'config.mesh = {config.mesh.to_dict()}: sizes are positive, and at most one is -1')
  try:
    re.compile(config.init_only)
  except re.error as e:
    raise ConfigError(f'config.init_only = {config.init_only!r}: not a regular expression: {e}') from None


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
  """The training step (state, batch) -> (state, sums), compiled for the layout of `like`; state is donated."""
  def step(state, batch):
    key = jax.random.fold_in(jax.random.key(config.seed, impl=config.prng), state.step)
    grads, (loss, stats, sums) = jax.grad(_with_loss(task.loss), has_aux=True)(
        state.params, state.stats, batch, key, state.step)
    params, opt, ok, norms = tx.update(loss, grads, state.opt, state.params, state.step)
    stats = optim.select(ok, stats, state.stats)
    return TrainState(state.step + 1, params, stats, opt), {'loss': (loss, jnp.float32(1)), **sums, **norms}

  layout = jax.tree.map(lambda x: x.sharding, like)
  return jax.jit(step, donate_argnums=0, in_shardings=(layout, NamedSharding(mesh, meshes.BATCH)),
                 out_shardings=(layout, NamedSharding(mesh, P())))


def _with_loss(loss):
  def both(*args):
    value, (stats, sums) = loss(*args)
    return value, (value, stats, sums)
  return both


def run(task: Task, config, workdir: str) -> dict[str, float]:
  """Trains to config.total_steps, from the newest checkpoint in workdir if there is one; returns the last scores."""
  mesh = meshes.make(config.mesh)
  with jax.set_mesh(mesh):
    source, size = task.source('train'), config.input.batch_size
    batches = pipeline.Batches(source, config.input, size, meshes.rows(mesh, size).fed, train=True, seed=config.seed)
    tx, _ = optim.make(config.optim, config.total_steps)
    like = abstract(task, tx, config, batches.spec(1), mesh)
    data = pipeline.fingerprint(source, batches.index)
    with contextlib.closing(Checkpoints(workdir, config, data)) as checkpoints:
      state = start(task, tx, config, like, batches.spec(1), checkpoints)
      batches.step, batches.bad = int(state.step), list(checkpoints.notes.get('bad_records', ()))
      step = make_step(task, tx, config, like, mesh)
      with contextlib.closing(logs.Log(workdir, config, batches.step)) as log:
        state = _loop(config, mesh, batches, step, state, checkpoints, log, evaluate.make(task, config, mesh))
      scores = next((r for r in reversed(logs.rows(workdir)) if r['split'] == 'eval'), {})
      scores = {k: v for k, v in scores.items() if k not in ('step', 'split')}
      _close(workdir, checkpoints, state, scores)
      return scores


def start(task, tx, config, like, spec, checkpoints) -> TrainState:
  """The state to go on from: the newest good checkpoint, or a new one, with grafted weights if config.init_from."""
  checkpoints.clean()
  state = checkpoints.resume(like)
  if state is not None:
    if int(state.step) > config.total_steps:
      raise ConfigError(f'the run is at step {int(state.step)}, beyond config.total_steps = {config.total_steps}')
    logs.say(f'resumed at step {int(state.step)} from {checkpoints.path(int(state.step))}')
    return state
  logs.say(f'no checkpoint in {checkpoints.folder}: starting at step 0')
  layout = jax.tree.map(lambda x: x.sharding, like)
  state = jax.jit(initial(task, tx, config, spec), out_shardings=layout)()
  if config.init_from:
    params = graft(state.params, config.init_from, config.init_only, config)
    ema = jax.tree.map(jnp.copy, params) if config.optim.ema else {}
    state = state._replace(params=params, opt=state.opt._replace(ema=ema))
  return state


def _loop(config, mesh, batches, step, state, checkpoints, log, judge) -> TrainState:
  """From state.step to the end; whatever is due at a step is written before the checkpoint of that step."""
  log.describe(state.params)
  watch = _Watch(config.optim.max_nonfinite, batches)
  i, total, stream = int(state.step), config.total_steps, iter(batches)
  if checkpoints.notes.get('evaluation_due'):
    _evaluate(i, state, judge, log)
  if i < total:
    logs.say(f'training from step {i} to {total}; the first step compiles')
  while i < total:
    asked = time.monotonic()
    batch = meshes.place(mesh, next(stream), config.input.batch_size)
    log.waited += time.monotonic() - asked
    state, sums = step(state, batch)
    i += 1
    watch(i, sums)
    if i % config.log_steps == 0 or i == total:
      scalars = metrics.ratios(jax.device_get(sums)) | ({'bad_records': len(batches.bad)} if batches.bad else {})
      log.row(i, 'train', scalars)
      log.progress(i, scalars, config.input.batch_size)
    aside = time.monotonic()
    due = i == total or config.eval_steps and i % config.eval_steps == 0
    scores = _evaluate(i, state, judge, log) if due else None
    best = config.checkpoint.best.lstrip('-')
    if scores and best and best not in scores:
      raise ConfigError(f'config.checkpoint.best = {best!r}: evaluation gives {", ".join(sorted(scores))}')
    stop = meshes.preempted(i) and (i < total or scores is None)
    if stop or i == total or config.checkpoint.steps and i % config.checkpoint.steps == 0:
      watch.settle()
      log.flush()
      checkpoints.notes = {'bad_records': sorted(set(meshes.gather(batches.bad))),
                           'evaluation_due': bool(due and scores is None)}
      (checkpoints.finish if stop or i == total else checkpoints.save)(i, state, scores)
    log.aside += time.monotonic() - aside
    if stop:
      raise meshes.Preempted(f'stopped at step {i} and saved; start the same command again to go on')
  return state


def _evaluate(i, state, judge, log):
  """Evaluates and logs; None if the run was asked to stop meanwhile: then the next start does it."""
  try:
    scores, pictures = judge(optim.weights(state.params, state.opt), state.stats)
  except evaluate.Interrupted:
    return None
  log.row(i, 'eval', scores)
  log.pictures(i, pictures)
  logs.say(f'evaluation at step {i}: {evaluate.summary(scores)}')
  return scores


class _Watch:
  """Ends the run after too many non-finite updates in a row; looks one step back, so as not to wait for the device."""

  def __init__(self, limit: int, batches):
    self.limit, self.batches, self.last = limit, batches, None

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
    names = ', '.join(self.batches.names(step - 1))
    text = (f'step {step}: {", ".join(bad)} not finite ({row} in a row); the update was skipped. Records of the batch: '
            f'{names}')
    if row > self.limit:
      raise NonFinite(f'{text}. The parameters are still those of the last good step. Look at these records and the '
                      'learning rate, then start the same command again: it resumes from the newest checkpoint')
    logs.log.warning(text)


def _close(workdir, checkpoints, state, scores):
  """The summary: what was reached, where it lies, what to type next."""
  step = int(state.step)
  logs.say('\n'.join((
      '', f'Done: {step} steps. {evaluate.summary(scores)}',
      f'  state digest    {digest(state)}',
      f'  checkpoint      {checkpoints.path(step)}',
      f'  metrics         {workdir}/metrics.jsonl and {workdir}/tensorboard',
      f'  pictures        {workdir}/pictures',
      'Next:',
      f'  tensorboard --logdir={workdir}/tensorboard',
      '  the same command with --mode=predict --input=<picture, folder or film>, or with --mode=eval',
  )))


@contextlib.contextmanager
def restored(task: Task, config, workdir: str, which: str, spec: dict | None = None):
  """(mesh, step, params, stats) of a checkpoint, for evaluation and prediction; weights only, no optimizer."""
  mesh = meshes.make(config.mesh)
  with jax.set_mesh(mesh):
    tx, _ = optim.make(config.optim, config.total_steps)
    if spec is None:
      uncached = ConfigDict({**config.input.to_dict(), 'cache': False})
      spec = pipeline.Batches(task.source('eval'), uncached, 1, (0,), train=False).spec(1)
    like = abstract(task, tx, config, spec, mesh)
    with contextlib.closing(Checkpoints(workdir, config)) as checkpoints:
      step, params, stats = checkpoints.weights(which, like)
    yield mesh, step, params, stats
