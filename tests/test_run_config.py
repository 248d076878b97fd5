"""A run's config beside its checkpoints: read as it was written, or refused."""

import json
import math

import pytest

from configs import base, grow_context
from tasks import run_config, systems
from tasks.command_line import read_config
from tasks.config_errors import fields_by_name
from tests import buckets, test_configs


def typed(config) -> dict:
    return {name: (type(v), v) for name, v in fields_by_name(config).items()}


@test_configs.each_config
def test_every_config_comes_back_with_its_types(name, tmp_path):
    config = test_configs.load(name)
    config.workdir = str(tmp_path)
    config.optimizer.clip_norm = math.inf
    run_config.write(config)
    assert typed(run_config.read(str(tmp_path))) == typed(config)


def test_flags_are_on_top_and_the_workdir_is_where_the_file_is(tmp_path):
    config = grow_context.get_config("32768")
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
    """Older programs wrote them into the configs of text too."""
    old = {"agent": {"chain_length": 2}, "data": {"predict": "targets", "threads": 2}}
    for task in ("text", "exorl"):
        (tmp_path / "config.json").write_text(json.dumps(old | {"task": task}))
        found = run_config.read(str(tmp_path))
        assert (found.task, found.data.threads) == (task, 2)
        assert ("agent" in found) == ("predict" in found.data) == (task == "exorl")
    assert (found.agent.chain_length, found.data.predict) == (2, "targets")


# Content of the file: what has to be said.
WRONG = {
    '{"train": {"stps": 7, "steps": 7}, "zeal": 1}': "not know: train.stps, zeal; use",
    '{"train": 7}': "not know: train; use",
    '{"seed": {"x": 7}}': "not know: seed.x; use",
    '{"workdir": "x"}': "not know: workdir; use",
    '{"seed": 1.5}': "config.json: seed=1.5 must be of type int",
    '{"seed": true}': "config.json: seed=True must be of type int",
    '{"may_change": "seed"}': "config.json: may_change='seed' must be of type list",
    '{"guard": {"replay": 0}}': "guard.replay=0 must be of type bool",
    '{"seed": null}': "seed=None must be of type int",
    "[]": "must hold a JSON object, got []",
    "": "config.json is not JSON",
    '{"seed": 1, "seed": 2}': "'seed' stands twice",
}


@pytest.mark.parametrize("content", WRONG)
def test_a_wrong_file_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError) as caught:
        read_config(["--workdir", str(tmp_path)])
    (line,) = str(caught.value).splitlines()
    assert str(tmp_path / "config.json") in line and WRONG[content] in line


def test_a_workdir_without_it_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no workdir .*nowhere$"):
        read_config([f"--workdir={tmp_path}/nowhere"])
    with pytest.raises(FileNotFoundError) as caught:
        read_config([f"--workdir={tmp_path}"])
    assert "has no config.json: it is of an older program" in str(caught.value)
    assert f"--config.workdir={tmp_path} instead" in str(caught.value)
    with pytest.raises(ValueError, match=r"--config=a and --workdir=b .* give one of"):
        read_config(["--config=a", "--workdir=b"])


def test_a_bucket_has_it_too():
    config = grow_context.get_config("4096")
    config.workdir = "gs://bucket/run"
    with buckets.in_memory() as store:
        for _ in range(2):
            run_config.write(config)
        assert typed(read_config(["--workdir=gs://bucket/run"])) == typed(config)
        assert [*store] == ["/bucket/run/config.json"]


@pytest.mark.parametrize(
    "given", ["", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"]
)
def test_runs_take_what_plans_count_on_of_a_gpu_or_what_the_user_says(
    given, monkeypatch
):
    environment = {given: "0.5"} if given else {}
    monkeypatch.setattr(systems.os, "environ", environment)
    systems.prepare_devices(base.get_config())
    wanted = {given: "0.5"} if given else {"XLA_CLIENT_MEM_FRACTION": "0.95"}
    assert environment == wanted
