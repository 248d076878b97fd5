"""Builds the programs that generate text with a config's model."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from data.document_mask import DocumentMask
from kernels import masks
from kernels.decode_attention import CachedAttention
from kernels.delta.attention import advance
from kernels.layouts import divisor, order, padded_length
from models import cache as caches
from models.abstract import joined
from models.cache import EMPTY, Cache, CacheOperations, delta_shapes
from models.decode import Generator, last_of_rows
from models.memory import SHARED_OUT
from models.sampling import Sampling, row_keys, sample
from models.sizes import LanguageModelConfig
from tasks.command_line import read_config
from tasks.programs import read_frozen
from tasks.run import Run
from tasks.state import abstract_parameters
from tasks.systems import prepare_devices
from tasks.text import TextRun
from training.saved.weights import SavedParameters
from training.sharding.mesh import Partition
from training.sharding.stationary import StationaryPartition

SCORE_BYTES = 1 << 28
"""Of the scores of a block of new tokens in a layer, on a device, at most."""
MOST_APPENDED = 256
"""Tokens of a prompt that are appended to a cache at a time, at most."""


def config_to_ask(arguments: Sequence[str]) -> ConfigDict:
    """Reads the config of a run whose checkpoint a program reads (see `read_config`).

    Raises:
      FileNotFoundError, ValueError: as `read_config`.
    """
    logging.set_verbosity(logging.ERROR)  # Orbax logs every step of a restore
    config = read_config(arguments)
    prepare_devices(config)
    return config


def cache_shardings(
    partition: Partition,
    shape: tuple[int, ...],
    delta: tuple[jax.ShapeDtypeStruct, ...] = (),
) -> Cache:
    """Returns the sharding of a cache whose keys have this shape, [Y, B, S, K, D].

    delta: as of `empty_cache`.

    Raises:
      ValueError: rows or heads do not divide over the mesh.
    """
    names = (None, "batch", "sequence", "kv_heads", None)
    stack = partition.sharding(names, shape)
    index = partition.sharding(names[1:3], shape[1:3])
    whole = NamedSharding(partition.mesh, PartitionSpec())
    # The state is (Y, B, H, D, V); what the convolution reads is (Y, B, W - 1, H, …).
    of_delta = []
    for number, like in enumerate(delta):
        heads = (None, "heads") if number else ("heads", None)
        axes = (None, "batch", *heads, None)
        of_delta.append(partition.sharding(axes, like.shape))
    return Cache._make([stack, stack, index, whole, tuple(of_delta)])


def generator(
    run: TextRun,
    sampling: Sampling,
    *,
    rows: int,
    cache_tokens: int,
    samples: int = 1,
) -> Generator:
    """Builds the programs that generate with the run's model on its mesh.

    rows: prompts at a time. cache_tokens: most tokens of a row's prompt and its
      samples; rounded up to what the layout can shard. samples: of each prompt.

    Raises:
      ValueError: something does not divide over the mesh, or as `_check`.
    """
    layout = run.layout
    partition = run.partition
    sizes = run.sizes
    ring_size = partition.ring_size
    _check(sizes, cache_tokens, samples)
    members = partition.shards("sequence")  # that share out the cache
    least = _least_slots(run)
    most = cache_tokens + members * (samples - 1)  # see `Generator.room`
    slots = max(padded_length(layout, ring_size, most, partition.slices), least)
    cache, empty = _empty_cache(run, rows, slots)
    whole = NamedSharding(partition.mesh, PartitionSpec())
    compiled = functools.partial(
        jax.jit,
        out_shardings=(cache, whole, whole),
        donate_argnums=1,  # the cache: two of them might not fit
        compiler_options=run.compiler_options,
    )
    programs = TextPrograms.of(run, sampling, samples)

    def to_mesh(x: np.ndarray) -> Array:
        sharding = partition.sharding(("batch", "sequence"), x.shape)
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    heads = sizes.num_heads // partition.shards("heads")
    scores = slots // members * heads * -(-rows // partition.shards("batch"))
    # Of a prefix, tokens in the cache would have to see those that are appended later;
    # and a state cannot be taken back to fewer tokens.
    is_whole = run.mask.prefix or sizes.delta_convolution
    return Generator(
        empty=empty,
        prefill=compiled(programs.prefill),
        step=compiled(programs.step),
        cut=jax.jit(caches.cut, out_shardings=cache, donate_argnums=0),
        to_mesh=to_mesh,
        order=lambda length: order(layout, ring_size, length),
        divisor=least,
        vocab_size=sizes.vocab_size,
        rows=rows,
        slots=slots,
        members=members,
        samples=samples,
        block=0 if is_whole else _block(scores, slots // members),
    )


def _least_slots(run: TextRun) -> int:
    """Returns the tokens of the shortest row that the layout can shard.

    Its runs hold what Gated DeltaNet's convolution reads of the tokens before.
    """
    step = divisor(run.layout, run.partition.ring_size, run.partition.slices)
    return step * max(1, run.sizes.delta_convolution - 1)


def _check(sizes: LanguageModelConfig, cache_tokens: int, samples: int) -> None:
    """Refuses no tokens, no samples, and several samples of a hybrid."""
    if min(cache_tokens, samples) < 1:
        raise ValueError(f"{cache_tokens=} and {samples=} must be at least 1")
    if sizes.delta_convolution and samples > 1:
        raise ValueError(
            f"{samples=} must be 1 with Gated DeltaNet, whose state is of one text: "
            "ask again with another --seed"
        )


def _empty_cache(
    run: TextRun, rows: int, slots: int
) -> tuple[Cache, Callable[[], Cache]]:
    """Returns the shardings of a run's cache, and what makes an empty one."""
    sizes = run.sizes
    dtype = run.compute_dtype
    delta = delta_shapes(sizes, rows, dtype)
    layers = len(sizes.attention_windows)
    shape = (layers, rows, slots, sizes.num_kv_heads, sizes.head_dim)  # Y, B, S, K, D
    shardings = cache_shardings(run.partition, shape, delta)
    members = run.partition.shards("sequence")
    empty = functools.partial(caches.empty_cache, shape, dtype, members, delta)
    return shardings, jax.jit(empty, out_shardings=shardings)


