"""A LLaMA of the papers' sizes, striped over one ring of all chips of a TPU v4 pod.

Command, on every host: python train.py --config=configs/pod.py:SIZE
  --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
(python train.py --config=configs/pod.py is 7b). One sequence a step:
  1b   64 chips (v4-128),    256 Ki tokens of context
  3b   128 chips (v4-256),   1 Mi tokens of context
  7b   512 chips (v4-1024),  4 Mi tokens of context
  13b  512 chips (v4-1024),  2 Mi tokens of context
  30b  512 chips (v4-1024),  1 Mi tokens of context
  65b  512 chips (v4-1024),  1 Mi tokens of context
Hardware: a TPU v4 slice; others with --config.mesh.ring=DEVICES.
Expected: not run on TPUs yet; see the README for what has been compiled.
"""

import ml_collections

from configs import base, llama_sizes

# size: (chips, Ki tokens of context)
_PODS = {
    "1b": (64, 256),
    "3b": (128, 1024),
    "7b": (512, 4096),
    "13b": (512, 2048),
    "30b": (512, 1024),
    "65b": (512, 1024),
}


def get_config(size: str = "7b") -> ml_collections.ConfigDict:
    """Returns the config of a size.

    Raises:
      ValueError: there is no such size.
    """
    if size not in _PODS:
        raise ValueError(f"{size=} must be one of {', '.join(_PODS)}")
    chips, context = _PODS[size]
    config = base.get_config().unlock()
    config.workdir = f"runs/pod/{size}"
    config.model.update(llama_sizes.llama(size))
    config.remat = "nothing"
    config.attention_parts = 4
    config.mesh.fsdp = 1
    config.mesh.ring = chips
    config.data.context_tokens = context * 1024
    config.data.batch_rows = 1
    return config.lock()
