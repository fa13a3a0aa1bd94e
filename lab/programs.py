"""Compiled programs: each shape of a batch is compiled once, ahead of its first use, counted and timed."""

import logging
from typing import Any, Callable

import jax

from lab import peers
from lab.ledger import Ledger

log = logging.getLogger('lab')

# Read from the compilation cache, a program of XLA's CPU client (jax 0.10.2) has lost what kept its collectives in one
# order: where many could run at once, devices begin with different ones, wait for each other, and XLA aborts. The
# schedule for least memory leaves few at once
IN_ORDER = {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}


def options() -> dict[str, str]:
  """The compiler's, for a program of all devices; several CPU devices have those that keep collectives in order."""
  return IN_ORDER if jax.default_backend() == 'cpu' and jax.device_count() > 1 else {}


class Program:
  """A jitted function f(..., batch), compiled again for a batch of another shape.

  After the `expected` shapes that comes with a warning that names the arrays that changed, for each one costs the time
  of the first. `look(compiled, args)` is called after each compilation, before anything runs.
  """

  def __init__(self, name: str, function: Callable, ledger: Ledger, expected: int = 1,
               look: Callable[[Any, tuple], None] | None = None):
    self.name, self.function, self.ledger, self.expected, self.look = name, function, ledger, expected, look
    self.compiled: dict[tuple, Any] = {}

  def __call__(self, *args):
    shapes = tuple((k, v.shape, v.dtype) for k, v in sorted(args[-1].items()))
    if shapes not in self.compiled:
      self._compile(shapes, args)
    return self.compiled[shapes](*args)

  def _compile(self, shapes, args):
    if len(self.compiled) >= self.expected:
      known = set(next(reversed(self.compiled)))
      new = ', '.join(f'{k} {dtype}{list(shape)}' for k, shape, dtype in shapes if (k, shape, dtype) not in known)
      log.warning('%s is compiled again, for the %dth time: the batch has another shape: %s', self.name,
                  len(self.compiled) + 1, new)
    with self.ledger.during('compile'):
      program = self.function.lower(*args).compile(compiler_options=options())
    self.ledger.compilations += 1
    self.compiled[shapes] = program
    if self.look is not None:
      self.look(program, args)
    peers.meet()
