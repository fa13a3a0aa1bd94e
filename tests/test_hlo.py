"""What programs send, by texts as XLA writes them."""

import pytest
from lab import hlo

TEXT = '''HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: f32[64]) -> f32[8] {
  %p = f32[64]{0} parameter(0)
  %all-reduce.9 = f32[64]{0:T(128)} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %slice = f32[8]{0} dynamic-slice(%all-reduce.9, %i), dynamic_slice_sizes={8}
}

%body (t: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %t = (s32[], bf16[4,8]{1,0}) parameter(0)
  %all-gather-start = (bf16[4,2]{1,0}, bf16[4,8]{1,0:T(2,1)}) all-gather-start(%g), replica_groups={{0,1,2,3},{4,5,6,7}}
  %all-gather-done = bf16[4,8]{1,0} all-gather-done(%all-gather-start)
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%n, %all-gather-done)
}

%condition (t: (s32[], bf16[4,8])) -> pred[] {
  ROOT %less = pred[] compare(%n, %twelve), direction=LT
}

ENTRY %main.1_spmd (p0: f32[8], p1: f32[16]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %all-reduce = (f32[8]{0}, bf16[4]{0}) all-reduce(%a, %b), channel_id=1, replica_groups={}, to_apply=%add
  %while = (s32[], bf16[4,8]) while(%t0), condition=%condition, body=%body, x={"known_trip_count":{"n":"12"}}
  %fusion = f32[8]{0} fusion(%w), kind=kCustom, calls=%all-reduce-scatter.1
  %all-to-all = s8[8,2]{1,0} all-to-all(%q), replica_groups=[4,2]<=[8], dimensions={0}
  %permute = (u32[16]{0}, u32[16]{0}, u32[], u32[]) collective-permute-start(%p1), source_target_pairs={{0,1},{1,0}}
  %alone = f32[100]{0} all-reduce(%c), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  ROOT %reduce = f32[8]{0} reduce(%x, %zero), dimensions={1}, to_apply=%add
}
'''


def test_collectives_are_counted_with_loops_and_inside_fusions():
  for text in (TEXT, TEXT.replace('%', '')):
    found = hlo.collectives(text, 8)
    assert found == {
        'all-gather': (12, 12 * 64, 12 * 64 * 3 / 4, 0), 'all-reduce': (2, 40 + 400, 2 * 40 * 7 / 8, 0),
        'all-to-all': (1, 16, 8, 0), 'collective-permute': (1, 64, 64, 0), 'reduce-scatter': (1, 32, 32 * 7, 0)}


def test_a_loop_of_unknown_turns_counts_once_and_nothing_is_nothing():
  unknown = TEXT.replace(', x={"known_trip_count":{"n":"12"}}', '')
  assert hlo.collectives(unknown, 8)['all-gather'].count == 1
  told = unknown.replace('  ROOT %less', '  %twelve = s32[]{:T(128)} constant(12)\n  ROOT %less')
  assert hlo.collectives(told, 8)['all-gather'].count == 12
  assert hlo.collectives('ENTRY %main (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n', 1) == {}


def test_of_a_choice_the_branch_with_the_fewest_bytes_counts():
  choice = '  %chosen = f32[8]{0} conditional(%p, %t0, %t0), branch_computations={%body, %all-reduce-scatter.1}\n  ROOT'
  for text in (choice, choice.replace('branch_computations={%body, %', 'true_computation=%body, false_computation=%')
               .replace('}\n', '\n')):
    found = hlo.collectives(text.join(TEXT.rsplit('  ROOT', 1)), 8)
    assert found['all-gather'].count == 13               # 64 bytes; in the other branch 256 are reduced
    assert found['reduce-scatter'] == hlo.collectives(TEXT, 8)['reduce-scatter']


