"""The command line: exit codes, one-line errors, and verify finding every broken shard, record and picture."""

import json
import os
import shutil

import pytest
from data_pipelines import DataError, coco, pipeline, prepare, prepared
from lab import config as core
from ml_collections import ConfigDict

from tests import coco_fixture


@pytest.fixture(scope='module')
def clean(tmp_path_factory):
  root = tmp_path_factory.mktemp('clean')
  return coco.prepare(coco_fixture.small_set(root / 'raw'), str(root / 'out'), shards=2)[0]


@pytest.fixture
def folder(clean, tmp_path):
  """A copy to be broken."""
  return shutil.copytree(clean, tmp_path / 'data')


def shard(folder, i=1):
  return str(folder / f'coco_pose-train.tfrecord-{i:05d}-of-00002')


def train(folder, count=6, **options):
  """Batches of 4 and the records that were bad."""
  source = coco.source(str(folder), 'train', ConfigDict({'size': 32}), None, 8, people=4)
  config = core.core().input
  config.update(options)
  batches = pipeline.Batches(source, config, 4, range(4), train=True)
  return [b for b, _ in zip(iter(batches), range(count))], batches.bad


def main(capsys, *argv):
  code = prepare.main(['prepare', *map(str, argv)])
  out, err = capsys.readouterr()
  return code, out, err


@pytest.mark.parametrize('argv, words', [
    ([], 'no command'), (['coco'], 'needs --raw_dir'),
    (['cocoa'], 'unknown command cocoa; one of coco, mnist, moving_mnist, clips, corpus, cola, sst2, arc, books, '),
    (['coco', '--raw_dir=.'], 'needs --out_dir'), (['coco', '--shards=0'], '--shards=0'), (['verify'], 'one folder'),
    (['coco', '--shard=3'], "'shard'"), (['coco', 'x', '--raw_dir=.', '--out_dir=.'], "unexpected 'x'"),
    (['verify', 'a', '--dir=b'], 'one folder'), (['coco', '--shards=many'], 'many'),
    (['coco', '--frames=20'], 'coco takes no --frames'), (['verify', 'a', '--noparity_split'], 'takes no'),
    (['mnist', '--digits=2'], 'mnist takes no --digits'), (['moving_mnist', '--digits=0'], '--digits=0'),
    (['clips', '--size=64'], 'clips takes no --size; it takes --layout, --frames, --parity_split'),
    (['clips', '--layout=NHWT'], 'NHWT'), (['moving_mnist', '--size=27'], '--size=27'),
    (['corpus', '--raw_dir=.', '--out_dir=.'], 'corpus needs --tokenizer'), (['corpus', '--length=2'], '--length=2'),
    (['sst2', '--raw_dir=.', '--out_dir=.'], 'sst2 needs --tokenizer'), (['coco', '--tokenizer=bpe'], 'takes no'),
    (['cola', '--vocabulary=99'], 'cola takes no --vocabulary; it takes --tokenizer'),
    (['corpus', '--vocabulary=0'], '--vocabulary=0')])
def test_bad_usage_exits_2_with_one_line(capsys, argv, words):
  code, out, err = main(capsys, *argv)
  assert code == 2 and words in err and err.count('\n') == 1 and not out


def test_help(capsys):
  code, out, _ = main(capsys, '--help')
  assert code == 0 and '--raw_dir' in out and 'verify FOLDER' in out


def test_data_errors_exit_3_with_one_line(capsys, tmp_path):
  (tmp_path / 'file').write_text('')
  for argv in (['coco', f'--raw_dir={tmp_path}/none', f'--out_dir={tmp_path}'], ['verify', f'{tmp_path}/none'],
               ['mnist', f'--raw_dir={tmp_path}/file', f'--out_dir={tmp_path}'],
               ['clips', f'--raw_dir={tmp_path}/none', f'--out_dir={tmp_path}'],
               ['corpus', f'--raw_dir={tmp_path}/none', f'--out_dir={tmp_path}', '--tokenizer=bpe'],
               ['cola', f'--raw_dir={tmp_path}/file', f'--out_dir={tmp_path}', '--tokenizer=x'],
               ['coco', f'--raw_dir={tmp_path}', f'--out_dir={tmp_path}'], ['verify', tmp_path]):
    code, _, err = main(capsys, *argv)
    assert code == 3 and str(tmp_path) in err and err.count('\n') == 1, err


