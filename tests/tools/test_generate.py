"""The program from a checkpoint to text, its console, and what it refuses."""

import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import nnx

from data.tokenizer import ByteTokenizer
from kernels import masks
from kernels.layouts import Contiguous
from kernels.ring import make_ring_attention
from models.decode import Generator
from tasks import base, text
from tasks.generation import restored_parameters
from tests.data.test_tokenizer import make_hugging_face
from tests.runs import small_config, small_flags
from tools.generate import ROOT, Writer, main
from training.checkpoint import Checkpoints
from training.mesh import MeshShape, Partition, make_mesh
from training.optimizer import make_optimizer
from training.step import initial_state

# ml_collections reads config files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

PROMPT, NEW, STEP = "a ring of Möwen", 12, 7


def save(config: ml_collections.ConfigDict) -> Any:
    """A checkpoint of random parameters, large enough to matter; returns these."""
    partition = base.partition(config, jax.devices())
    model = text.model(config, partition)
    optimizer, _ = make_optimizer(base.optimizer_settings(config))
    rng = np.random.default_rng(2)

    def draw(path: tuple, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        offset = 1.0 if "scale" in str(path[-1]) else 0.0
        return (offset + 0.2 * rng.standard_normal(shape.shape)).astype(np.float32)

    parameters = jax.tree_util.tree_map_with_path(draw, model.shapes)
    with Checkpoints(
        f"{config.workdir}/checkpoints",
        keep=1,
        fingerprint=text.fingerprint(model),
    ) as checkpoints:
        checkpoints.save(STEP, initial_state(parameters, optimizer))
    return parameters


@pytest.fixture(scope="module")
def workdir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint; tests must not change it."""
    directory = tmp_path_factory.mktemp("run")
    save(small_config(corpus, directory))
    return directory


@pytest.fixture(scope="module")
def expected(corpus: Path, workdir: Path) -> str:
    """The likeliest text after the prompt: the whole forward for each token."""
    config = small_config(corpus, workdir, attention="vanilla")
    partition = Partition(make_mesh(MeshShape(), jax.devices()[:1]))
    parameters, _ = restored_parameters(config, partition)
    structure = text.model(config, partition).structure
    ring = make_ring_attention(
        partition.mesh, layout=Contiguous(), implementation="reference"
    )

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        llama = nnx.merge(structure, parameters)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden = llama(tokens, positions, lambda q, k, v: ring(q, k, v, masks.causal()))
        return hidden @ llama.head[...]

    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode(PROMPT)
    tokens = np.zeros((1, 80), np.int32)
    tokens[0, : len(prompt)] = prompt
    for place in range(len(prompt), len(prompt) + NEW):
        scores = np.asarray(logits(tokens))[0, place - 1]
        tokens[0, place] = scores[: tokenizer.vocab_size].argmax()
    new = tokens[0, len(prompt) : len(prompt) + NEW]
    assert tokenizer.end_of_document not in new
    return tokenizer.decode(new)


def arguments(corpus: Path, workdir: Path, *options: str, **overrides: Any) -> list:
    overrides = {"simulated_devices": 0, "implementation": "reference"} | overrides
    return [*small_flags(corpus, workdir, **overrides), *options]


GREEDY = "--temperature", "0", "--max-tokens", str(NEW)


def test_printed_text_is_the_likeliest_of_the_checkpoints_model(
    corpus, workdir, expected, capsys
):
    """On fsdp 2 x ring 4."""
    assert main(arguments(corpus, workdir, *GREEDY, "--prompt", PROMPT)) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected}\n"
    assert f"step {STEP} of {workdir}" in err and f"{NEW} tokens in" in err


def files(directory: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_console_answers_every_line_on_another_mesh_and_changes_no_file(
    corpus, workdir, expected, capsys, monkeypatch
):
    lines = f"{PROMPT}\n\n{'x' * 100}\n{PROMPT}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    before = files(workdir)
    mesh = {"mesh__fsdp": 1, "mesh__ring": 4, "mesh__tensor": 2}
    mesh |= {"model__vocab_size": 264}
    # Tokenizer and vocabulary are named, so that no corpus is needed.
    flags = arguments(Path("nowhere"), workdir, *GREEDY, "--tokenizer", "bytes", **mesh)
    assert main(flags) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected}\n{expected}\n"
    assert err.count("error: ") == 1 and "prompt of 100 tokens" in err
    assert files(workdir) == before


def test_a_prompt_is_read_from_its_file(corpus, workdir, expected, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    flags = arguments(corpus, workdir, *GREEDY, "--prompt-file", str(path))
    assert main(flags) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_matrices_are_restored_in_the_compute_type(corpus, workdir):
    config = small_config(corpus, workdir, compute_dtype="bfloat16")
    partition = base.partition(config, jax.devices())
    parameters, step = restored_parameters(config, partition)
    assert step == STEP
    layers = parameters["layers"]
    assert parameters["head"].dtype == jnp.bfloat16
    assert layers["attention"]["query"].dtype == jnp.bfloat16
    assert layers["attention_norm"]["scale"].dtype == jnp.float32
    spec = partition.spec((None, "embed", "heads", None), (2, 32, 4, 8))
    assert layers["attention"]["query"].sharding.spec == spec


class Stub:
    """In the place of a generator: tokens that are given, whatever the prompt."""

    slots, rows = 40, 2

    def __init__(self, tokens: Sequence[int]):
        self.tokens, self.asked = tokens, []

    check = Generator.check

    def generate(self, parameters, prompts, max_tokens, seed, stop_tokens):
        self.asked.append((len(prompts), max_tokens, seed, list(stop_tokens)))
        for token in self.tokens[:max_tokens]:
            yield np.array([token, 0])


def test_text_ends_with_the_document():
    stub = Stub([*b"caf\xc3\xa9", 256, *b"no"])
    writer = Writer(stub, ByteTokenizer(), max_tokens=None, seed=5)
    pieces = list(writer.write(None, "x" * 30, number=2))
    assert pieces == ["c", "a", "f", "", "é", ""]
    # A prompt in each row, and of tokens what the cache has room for.
    assert stub.asked == [(2, 11, 7, [256])]


@pytest.fixture
def nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not refused before the model was run")

    monkeypatch.setattr(Generator, "_generate", refuse)
    yield


BAD = {
    "prompt_longer_than_the_cache": (
        ["--prompt", "x" * 81],
        {},
        ["prompt of 81 tokens", "cache of 80 tokens", "make the cache larger"],
    ),
    "too_many_tokens": (
        ["--prompt", "xy", "--max-tokens", "80"],
        {},
        ["max_tokens=80", "at most 79 tokens"],
    ),
    "cache_that_is_too_small": (
        ["--prompt", "x" * 30, "--cache-tokens", "20"],
        {},
        ["prompt of 30 tokens", "cache of 20 tokens"],
    ),
    "empty_prompt": (["--prompt", ""], {}, ["prompt 0 has no tokens"]),
    "no_such_file": (["--prompt-file", "nowhere.txt"], {}, ["nowhere.txt"]),
    "unknown_tokenizer": (
        ["--tokenizer", "gpt2"],
        {},
        ['"gpt2" is not known', "tokenizer.json"],
    ),
    "missing_corpus": (
        [],
        {"data__corpus": "nowhere"},
        ["no corpus nowhere", "prepare_text.py"],
    ),
    "vocabulary_too_small": (
        ["--prompt", "x"],
        {"model__vocab_size": 200},
        ["257 tokens", "vocab_size=200", "--tokenizer"],
    ),
    "no_tokens": (
        ["--max-tokens", "0"],
        {},
        ["--max-tokens: must be", "at least 1, got 0"],
    ),
    "negative_seed": (["--seed", "-1"], {}, ["--seed: must be", "at least 0, got -1"]),
    "negative_temperature": (
        ["--temperature", "-1"],
        {},
        ["--temperature: must be", "got -1"],
    ),
    "top_p_above_one": (["--top-p", "2"], {}, ["top_p=2.0"]),
    "negative_cache": (
        ["--cache-tokens", "-4"],
        {},
        ["--cache-tokens: must be", "got -4"],
    ),
    "mesh_of_other_devices": ([], {"mesh__fsdp": 3}, ["8 devices", "config.mesh"]),
    "unknown_field": (["--config.modle.x=1"], {}, ['no field "modle"']),
    "unknown_option": (["--prompts=x"], {}, ["prompts"]),
    "another_model": (
        ["--prompt", "x"],
        {"model__num_layers": 3},
        [f"step {STEP}", "num_layers: saved 2, this run 3"],
    ),
    "another_rope": (
        ["--prompt", "x"],
        {"rope_scaling__rope_type": "linear", "rope_scaling__factor": 2.0},
        [f"step {STEP}", "rope_type: saved nothing, this run linear"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_short(
    corpus, workdir, name, capsys, nothing_is_computed
):
    options, overrides, words = BAD[name]
    assert main(arguments(corpus, workdir, *options, **overrides)) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ")
    assert all(word in err for word in words), err


def test_a_run_without_a_checkpoint_is_refused_and_left_alone(
    corpus, tmp_path, capsys, nothing_is_computed
):
    flags = arguments(corpus, tmp_path / "run", "--prompt", "x")
    assert main(flags) == 1
    err = capsys.readouterr().err
    assert f"{tmp_path}/run has no checkpoints to read" in err
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_file_is_checked_against_the_model(
    corpus, workdir, tmp_path, capsys, nothing_is_computed
):
    path = make_hugging_face(tmp_path / "tokenizer.json")
    flags = arguments(corpus, workdir, "--prompt", "x", "--tokenizer", str(path))
    assert main(flags) == 1
    assert "tokenizer.json has 299 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_simulates_the_configs_devices(corpus, workdir, expected):
    flags = small_flags(corpus, workdir, implementation="reference")
    result = subprocess.run(
        [sys.executable, "-m", "tools.generate", *flags, *GREEDY, "--prompt", PROMPT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (result.returncode, result.stdout) == (0, f"{expected}\n"), result.stderr
