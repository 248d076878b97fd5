"""Parts of a loss by how far into its document a token is: does more context help?"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

FIRST_BOUND = 256
FACTOR = 4


@dataclass(frozen=True)
class PositionParts:
    """Tokens at positions from 0, from the first bound on, from the second on, …

    bounds: positions, increasing.
    """

    bounds: tuple[int, ...]

    @classmethod
    def within(cls, context_tokens: int) -> "PositionParts":
        """Bounds at 256, 1 Ki, 4 Ki, … as far as a context has such positions."""
        bounds, bound = [], FIRST_BOUND
        while bound < context_tokens:
            bounds.append(bound)
            bound *= FACTOR
        return cls(tuple(bounds))

    @property
    def names(self) -> list[str]:
        """One for each part."""
        return [f"from_{start}" for start in (0, *self.bounds)]

    def sums(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        """Sums of values over the tokens of each part, (parts,).

        values: of any shape. positions: int32, of the same.
        """
        starts = jnp.array((0, *self.bounds), jnp.int32)
        ends = jnp.array((*self.bounds, jnp.iinfo(jnp.int32).max), jnp.int32)
        place = positions[..., None]
        is_in_part = (starts <= place) & (place < ends)
        of_part = jnp.where(is_in_part, values[..., None], 0)
        return of_part.reshape(-1, len(starts)).sum(0)
