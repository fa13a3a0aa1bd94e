"""Products whose gradients are as cheap as they are."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

SMALL = 1 << 27      # ids x rows of a table up to which its gradient is a product with ones and zeros


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(rule: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """einsum(rule, a, b) as float32, of factors in a narrower dtype; each index is in at least two of the three.

  The gradient is rounded to the factors' dtype before it is multiplied; without this rule the products of the gradient
  would be float32, the slow ones of an accelerator. Theirs are float32 too, and are rounded to the factors' dtype last.
  """
  return jnp.einsum(rule, a, b, preferred_element_type=jnp.float32)


def _contract_backward(rule, factors, slope):
  a, b = factors
  inputs, out = rule.split('->')
  left, right = inputs.split(',')
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  return (product(f'{out},{right}->{left}', slope.astype(b.dtype), b).astype(a.dtype),
          product(f'{out},{left}->{right}', slope.astype(a.dtype), a).astype(b.dtype))


contract.defvjp(lambda rule, a, b: (contract(rule, a, b), (a, b)), _contract_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared(x: jax.Array, number: int) -> tuple[jax.Array, ...]:
  """x so many times, a factor of as many products: their gradients of x are added up within these, on a GPU.

  XLA lets a product add to what another gave where its own result comes first in the sum. Reverse mode only.
  """
  return (x,) * number


def _shared_backward(number, _, slopes):
  del number
  return functools.reduce(lambda total, slope: slope + total, slopes),


shared.defvjp(lambda x, number: ((x,) * number, None), _shared_backward)


@jax.custom_vjp
def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
  """Rows of a table f32[V, d] by ids i32[...] -> f32[..., d].

  On an accelerator the gradient of a small table is one product. Adding row by row, many threads would wait for a few
  rows, and on a GPU add in no fixed order; on a CPU it is quicker. Reverse-mode derivatives only, as of `contract`.
  """
  return jnp.take(_whole(table, ids), ids, 0)


def _lookup_backward(kept, slope):
  ids, rows = kept
  ids, slope = ids.reshape(-1), slope.reshape(-1, slope.shape[-1])
  if ids.size * rows > SMALL:
    return _whole(_added(ids, slope, rows=rows), ids), None
  # by the device that it is compiled for, which may be another than the one at hand
  add, multiply = (functools.partial(f, rows=rows) for f in (_added, _multiplied))
  return _whole(jax.lax.platform_dependent(ids, slope, cpu=add, default=multiply), ids), None


def _whole(table, ids):
  """A table, or its gradient, whole on each device: it looks its own rows of the batch up, and sums what they give.

  Left to itself the compiler may split the rows as the table is split, and gather or sum those of the whole batch: for
  few ids, as of one step of generation, which is less than the table.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.shape.get('fsdp', 1) * mesh.shape.get('tensor', 1) == 1 or ids.size < len(table):
    return table
  return jax.lax.with_sharding_constraint(table, P())


def _added(ids, slope, *, rows):
  return jnp.zeros((rows, slope.shape[-1]), slope.dtype).at[ids].add(slope)


def _multiplied(ids, slope, *, rows):
  return jnp.einsum('nv,nd->vd', jax.nn.one_hot(ids, rows, dtype=slope.dtype), slope, precision='highest')


lookup.defvjp(lambda table, ids: (lookup(table, ids), (ids, len(table))), _lookup_backward)
