"""A run on one page: WORKDIR/run.html, made of nothing but the files of the workdir.

The page is whole in itself: pictures and curves lie inside it, it loads nothing and runs nothing, so it can be mailed
or put beside a paper. What is read is data and is escaped; of a file that is missing or broken, the page says so.
"""

import json
import os
import re
import shlex
import time
from typing import Any, Callable, Mapping, NamedTuple

from lab import config as configs, evaluate, files, links, logs, plot
from lab.page_parts import missing, number, pictures, text
from lab.page_style import CSS
from lab.task import ConfigError

BUCKETS = {'step': ('#0b7a75', 'useful steps'), 'start': ('#8d99a6', 'start'), 'compile': ('#6f5aa8', 'compilation'),
           'restore': ('#4d7fb8', 'restoring'), 'wait': ('#d9822b', 'waiting for data'),
           'evaluate': ('#3aa0c9', 'evaluation'), 'save': ('#b6a021', 'saving'),
           'lost': ('#c0392b', 'steps done again'), 'idle': ('#c9ced4', 'idle, such as between starts')}
MEMORY = {'parameters': ('#0b7a75', 'parameters'), 'optimizer': ('#6f5aa8', 'optimizer state'),
          'batch': ('#d9822b', 'batch'), 'activations': ('#3aa0c9', 'activations and scratch')}
MOST = 16 << 20          # bytes of a JSON or text file
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Run(NamedTuple):
  """What the files of a workdir say. Missing files are empty."""
  workdir: str                                 # where they lie on this machine
  address: str                                 # the workdir as it was given
  config: Mapping[str, Any]
  rows: list[dict[str, Any]]
  checkpoints: dict[int, Mapping[str, Any]]    # step -> scores
  environment: Mapping[str, Any]
  memory: Mapping[str, Any]
  faults: list[str]                            # what could not be read, for the reader of the page


def write(workdir: str) -> str:
  """Writes workdir/run.html at once and returns its path. Raises ConfigError where the workdir is not a run's."""
  folder = files.local(workdir)
  if not any(os.path.isfile(os.path.join(folder, name)) for name in ('config.json', 'metrics.jsonl')):
    raise ConfigError(f'--workdir={workdir}: no run is there: neither config.json nor metrics.jsonl')
  logs.write_atomically(os.path.join(folder, 'run.html'), page(read(workdir)))
  files.push(workdir)
  return os.path.join(workdir, 'run.html')


def read(workdir: str) -> Run:
  """Reads the small files of a workdir; pictures and the ledger are read where they are shown."""
  address, workdir = workdir, files.outline(workdir)
  faults: list[str] = []
  config, environment, memory = (_json(os.path.join(workdir, f'{n}.json'), faults)
                                 for n in ('config', 'environment', 'memory'))
  try:
    rows = plot.rows(workdir)
  except (ConfigError, OSError) as e:
    rows = []
    faults.append(str(e))
  folder = os.path.join(workdir, 'checkpoints')
  steps = sorted(int(n) for n in (os.listdir(folder) if os.path.isdir(folder) else ())
                 if re.fullmatch(r'0|[1-9]\d*', n) and os.path.isfile(os.path.join(folder, n, 'meta', 'metadata')))
  scores = {s: _json(os.path.join(folder, str(s), 'meta', 'metadata'), faults).get('scores') for s in steps}
  return Run(workdir, address, config, rows, {s: v if isinstance(v, dict) else {} for s, v in scores.items()},
             environment, memory, faults)


def page(run: Run) -> str:
  """The whole page as HTML."""
  where = run.address if files.remote(run.address) else os.path.abspath(run.address)
  name = os.path.basename(where.rstrip('/'))
  sections = (('scores', 'Scores', _scores), ('curves', 'Curves', _curves), ('pictures', 'Pictures', _pictures),
              ('goodput', 'Where the time went', _goodput), ('environment', 'Environment', _environment),
              ('config', 'Configuration', _config), ('checkpoints', 'Checkpoints', _checkpoints),
              ('resume', 'Go on from here', _resume), ('parameters', 'Parameters', _parameters))
  links = ''.join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections)
  body = ''.join(f'<section id="{key}"><h2>{title}</h2>{make(run)}</section>\n' for key, title, make in sections)
  return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
          f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
          f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
          f'<title>{text(name)}</title><style>{CSS}</style></head>\n<body><main>\n'
          f'<header><h1>{text(name)}</h1>{_state(run)}<nav>{links}</nav></header>\n{_warnings(run)}{body}'
          f'<footer>Written {time.strftime("%Y-%m-%d %H:%M %Z")} from the files of '
          f'<code>{text(where)}</code></footer>\n</main></body></html>\n')


