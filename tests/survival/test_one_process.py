"""Runs that are stopped, killed, damaged and fed rubbish, and end as undisturbed ones.

In this process where the fault can be made here; else in processes of their own.
"""

import gc
import random
import re
import shutil
import signal
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tasks.command_line import read_config
from tests.small.runs import KINDS, assert_equal_bits, kept_in
from tests.support.processes import run_program
from tests.survival.small_run import QUIET, STEPS, Small, start_and_kill
from training.hosts.preemption import Preempted
from training.update.guard import SPIKE_WINDOW, BadSteps


@pytest.mark.quick
def test_a_run_asked_to_stop_saves_and_goes_on(run, undisturbed, truth):
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(Preempted, match=f"step 6 of {STEPS}, checkpoint and curves in"):
        run.train_and_stop("step  5")
    assert run.steps() == {"4", "6"}
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    run.assert_goes_on(6, truth)
    assert run.curve() == undisturbed.curve()
    # The validation after step 6 was left for the signal; nothing else is missing.
    ours = run.curve("loss/validation")
    assert ours == undisturbed.curve("loss/validation")[-len(ours) :]
    # Seconds count over both starts.
    seconds = [value for _, value in run.curve("wall_time/step_seconds")]
    assert seconds == sorted(seconds) and len(seconds) == STEPS


@pytest.mark.thorough
def test_a_run_stopped_before_its_loop_goes_on_from_its_workdir_alone(
    copy, truth, monkeypatch
):
    before, restore = copy.files(), train.Checkpoints.restore

    def stop_and_restore(*arguments):
        signal.raise_signal(signal.SIGINT)
        return restore(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train.Checkpoints, "restore", stop_and_restore)
        with pytest.raises(Preempted, match="step 8, nothing new to save"):
            copy.train()
    assert before == copy.files() and not any("step  9" in x for x in copy.said)
    copy.assert_goes_on(8, truth)
    kept = copy.files()["config.json"]
    flags = [f"--workdir={copy.workdir}"]
    copy.said.clear()  # its checkpoints are of another workdir
    assert train.train(read_config(flags), copy.said.append) == {"step": STEPS}
    assert "changed since" not in "".join(copy.said)
    more = read_config([*flags, f"--config.train.steps={STEPS + 1}"])
    assert train.train(more, copy.said.append)["step"] == STEPS + 1
    changes = [line for line in copy.said if line.startswith("changed since")]
    assert changes[0] == f"changed since step {STEPS}: train.steps: 12 -> 13"
    assert len(changes) == 2 and "learning rate: 3.0e-04 -> 3.5e-04" in changes[1]
    now = copy.files()["config.json"]
    assert now == kept.replace(b'"steps": 12', b'"steps": 13') != kept
    with pytest.raises(ValueError, match="made with other settings: seed"):
        train.train(read_config([*flags, "--config.seed=1"]), copy.said.append)
    assert copy.files()["config.json"] == now


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "kind"), [(50, "adamw"), (3, "least"), (3, "all"), (3, "lora")]
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
        made += start_and_kill(killed, wanted, seconds)
    print(f"{made} kills")
    assert made > kills // 2
    killed.train()
    assert_equal_bits(killed.state(), alone.state())
    assert "damaged" not in killed.steps()
    steps = [step for step, _ in killed.curve()]
    assert steps == sorted(set(steps))


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_threads_that_wait_for_a_failed_save_hold_no_run_at_its_end():
    """Those of Orbax wait for five minutes where it could not begin."""
    waits = "import threading, train; threading.Thread(target=threading.Event().wait)"
    ends = "print('said', flush=True); train.LATE_SECONDS = 1; train.end(3)"
    done = run_program("-c", f"{waits}.start(); {ends}", timeout=60)
    assert done == (3, "said\n", "")


def change_batches(patch: pytest.MonkeyPatch, steps: set[int], **fields: Any) -> None:
    """Changes fields of the batches of some steps, as they lie on the devices."""
    to_mesh = train.global_batch
    count = iter(range(1, 1000))

    def placed(blocks, *where):
        batch = to_mesh(blocks, *where)
        if next(count) in steps:
            shardings = jax.tree.map(lambda x: x.sharding, batch)
            changed = {name: f(getattr(batch, name)) for name, f in fields.items()}
            batch = jax.device_put(batch._replace(**changed), shardings)
        return batch

    patch.setattr(train, "global_batch", placed)


