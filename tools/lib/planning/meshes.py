"""Which mesh to take: a rule of thumb, without compiling anything.

Of the meshes over which the model, the rows and the context divide, first those in
which the step should fit, then those whose ring hides behind its kernels, then those
that wait for the fewest bytes.

- It fits if parameters, optimizer, what layers save (`plan_memory`) and a workspace by
  `workspace_bytes` leave SPARE_SHARE of the chip.
- A ring hides if a hop's kernel lasts as long as its transfer. Of L tokens on a device,
  H query and K key/value heads, the kernel computes L²/2 pairs for each of H, and 2·L
  rows travel for each of K: so it is L·H/K that has to reach a bound, which is the
  chip's FLOP/s over its link's bytes a second times a factor of the kernel.
- Waited for are the gathers of parameters and the scattering of their gradients over
  (fsdp, ring), the sums over data and tensor, the hop of the ring that brings gradients
  home, and of a ring that does not hide what outlasts the kernels.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
import ml_collections

from models.flops import num_parameters
from tasks import base, text
from tools.lib.planning.estimate import PRODUCTS, Kernels, Ring, ring_passes
from tools.lib.planning.memory import (
    SPARE_SHARE,
    device_bytes,
    local_tokens,
    saved_bytes,
)
from training.chips import Chip
from training.mesh import MeshShape, Partition
from training.optimizer import make_optimizer

LAYER_ARRAYS, RING_ARRAYS = 6, 7
"""Of float32 and the size of the queries: what compiled steps on TPUs took, at most.

The second go round the ring with the heads, in as many parts as the config says.
"""


@dataclass(frozen=True)
class Suggestion:
    """A mesh, and why.

    memory: bytes that a device should take. fits: whether that leaves enough spare.
    hiding: how many times as long as its transfer a hop's kernel lasts, in the worse
      direction; None without a ring.
    waited_bytes: sent by a device in a step while nothing is computed.
    """

    mesh: dict[str, int]
    memory: float
    fits: bool
    hiding: float | None
    waited_bytes: float

    @property
    def rank(self) -> tuple[bool, bool, float, float]:
        """To sort by, best first."""
        is_hidden = self.hiding is None or self.hiding >= 1
        return not self.fits, not is_hidden, self.waited_bytes, self.memory


def suggestions(
    config: ml_collections.ConfigDict, devices: int, chip: Chip
) -> list[Suggestion]:
    """Every mesh of so many devices that the config can have, best first.

    Raises:
      ValueError: there is none; the message says what is wrong with one ring of all.
    """
    found = []
    for sizes in _factorisations(devices):
        partition = _partition(config, *sizes)
        try:
            found.append(suggestion(config, partition, chip))
        except ValueError:
            continue
    if not found:
        suggestion(config, _partition(config, 1, 1, devices, 1), chip)
    return sorted(found, key=lambda one: one.rank)


def suggestion(
    config: ml_collections.ConfigDict, partition: Partition, chip: Chip
) -> Suggestion:
    """What a mesh takes.

    Raises:
      ValueError: something does not divide over it.
    """
    system, ring_size = base.attention_system(config), partition.ring_size
    if ring_size > 1 and not system.sharded:
        raise ValueError(f"{config.attention=} has no ring of {ring_size}")
    base.batch_sharding(config, partition)
    model = text.model(config, partition)
    text.loss_function(config, model, partition)
    optimizer, _ = make_optimizer(base.optimizer_settings(config))
    state = base.abstract_state(model, optimizer, partition)
    memory = device_bytes(state) + workspace_bytes(config, partition)
    if config.remat != "offload":
        memory += saved_bytes(config, partition)
    ring, kernels = Ring.of(config, partition, chip), Kernels.of(chip)
    hiding = None
    if ring.hops > 1:
        hiding = min(
            ring.kernel_seconds(kernels, direction)
            / ring.transfer_seconds(chip, direction)
            for direction in PRODUCTS
        )
    return Suggestion(
        mesh=partition.sizes,
        memory=memory,
        fits=memory <= (1 - SPARE_SHARE) * chip.hbm_bytes,
        hiding=hiding,
        waited_bytes=waited_bytes(config, partition, ring)
        + _outlasting_bytes(config, ring, chip, kernels),
    )


def workspace_bytes(config: ml_collections.ConfigDict, partition: Partition) -> float:
    """What a step takes besides its state and what layers save, roughly.

    The buffers of a ring's backward, one layer's parameters in the compute type and
    their gradients in float32, and the same gradients of embedding and head.
    """
    model, tensor = text.sizes(config), partition.mesh.shape["tensor"]
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    queries = local_tokens(config, partition) * model.num_heads * model.head_dim * 4
    tables = 2 * model.vocab_size * model.hidden_size
    layer = (num_parameters(model) - tables) / model.num_layers
    state = (itemsize + 4) * layer + 4 * tables
    arrays = LAYER_ARRAYS + RING_ARRAYS / config.attention_parts
    return (arrays * queries + state) / tensor


def waited_bytes(
    config: ml_collections.ConfigDict, partition: Partition, ring: Ring
) -> float:
    """Sent by a device in a step by collectives that no kernel hides."""
    model, shape = text.sizes(config), partition.mesh.shape
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    shards, tensor = partition.shards("embed"), shape["tensor"]
    parameters = num_parameters(model) / tensor
    # Gathered forward and backward; the gradients are float32.
    sent = parameters * (shards - 1) / shards * (2 * itemsize + 4)
    sent += parameters / shards * 4 * _all_reduced(shape["data"])
    again = 0 if config.remat in ("everything", "products") else 2
    activations = local_tokens(config, partition) * model.hidden_size * itemsize
    sent += model.num_layers * (4 + again) * activations * _all_reduced(tensor)
    if ring.hops > 1:
        sent += model.num_layers * ring.keys_bytes
    return sent * config.train.microbatches


def _outlasting_bytes(
    config: ml_collections.ConfigDict, ring: Ring, chip: Chip, kernels: Kernels
) -> float:
    """Sent by the hops of the ring after their kernels have ended."""
    total = 0.0
    for direction, times in ring_passes(config).items():
        transfer = ring.transfer_seconds(chip, direction)
        more = max(0.0, transfer - ring.kernel_seconds(kernels, direction))
        total += times * (ring.hops - 1) * more * chip.interconnect_bytes_per_second
    return total


def _all_reduced(devices: int) -> float:
    """Bytes that each sends for every byte that is summed over all of them."""
    return 2 * (devices - 1) / devices


def _factorisations(devices: int) -> Iterator[tuple[int, ...]]:
    """Every mesh shape of so many devices."""
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    for data, fsdp, ring in itertools.product(divisors, repeat=3):
        if devices % (data * fsdp * ring) == 0:
            yield data, fsdp, ring, devices // (data * fsdp * ring)


def _partition(config: ml_collections.ConfigDict, *sizes: int) -> Partition:
    """Over devices that need not be there, as `base.partition` cuts them."""
    shape = MeshShape(*sizes).cut_ring(config.model.hidden_size)
    return Partition(shape.abstract_mesh())
