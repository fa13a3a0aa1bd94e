"""Pictures by a plan: which runs a panel shows, what its curves are called, and what is told of a wrong plan."""

import json
import os

import numpy as np
import pytest

from lab import plot, plot_plan
from tests.test_plot import drawn, failure, texts, write_run

PLAN = '''
root = "%s"
output = "%s"
[[picture]]
name = "losses"
title = "All losses"
[[picture.panel]]
title = "pose, deep"
where = {"model.name" = "pose", model.depth = 2}
label = "optim.rate"
metrics = ["train/loss"]
baselines = ["train/loss:1.5:mean image"]
[[picture.panel]]
title = "video"
where = {"model.name" = "video"}
label = "optim.rate"
metrics = ["train/loss"]
'''
PANEL = '[[picture]]\nname = "one"\n[[picture.panel]]\nmetrics = ["eval/AP"]\n'


@pytest.fixture
def root(tmp_path):
  """Five runs: two rates of pose, of which one has two seeds; a shallow one; one of video."""
  folder = tmp_path / 'runs'
  for name, loss, model, depth, rate, seed in (
      ('a', 4.0, 'pose', 2, 0.1, 0), ('b', 3.0, 'pose', 2, 0.1, 1), ('c', 2.0, 'pose', 2, 0.3, 0),
      ('d', 9.0, 'pose', 3, 0.1, 0), ('e', 8.0, 'video', 2, 0.1, 0)):
    run = write_run(folder / name, [loss, loss / 2])
    with open(os.path.join(run, 'config.json'), 'w', encoding='utf-8') as f:
      json.dump({'model': {'name': model, 'depth': depth}, 'optim': {'rate': rate, 'on': True}, 'seed': seed}, f)
  return folder


@pytest.fixture
def draw(root, tmp_path, monkeypatch):
  """draw(plan, flags...) -> {name: figure}, as run() would save them."""
  def run(content, *flags):
    figures = {}
    monkeypatch.setattr(plot, 'save', lambda figure, path: figures.update({os.path.basename(path): figure}) or [path])
    plot_plan.run(['plot', plan(tmp_path, content), *flags])
    return figures
  return run


def plan(folder, content):
  """A plan in a folder."""
  path = folder / 'plan.toml'
  path.write_text(content, encoding='utf-8')
  return str(path)


def legend(legends):
  """The names in a legend."""
  return [t.get_text() for t in legends.get_texts()]


def test_panels_select_runs_and_labels_name_curves(draw, root, tmp_path):
  figure = draw(PLAN % (root, tmp_path))['losses']
  left, right = figure.axes
  assert [ax.get_title(loc='left') for ax in figure.axes] == ['pose, deep', 'video']
  assert left.get_xlabel() == 'step (updates)' and left.get_ylabel() == 'loss'
  assert [line.get_ydata().tolist() for line in drawn(left)] == [[4, 2], [3, 1.5], [2, 1]]
  seeds, other = drawn(left)[:2], drawn(left)[2]
  assert {line.get_color() for line in seeds} == {plot.COLOURS[0]} != {other.get_color()}
  assert drawn(right)[0].get_color() == plot.COLOURS[0]                  # the rate 0.1 has it everywhere
  assert seeds[0].get_linewidth() < drawn(right)[0].get_linewidth()
  assert [line.get_ydata() for line in left.lines if line.get_linestyle() == '--'] == [[1.5, 1.5]]
  assert not figure.legends and [legend(ax.get_legend()) for ax in figure.axes] == [['0.1', '0.3'], ['0.1']]
  assert {'All losses', 'mean image', '0.3'} <= set(texts(plot.svg(figure)))


def test_equal_labels_share_a_legend(draw, root, tmp_path):
  content = (PLAN % (root, tmp_path)).replace('label = "optim.rate"', 'label = ["model.depth", "seed"]')
  figure = draw(content.replace('{"model.name" = "video"}', '{optim.on = true, model.name = "pose", model.depth = 2.0}')
                )['losses']
  assert [legend(one) for one in figure.legends] == [['2, 0', '2, 1']]
  assert figure.legends[0].get_title().get_text() == 'All losses'
  assert [ax.get_legend() for ax in figure.axes] == [None, None]


def test_without_where_and_label_every_run_has_its_folder_s_name(draw, root):
  figure = draw('output = "x"\nroot = "none"\n' + PANEL.replace('"eval/AP"', '"eval/A*", "eval/offset_px"'),
                f'--root={root}')['one']
  assert legend(figure.legends[0])[:3] == ['a eval/AP', 'a eval/offset_px', 'b eval/AP']
  assert figure.axes[0].get_ylabel() == 'AP, offset (px)'


def test_pictures_are_written_where_told(root, tmp_path, capsys):
  path = plan(tmp_path, PLAN % (root, tmp_path / 'there') + PANEL)
  assert plot.main(['plot', path]) == 0 and plot.main(['plot', path, f'--output={tmp_path}/here']) == 0
  for folder in ('there', 'here'):
    assert sorted(os.listdir(tmp_path / folder)) == ['losses.png', 'losses.svg', 'one.png', 'one.svg']
  assert capsys.readouterr().out.count('.png') == 4


