"""What a sweep asks for: names that parse back, grids in order, random points in bounds."""

import math
import os
import statistics

import pytest

from lab import points, sweep as sweeps
from lab.task import ConfigError
from tests.conftest import ROOT

TOY = 'config = "tests/toy.py"\nmetric = "error"\n'


def write(folder, content):
  """A sweep file in a folder."""
  path = folder / 'sweep.toml'
  path.write_text(content, encoding='utf-8')
  return str(path)


@pytest.mark.parametrize('value', [
    1e-05, 0.001, -2.5, 1e+20, 0.1 + 0.2, -0.0, 3, -1, 10**30, True, False, None, 'adamw', '', 'a,b=c/d%2F', '.', '..',
    'Zürich 北京', 'true', 'null', '3', ' 3', '1e-05', 'NaN', '"', '"x"', 'a\nb', '\ud800', '[1]', [], [0.5, 1],
    ['a', [True, '1']], {'low': 1}])
def test_names_parse_back(value):
  values = {'optim.learning_rate': value, 'a,b=%/ü': value, 'seed': 0}
  name = points.name(values)
  assert repr(points.parse(name)) == repr(values)      # which tells 1 from 1.0 and True
  assert name.isascii() and not set(name) & set('/\\ "*?[]\n')


def test_names_can_be_read():
  assert points.name({'optim.learning_rate': 0.001, 'optim.warmup_steps': 2, 'seed': 0}) == (
      'optim.learning_rate=0.001,optim.warmup_steps=2,seed=0')
  assert points.parse(points.name({})) == {}


def test_a_name_too_long_for_a_folder_is_refused():
  assert len(points.name({'k': 'x' * 198})) == 200
  with pytest.raises(ConfigError, match='longer than 200 bytes'):
    points.name({'k': 'x' * 199})


def test_a_grid_is_every_combination_in_order(tmp_path):
  sweep = points.read(write(tmp_path, TOY + 'workdir = "w"\nseeds = [3, 4]\n[values]\n"optim.decay" = [0.1, 0]\n'
                            '[values.optim]\nname = ["adamw", "sgd"]\n[fixed.input]\nthreads = 1\n'))
  assert sweep.points == [{'optim.decay': d, 'optim.name': n} for d in (0.1, 0) for n in ('adamw', 'sgd')]
  assert [r.name for r in sweep.runs()][:3] == ['optim.decay=0.1,optim.name=adamw,seed=3',
                                                'optim.decay=0.1,optim.name=adamw,seed=4',
                                                'optim.decay=0.1,optim.name=sgd,seed=3']
  assert len({r.folder for r in sweep.runs()}) == 8 and sweep.fixed == {'input.threads': 1}


RANDOM = TOY + '''workdir = "w"
kind = "random"
samples = 400
draw_seed = %d
[values]
"optim.learning_rate" = {low = 1e-5, high = 1e-1, scale = "log"}
"optim.clip" = {low = 0.5, high = 1.5}
"optim.warmup_steps" = {low = 0, high = 3}
"input.batch_size" = {low = 1, high = 64, scale = "log"}
"optim.name" = ["adamw", "sgd"]
'''


def test_random_points_are_reproducible_and_in_bounds(tmp_path):
  drawn = points.read(write(tmp_path, RANDOM % 0)).points
  assert drawn == points.read(write(tmp_path, RANDOM % 0)).points != points.read(write(tmp_path, RANDOM % 1)).points
  assert len({points.name(p) for p in drawn}) == 400
  rates, clips, warmups, sizes, names = zip(*(p.values() for p in drawn))
  assert all(1e-5 <= r <= 1e-1 and float(f'{r:.4g}') == r for r in rates)
  # log10 is uniform in (-5, -1): median -3, deviation 4 / sqrt(12) = 1.155, so 400 draws err by some 0.1
  assert abs(statistics.median(map(math.log10, rates)) + 3) < 0.4
  assert all(0.5 <= c <= 1.5 for c in clips) and abs(statistics.mean(clips) - 1) < 0.1
  assert set(warmups) == {0, 1, 2, 3} and all(type(w) is int for w in warmups)
  # log2 is uniform in (0, 6): half of the draws are at most 8
  assert all(type(s) is int and 1 <= s <= 64 for s in sizes) and 6 <= statistics.median(sizes) <= 11
  assert set(names) == {'adamw', 'sgd'}


def test_rounding_stays_in_bounds(tmp_path):
  sweep = points.read(write(tmp_path, TOY + 'workdir = "w"\nkind = "random"\nsamples = 1\n[values]\n'
                            'optim.clip = {low = 0.123456, high = 0.123457}\n'))
  # 4 digits make 0.1235 of every draw
  assert sweep.points == [{'optim.clip': 0.123457}]


LIST = TOY + 'workdir = "w"\nkind = "list"\nseeds = [0, 1]\n'


