"""README and docs/ say what is there, and their commands are understood.

A slow test runs these in their order, as somebody who just cloned the tree: in a copy
of it, with small sizes added to the end of each.
"""

import ast
import glob
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import kernels
from configs import agents, base
from docs import config_page
from tasks import run_config
from tasks.command_line import read_config
from tasks.config_errors import fields_by_name
from tests.cases import pairs, table
from tests.data.test_tokenizer import make_hugging_face, make_sentence_piece
from tests.small.chats import FAMILIES
from tests.support import pages
from tests.support.pages import (
    COMMANDS,
    INLINE,
    LIVING,
    LOG,
    PAGES,
    README,
    ROOT,
    Command,
)
from tests.support.tables import as_lines
from tests.tools import hf_models
from tools.lib.compiled.pods import aot_pod
from tools.lib.planning.meshes import suggestions

CODE = [code for page in LIVING for code in page.inline_code()]
NAMES = {p.name for f in pages.FOLDERS.split("|") for p in (ROOT / f).rglob("*.*")}
NAMES |= {path.name for path in ROOT.glob("*.*")}
WITH_PROGRAMS = [page for page in LIVING if page.blocks("python") and page != README]

CONFIG = "--config", "--workdir="


def test_every_option_in_the_text_is_one_of_some_program():
    known = {"--config", "--workdir", "--logdir", "--help"}
    for path in (ROOT / "tools").rglob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    named = {word for code in CODE for word in re.findall(r"(?:^| )(--[a-z-]+)", code)}
    assert {"--suggest", "--piece"} <= named
    assert named - known == set()


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the reader of the commands is."""
    monkeypatch.chdir(ROOT)


def test_pages_are_short_and_the_readme_leads_to_every_one():
    lines = README.text.splitlines()
    assert len(lines) <= 170
    assert [page for page in LIVING if page.lines_to_read() > 200] == []
    assert any("Nothing has run on a TPU" in line for line in lines[:12])
    linked = {file for page in PAGES for file, _ in page.links()}
    assert {page.path for page in PAGES} - {README.path} <= linked
    menu = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {str(page) for page in LIVING} <= set(menu)


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


def test_versions_that_are_named_are_tags():
    sources = [path.read_text() for path in (ROOT / "kernels").rglob("*.py")]
    texts = [page.text for page in (*PAGES, LOG)] + sources
    named = {tag for text in texts for tag in re.findall(r"\bv\d\.\d+-[a-z]+", text)}
    command = ["git", "-C", ROOT, "tag"]
    tags = subprocess.run(command, capture_output=True, text=True).stdout.split()
    assert named <= set(tags)


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
    "command",
    [c for c in COMMANDS if c.program.startswith(("tools.", "train.py"))],
    ids=str,
)
def test_programs_take_the_arguments_of_their_commands(command):
    rest = command.arguments
    if command.program != "train.py":
        # With what a program reads of a config, where it takes one.
        parser, given = pages.parser_of(command.program, rest)
        _, rest = parser.parse_known_args(given)
    assert all(word.startswith(CONFIG) for word in rest)
    if rest or command.program == "train.py":
        # The workdir is not there: a config takes its place.
        config = "--config=configs/base.py"
        flags = [config if w.startswith("--workdir=") else w for w in rest]
        assert read_config(flags).is_locked


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


def test_pages_made_from_the_source_are_up_to_date():
    source, made = (ROOT / "configs/base.py").read_text(), config_page.PAGE.read_text()
    assert config_page.page(source) == made, "make docs"
    named = re.findall(r"^\| `([\w.]+)` ", made, re.MULTILINE)
    assert sorted(named) == sorted(fields_by_name(base.get_config()))
    for line, said in ("    seed=0,", "give a comment to seed"), ("    x", "neither"):
        with pytest.raises(ValueError, match=said):
            config_page.page(f"FIELDS = dict(\n{line}\n)\n")
    api = (ROOT / "docs/api.md").read_text()
    named = re.findall(r"^::: annulus\.(?:\w+\.)?(\w+)$", api, re.MULTILINE)
    assert sorted(named) == sorted(kernels.__all__)


def printed(path: Path) -> Iterator[str]:
    """Yields the strings of a source file, "…" in the place of each value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", "") for part in node.values)
            yield "".join(p if isinstance(p, str) else "…" for p in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_of_the_page_are_those_of_the_source():
    text = (ROOT / "docs/when_it_goes_wrong.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    folders = "data", "kernels/devices", "tasks", "tools/lib/compiled", "training"
    files = [file for name in folders for file in (ROOT / name).rglob("*.py")]
    said = "\n".join(text for file in files for text in printed(file))
    assert len(quoted) > 20 and [m for m in quoted if m not in said] == []


@pytest.mark.parametrize("name, devices", table("commands.txt", "launch"))
def test_launch_files_ask_for_a_mesh_of_their_devices(name, devices):
    text = (ROOT / "tools/launch" / name).read_text()
    text = text.replace("$(JOB_COMPLETION_INDEX)", "0")
    fields = re.findall(r"--config\.[\w.]+=\w[^\s\\]*", text)
    config = read_config(
        [f"--config={re.search(r'configs/[^ \n]+', text)[0]}", *fields]
    )
    assert math.prod(config.mesh.values()) == devices
    assert config.data.batch_rows == config.mesh.data * config.mesh.fsdp


(MESHES,) = (page for page in PAGES if str(page) == "docs/meshes.md")
MESH_ROW = re.compile(r"^\| (v\S+) \| (\d+) x (\d+) Ki \| (.*) \|$", re.MULTILINE)

MESH_ROWS = MESH_ROW.findall(MESHES.text)
SLOW_ROWS = [pytest.param(*row, marks=pytest.mark.slow) for row in MESH_ROWS[:-1]]


@pytest.mark.thorough
@pytest.mark.parametrize("topology, rows, tokens, mesh", [*SLOW_ROWS, MESH_ROWS[-1]])
def test_meshes_of_the_table_are_those_suggested(topology, rows, tokens, mesh):
    config = read_config(["--config=configs/tpuv4_7b.py"])
    config.data.batch_rows, config.data.context_tokens = int(rows), 1024 * int(tokens)
    pod = aot_pod(topology)
    best, *_ = suggestions(config, len(pod.devices), pod.chip)
    sizes = [f"{axis} {size}" for axis, size in best.mesh.items() if size > 1]
    assert best.fits and sorted(sizes) == sorted(mesh.split(", "))


@pytest.mark.parametrize("claim, held_by", pairs("claims.txt"))
def test_claims_of_the_pages_are_held_by_tests(claim, held_by):
    page, words = claim.split(" ", 1)
    assert words in " ".join((ROOT / page).read_text().split())
    file, test = held_by.split("::")
    assert f"def {test}(" in (ROOT / "tests" / file).read_text()


@pytest.fixture
def installed(monkeypatch):
    """Installed, the folder kernels/ is the package annulus."""
    monkeypatch.setitem(sys.modules, "annulus", kernels)


NEEDS = re.compile(r"^# pip install (.*)$", re.MULTILINE)
IN_OTHERS = [b for p in WITH_PROGRAMS for b in p.blocks("python") if NEEDS.match(b)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", IN_OTHERS, ids=lambda block: block.split("\n")[0])
def test_programs_in_other_frameworks_run_where_these_are_installed(block, tmp_path):
    """In an empty environment, by the lines that the program begins with."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "new"], check=True)
    pip = tmp_path / "new/bin/python", "-m", "pip", "install", "-q"
    source = tmp_path / "source"  # building leaves files there
    shutil.copytree(ROOT / "kernels", source / "kernels")
    for name in "pyproject.toml", "README.md":
        shutil.copy(ROOT / name, source)
    for wanted in [str(source), *NEEDS.findall(block)]:
        subprocess.run([*pip, *wanted.split()], check=True)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    program = tmp_path / "new/bin/python", "-I", "-c", block
    subprocess.run(program, check=True, cwd=tmp_path, env=environment)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=str)
def test_python_blocks_run(page, installed):
    for block in page.blocks("python"):
        if NEEDS.match(block):
            continue  # tested above
        names = {"__name__": "__main__"}
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            exec(block, names)
        assert len(names) > 2  # and the builtins


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_the_program_of_the_readme_gives_attention_of_documents(installed, kind):
    (program,) = README.blocks("python")
    axes = f'("ring",), axis_types=(jax.sharding.AxisType.{kind},))'
    assert program.count('("ring",))') == 1
    program = program.replace('("ring",))', axes)
    names = {}
    exec(program, names)
    order = names["layout"], names["ring"]
    q, k, v = (kernels.unpermute(names[name], *order) for name in "qkv")
    mask = kernels.documents(names["ids"])
    one = kernels.attention(q, k, v, visible=mask, implementation="reference")
    np.testing.assert_allclose(names["out"], one, rtol=1e-5, atol=1e-6)


STEPS = "--config.train.steps=2 --config.checkpoint.save_every_steps=2"
STEPS += " --config.train.validation_batches=1 --config.optimizer.warmup_steps=1"
NOT_RUN = dict(pairs("commands.txt", "not_run"))
MORE = dict(pairs("commands.txt", "more"))
IMPORT = "python -m tools.convert_hf import Llama-2"
EXPORT = "python -m tools.convert_hf export runs/tiny Llama-2-7b-hf".split()


def found(command: Command, keys: Iterable[str]) -> str | None:
    """Returns the one of the keys that the command begins with, if any."""
    begun = [key for key in keys if str(command).startswith(key)]
    assert len(begun) < 2, begun
    return begun[0] if begun else None


@pytest.fixture
def clone(tmp_path):
    """A copy of the tree with a book, chats and tokenizers, as the text names them."""
    left_out = ".*", "__pycache__", "corpora", "datasets", "runs", "trajectories"
    kept = shutil.ignore_patterns(*left_out)
    root = shutil.copytree(ROOT, tmp_path / "annulus", ignore=kept)
    (root / ".venv").symlink_to(sys.prefix)
    (root / "BOOKS").mkdir()
    for number in range(8):
        book = f"Book {number}: the cat sat on the mat. " * (number + 100)
        (root / f"BOOKS/{number}.txt").write_text(book)
    with pa.output_stream(root / "TEXTS.jsonl.zst", compression="zstd") as texts:
        texts.write(as_lines([{"text": "Two cats sat there. " * 100}]))
    (root / "DATASET").mkdir()
    pages = [{"content": f"Page {n}. " * (n + 400)} for n in range(8)]
    (root / "DATASET/pages.jsonl").write_bytes(as_lines(pages))
    lines = [{"text": f"A line, {number}."} for number in range(8)]
    (root / "CHATS.jsonl").write_bytes(as_lines(lines))
    says = ("human", "Where sat the cat?"), ("gpt", "On the mat.")
    turns = [{"from": who, "value": what} for who, what in says]
    chats = [{"id": n, "conversations": turns} for n in range(40)]
    (root / "sharegpt.json").write_text(json.dumps(chats))
    mat = {"role": "assistant", "content": "Mat."}
    asked = [{"role": "user", "content": f"{n}? " * 40} for n in range(40)]
    (root / "MY_CHATS.jsonl").write_bytes(
        as_lines([{"messages": [a, mat]} for a in asked])
    )
    write_llama(root / "Llama-3.1-8B")
    make_hugging_face(root / "tokenizer.json")
    make_sentence_piece(root / "tokenizer.model")
    return root


def write_llama(directory: Path) -> None:
    """A small LLaMA as published, and LLaMA 3's tokenizer with its vocabulary."""
    shutil.copytree(hf_models.DIRECTORY / "llama", directory)
    FAMILIES["llama3"].save(directory, ["The cat sat on the mat."])
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    rows = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    fields = hf_models.fields("llama") | {"vocab_size": rows}
    (directory / "config.json").write_text(json.dumps(fields))
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name in "model.embed_tokens.weight", "lm_head.weight":
        tensors[name] = np.resize(tensors[name], (rows, fields["hidden_size"]))
    save_file(tensors, file)


def run(root: Path, *words: str) -> None:
    """Runs a command, which has to succeed; in words with a star there are paths."""
    path = f"{root / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    paths = (sorted(glob.glob(word, root_dir=root)) or [word] for word in words)
    done = subprocess.run(
        [*itertools.chain(*paths)],
        cwd=root,
        env=os.environ | {"PATH": path, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}{done.stderr}"


def test_every_exception_is_a_command_of_the_text():
    for keys in (NOT_RUN.keys(), MORE.keys()):
        assert {found(command, keys) for command in COMMANDS} - {None} == keys


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_commands_succeed_one_after_the_other(clone):
    for command in COMMANDS:
        if found(command, NOT_RUN):
            continue
        if str(command).startswith(IMPORT):
            # The model that was trained just now, in the place of the published one.
            run(clone, *EXPORT)
        more = MORE.get(found(command, MORE), "").replace("{STEPS}", STEPS)
        run(clone, *command.words, *shlex.split(more))
