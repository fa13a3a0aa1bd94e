"""What is measured of frames: squared error and nats a frame, SSIM and PSNR, the copy of the last frame beside them.

Everything is a (total, weight) pair over the frames of unpadded sequences. Frames are in (0, 1) units. The numbers of
the literature are `mse_per_frame`, the sum over the pixels of a frame, averaged over frames and sequences; the mean
over pixels is smaller by their number, 4096 of a frame of 64 x 64, and goes by its own name.
"""

import jax
import jax.numpy as jnp

from lab.systems.video.output import cross_entropy
from lab.task import Sums

WINDOW = 7                     # px, side of SSIM's window
K1, K2 = 0.01, 0.03            # SSIM's constants, over a data range of 1
EPS = 1e-6                     # cross-entropy of frames that are no sigmoid: clipped to [EPS, 1 - EPS]
MSE_FLOOR = 1e-10              # PSNR of equal frames is 100 dB


def sums(frames: jax.Array, logits: jax.Array | None, truth: jax.Array, mask: jax.Array, prefix: str) -> Sums:
  """The errors of frames.

  Args:
    frames: f32[B, T, H, W], what the network gives in (0, 1) units, not clipped.
    logits: their logits, where frames are the sigmoid of them, else None.
    truth: f32[B, T, H, W] in [0, 1].
    mask: f32[B], 0 = padding.
    prefix: of the names, 'pred' or 'recon'.

  Returns, under '<prefix>_...':
    mse_per_frame, mae_per_frame: squared and absolute error, summed over pixels.
    mse_per_frame/01, /02, ...: of each frame by itself, as they lie in `frames`; the task gives them in the order of
      time, so recon_mse_per_frame/01 is of the first frame seen, also where the head gives the last one first.
    mse_per_pixel: the mean over pixels.
    bce_nats_per_frame: Bernoulli cross-entropy, summed over pixels.
    ssim, psnr_db: of frames clipped to [0, 1], over a data range of 1. There is no SSIM of frames under 7 px.
  """
  frames, (h, w) = frames.astype(jnp.float32), truth.shape[-2:]
  squared = ((frames - truth)**2).sum((-2, -1))                                    # f32[B, T]
  if logits is None:
    # p and 1 - p are clipped each for itself, for float32 rounds 1 - EPS by a hundredth of EPS
    p, rest = (jnp.clip(x, EPS, 1 - EPS) for x in (frames, 1 - frames))
    nats = -(truth * jnp.log(p) + (1 - truth) * jnp.log(rest))
  else:
    nats = cross_entropy(logits.astype(jnp.float32), truth)
  shown = jnp.clip(frames, 0, 1)
  noise = jnp.maximum(((shown - truth)**2).mean((-2, -1)), MSE_FLOOR)
  found = {'mse_per_frame': squared, 'mse_per_pixel': squared / (h * w),
           'mae_per_frame': jnp.abs(frames - truth).sum((-2, -1)), 'bce_nats_per_frame': nats.sum((-2, -1)),
           'psnr_db': -10 * jnp.log10(noise)}
  if min(h, w) >= WINDOW:
    found['ssim'] = ssim(shown, truth)
  return ({f'{prefix}_{name}': _sum(value, mask) for name, value in found.items()}
          | _horizons(f'{prefix}_mse_per_frame', squared, mask))


def ssim(a: jax.Array, b: jax.Array) -> jax.Array:
  """Structural similarity f32[B, T] of frames f32[B, T, H, W] in [0, 1] (Wang et al. 2004).

  As published for Moving MNIST, that is the default of scikit-image's structural_similarity with a data range of 1: a
  uniform window of 7 x 7 px, sample covariance (N - 1), the mean over windows that lie inside the frame, which is at
  least 7 x 7 px.
  """
  n = WINDOW**2
  mean_a, mean_b = _window_mean(a), _window_mean(b)
  scale = n / (n - 1)
  var_a = scale * (_window_mean(a * a) - mean_a * mean_a)
  var_b = scale * (_window_mean(b * b) - mean_b * mean_b)
  cov = scale * (_window_mean(a * b) - mean_a * mean_b)
  c1, c2 = K1**2, K2**2
  similar = ((2 * mean_a * mean_b + c1) * (2 * cov + c2)
             / ((mean_a * mean_a + mean_b * mean_b + c1) * (var_a + var_b + c2)))
  return similar.mean((-2, -1))


def _window_mean(x: jax.Array) -> jax.Array:
  """Means f32[..., H - 6, W - 6] over the windows inside; sums of shifted views, rows and then columns."""
  h, w = (side - WINDOW + 1 for side in x.shape[-2:])
  x = sum(x[..., i:i + h, :] for i in range(WINDOW))
  return sum(x[..., i:i + w] for i in range(WINDOW)) / WINDOW**2


def baselines(past: jax.Array, future: jax.Array, mask: jax.Array) -> Sums:
  """Errors of forecasting f32[B, T, H, W] without a network: the last seen frame again, and black.

  Returns copy_last_mse_per_frame, the same of each frame (.../01 is the first), zero_mse_per_frame, and
  entropy_nats_per_frame: the cross-entropy of a forecast that gives each grey pixel its own value, which none can beat.
  """
  copied = ((past[:, -1:] - future)**2).sum((-2, -1))
  return {'copy_last_mse_per_frame': _sum(copied, mask), **_horizons('copy_last_mse_per_frame', copied, mask),
          'zero_mse_per_frame': _sum((future**2).sum((-2, -1)), mask),
          'entropy_nats_per_frame': _sum((_surprise(future) + _surprise(1 - future)).sum((-2, -1)), mask)}


def _surprise(p: jax.Array) -> jax.Array:
  """-p log p, which is 0 at 0."""
  return -jax.scipy.special.xlogy(p, p)


def state_range(tops: jax.Array, mask: jax.Array, prefix: str) -> Sums:
  """How far states [B, T, ...] of a top layer reach.

  Returns <prefix>_h_min and <prefix>_h_max of a sequence, averaged over sequences, and <prefix>_h_abs, the mean of |h|.
  """
  flat = tops.reshape(tops.shape[0], 1, -1).astype(jnp.float32)
  return {f'{prefix}_h_min': _sum(flat.min(-1), mask), f'{prefix}_h_max': _sum(flat.max(-1), mask),
          f'{prefix}_h_abs': _sum(jnp.abs(flat).mean(-1), mask)}


def _sum(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Total and weight of values f32[B, T]; padding is selected away, for it need not be finite."""
  counts = mask[:, None]
  return jnp.where(counts > 0, values * counts, 0).sum(), mask.sum() * values.shape[1]


def _horizons(name: str, values: jax.Array, mask: jax.Array) -> Sums:
  """'<name>/01', ...: of each frame of values f32[B, T] by itself."""
  return {f'{name}/{t + 1:02d}': _sum(values[:, t:t + 1], mask) for t in range(values.shape[1])}
