"""Times of instructions by the roofline, from short programs written by hand."""

import dataclasses
import math
from pathlib import Path

import pytest

from tests.cases import pairs
from tools.lib.compiled.hlo import Program
from tools.lib.planning.roofline import Roofline, Work
from training import chips

CHIP = dataclasses.replace(
    chips.find("TPU v5 lite"), peak_flops=1e6, hbm_bytes_per_second=1e3
)
"""Rates by which seconds are read from FLOPs and bytes."""
FAST = dataclasses.replace(CHIP, hbm_bytes_per_second=1e9)
HLO = Path(__file__).parents[1] / "fixtures/hlo"


def roofline(body: str, others: str = "", chip=CHIP, **elsewhere: float) -> Roofline:
    """Times of a program with this entry, or of others alone, which have one."""
    text = f"HloModule m, is_scheduled=true\n{others}"
    if body:
        lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
        text += f"\nENTRY %main () -> f32[] {{\n{lines}}}"
    return Roofline(text, Program.parse(text, 4), chip, elsewhere)


def total(body: str, others: str = "", chip=CHIP, **elsewhere: float) -> Work:
    return roofline(body, others, chip, **elsewhere).total


FLOPS, SLICED = 2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16)


def test_a_product_in_a_loop_counts_its_trips_and_the_slice_that_it_reads():
    text = (HLO / "scanned_product.txt").read_text()
    assert total("", text, FAST).products == pytest.approx(5 * FLOPS / 1e6)
    memory = total("", text)
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
    update = (HLO / "updated_slice.txt").read_text()
    assert total(fused, update).elementwise == pytest.approx(3 * row)
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


@pytest.mark.parametrize(("printed", "flops"), pairs("products.txt"))
def test_flops_are_those_of_the_product_however_it_is_printed(printed, flops):
    left, right, result, how, rest = printed.split(" ", 4)
    body = f"""%x = {left} parameter(0)
        %y = {right} parameter(1)
        ROOT %z = {result} {how}(%x, %y), {rest}"""
    found = total(body, chip=FAST).products * CHIP.peak_flops
    assert found == pytest.approx(math.prod(map(int, flops.split(" * "))))


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
