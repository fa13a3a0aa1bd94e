"""Attention against NumPy in float64 and jax.nn's; rows without keys; rotary positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import attention, kernels, target
from lab.nn.attention import attend

B, S, H, D = 3, 6, 2, 8
PACKED = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])   # the last row is all padding


def draw(seed=0, dtype=jnp.float32, keys=S):
  rng = np.random.default_rng(seed)
  return tuple(jnp.array(rng.normal(size=(B, n, H, D)), dtype) for n in (S, keys, keys))


def reference(q, k, v, visible):
  """Float64, and 0 for rows that see nothing; visible bool[B, H, S, T]."""
  q, k, v = (np.float64(x) for x in (q, k, v))
  weights = np.where(visible, np.exp(np.einsum('bshd,bthd->bhst', q, k) / q.shape[-1]**0.5), 0)
  weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
  return np.einsum('bhst,bthd->bshd', weights, v)


def see(segments, key_segments=None, causal=False):
  a, b = np.array(segments), np.array(segments if key_segments is None else key_segments)
  seen = (a[:, :, None] == b[:, None]) & (a[:, :, None] > 0)
  return np.broadcast_to((np.tril(seen) if causal else seen)[:, None], (B, H, *seen.shape[1:]))


@pytest.mark.parametrize('causal', [False, True])
def test_packed_attention_equals_numpy(causal):
  got = attend(*draw(), causal=causal, segments=PACKED)
  np.testing.assert_allclose(got, reference(*draw(), see(PACKED, causal=causal)), atol=1e-6)


@pytest.mark.parametrize('causal', [False, True])
def test_lengths_say_what_segments_of_one_document_say(causal):
  """To all that is no padding; padding sees the same keys, and a row of padding alone its first."""
  lengths, held = jnp.array([4, S, 0]), jnp.array([4, S, 1])
  real = jnp.arange(S)[None] < lengths[:, None]
  segments, keys = real.astype(jnp.int32), (jnp.arange(S)[None] < held[:, None]).astype(jnp.int32)
  run = lambda kept, **kind: lambda *x: (kept[..., None, None] * jnp.sin(attend(*x, causal=causal, **kind))).sum()
  for kept, other in ((real, {'segments': segments}),
                      (jnp.ones((B, S)), {'segments': jnp.ones((B, S), jnp.int32), 'key_segments': keys})):
    for f in (lambda f: f(*draw()), lambda f: jax.grad(f, (0, 1, 2))(*draw())):
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), f(run(kept, lengths=lengths)),
                   f(run(kept, **other)))
  with pytest.raises(ValueError, match='segments and lengths'):
    attend(*draw(), segments=segments, lengths=lengths)


@pytest.mark.parametrize('implementation', ['auto', 'flash'])
def test_what_is_counted_is_einsums_where_a_kernel_would_run(monkeypatch, implementation):
  """A kernel's products are seen by nobody; and asking for the kernel must not end what only counts."""
  monkeypatch.setattr(attention, '_obstacle', lambda *_: '')
  monkeypatch.setattr(attention, '_flash', lambda q, *_: q)

  def trace():
    run = lambda *x: attend(*x, implementation=implementation)      # a new one, for JAX remembers what it traced
    return str(jax.make_jaxpr(run)(*draw())).count('dot_general')
  assert trace() == 0
  with kernels.counted():
    assert trace() == 2
  assert trace() == 0


def test_other_keys_and_a_mask_of_any_rank():
  q, k, v = draw(keys=9)
  keys = jnp.array([[2] * 4 + [1] * 4 + [0], [1] * 9, [1] * 9])
  mask = np.random.default_rng(1).random((S, 9)) < .6
  got = attend(q, k, v, segments=PACKED, key_segments=keys, mask=jnp.array(mask))
  np.testing.assert_allclose(got, reference(q, k, v, see(PACKED, keys) & mask[None, None]), atol=1e-6)
  each = np.random.default_rng(2).random((B, H, S, 9)) < .6
  np.testing.assert_allclose(attend(q, k, v, mask=jnp.array(each)), reference(q, k, v, each), atol=1e-6)


