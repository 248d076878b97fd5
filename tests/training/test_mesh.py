"""Shapes of meshes, what is sharded over which axis, and work on the shards."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.devices import torus
from tasks.text import TextRun
from tests.cases import table
from tests.cases.attention import QUICK
from tests.small.models import partition_of
from tests.small.runs import small_config
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.pods import compile_for, tpu_devices
from training.sharding.mesh import MeshShape, Partition, make_mesh
from training.step import TrainState, initial_state


def abstract(**sizes: int) -> Partition:
    """A partition of devices that need not be there."""
    shape = MeshShape(**sizes)
    return Partition(shape.abstract_mesh())


@pytest.mark.parametrize("sizes, wanted", table("runs.txt", "mesh"))
def test_open_axis_takes_the_devices_that_remain_or_both_counts_are_said(sizes, wanted):
    if isinstance(wanted, dict):
        assert MeshShape(**sizes).fill(24) == MeshShape(**wanted)
    else:
        with pytest.raises(ValueError, match=wanted):
            MeshShape(**sizes).fill(24)


@pytest.mark.parametrize("sizes, embed, cut", table("runs.txt", "cut"))
def test_ring_is_cut_where_it_cannot_share_out_the_parameters(sizes, embed, cut):
    shape = MeshShape(**sizes)
    found = shape.cut_ring(embed)
    assert found == dataclasses.replace(shape, **cut)
    partition = Partition(found.abstract_mesh())
    assert partition.ring_size == shape.ring
    assert partition.sizes == shape.axes
    assert embed % partition.shards(partition.mesh_axes("embed", embed)) == 0


def test_ulysses_cuts_the_shards_of_the_ring_in_slices_of_neighbours():
    partition = partition_of(MeshShape(ring=2, ulysses=2, tensor=2))
    assert partition.mesh.axis_names == ("data", "fsdp", "ring", "ulysses", "tensor")
    assert (partition.ring_size, partition.slices) == (2, 2)
    assert partition.sizes["ring"] == partition.sizes["ulysses"] == 2
    assert partition.axes("sequence") == ("ring", "ulysses")
    assert partition.mesh_axes("embed", 8) == ("fsdp", "ring", "ulysses")
    mesh = make_mesh(MeshShape(ring=8, ulysses=4, tensor=2), tpu_devices("v5e:8x8"))
    first, *others = mesh.devices.reshape(8, 8)  # 8 boxes of 2 x 4 chips
    for box in (first, *others):
        sides = zip(*(device.coords for device in box), strict=True)
        assert sorted(len(set(side)) for side in sides) == [1, 2, 4]


OF_120 = {"data": 2, "fsdp": 3, "ring": 4, "tensor": 5}


def test_logical_axes_are_sharded_over_their_mesh_axes_or_refused():
    axes = abstract(**OF_120).mesh_axes
    assert axes("batch", 12) == ("data", "fsdp") and axes("sequence", 8) == ("ring",)
    assert axes(None, 7) == ()
    for name in "heads", "kv_heads", "mlp", "vocab":
        assert axes(name, 10) == ("tensor",)
        message = rf"52 {name} do not divide .* tensor \(5 shards\)"
        with pytest.raises(ValueError, match=message):
            axes(name, 52)
    with pytest.raises(ValueError, match=r"10 batch .* data, fsdp \(6 shards\)"):
        axes("batch", 10)
    # As finely as it divides; of two axes one by one, the larger.
    by_size = {24: ("fsdp", "ring"), 8: ("ring",), 9: ("fsdp",), 7: ()}
    assert {size: axes("embed", size) for size in by_size} == by_size
    assert abstract(fsdp=2, ring=4).mesh_axes("embed", 36) == ("ring",)
    assert abstract(fsdp=4, ring=2).mesh_axes("embed", 36) == ("fsdp",)


def test_spec_and_sharding_place_an_array_axis_by_axis(cube):
    names, shape = (None, "embed", "heads", None), (3, 8, 4, 5)
    spec = P(None, ("fsdp", "ring"), ("tensor",), None)
    assert cube.spec(names, shape) == spec and cube.spec((), ()) == P()
    assert cube.sharding(names, shape) == NamedSharding(cube.mesh, spec)
    with pytest.raises(ValueError, match=r"names=\('batch',\) do not fit shape=\(4, 2"):
        cube.spec(("batch",), (4, 2))
    count = abstract(**OF_120).shards
    named = {"batch": 6, "vocab": 5, ("fsdp", "ring"): 12, (): 1}
    assert {name: count(name) for name in named} == named


@pytest.fixture(scope="module")
def cube():
    return partition_of(MeshShape(fsdp=2, ring=2, tensor=2))


def test_parameter_used_in_a_loop_is_gathered_and_scattered_once(cube):
    """In the type of its use, and its gradient in its own; axis by axis of the mesh."""
    names = ("batch", "sequence", None), ("embed", None)

    def local(x, w):
        whole, x = cube.gather(w, 0, 8, x.dtype), cube.vary(x)
        step = jax.checkpoint(
            lambda x: jnp.tanh(x @ whole.astype(x.dtype)), prevent_cse=False
        )
        y, _ = jax.lax.scan(lambda x, _: (step(x), None), x, length=5)
        # Every shard of `tensor` has computed the same.
        return cube.total(y.sum() / 2, ("batch", "sequence", "mlp"))

    shapes = (
        jax.ShapeDtypeStruct((4, 6, 8), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
    )
    run = jax.jit(jax.grad(cube.over_shards(local, names, ()), 1))
    program = run.lower(*shapes).as_text()
    moved = re.findall(
        r"stablehlo\.(all_gather|reduce_scatter).*? : \(tensor<[x\d]*(\w+)>\)",
        program,
        re.DOTALL,
    )
    assert moved == [("all_gather", "bf16")] * 2 + [("reduce_scatter", "f32")] * 2


def test_a_torus_is_gathered_by_pairs_and_then_by_their_ends(monkeypatch, rng):
    """Where one axis shares out parameters over all of it; chips of a box of 2 x 4."""
    monkeypatch.setattr(torus, "coords_of", lambda device: divmod(device.id, 4))
    monkeypatch.setattr("training.sharding.mesh.MOST_SCATTERED", 4)
    partition = partition_of(MeshShape(ring=8))
    w = jnp.asarray(rng.standard_normal((16, 3)), jnp.float32)
    gradients = jnp.asarray(rng.standard_normal((8, 16, 3)), jnp.float32)

    shards = P(partition.mesh.axis_names)

    def local(w, gradient):
        gather = functools.partial(partition.gather, axis=0, size=16, dtype=w.dtype)
        whole, pull = jax.vjp(gather, partition.vary(w))
        return whole, *pull(partition.vary(gradient[0]))

    local = jax.shard_map(local, mesh=partition.mesh, in_specs=shards, out_specs=shards)
    run = jax.jit(local, compiler_options=QUICK)
    groups = re.findall(
        r"replica_groups = .*?tensor<(\w+)xi64>", run.lower(w, gradients).as_text()
    )
    assert groups == ["4x2", "2x4", "2x4", "4x2"]
    whole, scattered = run(w, gradients)
    np.testing.assert_array_equal(whole.reshape(8, 16, 3), np.stack([w] * 8))
    np.testing.assert_allclose(scattered, gradients.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.quick
def test_gradients_of_every_shape_are_scattered_by_the_compiler_of_a_tpu():
    """And none is all-reduced: heads in a third axis, odd numbers of lanes, columns."""
    shapes = [((512, 4, 128), 0), ((512, 1002 * 128), 0), ((384, 512), 1)]
    mesh = make_mesh(MeshShape(fsdp=8), tpu_devices("v5e:2x4", 8))
    partition = Partition(mesh)

    def local(*parts):
        def loss(parts):
            wholes = (
                partition.gather(part, axis, 512, jnp.bfloat16)
                for part, (_, axis) in zip(parts, shapes, strict=True)
            )
            return sum(jnp.square(whole).sum() for whole in wholes)

        return jax.grad(loss)(parts)

    specs = tuple(P(*(None,) * axis, "fsdp") for _, axis in shapes)
    scatter = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for (shape, _), spec in zip(shapes, specs, strict=True)
    ]
    text = compile_for(mesh, scatter, *arguments).as_text()
    found = {one.kind for one in Program.parse(text, 8).collectives()}
    assert {"reduce-scatter"} <= found <= {"all-gather", "reduce-scatter", "permute"}


@pytest.mark.thorough
def test_state_is_born_in_shards_with_the_values_it_has_on_one_device(cube):
    run = TextRun(small_config("", "", model__vocab_size=512), cube)
    model, optimizer, like = run.model, run.optimizer, run.state_like
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)

    def create(key: jax.Array) -> TrainState:
        return initial_state(model.create(key), optimizer)

    key = jax.random.key(3)
    on_mesh = jax.jit(create, out_shardings=shardings).lower(key)
    on_mesh = on_mesh.compile(compiler_options=QUICK)
    state = on_mesh(key)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, like)
    on_one = jax.jit(model.create, compiler_options=QUICK)(key)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
        jax.device_get(state.params),
        jax.device_get(on_one),
    )
    # The program of a device never held more than the largest shard.
    sizes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", on_mesh.as_text())
    largest = max(math.prod(map(int, size.split(","))) for size in sizes)
    assert largest == 512 * 32 // 8
