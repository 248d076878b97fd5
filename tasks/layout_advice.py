"""Which layouts suit a run's data, in a line for its start."""

import ml_collections

from kernels.layouts import Contiguous, Zigzag
from models.sizes import WINDOW
from tasks.corpora import reads_few_shards
from tasks.mask import document_mask
from training.mesh import Partition


def suited(windows: float, short: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Returns the attention systems that send and wait least, and why.

    windows: share of the layers that see a window. short: systems in which documents
      are so short that few shards are read.
    """
    if windows > 0.5:
        return ("zigzag", "ring"), "most layers have a window, read by neighbours only"
    if short:
        return short, "documents are short, and lie on few devices"
    return ("striped",), "documents may be as long as rows, whose work stripes balance"


def describe(config: ml_collections.ConfigDict, partition: Partition) -> str:
    """Returns a line on a layout that would suit better; "" if no other does."""
    if config.task != "text" or partition.ring_size == 1 or config.remat == "tail":
        return ""
    ring = partition.ring_size
    layouts = {"ring": Contiguous(), "zigzag": Zigzag()}
    few = [n for n, x in layouts.items() if reads_few_shards(config, x, ring)]
    pattern = config.model.layer_pattern
    windows = pattern.count(WINDOW) / len(pattern) if pattern else 0.0
    windows = 1.0 if document_mask(config).window else windows
    names, reason = suited(windows, tuple(few))
    if config.attention in names:
        return ""
    return f"layout: config.attention={names[0]} may suit better: {reason}"
