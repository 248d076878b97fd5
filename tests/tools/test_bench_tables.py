"""Tables of the benchmarks explain the columns that they have."""

import pytest

from tools import bench_kernels, bench_ring, bench_train

TIMES = {"seconds_median": 2.0, "cpu_seconds_median": 3.0, "seconds_spread": 0.1}
ERRORS = {f"error_{name}": 1e-3 for name in ("out", "dq", "dk", "dv")}
TILE = {"layout": "contiguous", "block_q": 8, "block_k": 8}
RING = TIMES | ERRORS | TILE | {"implementation": "ringattention", "tflops": 1.0}
KERNEL = TIMES | {"contestant": "cudnn", "direction": "forward", "tflops": 1.0}
PATH = {"layout": "striped", "direction": "forward", "seconds_path": 0.004}
PATH |= {"tiles_path": 9, "speed_up": 1.5, "limit": 2.0, "limit_share": 0.75}
STEP = {"context_tokens": 8, "step_seconds": 0.5, "tokens_per_second": 16.0}
STEP |= {"mfu": None, "mfu_paper": None, "peak_bytes": None}


@pytest.mark.parametrize(
    ("table", "row", "explained"),
    [
        (bench_ring.table, RING, ["cpu s", "spread", "error"]),
        (bench_kernels.table, KERNEL | {"error": 1e-3}, ["ms", "spread", "error"]),
        (
            bench_ring.table_of_steps,
            PATH,
            ["ms", "tiles", "speed-up", "limit", "share"],
        ),
        (bench_train.table, STEP, ["MFU paper", "peak", "-"]),
    ],
    ids=["ringattention", "kernels", "simulated", "train"],
)
def test_columns_are_explained_below_the_rows(table, row, explained):
    head, line, *below = table([row]).splitlines()
    for title in explained:
        assert title in head + line
        where = " ".join(below)
        assert f"{title}:" in where or f"{title}, " in where, title
