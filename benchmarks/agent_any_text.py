"""Does any text take the same program and the same memory? Trains a tree on texts with odd ones among them, and tells.

    python benchmarks/agent_any_text.py --texts=FOLDER --workdir=OUT [--config=configs/agent.py:books] [--steps=1000]
                                        [--config.KEY=VALUE ...]

FOLDER has books, songs and articles, as `data_pipelines.prepare books` takes them. One JSON line: packs, of which odd
ones, compilations of the training step, bytes foretold for a step and bytes in use at most: soon after the first step,
and after the last, before its evaluation. On a CPU these are of the whole process.
"""

import glob
import itertools
import json
import os
import shutil
import sys

from absl import flags
from data_pipelines import books, prepare

from lab import config as configs, ledger, main as program

FLAGS = flags.FlagValues()
flags.DEFINE_string('config', 'configs/agent.py:books', 'The tree.', flag_values=FLAGS)
flags.DEFINE_string('texts', None, 'Folder of books, songs, articles.', flag_values=FLAGS)
flags.DEFINE_string('workdir', None, 'Folder that gets the packs and the run.', flag_values=FLAGS)
flags.DEFINE_integer('steps', 1000, 'Batches.', flag_values=FLAGS)
EARLY = 20               # steps after which the memory is looked at first


def odd() -> dict[str, bytes]:
  """Texts that break programs, by name."""
  some = b'It was so, and it was not so. '
  return {
      'one paragraph of 200 KB': some * 7000, 'a sentence of 5,000 words': b' '.join(b'w%d' % i for i in range(5000)),
      'a word of 10,000 letters': b'Before. ' + b'a' * 10_000 + b' after.', 'one byte a word': b'a b c d e f ' * 4000,
      'NULs': b'\0\0 \0. ' * 900, 'no UTF-8': bytes(range(1, 256)) * 40, 'spaces': b'a' + b' ' * 9000 + b'b',
      'other scripts': '漢字かな交じり文。 Ζεύς 🙂🙃 \u200f שלום. '.encode() * 300,
      'line feeds': b'\n' * 5000 + b'x' + b'\n' * 99,
      'control tokens': b'[PAD] END CONT JOIN [MASK] <s> </s> <p> <c>. ' * 500, 'the same line': b'Again.\n\n' * 3000,
      'one word': b'word', 'many short paragraphs': b'\n\n'.join(b'P%d.' % i for i in range(3000)),
  }


def main(argv: list[str]) -> int:
  """Runs the program and returns its exit code."""
  given = [a for a in argv if a.startswith('--config.')]
  FLAGS([a for a in argv if a not in given])
  config = configs.read(FLAGS.config)
  configs.override(config, ['', *given])
  raw, data, run = (os.path.join(FLAGS.workdir, name) for name in ('raw', 'data', 'run'))
  shutil.copytree(FLAGS.texts, os.path.join(raw, 'train', 'texts'))
  os.mkdir(os.path.join(raw, 'valid'))
  for name, text in {**{f'train/{k}': v for k, v in odd().items()}, 'valid/one': b'It ends. So it does.'}.items():
    with open(os.path.join(raw, f'{name}.txt'), 'wb') as f:
      f.write(text)
  sizes = [f'--{key}={",".join(map(str, config.data[key]))}' for key in ('rows', 'lengths', 'nodes')]
  code = prepare.main(['prepare', 'books', f'--raw_dir={raw}', f'--out_dir={data}', '--outliers=keep', *sizes])
  if code:
    return code
  code = program.main(['lab', f'--config={FLAGS.config}', *given, f'--workdir={run}', f'--config.data.dir={data}',
                       f'--config.total_steps={FLAGS.steps}', '--config.eval_steps=0', '--config.eval_pictures=0',
                       '--mode=train'])
  if code:
    return code
  print(json.dumps(found(data, run)))
  return 0


def found(data: str, run: str) -> dict:
  """What the run's files say."""
  with open(os.path.join(run, ledger.NAME), encoding='utf-8') as f:
    lines = [json.loads(line) for line in f if line.strip()]
  with open(os.path.join(run, 'memory.json'), encoding='utf-8') as f:
    need = json.load(f)
  trained = list(itertools.takewhile(lambda x: x['event'] != 'evaluated', lines))
  early = next((x for x in trained if x['step'] >= EARLY), trained[-1])
  path, = glob.glob(os.path.join(data, books.NAME, '*', 'manifest.json'))
  with open(path, encoding='utf-8') as f:
    report = json.load(f)['report']['splits']['train']
  return {'packs': report['packs'], 'writings': report['writings'], 'odd': len(odd()), 'steps': lines[-1]['step'],
          'compilations': trained[-1]['compilations'], 'foretold': need['in_use'] + need['activations'],
          'early': early['peak'], 'peak': trained[-1]['peak']}


if __name__ == '__main__':
  sys.exit(main(sys.argv))
