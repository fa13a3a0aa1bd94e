"""Turns public raw files into prepared data sets, and checks prepared ones.

  python -m data_pipelines.prepare coco --raw_dir=COCO --out_dir=OUT [--shards=64]
  python -m data_pipelines.prepare mnist --raw_dir=MNIST --out_dir=OUT
  python -m data_pipelines.prepare moving_mnist --raw_dir=MNIST --out_dir=OUT [--digits=2] [--sequences=10000]
                                                [--frames=20] [--size=64] [--seed=0]
  python -m data_pipelines.prepare clips --raw_dir=FILE_OR_FOLDER --out_dir=OUT [--layout=auto|TNHW|NTHW] [--frames=20]
                                         [--parity_split]
  python -m data_pipelines.prepare corpus --raw_dir=FILE_OR_FOLDER --out_dir=OUT
                                          --tokenizer=PATH|wordpiece|bpe|chars [--vocabulary=8192] [--length=128]
                                          [--parity_split]
  python -m data_pipelines.prepare cola --raw_dir=COLA --out_dir=OUT --tokenizer=PATH
  python -m data_pipelines.prepare sst2 --raw_dir=SST2 --out_dir=OUT --tokenizer=PATH
  python -m data_pipelines.prepare arc --raw_dir=FILE_OR_FOLDER --out_dir=OUT [--side=30] [--leaks=drop|keep|refuse]
                                       [--noinvariant]
  python -m data_pipelines.prepare books --raw_dir=FILE_OR_FOLDER --out_dir=OUT [--rows=160,32,12] [--lengths=12,12,4]
                                         [--nodes=224,32] [--joined] [--whole] [--longest_word=200]
                                         [--most_control=0.01] [--outliers=drop|keep]
  python -m data_pipelines.prepare statistics FILE_OR_FOLDER       of the texts of books, to choose rows and lengths by
  python -m data_pipelines.prepare verify FOLDER        (or --dir=FOLDER)

A tokenizer is a tokenizer.json, vocab.txt, or vocab.json and merges.txt, or the folder of one; a prepared corpus is one
too. Text files and their splits: data_pipelines/documents.py. cola and sst2 also take --raw_dir=glue/cola or glue/sst2,
what TFDS has prepared. ARC's files and their splits: data_pipelines/arc_raw.py. Those of books: books_raw.py there.

Prints a report of what is in the data as JSON. A killed run leaves nothing half under the final name; start it again.
Exit codes: 0 done or clean, 2 bad usage, 3 broken data, 6 no space.
"""

import glob
import importlib
import json
import os
import sys
import types
from typing import Any, Mapping, NamedTuple

from absl import flags

from data_pipelines import DataError, TooLarge, books, books_raw, prepared


class Dataset(NamedTuple):
  """A data set's module, with prepare(raw_dir, out_dir, *, shards, OPTIONS...) -> (folder, report).

  Where a manifest names the data set, check(record) -> what is wrong or ''. `options` are flags that it takes beside
  those that all take; `given` are arguments that it always gets; `file`: --raw_dir may be a file; `tfds`: or this name.
  """
  module: str
  options: tuple[str, ...] = ()
  given: Mapping[str, Any] = types.MappingProxyType({})
  file: bool = False
  tfds: str = ''


DATASETS = {
    'coco': Dataset('data_pipelines.coco'),
    'mnist': Dataset('data_pipelines.mnist'),
    'moving_mnist': Dataset('data_pipelines.moving_mnist', ('digits', 'sequences', 'frames', 'size', 'seed')),
    'clips': Dataset('data_pipelines.clips', ('layout', 'frames', 'parity_split'), file=True),
    'corpus': Dataset('data_pipelines.corpus', ('tokenizer', 'vocabulary', 'length', 'parity_split'), file=True),
    'cola': Dataset('data_pipelines.glue', ('tokenizer',), {'task': 'cola'}, tfds='glue/cola'),
    'sst2': Dataset('data_pipelines.glue', ('tokenizer',), {'task': 'sst2'}, tfds='glue/sst2'),
    'arc': Dataset('data_pipelines.arc', ('side', 'leaks', 'invariant'), file=True),
    'books': Dataset('data_pipelines.books', ('rows', 'lengths', 'nodes', 'joined', 'whole', 'longest_word',
                                              'most_control', 'outliers'), file=True),
}
OPTIONS = sorted({o for d in DATASETS.values() for o in d.options})
FLAGS = flags.FlagValues()
flags.DEFINE_string('raw_dir', '', 'Folder of the raw files; of clips, corpus, arc and books also one file.',
                    flag_values=FLAGS)
