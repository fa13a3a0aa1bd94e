"""Stats that begin with the data do so once, of the first batch, and outside of the step, which has no branch."""

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from lab import config as configs, logs, lr_find, mesh as meshes, optim, train
from lab.task import load
from tests import toy

RECIPES = {'gpt': {}, 'mlm': {}, 'video': {}, 'pose': {}, 'agent': {},
           'dvae': {'quantizer.kind': 'vq_ema', 'loss.kl': 0, 'loss.beta.steps': 10_000}}


def beginning(config):
  """The toy, of whose stats one is what the run began with."""
  built = toy.make_task(config)

  def loss(params, stats, batch, key, step):
    terms, (_, sums) = built.loss(params, stats, batch, key, step)
    return terms, (stats, {**sums, 'begun': (stats['error'], jnp.float32(1))})
  return built._replace(loss=loss, begin=lambda params, stats, batch, key: {
      'error': batch['x'].sum() + jax.random.uniform(key)})


@pytest.mark.parametrize('micro', [1, 2])
def test_the_first_batch_alone_is_begun_with(toy_config, tmp_path, micro):
  toy_config.total_steps, toy_config.checkpoint.steps, toy_config.checkpoint.keep = 4, 2, -1
  toy_config.optim.accumulate, toy_config.eval_steps = micro, 0
  batches = train.feed(toy.source(toy_config.data.dir, 'train', 30, 0.01), toy_config, range(8))
  first = next(iter(batches))
  key = jax.random.fold_in(jax.random.key(toy_config.seed, impl=toy_config.prng), 0)
  want = float(first['x'].sum() + jax.random.uniform(key))
  for total in (2, 4):      # the second run goes on from the first one's end
    toy_config.total_steps = total
    train.run(beginning(toy_config), toy_config, str(tmp_path))
    with train.restored(beginning(toy_config), toy_config, str(tmp_path), 'latest') as (_, step, _, stats):
      assert step == total
      assert float(stats['error']) == pytest.approx(want, rel=1e-5)
  rows = [r for r in logs.rows(str(tmp_path)) if r['split'] == 'train']
  assert [r['step'] for r in rows] == [1, 2, 3, 4]
  assert [r['begun'] for r in rows] == pytest.approx([want] * 4, rel=1e-5)      # in the first update already


def test_a_range_test_begins_as_a_run_does(toy_config, tmp_path):
  built = beginning(toy_config)

  def loss(params, stats, batch, key, step):      # what has not begun has no finite loss
    terms, rest = built.loss(params, stats, batch, key, step)
    return {k: (jnp.where(stats['error'] == 0, jnp.nan, t), w) for k, (t, w) in terms.items()}, rest
  toy_config.lr_find.steps = 5
  assert len(lr_find.run(built._replace(loss=loss), toy_config, str(tmp_path))['losses']) == 5


def waits(jaxpr, settled=()):
  """Names of the primitives whose way the device decides, not the compiler as by the platform; settled: of its inputs.

  A loop's number of rounds, where it is known, is the compiler's as well: that makes it a scan.
  """
  known = {v for v, yes in zip(jaxpr.invars, settled) if yes}
  for e in jaxpr.eqns:
    given = [isinstance(v, jax.extend.core.Literal) or v in known for v in e.invars]
    if all(given):
      known |= {*e.outvars}
    elif e.primitive.name == 'while' or e.primitive.name == 'cond' and not given[0]:
      yield e.primitive.name
    if e.primitive.name == 'scan':             # what it carries changes from round to round
      first, carried = e.params['num_consts'], e.params['num_carry']
      given[first:first + carried] = [False] * carried
    if e.primitive.name != 'pallas_call':      # one kernel, whatever is in it
      for inner in jax.extend.core.jaxprs_in_params(e.params):
        yield from waits(inner, given[len(given) - len(inner.invars):] if len(given) >= len(inner.invars) else ())


@pytest.mark.parametrize('name, values', RECIPES.items())
def test_no_step_has_a_branch_or_a_loop_that_the_host_waits_for(name, values):
  config = configs.read(f'configs/{name}.py:smoke')
  configs.override(config, ['', *(f'--config.{k}={v}' for k, v in values.items())])
  task, tx = load(config), optim.make(config.optim, config.total_steps)
  mesh = meshes.make(config.mesh, jax.devices()[:1])
  with jax.set_mesh(mesh):
    spec = train.feed(task.source('train'), config, range(config.input.batch_size)).spec(config.input.batch_size)
    like = train.abstract(task, tx, config, spec, mesh)
    batches = {k: jax.ShapeDtypeStruct((1, *s.shape), s.dtype) for k, s in spec.items()}
    traced = train.make_step(task, tx, config, like, mesh).trace(like, batches)
  assert not [*waits(traced.jaxpr.jaxpr)]
  assert (task.begin is not None) == (name == 'dvae')


def test_a_branch_would_be_found():
  branch = lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: -x)
  round_for_round = lambda i, x: jax.lax.cond(i > 3, lambda: x, lambda: -x)
  loop = lambda x: jax.lax.while_loop(lambda y: y[0] < 9, lambda y: y + 1, x)
  for function, found in ((branch, ['cond']), (jax.jit(branch), ['cond']), (loop, ['while']),
                          (lambda x: jax.lax.fori_loop(0, 9, lambda _, y: y + 1, x), []),
                          (lambda x: jax.lax.fori_loop(0, 9, round_for_round, x), ['cond']),
                          (lambda x: jax.lax.platform_dependent(x, cpu=lambda x: x, default=lambda x: -x), [])):
    assert [*waits(jax.make_jaxpr(function)(jnp.ones(3)).jaxpr)] == found
