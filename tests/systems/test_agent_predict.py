"""Text trees from the command line: what a run predicts, and files that it packs."""

import json
import shutil

import pytest
from lab import main
from lab.systems.agent import compress

FLAGS = ['--config=configs/agent.py:smoke', '--config.data.rows=(40,8)', '--config.data.lengths=(12,6)',
         '--config.model.noise=4']


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The workdir of a run of one update."""
  workdir = str(tmp_path_factory.mktemp('agent') / 'run')
  code = main.main(['lab', *FLAGS, f'--workdir={workdir}', '--config.total_steps=1', '--config.input.batch_size=8',
                    '--config.eval_pictures=0', '--config.optim.second.params=generator|critic',
                    '--config.optim.second.name=adamw', '--mode=train', '--input=', '--output='])
  assert code == 0
  return workdir


def predicted(run, verb, given, tmp_path):
  out = str(tmp_path / verb)
  code = main.main(['lab', f'--workdir={run}', '--mode=predict', f'--input={given}', f'--output={out}',
                    f'--config.predict.verb={verb}', *FLAGS])
  assert code == 0
  with open(f'{out}/predictions.jsonl', encoding='utf-8') as f:
    return [json.loads(line) for line in f]


def test_a_text_is_rebuilt_encoded_and_its_nodes_have_neighbours(run, tmp_path, capsys):
  text = 'A cat sat. A dog sat. No cat ran.'
  record, = predicted(run, 'rebuild', text, tmp_path)
  assert [n['text'] for n in record['sentences']] == ['A cat sat.', 'A dog sat.', 'No cat ran.']
  assert all(n['exact'] == (n['rebuilt'] == n['text']) for level in ('words', 'sentences') for n in record[level])
  assert '  text    A dog sat.' in capsys.readouterr().out
  record, = predicted(run, 'encode', text, tmp_path)
  vectors = [n['vector'] for n in record['sentences']]
  assert [len(v) for v in vectors] == [16] * 3 and sum(x * x for x in vectors[0]) / 16 == pytest.approx(1, abs=1e-3)
  near, = predicted(run, 'neighbours', text, tmp_path)
  first = near['sentences'][0]
  assert {n['text'] for n in first['near']} == {'A dog sat.', 'No cat ran.'}
  assert first['near'][0]['cosine'] >= first['near'][1]['cosine']
  wanted = sum(a * b for a, b in zip(vectors[0], vectors[1])) / 16
  assert next(n['cosine'] for n in first['near'] if n['text'] == 'A dog sat.') == pytest.approx(wanted, abs=1e-3)
  again, = predicted(run, 'decode', json.dumps({'level': 1, 'vector': vectors[1]}), tmp_path)
  rebuilt, = predicted(run, 'rebuild', text, tmp_path)
  assert again['text'] == rebuilt['sentences'][1]['rebuilt']


def test_a_way_leads_from_one_sentence_to_another_and_texts_are_drawn(run, tmp_path):
  record, = predicted(run, 'interpolate', json.dumps(['A cat sat.', 'No dog ran.']), tmp_path)
  ends = predicted(run, 'rebuild', 'A cat sat. No dog ran.', tmp_path)[0]['sentences']
  assert len(record['texts']) == 8
  assert [record['texts'][0], record['texts'][-1]] == [n['rebuilt'] for n in ends]
  assert [r['name'] for r in predicted(run, 'generate', '2', tmp_path)] == ['draw0', 'draw1']


def test_a_file_is_packed_and_comes_back(run, tmp_path, capsys):
  source, packed, back = (tmp_path / name for name in ('a.txt', 'a.tree', 'b.txt'))
  source.write_bytes(b'A cat sat.\r\n\r\nNo\x00thing \xff \xe2\x80\x94 else.\n')
  given = [f'--workdir={run}', f'--from={source}', f'--to={packed}']
  assert compress.main(['pack', *given]) == 0
  told = json.loads(capsys.readouterr().out)
  assert told['bytes'] == len(source.read_bytes()) and told['coded_bytes'] == len(packed.read_bytes())
  assert compress.main(['unpack', f'--workdir={run}', f'--from={packed}', f'--to={back}']) == 0
  assert back.read_bytes() == source.read_bytes()
  # a run that was made before these keys were
  older = tmp_path / 'older'
  shutil.copytree(run, older)
  made = json.loads((older / 'config.json').read_text())
  del made['data']['joined'], made['data']['mixed'], made['loss']['join']
  (older / 'config.json').write_text(json.dumps(made))
  assert compress.main(['unpack', f'--workdir={older}', f'--from={packed}', f'--to={tmp_path}/c.txt']) == 0
  assert (tmp_path / 'c.txt').read_bytes() == source.read_bytes()
  capsys.readouterr()
  for argv, code in ((['unpack', *given], 3), (['pack', *given[1:], f'--workdir={tmp_path}'], 2),
                     (['pack', f'--workdir={run}', f'--from={tmp_path}/none', f'--to={packed}'], 3)):
    assert compress.main(argv) == code
    assert capsys.readouterr().err.startswith('error: ')
  assert back.read_bytes() == source.read_bytes()
