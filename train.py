"""Trains on long sequences: python train.py --config=configs/tiny.py

The run as it happens: mesh, data, model, state, programs, loop. Every object is made
here and passed down: `train` reads from top to bottom as a run goes, and hands over to
the loop of `training/loop.py`. Run the same command again to resume; or, as a run keeps
its config, python train.py --workdir=DIR, with what is to change (--config.x.y=...).

Exit codes: 0 the run is complete, 75 it was stopped (SIGTERM, SIGHUP, Ctrl-C) and has
saved, 70 a step hung or another process was lost, 1 an error.
"""

import signal

if __name__ == "__main__":  # Ctrl-C while the rest is imported shows no stack
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from data.rows import iterate
from tasks import run_config
from tasks.command_line import CONFIG_FLAGS, Parser, as_program, read_config, say
from tasks.config_errors import names_fields
from tasks.layout_choice import row_lines, wrapped
from tasks.memory_choice import choice_line, with_remat
from tasks.parts import Data
from tasks.programs import compile_programs, first_state, read_frozen
from tasks.run import Run
from tasks.state import guard_settings
from tasks.systems import AUTO, prepare_devices
from tasks.task import check, check_attention, make_run, rate_change, run_settings
from training import compilation
from training.hosts import lost_processes, processes
from training.hosts.preemption import Preempted, SignalNotice, stop_notice
from training.hosts.watchdog import Watchdog
from training.loop import Intervals, Loop
from training.reports.goodput import Goodput
from training.reports.metrics import Throughput
from training.reports.profiler import Profiler
from training.reports.report import Report
from training.reports.sinks import (
    FILE,
    JsonLines,
    Sink,
    TensorBoardWriter,
    WandbSink,
    check_wandb,
    run_directory,
)
from training.saved import record
from training.saved.checkpoint import Checkpoints
from training.saved.stored_step import RECORD
from training.saved.workdir import check_shared, locked, make_writable
from training.sharding.feed import global_batch
from training.step import TrainState

PREEMPTED = 75
"""Exit code: try again (EX_TEMPFAIL of sysexits.h)."""

LATE_SECONDS = 20
"""After which a process ends that has nothing to do; of many, a few times that, as the
first may still report."""


def train(config: ConfigDict, say: Callable[[str], None] = print) -> dict[str, float]:
    """Runs a config to its end, from its newest checkpoint if there is one.

    Args:
      config: see configs/base.py.
      say: prints a line of progress.

    Returns:
      `step`, and the last `loss` and `validation_loss`, if any, in the task's unit.

    Raises:
      ValueError, FileNotFoundError: something in the config, the corpus or the
        checkpoint is wrong; before anything is compiled.
      Preempted: it was stopped, and has saved.
      BadSteps: it makes no progress, or its state is not finite.
      OSError: it cannot save, or read.
    """
    goodput = Goodput()
    settings = record.agreed(lambda: _checked_settings(config, say))
    config = with_remat(config, settings["remat"], settings["remat_budget_gib"])
    run = make_run(config, jax.devices())
    data = run.open_data()
    check_attention(run)
    for line in _start_lines(run):
        say(line)
    with contextlib.ExitStack() as stack:
        is_first = jax.process_index() == 0
        if is_first:
            stack.enter_context(_held_workdir(config, say))
        check_shared(config.workdir)
        compiled = stack.enter_context(compilation.counted())
        if config.keep_programs:
            programs = f"{config.workdir}/programs"
            stack.enter_context(compilation.kept_in(programs, say))
        stop = stack.enter_context(stop_notice())
        guard = guard_settings(config)
        watchdog = Watchdog(guard.first_step_seconds, guard.step_seconds)
        stack.enter_context(watchdog)

        checkpoints = stack.enter_context(_checkpoints(config, data, settings, say))
        if checkpoints.latest_step() is None:
            state = first_state(run, data, say)
        else:
            state = _restored(run, checkpoints, goodput, say)
        frozen = read_frozen(run, say)
        first_step = int(state.step)
        last_step = config.train.steps
        if first_step >= last_step:  # a complete run goes on
            last_step = first_step + config.train.extra_steps
        if first_step == last_step:
            say(
                f"all {last_step} steps are made, so nothing is trained: "
                "config.train.extra_steps adds some at the last learning rate; "
                "a larger config.train.steps stretches the schedule and raises the rate"
            )
            return {"step": last_step}
        if is_first:
            seconds = checkpoints.directory.parent / "goodput.json"
            goodput.resume(seconds, first_step, say)

        _stop_if(stop, first_step)
        say("compiling")
        begun = time.monotonic()
        with goodput.spend("compile"):
            programs = compile_programs(run, frozen)
        say(f"compiled in {time.monotonic() - begun:.1f} s ({compiled})")
        _stop_if(stop, first_step)

        if is_first:
            run_config.write(config, settings)
        name = checkpoints.record[record.RUN]
        writer = stack.enter_context(_sinks(config, name, first_step + 1, say))
        report = _report(run, last_step, writer, say)
        profiler = Profiler(config.profile, f"{config.workdir}/tensorboard", say)
        stack.enter_context(profiler)
        batches = iterate(data.batches, first_step, threads=config.data.threads)
        stack.enter_context(contextlib.closing(batches))
        loop = Loop(
            programs=programs,
            to_mesh=lambda blocks: global_batch(blocks, run.sharding, run.shape),
            held_out=data.validation,
            every=Intervals(
                log=config.train.log_every_steps,
                validate=config.train.validate_every_steps,
                save=config.checkpoint.save_every_steps,
            ),
            checkpoints=checkpoints,
            report=report,
            goodput=goodput,
            watchdog=watchdog,
            profiler=profiler,
            stop=stop,
        )
        step = loop.run(state, batches, first_step)
        saved = "checkpoint" if checkpoints.latest_step() == step else "no checkpoint"
    where = f"{saved} and curves in {config.workdir}"
    if step < last_step:
        again = f"to resume: python train.py --workdir={config.workdir}"
        raise Preempted(f"step {step} of {last_step}, {where}; {goodput}; {again}")
    say(f"done: step {last_step}, {where}\n{goodput}")
    return {"step": last_step, **report.last}


