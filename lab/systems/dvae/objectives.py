"""What a discrete VAE minimises: cross-entropy of the grid, and terms of the KL from its codes to uniform ones.

Everything is in nats and float32. Axes: B examples, S tokens of a grid, V vocabulary, N latents, C codes. log_q is
ln q(code | grid), the log-softmax of the encoder's logits.
"""

import jax
import jax.numpy as jnp

from lab.nn import losses

MIXTURES = ('batch', 'mws', 'mss')
FLOOR = -1e6         # in place of ln 0: far below every ln q, and 0 times it is 0
ABSENT = -1e30       # log-weight of padding in a mixture: finite, for the gradient of ln 0 is not
LARGEST = 2**24      # numbers of the array [B, B, N] that is held at once: 64 MiB, 512 examples of 64 latents


def stablemax_log(x: jax.Array) -> jax.Array:
  """ln StableMax: [..., V] -> f32[..., V]. p = s(x) / sum s, where s(x) = x + 1 from 0 on and 1 / (1 - x) below.

  Prieto et al. 2025, arXiv 2501.04697. ln s has the slope 1 / (1 + |x|), at 0 from both sides.
  """
  x = x.astype(jnp.float32)
  # at 0 each maximum has half the slope, together the 1 of ln s
  log_s = jnp.log1p(jnp.maximum(x, 0)) - jnp.log1p(jnp.maximum(-x, 0))
  return log_s - jax.nn.logsumexp(log_s, -1, keepdims=True)


def cross_entropy(logits: jax.Array, labels: jax.Array, *, pad: int, pad_weight: float, gamma: float,
                  stablemax: bool) -> tuple[jax.Array, jax.Array]:
  """Weighted cross-entropy of every token: (nats * weight, weight), each f32[B, S].

  Args:
    logits: [B, S, V].
    labels: i32[B, S].
    pad: the label of what is no grid.
    pad_weight: weight of a token labelled `pad`; of all others it is 1.
    gamma: the focal factor (1 - p)^gamma on the loss, p the label's probability (Lin et al. 2017, arXiv 1708.02002,
      eq. 4); 0: none.
    stablemax: p of StableMax instead of softmax.
  """
  if stablemax:
    nats = -jnp.take_along_axis(stablemax_log(logits), labels[..., None], -1)[..., 0]
  else:
    nats = losses.cross_entropy(logits, labels)
  if gamma:
    # of 0 a power below 1 has no slope
    nats = nats * jnp.maximum(-jnp.expm1(-nats), jnp.finfo(jnp.float32).tiny)**gamma
  weight = jnp.where(labels == pad, pad_weight, 1).astype(jnp.float32)
  return nats * weight, weight


def kl_uniform(log_q: jax.Array) -> jax.Array:
  """KL(q || uniform) in nats an example, f32[B], the sum over the latents: log_q [B, N, C] -> 0 .. N ln C."""
  return _divergence(_finite(log_q) + jnp.log(jnp.float32(log_q.shape[-1]))).sum(-1)


def marginal(log_q: jax.Array, mask: jax.Array) -> jax.Array:
  """q f32[N, C], the mean of exp(log_q) [B, N, C] over the rows that mask f32[B] counts; 0 where it counts none."""
  real = (mask > 0)[:, None, None]
  q = jnp.where(real, jnp.exp(jnp.where(real, _finite(log_q), 0)), 0)
  return q.sum(0) / jnp.maximum(real.sum(), 1)


def running(old: jax.Array, new: jax.Array, decay: float, started) -> jax.Array:
  """The moving average decay * old + (1 - decay) * new; `new` where started is 0. The gradient reaches `new` only."""
  return jnp.where(started > 0, decay * jax.lax.stop_gradient(old) + (1 - decay) * new, new)


def running_parts(log_q: jax.Array, q: jax.Array) -> dict[str, jax.Array]:
  """'mi' and 'dwkl', f32[B] nats, of the whole log_q [B, N, C] against a marginal q f32[N, C], such as `running`'s.

  mi = sum_kc q(c|x) ln(q(c|x) / q_kc) and dwkl = sum_kc q(c|x) ln(C q_kc). They add up to `kl_uniform`: taken latent by
  latent a marginal leaves no room for a total correlation, which is why there is no 'tc'.
  """
  log_q, codes = _finite(log_q), log_q.shape[-1]
  log_marginal = jnp.log(jnp.maximum(q, jnp.finfo(jnp.float32).tiny))[None]
  return {'mi': (jnp.exp(log_q) * (log_q - log_marginal)).sum((1, 2)),
          'dwkl': (jnp.exp(log_q) * (log_marginal + jnp.log(jnp.float32(codes)))).sum((1, 2))}


def usage(log_q: jax.Array, mask: jax.Array) -> jax.Array:
  """KL(mean q || uniform) in nats, f32[]: how unevenly the codes are used, from 0 to ln C; 0 where nothing is real.

  The mean is over real rows and latents together, log_q [B, N, C], mask f32[B].
  """
  relative = marginal(log_q, mask).mean(0) * log_q.shape[-1]
  # the gradient of a code that nobody uses is 0, not that of ln 0
  log_relative = jnp.log(jnp.maximum(relative, jnp.finfo(jnp.float32).tiny))
  return jnp.where((mask > 0).any(), _divergence(log_relative), 0)


