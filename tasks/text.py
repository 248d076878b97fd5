"""The task "text": a language model trained on a corpus of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from data.batch import Batch, Block
from data.rows import TextBatches
from kernels.masks import Visible
from models.abstract import Model, joined
from models.decoder import LanguageModel
from models.flops import paper_train_flops, train_flops
from models.lora import Lora
from models.losses import Parts, cross_entropy
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig
from tasks import corpora
from tasks.config_errors import names_fields
from tasks.layout_choice import ChoosingRun
from tasks.parts import Data, Objective, OnMesh
from tasks.programs import identify_frozen
from tasks.state import identity
from training.reports.metrics import StepWork
from training.sharding.feed import host_blocks
from training.step import Counts, Losses, count_tokens

identify = corpora.identify


class TextRun(ChoosingRun[LanguageModelConfig]):
    """A run that trains a language model."""

    def read_sizes(self) -> LanguageModelConfig:
        return sizes(self.config)

    def build_model(self) -> Model:
        sizes = self.sizes
        partition = self.partition

        def build(key: jax.Array) -> LanguageModel:
            rngs = nnx.Rngs(params=key)
            return LanguageModel(sizes, self.execution, partition, rngs=rngs)

        return Model.of(
            sizes,
            build,
            partition,
            trained=nnx.LoRAParam if sizes.lora.rank else nnx.Param,
            frozen_dtype=jnp.dtype(self.config.lora.base_dtype or self.compute_dtype),
        )

    @functools.cached_property
    def batch_like(self) -> Batch:
        """Shape, dtype and sharding of a batch's arrays, [B, T] or [B, T, m]."""

        bounds_shape = self.shape
        if self.intervals > 1:
            bounds_shape = (*self.shape, self.intervals)
        arrays = []
        for name in Batch._fields:
            shape = bounds_shape if name in ("k_start", "k_end") else self.shape
            dtype = jnp.float32 if name == "loss_weights" else jnp.int32
            arrays.append(jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding))
        return Batch._make(arrays)

    @property
    def intervals(self) -> int:
        """Intervals of keys that a token sees, m."""
        given = [row.intervals for row in self.given_rows]
        return max(given) if given else corpora.intervals(self.config)

    @functools.cached_property
    def objective(self) -> Objective:
        windows = self.sizes.attention_windows
        count = functools.partial(count_tokens, windows=windows)
        if not self.sizes.experts:
            return Objective(self.loss_function(), count)
        losses = self._losses()

        def balanced(parameters: Any, batch: OnMesh, rest: Any = None) -> Losses:
            loss, loads = losses(parameters, batch, rest)
            balance, busiest = batch.loss_weights.sum() * loads
            figures = {"experts_balance": balance, "experts_busiest": busiest}
            return Losses(loss, self.config.train.experts_balance * balance, figures)

        return Objective(balanced, count)

    @functools.cached_property
    def held_out(self) -> Objective:
        """The loss by how far into its document a token is."""
        parts = Parts.by_position(self.config.data.context_tokens)
        count = self.objective.count

        def by_part(batch: OnMesh) -> Counts:
            weights = parts.sums(batch.loss_weights, batch.positions)
            return count(batch)._replace(weights=weights)

        return Objective(self.loss_function(parts), by_part, parts.names)

    def loss_function(self, parts: Parts | None = None) -> Callable[..., jax.Array]:
        """Builds (parameters, batch in layout order, frozen ones) -> summed loss.

        parts: returns the loss of each of these, [parts], instead of one of all tokens.

        Raises:
          ValueError: an unknown implementation.
        """
        losses = self._losses(parts)

        def loss_sum(parameters: Any, batch: OnMesh, rest: Any = None) -> jax.Array:
            return losses(parameters, batch, rest)[0]

        return loss_sum

    def _losses(self, parts: Parts | None = None) -> Callable[..., tuple]:
        """Builds `loss_function`, which also returns the loads of experts, if any."""
        attend = self.attention
        model = self.model
        chunk = self.execution.loss_chunk

        def losses(
            parameters: Any, batch: OnMesh, rest: Any = None
        ) -> tuple[jax.Array, jax.Array | None]:
            module = nnx.merge(model.structure, joined(parameters, rest or {}))
            see_visible = functools.partial(attend, visible=visible(batch))
            x = module.embed(batch.tokens)
            stream = module.through_layers(x, batch.positions, see_visible, self.mix)
            loss = cross_entropy(
                stream.x,
                module.head_weight(),
                batch.targets,
                batch.loss_weights,
                None if parts is None else (parts, batch.positions),
                logits=model.config.logits,
                chunk=chunk,
                partition=self.partition,
            )
            return loss, stream.loads

        return losses

    def work(self, tokens: float, pairs: float) -> StepWork:
        data = self.config.data
        flops = train_flops(self.sizes, tokens, pairs)
        paper_flops = paper_train_flops(
            self.sizes, data.batch_rows, data.context_tokens
        )
        return StepWork(int(tokens), flops, paper_flops)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Properties in which a checkpoint must agree, adapters' base included."""
        return {"model": identity(self.sizes)} | identify_frozen(self)

    def open_data(self) -> Data:
        corpora.directories(self.config)
        return Data(self.batches("train"), self.validation(), self.fingerprint)

    @names_fields
    def batches(self, split: str, fills: bool = False) -> TextBatches:
        """Returns this host's part of every batch: shuffled to train, else in order.

        fills: as of `TextBatches`, for a split in order.

        Raises:
          FileNotFoundError, ValueError: a corpus too small for one batch; or as
            `corpora.rows`.
        """
        plan, order = corpora.rows(self.config, split, self.sizes.vocab_size)
        return TextBatches(
            plan,
            host_blocks(self.sharding, self.shape),
            self.config.data.batch_rows,
            self.layout,
            self.partition.ring_size,
            order,
            self.shape[1],
            fills,
        )

    def validation(self) -> list[dict[Block, Batch]]:
        """Reads the held-out batches, the same at every validation, into memory.

        Raises:
          ValueError: as `batches`.
        """
        if not self.config.train.validation_batches:
            return []
        held_out = self.batches("validation")
        wanted = min(self.config.train.validation_batches, len(held_out))
        return [held_out[i] for i in range(wanted)]


def visible(batch: OnMesh) -> Visible:
    """Returns what the tokens of a batch see, [B, T] or [m, B, T]."""
    if batch.k_start.ndim == 2:
        return Visible(batch.k_start, batch.k_end)
    k_start = jnp.moveaxis(batch.k_start, -1, 0)
    return Visible(k_start, jnp.moveaxis(batch.k_end, -1, 0))


@names_fields
def sizes(config: ConfigDict) -> LanguageModelConfig:
    """Returns the sizes and parts of the config's model.

    Raises:
      ValueError: sizes that make no model.
      FileNotFoundError, ValueError: as `corpora.vocab_size`.
    """
    fields: dict[str, Any] = {**config.model}
    fields["vocab_size"] = corpora.vocab_size(config)
    scaling = RopeScaling(**config.rope_scaling)
    part = config.lora
    lora = Lora(part.rank, part.alpha, part.targets, part.gate_up_rank)
    lora = lora if lora.rank else Lora()  # without any it is as it was before
    return LanguageModelConfig(**fields, rope_scaling=scaling, lora=lora)
