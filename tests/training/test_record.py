"""Refused: settings that must not change, other processes' settings, a locked run."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from data.text.corpus import prepare
from data.text.tokens.tokenizer import ByteTokenizer
from tasks.text import TextRun
from tests.small.runs import small_config
from tests.support.processes import Processes, free_port
from training.saved import workdir
from training.saved.digest import digests
from training.saved.weights import save_parameters
from training.saved.workdir import LOCK, locked, make_writable, replace_text
from training.sharding.feed import global_batch

# Says for each case what the processes agree on, or what they say that differs.
PROGRAM = """
import contextlib, json, os, shutil, sys
from pathlib import Path
import jax
from tasks.task import run_settings
from tests.small.runs import small_config
from tests.training.test_record import first_digests
from training.hosts import processes
from training.saved import record, workdir
from training.saved.weights import SavedParameters

port, index, directory, corpus, cases = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
processes.connect(f"localhost:{port}", 2, int(index))

def say(settle):
    try:
        said = f"agreed, {settle()}"
    except (ValueError, OSError) as error:
        said = str(error)
    print("said", json.dumps(said), flush=True)

print("digests", json.dumps(first_digests(corpus)))
for field, values in json.loads(cases):
    config = small_config(Path(corpus), Path("none"), **{field: values[int(index)]})
    say(lambda: record.agreed(lambda: run_settings(config, print))["seed"])
os.chdir(f"{directory}/host{index}")  # where both have files of the same names
say(lambda: SavedParameters("weights"))
for run in "run", "../shared":
    with workdir.locked(run) if index == "0" else contextlib.nullcontext():
        say(lambda: workdir.check_shared(run))
os.environ["XLA_FLAGS"] = f"--xla_dump_to=/host{index}"
say(lambda: record.agreed(dict))
os.environ["XLA_FLAGS"] += f" --xla_flag={index}"
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_tpu={index}"
jax.config.update("jax_enable_x64", index == "0")
record.jaxlib.__version__ = f"0.{index}"
shutil.copytree(Path(record.__file__).parents[1], "sources/training")
Path(f"sources/train.py").write_text(index)
record.__file__ = f"{os.getcwd()}/sources/training/saved/record.py"
say(lambda: record.agreed(dict))
"""


def first_digests(corpus: Any) -> tuple[list, int]:
    """The digests of four batches, and how many blocks this process reads of each."""
    run = TextRun.of(small_config(corpus, "none"), jax.devices())
    batches, where = run.batches("train"), (run.sharding, run.shape)
    found = [digests(global_batch(batches[step], *where)) for step in range(4)]
    return json.loads(json.dumps(found)), len(batches[0])


DIFFERENT = [
    ("optimizer__peak_lr", (3e-3, 1e-3)),
    ("data__context_tokens", (80, 160)),
    ("may_change", ((), ("seed",))),
]


@pytest.mark.thorough
def test_two_processes_read_the_batches_of_one_and_refuse_others(corpus, tmp_path):
    same, other, gone = (str(tmp_path / name) for name in ("same", "other", "gone"))
    shutil.copytree(corpus, same)
    (tmp_path / "0.txt").write_text("of another host" * 40)
    (tmp_path / "1.txt").write_text("held out" * 40)
    texts = [tmp_path / "0.txt", tmp_path / "1.txt"]
    prepare(texts, tmp_path / "other", ByteTokenizer(), validation_fraction=0.5)
    alike = [("data__corpus", (str(corpus), same)), ("data__threads", (1, 4))]
    data = [("data__corpus", (str(corpus), place)) for place in (other, gone)]
    for index in range(2):
        weights = {"w": np.full(3, index, np.float32)}
        save_parameters(tmp_path / f"host{index}" / "weights", weights, {})
        (tmp_path / f"host{index}" / "run").mkdir()
    (tmp_path / "host1" / "run" / "lock").write_text("of a run that was killed")
    cases, port = json.dumps([*DIFFERENT, *alike, *data]), str(free_port())
    programs = [["-c", PROGRAM, port, i, tmp_path, corpus, cases] for i in range(2)]
    with Processes(programs) as two:
        results = two.finish()
    assert [code for code, _, _ in results] == [0, 0], results
    digests = [
        json.loads(re.search("^digests (.*)$", x, re.M)[1]) for _, x, _ in results
    ]
    wanted, blocks = first_digests(corpus)
    assert digests == [[wanted, blocks // 2]] * 2  # each reads its own half
    assert len({json.dumps(batch) for batch in wanted}) == 4
    first, second = (
        [json.loads(line) for line in re.findall("^said (.*)$", said, re.M)]
        for _, said, _ in results
    )
    *of_fields, moved, threads, replaced, missing = first[:-5]
    for (field, values), said in zip(DIFFERENT, of_fields, strict=True):
        name, (one, two) = field.replace("__", "."), map(json.dumps, values)
        assert said.startswith(
            f"the processes of this run differ in {name}: {one} on process 0, {two} on "
            "process 1: start the same command"
        )
    assert moved == threads == "agreed, 0"
    assert "differ in data.corpus.contents: " in replaced
    assert missing.startswith(f"process 1: there is no corpus {gone}")
    unlike, apart, together, dumped, programs = first[-5:]
    words = "differ in the parameters of weights: .step 0 with digest .* on process 0, "
    assert re.search(words + ".step 0 with digest .* on process 1: ", unlike)
    assert apart.startswith("config.workdir=run on process 1 is not the directory")
    assert together == "agreed, None"
    assert dumped == "agreed, {}"
    for name, value in {
        "LIBTPU_INIT_ARGS": "--xla_tpu=0",
        "XLA_FLAGS": "--xla_flag=0",
        "jax_enable_x64": "True",
        "program": "sources .*",
        "versions": "jax .*, jaxlib 0.0, cpu",
    }.items():
        assert re.search(f'{name}: "{value}" on process 0, "', programs)
    assert second == [*first[:-6], missing.removeprefix("process 1: "), *first[-5:]]


HOLDS = """
import sys, time
from training.saved.workdir import locked