def _checked_settings(config: ConfigDict, say: Callable[[str], None]) -> dict[str, Any]:
    """Checks the config, and returns its settings (see `run_settings`).

    With those of an earlier start in the place of remat=auto, or those that it chooses.
    """
    check(config, jax.device_count())
    if "wandb" in config.metrics and jax.process_index() == 0:
        check_wandb()
    if config.remat != AUTO:
        return run_settings(config, say)
    before = None
    with contextlib.suppress(FileNotFoundError):  # a new run
        before = run_config.read(config.workdir)
    run = make_run(config, jax.devices(), before=before)
    say(choice_line(run))
    return run_settings(run.config, say)


def _start_lines(run: Run) -> Iterator[str]:
    """Yields the lines at a run's start: its mesh, its model and its layout."""
    config, partition = run.config, run.partition
    devices = partition.mesh.devices.flatten()
    yield f"mesh: {partition}, of {devices.size} x {devices[0].device_kind}"
    shards = partition.shards(partition.mesh_axes("embed", config.model.hidden_size))
    model = f"model: {run.num_parameters:,} parameters in {shards} shards"
    if run.model.frozen_shapes:
        model += f", {run.num_trained:,} of them trained (adapters)"
    model += f", {config.attention} attention"
    yield from wrapped(model)
    yield from wrapped(f"memory: {run.execution}")
    yield from row_lines(run)


