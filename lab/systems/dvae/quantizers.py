"""From logits or latents to discrete codes, each with the gradient of its paper: Gumbel-softmax, ReinMax, VQ, FSQ.

Everything is computed in float32, or in float64 where that is given. Noise is an argument, never drawn here, so that a
result does not depend on how a batch is cut over devices. Axes: B examples, N latents, C codes, D width of a latent.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LLOYD_STEPS = 10     # of the k-means start
RENEWED = 2          # EMA count of a new code, in units of `least`
EMPTY = 1e-5         # a code with a smaller EMA count keeps its vector: there is nothing to divide by


def soft(logits: jax.Array, noise: jax.Array, tau) -> jax.Array:
  """Gumbel-softmax, softmax((logits + noise) / tau) (Jang et al. 2017, arXiv 1611.01144, eq. 2).

  logits and Gumbel(0, 1) noise [..., C], tau > 0 -> f32[..., C], a relaxed sample.
  """
  return jax.nn.softmax(_noisy(logits, noise) / tau)


def straight_through(logits: jax.Array, noise: jax.Array, tau) -> jax.Array:
  """The one-hot sample argmax(logits + noise), f32[..., C], with the gradient of `soft` (same paper, section 2.2)."""
  y = soft(logits, noise, tau)
  # in this order the value is exactly 0 or 1
  return hard(_noisy(logits, noise)) + (y - jax.lax.stop_gradient(y))


def reinmax(logits: jax.Array, noise: jax.Array, tau) -> jax.Array:
  """The one-hot sample D = argmax(logits + noise), f32[..., C], with ReinMax's gradient (Liu et al. 2023, 2304.08612).

  For a cotangent g it is J(p1) 2g - J(p0) g/2, where J(p) v = p (v - <p, v>), p0 = softmax(logits) and
  p1 = (D + softmax(logits / tau)) / 2: algorithm 2, differentiated by hand, which saves its logarithm of 0. At tau = 1
  its expectation is the exact gradient for functions of D that are quadratic.

  Args:
    logits: [..., C].
    noise: Gumbel(0, 1), [..., C]; no gradient.
    tau: 1 or more, a number or a scalar; no gradient. It is ReinMax's own, not the one that Gumbel-softmax anneals.
  """
  logits = _wide(logits)
  return _reinmax(logits, noise.astype(logits.dtype), tau)


def hard(logits: jax.Array) -> jax.Array:
  """The likeliest code as one-hot f32[..., C], without a gradient; the first of equals."""
  return jax.nn.one_hot(logits.argmax(-1), logits.shape[-1], dtype=_wide(logits).dtype)


def _wide(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _noisy(logits, noise):
  return _wide(logits) + _wide(noise)


@jax.custom_vjp
def _reinmax(logits, noise, tau):
  return hard(logits + noise)


def _reinmax_forward(logits, noise, tau):
  sample = (logits + noise).argmax(-1)
  return jax.nn.one_hot(sample, logits.shape[-1], dtype=logits.dtype), (logits, sample, tau)


def _reinmax_backward(kept, g):
  logits, sample, tau = kept
  one_hot = jax.nn.one_hot(sample, logits.shape[-1], dtype=logits.dtype)
  p0, p1 = jax.nn.softmax(logits), (one_hot + jax.nn.softmax(logits / tau)) / 2
  return _softmax_vjp(p1, 2 * g) - _softmax_vjp(p0, g / 2), None, None


def _softmax_vjp(p, v):
  return p * (v - (p * v).sum(-1, keepdims=True))


_reinmax.defvjp(_reinmax_forward, _reinmax_backward)


class VQState(NamedTuple):
  """A codebook that follows the latents by moving averages instead of gradients (van den Oord et al. 2017, 1711.00937).

  Fields:
    codebook: f32[C, D].
    count: f32[C], the moving average of how many latents of a global batch take each code.
    total: f32[C, D], the moving average of the sum of those latents; codebook = total / count.
  """
  codebook: jax.Array
  count: jax.Array
  total: jax.Array


def vq_empty(codes: int, width: int) -> VQState:
  """The state before `vq_start`: zeros."""
  zeros = jnp.zeros((codes, width), jnp.float32)
  return VQState(zeros, jnp.zeros(codes, jnp.float32), zeros)


def vq_nearest(latents: jax.Array, codebook: jax.Array) -> jax.Array:
  """The nearest code i32[...] of each of the latents [..., D] in codebook [C, D], the first of equals; no gradient.

  Of |x|^2 - 2 xy + |y|^2 the first term is the same for every code and is left out. Memory: f32[..., C].
  """
  codebook = codebook.astype(jnp.float32)
  scores = jnp.einsum('...d,cd->...c', latents.astype(jnp.float32), codebook, precision='highest')
  squares = (codebook * codebook).sum(-1).reshape((1,) * (scores.ndim - 1) + (-1,))
  return (squares - 2 * scores).argmin(-1).astype(jnp.int32)


def vq_start(key: jax.Array, latents: jax.Array, mask: jax.Array, codes: int, least: float = 1.0) -> VQState:
  """A codebook by k-means++: ten Lloyd iterations from latents that lie apart, of real rows only.

  With fewer latents than codes some codes are equal; all but the first of these go unused and are renewed by the first
  `vq_update`. Where nothing is real all are zero, and so equal.

  Args:
    key: for the latents that the iterations begin with.
    latents: [B, N, D].
    mask: f32[B], 0 = padding.
    codes: C.
    least: as for `vq_update`.
  """
  points, real = _points(latents, mask)

  def lloyd(_, centres):
    count, total = _assigned(points, real, vq_nearest(points, centres), codes)
    return _mean(count, total, centres)

  centres = jax.lax.fori_loop(0, LLOYD_STEPS, lloyd, _seeds(key, points, real, codes))
  count, _ = _assigned(points, real, vq_nearest(points, centres), codes)
  count = jnp.where(count > 0, jnp.maximum(count, RENEWED * least), 0)
  return VQState(centres, count, centres * count[:, None])


def vq_update(key: jax.Array, latents: jax.Array, codes: jax.Array, mask: jax.Array, state: VQState,
              decay: float = 0.99, least: float = 1.0) -> VQState:
  """Moves the codebook towards the latents that took its codes, and renews dead codes; no gradient.

  A code whose moving count falls below `least` becomes a latent of the batch, drawn by the square of its distance to
  its word, as in k-means++ (Arthur and Vassilvitskii 2007), for most latents may be alike and well served. Its count
  and total begin anew with it, for with the old ones the next step would undo this; at twice `least` it may stay unused
  for log(2) / -log(decay) steps (68 at 0.99) until it is renewed again. Codes that die together take different latents
  where there are enough. A batch with nothing real changes nothing.

  Args:
    key: for the latents that dead codes become.
    latents: [B, N, D], the global batch under jit: sums are then over all devices.
    codes: i32[B, N], their nearest codes.
    mask: f32[B], 0 = padding.
    state: `vq_start`'s, or that of the update before.
    decay: of the moving averages, 1/2 or more, lest a renewed code dies in the next step.
    least: latents a global batch.
  """
  points, real = _points(latents, mask)
  count, total = _assigned(points, real, codes.reshape(-1), len(state.count))
  count = decay * state.count + (1 - decay) * count
  total = decay * state.total + (1 - decay) * total
  missed = jnp.square(points - jnp.take(state.codebook, codes.reshape(-1), 0)).sum(-1)
  dead, fresh, begin = count < least, _draw(key, points, real, len(count), missed), RENEWED * least
  column = dead[:, None]
  moved = VQState(jnp.where(column, fresh, _mean(count, total, state.codebook)), jnp.where(dead, begin, count),
                  jnp.where(column, begin * fresh, total))
  return jax.tree.map(lambda x, old: jnp.where(real.any(), x, old), moved, state)


def commitment(latents: jax.Array, words: jax.Array, mask: jax.Array) -> jax.Array:
  """How far latents are from their words: the mean over N and D of (latent - word)^2, f32[B], 0 for padding.

  The gradient reaches the encoder only (1711.00937, third term of eq. 3): words are constants here.

  Args:
    latents: [B, N, D].
    words: [B, N, D], the codebook's vectors of their codes.
    mask: f32[B], 0 = padding.
  """
  error = latents.astype(jnp.float32) - jax.lax.stop_gradient(words.astype(jnp.float32))
  # selecting instead of multiplying: padding has the gradient 0 even where it is not finite
  return (jnp.where(mask[:, None, None] > 0, error, 0)**2).mean((1, 2))


def _points(latents, mask):
  """All latents as f32[B N, D], zeros for padding, and which are real, bool[B N]; constants for gradients."""
  _, number, width = latents.shape
  real = jnp.repeat(mask > 0, number)
  points = jax.lax.stop_gradient(latents).astype(jnp.float32).reshape(-1, width)
  return jnp.where(real[:, None], points, 0), real


def _assigned(points, real, codes, number):
  """How many real points take each code, f32[C], and their sums, f32[C, D].

  By a product with one-hot rows: scattered additions come in no fixed order on a GPU, and a run must repeat exactly.
  """
  one_hot = jax.nn.one_hot(codes, number, dtype=jnp.float32) * real[:, None]
  return one_hot.sum(0), jnp.einsum('mc,md->cd', one_hot, points, precision='highest')


def _mean(count, total, otherwise):
  count = count[:, None]
  return jnp.where(count > EMPTY, total / jnp.maximum(count, EMPTY), otherwise)


def _seeds(key, points, real, number):
  """f32[number, D]: real points, each drawn by the square of its distance to those before (k-means++)."""
  keys = jax.random.split(key, number)

  def one(i, carry):
    centres, missed = carry
    centre = points[_chances(keys[i], real, missed).argmax()][None]
    missed = jnp.minimum(missed, jnp.square(points - centre).sum(-1))
    return jax.lax.dynamic_update_slice_in_dim(centres, centre, i, 0), missed
  start = jnp.zeros((number, points.shape[1]), jnp.float32), jnp.full(real.shape, jnp.finfo(jnp.float32).max)
  return jax.lax.fori_loop(0, number, one, start)[0]


def _draw(key, points, real, number, weight):
  """Real points f32[number, D], drawn by weight f32[M] without replacement; repeated where there are too few."""
  order = _chances(key, real, weight).argsort(descending=True)
  return points[order[jnp.arange(number) % jnp.maximum(real.sum(), 1)]]


def _chances(key, real, weight):
  """f32[M], of which the largest are a draw of real points by weight (Kool et al. 2019, arXiv 1903.06059, 2.3)."""
  chance = jnp.log(jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)) + jax.random.gumbel(key, real.shape)
  return jnp.where(real, chance, -jnp.inf)


def fsq(channels: jax.Array, levels: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
  """Finite scalar quantization: every channel is bounded by tanh and rounded (Mentzer et al. 2023, arXiv 2309.15505).

  An even number of levels has no middle: its range is shifted by half a step, and so is what tanh is taken of (appendix
  A.1), so that a channel of about 0 is in the midst of a level and not between two. The outermost levels are reached by
  channels that saturate.

  Args:
    channels: [B, N, L].
    levels: L numbers of levels, each 2 or more; their product is the number of codes.

  Returns:
    (values, codes): f32[B, N, L] in [-1, 1], the rounded ones with the gradient of the bounded ones; and i32[B, N],
    the values as one number in mixed radix, the first channel's digit the lowest.
  """
  count, half, place = _radix(levels)
  width, offset = (count - 1) / 2, (1 - count % 2) / 2
  width, offset, shift = (np.float32(x) for x in (width, offset, np.tan(offset / width)))
  bounded = jnp.tanh(channels.astype(jnp.float32) + shift) * width - offset
  rounded = jnp.round(jax.lax.stop_gradient(bounded))
  codes = ((rounded.astype(jnp.int32) + half) * place).sum(-1)
  # in this order the values are exactly those of `fsq_values`
  return rounded / half + (bounded - jax.lax.stop_gradient(bounded)) / half, codes


def fsq_values(codes: jax.Array, levels: tuple[int, ...]) -> jax.Array:
  """The values f32[B, N, L] of codes i32[B, N] of `fsq`."""
  count, half, place = _radix(levels)
  return (codes[..., None] // place % count - half).astype(jnp.float32) / half


def _radix(levels):
  """Numbers of levels, half of them, and what a digit counts: each i32[1, 1, L]."""
  count = np.array(levels, np.int32).reshape(1, 1, -1)
  return count, count // 2, np.cumprod([1, *levels[:-1]], dtype=np.int32).reshape(1, 1, -1)
