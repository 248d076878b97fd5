"""Every backend of an attention step, by the tests of `backend_suite`.

Kernels are interpreted here, in small tiles. What concerns one chip alone is in the
files of that chip.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels import backends
from kernels.backends import IMPLEMENTATIONS, blockwise
from kernels.backends.hopper import launch as hopper
from kernels.backends.tile_layout import BlockSizes
from kernels.backends.tpu.block_sizes import TPU_FORWARD
from kernels.backends.triton_gpu import launch as triton_gpu
from tests.cases import table
from tests.kernels.backend_suite import (
    BackendSuite,
    Groups,
    any_in_block,
    refusals_of,
    steps_of,
)
from tests.support.simulated_hopper import RACES
from tests.support.simulated_tokamax import SIMULATED_TOKAMAX
from tests.support.simulated_tpu import SIMULATED_TPU, V6E, on_chip, with_vmem
from tests.support.simulated_triton import SIMULATED_GPU, SMALL_BLOCKS, interpreted_call
from tests.support.steps import StepCase, compiled, run_rounding, truth

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def test_every_implementation_has_a_suite():
    """The reference is what they are compared with: see `test_reference`."""
    gpu_suites = TestHopper, TestHopperDeterministic, TestTriton, TestTokamax
    suites = TestBlockwise, TestTpu, *gpu_suites
    tested = {suite.implementation for suite in suites}
    assert tested == backends.IMPLEMENTATIONS.keys() - {"reference"}


@pytest.mark.thorough(quick=3)
class TestBlockwise(BackendSuite):
    implementation = "blockwise"
    backend = blockwise
    cases = steps_of("float32", "blockwise", TILE=64, SIZES=BlockSizes(16, 32))
    types = F32, BF16, F16
    tiles = Groups(
        StepCase(192, 320, group=1, batch=1, sizes=BlockSizes(64, 64)),
        rows=64,
        query_tile=64,
        granule=64,
        gaps=((70, 120), (192, 250), (320, 256)),
        aligned=((0, 128), (64, 256), (128, 320)),
        slot=200,
    )
    test_what_there_is_no_kernel_for_is_refused = None


@pytest.mark.thorough(quick=1)
class TestTpu(BackendSuite):
    implementation = "pallas_tpu"
    backend = SIMULATED_TPU
    cases = steps_of("float32", "tpu", "any-tpu", TILE=256, SIZES=None)
    slow_cases = "many heads", "cap", "one query, scale of zero"
    groups = 1, 2, 3, 4, 8, 32
    longest = 1024
    tiles = Groups(
        StepCase(768, 1200, group=1, batch=1),
        rows=128,
        query_tile=256,
        granule=128,
        # Of masked granules, two are a whole tile between others.
        gaps=((130, 250), (512, 640), (640, 1024), *[(1024, 1024)] * 2, (1200, 1024)),
        # Among them stairs, of which the first rows do not see the slot.
        aligned=((0, 384), (0, 512), (256, 512), (256, 640), *[(512, 1200)] * 2),
        slot=450,
    )
    refusals = refusals_of(
        "no-tpu",
        WIDE={"dtype": F32, "queries": 300},
        V3=on_chip(pltpu.ChipVersion.TPU_V3),
        V4=on_chip(pltpu.ChipVersion.TPU_V4),
        SMALL=replace(with_vmem(2**22), blocks=TPU_FORWARD["v5e"]),
        KEYS=replace(SIMULATED_TPU, blocks=replace(SIMULATED_TPU.blocks, block_k=200)),
        V3_KEYS=replace(
            on_chip(pltpu.ChipVersion.TPU_V3),
            blocks=replace(SIMULATED_TPU.blocks, block_k=128),
        ),
        REAL=IMPLEMENTATIONS["pallas_tpu"],
    )


@pytest.mark.thorough
class TestWideTpu(TestTpu):
    """Of chips whose matrix units are 256 wide: see `tpu.vector`."""

    backend = replace(SIMULATED_TPU, chip=V6E)
    cases = steps_of("float32", "wide-tpu", "any-tpu", TILE=256, SIZES=None)
    slow_cases = "one query, scale of zero", "one key", "cap"
    test_what_there_is_no_kernel_for_is_refused = None


@pytest.mark.thorough(quick=1)
class TestHopper(BackendSuite):
    implementation = "hopper"
    backend = hopper.Launch((64, 2, 2), RACES)
    cases = steps_of("hopper")
    slow_cases = "one key tile and a cap", "a scale that is flushed to zero"
    types = BF16, F16
    draws_type = True
    tiles = Groups(
        StepCase(384, 512, 1, head_dim=128, batch=1),
        rows=128,
        query_tile=128,
        granule=128,
        gaps=((130, 190), (256, 384), (448, 384)),
        aligned=((0, 128), (128, 384), (256, 512)),
        slot=200,
    )
    dtype = BF16
    tolerance = 1e-2
    carry_tolerance = 0
    refusals = refusals_of("no-hopper", REAL=IMPLEMENTATIONS["hopper"])

    def test_forward_skips_masked_keys_64_by_64(self, rng):
        """Backward ones skip 128 by 128."""
        tiles = self.tiles
        step = tiles.step(rng, self.dtype, tiles.gaps)
        want = truth(tiles.case, step)
        masked = ~any_in_block(tiles.visible(step).any(axis=0), 64)
        assert masked.sum() % 128
        step.k[:, masked] = step.v[:, masked] = np.nan
        errors = self.results(tiles.case, step).errors(want)
        assert max(errors["out"], errors["lse"]) <= self.tolerance


class Two(NamedTuple):
    """A backend of two functions."""

    forward: Callable
    backward: Callable


@pytest.mark.thorough
class TestHopperDeterministic(TestHopper):
    implementation = "hopper_deterministic"
    # It differs in its backward only.
    launch = hopper.Launch(interpret=RACES, is_deterministic=True)
    backend = Two(blockwise.forward, launch.backward)
    carry_tolerance = 1e-6
    cases = steps_of("deterministic")
    slow_cases = ("several rows",)
    is_slow = True
    test_forward_skips_masked_keys_64_by_64 = None
    test_what_there_is_no_kernel_for_is_refused = None


@pytest.mark.thorough(quick=1)
class TestTriton(BackendSuite):
    implementation = "triton"
    backend = SIMULATED_GPU
    cases = steps_of("float32", "triton", TILE=64, SIZES=None)
    types = triton_gpu.TYPES
    tiles = replace(TestBlockwise.tiles, case=StepCase(192, 320, group=1, batch=1))
    refusals = refusals_of(
        "no-triton",
        OLD=triton_gpu.Launch(75, SMALL_BLOCKS, interpreted_call),
        NONE=triton_gpu.Launch(),
    )


class TestTokamax(BackendSuite):
    """How its kernels are called: stand-ins compute, and let nan of masked keys by."""

    implementation = "tokamax"
    backend = SIMULATED_TOKAMAX
    cases = steps_of("tokamax")
    types = BF16, F16
    head_dims = 64, 100, 128
    tiles = TestHopper.tiles
    dtype = BF16
    tolerance = 1e-2
    refusals = refusals_of("no-tokamax", REAL=IMPLEMENTATIONS["tokamax"])
    test_masked_keys_and_rows_that_see_nothing_are_never_computed = None
    test_nan_in_a_key_shows_in_every_row_that_sees_it_and_in_no_other = None
    test_nan_in_a_gradient_of_out_shows_in_what_its_row_sees_and_nowhere_else = None


@pytest.mark.thorough
@pytest.mark.parametrize(
    "suite, name",
    [
        (TestTpu, "bfloat16"),
        (TestWideTpu, "bfloat16"),
        (TestHopper, "far more keys"),
        (TestHopper, "far more queries"),
        (TestHopperDeterministic, "far more queries"),
    ],
)
def test_kernels_round_to_what_their_sums_are_rounded_to(suite, name, rng, capfd):
    """But for the last bit, with the scale, and in tiles that see nothing."""
    case, dtype = suite.cases[name]
    step = case.draw(rng, dtype)
    sees = np.arange(case.queries) >= case.queries // 2
    step = step._replace(k_start=step.k_start * sees, k_end=step.k_end * sees)
    run = compiled(
        getattr(suite, "launch", suite.backend),
        case.scale,
        None,
        case.soft_cap,
        run_rounding,
    )
    sums, results = run(step.astype(dtype))
    for want, got in zip(sums, results, strict=True):
        got, want = np.float32(got), np.float32(want)
        np.testing.assert_allclose(got, want, jnp.finfo(dtype).eps, 1e-7)
    assert "RACE DETECTED" not in capfd.readouterr().out


SIZES = {"BlockSizes": BlockSizes, "TPU": TPU_FORWARD["v5e"]}


@pytest.mark.parametrize(
    "blocks, changes, words", table("kernels.txt", "blocks", **SIZES)
)
def test_sizes_that_no_kernel_has_are_refused(blocks, changes, words):
    with pytest.raises(ValueError, match=words):
        replace(blocks, **changes)
