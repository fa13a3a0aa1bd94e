"""The lab's own kernels of attention over many tokens, run step by step on the CPU; where they are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import attention, kernels, long_attention, target
from tests.test_attention import reference
from tests.test_kernels import gpu, lowered, mesh      # noqa: F401 (a fixture)
from tests.test_short_attention import near, plain

ROWS, STEPS, HEADS, WIDTH = 2, 256, 2, 32


def draw(rows=ROWS):
  """q, k, v and a slope."""
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(rows, STEPS, HEADS, WIDTH)), jnp.bfloat16) for _ in range(4)]


def places(rows, axes):
  return attention.angles(jnp.asarray(np.random.default_rng(1).integers(0, 40, (rows, STEPS, 2)[:1 + axes])), WIDTH)


def both(q, k, v, slope):
  qkv = jnp.stack([q, k, v], 3)
  y, logs = long_attention.attend(qkv, interpret=True)
  to_qkv, = long_attention.gradient(qkv, y, slope, logs, interpret=True)
  return y, *(to_qkv[..., i, :] for i in range(3))


def wide(*x):
  return [a.astype(jnp.float32) for a in x]


def test_values_and_gradients_are_those_of_einsums_in_float32_and_of_numpy():
  half = draw()
  wanted = plain(*wide(*half))
  got = both(*half)
  assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
  near(got, wanted, 3e-3)
  seen = np.ones((ROWS, HEADS, STEPS, STEPS), bool)
  near((wanted[0],), (reference(*wide(*half[:3]), seen),), 1e-6)


def test_logarithms_are_those_of_the_sums_of_exponentials():
  q, k, v, _ = draw()
  logs = long_attention.attend(jnp.stack([q, k, v], 3), interpret=True)[1]
  scores = np.einsum('bshd,bthd->bhst', *(np.float64(x) for x in (q, k))) / np.sqrt(WIDTH)
  np.testing.assert_allclose(logs.reshape(ROWS, HEADS, STEPS), -np.log2(np.exp(scores).sum(-1)), atol=2e-5)


@pytest.mark.parametrize('last', [False, True], ids=['anywhere', 'behind the first keys'])
def test_scores_far_above_those_of_the_first_keys_are_done_again(last):
  q, k, v, slope = draw()
  q, k = 30 * q, 30 * k
  if last:                       # scores of 0, then of thousands
    k = k.at[:, :200].set(0)
  scores = jnp.einsum('bshd,bthd->bhst', q, k, preferred_element_type=jnp.float32) * WIDTH**-0.5
  assert (jnp.max(scores, -1) - jnp.max(scores[..., :32], -1)).max() * np.log2(np.e) > 128      # no float32
  near(both(q, k, v, slope), plain(*wide(q, k, v, slope)), 1e-2)


def test_what_is_no_number_stays_one():
  q, k, v, slope = draw()
  y, to_q, to_k, to_v = both(q.at[0, 3, 1, 5].set(jnp.nan), k, v, slope)
  bad = lambda x: np.isnan(np.float32(x))
  for x in (y, to_q):            # a query's own
    assert bad(x)[0, 3, 1].all() and bad(x).sum() == WIDTH
  for x in (to_k, to_v):         # and what its head's keys and values get
    assert bad(x)[0, :, 1].all() and bad(x).sum() == STEPS * WIDTH


def test_large_values_and_scores_stay_finite():
  q, k, v, _ = draw()
  k = k.at[:, 60:].multiply(6)      # exponentials far above 1
  for factor, q in ((2.0**40, q), (1.0, 1e4 * q)):
    y, logs = long_attention.attend(jnp.stack([q, k, factor * v], 3), interpret=True)
    assert np.isfinite(logs).all()
    near((y,), (attention.attend(*wide(q, k, factor * v), implementation='plain'),), 1e-2)


@pytest.mark.parametrize('heads', [1, 6, 16])
def test_rotary_positions_turn_queries_and_keys_in_place(heads):
  rng = np.random.default_rng(2)
  qkv = jnp.asarray(rng.normal(size=(ROWS, STEPS, heads, 3, WIDTH)), jnp.bfloat16)
  for rows, axes in ((1, 2), (ROWS, 1)):
    angles = places(rows, axes)
    got, = long_attention.turn(qkv, *angles, interpret=True)
    np.testing.assert_array_equal(got[..., 2, :], qkv[..., 2, :])
    for i in (0, 1):
      near((got[..., i, :],), (np.float32(attention.turned(qkv[..., i, :], *angles)),), 1e-4)
    assert got.dtype == jnp.bfloat16


def apart(q, k, v, slope, angles):
  """What `attention.together` gives and its gradient, by plain attention of what is turned first."""
  def run(q, k, v):
    return attention.attend(*(attention.turned(x, *angles) for x in (q, k)), v, implementation='plain')
  y, pull = jax.vjp(run, q, k, v)
  return y, *pull(slope)


def joined(q, k, v, slope, angles):
  y, pull = jax.vjp(lambda qkv: attention.together(qkv, *angles), jnp.stack([q, k, v], 3))
  to_qkv, = pull(slope)
  return y, *(to_qkv[..., i, :] for i in range(3))


@pytest.mark.parametrize('rows', [1, 8])
def test_many_tokens_on_a_gpu_are_the_kernels_on_each_device(gpu, monkeypatch, rows):
  monkeypatch.setattr(target, 'hopper', lambda: True)
  monkeypatch.setattr(long_attention, 'LEAST', STEPS)
  angles, args = places(rows, 2), draw(8)
  form = jax.ShapeDtypeStruct((8, STEPS, HEADS, 3, WIDTH), jnp.bfloat16)
  for axes, taken in (((2, 4, 1), True), ((1, 1, 2), False)):
    with jax.set_mesh(mesh(*axes)):
      assert attention.takes_together(form) == taken
      with kernels.counted():
        assert not attention.takes_together(form)
      if taken:
        got = jax.jit(joined)(*args, angles)
  near(got, apart(*wide(*args), angles), 1e-2)
  # tokens of a device, one row of eight
  assert gpu == [(f'long_attention_{name}', STEPS) for name in ('turn', 'forward', 'to_queries', 'to_keys', 'turn')]


def test_plain_attention_gives_the_same_types_and_nearly_the_same_numbers():
  args, angles = wide(*draw()), places(1, 1)
  near(joined(*args, angles), apart(*args, angles), 1e-5)
  seen, choose = [], kernels.choose
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kernels, 'choose', lambda plain, kernel, rows, shared=(): seen.append(
        [jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(f, *rows, *shared)) for f in (plain, kernel)])
                  or choose(plain, kernel, rows, shared))
    jax.make_jaxpr(joined)(*draw(), angles)
  assert len(seen) == 4 and all(list(plain) == list(kernel) for plain, kernel in seen)


def test_powers_of_two_are_asked_of_the_hardware(monkeypatch):
  asked = []
  monkeypatch.setattr(kernels.triton, 'elementwise_inline_asm', lambda asm, args, **_: asked.append((asm, args)) or [0])
  kernels.exp2(False)(jnp.ones((4, 2)), 0.15625, jnp.ones((4, 1)))
  (asm, args), = asked
  assert 'fma.rn.ftz.f32 y, $1, 0f3e200000, $2; ex2.approx.ftz.f32 $0, y;' in asm      # IEEE 754's .15625
  assert [a.shape for a in args] == [(4, 2), (4, 2)]
  np.testing.assert_allclose(kernels.exp2(True)(jnp.float32(3), 0.5, 1.0), 2**2.5, rtol=1e-6)


def test_what_it_fits(monkeypatch):
  fits = lambda steps, width, dtype=jnp.bfloat16: long_attention.fits(jnp.zeros((1, steps, 2, 3, width), dtype))
  assert not fits(1024, 32)      # here is no GPU
  monkeypatch.setattr(target, 'platform', lambda: 'gpu')
  assert fits(1024, 32) and fits(1152, 32)
  assert not fits(1024, 64) and not fits(896, 32) and not fits(1100, 32) and not fits(1024, 32, jnp.float16)
  monkeypatch.setattr(target, '_capability', lambda: (8, 0))
  assert not fits(1024, 32)


def test_they_compile_for_a_gpu_as_far_as_that_goes_without_one():
  qkv, y = (((64, 1024, 8, *more, 32), jnp.bfloat16) for more in ((3,), ()))
  logs, angle = ((64 * 8 * 1024,), jnp.float32), ((1, 1024, 1, 2, 8), jnp.float32)
  assert lowered(long_attention.turn, qkv, angle, angle).count('__gpu$xla.gpu.triton') == 1
  assert lowered(long_attention.attend, qkv).count('__gpu$xla.gpu.triton') == 1
  assert lowered(long_attention.gradient, qkv, y, y, logs).count('__gpu$xla.gpu.triton') == 2
