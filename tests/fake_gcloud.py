"""A stand-in for gcloud's TPU commands: workers are folders of FAKE_GCLOUD, their commands run on this machine.

Every call is a line of calls.jsonl. A TPU's states to come are the lines of NAME.states; looking takes one away, except
the last. A verb named in the file `broken` fails. Where the file `stamp` is, new workers have an environment already.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

FOLDER = Path(os.environ['FAKE_GCLOUD'])
HOSTS = 2                     # of a slice
EVERYWHERE = {'quiet', 'zone', 'project'}
CREATE = {'accelerator-type', 'spot', 'network', 'labels'}
REACH = {'worker', 'internal-ip'}
# flags that gcloud has for these, of those that may be needed here
FLAGS = {
    'tpu-vm': {'create': CREATE | {'version'}, 'describe': {'format'}, 'delete': set(), 'scp': REACH,
               'ssh': REACH | {'command'}},
    'queued-resources': {'create': CREATE | {'runtime-version', 'node-id', 'node-count', 'node-prefix'},
                         'describe': {'format'}, 'delete': {'force'}, 'scp': REACH | {'node'},
                         'ssh': REACH | {'node', 'command'}},
}


def main(argv: list[str]) -> int:
  """One gcloud command; what it may not be given is refused as gcloud does."""
  with open(FOLDER / 'calls.jsonl', 'a', encoding='utf-8') as f:
    f.write(json.dumps(argv) + '\n')
  group, verb, *rest = argv[2:]
  flags = {k: v for k, _, v in (a[2:].partition('=') for a in rest if a.startswith('--'))}
  words = [a for a in rest if not a.startswith('--')]
  unknown = set(flags) - EVERYWHERE - FLAGS[group][verb]
  if argv[:2] != ['compute', 'tpus'] or unknown:
    return say(f'unrecognized arguments: {unknown}', 2)
  if verb in read('broken'):
    return say('RESOURCE_EXHAUSTED: there is no more capacity in the zone', 1)
  name = words[-1].split(':')[0] if verb == 'scp' else words[0]
  if verb == 'create':
    return create(group, name, flags)
  if not (FOLDER / f'{name}.states').exists():
    return say(f"NOT_FOUND: Resource '{name}' was not found", 1)
  if verb == 'describe':
    return describe(group, name, flags)
  if verb == 'delete':
    return delete(name)
  if read(f'{name}.states')[0] not in ('READY', 'ACTIVE'):
    return say('the TPU is in an unusable state', 1)
  workers = chosen(name, flags)
  if verb == 'scp':
    for home in workers:
      shutil.copy(words[0], home / words[-1].partition(':')[2])
    return 0
  return ssh(workers, flags['command'])


def say(text: str, code: int) -> int:
  """An error as gcloud prints it."""
  print(f'ERROR: (gcloud.compute.tpus) {text}', file=sys.stderr)
  return code


def read(name: str) -> list[str]:
  """The lines of a file of this cloud; none without it."""
  path = FOLDER / name
  return path.read_text().splitlines() if path.exists() else []


def create(group: str, name: str, flags: dict) -> int:
  """Makes the workers' folders, and the states that it goes through."""
  if (FOLDER / f'{name}.states').exists():
    return say('ALREADY_EXISTS', 1)
  for i in range(HOSTS * int(flags.get('node-count', 1))):
    home = FOLDER / name / f'w-{i}'
    (home / 'bin').mkdir(parents=True)
    programs = {'bin/hostname': f'echo w-{i}'}
    for stamp in read('stamp'):
      programs['venv/bin/python'] = f'exec {sys.executable} "$@"'
      (home / 'venv/bin').mkdir(parents=True)
      (home / 'venv/.lab-tpu,gcs').write_text(f'{stamp} {home}/lab\n')
    for program, line in programs.items():
      (home / program).write_text(f'#!/bin/sh\n{line}\n')
      (home / program).chmod(0o755)
  states = ['WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE'] if group == 'queued-resources' else ['READY']
  (FOLDER / f'{name}.states').write_text('\n'.join(states) + '\n')
  return 0


def describe(group: str, name: str, flags: dict) -> int:
  """Prints the state, and goes on to the next."""
  assert flags['format'] == ('value(state.state)' if group == 'queued-resources' else 'value(state)')
  state, *later = read(f'{name}.states')
  if later:
    (FOLDER / f'{name}.states').write_text('\n'.join(later) + '\n')
  print(state)
  return 0


def delete(name: str) -> int:
  """Takes the workers away, with what runs there."""
  kill(FOLDER / name)
  shutil.rmtree(FOLDER / name)
  (FOLDER / f'{name}.states').unlink()
  return 0


def kill(folder: Path):
  """Ends every run below a folder."""
  for pid in folder.glob('**/*.run/pid'):
    try:
      os.killpg(int(pid.read_text()), signal.SIGKILL)
    except ProcessLookupError:
      pass


def chosen(name: str, flags: dict) -> list[Path]:
  """The home folders that --worker and --node mean."""
  homes = sorted((FOLDER / name).iterdir())
  if flags.get('worker', '0') == 'all':
    return homes
  return [homes[int(flags.get('node', 0)) * HOSTS + int(flags.get('worker', 0))]]


def ssh(workers: list[Path], command: str) -> int:
  """Runs the command on all workers at once, in their home folders, by a shell, as sshd does."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  started = []
  for home in workers:
    count = len(list(home.parent.iterdir()))
    env = {**os.environ, 'HOME': str(home), 'PATH': f'{home}/bin:{os.environ["PATH"]}', 'LAB_VENV': f'{home}/venv',
           'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}', 'JAX_NUM_PROCESSES': str(count),
           'JAX_PROCESS_ID': home.name[2:]}
    started.append(subprocess.Popen(['sh', '-c', ' '.join(command.split(' '))], cwd=home, env=env,
                                    stdin=subprocess.DEVNULL))
  return max(p.wait() for p in started)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
