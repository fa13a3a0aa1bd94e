"""Model FLOPs by hand: products, convolutions, loops, a GPT-2; peaks by the devices' own names."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from lab import flops, mesh as meshes

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def like(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def dense(x, w):
  return x @ w


def convolve(x, w, strides=(1, 1), padding='VALID', **options):
  return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=('NHWC', 'HWIO', 'NHWC'), **options)


# matrix products

def test_a_dense_layer_is_two_a_weight_and_row():
  assert flops.forward(dense, like(5, 3), like(3, 7)) == 2 * 5 * 3 * 7
  assert flops.training(dense, like(5, 3), like(3, 7)) == 3 * 2 * 5 * 3 * 7


def test_elementwise_work_is_not_counted():
  assert flops.forward(lambda x: jax.nn.softmax(jnp.tanh(x) * 3).sum(), like(5, 3)) == 0


def test_a_batched_product_counts_its_batch_once():
  assert flops.forward(dense, like(4, 5, 3), like(4, 3, 7)) == 4 * 2 * 5 * 3 * 7
  assert flops.forward(jax.vmap(dense), like(4, 5, 3), like(4, 3, 7)) == 4 * 2 * 5 * 3 * 7
  assert flops.forward(jax.vmap(dense, (0, None)), like(4, 5, 3), like(3, 7)) == 4 * 2 * 5 * 3 * 7


def test_attention_is_two_products():
  def attend(q, k, v):
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k)
    return jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), v)
  # batch 2, heads 3, 11 queries, 13 keys, width 5
  assert flops.forward(attend, like(2, 11, 3, 5), like(2, 13, 3, 5), like(2, 13, 3, 5)) == 2 * (2 * 2 * 3 * 11 * 13 * 5)


def test_trees_and_types_are_taken_as_they_are():
  params = {'w': like(3, 7, dtype=jnp.bfloat16)}
  assert flops.forward(lambda p, b: b['x'] @ p['w'], params, {'x': like(5, 3, dtype=jnp.bfloat16)}) == 2 * 5 * 3 * 7


# convolutions

def test_convolutions_by_hand():
  x = like(2, 9, 9, 4)
  assert flops.forward(convolve, x, like(3, 3, 4, 6)) == 2 * (2 * 7 * 7 * 6) * (3 * 3 * 4)
  same = flops.forward(lambda x, w: convolve(x, w, (2, 2), 'SAME'), x, like(3, 3, 4, 6))
  assert same == 2 * (2 * 5 * 5 * 6) * (3 * 3 * 4)
  dilated = flops.forward(lambda x, w: convolve(x, w, rhs_dilation=(2, 2)), x, like(3, 3, 4, 6))
  assert dilated == 2 * (2 * 5 * 5 * 6) * (3 * 3 * 4)        # the kernel reaches over 5 pixels and still has 9 taps
  one = flops.forward(lambda x, w: jax.lax.conv(x, w, (1,), 'VALID'), like(2, 4, 9), like(6, 4, 3))
  assert one == 2 * (2 * 7 * 6) * (3 * 4)                    # one dimension, features first


def test_groups_see_their_own_features_only():
  halves = flops.forward(lambda x, w: convolve(x, w, feature_group_count=2), like(2, 9, 9, 4), like(3, 3, 2, 6))
  assert halves == 2 * (2 * 7 * 7 * 6) * (3 * 3 * 2)
  depthwise = flops.forward(lambda x, w: convolve(x, w, feature_group_count=4), like(2, 9, 9, 4), like(3, 3, 1, 4))
  assert depthwise == 2 * (2 * 7 * 7 * 4) * (3 * 3)
  batches = flops.forward(lambda x, w: convolve(x, w, batch_group_count=2), like(4, 9, 9, 4), like(3, 3, 4, 6))
  assert batches == 2 * (2 * 7 * 7 * 6) * (3 * 3 * 4)        # two groups of two pictures give two pictures


def test_a_transposed_convolution_counts_its_inputs_not_the_zeros_between():
  for padding in ('SAME', 'VALID'):
    up = flops.forward(lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), padding), like(1, 4, 4, 3), like(4, 4, 3, 5))
    assert up == 2 * (4 * 4 * 3) * (4 * 4 * 5), padding      # every input meets every tap and output feature once

  def threes(x, w):
    return convolve(x, w, (1, 1), ((1, 1), (1, 1)), lhs_dilation=(2, 2), feature_group_count=3)
  grouped = flops.forward(threes, like(1, 4, 4, 3), like(2, 2, 1, 6))
  assert grouped == 2 * (4 * 4 * 3) * (2 * 2 * 2)            # each of the three inputs has two of the six features


@pytest.mark.parametrize('stride', [2, 3])       # of stride 1, the way back is padded, and padding counts
def test_the_backward_pass_is_twice_the_forward(stride):
  """Counted, not supposed: the gradients for both factors of a convolution and of a dense layer."""
  def loss(x, w, v):
    return (convolve(x, w, (stride, stride)) @ v).sum()
  args = like(2, 9, 9, 4), like(3, 3, 4, 6), like(6, 5)
  assert flops.forward(jax.value_and_grad(loss, (0, 1, 2)), *args) == flops.training(loss, *args)


# control flow and wrappers

def test_a_scan_is_its_body_times_its_length():
  def loop(x, ws):
    return jax.lax.scan(lambda c, w: (c @ w, ()), x, ws)[0]
  assert flops.forward(loop, like(5, 3), like(11, 3, 3)) == 11 * 2 * 5 * 3 * 3
  assert flops.forward(jax.vmap(loop, (0, None)), like(4, 5, 3), like(11, 3, 3)) == 4 * 11 * 2 * 5 * 3 * 3


def test_a_cond_is_its_dearest_branch():
  def choose(i, x, w):
    return jax.lax.switch(i, (lambda: x, lambda: x @ w, lambda: x @ w @ w))
  assert flops.forward(choose, like(dtype=jnp.int32), like(5, 3), like(3, 3)) == 2 * (2 * 5 * 3 * 3)


def test_a_while_loop_is_one_turn():
  def loop(x, w):
    return jax.lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x)
  assert flops.forward(loop, like(5, 3), like(3, 3)) == 2 * 5 * 3 * 3


@jax.custom_vjp
def watched(x, w):
  return x @ w


watched.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


@jax.custom_jvp
def traced(x, w):
  return x @ w


traced.defjvp(lambda primals, tangents: (traced(*primals), tangents[0] @ primals[1]))


@pytest.mark.parametrize('wrapped', [jax.jit(dense), jax.jit(jax.jit(dense)), jax.checkpoint(dense), watched, traced])
def test_wrappers_are_looked_into(wrapped):
  assert flops.forward(wrapped, like(5, 3), like(3, 7)) == 2 * 5 * 3 * 7


def test_recomputation_is_no_work_of_the_model():
  def loss(x, w, v):
    return (jnp.tanh(x @ w) @ v).sum()
  args = like(5, 3), like(3, 7), like(7, 2)
  again = jax.checkpoint(loss)
  assert flops.training(again, *args) == flops.training(loss, *args) == 3 * 2 * 5 * (3 * 7 + 7 * 2)
  done = flops.forward(jax.grad(again, (0, 1, 2)), *args)
  assert done > flops.forward(jax.grad(loss, (0, 1, 2)), *args)       # the machine does more


def test_shard_map_counts_every_device_that_has_work_of_its_own():
  mesh = meshes.make({'data': 4, 'fsdp': 1, 'tensor': 2})
  split = jax.shard_map(dense, mesh=mesh, in_specs=(P('data'), P(None, 'tensor')), out_specs=P('data', 'tensor'))
  assert flops.forward(split, like(8, 3), like(3, 6)) == 2 * 8 * 3 * 6
  both = jax.shard_map(dense, mesh=mesh, in_specs=(P(('data', 'tensor')), P()), out_specs=P(('data', 'tensor')))
  assert flops.forward(both, like(8, 3), like(3, 6)) == 2 * 8 * 3 * 6
  rows = jax.shard_map(dense, mesh=mesh, in_specs=(P('data'), P()), out_specs=P('data'))      # 'tensor' repeats it
  assert flops.forward(rows, like(8, 3), like(3, 6)) == 2 * 8 * 3 * 6


# a whole model

LAYERS, HEADS, WIDTH, VOCABULARY, LENGTH = 12, 12, 768, 50257, 1024


def gpt2(params, tokens):
  """Logits of GPT-2 124M, all layers in one scan; no causal mask, which hides and doesn't save."""
  def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

  def block(x, p):
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(norm(x) @ p['qkv'], 3, -1))
    scores = jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', q, k))
    x = x + jnp.einsum('bhqk,bkhd->bqhd', scores, v).reshape(x.shape) @ p['out']
    return x + jax.nn.gelu(norm(x) @ p['up']) @ p['down'], ()
  x = params['tokens'][tokens] + params['positions'][None]
  x, _ = jax.lax.scan(jax.checkpoint(block), x, params['blocks'])
  return norm(x) @ params['tokens'].T


