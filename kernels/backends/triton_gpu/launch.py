"""Flash attention on GPUs before and beside Hopper: Triton kernels, a step of which
`backends.steps` describes.

Measures a problem, counts the live tiles of its intervals in XLA, once a ring, and
launches the kernels of `kernels` through jax-triton. Both are imported when a step is
first run.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from ...masks import Array, Visible
from ...merge import Partial, added
from ...precision import Scores, exponent_factors, forward_factors
from .. import steps
from ..tile_ranges import TileRanges, key_ranges, query_ranges
from .block_sizes import KernelBlocks, TritonBlocks, chosen_blocks, padded_depth

TYPES = jnp.bfloat16, jnp.float16, jnp.float32


@dataclass(frozen=True)
class RowTiles:
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
    def query_rows(self) -> RowTiles:
        return RowTiles(self.queries, self.heads, self.depth, self.block_q)

    @property
    def key_rows(self) -> RowTiles:
        return RowTiles(self.keys, self.kv_heads, self.depth, self.block_k)

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
    """Runs the kernel of that name in `kernels`, compiled for a capability."""
    try:
        import jax_triton

        from . import kernels
    except ImportError as error:
        raise NotImplementedError(
            "triton needs jax-triton: pip install 'annulus-attention[triton]', or use "
            "implementation='blockwise'"
        ) from error
    # Since 0.4 jax-triton calls it a type, before that a shape.
    is_typed = "out_type" in inspect.signature(jax_triton.triton_call).parameters
    types: dict[str, Any] = {"out_type" if is_typed else "out_shape": results}
    with jax.named_scope(f"flash_{kernel}"):
        return jax_triton.triton_call(
            *operands,
            kernel=getattr(kernels, kernel),
            **types,
            grid=(programs,),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
            compute_capability=capability,
            sizes=sizes,
        )


@dataclass(frozen=True)
class Kernel:
    """A kernel for a problem; call: `Launch.call` of it."""

    sizes: Sizes
    call: Callable

    def key_ranges(self, bounds: jax.Array) -> TileRanges:
        """Returns the live key tiles of query tiles. bounds: [2, M, T]."""
        k_start, k_end = bounds
        return key_ranges(k_start, k_end, self.sizes.block_q, self.sizes.block_k)

    def query_ranges(self, bounds: jax.Array) -> TileRanges:
        """Returns the live query tiles of key tiles. bounds: [2, M, T]."""
        sizes = self.sizes
        k_start, k_end = bounds
        ranges = query_ranges(k_start, k_end, sizes.block_q, sizes.block_k, sizes.keys)
        # A last tile with rows missing is never full: full ones are read unmasked.
        whole = sizes.queries // sizes.block_q
        return ranges._replace(
            full_begin=jnp.minimum(ranges.full_begin, whole),
            full_end=jnp.minimum(ranges.full_end, whole),
        )

    def run(
        self,
        tiles: int,
        operands: tuple[jax.Array, ...],
        results: tuple[jax.ShapeDtypeStruct, ...],
    ) -> tuple[jax.Array, ...]:
        """Runs it; under `jax.vmap`, which Triton does not know, one by one.

        tiles: of each head of the first result, [B, T or S, H or K, D].
        """
        batch, _, heads, _ = results[0].shape
        call = functools.partial(
            self.call, results=results, programs=batch * heads * tiles, sizes=self.sizes
        )
        one_by_one = jax.custom_batching.sequential_vmap
        return one_by_one(lambda *operands: call(operands))(*operands)


TritonBounds = tuple[jax.Array, ...]
"""bounds, int32 [2, M, T], and `TileRanges` of each kernel, int32 [4, M, tiles]."""


@dataclass(frozen=True)
class TritonForwardSteps(steps.PlainForm):
    """Forward steps of queries: see `backends.steps`.

    q: [B, T, H, block_d].
    """

    kernel: Kernel
    q: jax.Array

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> TritonBounds:
        """Finds the live tiles of query tiles."""
        bounds = _stacked((k_start, k_end))  # [2, M, T]
        return bounds, _stacked(self.kernel.key_ranges(bounds))

    def attend(
        self, k: jax.Array, v: jax.Array, prepared: TritonBounds, carry: Partial | None
    ) -> Partial:
        """Runs the kernel."""
        sizes = self.kernel.sizes
        batch, length, heads, _ = self.q.shape
        nothing = jnp.zeros((1,), jnp.float32)  # an operand that the kernel never reads
        carry_out, carry_lse = carry or (nothing, nothing)
        k = _widened(k)  # [B, S, K, block_d]
        v = _widened(v)  # [B, S, K, block_d]
        # In the order of the kernel's parameters, which are passed by their places.
        operands = self.q, k, v, *prepared, carry_out, carry_lse
        # Known while compiling: without a carry the kernel holds no code for one.
        kernel = replace(self.kernel, sizes=replace(sizes, has_carry=bool(carry)))
        out = jax.ShapeDtypeStruct((batch, length, heads, sizes.depth), jnp.float32)
        lse = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
        out, lse = kernel.run(sizes.query_tiles, operands, (out, lse))
        return out, lse


@dataclass(frozen=True)
class TritonBackwardSteps(steps.PlainForm):
    """Backward steps of queries: see `backends.steps`.

    q, do: [B, T, H, block_d]. lse, delta: [B, H, T].
    """

    dkv: Kernel
    dq: Kernel
    q: jax.Array
    do: jax.Array
    lse: jax.Array
    delta: jax.Array

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> TritonBounds:
        """Finds the live tiles of key tiles, and of query tiles."""
        bounds = _stacked((k_start, k_end))  # [2, M, T]
        of_keys = self.dkv.query_ranges(bounds)
        of_queries = self.dq.key_ranges(bounds)
        return bounds, _stacked(of_keys), _stacked(of_queries)

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: TritonBounds,
        dq: jax.Array,
        dkv: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the kernels."""
        gradient = jax.ShapeDtypeStruct(k.shape, jnp.float32)  # [B, S, K, D]
        k = _widened(k)  # [B, S, K, block_d]
        v = _widened(v)  # [B, S, K, block_d]
        bounds, of_keys, of_queries = prepared
        # Both kernels compute P and dP from these, each for itself; in the order of
        # their parameters.
        shared = self.q, k, v, self.do, self.lse, self.delta, bounds
        operands = *shared, of_keys
        tiles = self.dkv.sizes.key_tiles
        dk, dv = self.dkv.run(tiles, operands, (gradient, gradient))
        operands = *shared, of_queries, dq
        gradient = jax.ShapeDtypeStruct(dq.shape, jnp.float32)  # [B, T, H, D]
        (dq,) = self.dq.run(self.dq.sizes.query_tiles, operands, (gradient,))
        return dq, *added(dkv, (dk, dv))


