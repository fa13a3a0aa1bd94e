"""python docs/continuation.py: draws docs/continuation.png, the rates of a run and of two ways to go on from it."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import jax
import jax.numpy as jnp
import numpy as np

from lab import config, plot, schedules


def rates(first: int, last: int, joint: schedules.Joint, **changes) -> tuple[list[int], list[float]]:
  """Updates first to last of a run of 60,000, and their learning rates."""
  o = config.core().optim
  o.update({'learning_rate': 1e-3, 'end_rate': 5e-5, 'warmup_steps': 1000, **changes})
  updates = np.arange(first, last + 1, 10)
  found = jax.vmap(schedules.make(o, 60_000), (0, None))(jnp.asarray(updates - 1), joint)
  return updates.tolist(), np.asarray(found).tolist()


def main() -> None:
  """Draws the picture."""
  whole = rates(1, 30_000, schedules.nowhere(), schedule_steps=30_000)
  joint = schedules.Joint(jnp.int32(30_000), jnp.float32(whole[1][-1]))
  series = {'the run that is continued': whole,
            'continuation=blend': rates(30_000, 60_000, joint, continuation_steps=2000),
            'continuation=restart': rates(30_000, 60_000, joint, continuation='restart', continuation_steps=2000)}
  figure = plot.lines(series, x_label='step (updates)', y_label='learning rate (per update)',
                      title='Two ways to go on from step 30,000', marks={'continue_from': 30_000})
  figure.set_size_inches(9, 3.6)
  figure.savefig(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'continuation.png'), dpi=110)


if __name__ == '__main__':
  main()
