"""Learning rates: pure functions of the update, part of the compiled step.

With u = step + 1 the number of the update, w = warmup_steps, p = learning_rate, m = end_rate, d = schedule_steps (or
the total), n = u - w updates after the warm-up, during which (u < w) every schedule but noam and onecycle is p u/w:
  constant     p
  linear       p + (m - p) n / (d - w), then m
  cosine       m + (p - m) (1 + cos(pi n / (d - w))) / 2, then m                (SGDR, arXiv 1608.03983, equation 5)
  exponential  max(m, p factor^(n / factor_steps))
  staircase    max(m, p factor^floor(n / factor_steps))
  rsqrt        p sqrt(w / u)                                                    (T5, arXiv 1910.10683, section 3.1.2)
  noam         p noam_width^-1/2 min(u^-1/2, u w^-3/2)                          (arXiv 1706.03762, equation 3)
  onecycle     from p/25 to p in the first 30 % of d, then to p/250,000, both cosine   (arXiv 1708.07120; fastai's form)
A run that continues another one, from its step i0 and last rate r, over W = continuation_steps:
  blend        r + (s(u) - r) (u - i0) / W, then the schedule s itself
  restart      r + (p - r) (u - i0) / W, then a cosine from p to m over the updates that are left
"""

from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lab.task import Step


class Joint(NamedTuple):
  """Where a run continues another one: the step it starts from, i32[] (-1: it continues none), the last rate, f32[]."""
  step: jax.Array
  rate: jax.Array


# name -> the keys that only some schedules read
SCHEDULES = {
    'constant': (), 'linear': ('end_rate', 'schedule_steps'), 'cosine': ('end_rate', 'schedule_steps'),
    'staircase': ('end_rate', 'factor', 'factor_steps'), 'exponential': ('end_rate', 'factor', 'factor_steps'),
    'rsqrt': (), 'noam': ('noam_width',), 'onecycle': ('schedule_steps',),
}


def nowhere() -> Joint:
  """The joint of a run that continues no other."""
  return Joint(jnp.int32(-1), jnp.float32(0))


def base(o, total_steps: int) -> Callable[[Step], jax.Array]:
  """config.optim -> the rate f32[] of the update made at state.step (0 for the first), without continuation."""
  peak, warm, end = o.learning_rate, o.warmup_steps, o.end_rate
  last = o.schedule_steps or total_steps
  if o.schedule == 'onecycle':
    cycle = optax.cosine_onecycle_schedule(last, peak)
    return lambda step: cycle(jnp.minimum(step, last))
  if o.schedule == 'noam':
    return lambda step: peak * o.noam_width**-0.5 * jnp.minimum(_update(step)**-0.5, _update(step) * warm**-1.5)
  after = {
      'constant': lambda n: jnp.float32(peak),
      'linear': optax.linear_schedule(peak, end, max(last - warm, 1)),
      'cosine': optax.cosine_decay_schedule(peak, max(last - warm, 1), end / peak if peak else 0.0),
      'exponential': lambda n: jnp.maximum(end, peak * o.factor ** (n / o.factor_steps)),
      # in whole numbers: optax's float quotient can fall short of the multiple itself
      'staircase': lambda n: jnp.maximum(end, peak * o.factor ** (n.astype(jnp.int32) // o.factor_steps)),
      'rsqrt': lambda n: peak * (max(warm, 1) / (n + max(warm, 1)))**0.5,
  }[o.schedule]

  def at(step):
    u = _update(step)
    return jnp.where(u < warm, peak * u / max(warm, 1), after(jnp.maximum(u - warm, 0)))
  return at


def make(o, total_steps: int) -> Callable[[Step, Joint], jax.Array]:
  """config.optim -> the rate f32[] of the update made at state.step, by a run with that joint."""
  schedule, span = base(o, total_steps), max(o.continuation_steps, 1)

  def at(step, joint):
    plain = schedule(step)
    if o.continuation == 'none':
      return plain
    since = _update(step) - joint.step
    goal = plain
    if o.continuation == 'restart':
      left = jnp.maximum(total_steps - joint.step - span, 1)
      share = jnp.clip((since - span) / left, 0, 1)
      goal = o.end_rate + (o.learning_rate - o.end_rate) * 0.5 * (1 + jnp.cos(jnp.pi * share))
    joined = joint.rate + (goal - joint.rate) * jnp.minimum(since / span, 1)
    return jnp.where(joint.step < 0, plain, jnp.where(since < span, joined, goal))
  return at


def _update(step):
  return jnp.asarray(step, jnp.float32) + 1
