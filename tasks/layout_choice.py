"""Chooses a run's layout, by the seconds of its rings on rows of its corpora.

And says in lines what rows cost, and which layouts suit them.
"""

import functools
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from data.document_mask import DocumentMask
from data.row_trees import RowTrees
from kernels.cost.choice import (
    Choice,
    layouts_of,
    mean_times,
    options,
    ranked,
    slower_links,
)
from kernels.cost.clock import Heads, RingCost, Times
from kernels.cost.work import Row, RowOnRing, document_spans
from kernels.delta.runs import Runs
from kernels.delta.states import States
from kernels.devices.chips import Chip
from kernels.devices.device import rings_both_ways
from kernels.layouts import Contiguous, Layout, Mirror, Striped, Zigzag
from kernels.ring.ulysses import share_heads
from models.memory import RERUN
from models.sizes import DecoderConfig
from tasks import corpora
from tasks.run import Run
from tasks.systems import AUTO, document_mask

DRAWN = 8
"""Rows of the corpora that are looked at."""
MOST_TOKENS = 1 << 23
"""Of all these: fewer rows are looked at where they are long."""
SEED = 0
"""Of the rows that are drawn."""

WORTH = 1.1
"""A layout this many times faster is mentioned when the run starts."""


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
    tokens = config.data.context_tokens
    mask = document_mask(config)
    index = np.arange(tokens, dtype=np.int32)
    if config.task == "text" and corpora.named(config) and not documents:
        try:
            plan, _ = corpora.rows(config, "train", corpora.vocab_size(config))
        except (FileNotFoundError, ValueError):
            return typical_rows(config, (tokens,))
        size = max(1, min(DRAWN, MOST_TOKENS // tokens))
        numbers = np.random.default_rng(SEED).integers(plan.rows, size=size)
        rows = []
        for number in numbers:
            batch = plan.read(int(number), index)
            rows.append(_row(mask, batch.k_start.T, batch.k_end.T))  # (T,) or (m, T)
        return tuple(rows)
    lengths = [length for length in documents if isinstance(length, int)]
    if len(lengths) < len(documents):  # others are trees
        corpora.check_trees(config, f"documents {' '.join(map(str, documents))}")
        k_start, k_end = RowTrees.repeated(documents, tokens).visible(index, 2)
        return (_row(mask, k_start.T, k_end.T),)
    first, end = document_spans(tuple(lengths), index, tokens)
    k_start, k_end = mask.bounds(index, first, end)
    return (_row(mask, k_start.astype(np.int32), k_end.astype(np.int32)),)


def _row(mask: DocumentMask, k_start: np.ndarray, k_end: np.ndarray) -> Row:
    return Row(k_start, k_end, mask.window, is_causal=not mask.prefix)


class ChoosingRun[Sizes: DecoderConfig](Run[Sizes]):
    """A run in the layout that is the fastest for typical rows, if none is fixed."""

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        return self.given_rows or typical_rows(self.config)

    @functools.cached_property
    def choice(self) -> Choice:
        return self.fixed or ranked_choices(self)[0]


def ranked_choices(run: Run, every: bool = False) -> list[Choice]:
    """Returns what the config lets a run do, the fastest first.

    Where there is one choice, nothing is read and no seconds are estimated.

    every: whether layouts that the config does not name count too.
    """
    config = run.config
    ring_size = run.partition.ring_size
    chip = run.chip
    layouts = [run.system.layout]
    if ring_size == 1:
        return options(layouts, may_count=False)
    if (every or config.attention == AUTO) and config.task == "text":
        layouts = layouts_of(ring_size, config.data.context_tokens)
        if config.attention != AUTO and run.system.layout not in layouts:
            layouts.append(run.system.layout)  # which may need more padding
    if config.model.delta_convolution:  # whose state goes through runs of tokens
        # Stripes of one token leave no run that a state could go through.
        layouts = [layout for layout in layouts if layout != Striped()] or layouts
    is_packed = config.task == "text" and config.data.rows != "documents"
    choices = options(layouts, may_count=is_packed)
    tensor = run.partition.mesh.shape["tensor"]
    is_refused = config.model.num_kv_heads % tensor  # by the model, in its own words
    is_alone = len(choices) == 1 and not rings_both_ways(chip.device_kinds[0])
    if is_alone or is_refused:
        return choices
    # Where documents are as long as rows every step has live tiles: none to leave out.
    if not any(row.k_start.any() for row in run.rows):
        choices = [choice for choice in choices if not choice.count_steps]
    return ranked(choices, functools.partial(attention_seconds, run), chip)


def attention_seconds(run: Run, choice: Choice, slower: float = 1.0) -> float:
    """Returns the seconds of a step's rings in another choice.

    slower: times that links take longer.
    """
    chosen = run.choosing(choice)
    chip = slower_links(run.chip, slower)
    passes = ring_passes(chosen, chip)
    rings = sum(each.times * sum(each.spent) for each in passes)
    return rings + sum(state_times(chosen, chip))


def states_of(run: Run) -> States | None:
    """Returns the states of a layer with Gated DeltaNet; None in models without."""
    sizes = run.sizes
    partition = run.partition
    if not (width := sizes.delta_convolution):
        return None
    tensor = partition.mesh.shape["tensor"]
    tokens = run.token_shape[1]
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


def state_times(run: Run, chip: Chip) -> tuple[float, float]:
    """Returns seconds of a step's states: of the rule, and of transfers."""
    if (states := states_of(run)) is None:
        return 0.0, 0.0
    forward, backward = states.computing(chip)
    forwards = 1 if run.config.remat == "everything" else 2
    passes = 3 if run.config.remat in RERUN else 2  # else what is sent is kept
    layers = len(run.sizes.numbers("delta_layers")) * run.config.train.microbatches
    computed = forwards * forward + backward
    return layers * computed, layers * passes * states.sending(chip)


class Pass(NamedTuple):
    """A kind of layers' rings in a step: how often they run, and which way.

    ring: that of the first of the run's rows. spent: mean seconds of a pass.
    """

    times: int
    ring: RingCost
    direction: str
    spent: Times


def ring_passes(run: Run, chip: Chip) -> list[Pass]:
    """Returns the passes of a step; each kind of layers has rings of its own."""
    rings: dict[int, list[RingCost]] = {}  # of each row, by window
    for window in {*run.sizes.attention_windows}:
        rings[window] = [_ring(run, chip, row.seen_within(window)) for row in run.rows]
    passes = []
    for times, window, direction in _layer_passes(run):
        spent = mean_times(rings[window], direction, chip)
        passes.append(Pass(times, rings[window][0], direction, spent))
    return passes


def _layer_passes(run: Run) -> Iterator[tuple[int, int, str]]:
    """Yields, of layers that are run alike, times in a step, window and direction."""
    layer_kinds = run.sizes.layer_kinds
    microbatches = run.config.train.microbatches
    first = 0
    for settings, count in run.execution.runs(len(layer_kinds)):
        # Twice where the backward runs the ring of the forward again.
        forwards = 2 if settings.remat in RERUN else 1
        alike = layer_kinds[first : first + count]
        windows = Counter(kind.window for kind in alike if not kind.is_delta)
        for window, layers in windows.items():
            yield forwards * layers * microbatches, window, "forward"
        first += count
    for window, layers in Counter(run.sizes.attention_windows).items():
        yield layers * microbatches, window, "backward"


def _ring(run: Run, chip: Chip, row: Row) -> RingCost:
    """Returns the ring of a run's layers on a mesh of this chip."""
    partition = run.partition
    model = run.config.model
    tensor = partition.mesh.shape["tensor"]
    size = partition.ring_size
    devices = partition.slices
    length = run.token_shape[1] // size  # of a shard of the ring
    # Devices of a Ulysses axis have whole shards in the ring, of some of the heads.
    way = share_heads(model.num_heads // tensor, model.num_kv_heads // tensor, devices)
    heads = Heads(
        way.heads // devices,
        way.kv_heads // devices,
        model.head_dim,
        run.compute_dtype.itemsize,
    )
    return RingCost.of(
        RowOnRing(row, run.layout, size, length),
        run.local_tokens * devices // length,
        heads,
        chip,
        counts=run.choice.count_steps,
        one_way=run.choice.one_way,
    )


def row_lines(run: Run) -> Iterator[str]:
    """Yields the lines on what rows cost, and on their layout, if there are any."""
    yield from wrapped(padding_line(run))
    yield from wrapped(layout_line(run))
    yield from wrapped(states_line(run))


def wrapped(line: str) -> list[str]:
    """Cuts a line into some that fit a terminal."""
    return textwrap.wrap(line, 100, subsequent_indent="  ", break_on_hyphens=False)


def padding_line(run: Run) -> str:
    """Returns a line on what padding costs; "" where there is none."""
    tokens = run.config.data.context_tokens
    slots = run.token_shape[1]
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
    seconds_of: dict[str, float] = {}  # the fastest first
    for choice in ranked_choices(run, every=True):
        seconds_of.setdefault(name_of(choice.layout), choice.seconds)
    mine = name_of(run.layout)
    best, least = next(iter(seconds_of.items()))
    what = "documents as long as rows"
    if len(run.rows) > 1:
        what = f"{len(run.rows)} rows drawn from the corpus with seed {SEED}"
    what = f"by estimated seconds of attention on {what}"
    if config.attention == AUTO:
        line = f"layout: {mine}, {what}"
        for name, seconds in seconds_of.items():
            if name != mine:
                line += f"; {name} {seconds / least:.2f} x"
        return line
    if seconds_of.get(mine, least) <= WORTH * least:
        return ""
    return (
        f"layout: {mine} takes {seconds_of[mine] / least:.2f} times as long as {best}, "
        f"{what}: set config.attention={AUTO}"
    )


def states_line(run: Run) -> str:
    """Returns a line on what the states of Gated DeltaNet take; "" without it."""
    if (states := states_of(run)) is None:
        return ""
    seconds, waits = state_times(run, run.chip)
    layers = len(run.sizes.numbers("delta_layers"))
    return (
        f"states: {layers} layers of Gated DeltaNet, {1e3 * seconds:.3g} ms a step by "
        f"estimate; a device sends {states.sent() / 1e6:.3g} MB a layer and pass, maps "
        f"and tokens for the convolution, and waits {1e3 * waits:.3g} ms a step"
    )


def name_of(layout: Layout) -> str:
    """Returns the values of config.attention and config.stripe_granule."""
    if isinstance(layout, Striped):
        return f"striped {layout.granule}"
    names: dict[Layout, str] = {
        Contiguous(): "ring",
        Zigzag(): "zigzag",
        Mirror(): "mirror",
    }
    return names[layout]
