"""From what the encoder says to the codes of a grid and their words; and what is kept of them beside the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lab.systems.dvae import anneal, canvas, objectives, quantizers
from lab.systems.dvae.model import CODEBOOK


class Passage(NamedTuple):
  """What passes the bottleneck."""
  words: jax.Array              # f32[B, N, D], for the decoder
  codes: jax.Array | None       # i32[B, N]
  choice: jax.Array | None      # f32[B, N, C], the codes as one-hot, with the gradient of how they were drawn
  log_q: jax.Array | None       # f32[B, N, C]
  latents: jax.Array | None     # f32[B, N, D], of vq_ema: what was looked up


def hard(net, config, params, stats, found) -> Passage:
  """With the likeliest, or nearest, codes. found: what `net.encode` gives, f32[B, N, .]."""
  kind = config.quantizer.kind
  if kind in CODEBOOK:
    choice, log_q = quantizers.hard(found), jax.nn.log_softmax(found)
    return Passage(_words(net, params, choice), found.argmax(-1).astype(jnp.int32), choice, log_q, None)
  return _other(net, config, params, stats, found)


def sampled(net, config, params, stats, found, number, step) -> Passage:
  """With codes that are drawn, so that gradients reach the encoder; by the grids' u32[B, 2] `number`."""
  q = config.quantizer
  if q.kind not in CODEBOOK:
    return _other(net, config, params, stats, found)
  noise = jax.vmap(lambda key: jax.random.gumbel(key, found.shape[1:]))(canvas.keys(number, 2))
  if q.kind == 'reinmax':
    choice = weights = quantizers.reinmax(found, noise, q.reinmax_tau)
  else:
    tau = anneal.value(q.tau, step)
    choice = weights = quantizers.straight_through(found, noise, tau)
    if q.kind == 'gumbel':
      soft = quantizers.soft(found, noise, tau)
      weights = jnp.where(step >= q.hard_from, choice, soft) if q.hard_from >= 0 else soft
  codes = (found + noise).argmax(-1).astype(jnp.int32)
  return Passage(_words(net, params, weights), codes, choice, jax.nn.log_softmax(found), None)


def _other(net, config, params, stats, found):
  q = config.quantizer
  if q.kind == 'fsq':
    values, codes = quantizers.fsq(found, q.levels)
    return Passage(_words(net, params, values), codes, None, None, None)
  if q.kind == 'vq_ema':
    book = stats['vq'].codebook
    codes = quantizers.vq_nearest(found, book)
    words = jnp.take(book, codes, 0)
    return Passage(found + jax.lax.stop_gradient(words - found), codes, None, None, found)
  return Passage(found, None, None, None, None)


def of_codes(net, config, params, stats, codes) -> jax.Array:
  """Words f32[B, N, D] of codes i32[B, N]."""
  q = config.quantizer
  if q.kind == 'vq_ema':
    return jnp.take(stats['vq'].codebook, codes, 0)
  choice = (quantizers.fsq_values(codes, q.levels) if q.kind == 'fsq'
            else jax.nn.one_hot(codes, config.model.codes, dtype=jnp.float32))
  return _words(net, params, choice)


def empty(config) -> Any:
  """What is kept beside the parameters, before the first update."""
  m = config.model
  if config.quantizer.kind == 'vq_ema':
    return {'vq': quantizers.vq_empty(m.codes, m.width)}
  if config.loss.mixture == 'running':
    return {'marginal': jnp.full((m.latents, m.codes), 1 / m.codes, jnp.float32), 'started': jnp.float32(0)}
  return {}


def begun(config, found, mask, key):
  """The stats of vq_ema that a run begins with: a codebook made of its first batch."""
  return {'vq': quantizers.vq_start(key, found, mask, config.model.codes, config.quantizer.least)}


def kept(config, stats, passage, mask, key):
  """The stats after a batch; and, of mixture = running, the average marginal with this batch's gradient in it."""
  q = config.quantizer
  if q.kind == 'vq_ema':
    latents = jax.lax.stop_gradient(passage.latents)
    return {'vq': quantizers.vq_update(key, latents, passage.codes, mask, stats['vq'], q.decay, q.least)}, None
  if config.loss.mixture != 'running':
    return stats, None
  new = objectives.running(stats['marginal'], objectives.marginal(passage.log_q, mask), config.loss.marginal_decay,
                           stats['started'])
  return {'marginal': jax.lax.stop_gradient(new), 'started': jnp.float32(1)}, new


def _words(net, params, choice):
  return net.apply({'params': params}, choice, method='words')
