"""Grids of ARC tasks, raw files -> TFRecord: what the codes are learnt of. The files: arc_raw.py.

A record is one grid: `cells`, its colours, u8 bytes row by row; `height` and `width`; `task`, its program's id;
`dataset`; `pair`, a number that only the input and the output of one pair share; `is_input`; and `is_test`, whether the
pair is of the task's "test". Records lie in the order of the files.

No program is on both sides. A task of train is a leak where one of evaluation has its id; or has the same pairs, in
whatever order; or has them up to one of the 8 symmetries of the square and a renaming of the colours. So is whatever
else train has under the id of a leak.
"""

import collections
import functools
import os
from typing import Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from data_pipelines import DataError, arc_raw, prepared
from data_pipelines.pipeline import Source, tensorflow, within

NAME, VERSION = 'arc_grids', '1.0.0'
SAMPLE = os.path.join(os.path.dirname(__file__), 'samples', 'arc')
OUTSIDE = 255                # in an example, the cells that are not the grid's
_NUMBERS = ('height', 'width', 'pair', 'is_input', 'is_test')
_SHARD_RECORDS = 1000        # a shard, where --shards allows as many
_NAMED = 20                  # grids that are too large, of each split; of the others the number is told


class Leak(NamedTuple):
  """A task of train that is one of evaluation: both ids, and what tells: id, content or symmetry."""
  train: str
  evaluation: str
  kind: str


@functools.cache
def builder(name: str = NAME):
  """The TFDS builder class of these records."""
  return prepared.builder(name, VERSION, 'Grids of ARC tasks', lambda kinds: {
      'cells': kinds.Tensor(shape=(None,), dtype=np.uint8, encoding='bytes'), 'task': kinds.Text(),
      'dataset': kinds.Text(), **{k: kinds.Scalar(np.int64) for k in _NUMBERS}})


def prepare(raw_dir: str, out_dir: str, *, shards: int = 64, side: int = 30, leaks: str = 'drop',
            invariant: bool = True) -> tuple[str, dict]:
  """Writes the grids of a file or folder of tasks: (prepared folder, report), or DataError naming file and task.

  Args:
    side: of a grid, at most; larger ones are left out and counted, and the first ones named.
    leaks: what becomes of a task of train that is one of evaluation: 'drop', 'keep' or 'refuse' (a DataError).
    invariant: whether symmetries and other colours hide no leak.
  """
  files, others = arc_raw.files(raw_dir)
  of = {split: [f for f in files if f.split == split] for split in arc_raw.SPLITS}
  facts, found, dropped = _survey(of, side, leaks, invariant)
  for split, counts in facts.items():
    if not counts['grids']:
      raise DataError(f'{raw_dir}: no grid of {split} remains; {len(dropped)} tasks are left out as leaks, '
                      f'{counts["left_out"]} grids for a side above {side}')
  top = raw_dir if os.path.isdir(raw_dir) else os.path.dirname(raw_dir)
  done = {'drop': 'left out of train', 'keep': 'kept'}
  report = {'splits': facts, 'leaks': [{**leak._asdict(), 'done': done[leaks]} for leak in found],
            'other_files': [os.path.relpath(p, top) for p in others]}
  options = {'files': {os.path.relpath(f.path, top): prepared.sha256(f.path) for f in files}, 'side': side,
             'leaks': leaks, 'invariant': invariant, 'shards': shards}

  def records(split, start):
    kept = (t for i, t in enumerate(arc_raw.read(of[split])) if split != 'train' or i not in dropped)
    return enumerate(prepared.progress(_records(kept, side, start), split, facts[split]['grids']))
  starts = {'train': 0, 'evaluation': facts.get('train', {}).get('pairs', 0)}
  return _write(builder(), out_dir, {k: functools.partial(records, k, starts[k]) for k in facts}, facts, options,
                report, shards), report


