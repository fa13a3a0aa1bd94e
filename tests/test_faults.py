"""The table of faults names tests that are there, and the page tells how many."""

import ast
import os
import re
import subprocess
import sys

import pytest

from tests.faults import FAULTS, ROOT


@pytest.mark.parametrize('test', sorted({t for fault in FAULTS.values() for t in fault.tests}))
def test_the_table_of_faults_names_tests_that_are_there(test):
  file, name = test.split('::')
  with open(os.path.join(ROOT, 'tests', file), encoding='utf-8') as f:
    found = [n.name for n in ast.walk(ast.parse(f.read())) if isinstance(n, ast.FunctionDef)]
  assert any(n.startswith(name) for n in found)


def test_the_page_has_the_table_with_as_many_tests_as_there_are():
  files = sorted({os.path.join('tests', t.split('::')[0]) for fault in FAULTS.values() for t in fault.tests})
  done = subprocess.run([sys.executable, '-m', 'pytest', '-q', '--collect-only', '-p', 'no:cacheprovider', *files],
                        cwd=ROOT, env={**os.environ, 'LAB_LONG': '1'}, capture_output=True, text=True, check=True)
  found = re.findall(r'^tests/(\S+::.*)$', done.stdout, re.M)
  with open(os.path.join(ROOT, 'docs/reliability.md'), encoding='utf-8') as f:
    page = re.findall(r'^\| (F\d+) \| (.*) \| (.*) \| (\d+) \|$', f.read(), re.M)
  count = lambda fault: str(sum(test.startswith(t) for t in fault.tests for test in found))
  assert page == [(name, fault.what, fault.expected, count(fault)) for name, fault in FAULTS.items()]
