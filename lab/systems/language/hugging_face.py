"""BERT and GPT-2 as Hugging Face's transformers names and lays out their arrays, and as we do.

Devlin et al. 2018, arXiv 1810.04805; Radford et al. 2019. Both ways are exact: arrays are renamed, transposed, stacked
over layers and put in another order, never computed with.
"""

import re
from typing import Any, Mapping, NamedTuple

import numpy as np

from lab.systems.language import model
from lab.task import ConfigError

Arrays = dict[str, np.ndarray]
IDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')       # of config.json; carried along, our body knows none
_ACTIVATIONS = {'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh'}
_BLOCKS = 'body/blocks/'                                      # their arrays are stacked over layers, [L, ...]


class WeightsError(Exception):
  """A file that holds no weights that we can take; the message says why."""
  exit_code = 3


class Row(NamedTuple):
  """An array of ours and where it is in their file."""
  ours: str         # path
  theirs: str       # name; N is the layer's number, and * is query, key and value
  sizes: str        # of theirs: D width, F hidden, V vocabulary, P positions, T types, K labels, Q 3 x width
  form: str         # same; flip: transposed; words: ours is filled up with rows of 0; qkv: columns in another order
  part: str = ''    # '': in every model; the arrays of another part are all there, or none


class Layout(NamedTuple):
  """A kind of model in transformers. Its first row holds the embeddings of words, its last one an untied head."""
  prefix: str                # of the body's names, where there is a head beside the body
  rows: tuple[Row, ...]
  keys: Mapping[str, str]    # size, or key of config.model -> key of config.json
  body: Mapping[str, Any]    # config.model, the same for all models of this kind
  only: Mapping[str, Any]    # config.json, the one value that we can compute


def _dense(ours, theirs, sizes, form, part=''):
  out = sizes[0] if form == 'flip' else sizes[-1]
  return (Row(ours + '/kernel', theirs + '.weight', sizes, form, part),
          Row(ours + '/bias', theirs + '.bias', out, form, part))


def _norm(ours, theirs, part=''):
  return (Row(ours + '/scale', theirs + '.weight', 'D', 'same', part),
          Row(ours + '/bias', theirs + '.bias', 'D', 'same', part))


_BERT = Layout('bert.', (
    Row('tokens', 'embeddings.word_embeddings.weight', 'VD', 'words'),
    Row('positions', 'embeddings.position_embeddings.weight', 'PD', 'same'),
    Row('types', 'embeddings.token_type_embeddings.weight', 'TD', 'same'),
    *_norm('embed_norm', 'embeddings.LayerNorm'),
    *_dense(_BLOCKS + 'attention/qkv', 'encoder.layer.N.attention.self.*', 'DD', 'qkv'),
    *_dense(_BLOCKS + 'attention/out', 'encoder.layer.N.attention.output.dense', 'DD', 'flip'),
    *_norm(_BLOCKS + 'norm0', 'encoder.layer.N.attention.output.LayerNorm'),
    *_dense(_BLOCKS + 'mlp/up', 'encoder.layer.N.intermediate.dense', 'FD', 'flip'),
    *_dense(_BLOCKS + 'mlp/down', 'encoder.layer.N.output.dense', 'DF', 'flip'),
    *_norm(_BLOCKS + 'norm1', 'encoder.layer.N.output.LayerNorm'),
    *_dense('pooler', 'pooler.dense', 'DD', 'flip', 'pooler'),
    *_dense('classifier', 'classifier', 'KD', 'flip', 'classifier'),
    *_dense('transform', 'cls.predictions.transform.dense', 'DD', 'flip', 'transform'),
    *_norm('transform_norm', 'cls.predictions.transform.LayerNorm', 'transform'),
    Row('head_bias', 'cls.predictions.bias', 'V', 'words', 'transform'),
    Row('head', 'cls.predictions.decoder.weight', 'VD', 'words', 'head'),
), {
    'D': 'hidden_size', 'F': 'intermediate_size', 'V': 'vocab_size', 'P': 'max_position_embeddings',
    'T': 'type_vocab_size', 'L': 'num_hidden_layers', 'heads': 'num_attention_heads', 'norm_eps': 'layer_norm_eps',
    'activation': 'hidden_act', 'dropout': 'hidden_dropout_prob', 'attention_dropout': 'attention_probs_dropout_prob',
}, {'causal': False, 'norm': 'post', 'embed_norm': True, 'bias': True, 'qk_norm': False, 'positions': 'learned'},
    {'position_embedding_type': 'absolute', 'is_decoder': False, 'add_cross_attention': False})

