"""--mode=inspect: what a run or a checkpoint holds.

Reads plain files only: no device, no Orbax, no data, and nothing is changed. So any machine can look at any run, and at
any time, while it trains as well.
"""

import collections
import json
import math
import os
import re
from typing import Any

import jax.numpy as jnp

from lab import files, ledger, logs
from lab.checkpoint import CheckpointError
from lab.config import core, flatten

# group -> where the paths of its arrays begin; the first that fits
GROUPS = (('params', 'params/'), ('ema', 'opt/ema/'), ('stats', 'stats/'), ('opt', ''))
BROKEN = 'its description is broken'


def run(workdir: str, which: str = 'latest', output: str = '') -> None:
  """Prints the description of a run, or of one of its checkpoints, and writes it to the file `output` as JSON.

  Raises ConfigError where nothing can be written there.
  """
  description = describe(workdir, which)
  if output:
    files.make_folder('--output', output)
  print(text(description), flush=True)
  if output:
    logs.write_atomically(output, json.dumps(description, indent=2) + '\n')


def describe(workdir: str, which: str = 'latest') -> dict[str, Any]:
  """What a run and its step `which` (latest, best or a number) hold, JSON-able; sizes in bytes, goodput in seconds.

  `workdir` may also be the folder of one checkpoint, in a run or alone. Raises CheckpointError where there is no run or
  no such step in it. A step whose description is broken is listed as such, with nothing of what it holds.
  """
  given = workdir
  workdir, folder, paths, which = _find(workdir, which)
  metas = {step: _meta(path) for step, path in paths.items()}
  rows, rows_error = _rows(workdir)
  started = _json(os.path.join(workdir, 'config.json')) or {}      # of the last start, which may not have saved yet
  started = started if 'total_steps' in started else {}            # or of another program
  newest = next((metas[s]['config'] for s in sorted(metas, reverse=True) if metas[s]), started)
  leftovers = _leftovers(folder)
  if not paths and not rows and not started and not any(leftovers.values()):
    raise CheckpointError(f'{workdir} is no run: it has neither checkpoints nor logs')
  metric, total = newest.get('checkpoint', {}).get('best', ''), (started or newest).get('total_steps', 0)
  best = _best(metas, metric)
  chosen = _choose(which, folder, sorted(paths), best, metric)
  meta = metas.get(chosen) or {}
  config = flatten(meta.get('config', newest))
  arrays = _arrays(meta.get('arrays', {}))
  return {
      'workdir': given if files.remote(given) else workdir, 'task': config.get('task', ''),
      **_state(paths, rows, total),
      'chosen': chosen, 'latest': max(paths, default=None), 'best': best, 'best_metric': metric,
      'steps': [_step(s, paths[s], metas[s]) for s in sorted(paths)], **leftovers,
      'data': meta.get('data', ''), 'notes': meta.get('notes', {}), 'versions': _versions(meta.get('versions', {})),
      'config': config, 'changed': _changed(config),
      'parameters': sum(a['size'] for p, a in arrays.items() if _group(p) == 'params'),
      'groups': _groups(arrays), 'arrays': arrays,
      'metrics': _metrics(rows, metric), 'metrics_error': rows_error, 'goodput': ledger.summary(workdir),
  }


def _find(path: str, which: str):
  """(workdir, folder of its steps, {step: folder}, which), from the path of a run or of one checkpoint."""
  if files.remote(path) and not files.isdir(path):
    raise CheckpointError(f'--workdir={path}: no such folder; train first, or correct it')
  path = os.path.abspath(files.outline(path))
  above, name = os.path.split(path)
  run_itself = os.path.isdir(os.path.join(path, 'checkpoints'))        # whatever its own name is
  if os.path.basename(above) == 'checkpoints' and name.isdecimal() and not run_itself:
    path, which = os.path.dirname(above), name if which == 'latest' else which
  elif name == 'checkpoints' and not run_itself:
    path = above
  elif os.path.exists(_metadata(path)):
    meta = _meta(path)
    if not meta:
      raise CheckpointError(f'{path}: {BROKEN}')
    return path, path, {meta['step']: path}, which
  if not os.path.isdir(path):
    raise CheckpointError(f'--workdir={path}: no such folder; train first, or correct it')
  folder = os.path.join(path, 'checkpoints')
  steps = [n for n in _names(folder) if re.fullmatch(r'0|[1-9]\d*', n)]
  paths = {int(n): os.path.join(folder, n) for n in steps if os.path.exists(_metadata(os.path.join(folder, n)))}
  return path, folder, paths, which


def _choose(which, folder, steps, best, metric) -> int | None:
  """The step that is asked for; None for the latest of a run that has none yet."""
  if which == 'latest':
    return steps[-1] if steps else None
  if not steps:
    raise CheckpointError(f'no checkpoint in {folder}; train first, or correct --workdir')
  if which == 'best':
    if best is None:
      raise CheckpointError(f'{folder} has no best step: checkpoint.best = {metric!r}; steps: {steps}')
    return best
  if not which.isdecimal() or int(which) not in steps:
    near = sorted(steps, key=lambda s: abs(s - int(which)))[:3] if which.isdecimal() else steps
    raise CheckpointError(f'{folder} has no step {which!r}; nearest: {sorted(near)}')
  return int(which)


