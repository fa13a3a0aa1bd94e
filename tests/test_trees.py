"""Text as trees and as packs of rows: nothing is lost, whatever the text."""

import glob
import itertools
import os

import numpy as np
import pytest
from data_pipelines import packs, trees

from tests.conftest import ROOT

BOOKS = os.path.join(ROOT, '..', 'shared', 'data', 'agent', 'books')
shared = pytest.mark.skipif(not os.path.exists(BOOKS), reason='the books in ../shared/data are not there')
ODD = [b'', b' ', b'  two  spaces ', b'\n', b'\n\n', b'\n\n\n\n', b'a\n\n\n b', b'line.\n Next', b'\x00\x01\xff\xfe',
       b'END CONT <s> \x03', 'Mr. Day said: “No.” He left. 3 cats…'.encode(), b'word' * 2500,
       b' '.join([b'w'] * 5000), b'a. ' * 300,
       ('Chapter 1\n\nOne.\n\nChapter II\n\n' * 3).encode(), b'\r\nwin\r\n', bytes(range(256)) * 3]
MIX = b'The cat sat. The cat sat! A dog ran off with the cat.\n\nThe cat sat. So it goes on and on.'


@pytest.mark.parametrize('text', ODD, ids=range(len(ODD)))
def test_joining_gives_back_every_byte(text):
  book, = trees.nodes(text, 4)
  assert trees.join(book, 4) == text
  assert b'\n\n'.join(trees.join(p, 2) for p in trees.nodes(text, 2)) == text
  for lengths, joined in itertools.product(([4, 5, 3, 3, 3], [16, 12, 4, 9, 2]), (False, True)):
    assert packs.node(packs.rows(book, 4, lengths, joined), 4) == book


def test_levels_are_taken_apart():
  texts = [b'I like big books. I can not lie.', b'some other song']
  found = [[trees.join(n, level) for text in texts for n in trees.nodes(text, level)] for level in range(3)]
  assert found[2] == texts and found[1] == [b'I like big books.', b'I can not lie.', b'some other song']
  assert found[0] == b'I like big books. I can not lie. some other song'.split()
  with pytest.raises(ValueError, match='level 5'):
    trees.nodes(b'', 5)


@pytest.mark.parametrize('text, wanted', [
    ('Mr. Day met Dr. No. He ran.', ['Mr. Day met Dr. No.', 'He ran.']),
    ('“Stop!” she cried. “Why?” “So.”', ['“Stop!” she cried.', '“Why?”', '“So.”']),
    ('It was 3.5 km. e.g. this. 42 is.', ['It was 3.5 km. e.g. this.', '42 is.']),
    ('one\ntwo. Three\n', ['one\n', 'two.', 'Three\n']), ('J. R. Smith', ['J. R. Smith'])])
def test_where_sentences_end(text, wanted):
  assert [trees.join(n, 1).decode() for n in trees.nodes(text.encode(), 1)] == wanted


def test_headings_begin_chapters():
  text = ('A title\n\nChapter 1\n\nOne.\n\nTwo.\n\nXIV.\n\nBook the Second\n\nA part of it all, with a long line '
          'behind\n\nEnd')
  assert [len(c) for c in trees.nodes(text.encode(), 3)] == [1, 3, 1, 3]


# packs


def texts(pack):
  """The text of each top row of a pack, in order, each as often as it is there."""
  top = len(pack.ids) - 1
  found = packs.unpacked(pack)[top]
  return [row for row, n in zip(found, pack.counts[top]) for _ in range(n)]


@pytest.mark.parametrize('text', [*ODD, MIX], ids=range(len(ODD) + 1))
@pytest.mark.parametrize('joined', [False, True])
def test_packs_hold_every_byte_within_their_budget(text, joined):
  packer = packs.Packer((40, 12, 4), (6, 5, 4), joined)
  found = [p for i, n in enumerate(trees.nodes(text, 2)) for p in packer.add(n, i)] + list(packer.rest())
  for pack in found:
    assert [x.shape for x in pack.ids] == [(40, 6), (12, 5), (4, 4)]
    for level, ids in enumerate(pack.ids):
      used = pack.counts[level] > 0
      assert (ids[~used] == 0).all() and (np.isin(ids[used], (packs.END, packs.CONT)).sum(1) == 1).all()
      assert (pack.documents[level][used] > 0).all() == bool(level)
      below = pack.counts[level - 1] if level else np.ones(256)
      assert (ids < packs.FIRST + (below > 0).sum()).all()
  # equal rows of a document are one row, which is only seen again where nothing of it goes on
  if all(row.last for pack in found for row in texts(pack)):
    got = sorted(trees.join(n, 2) for pack in found for row in texts(pack) for n in packs.split([row], 2))
    assert got == sorted(trees.join(n, 2) for n in trees.nodes(text, 2))


