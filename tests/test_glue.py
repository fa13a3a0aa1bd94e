"""CoLA and SST-2: the published files, odd and broken ones, labels by name, the stand-ins from the sample."""

import os
import re

import numpy as np
import pyarrow
import pytest
from data_pipelines import DataError, corpus, glue, pipeline, prepare, prepared, sentences, tokens
from pyarrow import parquet

from tests.conftest import ROOT
from tests.test_corpus import examples

SHARED = os.path.join(ROOT, '..', 'shared', 'data', 'language')
shared = pytest.mark.skipif(not os.path.exists(SHARED), reason='the data sets in ../shared/data are not there')
COLA = {'in_domain_train.tsv': 'a\t1\t\tGood one.\na\t0\t*\tBad the one.\n',
        'in_domain_dev.tsv': 'b\t1\t\tFine.\nb\t1\t\tMore.\n', 'out_of_domain_dev.tsv': 'c\t0\t*\tBad it is "so.\n'}
SST2 = {'train.tsv': 'sentence\tlabel\n' + ''.join(f'phrase {i} \t{i % 2}\n' for i in range(40)),
        'dev.tsv': 'sentence\tlabel\ngood \t1\n'}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """The path of a small one; every letter is there."""
  path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.json'
  text = ' '.join(map(chr, range(33, 127))) + ' ' + ' '.join('a' + chr(i) for i in range(97, 123))
  tokens.train([text] * 3 + ['good bad one é'], 'wordpiece', 400).save(path)
  return str(path)


def save(root, files):
  root.mkdir(exist_ok=True)
  for name, content in files.items():
    (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
  return str(root)


def rows(folder, split):
  """(text, label, row, ids) of each record of a prepared folder, which is checked on the way."""
  assert not list(prepared.problems(folder, glue.check))
  tf, shards = pipeline.tensorflow(), prepared.manifest(folder)['splits'][split]['shards']
  read = tf.data.TFRecordDataset([os.path.join(folder, n) for n in sorted(shards)]).map(glue.decode)
  return [(r['text'].decode(), int(r['label']), int(r['row']), r['ids'].tolist()) for r in read.as_numpy_iterator()]


def short(folder, split):
  return [row[:3] for row in rows(folder, split)]


def make(capsys, task, raw, out, tokenizer):
  code = prepare.main(['prepare', task, f'--raw_dir={raw}', f'--out_dir={out}', f'--tokenizer={tokenizer}'])
  err = ''.join(line for line in capsys.readouterr().err.splitlines(True) if ' s left' not in line)
  return code, os.path.join(out, f'{task}_sentences', glue.VERSION), err


# raw files

def test_cola_files_are_splits(tmp_path, capsys, tokenizer):
  raw = save(tmp_path / 'raw', COLA)
  code, folder, _ = make(capsys, 'cola', raw, tmp_path / 'out', tokenizer)
  assert code == 0
  assert short(folder, 'train') == [('Good one.', 1, 1), ('Bad the one.', 0, 2)]
  assert short(folder, 'validation') == [('Fine.', 1, 1), ('More.', 1, 2)]
  assert short(folder, 'test') == [('Bad it is "so.', 0, 1)]
  assert short(folder, 'dev') == [('Fine.', 1, 1), ('More.', 1, 2), ('Bad it is "so.', 0, 3)]
  chosen = tokens.load(tokenizer)
  assert rows(folder, 'train')[0][3] == chosen.encode(['Good one.'])[0].tolist()
  assert glue.labels(folder) == glue.labels(str(tmp_path / 'out')) == ('unacceptable', 'acceptable')
  assert glue.tokenizer(folder).fingerprint == chosen.fingerprint
  assert prepare.main(['prepare', 'verify', str(tmp_path / 'out')]) == 0


def test_sst2_is_divided_by_its_sentences(tmp_path, capsys, tokenizer):
  raw = save(tmp_path / 'raw', SST2)
  _, folder, _ = make(capsys, 'sst2', raw, tmp_path / 'out', tokenizer)
  train, held_out = short(folder, 'train'), short(folder, 'validation')
  assert sorted(train + held_out, key=lambda r: r[2]) == [(f'phrase {i}', i % 2, i + 2) for i in range(40)]
  assert 0 < len(held_out) < 12 and short(folder, 'dev') == [('good', 1, 2)]
  assert glue.labels(folder) == ('negative', 'positive')
  lines = SST2['train.tsv'].splitlines(True)
  other = {**SST2, 'train.tsv': ''.join(lines[:1] + lines[1:][::-1])}
  _, again, _ = make(capsys, 'sst2', save(tmp_path / 'other', other), tmp_path / 'again', tokenizer)
  assert {r[0] for r in short(again, 'validation')} == {r[0] for r in held_out}


@pytest.mark.parametrize('change', [
    lambda d: d.replace(b'\n', b'\r\n'), lambda d: b'\xef\xbb\xbf' + d, lambda d: d.rstrip(b'\n'),
    lambda d: b'\n'.join(b'\t'.join([b'7', *line.split(b'\t')[::-1]]) if line else b'' for line in d.split(b'\n')
                         ).replace(b'7\tlabel', b'idx\tlabel')])
def test_other_line_ends_marks_and_columns_change_nothing(tmp_path, capsys, tokenizer, change):
  raw = save(tmp_path / 'raw', {name: change(content.encode()) for name, content in SST2.items()})
  _, folder, _ = make(capsys, 'sst2', raw, tmp_path / 'out', tokenizer)
  found = short(folder, 'train') + short(folder, 'validation')
  assert sorted(found, key=lambda r: r[2]) == [(f'phrase {i}', i % 2, i + 2) for i in range(40)]


def test_quotes_are_characters(tmp_path, capsys, tokenizer):
  odd = '"Open only, \'\'two\'\' "" ends"" \\" \\t " é'
  raw = save(tmp_path / 'raw', {**COLA, 'in_domain_train.tsv': f'a\t1\t\t{odd}\n"b\t0\t"\t"Next."\n'})
  _, folder, _ = make(capsys, 'cola', raw, tmp_path / 'out', tokenizer)
  assert short(folder, 'train') == [(odd, 1, 1), ('"Next."', 0, 2)]


def test_parquet(tmp_path, capsys, tokenizer):
  table = {'idx': [7, 8, 9], 'label': [0, 1, 1], 'sentence': ['bad ', ' good "one', 'é']}
  for name in ('train-00000-of-00001.parquet', 'validation.parquet'):
    (tmp_path / 'raw').mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table(table), tmp_path / 'raw' / name)
  code, folder, err = make(capsys, 'sst2', tmp_path / 'raw', tmp_path / 'out', tokenizer)
  assert code == 0, err
  assert short(folder, 'dev') == [('bad', 0, 1), ('good "one', 1, 2), ('é', 1, 3)]


