"""Table 1 of Ring Attention (2310.01889): memory of a layer's activations, compiled.

One layer's forward pass, compiled for TPUs with every attention system of
the papers, at two lengths: what does not grow with the length (parameters, tables) is
in both, and their difference is compared with the difference of the paper's formulas.

And by what a training step's memory grows with a device's tokens when the sequence is
as many times longer as the ring is larger.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import ml_collections

from configs import base as base_config
from configs import llama_sizes
from tasks import base, text
from tools.lib.papers.formulas import activation_bytes
from tools.lib.planning.memory import device_bytes, peak_bytes
from tools.lib.planning.step import Step
from training.pods import Pod, aot_pod, compile_for

RING = 4
SYSTEMS = (
    # name, ring size, tokens of a sequence, parts that heads are attended to in
    ("vanilla", 1, (2048, 4096), 1),
    ("memory_efficient", 1, (32768, 65536), 1),
    ("blockwise", 1, (32768, 65536), 1),
    ("blockwise", 1, (32768, 65536), 4),
    ("ring", RING, (131072, 262144), 1),
    ("striped", RING, (131072, 262144), 1),
    ("striped", RING, (131072, 262144), 4),
)
TOKENS_OF_A_DEVICE = 8192, 16384
"""While the ring grows."""

PODS = {4: "2x2x1", 16: "2x2x4", 64: "4x4x4", 256: "4x8x8", 1024: "8x8x16"}


def layer_config(size: str, layers: int) -> ml_collections.ConfigDict:
    """Returns a LLaMA of few layers and a small vocabulary."""
    config = base_config.get_config()
    config.model.update(llama_sizes.llama(size))
    config.model.num_layers = layers
    config.model.vocab_size = 256
    config.remat = "nothing"
    config.data.batch_rows = 1
    return config


@dataclass(frozen=True)
class Forward:
    """Loss of one row on the devices of an AOT topology, before it is compiled."""

    config: ml_collections.ConfigDict
    pod: Pod

    def temporary_bytes(self) -> int:
        """Returns what a device holds besides parameters and batch."""
        config = self.config
        partition = base.partition(config, self.pod.devices)
        model = text.model(config, partition)
        loss = jax.jit(text.loss_function(config, model, partition))
        parameters = jax.tree.map(
            lambda s, names: jax.ShapeDtypeStruct(
                s.shape, s.dtype, sharding=partition.sharding(names, s.shape)
            ),
            model.shapes,
            model.axes,
        )
        batch = text.abstract_batch(config, partition)
        compiled = compile_for(partition.mesh, loss, parameters, batch)
        return peak_bytes(compiled.memory_analysis()) - device_bytes(
            (parameters, batch)
        )


def table_1(size: str = "1b") -> Iterator[dict[str, Any]]:
    """Yields bytes by which a layer's activations grow, compiled and by formula."""
    for system, ring, lengths, parts in SYSTEMS:
        config = layer_config(size, layers=1)
        config.attention, config.attention_parts = system, parts
        config.mesh.update(data=1, fsdp=1, ring=ring, tensor=1)
        pod = aot_pod("v4:2x2x1").first(ring)
        compiled, formula = [], []
        for tokens in lengths:
            config.data.context_tokens = tokens
            compiled.append(Forward(config, pod).temporary_bytes())
            sizes = {"h": config.model.hidden_size, "n": config.model.num_heads}
            formula.append(
                activation_bytes(system, b=1, s=tokens, c=tokens // ring, **sizes)
            )
        yield {
            "system": system,
            "ring": ring,
            "parts": parts,
            "tokens": lengths,
            "compiled_bytes": compiled[1] - compiled[0],
            "formula_bytes": formula[1] - formula[0],
        }


def by_ring(size: str = "1b", layers: int = 2) -> Iterator[dict[str, Any]]:
    """Yields bytes by which a step's memory grows with a device's tokens, by ring.

    What does not grow with them is left out: state, gradients, and buffers for gathered
    parameters, for which the compiler takes other collectives on a whole pod.
    """
    for ring, shape in PODS.items():
        peaks = []
        for tokens in TOKENS_OF_A_DEVICE:
            config = layer_config(size, layers)
            config.mesh.update(data=1, fsdp=1, ring=ring, tensor=1)
            config.data.context_tokens = ring * tokens
            step = Step.of(config, aot_pod(f"v4:{shape}"))
            peaks.append(peak_bytes(step.compile().memory_analysis()))
        yield {
            "ring": ring,
            "tokens": ring * TOKENS_OF_A_DEVICE[-1],
            "peak_bytes": peaks,
            "activation_bytes": peaks[1] - peaks[0],
        }
