"""The shape of a dVAE configuration: every key, its default and its unit. Recipes in configs/ override these."""

from ml_collections import ConfigDict

from lab import config as core


def get_config() -> ConfigDict:
  """ARC grids on a canvas of 32 x 32 cells, rebuilt from 64 codes of 512."""
  config = core.core()
  config.task = 'lab.systems.dvae.task'
  config.data = ConfigDict({
      'dir': 'sample',           # folder of prepared grids; 'sample': ARC-AGI-1, in the lab; 'rectangles': made up
      'train': 'train',          # split trained on
      'eval': 'evaluation',      # split evaluated
      'side': 32,                # cells, side of the canvas; of the sample, larger grids are left out
      'layout': 'projected',     # a cell a token, row by row; or sequence: rows one after the other, each with an end
  })
  config.augment = ConfigDict({  # of what is trained on
      'on': True,
      'colours': True,           # any permutation of the ten
      'symmetries': True,        # one of the square's eight
      'joined': 0.0,             # chance that a grid is cut and has the next one of its batch beside or below it
      'translate': 0.0,          # chance that a grid lies anywhere on the canvas, not at its top left
  })
  _network(config)
  config.optim.stacked = 'blocks/'
  config.optim.decay_not = r'(tokens|places|queries\d*|codebook|slots|scale)$'
  config.quantizer = ConfigDict({
      'kind': 'reinmax',         # none, gumbel, st_gumbel, reinmax, vq_ema or fsq
      'tau': {'start': 1.0, 'end': 0.0625, 'steps': 150_000, 'kind': 'cosine', 'delay': 0},   # gumbel's and st_gumbel's
      'reinmax_tau': 1.0,        # its own, at least 1
      'hard_from': -1,           # gumbel: update from which it is st_gumbel; -1: never
      'levels': (8, 8, 8),       # fsq: of its channels; their product is the number of codes
      'decay': 0.99,             # vq_ema: of the averages
      'least': 0.1,              # vq_ema: a code that is used less often, on average, starts anew
  })
  config.loss = ConfigDict({
      'pad_weight': 0.1,         # of a token outside of the grid, beside 1
      'gamma': 0.0,              # focal loss: (1 - p)^gamma
      'stablemax': False,        # in place of softmax (arXiv 2501.04697)
      'kl': 0.1,                 # weight of KL(q || uniform), nats a latent
      # of a batch as a whole, with optim.accumulate of each micro-batch:
      'mi': 0.0,                 # weight of the mutual information of grid and code, nats a latent
      'tc': 0.0,                 # weight of the total correlation of the latents, nats a latent
      'dwkl': 0.0,               # weight of the latents' own KL to uniform, nats a latent
      'usage': 0.1,              # weight of KL(mean over batch and latents || uniform), nats; from the start
      'relu': False,             # mi, tc and dwkl whose mean is below 0 are no loss
      'mixture': 'batch',        # estimate of q(z): batch, mws, mss, or running (its average over updates)
      'marginal_decay': 0.99,    # running: of that average
      'commitment': 0.25,        # vq_ema: weight of the squared distance of latents to their code
      # factor of kl, mi, tc and dwkl
      'beta': {'start': 0.0, 'end': 1.0, 'steps': 10_000, 'kind': 'cosine', 'delay': 0},
  })
  config.mask = ConfigDict({     # share of a grid's tokens that the encoder does not see, uniform from 0 to `most`
      'most': {'start': 0.0, 'end': 0.0, 'steps': 10_000, 'kind': 'cosine', 'delay': 0},
  })
  config.predict = ConfigDict({  # --mode=predict
      'verb': 'rebuild',         # grids from themselves; decode: from codes; interpolate: between two
      'steps': 8,                # interpolate: grids from one end to the other
  })
  config.lock()
  return config


def _network(config) -> None:
  config.model = ConfigDict({
      'width': 256,
      'heads': 8,
      'layers': 4,               # of the encoder, and of the decoder
      'latents': 64,             # N, codes of a grid
      'codes': 512,              # C, there are so many; of fsq the product of its levels
      # from tokens to latents and back: perceiver, learnt queries through blocks; lattice, each has its share of the
      # grid; chain, halves after halves
      'pool': 'perceiver',
      'pool_layers': 2,          # perceiver: blocks
      'absolute': True,          # a learnt vector for each row and column, added to what the encoder starts from
      'slots': True,             # a learnt vector for each place of a code
      'distinct': False,         # lattice: codes tell of each different row and column once; the header, which they are
      'deviation': 0.02,         # of weights at the start; about 1 / sqrt(width) suits narrow networks
      'dropout': 0.0,
      'attention': 'auto',       # plain, flash (a GPU's kernel), or auto
      'remat': False,            # recompute a layer in the backward pass instead of keeping what it computed
      'unroll': 1,               # layers an iteration of the loop over them; all of them are faster on a GPU, and
                                 # take longer to compile
      'dtype': 'bfloat16',       # of products; parameters, norms, softmax and losses are float32
  })
