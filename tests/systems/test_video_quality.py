"""Ranges, losses and what is measured of frames, against NumPy in double precision and numbers derived by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from lab import metrics
from lab.systems.video import output, quality
from lab.task import ConfigError
from tests.systems.test_video_generate import mnist, numbers, program  # mnist is a fixture

SHAPE = 3, 4, 9, 12                                       # B, T, H, W
ONES = np.ones(SHAPE[0], np.float32)
MULTIPLIES = {'sigmoid': 100.0, 'tanh': 10.0, 'none': 1.0}


def frames(seed=0, shape=SHAPE):
  return np.random.default_rng(seed).uniform(0, 1, shape).astype(np.float32)


def sigmoid(x):
  return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def nats(p, z):
  """Bernoulli cross-entropy in float64, with 0 log 0 = 0."""
  p, z = np.float64(p), np.float64(z)
  with np.errstate(divide='ignore', invalid='ignore'):
    return -(np.where(z > 0, z * np.log(p), 0) + np.where(z < 1, (1 - z) * np.log1p(-p), 0))


def values(sums):
  return metrics.ratios(metrics.merge({}, sums))


@pytest.fixture(scope='module')
def moving(mnist):
  """f32[400, 10, 64, 64]: the frames forecast of generated sequences."""
  chosen = mnist[np.random.default_rng(0).integers(0, len(mnist), (400, 2))]
  return np.asarray(program(20, 64)(chosen, numbers(400)))[:, 10:] / np.float32(255)


# --- output

@pytest.mark.parametrize('name', output.COMBOS)
def test_outputs_equal_numpy(name):
  out = output.parse(name, 1)
  low, high = {'0': (0, 1), '1': (-1, 1), '5': (-0.5, 0.5)}[name[0]]
  activate = {'s': sigmoid, 't': np.tanh, 'n': lambda x: x}[name[1]]
  truth, logits = frames(1), np.random.default_rng(2).normal(0, 3, SHAPE).astype(np.float32)
  np.testing.assert_allclose(out.to_range(truth), low + (high - low) * np.float64(truth), atol=1e-6)
  np.testing.assert_allclose(out.activate(logits), activate(np.float64(logits)), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(out.to_unit(out.to_range(truth)), truth, atol=1e-6)
  unit = (activate(np.float64(logits)) - low) / (high - low)
  np.testing.assert_allclose(out.to_unit(out.activate(logits)), unit, rtol=1e-5, atol=1e-6)     # not clipped
  want = nats(unit, truth) if name[2] == 'b' else (unit - truth)**2
  got = out.training_loss(logits, truth)
  assert got.shape == SHAPE[:2] and got.dtype == np.float32
  np.testing.assert_allclose(got, want.sum((2, 3)), rtol=1e-5)
  assert out.training_loss(jnp.bfloat16(logits), truth).dtype == np.float32


@pytest.mark.parametrize('name', output.COMBOS)
@pytest.mark.parametrize('at', [-100.0, 100.0])
def test_losses_and_gradients_are_finite_at_saturation(name, at):
  out, truth = output.parse(name, 1), np.array([0, 0.3, 1], np.float32).reshape(1, 1, 1, 3)
  loss, slope = jax.value_and_grad(lambda x: out.training_loss(x, truth).sum())(jnp.full(truth.shape, at))
  assert np.isfinite(loss) and np.isfinite(slope).all()
  if name == '0sb':                                       # the slope of cross-entropy is p - z, at any logit
    np.testing.assert_allclose(slope, (at > 0) - truth, atol=1e-6)


@pytest.mark.parametrize('name', output.COMBOS)
def test_mean_bias_gives_the_mean_pixel(name):
  multiply = MULTIPLIES[output.COMBOS[name].activation]
  out = output.parse(name, multiply)
  np.testing.assert_allclose(out.to_unit(out.activate(jnp.float32(multiply * out.mean_bias()))), 0.0493, rtol=1e-4)
  if name == '0sb':
    assert abs(output.parse(name, 1).mean_bias() + 2.959) < 1e-3
    assert abs(out.mean_bias() + 0.02959) < 1e-5


@pytest.mark.parametrize('name, why', [
    ('0nb', 'needs a sigmoid'), ('1tb', 'needs a sigmoid'), ('1sb', r'range \(0, 1\)'), ('1sm', 'no other range'),
    ('0tm', 'half of what tanh'), ('5nm', 'there for tanh'), ('0s', 'activation'), ('msb', 'activation'),
    ('', 'activation'), ('0sbx10', 'activation')])
def test_unknown_combos_are_refused(name, why):
  with pytest.raises(ConfigError, match=f'config.loss.combo.*{why}.*0sb, 0sm, 0nm, 1tm, 1nm, 5tm'):
    output.parse(name, 1)


@pytest.mark.parametrize('name, multiply', [('0sb', 0), ('0sb', -1), ('1tm', float('nan')), ('0sm', float('inf')),
                                            ('0nm', 10), ('1nm', 0.5)])
def test_impossible_factors_are_refused(name, multiply):
  with pytest.raises(ConfigError, match='config.loss.multiply'):
    output.parse(name, multiply)


# per-frame floors of states shown as pixels, on Moving MNIST, measured. What a state in (-1, 1) can reach is
# sigmoid(+-1) = .269 and .731; tanh(+-1) = +-.762, which is .119 and .881 of (0, 1). A black frame of tanh would cost
# 4096 * .119^2 = 58.2; of its pixels 7 % are not black, and most of these are nearer to what can be reached: 56
@pytest.mark.parametrize('name, multiply, h, reach, mse, bce', [
    ('0sb', 1, 1, (0.269, 0.731), 286, 1320), ('0sb', 1, 0.1, (0.475, 0.525), 899, 2643),
    ('0sb', 10, 0.1, (0.269, 0.731), 286, 1320), ('0sm', 100, 0.1, (4.5e-5, 0.99995), 0, 86.45),
    ('0sm', 10, 1, (4.5e-5, 0.99995), 0, 86.45), ('1tm', 1, 1, (0.119, 0.881), 56, None)])
def test_floors_of_bounded_states(moving, name, multiply, h, reach, mse, bce):
  out = output.parse(name, multiply)
  low, high = out.reachable(-h, h)
  np.testing.assert_allclose([low, high], reach, atol=6e-4)
  truth, best = moving, np.clip(moving, low, high)         # the nearest pixel is best under both losses
  np.testing.assert_allclose(((best - truth)**2).sum((2, 3)).mean(), mse, rtol=0.02, atol=0.01)
  if bce:
    np.testing.assert_allclose(nats(best, truth).sum((2, 3)).mean(), bce, rtol=0.02)
    logits = jnp.float32(np.log(best / (1 - best)))
    got = output.parse('0sb', 1).training_loss(logits, truth)
    np.testing.assert_allclose(got.mean(), nats(best, truth).sum((2, 3)).mean(), rtol=1e-4)


def test_cross_entropy_of_constants(moving):
  out, truth = output.parse('0sb', 1), moving
  loss = lambda logit: float(out.training_loss(jnp.full(truth.shape, logit, jnp.float32), truth).mean())
  assert abs(loss(out.mean_bias()) / 804 - 1) < 0.02
  np.testing.assert_allclose(loss(0), 4096 * np.log(2), rtol=1e-5)                 # 2839


# --- quality

def test_a_tenth_everywhere():
  """The literature's error is a sum over the 4096 pixels of a frame: .1^2 of each is 40.96."""
  truth = 0.8 * frames(shape=(2, 3, 64, 64))
  got = values(quality.sums(truth + np.float32(0.1), None, truth, np.ones(2, np.float32), 'pred'))
  np.testing.assert_allclose([got['pred_mse_per_frame'], got['pred_mse_per_frame/03']], 40.96, rtol=1e-5)
  np.testing.assert_allclose(got['pred_mse_per_pixel'], 0.01, rtol=1e-5)
  np.testing.assert_allclose(got['pred_mae_per_frame'], 409.6, rtol=1e-5)
  np.testing.assert_allclose(got['pred_psnr_db'], 20, rtol=1e-5)


