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
from kernels.backends.hopper.block_sizes import HopperBlocks
from kernels.backends.tile_layout import BlockSizes
from kernels.backends.tpu.block_sizes import TPU_FORWARD
from kernels.backends.triton_gpu import launch as triton_gpu
from kernels.backends.triton_gpu.block_sizes import TritonBlocks
from tests.cases import table
from tests.kernels.backend_suite import (
    BackendSuite,
    Groups,
    any_in_block,
    float32_cases,
    refusals_of,
)
from tests.simulated_hopper import RACES
from tests.simulated_tpu import SIMULATED_TPU, V6E, on_chip, with_vmem
from tests.simulated_triton import SIMULATED_GPU, SMALL_BLOCKS, interpreted_call
from tests.steps import StepCase, truth

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def test_every_implementation_has_a_suite():
    """The reference is what they are compared with: see `test_reference`."""
    suites = [TestBlockwise, TestTpu, TestHopper, TestHopperDeterministic, TestTriton]
    tested = {suite.implementation for suite in suites}
    assert tested == backends.IMPLEMENTATIONS.keys() - {"reference"}


@pytest.mark.thorough(quick=3)
class TestBlockwise(BackendSuite):
    implementation = "blockwise"
    backend = blockwise
    cases = {
        **float32_cases(64, BlockSizes(16, 32)),
        "bfloat16": (StepCase(101, 201, 4, head_dim=128, has_carry=True), BF16),
        "float16": (StepCase(70, 257, batch=1, sizes=BlockSizes(64, 32)), F16),
        "tiles of one": (StepCase(7, 9, bound_rows=2, sizes=BlockSizes(1, 1)), F32),
        "odd tiles": (
            StepCase(19, 14, 2, 3, 2, 2, has_carry=True, sizes=BlockSizes(3, 5)),
            F32,
        ),
    }
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
    cases = {
        **float32_cases(256),
        "many heads": (StepCase(77, 700, 16, bound_rows=2, has_carry=True), F32),
        "bfloat16": (StepCase(200, 500, 8, 100, bound_rows=2, has_carry=True), BF16),
        "cap": (StepCase(300, 700, 2, has_carry=True, scale=-0.5, soft_cap=1.5), F32),
        "bfloat16 cap": (StepCase(200, 500, 4, has_carry=True, soft_cap=1.5), BF16),
    }
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
    """Of chips whose matrix units are 256 wide: see `tpu.orientation`."""

    backend = replace(SIMULATED_TPU, chip=V6E)
    cases = {
        **float32_cases(256),
        "few numbers": (StepCase(300, 500, 2, 40, bound_rows=2, has_carry=True), F32),
        "cap": TestTpu.cases["cap"],
        "bfloat16": (StepCase(200, 500, 2, 100, bound_rows=2, has_carry=True), BF16),
    }
    slow_cases = "one query, scale of zero", "one key", "cap"
    test_what_there_is_no_kernel_for_is_refused = None


@pytest.mark.thorough(quick=1)
class TestHopper(BackendSuite):
    implementation = "hopper"
    backend = hopper.Launch(HopperBlocks(64, 2), RACES)
    cases = {
        "one query, scale of zero": (StepCase(1, 300, batch=1, scale=0.0), BF16),
        "a scale that is flushed to zero": (
            StepCase(77, 70, group=4, batch=1, scale=-1e-42),
            BF16,
        ),
        "far more keys": (
            StepCase(77, 400, 1, 64, 1, 2, 2, True, -1e-5),
            F16,
        ),
        "far more queries": (
            StepCase(300, 130, 3, 100, 1, 1, 1, True, scale=-0.1, soft_cap=1.5),
            BF16,
        ),
        "one key tile and a cap": (
            StepCase(130, 70, 2, batch=1, has_carry=True, soft_cap=1.5),
            BF16,
        ),
        # A cap so low that exponents of its tanh overflow.
        "wide heads": (
            StepCase(100, 257, 4, head_dim=256, batch=1, soft_cap=0.25),
            BF16,
        ),
    }
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
    refusals = refusals_of(
        "no-hopper",
        REAL=IMPLEMENTATIONS["hopper"],
        MANY=hopper.Launch(HopperBlocks(640, 4), RACES),
    )

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
    backend = Two(
        blockwise.forward,
        hopper.Launch(interpret=RACES, is_deterministic=True).backward,
    )
    carry_tolerance = 1e-6
    cases = {
        # Each with keys of its own, and weights that differ: equal ones, as of a tiny
        # scale, are rounded alike, by chance hardly at all.
        "one query, several heads": (
            StepCase(1, 300, 3, 64, 1, 4, 4, has_carry=True, scale=-0.2),
            F16,
        ),
        "several rows": (
            StepCase(1, 300, 3, 64, 1, 8, 8, has_carry=True, scale=-0.2),
            F16,
        ),
        "far more queries": (
            StepCase(300, 130, 1, 128, batch=1, has_carry=True, soft_cap=1.5),
            BF16,
        ),
    }
    slow_cases = ("several rows",)
    is_slow = True
    test_forward_skips_masked_keys_64_by_64 = None
    test_what_there_is_no_kernel_for_is_refused = None


@pytest.mark.thorough(quick=1)
class TestTriton(BackendSuite):
    implementation = "triton"
    backend = SIMULATED_GPU
    cases = {
        **float32_cases(64),
        # A cap so low that exponents of its tanh overflow.
        "whole tiles": (
            StepCase(128, 128, 1, head_dim=3, has_carry=True, soft_cap=0.01),
            F32,
        ),
        "bfloat16": (StepCase(101, 201, 2, 100, bound_rows=2, has_carry=True), BF16),
        "float16": (
            StepCase(70, 257, 4, 128, batch=1, scale=-0.1, soft_cap=1.5),
            F16,
        ),
    }
    types = triton_gpu.TYPES
    tiles = replace(TestBlockwise.tiles, case=StepCase(192, 320, group=1, batch=1))
    refusals = refusals_of(
        "no-triton",
        OLD=triton_gpu.Launch(75, SMALL_BLOCKS, interpreted_call),
        NONE=triton_gpu.Launch(),
    )


SIZES = {"BlockSizes": BlockSizes, "TPU": TPU_FORWARD["v5e"]}
SIZES |= {"HOPPER": HopperBlocks(64, 2), "TRITON": TritonBlocks(64, 64, 4, 2)}


@pytest.mark.parametrize(
    "blocks, changes, words", table("kernels.txt", "blocks", **SIZES)
)
def test_sizes_that_no_kernel_has_are_refused(blocks, changes, words):
    with pytest.raises(ValueError, match=words):
        replace(blocks, **changes)