flags.DEFINE_string('out_dir', '', 'Folder that gets NAME/VERSION/ with the prepared data.', flag_values=FLAGS)
flags.DEFINE_string('dir', '', 'Prepared folder to verify.', flag_values=FLAGS)
flags.DEFINE_integer('shards', 64, 'Files a split, at most its records.', lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer('digits', 2, 'Digits of a sequence.', lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer('sequences', 10000, 'Sequences of each split.', lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer('frames', 20, 'Frames of a sequence.', lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer('size', 64, 'Side of a frame in px; a digit has 28.', lower_bound=28, flag_values=FLAGS)
flags.DEFINE_integer('seed', 0, 'Of the sequences that are drawn.', lower_bound=0, flag_values=FLAGS)
flags.DEFINE_enum('layout', 'auto', ('auto', 'TNHW', 'NTHW'), 'Axes of arrays: time, number, height, width.',
                  flag_values=FLAGS)
flags.DEFINE_boolean('parity_split', False, 'Divide one file: nine tenths train, one tenth validation.',
                     flag_values=FLAGS)
flags.DEFINE_string('tokenizer', '', 'Path of a tokenizer; of a corpus also the kind to train: wordpiece, bpe, chars.',
                    flag_values=FLAGS)
flags.DEFINE_integer('vocabulary', 8192, 'Ids of a trained tokenizer, at most.', lower_bound=1, flag_values=FLAGS)
flags.DEFINE_integer('length', 128, 'Ids of a window.', lower_bound=3, flag_values=FLAGS)
flags.DEFINE_integer('side', 30, 'Of a grid in cells; larger ones are left out.', lower_bound=1, flag_values=FLAGS)
flags.DEFINE_enum('leaks', 'drop', ('drop', 'keep', 'refuse'), 'What becomes of tasks of train that are of evaluation.',
                  flag_values=FLAGS)
flags.DEFINE_boolean('invariant', True, 'Also find leaks with other colours, turned or mirrored.', flag_values=FLAGS)
flags.DEFINE_list('rows', '160,32,12', 'Rows of a pack, for each level: words, sentences, paragraphs...',
                  flag_values=FLAGS)
flags.DEFINE_list('lengths', '12,12,4', 'Units of a row with its terminator, for each level.', flag_values=FLAGS)
flags.DEFINE_list('nodes', '', 'Nodes of each level but the highest in the rows of any level above, at most.',
                  flag_values=FLAGS)
flags.DEFINE_boolean('joined', False, 'Neighbours share a row where they fit.', flag_values=FLAGS)
flags.DEFINE_boolean('whole', False, 'A book is one text, not its chapters.', flag_values=FLAGS)
flags.DEFINE_integer('longest_word', 200, 'Bytes; a text with a longer one is an outlier.', lower_bound=1,
                     flag_values=FLAGS)
flags.DEFINE_float('most_control', 0.01, 'Share of control bytes; a text with more is an outlier.', lower_bound=0,
                   upper_bound=1, flag_values=FLAGS)
flags.DEFINE_enum('outliers', 'drop', ('drop', 'keep'), 'What becomes of them; they are counted either way.',
                  flag_values=FLAGS)
flags.DEFINE_boolean('help', False, 'Print this help.', flag_values=FLAGS)
FLAGS.set_gnu_getopt(True)


class UsageError(Exception):
  """A command line that can't be run; the message says what is accepted."""
  exit_code = 2


def verify(folder: str) -> int:
  """Prints every broken shard, record and picture of a prepared folder, a line each; returns how many.

  Raises DataError where there is no prepared folder.
  """
  inside = os.path.join(glob.escape(folder), '*', '*', prepared.MANIFEST)      # NAME/VERSION of an --out_dir
  inner = [os.path.dirname(p) for p in sorted(glob.glob(inside))]
  here = os.path.exists(os.path.join(folder, prepared.MANIFEST))
  count = 0
  for path in [folder] if here or not inner else inner:
    found = prepared.manifest(path)
    dataset = DATASETS.get(found['dataset'])
    if dataset is None:
      raise DataError(f'{path}: made by {found["dataset"]!r}, which is none of {", ".join(DATASETS)}')
    wrong = 0
    for line in prepared.problems(path, importlib.import_module(dataset.module).check):
      print(line, flush=True)
      wrong += 1
    records = sum(s['records'] for s in found['splits'].values())
    print(f'{path}: {records} records, ' + (f'{wrong} problems' if wrong else 'all good'), flush=True)
    count += wrong
  return count


def run(argv: list[str]) -> int:
  """Runs a command line, program name first; returns the exit code. Raises UsageError, DataError, TooLarge."""
  FLAGS.unparse_flags()
  for name in FLAGS:
    FLAGS[name].unparse()
  try:
    words = FLAGS(argv)[1:]
  except flags.Error as e:
    raise UsageError(' '.join(str(e).split())) from None
  if FLAGS.help:
    print(__doc__ + FLAGS.get_help())
    return 0
  commands = [*DATASETS, 'verify', 'statistics']
  if not words or words[0] not in commands:
    raise UsageError(f'{"unknown" if words else "no"} command{" " + words[0] if words else ""}; one of '
                     f'{", ".join(commands)}; --help tells more')
  taken = DATASETS[words[0]].options if words[0] in DATASETS else ()
  for option in OPTIONS:
    if FLAGS[option].present and option not in taken:
      known = ', '.join(f'--{o}' for o in taken)
      raise UsageError(f'{words[0]} takes no --{option}' + f'; it takes {known}' * bool(taken))
  if words[0] == 'verify':
    folders = words[1:] + [FLAGS.dir] * bool(FLAGS.dir)
    if len(folders) != 1:
      raise UsageError('verify takes one folder')
    return 3 if verify(folders[0]) else 0
  if words[0] == 'statistics':
    if len(words) != 2:
      raise UsageError('statistics takes one file or folder')
    print(json.dumps(books.statistics(books_raw.read(words[1], whole=True)), indent=2))
    return 0
  if words[1:]:
    raise UsageError(f'unexpected {words[1]!r}; folders are given as --raw_dir and --out_dir')
  folder, report = _prepare(words[0], DATASETS[words[0]])
  print(json.dumps(report, indent=2))
  print(f'{folder} is ready', file=sys.stderr)
  return 0


def _prepare(name: str, dataset: Dataset) -> tuple[str, dict]:
  for folder in ('raw_dir', 'out_dir'):
    if not FLAGS[folder].value:
      raise UsageError(f'{name} needs --{folder}')
  if 'tokenizer' in dataset.options and not FLAGS.tokenizer:
    raise UsageError(f'{name} needs --tokenizer')
  file = dataset.file and os.path.isfile(FLAGS.raw_dir)
  if not os.path.isdir(FLAGS.raw_dir) and not file and FLAGS.raw_dir != dataset.tfds:
    raise DataError(f'--raw_dir={FLAGS.raw_dir}: no such {"file or " * dataset.file}folder')
  options = {o: _integers(o) if o in ('rows', 'lengths', 'nodes') else FLAGS[o].value for o in dataset.options}
  module = importlib.import_module(dataset.module)
  return module.prepare(FLAGS.raw_dir, FLAGS.out_dir, shards=FLAGS.shards, **dataset.given, **options)


def _integers(option: str) -> list[int]:
  try:
    found = [int(word) for word in FLAGS[option].value]
    if not found and FLAGS[option].default or found and min(found) < 1:
      raise ValueError
    return found
  except ValueError:
    raise UsageError(f'--{option}={",".join(FLAGS[option].value)}: expected positive integers, such as '
                     f'--{option}={",".join(FLAGS[option].default or "224,32")}') from None


def main(argv: list[str]) -> int:
  """`run`, with errors as one line on stderr and their exit code."""
  try:
    return run(argv)
  except (UsageError, DataError, TooLarge) as e:
    print(f'prepare: {e}', file=sys.stderr)
    return e.exit_code
  except OSError as e:
    print(f'prepare: {e}', file=sys.stderr)
    return DataError.exit_code
  except KeyboardInterrupt:
    print('prepare: interrupted; nothing half is left under the final name', file=sys.stderr)
    return 130


if __name__ == '__main__':
  sys.exit(main(sys.argv))
