"""How fast are the lab's kernels for NVIDIA GPUs beside the same in plain JAX, and how fast could they be?

    python -m benchmarks.kernels [--calls=20]

A line a kernel: milliseconds of the plain way and of the kernel, each the mean of so many calls after two; the least
that their traffic takes, each array read or written once, at the bandwidth of lab/topology.py; and the largest
relative difference of their results, by the norm of each.
"""

import functools
import re
import sys
import time

import jax
import jax.numpy as jnp
from absl import flags

from lab import topology
from lab.nn import activations, attention, few_attention, kernels, long_attention, losses, norms, short_attention
from lab.systems.video import lstm

FLAGS = flags.FlagValues()
flags.DEFINE_integer('calls', 20, 'Calls that are timed.', flag_values=FLAGS)
LOGITS = (32_768, 50_304, 50_257)                                             # rows, columns, classes: GPT-2's
NORMS = ((32_768, 768, False), (65_536, 256, True), (221_184, 128, True))     # rows, features, by root mean square
HIDDEN = (32_768, 3_072)                                                      # rows, features
CELLS = (2, 512, 2048)                                                        # heads, rows, units: a step of an LSTM
HEADS = ((256, 128, 12, 64), (6_144, 16, 8, 16), (1_536, 24, 8, 32))          # rows, tokens, heads, features
LONG = (64, 1_024, 8, 32)                                                     # the same
FEW = ((64, 16, 1_024, 8, 32), (64, 1_024, 16, 8, 32))                        # rows, queries, keys, heads, features


def main(argv: list[str], logits=LOGITS, shapes=NORMS, hidden=HIDDEN, heads=HEADS, long=LONG,
         few=FEW, cells=CELLS, interpret: bool = False) -> int:
  """Prints the table and returns the exit code; interpret: for tests, without a GPU."""
  FLAGS(argv)
  kind, gpu = jax.devices()[0].device_kind, jax.devices()[0].platform == 'gpu'
  bandwidth = next((chip.hbm for names, chip in topology.CHIPS if gpu and re.fullmatch(names, kind)), 0)
  if not bandwidth and not interpret:
    print(f'error: {kind}: expected an NVIDIA GPU of lab/topology.py', file=sys.stderr)
    return 2
  print(f'{kind}, jax {jax.__version__}\n{"":<40} {"plain":>8} {"kernel":>8} {"least":>8} difference')
  for name, plain, kernel, args in (*of_labels(*logits), *(row for shape in shapes for row in of_norms(*shape)),
                                    *of_activations(*hidden), *(row for shape in heads for row in of_attention(*shape)),
                                    *of_long_attention(*long), *(row for shape in few for row in of_few(*shape)),
                                    of_lstm(*cells)):
    slow, wanted = timed(plain, args)
    fast, got = timed(functools.partial(kernel, interpret=interpret), args)
    moved = sum(a.nbytes for a in jax.tree.leaves((args, wanted)))
    print(f'{name:<40} {slow:8.3f} {fast:8.3f} {1e3 * moved / bandwidth if bandwidth else 0:8.3f} '
          f'{max(float(d) for d in map(difference, got, wanted)):.1e}', flush=True)
  return 0


def of_labels(rows: int, columns: int, classes: int):
  """(name, plain, kernel, arguments) of the two of a vocabulary."""
  logits = (2 * jax.random.normal(jax.random.key(0), (rows, columns))).astype(jnp.bfloat16)
  labels = jax.random.randint(jax.random.key(1), (rows,), 0, classes)
  total = jax.jit(functools.partial(losses._label_statistics, classes=classes))(logits, labels)[0]
  slope = jax.random.normal(jax.random.key(2), (rows,))
  one = lambda f, *args, **options: (f(*args, classes=classes, **options),)
  yield (f'statistics of logits {rows} x {columns}', functools.partial(losses._label_statistics, classes=classes),
         functools.partial(kernels.label_statistics, classes=classes), (logits, labels))
  yield (f'gradient of logits {rows} x {columns}', functools.partial(one, losses._label_gradient),
         functools.partial(one, kernels.label_gradient), (logits, labels, total, slope))


def of_norms(rows: int, width: int, rms: bool):
  """(name, plain, kernel, arguments) of sum and norm, LayerNorm's with a bias before it, and of their gradient."""
  x, onward = (jax.random.normal(jax.random.key(i), (rows, width)) for i in (0, 1))
  y, slope = (jax.random.normal(jax.random.key(i), (rows, width)).astype(jnp.bfloat16) for i in (2, 3))
  scale, bias, shift = (jax.random.normal(jax.random.key(i), (width,)) for i in (4, 5, 6))
  vectors = (scale, bias) if rms else (shift, scale, bias)
  options, name = {'eps': 1e-5, 'rms': rms, 'post': False}, 'RMSNorm' if rms else 'LayerNorm'
  both = lambda f, *args, **more: [r for r in f(*args, **options, **more) if r is not None]

  def gradient(*args, **more):
    to_x, to_y, shares = kernels.add_norm_gradient(*args, shifted=not rms, **options, **more)
    return to_x, to_y, shares.sum(0)
  yield (f'sum and {name} {rows} x {width}', functools.partial(both, norms._plain),
         functools.partial(both, kernels.add_norm), (x, y, *vectors))
  plain = functools.partial(both, norms._plain_gradient, shifted=not rms)
  yield f'gradient of sum and {name} {rows} x {width}', plain, gradient, (x, onward, slope, scale)


