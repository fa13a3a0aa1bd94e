"""What a step needs is told before it runs; what can't fit ends with advice; a new shape is noticed."""

import json
import logging
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import TooLarge

from lab import ledger, memory, programs, train
from lab.programs import Program
from tests import toy

GIB = 1 << 30


def run(config, workdir):
  return train.run(toy.make_task(config), config, str(workdir))


def test_the_estimate_is_written_and_right(toy_config, tmp_path, caplog):
  toy_config.mesh.data, toy_config.mesh.fsdp = 2, 4
  toy_config.total_steps = 1
  with caplog.at_level(logging.INFO):
    run(toy_config, tmp_path)
  told = json.loads((tmp_path / 'memory.json').read_text())
  assert told['parameters'] == 4 * (4 * 8 // 4 + 8)                # the kernel's columns lie on four devices
  # two moments and the average, each like the parameters; Adam's count; skipped, rate, joint
  assert told['optimizer'] == 3 * told['parameters'] + 4 + 8 + 4 + 8
  assert told['batch'] == 4 * (4 + 1 + 1 + 1)                      # one example a device: x, y, mask, record
  assert told['limit'] > told['free'] > 0 and 'memory a device: parameters 64 B' in caplog.text


def test_a_step_that_does_not_fit_ends_before_it_runs(toy_config, tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'free', lambda: (700, 10 * GIB))
  with pytest.raises(TooLarge, match='a step does not fit') as e:
    run(toy_config, tmp_path)
  assert e.value.exit_code == 6 and 'optim.accumulate' in str(e.value) and 'parameters 160 B' in str(e.value)
  assert not (tmp_path / 'metrics.jsonl').read_text()


def test_parameters_that_do_not_fit_are_never_made(toy_config, tmp_path, monkeypatch):
  monkeypatch.setattr(memory, 'free', lambda: (100, 0))
  monkeypatch.setattr(train, 'start', lambda *a: pytest.fail('the state was made'))
  with pytest.raises(TooLarge, match='config.mesh.fsdp'):
    run(toy_config, tmp_path)


def test_activations_are_those_that_the_way_back_needs():
  """A chain of n x n products under a scan that keeps all 16 of them: at least 17 matrices, growing as n^2."""
  def loss(w, x):
    return jnp.square(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x['x'], None, length=16)[0]).sum()
  found = {}
  for size in (64, 256):
    square = jax.ShapeDtypeStruct((size, size), jnp.float32)
    compiled = jax.jit(jax.grad(loss)).lower(square, {'x': square}).compile()
    need = memory.check_step(compiled, train.TrainState(jnp.int32(0), square, {}, {}), {'x': square})
    assert need.parameters == need.batch == 4 * size**2 and need.activations >= 17 * need.batch
    found[size] = need.activations
  assert found[256] == pytest.approx(16 * found[64], rel=0.02)


def test_the_device_s_own_numbers_are_taken(monkeypatch):
  class Device:
    """A device with 80 GiB, 30 of them taken."""

    def memory_stats(self):
      return {'bytes_limit': 80 * GIB, 'bytes_in_use': 30 * GIB}
  monkeypatch.setattr(jax, 'local_devices', lambda: [Device()])
  assert memory.free() == (50 * GIB, 30 * GIB)
  assert memory.size(50 * GIB) == '50 GiB' and memory.size(1500) == '1.46 KiB'


def test_an_accelerator_without_statistics_is_not_judged(toy_config, tmp_path, monkeypatch, caplog):
  class Device:
    """An accelerator that tells nothing."""
    platform = 'tpu'

    def memory_stats(self):
      return None
  with monkeypatch.context() as m:
    m.setattr(jax, 'local_devices', lambda: [Device()])
    m.setattr(memory, 'available_bytes', lambda: 1)
    assert memory.free() == (None, 0)
  monkeypatch.setattr(memory, 'free', lambda: (None, 0))
  toy_config.total_steps = 1
  toy_config.optim.warmup_steps = 0
  with caplog.at_level(logging.INFO):
    run(toy_config, tmp_path)
  assert 'memory a device: parameters 160 B' in caplog.text and ' free' not in caplog.text
  assert json.loads((tmp_path / 'memory.json').read_text())['limit'] is None


