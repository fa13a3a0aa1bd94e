"""What processes tell each other, without any: a coordinator's store of strings, a folder, a clock."""

import os

import jax
import pytest

from lab import peers
from lab.files import StorageError


class Ended(Exception):
  """Stands for the end of the process."""


class Store:
  """The coordinator's store, as JAX's client shows it."""

  def __init__(self):
    self.values, self.met, self.silent = {}, [], False

  def key_value_set(self, key, value, allow_overwrite=False):
    if self.silent:
      raise jax.errors.JaxRuntimeError('UNAVAILABLE')
    assert allow_overwrite or key not in self.values
    self.values[key] = value

  def key_value_dir_get(self, key):
    return [(k, v) for k, v in self.values.items() if k.startswith(key)]

  def wait_at_barrier(self, key, milliseconds):
    assert milliseconds > 0
    self.met.append(key)


@pytest.fixture
def store(monkeypatch):
  """A store of a run of several processes, of which this is number 0; an end is an exception."""
  found = Store()
  monkeypatch.setattr(peers, '_client', lambda: found)

  def end(text):
    raise Ended(text)
  monkeypatch.setattr(peers, 'end', end)
  return found


@pytest.fixture
def beat(store):
  """A beat whose thread does nothing by itself."""
  found = peers.Beat(60)
  found.stopped.set()
  found.thread.join()
  found.stopped.clear()
  return found


def test_processes_that_differ_are_told_with_the_key(store):
  store.values |= {'lab/program/1': '{"jax": "0.1", "config.seed": 0}', 'lab/program/2': '{"jax": "0.2", "extra": 1}'}
  with pytest.raises(peers.DistributedError) as e:
    peers.agree('program', {'jax': '0.2', 'config.seed': 0})
  assert e.value.exit_code == 7
  assert str(e.value).startswith(
      "the processes do not run the same program: jax is '0.1' on process 1, '0.2' on process 0; "
      "config.seed is None on process 2, 0 on process 0; extra is 1 on process 2, None on process 0.")


def test_processes_that_agree_go_on_and_one_alone_asks_nobody(store, monkeypatch):
  store.values['lab/data/1'] = '{"split": "abc"}'
  peers.agree('data', {'split': 'abc'})
  monkeypatch.setattr(peers, '_client', lambda: None)
  peers.agree('data', {'split': 'other'})


def test_every_meeting_is_another(store, monkeypatch):
  peers.meet()
  peers.meet()
  assert len(set(store.met)) == 2
  monkeypatch.setattr(peers, '_client', lambda: None)
  peers.meet()
  assert len(store.met) == 2


def test_the_source_has_one_hash(tmp_path):
  assert peers.code() == peers.code() and len(peers.code()) == 16


@pytest.mark.parametrize('text, silent, said', [
    ('7 40', 1, ''), ('7 40', 11, 'process 1 has been silent for 11.0 s, since step 40'), ('done', 1e9, ''),
    ('7 40', 61, 'process 1 has been silent for 61 s; its last step was 40. This one was at step 41'),
    ('failed with code 3: x.tfrecord#5 is broken', 1, 'process 1 failed with code 3: x.tfrecord#5 is broken')])
def test_what_silence_means(beat, caplog, text, silent, said):
  beat.step = 41
  if 'failed' in text or silent == 61:
    with pytest.raises(Ended, match=said):
      beat._look(1, text, silent)
  else:
    beat._look(1, text, silent)
    assert said in caplog.text and bool(said) == bool(caplog.records)
    beat._look(1, text, 0)
    assert ('process 1 is back after more than 11.0 s' in caplog.text) == bool(said)
  beat._look(0, text, 1e9)      # its own words mean nothing to a process


@pytest.mark.parametrize('silent', [False, True])      # a store that is gone harms nobody
@pytest.mark.parametrize('ending, said', [
    (lambda beat: beat.stop(), 'done'), (lambda beat: beat.fail(3, 'x is broken'), 'failed with code 3: x is broken')])
def test_it_says_once_how_it_ends(store, beat, ending, said, silent):
  store.silent = silent
  ending(beat)
  beat.stop()
  beat.fail(1, 'another')
  assert silent or store.values['lab/beats/0'] == said


def test_the_roll_is_called_in_no_folder_from_elsewhere(tmp_path):
  (tmp_path / 'elsewhere').mkdir()
  (tmp_path / 'elsewhere' / '1').write_text('mine')
  (tmp_path / 'run').mkdir()
  (tmp_path / 'run' / peers.FOLDER).symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(StorageError, match='is a link'), peers.RollCall(str(tmp_path / 'run'), '1', 2, 300):
    pass
  assert (tmp_path / 'elsewhere' / '1').read_text() == 'mine'
  with pytest.raises(StorageError, match="can't be written"), peers.RollCall(f'{tmp_path}/elsewhere/1', '1', 2, 300):
    pass


def test_the_roll_names_who_is_missing(tmp_path):
  roll = peers.RollCall(str(tmp_path), '1', 4, 300)
  with roll:
    for name in ('2', '3'):
      (tmp_path / peers.FOLDER / name).write_text('elsewhere 1\n')
    now = os.path.getmtime(roll.path)
    os.utime(tmp_path / peers.FOLDER / '3', (now - 60, now - 60))      # left by an earlier start
    assert roll.text().startswith('after 300 s 2 of 4 processes arrived; missing: 0, 3. Start all of them')
    roll.count = 0
    assert '2 process(es) arrived: 1, 2.' in roll.text()
  assert sorted(os.listdir(tmp_path / peers.FOLDER)) == ['2', '3']
  with peers.RollCall(str(tmp_path / 'alone'), '', 0, 300) as alone:
    assert os.path.exists(alone.path)
  assert not os.path.exists(tmp_path / 'alone' / peers.FOLDER)
