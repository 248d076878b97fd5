"""Flash attention on a TPU: the kernels, steps of which `backends.steps` describes.

Splits the operands into tiles (`tile_layout`), computes in XLA which tiles are live,
from the intervals of keys that queries attend to, and runs the kernels of `forward`
and `backward`. A ring prepares the queries, and the tiles of all its steps, once: see
`backends.steps`. Letters of shapes: see `kernels.backends.tpu`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...masks import Visible
from ...merge import Partial, added
from ...precision import LOG2_E, Scores
from ..steps import Kernels, PlainForm, Rows
from . import backward as backward_kernel
from . import forward as forward_kernel
from .block_sizes import (
    TPU_BACKWARD,
    TPU_BACKWARD_CAPPED,
    TPU_FORWARD,
    TPU_FORWARD_CAPPED,
    Cut,
    TpuBlocks,
    choose_cut,
    vmem_limit,
)
from .query_tile import Carry
from .setup import Seen, Setup, row_of
from .softmax import NOTHING
from .tile_config import SoftCap


@dataclass(frozen=True)
class Forward:
    """`backends.steps.ForwardSteps` of queries.

    q: [M, X, G, query tiles * block_q, D].
    """

    setup: Setup
    q: jax.Array

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Seen:
        """Finds the live tiles of query tiles."""
        return self.setup.prepare(k_start, k_end, owns_keys=False)

    def begin(self, partial: Partial) -> Carry:
        """Lays out a partial result as the kernel reads it."""
        setup, cut = self.setup, self.setup.cut
        out, lse = partial
        lse = jnp.maximum(lse * LOG2_E - self.setup.offset, NOTHING)
        return Carry(
            out=cut.orientation.swap(setup.tiling.split_heads(setup.pad_lanes(out))),
            lse=cut.packed(setup.tiling.split_rows(lse)),
        )

    def attend(
        self, k: jax.Array, v: jax.Array, seen: Seen, carry: Carry | None
    ) -> Carry:
        """Runs the kernel."""
        setup, cut = self.setup, self.setup.cut
        operands = forward_kernel.Operands(
            numbers=seen.numbers,
            row_bounds=cut.packed(setup.row_bounds(seen)),
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
        found = forward_kernel.forward_call(
            setup.config, operands, is_in_order, **options
        )
        return Carry(*found)

    def finish(self, carry: Carry) -> Partial:
        """Returns out (B, T, H, D) and lse (B, H, T)."""
        setup, cut, tiling = self.setup, self.setup.cut, self.setup.tiling
        out = tiling.join_heads(cut.orientation.swap(carry.out))[..., : setup.depth]
        rows = *carry.lse.shape[:3], cut.blocks.stacked_rows
        lse = tiling.join_rows(carry.lse.reshape(rows))  # (B, H, T)
        natural = (lse + self.setup.offset) / LOG2_E
        return out, jnp.where(lse <= NOTHING, -jnp.inf, natural)  # nan must show


@dataclass(frozen=True)
class Backward(PlainForm):
    """`backends.steps.BackwardSteps` of queries.

    q, do: [M, X, G, query tiles * block_q, D]. lse_delta: lse in base 2, and delta,
      [M, X, query tiles, 2, R].
    """

    setup: Setup
    q: jax.Array
    do: jax.Array
    lse_delta: jax.Array

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Seen:
        """Finds the live tiles of key tiles."""
        return self.setup.prepare(k_start, k_end, owns_keys=True)

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        seen: Seen,
        dq: jax.Array,
        dkv: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the kernel."""
        setup, cut, tiling = self.setup, self.setup.cut, self.setup.tiling
        operands = backward_kernel.Operands(
            numbers=seen.numbers,
            k=setup.keys(k),  # [M, X, key tiles, block_k, D]
            v=setup.keys(v),  # [M, X, key tiles, block_k, D]
            q=self.q,
            do=self.do,
            lse_delta=self.lse_delta,
            row_bounds=setup.row_bounds(seen),  # [M, query tiles, 2, R]
            dq=cut.orientation.swap(tiling.split_heads(setup.pad_lanes(dq))),
        )
        options = setup.options("arbitrary", 5, operands)
        gradients = backward_kernel.backward_call(
            setup.config, operands, cut.is_dq_resident, **options
        )
        dq, dk, dv = (cut.orientation.swap(x) for x in gradients)
        dk, dv = (cut.sum_heads(tiling.join_keys(x)) for x in (dk, dv))  # (B, S, K, D)
        gradients = tiling.join_heads(dq), dk, dv  # dq (B, T, H, D)
        dq, dk, dv = (x[..., : setup.depth] for x in gradients)
        return dq, *added(dkv, (dk, dv))


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
    ) -> Forward:
        """Cuts and lays out queries, (B, T, H, D).

        Raises:
          ValueError: a type that TPUs do not multiply, or blocks that do not fit.
          NotImplementedError: there is no TPU to compile for, or it has too little
            memory for any tiles, or for the bounds of all of them; or a soft cap out of
            range.
        """
        setup = self._setup(cut_forward, (q, k, visible.k_start), scores)
        return Forward(setup, setup.queries(q))

    def backward_steps(
        self, rows: Rows, k: jax.Array, visible: Visible, scores: Scores
    ) -> Backward:
        """Cuts and lays out q, do, lse and delta; errors as of `forward_steps`."""
        q, do, lse, delta = rows
        setup = self._setup(cut_backward, (q, k, visible.k_start), scores)
        # Less the offset, P comes out times 2**offset. Of rows without keys it is 0.
        lse = jnp.where(lse == -jnp.inf, -NOTHING, lse * LOG2_E - setup.offset)
        lse, delta = map(setup.tiling.split_rows, (lse, delta))  # [M, X, tiles, R]
        operands = setup.queries(q), setup.queries(do), jnp.stack((lse, delta), 3)
        return Backward(setup, *operands)

    def _setup(
        self, choose: Callable, operands: tuple[jax.Array, ...], scores: Scores
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
        scale, cap = scores
        cap = None if cap is None else SoftCap.of(cap, chip, q.dtype)
        cut = choose(chip, q, k, self.blocks, is_capped=bool(cap))
        return Setup.of(chip, cut, operands, (scale, cap), self.interpret)


def cut_forward(
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    blocks: TpuBlocks | None = None,
    is_capped: bool = False,
) -> Cut:
    """Chooses the forward kernel's blocks; blocks, errors: as `choose_cut`."""
    table = TPU_FORWARD_CAPPED if is_capped else TPU_FORWARD
    held_bytes = functools.partial(forward_kernel.held_bytes, row_of(q, chip))
    return choose_cut(table, chip, q, k, held_bytes, blocks)


def cut_backward(
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    blocks: TpuBlocks | None = None,
    is_capped: bool = False,
) -> Cut:
    """Chooses the backward kernel's blocks, and whether dq of a head stays in VMEM."""
    row, limit = row_of(q, chip), vmem_limit(chip)

    def memory(cut: Cut) -> tuple[int, bool]:
        query_tiles = -(-q.shape[1] // cut.sizes.block_q)
        return backward_kernel.held_bytes(cut.blocks, row, query_tiles, limit)

    table = TPU_BACKWARD_CAPPED if is_capped else TPU_BACKWARD
    cut = choose_cut(table, chip, q, k, lambda cut: memory(cut)[0], blocks)
    return cut._replace(is_dq_resident=memory(cut)[1])
