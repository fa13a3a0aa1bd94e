"""Imported BERT and GPT-2 compute what transformers' own do; both ways are exact; what can't be right is refused."""

import json
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_pipelines import tokens
from flax.traverse_util import unflatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lab import graft, optim
from lab.checkpoint import CheckpointError, Checkpoints
from lab.sharding import paths
from lab.systems.language import config as shape, model, weights
from lab.systems.language.hugging_face import Body, WeightsError, from_hf, to_hf
from lab.task import ConfigError, TrainState
from tests.fixtures import transformers_models as fixture

TOLERANCE = 1e-4
KINDS = ('bert', 'gpt2')
BERT = {'norm': 'post', 'embed_norm': True, 'types': 2, 'norm_eps': 1e-12}
GPT2 = {'causal': True, 'activation': 'gelu_tanh'}


def theirs(kind):
  return load_file(os.path.join(fixture.FOLDER, f'{kind}.safetensors')), dict(fixture.CONFIGS[kind])


def ours(labels=0, **settings):
  """A random body, 100 words; settings override config.model."""
  config = shape.get_config()
  config.model.update({'width': 24, 'heads': 3, 'layers': 2, 'dtype': 'float32', **settings})
  config.data.length = fixture.LENGTH
  more = () if labels or config.model.causal else (jnp.zeros((fixture.ROWS, 1), jnp.int32),)
  params = jax.eval_shape(model.make(config, fixture.WORDS, labels).init, jax.random.key(0), *fixture.inputs(), *more)
  draw = np.random.default_rng(0)
  arrays = {p: draw.normal(size=x.shape).astype(np.float32) for p, x in paths(params['params'])}
  for p in {'tokens', 'head', 'head_bias'} & set(arrays):
    arrays[p][fixture.WORDS:] = 0
  return Body(arrays, config, fixture.WORDS, {})


def tree(arrays):
  return unflatten_dict({tuple(p.split('/')): x for p, x in arrays.items()})


def logits(body):
  """f32[2, 10, 100] of the fixture's inputs, 0 at padding."""
  config = body.config
  config.model.dtype, config.data.length = 'float32', len(body.arrays['positions'])
  net = model.make(config, body.vocabulary, 0)
  ids, segments = fixture.inputs()
  found = jax.jit(lambda p: net.apply({'params': p}, ids, segments, method='following'))(tree(body.arrays))
  return np.asarray(found)[..., :fixture.WORDS] * segments[..., None]


def write(folder, kind, tensors=None, **facts):
  arrays, known = theirs(kind)
  os.makedirs(folder, exist_ok=True)
  save_file(arrays if tensors is None else tensors, folder / 'model.safetensors')
  (folder / 'config.json').write_text(json.dumps(known | facts))
  return str(folder / 'model.safetensors')


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  """kind -> the file that import wrote."""
  folder, found = tmp_path_factory.mktemp('weights'), {}
  for kind in KINDS:
    found[kind] = str(folder / f'{kind}.safetensors')
    assert weights.main(['import', f'--from={write(folder / kind, kind)}', f'--to={found[kind]}']) == 0
  return found


@pytest.mark.parametrize('kind', KINDS)
def test_logits_equal_those_of_transformers(imported, kind):
  stored = np.load(os.path.join(fixture.FOLDER, 'transformers.npz'))[kind] * fixture.inputs()[1][..., None]
  assert np.abs(stored).max() > 1           # the comparison has something to compare
  body = weights.read_body(imported[kind])
  np.testing.assert_allclose(logits(body), stored, rtol=0, atol=TOLERANCE)
  x = body.arrays['body/blocks/attention/qkv/kernel']
  x[0] = x[0].reshape(32, 4, 3, 8).swapaxes(1, 2).reshape(32, 96)      # another order of columns is noticed
  assert np.abs(logits(body) - stored).max() > 100 * TOLERANCE


@pytest.mark.parametrize('kind', KINDS)
def test_theirs_to_ours_to_theirs_is_exact(imported, kind, tmp_path):
  assert weights.main(['export', f'--from={imported[kind]}', f'--to={tmp_path}']) == 0
  before, facts = theirs(kind)
  after = load_file(tmp_path / 'model.safetensors')
  assert before.keys() == after.keys()
  for name, x in before.items():
    np.testing.assert_array_equal(x, after[name], name)
  said = json.loads((tmp_path / 'config.json').read_text())
  assert {k: said[k] for k in facts} == facts
  assert said['architectures'] == [{'bert': 'BertForMaskedLM', 'gpt2': 'GPT2LMHeadModel'}[kind]]
  with safe_open(tmp_path / 'model.safetensors', 'np') as f:
    assert f.metadata() == {'format': 'pt'}       # transformers reads no file without it


