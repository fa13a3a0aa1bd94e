"""The manifest for GKE agrees with itself and with the exit codes that the README promises."""

import math
import os
import re

import yaml

from tests.conftest import ROOT


def read(name):
  with open(os.path.join(ROOT, name), encoding='utf-8') as f:
    return f.read()


def manifest():
  spec = yaml.safe_load(read('launch/gke.yaml'))['spec']
  return spec, spec['replicatedJobs'][0]['template']['spec']


def what_follows(code=None, condition=''):
  """The JobSet's action when a host ends with an exit code or its pod with a condition: the first rule that fits."""
  spec, job = manifest()
  reason, message = 'BackoffLimitExceeded', 'Job has reached the specified backoff limit'
  for index, rule in enumerate(job['podFailurePolicy']['rules']):
    codes, conditions = rule.get('onExitCodes'), rule.get('onPodConditions', [])
    if codes and codes['operator'] == 'In' and code in codes['values']:
      cause = f'Container {codes["containerName"]} for pod a/b failed with exit code {code}'
    elif condition in [c['type'] for c in conditions if c['status'] == 'True']:
      cause = f'Pod a/b has condition {condition}'
    else:
      continue
    reason, message = 'PodFailurePolicy', f'{cause} matching {rule["action"]} rule at index {index}'
    assert rule['action'] == 'FailJob'
    break
  for rule in spec['failurePolicy']['rules']:
    patterns = rule.get('onJobFailureMessagePatterns', [''])
    if reason in rule['onJobFailureReasons'] and any(re.search(p, message) for p in patterns):
      return rule['action']
  return 'RestartJobSet'


def test_every_exit_code_of_the_readme_has_its_consequence():
  codes = [int(code) for code in re.findall(r'^\| (\d+) \|', read('README.md'), re.M)]
  assert set(codes) >= {0, 2, 3, 7, 75}
  expected = {7: 'RestartJobSet', 75: 'RestartJobSetAndIgnoreMaxRestarts'}
  for code in [1, *codes[1:]]:
    assert what_follows(code) == expected.get(code, 'FailJobSet'), code
  assert what_follows(137) == 'RestartJobSet'        # killed, as by a lost connection
  assert what_follows(condition='DisruptionTarget') == 'RestartJobSetAndIgnoreMaxRestarts'
  assert manifest()[0]['failurePolicy']['maxRestarts'] > 0


def test_a_slice_is_whole_and_its_hosts_find_each_other():
  spec, job = manifest()
  pod = job['template']['spec']
  container, = pod['containers']
  chips = container['resources']['limits']['google.com/tpu']
  assert container['resources']['requests']['google.com/tpu'] == chips
  topology = pod['nodeSelector']['cloud.google.com/gke-tpu-topology']
  hosts = math.prod(map(int, topology.split('x'))) // chips
  assert job['completions'] == job['parallelism'] == hosts > 1
  assert 'cloud.google.com/gke-tpu-accelerator' in pod['nodeSelector']
  assert job['backoffLimit'] == 0 and pod['restartPolicy'] == 'Never'      # what a podFailurePolicy needs
  assert spec['network']['enableDNSHostnames'] and '--distributed' in container['args']
  assert pod['terminationGracePeriodSeconds'] >= 60
  names = {rule['onExitCodes']['containerName'] for rule in job['podFailurePolicy']['rules'] if 'onExitCodes' in rule}
  assert names == {container['name']}
  mounted = {mount['name'] for mount in container['volumeMounts']}
  assert mounted == {volume['name'] for volume in pod['volumes']}
  assert all(re.search(r'=/shared/', a) for a in container['args'] if re.match('--(workdir|config.data.dir)=', a))


def test_the_image_starts_the_lab():
  lines = read('launch/Dockerfile').splitlines()
  assert 'ENTRYPOINT ["launch/run.sh"]' in lines and 'ENV LAB_EXTRAS=tpu,gcs' in lines
  python = next(re.match(r'FROM python:(3\.\d+)', line)[1] for line in lines if line.startswith('FROM'))
  assert f'python{python}' in read('launch/environment.sh')
