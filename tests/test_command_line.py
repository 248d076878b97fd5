"""How programs begin and end: silent where nothing is wrong, one line where it is."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest

from data.remote import as_path
from tasks.command_line import as_program, at_least, platforms, read_config, say, share
from tests.cases import pairs, table
from tests.support.processes import ROOT, run_program
from tools import (
    convert_hf,
    evaluate,
    figures,
    generate,
    pack_exorl,
    plan_pod,
    prepare_text,
)

TYPOS = [
    (plan_pod.main, ["--topolgy=v4:2x2x1"], "--topolgy. Did you mean --topology?"),
    (plan_pod.main, ["--confg=configs/tiny.py"], "--confg. Did you mean --config?"),
    (convert_hf.main, ["import", "a", "b", "--wieghts=x"], "Did you mean --weights?"),
    (prepare_text.main, ["a", "--confg=b"], "there is no flag --confg"),
    (evaluate.main, ["los"], "Did you mean loss?"),
    (figures.main, ["retruns", "a", "--output=b"], "Did you mean returns?"),
    (
        evaluate.main,
        ["ruler", "--tasks=nia_multiquery"],
        "Did you mean niah_multiquery?",
    ),
]
"""Programs, arguments, and what is said of them."""


@pytest.mark.thorough
def test_compilers_of_chips_that_are_not_there_are_silent():
    command = "-m", "tools.convert_hf", "import", "nowhere", "nowhere/else"
    # As a user starts it: nothing says where JAX is to look for devices.
    status, _, said = run_program(*command, JAX_PLATFORMS="")
    (line,) = said.splitlines()
    assert status == 1 and line.startswith("error: ")


@pytest.mark.quick
def test_the_compiler_of_described_pods_is_silent():
    pods = "from tools.lib.compiled.pods import tpu_devices\n"
    pods += "assert len(tpu_devices('v4:2x2x2')) == 8"
    assert run_program("-c", pods) == (0, "", "")


@pytest.mark.parametrize(
    ("files", "environment", "expected"), table("runs.txt", "devices")
)
def test_files_of_a_host_say_its_devices(files, environment, expected, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert platforms(tmp_path, environment) == expected


@pytest.mark.thorough
def test_a_gpu_that_jax_cannot_use_ends_a_run():
    """A host with a GPU and the CPU's requirements, or a broken CUDA."""
    fake = "import sys, train\nfrom tasks import command_line\n"
    fake += "command_line.platforms = lambda root, environment: 'tpu,cpu'\n"
    fake += "sys.exit(train.main(['--config=configs/h200_1b.py']))"
    nowhere = {"JAX_PLATFORMS": "", "TPU_LIBRARY_PATH": "nowhere"}
    status, _, said = run_program("-c", fake, **nowhere)
    assert status == 1
    last = said.splitlines()[-1]
    assert last.startswith("error: JAX cannot use the devices of this host: 'tpu'")
    assert "make venv ACCELERATOR=" in last and "JAX_PLATFORMS=cpu" in last


def end_by(error: BaseException) -> int:
    """Exit code of a program that raises this."""

    @as_program
    def main(arguments: object) -> None:
        raise error

    return main()


ERRORS = [
    (ValueError("two\n  lines"), 1),
    (OSError(28, "No space left on device"), 1),
    (ImportError("no module"), 1),
    (NotImplementedError("not here"), 1),
    (FloatingPointError("nan"), 1),
    (KeyboardInterrupt(), 130),
]


def test_memory_that_is_too_small_is_said_below_xlas_account(capsys):
    said = (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\n  5 GiB: a fusion"
    )
    assert end_by(jax.errors.JaxRuntimeError(said)) == 1
    *account, last = capsys.readouterr().err.splitlines()
    assert account == said.splitlines() and last.startswith("error: a device's memory")


@pytest.mark.parametrize(("error", "status"), ERRORS)
def test_an_error_is_one_line(error, status, capsys):
    assert end_by(error) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {' '.join(str(error).split()) or 'interrupted'}"


