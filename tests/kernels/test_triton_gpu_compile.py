"""The Triton kernels, compiled for GPUs that are not there: by triton, and through JAX.

Nothing runs here. What triton makes is what runs on the GPU, so it shows whether the
registers suffice and shared memory holds the tiles.
"""

import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels.backends import IMPLEMENTATIONS
from kernels.backends.triton_gpu import launch as triton_gpu
from kernels.backends.triton_gpu.block_sizes import KernelBlocks, TritonBlocks
from kernels.backends.triton_gpu.launch import Launch
from tests.cases import in_tiers
from tests.cases.attention import covering
from tests.support.processes import ROOT
from tests.support.ring_layers import compiled_gradients
from tests.support.steps import StepCase, run
from tests.support.triton_compiler import (
    CUOBJDUMP,
    SHARED_MEMORY,
    Resources,
    TritonCompiler,
)
from tools.lib.compiled.pods import compile_for, gpu_devices

KERNELS = "forward", "backward_dkv", "backward_dq"


def step(head_dim: int, length: int = 1001, bound_rows: int = 1, **sizes) -> StepCase:
    """Returns a step with 2 query heads for each of 2 key/value heads, and a carry."""
    rows = {"batch": bound_rows, "bound_rows": bound_rows}
    sizes = {"group": 2, "kv_heads": 2, "has_carry": True} | sizes
    return StepCase(length, length, head_dim=head_dim, **rows, **sizes)


def resources(
    capability: int,
    case: StepCase,
    dtype: jnp.dtype = jnp.bfloat16,
    blocks: KernelBlocks | None = None,
    soft_cap: float | None = None,
) -> dict[str, Resources]:
    """What each kernel takes on a GPU of that capability."""
    compiler = TritonCompiler()
    backend = Launch(capability, blocks, compiler)
    program = functools.partial(run, backend, 0.1, None, soft_cap=soft_cap)
    jax.eval_shape(program, case.abstract(dtype))
    assert tuple(name for name, _ in compiler.resources) == KERNELS
    return dict(compiler.resources)


def assert_fits(capability: int, case: StepCase, dtype=jnp.bfloat16, **cap) -> None:
    found = resources(capability, case, dtype, **cap)
    # Tiles in float32 are the same for all.
    is_wide = dtype == jnp.float32
    most = min(SHARED_MEMORY.values()) if is_wide else SHARED_MEMORY[capability]
    for name, kernel in found.items():
        assert kernel.stack == 0, (name, found)
        assert 0 < kernel.shared_memory <= most, (name, found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "capability, head_dim, dtype, soft_cap", in_tiers("kernels.txt", "triton", jnp=jnp)
)
def test_nothing_is_spilled_and_tiles_fit(capability, head_dim, dtype, soft_cap):
    assert_fits(capability, step(head_dim), dtype, soft_cap=soft_cap)


SHAPES = {
    "capability": tuple(SHARED_MEMORY),
    "head_dim": (64, 128, 256),
    "dtype": tuple(triton_gpu.TYPES),
    "soft_cap": (None, 50.0),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(tuple(SHAPES), covering(SHAPES))
def test_any_shape_fits_as_well(capability, head_dim, dtype, soft_cap):
    for case in (
        step(head_dim * 3 // 4, 1, group=8, kv_heads=1, bound_rows=2),
        step(head_dim, 1024, group=4, kv_heads=8, has_carry=False),
        step(head_dim, 131072, group=1, kv_heads=52),
    ):
        assert_fits(capability, case, dtype, soft_cap=soft_cap)


@pytest.mark.thorough
def test_spills_and_tiles_that_are_too_large_are_seen():
    large = TritonBlocks(128, 128, 4, 3)
    small = TritonBlocks(16, 16, 4, 1)
    found = resources(89, step(128), blocks=KernelBlocks(large, small, small))
    assert found["forward"].stack > 100
    assert found["forward"].shared_memory > SHARED_MEMORY[89]
    assert found["backward_dkv"].stack == found["backward_dq"].stack == 0


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["h200", "a100"])
def test_a_described_gpu_is_compiled_for_through_jax(name):
    """As on a GPU that is there, its capability is not told. Nothing is copied."""
    mesh = Mesh(np.array(gpu_devices(name)), ("device",))
    both = functools.partial(run, IMPLEMENTATIONS["triton"], 0.1, None)
    program = compile_for(mesh, both, step(128).abstract(jnp.bfloat16)).as_text()
    calls = re.findall(r"custom-call\(.*triton_kernel_call.*flash_(\w+)/", program)
    assert sorted(calls) == sorted(KERNELS)
    assert not re.search(r"= bf16\[[^=]*(pad|copy|transpose|fusion)\(", program)


@pytest.mark.thorough
def test_blackwell_is_compiled_for_by_ptxas_from_13_3_on(tmp_path, monkeypatch):
    """Triton's PTX for it is 9.3, as is its own assembler, which XLA finds first."""
    requirements = (ROOT / "requirements/dev.txt").read_text()
    pinned = re.search(r"nvidia-cuda-nvcc==(\d+)\.(\d+)", requirements)
    assert tuple(map(int, pinned.groups())) >= (13, 3)
    (tmp_path / "ptxas").symlink_to(CUOBJDUMP.with_name("ptxas-blackwell"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    mesh = Mesh(np.array(gpu_devices("b200")), ("device",))
    both = functools.partial(run, IMPLEMENTATIONS["triton"], 0.1, None)
    program = compile_for(mesh, both, step(128).abstract(jnp.bfloat16)).as_text()
    assert all(f"flash_{kernel}/" in program for kernel in KERNELS)


def schedule(program: str) -> str:
    """s and d: a transfer is started, and is done. F, K and Q: the three kernels."""
    letters = dict(zip(("start", "done", *KERNELS), "sdFKQ", strict=True))
    transfer = r"collective-permute-(start|done)\("
    operation = rf" = .*? (?:{transfer}|custom-call\(.*flash_(\w+)/)"
    return "".join(letters[a or b] for a, b in re.findall(operation, program))


@pytest.mark.quick
def test_transfers_of_a_ring_hide_behind_its_kernels():
    mesh = Mesh(np.array(gpu_devices("h200", 4)), ("ring",))
    program = compiled_gradients(mesh, IMPLEMENTATIONS["triton"], 1024).as_text()
    # Forward, then backward with dk and dv one step behind, and local queries in two
    # halves. Its first transfer XLA does not repeat: forward has made the same.
    assert schedule(program) == "sFd" * 3 + "F" + "KQ" + "sKQd" * 4