# a collective that libtpu begins, goes on with beside two products, and ends; all of it in a loop; and one alone
FUSED = '''HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_computation.1 (p: bf16[2,8]) -> (bf16[2,8], bf16[8,8], s32[2]) {
  %p = bf16[2,8]{1,0} parameter(0)
  %x.1 = bf16[8,8]{1,0} KIND(%p), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, backend_config=STEP
  ROOT %start = (bf16[2,8]{1,0}, bf16[8,8]{1,0}, s32[2]{0}) custom-call(%x.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (p: bf16[2,8], q: bf16[8,8], r: s32[2], a: bf16[4,8]) -> (bf16[4,8], bf16[2,8], bf16[8,8]) {
  %p = bf16[2,8]{1,0} parameter(0)
  %product = bf16[4,8]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
  %x.2 = bf16[8,8]{1,0:S(1)} KIND(%p), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, backend_config=STEP
  ROOT %tuple = (bf16[4,8]{1,0}, bf16[2,8]{1,0}, bf16[8,8]{1,0}) tuple(%product, %p, %x.2)
}

%fused_computation.3 (p: bf16[2,8], q: bf16[8,8], r: s32[2]) -> bf16[8,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  %x.3 = bf16[8,8]{1,0} KIND(%p), channel_id=7, replica_groups={{0,1,2,3},{4,5,6,7}}, backend_config=STEP
  ROOT %done = bf16[8,8]{1,0} custom-call(%p, %q, %x.3, %r), custom_call_target="AsyncCollectiveDone"
}

%body (t: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %async-collective-start = (bf16[2,8], bf16[8,8], s32[2]) fusion(%w), kind=kCustom, calls=%fused_computation.1
  %f.1 = (bf16[4,8], bf16[2,8], bf16[8,8]) fusion(%p, %q, %r, %a), kind=kOutput, calls=%async_collective_fusion.2
  %f.2 = (bf16[4,8], bf16[2,8], bf16[8,8]) fusion(%p, %q, %r, %b), kind=kOutput, calls=%async_collective_fusion.2
  %async-collective-done = bf16[8,8]{1,0} fusion(%p, %q, %r), kind=kCustom, calls=%fused_computation.3
  ROOT %out = (s32[], bf16[2,8]{1,0}) tuple(%n, %w)
}

ENTRY %main (p0: bf16[2,8]) -> bf16[2,8] {
  %while = (s32[], bf16[2,8]) while(%t0), condition=%c, body=%body, x={"known_trip_count":{"n":"3"}}
  ROOT %alone = bf16[8,8]{1,0} KIND(%p0), channel_id=8, replica_groups={{0,1,2,3},{4,5,6,7}}
}
'''.replace('STEP', '{"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}')


@pytest.mark.parametrize('kind, times', [('all-gather', 3 / 4), ('all-reduce', 2 * 3 / 4), ('reduce-scatter', 3)])
def test_what_is_fused_with_products_counts_where_it_begins(kind, times):
  found = hlo.collectives(FUSED.replace('KIND', kind), 8)
  assert found == {kind: (1 + 3, 4 * 128, 4 * 128 * times, 0)}


HALVES, PAIRS = (0,) * 4 + (1,) * 4, (0, 0, 1, 1, 2, 2, 3, 3)


def sent(line, slices, header=''):
  """What one instruction sends, of a program for so many partitions: (bytes over the links, to other slices)."""
  text = f'HloModule m{header}\n\nENTRY %main (p: f32[64]) -> f32[64] {{\n  ROOT %x = {line}\n}}\n'
  (found,) = hlo.collectives(text, len(slices), slices).values()
  return found.traffic, found.dcn