# reading

def _metadata(path: str) -> str:
  return os.path.join(path, 'meta', 'metadata')


def _names(folder: str) -> list[str]:
  return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _json(path: str) -> dict[str, Any] | None:
  """The object in a JSON file; None if there is none that can be read."""
  try:
    with open(path, encoding='utf-8') as f:
      value = json.load(f)
  except (OSError, ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _meta(path: str) -> dict[str, Any] | None:
  """What a checkpoint says of itself; None if that is broken."""
  meta = _json(_metadata(path))
  try:
    _arrays(meta['arrays'])
    sound = all(isinstance(meta[k], dict) for k in ('config', 'scores', 'versions', 'notes'))
    return meta if sound and isinstance(meta['step'], int) else None
  except (KeyError, TypeError, ValueError, AttributeError):
    return None


def _arrays(described) -> dict[str, dict[str, Any]]:
  """path -> dtype, shape, size in elements, bytes."""
  found = {}
  for path, (dtype, shape, *_) in described.items():
    size = math.prod(shape)
    found[path] = {'dtype': dtype, 'shape': shape, 'size': size, 'bytes': size * jnp.dtype(dtype).itemsize}
  return found


def _rows(workdir: str):
  """(rows of the metrics, what is wrong with them)."""
  try:
    rows = logs.rows(workdir)
    return [r for r in rows if isinstance(r['step'], int) and r['split']], ''
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
    return [], f'metrics.jsonl is broken: {e!r}'


def _disk(path: str) -> int:
  """Bytes of all files in a folder; one that a running program removes meanwhile counts nothing."""
  total = 0
  for folder, _, names in os.walk(path):
    for name in names:
      try:
        total += os.lstat(os.path.join(folder, name)).st_size
      except FileNotFoundError:
        pass
  return total


# describing

def _state(paths, rows, total) -> dict[str, Any]:
  """How far the run is, by its logs and by its checkpoints, from which it would go on."""
  saved = max(paths, default=0)
  step = max([saved, *(r['step'] for r in rows)])
  done = paths and total and saved >= total
  state = f'finished, step {saved:,}' if done else f'at step {step:,} of {f"{total:,}" if total else "?"}'
  return {'step': step, 'total_steps': total,
          'state': state + (f'; saved up to step {saved:,}' if step > saved else '')}


def _step(step: int, path: str, meta) -> dict[str, Any]:
  about = {'scores': meta['scores']} if meta else {'scores': {}, 'error': BROKEN}
  return {'step': step, 'bytes': _disk(path), **about}


def _leftovers(folder: str) -> dict[str, list[str]]:
  """Names of the folders that are no complete step: broken ones that were set aside, and half written ones."""
  names = _names(folder) if os.path.basename(folder) == 'checkpoints' else []
  torn = [n for n in names if n.isdecimal() and not os.path.exists(_metadata(os.path.join(folder, n)))]
  writing = [n for n in names if '.orbax-checkpoint-tmp' in n or n.startswith('removed-')]
  return {'set_aside': [n for n in names if re.fullmatch(r'broken-\d+', n)], 'incomplete': torn + writing}


def _best(metas, metric: str) -> int | None:
  """The step with the best score, the later of equals; '-loss' means that less is better."""
  sign, key = _sign(metric)
  scores = {s: m['scores'][key] for s, m in metas.items() if m and key in m['scores']}
  return max(((sign * v, s) for s, v in scores.items()), default=(0, None))[1]


def _sign(metric: str) -> tuple[int, str]:
  return (-1, metric[1:]) if metric.startswith('-') else (1, metric)


def _versions(saved) -> dict[str, dict[str, Any]]:
  here = logs.versions() if saved else {}
  return {p: {'saved': saved.get(p), 'here': here.get(p)} for p in sorted(saved.keys() | here.keys())}


def _changed(config) -> list[str]:
  """The core's keys whose values are not its defaults; a system's own keys have their defaults elsewhere."""
  defaults = flatten(json.loads(core().to_json()))
  return [k for k, v in config.items() if k in defaults and defaults[k] != v]


def _group(path: str) -> str:
  return next(name for name, head in GROUPS if path.startswith(head))


def _groups(arrays) -> dict[str, dict[str, int]]:
  """group -> number of its arrays, elements and bytes."""
  totals = {name: {'arrays': 0, 'size': 0, 'bytes': 0} for name, _ in GROUPS}
  for path, a in arrays.items():
    for key, value in (('arrays', 1), ('size', a['size']), ('bytes', a['bytes'])):
      totals[_group(path)][key] += value
  return {name: total for name, total in totals.items() if total['arrays']}


def _metrics(rows, metric: str) -> dict[str, dict[str, Any]]:
  """split -> number of rows, the last one, and the best value of the run's own metric with its step."""
  sign, key = _sign(metric)
  found = collections.defaultdict(list)
  for row in rows:
    found[row['split']].append(row)
  out = {}
  for split, some in found.items():
    out[split] = {'rows': len(some), 'last': some[-1]}
    values = [(sign * r[key], r['step']) for r in some if r.get(key) is not None]
    if values:
      value, step = max(values)
      out[split]['best'] = {'step': step, 'value': sign * value}
  return out


# for people

def text(description: dict[str, Any]) -> str:
  """A description as aligned lines: the run, its checkpoints, metrics and time, then all of the chosen step."""
  d = description
  about = [('run', d['workdir']), ('task', d['task']), ('state', d['state'])]
  if d['arrays']:
    about.append(('parameters', f'{d["parameters"]:,}'))
  if d['data']:
    about.append(('data', str(d['data'])))
  about += [(k.replace('_', ' '), _note(v)) for k, v in d['notes'].items() if v]
  parts = [_table(about, indent=''), *(part(d) for part in (_checkpoints, _logged, _time, _described, _settings))]
  return '\n\n'.join('\n'.join(lines) for lines in parts if lines)


def _checkpoints(d) -> list[str]:
  lines = ['checkpoints'] if d['steps'] else ['no checkpoint yet']
  table = []
  for s in d['steps']:
    known = ('latest', d['latest']), (f'best {d["best_metric"]}', d['best'])
    marks = [mark for mark, step in known if step == s['step']]
    table.append((f'{s["step"]:,}', _bytes(s['bytes']), ', '.join(marks), s.get('error') or _scalars(s['scores'])))
  lines += _table(table, right=(0, 1))
  for key, what in (('set_aside', 'broken, set aside'), ('incomplete', 'incomplete')):
    if d[key]:
      lines.append(f'  {what}: {", ".join(d[key])}')
  return lines


def _logged(d) -> list[str]:
  if d['metrics_error']:
    return [d['metrics_error']]
  lines = []
  for split, m in d['metrics'].items():
    last = {k: v for k, v in m['last'].items() if k not in ('step', 'split')}
    lines.append((split, f'{m["rows"]:,} rows', f'last, step {m["last"]["step"]:,}', _scalars(last)))
    if 'best' in m:
      best = {_sign(d['best_metric'])[1]: m['best']['value']}
      lines.append(('', '', f'best, step {m["best"]["step"]:,}', _scalars(best)))
  return ['metrics', *_table(lines, right=(1,))] if lines else []


def _time(d) -> list[str]:
  return ['time', '  ' + ledger.table(d['goodput'])] if d['goodput'] else []


def _described(d) -> list[str]:
  if d['chosen'] is None:
    return []
  if not d['arrays']:
    return [f'step {d["chosen"]:,}: {BROKEN}']
  lines = [('array', 'type', 'shape', 'elements', 'size')]
  lines += [(p, a['dtype'], 'x'.join(map(str, a['shape'])) or 'scalar', f'{a["size"]:,}', _bytes(a['bytes']))
            for p, a in d['arrays'].items()]
  totals = [(name, f'{g["arrays"]:,} arrays', f'{g["size"]:,} elements', _bytes(g['bytes']))
            for name, g in d['groups'].items()]
  return [f'step {d["chosen"]:,}', *_table(totals, right=(1, 2, 3)), '', *_table(lines, right=(3, 4))]


def _settings(d) -> list[str]:
  config = [('*' if k in d['changed'] else '', k, repr(v)) for k, v in d['config'].items()]
  packages = [('*' if v['saved'] != v['here'] else '', p, str(v['saved']),
                f'here {v["here"]}' if v['saved'] != v['here'] else '') for p, v in d['versions'].items()]
  lines = ['config (* not the default of the core)', *_table(config)] if config else []
  if packages:
    lines += ['', 'versions (* not the one here)', *_table(packages)]
  return lines


def _table(lines, right=(), indent: str = '  ') -> list[str]:
  """Lines of aligned columns; those of the numbers in `right` end alike."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return [indent + '  '.join(c.rjust(w) if i in right else c.ljust(w)
                             for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip() for line in lines]


def _bytes(n: float) -> str:
  """26200000 -> '26.2 MB'."""
  if n < 1000:
    return f'{n} B'
  for unit in ('kB', 'MB', 'GB', 'TB', 'PB'):
    n /= 1000
    if n < 999.95:
      break
  return f'{n:,.1f} {unit}'


def _note(value) -> str:
  """A list of numbers by its length and its first ones; the JSON has them all."""
  if not isinstance(value, list):
    return str(value)
  return f'{len(value):,}: {", ".join(map(str, value[:10]))}{", ..." if len(value) > 10 else ""}'


def _scalars(values) -> str:
  return '  '.join(f'{k} {"not finite" if v is None else format(v, ".4g")}' for k, v in values.items())
