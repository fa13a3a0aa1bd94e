"""What is measured of a whole evaluation set on the host: grids rebuilt, use of the codes, what the slots share.

Information is in nats and plug-in, that is of the counts themselves. On few grids and many codes such estimates lie far
above zero even for slots that share nothing, so slot_mi stands beside slot_mi_floor.
"""

import concurrent.futures
import math
import zlib
from typing import Iterable, Mapping, Sequence

import numpy as np

FACTORS = ('height', 'width', 'colours', 'background')
# one of 10! permutations of the colours and one of 8 dihedral maps
AUGMENTATION_BITS = math.log2(math.factorial(10)) + 3
SHUFFLE_SEED = 0


def score(records: Iterable[Mapping], codes: int, factors: Sequence[str] = FACTORS,
          header_bits: float = 0.0) -> dict[str, float]:
  """The scores of an evaluation set; they do not depend on the order of the records.

  Args:
    records: one of each grid: 'codes' int[N] ([] where the model has no quantizer), 'pair' int, 'is_input' 0 or 1,
      'exact' bool (all cells right and PAD everywhere outside), 'right' of 'cells' (cells inside the grid), and the
      factors.
    codes: C, size of the codebook.
    factors: names of whole numbers that a record states of its grid, for the mutual information gap.
    header_bits: what a grid takes beside its codes.

  Returns, and leaves out what has no data (all but the first two lines without a quantizer):
    exact_grids, exact_inputs, exact_outputs: shares rebuilt without a fault.
    non_pad_accuracy, non_pad_accuracy_inputs, non_pad_accuracy_outputs: shares of the cells inside the grids.
    bits: N log2 C + header_bits, what a grid takes.
    code_usage, dead_codes: share of the C codes that some slot of some grid takes; number of the others.
    code_perplexity: exp of the entropy of codes, all slots together; /slot_00, ... of each slot by itself, and
      code_perplexity_per_slot, their mean.
    codes_differ_in_pair: share of slots that differ between input and output of a pair, mean over pairs.
    mi_nats_per_latent, tc_nats_per_latent, dwkl_nats_per_latent: of the codes themselves over the whole set, H(z) / N,
      (sum of H(z_k) - H(z)) / N and ln C - (sum of H(z_k)) / N. H(z) is at most ln(number of grids), which bounds all.
    deflate_fits: share of the grids that raw DEFLATE fits into so many bits, where the records state 'deflate_bits';
      bits_needed: mean + 2 standard deviations of these, and log2(10!) + 3 for colours and symmetries.
    slot_mi: mutual information of two slots, mean over all pairs of slots.
    slot_mi_floor: the same after each slot was shuffled over the grids by itself: the bias of the estimate.
    mig: mutual information gap, mean over the factors that vary; mig/FACTOR of each.

  Raises:
    ValueError: codes outside 0..C-1, or codes of different lengths.
  """
  records = list(records)
  out = _rebuilt(records)
  taken = _table(records, codes)
  if len(taken):
    out |= _use(taken, codes, header_bits) | _difference(records, taken) | _parts(taken, codes) | _shared(taken, codes)
    if all('deflate_bits' in r for r in records):
      out |= capacity(out['bits'], np.array([r['deflate_bits'] for r in records]))
    out |= _gap(taken, {name: np.array([r[name] for r in records]) for name in factors})
  return out


def _rebuilt(records) -> dict[str, float]:
  """Exact grids and right cells, of all grids, inputs and outputs."""
  exact, cells = {}, {}
  for part, chosen in (('', records), ('inputs', [r for r in records if r['is_input']]),
                       ('outputs', [r for r in records if not r['is_input']])):
    if chosen:
      exact[f'exact_{part or "grids"}'] = sum(bool(r['exact']) for r in chosen) / len(chosen)
    total = sum(r['cells'] for r in chosen)
    if total:
      cells['_'.join(filter(None, ('non_pad_accuracy', part)))] = sum(r['right'] for r in chosen) / total
  return exact | cells


def _table(records, codes) -> np.ndarray:
  """i64[N, n]: what each slot holds in each of n grids; N is 0 without a quantizer, or without a grid."""
  lengths = {len(r['codes']) for r in records}
  if len(lengths) > 1:
    raise ValueError(f'records have codes of different lengths, {sorted(lengths)}; score one model at a time')
  taken = np.array([r['codes'] for r in records], np.int64).reshape(len(records), *lengths or [0]).T
  if taken.size and not 0 <= taken.min() <= taken.max() < codes:
    raise ValueError(f'records have codes {taken.min()}..{taken.max()}; a codebook of {codes} has 0..{codes - 1}')
  return taken


def _use(taken, codes, header_bits) -> dict[str, float]:
  slots = len(taken)
  dead = codes - len(np.unique(taken))
  perplexities = np.exp(_entropies(taken))
  return {'bits': slots * math.log2(codes) + header_bits, 'code_usage': 1 - dead / codes, 'dead_codes': float(dead),
          'code_perplexity': float(np.exp(_entropies(taken.reshape(1, -1))[0])),
          'code_perplexity_per_slot': float(perplexities.mean()),
          **{f'code_perplexity/slot_{i:02d}': float(p) for i, p in enumerate(perplexities)}}


