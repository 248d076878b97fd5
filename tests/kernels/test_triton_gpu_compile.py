"""The Triton kernels, compiled for GPUs that are not there: by triton, and through JAX.

Nothing runs here. What triton makes is what runs on the GPU, so it shows whether the
registers suffice and shared memory holds the tiles.
"""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from kernels.triton_gpu import launch as triton_gpu
from kernels.triton_gpu.block_sizes import KernelBlocks, TritonBlocks
from kernels.triton_gpu.launch import Launch
from tests.ring_layers import SHARDED, striped_attention
from tests.simulated_triton import SimulatedGpu
from tests.triton_compiler import SHARED_MEMORY, Resources, TritonCompiler
from training.pods import compile_for, h200_devices

KERNELS = "forward", "backward_dkv", "backward_dq"


def array(*shape: int, dtype: jnp.dtype = jnp.bfloat16, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@dataclass(frozen=True)
class Problem:
    """What an attention step is given: types and shapes."""

    head_dim: int
    dtype: jnp.dtype = jnp.bfloat16
    length: int = 1001
    heads: int = 4
    kv_heads: int = 2
    bound_rows: int = 1
    has_carry: bool = True

    def arguments(self) -> tuple:
        """Those of `forward` and `backward`."""
        q, k = (
            array(self.bound_rows, self.length, heads, self.head_dim, dtype=self.dtype)
            for heads in (self.heads, self.kv_heads)
        )
        wide = array(*q.shape, dtype=jnp.float32)
        row = array(self.bound_rows, self.heads, self.length, dtype=jnp.float32)
        bound = array(self.bound_rows, self.length, dtype=jnp.int32)
        carry = (wide, row) if self.has_carry else None
        return (q, k, k, bound, bound, carry), (
            q,
            k,
            k,
            q,
            row,
            row,
            bound,
            bound,
            wide,
        )

    def resources(
        self, capability: int, blocks: KernelBlocks | None = None
    ) -> dict[str, Resources]:
        """What each kernel takes on a GPU of that capability."""
        compiler = TritonCompiler()
        backend = SimulatedGpu(Launch(capability, blocks, compiler))
        for function, arguments in zip(both(backend), self.arguments(), strict=True):
            jax.eval_shape(function, *arguments)
        assert tuple(name for name, _ in compiler.resources) == KERNELS
        return dict(compiler.resources)


def both(backend):
    def forward(q, k, v, start, stop, carry):
        return backend.forward(q, k, v, start, stop, scale=0.1, carry=carry)

    def backward(*arguments):
        *operands, dq = arguments
        return backend.backward(*operands, scale=0.1, dq=dq)

    return forward, backward


def assert_fits(problem: Problem, capability: int) -> None:
    found = problem.resources(capability)
    for name, kernel in found.items():
        assert kernel.stack == 0, (name, found)
        assert 0 < kernel.shared_memory <= SHARED_MEMORY[capability], (name, found)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_nothing_is_spilled_and_tiles_fit(capability, head_dim):
    assert_fits(Problem(head_dim), capability)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nothing_is_spilled_in_float32(head_dim):
    """Its tiles are the same for all; Hopper's ptxas spills first."""
    found = Problem(head_dim, jnp.float32).resources(90)
    for name, kernel in found.items():
        assert kernel.stack == 0, (name, found)
        assert 0 < kernel.shared_memory <= min(SHARED_MEMORY.values()), (name, found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", triton_gpu.TYPES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_any_shape_fits_as_well(capability, head_dim, dtype):
    for problem in (
        Problem(head_dim * 3 // 4, dtype, 1, 8, 1, 2),
        Problem(head_dim, dtype, 1024, 32, 8, has_carry=False),
        Problem(head_dim, dtype, 131072, 52, 52),
    ):
        assert_fits(problem, capability)


def test_spills_and_tiles_that_are_too_large_are_seen():
    large = TritonBlocks(128, 128, 4, 3)
    small = TritonBlocks(16, 16, 4, 1)
    found = Problem(128).resources(89, KernelBlocks(large, small, small))
    assert found["forward"].stack > 100
    assert found["forward"].shared_memory > SHARED_MEMORY[89]
    assert found["backward_dkv"].stack == found["backward_dq"].stack == 0


def test_a_described_gpu_is_compiled_for_through_jax():
    """As on a GPU that is there, its capability is not told. Nothing is copied."""
    mesh = Mesh(np.array(h200_devices()), ("device",))
    programs = both(triton_gpu), Problem(128).arguments()
    program = "".join(
        compile_for(mesh, function, *arguments).as_text()
        for function, arguments in zip(*programs, strict=True)
    )
    calls = re.findall(r"custom-call\(.*triton_kernel_call.*flash_(\w+)/", program)
    assert sorted(calls) == sorted(KERNELS)
    assert not re.search(r"= bf16\[[^=]*(pad|copy|transpose|fusion)\(", program)


def schedule(program: str) -> str:
    """s and d: a transfer is started, and is done. F, K and Q: the three kernels."""
    letters = dict(zip(("start", "done", *KERNELS), "sdFKQ", strict=True))
    transfer = r"collective-permute-(start|done)\("
    operation = rf" = .*? (?:{transfer}|custom-call\(.*flash_(\w+)/)"
    return "".join(letters[a or b] for a, b in re.findall(operation, program))


def test_transfers_of_a_ring_hide_behind_its_kernels():
    mesh = Mesh(np.array(h200_devices(4)), ("ring",))
    attend = striped_attention(mesh, triton_gpu, 1024)

    def loss(*operands):
        return attend(*operands).astype(jnp.float32).sum()

    sharding = NamedSharding(mesh, SHARDED)
    q, k = (array(1, 4096, heads, 128, sharding=sharding) for heads in (4, 2))
    program = compile_for(mesh, jax.grad(loss, (0, 1, 2)), q, k, k)
    # Forward, then backward with dk and dv one hop behind, and queries at home in two
    # halves. Its first transfer XLA does not repeat: forward has made the same.
    hops = "sFd" * 3 + "F", "KQ" + "sKQd" * 4
    assert schedule(program.as_text()) == "".join(hops)
