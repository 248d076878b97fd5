"""Stands in for what Pallas' interpreter of Mosaic GPU kernels does not know.

The interpreter runs a kernel on a CPU, warpgroup by warpgroup, and reports races: reads
and writes of shared memory that no barrier orders. It has no WGMMA with an operand in
registers, no accumulator that is written to, and no TMA that adds.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from .shared import CONSUMERS, NativeOps


class EmulatedOps(NativeOps):
    """Computes in shared memory, and at once, what `NativeOps` starts."""

    def acc_smem(self, rows: int, columns: int) -> Any:
        return plgpu.SMEM((CONSUMERS, rows, columns), jnp.float32)

    def run_with_acc(
        self, smem: Any, wg: jax.Array, shape: tuple[int, int], body: Callable
    ) -> Any:
        acc = smem.at[wg]
        acc[...] = jnp.zeros(shape, jnp.float32)
        return body(acc)

    def wgmma(self, acc: jax.Ref, a: jax.Array, b: jax.Ref) -> None:
        product = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        acc[...] = acc[...] + product
        plgpu.commit_smem()  # orders this read of b before the TMA that refills it

    def reciprocal(self, x: jax.Array) -> jax.Array:
        return 1 / x

    def new_sum(self, initial: jax.Array, programs: int) -> jax.Ref:
        # One for each program, as there is no atomic add here; the first has the sum.
        addends = jnp.zeros((programs, *initial.shape), initial.dtype)
        return jax.new_ref(addends.at[0].set(initial))

    def addend(self, sum_ref: jax.Ref, program: jax.Array) -> jax.Ref:
        return sum_ref.at[program]

    def copy_smem_to_gmem_add(self, source: jax.Ref, target: jax.Ref) -> None:
        target[...] = target[...] + source[...]

    def freeze_sum(self, sum_ref: jax.Ref) -> jax.Array:
        return jax.freeze(sum_ref).sum(axis=0)
