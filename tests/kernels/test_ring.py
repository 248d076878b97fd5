"""Tests the production ring against one device in float64, on simulated devices."""

import dataclasses
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
from kernels.backends import blockwise, reference
from kernels.ring import attend as ring
from kernels.ring import backward as ring_backward
from kernels.ring import comm as ring_comm
from kernels.ring import loop as ring_loop
from kernels.ring import routes as ring_routes
from kernels.ring.routes import ONE_WAY, AllShards
from kernels.ring_attention import make_ring_attention
from tests.cases import table
from tests.cases.attention import (
    BFLOAT16_RATIO,
    COVERING,
    Case,
    Problem,
    solve,
)
from tests.support.rings import (
    assert_as_on_one_device,
    one_device_ring,
    sharded_ring,
    solve_on_ring,
)
from tests.support.simulated import BACKENDS, LONG

GPU_KERNELS = {
    "triton": (
        Case(2, "zigzag", "none", 4, 31, 100, "sinks-cap"),
        Case(3, "zigzag", "documents", 8, 31, 64, "cap"),
        Case(2, "striped4", "documents", 1, 1, 64, "sinks"),
    ),
    "hopper": (Case(2, "zigzag", "none", 4, 31, 100, "sinks-cap", heads=4),),
    "hopper_deterministic": (),
    "tokamax": (
        Case(4, "striped", "causal", 2, 257, 64, "sinks-cap"),
        Case(3, "zigzag", "documents", 4, 300, 100),
    ),
}
"""Cases beside those of all, and no slow tests where kernels are interpreted."""
TYPES = {"triton": jnp.float32, "hopper": jnp.bfloat16}


def covering_cases():
    """Each case for each implementation.

    Slow: long ones; of one device, as in `test_attention`; of one token, but in rings
    of 2 or with sinks; "pallas_tpu", but with heads of 128 in a ring of 2; "reference",
    which models have in their tests.
    """
    for case in COVERING:
        for name in [x for x in BACKENDS if x not in GPU_KERNELS]:
            sizes = case.ring_size, case.head_dim
            is_slow = case.length > 1000 or case.ring_size == 1
            is_slow |= case.length == 1 and case.ring_size != 2 and not case.has_sinks
            is_slow |= name == "pallas_tpu" and (sizes != (2, 128) or case.length < 100)
            is_slow |= name == "reference"
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(case, name, marks=marks, id=f"{case.name}-{name}")
    # Two tiles a shard, of which one is partial.
    case = Case(2, "zigzag", "window", 1, 997, 128, heads=2)
    yield pytest.param(case, "blockwise", id=f"{case.name}-blockwise")


def gpu_cases():
    """Each case for each kind of GPU kernels."""
    slow = pytest.mark.slow, pytest.mark.timeout(3600)
    for name, quick in GPU_KERNELS.items():
        for case in dict.fromkeys((*quick, *COVERING)):
            marks = () if case in quick or jax.default_backend() == "gpu" else slow
            yield pytest.param(case, name, marks=marks, id=f"{case.name}-{name}")


@pytest.mark.thorough(quick=3)
@pytest.mark.usefixtures("steps_in_a_loop")
@pytest.mark.parametrize("case, implementation", list(covering_cases()))
def test_ring_in_float32_matches_one_device_in_float64(case, implementation, rng):
    assert_as_on_one_device(rng, case, BACKENDS[implementation])


@pytest.mark.thorough
@pytest.mark.usefixtures("steps_in_a_loop")
@pytest.mark.parametrize("case, implementation", list(gpu_cases()))
def test_ring_of_gpu_kernels_is_as_exact_as_one_device(case, implementation, rng):
    """The steps of all devices on one, which interprets the kernels if it has none."""
    backend, dtype = BACKENDS[implementation], TYPES.get(implementation, jnp.float16)
    if case.length > 1000:
        backend = LONG.get(implementation, backend)
    assert_as_on_one_device(rng, case, backend, dtype, one_device_ring)


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
    case = Case(ring_loop.UNROLLED_STEPS + 4, "striped", "documents", 2, 93, 16)
    assert_as_on_one_device(rng, case, reference, make=one_device_ring)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("axes, options", table("kernels.txt", "mesh", layout=layout))