def test_sums_equal_numpy():
  truth = frames(1)
  raw = (1.6 * np.float64(frames(2)) - 0.3).astype(np.float32)                     # beyond (0, 1) on either side
  got = values(quality.sums(raw, None, truth, ONES, 'recon'))
  x, y = np.float64(raw), np.float64(truth)
  shown, squared = np.clip(x, 0, 1), (x - y)**2
  want = {'mse_per_frame': squared.sum((2, 3)).mean(), 'mse_per_pixel': squared.mean(),
          'mae_per_frame': np.abs(x - y).sum((2, 3)).mean(),
          'bce_nats_per_frame': nats(np.clip(x, 1e-6, 1 - 1e-6), y).sum((2, 3)).mean(),
          'psnr_db': (10 * np.log10(1 / ((shown - y)**2).mean((2, 3)))).mean(), 'ssim': reference_ssim(shown, y).mean()}
  want |= {f'mse_per_frame/{t + 1:02d}': squared[:, t].sum((1, 2)).mean() for t in range(SHAPE[1])}
  assert {k.removeprefix('recon_') for k in got} == set(want)
  for name, value in want.items():
    np.testing.assert_allclose(got[f'recon_{name}'], value, rtol=2e-5, err_msg=name)


def test_cross_entropy_is_of_the_logits_where_there_are_some():
  truth, logits = frames(1), np.random.default_rng(3).normal(0, 30, SHAPE).astype(np.float32)
  got = values(quality.sums(jax.nn.sigmoid(logits), logits, truth, ONES, 'pred'))['pred_bce_nats_per_frame']
  want = np.logaddexp(0, np.float64(logits)) - np.float64(truth) * logits
  np.testing.assert_allclose(got, want.sum((2, 3)).mean(), rtol=1e-5)
  clipped = values(quality.sums(jax.nn.sigmoid(logits), None, truth, ONES, 'pred'))['pred_bce_nats_per_frame']
  assert clipped < 0.9 * got


