"""The optimizer: what a gradient becomes, from clipping to the averaged weights, in one place.

The order of an update: frozen parameters leave; clip by norm, then by value; OrthoGrad; l2 decay; the optimizer's own
scaling; clip the update; decoupled decay; times the rate and the group's factor; clip the step. An update with a loss,
gradient or change that is not finite is skipped and counted. optax's own transformations wherever it has them, but
for norms, of which a GPU would have a kernel for each array.

Where gradients are finite and that settles it (BOUNDED), nothing waits for the change to be known: gradient, moments
and parameters are then read once and written once, for on an accelerator this is bound by bytes.
"""

import re
from typing import Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lab.config import choice, core
from lab.nn import target
from lab.schedules import SCHEDULES, Joint, make as make_rate, nowhere
from lab.sharding import paths
from lab.task import ConfigError, Params, Step, Sums


class OptState(NamedTuple):
  """What the optimizer remembers."""
  inner: Any             # optax's own: moments and counts
  ema: Params            # averaged weights; {} when off
  skipped: jax.Array     # i32[2]: non-finite updates in a row up to now, and in all
  rate: jax.Array        # f32[]: learning rate of the last update that was made, before the groups' factors
  joint: Joint           # where the run continued another one


class Optimizer(NamedTuple):
  """init(params) -> OptState; update(loss, grads, opt, params, step) -> (params, OptState, applied bool[], Sums)."""
  init: Callable[[Params], OptState]
  update: Callable[..., tuple[Params, OptState, jax.Array, Sums]]


class Kind(NamedTuple):
  """An optimizer: own values of the keys it reads, and (config.optim, beta1, beta2, eps) -> optax transformation."""
  own: dict[str, float]
  scale: Callable[..., optax.GradientTransformation]


def _rmsprop(o, b1, b2, eps):
  scale = optax.scale_by_rms(b2, eps, eps_in_sqrt=False)
  return optax.chain(scale, optax.trace(b1, o.nesterov)) if b1 else scale


def _adafactor(o, b1, b2, eps):
  del b1
  relative = lambda path, u, w: u * jnp.maximum(_rms(o, path, w), 1e-3)
  return optax.chain(optax.scale_by_factored_rms(decay_rate=b2, epsilon=eps), _clip_update(o, 1.0),
                     optax.stateless(lambda updates, params: _by_path(relative, updates, params)))


def _muon(o, beta, b2, eps):
  del b2

  def sides(path, x):      # a convolution's matrix is all its inputs x its outputs
    first = x.ndim - _ndim(o, path, x)
    return optax.contrib.MuonDimensionNumbers(tuple(range(first, x.ndim - 1)), x.ndim - 1)
  muon = optax.contrib.muon(1.0, beta=beta, eps=eps, consistent_rms=0.2,
                            muon_weight_dimension_numbers=lambda params: _by_path(sides, params))
  return optax.chain(muon, optax.scale(-1.0))      # it comes with the sign of a descent


