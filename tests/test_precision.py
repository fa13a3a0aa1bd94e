"""Training in bfloat16 against training in float32: the same losses, update after update, within a stated bound."""

import os

import jax
import numpy as np
import pytest

from lab import config as configs, mesh as meshes, optim, train
from lab.task import load

STEPS, BATCH = 12, 8
# recipe -> the largest difference of a loss, relative to the float32 one
# (measured: gpt .0001, dvae .009, video .00004, mlm .0001, pose .006, agent .0003)
BOUNDS = {'gpt': .002, 'video': .002}
LONG = {'mlm': .002, 'dvae': .03, 'pose': .03, 'agent': .002} if os.environ.get('LAB_LONG') else {}


def losses(recipe, dtype):
  config = configs.read(f'configs/{recipe}.py:smoke')
  config.model.dtype, config.input.batch_size, config.optim.learning_rate = dtype, BATCH, 3e-3
  task, mesh = load(config), meshes.make(config.mesh)
  with jax.set_mesh(mesh):
    batches = train.feed(task.source('train'), config, range(BATCH))
    tx, stream = optim.make(config.optim, STEPS), iter(batches)
    like = train.abstract(task, tx, config, batches.spec(1), mesh)
    layout = jax.tree.map(lambda x: x.sharding, like)
    state = jax.jit(train.initial(task, tx, config, batches.spec(1)), out_shardings=layout)()
    step, found = train.make_step(task, tx, config, like, mesh), []
    for _ in range(STEPS):
      state, sums = step(state, meshes.place_stacked(mesh, [next(stream)], BATCH))
      found.append(float(sums['loss'][0]))
  return np.array(found)


@pytest.mark.parametrize('recipe, bound', (BOUNDS | LONG).items())
def test_bfloat16_learns_as_float32_does(recipe, bound):
  exact = losses(recipe, 'float32')
  rounded = losses(recipe, 'bfloat16')
  assert exact[1:].min() < exact[0]
  np.testing.assert_allclose(rounded, exact, rtol=bound)
  assert (rounded != exact).any()      # the dtype reached the products
