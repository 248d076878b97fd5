"""Compiles the Pallas kernels and rings of them for AOT TPU topologies, by libtpu.

Nothing runs here. The programs are those that would run on the chip, so layouts and
memory suit it, and the schedule shows in which order transfers start and end.
"""

import contextlib
import functools
import itertools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from kernels.backends import IMPLEMENTATIONS
from kernels.devices.compiler import compiler_options
from kernels.devices.torus import ring_along
from kernels.layouts import Striped
from kernels.masks import Mask, causal
from kernels.ring.routes import HOME_FROM, TURNS_FROM, all_shards
from kernels.ring_attention import make_ring_attention
from kernels.trees import tree
from tests.support.ring_layers import (
    HEAD_DIM,
    HEADS,
    compile_without_bodies,
    layers_gradient,
    sharded_array,
    small_instructions,
    striped_attention,
)
from tests.support.steps import PASSES, StepCase
from tools.lib.compiled.hlo import TRANSFER, Program
from tools.lib.compiled.pods import compile_for, tpu_devices

CHIPS = "v4", "v5e", "v5p", "v6e", "tpu7x"
LENGTHS = 1024, 4096, 32768, 131072
BACKEND = IMPLEMENTATIONS["pallas_tpu"]
TOKENS = 2048
"""Tokens of a device: two tiles, so that heads first differs from tokens first."""


def compiled_step(chip: str, direction: str, case: StepCase, dtype: jnp.dtype) -> str:
    """Returns the scheduled program of one attention step on one device."""
    mesh = Mesh(np.array(tpu_devices(chip)[:1]), ("device",))
    options = {"scale": 0.1, "sizes": None, "soft_cap": case.soft_cap}
    program = functools.partial(PASSES[direction], BACKEND, **options)
    step = case.abstract(dtype)
    return compile_for(mesh, lambda step: program(step=step), step).as_text()


def copies_of_shards(program: str, size: int) -> list[int]:
    """Counts copies and pads of `size` numbers or more, by computation with kernels."""
    counts = []
    for computation in re.split(r"\n(?=%|ENTRY)", program):
        shapes = re.findall(r"\[([\d,]+)\]\S* (?:copy|transpose|pad)\(", computation)
        sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
        if 'custom_call_target="tpu_custom_call"' in computation:
            counts.append(sum(copied >= size for copied in sizes))
    return counts


@functools.cache
def compiled_layers(
    chip: str,
    ring_size: int,
    length: int,
    kv_heads: int,
    mask: Mask = causal(),
    has_options: bool = True,
) -> str:
    """Compiles the gradients of two scanned layers that save the ring's out and lse."""
    devices = np.array(tpu_devices(chip, ring_size)[:ring_size])
    mesh = Mesh(ring_along(devices, 0), ("ring",))
    sizes = {
        "kv_heads": kv_heads,
        "heads": max(HEADS, kv_heads),
        "mask": mask,
    }
    kind = mesh.devices.flat[0].device_kind
    route = replace(all_shards(kind=kind), cores=1)
    gradient, inputs = layers_gradient(mesh, BACKEND, length, route=route, **sizes)
    options = compiler_options(mesh) if has_options else None
    program = jax.jit(gradient, compiler_options=options)
    return compile_without_bodies(mesh, program, *inputs).as_text()


def overlapped_forward(ring_size: int, ways: int = 2) -> str:
    """Returns the order: k and v of each half leave before all kernels of a step."""
    step = "ss" * ways + "F" * ways + "dd" * ways
    return step * (ring_size - 1) + "F" * ways


def overlapped_backward(ring_size: int, ways: int = 2) -> str:
    """Returns the order: as forward, dk and dv one step behind.

    Half of the local queries are deferred, to overlap the last transfer.
    """
    s, d, kernels = "ss" * ways, "dd" * ways, "B" * ways
    keys, both = f"{s}{kernels}{d}", f"{s * 2}{kernels}{d * 2}"
    return keys + both * (ring_size - 2) + keys * 2


def overlapped_turns(ring_size: int) -> str:
    """Returns the order of two halves of the heads that take turns.

    Beside a kernel of one leave its keys, and dk and dv of the other.
    """
    return "ssBdd" + "ssssBdddd" * (2 * ring_size - 3) + "ssBdd" * 3