_GPT2 = Layout('transformer.', (      # their matrices are [in, out], as ours
    Row('tokens', 'wte.weight', 'VD', 'words'),
    Row('positions', 'wpe.weight', 'PD', 'same'),
    *_norm(_BLOCKS + 'norm0', 'h.N.ln_1'),
    *_dense(_BLOCKS + 'attention/qkv', 'h.N.attn.c_attn', 'DQ', 'qkv'),
    *_dense(_BLOCKS + 'attention/out', 'h.N.attn.c_proj', 'DD', 'same'),
    *_norm(_BLOCKS + 'norm1', 'h.N.ln_2'),
    *_dense(_BLOCKS + 'mlp/up', 'h.N.mlp.c_fc', 'DF', 'same'),
    *_dense(_BLOCKS + 'mlp/down', 'h.N.mlp.c_proj', 'FD', 'same'),
    *_norm('body/final_norm', 'ln_f'),
    Row('head', 'lm_head.weight', 'VD', 'words', 'head'),
), {
    'D': 'n_embd', 'F': 'n_inner', 'V': 'vocab_size', 'P': 'n_positions', 'L': 'n_layer', 'heads': 'n_head',
    'norm_eps': 'layer_norm_epsilon', 'activation': 'activation_function', 'dropout': 'resid_pdrop',
    'attention_dropout': 'attn_pdrop',
}, {'causal': True, 'norm': 'pre', 'embed_norm': False, 'bias': True, 'qk_norm': False, 'positions': 'learned',
    'types': 0},
    {'add_cross_attention': False, 'scale_attn_weights': True, 'scale_attn_by_inverse_layer_idx': False})

LAYOUTS = {'bert': _BERT, 'gpt2': _GPT2}
# masks, numbers of positions, guess of the next sentence: not learnt, or not ours
_UNUSED = r'embeddings\.position_ids|h\.\d+\.attn\.(masked_)?bias|cls\.seq_relationship\.(weight|bias)'


class Body(NamedTuple):
  """Weights of ours, and what is known of them."""
  arrays: Arrays
  config: Any                # the section config.model is read
  vocabulary: int            # rows of tokens that are words
  ids: Mapping[str, int]     # some of bos_token_id, eos_token_id, pad_token_id
  labels: tuple[str, ...] = ()
  words: Any = None          # the run's Tokenizer, where there is one