def test_names_are_printed_without_their_escape_codes(capsys):
    end_by(FileNotFoundError(2, "no such file", "a\x1b[31mé\x07b"))
    say("corpora/\x1b]0;title\x07: 3 documents")
    said = capsys.readouterr()
    assert said.err == "error: [Errno 2] no such file: 'a\\x1b[31mé\\x07b'\n"
    assert said.out == "corpora/\\x1b]0;title\\x07: 3 documents\n"


@pytest.mark.thorough
@pytest.mark.parametrize("output", ["> /dev/full", "> >(exit)"])
def test_what_cannot_be_printed_ends_no_program(output, tmp_path):
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + (
        "from tasks.command_line import as_program, say\n"
        "import pathlib\n"
        "@as_program\n"
        "def main(_):\n"
        "    say('a line')\n"
        "    pathlib.Path('saved').touch()\n"
        "    return 75\n"
        "sys.exit(main())"
    )
    command = "bash", "-c", f'"$0" -c "$1" {output}', sys.executable, program
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "")
    assert (tmp_path / "saved").exists()


def test_an_error_of_the_program_itself_has_its_trace():
    with pytest.raises(RuntimeError, match="a mistake"):
        end_by(RuntimeError("a mistake"))


@pytest.mark.parametrize(
    "kind, wrong",
    [
        *((at_least(1), text) for text in ("0", "-3", "nan", "two", "", "1e99x")),
        *((at_least(0.5, float), text) for text in ("0", "nan", "two", "")),
        *((share, text) for text in ("-0.1", "1.1", "nan", "inf", "half")),
    ],
)
def test_numbers_of_arguments_are_checked(kind, wrong):
    with pytest.raises(Exception, match=f"must be a .*number.* got '?{wrong}"):
        kind(wrong)
    assert at_least(0)("0") == 0 and at_least(0, float)("inf") == float("inf")
    assert [share("0"), share("1")] == [0, 1]


@pytest.mark.parametrize(("arguments", "message"), table("runs.txt", "arguments"))
def test_a_bad_config_is_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        read_config(arguments)


@pytest.mark.parametrize(("main", "arguments", "message"), TYPOS)
def test_the_nearest_flag_and_subcommand_are_named(main, arguments, message, capsys):
    assert main(arguments) == 1
    assert f"{message}: see --help" in capsys.readouterr().err


def test_words_behind_a_flag_are_not_taken_for_flags():
    chosen, _ = generate._options(["--prompt", "--- a story", "--config.seed=1"])
    assert chosen.prompt == "--- a story"


def test_paths_of_arguments_may_begin_with_the_home_directory(monkeypatch, tmp_path):
    """Which no shell puts into --cache=~/x: it was made in a folder called "~"."""
    monkeypatch.setenv("HOME", str(tmp_path))
    convert = convert_hf._arguments(["export", "~/run", "~/hf", "--like", "~/like"])
    assert convert.workdir == str(tmp_path / "run")
    found = [convert.directory, convert.like]
    found.append(convert_hf._arguments(["import", "hf", "~/run"]).workdir)
    needed = ["--domain=walker", "--algorithm=rnd", "--task=run"]
    packed = pack_exorl._arguments(["--root=~/data", "--cache=~/cache", *needed])
    found += [packed.root, packed.cache]
    found.append(prepare_text._arguments(["x", "--output=~/corpus"]).output)
    names = "hf", "like", "run", "data", "cache", "corpus"
    assert found == [tmp_path / name for name in names]
    assert as_path("~no-such-user/x") == Path("~no-such-user/x")


@pytest.mark.parametrize(("source", "message"), pairs("runs.txt", "no-config"))
def test_a_file_that_makes_no_config_is_refused(source, message, tmp_path):
    file = tmp_path / "made.py"
    file.write_text(source)
    with pytest.raises(ValueError, match=f"{file}: .*{message}"):
        read_config([f"--config={file}"])


def test_a_config_is_read_with_what_is_changed_and_locked():
    flags = ["--config.train.steps=7", "--config.mesh.fsdp", "4"]
    flags += ["--config.may_change=('rope_theta',)", "--config.workdir=a b"]
    config = read_config(["--config=configs/line_retrieval.py:160", *flags])
    assert (config.train.steps, config.mesh.fsdp) == (7, 4)
    assert config.may_change == ("rope_theta",)
    assert (config.workdir, config.data.context_tokens) == ("a b", 320)
    assert config.is_locked
