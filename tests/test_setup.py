"""What `make` does before it runs anything, with recorders in the place of Python.

No test installs a package: `python3.12` is a shell script that answers questions like
the Python of these tests and only writes down the calls of `venv` and `pip`.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What the scripts call, so that a PATH can be built that holds no Python.
COMMANDS = ["bash", "cat", "chmod", "cksum", "cmp", "dirname", "env", "flock", "make"]
COMMANDS += ["mkdir", "mv", "nproc", "rm", "sed", "sh", "tail", "touch"]

RECORDER = """\
#!/usr/bin/env bash
log={log}
case "$*" in
    "-m venv "*)
        echo "venv" >>"$log"
        [ ! -e "$log.venv_fails" ] || {{ echo "first line"; echo "disk full"; exit 1; }}
        mkdir -p "$3/bin"
        cat "$0" >"$3/bin/python"
        chmod +x "$3/bin/python"
        touch "$3/pyvenv.cfg"
        ;;
    "-m pip install "*)
        shift 3
        echo "pip $*" >>"$log"
        [ ! -e "$log.pip_kills" ] || kill -9 $PPID
        [ ! -e "$log.pip_fails" ] || exit 1
        ;;
    *) exec {python} "$@" ;;
esac
"""


class Setup(NamedTuple):
    """A directory with requirement files, a PATH without Python, and a log of calls."""

    root: Path
    environment: dict[str, str]

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def add_program(self, name: str, text: str, folder: str = "bin") -> Path:
        path = self.root / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def add_python(self, name: str = "python3.12", folder: str = "bin") -> Path:
        text = RECORDER.format(
            log=shlex.quote(str(self.log)), python=shlex.quote(sys.executable)
        )
        return self.add_program(name, text, folder)

    def run(
        self, *requirements: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / "tools/make_venv.sh", ".venv", *(requirements or ["base.txt"])],
            cwd=self.root,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def take_calls(self) -> list[str]:
        """Return the calls of venv and pip since the last time."""
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return calls


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for command in COMMANDS:
        found = shutil.which(command)
        if found:
            (binaries / command).symlink_to(found)
    (tmp_path / "base.txt").write_text("one==1\n")
    (tmp_path / "dev.txt").write_text("two==2\n")
    return Setup(tmp_path, {"PATH": str(binaries), "HOME": str(tmp_path)})


def assert_one_line(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr


def test_without_python_one_line_says_what_is_missing(setup: Setup) -> None:
    assert_one_line(setup.run(), "Python 3.12 is missing", "pyenv install 3.12")
    assert not setup.venv.exists()


@pytest.mark.parametrize("version", [(3, 11, 7), (3, 13, 0)])
def test_another_version_under_the_right_name_is_no_python(
    setup: Setup, version: tuple[int, int, int]
) -> None:
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    python = f"{shlex.quote(sys.executable)} -I -c {shlex.quote(code)}"
    # Called as `python3.12 -I -c QUESTION`.
    setup.add_program("python3.12", f'#!/bin/sh\nexec {python} "$3"\n')
    assert_one_line(setup.run(), "Python 3.12 is missing")


def test_missing_ensurepip_is_named_with_its_package(setup: Setup) -> None:
    refuse = 'case "$*" in *ensurepip*) exit 1;; esac'
    text = f'#!/bin/sh\n{refuse}\nexec {shlex.quote(sys.executable)} "$@"\n'
    path = setup.add_program("python3.12", text)
    assert_one_line(setup.run(), str(path), "apt install python3.12-venv")
    assert not setup.venv.exists()


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("python3.12", "later"),
        ("python3", "later"),
        ("python", "later"),
        ("python", ".pyenv/versions/3.12.9/bin"),
    ],
)
def test_a_failing_shim_gives_way_to_the_next_candidate(
    setup: Setup, name: str, folder: str
) -> None:
    shim = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
    setup.add_program("python3.12", shim)
    setup.add_python(name, folder)
    path = f"{setup.environment['PATH']}:{setup.root / 'later'}"
    result = setup.run(PATH=path)
    assert (result.returncode, result.stderr) == (0, "")
    assert setup.take_calls()[0] == "venv"


def test_pyenv_is_looked_for_where_pyenv_root_points(setup: Setup) -> None:
    setup.add_python("python", "elsewhere/versions/3.12.1/bin")
    assert setup.run(PYENV_ROOT=str(setup.root / "elsewhere")).returncode == 0
    assert setup.take_calls()[0] == "venv"


def test_first_run_says_what_it_does_and_the_second_does_nothing(setup: Setup) -> None:
    setup.add_python()
    result = setup.run("base.txt", "dev.txt")
    making, installing = result.stdout.splitlines()
    version = ".".join(map(str, sys.version_info[:3]))
    assert making == f"making .venv with {sys.executable} ({version})"
    assert installing.startswith("installing base.txt, dev.txt ")
    venv_call, pip_call = setup.take_calls()
    assert venv_call == "venv"
    assert pip_call.endswith(" --requirement=base.txt --requirement=dev.txt")

    again = setup.run("base.txt", "dev.txt")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert setup.take_calls() == []


def test_changed_requirements_are_installed_into_the_same_environment(
    setup: Setup,
) -> None:
    setup.add_python()
    setup.run()
    setup.take_calls()
    (setup.root / "base.txt").write_text("one==2\n")
    assert setup.run().returncode == 0
    (call,) = setup.take_calls()
    assert call.startswith("pip ") and call.endswith(" --requirement=base.txt")
    setup.run()
    assert setup.take_calls() == []


def test_more_requirements_are_added_and_fewer_ask_for_nothing(setup: Setup) -> None:
    setup.add_python()
    setup.run("base.txt")
    setup.take_calls()
    result = setup.run("base.txt", "dev.txt")
    assert result.stdout.startswith("installing dev.txt ")
    assert len(setup.take_calls()) == 1
    setup.run("base.txt")
    setup.run("base.txt", "dev.txt")
    assert setup.take_calls() == []


@pytest.mark.parametrize("trouble", ["pip_fails", "pip_kills"])
def test_a_broken_install_is_done_again(setup: Setup, trouble: str) -> None:
    setup.add_python()
    setup.run()
    (setup.root / "base.txt").write_text("one==3\n")
    setup.take_calls()
    marker = Path(f"{setup.log}.{trouble}")
    marker.touch()
    result = setup.run()
    assert result.returncode != 0
    assert ("pip could not install base.txt" in result.stderr) == (
        trouble == "pip_fails"
    )
    # Even the requirements of before: half of them may be gone.
    (setup.root / "base.txt").write_text("one==1\n")
    marker.unlink()
    setup.take_calls()
    assert setup.run().returncode == 0
    assert len(setup.take_calls()) == 1


def test_an_environment_of_another_python_is_remade(setup: Setup) -> None:
    setup.add_python()
    setup.run()
    setup.add_program("python", "#!/bin/sh\nexit 1\n", ".venv/bin")
    (setup.venv / "left_over").touch()
    setup.take_calls()
    assert setup.run().returncode == 0
    assert [call.split()[0] for call in setup.take_calls()] == ["venv", "pip"]
    assert not (setup.venv / "left_over").exists()


def test_an_active_broken_environment_does_not_remake_itself(setup: Setup) -> None:
    setup.add_python()
    setup.run()
    (setup.venv / "bin/python3.12").symlink_to("python")
    (setup.venv / "unfinished").touch()
    (setup.root / "bin/python3.12").unlink()
    result = setup.run(PATH=f"{setup.venv / 'bin'}:{setup.environment['PATH']}")
    assert_one_line(result, "Python 3.12 is missing")
    assert (setup.venv / "bin/python").exists()


def test_a_failed_environment_is_reported_in_one_line_and_remade(setup: Setup) -> None:
    setup.add_python()
    marker = Path(f"{setup.log}.venv_fails")
    marker.touch()
    assert_one_line(setup.run(), "-m venv .venv failed: disk full")
    marker.unlink()
    setup.take_calls()
    assert setup.run().returncode == 0
    assert [call.split()[0] for call in setup.take_calls()] == ["venv", "pip"]


def test_a_directory_that_is_no_environment_is_left_alone(setup: Setup) -> None:
    setup.add_python()
    precious = setup.venv / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    assert_one_line(setup.run(), ".venv is no virtual environment")
    assert precious.read_text() == "years of work"


def test_a_missing_requirements_file_is_named(setup: Setup) -> None:
    setup.add_python()
    assert_one_line(setup.run("base.txt", "moon.txt"), "moon.txt is missing")
    assert setup.take_calls() == []


def run_make(setup: Setup, *arguments: str) -> str:
    result = subprocess.run(
        ["make", "--dry-run", "-C", ROOT, *arguments],
        env=setup.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_make_train_asks_for_the_run_time_only(setup: Setup) -> None:
    printed = run_make(setup, "train", "ARGS=--config.seed=1")
    assert "make_venv.sh .venv requirements.txt\n" in printed.replace(" \n", "\n")
    command = ".venv/bin/python train.py --config=configs/tiny.py --config.seed=1\n"
    assert command in printed
    printed = run_make(setup, "train", "ACCELERATOR=tpu")
    assert "make_venv.sh .venv requirements.txt requirements-tpu.txt\n" in printed


def test_make_test_leaves_out_slow_tests_and_test_all_does_not(setup: Setup) -> None:
    fast, everything = run_make(setup, "test"), run_make(setup, "test-all")
    assert "make_venv.sh .venv requirements.txt requirements-dev.txt\n" in fast
    assert '-m "not slow"' in fast
    assert "-m slow" not in fast
    assert '-m "not slow"' in everything and "-m slow" in everything
    assert "JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} .venv/bin/python -m pytest" in fast


def test_make_check_lints_and_then_tests_once(setup: Setup) -> None:
    printed = run_make(setup, "check")
    parts = ["make_venv.sh", "ruff format --check .", "ruff check .", "-m pytest"]
    places = [printed.index(part) for part in parts]
    assert places == sorted(places)
    assert [printed.count(part) for part in parts] == [1, 1, 1, 1]


@pytest.mark.parametrize(("command", "is_good"), [("true", True), ("false", False)])
def test_continuous_integration_runs_make_test_from_anywhere(
    setup: Setup, command: str, is_good: bool
) -> None:
    tree = setup.root / "a tree"
    (tree / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", tree / ".ci/run")
    recipe = f"@! read line && pwd >seen && {command}"
    (tree / "Makefile").write_text(f"test:\n\t{recipe}\n")
    result = subprocess.run(
        [tree / ".ci/run"],
        cwd="/",
        env=setup.environment,
        input="a line nobody may read\n",
        text=True,
        timeout=60,
        capture_output=True,
    )
    assert (result.returncode == 0) == is_good
    assert (tree / "seen").read_text().strip() == os.path.realpath(tree)