def decomposition(log_q: jax.Array, z: jax.Array, mask: jax.Array, *, mixture: str, size: int) -> dict[str, jax.Array]:
  """The KL at samples z ~ q(. | x), cut in three: Chen et al. 2018, arXiv 1802.04942, eq. 2, with codes for numbers.

  mi = ln q(z|x) - ln q(z); tc = ln q(z) - sum_k ln q(z_k); dwkl = sum_k ln q(z_k) + N ln C; their sum is
  kl = ln q(z|x) + N ln C. ln q(z) and ln q(z_k) are those of a mixture of the q of all examples of the batch. A single
  value may be negative; of 'batch' the expectation of each is not, and mi is at most ln B.

  The gradient reaches log_q, and through z, whose product with log_q is ln q(z|x), the sampler.

  Cost: B^2 N C multiplications and as many in the gradient for each factor. Where [B, B, N] is over 2^24 numbers, it is
  made in pieces of the mixture's examples, and made again for the gradient. On several devices each makes its rows, of
  its own z and of log_q of all, which are gathered (4 B N C bytes).

  Args:
    log_q: [B, N, C].
    z: [B, N, C], one-hot samples with a straight-through or ReinMax gradient.
    mask: f32[B], 0 = padding: neither an example nor a part of the mixture. B is then the number of the others.
    mixture: how q is made from a batch. 'batch': each example counts 1 / B, the true q of these examples. 'mws':
      1 / (B size), minibatch weighted sampling (appendix C.1). 'mss': minibatch stratified sampling (appendix C.2),
      where the example itself counts 1 / size, the next (size - B + 1) / (size (B - 1)) and others 1 / (B - 1).
    size: number of examples of the data set, for 'mws' and 'mss'; it counts as B where it is less.

  Returns:
    'mi', 'tc', 'dwkl', 'kl': f32[B] nats an example, 0 for padding.
  """
  _, latents, codes = log_q.shape
  real = mask > 0
  # selecting before multiplying: what padding holds reaches no gradient, even where it is not finite
  log_q = jnp.where(real[:, None, None], _finite(log_q), 0)
  z = jnp.where(real[:, None, None], z.astype(jnp.float32), 0)
  own = jnp.einsum('bnc,bnc->bn', z, log_q, precision='highest').sum(-1)
  joint, single = _mixed(log_q, z, real, mixture, size)
  uniform = latents * jnp.log(jnp.float32(codes))
  parts = {'mi': own - joint, 'tc': joint - single, 'dwkl': single + uniform, 'kl': own + uniform}
  return {name: jnp.where(real, value, 0) for name, value in parts.items()}


def _mixed(log_q, z, real, mixture, size):
  """ln q(z) and sum_k ln q(z_k) of a mixture: each f32[B]."""
  rows, latents, _ = log_q.shape
  pieces = min(rows, -(-rows * rows * latents // LARGEST))
  length = -(-rows // pieces)
  extra = pieces * length - rows
  count, rank = real.sum(), jnp.cumsum(real) - 1          # rank: the place among real rows

  def piece(part):
    part_log_q, part_real, part_rank = part
    inside = jnp.einsum('bnc,jnc->nbj', z, part_log_q, precision='highest')
    own = rank[:, None] == part_rank[None]
    after = (rank[:, None] + 1) % jnp.maximum(count, 1) == part_rank[None]
    weights = jnp.where(part_real[None], _log_weights(mixture, own, after, count, size), ABSENT)
    return jax.nn.logsumexp(inside.sum(0) + weights, -1), jax.nn.logsumexp(inside + weights[None], -1)

  parts = (jnp.pad(log_q, ((0, extra), (0, 0), (0, 0))), jnp.pad(real, (0, extra)), jnp.pad(rank, (0, extra)))
  parts = jax.tree.map(lambda x: x.reshape(pieces, length, *x.shape[1:]), parts)
  joint, single = jax.lax.map(jax.checkpoint(piece) if pieces > 1 else piece, parts)
  return jax.nn.logsumexp(joint, 0), jax.nn.logsumexp(single, 0).sum(0)


def _log_weights(mixture, own, after, count, size):
  """Log-weights f32[B, J] of examples J in the mixtures for examples B; own and after, bool[B, J], name two of them."""
  count = jnp.maximum(count, 1).astype(jnp.float32)
  size = jnp.maximum(jnp.float32(size), count)
  if mixture == 'batch':
    return jnp.full(own.shape, -jnp.log(count))
  if mixture == 'mws':
    return jnp.full(own.shape, -jnp.log(count) - jnp.log(size))
  others = jnp.log(jnp.maximum(count - 1, 1))
  next_one = jnp.log(size - count + 1) - jnp.log(size) - others
  return jnp.where(own, -jnp.log(size), jnp.where(after, next_one, -others))


def _divergence(log_relative):
  """KL(q || uniform) of q = exp(log_relative) / C, [..., C] -> f32[...].

  As the mean of r ln r - r + 1, r = C q, which is the same for a q of sum 1: no term is negative, and so rounding can't
  make a KL near 0 negative.
  """
  r = jnp.exp(log_relative)
  return (r * log_relative - jnp.expm1(log_relative)).mean(-1)


def _finite(log_q):
  return jnp.maximum(log_q.astype(jnp.float32), FLOOR)
