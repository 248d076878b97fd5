"""Which layouts suit a run's data, in a line for its start."""

import ml_collections

from models.sizes import WINDOW
from tasks.base import counts_steps
from tasks.mask import document_mask
from training.mesh import Partition


def suited(windows: float, counted: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Returns the attention systems that send and wait least, and why.

    windows: share of the layers that see a window. counted: systems whose rings end
      where the documents of a batch do.
    """
    if windows > 0.5:
        return ("zigzag", "ring"), "most layers have a window, read by neighbours only"
    if counted:
        return counted, "documents are so short that a ring ends before it is round"
    return ("striped",), "documents may be as long as rows, whose work stripes balance"


def describe(config: ml_collections.ConfigDict, partition: Partition) -> str:
    """Returns a line on a layout that would suit better; "" if there is none."""
    if config.task != "text" or partition.ring_size == 1 or config.remat == "tail":
        return ""
    counted = []
    for name in ("ring", "zigzag"):
        other = ml_collections.ConfigDict(config.to_dict())
        other.attention = name
        if counts_steps(other, partition):
            counted.append(name)
    pattern = config.model.layer_pattern
    windows = pattern.count(WINDOW) / len(pattern) if pattern else 0.0
    windows = 1.0 if document_mask(config).window else windows
    names, reason = suited(windows, tuple(counted))
    if config.attention in names:
        return ""
    return f"layout: config.attention={names[0]} may suit better: {reason}"
