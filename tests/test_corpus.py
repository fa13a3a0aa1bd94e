"""Text to windows of ids: nothing lost, masks, phases, wide ids, what the source refuses, the sample."""

import collections
import json
import os

import numpy as np
import pytest
from data_pipelines import DataError, corpus, documents, pipeline, prepare, prepared, tokens, windows
from lab import config as core

from tests.test_documents import read, save, texts

MLM = {'pad': 0, 'cls': 1, 'sep': 2, 'mask': 3, 'unk': 4}


def records(folder, split, check=True):
  """The ids of each record of a prepared folder, which is checked on the way."""
  assert not check or not list(prepared.problems(folder, corpus.check))
  tf, shards = pipeline.tensorflow(), prepared.manifest(folder)['splits'][split]['shards']
  read = tf.data.TFRecordDataset([os.path.join(folder, n) for n in sorted(shards)])
  return [r['ids'] for r in read.map(windows.decode).as_numpy_iterator()]


def examples(source, count=None, size=50, train=True, start=0, seed=0):
  """`count` examples of an array each, or one epoch."""
  steps = -(-(count or source.size) // size)
  found = iter(pipeline.Batches(source, core.core().input, size, range(size), train=train, start=start, seed=seed))
  batches = [next(found) for _ in range(steps)]
  real = np.concatenate([b['mask'] for b in batches]) > 0
  return {k: np.concatenate([b[k] for b in batches])[real][:count] for k in batches[0]}


# prepared windows

@pytest.fixture(scope='module')
def raw(tmp_path_factory):
  root = tmp_path_factory.mktemp('raw')
  save(root, a__jsonl=texts(120) + ['', '\0'], notes__md='x')
  return save(root, b__txt='[MASK] [SEP] <|endoftext|> ' + 'x' * 100_000 + '\n' + texts(1, 9)[0])


@pytest.fixture(scope='module')
def mlm(raw, tmp_path_factory):
  return corpus.prepare(raw, str(tmp_path_factory.mktemp('mlm')), tokenizer='wordpiece', vocabulary=150, length=32)


@pytest.fixture(scope='module')
def gpt(raw, tmp_path_factory):
  return corpus.prepare(raw, str(tmp_path_factory.mktemp('gpt')), tokenizer='bpe', vocabulary=300, length=32)


def in_splits(raw):
  found = collections.defaultdict(list)
  for text, split in read(raw):
    if text.strip():
      found[split].append(text)
  return found


def test_masked_windows_carry_the_remainder_on(mlm, raw):
  folder, report = mlm
  tokenizer = corpus.tokenizer(folder)
  assert report['empty_documents'] == 1 and report['other_files'] == ['notes.md']
  for split, whole in in_splits(raw).items():
    stream = []
    for ids in tokenizer.encode(whole):
      stream += ([tokenizer.sep] if stream and len(ids) else []) + ids.tolist()
    found = records(folder, split)
    assert np.concatenate(found).tolist() == stream
    assert {len(r) for r in found[:-1]} == {30} and 0 < len(found[-1]) <= 30
    facts = corpus.facts(folder)['splits'][split]
    assert facts == report['splits'][split] and facts['tokens'] == len(stream) and facts['windows'] == len(found)
    assert facts['bytes'] == sum(len(t.encode()) for t in whole)
    assert facts['documents'] + facts['documents_without_tokens'] == len(whole)
  assert sum(s['documents_without_tokens'] for s in report['splits'].values()) == 1        # the NUL


def test_following_windows_overlap_by_a_length(gpt, raw):
  folder, report = gpt
  tokenizer = corpus.tokenizer(folder)
  for split, whole in in_splits(raw).items():
    stream = [i for ids in tokenizer.encode(whole) for i in (*ids.tolist(), tokenizer.eos)]
    found = records(folder, split)
    assert [r.tolist() for r in found] == [stream[i:i + 65] for i in range(0, len(stream) - 1, 32)]
    assert report['splits'][split]['tokens'] == len(stream)
    assert tokenizer.decode(stream) == ''.join(whole)


def test_facts_and_files_of_a_prepared_folder(mlm, raw, tmp_path, capsys):
  folder, report = mlm
  facts, tokenizer = corpus.facts(folder), tokens.load(folder)
  assert {k: v for k, v in facts.items() if k != 'splits'} == {
      'kind': 'wordpiece', 'vocabulary': tokenizer.size, 'length': 32, 'fingerprint': tokenizer.fingerprint,
      'special': {**MLM, 'eos': -1}}
  argv = ['prepare', 'corpus', f'--raw_dir={raw}', f'--out_dir={tmp_path}', f'--tokenizer={folder}', '--length=32']
  assert prepare.main(argv) == 0 and json.loads(capsys.readouterr().out) == report
  again = os.path.join(tmp_path, corpus.NAME, corpus.VERSION)
  assert prepared.manifest(again) == prepared.manifest(folder)      # the trained tokenizer, named by its path
  assert prepare.main(argv) == 0 and prepare.main([*argv[:-1], '--length=33']) == 3       # another is there
  capsys.readouterr()
  assert prepare.main(['prepare', 'verify', str(tmp_path)]) == 0
  with open(os.path.join(again, tokens.FILE), 'a', encoding='utf-8') as f:
    f.write(' ')
  assert prepare.main(['prepare', 'verify', again]) == 3 and 'tokenizer.json: missing or ch' in capsys.readouterr().out


def test_parts_of_texts_do_not_show(raw, gpt, tmp_path, monkeypatch):
  monkeypatch.setattr(corpus, '_PIECE', 50)
  monkeypatch.setattr(corpus, '_BATCH', 200)
  folder, _ = corpus.prepare(raw, str(tmp_path), tokenizer=gpt[0], length=32)
  assert prepared.manifest(folder)['splits'] == prepared.manifest(gpt[0])['splits']


def test_halves_of_a_text(tmp_path):
  raw = save(tmp_path / 'raw', input__txt='ab\ncd' * 201)
  folder, report = corpus.prepare(os.path.join(raw, 'input.txt'), str(tmp_path), tokenizer='chars', length=8,
                                  parity_split=True)
  assert {k: s['tokens'] for k, s in report['splits'].items()} == {'train': 904, 'validation': 101}
  assert report['vocabulary'] == 5
  assert corpus.tokenizer(folder).decode(records(folder, 'train')[0]) == 'ab\ncdab\ncdab\ncdab'
  for name, content in (('two__jsonl', ['a', 'b']), ('none__jsonl', '')):
    raw = save(tmp_path / name, **{name: content})
    with pytest.raises(DataError, match='--parity_split divides a single one'):
      corpus.prepare(raw, str(tmp_path / 'out'), tokenizer='chars', parity_split=True)


def test_unknown_characters_are_named_with_their_document(tmp_path):
  tokens.train(['abc '], 'chars', 9).save(tmp_path / 'tokenizer.json')
  raw = save(tmp_path / 'raw', train__jsonl=['a b', 'ab d'])
  with pytest.raises(DataError, match=r"train.jsonl: the document of line 2: the character 'd'"):
    corpus.prepare(raw, str(tmp_path / 'out'), tokenizer=str(tmp_path), length=8)
  raw = save(tmp_path / 'other', train__jsonl=['a'], valid__jsonl=['abc'])
  with pytest.raises(DataError, match='too few tokens for a single window'):
    corpus.prepare(raw, str(tmp_path / 'out'), tokenizer=str(tmp_path), length=8)


# ids without text

def test_wide_ids_come_back(tmp_path):
  """C20: ids beyond 16 bits."""
  words = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *(f'w{i}' for i in range(5, 70_000))]
  save(tmp_path / 'v', vocab__txt='\n'.join(words))
  raw = save(tmp_path / 'raw', train__txt='w65535 w65536 w69999')
  folder, report = corpus.prepare(raw, str(tmp_path / 'a'), tokenizer=str(tmp_path / 'v'), length=8)
  assert records(folder, 'train')[0].tolist() == [65535, 65536, 69999] and report['vocabulary'] == 70_000
  assert records(folder, 'train')[0].dtype == np.int32
  import tensorflow_datasets as tfds
  (record,) = tfds.as_numpy(tfds.builder_from_directory(folder).as_dataset(split='train'))
  assert record['ids'].dtype == np.int32 and record['ids'].tolist() == [65535, 65536, 69999] and record['count'] == 3
  found = examples(corpus.source(folder, 'train', 'mlm', length=8), 1)
  assert found['labels'][0, 0] in (65535, 65536, 69999) and found['labels'].dtype == np.int32


