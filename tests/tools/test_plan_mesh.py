"""Suggested meshes, and the estimate's parts, without compiling anything."""

import dataclasses
import json
import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest

from kernels.backends.tile_layout import BlockSizes
from kernels.cost.speed import PRODUCTS
from kernels.cost.work import Row, RowOnRing
from kernels.devices import chips
from kernels.devices.chips import measured
from kernels.layouts import Contiguous, Striped, Zigzag
from kernels.masks import causal
from models.abstract import Model
from tasks.layout_choice import ring_passes, state_times
from tasks.task import make_run
from tools import plan_pod
from tools.lib.benchmarks.problems import tiles_per_step
from tools.lib.compiled.hlo import TRANSFER, Collective, Instruction, Program
from tools.lib.planning.estimate import (
    Attention,
    Estimate,
    cycles_per_second,
    estimate,
    synchronous_seconds,
)
from tools.lib.planning.meshes import suggestions
from tools.lib.planning.plan import kinds
from tools.lib.planning.roofline import Roofline, Work
from tools.plan_pod import read_config
from training.sharding.mesh import MESH_AXES, MeshShape, Partition

V4, V5E, V5P, V6E, H200 = map(
    chips.find, ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "NVIDIA H200")
)


def config_7b(context=2**23, remat="nothing", head_dim=128, **more):
    fields = {"data.context_tokens": context, "remat": remat, "attention_parts": 1}
    fields |= {"attention": "striped"}
    fields |= {"model.head_dim": head_dim} | more
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    return read_config(["--config=configs/tpuv4_7b.py", *arguments])


def partition(data=1, fsdp=1, ring=512, tensor=1):
    return Partition(MeshShape(data, fsdp, ring, tensor).abstract_mesh())


def run_7b(*context, **fields):
    return make_run(config_7b(*context, **fields), partition())


@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Zigzag()], ids=str)
@pytest.mark.parametrize("ring_size", [1, 2, 4, 8])
def test_area_is_that_of_the_counted_tiles(layout, ring_size):
    length = 1024
    visible = causal()(np.arange(ring_size * length)[None], ring_size * length)
    work = tiles_per_step(layout, ring_size, visible, BlockSizes(256, 256))
    expected = work.max(axis=0).sum() * 256**2 / ring_size
    row = Row.of((), ring_size * length)
    assert RowOnRing(row, layout, ring_size, length).area == pytest.approx(expected)


def test_ring_hides_where_a_device_has_tokens_enough():
    long, short = (ring_passes(run_7b(n), V4)[0].ring for n in (2**24, 2**21))
    assert long.keys_bytes == 2 * 32768 * 4096 * 2
    for direction in PRODUCTS:
        assert long.times(V4, direction).outlasting == 0
        assert short.times(V4, direction).outlasting > 0
    times = [ring.times(V4, "forward").kernels for ring in (short, long)]
    # 64 times the pairs; but the short one is mostly diagonal tiles and programs.
    assert 48 * times[0] < times[1] < 56 * times[0]


def test_rings_of_a_step_are_those_that_remat_runs():
    budget = {"remat_budget_gib": 8.5 * 16384 * 8320 / 2**30}
    for fields, times in (
        ({"remat": "attention"}, [32, 32]),
        ({"remat": "attention", "train.microbatches": 2}, [64, 64]),
        ({"remat": "nothing"}, [2 * 32, 32]),
        (budget, [2 * 24, 8, 32]),
    ):
        passes = ring_passes(run_7b(**fields), V4)
        assert [one.times for one in passes] == times
        *forward, backward = (one.direction for one in passes)
        assert {*forward} == {"forward"} and backward == "backward"


WINDOWS = {"attention": "zigzag", "remat": "attention"}
WINDOWS |= {"model.layer_pattern": "wwwf", "model.window": 1024}


def test_layers_see_what_the_runs_mask_and_their_window_show():
    for mask, layers in (
        ("window(512)", {512: 32}),
        ("window(4096)", {1024: 24, 4096: 8}),
        ("prefix(4096)", {1024: 24, 0: 8}),
    ):
        found: Counter[int] = Counter()
        for one in ring_passes(run_7b(2**18, mask=mask, **WINDOWS), V4):
            row = one.ring.sequence.row
            found[row.window] += one.times * (one.direction == "backward")
            assert row.is_causal == (row.window > 0)
        assert found == layers