def of_activations(rows: int, width: int):
  """(name, plain, kernel, arguments) of the gradient of gelu_tanh and of the bias before it, and of SwiGLU's."""
  x, slope, made = (jax.random.normal(jax.random.key(i), (rows, size)).astype(jnp.bfloat16)
                    for i, size in enumerate((width, width, 2 * width)))

  def gradient(*args, **more):
    to_x, shares = kernels.gelu_gradient(*args, **more)
    return to_x, shares.sum(0)
  yield f'gradient of GELU {rows} x {width}', activations._plain_gradient, gradient, (x, slope)
  yield (f'gradient of SwiGLU {rows} x 2 x {width}', activations._plain_swiglu_gradient, kernels.swiglu_gradient,
         (made, slope))


def of_attention(rows: int, tokens: int, heads: int, features: int):
  """(name, plain, kernel, arguments) of attention over few tokens, and of its gradient; plain is by einsums."""
  name, plain, back, q, k, v, slope = _attention(rows, tokens, heads, features)
  one = lambda *x, **more: (short_attention.attend(*x, causal=False, **more),)
  yield name, lambda *x: (plain(*x),), one, (q, k, v)
  yield f'gradient of {name}', back, functools.partial(short_attention.gradient, causal=False), (q, k, v, slope)


def of_long_attention(rows: int, tokens: int, heads: int, features: int):
  """The same of many tokens, in one array; what its gradient wants of the result is by einsums, too."""
  name, plain, back, q, k, v, slope = _attention(rows, tokens, heads, features)
  qkv = jnp.stack([q, k, v], 3)
  apart = lambda qkv: [qkv[..., i, :] for i in range(3)]
  y = jax.jit(plain)(q, k, v)
  scores = jnp.einsum('bshd,bthd->bhst', q, k, preferred_element_type=jnp.float32) * features**-0.5
  logs = -kernels.LOG2_E * jax.nn.logsumexp(scores, -1).reshape(-1)
  yield name, lambda qkv: (plain(*apart(qkv)),), lambda *x, **more: long_attention.attend(*x, **more)[:1], (qkv,)
  yield (f'gradient of {name}', lambda qkv, y, slope, logs: (jnp.stack(back(*apart(qkv), slope), 3),),
         long_attention.gradient, (qkv, y, slope, logs))


def of_few(rows: int, queries: int, keys: int, heads: int, features: int):
  """The same of few queries and many keys, or the other way round."""
  q, slope = (jax.random.normal(jax.random.key(i), (rows, queries, heads, features)).astype(jnp.bfloat16)
              for i in (0, 1))
  kv = jax.random.normal(jax.random.key(2), (rows, keys, heads, 2, features)).astype(jnp.bfloat16)
  plain = lambda q, kv: attention.attend(q, kv[..., 0, :], kv[..., 1, :], implementation='plain')
  y, scores = jax.jit(plain)(q, kv), jnp.einsum('bshd,bthd->bhst', q, kv[..., 0, :], preferred_element_type=jnp.float32)
  logs = -kernels.LOG2_E * jax.nn.logsumexp(scores * features**-0.5, -1).reshape(-1)
  name = f'attention {rows} x {queries} to {keys} x {heads} x {features}'
  yield name, lambda *x: (plain(*x),), lambda *x, **more: few_attention.attend(*x, **more)[:1], (q, kv)
  yield (f'gradient of {name}', lambda q, kv, y, slope, logs: jax.vjp(plain, q, kv)[1](slope), few_attention.gradient,
         (q, kv, y, slope, logs))


def _attention(rows, tokens, heads, features):
  """A name, attention by einsums and its gradient, and for these q, k, v and a slope."""
  shape = rows, tokens, heads, features
  arrays = (jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16) for i in range(4))
  plain = lambda q, k, v: attention.attend(q, k, v, implementation='plain')
  back = lambda q, k, v, slope: jax.vjp(plain, q, k, v)[1](slope)
  return f'attention {rows} x {tokens} x {heads} x {features}', plain, back, *arrays


def of_lstm(heads: int, rows: int, units: int):
  """(name, plain, kernel, arguments) of the gradient of an LSTM's step with peepholes, of several heads at once."""
  c, to_h, to_c = (jax.random.normal(jax.random.key(i), (heads, rows, units)) for i in range(3))
  gates = jax.random.normal(jax.random.key(3), (heads, rows, 4 * units)).astype(jnp.bfloat16)
  vectors = jax.random.normal(jax.random.key(4), (heads, 3, units))

  def gradient(*args, **more):
    to_c, to_gates, shares = jax.vmap(functools.partial(lstm.gradient, **more))(*args)
    return to_c, to_gates, shares.sum(1)
  return (f"gradient of an LSTM's step {heads} x {rows} x {units}", jax.vmap(lstm._plain_gradient), gradient,
          (c, gates, to_h, to_c, vectors))


def timed(f, args):
  """Milliseconds a call, and the result."""
  f = jax.jit(f)
  for _ in range(2):
    jax.block_until_ready(f(*args))
  began = time.perf_counter()
  for _ in range(FLAGS.calls):
    out = f(*args)
  jax.block_until_ready(out)
  return 1e3 * (time.perf_counter() - began) / FLAGS.calls, out


@jax.jit
def difference(got, wanted) -> jax.Array:
  """|got - wanted| / |wanted|, on the device: the gradient of logits has 1.6 billion numbers."""
  got, wanted = (a.astype(jnp.float32) for a in (got, wanted))
  norm = lambda x: jnp.sqrt(jnp.square(x).sum())
  return norm(got - wanted) / jnp.maximum(norm(wanted), 1e-30)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