def _difference(records, taken) -> dict[str, float]:
  """Hamming distance / N between input and output, mean over the pairs that have both."""
  inputs, outputs = ({r['pair']: i for i, r in enumerate(records) if bool(r['is_input']) == side}
                     for side in (True, False))
  both = inputs.keys() & outputs.keys()
  if not both:
    return {}
  a, b = ([place[pair] for pair in both] for place in (inputs, outputs))
  return {'codes_differ_in_pair': float((taken[:, a] != taken[:, b]).mean())}


def _parts(taken, codes) -> dict[str, float]:
  """The divergence from uniform of deterministic codes, cut in three."""
  grids = [grid.tobytes() for grid in taken.T]
  slots, number = len(taken), {grid: i for i, grid in enumerate(sorted({*grids}))}
  whole = np.array([[number[grid] for grid in grids]])
  single, joint = float(_entropies(taken).sum()), float(_entropies(whole)[0])
  return {'mi_nats_per_latent': joint / slots, 'tc_nats_per_latent': (single - joint) / slots,
          'dwkl_nats_per_latent': math.log(codes) - single / slots}


def _shared(taken, codes) -> dict[str, float]:
  """What two slots tell of each other, as it is and by chance."""
  if len(taken) < 2:
    return {}
  # sorted first, so that the order of the records leaves no trace
  shuffled = np.random.default_rng(SHUFFLE_SEED).permuted(np.sort(taken, -1), axis=-1)
  return {'slot_mi': _mean_information(taken, codes), 'slot_mi_floor': _mean_information(shuffled, codes)}


def _mean_information(taken, codes) -> float:
  """Mean over the pairs of slots of I(a; b) = H(a) + H(b) - H(a, b)."""
  slots, alone = len(taken), _entropies(taken)
  taken = taken.astype(_whole(codes**2))

  # one slot against all later ones in each thread: 4 [N, n] numbers in memory, not [N^2, n]; sorting needs no lock
  def told(i):
    return (alone[i] + alone[i + 1:] - _entropies(taken[i] * codes + taken[i + 1:])).sum()
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    total = sum(pool.map(told, range(slots - 1)))
  return max(float(total) / (slots * (slots - 1) / 2), 0.0)              # round-off may fall below 0


def _gap(taken, factors) -> dict[str, float]:
  """Mutual information gap (Chen et al. 2018, arXiv 1802.04942, equation 6); a lone slot's runner-up knows nothing."""
  alone, gaps = _entropies(taken), {}
  for name, values in factors.items():
    values, labels = np.unique(values, return_inverse=True)
    if len(values) < 2:                                                  # H = 0: nothing to know
      continue
    own = _entropies(labels[None])[0]
    known = np.sort(alone + own - _entropies(taken * len(values) + labels[None]))
    gaps[name] = float(known[-1] - (known[-2] if len(known) > 1 else 0)) / float(own)
  if not gaps:
    return {}
  return {'mig': sum(gaps.values()) / len(gaps), **{f'mig/{name}': gap for name, gap in gaps.items()}}


def _entropies(labels) -> np.ndarray:
  """f64[R]: entropy in nats of each row of i64[R, n]: ln n - (sum of c ln c) / n over the counts c."""
  n = labels.shape[1]
  ordered = np.sort(labels.astype(_whole(int(labels.max(initial=0))), copy=False), -1)
  first = np.ones(labels.shape, bool)
  np.not_equal(ordered[:, 1:], ordered[:, :-1], out=first[:, 1:])
  counts = np.diff(np.flatnonzero(first), append=labels.size)            # every run of equal labels is a count
  terms = np.arange(n + 1, dtype=np.float64)
  terms[1:] *= np.log(terms[1:])                                         # c ln c, once of each c and not of each count
  runs = np.count_nonzero(first, 1)
  return math.log(n) - np.add.reduceat(terms[counts], np.cumsum(runs) - runs) / n


def _whole(largest: int) -> type:
  """The type of whole numbers up to this: four bytes where they suffice, of which half of the time is sorted."""
  return np.int32 if largest < 1 << 31 else np.int64


def deflate_bits(grids: Iterable[np.ndarray]) -> np.ndarray:
  """i64[n]: bits of grids u8[H, W] in raw DEFLATE (level 9, no header or checksum), whole bytes.

  A cell is a byte, row after row; height and width are not written.
  """
  def bits(grid):
    packer = zlib.compressobj(level=9, wbits=-15)
    return 8 * (len(packer.compress(np.asarray(grid, np.uint8).tobytes())) + len(packer.flush()))

  return np.array([bits(grid) for grid in grids], np.int64)


def capacity(bits_of_code: float, needed: np.ndarray) -> dict[str, float]:
  """Whether a code of so many bits, N log2 C, is long enough for grids that need i[n] as `deflate_bits` has them.

  Training also shows them in any permutation of the colours and any of the 8 symmetries, which costs 24.79 bits more.
  """
  return {'bits_needed': float(needed.mean() + 2 * needed.std()) + AUGMENTATION_BITS,
          'deflate_fits': float((needed <= bits_of_code).mean())}