def test_each_kind_of_layers_takes_its_time_on_its_own_route():
    config, mesh = config_7b(2**21, **WINDOWS), partition(ring=64, tensor=8)
    run = make_run(config, mesh)
    ring, full = (one.ring for one in ring_passes(run, V4)[:2])
    # Home, and a neighbour on each side; whole shards would have 64 steps.
    assert (ring.schedule.last, full.schedule.last) == (1, 63)
    assert ring.describe() == "neighbours" and full.describe() == "both ways"
    kernels = program("forward", "forward", "backward")
    found = Attention.of(run, V4, kernels)
    for direction, name, runs in (("forward", "k1", 4), ("backward", "k2", 2)):
        few, whole = (one.times(V4, direction) for one in (ring, full))
        seconds = 24 * few.kernels + 8 * whole.kernels
        assert found.kernels[direction] == pytest.approx(seconds)
        # As long as where it is shortest: 32 layers, some runs in this program.
        shortest = 32 * min(few.kernels, whole.kernels) / runs
        assert found.by_name[name] == pytest.approx(shortest)
    short = run_7b(2**21)
    waits = [times * one.outlasting for times, *_, one in ring_passes(short, V4)]
    outlasting = Attention.of(short, V4, kernels).outlasting
    assert outlasting == pytest.approx(sum(waits)) and min(waits) > 0
    # XLA's own attention is among the instructions, and counts there.
    alone = Attention.of(run, V4, program())
    assert (alone.kernels, alone.outlasting, alone.by_name) == ({}, 0, {})


def test_kernels_of_gated_deltanet_take_the_time_of_its_states():
    sizes = dict(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
    fields = {f"model.delta_{name}": size for name, size in sizes.items()}
    fields |= {"model.delta_convolution": 4, "model.layer_pattern": "dddf"}
    run = make_run(config_7b(2**18, attention="zigzag", **fields), partition(ring=8))
    found = Attention.of(run, V5P, program("forward", "backward", "delta", "delta"))
    seconds, _ = state_times(run, V5P)
    assert found.kernels["delta"] == seconds > 0
    assert found.by_name["k2"] == seconds / 4
    assert "delta" not in Attention.of(run, V5P, program("forward", "backward")).kernels


def program(*kernels: str) -> Program:
    """A program of these kernels, each run twice."""
    instructions = [
        Instruction(f"k{n}", "kernel", kernel=k) for n, k in enumerate(kernels)
    ]
    loop = Instruction("layers", "loop", called=("layer",), trips=2)
    return Program("main", {"main": (loop,), "layer": tuple(instructions)})


def found(*collectives: Collective, chip: chips.Chip = V4) -> Estimate:
    """The estimate of a program of nothing else, with what a plan found of the rest."""
    attention = Attention({"forward": 2.0, "backward": 4.0}, 0.5, {}, "some", ways=2)
    roofline = Roofline(Program.parse("ENTRY %e () -> f32[] {\n}", 4), chip, {})
    roofline.total = Work(8.0, 16.0, 32.0, 0.25, elsewhere=99.0, instructions=3.0)
    return estimate(chip, attention, roofline, collectives, 10.0)


def test_estimate_adds_up_and_waits_for_what_is_exposed():
    sent = Collective("ring", TRANSFER, 45e9, 4, 8, 1.0, True)
    hidden = found(sent)
    assert hidden.ring_waits == 0.5  # outlasts its kernels
    assert hidden.step == 2 + 4 + 8 + 16 + 32 + 0.25 + 0.5
    assert hidden.mfu == pytest.approx(10 / hidden.step)
    assert (hidden.small, hidden.instructions) == (0.25, 3)
    # Over two links; half of the kernels missed, and half of 0.5 s over the others.
    half = dataclasses.replace(sent, hidden_share=0.5)
    gather = Collective("gather", "all-gather", 90e9, 4, 3, 0.0, False)
    exposed = found(half, gather)
    assert (exposed.ring_waits, exposed.other_waits) == (8 / 4 + 0.25, 3)


def test_links_of_some_chips_were_measured_and_cores_count_their_cycles():
    sent = Collective("ring", TRANSFER, 86.3e6, 4, 1000, 0.0, False)
    chip = measured(V5P)
    assert found(sent, chip=chip).ring_waits == pytest.approx(0.5 + 4.55e-3)
    assert measured(V4) == V4
    clocks = [cycles_per_second(chip) / 1e9 for chip in (V4, V5E, V5P, V6E, H200)]
    assert clocks == pytest.approx([1.05, 1.5, 1.75, 1.75, math.inf], rel=0.01)


def test_a_collective_is_exposed_for_as_long_as_it_outlasts_what_runs_beside_it():
    gathers = [
        Collective(name, "all-gather", 90e9, 4, 2, share, name != "alone")
        for name, share in (("alone", 0.0), ("short", 1.0), ("long", 0.0))
    ]
    fused = Collective("fused", "all-gather", 90e9, 4, 2, 1.0, True)
    sent = Collective("ring", TRANSFER, 45e9, 4, 1, 1.0, True)
    assert synchronous_seconds([*gathers, fused, sent], V4) == {"alone": 1.0}
    # At 45 GB/s one way and 90 GB/s both ways.
    beside = {"short": 0.25, "long": 2.0, "ring": 0.1}
    found = {k.name: k for k in kinds([*gathers, fused, sent], beside, V4)}
    assert found["all-gather"].exposed_bytes == pytest.approx(2 * 90e9 * (1 + 0.75))
    assert found["all-gather"].synchronous_bytes == 2 * 90e9
    assert found[TRANSFER].exposed_bytes == 0  # what outlasts its kernel counts there


@pytest.mark.thorough
@pytest.mark.parametrize("context", [2**22, 2**23])
def test_best_mesh_fits_and_takes_the_least_time(context):
    traced = mock.Mock(side_effect=Model.of)
    with mock.patch.object(Model, "of", traced):
        found = suggestions(config_7b(context), 512, V4)
    assert traced.call_count == 1  # once for all meshes, of which each has its own
    run = run_7b(context)
    elsewhere = make_run(run.config, partition(ring=1)).counted_on(run.partition)
    assert elsewhere.state_like == run.state_like
    assert found[0].fits and found[0].ring_waits == 0
    # One row, and 32 heads: nothing else divides.
    assert all(one.mesh["data"] == one.mesh["fsdp"] == 1 for one in found)
    assert max(one.mesh["tensor"] for one in found) == 32
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True) and not all(fits)
    seconds = [one.seconds for one in found if one.fits]
    assert seconds == sorted(seconds)
    for one in found:
        waits = one.ring_waits + one.other_waits
        assert one.seconds == pytest.approx(one.attention + one.products + waits)


