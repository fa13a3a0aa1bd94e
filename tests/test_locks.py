"""The lock of a workdir: who holds it, for how long it is waited for, and what is said where there can be none."""

import errno
import fcntl
import os
import signal
import time
import types

import pytest

from lab import files, locks, main


def left_by(folder, text):
  """A workdir's lock, held, whose file has this text; closing it frees it."""
  held = locks.claim(str(folder))
  (folder / '.lock').write_text(text)
  return held


@pytest.fixture
def pauses(monkeypatch):
  """What is done instead of each pause; none is expected where the list is empty."""
  found = []
  pause(monkeypatch, lambda: found.pop(0)())
  return found


def pause(monkeypatch, instead):
  monkeypatch.setattr(locks, 'time', types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: instead()))


def test_two_runs_never_share_a_workdir(tmp_path, pauses):
  held = locks.claim(str(tmp_path))
  with pytest.raises(files.StorageError, match=f'in use by process {os.getpid()} on {os.uname().nodename};'):
    locks.claim(str(tmp_path))
  held.close()
  locks.claim(str(tmp_path)).close()


@pytest.mark.parametrize('text', [
    'w-3 0ab 17\n',                               # another host
    f'{os.uname().nodename} 0ab {os.getpid()}\n',      # one of the same name, such as a pod that was started elsewhere
    '17', '', '\x1b[31m a b\n'],                 # of another version, about to be written, and nonsense
    ids=['another host', 'the same name', 'another version', 'nothing', 'nonsense'])
def test_a_holder_that_may_be_gone_is_waited_for(tmp_path, pauses, caplog, text):
  held = left_by(tmp_path, text)
  pauses += [lambda: None, held.close]
  locks.claim(str(tmp_path)).close()
  assert not pauses
  said, = [r.getMessage() for r in caplog.records]
  assert ('process 17 on w-3' if 'w-3' in text else 'process') in said and '120 s' in said and '\x1b' not in said


def test_a_dead_process_of_this_host_is_waited_for(tmp_path, pauses):
  held = left_by(tmp_path, locks._place() + f' {2**30}\n')      # beyond what Linux numbers
  pauses += [held.close]
  locks.claim(str(tmp_path)).close()
  assert not pauses


def test_a_holder_that_turns_out_to_live_is_refused_at_once(tmp_path, pauses):
  held = left_by(tmp_path, '')                    # it has the lock and has not said so yet
  pauses += [lambda: (tmp_path / '.lock').write_text(f'{locks._place()} {os.getpid()}\n')]
  with pytest.raises(files.StorageError, match=f'in use by process {os.getpid()} on'):
    locks.claim(str(tmp_path))
  held.close()


def test_waiting_ends(tmp_path, monkeypatch):
  monkeypatch.setattr(locks, 'WAIT_S', 0)
  held = left_by(tmp_path, 'w-3 0ab 17\n')
  with pytest.raises(files.StorageError, match='in use by process 17 on w-3; choose another workdir or wait for it'):
    locks.claim(str(tmp_path))
  assert (tmp_path / '.lock').read_text() == 'w-3 0ab 17\n'
  held.close()


@pytest.mark.parametrize('number, said', [
    (errno.ENOSYS, 'no locks.*Lustre.*-o flock'), (errno.ENOLCK, 'no locks.*NFS.*lockd'),
    (errno.EOPNOTSUPP, 'no locks'), (errno.EIO, "can't be locked: .*Input/output error")])
def test_a_disk_without_locks_is_told_as_such(tmp_path, pauses, monkeypatch, number, said):
  def refuse(*_):
    raise OSError(number, os.strerror(number))
  monkeypatch.setattr(fcntl, 'flock', refuse)
  with pytest.raises(files.StorageError, match=said) as e:
    locks.claim(str(tmp_path))
  assert 'in use' not in str(e.value) and os.strerror(number) in str(e.value) and main.exit_code(e.value) == 5


def test_sigterm_while_a_lock_is_waited_for_ends_with_75(lab, tmp_path):
  held = left_by(tmp_path, 'w-3 0ab 17\n')
  process = lab(f'--workdir={tmp_path}')
  lines = iter(process.stdout.readline, '')
  assert any('in use by process 17 on w-3' in line for line in lines)
  process.send_signal(signal.SIGTERM)
  rest = process.communicate(timeout=300)[0]
  assert process.returncode == 75 and 'stopped: there was nothing to save yet' in rest, rest
  held.close()


def test_others_wait_until_the_first_process_has_the_workdir(tmp_path, monkeypatch):
  held, order = left_by(tmp_path, 'w-3 0ab 17\n'), []
  monkeypatch.setattr(main, 'FLAGS', types.SimpleNamespace(workdir=str(tmp_path)))
  pause(monkeypatch, lambda: (order.append('waits'), held.close()))
  monkeypatch.setattr('lab.peers.meet', lambda: order.append('meets'))
  monkeypatch.setattr('lab.train.run', lambda *a: order.append('trains'))
  main._train(None, None, 0.0)
  assert order == ['waits', 'meets', 'trains']
