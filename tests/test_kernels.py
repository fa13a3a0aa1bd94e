"""Kernels for GPUs, run step by step on the CPU, against float64; that they compile for a GPU; where they are taken."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from lab.nn import activations, kernels, losses, norms, target
from lab.nn.transformer import Shape, Transformer
from tests.test_transformer import noisy

ROWS = 8
SIZES = {'less than a tile': 700, 'tiles alone': 8192, 'tiles and a rest': 8990}     # of 9000 columns
AXES = ('data', 'fsdp', 'tensor')


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape)


@pytest.fixture
def gpu(monkeypatch):
  """Chooses as for a GPU, and runs the kernels here; the list says which, for how many rows."""
  called, call = [], pallas.pallas_call
  monkeypatch.setattr(jax.lax, 'platform_dependent', lambda *args, cuda, default: cuda(*args))
  monkeypatch.setattr(kernels.triton, 'approx_tanh', jnp.tanh)
  monkeypatch.setattr(kernels, 'exp2', lambda interpret, exp2=kernels.exp2: exp2(True))

  def run(*args, interpret, **options):
    made = call(*args, interpret=True, **options)
    return lambda *arrays: called.append((options['name'], arrays[0].shape[0])) or made(*arrays)
  monkeypatch.setattr(kernels.pl, 'pallas_call', run)
  return called


def mesh(*axes):
  devices = jax.devices()[:int(np.prod(axes))]
  return jax.make_mesh(axes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


# -- the loss of a vocabulary


def vocabulary(classes):
  """Logits in bfloat16 with equal largest ones in two rows, one of -inf, and large ones that don't count; labels."""
  logits = 3 * draw(0, ROWS, 9000)
  logits[2, [7, 9]] = logits[4, [7, 9]] = 30
  logits[3, 5::kernels.LANES] = -np.inf         # all that one lane sees
  logits[:, classes:] = 100
  return jnp.asarray(logits, jnp.bfloat16), jnp.array([0, classes - 1, 7, 410, 9, 5, -1, classes], jnp.int32)


def truth(classes):
  """float64: logits, log of sums, the labels' logits, 0 where a label is no class, and whether they are the largest."""
  logits, labels = (np.asarray(a, np.float64) for a in vocabulary(classes))
  logits, labels = logits[:, :classes], labels.astype(int)
  there = (labels >= 0) & (labels < classes)
  picked = np.where(there, logits[np.arange(ROWS), np.where(there, labels, 0)], 0)
  return logits, np.log(np.exp(logits).sum(1)), picked, there & (logits.argmax(1) == labels)


def check_statistics(got, classes):
  _, total, picked, right = truth(classes)
  np.testing.assert_allclose(got[0], total, rtol=1e-6)
  np.testing.assert_array_equal(got[1], picked)
  assert got[2].tolist() == right.tolist() and right.sum() == 1


@pytest.mark.parametrize('classes', SIZES.values(), ids=SIZES)
def test_statistics_of_labels_are_those_of_float64(classes):
  check_statistics(kernels.label_statistics(*vocabulary(classes), classes=classes, interpret=True), classes)
  check_statistics(losses._label_statistics(*vocabulary(classes), classes=classes), classes)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_logit_that_is_no_number_is_noticed(value):
  logits, labels = vocabulary(8990)
  total = kernels.label_statistics(logits.at[1, 4000].set(value), labels, classes=8990, interpret=True)[0]
  assert not np.isfinite(total[1]) and np.isfinite(np.delete(np.asarray(total), 1)).all()


@pytest.mark.parametrize('classes', SIZES.values(), ids=SIZES)
def test_the_gradient_of_labels_is_that_of_float64(classes):
  logits, total, *_ = truth(classes)
  slope, wanted = draw(1, ROWS), np.zeros((ROWS, 9000))
  wanted[:, :classes] = np.exp(logits - total[:, None])
  labels = np.asarray(vocabulary(classes)[1])[:6]
  wanted[np.arange(6), labels] -= 1
  given = *vocabulary(classes), jnp.asarray(total, jnp.float32), jnp.asarray(slope, jnp.float32)
  for got in (kernels.label_gradient(*given, classes=classes, interpret=True),
              losses._label_gradient(*given, classes=classes)):
    np.testing.assert_allclose(np.asarray(got, np.float64)[:6], (wanted * slope[:, None])[:6], rtol=2**-7, atol=1e-7)