@pytest.mark.thorough
def test_rows_that_count_their_steps_end_with_their_documents():
    config = config_7b(2**20, attention="zigzag", **{"model.num_kv_heads": 8})
    meshes = (suggestions(config, 64, V4, lengths) for lengths in ((), (2**16,)))
    whole, packed = (
        next(one for one in found if one.mesh["ring"] == 64) for found in meshes
    )
    assert whole.route == "one way"  # which hides by far
    assert packed.route == "7/63 steps"
    # On their way home nothing hides gradients.
    assert packed.ring_waits > whole.ring_waits
    assert packed.attention < whole.attention / 8


@pytest.mark.thorough
def test_suggestions_are_printed_and_written(tmp_path, capsys):
    output = tmp_path / "meshes.json"
    config = "--config=configs/h200_1b.py", "--config.data.batch_rows=8"
    options = "--topology=h200:1x8", "--suggest", "--documents", "4096"
    plan_pod.main([*config, *options, f"--output={output}"])
    rows = json.loads(output.read_text())
    assert {np.prod(list(row["mesh"].values())) for row in rows} == {8}
    found = suggestions(read_config(config), 8, H200, (4096,))
    what = {"topology": "h200:1x8", "documents": [4096], "rows": 8}
    what["context"] = read_config(config).data.context_tokens
    assert rows == [what | one.row() for one in found]
    answered, _, planned, _, first, *_ = capsys.readouterr().out.splitlines()
    assert answered.startswith("fits: ") and " of 131 GiB; " in answered
    assert planned.endswith(
        f"8 x {what['context']:,} tokens, 8 x NVIDIA H200 (h200:1x8)"
    )
    printed = first.split()[: len(MESH_AXES)]
    assert [*map(int, printed)] == [rows[0]["mesh"].get(axis, 1) for axis in MESH_AXES]
    assert {one.route for one in found} == {
        "no ring",
        "0/1 steps",
        "0/3 steps",
        "0/7 steps",
    }
