"""Rings of Hopper kernels, compiled for described H200s by XLA: what hides behind what.

Nothing runs here; the schedule that is read is the one that runs.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import hopper, layout, masks, ring
from tools.h200 import compile_for, described
from tools.schedule import Program

LENGTH = 1024


def described_mesh(ring_size: int) -> Mesh:
    return Mesh(np.array(described(ring_size)), ("ring",))


def array(*shape: int, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)


def striped_attention(mesh: Mesh):
    """The ring on global arrays, and what all of its queries see."""
    ring_size = mesh.size
    # The module itself: by its name, tests get it interpreted.
    this_ring = ring.Ring("ring", ring_size, layout.Striped(), 0.1, hopper)
    spec = P(None, "ring")
    attend = jax.shard_map(
        lambda *operands: ring.attend(this_ring, *operands)[0],
        mesh=mesh,
        in_specs=(spec,) * 5,
        out_specs=spec,
        check_vma=False,
    )
    tokens = np.arange(ring_size * LENGTH, dtype=np.int32)
    order = layout.permute(tokens, layout.Striped(), ring_size, 0)
    visible = masks.causal()(order, ring_size * LENGTH)
    return attend, masks.Visible(*(jnp.asarray(bound) for bound in visible))


@functools.cache
def compiled_ring(ring_size: int) -> jax.stages.Compiled:
    """The gradients of q, k and v."""
    mesh = described_mesh(ring_size)
    attend, visible = striped_attention(mesh)

    def gradients(q, k, v, d_out):
        return jax.vjp(lambda *qkv: attend(*qkv, *visible), q, k, v)[1](d_out)

    sharding = NamedSharding(mesh, P(None, "ring"))
    q, k = (array(1, ring_size * LENGTH, h, 128, sharding=sharding) for h in (4, 2))
    return compile_for(mesh, gradients, q, k, k, q)


@functools.cache
def compiled_layers(ring_size: int) -> str:
    """Gradients of two scanned layers that save what the ring gives."""
    mesh = described_mesh(ring_size)
    attend, visible = striped_attention(mesh)
    policy = jax.checkpoint_policies.save_only_these_names(
        "attention_out", "attention_lse"
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, weight):
        return attend(x * weight, x + weight, x - weight, *visible), None

    def loss(x, weights):
        out, _ = jax.lax.scan(layer, x, weights)
        return jnp.square(out.astype(jnp.float32)).sum()

    sharding = NamedSharding(mesh, P(None, "ring"))
    x = array(1, ring_size * LENGTH, 2, 128, sharding=sharding)
    return compile_for(mesh, jax.grad(loss), x, array(2, 128)).as_text()


@pytest.mark.parametrize("ring_size", [4, 8])
def test_every_transfer_hides_behind_the_kernel_of_its_hop(ring_size):
    """But the last one of dk and dv, which travel with the keys and values.

    The first rotation is the same in both directions, so XLA keeps what it brought.
    """
    program = compiled_ring(ring_size).as_text()
    (order,) = Program.parse(program, ring_size).orders()
    hops = ring_size - 1
    assert order == "sFd" * hops + "F" + "B" + "sBd" * hops + "sd"


def test_the_backward_of_a_layer_does_not_run_the_forward_ring_again():
    orders = Program.parse(compiled_layers(4), 4).orders()
    assert sorted(orders) == ["sBd" * 4 + "sd", "sFd" * 3 + "F"]


@pytest.mark.parametrize("ring_size", [4, 8])
def test_nothing_of_the_size_of_keys_is_copied(ring_size):
    program = compiled_ring(ring_size).as_text()
    assert not re.search(rf"= \w+\[1,{LENGTH},[24],128\]\S* copy\(", program)


def test_temporary_memory_does_not_grow_with_the_ring():
    temporary = [
        compiled_ring(size).memory_analysis().temp_size_in_bytes for size in (4, 8)
    ]
    assert temporary[1] <= 1.01 * temporary[0]