@pytest.mark.parametrize('table, words', [
    (b'no parquet', 'no Parquet file, or a broken one'), (b'', 'no Parquet file'),
    ({'text': ['a']}, 'the columns text; expected sentence and label'),
    ({'sentence': ['a', 'b'], 'label': [1, 2]}, "row 2: the label '2', expected 0 or 1"),
    ({'sentence': ['a', None], 'label': [1, 1]}, 'row 2: the sentence is None'),
    ({'sentence': ['a'], 'label': [None]}, "row 1: the label 'None'"),
    ({'sentence': [3], 'label': [1]}, 'row 1: the sentence is 3'), ({'sentence': [b'a'], 'label': [1]}, 'is b.a.'),
    ({'sentence': ['a'], 'label': [0.5]}, "row 1: the label '0.5'"),
    ({'sentence': ['a', 'b', ' '], 'label': [0, 1, 1]}, 'row 3: the sentence is empty')])
def test_broken_parquet_is_named(tmp_path, capsys, tokenizer, table, words):
  raw = save(tmp_path / 'raw', {'train.tsv': SST2['train.tsv']})
  path = tmp_path / 'raw' / 'dev.parquet'
  if isinstance(table, bytes):
    path.write_bytes(table)
  else:
    parquet.write_table(pyarrow.table(table), path)
  code, _, err = make(capsys, 'sst2', raw, tmp_path / 'out', tokenizer)
  assert code == 3 and str(path) in err and err.count('\n') == 1, err
  assert re.search(words, err), err


TRAIN = COLA['in_domain_train.tsv']