def _block(scores: int, slots: int) -> int:
    """Returns how many tokens of a prompt are appended to the cache at a time.

    scores: of one token, on a device. slots: there.
    """
    # A block also has to fit between a member's last token and its last slot.
    most = min(SCORE_BYTES // (4 * scores), MOST_APPENDED, slots // 8)
    return 1 << max(most, 1).bit_length() - 1


@dataclass(frozen=True, eq=False)
class TextPrograms:
    """Prefill and step of `Generator`, to be compiled.

    sequences, few_tokens: the model for whole prompts in the ring, and for tokens that
      are appended: their activations are few bytes, so they travel to the parameters.
    """

    sequences: nnx.GraphDef
    few_tokens: nnx.GraphDef
    operations: CacheOperations
    attention: Callable[..., Array]
    mix: Callable[..., Any]
    mask: DocumentMask
    sampling: Sampling
    samples: int

    @classmethod
    def of(cls, run: TextRun, sampling: Sampling, samples: int) -> Self:
        mesh = run.partition.mesh
        axes = run.partition.axes("sequence")
        operations = CachedAttention(mesh, axes, **run.scores)
        return cls(
            sequences=run.model.structure,
            few_tokens=run.on(StationaryPartition(mesh)).model.structure,
            # Its bounds may be any pair of arrays, as the cache's interface has them.
            operations=cast(CacheOperations, operations),
            attention=run.attention,
            mix=run.mix,
            mask=run.mask,
            sampling=sampling,
            samples=samples,
        )

    def prefill(
        self, parameters: Any, cache: Cache, tokens: Array, index: Array, seed: Array
    ) -> tuple[Cache, Array, Array]:
        lengths = (index != EMPTY).sum(axis=1, dtype=jnp.int32)  # (B,)
        prompts = self.mask.of_prompts(lengths[:, None])
        visible = prompts & masks.padding(lengths[:, None])
        model = nnx.merge(self.sequences, parameters)
        attend = functools.partial(self.attention, visible=visible)
        x = model.embed(tokens)
        hidden, cache = caches.fill(
            model, x, index, cache, attend, self.operations, self.mix
        )
        last, index = last_of_rows(hidden, index)  # (B, 1, E), (B, 1)
        return cache, *self._draw(parameters, last, index, seed)

    def step(
        self,
        parameters: Any,
        cache: Cache,
        tokens: Array,
        index: Array,
        seed: Array,
        trunk: Array | None = None,
    ) -> tuple[Cache, Array, Array]:
        model = nnx.merge(self.few_tokens, parameters)
        x = model.embed(tokens)
        window = self.mask.window
        last, cache = caches.append(
            model, x, index, cache, self.operations, window, trunk, advance
        )
        if trunk is None:
            last, index = last_of_rows(last, index)
        return cache, *self._draw(parameters, last, index, seed)

    def _draw(
        self, parameters: Any, last: Array, index: Array, seed: Array
    ) -> tuple[Array, Array]:
        """Returns the tokens behind the last ones, and their index: (B, samples).

        last, index: (B, 1 or samples, E), (B, 1 or samples).
        """
        scores = nnx.merge(self.few_tokens, parameters).logits(last)
        shape = len(index), self.samples
        scores = jnp.broadcast_to(scores, (*shape, scores.shape[-1]))
        following = jnp.broadcast_to(index + 1, shape)
        keys = row_keys(seed, following.size).reshape(shape[::-1]).T
        of_rows = jax.vmap(functools.partial(sample, sampling=self.sampling))
        return of_rows(scores, keys, following), following


def restored_parameters(run: TextRun) -> tuple[Any, int]:
    """Reads the newest parameters of the run onto its mesh, and their step.

    Matrices are in the compute type, in which they are multiplied anyway.

    Raises:
      FileNotFoundError, ValueError: there is no checkpoint, or one of another model.
    """
    return newest_parameters(run, run.fingerprint)


def newest_parameters(run: Run, fingerprint: Mapping[str, Any]) -> tuple[Any, int]:
    """Reads the newest parameters of a model with this fingerprint, and their step."""
    model = run.model
    dtype = run.compute_dtype
    shapes = abstract_parameters(model.shapes, model.axes, run.partition)
    saved = SavedParameters(run.config.workdir)
    saved.check_model(fingerprint)
    parameters = joined(saved.restore(shapes), read_frozen(run))
    if dtype == jnp.float32:
        return parameters, saved.step
    axes = joined(model.axes, model.frozen_axes)

    def cast(parameters: Any) -> Any:
        return jax.tree.map(
            lambda x, names: x.astype(dtype) if SHARED_OUT & {*names} else x,
            parameters,
            axes,
        )

    shardings = jax.tree.map(lambda x: x.sharding, parameters)
    return jax.jit(cast, out_shardings=shardings)(parameters), saved.step
