"""Flash attention on a TPU: the kernels, steps of which `backends.steps` describes.

Splits the operands into tiles (`tile_layout`), computes in XLA which tiles are live,
from the intervals of keys that queries attend to, and runs the kernels of `forward`
and `backward`. A ring prepares the queries, and the tiles of all its steps, once: see
`backends.steps`. Letters of shapes: see `kernels.backends.tpu`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...masks import Array, Visible
from ...merge import Partial, added
from ...precision import LOG2_E, Scores
from ..steps import Kernels, PlainForm, Rows
from . import backward as backward_kernel
from . import forward as forward_kernel
from .block_sizes import (
    Cut,
    TpuBlocks,
    choose_cut,
    compiler_bytes,
    vmem_limit,
)
from .setup import Setup, TpuBounds, row_of
from .softmax import NOTHING, Carry
from .tile_config import SoftCap


@dataclass(frozen=True)
class TpuForwardSteps:
    """Forward steps of queries: see `backends.steps`.

    q: [M, X, G, query tiles * block_q, D]. out_type: of out.
    """

    setup: Setup
    q: jax.Array
    out_type: Any = jnp.float32

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> TpuBounds:
        """Finds the live tiles of query tiles."""
        return self.setup.prepare(k_start, k_end, owns_keys=False)

    def begin(self, partial: Partial) -> Carry:
        """Lays out a partial result as the kernel reads it."""
        setup = self.setup
        cut = setup.cut
        out, lse = partial
        # NOTHING for -inf: the kernel subtracts row maxima from each other.
        lse = jnp.maximum(lse * LOG2_E - setup.offset, NOTHING)  # (B, H, T)
        return Carry(
            out=cut.orientation.swap(setup.tiling.split_heads(setup.pad_lanes(out))),
            lse=cut.packed(setup.tiling.split_rows(lse)),
        )

    def attend(
        self, k: jax.Array, v: jax.Array, prepared: TpuBounds, carry: Carry | None
    ) -> Carry:
        """Runs the kernel."""
        setup = self.setup
        operands = forward_kernel.ForwardOperands(
            numbers=prepared.numbers,
            row_bounds=prepared.bounds,
            q=self.q,  # [M, X, G, query tiles * block_q, D]
            k=setup.keys(k),  # [M, X, key tiles, block_k, D]
            v=setup.keys(v),  # [M, X, key tiles, block_k, D]
            carry=carry or (),
        )
        # The cores of a chip share out heads, or where there is one, its query tiles.
        heads = self.q.shape[0] * self.q.shape[1]
        is_in_order = heads % setup.chip.num_cores == 0
        tiles_of_head = "arbitrary" if is_in_order else "parallel"
        options = setup.options(tiles_of_head, 2, operands)
        out, lse = forward_kernel.forward_call(
            setup.config, operands, is_in_order, self.out_type, **options
        )
        return Carry(out, lse)

    def finish(self, carry: Carry) -> Partial:
        """Returns out (B, T, H, D) and lse (B, H, T)."""
        setup = self.setup
        cut, tiling = setup.cut, setup.tiling
        out = tiling.join_heads(cut.orientation.swap(carry.out))[..., : setup.depth]
        # [M, X, query tiles, R]
        lse = carry.lse.reshape(*carry.lse.shape[:3], cut.blocks.stacked_rows)
        lse = tiling.join_rows(lse)  # (B, H, T)
        natural = (lse + setup.offset) / LOG2_E  # (B, H, T)
        return out, jnp.where(lse <= NOTHING, -jnp.inf, natural)  # nan must show


@dataclass(frozen=True)
class TpuBackwardSteps(PlainForm):
    """Backward steps of queries: see `backends.steps`.

    q, do: [M, X, G, query tiles * block_q, D]. lse_delta: lse in base 2, and delta,
      [M, X, query tiles, 2, R].
    dk_scale: factor on dk where dk and dv are results, in 16 bits.
    """

    setup: Setup
    q: jax.Array
    do: jax.Array
    lse_delta: jax.Array
    dk_scale: float | None = None

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> TpuBounds:
        """Finds the live tiles of key tiles."""
        return self.setup.prepare(k_start, k_end, owns_keys=True)

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: TpuBounds,
        dq: jax.Array,
        dkv: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the kernel, which adds to dk and dv in place if it can."""
        setup = self.setup
        cut, tiling = setup.cut, setup.tiling
        in_place = dkv is not None and cut.adds_to_dkv
        repeats = cut.blocks.stacked_rows // prepared.bounds.shape[-1]
        operands = backward_kernel.BackwardOperands(
            numbers=prepared.numbers,
            k=setup.keys(k),  # [M, X, key tiles, block_k, D]
            v=setup.keys(v),  # [M, X, key tiles, block_k, D]
            q=self.q,
            do=self.do,
            lse_delta=self.lse_delta,
            row_bounds=jnp.tile(prepared.bounds, repeats),  # [M, query tiles, 2, R]
            dq=cut.orientation.swap(tiling.split_heads(setup.pad_lanes(dq))),
            dkv=tuple(setup.key_sums(x) for x in dkv) if dkv and in_place else (),
        )
        options = setup.options("arbitrary", 5, operands)
        # Of several stacks they are summed up after the kernel.
        is_sum = setup.row.dtype == jnp.float32 or cut.stacks > 1
        dk_scale = None if is_sum else self.dk_scale
        dq, dk, dv = backward_kernel.backward_call(
            setup.config, operands, cut.is_dq_resident, dk_scale, **options
        )
        dq = cut.orientation.swap(dq)  # [M, X, G, query tiles * block_q, D]
        dk = cut.orientation.swap(dk)  # [M, X, key tiles * block_k, D]
        dv = cut.orientation.swap(dv)  # [M, X, key tiles * block_k, D]
        dk = cut.sum_heads(tiling.join_keys(dk))  # (B, S, K, D)
        dv = cut.sum_heads(tiling.join_keys(dv))  # (B, S, K, D)
        dq = tiling.join_heads(dq)[..., : setup.depth]  # (B, T, H, D), not padded
        dkv_here = dk[..., : setup.depth], dv[..., : setup.depth]
        return dq, *added(None if in_place else dkv, dkv_here)


