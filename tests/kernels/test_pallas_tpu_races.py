"""DMA of the Pallas TPU kernels: of live tiles only, without races or missing waits.

Pallas simulates a TPU's memory here. Its copies happen as late as they may ("on_wait")
or as early ("eager"), buffers hold nan until they are written, and reads and writes
without an order between them are reported.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.cases import FLOAT32_TOLERANCE, Answer
from kernels.tpu.backward_dq import Streamed
from kernels.tpu.dma import DoubleBuffer, start_all
from kernels.tpu.launch import Launch
from tests.simulated_tpu import CHIP, SMALL_BLOCKS, SMALL_VMEM, V6E, SimulatedTpu
from tests.steps import Step, StepCase, answer, compiled, run_backward, truth

# Four query tiles and three key tiles of two heads: every buffer is used again. Later,
# each tile has the rows of two query heads, which are copied one by one.
FIRST_STEP = StepCase(1024, 768, group=1, kv_heads=2, batch=1)
LATER_STEP = dataclasses.replace(FIRST_STEP, queries=512, group=2, has_carry=True)


def simulated(copies: str, vmem: int, chip: pltpu.TpuInfo = CHIP) -> SimulatedTpu:
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
    return SimulatedTpu(Launch(chip, blocks, memory))


def simulate(case: StepCase, step: Step, backend: SimulatedTpu) -> Answer:
    results = compiled(backend, case.scale)(step.astype(jnp.float32))
    return answer(jax.block_until_ready(results), step)


FIRST = FIRST_STEP, CHIP.vmem_capacity_bytes
LATER = LATER_STEP, SMALL_VMEM


@pytest.mark.parametrize(
    "case, vmem, chip, copies",
    [
        pytest.param(*FIRST, CHIP, "eager", id="first ring step, dq in VMEM, eager"),
        pytest.param(*LATER, V6E, "on_wait", id="later, dq in HBM, v6e, on_wait"),
        *(
            pytest.param(*step, chip, copies, marks=pytest.mark.slow)
            for step, chip, copies in (
                (FIRST, CHIP, "on_wait"),
                (FIRST, V6E, "eager"),
                (LATER, V6E, "eager"),
                (LATER, CHIP, "eager"),
                (LATER, CHIP, "on_wait"),
            )
        ),
    ],
)
def test_no_copy_races_or_comes_too_late(case, vmem, chip, copies, capfd, rng):
    """On a v6e with dq's rows along the lanes."""
    step, backend = case.draw(rng), simulated(copies, vmem, chip)
    errors = simulate(case, step, backend).errors(truth(case, step))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors
    assert "RACE DETECTED" not in capfd.readouterr().out


def buffers_without_waiting(self: DoubleBuffer, tile: jax.Array) -> tuple[jax.Ref, ...]:
    return tuple(buffer.at[tile & 1] for buffer in self.buffers)


def prefetch_into_an_outgoing_buffer(
    self: Streamed, i: jax.Array, first: jax.Array
) -> None:
    start_all(self._incoming(i))


def end_without_waiting(self: Streamed, first: jax.Array, end: jax.Array) -> None:
    pass


breaking = pytest.mark.parametrize(
    "owner, method, broken",
    [
        (DoubleBuffer, "wait", buffers_without_waiting),
        (Streamed, "prefetch", prefetch_into_an_outgoing_buffer),
        (Streamed, "end", end_without_waiting),
    ],
)


@breaking
def test_copies_that_nobody_waits_for_are_reported(
    owner, method, broken, monkeypatch, capfd, rng
):
    """Shows that the test above can fail."""
    monkeypatch.setattr(owner, method, broken)
    program = compiled(
        simulated("eager", SMALL_VMEM), FIRST_STEP.scale, run=run_backward
    )
    jax.block_until_ready(program(FIRST_STEP.draw(rng).astype(jnp.float32)))
    assert "RACE DETECTED" in capfd.readouterr().out


@pytest.mark.slow
@breaking
def test_copies_that_nobody_waits_for_come_too_late(
    owner, method, broken, monkeypatch, rng
):
    monkeypatch.setattr(owner, method, broken)
    step = FIRST_STEP.draw(rng)
    got = simulate(FIRST_STEP, step, simulated("on_wait", SMALL_VMEM))
    assert not got.errors(truth(FIRST_STEP, step))["dq"] < 0.1


RING_STEP = StepCase(1024, 1024, group=1, kv_heads=2, batch=1)
INDEX = np.arange(1024, dtype=np.int32)[None]
NONE, ALL = np.zeros_like(INDEX), np.full_like(INDEX, 1024)
BOUNDS = {
    "own shard": (NONE, INDEX + 1),
    "striped, from a later shard": (NONE, INDEX),
    "from an earlier shard": (NONE, ALL),
    "from a later shard": (NONE, NONE),
    "window": (np.maximum(INDEX - 299, 0), INDEX + 1),
    "documents": (INDEX // 300 * 300, INDEX + 1),
}
FORWARD, BACKWARD = 2, 4  # arrays in the kernel's double buffer


@pytest.fixture(scope="module")
def copied_tiles():
    """Returns step -> the tiles that each method was called for, by direction."""
    calls = collections.defaultdict(list)

    def recorded(name: str):
        method = getattr(DoubleBuffer, name)

        def record(self: DoubleBuffer, tile: jax.Array):
            called = calls[name, len(self.sources)]
            jax.debug.callback(lambda tile: called.append(int(tile)), tile)
            return method(self, tile)

        return record

    with pytest.MonkeyPatch.context() as patch:
        for name in "start", "wait":
            patch.setattr(DoubleBuffer, name, recorded(name))
        program = (
            compiled(SimulatedTpu(), RING_STEP.scale)
            .lower(RING_STEP.draw(np.random.default_rng(0)).astype(jnp.float32))
            .compile()
        )

    def run(step: Step) -> dict[tuple[str, int], list[int]]:
        for called in calls.values():
            called.clear()
        jax.block_until_ready(program(step.astype(jnp.float32)))
        jax.effects_barrier()
        return calls

    return run


@pytest.mark.parametrize("name", BOUNDS)
def test_a_tile_is_copied_once_for_each_live_tile_and_no_other(name, copied_tiles, rng):
    start, stop = BOUNDS[name]
    visible = (start[0, :, None] <= INDEX) & (INDEX < stop[0, :, None])
    live = visible.reshape(4, 256, 4, 256).any(axis=(1, 3))  # (query tiles, key tiles)
    calls = copied_tiles(RING_STEP.draw(rng)._replace(k_start=start, k_end=stop))
    for method in "start", "wait":
        for direction, axis in ((FORWARD, 0), (BACKWARD, 1)):
            copied = np.bincount(calls[method, direction], minlength=4)
            np.testing.assert_array_equal(copied, RING_STEP.kv_heads * live.sum(axis))
