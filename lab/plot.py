"""Curves of runs, from their logs: python -m lab.plot RUN [RUN ...] [--metrics=train/loss,eval/AP] [--smooth=0.9] ...

A RUN is a workdir, or a folder whose subfolders are. A metric is SPLIT/NAME: split train, eval (of the averaged
weights where these are kept), eval_raw (of the raw ones beside them), or speed, which is timings.jsonl. With PLAN.toml
in place of runs it draws the pictures of a plan; lab/plot_plan.py has its form. Matplotlib's door; figures are drawn
without a display and without pyplot's global state.

Exit codes: 0 written; 2 a run, a metric or an option that is not there.
"""

import argparse
import difflib
import fnmatch
import hashlib
import io
import json
import math
import os
import re
import sys
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from lab import links, logs
from lab.task import ConfigError

Curve = tuple[np.ndarray, np.ndarray]        # x f64[N], y f64[N]; NaN is a gap
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')   # Okabe and Ito (2008)
DASHES = ('-', '-.', ':')                    # after seven curves; '--' are baselines and marks
LOOK = {'font.family': 'sans-serif', 'font.sans-serif': ['DejaVu Sans'], 'font.size': 10, 'axes.titlesize': 10,
        'axes.spines.top': False, 'axes.spines.right': False, 'axes.edgecolor': '#8a9099', 'axes.labelcolor': '#3c434b',
        'xtick.color': '#5b636c', 'ytick.color': '#5b636c', 'axes.grid': True, 'grid.color': '#e4e7eb',
        'axes.axisbelow': True, 'axes.titlelocation': 'left', 'axes.titleweight': 'bold', 'legend.frameon': False,
        'figure.constrained_layout.use': True, 'figure.constrained_layout.w_pad': 0.1,
        'figure.constrained_layout.h_pad': 0.1, 'savefig.facecolor': 'white',
        'svg.fonttype': 'none', 'svg.hashsalt': 'lab'}       # text stays text; equal figures are equal files
X_AXES = {'step': 'step (updates)', 'examples_seen': 'examples seen', 'hours': 'time (hours)'}
NAMES = {**X_AXES, 'learning_rate': 'learning rate (per update)', 'mfu': 'MFU (share of peak)',
         'items_per_s': 'speed (items/s)', 'seconds': 'time (s)'}
SPLITS = ('train', 'eval', 'eval_raw', 'speed')


class Panel(NamedTuple):
  """One axes of a picture. Curves (name, x, y) of equal name, such as those of several seeds, share a colour."""
  title: str
  y_label: str
  curves: Sequence[tuple[str, np.ndarray, np.ndarray]]
  baselines: Sequence[tuple[float, str]] = ()          # dashed: value, label


def axis(name: str) -> str:
  """'grid_px' -> 'grid (px)': what an axis of this metric (without its split) or x is called, with its unit."""
  if name in NAMES:
    return NAMES[name]
  head, unit = re.fullmatch(r'(.*?)(?:_(ms|s|px2|px|deg|bits|nats|share))?', name, re.DOTALL).groups()
  return (head or name).replace('_', ' ') + (f' ({unit.replace("px2", "px²")})' if unit and head else '')


def labels(paths: Sequence[str]) -> dict[str, str]:
  """{label: path}: the shortest ends of the paths that tell them apart. A run that is named twice is there once."""
  parts = {tuple(os.path.realpath(p).split(os.sep)): p for p in reversed(paths)}
  out = {}
  for mine in reversed(parts):
    size = next(n for n in range(1, len(mine) + 1) if sum(other[-n:] == mine[-n:] for other in parts) == 1)
    out['/'.join(mine[-size:])] = parts[mine]
  return out


