"""The Pallas TPU kernels, interpreted, against the reference: values and gradients."""

import bisect
import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from kernels import layouts as layout
from kernels import ring
from kernels.backends import Backend
from kernels.block_sizes import BlockSizes
from kernels.cases import FLOAT32_TOLERANCE, Answer
from kernels.masks import Visible
from kernels.one_device import attention
from kernels.tile_layout import Tiling
from kernels.tpu import launch as pallas_tpu
from kernels.tpu.backward_dq import STREAMED
from kernels.tpu.bounds import RowBounds
from kernels.tpu.cut import Cut
from kernels.tpu.launch import Launch
from tests.simulated_tpu import CHIP, SMALL_VMEM, SimulatedTpu
from tests.steps import (
    Step,
    StepCase,
    answer,
    assert_true,
    compiled,
    compiled_backward,
    run,
    truth,
)

# Each group, head size and odd length, with a carry and without, in a few programs.
FLOAT32_CASES = {
    "one query, scale of zero": StepCase(1, 300, group=1, kv_heads=2, scale=0.0),
    "one key": StepCase(270, 1, group=2, head_dim=100, bound_rows=2, has_carry=True),
    "far more keys": StepCase(
        130, 1100, group=3, head_dim=128, bound_rows=2, sizes=BlockSizes(128, 256)
    ),
    "far more queries": StepCase(
        1100, 130, group=4, head_dim=256, batch=1, has_carry=True, scale=-0.1
    ),
    "many heads": StepCase(77, 700, group=16, bound_rows=2, has_carry=True),
}


def on_chip(version: pltpu.ChipVersion) -> SimulatedTpu:
    """Cut as is best for that chip."""
    chip = pltpu.get_tpu_info_for_chip(version, 1)
    return SimulatedTpu(Launch(chip, interpret=True))


@pytest.mark.parametrize("name", FLOAT32_CASES)
def test_step_in_float32_equals_the_reference_in_float64(name, rng):
    assert_true(rng, SimulatedTpu(), FLOAT32_CASES[name], jnp.float32)


def test_step_in_bfloat16_is_as_exact_as_the_reference_in_bfloat16(rng):
    case = StepCase(200, 500, group=8, head_dim=100, bound_rows=2, has_carry=True)
    assert_true(rng, SimulatedTpu(), case, jnp.bfloat16)


