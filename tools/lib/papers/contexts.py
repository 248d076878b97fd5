"""Table 3 of Ring Attention (2310.01889): the longest contexts, compiled for the pods.

Every row is the training step of a LLaMA for one sequence of four times the paper's
context with full rematerialisation, or of eight times with the layers' inputs in the
host's memory, compiled by `plan_pod.py` in a process of its own. A row's JSON is kept,
with the commit it was compiled at; a step that the compiler refuses is a row too.
"""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.json_text import parse_json
from tools.lib.files import write_json
from tools.lib.planning.step import SPARE_SHARE

ROOT = Path(__file__).resolve().parents[3]
MULTIPLES = {"nothing": 4, "offload": 8}
"""Of the paper's context, by policy of rematerialisation."""


@dataclass(frozen=True)
class Target:
    """A row of table 3.

    model: a size of `configs/models.py`.
    topology: of the pod; v4-1024 in the paper's words counts TensorCores, 512 chips.
    paper_context: the paper's, in 1024 tokens.
    parts: `config.attention_parts`.
    """

    model: str
    topology: str
    paper_context: int
    parts: int = 4

    @property
    def ring(self) -> int:
        """Devices: two for every chip of a v3."""
        chip, _, shape = self.topology.partition(":")
        return math.prod(map(int, shape.split("x"))) * (2 if chip == "v3" else 1)

    def name(self, remat: str) -> str:
        return f"{self.model}_{self.topology.partition(':')[0]}_{remat}"

    def tokens(self, remat: str) -> int:
        """Returns the tokens of the sequence that is compiled."""
        return MULTIPLES[remat] * self.paper_context * 1024

    def arguments(self, remat: str, output: Path) -> list[str]:
        """Returns the arguments of `plan_pod.py`."""
        return [
            f"--config=configs/models.py:{self.model}/v4",
            f"--topology={self.topology}",
            f"--context={self.tokens(remat)}",
            f"--config.mesh.ring={self.ring}",
            f"--config.attention_parts={self.parts}",
            f"--config.remat={remat}",
            f"--output={output}",
        ]


TARGETS = (
    Target("7b", "v3:16x16", 2048),
    Target("13b", "v3:16x16", 1024),
    Target("3b", "v4:8x8x8", 16384, parts=8),
    Target("7b", "v4:8x8x8", 8192),
    Target("13b", "v4:8x8x8", 4096),
    Target("30b", "v4:8x8x8", 2048),
    Target("3b", "v5e:16x16", 4096, parts=16),
    Target("7b", "v5e:16x16", 2048),
)


def compile_row(target: Target, remat: str, folder: Path) -> dict[str, Any]:
    """Compiles a row and writes it to `folder`, in place of an earlier one.

    Raises:
      RuntimeError: the planner failed; what it said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{target.name(remat)}.new.json"
    part.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.plan_pod", *target.arguments(remat, part)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == 0:
        row = json.loads(part.read_text())
    elif "does not fit" in last:
        row = {"refused": last.removeprefix("error: ")}
    else:
        raise RuntimeError(f"{' '.join(command)} failed: {last}")
    row["command"] = " ".join(
        ["-m", "tools.plan_pod", *target.arguments(remat, part)[:-1]]
    )
    part.unlink(missing_ok=True)
    write_json(folder / f"{target.name(remat)}.json", row)
    return row


def rows(folder: Path, targets: Sequence[Target] = TARGETS) -> list[dict[str, Any]]:
    """Returns table 3: the paper's contexts and those that have been compiled.

    Raises:
      ValueError: a file holds something else.
    """
    return [_row(target, remat, folder) for target in targets for remat in MULTIPLES]


def _row(target: Target, remat: str, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": target.model,
        "topology": target.topology,
        "remat": remat,
        "paper_context": target.paper_context,
        "context": target.tokens(remat) // 1024,
        "fits": None,
    }
    path = folder / f"{target.name(remat)}.json"
    if not path.is_file():
        return row
    try:
        return row | _kept(parse_json(path.read_bytes()))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise not_kept(path, error) from error


def not_kept(path: Path, error: Exception) -> ValueError:
    """Returns the error of a file that `paper_tables.py` has not written."""
    return ValueError(
        f"{path} holds nothing that was compiled here "
        f"({type(error).__name__}: {error}): remove it, or compile it again"
    )


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a table shows of a plan, or of its refusal."""
    if "refused" in found:
        return {"fits": False, "why": found["refused"]}
    memory, transfers = found["memory"], found["transfers"]
    sent = transfers["hidden_bytes"] + transfers["exposed_bytes"]
    return {
        "fits": memory["spare_share"] >= SPARE_SHARE,
        "peak_bytes": memory["peak"],
        "capacity_bytes": memory["capacity"],
        "host_bytes": memory["host"],
        "spare_share": memory["spare_share"],
        "hidden_share": transfers["hidden_bytes"] / sent,
        "estimated_mfu": found["estimate"]["mfu"],
        "compile_seconds": found["compile_seconds"],
        "commit": found["environment"]["commit"],
    }
