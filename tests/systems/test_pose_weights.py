"""The imported VGG computes what torchvision's own does, and nothing but safetensors is read."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lab.systems.pose import config, model, weights
from tests.fixtures import vgg_activations as fixture

TOLERANCE = 1e-3


@pytest.fixture(scope='module')
def converted(tmp_path_factory):
  folder = tmp_path_factory.mktemp('vgg')
  source, out = str(folder / 'vgg19.safetensors'), str(folder / 'out.safetensors')
  save_file({**fixture.weights(), 'classifier.0.bias': np.zeros(3, np.float32)}, source)
  assert weights.main([source, out]) == 0
  return out


@pytest.fixture(scope='module')
def activations(converted):
  """image u8[8, 32, 32, 3] -> f32[10, 8, 64], the fixture's samples of our backbone with the converted weights."""
  section = config.get_config().model
  section.update(dtype='float32', paf_stages=1, heatmap_stages=1, blocks=1)
  net = model.make(section, 24, 19)
  image = fixture.pictures()
  shapes = jax.eval_shape(net.init, jax.random.key(0), image)['params']
  params = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
  for path, array in load_file(converted).items():
    section, layer, part = path.split('/')
    assert params[section][layer][part].shape == array.shape
    params[section][layer][part] = array
  apply = jax.jit(lambda image: net.apply(
      {'params': params}, image, capture_intermediates=True, mutable='intermediates')[1]['intermediates']['backbone'])

  def run(image):
    seen = apply(image)
    names = [layer[0] for layer in model.VGG19_10 if layer != 'pool']
    return np.stack([fixture.sample(np.asarray(seen[n]['__call__'][0]), i) for i, n in enumerate(names)])

  return run


def test_first_ten_convolutions_equal_torchvision(activations):
  stored = np.load(fixture.PATH)['activations']
  assert np.abs(stored).max() > 1 and (stored > 0).mean((1, 2)).min() > 0.2   # the comparison has something to compare
  np.testing.assert_allclose(activations(fixture.pictures()), stored, rtol=0, atol=TOLERANCE)


def test_exchanged_colour_channels_are_noticed(activations):
  stored = np.load(fixture.PATH)['activations']
  wrong = activations(fixture.pictures()[..., ::-1])
  assert (np.abs(wrong - stored).max((1, 2)) > 100 * TOLERANCE).all()


def test_output_says_what_it_is(converted):
  with safe_open(converted, framework='np') as f:
    assert f.metadata()['preprocess'] == 'imagenet' and 'vgg19' in f.metadata()['source']
    assert set(f.keys()) == {f'backbone/{layer[0]}/{part}' for layer in model.VGG19_10 if layer != 'pool'
                             for part in ('kernel', 'bias')}
    assert f.get_tensor('backbone/conv1_1/kernel').shape == (3, 3, 3, 64)


def test_vgg16_is_recognised_and_its_layers_are_numbered_as_torchvision_does():
  # vgg16's features: 0 2 | 5 7 | 10 12 14 | 17 ..., as torchvision lists them
  assert weights.features(model.VGG16_7) == {'conv1_1': 0, 'conv1_2': 2, 'conv2_1': 5, 'conv2_2': 7, 'conv3_1': 10,
                                             'conv3_2': 12, 'conv3_3': 14}
  assert list(weights.features(model.VGG19_10).values()) == [n for n, _ in fixture.CONVS]


def test_other_files_are_refused_in_one_line(tmp_path, capsys):
  zeros = np.zeros((64, 3, 3, 3), np.float32)
  cases = {'a.pth': (lambda p: p.write_bytes(pickle.dumps({'features.0.weight': 0})), 'pickle'),
           'b.pth': (lambda p: p.write_bytes(b'PK\x03\x04' + bytes(20)), 'pickle'),
           'c.safetensors': (lambda p: p.write_bytes(b'hello, this is no such file'), 'not a safetensors file'),
           'd.safetensors': (lambda p: save_file({'conv.weight': zeros}, p), "not torchvision's"),
           'e.safetensors': (lambda p: save_file({'features.0.weight': zeros, 'features.1.weight': zeros}, p), 'batch'),
           'f.safetensors': (lambda p: save_file({'features.16.weight': zeros}, p), 'features.0.weight is missing'),
           'g.safetensors': (lambda p: None, 'no such file')}
  for name, (write, words) in cases.items():
    write(tmp_path / name)
    assert weights.main([str(tmp_path / name), str(tmp_path / 'out')]) == 3
    message = capsys.readouterr().err
    assert words in message and message.count('\n') == 1 and name in message
  assert weights.main([]) == 2 and not (tmp_path / 'out').exists()


@pytest.mark.parametrize('kind', ['imagenet', 'caffe', 'unit'])
def test_preprocessing(kind):
  # red 255, green 128, blue 0 by the published constants of each convention, in double precision
  expected = {'imagenet': [(1 - .485) / .229, (128 / 255 - .456) / .224, (0 - .406) / .225],
              'caffe': [0 - 103.939, 128 - 116.779, 255 - 123.68], 'unit': [127 / 256, 0, -0.5]}[kind]
  image = jnp.array([[[[255, 128, 0]]]], jnp.uint8)
  np.testing.assert_allclose(model.preprocess(image, kind)[0, 0, 0], expected, rtol=1e-6, atol=1e-6)
