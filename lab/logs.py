"""CLU's door: what a run writes while it runs.

  metrics.jsonl   one row a logged step or evaluation; a pure function of config, seed and step
  timings.jsonl   speed of the same steps; differs from run to run
  tensorboard/    scalars, pictures, hyper-parameters, the parameter table
  pictures/       the same pictures as PNG files, films as GIF files
  profile/        traces, where config.profile asks for them
  config.json  environment.json  memory.json  parameters.txt
A resumed run first cuts all of them back to its checkpoint, so that no step is there twice. Where the workdir is in a
bucket, they lie in a scratch folder, and each flush sends them.
"""

import collections
import glob
import importlib.metadata
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any, Mapping

import jax
import numpy as np

from data_pipelines import films
from lab import accumulate, files, links
from lab.config import flatten
from lab.ledger import Ledger

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
log = logging.getLogger('lab')


class Log:
  """The log of one run. Only the first process writes; a picture or TensorBoard that fails is a warning, no end.

  It goes on after `step`, whose evaluation is still `due` if the run was asked to stop in it.
  """

  def __init__(self, workdir: str, config, step: int, ledger: Ledger, due: bool = False):
    self.home, self.workdir = workdir, files.local(workdir)
    self.config, self.main, self.ledger = config, jax.process_index() == 0, ledger
    self.first, self.last, self.began = step, step, time.monotonic()
    self.mark = (accumulate.before(config.optim, step), dict(ledger.seconds))
    self.utilisation = 0.0       # seconds of a micro-batch at the devices' peak; 0: unknown
    self.before = 0.0            # seconds of the run's earlier processes
    self.told = False            # that TensorBoard failed
    if not self.main:
      return
    workdir = self.workdir
    cut(workdir, step, due)
    self.new = not glob.glob(os.path.join(glob.escape(workdir), 'tensorboard', 'events.*'))
    self.before = _seconds(workdir)
    from clu import metric_writers
    self.board = metric_writers.SummaryWriter(os.path.join(workdir, 'tensorboard'))
    self.files = {n: links.append(os.path.join(workdir, n)) for n in ('metrics.jsonl', 'timings.jsonl')}
    self.write('config.json', json.loads(config.to_json()))
    self.write('environment.json', environment())

  def write(self, name: str, content: Any) -> None:
    """Writes a JSON file of the workdir."""
    if self.main:
      write_atomically(os.path.join(self.workdir, name), json.dumps(content, indent=2) + '\n')

  def describe(self, params: Any) -> None:
    """Writes the hyper-parameters and the parameter table, once a run."""
    if not self.main:
      return
    from clu import parameter_overview
    table = parameter_overview.get_parameter_overview(params, include_stats='sharding')
    write_atomically(os.path.join(self.workdir, 'parameters.txt'), table + '\n')
    log.info('%s parameters; table in %s', f'{parameter_overview.count_parameters(params):,}',
             os.path.join(self.home, 'parameters.txt'))
    if self.new:
      self._board('write_hparams', {k: str(v) if isinstance(v, tuple) else v for k, v in flatten(self.config).items()})
      self._board('write_texts', self.first, {'parameters': '```\n' + table + '\n```'})

  def row(self, step: int, split: str, scalars: Mapping[str, float]) -> None:
    """Adds a row to metrics.jsonl and TensorBoard. Values that are not finite are written as null."""
    if not self.main:
      return
    self._line('metrics.jsonl', {'step': step, 'split': split, **finite(scalars)})
    self._board('write_scalars', step, {f'{split}/{k}': float(v) for k, v in scalars.items()})

  def progress(self, step: int, scalars: Mapping[str, float], micro: int) -> None:
    """Prints the progress line, with the time to the end, and adds a row to timings.jsonl.

    Speeds count the time of steps and of waiting for data since the row before; `micro` micro-batches were seen in all.
    """
    self.ledger.enter('step')
    now, (done, then) = dict(self.ledger.seconds), self.mark
    waited = now['wait'] - then['wait']
    seconds, total, passed = max(now['step'] - then['step'] + waited, 1e-9), self.config.total_steps, self._passed()
    speed = {'items_per_s': (micro - done) * self.config.input.batch_size / seconds,
             'step_ms': 1e3 * seconds / max(step - self.last, 1), 'data_wait_share': waited / seconds,
             'seconds': self.before + passed}
    if self.utilisation:
      speed['mfu'] = (micro - done) * self.utilisation / seconds
    if self.main:
      self._line('timings.jsonl', {'step': step, **speed})
      self._board('write_scalars', step, {f'speed/{k}': v for k, v in speed.items()})
    mfu = f'  MFU {speed["mfu"]:.1%}' if self.utilisation else ''
    left = passed / max(step - self.first, 1) * (total - step)
    say(f'step {step}/{total} ({step / total:.0%})  loss {scalars.get("loss", math.nan):.4g}  rate '
        f'{scalars.get("learning_rate", math.nan):.3g}  {speed["items_per_s"]:.3g} items/s{mfu}  data wait '
        f'{speed["data_wait_share"]:.0%}  ETA {duration(left)}')
    self.mark, self.last = (micro, now), step

  def _passed(self) -> float:
    return time.monotonic() - self.began

  def pictures(self, step: int, images: Mapping[str, np.ndarray]) -> None:
    """Writes images u8[H, W, 3], films u8[T, H, W, 3] and texts to TensorBoard and as PNG, GIF and TXT files."""
    if not self.main or not images:
      return
    try:
      write_pictures(os.path.join(self.workdir, 'pictures'), images, f'{step:07d}_')
    except OSError as e:
      log.warning('pictures of step %d were not written: %s', step, e)
    texts = {name: image for name, image in images.items() if isinstance(image, str)}
    images = {name: image for name, image in images.items() if name not in texts}
    if texts:
      self._board('write_texts', step, {name: f'```\n{text}\n```' for name, text in texts.items()})
    self._board('write_images', step, {name: image[None] for name, image in images.items() if image.ndim == 3})
    moving = {name: image for name, image in images.items() if image.ndim == 4}
    if moving:     # CLU can't write films, but TensorBoard shows a GIF where it expects an image
      from tensorboard.plugins.image import metadata
      self._board('write_summaries', step, {
          name: [str(x.shape[2]).encode(), str(x.shape[1]).encode(), films.gif(x)] for name, x in moving.items()},
                  {name: metadata.create_summary_metadata('', '') for name in moving})

  def flush(self) -> None:
    """Everything logged so far is on disk, or in the bucket, when this returns; only then a checkpoint is written."""
    if not self.main:
      return
    for f in self.files.values():
      f.flush()
      os.fsync(f.fileno())
    self._board('flush')
    files.push(self.home)

  def close(self) -> None:
    """Flushes and closes the files."""
    if self.main:
      try:
        self.flush()
      finally:
        self._board('close')
        for f in self.files.values():
          f.close()

  def _line(self, name, row):
    self.files[name].write(json.dumps(row) + '\n')
    self.files[name].flush()

  def _board(self, method, *args):
    try:
      getattr(self.board, method)(*args)
    except Exception as e:  # a full log disk must not end training
      if not self.told:
        log.warning('TensorBoard: %s failed, and further failures will not be told: %s', method, str(e).split('\n')[0])
      self.told = True


