"""The lab's own kernel of attention over few tokens, run step by step on the CPU; where it is taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import attention, short_attention, target
from tests.test_attention import reference
from tests.test_kernels import gpu, lowered, mesh      # noqa: F401 (a fixture)

# rows, tokens, features of a head: four rows a tile, and one left over; two with a rest between; one; one as large
SHAPES = {'16': (5, 16, 16), '24': (3, 24, 16), '118': (2, 118, 32), '128': (2, 128, 16)}
HEADS = 2


def draw(rows, steps, width, dtype=jnp.float32, number=4):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=(rows, steps, HEADS, width)), dtype) for _ in range(number)]


def some(rows, steps):
  return jnp.array([steps, 1, steps - 3, steps // 2, 1][:rows])


def plain(q, k, v, slope, **options):
  y, pull = jax.vjp(lambda *x: attention.attend(*x, implementation='plain', **options), q, k, v)
  return y, *pull(slope)


def near(got, wanted, bound):
  for a, b in zip(got, wanted, strict=True):
    assert a.shape == b.shape and np.linalg.norm(np.float32(a) - b) < bound * np.linalg.norm(b)


@pytest.mark.parametrize('shape, masked, causal', [
    ('16', False, False), ('16', True, True), ('24', False, True), ('24', True, False), ('118', True, False),
    ('128', False, True)])
def test_values_and_gradients_are_those_of_einsums_in_float32_and_of_numpy(shape, masked, causal):
  rows, steps, _ = SHAPES[shape]
  q, k, v, slope = draw(*SHAPES[shape])
  lengths = some(rows, steps) if masked else None
  run = functools.partial(short_attention.attend, causal=causal, interpret=True)
  turn = functools.partial(short_attention.gradient, causal=causal, interpret=True)
  wanted = plain(q, k, v, slope, causal=causal, lengths=lengths)
  near((run(q, k, v, lengths), *turn(q, k, v, slope, lengths)), wanted, 1e-6)
  at, held = np.arange(steps), np.full(rows, steps) if lengths is None else np.array(lengths)
  seen = (at[None] < held[:, None])[:, None, None] & (at[None] <= at[:, None] if causal else True)
  near((wanted[0],), (reference(q, k, v, np.broadcast_to(seen, (rows, HEADS, steps, steps))),), 1e-6)
  for dtype, bound in ((jnp.bfloat16, 3e-3), (jnp.float16, 5e-4)):
    half = [x.astype(dtype) for x in (q, k, v, slope)]
    got = run(*half[:3], lengths), *turn(*half, lengths)
    assert {x.dtype for x in got} == {jnp.dtype(dtype)}
    near(got, plain(*(x.astype(jnp.float32) for x in half), causal=causal, lengths=lengths), bound)


def test_what_is_large_stays_finite():
  q, k, v, slope = (100 * x for x in draw(2, 16, 16))
  got = short_attention.attend(q, k, v, some(2, 16), causal=True, interpret=True)
  assert np.isfinite(got).all()
  for x in short_attention.gradient(q, k, v, slope, some(2, 16), causal=True, interpret=True):
    assert np.isfinite(x).all()


def test_few_tokens_on_a_gpu_are_the_kernel_s_on_each_device_and_cudnn_s_where_heads_are_split(gpu, monkeypatch):
  monkeypatch.setattr(target, 'nvidia', lambda: True)
  theirs, asked = jax.nn.dot_product_attention, []
  monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda *x, implementation, **options: asked.append(
      implementation) or theirs(*x, implementation='xla', **options))
  q, k, v, slope = draw(8, 16, 16, jnp.bfloat16)
  for lengths in (None, jnp.maximum(some(5, 16)[jnp.arange(8) % 5] - 1, 0)):      # rows of padding alone among them
    wanted = plain(*(x.astype(jnp.float32) for x in (q, k, v, slope)), lengths=lengths)

    def both(q, k, v, slope):
      y, pull = jax.vjp(lambda *x: attention.attend(*x, lengths=lengths), q, k, v)
      return y, *pull(slope)
    for axes, called in (((2, 4, 1), True), ((1, 1, 2), False)):
      gpu.clear(), asked.clear()
      with jax.set_mesh(mesh(*axes)):
        near(jax.jit(both)(q, k, v, slope), wanted, 1e-2)
      # tokens of a device, one row of eight
      assert gpu == [('short_attention_forward', 16), ('short_attention_backward', 16)] * called
      assert set(asked) == (set() if called else {'cudnn'})


def test_what_it_fits(monkeypatch):
  fits = lambda q, k=None: short_attention.fits(*(jnp.zeros((2, steps, 2, width)) for steps, width in (q, k or q)))
  assert fits((128, 64)) and fits((1, 16)) and fits((100, 32)) and not fits((100, 128))
  monkeypatch.setattr(target, 'shared_memory', lambda: 99 << 10)      # a GPU for desktops
  assert fits((64, 64)) and not fits((65, 64))
  monkeypatch.undo()
  assert not fits((129, 64)) and not fits((16, 8)) and not fits((16, 24)) and not fits((16, 16), (18, 16))


def test_it_compiles_for_a_gpu_as_far_as_that_goes_without_one():
  rows = (8,), jnp.int32
  for shape in ((8, 16, 4, 16), (8, 24, 4, 32), (8, 128, 12, 64)):
    wide = shape, jnp.bfloat16
    for f, args in ((short_attention.attend, (wide,) * 3), (short_attention.gradient, (wide,) * 4)):
      for more in ((), (rows,)):
        text = lowered(functools.partial(f, causal=len(more) > 0), *args, *more)
        assert text.count('__gpu$xla.gpu.triton') == 1
