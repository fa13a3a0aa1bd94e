"""The generator of Moving MNIST: its published statistics, motion and drawing against NumPy and by hand."""

import functools
import gzip
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipelines import moving_mnist
from lab.systems.video import config, generate
from tests.conftest import ROOT

MNIST = os.path.join(ROOT, '..', 'shared', 'data', 'video', 'mnist', 't10k-images-idx3-ubyte.gz')


def settings(**changes):
  section = config.get_config().data
  section.update(changes)
  return section


@pytest.fixture(scope='module')
def mnist():
  """u8[10000, 28, 28]: the test digits, which the public file shows."""
  if not os.path.exists(MNIST):
    pytest.skip('MNIST is not here: statistics need real digits')
  with gzip.open(MNIST) as f:
    return np.frombuffer(f.read(), np.uint8, offset=16).reshape(-1, 28, 28)


def numbers(count, seed=0):
  return np.stack([np.full(count, seed), np.arange(count)], 1).astype(np.uint32)


def digits(count, n=2, seed=0, side=28):
  """u8[count, n, side, side]: noise, bright up to the last row and column, so that what is cut off shows."""
  return np.random.default_rng(seed).integers(1, 256, (count, n, side, side), np.uint8)


@functools.cache
def program(frames, size, **changes):
  return jax.jit(lambda d, n: generate.sequences(d, n, frames, size, settings(**changes)))


def moves(count, seed=0, n=2, **changes):
  """f32[count, n, 2] each: starts and velocities."""
  draw = lambda i: generate.motion(jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), i), n,
                                   settings(**changes))
  return map(np.asarray, jax.jit(jax.vmap(draw))(jnp.arange(count)))


def walk(start, velocity, frames, bounce, kind=np.float32):
  """The definition, a coordinate at a time: kind[frames, ...]."""
  position, velocity = start.astype(kind).copy(), velocity.astype(kind).copy()
  out = []
  for _ in range(frames):
    position += velocity
    for i in np.ndindex(position.shape):
      p = position[i]
      if p < 0 or p > 1:
        velocity[i] = -velocity[i]
        position[i] = min(max(p, 0), 1) if bounce == 'clamp' else -p if p < 0 else 2 - p
    out.append(position.copy())
  return np.stack(out)


def statistics(made, past):
  """Mean pixel, share above 0; a frame's entropy in nats and squared error of black and of the last seen frame."""
  pixels, share = made.shape[2] * made.shape[3], np.bincount(made.ravel(), minlength=256) / made.size
  p = np.arange(256) / 255
  inner = p[1:-1]
  entropy = share[1:-1] @ -(inner * np.log(inner) + (1 - inner) * np.log(1 - inner))
  future, last = made[:, past:].astype(np.int32), made[:, past - 1:past].astype(np.int32)
  scale = pixels / 255**2
  return share @ p, 1 - share[0], pixels * entropy, scale * (future**2).mean(), scale * ((future - last)**2).mean()


def generated(mnist, run, count, n, past, batch=256, seed=0):
  """The mean of the statistics of `count` sequences."""
  rng, found = np.random.default_rng(seed), []
  for i in range(0, count, batch):
    chosen = mnist[rng.integers(0, len(mnist), (batch, n))]
    found.append(statistics(np.asarray(run(chosen, numbers(count, seed)[i:i + batch])), past))
  return np.mean(found, 0)


# --- statistics: those of the public test file, and of the validated generator of Kalchbrenner et al. 2017

def test_statistics_are_the_published_ones(mnist):
  mean, share, entropy, zero, copy = generated(mnist, program(20, 64), 6144, 2, 10)
  assert abs(mean - 0.0493) < 0.0007
  assert abs(share - 0.0709) < 0.001
  assert abs(entropy - 86.3) < 1
  assert abs(zero - 174.3) < 2.5
  assert abs(copy - 286) < 3


def test_statistics_of_small_frames(mnist):
  *_, entropy, zero, copy = generated(mnist, program(10, 16, pool=4), 8192, 1, 5, 1024)
  np.testing.assert_allclose([zero, copy, entropy], [3.51, 4.85, 8.77], rtol=0.03)