class Profile:
  """Traces config.profile.steps updates, from profile.start after this start of the program, into workdir/profile."""

  def __init__(self, config, workdir: str, step: int):
    self.first, self.last = step + config.start, step + config.start + config.steps
    self.folder, self.on = os.path.join(workdir, 'profile'), False

  def __call__(self, step: int) -> None:
    if self.first == step < self.last:
      self._try('start_trace', self.folder)
      self.on = True
    elif step == self.last:
      self.close()

  def close(self) -> None:
    """Ends the trace, where one is on."""
    if self.on:
      self.on = False
      self._try('stop_trace')
      say(f'profile written; tensorboard --logdir={self.folder}, or open its trace.json.gz in Perfetto')

  def _try(self, method, *args):
    try:
      getattr(jax.profiler, method)(*args)
    except Exception as e:  # a profile is worth no run
      log.warning('profile: %s failed: %s', method, str(e).split('\n')[0])


def page(workdir: str) -> None:
  """Writes the run's page, as far as there is anything to show; one that fails is a warning, no end."""
  try:
    from lab import page as pages
    say(f'  page            {pages.write(workdir)}')
  except Exception as e:
    log.warning('the page of the run was not written: %s', str(e).split('\n')[0])


def environment() -> dict[str, Any]:
  """What a run ran on: command, versions, devices, commit. Nothing of the environment's variables."""
  try:
    commit = subprocess.run(['git', '-C', os.path.dirname(__file__), 'rev-parse', 'HEAD'], capture_output=True,
                            text=True, check=False, timeout=10).stdout.strip()
  except OSError:
    commit = ''
  return {'command': [sys.executable, '-m', 'lab.main', *sys.argv[1:]] if sys.argv[0].endswith('main.py') else sys.argv,
          'python': platform.python_version(), 'platform': platform.platform(),
          'devices': f'{jax.device_count()} x {jax.devices()[0].device_kind}', 'processes': jax.process_count(),
          'versions': versions(), 'commit': commit}


