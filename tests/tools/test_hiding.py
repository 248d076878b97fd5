"""How much of a ring step hides its transfers, from schedules written by hand."""

from collections import defaultdict, deque
from collections.abc import Iterator

import pytest

from tools.lib.compiled.hlo import Program

SIX_IN_FLIGHT = "FFFssFsss" + "d|s" * 2 + "F" + "d|s" * 5 + "Fddddd"
"""One step of six pieces, of which libtpu keeps five transfers in flight."""


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


@pytest.mark.parametrize(
    "order, expected",
    [
        ("ssFdd" * 3 + "F", [1] * 6),
        ("ssFdd" + "ssssFdddd" * 2 + "ssFdd" * 2, [1] * 14),
        ("ssssFFdddd" * 3 + "FF", [1] * 12),
        ("FssFdd", [1 / 2] * 2),
        ("FssssFdddd" * 3 + "FF", [1 / 2] * 12),
        ("ssssFFddddssFssFdddd", [1] * 6 + [1 / 2] * 2),
        ("s" * 12 + "F" * 6 + "d" * 12, [1] * 12),
        ("FFFFF" + "s" * 12 + "F" + "d" * 12, [1 / 6] * 12),
        ("FFFF" + "s" * 12 + "FF" + "d" * 12, [1 / 3] * 12),
        (SIX_IN_FLIGHT, [1 / 4] * 12),
        ("ssFddsdsd", [1, 1, 0, 0]),
        ("ssFddsdssFdd", [1, 1, 0, 1, 1]),
    ],
)
def test_a_transfer_is_hidden_by_the_kernels_of_its_step(order, expected):
    assert shares(order) == expected


@pytest.mark.parametrize(
    "order",
    [
        "ssFddF|ssFddF",
        "ssFddssFddF|ssFddssFddF",
        "ssssFFddddFF|ssssFFddddFF",
        "SSssFddssFddF|FDDssFdd",  # the second ring's first keys leave early
        "ssSFSddF|FDDssFdd",
        "ssFddLF|ssFddLF",
    ],
)
def test_the_last_step_of_a_ring_is_none_of_the_next(order):
    assert set(shares(order)) == {1}
