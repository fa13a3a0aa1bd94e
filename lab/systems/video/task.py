"""Video: frames seen -> the same frames rebuilt, and the next ones forecast.

Srivastava, Mansimov & Salakhutdinov 2015, arXiv 1502.04681.
"""

import functools
import logging

import jax
import jax.numpy as jnp
from data_pipelines import clip_inputs, clips, moving_mnist
from jax.sharding import PartitionSpec as P

from lab.config import choice, flatten
from lab.metrics import ratios
from lab.systems.video import draw, generate, model, output, quality, registry
from lab.task import ConfigError, Task

log = logging.getLogger('lab')
HEADS = {'recon': ('recon',), 'pred': ('pred',), 'both': ('recon', 'pred')}
GENERATED = tuple(f'data.{key}' for key in ('digits', 'pool', 'speed_min', 'speed_max', 'bounce'))
TRAINED = ('mse_per_frame', 'bce_nats_per_frame')       # logged in training; the rest takes time, and is evaluation's


def make_task(config) -> Task:
  """The video task of a configuration. Raises ConfigError for settings that don't fit together."""
  check(config)
  out = output.parse(config.loss.combo, config.loss.multiply)
  net = model.make(config, out.activate)
  lengths = {'recon': config.video.past, 'pred': config.video.future}
  lengths = {h: lengths[h] for h in HEADS[config.model.heads]}

  see, judge = functools.partial(frames, config), functools.partial(sums, config, out)
  weigh = functools.partial(terms, config, out)

  def run(params, past, truth=None, use=None):
    """head -> (logits, top states) and 'encoder' -> top states; without truth each head feeds on its own frames."""
    return net.apply({'params': params}, out.to_range(past), lengths,
                     truth and {h: out.to_range(x) for h, x in truth.items()}, use)

  def init(key, batch):
    return net.init(key, out.to_range(see(batch)[0]), lengths)['params'], {}

  def loss(params, stats, batch, key, step):
    past, truth = see(batch)
    fed = config.model.feed in ('teacher', 'scheduled')
    made = run(params, past, truth, _use(config, truth, key, step)) if fed else run(params, past)
    kept = {k: v for k, v in judge(made, truth, batch['mask']).items() if k.endswith(TRAINED)}
    return weigh(made, truth, batch['mask']), (stats, kept)

  def measure(params, stats, batch):
    """Errors of the free run: no head sees a true frame beyond what the encoder has seen."""
    del stats
    (past, truth), mask = see(batch), batch['mask']
    made = run(params, past)
    found = judge(made, truth, mask) | quality.baselines(past, truth['pred'], mask)
    for name in made if config.model.kind == 'seq2frames' else ():
      found |= quality.state_range(made[name] if name == 'encoder' else made[name][1], mask, name)
    if config.model.feed == 'teacher':
      taught = run(params, past, truth, _use(config, truth, None, None))
      found |= {k.replace('recon_', 'recon_teacher_forced_'): v for k, v in judge(taught, truth, mask).items()
                if k.startswith('recon_') and k.endswith(TRAINED)}
    each = weigh(made, truth, mask)
    errors = [found[f'{h}_mse_per_frame'] for h in lengths]
    found['mse_per_frame'] = tuple(sum(column) for column in zip(*errors))     # of all heads, whatever is trained on
    found['loss'] = (sum((total / lengths[h] for h, (total, _) in each.items()), jnp.float32(0)), mask.sum())
    return found

  def predict(params, stats, batch, key):
    del stats, key
    past, truth = see(batch)
    made = {h: in_time(config, h, to_bytes(out.to_unit(out.activate(x[0])))) for h, x in run(params, past).items()
            if h in lengths}
    return {**made, 'past': to_bytes(past), 'future': to_bytes(truth['pred'])}

  return Task(init=init, loss=loss, measure=measure, predict=predict, source=functools.partial(source, config),
              records=records, picture=picture, rules=rules(config), finish=functools.partial(finish, config, out),
              inputs=functools.partial(clip_inputs.clips, size=config.video.size, past=config.video.past,
                                       future=config.video.future))


