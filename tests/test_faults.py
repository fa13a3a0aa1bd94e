"""The table of faults names tests that are there."""

import ast
import os

import pytest

from tests.faults import FAULTS, ROOT


@pytest.mark.parametrize('test', sorted({t for fault in FAULTS.values() for t in fault.tests}))
def test_the_table_of_faults_names_tests_that_are_there(test):
  file, name = test.split('::')
  with open(os.path.join(ROOT, 'tests', file), encoding='utf-8') as f:
    found = [n.name for n in ast.walk(ast.parse(f.read())) if isinstance(n, ast.FunctionDef)]
  assert any(n.startswith(name) for n in found)
