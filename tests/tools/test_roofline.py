"""Times of instructions by the roofline, from short programs written by hand."""

import dataclasses

import pytest

from tools.lib.compiled.hlo import Program
from tools.lib.planning.roofline import Roofline, Work
from training import chips

CHIP = dataclasses.replace(
    chips.find("TPU v5 lite"), peak_flops=1e6, hbm_bytes_per_second=1e3
)
"""Rates by which seconds are read from FLOPs and bytes."""


def roofline(body: str, others: str = "", chip=CHIP, **elsewhere: float) -> Roofline:
    """Times of a program with this entry."""
    text = f"HloModule m, is_scheduled=true\n{others}\nENTRY %main () -> f32[] {{\n"
    text += "\n".join(f"  {line.strip()}" for line in body.strip().splitlines()) + "\n}"
    return Roofline(text, Program.parse(text, 4), chip, elsewhere)


def total(body: str, others: str = "", chip=CHIP, **elsewhere: float) -> Work:
    return roofline(body, others, chip, **elsewhere).total


LOOP = """
%fused (x: bf16[64,32], stack: bf16[5,32,16], i: s32[]) -> bf16[64,16] {
  %stack = bf16[5,32,16]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %x = bf16[64,32]{1,0} parameter(0)
  %slice = bf16[1,32,16]{2,1,0} dynamic-slice(%stack, %i), dynamic_slice_sizes={1,32,16}
  %w = bf16[32,16]{1,0} bitcast(%slice)
  ROOT %product = bf16[64,16]{1,0} convolution(%x, %w), dim_labels=bf_io->bf, NAMED
}

%layer (state: (s32[], bf16[64,32])) -> (s32[], bf16[64,32]) {
  %state = (s32[], bf16[64,32]{1,0}, bf16[5,32,16]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%state), index=0
  %x = bf16[64,32]{1,0} get-tuple-element(%state), index=1
  %stack = bf16[5,32,16]{2,1,0} get-tuple-element(%state), index=2
  ROOT %y = bf16[64,16]{1,0} fusion(%x, %stack, %i), kind=kOutput, calls=%fused
}

%end (state: (s32[], bf16[64,32])) -> pred[] {
  %state = (s32[], bf16[64,32]{1,0}, bf16[5,32,16]{2,1,0}) parameter(0)
  ROOT %more = pred[] get-tuple-element(%state), index=0
}
"""
CALL = """%x = (s32[], bf16[64,32]{1,0}, bf16[5,32,16]{2,1,0}) parameter(0)
  ROOT %all = (s32[], bf16[64,32]{1,0}) while(%x), condition=%end, body=%layer, \
backend_config={"known_trip_count":{"n":"5"}}"""
FLOPS, SLICED = 2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16)


def test_a_product_in_a_loop_counts_its_trips_and_the_slice_that_it_reads():
    fast = dataclasses.replace(CHIP, hbm_bytes_per_second=1e9)
    assert total(CALL, LOOP, fast).products == pytest.approx(5 * FLOPS / 1e6)
    memory = total(CALL, LOOP)
    assert memory.products == memory.memory == pytest.approx(5 * SLICED / 1e3)
    assert memory.recomputed == memory.elementwise == 0


def test_what_moves_nothing_is_free():
    assert (
        total("""
        %x = (f32[64]{0}, f32[64]{0}) parameter(0)
        %y = f32[64]{0} get-tuple-element(%x), index=0
        %z = f32[8,8]{1,0} bitcast(%y)
        %empty = f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"
        ROOT %all = (f32[8,8]{1,0}, f32[64]{0}) tuple(%z, %empty)""")
        == Work()
    )


UPDATE = """
%inner (x: f32[4,16]) -> f32[4,16] {
  ROOT %x = f32[4,16]{1,0} parameter(0)
}

%update (stack: f32[10,4,16], x: f32[4,16], i: s32[]) -> (f32[10,4,16], f32[4,16]) {
  %stack = f32[10,4,16]{2,1,0} parameter(0)
  %x = f32[4,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %same = f32[4,16]{1,0} fusion(%x), kind=kLoop, calls=%inner
  %doubled = f32[4,16]{1,0} add(%same, %same)
  %row = f32[1,4,16]{2,1,0} bitcast(%doubled)
  %new = f32[10,4,16]{2,1,0} dynamic-update-slice(%stack, %row, %i)
  ROOT %both = (f32[10,4,16]{2,1,0}, f32[4,16]{1,0}) tuple(%new, %doubled)
}
"""


def test_a_slice_that_is_updated_in_place_counts_itself():
    inputs = """%stack = f32[10,4,16]{2,1,0} parameter(0)
        %x = f32[1,4,16]{2,1,0} parameter(1)
        %i = s32[]{:S(6)} parameter(2)"""
    row = 4 * 16 * 4 / 1e3  # seconds of a row
    alone = f"""{inputs}
        ROOT %new = f32[10,4,16]{{2,1,0}} dynamic-update-slice(%stack, %x, %i)"""
    assert total(alone).elementwise == pytest.approx(2 * row)
    # Reads the row, writes it into the stack and again beside it.
    fused = f"""{inputs}
        ROOT %both = (f32[10,4,16]{{2,1,0}}, f32[4,16]{{1,0}}) \
fusion(%stack, %x, %i), kind=kLoop, calls=%update"""
    assert total(fused, UPDATE).elementwise == pytest.approx(3 * row)
    sliced = f"""{inputs}
        ROOT %one = f32[1,4,16]{{2,1,0}} dynamic-slice(%stack, %i)"""
    assert total(sliced).elementwise == pytest.approx(2 * row)


