"""Gradients that are scattered in permutes, against XLA's reduce-scatters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.devices import chips, torus
from kernels.devices.compiler import compiler_options
from models.adapters import multiply
from models.lora import Lora
from tests.cases.attention import QUICK
from tests.small.models import Run, assert_same, partition_of, run_on
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.pods import aot_pod, compile_for
from tools.lib.planning.estimate import synchronous_seconds
from tools.lib.planning.plan import kinds
from tools.lib.planning.roofline import Roofline
from training.sharding.mesh import MeshShape, Partition, make_mesh
from training.sharding.overlap import parameter_options, permutes_hide

EMBED = 168
WEIGHTS = {
    "rows": (("embed", None), 1, (EMBED, 6)),
    "columns": ((None, "embed"), 1, (6, EMBED)),
    "into_heads": (("embed", None, None), 1, (EMBED, 2, 3)),
    "of_heads": ((None, None, "embed"), 2, (2, 3, EMBED)),
}
"""Names of a weight's axes, how many of them are inputs, and its shape."""


def product(partition, x, shard, axis, inputs):
    size = shard.shape[axis] * partition.shards("embed")
    weights = {"": partition.multiplier(shard, axis, size, x.dtype)}
    return multiply(x, weights, "", Lora(), inputs)


def slopes(partition: Partition, name: str, rng: np.random.Generator) -> list:
    """Product with a weight, and the slopes of both; every device has its own rows."""
    names, inputs, shape = WEIGHTS[name]
    axis, devices = names.index("embed"), P(partition.mesh.axis_names)
    sides = shape[:inputs], shape[inputs:]
    x, dy = (
        rng.standard_normal((3 * partition.mesh.size, 5, *side), np.float32)
        for side in sides
    )
    shard = partition.spec(names, shape)

    def local(x, w, dy):
        def run(x, w):
            return product(partition, x, w, axis, inputs)

        y, pull = jax.vjp(run, partition.vary(x), w)
        return y, *pull(partition.vary(dy))

    run = jax.shard_map(
        local,
        mesh=partition.mesh,
        in_specs=(devices, shard, devices),
        out_specs=(devices, devices, shard),
    )
    w = rng.standard_normal(shape, np.float32)
    return jax.device_get(jax.jit(run, compiler_options=QUICK)(x, w, dy))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(
    "mesh, is_torus, unrolled",
    [
        ({"ring": 8}, True, 128),
        ({"ring": 8}, False, 4),
        ({"ring": 7}, False, 4),
        ({"fsdp": 2, "ring": 4}, False, 128),
        ({"ring": 3}, False, 128),
    ],
    ids=str,
)
def test_permutes_give_what_reduce_scatters_do(
    mesh, is_torus, unrolled, name, rng, monkeypatch
):
    """Along any axis; over pairs of a torus, two axes, and an odd number of devices.

    As instructions of their own, and in a loop where devices are more than `unrolled`.
    """
    monkeypatch.setattr("training.sharding.gathers.UNROLLED", unrolled)
    if is_torus:
        monkeypatch.setattr(torus, "coords_of", lambda device: divmod(device.id, 4))
        monkeypatch.setattr("training.sharding.mesh.MOST_SCATTERED", 4)
    seed = int(rng.integers(2**31))
    got, want = (
        slopes(
            partition_of(MeshShape(**mesh), permutes), name, np.random.default_rng(seed)
        )
        for permutes in (True, False)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [0, 6])
def test_a_model_whose_gradients_are_permuted_has_the_same(chunk):
    """Its feed-forward at once, or in chunks, whose gradients add up first."""
    fields = {"family": "every_part", "feed_forward_chunk_tokens": chunk}
    shape = MeshShape(fsdp=2, ring=4)
    permuting = Run(shape, "striped", permutes=True, **fields)
    text = permuting.program.as_text()
    assert " collective-permute" in text
    assert " reduce-scatter(" not in text
    (loss, got), (wanted_loss, wanted) = (
        run.answer() for run in (permuting, run_on(shape, "striped", **fields))
    )
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert_same(got, wanted, 1e-5)  # as on any other mesh