# --- motion

def test_motion_is_uniform():
  start, velocity = moves(20_000, n=2)
  for values in (start[..., 0], start[..., 1]):           # uniform: mean 1/2, variance 1/12, of 40,000
    assert abs(values.mean() - 1 / 2) < 5 * (1 / 12 / values.size)**0.5
    assert abs(values.var() - 1 / 12) < 0.002
  np.testing.assert_allclose(np.hypot(velocity[..., 0], velocity[..., 1]), 0.1, rtol=0, atol=2e-7)
  angle = np.arctan2(velocity[..., 1], velocity[..., 0]) % (2 * np.pi) / (2 * np.pi)
  share = np.histogram(angle, 8, (0, 1))[0] / angle.size
  np.testing.assert_allclose(share, 1 / 8, atol=0.01)     # 6 standard errors
  pairs = [start[:, 0, 0], start[:, 0, 1], start[:, 1, 0], start[:, 1, 1], *velocity.reshape(-1, 4).T]
  assert np.abs(np.corrcoef(pairs) - np.eye(8)).max() < 0.04


def test_speeds_span_their_range():
  _, velocity = moves(20_000, speed_min=0.05, speed_max=0.15)
  speed = np.hypot(velocity[..., 0], velocity[..., 1])
  assert 0.05 - 1e-6 < speed.min() < 0.0505 and 0.1495 < speed.max() < 0.15 + 1e-6
  assert abs(speed.mean() - 0.1) < 0.001


@pytest.mark.parametrize('bounce', ['clamp', 'reflect'])
def test_paths_by_hand(bounce):
  # in sixteenths, all exact: the first digit passes the right and the upper wall, the second one comes to touch them
  start, velocity = np.float32([[12, 3], [14, 8]]) / 16, np.float32([[3, -5], [2, -8]]) / 16
  want = {'clamp': [[15, 16, 13, 10, 7], [0, 5, 10, 15, 16], [16, 16, 14, 12, 10], [0, 0, 8, 16, 16]],
          'reflect': [[15, 14, 11, 8, 5], [2, 7, 12, 15, 10], [16, 14, 12, 10, 8], [0, 8, 16, 8, 0]]}[bounce]
  for found in (generate.paths(start, velocity, 5, bounce), moving_mnist.paths(start, velocity, 5, bounce)):
    np.testing.assert_array_equal(16 * np.asarray(found).reshape(5, 4), np.transpose(want))


@pytest.mark.parametrize('bounce', ['clamp', 'reflect'])
def test_paths_are_exact(bounce):
  """One program from the key to the path, in which compilers may contract, equals NumPy's steps, also in float64."""
  data, count = settings(speed_min=0.02, speed_max=0.6), 200

  def one(i):
    start, velocity = generate.motion(jax.random.fold_in(jax.random.key(3, impl='threefry2x32'), i), 2, data)
    return start, velocity, generate.paths(start, velocity, 50, bounce)

  start, velocity, got = map(np.asarray, jax.jit(jax.vmap(one))(jnp.arange(count)))
  want = walk(start, velocity, 50, bounce)
  np.testing.assert_array_equal(np.moveaxis(got, 1, 0), want)
  np.testing.assert_array_equal(want, walk(start, velocity, 50, bounce, np.float64))
  assert got.min() >= 0 and got.max() <= 1


# --- drawing

