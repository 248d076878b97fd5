"""The dashboard shows what runs write, and no more."""

from pathlib import Path

import pytest

from tests.curves import layout
from training.dashboard import CHARTS, charts
from training.goodput import TAGS
from training.metrics import TensorBoardWriter, Throughput
from training.report import Losses

ALWAYS = ["train/grad_norm", "train/learning_rate", "guard/skipped", *TAGS]

PARTS = Losses(held_out_parts=["from_0"])
UNVALIDATED = Losses(parts=["rank_1"], held_out_parts=["rank_1"], validates=False)


def tags(peak_flops: float | None, losses: Losses) -> list[str]:
    throughput = Throughput(num_devices=1, peak_flops=peak_flops)
    return [*ALWAYS, *losses.tags, *throughput.tags]


def test_event_files_hold_the_layout_of_the_dashboard(tmp_path: Path) -> None:
    known = [*tags(1e12, Losses(held_out_parts=["rank_1"])), "perf/peak_bytes"]
    with TensorBoardWriter(tmp_path, first_step=1) as writer:
        writer.dashboard(known, "apples")
        writer.scalars(1, {"train/loss": 2.0})
    found = layout(tmp_path)
    assert found == charts(known, "apples")
    assert list(found) == list(CHARTS)
    assert list(found["Speed"]) == list(CHARTS["Speed"])
    assert found["Speed"]["MFU"] == CHARTS["Speed"]["MFU"]
    titles = ["loss, apples", "held-out loss by part, apples"]
    assert list(found["Learning"])[:2] == titles


@pytest.mark.parametrize(
    ("peak_flops", "losses", "missing"),
    [
        (1e12, PARTS, set()),
        (None, PARTS, {"^perf/mfu$", "^perf/mfu_paper$"}),
        (1e12, Losses(), {"^validation/loss_"}),
        (1e12, UNVALIDATED, {"^validation/loss$", "^validation/loss_"}),
    ],
    ids=["everything", "unknown_chip", "no_parts", "no_validation"],
)
def test_what_a_run_does_not_write_has_no_chart(peak_flops, losses, missing) -> None:
    shown = charts(tags(peak_flops, losses), losses.unit)
    assert all(curves for drawn in shown.values() for curves in drawn.values())
    hidden = every_expression(CHARTS) - every_expression(shown)
    assert hidden == missing | {"^perf/peak_bytes$"}


def every_expression(shown: dict[str, dict[str, list[str]]]) -> set[str]:
    return {tag for drawn in shown.values() for tags in drawn.values() for tag in tags}
