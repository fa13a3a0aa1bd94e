"""What programs send, by texts as XLA writes them."""

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
        'all-gather': (12, 12 * 64, 12 * 64 * 3 / 4), 'all-reduce': (2, 40 + 400, 2 * 40 * 7 / 8),
        'all-to-all': (1, 16, 8), 'collective-permute': (1, 64, 64), 'reduce-scatter': (1, 32, 32 * 7)}


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
