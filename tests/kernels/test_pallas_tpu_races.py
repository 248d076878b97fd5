"""DMA of the Pallas TPU kernels: of live tiles only, without races or missing waits.

Pallas simulates a TPU's memory here. Its copies happen as late as they may ("on_wait")
or as early ("eager"), buffers hold nan until they are written, and reads and writes
without an order between them are reported.
"""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.backends.tpu import backward_dq, dma
from kernels.backends.tpu.backward_dq import Resident, Streamed
from kernels.backends.tpu.dma import DoubleBuffer, start_all
from kernels.backends.tpu.launch import Launch
from tests.cases.attention import FLOAT32_TOLERANCE
from tests.support.simulated_tpu import CHIP, SMALL_BLOCKS, SMALL_VMEM, V6E, with_vmem
from tests.support.steps import (
    Step,
    StepCase,
    answer,
    compiled,
    run_backward,
    run_forward,
    shared,
    truth,
)

# Four query tiles and three key tiles of two heads: every buffer is used again. Later,
# each tile has the rows of two query heads, which are copied one by one.
FIRST_STEP = StepCase(1024, 768, group=1, kv_heads=2, batch=1)
LATER_STEP = dataclasses.replace(FIRST_STEP, queries=512, group=2, has_carry=True)


RING_STEP = StepCase(1024, 1024, group=1, kv_heads=2, batch=1)
INDEX = np.arange(1024, dtype=np.int32)[None]
NONE, ALL = np.zeros_like(INDEX), np.full_like(INDEX, 1024)
BOUNDS = {
    "own shard": (NONE, INDEX + 1),
    "striped, from a later shard": (NONE, INDEX),
    "wide stripes, from a later shard": (NONE, INDEX // 128 * 128),
    "from an earlier shard": (NONE, ALL),
    "from a later shard": (NONE, NONE),
    "window": (np.maximum(INDEX - 299, 0), INDEX + 1),
    "documents": (INDEX // 300 * 300, INDEX + 1),
    "documents of a tile": (INDEX // 256 * 256, INDEX + 1),
    "rows without keys, keys without rows": (
        np.where(INDEX < 512, INDEX // 4, 512),
        np.where(INDEX < 768, np.minimum(256, INDEX), INDEX + 1),
    ),
}


def simulated(copies: str, vmem: int, chip: pltpu.TpuInfo = CHIP) -> Launch:
    memory = pltpu.InterpretParams(
        detect_races=True,
        # Copies with a clock of their own. By default all copies share one: no races.
        vector_clock_size=1024,
        uninitialized_memory="nan",
        dma_execution_mode=copies,
    )
    chip = dataclasses.replace(chip, vmem_capacity_bytes=vmem)
    # Tiles are copied whole: fewer sub-tiles are less to simulate.
    sizes = {"rows": 256, "exact_rows": 256, "live_columns": 256}
    blocks = dataclasses.replace(SMALL_BLOCKS, **sizes, ahead=0, behind=0)
    return Launch(chip, blocks, memory)


def bounded(step: Step, name: str) -> Step:
    k_start, k_end = BOUNDS[name]
    return step._replace(k_start=k_start, k_end=k_end)


IN_VMEM, IN_HBM = CHIP.vmem_capacity_bytes, SMALL_VMEM
"""Vector memory where a head's dq fits, or does not."""


def each_step():
    """Case, memory, chip, copies, and a name of BOUNDS or none, most in slow tests.

    Each name in one of the memories; on a v6e dq's rows lie along the lanes.
    """
    memories, ways = (IN_VMEM, IN_HBM), ("eager", "on_wait")
    steps = (FIRST_STEP, IN_VMEM), (LATER_STEP, IN_HBM)
    for (case, vmem), chip, copies in itertools.product(steps, (CHIP, V6E), ways):
        is_slow = (case, chip, copies) != (LATER_STEP, V6E, "on_wait")
        yield is_slow, (case, vmem, chip, copies, None)
    for copies, (number, name) in itertools.product(ways, enumerate(BOUNDS)):
        for vmem in memories:
            is_slow = copies != "eager" or vmem != memories[number % 2]
            yield is_slow, (RING_STEP, vmem, CHIP, copies, name)


EACH_STEP = [
    pytest.param(*step, marks=[pytest.mark.slow] * is_slow)
    for is_slow, step in each_step()
]


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("case, vmem, chip, copies, name", EACH_STEP)
def test_no_copy_races_or_comes_too_late(case, vmem, chip, copies, name, capfd, rng):
    step, backend = case.draw(rng), simulated(copies, vmem, chip)
    step = step if name is None else bounded(step, name)
    results = shared(backend, case.scale)(step.astype(jnp.float32))
    found = answer(jax.block_until_ready(results), step)
    errors = found.errors(truth(case, step))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors
    assert "RACE DETECTED" not in capfd.readouterr().out


def buffers(self: DoubleBuffer, tile: jax.Array, slot: jax.Array) -> tuple:
    return tuple(buffer.at[slot] for buffer in self.buffers)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "run, owner, method, broken, vmem",
    [
        # Forward, where programs start the copies of the next ones.
        (run_forward, DoubleBuffer, "wait", buffers, IN_VMEM),
        (run_backward, DoubleBuffer, "wait", buffers, IN_HBM),
        (run_backward, Resident, "wait", lambda dq, i, n: dq.buffer.at[i], IN_VMEM),
        (run_backward, Resident, "end", lambda *_: None, IN_VMEM),
        (
            *(run_backward, Streamed, "wait"),
            *(lambda dq, i, n: dq.buffer.at[n % backward_dq.STREAMED], IN_HBM),
        ),
        # Into a buffer whose tile may be on its way out.
        (
            *(run_backward, Streamed, "prefetch"),
            *(lambda dq, i, n, is_first: start_all(dq._incoming(i, n)), IN_HBM),
        ),
        (run_backward, Streamed, "end", lambda *_: None, IN_HBM),
        # Reads tiles that the key tile before has not written yet.
        (run_backward, Streamed, "chains", staticmethod(Resident.chains), IN_HBM),
    ],
)
def test_copies_that_nobody_waits_for_are_reported(
    run, owner, method, broken, vmem, monkeypatch, capfd, rng
):
    """Shows that the test above can fail."""
    monkeypatch.setattr(owner, method, broken)
    program = compiled(simulated("eager", vmem), RING_STEP.scale, run=run)
    step = bounded(RING_STEP.draw(rng), "own shard")
    jax.block_until_ready(program(step.astype(jnp.float32)))
    assert "RACE DETECTED" in capfd.readouterr().out


@pytest.fixture(scope="module", params=[IN_VMEM, IN_HBM], ids=["VMEM", "HBM"])
def copied_tiles(request):
    """Returns step -> how many tiles were copied, by arrays, and where dq is."""
    counts = collections.Counter()

    def start_all(copies: list) -> None:
        jax.debug.callback(lambda: counts.update([len(copies)]))
        for copy in copies:
            copy.start()

    with pytest.MonkeyPatch.context() as patch:
        for module in dma, backward_dq:
            patch.setattr(module, "start_all", start_all)
        program = (
            compiled(with_vmem(request.param), RING_STEP.scale)
            .lower(RING_STEP.draw(np.random.default_rng(0)).astype(jnp.float32))
            .compile()
        )

    def run(step: Step) -> collections.Counter[int]:
        counts.clear()
        jax.block_until_ready(program(step.astype(jnp.float32)))
        jax.effects_barrier()
        return counts

    return run, request.param == IN_VMEM


@pytest.mark.thorough
@pytest.mark.parametrize("name", BOUNDS)
def test_a_tile_is_copied_once_for_each_live_tile_and_no_other(name, copied_tiles, rng):
    """But a tile of dq in VMEM once in a head, if it is live at all."""
    start, stop = BOUNDS[name]
    visible = (start[0, :, None] <= INDEX) & (INDEX < stop[0, :, None])
    live = visible.reshape(4, 256, 4, 256).any(axis=(1, 3))  # (query tiles, key tiles)
    run, is_resident = copied_tiles
    dq = live.any(1) if is_resident else live
    # Keys and values forward, four arrays of queries backward, and dq in and out.
    tiles = {2: live.sum(), 4: live.sum(), 1: 2 * dq.sum()}
    expected = {arrays: 2 * number for arrays, number in tiles.items() if number}
    assert run(bounded(RING_STEP.draw(rng), name)) == expected
