"""What devices send each other in a compiled program, read from its text (XLA's HLO)."""

import collections
import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
BITS = {'pred': 8, 'bf16': 16, 'c64': 64, 'c128': 128, 'token': 0}
# name = shape op(operands...
INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{$')
# what these apply to pairs of numbers holds no collective
ARITHMETIC = ('reduce', 'scatter', 'sort', 'map', 'reduce-window', 'select-and-scatter')
CALLED = re.compile(r'(?:body|calls|to_apply|(?:true|false)_computation|branch_computations|called_computations)='
                    r'(?:\{([^}]*)\}|%?([\w.\-]+))')
# libtpu compiles one slice's program, whose groups number that slice's devices, and hands what crosses to this runtime
BETWEEN = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\}|\{\{.*?\}\})')
AMONG = re.compile(r'(?:replica_groups|source_target_pairs)='
                   r'(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[\d,]*\},?\s*)*\}|mesh\[.*?\})')
IOTA = re.compile(r'\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?')
# axes with their sizes, the devices along them where these are in another order, the axes of a group or parts of them
MESH = re.compile(r'mesh\[(.*?)\](?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{(.*)\}')
# libtpu marks each step of a collective that it fuses with products, and the computation in which that begins
STEP, BEGINS = '"async_collective_fusion_config"', 'custom_call_target="AsyncCollectiveStart"'
NUMBERED = 100_000     # libtpu's number of a device is this times its slice, from 1 on, and its place there


class Sent(NamedTuple):
  """Of one kind of collective, over a whole step and for one device."""
  count: int
  payload: int         # bytes of the results
  traffic: float       # bytes that a device sends to others of its slice, by a ring
  dcn: float           # bytes that it sends to other slices, at least


class _Group(NamedTuple):
  kind: str
  payload: int
  among: str           # who takes part, as it is written; '': all
  between: bool        # whether libtpu hands it to the runtime between slices


