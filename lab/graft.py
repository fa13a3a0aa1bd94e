"""Weights from elsewhere: another run's checkpoint or a .safetensors file, nothing taken silently."""

import contextlib
import difflib
import functools
import logging
import os
import re
from typing import Any

import jax
import numpy as np

from lab.checkpoint import CheckpointError, Checkpoints
from lab.sharding import paths

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


def _slice(array, dtype, index):
  return np.asarray(array[index], dtype)


def _run_weights(source):
  path, colon, which = source.rpartition(':')
  if not colon or os.sep in which:
    path, which = source, 'latest'
  if not os.path.isdir(path):
    raise CheckpointError(f'init_from = {source}: no such folder{_nearby(path)}')
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
