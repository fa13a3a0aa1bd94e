"""Which models can be built: the combinations that are impossible, and the models that the notes name."""

from lab.config import choice, flatten
from lab.systems.video import config as shape
from lab.task import ConfigError

CHOICES = {
    'kind': ('seq2frames', 'simvp'),
    'heads': ('both', 'recon', 'pred'),
    'recon_order': ('reversed', 'forward'),
    'feed': ('zero', 'output', 'hidden', 'teacher', 'scheduled'),
    'embed': ('flatten', 'mlp', 'cnn', 'patch'),
    'cell': ('lstm', 'peephole', 'gru', 'convlstm'),
    'readout': ('copy', 'linear', 'mlp', 'deconv'),
    'handover': ('all', 'h_only', 'top_only'),
    'init': ('default', 'uniform'),
    'dtype': ('bfloat16', 'float32'),
}

# keys that not every network reads; {deciding key: its values with which they are read}, any of which will do
READ_IF = (
    (('model.feed', 'model.recon_order', 'model.embed', 'model.embed_widths', 'model.channels', 'model.kernels',
      'model.strides', 'model.patch', 'model.cell', 'model.encoder', 'model.head', 'model.kernel', 'model.readout',
      'model.readout_width', 'model.handover', 'model.init', 'model.fuse_input', 'model.unroll'),
     {'model.kind': ('seq2frames',)}),
    (('model.hid_s', 'model.hid_t', 'model.n_s', 'model.n_t'), {'model.kind': ('simvp',)}),
    (('model.recon_order',), {'model.heads': ('recon', 'both')}),
    (('model.embed_widths',), {'model.embed': ('mlp',)}),
    (('model.patch',), {'model.embed': ('patch',)}),
    (('model.channels', 'model.kernels', 'model.strides'), {'model.embed': ('cnn',), 'model.readout': ('deconv',)}),
    (('model.kernel',), {'model.cell': ('convlstm',)}),
    (('model.readout_width',), {'model.readout': ('mlp',)}),
    (('loss.recon_weight',), {'model.heads': ('both',)}),
    (('loss.scheduled_steps',), {'model.feed': ('scheduled',)}),
)

_CNN = {
    'model.embed': 'cnn', 'model.readout': 'deconv', 'model.kernels': (4, 5, 4, 4, 3),
    'model.strides': (2, 2, 2, 1, 1), 'model.channels': (128, 256, 256, 256, 512), 'model.fuse_input': False,
    'model.encoder': (512, 512, 512), 'model.head': (512, 512, 512),
}
# 64 -> 31 -> 14 -> 6 px: the same network, cut before its map is too small to have a place
_CNN_MAP = {**_CNN, 'model.kernels': (4, 5, 4), 'model.strides': (2, 2, 2), 'model.channels': (128, 256, 256)}
_COPY = {
    'model.embed': 'flatten', 'model.readout': 'copy', 'model.encoder': (2048, 2048, 2048),
    'model.head': (2048, 2048, 4096),
}
_LINEAR_TWICE = {
    'model.embed': 'mlp', 'model.readout': 'mlp', 'model.readout_width': 1024, 'model.feed': 'hidden',
    'model.fuse_input': False,
}
_PAPER = {
    'model.embed': 'flatten', 'model.readout': 'linear', 'model.cell': 'peephole', 'model.init': 'uniform',
    'model.feed': 'teacher',
}

