"""What is to be predicted of text trees: texts as packs, two sentences, vectors, and how many to draw."""

import json
import os
import random

import numpy as np
import pytest
from data_pipelines import DataError, books, packs, tree_inputs, trees

ROWS, LENGTHS, WIDTHS = (40, 12, 4), (8, 5, 4), (6, 8, 10, 12)
SHAPES = ((12, 3, 1), (20, 6, 2), (40, 12, 4))       # a quarter is 10 words; a paragraph may have 3 sentences of 4
TEXT = b'The cat sat. A dog ran off.\n\nIt was late. So they went home.'
READ = ('rebuild', 'encode', 'neighbours')


def stream(source, verb='rebuild', rows=ROWS, lengths=LENGTHS, widths=WIDTHS, **more):
  return list(tree_inputs.texts(str(source), verb, rows, lengths, widths, **more))


def error(*arguments, **more):
  found, = stream(*arguments, **more)
  assert isinstance(found, DataError)
  return str(found)


def save(folder, files):
  for name, content in files.items():
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
  return folder


def levels(item, key='ids', count=3):
  return tuple(item[f'{key}_{level}'][0] for level in range(count))


def shape(item, count=3):
  return tuple(len(x) for x in levels(item, count=count))


def made(random_state, paragraphs):
  """A text of so many different paragraphs."""
  word = lambda: ''.join(random_state.choices('abcdefgh', k=random_state.randint(1, 12)))
  sentence = lambda: ' '.join(word() for _ in range(random_state.randint(1, 7))).capitalize() + '.'
  return '\n\n'.join(f'{i} ' + ' '.join(sentence() for _ in range(random_state.randint(1, 5)))
                     for i in range(paragraphs)).encode()


# texts


@pytest.mark.parametrize('verb', READ)
def test_a_text_is_a_pack(verb):
  item, = stream(TEXT.decode(), verb)
  kinds = ('ids', 'counts', 'documents')
  assert item.keys() == {f'{k}_{level}' for k in kinds for level in range(3)} | {'mask', 'name', 'text', 'write'}
  assert item['name'] == ['input'] and item['text'] == [TEXT] and item['write'] is print
  assert item['mask'].tolist() == [1] and item['mask'].dtype == np.float32
  assert shape(item) == SHAPES[1]
  for level, (count, length) in enumerate(zip(SHAPES[1], LENGTHS)):
    assert item[f'ids_{level}'].shape == (1, count, length)
    assert item[f'counts_{level}'].shape == item[f'documents_{level}'].shape == (1, count)
    assert {item[f'{k}_{level}'].dtype for k in kinds} == {np.dtype(np.int32)}
    assert item[f'documents_{level}'].max() == (level > 0)       # one document; words have none
  assert books.texts(levels(item), levels(item, 'counts')) == TEXT.split(b'\n\n')


def test_a_file_is_one_text_of_whatever_bytes(tmp_path):
  text = bytes(range(256)) + b'\r\n \xff\xfe\n\n\n [MASK] '
  item, *more = stream(save(tmp_path, {'odd.one.txt': text}) / 'odd.one.txt', rows=(400, 99, 33))
  assert not more and item['text'] == [text] and item['name'] == ['odd.one']
  found = packs.unpacked(packs.Pack(levels(item), levels(item, 'counts'), ()))[2]
  assert packs.split(found, 2) == trees.nodes(text, 2)


def test_bytes_of_a_command_line_that_are_no_utf8_stay_what_they_are():
  item, = stream(b'a \xff\xe9.'.decode('utf-8', 'surrogateescape'))
  assert item['text'] == [b'a \xff\xe9.']
  assert '--input: half of a surrogate pair' in error('a \ud800')


def test_a_folder_is_read_in_order_without_what_is_hidden(tmp_path):
  raw = save(tmp_path / 'raw', {
      'b.txt': b'Two.', 'a/x.txt': b'One.', 'c/x.TXT': b'Three.', 'c/empty.txt': b' \n\n', '.hidden.txt': b'No.',
      '.git/x.txt': b'No.', 'notes.md': b'No.', 'x.json': ['No.', 'No.']})
  found = stream(raw)
  assert [x['name'][0] for x in found if isinstance(x, dict)] == ['x', 'b', 'x~2']
  assert [x['text'][0] for x in found if isinstance(x, dict)] == [b'One.', b'Two.', b'Three.']
  assert str(found[2]) == f'{raw}/c/empty.txt: no text in it'


