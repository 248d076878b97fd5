"""Builds the device mesh; RULES says what is sharded over which of its axes.

Axes: `data` and `fsdp` share out the batch, `ring` the sequence, `tensor` heads, the
feed-forward's width and the vocabulary. `ulysses` cuts each shard of the ring in slices
of its tokens, and for attention in heads. Parameters and optimizer state are sharded
over `fsdp`, `ring` and `ulysses` together: a ring of 1024 chips must not hold 1024
copies of a model. Where a ring is too large to share out a model's hidden size (3200
divides by 128, not by 512), it is two mesh axes, and `ring_outer` counts the copies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from kernels.devices.device import kernel_cores, matrix_unit
from kernels.devices.slices import lay_out
from kernels.devices.torus import is_closed, pairs_along
from training.sharding.gathers import Stages, Way, gather, multiply

MESH_AXES = ("data", "fsdp", "ring", "ulysses", "tensor")
"""Axes that a config names. A mesh has no `ulysses` of one device."""

RULES: dict[str, tuple[str, ...]] = {
    # of activations
    "batch": ("data", "fsdp"),
    "sequence": ("ring_outer", "ring", "ulysses"),
    "ring": ("ring_outer", "ring"),  # the shards to which a layout assigns tokens
    # of activations and parameters
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    # of parameters
    "embed": ("fsdp", "ring", "ulysses"),
    "experts": ("fsdp", "ring", "ulysses"),
}
"""Logical axis -> mesh axes, those of them that the mesh has.

