"""Ways of a ring around a torus that share no link."""

import math

import jax
import numpy as np
import pytest

from kernels.ring.cycles import Walk, cycles_of_torus, disjoint_cycles
from kernels.ring.torus import Shape, is_closed, place
from tools.lib.compiled.pods import gpu_devices, tpu_devices
from training.mesh import MESH_AXES, MeshShape, make_mesh

RING = MESH_AXES.index("ring")
TORI = (4, 4), (16, 16), (4, 12), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16)


def assert_disjoint(walks: tuple[Walk, ...], places: np.ndarray, shape: Shape) -> None:
    """Checks walks over chips at these places (N, axes) of a torus of this shape."""
    links = set()
    for walk in walks:
        assert sorted(walk) == list(range(len(places)))
        here = places[list(walk)]
        there = np.roll(here, -1, axis=0)
        apart = (here - there) % shape
        assert (np.minimum(apart, shape - apart).sum(axis=1) == 1).all()
        ends = zip(here.tolist(), there.tolist(), strict=True)
        links |= {frozenset(map(tuple, pair)) for pair in ends}
    assert len(links) == len(walks) * len(places)  # none twice


@pytest.mark.parametrize("shape", TORI, ids=str)
def test_a_torus_has_as_many_disjoint_cycles_as_axes(shape):
    walks = cycles_of_torus(shape)
    assert len(walks) == len(shape)
    chips = np.array(list(np.ndindex(shape)))
    assert_disjoint(walks, chips, np.array(shape))


@pytest.mark.parametrize(
    "pod, shape, cycles",
    [
        ("v4:4x4x4", MeshShape(ring=64), 3),
        ("v4:4x4x4", MeshShape(fsdp=4, ring=16), 2),  # 4 x 4 of them
        ("v4:4x4x4", MeshShape(ring=16, tensor=4), 2),
        ("v5p:4x4x8", MeshShape(ring=128), 3),
        ("v5e:16x16", MeshShape(ring=256), 2),
        ("v6e:16x16", MeshShape(ring=256), 2),
        ("tpu7x:4x4x4", MeshShape(ring=64, tensor=2), 3),  # a core of each chip
    ],
    ids=str,
)
def test_rings_of_a_mesh_have_the_cycles_of_their_torus(pod, shape, cycles):
    devices = make_mesh(shape, tpu_devices(pod)).devices
    walks = disjoint_cycles(devices, RING)
    assert len(walks) == cycles
    assert all(walk[0] == 0 for walk in walks)
    for line in np.moveaxis(devices, RING, -1).reshape(-1, shape.ring):
        places = np.array([place(device) for device in line])
        sides = np.array([len(set(side)) for side in places.T])
        assert math.prod(sides) == shape.ring
        assert_disjoint(walks, places, sides)


@pytest.mark.parametrize(
    "pod, shape",
    [
        ("v5e:8x8", MeshShape(ring=64)),  # has no links from end to end
        ("v5e:2x4", MeshShape(ring=8)),
        ("v4:2x2x4", MeshShape(ring=16)),
        ("v5e:16x16", MeshShape(fsdp=2, ring=128)),  # of which one axis is closed
        ("v5e:16x16", MeshShape(fsdp=16, ring=16)),
        ("v4:4x4x4", MeshShape(fsdp=2, ring=32)),  # 4 x 4 x 2
        ("v3:4x4", MeshShape(ring=32)),
        ("tpu7x:4x4x4", MeshShape(ring=128)),  # two cores of each chip
    ],
    ids=str,
)
def test_a_ring_that_is_no_torus_is_its_only_cycle(pod, shape):
    devices = make_mesh(shape, tpu_devices(pod)).devices
    assert is_closed(devices, RING)
    assert disjoint_cycles(devices, RING) == (tuple(range(shape.ring)),)


def test_devices_that_know_no_place_are_one_cycle():
    for devices in (jax.devices(), gpu_devices("h200", 8)):
        line = np.array(devices)
        assert disjoint_cycles(line, 0) == (tuple(range(8)),)
