"""References to checkpoints of runs that lie below one folder, config.runs_root: [project/]run/{best|backup}[/which].

  pose/best/best-1        of ROOT/pose, the checkpoint with the best value of its own metric, checkpoint.best
  coco/pose/backup/latest of ROOT/coco/pose, the newest checkpoint

Kind 'best' is what a run keeps for its score: one checkpoint, or where it keeps all (checkpoint.keep = -1), all that
have a score. Kind 'backup' is the newest checkpoint.keep. Within a kind, `which` is an alias (best, the same as best-1;
best-N, the N-th by score; latest) or a step (step-0001500, step-1500 or 1500).
"""

import contextlib
import difflib
import glob
import logging
import os
import re
import time
from typing import Mapping, NamedTuple

import jax

from lab import files, inspect, mesh as meshes
from lab.checkpoint import CheckpointError, Checkpoints
from lab.task import ConfigError

log = logging.getLogger('lab')
KINDS = ('best', 'backup')
GRAMMAR = '[project/]run/{best|backup}[/{best|best-N|latest|step-N|N}]'


class ArtifactRef(NamedTuple):
  """A reference, read; project is '' where there is none, which '' where it is not said, a step always step-NNNNNNN."""
  project: str
  run: str
  kind: str
  which: str

  def __str__(self) -> str:
    return '/'.join(filter(None, self))


def parse(text: str) -> ArtifactRef | None:
  """'coco/pose/best/1500' -> its parts; None for what is not of this grammar, which so is a plain path.

  Of three parts the last is an alias or a step where the second is a kind, and the first is a project otherwise; so
  pose/best/best is an alias of the run pose, not the run `best` of a project.
  """
  *names, last = parts = text.split('/')
  if {'', '.', '..'} & {*parts}:
    return None
  kind, which = last, ''
  if len(names) in (2, 3) and names[-1] in KINDS and _alias(last):
    *names, kind, which = *names, _alias(last)
  if kind not in KINDS or len(names) not in (1, 2):
    return None
  project, run = names if len(names) == 2 else ('', *names)
  return ArtifactRef(project, run, kind, which)


def find(ref: ArtifactRef, root: str, key: str) -> tuple[str, str]:
  """(folder of the run, number of the step) that `ref` means below the folder `root`; `key` is where the config has it.

  Raises CheckpointError where the run or the checkpoint is not there, naming the near ones, and ConfigError where the
  reference does not say which: with a table of all that there is, for nothing is guessed. All processes call it and
  get the answer of the first one, for a shared disk may show others an older list.
  """
  folder, step = meshes.gather(_found(ref, root, key) if jax.process_index() == 0 else ())
  return folder, step


def _found(ref, root, key) -> tuple[str, str]:
  told, folder = f'{key} = {ref}', os.path.join(root, ref.project, ref.run)
  with contextlib.closing(Checkpoints(folder)) as checkpoints:
    if not checkpoints.steps():
      raise CheckpointError(f'{told}: {_absent(ref, root, folder)}')
    there = kept(checkpoints)
  if not ref.which:
    some = ('best', 'best') if ref.kind == 'best' and there['best'] else ('backup', 'latest')
    raise ConfigError(f'{told}: which checkpoint of {folder}?\n{listing(folder, there)}\nchoose one by an alias, such '
                      f'as {key} = {ref._replace(kind=some[0], which=some[1])}')
  if ref.which not in there[ref.kind]:
    raise CheckpointError(f'{told}: {folder} has no {ref.kind}/{ref.which}; {_instead(ref, there)}')
  step = there[ref.kind][ref.which]
  log.info('%s: step %d of %s', told, step, folder)
  return folder, str(step)


def kept(checkpoints: Checkpoints) -> dict[str, dict[str, int]]:
  """kind -> alias -> step, for a run that has at least one checkpoint; the newest one tells what is kept and by what.

  Raises CheckpointError where the description of that one is broken.
  """
  steps = checkpoints.steps()
  settings = checkpoints.meta(steps[-1])['config']['checkpoint']
  ranked, keep = checkpoints.ranked(settings['best']), settings['keep']
  best, newest = (ranked, steps) if keep < 0 else (ranked[:1], steps[-max(keep, 1):])
  return {'best': _aliases(sorted(best), ranked), 'backup': _aliases(newest, ranked)}


