"""What a sweep asks for: names that parse back, grids in order, random points in bounds."""

import math
import statistics

import pytest

from lab import points
from lab.task import ConfigError

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
