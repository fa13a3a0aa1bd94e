"""The lab's own kernels of attention over many tokens, run step by step on the CPU; where they are taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import attention, kernels, long_attention, target
from tests.test_attention import reference
from tests.test_kernels import gpu, lowered, mesh      # noqa: F401 (a fixture)
from tests.test_short_attention import near, plain

ROWS, STEPS, HEADS, WIDTH = 2, 256, 2, 32


def draw(rows=ROWS, scale=1.0):
  rng = np.random.default_rng(0)
  return [jnp.asarray(scale * rng.normal(size=(rows, STEPS, HEADS, WIDTH)), jnp.bfloat16) for _ in range(4)]


def both(q, k, v, slope):
  y, logs = long_attention.attend(q, k, v, interpret=True)
  return y, *long_attention.gradient(q, k, v, y, slope, logs, interpret=True)


def test_values_and_gradients_are_those_of_einsums_in_float32_and_of_numpy():
  half = draw()
  wanted = plain(*(x.astype(jnp.float32) for x in half))
  got = both(*half)
  assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
  near(got, wanted, 3e-3)
  seen = np.ones((ROWS, HEADS, STEPS, STEPS), bool)
  near((wanted[0],), (reference(*(x.astype(jnp.float32) for x in half[:3]), seen),), 1e-6)


def test_logarithms_are_those_of_the_sums_of_exponentials():
  q, k, v, _ = draw()
  logs = long_attention.attend(q, k, v, interpret=True)[1]
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
  near(both(q, k, v, slope), plain(*(x.astype(jnp.float32) for x in (q, k, v, slope))), 1e-2)


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
    y, logs = long_attention.attend(q, k, factor * v, interpret=True)
    assert np.isfinite(logs).all()
    near((y,), (attention.attend(*(x.astype(jnp.float32) for x in (q, k, factor * v)), implementation='plain'),), 1e-2)


def test_many_tokens_on_a_gpu_are_the_kernels_on_each_device_and_cudnn_s_where_heads_are_split(gpu, monkeypatch):
  monkeypatch.setattr(target, 'nvidia', lambda: True)
  monkeypatch.setattr(target, 'hopper', lambda: True)
  monkeypatch.setattr(long_attention, 'exp2', lambda interpret: kernels.exp2(True))
  monkeypatch.setattr(long_attention, 'LEAST', STEPS)
  theirs, asked = jax.nn.dot_product_attention, []
  monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda *x, implementation, **options: asked.append(
      implementation) or theirs(*x, implementation='xla', **options))
  q, k, v, slope = draw(8)

  def turned(q, k, v, slope, **options):
    y, pull = jax.vjp(lambda *x: attention.attend(*x, **options), q, k, v)
    return y, *pull(slope)
  names = ['forward', 'to_queries', 'to_keys']
  for options, axes, called in (({}, (2, 4, 1), True), ({}, (1, 1, 2), False), ({'causal': True}, (2, 4, 1), False),
                                ({'lengths': jnp.full(8, STEPS - 5)}, (2, 4, 1), False)):
    gpu.clear(), asked.clear()
    with jax.set_mesh(mesh(*axes)):
      got = jax.jit(functools.partial(turned, **options))(q, k, v, slope)
    near(got, plain(*(x.astype(jnp.float32) for x in (q, k, v, slope)), **options), 1e-2)
    # tokens of a device, one row of eight
    assert gpu == [(f'long_attention_{name}', STEPS) for name in names] * called
    assert set(asked) == (set() if called else {'cudnn'})


def test_kernels_and_cudnn_s_give_and_take_the_same_types(monkeypatch):
  monkeypatch.setattr(target, 'nvidia', lambda: True)
  monkeypatch.setattr(long_attention, 'fits', lambda q, k: True)
  theirs = jax.nn.dot_product_attention
  monkeypatch.setattr(jax.nn, 'dot_product_attention',
                      lambda *x, implementation, **options: theirs(*x, implementation='xla', **options))
  chosen, choose = [], kernels.choose
  monkeypatch.setattr(kernels, 'choose', lambda plain, kernel, *args: chosen.append(
      [jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(f, *args[0])) for f in (plain, kernel)]) or choose(
          plain, kernel, *args))
  jax.make_jaxpr(lambda q, k, v, slope: jax.vjp(attention.attend, q, k, v)[1](slope))(*draw())
  assert len(chosen) == 2 and all(list(plain) == list(kernel) for plain, kernel in chosen)


def test_powers_of_two_are_asked_of_the_hardware(monkeypatch):
  asked = []
  monkeypatch.setattr(kernels.triton, 'elementwise_inline_asm', lambda asm, args, **_: asked.append((asm, args)) or [0])
  kernels.exp2(False)(jnp.ones((4, 2)), 0.15625, jnp.ones((4, 1)))
  (asm, args), = asked
  assert 'fma.rn.ftz.f32 y, $1, 0f3e200000, $2; ex2.approx.ftz.f32 $0, y;' in asm      # IEEE 754's .15625
  assert [a.shape for a in args] == [(4, 2), (4, 2)]
  np.testing.assert_allclose(kernels.exp2(True)(jnp.float32(3), 0.5, 1.0), 2**2.5, rtol=1e-6)


def test_what_it_fits(monkeypatch):
  def fits(steps, width, others=None, dtype=jnp.bfloat16):
    return long_attention.fits(jnp.zeros((1, steps, 2, width), dtype), jnp.zeros((1, others or steps, 2, width), dtype))
  assert not fits(1024, 32)      # here is no GPU
  monkeypatch.setattr(target, 'platform', lambda: 'gpu')
  assert fits(1024, 32) and fits(1152, 32)
  assert not fits(1024, 64) and not fits(896, 32) and not fits(1100, 32) and not fits(1024, 32, 256)
  assert not fits(1024, 32, dtype=jnp.float16)
  monkeypatch.setattr(target, '_capability', lambda: (8, 0))
  assert not fits(1024, 32)


def test_they_compile_for_a_gpu_as_far_as_that_goes_without_one():
  wide, logs = ((64, 1024, 8, 32), jnp.bfloat16), ((64 * 8 * 1024,), jnp.float32)
  assert lowered(long_attention.attend, *(wide,) * 3).count('__gpu$xla.gpu.triton') == 1
  assert lowered(long_attention.gradient, *(wide,) * 5, logs).count('__gpu$xla.gpu.triton') == 2
