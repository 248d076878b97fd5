"""Rings of queries that attend to several intervals of keys, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import layouts as layout
from kernels import masks
from kernels.attention import attention
from kernels.backends import reference
from kernels.masks import Visible
from kernels.ring import routes
from kernels.ring_attention import make_ring_attention
from tests.cases import table
from tests.cases.attention import LAYOUTS, Case
from tests.cases.unions import UNIONS
from tests.support.rings import (
    assert_as_on_one_device,
    ring_mesh,
    ring_with,
    sharded_ring,
)
from tests.support.simulated import BACKENDS

SHORT = {"group": 2, "head_dim": 16, "heads": 4}


def cases():
    """Each mask in each layout, in rings of 1 to 8; and what else a ring can be.

    Slow: masks but trees, each in three of the layouts.
    """
    extras, n = ("sinks-cap", "", "sinks", "cap"), 0
    for i, name in enumerate(UNIONS):
        for j, shape in enumerate(LAYOUTS):
            case = Case(
                1 + n % 8, shape, name, length=61, extras=extras[n % 4], **SHORT
            )
            is_slow = name != "tree" and i % 4 != j
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(case, "blockwise", jnp.float32, {}, marks=marks)
            n += 3
    names = {"jnp": jnp, "routes": routes}
    others = table("kernels.txt", "union", **names)
    for implementation, dtype, ring_size, options in others:
        name = "shared_prefix" if implementation == "hopper" else "tree"
        case = Case(ring_size, "zigzag", name, length=61, extras="sinks-cap", **SHORT)
        yield pytest.param(case, implementation, dtype, options)


@pytest.mark.thorough(quick=2)
@pytest.mark.usefixtures("steps_in_a_loop")
@pytest.mark.parametrize("case, implementation, dtype, options", list(cases()))
def test_ring_of_intervals_matches_one_device_in_float64(
    case, implementation, dtype, options, rng
):
    make, slices = ring_with(**options), options.get("slices", 1)
    assert_as_on_one_device(rng, case, BACKENDS[implementation], dtype, make, slices)


def bounds_of(name: str, tokens: int) -> Visible:
    return UNIONS[name](tokens, tokens)(np.arange(tokens, dtype=np.int32), tokens)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("shape", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_mask", [True, False])
def test_rings_of_global_arrays_take_masks_and_bounds_of_intervals(shape, is_mask, rng):
    """Also layers with a window of their own, and a mask within which bounds are."""
    order, tokens = (LAYOUTS[shape], 4), 64
    q, k, v = rng.standard_normal((3, 1, tokens, 2, 8), np.float32)
    mask, window = UNIONS["shared_prefix"](tokens, tokens), masks.window(23)
    want = attention(q, k, v, visible=mask & window, implementation="reference")
    attend = make_ring_attention(
        ring_mesh(4), layout=order[0], implementation="reference", check_masks=True
    )
    index = layout.order(*order, tokens)
    visible = mask if is_mask else mask(index, tokens)
    q, k, v = (layout.permute(x, *order) for x in (q, k, v))
    out = jax.jit(lambda *qkv: attend(*qkv, visible, within=window))(q, k, v)
    np.testing.assert_allclose(layout.unpermute(out, *order), want, atol=1e-5)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("shape", ["contiguous", "zigzag"])
def test_gradients_of_neighbours_keys_come_home_once(shape, rng):
    """Those of a window's keys do while the first tokens still go around."""
    ring, tokens = 6, 96
    mask = masks.window(5) | masks.first(2) & masks.causal()
    *qkv, do = np.float32(rng.standard_normal((4, 1, tokens, 2, 8)))
    attend = make_ring_attention(
        ring_mesh(ring), layout=LAYOUTS[shape], implementation="reference"
    )

    def on_ring(*qkv):
        in_order = (layout.permute(x, LAYOUTS[shape], ring) for x in qkv)
        return layout.unpermute(attend(*in_order, mask), LAYOUTS[shape], ring)

    def on_one_device(*qkv):
        return attention(*qkv, visible=mask, implementation="reference")

    got, want = (
        jax.jit(lambda *qkv, run=run: jax.vjp(run, *qkv)[1](do))(*qkv)
        for run in (on_ring, on_one_device)
    )
    for found, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_first_tokens_go_around_alone():
    """Beside a window: a tile of the first shard, and what neighbours read."""
    order, tokens = (LAYOUTS["contiguous"], 8), 8192
    mask = masks.window(256) | masks.first(4) & masks.causal()
    outline = mask.outline(layout.order(*order, tokens), tokens)
    route = routes.route_within(outline, *order, counts=False)
    chunks = route.schedule(8, 1, tokens // 8).chunks[1:]
    found = {chunk.slots: len(chunk.stops) for chunk in chunks}
    assert found == {(0, 128): 7, (768, 1024): 1}


class Counted:
    """The reference, whose runs are counted while a program runs."""

    def __init__(self):
        self.runs = 0

    def count(self):
        self.runs += 1

    def forward(self, *operands, **options):
        jax.debug.callback(self.count)
        return reference.forward(*operands, **options)

    def backward(self, *operands, **options):
        jax.debug.callback(self.count)
        return reference.backward(*operands, **options)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("name", ["shared_prefix", "first_in_window"])
def test_intervals_that_no_query_of_a_device_sees_cost_no_kernel(name, rng):
    tokens, ring_size, shape = 64, 4, LAYOUTS["contiguous"]
    visible, counted = bounds_of(name, tokens), Counted()
    shards = [np.split(bound, ring_size, axis=2) for bound in visible]
    seen = 0
    for device, shard in np.ndindex(ring_size, ring_size):
        mine = (bound[device] for bound in shards)
        slots = (shape.count(shard, x, ring_size, tokens // ring_size) for x in mine)
        seen += int(np.less(*slots).any(axis=(1, 2)).sum())
    assert 0 < seen < ring_size**2 * len(visible.k_start)
    arrays = rng.standard_normal((4, 1, tokens, 2, 8), np.float32)
    d_lse = np.zeros((1, 2, tokens), np.float32)
    run = jax.jit(sharded_ring(ring_size, "contiguous", counted))
    jax.block_until_ready(run(*arrays, d_lse, *visible, None))
    jax.effects_barrier()
    assert counted.runs == 2 * seen
