"""Tests rings whose operands are in natural order, against one device."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels import masks
from kernels.attention import attention_with_lse
from kernels.ring_attention import make_ring_attention, ring_attention
from tests.cases import table
from tests.cases.attention import QUICK
from tests.kernels.test_ring_transfers import lowered, permuted_shapes
from tests.support.rings import ring_mesh

TOKENS = 96
"""A multiple of what each layout and ring of the table needs."""

MASKS = {
    "documents": masks.documents,
    "segments": masks.segments,
    "documents or first": lambda ids: (
        masks.documents(ids) & masks.window(9) | (masks.first(3) & masks.causal())
    ),
    "window or first": lambda ids: masks.window(4) | masks.first(2) & masks.causal(),
    "bounds": lambda ids: masks.Visible(0 * ids, 0 * ids + jnp.arange(1, TOKENS + 1)),
    "padding": lambda ids: masks.causal() & masks.padding(70),
    "queries": lambda ids: masks.prefix(30),
}


def drawn(rng, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def answers(attend, mask_of, ids, qkv, sinks, cotangents):
    """Returns out, lse, and the gradients of q, k, v and sinks."""

    def run(qkv, sinks):
        return attend(*qkv, mask_of(ids), sinks=sinks)

    results, pull = jax.vjp(run, qkv, sinks)
    return *results, *pull(cotangents)


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize(
    "sizes, is_explicit, mask, options", table("kernels.txt", "natural", layout=layout)
)
def test_rings_in_natural_order_match_one_device(
    sizes, is_explicit, mask, options, rng
):
    """Operands and traced ids in contiguous slices, and the results too."""
    kind = AxisType.Explicit if is_explicit else AxisType.Auto
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = jax.make_mesh(
        (*sizes.values(),), (*sizes,), (kind,) * len(sizes), devices=devices
    )
    attend = make_ring_attention(
        mesh, natural_order=True, with_lse=True, implementation="reference", **options
    )
    batch = "data" if "data" in sizes else None
    heads = "tensor" if "tensor" in sizes else None
    tokens = tuple(name for name in sizes if name not in ("data", "tensor"))
    rows = sizes.get("data", 1)
    queries = TOKENS // 2 if mask == "queries" else TOKENS
    q = drawn(rng, rows, queries, 4, 8)
    k = drawn(rng, rows, TOKENS, 2, 8)
    qkv = q, k, drawn(rng, *k.shape)
    sinks = drawn(rng, 4)
    cotangents = drawn(rng, rows, queries, 4, 8), drawn(rng, rows, 4, queries)
    ids = np.sort(rng.integers(0, 5, (rows, TOKENS)), axis=1).astype(np.int32)

    def one(q, k, v, visible, sinks):
        cap = options.get("soft_cap")
        return attention_with_lse(q, k, v, visible=visible, sinks=sinks, soft_cap=cap)

    want = answers(one, MASKS[mask], ids, qkv, sinks, cotangents)
    array = NamedSharding(mesh, P(batch, tokens, heads))
    row = NamedSharding(mesh, P(batch, heads, tokens))
    ids = jax.device_put(ids, NamedSharding(mesh, P(batch, tokens)))
    qkv = jax.device_put(qkv, array)
    cotangents = jax.device_put(cotangents, (array, row))
    sinks = jax.device_put(sinks, NamedSharding(mesh, P(heads)))
    with jax.set_mesh(mesh):
        got = answers(attend, MASKS[mask], ids, qkv, sinks, cotangents)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)
    assert got[0].sharding.is_equivalent_to(array, 4)
    assert got[1].sharding.is_equivalent_to(row, 3)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("kind", [layout.Mirror(), layout.Striped()], ids=str)
def test_slices_are_exchanged_in_a_shard_map_that_checks_how_values_vary(kind, rng):
    mesh = ring_mesh(2)

    def local(q, k, v):
        index = layout.Contiguous().index(jax.lax.axis_index("ring"), 2, q.shape[1])
        bounds = masks.causal()(index, 2 * k.shape[1])
        options = {"layout": kind, "implementation": "blockwise"}
        return ring_attention(
            q, k, v, *bounds, axis_name="ring", natural_order=True, **options
        )

    spec = P(None, "ring")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    qkv = [drawn(rng, 1, 32, 2, 8) for _ in range(3)]

    def out_and_gradients(attend):
        return jax.jit(
            jax.value_and_grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))
        )

    def one(q, k, v):
        return attention_with_lse(q, k, v, visible=masks.causal())[0]

    got = out_and_gradients(mapped)(*qkv)
    want = out_and_gradients(one)(*qkv)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind, permutes",
    [(layout.Contiguous(), 0), (layout.Mirror(), 1), (layout.Zigzag(), 2)],
)
def test_half_of_a_slice_is_sent_and_a_saved_result_once(kind, permutes):
    """On a ring of 4, of slices of 16 tokens: of 8 query and 2 key/value heads."""
    attend = make_ring_attention(ring_mesh(4), layout=kind, natural_order=True)
    names = jax.checkpoint_policies.save_only_these_names
    kept = names("attention_out", "attention_lse")

    @functools.partial(jax.checkpoint, policy=kept)
    def layer(q, k, v):
        out = attend(q, k, v, masks.causal())
        return out * out  # whose gradient reads out, as an output projection does

    def step(q, k, v):
        return jax.vjp(layer, q, k, v)[1](q)

    sent = permuted_shapes(lowered(step, (1, 64, 8, 16), *[(1, 64, 2, 16)] * 2))
    # q and out; q again, the gradients of out and q.
    assert sent.count("1x8x8x16xbf16") == 5 * permutes
    # k and v; both again, and their gradients.
    assert sent.count("1x8x2x16xbf16") == 6 * permutes


def test_a_window_sends_what_the_neighbours_of_the_layout_read():
    """Not those of natural order: of keys and values, to both sides."""
    attend = make_ring_attention(
        ring_mesh(8), layout=layout.Zigzag(), natural_order=True
    )
    program = lowered(lambda x: attend(x, x, x, masks.window(32)), (1, 1024, 4, 16))
    assert permuted_shapes(program).count("1x4x31x16xbf16") == 4