def collectives(text: str, devices: int, slices: Sequence[int] = ()) -> dict[str, Sent]:
  """kind -> what is sent, of the text of a program for so many devices; loops count as often as they run.

  `slices` has the slice of each device in the order of the mesh, as partitions are numbered; without it there is one.
  A ring of n devices sends 2 (n - 1) / n of an all-reduce's bytes, (n - 1) / n of what is gathered, scattered or
  exchanged, and all of what is permuted or broadcast. Of a group over S slices with m devices in each, the ring is that
  inside a slice; whatever the algorithm, over the network between slices a device then sends at least 2 (S - 1) / S / m
  of an all-reduce's bytes, (S - 1) / S / m of what is gathered or scattered, (S - 1) / S of what is exchanged, 1 / m of
  what is broadcast, and all of what is permuted. Of a kind's groups that counts whose devices send most. A loop whose
  number of turns isn't told counts once; of a choice the branch with the fewest bytes counts, such as that of all steps
  but the first.

  libtpu writes a collective over slices in pieces: some inside a slice, and a transfer between devices with the same
  place in several. Each piece counts as what it is, so that a small all-reduce, which is not scattered before it
  crosses, crosses once for every device. An exchange is handed over whole; of it counts what is for other slices.
  """
  counts = re.findall(r'(?:num_partitions|replica_count)=(\d+)', text.partition('\n')[0])
  partitions = math.prod(map(int, counts)) if counts else devices
  if slices and partitions not in (len(slices), len(slices) // len(set(slices))):
    raise ValueError(f'a program of {partitions} devices, for {len(slices)} in {len(set(slices))} slices')
  where = tuple(slices) if len(slices) == partitions else (0,) * partitions
  bodies, entry = _computations(text)
  totals = collections.defaultdict(lambda: [0, 0, 0.0, 0.0])
  for group, times in _found(bodies, entry, {}).items():
    total = totals[group.kind]
    total[0] += times
    total[1] += times * group.payload
    for i, sent in enumerate(_sent(group, where, len(set(slices))), 2):
      total[i] += times * sent
  return {kind: Sent(*total) for kind, total in sorted(totals.items())}


def _sent(group, where, slices) -> tuple[float, float]:
  """Bytes that a device sends over its slice's links, and to other slices: of the group whose devices send most."""
  kind, size = group.kind, group.payload
  if group.between:
    spreads = _between(group.among, slices)
    return 0.0, float(size) if kind == 'collective-permute' else max(_dcn(kind, size, spread) for spread in spreads)
  if kind == 'collective-permute':
    crossing = {where[a] != where[b] for a, b in _members(group.among)}
    return size * float(crossing != {True}), size * float(True in crossing)
  spreads = _inside(group.among, where)
  return max(_links(kind, size, spread) for spread in spreads), max(_dcn(kind, size, spread) for spread in spreads)


def _links(kind, size, spread) -> float:
  """Of a group with so many devices in each of its slices."""
  n, m = sum(spread), max(spread)
  if kind == 'all-to-all':
    return size * (m - 1) / n
  if kind == 'collective-broadcast':
    return size * float(m > 1)
  return _times(kind, n) * size * (m - 1) / m


def _dcn(kind, size, spread) -> float:
  n, slices = sum(spread), len(spread)
  if kind == 'all-to-all':
    return size * (n * n - sum(m * m for m in spread)) / (n * n)
  if kind == 'collective-broadcast':
    return size * slices / n * float(slices > 1)
  return _times(kind, n) * size * (slices - 1) / n


def _times(kind, n) -> int:
  """How often the bytes of the result go around; what is scattered is n times the share that a device gets."""
  return {'all-reduce': 2, 'reduce-scatter': n}.get(kind, 1)


@functools.cache
def _inside(among, where) -> set[tuple[int, ...]]:
  """How many devices of each slice a group has, for each group.

  Groups are written as {{0,1},{2,3}}, [2,2]<=[4], [2,2]<=[2,2]T(1,0) or mesh['a'=2,'b'=2] {'b'}.
  """
  groups = _members(among) or [range(len(where))]
  return {tuple(sorted(collections.Counter(where[i] for i in group).values())) for group in groups}


def _members(among) -> list[list[int]]:
  if found := IOTA.match(among):
    return _iota(*found.groups()[1:]).reshape(-1, int(found[1])).tolist()
  if found := MESH.match(among):
    return _along(*found.groups())
  return [[int(n) for n in group.split(',')] for group in re.findall(r'\{([\d,]+)\}', among)]


def _iota(sizes, order):
  sizes, order = (_numbers(part) if part else None for part in (sizes, order))
  return np.arange(math.prod(sizes)).reshape(sizes).transpose(order)


def _along(axes, sizes, order, listed, grouped) -> list[list[int]]:
  """Devices of a mesh that differ only along the axes of a group; 'a':(2)4 of a's 16 is the middle of 2 x 4 x 2."""
  axes = [(name, int(n)) for name, n in re.findall(r'([^,]+)=(\d+)', axes)]
  shape = [n for _, n in axes]
  devices = _iota(sizes, order) if sizes else np.array(_numbers(listed)) if listed else np.arange(math.prod(shape))
  places = np.indices(shape).reshape(len(shape), -1)
  for name, before, size in re.findall(r'([^,:]+)(?::\((\d+)\)(\d+))?', grouped):
    i = [axis for axis, _ in axes].index(name)
    size = int(size or shape[i])
    after = shape[i] // (int(before or 1) * size)
    places[i] -= places[i] // after % size * after       # what tells groups apart is left
  groups = collections.defaultdict(list)
  for place, device in zip(places.T.tolist(), devices.ravel().tolist()):
    groups[tuple(place)].append(device)
  return list(groups.values())


def _numbers(text) -> list[int]:
  return [int(n) for n in text.split(',')]


@functools.cache
def _between(target, slices) -> set[tuple[int, ...]]:
  """The same of a transfer: "{1,2}x{0:15}", for places 0 to 15 of two slices each, or {{100000,200000}}, by numbers."""
  if found := re.match(r'"\{([\d,]+)\}x', target):
    return {(1,) * len(found[1].split(','))}
  groups = _members(target)
  return {tuple(sorted(collections.Counter(i // NUMBERED for i in group).values()))
          for group in groups} or {(1,) * slices}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
  bodies, entry, name = {}, '', ''
  for line in text.splitlines():
    if not line.startswith((' ', '}')) and line.endswith('{') and (found := HEADER.match(line)):
      name = found[2]
      bodies[name] = []
      entry = name if found[1] else entry
    elif line.startswith('}'):
      name = ''
    elif name:
      bodies[name].append(line)
  return bodies, entry


def _found(bodies, name, known) -> collections.Counter:
  """How often each collective is in a computation and what it calls; those that are `known` are not read again.

  One that libtpu runs beside products is told again in every computation with a step of it: in that which begins it, in
  each that goes on while it multiplies, and in that which ends it. It counts where it begins.
  """
  if name not in known:
    lines = bodies.get(name, ())
    if not any(BEGINS in line for line in lines):
      lines = [line for line in lines if STEP not in line]
    known[name] = collections.Counter()        # whatever calls itself is no HLO
    known[name] = sum((_of_line(line, bodies, known) for line in lines), collections.Counter())
  return known[name]


def _of_line(line, bodies, known) -> collections.Counter:
  out, found = collections.Counter(), INSTRUCTION.match(line)
  if not found:
    return out
  _, shape, op, rest = found.groups()
  kind = op.removesuffix('-start')
  if kind in KINDS:
    among = AMONG.search(rest)
    out[_Group(kind, _payload(shape, kind, op.endswith('-start')), among[1] if among else '', False)] = 1
  elif op == 'recv' and BETWEEN in rest and (transfer := TRANSFER.search(rest)):
    kind, target = transfer[1].lower().replace('_', '-'), TARGET.search(rest)
    kind = 'collective-permute' if kind == 'one-to-one' else kind
    size = _bytes(re.sub(r', u32\[\][^,]*, token\[\][^,]*$', '', shape))       # a context and a token are not sent
    out[_Group(kind, size, target[1] if target else '', True)] = 1
  elif op not in ARITHMETIC and not op.endswith('-done'):      # what ends was counted where it began
    turns, called = _turns(rest, bodies) if op == 'while' else 1, _called(rest)
    if op == 'conditional':
      called = sorted(called, key=lambda name: sum(t * g.payload for g, t in _found(bodies, name, known).items()))[:1]
    for name in called:
      for group, times in _found(bodies, name, known).items():
        if name.startswith('all-reduce-scatter'):            # a TPU's name for a fusion of the two
          group = group._replace(kind='reduce-scatter', payload=_bytes(shape))
        out[group] += times * turns
  return out


def _called(rest) -> list[str]:
  names = [n for several, one in CALLED.findall(rest) for n in (several.split(',') if several else [one])]
  return [n.strip().lstrip('%') for n in names]


def _turns(rest, bodies) -> int:
  """How often a loop runs: as XLA says, or by what its counter, which starts at 0, is compared with; 1 if unknown."""
  if found := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', rest):
    return int(found[1])
  condition = re.search(r'condition=%?([\w.\-]+)', rest)
  lines = '\n'.join(bodies.get(condition[1], ()) if condition else ())
  limits = re.findall(r' = s32\[\]\S* constant\((\d+)\)', lines)
  return int(limits[0]) if len(limits) == 1 and 'direction=LT' in lines else 1


def _payload(shape, kind, starts) -> int:
  parts = [_bytes(part) for part in re.findall(r'\w+\[[\d,]*\]', shape)]
  if starts and kind in ('all-gather', 'collective-permute') and len(parts) > 1:
    return sum(parts[len(parts) // 2:]) if kind == 'all-gather' else parts[1]     # operands come first
  return sum(parts)


def _bytes(shape) -> int:
  total = 0
  for dtype, sizes in re.findall(r'(\w+)\[([\d,]*)\]', shape):
    bits = BITS.get(dtype) if dtype in BITS else int((re.search(r'\d+', dtype) or ['32'])[0])
    number = 1
    for n in filter(None, sizes.split(',')):
      number *= int(n)
    total += number * bits // 8
  return total
