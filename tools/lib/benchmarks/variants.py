"""Attention on a ring as it is benchmarked: chosen, compiled, run and read back."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels import backends as backend
from kernels import layouts as layout
from kernels.block_sizes import BlockSizes
from kernels.blockwise import default_block_sizes
from kernels.cases import LAYOUTS, Answer, Case, Problem
from kernels.compiler import compiler_options
from kernels.layouts import Layout
from kernels.ring import Ring, attend
from tools.lib.benchmarks.rows import Environment, peak_share
from tools.lib.benchmarks.work import visible_pairs

FLOPS_CONVENTION = (
    "visible pairs only; forward 4 * head_dim * heads * pairs, forward and backward "
    "3.5 times that, as FlashAttention counts"
)
FORWARD_AND_BACKWARD = 3.5


@dataclass(frozen=True)
class Variant:
    """An implementation, a layout, and the problem that they solve.

    implementation: one of `kernels.backends`.
    case: names the layout and the ring.
    block_q, block_k: instead of the implementation's own sizes.
    """

    implementation: str
    case: Case
    dtype: jnp.dtype
    block_q: int | None = None
    block_k: int | None = None

    def __post_init__(self):
        if self.own_sizes is None and (self.block_q or self.block_k):
            raise ValueError(
                f'implementation "{self.implementation}" has no blocks: leave out '
                f"block_q={self.block_q} and block_k={self.block_k}"
            )

    @property
    def module(self) -> Any:
        """The backend: `forward` and `backward` as in `kernels.reference`."""
        return backend.choose(self.implementation, self.dtype)

    @property
    def own_sizes(self) -> BlockSizes | None:
        """The implementation's own block sizes; None if it has no blocks."""
        is_blocked = self.implementation == "blockwise"
        return default_block_sizes(self.shard_length) if is_blocked else None

    @property
    def block_sizes(self) -> BlockSizes | None:
        """Block sizes of the run, no larger than a shard; None if it has no blocks."""
        own = self.own_sizes
        if own is None:
            return None
        return BlockSizes(
            min(self.block_q or own.block_q, self.shard_length),
            min(self.block_k or own.block_k, self.shard_length),
        )

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.case.layout]

    @property
    def padded_length(self) -> int:
        """Tokens of the sequence with the padding that the layout needs."""
        return layout.padded_length(self.layout, self.case.ring_size, self.case.length)

    @property
    def shard_length(self) -> int:
        return self.padded_length // self.case.ring_size

    def ring(self) -> Ring:
        """Returns the production ring, around the axis "ring"."""
        sizes = self.block_sizes
        step = self.module
        if sizes is not None:
            step = backend.Steps(
                functools.partial(step.forward, block_sizes=sizes),
                functools.partial(step.backward, block_sizes=sizes),
            )
        scale = self.case.head_dim**-0.5
        return Ring("ring", self.case.ring_size, self.layout, scale, step)

    def to_layout(self, x: np.ndarray) -> np.ndarray:
        """Pads (B, T, …) in natural order with zeros, and puts it into layout order."""
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, self.padded_length - x.shape[1])
        return layout.permute(np.pad(x, widths), self.layout, self.case.ring_size)

    def from_layout(self, x: jax.Array, axis: int) -> np.ndarray:
        """Undoes `to_layout` along the axis of the tokens, in float64."""
        ring_size = self.case.ring_size
        x = layout.unpermute(np.asarray(x, np.float64), self.layout, ring_size, axis)
        return np.take(x, range(self.case.length), axis)


@dataclass(frozen=True)
class Program:
    """A compiled variant with its operands on their devices.

    compile_seconds: wall-clock time that lowering and compiling took.
    """

    variant: Variant
    run: Callable[..., tuple[jax.Array, ...]]
    operands: tuple[jax.Array, ...]
    compile_seconds: float

    def __call__(self) -> tuple[jax.Array, ...]:
        """Runs it: out, lse, dq, dk and dv, on their devices, in layout order."""
        return self.run(*self.operands)

    def answer(self) -> Answer:
        """Runs it, and brings the results into natural order."""
        axes = (1, 2, 1, 1, 1)
        results = zip(self(), axes, strict=True)
        return Answer(*(self.variant.from_layout(x, axis) for x, axis in results))


def compile_variant(variant: Variant, problem: Problem, mesh: Mesh) -> Program:
    """Compiles forward and backward pass, and shards the operands.

    problem: operands in natural order, of `variant.case`; its `d_lse` is not used.
    mesh: of one axis, "ring".
    """
    ring = variant.ring()

    def forward_and_backward(q, k, v, do, k_start, k_end):
        results, pull = jax.vjp(
            lambda *qkv: attend(ring, *qkv, None, k_start, k_end), q, k, v
        )
        return *results, *pull((do, jnp.zeros_like(results[1])))

    tokens_second = PartitionSpec(None, "ring")
    tokens_third = PartitionSpec(None, None, "ring")
    program = jax.jit(
        jax.shard_map(
            forward_and_backward,
            mesh=mesh,
            in_specs=(tokens_second,) * 6,
            out_specs=(tokens_second, tokens_third, *(tokens_second,) * 3),
            check_vma=False,
        ),
        compiler_options=compiler_options(mesh.devices.flat[0].device_kind),
    )
    arrays = (problem.q, problem.k, problem.v, problem.do)
    arrays = [x.astype(variant.dtype) for x in arrays]
    arrays += variant.case.visible(variant.padded_length)
    sharding = NamedSharding(mesh, tokens_second)
    operands = tuple(jax.device_put(variant.to_layout(x), sharding) for x in arrays)
    begin = time.perf_counter()
    run = program.lower(*operands).compile()
    return Program(variant, run, operands, time.perf_counter() - begin)


def start_devices(count: int) -> list[jax.Device]:
    """Returns `count` accelerators, or simulated CPU devices where there are none.

    Raises:
      ValueError: there are fewer.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has its devices already, and they cannot change
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"--devices {count}, but there are {len(devices)} of "
            f"{devices[0].device_kind}: ask for fewer, or set JAX_PLATFORMS=cpu"
        )
    return devices[:count]


def measure_rates(
    variant: Variant, seconds: float, environment: Environment
) -> dict[str, Any]:
    """Returns the fields of a row on the rate of a run of forward and backward."""
    case = variant.case
    pairs = case.batch * visible_pairs(case.visible(case.length))
    flops = FORWARD_AND_BACKWARD * 4 * case.head_dim * case.heads * pairs
    return {
        "tflops": flops / seconds / 1e12,
        "flops_convention": FLOPS_CONVENTION,
        "peak_share": peak_share(flops / seconds, environment, variant.dtype),
    }


def group_of(heads: int, kv_heads: int) -> int:
    """Returns the query heads of a key/value head.

    Raises:
      ValueError: `heads` is not a multiple of `kv_heads`.
    """
    if heads % kv_heads:
        raise ValueError(
            f"--heads must be a multiple of --kv-heads {kv_heads}, got {heads}"
        )
    return heads // kv_heads
