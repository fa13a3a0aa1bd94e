"""The optimizer: clip, scale, decoupled decay, schedule, averaged weights; updates that are not finite are skipped."""

from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lab.config import choice
from lab.task import ConfigError, Params, Step, Sums


class OptState(NamedTuple):
  """What the optimizer remembers."""
  inner: Any             # optax's own: moments and counts
  ema: Params            # averaged weights; {} when off
  skipped: jax.Array     # i32[2]: non-finite updates in a row up to now, and in all


class Optimizer(NamedTuple):
  """init(params) -> OptState; update(loss, grads, opt, params, step) -> (params, OptState, applied bool[], Sums)."""
  init: Callable[[Params], OptState]
  update: Callable[..., tuple[Params, OptState, jax.Array, Sums]]


def check(config) -> None:
  """Raises ConfigError for optimizer settings that can't run."""
  choice(config, 'optim.name', SCALES)
  choice(config, 'optim.schedule', SCHEDULES)
  o = config.optim
  if not 0 <= o.warmup_steps <= config.total_steps:
    raise ConfigError(f'config.optim.warmup_steps = {o.warmup_steps}: expected 0 to total_steps = {config.total_steps}')
  for key, top in (('beta1', 1), ('beta2', 1), ('ema', 1)):
    if not 0 <= o[key] < top:
      raise ConfigError(f'config.optim.{key} = {o[key]}: expected at least 0 and less than 1')
  for key in ('learning_rate', 'decay', 'clip', 'eps', 'max_nonfinite'):
    if o[key] < 0:
      raise ConfigError(f'config.optim.{key} = {o[key]}: expected 0 or more')
  if o.eps == 0:
    raise ConfigError('config.optim.eps = 0.0: expected more than 0, or a zero gradient divides by zero')


def _adamw(o):
  return optax.scale_by_adam(o.beta1, o.beta2, o.eps)


def _sgd(o):
  return optax.trace(o.beta1) if o.beta1 else optax.identity()


SCALES = {'adamw': _adamw, 'sgd': _sgd}
SCHEDULES = {
    'constant': lambda share: jnp.ones_like(share),
    'cosine': lambda share: 0.5 * (1 + jnp.cos(jnp.pi * share)),
}


def rate(config, total_steps: int) -> Callable[[Step], jax.Array]:
  """config.optim -> the learning rate f32[] of the update made at state.step (0 for the first).

  Update u = step + 1 is at u / warmup_steps of the peak during the warm-up; a schedule ends with update total_steps.
  """
  def at(step):
    update = jnp.asarray(step, jnp.float32) + 1
    warm = jnp.minimum(update / max(config.warmup_steps, 1), 1)
    share = jnp.clip((update - config.warmup_steps) / max(total_steps - config.warmup_steps, 1), 0, 1)
    return config.learning_rate * warm * SCHEDULES[config.schedule](share)
  return at


def make(config, total_steps: int) -> tuple[Optimizer, Callable[[Step], jax.Array]]:
  """config.optim -> the optimizer and its learning rate as a function of the step."""
  chain = [optax.clip_by_global_norm(config.clip)] if config.clip else []
  chain.append(SCALES[config.name](config))
  if config.decay:
    matrices = lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)
    chain.append(optax.add_decayed_weights(config.decay, mask=matrices))
  tx, lr = optax.chain(*chain), rate(config, total_steps)

  def init(params):
    # A copy, not an alias: the state is donated to the step as a whole.
    return OptState(tx.init(params), jax.tree.map(jnp.copy, params) if config.ema else {}, jnp.zeros(2, jnp.int32))

  def update(loss, grads, opt, params, step):
    norm = optax.tree.norm(grads)
    updates, inner = tx.update(grads, opt.inner, params)
    updates = jax.tree.map(lambda u: -lr(step) * u, updates)
    change = optax.tree.norm(updates)      # a finite gradient can still be scaled to an infinite update
    ok = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(change)
    moved = optax.apply_updates(params, updates)
    ema = jax.tree.map(lambda e, p: config.ema * e + (1 - config.ema) * p, opt.ema, moved) if config.ema else {}
    skipped = jnp.where(ok, opt.skipped * jnp.array([0, 1]), opt.skipped + 1)
    params, inner, ema = select(ok, (moved, inner, ema), (params, opt.inner, opt.ema))
    one = jnp.float32(1)
    sums = {'learning_rate': (lr(step), one), 'gradient_norm': (norm, one),
            'update_norm': (change, one),
            'skipped_in_a_row': (skipped[0].astype(jnp.float32), one), 'skipped': (skipped[1].astype(jnp.float32), one)}
    return params, OptState(inner, ema, skipped), ok, sums

  return Optimizer(init, update), lr


def select(ok, new, old):
  """new where ok, old where not, leaf by leaf."""
  return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)


def weights(params: Params, opt: OptState) -> Params:
  """The weights to evaluate and predict with: the averaged ones where they are kept."""
  return opt.ema if jax.tree.leaves(opt.ema) else params
