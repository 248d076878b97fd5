"""Runs that are stopped, killed, damaged and fed rubbish, and end as undisturbed ones.

In this process where the fault can be made here; else in processes of their own.
"""

import gc
import random
import re
import signal

import pytest

import train
from tasks.command_line import read_config
from tests.processes import Processes, run_program
from tests.runs import KINDS, assert_equal_bits
from tests.survival.small_run import (
    QUIET,
    STEPS,
    Small,
    on,
    send_ctrl_c,
    send_sigterm,
    start_and_kill,
)
from training.preemption import Preempted


@pytest.mark.quick
def test_a_run_that_is_told_to_stop_saves_and_goes_on_as_if_it_were_not(
    run, undisturbed, truth
):
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Preempted, match=f"step 6 of {STEPS}, no checkpoint and curves"):
        run.train_and(on("step  5", send_sigterm), checkpoint__save_every_steps=0)
    assert run.steps() == set()
    with pytest.raises(Preempted, match=f"step 6 of {STEPS}, checkpoint and curves in"):
        run.train_and(on("step  5", send_sigterm))
    assert run.steps() == {"4", "6"}
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    run.assert_goes_on(6, truth)
    assert run.curve() == undisturbed.curve()
    # The validation after step 6 was left for the signal; nothing else is missing.
    ours = run.curve("validation/loss")
    assert ours == undisturbed.curve("validation/loss")[-len(ours) :]
    # Seconds count over both starts.
    seconds = [value for _, value in run.curve("goodput/step_seconds")]
    assert seconds == sorted(seconds) and len(seconds) == STEPS


@pytest.mark.thorough
def test_a_run_goes_on_from_its_workdir_alone(copy, truth):
    copy.train()
    assert_equal_bits(copy.state(), truth)
    kept = copy.files()["config.json"]
    flags = [f"--workdir={copy.workdir}"]
    copy.said.clear()  # its checkpoints are of another workdir
    assert train.train(read_config(flags), copy.said.append) == {"step": STEPS}
    assert "changed since" not in "".join(copy.said)
    more = read_config([*flags, f"--config.train.steps={STEPS + 1}"])
    assert train.train(more, copy.said.append)["step"] == STEPS + 1
    changes = [line for line in copy.said if line.startswith("changed since")]
    assert changes == [f"changed since step {STEPS}: train.steps: 12 -> 13"]
    now = copy.files()["config.json"]
    assert now == kept.replace(b'"steps": 12', b'"steps": 13') != kept
    with pytest.raises(ValueError, match="made with other settings: seed"):
        train.train(read_config([*flags, "--config.seed=1"]), copy.said.append)
    assert copy.files()["config.json"] == now


@pytest.mark.thorough
def test_a_signal_before_the_loop_stops_the_run_there_and_changes_nothing(
    copy, truth, monkeypatch
):
    before, restore = copy.files(), train.Checkpoints.restore

    def stop_and_restore(*arguments):
        send_ctrl_c()
        return restore(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train.Checkpoints, "restore", stop_and_restore)
        with pytest.raises(Preempted, match="step 8, nothing new to save"):
            copy.train()
    assert before == copy.files() and not any("step  9" in x for x in copy.said)
    copy.assert_goes_on(8, truth)


@pytest.mark.slow
def test_the_program_exits_with_75_then_0_and_with_1_for_an_error(run, programs, truth):
    kept = {"JAX_COMPILATION_CACHE_DIR": str(programs)}
    with Processes([["train.py", *run.flags()]], **kept) as started:
        started.wait_for("step  2")
        started.running[0].send_signal(signal.SIGINT)
        ((code, _, errors),) = started.finish()
    assert code == 75, errors
    (line,) = errors.splitlines()
    stopped = re.match(rf"preempted: step (\d+) of {STEPS}, ", line)
    assert run.has_checkpoint(int(stopped[1]))
    run.command()
    assert f"resuming from step {stopped[1]}" in run.said
    assert_equal_bits(run.state(), truth)
    code, _, errors = run_program("train.py", *run.flags(checkpoint__keep=0))
    assert (code, errors) == (1, "error: config.checkpoint.keep=0 must be at least 1\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "kind"), [(50, "adamw"), *((3, kind) for kind in (*KINDS, "lora"))]
)
@pytest.mark.timeout(3600)
def test_a_run_that_is_killed_at_random_ends_as_if_it_were_not(
    corpus, tmp_path, programs, kills, kind
):
    """Half of the kills are while a save is on its way."""
    # Steps enough that some are left after that many kills.
    fields = {"train__steps": max(2 * STEPS, 5 * kills), "checkpoint__keep": 2}
    fields |= {"checkpoint__save_every_steps": 2, **QUIET}
    fields |= {f"optimizer__{name}": x for name, x in KINDS.get(kind, {}).items()}
    if kind == "lora":
        Small(corpus, tmp_path / "weights").train(**fields | {"train__steps": 4})
        fields |= {"lora__rank": 2, "lora__targets": "q,o,down"}
        fields |= {"init_from": str(tmp_path / "weights")}
    alone, killed = (Small(corpus, tmp_path / x, **fields) for x in ("alone", "killed"))
    alone.train()
    made = 0
    for _ in range(kills):
        wanted = random.choice(["saving", "saving", "step", "checkpoints:"])
        seconds = random.choice([0, random.uniform(0, 0.05), random.random()])
        made += start_and_kill(killed, programs, wanted, seconds)
    print(f"{made} kills")
    assert made > kills // 2
    killed.train()
    assert_equal_bits(killed.state(), alone.state())
    assert "damaged" not in killed.steps()
    steps = [step for step, _ in killed.curve()]
    assert steps == sorted(set(steps))


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(copy, truth):
    # In every file of data, as one may hold nothing that is still read.
    for file in (copy.workdir / "checkpoints" / "8" / "state").rglob("d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 16
        file.write_bytes(content)
    copy.train()
    assert "resuming from step 4" in copy.said
    (warning,) = copy.warnings()
    assert f"step 8 is damaged and moves to {copy.workdir}/checkpoints/dam" in warning
    assert (copy.workdir / "checkpoints" / "damaged" / "8").is_dir()
    gc.collect()  # coroutines that Orbax leaves behind where a read fails
    assert_equal_bits(copy.state(), truth)


CANNOT_MAKE = """
import errno, os, sys
import train
from etils import epath

make = type(epath.Path("/")).mkdir

def fail(path, *args, **options):
    if "/8.orbax-checkpoint-tmp" in str(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return make(path, *args, **options)

type(epath.Path("/")).mkdir = fail
train.end(train.main())
"""


@pytest.mark.slow
def test_a_save_that_could_not_begin_holds_no_run_at_its_end(run):
    """Threads of Orbax wait for it for five minutes."""
    code, said, _ = run_program("-c", CANNOT_MAKE, *run.flags(), timeout=150)
    assert code == 0 and "WARNING: step 8 was NOT saved" in said
    assert run.steps() == {"4", "12"}
