"""What a sweep asks for: its file, the points it spans, and the names of its runs."""

import difflib
import itertools
import json
import math
import os
import tomllib
from typing import Any, Iterable, NamedTuple
from urllib.parse import quote, unquote

import numpy as np

from lab.task import ConfigError

NAME_BYTES = 200             # file systems take 255
# key of the file -> an example, which has its type
KEYS = {'config': 'configs/pose.py', 'workdir': 'runs/sweep', 'metric': 'AP', 'kind': 'grid', 'seeds': [0, 1],
        'samples': 10, 'draw_seed': 0, 'fixed': {'total_steps': 100}, 'values': {'optim.learning_rate': [0.001, 0.003]},
        'points': [{'optim.name': 'lion', 'optim.decay': 0.1}]}
DEFAULTS = {'workdir': '', 'kind': 'grid', 'seeds': [0], 'samples': 0, 'draw_seed': 0, 'fixed': {}, 'values': {}}
ONLY = {'samples': ('random',), 'draw_seed': ('random',), 'points': ('list',), 'values': ('grid', 'random')}
TYPES = {str: 'a string', int: 'a whole number', float: 'a number', bool: 'true or false', list: 'a list',
         dict: 'a table'}


class Run(NamedTuple):
  """One training: a point of the sweep with one seed."""
  name: str
  folder: str
  values: dict[str, Any]
  seed: int


class Sweep(NamedTuple):
  """A sweep file that was read."""
  config: str
  workdir: str
  metric: str
  less: bool                   # less of the metric is better
  seeds: list[int]
  fixed: dict[str, Any]
  points: list[dict[str, Any]]

  def recipe(self, run: Run) -> str:
    """The recipe of a run: the sweep's, with the variant of the point where it names one."""
    return f'{self.config.partition(":")[0]}:{run.values["variant"]}' if 'variant' in run.values else self.config

  def runs(self) -> list[Run]:
    """Every point with every seed, in the order in which they are run."""
    names = ((name({**point, 'seed': seed}), point, seed) for point in self.points for seed in self.seeds)
    return [Run(n, os.path.join(self.workdir, n), point, seed) for n, point, seed in names]


# names


def text(value: Any) -> str:
  """A JSON value as short text: strings bare, unless they would be read as something else."""
  if isinstance(value, str) and value == _value(value):
    return value
  return json.dumps(value, separators=(',', ':'), ensure_ascii=False)


def _value(word: str) -> Any:
  try:
    return json.loads(word)
  except ValueError:
    return word


def name(values: dict[str, Any]) -> str:
  """{'optim.decay': 0.1, 'seed': 0} -> 'optim.decay=0.1,seed=0', a folder's name that parse() turns back."""
  def quoted(word):
    return quote(word, safe='+', errors='surrogatepass')
  out = ','.join(f'{quoted(k)}={quoted(text(v))}' for k, v in values.items())
  if len(out) > NAME_BYTES:
    raise ConfigError(f'{out}: longer than {NAME_BYTES} bytes, too long for a folder; sweep fewer keys')
  return out


def parse(folder: str) -> dict[str, Any]:
  """The values that name() made this name of."""
  pairs = (part.partition('=') for part in folder.split(',') if part)
  return {unquote(k, errors='surrogatepass'): _value(unquote(v, errors='surrogatepass')) for k, _, v in pairs}


# the file


def read(path: str, workdir: str = '') -> Sweep:
  """Reads a sweep file and draws its points. Raises ConfigError, naming the nearest key."""
  given = load(path)
  expect(path, given, KEYS)
  data = {**DEFAULTS, **given, **({'workdir': workdir} if workdir else {})}
  kind = data['kind']
  if kind not in ('grid', 'random', 'list'):
    raise ConfigError(f'{path}: kind = {kind!r}: expected "grid", "random" or "list"')
  for key, kinds in ONLY.items():
    if key in given and kind not in kinds:
      raise ConfigError(f'{path}: {key} is only for kind = {" or ".join(map(json.dumps, kinds))}')
  for key in ('config', 'metric', 'workdir', 'seeds', 'points' if kind == 'list' else 'values'):
    if not data.get(key) or data[key] == '-':
      raise ConfigError(f'{path}: {key} is missing or empty; such as {key} = {json.dumps(KEYS[key])}')
  if '://' in data['workdir']:
    raise ConfigError(f'{path}: workdir = {data["workdir"]}: expected a folder of this machine, for workers '
                      'share a sweep by its locks')
  random = kind == 'random'
  if random and data['samples'] < 1 or data['draw_seed'] < 0:
    raise ConfigError(f'{path}: samples = {data["samples"]}, draw_seed = {data["draw_seed"]}: kind = "random" needs at '
                      'least one sample and no negative seed')
  if not all(type(s) is int and s >= 0 for s in data['seeds']):
    raise ConfigError(f'{path}: seeds = {data["seeds"]}: expected whole numbers of at least 0')
  fixed, values = (_flat(f'{path}: {part}', data[part], part == 'values') for part in ('fixed', 'values'))
  for key, value in fixed.items():
    if key == 'seed' or key in values or not _plain(value):
      raise ConfigError(f'{path}: fixed.{key} = {value!r}: expected a key that is not swept (seeds sets the seed), and '
                        'a number, string, boolean or list')
  for key, value in values.items():
    if key == 'seed':
      raise ConfigError(f'{path}: values.seed: the seed is set by seeds')
    _check_values(f'{path}: values.{key}', value, random)
  points = (_draw(path, values, data['samples'], data['draw_seed']) if random else
            _listed(path, data['points'], fixed) if kind == 'list' else
            [dict(zip(values, point)) for point in itertools.product(*values.values())])
  metric = data['metric']
  return Sweep(data['config'], data['workdir'], metric.removeprefix('-'), metric.startswith('-'), data['seeds'], fixed,
               points)


