"""Quantizers: gradients against exact ones, a codebook against NumPy and on eight devices, scalar codes both ways."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lab.systems.dvae import quantizers

LOGITS = np.array([1, 0, -1], 'f')
UPSTREAM = np.array([1, 2, 3], 'f')


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def through(p, v):
  """The vector-Jacobian product of a softmax that gave p."""
  return p * (v - (p * v).sum(-1, keepdims=True))


def reinmax_vjp(logits, sample, tau, g):
  """ReinMax in NumPy, float64."""
  p0 = softmax(logits)
  return through((sample + softmax(logits / tau)) / 2, 2 * g) - through(p0, g / 2)


def pull(quantize, logits, noise, tau, g):
  return jax.vjp(lambda x: quantize(x, noise, tau), jnp.asarray(logits))[1](jnp.asarray(g))[0]


def choosing(c, codes):
  """Noise with which code c is drawn."""
  return np.float32(1e3) * np.eye(codes, dtype='f')[c]


def quadratic(seed, codes=5):
  """Logits, f(D) = D'AD + b'D at each one-hot D, its gradient there, and the exact gradient of E f(D)."""
  draw = np.random.default_rng(seed)
  a, b, logits = draw.normal(size=(codes, codes)), draw.normal(size=codes), draw.normal(size=codes)
  return logits, (a + a.T) + b, through(softmax(logits), np.diag(a) + b)


def test_a_soft_sample_is_the_tempered_softmax_in_float32():
  draw = np.random.default_rng(0)
  logits, noise = draw.normal(size=(2, 3, 7)), draw.gumbel(size=(2, 3, 7))
  got = quantizers.soft(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(noise, 'float32'), jnp.float32(0.5))
  assert got.dtype == jnp.float32
  expected = softmax((np.asarray(jnp.asarray(logits, jnp.bfloat16), 'f') + noise) / .5)
  np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)


def test_straight_through_is_one_hot_with_the_gradient_of_the_soft_sample():
  draw = np.random.default_rng(1)
  logits, noise, g = draw.normal(size=(3, 4, 6)).astype('f')
  for tau in (1, 0.25, 1 / 16):
    got = quantizers.straight_through(jnp.asarray(logits), jnp.asarray(noise), tau)
    np.testing.assert_array_equal(got, np.eye(6)[(logits + noise).argmax(-1)])         # exactly 0 or 1
    np.testing.assert_allclose(pull(quantizers.straight_through, logits, noise, tau, g),
                               pull(quantizers.soft, logits, noise, tau, g), rtol=1e-6)
  # softmax (.66524, .24473, .09003), <p, g> = 1.42479: p (g - 1.42479)
  np.testing.assert_allclose(pull(quantizers.straight_through, LOGITS, np.zeros(3, 'f'), 1, UPSTREAM),
                             [-0.282587, 0.140770, 0.141817], atol=1e-6)


def test_reinmax_is_one_hot_with_algorithm_2_s_gradient():
  # p1 = (.83262, .12236, .04501), <p1, 2g> = 2.42479; p0 = (.66524, .24473, .09003), <p0, g/2> = .71239:
  # .83262 (2 - 2.42479) - .66524 (.5 - .71239) = -.21240 and so on
  np.testing.assert_allclose(pull(quantizers.reinmax, LOGITS, np.zeros(3, 'f'), 1.0, UPSTREAM),
                             [-0.212395, 0.122364, 0.090031], atol=1e-6)
  draw = np.random.default_rng(2)
  logits, noise, g = draw.normal(size=(3, 2, 4, 6)).astype('f')
  for tau in (1.0, 1.3, 4):
    sample = np.eye(6)[(logits + noise).argmax(-1)]
    np.testing.assert_array_equal(quantizers.reinmax(jnp.asarray(logits), jnp.asarray(noise), tau), sample)
    np.testing.assert_allclose(pull(quantizers.reinmax, logits, noise, tau, g),
                               reinmax_vjp(np.float64(logits), sample, tau, g), rtol=1e-4, atol=1e-6)


def test_reinmax_follows_the_paper_s_own_form():
  """Algorithm 2 as printed: p1 again as a softmax whose value is p1; 2 p1 - p0 / 2 carries the gradient."""
  def printed(logits, noise, tau):
    sample = jax.nn.one_hot((logits + noise).argmax(-1), 6)
    p0 = jax.nn.softmax(logits)
    p1 = (sample + jax.nn.softmax(logits / tau)) / 2
    p1 = jax.nn.softmax(jax.lax.stop_gradient(jnp.log(p1) - logits) + logits)
    p2 = 2 * p1 - p0 / 2
    return sample + p2 - jax.lax.stop_gradient(p2)

  logits, noise, g = np.random.default_rng(3).normal(size=(3, 8, 6)).astype('f')
  np.testing.assert_allclose(pull(quantizers.reinmax, logits, noise, 1.5, g), pull(printed, logits, noise, 1.5, g),
                             atol=2e-6)


def test_reinmax_takes_its_temperature_traced_and_gives_it_and_the_noise_no_gradient():
  noise, g = np.random.default_rng(4).gumbel(size=3).astype('f'), jnp.asarray(UPSTREAM)
  gradient = jax.jit(jax.grad(lambda *x: (quantizers.reinmax(*x) * g).sum(), (0, 1, 2)))
  logits, no_noise, no_tau = gradient(jnp.asarray(LOGITS), jnp.asarray(noise), jnp.float32(2))
  np.testing.assert_allclose(logits, pull(quantizers.reinmax, LOGITS, noise, 2.0, UPSTREAM), rtol=1e-6)
  assert not no_noise.any() and no_tau == 0 and logits.any()


@pytest.mark.parametrize('quantize', [quantizers.soft, quantizers.straight_through, quantizers.reinmax])
def test_gradients_are_finite_however_sure_the_logits_are(quantize):
  logits = np.array([[1e4, -1e4, 0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4]], 'f')
  for tau in (1.0, 1 / 16):
    got = quantize(jnp.asarray(logits), jnp.zeros((3, 3)), tau)
    np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-6)
    assert np.isfinite(pull(quantize, logits, np.zeros((3, 3), 'f'), tau, np.tile(UPSTREAM, (3, 1)))).all()


def test_reinmax_is_exact_for_quadratics():
  """The expectation over D of D's probability times the gradient at D, by enumeration, in float64 to 1e-10."""
  for seed in range(6):
    logits, gradients, exact = quadratic(seed)
    p, samples = softmax(logits), np.eye(5)
    twin = sum(p[c] * reinmax_vjp(logits, samples[c], 1, gradients[c]) for c in range(5))
    np.testing.assert_allclose(twin, exact, atol=1e-10, rtol=0)
    with jax.enable_x64(True):
      ours = sum(p[c] * pull(quantizers.reinmax, logits, choosing(c, 5), 1.0, gradients[c]) for c in range(5))
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, exact, atol=1e-10, rtol=0)
    ours = sum(p[c] * np.float64(pull(quantizers.reinmax, logits.astype('f'), choosing(c, 5), 1.0,
                                      gradients[c].astype('f'))) for c in range(5))
    np.testing.assert_allclose(ours, exact, atol=2e-6)
    # straight-through, at noise 0, is not exact: else this test could not fail
    straight = sum(p[c] * through(p, gradients[c]) for c in range(5))
    assert np.abs(straight - exact).max() > 1e-2


