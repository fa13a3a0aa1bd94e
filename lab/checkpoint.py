"""Orbax's door: save, resume exactly, restore weights.

  workdir/checkpoints/<step>/   params  ema  stats  moments  clock  meta
A step exists once Orbax has renamed its folder, or marked it in a bucket (gs://), which is its last act: a kill at any
moment leaves the step before.
`meta` holds the config, package versions, the data's fingerprint, the evaluation's scores and a checksum of every
array, compared at each restore. Nothing in a checkpoint is code.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import time
from typing import Any, Mapping

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from lab import files, mesh as meshes, peers
from lab.checksums import below, described, shape
from lab.logs import versions
from lab.sharding import paths
from lab.task import TrainState

log = logging.getLogger('lab')
HEADS = {'params': 'params', 'ema': 'opt/ema', 'stats': 'stats', 'moments': 'opt/inner'}    # item -> its paths
FAILURES = 3          # background saves in a row that may fail before the run ends


class CheckpointError(Exception):
  """A checkpoint that is missing, broken, foreign, or can't be written."""
  exit_code = 5


class Foreign(CheckpointError):
  """A checkpoint of another task or network."""


class DiskFull(Exception):
  """No room for the next checkpoint; the one before it is safe."""
  exit_code = 6


def _write_small_arrays_whole():
  """Of what all devices hold each would write a slice: for small arrays that takes longer to compile than to write."""
  absl = logging.getLogger('absl')
  level = absl.level
  absl.setLevel(logging.ERROR)          # orbax warns that this is another handler than its own
  ocp.type_handlers.register_type_handler(
      jax.Array, ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=1 << 20), override=True)
  absl.setLevel(level)


_write_small_arrays_whole()


def split(state: TrainState) -> dict[str, Any]:
  """The items of a checkpoint; weights lie apart from what only training needs. Empty ones are left out."""
  opt = state.opt
  items = {'params': state.params, 'ema': opt.ema, 'stats': state.stats, 'moments': opt.inner,
           'clock': {'step': state.step, 'skipped': opt.skipped, 'rate': opt.rate, 'joint': opt.joint}}
  return {k: v for k, v in items.items() if jax.tree.leaves(v)}


def join(items: Mapping[str, Any], like: TrainState) -> TrainState:
  """The inverse of split."""
  clock, opt = items['clock'], like.opt
  return TrainState(clock['step'], items['params'], items.get('stats', like.stats), opt._replace(
      inner=items.get('moments', opt.inner), ema=items.get('ema', opt.ema), skipped=clock['skipped'],
      rate=clock['rate'], joint=clock['joint']))


