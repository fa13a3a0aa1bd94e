"""Arithmetic coding: symbols as bits, as few as their distributions allow; integers only, so that it is exact.

Witten, Neal and Cleary 1987, "Arithmetic coding for data compression" (CACM 30:6), with intervals of 32 bits. Sequences
of symbols may have a distribution each: a table of positive integer frequencies that sum to TOTAL, a row a symbol.
"""

import itertools

import numpy as np

BITS = 16
TOTAL = 1 << BITS                      # sum of the frequencies of a row
_FULL, _HALF, _QUARTER = (1 << 32) - 1, 1 << 31, 1 << 30


def frequencies(logits) -> np.ndarray:
  """The distributions softmax(logits), f[..., S], as integers i64[..., S] of at least 1 that sum to TOTAL.

  Borders between symbols are rounded, not frequencies: f = floor((TOTAL - S) P_i) - floor((TOTAL - S) P_(i-1)) + 1 with
  P the distribution function. Equal logits give equal integers on machines that compute exp alike.

  ValueError for logits that are not finite, and for no symbols or more than TOTAL.
  """
  x = np.asarray(logits, np.float64)
  if not 1 <= x.shape[-1] <= TOTAL:
    raise ValueError(f'{x.shape[-1]} symbols: expected 1 to {TOTAL}')
  if not np.isfinite(x).all():
    raise ValueError('logits that are not finite')
  p = np.exp(x - x.max(-1, keepdims=True)).cumsum(-1)
  border = np.floor(p / p[..., -1:] * (TOTAL - x.shape[-1])).astype(np.int64)
  return np.diff(border, axis=-1, prepend=0) + 1


def _borders(table) -> np.ndarray:
  """Where each symbol's interval ends, i64[M, S]."""
  table = np.asarray(table)
  if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
    raise ValueError(f'frequencies {table.dtype}{list(table.shape)}: expected integers [M, S]')
  ends = table.cumsum(1, dtype=np.int64)
  if len(table) and (table.min() < 1 or (ends[:, -1] != TOTAL).any()):
    raise ValueError(f'frequencies: expected at least 1 each, and rows that sum to {TOTAL}')
  return ends


def encode(symbols, table) -> bytes:
  """Symbols int[M] by frequencies int[M, S] -> bytes. ValueError for what is no symbol or no distribution."""
  encoder = Encoder()
  encoder.put(symbols, table)
  return encoder.done()


class Encoder:
  """Makes bytes of symbols that come one batch after another. Memory: a byte for every bit."""

  def __init__(self):
    self._low, self._high, self._pending, self._bits = 0, _FULL, 0, bytearray()

  def put(self, symbols, table) -> None:
    """Symbols int[M] by frequencies int[M, S]. ValueError for what is no symbol or no distribution."""
    ends, symbols = _borders(table), np.asarray(symbols)
    if symbols.shape != (len(ends),) or len(ends) and not (0 <= symbols.min() and symbols.max() < ends.shape[1]):
      raise ValueError(f'symbols {list(symbols.shape)} for frequencies {list(ends.shape)}: expected one a row, of 0 to '
                       f'{ends.shape[1] - 1}')
    at = np.arange(len(ends)), symbols.astype(np.int64)
    end = ends[at]
    low, high = self._low, self._high
    for first, behind in zip((end - np.asarray(table)[at]).tolist(), end.tolist()):
      width = high - low + 1
      high = low + (width * behind >> BITS) - 1
      low += width * first >> BITS
      while True:
        if high < _HALF:
          self._emit(0)
        elif low >= _HALF:
          self._emit(1)
          low, high = low - _HALF, high - _HALF
        elif low >= _QUARTER and high < _HALF + _QUARTER:
          self._pending += 1                           # the next bit, once known, is followed by its opposite
          low, high = low - _QUARTER, high - _QUARTER
        else:
          break
        low, high = low << 1, high << 1 | 1
    self._low, self._high = low, high

  def _emit(self, bit):
    self._bits.append(bit)
    if self._pending:
      self._bits.extend((b'\1' if not bit else b'\0') * self._pending)
      self._pending = 0

  def done(self) -> bytes:
    """All that was put, with zeros up to a whole byte. Nothing can be put after it."""
    self._pending += 1                                 # two bits name a quarter that lies inside of the interval
    self._emit(int(self._low >= _QUARTER))
    return np.packbits(np.frombuffer(self._bits, np.uint8)).tobytes()


class Decoder:
  """Gives the symbols that an Encoder was given, if asked with the same frequencies in the same order.

  Any bytes decode to something, and behind their end there are zeros: what is damaged is noticed by a checksum only.
  """

  def __init__(self, data: bytes):
    self._bits = itertools.chain(np.unpackbits(np.frombuffer(data, np.uint8)).tobytes(), itertools.repeat(0))
    self._low, self._high, self._value = 0, _FULL, 0
    for _ in range(32):
      self._value = self._value << 1 | next(self._bits)

  def take(self, table):
    """The next symbols i64[M] by frequencies int[M, S]; by one row int[S] one, an int. ValueError as for `put`."""
    if np.ndim(table) == 1:
      return int(self.take(np.asarray(table)[None])[0])
    ends, out = _borders(table), []
    low, high, value, bits = self._low, self._high, self._value, self._bits
    for line in ends:
      width = high - low + 1
      symbol = int(line.searchsorted(((value - low + 1 << BITS) - 1) // width, 'right'))
      out.append(symbol)
      high = low + (width * int(line[symbol]) >> BITS) - 1
      if symbol:
        low += width * int(line[symbol - 1]) >> BITS
      while True:
        if high < _HALF:
          pass
        elif low >= _HALF:
          low, high, value = low - _HALF, high - _HALF, value - _HALF
        elif low >= _QUARTER and high < _HALF + _QUARTER:
          low, high, value = low - _QUARTER, high - _QUARTER, value - _QUARTER
        else:
          break
        low, high, value = low << 1, high << 1 | 1, value << 1 | next(bits)
    self._low, self._high, self._value = low, high, value
    return np.array(out, np.int64)
