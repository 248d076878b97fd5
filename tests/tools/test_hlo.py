"""What is read of scheduled programs written by hand, and what hides in them."""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from tests.cases import pairs
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.hlo_text import arrays

HLO = Path(__file__).parents[1] / "fixtures/hlo"
# Two layers of a ring, scanned; around them what a TPU and a GPU print, and how.
PROGRAM = (HLO / "ring_step.txt").read_text()


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


OFFLOADED = (HLO / "sparse_core.txt").read_text()


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


# How much of a ring step hides its transfers.


def lines(order: str, rings: str) -> Iterator[str]:
    """Yields the instructions of a schedule.

    order: s and d for starts and dones, F for kernels; S and D of an outer ring. Of
      either, what started first is done first, and is what its step sends on.
      | begins others, which send on nothing that is here. L is a loop of steps.
    rings: attributes of a permute.
    """
    sent: dict[str, deque[str]] = defaultdict(deque)
    here: dict[str, deque[str]] = defaultdict(deque)
    for number, letter in enumerate(order):
        kind = letter.lower()
        ring = "outer" if letter in "SD" else "inner"
        name, permute = f"%{kind}.{number}", "f32[4]{0} collective-permute"
        match kind:
            case "s":
                operand = here[ring].popleft() if here[ring] else "%x"
                sent[ring].append(name)
                yield f"{name} = {permute}-start({operand}), {rings}"
            case "d":
                here[ring].append(name)
                start = sent[ring].popleft()
                yield f"{name} = {permute}-done({start})"
            case "f":
                call = 'custom-call(%x), custom_call_target="tpu_custom_call"'
                yield f"%flash_forward.{number} = f32[4]{{0}} {call}"
            case "l":
                yield f"{name} = f32[4]{{0}} while(%x), condition=%end, body=%body"
            case "|":
                here.clear()


def shares(order: str) -> list[float]:
    """Returns the hidden shares of a schedule's transfers, in the order of dones."""
    rings = 'source_target_pairs={{0,1},{1,0}}, metadata={op_name="ring/ppermute"}'
    body = '%flash_forward.0 = f32[4]{0} custom-call(%x), custom_call_target="triton"'
    text = "\n  ".join(["ENTRY %main (x: f32[4]) -> f32[4] {", *lines(order, rings)])
    text = (
        f"HloModule step\n\n%body (x: f32[4]) -> f32[4] {{\n  {body}\n}}\n\n{text}\n}}"
    )
    program = Program.parse(text, devices=2)
    kept = order.replace("|", "").replace("L", "").replace("S", "s").replace("D", "d")
    assert program.orders() == [kept]
    found = program.collectives()
    assert all(one.is_hidden == (one.hidden_share == 1) for one in found)
    return [one.hidden_share for one in found]


@pytest.mark.parametrize(("order", "expected"), pairs("schedules.txt"))
def test_a_transfer_is_hidden_by_the_kernels_of_its_step(order, expected):
    """Of its own: the last step of a ring is none of the next one's."""
    order = re.sub(r"\((\S+?)\)(\d+)", lambda m: m[1] * int(m[2]), order)
    wanted = [float(Fraction(n)) for n in expected.split()]
    found = shares(order.replace(" ", ""))
    assert found == wanted * (len(found) if len(wanted) == 1 else 1)
