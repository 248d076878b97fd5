"""Suggests meshes by a rule of thumb, without compiling anything.

Of the meshes over which the model and the rows divide, first those in which the step
should fit, then those that take the least time.

- It fits if `tasks.memory_choice.estimated_bytes` leaves SPARE_SHARE of the chip.
- What a ring's transfers outlast the kernels beside them is waited for (`clock`).
- Exposed are the gathers of parameters and the scattering of their gradients over
  (fsdp, ring, ulysses), the sums over data and tensor, and all-to-alls over ulysses.
  All but the last use both directions of a TPU's links.

A Ulysses axis of U devices makes a shard of the ring U times as long. It must divide a
device's query heads here, so that none are computed in vain.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import ml_collections

from data.progress import progress
from kernels.cost.choice import Choice
from kernels.cost.clock import RingCost
from kernels.devices.chips import Chip
from models.memory import KEEP_GATHERED, KEEP_PRODUCTS
from tasks.layout_choice import name_of, ring_passes, state_times, typical_rows
from tasks.memory_choice import SPARE_SHARE, estimated_bytes, flags, settled
from tasks.run import Run
from tasks.task import make_run
from tools.lib.compiled.hlo import TRANSFER
from tools.lib.planning.estimate import bytes_per_second
from training.sharding.mesh import MESH_AXES, MeshShape, Partition


@dataclass(frozen=True)
class Suggestion:
    """A mesh, and its figures.

    memory: estimated bytes on a device. fits: whether that leaves enough spare.
    layout, route: of the rings. remat: what layers keep, as flags.
    attention, ring_waits, other_waits: seconds of the kernels of a step (of Gated
      DeltaNet, the products), and of small instructions beside them, of ring transfers
      that outlast them, and of other exposed communication.
    products: other matrix products at the chip's peak, each once.
    """

    mesh: dict[str, int]
    memory: float
    fits: bool
    layout: str
    route: str
    remat: str
    attention: float
    ring_waits: float
    other_waits: float
    products: float

    @property
    def seconds(self) -> float:
        return self.attention + self.ring_waits + self.other_waits + self.products

    def row(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self) | {"seconds": self.seconds}

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Sort key; smaller is better."""
        return not self.fits, self.seconds, self.memory


def suggestions(
    config: ml_collections.ConfigDict,
    devices: int,
    chip: Chip,
    documents: tuple[int | str, ...] = (),
) -> list[Suggestion]:
    """Returns every mesh of a number of devices, best first.

    documents: as of `typical_rows`.

    Raises:
      ValueError: no mesh suits; the message says what is wrong with one ring of all.
    """
    rows = typical_rows(config, documents)
    alone = make_run(config, _partition(config, chip, (1, 1, 1, 1, 1)), rows)
    choices: dict[tuple[int, ...], Choice] = {}

    def suggested(sizes: tuple[int, ...]) -> Suggestion:
        # Data and fsdp share out rows alike: meshes with the same product of the two
        # have the same rings, whose layout is chosen once.
        alike = (sizes[0] * sizes[1], *sizes[2:])
        run = alone.counted_on(_partition(config, chip, sizes), choices.get(alike))
        run.check_batch()  # before anything is counted
        run = settled(replace(run, config=config))
        estimated = suggestion(run)
        choices[alike] = run.choice
        return estimated

    meshes = []
    all_sizes = [*_factorisations(devices)]
    with progress(len(all_sizes), " meshes") as bar:
        for sizes in all_sizes:
            with contextlib.suppress(ValueError):
                meshes.append(suggested(sizes))
            bar.update()
    if not meshes:
        suggested((1, 1, devices, 1, 1))  # which raises
    return sorted(meshes, key=lambda mesh: mesh.rank)


def count_parameters(config: ml_collections.ConfigDict, chip: Chip) -> int:
    """Returns the number of a config's parameters, which no mesh changes."""
    return make_run(config, _partition(config, chip, (1, 1, 1, 1, 1))).num_parameters


def suggestion(run: Run) -> Suggestion:
    """Estimates memory and time of a run's mesh, in its best layout.

    Raises:
      ValueError: something does not divide over it.
    """
    config, partition, chip = run.config, run.partition, run.chip
    if partition.shards("sequence") > 1 and not run.system.sharded:
        raise ValueError(f"{config.attention=} has no ring of {partition.ring_size}")
    if config.model.num_heads % (partition.mesh.shape["tensor"] * partition.slices):
        raise ValueError(f"{config.model.num_heads=} do not divide over {partition}")
    memory = estimated_bytes(run)
    passes = ring_passes(run, chip)
    of_states, states_wait = state_times(run, chip)
    ring = passes[0].ring
    tokens = config.data.batch_rows * config.data.context_tokens
    products = run.work(tokens, 0).model_flops
    return Suggestion(
        mesh=partition.sizes,
        memory=memory,
        fits=memory <= (1 - SPARE_SHARE) * chip.hbm_bytes,
        layout=name_of(run.layout),
        route="; ".join(dict.fromkeys(x.ring.describe() for x in passes)),
        remat=flags(config),
        attention=of_states
        + sum(x.times * (x.spent.kernels + x.spent.small) for x in passes),
        ring_waits=states_wait + sum(x.times * x.spent.outlasting for x in passes),
        other_waits=exposed_seconds(run, ring, chip),
        products=products / (partition.mesh.size * chip.peak_flops),
    )


def exposed_seconds(run: Run, ring: RingCost, chip: Chip) -> float:
    """Returns the seconds of a step in which devices wait for others than the ring's.

    ring: of any kind of layers, which all have as many heads.
    """
    config = run.config
    model = config.model
    partition = run.partition
    shape = partition.mesh.shape
    itemsize = run.compute_dtype.itemsize
    shards = partition.shards("embed")
    tensor = shape["tensor"]
    parameters = run.num_parameters / tensor
    # Gathered forward and, if they are not kept, backward; gradients are float32.
    gathers = 1 if config.remat in KEEP_GATHERED else 2
    sent = parameters * (shards - 1) / shards * (gathers * itemsize + 4)
    sent += parameters / shards * 4 * _all_reduced(shape["data"])
    again = 0 if config.remat in KEEP_PRODUCTS else 2
    activations = run.local_tokens * model.hidden_size * itemsize
    sent += model.num_layers * (4 + again) * activations * _all_reduced(tensor)
    # q, out, k and v forward, again, and their gradients.
    heads = 2 * sum(ring.heads[:2]) * partition.slices * model.head_dim
    swapped = run.local_tokens * heads * itemsize
    passes = 3 if again else 2
    swapped *= model.num_layers * passes * _exchanged(partition.slices, tensor)
    seconds = sent / bytes_per_second(chip, "other")
    seconds += swapped / bytes_per_second(chip, TRANSFER)
    return seconds * config.train.microbatches


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


def _partition(
    config: ml_collections.ConfigDict, chip: Chip, sizes: tuple[int, ...]
) -> Partition:
    """Returns a partition of this shape, cut as `systems.partition` does.

    sizes: as of MESH_AXES.
    """
    shape = MeshShape(**dict(zip(MESH_AXES, sizes, strict=True)))
    shape = shape.cut_ring(config.model.hidden_size)
    return Partition(shape.abstract_mesh(chip.device_kinds[0]))
