"""The benchmarks' programs: the step by itself, and beside another program's."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import input as bench_input, kernels as bench_kernels, step
from data_pipelines import DataError, TooLarge

from lab.files import StorageError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = ['--config=configs/video.py:smoke', '--config.input.batch_size=8']


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  folder = tmp_path_factory.mktemp('step')
  run = subprocess.run([sys.executable, '-m', 'benchmarks.step', *SMALL, '--steps=3', f'--profile={folder}'], cwd=ROOT,
                       capture_output=True, text=True, check=True)
  return run.stdout, folder


def test_the_step_by_itself_tells_its_speed_memory_and_compilation(measured):
  row = json.loads(measured[0].splitlines()[-1])
  assert row['config'] == 'configs/video.py:smoke' and row['settings'] == ['input.batch_size=8']
  assert row['unit'] == 'sequences' and row['items'] == 8 and 0 < row['ms_min'] <= row['ms'] and row['loss'] > 0
  assert row['items_per_s'] == pytest.approx(8e3 / row['ms'], rel=1e-2)
  assert row['flops'] > 0 and row['foretold_bytes'] > 0 and row['compile_s'] > 0 and row['compile_warm_s'] > 0


def test_a_profile_is_left_for_other_programs(measured):
  text, folder = measured
  assert 'ms of kernels a step' in text and list(folder.glob('**/*.xplane.pb'))


def test_instructions_of_a_program_are_told_with_where_they_come_from():
  text = ('  ROOT %fusion.1 = f32[2,3]{1,0} fusion(%x), metadata={op_name="jit(step)/mul"}\n'
          '  %gemm.2 = f32[4] custom-call(%y), custom_call_target="__cublas$gemm"\nENTRY main {')
  found = dict(step.instructions(text))
  assert found == {'fusion.1': 'f32[2,3]{1,0} jit(step)/mul', 'gemm.2': 'f32[4] __cublas$gemm'}


def test_causal_attention_counts_half_of_its_products():
  from data_pipelines import pipeline
  from lab import config as configs, mesh, optim, train
  from lab.task import load
  config = configs.read('configs/gpt.py:smoke')
  config.input.cache = False
  task = load(config)
  batches = pipeline.Batches(task.source('train'), config.input, 4, (0,), train=True)
  like = train.abstract(task, optim.make(config.optim, 10), config, batches.spec(1), mesh.make(config.mesh))
  m, tokens = config.model, 4 * config.data.length
  kernels = 12 * m.width**2 * m.layers + m.width * 128             # the vocabulary of 65 is filled up to 128
  assert step.model_flops(config, batches, like) == 6 * tokens * (kernels + m.layers * m.width * config.data.length)


@pytest.mark.parametrize('program', [step, bench_input])
@pytest.mark.parametrize('error, code', [
    (TooLarge('a step does not fit'), 6), (StorageError('no'), 5), (RuntimeError('RESOURCE_EXHAUSTED: memory'), 6),
    (DataError('bad'), 3)])
def test_what_ends_training_ends_a_benchmark_with_its_code(program, error, code, monkeypatch, capsys):
  def fail(*_):
    raise error
  monkeypatch.setattr(program, 'run', fail)
  assert program.main(['benchmark', SMALL[0]]) == code
  assert f'error: {error}\n' in capsys.readouterr().err


@pytest.mark.parametrize('program', [step, bench_input])
def test_a_defect_of_a_benchmark_shows_its_trace(program, monkeypatch):
  monkeypatch.setattr(program, 'run', lambda *_: {}['defect'])
  with pytest.raises(KeyError):
    program.main(['benchmark', SMALL[0]])


def test_two_programs_are_measured_in_turns(tmp_path):
  peer = tmp_path / 'peer.py'
  peer.write_text('import json, sys\nassert sys.argv[1:] == ["--steps", "2", "--batch", "8", "sequences"], sys.argv\n'
                  'print("noise")\nprint(json.dumps({"items_per_s": 0.5, "step_ms": 16000.0}))\n', encoding='utf-8')
  run = subprocess.run(['benchmarks/compare.sh', str(peer), 'sequences', '--batch=8', SMALL[0]], cwd=ROOT, text=True,
                       capture_output=True, check=True, env={**os.environ, 'PYTHON': sys.executable, 'ROUNDS': '1',
                                                             'STEPS': '2'})
  ours, theirs, last = run.stdout.splitlines()
  assert json.loads(ours)['items'] == 8 and json.loads(theirs)['items_per_s'] == .5
  assert 'peer 0.5 sequences/s (medians): ratio ' in last
  assert subprocess.run(['benchmarks/compare.sh'], cwd=ROOT, check=False, capture_output=True).returncode == 2


def test_kernels_are_timed_beside_the_plain_way(capsys):
  shapes, heads = ((5, 40, False), (5, 40, True)), ((3, 24, 2, 16),)
  assert bench_kernels.main(['kernels', '--calls=1'], (4, 700, 600), shapes, (6, 40), heads,
                           (1, 256, 2, 32), ((1, 16, 128, 1, 16),), (2, 5, 7), interpret=True) == 0
  rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
  assert len(rows) == 15 and all(float(row[-1]) < 1e-2 for row in rows)


def test_kernels_are_not_timed_where_there_is_no_gpu(capsys):
  assert bench_kernels.main(['kernels', '--calls=1']) == 2 and 'expected an NVIDIA GPU' in capsys.readouterr().err
