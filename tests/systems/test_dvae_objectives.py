"""Losses of the discrete VAE: numbers derived by hand, the KL cut in three, against NumPy in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lab.systems.dvae import objectives

decompose = jax.jit(objectives.decomposition, static_argnames=('mixture', 'size'))
kl_uniform, marginal, usage = map(jax.jit, (objectives.kl_uniform, objectives.marginal, objectives.usage))
# two grids, one uniform and one not; both with two equal latents of four codes
EXAMPLE = np.array([[[.25] * 4] * 2, [[.1, .2, .3, .4], [.4, .3, .2, .1]]])
# two deterministic grids, two equal binary latents each
CERTAIN = np.array([[[1, 0]] * 2, [[0, 1]] * 2], float)


def log(q):
  with np.errstate(divide='ignore'):
    return np.log(q)


def lse(x, axis):
  top = x.max(axis, keepdims=True)
  return np.log(np.exp(x - top).sum(axis)) + top.squeeze(axis)


def random_q(rows, latents, codes, seed=0, scale=1.5):
  """(ln q, one-hot samples) in float64."""
  draw = np.random.default_rng(seed)
  logits = draw.normal(size=(rows, latents, codes)) * scale
  log_q = logits - lse(logits, -1)[..., None]
  return log_q, np.eye(codes)[(log_q + draw.gumbel(size=log_q.shape)).argmax(-1)]


def parts_of(log_q, z, mask=None, mixture='batch', size=0):
  mask = np.ones(len(log_q)) if mask is None else mask
  return {k: np.asarray(v) for k, v in decompose(
      jnp.asarray(log_q, 'float32'), jnp.asarray(z, 'float32'), jnp.asarray(mask, 'float32'), mixture=mixture,
      size=size).items()}


def twin(log_q, z, mixture, size):
  """The decomposition in NumPy, float64, one example and one weight after the other."""
  rows, latents, codes = log_q.shape
  out = {k: np.zeros(rows) for k in ('mi', 'tc', 'dwkl', 'kl')}
  for i in range(rows):
    weights = {'batch': np.full(rows, 1 / rows), 'mws': np.full(rows, 1 / rows / size),
               'mss': np.full(rows, 1 / max(rows - 1, 1))}[mixture]
    if mixture == 'mss':
      weights[(i + 1) % rows] = (size - rows + 1) / size / max(rows - 1, 1)
      weights[i] = 1 / size
    each = (z[i][None] * log_q).sum(-1)                              # [j, k]
    joint = lse(each.sum(-1) + np.log(weights), 0)
    single = lse(each + np.log(weights)[:, None], 0).sum()
    own, uniform = each[i].sum(), latents * np.log(codes)
    for name, value in (('mi', own - joint), ('tc', joint - single), ('dwkl', single + uniform), ('kl', own + uniform)):
      out[name][i] = value
  return out


def expected_parts(q):
  """The mean over q of the parts, by enumerating all samples z of both latents."""
  found = {k: 0.0 for k in ('mi', 'tc', 'dwkl', 'kl')}
  for z in itertools.product(range(q.shape[-1]), repeat=q.shape[1]):
    probability = np.prod([q[:, k, c] for k, c in enumerate(z)], axis=0)               # of z, for each grid
    parts = parts_of(log(q), np.tile(np.eye(q.shape[-1])[list(z)], (len(q), 1, 1)))
    for name in found:
      # a sample that a grid never gives has no part in its mean
      found[name] += np.where(probability > 0, probability * np.float64(parts[name]), 0).mean()
  return found


def entropy(p):
  return -(p * log(np.where(p > 0, p, 1))).sum()


# --- StableMax and cross-entropy


def test_stablemax_of_1_minus_1_0():
  # s = (2, 1/2, 1), sum 3.5
  got = objectives.stablemax_log(jnp.array([1.0, -1, 0]))
  np.testing.assert_allclose(np.exp(got), [2 / 3.5, 0.5 / 3.5, 1 / 3.5], rtol=1e-6)
  np.testing.assert_allclose(np.exp(got), [.5714, .1429, .2857], atol=5e-5)


def test_stablemax_is_float32_and_its_gradient_that_of_its_formula():
  x = np.array([[3, -2, 0, 0.5], [1e4, -1e4, 0, -1e-8], [0, 0, 0, 0]])
  got = objectives.stablemax_log(jnp.asarray(x, jnp.float32))
  s = np.where(x >= 0, x + 1, 1 / (1 - np.minimum(x, 0)))
  np.testing.assert_allclose(got, np.log(s / s.sum(-1, keepdims=True)), rtol=1e-5, atol=1e-6)
  assert objectives.stablemax_log(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32
  jacobian = jax.jit(jax.vmap(jax.jacobian(objectives.stablemax_log)))(jnp.asarray(x, jnp.float32))
  # d ln p_i / d x_j = (i = j - p_j) / (1 + |x_j|)
  p = s / s.sum(-1, keepdims=True)
  np.testing.assert_allclose(jacobian, (np.eye(4) - p[:, None]) / (1 + np.abs(x))[:, None], atol=1e-6)


@pytest.mark.parametrize('stablemax', [False, True])
@pytest.mark.parametrize('gamma', [0, 0.5, 2.0])
def test_cross_entropy_is_focal_and_weighs_padding(stablemax, gamma):
  draw = np.random.default_rng(0)
  logits, labels = draw.normal(size=(3, 5, 6)) * 3, draw.integers(6, size=(3, 5))
  assert (labels == 5).any()
  s = np.where(logits >= 0, logits + 1, 1 / (1 - np.minimum(logits, 0))) if stablemax else np.exp(logits)
  p = np.take_along_axis(s / s.sum(-1, keepdims=True), labels[..., None], -1)[..., 0]
  expected_weight = np.where(labels == 5, 0.1, 1)
  nats, weight = objectives.cross_entropy(jnp.asarray(logits, 'float32'), jnp.asarray(labels), pad=5, pad_weight=0.1,
                                          gamma=gamma, stablemax=stablemax)
  assert nats.dtype == weight.dtype == jnp.float32
  np.testing.assert_allclose(weight, expected_weight, rtol=1e-6)
  np.testing.assert_allclose(nats, expected_weight * (1 - p)**gamma * -np.log(p), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('gamma', [0, 0.5, 1, 2.0])
def test_cross_entropy_of_sure_logits_has_a_finite_gradient(gamma):
  logits = jnp.array([[[1e4, -1e4, 0], [-1e4, 1e4, 0], [40.0, 0, 0]]])
  for stablemax in (False, True):
    loss = lambda x: objectives.cross_entropy(x, jnp.zeros((1, 3), jnp.int32), pad=2, pad_weight=0.0, gamma=gamma,
                                              stablemax=stablemax)[0].sum()
    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    assert np.isfinite(value) and np.isfinite(gradient).all()


# --- KL and marginals


def test_kl_to_uniform_is_a_sum_over_latents_of_each_example():
  # ln 4 - H(.1, .2, .3, .4) = .106440 for each of two latents; batch mean half of the sum
  kl = kl_uniform(jnp.asarray(log(EXAMPLE), 'float32'))
  np.testing.assert_allclose(kl, [0, 2 * (np.log(4) - entropy(EXAMPLE[1, 0]))], rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(kl.mean(), .106440, atol=1e-6)


def test_kl_to_uniform_is_0_for_no_opinion_n_ln_c_for_certainty_and_never_negative():
  for codes in (2, 512, 1024):
    flat = jax.nn.log_softmax(jnp.full((2, 64, codes), 3.7))
    np.testing.assert_allclose(kl_uniform(flat), 0, atol=1e-6)
    sure = jax.nn.log_softmax(jnp.full((2, 64, codes), -1e4).at[..., 1].set(1e4))
    np.testing.assert_allclose(kl_uniform(sure), 64 * np.log(codes), rtol=1e-5)
    absent = jnp.full((1, 64, codes), -jnp.inf).at[..., 0].set(0)
    np.testing.assert_allclose(kl_uniform(absent), 64 * np.log(codes), rtol=1e-5)
    # nearly no opinion: 1e-8 a latent drowns in the rounding of ln q, 1e-7, unless it is summed as squares
    near = (3.7 + 1e-4 * np.random.default_rng(codes).normal(size=(8, 64, codes))).astype('f')
    log_q = np.float64(near) - lse(np.float64(near), -1)[..., None]
    expected = (np.exp(log_q) * (log_q + np.log(codes))).sum((1, 2))
    np.testing.assert_allclose(kl_uniform(jax.nn.log_softmax(near)), expected, rtol=1e-2)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_kl_to_uniform_does_not_depend_on_the_batch(dtype):
  logits = jax.random.normal(jax.random.key(0), (32, 8, 16)).astype(dtype)
  log_q = jax.nn.log_softmax(logits.astype(jnp.float32))
  whole = kl_uniform(log_q)
  q = np.exp(np.float64(log_q))
  np.testing.assert_allclose(whole, (q * (np.float64(log_q) + np.log(16))).sum((1, 2)), rtol=1e-5)
  np.testing.assert_allclose(whole[3], kl_uniform(log_q[3:4])[0], rtol=1e-6)


def test_kl_to_uniform_has_the_gradient_of_its_formula():
  logits = np.random.default_rng(0).normal(size=(2, 3, 5))
  gradient = jax.grad(lambda x: kl_uniform(jax.nn.log_softmax(x)).sum())(jnp.asarray(logits, 'float32'))
  log_q = logits - lse(logits, -1)[..., None]
  q = np.exp(log_q)
  # d sum q ln q / d logits = q (ln q - sum q ln q)
  np.testing.assert_allclose(gradient, q * (log_q - (q * log_q).sum(-1, keepdims=True)), atol=1e-6)


def test_marginals_are_means_over_real_rows():
  log_q, _ = random_q(5, 3, 4)
  log_q[1] = np.nan                                                  # padding may hold anything
  mask = jnp.array([1.0, 0, 1, 1, 0])
  got = marginal(jnp.asarray(log_q, 'float32'), mask)
  np.testing.assert_allclose(got, np.exp(log_q[[0, 2, 3]]).mean(0), rtol=1e-5)
  assert not marginal(jnp.asarray(log_q, 'float32'), jnp.zeros(5)).any()
  gradient = jax.grad(lambda x: (marginal(x, mask)**2).sum())(jnp.asarray(log_q, 'float32'))
  assert np.isfinite(gradient).all() and not gradient[1].any() and gradient[0].any()


def test_a_running_marginal_begins_with_the_first_batch_and_passes_gradients_to_the_new_part():
  old, new = jnp.full((2, 3), 0.5), jnp.full((2, 3), 0.3)
  np.testing.assert_array_equal(objectives.running(old, new, 0.99, jnp.float32(0)), new)
  np.testing.assert_allclose(objectives.running(old, new, 0.9, jnp.float32(1)), .9 * .5 + .1 * .3, rtol=1e-6)
  to_old, to_new = jax.grad(lambda a, b: objectives.running(a, b, 0.9, jnp.float32(1)).sum(), (0, 1))(old, new)
  assert not to_old.any()
  np.testing.assert_allclose(to_new, 0.1, rtol=1e-5)


def test_usage_is_the_divergence_of_the_mean_from_uniform():
  # the mean over both grids and latents: (.25 + .25 + .1 + .4) / 4 = .25 and so on: uniform
  two = jnp.ones(2)
  np.testing.assert_allclose(usage(jnp.asarray(log(EXAMPLE), 'float32'), two), 0, atol=1e-6)
  # of the second grid's first latent only: ln 4 - H(.1, .2, .3, .4)
  one = jnp.asarray(log(EXAMPLE[1:, :1]), 'float32')
  np.testing.assert_allclose(usage(one, jnp.ones(1)), np.log(4) - entropy(EXAMPLE[1, 0]), rtol=1e-5)
  certain = jnp.asarray(log(CERTAIN), 'float32')
  np.testing.assert_allclose(usage(certain, two), 0, atol=1e-6)
  np.testing.assert_allclose(usage(certain, jnp.array([1.0, 0])), np.log(2), rtol=1e-6)
  assert usage(certain, jnp.zeros(2)) == 0
  for mask in (two, jnp.array([1.0, 0]), jnp.zeros(2)):
    assert np.isfinite(jax.grad(usage)(certain, mask)).all()


def test_usage_s_gradient_is_that_of_its_formula():
  logits = np.random.default_rng(3).normal(size=(3, 2, 5))
  mask = np.array([1, 0, 1.0])
  gradient = jax.grad(lambda x: usage(jax.nn.log_softmax(x), jnp.asarray(mask, 'float32')))(
      jnp.asarray(logits, 'float32'))
  log_q = logits - lse(logits, -1)[..., None]
  q = np.exp(log_q)
  outer = np.log(q[[0, 2]].mean((0, 1))) / 4 * mask[:, None, None]   # d sum m ln m / d q: ln m + 1, over four q
  np.testing.assert_allclose(gradient, q * (outer - (q * outer).sum(-1, keepdims=True)), atol=1e-6)


# --- the KL cut in three


def test_the_parts_of_a_mixture_of_two_grids():
  found = expected_parts(EXAMPLE)
  # exactly, from the mixture p(z) = mean of q(z_1) q(z_2) and its marginals m_k
  joint = (EXAMPLE[:, 0, :, None] * EXAMPLE[:, 1, None, :]).mean(0)
  marginals = EXAMPLE.mean(0)
  tc = sum(map(entropy, marginals)) - entropy(joint)
  dwkl = sum(np.log(4) - entropy(m) for m in marginals)
  mi = entropy(joint) - np.mean([sum(map(entropy, q)) for q in EXAMPLE])
  expected = {'kl': .106440, 'dwkl': .050709, 'tc': .001473, 'mi': .054259}
  for name, value in {'tc': tc, 'dwkl': dwkl, 'mi': mi, 'kl': tc + dwkl + mi}.items():
    np.testing.assert_allclose(value, expected[name], atol=1e-6)     # a kl of .10644 rounds to that
    np.testing.assert_allclose(found[name], value, atol=2e-6)


def test_the_parts_of_two_deterministic_grids():
  # the grid tells both latents, and each latent the other: ln 2 each; each latent alone is uniform
  found = expected_parts(CERTAIN)
  for name, value in {'kl': 2 * np.log(2), 'tc': np.log(2), 'mi': np.log(2), 'dwkl': 0}.items():
    np.testing.assert_allclose(found[name], value, atol=1e-5)


def test_against_marginals_alone_nothing_is_left_for_the_total_correlation():
  log_q, _ = random_q(6, 3, 4)
  for q in (EXAMPLE, np.exp(log_q), CERTAIN):
    inputs = jnp.asarray(log(q), 'float32')
    parts = objectives.running_parts(inputs, marginal(inputs, jnp.ones(len(q))))
    m = q.mean(0)[None]
    np.testing.assert_allclose(parts['mi'], (q * (log(np.where(q > 0, q, 1)) - log(m))).sum((1, 2)), atol=1e-5)
    np.testing.assert_allclose(parts['dwkl'], (q * log(m * q.shape[-1])).sum((1, 2)), atol=1e-5)
    # what was once taken for the total correlation, KL - MI - DWKL, is 0 whatever q is; the true one of EXAMPLE is
    # .001473 and that of CERTAIN ln 2
    np.testing.assert_allclose(kl_uniform(inputs) - parts['mi'] - parts['dwkl'], 0, atol=1e-5)


@pytest.mark.parametrize('mixture', objectives.MIXTURES)
def test_parts_are_those_of_numpy_and_add_up_for_each_example(mixture):
  for rows, latents, codes, size in ((7, 3, 5, 40), (2, 4, 3, 2), (1, 2, 3, 9)):
    log_q, z = random_q(rows, latents, codes, seed=rows)
    got, expected = parts_of(log_q, z, mixture=mixture, size=size), twin(log_q, z, mixture, size)
    for name, value in expected.items():
      np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got['mi'] + got['tc'] + got['dwkl'], got['kl'], atol=1e-5)
    np.testing.assert_allclose(got['kl'], (z * log_q).sum((1, 2)) + latents * np.log(codes), rtol=1e-4, atol=1e-5)


def test_a_data_set_counts_as_no_smaller_than_the_batch():
  log_q, z = random_q(7, 3, 5)
  jax.tree.map(np.testing.assert_array_equal, parts_of(log_q, z, mixture='mss', size=2),
               parts_of(log_q, z, mixture='mss', size=7))


def test_mutual_information_is_at_most_ln_b():
  log_q, z = random_q(16, 8, 32, scale=20)
  mi = parts_of(log_q, z)['mi']
  assert (mi <= np.log(16) + 1e-5).all()
  np.testing.assert_allclose(mi, np.log(16), rtol=1e-3)              # grids that differ nearly surely reach it
  # and is 0 where all grids are equal
  np.testing.assert_allclose(parts_of(np.tile(log_q[:1], (16, 1, 1)), z)['mi'], 0, atol=1e-4)


@pytest.mark.parametrize('mixture', objectives.MIXTURES)
def test_padding_is_neither_an_example_nor_part_of_the_mixture(mixture):
  log_q, z = random_q(8, 3, 5, seed=4)
  real = np.array([1, 1, 0, 1, 1, 0, 0, 1.0])
  alone = twin(log_q[real > 0], z[real > 0], mixture, 50)
  log_q[2], z[2] = np.nan, np.inf
  got = parts_of(log_q, z, real, mixture, 50)
  for name, value in alone.items():
    np.testing.assert_allclose(got[name][real > 0], value, rtol=1e-4, atol=1e-5)
    assert not got[name][real == 0].any()
  gradients = jax.grad(lambda *x: sum(v.sum() for v in decompose(
      *x, jnp.asarray(real, 'float32'), mixture=mixture, size=50).values()), (0, 1))(
          jnp.asarray(log_q, 'float32'), jnp.asarray(z, 'float32'))
  for g in gradients:
    assert np.isfinite(g).all() and not g[real == 0].any() and g[real > 0].any()
  assert not any(v.any() for v in parts_of(log_q, z, np.zeros(8), mixture, 50).values())


@pytest.mark.parametrize('mixture', objectives.MIXTURES)
@pytest.mark.parametrize('name', ['mi', 'tc', 'dwkl'])
def test_gradients_reach_both_factors(name, mixture):
  log_q, z = random_q(5, 2, 3, seed=6)
  got = jax.grad(lambda *x: decompose(*x, jnp.ones(5), mixture=mixture, size=30)[name].sum(), (0, 1))(
      jnp.asarray(log_q, 'float32'), jnp.asarray(z, 'float32'))
  for which, gradient in enumerate(got):
    for place in ((0, 0, 0), (2, 1, 2), (4, 1, 1)):
      moved = [[log_q.copy(), z.copy()] for _ in range(2)]
      moved[0][which][place] += 1e-5
      moved[1][which][place] -= 1e-5
      above, below = (twin(*m, mixture, 30)[name].sum() for m in moved)
      np.testing.assert_allclose(gradient[place], (above - below) / 2e-5, rtol=1e-3, atol=1e-4)
    assert np.abs(gradient).max() > 1e-2


@pytest.mark.parametrize('mixture', objectives.MIXTURES)
def test_gradients_of_certain_codes_are_finite(mixture):
  logits = jnp.where(jax.nn.one_hot(jnp.arange(6) % 4, 4) > 0, 1e4, -1e4)[:, None] * jnp.ones((1, 3, 1))
  z = jax.nn.one_hot(logits.argmax(-1), 4)

  def total(logits, z):
    log_q = jax.nn.log_softmax(logits)
    parts = decompose(log_q, z, jnp.ones(6), mixture=mixture, size=10)
    return sum(v.sum() for v in parts.values()) + kl_uniform(log_q).sum() + usage(
        log_q, jnp.ones(6))

  value, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(logits, z)
  assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)


# pieces of one example; and four pieces of four, the last of them with three places that are empty
@pytest.mark.parametrize('mixture, largest', [('batch', 1), ('mss', 13 * 13 * 3 // 4 + 1)])
def test_pieces_give_the_same_parts_and_gradients(mixture, largest, monkeypatch):
  log_q, z = (jnp.asarray(x, 'float32') for x in random_q(13, 3, 5, seed=8))
  mask = jnp.ones(13).at[jnp.array([3, 12])].set(0)

  def weighted(log_q, z):
    parts = objectives.decomposition(log_q, z, mask, mixture=mixture, size=60)
    return parts['mi'].sum() + 2 * parts['tc'].sum() + 3 * parts['dwkl'].sum(), parts

  def both():
    (_, parts), gradients = jax.jit(jax.value_and_grad(lambda *x: weighted(*x), (0, 1), has_aux=True))(log_q, z)
    return parts, gradients

  whole = both()
  monkeypatch.setattr(objectives, 'LARGEST', largest)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), both(), whole)


def test_eight_devices_mix_the_global_batch():
  mesh = Mesh(np.array(jax.devices()[:8]), ('data',))
  log_q, z = (jnp.asarray(x, 'float32') for x in random_q(16, 3, 5, seed=9))
  mask = jnp.ones(16).at[15].set(0)
  cut = (jax.device_put(x, NamedSharding(mesh, P('data'))) for x in (log_q, z, mask))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
               *(decompose(*x, mixture='mss', size=99) for x in (cut, (log_q, z, mask))))