@pytest.mark.thorough
def test_bad_steps_are_skipped_and_too_many_end_the_run(run, monkeypatch, truth):
    with monkeypatch.context() as patch:
        bad = {5, *range(7, 100)}
        change_batches(patch, bad, loss_weights=lambda x: x.at[0, 0].set(np.nan))
        said = "step 10, and 4 skipped .* finite, as step 6 left.* resumes from step 4"
        with pytest.raises(BadSteps, match=said):
            run.train(guard__stop_after=4, **QUIET)
    found = [re.findall(r"at step (\d+).*\((\d+) in", x)[0] for x in run.warnings()]
    assert found == [("5", "1"), ("7", "1"), ("8", "2"), ("9", "3")]
    skipped = [int(count) for _, count in run.curve("train/skipped")]
    assert skipped == [0] * 4 + [1, 1, 2, 3, 4, 5]
    # From before the bad steps: while updates are skipped nothing is saved.
    assert run.steps() == {"4"}
    run.assert_goes_on(4, truth)


@pytest.mark.slow
def test_a_spike_of_the_loss_is_skipped_logged_and_counted(run, monkeypatch):
    # The losses that are remembered are those of a run that has settled.
    spike, never_seen = 3 * SPIKE_WINDOW, 255
    more = {"train__steps": spike + 5, "checkpoint__save_every_steps": 1000, **QUIET}
    with monkeypatch.context() as patch:
        change_batches(patch, {spike}, targets=lambda x: jnp.full_like(x, never_seen))
        run.train(guard__spike_sigmas=6.0, **more)
    (warning,) = run.warnings()
    assert f"at step {spike}: no update (1 in a row)" in warning
    assert run.curve("train/skipped")[-2:] == [(spike + 4, 1), (spike + 5, 1)]
    losses = run.losses()
    assert losses[spike - 1] > 2 * losses[spike:].max()


