"""Rules on parameter paths -> a NamedSharding for every array of the state, and an audit of the rules."""

import math
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lab.task import Rules

LARGE = 1 << 20        # bytes from which an array must be covered by a rule


class ShardingError(Exception):
  """A rule that matches nothing, or a large array that no rule covers."""
  exit_code = 2


def paths(tree: Any) -> list[tuple[str, Any]]:
  """(path, leaf) of a tree, such as ('params/backbone/conv1_1/kernel', array)."""
  return [(jax.tree_util.keystr(p, simple=True, separator='/'), x)
          for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def layout(rules: Rules, abstract: Any, mesh: Mesh) -> Any:
  """The sharding of every array of an abstract state; the first rule whose regex is found in its path decides.

  Moments and averages need no rules of their own: their paths end in the parameter's. Scalars, and small arrays that no
  rule names, are replicated. Raises ShardingError where the audit fails.
  """
  audit(rules, abstract)
  specs = [_fit(_spec(rules, path, x), x.shape, mesh) for path, x in paths(abstract)]
  return jax.tree.unflatten(jax.tree.structure(abstract), [NamedSharding(mesh, s) for s in specs])


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


def _fit(spec: P | None, shape: tuple[int, ...], mesh: Mesh) -> P:
  """The spec without the axes that don't divide their dimension: such an array is replicated along them."""
  if spec is None or len(spec) > len(shape):
    return P()
  sizes = [math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ())) for axes in spec]
  return P(*(axes if n % size == 0 else None for axes, n, size in zip(spec, shape, sizes)))