def test_links_stay_within_their_folder(tmp_path):
  outside = save(tmp_path, {'out.txt': b'Secret.', 'far/y.txt': b'Secret.'})
  raw = save(tmp_path / 'raw', {'a.txt': b'One.'})
  for name, target in (('b.txt', outside / 'out.txt'), ('c.txt', 'a.txt'), ('d', outside / 'far'), ('e.txt', 'gone')):
    os.symlink(target, raw / name)
  linked, one, leaves, again, broken = stream(raw)
  assert str(linked) == f'{raw}/d: a link to a folder, which is not followed; put the folder itself there'
  assert one['text'] == again['text'] == [b'One.'] and [one['name'], again['name']] == [['a'], ['c']]
  assert str(leaves) == f'{raw}/b.txt: a link that leaves {raw}; put a copy of the file in its place'
  assert str(broken) == f'{raw}/e.txt: cannot be read: it is no file, or a link to none'


def test_what_can_not_be_read_of_a_folder_is_told(tmp_path, monkeypatch):
  raw, scan = save(tmp_path, {'a.txt': b'One.', 'b/x.txt': b'Two.', 'folder.txt/.keep': b''}), os.scandir
  os.mkfifo(raw / 'p.txt')

  def refuse(path):
    if str(path).endswith('b'):
      raise PermissionError(13, 'Permission denied', str(path))
    return scan(path)
  monkeypatch.setattr(os, 'scandir', refuse)
  closed, item, pipe = stream(raw)
  assert str(closed) == f'{raw}/b: cannot be read: Permission denied' and item['text'] == [b'One.']
  assert str(pipe) == f'{raw}/p.txt: cannot be read: it is no file, or a link to none'


def test_a_file_that_can_not_be_opened_is_told(tmp_path, monkeypatch):
  path = save(tmp_path, {'a.txt': b'One.'}) / 'a.txt'

  def refuse(*_):
    raise PermissionError(13, 'Permission denied', str(path))
  monkeypatch.setattr('builtins.open', refuse)
  found = error(path)
  monkeypatch.undo()
  assert found == f'{path}: cannot be read: Permission denied'


def test_large_files_are_refused(tmp_path):
  for name, verb in (('a.txt', 'rebuild'), ('a.txt', 'interpolate'), ('a.json', 'decode'), ('a.jsonl', 'interpolate')):
    with open(tmp_path / name, 'wb') as f:
      f.truncate((64 << 20) + 1)
    assert error(tmp_path / name, verb) == (f'{tmp_path}/{name}: 67108865 bytes; at most 64 MiB are read of a file. '
                                            'Cut it into several')


@pytest.mark.parametrize('source, words', [
    ('none.txt', '--input=none.txt: no such file; expected a .txt file, a folder of them, or a text'),
    ('far/none.jsonl', 'no such file'), ('x.md', '/x.md: a file of another kind; expected a .txt file, a folder'),
    ('only', '/only: no text there; expected .txt files')])
def test_other_than_texts_is_refused(tmp_path, source, words):
  save(tmp_path, {'x.md': b'One.', 'only/.a.txt': b'One.', 'only/x.md': b'Two.'})
  path = tmp_path / source
  with pytest.raises(DataError) as found:
    stream(path if path.exists() else source)
  assert words in str(found.value)


def test_empty_texts_are_refused(tmp_path):
  assert error('') == error(' \n') == '--input: no text in it'
  assert error(save(tmp_path, {'a.txt': b''}) / 'a.txt') == f'{tmp_path}/a.txt: no text in it'


def test_a_text_with_the_name_of_a_file_in_it_is_a_text():
  assert stream('See none.txt')[0]['text'] == [b'See none.txt']


