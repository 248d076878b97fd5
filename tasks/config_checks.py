"""Checks a config, and reports everything that is wrong with it at once."""

import contextlib
import functools
import importlib.util
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from data.agents.chains import ORDERS, PREDICTED
from data.rows import ROW_PLANS
from kernels.backends import IMPLEMENTATIONS
from kernels.masks import Visible
from tasks import corpora
from tasks.config_errors import names_fields, raise_all
from tasks.run import Run
from tasks.state import guard_settings, optimizer_settings
from tasks.systems import (
    COMPUTE_DTYPES,
    attention_system,
    check_execution,
    document_mask,
    mesh_shape,
)
from tasks.task import RUNS, TASKS
from training.mesh import Partition
from training.profiler import Profiler
from training.sinks import NAMES as SINKS

LEAST = {
    "loss_chunk_tokens": 0,
    "feed_forward_chunk_tokens": 0,
    "simulated_devices": 0,
    "seed": 0,
    "data.context_tokens": 1,
    "data.balanced_steps": 0,
    "data.threads": 0,
    "train.log_every_steps": 1,
    "train.validate_every_steps": 1,
    "train.validation_batches": 0,
    "train.extra_steps": 0,
    "checkpoint.save_every_steps": 0,
    "checkpoint.keep": 1,
}
"""Smallest valid value of each numeric field."""


def check(config: ConfigDict, devices: int | None) -> None:
    """Checks a config by itself, for a run on this many devices; None: on any.

    What depends on the corpus and on the kind of device is found later.

    Raises:
      ValueError: lists everything that is wrong.
    """
    checks: list[Callable[[ConfigDict], object]] = [
        _fields,
        corpora.named,
        attention_system,
        check_execution,
        optimizer_settings,
        guard_settings,
        _sizes,
        document_mask,
    ]
    if devices is not None:
        checks.append(functools.partial(_batch, devices=devices))
    raise_all(functools.partial(check, config) for check in checks)


def _get(config: ConfigDict, name: str) -> Any:
    return functools.reduce(lambda part, key: part[key], name.split("."), config)


def _fields(config: ConfigDict) -> None:
    parts = _numbers, _names, _places, _of_text, _reports, _placement
    found = [line for part in parts for line in part(config)]
    if config.task == "exorl":
        found += _shares(config)
    if found:
        raise ValueError("; ".join(found))


def _numbers(config: ConfigDict) -> Iterator[str]:
    for name, least in LEAST.items():
        value = _get(config, name)
        if value < least:
            yield f"config.{name}={value} must be at least {least}"
    if config.seed >= 2**32:
        yield f"{config.seed=} must be below 2^32"


def _names(config: ConfigDict) -> Iterator[str]:
    known: dict[str, Collection[str]] = {
        "task": TASKS,
        "implementation": ("", *IMPLEMENTATIONS),
        "data.rows": ROW_PLANS,
        "lora.base_dtype": ("", *COMPUTE_DTYPES),
    }
    if config.task == "exorl":
        known |= {"data.chain_order": ORDERS, "data.predict": PREDICTED}
    for name, choices in known.items():
        value = _get(config, name)
        if value not in choices:
            wanted = ", ".join(choice or '""' for choice in choices)
            yield f"config.{name}={value!r} must be one of {wanted}"


def _sizes(config: ConfigDict) -> None:
    with contextlib.suppress(FileNotFoundError):  # no corpus: found later
        TASKS.get(config.task, TASKS["text"]).sizes(config)


def _places(config: ConfigDict) -> Iterator[str]:
    for name in ("workdir", "init_from"):
        kind, is_bucket, _ = config[name].partition("://")
        said = f"config.{name}={config[name]!r}"
        if is_bucket and kind != "gs" or name == "workdir" and not config[name]:
            yield f"{said} must be a directory or gs://BUCKET/RUN"  # Orbax takes these
        elif is_bucket and not importlib.util.find_spec("gcsfs"):
            yield (
                f"{said} needs gcsfs, which is not installed: make venv "
                "ACCELERATOR=buckets, or pip install gcsfs"
            )


