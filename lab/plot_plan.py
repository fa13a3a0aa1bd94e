"""Pictures by a plan: python -m lab.plot PLAN.toml [--root=FOLDER] [--output=FOLDER] [--partial].

  root = "runs/video_grid"             # folder of the runs; --root replaces it
  output = "runs/video_grid/plots"     # folder of the pictures; --output replaces it

  [[picture]]
  name = "five_losses"                 # five_losses.svg and five_losses.png
  title = "Five losses"                # may be missing, as may:
  x = "step"                           # or examples_seen, or hours
  log = false                          # logarithmic y axes
  smooth = 0.0                         # decay of the moving average

  [[picture.panel]]                    # a picture is a grid of panels
  title = "reconstruction, zero input"
  where = {"model.heads" = "recon"}    # the runs whose config.json has these values, or one of a list; all without it
  label = "loss.combo"                 # key, or list of keys, whose values name the curve; the folder's name without it
  metrics = ["eval/loss"]              # names or globs
  baselines = ["eval/loss:3.18:mean image"]    # METRIC:VALUE[:LABEL], dashed

Runs of equal label, such as those of several seeds, are thin lines of one colour. A label has its colour in all panels
of a picture. A panel without runs, or with a metric that none of them has, is an error; with --partial it says so.
"""

import argparse
import json
import os
from typing import Any, Mapping, NamedTuple, Sequence

from lab import plot
from lab.config import flatten, nearest
from lab.points import expect, load, near, text
from lab.task import ConfigError

PLAN = {'root': 'runs/sweep', 'output': 'runs/plots', 'picture': [{'name': 'losses', 'panel': []}]}
PICTURE = {'name': 'losses', 'title': 'Losses', 'x': 'step', 'log': False, 'smooth': 0.9,
           'panel': [{'metrics': ['eval/loss']}]}
PANEL = {'title': 'Loss', 'where': {'optim.name': 'sgd'}, 'label': ['optim.name'], 'metrics': ['eval/loss'],
         'baselines': ['eval/loss:3.18:mean image']}


class Run(NamedTuple):
  """What a panel needs to know of a run."""
  name: str
  config: Mapping[str, Any]                # flat
  series: Mapping[str, plot.Curve]


def run(argv: Sequence[str]) -> list[str]:
  """Draws all pictures of the plan in argv (after the program's name); returns the paths. Raises ConfigError."""
  parser = plot.Parser(prog='python -m lab.plot', allow_abbrev=False, description='Pictures of runs, by a plan.')
  parser.add_argument('plan', metavar='PLAN.toml', help='what to draw; lab/plot_plan.py has its form')
  parser.add_argument('--root', default='', help='folder of the runs, instead of that of the plan')
  parser.add_argument('--output', default='', help='folder of the pictures, instead of that of the plan')
  parser.add_argument('--partial', action='store_true', help='panels that have no run yet stay empty')
  flags = parser.parse_args(argv[1:])
  plan = read(flags.plan, flags.root, flags.output)
  # all are made before the first is written: an error leaves no half of a plan
  figures = {one['name']: _picture(flags.plan, plan['root'], one, flags.partial) for one in plan['picture']}
  return [path for name, figure in figures.items() for path in plot.save(figure, os.path.join(plan['output'], name))]


def read(path: str, root: str = '', output: str = '') -> dict[str, Any]:
  """Reads a plan, with all keys of every picture and panel. Raises ConfigError, naming the nearest key."""
  plan = load(path)
  expect(path, plan, PLAN)
  plan |= {k: v for k, v in (('root', root), ('output', output)) if v}
  _required(path, plan, PLAN)
  pictures = {}
  for i, picture in enumerate(plan['picture'], 1):
    where = _part(f'{path}: picture {i}', picture, PICTURE, ('name', 'panel'))
    name = picture['name']
    if name in pictures or os.path.basename(name) != name or name in ('.', '..'):
      raise ConfigError(f'{where}: name = {name!r}: expected a file\'s name that no other picture has')
    picture = pictures[name] = {'title': '', 'x': 'step', 'log': False, 'smooth': 0.0, **picture}
    if picture['x'] not in plot.X_AXES:
      raise ConfigError(f'{where}: x = {picture["x"]!r}: expected {", ".join(plot.X_AXES)}')
    if not 0 <= picture['smooth'] < 1:
      raise ConfigError(f'{where}: smooth = {picture["smooth"]}: expected a number in [0, 1)')
    picture['panel'] = [_panel(f'{where}, panel {j}', panel) for j, panel in enumerate(picture['panel'], 1)]
  return {**plan, 'picture': [*pictures.values()]}


