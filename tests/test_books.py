"""Text trees: files of writings, what is left out, packs as records, the source, made-up documents."""

import json
import os
import re

import numpy as np
import pytest
from data_pipelines import DataError, books, books_raw, documents, packs, pipeline, prepare, prepared, templates, trees

from tests.conftest import ROOT
from tests.test_arc_raw import save
from tests.test_corpus import examples

SHARED = os.path.join(ROOT, '..', 'shared', 'data', 'agent')
shared = pytest.mark.skipif(not os.path.exists(SHARED), reason='the texts in ../shared/data are not there')
SIZES = {'rows': (24, 8, 4), 'lengths': (8, 6, 4)}
SONG = {'title': 'Old Paint', 'stanzas': [['I ride', 'an old paint'], ['Goodbye']], 'pages': [1]}
ARTICLE = {'title': 'Iron', 'sections': [{'heading': '', 'paragraphs': ['A metal.', 'It rusts.']},
                                         {'heading': 'Use', 'paragraphs': ['Ships.']}]}
BOOK = 'The title\n\nChapter 1\n\nOne. Two.\n\nThree.\n\nChapter 2\n\nA cat\nsat.'
CHAPTERS = [b'The title', b'Chapter 1\n\nOne. Two.\n\nThree.', b'Chapter 2\n\nA cat\nsat.']


def make(capsys, raw, out, *flags):
  """Runs the program with small packs: (0, report), or code and what it says."""
  code = prepare.main(['prepare', 'books', f'--raw_dir={raw}', f'--out_dir={out}', '--rows=24,8,4', '--lengths=8,6,4',
                       *flags])
  found, err = capsys.readouterr()
  return code, json.loads(found) if code == 0 else ''.join(x for x in err.splitlines(True) if ' s left' not in x)


def inside(out):
  return os.path.join(str(out), books.NAME, books.VERSION)


def records(folder, split, rows, lengths):
  """(pack, name of its first writing) of each record of a prepared folder, which is checked on the way."""
  assert not list(prepared.problems(folder, books.check))
  tf, shards = pipeline.tensorflow(), prepared.manifest(folder)['splits'][split]['shards']
  ends = np.cumsum([u * n for u, n in zip(rows, lengths)])[:-1]
  out = []
  for r in tf.data.TFRecordDataset([os.path.join(folder, n) for n in sorted(shards)]).map(books.decode):
    r = {k: v.numpy() for k, v in r.items()}
    assert r['rows'].tolist() == list(rows) and r['lengths'].tolist() == list(lengths)
    ids = [x.reshape(-1, n) for x, n in zip(np.split(r['ids'], ends), lengths)]
    counts, numbers = (np.split(r[k], np.cumsum(rows)[:-1]) for k in ('counts', 'documents'))
    out.append((packs.Pack(tuple(ids), tuple(counts), tuple(numbers)), r['writing'].decode()))
  return out


# raw files

@pytest.mark.parametrize('name, content, wanted', [
    ('x.txt', BOOK, [(f'x.txt#{i}', t, n) for i, t, n in zip((1, 2, 3), CHAPTERS, (1, 3, 9))]),
    ('x.TXT', BOOK.replace('\n', '\r\n'), [(f'x.TXT#{i}', t, n) for i, t, n in zip((1, 2, 3), CHAPTERS, (1, 3, 9))]),
    ('x.txt', b'\xef\xbb\xbfA\n\n\nB \r\n', [('x.txt#1', b'A\n\n\nB \n', 1)]),
    ('x.txt', b'\0\xff\xfe \xe9\r', [('x.txt#1', b'\0\xff\xfe \xe9\r', 1)]), ('x.txt', '', [('x.txt#1', b'', 1)]),
    ('x.jsonl', [{'text': 'é\r\n b', 'id': 3}, {'text': '', 'title': 'T'}], [
        ('x.jsonl:1', 'é\n b'.encode(), 1), ('T', b'', 2)]),
    ('x.jsonl', [{'text': BOOK, 'title': None}], [('x.jsonl:1', BOOK.encode(), 1)]),
    ('x.jsonl', b'\xef\xbb\xbf\n' + json.dumps(SONG).encode() + b'\r\n \n' + json.dumps(ARTICLE).encode(), [
        ('Old Paint', b'Old Paint\n\nI ride\nan old paint\n\nGoodbye', 2),
        ('Iron', b'Iron\n\nA metal.\n\nIt rusts.\n\nUse\n\nShips.', 4)]),
    ('x.jsonl', [{'title': '', 'stanzas': [['a']]}, {'title': 't', 'sections': []}], [
        ('x.jsonl:1', b'a', 1), ('t', b't', 2)]), ('x.jsonl', '', [])])
