"""Builds what a run starts with: its compiled programs and its first state."""

from collections.abc import Callable

import jax
import ml_collections

from kernels.compiler import compiler_options
from tasks import base
from tasks.base import Data, Task
from training.loop import Programs
from training.optimizer import Optimizer
from training.step import TrainState, initial_state, make_evaluate_step, make_replay
from training.weights import SavedParameters


def compile_programs(
    config: ml_collections.ConfigDict,
    task: Task,
    optimizer: Optimizer,
    state: TrainState,
) -> Programs:
    """Compiles the run's programs; the replay, seldom needed, only when it is called.

    state: shapes, dtypes and shardings.
    """
    loss_sum, count = task.objective.loss_sum, task.objective.count
    whole = state.step.sharding
    train_step = base.train_step(config, loss_sum, optimizer, state, count)
    train_step = train_step.lower(state, task.batch_like).compile()
    evaluate = make_evaluate_step(task.held_out.loss_sum, task.held_out.count)
    options = compiler_options(whole.mesh.devices.flat[0].device_kind)
    evaluate = jax.jit(evaluate, out_shardings=whole, compiler_options=options)
    if config.train.validation_batches:
        evaluate = evaluate.lower(state.params, task.batch_like).compile()
    if not config.guard.replay:
        return Programs(train_step, evaluate, None)
    replay = make_replay(loss_sum, microbatches=config.train.microbatches, count=count)
    replay = jax.jit(replay, out_shardings=whole, compiler_options=options)
    return Programs(train_step, evaluate, replay)


def first_state(
    config: ml_collections.ConfigDict,
    task: Task,
    data: Data,
    optimizer: Optimizer,
    like: TrainState,
    say: Callable[[str], None],
) -> TrainState:
    """Creates the sharded state of step 0, from `config.init_from` or at random.

    like: shapes, dtypes and shardings.

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
    saved.check_model(data.fingerprint, config.may_change)
    parameters = saved.restore(like.params)
    say(f"parameters: of step {saved.step} of {config.init_from}")
    begin = jax.jit(
        lambda parameters: initial_state(parameters, optimizer),
        out_shardings=sharding,
        donate_argnums=0,
    )
    return begin(parameters)
