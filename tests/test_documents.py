"""Text files to documents: headings, splits by name and by hash, odd and broken files."""

import collections
import json
import os
import re

import numpy as np
import pytest
from data_pipelines import corpus, documents, prepare

from tests.conftest import ROOT

SHARED = os.path.join(ROOT, '..', 'shared', 'data', 'language')


def texts(count, seed=0):
  """Documents of some words each."""
  draw = np.random.default_rng(seed)
  words = ['the', 'cat', 'sat', 'on', 'a', 'mat.', 'Dogs', 'ran,', 'away!', 'naïve', 'quietly']
  return [f'{i} ' + ' '.join(draw.choice(words, draw.integers(5, 60))) for i in range(count)]


def save(root, **files):
  """Files of a folder, name__ext=content; a list becomes JSON lines."""
  root.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    if isinstance(content, list):
      content = ''.join(json.dumps({'text': t}) + '\n' for t in content)
    path = root / name.replace('__', '.')
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
  return str(root)


def read(root):
  return [(d.text, d.split) for d in documents.read(str(root))]


def test_headings_of_level_1_begin_documents(tmp_path):
  wiki = (' \n = One = \n \n text \n = not one = \n = = Part = = \n \n = 1 = \n more \n \n = Two = Two = \n \n'
          ' = = = P = = = \n')
  save(tmp_path, wiki__txt=wiki, plain__txt='no = heading\n== at ==\n', book__raw='= Title =\n\nChapter 1\n')
  found = [t for t, _ in read(tmp_path)]
  assert found[:2] == ['= Title =\n\nChapter 1\n', 'no = heading\n== at ==\n']
  assert ''.join(found[2:]) == wiki
  assert [t.strip().split('\n')[0].strip() for t in found[2:]] == ['= One =', '= 1 =', '= Two = Two =']


@pytest.mark.skipif(not os.path.exists(SHARED), reason='the texts in ../shared/data are not there')
def test_published_texts_have_their_documents():
  counts = {name: len(list(documents.read(os.path.join(SHARED, name)))) for name in (
      'wikitext-2/valid.txt', 'wikitext-2/test.txt', 'wiki_articles', 'books', 'speeches', 'tinyshakespeare')}
  assert list(counts.values()) == [60, 60, 8, 4, 124, 1]


def test_splits_hang_on_the_text_whatever_the_file(tmp_path):
  whole = texts(300)
  save(tmp_path / 'a', z__jsonl=whole)
  save(tmp_path / 'b' / 'deep', a__jsonl=whole[200:][::-1])
  save(tmp_path / 'b', q__jsonl=whole[:200], **{f'x{i}__txt': t for i, t in enumerate(texts(5, 1))})
  one, two = dict(read(tmp_path / 'a')), dict(read(tmp_path / 'b'))
  assert all(two[t] == split for t, split in one.items())
  counts = collections.Counter(one.values())
  assert 220 < counts['train'] < 260 and counts['validation'] > 15 and counts['test'] > 15
  assert [documents.by_hash(t) for t in 'ad'] == ['train', 'test']        # for good


@pytest.mark.parametrize('path, split', [
    ('train.txt', 'train'), ('wiki.valid.tokens', 'validation'), ('val/a.txt', 'validation'), ('Test-01.jsonl', 'test'),
    ('validation/train.txt', 'train'), ('test/b/c.txt', 'test'), ('trainspotting.txt', ''), ('testament/a.txt', ''),
    ('valley.txt', ''), ('my-train.txt', ''), ('train2/x.raw', 'train')])
def test_names_of_splits(tmp_path, path, split):
  save((tmp_path / path).parent, **{os.path.basename(path): '{"text": "a"}'})
  (_, found), = documents.files(str(tmp_path))[0].items()
  assert found == split


def test_odd_texts_are_read_as_they_are(tmp_path):
  long = 'x' * 100_000 + ' ' + 'word ' * 200_000
  save(tmp_path, a__txt=b'\xef\xbb\xbfbom\r\nline\rsame\n', b__txt=b'nul\0 \x1c [MASK]', c__txt=long, d__txt='')
  save(tmp_path, e__txt=' \n\t')
  save(tmp_path, f__jsonl=b'\xef\xbb\xbf{"text": "a\\u0000\\ud83d\\ude00", "id": 1}\r\n\n{"text": ""}\n{"text": "z"}')
  found = [t for t, _ in read(tmp_path)]
  assert found == ['bom\nline\rsame\n', 'nul\0 \x1c [MASK]', long, '', ' \n\t', 'a\0😀', '', 'z']


@pytest.mark.parametrize('files, words', [
    ({'a__txt': b'ok\nab\xffc'}, r'a.txt:2: byte 5 \(0xff\) is not UTF-8'),
    ({'a__txt': b'\xc3'}, 'a.txt:1: byte 0 .0xc3'), ({'a__txt': 'hi'.encode('utf-16')}, 'a.txt:1: .*UTF-16'),
    ({'a__jsonl': b'{"text": "a"}\n{"text": "\xe9"}'}, 'a.jsonl:2: byte'), ({'a__jsonl': '["a"]'}, 'a.jsonl:1: '),
    ({'a__jsonl': '{"text": "a"}\n{"text": "b"'}, "a.jsonl:2: expected an object .*found '{"),
    ({'a__jsonl': '{"txt": "a"}'}, 'a.jsonl:1: '), ({'a__jsonl': '{"text": null}'}, 'a.jsonl:1: '),
    ({'a__jsonl': '\n"text"'}, 'a.jsonl:2: '), ({'a__jsonl': '[' * 100_000}, 'a.jsonl:1: expected'),
    ({'a__jsonl': '{"text": 5}'}, 'a.jsonl:1: '), ({'a__jsonl': '{"text": "\\ud800"}'}, 'a.jsonl:1: .*surrogate'),
    ({'a__csv': 'x'}, 'no text there; expected .txt'), ({'a__txt': ''}, 'no document but empty ones'),
    ({'a__txt': 'd'}, 'none of its 1 documents is in the split train'),
    ({'train__txt': 'same', 'valid__txt': 'same'}, r'train.txt:1 \(train\) and .*valid.txt:1 \(validation\) hold the'),
    ({'test__txt': 'a', 'x__jsonl': ['a', 'b']}, r'test.txt:1 \(test\) and .*x.jsonl:1 \(train\)'),
    ({'valid__txt': 'a b c'}, 'no documents in train to train a tokenizer on'),
    ({'train__txt': ' ', 'valid__txt': 'a b'}, 'none of its 1 documents is in the split train')])
def test_broken_texts_are_named(tmp_path, capsys, files, words):
  raw = save(tmp_path / 'raw', **files)
  code = prepare.main(['prepare', 'corpus', f'--raw_dir={raw}', f'--out_dir={tmp_path}/out', '--tokenizer=wordpiece'])
  err = capsys.readouterr().err
  assert re.search(words, err), err
  assert code == 3 and raw in err and err.count('\n') == 1 and not (tmp_path / 'out' / corpus.NAME).exists()
