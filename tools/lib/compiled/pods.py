"""AOT topologies of TPUs and GPUs that are not attached, and compiling for them.

libtpu and JAX's CUDA plug-in hold the real compilers, which need no chip: everything up
to the machine code is real, and nothing can run. Set JAX_PLATFORMS=cpu where no chip is
attached, or JAX looks for one.
"""

import dataclasses
import difflib
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

from kernels.devices import chips
from kernels.devices.chips import Chip
from kernels.devices.torus import wraps
from tools.lib.compiled.gpus import GPUS

MOST_HOSTS = 64

ENVIRONMENT = {
    # Do not query the cloud's metadata server.
    "TPU_SKIP_MDS_QUERY": "1",
    # Do not look for chips of this host.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_HOST_BOUNDS": "1,1,1",
    # Compilers share no hardware, so they may run side by side.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment variables under which libtpu loads to compile only."""

GPU_OPTIONS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
"""XLA's defaults, whatever XLA_FLAGS sets for the programs that this process runs."""


@dataclass(frozen=True)
class Generation:
    """The pods of one TPU generation.

    smallest: chips along each axis of the smallest topology, one host.
    most_chips: chips of a pod, rounded down to a power of two.
    devices_per_chip: JAX devices; a megacore chip has two cores and is one device.
    """

    smallest: tuple[int, ...]
    most_chips: int
    devices_per_chip: int = 1
    is_megacore: bool = False

    def grow(self, devices: int) -> tuple[int, ...]:
        """Returns chips along each axis of the smallest slice with this many devices.

        Doubles the shortest axis, the last of equals, as the slices on sale do: 2x2x1,
        2x2x2, 2x2x4, 2x4x4, 4x4x4 ...

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
    "v3": Generation((2, 2), 1024, devices_per_chip=2),
    "v4": Generation((2, 2, 1), 4096, is_megacore=True),
    "v5e": Generation((2, 2), 256),
    "v5p": Generation((2, 2, 1), 4096, is_megacore=True),
    "v6e": Generation((2, 2), 256),
    "tpu7x": Generation((2, 2, 1), 8192, devices_per_chip=2),
}
"""Sizes of pods: docs.cloud.google.com/tpu/docs, the page of each chip."""


def device_kind(chip: str) -> str:
    """Returns the `jax.Device.device_kind` of a chip of PODS."""
    by_name = {known.name.removeprefix("TPU ").lower(): known for known in chips.CHIPS}
    return by_name[chip].device_kinds[0]


def tpu_devices(topology: str, devices: int = 1) -> list[jax.Device]:
    """Returns the devices of an AOT topology of TPUs.

    topology: a chip, for its smallest topology of at least `devices` devices ("v5e"),
      or a topology by name, chips along each axis ("v4:8x8x16").
    devices: least number of devices; returns all that the topology has.

    Raises:
      ValueError: unknown chip, a topology that libtpu refuses, or too few devices.
      ModuleNotFoundError: there is no libtpu.
    """
    chip, _, shape = topology.partition(":")
    if chip not in PODS:
        raise ValueError(
            f"chip {chip!r} of {topology=} must be one of {', '.join(PODS)}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "libtpu, the compiler for TPUs, is not installed: it is in "
            "requirements/dev.txt"
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
    sides = tuple(map(int, shape.split("x")))
    kind: dict[str, Any] = {"wrap": wraps(device_kind(chip), sides)}
    if pod.is_megacore:
        kind["chip_config_name"] = "megacore"
    try:
        known = topologies.get_topology_desc(f"{chip}:{shape}", "tpu", **kind).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu refuses {chip}:{shape}: {error}") from error
    if len(known) < devices:
        raise ValueError(
            f"{topology} has {len(known)} devices, fewer than {devices=}: name a "
            f"larger topology, or {chip!r} for one that is large enough"
        )
    return known


def gpu_devices(name: str, gpus: int = 1, hosts: int = 1) -> list[jax.Device]:
    """Returns GPUs of some hosts as an AOT topology; name: of GPUS.

    Raises:
      ModuleNotFoundError: there is no CUDA plug-in.
    """
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ModuleNotFoundError(
            "jax-cuda13-plugin, which holds the compiler for NVIDIA GPUs, is not "
            "installed: it is in requirements/dev.txt"
        )
    return topologies.get_topology_desc(
        "",
        "cuda",
        topology=f"1x{hosts}x{gpus}",
        target_config=GPUS[name].target_config(),
    ).devices


def compile_for(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any
) -> jax.stages.Compiled:
    """Compiles a function for a mesh of AOT devices.

    function: jitted (with its donations and shardings) or not.
    arguments: trees of `jax.ShapeDtypeStruct`; replicated where without a sharding.
    """

    def on_mesh(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = shape.sharding or NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    if not isinstance(function, jax.stages.Wrapped):
        function = jax.jit(function)
    is_tpu = mesh.devices.flat[0].platform == "tpu"
    platform, options = ("tpu", None) if is_tpu else ("cuda", GPU_OPTIONS)
    # Some kernels look up the chip that they are compiled for here.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = function.trace(*jax.tree.map(on_mesh, arguments))
        lowered = traced.lower(lowering_platforms=(platform,))
        return lowered.compile(compiler_options=options)


class TooLarge(Exception):
    """The compiler finds no program that fits into the chip's memory."""


def chip_of(topology: str, device_kind: str) -> Chip:
    """Returns the chip of a device; of GPUs, with the slowest link of the topology."""
    chip = chips.find(device_kind)
    name, _, shape = topology.partition(":")
    gpu = GPUS.get(name)
    if gpu and int(shape.partition("x")[0]) > gpu.joined_hosts:
        return dataclasses.replace(chip, interconnect_bytes_per_second=gpu.network)
    return chip


@dataclass(frozen=True)
class Pod:
    """The devices of an AOT topology, by name."""

    topology: str
    devices: list[jax.Device]

    @property
    def chip(self) -> Chip:
        """Capabilities of one device, as of `chip_of`."""
        return chip_of(self.topology, self.devices[0].device_kind)

    def first(self, count: int) -> "Pod":
        """Returns the first devices of the pod.

        Raises:
          ValueError: the pod has fewer.
        """
        if not 1 <= count <= len(self.devices):
            raise ValueError(
                f"devices={count} must be at least 1 and at most {len(self.devices)}, "
                f"the devices of {self.topology}"
            )
        return Pod(self.topology, self.devices[:count])


def compile_to_fit(mesh: Mesh, *program: Any) -> jax.stages.Compiled:
    """Compiles as `compile_for`.

    Raises:
      TooLarge: the compiler finds no program that fits.
    """
    try:
        return compile_for(mesh, *program)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sizes = re.findall(r"\b(\d+(?:\.\d+)?[KMGT])i?B?\b", str(error))[:2]
        how_much = f": it takes {sizes[0]} of {sizes[1]}" if sizes[1:] else ""
        raise TooLarge(f"the step does not fit{how_much}") from error


def known_topologies() -> dict[str, list[str]]:
    """Returns the names of the topologies on sale, by chip."""
    known = {}
    for chip, pod in PODS.items():
        counts = [math.prod(pod.smallest) * pod.devices_per_chip]
        while counts[-1] < pod.most_chips * pod.devices_per_chip:
            counts.append(2 * counts[-1])
        known[chip] = []
        for count in counts:
            shape = "x".join(map(str, pod.grow(count)))
            known[chip].append(f"{chip}:{shape}")
    for name, gpu in GPUS.items():
        known[name] = [f"{name}:1x{n}" for n in (1, 2, 4, 8) if n <= gpu.of_host]
        known[name] += [f"{name}:{2**n}x{gpu.of_host}" for n in range(1, 7)]
    return known


CLOUD_NAMES = re.compile(r"(v3|v4|v5p|v5litepod|v5e|v6e|tpu7x|v7x)-([1-9]\d*)")
"""Names of Google Cloud: chips of v5e and v6e, TensorCores of the others."""
OTHER_NAMES = {"v5litepod": "v5e", "v7x": "tpu7x"}
"""Names that clouds have for chips, and ours."""
SHOWN = 6
"""Topologies of a chip that an error lists."""


def aot_pod(name: str) -> Pod:
    """Returns the pod of a topology.

    name: chips along each axis, "v4:8x8x8"; as on Google Cloud, "v5litepod-64"; or
      hosts and GPUs of each, "h200:4x8".

    Raises:
      ValueError: there is no such topology; the message has the nearest, and some.
      ModuleNotFoundError: the compiler for it is not installed.
    """
    known = known_topologies()
    refusal = _no_topology(name, known)
    name = name.lower()
    if cloud := CLOUD_NAMES.fullmatch(name):
        chip = OTHER_NAMES.get(cloud[1], cloud[1])
        cores = 2 if chip in ("v4", "v5p") else PODS[chip].devices_per_chip
        by_cores = {}
        for topology in known[chip]:
            shape = topology.partition(":")[2]
            by_cores[cores * math.prod(map(int, shape.split("x")))] = shape
        name = f"{chip}:{by_cores.get(int(cloud[2]), '')}"
    chip, _, shape = name.partition(":")
    chip = OTHER_NAMES.get(chip, chip)
    name = f"{chip}:{shape}"
    if chip not in known or re.fullmatch(r"\d+(x\d+)+", shape) is None:
        raise ValueError(refusal)
    if chip in GPUS:
        sizes = [int(size) for size in shape.split("x")]
        if len(sizes) == 2:
            hosts, gpus = sizes
            if 1 <= gpus <= GPUS[chip].of_host and 1 <= hosts <= MOST_HOSTS:
                return Pod(name, gpu_devices(chip, gpus, hosts))
        raise ValueError(refusal)
    try:
        return Pod(name, tpu_devices(name))
    except ValueError as error:
        raise ValueError(refusal) from error


def _no_topology(asked: str, known: dict[str, list[str]]) -> str:
    """Says that there is no such topology, and what to name instead."""
    words = re.split("[:-]", asked.lower())
    chip = OTHER_NAMES.get(words[0], words[0])
    if chip not in known:
        near = difflib.get_close_matches(chip, known, n=1, cutoff=0.5)
        nearest = f"; the nearest is {known[near[0]][0]}" if near else ""
        return (
            f"topology={asked!r} must be a chip of {', '.join(known)} and its shape, "
            f"as v5e:2x4, or hosts and GPUs of each, as h200:1x8{nearest}"
        )
    some = known[chip][:SHOWN]
    near = difflib.get_close_matches(f"{chip}:{words[-1]}", known[chip], n=1)
    if near and near[0] not in some:
        some.append(near[0])
    last = known[chip][-1]
    return (
        f"topology={asked!r} must be {', '.join(some)} or another shape of up to {last}"
    )