@dataclass(frozen=True)
class Launch(steps.Kernels):
    """The backend, with the device, block sizes and runner of its kernels.

    capability: compute capability to compile for, 80 for 8.0; by default that of this
      program's GPU, or of the abstract one in the mesh.
    blocks: block sizes; by default the choice for the chip.
    call: runs a kernel, as `triton_call` does; tests interpret it on a CPU.
    """

    capability: int | None = None
    blocks: KernelBlocks | None = None
    call: Callable = triton_call

    def forward_steps(
        self, q: jax.Array, k: jax.Array, visible: Visible, scores: Scores
    ) -> TritonForwardSteps:
        """Lays out queries, (B, T, H, D).

        Raises:
          ValueError: a type that the kernels do not compute in.
          NotImplementedError: a head that is too large, no GPU to compile for, or no
            jax-triton.
        """
        q, scale_log2, tanh_scale = forward_factors(q, scores)
        factors = scale_log2, tanh_scale
        kernel = self._kernel("forward", (q, k, visible), factors)
        return TritonForwardSteps(kernel, _widened(q))

    def backward_steps(
        self, rows: steps.Rows, k: jax.Array, visible: Visible, scores: Scores
    ) -> TritonBackwardSteps:
        """Lays out q, do, lse and delta; errors as of `forward_steps`."""
        q, do, lse, delta = rows
        factors = exponent_factors(scores)
        return TritonBackwardSteps(
            dkv=self._kernel("backward_dkv", (q, k, visible), factors),
            dq=self._kernel("backward_dq", (q, k, visible), factors),
            q=_widened(q),
            do=_widened(do),
            lse=lse,
            delta=delta,
        )

    def _kernel(
        self,
        name: str,
        operands: tuple[jax.Array, jax.Array, Visible],
        factors: tuple[float, float | None],
    ) -> Kernel:
        """Returns a kernel for q, k and bounds. factors: of `exponent_factors`."""
        q, k, visible = operands
        scale_log2, tanh_scale = factors
        capability = _checked_capability(self.capability, q)
        is_capped = tanh_scale is not None
        all_blocks = self.blocks or chosen_blocks(capability, q, is_capped)
        blocks = getattr(all_blocks, name)
        sizes = Sizes(
            queries=q.shape[1],
            keys=k.shape[1],
            heads=q.shape[2],
            kv_heads=k.shape[2],
            depth=q.shape[3],
            bound_rows=visible.k_start.shape[0],
            scale_log2=float(scale_log2),
            tanh_scale=tanh_scale,
            block_q=blocks.block_q,
            block_k=blocks.block_k,
        )
        call = functools.partial(self.call, name, blocks=blocks, capability=capability)
        return Kernel(sizes, call)


def _checked_capability(capability: int | None, q: jax.Array) -> int:
    """Returns the capability to compile for; refuses what has no kernel."""
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
    try:
        capability = capability or pltriton.get_gpu_info().compute_capability
    except ValueError as error:
        raise NotImplementedError(
            "triton needs an NVIDIA GPU, or a mesh that describes one: name "
            "another implementation, or none"
        ) from error
    if capability < 80:
        raise NotImplementedError(
            f"triton needs a GPU of compute capability 8.0 or newer, this one has "
            f"{capability / 10}: use implementation='blockwise'"
        )
    return capability


def _widened(x: jax.Array) -> jax.Array:
    """Pads rows with zeros to the power of 2 that a tile has: [B, T, H, block_d]."""
    padding = padded_depth(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, padding)))


def _stacked(arrays: Iterable[Array]) -> jax.Array:
    return jnp.stack([jnp.asarray(x) for x in arrays])