def test_equal_paragraphs_are_one_row():
  item, = stream('One. Two.\n\nOne. Two.')
  assert item['text'] == [b'One. Two.'] and item['counts_2'][0, 0] == 2 and shape(item) == SHAPES[0]


# sizes of packs


def test_a_text_gets_the_smallest_bucket_that_holds_it():
  sentences = [f'{c}{i}.' for c in 'ABCD' for i in range(3)]
  paragraphs = [' '.join(sentences[i:i + 3]) for i in range(0, 12, 3)]
  for count, wanted in ((1, SHAPES[0]), (2, SHAPES[1]), (3, SHAPES[2]), (4, SHAPES[2])):
    item, = stream('\n\n'.join(paragraphs[:count]))
    assert shape(item) == wanted and item['counts_2'].sum() == count
  item, = stream(paragraphs[0], buckets=(1, ))
  assert shape(item) == SHAPES[2]
  assert [shape(x) for x in stream(paragraphs[0], rows=SHAPES[0])] == [SHAPES[0]]


def test_a_long_text_is_several_packs_of_the_largest_bucket(tmp_path):
  text = made(random.Random(0), 9)
  # the second pack of a.txt has the name of the other file
  raw = save(tmp_path, {'a.txt': text, 'a#2.txt': b'Short.'})
  short, *found = stream(raw)
  assert short['name'] == ['a#2'] and short['text'] == [b'Short.']
  assert len(found) > 2 and {shape(x) for x in found} == {SHAPES[2]}
  assert [x['name'][0] for x in found] == ['a', 'a#2~2', *(f'a#{n}' for n in range(3, len(found) + 1))]
  rows = [row for x in found for row in packs.unpacked(packs.Pack(levels(x), levels(x, 'counts'), ()))[2]]
  assert packs.split(rows, 2) == trees.nodes(text, 2)


def test_there_are_at_most_three_shapes_whatever_the_text():
  state, shapes, several = random.Random(1), set(), 0
  for _ in range(200):
    text = made(state, state.randint(1, 8))
    found = stream(text.decode())
    several += len(found) > 1
    assert len({shape(x) for x in found}) == 1
    shapes.add(shape(found[0]))
    rows = [row for x in found for row in packs.unpacked(packs.Pack(levels(x), levels(x, 'counts'), ()))[2]]
    assert trees.join(tuple(packs.split(rows, 2)), 3) == text
    smaller = [s for s in SHAPES if s < shape(found[0])]
    for size in smaller:                                    # it would not have been one pack
      packer = packs.Packer(size, LENGTHS)
      assert [p for n in trees.nodes(text, 2) for p in packer.add(n, 0)]
  assert shapes == set(SHAPES) and 20 < several < 180


def test_trees_may_have_any_number_of_levels(tmp_path):
  words, = stream('One two two', rows=(24, ), lengths=(8, ), widths=(4, 6))
  assert shape(words, 1) == (6, ) and words['text'] == [b'One two'] and words['counts_0'][0, :2].tolist() == [1, 2]
  text = b'Chapter I\n\nOne. Two.\n\nChapter II\n\nThree.'
  path = save(tmp_path, {'a.txt': text}) / 'a.txt'
  book, = stream(path, rows=(900, 90, 18, 6, 2), lengths=(8, 6, 6, 4, 4), widths=(4, ) * 6)
  assert book['text'] == [text] and shape(book, 5) == (225, 45, 9, 3, 1)
  with pytest.raises(ValueError, match='level 0 needs at least 12'):
    stream('One.', rows=(9, 3, 1))


# two sentences


def sentences(item):
  return [books.texts([item[f'{p}ids_{level}'][0] for level in range(3)],
                      [item[f'{p}counts_{level}'][0] for level in range(3)]) for p in ('', 'other_')]


