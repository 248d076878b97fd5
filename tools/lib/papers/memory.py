"""By how much a training step's memory grows with a device's tokens, by ring size.

The sequence is as many times longer as the ring is larger.
"""

from collections.abc import Iterator
from typing import Any

import ml_collections

from configs import base as base_config
from configs import models
from tools.lib.compiled.pods import aot_pod
from tools.lib.planning.step import Step, peak_bytes

TOKENS_OF_A_DEVICE = 8192, 16384
"""While the ring grows."""

PODS = {4: "2x2x1", 16: "2x2x4", 64: "4x4x4", 256: "4x8x8", 1024: "8x8x16"}


def layer_config(size: str, layers: int) -> ml_collections.ConfigDict:
    """Returns a LLaMA of few layers and a small vocabulary."""
    config = base_config.get_config()
    config.model.update(models.fields_of(size))
    config.model.num_layers = layers
    config.model.vocab_size = 256
    config.remat = "nothing"
    config.data.batch_rows = 1
    return config


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
