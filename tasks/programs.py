"""Builds what a run starts with: its compiled programs and its first state."""

from collections.abc import Callable
from typing import Any

import jax
import ml_collections

from kernels.compiler import compiler_options
from tasks import base
from tasks.base import Data, Task
from training.loop import Programs
from training.step import TrainState, initial_state, make_evaluate_step, make_replay
from training.update import Optimizer
from training.weights import SavedParameters


def compile_programs(
    config: ml_collections.ConfigDict,
    task: Task,
    optimizer: Optimizer,
    state: TrainState,
    frozen: Any,
) -> Programs:
    """Compiles the run's programs; the replay, seldom needed, only when it is called.

    state: shapes, dtypes and shardings.
    frozen: parameters that are not trained, with which the programs are called; an
      empty tree where all are.
    """
    rest = (frozen,) if frozen else ()
    loss_sum, count = task.objective.loss_sum, task.objective.count
    whole = state.step.sharding
    train_step = base.train_step(config, loss_sum, optimizer, state, count)
    train_step = train_step.lower(state, task.batch_like, *rest).compile()
    evaluate = make_evaluate_step(task.held_out.loss_sum, task.held_out.count)
    options = compiler_options(whole.mesh.devices.flat[0].device_kind)
    evaluate = jax.jit(evaluate, out_shardings=whole, compiler_options=options)
    if config.train.validation_batches:
        evaluate = evaluate.lower(state.params, task.batch_like, *rest).compile()

    def beside(program: Callable) -> Callable:
        return lambda held, batch: program(held, batch, *rest)

    if not config.guard.replay:
        return Programs(beside(train_step), beside(evaluate), None)
    replay = make_replay(loss_sum, microbatches=config.train.microbatches, count=count)
    replay = jax.jit(replay, out_shardings=whole, compiler_options=options)
    return Programs(*map(beside, (train_step, evaluate, replay)))


def first_state(
    config: ml_collections.ConfigDict,
    task: Task,
    data: Data,
    optimizer: Optimizer,
    like: TrainState,
    say: Callable[[str], None],
) -> TrainState:
    """Creates the sharded state of step 0, from `config.init_from` or at random.

    At random where the parameters of `config.init_from` are frozen.

    like: shapes, dtypes and shardings.

    Raises:
      ValueError, FileNotFoundError: the parameters are missing.
    """
    sharding = jax.tree.map(lambda leaf: leaf.sharding, like)
    if not config.init_from or task.model.frozen_shapes:
        create = jax.jit(
            lambda key: initial_state(task.model.create(key), optimizer),
            out_shardings=sharding,
        )
        return create(jax.random.key(config.seed))
    saved = SavedParameters(config.init_from)
    saved.check_model(data.fingerprint, config.may_change)
    parameters = saved.restore(like.params)
    say(f"parameters: of step {saved.step} of {config.init_from}")
    begin = jax.jit(
        lambda parameters: initial_state(parameters, optimizer),
        out_shardings=sharding,
        donate_argnums=0,
    )
    return begin(parameters)
