"""Tests Ulysses beneath the production ring against one device in float64."""

import dataclasses
import functools
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels import masks
from kernels.backends import Backend, blockwise
from kernels.backends.hopper import launch as hopper
from kernels.backends.tpu import launch as pallas_tpu
from kernels.compiler import compiler_options
from kernels.one_device import attention
from kernels.ring import attend as ring
from kernels.ring.ulysses import Heads, over_heads, share_heads
from kernels.ring_attention import make_ring_attention
from tests.cases.attention import (
    BFLOAT16_RATIO,
    COVERING,
    FLOAT32_TOLERANCE,
    LAYOUTS,
    Case,
    Problem,
    solve,
)
from tests.rings import ARRAY, OPERANDS, RESULTS, ROW, SINKS, Make, Run, solve_on_ring
from tests.simulated import BACKENDS
from tools.lib.compiled.hlo import TRANSFER, Program
from tools.lib.compiled.pods import compile_for, gpu_devices, tpu_devices
from training.mesh import MeshShape, make_mesh

AXES = "ring", "ulysses"


def mesh_of(ring_size: int, devices: int) -> Mesh:
    used = np.array(jax.devices()[: ring_size * devices])
    return Mesh(used.reshape(ring_size, devices), AXES)


@functools.cache  # so that equal rings are compiled once
def rings_over(devices: int, keep_tail: bool = False) -> Make:
    """Returns what makes rings over a Ulysses axis of this many devices."""

    def make(
        ring_size: int, layout_name: str, backend: Backend, soft_cap: float | None
    ) -> Run:
        def run(q, k, v, do, d_lse, k_start, k_end, sinks):
            sizes = "ring", ring_size, LAYOUTS[layout_name], q.shape[-1] ** -0.5
            this_ring = ring.Ring(*sizes, backend, soft_cap, keep_tail)
            attend = functools.partial(ring.attend, this_ring)
            results, pull = jax.vjp(
                lambda *arrays: over_heads(attend, "ulysses", *arrays, k_start, k_end),
                *(q, k, v, sinks),
            )
            *gradients, d_sinks = pull((do, d_lse))
            if sinks is not None:
                d_sinks = jax.lax.psum(d_sinks, AXES)
            return *results, *gradients, d_sinks

        specs = {ARRAY: P(None, AXES), ROW: P(None, None, AXES), SINKS: P()}
        return jax.shard_map(
            run,
            mesh=mesh_of(ring_size, devices),
            in_specs=tuple(specs[axis] for axis in OPERANDS),
            out_specs=tuple(specs[axis] for axis in RESULTS),
            check_vma=False,
        )

    return make


QUICK_CASES = (
    # K below U; K that U does not divide; H that U does not divide: caps and sinks.
    (4, Case(2, "striped", "documents", 8, 31, 64, "sinks-cap")),
    (4, Case(1, "contiguous", "window", 2, 31, 64, "cap", heads=12)),
    (2, Case(2, "zigzag", "causal", 3, 31, 100, "sinks", heads=3)),
    (4, Case(2, "striped4", "none", 1, 31, 64, "sinks", heads=6)),
)
"""Devices of the Ulysses axis, and a case."""


def assert_as_on_one_device(
    case: Case, devices: int, rng: np.random.Generator, backend: Backend, **options
) -> None:
    problem = Problem.of(rng, case)
    make = rings_over(devices, **options)
    answer = solve_on_ring(case, problem, backend, jnp.float32, make, devices)
    errors = answer.errors(solve(problem, jnp.float64))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


def covering_cases():
    """Each case over 2 and 4 devices, in rings that 8 devices hold."""
    for case, devices, size in itertools.product(COVERING, (2, 4), (1, 2, 4)):
        if devices * size <= 8:
            case = dataclasses.replace(case, ring_size=size)
            yield pytest.param(case, devices, id=f"{case.name}-ulysses{devices}")


@pytest.mark.slow
@pytest.mark.parametrize("case, devices", list(covering_cases()))
def test_every_case_over_heads_matches_one_device_in_float64(case, devices, rng):
    assert_as_on_one_device(case, devices, rng, blockwise)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("devices, case", QUICK_CASES)
def test_any_heads_match_one_device_in_float64(devices, case, rng):
    assert_as_on_one_device(case, devices, rng, blockwise)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "pallas_tpu"])
