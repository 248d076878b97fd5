"""What only the Pallas TPU kernels have: chips, vector memory, stacked heads, costs.

What all backends have is in `test_backends`.
"""

import bisect
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.backends.tile_layout import BlockSizes
from kernels.backends.tile_ranges import key_ranges
from kernels.backends.tpu import launch as pallas_tpu
from kernels.backends.tpu.backward_dq import STREAMED
from kernels.backends.tpu.backward_tile import BackwardTile
from kernels.backends.tpu.block_sizes import TPU_FORWARD, TPU_RECORDS, Cut, TpuBlocks
from kernels.backends.tpu.bounds import Diagonals, RowBounds
from kernels.backends.tpu.launch import Launch
from kernels.backends.tpu.vector import UPRIGHT
from kernels.layouts import Striped
from kernels.masks import Visible, causal
from kernels.precision import Scores
from tests.cases.attention import FLOAT32_TOLERANCE
from tests.support.simulated_tpu import (
    CHIP,
    SIMULATED_TPU,
    SMALL_BLOCKS,
    SMALL_VMEM,
    V6E,
    on_chip,
    with_vmem,
)
from tests.support.steps import StepCase, answer, assert_true, compiled, run, truth


@pytest.mark.thorough
@pytest.mark.parametrize(
    "version, sizes, dtype",
    [
        # A v3 multiplies in float32 only; its rows are padded to 256 numbers.
        (pltpu.ChipVersion.TPU_V3, (150, 600, 2), jnp.bfloat16),
        (pltpu.ChipVersion.TPU_8T, (150, 600, 2), jnp.float32),
        *(
            pytest.param(version, (1500, 2500, 2, 128), dtype, marks=pytest.mark.slow)
            for version in list(pltpu.ChipVersion)[1:]
            for dtype in (jnp.float32, jnp.bfloat16)
        ),
    ],
)
def test_step_cut_for_any_chip_equals_the_reference(version, sizes, dtype, rng):
    case = StepCase(*sizes, bound_rows=2, has_carry=True)
    assert_true(rng, on_chip(version), case, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scale",
    [-0.5, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.0, -1e-42)), 2.0**40],
)
def test_capped_step_equals_the_reference_with_the_tanh_of_a_chip(scale, rng):
    """Of a v6e; without, as on a v5e, where scores are so large that exp overflows."""
    chip = CHIP if scale > 1 else V6E
    case = StepCase(200, 300, has_carry=True, scale=scale, soft_cap=1.5)
    smallest = 0.0
    while smallest < 1e-5:  # float32 would round the sign of a score
        seed = int(rng.integers(2**32))
        step = case.draw(np.random.default_rng(seed))
        q = step.q.reshape(2, case.queries, case.kv_heads, case.group, -1)
        smallest = np.abs(np.einsum("btkgd,bskd->bkgts", q, step.k)).min()
    backend = Launch(chip, SMALL_BLOCKS, True)
    assert_true(np.random.default_rng(seed), backend, case, jnp.float32)


HEAD = StepCase(1792, 300, group=1, batch=1)  # 7 query tiles, of 256 x 128 with padding
DQ_TILE = 256 * 128 * 4


def cut_of(capacity: int, case: StepCase = HEAD) -> Cut | None:
    """The backward's cut in a vector memory of that size; None: nothing fits."""
    step = case.abstract(jnp.float32)
    try:
        chip = with_vmem(capacity).chip
        return pallas_tpu.cut_backward(chip, step.q, step.k, SMALL_BLOCKS)
    except ValueError:
        return None


def is_resident(capacity: int) -> bool | None:
    """Whether dq stays there."""
    cut = cut_of(capacity)
    return cut and cut.is_dq_resident


