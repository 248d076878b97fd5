"""Every config file: complete, locked, a model that fits its mesh, kept by its run.

Errors call the fields of a config by their names there.
"""

import dataclasses
import importlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_collections
import numpy as np
import pytest

from configs import (
    agents,
    base,
    exorl_tiny,
    fine_tune,
    icrl,
    models,
    tiny,
)
from data.text.tokens.token_file import TokenFileWriter
from kernels.layouts import check_length
from models.lora import Lora
from models.memory import REMAT_POLICIES, Execution
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tasks import run_config, systems, task, text
from tasks.command_line import read_config
from tasks.config_errors import OTHER_NAMES, fields_by_name, in_words_of
from tasks.exorl import AgentRun
from tasks.state import optimizer_settings
from tasks.task import rate_change
from tasks.text import TextRun
from tests.cases import pairs
from tests.small.runs import small_config
from tests.support import buckets
from training.sharding.mesh import MESH_AXES, MeshShape, Partition
from training.update.guard import GuardSettings
from training.update.optimizer import OptimizerSettings, Storage

STEMS = sorted(path.stem for path in Path(base.__file__).parent.glob("*.py"))
MODULES = {stem: importlib.import_module(f"configs.{stem}") for stem in STEMS}
NAMES = [stem for stem, module in MODULES.items() if hasattr(module, "get_config")]
each_config = pytest.mark.parametrize("name", NAMES)


def load(name: str) -> ml_collections.ConfigDict:
    return MODULES[name].get_config()


AGENTS = [name for name in NAMES if load(name).task == "exorl"]
each_text = pytest.mark.parametrize("name", [n for n in NAMES if n not in AGENTS])


def typed(config) -> dict:
    return {name: (type(v), v) for name, v in fields_by_name(config).items()}


def partition_of(config: ml_collections.ConfigDict) -> Partition:
    """The mesh that the config asks for, of devices that need not be there."""
    sizes = [max(config.mesh[axis], 1) for axis in MESH_AXES]
    shape = MeshShape(**config.mesh).fill(math.prod(sizes))
    return Partition(shape.abstract_mesh())


@each_config
def test_a_config_is_complete_and_comes_back_and_no_device_holds_it_all(name, tmp_path):
    """It has the fields of base, with its types, and no others."""
    config, full = load(name), agents if name in AGENTS else base
    kinds = (
        {k: kind for k, (kind, _) in typed(c).items()}
        for c in (config, full.get_config())
    )
    assert next(kinds) == next(kinds)
    assert config.is_locked and config.model.is_locked and config.train.is_locked
    partition = partition_of(config)
    axes = partition.mesh_axes("embed", config.model.hidden_size)
    assert partition.shards(axes) == partition.shards("embed")
    config.workdir = str(tmp_path)
    config.optimizer.clip_norm = math.inf
    run_config.write(config)
    assert typed(run_config.read(str(tmp_path))) == typed(config)


def with_sizes(config: ml_collections.ConfigDict) -> None:
    """Says what would be read from trajectories."""
    if not config.agent.observation_size:
        config.agent.update(observation_size=3, action_size=2)


@pytest.mark.parametrize("name", AGENTS)
def test_agents_config_makes_a_model_a_batch_and_an_optimizer(name):
    config = load(name)
    with_sizes(config)
    run, agent = AgentRun(config, partition_of(config)), config.agent
    model, (rows, steps) = run.model, run.shape
    assert run.batch_like.observations.shape == (rows, steps, agent.observation_size)
    assert steps >= agent.chain_length * agent.episode_steps
    of_a_number = agent.action_bins if agent.action_kind == "binned" else 1
    assert model.shapes["action_head"].shape[1] == agent.action_size * of_a_number
    assert optimizer_settings(config).total_steps == config.train.steps
    text = MODULES[name].__doc__
    if "parameters:" in text:
        size = sum(leaf.size for leaf in jax.tree.leaves(model.shapes))
        assert f"{size / 1e6:.0f}M parameters: {agent.chain_length} or" in text
        assert f"{config.data.context_tokens:,} tokens" in text


@pytest.mark.parametrize(
    ("stem", "names", "episodes"),
    [
        ("exorl_tiny", exorl_tiny._NAMES, {"at": 4}),
        ("icrl", icrl._NAMES[:4], {"dpt": 8, "at": 8}),
        ("icrl", icrl._NAMES[4:9], {"dpt": 6, "ad": 6, "at": 6}),
        ("icrl", icrl._NAMES[9:], {"dpt": 20, "ad": 20, "at": 20}),
    ],
)
def test_every_small_agent_is_a_config(stem, names, episodes):
    for name in names:
        config = MODULES[stem].get_config(name)
        with_sizes(config)
        model = AgentRun(config, partition_of(config)).model
        assert model.config.chain_length == episodes.get(name.split("/")[-1], 1)
        assert config.workdir == f"runs/{stem}/{name}"
    with pytest.raises(ValueError, match="'hopper/at' is not one of "):
        MODULES[stem].get_config("hopper/at")


