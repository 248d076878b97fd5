"""LLaMA 7B at 4 Mi tokens of context, striped over the ring of a TPU v4-1024.

Command, on every host: python train.py --config=configs/tpuv4_7b.py
  --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
Hardware: TPU v4-1024 (512 chips), one sequence a step, ring 512.
Expected: not run on TPUs yet; see the README for what has been compiled.
"""

import ml_collections

from configs import base, llama_sizes


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config().unlock()
    config.workdir = "runs/tpuv4_7b"
    config.model.update(llama_sizes.llama("7b"))
    config.remat = "nothing"
    config.attention_parts = 4
    config.mesh.fsdp = 1
    config.mesh.ring = 512
    config.data.context_tokens = 4 * 1024 * 1024
    config.data.batch_rows = 1
    return config.lock()
