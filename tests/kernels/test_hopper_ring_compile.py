"""Rings of Hopper kernels, compiled for described H200s: which transfers overlap.

Nothing runs here; the schedule that is read is the one that runs.
"""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels.backends import IMPLEMENTATIONS
from kernels.devices.compiler import compiler_options
from tests.support.ring_layers import (
    compile_without_bodies,
    compiled_gradients,
    layers_gradient,
    small_instructions,
)
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.pods import gpu_devices

pytestmark = pytest.mark.thorough

LENGTH = 1024
BACKEND = IMPLEMENTATIONS["hopper"]


def described_mesh(ring_size: int) -> Mesh:
    return Mesh(np.array(gpu_devices("h200", ring_size)), ("ring",))


@functools.cache
def compiled_ring(ring_size: int) -> jax.stages.Compiled:
    return compiled_gradients(described_mesh(ring_size), BACKEND, LENGTH)


@pytest.mark.parametrize("ring_size", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_transfer_overlaps_the_kernel_of_its_step(ring_size):
    """Keys, values and their gradients travel as one, and none of them is copied.

    The first rotation is the same in both directions, so XLA keeps what it brought.
    """
    program = compiled_ring(ring_size).as_text()
    (order,) = Program.parse(program, ring_size).orders()
    assert order == "sFd" * (ring_size - 1) + "F" + "B" + "sBd" * ring_size
    assert not re.search(rf"= \w+\[1,{LENGTH},[24],128\]\S* copy\(", program)


def test_the_backward_of_a_layer_does_not_run_the_forward_ring_again():
    mesh = described_mesh(2)
    gradient, inputs = layers_gradient(mesh, BACKEND, LENGTH)
    program = compile_without_bodies(mesh, gradient, *inputs).as_text()
    orders = Program.parse(program, 2).orders()
    assert sorted(orders) == ["sBd" * 3, "sFdF"]


def test_a_step_of_a_ring_in_a_loop_runs_few_instructions_beside_its_kernels():
    """Slices of tables, and the addition of dk and dv."""
    mesh = described_mesh(32)
    gradient, inputs = layers_gradient(mesh, BACKEND, LENGTH)
    text = compile_without_bodies(mesh, gradient, *inputs).as_text()
    # At 82d0029 each step of the backward found its live tiles: 12 of them. At 930fe32e
    # forward steps had tables of them: 4 or more.
    assert 2 <= small_instructions(text, 32) < 4


def compiled_transfers(gpu_transfers: str) -> tuple[list[str], list[str], str]:
    """Compiles a ring of two; returns orders, modes of its transfers, and the text."""
    mesh = described_mesh(2)
    gradient, inputs = layers_gradient(mesh, BACKEND, LENGTH)
    options = compiler_options(mesh, gpu_transfers)
    program = jax.jit(gradient, compiler_options=options)
    text = compile_without_bodies(mesh, program, *inputs).as_text()
    modes = re.findall(r'permute-start\(.*"collectives_mode":"(\w+)"', text)
    return sorted(Program.parse(text, 2).orders()), modes, text


@pytest.mark.parametrize(
    "gpu_transfers, mode, is_registered",
    [
        ("nccl", "COLLECTIVES_MODE_INVALID", False),
        ("peer", "COLLECTIVES_PEER_MEMORY", False),
        ("symmetric", "COLLECTIVES_SYMMETRIC_MEMORY", True),
    ],
)
def test_transfers_of_a_mode_are_ordered_alike(gpu_transfers, mode, is_registered):
    """Symmetric ones are between arrays in memory that all GPUs have registered."""
    orders, modes, text = compiled_transfers(gpu_transfers)
    assert orders == ["sBd" * 3, "sFdF"]
    assert len(modes) == 4 and set(modes) == {mode}
    assert ("S(1)" in text) == is_registered


@pytest.mark.slow
def test_temporary_memory_does_not_grow_with_the_ring():
    temporary = [
        compiled_ring(size).memory_analysis().temp_size_in_bytes for size in (4, 8)
    ]
    assert temporary[1] <= 1.01 * temporary[0]