def assert_transfers_overlap(
    program: str, ring_size: int, ways: int, takes_turns: bool
) -> None:
    orders = Program.parse(program, ring_size).orders()
    backward = overlapped_backward(ring_size, ways)
    if takes_turns:
        backward = overlapped_turns(ring_size)
    assert sorted(orders) == sorted([backward, overlapped_forward(ring_size, ways)])


def assert_all_are_hidden(text: str, ring_size: int, rows_of_key: int) -> None:
    """Transfers of each half of the heads, of two layers: in both passes, and home."""
    found = Program.parse(text, ring_size).collectives()
    transfers = [c for c in found if c.kind == TRANSFER]
    each = 4 * (2 * (ring_size - 1) + ring_size)
    if ring_size >= HOME_FROM and rows_of_key >= TURNS_FROM:
        # Keys of one half come home, those of the other too, and go one device further.
        each += 2 * 3
    assert sum(t.times for t in transfers) == 2 * each
    assert all(t.is_hidden for t in transfers)


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
@pytest.mark.parametrize("is_in_use", [True, False])
def test_rings_of_tpus_that_are_not_here_go_both_ways(chip, is_in_use):
    """As on the chip, of which a mesh tells that need not be in use."""
    mesh = Mesh(np.array(tpu_devices(chip, 4)[:4]), ("ring",))
    attend = make_ring_attention(mesh, layout=Striped(), implementation="reference")
    x = sharded_array(mesh, TOKENS, 4)

    def run(x):
        return attend(x, x, x, causal())

    in_use = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with in_use if is_in_use else contextlib.nullcontext():
        text = jax.jit(run).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    pattern = r"stablehlo\.collective_permute.*: \(tensor<([^>]*)>\)"
    sent = re.findall(pattern, text)
    assert sent == [f"1x{TOKENS}x2x{HEAD_DIM}xbf16"] * 2 * 2 * 3


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.thorough(quick=1)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "chip, ring_size, length, kv_heads",
    [
        ("v5e", 32, TOKENS, HEADS),
        ("v6e", 4, TOKENS, HEADS),
        ("tpu7x", 8, TOKENS, HEADS),
        ("v5e", 8, TURNS_FROM, HEADS),
        ("v5p", 4, TURNS_FROM, HEADS),
        *(slow(chip, 32, TOKENS, HEADS) for chip in ("v4", "v6e")),
        *(slow(chip, 4, TOKENS, n) for chip in ("v3", "v4", "v5p") for n in (1, HEADS)),
        *(slow(chip, 4, TOKENS, 4) for chip in ("v3", *CHIPS)),
        slow("v5e", 4, TOKENS, 1),
        *(
            slow(chip, ring_size, length, HEADS)
            for chip in CHIPS
            for ring_size in (4, 8, 16)
            for length in LENGTHS
        ),
    ],
)
def test_every_transfer_overlaps_the_kernel_of_its_ring_step(
    chip, ring_size, length, kv_heads
):
    """And the layer's backward does not run the forward ring again.

    No shard is copied, into the kernels' order or to make room for what arrives. In a
    loop, transfers on a v5e overlap only if the ring goes from neighbour to neighbour,
    and a step runs few instructions beside transfers and kernels.
    """
    text = compiled_layers(chip, ring_size, length, kv_heads)
    rows_of_key = length * max(HEADS, kv_heads) // kv_heads
    if ring_size == 4:  # longer ones are loops
        takes_turns = chip != "v3" and rows_of_key >= TURNS_FROM
        assert_transfers_overlap(text, 4, 1 if chip == "v3" else 2, takes_turns)
    if chip == "v3":  # computes in float32, to which it converts what arrives
        return
    assert_all_are_hidden(text, ring_size, rows_of_key)
    if length == TOKENS:
        copies = copies_of_shards(text, TOKENS * kv_heads * HEAD_DIM)
        assert len(copies) >= 2 and not any(copies), copies
    if ring_size == 32 or (chip, length) == ("tpu7x", TOKENS):
        # At 57b6f6f each step found its live tiles: v5e 113, v6e 103, v4 117 of them.
        assert 10 < small_instructions(text, ring_size) <= 30


