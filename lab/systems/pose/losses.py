"""Masked squared error of every stage, and what tells a network that learns from one that has collapsed to zero.

Everything is a (total, weight) pair, so that batches, devices and processes add exactly. Cao et al. 2018,
arXiv 1812.08008, eq. 4-5; the weights of the two kinds of stages are the configuration's.
"""

import jax
import jax.numpy as jnp

from lab.metrics import objective
from lab.systems.pose import skeleton
from lab.systems.pose.targets import Targets
from lab.task import Sums, Terms

FLOOR = 0.01   # labels or predictions below this belong to no island


def training_loss(pafs: list[jax.Array], heatmaps: list[jax.Array], targets: Targets, mask: jax.Array,
                  loss) -> tuple[Terms, Sums]:
  """A term a stage, with its weight: each stage is supervised, lest gradients fade on the way to the first.

  Args:
    pafs: one f32[B, N, N, L, 2] a stage.
    heatmaps: one f32[B, N, N, K] a stage.
    targets: their labels.
    mask: f32[B], 0 = padding.
    loss: the `loss` section of the configuration.

  Returns:
    (Terms, Sums): what is minimised, and `stage_sums` with the loss itself under 'loss'.
  """
  sums = stage_sums(pafs, heatmaps, targets, mask)
  weights = [loss.paf_weight] * len(pafs) + [loss.heatmap_weight] * len(heatmaps)
  stages = {name: sums[f'{name}/loss'] for name in stage_names(len(pafs), len(heatmaps))}
  terms = {name: (w * total, values) for w, (name, (total, values)) in zip(weights, stages.items())}
  examples = mask.sum()
  return terms, {'loss': (objective(terms) * examples, examples), **sums}


def stage_names(pafs: int, heatmaps: int) -> list[str]:
  """Names that sort by stage: 'stage1_paf', ..., 'stage5_heatmap', ..."""
  kinds = ['paf'] * pafs + ['heatmap'] * heatmaps
  return [f'stage{i}_{kind}' for i, kind in enumerate(kinds, 1)]


def stage_sums(pafs: list[jax.Array], heatmaps: list[jax.Array], targets: Targets, mask: jax.Array) -> Sums:
  """The metrics of every stage; arguments as for `training_loss`. y is the label, p the prediction, m = use * mask.

  Returns, under '<stage>/...':
    loss: sum of m (p - y)^2 over the number of values of unpadded examples, ignored ones included.
    zero: the same for a network that sees nobody (zeros; where there is a background channel, ones there). A loss
      that stays near it has collapsed.
    mae: the mean of |p - y|.
    ratio: sum of |p| over sum of |y|; towards 0 in a collapse, 1 when all is well.
    recall: of what the label has, the share that is predicted: sum of min(|y|, |p|) over sum of |y|, |y| > 0.01.
    precision: of what is predicted, the share that the label has: the same with p and y exchanged.

  mae, ratio, recall and precision leave out the background, which is 1 nearly everywhere and would flatter them.
  """
  counts = targets.use * mask[:, None, None]                                       # f32[B, N, N]
  names = stage_names(len(pafs), len(heatmaps))
  out = {}
  for name, prediction in zip(names[:len(pafs)], pafs):
    out.update(_stage(name, _flat(prediction), _flat(targets.paf), counts, mask, background=False))
  background = targets.heatmap.shape[-1] > len(skeleton.KEYPOINTS)
  for name, prediction in zip(names[len(pafs):], heatmaps):
    out.update(_stage(name, prediction, targets.heatmap, counts, mask, background))
  return out


def _flat(paf: jax.Array) -> jax.Array:
  return paf.reshape(*paf.shape[:-2], -1)


def _stage(name: str, p: jax.Array, y: jax.Array, counts: jax.Array, mask: jax.Array, background: bool) -> Sums:
  """p, y: f32[B, N, N, C]."""
  m = counts[..., None]
  # selecting instead of multiplying: what is ignored adds 0 and has the gradient 0 even where it is not finite
  error = jnp.where(m > 0, p - y, 0)
  values = mask.sum() * (y.shape[1] * y.shape[2] * y.shape[3])
  nobody = y.at[..., -1].add(-1) if background else y
  out = {'loss': ((m * error**2).sum(), values), 'zero': ((m * nobody**2).sum(), values)}

  p, y, error = (a[..., :-1] if background else a for a in (jax.lax.stop_gradient(p), y, error))
  values = mask.sum() * (y.shape[1] * y.shape[2] * y.shape[3])
  p, y = jnp.where(m > 0, jnp.abs(p), 0), m * jnp.abs(y)
  both = jnp.minimum(p, y)
  out['mae'] = (m * jnp.abs(jax.lax.stop_gradient(error))).sum(), values
  out['ratio'] = p.sum(), y.sum()
  out['recall'] = jnp.where(y > FLOOR, both, 0).sum(), jnp.where(y > FLOOR, y, 0).sum()
  out['precision'] = jnp.where(p > FLOOR, both, 0).sum(), jnp.where(p > FLOOR, p, 0).sum()
  return {f'{name}/{key}': value for key, value in out.items()}
