"""The skeleton: one table of keypoints and limbs, and everything that follows from it.

18 keypoints in three blocks, centre (0-1), right (2-9), left (10-17), so that mirroring a person is a swap of blocks.
The neck is the mean of the shoulders. Limbs 0-16 are a tree that spans the keypoints; limbs 17-23 are redundant and
only reconnect fragments where neck or nose is missing. Cao et al. 2018, arXiv 1812.08008; numbering of our own.

The functions take NumPy and JAX arrays alike and return the same kind.
"""

import numpy as np

# name, index in COCO's order (right and left where there are two)
_CENTRE = (('nose', 0), ('neck', -1))
_SIDES = (('shoulder', 6, 5), ('elbow', 8, 7), ('wrist', 10, 9), ('hip', 12, 11), ('knee', 14, 13), ('ankle', 16, 15),
          ('eye', 2, 1), ('ear', 4, 3))
# limbs run from start to end; a limb of a side is written once
_TREE_CENTRE = (('nose', 'neck'),)
_TREE_SIDE = (('neck', 'shoulder'), ('shoulder', 'elbow'), ('elbow', 'wrist'), ('neck', 'hip'), ('hip', 'knee'),
              ('knee', 'ankle'), ('nose', 'eye'), ('eye', 'ear'))
_EXTRA_CENTRE = (('right_eye', 'left_eye'), ('right_shoulder', 'left_shoulder'), ('right_hip', 'left_hip'))
_EXTRA_SIDE = (('shoulder', 'hip'), ('ear', 'shoulder'))

_CENTRAL = tuple(name for name, _ in _CENTRE)


def _on(side: str, name: str) -> str:
  return name if name in _CENTRAL else f'{side}_{name}'


def _both_sides(limbs) -> tuple:
  return tuple((_on(side, a), _on(side, b)) for side in ('right', 'left') for a, b in limbs)


def _opposite(name: str) -> str:
  side, _, rest = name.partition('_')
  return {'right': f'left_{rest}', 'left': f'right_{rest}'}.get(side, name)


def _mirror_limbs(limbs) -> tuple[list[int], list[int]]:
  """Per limb: the limb that it becomes in a mirror, and -1 where that one runs the other way (right to left)."""
  index, sign = [], []
  for a, b in limbs:
    pair = _opposite(a), _opposite(b)
    forward = pair in limbs
    index.append(limbs.index(pair if forward else pair[::-1]))
    sign.append(1 if forward else -1)
  return index, sign


KEYPOINTS = _CENTRAL + tuple(f'right_{s[0]}' for s in _SIDES) + tuple(f'left_{s[0]}' for s in _SIDES)
NOSE, NECK = KEYPOINTS.index('nose'), KEYPOINTS.index('neck')
RIGHT_SHOULDER, LEFT_SHOULDER = KEYPOINTS.index('right_shoulder'), KEYPOINTS.index('left_shoulder')
COCO = tuple(c for _, c in _CENTRE) + tuple(s[1] for s in _SIDES) + tuple(s[2] for s in _SIDES)  # ours -> COCO; neck -1
FROM_COCO = np.array([c for c in COCO if c >= 0])                    # i64[17]: COCO index of ours without the neck
TO_COCO = np.array([COCO.index(c) for c in range(17)])               # i64[17]: our index of COCO's
COCO_KEYPOINTS = tuple(KEYPOINTS[k] for k in TO_COCO)

_TREE = _TREE_CENTRE + _both_sides(_TREE_SIDE)
_LIMB_NAMES = _TREE + _EXTRA_CENTRE + _both_sides(_EXTRA_SIDE)
TREE_LIMBS = len(_TREE)
LIMBS = np.array([[KEYPOINTS.index(a), KEYPOINTS.index(b)] for a, b in _LIMB_NAMES])     # i64[24, 2]: start, end
LIMB_NAMES = tuple(f'{a}-{b}' for a, b in _LIMB_NAMES)

