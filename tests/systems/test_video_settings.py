"""Which video configurations are refused and why; that recipes, sweeps and the plan of their pictures are valid."""

import json
import os

import numpy as np
import pytest

from configs import video
from data_pipelines import clips
from lab import plot, plot_plan, points, sweep, train
from lab.config import flatten
from lab.systems.video import config as shape, registry, task as video_task
from lab.task import ConfigError, load
from tests.conftest import ROOT

SWEEPS = {'video_table': 12, 'video_grid': 30, 'video_parity': 39, 'video_optimizers': 21, 'video_ablation': 15}


def settings(config, keys):
  """A configuration with {dotted key: value} changes; SECTION__KEY is one too."""
  config.update_from_flattened_dict({k.replace('__', '.'): v for k, v in keys.items()})
  return config


def runs(name):
  return points.read(os.path.join(ROOT, 'configs', f'{name}.toml')).runs()


BAD = (
    ({'loss__combo': '0nb'}, 'loss.combo'), ({'loss__combo': '1tb'}, 'loss.combo'),
    ({'loss__multiply': 0.0}, 'multiply'),
    ({'loss__combo': '0nm', 'loss__multiply': 10.0}, 'multiply'), ({'data__digits': 4}, 'data.digits'),
    ({'data__pool': 3}, 'data.pool'), ({'video__size': 7}, 'video.size'), ({'data__speed_min': 0.2}, 'data.speed_min'),
    ({'data__bounce': 'wrap'}, 'data.bounce'), ({'model__heads': 'all'}, 'model.heads'),
    ({'model__feed': 'truth'}, 'model.feed'), ({'model__cell': 'convlstm'}, 'model.embed'),
    ({'loss__recon_weight': 0.0}, 'loss.recon_weight'), ({'data__eval': 'val'}, 'data.eval'),
    ({'video__future': 0}, 'video.future'), ({'model__kind': 'simvp'}, 'model.heads'))


@pytest.mark.parametrize('keys, key', BAD)
def test_settings_that_cannot_run_name_their_key(keys, key):
  with pytest.raises(ConfigError, match=key.replace('.', r'\.')):
    load(settings(video.get_config('smoke'), keys))


SIMVP = {'model.kind': 'simvp', 'model.heads': 'pred'}
MAP = {'model.cell': 'convlstm', 'model.embed': 'patch', 'model.encoder': (8,), 'model.head': (8,)}
# (what makes the key unread, the key, a value that is not its default)
UNREAD = [
    *((SIMVP, f'model.{key}', value) for key, value in {
        'feed': 'zero', 'recon_order': 'forward', 'embed': 'cnn', 'embed_widths': (8, 8), 'channels': (8,) * 5,
        'kernels': (3,) * 5, 'strides': (1,) * 5, 'patch': 8, 'cell': 'gru', 'encoder': (8, 8), 'head': (8, 8),
        'kernel': 3, 'readout': 'mlp', 'readout_width': 8, 'handover': 'h_only', 'init': 'uniform',
        'fuse_input': False}.items()),
    *(({}, f'model.{key}', value) for key, value in {
        'hid_s': 8, 'hid_t': 8, 'n_s': 2, 'n_t': 2, 'embed_widths': (8, 8), 'patch': 8, 'kernel': 3, 'readout_width': 8,
        'channels': (8,) * 5, 'kernels': (3,) * 5, 'strides': (1,) * 5}.items()),
    (MAP, 'model.channels', (8,) * 5), ({'model.embed': 'cnn'}, 'model.patch', 8),
    ({'model.readout': 'mlp'}, 'model.embed_widths', (8, 8)), ({'model.embed': 'mlp'}, 'model.readout_width', 8),
    ({'model.heads': 'pred'}, 'model.recon_order', 'forward'), ({'model.heads': 'pred'}, 'loss.recon_weight', 0.5),
    ({'model.heads': 'recon'}, 'loss.recon_weight', 0.5), (SIMVP, 'loss.recon_weight', 0.5),
    ({}, 'loss.scheduled_steps', 100), ({'model.feed': 'teacher'}, 'loss.scheduled_steps', 100),
    (SIMVP, 'loss.scheduled_steps', 100)]


@pytest.mark.parametrize('keys, key, value', UNREAD)
def test_a_setting_that_nothing_reads_is_refused(keys, key, value):
  load(settings(shape.get_config(), keys))               # its default is always fine
  default = flatten(shape.get_config())[key]
  with pytest.raises(ConfigError) as e:
    load(settings(shape.get_config(), {**keys, key: value}))
  assert str(e.value).startswith(f'config.{key} = {value!r}: expected {default!r}, for it is read with config.')


@pytest.mark.parametrize('keys', [
    {**SIMVP, 'model.hid_s': 8, 'model.hid_t': 8, 'model.n_s': 2, 'model.n_t': 2, 'model.dtype': 'float32'},
    {'model.embed': 'mlp', 'model.embed_widths': (8, 8), 'model.recon_order': 'forward', 'loss.recon_weight': 0.5},
    {**MAP, 'model.patch': 8, 'model.kernel': 3}, {'model.readout': 'mlp', 'model.readout_width': 8},
    {'model.embed': 'cnn', 'model.channels': (8, 8), 'model.kernels': (3, 3), 'model.strides': (2, 1)},
    {'model.readout': 'deconv', 'model.channels': (8, 8), 'model.kernels': (3, 3), 'model.strides': (2, 1)},
    {'model.heads': 'recon', 'model.recon_order': 'forward'},
    {'model.feed': 'scheduled', 'loss.scheduled_steps': 100}])