@pytest.mark.parametrize('settings, labels, kind', [
    (BERT, 0, 'BertForMaskedLM'), (BERT | {'tied': False, 'hidden': 40}, 0, 'BertForMaskedLM'),
    (BERT | {'pooler': True}, 3, 'BertForSequenceClassification'), (GPT2, 0, 'GPT2LMHeadModel'),
    (GPT2 | {'tied': False, 'activation': 'gelu'}, 0, 'GPT2LMHeadModel')])
def test_ours_to_theirs_to_ours_is_exact(settings, labels, kind):
  body = ours(labels, **settings)
  tensors, facts, left = to_hf(body)
  assert not left and facts['architectures'] == [kind] and len(facts.get('id2label', ())) == labels
  arrays, metadata, _ = from_hf(tensors, facts)
  assert arrays.keys() == body.arrays.keys()
  for path, x in body.arrays.items():
    np.testing.assert_array_equal(x, arrays[path], path)
  for key, value in metadata.items():
    assert key not in body.config.model or value == str(body.config.model[key]), key


def test_a_head_that_transformers_lacks_is_left_out_and_said():
  for settings in (BERT | {'pool': 'mean', 'pooler': True}, BERT, GPT2 | {'pool': 'last'}):
    tensors, facts, left = to_hf(ours(2, **settings))
    assert any('classifier/kernel' in line for line in left) and 'id2label' not in facts
    assert not [n for n in tensors if 'classifier' in n or 'pooler' in n]


@pytest.mark.parametrize('kind', KINDS)
def test_other_spellings_of_one_model_are_the_same(kind):
  tensors, facts = theirs(kind)
  want, metadata, _ = from_hf(tensors, facts)
  prefix = {'bert': 'bert.', 'gpt2': 'transformer.'}[kind]
  other = {n.removeprefix(prefix).replace('LayerNorm.weight', 'LayerNorm.gamma').replace(
      'LayerNorm.bias', 'LayerNorm.beta'): x for n, x in tensors.items()}
  if kind == 'bert':
    other |= {'cls.predictions.decoder.weight': tensors['bert.embeddings.word_embeddings.weight'],
              'cls.predictions.decoder.bias': tensors['cls.predictions.bias'],
              'embeddings.position_ids': np.arange(12)[None], 'cls.seq_relationship.bias': np.zeros(2, np.float32)}
  else:
    other |= {'lm_head.weight': tensors['transformer.wte.weight'], 'h.0.attn.bias': np.ones((1, 1, 12, 12), np.uint8),
              'h.1.attn.masked_bias': np.float32(-1e4)}
  got, same, left = from_hf(other, facts)
  assert same == metadata and got.keys() == want.keys() and len(left) == {'bert': 4, 'gpt2': 3}[kind]
  assert all(np.array_equal(want[p], x) for p, x in got.items())


def test_a_pooler_is_kept_and_half_precision_is_widened():
  tensors, facts = theirs('bert')
  extra = {'bert.pooler.dense.weight': np.eye(32, k=1, dtype=np.float32), 'bert.pooler.dense.bias': np.zeros(32, 'f')}
  arrays, metadata, _ = from_hf({n: x.astype(jnp.bfloat16) for n, x in (tensors | extra).items()}, facts, 7)
  np.testing.assert_array_equal(arrays['pooler/kernel'], np.eye(32, k=-1))     # [in, out]
  assert 'pooler' not in metadata and {x.dtype.name for x in arrays.values()} == {'float32'}
  assert metadata['data.length'] == '7' and arrays['positions'].shape == (7, 32)


def test_rows_that_fill_the_vocabulary_up_are_zero():
  arrays, metadata, _ = from_hf(*theirs('bert'))
  assert arrays['tokens'].shape == (128, 32) and metadata['vocabulary'] == '100'
  assert not arrays['tokens'][100:].any() and not arrays['head_bias'][100:].any()