ADAM = {'beta1': 0.9, 'beta2': 0.999, 'eps': 1e-8}
KINDS = {
    # Robbins & Monro 1951
    'sgd': Kind({}, lambda o, b1, b2, eps: optax.identity()),
    # v = b1 v + g; w -= rate v (Polyak 1964); nesterov: g + b1 v (Sutskever et al. 2013, equation 7)
    'momentum': Kind({'beta1': 0.9}, lambda o, b1, b2, eps: optax.trace(b1, o.nesterov)),
    # g / (sqrt(b2-average of g^2) + eps), then momentum where beta1 > 0 (Hinton's lecture 6e, 2012)
    'rmsprop': Kind({'beta1': 0.0, 'beta2': 0.9, 'eps': 1e-8}, _rmsprop),
    # Adam: arXiv 1412.6980, algorithm 1, with l2 decay; AdamW: 1711.05101, algorithm 2, with decoupled decay
    'adam': Kind(ADAM, lambda o, b1, b2, eps: optax.scale_by_adam(b1, b2, eps)),
    'adamw': Kind(ADAM, lambda o, b1, b2, eps: optax.scale_by_adam(b1, b2, eps)),
    # beta2: the power of the decay 1 - t^-beta2; factored from 128 x 128 (arXiv 1804.04235, algorithms 4 and 5)
    'adafactor': Kind({'beta2': 0.8, 'eps': 1e-30}, _adafactor),
    # sign(b1 m + (1 - b1) g), m = b2 m + (1 - b2) g (arXiv 2302.06675, program 1)
    'lion': Kind({'beta1': 0.9, 'beta2': 0.99}, lambda o, b1, b2, eps: optax.scale_by_lion(b1, b2)),
    # arXiv 1908.03265, algorithm 2, rectified from rho > 5 on, as in the authors' program
    'radam': Kind(ADAM, lambda o, b1, b2, eps: optax.scale_by_radam(b1, b2, eps)),
    # arXiv 1212.5701, algorithm 1, times the rate, of which 1 is the paper's
    'adadelta': Kind({'beta2': 0.9, 'eps': 1e-6}, lambda o, b1, b2, eps: optax.scale_by_adadelta(b2, eps)),
    # g / sqrt(sum of g^2 + eps) (Duchi et al. 2011, figure 1 with a diagonal)
    'adagrad': Kind({'eps': 1e-7}, lambda o, b1, b2, eps: optax.scale_by_rss(0.0, eps)),
    # arXiv 1412.6980, algorithm 2
    'adamax': Kind(ADAM, lambda o, b1, b2, eps: optax.scale_by_adamax(b1, b2, eps)),
    # matrices: momentum (optax's, with Adam's correction of its bias), orthogonalised by five Newton-Schulz steps
    # (Jordan et al. 2024), times 0.2 sqrt(larger side) so that it shares AdamW's rates (arXiv 2502.16982, equation 4)
    'muon': Kind({'beta1': 0.95, 'eps': 1e-8}, _muon),
}
# changes that are finite where the gradient's norm is, at rates, factors and decays of at most TAME: |g| is then below
# 2e19, its moments are averages of g and of squares below 4e38, and what they are divided by is no less than eps
BOUNDED, TAME = ('sgd', 'momentum', 'adam', 'adamw', 'lion'), 1e3
SMALL = 1 << 14      # numbers of an array of which no sums are made first


def check(config) -> None:
  """Raises ConfigError for optimizer settings that can't run, or that nothing would read."""
  o = config.optim
  for key, options in (('name', KINDS), ('schedule', SCHEDULES), ('decay_kind', ('decoupled', 'l2')),
                       ('continuation', ('blend', 'restart', 'none')), ('second.name', set(KINDS) - {'muon'})):
    choice(config, f'optim.{key}', sorted(options))
  _expect('ema', o.ema, 0 <= o.ema < 1, 'at least 0 and less than 1')
  for section, where in ((o, ''), (o.second, 'second.')):
    for key in ('beta1', 'beta2'):
      good = section[key] == -1 or 0 <= section[key] < 1
      _expect(where + key, section[key], good, 'at least 0 and less than 1, or -1')
    _expect(where + 'eps', section.eps, section.eps == -1 or section.eps > 0, 'more than 0, or -1')
  for key in ('learning_rate', 'factor', 'factor_steps', 'noam_width', 'accumulate'):
    _expect(key, o[key], o[key] > 0, 'more than 0')
  for key in ('decay', 'clip', 'clip_value', 'clip_update', 'clip_step', 'max_nonfinite', 'end_rate', 'schedule_steps',
              'continuation_steps', 'accumulate_from'):
    _expect(key, o[key], o[key] >= 0, '0 or more')
  last = o.schedule_steps or config.total_steps
  _expect('warmup_steps', o.warmup_steps, 0 <= o.warmup_steps <= last, f'0 to the schedule\'s end, {last}')
  _expect('warmup_steps', o.warmup_steps, o.schedule != 'noam' or o.warmup_steps, 'more than 0 for noam')
  _expect('warmup_steps', o.warmup_steps, o.schedule != 'onecycle' or not o.warmup_steps, '0: onecycle has its own')
  _expect('continuation', o.continuation, o.continuation != 'restart' or o.schedule != 'noam',
          'blend or none: the learning_rate of noam is no peak')
  _expect('decay_kind', o.decay_kind, o.decay_kind != 'l2' or o.name != 'adamw', 'decoupled; adam is the one with l2')
  _expect('accumulate_from', o.accumulate_from, o.accumulate > 1 or not o.accumulate_from, '0, for accumulate is 1')
  for key in ('stacked', 'frozen', 'decay_not'):
    _regex(key, o[key])
  _regex('second.params', o.second.params)
  for pair in o.rates:
    _expect('rates', o.rates, isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
            and isinstance(pair[1], (int, float)) and pair[1] >= 0, '((regex, factor), ...)')
    _regex('rates', pair[0])
  _unread(o, config.continue_from)


