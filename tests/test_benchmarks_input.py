"""The benchmark of the input: it measures what training iterates, and its peer does the same work."""

import importlib.util
import json

import numpy as np
import pytest
from benchmarks import input as program, input_peer
from data_pipelines import coco, pipeline, warp

from lab import config as configs, train
from lab.task import load
from tests.conftest import ROOT

MOVED = ['--config.augment.on=True', '--config.image.size=384']


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
  monkeypatch.chdir(ROOT)


@pytest.mark.parametrize('recipe', ['configs/pose.py:smoke', 'configs/gpt.py:smoke'])
def test_a_recipe_is_measured(recipe, capsys):
  assert program.main(['input', f'--config={recipe}', '--seconds=0.3', '--config.input.batch_size=3']) == 0
  out = capsys.readouterr().out.splitlines()
  found = json.loads(out[-1])
  assert found['config'] == recipe and found['batch_size'] == 3 and 'peer' not in found
  assert found['items_per_s'] > 0 and found['items_per_s_per_core'] > 0 and found['cores_used'] > 0
  assert list(found['stages']) == list(program.STAGES) and all(ms >= 0 for ms in found['stages'].values())
  assert all(any(line.strip().startswith(name) for line in out) for name in ('lab', *program.STAGES))


@pytest.mark.parametrize('arguments, said', [
    ([], '--config is missing'), (['--config=configs/pose.py:smoke', '--config.imge.size=3'], 'did you mean'),
    (['--config=configs/pose.py:smoke', 'stray'], "unknown argument 'stray'"),
    (['--config=configs/gpt.py:smoke', '--peer'], 'there is one for pose'),
    (['--config=configs/pose.py:smoke', '--peer'], 'with augmentation alone'),
    (['--config=configs/pose.py:smoke', '--peer', *MOVED], '--peer needs PyTorch')])
def test_what_is_wrong_is_one_line_and_code_2(arguments, said, monkeypatch, capsys):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  monkeypatch.setattr(program, '_window', lambda *a: pytest.fail('it was measured'))
  assert program.main(['input', *arguments]) == 2
  err = capsys.readouterr().err
  assert said in err and err.startswith('error: ') and err.count('\n') == 1


def test_every_array_of_a_stage_is_needed():
  """None is left out as unused: a decode or augment that fails does so under the probe as well."""
  tf = pipeline.tensorflow()
  broken = lambda: tf.numpy_function(lambda: np.float32(1 / np.zeros(0)[0]), [], tf.float32)
  data = tf.data.Dataset.range(1).map(lambda n: program._touch({'n': n, 'text': tf.constant('ab'), 'bad': broken()}))
  with pytest.raises(tf.errors.OpError):
    list(data)
  whole = tf.data.Dataset.range(4, 5).map(lambda n: program._touch({'n': n, 'text': tf.constant('ab')}))
  assert float(next(iter(whole))['touched']) == 6


@pytest.fixture(scope='module')
def both(tmp_path_factory):
  """The recipe's decoded records and the peer's data set of the same photographs, one drawn as the other."""
  config = configs.read(f'{ROOT}/configs/pose.py:smoke')
  configs.override(config, MOVED)
  source = load(config).source('train')
  tf = pipeline.tensorflow()
  records = [*tf.data.TFRecordDataset(list(source.read))]
  plain = ({k: v.numpy() for k, v in coco.parse(r).items()} for r in records)
  photographs = input_peer.Photographs(input_peer.files(plain, str(tmp_path_factory.mktemp('peer'))),
                                       config.augment.to_dict(), config.image.size, 4, config.data.people)
  return config, source, records, photographs


def test_the_peer_does_the_same_work(both, monkeypatch):
  config, source, records, photographs = both
  for i in range(0, len(records), 3):
    seed = np.array([0, i], np.int64)
    ours = {k: v.numpy() for k, v in source.augment(source.decode(records[i]), seed).items()}
    monkeypatch.setattr(input_peer.Photographs, 'draw', lambda self: (2 * warp.chance(seed).numpy() - 1).tolist())
    theirs = photographs[i]
    assert set(theirs) - {'mask', 'record'} == set(ours)
    assert all(theirs[k].shape == ours[k].shape and theirs[k].dtype == ours[k].dtype for k in ours)
    for k in ('person', 'truth', 'boxes', 'areas', 'crowd', 'num', 'size', 'image_id'):
      np.testing.assert_array_equal(theirs[k], ours[k], k)
    # the lab's sizes are rounded to whole pixels, so the two maps differ by a pixel at most
    np.testing.assert_allclose(theirs['matrix'] @ [192, 192, 1], ours['matrix'] @ [192, 192, 1], atol=2)
    seen = (theirs['keypoints'][..., 2] > 0) & (ours['keypoints'][..., 2] > 0)
    np.testing.assert_allclose(theirs['keypoints'][seen], ours['keypoints'][seen], atol=2)
    assert (theirs['ignore'] != ours['ignore']).mean() < 0.02
    assert np.abs(theirs['image'].astype(int) - ours['image']).mean() < 12
    assert np.abs(theirs['image'].mean((0, 1)) - ours['image'].mean((0, 1))).max() < 2


def test_training_iterates_what_is_measured(both):
  config, source, _, _ = both
  found = next(iter(train.feed(source, config, range(config.input.batch_size))))
  expected = pipeline.Batches(source, config.input, config.input.batch_size, range(config.input.batch_size), train=True,
                              seed=config.seed)
  assert all((found[k] == v).all() for k, v in next(iter(expected)).items())


def test_the_peer_is_measured(capsys):
  pytest.importorskip('torch', reason='PyTorch, which the peer needs, is no dependency of the lab')
  arguments = ['--config=configs/pose.py:smoke', '--config.augment.on=True', '--seconds=0.3', '--peer']
  assert program.main(['input', *arguments]) == 0
  found = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert found['peer']['items_per_s'] > 0 and found['peer']['cores_used'] > 0 and found['ratio_per_core'] > 0
