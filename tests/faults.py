"""Faults put into running programs, each with the tests that show what comes of it.

  python -m tests.faults [--only=F05,F07] [--kills=200 --terms=25]

prints a table: the fault, how many tests there are, how many failed. F01 to F03 also stop runs of all systems at random
moments (tests/kills.py), with --kills=0 they don't.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Fault(NamedTuple):
  """A fault, what is expected, and the tests: file.py::name, where a name stands for all that begin with it."""
  what: str
  expected: str
  tests: tuple[str, ...]


FAULTS = {
    'F01': Fault(
        'kill -9 while a checkpoint is written',
        'the next start goes on from the last whole one, to the same bits', (
            'test_resume.py::test_kill_9', 'test_checkpoint.py::test_what_an_interrupted_save_left',
            'test_checkpoint.py::test_incomplete_checkpoints_alone')),
    'F02': Fault(
        'kill -9 between steps, in evaluation, in reading, in compiling',
        'as F01; each row of the log is there once', (
            'test_resume.py::test_each_evaluation_is_there_once',
            'test_resume.py::test_an_evaluation_that_was_interrupted',
            'test_resume.py::test_tensorboard_has_one_value', 'test_early_stop.py::test_killed_between')),
    'F03': Fault(
        'SIGTERM, and a second one; a metadata server that announces the end of the host',
        'saves, ends with 75 in less than 30 s, goes on to the same bits; one SIGTERM', (
            'test_resume.py::test_sigterm', 'test_resume.py::test_a_stopped_run',
            'test_systems.py::test_a_stopped_run', 'test_notice.py::test_an_announcement',
            'test_notice.py::test_the_lab_saves', 'test_notice.py::test_a_preempted_host',
            'test_stop.py::test_a_stop_in_an_evaluation', 'test_stop.py::test_scores_that_come_later')),
    'F04': Fault(
        'Ctrl-C once, twice',
        'saves and leaves; leaves at once, the last checkpoint is whole', (
            'test_resume.py::test_ctrl_c', 'test_stop.py::test_only_a_second_ctrl_c')),
    'F05': Fault(
        'SIGTERM to one of several processes',
        'all agree on a step, or a batch of an evaluation, save, end with 75', (
            'test_processes.py::test_processes_stop_together', 'test_processes.py::test_processes_leave_an_evaluation',
            'test_stop.py::test_several_processes_agree')),
    'F06': Fault(
        'kill -9 of one process, of the first one',
        'the others end with 7; another number of them goes on', (
            'test_processes.py::test_a_lost_process',)),
    'F07': Fault(
        'a process stands still, for a while or for ever',
        'told with its number and step; the others end with 7', (
            'test_processes.py::test_a_process_that_stands_still', 'test_peers.py::test_what_silence_means',
            'test_ledger.py::test_the_first_step_and_one')),
    'F08': Fault(
        'the disk is full when a checkpoint is due, or when a run starts',
        'ends with 6, bytes told, before the first step; the last checkpoint is whole', (
            'test_checkpoint.py::test_a_full_disk', 'test_stop.py::test_a_run_that_could_not_save',
            'test_stop.py::test_what_the_next_save')),
    'F09': Fault(
        'the disk is full for TensorBoard alone',
        'one warning, training goes on', (
            'test_resume.py::test_a_full_disk_of_tensorboard',)),
    'F10': Fault(
        'input and output errors while a checkpoint is written',
        'told, made again; three in a row end with 5', (
            'test_checkpoint.py::test_a_failed_background_write', 'test_checkpoint.py::test_three_failed_writes')),
    'F11': Fault(
        "a workdir that can't be written",
        'one message, 5', (
            'test_checkpoint.py::test_an_unwritable_workdir',)),
    'F12': Fault(
        'a bucket refuses for a moment, for good, is not there',
        "asked again, counted, told; 5 with the object's name", (
            'test_buckets.py::test_a_refusal_for_the_moment', 'test_buckets.py::test_a_log_that_may_not',
            'test_buckets.py::test_arrays_that_may_not', 'test_buckets.py::test_a_checkpoint_that_can_not_be_reached',
            'test_buckets.py::test_no_such_bucket', 'test_buckets.py::test_killed_and_started_elsewhere')),
    'F13': Fault(
        'a foreign, torn or old checkpoint',
        'refused with what differs, or the one before; never step 0', (
            'test_checkpoint.py::test_a_foreign', 'test_checkpoint.py::test_another_size',
            'test_checkpoint.py::test_a_broken_newest', 'test_checkpoint.py::test_a_broken_step',
            'test_checkpoint.py::test_never_starts_at_0', 'test_main.py::test_a_wrong_checkpoint_path')),
    'F14': Fault(
        'a changed bit in a checkpoint',
        'the array is named, the checkpoint before is taken', (
            'test_checkpoint.py::test_a_changed_bit', 'test_resume.py::test_digest_sees_every_bit')),
    'F15': Fault(
        'another mesh, another number of processes',
        'the same arrays, the same losses (1e-5)', (
            'test_checkpoint.py::test_restores_on_another_mesh', 'test_processes.py::test_eight_devices',
            'test_systems.py::test_one_device_equals_eight')),
    'F16': Fault(
        'broken, cut, empty, missing shards',
        'file and record named, 3; or left out up to a limit, counted', (
            'test_pipeline.py::test_broken_shard', 'test_pipeline.py::test_missing_shard',
            'test_pipeline.py::test_bad_record', 'test_pipeline.py::test_too_many',
            'test_data_prepare.py::test_fault_is_found', 'test_data_prepare.py::test_bad_limit',
            'test_data_prepare.py::test_verify', 'test_data_prepare.py::test_broken_manifest')),
    'F19': Fault(
        'losses, gradients, updates that are not finite',
        'skipped, counted; too many: 4, no checkpoint has them', (
            'test_optim.py::test_a_non_finite', 'test_optim.py::test_one_bad_step',
            'test_optim.py::test_too_many_bad_steps', 'test_optim.py::test_an_exploding_rate')),
    'F22': Fault(
        "a configuration that can't run",
        'the key and the nearest one, 2, before TensorFlow and devices', (
            'test_main.py::test_a_wrong_configuration', 'test_main.py::test_what_is_missing',
            'test_main.py::test_a_recipe_with_a_typo', 'test_main.py::test_help_and_configuration_errors',
            'test_evaluate.py::test_meshes_that_do_not_fit', 'test_optim.py::test_settings_that_cannot')),
    'F23': Fault(
        'ids, colours, types that are out of range',
        'a bad record, named; nothing is clamped', (
            'test_corpus.py::test_an_id_that_the_vocabulary', 'test_arc.py::test_a_colour_that_is_none',
            'test_corpus.py::test_check_finds', 'test_arc.py::test_check_finds',
            'test_clips.py::test_first_bad_value')),
    'F24': Fault(
        'an error in the input pipeline, or a worker of it that is killed or stands still',
        'ends with 3 and the record; another worker goes on, or 3 if it is lost at once; none outlives the run', (
            'test_pipeline.py::test_too_many_bad_records', 'test_pipeline.py::test_what_making_an_item_raises',
            'test_workers.py::test_too_many', 'test_workers.py::test_a_worker',
            'test_workers.py::test_no_worker', 'test_workers.py::test_workers_')),
    'F25': Fault(
        'all processes read the same, or in another order',
        'each has its own rows of one batch; data are compared', (
            'test_pipeline.py::test_hosts_rows', 'test_evaluate.py::test_every_row_is_spoken_for',
            'test_peers.py::test_processes_that_agree')),
    'F26': Fault(
        'the accelerator is missing',
        'one message, 2; no silent fall-back', (
            'test_main.py::test_an_explicit_platform',)),
    'F27': Fault(
        'only some processes start',
        'the missing ones named, 7, in the time configured', (
            'test_processes.py::test_who_does_not_come', 'test_peers.py::test_the_roll')),
    'F28': Fault(
        'another version, code or configuration on one of them',
        'what differs, 7, before the first step', (
            'test_processes.py::test_processes_that_do_not_run_the_same', 'test_peers.py::test_processes_that_differ')),
    'F29': Fault(
        'two runs in one workdir',
        "the second is refused with the first one's host and number; a lock whose holder may be gone is waited for", (
            'test_locks.py::test_two_runs', 'test_locks.py::test_a_holder', 'test_locks.py::test_a_dead_process',
            'test_locks.py::test_waiting_ends', 'test_locks.py::test_a_disk_without_locks')),
}


def cases(faults: list[str]) -> dict[str, bool]:
  """file.py::test with its parameters -> whether it passed, of the files that the faults name."""
  files = sorted({t.split('::')[0] for f in faults for t in FAULTS[f].tests})
  names = sorted({t.split('::')[1] for f in faults for t in FAULTS[f].tests})
  with tempfile.TemporaryDirectory() as folder:
    report = os.path.join(folder, 'report.xml')
    subprocess.run([sys.executable, '-m', 'pytest', '-q', f'--junitxml={report}', '-k', ' or '.join(names),
                    *(os.path.join('tests', f) for f in files)], cwd=ROOT, check=False,
                   env={**os.environ, 'LAB_LONG': '1'})      # all of them; one that is skipped shows nothing
    found = ElementTree.parse(report).getroot().iter('testcase')
    return {f'{c.get("classname").split(".")[-1]}.py::{c.get("name")}':
            not any(c.find(kind) is not None for kind in ('failure', 'error', 'skipped')) for c in found}


def main() -> int:
  """The command; 1 where a test failed or is not there, or a kill did harm."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--only', default=','.join(FAULTS), help='of ' + ', '.join(FAULTS))
  parser.add_argument('--kills', type=int, default=200)
  parser.add_argument('--terms', type=int, default=25)
  options = parser.parse_args()
  chosen = options.only.split(',')
  found, bad = cases(chosen), 0
  lines = ['| | fault | what has to come of it | tests | failed |', '|---|---|---|---|---|']
  for name in chosen:
    fault = FAULTS[name]
    mine = {t: [ok for case, ok in found.items() if case.startswith(t)] for t in fault.tests}
    missing, mine = [t for t, oks in mine.items() if not oks], sum(mine.values(), [])
    bad += mine.count(False) + len(missing)
    lines.append(f'| {name} | {fault.what} | {fault.expected} | {len(mine)} | '
                 f'{", ".join([str(mine.count(False)), *(f"{t} is not there" for t in missing)])} |')
  print('\n'.join(lines), flush=True)
  if options.kills and {'F01', 'F02', 'F03'} & set(chosen):
    bad += subprocess.run([sys.executable, '-m', 'tests.kills', f'--kills={options.kills}', f'--terms={options.terms}'],
                          cwd=ROOT, check=False).returncode
  return int(bad > 0)


if __name__ == '__main__':
  sys.exit(main())
