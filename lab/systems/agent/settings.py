"""Which settings of a text tree can run together; and that none is set which nothing reads."""

from data_pipelines import packs, trees

from lab.config import choice, flatten
from lab.systems.agent import config as shape
from lab.task import ConfigError

CHOICES = {
    'model.decompressor': ('slots', 'lstm'), 'model.compressor': ('attention', 'max'),
    'model.dtype': ('float32', 'bfloat16'),
    'predict.verb': ('rebuild', 'encode', 'neighbours', 'interpolate', 'decode', 'generate'),
}
LEAST = {
    **{f'model.{name}': 1 for name in ('heads', 'layers', 'repeats', 'hidden', 'checker')}, 'model.noise': 0,
    'model.questions': 0, 'predict.steps': 2, 'predict.nearest': 1,
    **{f'loss.{name}': 0 for name in ('reconstruct', 'length', 'join', 'difference', 'masked', 'coherence', 'plausible',
                                      'gate', 'path', 'unify')}}


def check(config) -> None:
  """Raises ConfigError for settings that can't run, before any device or file is touched."""
  for key, options in CHOICES.items():
    choice(config, key, options)
  flat, m, data = flatten(config), config.model, config.data
  for key, least in LEAST.items():
    if flat[key] < least:
      raise ConfigError(f'config.{key} = {flat[key]}: expected at least {least}')
  if not 0 <= m.dropout < 1:
    raise ConfigError(f'config.model.dropout = {m.dropout}: expected at least 0 and less than 1')
  if not 1 <= len(data.rows) <= len(trees.LEVELS):
    raise ConfigError(f'config.data.rows = {data.rows}: expected 1 to {len(trees.LEVELS)} levels, '
                      f'{", ".join(trees.LEVELS)}')
  if config.loss.levels and (len(config.loss.levels) != len(data.rows) or min(config.loss.levels) < 0):
    raise ConfigError(f'config.loss.levels = {config.loss.levels}: expected {len(data.rows)} numbers of at least 0, '
                      'one a level, or none')
  if data.mixed and (len(data.mixed) != len(data.rows) or not 0 <= min(data.mixed) <= max(data.mixed) < 1):
    raise ConfigError(f'config.data.mixed = {data.mixed}: expected {len(data.rows)} shares of at least 0 and less than '
                      '1, one a level, or none')
  try:
    packs.Packer(data.rows, data.lengths, nodes=data.nodes)
  except ValueError as e:
    raise ConfigError(f'config.data.rows = {data.rows}, config.data.lengths = {data.lengths}, config.data.nodes = '
                      f'{data.nodes}: {e}') from None
  if len(m.widths) != len(data.rows) + 1:
    raise ConfigError(f'config.model.widths = {m.widths}: expected {len(data.rows) + 1}, one more than data.rows '
                      'has levels')
  if wrong := [w for w in m.widths[:-1] if w % m.heads]:
    raise ConfigError(f'config.model.widths = {m.widths}: expected multiples of model.heads = {m.heads}, which '
                      f'{wrong[0]} is not')
  if config.predict.verb == 'generate' and not m.noise:
    raise ConfigError("config.predict.verb = 'generate': there is no generator with model.noise = 0; expected more")
  _unread(flat, len(data.rows))


def _unread(flat, levels) -> None:
  default = flatten(shape.get_config())
  for key, read, why in (
      ('model.questions', levels > 1, 'there are no sentences'),
      ('data.joined', levels > 2, 'no level has rows that could be shared'),
      ('loss.join', flat['data.joined'], 'data.joined = False'),
      ('loss.gate', flat['model.questions'], 'model.questions = 0'),
      ('loss.path', levels > 1, 'there is one level'),
      ('loss.difference', levels > 1, 'there is one level'),
      ('loss.plausible', levels > 1, 'there is one level'),
      ('predict.steps', flat['predict.verb'] == 'interpolate', f'predict.verb = {flat["predict.verb"]}'),
      ('predict.nearest', flat['predict.verb'] == 'neighbours', f'predict.verb = {flat["predict.verb"]}')):
    if not read and flat[key] != default[key]:
      raise ConfigError(f'config.{key} = {flat[key]!r}: nothing reads it, for {why}; expected {default[key]!r}')
