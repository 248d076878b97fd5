"""Lists the variants of splash attention to compile, with the best known tiles."""

import dataclasses
from collections.abc import Sequence

from tools.lib.tpu_compiler.tile_program import Splash, Tile

Shape = tuple[int, int, int]

LARGE: tuple[Shape, ...] = (
    (1024, 1024, 256),
    (1024, 1024, 512),
    (1024, 1024, 1024),
    (1024, 2048, 512),
    (1024, 2048, 1024),
    (2048, 1024, 512),
    (2048, 1024, 1024),
    (2048, 2048, 512),
    (2048, 2048, 1024),
)

SMALL: tuple[Shape, ...] = (
    (512, 512, 256),
    (512, 512, 512),
    (512, 1024, 256),
    (512, 1024, 512),
    (512, 1024, 1024),
)

SHAPES = {"splash": (*SMALL, *LARGE), "tokamax": LARGE}
"""Tiles to choose from, for one of ours of 1024 x 1024: block_q, block_k, compute_k."""

LIKELY: Shape = (1024, 1024, 512)
"""For a variant that has none in `BEST`."""

BEST: dict[str, dict[str, dict[str, Shape]]] = {
    "forward": {
        "splash causal": {
            "v4": (1024, 2048, 1024),
            "v5e": (1024, 2048, 512),
            "v5p": (1024, 2048, 1024),
            "v6e": (1024, 2048, 512),
        },
        "splash full": {
            "v4": (1024, 1024, 256),
            "v5e": (1024, 2048, 1024),
            "v5p": (1024, 2048, 1024),
            "v6e": (2048, 2048, 1024),
        },
    },
    "backward": {
        "splash causal": {
            "v4": (1024, 1024, 512),
            "v5e": (1024, 1024, 256),
            "v5p": (512, 1024, 1024),
            "v6e": (1024, 1024, 1024),
        },
        "splash full": {
            "v4": (512, 1024, 512),
            "v5e": (1024, 2048, 512),
            "v5p": (1024, 1024, 256),
            "v6e": (2048, 2048, 1024),
        },
        "splash causal, fused": {
            "v4": (512, 1024, 256),
            "v5e": (1024, 1024, 512),
            "v5p": (1024, 1024, 1024),
            "v6e": (1024, 1024, 1024),
        },
        "splash full, fused": {
            "v4": (512, 1024, 256),
            "v5e": (1024, 1024, 512),
            "v5p": (1024, 1024, 512),
            "v6e": (1024, 2048, 512),
        },
    },
}
"""By direction, variant and chip, the one of `SHAPES` with the fewest bundles for 1024
x 1024 x 128 in bfloat16, found with --splash all and libtpu 0.0.48.1. JAX's were not
tried with 2048 x 1024, and backward with 2048 keys only on v5e and v6e, full."""

TOKAMAX: dict[str, dict[str, dict[str, Shape]]] = {
    "forward": {
        "": {
            "v5e": (1024, 2048, 1024),
            "v5p": (1024, 2048, 1024),
            "v6e": (2048, 2048, 1024),
        },
        ", LP": {
            "v5e": (1024, 2048, 1024),
            "v5p": (1024, 2048, 1024),
            "v6e": (1024, 2048, 512),
        },
        ", no maximum": {
            "v5e": (2048, 2048, 512),
            "v5p": (2048, 2048, 512),
            "v6e": (2048, 2048, 1024),
        },
        ", LP, no maximum": {
            "v5e": (1024, 2048, 1024),
            "v5p": (2048, 2048, 512),
            "v6e": (2048, 2048, 1024),
        },
    },
    "backward": {
        ", fused": {
            "v5e": (2048, 1024, 1024),
            "v5p": (1024, 2048, 1024),
            "v6e": (2048, 2048, 512),
        },
    },
}
"""The same of tokamax, by options: the best under a causal mask that fit with none too.
Up to 2 % shorter on a v5e with LP, but too large without a mask: 2048 x 1024 x 1024."""

for _direction, _options in TOKAMAX.items():
    for _mask in ("causal", "full"):
        BEST[_direction] |= {f"tokamax {_mask}{n}": t for n, t in _options.items()}


def variants(kernel: str, direction: str, mask: str) -> list[Splash]:
    """Returns what JAX's splash, or tokamax, offers: kernels and options."""
    plain = Splash(mask, False, *LIKELY, kernel)
    if direction == "backward":
        fused = dataclasses.replace(plain, is_fused=True)
        return [plain, fused] if kernel == "splash" else [fused]
    if kernel == "splash":
        return [plain]
    flagged = dataclasses.replace(plain, has_lp_scheduler=True)
    kinds = [plain, flagged]
    return kinds + [dataclasses.replace(kind, max_logit=0.0) for kind in kinds]


def shapes(tile: Tile, chosen: str, splash: Splash) -> list[Shape]:
    """Returns the tiles to compile, with at most twice the rows and keys of `tile`.

    chosen: "all", or "best" for the one in `BEST`.
    """
    every = SHAPES[splash.kernel]
    if chosen == "best":
        known = BEST[tile.direction].get(splash.name, {})
        every = (known.get(tile.chip, LIKELY),)
    limits = 2 * tile.block_q, 2 * tile.block_k, 2 * tile.block_k
    return sorted({tuple(map(min, shape, limits)) for shape in every})


def list_splashes(
    tile: Tile, kernels: Sequence[str], masks: Sequence[str], chosen: str
) -> list[Splash]:
    """Returns the variants of splash attention that a tile is compared with."""
    return [
        dataclasses.replace(splash, block_q=q, block_k=k, compute_k=compute)
        for kernel in kernels
        for mask in masks
        for splash in variants(kernel, tile.direction, mask)
        for q, k, compute in shapes(tile, chosen, splash)
    ]
