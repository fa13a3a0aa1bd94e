"""The command line: what is wrong is said in one line, early, with the exit code that belongs to it."""

import os
import subprocess
import sys

import pytest

from lab import config as core, main, mesh as meshes
from lab.task import ConfigError
from tests import toy
from tests.conftest import ROOT


def message(capsys, *arguments):
  code = main.main(['lab', *arguments])
  return code, capsys.readouterr().err


@pytest.mark.parametrize('argument, said', [
    ('--config.learning_rte=1', 'did you mean --config.optim.learning_rate?'),
    ('--config.model.learning_rate=1', 'did you mean --config.optim.learning_rate?'),       # the wrong section
    ('--config.optim.warmup-steps=1', 'did you mean --config.optim.warmup_steps?'),
    ('--config.totl_steps=5', 'did you mean --config.total_steps?'),
    ('--config.input.batch_size=ten', 'expected int, such as 8'),
    ('--config.input.batch_size=1.5', 'expected int, such as 8'),
    ('--config.input.cache=3', 'expected bool, such as True'),
    ("--config.optim.learning_rate=__import__('os').system('true')", 'expected float, such as 0.001'),
    ('--config.input.batch_size=0', 'config.input.batch_size = 0: expected at least 1'),
    ('--config.optim.name=adma', "expected one of 'adadelta', "),
    ('--config.platform=abacus', "expected one of '', 'cpu', 'gpu', 'tpu'"),
    ('--config.task=tests.tyo', 'no such module'),
    ('--mode=trian', 'train'),
    ('stray', "unknown argument 'stray'"),
])
def test_a_wrong_configuration_is_one_line_and_code_2(capsys, tmp_path, monkeypatch, argument, said):
  monkeypatch.setattr(meshes, 'start', lambda *a: pytest.fail('a device was touched'))
  monkeypatch.chdir(ROOT)
  workdir = tmp_path / 'run'
  code, err = message(capsys, '--config=tests/toy.py', f'--workdir={workdir}', argument)
  assert code == 2 and said in err and err.startswith('error: ') and err.count('\n') == 1
  assert not workdir.exists()


