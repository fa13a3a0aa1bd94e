"""Rules on parameter paths -> a NamedSharding for every array of the state, and an audit of the rules."""

import logging
import math
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lab import memory
from lab.task import Rules

LARGE = 1 << 20        # bytes above which an array must be covered by a rule, and is told where that rule is not kept
log = logging.getLogger('lab')


class ShardingError(Exception):
  """A rule that matches nothing, or a large array that no rule covers."""
  exit_code = 2


def paths(tree: Any) -> list[tuple[str, Any]]:
  """(path, leaf) of a tree, such as ('params/backbone/conv1_1/kernel', array)."""
  return [(jax.tree_util.keystr(p, simple=True, separator='/'), x)
          for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def layout(rules: Rules, abstract: Any, mesh: Mesh) -> Any:
  """The sharding of every array of an abstract state, as `split` has it.

  Raises ShardingError where the audit fails. A large array that is split less than its rule says is told.
  """
  audit(rules, abstract)
  found = split(rules, abstract, mesh)
  for (path, x), got in zip(paths(abstract), jax.tree.leaves(found)):
    wanted, size = _spec(rules, path, x), math.prod(x.shape) * x.dtype.itemsize
    ways, told = (math.prod(_sizes(spec, mesh)) for spec in (got.spec, wanted or ()))
    if size > LARGE and ways < told and jax.process_index() == 0:
      log.warning('%s %s%s, %s, is in %d part(s), %s, where its rule says %d, %s: no multiple of that. Each device '
                  'holds %s of it', path, x.dtype.name, [*x.shape], memory.size(size), ways, tuple(got.spec), told,
                  tuple(wanted), memory.size(size // ways))
  return found


def split(rules: Rules, abstract: Any, mesh: Mesh) -> Any:
  """The sharding of every array, by the first rule whose regex is found in its path and whose axes divide it.

  So a rule may have another behind it, for the shapes that it does not divide. Where none does, the first decides, and
  the array is replicated along the axes that don't divide. Moments and averages need no rules of their own: their paths
  end in the parameter's. Scalars, and small arrays that no rule names, are replicated.
  """
  def place(path, x):
    found = [spec for pattern, spec, _ in rules if x.ndim and re.search(pattern, path)]
    return NamedSharding(mesh, next((s for s in found if _divides(s, x.shape, mesh)),
                                    _fit(found[0] if found else None, x.shape, mesh)))
  return jax.tree.unflatten(jax.tree.structure(abstract), [place(path, x) for path, x in paths(abstract)])


def audit(rules: Rules, abstract: Any) -> None:
  """Raises ShardingError for rules that match nothing and for unmatched arrays above 1 MiB."""
  arrays = [(p, x) for p, x in paths(abstract) if x.ndim]
  for pattern, _, reason in rules:
    if not any(re.search(pattern, p) for p, _ in arrays):
      raise ShardingError(f'sharding rule {pattern!r} ({reason}) matches no array; delete it')
    if not reason:
      raise ShardingError(f'sharding rule {pattern!r} gives no reason')
  bare = [p for p, x in arrays if math.prod(x.shape) * x.dtype.itemsize > LARGE and _spec(rules, p, x) is None]
  if bare:
    raise ShardingError(f'no sharding rule matches {len(bare)} large array(s): {", ".join(bare[:5])}')


def _spec(rules: Rules, path: str, x) -> P | None:
  return next((spec for pattern, spec, _ in rules if x.ndim and re.search(pattern, path)), None)


def _sizes(spec, mesh: Mesh) -> list[int]:
  """How many parts a spec makes of each dimension."""
  return [math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ())) for axes in spec]


def _divides(spec: P, shape: tuple[int, ...], mesh: Mesh) -> bool:
  return len(spec) <= len(shape) and not any(n % size for n, size in zip(shape, _sizes(spec, mesh)))


def _fit(spec: P | None, shape: tuple[int, ...], mesh: Mesh) -> P:
  """The spec without the axes that don't divide their dimension: such an array is replicated along them."""
  if spec is None or len(spec) > len(shape):
    return P()
  return P(*(axes if n % size == 0 else None for axes, n, size in zip(spec, shape, _sizes(spec, mesh))))
