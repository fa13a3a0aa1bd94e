"""The network: sizes of the published ones, its parts, and that dtype, remat and cascade mean what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import metrics
from lab.systems.pose import config, losses, model, targets

SIDE, LIMBS, CHANNELS = 32, 24, 19
KEY = jax.random.key(0, impl='unsafe_rbg')               # compiles several times faster than threefry


def settings(**changes):
  section = config.get_config().model
  section.update({'backbone': 'small', 'paf_stages': 1, 'heatmap_stages': 1, 'width_first': 8, 'width': 8, 'blocks': 1,
                  'head_first': 16, 'head': 16, 'feature': 16, 'dtype': 'float32', **changes})
  return section


def images(side=SIDE, batch=2):
  return np.random.default_rng(0).integers(0, 256, (batch, side, side, 3)).astype(np.uint8)


def parameters(net, side=SIDE):
  """Abstract parameters; nothing is computed."""
  return jax.eval_shape(net.init, KEY, jax.ShapeDtypeStruct((1, side, side, 3), np.uint8))['params']


def count(net, side):
  return sum(leaf.size for leaf in jax.tree.leaves(parameters(net, side)))


@pytest.fixture(scope='module')
def labels():
  coco = np.zeros((2, 1, 17, 3), np.float32)
  coco[..., :2] = np.random.default_rng(1).uniform(2, SIDE - 2, (2, 1, 17, 2))
  coco[..., 2] = 2
  return jax.jit(lambda k: targets.make(k, jnp.zeros((2, 8, 8), jnp.uint8), 4, config.get_config().target))(coco)


def loss_and_gradient(section, variables, labels):
  net = model.make(section, LIMBS, CHANNELS)

  def loss(params):
    pafs, heatmaps = net.apply({'params': params}, images())
    return metrics.objective(losses.training_loss(pafs, heatmaps, labels, jnp.ones(2), config.get_config().loss)[0])
  return jax.jit(jax.value_and_grad(loss))(variables['params'])


@pytest.fixture(scope='module')
def variables():
  return jax.jit(model.make(settings(), LIMBS, CHANNELS).init)(KEY, images())


def test_published_sizes():
  # CMU's BODY_25 network has some 26 M parameters (26 limbs, 25 keypoints and a background); ours also has slopes
  full = config.get_config().model
  assert count(model.make(full, 26, 26), 368) == pytest.approx(26e6, rel=0.02)
  # the TensorFlow network of 2019: 22.0 M
  vgg16 = config.get_config().model
  vgg16.update(backbone='vgg16_7', feature=256, head_first=512)
  assert count(model.make(vgg16, 17, 18), 368) == pytest.approx(22.0e6, rel=0.005)


@pytest.mark.parametrize('backbone,side,cells', [('vgg19_10', 368, 46), ('vgg16_7', 368, 46), ('small', 96, 24)])
def test_shapes_names_and_types(backbone, side, cells):
  whole = config.get_config()
  whole.model.update(backbone=backbone)
  assert side // model.stride(whole) == cells
  net = model.make(whole.model, LIMBS, CHANNELS)
  params = parameters(net, side)
  pafs, heatmaps = jax.eval_shape(net.apply, {'params': params}, jax.ShapeDtypeStruct((2, side, side, 3), np.uint8))
  assert [p.shape for p in pafs] == [(2, cells, cells, LIMBS, 2)] * 4
  assert [h.shape for h in heatmaps] == [(2, cells, cells, CHANNELS)] * 2
  assert {leaf.dtype for leaf in jax.tree.leaves((params, pafs, heatmaps))} == {np.dtype('float32')}   # bf16 inside
  assert set(params) == {'backbone', 'paf1', 'paf2', 'paf3', 'paf4', 'heatmap1', 'heatmap2'}
  assert params['paf1']['block0']['conv0']['kernel'].shape[-1] == 96
  assert params['heatmap2']['block4']['conv2']['kernel'].shape == (3, 3, 128, 128)
  # what a stage sees: features; fields and features; fields, heatmaps and features
  seen = [params[s]['block0']['conv0']['kernel'].shape[2] for s in ('paf1', 'paf2', 'heatmap1', 'heatmap2')]
  assert seen == [128, 128 + 48, 128 + 48, 128 + 48 + 19]
  whole.model.cascade = False
  alone = parameters(model.make(whole.model, LIMBS, CHANNELS), side)
  assert {alone[s]['block0']['conv0']['kernel'].shape[2] for s in set(alone) - {'backbone'}} == {128}


def test_slopes_are_one_a_channel(variables):
  assert variables['params']['paf1']['block0']['conv0']['prelu']['slope'].shape == (8,)
  x = np.array([[[[-2, -2, 3]]]], np.float32)
  out = model.PReLU().apply({'params': {'slope': jnp.array([0.25, -1, 7])}}, x)
  np.testing.assert_array_equal(out[0, 0, 0], [-0.5, 2, 3])
  assert set(np.asarray(model.PReLU().init(KEY, x)['params']['slope'])) == {0.25}


def test_first_predictions_are_small(variables):
  pafs, heatmaps = jax.jit(model.make(settings(), LIMBS, CHANNELS).apply)(variables, images())
  for out in jax.tree.leaves((pafs, heatmaps)):
    assert 1e-4 < jnp.abs(out).mean() < 0.3


def test_bfloat16_loss_is_near_float32(variables, labels):
  exact = loss_and_gradient(settings(), variables, labels)
  short = loss_and_gradient(settings(dtype='bfloat16'), variables, labels)
  assert abs(short[0] / exact[0] - 1) < 0.02
  assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(short[1]))
  # bf16 has 8 bits; the whole gradient points where the exact one does
  a, b = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (exact[1], short[1]))
  assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99
  remat = loss_and_gradient(settings(remat=True), variables, labels)
  np.testing.assert_allclose(remat[0], exact[0], rtol=1e-6)
  jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-7), remat[1], exact[1])
  # a slope, bias or kernel without a gradient would be dead weight
  assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(exact[1]))


def test_dropout_and_group_norm():
  net = model.make(settings(dropout=0.5, norm='group', paf_stages=1, heatmap_stages=0, feature=8), LIMBS, CHANNELS)
  image = images()
  variables = jax.jit(net.init)(KEY, image)
  assert 'scale' in variables['params']['paf1']['head']['norm']
  train = jax.jit(lambda key, image: net.apply(variables, image, train=True, rngs={'dropout': key})[0][0])
  a, again, b = (train(jax.random.key(k, impl='unsafe_rbg'), image) for k in (1, 1, 2))
  np.testing.assert_array_equal(a, again)
  assert jnp.abs(a - b).max() > 0
  calm = jax.jit(lambda image: net.apply(variables, image)[0][0])
  # group norm knows no batch: a picture's output does not depend on its neighbours
  np.testing.assert_allclose(calm(image)[0], calm(np.stack([image[0], 255 - image[1]]))[0], rtol=1e-4, atol=1e-5)


def test_mean_coloured_border_is_invisible():
  # padding means the mean colour: a constant picture of that colour gives the same in the corner as in the middle
  conv = model.Conv(8, 3, jnp.float32)
  x = model.preprocess(jnp.full((1, 8, 8, 3), 128, jnp.uint8), 'unit')
  out = jax.jit(conv.init_with_output)(KEY, x)[0]
  np.testing.assert_array_equal(out, jnp.broadcast_to(out[:, 4:5, 4:5], out.shape))


def test_unknown_backbone_is_named():
  with pytest.raises(ValueError, match='vgg20'):
    parameters(model.make(settings(backbone='vgg20'), LIMBS, CHANNELS))


def test_pooling_and_relu_have_the_gradients_of_jax_s_own():
  """Odd sides are cut; what is not larger than 0 gets none."""
  x = jnp.array(np.random.default_rng(4).normal(size=(2, 7, 6, 3)), 'f')
  pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID')
  for ours, theirs in ((model._halve, pool), (model.relu, jax.nn.relu)):
    np.testing.assert_array_equal(ours(x), theirs(x))
    gradient = lambda f: jax.grad(lambda x: jnp.sin(f(x)).sum())(x)
    np.testing.assert_allclose(gradient(ours), gradient(theirs), atol=1e-7)
  assert not np.asarray(jax.grad(lambda x: model.relu(x).sum())(jnp.zeros(3))).any()


def test_of_equals_the_first_gets_the_gradient_of_a_maximum():
  gradient = jax.grad(lambda x: model._halve(x).sum())(jnp.ones((1, 2, 4, 1)))
  np.testing.assert_array_equal(gradient[0, ..., 0], [[1, 0, 1, 0], [0, 0, 0, 0]])
