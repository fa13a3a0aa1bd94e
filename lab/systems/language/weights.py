"""Weights of BERT and GPT-2 in and out, between Hugging Face's names and ours:

    python -m lab.systems.language.weights import --from=model.safetensors [--config-json=config.json]
        [--length=N] --to=body.safetensors
    python -m lab.systems.language.weights export --from=RUN[:best|latest|STEP]|body.safetensors --to=FOLDER

import reads model.safetensors and config.json (that beside it, unless given) of transformers' `bert` or `gpt2`, and
writes our parameter paths; the metadata say which config.model they need, and --config.init_from refuses another.
--length keeps the first N positions, for a shorter config.data.length. export writes model.safetensors and config.json
to a folder that from_pretrained takes, and of a run its vocabulary. What is left out is said. Pickles are refused:
reading one may run code. Exit codes: 2 for a wrong command line or a model that the other side does not have, 3 for a
file that can't be used, 5 for a run's checkpoint.
"""

import argparse
import contextlib
import json
import os
import sys

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lab.config import of_run, override
from lab.systems.language import config as shape
from lab.systems.language.hugging_face import IDS, Arrays, Body, WeightsError, from_hf, to_hf
from lab.task import ConfigError


def read(path: str) -> tuple[Arrays, dict[str, str]]:
  """Arrays and metadata of a .safetensors file. Raises WeightsError: no such file, a pickle, or another format."""
  if not os.path.isfile(path):
    raise WeightsError(f'{path}: no such file')
  with open(path, 'rb') as f:
    start = f.read(9)
  if start[:1] == b'\x80' or start[:2] == b'PK':   # a bare pickle; a zip with one inside
    raise WeightsError(f'{path}: a PyTorch pickle, which may run code when it is read; save it with '
                       'safetensors.torch.save_file(model.state_dict(), path) where you trust it')
  try:
    with safe_open(path, framework='np') as f:
      return {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}
  except (SafetensorError, TypeError) as e:         # TypeError: a type that numpy lacks
    raise WeightsError(f'{path}: not a safetensors file that can be read ({e})') from None


def read_body(path: str) -> Body:
  """What import wrote. Raises WeightsError where a file lacks its metadata."""
  arrays, metadata = read(path)
  config, vocabulary = shape.get_config(), metadata.get('vocabulary', '')
  missing = [k for k in ('width', 'layers', 'heads') if k not in metadata]
  if missing or not vocabulary.isdigit():
    raise WeightsError(f'{path}: its metadata lack {", ".join(missing or ["vocabulary"])}; expected a file that import '
                       'wrote, or the folder of a run')
  override(config, [f'--config.model.{k}={v}' for k, v in metadata.items() if k in config.model])
  return Body(arrays, config, int(vocabulary), {k: int(metadata[k]) for k in IDS if k in metadata})


def read_run(source: str) -> Body:
  """The weights of a run, `path[:best|latest|STEP]`, the averaged ones where they were kept."""
  import jax
  jax.config.update('jax_platforms', 'cpu')       # no device is needed; a run may have them all
  from lab.checkpoint import Checkpoints
  from lab.systems.language.task import Data
  path, which = (source, 'latest') if os.path.isdir(source) or ':' not in source else source.rsplit(':', 1)
  if not os.path.isdir(path):
    raise WeightsError(f'{path}: no such folder; expected a run or a .safetensors file')
  config = of_run(path)
  if config.task != 'lab.systems.language.task':
    raise ConfigError(f'{path} is a run of {config.task}; expected one of lab.systems.language.task')
  kept = os.path.join(path, 'assets')
  if os.path.isdir(kept):
    config.assets = kept
  data = Data(config)
  words = data.tokenizer()
  ids = {'eos_token_id': words.eos, 'bos_token_id': words.eos, 'pad_token_id': words.pad} if words else {}
  with contextlib.closing(Checkpoints(path)) as checkpoints:
    arrays = checkpoints.arrays(checkpoints.find(which))
  return Body(arrays, config, data.vocabulary(), {k: v for k, v in ids.items() if v >= 0}, data.labels(), words)


def _import(args):
  if not args.to.endswith('.safetensors'):
    raise ConfigError(f'--to={args.to}: expected a name that ends in .safetensors')
  path = args.config_json or os.path.join(os.path.dirname(args.source), 'config.json')
  tensors, _ = read(args.source)
  try:
    with open(path, encoding='utf-8') as f:
      facts = json.load(f)
    if not isinstance(facts, dict):
      raise ValueError('no object')
  except (OSError, ValueError, RecursionError) as e:
    raise WeightsError(f'{path}: {e}; the number of heads is in no array: give --config-json') from None
  arrays, metadata, left = from_hf(tensors, facts, args.length)
  save_file(arrays, args.to, metadata=metadata | {'source': f'transformers {facts["model_type"]}'})
  needs = [f'--config.model.{k}={v}' for k, v in metadata.items() if k in shape.get_config().model]
  needs.append(f'--config.data.length={metadata["data.length"]}')
  return arrays, [*(f'left out  {n}' for n in left), f'it needs  {" ".join(needs)}']


def _export(args):
  body = read_body(args.source) if args.source.endswith('.safetensors') else read_run(args.source)
  tensors, facts, left = to_hf(body)
  os.makedirs(args.to, exist_ok=True)
  save_file(tensors, os.path.join(args.to, 'model.safetensors'), metadata={'format': 'pt'})
  with open(os.path.join(args.to, 'config.json'), 'w', encoding='utf-8') as f:
    json.dump(facts, f, indent=2)
  if body.words and body.words.kind == 'chars':
    left.append('the tokenizer: transformers has none of characters')
  for name, text in body.words.files().items() if body.words and body.words.kind != 'chars' else ():
    with open(os.path.join(args.to, name), 'w', encoding='utf-8', newline='') as f:
      f.write(text)
  return tensors, [f'left out  {n}' for n in left]


def _arguments(argv):
  parser = argparse.ArgumentParser(prog='python -m lab.systems.language.weights', allow_abbrev=False)
  verbs = parser.add_subparsers(required=True)
  for name, run in (('import', _import), ('export', _export)):
    verb = verbs.add_parser(name, allow_abbrev=False)
    verb.set_defaults(run=run)
    verb.add_argument('--from', dest='source', required=True, help='a .safetensors file; export: or a run')
    verb.add_argument('--to', required=True, help='import: a .safetensors file; export: a folder')
    if name == 'import':
      verb.add_argument('--config-json', default='', help="transformers' config.json; '': that beside --from")
      verb.add_argument('--length', type=int, default=0, help='positions kept; 0: all')
  return parser.parse_args(argv)


def main(argv: list[str]) -> int:
  """Converts one way and lists what was written; returns the exit code. Every expected failure is one line."""
  try:
    args = _arguments(argv)
    arrays, notes = args.run(args)
  except SystemExit as e:         # argparse has said why
    return int(e.code or 0)
  except (OSError, SafetensorError) as e:
    print(f'error: {e}', file=sys.stderr)
    return 3
  except Exception as e:
    if getattr(e, 'exit_code', None) is None:
      raise
    print(f'error: {e}', file=sys.stderr)
    return e.exit_code
  for name, array in arrays.items():
    print(f'{name:50} {array.shape}')
  for note in notes:
    print(note)
  print(f'{args.to}: {sum(a.size for a in arrays.values()):,} parameters')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
