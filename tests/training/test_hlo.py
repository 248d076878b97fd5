"""What is read of a scheduled program, from a short one that is written by hand."""

from collections import Counter

import pytest

from training.hlo import Program
from training.hlo_text import arrays

# Two layers of a ring, scanned; around them what a TPU and a GPU print, and how.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_kernel (p: bf16[4,8]) -> f32[4,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %mpmd.1 = f32[4,8]{1,0} custom-call(%p), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/flash_forward/mpmd_map"}
}

%fused_computation.5 (p: bf16[4,8]) -> (bf16[4,8], bf16[16,8]) {
  %p = bf16[4,8]{1,0} parameter(0)
  %all-gather.5 = bf16[16,8]{1,0} all-gather(%p), channel_id=7, \
replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) custom-call(%all-gather.5), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.6 (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %product = bf16[4,4]{1,0} convolution(%p, %p), dim_labels=fb_oi->fb
  %all-gather.6 = bf16[16,8]{1,0} all-gather(%p), channel_id=7, \
replica_groups=[1,4]<=[4], dimensions={0}
}

%fused_computation.7 (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  %all-gather.7 = bf16[16,8]{1,0} all-gather(%p), channel_id=7, \
replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %done = bf16[16,8]{1,0} custom-call(%p, %all-gather.7), \
custom_call_target="AsyncCollectiveDone"
}

%hops (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %state = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %kv = bf16[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %permute-start.1 = (bf16[4,8]{1,0:T(8,128)(2,1)}, bf16[4,8]{1,0:T(8,128)(2,1)}, \
u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%kv), channel_id=1, \
source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, \
metadata={op_name="ring/ppermute"}
  %flash_backward.3 = (f32[4,8]{1,0:T(8,128)}) custom-call(%kv), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/shard_map"}
  %permute-done.1 = bf16[4,8]{1,0} collective-permute-done(%permute-start.1)
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%state, %permute-done.1)
}

%hops_end (state: (s32[], bf16[4,8])) -> pred[] {
  %limit.7 = s32[]{:T(128)} constant(3)
  %state = (s32[]{:T(128)}, bf16[4,8]{1,0}) parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%turn, %limit.7), direction=LT
}

%layer (state: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %state = (s32[], bf16[4,8]{1,0}) parameter(0)
  %shard = bf16[4,8]{1,0} get-tuple-element(%state), index=1
  %ag.1 = bf16[16,8]{1,0} all-gather(%shard), \
replica_groups=mesh['data'=1,'fsdp'=2,'ring'=2,'tensor'=1] {'fsdp','ring'}, \
dimensions={0}
  %flash_forward.9 = (s32[], bf16[4,8]{1,0}) while(%state), condition=%hops_end, \
body=%hops
  %permute-start.2 = ((bf16[4,8]{1,0}), \
bf16[4,8]{1,0}) collective-permute-start(%shard), source_target_pairs={{0,1},{1,0}}, \
metadata={op_name="ring/ppermute"}
  %fusion.1 = f32[4,8]{1,0} fusion(%shard), kind=kCustom, calls=%fused_kernel
  %permute-done.2 = bf16[4,8]{1,0} collective-permute-done(%permute-start.2)
  %permute-start.3 = ((bf16[4,8]{1,0}), \
bf16[4,8]{1,0}) collective-permute-start(%shard), source_target_pairs={{0,1},{1,0}}, \
metadata={op_name="ring/ppermute"}
  %permute-done.3 = bf16[4,8]{1,0} collective-permute-done(%permute-start.3)
  %permute.4 = bf16[4,8]{1,0} collective-permute(%shard), \
source_target_pairs={{0,1},{1,0}}, \
metadata={op_name="ring/ppermute"}
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%state, %permute.4)
}

%all-reduce-scatter.1 (x: f32[8,8]) -> f32[6,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %pad = f32[12,8]{1,0} pad(%x, %zero), padding=0_4x0_0
  %sum = f32[12,8]{1,0} all-reduce(%pad), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %kept = f32[6,8]{1,0} dynamic-slice(%sum, %shard), dynamic_slice_sizes={6,8}
}

%unknown_end (state: (s32[], bf16[4,8])) -> pred[] {
  %state = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %flag = pred[] get-tuple-element(%state), index=0
}

