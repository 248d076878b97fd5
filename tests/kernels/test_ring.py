"""Tests the production ring against one device in float64, on simulated devices."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels import masks
from kernels.backends import blockwise, reference
from kernels.one_device import attention
from kernels.ring import attend as ring
from kernels.ring import backward as ring_backward
from kernels.ring import comm
from kernels.ring_attention import make_ring_attention
from tests.cases.attention import (
    BFLOAT16_RATIO,
    COVERING,
    FLOAT32_TOLERANCE,
    GRID,
    LAYOUTS,
    MASKS,
    Case,
    Problem,
    solve,
)
from tests.rings import (
    Make,
    compiled_ring,
    one_device_ring,
    ring_mesh,
    sharded_ring,
    solve_on_ring,
)
from tests.simulated import BACKENDS


@functools.cache  # so that equal rings are compiled once
def ring_of(keep_tail: bool) -> Make:
    return functools.partial(sharded_ring, keep_tail=keep_tail)


GPU_KERNELS = "hopper", "hopper_deterministic", "triton"
"""Their rings are in `test_gpu_ring`."""


def covering_cases():
    """Each case for each implementation.

    Slow: long ones, but of "blockwise" in a ring of 4; "pallas_tpu", but with heads of
    128 in a ring of 2; "reference", which models have in their tests, but with its tail
    in rings of up to 3.
    """
    for case in COVERING:
        has_tail = case.mask != "none" and halves_of(case) > 0
        for name in [x for x in BACKENDS if x not in GPU_KERNELS]:
            sizes = case.ring_size, case.head_dim
            is_slow = case.length > 1000 and (name, sizes[0]) != ("blockwise", 4)
            is_slow |= name == "pallas_tpu" and (sizes != (2, 128) or case.length < 100)
            is_slow |= name == "reference"
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(case, name, False, marks=marks, id=f"{case.name}-{name}")
            if not has_tail:
                continue
            is_quick = name == "reference" and case.ring_size < 4 and case.length < 1000
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(
                case, name, True, marks=marks, id=f"{case.name}-{name}-tail"
            )


def halves_of(case: Case) -> int:
    """Slots of the first half of a shard, if the sequence begins with them."""
    order = LAYOUTS[case.layout], case.ring_size
    length = layout.padded_length(*order, case.length) // case.ring_size
    return layout.front_slots(*order, length)


@pytest.mark.thorough(quick=5)
@pytest.mark.usefixtures("steps_in_a_loop")
@pytest.mark.parametrize("case, implementation, keep_tail", list(covering_cases()))
def test_ring_in_float32_matches_one_device_in_float64(
    case, implementation, keep_tail, rng
):
    problem = Problem.of(rng, case)
    step = BACKENDS[implementation]
    make = ring_of(keep_tail)
    answer = solve_on_ring(case, problem, step, jnp.float32, make)
    errors = answer.errors(solve(problem, jnp.float64))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("group", GRID["group"])
@pytest.mark.parametrize("length", GRID["length"])
@pytest.mark.parametrize("head_dim", GRID["head_dim"])
@pytest.mark.parametrize("extras", GRID["extras"])
def test_every_ring_matches_one_device_in_float64(group, length, head_dim, extras, rng):
    """Runs the whole product of the grid: each mask solved once for all rings."""
    for mask in MASKS:
        heads = 2 if group == 1 else 8
        problem_case = Case(
            1, "contiguous", mask, group, length, head_dim, extras, heads
        )
        problem = Problem.of(rng, problem_case)
        truth = solve(problem, jnp.float64)
        for ring_size, name in itertools.product(GRID["ring_size"], LAYOUTS):
            case = dataclasses.replace(problem_case, ring_size=ring_size, layout=name)
            answer = solve_on_ring(case, problem, blockwise, jnp.float32)
            errors = answer.errors(truth)
            assert max(errors.values()) <= FLOAT32_TOLERANCE, (case.name, errors)
    # Hundreds of programs in one process end in a segmentation fault of XLA's.
    compiled_ring.cache_clear()
    jax.clear_caches()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout_name, rings",
    [
        pytest.param("contiguous", (1, 2, 4, 8), marks=pytest.mark.slow),
        pytest.param("striped", (1, 2, 4, 8), marks=pytest.mark.slow),
        ("striped", (1, 8)),
    ],
)
def test_ring_in_bfloat16_is_as_exact_as_one_device_at_any_ring_size(
    layout_name, rings, rng
):
    """Sums in float32 between the steps: the error does not grow with the ring."""
    case = Case(1, layout_name, "causal", 4, 512, 64)
    problem = Problem.of(rng, case, jnp.bfloat16)
    truth = solve(problem, jnp.float64)
    allowed = solve(problem, jnp.bfloat16).errors(truth)
    table = {}
    for ring_size in rings:
        on_ring = dataclasses.replace(case, ring_size=ring_size)
        answer = solve_on_ring(on_ring, problem, blockwise, jnp.bfloat16)
        table[ring_size] = answer.errors(truth)
    print(f"\n{layout_name}, relative error in bfloat16")
    for label, row in {"one device": allowed, **table}.items():
        print(f"{label!s:>12}", *(f"{k} {v:.2e}" for k, v in row.items()))
    for row in table.values():
        for name, error in row.items():
            assert error <= BFLOAT16_RATIO * allowed[name] + 1e-6, (name, table)
            assert error <= 1.1 * table[1][name] + 1e-6, (name, table)


def test_ring_longer_than_it_is_unrolled_matches_one_device(rng):
    """A loop of two steps an iteration, and one left over: no constant is patched."""
    case = Case(comm.UNROLLED_STEPS + 4, "striped", "documents", 2, 93, 16)
    problem = Problem.of(rng, case)
    answer = solve_on_ring(case, problem, reference, jnp.float32, one_device_ring)
    errors = answer.errors(solve(problem, jnp.float64))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


@pytest.mark.thorough
@pytest.mark.parametrize(
    "keep_tail", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_ring_over_part_of_a_mesh_matches_one_device(keep_tail, rng):
    """Batch over data and fsdp, heads over tensor, bounds of its own in every row."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 2, 2), GLOBAL_AXES)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, 48, heads, 16)), jnp.float32)
        for heads in (8, 4, 4)
    )
    ids = np.sort(rng.integers(0, 5, (2, 48)), axis=1).astype(np.int32)
    order = layout.Striped(4), 2

    def on_ring(q, k, v):
        attend = make_ring_attention(
            mesh,
            layout=order[0],
            implementation="reference",
            keep_tail=keep_tail,
        )
        q, k, v = (layout.permute(x, *order) for x in (q, k, v))
        return layout.unpermute(attend(q, k, v, masks.documents(ids)), *order)

    def on_one(q, k, v):
        return attention(q, k, v, visible=masks.documents(ids))

    cotangent = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(attend, *arrays):
        output, pullback = jax.vjp(attend, *arrays)
        return output, *pullback(cotangent)

    got, want = (with_gradients(attend, q, k, v) for attend in (on_ring, on_one))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind, ring_size, padded",
    [("TPU v4", 4, 128), ("TPU v4", 1, 100), ("cpu", 4, 100)],
)
def test_heads_are_padded_where_they_travel_between_tpus(
    kind, ring_size, padded, monkeypatch
):
    monkeypatch.setattr(comm, "is_tpu", lambda: kind.startswith("TPU"))
    this_ring = ring.Ring("ring", ring_size, layout.Striped(), 1.0, blockwise)
    read = jax.eval_shape(this_ring.as_read, jnp.ones((1, 8, 2, 100)))
    assert read.shape == (1, 8, 2, padded)


