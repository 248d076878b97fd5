"""Writes the papers' tables with our rows: text and JSON into results/.

    python -m tools.paper_tables                      # everything
    python -m tools.paper_tables --compile rings      # memory by ring size
    python -m tools.paper_tables --compile contexts   # table 3; --only 7b_v4_nothing

Ring Attention (2310.01889): table 1 (memory of a layer), table 2 (the smallest blocks
that hide their transfer), table 3 (longest contexts), figure 5 (FLOPs of a data set by
context). Striped Attention (2311.09431): how much faster striping can be at most.

Compiled rows (minutes each) are kept in results/tpu/ and read from there; those of
table 1 were compiled at v0.1-wide. Nothing of this has run on a TPU.
"""

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from configs import models
from data.json_text import parse_json
from models.sizes import LanguageModelConfig
from tasks.command_line import Parser, as_program
from tools.lib.benchmarks.rows import Environment
from tools.lib.files import write_json
from tools.lib.papers import contexts as paper_contexts
from tools.lib.papers import memory as paper_memory
from tools.lib.papers.formulas import (
    SmallestBlock,
    dataset_flops_ratio,
    largest_attention_speed_up,
    largest_speed_up,
)
from training.chips import CHIPS

MIB, GIB = 2**20, 2**30
RESULTS = Path(__file__).resolve().parents[1] / "results"
LAYER, RINGS, CONTEXTS = "tpu/layer_memory.json", "tpu/ring_memory.json", "tpu/contexts"
FIELDS = {
    LAYER: ("system", "ring", "parts", "tokens", "compiled_bytes", "formula_bytes"),
    RINGS: ("ring", "tokens", "activation_bytes"),
}
"""Of the rows of a file."""

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

SPEED_UP_SIZES = ("1b", "3b", "7b")
SPEED_UP_RINGS = {8: "8 A100", 16: "16 TPU v4"}
SPEED_UP_CONTEXTS = tuple(2**power for power in range(15, 20)) + (786432,)

FIGURE_5_SIZES = ("7b", "13b", "30b", "65b")
FIGURE_5_CONTEXTS = tuple(2**power for power in range(12, 26))


def table_2() -> list[dict[str, Any]]:
    """Returns smallest blocks, with all links of a chip and with one of a ring."""
    found: list[dict[str, Any]] = []
    for chip in CHIPS:
        links, slow = TPU_LINKS.get(chip.name, 1), INFINIBAND_BYTES_PER_SECOND
        ways = {chip.name: SmallestBlock.of(chip, links)}
        if links > 1:
            ways[f"{chip.name} (one link)"] = SmallestBlock.of(chip)
        if chip.name == "A100 80GB":
            between = dataclasses.replace(chip, interconnect_bytes_per_second=slow)
            ways["A100 over InfiniBand"] = SmallestBlock.of(between)
        for name, block in ways.items():
            row = {"chip": name} | dataclasses.asdict(block)
            found.append(row | {"paper": PAPER_BLOCKS.get(name)})
    return found


def figure_5() -> list[dict[str, Any]]:
    """Returns FLOPs of a data set in longer contexts over those of 4096 tokens."""
    return [
        {"model": size, "context": context, "ratio": ratio}
        for size in FIGURE_5_SIZES
        for context in FIGURE_5_CONTEXTS
        for ratio in [dataset_flops_ratio(_model(size).hidden_size, context, 4096)]
    ]


def speed_ups() -> list[dict[str, Any]]:
    """Returns how much faster than contiguous a striped step can be at most."""
    return [
        {
            "model": size,
            "ring": ring,
            "context": context,
            "step": largest_speed_up(_model(size), ring, context),
            "attention": largest_attention_speed_up(ring),
        }
        for size in SPEED_UP_SIZES
        for ring in SPEED_UP_RINGS
        for context in SPEED_UP_CONTEXTS
    ]


def _model(size: str) -> LanguageModelConfig:
    return LanguageModelConfig(**models.fields_of(size))


def tables(results: Path) -> dict[str, Any]:
    """Returns everything that is printed, as plain values."""
    return {
        "table_1": _kept_rows(results, LAYER),
        "rings": _kept_rows(results, RINGS),
        "table_2": table_2(),
        "table_3": paper_contexts.rows(results / CONTEXTS),
        "figure_5": figure_5(),
        "speed_ups": speed_ups(),
    }


