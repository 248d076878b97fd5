"""Writes the papers' tables with our rows, as text into results/.

    python -m tools.paper_tables  # --output FOLDER: into another folder

Ring Attention (2310.01889): table 2 (the smallest blocks that hide their transfer),
table 3 (longest contexts), figure 5 (FLOPs of a data set by context). Striped Attention
(2311.09431): how much faster striping can be at most.

A row of table 3 is what `plan_pod --output` wrote, in results/tpu/contexts; of one that
is missing, its command is printed. Nothing of this has run on a TPU.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs import models
from data.json_text import parse_json
from kernels.chips import CHIPS
from models.flops import num_matrix_parameters
from models.sizes import LanguageModelConfig
from tasks.command_line import Parser, as_program
from tools.lib.planning.step import SPARE_SHARE

GIB = 2**30
RESULTS = Path(__file__).resolve().parents[1] / "results"

# Table 2: chips of the paper, with the rate between hosts that it gives for one.
INFINIBAND_BYTES_PER_SECOND = 12.5e9
PAPER_BLOCKS = {
    "A100 80GB": (1.0, 6.2),
    "A100 over InfiniBand": (24.5, 149.5),
    "TPU v3": (1.1, 6.6),
    "TPU v4": (1.0, 6.2),
    "TPU v5e": (1.1, 6.3),
}
"""Of table 2: block and sequence, in 1024 tokens."""
TPU_LINKS = {"TPU v3": 4, "TPU v4": 6, "TPU v5e": 4, "TPU v5p": 6, "TPU v6e": 4}
"""Of a device. The paper counts all of them; a ring uses one each way."""
RING_BLOCKS = 6
"""Blocks that a device holds in the paper's ring: its queries and results, the keys and
values that are there, and those that arrive. So its sequence is 6 blocks at least."""

# Table 3: what is compiled is a multiple of the paper's context, by `config.remat`.
MULTIPLES = {"nothing": 4, "offload": 8}
CONTEXTS = (
    ("7b", "v3:16x16", 2048, 4),
    ("13b", "v3:16x16", 1024, 4),
    ("3b", "v4:8x8x8", 16384, 8),
    ("7b", "v4:8x8x8", 8192, 4),
    ("13b", "v4:8x8x8", 4096, 4),
    ("30b", "v4:8x8x8", 2048, 4),
    ("3b", "v5e:16x16", 4096, 16),
    ("7b", "v5e:16x16", 2048, 4),
)
"""Model, topology (v4-1024 in the paper's words counts TensorCores, 512 chips), the
paper's context in 1024 tokens, `config.attention_parts`."""

TILE = 256
"""Rows and keys of a tile, of which a device computes all or nothing."""
SPEED_UP_SIZES = ("1b", "3b", "7b")
SPEED_UP_RINGS = {8: "8 A100", 16: "16 TPU v4"}
SPEED_UP_CONTEXTS = tuple(2**power for power in range(15, 20)) + (786432,)
FIGURE_5_SIZES = ("7b", "13b", "30b", "65b")
FIGURE_5_CONTEXTS = tuple(2**power for power in range(15, 25, 3))


def table_2() -> list[dict[str, Any]]:
    """Returns the fewest tokens of a device whose transfers hide behind attention.

    block: F / B, with F peak FLOP/s and B bytes/s between neighbours, over all links of
      a chip and over one of a ring: a ring step takes 4·c²·h FLOPs for c tokens, and
      4·c·h bytes travel.
    """
    found = []
    for chip in CHIPS:
        links, rate = TPU_LINKS.get(chip.name, 1), chip.interconnect_bytes_per_second
        rates = {chip.name: links * rate}
        if links > 1:
            rates[f"{chip.name} (one link)"] = rate
        if chip.name == "A100 80GB":
            rates["A100 over InfiniBand"] = INFINIBAND_BYTES_PER_SECOND
        for name, rate in rates.items():
            block = chip.peak_flops / rate
            row = {"chip": name, "block": block, "sequence": RING_BLOCKS * block}
            found.append(row | {"paper": PAPER_BLOCKS.get(name)})
    return found


def table_3(folder: Path) -> Iterator[str]:
    """Yields a line for each of the paper's contexts, and what was compiled of it.

    Raises:
      ValueError: a file holds something else.
    """
    for model, topology, paper, parts in CONTEXTS:
        chip, _, shape = topology.partition(":")
        ring = math.prod(map(int, shape.split("x"))) * (2 if chip == "v3" else 1)
        for remat, multiple in MULTIPLES.items():
            path, context = folder / f"{model}_{chip}_{remat}.json", multiple * paper
            name = f"  {model:5s} {topology:10s} {remat:7s} {paper:>7,} {context:>9,}"
            if path.is_file():
                yield f"{name} {_fit(path)}"
            else:
                yield (
                    f"{name} not compiled: "
                    f"python -m tools.plan_pod --config=configs/models.py:{model}/v4 "
                    f"--topology={topology} --context={1024 * context} "
                    f"--config.mesh.ring={ring} --config.attention_parts={parts} "
                    f"--config.remat={remat} --output={path}"
                )


def _fit(path: Path) -> str:
    """Returns what table 3 shows of a plan.

    Raises:
      ValueError: the file holds something else.
    """
    try:
        found = parse_json(path.read_bytes())
        memory, transfers = found["memory"], found["transfers"]
        sent = transfers["hidden_bytes"] + transfers["exposed_bytes"]
        room = f"{memory['peak'] / GIB:.1f} of {memory['capacity'] / GIB:.0f}"
        return (
            f"{room:>12s} {memory['host'] / GIB:7.0f} "
            f"{transfers['hidden_bytes'] / sent:7.1%} {found['estimate']['mfu']:12.0%}"
            + ("" if memory["spare_share"] >= SPARE_SHARE else "  < 5 % spare")
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} holds nothing that was compiled here "
            f"({type(error).__name__}: {error}): remove it, or compile it again"
        ) from error


