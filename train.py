"""Trains a LLaMA on long sequences: python train.py --config=configs/tiny.py

The run as it happens: mesh, data, model, state, programs, loop. Every object is made
here and handed down, which is why `train` is one long function: it reads from top to
bottom as a run goes. Run the same command again to resume.
"""

import contextlib
import sys
from collections.abc import Callable

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

import assemble
from data.corpus import prepare_standard_library
from data.text import iterate
from models.flops import num_parameters
from training import chips
from training.checkpoint import Checkpoints
from training.feed import place
from training.metrics import NullWriter, TensorBoardWriter, Throughput
from training.optimizer import make_optimizer
from training.report import Report
from training.step import initial_state, make_evaluate_step
from training.weights import SavedParameters

CONFIG = config_flags.DEFINE_config_file("config", lock_config=True)


def train(
    config: ml_collections.ConfigDict, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Runs a config to its end, from its newest checkpoint if there is one.

    Args:
      config: see configs/base.py.
      say: prints a line of progress.

    Returns:
      `step`, and the last `loss` and `validation_loss` in nats per token, if any.

    Raises:
      ValueError, FileNotFoundError: something in the config, the corpus or the
        checkpoint is wrong; before anything is compiled.
    """
    assemble.check_counts(config)

    # Mesh.
    partition = assemble.partition(config, jax.devices())
    devices = partition.mesh.devices.flatten()
    chip = chips.find(devices[0].device_kind)
    axes = " x ".join(f"{axis} {size}" for axis, size in partition.sizes.items())
    say(f"mesh: {axes}, of {devices.size} x {devices[0].device_kind}")

    # Data.
    if not config.data.corpus:
        prepare_standard_library(assemble.STANDARD_LIBRARY)
    batches = assemble.batches(config, partition, "train")
    validation = assemble.validation_batches(config, partition)
    shape = assemble.batch_shape(config)
    sharding = assemble.batch_sharding(config, partition)

    # Model and optimizer, as shapes.
    model = assemble.model(config, partition)
    optimizer, schedule = make_optimizer(assemble.optimizer_settings(config))
    state_shape = assemble.abstract_state(model, optimizer, partition)
    state_sharding = jax.tree.map(lambda leaf: leaf.sharding, state_shape)
    loss_sum = assemble.loss_function(config, model, partition)
    shards = partition.shards(partition.mesh_axes("embed", config.model.hidden_size))
    say(
        f"model: {num_parameters(model.config):,} parameters in {shards} shards, "
        f"{config.attention} attention"
    )

    with contextlib.ExitStack() as stack:
        # State: restored, begun from another's parameters, or born sharded.
        checkpoints = stack.enter_context(
            Checkpoints(
                f"{config.workdir}/checkpoints",
                keep=config.checkpoint.keep,
                fingerprint=assemble.fingerprint(model),
            )
        )
        checkpoints.check_fingerprint()
        say(f"checkpoints: {config.workdir}/checkpoints")
        say(f"curves: tensorboard --logdir {config.workdir}/tensorboard")
        if checkpoints.latest_step() is not None:
            state, _ = checkpoints.restore(state_shape)
            say(f"resuming from step {state.step}")
        elif config.init_from:
            saved = SavedParameters(config.init_from)
            saved.check_model(assemble.fingerprint(model), config.init_may_differ)
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

        # Programs.
        train_step = assemble.train_step(config, loss_sum, optimizer, state_shape)
        evaluate = jax.jit(
            make_evaluate_step(loss_sum), out_shardings=state_sharding.step
        )

        # Reports.
        writer = stack.enter_context(
            TensorBoardWriter(f"{config.workdir}/tensorboard", first_step + 1)
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
            work=assemble.step_work(config, model),
            schedule=schedule,
            total_steps=last_step,
            every_steps=config.train.log_every_steps,
        )

        # Loop.
        reading = iterate(
            batches,
            first_step,
            threads=config.data.threads,
            buffered_steps=config.data.buffered_steps,
        )
        stack.enter_context(contextlib.closing(reading))
        for step in range(first_step + 1, last_step + 1):
            _, blocks = next(reading)
            state, metrics = train_step(state, place(blocks, sharding, shape))
            report.step(step, metrics)
            if validation and _is_due(
                step, config.train.validate_every_steps, last_step
            ):
                report.flush()
                with throughput.exclude(after=metrics):
                    sums = [
                        evaluate(state.params, place(validation[i], sharding, shape))
                        for i in range(len(validation))
                    ]
                    report.validation(step, sums)
            if _is_due(step, config.checkpoint.save_every_steps, last_step):
                report.flush()
                writer.flush()  # a run killed after the save resumes from this point
                with throughput.exclude(after=metrics):
                    checkpoints.save(step, state)
        report.flush()
    say(f"done: step {last_step}, checkpoint and curves in {config.workdir}")
    return {"step": last_step, **report.last}


def _last_step(config: ml_collections.ConfigDict, first_step: int) -> int:
    """The step to end at: a run that is complete may go on for a while."""
    if first_step < config.train.steps:
        return config.train.steps
    return first_step + config.train.extra_steps


def _is_due(step: int, every_steps: int, last_step: int) -> bool:
    """At multiples and after the last step; every 0 steps: never."""
    return every_steps > 0 and (step % every_steps == 0 or step == last_step)


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
        train(config)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=parse_flags)