def test_two_sentences_are_two_packs_of_one_shape(tmp_path):
  pair = ['The cat sat.', 'So they go \u2019ere.']
  wanted = [[pair[0].encode()], [pair[1].encode()]]
  raw = save(tmp_path, {
      'a.json': b'\xef\xbb\xbf' + json.dumps(pair).encode(), 'b.json': [pair, pair[::-1]],
      'c.jsonl': json.dumps(pair).encode() + b'\n\n' + json.dumps([pair]).encode(),
      'd.txt': f'\n{pair[0]}\r\n \n{pair[1]}'.encode()})
  for source, names in ((json.dumps(pair), ['input']), (raw / 'a.json', ['a']), (raw / 'b.json', ['b#1', 'b#2']),
                        (raw / 'c.jsonl', ['c#1', 'c#3#1']), (raw / 'd.txt', ['d'])):
    found = stream(source, 'interpolate')
    assert [x['name'][0] for x in found] == names
    assert sentences(found[0]) == wanted and sentences(found[-1]) == wanted[::-1 if names[-1] == 'b#2' else 1]
    assert found[0].keys() == stream(TEXT.decode())[0].keys() | {
        f'other_{k}_{level}' for k in ('ids', 'counts') for level in range(3)}
    for level, size in enumerate(SHAPES[0]):
      assert found[0][f'ids_{level}'].shape == found[0][f'other_ids_{level}'].shape == (1, size, LENGTHS[level])
      assert found[0][f'other_counts_{level}'].shape == (1, size)
    assert found[0]['mask'].tolist() == [1] and found[0]['text'] == wanted[0]


@pytest.mark.parametrize('content, words', [
    (['One.'], 'x.json: a list of 1; expected a list of two texts, or a list of such'),
    (['One.', 'Two.', 'Three.'], 'x.json: a list of 3; expected'), ([], 'x.json: a list of 0'), (3, 'x.json: 3; exp'),
    ({'a': 1}, 'x.json: an object; expected'), (['One.', True], 'x.json, text 2: True is no text'),
    (['One.', None], 'text 2: None is no text'), (['One.', ' \n'], 'x.json, text 2: no text in it'),
    (['One.', '\ud800'], 'x.json, text 2: half of a surrogate pair'),
    (['One.', '\udcff'], 'x.json, text 2: half of a surrogate pair'),
    (['One. Two.', 'Three.'], 'x.json, text 1: 2 sentences; expected a single sentence of at most 4 words, of which '
                              'one of more than 7 bytes counts as several'),
    (['One. One.', 'Two.'], 'text 1: 2 sentences'), (['One.\n\nTwo', 'Two.'], 'text 1: 2 sentences'),
    (['One.', 'a b c d e'], 'text 2: one of 5; expected a single sentence of at most 4 words'),
    (['One.', 'a b c abcdefgh'], 'text 2: one of 5; expected'),
    (b'["One.", "T\xff"]', 'x.json: byte 11 (0xff) is not UTF-8'), (b'["One.", ', 'x.json: no JSON, or cut off'),
    (b'[{"a": 1, "a": 2}, "b"]', "the key 'a' is there twice"), (b'', 'x.json: no JSON')])
def test_other_than_two_sentences_is_refused(tmp_path, content, words):
  assert words in error(save(tmp_path, {'x.json': content}) / 'x.json', 'interpolate')


def test_what_is_wrong_with_a_pair_leaves_the_others(tmp_path):
  raw = save(tmp_path, {'a.json': [['One.', 'Two.'], ['One.'], 'Two.', ['Three.', 'Four.']],
                        'b.jsonl': b'["One.", "Two."]\n[1\n["One.", 2]\n[["One.", "Two."], ["a b c d e", "Two."]]'})
  found = stream(raw / 'a.json', 'interpolate')
  assert [found[0]['name'], found[3]['name']] == [['a#1'], ['a#4']]
  assert f'{raw}/a.json, pair 2: a list of 1' in str(found[1]) and "a.json, pair 3: 'Two.'; exp" in str(found[2])
  first, *errors = stream(raw / 'b.jsonl', 'interpolate')
  assert first['name'] == ['b#1'] and errors.pop(2)['name'] == ['b#4#1']
  for found, words in zip(errors, ('b.jsonl:2: no JSON', 'b.jsonl:3, text 2: 2 is no', 'b.jsonl:4, pair 2, text 1'),
                          strict=True):
    assert words in str(found)