def _unread(o, continues):
  """Refuses a key that was set although the chosen optimizer, schedule or kind of run does not look at it."""
  default, second = core().optim, _has_second(o)
  nesterov = o.name == 'momentum' or o.name == 'rmsprop' and o.beta1 > 0
  reads = {*KINDS[o.name].own, *SCHEDULES[o.schedule], *(('nesterov',) if nesterov else ()),
           *(('end_rate',) if o.continuation == 'restart' else ())}
  for key in ('beta1', 'beta2', 'eps', 'nesterov', *{k for keys in SCHEDULES.values() for k in keys}):
    _expect(key, o[key], key in reads or o[key] == default[key],
            f'{default[key]!r}, for {o.name} with {o.schedule} does not read it')
  for key in ('continuation', 'continuation_steps', 'keep_moments'):
    _expect(key, o[key], continues or o[key] == default[key], f'{default[key]!r}, for continue_from is not set')
  for key in ('decay_not', 'decay_kind'):
    _expect(key, o[key], o.decay or o[key] == default[key], f'{default[key]!r}, for decay is 0')
  for key in ('name', 'beta1', 'beta2', 'eps'):
    read = second and (key == 'name' or key in KINDS[o.second.name].own)
    _expect(f'second.{key}', o.second[key], read or o.second[key] == default.second[key],
            f'{default.second[key]!r}, for nothing reads it')


def _expect(key, value, good, what):
  if not good:
    raise ConfigError(f'config.optim.{key} = {value!r}: expected {what}')


def _regex(key, text):
  try:
    re.compile(text)
  except re.error as e:
    raise ConfigError(f'config.optim.{key} = {text!r}: not a regular expression: {e}') from None


def _has_second(o) -> bool:
  return bool(o.second.params) or o.name == 'muon'


def make(o, total_steps: int, rate: Callable[[Step, Joint], jax.Array] | None = None) -> Optimizer:
  """config.optim -> the optimizer, with the schedule's rate or the given one."""
  lr, tx, bounded = rate or make_rate(o, total_steps), _transformation(o), rate is None and _bounded(o)
  twice = bounded and o.name in ('adam', 'adamw') and not _has_second(o)

  def init(params):
    _audit(o, params)
    # A copy, not an alias: the state is donated to the step as a whole.
    ema = jax.tree.map(jnp.copy, params) if o.ema else {}
    return OptState(tx.init(params), ema, jnp.zeros(2, jnp.int32), jnp.float32(0), nowhere())

  def update(loss, grads, opt, params, step):
    if o.frozen:      # before the norm: what does not learn has no say in it
      grads = _by_path(lambda p, g: jnp.zeros_like(g) if re.search(o.frozen, p) else g, grads)
    size, now = norm(grads), lr(step, opt.joint)
    ok = jnp.isfinite(loss) & jnp.isfinite(size)
    step_of = lambda made: _by_path(lambda p, u: -now * _factor(o, p) * u, made)
    updates, inner = tx.update(grads, opt.inner, params)
    updates = step_of(updates)
    change = norm(step_of(tx.update(grads, _counted_apart(opt.inner), params)[0]) if twice else updates)
    ok = ok if bounded else ok & jnp.isfinite(change)      # a finite gradient can still be scaled to an infinite update
    if o.clip_step:      # after the test: a clipped infinity is finite
      updates = jax.tree.map(lambda u: jnp.clip(u, -o.clip_step, o.clip_step), updates)
      change = norm(updates)
    moved = optax.apply_updates(params, updates)
    ema = jax.tree.map(lambda e, p: o.ema * e + (1 - o.ema) * p, opt.ema, moved) if o.ema else {}
    skipped = jnp.where(ok, opt.skipped * jnp.array([0, 1]), opt.skipped + 1)
    params, inner, ema, last = select(ok, (moved, inner, ema, now), (params, opt.inner, opt.ema, opt.rate))
    one = jnp.float32(1)
    sums = {'learning_rate': (now, one), 'gradient_norm': (size, one), 'update_norm': (change, one),
            'skipped_in_a_row': (skipped[0].astype(jnp.float32), one), 'skipped': (skipped[1].astype(jnp.float32), one)}
    return params, OptState(inner, ema, skipped, last, opt.joint), ok, sums

  return Optimizer(init, update)