@pytest.mark.parametrize('ids, words', [
    ([[5, 99]], 'train, document 0: the id 99 at 1'), ([[5], [6, 7, 2]], 'train, document 1: the id 2 at 2'),
    ([[-1]], 'the id -1'), ([], 'too few tokens'), ([[]], 'too few tokens')])
def test_wrong_ids_are_named(tmp_path, ids, words):
  arrays = [np.array(i, np.int32) for i in ids]
  with pytest.raises(DataError, match=words):
    corpus.write_ids(str(tmp_path), {'train': arrays}, vocabulary=99, length=8, special=MLM)


def made(root, sizes, special, length=16, vocabulary=100, seed=0, split='train'):
  """Documents of random ids, in one split."""
  draw = np.random.default_rng(seed)
  arrays = [draw.integers(10, vocabulary, n, np.int32) for n in sizes]
  return corpus.write_ids(str(root), {split: arrays}, vocabulary=vocabulary, length=length, special=special), arrays


def test_masks_have_the_right_shares(tmp_path):
  """C38: in 10,000 windows 15 % of the tokens are chosen, of those 80 / 10 / 10, and no control token is, or comes."""
  length, draw = 128, np.random.default_rng(1)
  for name, sizes in (('full', [126 * 2500]), ('padded', draw.integers(46, 56, 5000))):
    folder, _ = made(tmp_path / name, sizes, {**MLM, 'mask': 7}, length)
    source = corpus.source(folder, 'train', 'mlm', length=length)
    if name == 'padded':       # a document a window, the rest of it padding: 60 %
      cut = source.decode
      source = source._replace(decode=lambda r, cut=cut: {**(f := cut(r)), 'ids': f['ids'][:50]})
    found = examples(source, 5000, 500)
    real = (found['segments'] > 0) & ~np.isin(original(found), (0, 1, 2))
    total, chosen = real.sum(), int(found['weights'].sum())
    assert abs(chosen / total - 0.15) < 0.003 and found['weights'].sum(1).min() >= 1
    weights, places, labels = found['weights'] > 0, found['places'], found['labels']
    now = np.take_along_axis(found['ids'], places, 1)[weights]
    was = labels[weights]
    assert not np.isin(was, (0, 1, 2, 3, 4, 7)).any() and not np.isin(now, (0, 1, 2, 4)).any() and (was < 100).all()
    assert abs((now == 7).mean() - 0.8) < 0.01 and abs((now == was).mean() - 0.1) < 0.01
    other = now[(now != 7) & (now != was)]
    assert abs(len(other) / chosen - 0.1) < 0.01 and set(other) == set(range(100)) - {0, 1, 2, 4, 7}
    assert not found['ids'][found['segments'] == 0].any() and not np.any([labels[~weights], places[~weights]])


