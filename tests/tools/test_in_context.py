"""The one command of agents in context: what it runs, what it keeps and refuses."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT

pytestmark = pytest.mark.quick

# Stands for Python: notes its arguments, and writes what comes behind --output.
STUB = """#!/usr/bin/env bash
echo "$*" >>"$(dirname "$0")/ran"
while [ $# -gt 1 ]; do
    [ "$1" != --output ] || { mkdir -p "$(dirname "$2")" && touch "$2"; }
    shift
done
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the script and the stub."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/in_context.sh", tmp_path / "tools")
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)
    return tmp_path


def run(place: Path, words: str, out: str = "out") -> tuple[int, str, list[str]]:
    """Returns the exit status, what was said, and the commands that were run."""
    (place / "ran").unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", "tools/in_context.sh", *words.split()],
        cwd=place,
        env=os.environ | {"PYTHON": "./stub", "OUT": out},
        capture_output=True,
        text=True,
    )
    ran = place / "ran"
    commands = ran.read_text().splitlines() if ran.exists() else []
    return done.returncode, done.stdout + done.stderr, commands


def test_it_makes_data_trains_acts_and_draws_each_agent(place):
    status, _, commands = run(place, "9x9 dpt,ad 0,1")
    assert status == 0
    acts, config = "tools.evaluate exorl", "train.py --config=configs/icrl_dark_room.py"
    made = "tools.make_dark_room --room"
    dpt, ad = f"{config}:9x9/dpt", f"{config}:9x9/ad"
    seed = [dpt, acts, acts, ad, acts]
    # Data are made once, the explorer's and the imitators'.
    expected = [made, *seed[:3], made, *seed[3:], *seed, "tools.figures returns"]
    begin = [" ".join(line.removeprefix("-m ").split()[:2]) for line in commands]
    assert begin == expected
    acted = [line for line in commands if acts in line]
    assert ["--window 20" in x for x in acted] == ["9x9/ad" in x for x in acted]
    drawn = [f"{place}/out/{n}.json" for n in ("dpt_0", "dpt_0_read", "ad_0", "dpt_1")]
    assert commands[-1].startswith(f"-m tools.figures returns {' '.join(drawn)}")
    # What is there is kept, and said so.
    status, said, commands = run(place, "9x9 dpt,ad 0,1")
    assert status == 0 and len(commands) == 1 and "tools.figures" in commands[0]
    assert f"{place}/out/dpt_1.json is there, and is kept" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [("9x9 bc", "WHERE AGENTS SEEDS"), ("8x8 bc 0", "8x8 is none of 10x10, 9x9, cart")],
)
def test_bad_input_is_refused_before_anything_is_made(place, words, said):
    status, error, commands = run(place, words)
    assert status == 1 and said in error and not commands
    assert not (place / "out").exists()
