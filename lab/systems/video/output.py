"""Range of the frames x activation of the readout x loss, as one name: '0sb' is (0, 1), sigmoid, binary cross-entropy.

Ranges: 0 is (0, 1), 1 is (-1, 1), 5 is (-.5, .5). Activations: s is sigmoid, t tanh, n none. Losses: b is binary
cross-entropy, from logits, and m squared error. Losses are per frame, summed over its pixels, and in (0, 1) units.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lab.task import ConfigError

MEAN_PIXEL = 0.0493            # of Moving MNIST
RANGES = {'0': (0.0, 1.0), '1': (-1.0, 1.0), '5': (-0.5, 0.5)}
ACTIVATIONS = {'s': 'sigmoid', 't': 'tanh', 'n': 'none'}
LOSSES = {'b': 'bce', 'm': 'mse'}


class Output(NamedTuple):
  """What a readout's numbers mean, and what they are charged. 'logits' are the readout, multiplied, not yet activated.

  Fields:
    low, high: range of the frames that the network sees and gives.
    activation: sigmoid, tanh or none.
    loss: bce or mse.
    multiply: what the readout is multiplied by to become logits; the model does that.
  """
  low: float
  high: float
  activation: str
  loss: str
  multiply: float = 1.0

  def to_range(self, frames: jax.Array) -> jax.Array:
    """Frames in (0, 1) -> the network's range."""
    return self.low + (self.high - self.low) * frames

  def to_unit(self, frames: jax.Array) -> jax.Array:
    """Frames in the network's range -> (0, 1). Not clipped: none and, over (-.5, .5), tanh may go beyond."""
    return (frames - self.low) / (self.high - self.low)

  def activate(self, logits: jax.Array) -> jax.Array:
    """Logits -> frames in the network's range."""
    return {'sigmoid': jax.nn.sigmoid, 'tanh': jnp.tanh, 'none': lambda x: x}[self.activation](logits)

  def training_loss(self, logits: jax.Array, target: jax.Array) -> jax.Array:
    """Loss f32[B, T] of logits [B, T, H, W] for frames f32[B, T, H, W] in (0, 1): nats, or squared error, a frame."""
    logits = logits.astype(jnp.float32)
    if self.loss == 'bce':
      return cross_entropy(logits, target).sum((-2, -1))
    error = (self.activate(logits) - self.to_range(target)) / (self.high - self.low)
    return (error**2).sum((-2, -1))

  @property
  def loss_from_logits(self) -> bool:
    """Whether the frames are probabilities, the sigmoid of their logits: then cross-entropy needs no clipping."""
    return self.activation == 'sigmoid'

  def mean_bias(self) -> float:
    """The readout's bias at which it gives the mean pixel, before it is multiplied: what training best starts from."""
    mean = self.to_range(MEAN_PIXEL)
    inverse = {'sigmoid': lambda p: math.log(p / (1 - p)), 'tanh': math.atanh, 'none': lambda p: p}[self.activation]
    return inverse(mean) / self.multiply

  def reachable(self, low_h: float, high_h: float) -> tuple[float, float]:
    """The pixels, in (0, 1) units, that a readout between low_h and high_h draws; a bound on how good it can get.

    States of an LSTM lie in (-1, 1); shown as they are through a sigmoid they reach .269 to .731, and never black.
    """
    low, high = (float(self.to_unit(self.activate(jnp.float32(self.multiply * h)))) for h in (low_h, high_h))
    return low, high


COMBOS = {name: Output(*RANGES[name[0]], ACTIVATIONS[name[1]], LOSSES[name[2]])
          for name in ('0sb', '0sm', '0nm', '1tm', '1nm', '5tm')}


def parse(combo: str, multiply: float) -> Output:
  """The output of config.loss.combo and config.loss.multiply. Raises ConfigError, with the reason."""
  if combo not in COMBOS:
    raise ConfigError(f'config.loss.combo = {combo!r}: {_why_not(combo)}; expected one of {", ".join(COMBOS)}')
  if not 0 < multiply < math.inf:
    raise ConfigError(f'config.loss.multiply = {multiply}: expected a finite number above 0')
  if multiply != 1 and COMBOS[combo].activation == 'none':
    raise ConfigError(f'config.loss.multiply = {multiply}: without an activation ({combo}) there is nothing to open; '
                      'expected 1')
  return COMBOS[combo]._replace(multiply=float(multiply))


def _why_not(combo: str) -> str:
  """Why a triple is none of ours."""
  if len(combo) != 3 or combo[0] not in RANGES or combo[1] not in ACTIVATIONS or combo[2] not in LOSSES:
    return 'is no range (0, 1 or 5), activation (s, t or n) and loss (b or m)'
  if combo[2] == 'b':
    return 'binary cross-entropy needs a sigmoid and the range (0, 1)'
  if combo[1] == 's':
    return 'a sigmoid gives (0, 1), and no other range'
  if combo[1] == 't':
    return 'half of what tanh gives lies outside the range (0, 1)'
  return 'the range (-.5, .5) is there for tanh'


def cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
  """Binary cross-entropy in nats of the sigmoid of logits, an element: finite, and so its gradient, at any logits."""
  return jax.nn.softplus(logits) - target * logits
