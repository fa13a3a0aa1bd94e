"""A run's page: everything is on it, nothing is loaded by it, and what the files say is only ever text."""

import base64
import html.parser
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from data_pipelines import films

from lab import config as configs, page, page_parts, plot
from lab.task import ConfigError

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
COMMAND = ['python', '-m', 'lab.main', '--config=configs/pose.py', '--workdir=runs/my run', '--mode', 'train']
SECTIONS = ('scores', 'curves', 'pictures', 'goodput', 'environment', 'config', 'checkpoints', 'resume', 'parameters')


def picture(path, shade=0):
  """Writes a PNG of 4 x 4 pixels and returns its bytes."""
  from PIL import Image
  os.makedirs(os.path.dirname(path), exist_ok=True)
  Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(path)
  with open(path, 'rb') as f:
    return f.read()


def as_json(workdir, name, content):
  """Writes a JSON file of the workdir."""
  path = os.path.join(workdir, name)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'w', encoding='utf-8') as f:
    json.dump(content, f)


def as_lines(workdir, name, rows):
  """Writes a file of JSON lines."""
  with open(os.path.join(workdir, name), 'w', encoding='utf-8') as f:
    f.writelines(json.dumps(row) + '\n' for row in rows)


@pytest.fixture
def workdir(tmp_path):
  """A run of 300 steps, of which 240 are done: every file that a run leaves."""
  folder = str(tmp_path / 'first-run')
  config = json.loads(configs.core().to_json())
  config |= {'task': 'tests.toy', 'total_steps': 300, 'depth': 7}
  config['checkpoint'] |= {'best': 'AP', 'keep': 5}
  as_json(folder, 'config.json', config)
  rows = [{'step': s, 'split': 'train', 'loss': 1 / s, 'learning_rate': 1e-3, 'gradient_norm': 0.5, 'skipped': 2.0}
          for s in range(2, 241, 2)]
  for step, score in ((120, 0.375), (240, 0.3125)):
    rows += [{'step': step, 'split': 'eval', 'loss': 0.25, 'AP': score, 'stage/loss': 0.1, 'examples': 5000.0},
             {'step': step, 'split': 'eval_raw', 'loss': None, 'AP': score / 2}]
    as_json(folder, f'checkpoints/{step}/meta/metadata', {'scores': {'AP': score, 'loss': 0.25, 'stage/loss': 0.1}})
    picture(os.path.join(folder, 'pictures', f'{step:07d}_cat.png'), step)
  picture(os.path.join(folder, 'pictures', '0000240_dog.png'))
  os.makedirs(os.path.join(folder, 'checkpoints', '300'))                # a save that was cut off
  as_lines(folder, 'metrics.jsonl', rows)
  as_lines(folder, 'timings.jsonl', [{'step': s, 'items_per_s': 100.0, 'data_wait_share': 0.1, 'seconds': s}
                                     for s in range(2, 241, 2)])
  phases = ('start', 'compile', 'restore', 'wait', 'step', 'evaluate', 'save')
  as_lines(folder, 'ledger.jsonl', [
      {'began': 1000.0, 'time': 1100.0, 'step': 240, 'event': 'end', 'compilations': 3,
       'seconds': {**dict.fromkeys(phases, 0.0), 'start': 5.0, 'compile': 20.0, 'step': 75.0}}])
  as_json(folder, 'environment.json', {
      'command': COMMAND, 'python': '3.11.7', 'platform': 'Linux', 'devices': '1 x NVIDIA H100', 'processes': 1,
      'versions': {'jax': '0.10.2'}, 'commit': 'abc1234'})
  as_json(folder, 'memory.json', {'parameters': 1 << 30, 'optimizer': 2 << 30, 'batch': 1 << 20, 'activations': 5 << 30,
                                  'limit': 80 << 30})
  with open(os.path.join(folder, 'parameters.txt'), 'w', encoding='utf-8') as f:
    f.write('| dense/kernel | (4, 8) |\n')
  return folder


