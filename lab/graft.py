"""State from elsewhere: weights of another run or of a .safetensors file, or all of a run that is to be continued.

Instead of a run's `path[:best|latest|STEP]`, every function takes a reference of lab/artifact.py, such as
pose/best/best, to a run below the folder `root`. A folder of that very name comes first.
"""

import contextlib
import difflib
import functools
import logging
import os
import re
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lab import artifact, files
from lab.checkpoint import HEADS, CheckpointError, Checkpoints, join, split, verify
from lab.checksums import below
from lab.sharding import paths
from lab.task import ConfigError, TrainState

log = logging.getLogger('lab')


def graft(params: Any, source: str, only: str = '.*', config=None, root: str = '.') -> Any:
  """Fills parameters [any tree of arrays] from another run, `path[:best|latest|STEP]`, or a .safetensors file.

  Arrays are taken by equal path and shape, if `only` is found in the path. Every array is listed as taken, fresh (not
  there, or not wanted) or mismatched (other shape). Raises CheckpointError where nothing can be taken, and where a
  .safetensors file says in its metadata that it needs another value of a key in config.model (preprocess, backbone).
  """
  there = _arrays(source, 'init_from', root, config)
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


def fill(params: Any, parts: Sequence[tuple[str, str]], stacked: str = '', root: str = '.') -> Any:
  """Fills the parameters below each prefix of `parts`, ((prefix, source), ...), by the rest of their paths; all.

  A parameter belongs to the longest prefix that it lies below; those below none stay, and '' has all that is left. Of
  an array whose path `stacked` finds, [L, ...], and which has k L layers there, every k-th is taken, from the first on.
  Raises CheckpointError where an array is missing there or has another shape, for a part that is half from elsewhere
  and half from chance looks like one that was learnt; ConfigError where no parameter is below a prefix.
  """
  sources, read = dict(parts), functools.cache(lambda source: _arrays(source, 'init_parts', root))
  owners = {p: max((x for x in sources if not x or p.startswith(x + '/')), key=len, default=None)
            for p, _ in paths(params)}
  if idle := [x for x in sources if x not in owners.values()]:
    raise ConfigError(f'config.init_parts: no parameter is below {idle[0]!r}; there are {", ".join(list(owners)[:5])}'
                      f'{" and more" if len(owners) > 5 else ""}')
  out = []
  for path, x in paths(params):
    if (prefix := owners[path]) is not None:
      name, there = path[len(prefix) + 1 if prefix else 0:], read(sources[prefix])
      found = _alternate(there.get(name), x.shape) if stacked and re.search(stacked, path) else there.get(name)
      if found is None or found.shape != x.shape:
        lack = 'has no such array' if found is None else f'has {there[name].shape}'
        raise CheckpointError(f'init_parts: {path} {x.shape} should come from {sources[prefix]}, which {lack} ({name})')
      x = jax.make_array_from_callback(x.shape, x.sharding, functools.partial(_slice, found, x.dtype))
    out.append(x)
  for prefix, source in sources.items():
    log.info('init_parts: %d arrays below %r are from %s', [*owners.values()].count(prefix), prefix, source)
  return jax.tree.unflatten(jax.tree.structure(params), out)


def continued(state: TrainState, source: str, moments: bool, root: str = '.') -> TrainState:
  """The state of another run, `path[:best|latest|STEP]`, to go on from: its step, weights, stats and last rate.

  `state` is the new run's own, from which come the moments, where `moments` is False. Averaged weights that the other
  one did not keep begin with its weights. Raises CheckpointError where an array is missing there or has another shape.
  """
  path, which = _run(source, 'continue_from', root)
  with contextlib.closing(Checkpoints(path)) as checkpoints:
    step = checkpoints.find(which)
    arrays = checkpoints.meta(step)['arrays']
    items = {k: v for k, v in split(state).items() if (moments or k != 'moments')
             and (k != 'ema' or any(p.startswith('opt/ema/') for p in arrays))}
    here = {p: [x.dtype.name, list(x.shape)] for p, x in paths(join(items, state._replace(opt=state.opt._replace(
        inner=(), ema=()))))}
    there = {p: a[:2] for p, a in arrays.items()
             if p in here or p.startswith('stats/') or moments and p.startswith('opt/inner/')}
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


def _alternate(found, shape):
  """Every k-th of the layers of `found` [k L, ...], where `shape` has L of them."""
  deeper = found is not None and found.ndim and shape and len(found) > shape[0] > 0 and len(found) % shape[0] == 0
  return found[::len(found) // shape[0]] if deeper else found


def _slice(array, dtype, index):
  return np.asarray(array[index], dtype)


def _run(source, key, root):
  """'path[:which]', or what `artifact` reads and is no folder -> the folder of a run and which of its steps."""
  path, colon, which = source.rpartition(':')
  if not colon or os.sep in which:
    path, which = source, 'latest'
  if files.isdir(path):
    return path, which
  if ref := artifact.parse(source):
    return artifact.find(ref, root, key)
  if os.path.isfile(path):
    raise CheckpointError(f'{key} = {source}: a file of another kind; expected a run, or a .safetensors file')
  grammar = f'; a run below {root} is named {artifact.GRAMMAR}' if {*artifact.KINDS} & {*path.split('/')} else ''
  raise CheckpointError(f'{key} = {source}: no such folder{_nearby(path) or grammar}')


def _arrays(source, key, root, config=None):
  """path -> array of a run's weights or of a .safetensors file, which the config's key names."""
  if source.endswith('.safetensors'):
    return _safetensors(source, key, config)
  path, which = _run(source, key, root)
  with contextlib.closing(Checkpoints(path)) as checkpoints:
    return checkpoints.arrays(checkpoints.find(which))


def _safetensors(source, key, config):
  from safetensors import SafetensorError, safe_open
  if not (files.exists(source) if files.remote(source) else os.path.isfile(source)):
    raise CheckpointError(f'{key} = {source}: no such file{_nearby(source)}')
  try:
    with safe_open(files.fetch(source), 'numpy') as f:
      needs, arrays = f.metadata() or {}, {k: f.get_tensor(k) for k in f.keys()}
  except (SafetensorError, TypeError) as e:         # TypeError: a type that numpy lacks
    raise CheckpointError(f'{key} = {source}: not a safetensors file that can be read: {e}') from None
  has = config.model if config is not None and 'model' in config else {}
  for name, value in needs.items():
    if name in has and str(has[name]) != value:
      raise CheckpointError(f'{key} = {source}: its weights need config.model.{name} = {value!r}, not {has[name]!r}')
  return arrays


def _nearby(path):
  folder = os.path.dirname(os.path.abspath(path))
  near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder)) if os.path.isdir(folder) else []
  return f'; did you mean {", ".join(os.path.join(os.path.dirname(path), n) for n in near)}?' if near else ''