def _kept_rows(results: Path, name: str) -> list[dict[str, Any]]:
    path = results / name
    if not path.is_file():
        return []
    try:
        rows = parse_json(path.read_bytes())["rows"]
        return [row | {field: row[field] for field in FIELDS[name]} for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise paper_contexts.not_kept(path, error) from error


def describe(found: dict[str, Any]) -> list[str]:
    """Returns the lines that are printed."""
    lines = ["Table 1: by what a layer's activations grow, compiled for TPU v4, MiB"]
    for row in found["table_1"]:
        compiled, formula = row["compiled_bytes"], row["formula_bytes"]
        name = row["system"] + (f", {row['parts']} parts" if row["parts"] > 1 else "")
        first, last = row["tokens"]
        lines.append(
            f"  {name:24s} {first:>8,} to {last:>8,} tokens on {row['ring']}: "
            f"{compiled / MIB:8.1f}, the paper's formula {formula / MIB:8.1f}"
        )
    first, last = paper_memory.TOKENS_OF_A_DEVICE
    lines += [
        "",
        "Memory of a device as sequence and ring grow together, 1b, 2 layers:",
    ]
    lines += [f"  by what activations grow from {first:,} to {last:,} tokens a device"]
    lines += [
        f"  ring {row['ring']:>5d}, to {row['tokens']:>11,} tokens: "
        f"{row['activation_bytes'] / MIB:8.1f} MiB"
        for row in found["rings"]
    ]
    lines += ["", "Table 2: smallest block and sequence of a device, in 1024 tokens"]
    for row in found["table_2"]:
        paper = (
            "" if row["paper"] is None else "   paper {} and {}".format(*row["paper"])
        )
        lines.append(
            f"  {row['chip']:24s} {row['block'] / 1024:7.1f} "
            f"{row['sequence'] / 1024:8.1f}{paper}"
        )
    lines += ["", "Table 3: contexts in 1024 tokens, one sequence; compiled, not run"]
    lines += map(_context_line, found["table_3"])
    lines += ["", "Figure 5: FLOPs of a data set, relative to contexts of 4096 tokens"]
    for size in FIGURE_5_SIZES:
        ratios = [r for r in found["figure_5"] if r["model"] == size]
        shown = (f"{r['context'] // 1024}K {r['ratio']:.1f}" for r in ratios[3::3])
        lines.append(f"  {size:4s} " + ", ".join(shown))
    lines += [
        "",
        "Striped over contiguous, at most: a whole step, only products counted",
    ]
    for size in SPEED_UP_SIZES:
        for ring, where in SPEED_UP_RINGS.items():
            mine = [
                r for r in found["speed_ups"] if (r["model"], r["ring"]) == (size, ring)
            ]
            shown = (f"{r['context'] // 1024}K {r['step']:.2f}" for r in mine)
            limit = mine[0]["attention"]
            lines.append(
                f"  {size:4s} ring of {ring:2d} ({where}): {', '.join(shown)}; "
                f"attention alone {limit:.2f}"
            )
    return lines


def _context_line(row: dict[str, Any]) -> str:
    name = f"  {row['model']:4s} {row['topology']:10s} {row['remat']:8s}"
    name += f" paper {row['paper_context']:>6,}, ours {row['context']:>8,}: "
    if row["fits"] is None:
        return name + "not compiled"
    if "why" in row:
        return name + row["why"]
    line = (
        f"{row['peak_bytes'] / GIB:.1f} of {row['capacity_bytes'] / GIB:.0f} GiB, "
        f"{row['hidden_share']:.1%} hidden, MFU at most {row['estimated_mfu']:.0%}"
    )
    if row["host_bytes"]:
        line += f", {row['host_bytes'] / GIB:.0f} GiB of the host's"
    return name + line + ("" if row["fits"] else "; less than 5 % spare")


def compile_memory(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows of memory into a file of results/tpu/, as they are compiled."""
    environment = dataclasses.asdict(Environment.now("TPU v4", 0))
    value: dict[str, Any] = {"environment": environment, "rows": []}
    print(f"compiling the rows of {path.name}", file=sys.stderr, flush=True)
    for row in rows:
        value["rows"].append(row)
        write_json(path, value)


def compile_contexts(results: Path, only: Iterable[str]) -> None:
    """Compiles table 3, or the rows named, each into a file of results/tpu/contexts."""
    wanted = set(only)
    for target in paper_contexts.TARGETS:
        for remat in paper_contexts.MULTIPLES:
            name = target.name(remat)
            if not wanted or name in wanted:
                print(f"compiling {name}", file=sys.stderr, flush=True)
                paper_contexts.compile_row(target, remat, results / CONTEXTS)
                (row,) = (
                    row
                    for row in paper_contexts.rows(results / CONTEXTS, [target])
                    if row["remat"] == remat
                )
                print(_context_line(row), flush=True)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    parser.add_argument("--compile", choices=["rings", "contexts"])
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    names = {
        target.name(remat)
        for target in paper_contexts.TARGETS
        for remat in paper_contexts.MULTIPLES
    }
    if options.only and options.compile != "contexts":
        raise ValueError("--only names rows of --compile contexts: give both")
    unknown = set(options.only) - names
    if unknown:
        raise ValueError(
            f"no row {', '.join(sorted(unknown))}: known are {', '.join(sorted(names))}"
        )
    # What is compiled for is described: the devices of this machine do not matter.
    jax.config.update("jax_platforms", "cpu")
    (options.output / "tpu").mkdir(parents=True, exist_ok=True)
    if options.compile == "rings":
        compile_memory(options.output / RINGS, paper_memory.by_ring())
    elif options.compile == "contexts":
        compile_contexts(options.output, options.only)
    found = tables(options.output)
    text = "\n".join(describe(found))
    print(text)
    (options.output / "paper_tables.txt").write_text(text + "\n")
    write_json(options.output / "paper_tables.json", found)


if __name__ == "__main__":
    sys.exit(main())
