"""What `make` does before it runs anything, with recorders in the place of Python.

Nothing is installed: `python3.12` is a shell script that answers questions as the
Python of these tests does, and only writes down the calls of `venv` and `pip`.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases import pairs

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
PYTHON = shlex.quote(sys.executable)
# All that the scripts call, for a PATH that holds no Python.
COMMANDS = """bash cat chmod cksum cmp dirname env flock make mkdir mv nproc rm sed sh
    tail touch"""
RECORDER = """#!/usr/bin/env bash
case "$*" in
    "-m venv "*)
        echo "venv" >>$LOG
        [ ! -e $LOG.venv_fails ] || { echo "first line"; echo "disk full"; exit 1; }
        mkdir -p "$3/bin" && cat "$0" >"$3/bin/python" && chmod +x "$3/bin/python"
        touch "$3/pyvenv.cfg"
        ;;
    "-m pip install "*)
        shift 3; echo "pip $*" >>$LOG
        [ ! -e $LOG.pip_kills ] || kill -9 $PPID
        [ ! -e $LOG.pip_fails ] || exit 1
        ;;
    *) exec PYTHON "$@" ;;
esac
""".replace("PYTHON", PYTHON)


class Setup:
    """A directory with requirement files, a PATH without Python, and a log of calls."""

    def __init__(self, root: Path):
        self.root, self.venv, self.log = root, root / ".venv", root / "log"
        self.environment = {"PATH": f"{root}/bin", "HOME": f"{root}", "LOG": "log"}
        self.write("base.txt", "one==1\n")
        self.write("dev.txt", "two==2\n")
        (root / "bin").mkdir()
        for command in COMMANDS.split():
            if found := shutil.which(command):
                (root / "bin" / command).symlink_to(found)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, *command: str | Path) -> Any:
        """Runs a command here, in this environment; nothing can be read."""
        options = {"cwd": self.root, "env": self.environment, "input": ""}
        piped = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(command, **options, **piped)

    def run(self, *files: str) -> Any:
        return self.start(
            ROOT / "tools/make_venv.sh", ".venv", *(files or ["base.txt"])
        )

    def calls(self, *files: str) -> list[str]:
        """The calls of venv and pip in a run, which succeeds without complaint."""
        self.log.unlink(missing_ok=True)
        result = self.run(*files)
        assert (result.returncode, result.stderr) == (0, "")
        return self.log.read_text().splitlines() if self.log.exists() else []

    def refuses(self, said: str, *files: str) -> None:
        result = self.run(*files)
        assert result.returncode and len(result.stderr.splitlines()) == 1, result.stderr
        assert said in result.stderr


@pytest.fixture
def empty(tmp_path):
    return Setup(tmp_path)


@pytest.fixture
def setup(empty):
    empty.write("bin/python3.12", RECORDER)
    return empty


def test_what_is_missing_is_said_in_one_line(empty):
    empty.refuses("Python 3.12 is missing")
    # A shim that fails, and a Python that lacks what makes environments.
    empty.write("bin/python3.12", "#!/bin/sh\nexit 127\n")
    empty.refuses("Python 3.12 is missing")
    refuse = 'case "$*" in *ensurepip*) exit 1;; esac'
    empty.write("bin/python3.12", f'#!/bin/sh\n{refuse}\nexec {PYTHON} "$@"\n')
    empty.refuses("lacks ensurepip")
    assert not empty.venv.exists()


def test_what_cannot_be_installed_and_what_is_no_environment_is_left_alone(setup):
    setup.refuses("moon.txt is missing", "base.txt", "moon.txt")
    assert not setup.log.exists()
    thesis = setup.write(".venv/thesis.txt", "years of work")
    setup.refuses(".venv is no virtual environment")
    assert thesis.read_text() == "years of work"


def test_only_what_changed_is_installed(setup):
    venv, pip = setup.calls()
    assert venv == "venv" and pip.endswith(" --requirement=base.txt")
    assert setup.calls() == [] and setup.run().stdout == ""
    setup.write("base.txt", "one==2\n")
    (call,) = setup.calls()
    assert call.startswith("pip ") and call.endswith(" --requirement=base.txt")
    assert setup.calls() == []
    assert len(setup.calls("base.txt", "dev.txt")) == 1
    assert setup.calls("base.txt") == setup.calls("base.txt", "dev.txt") == []


def test_a_broken_install_is_done_again(setup):
    setup.calls()
    setup.write("base.txt", "one==3\n")
    marker = setup.write("log.pip_kills", "")
    assert setup.run().returncode
    # Even the requirements of before: half of them may be gone.
    setup.write("base.txt", "one==1\n")
    marker.unlink()
    assert len(setup.calls()) == 1
    setup.write("base.txt", "one==3\n")
    setup.write("log.pip_fails", "")
    assert "pip could not install base.txt" in setup.run().stderr


def test_a_broken_environment_is_remade_by_another_python(setup):
    marker = setup.write("log.venv_fails", "")
    setup.refuses("-m venv .venv failed: disk full")
    marker.unlink()
    for _ in range(2):
        assert [call.split()[0] for call in setup.calls()] == ["venv", "pip"]
        setup.write(".venv/bin/python", "#!/bin/sh\nexit 1\n")


@pytest.mark.parametrize("arguments, runs", pairs("runs.txt", "make"))
def test_make_runs_in_this_order(empty, arguments, runs):
    command = "make", "--dry-run", "-C", ROOT, *arguments.split()
    printed = empty.start(*command).stdout
    parts = map(re.escape, runs.split("*"))
    assert re.search(".*".join(parts), printed, re.DOTALL), printed
    for part in ("make_venv.sh", "-m pytest", "-m slow"):
        assert printed.count(part) == runs.count(part)


def check(device: str, folder: Path, python: str, *arguments: str) -> Any:
    return subprocess.run(
        ["bash", ROOT / f"tools/{device}_check.sh", *arguments],
        env=os.environ | {"OUT": str(folder), "PYTHON": python},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("device, platform", [("gpu", "cuda"), ("tpu", "tpu")])
def test_checks_need_their_device(device, platform, tmp_path):
    done = check(device, tmp_path, "false")
    (line,) = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert line.startswith(f"error: false cannot run this on {platform}: ")
    assert f'make venv ACCELERATOR="{device} dev"' in line


@pytest.mark.slow
@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_checks_of_a_device_are_rehearsed(device, tmp_path):
    done = check(device, tmp_path, sys.executable, "rehearsal")
    assert done.returncode == 0, done.stdout[-2000:]
    found = {path.stem for path in tmp_path.glob("*.json") if path.read_text()}
    names = {"kernels", "ring", "gist", "sizes"}
    assert found == names | {"rings" if device == "tpu" else "rings_nccl"}
    for context in "64", "128":
        *_, last = (
            (tmp_path / f"train_{context}/metrics.jsonl").read_text().split("\n{")
        )
        assert '"step": 3' in last