def from_hf(tensors: Arrays, facts: Mapping[str, Any], length: int = 0) -> tuple[Arrays, dict[str, str], list[str]]:
  """transformers' arrays -> ours.

  Args:
    tensors: by their names, with or without the prefix `bert.` or `transformer.`.
    facts: config.json.
    length: so many positions are kept; 0: all.

  Returns:
    f32 arrays by our paths, the metadata, and a line for each array that is left out. Raises WeightsError where an
    array is missing, unknown or of another shape, and where the model computes what ours can't.
  """
  layout, sizes, needs = _described(facts)
  tensors, tied, left = _known(tensors, layout, facts)
  sizes['K'] = (*tensors.get('classifier.weight', np.zeros(0)).shape, 0)[0]      # no size of config.json
  out, used = {}, set()
  for row in layout.rows:
    if row.part and not _has(layout, row.part, tensors):
      continue
    if row.part == 'classifier' and not _has(layout, 'pooler', tensors):
      left.append(f'{row.theirs}: of a head that labels words')
      used.add(row.theirs)
      continue
    layers = [[_taken(tensors, name, row, sizes) for name in _names(row, n)] for n in _layers(row, sizes)]
    used.update(name for n in _layers(row, sizes) for name in _names(row, n))
    arrays = [_to_ours(row, arrays, needs['heads']) for arrays in layers]
    out[row.ours] = np.ascontiguousarray(np.stack(arrays) if row.ours.startswith(_BLOCKS) else arrays[0])
  if extra := sorted(set(tensors) - used):
    raise WeightsError(f'{len(extra)} arrays that our body has no place for: {", ".join(extra[:3])}')
  if not 0 <= length <= sizes['P']:
    raise WeightsError(f'--length={length}: the model has {sizes["P"]} positions')
  out['positions'] = np.ascontiguousarray(out['positions'][:length or None])
  if 'transform/kernel' in out or layout is _GPT2:
    needs['tied'] = tied
  if 'transform/kernel' in out:
    needs['transform'] = True
    if needs['activation'] != 'gelu':
      raise WeightsError(f'hidden_act = {facts["hidden_act"]!r} in the head, where ours has the exact gelu')
  if 'classifier/kernel' in out:
    needs |= {'pool': 'cls', 'pooler': True}
  known = {k: facts[k] for k in IDS if isinstance(facts.get(k), int)}
  metadata = needs | {'vocabulary': sizes['V'], 'data.length': len(out['positions'])} | known
  return out, {k: str(v) for k, v in metadata.items()}, left


def to_hf(body: Body) -> tuple[Arrays, dict[str, Any], list[str]]:
  """Our arrays -> transformers' by their names, config.json, and a line for each array that is left out.

  Raises ConfigError for a body that transformers does not have, WeightsError for a missing array or another shape.
  """
  layout, m = _fitting(body.config.model), body.config.model
  arrays, left = dict(body.arrays), []
  if 'classifier/kernel' in arrays and (layout is _GPT2 or m.pool != 'cls' or 'pooler/kernel' not in arrays):
    left = sorted(p for p in arrays if p.startswith(('classifier/', 'pooler/')))
    arrays = {p: x for p, x in arrays.items() if p not in left}
    left = [f'{p}: transformers has no such head' for p in left]
  if 'head_bias' in arrays and m.activation != 'gelu':
    raise ConfigError(f'config.model.activation = {m.activation!r}: transformers would have it in the head too, where '
                      'ours has gelu')
  sizes = {'D': m.width, 'F': m.hidden or 4 * m.width, 'V': body.vocabulary, 'L': m.layers, 'T': m.types,
           'Q': 3 * m.width, 'R': _filled(body.vocabulary), 'P': len(arrays.get('positions', ())),
           'K': arrays.get('classifier/kernel', np.zeros((0, 0))).shape[-1]}
  out, rows = {}, [r for r in layout.rows if not r.part or any(o.ours in arrays for o in layout.rows
                                                               if o.part == r.part)]
  alone = layout is _BERT and not {'transform', 'classifier'} & {r.part for r in rows}
  for row in rows:
    _check(arrays, row.ours, _ours(row, sizes))
    for n in _layers(row, sizes):
      x = arrays[row.ours][n] if row.ours.startswith(_BLOCKS) else arrays[row.ours]
      for name, part in zip(_names(row, n), _to_theirs(row, x, m.heads, body.vocabulary), strict=True):
        head = alone or name.startswith(('cls.', 'classifier.', 'lm_head.'))
        out[name if head else layout.prefix + name] = np.ascontiguousarray(part)
  if extra := sorted(set(arrays) - {r.ours for r in rows}):
    raise WeightsError(f'{len(extra)} arrays that transformers has no place for: {", ".join(extra[:3])}')
  if 'head' in arrays and layout is _BERT:      # without the tie of the matrices, these two are not tied either
    out['cls.predictions.decoder.bias'] = out['cls.predictions.bias']
  return out, _facts(layout, body, sizes, {r.part for r in rows}), left