@pytest.mark.parametrize('causal', [False, True])
def test_it_agrees_with_jax_nn_in_values_and_gradients(causal):
  q, k, v = draw()
  segments = jnp.array([[1, 1, 1, 2, 2, 2]] * B)
  mask = jnp.array(see(segments))
  theirs = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, implementation='xla')
  ours = lambda q, k, v: attend(q, k, v, causal=causal, segments=segments)
  np.testing.assert_allclose(ours(q, k, v), theirs(q, k, v), atol=1e-6)
  gradients = [jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))(q, k, v) for f in (ours, theirs)]
  for a, b in zip(*gradients):
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('dropout', [0.0, 0.5])
def test_rows_without_keys_are_exactly_0_and_so_are_their_gradients(dtype, dropout):      # C16
  large = tuple(100 * x for x in draw(dtype=dtype))

  def loss(q, k, v):
    y = attend(q, k, v, causal=True, segments=PACKED, dropout=dropout, key=jax.random.key(0))
    return jnp.sum(y.astype(jnp.float32)**2), y

  gradients, y = jax.grad(loss, (0, 1, 2), has_aux=True)(*large)
  padding = np.array(PACKED) == 0
  assert y.dtype == dtype and (np.float32(y)[padding] == 0).all() and (np.float32(y)[~padding] != 0).any()
  for g in gradients:
    assert g.dtype == dtype and np.isfinite(np.float32(g)).all() and (np.float32(g)[padding] == 0).all()


def test_a_mask_that_hides_all_gives_0():
  y, pull = jax.vjp(lambda *x: attend(*x, mask=jnp.zeros((1, 1, 1, 1), bool)), *draw())
  assert all((x == 0).all() for x in (y, *pull(jnp.ones_like(y))))


def test_bfloat16_is_near_float32_in_values_and_gradients():
  run = lambda q, k, v: jax.vjp(lambda *x: attend(*x, causal=True), q, k, v)
  exact, pull = run(*draw())
  rounded, pull_rounded = run(*draw(dtype=jnp.bfloat16))
  for a, b in zip((exact, *pull(exact)), (rounded, *pull_rounded(rounded))):
    assert np.linalg.norm(np.float32(b) - a) < .02 * np.linalg.norm(a)


def test_dropout_is_drawn_from_its_key_and_keeps_the_mean():
  q, k, _ = draw()
  run = lambda seed, rate: attend(q, k, jnp.ones_like(k), dropout=rate, key=jax.random.key(seed))
  np.testing.assert_array_equal(run(0, .5), run(0, .5))
  assert (run(0, .5) != run(1, .5)).any()
  keys = jax.random.split(jax.random.key(0), 500)
  runs = jax.vmap(lambda key: attend(q, k, jnp.ones_like(k), dropout=.25, key=key))(keys)
  # a weight's deviation is sqrt(1/3) of it, so a row's is at most .58; that of the mean of 500 x 36 rows, .0043
  np.testing.assert_allclose(jnp.mean(runs), 1, atol=.015)
  with pytest.raises(ValueError, match='without a key'):
    attend(q, k, k, dropout=.5)


def test_flash_needs_a_gpu_and_auto_does_without():
  half = draw(dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match='GPU'):
    attend(*half, implementation='flash')
  np.testing.assert_array_equal(np.float32(attend(*half)), np.float32(attend(*half, implementation='plain')))
  with pytest.raises(ValueError, match="'auto', 'plain', 'flash'"):
    attend(*half, implementation='fast')
  with pytest.raises(ValueError, match='key_segments'):
    attend(*half, key_segments=PACKED)


@pytest.fixture
def pretend_gpu(monkeypatch):
  """cuDNN's kernel replaced by XLA's, which takes the same arguments; the calls it got."""
  calls, theirs = [], jax.nn.dot_product_attention

  def kernel(*args, implementation, **options):
    assert implementation == 'cudnn'
    calls.append(options)
    return theirs(*args, implementation='xla', **options)

  monkeypatch.setattr(target, 'nvidia', lambda: True)
  monkeypatch.setattr(jax.nn, 'dot_product_attention', kernel)
  return calls


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('segments', [None, PACKED])
def test_what_flash_is_given_means_the_same(pretend_gpu, causal, segments):
  half = draw(dtype=jnp.bfloat16)
  run = lambda how: jax.vjp(lambda *x: attend(*x, causal=causal, segments=segments, implementation=how), *half)
  (flash, pull), (plain, pull_plain) = run('auto'), run('plain')
  assert [c['is_causal'] for c in pretend_gpu] == [causal]
  # on an H200 the gradients of heads of 32 features were NaN where a row had no key at all
  assert all(c['mask'].any(-1).all() for c in pretend_gpu if c.get('mask') is not None)
  for a, b in zip((flash, *pull(flash)), (plain, *pull_plain(plain))):
    assert a.dtype == jnp.bfloat16 and np.linalg.norm(np.float32(a) - np.float32(b)) < .02 * np.linalg.norm(
        np.float32(b))
    if segments is not None:
      assert (np.float32(a)[np.array(segments) == 0] == 0).all()