ENTRY %main (x: bf16[4,8]) -> f32[6] {
  %x = bf16[4,8]{1,0} parameter(0)
  %rs-start = ((f32[16,2]{1,0}, f32[8]{0}), (f32[4,2]{1,0}, \
f32[2]{0})) reduce-scatter-start(%x, %x), replica_groups=[1,4]<=[4], \
dimensions={0}, to_apply=%add
  %flash_forward.2 = f32[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %rs-done = (f32[4,2]{1,0}, f32[2]{0}) reduce-scatter-done(%rs-start)
  %async-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) fusion(%x), kind=kCustom, \
calls=%fused_computation.5
  %fusion.6 = bf16[16,8]{1,0} fusion(%x), kind=kOutput, calls=%async_collective_fusion.6
  %async-done = bf16[16,8]{1,0} fusion(%x), kind=kCustom, calls=%fused_computation.7
  %scattered = f32[6,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %padding = f32[4]{0} custom-call(), custom_call_target="AllocateBuffer", \
metadata={op_name="jit(step)/flash_forward"}
  %layers = (s32[], bf16[4,8]{1,0}) while(%x), condition=%unknown_end, body=%layer, \
backend_config={"known_trip_count":{"n":"2"}}
  %ar.1 = (f32[6]{0}, pred[2]{0}) all-reduce(%x, %x), replica_groups={{0,1},{2,3}}, \
to_apply=%add
  ROOT %alone = f32[6]{0} all-reduce(%x), replica_groups={{0},{1},{2},{3}}, \
to_apply=%add
}
"""


@pytest.fixture
def program() -> Program:
    return Program.parse(PROGRAM, devices=4)


def test_what_a_loop_runs_counts_as_often_as_it_turns(program):
    assert program.runs["main"] == 1
    assert program.runs["layer"] == 2  # the compiler says so
    assert program.runs["hops"] == 2 * 3  # read from the loop's condition
    assert program.unknown_loops == 0


def test_kernels_are_counted_in_loops_and_fusions_and_nothing_else_is_one(program):
    assert program.kernels() == {"backward": 6, "forward": 1 + 2}


def test_a_transfer_is_hidden_if_its_kernel_stands_between_its_start_and_done(program):
    found = [c for c in program.collectives() if c.kind == "collective-permute"]
    by_times = sorted((c.times, c.is_hidden, c.bytes_sent) for c in found)
    size = 4 * 8 * 2
    assert by_times == [
        (2, False, size),  # nothing between
        (2, False, size),  # not asynchronous
        (2, True, size),  # a kernel in a fusion
        (6, True, size),
    ]


def test_collectives_of_several_devices_send_what_a_ring_of_them_sends(program):
    found = {
        (c.kind, c.group): c.total_bytes
        for c in program.collectives()
        if c.kind != "collective-permute" and (c.kind, c.times) != ("all-gather", 1)
    }
    assert found == {
        ("all-gather", 4): 2 * (3 / 4) * (16 * 8 * 2),
        ("reduce-scatter", 4): 3 * (4 * 2 * 4 + 2 * 4),  # the result's shards
        ("reduce-scatter", 2): 6 * 8 * 4,  # padded, printed as an all-reduce
        ("all-reduce", 2): 2 * (1 / 2) * (6 * 4 + 2),
    }


def test_a_collective_in_the_three_fusions_of_a_product_is_one_and_hidden(program):
    gathers = [c for c in program.collectives() if c.kind == "all-gather"]
    once = [c for c in gathers if c.times == 1]
    assert [(c.bytes_sent, c.is_hidden) for c in once] == [(3 / 4 * 16 * 8 * 2, True)]
    assert [c.is_hidden for c in gathers if c.times > 1] == [False]


def test_the_order_of_each_computation_with_transfers(program):
    assert sorted(program.orders()) == ["sBd", "sFdsdS"]


def test_a_loop_of_unknown_length_is_counted_once_and_told():
    text = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"2"}}', "")
    program = Program.parse(text, devices=4)
    assert program.unknown_loops == 1
    assert program.runs["layer"] == 1
    assert program.kernels() == {"backward": 3, "forward": 2}


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no scheduled HLO program in 'nothing'"):
        Program.parse("nothing", devices=4)


def test_arrays_are_stored_in_whole_tiles_in_the_order_of_their_layout():
    scores, flag, token = arrays(
        "(f32[1,16384,2,64]{3,1,2,0:T(8,128)S(1)}, pred[3]{0}, token[])"
    )
    assert (scores.sizes, scores.space, flag.space) == ((1, 16384, 2, 64), 1, 0)
    assert scores.bytes == 16384 * 2 * 64 * 4
    assert scores.stored_bytes == 16384 * 2 * 128 * 4
    assert (flag.bytes, flag.stored_bytes, token.bytes) == (3, 3, 0)
    (row,) = arrays("bf16[5,40]{0,1:T(8,128)(2,1)}")  # its columns lie together
    assert row.stored_bytes == 128 * 40 * 2


OFFLOADED = """\
HloModule jit_step, is_scheduled=true

%called (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8]{1,0} parameter(0)
  ROOT %gathered = bf16[16,8]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[4,8]) -> bf16[16,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %woken = ((), (), s32[]{:S(2)}) call-start(), async_execution_thread="sparsecore", \
to_apply=%called
  %flash_forward.1 = f32[4,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %given = ((bf16[4,8]{1,0}), bf16[16,8]{1,0}) call-update(%woken, %x)
  KERNEL
  ROOT %whole = bf16[16,8]{1,0} call-done(%given)
}
"""


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_collective_of_a_sparse_core_starts_where_its_operand_is_given(is_hidden):
    kernel = '%flash_forward.2 = f32[4]{0} custom-call(%x), custom_call_target="triton"'
    text = OFFLOADED.replace("KERNEL", kernel if is_hidden else "")
    (gather,) = Program.parse(text, devices=4).collectives()
    assert (gather.name, gather.kind, gather.group) == ("whole", "all-gather", 4)
    assert gather.bytes_sent == 3 / 4 * 16 * 8 * 2
    assert gather.is_asynchronous
    assert gather.is_hidden == is_hidden


def test_a_permute_that_the_compiler_made_is_none_of_a_ring(program):
    text = PROGRAM.replace(', metadata={op_name="ring/ppermute"}', "", 1)
    assert text != PROGRAM
    other = Program.parse(text, devices=4)
    before, after = (Counter(c.kind for c in p.collectives()) for p in (program, other))
    assert (before["permute"], after["permute"]) == (0, 1)
    assert after["collective-permute"] == before["collective-permute"] - 1
