"""Flash attention on GPUs before and beside Hopper: Triton kernels behind the signature
of `reference`.

Here problems are measured and the kernels of `triton_kernels` launched, through
jax-triton. Both are imported when a step is first asked for, and not before. What a
query sees arrives as intervals, from which the tiles to visit are counted in XLA.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as gpu

from ..block_sizes import BlockSizes
from ..merge import Partial
from ..tile_ranges import TileRanges, key_ranges, query_ranges
from .block_sizes import KernelBlocks, TritonBlocks, chosen_blocks, padded_depth

LOG2_E = math.log2(math.e)
SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)
TYPES = jnp.bfloat16, jnp.float16, jnp.float32


@dataclass(frozen=True)
class Rows:
    """The rows of arrays (B, length, heads, depth), in tiles of so many.

    depth: of results; operands are padded to `block_d` numbers.
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
    """A problem and its tiles, as the kernels know them: constants all.

    depth: D; operands are padded to `block_d`, results are not.
    bound_rows: M, rows of bounds.
    scale2: factor on the products of queries and keys, for exponents of 2; positive in
      the forward kernel.
    """

    queries: int
    keys: int
    heads: int
    kv_heads: int
    depth: int
    bound_rows: int
    scale: float
    scale2: float
    block_q: int
    block_k: int
    has_carry: bool = False

    @property
    def block_d(self) -> int:
        return padded_depth(self.depth)

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
    """Runs the kernel of that name in `triton_kernels`, compiled for a capability.

    Raises:
      NotImplementedError: jax-triton is not installed.
    """
    try:
        import jax_triton

        from . import kernels as triton_kernels
    except ImportError as error:
        raise NotImplementedError(
            "triton needs jax-triton: pip install -r requirements-gpu.txt, or use "
            "implementation='blockwise'"
        ) from error
    # Since 0.4 results have a type, before that they have a shape.
    is_typed = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    with jax.named_scope(f"flash_{kernel}"):
        return jax_triton.triton_call(
            *operands,
            kernel=getattr(triton_kernels, kernel),
            **{"out_type" if is_typed else "out_shape": results},
            grid=(programs,),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            compute_capability=capability,
            sizes=sizes,
        )


