"""Curves: what is drawn, what it is called, what is written."""

import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lab import plot
from lab.task import ConfigError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def write_run(folder, losses, timings=(), best='-loss', **more):
  """A workdir: a train row of each loss at steps 10, 20, ..., one eval row at the end."""
  os.makedirs(folder)
  rows = [{'step': 10 * i, 'split': 'train', 'loss': loss, 'learning_rate': 1e-3} for i, loss in enumerate(losses, 1)]
  rows.append({'step': 10 * len(losses), 'split': 'eval', 'loss': 0.5, 'AP': 0.25, 'offset_px': 3.0, **more})
  for name, content in (('metrics.jsonl', rows), ('timings.jsonl', timings)):
    with open(os.path.join(folder, name), 'w', encoding='utf-8') as f:
      f.writelines(json.dumps(row) + '\n' for row in content)
  with open(os.path.join(folder, 'config.json'), 'w', encoding='utf-8') as f:
    json.dump({'checkpoint': {'best': best}}, f)
  return str(folder)


@pytest.fixture
def runs(tmp_path):
  """Two runs in one folder."""
  return {'a': write_run(tmp_path / 'runs' / 'a', [4.0, 2.0, 1.0]), 'b': write_run(tmp_path / 'runs' / 'b', [3.0, 2.5])}


def drawn(ax):
  """The curves of an axes: those over more than the two ends of a dashed line."""
  return [line for line in ax.lines if line.get_linestyle() != '--']


def texts(svg):
  """Every text of an SVG document, which has to be XML."""
  return [''.join(e.itertext()) for e in ElementTree.fromstring(svg).iter('{http://www.w3.org/2000/svg}text')]


def test_smoothing_is_a_corrected_moving_average():
  # decay 0.5 on 4, 2, (gap), 1. The uncorrected average starts at 0: 2, then 0.5*2+0.5*2 = 2, then 0.5*2+0.5*1 = 1.5;
  # its weights sum to 0.5, 0.75, 0.875. So 2/0.5 = 4, 2/0.75 = 8/3, a gap, 1.5/0.875 = 12/7.
  np.testing.assert_allclose(plot.smoothed(np.array([4, 2, math.nan, 1]), 0.5), [4, 8 / 3, math.nan, 12 / 7])
  np.testing.assert_array_equal(plot.smoothed(np.array([4.0, 2.0]), 0.0), [4, 2])


def test_the_raw_curve_stays_faintly_behind(runs):
  ax, = plot.curves(runs, ['train/loss'], smooth=0.5).axes
  raw, smooth = ax.lines[:2]
  assert raw.get_alpha() < 0.5 and raw.get_color() == smooth.get_color()
  np.testing.assert_array_equal(raw.get_ydata(), [4, 2, 1])
  np.testing.assert_allclose(smooth.get_ydata(), [4, 8 / 3, 12 / 7])       # as above, without the gap


def test_hours_add_up_over_restarts(tmp_path):
  seconds = {10: 3600, 20: 7200, 30: 1800, 40: 3600, 50: 900}            # started again before 30 and before 50
  timings = [{'step': s, 'items_per_s': 1.0, 'seconds': t} for s, t in seconds.items()]
  run = write_run(tmp_path / 'run', [1.0] * 6, timings)
  table = plot.rows(run)
  assert plot.hours([r for r in table if r['split'] == 'speed']) == {10: 1, 20: 2, 30: 2.5, 40: 3, 50: 3.25}
  found = plot.series(table, 'hours')
  # step 60 was never timed: it goes on at the mean pace of 3.25 hours in 50 steps
  np.testing.assert_allclose(found['train/loss'][0], [1, 2, 2.5, 3, 3.25, 3.9])
  np.testing.assert_allclose(found['eval/loss'][0], [3.9])


def test_examples_are_counted_where_the_rows_tell(tmp_path):
  run = write_run(tmp_path / 'run', [1.0, 1.0], examples_seen=640)
  np.testing.assert_allclose(plot.series(plot.rows(run), 'examples_seen')['train/loss'][0], [320, 640])
  bare = write_run(tmp_path / 'bare', [1.0])
  with pytest.raises(ConfigError, match='no examples_seen'):
    plot.curves({'bare': bare}, x='examples_seen')


