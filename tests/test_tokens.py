"""Tokenizers: the ids of the published ones on odd texts, exact round trips, determinism, broken files named."""

import json
import os

import numpy as np
import pytest
from data_pipelines import DataError, corpus, documents, tokens

from tests.conftest import ROOT

SHARED = os.path.join(ROOT, '..', 'shared', 'data', 'language')
SHAKESPEARE = os.path.join(corpus.SAMPLE, 'shakespeare', 'input.txt')
published = pytest.mark.skipif(not os.path.exists(SHARED), reason='the vocabularies in ../shared/data are not there')
CONTROL = '[PAD] [MASK][CLS] x[SEP] [UNK] <|endoftext|>y'

# text, ids of bert-base-uncased, ids of gpt2: those of transformers 4.46.3 (BertTokenizer and GPT2Tokenizer, in Python)
# and 5.24.0 (in Rust). They differ on control tokens in a text alone; to us those are text, split_special_tokens=True
ODD = [
    ('', [], []),
    (' ', [], [220]),
    ('Hello, World!', [7592, 1010, 2088, 999], [15496, 11, 2159, 0]),
    ("don't  stop\tnow\n\nplease ", [2123, 1005, 1056, 2644, 2085, 3531], [9099, 470, 220, 2245, 197, 2197, 198,
     198, 29688, 220]),
    ('na\xefve caf\xe9 \xc5ngstr\xf6m', [15743, 7668, 17076, 15687], [2616, 38776, 40304, 6184, 227, 782, 2536,
     9101, 76]),
    ('e\u0301le\u0300ve re\u0301sume\u0301', [3449, 18697, 13746], [68, 136, 223, 293, 136, 222, 303, 302, 136,
     223, 82, 2454, 136, 223]),
    ('\u6211\u7231 Tokyo\u6771\u4eac!', [1855, 100, 5522, 1879, 1755, 999], [22755, 239, 163, 230, 109, 11790,
     30266, 109, 12859, 105, 0]),
    ('\u304b\u306a\ud55c\uad6d\uc5b4', [1651, 30193, 30005, 30006, 30021, 29991, 30014, 30020, 29999, 30008],
     [27370, 26945, 47991, 250, 166, 113, 255, 168, 244, 112]),
    ('\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd', [1266, 29799, 29792, 29800, 1259, 29792, 29799, 29800],
     [50227, 40010, 27072, 147, 251, 14360, 95, 27072, 40010, 147, 251]),
    ('\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645', [1295, 17149, 29820, 29816,
     25573, 1271, 25573, 23673, 29830, 25573, 23673, 22192], [25405, 26897, 148, 255, 39848, 12919, 17550, 101,
     23525, 44690, 23525, 25405]),
    ('I \u2764\ufe0f \U0001f355\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea', [1045, 100, 100,
     100], [40, 43074, 97, 37929, 12520, 235, 243, 41840, 102, 447, 235, 41840, 102, 447, 235, 41840, 100, 12520,
     229, 102, 8582, 229, 103]),
    ('zero\u200bwidth\u200djoin\ufeff', [5717, 9148, 11927, 2232, 5558, 2378], [22570, 9525, 10394, 447, 235,
     22179, 171, 119, 123]),
    ('nul\x00here', [16371, 2140, 5886, 2063], [77, 377, 188, 1456]),
    ('a\xa0b\u3000c', [1037, 1038, 1039], [64, 1849, 65, 5099, 222, 66]),
    ('tab\there\r\nline', [21628, 2182, 2240], [8658, 197, 1456, 201, 198, 1370]),
    ('[MASK] [CLS]x[SEP] [PAD][UNK]', [1031, 7308, 1033, 1031, 18856, 2015, 1033, 1060, 1031, 19802, 1033, 1031,
     11687, 1033, 1031, 4895, 2243, 1033], [58, 31180, 42, 60, 685, 5097, 50, 60, 87, 58, 5188, 47, 60, 685, 47,
     2885, 7131, 4944, 42, 60]),
    ('<|endoftext|>a<|endoftext|>', [1026, 1064, 2203, 15794, 10288, 2102, 1064, 1028, 1037, 1026, 1064, 2203,
     15794, 10288, 2102, 1064, 1028], [27, 91, 437, 1659, 5239, 91, 29, 64, 27, 91, 437, 1659, 5239, 91, 29]),
    ('3.14159 1,000,000 \u20ac5 \xbd \xb2', [1017, 1012, 15471, 28154, 1015, 1010, 2199, 1010, 2199, 1574, 2629,
     1092, 1082], [18, 13, 1415, 19707, 352, 11, 830, 11, 830, 10432, 20, 25208, 1587, 110]),
    ('\u0130stanbul \u03a3\u038a\u03a3\u03a5\u03a6\u039f\u03a3 \xdf', [9960, 1173, 18199, 29733, 29735, 29736,
     29730, 29733, 1096], [128, 108, 24179, 7377, 96, 138, 232, 138, 96, 138, 98, 138, 99, 138, 253, 138, 96,
     6184, 253]),
    ('x' * 101, [100], [24223, 24223, 24223, 24223, 24223, 24223, 24223, 24223, 24223, 24223, 24223, 24223, 12343,
     87]),
    ('\ufffd \u2028 \x85 \x1c', [], [4210, 564, 101, 1587, 227, 220, 216]),
    ('I\'LL we\'ll \'tis \'\' "', [1045, 1005, 2222, 2057, 1005, 2222, 1005, 22320, 1005, 1005, 1000], [40, 6,
     3069, 356, 1183, 705, 48010, 10148, 366]),
    ('\U0001d573\U0001d58a\U0001d591\U0001d591\U0001d594 \U0002070e', [100, 100], [47728, 243, 111, 47728, 244,
     232, 47728, 244, 239, 47728, 244, 239, 47728, 244, 242, 220, 172, 254, 250, 236]),
    ('----====....', [1011, 1011, 1011, 1011, 1027, 1027, 1027, 1027, 1012, 1012, 1012, 1012], [650, 1421, 1106]),
    ('foo_bar/baz@qux.com #tag', [29379, 1035, 3347, 1013, 8670, 2480, 1030, 24209, 2595, 1012, 4012, 1001, 6415],
     [21943, 62, 5657, 14, 65, 1031, 31, 421, 87, 13, 785, 1303, 12985]),
    ('##ing ##', [1001, 1001, 13749, 1001, 1001], [2235, 278, 22492]),
    ('\u0120 \u010a', [1043, 1039], [128, 254, 34754, 232]),
]


