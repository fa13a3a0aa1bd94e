"""References to checkpoints: how they are read, which step each means, and what is told where there is none."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import artifact, graft, main, mesh as meshes, train
from lab.artifact import ArtifactRef
from lab.checkpoint import CheckpointError, Checkpoints
from lab.task import ConfigError
from tests import toy
from tests.conftest import ROOT
from tests.test_checkpoint import make_mesh, state_of
from tests.test_main import DEFAULTS

SCORES = {10: 5.0, 20: 1.0, 30: 3.0, 40: 2.0}      # the error at each step; less is better, so 20, 40, 30, 10


@pytest.fixture(scope='module')
def root(tmp_path_factory, toy_data):
  """Runs: `few` keeps two and the best, `all` everything, `bare` has no metric, coco/pose lies in a project.

  Every float of a step's weights has grown by the step.
  """
  folder = tmp_path_factory.mktemp('runs')
  config = toy.get_config()
  config.data.dir, config.optim.ema = toy_data, 0.0
  state, _ = state_of(config, make_mesh('1'))
  for name, keep, best in (('few', 2, '-error'), ('all', -1, '-error'), ('bare', 2, '')):
    config.checkpoint.update({'keep': keep, 'best': best})
    store = Checkpoints(str(folder / name), config)
    for step, error in SCORES.items():
      grown = jax.tree.map(lambda x, by=step: x + np.asarray(by, x.dtype), state.params)
      store.save(step, state._replace(step=jnp.int32(step), params=grown), {'error': error})
    store.settle()
    store.close()
  shutil.copytree(folder / 'bare', folder / 'coco' / 'pose')
  (folder / 'empty' / 'checkpoints').mkdir(parents=True)
  return folder


def found(text, root):
  """(run, step) that a reference means."""
  folder, step = artifact.find(artifact.parse(text), str(root), 'init_from')
  return os.path.relpath(folder, root), int(step)


@pytest.mark.parametrize('text, parts', [
    ('pose/best', ('', 'pose', 'best', '')),
    ('pose/backup', ('', 'pose', 'backup', '')),
    ('pose/best/best', ('', 'pose', 'best', 'best')),             # the alias, not a run `best` of a project
    ('pose/best/best-12', ('', 'pose', 'best', 'best-12')),
    ('pose/backup/latest', ('', 'pose', 'backup', 'latest')),
    ('pose/backup/step-0001500', ('', 'pose', 'backup', 'step-0001500')),
    ('pose/backup/1500', ('', 'pose', 'backup', 'step-0001500')),
    ('pose/backup/step-12345678', ('', 'pose', 'backup', 'step-12345678')),
    ('coco/pose/best', ('coco', 'pose', 'best', '')),             # `pose` is no kind, so `best` is no alias
    ('coco/best/backup', ('coco', 'best', 'backup', '')),         # `backup` is no alias, so `best` is a run
    ('best/best/best', ('', 'best', 'best', 'best')),
    ('coco/pose/best/best-2', ('coco', 'pose', 'best', 'best-2')),
    ('coco/1500/backup/0', ('coco', '1500', 'backup', 'step-0000000')),
])
def test_what_is_a_reference(text, parts):
  assert artifact.parse(text) == ArtifactRef(*parts)
  assert artifact.parse(str(ArtifactRef(*parts))) == ArtifactRef(*parts)


@pytest.mark.parametrize('text', [
    '', 'pose', 'best', 'runs/pose', 'pose/bset', 'pose/latest', 'pose/best/newest', 'pose/best/best-0', 'pose/best/-1',
    'pose/best/step-', 'pose/best/1.5', 'pose/best/٣', 'a/b/c/best', 'a/b/c/best/best', 'coco/pose/best/newest',
    '/pose/best', './pose/best', '../pose/best', 'pose/best/', 'pose//best', 'gs://pose/best', 'pose:best',
    'pose/best:5'])
def test_what_is_a_plain_path(text):
  assert artifact.parse(text) is None


@pytest.mark.parametrize('text, want', [
    # 'few' has its newest two, 30 and 40, and 20, which scored best
    ('few/best/best', 20), ('few/best/best-1', 20), ('few/best/latest', 20), ('few/best/20', 20),
    ('few/backup/latest', 40), ('few/backup/step-0000030', 30), ('few/backup/step-30', 30),
    ('few/backup/best', 40), ('few/backup/best-2', 30),
    ('all/best/best', 20), ('all/best/best-2', 40), ('all/best/best-3', 30), ('all/best/best-4', 10),
    ('all/best/latest', 40), ('all/backup/10', 10), ('bare/backup/latest', 40), ('coco/pose/backup/latest', 40)])
def test_what_each_means(root, text, want):
  assert found(text, root) == (text.rsplit('/', 2)[0], want)


def test_a_real_run_by_its_own_metric(root, toy_config, tmp_path):
  toy_config.checkpoint.keep = -1
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'first'))
  store = Checkpoints(str(tmp_path / 'first'))
  errors = {step: store.meta(step)['scores']['error'] for step in (5, 10, 15, 20)}
  order = sorted(errors, key=errors.get)
  assert [found(f'first/best/best-{i}', tmp_path)[1] for i in (1, 2, 3, 4)] == order
  assert found('first/backup/latest', tmp_path)[1] == 20
  toy_config.continue_from, toy_config.runs_root, toy_config.total_steps = 'first/backup/15', str(tmp_path), 16
  toy_config.optim.continuation_steps = 1
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'second'))
  assert Checkpoints(str(tmp_path / 'second')).steps() == [16]


def weights(root, source):
  """The bias that graft takes from a source: 0 in the beginning, so the number of the step."""
  got = graft.graft({'dense': {'bias': jnp.zeros(8)}}, source, root=str(root))['dense']['bias']
  assert np.ptp(got) == 0
  return float(got[0])


def test_every_reader_of_runs_takes_them(root, caplog):
  caplog.set_level('INFO')
  assert weights(root, 'few/best/best') == 20
  assert f'init_from = few/best/best: step 20 of {root}/few' in caplog.text
  tree = {'part': {'dense': {'bias': jnp.zeros(8)}}}
  got = graft.fill(tree, (('part', 'all/best/best-2'),), root=str(root))
  np.testing.assert_array_equal(got['part']['dense']['bias'], np.full(8, 40.0))
  with pytest.raises(ConfigError, match='^init_parts = few/best: which checkpoint'):
    graft.fill(tree, (('part', 'few/best'),), root=str(root))


def test_a_folder_of_that_name_comes_first(root, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  shutil.copytree(root / 'all', tmp_path / 'few' / 'best')
  assert weights(root, 'few/best') == 40           # of the path, its latest
  assert weights(root, 'few/best:best') == 20
  assert weights(root, 'few/best:10') == 10
  assert weights(root, 'few/backup/30') == 30      # no such folder


# what is not there

def test_without_an_alias_all_there_is_is_listed(root):
  with pytest.raises(ConfigError) as e:
    found('few/best', root)
  head, *rows, last = str(e.value).splitlines()
  assert e.value.exit_code == 2
  assert head == f'init_from = few/best: which checkpoint of {root}/few?'
  assert last == 'choose one by an alias, such as init_from = few/best/best'
  assert [row.split() for row in rows[:1]] == [['kind', 'aliases', 'step', 'error', 'saved', 'size']]
  columns = [[c.strip() for c in row.replace(', ', ',').split()] for row in rows[1:]]
  assert [c[:4] for c in columns] == [
      ['best', 'best,best-1,latest,step-0000020', '20', '1'],
      ['backup', 'best,best-1,latest,step-0000040', '40', '2'],
      ['backup', 'best-2,step-0000030', '30', '3']]
  for *_, day, clock, size, unit in columns:
    assert (len(day), len(clock), unit) == (10, 8, 'MB') and 0 < float(size) < 5
  with pytest.raises(ConfigError, match='such as init_from = few/backup/latest$'):
    found('few/backup', root)
  with pytest.raises(ConfigError) as e:                                     # no metric: no best, so another kind
    found('coco/pose/best', root)
  assert str(e.value).endswith('such as init_from = coco/pose/backup/latest')
  assert '  backup  latest, step-0000040  40    -  ' in str(e.value) and ' best ' not in str(e.value)


@pytest.mark.parametrize('text, said', [
    ('fwe/best/best', '{root}/fwe is no run; nearest: few/best/best$'),
    ('coco/few/backup/30', '{root}/coco/few is no run; nearest: few/backup/step-0000030'),
    ('pose/best', '{root}/pose is no run; nearest: coco/pose/best$'),
    ('coco/best', '{root}/coco is no run; nearest: coco/pose/best$'),       # a project
    ('empty/best', '{root}/empty has no checkpoint; nearest: '),
    ('few/best/best-2', 'few has no best/best-2; it keeps 1 with a score: best/best-1$'),
    ('all/best/best-9', 'all has no best/best-9; it keeps 4 with a score: best/best-1 to best/best-4$'),
    ('bare/best/best', 'bare has no best/best; none has a score by checkpoint.best; there are backup/latest, '),
    ('few/best/30', 'few has no best/step-0000030; nearest: backup/step-0000030, best/step-0000020, backup/step'),
    ('few/backup/99', 'few has no backup/step-0000099; nearest: backup/step-0000040, backup/step-0000030, best/step-'),
])
def test_what_is_missing_is_told_with_what_is_near(root, text, said):
  with pytest.raises(CheckpointError, match=said.format(root=root)) as e:
    found(text, root)
  assert e.value.exit_code == 5 and str(e.value).startswith('init_from = ')


def test_a_wrong_root_is_told(root):
  with pytest.raises(CheckpointError, match=f'config.runs_root = {root}/none is no folder'):
    found('few/best/best', f'{root}/none')


def test_what_is_nearly_a_reference_is_told_the_grammar(root):
  with pytest.raises(CheckpointError, match=r'few/best/newest: no such folder; a run below .* is named \[project'):
    graft.graft({}, 'few/best/newest', root=str(root))
  with pytest.raises(CheckpointError, match='few/newest: no such folder$'):
    graft.graft({}, 'few/newest', root=str(root))


def test_exit_codes(root, capsys, toy_data, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(meshes, 'listen', lambda alone: None)
  for source, code, said in (('few/best', 2, 'choose one by an alias'), ('few/best/best-2', 5, 'it keeps 1'),
                             ('few/best/best', 0, 'Done: 1 steps')):
    small = ('--config.total_steps=1', '--config.optim.warmup_steps=0', '--config.eval_steps=0')
    got = main.main(['lab', '--config=tests/toy.py', f'--config.data.dir={toy_data}', f'--workdir={tmp_path}/next',
                     *DEFAULTS, f'--config.runs_root={root}', f'--config.init_from={source}', *small])
    err = capsys.readouterr().err
    assert got == code and said in err, err