@pytest.mark.parametrize('name, content, words', [
    ('in_domain_train.tsv', TRAIN + 'a\t2\t\tX.\n', "train.tsv:3: the label '2', expected 0 or 1"),
    ('in_domain_train.tsv', TRAIN + 'a\t-1\t\tX.\n', 'GLUE keeps the labels of its test files'),
    ('in_domain_train.tsv', TRAIN + 'a\t1\tX.\n', 'train.tsv:3: 3 columns, expected 4: source, label'),
    ('in_domain_train.tsv', TRAIN + 'a\t1\t\tX\tY.\n', 'train.tsv:3: 5 columns'),
    ('in_domain_train.tsv', TRAIN + '\n' + TRAIN, 'train.tsv:3: 1 columns'),
    ('in_domain_train.tsv', TRAIN + 'a\t1\t\t \n', 'train.tsv:3: the sentence is empty'),
    ('in_domain_train.tsv', TRAIN + 'a\t1\t\tX\0.\n', 'train.tsv:3: a NUL character'),
    ('in_domain_train.tsv', TRAIN.encode() + b'a\t1\t\t\xe9.\n', r'train.tsv:3: byte 39 \(0xe9\) is not UTF-8'),
    ('in_domain_train.tsv', TRAIN.encode('utf-16'), 'train.tsv:1: .*UTF-16'),
    ('in_domain_train.tsv', TRAIN + 'a\t1\t\t\u200b\n', "train.tsv:3: the sentence '\\\\u200b' has no token"),
    ('in_domain_train.tsv', 'a\t1\t\tX.\na\t1\t\tY.\n', 'train.tsv:1: the sentences of train are all of one class'),
    ('in_domain_train.tsv', '', 'all of one class, or there are none'),
    ('out_of_domain_dev.tsv', None, 'out_of_domain_dev.tsv: missing; expected the files of CoLA')])
def test_broken_cola_is_named(tmp_path, capsys, tokenizer, name, content, words):
  raw = save(tmp_path / 'raw', {**COLA, name: content or ''})
  if content is None:
    os.remove(os.path.join(raw, name))
  code, folder, err = make(capsys, 'cola', raw, tmp_path / 'out', tokenizer)
  assert code == 3 and (raw in err or not content) and err.count('\n') == 1 and not os.path.exists(folder), err
  assert re.search(words, err), err


@pytest.mark.parametrize('files, words', [
    ({'train.tsv': 'phrase 1 \t1\n'}, 'train.tsv:1: a header with sentence and label was expected'),
    ({'train.tsv': 'sentence\tlabel\ta\ngood \t1\n'}, 'train.tsv:2: 2 columns, expected 3: sentence, label, a'),
    ({'dev.tsv': 'index\tsentence\n0\tgood\n'}, 'dev.tsv:1: a header'),
    ({'dev.tsv': None}, 'none of dev.tsv, dev.parquet, .*validation.parquet')])
def test_broken_sst2_is_named(tmp_path, capsys, tokenizer, files, words):
  raw = save(tmp_path / 'raw', {k: v for k, v in {**SST2, **files}.items() if v is not None})
  code, _, err = make(capsys, 'sst2', raw, tmp_path / 'out', tokenizer)
  assert code == 3 and raw in err and err.count('\n') == 1, err
  assert re.search(words, err), err


@shared
def test_published_files():
  """Counts as CoLA's and GLUE's authors state them."""
  for task, counts in (('cola', {'train': 8551, 'validation': 527, 'test': 516, 'dev': 1043}),
                       ('sst2', {'train': 60734, 'validation': 6615, 'dev': 872})):
    splits = {'cola': glue._cola, 'sst2': glue._sst2}[task](os.path.join(SHARED, task))[0]
    assert {k: len(v) for k, v in splits.items()} == counts
    if task == 'cola':
      assert [sum(r.label for r in splits[k]) for k in ('train', 'validation', 'test')] == [6023, 365, 354]
      assert splits['dev'][527].number == 528 and sum('"' in r.text for r in splits['train']) > 0
    else:
      assert sum(r.label for k in ('train', 'validation') for r in splits[k]) == 37569
      table = list(glue._parquet(os.path.join(SHARED, 'sst2', 'validation.parquet')))
      assert [r[:2] for r in table] == [r[:2] for r in splits['dev']]