def test_ring_over_part_of_a_mesh_matches_one_device(axes, options, rng):
    """Every row has bounds of its own, every device sinks of its own heads.

    Their gradients are those of all devices.
    """
    kinds = AxisType.Explicit, *[AxisType.Auto] * (len(axes) - 1)
    devices = jax.devices()[: math.prod(axes.values())]
    mesh = jax.make_mesh((*axes.values(),), (*axes,), axis_types=kinds, devices=devices)
    kv_heads = 1 if "head_axis" in options else 2
    q, k, v, sinks = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 64, 8, 16), *[(2, 64, kv_heads, 16)] * 2, (8,))
    )
    ids = np.sort(rng.integers(0, 5, (2, 64)), axis=1).astype(np.int32)
    options = {"layout": layout.Striped(4), "implementation": "reference"} | options
    attend = make_ring_attention(mesh, **options, with_lse=True)
    ring_axes = options.get("ring_axes", "ring")
    ring_axes = (ring_axes,) if isinstance(ring_axes, str) else ring_axes
    order = options["layout"], math.prod(axes[axis] for axis in ring_axes)
    mask = masks.documents(ids) & masks.padding(61)

    def on_ring(q, k, v, sinks):
        q, k, v = (layout.permute(x, *order) for x in (q, k, v))
        out, lse = attend(q, k, v, mask, sinks=sinks)
        return layout.unpermute(out, *order), layout.unpermute(lse, *order, axis=-1)

    def on_one(*qkv):
        return attention_with_lse(
            *qkv[:3], visible=mask, sinks=qkv[3], soft_cap=options.get("soft_cap")
        )

    gradients = (rng.standard_normal(shape) for shape in (q.shape, (2, 8, 64)))
    gradients = tuple(jnp.asarray(x, jnp.float32) for x in gradients)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(attend, *arrays):
        results, pull = jax.vjp(attend, *arrays)
        return *results, *pull(gradients)

    got, want = (with_gradients(run, q, k, v, sinks) for run in (on_ring, on_one))
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(got[2:], want[2:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "axes, options",
    [({"ring": 8}, {}), ({"ulysses": 4}, {"ring_axes": (), "ulysses_axis": "ulysses"})],
)
def test_results_are_sharded_like_the_operands(axes, options):
    devices = jax.devices()[: math.prod(axes.values())]
    mesh = jax.make_mesh((*axes.values(),), (*axes,), devices=devices)
    sharding = NamedSharding(mesh, P(None, *axes))
    x = jax.device_put(jnp.ones((1, 64, 4, 8)), sharding)
    attend = make_ring_attention(
        mesh, layout=layout.Zigzag(), implementation="reference", **options
    )
    out = jax.jit(attend, static_argnums=3)(x, x, x, masks.causal())
    assert out.sharding.is_equivalent_to(sharding, 4)


@pytest.mark.parametrize(
    "kind, ring_size, padded",
    [("TPU v4", 4, 128), ("TPU v4", 1, 100), ("cpu", 4, 100)],
)
def test_heads_are_padded_where_they_travel_between_tpus(
    kind, ring_size, padded, monkeypatch
):
    monkeypatch.setattr(ring_comm, "is_tpu", lambda: kind.startswith("TPU"))
    this_ring = ring.Ring("ring", ring_size, layout.Striped(), 1.0, blockwise)
    read = jax.eval_shape(this_ring.as_read, jnp.ones((1, 8, 2, 100)))
    assert read.shape == (1, 8, 2, padded)


def as_on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rings that are traced from now on take a TPU's order."""
    for module in ring_comm, ring_loop:
        monkeypatch.setattr(module, "is_tpu", lambda: True)
    monkeypatch.setattr(ring_routes, "rings_both_ways", lambda kind: True)
    monkeypatch.setattr(ring_routes, "TURNS_FROM", 1)
    monkeypatch.setattr(ring_routes, "HOME_FROM", 4)
    for module in ring_comm, ring_backward:
        monkeypatch.setattr(module, "is_cpu", lambda: False)


BOTH_WAYS = AllShards(both_ways=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case, route",
    [
        # Halves of the queries end within a tile.
        (Case(2, "striped", "documents", 2, 997, 100, heads=2), ONE_WAY),
        (Case(2, "zigzag", "shared_prefix", 2, 96, 8, heads=4), ONE_WAY),
        (Case(2, "striped", "documents", 2, 997, 100, heads=4), BOTH_WAYS),
        (Case(3, "zigzag", "causal", 1, 192, 16, heads=3), BOTH_WAYS),
        (Case(5, "zigzag", "causal", 1, 160, 16, heads=2), BOTH_WAYS),
        (Case(8, "striped", "causal", 1, 256, 16, heads=2), ONE_WAY),
        (Case(2, "contiguous", "block_diffusion", 2, 128, 8, heads=4), BOTH_WAYS),
        # One key/value head: chunks are halves of the slots.
        (Case(4, "striped", "documents", 4, 1024, 8, heads=4), BOTH_WAYS),
    ],
)
def test_rings_as_on_a_tpu_match_one_device(case, route, monkeypatch, rng):
    """Operands in whole lanes, heads first; half of the own queries after the ring."""
    as_on_a_tpu(monkeypatch)
    make = functools.partial(sharded_ring, route=route)  # not yet compiled
    assert_as_on_one_device(rng, case, blockwise, make=make)


@pytest.mark.thorough
def test_chunks_whose_keys_do_not_come_home_take_turns_in_a_loop(monkeypatch, rng):
    """One way round, with shards too short to hide what travels."""
    as_on_a_tpu(monkeypatch)
    monkeypatch.setattr(ring_routes, "TURNS_FROM", 1 << 13)
    case = Case(8, "zigzag", "causal", 1, 256, 16, heads=2)
    make = functools.partial(sharded_ring, route=ONE_WAY)
    assert_as_on_one_device(rng, case, blockwise, make=make)
