"""The shape of a text tree's configuration: every key, its default and its unit. Recipes in configs/ override these."""

from ml_collections import ConfigDict

from lab import config as core


def get_config() -> ConfigDict:
  """Words, sentences and paragraphs of made-up documents, each as one vector."""
  config = core.core()
  config.task = 'lab.systems.agent.task'
  config.data = ConfigDict({
      'dir': 'templates',        # folder of prepared trees; 'templates': made up; 'sample': a book of the lab's own
      'train': 'train',          # split trained on
      'eval': 'validation',      # split evaluated
      # one number a level, words first; as the data were prepared:
      'rows': (160, 32, 12),     # of a pack, U_l
      'lengths': (12, 12, 4),    # units of a row with its terminator, L_l
      'nodes': (224, 32),        # of a level below the rows of one above, one number less; (): all places are decoded
      'mixed': (),               # share of each level's units that training replaces by others of the pack; (): none
      'joined': False,           # neighbours share a row where they fit, with JOIN between
  })
  config.model = ConfigDict({
      'widths': (32, 64, 128, 192),  # of bytes, and of the vectors of each level
      'heads': 4,
      'layers': 1,               # of each level's encoder, and of its decoder
      'repeats': 1,              # times that these are gone through, with the same weights (arXiv 1807.03819)
      'hidden': 2,               # width inside MLPs, in widths of the level
      'decompressor': 'slots',   # from a vector to its units: slots, all at once; or lstm, one after the other
      'compressor': 'attention', # from units to their vector: attention; or max
      'checker': 2,              # width inside the checker of coherence, in widths of the vector
      'questions': 0,            # of the memory that a document's sentences share; 0: no memory
      'noise': 0,                # numbers that a generator makes a vector of the top level of; 0: no generator
      'dropout': 0.0,
      'remat': False,            # recompute a layer in the backward pass instead of keeping what it computed
      'dtype': 'float32',        # of products: bfloat16 or float32; parameters, norms, softmax and losses are float32
  })
  config.loss = ConfigDict({     # weights; a level's losses are means over its nodes
      'reconstruct': 1.0,        # cross-entropy of units, and of terminators threefold
      'length': 0.3,             # cross-entropy of the number of units
      'join': 0.3,               # with data.joined: cross-entropy of whether a unit is JOIN
      'difference': 0.05,        # of decoded vectors to those that they stand for
      'masked': 0.1,             # cross-entropy of a hidden unit
      'coherence': 0.1,          # squared error of the share of replaced units
      'plausible': 0.0,          # squared share of replaced units that a decoded unit's checker sees in it
      'gate': 0.001,             # with a memory: how wide it stands open
      'levels': (),              # factor of all losses of each level, 0 to K; (): 1
      'path': 1.0,               # factor of reconstruct, length and join for nodes decoded from above; 0: none are
      'unify': 4.4,              # nats that the cross-entropy of V classes is scaled to, times 1 / ln V; 0: as it is
  })
  config.predict = ConfigDict({  # --mode=predict
      # rebuild: text from its vectors, level by level; encode: its vectors; neighbours: of each node the nearest ones;
      # interpolate: from one sentence to another; decode: text of a vector; generate: of drawn ones
      'verb': 'rebuild',
      'steps': 8,                # interpolate: sentences from one end to the other
      'nearest': 5,              # neighbours: so many
  })
  config.lock()
  return config