@pytest.fixture(scope='module')
def bert():
  return tokens.load(os.path.join(SHARED, 'bert-base-uncased'))


@pytest.fixture(scope='module')
def gpt2():
  return tokens.load(os.path.join(SHARED, 'gpt2', 'encoder.json'))


@pytest.fixture(scope='module')
def text():
  """400 speeches of Shakespeare."""
  with open(SHAKESPEARE, encoding='utf-8') as f:
    return '\n\n'.join(f.read().split('\n\n')[:400])


@pytest.fixture(scope='module')
def trained(text):
  return {kind: tokens.train([text, CONTROL, 'é ½'], kind, 400) for kind in tokens.KINDS}


@published
def test_odd_texts_have_the_published_ids(bert, gpt2):
  texts, first, second = zip(*ODD)
  for tokenizer, wanted in ((bert, first), (gpt2, second)):
    found = tokenizer.encode(texts)
    assert [ids.tolist() for ids in found] == list(wanted) and {ids.dtype for ids in found} == {np.dtype(np.int32)}
  assert bert.encode(['x' * 100_000])[0].tolist() == [bert.unk]
  assert len(gpt2.encode(['Aab' * 3000])[0]) == 6000


@published
def test_published_tokenizers(bert, gpt2):
  assert (bert.kind, bert.size, bert.pad, bert.unk, bert.cls, bert.sep, bert.mask, bert.eos) == (
      'wordpiece', 30522, 0, 100, 101, 102, 103, -1) and bert.special == {0, 100, 101, 102, 103}
  assert (gpt2.kind, gpt2.size, gpt2.pad, gpt2.unk, gpt2.cls, gpt2.sep, gpt2.mask, gpt2.eos) == (
      'bpe', 50257, -1, -1, -1, -1, -1, 50256) and gpt2.special == {50256}
  assert (bert.word(103), bert.word(2075), gpt2.word(50256), gpt2.word(262)) == (
      '[MASK]', '##ing', '<|endoftext|>', 'Ġthe')
  assert bert.decode([101, *bert.encode(['Embeddings, naïve!'])[0], 102, 0]) == 'embeddings, naive!'
  assert gpt2.decode([50256, *gpt2.encode(['naïve!'])[0], 50256]) == 'naïve!'


