"""Turns torchvision's VGG weights into ours, once, offline:

    python -m lab.systems.pose.weights vgg19.safetensors vgg19_10.safetensors

The input is the state dict of torchvision's vgg19 or vgg16 (`features.N.weight`, `features.N.bias`), saved with
safetensors.torch.save_file. Pickles (.pth) are refused: reading one may run code. The output holds the
convolutions that the backbone keeps, under our parameter paths, and says in its metadata which preprocessing they
expect; --config.init_from takes it. Exit codes: 2 for a wrong command line, 3 for a file that can't be used.
"""

import json
import os
import sys

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lab.systems.pose import model

# torchvision numbers convolutions, activations and pools of `features` alike
_LAYERS = {'vgg19': model.VGG19_10, 'vgg16': model.VGG16_7}
_OWN = {'vgg19': 'features.16.weight', 'vgg16': 'features.17.weight'}   # each a pool or an activation in the other


class WeightsError(Exception):
  """A file that holds no weights that we can take; the message says why."""
  exit_code = 3


def features(layers: tuple) -> dict[str, int]:
  """Our convolution -> its N in torchvision's `features.N`: a convolution and its ReLU take two numbers, a pool one."""
  out, n = {}, 0
  for layer in layers:
    if layer != 'pool':
      out[layer[0]] = n
    n += 1 if layer == 'pool' else 2
  return out


def convert(tensors: dict[str, np.ndarray], layers: tuple) -> dict[str, np.ndarray]:
  """torchvision's arrays -> ours.

  Args:
    tensors: 'features.N.weight' [O, I, 3, 3] and 'features.N.bias' [O].
    layers: model.VGG19_10 or model.VGG16_7.

  Returns:
    'backbone/conv1_1/kernel' f32[3, 3, I, O] and 'backbone/conv1_1/bias' f32[O], and so on.

  Raises:
    WeightsError: an array is missing or has another shape; the message names it.
  """
  out, incoming = {}, 3
  channels = dict(layer for layer in layers if layer != 'pool')
  for name, n in features(layers).items():
    shapes = {'weight': (channels[name], incoming, 3, 3), 'bias': (channels[name],)}
    for part, shape in shapes.items():
      key = f'features.{n}.{part}'
      if key not in tensors:
        raise WeightsError(f'{key} is missing')
      if tensors[key].shape != shape:
        raise WeightsError(f'{key} has the shape {tensors[key].shape}, not {shape}')
    out[f'backbone/{name}/kernel'] = np.ascontiguousarray(
        tensors[f'features.{n}.weight'].transpose(2, 3, 1, 0), np.float32)
    out[f'backbone/{name}/bias'] = np.asarray(tensors[f'features.{n}.bias'], np.float32)
    incoming = channels[name]
  return out


def read(path: str) -> tuple[str, dict[str, np.ndarray]]:
  """(network, its first convolutions' arrays) of a safetensors file; network is 'vgg19' or 'vgg16'.

  Raises:
    WeightsError: no such file, a pickle, another format, or another network.
  """
  if not os.path.isfile(path):
    raise WeightsError('no such file')
  with open(path, 'rb') as f:
    start = f.read(9)
  if start[:1] == b'\x80' or start[:2] == b'PK':   # a bare pickle; a zip with one inside
    raise WeightsError('a PyTorch pickle, which may run code when it is read; save it with '
                       'safetensors.torch.save_file(model.state_dict(), path) where you trust it')
  try:
    with safe_open(path, framework='np') as f:
      names = set(f.keys())
      kind = _kind(names)
      wanted = [f'features.{n}.{part}' for n in features(_LAYERS[kind]).values() for part in ('weight', 'bias')]
      return kind, {name: f.get_tensor(name) for name in wanted if name in names}
  except SafetensorError as e:
    raise WeightsError(f'not a safetensors file ({e})') from None


def _kind(names: set[str]) -> str:
  if 'features.1.weight' in names:
    raise WeightsError('a VGG with batch normalisation; the backbone has none, so take vgg19 or vgg16')
  kinds = [kind for kind, own in _OWN.items() if own in names]
  if len(kinds) != 1:
    raise WeightsError("not torchvision's vgg19 or vgg16, which have features.16.weight or features.17.weight")
  return kinds[0]


def main(argv: list[str]) -> int:
  """Converts argv[0] to argv[1] and lists what was taken; returns the exit code."""
  if len(argv) != 2:
    print('usage: python -m lab.systems.pose.weights vgg19.safetensors out.safetensors', file=sys.stderr)
    return 2
  source, out = argv
  try:
    kind, tensors = read(source)
    arrays = convert(tensors, _LAYERS[kind])
  except WeightsError as e:
    print(f'{source}: {e}', file=sys.stderr)
    return e.exit_code
  backbone = {'vgg19': 'vgg19_10', 'vgg16': 'vgg16_7'}[kind]
  metadata = {'preprocess': 'imagenet', 'backbone': backbone,
              'source': f'torchvision {kind}, {os.path.basename(source)}'}
  try:
    save_file(arrays, out, metadata=metadata)
  except (OSError, SafetensorError) as e:
    print(f'{out}: {e}', file=sys.stderr)
    return 3
  for name, array in arrays.items():
    print(f'{name:28} {array.shape}')
  print(f'{out}: {sum(a.size for a in arrays.values()):,} parameters of {kind}, {json.dumps(metadata)}')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
