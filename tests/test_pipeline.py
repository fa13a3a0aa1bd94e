"""The order of the pipeline, on records that are numbers."""

import queue
import threading

import numpy as np
import pytest
from data_pipelines import DataError, pipeline
from lab import config as core

from tests import coco_fixture

SIZE = 103


def options(**changes):
  config = core.core().input
  config.update(changes)
  return config


@pytest.fixture(scope='module')
def numbers(tmp_path_factory):
  """A source of SIZE records, each its own number as text, in three shards."""
  return write(tmp_path_factory.mktemp('numbers'), [str(i) for i in range(SIZE)], shards=3)


def write(folder, payloads, shards=1):
  tf = pipeline.tensorflow()
  paths = []
  for s, part in enumerate(np.array_split(np.array(payloads), shards)):
    paths.append(str(folder / f'numbers.tfrecord-{s:05d}-of-{shards:05d}'))
    with tf.io.TFRecordWriter(paths[-1]) as f:
      for payload in part:
        f.write(payload.encode())
  decode = lambda s: {'value': tf.strings.to_number(s, tf.int64)}
  augment = lambda e, seed: {**e, 'noise': tf.random.stateless_uniform([], seed)}
  return pipeline.Source(tuple(paths), decode, augment, len(payloads))


def take(source, count, batch_size=8, rows=None, train=True, seed=0, start=0, **changes):
  it = iter(pipeline.Batches(source, options(**changes), batch_size, rows or range(batch_size), train=train, seed=seed,
                             start=start))
  return [next(it) for _ in range(count)]


def joined(batches, key='value'):
  return np.concatenate([b[key] for b in batches])


def same(a, b):
  return all(set(x) == set(y) and all(np.array_equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True))


def test_each_epoch_is_another_permutation(numbers):
  first, second = (joined([b]) for b in take(numbers, 2, batch_size=SIZE))
  assert sorted(first) == sorted(second) == list(range(SIZE))
  assert (first != second).any() and (first != np.arange(SIZE)).any()
  assert (joined(take(numbers, 1, batch_size=SIZE, seed=1)) != first).any()


def test_epochs_join_inside_a_batch(numbers):
  values = joined(take(numbers, 26, batch_size=8))      # 208 = two epochs and two records
  assert sorted(values[:SIZE]) == sorted(values[SIZE:2 * SIZE]) == list(range(SIZE))


def test_noise_differs_in_every_place(numbers):
  noise = joined(take(numbers, 2, batch_size=SIZE), 'noise')
  assert len(set(noise)) == 2 * SIZE


def test_start_equals_skipping(numbers):
  assert same(take(numbers, 20)[15:], take(numbers, 5, start=15))


def test_cached_equals_read(numbers):
  assert same(take(numbers, 20, cache=True), take(numbers, 20, cache=False))


def test_threads_change_nothing(numbers):
  assert same(take(numbers, 6, threads=1), take(numbers, 6, threads=5))


@pytest.mark.parametrize('hosts', [2, 4])
@pytest.mark.parametrize('train', [True, False])
def test_hosts_rows_join_to_the_global_batch(numbers, hosts, train):
  whole = take(numbers, 13, batch_size=8, train=train)
  rows = 8 // hosts
  parts = [take(numbers, 13, batch_size=8, rows=range(h * rows, (h + 1) * rows), train=train) for h in range(hosts)]
  assert same(whole, [{k: np.concatenate([p[i][k] for p in parts]) for k in whole[0]} for i in range(13)])


@pytest.mark.parametrize('batch_size', [1, 8, 64, 128])
def test_evaluation_covers_every_record_once(numbers, batch_size):
  batches = list(pipeline.Batches(numbers, options(), batch_size, range(batch_size), train=False))
  mask = joined(batches, 'mask')
  assert {b['value'].shape for b in batches} == {(batch_size,)} and mask.sum() == SIZE
  assert joined(batches)[mask > 0].tolist() == list(range(SIZE))


def test_one_record(tmp_path):
  source = write(tmp_path, ['7'])
  assert joined(take(source, 2, batch_size=4)).tolist() == [7] * 8


def broken_payload(path):
  offsets, _ = pipeline.framing(path)
  coco_fixture.flip(path, offsets[5] + 12)


def broken_length(path):
  offsets, _ = pipeline.framing(path)
  coco_fixture.flip(path, offsets[5])


