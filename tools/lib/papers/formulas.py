"""Formulas of the two papers.

Ring Attention (2310.01889): tables 1 and 2, figure 5. Striped Attention (2311.09431):
how much faster than a contiguous ring a striped one can be at most.

Letters: b rows, s tokens of a row, c tokens of a device, h hidden size, n heads.
"""

from dataclasses import dataclass

from kernels.layouts import Contiguous, Layout, Striped
from models.flops import num_matrix_parameters
from models.sizes import LanguageModelConfig
from tools.lib.planning.visible import Sequence
from training.chips import Chip

RING_BLOCKS = 6
"""Blocks that a device holds in the paper's ring: its queries and results, the keys and
values that are there, and those that arrive. So its sequence is 6 blocks at least."""


@dataclass(frozen=True)
class SmallestBlock:
    """Table 2: fewest tokens of a device whose transfers hide behind attention.

    block: F / B, with F peak FLOP/s and B bytes/s between neighbours. A ring step takes
      4·c²·h FLOPs, and 4·c·h bytes travel.
    sequence: tokens of a device's sequence, 6 blocks.
    """

    block: float
    sequence: float

    @classmethod
    def of(cls, chip: Chip, links: float = 1) -> "SmallestBlock":
        """Computes both for `links` times the chip's rate one way (see `chips`)."""
        block = chip.peak_flops / (links * chip.interconnect_bytes_per_second)
        return cls(block, RING_BLOCKS * block)


def dataset_flops_ratio(hidden: int, context: int, base_context: int) -> float:
    """Returns figure 5: FLOPs of a data set in contexts of s₂ over s₁ tokens.

    (6h + s₂) / (6h + s₁).
    """
    return (6 * hidden + context) / (6 * hidden + base_context)


def largest_speed_up(model: LanguageModelConfig, ring_size: int, context: int) -> float:
    """Returns how much faster a striped step is, if only products take time.

    Than a contiguous one, causal, at the same rate, every ring step as long as on its
    slowest device, only visible pairs computed. The rest of the model is counted too.
    """

    def flops(layout: Layout) -> float:
        length = context // ring_size
        pairs = Sequence(layout, ring_size, length).area * ring_size  # over all steps
        heads = model.num_heads * model.head_dim
        attention = 4.0 * model.num_layers * heads * pairs
        return 2.0 * num_matrix_parameters(model) * length + attention

    return flops(Contiguous()) / flops(Striped())


def largest_attention_speed_up(ring_size: int, tiles: int | None = None) -> float:
    """Returns the speed-up of attention alone; by default as if without tiles.

    tiles: along a shard.

    Striped Attention, section 3: a contiguous ring computes one half and then whole
    blocks on its slowest device, a striped one halves; with tiles, those on a diagonal
    are computed in full.
    """
    half = 0.5 if tiles is None else (tiles + 1) / (2 * tiles)
    return (ring_size - 1 + half) / (ring_size * half)