def test_a_setting_that_is_read_is_not(keys):
  load(settings(shape.get_config(), keys))


def test_fixed_sequences_may_be_smaller_than_a_digit(tmp_path):
  np.save(tmp_path / 'clips.npy', np.zeros((3, 20, 16, 16), np.uint8))
  clips.prepare(str(tmp_path / 'clips.npy'), str(tmp_path / 'out'))
  small = {'data.dir': str(tmp_path / 'out'), 'data.eval': 'test', 'video.size': 16}
  assert load(settings(shape.get_config(), small)).source('eval').size == 3
  with pytest.raises(ConfigError, match='video.size = 16: a digit of 28 px'):
    load(settings(shape.get_config(), {'video.size': 16}))


def test_fixed_sequences_refuse_the_settings_of_generated_ones(tmp_path):
  np.save(tmp_path / 'clips.npy', np.zeros((3, 20, 64, 64), np.uint8))
  folder = clips.prepare(str(tmp_path / 'clips.npy'), str(tmp_path / 'out'))[0]
  fixed = {'data.dir': str(tmp_path / 'out'), 'data.eval': 'test'}
  assert os.path.isdir(folder) and load(settings(shape.get_config(), fixed)).source('eval').size == 3
  for key, value in {'digits': 3, 'pool': 2, 'speed_min': 0.05, 'speed_max': 0.2, 'bounce': 'reflect'}.items():
    assert f'data.{key}' in video_task.GENERATED
    load(settings(shape.get_config(), {f'data.{key}': value})).source('eval')        # digits are generated from
    task = load(settings(shape.get_config(), {**fixed, f'data.{key}': value}))
    with pytest.raises(ConfigError, match=f'config.data.{key} = .* the sequences in .*out are fixed'):
      task.source('eval')


def test_every_named_model_is_a_recipe():
  for name in registry.PARITY:
    config = video.get_config(f'parity={name}')
    train.check(config)
    load(config)
  with pytest.raises(ConfigError, match='cnn-flatten'):
    video.get_config('parity=vgg')
  with pytest.raises(ConfigError, match='convlstm'):
    video.get_config('full')


@pytest.mark.parametrize('name', SWEEPS)
def test_sweeps_are_valid_and_their_names_differ_and_parse_back(name, tmp_path, monkeypatch):
  found = runs(name)
  assert len({r.name for r in found}) == len(found) == SWEEPS[name]
  assert all(points.parse(r.name) == {**r.values, 'seed': r.seed} for r in found)
  monkeypatch.chdir(ROOT)                                # the files name their recipe from there
  sweep.check(points.read(os.path.join('configs', f'{name}.toml'), str(tmp_path)))


def test_the_optimizers_the_ablation_and_the_weights_are_those_of_the_notes():
  kinds = [(r.values['optim.name'], r.values.get('optim.ema', 0)) for r in runs('video_optimizers') if r.seed == 0]
  assert kinds == [*((n, 0) for n in ('adam', 'adadelta', 'adagrad', 'adamax', 'sgd')), ('sgd', 0.99), ('rmsprop', 0)]
  first, *others = [r.values for r in runs('video_ablation') if r.seed == 0]
  changed = [sorted({*first, *other} - {k for k in first if other.get(k) == first[k]}) for other in others]
  assert changed == [['optim.clip'], ['optim.beta1', 'optim.name'], ['model.init'],
                     ['loss.multiply', 'model.readout']]
  for name in ('video_optimizers', 'video_ablation'):
    assert {r.seed for r in runs(name)} == {0, 1, 2}
  weights = {(r.values['model.heads'], r.values.get('loss.recon_weight', 1.0)) for r in runs('video_parity')}
  assert weights == {('recon', 1.0), ('pred', 1.0), ('both', 0.8)}       # L = 0.8 L_recon + L_pred


def test_the_plan_draws_the_runs_of_the_grid(tmp_path, monkeypatch):
  for run in runs('video_grid'):
    folder = tmp_path / 'runs' / run.name
    os.makedirs(folder)
    config = settings(video.get_config(''), run.values)
    names = [f'{h}_{m}' for h in video_task.HEADS[config.model.heads] for m in video_task.TRAINED]
    (folder / 'config.json').write_text(config.to_json())
    (folder / 'metrics.jsonl').write_text(json.dumps({'step': 1, 'split': 'eval', **dict.fromkeys(names, 2.0)}) + '\n')
  figures = {}
  monkeypatch.setattr(plot, 'save', lambda figure, path: figures.update({os.path.basename(path): figure}) or [path])
  plot_plan.run(['plot', os.path.join(ROOT, 'configs', 'video_plots.toml'), f'--root={tmp_path / "runs"}',
                 f'--output={tmp_path}'])
  solid = lambda ax: sum(line.get_linestyle() != '--' for line in ax.lines)
  curves = {name: [solid(ax) for ax in figure.axes] for name, figure in figures.items()}
  assert curves == {'five_losses_recon': [5] * 4, 'five_losses_pred': [5] * 4, 'heads_and_feeds': [4] * 2,
                    'sigmoid_losses': [8] * 4}
  titles = [ax.get_title(loc='left') for ax in figures['five_losses_recon'].axes]
  assert sum('of both' in t for t in titles) == 2