def test_equal_words_are_one_row_and_equal_sentences_one_of_their_document():
  packer = packs.Packer((40, 12, 4), (8, 8, 4))
  documents = [n for i in range(2) for n in trees.nodes(MIX, 2)]
  assert not [p for n, i in zip(documents, (7, 7, 9, 9)) for p in packer.add(n, i)]
  pack, = packer.rest()
  words, sentences, _ = packs.unpacked(pack)
  assert len({r.units for r in words}) == len(words) == len(set(MIX.split()))
  assert pack.counts[0][[r.units for r in words].index(b'The')] == 2 * 3
  assert pack.counts[0].sum() == 2 * len(MIX.split())
  said = [b' '.join(w.units for w in r.units) for r in sentences]
  assert said.count(b'The cat sat.') == 2 and pack.counts[1][said.index(b'The cat sat.')] == 2
  assert pack.documents[1][said.index(b'The cat sat.')] == 1 and set(pack.documents[1]) == {0, 1, 2}


def test_a_row_that_does_not_fit_leaves_no_trace():
  packer = packs.Packer((6, 4, 2), (8, 4, 2))
  assert not list(packer.add(((b'a', b'b'), ), 0))
  full, = packer.add(((b'c', b'd', b'e'), (b'f', b'g', b'a')), 1)
  assert [r.units for r in packs.unpacked(full)[0]] == [b'a', b'b', b'c', b'd', b'e']
  assert full.counts[0].tolist() == [1] * 5 + [0]
  assert max(full.documents[2]) == 2
  rest, = packer.rest()
  assert [r.units for r in packs.unpacked(rest)[0]] == [b'f', b'g', b'a']


def below(pack, level):
  """How many nodes of a level there are below the rows of each level above it, counted by what they hold."""
  counts = np.ones(len(pack.ids[level]), int)
  for ids in pack.ids[level + 1:]:
    inside = ids >= packs.FIRST
    counts = (counts[np.where(inside, ids - packs.FIRST, 0)] * inside).sum(1)
    yield int(counts.sum())


@pytest.mark.parametrize('text', [*ODD, MIX], ids=range(len(ODD) + 1))
@pytest.mark.parametrize('joined', [False, True])
def test_packs_hold_no_more_nodes_than_they_may(text, joined):
  nodes = trees.nodes(text, 2)
  free, bound = packs.Packer((40, 12, 4), (6, 5, 4), joined), packs.Packer((40, 12, 4), (6, 5, 4), joined, (12, 3))
  for packer in free, bound:
    found = [p for i, n in enumerate(nodes) for p in packer.add(n, i)] + list(packer.rest())
    assert packer.largest == [max([0, *(n for p in found for n in below(p, level))]) for level in range(2)]
    rows = [row for pack in found for row in texts(pack)]
    # nothing is left out; a row may be in two packs that was one with a count before
    assert sorted({r.units for r in rows}, key=str) == sorted(
        {r.units for n in nodes for r in packs.rows(n, 2, (6, 5, 4), joined)}, key=str)
  assert bound.largest[0] <= 12 and bound.largest[1] <= 3


@pytest.mark.parametrize('nodes', [(11, 3), (12, 2), (12,), (12, 3, 4)])
def test_nodes_that_cannot_hold_a_row_are_refused(nodes):
  with pytest.raises(ValueError, match='nodes'):
    packs.Packer((40, 12, 4), (6, 5, 4), nodes=nodes)


@pytest.mark.parametrize('most, lengths', [((4, 4), (8, 8, 8)), ((4, 1), (1, 4)), ((2, 1), (4, 4)),
                                           ((9, 2, 1), (4, 4, 4))])
def test_budgets_that_cannot_hold_a_row_are_refused(most, lengths):
  with pytest.raises(ValueError, match='rows'):
    packs.Packer(most, lengths)


@shared
def test_real_books():
  for path in sorted(glob.glob(os.path.join(BOOKS, '*.txt')))[-3:]:
    with open(path, 'rb') as f:
      text = f.read()
    book, = trees.nodes(text, 4)
    assert trees.join(book, 4) == text and 5 < len(book) < 80
    sentences = trees.nodes(text, 1)
    assert 8 < np.mean([len(s) for s in sentences]) < 30