@dataclass(frozen=True)
class Launch(Kernels):
    """The backend, with the chip, blocks and interpreter of its kernels.

    chip: the TPU that it is compiled for; the one of this program unless given.
    blocks: block sizes; the best ones known for the chip unless given.
    interpret: whether (or how) Pallas interprets the kernel on any device, for tests.
    """

    chip: pltpu.TpuInfo | None = None
    blocks: TpuBlocks | None = None
    interpret: bool | pltpu.InterpretParams = False

    def forward_steps(
        self, q: jax.Array, k: jax.Array, visible: Visible, scores: Scores
    ) -> TpuForwardSteps:
        """Cuts and lays out queries, (B, T, H, D).

        Raises:
          ValueError: a type that TPUs do not multiply, or blocks that do not fit.
          NotImplementedError: there is no TPU to compile for, or it has too little
            memory for any tiles, or for the bounds of all of them; or a soft cap out of
            range.
        """
        setup = self._setup(cut_forward, (q, k, visible.k_start), scores)
        return TpuForwardSteps(setup, setup.queries(q))

    def backward_steps(
        self, rows: Rows, k: jax.Array, visible: Visible, scores: Scores
    ) -> TpuBackwardSteps:
        """Cuts and lays out q, do, lse and delta; errors as of `forward_steps`."""
        q, do, lse, delta = rows
        setup = self._setup(cut_backward, (q, k, visible.k_start), scores)
        # Less the offset, P comes out times 2**offset. Of rows without keys it is 0.
        lse = jnp.where(lse == -jnp.inf, -NOTHING, lse * LOG2_E - setup.offset)
        # Rows after the end get lse, delta, q and do of 0: they add nothing.
        lse = setup.tiling.split_rows(lse)  # [M, X, query tiles, R]
        delta = setup.tiling.split_rows(delta)  # [M, X, query tiles, R]
        q = setup.queries(q)  # [M, X, G, query tiles * block_q, D]
        do = setup.queries(do)  # [M, X, G, query tiles * block_q, D]
        return TpuBackwardSteps(setup, q, do, jnp.stack((lse, delta), 3))

    def _setup(
        self,
        choose: Callable[..., Cut],
        operands: tuple[jax.Array, jax.Array, Array],
        scores: Scores,
    ) -> Setup:
        """Cuts a problem. choose: of the next two. operands: q, k and k_start."""
        q, k, _ = operands
        if q.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(
                f"pallas_tpu computes in bfloat16 or float32, got {q.dtype}: cast q, k "
                "and v"
            )
        try:
            chip = self.chip or pltpu.get_tpu_info()
        except ValueError as error:
            raise NotImplementedError(
                "pallas_tpu needs a TPU, or a mesh that describes one: name another "
                "implementation, or none"
            ) from error
        cap = None
        if scores.soft_cap is not None:
            cap = SoftCap.of(scores.soft_cap, chip, q.dtype)
        cut = choose(chip, q, k, self.blocks, is_capped=bool(cap))
        return Setup.of(chip, cut, operands, (scores.scale, cap), self.interpret)


def cut_forward(
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    blocks: TpuBlocks | None = None,
    is_capped: bool = False,
) -> Cut:
    """Chooses the forward kernel's blocks; blocks, errors: as `choose_cut`."""
    held_bytes = functools.partial(forward_kernel.held_bytes, row_of(q, chip))
    return choose_cut(("forward", is_capped), chip, q, k, held_bytes, blocks)


def cut_backward(
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    blocks: TpuBlocks | None = None,
    is_capped: bool = False,
) -> Cut:
    """Chooses the backward kernel's blocks, and what it keeps in VMEM beside them."""
    row = row_of(q, chip)
    limit = vmem_limit(chip)

    def held(cut: Cut) -> backward_kernel.Held:
        query_tiles = -(-q.shape[1] // cut.sizes.block_q)
        return backward_kernel.held_bytes(cut.blocks, row, query_tiles, limit)

    kernel = "backward", is_capped
    cut = choose_cut(kernel, chip, q, k, lambda cut: held(cut).memory, blocks)
    memory, sums, is_dq_resident = held(cut)
    has_room = memory + sums + compiler_bytes(q) <= limit
    return cut._replace(
        is_dq_resident=is_dq_resident,
        # Gradients of several stacks are summed up after the kernel.
        adds_to_dkv=has_room and cut.stacks == 1,
    )