def odd_unicode(count, seed=0):
  """Texts of code points from all over, surrogates excepted, with white space among them."""
  draw = np.random.default_rng(seed)
  for _ in range(count):
    points = np.where(draw.random(60) < 0.5, draw.integers(0, 0x250, 60), draw.integers(0, 0x110000, 60))
    points = np.where((points >= 0xD800) & (points < 0xE000) | (draw.random(60) < 0.2), ord(' '), points)
    yield ''.join(map(chr, points))


@published
def test_published_byte_pairs_give_every_text_back(gpt2):
  texts = [*odd_unicode(200), *(t for t, *_ in ODD), 'x' * 100_000]
  assert [gpt2.decode(ids) for ids in gpt2.encode(texts)] == texts


def test_trained_byte_pairs_and_characters_give_every_text_back(trained, text):
  texts = [*odd_unicode(100), text, CONTROL, '']
  assert [trained['bpe'].decode(ids) for ids in trained['bpe'].encode(texts)] == texts
  assert [trained['chars'].decode(ids) for ids in trained['chars'].encode(texts[-3:])] == texts[-3:]


@pytest.mark.parametrize('kind', tokens.KINDS)
def test_control_tokens_in_a_text_are_text(trained, kind, tmp_path):
  trained[kind].save(tmp_path / 'tokenizer.json')
  content = json.loads((tmp_path / 'tokenizer.json').read_text())
  for special in (True, False):                 # as a tokenizer.json of elsewhere declares them
    content['added_tokens'] = [
        {'id': getattr(trained[kind], k), 'content': w, 'special': special, 'single_word': False, 'lstrip': False,
         'rstrip': False, 'normalized': False}
        for k, w in (('mask', '[MASK]'), ('eos', '<|endoftext|>'), ('cls', '[CLS]')) if getattr(trained[kind], k) >= 0]
    (tmp_path / 'other.json').write_text(json.dumps(content))
    for found in (trained[kind], tokens.load(str(tmp_path / 'other.json'))):
      ids = found.encode([CONTROL])[0]
      assert len(ids) > 15 and not (found.special - {found.unk}) & set(ids.tolist())


def test_trained_tokenizers(trained, text):
  word, pairs, chars = (trained[k] for k in tokens.KINDS)
  assert [word.word(i) for i in range(5)] == ['[PAD]', '[CLS]', '[SEP]', '[MASK]', '[UNK]']
  assert (word.pad, word.cls, word.sep, word.mask, word.unk, word.eos) == (0, 1, 2, 3, 4, -1)
  assert word.size == pairs.size == 400 and pairs.special == {pairs.eos} == {0} and chars.special == frozenset()
  assert [chars.word(i) for i in range(chars.size)] == sorted(set(text + CONTROL + 'é ½'))
  assert word.decode(word.encode(['Speak, SPEAK, spéak.'])[0]) == 'speak, speak, speak.'
  assert word.encode(['citizen'])[0].size < 4 and word.unk not in word.encode([text])[0]
  assert word.encode(['Ж' * 3])[0].tolist() == [word.unk]


def test_shakespeare_has_nanogpts_65_characters():
  with open(SHAKESPEARE, encoding='utf-8') as f:
    found = tokens.train([f.read()], 'chars', 65)
  assert found.size == 65 and found.encode(['\n !zA'])[0].tolist() == [0, 1, 2, 64, 13]


@pytest.mark.parametrize('kind', ['wordpiece', 'bpe'])
def test_the_published_kinds_of_files_hold_the_whole_tokenizer(trained, text, kind, tmp_path):
  for name, content in trained[kind].files().items():
    (tmp_path / name).write_text(content, newline='')
  found = tokens.load(str(tmp_path))
  assert found.size == trained[kind].size and found.eos == trained[kind].eos and found.mask == trained[kind].mask
  for a, b in zip(found.encode([text, CONTROL]), trained[kind].encode([text, CONTROL])):
    assert a.tolist() == b.tolist()
  with pytest.raises(DataError, match='characters'):
    trained['chars'].files()