def original(found):
  """The ids before they were masked."""
  ids = found['ids'].copy()
  for row, places, labels, weights in zip(ids, found['places'], found['labels'], found['weights']):
    row[places[weights > 0]] = labels[weights > 0]
  return ids


def test_masked_examples(tmp_path):
  folder, arrays = made(tmp_path, [4, 9, 14 * 3], MLM)
  source = corpus.source(folder, 'train', 'mlm', length=16)
  found = examples(source, train=False)
  stream = [*arrays[0], 2, *arrays[1], 2, *arrays[2]]
  for i, row in enumerate(original(found)):
    inner = [*stream[14 * i:14 * i + 14]]
    assert row.tolist() == [1, *inner, 2] + [0] * (14 - len(inner))
  assert found['places'].shape == found['labels'].shape == (5, 2) and found['weights'].dtype == np.float32
  #                                      cls, 4, sep | 9 | sep of the window       sep of the second | ...
  assert found['segments'][:2].tolist() == [[1] * 6 + [2] * 10, [1] * 2 + [2] * 14]
  assert found['segments'][4].tolist() == [1] * 3 + [0] * 13 and found['weights'][4].tolist() == [1, 0]
  assert (np.diff(found['places'][:4], axis=1) > 0).all()
  together = examples(corpus.source(folder, 'train', 'mlm', length=16, documents='together'), train=False)
  assert (together['segments'] == (found['segments'] > 0)).all() and (together['ids'] == found['ids']).all()
  wide = examples(corpus.source(folder, 'train', 'mlm', length=16, share=0.5), train=False)
  assert wide['places'].shape == (5, 8)


