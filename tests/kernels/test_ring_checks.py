"""Tests of arguments of rings: axes, shards, bounds in layout order, padding."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels import masks
from kernels.attention import attention
from kernels.checks import check_increasing
from kernels.masks import Visible
from kernels.ring.routes import Counted
from kernels.ring_attention import make_ring_attention, ring_attention
from tests.cases import table
from tests.support.rings import ring_mesh

OPTIONS = {"layout": layout, "SimpleNamespace": SimpleNamespace}


@pytest.mark.parametrize("options, words", table("kernels.txt", "ring", **OPTIONS))
def test_a_ring_that_cannot_be_made_is_refused(options, words):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "ring"))
    with pytest.raises(ValueError, match=words):
        make_ring_attention(mesh, **{"layout": layout.Striped(), **options})


def test_bounds_must_not_decrease_in_the_order_of_their_index():
    """In the order of the queries they do, where these are not in order."""
    attend = make_ring_attention(
        ring_mesh(2), layout=layout.Zigzag(), implementation="reference"
    )
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16, 2, 8), np.float32)

    def run(visible):
        return jax.jit(lambda q, k, v: attend(q, k, v, visible))(q, k, v)

    index = layout.order(layout.Zigzag(), 2, 16)
    visible = masks.window(3)(index, 16)
    assert (np.diff(visible.k_start) < 0).any()
    np.testing.assert_array_equal(run(visible), run(masks.window(3)))
    visible.k_end[0, index == 5] = 4
    with pytest.raises(ValueError, match="k_end of row 0: 5 at 4 and 4 after it"):
        run(visible)
    with pytest.raises(ValueError, match="k_start of row 0: .* after it"):
        run(Visible(np.sort(visible.k_start), visible.k_end))


def test_a_ring_of_fewer_queries_than_keys_finds_them(rng):
    """The shards that a window reads are not those before the queries' own."""
    attend = make_ring_attention(
        ring_mesh(4), layout=layout.Contiguous(), implementation="reference"
    )
    q, k, v = rng.standard_normal((3, 1, 64, 2, 8), np.float32)
    q = q[:, :32]
    want = attention(q, k, v, visible=masks.window(4), implementation="reference")
    got = attend(q, k, v, masks.window(4))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("is_local", [False, True])
