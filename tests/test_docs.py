"""The commands in docs/ and of the measured results have settings that can run, as far as that shows without data."""

import glob
import importlib
import os
import re
import shlex

import pytest
from data_pipelines import DataError

from lab import config as configs, train
from lab.task import ConfigError
from tests.conftest import ROOT

PAGES = sorted(glob.glob(os.path.join(ROOT, 'docs', '*.md'))) + [os.path.join(ROOT, 'benchmarks', 'RESULTS.md')]
PROGRAM = re.compile(r'(launch/run\.sh|python -m (lab\.main|benchmarks\.\w+)|benchmarks/compare\.sh) '
                     r'.*--config=configs/')


def commands(path):
  """Those that train or time a recipe, a line each, without what is in brackets; no others' commands, in quotes."""
  with open(path, encoding='utf-8') as f:
    text = f.read().replace('\\\n', ' ')
  lines = [re.sub(r'\[[^]]*\]|^```.*', '', line).strip() for line in text.splitlines()]
  return [line for line in lines if PROGRAM.search(line) and not re.search('[`"]', line)]


@pytest.mark.parametrize('path', PAGES, ids=lambda p: os.path.relpath(p, ROOT))
def test_commands_have_settings_that_can_run(path):
  for line in commands(path):
    arguments = [a for a in shlex.split(line, comments=True) if a.startswith('--config')]
    name, = [a.partition('=')[2] for a in arguments if a.startswith('--config=')]
    config = configs.read(name)
    try:
      configs.override(config, ['', *[a for a in arguments if a.startswith('--config.')]])
      train.check(config)
      importlib.import_module(config.task).make_task(config)
    except DataError:
      pass                                     # a task that reads its data's facts first
    except ConfigError as e:
      raise AssertionError(f'{line}: {e}') from e


def test_there_are_such_commands():
  assert sum(len(commands(path)) for path in PAGES) > 20
