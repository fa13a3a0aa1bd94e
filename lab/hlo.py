"""What devices send each other in a compiled program, read from its text (XLA's HLO)."""

import collections
import re
from typing import NamedTuple

KINDS = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute', 'collective-broadcast')
BITS = {'pred': 8, 'bf16': 16, 'c64': 64, 'c128': 128, 'token': 0}
# name = shape op(operands...
INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$')
HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) (?:\(.*)?.*\{$')
# what these apply to pairs of numbers holds no collective
ARITHMETIC = ('reduce', 'scatter', 'sort', 'map', 'reduce-window', 'select-and-scatter')
CALLED = re.compile(r'(?:body|calls|to_apply|(?:true|false)_computation|branch_computations|called_computations)='
                    r'(?:\{([^}]*)\}|%?([\w.\-]+))')


class Sent(NamedTuple):
  """Of one kind of collective, over a whole step and for one device."""
  count: int
  payload: int         # bytes of the results
  traffic: float       # bytes that a device sends, by a ring


class _Group(NamedTuple):
  kind: str
  payload: int
  size: int            # devices that take part; 0: all


def collectives(text: str, devices: int) -> dict[str, Sent]:
  """kind -> what is sent, of the text of a program for so many devices; loops count as often as they run.

  A ring of n devices sends 2 (n - 1) / n of an all-reduce's bytes, (n - 1) / n of what is gathered, scattered or
  exchanged, and all of what is permuted or broadcast. A loop whose number of turns isn't told counts once; of a choice
  the branch with the fewest bytes counts, such as that of all steps but the first.
  """
  bodies, entry = _computations(text)
  totals = collections.defaultdict(lambda: [0, 0, 0.0])
  for group, times in _found(bodies, entry, {}).items():
    group = group._replace(size=group.size or devices)
    total = totals[group.kind]
    total[0] += times
    total[1] += times * group.payload
    total[2] += times * _sent(group)
  return {kind: Sent(*total) for kind, total in sorted(totals.items())}


def _sent(group) -> float:
  n, size = group.size, group.payload
  if n <= 1:
    return 0.0
  if group.kind == 'all-reduce':
    return 2 * size * (n - 1) / n
  if group.kind == 'reduce-scatter':
    return size * (n - 1)                # the payload is a share of what is scattered
  return size * (n - 1) / n if group.kind in ('all-gather', 'all-to-all') else size


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
  """How often each collective is in a computation and what it calls; those that are `known` are not read again."""
  if name not in known:
    known[name] = collections.Counter()        # whatever calls itself is no HLO
    known[name] = sum((_of_line(line, bodies, known) for line in bodies.get(name, ())), collections.Counter())
  return known[name]


def _of_line(line, bodies, known) -> collections.Counter:
  out, found = collections.Counter(), INSTRUCTION.match(line)
  if not found:
    return out
  _, shape, op, rest = found.groups()
  kind = op.removesuffix('-start')
  if kind in KINDS:
    out[_Group(kind, _payload(shape, kind, op.endswith('-start')), _size(rest))] = 1
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


def _size(rest) -> int:
  """How many devices are in a group: replica_groups={{0,1},{2,3}}, or [2,2]<=[4], groups by members."""
  if found := re.search(r'replica_groups=\[(\d+),(\d+)\]', rest):
    return int(found[2])
  if found := re.search(r'replica_groups=\{\{([\d,]*)\}', rest):
    return len(found[1].split(','))
  return 2 if 'source_target_pairs' in rest else 0


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