@dataclass(frozen=True)
class Launch:
    """How a kernel is run.

    capability: what it is compiled for, as 80 for 8.0; that of this program's GPU, or
      of the one that the mesh describes, unless given.
    blocks: how its work is cut; as is best for the chip unless given.
    call: runs it, like `triton_call`; tests have Triton interpret it on a CPU.
    """

    capability: int | None = None
    blocks: KernelBlocks | None = None
    call: Callable = triton_call

    def run(
        self, kernel: str, operands: tuple[jax.Array, ...], *results: Any, **how: Any
    ) -> tuple[jax.Array, ...]:
        """`call`; under `jax.vmap`, which Triton does not know, one by one."""

        @jax.custom_batching.sequential_vmap
        def one(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return self.call(kernel, operands, results, **how)

        return one(*operands)


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
    launch: Launch = Launch(),
) -> Partial:
    """Attention of every query to the key slots [start, stop): see `reference`.

    block_sizes: those of a tile; as in `launch.blocks` unless given.

    Raises:
      ValueError: a type that the kernels do not compute in, or tiles that Triton does
        not have.
      NotImplementedError: a head that is too large, no GPU to compile for, or no
        jax-triton.
    """
    capability = _checked_capability(launch.capability, q)
    blocks = launch.blocks or chosen_blocks(capability, q)
    blocks = blocks.forward.with_tiles(block_sizes)
    if scale < 0:
        # The kernel takes the maximum before it scales.
        q = -q
    # A scale of 0 would turn the -inf of what is not seen into nan; one as small as
    # this makes all weights equal too.
    scale2 = max(abs(scale) * LOG2_E, SMALLEST)
    sizes = _measured(q, k, start, scale, scale2, blocks, carry is not None)
    bounds = _stacked(start, stop)
    ranges = key_ranges(*bounds, sizes.block_q, sizes.block_k)
    nothing = jnp.zeros((1,), jnp.float32)
    row = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    out, lse = launch.run(
        "forward",
        (*_widened(q, k, v), bounds, _stacked(*ranges), *(carry or (nothing, nothing))),
        jax.ShapeDtypeStruct(q.shape, jnp.float32),
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
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
    launch: Launch = Launch(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the attention to these keys: see `reference`.

    block_sizes, launch: as in `forward`, and so is what is raised.
    """
    capability = _checked_capability(launch.capability, q)
    blocks = launch.blocks or chosen_blocks(capability, q)
    bounds = _stacked(start, stop)
    operands = *_widened(q, k, v, d_out), lse, delta, bounds

    blocks_of_keys = blocks.backward_keys.with_tiles(block_sizes)
    sizes = _measured(q, k, start, scale, scale * LOG2_E, blocks_of_keys)
    ranges = query_ranges(*bounds, sizes.block_q, sizes.block_k, sizes.keys)
    ranges = _with_whole_tiles(ranges, sizes.queries // sizes.block_q)
    share = jax.ShapeDtypeStruct(k.shape, jnp.float32)
    dk, dv = launch.run(
        "backward_keys",
        (*operands, _stacked(*ranges)),
        share,
        share,
        programs=k.shape[0] * sizes.kv_heads * sizes.key_tiles,
        sizes=sizes,
        blocks=blocks_of_keys,
        capability=capability,
    )

    blocks_of_queries = blocks.backward_queries.with_tiles(block_sizes)
    sizes = _measured(q, k, start, scale, scale * LOG2_E, blocks_of_queries)
    ranges = key_ranges(*bounds, sizes.block_q, sizes.block_k)
    (dq,) = launch.run(
        "backward_queries",
        (*operands, _stacked(*ranges), dq),
        jax.ShapeDtypeStruct(dq.shape, jnp.float32),
        programs=q.shape[0] * sizes.heads * sizes.query_tiles,
        sizes=sizes,
        blocks=blocks_of_queries,
        capability=capability,
    )
    return dq, dk, dv


def _checked_capability(capability: int | None, q: jax.Array) -> int:
    """The capability to compile for, if there is one and it has kernels for q."""
    if q.dtype not in TYPES:
        raise ValueError(
            f"triton computes in bfloat16, float16 or float32, got {q.dtype}: cast "
            "q, k and v"
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
        return gpu.get_gpu_info().compute_capability
    except ValueError as error:
        raise NotImplementedError(
            "triton needs an NVIDIA GPU, or a mesh that describes one: name "
            "another implementation, or none"
        ) from error


def _measured(
    q: jax.Array,
    k: jax.Array,
    start: jax.Array,
    scale: float,
    scale2: float,
    blocks: TritonBlocks,
    has_carry: bool = False,
) -> Sizes:
    """What the kernels know of a problem."""
    return Sizes(
        queries=q.shape[1],
        keys=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        depth=q.shape[3],
        bound_rows=start.shape[0],
        scale=float(scale),
        scale2=float(scale2),
        block_q=blocks.block_q,
        block_k=blocks.block_k,
        has_carry=has_carry,
    )


def _widened(*operands: jax.Array) -> Iterator[jax.Array]:
    """Rows padded with zeros to the power of 2 that a tile has."""
    for x in operands:
        more = padded_depth(x.shape[-1]) - x.shape[-1]
        yield jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more)))


def _with_whole_tiles(ranges: TileRanges, whole: int) -> TileRanges:
    """Ranges in which a last tile with rows missing is partial in any case."""
    return ranges._replace(
        full_begin=jnp.minimum(ranges.full_begin, whole),
        full_end=jnp.minimum(ranges.full_end, whole),
    )


def _stacked(*arrays: jax.Array) -> jax.Array:
    return jnp.stack([jnp.asarray(x) for x in arrays])
