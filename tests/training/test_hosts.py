"""Two processes of four devices: they agree on steps to take and steps to stop at."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.processes import Processes, free_port
from tests.runs import prepare_corpus
from training import hosts

# Saves three steps, or restores the newest good one and waits for SIGTERM.
PROGRAM = """
import sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from training import hosts
from training.checkpoint import Checkpoints
from training.preemption import notice
from training.stored_step import DamagedStep, StoredStep

port, index, directory, damaged = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
hosts.connect(f"localhost:{port}", 2, int(index))
assert jax.process_count() == 2 and jax.device_count() == 8

mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("x"))
shape = jax.ShapeDtypeStruct((16, 5), np.float32, sharding=sharding)

def state(step):
    values = np.random.default_rng(step).standard_normal((16, 5), np.float32)
    return {"w": jax.make_array_from_callback((16, 5), sharding, lambda i: values[i])}

def say(*words):
    print(*words, flush=True)

read = StoredStep._read_arrays

def read_but_not(self, abstract):
    if index == "1" and str(self.step) == damaged:
        raise DamagedStep("unreadable from here")
    return read(self, abstract)

StoredStep._read_arrays = read_but_not
say("agree", hosts.all_agree(True), hosts.all_agree(index == "0"))
say("first", hosts.first_says(40 + int(index)))

told = notice()
with told, Checkpoints(directory, keep=3, fingerprint={}, say=say) as checkpoints:
    if checkpoints.latest_step() is None:
        for step in 10, 20, 30:
            checkpoints.save(step, state(step))
        sys.exit(0)
    restored, meta = checkpoints.restore({"w": shape})
    truth = state(meta["step"])["w"].addressable_shards
    ours = restored["w"].addressable_shards
    same = all((a.data == b.data).all() for a, b in zip(ours, truth, strict=True))
    say("restored", meta["step"], same)
    if damaged == "early":
        say("ready")
        time.sleep(4)  # as while compiling: the signal comes before the first call
    for step in range(meta["step"] + 1, 10_000):
        time.sleep(0.01 if index == "0" else 0.02)
        if told.arrived():
            checkpoints.save(step, state(step))
            say("saved", step)
            break
        if step == meta["step"] + 5 and damaged != "early":
            say("ready")
sys.exit(75)
"""


# Says the digests of the first batches, of one process or more.
DATA = """
import json, sys
from pathlib import Path
import jax
import assemble
from tests.runs import small_config
from training import hosts
from training.digest import digests
from training.feed import place

corpus, devices, port, count, index = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", int(devices))
if int(count) > 1:
    hosts.connect(f"localhost:{port}", int(count), int(index))
config = small_config(Path(corpus), Path("none"), mesh__fsdp=2, mesh__ring=4)
partition = assemble.partition(config, jax.devices())
batches = assemble.batches(config, partition, "train")
where = assemble.batch_sharding(config, partition), assemble.batch_shape(config)
found = [digests(place(batches[step], *where)) for step in range(4)]
print("digests", json.dumps([found, len(batches[0])]))
"""


def run(directory: Path, damaged: str) -> Processes:
    port = str(free_port())
    arguments = [
        ["-c", PROGRAM, port, str(i), str(directory), damaged] for i in range(2)
    ]
    return Processes(arguments)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10, 20 and 30, saved by two processes."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    with run(directory, "none") as two:
        for code, said, errors in two.finish():
            assert code == 0, errors
            assert "agree True False" in said and "first 40" in said
    assert {path.name for path in directory.iterdir()} == {"10", "20", "30"}
    return directory


def saved_step(said: str) -> int:
    return int(re.search(r"^saved (\d+)$", said, re.MULTILINE)[1])


def test_a_signal_to_one_and_a_step_that_one_cannot_read(directory: Path) -> None:
    with run(directory, "30") as two:
        for i in range(2):
            two.wait_for("restored 20 True", i)
            two.wait_for("ready", i)
        two.running[1].send_signal(signal.SIGTERM)
        results = two.finish()
    assert [code for code, _, _ in results] == [75, 75], results
    first, second = (saved_step(said) for _, said, _ in results)
    assert first == second > 25
    names = {path.name for path in directory.iterdir()}
    assert {"damaged", str(first)} <= names
    assert [path.name for path in (directory / "damaged").iterdir()] == ["30"]


def test_two_processes_read_the_batches_of_one_bit_for_bit(tmp_path: Path) -> None:
    """And each reads no more than its own half."""
    corpus, port = str(prepare_corpus(tmp_path)), str(free_port())
    settings = [("4", port, "2", "0"), ("4", port, "2", "1"), ("8", "", "1", "0")]
    with Processes([["-c", DATA, corpus, *each] for each in settings]) as three:
        results = three.finish()
    assert [code for code, _, _ in results] == [0, 0, 0], results
    lines = [
        re.search(r"^digests (.*)$", said, re.MULTILINE)[1] for _, said, _ in results
    ]
    (first, half), (second, other_half), (one, all_blocks) = map(json.loads, lines)
    assert first == second == one
    assert len({json.dumps(batch) for batch in one}) == 4
    assert (half, other_half, all_blocks) == (4, 4, 8)


@pytest.mark.slow
def test_a_signal_before_the_first_question_is_not_lost(directory: Path) -> None:
    with run(directory, "early") as two:
        two.wait_for("ready", 0)
        two.wait_for("ready", 1)
        two.running[0].send_signal(signal.SIGTERM)
        start = time.monotonic()
        results = two.finish(timeout=60)
        assert time.monotonic() - start < 30
    assert [code for code, _, _ in results] == [75, 75], results
    assert len({saved_step(said) for _, said, _ in results}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 2, 0), "count=2 index=0 need a coordinator"),
        (("", 0, 1), "count=0 index=1 need a coordinator"),
        (("localhost", 2, 0), "give HOST:PORT"),
        (("localhost:1", 2, 2), "an index from 0 to count - 1"),
        (("localhost:1", 0, -1), "an index from 0 to count - 1"),
    ],
)
def test_a_part_of_a_cluster_is_refused(
    arguments: tuple[str, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hosts.connect(*arguments)


def test_a_process_alone_agrees_with_itself() -> None:
    assert hosts.all_agree(True) and not hosts.all_agree(False)
    assert hosts.first_says(7) == 7
    hosts.wait_for_all("here")
