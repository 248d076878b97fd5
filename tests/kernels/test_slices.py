"""Meshes over several slices: as little as can be goes through the network."""

import itertools
import re
from dataclasses import dataclass

import numpy as np
import pytest

from kernels.ring.slices import (
    RING,
    Shape,
    across_slices,
    by_slice,
    lay_out,
    ring_devices,
)
from kernels.ring.torus import place
from tests.kernels.walks import links
from tools.lib.compiled.pods import tpu_devices
from training.mesh import MeshShape, make_mesh


@dataclass(frozen=True)
class Chip:
    """A TPU v4 chip as the layout sees it."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    process_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"


def pod(
    rng: np.random.Generator, num_slices: int, box: tuple[int, int, int] = (2, 2, 4)
) -> list[Chip]:
    """The chips of some slices, in an order that says nothing."""
    places = list(itertools.product(*map(range, box)))
    chips = [
        Chip(s * len(places) + i, s, place)
        for s in range(num_slices)
        for i, place in enumerate(places)
    ]
    rng.shuffle(chips)
    return chips


def rings(mesh: np.ndarray) -> np.ndarray:
    """Each ring of a mesh, a row."""
    return np.moveaxis(mesh, RING, -1).reshape(-1, mesh.shape[RING])


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_a_ring_larger_than_a_slice_goes_through_one_slice_after_the_other(
    num_slices: int, rng: np.random.Generator
) -> None:
    chips = pod(rng, num_slices)
    (ring,) = rings(lay_out((1, 1, 16 * num_slices, 1), chips))
    assert set(ring) == set(chips)
    slices = [chip.slice_index for chip in ring]
    assert slices == [i // 16 for i in range(len(ring))]
    inside = np.equal(slices, np.roll(slices, -1))
    assert (~inside).sum() == (num_slices if num_slices > 1 else 0)
    assert set(links([chip.coords for chip in ring])[inside]) == {1}


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((2, 1, 16, 1), 0),
        ((2, 4, 4, 1), 0),
        ((1, 2, 16, 1), 1),
        ((1, 8, 4, 1), 1),
        ((1, 4, 4, 2), 1),
    ],
)
def test_data_or_fsdp_go_through_the_network_where_a_ring_fits_in_a_slice(
    shape: Shape, axis: int, rng: np.random.Generator
) -> None:
    mesh = lay_out(shape, pod(rng, 2))
    numbers = np.vectorize(lambda chip: chip.slice_index)(mesh)
    assert len(set(mesh.flat)) == 32
    # The slice is known by the place along that axis alone.
    lines = np.moveaxis(numbers, axis, 0).reshape(shape[axis], -1)
    assert all(len(set(line)) == 1 for line in lines)
    half = shape[axis] // 2
    assert [line[0] for line in lines] == [0] * half + [1] * half
    if shape[RING] == 16:
        for ring in rings(mesh):
            assert set(links([chip.coords for chip in ring])) == {1}


@pytest.mark.parametrize(
    ("shape", "num_slices", "across"),
    [
        ((1, 1, 8, 1), 1, (1, 1, 1, 1)),
        ((4, 2, 8, 1), 4, (4, 1, 1, 1)),
        ((2, 6, 8, 1), 4, (2, 2, 1, 1)),
        ((3, 2, 8, 1), 6, (3, 2, 1, 1)),
        ((1, 3, 8, 2), 6, (1, 3, 2, 1)),
    ],
)
def test_the_axis_that_talks_least_goes_through_the_network(
    shape: Shape, num_slices: int, across: Shape
) -> None:
    assert across_slices(shape, num_slices) == across


def test_tensor_does_not_go_through_the_network(rng: np.random.Generator) -> None:
    with pytest.raises(ValueError) as caught:
        make_mesh(MeshShape(tensor=32), pod(rng, 2))
    message = str(caught.value)
    assert "data 1 x fsdp 1 x ring 1 x tensor 32" in message
    assert "2 slices" in message and "config.mesh" in message


def test_slices_of_unlike_sizes_are_refused(rng: np.random.Generator) -> None:
    chips = [chip for chip in pod(rng, 2) if chip.id != 31]
    with pytest.raises(ValueError, match=re.escape("{0: 16, 1: 15}")):
        by_slice(chips)


@pytest.mark.parametrize("pod", ["v4:2x2x4", "v5e:4x4", "v6e:8x8"])
def test_a_ring_of_devices_goes_from_neighbour_to_neighbour(pod):
    devices = tpu_devices(pod)
    found = ring_devices(devices)
    assert {*found} == {*devices} and links([place(one) for one in found]).max() == 1
    assert ring_devices(devices[:1]) == devices[:1]