def reference_ssim(a, b):
  """float64[B, T]: structural_similarity of scikit-image, frame by frame, with its defaults and a data range of 1."""
  def one(x, y):
    mean = lambda z: ndimage.uniform_filter(z, 7)
    ux, uy, n = mean(x), mean(y), 49
    vx, vy, vxy = (n / (n - 1) * (mean(p * q) - mean(p) * mean(q)) for p, q in ((x, x), (y, y), (x, y)))
    s = (2 * ux * uy + 1e-4) * (2 * vxy + 9e-4) / ((ux**2 + uy**2 + 1e-4) * (vx + vy + 9e-4))
    return s[3:-3, 3:-3].mean()
  return np.array([[one(x, y) for x, y in zip(*rows)] for rows in zip(np.float64(a), np.float64(b))])


def test_ssim_equals_the_reference():
  a, b = frames(1, (2, 3, 16, 21)), frames(2, (2, 3, 16, 21))
  dots = np.where(frames(3, a.shape) > 0.9, b, 0)                                  # sparse, as digits are
  for x, y in ((a, b), (a, 0.7 * a + 0.3 * b), (dots, 0 * dots), (dots, np.roll(dots, 1, 3)), (1 - a, a)):
    np.testing.assert_allclose(quality.ssim(x, y), reference_ssim(x, y), atol=2e-5)
  np.testing.assert_allclose(quality.ssim(a, a), 1, atol=1e-6)
  assert 'pred_ssim' not in quality.sums(a[..., :6], None, b[..., :6], ONES[:2], 'pred')