def test_a_loss_by_kernels_on_eight_devices(gpu):
  states, matrix = jnp.asarray(draw(2, 16, 3, 8), jnp.bfloat16), jnp.asarray(draw(3, 640, 8), jnp.float32)
  labels = jnp.asarray(np.random.default_rng(4).integers(0, 600, (16, 3)), jnp.int32)
  loss = lambda states, matrix: losses.projected(states, matrix, None, labels, 600)[0].sum()
  with jax.set_mesh(mesh(2, 4, 1)):
    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(states, matrix)
  assert set(gpu) == {('label_statistics', 6), ('label_gradient', 6)}
  gpu.clear()
  with jax.set_mesh(mesh(2, 2, 2)):            # the vocabulary may be split
    wanted = jax.jit(jax.value_and_grad(loss, (0, 1)))(states, matrix)
  assert not gpu
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=.02)


# -- norms


def norm_truth(x, y, onward, slope, shift, scale, bias, eps, rms, post):
  """float64: the sum, its norm, and the gradients of x, shift, scale and bias."""
  x = x + (y + shift)
  middle = 0 if rms else x.mean(-1, keepdims=True)
  deviation = 1 / np.sqrt(np.square(x - middle).mean(-1, keepdims=True) + eps)
  unit = (x - middle) * deviation
  slope = slope + onward if post else slope
  steep = slope * scale
  to_x = (steep - unit * (steep * unit).mean(-1, keepdims=True) - (0 if rms else steep.mean(-1, keepdims=True)))
  to_x = to_x * deviation + (0 if post else onward)
  return x, unit * scale + bias, to_x, to_x.sum((0, 1)), (slope * unit).sum((0, 1)), slope.sum((0, 1))


@pytest.mark.parametrize('shifted', [False, True], ids=['', 'shifted'])
@pytest.mark.parametrize('post', [False, True], ids=['pre', 'post'])
@pytest.mark.parametrize('rms', [False, True], ids=['LayerNorm', 'RMSNorm'])
@pytest.mark.parametrize('width, dtype', [(40, 'float32'), (768, 'bfloat16'), (4096, 'float32')])
def test_sum_and_norm_and_their_gradients_are_those_of_float64(monkeypatch, width, dtype, rms, post, shifted):
  monkeypatch.setattr(kernels, 'PROGRAMS', 2)        # each has several tiles
  shape, options = (3, 7, width), {'eps': 0.0 if width == 40 else 1e-5, 'rms': rms, 'post': post}
  x, y, onward, slope = (jnp.asarray(draw(i, *shape) + (i == 0), jnp.float32) for i in range(4))
  y, slope = y.astype(dtype), slope.astype(dtype)
  scale, bias, shift = (jnp.asarray(draw(i, width), jnp.float32) for i in (4, 5, 6))
  shift = shift if shifted else jnp.zeros(width)
  total, norm, *slopes = norm_truth(
      *(np.asarray(a, np.float64) for a in (x, y, onward, slope, shift, scale, bias)), **options)
  slopes = slopes if shifted else [slopes[0], *slopes[2:]]
  vectors = (shift, scale, bias) if shifted else (scale, bias)
  close = functools.partial(np.testing.assert_allclose, rtol=3e-5, atol=3e-5)
  rough = close if dtype == 'float32' else lambda a, b: close(np.asarray(a, np.float64), b, rtol=2**-8, atol=2**-8)

  def check(made, stream, branch, gradients):
    close(made, total)
    rough(branch, norm)
    if post:
      close(stream, norm)
    to_x, to_y, *to_vectors = gradients
    assert branch.dtype == to_y.dtype == dtype and to_x.dtype == jnp.float32
    for got, want in zip((to_x, *to_vectors), slopes, strict=True):
      close(got, want, atol=1e-4)
    rough(to_y, slopes[0])

  made, stream, branch = kernels.add_norm(x, y, *vectors, **options, interpret=True)
  assert (stream is None) == (not post)
  to_x, to_y, shares = kernels.add_norm_gradient(made, onward, slope, scale, **options, shifted=shifted,
                                                 interpret=True)
  assert shares.shape == (1 if width == 40 else 2, len(vectors), width)
  check(made, stream, branch, (to_x, to_y, *shares.sum(0)))
  # and what other devices run
  (stream, branch), pull = jax.vjp(lambda x, y, *vectors: norms.add_norm(
      x, y, *(vectors if shifted else (None, *vectors)), *options.values()), x, y, *vectors)
  check(x + (y.astype(jnp.float32) + shift[None, None]) if post else stream, stream, branch, pull((onward, slope)))


