"""Which layouts suit a run's data, in a line for its start."""

import ml_collections

from kernels.layouts import Contiguous, Zigzag
from models.sizes import WINDOW
from tasks.corpora import reads_few_shards
from tasks.mask import document_mask
from training.mesh import Partition


def describe(config: ml_collections.ConfigDict, partition: Partition) -> str:
    """Returns a line on a layout that would suit better; "" if no other does."""
    if config.task != "text" or partition.ring_size == 1 or config.remat == "tail":
        return ""
    ring = partition.ring_size
    layouts = {"ring": Contiguous(), "zigzag": Zigzag()}
    suited = [n for n, x in layouts.items() if reads_few_shards(config, x, ring)]
    pattern = config.model.layer_pattern
    windows = pattern.count(WINDOW) / len(pattern) if pattern else 0.0
    if windows > 0.5 or document_mask(config).window:
        suited = ["zigzag", "ring"]
        reason = "most layers have a window, read by neighbours only"
    elif suited:
        reason = "documents are short, and lie on few devices"
    else:
        suited = ["striped"]
        reason = "documents may be as long as rows, whose work stripes balance"
    if config.attention in suited:
        return ""
    return f"layout: config.attention={suited[0]} may suit better: {reason}"
