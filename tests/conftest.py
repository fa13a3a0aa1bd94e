"""Tests run on eight fake CPU devices; compiled programs are kept outside the clone."""

import gc
import importlib.metadata
import os
import sys

os.environ['JAX_PLATFORMS'] = 'cpu'
# collectives wait in threads of XLA's pool: there have to be more of these than devices
os.environ['NPROC'] = '32'
# most of the time would go into compiling: these flags take more than half of it away, and most programs of this size
# run as fast. A newer jaxlib no longer has the second, and ends at what it does not have
QUICK = '--xla_backend_optimization_level=0'
if importlib.metadata.version('jaxlib').startswith('0.10.'):
  QUICK += ' --xla_cpu_use_fusion_emitters=false'
# compiler_options of what runs long in a test, or has a bound that was made for these
FAST = {'xla_backend_optimization_level': 1}
# eight devices share few cores: products split over a pool of threads as well only take turns. lab/programs.py says why
# the scheduler. Processes that tests start have the flags that users have
os.environ['XLA_FLAGS'] = ('--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false '
                           '--xla_cpu_collective_call_terminate_timeout_seconds=300 '
                           '--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED ' + QUICK)
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', os.path.expanduser('~/.cache/lab/jax-tests'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ['EPATH_USE_TF'] = 'false'         # read once, whichever test comes first; lab/files.py says why
os.environ['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'
os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')

import jax
import pytest

from tests import toy

# nearly everything stays to the end, programs above all: to look through it for garbage took a tenth of the time
gc.set_threshold(50_000, 10, 10)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
jax.config.update('jax_numpy_rank_promotion', 'raise')


# they take minutes
LONG = ('test_systems', 'test_sweep', 'test_readme', 'test_language_learning', 'test_pose_stick_figures', 'test_resume',
        'test_processes', 'test_buckets', 'test_tpu_vm', 'test_dvae', 'test_dvae_learning', 'test_language_distill')


def pytest_collection_modifyitems(items):
  """Long files come first, lest one process is left with them when the others are done."""
  items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope='session')
def toy_data(tmp_path_factory):
  """The toy's records."""
  return toy.write(str(tmp_path_factory.mktemp('toy')))


@pytest.fixture
def toy_config(toy_data):
  """The toy's configuration on these records."""
  config = toy.get_config()
  config.data.dir = toy_data
  return config


@pytest.fixture
def lab(toy_data):
  """Starts the program in a process of its own: lab(arguments...) -> Popen with merged output."""
  import subprocess
  started = []

  def start(*arguments, config='tests/toy.py', devices=1, cwd=ROOT, **environment):
    env = {**os.environ, 'TOY_DATA': toy_data, 'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
           'PYTHONUNBUFFERED': '1', **environment}
    process = subprocess.Popen([sys.executable, '-m', 'lab.main', f'--config={config}', *map(str, arguments)], cwd=cwd,
                               env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    started.append(process)
    return process

  yield start
  for process in started:
    process.kill()
    process.wait()
    process.stdout.close()