def test_listed_points_set_their_own_keys_in_order(tmp_path):
  sweep = points.read(write(tmp_path, LIST + '[fixed]\ntotal_steps = 3\n[[points]]\n"optim.name" = "lion"\n[[points]]\n'
                            'optim.name = "sgd"\noptim.clip = 0.5\n[[points]]\n[points.input]\nthreads = 1\n'))
  assert sweep.points == [{'optim.name': 'lion'}, {'optim.name': 'sgd', 'optim.clip': 0.5}, {'input.threads': 1}]
  assert [r.name for r in sweep.runs()][1:4] == ['optim.name=lion,seed=1', 'optim.name=sgd,optim.clip=0.5,seed=0',
                                                 'optim.name=sgd,optim.clip=0.5,seed=1']


@pytest.mark.parametrize('content, said', [
    ('', 'points is missing or empty'),
    ('points = []\n', 'points is missing or empty'),
    ('points = 3\n', 'points = 3: expected a list'),
    ('points = [3]\n', 'points, number 1: 3: expected a table'),
    ('[[points]]\n', 'points, number 1: {}: expected a table with at least one key'),
    ('[[points]]\nseed = 1\n', 'points, number 1: seed = 1: expected a key that is not in fixed (seeds sets the seed)'),
    ('[fixed]\noptim.clip = 1.0\n[[points]]\n"optim.clip" = 2.0\n', 'number 1: optim.clip = 2.0: expected a key that'),
    ('[[points]]\nx = 1979-05-27\n', 'points, number 1: x = datetime.date(1979, 5, 27): expected'),
    ('[[points]]\n"a.b" = 1\na.b = 2\n', 'points, number 1.a.b is there twice'),
    ('[[points]]\na = 1\nb = 2\n[[points]]\na = 1\n[[points]]\nb = 2\na = 1\n', 'number 3 is the same as number 1'),
    ('[values]\na = [1]\n[[points]]\na = 1\n', 'values is only for kind = "grid" or "random"'),
    ('samples = 2\n[[points]]\na = 1\n', 'samples is only for kind = "random"'),
])
def test_a_wrong_list_is_refused(tmp_path, content, said):
  with pytest.raises(ConfigError) as e:
    points.read(write(tmp_path, LIST + content))
  assert said in str(e.value)


def test_a_grid_takes_no_points(tmp_path):
  with pytest.raises(ConfigError, match='points is only for kind = "list"'):
    points.read(write(tmp_path, TOY + 'workdir = "w"\n[[points]]\na = 1\n'))


def test_the_table_of_a_list_has_every_key_once(tmp_path):
  content = LIST.replace('[0, 1]', '[0]') + ('[[points]]\noptim.name = "lion"\n'
                                             '[[points]]\noptim = {clip = 0.5, name = "a|b"}\n')
  sweep = points.read(write(tmp_path, content), str(tmp_path / 'sweep'))
  for run, error in zip(sweep.runs(), (2, 1)):
    os.makedirs(run.folder)
    sweeps._write(run, 'result.json', {'values': run.values, 'seed': run.seed, 'scores': {'error': error}})
  table, page = sweeps.table(sweep)
  assert table.splitlines() == ['optim.name,optim.clip,runs,failed,error_median,error_min,error_max',
                                'lion,,1,0,2,2,2', 'a|b,0.5,1,0,1,1,1']
  assert page.splitlines()[2:6] == ['| optim.name | optim.clip | error | min to max | seeds |', '|---|---|---|---|---|',
                                    '| lion |  | 2 | 2 to 2 | 1 |', '| a\\|b | 0.5 | 1 | 1 to 1 | 1 |']


def test_a_list_is_checked_like_any_sweep(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sweeps.signal, 'signal', lambda *a: None)      # main takes SIGTERM, and this process is pytest's
  content = TOY + 'kind = "list"\n[[points]]\n"optim.name" = "lion"\n[[points]]\n"optim.%s" = 0.5\n'
  assert sweeps.main(['sweep', write(tmp_path, content % 'clpi'), f'--workdir={tmp_path}/sweep', '--status']) == 0
  assert '2 pending of 2 runs' in capsys.readouterr().out
  assert sweeps.main(['sweep', write(tmp_path, content % 'clpi'), f'--workdir={tmp_path}/sweep']) == 2
  assert 'did you mean --config.optim.clip?' in capsys.readouterr().err
  sweeps.check(points.read(write(tmp_path, content % 'clip'), f'{tmp_path}/sweep'))


def test_a_point_may_name_the_variant_of_the_recipe(tmp_path):
  content = '[[points]]\nvariant = "coco"\nseed_ = 1\n[[points]]\nseed_ = 2\n'
  found = points.read(write(tmp_path, LIST.replace('tests/toy.py', 'configs/pose.py:smoke') + content))
  assert [found.recipe(r) for r in found.runs()] == ['configs/pose.py:coco'] * 2 + ['configs/pose.py:smoke'] * 2
  command = sweeps.command(found, found.runs()[0])
  assert '--config=configs/pose.py:coco' in command and not any('variant=coco' in a for a in command[5:])
