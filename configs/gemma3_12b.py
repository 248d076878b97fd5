"""Gemma 3 12B on a long context, on a pod of TPU v5p or v6e or on eight H200s.

Command, on every host: python train.py --config=configs/gemma3_12b.py:POD
  --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
  --config.init_from=WEIGHTS
(WEIGHTS by tools/convert_hf.py; python train.py --config=configs/gemma3_12b.py is v5p.)
  v5p   64 chips,  1 Mi tokens of context, ring 32 x tensor 2
  v6e   64 chips,  1 Mi tokens of context, ring 32 x tensor 2
  h200  8 GPUs,    128 Ki tokens of context, ring 4 x tensor 2
Hardware: v5p:4x4x4, v6e:8x8 or one host of H200s.
Expected: planned and not run; see results/2026-11-23-families.md.
"""

import ml_collections

from configs import families


def get_config(pod: str = "v5p") -> ml_collections.ConfigDict:
    """Returns the config of a pod: v5p, v6e or h200.

    Raises:
      ValueError: there is no such pod.
    """
    config = families.config_of("gemma3_12b", pod).unlock()
    if pod == "v6e":  # 32 GiB a chip
        config.remat = "nothing"
    return config.lock()
