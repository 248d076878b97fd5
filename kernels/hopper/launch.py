"""Flash attention on a Hopper GPU (H100, H200): kernels behind `reference`'s signature.

Here operands are padded to whole tiles and the kernels launched: see `hopper_forward`,
`hopper_backward` and `hopper_queries`. What a query sees arrives as intervals, from
which the tiles to visit are counted in XLA, outside of the kernels.

An exponent is one fused multiply-add of a score, the scale and the maximum, so it is
off by the rounding of the latter: by 1 for scores of 1e7, and those of 1e9 overflow.
"""

import functools
import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..block_sizes import BlockSizes
from ..device import device_kind
from ..merge import Partial
from ..precision import gradient_factors
from ..tile_ranges import key_ranges, query_ranges
from . import backward as backward_kernel
from . import backward_dq as queries_kernel
from . import backward_tile as backward_tile
from . import forward as forward_kernel
from . import shared as gpu
from .backward_dq import QueryTile
from .forward import BLOCK_Q, KEYS, ROWS, ForwardTile, Operands

LOG2_E = math.log2(math.e)
SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)

HOPPER = re.compile(r"NVIDIA G?H\d")
"""Kinds of device: H100, H200, H20, GH200 …"""

TYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
"""What the kernels multiply."""


@dataclass(frozen=True)
class HopperBlocks:
    """How a kernel cuts its work.

    block_k: key slots of a tile, a multiple of 64.
    stages: key and value tiles that shared memory holds.
    """

    block_k: int
    stages: int

    def __post_init__(self):
        if self.block_k < KEYS or self.block_k % KEYS or self.stages < 1:
            raise ValueError(
                f"{self}: on a Hopper GPU block_k must be a multiple of {KEYS}, and "
                "stages at least 1"
            )


# By head size, others being padded to the next: the largest tiles that spill nothing.
FORWARD = {
    64: HopperBlocks(128, 4),
    128: HopperBlocks(128, 2),
    256: HopperBlocks(64, 2),
}

# The same for the backward kernels. That of key tiles: block_q, and stages of queries
# and of gradients of results. That of query tiles: block_k, and stages of keys and of
# values.
KEY_PROGRAMS = {64: (128, 2, 2), 128: (64, 2, 2), 256: (64, 2, 2)}
QUERY_PROGRAMS = {64: (128, 4, 4), 128: (128, 2, 2), 256: (64, 2, 1)}

FUSED = 64, 128
"""Head sizes of which registers hold what dq, dk and dv take at once."""

BLOCK_K = 128
"""What the key slots of a backward tile divide, as its queries do BLOCK_Q."""


@dataclass(frozen=True)
class Launch:
    """How a kernel is run.

    blocks: how the work of `forward` is cut; as is best for the head size unless given.
    interpret: how Pallas runs the kernel's steps on a CPU, for tests; not if None.
    is_deterministic: whether `backward` adds up dq in a certain order, as it does for
      heads of more than 128 numbers in any case. That costs two products more a tile.
    """

    blocks: HopperBlocks | None = None
    interpret: gpu.Interpreter | None = None
    is_deterministic: bool = False


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

    block_sizes: those of a tile; block_q is always 128. `launch.blocks` unless given.

    Raises:
      ValueError: a type that the kernels do not multiply, or tiles that do not fit.
      NotImplementedError: a head that is too large, or there is no Hopper GPU to
        compile for.
    """
    if launch.interpret is None:
        _check_gpu()
    depth = _padded_depth(q)
    blocks = _blocks(launch.blocks or FORWARD[depth], depth, block_sizes)
    length = q.shape[1]
    more_q, more_k = -length % BLOCK_Q, -k.shape[1] % blocks.block_k
    if scale <= 0:  # the kernel takes maxima before it scales
        k, scale = k * np.sign(scale).astype(k.dtype), -scale or 1.0
    # -inf times a number that is flushed to 0 would be nan.
    exponent_scale = max(scale * LOG2_E, SMALLEST)
    start, stop = (
        jnp.pad(bound, ((0, 0), (0, more_q)), mode="edge") for bound in (start, stop)
    )
    live = key_ranges(start, stop, BLOCK_Q, blocks.block_k)
    full = key_ranges(start, stop, ROWS, blocks.block_k)
    operands = Operands(
        jnp.stack([live.live_begin, live.live_end], axis=-1),
        jnp.stack([full.full_begin, full.full_end], axis=-1),
        start,
        stop,
        _padded(q, more_q, depth),
        *(_padded(x, more_k, depth) for x in (k, v)),
        _padded_carry(carry, more_q, depth),
    )
    products = gpu.Registers() if launch.interpret is None else gpu.Emulated()
    tile = ForwardTile(blocks.block_k, blocks.stages, exponent_scale, products)
    out, lse = forward_kernel.forward_call(tile, operands, launch.interpret)
    return out[:, :length, :, : q.shape[-1]], lse[..., :length]


class Step(NamedTuple):
    """What the backward kernels are given, in whole tiles.

    lse: for exponents of 2. delta: times the kernels' `scale`.
    """

    q: jax.Array
    d_out: jax.Array
    keys: jax.Array
    values: jax.Array
    lse: jax.Array
    delta: jax.Array
    start: jax.Array
    stop: jax.Array


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

    One kernel computes all three, in five products a tile. Or one computes dk and dv,
    and another dq: see `Launch`. These take seven products, and nine for heads of more
    than 128 numbers: two warpgroups then need the same weights, for half of dk and dv
    each.

    block_sizes: no meaning here: registers leave no choice.

    Raises:
      ValueError: a type that the kernels do not multiply.
      NotImplementedError: as `forward`.
    """
    del block_sizes
    if launch.interpret is None:
        _check_gpu()
    depth = _padded_depth(q)
    before, after = gradient_factors(scale, q.dtype)
    length, keys = q.shape[1], k.shape[1]
    more_q, more_k = -length % BLOCK_Q, -keys % BLOCK_K
    row = (0, 0), (0, 0), (0, more_q)
    step = Step(
        *(_padded(x, more_q, depth) for x in (q, d_out)),
        *(_padded(x, more_k, depth) for x in (k, v)),
        # Rows after the end have no weights.
        jnp.pad(lse * LOG2_E, row, constant_values=jnp.inf),
        jnp.pad(delta * before, row),
        *(jnp.pad(bound, row[1:], mode="edge") for bound in (start, stop)),
    )
    products = gpu.Registers() if launch.interpret is None else gpu.Emulated()
    common = before, scale * LOG2_E, products
    total = _padded(dq if after == 1 else jnp.zeros_like(dq), more_q, depth)
    total, dk, dv = _gradients(step, common, total, launch)
    gradients = total[:, :length], dk[:, :keys], dv[:, :keys]
    total, dk, dv = (x[..., : q.shape[-1]] for x in gradients)
    return (total, dk, dv) if after == 1 else (dq + after * total, after * dk, dv)