def test_v3_is_as_exact(rng):
    """It multiplies in float32 only, and its rows are padded to 256 numbers."""
    case = StepCase(300, 1100, group=4, batch=1, has_carry=True)
    assert_true(rng, on_chip(pltpu.ChipVersion.TPU_V3), case, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("version", list(pltpu.ChipVersion)[1:])
def test_step_cut_for_any_chip_equals_the_reference(version, rng):
    case = StepCase(1500, 2500, group=2, head_dim=128, bound_rows=2, has_carry=True)
    assert_true(rng, on_chip(version), case, jnp.float32)
    assert_true(rng, on_chip(version), case, jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("bound_rows", [1, 2])
def test_step_of_any_shape_equals_the_reference(bound_rows, head_dim, group, rng):
    case = StepCase.of_any_length(rng, 1024, group, head_dim, bound_rows)
    assert_true(rng, SimulatedTpu(), case, jnp.float32)
    assert_true(rng, SimulatedTpu(), case, jnp.bfloat16)


GAPS = StepCase(768, 1200, group=1, batch=1)
GAPS_PROGRAM = compiled(SimulatedTpu(), GAPS.scale)


def step_of_sub_blocks(rng: np.random.Generator, *bounds: tuple[int, int]) -> Step:
    """Each 128 rows see what they are told."""
    start, stop = np.repeat(np.array(bounds, np.int32), 128, axis=0).T[:, None]
    return GAPS.draw(rng)._replace(start=start, stop=stop)


def results_with_gaps(step: Step) -> Answer:
    return answer(GAPS_PROGRAM(step.astype(jnp.float32)), step)


def test_keys_that_no_sub_block_sees_and_rows_that_see_nothing_are_never_computed(rng):
    """They are nan, and 0 · nan is nan: nothing of them may be multiplied.

    Keys: granules 0, 2, 3, 8 and 9, of which 2 and 3 are a whole tile between others.
    Queries: a tile that sees nothing.
    """
    seen = (130, 250), (512, 640), (640, 1024), *[(1024, 1024)] * 2, (1200, 1024)
    step = step_of_sub_blocks(rng, *seen)
    want = truth(GAPS, step)
    unseen = np.isin(np.arange(GAPS.keys) // 128, (0, 2, 3, 8, 9))
    step.k[:, unseen] = step.v[:, unseen] = np.nan
    step.q[:, 512:] = step.d_out[:, 512:] = np.nan
    got = results_with_gaps(step)
    assert max(got.errors(want).values()) <= FLOAT32_TOLERANCE
    for gradient in got.dk, got.dv:
        np.testing.assert_array_equal(gradient[:, unseen], 0)
    for x in got.out, got.dq:
        np.testing.assert_array_equal(x[:, 384:], 0)
    np.testing.assert_array_equal(got.lse[..., 384:], -np.inf)


@pytest.mark.parametrize("slot, first_row, last_row", [(100, 0, 256), (600, 256, 768)])
def test_nan_shows_in_every_row_that_sees_it_and_in_no_other(
    slot, first_row, last_row, rng
):
    """Where a tile is full, too: no limit catches a sum that is nan."""
    step = step_of_sub_blocks(
        rng, *[(0, 512)] * 2, *[(256, 768)] * 2, *[(512, 1200)] * 2
    )
    want = results_with_gaps(step)
    step.k[:, slot] = np.nan
    got = results_with_gaps(step)
    reached = np.zeros(GAPS.queries, bool)
    reached[first_row:last_row] = True
    for name, axis in (("out", 1), ("lse", 2), ("dq", 1)):
        rows, clean = (np.moveaxis(getattr(x, name), axis, 0) for x in (got, want))
        is_nan = np.isnan(rows).reshape(len(rows), -1).any(axis=1)
        np.testing.assert_array_equal(is_nan, reached)
        np.testing.assert_array_equal(rows[~reached], clean[~reached])


HEAD = StepCase(1792, 300, group=1, batch=1)  # 7 query tiles, of 256 x 128 with padding
DQ_TILE = 256 * 128 * 4


def traced(case: StepCase, backend: Backend, dtype: jnp.dtype = jnp.float32) -> None:
    """Refuses what the launcher refuses; computes nothing."""
    step = case.draw(np.random.default_rng(0)).astype(dtype)
    jax.eval_shape(lambda: run(backend, case.scale, case.sizes, step))


@pytest.fixture
def launches(monkeypatch) -> list[dict]:
    """What `pallas_call` is told, in place of calling it."""
    found = []

    def pallas_call(kernel, *, out_shape, **options):
        found.append(options)
        return lambda *operands: jax.tree.map(jnp.zeros_like, out_shape)

    monkeypatch.setattr(pl, "pallas_call", pallas_call)
    return found


def dq_tiles(launches: list[dict], capacity: int) -> int:
    """Tiles of dq in a vector memory of so many bytes; 0: nothing fits."""
    backend = SimulatedTpu().with_vmem(capacity)
    x = jnp.zeros((1, HEAD.queries, 1, 128))
    k, row = jnp.zeros((1, HEAD.keys, 1, 128)), jnp.zeros((1, 1, HEAD.queries))
    bound = jnp.zeros((1, HEAD.queries), jnp.int32)
    given = x, k, k, x, row, row, bound, bound
    try:
        jax.eval_shape(lambda: backend.backward(*given, scale=0.1, dq=x))
    except ValueError:
        return 0
    scratch = jax.tree.leaves(launches[-1]["grid_spec"].scratch_shapes)
    (found,) = {x.shape[0] for x in scratch if x.shape[1:] == (256, 128)} - {2}
    return found


def test_dq_stays_in_vmem_if_it_takes_at_most_half_of_what_the_rest_leaves(launches):
    """The rest is what the smallest memory holds beside the buffers of a moving dq."""
    smallest = bisect.bisect_left(
        range(CHIP.vmem_capacity_bytes), True, key=lambda c: dq_tiles(launches, c) > 0
    )
    assert dq_tiles(launches, smallest) == STREAMED
    rest = smallest * 7 // 8 - STREAMED * DQ_TILE
    enough = -(-(rest + 2 * 7 * DQ_TILE) * 8 // 7)
    assert dq_tiles(launches, enough) == 7
    assert dq_tiles(launches, enough - 2) == STREAMED
    assert dq_tiles(launches, CHIP.vmem_capacity_bytes) == 7
    assert dq_tiles(launches, SMALL_VMEM) == STREAMED


def test_gradients_are_equal_wherever_dq_stays(rng):
    step = HEAD.draw(rng).astype(jnp.float32)
    in_vmem, in_hbm = (
        compiled_backward(SimulatedTpu().with_vmem(capacity), HEAD.scale)(step)
        for capacity in (CHIP.vmem_capacity_bytes, SMALL_VMEM)
    )
    for resident, streamed in zip(in_vmem, in_hbm, strict=True):
        np.testing.assert_array_equal(resident, streamed)


@pytest.mark.parametrize(
    "dtype, words",
    [
        (jnp.float16, "bfloat16 or float32, got float16: cast"),
        (jnp.float64, "bfloat16 or float32, got float64: cast"),
        (jnp.int32, "bfloat16 or float32, got int32: cast"),
    ],
)
def test_types_that_tpus_do_not_multiply_are_refused(dtype, words, launches):
    with jax.enable_x64(True):
        x, row = jnp.zeros((1, 8, 1, 64), dtype), jnp.zeros((1, 1, 8), jnp.float32)
        bound, wide = jnp.zeros((1, 8), jnp.int32), jnp.zeros(x.shape, jnp.float32)
        with pytest.raises(ValueError, match=words):
            SimulatedTpu().forward(x, x, x, bound, bound, scale=0.1)
        given = x, x, x, x, row, row, bound, bound
        with pytest.raises(ValueError, match=words):
            SimulatedTpu().backward(*given, scale=0.1, dq=wide)
    assert not launches


@pytest.mark.parametrize(
    "group, sizes, words",
    [
        (1, (100, 256), "block_q must be a multiple of 128 and block_k of 128"),
        (8, (8, 256), "8 query heads.*block_q must be a multiple of 16"),
        (16, (8, 256), "16 query heads.*block_q must be a multiple of 16"),
        (3, (64, 256), "3 query heads.*block_q must be a multiple of 128"),
        (1, (128, 200), r"block_k=200\).*block_k of 128"),
    ],
)
def test_sizes_that_do_not_fill_registers_are_refused(group, sizes, words, launches):
    case = StepCase(300, 300, group=group, sizes=BlockSizes(*sizes))
    with pytest.raises(ValueError, match=words):
        traced(case, SimulatedTpu())
    assert not launches


def test_sizes_that_do_not_fill_registers_of_a_v3_are_refused(launches):
    case = StepCase(300, 300, sizes=BlockSizes(256, 128))
    with pytest.raises(ValueError, match="block_q .* of 128 and block_k of 256"):
        traced(case, on_chip(pltpu.ChipVersion.TPU_V3))
    assert not launches


def cuts(chip: pltpu.TpuInfo, q: jax.Array, k: jax.Array) -> tuple[Cut, Cut]:
    """As they are chosen, forward after a first hop and backward."""
    forward = pallas_tpu.cut_forward(chip, q, k, has_carry=True)
    return forward, pallas_tpu.cut_backward(chip, q, k)[0]


@pytest.mark.parametrize("version", ["v3", "v4", "v5e", "v5p", "v6e"])
def test_there_are_tiles_that_fit_for_all_groups_on_every_chip(version):
    """Of up to 72 heads, all of which are in some stack."""
    chip = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(version), 1)
    sizes = itertools.product((jnp.bfloat16, jnp.float32), (128, 256), range(1, 73))
    for dtype, head_dim, group in sizes:
        q = jax.ShapeDtypeStruct((1, 8192, group, head_dim), dtype)
        k = jax.ShapeDtypeStruct((1, 8192, 1, head_dim), dtype)
        for cut in cuts(chip, q, k):
            assert cut.heads * cut.stacks == group
            assert cut.blocks.stacked_rows == cut.heads * cut.sizes.block_q


@pytest.mark.parametrize(
    "version, dtype, heads, kv_heads, head_dim",
    [
        *[("v3", jnp.bfloat16, n, 1, 128) for n in (5, 7, 9, 10, 14, 71)],
        ("v3", jnp.bfloat16, 28, 4, 128),
        ("v4", jnp.bfloat16, 71, 1, 128),
        ("v4", jnp.float32, 9, 1, 256),
    ],
)
def test_groups_of_any_size_are_launched(
    version, dtype, heads, kv_heads, head_dim, launches
):
    group = heads // kv_heads
    case = StepCase(128, 256, group, head_dim, kv_heads, batch=1, has_carry=True)
    traced(case, on_chip(pltpu.ChipVersion(version)), dtype)
    assert [launch["name"] for launch in launches] == [
        "flash_forward",
        "flash_backward",
    ]


@pytest.mark.slow
def test_heads_that_are_not_stacked_see_the_keys_that_they_share(rng):
    """Vector memory holds the rows of one head of five: keys are read five times."""
    chip = dataclasses.replace(CHIP, vmem_capacity_bytes=5 * 2**19)
    backend = SimulatedTpu(Launch(chip, interpret=True))
    case = StepCase(60, 90, group=5, kv_heads=2, batch=1, has_carry=True)
    step = case.draw(rng).astype(jnp.float32)
    assert [cut[:2] for cut in cuts(chip, step.q, step.k)] == [(1, 5), (1, 5)]
    assert_true(rng, backend, case, jnp.float32)


def test_heads_too_wide_for_any_tiles_are_not_implemented(launches):
    """What is said names nothing that callers of `attention` do not have."""
    case = StepCase(300, 300, head_dim=4096, batch=1)
    words = "smallest tiles of heads of 4096 numbers in float32 take .* on TPU v4; use"
    with pytest.raises(NotImplementedError, match=words) as caught:
        traced(case, on_chip(pltpu.ChipVersion.TPU_V4))
    assert "block_" not in str(caught.value) and not launches


def test_more_tiles_than_scalar_memory_holds_are_not_implemented(launches):
    words = r"bounds of all tiles take 16\.0 KiB, more than the 15\.0 KiB .* TPU v3: sh"
    x = jax.ShapeDtypeStruct((1, 2**18, 1, 128), jnp.bfloat16)
    bound = jax.ShapeDtypeStruct((1, 2**18), jnp.int32)
    backend = on_chip(pltpu.ChipVersion.TPU_V3)
    forward = functools.partial(backend.forward, scale=0.1)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(forward, x, x, x, bound, bound)
    assert not launches


def test_bounds_of_more_than_16_million_slots_are_exact():
    """Float32 has no odd numbers from there on."""
    q, k = (jax.ShapeDtypeStruct((1, n, 1, 128), jnp.float32) for n in (128, 2**27))
    numbers = np.random.default_rng(19).integers(0, k.shape[1] + 1, (2, 1, 128))
    bounds = np.sort(numbers).astype(np.int32)
    tiling = Tiling.of(q, k, bounds[0], BlockSizes(128, 128))
    rows = pallas_tpu._row_bounds(tiling, *map(jnp.asarray, bounds))[0, 0]

    def kernel(rows, start, stop):
        RowBounds(start, stop).load(rows)

    shape = jax.ShapeDtypeStruct((128, 128), jnp.int32)
    spread = pl.pallas_call(kernel, out_shape=(shape, shape), interpret=True)
    for found, bound in zip(spread(rows), bounds, strict=True):
        np.testing.assert_array_equal(found, np.broadcast_to(bound.T, (128, 128)))


def test_tiles_that_do_not_fit_are_refused_with_what_there_is(launches):
    words = (
        r"MiB do not fit into the 3\.5 MiB .* TPU v5e: make block_q or block_k small"
    )
    case = StepCase(2048, 2048, sizes=BlockSizes(1024, 1024))
    with pytest.raises(ValueError, match=words):
        traced(case, SimulatedTpu().with_vmem(2**22))
    assert not launches


@pytest.mark.parametrize("shapes", [[(1, 7)] * 2, [(3, 8)] * 2, [(1, 8), (2, 8)]])
def test_intervals_of_another_shape_are_refused_at_both_doors(shapes, launches):
    x = jnp.zeros((2, 8, 4, 64))
    visible = Visible(*(jnp.zeros(shape, jnp.int32) for shape in shapes))
    words = re.escape(f"k_start.shape={shapes[0]} and k_end.shape={shapes[1]}")
    on_ring = ring.make_ring_attention(
        Mesh(np.array(jax.devices()[:2]), ("ring",)),
        layout=layout.Striped(),
        implementation="pallas_tpu",
    )
    with pytest.raises(ValueError, match=words):
        attention(x, x, x, visible=visible, implementation="pallas_tpu")
    with pytest.raises(ValueError, match=words):
        on_ring(x, x, x, visible)
    assert not launches


def test_without_a_tpu_it_is_not_implemented(rng):
    """The module that users get: tests get it interpreted."""
    words = "needs a TPU.*name another"
    step = StepCase(8, 8).draw(rng).astype(jnp.float32)
    with pytest.raises(NotImplementedError, match=words):
        compiled(pallas_tpu, 0.1)(step)
    with pytest.raises(NotImplementedError, match=words):
        compiled_backward(pallas_tpu, 0.1)(step)


def test_cost_counts_the_products_of_all_queries_with_all_keys(launches):
    case = StepCase(257, 700, group=4, head_dim=100, kv_heads=2)
    traced(case, SimulatedTpu())
    scores = 2 * 8 * 257 * 700
    costs = {launch["name"]: launch["cost_estimate"] for launch in launches}
    flops = {name: cost.flops for name, cost in costs.items()}
    assert flops == {
        "flash_forward": 2 * 2 * scores * 100,
        "flash_backward": 5 * 2 * scores * 100,
    }
    for cost in costs.values():
        assert cost.transcendentals == scores
        assert cost.bytes_accessed >= 4 * 2 * 100 * (8 * 257 + 2 * 2 * 700)