def workdirs(paths: Sequence[str]) -> list[str]:
  """The runs that the paths stand for: themselves, or their subfolders with a metrics.jsonl. Raises ConfigError."""
  out = []
  for path in paths:
    if not os.path.isdir(path):
      folder, name = os.path.split(os.path.abspath(path))
      near = difflib.get_close_matches(name, os.listdir(folder), 1) if os.path.isdir(folder) else []
      hint = f'; did you mean {os.path.join(os.path.dirname(path.rstrip("/")), near[0])}?' if near else ''
      raise ConfigError(f'{path}: no such folder{hint}')
    inside = [path] + [os.path.join(path, n) for n in sorted(os.listdir(path))]
    runs = [p for p in inside if os.path.isfile(os.path.join(p, 'metrics.jsonl'))]
    if not runs:
      raise ConfigError(f'{path}: no run is there: neither it nor a folder in it holds a metrics.jsonl')
    out += runs[:1] if runs[0] == path else runs
  return out


def rows(workdir: str) -> list[dict[str, Any]]:
  """The rows of metrics.jsonl, then those of timings.jsonl as split 'speed'. Raises ConfigError for a broken one."""
  try:
    table = logs.rows(workdir)
    path = os.path.join(workdir, 'timings.jsonl')
    if os.path.exists(path):
      with open(path, encoding='utf-8') as f:
        table += [{**json.loads(line), 'split': 'speed'} for line in f if line.endswith('\n')]
    return [{**row, 'step': int(row['step']), 'split': str(row['split'])} for row in table]
  except (ValueError, KeyError, TypeError, RecursionError) as e:
    raise ConfigError(f'{workdir}: a line of metrics.jsonl or timings.jsonl is broken: {e!r}') from None


def series(table: Sequence[Mapping[str, Any]], x: str = 'step') -> dict[str, Curve]:
  """{'train/loss': (x, y), ...} of a run's rows, by split and name; null is NaN. x: step, examples_seen or hours."""
  found: dict[str, list] = {}
  for row in table:
    for name, value in row.items():
      if name not in ('step', 'split') and (value is None or type(value) in (int, float)):
        found.setdefault(f'{row["split"]}/{name}', []).append((row['step'], math.nan if value is None else value))
  place = _places(table, x)
  order = sorted(found, key=lambda m: (SPLITS.index(s) if (s := m.split('/')[0]) in SPLITS else len(SPLITS), m))
  return {m: (place(np.array([s for s, _ in found[m]], float)), np.array([v for _, v in found[m]], float))
          for m in order}


def _places(table, x):
  """steps -> x; between the steps whose x is known it is linear, after them it goes on at the mean pace."""
  if x == 'step':
    return lambda steps: steps
  if x == 'hours':
    known = hours([r for r in table if r['split'] == 'speed' and r.get('seconds') is not None])
  else:
    known = {r['step']: float(r[x]) for r in table if r.get(x) is not None}
  if not known:
    raise ConfigError(f'--x={x}: a run has no {x if x != "hours" else "timings.jsonl"}; --x=step always works')
  steps = sorted(known)
  at = [known[s] for s in steps]
  pace = at[-1] / max(steps[-1], 1)
  return lambda wanted: np.where(wanted > steps[-1], at[-1] + pace * (wanted - steps[-1]),
                                 np.interp(wanted, [0, *steps] if steps[0] > 0 else steps,
                                           [0.0, *at] if steps[0] > 0 else at))


def hours(timings: Sequence[Mapping[str, Any]]) -> dict[int, float]:
  """step -> hours that the processes of a run took up to it. Where `seconds` does not grow, it began at 0 again."""
  out, before, last = {}, 0.0, 0.0
  for row in timings:
    if row['seconds'] <= last:
      before += last
    last = row['seconds']
    out[row['step']] = (before + last) / 3600
  return out


def smoothed(values: np.ndarray, decay: float) -> np.ndarray:
  """Exponential moving average with bias correction: the first value is itself. NaN stays, and counts for nothing."""
  out, total, weight = np.full(len(values), math.nan), 0.0, 0.0
  for i, value in enumerate(values):
    if not math.isnan(value):
      total, weight = decay * total + (1 - decay) * value, decay * weight + 1 - decay
      out[i] = total / weight
  return out


