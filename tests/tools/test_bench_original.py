"""A stand-in for the original, which needs an older JAX: its protocol, its refusals."""

import json
import sys
from pathlib import Path

import jax
import pytest

from kernels.cases import FLOAT32_TOLERANCE
from tools import bench_original
from tools.bench_original import main, table

TINY = ["--devices", "2", "--length", "64", "--heads", "2", "--head-dim", "16"]
TINY += ["--chunks", "8", "--repeats", "2"]

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


@pytest.fixture(scope="module", autouse=True)
def devices() -> list[jax.Device]:
    """Started before the program asks for fewer than other tests need."""
    return jax.devices()


def stand_in(directory: Path, fault: str = "") -> Path:
    path = directory / "python"
    root = str(Path(bench_original.__file__).parents[1])
    path.write_text(STAND_IN.format(python=sys.executable, root=root, fault=fault))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "mask", ["causal", pytest.param("documents", marks=pytest.mark.slow)]
)
def test_layouts_and_the_original_have_a_row_each(
    mask: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    python = str(stand_in(tmp_path))
    options = ["--mask", mask, "--python", python, "--output", str(output)]
    assert main([*TINY, *options]) == 0
    rows = json.loads(output.read_text())
    assert [(r["implementation"], r["layout"], r["block_q"]) for r in rows] == [
        ("blockwise", "contiguous", 32),
        ("blockwise", "striped", 32),
        ("blockwise", "zigzag", 32),
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


def test_an_original_that_fails_is_quoted_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.json"
    python = str(stand_in(tmp_path, fault='sys.exit("no module of that name")'))
    assert main([*TINY, "--python", python, "--output", str(output)]) == 1
    said = capsys.readouterr().err
    assert said == "error: ringattention failed: no module of that name\n"
    assert not output.exists()