def test_a_soft_p0_and_a_minus_would_climb_the_loss():
  """Two slips that were made with algorithm 2: the mean gradient then points away from the exact one."""
  logits, gradients, exact = quadratic(0)
  noise = np.random.default_rng(0).gumbel(size=(100_000, 5))
  choice = (logits + noise).argmax(-1)
  sample, g = np.eye(5)[choice], gradients[choice]

  def cosine(each):
    mean = each.mean(0)
    return mean @ exact / np.linalg.norm(mean) / np.linalg.norm(exact)

  assert cosine(reinmax_vjp(logits, sample, 1, g)) > 0.999
  for tau in (1, 0.5, 0.25):
    y = softmax((logits + noise) / tau)
    # softmax(sg(ln p1 - logits) - logits): another value than p1, and its gradient turned round
    p1 = softmax(np.log((sample + softmax(logits / tau)) / 2) - 2 * logits)
    assert cosine(-through(p1, 2 * g) - through(y, g / 2) / tau) < -0.95
    assert cosine(through(y, g) / tau) > 0.98                       # straight-through
    slipped = noise[:4].astype('f')
    np.testing.assert_allclose(pull(quantizers.straight_through, np.tile(logits, (4, 1)).astype('f'), slipped, tau,
                                    g[:4].astype('f')), through(y[:4], g[:4]) / tau, rtol=1e-3, atol=1e-5)


