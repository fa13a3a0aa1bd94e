"""The lab's own kernels of attention between few and many, run step by step on the CPU; where they are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import attention, few_attention, kernels, target
from lab.nn.transformer import Shape
from lab.systems.dvae import pools
from tests.test_kernels import gpu, lowered, mesh      # noqa: F401 (a fixture)
from tests.test_short_attention import near

HEADS, WIDTH = 2, 32
SIZES = [(16, 256), (256, 16), (64, 128)]      # queries, keys


def draw(queries, keys, rows=2, scale=1.0, width=WIDTH):
  """q, keys and values, and a slope."""
  rng = np.random.default_rng(0)
  shapes = (rows, queries, HEADS, width), (rows, keys, HEADS, 2, width), (rows, queries, HEADS, width)
  return [jnp.asarray(scale * rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def plain(q, kv, slope):
  def run(q, kv):
    return attention.attend(q, kv[..., 0, :], kv[..., 1, :], implementation='plain')
  y, pull = jax.vjp(run, *(x.astype(jnp.float32) for x in (q, kv)))
  return y, *pull(slope.astype(jnp.float32))


def across(q, kv, slope):
  y, pull = jax.vjp(attention.across, q, kv)
  return y, *pull(slope)


@pytest.mark.parametrize('queries, keys', SIZES)
@pytest.mark.parametrize('scale, width', [(1.0, 32), (5.0, 32), (1.0, 16), (1.0, 64)])
def test_values_and_gradients_are_those_of_einsums_in_float32(queries, keys, scale, width):
  q, kv, slope = draw(queries, keys, scale=scale, width=width)
  y, logs = few_attention.attend(q, kv, interpret=True)
  got = y, *few_attention.gradient(q, kv, y, slope, logs, interpret=True)
  assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
  near(got, plain(q, kv, slope), 3e-3 if scale == 1 else 1e-2)


def test_what_is_no_number_stays_one():
  for queries, keys in SIZES[:2]:
    q, kv, slope = draw(queries, keys)
    q = q.at[0, 3, 1, 5].set(jnp.nan)
    y, logs = few_attention.attend(q, kv, interpret=True)
    to_q, to_kv = few_attention.gradient(q, kv, y, slope, logs, interpret=True)
    bad = lambda x: np.isnan(np.float32(x))
    for x in (y, to_q):
      assert bad(x)[0, 3, 1].all() and bad(x).sum() == WIDTH
    assert bad(to_kv)[0, :, 1].all() and bad(to_kv).sum() == 2 * keys * WIDTH


@pytest.mark.parametrize('queries, keys', SIZES[:2])
def test_on_a_gpu_they_are_the_kernels_on_each_device(gpu, monkeypatch, queries, keys):
  monkeypatch.setattr(target, 'hopper', lambda: True)
  monkeypatch.setattr(few_attention, 'LEAST', 256)
  q, kv, slope = draw(queries, keys, 8)
  for axes, taken in (((2, 4, 1), True), ((1, 1, 2), False)):
    with jax.set_mesh(mesh(*axes)):
      assert attention.takes_across(q, kv) == taken
      if taken:
        got = jax.jit(across)(q, kv, slope)
  near(got, plain(q, kv, slope), 1e-2)
  assert gpu == [('few_attention_forward', queries), ('few_attention_backward', queries)]      # a row of a device


def test_plain_attention_gives_the_same_types_and_numbers():
  args = draw(*SIZES[0])
  near(across(*(x.astype(jnp.float32) for x in args)), plain(*args), 1e-5)
  seen, choose = [], kernels.choose
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(kernels, 'choose', lambda plain, kernel, rows: seen.append(
        [jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(f, *rows)) for f in (plain, kernel)])
                  or choose(plain, kernel, rows))
    jax.make_jaxpr(across)(*args)
  assert len(seen) == 2 and all(list(plain) == list(kernel) for plain, kernel in seen)


def test_a_pool_gives_the_same_by_them(monkeypatch):
  shape = Shape(width=32, heads=2, layers=1, activation='swiglu', rms=True, bias=False, deviation=.2)
  context = jnp.float32(np.random.default_rng(3).normal(size=(3, 32, 32)))
  for before, behind in ((32, 4), (32, 48)):
    pool = pools.Perceiver(shape, before, behind, 2)
    params = jax.jit(pool.init)(jax.random.key(0), context)
    call = lambda: jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(pool.apply(params, context)))))(params)
    apart, taken = call(), []
    with monkeypatch.context() as patch:
      patch.setattr(attention, 'takes_across', lambda q, kv: taken.append((q.shape[1], kv.shape[1])) or True)
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(a).max()), apart, call())
    assert taken == [(behind, before)] * 2


def test_what_they_fit(monkeypatch):
  def fits(queries, keys, width=32, dtype=jnp.bfloat16):
    return few_attention.fits(jnp.zeros((1, queries, 2, width), dtype), jnp.zeros((1, keys, 2, 2, width), dtype))
  assert not fits(16, 1024)      # here is no GPU
  monkeypatch.setattr(target, 'platform', lambda: 'gpu')
  assert fits(16, 1024) and fits(1024, 64) and fits(512, 32, 64)
  assert not fits(20, 1024) and not fits(16, 1000) and not fits(16, 256) and not fits(128, 1024)
  assert not fits(16, 1024, 128) and not fits(16, 1024, dtype=jnp.float16)


def test_they_compile_for_a_gpu_as_far_as_that_goes_without_one():
  for queries, keys in ((16, 1024), (1024, 16)):
    q, kv = ((64, queries, 8, 32), jnp.bfloat16), ((64, keys, 8, 2, 32), jnp.bfloat16)
    assert lowered(few_attention.attend, q, kv).count('__gpu$xla.gpu.triton') == 1
    logs = (64 * 8 * queries,), jnp.float32
    assert lowered(few_attention.gradient, q, kv, q, q, logs).count('__gpu$xla.gpu.triton') == 1