def test_the_oracle_is_exact_and_the_wrong_frame_is_not():
  film = frames(4, (2, 8, 16, 16))
  past, future = film[:, :4], film[:, 4:]
  mask = np.ones(2, np.float32)
  right = values(quality.sums(future, None, future, mask, 'pred'))
  assert all(v == 0 for k, v in right.items() if 'mse' in k or 'mae' in k)
  np.testing.assert_allclose([right['pred_ssim'], right['pred_psnr_db']], [1, 100], atol=1e-5)
  late = values(quality.sums(film[:, 3:-1], None, future, mask, 'pred'))           # every frame one too late
  want = ((np.float64(film[:, 3:-1]) - future)**2).sum((2, 3))
  np.testing.assert_allclose(late['pred_mse_per_frame'], want.mean(), rtol=1e-5)
  assert late['pred_mse_per_frame'] > 10 and late['pred_ssim'] < 0.5


def test_baselines_equal_numpy():
  past, future = frames(5), frames(6, (3, 5, 9, 12))
  got = values(quality.baselines(past, future, ONES))
  copied = ((np.float64(past[:, -1:]) - future)**2).sum((2, 3))
  want = {f'copy_last_mse_per_frame/{t + 1:02d}': copied[:, t].mean() for t in range(5)}
  want |= {'copy_last_mse_per_frame': copied.mean(), 'zero_mse_per_frame': (np.float64(future)**2).sum((2, 3)).mean()}
  y = np.float64(future)
  want['entropy_nats_per_frame'] = -(y * np.log(y) + (1 - y) * np.log(1 - y)).sum((2, 3)).mean()
  assert set(got) == set(want)
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-5)
  model = values(quality.sums(np.repeat(past[:, -1:], 5, 1), None, future, ONES, 'pred'))
  np.testing.assert_allclose(model['pred_mse_per_frame'], got['copy_last_mse_per_frame'], rtol=1e-6)


def test_state_range():
  tops = np.zeros((3, 4, 2, 2, 5), np.float32)
  tops[0, 1, 0, 0, 2], tops[0, 3, 1, 1, 4], tops[1, 0, 0, 1, 0] = -0.8, 0.4, -0.2
  got = values(quality.state_range(tops, np.array([1, 1, 0], np.float32), 'encoder'))
  want = {'encoder_h_min': -0.5, 'encoder_h_max': 0.2, 'encoder_h_abs': 1.4 / 160}   # of 2 sequences of 80 values
  assert got == pytest.approx(want)
  flat = quality.state_range(tops.reshape(3, 4, -1), np.array([1, 1, 0], np.float32), 'encoder')
  assert values(flat) == pytest.approx(want)


def everything(made, truth, logits, mask):
  return (quality.sums(made, logits, truth, mask, 'pred') | quality.sums(made, None, truth, mask, 'recon')
          | quality.baselines(made, truth, mask) | quality.state_range(logits, mask, 'pred'))


def test_padding_changes_nothing():
  made, truth, logits = frames(7), frames(8), 5 * frames(9)
  want = everything(made[:2], truth[:2], logits[:2], ONES[:2])
  for rubbish in (0, 1e30, np.nan):
    rows = [jnp.concatenate([x[:2], np.full_like(x[2:], rubbish)]) for x in (made, truth, logits)]
    got = everything(*rows, np.array([1, 1, 0], np.float32))
    assert set(got) == set(want)
    for name in want:
      np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)
    nothing = everything(*rows, 0 * ONES)
    assert all(t == 0 and w == 0 for t, w in nothing.values())
    assert values(nothing) == {}
  parts = metrics.merge(metrics.merge({}, everything(made[:1], truth[:1], logits[:1], ONES[:1])),
                        everything(made[1:], truth[1:], logits[1:], ONES[1:]))
  whole = values(everything(made, truth, logits, ONES))
  assert metrics.ratios(parts) == pytest.approx(whole, rel=1e-5)
  assert all(t.shape == w.shape == () for t, w in want.values())