def _counted_apart(inner):
  """Optax's state for a second change, of which nothing but the norm is wanted; the same as the first.

  Of one change that is added to the parameters and also summed up, XLA makes two passes on a GPU: it writes it, and
  reads it again, 8 of 36 bytes a parameter. Of two that it may not take for one, since their counts are behind a
  barrier, it makes both, and the moments, where it reads the gradient.
  """
  if target.platform() != 'gpu':
    return inner
  return jax.tree.map(lambda x: jax.lax.optimization_barrier(x) if x.ndim == 0 else x, inner)


def norm(tree) -> jax.Array:
  """The square root of the sum of squares of all arrays of a tree, as optax.tree.norm gives it.

  That takes a GPU a kernel or two for each array, of some microseconds, however small. Here arrays are
  summed along their rows alone, what is small is left as it is, and the sum of all that together is one. (Where arrays
  are split over devices that would bring them together first.)
  """
  split = {axis for axis, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1}
  if split - {'data'}:
    return optax.tree.norm(tree)
  # a convolution's inputs lie side by side on a GPU, of a matrix its last axis
  squares = [jnp.square(x) if x.size <= SMALL else jnp.square(x).sum(-2 if x.ndim == 4 else -1)
             for x in jax.tree.leaves(tree)]
  if not squares:
    return jnp.float32(0)
  # through the barrier, or the compiler sums each part by itself again
  return jnp.sqrt(jax.lax.optimization_barrier(jnp.concatenate([x.ravel() for x in squares])).sum())


def _clip_norm(grads, most):
  """g most / |g| where |g| is more than `most` (Pascanu et al. 2013, algorithm 1); XLA merges it with the other."""
  size = norm(grads)
  return jax.tree.map(lambda g: jnp.where(size < most, g, g / size.astype(g.dtype) * most), grads)


def _bounded(o) -> bool:
  names = [o.name, *([o.second.name] if _has_second(o) else [])]
  sizes = [o.learning_rate, o.end_rate, o.decay, *(factor for _, factor in o.rates)]
  grows = 'factor' in SCHEDULES[o.schedule] and o.factor > 1
  return set(names) <= set(BOUNDED) and max(sizes) <= TAME and not grows


def _transformation(o) -> optax.GradientTransformation:
  """Everything but the rate."""
  chain = [optax.stateless(lambda g, _: _clip_norm(g, o.clip))] if o.clip else []
  chain += [optax.clip(o.clip_value)] if o.clip_value else []
  chain += [optax.stateless(lambda g, w: _by_path(lambda p, *x: _orthogonal(o, p, *x), g, w))] if o.orthograd else []
  kinds = {'first': _scaled(o, o.name, o), 'second': _scaled(o, o.second.name, o.second), 'frozen': optax.set_to_zero()}

  def label(path, x):
    if o.frozen and re.search(o.frozen, path):
      return 'frozen'
    second = o.second.params and re.search(o.second.params, path) or o.name == 'muon' and _ndim(o, path, x) < 2
    return 'second' if second else 'first'
  whole = not o.frozen and not _has_second(o)
  chain.append(kinds['first'] if whole else optax.partition(kinds, lambda params: _by_path(label, params)))
  return optax.chain(*chain)