def test_last_sep_belongs_to_the_last_document(tmp_path):
  folder, _ = made(tmp_path, [13, 20], MLM)       # the window ends with the SEP that lies between the documents
  found = examples(corpus.source(folder, 'train', 'mlm', length=16), train=False)
  assert original(found)[0][-2:].tolist() == [2, 2] and found['segments'][0].tolist() == [1] * 16


def test_masks_change_with_the_epoch_and_with_nothing_else(tmp_path):
  folder, _ = made(tmp_path, [14 * 100], MLM)
  source = corpus.source(folder, 'train', 'mlm', length=16)
  assert source.size == 100

  def sorted_(found):
    order = np.argsort(found['record'])
    return {k: v[order] for k, v in found.items()}
  one, again, next_, seed = (sorted_(examples(source, 100, start=start, seed=seed))
                             for start, seed in ((0, 0), (0, 0), (2, 0), (0, 1)))
  assert all((one[k] == again[k]).all() for k in one)
  for other in (next_, seed):
    assert (original(one) == original(other)).all() and (one['places'] != other['places']).any(1).mean() > 0.9
  fixed = [examples(source, train=False) for _ in range(2)]
  assert all((fixed[0][k] == fixed[1][k]).all() for k in fixed[0])


@pytest.mark.parametrize('eos', [0, -1])
def test_each_token_is_a_label_once_in_evaluation(tmp_path, eos):
  folder, arrays = made(tmp_path, [3, 40, 17], {'eos': eos}, split='test')
  stream = [i for a in arrays for i in (*a.tolist(), *[eos] * (eos >= 0))]
  found = examples(corpus.source(folder, 'test', 'gpt', length=16, documents='together'), train=False)
  real = found['weights'] > 0
  assert found['labels'][real].tolist() == stream[1:] and found['ids'][real].tolist() == stream[:-1]
  assert set(found['segments'].ravel()) == {0, 1} and (found['segments'] == 0).sum() < 16
  apart = examples(corpus.source(folder, 'test', 'gpt', length=16), train=False)
  if eos < 0:
    assert all((apart[k] == found[k]).all() for k in found)
    return
  assert (apart['weights'] == found['weights'] * (found['ids'] != eos)).all()
  assert apart['segments'][0].tolist() == [1] * 4 + [2] * 12 and apart['segments'][2].tolist() == [1] * 13 + [2] * 3
  assert apart['weights'].sum() == len(stream) - 3        # the last eos is no input, each other is no question


def test_phases_differ_and_cover_everything(tmp_path):
  unique = corpus.write_ids(str(tmp_path / 'u'), {'train': [np.arange(325)]}, vocabulary=325, length=16, special={})
  source = corpus.source(unique, 'train', 'gpt', length=16)
  starts = []
  assert source.size == 21
  found = examples(source, 21 * 60, 21)
  for epoch in range(60):
    rows = slice(21 * epoch, 21 * epoch + 21)
    ids, labels, real = (found[k][rows] for k in ('ids', 'labels', 'weights'))
    assert (labels[real > 0] == ids[real > 0] + 1).all()
    starts += {int(i[0]) % 16 for i, r in zip(ids, real) if r.any()}
    assert len(starts) == epoch + 1
    assert sorted(labels[real > 0].tolist()) == list(range(starts[-1] + 1, 325))
    for record, i in zip(found['record'][rows], ids):
      assert i[0] in (16 * record + starts[-1], 0)
  assert len(set(starts)) > 12 and max(starts) < 16


# what the source refuses

