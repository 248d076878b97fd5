"""Compiles attention on a few tiles for an AOT topology.

`tpu_schedule.py` runs this as a program, once for every kernel, as the compiler's dump
flags hold for a whole process:

    python -m tools.lib.compiled.tile_program '{"tile": {...}, ...}'

compiles the request of `write_request`, and prints the bytes of VMEM that the kernel
takes, spills included.
"""

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels.backends.tpu import launch
from kernels.backends.tpu.block_sizes import TPU_BLOCKS, TpuBlocks
from tools.lib.compiled.pods import compile_for, tpu_devices

KV_HEADS = 2
"""One for each core of a megacore."""


@dataclass(frozen=True)
class Tile:
    """A tile to compile, and the problem around it.

    chip: of `pods.PODS`.
    direction: "forward" or "backward".
    block_q, block_k: query rows and key slots of the tile; `TpuBlocks` may have others.
    group: query heads of a key/value head. Ours stacks their rows in a tile.
    length: tokens, queries and keys alike.
    soft_cap: of the scores, if any.
    """

    chip: str
    direction: str
    block_q: int
    block_k: int
    head_dim: int
    dtype: str
    group: int
    length: int
    soft_cap: float | None = None

    def __post_init__(self):
        if self.length % self.block_q or self.length % self.block_k:
            raise ValueError(f"{self.length=} is not a multiple of the blocks: {self}")
        if self.block_q % self.group:
            raise ValueError(f"{self.block_q=} is not a multiple of {self.group=}")

    @property
    def kernel(self) -> str:
        """Name of our kernel for it."""
        return f"flash_{self.direction}"

    def own_blocks(self) -> TpuBlocks:
        """Returns the table's blocks, whose chips have JAX's names ("7x")."""
        table = TPU_BLOCKS[self.direction][self.soft_cap is not None]
        return table[self.chip.removeprefix("tpu")]


def make_program(
    tile: Tile, blocks: TpuBlocks | None
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the TPU kernel, and the shapes of its arguments.

    blocks: None for the table's.
    """
    tokens = tile.length
    heads = tile.group * KV_HEADS
    q = jax.ShapeDtypeStruct((1, tokens, heads, tile.head_dim), tile.dtype)
    k = jax.ShapeDtypeStruct((1, tokens, KV_HEADS, tile.head_dim), tile.dtype)
    bound = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    row = jax.ShapeDtypeStruct((1, heads, tokens), jnp.float32)
    dq = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    dk = jax.ShapeDtypeStruct(k.shape, jnp.float32)
    options = {"scale": tile.head_dim**-0.5, "soft_cap": tile.soft_cap}
    if blocks is None:
        size = {"stacked_rows": tile.block_q, "block_k": tile.block_k}
        blocks = dataclasses.replace(tile.own_blocks(), **size)
    backend = launch.Launch(blocks=blocks)
    if tile.direction == "forward":
        return partial(backend.forward, **options), (q, k, k, bound, bound)

    # As in a ring, where the kernel goes on from dk and dv so far.
    def backward(*operands: jax.Array) -> Any:
        *given, dq, dk, dv = operands
        return backend.backward(*given, **options, dq=dq, dkv=(dk, dv))

    return backward, (q, k, k, q, row, row, bound, bound, dq, dk, dk)


def write_request(tile: Tile, blocks: TpuBlocks | None) -> str:
    """Returns the argument that this program must be called with."""
    return json.dumps({"tile": tile, "blocks": blocks}, default=dataclasses.asdict)


def read_request(text: str) -> tuple[Tile, TpuBlocks | None]:
    """Undoes `write_request`."""
    request = json.loads(text)
    blocks = request["blocks"]
    return Tile(**request["tile"]), TpuBlocks(**blocks) if blocks else None


def read_vmem(program_text: str, kernel: str) -> int:
    """Returns the VMEM bytes of a kernel, from the text of the compiled program.

    Raises:
      ValueError: there is no such kernel, or more than one.
    """
    configs = re.findall(
        rf'%{kernel}[.\d]* = .*?"used_scoped_memory_configs":(\[.*?\])',
        program_text,
        re.DOTALL,
    )
    if len(configs) != 1:
        raise ValueError(
            f"{len(configs)} kernels {kernel!r} were compiled, instead of 1"
        )
    vmem = 0
    for memory in json.loads(configs[0]):
        if memory["memory_space"] == "1":  # VMEM
            vmem += int(memory["size"])
    return vmem


def main(request: str) -> None:
    """Compiles what a request asks for, and prints the kernel's VMEM."""
    tile, blocks = read_request(request)
    function, arguments = make_program(tile, blocks)
    mesh = Mesh(np.array(tpu_devices(tile.chip)[:1]), ("device",))
    text = compile_for(mesh, function, *arguments).as_text()
    print(read_vmem(text, tile.kernel))


if __name__ == "__main__":
    main(sys.argv[1])