def _described(facts):
  """config.json -> layout, sizes, and what config.model must be. Raises WeightsError for what ours can't compute."""
  kind = facts.get('model_type')
  if kind not in LAYOUTS:
    raise WeightsError(f'config.json: model_type = {kind!r}; expected one of {", ".join(LAYOUTS)}')
  layout = LAYOUTS[kind]
  for key, value in layout.only.items():
    if facts.get(key, value) != value:
      raise WeightsError(f'config.json: {key} = {facts[key]!r}; ours computes {value!r} alone')
  found = {}
  for name, key in layout.keys.items():
    found[name] = facts.get(key)
    if found[name] is None and key not in ('n_inner', layout.keys['dropout'], layout.keys['attention_dropout']):
      raise WeightsError(f'config.json: {key} is missing')
    if (len(name) == 1 or name == 'heads') and found[name] is not None and not (
        type(found[name]) is int and found[name] > 0):
      raise WeightsError(f'config.json: {key} = {found[name]!r}; expected a number of 1 or more')
  width = found['D']
  if width % found['heads']:
    raise WeightsError(f'config.json: {width} features do not divide into {found["heads"]} heads')
  if found['activation'] not in _ACTIVATIONS:
    raise WeightsError(f'config.json: {layout.keys["activation"]} = {found["activation"]!r}; expected one of '
                       f'{", ".join(_ACTIVATIONS)}')
  hidden = found['F'] or 4 * width
  sizes = {k: v for k, v in found.items() if len(k) == 1} | {'F': hidden, 'Q': 3 * width}
  return layout, sizes, {
      'width': width, 'layers': found['L'], 'heads': found['heads'], 'hidden': 0 if hidden == 4 * width else hidden,
      'activation': _ACTIVATIONS[found['activation']], 'norm_eps': float(found['norm_eps']),
      **({'types': found['T']} if 'T' in found else {}), **layout.body}


def _known(tensors, layout, facts):
  """Their arrays by one name each, without copies and what nothing learns; whether head and words are tied; notes."""
  out, left = {}, []
  for name, x in tensors.items():
    short = name.removeprefix(layout.prefix)
    short = re.sub(r'\bgamma$', 'weight', re.sub(r'\bbeta$', 'bias', short))       # Google's names of 2018
    if short in out:
      raise WeightsError(f'{name} is there twice: with and without {layout.prefix!r}, or under its old name')
    if re.fullmatch(_UNUSED, short):
      left.append(f'{name}: our body has none')
    else:
      out[short] = x
  tied, words, head = facts.get('tie_word_embeddings', True), layout.rows[0].theirs, layout.rows[-1].theirs
  copies = [('cls.predictions.decoder.bias', 'cls.predictions.bias')]
  if tied:
    copies.append((head, words))
  else:
    if head not in out and (layout is _GPT2 or _has(layout, 'transform', out)):
      raise WeightsError(f'{head} is missing; tie_word_embeddings is false')
    bias, unread = copies.pop()
    if bias in out:               # then transformers adds this one, and the other may be anything
      if unread in out and not np.array_equal(out[unread], out[bias]):
        left.append(f'{unread}: transformers reads {bias} in its place')
      out[unread] = out.pop(bias)
  for copy, original in copies:
    if copy in out:
      x = out.pop(copy)
      if not np.array_equal(x, out.setdefault(original, x)):
        raise WeightsError(f'{copy} is not {original}' + ', though tie_word_embeddings is true' * (copy == head))
      left.append(f'{copy}: the same as {original}')
  return out, tied, left


def _has(layout, part, tensors):
  return any(row.theirs in tensors for row in layout.rows if row.part == part)


def _layers(row, sizes):
  return range(sizes['L'] if row.ours.startswith(_BLOCKS) else 1)


def _names(row, layer):
  name = row.theirs.replace('.N.', f'.{layer}.')
  return [name.replace('*', which) for which in ('query', 'key', 'value')] if '*' in name else [name]