class Checkpoints:
  """The checkpoints of one workdir. The disk is asked each time: nothing about it is remembered.

  What cleans, saves, resumes or finds a step waits for the other processes: all call it, in the same order.
  """

  def __init__(self, workdir: str, config=None, data: str = ''):
    self.folder = os.path.join(workdir if files.remote(workdir) else os.path.abspath(workdir), files.CHECKPOINTS)
    self.config, self.data, self.failures, self.writing, self.retries = config, data, 0, None, 0
    self.notes: dict[str, Any] = {}      # what else a run wants back at its next start; JSON-able
    self.orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
    # neither waits for a write in progress nor, at its end, for other processes, of which one may have failed
    self.reader = ocp.CompositeCheckpointHandler()

  def path(self, step: int) -> str:
    """The folder of a step."""
    return os.path.join(self.folder, str(step))

  def steps(self) -> list[int]:
    """Complete steps on disk, ascending as numbers; other names are none of ours."""
    return sorted(int(n) for n in files.names(self.folder) if re.fullmatch(r'0|[1-9]\d*', n) and files.exists(
        os.path.join(self.folder, n, 'meta', 'metadata')) and self._marked(n))

  def agreed(self) -> list[int]:
    """`steps` as the first process sees them: a shared disk may still show others an older list. All call it."""
    return meshes.gather(self.steps() if jax.process_index() == 0 else ())

  def _marked(self, name) -> bool:
    return not files.remote(self.folder) or files.exists(os.path.join(self.folder, name, files.MARK))

  def meta(self, step: int) -> dict[str, Any]:
    """What a step says of itself: config, versions, data, scores, notes, arrays (type, shape and checksum of each).

    Plain JSON, read without Orbax: any machine and any single process can. Raises CheckpointError if it is broken.
    """
    try:
      meta = json.loads(files.read(os.path.join(self.path(step), 'meta', 'metadata')))
      return meta if meta['arrays'] is not None else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
      raise CheckpointError(f'{self.path(step)}: its description is broken: {e!r}') from None

  def best(self, name: str) -> int | None:
    """The step with the best value of metric `name`, as `ranked` has it; None if none has one."""
    return next(iter(self.ranked(name)), None)

  def ranked(self, name: str) -> list[int]:
    """The steps with a value of metric `name` ('AP', or '-loss': less is better), best first, the later of equals."""
    sign, key = (-1, name[1:]) if name.startswith('-') else (1, name)
    scores = {}
    for step in self.steps() if name else ():
      try:
        scores[step] = self.meta(step)['scores']
      except CheckpointError as e:
        log.warning('%s', e)
    return [s for _, s in sorted(((sign * v[key], s) for s, v in scores.items() if key in v), reverse=True)]

  def clean(self) -> None:
    """Removes what an interrupted save or removal left. Raises CheckpointError where steps are there, none complete."""
    names, steps = files.names(self.folder), self.agreed()
    torn = sorted(int(n) for n in names if n.isdigit() and int(n) not in steps and self._marked(n))
    torn = meshes.gather(torn if jax.process_index() == 0 else ())
    if torn and not steps:
      raise CheckpointError(f'{self.folder} holds the incomplete checkpoints {torn} and no complete one: restore them, '
                            'or choose a new --workdir to start again')
    self._set_aside(torn)
    for name in names:
      left = '.orbax-checkpoint-tmp' in name or name.startswith('removed-') or name.isdigit() and not self._marked(name)
      if jax.process_index() == 0 and left:
        files.remove(os.path.join(self.folder, name))

  def _set_aside(self, steps) -> None:
    """Renames broken steps, so that their numbers can be written again and nothing counts them."""
    for step in steps if jax.process_index() == 0 else ():
      log.warning('checkpoint %d is broken; it is kept as %s', step, os.path.join(self.folder, f'broken-{step}'))
      files.remove(os.path.join(self.folder, f'broken-{step}'))
      files.rename(self.path(step), os.path.join(self.folder, f'broken-{step}'))

  def close(self) -> None:
    """Waits for the write in progress and ends the background threads; what went wrong was said before."""
    with contextlib.suppress(Exception):
      self.reader.close()
      self.orbax.close()

  # saving

  def save(self, step: int, state: TrainState, scores: Mapping[str, float] | None = None) -> None:
    """Starts to write a step in the background. A failed earlier write is reported here, and after three, fatal."""
    self.settle()
    if step in self.agreed():
      return
    self.wait_for_space(state)
    meta = {'step': step, 'config': json.loads(self.config.to_json()), 'versions': versions(), 'data': self.data,
            'scores': _finite(scores or {}), 'notes': self.notes, 'arrays': described(state)}
    items = {k: ocp.args.StandardSave(v) for k, v in split(state).items()}
    try:
      self.writing = step
      self.orbax.save(self.path(step), args=ocp.args.Composite(meta=ocp.args.JsonSave(meta), **items))
    except Exception as e:  # whatever the file system says, the run decides in one place
      self._failed(step, e)

  def settle(self) -> None:
    """Waits for the write in progress, then removes the steps that config.checkpoint does not keep."""
    if self.writing is not None:
      step = self.writing
      try:
        self.orbax.wait_until_finished()
      except Exception as e:
        self._failed(step, e)
      else:
        self.writing, self.failures = None, 0
        if files.remote(self.folder):
          self.retries = files.retries(self.retries)
    self._prune()
    peers.meet()      # the others have nothing to remove

  def finish(self, step: int, state: TrainState, scores=None) -> None:
    """Saves the last step of a run and waits until it is on disk. Raises where it isn't."""
    for _ in range(FAILURES):
      self.save(step, state, scores)
      self.settle()
      if step in self.agreed():
        return
    raise CheckpointError(f'checkpoint {step} could not be written to {self.folder}; steps there: {self.steps()}')

  def evaluated(self, step: int, scores: Mapping[str, float]) -> None:
    """Adds to a complete step the scores of the evaluation that was due there; then it counts as any other."""
    self.notes = {**self.notes, 'evaluation_due': False}
    if jax.process_index() == 0:      # the checksums are those of the arrays, which stay
      meta = {**self.meta(step), 'scores': _finite(scores), 'notes': self.notes}
      files.replace(os.path.join(self.path(step), 'meta', 'metadata'), json.dumps(meta).encode())
    self.settle()

  def _failed(self, step, error):
    self.writing, self.failures = None, self.failures + 1
    with contextlib.suppress(files.StorageError):
      for name in files.names(self.folder) if jax.process_index() == 0 else ():
        if name.startswith(f'{step}.orbax-checkpoint-tmp') or name == str(step) and not self._marked(name):
          files.remove(os.path.join(self.folder, name))      # or it would be in the way of the next try
    log.error('checkpoint %d was not written (%d in a row): %s', step, self.failures, files.reason(error))
    if 'No space left' in str(error) and not self.config.checkpoint.space_wait_s:
      raise DiskFull(f'checkpoint {step}: no space left in {self.folder}; complete steps: {self.steps()}') from None
    if self.failures >= FAILURES:
      raise CheckpointError(f'{self.failures} checkpoints in a row could not be written to {self.folder}: '
                            f'{files.reason(error)}') from error

  def wait_for_space(self, state: TrainState) -> None:
    """Returns when the disk has room for another step. Raises DiskFull after config.checkpoint.space_wait_s."""
    if files.remote(self.folder):
      return
    os.makedirs(self.folder, exist_ok=True)
    need = int(1.05 * sum(x.nbytes for x in jax.tree.leaves(state))) + (1 << 20)
    waited = 0.0
    while (free := shutil.disk_usage(self.folder).free) < need:
      if waited >= self.config.checkpoint.space_wait_s:
        raise DiskFull(f'the next checkpoint needs {need:,} bytes in {self.folder}, {free:,} are free; complete steps: '
                       f'{self.steps()}. Free some space and start the same command again')
      if not waited:
        log.warning('waiting for disk space: %s bytes needed, %s free', f'{need:,}', f'{free:,}')
      waited += 1
      time.sleep(1)

  def _prune(self):
    keep = self.config.checkpoint.keep
    if keep < 0 or jax.process_index() != 0:
      return
    steps = self.steps()
    for step in set(steps) - set(steps[max(len(steps) - max(keep, 1), 0):]) - {self.best(self.config.checkpoint.best)}:
      gone = self.path(step)
      if not files.remote(gone):                 # so that a half removed folder never looks like a step
        gone = os.path.join(self.folder, f'removed-{step}')
        files.rename(self.path(step), gone)
      files.remove(gone)

  # restoring

  def resume(self, abstract: TrainState) -> TrainState | None:
    """The newest good step as a state with the shardings of `abstract`; None where there is no checkpoint at all.

    A step that a process can't read or whose checksums differ is reported and the one before it taken; CheckpointError
    if none is good, or if the checkpoint belongs to another task or network. All processes call it.
    """
    steps, broken = self.agreed(), []
    for step in reversed(steps):
      meta = self._everywhere(step, abstract, lambda: self._known(step, abstract))
      state = meta and self._everywhere(step, abstract, lambda: join(self.restore(step, split(abstract)), abstract))
      state = state and self._everywhere(step, abstract, lambda: self._verified(state, meta, step))
      if state is not None:
        self._set_aside(broken)
        self.notes = meta['notes']
        return state
      broken.append(step)
    if steps:
      raise CheckpointError(f'none of the checkpoints {steps} in {self.folder} can be read; restore one of them, or '
                            'choose a new --workdir to start again')
    return None

  def _known(self, step, abstract):
    meta = self.meta(step)
    self._compare(step, meta, abstract)
    return meta

  def _verified(self, state, meta, step):
    verify(state, meta['arrays'], self.path(step))
    return state

  def _everywhere(self, step, abstract, read):
    """What read() gives, or None where a process finds the step broken: then none takes it.

    Where read() waits for the other processes, it has to fail on all of them or only after that.
    """
    found, why = None, ''
    try:
      found = read()
    except Foreign:
      raise
    except Exception as e:
      if self._unreachable(step, abstract, e):
        raise CheckpointError(f'{self.path(step)} can\'t be read: {files.reason(e)}') from e
      if isinstance(e, MemoryError) or 'RESOURCE_EXHAUSTED' in str(e):
        raise
      why = str(e).split('\n')[0] or repr(e)
    reasons = meshes.gather([why])
    for i, text in enumerate(reasons):
      if text:
        log.warning('checkpoint %s is broken%s, trying the one before: %s', self.path(step),
                    f' for process {i}' * (len(reasons) > 1), text)
    return None if any(reasons) else found

  def _unreachable(self, step, abstract, error) -> bool:
    """Whether a bucket only did not answer; Orbax takes an item whose listing is refused for one that is not there."""
    listed = files.remote(self.folder) and all(files.names(os.path.join(self.path(step), k)) for k in split(abstract))
    return files.away(self.folder, error) or listed and 'was not found in the checkpoint' in str(error)

  def weights(self, which: str, abstract: TrainState) -> tuple[int, Any, Any]:
    """(step, weights, stats) of step `which`: latest, best or a number; the averaged weights where they were kept."""
    step = self.find(which)
    meta = self.meta(step)
    self._compare(step, meta, abstract._replace(opt=()))
    name = 'ema' if files.isdir(os.path.join(self.path(step), 'ema')) else 'params'
    items = {name: abstract.params, **({'stats': abstract.stats} if jax.tree.leaves(abstract.stats) else {})}
    try:
      got = self.restore(step, items)
    except Exception as e:
      raise CheckpointError(f'{self.path(step)} can\'t be read: {e}') from e
    for item, tree in got.items():
      verify(tree, below(HEADS[item], meta['arrays']), self.path(step))
    return step, got[name], got.get('stats', abstract.stats)

  def arrays(self, step: int) -> dict[str, np.ndarray]:
    """path -> array of a step's weights, the averaged ones where they were kept; checked, of whatever network."""
    name = 'ema' if files.isdir(os.path.join(self.path(step), 'ema')) else 'params'
    folder = os.path.join(self.path(step), name)
    reader = ocp.PyTreeCheckpointer()
    shape = reader.metadata(folder).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shape)
    got = reader.restore(folder, restore_args=args)
    verify(got, below(HEADS[name], self.meta(step)['arrays']), folder)
    return dict(paths(got))

  def find(self, which: str) -> int:
    """'latest', 'best' or a number -> a step on disk. Raises CheckpointError naming the steps that are there."""
    steps = self.agreed()
    if not steps:
      raise CheckpointError(f'no checkpoint in {self.folder}; train first, or correct --workdir')
    if which == 'latest':
      return steps[-1]
    if which == 'best':
      name = self.meta(steps[-1])['config']['checkpoint']['best']
      best = meshes.gather([self.best(name)] if jax.process_index() == 0 else ())[0]
      if best is None:
        raise CheckpointError(f'{self.folder} has no best step: checkpoint.best = {name!r}; steps: {steps}')
      return best
    if not which.isdigit() or int(which) not in steps:
      near = sorted(steps, key=lambda s: abs(s - int(which)))[:3] if which.isdigit() else steps
      raise CheckpointError(f'{self.folder} has no step {which!r}; nearest: {sorted(near)}')
    return int(which)

  def restore(self, step: int, items: Mapping[str, Any]) -> dict[str, Any]:
    """The items of a step, such as 'params', as trees like the abstract ones given; not checked."""
    args = {k: ocp.args.StandardRestore(v) for k, v in items.items()}
    got = self.reader.restore(epath.Path(self.path(step)), args=ocp.args.Composite(**args))
    return {k: got[k] for k in items}

  def _compare(self, step, meta, abstract):
    """Refuses a checkpoint of another task or network; warns of every other difference."""
    want, have = {p: shape(x) for p, x in paths(abstract)}, {p: a[:2] for p, a in meta['arrays'].items()}
    missing = sorted(set(want) - set(have))
    # whoever wants weights alone knows nothing of the optimizer's arrays
    extra = sorted(p for p in set(have) - set(want) if abstract.opt != () or not p.startswith('opt/'))
    other = [f'{p} {have[p]} is not {want[p]}' for p in want if p in have and have[p] != want[p]]
    if missing or extra or other or (self.config is not None and meta['config']['task'] != self.config.task):
      raise Foreign(f'{self.path(step)} belongs to another run: task {meta["config"]["task"]}, arrays missing there '
                    f'{missing[:3]}, unknown here {extra[:3]}, of another shape {other[:3]}. '
                    f'{_changed(meta["config"], self.config)} Choose another --workdir')
    if self.config is not None and (text := _changed(meta['config'], self.config)):
      log.warning('the configuration differs from that of checkpoint %d: %s', step, text)
    if self.data and meta['data'] and self.data != meta['data']:
      log.warning('the data set is not the one of checkpoint %d: exact resume is not possible', step)
    if meta['versions'] != versions():
      log.warning('package versions differ from those of checkpoint %d: %s', step,
                  ', '.join(f'{k} {meta["versions"].get(k)} -> {v}' for k, v in versions().items()
                            if meta['versions'].get(k) != v))


def _finite(scores):
  return {k: v for k, v in scores.items() if np.isfinite(v)}


def verify(tree: Any, want: Mapping[str, list], where: str) -> None:
  """Raises CheckpointError naming the first array whose checksum differs from that in `want`."""
  wrong = [p for p, a in described(tree).items() if a != want.get(p)]
  if wrong:
    raise CheckpointError(f'{where}: array {wrong[0]} differs from its checksum ({len(wrong)} in all)')


def _changed(old: Mapping, new) -> str:
  from lab.config import flatten
  old, new = flatten(old), flatten(json.loads(new.to_json())) if hasattr(new, 'to_json') else {}
  return '; '.join(f'{k}: {old.get(k)!r} -> {new.get(k)!r}' for k in sorted(old.keys() | new.keys())
                   if new and k != 'assets' and old.get(k) != new.get(k))
