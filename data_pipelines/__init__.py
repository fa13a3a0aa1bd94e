"""Data sets: raw files to records, records to batches. Knows files and formats, never a model."""


class DataError(Exception):
  """A record, file or picture that can't be used; the message names it and says what to do."""
  exit_code = 3


class TooLarge(Exception):
  """Data that doesn't fit this machine's memory or disk; the message says what was needed."""
  exit_code = 6