@pytest.mark.parametrize('kind', tokens.KINDS)
def test_training_repeats_itself_and_saving_changes_nothing(trained, text, kind, tmp_path):
  again = tokens.train(iter([text, CONTROL, 'é ½']), kind, 400)
  assert again.json() == trained[kind].json() and again.fingerprint == trained[kind].fingerprint
  assert tokens.train([text], kind, 399).fingerprint != again.fingerprint
  again.save(tmp_path / 'tokenizer.json')
  for path in (tmp_path, tmp_path / 'tokenizer.json'):
    found = tokens.load(str(path))
    assert (found.fingerprint, found.kind, found.size, found.special, found.json()) == (
        again.fingerprint, kind, again.size, again.special, again.json())
    assert np.array_equal(found.encode([text])[0], again.encode([text])[0])


@pytest.mark.parametrize('kind', tokens.KINDS)
def test_ids_of_parts_are_those_of_the_whole(trained, kind, text):
  odd = [t for t in odd_unicode(40, 1)] if kind != 'chars' else []
  for whole in [text[:20_000], 'x' * 5000 + ' y', 'a\n\n b  c ... d\n', *odd, ' '.join(odd) + '.']:
    for size in (1, 7, 100):
      parts = list(documents.pieces(whole, size))
      assert ''.join(parts) == whole
      assert np.array_equal(np.concatenate(trained[kind].encode(parts)), trained[kind].encode([whole])[0])


@published
def test_ids_of_parts_are_those_of_the_whole_for_published_ones(bert, gpt2):
  whole = ' '.join(t for t, *_ in ODD) + '\n'.join(odd_unicode(50, 2))
  for tokenizer in (bert, gpt2):
    found = tokenizer.encode(list(documents.pieces(whole, 10)))
    assert len(found) > 40 and np.array_equal(np.concatenate(found), tokenizer.encode([whole])[0])


def test_unknown_ids_and_characters_are_named(trained):
  for kind, tokenizer in trained.items():
    for call in (lambda t=tokenizer: t.decode([0, t.size]), lambda t=tokenizer: t.decode([-1]),
                 lambda t=tokenizer: t.word(t.size)):
      with pytest.raises(ValueError, match=r'id'):
        call()
    with pytest.raises(DataError, match=r"surrogate pair \('\\ud800'\) at 1"):
      tokenizer.encode(['a', 'a\ud800'])
  with pytest.raises(DataError, match=r"the character 'Ж' \(U\+0416\), at 2 of a text"):
    trained['chars'].encode(['ab', 'abЖ'])
  model = json.loads(trained['chars'].json())
  model['model']['vocab']['<unk>'] = trained['chars'].size
  model['model']['unk_token'] = '<unk>'
  found = tokens.Tokenizer(json.dumps(model), 'here')
  assert found.encode(['aЖ'])[0].tolist() == [*found.encode(['a'])[0], found.unk] and found.decode([found.unk]) == ''


VOCABULARY = '[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n##b\n'


def test_small_vocabularies(tmp_path):
  (tmp_path / 'vocab.txt').write_bytes(b'\xef\xbb\xbf' + VOCABULARY.replace('\n', '\r\n').encode())
  for path in (tmp_path, tmp_path / 'vocab.txt'):
    found = tokens.load(str(path))
    assert found.size == 7 and found.encode(['ABB á c'])[0].tolist() == [5, 6, 6, 5, 1]
  (tmp_path / 'vocab.txt').rename(tmp_path / 'my-vocab.txt')
  assert tokens.load(str(tmp_path / 'my-vocab.txt')).size == 7
  (tmp_path / 'vocab.json').write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
  (tmp_path / 'merges.txt').write_text('#version: 0.2\na b\n')
  for path in (tmp_path, tmp_path / 'vocab.json', tmp_path / 'merges.txt'):
    assert tokens.load(str(path)).encode(['aba'])[0].tolist() == [2, 0]


