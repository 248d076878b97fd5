"""README and docs/ say what is there, and their commands are understood."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import kernels
from configs import agents, base
from tasks import run_config
from tasks.command_line import read_config
from tests import pages
from tests.pages import COMMANDS, INLINE, LIVING, LOG, PAGES, README, ROOT
from tools.lib.compiled.pods import aot_pod
from tools.lib.planning.meshes import suggestions

CODE = [code for page in LIVING for code in page.inline_code()]
NAMES = {p.name for f in pages.FOLDERS.split("|") for p in (ROOT / f).rglob("*.*")}
NAMES |= {path.name for path in ROOT.glob("*.*")}
WITH_PROGRAMS = [page for page in LIVING if page.blocks("python") and page != README]

CONFIG = "--config", "--workdir="


def of_file(words: list[str]) -> list[str]:
    """Replaces the workdir, which is not there, by a config."""
    base = "--config=configs/base.py"
    return [base if word.startswith("--workdir=") else word for word in words]


def test_every_option_in_the_text_is_one_of_some_program():
    known = {"--config", "--workdir", "--logdir", "--help"}
    for path in (ROOT / "tools").rglob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    named = {word for code in CODE for word in re.findall(r"(?:^| )(--[a-z-]+)", code)}
    assert {"--compare", "--relabelling"} <= named
    assert named - known == set()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the reader of the commands is."""
    monkeypatch.chdir(ROOT)


def test_the_readme_is_short_and_leads_to_every_page():
    lines = README.text.splitlines()
    assert len(lines) <= 170
    assert any("Nothing has run on a TPU" in line for line in lines[:12])
    linked = {file for page in PAGES for file, _ in page.links()}
    assert {page.path for page in PAGES} - {README.path} <= linked


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=str)
def test_links_and_anchors_resolve(page):
    for file, anchor in page.links():
        assert file.exists(), file
        if anchor:
            (target,) = (p for p in [*PAGES, LOG] if p.path == file)
            assert anchor in target.anchors(), (file, anchor)


@pytest.mark.parametrize("page", LIVING, ids=str)
def test_paths_are_there(page):
    assert {path for path in page.paths() if not any(ROOT.glob(path))} == set()
    assert page.file_names() <= NAMES


def test_make_targets_are_those_of_the_makefile():
    named = {c.words[1] for c in COMMANDS + INLINE if c.words[0] == "make"}
    makefile = (ROOT / "Makefile").read_text()
    assert {"train", "test", "venv"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A working directory where the weights of the commands have been imported."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    for workdir in "runs/llama2_7b", "runs/llama3_8b":
        Path(workdir).mkdir(parents=True)
        config = base.get_config()
        config.workdir = workdir
        run_config.write(config)


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.program.startswith("tools.")], ids=str
)
def test_programs_take_the_arguments_of_their_commands(command):
    # With what a program reads of a config, where it takes one.
    parser, given = pages.parser_of(command.program, command.arguments)
    _, rest = parser.parse_known_args(given)
    assert [word for word in rest if not word.startswith(CONFIG)] == []
    if rest:
        assert read_config(of_file(rest)).is_locked


@pytest.mark.usefixtures("imported")
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.program == "train.py"], ids=str
)
def test_training_commands_make_a_config(command):
    assert all(word.startswith(CONFIG) for word in command.arguments)
    assert read_config(of_file(command.arguments)).is_locked


def test_config_fields_in_the_text_are_those_of_the_base_config():
    (flags,) = (c for c in COMMANDS if c.words[0].startswith("--"))
    read_config(["--config=configs/base.py", *flags.words])
    text = " ".join([*CODE, *map(str, COMMANDS)])
    named = set(re.findall(r"\bconfig\.(?!json\b)([a-z_]+(?:\.[a-z_0-9]+)?)\b", text))
    assert {"workdir", "guard.stop_after", "init_from"} <= named
    known = dict(agents.get_config().items())
    for name in named:
        section, _, field = name.partition(".")
        assert section in known, name
        assert not field or field in known[section], name


(MESHES,) = (page for page in PAGES if str(page) == "docs/meshes.md")
MESH_ROW = re.compile(r"^\| (v\S+) \| (\d+) x (\d+) Ki \| (.*) \|$", re.MULTILINE)

MESH_ROWS = MESH_ROW.findall(MESHES.text)
SLOW_ROWS = [pytest.param(*row, marks=pytest.mark.slow) for row in MESH_ROWS[:-2]]


@pytest.mark.thorough
@pytest.mark.parametrize("topology, rows, tokens, mesh", [*SLOW_ROWS, *MESH_ROWS[-2:]])
def test_meshes_of_the_table_are_those_suggested(topology, rows, tokens, mesh):
    config = read_config(["--config=configs/tpuv4_7b.py"])
    config.data.batch_rows, config.data.context_tokens = int(rows), 1024 * int(tokens)
    pod = aot_pod(topology)
    best, *_ = suggestions(config, pod.devices, pod.chip)
    sizes = [f"{axis} {size}" for axis, size in best.mesh.items() if size > 1]
    assert best.fits and sorted(sizes) == sorted(mesh.split(", "))


def test_selected_tests_are_there():
    chosen = [c.words for c in INLINE if c.words[0] == "pytest"]
    assert chosen
    for words in chosen:
        file = next(word for word in words if word.startswith("tests/"))
        text = (ROOT / file).read_text()
        if "-k" in words:
            assert re.search(rf"def test_\w*{words[words.index('-k') + 1]}", text), (
                words
            )


@pytest.fixture
def installed(monkeypatch):
    """Installed, the folder kernels/ is the package annulus."""
    monkeypatch.setitem(sys.modules, "annulus", kernels)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=str)
def test_python_blocks_run(page, installed):
    for block in page.blocks("python"):
        names = {"__name__": "__main__"}
        exec(block, names)
        assert len(names) > 2  # and the builtins


def test_the_program_of_the_readme_gives_attention_of_documents(installed):
    (program,) = README.blocks("python")
    names = {}
    exec(program, names)
    order = names["layout"], names["ring"]
    q, k, v = (kernels.unpermute(names[name], *order) for name in "qkv")
    mask = kernels.documents(names["ids"])
    one = kernels.attention(q, k, v, visible=mask, implementation="reference")
    np.testing.assert_allclose(names["out"], one, rtol=1e-5, atol=1e-6)