def test_dq_stays_in_vmem_if_it_takes_at_most_half_of_what_the_rest_leaves():
    """The rest is what the smallest memory holds beside the buffers of a moving dq."""
    smallest = bisect.bisect_left(
        range(CHIP.vmem_capacity_bytes), True, key=lambda c: is_resident(c) is not None
    )
    assert is_resident(smallest) is False
    rest = smallest * 7 // 8 - STREAMED * DQ_TILE
    enough = -(-(rest + 2 * 7 * DQ_TILE) * 8 // 7)
    assert is_resident(enough) and is_resident(CHIP.vmem_capacity_bytes)
    assert not is_resident(enough - 2) and not is_resident(SMALL_VMEM)


def test_dk_and_dv_come_in_where_their_blocks_fit_besides():
    """Both double-buffered, beside what the compiler takes."""
    case = dataclasses.replace(HEAD, queries=2**16)  # dq of a head does not stay
    smallest = bisect.bisect_left(
        range(CHIP.vmem_capacity_bytes), True, key=lambda c: cut_of(c, case) is not None
    )
    sums = 2 * 2 * 256 * 128 * 4
    compiler = 4 * 2**18
    enough = smallest + (sums + compiler) * 8 // 7
    assert not cut_of(enough - 2**10, case).adds_to_dkv
    assert cut_of(enough + 2**10, case).adds_to_dkv


def cuts(chip: pltpu.TpuInfo, q: jax.Array, k: jax.Array) -> tuple[Cut, Cut]:
    """As they are chosen, forward after a first ring step and backward."""
    return pallas_tpu.cut_forward(chip, q, k), pallas_tpu.cut_backward(chip, q, k)


@pytest.mark.parametrize("version", ["v3", "v4", "v5e", "v5p", "v6e", "7x", "8t"])
def test_there_are_tiles_that_fit_for_all_groups_on_every_chip(version):
    """Of up to 72 heads, all of which are in some stack."""
    chip = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(version), 1)
    sizes = itertools.product((jnp.bfloat16, jnp.float32), (128, 256), range(1, 73))
    for dtype, head_dim, group in sizes:
        q = jax.ShapeDtypeStruct((1, 8192, group, head_dim), dtype)
        k = jax.ShapeDtypeStruct((1, 8192, 1, head_dim), dtype)
        for cut in cuts(chip, q, k):
            assert cut.heads * cut.stacks == group
            # Each stack has sums of its own: they cannot begin with those of all.
            assert cut.stacks == 1 or not cut.adds_to_dkv
            assert cut.blocks.stacked_rows == cut.heads * cut.sizes.block_q
            assert cut.orientation.sublanes == chip.num_sublanes
            assert cut.sizes.block_q % (2 * chip.num_sublanes) == 0


@pytest.mark.parametrize("kernel", ["forward", "backward"])
@pytest.mark.parametrize(
    "field, other", [*enumerate(["forward_2", True, "v6e", 64, "float32"])]
)
def test_blocks_that_a_chip_has_run_win_over_the_table(
    kernel, field, other, monkeypatch
):
    """Those of the same kernel, cap, chip, head size and type, and no others."""
    q = jax.ShapeDtypeStruct((1, 8192, 1, 128), jnp.bfloat16)
    cut = {"forward": pallas_tpu.cut_forward, "backward": pallas_tpu.cut_backward}
    record = TpuBlocks(512, 512, 256, 128, 1, 1), 0.5
    key = [kernel, False, "v5e", 128, "bfloat16"]
    by_table = cut[kernel](CHIP, q, q)
    monkeypatch.setitem(TPU_RECORDS, (*key[:field], other, *key[field + 1 :]), record)
    assert cut[kernel](CHIP, q, q) == by_table
    monkeypatch.setitem(TPU_RECORDS, tuple(key), record)
    assert cut[kernel](CHIP, q, q).sizes == BlockSizes(512, 512)


@pytest.mark.quick
def test_gradients_of_repeated_heads_are_summed_over_their_stacks(rng):
    x = jnp.float32(rng.integers(-9, 9, (2, 5, 3, 4)))  # sums are exact
    cut = Cut(2, 6, *[None] * 3)
    np.testing.assert_array_equal(cut.sum_heads(cut.repeat_heads(x)), 6 * x)


@pytest.mark.slow
def test_heads_that_are_not_stacked_see_the_keys_that_they_share(rng):
    """Vector memory holds the rows of one head of five: keys are read five times."""
    chip = dataclasses.replace(CHIP, vmem_capacity_bytes=5 * 2**19)
    backend = Launch(chip, interpret=True)
    case = StepCase(60, 90, group=5, kv_heads=2, batch=1, has_carry=True)
    step = case.draw(rng).astype(jnp.float32)
    assert [cut[:2] for cut in cuts(chip, step.q, step.k)] == [(1, 5), (1, 5)]
    assert_true(rng, backend, case, jnp.float32)


@pytest.mark.quick
def test_bounds_of_more_than_16_million_slots_are_exact():
    """Float32 has no odd numbers from there on."""
    numbers = np.random.default_rng(19).integers(0, 2**27 + 1, (2, 256))
    rows = np.sort(numbers).astype(np.int32)
    stacked_heads = 2

    def kernel(rows, start, stop):
        RowBounds(start, stop).load(rows, UPRIGHT)

    shape = jax.ShapeDtypeStruct((stacked_heads * 256, 128), jnp.int32)
    spread = pl.pallas_call(kernel, out_shape=(shape, shape), interpret=True)
    for loaded, bound in zip(spread(rows), rows, strict=True):
        column = np.tile(bound, stacked_heads)[:, None]
        np.testing.assert_array_equal(loaded, np.broadcast_to(column, (512, 128)))


