"""Configurations: the core's keys, overrides from the command line, and messages that name the nearest key."""

import ast
import difflib
import importlib.util
import json
import os
import re

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
      'init_parts': (),            # ((prefix, source as in init_from), ...): all parameters below a prefix, from there
      'continue_from': '',         # go on from the step, weights and moments of path[:best|latest|STEP] of another run
      'runs_root': 'runs',         # where these find [project/]run/{best|backup}/{alias|step}; lab/artifact.py
      'assets': '',                # folder of what a run keeps (a tokenizer); where it is there, the program sets it
      'platform': '',              # cpu, gpu or tpu must be there; '' takes the best there is and says so
      'prng': 'threefry2x32',      # or rbg, which compiles faster; both are exact on one mesh
      'mesh': {'data': -1, 'fsdp': 1, 'tensor': 1},   # devices an axis; one may be -1: all that are left
      'processes': {               # of a run on several hosts
          'start_s': 300.0,        # seconds to wait for each other
          'heartbeat_s': 40.0,     # seconds that one may be silent for; then the others end with code 7
      },
      'input': {
          'batch_size': 32,        # global, all processes together; an update takes optim.accumulate of them
          'eval_batch_size': 32,
          'cache': True,           # hold serialized records in RAM
          'threads': 0,            # of the input pipeline; 0: one a core
          'workers': 0,            # processes that make training batches, sharing the threads; 0: the run's own threads
          'prefetch': 2,           # batches ready on the host, beside one or two that are handed on
          'bad_limit': 0.0,        # share of records that may be broken; they are left out, counted and logged
      },
      'optim': _optim(),
      'log_steps': 10,
      'eval_steps': 100,           # 0: only at the end
      'eval_pictures': 4,          # examples drawn at each evaluation
      'early_stop': {              # by the metric of checkpoint.best
          'patience': 0,           # evaluations without improvement after which the run ends; 0: off
          'delta': 0.005,          # relative improvement that counts as one
      },
      'lr_find': {                 # --mode=lr_find
          'low': 1e-8,             # rates, exponentially from here
          'high': 1.0,             # to here
          'steps': 100,            # in so many updates
      },
      'profile': {
          'start': 10,             # updates after each start of the program
          'steps': 0,              # updates traced into workdir/profile; 0: off
      },
      'peak_tflops': 0.0,          # of one device, for the MFU; 0: from the table in lab/flops.py, if it is there
      'checkpoint': {
          'steps': 100,            # 0: only at the end
          'keep': 2,               # newest checkpoints; -1 keeps all
          'best': '',              # metric of evaluation, such as -loss or AP, whose best checkpoint is kept; '': none
          'space_wait_s': 0.0,     # seconds to wait for disk space before giving up with code 6
      },
  })


def _optim() -> dict:
  """What becomes of a gradient; lab/optim.py has the order."""
  return {
      'name': 'adamw',         # sgd momentum rmsprop adam adamw adafactor lion radam adadelta adagrad adamax muon
      'learning_rate': 1e-3,   # peak; a factor for noam
      'schedule': 'cosine',    # constant linear cosine staircase exponential rsqrt noam onecycle; lab/schedules.py
      'warmup_steps': 0,       # linear from 0; noam and rsqrt decay from here; onecycle has its own
      'end_rate': 0.0,         # of linear and cosine; floor of staircase and exponential
      'schedule_steps': 0,     # update at which linear, cosine and onecycle end; 0: total_steps
      'factor': 0.5,           # of staircase and exponential, every so many
      'factor_steps': 1000,    # updates after the warm-up
      'noam_width': 512,       # noam: the model's width
      'continuation': 'blend', # of a run with continue_from: blend, restart or none; lab/schedules.py
      'continuation_steps': 50,    # updates from the rate of the run continued to the schedule, or to the peak
      'keep_moments': True,    # of the run continued; False: the optimizer starts afresh
      'beta1': -1.0,           # first moment or momentum; -1: the optimizer's own, in the table of lab/optim.py
      'beta2': -1.0,           # second moment or its decay; -1: the optimizer's own
      'eps': -1.0,             # -1: the optimizer's own
      'nesterov': False,       # momentum's
      'decay': 1e-4,           # weight decay, on arrays with ndim >= 2 (a layer) and not in decay_not
      'decay_kind': 'decoupled',   # or l2: added to the gradient; adam is always l2, adamw never
      'decay_not': '',         # regex of parameters without decay, such as embed; '': none
      'clip': 1.0,             # gradient norm, of all arrays together; 0: off
      'clip_value': 0.0,       # every number of the gradient; 0: off
      'clip_update': 0.0,      # root mean square of each array's update before the rate (Adafactor's d); 0: off
      'clip_step': 0.0,        # every number of the step, after the rate (Srivastava et al. 2015 use 1e-4); 0: off
      'orthograd': False,      # drop the gradient's part along its weights (arXiv 2501.04697)
      'stacked': '',           # regex of parameters whose first axis counts layers (nn.scan); each is its own
      'frozen': '',            # regex of parameters that do not learn; they take no moments
      'rates': (),             # ((regex, factor), ...): of the learning rate; the first that matches
      'second': {              # another optimizer for some parameters, and for what muon can't take
          'params': '',        # regex
          'name': 'adamw',
          'beta1': -1.0,
          'beta2': -1.0,
          'eps': -1.0,
      },
      'accumulate': 1,         # micro-batches of input.batch_size an update; exact: the mean of all their items
      'accumulate_from': 0,    # update from which on; one micro-batch an update before
      'ema': 0.0,              # decay of the averaged weights, evaluated beside the raw ones; 0: off
      'max_nonfinite': 3,      # updates in a row that may be non-finite: skipped and counted; one more ends the run
  }


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


def of_run(workdir: str) -> ConfigDict:
  """The configuration that a run was started with.

  Raises ConfigError where there is none, and where its task is none of the lab's systems: a workdir may come from
  elsewhere, and to import what it names would run whatever lies there. A recipe that the user names may have any task.
  """
  path = os.path.join(workdir, 'config.json')
  try:
    with open(path, encoding='utf-8') as f:
      found = json.load(f)
    config = ConfigDict(_tuples({**found, 'assets': ''})).lock()
    task = config.task
  except (OSError, ValueError, TypeError, AttributeError, RecursionError) as e:
    raise ConfigError(f'{path}: no configuration of a run is there ({type(e).__name__}); give --config, such as '
                      '--config=configs/pose.py, or the --workdir of a run') from None
  if not isinstance(task, str) or not re.fullmatch(r'lab\.systems\.\w+\.task', task):
    raise ConfigError(f'{path}: task = {task!r}, which is no system of the lab; what a run names is not imported: give '
                      '--config with the recipe of the run')
  return config


def from_json(text: str) -> ConfigDict:
  """The configuration that `to_json` wrote, locked."""
  return ConfigDict(_tuples(json.loads(text))).lock()


def _tuples(value):
  """JSON's lists as the tuples that they were."""
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


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
  except (ValueError, SyntaxError, MemoryError, RecursionError):     # the last two: nested too deeply
    pass
  raise ConfigError(f'--config.{key}={text}: expected {kind.__name__}, such as {default!r}')


def choice(config: ConfigDict, key: str, options) -> None:
  """Raises ConfigError unless the value of key is one of options."""
  value = flatten(config)[key]
  if value not in options:
    raise ConfigError(f'config.{key} = {value!r}: expected one of {", ".join(map(repr, options))}')
