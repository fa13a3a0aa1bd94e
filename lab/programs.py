"""Compiled programs: each shape of a batch is compiled once, ahead of its first use, counted and timed."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from lab import peers
from lab.ledger import Ledger

log = logging.getLogger('lab')

# Read from the compilation cache, a program of XLA's CPU client (jax 0.10.2) has lost what kept its collectives in one
# order: where many could run at once, devices begin with different ones, wait for each other, and XLA aborts. The
# schedule for least memory leaves few at once
IN_ORDER = {'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'}

# XLA makes one product of several that share a factor, and copies: of kernels into one before, of what comes out after
APART = {'xla_gpu_dot_merger_threshold_mb': 0}


def options(devices: Iterable | None = None, gpu: Mapping[str, Any] | None = None) -> dict[str, Any]:
  """The compiler's, for a program of these devices, or of all that there are; gpu: more of them, for NVIDIA's."""
  devices = list(jax.devices() if devices is None else devices)
  if devices[0].platform == 'cpu':
    return IN_ORDER if len(devices) > 1 else {}
  return {**APART, **(gpu or {})} if devices[0].platform == 'gpu' else {}


class Program:
  """A jitted function f(..., batch), made with `options`, compiled again for a batch of another shape.

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
      program = self.function.lower(*args).compile()
    self.ledger.compilations += 1
    self.compiled[shapes] = program
    if self.look is not None:
      self.look(program, args)
    peers.meet()
