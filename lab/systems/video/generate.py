"""Moving MNIST, drawn on the device: digits that move straight ahead and bounce off the frame.

Srivastava et al. 2015, arXiv 1502.04681, section 4; by their released code the speed is constant and a digit stops at
the wall for the rest of the frame. A sequence is a pure function of its digits and its number. Positions and
velocities are shares of the canvas, the frame's side less the digit's; coordinate 0 is x, the column, and 1 is y.
`data` is the `data` section of the configuration.
"""

import jax
import jax.numpy as jnp

GRID = 2.0**23                 # positions are multiples of 1 / GRID: their sums are exact in float32


def sequences(digits: jax.Array, number: jax.Array, frames: int, size: int, data) -> jax.Array:
  """A batch of sequences.

  Args:
    digits: u8[B, n, 28, 28].
    number: u32[B, 2], what the motion is drawn from: a seed and the number of the sequence.
    frames: T, how many.
    size: px, side of a frame.
    data: pool, speed_min, speed_max and bounce.

  Returns:
    u8[B, T, size, size].
  """
  def one(digits, number):
    # the generator is named, lest config.prng change the data
    key = jax.random.fold_in(jax.random.key(number[0], impl='threefry2x32'), number[1])
    start, velocity = motion(key, len(digits), data)
    return render(pool(digits, data.pool), paths(start, velocity, frames, data.bounce), size)

  return jax.vmap(one)(digits, number)


def clip(batch, config) -> jax.Array:
  """The frames of a batch, f32[B, T, H, W] in [0, 1]: its 'video' u8[B, T, H, W], or what is generated.

  Generated from its 'digits' and 'number', as for `sequences`; T is config.video.past + config.video.future.
  """
  if 'video' in batch:
    video = batch['video']
  else:
    video = sequences(batch['digits'], batch['number'], config.video.past + config.video.future, config.video.size,
                      config.data)
  return video.astype(jnp.float32) / 255


def motion(key: jax.Array, n: int, data) -> tuple[jax.Array, jax.Array]:
  """Start and velocity (a frame) of n digits, f32[n, 2] each; uniform in the canvas, in direction and in speed."""
  place, turn, pace = jax.random.split(key, 3)
  start = jax.random.uniform(place, (n, 2))
  angle = jax.random.uniform(turn, (n, 1), maxval=2 * jnp.pi)
  speed = jax.random.uniform(pace, (n, 1), minval=data.speed_min, maxval=data.speed_max)
  velocity = speed * jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], 1)
  return start, jnp.round(velocity * GRID) / GRID


def paths(start: jax.Array, velocity: jax.Array, frames: int, bounce: str) -> jax.Array:
  """Positions f32[T, n, 2] in [0, 1] after 1, ..., T steps.

  A coordinate that passes a wall turns round. With bounce = clamp it stops at the wall until the next step, as in the
  paper's code; with reflect it goes back by as much as it had passed. On the grid of `motion` every step is exact, so
  that no compiler's way of adding moves a digit by a pixel.
  """
  def step(state, _):
    position, velocity = state
    position = position + velocity
    low, high = position < 0, position > 1
    if bounce == 'clamp':
      position = jnp.clip(position, 0, 1)
    else:
      position = jnp.where(low, -position, jnp.where(high, 2 - position, position))
    return (position, jnp.where(low | high, -velocity, velocity)), position

  return jax.lax.scan(step, (start, velocity), length=frames)[1]


def render(digits: jax.Array, paths: jax.Array, size: int) -> jax.Array:
  """Frames u8[T, size, size] of digits u8[n, h, w] at paths f32[T, n, 2]; where they overlap the brighter one shows."""
  n, h, w = digits.shape
  room = jnp.array([size - w, size - h], jnp.float32)[None, None]
  corner = (room * paths).astype(jnp.int32)                                        # i32[T, n, 2], truncated
  # a product with a matrix of zeros and ones moves columns, and another one rows: what accelerators are quick at.
  # Each sum has one term, an integer up to 255: exact even in bfloat16
  column = _places(corner[..., 0], w, size)                                        # f32[T, n, w, size]
  row = _places(corner[..., 1], h, size)
  moved = jnp.einsum('nhw,tnwx->tnhx', digits.astype(jnp.float32), column)
  return jnp.einsum('tnhy,tnhx->tnyx', row, moved).max(1).astype(jnp.uint8)


def _places(first: jax.Array, length: int, size: int) -> jax.Array:
  """f32[..., length, size]: 1 where index i of a digit comes to lie, first + i."""
  return jax.nn.one_hot(first[..., None] + jnp.arange(length).reshape((1,) * first.ndim + (-1,)), size)


def pool(digits: jax.Array, k: int) -> jax.Array:
  """u8[..., h / k, w / k]: means of k x k pixels, rounded half to even; in integers, for division differs by device."""
  if k == 1:
    return digits
  *batch, h, w = digits.shape
  total = digits.reshape(*batch, h // k, k, w // k, k).astype(jnp.int32).sum((-3, -1))
  whole, twice = total // k**2, 2 * (total % k**2)
  return (whole + ((twice > k**2) | ((twice == k**2) & (whole % 2 == 1)))).astype(jnp.uint8)
