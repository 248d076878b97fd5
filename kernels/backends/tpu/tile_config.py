"""Constants of the TPU kernels: blocks, scores and their soft cap."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ...precision import LOG2_E
from .block_sizes import TpuBlocks
from .vector import NT, Orientation, dot, reciprocal


class SoftCap(NamedTuple):
    """Caps scores: s becomes limit * tanh(s / limit).

    limit: log2(e) times the soft cap, as scores are exponents of 2.
    has_tanh: whether the chip's own tanh is exact, as from v6e on. On older ones XLA's
      tests allow it an error of 5e-4. There tanh(x) is 1 - 2 r, r = 1 / (1 + exp(2 x)),
      and scores come out less `limit`: a subtraction less for the VPU.
    newton_steps: of that reciprocal.
    """

    limit: float
    has_tanh: bool
    newton_steps: int

    @classmethod
    def of(cls, soft_cap: float, chip: pltpu.TpuInfo, dtype: jnp.dtype) -> "SoftCap":
        """Returns the cap for a chip. dtype: of q, whose digits it keeps.

        Raises:
          NotImplementedError: its slope, or its error, is too large.
        """
        if not 2**-10 <= soft_cap <= 2**10:
            raise NotImplementedError(
                f"soft_cap must be from 1/1024 to 1024 on a TPU, got {soft_cap}: name "
                "another implementation, or leave out a cap that no score reaches"
            )
        steps = 2 if dtype == jnp.float32 else 1
        return cls(soft_cap * LOG2_E, chip.generation >= 6, steps)

    @property
    def offset(self) -> float:
        """What scores come out less."""
        return 0.0 if self.has_tanh else self.limit

    def bend(self, scale: float, x: jax.Array) -> jax.Array:
        """Returns tanh, or r, of products x times scale: [m, n], float32."""
        scale /= self.limit
        if self.has_tanh:
            return jnp.tanh(scale * x)
        # At most 2^100: a Newton step from 1 / inf gives nan.
        exp = jnp.exp2(jnp.minimum(2 * LOG2_E * scale * x, 100.0))  # [m, n]
        return reciprocal(1.0 + exp, self.newton_steps)

    def scores(self, bent: jax.Array) -> jax.Array:
        """Returns capped scores, less `offset`."""
        # From r: limit · (1 - 2 r), less limit.
        return (self.limit if self.has_tanh else -2 * self.limit) * bent

    def slope(self, bent: jax.Array) -> jax.Array:
        """Returns 1 - tanh^2."""
        # From r: 1 - (1 - 2 r)².
        return 1.0 - bent * bent if self.has_tanh else 4.0 * bent * (1.0 - bent)


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

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """Returns scores of q [rows, D] and k [keys, D]: [rows, keys], or swapped."""
        a, b = self.orientation.ordered(q, k)
        return self.scores_and_slope(a, b)[0]

    def scores_and_slope(
        self, a: jax.Array, b: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns scaled and capped scores: [m, D], [n, D] -> [m, n], float32.

        And the slope of their soft cap, [m, n], if there is one.
        """
        x = dot(a, b, NT, self.precision)  # [m, n]
        if not self.soft_cap:
            return self.scale * x, None
        bent = self.soft_cap.bend(self.scale, x)  # [m, n]
        return self.soft_cap.scores(bent), self.soft_cap.slope(bent)

    def product(
        self, a: jax.Array, b: jax.Array, contracted: tuple[int, int]
    ) -> jax.Array:
        """Returns `dot` of a, whose other axis are rows, and b: scores, or P V."""
        first, second = self.orientation.ordered(a, b)
        axes = self.orientation.ordered(contracted[0], contracted[1])
        return dot(first, second, axes, self.precision)
