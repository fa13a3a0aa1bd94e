"""What is to be predicted of grids: tasks and grids to rebuild, codes to decode, two grids to go between."""

import json
import os
import re

import numpy as np
import pytest
from data_pipelines import DataError, grid_inputs, images

from tests.test_arc_raw import A, B, C, OTHER, TASK, save


def stream(source, output='out', side=3, verb='rebuild', codes=(2, 8), stop=lambda: False, **more):
  return list(grid_inputs.grids(str(source), str(output), stop, side, verb, codes, **more))


def on_canvas(grid, side=3):
  canvas = np.full((1, side, side), 255, np.uint8)
  canvas[0, :len(grid), :len(grid[0])] = grid
  return canvas


def test_tasks_are_rebuilt_grid_by_grid(tmp_path):
  raw = save(tmp_path / 'raw', {
      'a.json': TASK, 'b/a.json': {'../a': OTHER, 'bad': 3, 'wide': {'train': [{'input': [[1] * 4], 'output': B}]}},
      'c.json': C, 'd.json': '[', 'e.jsonl': [A, {'test': [{'input': B}]}], 'f.json.gz': b'\x1f\x8b'})
  found = stream(raw, tmp_path / 'out')
  names = [x['name'][0] for x in found if isinstance(x, dict)]
  assert names == [
      'a_train1_input', 'a_train1_output', 'a_train2_input', 'a_train2_output', 'a_test1_input', 'a_test1_output',
      '.._a_train1_input', '.._a_train1_output', '.._a_test1_input', 'wide_train1_output', 'c', 'e#1',
      'e#2_test1_input']
  wanted = [A, B, C, A, B, C, C, B, A, B, C, A, B]
  for item, grid in zip((x for x in found if isinstance(x, dict)), wanted, strict=True):
    assert np.array_equal(item['grid'], on_canvas(grid)) and item['grid'].dtype == np.uint8
    assert item['size'].tolist() == [[len(grid), len(grid[0])]] and item['size'].dtype == np.int32
    assert item['mask'].tolist() == [1] and item.keys() == {'grid', 'size', 'mask', 'name', 'write'}
  errors = [str(x) for x in found if isinstance(x, DataError)]
  assert len(errors) == 4 and 'b/a.json: task bad: no lists' in errors[0] and 'f.json.gz: its gzip' in errors[3]
  assert 'task wide, train pair 1, input: a grid of 1 x 4; the canvas of the model has 3 x 3' in errors[1]
  assert 'd.json: no JSON' in errors[2]
  picture = np.full((4, 6, 3), 9, np.uint8)
  found[6]['write'](picture)
  assert os.listdir(tmp_path / 'out') == ['.._a_train1_input.png']
  assert np.array_equal(images.read(tmp_path / 'out' / '.._a_train1_input.png'), picture)
  assert len(stream(raw, stop=iter([False, False, True]).__next__)) == 2


def test_equal_names_get_numbers(tmp_path):
  raw = save(tmp_path, {'a.json': [[1]], 'b/a.json': [[2]], 'c/a.json': [[3]]})
  assert [x['name'][0] for x in stream(raw)] == ['a', 'a~2', 'a~3']


def test_a_grid_may_be_typed():
  item, = stream('[[1, 2], [3, 4]]')
  assert np.array_equal(item['grid'], on_canvas([[1, 2], [3, 4]])) and item['name'] == ['input']
  error, = stream('[[1, 2], [3]]')
  assert str(error) == '--input, row 2: 1 cells, the rows above have 2'
  assert 'no JSON' in str(stream('[[1, 2')[0])
  with pytest.raises(DataError, match='--input=none.json: no such file or folder; expected .json, .jsonl'):
    stream('none.json')


def test_codes_of_a_lattice_come_with_size_and_colours():
  text = json.dumps([{'codes': [1, 2], 'size': [3, 1], 'colours': [7, 0]}])
  found, = stream(text, verb='decode', header=True)
  assert found['codes'].tolist() == [[1, 2]] and found['extents'].tolist() == [[3, 1]]
  assert found['colours'].tolist() == [[7, 0, 1, 2, 3, 4, 5, 6, 8, 9]]
  for wrong, said in (({'size': [4, 1]}, 'each 1 to 3'), ({'size': [1]}, 'each 1 to 3'),
                      ({'size': [True, 1]}, 'each 1 to 3'), ({'colours': [1, 1]}, 'different integers'),
                      ({'colours': [10]}, 'of 0 to 9'),
                      ({'colours': 3}, 'different integers')):
    text = json.dumps({'codes': [1, 2], 'size': [3, 1], 'colours': [7, 0], **wrong})
    error, = stream(text, verb='decode', header=True)
    assert isinstance(error, DataError) and said in str(error)
  error, = stream('[1, 2]', verb='decode', header=True)
  assert 'no "size" and "colours"' in str(error)


