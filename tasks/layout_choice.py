"""Chooses a run's layout, by the seconds of its rings on rows of its corpora.

And says in lines what rows cost, and which layouts suit them.
"""

import functools
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from data.document_mask import DocumentMask
from data.row_trees import RowTrees
from kernels.chips import Chip
from kernels.cost.choice import (
    Choice,
    layouts_of,
    mean_times,
    options,
    ranked,
    slower_links,
)
from kernels.cost.clock import Heads, RingCost, Times
from kernels.cost.states import States
from kernels.cost.work import Row, RowOnRing, document_spans
from kernels.device import rings_both_ways
from kernels.layouts import Layout, Striped, Zigzag
from kernels.ring.runs import Runs
from kernels.ring.ulysses import share_heads
from models.memory import RERUN
from tasks import corpora
from tasks.systems import AUTO, document_mask

if TYPE_CHECKING:
    from tasks.run import Run

DRAWN, MOST_TOKENS, SEED = 8, 1 << 23, 0
"""Rows of the corpora that are looked at, fewer of long ones; and their seed."""

WORTH = 1.1
"""Share of attention's seconds from which on another layout is worth a line."""


def typical_rows(
    config: ConfigDict, documents: tuple[int | str, ...] = ()
) -> tuple[Row, ...]:
    """Returns rows alike those of a run.

    documents: those packed in a row, as of `RowTrees.repeated`; () for rows drawn from
      the corpora that the config names, or of one document without corpora. What is
      wrong with corpora is found where their rows are read.

    Raises:
      ValueError: there are groups, and windows.
    """
    tokens, mask = config.data.context_tokens, document_mask(config)
    index = np.arange(tokens, dtype=np.int32)
    if config.task == "text" and corpora.named(config) and not documents:
        try:
            plan, _ = corpora.rows(config, "train", corpora.vocab_size(config))
        except (FileNotFoundError, ValueError):
            return typical_rows(config, (tokens,))
        size = max(1, min(DRAWN, MOST_TOKENS // tokens))
        numbers = np.random.default_rng(SEED).integers(plan.rows, size=size)
        read = (plan.read(int(number), index) for number in numbers)
        return tuple(_row(mask, batch.k_start.T, batch.k_end.T) for batch in read)
    if any(isinstance(document, str) for document in documents):
        corpora.check_trees(config, f"documents {' '.join(map(str, documents))}")
        k_start, k_end = RowTrees.repeated(documents, tokens).visible(index, 2)
        return (_row(mask, k_start.T, k_end.T),)
    first, end = document_spans(documents, index, tokens)
    bounds = (bound.astype(np.int32) for bound in mask.bounds(index, first, end))
    return (_row(mask, *bounds),)


def _row(mask: DocumentMask, k_start: np.ndarray, k_end: np.ndarray) -> Row:
    return Row(k_start, k_end, mask.window, is_causal=not mask.prefix)


def ranked_choices(run: "Run", every: bool = False) -> list[Choice]:
    """Returns what the config lets a run do, the fastest first.

    Where there is one choice, nothing is read and no seconds are estimated.

    every: whether layouts that the config does not name count too.
    """
    config, ring_size, chip = run.config, run.partition.ring_size, run.chip
    layouts = [run.system.layout]
    if ring_size == 1:
        return options(layouts, may_count=False)
    if (every or config.attention == AUTO) and config.task == "text":
        layouts = layouts_of(ring_size, config.data.context_tokens)
        if config.attention != AUTO and run.system.layout not in layouts:
            layouts.append(run.system.layout)  # which may need more padding
    if config.model.delta_convolution:  # whose state goes through runs of tokens
        layouts = [x for x in layouts if x != Striped()] or layouts
    is_packed = config.task == "text" and config.data.rows != "documents"
    found = options(layouts, may_count=is_packed)
    tensor, kv_heads = run.partition.mesh.shape["tensor"], config.model.num_kv_heads
    is_refused = kv_heads % tensor  # by the model, in its own words
    is_alone = len(found) == 1 and not rings_both_ways(chip.device_kinds[0])
    if is_alone or is_refused:
        return found
    if not any(row.k_start.any() for row in run.rows):  # documents as long as rows
        found = [one for one in found if not one.count_steps]
    return ranked(found, functools.partial(attention_seconds, run), chip)


def attention_seconds(run: "Run", choice: Choice, slower: float = 1.0) -> float:
    """Returns the seconds of a step's rings in another choice.

    slower: times that links take longer.
    """
    chosen, chip = run.choosing(choice), slower_links(run.chip, slower)
    passes = ring_passes(chosen, chip)
    rings = sum(one.times * sum(one.spent) for one in passes)
    return rings + sum(state_times(chosen, chip))


def states_of(run: "Run") -> States | None:
    """Returns the states of a layer with Gated DeltaNet; None in models without."""
    sizes, partition = run.sizes, run.partition
    if not (width := sizes.delta_convolution):
        return None
    tensor, tokens = partition.mesh.shape["tensor"], run.token_shape[1]
    runs = Runs.of(run.layout, partition.ring_size, tokens, partition.slices)
    sides = sizes.matrix_sides(is_delta=True)
    channels = sum(sides[name][1] for name in ("query", "key", "value"))
    return States(
        runs,
        run.local_tokens * runs.devices // tokens,
        sizes.delta_value_heads // tensor,
        sizes.delta_key_dim,
        sizes.delta_value_dim,
        (width - 1) * channels // tensor * run.compute_dtype.itemsize,
    )


def state_times(run: "Run", chip: Chip) -> tuple[float, float]:
    """Returns seconds of a step's states: of products, and of transfers."""
    if (states := states_of(run)) is None:
        return 0.0, 0.0
    products, sent = states.forward(chip)
    forwards = 1 if run.config.remat == "everything" else 2
    layers = len(run.sizes.numbers(is_delta=True)) * run.config.train.microbatches
    return layers * (forwards + 2) * products, layers * (forwards + 1) * sent


class Pass(NamedTuple):
    """A kind of layers' rings in a step: how often they run, and which way.

    ring: that of the first of the run's rows. spent: mean seconds of a pass.
    """

    times: int
    ring: RingCost
    direction: str
    spent: Times


def ring_passes(run: "Run", chip: Chip) -> list[Pass]:
    """Returns the passes of a step; each kind of layers has rings of its own."""
    rows = [_passes(run, chip, row) for row in run.rows]
    found = []
    for alike in zip(*rows, strict=True):
        (times, ring, direction), rings = alike[0], [ring for _, ring, _ in alike]
        found.append(Pass(times, ring, direction, mean_times(rings, direction, chip)))
    return found


def _passes(run: "Run", chip: Chip, row: Row) -> list[tuple[int, RingCost, str]]:
    config = run.config
    windows, kinds = run.sizes.attention_windows, run.sizes.layer_kinds
    rings = {window: _ring(run, chip, row.seen_within(window)) for window in {*windows}}
    passes, first = [], 0
    for settings, count in run.execution.runs(len(kinds)):
        again = 2 if settings.remat in RERUN else 1
        mine = (k.window for k in kinds[first : first + count] if not k.is_delta)
        for window, layers in Counter(mine).items():
            times = again * layers * config.train.microbatches
            passes.append((times, rings[window], "forward"))
        first += count
    return passes + [
        (layers * config.train.microbatches, rings[window], "backward")
        for window, layers in Counter(windows).items()
    ]


def _ring(run: "Run", chip: Chip, row: Row) -> RingCost:
    """Returns the ring of a run's layers on a mesh of this chip."""
    config, partition, choice = run.config, run.partition, run.choice
    model, tensor = config.model, partition.mesh.shape["tensor"]
    size, devices = partition.ring_size, partition.slices
    length = run.token_shape[1] // size
    # Devices of a Ulysses axis have whole shards in the ring, of some of the heads.
    way = share_heads(model.num_heads // tensor, model.num_kv_heads // tensor, devices)
    heads = way.heads // devices, way.kv_heads // devices, model.head_dim
    return RingCost.of(
        RowOnRing(row, run.layout, size, length),
        run.local_tokens * devices // length,
        Heads(*heads, run.compute_dtype.itemsize),
        chip,
        counts=choice.count_steps,
        one_way=choice.one_way,
    )


def row_lines(run: "Run") -> Iterator[str]:
    """Yields the lines on what rows cost, and on their layout, if there are any."""
    yield from wrapped(padding_line(run))
    yield from wrapped(layout_line(run))
    yield from wrapped(states_line(run))


def wrapped(line: str) -> list[str]:
    """Cuts a line into some that fit a terminal."""
    return textwrap.wrap(line, 100, subsequent_indent="  ", break_on_hyphens=False)


def padding_line(run: "Run") -> str:
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


def layout_line(run: "Run") -> str:
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


def states_line(run: "Run") -> str:
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