@pytest.mark.parametrize(
    ("opcode", "how"),
    [
        ("slice", "slice={{[0:1], [0:4], [0:16]}}"),
        ("fusion", "kind=kLoop, calls=%sliced"),
    ],
)
def test_an_asynchronous_slice_counts_itself(opcode, how):
    sliced = """
%sliced (x: f32[10,4,16]) -> f32[1,4,16] {
  %x = f32[10,4,16]{2,1,0} parameter(0)
  ROOT %y = f32[1,4,16]{2,1,0} slice(%x), slice={[0:1], [0:4], [0:16]}
}
"""
    body = f"""%x = f32[10,4,16]{{2,1,0}} parameter(0)
        %start = ((f32[10,4,16]{{2,1,0}}), f32[1,4,16]{{2,1,0:S(1)}}, u32[]{{:S(2)}}) \
{opcode}-start(%x), {how}
        ROOT %done = f32[1,4,16]{{2,1,0:S(1)}} {opcode}-done(%start)"""
    row = 4 * 16 * 4 / 1e3
    assert total(body, sliced).elementwise == pytest.approx(row)  # into VMEM
    body = body.replace("S(1)", "S(0)")
    assert total(body, sliced).elementwise == pytest.approx(2 * row)


def product(left: str, right: str, result: str, how: str) -> float:
    """FLOPs of a product whose arrays are in VMEM."""
    body = f"""%x = {left}{{1,0:S(1)}} parameter(0)
        %y = {right}{{1,0:S(1)}} parameter(1)
        ROOT %z = {result}{{1,0:S(1)}} {how.format("(%x, %y)")}"""
    return total(body).products * CHIP.peak_flops


@pytest.mark.parametrize(
    ("arrays", "how", "flops"),
    [
        (
            # Eight heads as a window over one place: all but one place is padding.
            ("bf16[64,32,1]", "bf16[32,8,16]", "bf16[64,8,16]"),
            "convolution{}, window={{size=8 pad=7_7 rhs_reversal=1}}, "
            "dim_labels=bf0_i0o->b0f",
            2 * 64 * 32 * 8 * 16,
        ),
        (
            ("bf16[64,8,16]", "bf16[8,16,32]", "bf16[64,32,1]"),
            "convolution{}, window={{size=8}}, dim_labels=b0f_0io->bf0",
            2 * 64 * 32 * 8 * 16,
        ),
        (
            # A batch of six, as a window that meets one operand at each stride.
            ("bf16[6,64,32]", "bf16[6,32,16]", "bf16[6,64,16]"),
            "convolution{}, window={{size=6 stride=5 pad=0_0 lhs_dilate=6}}, "
            "dim_labels=0bf_0io->0bf",
            2 * 6 * 64 * 32 * 16,
        ),
        (
            ("f32[64,32]", "f32[32,16]", "f32[64,16]"),
            "convolution{}, dim_labels=bf_io->bf, "
            "operand_precision={{highest,highest}}",
            6 * 2 * 64 * 32 * 16,
        ),
        (
            ("bf16[6,64,32]", "bf16[6,32,16]", "bf16[6,64,16]"),
            "dot{}, lhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, "
            "rhs_batch_dims={{0}}, rhs_contracting_dims={{1}}",
            2 * 6 * 64 * 32 * 16,
        ),
        (
            ("bf16[64,32]", "bf16[16,32]", "(bf16[64,16]"),
            "{{1,0}}, s8[4096]{{0}}) "
            'custom-call{}, custom_call_target="__cublas$lt$matmul", '
            'backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":'
            '{{"lhs_contracting_dimensions":["1"]}}}}}}',
            2 * 64 * 32 * 16,
        ),
    ],
    ids=["heads", "summed heads", "batch", "float32", "dot", "cublas"],
)
def test_flops_are_those_of_the_product_however_it_is_printed(arrays, how, flops):
    if "cublas" in how:
        body = f"""%x = {arrays[0]}{{1,0}} parameter(0)
            %y = {arrays[1]}{{1,0}} parameter(1)
            ROOT %z = {arrays[2]}{how.format("(%x, %y)")}"""
        fast = dataclasses.replace(CHIP, hbm_bytes_per_second=1e9)
        assert total(body, chip=fast).products == pytest.approx(flops / 1e6)
    else:
        assert product(*arrays, how) == pytest.approx(flops)


WAIT = """%x = bf16[40,50]{1,0:S(1)} parameter(0)
    %start = (bf16[40,50]{1,0:S(1)}, bf16[160,50]{1,0}) all-gather-start(%x), \
replica_groups=[1,4]<=[4], dimensions={0}
    %product = bf16[40,40]{1,0:S(1)} dot(%x, %x), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}
    %flash_forward.1 = bf16[40,50]{1,0} custom-call(%x), \
custom_call_target="tpu_custom_call"
    %done = bf16[160,50]{1,0} all-gather-done(%start)
    ROOT %sum = bf16[160,50]{1,0} all-reduce(%done), replica_groups=[1,4]<=[4]"""


def test_kernels_and_collectives_are_timed_elsewhere_and_stand_beside_others():
    found = roofline(WAIT, **{"flash_forward.1": 3.0, "sum": 2.0})
    seconds = 2 * 40 * 40 * 50 / 1e6
    assert found.total.elsewhere == 5
    assert found.total.products == pytest.approx(seconds)
    assert found.total.elementwise == 0
    assert found.beside == {"done": pytest.approx(seconds + 3)}