@pytest.mark.thorough
def test_operands_as_a_tpu_reads_them_change_nothing(monkeypatch, rng):
    """Padded to whole lanes and heads first, where they are neither."""
    case = Case(2, "striped", "documents", 2, 93, 100, heads=2)
    problem = Problem.of(rng, case)
    as_they_are = solve_on_ring(case, problem, reference, jnp.float32)
    monkeypatch.setattr(comm, "is_tpu", lambda: True)
    compiled_ring.cache_clear()
    as_read = solve_on_ring(case, problem, reference, jnp.float32)
    compiled_ring.cache_clear()
    assert max(as_read.errors(as_they_are).values()) < 1e-6


@pytest.mark.parametrize("queries", [1, 2, 7])
def test_halves_of_the_queries_have_the_intervals_of_all(queries, rng):
    bounds = np.sort(rng.integers(0, 6, (2, 3, queries)), axis=2)
    bounds[1] = np.maximum(*bounds)
    early, late = (
        np.array(half) for half in ring_backward.halves(tuple(bounds), length=5)
    )
    middle = queries // 2
    np.testing.assert_array_equal(early[..., :middle], bounds[..., :middle])
    np.testing.assert_array_equal(late[..., middle:], bounds[..., middle:])
    for half, is_empty in (early, slice(middle, None)), (late, slice(middle)):
        assert (half[0] == half[1])[:, is_empty].all()
        assert (np.diff(half) >= 0).all()


