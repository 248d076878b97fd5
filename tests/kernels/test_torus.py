"""The order in which a ring visits the chips of a pod, or of several slices.

As little as can be goes through the network between slices.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from kernels.devices.slices import Shape, across_slices, by_slice, lay_out, ring_devices
from kernels.devices.torus import (
    closed_walk,
    coords_of,
    in_boxes,
    pairs_along,
    ring_along,
)
from tests.cases import table
from tools.lib.compiled.pods import gpu_devices, tpu_devices
from training.sharding.mesh import MESH_AXES, MeshShape, make_mesh

RING = MESH_AXES.index("ring")
BOXES = (2,), (2, 2), (4, 4), (3, 4), (4, 3, 5), (8, 8, 8), (1, 5, 2, 3), (3, 3, 3)


def places(
    rng: np.random.Generator, shape: tuple[int, ...], stride: int = 1
) -> list[tuple[int, ...]]:
    every = list(itertools.product(*(range(0, n * stride, stride) for n in shape)))
    rng.shuffle(every)
    return [tuple(map(int, place)) for place in every]


def links(walk: Sequence[Sequence[int]]) -> np.ndarray:
    """Links between each chip and the next, from the last to the first at its end."""
    return np.abs(np.subtract(walk, np.roll(walk, -1, axis=0))).sum(axis=1)


@pytest.mark.parametrize("shape", BOXES, ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_walk_visits_every_chip_once_and_goes_from_neighbour_to_neighbour(
    shape, stride, rng
):
    """Through an odd box it jumps at its end; neighbours may be every other chip."""
    chips = places(rng, shape, stride)
    walk = closed_walk(chips)
    size = math.prod(shape)
    assert sorted(walk) == list(range(size))
    assert set(links([chips[i] for i in walk])[: size - size % 2]) == {stride}


@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (3, 4, 4), (8, 8, 8), (16, 16, 1)])
def test_pairs_of_a_walk_lie_alike(shape, rng):
    chips = places(rng, shape)
    pairs = np.array([chips[i] for i in closed_walk(chips)]).reshape(-1, 2, len(shape))
    assert len(np.unique(np.abs(np.subtract(*pairs.swapaxes(0, 1))), axis=0)) == 1


@pytest.mark.parametrize("shape", [MeshShape(ring=64), MeshShape(fsdp=64)], ids=str)
def test_lower_and_upper_ends_of_pairs_are_halves_of_the_torus(shape):
    devices = make_mesh(shape, tpu_devices("v4:4x4x4")).devices
    axis = MESH_AXES.index("ring" if shape.ring > 1 else "fsdp")
    ends, pairs = pairs_along(devices, axis)
    line = devices.reshape(-1)
    lower, upper = ([coords_of(line[i]) for i in half] for half in ends)
    assert {tuple(np.subtract(b, a)) for a, b in zip(lower, upper, strict=True)} == {
        (0, 0, 1, 0)
    }
    assert pairs == tuple((i, i + 1) for i in range(0, 64, 2))


def test_devices_whose_pairs_differ_have_no_groups():
    devices = np.array(tpu_devices("v4:4x4x4"))
    assert pairs_along(devices[[0, 1, 4, 8]], 0) is None
    assert pairs_along(np.array(jax.devices()), 0) is None


@pytest.mark.parametrize(
    "shape, parts", [((4, 4), 2), ((2, 16), 4), ((16, 16, 1), 2), ((8, 8, 8), 4)]
)
def test_parts_of_a_walk_by_rows_are_boxes_walked_alike(shape, parts, rng):
    chips = places(rng, shape)
    walk = [chips[i] for i in closed_walk(chips, by_rows=True)]
    assert sorted(walk) == sorted(chips)
    assert set(links(walk)[:-1]) == {1}
    # Around the torus, the last is a neighbour of the first.
    assert sorted(np.subtract(walk[-1], walk[0])) == [0] * (len(shape) - 1) + [
        max(shape) - 1
    ]
    first, *others = np.split(np.array(walk), parts)
    assert np.prod(np.ptp(first, axis=0) + 1) == len(first)
    for other in others:
        assert len(np.unique(other - first, axis=0)) == 1


@pytest.mark.parametrize("chips", [[(0, 0), (1, 1), (0, 1)], [(0, 0)] * 4], ids=str)
def test_chips_that_fill_no_box_stay_in_their_order(chips):
    assert closed_walk(chips) == list(range(len(chips)))


@pytest.mark.parametrize(
    "pod",
    ["v3:4x4", "v4:2x2x4", "v4:4x4x4", "v4:8x8x8", "v5e:4x8", "v5e:8x8", "v6e:16x16"],
)
def test_rings_of_every_mesh_are_closed_walks(pod):
    devices = tpu_devices(pod)
    sizes = [2**i for i in range(len(devices).bit_length())]
    for ring, tensor in itertools.product(sizes[1:], sizes[:4]):
        if len(devices) % (ring * tensor):
            continue
        mesh = make_mesh(MeshShape(fsdp=-1, ring=ring, tensor=tensor), devices).devices
        assert len(set(mesh.flat)) == len(devices)
        for walk in np.moveaxis(mesh, RING, -1).reshape(-1, ring):
            assert set(links([coords_of(device) for device in walk])) == {1}


def test_axis_after_the_ring_has_the_shortest_way_between_boxes():
    """Heads of a layer are summed over it; parameters are gathered over the others."""
    mesh = make_mesh(MeshShape(fsdp=4, ring=8, tensor=2), tpu_devices("v5e:8x8"))
    pairs = mesh.devices.reshape(-1, 2)
    assert {links(list(map(coords_of, pair)))[0] for pair in pairs} == {2}


def test_mesh_may_split_the_axes_of_a_torus():
    """128 and 4 are no products of whole sides of 8 x 8 x 8."""
    mesh = make_mesh(MeshShape(fsdp=128, ring=4), tpu_devices("v4:8x8x8"))
    assert mesh.devices.shape == (1, 128, 4, 1)
    assert len(set(mesh.devices.flat)) == 512


def test_devices_in_no_box_or_without_a_place_stay_in_their_order():
    assert in_boxes((1, 4, 3, 1), tpu_devices("v5e:4x4")[:12], 2) is None
    for devices in (jax.devices(), gpu_devices("h200", 8)):
        line = np.array(devices)
        np.testing.assert_array_equal(ring_along(line, 0), line)


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


def rings_of(mesh: np.ndarray) -> np.ndarray:
    """Each ring of a mesh, a row."""
    return np.moveaxis(mesh, RING, -1).reshape(-1, mesh.shape[RING])


def test_rings_of_gpus_stay_in_a_host_where_they_fit():
    """Of these XLA knows host and number, which looks like a torus of 2 x 8."""
    gpus = gpu_devices("h200", 8, hosts=2)
    assert gpus[8].coords == [0, 1, 0]
    for ring in rings_of(lay_out((1, 2, 8, 1), gpus)):
        assert len({gpu.process_index for gpu in ring}) == 1
    assert ring_devices(gpus) == gpus


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_a_ring_larger_than_a_slice_goes_through_one_slice_after_the_other(
    num_slices: int, rng: np.random.Generator
) -> None:
    chips = pod(rng, num_slices)
    (ring,) = rings_of(lay_out((1, 1, 16 * num_slices, 1), chips))
    assert set(ring) == set(chips)
    slices = [chip.slice_index for chip in ring]
    assert slices == [i // 16 for i in range(len(ring))]
    inside = np.equal(slices, np.roll(slices, -1))
    assert (~inside).sum() == (num_slices if num_slices > 1 else 0)
    assert set(links([chip.coords for chip in ring])[inside]) == {1}


@pytest.mark.parametrize("shape, axis", table("kernels.txt", "network"), ids=str)
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
        for ring in rings_of(mesh):
            assert set(links([chip.coords for chip in ring])) == {1}


@pytest.mark.parametrize(
    "shape, num_slices, across", table("kernels.txt", "across"), ids=str
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
    assert {*found} == {*devices} and links(
        [coords_of(one) for one in found]
    ).max() == 1
    assert ring_devices(devices[:1]) == devices[:1]
