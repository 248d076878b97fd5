"""What a run is, what its rows cost, and which layouts suit them, in lines."""

import textwrap
from collections.abc import Iterator

from kernels.layouts import Layout, Striped, Zigzag
from tasks.layout_choice import SEED, ranked_choices, state_times, states_of
from tasks.run import Run
from tasks.systems import AUTO

WORTH = 1.1
"""Share of attention's seconds from which on another layout is worth a line."""


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
    yield from _wrapped(model)
    yield from _wrapped(f"memory: {run.execution}")
    yield from row_lines(run)


def row_lines(run: Run) -> Iterator[str]:
    """Yields the lines on what rows cost, and on their layout, if there are any."""
    yield from _wrapped(padding_line(run))
    yield from _wrapped(layout_line(run))
    yield from _wrapped(states_line(run))


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 100, subsequent_indent="  ", break_on_hyphens=False)


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
    """Returns a line on the chosen layout, or on one that would suit better; or ""."""
    config = run.config
    if config.task != "text" or run.partition.ring_size == 1:
        return ""
    found: dict[str, float] = {}
    for one in ranked_choices(run, every=True):
        found.setdefault(name_of(one.layout), one.seconds)
    mine, (best, least) = name_of(run.layout), next(iter(found.items()))
    what = "documents as long as rows"
    if len(run.rows) > 1:
        what = f"{len(run.rows)} rows drawn from the corpus with seed {SEED}"
    what = f"by estimated seconds of attention on {what}"
    if config.attention == AUTO:
        others = (
            f"; {name} {seconds / least:.2f} x"
            for name, seconds in found.items()
            if name != mine
        )
        return f"layout: {mine}, {what}" + "".join(others)
    if found.get(mine, least) <= WORTH * least:
        return ""
    return (
        f"layout: {mine} takes {found[mine] / least:.2f} times as long as {best}, "
        f"{what}: set config.attention={AUTO}"
    )


def states_line(run: Run) -> str:
    """Returns a line on what the states of Gated DeltaNet take; "" without it."""
    if (states := states_of(run)) is None:
        return ""
    products, waits = state_times(run, run.chip)
    layers = len(run.sizes.numbers(is_delta=True))
    return (
        f"states: {layers} layers of Gated DeltaNet, {1e3 * products:.3g} ms a step by "
        f"peaks; a device sends {states.sent() / 1e6:.3g} MB a layer and pass, maps "
        f"and tokens for the convolution, and waits {1e3 * waits:.3g} ms a step"
    )


def name_of(layout: Layout) -> str:
    """Returns the values of config.attention and config.stripe_granule."""
    if isinstance(layout, Striped):
        return f"striped {layout.granule}"
    return "zigzag" if isinstance(layout, Zigzag) else "ring"