GLOBAL_AXES = ("data", "fsdp", "ring", "tensor")


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


@pytest.mark.thorough
def test_bounds_are_cut_to_what_the_ring_is_told_to_send(rng):
    """Keys outside of `within` are not attended to, whatever the bounds show."""
    q, k, v = (jnp.float32(x) for x in rng.standard_normal((3, 1, 64, 2, 8)))
    out = {}
    for layout_name in ("contiguous", "striped"):
        layout_of = LAYOUTS[layout_name]
        attend = make_ring_attention(
            ring_mesh(4), layout=layout_of, implementation="reference"
        )
        index = layout.order(layout_of, 4, 64)
        operands = (layout.permute(x, layout_of, 4) for x in (q, k, v))
        bounds = masks.causal()(index, 64)
        told = functools.partial(attend, visible=bounds, within=masks.window(9))
        found = jax.jit(told)(*operands)
        out[layout_name] = layout.unpermute(np.asarray(found), layout_of, 4)
    want = attention(q, k, v, visible=masks.window(9), implementation="reference")
    for found in out.values():
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


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


def rotations_of_gradient(layout_name: str, keep_tail: bool, *saved: str) -> list[str]:
    """What travels in the gradient of a layer that saves these, on a ring of 4."""
    attend = make_ring_attention(
        ring_mesh(4), layout=LAYOUTS[layout_name], keep_tail=keep_tail
    )
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x):
        return attend(jnp.sin(x), jnp.cos(x), x, masks.causal())

    def loss(x):
        return jnp.square(layer(x).astype(jnp.float32)).sum()

    return permuted_shapes(lowered(jax.grad(loss), (1, 64, 2, 16)))


@pytest.mark.parametrize(
    "saved, runs", [(("attention_out", "attention_lse"), 1), ((), 2)]
)
def test_saved_residuals_keep_the_ring_from_running_twice(saved, runs):
    forward, backward = 2 * 3, 2 * 3 + 2 * 4
    rotations = rotations_of_gradient("striped", False, *saved)
    assert len(rotations) == runs * forward + backward


@pytest.mark.parametrize("layout_name", ["striped4", "zigzag"])
def test_saved_tail_leaves_half_of_the_keys_to_travel_again(layout_name):
    """Twice forward with half of the queries, and never again with the others."""
    names = "attention_out", "attention_lse"
    rotations = rotations_of_gradient(layout_name, True, *names)
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


def test_results_are_sharded_like_the_operands():
    mesh = ring_mesh(8)
    sharding = NamedSharding(mesh, P(None, "ring", None, None))
    x = jax.device_put(jnp.ones((1, 64, 2, 8)), sharding)
    attend = make_ring_attention(
        mesh, layout=layout.Zigzag(), implementation="reference"
    )
    out = jax.jit(attend, static_argnums=3)(x, x, x, masks.causal())
    assert out.sharding.is_equivalent_to(sharding, 4)


@pytest.mark.thorough
@pytest.mark.usefixtures("steps_in_a_loop")
def test_ring_of_two_mesh_axes_is_one_ring(rng):
    devices = np.array(jax.devices()).reshape(2, 4)
    rows = rng.standard_normal((3, 1, 64, 2, 8))
    q, k, v = (layout.permute(jnp.float32(x), layout.Striped(), 8, 1) for x in rows)
    one, two = (
        make_ring_attention(
            mesh,
            layout=layout.Striped(),
            ring_axes=axes,
            implementation="reference",
        )
        for mesh, axes in [
            (ring_mesh(8), ("ring",)),
            (Mesh(devices, ("outer", "inner")), ("outer", "inner")),
        ]
    )
    expected = jax.jit(one, static_argnums=3)(q, k, v, masks.causal())
    found = jax.jit(two, static_argnums=3)(q, k, v, masks.causal())
    np.testing.assert_array_equal(found, expected)
