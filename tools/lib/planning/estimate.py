"""Estimates the time of a planned step from schedules, peaks and assumptions.

Nothing here is measured on the device. Work that no formula counts (norms, RoPE, the
optimizer, stalls of a kernel) takes time that is missing here.
"""

import math
from dataclasses import dataclass, replace

import ml_collections

from models.flops import num_layer_matrices
from models.remat import RERUN
from tasks.task import TASKS
from tools.lib.planning.kernels import COUNTED, Kernels, Ring
from tools.lib.planning.memory import feed_forward_chunks, local_tokens
from training.chips import Chip
from training.hlo import TRANSFER
from training.mesh import Partition

PRODUCTS_SHARE = 0.8
"""Share of the peak that matrix products with parameters are assumed to reach."""


@dataclass(frozen=True)
class Exposed:
    """Communication of a device in a step that overlaps no kernel.

    ring_bytes: ring transfers; ring_share: their share of all ring transfers.
    other_bytes: other collectives.
    """

    ring_bytes: float
    ring_share: float
    other_bytes: float


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of one step, by part.

    products: matrix products with parameters. attention: the kernels.
    outlasting: hidden ring transfers, after their kernels have ended.
    exposed_ring, exposed_others: exposed ring transfers, and other collectives.
    mfu: model FLOPs over the peak of all devices in that time.
    """

    products: float
    attention: float
    outlasting: float
    exposed_ring: float
    exposed_others: float
    mfu: float
    assumptions: tuple[str, ...]

    @property
    def exposed(self) -> float:
        """Seconds of exposed communication."""
        return self.outlasting + self.exposed_ring + self.exposed_others

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.products + self.attention + self.exposed


def products_flops(config: ml_collections.ConfigDict, partition: Partition) -> float:
    """Returns the FLOPs of matrix products with parameters on one device.

    Recomputed ones are included.

    A product of the forward is recomputed in the backward unless remat keeps it, or if
    it belongs to a feed-forward or logits that are computed in several chunks. Those to
    queries, keys and values are recomputed twice where `remat_attention` drops them.
    """
    model = TASKS[config.task].sizes(config)
    tokens = local_tokens(config, partition)
    head = model.hidden_size * getattr(model, "vocab_size", 0)  # agents have no logits
    feed_forward = 3 * model.hidden_size * model.feed_forward_size * model.num_layers
    attention = num_layer_matrices(model) - feed_forward
    keeps_products = config.remat in ("everything", "products")
    one_chunk = feed_forward_chunks(config, partition) == 1
    total = attention * (3 if keeps_products else 4)
    total += feed_forward * (3 if keeps_products and one_chunk else 4)
    if config.remat in RERUN:
        heads = model.num_heads + 2 * model.num_kv_heads
        total += model.num_layers * model.hidden_size * heads * model.head_dim
    total += head * (3 if tokens <= config.loss_chunk_tokens else 4)
    all_tokens = tokens * config.train.microbatches
    return 2.0 * all_tokens * total / partition.mesh.shape["tensor"]


def ring_passes(
    config: ml_collections.ConfigDict, ring: Ring
) -> list[tuple[int, Ring, str]]:
    """Returns the rings of a step: how often each runs, and in which direction."""
    times = config.model.num_layers * config.train.microbatches
    backward = times, ring, "backward"
    if config.remat != "tail":
        again = 2 if config.remat in RERUN else 1
        return [(again * times, ring, "forward"), backward]
    # The first half of the queries sees half of the keys, and its ring runs twice.
    front = replace(ring, area=ring.area / 4, keys_bytes=ring.keys_bytes // 2)
    tail = replace(ring, area=3 * ring.area / 4)
    return [(2 * times, front, "forward"), (times, tail, "forward"), backward]


def bytes_per_second(chip: Chip, kind: str) -> float:
    """Returns the bandwidth of a device for collectives of one kind.

    The ring goes one way; others use both directions of a TPU's links.
    """
    is_both = kind != TRANSFER and chip.name.startswith("TPU")
    return chip.interconnect_bytes_per_second * (2 if is_both else 1)


def estimate(
    config: ml_collections.ConfigDict,
    partition: Partition,
    chip: Chip,
    model_flops: float,
    communication: Exposed,
) -> Estimate:
    """Estimates a step of the config on devices of this chip."""
    kernels, ring = Kernels.of(chip), Ring.of(config, partition, chip)
    passes = ring_passes(config, ring)
    attention = outlasting = 0.0
    for times, part, direction in passes:
        kernel = part.kernel_seconds(kernels, direction)
        more = max(0.0, part.transfer_seconds(chip, direction) - kernel)
        attention += times * ring.steps * kernel
        outlasting += times * (ring.steps - 1) * more
    *forward, backward = (times * part.area for times, part, _ in passes)
    products = products_flops(config, partition) / (PRODUCTS_SHARE * chip.peak_flops)
    link, others = bytes_per_second(chip, TRANSFER), bytes_per_second(chip, "other")
    outlasting *= 1 - communication.ring_share
    exposed = communication.ring_bytes / link, communication.other_bytes / others
    seconds = products + attention + outlasting + sum(exposed)
    is_bfloat16 = config.compute_dtype == "bfloat16"
    devices = math.prod(partition.mesh.shape.values())
    return Estimate(
        products,
        attention,
        outlasting,
        *exposed,
        model_flops / (seconds * devices * chip.peak_flops),
        (
            f"attention: {kernels.source}; {COUNTED}",
            f"products with parameters at {PRODUCTS_SHARE:.0%} of "
            f"{chip.peak_flops / 1e12:.0f} TFLOP/s; remat {config.remat} runs the ring "
            f"forward {sum(forward) / backward:g} x for each backward",
            f"a device sends {link / 1e9:.0f} GB/s of ring transfers, "
            f"{others / 1e9:.0f} GB/s of other collectives",
            "element-wise work, the optimizer and stalls are not counted"
            + (
                "" if is_bfloat16 else "; nor how much slower than bfloat16 the type is"
            ),
        ),
    )