def source(config, split):
  """A split of the data set; ConfigError for a key of the generator that was set where the sequences are fixed, and for
  frames in which generated digits could not move.
  """
  found = moving_mnist.source(config.data.dir, config.data[split], config.data, config.video)
  if found.decode is clips.decode:
    registry.expect_default(config, GENERATED, f'the sequences in {config.data.dir} are fixed')
  else:
    check_room(config)
  return found


def frames(config, batch):
  """The frames seen f32[B, P, S, S] and those that each head has to give, in its order, all in (0, 1)."""
  clip = generate.clip(batch, config)
  past, future = clip[:, :config.video.past], clip[:, config.video.past:]
  return past, {'recon': in_time(config, 'recon', past), 'pred': future}


def in_time(config, head, x):
  """[B, T, ...] from the order in which a head gives its frames to that of time; and back."""
  return x[:, ::-1] if head == 'recon' and config.model.recon_order == 'reversed' else x


def terms(config, out, made, truth, mask):
  """head -> (weighted loss f32[], weight f32[]), a sum over sequences and frames, for the heads that `made` has."""
  weights = {'recon': config.loss.recon_weight, 'pred': 1.0}
  return {h: (config.loss.scale * weights[h] * (out.training_loss(made[h][0], truth[h]).sum(1) * mask).sum(),
              mask.sum() * truth[h].shape[1]) for h in weights if h in made}


def sums(config, out, made, truth, mask):
  """What is measured of every head that `made` has, frame by frame in the order of time; see quality.py."""
  found = {}
  for h in truth:
    if h in made:
      logits, right = in_time(config, h, made[h][0]), in_time(config, h, truth[h])
      found |= quality.sums(out.to_unit(out.activate(logits)), logits if out.loss_from_logits else None, right, mask, h)
  return found


def check(config) -> None:
  """Raises ConfigError for settings that can't run, before any device or file is touched."""
  choice(config, 'model.heads', tuple(HEADS))
  choice(config, 'model.recon_order', ('reversed', 'forward'))
  choice(config, 'data.bounce', ('clamp', 'reflect'))
  for key in ('train', 'eval'):
    choice(config, f'data.{key}', ('train', 'validation', 'test'))
  for key, low, high in (('data.digits', 1, 3), ('video.past', 1, 1000), ('video.future', 1, 1000),
                         ('loss.scheduled_steps', 0, 10**9)):
    if not low <= flatten(config)[key] <= high:
      raise ConfigError(f'config.{key} = {flatten(config)[key]}: expected {low} to {high}')
  if config.data.pool < 1 or 28 % config.data.pool:
    raise ConfigError(f'config.data.pool = {config.data.pool}: expected a divisor of 28, the side of a digit')
  if config.data.dir == 'sample':          # of another folder it takes a look to know whether there are digits
    check_room(config)
  if not 0 <= config.data.speed_min <= config.data.speed_max <= 1:
    raise ConfigError(f'config.data.speed_min = {config.data.speed_min}, speed_max = {config.data.speed_max}: expected '
                      '0 <= speed_min <= speed_max <= 1')
  for key in ('recon_weight', 'scale'):
    if config.loss[key] <= 0:
      raise ConfigError(f'config.loss.{key} = {config.loss[key]}: expected more than 0')
  output.parse(config.loss.combo, config.loss.multiply)
  model.check(config)


def check_room(config) -> None:
  """Raises ConfigError where a digit fills the frame."""
  if config.video.size <= 28 // config.data.pool:
    raise ConfigError(f'config.video.size = {config.video.size}: a digit of {28 // config.data.pool} px must fit in '
                      'and move')


def _use(config, truth, key, step):
  """head -> bool[B, T]: where the true last frame is fed; with 'scheduled' by chance, less and less often."""
  if config.model.feed == 'teacher':
    return {h: jnp.ones(x.shape[:2], bool) for h, x in truth.items()}
  share = 1 - step / (config.loss.scheduled_steps or config.total_steps)
  return {h: jax.random.bernoulli(jax.random.fold_in(key, i), jnp.clip(share, 0, 1), x.shape[:2])
          for i, (h, x) in enumerate(truth.items())}


