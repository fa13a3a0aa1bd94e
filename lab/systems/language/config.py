"""The shape of a language configuration: every key, its default and its unit. Recipes in configs/ override these."""

from ml_collections import ConfigDict

from lab import config as core


def get_config() -> ConfigDict:
  """Masked language modelling: a body of 6 layers 768 wide on windows of 128 tokens."""
  config = core.core()
  config.task = 'lab.systems.language.task'
  config.objective = 'mlm'       # mlm, gpt or classify
  config.data = ConfigDict({
      'dir': 'sample',           # folder of a prepared corpus, CoLA or SST-2; 'sample': texts that ship with the lab
      'train': 'train',          # split trained on
      'eval': 'validation',      # split evaluated
      'length': 128,             # tokens of a window, with its special ones
      'documents': 'apart',      # tokens see their own document alone; or together: the whole window
      'labels': (),              # classify: names of the labels in the model's order; (): the data set's
      'sample': 'cola',          # classify on the sample: cola (sentences with two words exchanged) or sst2 (by whom)
  })
  _body(config)
  config.optim.stacked = 'blocks/'
  config.mlm = ConfigDict({
      'share': 0.15,             # of a window's tokens that are to be guessed
  })
  config.distill = ConfigDict({  # mlm: learn from a teacher as well; lab/systems/language/distill.py
      'teacher': '',             # its run, path[:best|latest|STEP], with the same tokenizer; '': none
      'begin': 'layers',         # as every k-th of the teacher's layers, with its embeddings and head; or afresh
      'temperature': 2.0,        # that both distributions are softened by
      'kl': 2.5,                 # weight, beside the cross-entropy's 1, of temperature^2 KL(teacher || student)
      'states': 0.5,             # of 1 - cosine of the last states
  })
  config.predict = ConfigDict({  # --mode=predict
      'verb': '',                # fill (mlm), generate or score (gpt), classify; '': the first of the objective's
      'top': 5,                  # fill: candidates for each masked word
      'tokens': 200,             # generate: so many, or to the end of the text
      'temperature': 0.8,        # generate: 0 takes the likeliest token
      'top_k': 0,                # generate: among so many likeliest tokens; 0: all
      'top_p': 1.0,              # generate: among the likeliest that together have this probability
      'stop': '',                # generate: the text ends before this
  })
  config.lock()
  return config


def _body(config) -> None:
  config.model = ConfigDict({
      'width': 768,
      'layers': 6,
      'heads': 12,
      'hidden': 0,               # of the MLP; 0: 4 x width
      'causal': False,           # a token sees those before it alone; gpt needs it
      'activation': 'gelu',      # gelu (exact), gelu_tanh, relu2, geglu or swiglu
      'norm': 'pre',             # before each branch, with one more at the end; or post (BERT's)
      'norm_eps': 1e-5,
      'embed_norm': False,       # of the embeddings' sum (BERT's)
      'bias': True,              # of products and norms
      'qk_norm': False,          # RMS norm of queries and keys, a head each
      'positions': 'learned',    # learned, sinusoid or rope
      'types': 0,                # token types (BERT's: 2); every token is of the first
      'deviation': 0.02,         # of weights at the start; about 1 / sqrt(width) suits narrow bodies
      'tied': True,              # the head's matrix is the embedding's
      'transform': True,         # mlm: dense, GELU, norm before the head's matrix
      'pool': 'cls',             # classify: the state of the first token, the mean, or the last
      'pooler': False,           # classify: a dense and a tanh before the head (BERT's)
      'dropout': 0.1,            # of embeddings and branches, and of what is pooled
      'attention_dropout': 0.0,  # of attention's weights
      'attention': 'auto',       # plain, flash (a GPU's kernel), or auto
      'remat': False,            # recompute a layer in the backward pass instead of keeping what it computed
      'remat_keep': 'nothing',   # of a recomputed layer: nothing, or the products of its weights: faster, more memory
      'unroll': 1,               # layers an iteration of the loop over them; all of them are faster on a GPU, and
                                 # take longer to compile
      'dtype': 'bfloat16',       # of products; parameters, norms, softmax and losses are float32
  })
