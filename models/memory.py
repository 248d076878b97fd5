"""How a model's layers run: on which mesh, in which chunks, what the backward keeps.

None of this changes the model's function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import jax
import jax.numpy as jnp

from models.sizes import DecoderConfig

Axes = tuple[str | None, ...]

Weight = jax.Array | Callable[[jax.Array, int], jax.Array]
"""A whole weight, or what multiplies x with it, over as many of its axes."""

SHARED_OUT = {"embed", "experts"}
"""Names of axes over which matrices are shared out, to be gathered; each has one."""

RESIDUAL: Axes = ("batch", "sequence", None)
"""Names of the axes of hidden states, (B, T, E)."""


class Partition(Protocol):
    """Places arrays by the names of their axes; see `training.sharding.mesh`."""

    @property
    def platform(self) -> str: ...

    @property
    def kernel_units(self) -> tuple[int, int] | None: ...

    def spec(
        self, names: Axes, shape: tuple[int, ...]
    ) -> jax.sharding.PartitionSpec: ...

    def over_shards(
        self,
        function: Callable,
        names: Sequence[Axes],
        result_names: Axes,
        beside: Axes | None = None,
    ) -> Callable: ...

    def gather(
        self, shard: jax.Array, axis: int, size: int, dtype: jnp.dtype
    ) -> jax.Array: ...

    def multiplier(
        self, shard: jax.Array, axis: int, size: int, dtype: jnp.dtype
    ) -> Weight: ...

    def vary(self, x: jax.Array, but: Sequence[str | None] = ()) -> jax.Array: ...

    def total(self, x: jax.Array, names: Sequence[str]) -> jax.Array: ...

    def largest(self, x: jax.Array, name: str) -> jax.Array: ...

    def shard_number(self, name: str) -> jax.Array: ...

    def divides(self, name: str, size: int) -> bool: ...

    def shards(self, name: str) -> int: ...


_POLICIES = jax.checkpoint_policies

_RESULT = "attention_out", "attention_lse", "delta_saved"


def _keep_products(*names: str) -> Callable:
    """Returns the policy that keeps products with parameters, and what has a name."""
    return _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable,
        _POLICIES.save_only_these_names(*names),
    )


REMAT_POLICIES: dict[str, Callable | None] = {
    # Everything: the fastest, where memory suffices.
    "everything": None,
    # The layer's input only, as in the papers; the ring runs twice. So do, in a layer's
    # backward, the projections to queries, keys and values (see `remat_attention`).
    "nothing": _POLICIES.nothing_saveable,
    # Also the attention's result: the ring runs once. Of Gated DeltaNet the rule runs
    # twice, but its states are sent once.
    "attention": _POLICIES.save_only_these_names(*_RESULT),
    # Also products with parameters, but for those of a feed-forward in chunks.
    "products": _keep_products(*_RESULT),
    # Also the parameters as they were gathered, which are not gathered again.
    "gathered": _keep_products(*_RESULT, "whole_parameter"),
    # As nothing, but the layer's input is in the host's memory.
    "offload": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["layer_input"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Policies of `jax.checkpoint`; None for no rematerialisation."""

NEXT = {"nothing": "attention", "attention": "products", "products": "gathered"}
"""Policies that keep more: a budget of memory climbs them."""

KEEP_PRODUCTS = "products", "gathered", "everything"
"""Policies that keep gate and up, if these are not made in chunks."""

KEEP_GATHERED = "gathered", "everything"
"""Policies with which a layer's parameters are gathered once."""

GATHERED_UP_TO = 2048
"""Tokens of a device up to which a budget keeps parameters gathered.

With 1 Ki on v5p gathers outlast the products beside them, and a step is 3 % shorter;
with 4 Ki they are hidden, and a step is 1 % longer by the copies of what is kept
(results/2026-11-29-spare-memory.md).
"""

RERUN = "nothing", "offload"
"""Policies with which a layer's backward runs its ring again."""


def remat(layer: Callable, policy: str) -> Callable:
    """Wraps `layer` to be recomputed in the backward, except what the policy keeps."""
    if REMAT_POLICIES[policy] is None:
        return layer
    # Inside a scan the loop itself keeps XLA from undoing it (prevent_cse).
    return jax.checkpoint(layer, policy=REMAT_POLICIES[policy], prevent_cse=False)


def remat_attention(attention: Callable, policy: str) -> Callable:
    """Wraps attention to keep its result only while its layer is recomputed.

    Under the policies that run the ring again: so queries, keys and values are not
    there during the backward of the feed-forward, which comes first, and only those of
    one head group at a time are.
    """
    if policy not in RERUN:
        return attention
    keep = _POLICIES.save_only_these_names(*_RESULT)
    return jax.checkpoint(attention, policy=keep)


def remat_projection(projection: Callable, policy: str) -> Callable:
    """Wraps the projections of an attention that `remat_attention` recomputes.

    They are recomputed before the attention's backward, and their input, normalised,
    once more after it, so that it need not be there meanwhile.
    """
    return jax.checkpoint(projection) if policy in RERUN else projection


