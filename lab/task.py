"""The one interface: what a system gives the core, and how the core finds it."""

import importlib
import types
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple

import jax
import numpy as np
from data_pipelines.pipeline import Source

from lab.metrics import ratios

Array = jax.Array
Key = jax.Array                                # a typed PRNG key
Step = jax.Array                               # i32[]
Params = Any                                   # nested dict of arrays
Stats = Any                                    # averages that gradients don't touch; {} where a system has none
Batch = Mapping[str, Array]                    # leaves [B, ...]; 'mask' f32[B], 0 = padding
Outputs = Any                                  # leaves [B, ...]
Loss = jax.Array                               # f32[], what is minimised: the sum of the terms' ratios
Terms = Mapping[str, tuple[Array, Array]]      # of the loss: name -> (total, weight), each f32[]
Sums = Mapping[str, tuple[Array, Array]]       # name -> (total, weight), each f32[]
Totals = Mapping[str, tuple[float, float]]     # the same, summed on the host in float64
Scalars = Mapping[str, float]
Record = Mapping[str, Any]                     # JSON-able
Image = np.ndarray | str                       # u8[H, W, 3] RGB, a film u8[T, H, W, 3], or a text to read
Split = str                                    # 'train' or 'eval'
Rules = tuple[tuple[str, Any, str], ...]       # (regex on the path, PartitionSpec, reason)


class TrainState(NamedTuple):
  """Everything that training changes; arrays only."""
  step: Step
  params: Params
  stats: Stats
  opt: Any


class Task(NamedTuple):
  """A system: pure functions and a table. The first four run on the device, the others on the host."""
  init: Callable[[Key, Batch], tuple[Params, Stats]]
  loss: Callable[[Params, Stats, Batch, Key, Step], tuple[Terms, tuple[Stats, Sums]]]
  measure: Callable[[Params, Stats, Batch], Sums]
  predict: Callable[[Params, Stats, Batch, Key], Outputs]
  source: Callable[[Split], Source]
  records: Callable[[Outputs, Batch], Iterator[Record]]
  rules: Rules
  finish: Callable[[Totals], Scalars] = ratios
  # stats that begin with the data: made of a run's first batch, by the key of its first update, before that is made
  begin: Callable[[Params, Stats, Batch, Key], Stats] | None = None
  score: Callable[[Iterable[Record]], Scalars] | None = None
  picture: Callable[[Outputs, Batch], Mapping[str, Image]] | None = None
  # --mode=predict: (source, output folder, stop) -> batches of fixed shapes, or the error of an input that can't be
  # used. Leaves that are no numeric arrays (names, whole pictures) stay on the host; batch['write'] takes a picture.
  inputs: Callable[[str, str, Callable[[], bool]], Iterator[Batch | Exception]] | None = None
  lines: Callable[[Record], Iterator[Record]] | None = None   # a record -> the lines of the predictions file
  files: Callable[[], Mapping[str, str]] | None = None    # name -> text of what a run keeps beside its checkpoints
  gpu: Mapping[str, Any] = types.MappingProxyType({})     # options of XLA that its programs are faster with on a GPU


class ConfigError(Exception):
  """A configuration that can't run; the message names the key and what is accepted."""
  exit_code = 2


def load(config) -> Task:
  """Imports config.task, a dotted module path, and calls its make_task(config)."""
  try:
    module = importlib.import_module(config.task)
  except ModuleNotFoundError as e:
    if e.name and not config.task.startswith(e.name):
      raise
    raise ConfigError(f'config.task = {config.task!r}: no such module') from None
  return module.make_task(config)
