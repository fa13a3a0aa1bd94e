"""The range test finds the steepest slope, applies nothing, and draws it; the profiler and the raw weights' row."""

import json
import os

import numpy as np
import pytest

from lab import lr_find, main, train
from tests import toy
from tests.conftest import ROOT


def test_the_steepest_point_of_a_known_curve():
  """loss = 1 - 0.9 s(log10 rate + 3) falls fastest at 1e-3 for a sigmoid s; the average lags by some points."""
  rates = np.logspace(-8, 0, 801)
  losses = 1 - 0.9 / (1 + np.exp(-4 * (np.log10(rates) + 3)))
  found = lr_find.analyse(rates.tolist(), losses.tolist())
  # a moving average with decay .9 lags by .9 / .1 = 9 points, each of 1/100 decade
  assert np.log10(found['suggested']) == pytest.approx(-3 + 0.09, abs=0.02)
  assert found['lowest'] == rates[-1]
  np.testing.assert_allclose(found['smoothed'][:2], [losses[0], (0.09 * losses[0] + 0.1 * losses[1]) / 0.19])
  assert lr_find.analyse(rates.tolist(), np.linspace(1, 2, 801).tolist())['suggested'] is None
  assert lr_find.analyse([1e-3], [1.0])['suggested'] is None


def test_a_range_test_writes_a_report_and_a_picture_and_nothing_else(toy_config, tmp_path):
  before = toy_config.to_json()
  report = lr_find.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  assert toy_config.to_json() == before
  assert sorted(os.listdir(tmp_path)) == ['lr_find']
  assert sorted(os.listdir(tmp_path / 'lr_find')) == ['loss.png', 'loss.svg', 'report.json']
  told = json.loads((tmp_path / 'lr_find/report.json').read_text())
  assert told == json.loads(json.dumps(report)) and told['configured'] == 1e-3
  n = len(told['rates'])
  np.testing.assert_allclose(told['rates'], 1e-8 * (1e8 ** (np.arange(n) / 99)), rtol=1e-4)
  assert n >= 50 and 1e-8 < told['suggested'] < 1


def test_it_is_a_mode_of_the_program_and_ends_where_the_loss_explodes(toy_data, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('TOY_DATA', toy_data)
  monkeypatch.chdir(ROOT)
  code = main.main(['lab', '--config=tests/toy.py', f'--workdir={tmp_path}', '--mode=lr_find', '--step=latest',
                    '--input=', '--output=', '--nodistributed', '--config.lr_find.high=1000.0',
                    '--config.optim.name=sgd', '--config.optim.clip=0'])
  assert code == 0
  told = json.loads((tmp_path / 'lr_find/report.json').read_text())
  assert len(told['rates']) < 100 and '--config.optim.learning_rate=' in capsys.readouterr().err
  assert not (tmp_path / 'checkpoints').exists()


def test_raw_weights_are_evaluated_beside_the_averaged_ones(toy_config, tmp_path):
  toy_config.optim.learning_rate = 0.05
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'both'))
  rows = [json.loads(line) for line in (tmp_path / 'both/metrics.jsonl').read_text().splitlines()]
  pairs = [[r for r in rows if r['split'] == split] for split in ('eval', 'eval_raw')]
  assert [r['step'] for r in pairs[0]] == [r['step'] for r in pairs[1]] == [5, 10, 15, 20]
  assert all(a['error'] > b['error'] for a, b in zip(*pairs))         # the average lags behind a loss that falls
  toy_config.optim.ema = 0.0
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'raw'))
  alone = [json.loads(line) for line in (tmp_path / 'raw/metrics.jsonl').read_text().splitlines()]
  assert {r['split'] for r in alone} == {'train', 'eval'}
  assert [r['error'] for r in alone if r['split'] == 'eval'] == [r['error'] for r in pairs[1]]


def test_a_profile_is_written_on_a_flag_and_a_failing_one_ends_nothing(toy_config, tmp_path, caplog):
  toy_config.profile.start, toy_config.profile.steps, toy_config.total_steps = 2, 2, 6
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'a'))
  found = [name for _, _, names in os.walk(tmp_path / 'a/profile') for name in names]
  assert any(n.endswith('.xplane.pb') for n in found)
  (tmp_path / 'b').mkdir()
  (tmp_path / 'b/profile').write_text('in the way')
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path / 'b'))
  assert 'profile: ' in caplog.text
  plain = tmp_path / 'c'
  toy_config.profile.steps = 0
  train.run(toy.make_task(toy_config), toy_config, str(plain))
  assert not (plain / 'profile').exists()
  assert (plain / 'metrics.jsonl').read_text() == (tmp_path / 'a/metrics.jsonl').read_text()


def test_utilisation_is_logged_where_the_peak_is_known(toy_config, tmp_path, capsys):
  toy_config.peak_tflops, toy_config.total_steps = 1e-6, 3
  train.run(toy.make_task(toy_config), toy_config, str(tmp_path))
  rows = [json.loads(line) for line in (tmp_path / 'timings.jsonl').read_text().splitlines()]
  # 8 examples x (4 x 8 matrix) x 2 x 3 model FLOPs, over 8 devices of 1e6 FLOP/s each
  for row in rows:
    assert row['mfu'] == pytest.approx(8 * 32 * 6 / 8e6 / 8 * row['items_per_s'], rel=1e-6)
  assert 'MFU' in capsys.readouterr().err