@pytest.mark.parametrize("devices, case", QUICK_CASES)
def test_other_backends_match_one_device_in_float64(devices, case, name, rng):
    assert_as_on_one_device(case, devices, rng, BACKENDS[name])


@pytest.mark.thorough
def test_tail_over_heads_matches_one_device_in_float64(rng):
    case = Case(2, "striped", "causal", 2, 32, 16, "sinks")
    assert_as_on_one_device(case, 2, rng, blockwise, keep_tail=True)


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_bfloat16_over_heads_is_as_exact_as_one_device(devices, rng):
    """Also where gradients of repeated key/value heads are summed up: K = 1."""
    case = Case(2, "striped", "causal", 8, 256, 64)
    problem = Problem.of(rng, case, jnp.bfloat16)
    truth = solve(problem, jnp.float64)
    allowed = solve(problem, jnp.bfloat16).errors(truth)
    make = rings_over(devices)
    answer = solve_on_ring(case, problem, blockwise, jnp.bfloat16, make, devices)
    found = answer.errors(truth)
    print({name: found[name] / allowed[name] for name in found})
    for name, error in found.items():
        assert error <= BFLOAT16_RATIO * allowed[name] + 1e-6, (name, found, allowed)


@pytest.mark.parametrize(
    "heads, kv_heads, devices, way",
    [
        (8, 8, 4, Heads(1, 1, 8)),
        (32, 8, 8, Heads(4, 1, 8)),
        (8, 2, 4, Heads(4, 2, 4)),  # one group is two of half the queries
        (24, 6, 4, Heads(4, 2, 12)),
        (8, 1, 4, Heads(8, 4, 4)),
        (6, 2, 4, Heads(4, 2, 4)),  # 8 query heads
        (3, 3, 2, Heads(1, 1, 4)),  # 4
        (5, 1, 2, Heads(6, 2, 2)),  # 6
        (14, 2, 4, Heads(8, 2, 4)),  # 16
    ],
)
def test_key_heads_are_repeated_only_as_far_as_needed(heads, kv_heads, devices, way):
    found = share_heads(heads, kv_heads, devices)
    assert found == way
    assert found.heads == -(-heads // devices) * devices


COLLECTIVE = re.compile(
    r"stablehlo\.(all_to_all|all_gather|collective_permute|all_reduce|reduce_scatter)"
    r".*?\(tensor<([^>]*)>\) ->",
    re.DOTALL,
)


def collectives(function, *shapes: tuple[int, ...]) -> dict[str, Counter]:
    """Counts what a lowered program sends, by collective and by type."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = jax.jit(function).lower(*arrays).as_text()
    counts: dict[str, Counter] = {}
    for kind, array in COLLECTIVE.findall(program):
        counts.setdefault(kind, Counter())[array] += 1
    return counts


@pytest.mark.parametrize("kv_heads, sent", [(8, 8), (2, 4)])
@pytest.mark.parametrize("ring_size", [1, 2])
def test_collectives_and_their_bytes_are_those_counted_by_hand(
    ring_size, kv_heads, sent
):
    """U = 4: a device has 16 of a shard's 64 slots, then 2 of the 8 query heads."""
    attend = make_ring_attention(
        mesh_of(ring_size, 4), layout=layout.Striped(), ulysses_axis="ulysses"
    )

    def forward(q, k, v):
        return attend(q, k, v, masks.causal())

    def both(q, k, v):
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(q)

    shapes = [(1, 64 * ring_size, heads, 16) for heads in (8, kv_heads, kv_heads)]
    q_out, kv_out = "1x16x8x16xbf16", f"1x16x{sent}x16xbf16"
    q_back, kv_back = "1x64x2x16xbf16", f"1x64x{sent // 4}x16xbf16"
    keys, gradients = (f"1x{sent // 4}x64x16x{kind}" for kind in ("bf16", "f32"))
    bounds = {"all_gather": {"2x1x16xi32": 1}}
    # q, k and v there, and the output back.
    moved = Counter({q_out: 1}) + Counter({kv_out: 2}) + Counter({q_back: 1})
    hops = ring_size - 1
    travels = {"collective_permute": {keys: 2 * hops}} if hops else {}
    found = collectives(forward, *shapes)
    assert found == {"all_to_all": moved} | bounds | travels
    # The output's gradient there; those of q, k and v back.
    moved += Counter({q_out: 1}) + Counter({q_back: 1}) + Counter({kv_back: 2})
    travels = {keys: 4 * hops, gradients: 2 * ring_size} if hops else {}
    travels = {"collective_permute": travels} if hops else {}
    found = collectives(both, *shapes)
    assert found == {"all_to_all": moved} | bounds | travels


@pytest.mark.thorough
def test_ulysses_over_part_of_a_mesh_matches_one_device(rng):
    """Heads over tensor and ulysses, and bounds of its own in every row."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("ring", "ulysses", "tensor"))
    q, k, v = (
        jnp.float32(rng.standard_normal((2, 48, heads, 16))) for heads in (8, 2, 2)
    )
    sinks = jnp.float32(rng.standard_normal(8))
    ids = np.sort(rng.integers(0, 5, (2, 48)), axis=1).astype(np.int32)
    order = layout.Striped(4), 2
    attend = make_ring_attention(
        mesh, layout=order[0], implementation="reference", ulysses_axis="ulysses"
    )

    def on_mesh(q, k, v, sinks):
        q, k, v = (layout.permute(x, *order) for x in (q, k, v))
        out = attend(q, k, v, masks.documents(ids), sinks=sinks)
        return layout.unpermute(out, *order)

    def on_one(q, k, v, sinks):
        return attention(q, k, v, visible=masks.documents(ids), sinks=sinks)

    cotangent = jnp.asarray(rng.standard_normal(q.shape), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(attend, *arrays):
        output, pullback = jax.vjp(attend, *arrays)
        return output, *pullback(cotangent)

    got, want = (with_gradients(run, q, k, v, sinks) for run in (on_mesh, on_one))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_without_a_ring_results_are_sharded_like_the_operands(rng):
    mesh = jax.make_mesh((4,), ("ulysses",), devices=jax.devices()[:4])
    attend = make_ring_attention(
        mesh,
        layout=layout.Striped(),
        ring_axes=(),
        implementation="reference",
        ulysses_axis="ulysses",
    )
    x = jnp.float32(rng.standard_normal((1, 16, 4, 8)))
    sharding = NamedSharding(mesh, P(None, "ulysses"))
    placed = jax.device_put(x, sharding)
    out = jax.jit(attend, static_argnums=3)(*[placed] * 3, masks.causal())
    assert out.sharding.is_equivalent_to(sharding, 4)
    want = attention(x, x, x, implementation="reference")
    np.testing.assert_allclose(jax.device_get(out), want, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_the_axis_is_refused():
    mesh = mesh_of(2, 4)
    build = functools.partial(make_ring_attention, mesh, layout=layout.Zigzag())
    with pytest.raises(ValueError, match="ulysses_axis='heads' must be different axes"):
        build(ulysses_axis="heads")
    with pytest.raises(ValueError, match="ulysses_axis='ring' must be different axes"):
        build(ulysses_axis="ring")
    x = jnp.ones((1, 20, 4, 8))
    message = r"20 tokens .* 2 shards of Zigzag\(\) in 4 slices each: pad it to 24, a"
    with pytest.raises(ValueError, match=message):
        build(ulysses_axis="ulysses")(x, x, x, masks.causal())


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e", "h200"])
def test_transfers_of_a_ring_of_four_over_ulysses_overlap_its_kernels(chip):
    """Compiled for the chip; all-to-alls are q, k, v, out, and their gradients."""
    is_tpu, devices = chip == "v5e", 8
    found = tpu_devices(chip, devices) if is_tpu else gpu_devices("h200", devices)
    mesh = make_mesh(MeshShape(ring=4, ulysses=2), found)
    attend = make_ring_attention(
        mesh,
        layout=layout.Striped(),
        implementation=pallas_tpu if is_tpu else hopper,
        ulysses_axis="ulysses",
    )

    def loss(q, k, v):
        return jnp.square(attend(q, k, v, masks.causal()).astype(jnp.float32)).sum()

    sharding = NamedSharding(mesh, P(None, AXES))
    shapes = [(1, 2048 * devices, heads, 128) for heads in (8, 4, 4)]
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes]
    options = compiler_options(mesh.devices.flat[0].device_kind)
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=options)
    text = compile_for(mesh, gradient, *arrays).as_text()
    found = Program.parse(text, devices).collectives()
    swaps = [one for one in found if one.kind == "all-to-all"]
    rotations = [one for one in found if one.kind == TRANSFER]
    assert len(swaps) == 8 and any(one.is_asynchronous for one in swaps)
    assert len(rotations) >= 3 + 4 and all(one.is_hidden for one in rotations)