def _scaled(o, name, betas) -> optax.GradientTransformation:
  """An optimizer's own scaling, between the two kinds of decay."""
  read = lambda key: KINDS[name].own.get(key) if betas[key] == -1 else betas[key]
  decay = optax.add_decayed_weights(o.decay, lambda params: _by_path(lambda p, x: _decays(o, p, x), params))
  l2 = name == 'adam' or name != 'adamw' and o.decay_kind == 'l2'
  chain = [decay] if o.decay and l2 else []
  chain.append(KINDS[name].scale(o, read('beta1'), read('beta2'), read('eps')))
  chain += [_clip_update(o, o.clip_update)] if o.clip_update else []
  chain += [decay] if o.decay and not l2 else []
  return optax.chain(*chain)


def _rms(o, path, x):
  """Root mean square of an array, or of each layer of a stack, [1, ...] or [layers, 1, ...]."""
  axes = tuple(range(x.ndim - _ndim(o, path, x), x.ndim))
  return jnp.sqrt(jnp.mean(x * x, axes, keepdims=True))


def _clip_update(o, most) -> optax.GradientTransformation:
  """u / max(1, RMS(u) / most), array by array or layer by layer (arXiv 1804.04235, section 6)."""
  clip = lambda path, u: u / jnp.maximum(1, _rms(o, path, u) / most)
  return optax.stateless(lambda updates, params: _by_path(clip, updates))


def _orthogonal(o, path, g, w):
  """OrthoGrad of one array, or of each layer of a stack: g without its part along w, at g's length; norm scales stay.

  g' = g - (w.g / w.w) w; g' |g| / |g'| (arXiv 2501.04697, section 5).
  """
  if path.split('/')[-1] == 'scale':
    return g
  axes = tuple(range(g.ndim - _ndim(o, path, g), g.ndim))
  dot = lambda a, b: jnp.sum(a * b, axes, keepdims=True)
  across = g - dot(w, g) / (dot(w, w) + 1e-30) * w
  before, after = jnp.sqrt(dot(g, g)), jnp.sqrt(dot(across, across))
  # of a gradient along w only a rounding is left; it must not be brought back to the gradient's length
  return across * jnp.where(after > 1e-6 * before, before / (after + 1e-30), 0)


def _ndim(o, path, x) -> int:
  """Axes of an array, or of one layer of a stack."""
  return x.ndim - bool(o.stacked and re.search(o.stacked, path))


def _decays(o, path, x) -> bool:
  return _ndim(o, path, x) >= 2 and not (o.decay_not and re.search(o.decay_not, path))


def _factor(o, path) -> float:
  return next((factor for pattern, factor in o.rates if re.search(pattern, path)), 1.0)


def _by_path(function, tree, *others):
  """function(path, leaf, ...) on every array of a tree of parameters, or of one that partition has thinned out."""
  named = lambda path, *x: function(jax.tree_util.keystr(path, simple=True, separator='/'), *x)
  return jax.tree_util.tree_map_with_path(named, tree, *others)


def _audit(o, params):
  """Raises ConfigError for a pattern that names no parameter: it would silently do nothing."""
  names = [p for p, _ in paths(params)]
  patterns = {'stacked': o.stacked, 'frozen': o.frozen, 'decay_not': o.decay_not, 'second.params': o.second.params}
  for key, pattern in [*patterns.items(), *(('rates', pattern) for pattern, _ in o.rates)]:
    if pattern and not any(re.search(pattern, n) for n in names):
      raise ConfigError(f'config.optim.{key}: {pattern!r} matches no parameter; there are {", ".join(names[:5])}'
                        f'{" and more" if len(names) > 5 else ""}')


def select(ok, new, old):
  """new where ok, old where not, leaf by leaf."""
  return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)


def weights(params: Params, opt: OptState) -> Params:
  """The weights to evaluate and predict with: the averaged ones where they are kept."""
  return opt.ema if jax.tree.leaves(opt.ema) else params