def test_what_is_missing_is_said(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  assert '--config is missing' in message(capsys, f'--workdir={tmp_path}')[1]
  code, err = message(capsys, '--config=configs/psoe.py', f'--workdir={tmp_path}')
  assert code == 2 and 'did you mean configs/pose.py?' in err
  assert '--workdir is missing' in message(capsys, '--config=tests/toy.py', '--workdir=')[1]
  assert '--input' in message(capsys, '--config=tests/toy.py', f'--workdir={tmp_path}', '--mode=predict', '--input=')[1]
  code, err = message(capsys, '--config=tests/toy.py', f'--workdir={tmp_path}/none', '--mode=eval')
  assert code == 5 and 'no such folder' in err
  assert not os.path.exists(tmp_path / 'none')


def test_values_take_the_type_of_the_default():
  config = toy.get_config()
  config.numbers, config.name = (0.9, 0.99), ''
  rest = core.override(config, ['lab', '--config.optim.learning_rate=1', '--config.name=a=b',
                                '--config.numbers=(0.5,1)', '--config.optim.ema=None', '--config.input.cache', 'false',
                                '--other=3'])
  assert rest == ['lab', '--other=3']
  assert (config.optim.learning_rate, config.name, config.numbers) == (1.0, 'a=b', (0.5, 1))
  assert isinstance(config.optim.learning_rate, float) and config.optim.ema == 0.0 and config.input.cache is False
  with pytest.raises(ConfigError, match='a value is missing'):
    core.override(config, ['--config.seed'])


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_an_explicit_platform_that_is_missing_ends_at_once(lab, tmp_path, platform):
  output, _ = (process := lab(f'--workdir={tmp_path}/run', f'--config.platform={platform}')).communicate(timeout=300)
  assert process.returncode == 2, output
  assert f"config.platform = '{platform}'" in output and 'cpu' in output.lower() and 'lock file' in output
  assert not (tmp_path / 'run').exists()


# absl remembers the flags of the last call
DEFAULTS = ('--mode=train', '--step=latest', '--input=', '--output=', '--nodistributed')


def toy_command(capsys, toy_data, workdir, *arguments):
  return message(capsys, '--config=tests/toy.py', f'--config.data.dir={toy_data}', f'--workdir={workdir}', *DEFAULTS,
                 *arguments)


def test_a_wrong_checkpoint_path_never_trains(capsys, caplog, toy_data, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  caplog.set_level('INFO')
  monkeypatch.setattr(meshes, 'listen', lambda alone: None)
  code, err = toy_command(capsys, toy_data, tmp_path / 'run', '--config.total_steps=2', '--config.optim.warmup_steps=0')
  assert code == 0 and 'starting at step 0' in err and 'running on CPU' in caplog.text
  for wrong, said in ((f'{tmp_path}/rnu', f'did you mean {tmp_path}/run?'),
                      (f'{tmp_path}/run:7', "no step '7'; nearest: [2]"),
                      (f'{tmp_path}/w.safetensors', 'no such file')):
    code, err = toy_command(capsys, toy_data, tmp_path / 'next', f'--config.init_from={wrong}')
    assert code == 5 and said in err and 'training from' not in err
  code, err = toy_command(capsys, toy_data, tmp_path / 'run', '--mode=eval', '--step=3')
  assert code == 5 and "no step '3'; nearest: [2]" in err
  code, err = toy_command(capsys, toy_data, tmp_path / 'run', '--mode=eval', '--step=2')
  assert code == 0 and 'examples 13' in err and (tmp_path / 'run' / 'eval_2.json').exists()
  code, err = toy_command(capsys, toy_data, tmp_path / 'run', '--mode=eval', f'--output={tmp_path}/other')
  assert code == 0 and f'written to {tmp_path}/other/eval_2.json' in err


def test_a_recipe_with_a_typo_is_refused(capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  recipe = tmp_path / 'mine.py'
  for wrong in ('c.optim.learning_rte = 3.0', "c.model.update({'widht': 3})", "c.input.batch_size = 'ten'"):
    recipe.write_text('from lab.systems.pose.config import get_config as shape\n\n\ndef get_config(variant=""):\n'
                      f'  c = shape()\n  {wrong}\n  return c\n')
    code, err = message(capsys, f'--config={recipe}', f'--workdir={tmp_path}/run')
    assert code == 2 and str(recipe) in err and err.count('\n') == 1, err


@pytest.mark.parametrize('arguments, status, said, absent', [
    (['--help'], 0, '--workdir', ('jax', 'numpy')),
    (['--workdir=x'], 2, '--config is missing', ('orbax',)),
    (['--config=configs/pose.py', '--workdir=x', '--config.model.backbon=vgg'], 2,
     'did you mean --config.model.backbone?', ('orbax',)),
    (['--config=configs/pose.py', '--workdir=x', '--config.input.batch_size=ten'], 2, 'expected int', ('orbax',)),
    (['--config=configs/pose.py', '--workdir=x', '--config.model.backbone=vgg'], 2, 'expected one of', ()),
    (['--config=configs/gpt.py', '--workdir=x', '--config.optim.name=adma'], 2, 'expected one of', ())])
def test_help_and_configuration_errors_take_no_tensorflow_and_no_device(arguments, status, said, absent):
  code = ('import sys; from lab import main; code = main.main(["lab", *sys.argv[1].split()]); '
          'loaded = {m.split(".")[0] for m in sys.modules} & {*sys.argv[2].split()}; assert not loaded, loaded; '
          'assert "jax" not in sys.modules or not sys.modules["jax"]._src.xla_bridge._backends; sys.exit(code)')
  heavy = ('tensorflow', 'tensorflow_datasets', 'clu', 'cv2', 'PIL', 'matplotlib', *absent)
  done = subprocess.run([sys.executable, '-c', code, ' '.join(arguments), ' '.join(heavy)], cwd=ROOT,
                        capture_output=True, text=True, timeout=300)
  assert done.returncode == status, done.stderr
  assert said in done.stdout + done.stderr


@pytest.mark.parametrize('error, code', [
    (ConfigError('x'), 2), (meshes.DistributedError('x'), 7), (meshes.Preempted('x'), 75), (MemoryError(), 6),
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating'), 6), (ValueError('x'), None)])
def test_exit_codes(error, code, capsys):
  assert main.exit_code(error) == code
  assert code != 6 or 'batch_size' in capsys.readouterr().err
