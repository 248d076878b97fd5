"""Trains on long sequences: python train.py --config=configs/tiny.py

The run as it happens: mesh, data, model, state, programs, loop. Every object is made
here and handed down, which is why `train` is one long function: it reads from top to
bottom as a run goes. Run the same command again to resume.

Exit codes: 0 the run is complete, 75 it was told to stop (SIGTERM) and has saved,
70 a step hung, 1 an error.
"""

import contextlib
import functools
import sys
from collections.abc import Callable

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

import assemble
import tasks
from data.text import iterate
from training import chips, hosts
from training.checkpoint import Checkpoints
from training.feed import place
from training.goodput import Goodput
from training.guard import BadSteps, Watch, compare_replays
from training.metrics import NullWriter, TensorBoardWriter, Throughput
from training.optimizer import make_optimizer
from training.preemption import Notice, Preempted, notice
from training.report import Report
from training.step import initial_state, make_evaluate_step, make_replay
from training.watchdog import Watchdog
from training.weights import SavedParameters

PREEMPTED = 75
"""Exit code: try again (EX_TEMPFAIL of sysexits.h)."""

CONFIG = config_flags.DEFINE_config_file("config", lock_config=True)


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
      BadSteps: it makes no progress.
      OSError: it cannot save, or read.
    """
    goodput = Goodput()
    assemble.check_counts(config)
    guard = assemble.guard_settings(config)

    # Mesh.
    partition = assemble.partition(config, jax.devices())
    devices = partition.mesh.devices.flatten()
    chip = chips.find(devices[0].device_kind)
    axes = " x ".join(f"{axis} {size}" for axis, size in partition.sizes.items())
    say(f"mesh: {axes}, of {devices.size} x {devices[0].device_kind}")

    # Data, model and loss of the task; the state, as shapes.
    task = tasks.make(config, partition)
    model, sharding, shape = task.model, task.sharding, task.shape
    optimizer, schedule = make_optimizer(assemble.optimizer_settings(config))
    state_shape = assemble.abstract_state(model, optimizer, partition)
    state_sharding = jax.tree.map(lambda leaf: leaf.sharding, state_shape)
    shards = partition.shards(partition.mesh_axes("embed", config.model.hidden_size))
    say(
        f"model: {task.num_parameters:,} parameters in {shards} shards, "
        f"{config.attention} attention"
    )

    with contextlib.ExitStack() as stack:
        told = stack.enter_context(notice())
        watchdog = stack.enter_context(
            Watchdog(guard.first_step_seconds, guard.step_seconds)
        )

        # State: restored, begun from another's parameters, or born sharded.
        checkpoints = stack.enter_context(
            Checkpoints(
                f"{config.workdir}/checkpoints",
                keep=config.checkpoint.keep,
                fingerprint=task.fingerprint,
                say=say,
            )
        )
        checkpoints.check_fingerprint()
        say(f"checkpoints: {config.workdir}/checkpoints")
        say(f"curves: tensorboard --logdir {config.workdir}/tensorboard")
        if checkpoints.latest_step() is not None:
            with goodput.spend("restore"):
                state, _ = checkpoints.restore(state_shape)
            say(f"resuming from step {state.step}")
        elif config.init_from:
            saved = SavedParameters(config.init_from)
            saved.check_model(task.fingerprint, config.init_may_differ)
            parameters = saved.restore(state_shape.params)
            say(f"parameters: of step {saved.step} of {config.init_from}")
            begin = jax.jit(
                lambda parameters: initial_state(parameters, optimizer),
                out_shardings=state_sharding,
                donate_argnums=0,
            )
            state = begin(parameters)
        else:
            create = jax.jit(
                lambda key: initial_state(model.create(key), optimizer),
                out_shardings=state_sharding,
            )
            state = create(jax.random.key(config.seed))
        first_step = int(state.step)
        last_step = _last_step(config, first_step)
        if first_step == last_step:
            say(f"all {last_step} steps are made: raise config.train.steps to go on")
            return {"step": last_step}
        if jax.process_index() == 0:
            goodput.resume(checkpoints.directory.parent / "goodput.json", first_step)

        # Programs.
        _stop_if(told, first_step)
        train_step = assemble.train_step(
            config, task.loss_sum, optimizer, state_shape, task.count
        )
        evaluate = jax.jit(
            make_evaluate_step(task.loss_sum, task.count),
            out_shardings=state_sharding.step,
        )
        replay = jax.jit(
            make_replay(
                task.loss_sum,
                microbatches=config.train.microbatches,
                count=task.count,
            ),
            out_shardings=state_sharding.step,
        )
        with goodput.spend("compile"):
            like = task.batch_like
            train_step = train_step.lower(state_shape, like).compile()
            if task.validation:
                evaluate = evaluate.lower(state_shape.params, like).compile()
        _stop_if(told, first_step)

        # Reports.
        writer = stack.enter_context(
            TensorBoardWriter(f"{config.workdir}/tensorboard", first_step + 1, say)
            if jax.process_index() == 0
            else NullWriter()
        )
        writer.text("config", f"```\n{config}\n```")
        throughput = Throughput(
            num_devices=devices.size, peak_flops=chip.peak_flops if chip else None
        )
        report = Report(
            say=say,
            writer=writer,
            throughput=throughput,
            work=task.work,
            schedule=schedule,
            total_steps=last_step,
            every_steps=config.train.log_every_steps,
            watch=Watch(guard.stop_after, say),
            part_names=task.part_names,
        )

        # Loop.
        reading = iterate(
            task.batches,
            first_step,
            threads=config.data.threads,
            buffered_steps=config.data.buffered_steps,
        )
        stack.enter_context(contextlib.closing(reading))
        goodput.switch("step")
        for step in range(first_step + 1, last_step + 1):
            with goodput.spend("data"):
                _, blocks = next(reading)
                batch = place(blocks, sharding, shape)
            state, metrics = train_step(state, batch)
            report.step(step, metrics)
            if guard.replay:
                report.flush()
                if report.last["skipped_in_row"]:
                    replays = [replay(state.params, batch) for _ in range(2)]
                    say(compare_replays(step, report.last, jax.device_get(replays)))
            watchdog.step()
            goodput.step(step)
            if task.validation and _is_due(
                step, config.train.validate_every_steps, last_step
            ):
                report.flush()
                watchdog.pause()
                with throughput.exclude(after=metrics), goodput.spend("evaluation"):
                    sums = []
                    while len(sums) < len(task.validation) and not told.arrived():
                        held_out = place(
                            task.validation[len(sums)], sharding, shape
                        )
                        sums.append(jax.device_get(evaluate(state.params, held_out)))
                    if len(sums) == len(task.validation):
                        report.validation(step, sums)
            stops = told.arrived() and step < last_step
            if _is_due(step, config.checkpoint.save_every_steps, last_step, stops):
                report.flush()
                watchdog.pause()
                with throughput.exclude(after=metrics), goodput.spend("save"):
                    writer.flush()  # a run killed after the save resumes from here
                    checkpoints.save(step, state)
                goodput.record(step)
            if stops or _is_due(step, config.train.log_every_steps, last_step):
                writer.scalars(step, goodput.points())
            if stops:
                break
        report.flush()
        with goodput.spend("save"):
            checkpoints.close()
        goodput.record(step)
    where = f"checkpoint and curves in {config.workdir}; {goodput}"
    if step < last_step:
        raise Preempted(f"step {step} of {last_step}, {where}")
    say(f"done: step {last_step}, {where}")
    return {"step": last_step, **report.last}


def _stop_if(told: Notice, step: int) -> None:
    """Ends a run that has made nothing that would have to be saved."""
    if told.arrived():
        raise Preempted(f"step {step}, nothing new to save")


def _last_step(config: ml_collections.ConfigDict, first_step: int) -> int:
    """The step to end at: a run that is complete may go on for a while."""
    if first_step < config.train.steps:
        return config.train.steps
    return first_step + config.train.extra_steps


def _is_due(step: int, every_steps: int, last_step: int, stops: bool = False) -> bool:
    """At multiples and after the last step; every 0 steps: never."""
    is_last = stops or step == last_step
    return every_steps > 0 and (step % every_steps == 0 or is_last)


def _silent(line: str) -> None:
    """What every process but the first says."""


def parse_flags(arguments: list[str]) -> list[str]:
    """The arguments that are no flags; ends the program where a flag is wrong."""
    try:
        return app.parse_flags_with_usage(arguments)
    except (AttributeError, KeyError, OSError) as error:
        cause = error.args[0]
        cause = cause.args[0] if isinstance(cause, KeyError) else cause
        sys.exit(f"error: {' '.join(str(cause or error).split())}")


def main(arguments: list[str]) -> None:
    """Trains what `--config` says."""
    if len(arguments) > 1:
        raise app.UsageError(f"unknown arguments {arguments[1:]}: see configs/base.py")
    config = CONFIG.value
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of a save
    assemble.simulate_devices(config)
    try:
        if config.hosts.coordinator or not config.simulated_devices:
            hosts.connect(**config.hosts)
        is_first = jax.process_index() == 0
        # Told at once: what ends a run that hangs does not empty buffers.
        train(config, functools.partial(print, flush=True) if is_first else _silent)
    except Preempted as stopped:
        print(f"preempted: {stopped}", file=sys.stderr)
        sys.exit(PREEMPTED)
    except (ValueError, OSError, BadSteps) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=parse_flags)
