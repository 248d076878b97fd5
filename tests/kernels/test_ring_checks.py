"""Tests of arguments of rings: axes, shards, bounds in layout order, padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels import masks
from kernels.masks import Visible
from kernels.one_device import attention, attention_with_lse
from kernels.ring_attention import make_ring_attention, ring_attention
from tests.rings import ring_mesh


@pytest.mark.thorough
def test_axes_of_the_batch_are_those_that_the_ring_leaves():
    """And a name alone is one axis."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    x = jax.random.normal(jax.random.key(0), (2, 8, 2, 8))
    want = attention(x, x, x, implementation="reference")
    attend = make_ring_attention(
        mesh,
        layout=layout.Contiguous(),
        ring_axes="fsdp",
        implementation="reference",
    )
    found = jax.jit(attend, static_argnums=3)(x, x, x, masks.causal())
    np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"ring_axes": ("sp",)}, r"'ring': 4} has no axis 'sp': name .*ring_axes="),
        ({"ring_axes": ("ring", "ring")}, "must be different axes"),
        (
            {"ring_axes": ("ring", "data")},
            r"order of the mesh, \('data', 'ring'\), got",
        ),
        (
            {"batch_axes": "dp"},
            r"batch_axes=\('dp',\).*axes of the mesh {'data': 2, 'r",
        ),
        ({"batch_axes": ("data", "ring")}, "must be different axes"),
        ({"head_axis": "model"}, "head_axis='model' must be different axes"),
        ({"head_axis": "data"}, "head_axis='data' must be different axes"),
        ({"layout": "striped"}, r"as Striped\(\).*got 'striped'"),
        ({"layout": layout.Striped}, r"as Striped\(\).*got <class"),
        ({"scale": np.nan}, "scale must be one finite number.*got nan"),
        ({"implementation": "cudnn"}, "implementation='cudnn' is not one of"),
    ],
)
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


@pytest.mark.parametrize("options", [{"implementation": "blockwise"}, {}], ids=str)
def test_a_shard_map_that_checks_how_values_vary_is_refused(options):
    x = jnp.ones((1, 8, 2, 8))
    with pytest.raises(ValueError, match="check_vma=False.*implementation='reference'"):
        local_ring(x, layout.Striped(), **options)
    local_ring(x, layout.Striped(), implementation="reference")  # needs no such


def test_local_shards_that_the_layout_does_not_have_are_refused():
    with pytest.raises(ValueError, match="6 tokens does not divide"):
        local_ring(jnp.ones((1, 6, 2, 8)), layout.Zigzag())


def bounds_of(*shapes):
    return Visible(*(jnp.zeros(shape, int) for shape in shapes))


CAUSAL, SHORT = masks.causal(), bounds_of((1, 4), (1, 4))
OTHER_ROWS, UNLIKE = bounds_of((3, 8), (3, 8)), bounds_of((1, 8), (2, 8))


def wrong_masks():
    """Masks that are wrong in row 1 of 2, and right ones: of a striped ring of 2."""
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (2, 16)))
    natural = masks.documents(ids)(np.arange(16), 16)
    right = Visible(*(layout.permute(x, layout.Striped(), 2) for x in natural))
    decreasing = Visible(*(x.copy() for x in right))
    decreasing.k_end[1, 7] = 0  # of token 14: a query that sees nothing
    mixed = [
        np.stack([good[0], bad[1]]) for good, bad in zip(right, natural, strict=True)
    ]
    permuted = np.stack([ids[0], layout.permute(ids, layout.Striped(), 2)[1]])
    yield pytest.param(decreasing, right, id="bounds that decrease")
    yield pytest.param(Visible(*mixed), right, id="bounds in natural order")
    yield pytest.param(permuted, ids, id="ids in layout order")


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
@pytest.mark.parametrize("wrong, right", list(wrong_masks()))
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_masks_that_decrease_under_jit_give_nan_where_asked_for(wrong, right, kind):
    """In their rows alone, and in the gradients; right ones change nothing."""
    x = jax.random.normal(jax.random.key(0), (2, 16, 2, 8))
    checked, plain = (loss_gradient(kind, check_masks) for check_masks in (True, False))
    for found, want in zip(checked(x, right), plain(x, right), strict=True):
        np.testing.assert_array_equal(found, want)
    for found, want in zip(checked(x, wrong), plain(x, wrong), strict=True):
        (found, other), (want, _) = np.asarray(found), np.asarray(want)
        np.testing.assert_array_equal(found, want)
        assert np.isnan(other).all()