def test_forms_of_writings(tmp_path, name, content, wanted):
  raw = save(tmp_path, {name: content, 'index.json': {}, '.hid.txt': 'x'})
  assert [(w.name, w.text, w.line) for w in books_raw.read(raw)] == wanted
  assert {w.file for w in books_raw.read(raw)} <= {str(tmp_path / name)}
  found, others = books_raw.files(raw)
  assert list(found) == [str(tmp_path / name)] and len(others) == 2
  assert [w[:3] for w in books_raw.read(str(tmp_path / name))] == [w[:3] for w in books_raw.read(raw)]


def test_a_book_may_be_whole(tmp_path):
  raw = save(tmp_path, {'a.txt': BOOK, 'deep/b.txt': BOOK + '!', 'deep/c.jsonl': [SONG]})
  found = list(books_raw.read(raw, whole=True))
  assert [w.name for w in found] == ['a.txt', 'deep/b.txt', 'Old Paint'] and found[0].text == BOOK.encode()
  parts = [w for w in books_raw.read(raw) if w.name.startswith('deep/b.txt#')]
  assert b'\n\n'.join(w.text for w in parts) == found[1].text
  lines = (BOOK + '!').split('\n')
  assert all(lines[w.line - 1] == w.text.decode().split('\n')[0] for w in parts)


def test_splits_hang_on_names_or_on_the_text(tmp_path):
  texts = [f'Text {i}.' for i in range(300)]
  raw = save(tmp_path, {'all.jsonl': [{'text': t} for t in texts], 'book.txt': texts[0], 'train/a.txt': BOOK,
                        'valid.jsonl': [SONG], 'test/deep/b.txt': BOOK + '?', 'testament.txt': texts[1]})
  found = {}
  for w in books_raw.read(raw):
    found[w.text] = w.split
    wanted = {'a.txt': 'train', 'valid.jsonl': 'validation', 'b.txt': 'test'}.get(os.path.basename(w.file))
    assert w.split == (wanted or documents.by_hash(w.text.decode()))
  counts = [list(found[t.encode()] for t in texts).count(s) for s in documents.SPLITS]
  assert 200 < counts[0] < 280 and min(counts[1:]) > 10


@pytest.mark.parametrize('content, words', [
    ('{"text": "a"}\n{"text": "b', 'x.jsonl:2: expected one of .*"stanzas".*"sections".*found \'{"text": "b'),
    ([SONG, {}], 'x.jsonl:2: expected'), ([SONG, 3], 'x.jsonl:2'), ([['text']], 'x.jsonl:1'), (['text'], 'x.jsonl:1'),
    ([None], 'found'), ([{'text': 3}], 'x.jsonl:1'), ([{'text': None}], 'x.jsonl:1'), ([{'text': ['a']}], 'x.jsonl:1'),
    ([{'stanzas': [['a']]}], 'x.jsonl:1'), ([{**SONG, 'title': 3}], 'x.jsonl:1'), ([{**SONG, 'text': ''}], 'x.jsonl:1'),
    ([{**SONG, 'stanzas': ['line']}], 'x.jsonl:1'), ([{**SONG, 'stanzas': [[['a']]]}], 'x.jsonl:1'),
    ([{**SONG, 'stanzas': {}}], 'x.jsonl:1'), ([{**ARTICLE, 'sections': ['a']}], 'x.jsonl:1'),
    ([{**ARTICLE, 'sections': [{'paragraphs': ['a']}]}], 'x.jsonl:1'),
    ([{**ARTICLE, 'sections': [{'heading': None, 'paragraphs': ['a']}]}], 'x.jsonl:1'),
    ([{**ARTICLE, 'sections': [{'heading': '', 'paragraphs': 'a'}]}], 'x.jsonl:1'),
    ('{"text": "a\\ud800"}', 'x.jsonl:1: a text in it has half of a surrogate pair'),
    ('{"text": "a", "title": "\\ud800"}', 'x.jsonl:1: .*surrogate'), ('[' * 100_000, 'x.jsonl:1: expected'),
    (b'{"text": "a"}\n\xe9', r'x.jsonl:2: byte 14 \(0xe9\) is not UTF-8')])
