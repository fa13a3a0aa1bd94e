"""The shape of a pose configuration: every key, its default and its unit. Recipes in configs/ override these."""

from ml_collections import ConfigDict

from lab import config as core


def get_config() -> ConfigDict:
  """The full-size network of the 2018 paper's kind (PAF stages, then heatmap stages) on COCO."""
  config = core.core()
  config.task = 'lab.systems.pose.task'
  _pictures(config)
  _network(config)
  config.lock()
  return config


def _pictures(config) -> None:
  """What the network sees."""
  config.data = ConfigDict({
      'dir': 'sample',           # folder of a prepared data set; 'sample': the photographs that ship with the lab
      'train': 'train',          # split trained on
      'eval': 'val',             # split evaluated
      'decoded_gib': 4.0,        # GiB a process for training pictures, decoded once, in equal parts for its workers
      'people': 32,              # rows a picture; training drops the smallest beyond, evaluation refuses
  })
  config.image = ConfigDict({
      'size': 368,               # px, side of the square that the network sees; a multiple of the stride
  })
  config.augment = ConfigDict({
      'on': True,                # False: trains on the letterboxed picture alone
      'mirror': 0.5,             # probability
      'scale_min': 0.7,          # relative to the scale at which the whole picture fits
      'scale_max': 1.5,
      'rotate_deg': 30.0,        # uniform in +-
      'shift': 0.15,             # of the crop's centre, uniform in +- share of the side
      'brightness': 0.15,        # added, uniform in +- share of full range
      'contrast': 0.3,           # factor uniform in 1 +- this
      'saturation': 0.2,         # factor uniform in 1 +- this
      'hue': 0.05,               # uniform in +- turns
  })


def _network(config) -> None:
  """What it is, learns and is read out with."""
  config.model = ConfigDict({
      'backbone': 'vgg19_10',    # vgg19_10, vgg16_7 (stride 8) or small (stride 4)
      'preprocess': 'imagenet',  # what its weights expect: imagenet (RGB, mean, deviation), caffe (BGR - mean), unit
      'paf_stages': 4,
      'heatmap_stages': 2,
      'width_first': 96,         # of the blocks in the first stage of each kind
      'width': 128,              # of the others
      'blocks': 5,               # three 3x3 convolutions each, outputs concatenated
      'head_first': 256,         # 1x1 convolution before the output, first stage of each kind
      'head': 512,
      'feature': 128,            # channels of the backbone's output
      'cascade': True,           # stages see what earlier stages predicted
      'norm': 'none',            # none or group
      'dropout': 0.0,            # before each block
      'remat': False,            # recompute each stage in the backward pass
      'dtype': 'bfloat16',       # of the convolutions; heads and loss are float32
  })
  config.target = ConfigDict({
      'paf': 'hard',             # hard (paper; people averaged) or gaussian (blobs at both ends; people summed)
      'sigma_px': 7.0,           # of a heatmap blob, px of the image the network sees
      'paf_width_px': 8.0,       # hard: half width of a limb
      'paf_s_px2': 96.0,         # gaussian: s of exp(-d^2/s)
      'background': True,        # one more heatmap channel: 1 - maximum of the others
      'redundant_limbs': True,   # 7 limbs beside the tree of 17, to reconnect fragments
  })
  config.loss = ConfigDict({
      'paf_weight': 5.0,
      'heatmap_weight': 1.0,
  })
  config.decode = ConfigDict({
      'peaks': 32,               # candidates a keypoint channel
      'peak_min': 0.1,           # heat of a candidate
      'samples': 10,             # points of a line integral
      'sample_min': 0.05,        # field along the limb at a point that counts as valid
      'valid_share': 0.8,        # of the points
      'near_score': 0.05,        # of a limb shorter than a cell where its field is silent; 0 = refuse it
      'matching': 'greedy',      # greedy or hungarian
      'merge': True,             # join fragments without a common part
      'parts_min': 2,            # of a person
      'score_min': 0.2,          # mean part score of a person
      'flip': False,             # average with the mirrored picture
  })