def test_source_says_what_does_not_fit(mlm, gpt, tmp_path):
  for folder, split, objective, length, words in (
      (mlm[0], 'train', 'mlm', 64, r'its windows have 32 ids, wanted are 64: .*--tokenizer=.* --length=64'),
      (mlm[0], 'dev', 'mlm', 32, "no split 'dev'; there are test, train, validation"),
      (mlm[0], 'train', 'gpt', 32, r'\(wordpiece\) does not fit the objective .gpt.*of kind bpe or chars'),
      (gpt[0], 'train', 'mlm', 32, r'\(bpe\) does not fit the objective .mlm.*of kind wordpiece'),
      (str(tmp_path), 'train', 'mlm', 32, 'no prepared text there. Prepare it with .*prepare corpus')):
    with pytest.raises(DataError, match=words):
      corpus.source(folder, split, objective, length=length)
  no_mask = corpus.write_ids(str(tmp_path), {'train': [np.arange(9) + 3]}, vocabulary=12, length=8,
                             special={'cls': 0, 'sep': 1})
  with pytest.raises(DataError, match='does not fit'):
    corpus.source(no_mask, 'train', 'mlm', length=8)
  with pytest.raises(DataError, match='tokenizer.json is missing: what lies there was made without'):
    corpus.tokenizer(no_mask)
  assert corpus.facts(str(tmp_path))['kind'] == 'ids'


def test_check_finds_broken_records():
  tf = pipeline.tensorflow()

  def record(data, count):
    return tf.train.Example(features=tf.train.Features(feature={
        'ids': tf.train.Feature(bytes_list=tf.train.BytesList(value=[data])),
        'count': tf.train.Feature(int64_list=tf.train.Int64List(value=[count]))})).SerializeToString()
  good = np.array([1, 70_000], '<i4').tobytes()
  assert corpus.check(record(good, 2)) == ''
  for data, count, words in ((good, 1, '2 ids, 1 promised'), (good[:-1], 2, '4 bytes'), (b'', 0, '0 ids'),
                             (np.array([-3], '<i4').tobytes(), 1, 'id -3')):
    assert words in corpus.check(record(data, count))
  assert 'not a record' in corpus.check(b'nonsense')


def test_an_id_that_the_vocabulary_has_not_makes_a_bad_record():      # a device would take the last one for it
  tf = pipeline.tensorflow()
  serialized = tf.train.Example(features=tf.train.Features(feature={
      'ids': tf.train.Feature(bytes_list=tf.train.BytesList(value=[np.array([0, 64, 3], '<i4').tobytes()])),
      'count': tf.train.Feature(int64_list=tf.train.Int64List(value=[3]))})).SerializeToString()
  assert windows.known(65, serialized)['ids'].numpy().tolist() == [0, 64, 3]
  with pytest.raises(tf.errors.InvalidArgumentError, match=r'(?s)ids from.*0.*to.*64.*where 0 to 63 are known'):
    windows.known(64, serialized)


# the sample

@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  return tmp_path


def test_sample_for_gpt_is_nanogpts(cache):
  source = corpus.source('sample', 'train', 'gpt', length=64)
  folder = corpus.find('sample', 'gpt', 64)
  assert folder.startswith(str(cache)) and source.read[0].startswith(folder)
  facts = corpus.facts(folder)
  assert {k: s['tokens'] for k, s in facts['splits'].items()} == {'train': 1003854, 'validation': 111540}
  assert facts['vocabulary'] == 65 and source.size == 15686
  found = examples(source, 4, 4)
  assert (found['ids'][:, 1:] == found['labels'][:, :-1]).all() and found['weights'].all()
  assert len(corpus.tokenizer(folder).decode(found['ids'][0])) == 64


def test_sample_for_mlm_has_both_books_in_all_splits(cache):
  source = corpus.source('sample', 'train', 'mlm', length=128)
  folder = corpus.find('sample', 'mlm', 128)
  facts, tokenizer = corpus.facts(folder), corpus.tokenizer(folder)
  assert facts['vocabulary'] == 2048 and source.size > 3000 and set(facts['splits']) == set(documents.SPLITS)
  for split in facts['splits']:
    text = tokenizer.decode(np.concatenate(records(folder, split, check=False)))
    assert 'van helsing' in text and 'thou' in text
  assert examples(source, 4, 4)['places'].shape == (4, 19)


def test_samples_are_attributed():
  with open(os.path.join(corpus.SAMPLE, '..', 'ATTRIBUTION.md'), encoding='utf-8') as f:
    text = f.read()
  assert all(f'language/{name}' in text for name in ('shakespeare/input.txt', 'books/dracula.txt'))
