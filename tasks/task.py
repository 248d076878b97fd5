"""Checks a config, makes the run of the task that it names, records its settings."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from data.agents.chains import ORDERS, PREDICTED
from data.rows import ROW_PLANS
from kernels.backends import IMPLEMENTATIONS
from kernels.cost.work import Row
from kernels.devices.compiler import GPU_TRANSFERS
from kernels.masks import Visible
from tasks import corpora, exorl, text
from tasks.config_errors import fields_by_name, names_fields
from tasks.memory_choice import settled
from tasks.run import Run
from tasks.state import guard_settings, optimizer_settings
from tasks.systems import (
    AUTO,
    COMPUTE_DTYPES,
    attention_system,
    check_execution,
    document_mask,
    mesh_shape,
    partition,
)
from training.reports.profiler import Profiler
from training.reports.sinks import NAMES as SINKS
from training.saved.stored_step import is_named
from training.sharding.mesh import Partition

TASKS = {"text": text, "exorl": exorl}
"""Modules of the tasks; each has `sizes`, `identify` and a `Run`, of RUNS."""
RUNS = {"text": text.TextRun, "exorl": exorl.AgentRun}

# Fields in which the hosts of a run may differ, and its starts.
_OF_A_HOST = (
    "hosts",
    "simulated_devices",
    "keep_programs",
    "profile",
    "data.threads",
    "data.compare_digests",
)
# Fields that only the other task reads.
_UNREAD = {
    "text": ("agent", *(f"data.{name}" for name in exorl.DATA_FIELDS)),
    "exorl": (
        "lora",
        "model.vocab_size",
        "data.corpus",
        "data.rows",
        "data.balanced_steps",
    ),
}

LEAST = {
    "loss_chunk_tokens": 0,
    "feed_forward_chunk_tokens": 0,
    "delta_segment_tokens": 0,
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


def make_run(
    config: ConfigDict,
    devices: Partition | Sequence[jax.Device],
    rows: tuple[Row, ...] = (),
    before: ConfigDict | None = None,
) -> Run:
    """Returns the run of a config's task on devices, or on a mesh of them.

    rows: what its rows are alike (see `typical_rows`).
    before: the config of its last start, if any, for what remat=auto is (see
      `memory_choice`).

    Raises:
      ValueError: the mesh does not match the devices.
    """
    if not isinstance(devices, Partition):
        devices = partition(config, devices)
    return settled(RUNS[config.task](config, devices, rows), before)


def run_settings(config: ConfigDict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the settings of the run, JSON values by dotted name.

    Every field that its task reads, except those that hosts have of their own, and a
    digest of the data (see `training/saved/record.py`).

    say: reports which data files are not compared with their digests.

    Raises:
      ValueError, FileNotFoundError: no such data, or they are not what was written.
    """
    left_out = (*_OF_A_HOST, *_UNREAD[config.task])
    fields = fields_by_name(config)
    read = {name: fields[name] for name in fields if not is_named(name, left_out)}
    field, digest, unread = TASKS[config.task].identify(config)
    if config.task == "text":
        read["model.vocab_size"] = corpora.vocab_size(config)
    if unread:
        say(f"data: {unread}")
    return json.loads(json.dumps(read | {f"{field}.contents": digest}))


def rate_change(config: ConfigDict, saved: Mapping[str, Any], step: int) -> str:
    """Returns a line if the next update gets another learning rate than before, or "".

    saved: settings of the run that saved `step` (see `run_settings`).
    """
    now = optimizer_settings(config)
    kept = {"total_steps": saved.get("train.steps", now.total_steps)}
    for name in ("peak_lr", "end_lr", "warmup_steps"):
        kept[name] = saved.get(f"optimizer.{name}", config.optimizer[name])
    before = dataclasses.replace(now, **kept)
    rate_before = float(before.schedule()(step))
    rate = float(now.schedule()(step))
    if math.isclose(rate, rate_before, rel_tol=0.01):
        return ""
    line = f"changed since step {step}: learning rate: {rate_before:.1e} -> {rate:.1e}"
    if before.total_steps <= step < now.total_steps:
        line += (
            f"; to keep it, set config.train.steps={before.total_steps} and "
            f"config.train.extra_steps={now.total_steps - step}"
        )
    return line