@pytest.mark.thorough
@pytest.mark.parametrize("chip", ["v5e", slow("v5p"), slow("v6e"), slow("tpu7x")])
def test_without_compiler_options_the_backward_waits_for_transfers(chip):
    """XLA has five permutes in flight by itself, and a step of the backward has eight.

    The table in docs/compiler_options.md says so: where this fails, it can be shorter.
    """
    text = compiled_layers(chip, 4, TOKENS, HEADS, has_options=False)
    orders = Program.parse(text, 4).orders()
    assert overlapped_forward(4) in orders
    assert any("sd" in order for order in orders)
    collectives = Program.parse(text, 4).collectives()
    waited = [c for c in collectives if c.kind == TRANSFER and not c.is_hidden]
    assert sum(transfer.times for transfer in waited) >= 2 * 3


@pytest.mark.thorough
@pytest.mark.parametrize("chip", [slow("v5e"), "v5p"])
@pytest.mark.parametrize(
    "intervals, parents",
    [(2, [-1, *[0] * 7]), slow(3, [-1, 0, 1, 1, 0, 4, 4, 0])],
)
def test_transfers_of_a_ring_of_several_intervals_overlap_kernels(
    chip, intervals, parents
):
    """In a branch of a conditional each, inside that of the step."""
    ids = np.repeat(np.arange(8), 32 * 2 * TOKENS // 8)
    mask = tree(ids, parents, intervals=intervals)
    text = compiled_layers(chip, 32, 2 * TOKENS, HEADS, mask=mask)
    assert_all_are_hidden(text, 32, 2 * TOKENS)
    assert 10 < small_instructions(text, 32) <= 30 + 10 * intervals


@pytest.mark.thorough
@pytest.mark.parametrize("head_dim", [slow(128), 100])
def test_keys_in_another_order_are_reordered_once(head_dim):
    """As RoPE leaves them, and padded to whole lanes: q, k, v, and what comes out."""
    mesh = Mesh(ring_along(np.array(tpu_devices("v5e", 4)[:4]), 0), ("ring",))
    attend = striped_attention(mesh, BACKEND, TOKENS)
    tokens_last = Layout(major_to_minor=(0, 2, 3, 1))

    def attend_to_tokens_last(*operands):
        return attend(*(with_layout_constraint(x, tokens_last) for x in operands))

    x = sharded_array(mesh, TOKENS, HEADS, head_dim)
    program = jax.jit(attend_to_tokens_last)
    program = compile_without_bodies(mesh, program, x, x, x).as_text()
    [copies] = copies_of_shards(program, TOKENS * HEADS * 128)
    assert 0 < copies <= 4


def compiled_steps():
    """(chip, shape, type): for every chip any length and shape, and large groups.

    These take nearly all of the vector memory, or more if stacked whole.
    """
    f32, bf16 = jnp.float32, jnp.bfloat16
    yield "v3", {"length": 1024}, bf16  # which it computes in float32
    lengths = [{"length": length} for length in LENGTHS]
    found = list(itertools.product(("v3", *CHIPS), lengths, (bf16, f32)))
    found.remove(("v3", {"length": 1024}, bf16))
    shapes = [{"group": 8, "kv_heads": 1}, {"group": 32, "kv_heads": 1}, {"group": 3}]
    shapes += [{"head_dim": size} for size in (64, 100, 256)]
    shapes += [{"length": 1}, {"length": 4093}, {"soft_cap": 50.0}]
    found += itertools.product(CHIPS, shapes, [bf16])
    found.append(("v3", {"group": 7, "kv_heads": 4}, bf16))
    for chip, group, head_dim, dtype in (
        *[("v4", 9, 256, f32), ("v4", 29, 128, f32), ("v4", 25, 128, f32)],
        *[("v4", 64, 256, f32), ("v4", 17, 256, bf16), ("v5p", 43, 256, bf16)],
    ):
        shape = {"group": group, "kv_heads": 1, "head_dim": head_dim}
        found.append((chip, shape, dtype))
    marks = pytest.mark.slow, pytest.mark.timeout(1800)
    yield from (pytest.param(*step, marks=marks) for step in found)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("chip, shape, dtype", list(compiled_steps()), ids=str)
def test_any_step_compiles_for_every_chip(chip, shape, dtype, direction):
    options = {"length": 2048, "group": 1, "kv_heads": 2, "head_dim": 128} | shape
    length = options.pop("length")
    case = StepCase(length, length, **options, batch=1, has_carry=True)
    assert f"flash_{direction}" in compiled_step(chip, direction, case, dtype)
