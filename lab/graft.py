"""State from elsewhere: weights of another run or of a .safetensors file, or all of a run that is to be continued."""

import contextlib
import difflib
import functools
import logging
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.checkpoint import HEADS, CheckpointError, Checkpoints, below, join, split, verify
from lab.sharding import paths
from lab.task import TrainState

log = logging.getLogger('lab')


def graft(params: Any, source: str, only: str = '.*', config=None) -> Any:
  """Fills parameters [any tree of arrays] from another run, `path[:best|latest|STEP]`, or a .safetensors file.

  Arrays are taken by equal path and shape, if `only` is found in the path. Every array is listed as taken, fresh (not
  there, or not wanted) or mismatched (other shape). Raises CheckpointError where nothing can be taken, and where a
  .safetensors file says in its metadata that it needs another value of a key in config.model (preprocess, backbone).
  """
  there = _safetensors(source, config) if source.endswith('.safetensors') else _run_weights(source)
  taken, fresh, mismatched, out = [], [], [], []
  for path, x in paths(params):
    new = there.get(path)
    if new is None or not re.search(only, path):
      fresh.append(path)
    elif new.shape != x.shape:
      mismatched.append(f'{path} {new.shape} is not {x.shape}')
    else:
      taken.append(path)
      x = jax.make_array_from_callback(x.shape, x.sharding, functools.partial(_slice, new, x.dtype))
    out.append(x)
  unused = sorted(set(there) - {p for p, _ in paths(params)})
  for name, items in (('taken', taken), ('fresh', fresh), ('mismatched', mismatched), ('not used', unused)):
    log.info('init_from %s: %d %s%s', source, len(items), name, ': ' + ', '.join(items) if items else '')
  if not taken:
    raise CheckpointError(f'init_from = {source}: none of its {len(there)} arrays fits; mismatched: {mismatched[:3]}')
  return jax.tree.unflatten(jax.tree.structure(params), out)


def continued(state: TrainState, source: str, moments: bool) -> TrainState:
  """The state of another run, `path[:best|latest|STEP]`, to go on from: its step, weights, stats and last rate.

  `state` is the new run's own, from which come the moments, where `moments` is False. Averaged weights that the other
  one did not keep begin with its weights. Raises CheckpointError where an array is missing there or has another shape.
  """
  path, which = _run(source, 'continue_from')
  with contextlib.closing(Checkpoints(path)) as checkpoints:
    step = checkpoints.find(which)
    arrays = checkpoints.meta(step)['arrays']
    items = {k: v for k, v in split(state).items() if (moments or k != 'moments')
             and (k != 'ema' or any(p.startswith('opt/ema/') for p in arrays))}
    here = {p: [x.dtype.name, list(x.shape)] for p, x in paths(join(items, state._replace(opt=state.opt._replace(
        inner=(), ema=()))))}
    there = {p: a[:2] for p, a in arrays.items() if p in here or moments and p.startswith('opt/inner/')}
    for p in sorted(here.keys() | there.keys()):
      if here.get(p) != there.get(p):
        raise CheckpointError(f'continue_from = {source}: {p} there is {there.get(p, "missing")}, here '
                              f'{here.get(p, "missing")}'
                              f'{"; keep_moments=False leaves the moments out" if p.startswith("opt/inner") else ""}')
    got = checkpoints.restore(step, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items))
    for name, tree in got.items():
      if HEADS.get(name):
        verify(tree, below(HEADS[name], arrays), checkpoints.path(step))
  new = join(got, state)
  if state.opt.ema and 'ema' not in got:
    new = new._replace(opt=new.opt._replace(ema=jax.tree.map(jnp.copy, new.params)))
  joint = new.opt.joint._replace(step=jnp.copy(new.step), rate=jnp.copy(new.opt.rate))
  log.info('continue_from %s: step %d, last rate %.3g; moments %s', source, step, float(new.opt.rate),
           'kept' if moments else 'started afresh')
  return new._replace(opt=new.opt._replace(joint=joint))


def _slice(array, dtype, index):
  return np.asarray(array[index], dtype)


def _run(source, key):
  """'path[:which]' -> the folder of a run and which of its steps."""
  path, colon, which = source.rpartition(':')
  if not colon or os.sep in which:
    path, which = source, 'latest'
  if not os.path.isdir(path):
    raise CheckpointError(f'{key} = {source}: no such folder{_nearby(path)}')
  return path, which


def _run_weights(source):
  path, which = _run(source, 'init_from')
  with contextlib.closing(Checkpoints(path)) as checkpoints:
    return checkpoints.arrays(checkpoints.find(which))


def _safetensors(source, config):
  from safetensors import SafetensorError, safe_open
  if not os.path.isfile(source):
    raise CheckpointError(f'init_from = {source}: no such file{_nearby(source)}')
  try:
    with safe_open(source, 'numpy') as f:
      needs, arrays = f.metadata() or {}, {k: f.get_tensor(k) for k in f.keys()}
  except SafetensorError as e:
    raise CheckpointError(f'init_from = {source}: not a safetensors file: {e}') from None
  has = config.model if config is not None and 'model' in config else {}
  for key, value in needs.items():
    if key in has and str(has[key]) != value:
      raise CheckpointError(f'init_from = {source}: its weights need config.model.{key} = {value!r}, not {has[key]!r}')
  return arrays


def _nearby(path):
  folder = os.path.dirname(os.path.abspath(path))
  near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder)) if os.path.isdir(folder) else []
  return f'; did you mean {", ".join(os.path.join(os.path.dirname(path), n) for n in near)}?' if near else ''