@dataclass(frozen=True)
class Execution:
    """Settings of speed and memory, which leave a model's function as it is.

    compute_dtype: of activations and matrix products; parameters are float32.
    remat: a name of `REMAT_POLICIES`.
    feed_forward_chunk: tokens per device whose feed-forward exists at a time (blockwise
      parallel transformer, 2305.19370); 0 for all of them.
    attention_parts: head groups of a device; queries, keys, values and ring exist for
      one group at a time. 1 for all heads at once.
    loss_chunk: tokens per device whose logits exist at a time; 0 for all of them.
    last_layers: how the last layers run instead, keeping more, and their number.
    """

    compute_dtype: jnp.dtype
    remat: str
    feed_forward_chunk: int = 0
    attention_parts: int = 1
    loss_chunk: int = 0
    last_layers: "tuple[Execution, int] | None" = None

    def __post_init__(self):
        if self.remat not in REMAT_POLICIES:
            known = ", ".join(REMAT_POLICIES)
            raise ValueError(f"remat={self.remat!r} must be one of {known}")

    def __str__(self) -> str:
        text = f"remat {self.remat}, feed-forward {_tokens(self.feed_forward_chunk)}"
        if self.last_layers:
            last, layers = self.last_layers
            chunk = _tokens(last.feed_forward_chunk)
            text += f"; last {layers} layers {last.remat}, feed-forward {chunk}"
        if self.loss_chunk:
            text += f"; logits {_tokens(self.loss_chunk)}"
        return text

    def runs(
        self, layers: int, first: int = 0, stop: int | None = None
    ) -> "list[tuple[Execution, int]]":
        """Returns how layers run, one run after the other, and their numbers.

        layers: of the model. first, stop: of these, the first one and that behind the
          last; all by default.
        """
        stop = layers if stop is None else stop
        last, count = self.last_layers or (self, 0)
        change = min(max(layers - count, first), stop)
        runs = [(self, change - first), (last, stop - change)]
        return [(run, number) for run, number in runs if number]


def _tokens(chunk: int) -> str:
    return f"of {chunk:,} tokens at a time" if chunk else "of all tokens"


@dataclass(frozen=True)
class Kept:
    """Activations that a device's layers keep.

    sizes: of the model. tokens: of a microbatch on the device.
    tensor: devices that share heads and feed-forward. itemsize: bytes of a number.
    feed_forward_chunk: tokens in layers that keep products; 0 for all of them at once.
      Of several chunks nothing is kept.
    gathered: bytes of a layer's matrices, whole; 0 where they are not gathered.
    """

    sizes: DecoderConfig
    tokens: int
    tensor: int
    itemsize: int
    feed_forward_chunk: int = 0
    gathered: int = 0

    def of_layer(self, policy: str) -> int:
        """Returns the bytes that a layer keeps, by what `REMAT_POLICIES` says.

        Every policy keeps the layer's input; "everything" is counted as "gathered".
        Where layers differ it is their mean.
        """
        kinds = self.sizes.layer_kinds
        kept = 0
        for sizes, kind in zip(self.sizes.of_layers, kinds, strict=True):
            kept += self._of_kind(policy, sizes, kind.is_delta)
        return kept // len(kinds) + self.gathered * (policy in KEEP_GATHERED)

    def _of_kind(self, policy: str, sizes: DecoderConfig, is_delta: bool) -> int:
        """Returns the bytes of the tokens in a layer with Gated DeltaNet, or another.

        A run's state before it is not counted: little beside the tokens' results.
        sizes: of the layer.
        """
        tensor = self.tensor
        outputs = {name: out for name, (_, out) in sizes.matrix_sides(is_delta).items()}
        kept = sizes.hidden_size
        logarithms = 0  # of a token, in float32
        if policy not in RERUN:
            kept += sizes.matrix_sides(is_delta)["output"][0] // tensor
            logarithms = 0 if is_delta else sizes.num_heads // tensor
        if policy in KEEP_PRODUCTS:
            wide = outputs.pop("gate") + outputs.pop("up")
            down = outputs.pop("down")
            if sizes.experts:  # grouped products are not kept
                wide = outputs.pop("shared_gate", 0) + outputs.pop("shared_up", 0)
                outputs.pop("shared_down", 0)
            kept += outputs.pop("output") + sum(outputs.values()) // tensor
            if not 0 < self.feed_forward_chunk < self.tokens:
                kept += wide // tensor
                # Down's, where a norm after it needs it in the backward.
                kept += down * (sizes.norms != "before")
        return self.tokens * (kept * self.itemsize + logarithms * 4)

    def of(self, execution: Execution) -> int:
        """Returns the bytes that all layers keep."""
        runs = execution.runs(self.sizes.num_layers)
        return sum(layers * self.of_layer(run.remat) for run, layers in runs)

    def ladder(self, policy: str) -> list[str]:
        """Returns this policy and those after it that keep more, and are worth it."""
        policies = [policy]
        while policy := NEXT.get(policy, ""):
            has_few = self.gathered > 0 and self.tokens <= GATHERED_UP_TO
            if policy != "gathered" or has_few:
                policies.append(policy)
        return policies

    def rungs(self, policy: str) -> list[int]:
        """Returns by how many bytes a layer keeps more with each next policy."""
        kept = [self.of_layer(p) for p in self.ladder(policy)]
        return [more - less for less, more in pairwise(kept)]

    def climb(self, policy: str, budget: float) -> list[tuple[str, int]]:
        """Returns the policies of the layers and their numbers, first layers first.

        One after the other, from the last one on, layers keep what the next policy
        does, while all that they keep more is within the budget of bytes.
        """
        layers = self.sizes.num_layers
        policies = self.ladder(policy)
        rungs = zip(pairwise(policies), self.rungs(policy), strict=True)
        for (less, more), size in rungs:
            if budget < layers * size:
                last = int(budget // size)
                if last == 0:
                    return [(less, layers)]
                return [(less, layers - last), (more, last)]
            budget -= layers * size
        return [(policies[-1], layers)]