@contextlib.contextmanager
def _held_workdir(config: ConfigDict, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of the working directory, which it makes."""
    with locked(config.workdir, say):
        if "tensorboard" in config.metrics:
            make_writable(f"{config.workdir}/tensorboard")
        yield


@contextlib.contextmanager
def _checkpoints(
    config: ConfigDict,
    data: Data,
    settings: dict[str, Any],
    say: Callable[[str], None],
) -> Iterator[Checkpoints]:
    """Opens the run's checkpoints, and checks that this run may continue from them."""
    directory = f"{config.workdir}/checkpoints"
    with Checkpoints(
        directory,
        keep=config.checkpoint.keep,
        fingerprint=data.fingerprint,
        say=say,
    ) as checkpoints:
        checkpoints.check_fingerprint()
        saved = checkpoints.records()
        defaults = run_config.defaults(config.task)
        checkpoints.record = record.continued(
            saved, settings, config.may_change, say, defaults
        )
        say(f"checkpoints: {directory}")
        for name in config.metrics:
            where = f"{config.workdir}/tensorboard"
            say(f"curves: {name}" + f" --logdir {where}" * (name == "tensorboard"))
        say(f"points: {config.workdir}/{FILE}")
        yield checkpoints


def _restored(
    run: Run, checkpoints: Checkpoints, goodput: Goodput, say: Callable[[str], None]
) -> TrainState:
    """Restores the newest checkpoint; tells of another learning rate from there on."""
    with goodput.spend("restore"):
        state, meta = checkpoints.restore(run.state_like)
    say(f"resuming from step {state.step}")
    saved = meta.get(RECORD, {}).get(record.SETTINGS, {})
    if change := rate_change(run.config, saved, int(state.step)):
        say(change)
    return state


def _sinks(
    config: ConfigDict,
    run: str,
    first_step: int,
    say: Callable[[str], None],
) -> Sink:
    """Opens what takes the points of the first process; all others write nothing.

    run: its name.
    """
    if jax.process_index():
        return Sink()
    sinks: list[Sink] = [JsonLines(f"{config.workdir}/{FILE}", first_step, say)]
    if "tensorboard" in config.metrics:
        curves = run_directory(f"{config.workdir}/tensorboard", config.workdir)
        writer = TensorBoardWriter(curves, first_step, say)
        writer.text("config", f"```\n{config}\n```")
        sinks.append(writer)
    if "wandb" in config.metrics:
        sinks.append(WandbSink(config.workdir, run, config.to_dict(), say))
    return Sink(*sinks)


def _report(
    run: Run, last_step: int, writer: Sink, say: Callable[[str], None]
) -> Report:
    rates = jax.jit(jax.vmap(run.schedule))
    return Report(
        say=say,
        writer=writer,
        throughput=Throughput.of(list(run.partition.mesh.devices.flat)),
        work=run.work,
        # All at once, before the first step: each by itself would wait for one.
        learning_rates=jax.device_get(rates(jnp.arange(last_step))),
        total_steps=last_step,
        every_steps=run.config.train.log_every_steps,
        stop_after=run.config.guard.stop_after,
        parts=run.objective.part_names,
        held_out_parts=run.held_out.part_names,
    )


def _stop_if(stop: SignalNotice, step: int) -> None:
    """Ends a run that has nothing new to save."""
    if stop.requested():
        raise Preempted(f"step {step}, nothing new to save")


@names_fields
def _connect(config: ConfigDict) -> None:
    processes.connect(**config.hosts)


def silence_writers() -> None:
    """Leaves it to `Checkpoints` and the sinks to report, in a line, failed writes.

    On a full disk Orbax logs the stacks of all its threads, asyncio those of abandoned
    tasks, and threads of tensorstore and TensorBoard end with stacks of their own.
    Coroutines that were about to write warn when Python ends.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    for name in "absl", "asyncio":
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show_ignored = sys.unraisablehook
    show_ended = threading.excepthook

    def ignored(raised: Any) -> None:
        if "Event loop is closed" not in str(raised.exc_value):
            show_ignored(raised)

    def ended(raised: Any) -> None:
        if not type(raised.thread).__module__.startswith("tensorboard."):
            show_ended(raised)

    sys.unraisablehook = ignored
    threading.excepthook = ended


@as_program
def main(arguments: Sequence[str] | None = None) -> int | None:
    """Trains what `--config` or `--workdir` says; returns the exit code."""
    _, rest = Parser(__doc__, epilog=CONFIG_FLAGS).parse_known_args(arguments)
    config = read_config(rest)
    silence_writers()
    prepare_devices(config)
    try:
        if config.hosts.coordinator or not config.simulated_devices:
            _connect(config)
        train(config, (lambda line: None) if jax.process_index() else say)
    except Preempted as stopped:
        say(f"preempted: {stopped}", sys.stderr)
        return PREEMPTED
    except Exception as error:
        lost_processes.leave(error)
        raise


def end(code: int) -> None:
    """Ends the process: threads of Orbax may wait minutes for a save that failed."""
    seconds = LATE_SECONDS * (6 if jax.distributed.is_initialized() else 1)
    late = threading.Timer(seconds, os._exit, [code])
    late.daemon = True
    late.start()
    sys.exit(code)


if __name__ == "__main__":
    end(main())
