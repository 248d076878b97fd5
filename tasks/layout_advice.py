"""What a run is, what its rows cost, and which layouts suit them, in lines."""

import textwrap
from collections.abc import Iterator

from kernels.layouts import Contiguous, Zigzag
from models.sizes import WINDOW
from tasks.corpora import reads_few_shards
from tasks.run import Run


def start_lines(run: Run) -> Iterator[str]:
    """Yields the lines at a run's start: its mesh, its model and its layout."""
    config, partition = run.config, run.partition
    devices = partition.mesh.devices.flatten()
    yield f"mesh: {partition}, of {devices.size} x {devices[0].device_kind}"
    shards = partition.shards(partition.mesh_axes("embed", config.model.hidden_size))
    model = f"model: {run.num_parameters:,} parameters in {shards} shards"
    if run.model.frozen_shapes:
        model += f", {run.num_trained:,} of them trained (adapters)"
    model += f", {config.attention} attention"
    for line in (
        model,
        f"memory: {run.execution}",
        padding_line(run),
        layout_line(run),
    ):
        yield from textwrap.wrap(
            line, 100, subsequent_indent="  ", break_on_hyphens=False
        )


def padding_line(run: Run) -> str:
    """Returns a line on what padding costs; "" where there is none."""
    tokens, (_, slots) = run.config.data.context_tokens, run.token_shape
    if slots == tokens:
        return ""
    partition = run.partition
    slices = f" in {partition.slices} slices each" if partition.slices > 1 else ""
    return (
        f"rows: of {tokens:,} tokens, padded to {slots:,} for {run.layout} on a ring "
        f"of {partition.ring_size}{slices}: {1 - tokens / slots:.2%} of their slots "
        "are empty"
    )


def layout_line(run: Run) -> str:
    """Returns a line on a layout that would suit better; "" if no other does."""
    config, ring = run.config, run.partition.ring_size
    if config.task != "text" or ring == 1 or config.remat == "tail":
        return ""
    layouts = {"ring": Contiguous(), "zigzag": Zigzag()}
    suited = [n for n, x in layouts.items() if reads_few_shards(config, x, ring)]
    pattern = config.model.layer_pattern
    windows = pattern.count(WINDOW) / len(pattern) if pattern else 0.0
    if windows > 0.5 or run.mask.window:
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