def test_broken_lines_are_named(tmp_path, capsys, content, words):
  raw = save(tmp_path / 'raw', {'x.jsonl': content})
  code, err = make(capsys, raw, tmp_path / 'out')
  assert code == 3 and raw in err and err.count('\n') == 1, err
  assert re.search(words, err), err
  assert not os.path.exists(tmp_path / 'out' / books.NAME)


@pytest.mark.parametrize('files, words', [
    ({'index.json': {}, 'a.raw': 'x'}, 'no text there; expected .txt or .jsonl files'),
    ({'a.txt': ' \n\n\t', 'b.jsonl': [{'text': ''}]}, 'no writing remains; 2 are empty, outliers: 0 long_word, 0 con'),
    ({'a.txt': 'x' * 201}, 'no writing remains; 0 are empty, outliers: 1 long_word'),
    ({'a.txt': 'd'}, 'none of its 1 writings is in the split train, they are divided by their hash; name')])
def test_folders_without_anything_to_learn_are_named(tmp_path, capsys, files, words):
  raw = save(tmp_path / 'raw', files)
  code, err = make(capsys, raw, tmp_path / 'out')
  assert code == 3 and raw in err and err.count('\n') == 1 and words in err, err


# what is left out

def test_what_is_left_out_is_counted(tmp_path, capsys):
  """The outliers by reason; of a text that is there twice, the one that comes first remains, whatever the split."""
  odd = {'long': 'so ' + 'x' * 31, 'nul': 'a\0b c d', 'both': '\x7f' * 31, 'blank': ' \n', 'song': 'La la.',
         'fits': 'x' * 30 + ' y' + '\t\r\n'}
  raw = save(tmp_path / 'raw', {
      'a.jsonl': [{'title': k, 'text': t} for k, t in odd.items()], 'empty.txt': b'\xef\xbb\xbf', 'index.json': {},
      'many.jsonl': [{'text': f'{i}' + 'y' * 40} for i in range(20)], 'train.txt': 'Good.', 'valid.txt': 'Good.',
      'validation.jsonl': [{'text': 'La la.'}, {'text': 'Fresh.'}]})
  flags = ('--longest_word=30', '--most_control=0.1')
  code, report = make(capsys, raw, tmp_path / 'out', *flags)
  assert code == 0 and report['empty'] == 2 and report['duplicates'] == 2 and report['other_files'] == ['index.json']
  assert report['outliers'] == {
      'long_word': {'count': 22, 'names': ['long', 'both', *(f'many.jsonl:{i}' for i in range(1, 9))]},
      'control': {'count': 2, 'names': ['nul', 'both']}}
  splits = report['splits']
  assert sum(s['writings'] for s in splits.values()) == 4 and splits['validation']['bytes'] >= len('Fresh.')
  assert prepared.manifest(inside(tmp_path / 'out'))['report'] == report
  assert make(capsys, raw, tmp_path / 'out', *flags)[1] == report                # the same: the same folder
  assert make(capsys, raw, tmp_path / 'out')[0] == 3
  code, kept = make(capsys, raw, tmp_path / 'kept', *flags, '--outliers=keep')
  assert code == 0 and kept['outliers'] == report['outliers'] and kept['duplicates'] == 2
  assert sum(s['writings'] for s in kept['splits'].values()) == 4 + 3 + 20


# packs

