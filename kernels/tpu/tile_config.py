"""Constants of the TPU kernels: blocks, scores and their soft cap."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ..precision import LOG2_E
from .block_sizes import TpuBlocks
from .orientation import Orientation
from .vector import NT, dot, reciprocal


class SoftCap(NamedTuple):
    """Caps scores: s becomes limit * tanh(s / limit).

    limit: log2(e) times the soft cap, as scores are exponents of 2.
    offset: what scores come out less: `limit`, or 0 where that is faster.
    has_tanh: whether the chip's own tanh is exact, as from v6e on. On older ones XLA's
      tests allow it an error of 5e-4. There tanh(x) is 1 - 2 / (1 + exp(2 x)), whose 1
      the offset takes away: a subtraction less for the VPU.
    newton_steps: of that reciprocal.
    """

    limit: float
    offset: float
    has_tanh: bool
    newton_steps: int

    @classmethod
    def of(
        cls, soft_cap: float, chip: pltpu.TpuInfo, dtype: jnp.dtype, has_slope: bool
    ) -> "SoftCap":
        """Returns the cap for a chip.

        dtype: of q, whose digits it keeps. has_slope: whether `slope` is needed.

        Raises:
          NotImplementedError: its square, or its error, is too large.
        """
        if not 2**-10 <= soft_cap <= 2**10:
            raise NotImplementedError(
                f"soft_cap must be from 1/1024 to 1024 on a TPU, got {soft_cap}: name "
                "another implementation, or leave out a cap that no score reaches"
            )
        limit, has_tanh = soft_cap * LOG2_E, chip.generation >= 6
        offset = 0.0 if has_tanh and not has_slope else limit
        return cls(limit, offset, has_tanh, 2 if dtype == jnp.float32 else 1)

    def apply(self, scale: float, x: jax.Array) -> jax.Array:
        """Returns capped scores, less `offset`, of products x: [m, n], float32."""
        scale /= self.limit
        if self.has_tanh:
            return self.limit * jnp.tanh(scale * x) - self.offset
        # At most 2^100: a Newton step from 1 / inf gives nan.
        exp = jnp.exp2(jnp.minimum(2 * LOG2_E * scale * x, 100.0))  # [m, n]
        return -2 * self.limit * reciprocal(1.0 + exp, self.newton_steps)

    def slope(self, s: jax.Array) -> jax.Array:
        """Returns limit^2 (1 - tanh^2) at capped scores s less `limit`: [m, n]."""
        return s * (-2 * self.limit - s)


class TileConfig(NamedTuple):
    """Constants of a kernel.

    blocks: what its tiles are cut into.
    scale: log2(e) times the factor on scores, which are exponents of 2 in the kernels.
    precision: of the matmuls.
    soft_cap: of the scores, if any.
    orientation: of scores (forward) and accumulators.
    """

    blocks: TpuBlocks
    scale: float
    precision: lax.Precision
    soft_cap: SoftCap | None
    orientation: Orientation

    def scores(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns scaled and capped scores: [m, D], [n, D] -> [m, n], float32."""
        x = dot(a, b, NT, self.precision)
        return self.soft_cap.apply(self.scale, x) if self.soft_cap else self.scale * x

    def product(
        self, a: jax.Array, b: jax.Array, contracted: tuple[int, int]
    ) -> jax.Array:
        """Returns `Orientation.product` in this precision."""
        return self.orientation.product(a, b, contracted, self.precision)
