"""The training step compiled for a machine that is not there: what it needs, what it sends, how fast it could be.

  python -m lab.main --config=configs/gpt.py:full --mode=compile --topology=v5e:16x16 [--output=FILE.json]

It is the step that `train` runs, with the same shardings, through the same compiler; nothing is computed.
"""

import json
import math
import warnings

import jax
from data_pipelines import TooLarge, pipeline
from jax.sharding import NamedSharding

from lab import advice, files, flops, hlo, logs, memory, mesh as meshes, optim, sharding, topology, train
from lab.task import ConfigError, Task

SHOWN = 12           # arrays whose sharding is printed
NAMES = {'dcn': 'the network between slices'}        # of bounds, where people read them


def run(task: Task, config, name: str, output: str = '') -> dict:
  """Compiles, prints, and writes the report as JSON to `output` if it is given; returns it.

  Raises ConfigError for a machine or batch that cannot be, and where nothing can be written to `output`; TooLarge, with
  what helps most, where the step does not fit, be it that the compiler refuses it: what is known is then told before.
  """
  machine = topology.find(name)
  mesh = meshes.make(config.mesh, machine.devices)
  like, batch, args = abstract(task, config, mesh)
  if output:
    files.make_folder('--output', output)
  step = train.make_step(task, optim.make(config.optim, config.total_steps), config, like, mesh)
  work = flops.training(task.loss, like.params, like.stats, *args) * config.optim.accumulate
  with jax.set_mesh(mesh):
    compiled, refused = _compile(step.lower(like, batch))
  report = {'topology': name, 'devices': len(machine.devices), 'slices': machine.slices,
            'device_kind': machine.devices[0].device_kind, 'mesh': dict(mesh.shape),
            'memory': _memory(compiled, machine, like, batch), 'flops': work, 'sharding': _layout(like, batch)}
  if compiled:
    sent = hlo.collectives(compiled.as_text(), len(machine.devices), machine.slices_of(mesh.devices.flat))
    report['collectives'] = {k: v._asdict() for k, v in sent.items()}
    report['roofline'] = _roofline(report, machine, config.peak_tflops)
  else:
    report['refused'] = refused
  if report['memory']['fits'] is False:
    report['advice'] = advice.settings(task, config, like, mesh, machine)
  print(text(report), flush=True)
  if output:
    logs.write_atomically(output, json.dumps(report, indent=2))
  if report['memory']['fits'] is False:
    helps = f'What helps most: {"; ".join(report["advice"])}' if report['advice'] else 'It needs a larger machine'
    raise TooLarge(f'{name}: the step does not fit{": " * bool(refused)}{refused}. {helps}')
  return report


def _compile(lowered):
  """(the compiled step, ''), or (None, the compiler's words) where the device's memory is too small for it."""
  try:
    with warnings.catch_warnings():
      # a cache of programs can keep one for a machine that is not there, and not read it
      warnings.filterwarnings('ignore', 'Error reading persistent compilation cache')
      return lowered.compile(), ''
  except jax.errors.JaxRuntimeError as e:
    if 'RESOURCE_EXHAUSTED' not in str(e):
      raise
    lines = str(e).splitlines()
    return None, next((line for line in lines if 'exceed' in line), lines[0]).strip().rstrip('.')


def abstract(task: Task, config, mesh):
  """State, batch [micro-batches, B, ...] and what else the loss takes: shapes, types and shardings alone."""
  config.unlock()
  config.input.cache = False                 # or the records would be read
  config.lock()
  size, parts = config.input.batch_size, mesh.shape['data'] * mesh.shape['fsdp']
  if size % parts:
    raise ConfigError(f'config.input.batch_size = {size}: expected a multiple of data x fsdp = {parts} devices, such '
                      f'as {-(-size // parts) * parts}')
  batches = pipeline.Batches(task.source('train'), config.input, size, range(size), train=True, seed=config.seed)
  tx, spec = optim.make(config.optim, config.total_steps), batches.spec(size)
  like = train.abstract(task, tx, config, batches.spec(1), mesh)
  layout = NamedSharding(mesh, meshes.MICRO)
  batch = {k: jax.ShapeDtypeStruct((config.optim.accumulate, *s.shape), s.dtype, sharding=layout)
           for k, s in spec.items()}
  one = {k: jax.ShapeDtypeStruct(s.shape, s.dtype) for k, s in spec.items()}
  return like, batch, (one, jax.eval_shape(lambda: jax.random.key(0, impl=config.prng)), like.step)


def _memory(compiled, machine, like, batch) -> dict:
  """Bytes of each device; only those of the state and the batch where the compiler has refused the step."""
  known = {'parameters': memory.on_device(like.params), 'optimizer': memory.on_device(like.opt),
           'batch': memory.on_device(batch), 'limit': machine.memory}
  if not compiled:
    return {**known, 'fits': False}
  found = compiled.memory_analysis()
  peak = (found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
          + found.temp_size_in_bytes + found.generated_code_size_in_bytes)
  return {**known, 'arguments': found.argument_size_in_bytes, 'temporaries': found.temp_size_in_bytes,
          'output': found.output_size_in_bytes, 'reused': found.alias_size_in_bytes, 'peak': peak,
          'fits': None if machine.memory is None else peak <= machine.memory}


