"""Losses by position add up, and each token counts in its part."""

import jax.numpy as jnp
import numpy as np

from models.position_parts import PositionParts


def test_a_context_has_the_parts_that_it_reaches() -> None:
    names = {tokens: PositionParts.within(tokens).names for tokens in (256, 257, 9000)}
    assert names == {
        256: ["from_0"],
        257: ["from_0", "from_256"],
        9000: ["from_0", "from_256", "from_1024", "from_4096"],
    }


def test_sums_are_those_of_the_tokens_between_bounds(rng: np.random.Generator) -> None:
    positions = rng.integers(0, 30, (3, 40)).astype(np.int32)
    positions[0, :4] = 9, 10, 19, 20
    values = rng.standard_normal(positions.shape).astype(np.float32)
    parts = PositionParts((10, 20))
    sums = parts.sums(jnp.asarray(values), jnp.asarray(positions))
    wanted = [
        values[(positions >= low) & (positions < high)].sum()
        for low, high in ((0, 10), (10, 20), (20, 30))
    ]
    np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-5)


def test_one_part_is_all() -> None:
    values = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    positions = jnp.full((2, 3), 1000, jnp.int32)
    assert PositionParts(()).sums(values, positions).tolist() == [15]
