"""The shape of a video configuration: every key, its default and its unit. Recipes in configs/ override these."""

from ml_collections import ConfigDict

from lab import config as core


def get_config() -> ConfigDict:
  """Moving MNIST, 10 frames seen and 10 forecast: the composite LSTM of two layers with a linear readout."""
  config = core.core()
  config.task = 'lab.systems.video.task'
  config.data = ConfigDict({
      'dir': 'sample',           # folder of a prepared data set; 'sample': MNIST's 10,000 test digits, in the lab
      'train': 'train',          # split trained on
      'eval': 'validation',      # split evaluated
      'digits': 2,               # of a generated sequence, 1 to 3
      'pool': 1,                 # generated: px of a digit's side that become one, by their mean
      'speed_min': 0.1,          # generated: canvas sides a frame, uniform from here
      'speed_max': 0.1,          # to here
      'bounce': 'clamp',         # generated: clamp (the paper's code stops at the wall) or reflect
  })
  config.video = ConfigDict({
      'size': 64,                # px, side of a frame
      'past': 10,                # frames seen
      'future': 10,              # frames forecast
  })
  _network(config)
  config.loss = ConfigDict({
      'combo': '0sb',            # range, activation, loss: 0sb 0sm 0nm 1tm 1nm 5tm; lab/systems/video/output.py
      'multiply': 1.0,           # the readout, before the activation
      'recon_weight': 1.0,       # heads = both: of the reconstruction, beside the forecast
      'scale': 1.0,              # of the whole loss; batch x frames makes the sum that the paper's code descends
      'scheduled_steps': 0,      # feed = scheduled: updates until no true frame is fed any more; 0: total_steps
  })
  config.lock()
  return config


def _network(config) -> None:
  config.model = ConfigDict({
      'kind': 'seq2frames',      # recurrent, step by step; or simvp, all frames at once by convolutions
      'heads': 'both',           # recon (the past), pred (the future) or both
      'recon_order': 'reversed', # of recon: last seen frame first; or forward
      'feed': 'output',          # into a head: zero, output (its own last frame), hidden (its own last state), teacher
                                 # (the true last frame) or scheduled (true with a probability that falls to 0)
      'embed': 'flatten',        # what a cell sees of a frame: flatten, mlp, cnn or patch; a map for convlstm, or else
                                 # a vector
      'embed_widths': (1024, 256),         # mlp: of its two layers
      'channels': (128, 256, 256, 256, 512),   # cnn: of its layers; a deconv readout mirrors them, after any embed
      'kernels': (4, 5, 4, 4, 3),
      'strides': (2, 2, 2, 1, 1),
      'patch': 4,                # px, side of a square that patch folds into channels
      'cell': 'lstm',            # lstm, peephole, gru or convlstm
      'encoder': (2048, 2048),   # widths of the layers; channels of a convlstm
      'head': (2048, 2048),      # of either head
      'kernel': 5,               # convlstm: side of its convolutions
      'readout': 'linear',       # copy (the top state is the frame), linear, mlp or deconv
      'readout_width': 1024,     # mlp: of its inner layer
      'handover': 'all',         # of the encoder's states: all, h_only (cells start at 0) or top_only (so do the lower
                                 # layers)
      'init': 'default',         # default (Glorot; recurrent orthogonal) or uniform (+-.01, peepholes +-.1, biases 0)
      'fuse_input': True,        # inputs of all steps in one product where they are known before
      'unroll': 1,               # steps of time an iteration of the loops over them; as many as there are, or more,
                                 # are faster on a GPU, and take longer to compile
      'dtype': 'bfloat16',       # of products, but a deconv readout's; parameters, cell states, logits and loss are
                                 # float32
      # simvp reads heads, dtype and these alone; a key that the chosen network does not read must stay as it is
      'hid_s': 64,               # simvp: channels of the spatial encoder and decoder
      'hid_t': 512,              # simvp: channels of the translator
      'n_s': 4,                  # simvp: layers of the spatial encoder, and of the decoder
      'n_t': 8,                  # simvp: blocks of the translator
  })
