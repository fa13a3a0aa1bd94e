"""What a user would write instead of the lab's pose pipeline: a PyTorch DataLoader on OpenCV, tuned.

It does the same work on the same photographs: JPEG from files, one affine lookup (mirror, scale, turn, shift), then
contrast, saturation, hue and brightness as one matrix, joints, the ignore mask, and batches of the same arrays. Workers
stay, one a core, each on one thread; there is no file for an empty mask; batches are bytes, as the lab's are. It does
without the lab's softening of what shrinks. `benchmarks.input --peer` runs it.
"""

import dataclasses
import math
import os
from typing import Iterator, NamedTuple

import numpy as np

FILL = 128
SWAPPED = [0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15]       # COCO's joints in a mirror
YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
RGB = np.linalg.inv(YIQ)


class Photograph(NamedTuple):
  """Files of a photograph and its ignore mask ('' where nothing is ignored), and what is known of its people."""
  jpeg: str
  png: str
  height: int
  width: int
  people: dict[str, np.ndarray]      # keypoints f32[P, 17, 3], boxes f32[P, 4], areas f32[P], crowd, num i64[P]
  number: int


def files(records: Iterator[dict], folder: str) -> list[Photograph]:
  """Writes the photographs and masks of records into a folder; `records` have the fields of the lab's, as NumPy."""
  import cv2
  found = []
  for r in records:
    paths = [os.path.join(folder, f'{int(r["image_id"])}.{kind}') for kind in ('jpg', 'png')]
    with open(paths[0], 'wb') as f:
      f.write(r['image'])
    if cv2.imdecode(np.frombuffer(r['ignore'], np.uint8), cv2.IMREAD_GRAYSCALE).any():
      with open(paths[1], 'wb') as f:
        f.write(r['ignore'])
    else:
      paths[1] = ''
    people = {k: np.array(r[k]) for k in ('keypoints', 'boxes', 'areas', 'crowd', 'num')}
    found.append(Photograph(*paths, *map(int, r['size']), people, int(r['image_id'])))
  return found


@dataclasses.dataclass
class Photographs:
  """A data set in PyTorch's sense. `augment` is the recipe's section as a plain dict."""
  photographs: list[Photograph]
  augment: dict
  size: int
  stride: int
  rows: int

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    import cv2
    p, size = self.photographs[index], self.size
    drawn = self.draw()
    image = cv2.imread(p.jpeg, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    forward, mirror = self.matrix(p, drawn)
    image = cv2.warpAffine(image, forward, (size, size), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT,
                           borderValue=(FILL,) * 3)
    image = cv2.transform(image, self.colours(image, drawn))
    cells = size // self.stride
    ignore = np.zeros((cells, cells), np.uint8)
    if p.png:
      mask = cv2.imread(p.png, cv2.IMREAD_GRAYSCALE)
      mask = cv2.warpAffine(mask, forward, (size, size), flags=cv2.INTER_NEAREST) > 0
      ignore[:] = mask.reshape(cells, self.stride, cells, self.stride).mean((1, 3)) > 0.01
    rows = {k: np.zeros((self.rows, *v.shape[1:]), v.dtype) for k, v in p.people.items()}
    for k, v in p.people.items():
      rows[k][:len(v)] = v[:self.rows]
    return {
        'image': image, 'ignore': ignore, 'keypoints': self.joints(rows['keypoints'], forward, mirror),
        'truth': rows['keypoints'], 'boxes': rows['boxes'], 'areas': rows['areas'],
        'person': (np.arange(self.rows) < len(p.people['num'])).astype(np.float32),
        'crowd': rows['crowd'].astype(np.float32), 'num': rows['num'].astype(np.int32),
        'matrix': cv2.invertAffineTransform(forward).astype(np.float32),
        'size': np.array([p.height, p.width], np.int32), 'image_id': np.int32(p.number), 'mask': np.float32(1),
        'record': np.int32(index)}

  def draw(self) -> list[float]:
    """Nine uniform numbers in +-1, by the worker's own generator."""
    import torch
    return (2 * torch.rand(9) - 1).tolist()

  def matrix(self, p: Photograph, drawn: list[float]) -> tuple[np.ndarray, bool]:
    """The map of the photograph into the square, f64[2, 3], and whether it mirrors."""
    a = self.augment
    mirror = (drawn[0] + 1) / 2 < a['mirror']
    scale = a['scale_min'] + (drawn[1] + 1) / 2 * (a['scale_max'] - a['scale_min'])
    scale *= self.size / max(p.height, p.width)
    angle, flip = math.radians(a['rotate_deg']) * drawn[2], -1 if mirror else 1
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    x, y = (p.width - 1) / 2, (p.height - 1) / 2
    centre = (self.size - 1) / 2
    turn = [[flip * c, -s], [flip * s, c]]
    shift = [centre + a['shift'] * d * self.size for d in drawn[3:5]]
    return np.array([[t[0], t[1], shift[i] - t[0] * x - t[1] * y] for i, t in enumerate(turn)]), mirror

  def colours(self, image: np.ndarray, drawn: list[float]) -> np.ndarray:
    """Brightness, contrast, saturation and hue as one matrix f64[3, 4]."""
    import cv2
    a = self.augment
    contrast, saturation = (1 + a[k] * drawn[i] for i, k in ((6, 'contrast'), (7, 'saturation')))
    angle = 2 * math.pi * a['hue'] * drawn[8]
    c, s = saturation * math.cos(angle), saturation * math.sin(angle)
    grey = np.dot(cv2.mean(image[::4, ::4])[:3], YIQ[0])
    level = np.full((3, 1), grey * (1 - contrast) + 255 * a['brightness'] * drawn[5])
    return np.hstack([contrast * (RGB @ [[1, 0, 0], [0, c, -s], [0, s, c]] @ YIQ), level])

  def joints(self, keypoints: np.ndarray, forward: np.ndarray, mirror: bool) -> np.ndarray:
    """Joints [P, 17, 3] in the square; those outside it become 0."""
    moved = keypoints.copy()
    moved[..., :2] = keypoints[..., :2] @ forward[:, :2].T + forward[:, 2]
    xy = moved[..., :2]
    moved[~(((xy >= -0.5) & (xy < self.size - 0.5)).all(-1) & (moved[..., 2] > 0))] = 0
    return moved[:, SWAPPED] if mirror else moved


def one_thread(worker: int) -> None:
  """What each worker does first: it has a core, and no more."""
  import cv2
  import torch
  del worker
  cv2.setNumThreads(1)
  torch.set_num_threads(1)


@dataclasses.dataclass
class Endless:
  """Record numbers without end, a new permutation each epoch."""
  size: int

  def __iter__(self) -> Iterator[int]:
    rng = np.random.default_rng(0)
    while True:
      yield from rng.permutation(self.size).tolist()


def loader(photographs: Photographs, batch_size: int, workers: int):
  """The tuned DataLoader: workers that stay, one thread each, and that know nothing of this process's libraries."""
  from torch.utils.data import DataLoader
  return DataLoader(photographs, batch_size, sampler=Endless(len(photographs.photographs)),
                    num_workers=workers, persistent_workers=True, prefetch_factor=2, worker_init_fn=one_thread,
                    multiprocessing_context='spawn')