@pytest.mark.parametrize('remat', [False, True])
@pytest.mark.parametrize('norm', ['pre', 'post'])
def test_a_transformer_by_kernels_on_eight_devices_is_that_without(gpu, norm, remat):
  shape = Shape(16, heads=2, layers=2, norm=norm, remat=remat, activation='gelu_tanh', cublas=True)
  x = jnp.asarray(draw(0, 8, 3, 16), jnp.float32)
  net = Transformer(shape)
  params = noisy(net.init(jax.random.key(0), x[:1]))
  assert set(gpu) == {('add_norm', 3)}
  gpu.clear()
  loss = lambda params, x: jnp.square(net.apply(params, x, causal=True)).sum() + net.apply(params, x)[..., 0].sum()
  step = lambda: jax.jit(jax.grad(loss, (0, 1)))
  with jax.set_mesh(mesh(2, 4, 1)):
    got = step()(params, jax.device_put(x, NamedSharding(mesh(2, 4, 1), P(('data', 'fsdp')))))
  assert set(gpu) == {('add_norm', 3), ('add_norm_gradient', 3), ('gelu_gradient', 3)}     # of one, not of eight
  gpu.clear()
  with jax.set_mesh(mesh(1, 1, 8)):
    wanted = step()(params, x)
  assert not gpu
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_rows_that_do_not_share_evenly_are_not_for_the_kernel(gpu):
  x, scale = jnp.asarray(draw(0, 3, 40), jnp.float32), jnp.ones(40)
  with jax.set_mesh(mesh(8, 1, 1)):
    norms.add_norm(x, x, None, scale, scale, 1e-5, False, False)
  assert not gpu


# -- activations


def gelu_truth(z):
  """float64: gelu_tanh and its derivative, by the hyperbolic tangent."""
  u, steep = np.sqrt(2 / np.pi) * (z + .044715 * z**3), np.sqrt(2 / np.pi) * (1 + 3 * .044715 * z**2)
  return z * (1 + np.tanh(u)) / 2, (1 + np.tanh(u)) / 2 + z / 2 * (1 - np.tanh(u)**2) * steep


@pytest.mark.parametrize('width, dtype', [(40, 'float32'), (1200, 'float32'), (1024, 'bfloat16')])
def test_an_activation_and_its_gradients_are_those_of_float64(monkeypatch, width, dtype):
  monkeypatch.setattr(kernels, 'PROGRAMS', 8)
  eighths = lambda x: np.clip(np.round(8 * x), -60, 60) / 8         # whose sums are exact in bfloat16
  x, bias = jnp.asarray(eighths(2 * draw(0, 3, 7, width)), dtype), jnp.asarray(eighths(draw(1, width)), jnp.float32)
  slope = jnp.asarray(draw(2, 3, 7, width), dtype)
  z = np.asarray(x, np.float64) + np.asarray(bias, np.float64)
  value, steep = gelu_truth(z)
  wanted = np.asarray(slope, np.float64) * steep
  close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
  rough = close if dtype == 'float32' else lambda a, b: close(np.asarray(a, np.float64), b, rtol=2**-8, atol=2**-8)
  to_x, shares = kernels.gelu_gradient(x + bias.astype(dtype)[None, None], slope, interpret=True)
  assert shares.shape == ({40: 1, 1200: 2, 1024: 4}[width], width)
  made, pull = jax.vjp(lambda x, bias: activations.activated('gelu_tanh', [x], [bias]), x, bias)
  rough(made, value)
  for got_x, got_bias in ((to_x, shares.sum(0)), pull(slope)):
    assert got_x.dtype == dtype and got_bias.dtype == jnp.float32
    rough(got_x, wanted)
    close(got_bias, wanted.sum((0, 1)), atol=2e-4)
  if dtype == 'float32':
    rough(activations._epilogue(x + bias[None, None]), value)
  alone, pull = jax.vjp(lambda x: activations.activated('gelu_tanh', [x], [None]), x - 3e13)      # 0, and flat
  assert (alone == 0).all() and (pull(slope)[0] == 0).all()


