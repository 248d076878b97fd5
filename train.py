"""Trains on long sequences: python train.py --config=configs/tiny.py

The run as it happens: mesh, data, model, state, programs, loop. Every object is made
here and handed down: `train` reads from top to bottom as a run goes, and hands over to
the loop of `training/loop.py`. Run the same command again to resume.

Exit codes: 0 the run is complete, 75 it was told to stop (SIGTERM, Ctrl-C) and has
saved, 70 a step hung or another process was lost, 1 an error.
"""

import signal

if __name__ == "__main__":  # Ctrl-C while the rest is imported shows no stack
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import optax

from data.text import iterate
from tasks import base as assemble
from tasks import config_checks
from tasks import task as tasks
from tasks.command_line import Parser, as_program, read_config
from tasks.config_errors import names_fields
from tasks.task import Task
from training import chips, hosts, peers, record
from training.checkpoint import Checkpoints
from training.feed import place
from training.goodput import Goodput
from training.guard import Watch
from training.loop import Intervals, Loop, Programs
from training.metrics import (
    NullWriter,
    TensorBoardWriter,
    Throughput,
    run_directory,
)
from training.optimizer import make_optimizer
from training.preemption import Notice, Preempted, notice
from training.profiler import Profiler
from training.report import Losses, Report
from training.step import (
    TrainState,
    initial_state,
    make_evaluate_step,
    make_replay,
)
from training.watchdog import Watchdog
from training.weights import SavedParameters
from training.workdir import locked, make_writable

PREEMPTED = 75
"""Exit code: try again (EX_TEMPFAIL of sysexits.h)."""


