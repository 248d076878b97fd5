"""What a ring hands on and writes, in each pass and when it is saved in part."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import layouts as layout
from kernels import masks
from kernels.ring_attention import make_ring_attention
from tests.cases.attention import LAYOUTS
from tests.rings import ring_mesh


def permuted_shapes(program: str) -> list[str]:
    """Type of what each rotation of a lowered program carries."""
    pattern = r"stablehlo\.collective_permute.*: \(tensor<([^>]*)>\)"
    return re.findall(pattern, program)


def lowered(function, *shapes: tuple[int, ...]) -> str:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(function).lower(*arrays).as_text()


@pytest.mark.parametrize("ring_size", [1, 2, 4, 8])
def test_rotations_are_counted_and_carry_key_value_heads_only(ring_size):
    attend = make_ring_attention(ring_mesh(ring_size), layout=layout.Striped())
    shapes = (1, 64, 8, 16), (1, 64, 2, 16), (1, 64, 2, 16)

    def forward(q, k, v):
        return attend(q, k, v, masks.causal())

    def backward(q, k, v):
        return jax.vjp(forward, q, k, v)[1](q)

    local = f"1x2x{64 // ring_size}x16x"  # heads first, as a CPU's tiles are cut
    steps = ring_size - 1
    rotations = permuted_shapes(lowered(forward, *shapes))
    assert rotations == [local + "bf16"] * 2 * steps
    rotations = permuted_shapes(lowered(backward, *shapes))
    # Keys and values twice, once each way through the ring; dk and dv come home too.
    assert sorted(rotations) == sorted(
        [local + "bf16"] * 4 * steps + [local + "f32"] * 2 * (steps and ring_size)
    )


@pytest.mark.parametrize(
    "layout_name, neighbours", [("contiguous", 1), ("zigzag", 2), ("striped", None)]
)
@pytest.mark.parametrize("mask", ["known", "bounds"])
def test_a_window_sends_what_is_read_of_the_neighbours(layout_name, neighbours, mask):
    """By a mask of traced documents, or bounds within a mask; stripes send all."""
    layout_of = LAYOUTS[layout_name]
    attend = make_ring_attention(ring_mesh(8), layout=layout_of)

    def forward(q, k, v, ids):
        if mask == "known":
            return attend(q, k, v, masks.documents(ids) & masks.window(32))
        index = layout.order(layout_of, 8, 1024)
        bounds = masks.documents(ids)(jnp.asarray(index), 1024)
        return attend(q, k, v, bounds, within=masks.window(32))

    arrays = [jax.ShapeDtypeStruct((1, 1024, 4, 16), jnp.bfloat16)] * 3
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    sent = permuted_shapes(jax.jit(forward).lower(*arrays, ids).as_text())
    if neighbours is None:
        assert sent == ["1x4x128x16xbf16"] * 14
    else:
        assert sent == ["1x4x31x16xbf16"] * 2 * neighbours


def written_shards(ring_size: int) -> int:
    """Counts what a ring on a CPU, there and back, writes as large as a shard.

    Beside what arrives, and what the loops over its tiles write in place.
    """
    attend = make_ring_attention(ring_mesh(ring_size), layout=layout.Striped())
    length, heads, depth = 256, 2, 16  # two tiles of queries and of keys
    x = jax.ShapeDtypeStruct((1, length * ring_size, heads, depth), jnp.float32)
    forward = functools.partial(attend, visible=masks.causal())
    program = jax.jit(lambda q, k, v: jax.vjp(forward, q, k, v)[1](q))
    text = program.lower(x, x, x).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    written = re.findall(r" = f32\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", entry)
    sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in written]
    return sum(size >= length * heads * depth for size in sizes)


@pytest.mark.thorough
def test_ring_steps_on_a_cpu_move_no_shard():
    """Shards are cut into tiles, and results joined, once a ring."""
    assert 0 < written_shards(2) == written_shards(4)


@pytest.mark.parametrize("layout_name", ["striped4", "zigzag"])
def test_saved_tail_leaves_half_of_the_keys_to_travel_again(layout_name):
    """Twice forward with half of the queries, and never again with the others."""
    attend = make_ring_attention(
        ring_mesh(4), layout=LAYOUTS[layout_name], keep_tail=True
    )
    names = "attention_out", "attention_lse"
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x):
        return attend(jnp.sin(x), jnp.cos(x), x, masks.causal())

    def loss(x):
        return jnp.square(layer(x).astype(jnp.float32)).sum()

    rotations = permuted_shapes(lowered(jax.grad(loss), (1, 64, 2, 16)))
    whole, half, gradient = "1x2x16x16xbf16", "1x2x8x16xbf16", "1x2x16x16xf32"
    keys = 2 * 3
    assert rotations.count(half) == 2 * keys
    assert rotations.count(whole) == 2 * keys
    assert rotations.count(gradient) == 2 * 4
    assert len(rotations) == 4 * keys + 2 * 4


def test_tail_of_a_mask_that_is_not_causal_is_never_wrong_in_silence(rng):
    """Queries of the first half that see a key of the last halves get nan."""
    q, k, v = (jnp.float32(x) for x in rng.standard_normal((3, 1, 32, 2, 8)))

    def solve(keep_tail, mask):
        attend = make_ring_attention(
            ring_mesh(2),
            layout=layout.Striped(),
            implementation="reference",
            keep_tail=keep_tail,
        )
        return np.array(jax.jit(attend, static_argnums=3)(q, k, v, mask))

    for mask, is_wrong in (masks.full(), True), (masks.prefix(9), False):
        want = solve(False, mask)
        want.reshape(2, 16, 2, 8)[:, :8] *= np.nan if is_wrong else 1
        np.testing.assert_allclose(solve(True, mask), want, rtol=1e-5, atol=1e-6)