def test_names_of_tfds(tmp_path, capsys, tokenizer, monkeypatch):
  import tensorflow_datasets as tfds
  monkeypatch.setattr(tfds.core.constants, 'DATA_DIR', str(tmp_path))

  def missing(*args, **kwargs):
    raise AssertionError('not prepared')
  monkeypatch.setattr(tfds, 'load', missing)
  code, _, err = make(capsys, 'cola', 'glue/cola', tmp_path / 'out', tokenizer)
  assert code == 3 and "or run tfds.load('glue/cola') where there is a network" in err and err.count('\n') == 1
  assert make(capsys, 'cola', 'glue/sst2', tmp_path / 'out', tokenizer)[0] == 3

  def load(name, split, download):
    tf = pipeline.tensorflow()
    assert name == 'glue/sst2' and not download
    return {k: tf.data.Dataset.from_tensor_slices({
        'sentence': [f'phrase {i} ' for i in range(20)], 'label': np.arange(20) % 2,
        'idx': np.arange(20, dtype=np.int32)[::-1]}) for k in split}
  monkeypatch.setattr(tfds, 'load', load)
  code, folder, err = make(capsys, 'sst2', 'glue/sst2', tmp_path / 'out', tokenizer)
  assert code == 0, err
  assert short(folder, 'dev') == [(f'phrase {19 - i}', (19 - i) % 2, i + 1) for i in range(20)]


def test_tokenizers_that_are_named(tmp_path, capsys, tokenizer):
  raw = save(tmp_path / 'raw', COLA)
  text = save(tmp_path / 'text', {'train.txt': 'some text'})
  folder, _ = corpus.prepare(text, str(tmp_path / 'corpus'), tokenizer=tokenizer, length=8)
  for i, path in enumerate((folder, tmp_path / 'corpus')):
    _, made, _ = make(capsys, 'cola', raw, tmp_path / str(i), path)
    assert glue.tokenizer(made).fingerprint == tokens.load(tokenizer).fingerprint
  assert make(capsys, 'cola', raw, tmp_path / '1', tokenizer)[0] == 0               # the same one: the same folder
  tokens.train(['Good one.'], 'chars', 99).save(tmp_path / 'chars.json')
  code, _, err = make(capsys, 'cola', raw, tmp_path / '2', tmp_path / 'chars.json')
  assert code == 3 and "in_domain_train.tsv:2: the character 'B'" in err
  code, _, err = make(capsys, 'cola', raw, tmp_path / '2', tmp_path / 'none')
  assert code == 3 and 'none: no such file' in err


# the source

@pytest.fixture(scope='module')
def cola(tmp_path_factory, tokenizer):
  root = tmp_path_factory.mktemp('cola')
  return glue.prepare(save(root / 'raw', COLA), str(root), task='cola', tokenizer=tokenizer)[0]


def test_examples_of_a_wordpiece(cola):
  t = glue.tokenizer(cola)
  ids = [r[3] for r in rows(cola, 'dev')]
  size = max(map(len, ids)) + 1                    # one too short for the longest
  found = examples(glue.source(cola, 'dev', length=size), size=3, train=False)
  for i, (row, real) in enumerate(zip(found['ids'], ids)):
    wanted = [t.cls, *real[:size - 2], t.sep]
    assert row.tolist() == wanted + [t.pad] * (size - len(wanted))
    assert found['segments'][i].tolist() == [1] * len(wanted) + [0] * (size - len(wanted))
  assert found['truncated'].tolist() == [int(len(r) > size - 2) for r in ids] and found['truncated'].sum() == 1
  assert found['label'].tolist() == [1, 1, 0] and found['row'].tolist() == [1, 2, 3]
  assert {k: (v.dtype.name, v.ndim) for k, v in found.items()} == {
      'ids': ('int32', 2), 'segments': ('int32', 2), 'label': ('int32', 1), 'row': ('int32', 1),
      'truncated': ('int32', 1), 'mask': ('float32', 1), 'record': ('int32', 1)}


@pytest.mark.parametrize('kind, end', [('bpe', [0]), ('chars', [])])
def test_examples_of_other_tokenizers(tmp_path, kind, end):
  tokens.train(list(COLA.values()), kind, 300).save(tmp_path / 'tokenizer.json')
  folder, _ = glue.prepare(save(tmp_path / 'raw', COLA), str(tmp_path), task='cola', tokenizer=str(tmp_path))
  ids = rows(folder, 'train')[0][3]
  row, = examples(glue.source(folder, 'train', length=40), size=2, train=False)['ids'][:1]
  assert row.tolist() == ids + end + [0] * (40 - len(ids + end))
  found = examples(glue.source(folder, 'train', length=5), size=2, train=False)
  assert found['ids'][0].tolist() == ids[:5 - len(end)] + end and found['truncated'].tolist() == [1, 1]