def check(config: ConfigDict, devices: int | None) -> None:
    """Checks a config by itself, for a run on this many devices; None: on any.

    What depends on the corpus and on the kind of device is found later.

    Raises:
      ValueError: lists everything that is wrong.
    """
    if config.task == "exorl" and "agent" not in config:
        raise ValueError(f"{config.task=} needs a config of configs/agents.py")
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
    wrong: list[str] = []
    for passes in checks:
        try:
            passes(config)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("; ".join(dict.fromkeys(wrong)))


def _fields(config: ConfigDict) -> None:
    wrong: list[str] = []
    for part in _numbers, _names, _directories, _of_text, _reports, _placement:
        wrong += part(config)
    if config.task == "exorl":
        wrong += _shares(config)
    if wrong:
        raise ValueError("; ".join(wrong))


def _numbers(config: ConfigDict) -> Iterator[str]:
    values = fields_by_name(config)
    for name, least in LEAST.items():
        if (value := values[name]) < least:
            yield f"config.{name}={value} must be at least {least}"
    if config.seed >= 2**32:
        yield f"{config.seed=} must be below 2^32"


def _names(config: ConfigDict) -> Iterator[str]:
    known: dict[str, Collection[str]] = {
        "task": TASKS,
        "implementation": ("", *IMPLEMENTATIONS),
        "gpu_transfers": GPU_TRANSFERS,
        "data.rows": ROW_PLANS,
        "lora.base_dtype": ("", *COMPUTE_DTYPES),
    }
    if config.task == "exorl":
        known |= {"data.chain_order": ORDERS, "data.predict": PREDICTED}
    values = fields_by_name(config)
    for name, choices in known.items():
        if (value := values[name]) not in choices:
            wanted = ", ".join(choice or '""' for choice in choices)
            yield f"config.{name}={value!r} must be one of {wanted}"


def _sizes(config: ConfigDict) -> None:
    with contextlib.suppress(FileNotFoundError):  # no corpus: found later
        TASKS.get(config.task, TASKS["text"]).sizes(config)


def _directories(config: ConfigDict) -> Iterator[str]:
    for name in ("workdir", "init_from"):
        kind, is_bucket, _ = config[name].partition("://")
        given = f"config.{name}={config[name]!r}"
        if is_bucket and kind != "gs" or name == "workdir" and not config[name]:
            yield f"{given} must be a directory or gs://BUCKET/RUN"  # Orbax takes these
        elif is_bucket and not importlib.util.find_spec("gcsfs"):
            yield (
                f"{given} needs gcsfs, which is not installed: make venv "
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
            "requirements/wandb.txt"
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
        "remat": (config.remat not in ("everything", AUTO), "nothing"),
        "remat_budget_gib": (not config.remat_budget_gib, 0.0),
        "train.microbatches": (config.train.microbatches == 1, 1),
        "model.layer_pattern": (len({*config.model.layer_pattern}) < 2, ""),
    }
    values = fields_by_name(config)
    for name, (is_met, value) in wanted.items():
        if config.optimizer.placement == "host_all" and not is_met:
            yield (
                f"config.{name}={values[name]!r} cannot be with "
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
    # Nothing that it asks of the mesh needs devices.
    partition = Partition(cast(Mesh, mesh))
    RUNS.get(config.task, RUNS["text"])(config, partition).check_batch()


def check_attention(run: Run) -> None:
    """Traces the run's attention, forward and backward, for these devices.

    Raises:
      ValueError: the implementation does not run on them, or not with these sizes.
    """
    config = run.config
    rows, columns = run.token_shape
    shape = rows // config.train.microbatches, columns  # B, T of a microbatch
    model = config.model
    dtype = jnp.dtype(config.compute_dtype)
    q = jax.ShapeDtypeStruct((*shape, model.num_heads, model.head_dim), dtype)
    k = jax.ShapeDtypeStruct((*shape, model.num_kv_heads, model.head_dim), dtype)
    bound = jax.ShapeDtypeStruct(shape, jnp.int32)

    def attend(q: jax.Array, k: jax.Array, bound: jax.Array) -> jax.Array:
        out = run.attention(q, k, k, visible=Visible(bound, bound))
        return out.astype(jnp.float32).sum()

    try:
        jax.eval_shape(jax.grad(attend), q, k, bound)
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"{config.implementation=} cannot attend with {config.compute_dtype=} and "
            f"{config.model.head_dim=} here: {error}"
        ) from error