def train(
    config: ml_collections.ConfigDict, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Runs a config to its end, from its newest checkpoint if there is one.

    Args:
      config: see configs/base.py.
      say: prints a line of progress.

    Returns:
      `step`, and the last `loss` and `validation_loss` (nats per token of text, squared
      error of an agent's actions), if any.

    Raises:
      ValueError, FileNotFoundError: something in the config, the corpus or the
        checkpoint is wrong; before anything is compiled.
      Preempted: it was told to stop, and has saved.
      BadSteps: it makes no progress, or its state is not finite.
      OSError: it cannot save, or read.
    """
    goodput = Goodput()
    settings = record.agreed(lambda: _checked_settings(config, say))
    guard = assemble.guard_settings(config)
    profiler = Profiler.of(config.profile, f"{config.workdir}/tensorboard", say)

    # Mesh.
    partition = assemble.partition(config, jax.devices())
    devices = partition.mesh.devices.flatten()
    axes = " x ".join(f"{axis} {size}" for axis, size in partition.sizes.items())
    say(f"mesh: {axes}, of {devices.size} x {devices[0].device_kind}")

    # Data, model and loss of the task; the state, as shapes.
    task = tasks.make(config, partition)
    config_checks.check_attention(config, partition)
    optimizer, schedule = make_optimizer(assemble.optimizer_settings(config))
    state_like = assemble.abstract_state(task.model, optimizer, partition)
    shards = partition.shards(partition.mesh_axes("embed", config.model.hidden_size))
    say(
        f"model: {task.num_parameters:,} parameters in {shards} shards, "
        f"{config.attention} attention"
    )

    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(locked(config.workdir, say))
            make_writable(f"{config.workdir}/tensorboard")
        told = stack.enter_context(notice())
        watchdog = stack.enter_context(
            Watchdog(guard.first_step_seconds, guard.step_seconds)
        )

        # State.
        checkpoints = stack.enter_context(
            Checkpoints(
                f"{config.workdir}/checkpoints",
                keep=config.checkpoint.keep,
                fingerprint=task.fingerprint,
                say=say,
            )
        )
        checkpoints.check_fingerprint()
        checkpoints.record = record.continued(
            checkpoints.records(), settings, config.may_change, say
        )
        say(f"checkpoints: {config.workdir}/checkpoints")
        say(f"curves: tensorboard --logdir {config.workdir}/tensorboard")
        if checkpoints.latest_step() is not None:
            with goodput.spend("restore"):
                state, _ = checkpoints.restore(state_like)
            say(f"resuming from step {state.step}")
        else:
            state = _first_state(config, task, optimizer, state_like, say)
        first_step = int(state.step)
        last_step = _last_step(config, first_step)
        if first_step == last_step:
            say(f"all {last_step} steps are made: raise config.train.steps to go on")
            return {"step": last_step}
        if jax.process_index() == 0:
            seconds = checkpoints.directory.parent / "goodput.json"
            goodput.resume(seconds, first_step, say)

        # Programs.
        _stop_if(told, first_step)
        with goodput.spend("compile"):
            programs = _compile(config, task, optimizer, state_like)
        _stop_if(told, first_step)

        # Reports.
        every = _intervals(config)
        report = Report(
            say=say,
            writer=stack.enter_context(_writer(config, first_step + 1, say)),
            throughput=_throughput(devices),
            work=task.work,
            schedule=schedule,
            total_steps=last_step,
            every_steps=every.log,
            watch=Watch(guard.stop_after, say),
            losses=Losses(
                task.objective.unit,
                parts=task.objective.part_names,
                held_out_parts=task.held_out.part_names,
                validates=bool(task.validation and every.validate),
            ),
        )

        # Loop.
        stack.enter_context(profiler)
        batches = iterate(
            task.batches,
            first_step,
            threads=config.data.threads,
            buffered_steps=config.data.buffered_steps,
        )
        stack.enter_context(contextlib.closing(batches))
        loop = Loop(
            programs=programs,
            place=lambda blocks: place(blocks, task.sharding, task.shape),
            held_out=task.validation,
            every=every,
            checkpoints=checkpoints,
            report=report,
            goodput=goodput,
            watchdog=watchdog,
            profiler=profiler,
            told=told,
        )
        step = loop.run(state, batches, first_step)
    where = f"checkpoint and curves in {config.workdir}; {goodput}"
    if step < last_step:
        raise Preempted(f"step {step} of {last_step}, {where}")
    say(f"done: step {last_step}, {where}")
    return {"step": last_step, **report.last}


def _checked_settings(
    config: ml_collections.ConfigDict, say: Callable[[str], None]
) -> dict[str, Any]:
    """What makes the run (see `tasks.settings`), of a config without errors."""
    config_checks.check(config, jax.device_count())
    return tasks.settings(config, say)


def _first_state(
    config: ml_collections.ConfigDict,
    task: Task,
    optimizer: optax.GradientTransformation,
    like: TrainState,
    say: Callable[[str], None],
) -> TrainState:
    """The state of step 0: begun from another run's parameters, or born sharded.

    like: shapes, types and shardings.

    Raises:
      ValueError, FileNotFoundError: there are no such parameters.
    """
    sharding = jax.tree.map(lambda leaf: leaf.sharding, like)
    if not config.init_from:
        create = jax.jit(
            lambda key: initial_state(task.model.create(key), optimizer),
            out_shardings=sharding,
        )
        return create(jax.random.key(config.seed))
    saved = SavedParameters(config.init_from)
    saved.check_model(task.fingerprint, config.may_change)
    parameters = saved.restore(like.params)
    say(f"parameters: of step {saved.step} of {config.init_from}")
    begin = jax.jit(
        lambda parameters: initial_state(parameters, optimizer),
        out_shardings=sharding,
        donate_argnums=0,
    )
    return begin(parameters)


def _compile(
    config: ml_collections.ConfigDict,
    task: Task,
    optimizer: optax.GradientTransformation,
    state: TrainState,
) -> Programs:
    """The run's programs, compiled but for the replay, which is seldom needed.

    state: shapes, types and shardings.
    """
    loss_sum, count = task.objective.loss_sum, task.objective.count
    whole = state.step.sharding
    train_step = assemble.train_step(config, loss_sum, optimizer, state, count)
    train_step = train_step.lower(state, task.batch_like).compile()
    evaluate = make_evaluate_step(task.held_out.loss_sum, task.held_out.count)
    options = chips.compiler_options(whole.mesh.devices.flat[0].device_kind)
    evaluate = jax.jit(evaluate, out_shardings=whole, compiler_options=options)
    if task.validation:
        evaluate = evaluate.lower(state.params, task.batch_like).compile()
    if not config.guard.replay:
        return Programs(train_step, evaluate, None)
    replay = make_replay(loss_sum, microbatches=config.train.microbatches, count=count)
    replay = jax.jit(replay, out_shardings=whole, compiler_options=options)
    return Programs(train_step, evaluate, replay)


def _writer(
    config: ml_collections.ConfigDict, first_step: int, say: Callable[[str], None]
) -> TensorBoardWriter | NullWriter:
    """Of the first process; all others write nothing."""
    if jax.process_index():
        return NullWriter()
    curves = run_directory(f"{config.workdir}/tensorboard", config.workdir)
    writer = TensorBoardWriter(curves, first_step, say)
    writer.text("config", f"```\n{config}\n```")
    return writer


def _throughput(devices: Sequence[jax.Device]) -> Throughput:
    chip = chips.find(devices[0].device_kind)
    peak_flops = chip.peak_flops if chip else None
    return Throughput(num_devices=len(devices), peak_flops=peak_flops)


def _stop_if(told: Notice, step: int) -> None:
    """Ends a run that has made nothing that would have to be saved."""
    if told.arrived():
        raise Preempted(f"step {step}, nothing new to save")


def _last_step(config: ml_collections.ConfigDict, first_step: int) -> int:
    """The step to end at: a run that is complete may go on for a while."""
    if first_step < config.train.steps:
        return config.train.steps
    return first_step + config.train.extra_steps


def _intervals(config: ml_collections.ConfigDict) -> Intervals:
    return Intervals(
        log=config.train.log_every_steps,
        validate=config.train.validate_every_steps,
        save=config.checkpoint.save_every_steps,
    )


@names_fields
def _connect(config: ml_collections.ConfigDict) -> None:
    hosts.connect(**config.hosts)


def _silent(line: str) -> None:
    """What every process but the first says."""


def silence_writers() -> None:
    """Leaves it to `Checkpoints` and the curves to say, in a line, what is not written.

    On a full disk Orbax logs the stacks of all its threads, asyncio those of abandoned
    tasks, and threads of tensorstore and TensorBoard end with stacks of their own.
    """
    for name in "absl", "asyncio":
        logging.getLogger(name).setLevel(logging.CRITICAL)
    show_ignored, show_ended = sys.unraisablehook, threading.excepthook

    def ignored(raised: Any) -> None:
        if "Event loop is closed" not in str(raised.exc_value):
            show_ignored(raised)

    def ended(raised: Any) -> None:
        if not type(raised.thread).__module__.startswith("tensorboard."):
            show_ended(raised)

    sys.unraisablehook, threading.excepthook = ignored, ended


@as_program
def main(arguments: Sequence[str] | None = None) -> int | None:
    """Trains what `--config` says; returns the exit code."""
    _, rest = Parser(__doc__).parse_known_args(arguments)
    config = read_config(rest)
    silence_writers()
    assemble.simulate_devices(config)
    if config.hosts.coordinator or not config.simulated_devices:
        _connect(config)
    is_first = jax.process_index() == 0
    try:
        # Told at once: what ends a run that hangs does not empty buffers.
        train(config, functools.partial(print, flush=True) if is_first else _silent)
    except Preempted as stopped:
        print(f"preempted: {stopped}", file=sys.stderr)
        return PREEMPTED
    except Exception as error:
        peers.leave(error)
        raise


if __name__ == "__main__":
    sys.exit(main())