# Name -> {dotted key: value}, for frames of 64 px. Which heads there are, the feed where the notes vary it and the
# combination of range, activation and loss belong to a run, not to these. Counts are of an encoder with both heads; a
# head that is fed nothing has no input kernel in its first layer.
PARITY = {
    # 268 M. A library's LSTM over whole sequences; heads see zeros, the state is the frame, c starts at 0.
    'lstm': {'model.embed': 'flatten', 'model.readout': 'copy', 'model.encoder': (4096,), 'model.head': (4096,),
             'model.feed': 'zero', 'model.handover': 'h_only', 'model.fuse_input': True},
    # 403 M. Assumed: heads see their own last frame, and c is handed over.
    'lstmcell': {'model.embed': 'flatten', 'model.readout': 'copy', 'model.encoder': (4096,), 'model.head': (4096,),
                 'model.feed': 'output', 'model.fuse_input': False},
    # 486 M, 302 M with one head. The heads' top layer, 4096 wide, has no counterpart and starts at 0; so the encoder's
    # top layer (34 M) is read by nothing and learns nothing. Where its state went in the original is not known.
    'lstmcell-v0002': {**_COPY, 'model.fuse_input': False},
    # The same. Assumed: nothing but the way of computing sets the two apart.
    'copy': {**_COPY, 'model.fuse_input': True},
    # 18 M, which shows that the notes count both heads (12 M with one).
    'lstm_v0001': {**_LINEAR_TWICE, 'model.embed_widths': (1024, 256), 'model.encoder': (256,) * 3,
                   'model.head': (256,) * 3},
    # 33 M.
    'lstm_v0001-h512': {**_LINEAR_TWICE, 'model.embed_widths': (1024, 512), 'model.encoder': (512,) * 3,
                        'model.head': (512,) * 3},
    # 717 M. "512/1024/4096 channels and LSTM 4096 -> 2048". Assumed: five convolutions, since only a map of 1 px with
    # 4096 channels gives the LSTM 4096 inputs; how 512 and 1024 are spread over the first four; three cells.
    'cnn-lstmcell-v0001': {**_CNN, 'model.channels': (512, 512, 1024, 1024, 4096), 'model.encoder': (2048,) * 3,
                           'model.head': (2048,) * 3},
    # 39 M. Assumed: "later as above" means the network of the next but one.
    'cnn-lstmcell-v0002': _CNN,
    # 22 M. "256-wide". Assumed: the last convolution and the cells are.
    'cnn-lstmcell-v0003': {**_CNN, 'model.channels': (128, 256, 256, 256, 256), 'model.encoder': (256,) * 3,
                           'model.head': (256,) * 3},
    # 39 M. Assumed: cells as wide as the last convolution, so that no layer stands between.
    'cnn-lstmcell': _CNN,
    # 91 M. Assumed for both: the map of 6 px is flattened (9216), three cells of 512, one product back to the map.
    'cnn-flatten-lstmcell': _CNN_MAP,
    # 91 M.
    'cnn-flatten': {**_CNN_MAP, 'model.fuse_input': True},
    # 52 M. "Without flatten": the map of 6 px stays a map. Assumed: three ConvLSTM cells of 256 channels and side 3.
    'convlstm-noflatten': {**_CNN_MAP, 'model.cell': 'convlstm', 'model.kernel': 3, 'model.encoder': (256,) * 3,
                           'model.head': (256,) * 3, 'model.fuse_input': True},
    # 268 M: 84 M in the encoder, 92 M in either head. Its forecast runs free in the paper's tests.
    'paper': {**_PAPER, 'model.encoder': (2048, 2048), 'model.head': (2048, 2048)},
    # 168 M.
    'paper-1layer': {**_PAPER, 'model.encoder': (2048,), 'model.head': (2048,)},
}