@pytest.fixture(scope='module')
def raw(tmp_path_factory):
  """Articles of train and validation, a book, and a song of train that has a stanza twice."""
  made = [d.decode() for d in templates.documents(40, 5)]
  articles = [{'title': f'A {i}', 'sections': [{'heading': '', 'paragraphs': made[i:i + 3]}]} for i in range(0, 40, 4)]
  song = {'title': 'Twice', 'stanzas': [['Heigh ho'], ['Hey', 'ho'], ['Heigh ho']]}
  return save(tmp_path_factory.mktemp('raw'), {'train.jsonl': [*articles[:8], song], 'train2.txt': BOOK,
                                               'valid.jsonl': articles[8:]})


@pytest.fixture(scope='module')
def folder(raw, tmp_path_factory):
  return books.prepare(raw, str(tmp_path_factory.mktemp('books')), shards=2, **SIZES)[0]


@pytest.mark.parametrize('joined', [False, True])
@pytest.mark.parametrize('rows, lengths', [((120, 24, 9), (16, 16, 8)), ((600, 60, 16, 5), (16, 16, 6, 8)),
                                           ((90, 24), (16, 16))])
def test_packs_hold_all_nodes_of_a_split(raw, tmp_path, rows, lengths, joined):
  made, report = books.prepare(raw, str(tmp_path), rows=rows, lengths=lengths, joined=joined)
  top = len(rows) - 1
  for split in ('train', 'validation'):
    found, texts = records(made, split, rows, lengths), []
    for pack, _ in found:
      assert all(row.last for level in packs.unpacked(pack) for row in level)
      here = books.texts(pack.ids, pack.counts)
      texts += [t for t, n in zip(here, pack.counts[top]) for _ in range(n)]
    writings = [w for w in books_raw.read(raw) if w.split == split]
    wanted = [trees.join(n, top) for w in writings for n in trees.nodes(w.text, top)]
    assert sorted(texts) == sorted(wanted)
    facts = report['splits'][split]
    assert len(found) == facts['packs'] and facts['nodes'] == len(wanted) and facts['writings'] == len(writings)
    used = np.array([[(c > 0).sum() for c in pack.counts] for pack, _ in found]).sum(0)
    assert np.allclose(facts['fill'], used / len(found) / rows, atol=1e-3)
    counted = np.array([[c.sum() for c in pack.counts] for pack, _ in found]).sum(0)
    assert np.allclose(facts['repeats'], counted / used, atol=1e-2)
    words = [x for w in writings for x in trees.nodes(w.text, 0)]
    assert facts['words'] == len(words) == counted[0] and facts['distinct_words'] == len(set(words))
    assert facts['bytes'] == sum(len(w.text) for w in writings)


def test_packs_tell_their_first_writing_and_their_documents(folder, raw):
  found = records(folder, 'train', **SIZES)
  names = [name for _, name in found]
  order = [w.name for w in books_raw.read(raw) if w.split == 'train']
  assert names[0] == 'A 0' and names == sorted(names, key=order.index) and len(set(names)) > 5
  for pack, name in found:
    text = next(w.text for w in books_raw.read(raw) if w.name == name)
    first, numbers = books.texts(pack.ids, pack.counts)[0], pack.documents[2][pack.counts[2] > 0]
    assert first in text and numbers[0] == 1 and set(np.diff(numbers)) <= {0, 1}
  assert max(p.documents[2].max() for p, _ in found) > 1


def test_texts_of_rows_that_go_on():
  packer = packs.Packer((20, 9, 9), (4, 3, 2))
  assert not [p for node in trees.nodes(b'abcde f g h.\n\nX y', 2) for p in packer.add(node, 0)]
  pack, = packer.rest()
  assert books.texts(pack.ids, pack.counts) == [b'abcde', b'f g', b'h.', b'X y']      # a paragraph has one row at most


@pytest.fixture(scope='module')
def record(folder):
  """The fields of the first record of train."""
  tf, shards = pipeline.tensorflow(), prepared.manifest(folder)['splits']['train']['shards']
  first = next(iter(tf.data.TFRecordDataset(os.path.join(folder, min(shards)))))
  return {k: v.numpy() for k, v in books.decode(first).items()}


