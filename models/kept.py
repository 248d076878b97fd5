"""Counts what layers keep for their backward, and how many may keep more."""

from dataclasses import dataclass
from itertools import pairwise

from models.execution import Execution
from models.remat import NEXT
from models.sizes import DecoderConfig


@dataclass(frozen=True)
class Kept:
    """Activations that a device's layers keep.

    sizes: of the model. tokens: of a microbatch on the device.
    tensor: devices that share heads and feed-forward. itemsize: bytes of a number.
    feed_forward_chunk: tokens in layers that keep products; 0 for all of them at once.
      Of several chunks nothing is kept.
    """

    sizes: DecoderConfig
    tokens: int
    tensor: int
    itemsize: int
    feed_forward_chunk: int = 0

    def of_layer(self, policy: str) -> int:
        """Returns the bytes that a layer keeps, by what `remat.REMAT_POLICIES` says.

        Every policy keeps the layer's input; "everything" is counted as "products".
        """
        sizes, tensor = self.sizes, self.tensor
        heads = sizes.num_heads // tensor
        share = {"nothing": 0, "offload": 0, "tail": 0.5}.get(policy, 1)
        kept = sizes.hidden_size + share * heads * sizes.head_dim
        if policy in ("products", "everything"):
            kept += (heads + 2 * sizes.num_kv_heads // tensor) * sizes.head_dim
            kept += sizes.hidden_size  # the attention's projection
            if not 0 < self.feed_forward_chunk < self.tokens:
                kept += 2 * sizes.feed_forward_size // tensor  # gate and up
                # Down's, where a norm after it needs it in the backward.
                kept += sizes.hidden_size * (sizes.norms != "before")
        return int(self.tokens * (kept * self.itemsize + share * heads * 4))

    def of(self, execution: Execution) -> int:
        """Returns the bytes that all layers keep."""
        runs = execution.runs(self.sizes.num_layers)
        return sum(layers * self.of_layer(run.remat) for run, layers in runs)

    def rungs(self, policy: str) -> list[int]:
        """Returns by how many bytes a layer keeps more with each next policy."""
        return [b - a for a, b in pairwise(map(self.of_layer, _from(policy)))]

    def budget(self, policy: str, steps: int) -> float:
        """Returns bytes that let layers climb so many rungs in all, with some spare."""
        each = [
            size for size in self.rungs(policy) for _ in range(self.sizes.num_layers)
        ]
        return sum(each[:steps]) + min(each) / 2 if steps else 0.0

    def climb(self, policy: str, budget: float) -> list[tuple[str, int]]:
        """Returns the policies of the layers and their numbers, first layers first.

        One after the other, from the last one on, layers keep what the next policy
        does, while all that they keep more is within the budget of bytes.
        """
        layers, policies = self.sizes.num_layers, _from(policy)
        for (less, more), size in zip(
            pairwise(policies), self.rungs(policy), strict=True
        ):
            if budget < layers * size:
                count = int(budget // size)
                return [(less, layers - count), (more, count)][: 1 + bool(count)]
            budget -= layers * size
        return [(policies[-1], layers)]


def _from(policy: str) -> tuple[str, ...]:
    """Returns this policy and those that come after it."""
    return (policy, *_from(NEXT[policy])) if policy in NEXT else (policy,)