def test_null_leaves_a_gap_and_a_lone_point_a_dot(tmp_path):
  run = write_run(tmp_path / 'run', [*[1.0] * 32, None, 2.0, None, 1.0, 1.0])
  line, = plot.curves({'run': run}, ['train/loss']).axes[0].lines
  assert np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [32, 34]
  assert line.get_markevery() == [33]


def test_every_metric_has_axes_and_every_run_a_colour(runs):
  figure = plot.curves(runs, ['loss', 'eval/A*'])
  assert [ax.get_title(loc='left') for ax in figure.axes] == ['train/loss', 'eval/loss', 'eval/AP']
  colours = [[line.get_color() for line in drawn(ax)] for ax in figure.axes]
  assert colours == [list(plot.COLOURS[:2])] * 3
  assert [t.get_text() for t in figure.legends[0].get_texts()] == ['a', 'b'] and len(figure.legends) == 1
  np.testing.assert_array_equal(drawn(figure.axes[0])[0].get_xdata(), [10, 20, 30])


def test_the_usual_metrics(tmp_path):
  def titles(**more):
    run = write_run(tmp_path / str(len(os.listdir(tmp_path))), [1.0], **more)
    return [ax.get_title(loc='left') for ax in plot.curves({'run': run}).axes]
  assert titles() == ['train/loss', 'eval/loss']
  assert titles(best='AP') == titles(best='-AP') == ['train/loss', 'eval/loss', 'eval/AP']


@pytest.mark.parametrize('name, label', [
    ('loss', 'loss'), ('offset_px', 'offset (px)'), ('error_px2', 'error (px²)'), ('step_ms', 'step (ms)'),
    ('data_wait_share', 'data wait (share)'), ('frame_nats', 'frame (nats)'), ('code_bits', 'code (bits)'),
    ('turn_deg', 'turn (deg)'), ('wait_s', 'wait (s)'), ('items_per_s', 'speed (items/s)'), ('gradient_norm',
    'gradient norm'), ('learning_rate', 'learning rate (per update)'), ('mfu', 'MFU (share of peak)'),
    ('step', 'step (updates)'), ('hours', 'time (hours)'), ('examples_seen', 'examples seen')])
def test_axes_are_called_with_their_units(name, label):
  assert plot.axis(name) == label


def test_both_files_are_written_with_every_name(runs, tmp_path):
  figure = plot.curves(runs, ['offset_px', 'AP'], baselines=[('AP', 0.3, 'paper <1>')])
  svg, png = plot.save(figure, str(tmp_path / 'new' / 'out'))
  assert sorted(os.listdir(tmp_path / 'new')) == ['out.png', 'out.svg']
  with open(png, 'rb') as f:
    assert f.read(8) == b'\x89PNG\r\n\x1a\n'
  with open(svg, encoding='utf-8') as f:
    document = f.read()
  assert {'offset (px)', 'AP', 'step (updates)', 'a', 'b', 'paper <1>', 'eval/offset_px'} <= set(texts(document))
  assert 'stroke-dasharray' in document
  dashed = [[line.get_ydata() for line in ax.lines if line.get_linestyle() == '--'] for ax in figure.axes]
  assert dashed == [[], [[0.3, 0.3]]]


def test_equal_figures_are_equal_bytes(runs, tmp_path):
  first, second = (plot.save(plot.curves(runs, smooth=0.5), str(tmp_path / n))[0] for n in ('one', 'two'))
  with open(first, 'rb') as f, open(second, 'rb') as g:
    assert f.read() == g.read()


def test_logarithmic_axes_leave_out_what_has_no_logarithm(tmp_path):
  run = write_run(tmp_path / 'run', [10.0, 0.0, 1.0], flat=0.0)
  figure = plot.curves({'run': run}, ['train/loss', 'eval/flat'], log=True)
  assert [ax.get_yscale() for ax in figure.axes] == ['log', 'linear']
  plot.svg(figure)                                                       # draws it: a warning would be an error


def test_names_are_data(tmp_path):
  run = write_run(tmp_path / 'run', [1.0], **{'a$\\frac{$_b': 1.0})
  figure = plot.curves({'_<b>$x^2$\x07': run}, ['eval/a$*'])
  assert {'_<b>$x^2$?', 'a$\\frac{$ b'} <= set(texts(plot.svg(figure)))