def versions() -> dict[str, str]:
  """Versions of the packages that decide a run's bits."""
  return {p: importlib.metadata.version(p) for p in PACKAGES}


def say(text: str) -> None:
  """One line for the person at the console, from the first process."""
  if jax.process_index() == 0:
    print(text, file=sys.stderr, flush=True)


def finite(scalars: Mapping[str, float]) -> dict[str, float | None]:
  """For JSON, which has no NaN: what is not finite becomes None."""
  return {k: v if isinstance(v, int) else float(v) if math.isfinite(v) else None for k, v in scalars.items()}


class Progress:
  """A line every ten seconds for work of a known number of batches, with the time to its end."""

  def __init__(self, what: str, total: int):
    self.what, self.total, self.began, self.told = what, total, time.monotonic(), time.monotonic()

  def __call__(self, done: int) -> None:
    now = time.monotonic()
    if now - self.told >= 10 and done < self.total:
      self.told = now
      say(f'{self.what}: batch {done}/{self.total}  ETA {duration((now - self.began) / done * (self.total - done))}')


class Pace:
  """Tells when the first step was made, and warns of one that takes ten times the median of the last hundred.

  `began`: when the program was started, in seconds since the epoch. A step of less than a second is never warned of.
  """

  def __init__(self, began: float):
    self.began, self.last, self.times = began, None, collections.deque(maxlen=100)

  def __call__(self, step: int, total: float) -> None:
    """`total`: seconds in steps, and in waiting for their data, since the start."""
    if self.last is None:
      say(f'first step {time.time() - self.began:.1f} s after the start of the program')
    took, self.last = total - (total if self.last is None else self.last), total
    usual = statistics.median(self.times) if len(self.times) >= 10 else math.inf
    if took > max(10 * usual, 1) and jax.process_index() == 0:
      log.warning('step %d took %.1f s, %.0f times the median of %.3g s', step, took, took / usual, usual)
    self.times.append(took)


def duration(seconds: float) -> str:
  """3700.0 -> '1h01m'."""
  s = int(round(seconds))
  return f'{s // 3600}h{s % 3600 // 60:02d}m' if s >= 3600 else f'{s // 60}m{s % 60:02d}s' if s >= 60 else f'{s}s'


def write_atomically(path: str, text: str) -> None:
  """Writes a text file so that its name never shows half of it."""
  with links.fresh(path + '.new') as f:
    f.write(text)
  os.replace(path + '.new', path)