def _write(builder_class, out_dir, splits, facts, options, report, shards) -> str:
  sizes = [f['grids'] for f in facts.values()]
  return prepared.write(builder_class, out_dir, splits, dataset='arc', options=options,
                        shards=min(shards, -(-max(sizes) // _SHARD_RECORDS), *sizes), describe=lambda: (facts, report))


def _survey(of: Mapping[str, Sequence[arc_raw.File]], side: int, leaks: str,
            invariant: bool) -> tuple[dict[str, dict], list[Leak], set[int]]:
  """The facts of each split, the leaks, and the places of train's tasks that are left out, in the order of reading."""
  evaluation, found, dropped, known = list(arc_raw.read(of['evaluation'])), [], set(), set()
  leaked = _leaked(of['train'], evaluation, invariant)

  def kept():
    for i, task in enumerate(arc_raw.read(of['train'])):
      same = leaked[i]
      if same and leaks == 'refuse':
        other, kind = same[0]
        raise DataError(f'{task.where} of train and {other.where} of evaluation are one program (by {kind}); delete '
                        'one of them, or let --leaks=drop leave it out of train')
      found.extend(Leak(task.id, other.id, kind) for other, kind in same)
      if same and leaks == 'drop':
        dropped.add(i)
      else:
        known.update((g.shape, g.tobytes()) for pair in task.pairs for _, g in _fitting(pair, side))
        yield task
  counts = {'train': _count(kept(), side), 'evaluation': _count(evaluation, side)}
  grids = [g for task in evaluation for pair in task.pairs for _, g in _fitting(pair, side)]
  alike = {canonical(np.frombuffer(cells, np.uint8).reshape(shape)) for shape, cells in known}
  counts['evaluation'] |= {'in_train': sum((g.shape, g.tobytes()) in known for g in grids),
                           'alike_in_train': sum(canonical(g) in alike for g in grids)}
  return {k: v for k, v in counts.items() if of[k]}, found, dropped


def _leaked(train: Sequence[arc_raw.File], evaluation: Sequence[arc_raw.Task],
            invariant: bool) -> list[list[tuple[arc_raw.Task, str]]]:
  """Of each task of train, in the order of reading, the tasks of evaluation that it is, and what tells."""
  by_id, by_signature, programs, out = {}, collections.defaultdict(list), [], []
  for task in evaluation:
    by_id.setdefault(_program(task), task)
    by_signature[_signature(task)].append(task)
  for task in arc_raw.read(train):
    same = [(by_id[_program(task)], 'id')] if _program(task) in by_id else []
    for other in by_signature.get(_signature(task), ()):
      if _program(other) != _program(task):
        kind = likeness(task, other, invariant)
        same += [(other, kind)] * bool(kind)
    programs.append(_program(task))
    out.append(same)
  # other pairs of the same program, such as those of a generator, come under its id
  which = {program: same[0][0] for program, same in zip(programs, out) if same}
  return [same or ([(which[program], 'id')] if program in which else []) for program, same in zip(programs, out)]


def _count(tasks: Iterable[arc_raw.Task], side: int) -> dict[str, int]:
  facts = dict.fromkeys(('grids', 'tasks', 'pairs', 'left_out', 'largest_side'), 0) | {'left_out_first': []}
  for task in tasks:
    fits = [len(_fitting(pair, side)) for pair in task.pairs]
    facts['grids'] += sum(fits)
    facts['tasks'] += any(fits)
    facts['pairs'] += sum(map(bool, fits))
    name = f'{os.path.basename(task.file.path)}: task {task.id}'
    large = [f'{name}, {pair.part} pair {pair.number}: {g.shape[0]} x {g.shape[1]}'
             for pair in task.pairs for g in _grids(pair) if max(g.shape) > side]
    facts['left_out'] += len(large)
    facts['left_out_first'] += large[:_NAMED - len(facts['left_out_first'])]
    sides = [max(g.shape) for pair in task.pairs for _, g in _fitting(pair, side)]
    facts['largest_side'] = max([facts['largest_side'], *sides])
  return facts


def _grids(pair: arc_raw.Pair) -> list[np.ndarray]:
  return [g for g in (pair.input, pair.output) if g is not None]


def _fitting(pair: arc_raw.Pair, side: int) -> list[tuple[int, np.ndarray]]:
  """(is_input, grid) of those that are not too large."""
  return [(int(g is pair.input), g) for g in _grids(pair) if max(g.shape) <= side]


def _records(tasks: Iterable[arc_raw.Task], side: int, number: int) -> Iterator[dict]:
  for task in tasks:
    for pair in task.pairs:
      fits = _fitting(pair, side)
      for is_input, grid in fits:
        yield _record(grid, task.id, task.file.dataset, number, is_input, int(pair.part == 'test'))
      number += bool(fits)


def _record(grid: np.ndarray, task: str, dataset: str, pair: int, is_input: int, is_test: int) -> dict:
  return {'cells': grid.ravel(), 'height': grid.shape[0], 'width': grid.shape[1], 'task': task, 'dataset': dataset,
          'pair': pair, 'is_input': is_input, 'is_test': is_test}


# leaks

def canonical(grid: np.ndarray) -> tuple[tuple[int, ...], bytes]:
  """The same for all grids u8[H, W] that are one up to a symmetry of the square and a renaming of colours."""
  def drawn_as(turned):
    _, first, names = np.unique(turned, return_index=True, return_inverse=True)
    return turned.shape, np.argsort(np.argsort(first)).astype(np.uint8)[names.ravel()].tobytes()
  return min(drawn_as(turn) for half in (grid, grid.T) for turn in (half, half[::-1], half[:, ::-1], half[::-1, ::-1]))


def _program(task: arc_raw.Task):
  """What tells a program by name; the line of a file does not."""
  return task.id if task.named else task.where


def _distinct(task: arc_raw.Task) -> dict[tuple, arc_raw.Pair]:
  """The pairs of a task by their content, so that equal ones are one."""
  return {tuple((g.shape, g.tobytes()) for g in _grids(pair)): pair for pair in task.pairs}


def _signature(task: arc_raw.Task) -> tuple:
  """What neither a symmetry nor a renaming of colours changes, quickly: sides and numbers of cells of a colour."""
  return tuple(sorted(tuple((*sorted(g.shape), *np.sort(np.bincount(g.ravel(), minlength=arc_raw.COLOURS)).tolist())
                            for g in _grids(pair)) for pair in _distinct(task).values()))


def likeness(task: arc_raw.Task, other: arc_raw.Task, invariant: bool) -> str:
  """'content' where the sets of pairs are equal, 'symmetry' where one becomes the other; else ''.

  That is where one of the 8 maps of the square, applied to all grids, and one renaming of the ten colours make them
  equal: all 8 are tried, and of the renamings those that are possible. Only looked for if `invariant`.
  """
  ours, theirs = _distinct(task), _distinct(other)
  if ours.keys() == theirs.keys():
    return 'content'
  if not invariant or len(ours) != len(theirs):
    return ''
  drawn = {_drawing(pair, 0) for pair in ours.values()}
  return 'symmetry' * any(_renamed(drawn, {_drawing(pair, k) for pair in theirs.values()}) for k in range(8))


def _drawing(pair: arc_raw.Pair, k: int) -> tuple[tuple, tuple[int, ...]]:
  """A pair under map k as (pattern, colours): the cells numbered by first appearance, and which colour is which."""
  grids = [np.rot90(g.T if k >= 4 else g, k % 4) for g in _grids(pair)]
  colours, first, cells = np.unique(np.concatenate([g.ravel() for g in grids]), return_index=True, return_inverse=True)
  order = np.argsort(first)
  pattern = np.argsort(order).astype(np.uint8)[cells].tobytes()
  return (tuple(g.shape for g in grids), pattern), tuple(colours[order].tolist())


def _renamed(ours: set, theirs: set) -> bool:
  """Whether one renaming of colours makes the first set of (pattern, colours) the second."""
  roles = []                 # of a colour: the patterns that it is in, and its places there; only equal ones can match
  for drawn in (ours, theirs):
    found = collections.defaultdict(list)
    for pattern, colours in drawn:
      for place, colour in enumerate(colours):
        found[colour].append((pattern, place))
    roles.append({colour: sorted(places) for colour, places in found.items()})
  if sorted(p for p, _ in ours) != sorted(p for p, _ in theirs):
    return False

  def complete(names):
    left = [(sum(c in names for c in colours), pattern, colours) for pattern, colours in ours
            if not names.keys() >= set(colours)]
    if not left:
      return {(pattern, tuple(names[c] for c in colours)) for pattern, colours in ours} == theirs
    _, pattern, colours = max(left)        # the one that leaves the least choice
    for wanted in (found for other, found in theirs if other == pattern):
      more = {**dict(zip(colours, wanted)), **names}
      if (tuple(more[c] for c in colours) == wanted and len(set(more.values())) == len(more)
          and all(roles[0][c] == roles[1][more[c]] for c in colours) and complete(more)):
        return True
    return False
  return complete({})


# prepared folders

def sample(side: int = 30) -> str:
  """The folder of ARC-AGI-1, which ships with the lab, without grids of a side above `side`; made on first use.

  Its training task 40853293 is its evaluation task 070dd51e under another name, so train has 399 tasks.
  """
  return prepared.sample(SAMPLE, NAME, VERSION, prepare, side=side)


def rectangles() -> str:
  """The folder of small drawn grids, for tests and tables: 20,000 for train, 2,000 for evaluation; made on first use.

  A grid has sides of 2 to 4, and one or two rectangles of colours 1 to 9 on 0. Each is its own task and pair. They are
  so few and small that evaluation has many that train has too.
  """
  return prepared.sample('', 'arc_rectangles', VERSION, _rectangles, train=20_000, evaluation=2_000, canvas=4)


def _rectangles(raw_dir: str, out_dir: str, *, shards: int, train: int, evaluation: int,
                canvas: int) -> tuple[str, dict]:
  del raw_dir                # there is none
  counts = {'train': train, 'evaluation': evaluation}
  grids = drawn(train + evaluation, canvas)
  facts = {k: {'grids': n, 'tasks': n, 'pairs': n, 'left_out': 0, 'largest_side': canvas} for k, n in counts.items()}
  places = {'train': range(train), 'evaluation': range(train, train + evaluation)}

  def records(split):
    return ((n, _record(grids[n], f'rectangles#{n}', 'rectangles', n, 1, 0)) for n in places[split])
  folder = _write(builder('arc_rectangles'), out_dir, {k: functools.partial(records, k) for k in counts}, facts,
                  {**counts, 'canvas': canvas, 'shards': shards}, {'splits': facts}, shards)
  return folder, {'splits': facts}


def drawn(count: int, canvas: int) -> list[np.ndarray]:
  """`count` grids u8[H, W] of sides 2 to `canvas`: one or two rectangles of colours 1 to 9 on 0. Always the same."""
  draw = np.random.default_rng(0)
  sizes = draw.integers(2, canvas + 1, (count, 2))
  second = draw.integers(0, 2, count).astype(bool)
  first = draw.integers(0, sizes[:, None], (count, 2, 2))                  # of rectangle and axis
  corners = np.stack([first, draw.integers(first, sizes[:, None])], -1)    # anywhere, and from there to anywhere
  colours = draw.integers(1, arc_raw.COLOURS, (count, 2), np.uint8)
  at = np.arange(canvas)
  inside = (at >= corners[..., :1]) & (at <= corners[..., 1:])       # [count, rectangle, axis, canvas]
  cells = np.zeros((count, canvas, canvas), np.uint8)
  for i, there in enumerate((np.ones(count, bool), second)):
    covered = inside[:, i, 0, :, None] & inside[:, i, 1, None, :] & there[:, None, None]
    cells = np.where(covered, colours[:, i, None, None], cells)
  return [grid[:h, :w] for grid, (h, w) in zip(cells, sizes.tolist())]


def _find(folder: str, side: int) -> str:
  if folder in ('sample', 'rectangles'):
    return sample(side) if folder == 'sample' else rectangles()
  path = prepared.find(folder, NAME, VERSION)
  if not path:
    raise DataError(f'{folder}: no prepared grids there. Prepare them with `python -m data_pipelines.prepare arc '
                    f'--raw_dir=ARC --out_dir={folder}`')
  dataset = prepared.manifest(path)['dataset']
  if dataset != 'arc':
    raise DataError(f'{path}: a data set of {dataset!r}; expected one prepared as arc')
  return path


def source(folder: str, split: str, *, side: int) -> Source:
  """A split as the pipeline reads it:

    grid      u8[side, side]   colours 0 to 9 in the upper left corner, 255 outside
    size      i32[2]           height and width
    number    u32[2]           seed and n, modulo 2^32; in evaluation 0 and the record
    pair      i32[]            the same for the input and the output of one pair, and no other grid
    is_input  i32[]

  Args:
    folder: of a prepared data set; or 'sample': ARC-AGI-1, without the grids that are too large; or 'rectangles'.
    split: 'train' or 'evaluation'.
    side: of the canvas.

  Raises:
    DataError: not prepared, no such split, or a grid that is larger than the canvas.
  """
  path = _find(folder, side)
  found = prepared.manifest(path)
  if split not in found['splits']:
    raise DataError(f'{path}: no split {split!r}; there are {", ".join(sorted(found["splits"]))}')
  largest = max(entry['facts']['largest_side'] for entry in found['splits'].values())
  if largest > side:
    raise DataError(f'{path}: grids of sides up to {largest}, the canvas has {side}; prepare them with --side={side}, '
                    f'or set config.data.side={largest}')
  entry = found['splits'][split]
  shards = tuple(os.path.join(path, name) for name in sorted(entry['shards']))
  return Source(shards, decode, functools.partial(_example, side), entry['records'])


def decode(serialized) -> dict:
  """A record, string[] -> grid u8[H, W], task and dataset string[], pair, is_input and is_test i64[]."""
  tf = tensorflow()
  fields = tf.io.parse_single_example(serialized, {
      **{k: tf.io.FixedLenFeature([], tf.string) for k in ('cells', 'task', 'dataset')},
      **{k: tf.io.FixedLenFeature([], tf.int64) for k in _NUMBERS}})
  shape = [fields.pop('height'), fields.pop('width')]
  return {'grid': tf.reshape(tf.io.decode_raw(fields.pop('cells'), tf.uint8), shape), **fields}


def _example(side: int, fields: dict, seed) -> dict:
  tf = tensorflow()
  grid, size = within(fields['grid'], arc_raw.COLOURS, 'colours'), tf.shape(fields['grid'])
  grid = tf.pad(grid, [[0, side - size[0]], [0, side - size[1]]], constant_values=OUTSIDE)
  return {'grid': tf.ensure_shape(grid, [side, side]), 'size': size, 'number': tf.cast(seed % (1 << 32), tf.uint32),
          **{k: tf.cast(fields[k], tf.int32) for k in ('pair', 'is_input')}}


def check(serialized: bytes) -> str:
  """What is wrong with a record; '' if nothing. For `prepare verify`."""
  tf = tensorflow()
  try:
    fields = {k: v.numpy() for k, v in decode(tf.constant(serialized)).items()}
  except tf.errors.OpError:
    return 'not a record of this data set, or its cells are not height x width'
  grid, where = fields['grid'], f'task {fields["task"].decode("utf-8", "replace")}, pair {fields["pair"]}'
  if not grid.size or grid.max() >= arc_raw.COLOURS:
    return f'{where}: no cell, or a colour above {arc_raw.COLOURS - 1}'
  if fields['pair'] < 0 or not {int(fields['is_input']), int(fields['is_test'])} <= {0, 1}:
    return f'{where}: a negative pair, or is_input or is_test is neither 0 nor 1'
  return ''