@pytest.mark.parametrize('files, words', [
    ({}, 'no tokenizer there; expected'), ({'vocab.txt': VOCABULARY + 'a\n'}, r"vocab.txt:8: 'a' is there .* line 6"),
    ({'vocab.txt': VOCABULARY.replace('[MASK]\n', '')}, r'vocab.txt: no token \[MASK\]'),
    ({'vocab.txt': ''}, 'no token'), ({'vocab.txt': VOCABULARY + '\nb\n'}, 'vocab.txt:8: an empty line'),
    ({'vocab.txt': VOCABULARY.encode() + b'c\n\xff\n'}, r'vocab.txt:9: byte 39 \(0xff\) is not UTF-8'),
    ({'vocab.txt': VOCABULARY.encode('utf-16')}, 'vocab.txt:1: .*UTF-16'),
    ({'vocab.json': '{}'}, r'merges.txt \(vocab.bpe\) is missing'),
    ({'merges.txt': ''}, r'vocab.json \(encoder.json\) is missing'),
    ({'vocab.json': '{"a": 0,\n "a": 1}', 'merges.txt': ''}, "vocab.json: broken .'a' is there twice"),
    ({'vocab.json': '{"a": 0,\n b', 'merges.txt': ''}, 'vocab.json:2: no JSON'),
    ({'vocab.json': '["a"]', 'merges.txt': ''}, 'vocab.json: broken .no object'),
    ({'vocab.json': '{"a": "0"}', 'merges.txt': ''}, 'expected an object of token -> id'),
    ({'vocab.json': '{"a": 0, "<|endoftext|>": 2}', 'merges.txt': ''}, 'ids are not 0 to 1'),
    ({'vocab.json': '{"a": 0, "b": 0, "<|endoftext|>": 1}', 'merges.txt': ''}, 'ids are not 0 to 2'),
    ({'vocab.json': '{"a": 0}', 'merges.txt': ''}, r'no token <\|endoftext\|>'),
    ({'vocab.json': '{"a": 0, "<|endoftext|>": 1}', 'merges.txt': '#version\na a\n'}, "merges.txt:2: 'a a'"),
    ({'vocab.json': '{"a": 0, "aa": 1}', 'merges.txt': 'a a a\n'}, "merges.txt:1: 'a a a'; expected two"),
    ({'vocab.json': '{"a": 0, "aa": 1}', 'merges.txt': 'a a\na a\n'}, "merges.txt:2: 'a a' is there .* line 1"),
    ({'tokenizer.json': '{"model": {"type": "Unigram"}}'}, "the model 'Unigram'; expected"),
    ({'tokenizer.json': '{}'}, 'the model None'), ({'tokenizer.json': '[]'}, 'no object'),
    ({'tokenizer.json': ''}, 'tokenizer.json:1: no JSON'),
    ({'tokenizer.json': '[' * 100_000}, 'tokenizer.json: broken'),
    ({'tokenizer.json': '{"model": {"type": "WordPiece"}}'}, 'tokenizer.json: no tokenizer'),
    ({'tokenizer.json': '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "Metaspace"}}'}, 'only those of bytes'),
    ({'tokenizer.json': json.dumps({'model': {'type': 'WordLevel', 'vocab': {'ab': 0}, 'unk_token': ''}})},
     "a vocabulary of words .'ab'")])
def test_broken_files_are_named(tmp_path, files, words):
  for name, content in files.items():
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(DataError, match=words) as e:
    tokens.load(str(tmp_path))
  assert str(tmp_path) in str(e.value) and '\n' not in str(e.value)


def test_a_path_that_is_nothing_is_named(tmp_path):
  for path in (tmp_path / 'none', tmp_path / 'none' / 'vocab.txt', tmp_path / 'merges.txt'):
    with pytest.raises(DataError, match='no such file or folder; expected a tokenizer, or one of wordpiece'):
      tokens.load(str(path))


@pytest.mark.parametrize('kind, texts, size, words', [
    ('chars', ['abc'], 2, 'have 3 characters, the vocabulary is to have 2'), ('chars', [], 9, 'no text'),
    ('bpe', ['a'], 256, 'needs at least 257'), ('wordpiece', ['a'], 63, 'needs at least 64')])
def test_what_cannot_be_trained(kind, texts, size, words):
  with pytest.raises(DataError, match=words):
    tokens.train(texts, kind, size)


def test_training_on_little_gives_few_ids():
  assert tokens.train(['a b'], 'bpe', 999).size == 257
  found = tokens.train(['', 'ab ab ab'], 'wordpiece', 999)
  assert [found.word(i) for i in range(5, found.size)] == ['a', '##b', 'ab']
  many = ' '.join(chr(0x4e00 + i) for i in range(500)) + ' the the the'
  assert tokens.train([many], 'wordpiece', 99).size <= 99       # rare letters make room