# pieces


def size(count: float) -> str:
  """Bytes as '3.2 GiB' or '12 MiB'."""
  return f'{count / (1 << 30):.3g} GiB' if count >= 1 << 30 else f'{count / (1 << 20):.3g} MiB'


def table(rows, head=(), numbers: bool = False) -> str:
  """Rows of (class, cells) of HTML; the first cell is the row's name. Numbers stand to the right."""
  kind = ' class="number"' if numbers else ''
  top = ''.join(f'<th{kind if i else ""}>{cell}</th>' for i, cell in enumerate(head))
  out = f'<thead><tr>{top}</tr></thead>' if head else ''
  for mark, (name, *cells) in rows:
    first = f'<td>{name}</td>' if head and numbers else f'<th scope="row">{name}</th>'
    out += (f'<tr{f" class={chr(34)}{mark}{chr(34)}" if mark else ""}>{first}' +
            ''.join(f'<td{kind}>{c}</td>' for c in cells) + '</tr>')
  return f'<div class="wide"><table>{out}</table></div>'


def bar(parts: Mapping[str, float], whole: float, names: Mapping[str, tuple[str, str]]) -> str:
  """A horizontal stacked bar; parts are shares of `whole`, in the colours of `names`."""
  cells = ''.join(f'<i style="width:{100 * value / whole:.3f}%;background:{names[key][0]}" '
                  f'title="{names[key][1]} {value / whole:.1%}"></i>' for key, value in parts.items() if value > 0)
  return f'<div class="bar" role="img" aria-label="shares; the table below has the numbers">{cells}</div>'


def _swatch(names, key):
  return f'<i class="swatch" style="background:{names[key][0]}"></i>{names[key][1]}'


def _json(path: str, faults: list[str]) -> dict[str, Any]:
  """A JSON object; {} where the file is missing, or broken, which is a fault."""
  try:
    got = json.loads(links.read(path, MOST))
    if isinstance(got, dict):
      return got
    faults.append(f'{os.path.basename(path)} can\'t be read: it is no JSON object')
  except FileNotFoundError:
    pass
  except (OSError, ValueError, RecursionError) as e:
    faults.append(f'{os.path.basename(path)} can\'t be read: {e}')
  return {}


def _total(run):
  total = run.config.get('total_steps')
  return total if type(total) is int and total > 0 else 0


def _step(run):
  """The step from which the run would go on: of its newest checkpoint, else of its newest row."""
  return max(run.checkpoints or [row['step'] for row in run.rows] or [0])


def _best(run):
  """(metric, whether more is better) of config.checkpoint.best; ('', True) where none is named."""
  section = run.config.get('checkpoint')
  best = str(section.get('best', '')) if isinstance(section, dict) else ''
  return best.removeprefix('-'), not best.startswith('-')


def _early(run):
  """Why the run ended before its last step; '' where it did not."""
  try:
    return evaluate.stalled(run.config, run.rows) if run.checkpoints and _step(run) < _total(run) else ''
  except (KeyError, TypeError, AttributeError):      # of an older program, or broken
    return ''


def _last(run, split):
  return next((row for row in reversed(run.rows) if row['split'] == split), {})


# sections


def _state(run):
  step, total = _step(run), _total(run)
  done, early = total and step >= total, _early(run)
  done = done or bool(early)
  line = (f'finished {number(step)} of {number(total)} steps' if done else
          f'not finished: step {number(step)}{f" of {number(total)}" if total else ""}')
  task = run.config.get('task') or 'unknown, for config.json is missing'
  return (f'<p>Task <code>{text(task)}</code></p><p><span class="state{"" if done else " open"}">{line}</span> '
          f'as of {time.strftime("%d %B %Y, %H:%M")}</p>')


def _warnings(run):
  found = list(run.faults)
  step, total = _step(run), _total(run)
  if _early(run):
    found.append(f'The run stopped early: {_early(run)}.')
  elif total and step < total:
    ahead = max((row['step'] for row in run.rows), default=0)
    found.append(f'The run has not reached its last step: it would go on from step {step:,}'
                 f'{f", though it was seen at step {ahead:,}" if ahead > step else ""}.')
  skipped = _last(run, 'train').get('skipped')
  if isinstance(skipped, (int, float)) and skipped > 0:
    found.append(f'{number(skipped)} updates were skipped: their gradients were not finite.')
  bad = _last(run, 'eval').get('bad_records')
  if isinstance(bad, (int, float)) and bad > 0:
    found.append(f'{number(bad)} records of the evaluation split are broken and were left out.')
  items = ''.join(f'<li>{text(f)}</li>' for f in found)
  return f'<section class="warning" role="note"><ul>{items}</ul></section>\n' if found else ''