class Reader(html.parser.HTMLParser):
  """What a browser would see: tags, the text of each section, and everything that it would fetch."""

  def __init__(self, source):
    super().__init__()
    self.tags, self.fetched, self.ids, self.links, self.text, self.section = set(), [], [], [], {}, ''
    self.feed(source)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    for name, value in attrs:
      assert not name.startswith('on'), f'<{tag} {name}={value}>'
      if name in ('src', 'href', 'xlink:href', 'srcset', 'action', 'data', 'poster', 'background'):
        (self.links if tag == 'a' else self.fetched).append(value)
      if name == 'id':
        self.ids.append(value)
        self.section = value if tag == 'section' else self.section

  def handle_data(self, data):
    self.text[self.section] = self.text.get(self.section, '') + data


def read(workdir):
  """Writes the page and reads it back: (source, Reader)."""
  path = page.write(workdir)
  assert path == os.path.join(workdir, 'run.html') and not os.path.exists(path + '.new')
  with open(path, encoding='utf-8') as f:
    source = f.read()
  return source, Reader(source)


def test_every_section_shows_its_file(workdir):
  _, got = read(workdir)
  text = got.text
  assert [s for s in text if s] == list(SECTIONS)
  assert 'first-run' in text[''] and 'tests.toy' in text[''] and 'not finished: step 240 of 300' in text['']
  assert re.search(r'AP0\.3125raw weights 0\.1562loss0\.25raw weights not finite', text['scores'])
  assert 'At step 240, on 5,000 examples' in text['scores'] and 'stage' not in text['scores']
  for title in ('Loss (training smoothed)', 'AP', 'Learning rate', 'Gradient norm (smoothed)', 'Speed',
                'speed (items/s)', 'step (updates)', 'eval, raw weights'):
    assert title in text['curves']
  assert 'useful steps75.075.0%' in text['goodput'] and 'compilation20.020.0%' in text['goodput']
  assert '75.0% of 1m40s' in text['goodput'] and 'Restarts: 0.' in text['goodput']
  for fact in ('1 x NVIDIA H100', '3.11.7', 'abc1234', 'jax0.10.2', 'optimizer state2 GiB2.5%', 'batch1 MiB'):
    assert fact in text['environment']
  keep = configs.core().checkpoint.keep
  assert f'checkpoint.keep5{keep}' in text['config'] and 'depth7' in text['config']    # key, here, default; no default
  assert 'step' in text['checkpoints'] and '2400.3125' in text['checkpoints'] and '300' not in text['checkpoints']
  assert 'dense/kernel' in text['parameters']


def test_the_best_checkpoint_is_marked(workdir):
  assert re.findall(r'<tr class="best"><td>(\d+)', read(workdir)[0]) == ['120']    # AP 0.375 > 0.3125
  with open(os.path.join(workdir, 'config.json'), encoding='utf-8') as f:
    config = json.load(f)
  config['checkpoint']['best'] = '-AP'
  as_json(workdir, 'config.json', config)
  assert re.findall(r'<tr class="best"><td>(\d+)', read(workdir)[0]) == ['240']


def test_changed_keys_are_marked(workdir):
  marked = re.findall(r'<tr class="changed"><th scope="row">([^<]*)', read(workdir)[0])
  assert marked == ['task', 'total_steps', 'checkpoint.keep', 'checkpoint.best']


def test_commands_can_be_copied(workdir):
  source, got = read(workdir)
  start = "python -m lab.main --config=configs/pose.py '--workdir=runs/my run'"
  for command in (start, start + ' --mode=eval --step=best', start + ' --mode=predict --input=PATH'):
    assert command in got.text['resume']
  assert source.count('<pre class="words">') == 3 and 'train' not in got.text['resume']