@pytest.mark.parametrize('change, words', [
    ({'rows': [24, 8]}, 'not of rows 24,8 and lengths 8,6,4'), ({'rows': [24, 8, 0]}, 'not of rows 24,8,0'),
    ({'rows': []}, 'not of rows  and'), ({'lengths': [8, 6, 5]}, 'lengths 8,6,5'), ({'ids': [1]}, 'not of rows'),
    ({'counts': [1] * 37}, 'not of rows'), ({'ids': {0: 5 + 256}}, 'level 0: row 0 has an id'),
    ({'ids': {0: packs.MASK}}, 'level 0: row 0 has an id'), ({'ids': {0: packs.JOIN}}, 'level 0: row 0 has an id'),
    ({'ids': {0: -1}}, 'level 0: row 0 has an id'), ({'ids': {0: packs.END}}, 'row 0 has not exactly one terminator'),
    ({'ids': {24 * 8: 5 + 24}}, 'level 1: row 0 has an id'), ({'ids': {24 * 8 + 8 * 6: 13}}, 'level 2: row 0 has an'),
    ({'ids': {range(8): 5}}, 'level 0: row 0 has not'), ({'ids': {24 * 8 + 5: 5}}, 'level 1: row 0 has an id that is'),
    ({'ids': {24 * 8 - 1: 5}}, 'level 0: no row, a count below 0, or something behind the last row'),
    ({'counts': {1: 0}}, 'level 0: no row'), ({'counts': {24: -1}}, 'level 1: no row'),
    ({'counts': {32: 0}}, 'level 2: no row, a count below 0, or something behind the last row'),
    ({'documents': {0: 1}}, 'level 0: a row above the words without its document, or a word with one'),
    ({'documents': {24: 0}}, 'level 1: a row above')])
def test_check_finds_broken_records(record, change, words):
  tf = pipeline.tensorflow()

  def serialized(fields):
    raw = lambda v: v if isinstance(v, bytes) else v.tobytes()
    feature = lambda v: tf.train.Feature(bytes_list=tf.train.BytesList(value=[raw(v)]))
    return tf.train.Example(features=tf.train.Features(feature={k: feature(v) for k, v in fields.items()}
                                                       )).SerializeToString()
  assert books.check(serialized(record)) == '' and 'not a record' in books.check(b'x')
  assert 'not a record' in books.check(serialized(record | {'counts': b'123'}))
  broken = dict(record)
  for key, new in change.items():
    broken[key] = record[key].copy() if isinstance(new, dict) else np.array(new, np.int32)
    for at, value in new.items() if isinstance(new, dict) else ():
      broken[key][at] = value
  found = books.check(serialized(broken))
  assert words in found and found.startswith('writing A 0')


def test_verify_finds_a_changed_byte(raw, tmp_path, capsys):
  assert make(capsys, raw, tmp_path / 'out', '--shards=1', '--joined')[0] == 0
  assert prepare.main(['prepare', 'verify', str(tmp_path / 'out')]) == 0 and 'all good' in capsys.readouterr().out
  folder = inside(tmp_path / 'out')
  path = os.path.join(folder, min(prepared.manifest(folder)['splits']['train']['shards']))
  with open(path, 'r+b') as f:
    f.seek(600)
    byte, = f.read(1)
    f.seek(600)
    f.write(bytes([byte ^ 1]))
  assert prepare.main(['prepare', 'verify', str(tmp_path / 'out')]) == 3
  assert f'{path}#0: its checksum is wrong' in capsys.readouterr().out


# the source

def test_examples(folder):
  found = examples(books.source(folder, 'validation', **SIZES), size=2, train=False)
  packed = [pack for pack, _ in records(folder, 'validation', **SIZES)]
  for key in ('ids', 'counts', 'documents'):
    for level in range(3):
      assert np.array_equal(found[f'{key}_{level}'], [getattr(p, key)[level] for p in packed])
  count = len(packed)
  assert count > 2 and found['number'].tolist() == [[0, n] for n in range(count)]
  assert {k: (v.dtype.name, v.shape[1:]) for k, v in found.items()} == {
      **{f'ids_{i}': ('int32', s) for i, s in enumerate([(24, 8), (8, 6), (4, 4)])},
      **{f'{k}_{i}': ('int32', (u,)) for k in ('counts', 'documents') for i, u in enumerate((24, 8, 4))},
      'number': ('uint32', (2,)), 'mask': ('float32', ()), 'record': ('int32', ())}
  later = examples(books.source(folder, 'train', **SIZES), size=4, count=4, seed=(1 << 32) + 7, start=1 << 31)
  assert later['number'].tolist() == [[7, (1 << 33) + n & 0xffffffff] for n in range(4)]