with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.quick
def test_another_run_is_refused_by_name_until_its_process_ends(tmp_path):
    with Processes([["-c", HOLDS, str(tmp_path)]]) as one:
        one.wait_for("held")
        (holder,) = one.running
        name = f"process {holder.pid} on {socket.gethostname()} since 20"
        with pytest.raises(ValueError, match=re.escape(name)), locked(str(tmp_path)):
            raise AssertionError("two runs in one directory")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (tmp_path / LOCK).exists()
    with locked(str(tmp_path)):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK).read_text()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_its_holder_removes_is_not_taken(tmp_path, monkeypatch):
    lock, removed = fcntl.flock, []

    def leave_then_lock(*arguments: object) -> None:
        if not removed:
            (tmp_path / LOCK).unlink()
            removed.append(True)
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", leave_then_lock)
    with locked(str(tmp_path)):
        with pytest.raises(ValueError, match="in use"), locked(str(tmp_path)):
            raise AssertionError("each has a file of its own")
    assert removed


def test_what_cannot_be_locked_is_said_and_no_error(tmp_path, monkeypatch):
    said = []
    error = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=error))
    with locked(str(tmp_path), said.append), locked("gs://bucket/run", said.append):
        pass
    first, second = said
    assert "No locks available" in first and "is a bucket" in second


def test_a_file_system_for_reading_only_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir.os, "access", lambda *_: False)  # of root too
    said = f"^nothing can be written to {tmp_path}: .*Permission denied"
    with pytest.raises(OSError, match=said):
        make_writable(tmp_path)


def test_a_full_disk_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    replace_text(path, "before")

    def full(self, text):
        self.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(workdir.path_of(path)), "write_text", full)
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}"):
        replace_text(path, "{}")
    assert path.read_text() == "before"


@pytest.mark.parametrize("name", ["", " ", "~/run", "~"])
def test_a_name_that_would_lie_elsewhere_is_refused(tmp_path, monkeypatch, name):
    """They were made as /checkpoints, and as a directory that is called "~"."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"config.workdir='{name}' must be the path"):
        locked(name).__enter__()
    assert not list(tmp_path.iterdir())