@pytest.mark.parametrize('groups, slices, links, dcn', [
    ('{}', HALVES, 2 * 256 * 3 / 4, 2 * 256 / 2 / 4),                # all eight: a share of a fourth is exchanged
    ('{{0,1,2,3,4,5,6,7}}', HALVES, 384, 64),
    ('[1,8]<=[8]', HALVES, 384, 64),
    ('[2,4]<=[8]', HALVES, 2 * 256 * 3 / 4, 0),                      # {0,1,2,3}, {4,5,6,7}: each inside a slice
    ('{{0,1,2,3},{4,5,6,7}}', HALVES, 384, 0),
    ('[4,2]<=[2,4]T(1,0)', HALVES, 0, 2 * 256 / 2),                  # {0,4}, {1,5}, ...: one of each slice
    ('{{0,4},{1,5},{2,6},{3,7}}', HALVES, 0, 256),
    ('[2,4]<=[4,2]T(1,0)', HALVES, 2 * 256 / 2, 2 * 256 / 2 / 2),    # {0,2,4,6}, {1,3,5,7}: two of each
    ('[2,4]<=[2,2,2]T(1,0,2)', HALVES, 2 * 256 / 2, 128),            # {0,1,4,5}, {2,3,6,7}
    ('{}', PAIRS, 2 * 256 / 2, 2 * 256 * 3 / 4 / 2),                 # four slices of two
    ('[2,4]<=[4,2]T(1,0)', PAIRS, 0, 2 * 256 * 3 / 4),
    ('{{0,1},{2,3},{4,6},{5,7}}', PAIRS, 256, 256),                  # the group counts that sends most
    ("mesh['a'=1,'b'=8] {'b'}", HALVES, 384, 64),                    # all eight
    ("mesh['a'=8,'b'=1] {'a','b'}", HALVES, 384, 64),
    ("mesh['a'=2,'b'=4] {'b'}", HALVES, 384, 0),                     # each inside a slice
    ("mesh['a'=2,'b'=4] {'a'}", HALVES, 0, 256),                     # one of each slice
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", HALVES, 0, 256),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", HALVES, 384, 0),
    ("mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'b'}", HALVES, 2 * 256 / 2, 128),       # {0,4,1,5}, {2,6,3,7}
    ("mesh['a'=8] {'a':(1)2}", HALVES, 0, 256),                      # the first two of 2 x 4: {0,4}, {1,5}, ...
    ("mesh['a'=8] {'a':(2)2}", HALVES, 256, 0),                      # of 2 x 2 x 2 the middle: {0,2}, {1,3}, ...
    ("mesh['a'=8] {'a':(1)2,'a':(4)2}", HALVES, 256, 128),           # {0,1,4,5}, {2,3,6,7}
    ('{}', (0,) * 8, 2 * 256 * 7 / 8, 0)])
def test_groups_over_slices_send_shares_of_what_each_slice_reduced(groups, slices, links, dcn):
  line = f'f32[64]{{0}} all-reduce(%p), replica_groups={groups}, use_global_device_ids=true, to_apply=%add'
  assert sent(line, slices) == (links, dcn)


@pytest.mark.parametrize('line, inside, over, across', [
    ('f32[64]{0} all-gather(%p), replica_groups=GROUPS, dimensions={0}',
     (256 * 7 / 8, 0), (256 * 3 / 4, 256 / 2 / 4), (0, 256 / 2)),
    ('f32[64]{0} reduce-scatter(%p), replica_groups=GROUPS, to_apply=%add',        # 2048 or 512 bytes are scattered
     (2048 * 7 / 8, 0), (2048 * 3 / 4, 2048 / 2 / 4), (0, 512 / 2)),
    ('f32[64]{0} all-to-all(%p), replica_groups=GROUPS, dimensions={0}',           # 3 of 8 parts stay, 4 go across
     (256 * 7 / 8, 0), (256 * 3 / 8, 256 / 2), (0, 256 / 2)),
    ('f32[64]{0} collective-broadcast(%p), replica_groups=GROUPS', (256, 0), (256, 256 / 4), (0, 256))])
def test_each_kind_sends_its_part_to_other_slices(line, inside, over, across):
  assert sent(line.replace('GROUPS', '{}'), (0,) * 8) == inside
  assert sent(line.replace('GROUPS', '[1,8]<=[8]'), HALVES) == over
  assert sent(line.replace('GROUPS', '[4,2]<=[2,4]T(1,0)'), HALVES) == across


@pytest.mark.parametrize('pairs, links, dcn', [
    ('{{0,1},{1,0},{4,5},{5,4}}', 256, 0), ('{{0,4},{4,0}}', 0, 256), ('{{2,3},{3,4}}', 256, 256)])
def test_permutes_cross_where_a_pair_does(pairs, links, dcn):
  assert sent(f'f32[64]{{0}} collective-permute(%p), source_target_pairs={pairs}', HALVES) == (links, dcn)


