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
def run(tmp_path: Path):
    """Runs the script in a folder: its exit status, what it said, and what it ran."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/in_context.sh", tmp_path / "tools")
    (tmp_path / "stub").write_text(STUB)
    (tmp_path / "stub").chmod(0o755)

    def start(words: str) -> tuple[int, str, list[str]]:
        (tmp_path / "ran").write_text("")
        command = ["bash", "tools/in_context.sh", *words.split()]
        given = os.environ | {"PYTHON": "./stub", "OUT": "out"}
        done = subprocess.run(
            command, cwd=tmp_path, env=given, capture_output=True, text=True
        )
        ran = (tmp_path / "ran").read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, ran

    return start


def test_it_makes_data_trains_acts_and_draws_each_agent(run, tmp_path):
    status, _, commands = run("9x9 dpt,ad 0,1")
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
    drawn = [
        f"{tmp_path}/out/{n}.json" for n in ("dpt_0", "dpt_0_read", "ad_0", "dpt_1")
    ]
    assert commands[-1].startswith(f"-m tools.figures returns {' '.join(drawn)}")
    # What is there is kept, and said so.
    status, said, commands = run("9x9 dpt,ad 0,1")
    assert status == 0 and len(commands) == 1 and "tools.figures" in commands[0]
    assert f"{tmp_path}/out/dpt_1.json is there, and is kept" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [("9x9 bc", "WHERE AGENTS SEEDS"), ("8x8 bc 0", "8x8 is none of 10x10, 9x9, cart")],
)
def test_bad_input_is_refused_before_anything_is_made(run, tmp_path, words, said):
    status, error, commands = run(words)
    assert status == 1 and said in error and not commands
    assert not (tmp_path / "out").exists()
