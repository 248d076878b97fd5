"""What README.md names is there, and its commands are understood by their programs."""

import re

import jax
import numpy as np
import pytest

from configs import base
from kernels.cases import QUICK
from kernels.layouts import Striped, unpermute
from tasks.command_line import read_config
from tests import readme
from tests.readme import ROOT, Command, commands, inline_code, inline_commands
from tests.rings import ring_mesh
from tools.lib.planning.meshes import suggestions
from tools.lib.planning.pods import aot_pod

# Of ml_collections, which reads the files of configs so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

TOOLS = [c for c in commands() if c.script.startswith("tools/")]
TRAINING = [c for c in commands() if c.script == "train.py"]
INLINE = [c for c in inline_commands() if c.script.startswith("tools/")]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the reader of the commands is."""
    monkeypatch.chdir(ROOT)


def test_commands_are_really_read():
    assert len(commands()) > 15 and len(TOOLS) > 8 and len(TRAINING) > 3
    assert str(commands()[0]) == "make train"
    read = Command.of("python -m tools.x --a 'b c' ...   # why")
    assert (read.script, read.arguments) == ("tools/x.py", ["--a", "b c"])


def test_every_path_is_there():
    missing = {path for path in readme.paths() if not any(ROOT.glob(path))}
    assert missing == set()


def test_every_heading_that_is_linked_to_is_there():
    assert {"limits", "which-mesh"} <= readme.headings()
    assert readme.anchors() - readme.headings() == set()


def test_every_make_target_is_one_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    named = {c.words[1] for c in commands() + inline_commands() if c.words[0] == "make"}
    assert {"train", "test", "venv"} <= named
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("command", TOOLS, ids=str)
def test_the_program_of_every_command_takes_its_arguments(command):
    # With what a program reads of a config, where it takes one.
    parser = readme.parser_of(command.script, command.arguments)
    _, rest = parser.parse_known_args(command.arguments)
    assert [word for word in rest if not word.startswith("--config")] == []
    if rest:
        assert read_config(rest).is_locked


@pytest.mark.parametrize("command", INLINE, ids=str)
def test_options_of_programs_in_the_text_are_known(command):
    parser = readme.parser_of(command.script, command.arguments)
    options = {word for word in command.arguments if word.startswith("--")}
    assert options <= set(parser._option_string_actions)


def test_every_option_in_the_text_is_one_of_some_program():
    known = {"--config", "--logdir"}
    for path in (ROOT / "tools").glob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    named = {
        word.split("=")[0]
        for code in inline_code()
        for word in code.split()
        if re.match("--[a-z]", word) and not word.startswith("--config.")
    }
    assert {"--compare", "--relabelling"} <= named
    assert named - known == set()


@pytest.mark.parametrize("command", TRAINING, ids=str)
def test_every_training_command_makes_a_config(command):
    assert command.arguments == [w for w in command.arguments if "--config" in w]
    assert read_config(command.config_flags).is_locked


def test_every_config_field_in_the_text_is_one_of_the_base_config():
    (flags,) = (c for c in commands() if c.words[0].startswith("--"))
    read_config(["--config=configs/base.py", *flags.words])
    named = set()
    for code in [*inline_code(), *map(str, commands())]:
        named |= set(re.findall(r"\bconfig\.([a-z_]+(?:\.[a-z_0-9]+)?)\b", code))
    assert {"workdir", "guard.stop_after", "init_from"} <= named
    known = dict(base.get_config().items())
    for name in named:
        section, _, field = name.partition(".")
        assert section in known, name
        assert not field or field in known[section], name


def mesh_table() -> list[tuple[str, int, int, dict[str, int]]]:
    """Rows of the section on meshes: topology, rows, tokens, and sizes of axes."""
    section = readme.TEXT.split("## Which mesh")[1].split("\n## ")[0]
    found = re.findall(r"^\| (v\S+) \| (\d+) x (\d+) Ki \| (.*) \|$", section, re.M)
    assert len(found) > 4
    return [
        (
            topology,
            int(rows),
            1024 * int(tokens),
            dict(a.split() for a in mesh.split(", ")),
        )
        for topology, rows, tokens, mesh in found
    ]


@pytest.mark.parametrize("topology, rows, tokens, mesh", mesh_table())
def test_meshes_of_the_table_are_those_that_are_suggested(topology, rows, tokens, mesh):
    config = read_config(["--config=configs/tpuv4_7b.py"])
    config.data.batch_rows, config.data.context_tokens = rows, tokens
    pod = aot_pod(topology)
    best, *_ = suggestions(config, len(pod.devices), pod.chip)
    sizes = {axis: str(size) for axis, size in best.mesh.items() if size > 1}
    assert best.fits and sizes == mesh


def test_every_selected_test_is_there():
    chosen = [c for c in inline_commands() if c.words[0] == "pytest"]
    assert len(chosen) > 5
    for command in chosen:
        files = [word for word in command.words if word.startswith("tests/")]
        assert files and all((ROOT / file).is_file() for file in files), command
        if "-k" in command.words:
            word = command.words[command.words.index("-k") + 1]
            names = re.findall(r"def (test_\w+)", (ROOT / files[0]).read_text())
            assert any(word in name for name in names), command


def test_the_example_gives_attention_of_documents(rng):
    (example,) = readme.blocks("python")
    q, k, v = (jax.numpy.float32(rng.standard_normal((1, 16, 2, 8))) for _ in range(3))
    ids = np.sort(rng.integers(0, 4, (1, 16)))
    one, ring = example.split("attend =")
    names = {"ids": ids, "mesh": ring_mesh(2)}

    def run(lines: str, q, k, v):
        scope = names | {"q": q, "k": k, "v": v}
        exec(lines, scope)
        return scope["out"]

    imports = one.split("out =")[0]
    on_one = jax.jit(lambda *qkv: run(one, *qkv), compiler_options=QUICK)(q, k, v)
    ring = f"{imports}attend ={ring}"
    on_ring = jax.jit(lambda *qkv: run(ring, *qkv), compiler_options=QUICK)(q, k, v)
    on_ring = unpermute(on_ring, Striped(), 2)
    np.testing.assert_allclose(on_ring, on_one, rtol=1e-5, atol=1e-6)
