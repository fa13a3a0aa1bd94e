"""Texts as files of vectors: every byte comes back, costs are those of the model, and damaged files are refused."""

import json
import struct
import zlib

import jax
import numpy as np
import pytest
from data_pipelines import DataError
from lab.systems.agent import arithmetic, codec, model
from tests.systems.test_agent import small

SHAPES = {0: ((24,), (8,), (16, 16)), 1: ((24, 8), (8, 6), (16, 16, 16)), 2: ((24, 8, 4), (8, 6, 4), (16, 16, 16, 32))}
ODD = {
    'empty': b'', 'one byte': b'a', 'a line feed': b'\n', 'a space': b' ',
    'no chapters': b'One line. Another one! And "more" of it.',
    '5,000 words': b' '.join(b'w%d' % (i % 700) for i in range(5000)) + b'.',
    '10,000 letters': b'abcdefghij' * 1000,
    'control tokens': b'[PAD] END CONT JOIN <s> </s> [MASK] <p> \x00\x01\x02\x03\x04\x05',
    'nothing but NUL': b'\0' * 40, 'not UTF-8': bytes(range(256)) + b'\xff\xfe \xc3( \xed\xa0\x80 end.',
    'carriage returns': b'One.\r\nTwo.\r\n\r\nThree.\r\n',
    'chapters': b'A title\n\nChapter 1\n\nIt began. So it did.\n\nIt went on.\n\nCHAPTER II\n\nIt ended.\n\nIII\n\nNo.',
    'trailing line feeds': b'The end.\n\n\n\n\n', 'empty lines': b'\n\n\nA.\n\n\n\n\n\nB. C.\n\n \n\nD',
    'spaces': b'  Two  in  a row.   Three.  ',
    'exactly full': b'1234567 123456 12345678 a b c d. A b c d e f. G h i j k.',
}


def shaped(level):
  """The configuration, network and parameters of K levels above words, untrained."""
  rows, lengths, widths = SHAPES[level]
  config = small()
  config.data.update({'rows': rows, 'lengths': lengths, 'nodes': ()})
  config.model.update({'widths': widths})
  net = model.make(config)
  return net, jax.jit(net.init)(jax.random.key(0)), config


@pytest.fixture(scope='module')
def made():
  """Of each K network, parameters and configuration, and their codec."""
  found = {level: shaped(level) for level in SHAPES}
  return {level: (*parts, codec.Codec(*parts, 'of the test')) for level, parts in found.items()}


@pytest.fixture(params=sorted(SHAPES))
def coder(made, request):
  """A codec of each K."""
  return made[request.param][-1]


@pytest.fixture
def sentences(made):
  """Network, parameters and configuration of K = 1, and their codec."""
  return made[1]


@pytest.mark.parametrize('name', ODD)
def test_every_byte_comes_back(coder, name):
  data = coder.encode(ODD[name])
  assert coder.decode(data) == ODD[name]
  assert data == coder.encode(ODD[name])
  found = coder.report(data)
  assert found['bytes'] == len(ODD[name]) and found['coded_bytes'] == len(data)
  parts = [found[part] for part in ('vectors', 'structure', 'bytes_given_vectors', 'header')]
  assert found['bits_per_byte'] == pytest.approx(8 * len(data) / max(len(ODD[name]), 1)) == sum(parts)
  assert min(parts[:2] + parts[3:]) > 0


@pytest.mark.parametrize('level', range(5))
def test_what_is_above_a_level_comes_back(level):
  for text in ODD.values():
    nodes, groups = codec.taken_apart(text, level)
    assert len(groups) == 4 - level and sum(groups[-1] if groups else [1]) == len(nodes)
    assert codec.put_together(nodes, groups, level) == text


def test_a_model_that_knows_nothing_costs_what_that_costs():
  """Where all logits are alike a byte costs 8 bits, a place log2 L and a terminator 1."""
  net, params, config = shaped(0)
  params = jax.tree.map(np.array, params)
  params['params']['bytes'][:] = 0
  params['params']['levels_0']['ends']['kernel'][:] = 0
  coder, text = codec.Codec(net, params, config, ''), ODD['5,000 words'][:4000]
  data = coder.encode(text)
  assert coder.decode(data) == text
  words, (_, parts) = text.split(b' '), codec.opened(data)
  assert max(map(len, words)) < 8
  assert len(parts['structure']) == pytest.approx(len(words) * (3 + 1) / 8, abs=1)
  assert len(parts['bytes']) == pytest.approx(sum(map(len, words)), abs=1)
  assert len(zlib.decompress(parts['vectors'])) == len(words) * 16


