"""From a config to the objects of a run: what `train.py` and the tools share.

Besides them, this is the only module that reads a config. Whatever it makes has been
checked before anything is compiled.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import nnx
from jax.sharding import NamedSharding

from data.batch import Batch, Block
from data.text import ROW_PLANS, InOrder, Shuffled, TextBatches
from data.token_file import TokenFile
from kernels.masks import Visible
from kernels.ring import make_ring_attention
from models.blueprint import Model
from models.execution import Execution
from models.flops import paper_train_flops, train_flops
from models.llama import Llama, LlamaConfig
from models.losses import cross_entropy, cross_entropy_by_position
from models.position_parts import PositionParts
from models.rope import RopeScaling
from tasks.attention_systems import attention_system
from tasks.config_errors import names_fields, raise_all
from training.chips import compiler_options
from training.feed import host_blocks
from training.guard import GuardSettings
from training.mesh import MeshShape, Partition, make_mesh
from training.metrics import StepWork
from training.optimizer import OptimizerSettings
from training.step import (
    Counts,
    LossFunction,
    TrainState,
    count_tokens,
    initial_state,
    make_train_step,
)

STANDARD_LIBRARY = Path("corpora/standard_library")
"""Where the default corpus is prepared."""

COMPUTE_DTYPES = ("bfloat16", "float32")


def simulate_devices(config: ml_collections.ConfigDict) -> None:
    """Makes this process simulate CPU devices, if the config wants any.

    Raises:
      RuntimeError: JAX has devices already.
    """
    if config.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.simulated_devices)


@names_fields
def mesh_shape(config: ml_collections.ConfigDict, devices: int) -> MeshShape:
    """The axes of the mesh of so many devices.

    Raises:
      ValueError: they do not match the devices, or there is a ring that the attention
        system cannot use; then with all that has to change.
    """
    shape = MeshShape(**config.mesh).fill(devices)
    if shape.ring > 1 and not attention_system(config).sharded:
        fsdp = shape.fsdp * shape.ring  # the devices of the ring share out the batch
        parts = config.train.microbatches * shape.data * fsdp
        rows = -(-config.data.batch_rows // max(parts, 1)) * parts
        change = {"mesh.ring": 1, "mesh.fsdp": fsdp}
        change |= {"data.batch_rows": rows} if rows != config.data.batch_rows else {}
        raise ValueError(
            f"{config.attention=} does not shard the sequence, but the mesh has a ring "
            f"of {shape.ring}: set "
            + ", ".join(f"config.{name}={value}" for name, value in change.items())
            + ", or config.attention=striped"
        )
    return shape.cut_ring(config.model.hidden_size)


def partition(
    config: ml_collections.ConfigDict, devices: Sequence[jax.Device]
) -> Partition:
    """The mesh of the devices to run on or compile for, and what is sharded over it.

    Raises:
      ValueError: as `mesh_shape`.
    """
    return Partition(make_mesh(mesh_shape(config, len(devices)), devices))


@names_fields
def execution(config: ml_collections.ConfigDict) -> Execution:
    """How the config's model is computed.

    Raises:
      ValueError: a type that it cannot be computed in, or an unknown policy.
    """
    if config.compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"{config.compute_dtype=} is not one of {', '.join(COMPUTE_DTYPES)}"
        )
    chunked = attention_system(config).chunked
    return Execution(
        compute_dtype=jnp.dtype(config.compute_dtype),
        remat=config.remat,
        feed_forward_chunk=config.feed_forward_chunk_tokens if chunked else 0,
        attention_parts=config.attention_parts,
    )


@names_fields
def sizes(config: ml_collections.ConfigDict) -> LlamaConfig:
    """Those of the LLaMA that the config describes.

    Raises:
      ValueError: sizes that make no model.
    """
    scaling = RopeScaling(**config.rope_scaling)
    return LlamaConfig(**config.model, rope_scaling=scaling)


@names_fields
def model(config: ml_collections.ConfigDict, partition: Partition) -> Model:
    """The LLaMA that the config describes.

    Raises:
      ValueError: sizes that make no model, or that do not divide over the mesh.
    """
    how, llama = execution(config), sizes(config)

    def build(key: jax.Array) -> Llama:
        return Llama(llama, how, partition, rngs=nnx.Rngs(params=key))

    return Model.of(llama, build, partition)


@names_fields
def ring_attention(
    config: ml_collections.ConfigDict, partition: Partition
) -> Callable[..., jax.Array]:
    """The config's attention on the mesh (see `make_ring_attention`).

    Raises:
      ValueError: an unknown implementation.
    """
    system = attention_system(config)
    return make_ring_attention(
        partition.mesh,
        layout=system.layout,
        ring_axes=partition.axes("sequence"),
        implementation=system.implementation or config.implementation or None,
    )


def loss_function(
    config: ml_collections.ConfigDict,
    model: Model,
    partition: Partition,
    parts: PositionParts | None = None,
) -> Callable[[Any, Batch], jax.Array]:
    """From parameters and a batch in layout order to its summed loss.

    parts: the losses of these, (parts,), instead of one of all.

    Raises:
      ValueError: an unknown implementation, or a chunk of no tokens.
    """
    if config.loss_chunk_tokens < 1:
        raise ValueError(f"{config.loss_chunk_tokens=} must be at least 1")
    attend = ring_attention(config, partition)

    def loss_sum(parameters: Any, batch: Batch) -> jax.Array:
        llama = nnx.merge(model.structure, parameters)
        see = functools.partial(attend, visible=Visible(batch.k_start, batch.k_end))
        hidden = llama(batch.tokens, batch.positions, see)
        learnt = hidden, llama.head[...], batch.targets, batch.loss_weights
        how = {"chunk": config.loss_chunk_tokens, "partition": partition}
        if parts is None:
            return cross_entropy(*learnt, **how)
        return cross_entropy_by_position(*learnt, batch.positions, parts=parts, **how)

    return loss_sum


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, partition: Partition
) -> TrainState:
    """Shape, type and sharding of everything in the train state."""

    def placed(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    def on_all(shape: jax.ShapeDtypeStruct) -> Any:
        return placed(shape, partition.sharding((None,) * shape.ndim, shape.shape))

    shardings = jax.tree.map(
        lambda s, names: partition.sharding(names, s.shape), model.shapes, model.axes
    )
    shapes = jax.eval_shape(lambda p: initial_state(p, optimizer), model.shapes)
    return TrainState(
        step=on_all(shapes.step),
        params=jax.tree.map(placed, shapes.params, shardings),
        optimizer_state=optax.tree.map_params(
            optimizer,
            placed,
            shapes.optimizer_state,
            shardings,
            transform_non_params=on_all,
        ),
        guard=jax.tree.map(on_all, shapes.guard),
    )


@names_fields
def optimizer_settings(config: ml_collections.ConfigDict) -> OptimizerSettings:
    """Settings of the optimizer and its schedule."""
    return OptimizerSettings(total_steps=config.train.steps, **config.optimizer)


@names_fields
def guard_settings(config: ml_collections.ConfigDict) -> GuardSettings:
    """Which updates are skipped, and what ends a run."""
    return GuardSettings(**config.guard)


def batch_shape(config: ml_collections.ConfigDict) -> tuple[int, int]:
    """Rows and columns of the global batch."""
    return config.data.batch_rows, config.data.context_tokens


def batch_sharding(
    config: ml_collections.ConfigDict, partition: Partition
) -> NamedSharding:
    """Placement of a batch's arrays (B, T).

    Raises:
      ValueError: the batch, or a microbatch of it, does not divide over the mesh.
    """
    raise_all(
        [
            lambda: _check_rows(config, partition),
            lambda: _check_columns(config, partition),
        ]
    )
    return partition.sharding(("batch", "sequence"), batch_shape(config))


def _check_rows(config: ml_collections.ConfigDict, partition: Partition) -> None:
    rows = config.data.batch_rows
    if config.train.microbatches < 1:
        raise ValueError(f"{config.train.microbatches=} must be at least 1")
    parts = config.train.microbatches * partition.shards("batch")
    if rows < 1 or rows % parts:
        raise ValueError(
            f"{config.data.batch_rows=} does not divide into "
            f"{config.train.microbatches=} over the mesh's data and fsdp axes: make it "
            f"a multiple of {parts}, the next is {max(1, -(-rows // parts)) * parts}"
        )


def _check_columns(config: ml_collections.ConfigDict, partition: Partition) -> None:
    columns, ring = config.data.context_tokens, partition.ring_size
    divisor = attention_system(config).layout.divisor(ring)
    if columns % divisor:
        raise ValueError(
            f"{config.data.context_tokens=} does not divide over the ring of {ring} "
            f"({attention_system(config).layout}): make it a multiple of {divisor}, "
            f"the next is {-(-columns // divisor) * divisor}"
        )


def abstract_batch(config: ml_collections.ConfigDict, partition: Partition) -> Batch:
    """Shape, type and sharding of a batch's arrays (B, T).

    Raises:
      ValueError: as `batch_sharding`.
    """
    sharding = batch_sharding(config, partition)

    def array(dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(batch_shape(config), dtype, sharding=sharding)

    arrays = dict.fromkeys(Batch._fields, array(jnp.int32))
    return Batch(**arrays | {"loss_weights": array(jnp.float32)})


def train_step(
    config: ml_collections.ConfigDict,
    loss_sum: LossFunction,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    count: Callable[[Any], Counts] = count_tokens,
) -> jax.stages.Wrapped:
    """The program `(state, batch) -> (state, metrics)`; it takes the old state's place.

    state: shape, type and sharding of everything in it (see `abstract_state`).
    """
    sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
    device = sharding.step.mesh.devices.flat[0]
    return jax.jit(
        make_train_step(
            loss_sum,
            optimizer,
            microbatches=config.train.microbatches,
            count=count,
            spike_sigmas=config.guard.spike_sigmas,
        ),
        out_shardings=(sharding, sharding.step),
        donate_argnums=0,
        compiler_options=compiler_options(device.device_kind),
    )


@names_fields
def corpus(config: ml_collections.ConfigDict, split: str) -> TokenFile:
    """The token file of a split ("train" or "validation").

    Raises:
      FileNotFoundError, ValueError: it is missing or damaged, or has tokens that the
        model's vocabulary lacks.
    """
    tokens = TokenFile.open(config.data.corpus or STANDARD_LIBRARY, split)
    tokens.check_vocabulary(config.model.vocab_size)
    return tokens


@names_fields
def batches(
    config: ml_collections.ConfigDict, partition: Partition, split: str
) -> TextBatches:
    """This host's part of every batch: shuffled to train, in order to validate.

    Raises:
      ValueError: unknown rows, or a corpus too small for one batch; as `corpus`.
    """
    if config.data.rows not in ROW_PLANS:
        raise ValueError(f"{config.data.rows=} is not one of {', '.join(ROW_PLANS)}")
    plan = ROW_PLANS[config.data.rows](
        corpus(config, split), config.data.context_tokens
    )
    sharding = batch_sharding(config, partition)
    return TextBatches(
        plan,
        host_blocks(sharding, batch_shape(config)),
        config.data.batch_rows,
        attention_system(config).layout,
        partition.ring_size,
        Shuffled(config.seed) if split == "train" else InOrder(),
    )


def validation_batches(
    config: ml_collections.ConfigDict, partition: Partition
) -> list[dict[Block, Batch]]:
    """The held-out batches, the same at every validation; they stay in memory.

    Raises:
      ValueError: as `batches`.
    """
    if not config.train.validation_batches:
        return []
    held_out = batches(config, partition, "validation")
    wanted = min(config.train.validation_batches, len(held_out))
    return [held_out[i] for i in range(wanted)]


def step_work(
    config: ml_collections.ConfigDict, model: Model
) -> Callable[[float, float], StepWork]:
    """From a step's tokens and visible pairs to what it computes."""
    paper_flops = paper_train_flops(model.config, *batch_shape(config))

    def work(tokens: float, pairs: float) -> StepWork:
        model_flops = train_flops(model.config, tokens, pairs)
        return StepWork(int(tokens), model_flops, paper_flops)

    return work


def fingerprint(model: Model) -> dict[str, Any]:
    """What a checkpoint's model must agree in."""
    sizes = dataclasses.asdict(model.config)
    if model.config.rope_scaling == RopeScaling():
        del sizes["rope_scaling"]  # as in checkpoints from before there was any
    return {"model": sizes}
