"""Any text takes the same program and the same memory."""

import json
import os

import pytest

from benchmarks import agent_any_text


@pytest.mark.skipif(not os.environ.get('LAB_LONG'), reason='two minutes and more: LAB_LONG=1')
def test_odd_texts_among_others_need_no_other_program(tmp_path, capsys):
  (tmp_path / 'texts').mkdir()
  for i in range(20):
    (tmp_path / 'texts' / f'{i}.txt').write_text(f'The {i}th night began like that of the night before. ' * 9)
  code = agent_any_text.main(['agent_any_text', f'--texts={tmp_path}/texts', f'--workdir={tmp_path}/out', '--steps=24',
                              '--config=configs/agent.py:smoke', '--config.input.batch_size=8',
                              '--config.input.eval_batch_size=8', '--config.checkpoint.steps=0'])
  found = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert code == 0 and found['steps'] == 24 and found['packs'] > 100
  assert found['odd'] == len(agent_any_text.odd()) and found['writings'] == 20 + found['odd']
  assert found['compilations'] == 1
  assert found['peak'] >= found['early'] > 0 < found['foretold']
