"""Flash attention on GPUs before and beside Hopper: Triton kernels behind the signature
of `reference`.

Measures a problem, counts the live tiles of its intervals in XLA, and launches the
kernels of `kernels` through jax-triton. Both are imported when a step is first run.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from ...merge import Partial, added
from ...precision import exponent_factors
from ..block_sizes import BlockSizes
from ..tile_ranges import TileRanges, key_ranges, query_ranges
from .block_sizes import KernelBlocks, TritonBlocks, chosen_blocks, padded_depth

SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)
TYPES = jnp.bfloat16, jnp.float16, jnp.float32


@dataclass(frozen=True)
class Rows:
    """Rows of arrays [B, length, heads, depth] and their cut into tiles.

    depth: numbers in a row of a result; operands are padded to `block_d`.
    tile: rows in a tile.
    """

    length: int
    heads: int
    depth: int
    tile: int

    @property
    def block_d(self) -> int:
        return padded_depth(self.depth)


@dataclass(frozen=True)
class Sizes:
    """A problem and its tiles, all constants of the compiled kernels.

    depth: D; operands are padded to `block_d`, results are not.
    bound_rows: M, rows of bounds: 1 or B.
    scale_log2: factor on scores, for exponents of 2; positive in the forward kernel.
    tanh_scale: scores are tanh(tanh_scale q kᵀ), or q kᵀ if it is None.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    depth: int
    bound_rows: int
    scale_log2: float
    tanh_scale: float | None
    block_q: int
    block_k: int
    has_carry: bool = False

    @property
    def block_d(self) -> int:
        return padded_depth(self.depth)

    @property
    def is_capped(self) -> bool:
        return self.tanh_scale is not None

    @property
    def query_rows(self) -> Rows:
        return Rows(self.queries, self.heads, self.depth, self.block_q)

    @property
    def key_rows(self) -> Rows:
        return Rows(self.keys, self.kv_heads, self.depth, self.block_k)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def query_tiles(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def key_tiles(self) -> int:
        return -(-self.keys // self.block_k)


def triton_call(
    kernel: str,
    operands: tuple[jax.Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    *,
    programs: int,
    sizes: Sizes,
    blocks: TritonBlocks,
    capability: int,
) -> tuple[jax.Array, ...]:
    """Runs the kernel of that name in `kernels`, compiled for a capability.

    Raises:
      NotImplementedError: jax-triton is not installed.
    """
    try:
        import jax_triton

        from . import kernels
    except ImportError as error:
        raise NotImplementedError(
            "triton needs jax-triton: pip install 'annulus-attention[triton]', or use "
            "implementation='blockwise'"
        ) from error
    # Since 0.4 results have a type, before that they have a shape.
    is_typed = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    with jax.named_scope(f"flash_{kernel}"):
        return jax_triton.triton_call(
            *operands,
            kernel=getattr(kernels, kernel),
            **{"out_type" if is_typed else "out_shape": results},
            grid=(programs,),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            compute_capability=capability,
            sizes=sizes,
        )


@dataclass(frozen=True)
class Launch:
    """Device, block sizes and runner of the kernels.

    capability: compute capability to compile for, 80 for 8.0; by default that of this
      program's GPU, or of the abstract one in the mesh.
    blocks: block sizes; by default the choice for the chip.
    call: runs a kernel, as `triton_call` does; tests interpret it on a CPU.
    """

    capability: int | None = None
    blocks: KernelBlocks | None = None
    call: Callable = triton_call

    def run(
        self, kernel: str, operands: tuple[jax.Array, ...], *results: Any, **how: Any
    ) -> tuple[jax.Array, ...]:
        """Runs `call`; under `jax.vmap`, which Triton does not know, one by one."""

        @jax.custom_batching.sequential_vmap
        def one(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return self.call(kernel, operands, results, **how)

        return one(*operands)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
    launch: Launch = Launch(),
) -> Partial:
    """Computes attention of every query to the keys [k_start, k_end): see `reference`.

    block_sizes: of a tile; by default those of `launch.blocks`.

    Raises:
      ValueError: a type that the kernels do not compute in, or tiles that Triton does
        not have.
      NotImplementedError: a head that is too large, no GPU to compile for, or no
        jax-triton.
    """
    capability = _checked_capability(launch.capability, q)
    blocks = launch.blocks or chosen_blocks(capability, q, soft_cap)
    blocks = blocks.forward.with_tiles(block_sizes)
    scale_log2, tanh_scale = exponent_factors(scale, soft_cap)
    if scale_log2 < 0:
        # The kernel takes the maximum before it scales.
        q = -q
    # A scale of 0 would turn the -inf of masked scores into nan; one as small as this
    # makes all weights equal too.
    scales = max(abs(scale_log2), SMALLEST), tanh_scale
    sizes = _measured(q, k, k_start, scales, blocks, carry is not None)
    bounds = _stacked(k_start, k_end)
    ranges = key_ranges(*bounds, sizes.block_q, sizes.block_k)
    nothing = jnp.zeros((1,), jnp.float32)
    out = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    row = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    q, k, v = _widened(q, k, v)
    operands = (
        q,  # [B, T, H, block_d]
        *(k, v),  # [B, S, K, block_d]
        bounds,  # int32 [2, M, T]
        _stacked(*ranges),  # int32 [4, M, query_tiles]
        *(carry or (nothing, nothing)),  # out [B, T, H, D], lse [B, H, T]
    )
    out, lse = launch.run(
        "forward",
        operands,
        out,
        row,
        programs=q.shape[0] * sizes.heads * sizes.query_tiles,
        sizes=sizes,
        blocks=blocks,
        capability=capability,
    )
    return out, lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
    dkv: tuple[jax.Array, jax.Array] | None = None,
    launch: Launch = Launch(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of the attention to these keys: see `reference`.

    block_sizes, launch, errors: as in `forward`.
    """
    capability = _checked_capability(launch.capability, q)
    blocks = launch.blocks or chosen_blocks(capability, q, soft_cap)
    bounds = _stacked(k_start, k_end)
    operands = (
        *_widened(q, k, v, do),  # [B, T or S, H or K, block_d]
        *(lse, delta),  # [B, H, T]
        bounds,  # int32 [2, M, T]
    )

    dkv_blocks = blocks.backward_dkv.with_tiles(block_sizes)
    scales = exponent_factors(scale, soft_cap)
    sizes = _measured(q, k, k_start, scales, dkv_blocks)
    ranges = query_ranges(*bounds, sizes.block_q, sizes.block_k, sizes.keys)
    ranges = _with_whole_tiles(ranges, sizes.queries // sizes.block_q)
    gradient = jax.ShapeDtypeStruct(k.shape, jnp.float32)  # [B, S, K, D]
    dk, dv = launch.run(
        "backward_dkv",
        (*operands, _stacked(*ranges)),
        gradient,
        gradient,
        programs=k.shape[0] * sizes.kv_heads * sizes.key_tiles,
        sizes=sizes,
        blocks=dkv_blocks,
        capability=capability,
    )

    dq_blocks = blocks.backward_dq.with_tiles(block_sizes)
    sizes = _measured(q, k, k_start, scales, dq_blocks)
    ranges = key_ranges(*bounds, sizes.block_q, sizes.block_k)
    (dq,) = launch.run(
        "backward_dq",
        (*operands, _stacked(*ranges), dq),
        jax.ShapeDtypeStruct(dq.shape, jnp.float32),
        programs=q.shape[0] * sizes.heads * sizes.query_tiles,
        sizes=sizes,
        blocks=dq_blocks,
        capability=capability,
    )
    return dq, *added(dkv, (dk, dv))


def _checked_capability(capability: int | None, q: jax.Array) -> int:
    """Returns the capability to compile for; refuses what has no kernel.

    Raises:
      ValueError, NotImplementedError: as `forward`.
    """
    if q.dtype not in TYPES:
        raise ValueError(
            "for triton, q.dtype must be bfloat16, float16 or float32, got "
            f"{q.dtype}: cast q, k and v"
        )
    if padded_depth(q.shape[-1]) > 256:
        raise NotImplementedError(
            f"triton has kernels for heads of up to 256 numbers, got {q.shape=}: "
            "use implementation='blockwise'"
        )
    if capability is None:
        capability = _device_capability()
    if capability < 80:
        raise NotImplementedError(
            f"triton needs a GPU of compute capability 8.0 or newer, this one has "
            f"{capability / 10}: use implementation='blockwise'"
        )
    return capability


def _device_capability() -> int:
    try:
        return pltriton.get_gpu_info().compute_capability
    except ValueError as error:
        raise NotImplementedError(
            "triton needs an NVIDIA GPU, or a mesh that describes one: name "
            "another implementation, or none"
        ) from error


def _measured(
    q: jax.Array,
    k: jax.Array,
    k_start: jax.Array,
    scales: tuple[float, float | None],
    blocks: TritonBlocks,
    has_carry: bool = False,
) -> Sizes:
    """Returns a problem and its tiles as the kernels take them.

    scales: scale_log2 and tanh_scale.
    """
    scale_log2, tanh_scale = scales
    return Sizes(
        queries=q.shape[1],
        keys=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        depth=q.shape[3],
        bound_rows=k_start.shape[0],
        scale_log2=float(scale_log2),
        tanh_scale=tanh_scale,
        block_q=blocks.block_q,
        block_k=blocks.block_k,
        has_carry=has_carry,
    )


def _widened(*operands: jax.Array) -> Iterator[jax.Array]:
    """Pads rows with zeros to the power of 2 that a tile has: [B, T, H, block_d]."""
    for x in operands:
        more = padded_depth(x.shape[-1]) - x.shape[-1]
        yield jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more)))


def _with_whole_tiles(ranges: TileRanges, whole: int) -> TileRanges:
    """Returns ranges in which a last tile with rows missing is never full."""
    return ranges._replace(
        full_begin=jnp.minimum(ranges.full_begin, whole),
        full_end=jnp.minimum(ranges.full_end, whole),
    )


def _stacked(*arrays: jax.Array) -> jax.Array:
    return jnp.stack([jnp.asarray(x) for x in arrays])
