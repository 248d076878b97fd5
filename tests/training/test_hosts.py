"""Two processes of four devices: they agree on steps to take and steps to stop at."""

import itertools
import re
import signal
import socket
import time
from collections.abc import Sequence

import jax
import pytest
from jax._src.distributed import State

from tests.cases import table
from tests.support.processes import Processes, free_port, without_logs
from training.hosts import processes
from training.hosts.watchdog import HUNG

# Saves three steps, restores the newest good one, and waits for a signal.
PROGRAM = """
import socket, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from training.hosts import processes
from training.saved.checkpoint import Checkpoints
from training.hosts.preemption import stop_notice
from training.saved.stored_step import DamagedStep, StoredStep

port, index, directory = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
processes.connect(f"localhost:{port}", 2, int(index))
assert jax.process_count() == 2 and jax.device_count() == 8

mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("x"))
shape = jax.ShapeDtypeStruct((16, 5), np.float32, sharding=sharding)

def state(step):
    values = np.random.default_rng(step).standard_normal((16, 5), np.float32)
    return {"w": jax.make_array_from_callback((16, 5), sharding, lambda i: values[i])}

def say(*words):
    print(*words, flush=True)

read, failures = StoredStep._read_arrays, []

def read_but_not(self, abstract):
    if index == "1" and self.step == 30:
        raise DamagedStep("unreadable from here")
    if index == "1" and not failures:
        failures.append(self.step)
        raise OSError("not just now")
    return read(self, abstract)

StoredStep._read_arrays = read_but_not
say("agree", processes.all_agree(True), processes.all_agree(index == "0"))
say("first", processes.first_says(40 + int(index)))
say("open to others", socket.socket().connect_ex(("127.0.0.2", int(port))) == 0)

stop, options = stop_notice(), {"keep": 3, "fingerprint": {}, "say": say}
with Checkpoints(directory, **options) as checkpoints:
    for step in 10, 20, 30:
        checkpoints.save(step, state(step))
with stop, Checkpoints(directory, **options) as checkpoints:
    restored, meta = checkpoints.restore({"w": shape})
    truth = state(meta["step"])["w"].addressable_shards
    ours = restored["w"].addressable_shards
    same = all((a.data == b.data).all() for a, b in zip(ours, truth, strict=True))
    say("restored", meta["step"], same)
    for step in range(meta["step"] + 1, 10_000):
        time.sleep(0.01 if index == "0" else 0.02)
        if stop.requested():
            checkpoints.save(step, state(step))
            say("saved", step)
            break
        if step == meta["step"] + 5:
            say("ready")
sys.exit(75)
"""


@pytest.mark.thorough
def test_a_signal_to_one_and_a_step_that_one_cannot_read(tmp_path):
    first = "-c", PROGRAM, str(free_port())
    with Processes([[*first, str(i), str(tmp_path)] for i in range(2)]) as two:
        for i in range(2):
            two.wait_for("agree True False", i)
            two.wait_for("first 40", i)
            two.wait_for("open to others False", i)
            two.wait_for("restored 20 True", i)
            two.wait_for("ready", i)
        two.running[1].send_signal(signal.SIGINT)
        results = two.finish()
    assert [code for code, _, _ in results] == [75, 75], results
    first, second = (re.search(r"^saved (\d+)$", x, re.M)[1] for _, x, _ in results)
    assert first == second and int(first) > 25
    assert {path.name for path in tmp_path.iterdir()} == {"10", "20", first, "damaged"}
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["30"]


@pytest.mark.parametrize(("arguments", "message"), table("runs.txt", "hosts"))
def test_a_part_of_a_cluster_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        processes.connect(*arguments)


