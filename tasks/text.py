"""The task "text": a language model trained on a corpus of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from flax import nnx

from data.batch import Batch, Block
from data.rows import TextBatches
from kernels.masks import Visible
from models.abstract import Model, joined
from models.decoder import LanguageModel
from models.flops import paper_train_flops, train_flops
from models.losses import Parts, cross_entropy
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig, Lora
from tasks import base, corpora, frozen
from tasks.base import Data, Objective, Task, attention_system, ring_attention
from tasks.batch_rows import batch_shape, batch_sharding
from tasks.config_errors import names_fields
from tasks.execution import execution
from training.feed import host_blocks
from training.mesh import Partition
from training.metrics import StepWork
from training.step import Counts, count_tokens

identify = corpora.identify

VOCAB_MULTIPLE = 8
"""A corpus's vocabulary is rounded up to it, to divide over the tensor axis."""


def make(config: ml_collections.ConfigDict, partition: Partition) -> Task:
    """Builds the task; reads no data.

    Raises:
      ValueError: something in the config is wrong.
    """
    llama = model(config, partition)

    def open_data() -> Data:
        corpora.directories(config)
        return Data(
            batches=batches(config, partition, "train"),
            validation=validation_batches(config, partition),
            fingerprint=fingerprint(llama) | frozen.identify(config, llama),
        )

    loss_sum = loss_function(config, llama, partition)
    windows = [kind.window for kind in llama.config.layer_kinds]
    count = functools.partial(count_tokens, windows=windows)
    return Task(
        model=llama,
        execution=execution(config, partition, llama.config.vocab_size),
        batch_like=abstract_batch(config, partition),
        objective=Objective(loss_sum, count),
        held_out=_by_position(config, llama, partition, count),
        work=step_work(config, llama),
        open_data=open_data,
    )


@names_fields
def sizes(config: ml_collections.ConfigDict) -> LanguageModelConfig:
    """Returns the sizes and parts of the config's model.

    Raises:
      ValueError: sizes that make no model.
      FileNotFoundError, ValueError: as `vocab_size`.
    """
    fields = {**config.model, "vocab_size": vocab_size(config)}
    scaling = RopeScaling(**config.rope_scaling)
    lora = Lora(config.lora.rank, config.lora.alpha, config.lora.targets)
    lora = lora if lora.rank else Lora()  # without any it is as it was before
    return LanguageModelConfig(**fields, rope_scaling=scaling, lora=lora)


def vocab_size(config: ml_collections.ConfigDict) -> int:
    """Returns the rows of the embedding, V.

    That is config.model.vocab_size; where it is 0, the vocabulary of the tokenizer of
    config.data.corpus (of the default corpus: bytes), rounded up to `VOCAB_MULTIPLE`.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or damaged.
    """
    if config.model.vocab_size:
        return config.model.vocab_size
    try:
        ids = corpora.vocab_size(config)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; or set config.model.vocab_size, which is the corpus's where "
            "it is 0"
        ) from error
    return -(-ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@names_fields
def model(config: ml_collections.ConfigDict, partition: Partition) -> Model:
    """Builds the config's model, without parameters.

    Raises:
      ValueError: sizes that make no model, or that do not divide over the mesh.
    """
    record = sizes(config)
    run = execution(config, partition, record.vocab_size)

    def build(key: jax.Array) -> LanguageModel:
        return LanguageModel(record, run, partition, rngs=nnx.Rngs(params=key))

    return Model.of(
        record,
        build,
        partition,
        trained=nnx.LoRAParam if record.lora.rank else nnx.Param,
        frozen_dtype=jnp.dtype(config.lora.base_dtype or config.compute_dtype),
    )


def loss_function(
    config: ml_collections.ConfigDict,
    model: Model,
    partition: Partition,
    parts: Parts | None = None,
) -> Callable[[Any, Batch], jax.Array]:
    """Builds (parameters, batch in layout order, frozen ones) -> summed loss.

    parts: returns the loss of each of these, [parts], instead of one of all tokens.

    Raises:
      ValueError: an unknown implementation.
    """
    attend = ring_attention(config, partition)
    chunk = execution(config, partition, model.config.vocab_size).loss_chunk

    def loss_sum(parameters: Any, batch: Batch, rest: Any = None) -> jax.Array:
        module = nnx.merge(model.structure, joined(parameters, rest or {}))
        see_visible = functools.partial(
            attend, visible=Visible(batch.k_start, batch.k_end)
        )
        hidden = module(batch.tokens, batch.positions, see_visible)
        predicted = hidden, module.head_weight(), batch.targets, batch.loss_weights
        logits = model.config.logits
        options = {"logits": logits, "chunk": chunk, "partition": partition}
        by_place = parts and (parts, batch.positions)
        return cross_entropy(*predicted, by_place, **options)

    return loss_sum


def _by_position(
    config: ml_collections.ConfigDict,
    model: Model,
    partition: Partition,
    count: Callable[[Batch], Counts],
) -> Objective:
    """Builds the loss by how far into its document a token is."""
    parts = Parts.by_position(config.data.context_tokens)

    def by_part(batch: Batch) -> Counts:
        weights = parts.sums(batch.loss_weights, batch.positions)
        return count(batch)._replace(weights=weights)

    loss_sum = loss_function(config, model, partition, parts)
    return Objective(loss_sum, by_part, parts.names)


def abstract_batch(config: ml_collections.ConfigDict, partition: Partition) -> Batch:
    """Returns shape, dtype and sharding of a batch's arrays, [B, T].

    Raises:
      ValueError: as `batch_sharding`.
    """
    sharding = batch_sharding(config, partition)
    shape = batch_shape(config, partition)

    def array(dtype: type) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays = dict.fromkeys(Batch._fields, array(jnp.int32))
    return Batch(**arrays | {"loss_weights": array(jnp.float32)})


@names_fields
def batches(
    config: ml_collections.ConfigDict,
    partition: Partition,
    split: str,
    fills: bool = False,
) -> TextBatches:
    """Returns this host's part of every batch: shuffled to train, else in order.

    fills: as of `TextBatches`, for a split in order.

    Raises:
      FileNotFoundError, ValueError: a corpus too small for one batch; or as
        `corpora.rows`.
    """
    plan, order = corpora.rows(config, split, vocab_size(config))
    sharding, shape = batch_sharding(config, partition), batch_shape(config, partition)
    return TextBatches(
        plan,
        host_blocks(sharding, shape),
        config.data.batch_rows,
        attention_system(config).layout,
        partition.ring_size,
        order,
        shape[1],
        fills,
    )


def validation_batches(
    config: ml_collections.ConfigDict, partition: Partition
) -> list[dict[Block, Batch]]:
    """Reads the held-out batches, the same at every validation, into memory.

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
    """Builds (tokens, visible pairs) of a step -> `StepWork`."""
    rows, tokens = config.data.batch_rows, config.data.context_tokens
    paper_flops = paper_train_flops(model.config, rows, tokens)

    def work(tokens: float, pairs: float) -> StepWork:
        model_flops = train_flops(model.config, tokens, pairs)
        return StepWork(int(tokens), model_flops, paper_flops)

    return work


def fingerprint(model: Model) -> dict[str, Any]:
    """Returns the properties in which a checkpoint's model must agree."""
    return {"model": base.identity(model.config)}
