"""LLaMA 7B at 4 Mi tokens of context: configs/models.py:7b/v4 by the name of its pod.

Command, on every host: python train.py --config=configs/tpuv4_7b.py
  --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
Hardware: TPU v4-1024 (512 chips), one sequence a step, ring 512.
Expected: not run on TPUs yet; see the README for what has been compiled.
"""

from ml_collections import ConfigDict

from configs import models


def get_config() -> ConfigDict:
    config = models.get_config("7b/v4")
    config.workdir = "runs/tpuv4_7b"
    return config
