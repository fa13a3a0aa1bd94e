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

from lab import flops, hlo, logs, memory, mesh as meshes, optim, sharding, topology, train
from lab.task import ConfigError, Task

SHOWN = 12           # arrays whose sharding is told
NAMES = {'dcn': 'the network between slices'}        # of bounds, where people read them


def run(task: Task, config, name: str, output: str = '') -> dict:
  """Compiles, prints, and writes the report as JSON to `output` if it is given; returns it.

  Raises ConfigError for a machine or batch that cannot be, TooLarge, with what helps most, where the step does not fit.
  """
  machine = topology.find(name)
  mesh = meshes.make(config.mesh, machine.devices)
  report = {'topology': name, 'devices': len(machine.devices), 'slices': machine.slices,
            'device_kind': machine.devices[0].device_kind, 'mesh': dict(mesh.shape)}
  like, batch, args = abstract(task, config, mesh)
  step = train.make_step(task, optim.make(config.optim, config.total_steps), config, like, mesh)
  work = flops.training(task.loss, like.params, like.stats, *args) * config.optim.accumulate
  with jax.set_mesh(mesh):
    lowered = step.lower(like, batch)
    try:
      with warnings.catch_warnings():
        # a cache of programs can keep one for a machine that is not there, and not read it
        warnings.filterwarnings('ignore', 'Error reading persistent compilation cache')
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
      if 'RESOURCE_EXHAUSTED' not in str(e):
        raise
      said = next((line for line in str(e).splitlines() if 'exceed' in line), str(e).splitlines()[0])
      raise TooLarge(f'{name}: the step does not fit: {said.strip()}. {_advice(config, like, mesh)}') from None
  sent = hlo.collectives(compiled.as_text(), len(machine.devices), machine.slices_of(mesh.devices.flat))
  report |= {'memory': _memory(compiled, machine, like, batch), 'flops': work,
             'collectives': {k: v._asdict() for k, v in sent.items()}, 'sharding': _layout(like)}
  report['roofline'] = _roofline(report, machine, config.peak_tflops)
  print(text(report), flush=True)
  if output:
    logs.write_atomically(output, json.dumps(report, indent=2))
  if not report['memory']['fits']:
    raise TooLarge(f'{name}: the step does not fit. {_advice(config, like, mesh)}')
  return report


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
  """Bytes of each device."""
  found = compiled.memory_analysis()
  peak = (found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
          + found.temp_size_in_bytes + found.generated_code_size_in_bytes)
  return {'parameters': memory.on_device(like.params), 'optimizer': memory.on_device(like.opt),
          'batch': memory.on_device(batch), 'arguments': found.argument_size_in_bytes,
          'temporaries': found.temp_size_in_bytes, 'output': found.output_size_in_bytes,
          'reused': found.alias_size_in_bytes, 'peak': peak, 'limit': machine.memory,
          'fits': machine.memory is None or peak <= machine.memory}


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


def _layout(like) -> dict[str, str]:
  """path -> how it is split, of the parameters, the largest first."""
  found = sorted(sharding.paths(like.params), key=lambda px: -math.prod(px[1].shape))
  return {path: f'{x.dtype.name}{list(x.shape)} {tuple(x.sharding.spec)}' for path, x in found[:SHOWN]}


def _advice(config, like, mesh) -> str:
  """Three settings that help most, by what takes the room."""
  state = memory.on_device(like.params) + memory.on_device(like.opt)
  accumulate, size = config.optim.accumulate, config.input.batch_size
  room = [f'config.mesh.fsdp={2 * mesh.shape["fsdp"]} (parameters and optimizer take {memory.size(state)} a device)']
  if size % (2 * mesh.shape['data'] * mesh.shape['fsdp']):      # half of it would not give each device an example
    room.append(f'config.mesh.tensor={2 * mesh.shape["tensor"]}')
  else:
    room.append(f'config.input.batch_size={size // 2} with config.optim.accumulate={2 * accumulate}')
  if 'remat' in config.get('model', {}) and not config.model.remat:
    room.append('config.model.remat=True')
  else:
    room.append('config.optim.name=adafactor, whose moments are small')
  return f'What helps most: {"; ".join(room)}'


def text(report: dict) -> str:
  """The report for people."""
  m, r, size = report['memory'], report['roofline'], memory.size
  limit = '' if m['limit'] is None else f' of {size(m["limit"])}: {"fits" if m["fits"] else "DOES NOT FIT"}'
  lines = [f'{report["topology"]}: {report["devices"]} x {report["device_kind"]}, mesh '
           + ', '.join(f'{k} {n}' for k, n in report['mesh'].items()),
           f'  memory a device   {size(m["peak"])}{limit} (arguments {size(m["arguments"])}, temporaries '
           f'{size(m["temporaries"])}, output {size(m["output"])}, reused {size(m["reused"])})',
           f'  model FLOPs       {report["flops"]:.4g} a step']
  lines += [f'  {kind:<18}{c["count"]} a step, {size(c["payload"])}, of which a device sends {size(c["traffic"])}'
            + (f', and {size(c["dcn"])} to other slices' if c['dcn'] else '')
            for kind, c in report['collectives'].items()]
  lines.append(f'  at least          {1e3 * r["seconds"]:.3g} ms a step, bound by {NAMES.get(r["bound"], r["bound"])} '
               f'({_bounds(report)}); MFU at most {r["mfu"]:.0%}' if r['bound'] else
               '  no bound          this device\'s figures are not known')
  lines += [f'  {path:<40} {how}' for path, how in report['sharding'].items()]
  return '\n'.join(lines)


def _bounds(report) -> str:
  """All of them, in milliseconds."""
  r = report['roofline']
  told = f'compute {1e3 * r["compute"]:.3g}, memory {1e3 * r["memory"]:.3g}, network {1e3 * r["network"]:.3g}'
  if r['dcn'] is None:
    return f'{told} ms, between slices not known'
  return f'{told}, between slices {1e3 * r["dcn"]:.3g} ms' if report['slices'] > 1 else f'{told} ms'
