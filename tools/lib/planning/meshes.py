"""Suggests meshes by a rule of thumb, without compiling anything.

Of the meshes over which the model and the rows divide, first those in which the step
should fit, then those whose ring transfers are hidden by its kernels,
then those whose attention kernels and exposed communication take the least time.

- It fits if parameters, optimizer, what layers save (`memory`) and a workspace by
  `workspace_bytes` leave SPARE_SHARE of the chip.
- A ring is hidden if a step's kernel lasts as long as its transfer. Of L tokens,
  H query and K key/value heads, the kernel computes L²/2 pairs for each of H, and 2·L
  rows are sent for each of K: so L·H/K must reach a bound, which is the chip's FLOP/s
  over its link's bytes a second times a factor of the kernel.
- Exposed are the gathers of parameters and the scattering of their gradients over
  (fsdp, ring, ulysses), the sums over data and tensor, the all-to-alls over ulysses,
  the ring step that returns gradients to their owners, and of a ring that is not hidden
  what outlasts the kernels.

A Ulysses axis of U devices makes a shard of the ring U times as long: L is that of the
ring. It must divide a device's query heads here, so that none are computed in vain.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import ml_collections

from tasks import base
from tasks.execution import local_tokens
from tasks.frozen import abstract_frozen
from tasks.task import TASKS, make_task
from tools.lib.planning.estimate import ring_passes
from tools.lib.planning.kernels import PRODUCTS, Kernels, Ring
from tools.lib.planning.memory import (
    SPARE_SHARE,
    device_bytes,
    saved_bytes,
)
from training.chips import Chip
from training.mesh import MESH_AXES, MeshShape, Partition

LAYER_ARRAYS, RING_ARRAYS = 6, 7
"""float32 arrays of the size of the queries: the most in compiled steps on TPUs.

