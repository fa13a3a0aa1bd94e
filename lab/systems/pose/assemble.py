"""From candidates to people, on the host: one-to-one limbs, fragments, persons."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from lab.systems.pose import skeleton


class Connection(NamedTuple):
  """A limb that matching chose: two peaks, each (keypoint, number), and the score."""
  start: tuple[int, int]
  end: tuple[int, int]
  score: float


def people(position, score, limb, matrix, config) -> list[dict]:
  """Puts the people of one picture together.

  The tree's limbs come first, from nose and neck outwards; then the redundant ones, best score first, reconnect what is
  still apart. A limb joins the fragments of its two ends only if they share no kind of keypoint, so two peaks of a kind
  never end in one person.

  Args:
    position: f32[18, K, 2], (y, x) in px of the picture that the network saw.
    score: f32[18, K], heat; 0 = no peak.
    limb: f32[L, K, K], 0 = refused; L = 17 or 24.
    matrix: f32[2, 3], maps (x, y, 1) in those px to px of the original picture.
    config: the section `decode` of a pose configuration.

  Returns:
    Best first, {'keypoints': f64[17, 3] (x, y, score) in COCO order and original px, zeros where not found (the neck
    is dropped), 'score': mean score of the parts times their number}.
  """
  position, score = np.asarray(position), np.asarray(score)
  chosen = [match(np.asarray(l), config.matching) for l in limb]
  connections = [[Connection((a, i), (b, j), s) for i, j, s in found]
                 for (a, b), found in zip(skeleton.LIMBS, chosen)]
  tree = [c for found in connections[:skeleton.TREE_LIMBS] for c in found]
  redundant = [c for found in connections[skeleton.TREE_LIMBS:] for c in found]
  out = []
  for parts in fragments(tree, redundant, score, config.merge):
    person = _person(parts, position, score, np.asarray(matrix, np.float64), config)
    if person is not None:
      out.append(person)
  return sorted(out, key=lambda p: -p['score'])


def match(scores: np.ndarray, method: str = 'greedy') -> list[tuple[int, int, float]]:
  """One-to-one pairs (i, j, score) from scores f32[K, K], of which only positive ones count.

  greedy takes the best pair that is still free, again and again; hungarian takes the set with the greatest sum.
  """
  if method == 'hungarian':
    rows, columns = linear_sum_assignment(scores, maximize=True)
    return [(int(i), int(j), float(scores[i, j])) for i, j in zip(rows, columns) if scores[i, j] > 0]
  if method != 'greedy':
    raise ValueError(f'config.decode.matching = {method!r}: greedy or hungarian')
  rows, columns = np.nonzero(scores > 0)
  values = scores[rows, columns]
  order = np.argsort(-values, kind='stable')
  starts, ends, out = set(), set(), []
  for i, j, s in zip(rows[order].tolist(), columns[order].tolist(), values[order].tolist()):
    if i not in starts and j not in ends:
      starts.add(i)
      ends.add(j)
      out.append((i, j, s))
  return out


def fragments(tree: list[Connection], redundant: list[Connection], score: np.ndarray,
              merge: bool = True) -> list[dict[int, int]]:
  """Groups peaks into sets {keypoint: number} in which every kind occurs at most once.

  Every peak starts as a set of its own and each connection is looked at once, so the work is bounded. In the tree
  every kind is the end of one limb, so matched one to one it never asks to join two sets of several peaks; redundant
  limbs do, and with `merge` off they may only add single peaks.

  Args:
    tree: connections, each limb's after those of the limb that leads to it.
    redundant: connections in any order.
    score: f32[18, K], 0 = no peak.
    merge: join sets of several peaks.
  """
  kinds, numbers = np.nonzero(score > 0)
  owner = {peak: {peak[0]: peak[1]} for peak in zip(kinds.tolist(), numbers.tolist())}
  for c in tree + sorted(redundant, key=lambda c: -c.score):
    a, b = owner[c.start], owner[c.end]
    if a is b or a.keys() & b.keys() or not merge and min(len(a), len(b)) > 1:
      continue
    if len(a) < len(b):
      a, b = b, a
    a.update(b)
    for peak in b.items():
      owner[peak] = a
  return list({id(parts): parts for parts in owner.values()}.values())


def _person(parts, position, score, matrix, config):
  """The record of one set of peaks, or None where it is too small or too faint."""
  if len(parts) < config.parts_min:
    return None
  keypoints, heats = np.zeros((17, 3)), []
  for kind, number in parts.items():
    heats.append(float(score[kind, number]))
    coco = skeleton.COCO[kind]
    if coco >= 0:
      y, x = position[kind, number].astype(np.float64)
      keypoints[coco] = [*(matrix @ [x, y, 1.0]), heats[-1]]
  if np.mean(heats) < config.score_min or not keypoints[:, 2].any():
    return None
  return {'keypoints': keypoints, 'score': float(np.sum(heats))}