def to_bytes(frames):
  """Frames in (0, 1) -> u8, clipped."""
  return jnp.round(255 * jnp.clip(jnp.nan_to_num(frames), 0, 1)).astype(jnp.uint8)


def rules(config):
  """Which axis of which array may be split over devices; only what this configuration has."""
  split = ('fsdp', 'tensor')
  if config.model.kind == 'simvp':
    return ((r'kernel$', P(None, None, None, split), 'output channels of a convolution are independent'),)
  maps = config.model.cell == 'convlstm'
  gates = P(None, None, None, split) if maps else P(None, split)
  found = [(r'layer\d+/(input|recurrent)$', gates, 'gates are independent of each other')]
  if config.model.embed in ('mlp', 'cnn'):
    found.append((r'embed/.*kernel$', P(None, None, None, split) if config.model.embed == 'cnn' else P(None, split),
                  'outputs of a layer are independent'))
  if config.model.readout in ('linear', 'mlp') and not maps:
    found.append((r'readout/.*kernel$', P(None, split), 'pixels are independent'))
  elif config.model.readout == 'deconv':
    m = config.model
    found.append((r'readout/out/kernel$', P(), 'one output channel'))
    if len(m.channels) > 1:
      found.append((r'readout/deconv\d+/kernel$', P(None, None, None, split), 'output channels are independent'))
    side = registry.map_sides(config.video.size, m.kernels, m.strides)[-1]
    if not maps and (m.head[-1] != m.channels[-1] or side > 1):
      found.append((r'readout/dense0/kernel$', P(None, split), 'pixels of the map are independent'))
  elif maps and config.model.readout != 'copy':
    found.append((r'readout/.*kernel$', P(), 'a product a patch, small'))
  return tuple(found)


def finish(config, out, totals):
  """The ratios; warns where no state at all could reach the data through the readout."""
  found = ratios(totals)
  low, high = out.reachable(-1, 1)                 # states of an LSTM lie in (-1, 1)
  if config.model.kind == 'seq2frames' and config.model.readout == 'copy' and (low > 0.01 or high < 0.99):
    for head in HEADS[config.model.heads]:
      log.warning('%s: only pixels of %.3f to %.3f can be drawn, for the states (%.2f to %.2f so far) lie in (-1, 1), '
                  'and pixels are 0 to 1. A linear readout, or config.loss.multiply, opens the range', head, low, high,
                  found.get(f'{head}_h_min', -1), found.get(f'{head}_h_max', 1))
  return found


def records(outputs, batch):
  """A record a sequence: its name or number, and the squared error of each forecast frame where its truth is known."""
  for i in range(len(outputs['past'])):
    past, recon, future, pred = _shown(outputs, batch, i)
    record = {'name': batch['name'][i]} if 'name' in batch else {'record': int(batch['record'][i])}
    for name, made, truth in (('recon', recon, past), ('pred', pred, future)):
      if made is not None and truth is not None:
        wrong = (made[:len(truth)] / 255.0 - truth / 255.0)**2
        record[f'{name}_mse_per_frame'] = [round(float(x), 4) for x in wrong.sum((1, 2))]
    if 'name' in batch and pred is not None:
      record['forecast'] = pred.tolist()
    yield record


def picture(outputs, batch):
  """name -> a strip u8[H, W, 3] and a film u8[T, H, W, 3] of every sequence."""
  found = {}
  for i in range(len(outputs['past'])):
    name = batch['name'][i] if 'name' in batch else f'{int(batch["record"][i]):06d}'
    shown = _shown(outputs, batch, i)
    found |= {name: draw.strip(*shown), f'{name}_film': draw.film(*shown)}
  return found


def _shown(outputs, batch, i):
  """past, recon, future, pred of row i, u8[T, S, S]; None for what there is not."""
  future = outputs['future'][i]
  if 'known' in batch:                       # a user's clip may end before the forecast does
    future = future[:max(0, int(batch['known'][i]) - len(outputs['past'][i]))]
  return (outputs['past'][i], *(outputs[h][i] if h in outputs else None for h in ('recon',)),
          future if len(future) else None, outputs['pred'][i] if 'pred' in outputs else None)
