"""What TensorBoard is told by a run's event files, beside its points."""

from pathlib import Path

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout


def layout(run: Path) -> dict[str, dict[str, list[str]]]:
    """Expressions of the curves of each chart, by category and title."""
    events = event_accumulator.EventAccumulator(str(run)).Reload()
    plugin = events.PluginTagToContent("custom_scalars")
    assert plugin == {"custom_scalars__config__": b""}
    (event,) = events.Tensors("custom_scalars__config__")
    found = Layout.FromString(event.tensor_proto.string_val[0])
    return {
        category.title: {
            chart.title: list(chart.multiline.tag) for chart in category.chart
        }
        for category in found.category
    }