def _roofline(report, machine, peak_tflops) -> dict:
  """Seconds that a step takes at least, by each bound, and the share of the peak that this leaves (MFU).

  compute: the model's FLOPs at the devices' peak. memory: arguments, results and temporaries each moved once (written
  and read). network: what collectives send inside a slice, over its links. dcn: what they send from one slice to
  another at least, over the data-center network; 0 where there is one slice, None, and no bound, where there are
  several and nobody says what a chip can send.
  """
  chip, m = machine.chip, report['memory']
  peak = 1e12 * peak_tflops or flops.peak(report['device_kind'])
  traffic, crossing = (sum(c[key] for c in report['collectives'].values()) for key in ('traffic', 'dcn'))
  moved = m['arguments'] + m['output'] + 2 * m['temporaries']
  bounds = {'compute': report['flops'] / (peak * report['devices']) if peak else 0.0,
            'memory': moved / chip.hbm if chip.hbm else 0.0, 'network': traffic / chip.link if chip.link else 0.0,
            'dcn': crossing / chip.dcn if chip.dcn else 0.0}
  worst = max(bounds, key=bounds.get)
  if machine.slices > 1 and not chip.dcn:
    bounds['dcn'] = None
  return {**bounds, 'bound': worst if bounds[worst] else '', 'seconds': bounds[worst],
          'mfu': bounds['compute'] / bounds[worst] if bounds[worst] else 0.0}


def _layout(like, batch) -> dict[str, str]:
  """path -> how it is split, the largest first: all large arrays of the state and the batch, or some of small ones."""
  size = lambda x: math.prod(x.shape) * x.dtype.itemsize
  found = sorted(sharding.paths({**like._asdict(), 'batch': batch}), key=lambda px: -size(px[1]))
  return {path: f'{x.dtype.name}{list(x.shape)} {tuple(x.sharding.spec)}, {memory.size(memory.on_device(x))} a device'
          for i, (path, x) in enumerate(found) if i < SHOWN or size(x) > sharding.LARGE}


def text(report: dict) -> str:
  """The report for people."""
  lines = [f'{report["topology"]}: {report["devices"]} x {report["device_kind"]}, mesh '
           + ', '.join(f'{k} {n}' for k, n in report['mesh'].items()),
           f'  memory a device   {_room(report["memory"])}',
           f'  model FLOPs       {report["flops"]:.4g} a step']
  lines += [f'  {kind:<18}{c["count"]} a step, {memory.size(c["payload"])}, of which a device sends '
            f'{memory.size(c["traffic"])}' + (f', and {memory.size(c["dcn"])} to other slices' if c['dcn'] else '')
            for kind, c in report.get('collectives', {}).items()]
  r = report.get('roofline', {})
  if 'refused' in report:
    lines.append(f'  refused           {report["refused"]}')
  elif r['bound']:
    bound = NAMES.get(r['bound'], r['bound'])
    lines.append(f'  at least          {1e3 * r["seconds"]:.3g} ms a step, bound by {bound} ({_bounds(report)}); MFU '
                 f'at most {r["mfu"]:.0%}')
  else:
    lines.append('  no bound          this device\'s figures are not known')
  shown = [*report['sharding'].items()][:SHOWN]
  lines += [f'  {path:<{max(len(p) for p, _ in shown)}} {how}' for path, how in shown]
  return '\n'.join(lines)


def _room(m) -> str:
  """What is needed of a device's memory, and whether it has that."""
  size = memory.size
  fits = {True: 'fits', False: 'DOES NOT FIT', None: 'unknown whether it fits'}[m['fits']]
  if 'peak' not in m:
    limit = '' if m['limit'] is None else f'more than {size(m["limit"])}: '
    return (f'{limit}{fits} (parameters {size(m["parameters"])}, optimizer {size(m["optimizer"])}, batch '
            f'{size(m["batch"])})')
  limit = '' if m['limit'] is None else f' of {size(m["limit"])}'
  return (f'{size(m["peak"])}{limit}: {fits} (arguments {size(m["arguments"])}, temporaries {size(m["temporaries"])}, '
          f'output {size(m["output"])}, reused {size(m["reused"])})')


def _bounds(report) -> str:
  """All of them, in milliseconds."""
  r = report['roofline']
  told = f'compute {1e3 * r["compute"]:.3g}, memory {1e3 * r["memory"]:.3g}, network {1e3 * r["network"]:.3g}'
  if r['dcn'] is None:
    return f'{told} ms, between slices not known'
  return f'{told}, between slices {1e3 * r["dcn"]:.3g} ms' if report['slices'] > 1 else f'{told} ms'