def chosen(patterns: Sequence[str], there: Sequence[str]) -> list[str]:
  """The metrics that names, globs and names without a split stand for. Raises ConfigError for one that isn't there."""
  out = []
  for pattern in patterns:
    bare = {m: m.partition('/')[2] for m in there}
    hits = ([m for m in there if pattern in (m, bare[m])] or
            [m for m in there if fnmatch.fnmatchcase(m, pattern) or fnmatch.fnmatchcase(bare[m], pattern)])
    if not hits:
      near = difflib.get_close_matches(pattern, [*there, *bare.values()], 1)
      raise ConfigError(f'no metric {pattern!r}{f"; did you mean {near[0]}?" if near else ""}; there are: '
                        f'{", ".join(there) or "none"}')
    out += [m for m in hits if m not in out]
  return out


def usual(workdir: str, there: Sequence[str]) -> list[str]:
  """The metrics of a run that one looks at first: its losses, and the score whose best checkpoint it keeps."""
  try:
    with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as f:
      best = json.load(f)['checkpoint']['best'].removeprefix('-')
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
    best = 'loss'
  return [m for m in dict.fromkeys(('train/loss', 'eval/loss', f'eval/{best}')) if m in there]


def curves(runs: Mapping[str, str], metrics: Sequence[str] = (), *, smooth: float = 0.0, baselines=(), x: str = 'step',
           log: bool = False):
  """A Figure with one axes a metric and one colour a run.

  runs: label -> workdir. metrics: names or globs; those of `usual` if empty. smooth: decay of the moving average.
  baselines: (metric, value, label) of dashed lines. Raises ConfigError for a run or a metric that isn't there.
  """
  found = {label: series(rows(workdir), x) for label, workdir in runs.items()}
  there = list(dict.fromkeys(m for f in found.values() for m in f))
  for label, one in found.items():
    if not one:
      raise ConfigError(f'{runs[label]}: its metrics.jsonl holds no numbers yet')
  names = chosen(metrics or dict.fromkeys(m for w in runs.values() for m in usual(w, there)), there) or there[:6]
  dashed = [(m, value, text) for pattern, value, text in baselines for m in chosen([pattern], names)]
  return grid([Panel(metric, axis(metric.partition('/')[2]),
                     [(label, *one[metric]) for label, one in found.items() if metric in one],
                     [(value, text) for m, value, text in dashed if m == metric]) for metric in names],
              x=x, smooth=smooth, log=log, names=list(runs))


