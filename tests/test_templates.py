"""Made-up documents: what is in them, and that most names are new."""

import numpy as np
from data_pipelines import templates, trees


def test_made_up_documents():
  found, other = templates.documents(3000, 0), templates.documents(150, 1)
  assert found[:20] == templates.documents(20, 0) and not set(other) & set(found)
  sentences = [[trees.join(s, 1).decode() for s in trees.nodes(d, 1)] for d in found]
  assert {len(s) for s in sentences} == {2, 3} and {len(trees.nodes(d, 2)) for d in found} == {1}
  sizes = [len(s.split(' ')) for d in sentences for s in d]
  # a sentence has one of 12 lengths, of a variance of 1.25: the mean of 7,500 has a standard deviation of .013
  assert set(sizes) == {5, 6, 7, 8, 9} and abs(np.mean(sizes) - 6.5) < .05
  assert all(s[0].isupper() and s.count('.') == 1 and s.endswith('.') for d in sentences for s in d)
  words = [[w.strip('.') for s in d for w in s.split()] for d in sentences]
  assert 75 <= len({w for d in words for w in d if w.islower()}) <= 85
  names = [[w for w in d if w[0].isupper()] for d in words]
  assert max(len(set(n)) for n in names) == 3 and np.mean([len(n) / len(set(n)) for n in names]) > 1.9
  known = {w for d in found for w in d.split(b' ')}
  for seed in (1, 2, 3):
    fresh = [w not in known for d in templates.documents(150, seed) for w in d.split(b' ')]
    assert .11 < np.mean(fresh) < .17