def _of_text(config: ConfigDict) -> Iterator[str]:
    if config.lora.rank and config.task != "text":
        yield f"{config.lora.rank=} is for task text: set it to 0"
    elif config.lora.rank and not config.init_from:
        yield (
            f"{config.lora.rank=} needs the weights that its adapters belong to: set "
            "config.init_from, or config.lora.rank=0"
        )
    if config.task != "text" and config.optimizer.parameters != "float32":
        yield f"{config.optimizer.parameters=} is for task text: set it to float32"


def _reports(config: ConfigDict) -> Iterator[str]:
    if not {*config.metrics} <= {*SINKS} or len({*config.metrics}) < len(
        config.metrics
    ):
        yield (
            f"{config.metrics=} must name each of its sinks once, of "
            f"{', '.join(SINKS)}, as in \"('tensorboard', 'wandb')\""
        )
    if "wandb" in config.metrics and not importlib.util.find_spec("wandb"):
        yield (
            f"{config.metrics=} needs wandb, which is not installed: make venv "
            'ACCELERATOR=wandb (beside a GPU, "gpu wandb"), or pip install -r '
            "requirements-wandb.txt"
        )
    try:
        first = Profiler(config.profile, config.workdir, print).first
    except ValueError as error:
        yield str(error)
    else:
        if first > config.train.steps and not config.train.extra_steps:
            yield f"{config.profile=} begins after {config.train.steps=}"


def _placement(config: ConfigDict) -> Iterator[str]:
    wanted = {
        "remat": (config.remat != "everything", "nothing"),
        "remat_budget_gib": (not config.remat_budget_gib, 0.0),
        "train.microbatches": (config.train.microbatches == 1, 1),
        "model.layer_pattern": (len({*config.model.layer_pattern}) < 2, ""),
    }
    for name, (is_met, value) in wanted.items():
        if config.optimizer.placement == "host_all" and not is_met:
            yield (
                f"config.{name}={_get(config, name)!r} cannot be with "
                f"{config.optimizer.placement=}, which takes and gives a layer at a "
                f"time: set it to {value!r}, or config.optimizer.placement='host'"
            )


def _shares(config: ConfigDict) -> Iterator[str]:
    data = config.data
    if not 0 < data.held_out_share < 1:
        yield f"{config.data.held_out_share=} must be above 0 and below 1"
    if not 0 < data.top_share <= 1:
        yield f"{config.data.top_share=} must be above 0, and at most 1"
    if not 0 <= data.latest_begin <= 1:
        yield f"{config.data.latest_begin=} must be from 0 to 1"
    if not config.agent.return_scale < math.inf:
        yield f"{config.agent.return_scale=} must be a finite number"


@names_fields
def _batch(config: ConfigDict, devices: int) -> None:
    """Checks that mesh, batch and devices fit each other."""
    mesh = mesh_shape(config, devices).abstract_mesh()
    RUNS.get(config.task, RUNS["text"])(config, Partition(mesh)).check_batch()


def check_attention(run: Run) -> None:
    """Traces the run's attention, forward and backward, for these devices.

    Traces nothing for a perceptron, which has no attention.

    Raises:
      ValueError: the implementation does not run on them, or not with these sizes.
    """
    config = run.config
    if config.task == "exorl" and config.agent.method == "perceptron":
        return
    rows, columns = run.token_shape
    shape = rows // config.train.microbatches, columns

    def array(dtype: Any, *more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *more), jnp.dtype(dtype))

    def attend(q: jax.Array, k: jax.Array, bound: jax.Array) -> jax.Array:
        out = run.attention(q, k, k, visible=Visible(bound, bound))
        return out.astype(jnp.float32).sum()

    heads = config.model.num_heads, config.model.num_kv_heads
    kinds = [array(config.compute_dtype, n, config.model.head_dim) for n in heads]
    try:
        jax.eval_shape(jax.grad(attend), *kinds, array(jnp.int32))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{config.implementation=} cannot attend with {config.compute_dtype=} and "
            f"{config.model.head_dim=} here: {error}"
        ) from error