def test_warnings(workdir):
  source, got = read(workdir)
  assert 'has not reached its last step: it would go on from step 240.' in got.text['']
  assert '2 updates were skipped' in got.text['']
  as_json(workdir, 'checkpoints/300/meta/metadata', {'scores': {}})
  as_lines(workdir, 'metrics.jsonl', [{'step': 300, 'split': 'train', 'loss': 1.0, 'skipped': 0.0}])
  source, got = read(workdir)
  assert 'finished 300 of 300 steps' in got.text[''] and 'class="warning"' not in source


def test_pictures_lie_inside_first_beside_newest(workdir):
  source, got = read(workdir)
  pictures = os.path.join(workdir, 'pictures')
  inside = [base64.b64decode(m) for m in re.findall(r'src="data:image/png;base64,([^"]*)"', source)]
  want = []
  for name in ('0000120_cat.png', '0000240_cat.png', '0000240_dog.png'):
    with open(os.path.join(pictures, name), 'rb') as f:
      want.append(f.read())
  assert inside == want
  assert set(got.links) <= {f'#{i}' for i in got.ids}                    # enlarging is a link within the page
  for i in range(20):
    picture(os.path.join(pictures, f'0000240_more{i}.png'))
  assert len(re.findall('class="name"', read(workdir)[0])) == page_parts.PICTURES


def test_films_are_shown_like_pictures(workdir):
  pictures = os.path.join(workdir, 'pictures')
  film = films.gif(np.arange(3 * 4 * 4 * 3, dtype=np.uint8).reshape(3, 4, 4, 3))
  for name, content in (('0000240_film', film), ('0000240_torn', film[:-1]), ('0000240_fake', b'PNG' + film)):
    with open(os.path.join(pictures, name + '.gif'), 'wb') as f:
      f.write(content)
  source, got = read(workdir)
  assert [base64.b64decode(m) for m in re.findall(r'src="data:image/gif;base64,([^"]*)"', source)] == [film]
  assert got.text['pictures'].count('no complete GIF, or too large') == 2


def test_nothing_is_loaded(workdir):
  source, got = read(workdir)
  assert got.fetched and all(v.startswith(('data:image/png;base64,', '#')) for v in got.fetched)
  assert not got.tags & {'script', 'iframe', 'object', 'embed', 'link', 'base', 'form'}
  assert '@import' not in source and not re.search(r'url\((?!#)', source)
  assert f'content="{page.POLICY}"' in source and "default-src 'none'" in page.POLICY
  assert len(set(got.ids)) == len(got.ids)


def test_names_are_only_text(workdir, tmp_path):
  evil = '<script>alert(1)</script>"\'&'
  outside = picture(str(tmp_path / 'outside.png'), 99)
  pictures = os.path.join(workdir, 'pictures')
  as_lines(workdir, 'metrics.jsonl', [{'step': 1, 'split': 'eval', evil: 1.0, 'AP': evil, 'loss': 1.0},
                                      {'step': 1, 'split': evil, 'loss': 1.0}])
  as_json(workdir, 'config.json', {'task': evil, evil: evil, 'checkpoint': {'best': evil}, 'total_steps': evil})
  as_json(workdir, 'environment.json', {'command': [evil, '../x'], 'devices': evil, 'versions': {evil: evil}})
  as_json(workdir, 'checkpoints/240/meta/metadata', {'scores': {evil: evil}})
  with open(os.path.join(workdir, 'parameters.txt'), 'w', encoding='utf-8') as f:
    f.write('</pre>' + evil)
  shown = picture(os.path.join(pictures, f'0000300_{evil.replace("/", "")}.png'), 50)
  os.symlink('../../outside.png', os.path.join(pictures, '0000300_linked.png'))
  with open(os.path.join(pictures, '0000300_fake.png'), 'wb') as f:
    f.write(b'GIF89a' + outside)
  with open(os.path.join(pictures, '0000300_torn.png'), 'wb') as f:
    f.write(outside[:-6])
  os.mkfifo(os.path.join(pictures, '0000300_pipe.png'))
  renamed = os.path.join(tmp_path, 'a"><script>')
  os.rename(workdir, renamed)
  source, got = read(renamed)
  assert 'script' not in got.tags and evil in got.text['config'] and evil in got.text['parameters']
  inside = [base64.b64decode(m) for m in re.findall(r'src="data:image/png;base64,([^"]*)"', source)]
  assert inside == [shown]
  assert got.text['pictures'].count('no complete PNG') == 4