def test_hard_takes_the_likeliest_without_a_gradient():
  logits = jnp.array([[0, 2, 1], [3, 3, 0]], jnp.float32)
  np.testing.assert_array_equal(quantizers.hard(logits), [[0, 1, 0], [1, 0, 0]])
  assert not jax.grad(lambda x: (quantizers.hard(x) * 3).sum())(logits).any()


# --- a codebook of moving averages


def around(centres, rows, latents, seed, spread=0.05):
  """Latents f32[rows, latents, D] near the centres [K, D], by turns."""
  draw = np.random.default_rng(seed)
  which = np.arange(rows * latents) % len(centres)
  return (centres[which] + spread * draw.normal(size=(rows * latents, centres.shape[1]))
          ).reshape(rows, latents, -1).astype('f')


CENTRES = np.random.default_rng(7).normal(size=(6, 4)) * 3
start, update = jax.jit(quantizers.vq_start, static_argnums=3), jax.jit(quantizers.vq_update)


def test_nearest_is_the_smallest_distance():
  draw = np.random.default_rng(8)
  latents, book = draw.normal(size=(3, 5, 4)).astype('f'), draw.normal(size=(9, 4)).astype('f')
  expected = ((np.float64(latents)[:, :, None] - book)**2).sum(-1).argmin(-1)
  got = quantizers.vq_nearest(jnp.asarray(latents), jnp.asarray(book))
  assert got.dtype == jnp.int32
  np.testing.assert_array_equal(got, expected)


def test_k_means_finds_the_clusters_of_the_real_rows():
  latents, mask = around(CENTRES, 10, 6, 0), np.array([1] * 8 + [0] * 2, 'f')
  latents[8:] = np.nan                                               # padding may hold anything
  # six random latents may share a cluster, and Lloyd then stays there; one of some keys finds all
  errors = []
  for key in range(10):
    state = start(jax.random.key(key), latents, mask, 6)
    assert all(np.isfinite(x).all() for x in state)
    # 8 rows of 6 latents; no code begins with less than twice `least`
    taken = np.bincount(quantizers.vq_nearest(jnp.asarray(latents[:8]), state.codebook).reshape(-1), minlength=6)
    np.testing.assert_array_equal(state.count, np.maximum(taken, 2 * (taken > 0)))
    np.testing.assert_allclose(state.total, state.codebook * state.count[:, None], rtol=1e-6)
    order = np.asarray(quantizers.vq_nearest(jnp.asarray(CENTRES, 'float32'), state.codebook))
    errors.append(np.abs(state.codebook[order] - CENTRES).max())
  assert min(errors) < 0.1


