"""Devices in their places in a mesh: inside a slice by its links, slices by a network.

A TPU slice is linked by its own interconnect (ICI), and slices by a network (DCN) that
is slower; so are the GPUs of a host, and hosts. As few axes as can be go through the
network: `data`, whose devices talk once a step, then `fsdp`, and `ring` where nothing
else is left, as in a ring larger than a slice. Such a ring goes through the slices one
after the other, so that only one of a slice's devices sends to another slice.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from .torus import in_boxes, is_closed, ring_along

AXES = ("data", "fsdp", "ring", "tensor")
"""The last is of neighbours: a mesh's `ulysses` and `tensor` are one axis here."""
FSDP = AXES.index("fsdp")
RING = AXES.index("ring")

Shape = tuple[int, int, int, int]
"""Devices along each of AXES."""


def lay_out(
    shape: Shape, devices: Sequence[jax.Device], *, ring_parts: int = 1
) -> np.ndarray:
    """Returns the devices as an array of this shape.

    ring_parts: parts that a ring is cut into (see `torus.ring_along`).

    Raises:
      ValueError: slices of unlike sizes, or no axis to share them out over.
    """
    slices = by_slice(devices)
    across = across_slices(shape, len(slices))
    inside = tuple(n // m for n, m in zip(shape, across, strict=True))
    parts = np.empty(len(slices), object)
    # Slices have cut the ring into as many parts already.
    ring_parts = -(-ring_parts // across[RING])
    parts[:] = [_inside_a_slice(inside, part, ring_parts) for part in slices]
    return np.block(parts.reshape(across).tolist())


def ring_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns devices in the order of a ring that goes from neighbour to neighbour.

    For `jax.sharding.Mesh(np.array(ring_devices(jax.devices())), ("ring",))`: in the
    order of their numbers XLA may overlap none of a ring's transfers with kernels.
    Devices that do not know their place, as CPUs and GPUs, stay as they are.
    """
    return list(lay_out((1, 1, len(devices), 1), devices).flat)


def by_slice(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """Returns the devices of each slice, by number; those without are one slice."""
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    sizes = {number: len(part) for number, part in sorted(slices.items())}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"slices of unlike sizes cannot be one mesh; devices by slice: {sizes}"
        )
    return [slices[number] for number in sizes]


def across_slices(shape: Shape, num_slices: int) -> Shape:
    """Returns the number of slices along each axis."""
    across = [1] * len(AXES)
    left = num_slices
    # From the axis that talks least on: what is left over for the ring is little.
    for axis in range(RING + 1):
        across[axis] = math.gcd(shape[axis], left)
        left //= across[axis]
    if left > 1:
        sizes = " x ".join(f"{a} {n}" for a, n in zip(AXES, shape, strict=True))
        raise ValueError(
            f"the mesh {sizes} cannot be shared out over {num_slices} slices: make "
            f"data, fsdp or ring in config.mesh a multiple of {num_slices}; tensor "
            "(times ulysses) stays inside of a slice"
        )
    data, fsdp, ring, tensor = across
    return data, fsdp, ring, tensor


def _inside_a_slice(
    shape: tuple[int, ...], devices: Sequence[jax.Device], ring_parts: int
) -> np.ndarray:
    """Lays out a slice as JAX does if its rings are closed walks then, else in boxes.

    Without a ring the walk is along fsdp, over whose pairs parameters are scattered.
    """
    axis = RING if shape[RING] > 1 else FSDP
    laid_out = ring_along(
        mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True),
        axis,
        parts=ring_parts,
    )
    if ring_parts > 1 or is_closed(laid_out, axis):
        return laid_out
    boxes = in_boxes(shape, devices, axis)
    return laid_out if boxes is None else ring_along(boxes, axis)
