"""Lays out the page of TensorBoard that shows a run: its "Custom Scalars"."""

import re
from collections.abc import Collection

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import metadata
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MultilineChartContent,
)
from tensorboard.util.tensor_util import make_tensor_proto

# Category: chart: regular expressions of its curves' tags.
CHARTS = {
    "Learning": {
        "loss, {unit}": [r"^train/loss$", r"^validation/loss$"],
        "held-out loss by part, {unit}": [r"^validation/loss_"],
        "gradient norm": [r"^train/grad_norm$"],
        "learning rate": [r"^train/learning_rate$"],
        "updates skipped": [r"^guard/skipped$"],
    },
    "Speed": {
        "MFU": [r"^perf/mfu$", r"^perf/mfu_paper$"],
        "tokens a second": [r"^perf/tokens_per_second$"],
        "seconds a step": [r"^perf/step_time$"],
        "memory of the fullest device, bytes": [r"^perf/peak_bytes$"],
    },
    "Where the time goes": {
        "goodput": [r"^goodput/fraction$"],
        "seconds so far": [r"^goodput/.*_seconds$"],
    },
}
"""Curves of `metrics.Throughput`, `goodput.Goodput` and `report.Report`."""


def charts(tags: Collection[str], unit: str) -> dict[str, dict[str, list[str]]]:
    """Returns the CHARTS that have curves in this run.

    tags: of all curves that the run will write. unit: of its loss.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for category, all_charts in CHARTS.items():
        for title, curves in all_charts.items():
            drawn = [c for c in curves if any(re.search(c, tag) for tag in tags)]
            if drawn:
                found.setdefault(category, {})[title.format(unit=unit)] = drawn
    return found


def dashboard(tags: Collection[str], unit: str) -> Summary.Value:
    """Returns the summary with which TensorBoard draws `charts`."""
    layout = Layout(
        category=[
            Category(
                title=category,
                chart=[
                    Chart(title=title, multiline=MultilineChartContent(tag=curves))
                    for title, curves in drawn.items()
                ],
            )
            for category, drawn in charts(tags, unit).items()
        ]
    )
    return Summary.Value(
        tag=metadata.CONFIG_SUMMARY_TAG,
        metadata=metadata.create_summary_metadata(),
        tensor=make_tensor_proto(
            np.array(layout.SerializeToString(), object), dtype=DT_STRING
        ),
    )