def test_what_flash_cannot_do_auto_leaves_to_plain(pretend_gpu):
  half, key = draw(dtype=jnp.bfloat16), jax.random.key(0)
  odd = tuple(x[:, :5] for x in half)
  narrow = tuple(x[..., :6] for x in half)
  cases = ((draw(), {}, 'float32'), (half, {'dropout': .1, 'key': key}, 'dropout'), (narrow, {}, 'heads'),
           (half, {'mask': jnp.ones((S, S), bool)}, 'mask'), (odd, {'segments': PACKED[:, :5]}, 'even'))
  for args, options, why in cases:
    attend(*args, **options)
    with pytest.raises(ValueError, match=why):
      attend(*args, **options, implementation='flash')
  assert not pretend_gpu


def test_positions_start_over_in_each_segment():
  segments = jnp.array([[1, 1, 1, 2, 2, 0], [0, 3, 3, 0, 3, 5]])
  got = attention.positions(segments)
  assert got.dtype == jnp.int32
  np.testing.assert_array_equal(got, [[0, 1, 2, 0, 1, 0], [0, 0, 1, 0, 2, 0]])


def test_rope_turns_pairs_by_their_angles():
  x = np.random.default_rng(0).normal(size=(1, 3, 1, 4))
  places = np.array([[0, 1, 7]])
  pairs = x[..., :2] + 1j * x[..., 2:]                        # feature i with i + Dh/2
  turned = pairs * np.exp(1j * places[:, :, None, None] * np.array([1, 1e-2]))     # 10000^(-2i/4)
  got = attention.rope(jnp.array(x, jnp.float32), jnp.array(places))
  np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)
  with pytest.raises(ValueError, match='multiple of 2'):
    attention.rope(jnp.zeros((1, 3, 1, 5)), jnp.array(places))


@pytest.mark.parametrize('axes, dtype, bound', [
    (1, jnp.float32, 1e-5), (2, jnp.float32, 1e-5), (2, jnp.bfloat16, 0.02)])
def test_the_gradient_of_what_is_turned_is_turned_back(axes, dtype, bound):
  rng = np.random.default_rng(0)
  x, slope = (jnp.asarray(rng.normal(size=(2, 5, 3, 8)), dtype) for _ in range(2))
  angles = attention.angles(jnp.asarray(rng.integers(0, 9, (2, 5, 2)[:1 + axes]), jnp.int32), 8)
  y, pull = jax.vjp(lambda x: attention.turned(x, *angles), x)
  gradient, = pull(slope)
  assert y.dtype == gradient.dtype == dtype
  y, gradient, x, slope = (np.float64(a) for a in (y, gradient, x, slope))
  np.testing.assert_allclose(attention.turned(jnp.asarray(gradient, jnp.float32), *angles), slope, atol=bound)
  np.testing.assert_allclose(np.sum(y * slope), np.sum(x * gradient), rtol=bound)


def test_rope_on_a_plane_turns_one_half_by_the_row_and_one_by_the_column():
  x = draw()[0]                                            # heads of 8 features
  at = jnp.array(np.random.default_rng(0).integers(0, 30, (*x.shape[:2], 2)), jnp.int32)
  got = attention.rope(x, at)
  for i, half in enumerate(jnp.split(x, 2, -1)):
    np.testing.assert_allclose(jnp.split(got, 2, -1)[i], attention.rope(half, at[..., i]), atol=1e-6)
  with pytest.raises(ValueError, match='multiple of 4'):
    attention.rope(x[..., :6], at)


def test_rope_s_products_depend_on_the_distance_alone():
  q, k, _ = draw()
  at = jnp.broadcast_to(jnp.arange(S)[None], (B, S))
  scores = lambda shift: jnp.einsum('bshd,bthd->bhst', attention.rope(q, at + shift), attention.rope(k, at + shift))
  np.testing.assert_allclose(scores(0), scores(100), atol=1e-4)
  assert attention.rope(q.astype(jnp.bfloat16), at).dtype == jnp.bfloat16
