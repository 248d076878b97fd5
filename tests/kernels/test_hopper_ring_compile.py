"""Rings of Hopper kernels, compiled for described H200s: which transfers overlap.

Nothing runs here; the schedule that is read is the one that runs.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from kernels.hopper import launch as hopper
from tests.ring_layers import (
    HEAD_DIM,
    SHARDED,
    layers_gradient,
    striped_attention,
)
from training.hlo import Program
from training.pods import compile_for, h200_devices

LENGTH = 1024


def described_mesh(ring_size: int) -> Mesh:
    return Mesh(np.array(h200_devices(ring_size)), ("ring",))


@functools.cache
def compiled_ring(ring_size: int) -> jax.stages.Compiled:
    """Compiles the gradients of q, k and v."""
    mesh = described_mesh(ring_size)
    attend = striped_attention(mesh, hopper, LENGTH)

    def gradients(q, k, v, d_out):
        return jax.vjp(attend, q, k, v)[1](d_out)

    sharding = NamedSharding(mesh, SHARDED)
    q, k = (
        jax.ShapeDtypeStruct(
            (1, ring_size * LENGTH, heads, HEAD_DIM), jnp.bfloat16, sharding=sharding
        )
        for heads in (4, 2)
    )
    return compile_for(mesh, gradients, q, k, k, q)


@functools.cache
def compiled_layers(ring_size: int) -> str:
    mesh = described_mesh(ring_size)
    gradient, inputs = layers_gradient(mesh, hopper, LENGTH)
    return compile_for(mesh, gradient, *inputs).as_text()


@pytest.mark.parametrize("ring_size", [4, 8])
def test_every_transfer_overlaps_the_kernel_of_its_step(ring_size):
    """Keys, values and their gradients travel as one.

    The first rotation is the same in both directions, so XLA keeps what it brought.
    """
    program = compiled_ring(ring_size).as_text()
    (order,) = Program.parse(program, ring_size).orders()
    assert order == "sFd" * (ring_size - 1) + "F" + "B" + "sBd" * ring_size


def test_the_backward_of_a_layer_does_not_run_the_forward_ring_again():
    orders = Program.parse(compiled_layers(2), 2).orders()
    assert sorted(orders) == ["sBd" * 3, "sFdF"]


@pytest.mark.parametrize("ring_size", [4, 8])
def test_nothing_of_the_size_of_keys_is_copied(ring_size):
    program = compiled_ring(ring_size).as_text()
    assert not re.search(rf"= \w+\[1,{LENGTH},[24],128\]\S* copy\(", program)


def test_temporary_memory_does_not_grow_with_the_ring():
    temporary = [
        compiled_ring(size).memory_analysis().temp_size_in_bytes for size in (4, 8)
    ]
    assert temporary[1] <= 1.01 * temporary[0]