@pytest.mark.parametrize('kind', KINDS)
def test_graft_takes_all_and_refuses_another_recipe(imported, kind):
  body = weights.read_body(imported[kind])
  body.config.data.length = 12
  net, more = model.make(body.config, 100, 0), () if kind == 'gpt2' else (jnp.zeros((2, 1), jnp.int32),)
  fresh = jax.jit(net.init)(jax.random.key(0), *fixture.inputs(), *more)['params']
  for path, x in paths(graft.graft(fresh, imported[kind], config=body.config)):
    np.testing.assert_array_equal(x, body.arrays[path], path)
  wrong = {'heads': 8, 'norm_eps': 1e-6, 'activation': 'relu2', 'hidden': 0, 'tied': False,
           'norm': {'bert': 'pre', 'gpt2': 'post'}[kind], 'types': 1, 'bias': False, 'positions': 'rope'}
  for key, value in wrong.items():
    right, body.config.model[key] = body.config.model[key], value
    with pytest.raises(CheckpointError, match=f'config.model.{key} = '):
      graft.graft(fresh, imported[kind], config=body.config)
    body.config.model[key] = right


def changed(kind, name=None, value=None, **facts):
  """The fixture with one array exchanged, or without it, and other facts."""
  tensors, known = theirs(kind)
  if name:
    tensors.pop(name, None)
    tensors |= {} if value is None else {name: value}
  return tensors, known | facts


ZEROS = np.zeros((100, 32), np.float32)


@pytest.mark.parametrize('case, words', [
    (changed('bert', 'bert.encoder.layer.1.output.dense.bias'), 'encoder.layer.1.output.dense.bias is missing'),
    (changed('bert', 'cls.predictions.bias'), 'cls.predictions.bias is missing'),
    (changed('bert', 'bert.encoder.layer.2.output.dense.bias', ZEROS), 'no place for: encoder.layer.2'),
    (changed('bert', 'qa_outputs.weight', ZEROS), 'no place for: qa_outputs.weight'),
    (changed('bert', 'bert.embeddings.position_embeddings.weight', ZEROS), r'shape \(100, 32\), not \(12, 32\)'),
    (changed('bert', 'embeddings.LayerNorm.bias', ZEROS), 'there twice'),
    (changed('bert', 'cls.predictions.decoder.weight', ZEROS), 'though tie_word_embeddings is true'),
    (changed('bert', tie_word_embeddings=False), 'decoder.weight is missing; tie'),
    (changed('bert', 'bert.embeddings.word_embeddings.weight', ZEROS.astype(np.int8)), 'int8; expected float32'),
    (changed('bert', hidden_act='relu'), "hidden_act = 'relu'"),
    (changed('bert', hidden_act='gelu_new'), 'in the head'),
    (changed('bert', position_embedding_type='relative_key'), 'position_embedding_type'),
    (changed('bert', num_attention_heads=5), '32 features do not divide into 5 heads'),
    (changed('bert', num_hidden_layers='2'), 'num_hidden_layers = .2.; expected'),
    (changed('bert', hidden_size=None), 'hidden_size is missing'),
    (changed('bert', hidden_size=64), r'shape \(100, 32\), not \(100, 64\)'),
    (changed('bert', model_type='roberta'), "'roberta'; expected one of bert, gpt2"),
    (changed('gpt2', model_type='bert'), 'is missing'),
    (changed('gpt2', 'transformer.h.0.attn.c_attn.weight', np.zeros((96, 32), 'f')), r'not \(32, 96\)'),
    (changed('gpt2', 'lm_head.weight', ZEROS), 'though tie_word_embeddings is true'),
    (changed('gpt2', scale_attn_by_inverse_layer_idx=True), 'scale_attn_by_inverse_layer_idx'),
])
def test_what_can_not_be_right_is_refused(case, words):
  with pytest.raises(WeightsError, match=words):
    from_hf(*case)


@pytest.mark.parametrize('settings, words', [
    (BERT | {'positions': 'rope'}, 'positions'), (BERT | {'norm': 'pre'}, 'norm'), (BERT | {'types': 0}, 'types'),
    (BERT | {'embed_norm': False}, 'embed_norm'), (BERT | {'activation': 'relu2'}, 'activation'),
    (BERT | {'activation': 'gelu_tanh'}, 'activation'), (BERT | {'transform': False}, 'transform'),
    (GPT2 | {'qk_norm': True}, 'qk_norm'), (GPT2 | {'bias': False}, 'bias'), (GPT2 | {'activation': 'geglu'}, 'geglu')])
def test_a_body_that_transformers_lacks_is_refused(settings, words):
  with pytest.raises((ConfigError, WeightsError), match=words):
    to_hf(ours(**settings))