@pytest.mark.parametrize('version', [1, 2])
def test_files_that_a_container_keeps_are_free(monkeypatch, tmp_path, version):
  folder, *names, mark = memory.CGROUPS[2 - version]
  other = memory.CGROUPS[version - 1]
  monkeypatch.setattr(memory, 'CGROUPS', ((str(tmp_path / 'none'), *other[1:]), (str(tmp_path), *names, mark)))
  assert folder.startswith('/sys/fs/cgroup') and memory._container() == 1 << 62
  stat = {'anon': 2000, f'{mark}inactive_file': 300, f'{mark}active_file': 40, 'inactive_anon': 7}
  for name, content in ((names[0], '5000'), (names[1], '2340'),
                        ('memory.stat', '\n'.join(f'{k} {v}' for k, v in stat.items()))):
    (tmp_path / name).write_text(content + '\n')
  assert memory._container() == 5000 - 2340 + 340
  monkeypatch.setattr(memory, 'available_bytes', lambda: 10**6)
  assert memory.free()[0] == 3000 // jax.local_device_count()
  (tmp_path / names[0]).write_text('max\n')
  assert memory._container() == 1 << 62


def test_a_limit_on_the_address_space_counts():
  code = ('import resource, jax; from lab import memory; jax.devices(); free, _ = memory.free(); '
          'virtual = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize(); '
          'resource.setrlimit(resource.RLIMIT_AS, (virtual + (1 << 30), -1)); '      # JAX's threads need some of it
          'assert memory.free()[0] <= (1 << 30) // jax.local_device_count() < free')
  subprocess.run([sys.executable, '-c', code], check=True)


def test_a_new_shape_is_compiled_once_counted_and_told(caplog):
  book = ledger.Ledger('', writes=False)
  program = Program('the step', jax.jit(lambda x, batch: x + batch['a'].sum()), book)
  for _ in range(3):
    assert float(program(jnp.float32(1), {'a': np.ones((2, 3), np.float32)})) == 7
  assert book.compilations == 1 and not caplog.text
  assert float(program(jnp.float32(1), {'a': np.ones((2, 4), np.float32)})) == 9
  assert book.compilations == 2
  assert 'the step is compiled again, for the 2th time' in caplog.text and 'a float32[2, 4]' in caplog.text
  program(jnp.float32(1), {'a': np.ones((2, 3), np.float32)})
  assert book.compilations == 2 and book.seconds['compile'] > 0


@pytest.mark.parametrize('platform, count, chosen', [
    ('cpu', 8, programs.IN_ORDER), ('cpu', 1, {}), ('gpu', 8, {**programs.APART, 'a': 1}), ('tpu', 8, {})])
def test_programs_are_compiled_with_what_their_devices_want(monkeypatch, platform, count, chosen):
  devices = [types.SimpleNamespace(platform=platform)] * count
  monkeypatch.setattr(jax, 'devices', lambda: devices)
  assert programs.options(gpu={'a': 1}) == programs.options(iter(devices), {'a': 1}) == chosen


def test_a_system_s_own_options_reach_its_programs(toy_config, tmp_path, monkeypatch):
  seen = []
  monkeypatch.setattr(programs, 'options', lambda devices=None, gpu=None: seen.append(gpu) or {})
  toy_config.total_steps = 1
  train.run(toy.make_task(toy_config)._replace(gpu={'xla_gpu_enable_triton_gemm': False}), toy_config, str(tmp_path))
  assert seen.count({'xla_gpu_enable_triton_gemm': False}) == 2          # the step and the evaluation