@pytest.mark.parametrize("group, heads", [(1, 1), (4, 1), (5, 1), (8, 1), (16, 2)])
@pytest.mark.parametrize("chip", [CHIP, V6E], ids=["v5e", "v6e"])
def test_tables_of_bounds_have_rows_of_as_few_heads_as_fill_lanes(group, heads, chip):
    """A device holds those of all ring steps, 8 bytes a token of the global row."""
    q = jax.ShapeDtypeStruct((1, 8192, group, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8192, 1, 128), jnp.bfloat16)
    bound = jax.ShapeDtypeStruct((1, 8192), jnp.int32)

    def prepare(q, k, bound):
        steps = Launch(chip).forward_steps(q, k, Visible(bound, bound), Scores(1.0))
        return steps.prepare(bound, bound).bounds

    table = jax.eval_shape(prepare, q, k, bound)
    assert table.size * 4 == heads * 8 * 8192


def test_cost_counts_the_products_of_all_queries_with_all_keys(monkeypatch):
    launches = []

    def pallas_call(kernel, *, out_shape, **options):
        launches.append(options)
        return lambda *operands: jax.tree.map(jnp.zeros_like, out_shape)

    monkeypatch.setattr(pl, "pallas_call", pallas_call)
    case = StepCase(257, 700, group=4, head_dim=100, kv_heads=2)
    program = functools.partial(run, SIMULATED_TPU, case.scale, case.sizes)
    jax.eval_shape(program, case.abstract(jnp.float32))
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


@pytest.mark.thorough
def test_step_is_exact_where_scalar_memory_does_not_hold_the_diagonals(rng):
    """Nine numbers of four query tiles take 144 bytes; without these, 128."""
    chip = dataclasses.replace(CHIP, smem_capacity_bytes=2**11 + 140)
    case = StepCase(512, 512, group=2, batch=1, has_carry=True)
    assert_true(rng, Launch(chip, SMALL_BLOCKS, True), case, jnp.float32)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "group, chip",
    [
        (1, V6E),
        *(pytest.param(*it, marks=pytest.mark.slow) for it in ((1, CHIP), (2, V6E))),
        (4, CHIP),
    ],
)
def test_causal_gradients_are_exact_and_need_no_partial_tiles(
    group, chip, monkeypatch, rng
):
    """Of the own keys and of visiting ones, in stripes of one token or a granule.

    In wide stripes of a later shard, the first rows of a tile see nothing of its last
    key tile: there is no code for that.
    """
    partial = []
    add_partial = BackwardTile._add_partial

    def counted(tile: BackwardTile) -> None:
        jax.debug.callback(lambda: partial.append(1))
        add_partial(tile)

    monkeypatch.setattr(BackwardTile, "_add_partial", counted)
    case = StepCase(512, 512, group, kv_heads=2, batch=1, has_carry=True)
    program = compiled(Launch(chip, SMALL_BLOCKS, True), case.scale)
    step, index = case.draw(rng), np.arange(512, dtype=np.int32)[None]
    none, stripe = np.zeros_like(index), index // 128 * 128
    for k_start, k_end, has_partial in (
        (none, index + 1, False),
        (none, index, False),
        (none, np.minimum(index + 2, 512), True),  # a row ends in the next granule
        (none, stripe + 128, False),
        (none, stripe, group == 1),
        (np.where(index < 400, none, 256), stripe + 128, True),  # two documents
        (none, index + (index >= 300), True),
    ):
        step = step._replace(k_start=k_start, k_end=k_end)
        results = jax.block_until_ready(program(step.astype(jnp.float32)))
        errors = answer(results, step).errors(truth(case, step))
        assert max(errors.values()) <= FLOAT32_TOLERANCE, errors
        jax.effects_barrier()
        assert bool(partial) == has_partial
        partial.clear()


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("is_later", [False, True], ids=["earlier", "later"])
@pytest.mark.parametrize("width", [1, 256, 512, 1024])
def test_there_is_code_for_partial_tiles_of_visiting_stripes(width, is_later, group):
    """Forward, but for stripes of 512 where a tile has as many rows of a head.

    Backward, but for tiles whose first rows see nothing. Stripes of 1024 have none.
    """
    length, block_k, block_q = 4096, 1024, 1024 // group
    layout, shard = Striped(width), int(is_later)
    visible = causal()(layout.index(1 - shard, 2, length), 2 * length)
    bounds = [jnp.asarray(layout.count(shard, bound, 2, length)) for bound in visible]
    ranges = key_ranges(*bounds, block_q, block_k)
    rows = [x.reshape(1, -1, block_q) for x in bounds]
    partial = np.asarray(ranges.work() - (ranges.full_end - ranges.full_begin))
    assert partial.any() == (width < 1024) and partial.max() <= 1
    has_forward = width != 512 or group >= 4
    has_backward = has_forward and not (width == 256 and is_later and group < 4)
    known = Diagonals.of(TPU_FORWARD["v5e"], block_q, with_staircases=True)
    first_ends = known.first_ends(ranges, *rows) - ranges.full_end * block_k
    for with_staircases, has_code in (True, has_forward), (False, has_backward):
        known = Diagonals.of(TPU_FORWARD["v5e"], block_q, with_staircases)
        found = known.hold(first_ends)
        np.testing.assert_array_equal(found, has_code * partial)