RING_ARRAYS hold one head group at a time.
"""


@dataclass(frozen=True)
class Suggestion:
    """A mesh, and its figures.

    memory: estimated bytes on a device. fits: whether that leaves enough spare.
    hiding: time of a ring step's kernel over that of its transfer, in the worse
      direction and in the layers with the shortest; None without a ring.
    exposed_bytes: bytes that a device sends in a step while nothing is computed.
    seconds: estimated time of those, and of the step's attention kernels.
    """

    mesh: dict[str, int]
    memory: float
    fits: bool
    hiding: float | None
    exposed_bytes: float
    seconds: float

    @property
    def rank(self) -> tuple[bool, bool, float, float]:
        """Sort key; smaller is better."""
        is_hidden = self.hiding is None or self.hiding >= 1
        return not self.fits, not is_hidden, self.seconds, self.memory


def suggestions(
    config: ml_collections.ConfigDict,
    devices: int,
    chip: Chip,
    documents: tuple[int, ...] = (),
) -> list[Suggestion]:
    """Returns every mesh of this many devices that the config can have, best first.

    documents: lengths of those packed in a row, repeated; none for one document.

    Raises:
      ValueError: there is none; the message says what is wrong with one ring of all.
    """
    found = []
    for sizes in _factorisations(devices):
        partition = _partition(config, *sizes)
        try:
            found.append(suggestion(config, partition, chip, documents))
        except ValueError:
            continue
    if not found:
        suggestion(config, _partition(config, 1, 1, devices, 1, 1), chip)
    return sorted(found, key=lambda one: one.rank)


def suggestion(
    config: ml_collections.ConfigDict,
    partition: Partition,
    chip: Chip,
    documents: tuple[int, ...] = (),
) -> Suggestion:
    """Estimates memory and exposed communication of a mesh.

    Raises:
      ValueError: something does not divide over it.
    """
    system, ring_size = base.attention_system(config), partition.ring_size
    if partition.shards("sequence") > 1 and not system.sharded:
        raise ValueError(f"{config.attention=} has no ring of {ring_size}")
    if config.model.num_heads % (partition.mesh.shape["tensor"] * partition.slices):
        raise ValueError(f"{config.model.num_heads=} do not divide over {partition}")
    TASKS[config.task].batch_sharding(config, partition)  # before a model is built
    task = make_task(config, partition)
    optimizer, _ = base.make_optimizer(config, task.model)
    state = base.abstract_state(task.model, optimizer, partition)
    parameters = task.num_parameters
    held = state, abstract_frozen(task.model, partition)
    memory = device_bytes(held) + workspace_bytes(config, partition, parameters)
    if config.remat != "offload":
        memory += saved_bytes(config, partition)
    passes, kernels = ring_passes(config, partition, chip, documents), Kernels.of(chip)
    rings = {ring for _, ring, direction in passes if direction == "backward"}
    hiding = None
    if ring_size > 1:
        hiding = min(
            ring.kernel_seconds(kernels, direction)
            / ring.transfer_seconds(chip, direction)
            for ring, direction in itertools.product(rings, PRODUCTS)
        )
    link = chip.interconnect_bytes_per_second
    exposed = exposed_bytes(config, partition, rings.pop(), parameters)
    exposed += link * sum(
        times * ring.outlasting_seconds(chip, kernels, direction)
        for times, ring, direction in passes
    )
    attention = sum(
        times * ring.steps * ring.kernel_seconds(kernels, direction)
        for times, ring, direction in passes
    )
    return Suggestion(
        mesh=partition.sizes,
        memory=memory,
        fits=memory <= (1 - SPARE_SHARE) * chip.hbm_bytes,
        hiding=hiding,
        exposed_bytes=exposed,
        seconds=attention + exposed / link,
    )


def workspace_bytes(
    config: ml_collections.ConfigDict, partition: Partition, parameters: int
) -> float:
    """Estimates the memory of a step besides its state and saved activations.

    The buffers of a ring's backward, one layer's parameters in the compute type and
    their gradients in float32, and the same gradients of embedding and head.
    """
    model = TASKS[config.task].sizes(config)
    tensor = partition.mesh.shape["tensor"]
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    queries = local_tokens(config, partition) * model.num_heads * model.head_dim * 4
    tables = getattr(model, "vocab_size", 0) * model.hidden_size
    tables *= 1 if config.model.tied_embeddings else 2
    layer = (parameters - tables) / model.num_layers
    state = (itemsize + 4) * layer + 4 * tables
    arrays = LAYER_ARRAYS + RING_ARRAYS / config.attention_parts
    return (arrays * queries + state) / tensor


def exposed_bytes(
    config: ml_collections.ConfigDict,
    partition: Partition,
    ring: Ring,
    parameters: int,
) -> float:
    """Returns the bytes that a device sends in a step and that overlap no kernel.

    ring: of any kind of layers, which all send as much.
    """
    model, shape = config.model, partition.mesh.shape
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    shards, tensor = partition.shards("embed"), shape["tensor"]
    parameters /= tensor
    # Gathered forward and backward; the gradients are float32.
    sent = parameters * (shards - 1) / shards * (2 * itemsize + 4)
    sent += parameters / shards * 4 * _all_reduced(shape["data"])
    again = 0 if config.remat in ("everything", "products") else 2
    activations = local_tokens(config, partition) * model.hidden_size * itemsize
    sent += model.num_layers * (4 + again) * activations * _all_reduced(tensor)
    # q, out, k and v forward, again, and their gradients.
    heads = 2 * (ring.heads + ring.kv_heads) * partition.slices * model.head_dim
    swapped = local_tokens(config, partition) * heads * itemsize
    passes = 3 if again else 2
    sent += model.num_layers * passes * swapped * _exchanged(partition.slices, tensor)
    if ring.steps > 1:
        sent += model.num_layers * ring.keys_bytes
    return sent * config.train.microbatches


def _all_reduced(devices: int) -> float:
    """Returns the bytes that each device sends for every byte of an all-reduce."""
    return 2 * (devices - 1) / devices


def _exchanged(devices: int, tensor: int) -> float:
    """Returns the bytes over a link for every byte that a device has in an all-to-all.

    Of s devices along a side of their box, which they fill with those of tensor, the
    two in the middle pass on what each half sends to the other: s / 4 of an array.
    """
    if devices == 1:
        return 0.0
    side = 2 ** math.ceil(math.log2(devices * tensor) / 2)
    return max((devices - 1) / devices, side / 4)


def _factorisations(devices: int) -> Iterator[tuple[int, ...]]:
    """Yields every mesh shape of this many devices, as of MESH_AXES."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for sizes in itertools.product(divisors, repeat=len(MESH_AXES) - 1):
        if devices % math.prod(sizes) == 0:
            yield *sizes, devices // math.prod(sizes)


def _partition(config: ml_collections.ConfigDict, *sizes: int) -> Partition:
    """Returns a partition over abstract devices, cut as `base.partition` does."""
    shape = MeshShape(**dict(zip(MESH_AXES, sizes, strict=True)))
    return Partition(shape.cut_ring(config.model.hidden_size).abstract_mesh())