def _ours(row, sizes):
  """The shape of our array."""
  letters = {'flip': row.sizes[::-1], 'words': row.sizes.replace('V', 'R'), 'qkv': row.sizes[:-1] + 'Q'}
  lead = 'L' if row.ours.startswith(_BLOCKS) else ''
  return tuple(sizes[s] for s in lead + letters.get(row.form, row.sizes))


def _check(arrays, name, want):
  if name not in arrays:
    raise WeightsError(f'{name} is missing')
  if arrays[name].shape != want:
    raise WeightsError(f'{name} has the shape {arrays[name].shape}, not {want}')


def _taken(tensors, name, row, sizes):
  """One of their arrays as f32."""
  _check(tensors, name, tuple(sizes[s] for s in row.sizes))
  x = tensors[name]
  if x.dtype.name not in ('float32', 'float16', 'bfloat16'):
    raise WeightsError(f'{name} is {x.dtype.name}; expected float32, float16 or bfloat16')
  return x.astype(np.float32)


def _filled(words):
  return -(-words // model.MULTIPLE) * model.MULTIPLE


def _to_ours(row, arrays, heads):
  x = arrays[0]
  if row.form == 'words':
    return np.pad(x, [(0, _filled(len(x)) - len(x))] + [(0, 0)] * (x.ndim - 1))
  if row.form == 'qkv':          # [.., 3, H, Dh], by one array or three -> columns [.., H, 3, Dh]
    parts = [x.T for x in arrays] if len(arrays) == 3 else np.split(x, 3, -1)
    parts = [p.reshape(*p.shape[:-1], heads, -1) for p in parts]
    return np.stack(parts, -2).reshape(*parts[0].shape[:-2], -1)
  return x.T if row.form == 'flip' else x


def _to_theirs(row, x, heads, vocabulary):
  """The inverse of _to_ours."""
  if row.form == 'words':
    return [x[:vocabulary]]
  if row.form == 'qkv':
    columns = x.reshape(*x.shape[:-1], heads, 3, -1)
    parts = [columns[..., i, :].reshape(*x.shape[:-1], -1) for i in range(3)]
    return [p.T for p in parts] if '*' in row.theirs else [np.concatenate(parts, -1)]
  return [x.T if row.form == 'flip' else x]


def _fitting(m):
  """The layout of a section config.model. Raises ConfigError where transformers has no such body."""
  kind = 'gpt2' if m.causal else 'bert'
  for key, value in LAYOUTS[kind].body.items():
    if m[key] != value:
      raise ConfigError(f"config.model.{key} = {m[key]!r}: transformers' {kind} has {value!r}")
  if m.activation not in _ACTIVATIONS.values():
    raise ConfigError(f"config.model.activation = {m.activation!r}: transformers' {kind} has none; gelu or gelu_tanh")
  if kind == 'bert' and not m.types:
    raise ConfigError("config.model.types = 0: transformers' bert has at least 1")
  return LAYOUTS[kind]


def _facts(layout, body, sizes, parts):
  """config.json."""
  m, kind = body.config.model, 'gpt2' if layout is _GPT2 else 'bert'
  classes = {'transform': 'BertForMaskedLM', 'classifier': 'BertForSequenceClassification', '': 'BertModel'}
  named = 'GPT2LMHeadModel' if kind == 'gpt2' else next(c for part, c in classes.items() if part in parts)
  values = {**{k: m[k] for k in ('heads', 'norm_eps', 'dropout', 'attention_dropout')}, **sizes,
            'activation': 'gelu' if m.activation == 'gelu' else 'gelu_new'}
  facts = {'model_type': kind, 'architectures': [named], 'tie_word_embeddings': 'head' not in parts,
           **{key: values[name] for name, key in layout.keys.items()}}
  if kind == 'gpt2':
    facts |= {'embd_pdrop': m.dropout, **dict.fromkeys(IDS)}     # their own default is a word of GPT-2's vocabulary
  if 'classifier' in parts:
    names = body.labels or [f'LABEL_{i}' for i in range(sizes['K'])]
    facts |= {'id2label': dict(enumerate(names)), 'label2id': {n: i for i, n in enumerate(names)}}
  return facts | body.ids
