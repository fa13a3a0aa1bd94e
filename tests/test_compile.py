"""Steps compiled for machines: of fake devices here, and for TPUs where their compiler is installed."""

import importlib.util
import json
import os
import types

import jax
import pytest
from lab import files, main, mesh as meshes, sharding, topology
from lab.nn import target
from lab.task import ConfigError

LIBTPU = importlib.util.find_spec('libtpu') is not None
tpu = pytest.mark.skipif(not LIBTPU, reason='libtpu is not installed: pip install .[tpu]')
CUDA = importlib.util.find_spec('jax_cuda13_plugin') is not None


@pytest.fixture(autouse=True)
def as_before():
  """absl remembers the flags of the last call."""
  yield
  main.FLAGS.mode, main.FLAGS.topology, main.FLAGS.output = 'train', '', ''


def compiled(tmp_path, machine, *flags, config='tests/toy.py'):
  """(exit code, the report or None)."""
  out = tmp_path / 'report.json'
  code = main.main(['lab', f'--config={config}', '--mode=compile', f'--topology={machine}', f'--output={out}',
                    '--workdir=', '--input=', *flags])
  return code, json.loads(out.read_text()) if out.exists() else None


@pytest.fixture
def toy(toy_data, monkeypatch):
  monkeypatch.setenv('TOY_DATA', toy_data)


def test_a_step_is_compiled_and_told(toy, tmp_path, capsys):
  code, found = compiled(tmp_path, 'cpu:8', '--config.mesh.data=2', '--config.mesh.fsdp=4',
                         '--config.input.batch_size=8')
  assert code == 0 and found['devices'] == 8 and found['mesh'] == {'data': 2, 'fsdp': 4, 'tensor': 1}
  m = found['memory']
  assert m['peak'] >= m['temporaries'] > 0 and m['arguments'] > 0 and m['fits'] is None and m['limit'] is None
  assert found['flops'] > 0 and found['collectives']['all-reduce']['traffic'] > 0
  assert found['roofline']['bound'] == ''                  # nobody knows what a fake device can do
  told = capsys.readouterr().out
  assert 'cpu:8: 8 x cpu' in told and 'all-reduce' in told and all(path in told for path in found['sharding'])
  assert 'unknown whether it fits' in told