@pytest.mark.thorough
def test_a_killed_run_ends_as_an_undisturbed_one(run, undisturbed, truth):
    seconds = random.uniform(0, 0.3)
    assert start_and_kill(run, "saving 8", seconds, last_save=8)
    assert not run.has_checkpoint(STEPS)
    step = list(run.workdir.glob("programs/jit_train_step-*-cache"))
    with kept_in(None):
        run.train()
    assert step == list(run.workdir.glob("programs/jit_train_step-*-cache")) != []
    (kept,) = re.findall(r"start, (\d+) programs from earlier", "\n".join(run.said))
    assert int(kept) > 0
    assert {"resuming from step 4", "resuming from step 8"} & {*run.said}
    state = run.state()
    assert int(state.step) == STEPS and len(jax.tree.leaves(state)) > 30
    assert_equal_bits(state, truth)
    curves, wanted, points = run.curves(), undisturbed.curves(), run.points()
    same = {tag for tag in wanted if not tag.startswith(("perf/", "wall_time/"))}
    assert {*same} >= {"loss/train", "train/grad_norm", "loss/validation"}
    for tag in same:
        assert curves[tag] == wanted[tag] == points[tag]
    steps = {tag: [step for step, _ in points] for tag, points in curves.items()}
    assert steps["loss/train"] == list(range(1, STEPS + 1))
    assert steps["loss/validation"] == [STEPS // 2, STEPS]
    # Rates are never the same, but no step may have two.
    assert set(curves) == set(wanted) == set(points)
    assert {tag: [step for step, _ in points[tag]] for tag in points} == steps
    assert all(found == sorted(set(found)) for found in steps.values())


@pytest.mark.thorough
def test_a_smaller_ring_goes_on_where_the_larger_one_stopped(undisturbed, copy):
    copy.train(mesh__fsdp=4, mesh__ring=2, train__validation_batches=0)
    assert "mesh: data 1 x fsdp 4 x ring 2 x tensor 1, of 8 x cpu" in copy.said
    assert "changed since step 8: mesh.ring: 4 -> 2" in copy.said
    losses = copy.losses()
    assert len(losses) == STEPS - 8
    np.testing.assert_allclose(losses, undisturbed.losses(8), rtol=1e-5)


@pytest.mark.thorough
def test_a_complete_run_has_nothing_to_do_but_extra_steps(undisturbed, run):
    shutil.copytree(undisturbed.workdir, run.workdir)
    before = run.files()
    assert run.train() == {"step": STEPS} and run.files() == before
    assert f"all {STEPS} steps are made" in run.said[-1]
    quiet = {"train__validation_batches": 0, "train__extra_steps": 2}
    assert run.train(**quiet)["step"] == STEPS + 2 and run.has_checkpoint(STEPS + 2)
    assert f"resuming from step {STEPS}" in run.said
    assert [step for step, _ in run.curve()] == list(range(1, STEPS + 3))
    assert run.curve()[:STEPS] == undisturbed.curve()
    rates = [rate for _, rate in run.curve("train/learning_rate")[STEPS:]]
    assert rates == pytest.approx([run.config().optimizer.end_lr] * 2)
    # Another 2, and not only up to 14.
    assert run.train(**quiet)["step"] == STEPS + 4
    assert not any("learning rate: " in line for line in run.said)
    assert run.train(**quiet, train__steps=STEPS + 6)["step"] == STEPS + 6
    (change,) = (line for line in run.said if "learning rate: " in line)
    keeps = f"config.train.steps={STEPS} and config.train.extra_steps=2"
    assert change.endswith(f"; to keep it, set {keeps}")
    rates = [rate for _, rate in run.curve("train/learning_rate")]
    assert f": {rates[-3]:.1e} -> {rates[-2]:.1e}; " in change


@pytest.mark.thorough
def test_a_run_says_where_everything_is_and_what_it_gives(undisturbed):
    directory, said = undisturbed.workdir, undisturbed.said
    assert f"checkpoints: {directory}/checkpoints" in said
    assert f"curves: tensorboard --logdir {directory}/tensorboard" in said
    assert f"points: {directory}/metrics.jsonl" in said
    assert re.match(rf"done: .*{directory}\ngoodput [\d.]+ % of [\d.]+ s \(", said[-1])
    assert (directory / "tensorboard" / directory.name).is_dir()
    lines = [line for line in said if line.startswith("step")]
    for line, (step, loss) in zip(lines, undisturbed.curve(), strict=True):
        assert re.match(rf"step +{step}/{STEPS} +loss {loss:.4f} ", line), line
    curves = undisturbed.curves()
    # The devices are simulated: they have no peak, and so no MFU.
    rates = "step_time", "tokens_per_second", "tokens_per_second_per_device"
    found = {tag for tag in curves if tag.startswith("perf/")}
    assert found == {f"perf/{rate}" for rate in rates}
    lost, compiled = (
        curves[f"wall_time/{kind}_seconds"][-1][1] for kind in ("lost", "compile")
    )
    assert lost == 0 < compiled


FULL_DISK = """
import resource, sys
import jax, numpy as np
import train
from training.saved.checkpoint import Checkpoints

values = np.random.default_rng(7).standard_normal((30, 10_000), np.float32)
state = {str(i): jax.device_put(row) for i, row in enumerate(values)}

@train.as_program
def main(_):
    train.silence_writers()
    with Checkpoints(sys.argv[1], keep=1, fingerprint={}) as checkpoints:
        size = 24_576  # of the largest file that can be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        for step in 1, 2:
            checkpoints.save(step, state)

sys.exit(main())
"""


@pytest.mark.thorough
def test_a_full_disk_gives_one_line_of_errors(run):
    # JAX warns of programs that find no room, and of those that others are writing.
    none_kept = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    code, said, errors = run_program("-c", FULL_DISK, run.workdir, **none_kept)
    assert code == 1
    (line,) = errors.splitlines()
    assert re.match("error: step 2 was NOT saved in .*File too large", line)
    assert line.endswith(
        "; newest checkpoint: none. The save before it failed too, so the run ends"
    )
    assert "WARNING: step 1 was NOT saved" in said


@pytest.mark.parametrize("place", ["checkpoints", "tensorboard", "", "lock/"])
def test_a_place_that_cannot_be_made_is_refused_at_once(run, monkeypatch, place):
    """Orbax' threads waited 300 s for their directory, when the run had ended."""
    monkeypatch.delattr(train, "compile_programs")
    path = run.workdir / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if place.endswith("/") else path.write_text("of mine")
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match=f"^nothing can be written to {path}: "):
        run.train()
    left = set(threading.enumerate()) - threads
    for thread in left:
        thread.join(60)  # the watchdog's ends on a busy machine a little later
    assert not any(thread.is_alive() for thread in left)
    assert {p for p in run.workdir.rglob("*") if p.is_file()} <= {path}