def test_padding_on_a_ring_may_hold_anything(is_local):
    """With a length for each row; for local shards `fill_padding` marks it."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "ring"))
    order = layout.Striped(), 2
    index = layout.order(*order, 16)
    mask = masks.causal() & masks.padding(np.array([[9], [14]]))
    is_padding = index >= np.array([[9], [14]])

    def attend(q, k, v):
        if not is_local:
            return make_ring_attention(mesh, layout=order[0])(q, k, v, mask)
        local = functools.partial(ring_attention, axis_name="ring", layout=order[0])
        spec = P("data", "ring")
        sharded = jax.shard_map(
            local, mesh=mesh, in_specs=(spec,) * 5, out_specs=spec, check_vma=False
        )
        q, k, v = (mask.fill_padding(x, index) for x in (q, k, v))
        return mask.fill_padding(sharded(q, k, v, *mask(index, 16)), index)

    @jax.jit
    def run(q, k, v, do):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(do)

    arrays = np.random.default_rng(0).standard_normal((4, 2, 16, 2, 8), np.float32)
    arrays[:, is_padding] = 0
    want = run(*arrays)
    arrays[:, is_padding] = np.nan
    for got, expected in zip(run(*arrays), want, strict=True):
        assert (np.asarray(expected)[is_padding] == 0).all()
        np.testing.assert_array_equal(got, expected)


def local_ring(x, kind, **options):
    """Traces attention of local shards of x (B, S, H, D) by a ring of two."""

    def local(x):
        bound = jnp.zeros((1, x.shape[1]), jnp.int32)
        run = functools.partial(ring_attention, axis_name="ring", layout=kind)
        return run(x, x, x, bound, bound, **options)

    spec = P(None, "ring")
    run = jax.shard_map(local, mesh=ring_mesh(2), in_specs=spec, out_specs=spec)
    return jax.eval_shape(run, x)


def test_kernels_are_refused_where_a_shard_map_checks_how_values_vary():
    x, backend = jnp.ones((1, 8, 2, 8)), SimpleNamespace(forward=None, backward=None)
    with pytest.raises(ValueError, match="check_vma=False.*implementation='blockwise'"):
        local_ring(x, layout.Striped(), implementation=backend)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "kind, implementation, route",
    [
        (AxisType.Auto, "blockwise", None),
        (AxisType.Explicit, "blockwise", Counted(other_axes=("tensor",))),
        (AxisType.Explicit, "reference", None),
    ],
    ids=str,
)
def test_a_shard_map_may_check_how_values_vary(kind, implementation, route, rng):
    """Keys and values are the same on both devices of `tensor`: gradients add up."""
    qkv = [rng.normal(size=(1, 24, heads, 8)) for heads in (4, 1, 1)]
    *qkv, sinks = (jnp.float32(x) for x in (*qkv, rng.normal(size=4)))
    devices, both = jax.devices()[:8], (kind, kind)
    mesh = jax.make_mesh((4, 2), ("ring", "tensor"), both, devices=devices)
    bounds = [jnp.asarray(bound) for bound in masks.causal()(np.arange(24), 24)]

    def local(q, k, v, sinks, *bounds):
        more = {"layout": layout.Contiguous(), "implementation": implementation}
        more |= {"sinks": sinks, "route": route}
        return ring_attention(q, k, v, *bounds, axis_name="ring", **more)

    heads, bound = P(None, "ring", "tensor"), P(None, "ring")
    specs = heads, bound, bound, P("tensor"), bound, bound
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads)

    def gradients(attend, *operands):
        squares = jax.grad(lambda *qkv: jnp.sum(attend(*qkv) ** 2), (0, 1, 2, 3))
        return jax.jit(squares)(*operands)

    want = gradients(lambda *qkv: attention(*qkv[:3], sinks=qkv[3]), *qkv, sinks)
    operands = [*qkv, sinks, *bounds]
    placed = (NamedSharding(mesh, spec) for spec in specs)
    *operands, k_start, k_end = map(jax.device_put, operands, placed)
    with jax.set_mesh(mesh):
        got = gradients(lambda *qkv: mapped(*qkv, k_start, k_end), *operands)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_local_shards_that_the_layout_does_not_have_are_refused():
    with pytest.raises(ValueError, match="6 tokens does not divide"):
        local_ring(jnp.ones((1, 6, 2, 8)), layout.Zigzag())


def bounds_of(*shapes):
    return Visible(*(jnp.zeros(shape, int) for shape in shapes))


def wrong_masks():
    """Masks that are wrong in row 1 of 2, and right ones: of a striped ring of 2.

    Each behind the kind of the mesh's axes.
    """
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, 16)))
    natural = masks.documents(ids)(np.arange(16), 16)
    right = Visible(*(layout.permute(x, layout.Striped(), 2) for x in natural))
    decreasing = Visible(*(x.copy() for x in right))
    decreasing.k_end[1, 7] = 0  # of token 14: a query that sees nothing
    mixed = [
        np.stack([good[0], bad[1]]) for good, bad in zip(right, natural, strict=True)
    ]
    shared = [np.stack([x, x]) for x in right]  # two intervals, the same in row 1
    shared[1][1, 0] = shared[0][1, 0] = 16
    apart = [x.copy() for x in shared]
    apart[0][1], apart[1][1] = 16, 16
    permuted = np.stack([ids[0], layout.permute(ids, layout.Striped(), 2)[1]])
    explicit, auto = AxisType.Explicit, AxisType.Auto
    yield pytest.param(explicit, decreasing, right, id="bounds that decrease")
    yield pytest.param(auto, Visible(*mixed), right, id="bounds in natural order")
    yield pytest.param(
        auto, Visible(*shared), Visible(*apart), id="intervals that share keys"
    )
    yield pytest.param(auto, permuted, ids, id="ids in layout order")


@functools.cache
def loss_gradient(kind, check_masks):
    """Returns (x, bounds or ids) -> gradient and out, compiled once for each shape."""
    mesh = jax.make_mesh((2, 2), ("data", "ring"), axis_types=(kind,) * 2)
    attend = make_ring_attention(
        mesh,
        layout=layout.Striped(),
        implementation="reference",
        check_masks=check_masks,
    )

    def loss(x, seen):
        seen = seen if isinstance(seen, Visible) else masks.documents(seen)
        out = attend(x, x, x, seen)
        return (out**2).sum(), out

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.thorough
@pytest.mark.parametrize("kind, wrong, right", list(wrong_masks()))
def test_masks_that_decrease_under_jit_give_nan_where_asked_for(kind, wrong, right):
    """In their rows alone, and in the gradients; right ones change nothing."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 2, 8))
    checked, plain = (loss_gradient(kind, check_masks) for check_masks in (True, False))
    for found, want in zip(checked(x, right), plain(x, right), strict=True):
        np.testing.assert_array_equal(found, want)
    for found, want in zip(checked(x, wrong), plain(x, wrong), strict=True):
        (found, other), (want, _) = np.asarray(found), np.asarray(want)
        np.testing.assert_array_equal(found, want)
        assert np.isnan(other).all()