def test_permutes_are_taken_where_they_hide_and_scatters_do_not():
    found = {chip.name for chip in chips.CHIPS if permutes_hide(chip, 4096)}
    assert found == {"TPU v4", "TPU v5e"}
    assert not any(permutes_hide(chip, 2048) for chip in [None, *chips.CHIPS])


@pytest.mark.thorough
def test_sparse_cores_are_given_collectives_before_the_last_one_is_done():
    """Compiled for a v6e: two gathers, then the scatters of their gradients."""
    pod, size = aot_pod("v6e:2x2"), 1024
    partition = Partition(make_mesh(MeshShape(fsdp=4), pod.devices))

    def loss(x, first, second):
        for weight in (first, second):
            whole = partition.gather(weight, 0, size, x.dtype)
            x = jnp.tanh(x @ whole.astype(x.dtype))
        return x.astype(jnp.float32).sum()

    specs = (P("fsdp"),) * 3
    run = jax.shard_map(
        jax.grad(loss, (0, 1, 2)), mesh=partition.mesh, in_specs=specs, out_specs=specs
    )
    arguments = [
        jax.ShapeDtypeStruct(
            (rows, size), kind, sharding=NamedSharding(partition.mesh, P("fsdp"))
        )
        for rows, kind in ((2048, "bfloat16"), (size, "float32"), (size, "float32"))
    ]
    run = jax.jit(run, compiler_options=parameter_options(pod.chip))
    text = compile_for(partition.mesh, run, *arguments).as_text()
    program = Program.parse(text, partition.mesh.size)
    for kind in ("all-gather", "reduce-scatter"):
        order = [
            one.phase for one in program.computations[program.entry] if one.kind == kind
        ]
        assert order == ["start", "start", "done", "done"]


@pytest.mark.thorough
def test_scatters_hide_behind_the_products_that_make_them():
    """Compiled for a v5e, 4 Ki tokens a chip: two products and their slopes."""
    pod, tokens, (embed, wide) = aot_pod("v5e:2x4"), 4096, (1024, 2048)
    mesh = make_mesh(MeshShape(fsdp=2, ring=4), pod.devices)
    rows = P(mesh.axis_names)

    def waited(permutes: bool) -> dict[str, tuple[float, float]]:
        """Returns bytes sent and waited for, by kind of collective."""
        partition = Partition(mesh, permutes)

        def loss(x, first, second):
            y = jax.nn.silu(product(partition, x, first, 0, 1))
            return jnp.square(product(partition, y, second, 1, 1)).sum()

        names = ("embed", None), (None, "embed")
        shapes = (tokens * mesh.size, embed), (embed, wide), (wide, embed)
        specs = rows, *map(partition.spec, names, shapes[1:])
        run = jax.shard_map(
            jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs
        )
        arguments = [
            jax.ShapeDtypeStruct(
                shape, "float32" if n else "bfloat16", sharding=NamedSharding(mesh, s)
            )
            for n, (shape, s) in enumerate(zip(shapes, specs, strict=True))
        ]
        options = compiler_options(pod.devices[0].device_kind)
        run = jax.jit(run, compiler_options=options)
        program = Program.parse(compile_for(mesh, run, *arguments).as_text(), mesh.size)
        moved = program.collectives()
        known = synchronous_seconds(moved, pod.chip)
        beside = Roofline(program, pod.chip, known).beside
        found = kinds(moved, beside, pod.chip)
        return {kind.name: (kind.bytes_sent, kind.exposed_bytes) for kind in found}

    size = 7 / 8 * embed * wide
    before, after = waited(False), waited(True)
    assert before["reduce-scatter"] == (2 * 4 * size, 2 * 4 * size)
    sent, exposed = after["permute"]
    assert sent == 2 * 4 * size and after.keys() == {"permute", "all-gather"}
    # Along fsdp a permute has nothing beside it.
    assert exposed < 0.2 * sent