def test_two_sentences_of_a_text_file_are_two_lines(tmp_path):
  raw = save(tmp_path, {'a.txt': b'One.\nTwo.\nThree.', 'b.txt': b'\n', 'c.txt': b'One.\n\n\xff Two. Three.'})
  assert error(raw / 'a.txt', 'interpolate') == (f'{raw}/a.txt: 3 lines that are not blank; expected two, with a text '
                                                 'in each')
  assert 'b.txt: 0 lines' in error(raw / 'b.txt', 'interpolate')
  assert 'c.txt:3: 2 sentences' in error(raw / 'c.txt', 'interpolate')


def test_two_words_are_gone_between_where_there_is_nothing_above():
  sizes = {'rows': (24, ), 'lengths': (8, ), 'widths': (4, 6)}
  item, = stream('["one", "seven"]', 'interpolate', **sizes)
  assert bytes((item['other_ids_0'][0, 0, :5] - packs.FIRST).tolist()) == b'seven' and item['text'] == [b'one']
  assert 'text 2: 2 words; expected a single word of at most 7 bytes' in error('["a", "b c"]', 'interpolate', **sizes)
  assert 'text 1: one of 8; expected a single word' in error('["abcdefgh", "b"]', 'interpolate', **sizes)


@pytest.mark.parametrize('source, words', [
    ('none.txt', 'no such file; expected a .json or .jsonl file, or a list of two texts, or a list of such as a JSON '
                 'text, or a .txt file'), ('One.', 'no such file'), ('', 'no such file'), ('.', 'a folder; expected'),
    ('x.md', 'a file of another kind; expected a .json or .jsonl file'), ('x.jsonl', 'x.jsonl: nothing in it')])
def test_two_sentences_are_of_one_file(tmp_path, monkeypatch, source, words):
  save(tmp_path, {'x.md': b'One.', 'x.jsonl': b'\n'})
  monkeypatch.chdir(tmp_path)
  with pytest.raises(DataError) as found:
    stream(source, 'interpolate')
  assert words in str(found.value)


# vectors


def test_vectors_come_with_their_level(tmp_path):
  vectors = {level: [0.5, -1, *range(WIDTHS[level + 1] - 2)] for level in range(3)}
  one = {'level': 2, 'vector': vectors[2], 'text': 'One.'}
  every = [{'level': level, 'vector': v} for level, v in vectors.items()]
  raw = save(tmp_path, {'a.json': every, 'b.jsonl': json.dumps(one).encode() + b'\n' + json.dumps(every[:1]).encode()})
  for source, names, wanted in ((json.dumps(one), ['input'], [2]), (raw / 'a.json', ['a#1', 'a#2', 'a#3'], [0, 1, 2]),
                                (raw / 'b.jsonl', ['b#1', 'b#2#1'], [2, 0])):
    found = stream(source, 'decode')
    assert [x['name'][0] for x in found] == names
    for item, level in zip(found, wanted, strict=True):
      assert item.keys() == {'level', 'vector', 'at', 'mask', 'name', 'write'} and item['at'] == [level]
      assert item['level'].tolist() == [level] and item['level'].dtype == np.int32
      assert item['vector'].tolist() == [vectors[level]] and item['vector'].dtype == np.float32
      assert item['mask'].tolist() == [1]


