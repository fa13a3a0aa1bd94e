"""Files to fewer bytes with a trained tree, and back:

  python -m lab.systems.agent.compress pack --workdir=runs/agent --from=book.txt --to=book.tree
  python -m lab.systems.agent.compress unpack --workdir=runs/agent --from=book.tree --to=book.txt

See codec.py for the file and for what its bits are spent on.
"""

import argparse
import contextlib
import json
import sys

from data_pipelines import DataError, images

from lab.checkpoint import Checkpoints
from lab.checksums import digest
from lab.config import of_run
from lab.systems.agent import config as shape, model
from lab.systems.agent.codec import MOST, Codec
from lab.task import ConfigError


def _arguments(argv):
  parser = argparse.ArgumentParser(prog='python -m lab.systems.agent.compress', allow_abbrev=False)
  verbs = parser.add_subparsers(dest='verb', required=True)
  for name, text in (('pack', 'a file of any bytes'), ('unpack', 'a packed file')):
    verb = verbs.add_parser(name, allow_abbrev=False)
    verb.add_argument('--workdir', required=True, help='a run of a text tree')
    verb.add_argument('--checkpoint', default='latest', help='latest, best or a step; the same for both ways')
    verb.add_argument('--from', dest='source', required=True, help=text)
    verb.add_argument('--to', required=True, help='the file to write')
  return parser.parse_args(argv)


def _run(args) -> dict:
  told = of_run(args.workdir)
  if told.task != 'lab.systems.agent.task':
    raise ConfigError(f'--workdir={args.workdir}: a run of {told.task}; expected one of lab.systems.agent.task')
  # what an older run had not heard of is as it was then, and what it packed stays readable
  config = shape.get_config().unlock()
  config.update(told)
  with open(args.source, 'rb') as f:
    data = f.read(MOST + 1)
  with contextlib.closing(Checkpoints(args.workdir)) as checkpoints:
    step = checkpoints.find(args.checkpoint)
    params = {}
    for path, array in checkpoints.arrays(step).items():
      *folders, name = path.split('/')
      inside = params
      for folder in folders:
        inside = inside.setdefault(folder, {})
      inside[name] = array
  codec = Codec(model.make(config), {'params': params}, config, digest(params))
  found = codec.encode(data) if args.verb == 'pack' else codec.decode(data)
  report = codec.report(found if args.verb == 'pack' else data)
  with images.whole(args.to) as part, open(part, 'wb') as f:
    f.write(found)
  return {'step': step, **report}


def main(argv: list[str]) -> int:
  """Converts one way and prints what the bits are spent on; returns the exit code. Expected failures are one line."""
  try:
    report = _run(_arguments(argv))
  except SystemExit as e:         # argparse has said why
    return int(e.code or 0)
  except OSError as e:
    print(f'error: {e}', file=sys.stderr)
    return DataError.exit_code
  except Exception as e:
    if getattr(e, 'exit_code', None) is None:
      raise
    print(f'error: {e}', file=sys.stderr)
    return e.exit_code
  print(json.dumps({k: round(v, 4) for k, v in report.items()}))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