@pytest.mark.parametrize("address", ["localhost:1", "nowhere"])
def test_an_address_alone_is_refused_by_the_name_of_its_variable(address, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    # Without the check that no other test has computed.
    monkeypatch.setattr(jax.distributed, "initialize", State().initialize)
    wanted = f"JAX_COORDINATOR_ADDRESS={address} is set, .*config.hosts.coordinator"
    with pytest.raises(ValueError, match=f"^hosts: {wanted}, count and index"):
        processes.connect("", 0, -1)


def test_a_process_without_a_cluster_is_alone_and_other_errors_show(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", State().initialize)
    processes.connect("", 0, -1)

    def refuse(*_, **options):
        raise ValueError("the cluster names no port")

    monkeypatch.setattr(processes, "join", refuse)
    with pytest.raises(ValueError, match="names no port"):
        processes.connect("", 0, -1)


def test_a_port_that_another_program_has_is_refused():
    """Of two first processes each would hear from some processes of the other."""
    with socket.create_server(("", 0)) as other:
        place = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{place}.*Address already in use"):
            processes.connect(place, 2, 0)


@pytest.mark.parametrize(
    ("host", "is_bound"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("[::1]", True),
        ("127.mine.org", False),
        ("host", False),
    ],
)
def test_a_coordinator_of_this_machine_listens_to_it_alone(host, is_bound, monkeypatch):
    joined = []
    monkeypatch.setattr(processes, "join", lambda _, **options: joined.append(options))
    monkeypatch.setattr(processes, "_check_counts", lambda *_: None)
    place = f"{host}:{free_port()}"
    processes.connect(place, 2, 0)
    wanted = place if is_bound else None
    assert joined[0].get("coordinator_bind_address") == wanted


# Finds the others, or ends; then waits for them to be lost.
JOINS = """
import os, signal, sys, threading, time
import jax
from tasks.command_line import as_program
from training.hosts import lost_processes, processes

port, count, index, fault = sys.argv[1:]

@as_program
def main(_):
    jax.config.update("jax_num_cpu_devices", 1)
    if fault == "ctrl-c":
        threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        processes.connect(f"localhost:{port}", int(count), int(index), 6, 6)
        print("joined", flush=True)
        if fault == "error":
            raise ValueError("of one process")
        while fault == "busy":
            processes.all_agree(True)
            time.sleep(0.1)
        time.sleep(600)
    except Exception as error:
        lost_processes.leave(error)
        raise

sys.exit(main())
"""


def join(*processes: tuple[int, int], faults: Sequence[str] = ()) -> Processes:
    """Processes with these counts and indices."""
    each = itertools.zip_longest(processes, faults, fillvalue="none")
    start = "-c", JOINS, str(free_port())
    return Processes([[*start, *map(str, place), fault] for place, fault in each])


@pytest.mark.slow
def test_processes_that_do_not_find_each_other_end_with_a_line():
    """Of three, one is missing, and one has another's index."""
    places, found = [(3, 0), (3, 1), (3, 1)], set()
    with join(*places) as all_of_them:
        results = all_of_them.finish(timeout=120)
    for (count, index), (code, said, errors) in zip(places, results, strict=True):
        (line,) = errors.splitlines()
        assert (code, said) == (1, "")
        assert re.match(rf"error: hosts: .*{count=} {index=}: the processes have", line)
        found.add(re.search(r"\(([A-Z_]+)", line)[1])
    assert found == {"DEADLINE_EXCEEDED", "ALREADY_EXISTS"}
    with join((2, 0), faults=["ctrl-c"]) as one:
        assert one.finish(timeout=60) == [(-signal.SIGINT, "", "")]


@pytest.mark.quick
def test_processes_with_different_counts_all_end_with_a_line():
    with join((2, 0), (3, 1)) as two:
        results = two.finish(timeout=120)
    wanted = "count must be the same on every process, got 2, 3 on processes 0 to 1"
    for code, said, errors in results:
        assert (code, said) == (1, "")
        assert without_logs(errors) == f"error: hosts: {wanted}\n", errors


def test_lines_of_c_libraries_alone_are_left_out():
    logged = (
        "F1129 15:27:01.784489    1191 filter_stack_call.cc:1098] Check failed: bla \n"
        "*** Check failure stack trace: ***\n"
        "    @     0x7f1d4713d7d4  absl::log_internal::LogMessage::SendToLog()\n"
    )
    said = (
        "W1129 15:27:01.784489 140062 loop.py:98] of absl in Python\n"
        "train.py:7: UserWarning: of Python\n"
        "Traceback (most recent call last):\n"
        "error: of ours\n"
    )
    assert without_logs(logged + said) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "victim", "number"),
    [
        ("none", 0, signal.SIGKILL),
        ("none", 1, signal.SIGSTOP),
        ("busy", 1, signal.SIGKILL),
    ],
)
def test_the_loss_of_a_process_ends_the_others(fault, victim, number):
    with join((2, 0), (2, 1), faults=[fault, fault]) as two:
        for index in range(2):
            two.wait_for("joined", index)
        time.sleep(1)
        two.running[victim].send_signal(number)
        survivor = two.running[1 - victim]
        _, errors = survivor.communicate(timeout=60)  # of 6 s and what a busy host adds
    assert survivor.returncode == HUNG, errors
    line = errors.splitlines()[-1]
    assert line.startswith("error: another process of the run was lost"), errors


@pytest.mark.slow
def test_an_error_of_one_process_ends_it_and_the_others():
    with join((2, 0), (2, 1), faults=["none", "error"]) as two:
        (first, _, _), (code, _, errors) = two.finish(timeout=120)
    assert (first, code) == (HUNG, 1)
    assert errors.splitlines()[-1] == "error: of one process"
    assert "Traceback" not in errors