def test_k_means_of_fewer_latents_than_codes_and_of_none():
  latents = np.random.default_rng(1).normal(size=(2, 3, 4)).astype('f')
  state = start(jax.random.key(0), latents, np.array([1, 0], 'f'), 8)
  assert np.isfinite(state.codebook).all()
  # three different latents: each is a code, and nothing else is
  for x in latents[0]:
    assert np.abs(state.codebook - x[None]).max(-1).min() < 1e-6
  for x in state.codebook:
    assert np.abs(latents[0] - x[None]).max(-1).min() < 1e-6
  assert (state.count > 0).sum() == 3
  none = start(jax.random.key(0), latents, np.zeros(2, 'f'), 8)
  jax.tree.map(np.testing.assert_array_equal, none, quantizers.vq_empty(8, 4))
  # the first of equals is near to all of many latents, and their mean; the others are latents
  many = np.random.default_rng(2).normal(size=(2, 60, 4)).astype('f')
  codes = quantizers.vq_nearest(jnp.asarray(many), none.codebook)
  book = np.asarray(update(jax.random.key(1), many, codes, np.ones(2, 'f'), none).codebook)
  np.testing.assert_allclose(book[0], many.mean((0, 1)), rtol=1e-4, atol=1e-6)
  assert {*map(tuple, book[1:])} <= {*map(tuple, many.reshape(-1, 4))} and len({*map(tuple, book)}) == 8


def test_updates_are_moving_averages_of_real_rows():
  draw = np.random.default_rng(9)
  mask = np.array([1, 1, 0, 1], 'f')
  book = draw.normal(size=(5, 3)).astype('f')
  state = quantizers.VQState(jnp.asarray(book), jnp.full(5, 3.0), jnp.asarray(3 * book))
  count, total = np.full(5, 3.0), 3.0 * book
  for step in range(20):
    latents = draw.normal(size=(4, 6, 3)).astype('f')
    codes = np.asarray(quantizers.vq_nearest(jnp.asarray(latents), state.codebook))
    latents[2] = np.inf                                              # padding may hold anything
    state = update(jax.random.key(step), latents, codes, mask, state, 0.9, 0.0)       # least 0: none dies
    count, total = 0.9 * count, 0.9 * total
    for row in (0, 1, 3):
      for x, c in zip(latents[row], codes[row]):
        count[c] += 0.1
        total[c] += 0.1 * x
    np.testing.assert_allclose(state.count, count, rtol=1e-5)
    np.testing.assert_allclose(state.total, total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.codebook, total / count[:, None], rtol=1e-4, atol=1e-5)


def test_dead_codes_become_latents_and_live_on():
  latents, mask = around(CENTRES, 8, 6, 1), np.array([1] * 7 + [0], 'f')
  latents[7] = 1e6
  book = np.concatenate([CENTRES[:2], np.full((4, 4), 50.0)]).astype('f')             # four of six are far from all
  state = quantizers.VQState(jnp.asarray(book), jnp.full(6, 1.0).at[:2].set(20), jnp.asarray(book))
  state = state._replace(total=state.codebook * state.count[:, None])
  codes = quantizers.vq_nearest(jnp.asarray(latents), state.codebook)
  assert set(np.unique(codes[:7])) == {0, 1}
  state = update(jax.random.key(0), latents, codes, mask, state)
  fresh = np.asarray(state.codebook[2:])
  real = latents[:7].reshape(-1, 4)
  rows = [int(np.flatnonzero((real == x).all(-1))[0]) for x in fresh]                 # exactly latents that are real,
  assert len(set(rows)) == 4                                                          # each another one
  np.testing.assert_array_equal(state.count[2:], 2)
  np.testing.assert_allclose(state.total[2:], 2 * fresh)
  # they are used in the next step, for each is nearest to itself, and stay where they are but for its latents
  codes = np.asarray(quantizers.vq_nearest(jnp.asarray(latents), state.codebook))
  assert set(range(2, 6)) <= set(np.unique(codes[:7]))
  moved = update(jax.random.key(1), latents, codes, mask, state)
  assert (moved.count > 1).all()
  for c in range(2, 6):
    took = real[codes[:7].reshape(-1) == c]
    # two shares of the new vector, .99 of them kept, and a hundredth of each latent; nothing of the 50 before
    expected = (1.98 * fresh[c - 2] + 0.01 * took.sum(0)) / (1.98 + 0.01 * len(took))
    np.testing.assert_allclose(moved.codebook[c], expected, rtol=1e-4, atol=1e-5)


