"""What a ring hands on and writes, in each pass and when it is saved in part."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import layouts as layout
from kernels import masks
from kernels.ring import routes
from kernels.ring_attention import make_ring_attention
from tests.cases.attention import LAYOUTS
from tests.support.rings import ring_mesh


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
    "one_way, rotations", [(True, ["1x2"] * 6), (False, ["1x1"] * 12)]
)
def test_tpus_send_half_of_the_heads_each_way_if_not_all_one_way(
    one_way, rotations, monkeypatch
):
    monkeypatch.setattr(routes, "rings_both_ways", lambda kind: True)
    layout_of = layout.Striped()
    attend = make_ring_attention(ring_mesh(4), layout=layout_of, one_way=one_way)
    program = lowered(lambda x: attend(x, x, x, masks.causal()), (1, 64, 2, 16))
    assert permuted_shapes(program) == [f"{x}x16x16xbf16" for x in rotations]


@pytest.mark.parametrize("one_way, shifts", [(True, {1}), (False, {1, 3})])
@pytest.mark.parametrize("kind", [layout.Zigzag(), layout.Mirror()], ids=str)
def test_counted_shards_of_zigzag_go_one_way_where_asked(kind, one_way, shifts):
    mesh = jax.make_mesh((2, 4), ("data", "ring"))
    attend = make_ring_attention(mesh, layout=kind, count_steps=True, one_way=one_way)
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    program = jax.jit(lambda x, ids: attend(x, x, x, masks.documents(ids)))
    program = program.trace(x, ids)
    text = program.lower().as_text()
    pairs = re.findall(r"source_target_pairs = dense<\[\[0, (\d)\]", text)
    assert {int(target) for target in pairs} == shifts
    # Keys and values, in the first step and in the loop; the last sends none.
    assert len(pairs) == 2 * 2 * len(shifts)
    # All rings take as many steps: a device would wait for those that take fewer.
    (counted,) = re.findall(r"pmax\[\s*axes=\((.*)\)", str(program.jaxpr))
    assert {*re.findall(r"\w+", counted)} == {"data", "ring"}


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