def _gradients(
    step: Step, common: tuple, dq: jax.Array, launch: Launch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernels. common: the last fields of their tiles."""
    depth = step.q.shape[-1]
    tile = backward_tile.BackwardTile(depth, *KEY_PROGRAMS[depth], *common)
    operands = _of_key_tiles(step, tile)
    if depth in FUSED and not launch.is_deterministic:
        return backward_kernel.backward_call(tile, operands, dq, launch.interpret)
    dk, dv = backward_kernel.key_gradients_call(tile, operands, launch.interpret)
    tile = QueryTile(*QUERY_PROGRAMS[depth], *common)
    operands = _of_query_tiles(step, tile)
    dq = queries_kernel.query_gradients_call(tile, operands, dq, launch.interpret)
    return dq, dk, dv


def _of_key_tiles(
    step: Step, tile: backward_tile.BackwardTile
) -> backward_tile.Operands:
    ranges = functools.partial(
        query_ranges,
        step.start,
        step.stop,
        tile.block_q,
        num_keys=step.keys.shape[1],
    )
    live, full = ranges(tile.block_k), ranges(backward_tile.ROWS)
    numbers, bounds = (
        jnp.stack([x.reshape(*x.shape[:-1], -1, tile.block_q) for x in pair], axis=-2)
        for pair in ((step.lse, step.delta), (step.start, step.stop))
    )
    return backward_tile.Operands(
        jnp.stack([live.live_begin, live.live_end], axis=-1),
        jnp.stack([full.full_begin, full.full_end], axis=-1),
        step.keys,
        step.values,
        step.q,
        step.d_out,
        numbers,
        bounds,
    )


def _of_query_tiles(step: Step, tile: QueryTile) -> queries_kernel.Operands:
    ranges = functools.partial(key_ranges, step.start, step.stop, block_k=tile.block_k)
    live, full = ranges(BLOCK_Q), ranges(queries_kernel.ROWS)
    return queries_kernel.Operands(
        jnp.stack([live.live_begin, live.live_end], axis=-1),
        jnp.stack([full.full_begin, full.full_end], axis=-1),
        step.start,
        step.stop,
        step.lse,
        step.delta,
        step.q,
        step.d_out,
        step.keys,
        step.values,
    )


def _check_gpu() -> None:
    if not HOPPER.match(device_kind()):
        raise NotImplementedError(
            "hopper needs an H100 or H200 GPU, or a mesh that describes one, got "
            f"{device_kind()!r}: name another implementation, or none"
        )


def _padded_depth(q: jax.Array) -> int:
    """The head size that there is a kernel for."""
    if q.dtype not in TYPES:
        raise ValueError(
            f"hopper computes in bfloat16 or float16, got {q.dtype}: cast q, k and v, "
            "or name another implementation"
        )
    sizes = [size for size in FORWARD if size >= q.shape[-1]]
    if not sizes:
        raise NotImplementedError(
            f"hopper has kernels for heads of up to {max(FORWARD)} numbers, got "
            f"{q.shape=}: name another implementation"
        )
    return min(sizes)


def _blocks(blocks: HopperBlocks, depth: int, sizes: BlockSizes | None) -> HopperBlocks:
    if sizes is not None:
        if sizes.block_q != BLOCK_Q:
            raise ValueError(f"{sizes}: on a Hopper GPU block_q must be {BLOCK_Q}")
        blocks = replace(blocks, block_k=sizes.block_k)
    needed = forward_kernel.shared_bytes(blocks.block_k, blocks.stages, depth)
    if needed > gpu.SHARED_BYTES:
        raise ValueError(
            f"{blocks} take {needed} bytes of shared memory for a head size of "
            f"{depth}, more than {gpu.SHARED_BYTES}: make block_k or stages smaller"
        )
    return blocks


def _padded(x: jax.Array, rows: int, depth: int) -> jax.Array:
    """(B, T, H, D) -> (B, T + rows, H, depth), with zeros."""
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, depth - x.shape[-1])))


def _padded_carry(
    carry: Partial | None, rows: int, depth: int
) -> tuple[jax.Array, ...]:
    if carry is None:
        return ()
    out, lse = carry
    return _padded(out, rows, depth), jnp.pad(lse, ((0, 0), (0, 0), (0, rows)))