def test_vectors_are_what_the_bytes_depend_on(sentences):
  """With other vectors the same streams say another thing: nothing but them and the streams is read."""
  *_, coder = sentences
  text = ODD['no chapters']
  data = coder.encode(text)
  header, parts = codec.opened(data)
  vectors = np.frombuffer(zlib.decompress(parts['vectors']), np.int8)
  assert np.abs(vectors.astype(int)).max() > 16 and 12 < np.square(vectors.astype(float)).mean()**.5 < 20
  with pytest.raises(DataError, match='does not come back'):
    coder.decode(forged(data, vectors=zlib.compress((-vectors).tobytes())))
  assert coder.decode(forged(data, vectors=zlib.compress(vectors.tobytes(), 1))) == text


def forged(data, head=None, **parts):
  """A file with another header, or other keys in it, and other parts, whose sizes are right unless given."""
  header, old = codec.opened(data)
  parts = old | parts
  if not isinstance(head, bytes):
    found = header._asdict() | {'parts': [len(p) for p in parts.values()]} | (head or {})
    head = json.dumps({k: v for k, v in found.items() if v is not None}).encode()
  return b''.join((codec.MAGIC, struct.pack('<I', len(head)), head, *parts.values()))


def test_a_damaged_byte_is_noticed_or_does_not_matter(sentences):
  *_, coder = sentences
  text = b'Hi there. Ho.\n\nChapter 1'
  data = coder.encode(text)
  refused = 0
  for place in range(len(data)):
    for mask in (1, 0x80):
      broken = bytearray(data)
      broken[place] ^= mask
      try:
        assert coder.decode(bytes(broken)) == text
      except DataError:
        refused += 1
  assert refused > 2 * len(data) - 40        # but for the last bits of a stream


def test_a_file_that_was_cut_is_refused(sentences):
  *_, coder = sentences
  data = coder.encode(ODD['chapters'])
  for size in range(len(data)):
    with pytest.raises(DataError):
      coder.decode(data[:size])
  with pytest.raises(DataError, match='cut or damaged'):
    coder.decode(data + b'\0')


def test_foreign_files_are_refused(sentences):
  *_, coder = sentences
  for data in (b'', b'PK\3\4' * 99, codec.MAGIC, codec.MAGIC + b'\xff' * 99, ODD['not UTF-8']):
    for read in (coder.decode, coder.report):
      with pytest.raises(DataError):
        read(data)


@pytest.mark.parametrize('head', [
    {'version': 2}, {'version': True}, {'version': '1'}, {'rows': -1}, {'rows': 10**9}, {'rows': 1.0}, {'rows': None},
    {'rows': 4}, {'size': 10**15}, {'size': '7'}, {'size': 0}, {'crc32': 0}, {'crc32': 1 << 32}, {'lengths': [8, 7]},
    {'lengths': []}, {'lengths': 8}, {'parts': [0, 0, 0]}, {'parts': [10**9, -10**9, 0, 0]}, {'parts': None},
    {'digest': 7}, {'digest': None}, {'other': 1}, b'', b'[]', b'null', b'[' * 60000, b'{"version": ' + b'9' * 9999,
    b'\xff\xfe', b'{"version": 1}', b' ' * 70000], ids=lambda head: str(head)[:30])
def test_no_header_is_believed(sentences, head):
  *_, coder = sentences
  data = coder.encode(ODD['no chapters'])
  with pytest.raises(DataError):
    coder.decode(forged(data, head))


@pytest.mark.parametrize('parts', [
    {'vectors': zlib.compress(bytes(10**7))}, {'vectors': b''}, {'vectors': zlib.compress(b'')},
    {'vectors': zlib.compress(bytes(16)) + b'behind'}, {'groups': zlib.compress(b' ' * 10**7)}, {'groups': b'[[1]]'},
    {'groups': zlib.compress(b'[[1],[1],[1]]')}, {'groups': zlib.compress(b'[[1],[1],[-1]]')},
    {'groups': zlib.compress(b'[1,1,1]')}, {'groups': zlib.compress(b'[' * 500)}, {'groups': zlib.compress(b'{}')},
    {'structure': b''}, {'bytes': b''}, {'structure': b'\xff' * 99}], ids=lambda parts: str(parts)[:30])
def test_no_part_is_believed(sentences, parts):
  *_, coder = sentences
  data = coder.encode(ODD['no chapters'])
  with pytest.raises(DataError):
    coder.decode(forged(data, **parts))


def test_another_model_is_refused(sentences):
  net, params, config, coder = sentences
  data = coder.encode(ODD['no chapters'])
  with pytest.raises(DataError, match="another model, 'of the test'; this one is 'another'"):
    codec.Codec(net, params, config, 'another').decode(data)
  # one that says that it is the same, but computes something else, as another device might
  changed = jax.tree.map(lambda x: x * 1.25, params)
  with pytest.raises(DataError, match='decode on the kind of device'):
    codec.Codec(net, changed, config, 'of the test').decode(data)
  with pytest.raises(ValueError, match='at most 64'):
    codec.Codec(net, params, config, 'x' * 65)