def write_pictures(folder: str, images: Mapping[str, np.ndarray], prefix: str = '') -> None:
  """Writes images u8[H, W, 3] as folder/<prefix><name>.png, films u8[T, H, W, 3] as .gif and texts as .txt."""
  from PIL import Image
  os.makedirs(folder, exist_ok=True)
  for name, image in images.items():
    text = isinstance(image, str)
    path = os.path.join(folder, f'{prefix}{name}.{"txt" if text else "png" if image.ndim == 3 else "gif"}')
    if text:
      write_atomically(path, image + '\n')
    else:
      with links.fresh(path, 'wb') as f:
        if image.ndim == 3:
          Image.fromarray(image).save(f, 'PNG')
        else:
          f.write(films.gif(image))


def rows(workdir: str) -> list[dict[str, Any]]:
  """The rows of metrics.jsonl; a last line that a kill cut off is left out."""
  path = os.path.join(workdir, 'metrics.jsonl')
  if not os.path.exists(path):
    return []
  with open(path, encoding='utf-8') as f:
    return [json.loads(line) for line in f if line.endswith('\n')]


def _seconds(workdir) -> float:
  """The seconds in the last row of timings.jsonl, from which a next process counts on."""
  path, last = os.path.join(workdir, 'timings.jsonl'), 0.0
  if os.path.exists(path):
    with open(path, encoding='utf-8') as f:
      for line in f:
        last = json.loads(line).get('seconds') or last
  return last


def cut(workdir: str, step: int, due: bool = False) -> None:
  """Removes what a run logged after `step`, before it logs that again; with `due`, the evaluation of `step` too."""
  for name in ('metrics.jsonl', 'timings.jsonl'):
    path = os.path.join(workdir, name)
    if os.path.exists(path):
      with open(path, encoding='utf-8') as f:
        kept = [line for line in f if (at := _step_of(line)) < step or at == step and not (due and _evaluates(line))]
      write_atomically(path, ''.join(kept))
  for path in glob.glob(os.path.join(glob.escape(workdir), 'pictures', '*.*')):
    number = os.path.basename(path).split('_')[0]
    if path.endswith(('.png', '.gif', '.txt')) and number.isdigit() and int(number) > step:
      os.remove(path)
  for path in sorted(glob.glob(os.path.join(glob.escape(workdir), 'tensorboard', 'events.*'))):
    _cut_events(path, step, due)


def _step_of(line):
  """The step of a row; infinite for a line that a kill cut off."""
  try:
    return json.loads(line)['step'] if line.endswith('\n') else math.inf
  except (ValueError, KeyError, TypeError, RecursionError):
    log.warning('a line of the log is broken and goes: %s', line[:80].rstrip())
    return math.inf


def _evaluates(line):
  return json.loads(line).get('split', 'train') != 'train'


def _cut_events(path, step, due):
  """Rewrites an event file without the events after `step`; of step 0, which is written anew, nothing stays."""
  from tensorboard.backend.event_processing import event_file_loader
  from tensorboard.compat.proto import event_pb2
  from tensorboard.summary.writer import record_writer
  events = []
  try:
    for raw in event_file_loader.RawEventFileLoader(path).Load():
      events.append(raw)
  except Exception as e:
    log.warning('%s: %s; its readable events are kept', path, str(e).split('\n')[0])
  def stays(event):
    return event.step < step or event.step == step and not (
        due and any(not v.tag.startswith(('train/', 'speed/')) for v in event.summary.value))
  kept = [raw for raw in events if stays(event_pb2.Event.FromString(raw))] if step else []
  if len(kept) == len(events):
    return
  if not kept:
    os.remove(path)
    return
  new = os.path.join(os.path.dirname(os.path.dirname(path)), '.events')     # a name that TensorBoard doesn't read
  with links.fresh(new, 'wb') as f:
    writer = record_writer.RecordWriter(f)
    for raw in kept:
      writer.write(raw)
    writer.flush()
  os.replace(new, path)