# as libtpu writes a program for several slices: of one slice, whose partitions it numbers; what crosses is handed over
RECV = ('RESULT recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={'
        '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce_0",'
        '_xla_megascale_target=TARGET,_xla_megascale_transfer_type="KIND"}')
SHARE, PARTITIONS = '(f32[64]{0:T(64)}, u32[], token[])', ', num_partitions=4'


@pytest.mark.parametrize('kind, target, name, dcn', [
    ('ALL_REDUCE', '"{1,2}x{0:3}"', 'all-reduce', 2 * 256 / 2),
    ('ALL_REDUCE', '"{1,2,3,4}x{0:3}"', 'all-reduce', 2 * 256 * 3 / 4),
    ('ALL_REDUCE', '{{100000,200000},{100001,200001},{300000,400000}}', 'all-reduce', 2 * 256 / 2),
    ('ALL_GATHER', '"{1,2}x{0:3}"', 'all-gather', 128),
    ('REDUCE_SCATTER', '"{1,2,3}x{0:3}"', 'reduce-scatter', 2 * 256),
    ('ALL_TO_ALL', '{{100000,100001,200000,200001}}', 'all-to-all', 128),
    ('ALL_TO_ALL', '{{100000,200000,300000,400000}}', 'all-to-all', 192),
    ('ONE_TO_ONE', '{{100000->200000},{200000->100000}}', 'collective-permute', 256),
    ('ALL_REDUCE', '{}', 'all-reduce', 256)])
def test_what_libtpu_hands_to_the_network_between_slices_counts_and_is_not_on_the_links(kind, target, name, dcn):
  line = RECV.replace('RESULT', SHARE).replace('TARGET', target).replace('KIND', kind)
  for line in (line, line.replace('u32[]', 'u32[]{:S(2)}') + ', backend_config={"a":{"b":{}}}'):
    text = f'HloModule m{PARTITIONS}\n\nENTRY %main (p: f32[64]) -> f32[64] {{\n  %x = {line}\n}}\n'
    assert hlo.collectives(text, 8, HALVES) == {name: (1, 256, 0, dcn)}


def test_a_program_for_another_number_of_devices_is_not_counted_as_one_slice():
  with pytest.raises(ValueError, match='a program of 4 devices, for 6 in 3 slices'):
    sent('f32[64]{0} all-reduce(%p), replica_groups={}, to_apply=%add', (0, 0, 1, 1, 2, 2), PARTITIONS)


def test_groups_of_a_program_of_one_slice_stay_inside_of_it():
  line = 'f32[64]{0} all-reduce(%p), replica_groups={}, to_apply=%add'
  assert sent(line, HALVES, PARTITIONS) == (2 * 256 * 3 / 4, 0)
  assert sent(line.replace('{}', '{{0,2},{1,3}}'), HALVES, PARTITIONS) == (2 * 256 / 2, 0)


def test_an_all_reduce_in_pieces_sends_what_a_whole_one_does():
  """A slice reduces and scatters, shares are exchanged, and gathered: no more and no less than is counted of one."""
  groups = 'replica_groups={{0,1,2,3}}, use_global_device_ids=true'
  share = RECV.replace('RESULT', SHARE.replace('64]', '16]')).replace('TARGET', '"{1,2}x{0:3}"')
  pieces = (f'f32[16]{{0}} reduce-scatter(%p), {groups}, to_apply=%add', share.replace('KIND', 'ALL_REDUCE'),
            f'f32[64]{{0}} all-gather(%q), {groups}')
  found = [sent(line, HALVES, PARTITIONS) for line in pieces]
  whole = sent('f32[64]{0} all-reduce(%p), replica_groups={}, to_apply=%add', HALVES)
  assert tuple(map(sum, zip(*found))) == whole == (384, 64)


def test_other_transfers_to_the_host_are_not_between_slices():
  line = '(f32[64]{0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, frontend_attributes={x="y"}'
  assert hlo.collectives(f'ENTRY %main (p: f32[]) -> f32[] {{\n  %x = {line}\n}}\n', 8, HALVES) == {}