def test_a_model_of_no_numbers_is_refused(sentences):
  net, params, config, _ = sentences
  places = {**params['params']['levels_1'], 'places': params['params']['levels_1']['places'] * np.nan}
  with pytest.raises(DataError, match='vectors of the text are not finite'):
    codec.Codec(net, {'params': {**params['params'], 'levels_1': places}}, config, '').encode(b'a b')
  slots = {**params['params']['levels_1'], 'slots': params['params']['levels_1']['slots'] * np.nan}
  with pytest.raises(DataError, match='taken apart to is not finite'):
    codec.Codec(net, {'params': {**params['params'], 'levels_1': slots}}, config, '').encode(b'a b')


def test_too_long_a_text_is_refused(sentences, monkeypatch):
  *_, coder = sentences
  monkeypatch.setattr(codec, 'MOST', 9)
  assert coder.decode(coder.encode(b'123456789')) == b'123456789'
  with pytest.raises(DataError, match='a text of 10 bytes; at most 9'):
    coder.encode(b'1234567890')


def test_frequencies_are_the_distribution():
  rng = np.random.default_rng(0)
  logits = rng.normal(0, 3, (50, 256)).astype(np.float32)
  found = arithmetic.frequencies(logits)
  assert found.dtype == np.int64 and found.min() >= 1 and (found.sum(1) == arithmetic.TOTAL).all()
  p = np.exp(logits.astype(np.float64))
  np.testing.assert_allclose(found, 1 + (arithmetic.TOTAL - 256) * p / p.sum(1, keepdims=True), atol=1)
  assert (found == arithmetic.frequencies(logits[::-1])[::-1]).all()         # whatever the other rows are
  assert arithmetic.frequencies(np.zeros(4)).tolist() == [1 << 14] * 4
  assert arithmetic.frequencies([1e4, -1e9, 0]).tolist() == [65534, 1, 1]
  assert arithmetic.frequencies([7.0]).tolist() == [65536]
  for wrong in ([0, np.nan], [0, np.inf], [], np.zeros(arithmetic.TOTAL + 1)):
    with pytest.raises(ValueError):
      arithmetic.frequencies(wrong)


@pytest.mark.parametrize('deviation', [0.5, 4, 12])
def test_the_coder_costs_the_entropy_of_its_model(deviation):
  """Within 0.1 % and 32 bits, of 1e5 symbols whose distributions all differ: from near to uniform to near to sure."""
  rng, count = np.random.default_rng(1), 100000
  table = arithmetic.frequencies(rng.normal(0, deviation, (count, 40)))
  symbols = (table.cumsum(1) <= rng.integers(0, arithmetic.TOTAL, (count, 1))).sum(1)
  data = arithmetic.encode(symbols, table)
  bits = -np.log2(table[np.arange(count), symbols] / arithmetic.TOTAL).sum()
  assert bits - 1 <= 8 * len(data) <= bits * 1.001 + 32
  decoder = arithmetic.Decoder(data)
  assert all((decoder.take(table[i:i + 7001]) == symbols[i:i + 7001]).all() for i in range(0, count, 7001))


@pytest.mark.parametrize('place', [0, 1, 2])
@pytest.mark.parametrize('rare', [True, False])
def test_rare_symbols_and_sure_ones(place, rare):
  """What has frequency 1 costs 16 bits each time, and what is nearly sure next to nothing, wherever it lies."""
  row = np.ones(3, np.int64)
  row[(place + 1) % 3 if rare else place] = arithmetic.TOTAL - 2
  symbols = np.full(5000, place)
  data = arithmetic.encode(symbols, np.tile(row, (5000, 1)))
  bits = -5000 * np.log2(row[place] / arithmetic.TOTAL)
  assert 8 * len(data) <= bits * 1.001 + 32 and (not rare or 8 * len(data) >= bits)
  decoder = arithmetic.Decoder(data)
  assert [decoder.take(row) for _ in range(5000)] == symbols.tolist()


def test_intervals_around_the_middle_come_back():
  """A carry that stays open for thousands of bits: the middle one of three, whose interval has the half inside."""
  row = np.array([1 << 15, 1, (1 << 15) - 1]) - [1, 0, 0] + [0, 1, 0]
  symbols = np.array([1] * 3000 + [0, 2] * 500 + [1])
  data = arithmetic.encode(symbols, np.tile(row, (len(symbols), 1)))
  assert (arithmetic.Decoder(data).take(np.tile(row, (len(symbols), 1))) == symbols).all()


def test_what_is_no_symbol_or_no_distribution_is_refused():
  good = np.full((2, 2), 1 << 15)
  for symbols, table in (([0, 2], good), ([-1, 0], good), ([0], good), ([0, 0], good - 1), ([0, 0], good * 1.0),
                         ([0], np.array([[0, 1 << 16]])), ([0, 0], good[0])):
    with pytest.raises(ValueError):
      arithmetic.encode(symbols, table)
  with pytest.raises(ValueError):
    arithmetic.Decoder(b'').take(good - 1)
  assert arithmetic.encode([], np.zeros((0, 3), np.int64)) in (b'\x40', b'\x80')