def test_ours_of_another_shape_is_refused():
  body = ours(**GPT2)
  for path, x, words in (('tokens', np.zeros((100, 24), 'f'), r'not \(128, 24\)'),
                         ('spare', ZEROS, 'no place for: spare'),
                         ('body/final_norm/bias', None, 'body/final_norm/bias is missing')):
    arrays = {p: a for p, a in (body.arrays | {path: x}).items() if a is not None}
    with pytest.raises(WeightsError, match=words):
      to_hf(body._replace(arrays=arrays))


def test_errors_are_one_line(tmp_path, capsys):
  path = write(tmp_path / 'bert', 'bert')
  lone = tmp_path / 'lone.safetensors'
  save_file(theirs('bert')[0], lone)
  (tmp_path / 'a.pth').write_bytes(pickle.dumps({'weight': 0}))
  (tmp_path / 'b.safetensors').write_bytes(b'hello, this is no such file')
  out = f'--to={tmp_path / "out.safetensors"}'
  for args, code, words in (
      (['import', f'--from={tmp_path / "a.pth"}', out], 3, 'pickle'),
      (['import', f'--from={tmp_path / "b.safetensors"}', out], 3, 'not a safetensors file'),
      (['import', f'--from={tmp_path / "c.safetensors"}', out], 3, 'no such file'),
      (['import', f'--from={lone}', out], 3, 'give --config-json'),
      (['import', f'--from={lone}', f'--config-json={lone}', out], 3, 'give --config-json'),
      (['import', f'--from={path}', '--length=13', out], 3, 'has 12 positions'),
      (['import', f'--from={path}', '--length=-1', out], 3, '--length=-1'),
      (['import', f'--from={path}', f'--to={tmp_path}'], 2, 'ends in .safetensors'),
      (['export', f'--from={lone}', out], 3, 'metadata lack width, layers, heads'),
      (['export', f'--from={tmp_path / "gone"}', out], 3, 'no such folder'),
      (['export', f'--from={tmp_path}', out], 2, 'no configuration of a run')):
    assert weights.main(args) == code
    message = capsys.readouterr().err
    assert words in message and message.count('\n') == 1
  assert weights.main(['import', f'--from={path}']) == weights.main([]) == 2
  assert not (tmp_path / 'out.safetensors').exists()


def test_a_run_is_exported(tmp_path, capsys):
  words = tokens.train(['so it goes on and on'] * 4, 'wordpiece', 64)
  body = ours(2, **BERT | {'pooler': True})
  config = body.config
  config.objective, config.checkpoint.best = 'classify', 'accuracy'
  body.arrays['tokens'][words.size:] = 0
  (tmp_path / 'run' / 'assets').mkdir(parents=True)
  (tmp_path / 'run' / 'assets' / 'tokenizer.json').write_text(words.json())
  (tmp_path / 'run' / 'assets' / 'labels.json').write_text('["dull", "kind"]')
  (tmp_path / 'run' / 'config.json').write_text(config.to_json())
  store = Checkpoints(str(tmp_path / 'run'), config)
  tx = optim.make(config.optim, 10)
  for step, accuracy in ((1, 0.9), (2, 0.5)):
    params = tree({p: jnp.asarray(x * step) for p, x in body.arrays.items()})
    store.save(step, TrainState(jnp.int32(step), params, {}, tx.init(params)), {'accuracy': accuracy})
  store.settle()
  store.close()
  for which, step in (('', 2), (':best', 1), (':2', 2)):
    assert weights.main(['export', f'--from={tmp_path / "run"}{which}', f'--to={tmp_path / "out"}']) == 0
    got = load_file(tmp_path / 'out' / 'model.safetensors')
    np.testing.assert_array_equal(got['classifier.weight'], body.arrays['classifier/kernel'].T * step)
    np.testing.assert_array_equal(got['bert.embeddings.word_embeddings.weight'],
                                  body.arrays['tokens'][:words.size] * step)
  facts = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert facts['id2label'] == {'0': 'dull', '1': 'kind'} and facts['vocab_size'] == words.size
  assert facts['pad_token_id'] == words.pad
  again = tokens.load(str(tmp_path / 'out'))
  assert again.encode(['so it goes'])[0].tolist() == words.encode(['so it goes'])[0].tolist()
  capsys.readouterr()
  assert weights.main(['export', f'--from={tmp_path / "run"}:7', f'--to={tmp_path / "out"}']) == 5
  assert 'has no step' in capsys.readouterr().err
