"""The environment that the launchers make, with a stand-in for Python."""

import fcntl
import os
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

# makes environments of itself, and notes what it installs; the environment's uv is it, too
STUB = """#!/bin/sh
case "$*" in
  '-m venv --clear '*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; cp "$0" "$4/bin/uv" ;;
  '-m pip install '*) exit ${FAIL:-0} ;;
  'pip install '*' --compile-bytecode '*) echo environment >> "$INSTALLED" ;;
esac
"""


@pytest.fixture
def start(tmp_path):
  """start(environment...) -> a process that makes the environment of a project; what it said of it is in its stderr."""
  (tmp_path / 'lab/launch').mkdir(parents=True)
  (tmp_path / 'bin').mkdir()
  for name in ('pyproject.toml', 'constraints.txt', 'launch/environment.sh'):
    shutil.copy(os.path.join(ROOT, name), tmp_path / 'lab' / name)
  (tmp_path / 'bin/python3.13').write_text(STUB)
  (tmp_path / 'bin/python3.13').chmod(0o755)
  started = []

  def run(**environment):
    env = {**os.environ, 'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'LAB_VENV': f'{tmp_path}/venv',
           'INSTALLED': f'{tmp_path}/installed', **environment}
    started.append(subprocess.Popen(['bash', '-euc', 'source lab/launch/environment.sh; make_environment test'],
                                    cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
    return started[-1]

  yield run
  for process in started:
    process.kill()
    process.communicate()


def installed(folder):
  return (folder / 'installed').read_text().count('environment')


def test_an_environment_is_made_once_until_its_pins_change(start, tmp_path):
  for _ in range(2):
    assert start().wait() == 0
  assert installed(tmp_path) == 1
  (tmp_path / 'lab/constraints.txt').write_text('other')
  assert start().wait() == 0 and installed(tmp_path) == 2


def test_starts_at_once_make_one_environment(start, tmp_path):
  with open(tmp_path / 'venv.lock', 'w', encoding='utf-8') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    started = [start() for _ in range(3)]
    for process in started:      # each has found no environment by then
      assert process.stderr.readline().startswith('waiting for another start')
  assert [process.wait() for process in started] == [0, 0, 0]
  assert installed(tmp_path) == 1
  assert sorted('making' in process.stderr.read() for process in started) == [False, False, True]


def test_one_that_waited_for_a_start_that_failed_makes_it(start, tmp_path):
  assert start(FAIL='1').wait() == 1
  assert start().wait() == 0
  assert installed(tmp_path) == 1
