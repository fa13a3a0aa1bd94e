"""Pose on the photographs that ship with the lab."""
from lab.systems.pose.config import get_config as shape


def get_config(variant: str = ''):
  config = shape()
  config.data.eval = 'train'          # the people it is trained on: the sample is there to be learnt by heart
  config.model.backbone = 'small'
  config.model.dtype = 'float32'
  return config