def map_sides(size: int, kernels, strides) -> list[int]:
  """px of a side before each VALID convolution and after the last: 64, 31, 14, 6, 3, 1 for the default network."""
  sides = [size]
  for kernel, stride in zip(kernels, strides):
    sides.append((sides[-1] - kernel) // stride + 1)
  return sides


def check(config) -> None:
  """Raises ConfigError for a network that can't be built, or a key of it that nothing would read, naming the key.

  config is the whole configuration.
  """
  for key, options in CHOICES.items():
    choice(config, f'model.{key}', options)
  (_check_simvp if config.model.kind == 'simvp' else _check_seq2frames)(config)
  flat = flatten(config)
  for keys, readers in READ_IF:
    if not any(flat[key] in values for key, values in readers.items()):
      only = ' or '.join(f'config.{key} = {value!r}' for key, values in readers.items() for value in values)
      expect_default(config, keys, f'it is read with {only} alone')


def expect_default(config, keys, why: str) -> None:
  """Raises ConfigError for a key that was set although nothing reads it, for the reason `why`."""
  default, flat = flatten(shape.get_config()), flatten(config)
  for key in keys:
    if flat[key] != default[key]:
      raise ConfigError(f'config.{key} = {flat[key]!r}: expected {default[key]!r}, for {why}')


def _check_seq2frames(config) -> None:
  for key in ('encoder', 'head', 'embed_widths'):
    if not config.model[key] or any(type(w) is not int or w < 1 for w in config.model[key]):
      raise ConfigError(f'config.model.{key} = {config.model[key]}: expected a width for each layer, at least one')
  if type(config.model.unroll) is not int or config.model.unroll < 1:
    raise ConfigError(f'config.model.unroll = {config.model.unroll}: expected a whole number, at least 1')
  _check_embed(config.model, config.video.size)
  _check_readout(config.model, config.video.size)
  _check_handover(config.model)


def _check_simvp(config) -> None:
  m, size = config.model, config.video.size
  if m.heads != 'pred':
    raise ConfigError(f"config.model.heads = {m.heads!r}: simvp only forecasts; expected 'pred'")
  for key, least in (('hid_s', 1), ('hid_t', 1), ('n_s', 1), ('n_t', 2)):
    if m[key] < least:
      raise ConfigError(f'config.model.{key} = {m[key]}: expected at least {least}')
  halved = 2**(m.n_s // 2)
  if size % halved:
    raise ConfigError(f'config.model.n_s = {m.n_s}: halves the frame {m.n_s // 2} times, and config.video.size = '
                      f'{size} is no multiple of {halved}')


def _check_embed(m, size: int) -> None:
  if m.cell == 'convlstm' and m.embed not in ('cnn', 'patch'):
    raise ConfigError(f"config.model.embed = {m.embed!r}: convlstm needs a map; expected 'cnn' or 'patch'")
  if m.cell == 'convlstm' and m.kernel < 1:
    raise ConfigError(f'config.model.kernel = {m.kernel}: expected at least 1')
  if m.embed == 'patch':
    if m.cell != 'convlstm':
      raise ConfigError(f"config.model.embed = 'patch': makes a map, and config.model.cell = {m.cell!r} takes a "
                        "vector; expected 'flatten', 'mlp' or 'cnn'")
    if m.patch < 1 or size % m.patch:
      raise ConfigError(f'config.model.patch = {m.patch}: does not divide config.video.size = {size}')
  if m.embed == 'cnn' or m.readout == 'deconv':
    _check_convolutions(m, size)


def _check_convolutions(m, size: int) -> None:
  count = len(m.channels)
  for key in ('channels', 'kernels', 'strides'):
    if len(m[key]) != count or not m[key]:
      raise ConfigError(f'config.model.{key} has {len(m[key])} layers and config.model.channels {count}; expected as '
                        'many, and at least one')
    if any(type(n) is not int or n < 1 for n in m[key]):
      raise ConfigError(f'config.model.{key} = {m[key]}: expected whole numbers above 0')
  for i, (side, kernel) in enumerate(zip(map_sides(size, m.kernels, m.strides), m.kernels)):
    if side < kernel:
      raise ConfigError(f'config.model.kernels[{i}] = {kernel}: the map before that layer has a side of {side} px, '
                        f'from config.video.size = {size}; leave layers out or take smaller kernels and strides')


def _check_readout(m, size: int) -> None:
  pixels, of = size**2, f'the square of config.video.size = {size}'
  if m.cell == 'convlstm':
    fits = ('deconv',) if m.embed == 'cnn' else ('copy', 'linear', 'mlp')
    if m.readout not in fits:
      raise ConfigError(f'config.model.readout = {m.readout!r}: with convlstm and config.model.embed = {m.embed!r}, '
                        f'expected {" or ".join(map(repr, fits))}')
    pixels, of = m.patch**2, f'the square of config.model.patch = {m.patch}'
  if m.readout == 'copy' and m.head[-1] != pixels:
    raise ConfigError(f'config.model.head ends in {m.head[-1]}: with readout = copy the top state is the frame; '
                      f'expected {pixels}, {of}')
  if m.readout == 'mlp' and m.readout_width < 1:
    raise ConfigError(f'config.model.readout_width = {m.readout_width}: expected at least 1')


def _check_handover(m) -> None:
  if m.handover == 'top_only':
    if m.encoder[-1] != m.head[-1]:
      raise ConfigError(f'config.model.head ends in {m.head[-1]} and config.model.encoder in {m.encoder[-1]}: with '
                        'handover = top_only they must be equal')
    return
  if len(m.encoder) > len(m.head):
    raise ConfigError(f'config.model.encoder has {len(m.encoder)} layers and config.model.head {len(m.head)}: the '
                      f'states of the upper ones would go nowhere with handover = {m.handover}')
  if not any(a == b for a, b in zip(m.encoder, m.head)):
    raise ConfigError(f'config.model.head = {tuple(m.head)}: no layer is as wide as that of config.model.encoder = '
                      f'{tuple(m.encoder)}, so no state could be handed over')
