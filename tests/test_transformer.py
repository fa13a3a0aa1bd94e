"""The Transformer against a float64 reference; what it may see; packing, caching, dropout, precision."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.nn import kernels, transformer
from lab.nn.transformer import Shape, Transformer

B, S, D = 2, 7, 16
TINY = Shape(D, heads=4, layers=2)
MODERN = TINY._replace(rope=True, qk_norm=True, activation='relu2', bias=False)
SHAPES = {'plain': TINY, 'post': TINY._replace(norm='post', activation='gelu_tanh'),
          'modern': MODERN, 'swiglu': TINY._replace(activation='swiglu', rms=True, bias=False, eps=1e-6),
          'geglu': TINY._replace(activation='geglu', hidden=24, final_norm=False, rope=True)}


def draw(seed=0, shape=(B, S, D)):
  return jnp.array(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def start(shape):
  """Parameters all of which matter: kernels ten times as large as at the start, biases and scales off 0 and 1."""
  shapes = jax.eval_shape(Transformer(shape).init, jax.random.key(0), draw())['params']

  def fill(path, x):
    name = path[-1].key
    noise = draw(len(jax.tree_util.keystr(path)), x.shape)
    return {'kernel': .2 * noise, 'scale': 1 + .3 * noise, 'bias': .3 * noise}[name]

  return jax.tree_util.tree_map_with_path(fill, shapes)


def dropout_key(seed):
  return jax.random.key(seed, impl='unsafe_rbg')      # compiles in a tenth of the default's time


def run(shape, x, *args, params=None, key=None, **options):
  rngs = {} if key is None else {'dropout': dropout_key(key)}
  call = lambda params, x, *args: Transformer(shape).apply({'params': params}, x, *args, rngs=rngs, **options)
  return jax.jit(call)(start(shape) if params is None else params, x, *args)


# -- the reference


def norm(x, p, eps=1e-5, rms=False):
  if rms:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p['scale']
  y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
  return y * p['scale'] + p.get('bias', 0)


def dense(x, p):
  return x @ p['kernel'] + p.get('bias', 0)


def activate(x, kind):
  erf = lambda x: x * .5 * (1 + np.vectorize(math.erf)(x / 2**.5))
  if kind == 'swiglu':
    gate, value = np.split(x, 2, -1)
    return gate / (1 + np.exp(-gate)) * value
  if kind == 'geglu':
    return erf(x[..., :x.shape[-1] // 2]) * x[..., x.shape[-1] // 2:]
  return {'gelu': erf, 'relu2': lambda x: np.maximum(x, 0)**2,
          'gelu_tanh': lambda x: x * .5 * (1 + np.tanh((2 / np.pi)**.5 * (x + .044715 * x**3)))}[kind](x)


def attention(x, p, c, causal):
  qkv = dense(x, p['qkv']).reshape(B, S, c.heads, 3, D // c.heads)
  q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
  if c.qk_norm:
    q, k = (y / np.sqrt((y**2).mean(-1, keepdims=True) + c.eps) * p[f'{name}_norm']['scale']
            for name, y in (('query', q), ('key', k)))
  if c.rope:
    half = D // c.heads // 2
    turn = np.exp(1j * np.arange(S)[:, None, None] * 10000. ** -(np.arange(half) / half))[None]
    q, k = (np.concatenate([z.real, z.imag], -1) for z in ((y[..., :half] + 1j * y[..., half:]) * turn for y in (q, k)))
  scores = np.einsum('bshd,bthd->bhst', q, k) / (D // c.heads)**.5
  weights = np.exp(scores) * (np.tri(S) if causal else 1)
  return dense(np.einsum('bhst,bthd->bshd', weights / weights.sum(-1, keepdims=True), v).reshape(B, S, D), p['out'])


def reference(x, params, c, causal):
  x, params = np.float64(x), jax.tree.map(np.float64, params)
  normed = lambda x, p: norm(x, p, c.eps, c.rms)
  for layer in range(c.layers):
    p = jax.tree.map(lambda w: w[layer], params['blocks'])
    mlp = lambda x: dense(activate(dense(x, p['mlp']['up']), c.activation), p['mlp']['down'])
    if c.norm == 'pre':
      x = x + attention(normed(x, p['norm0']), p['attention'], c, causal)
      x = x + mlp(normed(x, p['norm1']))
    else:
      x = normed(x + attention(x, p['attention'], c, causal), p['norm0'])
      x = normed(x + mlp(x), p['norm1'])
  return normed(x, params['final_norm']) if 'final_norm' in params else x


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('name', SHAPES)
def test_it_equals_the_float64_reference(name, causal):
  shape = SHAPES[name]
  expected = reference(draw(), start(shape), shape, causal)
  got = run(shape, draw(), causal=causal)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5 * abs(expected).max())


# -- parameters


def test_parameters_are_stacked_under_these_paths():
  shapes = {jax.tree_util.keystr(path, simple=True, separator='/'): x.shape
            for path, x in jax.tree_util.tree_leaves_with_path(start(TINY._replace(layers=3, qk_norm=True)))}
  both = lambda name, size: {f'{name}/scale': size, f'{name}/bias': size}
  assert shapes == {
      'blocks/attention/qkv/kernel': (3, 16, 48), 'blocks/attention/qkv/bias': (3, 48),
      'blocks/attention/out/kernel': (3, 16, 16), 'blocks/attention/out/bias': (3, 16),
      'blocks/attention/query_norm/scale': (3, 4), 'blocks/attention/key_norm/scale': (3, 4),
      'blocks/mlp/up/kernel': (3, 16, 64), 'blocks/mlp/up/bias': (3, 64),
      'blocks/mlp/down/kernel': (3, 64, 16), 'blocks/mlp/down/bias': (3, 16),
      **both('blocks/norm0', (3, 16)), **both('blocks/norm1', (3, 16)), **both('final_norm', (16,))}
  assert start(SHAPES['geglu'])['blocks']['mlp']['up']['kernel'].shape == (2, 16, 2 * 24)
  assert not [path for path, _ in jax.tree_util.tree_leaves_with_path(start(MODERN)) if 'bias' in str(path)]
  assert 'final_norm' not in start(SHAPES['post'])


def test_a_block_of_the_spec_has_7087872_parameters():
  shape = Shape(768, heads=12, layers=6)      # section 2: 6 x 7,087,872, and a final norm
  params = jax.eval_shape(Transformer(shape).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 4, 768), jnp.float32))
  assert sum(x.size for x in jax.tree.leaves(params['params']['blocks'])) == 6 * 7087872


def test_kernels_start_at_the_deviations_of_the_spec():
  params = jax.jit(Transformer(Shape(64, 4, 8, dtype='bfloat16')).init)(jax.random.key(0), draw(shape=(1, 2, 64)))
  blocks = params['params']['blocks']
  for part, name, deviation in (('attention', 'qkv', .02), ('mlp', 'up', .02), ('attention', 'out', .005),
                                ('mlp', 'down', .005)):      # .02 / sqrt(2 8)
    kernel = blocks[part][name]['kernel']
    assert kernel.dtype == jnp.float32 and not (kernel[0] == kernel[1]).any()
    np.testing.assert_allclose(kernel.std((1, 2)), deviation, rtol=.05)      # layer by layer
    assert not blocks[part][name]['bias'].any()


# -- who sees whom


@pytest.mark.parametrize('name', ['plain', 'modern'])
def test_a_changed_token_leaves_earlier_outputs_as_they_were(name):
  other = draw().at[:, 4].set(5.0)
  before, after = (run(SHAPES[name], x, causal=True) for x in (draw(), other))
  np.testing.assert_array_equal(before[:, :4], after[:, :4])
  assert (before[:, 4:] != after[:, 4:]).any(-1).all()
  assert (run(SHAPES[name], draw()) != run(SHAPES[name], other)).any(-1).all()      # not causal: all see it


def test_the_content_of_padding_is_irrelevant():
  segments = jnp.array([[1] * 5 + [0] * 2, [1] * 3 + [0] * 4])
  real = np.array(segments) > 0
  other = jnp.where(real[..., None], draw(), 100 * draw(9))
  one, two = (np.array(run(TINY, x, segments)) for x in (draw(), other))
  np.testing.assert_array_equal(one[real], two[real])
  np.testing.assert_allclose(one[1, :3], run(TINY, draw()[1:, :3])[0], atol=1e-5)      # short equals padded


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('name', ['plain', 'modern'])
def test_packed_documents_equal_each_alone(name, causal):
  a, b = draw(1, (1, 4, D)), draw(2, (1, 3, D))
  packed = run(SHAPES[name], jnp.concatenate([a, b, draw(3, (1, 2, D))], 1), jnp.array([[1] * 4 + [2] * 3 + [0] * 2]),
               causal=causal)
  for part, alone in ((packed[:, :4], a), (packed[:, 4:7], b)):
    np.testing.assert_allclose(part, run(SHAPES[name], alone, causal=causal), atol=1e-5)


def test_rope_reads_given_positions():
  at = jnp.broadcast_to(jnp.arange(S)[None], (B, S))
  call = lambda at: run(MODERN, draw(), positions=at)
  np.testing.assert_array_equal(call(at), run(MODERN, draw()))
  np.testing.assert_allclose(call(at + 50), call(at), atol=1e-4)
  assert abs(call(2 * at) - call(at)).max() > .01


@pytest.mark.parametrize('dtype, norm_kind', [('float32', 'pre'), ('bfloat16', 'post')])
def test_a_padded_row_is_finite_and_adds_nothing_to_gradients(dtype, norm_kind):      # C16
  shape = TINY._replace(dtype=dtype, norm=norm_kind, qk_norm=True)

  def loss(params, x, segments):
    y = Transformer(shape).apply({'params': params}, x, segments, causal=True).astype(jnp.float32)
    return jnp.sum(jnp.where(segments[..., None] > 0, y**2 * draw(5)[:1, :1], 0)), y

  grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  segments = jnp.array([[1] * S, [0] * S])
  x = draw().at[1].set(0)      # what an embedding gives for padding
  (params, inputs), y = grad(start(shape), x, segments)
  assert all(np.isfinite(leaf).all() for leaf in (*jax.tree.leaves(params), inputs, y.astype(jnp.float32)))
  assert (inputs[1] == 0).all() and (inputs[0] != 0).any()
  alone, _ = grad(start(shape), x.at[1].set(3), segments)[0]
  jax.tree.map(np.testing.assert_array_equal, params, alone)


# -- generation


@pytest.mark.parametrize('name', ['plain', 'modern'])
def test_cached_generation_equals_uncached_for_prompts_of_different_lengths(name):
  shape, prompts, tokens = SHAPES[name], (5, 2), draw(4, (B, 9, D))
  cache = transformer.cache(shape, B, 9)
  assert cache['key'].shape == cache['value'].shape == (2, B, 9, 4, 4) and cache['segments'].shape == (B, 9)
  step = jax.jit(lambda x, cache, index, segments=None: Transformer(shape).apply(
      {'params': start(shape)}, x, segments, causal=True, cache=cache, index=index))
  segments = jnp.array([[1] * n + [0] * (5 - n) for n in prompts])
  first, cache = step(tokens[:, :5], cache, 0, segments)
  expected = np.array(run(shape, tokens, causal=True))
  for row, n in enumerate(prompts):
    np.testing.assert_allclose(first[row, :n], expected[row, :n], atol=1e-5)
  index = jnp.array(prompts)
  for _ in range(4):
    y, cache = step(tokens[jnp.arange(B), index][:, None], cache, index)
    np.testing.assert_allclose(y[:, 0], expected[np.arange(B), index], atol=1e-5)
    index = index + 1
  np.testing.assert_array_equal(cache['segments'], [[1] * 9, [1] * 6 + [0] * 3])


def test_a_cache_takes_several_tokens_at_once_and_other_dtypes():
  cache = transformer.cache(MODERN, B, S, 'bfloat16')
  _, cache = run(MODERN, draw()[:, :3], causal=True, cache=cache, index=0)
  y, cache = run(MODERN, draw()[:, 3:], causal=True, cache=cache, index=3)
  expected = run(MODERN, draw(), causal=True)[:, 3:]
  assert cache['key'].dtype == jnp.bfloat16 and y.dtype == jnp.float32
  assert np.linalg.norm(y - expected) < .02 * np.linalg.norm(expected)
  with pytest.raises(ValueError, match='causal'):
    run(MODERN, draw(), cache=cache, index=0)


# -- training


@pytest.mark.parametrize('rates', [{'dropout': .5}, {'attention_dropout': .5}])
def test_dropout_is_keyed_and_off_in_evaluation(rates):
  shape = TINY._replace(**rates, layers=3)
  params = start(TINY._replace(layers=3))
  call = functools.partial(run, shape, draw(), params=params)
  np.testing.assert_array_equal(call(train=True, key=0), call(train=True, key=0))
  assert (call(train=True, key=0) != call(train=True, key=1)).any()
  np.testing.assert_array_equal(call(), run(TINY._replace(layers=3), draw(), params=params))


def test_dropout_keeps_the_mean_and_differs_by_layer():
  # attention/out has a bias of 1 and all else is 0: each layer adds 2 with p = 1/2, or 0
  shape = Shape(D, 4, layers=2, dropout=.5, final_norm=False)
  params = jax.tree.map(jnp.zeros_like, start(TINY._replace(final_norm=False)))
  params['blocks']['attention']['out']['bias'] += 1
  y = run(shape, jnp.zeros((50, 20, D)), params=params, train=True, key=0)
  values, counts = np.unique(y, return_counts=True)
  np.testing.assert_array_equal(values, [0, 2, 4])      # always 0 or 4 if layers shared their draws
  np.testing.assert_allclose(counts / y.size, [.25, .5, .25], atol=.02)      # deviation .0034 of 16,000


def noisy(params):
  """Parameters of which none is 0, biases above all."""
  leaves, form = jax.tree.flatten(params)
  return form.unflatten([x + .1 * jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(leaves)])


@pytest.mark.parametrize('change', [{}, {'norm': 'post'}, {'rope': True}, {'qk_norm': True}], ids=str)
def test_a_bias_of_all_keys_has_no_gradient_where_it_can_have_none(monkeypatch, change):
  shape = TINY._replace(**change)
  params = noisy(start(shape))
  gradient = lambda: jax.jit(jax.grad(lambda params: jnp.sum(Transformer(shape).apply(
      {'params': params}, draw(), causal=True)**2 * draw(5))))(params)
  got = gradient()
  monkeypatch.setattr(jax.lax, 'stop_gradient', lambda x: x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(abs(b).max(), 1)), got, gradient())
  of_keys = got['blocks']['attention']['qkv']['bias'].reshape(shape.layers, shape.heads, 3, -1)[:, :, 1]
  assert (of_keys == 0).all() == (change not in ({'rope': True}, {'qk_norm': True}))


def test_queries_keys_and_values_of_one_product_give_what_those_of_three_do(monkeypatch):
  shape = SHAPES['swiglu']._replace(rope=True)
  call = lambda: jax.jit(jax.value_and_grad(lambda params: jnp.sum(
      Transformer(shape).apply({'params': params}, draw()) * draw(5))))(start(shape))
  apart, taken = call(), []
  monkeypatch.setattr(kernels, 'choose', lambda plain, kernel, rows, shared=(), sums=0: plain(*rows, *shared))
  monkeypatch.setattr(transformer.attention, 'takes_together', lambda qkv: taken.append(qkv.shape) or True)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(a).max()), apart, call())
  assert set(taken) == {(B, S, 4, 3, D // 4)}
  taken.clear()
  for change, options in (({}, {'causal': True}), ({}, {'lengths': jnp.array([S, 2])}), ({'attention': 'plain'}, {}),
                          ({'rope': False}, {}), ({'qk_norm': True}, {}), ({'attention_dropout': .1}, {'train': True})):
    with_key = {'rngs': {'dropout': dropout_key(0)}} if options.get('train') else {}
    jax.eval_shape(lambda x, c=shape._replace(**change), o=options, k=with_key: Transformer(c).init_with_output(
        {'params': jax.random.key(0), **k.get('rngs', {})}, x, **o), draw())
  assert not taken


@pytest.mark.parametrize('dropout', [0.0, .2])
@pytest.mark.parametrize('keep', transformer.KEPT)
def test_remat_and_unrolling_change_nothing(keep, dropout):
  shape = TINY._replace(dropout=dropout, attention_dropout=.2, activation='gelu_tanh')
  call = lambda shape, params: Transformer(shape).apply(
      {'params': params}, draw(), causal=True, train=True, rngs={'dropout': dropout_key(0)})
  plain, remat = (jax.jit(jax.value_and_grad(lambda params, c=c: jnp.sum(call(c, params)**2 * draw(5)[:1, :1])))(
      noisy(start(shape))) for c in (shape, shape._replace(remat=True, remat_keep=keep)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * abs(a).max()), plain, remat)
  one, two = (jax.jit(functools.partial(call, c))(noisy(start(shape))) for c in (shape, shape._replace(unroll=2)))
  np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.parametrize('name', SHAPES)
def test_bfloat16_is_within_2_percent_of_float32(name):
  shape = SHAPES[name]
  params = jax.jit(Transformer(shape).init)(jax.random.key(1), draw())['params']
  exact = run(shape, draw(), params=params, causal=True)
  rounded = run(shape._replace(dtype='bfloat16'), draw(), params=params, causal=True)
  assert rounded.dtype == jnp.bfloat16
  assert np.linalg.norm(np.float32(rounded) - exact) < .02 * np.linalg.norm(exact)


@pytest.mark.parametrize('change, message', [({'activation': 'swish'}, 'gelu_tanh'), ({'norm': 'mid'}, 'post'),
                                             ({'heads': 3}, 'multiple of heads'), ({'attention': 'fast'}, 'flash')])
def test_impossible_shapes_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(Transformer(TINY._replace(**change)).init, jax.random.key(0), draw())


def test_what_is_kept_is_not_computed_again():
  def products(c):
    step = jax.grad(lambda params: jnp.square(Transformer(c).apply({'params': params}, draw(), causal=True)).sum())
    return str(jax.make_jaxpr(step)(start(TINY))).count('dot_general')
  plain, products_kept, nothing_kept = (products(TINY._replace(remat=remat, remat_keep=keep)) for remat, keep in (
      (False, 'nothing'), (True, 'products'), (True, 'nothing')))
  assert products_kept == plain + 2          # attention's two, which have no weights
  assert nothing_kept > products_kept


def test_without_a_loop_too_a_layer_is_computed_again():
  """Where all layers are unrolled, the compiler must not find that what is computed again was there before."""
  def products(remat, unroll):
    c = TINY._replace(remat=remat, unroll=unroll)
    step = jax.grad(lambda params: jnp.square(Transformer(c).apply({'params': params}, draw(), causal=True)).sum())
    return jax.jit(step).lower(start(TINY)).compile().as_text().count(' dot(')
  again = products(True, 1) - products(False, 1)
  assert again > 0 and products(True, TINY.layers) - products(False, TINY.layers) == TINY.layers * again
