"""The order in which a ring visits the chips of a pod."""

import itertools
import math

import jax
import numpy as np
import pytest

from kernels.ring.torus import (
    closed_walk,
    in_boxes,
    pairs_along,
    place,
    ring_along,
)
from tests.kernels.walks import links
from tools.lib.compiled.pods import tpu_devices
from training.mesh import MESH_AXES, MeshShape, make_mesh

BOXES = (2,), (2, 2), (4, 4), (3, 4), (4, 3, 5), (8, 8, 8), (16, 16, 1, 2), (1, 5, 2, 3)


def places(
    rng: np.random.Generator, shape: tuple[int, ...], stride: int = 1
) -> list[tuple[int, ...]]:
    every = list(itertools.product(*(range(0, n * stride, stride) for n in shape)))
    rng.shuffle(every)
    return [tuple(map(int, place)) for place in every]


@pytest.mark.parametrize("shape", BOXES, ids=str)
def test_walk_visits_every_chip_once_and_goes_from_neighbour_to_neighbour(shape, rng):
    chips = places(rng, shape)
    walk = closed_walk(chips)
    assert sorted(walk) == list(range(math.prod(shape)))
    assert set(links([chips[i] for i in walk])) == {1}


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
    lower, upper = ([place(line[i]) for i in half] for half in ends)
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


def test_walk_through_an_odd_box_jumps_only_at_its_end(rng):
    chips = places(rng, (3, 3, 3))
    walk = [chips[i] for i in closed_walk(chips)]
    assert list(links(walk)[:-1]) == [1] * 26


def test_walk_takes_every_other_chip_as_neighbours(rng):
    chips = places(rng, (4, 4), stride=2)
    assert set(links([chips[i] for i in closed_walk(chips)])) == {2}


@pytest.mark.parametrize("chips", [[(0, 0), (1, 1), (0, 1)], [(0, 0)] * 4], ids=str)
def test_chips_that_fill_no_box_stay_in_their_order(chips):
    assert closed_walk(chips) == list(range(len(chips)))


def test_devices_that_know_no_place_stay_in_their_order():
    devices = np.array(jax.devices()).reshape(2, 4)
    np.testing.assert_array_equal(ring_along(devices, 1), devices)


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
        for walk in np.moveaxis(mesh, MESH_AXES.index("ring"), -1).reshape(-1, ring):
            assert set(links([place(device) for device in walk])) == {1}


def test_axis_after_the_ring_has_the_shortest_way_between_boxes():
    """Heads of a layer are summed over it; parameters are gathered over the others."""
    mesh = make_mesh(MeshShape(fsdp=4, ring=8, tensor=2), tpu_devices("v5e:8x8"))
    pairs = mesh.devices.reshape(-1, 2)
    assert {links(list(map(place, pair)))[0] for pair in pairs} == {2}


def test_rings_without_a_box_stay_as_they_are():
    devices = tpu_devices("v5e:4x4")[:12]
    assert in_boxes((1, 4, 3, 1), devices, 2) is None


def test_mesh_may_split_the_axes_of_a_torus():
    """128 and 4 are no products of whole sides of 8 x 8 x 8."""
    mesh = make_mesh(MeshShape(fsdp=128, ring=4), tpu_devices("v4:8x8x8"))
    assert mesh.devices.shape == (1, 128, 4, 1)
    assert len(set(mesh.devices.flat)) == 512
