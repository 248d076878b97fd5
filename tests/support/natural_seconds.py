"""Estimates attention of marin's models at 262,144 tokens on a ring of four.

    python -m tests.support.natural_seconds

Prints a layer's kernels and waits, forward and backward, in milliseconds, and what an
exchange takes if nothing hides it.
"""

from dataclasses import replace

from kernels.cost.clock import Heads, RingCost
from kernels.cost.exchange import exchange_seconds
from kernels.cost.work import Row, RowOnRing
from kernels.devices.chips import Chip, find
from kernels.layouts import Contiguous, Mirror

RING = 4
TOKENS = 2**18
LAYERS = {
    "67B-A2B, full": (Heads(20, 5, 128), 0),
    "67B-A2B, window": (Heads(20, 5, 128), 2048),
    "535B-A23B, full": (Heads(48, 6, 128), 0),
    "535B-A23B, window": (Heads(48, 12, 128), 512),
}
"""Heads and window."""


def print_layer(chip: Chip, name: str) -> None:
    """Prints the estimate of one of LAYERS, contiguous and mirrored."""
    heads, window = LAYERS[name]
    row = Row.of((), TOKENS).seen_within(window)
    for layout in (Contiguous(), Mirror()):
        sequence = RowOnRing(row, layout, RING, TOKENS // RING)
        cost = RingCost.of(sequence, 1, heads, chip)
        line = f"{chip.name}, {name}, {layout}:"
        for direction in ("forward", "backward"):
            times = cost.times(chip, direction)
            line += f" {direction} {times.kernels * 1e3:.2f}"
            line += f" + {(times.outlasting + times.small) * 1e3:.2f},"
        print(f"{line} exchange {exchange_seconds(sequence, heads, chip) * 1e3:.2f}")


def main() -> None:
    """Prints all layers on a v4, and on a GB200, a B200 with another peak."""
    b200 = find("NVIDIA B200")
    v4 = find("TPU v4")
    assert b200 is not None and v4 is not None
    for chip in (v4, replace(b200, name="GB200", peak_flops=2500e12)):
        for name in LAYERS:
            print_layer(chip, name)


if __name__ == "__main__":
    main()