def test_prepare_prints_a_report_and_repeats_itself(capsys, tmp_path):
  raw = coco_fixture.small_set(tmp_path / 'raw')
  argv = ['coco', f'--raw_dir={raw}', f'--out_dir={tmp_path}/out', '--shards=3']
  code, out, err = main(capsys, *argv)
  assert code == 0 and json.loads(out)['splits']['train']['people'] == 18 and 's left' in err
  folder = tmp_path / 'out' / coco.NAME / coco.VERSION
  stamp = os.stat(folder / prepared.MANIFEST).st_mtime_ns
  assert main(capsys, *argv)[0] == 0 and os.stat(folder / prepared.MANIFEST).st_mtime_ns == stamp
  assert len([n for n in os.listdir(folder) if '.tfrecord' in n]) == 3
  assert main(capsys, *argv[:-1])[0] == 3             # other options: refused, nothing overwritten
  code, out, _ = main(capsys, 'verify', tmp_path / 'out')
  assert code == 0 and '12 records, all good' in out


def test_records_do_not_depend_on_the_run(clean, tmp_path):
  again = coco.prepare(coco_fixture.small_set(tmp_path / 'raw'), str(tmp_path / 'out'), shards=2)[0]
  assert prepared.manifest(again)['splits'] == prepared.manifest(clean)['splits']


def payload(path):
  coco_fixture.flip(path, pipeline.framing(path)[0][2] + 200)


def length(path):
  coco_fixture.flip(path, pipeline.framing(path)[0][2])


FAULTS = {
    'payload': (payload, '#2: its checksum is wrong', '#2'),
    'length': (length, '#2: record 2 at byte', 'record 2'),
    'cut': (lambda p: coco_fixture.cut(p, 100), 'is cut off', 'is cut off'),
    'half picture': (lambda p: coco_fixture.rewrite(p, 2, lambda data: data[:len(data) // 2]), '#2: image', '#2'),
    'text': (lambda p: coco_fixture.rewrite(p, 2, lambda data: b'no picture ' * 50), 'no JPEG', '#2'),
    'missing': (os.remove, 'is missing', 'is missing'),
    'empty': (lambda p: open(p, 'wb').close(), 'content has changed', '12 promised'),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_fault_is_found_by_verify_and_stops_training(capsys, folder, fault):
  change, found, raised = FAULTS[fault]
  change(shard(folder))
  code, out, _ = main(capsys, 'verify', folder)
  assert code == 3 and any(shard(folder) in line and found in line for line in out.splitlines()), out
  assert shard(folder, 0) not in out
  with pytest.raises(DataError, match=raised) as e:
    train(folder)
  assert shard(folder) in str(e.value) or fault == 'empty' and str(folder) in str(e.value)


@pytest.mark.parametrize('cache', [True, False])
@pytest.mark.parametrize('fault', ['payload', 'half picture', 'text'])
def test_bad_limit_leaves_the_rest_unchanged(clean, folder, fault, cache):
  FAULTS[fault][0](shard(folder))
  found, bad = train(folder, bad_limit=0.1, cache=cache)
  first = len(pipeline.framing(shard(folder, 0))[0])
  assert bad == [first + 2]
  for a, b in zip(found, train(clean)[0], strict=True):
    rows = b['record'] != first + 2
    assert (a['mask'] == rows).all() and all((a[k][rows] == b[k][rows]).all() for k in b)


def test_verify_lists_several_faults(capsys, folder):
  for record in (1, 3):
    coco_fixture.rewrite(shard(folder, 0), record, lambda data: b'\xff\xd8 half')
  payload(shard(folder, 1))
  shutil.copy(shard(folder, 0), folder / 'coco_pose-train.tfrecord-00002-of-00002')
  code, out, _ = main(capsys, 'verify', f'--dir={folder}')
  assert code == 3
  for words in ('00000-of-00002#1: image', '00000-of-00002#3: image', '00001-of-00002#2: its checksum', 'extra shard'):
    assert words in out


def test_verify_finds_a_changed_record_with_right_checksums(capsys, folder):
  coco_fixture.rewrite(shard(folder), 0, lambda data: data + b'\0')     # decodes, but is not what was prepared
  code, out, _ = main(capsys, 'verify', folder)
  assert code == 3 and 'sha256 differs' in out and '1 problems' in out


@pytest.mark.parametrize('content', ['', '{', '[1]', '{"splits": {}}'])
def test_broken_manifest_is_named(folder, content):
  (folder / prepared.MANIFEST).write_text(content)
  with pytest.raises(DataError, match='manifest.json is unreadable'):
    train(folder)


def test_folder_without_a_manifest_is_incomplete(folder):
  os.remove(folder / prepared.MANIFEST)
  with pytest.raises(DataError, match='manifest.json is missing'):
    train(folder)


def test_there_are_never_more_shards_than_records(tmp_path):
  folder = coco.prepare(coco_fixture.small_set(tmp_path / 'raw'), str(tmp_path / 'out'))[0]
  assert all(1 <= len(s['shards']) <= s['records'] for s in prepared.manifest(folder)['splits'].values())