@pytest.mark.parametrize('width, dtype', [(40, 'float32'), (1200, 'float32'), (1024, 'bfloat16')])
def test_a_gated_activation_and_its_gradient_are_those_of_float64(width, dtype):
  made, slope = (jnp.asarray(draw(i, 3, 7, size), dtype) for i, size in enumerate((2 * width, width)))
  made, slope = made.at[0, 0, :4].set(jnp.asarray([-3e4, 3e4, 0, -3e38], dtype)), slope.at[0, 0, 3].set(3)
  gate, value, steep = (np.asarray(x, np.float64) for x in (made[..., :width], made[..., width:], slope))
  share = 1 / (1 + np.exp(-np.maximum(gate, -700)))
  wanted = np.concatenate([steep * value * share * (1 + gate * (1 - share)), steep * gate * share], -1)
  close = functools.partial(np.testing.assert_allclose, **dict.fromkeys(
      ('rtol', 'atol'), 2e-5 if dtype == 'float32' else 2**-8))
  y, pull = jax.vjp(activations.swiglu, made)
  close(np.asarray(y, np.float64), gate * share * value)
  for got, in (pull(slope), kernels.swiglu_gradient(made, slope, interpret=True)):
    assert got.dtype == dtype
    close(np.asarray(got, np.float64), wanted)


def test_a_gated_transformer_by_kernels_on_eight_devices_is_that_without(gpu, monkeypatch):
  net = Transformer(Shape(16, heads=2, layers=2, activation='swiglu', bias=False, rms=True))
  x = jnp.asarray(draw(0, 8, 3, 16), jnp.float32)
  params = noisy(net.init(jax.random.key(0), x[:1]))
  step = lambda: jax.jit(jax.grad(lambda params, x: jnp.square(net.apply(params, x)).sum(), (0, 1)))
  with jax.set_mesh(mesh(1, 1, 8)):
    wanted = step()(params, x)
  monkeypatch.setattr(target, 'nvidia', lambda: True)
  gpu.clear()
  with jax.set_mesh(mesh(2, 4, 1)):
    got = step()(params, jax.device_put(x, NamedSharding(mesh(2, 4, 1), P(('data', 'fsdp')))))
  assert set(gpu) == {('add_norm', 3), ('add_norm_gradient', 3), ('swiglu_gradient', 3)}
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# -- the compiler


def without_a_gpu():
  """jax from 0.12 on asks for the device that is compiled for."""
  if tuple(map(int, jax.__version__.split('.')[:2])) < (0, 11):
    return contextlib.nullcontext()
  device = jax.sharding.AbstractDevice(device_kind='NVIDIA H200', num_cores=None, platform='gpu')
  return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def lowered(f, *shapes):
  checks = [jax.export.DisabledSafetyCheck.custom_call('__gpu$xla.gpu.triton')]
  with without_a_gpu():
    args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.export.export(jax.jit(f), platforms=['cuda'], disabled_checks=checks)(*args).mlir_module()


def test_kernels_of_labels_compile_for_a_gpu_as_far_as_that_goes_without_one():
  logits, labels, row = ((256, 50304), jnp.bfloat16), ((256,), jnp.int32), ((256,), jnp.float32)
  for f, more in ((kernels.label_statistics, ()), (kernels.label_gradient, (row, row))):
    assert lowered(functools.partial(f, classes=50257), logits, labels, *more).count('__gpu$xla.gpu.triton') == 1


@pytest.mark.parametrize('width, rms, post', [(768, False, True), (2048, True, False)])
def test_kernels_of_norms_compile_for_a_gpu_as_far_as_that_goes_without_one(width, rms, post):
  options = {'eps': 1e-5, 'rms': rms, 'post': post}
  wide, narrow, vector = ((4, 64, width), jnp.float32), ((4, 64, width), jnp.bfloat16), ((width,), jnp.float32)
  for f, args in ((kernels.add_norm, (wide, narrow, vector, vector)),
                  (kernels.add_norm, (wide, narrow, vector, vector, vector)),
                  (functools.partial(kernels.add_norm_gradient, shifted=rms), (wide, wide, narrow, vector))):
    assert lowered(functools.partial(f, **options), *args).count('__gpu$xla.gpu.triton') == 1


def test_kernels_of_activations_compile_for_a_gpu_as_far_as_that_goes_without_one():
  wide = (4, 64, 3072), jnp.bfloat16
  assert lowered(kernels.swiglu_gradient, ((4, 64, 6144), jnp.bfloat16), wide).count('__gpu$xla.gpu.triton') == 1
  assert lowered(kernels.gelu_gradient, wide, wide).count('__gpu$xla.gpu.triton') == 1