def _panel(where, panel):
  if isinstance(panel, dict) and isinstance(panel.get('label'), str):
    panel['label'] = [panel['label']]
  _part(where, panel, PANEL, ('metrics',))
  for key in ('label', 'metrics', 'baselines'):
    if not all(isinstance(word, str) for word in panel.get(key, ())):
      raise ConfigError(f'{where}: {key} = {panel[key]!r}: expected strings, such as {PANEL[key]!r}')
  try:
    lines = [plot.baseline(word) for word in panel.get('baselines', ())]
  except argparse.ArgumentTypeError as e:
    raise ConfigError(f'{where}: baselines: {e}') from None
  for metric, _, _ in lines:
    if metric not in panel['metrics']:
      raise ConfigError(f'{where}: baselines: {metric!r} is none of its metrics{near(metric, panel["metrics"])}')
  return {'title': '', 'label': [], **panel, 'where': flatten(panel.get('where', {})),
          'baselines': [(value, label) for _, value, label in lines]}


def _part(where, table, keys, required):
  """Checks a picture or a panel; returns what it is called in messages."""
  if not isinstance(table, dict):
    raise ConfigError(f'{where}: {table!r}: expected a table')
  expect(where, table, keys)
  _required(where, table, {key: keys[key] for key in required})
  return where


def _required(where, table, keys):
  for key, example in keys.items():
    if not table.get(key):
      raise ConfigError(f'{where}: {key} is missing or empty; such as {key} = {json.dumps(example)}')


def _picture(path, root, picture, partial):
  """The figure of a picture."""
  runs, panels = _runs(root, picture['x'], partial), []
  for panel in picture['panel']:
    where = f'{path}: picture {picture["name"]}, panel {panel["title"] or panel["metrics"][0]!r}'
    mine = _selected(where, panel, runs)
    there = list(dict.fromkeys(m for run in mine for m in run.series))
    if not mine and not partial:
      raise ConfigError(f'{where}: no run in {root} has {panel["where"] or "anything"}; --partial leaves it empty')
    metrics = []
    for pattern in panel['metrics']:
      try:
        metrics += [m for m in plot.chosen([pattern], there) if m not in metrics]
      except ConfigError as e:
        if not partial:
          raise ConfigError(f'{where}: {e}') from None
    axes = dict.fromkeys(plot.axis(m.partition('/')[2]) for m in metrics or panel['metrics'])
    curves = [(_label(where, panel, run) + f' {m}' * (len(metrics) > 1), *run.series[m])
              for run in mine for m in metrics if m in run.series]
    panels.append(plot.Panel(panel['title'], ', '.join(axes), curves, panel['baselines']))
  return plot.grid(panels, x=picture['x'], smooth=picture['smooth'], log=picture['log'], title=picture['title'])


def _runs(root, x, partial):
  """Every run in a folder, by name."""
  if partial and os.path.isdir(root) and not any(
      os.path.isfile(os.path.join(root, n, 'metrics.jsonl')) for n in ('', *os.listdir(root))):
    return []
  found = []
  for name, workdir in plot.labels(plot.workdirs([root])).items():
    try:
      with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as f:
        config = flatten(json.load(f))
    except FileNotFoundError:              # of a run that is just starting
      if partial:
        continue
      config = {}
    except (ValueError, AttributeError, RecursionError) as e:
      raise ConfigError(f'{workdir}: config.json can\'t be read: {e}') from None
    rows = plot.rows(workdir)
    found.append(Run(name, config, plot.series(rows, x) if rows else {}))
  return found


def _selected(where, panel, runs):
  """The runs whose configuration has the values of panel.where."""
  keys = dict.fromkeys(k for run in runs for k in run.config)
  for key in (*panel['where'], *panel['label']) if runs else ():
    if key not in keys:
      raise ConfigError(f'{where}: no run has the key {key!r}{nearest(key, keys).replace("--config.", "")}')
  # JSON's and TOML's true is no 1, but their 1 is a 1.0
  def same(a, b):
    if isinstance(b, list) and not isinstance(a, list):
      return any(same(a, one) for one in b)
    return a == b and isinstance(a, bool) == isinstance(b, bool)
  return [run for run in runs if all(k in run.config and same(run.config[k], v) for k, v in panel['where'].items())]


def _label(where, panel, run):
  for key in panel['label']:
    if key not in run.config:
      raise ConfigError(f'{where}: label: the run {run.name} has no key {key!r}')
  values = [run.config[k] for k in panel['label']]
  return ', '.join(v if isinstance(v, str) else text(v) for v in values) or run.name
