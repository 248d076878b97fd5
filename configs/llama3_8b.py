"""LLaMA 3.1 8B on a long context: on a pod, on eight H200s; with LoRA, on one host.

Command, on every host: python train.py --config=configs/llama3_8b.py:POD
  --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
  --config.init_from=WEIGHTS
(WEIGHTS by tools/convert_hf.py; python train.py --config=configs/llama3_8b.py is v5p.)
  v5p   64 chips,  1 Mi tokens of context, ring 64
  v6e   64 chips,  1 Mi tokens of context, ring 64
  h200  8 GPUs,    128 Ki tokens of context, ring 8
Adapters alone (LoRA) on one host; for longer contexts see docs/fine-tuning.md:
  lora_h200  1 GPUs,  128 Ki tokens of context, ring 1
  lora_v5e   8 chips, 128 Ki tokens of context, ring 8
  lora_v6e   8 chips, 128 Ki tokens of context, ring 8
Hardware: v5p:4x4x4, v6e:8x8 or one host of H200s; an H200, v5e:2x4 or v6e:2x4; others
  with --config.mesh.ring=DEVICES.
Expected: planned and not run; see results/2026-11-23-families.md and
  results/2026-11-23-fine-tuning.md.
"""

import ml_collections

from configs import families


def get_config(pod: str = "v5p") -> ml_collections.ConfigDict:
    """Returns the config of a pod, v5p, v6e or h200, or of a host: lora_h200 and so on.

    Raises:
      ValueError: there is no such pod.
    """
    return families.config_of("llama3_8b", pod)