def _scores(run):
  row, best = _last(run, 'eval'), _best(run)[0]
  raw = _last(run, 'eval_raw')
  raw = raw if raw.get('step') == row.get('step') else {}
  names = [k for k in row if k not in ('step', 'split', 'examples', 'bad_records') and '/' not in k]
  if not names:
    return missing('No evaluation yet: metrics.jsonl has no row of split eval.')
  names.sort(key=lambda k: (k != best, k != 'loss'))
  cells = ''.join(f'<div class="score{" best" if k == best else ""}"><span>{text(plot.axis(k))}</span>'
                  f'<b>{number(row[k])}</b>' + (f'<span>raw weights {number(raw[k])}</span>' if k in raw else '') +
                  '</div>' for k in names)
  examples = f', on {number(row["examples"])} examples' if 'examples' in row else ''
  weights = ' Large: the averaged weights; below: the raw ones beside them.' if raw else ''
  return f'<div class="scores">{cells}</div><p class="soft">At step {number(row["step"])}{examples}.{weights}</p>'


def _curves(run):
  found = plot.series(run.rows)
  best = _best(run)[0]
  if best in ('', 'loss'):
    best = next((m[5:] for m in found if m.startswith('eval/') and m.count('/') == 1 and
                 m[5:] not in ('loss', 'examples', 'bad_records')), '')
  wanted = (('Loss', 'loss', {'eval': 'eval/loss', 'eval, raw weights': 'eval_raw/loss', 'train': 'train/loss'}),
            (best, best, {'eval': f'eval/{best}', 'eval, raw weights': f'eval_raw/{best}'}),
            ('Learning rate', 'learning_rate', {'': 'train/learning_rate'}),
            ('Gradient norm', 'gradient_norm', {'': 'train/gradient_norm'}),
            ('Speed', 'items_per_s', {'': 'speed/items_per_s'}),
            ('Waiting for data', 'data_wait_share', {'': 'speed/data_wait_share'}))
  drawn = ''
  for title, name, metrics in wanted:
    lines = {label: found[m] for label, m in metrics.items() if m in found}
    smooth = {label: 0.9 for label in ('train', '') if name in ('loss', 'gradient_norm') and
              label in lines and len(lines[label][0]) > 100}
    if lines:
      figure = plot.lines(lines, x_label=plot.axis('step'), y_label=plot.axis(name), smooth=smooth,
                          title=title + (' (training smoothed)' if 'train' in smooth else ' (smoothed)' * bool(smooth)))
      drawn += f'<figure role="img" aria-label="{text(title)} over the steps">{plot.svg(figure)}</figure>'
  return f'<div class="curves">{drawn}</div>' if drawn else missing('No curves: metrics.jsonl has no numbers yet.')


def _pictures(run):
  return pictures(run.workdir)


def _goodput(run):
  from lab import ledger, memory
  try:
    found = ledger.summary(run.workdir)
  except (OSError, ValueError, KeyError, TypeError) as e:
    return missing(f'ledger.jsonl can\'t be read: {text(e)}')
  seconds = {k: float(found['seconds'].get(k, 0)) for k in (*BUCKETS, *found['seconds'])} if found else {}
  whole = max(sum(seconds.values()), float(found.get('wall_s', 0))) if found else 0
  if whole <= 0:
    return missing('The run kept no ledger of its time.')
  names = {**{k: ('#8d99a6', text(k)) for k in seconds}, **BUCKETS}
  body = [('', (_swatch(names, k), f'{s:,.1f}', f'{s / whole:.1%}')) for k, s in seconds.items() if s > 0]
  starts, lost = found.get('starts', 1), found.get('lost_steps', 0)
  return (f'<p><b>{found["goodput"]:.1%}</b> of {logs.duration(whole)} were useful steps (goodput).</p>'
          f'{bar(seconds, whole, names)}{table(body, ("", "seconds", "share"), numbers=True)}'
          f'<p class="soft">Restarts: {number(max(starts - 1, 0))}. Steps done again after them: {number(lost)}. '
          f'Compilations: {number(found.get("compilations", 0))}. Memory in use at most: '
          f'{memory.size(found.get("peak", 0))}.</p>')