def test_a_renewed_code_survives_without_use_and_is_renewed_after_68_steps():
  latents = np.zeros((1, 2, 3), 'f')
  codes = np.zeros((1, 2), 'i')
  state = quantizers.VQState(jnp.zeros((2, 3)), jnp.array([9.0, 0]), jnp.zeros((2, 3)))
  counts = []
  for step in range(71):
    state = update(jax.random.key(step), latents, codes, np.ones(1, 'f'), state)
    counts.append(float(state.count[1]))
  # 2 * .99^68 = 1.0098 and 2 * .99^69 = .9997 < 1
  assert counts[0] == 2 and counts[69] == 2
  np.testing.assert_allclose(counts[:69], 2 * 0.99**np.arange(69), rtol=1e-5)


def test_nothing_real_changes_no_state_and_states_have_no_gradient():
  latents = jnp.asarray(around(CENTRES, 4, 6, 2))
  state = start(jax.random.key(0), latents, np.ones(4, 'f'), 6)
  codes = quantizers.vq_nearest(latents, state.codebook)
  same = update(jax.random.key(1), latents, codes, np.zeros(4, 'f'), state)
  jax.tree.map(np.testing.assert_array_equal, same, state)
  total = lambda s: sum(x.sum() for x in s)
  gradient = jax.grad(lambda x: total(quantizers.vq_update(jax.random.key(1), x, codes, jnp.ones(4), state))
                      + total(quantizers.vq_start(jax.random.key(1), x, jnp.ones(4), 6)))(latents)
  assert not gradient.any()


def test_eight_devices_keep_the_codebook_of_one():
  mesh = Mesh(np.array(jax.devices()[:8]), ('data',))
  cut, whole = NamedSharding(mesh, P('data')), NamedSharding(mesh, P())

  def step(key, latents, mask, state):
    codes = quantizers.vq_nearest(latents, state.codebook)
    return quantizers.vq_update(key, latents, codes, mask, state)

  begin = lambda key, latents, mask: quantizers.vq_start(key, latents, mask, 12)
  one, eight, mask = jax.jit(step), jax.jit(step, out_shardings=whole), np.array([1] * 15 + [0], 'f')
  for i in range(52):
    latents, key = around(CENTRES, 16, 4, i, spread=1.0), jax.random.key(i)           # other latents on each device
    if i == 0:
      a = jax.jit(begin)(key, latents, mask)
      b = jax.jit(begin, out_shardings=whole)(key, jax.device_put(latents, cut), jax.device_put(mask, cut))
    if i == 50:                                                                       # ten codes die at once
      a, b = (s._replace(count=s.count.at[2:].set(0), total=s.total.at[2:].set(0)) for s in (a, b))
      b = jax.device_put(b, whole)
    a = one(key, latents, mask, a)
    b = eight(key, jax.device_put(latents, cut), jax.device_put(mask, cut), b)
    for x, y in zip(a, b):
      np.testing.assert_allclose(y, x, rtol=1e-5, atol=1e-6)
      for shard in y.addressable_shards:
        np.testing.assert_array_equal(shard.data, y.addressable_shards[0].data)
  assert (a.count >= 1).all()