Axes that are not named here (or None) are not sharded."""

Axes = tuple[str | None, ...]

MOST_SCATTERED = 4
"""Devices over all of which one collective may scatter; for more see `_stages`."""

HOST_MEMORY = "pinned_host"
"""Kind of the memory of a host that its devices read and write."""


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis; at most one may be -1: all that remain.

    ring_outer: of a ring that is two axes, rings of this many times `ring` devices.
    """

    data: int = 1
    fsdp: int = 1
    ring: int = 1
    tensor: int = 1
    ring_outer: int = 1
    ulysses: int = 1

    def __post_init__(self) -> None:
        sizes = tuple(getattr(self, axis) for axis in MESH_AXES)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            given = ", ".join(f"{axis}={getattr(self, axis)}" for axis in MESH_AXES)
            raise ValueError(
                f"{given}: axes are at least 1 device, and one of them may be -1, for "
                "all the devices that remain"
            )

    def fill(self, num_devices: int) -> "MeshShape":
        """Returns this shape with -1 replaced, for this many devices.

        Raises:
          ValueError: the axes do not multiply to the number of devices.
        """
        sizes = self.axes
        known = math.prod(size for size in sizes.values() if size > 0)
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if open_axes and num_devices % known == 0:
            sizes[open_axes[0]] = num_devices // known
        if math.prod(sizes.values()) != num_devices:
            given = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            remaining = "" if open_axes else " (-1 takes what remains)"
            raise ValueError(
                f"the mesh {given} does not match the {num_devices} devices there are: "
                f"change config.mesh so that its axes multiply to that{remaining}"
            )
        return MeshShape(**sizes)

    def cut_ring(self, embed: int) -> "MeshShape":
        """Returns this shape (without -1), with a ring that can share out parameters.

        embed: size of their axis of that name. The inner ring is as large as divides
        what fsdp and ulysses leave of it.
        """
        others = self.fsdp * self.ulysses
        if embed % others:
            return self
        inner = math.gcd(self.ring, embed // others)
        outer = self.ring_outer * self.ring // inner
        return dataclasses.replace(self, ring_outer=outer, ring=inner)

    @property
    def axes(self) -> dict[str, int]:
        """Axes of the mesh, and how many devices each has."""
        axes = {"data": self.data, "fsdp": self.fsdp}
        if self.ring_outer > 1:
            axes["ring_outer"] = self.ring_outer
        axes["ring"] = self.ring
        if self.ulysses != 1:
            axes["ulysses"] = self.ulysses
        return axes | {"tensor": self.tensor}

    def abstract_mesh(self, kind: str | None = None) -> AbstractMesh:
        """Makes a mesh of devices that need not be there, of a kind if it is known."""
        platform = "tpu" if kind and kind.startswith("TPU") else "gpu"
        device = kind and AbstractDevice(kind, None, platform)
        sizes = tuple(self.axes.values())
        types = (AxisType.Auto,) * len(sizes)
        return AbstractMesh(sizes, tuple(self.axes), types, abstract_device=device)


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """Makes a mesh of all the devices, laid out by `slices.lay_out`.

    `ulysses` and `tensor` lie together, as one axis of neighbours.

    Raises:
      ValueError: the shape does not match the devices, or not their slices.
    """
    axes = shape.fill(len(devices)).axes
    outer = axes.get("ring_outer", 1)
    inner = axes.get("ulysses", 1) * axes["tensor"]
    whole = axes["data"], axes["fsdp"], outer * axes["ring"], inner
    # Axes in the order of RULES["sequence"]: else a row's shards change places.
    laid_out = lay_out(whole, devices, ring_parts=outer)
    types = (AxisType.Auto,) * len(axes)
    return Mesh(laid_out.reshape(tuple(axes.values())), tuple(axes), axis_types=types)


@dataclass(frozen=True)
class Partition:
    """Places arrays on a mesh by the names of their axes.

    permutes: whether gradients are scattered in permutes between neighbours.
    """

    mesh: Mesh
    permutes: bool = False

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())

    @property
    def platform(self) -> str:
        """Of the devices: "cpu", "gpu" or "tpu"."""
        device = self.mesh.abstract_mesh.abstract_device
        return device.platform if device else "cpu"

    @property
    def kernel_units(self) -> tuple[int, int] | None:
        """Cores that share a kernel, and the side of their matrix units; of TPUs."""
        device = self.mesh.abstract_mesh.abstract_device
        if device is None or device.platform != "tpu":
            return None
        return kernel_cores(device.device_kind), matrix_unit(device.device_kind)

    @property
    def ring_size(self) -> int:
        """Shards of a sequence to which a layout assigns its tokens."""
        return self.shards("ring")

    @property
    def slices(self) -> int:
        """Slices of each of these shards, one a device: devices of `ulysses`."""
        return self.shards("sequence") // self.ring_size

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis that a config names."""
        shape = self.mesh.shape
        named = {axis: shape[axis] for axis in MESH_AXES if axis in shape}
        return named | {"ring": self.ring_size}

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Returns the axes of this mesh that RULES gives to a logical axis.

        With permutes, rings of neighbours first for parameters: they carry most of the
        bytes.
        """
        rules = RULES.get(name, ()) if name else ()
        axes = tuple(axis for axis in rules if axis in self.mesh.shape)
        if self.permutes and rules == RULES["embed"]:
            return tuple(sorted(axes, key=lambda axis: axis not in self._closed))
        return axes

    @functools.cached_property
    def _closed(self) -> frozenset[str]:
        """Axes of the mesh along which the last device is beside the first."""
        axes = enumerate(self.mesh.axis_names)
        return frozenset(name for i, name in axes if is_closed(self.mesh.devices, i))

    def mesh_axes(self, name: str | None, size: int) -> tuple[str, ...]:
        """Returns the mesh axes over which an axis of this name and size is sharded.

        Raises:
          ValueError: they do not divide it. Only parameters' "embed" axes may be
            shared out over fewer of them: those that cut it the finest.
        """
        axes = self.axes(name)
        if size % self.shards(axes) == 0:
            return axes
        if name == "embed":
            dividing = [axis for axis in axes if size % self.mesh.shape[axis] == 0]
            dividing.sort(key=lambda axis: -self.mesh.shape[axis])
            return tuple(dividing[:1])
        raise ValueError(
            f"{size} {name} do not divide over the mesh's axes {', '.join(axes)} "
            f"({self.shards(axes)} shards): change config.mesh or the model's sizes"
        )

    def divides(self, name: str, size: int) -> bool:
        """Returns whether all devices of a logical axis share out this size."""
        return size % self.shards(self.axes(name)) == 0

    def shards(self, name: str | tuple[str, ...]) -> int:
        """Counts the shards that a logical axis, or mesh axes, make of an array."""
        axes = self.axes(name) if isinstance(name, str) else name
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def spec(self, names: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns the partition of an array of this shape."""
        if len(names) != len(shape):
            raise ValueError(f"{names=} do not fit {shape=}")
        axes = map(self.mesh_axes, names, shape)
        return PartitionSpec(*(axis or None for axis in axes))

    def sharding(self, names: Axes, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of an array of this shape."""
        return NamedSharding(self.mesh, self.spec(names, shape))

    def on_host(self, sharding: NamedSharding) -> NamedSharding:
        """Returns the sharding in the memory of the devices' hosts."""
        mesh, spec = sharding.mesh, sharding.spec
        # GPUs that are not attached have no memories, so no kind of it would be kept.
        if isinstance(mesh, Mesh) and not mesh.devices.flat[0].addressable_memories():
            mesh = mesh.abstract_mesh
        return NamedSharding(mesh, spec, memory_kind=HOST_MEMORY)

    def over_shards(
        self,
        function: Callable,
        names: Sequence[Axes],
        result_names: Axes,
        beside: Axes | None = None,
    ) -> Callable:
        """Runs `function` on every device's shards of its arguments.

        names: one tuple of axis names an argument. Inside, a parameter still has to be
        gathered over its "embed" axis: see `gather`.
        result_names: of the one result, whose rank they have; () for a scalar.
        beside: of a second result, if there is one. What varies over which axes is
          not checked then: libraries' kernels inside cannot say it of their results.
        """

        def spec(of_result: Axes) -> PartitionSpec:
            return PartitionSpec(*(self.axes(name) or None for name in of_result))

        result = spec(result_names)
        if beside is not None:
            result = result, spec(beside)

        def call(*arrays: jax.Array) -> jax.Array:
            named = zip(names, arrays, strict=True)
            specs = tuple(self.spec(axes, x.shape) for axes, x in named)
            sharded = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=specs,
                out_specs=result,
                check_vma=beside is None,
            )
            return sharded(*arrays)

        return call

    def gather(
        self, shard: jax.Array, axis: int, size: int, dtype: jnp.dtype
    ) -> jax.Array:
        """Gathers, inside `over_shards`, a parameter's shards along its embed axis.

        It travels in `dtype`, in which it is used, and is returned in float32: the
        gradients of all uses add up in that. They are summed over devices and scattered
        back once, in that type too.

        axis: number of the axis named "embed"; size: its length in the whole array.
        """
        way = self._way(axis, size, dtype)
        # Varied first: gradients are scattered, and then only shards of them summed
        # over the mesh axes that hold copies.
        shard = self.vary(shard.astype(jnp.float32))
        return gather(shard, way) if way.stages else shard

    def multiplier(
        self, shard: jax.Array, axis: int, size: int, dtype: jnp.dtype
    ) -> jax.Array | Callable[[jax.Array, int], jax.Array]:
        """Gathers a parameter for one product, or returns (x, inputs) -> product."""
        way = self._way(axis, size, dtype)
        if not (self.permutes and way.stages):
            return self.gather(shard, axis, size, dtype)
        shard = self.vary(shard.astype(jnp.float32))
        return lambda x, inputs: multiply(x, shard, way, inputs)

    def _way(self, axis: int, size: int, dtype: jnp.dtype) -> Way:
        stages = self._stages(self.mesh_axes("embed", size))
        return Way(stages, axis, dtype, self.permutes)

    def _stages(self, axes: tuple[str, ...]) -> Stages:
        """Returns the collectives in which these axes are scattered, one after another.

        XLA turns a collective over all devices of a torus, also a gather, into an
        all-reduce of the whole array: twice the bytes. It does not over one axis after
        the other, nor over halves of the torus and then over pairs of neighbours.
        """
        axes = tuple(name for name in axes if self.mesh.shape[name] > 1)
        if len(axes) == 1 and isinstance(self.mesh, Mesh):
            number = self.mesh.axis_names.index(axes[0])
            halves = pairs_along(self.mesh.devices, number)
            if halves and self.mesh.size > MOST_SCATTERED:
                return tuple((axes[0], groups) for groups in halves)
        return tuple((name, None) for name in axes)

    def vary(self, x: jax.Array, but: Sequence[str | None] = ()) -> jax.Array:
        """Types `x`, inside `over_shards`, as differing between all devices.

        Its gradient is then summed over the devices here, and not at every use of it,
        in every round of a loop.

        but: logical axes over which it remains the same, as does what it is used with.
        """
        kept = jax.typeof(x).manual_axis_type.varying.union(*map(self.axes, but))
        same = tuple(axis for axis in self.mesh.axis_names if axis not in kept)
        return jax.lax.pcast(x, same, to="varying") if same else x

    def total(self, x: jax.Array, names: Sequence[str]) -> jax.Array:
        """Sums, inside `over_shards`, over the mesh axes of these logical axes."""
        axes = [axis for name in names for axis in self.axes(name)]
        return jax.lax.psum(x, tuple(axes))

    def largest(self, x: jax.Array, name: str) -> jax.Array:
        """Takes, inside `over_shards`, the maximum over a logical axis; no gradient."""
        return jax.lax.pmax(jax.lax.stop_gradient(x), self.axes(name))

    def shard_number(self, name: str) -> jax.Array:
        """Returns, inside `over_shards`, which shard of a logical axis is held here."""
        return jax.lax.axis_index(self.axes(name))
