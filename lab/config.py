"""Configurations: the core's keys, overrides from the command line, and messages that name the nearest key."""

import ast
import difflib
import importlib.util
import os

from ml_collections import ConfigDict

from lab.task import ConfigError


def core() -> ConfigDict:
  """The keys that every system has. A system's own config adds its sections to these."""
  return ConfigDict({
      'task': '',                  # dotted module with make_task(config)
      'seed': 0,                   # of initial weights, data order, augmentation and dropout
      'total_steps': 1000,         # optimizer updates; the schedules end here
      'init_from': '',             # graft weights from path[:best|latest|STEP] of another run, or a .safetensors file
      'init_only': '.*',           # regex of parameter paths that init_from may fill
      'platform': '',              # cpu, gpu or tpu must be there; '' takes the best there is and says so
      'prng': 'threefry2x32',      # or rbg, which compiles faster; both are exact on one mesh
      'mesh': {'data': -1, 'fsdp': 1, 'tensor': 1},   # devices an axis; one may be -1: all that are left
      'input': {
          'batch_size': 32,        # global, all processes together
          'eval_batch_size': 32,
          'cache': True,           # hold serialized records in RAM
          'threads': 0,            # of the input pipeline; 0: one a core
          'prefetch': 2,           # batches ready on the host
          'bad_limit': 0.0,        # share of records that may be broken; they are left out, counted and logged
      },
      'optim': {
          'name': 'adamw',         # adamw or sgd
          'learning_rate': 1e-3,   # peak
          'schedule': 'cosine',    # cosine (to 0 at total_steps) or constant, both after the warm-up
          'warmup_steps': 0,       # linear from 0
          'decay': 1e-4,           # decoupled weight decay, on arrays with ndim >= 2
          'clip': 1.0,             # global gradient norm; 0: off
          'beta1': 0.9,            # adamw; momentum of sgd
          'beta2': 0.999,          # adamw
          'eps': 1e-8,             # adamw
          'ema': 0.0,              # decay of the averaged weights that are evaluated; 0: off
          'max_nonfinite': 3,      # updates in a row that may be non-finite: skipped and counted; one more ends the run
      },
      'log_steps': 10,
      'eval_steps': 100,           # 0: only at the end
      'eval_pictures': 4,          # examples drawn at each evaluation
      'checkpoint': {
          'steps': 100,            # 0: only at the end
          'keep': 2,               # newest checkpoints; -1 keeps all
          'best': '',              # metric of evaluation, such as -loss or AP, whose best checkpoint is kept; '': none
          'space_wait_s': 0.0,     # seconds to wait for disk space before giving up with code 6
      },
  })


def read(spec: str) -> ConfigDict:
  """`file.py[:variant]` -> its get_config(variant). Only a file that the user names is run."""
  path, _, variant = spec.partition(':')
  if not os.path.isfile(path):
    folder = os.path.dirname(path) or '.'
    near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder) if os.path.isdir(folder) else [])
    hint = f'; did you mean {os.path.join(folder, near[0])}?' if near else ''
    raise ConfigError(f'--config={spec}: no such file{hint}')
  loader = importlib.util.spec_from_file_location('recipe', path)
  module = importlib.util.module_from_spec(loader)
  loader.loader.exec_module(module)
  try:
    return module.get_config(variant)
  except (AttributeError, KeyError, TypeError) as e:      # ConfigDict's own message names the nearest key
    raise ConfigError(f'{spec}: {str(e).strip(chr(34)).splitlines()[0]}') from e


def override(config: ConfigDict, argv: list[str]) -> list[str]:
  """Applies every `--config.key=value` of argv to config in place; returns the other arguments.

  A value takes the type of the default: an int does for a float; None means the off value (0, False, '' or ()).
  Raises ConfigError for an unknown key (naming the nearest) and a wrong type.
  """
  flat, rest, args = flatten(config), [], iter(argv)
  for arg in args:
    head = arg.lstrip('-')
    if not (arg.startswith('-') and head.startswith('config.')):
      rest.append(arg)
      continue
    key, equals, value = head[len('config.'):].partition('=')
    if key not in flat:
      raise ConfigError(f'--config.{key}: no such key{nearest(key, flat)}')
    if not equals:
      value = next(args, None)
      if value is None:
        raise ConfigError(f'--config.{key}: a value is missing')
    *sections, name = key.split('.')
    node = config
    for section in sections:
      node = node[section]
    node[name] = _typed(key, value, flat[key])
  return rest


def flatten(config, prefix: str = '') -> dict:
  """{'optim.rate': 0.001, ...} of a ConfigDict or plain dict."""
  out = {}
  for k, v in config.items():
    out.update(flatten(v, f'{prefix}{k}.') if hasattr(v, 'items') else {prefix + k: v})
  return out


def nearest(key: str, flat) -> str:
  """'; did you mean ...?' for a misspelt or misplaced key, '' where nothing is near."""
  key = key.replace('-', '_')
  leaf = key.split('.')[-1]
  by_leaf = {}
  for k in flat:
    by_leaf.setdefault(k.split('.')[-1], []).append(k)
  near = ([key] if key in flat else by_leaf.get(leaf) or difflib.get_close_matches(key, flat, 1) or
          [k for n in difflib.get_close_matches(leaf, by_leaf, 1) for k in by_leaf[n]] or
          [k for k in flat if set(leaf.split('_')) & set(k.split('.')[-1].split('_'))][:3])
  return f'; did you mean {" or ".join("--config." + k for k in near)}?' if near else ''


def _typed(key: str, text: str, default):
  kind = type(default)
  if text == 'None':
    return kind()
  if kind is str:
    return text
  try:
    value = ast.literal_eval({'true': 'True', 'false': 'False'}.get(text, text))
    if kind is float and type(value) is int:
      value = float(value)
    if kind is tuple and isinstance(value, (list, tuple)):
      value = tuple(value)
    if type(value) is kind:
      return value
  except (ValueError, SyntaxError):
    pass
  raise ConfigError(f'--config.{key}={text}: expected {kind.__name__}, such as {default!r}')


def choice(config: ConfigDict, key: str, options) -> None:
  """Raises ConfigError unless the value of key is one of options."""
  value = flatten(config)[key]
  if value not in options:
    raise ConfigError(f'config.{key} = {value!r}: expected one of {", ".join(map(repr, options))}')