def dataset_flops(size: str, context: int) -> float:
    """Returns FLOPs of a data set in contexts of s tokens over those of 4096.

    (6h + s) / (6h + 4096), with h the hidden size.
    """
    wide = 6 * _model(size).hidden_size
    return (wide + context) / (wide + 4096)


def largest_speed_ups(
    model: LanguageModelConfig, ring: int, context: int
) -> tuple[float, float]:
    """Returns how much faster a striped step is at most, and its attention alone.

    Only products take time, at the same rate, all steps as long as on their slowest
    device, and tiles without a visible pair are skipped. Striped Attention, section 3:
    after half a block, a contiguous ring computes whole ones on its slowest device, a
    striped one halves; of attention alone as if without tiles.
    """
    length = context // ring
    half = length * (length + TILE) / 2
    contiguous, striped = half + (ring - 1) * length**2, half * ring
    heads = model.num_heads * model.head_dim
    rest = 2.0 * num_matrix_parameters(model) * length
    products = 4.0 * model.num_layers * heads
    step = (rest + products * contiguous) / (rest + products * striped)
    return step, (2 * ring - 1) / ring


def _model(size: str) -> LanguageModelConfig:
    return LanguageModelConfig(**models.fields_of(size))


def describe(contexts: Path) -> Iterator[str]:
    """Yields the lines that are printed; contexts: the folder of table 3's rows."""
    yield "Table 2: smallest block and sequence of a device, in 1024 tokens"
    for row in table_2():
        block, sequence = row["block"] / 1024, row["sequence"] / 1024
        said = "   paper {} and {}".format(*row["paper"]) if row["paper"] else ""
        yield f"  {row['chip']:24s} {block:7.1f} {sequence:8.1f}{said}"
    yield "\nTable 3: contexts of one sequence, in 1024 tokens; compiled, not run"
    yield (
        "  model topology   remat     paper      ours  memory, GiB  host's  hidden"
        "  MFU at most"
    )
    yield from table_3(contexts)
    yield "\nFigure 5: FLOPs of a data set, relative to contexts of 4096 tokens"
    for size in FIGURE_5_SIZES:
        ratios = ((n, dataset_flops(size, n)) for n in FIGURE_5_CONTEXTS)
        shown = ", ".join(f"{n // 1024}K {ratio:.1f}" for n, ratio in ratios)
        yield f"  {size:4s} {shown}"
    yield "\nStriped over contiguous, at most: a whole step, only products counted"
    yield "(attention alone, at any length)"
    for size in SPEED_UP_SIZES:
        for ring, devices in SPEED_UP_RINGS.items():
            steps = []
            for context in SPEED_UP_CONTEXTS:
                step, limit = largest_speed_ups(_model(size), ring, context)
                steps.append(f"{context // 1024}K {step:.2f}")
            name = f"{size:4s} ring of {ring:2d}, {devices}"
            yield f"  {name}: {', '.join(steps)} ({limit:.2f})"


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    output = parser.parse_args(arguments).output
    text = "\n".join(describe(output / "tpu/contexts"))
    print(text)
    (output / "paper_tables.txt").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