def test_labels_go_by_name(cola):
  for names, wanted in (((), [1, 1, 0]), (('acceptable', 'unacceptable'), [0, 0, 1]),
                        (('unsure', 'unacceptable', 'acceptable'), [2, 2, 1])):
    found = examples(glue.source(cola, 'dev', length=16, labels=names), size=3, train=False)
    assert found['label'].tolist() == wanted
  with pytest.raises(DataError, match='data are unacceptable, acceptable, those of the model LABEL_0, LABEL_1'):
    glue.source(cola, 'dev', length=16, labels=('LABEL_0', 'LABEL_1'))


def test_source_says_what_is_there(cola, tmp_path, capsys, tokenizer):
  with pytest.raises(DataError, match="no split 'val'; there are dev, test, train, validation"):
    glue.source(cola, 'val', length=16)
  with pytest.raises(DataError, match='no prepared sentences there. Prepare them with .*prepare cola'):
    glue.source(str(tmp_path), 'dev', length=16)
  make(capsys, 'cola', save(tmp_path / 'raw', COLA), tmp_path, tokenizer)
  make(capsys, 'sst2', save(tmp_path / 'raw', SST2), tmp_path, tokenizer)
  with pytest.raises(DataError, match='two data sets, .*cola_sentences.* and .*sst2_sentences'):
    glue.source(str(tmp_path), 'dev', length=16)
  assert glue.source(str(tmp_path / 'sst2_sentences' / glue.VERSION), 'dev', length=16).size == 1


def test_several_splits_are_read_as_one(cola):
  both = glue.source(cola, 'validation+test', length=16)
  parts = [examples(glue.source(cola, name, length=16), size=3, train=False) for name in ('validation', 'test')]
  sizes = [int(p['mask'].sum()) for p in parts]
  found = examples(both, size=sum(sizes), train=False)
  assert both.size == sum(sizes) == 3
  assert found['ids'].tolist() == [row for p, n in zip(parts, sizes) for row in p['ids'][:n].tolist()]
  assert glue.source(cola, 'test+test', length=16).size == sizes[1]
  with pytest.raises(DataError, match="no split 'val'; there are dev"):
    glue.source(cola, 'train+val', length=16)


# the sample

@pytest.mark.parametrize('task, names', [('cola', ('unacceptable', 'acceptable')), ('sst2', ('stoker', 'shakespeare'))])
def test_sample(tmp_path, monkeypatch, tokenizer, task, names):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  folder, _ = corpus.prepare(save(tmp_path / 'text', {'train.txt': 'some text'}), str(tmp_path), tokenizer=tokenizer)
  found = glue.sample(task, folder)
  assert found == glue.sample(task, folder) and found.startswith(str(tmp_path)) and glue.labels(found) == names
  assert glue.tokenizer(found).fingerprint == corpus.tokenizer(folder).fingerprint
  splits = prepared.manifest(found)['splits']
  assert set(splits) == {'train', 'validation', 'dev'} and splits['dev']['records'] > 400
  for entry in splits.values():
    share = entry['facts']['of_each_label'][names[1]] / entry['records']
    assert 0.4 < share < 0.65 and entry['facts']['also_in_train'] == 0
  assert glue.source(found, 'train', length=32).size > 3000


def test_half_of_the_sentences_have_two_words_exchanged():
  _, found = sentences.exchanged(corpus.SAMPLE)
  found = list(found)
  for text, shown, label in found:
    was, now = text.split(), shown.split()
    differ = [i for i, (a, b) in enumerate(zip(was, now)) if a != b]
    assert len(was) in range(5, 21) and sorted(was) == sorted(now)
    assert differ == [] if label else len(differ) == 2 and differ[1] == differ[0] + 1 < len(was) - 1
  assert abs(np.mean([label for *_, label in found]) - 0.5) < 0.03 and len(found) > 4000
  assert found == list(sentences.exchanged(corpus.SAMPLE)[1])