def test_inline_pictures_share_no_identifier(runs):
  one, two = plot.svg(plot.curves(runs, ['loss'])), plot.svg(plot.curves(runs, ['AP']))
  assert one.startswith('<svg') and '<metadata' not in one
  ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (one, two)]
  assert ids[0] and not ids[0] & ids[1]
  for svg, own in zip((one, two), ids):
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) == own     # every reference leads somewhere


def test_lines_with_marks():
  figure = plot.lines({'loss': ([1e-4, 1e-3, 1e-2], [3.0, 1.0, 2.0])}, x_label='rate', y_label='loss', title='Range',
                      log_x=True, marks={'steepest': 1e-3})
  ax, = figure.axes
  assert ax.get_xscale() == 'log' and ax.get_xlabel() == 'rate' and ax.get_ylabel() == 'loss'
  assert [line.get_xdata() for line in ax.lines if line.get_linestyle() == '--'] == [[1e-3, 1e-3]]
  assert {'steepest', 'Range', 'loss'} <= set(texts(plot.svg(figure)))


def test_labels_are_the_shortest_that_differ(tmp_path):
  def short(*paths):
    return list(plot.labels([str(tmp_path / p) for p in paths]))
  assert short('runs/pose') == ['pose']
  assert short('runs/pose', 'runs/video') == ['pose', 'video']
  assert short('one/pose', 'two/pose', 'two/video') == ['one/pose', 'two/pose', 'video']
  assert short('runs/pose', 'runs/../runs/pose') == ['pose']
  assert plot.labels([str(tmp_path / 'pose')]) == {'pose': str(tmp_path / 'pose')}


def test_a_folder_stands_for_its_runs(runs, tmp_path):
  (tmp_path / 'runs' / 'notes').mkdir()
  assert plot.workdirs([str(tmp_path / 'runs')]) == list(runs.values())
  assert plot.workdirs([runs['b']]) == [runs['b']]


def failure(capsys, *arguments):
  """The one line that main says before it returns 2."""
  assert plot.main(['plot', *arguments]) == 2
  said = capsys.readouterr()
  assert said.err.startswith('error: ') and said.err.count('\n') == 1 and not said.out
  return said.err


def test_what_is_not_there_is_told(runs, tmp_path, capsys):
  said = failure(capsys, runs['a'], '--metrics=eval/los')
  assert "no metric 'eval/los'; did you mean eval/loss?" in said and 'train/learning_rate' in said
  assert 'did you mean' in failure(capsys, runs['a'][:-1] + 'aa') and not os.path.exists('curves.svg')
  (tmp_path / 'empty').mkdir()
  assert 'no run is there' in failure(capsys, str(tmp_path / 'empty'))
  (tmp_path / 'empty' / 'metrics.jsonl').touch()
  assert 'no numbers yet' in failure(capsys, str(tmp_path / 'empty'))
  (tmp_path / 'empty' / 'metrics.jsonl').write_text('{"step": 1}\n')
  assert 'is broken' in failure(capsys, str(tmp_path / 'empty'))
  assert '--x=hours' in failure(capsys, runs['a'], '--x=hours')
  assert 'invalid choice' in failure(capsys, runs['a'], '--x=days')
  assert '[0, 1)' in failure(capsys, runs['a'], '--smooth=1')
  assert 'METRIC:VALUE' in failure(capsys, runs['a'], '--baseline=AP')
  assert 'no metric' in failure(capsys, runs['a'], '--metrics=train/loss', '--baseline=AP:0.5')


def test_the_program_needs_no_display(runs, tmp_path):
  env = {k: v for k, v in os.environ.items() if k not in ('DISPLAY', 'WAYLAND_DISPLAY')}
  code = ('import sys; from lab import plot; code = plot.main(sys.argv); '
          'assert "matplotlib.figure" in sys.modules and "matplotlib.pyplot" not in sys.modules; sys.exit(code)')
  done = subprocess.run([sys.executable, '-c', code, str(tmp_path / 'runs'), '--metrics=eval/*', '--smooth=0.6',
                         '--log', '--baseline=AP:0.5:paper', f'--output={tmp_path / "out.svg"}'], cwd=ROOT,
                        env={**env, 'MPLBACKEND': 'tkagg'}, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout == f'written: {tmp_path / "out.svg"} and {tmp_path / "out.png"}\n'
  assert os.path.getsize(tmp_path / 'out.png') > 5000