@pytest.mark.parametrize('cache', [True, False])
@pytest.mark.parametrize('fault, words', [
    (broken_payload, '#5'), (broken_length, 'record 5'), (lambda p: coco_fixture.cut(p, 10), 'record 33'),
    (lambda p: open(p, 'wb').close(), '69 records found, 103 promised'),
])
def test_broken_shard_is_named(tmp_path, fault, words, cache):
  source = write(tmp_path, [str(i) for i in range(SIZE)], shards=3)
  fault(source.read[1])
  with pytest.raises(DataError, match=words) as e:
    take(source, 13, cache=cache)
  assert source.read[1] in str(e.value) or str(tmp_path) in str(e.value)


def test_missing_shard_is_named(tmp_path):
  source = write(tmp_path, [str(i) for i in range(SIZE)], shards=3)
  source = source._replace(read=(*source.read[:2], source.read[2] + '-gone'))
  with pytest.raises(DataError, match='gone: this shard is missing'):
    take(source, 1)


@pytest.mark.parametrize('train', [True, False])
@pytest.mark.parametrize('cache', [True, False])
@pytest.mark.parametrize('fault', ['checksum', 'content'])
def test_bad_record_is_left_out_and_counted(numbers, tmp_path, cache, train, fault):
  texts = [str(i) for i in range(SIZE)]
  texts[40] = 'no number' if fault == 'content' else texts[40]
  source = write(tmp_path, texts, shards=3)
  if fault == 'checksum':
    broken_payload(source.read[1])                     # record 35 + 5
  batches = pipeline.Batches(source, options(cache=cache, bad_limit=0.02), 8, range(8), train=train)
  found = [b for b, _ in zip(iter(batches), range(13))]
  assert batches.bad == [40]
  for bad, good in zip(found, take(numbers, 13, train=train), strict=True):
    rows = (good['record'] != 40) | (good['mask'] == 0)
    assert (bad['mask'] == good['mask'] * rows).all()
    assert all((bad[k][rows] == good[k][rows]).all() for k in good)


def test_too_many_bad_records_stop(tmp_path):
  source = write(tmp_path, [str(i) if i % 10 else 'no number' for i in range(50)])
  with pytest.raises(DataError, match=r'[345] bad of 50') as e:
    take(source, 20, bad_limit=0.05)
  assert source.read[0] + '#' in str(e.value) and 'could not correctly convert' in str(e.value)


def test_bad_first_record_is_no_filler(numbers, tmp_path):
  source = write(tmp_path, ['no number' if i in (0, 50) else str(i) for i in range(SIZE)])
  batches = list(pipeline.Batches(source, options(bad_limit=0.02), 8, range(8), train=False))
  assert joined(batches)[joined(batches, 'mask') > 0].tolist() == [i for i in range(SIZE) if i not in (0, 50)]


def test_bad_records_are_told_when_their_batch_is_taken(tmp_path):
  source = write(tmp_path, ['no number' if i == 12 else str(i) for i in range(SIZE)])
  batches = pipeline.Batches(source, options(bad_limit=0.02), 4, range(4), train=False)
  found = [(batches.step, list(batches.bad)) for _ in batches]
  assert found[2:4] == [(3, []), (4, [12])] and found[-1] == (26, [12])


def test_an_item_is_made_while_the_one_before_is_used():
  made = queue.SimpleQueue()
  items = pipeline.in_thread(made.put(i) or i for i in range(5))
  assert next(items) == 0
  assert [made.get(timeout=60) for _ in range(2)] == [0, 1]      # fails by queue.Empty
  assert list(items) == [1, 2, 3, 4]


def test_what_making_an_item_raises_comes_in_its_place_and_ends_the_thread():
  def items():
    yield 1
    raise DataError('broken')
  stream = pipeline.in_thread(items())
  assert next(stream) == 1
  with pytest.raises(DataError, match='broken'):
    next(stream)
  assert not [t for t in threading.enumerate() if t.name == 'batches']


def test_a_stream_that_is_closed_leaves_no_thread(numbers):
  stream = iter(pipeline.Batches(numbers, options(), 8, range(8), train=True))
  next(stream)
  assert [t for t in threading.enumerate() if t.name == 'batches']
  stream.close()
  assert not [t for t in threading.enumerate() if t.name == 'batches']


def test_framing_finds_every_record(numbers):
  assert [len(pipeline.framing(p)[0]) for p in numbers.read] == [35, 34, 34]
  assert all(pipeline.framing(p)[1] == '' for p in numbers.read)