def test_partial_says_what_is_missing(draw, root, tmp_path, capsys):
  content = (PLAN % (root, tmp_path / 'out')).replace('"video"}', '"language"}')
  said = failure(capsys, plan(tmp_path, content))
  assert "picture losses, panel 'video': no run in" in said and "{'model.name': 'language'}; --partial" in said
  assert not os.path.exists(tmp_path / 'out')
  left, right = draw(content, '--partial')['losses'].axes
  assert len(drawn(left)) == 3 and [t.get_text() for t in right.texts] == ['no run yet'] and not drawn(right)
  content = (PLAN % (root, tmp_path)).replace('metrics = ["train/loss"]\nb', 'metrics = ["train/loss", "train/los"]\nb')
  assert "no metric 'train/los'; did you mean train/loss?" in failure(capsys, plan(tmp_path, content))
  assert len(drawn(draw(content, '--partial')['losses'].axes[0])) == 3
  (tmp_path / 'empty').mkdir()
  figure = draw(PLAN % (tmp_path / 'empty', tmp_path), '--partial')['losses']
  assert [[t.get_text() for t in ax.texts] for ax in figure.axes] == [['no run yet']] * 2


@pytest.mark.parametrize('content, said', [
    ('rot = "x"\n' + PANEL, "unknown key 'rot'; did you mean root?"),
    (PANEL, 'output is missing'),
    ('output = "x"\n', 'picture is missing'),
    ('output = 3\n' + PANEL, 'output = 3: expected a string'),
    ('output = "x"\n' + PANEL.replace('name', 'nmae'), "picture 1: unknown key 'nmae'; did you mean name?"),
    ('output = "x"\n' + PANEL.replace('"one"', '"../one"'), "name = '../one': expected a file's name"),
    ('output = "x"\n' + PANEL + PANEL, "picture 2: name = 'one'"),
    ('output = "x"\npicture = [1]\n', 'picture 1: 1: expected a table'),
    ('output = "x"\n' + PANEL.replace('"one"', '"one"\nx = "days"'), "x = 'days': expected step, examples_seen, hours"),
    ('output = "x"\n' + PANEL.replace('"one"', '"one"\nsmooth = 1'), 'smooth = 1: expected a number in [0, 1)'),
    ('output = "x"\n' + PANEL.replace('metrics', 'metric'), "panel 1: unknown key 'metric'; did you mean metrics?"),
    ('output = "x"\n' + PANEL.replace('["eval/AP"]', '[]'), 'panel 1: metrics is missing or empty'),
    ('output = "x"\n' + PANEL.replace('["eval/AP"]', '[3]'), 'metrics = [3]: expected strings'),
    ('output = "x"\n' + PANEL + 'baselines = ["eval/AP:x"]\n', 'is not METRIC:VALUE'),
    ('output = "x"\n' + PANEL + 'baselines = ["AP:1"]\n', "baselines: 'AP' is none of its metrics"),
    ('output = "x"\n' + PANEL + 'where = {"model.nmae" = 1}\n', "no run has the key 'model.nmae'; did you mean model."),
    ('output = "x"\n' + PANEL + 'label = "optim.rat"\n', "no run has the key 'optim.rat'; did you mean optim.rate?"),
    ('output = "x"\n' + PANEL + 'where = {optim.on = 1}\n', 'no run in'),
    ('output = "x"\n' + PANEL.replace('AP', 'AQ'), "panel 'eval/AQ': no metric 'eval/AQ'; did you mean eval/AP?"),
    ('output = "x\n', 'not TOML'),
])
def test_a_wrong_plan_is_one_line_and_code_2(root, tmp_path, capsys, content, said):
  assert said in failure(capsys, plan(tmp_path, content), f'--root={root}')
  assert not os.path.exists('x')


def test_a_plan_has_flags_of_its_own(root, tmp_path, capsys):
  path = plan(tmp_path, PLAN % (root, tmp_path))
  assert 'unrecognized arguments: --x=step' in failure(capsys, path, '--x=step')
  assert 'unrecognized arguments' in failure(capsys, path, str(root))
  assert 'no such file; did you mean plan.toml?' in failure(capsys, path.replace('plan.toml', 'pln.toml'))
  assert 'no such folder' in failure(capsys, path, f'--root={tmp_path}/none', '--partial')
  assert '--partial' in failure(capsys, str(root), '--partial')


def test_labels_are_data(root, tmp_path, draw):
  with open(root / 'a' / 'config.json', 'w', encoding='utf-8') as f:
    json.dump({'tag': '_$\\frac{$<b>'}, f)
  content = PANEL + 'where = {tag = \'_$\\frac{$<b>\'}\nlabel = "tag"\n'
  figure = draw(f'output = "x"\nroot = "{root}"\n{content}')['one']
  assert '_$\\frac{$<b>' in texts(plot.svg(figure)) and np.isfinite(drawn(figure.axes[0])[0].get_ydata()).all()


def test_a_list_in_where_is_one_of_them(draw, root, tmp_path):
  content = f'root = "{root}"\noutput = "{tmp_path}"\n[[picture]]\nname = "one"\n[[picture.panel]]\n'
  figure = draw(content + 'where = {"optim.rate" = [0.3, 7.0], "model.depth" = 2}\nmetrics = ["train/loss"]\n')['one']
  assert len(drawn(figure.axes[0])) == 1