def test_commitment_moves_the_encoder_only_and_is_a_mean():
  draw = np.random.default_rng(11)
  latents, words = draw.normal(size=(2, 3, 5, 4)).astype('f')
  mask = np.array([1, 0, 1], 'f')
  latents[1] = np.inf
  got = quantizers.commitment(jnp.asarray(latents), jnp.asarray(words), jnp.asarray(mask))
  np.testing.assert_allclose(got[jnp.array([0, 2])], ((latents - words)[[0, 2]]**2).mean((1, 2)), rtol=1e-5)
  assert got[1] == 0
  to_latents, to_words = jax.grad(lambda a, b: quantizers.commitment(a, b, jnp.asarray(mask)).sum(), (0, 1))(
      jnp.asarray(latents), jnp.asarray(words))
  # d mean (l - w)^2 / d l = 2 (l - w) / 20
  np.testing.assert_allclose(to_latents[0], (latents - words)[0] / 10, rtol=1e-5)
  assert not to_words.any() and not to_latents[1].any()


# --- finite scalars


@pytest.mark.parametrize('levels', [(8, 8, 8), (4, 4), (3, 5), (7, 5, 5, 5), (2, 3)])
def test_scalar_codes_are_all_reached_and_give_their_values_back(levels):
  number = int(np.prod(levels))
  values = quantizers.fsq_values(jnp.arange(number)[None], levels)                     # [1, C, L]
  assert len(np.unique(values[0], axis=0)) == number and np.abs(values).max() <= 1
  # the first digit is the lowest; digit d of n levels stands for (d - n // 2) / (n // 2)
  digits = np.array([d[::-1] for d in itertools.product(*map(range, levels[::-1]))])
  np.testing.assert_allclose(values[0], (digits - np.array(levels) // 2) / (np.array(levels) // 2), rtol=1e-6)

  # random channels: codes give their values back
  channels = jnp.asarray(np.random.default_rng(0).normal(size=(4, 500, len(levels))) * 2, 'float32')
  found, codes = quantizers.fsq(channels, levels)
  assert codes.dtype == jnp.int32 and found.dtype == jnp.float32
  np.testing.assert_array_equal(quantizers.fsq_values(codes, levels), found)

  # of each channel some number for each level, from a line of numbers; put together they take every code in its turn
  line = np.linspace(-6, 6, 1001, dtype='f')
  found = np.asarray(quantizers.fsq(jnp.asarray(np.tile(line[None, :, None], (1, 1, len(levels)))), levels)[0][0])
  first = [[line[np.argmax(found[:, c] == v)] for v in np.unique(found[:, c])] for c in range(len(levels))]
  assert [len(f) for f in first] == list(levels)
  channels = np.array([[f[d] for f, d in zip(first, row)] for row in digits])
  np.testing.assert_array_equal(quantizers.fsq(jnp.asarray(channels[None]), levels)[1][0], np.arange(number))


@pytest.mark.parametrize('count', [3, 4, 5, 7, 8])
def test_a_channel_of_zero_is_in_the_midst_of_a_level(count):
  found, _ = quantizers.fsq(jnp.array([[[0.0], [0.1], [-0.1], [1e4], [-1e4]]]), (count,))
  # 0 and its neighbours are the level of value 0; the ends are the last levels: n - 1 - n // 2 and -(n // 2)
  np.testing.assert_allclose(found[0, :, 0], [0, 0, 0, (count - 1 - count // 2) / (count // 2), -1], atol=1e-7)


def test_scalars_have_the_gradient_of_the_bounded_channel():
  channels = np.random.default_rng(1).normal(size=(2, 3, 2)).astype('f')
  gradient = jax.grad(lambda x: quantizers.fsq(x, (8, 5))[0].sum())(jnp.asarray(channels))
  # value = (tanh(x + s) w - o) / h: 8 levels have w = 3.5, h = 4, s = tan(.5 / 3.5); 5 levels w = 2, h = 2, s = 0
  shift, slope = np.array([np.tan(0.5 / 3.5), 0]), np.array([3.5 / 4, 1])
  np.testing.assert_allclose(gradient, slope / np.cosh(channels + shift)**2, rtol=1e-4)
