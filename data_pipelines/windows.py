"""Windows of token ids: how a stream is cut into records, and what a record becomes, for each objective.

  mlm   some tokens are masked, drawn anew each epoch; the model restores them
  gpt   each token is predicted from those before it
"""

from typing import Iterator, Mapping

import numpy as np

from data_pipelines.pipeline import tensorflow, within

CONTROL = ('pad', 'unk', 'cls', 'sep', 'mask', 'eos')


def objective(special: Mapping[str, int]) -> str:
  """What windows are cut for where a tokenizer has these control tokens (name -> id, -1 if there is none)."""
  return 'mlm' if min(special['cls'], special['sep']) >= 0 else 'gpt'


def count(size: int, length: int, special: Mapping[str, int]) -> int:
  """Records of a stream of `size` ids."""
  size, step = (size, length - 2) if objective(special) == 'mlm' else (max(0, size - 1), length)
  return -(-size // step)


def cut(stream: np.ndarray, length: int, special: Mapping[str, int]) -> Iterator[np.ndarray]:
  """The records of a stream i32[N]; `corpus` says how they lie."""
  masked = objective(special) == 'mlm'
  for r in range(count(len(stream), length, special)):
    first = r * (length - 2 if masked else length)
    yield stream[first:first + (length - 2 if masked else 2 * length + 1)]


def decode(serialized) -> dict:
  """A record, string[] -> ids i32[count], count i64[]."""
  tf = tensorflow()
  fields = tf.io.parse_single_example(serialized, {
      'ids': tf.io.FixedLenFeature([], tf.string), 'count': tf.io.FixedLenFeature([], tf.int64)})
  return {**fields, 'ids': tf.io.decode_raw(fields['ids'], tf.int32, little_endian=True)}


def known(vocabulary: int, serialized) -> dict:
  """As decode, of a record without ids that a vocabulary of this size has not."""
  fields = decode(serialized)
  return {**fields, 'ids': within(fields['ids'], vocabulary, 'ids')}


def check(serialized: bytes) -> str:
  """What is wrong with a record; '' if nothing. For `prepare verify`."""
  tf = tensorflow()
  try:
    fields = decode(tf.constant(serialized))
  except tf.errors.OpError:
    return 'not a record of this data set, or its ids are not of 4 bytes each'
  ids, promised = fields['ids'].numpy(), int(fields['count'])
  if not len(ids) or len(ids) != promised:
    return f'{len(ids)} ids, {promised} promised'
  return f'id {ids.min()} is negative' if ids.min() < 0 else ''


def masked(length: int, most: int, vocabulary: int, special: Mapping[str, int], apart: bool, fields: dict,
           seed) -> dict:
  """A decoded record and seed i64[2] -> an example of 'mlm', as `corpus.source` describes it.

  Of a full window `most` tokens are chosen, of a shorter one as large a share: the number between two whole ones that
  is right on average, but at least one.
  """
  tf = tensorflow()
  inner = fields['ids'][:length - 2]
  size = tf.size(inner)
  cls, sep, mask = (tf.constant([special[k]], tf.int32) for k in ('cls', 'sep', 'mask'))
  ids = tf.pad(tf.concat([cls, inner, sep], 0), [[0, length - 2 - size]], constant_values=max(special['pad'], 0))
  ids = tf.ensure_shape(ids, [length])
  at = tf.range(length)
  ends = tf.cast((ids == sep) & (at < size), tf.int32) * int(apart)      # the last two may both be sep: one document
  segments = tf.where(at < size + 2, 1 + tf.cumsum(ends, exclusive=True), 0)

  control = sorted({i for i in special.values() if i >= 0})
  free = (at < size + 2) & tf.reduce_all(ids[:, None] != tf.constant(control)[None], 1)
  drawn = tf.random.stateless_uniform([length + 2 * most + 1], seed, None, None, tf.uint32, alg='philox')
  drawn = tf.cast(drawn, tf.int64)
  order, kind, other, chance = tf.split(drawn, [length, most, most, 1])
  open_ = tf.reduce_sum(tf.cast(free, tf.int64))
  chosen = tf.maximum((most * open_ + chance[0] % (length - 2)) // (length - 2), tf.minimum(open_, 1))
  first = tf.argsort(tf.where(free, order, 1 << 32), stable=True)[:most]
  real = tf.range(most, dtype=tf.int64) < tf.minimum(chosen, most)
  places = tf.sort(tf.where(real, first, length))
  places = tf.where(real, places, 0)
  labels = tf.where(real, tf.gather(ids, places), 0)

  other = tf.cast(other % (vocabulary - len(control)), tf.int32)
  for i in control:                              # the drawn number counts ids that are no control tokens
    other += tf.cast(other >= i, tf.int32)
  kind %= 10
  written = tf.where(kind < 8, mask, tf.where(kind == 8, other, labels))
  ids = tf.tensor_scatter_nd_update(ids, tf.boolean_mask(places, real)[:, None], tf.boolean_mask(written, real))
  return {'ids': ids, 'segments': segments, 'places': places, 'labels': labels, 'weights': tf.cast(real, tf.float32)}


def following(length: int, size: int, moves: bool, special: Mapping[str, int], apart: bool, fields: dict, seed) -> dict:
  """A decoded record and seed i64[2] -> an example of 'gpt', as `corpus.source` describes it.

  Args:
    size: records of the split, which make an epoch.
    moves: whether windows begin elsewhere each epoch.
  """
  tf = tensorflow()
  phase = tf.constant(0)
  if moves:
    epoch = tf.stack([seed[0], seed[1] // size])
    phase = tf.random.stateless_uniform([], epoch, 0, length, tf.int32, alg='philox')
  window = fields['ids'][phase:phase + length + 1]
  count = tf.size(window)
  window = tf.pad(window, [[0, length + 1 - count]], constant_values=max(special['pad'], 0))
  window = tf.ensure_shape(window, [length + 1])
  ids, labels, at = window[:-1], window[1:], tf.range(length)
  good = at + 1 < count
  segments = tf.ones([length], tf.int32)
  if apart and special['eos'] >= 0:
    ends = ids == special['eos']
    good &= ~ends                      # nothing tells how the next document begins
    segments += tf.cumsum(tf.cast(ends, tf.int32), exclusive=True)
  return {'ids': ids, 'labels': labels, 'weights': tf.cast(good, tf.float32),
          'segments': tf.where(at < count, segments, 0)}
