"""Every command of the README runs, at the tests' size."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from data_pipelines import prepare

from lab import main, plot, points, sweep
from tests.conftest import QUICK, ROOT

# absl remembers the flags of the last call
DEFAULTS = ('--mode=train', '--step=latest', '--input=', '--output=', '--nodistributed')
SWEEP = """config = "configs/pose.py:smoke"\nmetric = "-loss"\nkind = "grid"\nseeds = [0]\n
[fixed]\ntotal_steps = 2\neval_steps = 0\ninput.batch_size = 8\n[values]\n"optim.learning_rate" = [1e-3]\n"""
SMALL = ('--config.input.batch_size=8', '--config.total_steps=2', '--config.eval_steps=0')


def commands():
  with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f:
    blocks = re.findall(r'```(\w*)\n(.*?)```', f.read(), re.S)
  assert {language for language, _ in blocks} == {'bash'}
  return [line for _, block in blocks for line in block.splitlines() if line.strip()]


def users_files(folder):
  """What the README's $NAMES stand for."""
  clips = np.random.default_rng(0).integers(0, 256, (20, 3, 16, 16), np.uint8)
  np.save(folder / 'clip.npy', clips[:, 0])
  np.save(folder / 'sequences.npy', clips)
  (folder / 'texts').mkdir()
  for i in range(20):
    (folder / 'texts' / f'{i}.txt').write_text(f'The {i}th night began like that of the night before. ' * 9)
  return {'COCO': 'data_pipelines/samples/pose', 'MNIST': 'data_pipelines/samples/video',
          'CLIP': f'{folder}/clip.npy', 'SEQUENCES': f'{folder}/sequences.npy',
          'TEXTS': f'{folder}/texts'}


def lab(arguments, folder):
  """The program's arguments, with the smoke recipe, in a folder of the test's."""
  out = []
  for a in arguments:
    a = re.sub(r'^--config=configs/(\w+)\.py(:\w+)?$', r'--config=configs/\1.py:smoke', a)
    a = re.sub(r'^(--workdir=|--output=|--config\.init_from=|--config\.data\.dir=|'
               r'--config\.continue_from=|)(runs|data)/',
               rf'\g<1>{folder}/\2/', a)
    out.append('--nodistributed' if a == '--distributed' else a)
  mode = next((a.partition('=')[2] for a in out if a.startswith('--mode=')), 'train')
  more = {'train': SMALL, 'lr_find': ('--config.lr_find.steps=5', SMALL[0]), 'page': (), 'inspect': ()}
  clips = ('--config.data.digits=2', '--config.data.pool=1') if 'data/clips' in ' '.join(out) else ()
  if '--config.continue_from=' in ' '.join(out):
    more['train'] = (SMALL[0], '--config.total_steps=3', '--config.eval_steps=0',
                     '--config.optim.continuation_steps=1')
  return [*DEFAULTS, *out, *clips, *more.get(mode, ('--config.input.eval_batch_size=8',))]


@pytest.mark.timeout(2400)
def test_every_command_runs(tmp_path, monkeypatch, capfd):
  monkeypatch.chdir(ROOT)
  seen, own = [], users_files(tmp_path)
  for line in commands():
    filled = re.sub(r'\$(\w+)', lambda m: own[m[1]], re.sub(r'^(\w+=\S+ )+', '', line))
    name, *arguments = shlex.split(filled)
    if arguments[:1] == ['sweep']:
      sweep.check(points.read(arguments[1]))
      if 'sweep' not in os.listdir(tmp_path):        # one of them is enough
        (tmp_path / 'sweep.toml').write_text(SWEEP)
        assert sweep.main(['sweep', str(tmp_path / 'sweep.toml'), f'--workdir={tmp_path}/sweep']) == 0
        assert '| 0.001 |' in (tmp_path / 'sweep/table.md').read_text()
    elif arguments[:1] == ['plot'] and arguments[1].endswith('.toml'):
      folder = tmp_path / 'plots'
      assert plot.main(['plot', *arguments[1:], f'--root={tmp_path}/runs', f'--output={folder}', '--partial']) == 0
      assert len(os.listdir(folder)) >= 2
    elif arguments[:1] == ['plot']:
      runs = [re.sub(r'^(--output=|)runs/', rf'\g<1>{tmp_path}/runs/', a) for a in arguments[1:]]
      assert plot.main(['plot', *runs]) == 0
      assert (tmp_path / 'runs/curves.svg').exists() and (tmp_path / 'runs/curves.png').exists()
    elif name == 'launch/run.sh':
      assert main.main(['lab', *lab(arguments, tmp_path)]) == 0, line
    elif name == 'launch/local_cluster.sh':
      before, (_, *after) = arguments[:arguments.index('--') + 1], arguments[arguments.index('--') + 1:]
      subprocess.run([name, *before, sys.executable, '-m', 'lab.main', *lab(after, tmp_path)], check=True,
                     env={**os.environ, 'XLA_FLAGS': QUICK})
    elif line.startswith('python -m data_pipelines.prepare'):
      assert prepare.main([a.replace('data/', f'{tmp_path}/data/') if 'samples' not in a else a
                           for a in ['prepare', *arguments[2:]]]) == 0, line
    elif name == 'tensorboard':
      assert shutil.which('tensorboard', path=os.path.dirname(sys.executable))
    else:
      assert name == 'launch/test.sh'
      assert os.access(os.path.join(ROOT, name), os.X_OK)
    seen.append(name)
  assert len(seen) >= 10 and 'Done: 2 steps' in capfd.readouterr().err
  out = os.listdir(tmp_path / 'runs/pose/predictions')
  photographs = os.listdir(os.path.join(ROOT, 'data_pipelines/samples/pose/val'))
  assert sorted(out) == sorted(['predictions.jsonl', *(f'{name}.png' for name in photographs)])


def test_scripts_are_valid_and_quote_their_arguments():
  for script in ('launch/run.sh', 'launch/test.sh', 'launch/environment.sh', '.ci/run', 'launch/local_cluster.sh',
                 'launch/tpu_vm.sh', 'launch/tpu_vm_worker.sh', 'launch/tpu_vm_babysit.sh',
                 'launch/notice.sh'):
    subprocess.run(['bash', '-n', os.path.join(ROOT, script)], check=True)
    with open(os.path.join(ROOT, script), encoding='utf-8') as f:
      assert '$@' not in f.read().replace('"$@"', '')