def load(path: str) -> dict[str, Any]:
  """What a TOML file holds. Raises ConfigError, naming the nearest file."""
  if not os.path.isfile(path):
    folder = os.path.dirname(path) or '.'
    there = os.listdir(folder) if os.path.isdir(folder) else []
    raise ConfigError(f'{path}: no such file{near(os.path.basename(path), there)}')
  try:
    with open(path, 'rb') as f:
      return tomllib.load(f)
  except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
    raise ConfigError(f'{path}: not TOML: {e}') from None


def expect(where: str, table: dict[str, Any], keys: dict[str, Any]) -> None:
  """Raises ConfigError, naming the nearest key, unless every key of a table is in `keys`, with its example's type."""
  for key, value in table.items():
    if key not in keys:
      raise ConfigError(f'{where}: unknown key {key!r}{near(key, keys)}')
    kind = type(keys[key])
    if type(value) is not kind and not (kind is float and type(value) is int):
      raise ConfigError(f'{where}: {key} = {value!r}: expected {TYPES[kind]}, such as {keys[key]!r}')


def near(key: str, keys: Iterable[str]) -> str:
  """'; did you mean ...?' for a misspelt key, '' where nothing is near."""
  found = difflib.get_close_matches(key, keys, 1)
  return f'; did you mean {found[0]}?' if found else ''


def _flat(where, table, ranges, prefix=''):
  """Quoted dotted keys and nested tables are the same; a range stays a table."""
  out = {}
  for key, value in table.items():
    inner = isinstance(value, dict) and not (
        ranges and {'low', 'high'} & value.keys() and not any(isinstance(v, list) for v in value.values()))
    for k, v in (_flat(where, value, ranges, f'{prefix}{key}.') if inner else {prefix + key: value}).items():
      if k in out:
        raise ConfigError(f'{where}.{k} is there twice')
      out[k] = v
  return out


def _plain(value):
  return isinstance(value, (bool, int, float, str)) or isinstance(value, list) and all(map(_plain, value))


def _check_values(where, value, random):
  if isinstance(value, list):
    if not value or not _plain(value):
      raise ConfigError(f'{where} = {value}: expected at least one number, string, boolean or list')
    return
  if not isinstance(value, dict):
    raise ConfigError(f'{where} = {value!r}: expected a list{" or {low=, high=}" if random else ""}')
  if not random:
    raise ConfigError(f'{where}: a range is only for kind = "random"; a grid takes a list')
  for key in value:
    if key not in ('low', 'high', 'scale'):
      raise ConfigError(f'{where}: unknown key {key!r}{near(key, ("low", "high", "scale"))}')
  low, high, scale = value.get('low'), value.get('high'), value.get('scale', 'linear')
  if not all(type(v) in (int, float) and math.isfinite(v) for v in (low, high)) or low >= high:
    raise ConfigError(f'{where}: low = {low!r}, high = {high!r}: expected two numbers, low < high')
  if scale not in ('linear', 'log') or scale == 'log' and low <= 0:
    raise ConfigError(f'{where}: scale = {scale!r}: expected "linear", or "log" with low > 0')


def _listed(path, tables, fixed):
  """The points that a file writes out; they need not set the same keys."""
  points, seen = [], {}
  for i, table in enumerate(tables, 1):
    where = f'{path}: points, number {i}'
    if not isinstance(table, dict) or not table:
      raise ConfigError(f'{where}: {table!r}: expected a table with at least one key')
    point = _flat(where, table, False)
    for key, value in point.items():
      if key == 'seed' or key in fixed or not _plain(value):
        raise ConfigError(f'{where}: {key} = {value!r}: expected a key that is not in fixed (seeds sets the seed), and '
                          'a number, string, boolean or list')
    same = seen.setdefault(json.dumps(point, sort_keys=True), i)
    if same != i:
      raise ConfigError(f'{where} is the same as number {same}')
    points.append(point)
  return points


def _draw(path, values, samples, seed):
  """`samples` different points; a list gives each of its values equally often, a range is uniform on its scale."""
  rng, points = np.random.default_rng(seed), {}

  def one(value):
    if isinstance(value, list):
      return value[rng.integers(len(value))]
    low, high, log = value['low'], value['high'], value.get('scale') == 'log'
    whole = isinstance(low, int) and isinstance(high, int)
    if whole and not log:
      return int(rng.integers(low, high, endpoint=True))
    x = math.exp(rng.uniform(math.log(low), math.log(high))) if log else float(rng.uniform(low, high))
    return min(max(round(x) if whole else float(f'{x:.4g}'), low), high)      # rounding may step over the ends
  for _ in range(1000 * samples):
    point = {k: one(v) for k, v in values.items()}
    points.setdefault(name(point), point)
    if len(points) == samples:
      return [*points.values()]
  raise ConfigError(f'{path}: samples = {samples}: only {len(points)} different points were found in values')