def test_a_linked_folder_of_pictures_is_not_read(workdir, tmp_path):
  os.rename(os.path.join(workdir, 'pictures'), tmp_path / 'elsewhere')
  os.symlink(tmp_path / 'elsewhere', os.path.join(workdir, 'pictures'))
  assert 'No pictures' in read(workdir)[1].text['pictures']


def test_what_is_missing_is_told(tmp_path):
  as_lines(tmp_path, 'metrics.jsonl', [])
  _, got = read(str(tmp_path))
  assert [s for s in got.text if s] == list(SECTIONS)
  for section, words in (('scores', 'No evaluation yet'), ('curves', 'No curves'), ('pictures', 'No pictures'),
                         ('goodput', 'no ledger'), ('environment', 'environment.json is missing'),
                         ('environment', 'memory.json is missing'), ('config', 'config.json is missing'),
                         ('checkpoints', 'No checkpoint'), ('resume', 'Type the command that started the run'),
                         ('parameters', 'parameters.txt is missing')):
    assert words in got.text[section]


@pytest.mark.parametrize('content', ['{"step": ', '[]', 'null', '{"step": "x", "split": 3}', '\x00', '{}'])
def test_broken_files_are_told(workdir, content):
  for name in ('config.json', 'environment.json', 'memory.json', 'metrics.jsonl', 'timings.jsonl', 'ledger.jsonl',
               'checkpoints/240/meta/metadata'):
    with open(os.path.join(workdir, name), 'w', encoding='utf-8') as f:
      f.write(content + '\n')
  _, got = read(workdir)
  assert [s for s in got.text if s] == list(SECTIONS)
  assert 'a line of metrics.jsonl or timings.jsonl is broken' in got.text['']
  assert ('config.json can\'t be read' in got.text['']) == (not content.endswith('}'))


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(ConfigError, match='no run is there'):
    page.write(str(tmp_path))
  assert os.listdir(tmp_path) == []


def test_long_training_curves_are_smoothed_and_short_ones_are_not(workdir):
  assert 'smoothed' in read(workdir)[1].text['curves']
  as_lines(workdir, 'metrics.jsonl', [r for r in plot.rows(workdir) if r['step'] < 100 and r['split'] == 'train'])
  assert 'smoothed' not in read(workdir)[1].text['curves']


def browse(*arguments):
  """Runs headless Chromium and returns what it prints."""
  done = subprocess.run([CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars', *arguments],
                        capture_output=True, text=True, timeout=300, check=True)
  return done.stdout


@pytest.mark.skipif(not CHROMIUM, reason='needs Chromium on the PATH')
def test_a_browser_shows_it(workdir, tmp_path):
  from PIL import Image
  address = f'file://{page.write(workdir)}'
  profile = f'--user-data-dir={tmp_path / "profile"}'
  got = Reader(browse(profile, '--dump-dom', address))
  assert 'not finished: step 240 of 300' in got.text[''] and 'step (updates)' in got.text['curves']
  screenshot = str(tmp_path / 'page.png')
  browse(profile, f'--screenshot={screenshot}', '--window-size=1200,2400', address)
  with Image.open(screenshot) as image:
    assert image.size == (1200, 2400)
    colours = {c for _, c in image.convert('RGB').getcolors(1 << 24)}
  curve = tuple(int(plot.COLOURS[0][i:i + 2], 16) for i in (1, 3, 5))
  assert len(colours) > 100 and curve in colours                          # a page, and curves drawn on it
