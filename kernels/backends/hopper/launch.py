"""Launches the Hopper (H100, H200) kernels behind `reference`'s signature.

Pads operands to whole tiles, counts in XLA which tiles are live (see `tile_ranges`) and
runs the kernels of `forward`, `backward` and `backward_dq`.

An exponent is one fused multiply-add of a score, the scale and the maximum, so it is
off by the rounding of the latter: by 1 for scores of 1e7, and those of 1e9 overflow.
"""

import functools
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...device import device_kind
from ...merge import Partial, added
from ...precision import LOG2_E, exponent_factors
from ..block_sizes import BlockSizes
from ..tile_ranges import TileRanges, key_ranges, query_ranges
from . import backward as backward_kernel
from . import backward_dq as dq_kernel
from . import backward_tile as dkv_kernel
from . import forward as forward_kernel
from .emulation import EmulatedOps
from .shared import BLOCK_Q, ROWS, SHARED_BYTES, NativeOps

SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)

HOPPER = re.compile(r"NVIDIA G?H\d")
"""Kinds of device: H100, H200, H20, GH200 …"""

TYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
"""Types of operands that the kernels multiply."""

KEY_MULTIPLE = 64
"""Divisor of block_k of the forward kernel."""


@dataclass(frozen=True)
class HopperBlocks:
    """Block sizes of the forward kernel.

    block_k: keys of a tile, a multiple of 64.
    stages: key and value tiles that shared memory holds, at least 2.
    """

    block_k: int
    stages: int

    def __post_init__(self):
        if self.block_k < KEY_MULTIPLE or self.block_k % KEY_MULTIPLE:
            valid = -(-max(self.block_k, 1) // KEY_MULTIPLE) * KEY_MULTIPLE
            raise ValueError(
                f"block_k of hopper must be a multiple of {KEY_MULTIPLE}, got {self}: "
                f"the next is {valid}"
            )
        if self.stages < 2:  # V(n) must arrive while V(n-1) is in use
            raise ValueError(f"stages must be at least 2, got {self}")


FORWARD = {
    64: HopperBlocks(block_k=128, stages=4),
    128: HopperBlocks(block_k=128, stages=2),
    256: HopperBlocks(block_k=64, stages=2),
}
"""By head size, others being padded to the next: the largest tiles without spills."""

BACKWARD = {
    64: {"block_q": 128, "q_stages": 2, "do_stages": 2},
    128: {"block_q": 64, "q_stages": 2, "do_stages": 2},
    256: {"block_q": 64, "q_stages": 2, "do_stages": 2},
}
"""Likewise for the kernel of `backward`."""

BACKWARD_DQ = {
    64: {"block_k": 128, "k_stages": 4, "v_stages": 4},
    128: {"block_k": 128, "k_stages": 2, "v_stages": 2},
    256: {"block_k": 64, "k_stages": 2, "v_stages": 1},
}
"""Likewise for the kernel of `backward_dq`."""

FUSED = 64, 128
"""Head sizes of which registers hold the accumulators of dq, dk and dv at once."""

BLOCK_K = 128
"""Multiple of the keys of each backward tile, as BLOCK_Q is of its queries."""


@dataclass(frozen=True)
class Launch:
    """Options of a launch.

    blocks: block sizes of `forward`; the best for the head size unless given.
    interpret: how Pallas interprets the kernels on a CPU, for tests; None compiles.
    is_deterministic: whether `backward` sums dq in the same order each time, as it does
      for heads of more than 128 numbers in any case. It takes two WGMMAs more a tile.
    """

    blocks: HopperBlocks | None = None
    interpret: plgpu.InterpretGPUParams | None = None
    is_deterministic: bool = False

    @property
    def ops(self) -> NativeOps:
        return NativeOps() if self.interpret is None else EmulatedOps()


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
    """Attends from every query to the keys [k_start, k_end): see `reference`.

    block_sizes: those of a tile; block_q is always 128. `launch.blocks` unless given.

    Raises:
      ValueError: a type that the kernels do not multiply, or tiles that do not fit.
      NotImplementedError: a head that is too large, or there is no Hopper GPU to
        compile for.
    """
    if launch.interpret is None:
        _check_gpu()
    d = _padded_head_size(q)
    blocks = _blocks(launch.blocks or FORWARD[d], d, block_sizes)
    length = q.shape[1]
    more_q, more_k = -length % BLOCK_Q, -k.shape[1] % blocks.block_k
    scale, tanh_scale = exponent_factors(scale, soft_cap)
    if scale <= 0:  # the kernel takes maxima before it scales
        k, scale = k * np.sign(scale).astype(k.dtype), -scale or 1.0
    tile = forward_kernel.ForwardTile(
        block_k=blocks.block_k,
        stages=blocks.stages,
        # -inf times a number that is flushed to 0 would be nan.
        scale=max(scale, SMALLEST),
        tanh_scale=tanh_scale,
        ops=launch.ops,
    )
    k_start, k_end = (_padded_bound(x, more_q) for x in (k_start, k_end))
    live = key_ranges(k_start, k_end, BLOCK_Q, blocks.block_k)
    full = key_ranges(k_start, k_end, ROWS, blocks.block_k)
    operands = forward_kernel.Operands(
        live=_live(live),  # [M, T / 128, 2]
        full=_full(full),  # [M, T / 64, 2]
        k_start=k_start,  # [M, T]
        k_end=k_end,  # [M, T]
        q=_padded(q, more_q, d),  # [B, T, H, d]
        k=_padded(k, more_k, d),  # [B, S, K, d]
        v=_padded(v, more_k, d),  # [B, S, K, d]
        carry=_padded_carry(carry, more_q, d),  # ([B, T, H, d], [B, H, T]) or ()
    )
    out, lse = forward_kernel.forward_call(tile, operands, launch.interpret)
    return out[:, :length, :, : q.shape[-1]], lse[..., :length]


class Step(NamedTuple):
    """Operands of the backward kernels, in whole tiles.

    lse: for exponents of 2.
    """

    q: jax.Array  # [B, T, H, d]
    do: jax.Array  # [B, T, H, d]
    k: jax.Array  # [B, S, K, d]
    v: jax.Array  # [B, S, K, d]
    lse: jax.Array  # [B, H, T]
    delta: jax.Array  # [B, H, T]
    k_start: jax.Array  # [M, T]
    k_end: jax.Array  # [M, T]


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

    One kernel computes all three, in five products a tile. Or one computes dk and dv,
    and another dq: see `Launch`. These take seven products, and nine for heads of more
    than 128 numbers: two consumers then need the same P, for half of dk and dv each.

    block_sizes: no meaning here: registers leave no choice.

    Raises:
      ValueError: a type that the kernels do not multiply.
      NotImplementedError: as `forward`.
    """
    del block_sizes
    if launch.interpret is None:
        _check_gpu()
    d = _padded_head_size(q)
    length, keys = q.shape[1], k.shape[1]
    more_q, more_k = -length % BLOCK_Q, -keys % BLOCK_K
    if soft_cap is not None and keys <= BLOCK_K:
        more_k += BLOCK_K  # with one key tile, ptxas spills 8 bytes of capped scores
    row = (0, 0), (0, 0), (0, more_q)
    step = Step(
        q=_padded(q, more_q, d),
        do=_padded(do, more_q, d),
        k=_padded(k, more_k, d),
        v=_padded(v, more_k, d),
        # P of rows after the end is 0.
        lse=jnp.pad(_exponents(lse, soft_cap), row, constant_values=jnp.inf),
        delta=jnp.pad(delta, row),
        k_start=_padded_bound(k_start, more_q),
        k_end=_padded_bound(k_end, more_q),
    )
    names = "exponent_scale", "tanh_scale"
    factors = exponent_factors(scale, soft_cap)
    constants = dict(zip(names, factors, strict=True), ops=launch.ops)
    dq, dk, dv = _gradients(step, constants, _padded(dq, more_q, d), launch)
    gradients = dq[:, :length], dk[:, :keys], dv[:, :keys]
    dq, dk, dv = (x[..., : q.shape[-1]] for x in gradients)
    return dq, *added(dkv, (dk, dv))


def _gradients(
    step: Step, constants: dict[str, Any], dq: jax.Array, launch: Launch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernels. constants: those of the kernels' tiles.

    They add to dq in its place. XLA forgets that, and loses dq, where it fuses a kernel
    with slices that it reads or updates; it fuses nothing across a barrier.
    """
    step, dq = lax.optimization_barrier((step, dq))
    d = step.q.shape[-1]
    tile = dkv_kernel.BackwardTile(d=d, **BACKWARD[d], **constants)
    operands = _backward_operands(step, tile)
    if d in FUSED and not launch.is_deterministic:
        gradients = backward_kernel.backward_call(tile, operands, dq, launch.interpret)
        return lax.optimization_barrier(gradients)
    dk, dv = backward_kernel.key_gradients_call(tile, operands, launch.interpret)
    tile = dq_kernel.QueryTile(**BACKWARD_DQ[d], **constants)
    operands = _dq_operands(step, tile)
    dq = dq_kernel.query_gradients_call(tile, operands, dq, launch.interpret)
    return lax.optimization_barrier((dq, dk, dv))


def _backward_operands(
    step: Step, tile: dkv_kernel.BackwardTile
) -> dkv_kernel.Operands:
    ranges = functools.partial(
        query_ranges,
        step.k_start,
        step.k_end,
        tile.block_q,
        num_keys=step.k.shape[1],
    )

    def stack(*rows: jax.Array) -> jax.Array:
        """Stacks [..., T] each -> [..., T / block_q, 2, block_q]."""
        tiles = (x.reshape(*x.shape[:-1], -1, tile.block_q) for x in rows)
        return jnp.stack(list(tiles), axis=-2)

    return dkv_kernel.Operands(
        live=_live(ranges(tile.block_k)),  # [M, S / block_k, 2]
        full=_full(ranges(ROWS)),  # [M, S / 64, 2]
        k=step.k,
        v=step.v,
        q=step.q,
        do=step.do,
        lse_delta=stack(step.lse, step.delta),  # [B, H, T / block_q, 2, block_q]
        bounds=stack(step.k_start, step.k_end),  # [M, T / block_q, 2, block_q]
    )


def _dq_operands(step: Step, tile: dq_kernel.QueryTile) -> dq_kernel.Operands:
    ranges = functools.partial(
        key_ranges, step.k_start, step.k_end, block_k=tile.block_k
    )
    return dq_kernel.Operands(
        live=_live(ranges(BLOCK_Q)),  # [M, T / 128, 2]
        full=_full(ranges(ROWS)),  # [M, T / 64, 2]
        **step._asdict(),
    )


def _exponents(lse: jax.Array, soft_cap: float | None) -> jax.Array:
    """Returns lse for exponents of 2, of the scores that the kernels have.

    Capped, these are 1 + tanh.
    """
    if soft_cap is None:
        return lse * LOG2_E
    # Rows without a key: their P is 0 where all scores are finite.
    return jnp.where(lse == -jnp.inf, jnp.inf, (lse + soft_cap) * LOG2_E)


def _live(ranges: TileRanges) -> jax.Array:
    """Stacks live tiles as [M, tiles, 2], half-open."""
    return jnp.stack([ranges.live_begin, ranges.live_end], axis=-1)


def _full(ranges: TileRanges) -> jax.Array:
    """Stacks full tiles as [M, tiles, 2], half-open."""
    return jnp.stack([ranges.full_begin, ranges.full_end], axis=-1)


def _check_gpu() -> None:
    if not HOPPER.match(device_kind()):
        raise NotImplementedError(
            "hopper needs an H100 or H200 GPU, or a mesh that describes one, got "
            f"{device_kind()!r}: name another implementation, or none"
        )


def _padded_head_size(q: jax.Array) -> int:
    """Returns the head size, at least that of q, that there are kernels for."""
    if q.dtype not in TYPES:
        raise ValueError(
            f"for hopper, q.dtype must be bfloat16 or float16, got {q.dtype}: cast q, "
            "k and v, or name another implementation"
        )
    sizes = [size for size in FORWARD if size >= q.shape[-1]]
    if not sizes:
        raise NotImplementedError(
            f"hopper has kernels for heads of up to {max(FORWARD)} numbers, got "
            f"{q.shape=}: name another implementation"
        )
    return min(sizes)


def _blocks(blocks: HopperBlocks, d: int, sizes: BlockSizes | None) -> HopperBlocks:
    if sizes is not None:
        if sizes.block_q != BLOCK_Q:
            raise ValueError(f"block_q of hopper must be {BLOCK_Q}, got {sizes}")
        blocks = replace(blocks, block_k=sizes.block_k)
    needed = forward_kernel.smem_bytes(blocks.block_k, blocks.stages, d)
    if needed > SHARED_BYTES:
        raise ValueError(
            f"shared memory of hopper must be at most {SHARED_BYTES} bytes, got "
            f"{needed} of {blocks} at head size {d}: make block_k or stages smaller"
        )
    return blocks


def _padded(x: jax.Array, rows: int, d: int) -> jax.Array:
    """Pads (B, T, H, D) -> (B, T + rows, H, d), with zeros."""
    return jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, d - x.shape[-1])))


def _padded_bound(bound: jax.Array, rows: int) -> jax.Array:
    """Pads (M, T) -> (M, T + rows), with the last."""
    return jnp.pad(bound, ((0, 0), (0, rows)), mode="edge")


def _padded_carry(carry: Partial | None, rows: int, d: int) -> tuple[jax.Array, ...]:
    if carry is None:
        return ()
    out, lse = carry
    return _padded(out, rows, d), jnp.pad(lse, ((0, 0), (0, 0), (0, rows)))
