"""Tests Ulysses beneath the production ring against one device in float64."""

import dataclasses
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels import masks
from kernels.devices.compiler import compiler_options
from kernels.ring.ulysses import HeadShares, share_heads
from kernels.ring_attention import make_ring_attention
from tests.cases import table
from tests.cases.attention import COVERING, Case
from tests.support.rings import assert_as_on_one_device, ring_mesh, ring_with
from tests.support.simulated import BACKENDS
from tools.lib.compiled.hlo import TRANSFER, Program
from tools.lib.compiled.pods import compile_for, gpu_devices, tpu_devices
from training.sharding.mesh import MeshShape, make_mesh

QUICK_CASES = (
    # K below U; K that U does not divide; H that U does not divide: caps and sinks.
    (4, Case(2, "striped", "documents", 8, 31, 64, "sinks-cap")),
    (4, Case(1, "contiguous", "window", 2, 31, 64, "cap", heads=12)),
    (2, Case(2, "zigzag", "causal", 3, 31, 100, "sinks", heads=3)),
    (4, Case(2, "striped4", "none", 1, 31, 64, "sinks", heads=6)),
)
"""Devices of the Ulysses axis, and a case."""


# Also where gradients of repeated key/value heads are summed up in bfloat16: K = 1.
NARROW = Case(2, "striped", "causal", 8, 256, 64)


def cases():
    """Devices, a case, the implementation, the type.

    Slow: each case over 2 and 4 devices, in rings that 8 devices hold.
    """
    yield from ((*each, "blockwise", jnp.float32) for each in QUICK_CASES)
    yield 4, NARROW, "blockwise", jnp.bfloat16
    slow = [(2, NARROW, "blockwise", jnp.bfloat16)]
    for name in "reference", "pallas_tpu":
        slow += ((*each, name, jnp.float32) for each in QUICK_CASES)
    for case, devices, size in itertools.product(COVERING, (2, 4), (1, 2, 4)):
        if devices * size <= 8:
            case = dataclasses.replace(case, ring_size=size)
            slow.append((devices, case, "blockwise", jnp.float32))
    yield from (pytest.param(*each, marks=pytest.mark.slow) for each in slow)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("devices, case, name, dtype", list(cases()))
def test_heads_over_devices_match_one_device(devices, case, name, dtype, rng):
    make = ring_with(slices=devices)
    assert_as_on_one_device(rng, case, BACKENDS[name], dtype, make, devices)


@pytest.mark.parametrize(
    "heads, kv_heads, devices, way",
    table("kernels.txt", "heads", HeadShares=HeadShares),
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
        ring_mesh(ring_size, 4), layout=layout.Striped(), ulysses_axis="ulysses"
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
    bounds = {"all_gather": {"2x1x1x16xi32": 1}}
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
        implementation="pallas_tpu" if is_tpu else "hopper",
        ulysses_axis="ulysses",
    )

    def loss(q, k, v):
        return jnp.square(attend(q, k, v, masks.causal()).astype(jnp.float32)).sum()

    sharding = NamedSharding(mesh, P(None, ("ring", "ulysses")))
    shapes = [(1, 2048 * devices, heads, 128) for heads in (8, 4, 4)]
    arrays = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=sharding) for x in shapes]
    options = compiler_options(mesh)
    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=options)
    text = compile_for(mesh, gradient, *arrays).as_text()
    found = Program.parse(text, devices).collectives()
    swaps = [one for one in found if one.kind == "all-to-all"]
    rotations = [one for one in found if one.kind == TRANSFER]
    assert len(swaps) == 8 and any(one.is_asynchronous for one in swaps)
    assert len(rotations) >= 3 + 4 and all(one.is_hidden for one in rotations)