def test_pool_rounds_half_to_even():
  got = {}
  for k in (1, 2, 4, 7, 14, 28):
    x = np.random.default_rng(k).integers(0, 256, (50, 2, 28, 28), np.uint8)
    got[k] = np.asarray(generate.pool(jnp.asarray(x), k))
    want = np.rint(x.reshape(50, 2, 28 // k, k, 28 // k, k).mean((3, 5)))         # rint: half to even
    np.testing.assert_array_equal(got[k], want.astype(np.uint8))
    assert got[k].dtype == np.uint8
  halves = jnp.array([[[0, 1], [1, 0]], [[1, 2], [2, 1]], [[255, 255], [255, 253]]], jnp.uint8)
  np.testing.assert_array_equal(generate.pool(halves, 2)[:, 0, 0], [0, 2, 254])    # means .5, 1.5, 254.5


def test_corner_is_truncated_and_x_is_the_column():
  digit = digits(1, 1, side=3)[0]
  paths = np.array([[[0, 0]], [[1, 1]], [[0.5, 0.99]], [[0.24, 1]]], np.float32)   # canvas 10 - 3 = 7
  got = np.asarray(generate.render(digit, paths, 10))
  for frame, (x, y) in zip(got, [(0, 0), (7, 7), (3, 6), (1, 7)]):
    want = np.zeros((10, 10), np.uint8)
    want[y:y + 3, x:x + 3] = digit[0]
    np.testing.assert_array_equal(frame, want)


def test_sequences_equal_a_loop():
  """Byte by byte, from start and velocity on: steps, bounces, corners and the maximum of overlapping digits."""
  count, frames, size = 24, 20, 64
  made = np.asarray(program(frames, size)(digits(count), numbers(count, 5)))
  start, velocity = moves(count, seed=5)
  for i in range(count):
    want = np.zeros((frames, size, size), np.uint8)
    for frame, places in zip(want, walk(start[i], velocity[i], frames, 'clamp')):
      for digit, (x, y) in zip(digits(count)[i], np.trunc(np.float32(36) * places).astype(int)):
        np.maximum(frame[y:y + 28, x:x + 28], digit, out=frame[y:y + 28, x:x + 28])
    np.testing.assert_array_equal(made[i], want)


@pytest.mark.parametrize('bounce', ['clamp', 'reflect'])
def test_digits_never_leave(bounce):
  # every pixel of the digit is bright: 28 * 28 of them show at all times
  made = program(100, 64, bounce=bounce, speed_max=1.0)(np.full((64, 1, 28, 28), 9, np.uint8), numbers(64))
  np.testing.assert_array_equal((np.asarray(made) == 9).sum((2, 3)), 28 * 28)


def test_the_same_number_gives_the_same_bytes():
  run, d = program(20, 64), digits(8)
  whole = np.asarray(run(d, numbers(8)))
  assert whole.dtype == np.uint8 and whole.shape == (8, 20, 64, 64)
  with jax.default_prng_impl('rbg'):
    np.testing.assert_array_equal(program.__wrapped__(20, 64)(d, numbers(8)), whole)
  np.testing.assert_array_equal(run(d[3:5], numbers(8)[3:5]), whole[3:5])           # whatever stands beside it
  assert len(np.unique(np.asarray(run(d[:1].repeat(8, 0), numbers(8))).reshape(8, -1), axis=0)) == 8
  assert (np.asarray(run(d, numbers(8, seed=1))) != whole).any((1, 2, 3)).all()


@pytest.mark.parametrize('bounce', ['clamp', 'reflect'])
@pytest.mark.parametrize('n, pool, size', [(2, 1, 64), (3, 1, 50), (1, 4, 16)])
def test_the_numpy_twin_draws_the_same_bytes(n, pool, size, bounce):
  changes = {'bounce': bounce, 'pool': pool, 'speed_min': 0.02, 'speed_max': 0.4}
  d = digits(60, n)
  made = np.asarray(program(20, size, **changes)(d, numbers(60, 7)))
  for i, (start, velocity) in enumerate(zip(*moves(60, seed=7, n=n, **changes))):
    small = moving_mnist.pool(d[i], pool)
    paths = moving_mnist.paths(start, velocity, 20, bounce)
    np.testing.assert_array_equal(moving_mnist.render(small, paths, size), made[i])


def test_clip_takes_either_kind_of_batch():
  whole = config.get_config()
  made = program(20, 64)(digits(2), numbers(2))
  for batch in ({'digits': digits(2), 'number': numbers(2)}, {'video': made}):
    got = generate.clip(batch, whole)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, np.asarray(made) / 255.0, rtol=1e-7)