def test_codes_of_different_rows_come_with_which_is_which():
  given = {'codes': [1, 2], 'size': [3, 1], 'colours': [7, 0], 'rows': [0, 1, 0], 'columns': [0]}
  found, = stream(json.dumps(given), verb='decode', header=True, distinct=True)
  assert found['rows'].tolist() == [[0, 1, 0]] and found['columns'].tolist() == [[0, 0, 0]]
  for key, wrong in (('rows', [0, 1]), ('rows', [1, 0, 0]), ('rows', [0, 2, 1]), ('rows', [0, -1, 0]), ('rows', None),
                     ('rows', [0, True, 0]), ('rows', '010'), ('columns', [1]), ('columns', [[0]]),
                     ('columns', [0, 1])):
    error, = stream(json.dumps({**given, key: wrong}), verb='decode', header=True, distinct=True)
    assert isinstance(error, DataError) and f'{key} ' in str(error) and 'expected' in str(error)
  error, = stream('[1, 2]', verb='decode', header=True, distinct=True)
  assert 'no "size" and "colours"' in str(error)


def test_codes_are_decoded(tmp_path):
  raw = save(tmp_path, {'a.json': [3, 7], 'b.json': [[0, 1], [1], {'codes': [2, 3]}], 'c.json': {'codes': [4, 5]},
                        'd.jsonl': [[0, 8], {'codes': [6, 7], 'grid': A}, [0, True], [1, 1]],
                        'e.json': 3, 'f.json': '['})
  found = stream(raw, verb='decode')
  assert [(x['name'][0], x['codes'].tolist()) for x in found if isinstance(x, dict)] == [
      ('a', [[3, 7]]), ('b#1', [[0, 1]]), ('b#3', [[2, 3]]), ('c', [[4, 5]]), ('d#2', [[6, 7]]), ('d#4', [[1, 1]])]
  assert found[0]['codes'].dtype == np.int32 and found[0].keys() == {'codes', 'mask', 'name', 'write'}
  errors = [str(x) for x in found if isinstance(x, DataError)]
  for error, words in zip(errors, (
      'b.json, list 2: 1 codes, the model has 2', "d.jsonl:1, code 2: '8' is no code; expected an integer of 0 to 7",
      "d.jsonl:3, code 2: 'True' is no code", 'e.json: no codes; expected a list of 2 integers', 'f.json: no JSON'),
                          strict=True):
    assert words in error
  assert stream('[1, 2]', verb='decode')[0]['codes'].tolist() == [[1, 2]]
  assert '0 codes, the model has 2' in str(stream('[]', verb='decode')[0])


def test_two_grids_are_gone_between(tmp_path):
  raw = save(tmp_path / 'raw', {'a.json': [A, C], 'b.json': TASK, 'c.jsonl': [{'examples': [[A, C]]}],
                                'd.json': [{'input': A, 'output': C}, {'input': C, 'output': B}]})
  for name, label, first, other in (('a.json', 'a', A, C), ('b.json', 'b', A, B), ('c.jsonl', 'c#1', A, C),
                                    ('d.json', 'd', A, C)):
    item, = stream(os.path.join(raw, name), verb='interpolate')
    assert np.array_equal(item['grid'], on_canvas(first)) and np.array_equal(item['other'], on_canvas(other))
    assert item['size'].tolist() == [[2, 3]] and item['other_size'].tolist() == [[len(other), len(other[0])]]
    assert item['name'] == [label] and item.keys() == {'grid', 'size', 'other', 'other_size', 'mask', 'name', 'write'}
  assert np.array_equal(stream(json.dumps([B, C]), verb='interpolate')[0]['other'], on_canvas(C))


@pytest.mark.parametrize('content, words', [
    ([A, B, C], 'a list of 3; expected one of two grids'), (A, 'grid 1, row 1: 1 is no row'),
    ([A, [[1] * 4]], 'grid 2: a grid of 1 x 4; the canvas of the model has 3 x 3'), ('[', 'no JSON'),
    ({'test': [{'input': A}]}, 'task x: its first pair has no output'), ({'a': 3}, 'task a: no lists'),
    ({'a': TASK, 'b': TASK}, '2 tasks; expected one')])
def test_other_than_two_grids_is_refused(tmp_path, content, words):
  error, = stream(os.path.join(save(tmp_path, {'x.json': content}), 'x.json'), verb='interpolate')
  assert isinstance(error, DataError) and re.search(words, str(error)), error


def test_two_grids_are_of_one_file(tmp_path):
  for files, words in (({'a.json': TASK, 'b.json': TASK}, 'several files or lines'), ({'a.jsonl': ''}, 'nothing in')):
    with pytest.raises(DataError, match=words):
      stream(save(tmp_path / words[:3], files), verb='interpolate')