def test_source_says_what_is_there(folder, tmp_path, monkeypatch):
  with pytest.raises(DataError, match="no split 'test'; there are train, validation"):
    books.source(folder, 'test', **SIZES)
  with pytest.raises(DataError, match='no packs of text there. Prepare them with .*prepare books --raw_dir=TEXTS '
                                      '--out_dir=OUT --rows=24,8,4 --lengths=8,6,4'):
    books.source(str(tmp_path), 'train', **SIZES)
  with pytest.raises(DataError, match='packs of rows 24,8,4 and lengths 8,6,4; wanted are rows 24,9,4 and lengths 8,6,4'
                                      '. Prepare such with .* --rows=24,9,4 --lengths=8,6,4'):
    books.source(folder, 'train', rows=(24, 9, 4), lengths=SIZES['lengths'])
  with pytest.raises(DataError, match='wanted are rows 24,8,4 and lengths 8,6,3'):
    books.source(folder, 'train', rows=[24, 8, 4], lengths=[8, 6, 3])
  assert books.source(os.path.dirname(os.path.dirname(folder)), 'train', **SIZES).size > 5
  monkeypatch.setattr(prepared, 'manifest', lambda path: {'dataset': 'mnist'})
  with pytest.raises(DataError, match="a data set of 'mnist'; expected one prepared as books"):
    books.source(folder, 'train', **SIZES)


def test_packs_may_hold_so_many_nodes(raw, folder, tmp_path):
  made, report = books.prepare(raw, str(tmp_path), nodes=(20, 6), **SIZES)
  most = [facts['most_nodes'] for facts in report['splits'].values()]
  assert all(1 <= words <= 20 and 1 <= sentences <= 6 for words, sentences in most)
  for nodes in (20, 6), (30, 6), ():
    assert books.source(made, 'train', nodes=nodes, **SIZES).size == report['splits']['train']['packs']
  for where, nodes, told in ((made, (19, 6), 'packs of nodes 20,6; wanted are nodes 19,6. Prepare such with .* '
                              '--lengths=8,6,4 --nodes=19,6'), (folder, (20, 6), 'packs of any number of nodes')):
    with pytest.raises(DataError, match=told):
      books.source(where, 'train', nodes=nodes, **SIZES)


