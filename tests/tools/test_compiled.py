"""Pods that are not attached, and what is read of programs compiled for them."""

import dataclasses
import math
import re
import sys
from collections import Counter, deque
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.devices import chips
from kernels.devices.torus import wraps
from tests.cases import pairs
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.hlo_text import Operation, arrays
from tools.lib.compiled.pods import (
    PODS,
    aot_pod,
    compile_for,
    device_kind,
    known_topologies,
    tpu_devices,
)
from tools.lib.planning.roofline import Roofline, Work

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


def test_a_loop_of_unknown_length_is_counted_once_and_reported():
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

    order: s and d for starts and dones, F for kernels. What started first is done
      first, and is what its step sends on.
      | begins others, which send on nothing that is here. L is a loop of steps.
    rings: attributes of a permute.
    """
    sent: deque[str] = deque()
    here: deque[str] = deque()
    for number, letter in enumerate(order):
        kind = letter.lower()
        name, permute = f"%{kind}.{number}", "f32[4]{0} collective-permute"
        match kind:
            case "s":
                operand = here.popleft() if here else "%x"
                sent.append(name)
                yield f"{name} = {permute}-start({operand}), {rings}"
            case "d":
                here.append(name)
                start = sent.popleft()
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
    assert program.orders() == [order.replace("|", "").replace("L", "")]
    found = program.collectives()
    assert all(one.is_hidden == (one.hidden_share == 1) for one in found)
    return [one.hidden_share for one in found]


@pytest.mark.parametrize(("order", "expected"), pairs("schedules.txt"))
def test_a_transfer_is_hidden_by_the_kernels_of_its_step(order, expected):
    """Kernels of the next ring do not hide the last step of this one."""
    order = re.sub(r"\((\S+?)\)(\d+)", lambda m: m[1] * int(m[2]), order)
    wanted = [float(Fraction(n)) for n in expected.split()]
    found = shares(order.replace(" ", ""))
    assert found == wanted * (len(found) if len(wanted) == 1 else 1)


# Pods: their names, shapes, links and compiler.


def shape(topology: str) -> tuple[int, ...]:
    return tuple(map(int, topology.split(":")[-1].split("x")))


@pytest.mark.parametrize(("asked", "found"), pairs("topologies.txt", "grow"))
def test_smallest_topology_that_is_large_enough(asked, found):
    chip, devices = asked.split()
    assert PODS[chip].grow(int(devices)) == shape(found)


@pytest.mark.parametrize(("topology", "closed"), pairs("topologies.txt", "closed"))
def test_axes_are_closed_where_the_pods_are(topology, closed):
    found = wraps(device_kind(topology.split(":")[0]), shape(topology))
    assert "".join("-o"[is_closed] for is_closed in found) == closed


@pytest.mark.parametrize(("name", "found"), pairs("topologies.txt", "pod"))
def test_pods_have_the_names_of_clouds_and_the_link_between_hosts(name, found):
    topology, devices, rate, cores, kind = found.split(" ", 4)
    pod = aot_pod(name)
    assert (pod.topology, len(pod.devices)) == (topology, int(devices))
    assert {device.device_kind for device in pod.devices} == {kind}
    assert pod.chip.interconnect_bytes_per_second == float(rate)
    if cores != "-":
        assert {device.num_cores for device in pod.devices} == {int(cores)}


@pytest.mark.parametrize(("asked", "said"), pairs("topologies.txt", "bad"))
def test_what_cannot_be_described_is_refused(asked, said):
    topology, *devices = asked.split()
    with pytest.raises(ValueError, match=re.escape(said)):
        tpu_devices(topology, *map(int, devices))


NO_TOPOLOGY = "h200:1x9 h200:1x1x8 h100:2x2x8 v5p-99999 v5p b200 v5e:16x32 v5e:2x2x2"
NO_TOPOLOGY += " v6:2x2 tpu7x-7 v4:16x16x32 v4:2x2 v5e:02x2 v5p-100 v5p-3 v5litepod-1"
NO_TOPOLOGY += " gb200:1x8 b100:1x8 a100:65x8"


@pytest.mark.parametrize("name", NO_TOPOLOGY.split())
def test_what_is_no_topology_is_refused_with_some_that_are(name):
    with pytest.raises(ValueError, match=f"topology='{name}' must be ") as caught:
        aot_pod(name)
    remedy = str(caught.value).partition(" must be ")[2]
    shown = re.findall(r"[a-z]\w+:\d+x[\dx]+", remedy)
    assert shown and len(str(caught.value)) < 250
    assert all(name in sum(known_topologies().values(), []) for name in shown)


def test_missing_compiler_is_named_with_its_requirements(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ModuleNotFoundError, match=r"libtpu.*requirements/dev\.txt"):
        tpu_devices("v5e")


@pytest.mark.quick
def test_function_is_compiled_for_all_devices_of_the_mesh():
    mesh = Mesh(np.array(tpu_devices("v5e")), ("ring",))
    rows = NamedSharding(mesh, PartitionSpec("ring"))
    x = jax.ShapeDtypeStruct((4, 128), jnp.float32, sharding=rows)
    weight = jax.ShapeDtypeStruct((128,), jnp.float32)  # replicated

    def total(parts):
        return (parts["x"] * parts["weight"]).sum()

    for function in (total, jax.jit(total, donate_argnums=0)):
        compiled = compile_for(mesh, function, {"x": x, "weight": weight})
        assert "all-reduce" in compiled.as_text()
        # One device holds one row and the weight, each in a tile of 1 x 128.
        assert compiled.memory_analysis().argument_size_in_bytes == 2 * 128 * 4


# Times of instructions by the roofline, from short programs written by hand.

CHIP = dataclasses.replace(
    chips.find("TPU v5 lite"), peak_flops=1e6, hbm_bytes_per_second=1e3
)
"""Rates by which seconds are read from FLOPs and bytes."""
FAST = dataclasses.replace(CHIP, hbm_bytes_per_second=1e9)


def roofline(
    body: str,
    others: str = "",
    chip=CHIP,
    rate: float = math.inf,
    links: dict | None = None,
    **elsewhere: float,
) -> Roofline:
    """Times of a program with this entry, or of others alone, which have one."""
    text = f"HloModule m, is_scheduled=true\n{others}"
    if body:
        lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
        text += f"\nENTRY %main () -> f32[] {{\n{lines}}}"
    return Roofline(Program.parse(text, 4), chip, elsewhere, rate, links)


def total(body: str, others: str = "", chip=CHIP, **elsewhere: float) -> Work:
    return roofline(body, others, chip, **elsewhere).total


FLOPS, SLICED = 2 * 64 * 32 * 16, 2 * (64 * 32 + 32 * 16 + 64 * 16)


def test_a_product_in_a_loop_counts_its_trips_and_the_slice_that_it_reads():
    text = (HLO / "scanned_product.txt").read_text()
    assert total("", text, FAST).products == pytest.approx(5 * FLOPS / 1e6)
    memory = total("", text)
    assert memory.products == memory.memory == pytest.approx(5 * SLICED / 1e3)
    assert memory.recomputed == memory.elementwise == 0


@pytest.mark.parametrize(("entry", "rows"), pairs("moved_rows.txt"))
def test_what_moves_bytes_counts_those_of_its_slices(entry, rows):
    found = total(entry.replace(" ; ", "\n"), (HLO / "slices.txt").read_text())
    seconds = int(rows) * 4 * 16 * 4 / 1e3
    assert found.elementwise + found.small == pytest.approx(seconds)
    assert found.products == found.recomputed == found.elsewhere == 0


@pytest.mark.parametrize(("printed", "flops"), pairs("products.txt"))
def test_flops_are_those_of_the_product_however_it_is_printed(printed, flops):
    left, right, result, how, rest = printed.split(" ", 4)
    body = f"""%x = {left} parameter(0)
        %y = {right} parameter(1)
        ROOT %z = {result} {how}(%x, %y), {rest}"""
    found = total(body, chip=FAST).products * CHIP.peak_flops
    assert found == pytest.approx(math.prod(map(int, flops.split(" * "))))


TOKENS, MATRICES, MADE = "bf16[512,64]", "bf16[4,64,32]", "bf16[512,32]"


@pytest.mark.parametrize(
    ("target", "arrays", "listed", "flops"),
    [
        # Of 8 tiles of 64 rows three are visited twice.
        ("tpu_custom_call", (TOKENS, MATRICES, MADE), 11, 1.1 * 11 / 8),
        ("tpu_custom_call", (MADE, MATRICES, TOKENS), 11, 1.1 * 11 / 8),
        ("tpu_custom_call", (TOKENS, MADE, "f32[4,64,32]"), 11, 1.4 * 11 / 8),
        ("triton_kernel_call_ffi", (TOKENS, MATRICES, MADE), 5, 1.1),
        ("tpu_custom_call", (TOKENS, MADE, TOKENS), 11, 0),
        ("Sharding", (TOKENS, MATRICES, MADE), 11, 0),
    ],
)
def test_grouped_products_count_the_tiles_that_they_visit(
    target, arrays, listed, flops
):
    left, right, result = arrays
    body = f"""%s = s32[5] parameter(0)
        %t = s32[{listed}] parameter(1)
        %x = {left} parameter(2)
        %y = {right} parameter(3)
        ROOT %z = {result} custom-call(%s, %t, %x, %y), custom_call_target="{target}"
    """
    counted = total(body, chip=FAST).products * CHIP.peak_flops
    assert counted == pytest.approx(flops * 2 * 512 * 64 * 32)


def test_another_kernel_of_three_arrays_is_not_a_grouped_product():
    """One without numbers of tiles, and one whose result has one axis."""
    for result in (MADE, "bf16[512]"):
        body = f"""%x = {TOKENS} parameter(0)
            %y = {MATRICES} parameter(1)
            ROOT %z = {result} custom-call(%x, %y), custom_call_target="tpu_custom_call"
        """
        assert total(body).products == 0


def test_cycles_that_xla_does_not_know_are_left_out():
    line = 'fusion(%x), backend_config={"estimated_cycles":"9223372036854775807"}'
    assert Operation("scatter", "fusion", (), line).cycles is None


WAIT = (HLO / "wait.txt").read_text()


def test_kernels_and_collectives_are_timed_elsewhere_and_stand_beside_others():
    found = roofline(WAIT, **{"flash_forward.1": 3.0, "sum": 2.0})
    seconds = 2 * 40 * 40 * 50 / 1e6
    assert found.total.elsewhere == 5
    assert found.total.products == pytest.approx(seconds)
    assert found.total.elementwise == 0
    assert found.beside == {"done": pytest.approx(seconds + 3)}


QUEUED = (HLO / "queued.txt").read_text()


@pytest.mark.parametrize(
    ("links", "beside"), [((0, 0), (3, 3)), ((1, 2), (3, 2)), ((4, 2), (3, 0))], ids=str
)
def test_transfers_go_one_after_another(links, beside):
    """Of the three seconds of a kernel the second has what the first one leaves."""
    given, found = ({"first": x, "second": y} for x, y in (links, beside))
    kernel = {"flash_forward.1": 3.0}
    assert roofline(QUEUED, links=given, **kernel).beside == found


SMALL = (HLO / "small.txt").read_text()


def test_instructions_of_few_cycles_are_small_and_take_what_xla_takes_them_to():
    bound, cycles = (roofline(SMALL, rate=rate).total for rate in (math.inf, 100))
    assert bound.instructions == cycles.instructions == 2
    memory, number = 3 * 8 * 128 * 4 / 1e3, 3 * 4 / 1e3
    assert (bound.small, bound.elementwise) == (memory + number, memory)
    assert (cycles.small, cycles.elementwise) == (20 + number, 60)