def test_lse_of_a_ring_is_that_of_one_device(rng):
    """And its gradient; in padding it is that of a query that sees nothing."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "ring", "tensor"))
    order, mask = (layout.Zigzag(), 2), masks.causal() & masks.padding(14)
    attend = make_ring_attention(mesh, layout=order[0], with_lse=True)
    q, k, v = np.float32(rng.normal(size=(3, 2, 16, 2, 8)))

    def on_ring(*qkv):
        out, lse = attend(*(layout.permute(x, *order) for x in qkv), mask)
        return layout.unpermute(out, *order), layout.unpermute(lse, *order, axis=-1)

    def total(attend, *qkv):
        out, lse = attend(*qkv)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), (out, lse)

    one = functools.partial(attention_with_lse, visible=mask)
    found, want = (
        jax.jit(jax.grad(functools.partial(total, x), (0, 1, 2), has_aux=True))(q, k, v)
        for x in (on_ring, one)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


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


@pytest.mark.parametrize(
    "axes, kind, q, kv, visible, words",
    [
        ({"ring": 4}, layout.Striped(4), 40, 40, CAUSAL, "40 tokens .* pad it to 48"),
        ({"ring": 2}, layout.Zigzag(), 8, 6, CAUSAL, "6 tokens .* pad it to 8"),
        ({"ring": 2}, layout.Striped(), 8, 8, SHORT, r"be .*k_start.shape=\(1, 4\)"),
        ({"ring": 2}, layout.Striped(), 8, 8, OTHER_ROWS, r"k_start.shape=\(3, 8\)"),
        ({"ring": 2}, layout.Striped(), 8, 8, UNLIKE, r"and k_end.shape=\(2, 8\)"),
        (
            {"data": 2, "ring": 4},
            layout.Striped(),
            *((3, 8, 2, 8), (3, 8, 2, 8), CAUSAL),
            "3 rows do not divide over the mesh's data",
        ),
        (
            {"ring": 4, "tensor": 2},
            layout.Contiguous(),
            *((1, 8, 4, 8), (1, 8, 1, 8), masks.full()),
            "1 key/value heads do not divide",
        ),
    ],
)
def test_operands_that_do_not_suit_the_ring_are_refused(
    axes, kind, q, kv, visible, words
):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    attend = make_ring_attention(mesh, layout=kind)
    q, kv = (jnp.ones(x if isinstance(x, tuple) else (1, x, 2, 8)) for x in (q, kv))
    with pytest.raises(ValueError, match=words):
        attend(q, kv, kv, visible)


def test_tails_are_kept_only_of_as_many_queries_as_keys():
    x, keys = (jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (8, 16))
    attend = make_ring_attention(ring_mesh(4), layout=layout.Striped(), keep_tail=True)
    with pytest.raises(ValueError, match="keep_tail=True needs .* shards of 4 and 2 s"):
        jax.eval_shape(lambda *x: attend(*x, masks.causal()), x, keys, keys)


@pytest.mark.thorough
def test_heads_that_a_mesh_axis_does_not_divide_need_not_be_sharded(rng):
    """Also where one axis of the mesh is explicit and one is not."""
    kinds = AxisType.Explicit, AxisType.Auto
    mesh = jax.make_mesh((4, 2), ("ring", "tensor"), axis_types=kinds)
    attend = make_ring_attention(
        mesh, layout=layout.Striped(), head_axis=(), implementation="reference"
    )
    q, k, v = (jnp.asarray(rng.normal(size=(1, 8, h, 8)), "float32") for h in (4, 1, 1))
    striped = (layout.permute(x, layout.Striped(), 4) for x in (q, k, v))
    got = jax.jit(attend, static_argnums=3)(*striped, masks.causal())
    want = attention(q, k, v, visible=masks.causal(), implementation="reference")
    np.testing.assert_allclose(
        layout.unpermute(np.asarray(got), layout.Striped(), 4), want, atol=1e-5
    )


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
