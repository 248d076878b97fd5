"""Which matrices have low-rank adapters, and of which rank (LoRA, 2106.09685)."""

import math
from dataclasses import dataclass

TARGETS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
    "gate": "gate",
    "up": "up",
    "down": "down",
}
"""Matrices of a layer that may have an adapter: names in a config, and in modules."""


@dataclass(frozen=True)
class Lora:
    """Adapters of the matrices of a decoder's layers.

    rank: of all of them; 0 for none. alpha: alpha / rank is a factor on each.
    targets: names of `TARGETS`, separated by commas.
    gate_up_rank: of the A that gate and up of each expert share, as those that PEFT's
      `target_parameters` name; 0: each has its own, of `rank`.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: str = ",".join(TARGETS)
    gate_up_rank: int = 0

    def __post_init__(self):
        errors = []
        if not 0 <= self.rank < 1 << 31:
            errors.append(f"rank={self.rank} must be at least 0, and 0 for no adapters")
        if not 0 < self.alpha < math.inf:
            errors.append(f"alpha={self.alpha} must be a number above 0")
        targets = self.targets.split(",")
        has_doubles = len(set(targets)) < len(targets)
        if has_doubles or not set(targets) <= TARGETS.keys():
            errors.append(
                f"targets={self.targets!r} must be some of {','.join(TARGETS)}, each "
                "once, separated by commas"
            )
        has_both = {"gate", "up"} <= set(targets)
        if not 0 <= self.gate_up_rank < 1 << 31 or self.gate_up_rank and not has_both:
            errors.append(
                f"gate_up_rank={self.gate_up_rank} must be at least 0, and 0 without "
                f"both gate and up in targets={self.targets!r}"
            )
        if errors:
            raise ValueError("; ".join(errors))

    @property
    def scale(self) -> float:
        """Returns the factor on what adapters give; 0 without any."""
        return self.alpha / self.rank if self.rank else 0.0

    def rank_of(self, matrix: str) -> int:
        """Returns the rank of a matrix's adapter, by its name in `TARGETS`."""
        is_shared = self.gate_up_rank > 0 and matrix in ("gate", "up")
        return self.gate_up_rank if is_shared else self.rank

    @property
    def matrices(self) -> list[str]:
        """Returns the matrices that have adapters, by their names in `TARGETS`."""
        if not self.rank:
            return []
        return [TARGETS[name] for name in self.targets.split(",")]