@pytest.mark.thorough
def test_traced_ids_that_decrease_are_found_in_a_mask_around_bounds_too():
    attend = make_ring_attention(
        ring_mesh(2),
        layout=layout.Striped(),
        implementation="reference",
        check_masks=True,
    )
    index = layout.order(layout.Striped(), 2, 16)
    bounds = masks.causal()(index, 16)

    @jax.jit
    def run(x, ids):
        return attend(x, x, x, bounds, within=masks.segments(ids))

    x = jnp.ones((1, 16, 2, 8))
    assert np.isfinite(run(x, jnp.zeros(16, int))).all()
    assert np.isnan(run(x, jnp.arange(16)[::-1])).all()


def test_increasing_is_asked_of_bounds_alone():
    floats = Visible(np.zeros((1, 8)), np.ones((1, 8)))
    with pytest.raises(ValueError, match="k_start must be signed integers, got float"):
        check_increasing(floats)
    with pytest.raises(
        ValueError, match=r"k_start.shape=\(1, 8\) and k_end.shape=\(1, 4"
    ):
        check_increasing(bounds_of((1, 8), (1, 4)))


def test_a_ring_outside_of_jit_is_compiled_once():
    attend = make_ring_attention(ring_mesh(4), layout=layout.Striped())
    x = jnp.ones((1, 64, 2, 8))
    lowered = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: lowered.append(name) if "jaxpr_to_mlir" in name else None
    )
    for steps in range(3):
        lowered.clear()
        attend(x, x, x + steps, masks.causal() & masks.window(40))
    assert not lowered


KNOWN = {"layout": layout, "np": np, "bounds_of": bounds_of}


@pytest.mark.parametrize(
    "axes, options, q, kv, seen, words", table("kernels.txt", "operands", **KNOWN)
)
def test_operands_that_do_not_suit_the_ring_are_refused(
    axes, options, q, kv, seen, words
):
    """On a ring of 2, and 4 devices along another axis."""
    mesh = jax.make_mesh((2, 4), ("ring", axes or "other"))
    attend = make_ring_attention(mesh, **{"layout": layout.Striped(), **options})
    q, kv = jnp.ones((1, q, 4, 8)), jnp.ones((1, kv, 1, 8))
    with pytest.raises(ValueError, match=words):
        attend(q, kv, kv, **{"visible": masks.causal(), **seen})


@pytest.mark.thorough
def test_bounds_beyond_the_keys_reach_all_of_them():
    """Up to the largest integer, on which nothing may be added."""
    attend = make_ring_attention(ring_mesh(2), layout=layout.Striped())
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 8))
    end = jnp.iinfo(jnp.int32)
    far = Visible(jnp.full((1, 8), end.min), jnp.full((1, 8), end.max))
    run = jax.jit(attend)
    whole = masks.full()(np.arange(8, dtype=np.int32), 8)
    np.testing.assert_array_equal(run(x, x, x, far), run(x, x, x, whole))