@pytest.mark.parametrize('text, words', [
    ('[]', '--input: no "level" and "vector", but a list of 0; expected {"level": NUMBER'),
    ('[1, 2]', 'no "level" and "vector", but a list of 2'), ('{"level": 0}', 'no "level" and "vector", but an object'),
    ('{"level": 3, "vector": [1]}', '3 is no level; expected an integer of 0 to 2'),
    ('{"level": -1, "vector": [1]}', '-1 is no level'), ('{"level": true, "vector": [1]}', 'True is no level'),
    ('{"level": 1.0, "vector": [1]}', '1.0 is no level'), ('{"level": "1", "vector": [1]}', "'1' is no level"),
    ('{"level": 0, "vector": 3}', '"vector" is 3; expected a list of 8 numbers, as level 0 has them'),
    ('{"level": 1, "vector": [1, 2]}', '"vector" is a list of 2; expected a list of 10 numbers, as level 1'),
    ('{"level": 0, "vector": [1, 2, 3, 4, 5, 6, 7, true]}', '--input, number 8: True is no number'),
    ('{"level": 0, "vector": [1, null, 3, 4, 5, 6, 7, 8]}', 'number 2: None is no number'),
    ('{"level": 0, "vector": [1, 2, "3", 4, 5, 6, 7, 8]}', "number 3: '3' is no number"),
    ('{"level": 0, "vector": [[1], 2, 3, 4, 5, 6, 7, 8]}', 'number 1: a list of 1 is no number'),
    ('{"level": 0, "vector": [NaN, 2, 3, 4, 5, 6, 7, 8]}', 'number 1: nan is not finite'),
    ('{"level": 0, "vector": [1, -Infinity, 3, 4, 5, 6, 7, 8]}', 'number 2: -inf is not finite'),
    ('{"level": 0, "vector": [1, 2, 3, 4, 5, 6, 7, 1e39]}', 'number 8: 1e+39 is not finite, or too large for float32'),
    ('{"level": 0, "vector": [1, 2, 3, 4, 5, 6, 7, 1%s]}' % ('0' * 400), 'too large for float32'),
    ('{"level": 0, "level": 1}', "the key 'level' is there twice"), ('{"level": ', '--input: no JSON, or cut off')])
def test_other_than_vectors_is_refused(text, words):
  assert words in error(text, 'decode')


def test_the_largest_numbers_of_float32_are_finite():
  most = float(np.finfo(np.float32).max)
  item, = stream(json.dumps({'level': 0, 'vector': [most, -most, int(most)] + [0] * 5}), 'decode')
  assert np.isfinite(item['vector']).all() and item['vector'][0, 2] == most


def test_what_is_wrong_with_a_vector_leaves_the_others(tmp_path):
  good = {'level': 0, 'vector': [0] * 8}
  raw = save(tmp_path, {'a.json': [good, 3, {'level': 0, 'vector': [0] * 7 + [False]}, good],
                        'b.jsonl': b'{"level": 9, "vector": []}\n\xff\n' + json.dumps(good).encode(), 'c.txt': b'1'})
  first, second, third, last = stream(raw / 'a.json', 'decode')
  assert [first['name'], last['name']] == [['a#1'], ['a#4']]
  assert f'{raw}/a.json, object 2: no "level" and "vector", but 3' in str(second)
  assert 'a.json, object 3, number 8: False is no number' in str(third)
  one, two, three = stream(raw / 'b.jsonl', 'decode')
  assert 'b.jsonl:1: 9 is no level' in str(one) and 'b.jsonl:2: byte 0 (0xff) is not UTF-8' in str(two)
  assert three['name'] == ['b#3']
  for source, words in ((raw, 'a folder; expected a .json or .jsonl file'), (raw / 'c.txt', 'of another kind'),
                        ('none.json', '--input=none.json: no such file; expected a .json or .jsonl file, or {"level"')):
    with pytest.raises(DataError) as found:
      stream(source, 'decode')
    assert words in str(found.value)


# numbers


def test_texts_are_drawn_by_number():
  found = stream('3', 'generate')
  assert [x['draw'].tolist() for x in found] == [[0], [1], [2]] and found[0]['draw'].dtype == np.int32
  assert [x['name'] for x in found] == [['draw0'], ['draw1'], ['draw2']]
  assert all(x['mask'].tolist() == [1] and x.keys() == {'draw', 'mask', 'name', 'write'} for x in found)
  assert len(stream('1000', 'generate')) == 1000


@pytest.mark.parametrize('source', ['0', '1001', '-1', '1.5', 'x', '', '1e2', '\u0663', '9' * 5000, '[1]', '01', '1\n'])
def test_other_numbers_are_refused(source):
  with pytest.raises(DataError, match='expected how many texts to draw, 1 to 1000'):
    stream(source, 'generate')