def grid(panels: Sequence[Panel], *, x: str = 'step', smooth: float = 0.0, log: bool = False, title: str = '',
         names: Sequence[str] = ()):
  """A Figure with an axes a panel; a panel without curves says that there is no run yet.

  names: of all curves, in the order of their colours; as they come if empty. One legend stands for all panels that
  have the same names, or where `names` are given; else each has its own.
  """
  from matplotlib import lines as artists, rc_context
  each = [list(dict.fromkeys(name for name, _, _ in p.curves)) for p in panels]
  shared = bool(names) or len({frozenset(e) for e in each if e}) == 1
  names = list(names) or list(dict.fromkeys(name for e in each for name in e))
  columns = 2 if len(panels) == 4 else min(len(panels), 3)
  with rc_context(LOOK):
    figure, axes = _grid(columns, -(-len(panels) // columns))
    handle = lambda name: artists.Line2D([], [], **_style(names.index(name)))
    for panel, mine, ax in zip(panels, each, axes):
      many = len(mine) < len(panel.curves)
      for name, xs, ys in panel.curves:
        _draw(ax, xs, ys, names.index(name), smooth, thin=many)
      ax.set(title=_plain(panel.title), xlabel=axis(x), ylabel=_plain(panel.y_label))
      _scale(ax, log)
      for i, (value, text) in enumerate(panel.baselines if mine else ()):
        _dashed(ax, value, text, i)
      if not mine:
        ax.set(xticks=[], yticks=[])
        ax.text(0.5, 0.5, 'no run yet', transform=ax.transAxes, ha='center', color='#5b636c')
      elif not shared:
        _legend(lambda *a, ax=ax: ax.legend(*a, loc='best', fontsize=8), [handle(n) for n in mine], mine)
    for ax in axes[len(panels):]:
      ax.remove()
    if shared:            # its title is the picture's: two things above the panels would lie on each other
      look = {'title': _plain(title), 'title_fontproperties': {'weight': 'bold', 'size': 12}} if title else {}
      _legend(lambda *a: figure.legend(*a, loc='outside upper left', alignment='left', **look,
                                       ncols=max(1, 34 * columns // (max(map(len, names)) + 8))),
              [handle(n) for n in names], names)
    elif title:
      figure.suptitle(_plain(title), x=0.01, ha='left', fontweight='bold', fontsize=12)
  return figure


def lines(series: Mapping[str, Curve], *, x_label: str, y_label: str, title: str = '', log_x: bool = False,
          log_y: bool = False, marks: Mapping[str, float] = {}, smooth: Mapping[str, float] = {}):
  """A Figure with one axes: label -> (x, y), with `marks`, label -> x, as dashed vertical lines.

  A label in `smooth` is drawn as its moving average of that decay, before the values themselves in a faint colour.
  """
  from matplotlib import rc_context
  with rc_context(LOOK):
    figure, (ax,) = _grid(1, 1)
    handles = [_draw(ax, np.asarray(xs, float), np.asarray(ys, float), i, smooth.get(label, 0.0))
               for i, (label, (xs, ys)) in enumerate(series.items())]
    ax.set(title=_plain(title), xlabel=_plain(x_label), ylabel=_plain(y_label))
    if log_x:
      ax.set_xscale('log', nonpositive='mask')
    _scale(ax, log_y)
    for i, (label, at) in enumerate(marks.items()):
      ax.axvline(at, color='#5b636c', linestyle='--', linewidth=1)
      ax.annotate(_plain(label), (at, 1), (4, -4 - 12 * i), xycoords=('data', 'axes fraction'),
                  textcoords='offset points', va='top', fontsize=9, color='#3c434b')
    if [*series] not in ([], ['']):
      _legend(lambda *a: ax.legend(*a, loc='best'), handles, series)
  return figure


def _grid(columns, height):
  from matplotlib.figure import Figure
  figure = Figure(figsize=(4.4 * columns + 0.6, 3.1 * height + 0.4))
  axes = list(figure.subplots(height, columns, squeeze=False).flat)
  for ax in axes:
    ax.locator_params(axis='x', nbins=5)
  return figure, axes


def _style(i):
  return {'color': COLOURS[i % len(COLOURS)], 'linestyle': DASHES[i // len(COLOURS) % len(DASHES)]}


def _draw(ax, xs, ys, i, smooth, thin=False):
  """One curve; few points, and those between two gaps, which no line would show, get a dot."""
  if smooth:
    ax.plot(xs, ys, alpha=0.25, linewidth=1, **_style(i))
    ys = smoothed(ys, smooth)
  gap = np.isnan(np.concatenate([[math.nan], ys, [math.nan]]))
  dots = np.flatnonzero(gap[:-2] & gap[2:]) if len(ys) > 30 else np.arange(len(ys))
  size, width = (2, 0.8) if thin else (3, 1.6)
  return ax.plot(xs, ys, linewidth=width, marker='o', markersize=size, markevery=dots.tolist(), **_style(i))[0]


def _scale(ax, log):
  """A logarithmic y axis, where any value can stand on it."""
  if log and any((np.asarray(line.get_ydata(), float) > 0).any() for line in ax.lines):
    ax.set_yscale('log', nonpositive='mask')


def _dashed(ax, value, text, i):
  ax.axhline(value, color=('#3c434b', '#8a5a00', '#5a3c8a')[i % 3], linestyle='--', linewidth=1.2)
  ax.annotate(_plain(text or f'{value:g}'), (1, value), (-2, 3), xycoords=('axes fraction', 'data'),
              textcoords='offset points', ha='right', fontsize=9, color='#3c434b')


def _legend(make, handles, names):
  """Names are set after the legend is made: it would drop those that begin with an underscore."""
  for text, name in zip(make(handles, ['.' for _ in handles]).get_texts(), names):
    text.set_text(_plain(name))


def _plain(text: str) -> str:
  """Names are data: no formula, and no character that XML can't hold."""
  return ''.join(c if c.isprintable() else '?' for c in text).replace('$', r'\$')


def svg(figure) -> str:
  """The figure as an <svg> element that can stand beside others in one HTML page: only its own ids, no metadata."""
  text = _bytes(figure, 'svg').decode()
  text = re.sub(r'\s*<metadata>.*?</metadata>', '', text[text.index('<svg'):], flags=re.DOTALL)
  used = set(re.findall(r'#([\w.-]+)', text))
  mark = hashlib.sha256(text.encode()).hexdigest()[:8]
  text = re.sub(r' id="([^"]*)"', lambda m: f' id="{mark}-{m[1]}"' if m[1] in used else '', text)
  return re.sub(r'((?:href="|url\()#)', rf'\g<1>{mark}-', text)


def save(figure, path: str) -> list[str]:
  """Writes path.svg and path.png; neither name ever shows half a picture. Returns the two paths."""
  os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
  written = []
  for ending in ('svg', 'png'):
    written.append(f'{path}.{ending}')
    with links.fresh(written[-1] + '.new', 'wb') as f:
      f.write(_bytes(figure, ending))
    os.replace(written[-1] + '.new', written[-1])
  return written


def _bytes(figure, ending):
  from matplotlib import rc_context
  out = io.BytesIO()
  with rc_context(LOOK):
    figure.savefig(out, format=ending, dpi=150, metadata={'Date': None} if ending == 'svg' else None)
  return out.getvalue()


class Parser(argparse.ArgumentParser):
  """One whose errors are the caller's to tell."""

  def error(self, message):
    raise ConfigError(message)


def _decay(text):
  try:
    if 0 <= float(text) < 1:
      return float(text)
  except ValueError:
    pass
  raise argparse.ArgumentTypeError(f'{text!r} is not a number in [0, 1)')


def baseline(text: str) -> tuple[str, float, str]:
  """'eval/AP:0.65:paper' -> ('eval/AP', 0.65, 'paper'); the label may be missing."""
  try:
    metric, value, *label = text.split(':', 2)
    return metric, float(value), ''.join(label)
  except ValueError:
    raise argparse.ArgumentTypeError(f'{text!r} is not METRIC:VALUE[:LABEL], such as eval/AP:0.65:paper') from None


def _arguments(argv):
  parser = Parser(prog='python -m lab.plot', allow_abbrev=False, description='Curves of runs, from their logs.')
  parser.add_argument('runs', nargs='+', metavar='RUN',
                      help='a workdir, or a folder of workdirs; PLAN.toml instead has options of its own')
  parser.add_argument('--metrics', default='', help='comma-separated names or globs, such as train/loss,eval/* or AP')
  parser.add_argument('--smooth', type=_decay, default=0.0, help='decay of the moving average, in [0, 1)')
  parser.add_argument('--baseline', type=baseline, action='append', default=[], metavar='METRIC:VALUE[:LABEL]',
                      help='a dashed line; may be given several times')
  parser.add_argument('--x', choices=X_AXES, default='step', help='what the curves run over')
  parser.add_argument('--log', action='store_true', help='logarithmic y axes')
  parser.add_argument('--output', default='curves', help='path without ending; .svg and .png are written')
  return parser.parse_args(argv[1:])


def main(argv: list[str]) -> int:
  """Draws what argv (after the program's name) asks for and returns the exit code."""
  try:
    if any(word.endswith('.toml') and not word.startswith('-') for word in argv[1:]):
      from lab import plot_plan
      written = plot_plan.run(argv)
    else:
      flags = _arguments(argv)
      figure = curves(labels(workdirs(flags.runs)), [m for m in flags.metrics.split(',') if m], smooth=flags.smooth,
                      baselines=flags.baseline, x=flags.x, log=flags.log)
      written = save(figure, re.sub(r'\.(svg|png)$', '', flags.output))
  except (ConfigError, OSError) as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  print(f'written: {" and ".join(written)}')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