def test_sample_and_templates(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  sizes = {'rows': (160, 32, 12), 'lengths': (12, 12, 4)}
  for name, make_it in (('sample', books.sample), ('templates', books.templates)):
    source, made = books.source(name, 'validation', **sizes), make_it(**sizes)
    assert os.path.dirname(source.read[0]) == made == make_it([160, 32, 12], [12, 12, 4])
    assert made.startswith(str(tmp_path)) and not list(prepared.problems(made, books.check))
    report = prepared.manifest(made)['report']['splits']
    assert report['train']['packs'] == books.source(name, 'train', **sizes).size > 200
  assert report['train']['writings'] == 3000 and report['validation']['writings'] == 150
  found = [t for pack, _ in records(made, 'validation', **sizes) for t in books.texts(pack.ids, pack.counts)]
  assert found == templates.documents(150, 1)
  with pytest.raises(DataError, match='--rows, --lengths and --nodes: rows .2, 1, 1.: level 1 needs at least 3'):
    books.source('templates', 'train', rows=(2, 1, 1), lengths=(12, 12, 4))


# statistics and the command line

def test_statistics(tmp_path, capsys):
  texts = [BOOK.encode(), b'a  bb.', b' \n']
  found = books.statistics(books_raw.Writing('', t, 'train', '', 1) for t in texts)
  # words: The title / Chapter 1 / One. Two. Three. Chapter 2 / "A cat\n" sat. / a, an empty one, bb.
  sizes = [3, 5, 7, 1, 4, 4, 6, 7, 1, 1, 4, 4, 1, 0, 3]
  assert found['word'] == {'nodes': 15, 'bytes': {'mean': 3.4, 'p50': 4, 'p90': 7, 'p99': 7, 'max': 7}}
  assert sum(sizes) / len(sizes) == 3.4 and sorted(sizes)[7] == 4 and sorted(sizes)[13] == 7
  assert found['sentence'] == {'nodes': 9, 'children': {'mean': 1.67, 'p50': 2, 'p90': 3, 'p99': 3, 'max': 3}}
  assert found['paragraph'] == {'nodes': 7, 'children': {'mean': 1.29, 'p50': 1, 'p90': 2, 'p99': 2, 'max': 2}}
  assert found['chapter'] == {'nodes': 4, 'children': {'mean': 1.75, 'p50': 1, 'p90': 3, 'p99': 3, 'max': 3}}
  assert found['book'] == {'nodes': 2, 'children': {'mean': 2.0, 'p50': 1, 'p90': 3, 'p99': 3, 'max': 3}}
  raw = save(tmp_path / 'raw', {'a.txt': texts[0], 'b.jsonl': [{'text': t.decode()} for t in texts[1:]]})
  assert prepare.main(['prepare', 'statistics', raw]) == 0
  assert json.loads(capsys.readouterr().out) == found and os.listdir(tmp_path) == ['raw']
  code, report = make(capsys, raw, tmp_path / 'out', '--whole')
  assert code == 0 and report['statistics'] == found
  assert books.statistics([]) == {}


@pytest.mark.parametrize('flags, code, words', [
    (['--rows=24,x,4'], 2, '--rows=24,x,4: expected positive integers, such as --rows=160,32,12'),
    (['--rows=24,0,4'], 2, '--rows=24,0,4: expected'), (['--lengths='], 2, '--lengths=: expected'),
    (['--lengths=8,6.5,4'], 2, '--lengths=8,6.5,4: expected'), (['--rows=24,8'], 3, '--lengths and --nodes: rows (24'),
    (['--rows=24,8,4,2,2,2', '--lengths=2,2,2,2,2,2'], 3, '--lengths and --nodes: 6 levels; there are 5: word, sent'),
    (['--lengths=8,1,4'], 3, '--nodes: rows'), (['--nodes=20,0'], 2, '--nodes=20,0: expected'),
    (['--nodes=20'], 3, 'nodes (20,): expected 2'), (['--rows=5,5,4'], 3, 'level 0 needs at least 15'),
    (['--outliers=refuse'], 2, '--outliers=refuse'), (['--longest_word=0'], 2, '--longest_word=0'),
    (['--most_control=2'], 2, '--most_control=2'), (['--side=3'], 2, 'books takes no --side; it takes --rows, --len')])
def test_options_that_cannot_be_are_named(raw, tmp_path, capsys, flags, code, words):
  found, err = make(capsys, raw, tmp_path / 'out', *flags)
  assert found == code and err.count('\n') == 1 and words in err, err


def test_statistics_takes_one_folder(tmp_path, capsys):
  for words, code, said in (([], 2, 'one file or folder'), (['a', 'b'], 2, 'one file or folder'),
                            (['a', '--whole'], 2, 'statistics takes no --whole'),
                            ([str(tmp_path)], 3, 'no text there')):
    assert prepare.main(['prepare', 'statistics', *words]) == code
    assert said in capsys.readouterr().err


# published texts

@shared
def test_published_texts():
  counts = {name: len(list(books_raw.read(os.path.join(SHARED, name)))) for name in (
      'books', 'songs/cowboy_songs.jsonl', 'songs/cowboy_songs.txt', 'wiki')}
  assert list(counts.values()) == [279, 145, 145, 88]
  found = {w.name: w for w in books_raw.read(os.path.join(SHARED, 'wiki'))}
  assert found['Anarchism'].text.startswith(b'Anarchism\n\nAnarchism is a political philosophy')
  assert {w.split for w in found.values()} == {'train', 'validation'}
  sizes = books.statistics(books_raw.read(os.path.join(SHARED, 'songs', 'cowboy_songs.jsonl')))
  assert 6 < sizes['sentence']['children']['mean'] < 9 and sizes['paragraph']['children']['p50'] == 4