def _environment(run):
  env = run.environment
  if not env:
    facts = missing('environment.json is missing.')
  else:
    versions = env.get('versions') if isinstance(env.get('versions'), dict) else {}
    names = {'devices': 'Devices', 'processes': 'Processes', 'platform': 'Platform', 'python': 'Python',
             'commit': 'Commit'}
    facts = (f'<div class="facts">{table([("", (title, text(env[k]))) for k, title in names.items() if env.get(k)])}'
             f'{table([("", (text(k), text(v))) for k, v in versions.items()])}</div>')
  return f'{facts}<h3>Memory of one device</h3>{_memory(run)}'


def _memory(run):
  parts = {k: float(v) for k in MEMORY if isinstance(v := run.memory.get(k), (int, float)) and v > 0}
  if not parts:
    return missing('memory.json is missing.')
  limit, used = run.memory.get('limit'), sum(parts.values())
  limit = limit if isinstance(limit, (int, float)) and limit > 0 else 0
  body = [('', (_swatch(MEMORY, k), size(v), f'{v / (limit or used):.1%}')) for k, v in parts.items()]
  return (bar(parts, max(limit, used), MEMORY) +
          table([*body, ('', ('together', size(used), f'{used / (limit or used):.1%}'))],
                ('', 'size', f'share of {size(limit or used)}'), numbers=True))


def _config(run):
  if not run.config:
    return missing('config.json is missing.')
  default = configs.flatten(json.loads(configs.core().to_json()))
  flat = configs.flatten(run.config)
  show: Callable[[Any], str] = lambda value: f'<code>{text(json.dumps(value, ensure_ascii=False))}</code>'
  changed = [k for k in flat if k in default and flat[k] != default[k]]
  rows = [('changed' if k in changed else '', (text(k), show(v))) for k, v in flat.items()]
  return (table([('', (text(k), show(flat[k]), show(default[k]))) for k in changed], ('key', 'here', 'default')) +
          f'<details><summary>All {len(flat)} keys; those that differ from the core\'s defaults are marked</summary>'
          f'{table(rows)}</details>')


def _checkpoints(run):
  if not run.checkpoints:
    return missing('No checkpoint is on disk.')
  metric, more = _best(run)
  values = {s: v[metric] for s, v in run.checkpoints.items() if isinstance(v.get(metric), (int, float))}
  best = (max if more else min)(values, key=values.get) if values else None
  names = list(dict.fromkeys(k for v in run.checkpoints.values() for k in v
                             if '/' not in k and k not in ('examples', 'bad_records')))
  names = sorted(names, key=lambda k: (k != metric, k != 'loss'))[:6]
  rows = [('best' if s == best else '', (f'{s:,}', *(number(v[k]) if k in v else '' for k in names)))
          for s, v in run.checkpoints.items()]
  return table(rows, ('step', *map(text, names)), numbers=True)


def _resume(run):
  best = ('--step=best',) if _best(run)[0] else ()
  train, ways = _command(run), (
      ('Scores of a checkpoint:', ('--mode=eval', *best)),
      ('Predictions for a file, a folder or a camera number:', ('--mode=predict', '--input=PATH')))
  if not train:
    return missing('environment.json does not tell the command.') + (
        f'<p>Type the command that started the run, with <code>--workdir={text(shlex.quote(run.address))}</code>: '
        f'it goes on where it stopped. Add <code>{" ".join(ways[0][1])}</code> for scores or '
        f'<code>{" ".join(ways[1][1])}</code> for predictions.</p>')
  done = _total(run) and _step(run) >= _total(run)
  why = ('The run is finished. The same command goes on where it stopped, given a larger '
         '<code>--config.total_steps</code>:' if done else 'The same command goes on where it stopped:')
  return ''.join(f'<p>{what}</p><pre class="words">{_shell([*train, *flags])}</pre>'
                 for what, flags in ((why, ()), *ways))


def _command(run):
  """The words of the command that started the run, without its --mode; none where it is not known."""
  words = run.environment.get('command')
  words = [str(w) for w in words] if isinstance(words, list) else []
  return [w for before, w in zip(['', *words], words)
          if not re.match(r'--?mode(=|$)', w) and before not in ('--mode', '-mode')]


def _shell(words):
  """A command line that can be copied; it breaks between words only."""
  return ' '.join(f'<span>{text(shlex.quote(w))}</span>' for w in words)


def _parameters(run):
  try:
    table = links.read(os.path.join(run.workdir, 'parameters.txt'), MOST).decode('utf-8', 'replace')
    return f'<details><summary>Every array: shape, type, sharding</summary><pre>{text(table)}</pre></details>'
  except FileNotFoundError:
    return missing('parameters.txt is missing.')
  except OSError as e:
    return missing(f'parameters.txt can\'t be read: {text(e)}')