KEYPOINT_MIRROR = np.array([KEYPOINTS.index(_opposite(k)) for k in KEYPOINTS])           # i64[18], an involution
COCO_MIRROR = np.array([COCO_KEYPOINTS.index(_opposite(k)) for k in COCO_KEYPOINTS])     # i64[17], an involution
LIMB_MIRROR, LIMB_MIRROR_SIGN = (np.array(a) for a in _mirror_limbs(_LIMB_NAMES))        # i64[24] each

# spread of a keypoint relative to the person's scale, COCO order (COCO's evaluation code)
OKS_SIGMAS = np.array([.026, .025, .025, .035, .035, .079, .079, .072, .072, .062, .062, .107, .107, .087, .087, .089,
                       .089])


def limbs(redundant: bool) -> np.ndarray:
  """i64[L, 2], the (start, end) keypoints of each limb: the tree (L = 17), or with the redundant ones (L = 24)."""
  return LIMBS if redundant else LIMBS[:TREE_LIMBS]


def from_coco(keypoints):
  """COCO's keypoints in our order, with a neck.

  Args:
    keypoints: f32[..., 17, 3], (x, y, v) in px; v: 0 unlabelled, 1 occluded, 2 visible.

  Returns:
    f32[..., 18, 3], (y, x, v). The neck is the middle of the shoulders with the lower v of the two. What is
    unlabelled or not finite comes out as zeros, so that no later arithmetic meets its coordinates.
  """
  xp = keypoints.__array_namespace__()
  x, y, v = (keypoints[..., FROM_COCO, i] for i in range(3))
  good = (v > 0) & xp.isfinite(x) & xp.isfinite(y)
  ours = xp.where(good[..., None], xp.stack([y, x, v], -1), 0)
  right, left = ours[..., RIGHT_SHOULDER - 1, :], ours[..., LEFT_SHOULDER - 1, :]   # the neck is not in yet
  low = xp.minimum(right[..., 2:], left[..., 2:])
  neck = xp.where(low > 0, xp.concatenate([(right[..., :2] + left[..., :2]) / 2, low], -1), 0)
  return xp.concatenate([ours[..., :NECK, :], neck[..., None, :], ours[..., NECK:, :]], -2).astype(keypoints.dtype)


def to_coco(keypoints):
  """f32[..., 18, 3] (y, x, v) in our order -> f32[..., 17, 3] (x, y, v) in COCO's; the neck is dropped."""
  return keypoints[..., TO_COCO, :][..., np.array([1, 0, 2])]


def mirror(keypoints, width: float):
  """The keypoints f32[..., 18, 3] (y, x, v) of the mirrored picture: x -> width - 1 - x, right and left exchanged.

  Pixel centres are whole numbers. Unlabelled keypoints stay zeros.
  """
  xp = keypoints.__array_namespace__()
  y, x, v = (keypoints[..., KEYPOINT_MIRROR, i] for i in range(3))
  return xp.stack([y, xp.where(v > 0, width - 1 - x, 0), v], -1).astype(keypoints.dtype)


def mirror_maps(heatmap, paf):
  """The maps of the mirrored picture: columns reversed, right and left exchanged, x components negated.

  Args:
    heatmap: f32[..., N, N, 18 or 19]; a background channel stays last.
    paf: f32[..., N, N, L, 2], (y, x), L = 17 or 24. A limb from right to left (eyes, shoulders, hips) is its own
      mirror image run backwards, so its whole vector is negated as well.

  Returns:
    (heatmap, paf) of the same shapes. Twice is the identity.
  """
  count = paf.shape[-2]
  order = np.concatenate([KEYPOINT_MIRROR, np.arange(len(KEYPOINTS), heatmap.shape[-1])])
  signs = (LIMB_MIRROR_SIGN[:count, None] * np.array([1, -1])).astype(np.float32)
  signs = signs.reshape((1,) * (paf.ndim - 2) + signs.shape)
  return heatmap[..., ::-1, order], paf[..., ::-1, LIMB_MIRROR[:count], :] * signs