@each_text
def test_config_makes_a_model_a_batch_and_an_optimizer_without_devices(name):
    config = load(name)
    partition = partition_of(config)
    run = TextRun(config, partition)
    model = run.model
    vocab_size = config.model.vocab_size or 264  # of the default corpus, bytes
    assert model.config == LanguageModelConfig(
        **{**config.model, "vocab_size": vocab_size},
        rope_scaling=RopeScaling(**config.rope_scaling),
        lora=Lora(config.lora.rank, config.lora.alpha if config.lora.rank else 16.0),
    )
    shapes = model.shapes | model.frozen_shapes
    assert shapes["embedding"].shape == (vocab_size, config.model.hidden_size)
    assert optimizer_settings(config).total_steps == config.train.steps
    assert config.remat in (*REMAT_POLICIES, "auto")
    ring_size = partition.ring_size
    assert run.system.sharded or ring_size == 1
    check_length(run.system.layout, ring_size, config.data.context_tokens)
    devices = partition.shards("batch") * ring_size
    shards = run.sharding.shard_shape(run.shape)
    assert math.prod(shards) == math.prod(run.shape) // devices


def test_the_cards_config_is_that_of_the_7b_model():
    card, same = load("tpuv4_7b"), models.get_config("7b/v4")
    assert card.workdir == "runs/tpuv4_7b"
    assert card.to_dict() | {"workdir": same.workdir} == same.to_dict()
    with pytest.raises(ValueError, match="'8b/v4' is not one of 1b/v4, 3b/v4, 7b/v4"):
        models.get_config("8b/v4")


@pytest.mark.parametrize("name", models._NAMES)
def test_a_model_has_the_mesh_and_the_context_of_the_docstring(name):
    config = models.get_config(name)
    listed = name.replace("qwen3_8b", "llama3_8b")
    hardware = r"(\d+) (?:chips|devices|GPUs)"
    row = rf"\n  {listed} +{hardware}, +(\d+) (Ki|Mi) tokens of context, (.*)\n"
    devices, number, unit, mesh = re.search(row, models.__doc__).groups()
    assert int(devices) == math.prod(config.mesh.values())
    factor = {"Ki": 1024, "Mi": 1024**2}[unit]
    assert config.data.context_tokens == int(number) * factor
    found = (f"{axis} {config.mesh[axis]}" for axis in MESH_AXES)
    sizes = (size for size in found if not size.endswith(" 1"))
    assert mesh == (" x ".join(sizes) or "ring 1")
    assert bool(config.lora.rank) == ("lora_" in name)
    config.init_from = "runs/weights" if config.lora.rank else ""
    task.check(config, int(devices))


def test_weights_are_fine_tuned_in_their_own_sizes(tmp_path):
    source = models.get_config("gemma3_12b/v5p")
    source.workdir = str(tmp_path / "gemma")
    (tmp_path / "gemma").mkdir()
    run_config.write(source)
    config = fine_tune.get_config(source.workdir)
    assert (config.model, config.rope_scaling) == (source.model, source.rope_scaling)
    assert config.init_from == source.workdir and config.lora.rank == 16
    assert config.workdir == "runs/fine_tune/gemma"
    task.check(config, 1)
    assert config.optimizer.end_lr == 2e-5
    config.optimizer.peak_lr = 1e-5  # of all parameters, and a tenth at the end
    assert config.optimizer.end_lr == pytest.approx(1e-6)
    task.check(config, 1)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')  # a published model's
    for wrong in "nowhere", str(tmp_path):
        with pytest.raises(ValueError, match=f"{wrong} holds no imported weights: imp"):
            fine_tune.get_config(wrong)


FIELDS = list(fields_by_name(base.get_config()))


def test_what_is_made_of_a_config_has_no_name_that_the_config_lacks():
    known = [name.split(".")[-1] for name in FIELDS]
    assert len(known) == len(set(known)) > 70
    made = OptimizerSettings, Storage, GuardSettings, RopeScaling, Execution
    fields = {field.name for kind in made for field in dataclasses.fields(kind)}
    fields = fields - {"storage"} | {*MESH_AXES}
    assert fields <= {*known, *OTHER_NAMES}
    assert {name.removeprefix("config.") for name in OTHER_NAMES.values()} <= {*FIELDS}


@pytest.mark.parametrize("text, expected", pairs("runs.txt", "words"))
def test_a_field_is_called_as_in_the_config(text, expected):
    assert in_words_of(agents.get_config(), text) == expected


