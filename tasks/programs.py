"""The programs of a run, and the parameters that they begin with.

A run with adapters (`config.lora`) freezes the parameters of `config.init_from`. Its
checkpoints hold the adapters and the identity of what they belong to.
"""

from collections.abc import Callable
from typing import Any

import jax

from tasks.parts import Data
from tasks.run import Run
from tasks.state import abstract_frozen, identity, sharding_of
from training.loop import Programs
from training.saved.weights import SavedParameters
from training.step import (
    TrainState,
    initial_state,
    make_evaluate_step,
    make_replay,
)

BASE = "base_weights"
"""Key of the frozen parameters' identity in a fingerprint."""


def compile_programs(run: Run, frozen: Any) -> Programs:
    """Compiles the run's programs; the replay, seldom needed, only when it is called.

    frozen: parameters that are not trained, with which the programs are called; an
      empty tree where all are.
    """
    config = run.config
    state = run.state_like
    batch = run.batch_like
    rest = (frozen,) if frozen else ()
    whole = state.step.sharding
    train_step = run.train_step().lower(state, batch, *rest).compile()
    evaluate = make_evaluate_step(run.held_out.loss_sum, run.held_out.count)
    options = run.compiler_options
    evaluate = jax.jit(evaluate, out_shardings=whole, compiler_options=options)
    if config.train.validation_batches:
        evaluate = evaluate.lower(state.params, batch, *rest).compile()

    def beside(program: Callable) -> Callable:
        return lambda held, batch: program(held, batch, *rest)

    if not config.guard.replay:
        return Programs(beside(train_step), beside(evaluate), None)
    # Not compiled ahead: few runs ever replay a step.
    replay = make_replay(
        run.objective.loss_sum,
        microbatches=config.train.microbatches,
        count=run.objective.count,
    )
    replay = jax.jit(replay, out_shardings=whole, compiler_options=options)
    return Programs(beside(train_step), beside(evaluate), beside(replay))


def first_state(run: Run, data: Data, say: Callable[[str], None]) -> TrainState:
    """Creates the sharded state of step 0, from `config.init_from` or at random.

    At random where the parameters of `config.init_from` are frozen.

    Raises:
      ValueError, FileNotFoundError: the parameters are missing.
    """
    config, like, optimizer = run.config, run.state_like, run.optimizer
    sharding = sharding_of(like)
    if not config.init_from or run.model.frozen_shapes:
        create = jax.jit(
            lambda key: initial_state(run.model.create(key), optimizer),
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


def identify_frozen(run: Run) -> dict[str, str]:
    """Returns what a fingerprint says of the frozen parameters; nothing without any.

    Reads no array.

    Raises:
      ValueError, FileNotFoundError: the parameters are missing, or of another model.
    """
    config, model = run.config, run.model
    if not model.frozen_shapes:
        return {}
    saved = SavedParameters(config.init_from)
    sizes = identity(model.config)
    sizes.pop("lora")
    if "lora" in saved.fingerprint.get("model", {}):
        raise ValueError(
            f"{config.init_from=} holds adapters, and no model: export it with "
            "tools/convert_hf.py, which merges them, and import that"
        )
    saved.check_model({"model": sizes}, config.may_change)
    return {BASE: str(saved)}


def read_frozen(run: Run, say: Callable[[str], None] = print) -> Any:
    """Reads the frozen parameters onto the mesh; an empty tree without them.

    Raises:
      ValueError: they are damaged, or do not fit the model.
    """
    config, model = run.config, run.model
    if not model.frozen_shapes:
        return {}
    saved = SavedParameters(config.init_from)
    frozen = saved.restore(abstract_frozen(model, run.partition))
    line = f"frozen parameters: of step {saved.step} of {config.init_from}"
    if saved.rounded:
        line += (
            f",\n  {saved.rounded} matrices rounded to bfloat16 "
            f"({config.compute_dtype=} {config.lora.base_dtype=})"
        )
    say(line)
    return frozen
