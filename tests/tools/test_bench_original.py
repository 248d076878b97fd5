"""A stand-in for the original, which needs an older JAX: its protocol, its refusals."""

import sys
from pathlib import Path

import jax
import pytest

from kernels.cases import FLOAT32_TOLERANCE
from tools import bench_original
from tools.bench_original import table

pytestmark = pytest.mark.thorough

TINY = "--devices 2 --length 64 --heads 2 --head-dim 16 --chunks 8 --repeats 2".split()

# A Python whose `original_process.py` computes with this repository's reference.
STAND_IN = """#!{python}
import json, pathlib, sys
sys.path.insert(0, {root!r})
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from kernels import attention, masks
script, directory, devices, *chunks = sys.argv[1:]
assert devices == "2" and script.endswith("original_process.py")
{fault}
problem = np.load(pathlib.Path(directory, "problem.npz"))
names = "q", "k", "v"
segments = problem["segments"][0] if "segments" in problem else None
mask = masks.causal() if segments is None else masks.documents(segments)
attend = lambda *x: attention(*x, visible=mask)
out, pull = jax.vjp(attend, *(problem[name] for name in names))
versions = dict(ringattention="0.1.2")
print(json.dumps(dict(compile_seconds=1.5, versions=versions)), flush=True)
for number, line in enumerate(sys.stdin):
    print(json.dumps(dict(wall=8.0 + number, cpu=16.0 + number)), flush=True)
answer = dict(zip(["dq", "dk", "dv"], pull(problem["d_out"])), out=out)
np.savez(pathlib.Path(directory, "answer.npz"), **answer)
"""


def stand_in(directory: Path, fault: str = "") -> list[str]:
    """Arguments with which the program runs it instead of the original."""
    path, root = directory / "python", str(Path(bench_original.__file__).parents[1])
    path.write_text(STAND_IN.format(python=sys.executable, root=root, fault=fault))
    path.chmod(0o755)
    return [*TINY, "--python", str(path)]


@pytest.mark.parametrize(
    "mask", ["causal", pytest.param("documents", marks=pytest.mark.slow)]
)
def test_layouts_and_the_original_have_a_row_each(mask, tmp_path, rows_of, capsys):
    rows = rows_of(bench_original, *stand_in(tmp_path), "--mask", mask)
    assert [(r["implementation"], r["layout"], r["block_q"]) for r in rows] == [
        *(("blockwise", layout, 32) for layout in ("contiguous", "striped", "zigzag")),
        ("ringattention", "contiguous", 8),
    ]
    for row in rows:
        assert row["mask"] == mask
        for name in "out", "dq", "dk", "dv":
            assert 0 < row[f"error_{name}"] < FLOAT32_TOLERANCE
    # The first turn, of 8 seconds, does not count.
    peer = rows[-1]
    assert (peer["seconds_median"], peer["cpu_seconds_median"]) == (9.5, 17.5)
    assert peer["compile_seconds"] == 1.5
    assert peer["versions"] == {"ringattention": "0.1.2"}
    assert rows[0]["versions"] == {"jax": jax.__version__}
    speed_up = 9.5 / rows[0]["seconds_median"]
    assert f"{speed_up:.2f} x as fast as the original's best" in table(rows)
    assert table(rows) in capsys.readouterr().out


def test_an_original_that_fails_is_quoted_and_nothing_is_written(tmp_path, capsys):
    arguments = stand_in(tmp_path, fault='sys.exit("no module of that name")')
    output = tmp_path / "rows.json"
    assert bench_original.main([*arguments, "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said == "error: ringattention failed: no module of that name\n"
    assert not output.exists()