def test_every_large_array_is_told_and_the_largest_are_printed(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(sharding, 'LARGE', 1 << 10)      # so that the smallest recipe has many
  code, found = compiled(tmp_path, 'cpu:8', '--config.mesh.data=2', '--config.mesh.fsdp=4', '--config.optim.ema=0.9',
                         '--config.input.batch_size=32', config='configs/gpt.py:smoke')
  told = found['sharding']
  heads = 'params/', 'opt/inner/', 'opt/ema/', 'batch/'
  assert code == 0 and len(told) > 12 and {h for h in heads for path in told if path.startswith(h)} == {*heads}
  kernels = [path for path in told if path.endswith('body/blocks/mlp/up/kernel')]
  assert len(kernels) == 4                             # with two moments and one average
  # f32[layers 2, width 32, hidden 128], of which fsdp splits the width in 4: 2 x 8 x 128 x 4 bytes
  assert {told[path] for path in kernels} == {"float32[2, 32, 128] (None, 'fsdp', 'tensor'), 8 KiB a device"}
  printed = capsys.readouterr().out
  assert [path in printed for path in told] == [True] * 12 + [False] * (len(told) - 12)


def two_slices(monkeypatch, dcn):
  """Eight fake devices in two slices, with figures that make one bound or another the worst."""
  find = topology.find
  monkeypatch.setattr(topology, 'find', lambda name: find(name)._replace(slices=2))
  monkeypatch.setattr(topology, 'CHIPS', (('cpu', topology.Chip(1e9, 1e9, dcn)),))


def test_what_crosses_between_slices_bounds_a_step(toy, tmp_path, capsys, monkeypatch):
  two_slices(monkeypatch, 1e3)
  flags = '--config.mesh.data=2', '--config.mesh.fsdp=4', '--config.input.batch_size=8', '--config.peak_tflops=1.0'
  code, found = compiled(tmp_path, 'cpu:8', *flags)
  assert code == 0 and found['slices'] == 2
  crossing, r = sum(c['dcn'] for c in found['collectives'].values()), found['roofline']
  assert crossing > 0 and r['bound'] == 'dcn' and r['seconds'] == r['dcn'] == crossing / 1e3
  assert r['network'] == sum(c['traffic'] for c in found['collectives'].values()) / 1e9
  assert r['mfu'] == r['compute'] / r['dcn']
  told = capsys.readouterr().out
  assert 'bound by the network between slices' in told and 'to other slices' in told


def test_a_network_between_slices_that_nobody_knows_is_no_bound_and_is_told(toy, tmp_path, capsys, monkeypatch):
  two_slices(monkeypatch, 0)
  code, found = compiled(tmp_path, 'cpu:8', '--config.mesh.data=2', '--config.mesh.fsdp=4',
                         '--config.input.batch_size=8')
  assert code == 0 and found['roofline']['dcn'] is None and found['roofline']['bound'] == 'memory'
  assert 'between slices not known' in capsys.readouterr().out


def test_one_slice_sends_nothing_to_others(toy, tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(topology, 'CHIPS', (('cpu', topology.Chip(1e9, 1e9, 0)),))
  found = compiled(tmp_path, 'cpu:8', '--config.mesh.data=8', '--config.mesh.fsdp=1',
                   '--config.input.batch_size=8')[1]
  assert found['roofline']['dcn'] == 0 and not any(c['dcn'] for c in found['collectives'].values())
  assert 'slices' not in capsys.readouterr().out


def test_slices_are_told_by_the_order_of_a_machines_devices():
  machine = topology.Topology('x', list('abcdef'), 3, None)
  assert machine.slices_of('fadb') == [2, 0, 1, 0]


@pytest.mark.parametrize('kind, gbps', [('TPU v5', 50), ('TPU v5p', 50), ('TPU v5 lite', 6400 / 256),
                                        ('TPU v6 lite', 25600 / 256), ('TPU v4', 0), ('NVIDIA H200', 0)])
def test_chips_have_what_is_published_of_the_network_between_slices(kind, gbps):
  chip = topology.Topology('', [types.SimpleNamespace(device_kind=kind)], 1, None).chip
  assert 8 * chip.dcn == gbps * 1e9


def test_model_flops_do_not_hang_on_the_mesh(toy, tmp_path):
  one, two = (compiled(tmp_path, machine, f'--config.optim.accumulate={n}', '--config.mesh.data=-1',
                       '--config.mesh.fsdp=1', '--config.input.batch_size=8')[1]['flops']
              for machine, n in (('cpu:1', 1), ('cpu:8', 2)))
  assert two == 2 * one > 0


def test_parameters_split_over_fsdp_are_gathered_and_not_the_batch(tmp_path):
  sent = []
  for data, fsdp in ((8, 1), (1, 8)):
    code, found = compiled(tmp_path, 'cpu:8', f'--config.mesh.data={data}', f'--config.mesh.fsdp={fsdp}',
                           '--config.input.batch_size=64', config='configs/gpt.py:smoke')
    assert code == 0
    sent.append(sum(c['traffic'] for c in found['collectives'].values()))
  assert sent[1] < 3 * sent[0]           # gradients are summed either way; parameters are gathered twice


@pytest.mark.parametrize('machine, flags, told', [
    ('', (), 'needs --topology'), ('v5e', (), 'expected v5e:16x16'), ('tpu:4', (), 'expected v5e:16x16'),
    ('cpu:9', (), 'this machine has 8 such devices'), ('gpu:1', (), 'this machine has 0 such devices'),
    ('cpu:8', ('--config.input.batch_size=12', '--config.mesh.data=8'), 'data x fsdp = 8 devices, such as 16'),
    ('cpu:8', ('--config.mesh.data=3',), 'needs a multiple of 3 devices')])
def test_what_cannot_be_is_told(toy, tmp_path, capsys, machine, flags, told):
  code, found = compiled(tmp_path, machine, '--config.mesh.fsdp=1', *flags)
  assert code == 2 and found is None and told in capsys.readouterr().err


def small(monkeypatch, limit=100.0):
  """Machines whose devices have next to no memory."""
  find = topology.find
  monkeypatch.setattr(topology, 'find', lambda name: find(name)._replace(memory=limit))


def test_what_does_not_fit_ends_with_advice(toy, tmp_path, capsys, monkeypatch):
  small(monkeypatch)
  code, found = compiled(tmp_path, 'cpu:1', '--config.mesh.data=1', '--config.mesh.fsdp=1')
  assert code == 6 and found['memory']['fits'] is False and len(found['advice']) == 3
  said = capsys.readouterr()
  assert 'DOES NOT FIT' in said.out and 'What helps most' in said.err and all(a in said.err for a in found['advice'])
  assert 'config.input.batch_size=4 with config.optim.accumulate=2' in said.err


def refuse(monkeypatch, words):
  """A compiler that says no."""
  def compile(*_, **__):
    raise jax.errors.JaxRuntimeError(words)
  monkeypatch.setattr(jax.stages.Lowered, 'compile', compile)


def test_a_step_that_the_compiler_refuses_is_told_as_far_as_it_is_known(toy, tmp_path, capsys, monkeypatch):
  flags = '--config.mesh.data=1', '--config.mesh.fsdp=8'
  known = compiled(tmp_path, 'cpu:8', *flags)[1]       # an older report of a step that did not fail
  small(monkeypatch)
  refuse(monkeypatch, 'RESOURCE_EXHAUSTED: no.\nUsed 30.7G of 15.7G hbm: exceeded by 15G.\nLargest: many')
  code, found = compiled(tmp_path, 'cpu:8', *flags)
  assert code == 6 and found['memory']['fits'] is False and 'peak' not in found['memory']
  assert found['refused'] == 'Used 30.7G of 15.7G hbm: exceeded by 15G' and 'roofline' not in found
  for key in ('flops', 'sharding', 'mesh', 'devices', 'device_kind'):
    assert found[key] == known[key]
  for key in ('parameters', 'optimizer', 'batch'):
    assert found['memory'][key] == known['memory'][key] > 0
  said = capsys.readouterr()
  assert 'DOES NOT FIT' in said.out and 'exceeded by 15G' in said.out and 'exceeded by 15G' in said.err
  assert found['advice'] and all(a in said.err for a in found['advice'])


def test_other_words_of_the_compiler_are_a_defect(toy, tmp_path, monkeypatch):
  refuse(monkeypatch, 'INTERNAL: a defect')
  with pytest.raises(jax.errors.JaxRuntimeError, match='a defect'):
    compiled(tmp_path, 'cpu:1', '--config.mesh.data=1', '--config.mesh.fsdp=1')


def test_the_folder_of_a_report_is_made_or_refused_before_compiling(toy, tmp_path, capsys, monkeypatch):
  run = lambda out: main.main(['lab', '--config=tests/toy.py', '--mode=compile', '--topology=cpu:1', '--workdir=',
                               '--input=', f'--output={out}'])
  assert run(tmp_path / 'a' / 'b' / 'report.json') == 0 and (tmp_path / 'a' / 'b' / 'report.json').exists()
  refuse(monkeypatch, 'INTERNAL: it was compiled before')
  (tmp_path / 'file').write_text('')
  for out in (tmp_path / 'file' / 'report.json', tmp_path / 'a', f'{tmp_path}/new/', 'gs://lab/report.json'):
    assert run(out) == 2 and f'--output={out}: ' in capsys.readouterr().err
  monkeypatch.setattr(files.os, 'access', lambda path, mode: mode != os.W_OK)
  assert run(tmp_path / 'report.json') == 2 and 'can\'t be written' in capsys.readouterr().err
  assert not (tmp_path / 'new').exists()


@pytest.mark.skipif(LIBTPU, reason='libtpu is installed')
def test_a_missing_compiler_is_told():
  with pytest.raises(ConfigError, match=r"pip install '\.\[tpu\]'"):
    topology.find('v5e:2x2')


@tpu
def test_slices_that_do_not_exist_are_told():
  with pytest.raises(ConfigError, match='no such slice'):
    topology.find('v5e:3x5')


@tpu
@pytest.mark.parametrize('machine, count', [('v5e:16x16', 256), ('v5p:4x4x4', 64), ('v4:4x4x4', 64),
                                            ('v6e:16x16', 256), ('v5e:4x4*2', 32)])
def test_machines_have_their_devices(machine, count):
  found = topology.find(machine)
  assert len(found.devices) == count and found.chip.hbm and found.memory
  assert found.slices == (2 if '*' in machine else 1)
  assert found.slices_of(found.devices[::-1]) == [getattr(d, 'slice_index', 0) for d in found.devices[::-1]]
  # a side of the torus may have to be split between two axes
  mesh = meshes.make({'data': -1, 'fsdp': 2, 'tensor': 1}, found.devices)
  assert dict(mesh.shape) == {'data': count // 2, 'fsdp': 2, 'tensor': 1}


@tpu
def test_a_step_for_two_slices_keeps_fsdp_inside_of_them(toy, tmp_path, capsys):
  flags = ['--config.mesh.fsdp=4', '--config.input.batch_size=32']
  code, found = compiled(tmp_path, 'v5e:4x4*2', '--config.mesh.data=8', *flags)
  assert code == 0 and found['slices'] == 2 and found['roofline']['bound'] and found['memory']['fits']
  assert found['roofline']['dcn'] == sum(c['dcn'] for c in found['collectives'].values()) / 3.125e9 > 0
  assert compiled(tmp_path, 'v5e:4x4*2', '--config.mesh.data=1', '--config.mesh.fsdp=32',
                  '--config.input.batch_size=32')[0] == 2
  assert 'a multiple of the 2 slices' in capsys.readouterr().err


@pytest.mark.parametrize('machine, message', [('h200:0', '1 to 8'), ('h100:9', '1 to 8'), ('h300:1', 'h100:8, h200:8')])
def test_hosts_of_gpus_that_there_are_not(machine, message):
  with pytest.raises(ConfigError, match=message):
    topology.find(machine)


@pytest.mark.skipif(CUDA, reason='the compiler for GPUs is installed')
def test_without_the_compiler_for_gpus_the_extra_is_named():
  with pytest.raises(ConfigError, match=r"pip install '\.\[cuda\]'"):
    topology.find('h200:1')


@pytest.mark.skipif(not CUDA, reason='the compiler for GPUs is not installed: pip install .[cuda]')
def test_a_step_is_compiled_for_gpus_that_are_not_there(toy, tmp_path):
  code, found = compiled(tmp_path, 'h200:2', '--config.mesh.data=1', '--config.mesh.fsdp=2',
                         '--config.input.batch_size=8')
  assert code == 0 and found['device_kind'] == 'NVIDIA H200' and found['devices'] == 2
  assert found['memory']['fits'] and found['roofline']['seconds'] > 0


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
def test_layers_ask_what_they_are_compiled_for_not_what_is_here(platform):
  assert target.platform() == 'cpu' and not target.nvidia()
  device = jax.sharding.AbstractDevice(device_kind='a', num_cores=None, platform=platform)
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    assert target.platform() == platform and target.nvidia() == (platform == 'gpu')