def listing(folder: str, there: Mapping[str, Mapping[str, int]]) -> str:
  """A table of what `kept` found: kind, aliases, step, score by the run's metric, local time of saving, size."""
  description, outline = inspect.describe(folder), files.outline(folder)
  metric = description['best_metric'].removeprefix('-')
  rows = [('kind', 'aliases', 'step', metric or 'score', 'saved', 'size')]
  about = {s['step']: s for s in description['steps']}
  for kind in KINDS:
    for step in dict.fromkeys(there[kind].values()):
      with contextlib.suppress(FileNotFoundError, KeyError):       # a program that trains has removed it meanwhile
        score, size = about[step]['scores'].get(metric), f'{about[step]["bytes"] / 1e6:,.2f} MB'
        saved = os.path.getmtime(os.path.join(outline, 'checkpoints', str(step), 'meta', 'metadata'))
        rows.append((kind, ', '.join(a for a, s in there[kind].items() if s == step), str(step),
                     '-' if score is None else f'{score:.4g}',
                     time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(saved)), size))
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return '\n'.join(('  ' + '  '.join(map(str.ljust, row, widths))).rstrip() for row in rows)


def _alias(text):
  """The alias or step that a text is, a step as step-NNNNNNN; '' for another text."""
  if step := re.fullmatch(r'(?:step-)?([0-9]{1,18})', text):
    return f'step-{int(step[1]):07d}'
  return text if re.fullmatch(r'best(-[1-9][0-9]{0,17})?|latest', text) else ''


def _aliases(steps, ranked):
  """alias -> step of one kind, from its steps, ascending, and the steps that have a score, best first."""
  ranks = [s for s in ranked if s in steps]
  return ({'best': s for s in ranks[:1]} | {f'best-{i}': s for i, s in enumerate(ranks, 1)} |
          {'latest': s for s in steps[-1:]} | {f'step-{s:07d}': s for s in steps})


def _absent(ref, root, folder):
  """What is wrong with the folder of a run without a checkpoint, and at most three runs below root that are near.

  Near are those of this name elsewhere, those of a project of this name, and those of nearly this name.
  """
  if not files.isdir(root):
    return f'config.runs_root = {root} is no folder; name the one that has the runs, or give the path of a run'
  found = [f for depth in ('*', '*/*') for f in glob.glob(f'{depth}/checkpoints', root_dir=root)]
  runs = [ref._replace(project=os.path.dirname(r), run=os.path.basename(r)) for r in map(os.path.dirname, found)]
  runs = sorted((r for r in runs if r != ref), key=lambda r: (r.run != ref.run, r.project != ref.project, r))
  close = difflib.get_close_matches(ref.run, [r.run for r in runs])
  near = [r for r in runs if r.run == ref.run or r.project == ref.run or r.run in close] or runs
  lack = 'has no checkpoint' if files.isdir(os.path.join(folder, 'checkpoints')) else 'is no run'
  return f'{folder} {lack}' + (f'; nearest: {", ".join(map(str, near[:3]))}' if near else '')


def _instead(ref, there):
  """What a run has that is near to the checkpoint which it has not."""
  if ref.which.startswith('step-'):
    wanted = int(ref.which.removeprefix('step-'))
    near = sorted((abs(s - wanted), k != ref.kind, f'{k}/step-{s:07d}') for k in KINDS for s in {*there[k].values()})
    return f'nearest: {", ".join(name for *_, name in near[:3])}'
  ranks = sum(alias.startswith('best-') for alias in there[ref.kind])
  if not ranks:
    return f'none has a score by checkpoint.best; there are {", ".join(f"backup/{a}" for a in [*there["backup"]][:3])}'
  return f'it keeps {ranks} with a score: {ref.kind}/best-1{f" to {ref.kind}/best-{ranks}" if ranks > 1 else ""}'
