"""TPU pods that are described instead of attached, and compiling for them.

libtpu holds the TPU's real compilers, which need no TPU: everything up to the machine
code is real, and nothing can run. Set JAX_PLATFORMS=cpu where no TPU is attached, or
JAX looks for one.
"""

import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ENVIRONMENT = {
    # Nothing is known of this host from the cloud's metadata server: do not ask it.
    "TPU_SKIP_MDS_QUERY": "1",
    # Nor is it asked for its own chips, which it may not have.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_HOST_BOUNDS": "1,1,1",
    # Compilers share no hardware, so they may run side by side.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""What libtpu has to find when it is loaded, if it is loaded to compile only."""


@dataclass(frozen=True)
class Pod:
    """How the chips of one kind are put together.

    smallest: chips along each axis of one host, the smallest topology.
    most_chips: of the pod (a power of two, if the pod has a few more).
    devices_per_chip: JAX devices; a megacore chip has two cores and is one device.
    wraps_from: an axis of a multiple of so many chips is closed to a ring, where all
      axes are; 0 if none is in a part of a pod.
    """

    smallest: tuple[int, ...]
    most_chips: int
    devices_per_chip: int = 1
    is_megacore: bool = False
    wraps_from: int = 0

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, bool, bool]:
        """Which of three axes are closed, of a topology of this shape."""
        sides = (*shape, 1, 1)[:3]
        step = self.wraps_from
        if not step or (len(shape) == 3 and any(side % step for side in shape)):
            return False, False, False
        return tuple(side % step == 0 for side in sides)

    def grow(self, devices: int) -> tuple[int, ...]:
        """Chips along each axis of the smallest topology with so many devices.

        It doubles the shortest axis, the last of those that are equally short, as the
        slices on sale do: 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4 ...

        Raises:
          ValueError: the pod is too small.
        """
        if devices > self.most_chips * self.devices_per_chip:
            raise ValueError(
                f"{devices} devices, but the pod has "
                f"{self.most_chips * self.devices_per_chip}: ask for fewer"
            )
        shape = list(self.smallest)
        while math.prod(shape) * self.devices_per_chip < devices:
            shape.reverse()
            shape[shape.index(min(shape))] *= 2
            shape.reverse()
        return tuple(shape)


PODS = {
    "v3": Pod((2, 2), 1024, devices_per_chip=2),
    "v4": Pod((2, 2, 1), 4096, is_megacore=True, wraps_from=4),
    "v5e": Pod((2, 2), 256, wraps_from=16),
    "v5p": Pod((2, 2, 1), 4096, is_megacore=True, wraps_from=4),
    "v6e": Pod((2, 2), 256, wraps_from=16),
}
"""Sizes of pods, and which axes are closed: docs.cloud.google.com/tpu/docs, the page of
each chip. A v3 pod is a torus only as a whole."""


def described(topology: str, devices: int = 1) -> list[jax.Device]:
    """The devices of a described pod, to make a mesh of.

    topology: a chip, for its smallest topology of at least `devices` devices ("v5e"),
      or a topology by name, chips along each axis ("v4:8x8x16").
    devices: how many are needed at least. All that the topology has are returned.

    Raises:
      ValueError: unknown chip, a topology that libtpu refuses, or too few devices.
      ModuleNotFoundError: there is no libtpu.
    """
    chip, _, shape = topology.partition(":")
    if chip not in PODS:
        raise ValueError(
            f"chip {chip!r} of {topology=} is not one of {', '.join(PODS)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "libtpu, the compiler for TPUs, is not installed: it is in "
            "requirements-dev.txt"
        )
    pod = PODS[chip]
    shape = shape or "x".join(map(str, pod.grow(devices)))
    axes = len(pod.smallest)
    is_shape = re.fullmatch(rf"[1-9]\d*(x[1-9]\d*){{{axes - 1}}}", shape)
    if not is_shape or math.prod(map(int, shape.split("x"))) > pod.most_chips:
        raise ValueError(
            f"{topology=} must have chips along {axes} axes, "
            f"{chip}:{'x'.join('2' * axes)}, and at most {pod.most_chips} in all"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    kind: dict[str, Any] = {"wrap": pod.wraps(tuple(map(int, shape.split("x"))))}
    if pod.is_megacore:
        kind["chip_config_name"] = "megacore"
    try:
        found = topologies.get_topology_desc(f"{chip}:{shape}", "tpu", **kind).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu refuses {chip}:{shape}: {error}") from error
    if len(found) < devices:
        raise ValueError(
            f"{topology} has {len(found)} devices, fewer than {devices=}: name a "
            f"larger topology, or {chip!r} for one that is large enough"
        )
    return found


def compile_for(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any
) -> jax.stages.Compiled:
    """Compiles a function for a mesh of described devices.

    function: jitted (with its donations and shardings) or not.
    arguments: trees of `jax.ShapeDtypeStruct`; replicated where without a sharding.
    """

    def place(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = shape.sharding or NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    if not isinstance(function, jax.stages.Wrapped):
        function = jax.jit(function)
    # Some kernels ask for the chip they are compiled for, and look for it here.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = function.trace(*jax.tree.map(place, arguments))
        return traced.lower(lowering_platforms=("tpu",)).compile()