def test_gpt2_is_the_known_formula():
  d = WIDTH
  blocks = {'qkv': like(LAYERS, d, 3 * d), 'out': like(LAYERS, d, d), 'up': like(LAYERS, d, 4 * d),
            'down': like(LAYERS, 4 * d, d)}
  params = {'tokens': like(VOCABULARY, d), 'positions': like(LENGTH, d), 'blocks': blocks}
  batch = 2
  got = flops.training(gpt2, params, like(batch, LENGTH, dtype=jnp.int32)) / (batch * LENGTH)
  matrices = LAYERS * 12 * d * d + VOCABULARY * d            # the table counts once: reading it is no product
  assert got == 6 * matrices + 12 * LAYERS * d * LENGTH
  # nanoGPT counts all parameters but the positions, 123.65M: with biases and norms, which do no products: 855 MFLOP
  assert got == pytest.approx(6 * 123_653_376 + 12 * LAYERS * HEADS * (d // HEADS) * LENGTH, rel=1e-3)


def test_counting_needs_no_device():
  code = ('import jax, jax.numpy as jnp; from lab import flops; x = jax.ShapeDtypeStruct((4, 4), jnp.float32);'
          'assert flops.training(lambda x: jnp.tanh(x @ x) @ jnp.zeros((4, 4)), x) == 3 * 4 * 4 ** 3;'
          'from jax._src import xla_bridge; assert not xla_bridge._backends')
  subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True, env={**os.environ, 'JAX_PLATFORMS': 'nothing'})


# peaks

@pytest.mark.parametrize('kind, teraflops', [
    ('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H100 PCIe', 756), ('NVIDIA H200', 989), ('NVIDIA A100-SXM4-40GB', 312),
    ('NVIDIA A100-SXM4-80GB', 312), ('NVIDIA A100-PCIE-40GB', 312), ('NVIDIA A100 80GB PCIe', 312),
    ('Tesla V100-SXM2-16GB', 125), ('Tesla V100-SXM3-32GB', 125), ('Tesla V100-PCIE-16GB', 112), ('NVIDIA L40S', 362),
    ('NVIDIA L4', 121), ('NVIDIA A10', 125), ('NVIDIA GeForce RTX 4090', 165), ('TPU v3', 61.5), ('TPU v4', 275),
    ('TPU v5 lite', 197), ('TPU v5e', 197), ('TPU v5', 459), ('TPU v5p', 459), ('TPU v6 lite', 918), ('TPU v6e', 918)])
def test_peaks_by_name(kind, teraflops):
  assert flops.peak(kind) == teraflops * 1e12


@pytest.mark.parametrize('kind', ['cpu', '', 'NVIDIA', 'NVIDIA A100-SXM4-40GB MIG 1g.5gb', 'NVIDIA L40', 'NVIDIA A10G',
                                  'NVIDIA GeForce RTX 4090 Laptop GPU', 'TPU v4 lite', 'TPU v7'])
def test_an_unknown_device_has_no_peak(kind):
  assert flops.peak(kind) == 0.0
