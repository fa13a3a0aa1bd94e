"""What a new run does before its first update: stats that begin with the data do so."""

from typing import Callable

import jax
from jax.sharding import NamedSharding

from lab import mesh as meshes, programs
from lab.ledger import Ledger
from lab.programs import Program
from lab.task import Task, TrainState


def before(task: Task, step: Callable, config, like: TrainState, mesh, ledger: Ledger) -> Callable:
  """The training step for a new run: before its first call `task.begin` makes the stats, of the batch that it gets.

  By a program of its own. In that of the step it would be a branch, and for a branch a GPU's host waits, at each
  update, until it knows which one to take, instead of preparing the next update meanwhile.

  Args:
    task: whose stats they are; where it has no `begin` the step is as it was.
    step: (state, batches [micro-batches, B, ...]) -> (state, sums).
    config: the run's, for its seed.
    like: shapes and shardings of the state.
    mesh: its mesh.
    ledger: counts the compilation.
  """
  if task.begin is None:
    return step

  def begin(params, stats, batches):
    key = jax.random.fold_in(jax.random.key(config.seed, impl=config.prng), 0)
    return task.begin(params, stats, jax.tree.map(lambda x: x[0], batches), key)

  layout = jax.tree.map(lambda x: x.sharding, like)
  function = jax.jit(begin, in_shardings=(layout.params, layout.stats, NamedSharding(mesh, meshes.MICRO)),
                     out_shardings=layout.stats, compiler_options=programs.options(mesh.devices.flat, task.gpu))
  waiting = [Program('what the stats begin with', function, ledger)]

  def first(state, batches):
    if waiting:
      state = state._replace(stats=waiting.pop()(state.params, state.stats, batches))
    return step(state, batches)
  return first
