"""The dashboard shows what runs write."""

import re
from pathlib import Path

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from training.dashboard import CHARTS
from training.metrics import TensorBoardWriter


def test_event_files_hold_the_layout_of_the_dashboard(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path, first_step=1) as writer:
        writer.scalars(1, {"train/loss": 2.0})
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert events.PluginTagToContent("custom_scalars") == {
        "custom_scalars__config__": b""
    }
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(CHARTS)
    titles = [chart.title for chart in layout.category[1].chart]
    assert titles == list(CHARTS["Speed"])
    assert list(layout.category[1].chart[0].multiline.tag) == CHARTS["Speed"]["MFU"]


def every_expression() -> list[str]:
    return [
        tag for charts in CHARTS.values() for tags in charts.values() for tag in tags
    ]


def test_every_expression_is_one() -> None:
    assert all(re.compile(tag) for tag in every_expression())