def test_the_vocabulary_is_the_corpus_rounded_up_unless_the_config_sets_one(tmp_path):
    corpus = tmp_path / "corpus"
    fields = {"name": "wide", "path": None, "vocab_size": 290, "end_of_document": 0}
    with TokenFileWriter(corpus, SimpleNamespace(**fields)) as writer:
        for split in "train", "validation":
            writer.write(split, np.arange(290))

    def config(size: int = 0, place: object = corpus) -> ml_collections.ConfigDict:
        return small_config(place, "runs/x", model__vocab_size=size)

    given = (config(), 296), (config(291), 291), (config(0, ""), 264)  # of bytes
    assert all(text.sizes(c).vocab_size == size for c, size in given)
    # What runs record, so that a run goes on with either way to say it.
    own, same = (task.run_settings(config(size), print) for size in (0, 296))
    assert own == same and own["model.vocab_size"] == 296
    with pytest.raises(FileNotFoundError, match=r"no corpus .*or set config.model.voc"):
        text.sizes(config(place=tmp_path / "nowhere"))
    meta = json.loads((corpus / "meta.json").read_text())
    (corpus / "meta.json").write_text(json.dumps(meta | {"vocab_size": 0}))
    with pytest.raises(ValueError, match=r"vocab_size=0 must be .*prepare the corpus"):
        text.sizes(config())


def test_flags_are_on_top_and_the_workdir_is_where_the_file_is(tmp_path):
    config = models.get_config("olmo3_7b/h200")
    config.workdir, config.hosts.index = str(tmp_path / "run"), 3
    (tmp_path / "run").mkdir()
    run_config.write(config, {"model.vocab_size": 264, "not.a.field": 1})
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    read = read_config(["--workdir", str(moved), "--config.mesh.ring=2"])
    assert read.is_locked and read.may_change == config.may_change != ()
    # Every process has its own index, and says it.
    assert (read.workdir, read.hosts.index) == (str(moved), -1)
    assert (read.mesh.ring, read.model.vocab_size) == (2, 264)
    assert [path.name for path in moved.iterdir()] == ["config.json"]
    # Another run and other data are allowed to one start alone; what another model is
    # allowed stays, as each start compares it with its base.
    read.may_change = "seed", "data.context_tokens", "data", "run", "rope_theta"
    run_config.write(read)
    assert run_config.read(str(moved)).may_change == ("rope_theta",)
    assert (moved / "config.json").read_text().startswith('{\n  "attention": ')


def test_fields_of_agents_are_those_of_agents(tmp_path):
    kept = {"data": {"predict": "targets", "threads": 2}, "task": "exorl"}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    config = run_config.read(str(tmp_path))
    assert (config.data.predict, config.data.threads) == ("targets", 2)
    (tmp_path / "config.json").write_text(json.dumps(kept | {"task": "text"}))
    with pytest.raises(ValueError, match="does not know: data.predict"):
        run_config.read(str(tmp_path))


@pytest.mark.parametrize("content, said", pairs("runs.txt", "wrong"))
def test_a_wrong_file_is_refused_in_one_line(content, said, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError) as caught:
        read_config(["--workdir", str(tmp_path)])
    (line,) = str(caught.value).splitlines()
    assert str(tmp_path / "config.json") in line and said in line


def test_a_workdir_without_it_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no workdir .*nowhere$"):
        read_config([f"--workdir={tmp_path}/nowhere"])
    with pytest.raises(FileNotFoundError) as caught:
        read_config([f"--workdir={tmp_path}"])
    assert "has no config.json: no run has begun in it; give " in str(caught.value)
    assert f"--config.workdir={tmp_path} instead" in str(caught.value)
    with pytest.raises(ValueError, match=r"--config=a and --workdir=b .* give one of"):
        read_config(["--config=a", "--workdir=b"])


def test_a_bucket_has_it_too():
    config = models.get_config()
    config.workdir = "gs://bucket/run"
    with buckets.in_memory() as store:
        for _ in range(2):
            run_config.write(config)
        assert typed(read_config(["--workdir=gs://bucket/run"])) == typed(config)
        assert [*store] == ["/bucket/run/config.json"]


@pytest.mark.parametrize("given", ["", "CLIENT_MEM", "PYTHON_CLIENT_MEM"])
def test_runs_take_the_memory_that_plans_count_on(given, monkeypatch):
    environment = {f"XLA_{given}_FRACTION": "0.5"} if given else {}
    wanted = dict(environment) or {"XLA_CLIENT_MEM_FRACTION": "0.95"}
    monkeypatch.setattr(systems.os, "environ", environment)
    systems.prepare_devices(base.get_config())
    assert environment == wanted


# Saved settings and the step that they had made, of 30 + 270 in tiny => what is said.
@pytest.mark.parametrize(
    ("saved", "step", "said"),
    [
        ({}, 200, ""),
        ({"train.steps": 300, "optimizer.peak_lr": 3e-3}, 200, ""),
        ({"train.steps": 300}, 300, ""),
        ({"train.steps": 200}, 100, "2.0e-03 -> 2.6e-03"),
        ({"optimizer.end_lr": 3e-3}, 300, "3.0e-03 -> 3.0e-04"),
        (
            {"train.steps": 200},
            250,
            "3.0e-04 -> 5.2e-04; to keep it, set "
            "config.train.steps=200 and config.train.extra_steps=50",
        ),
    ],
)
def test_another_learning_rate_is_said_with_what_keeps_it(saved, step, said):
    line = rate_change(tiny.get_config(), saved, step)
    assert line == (said and f"changed since step {step}: learning rate: {said}")
