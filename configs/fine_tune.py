"""Adapters (LoRA) of imported weights, of any family, on one host.

Command: python train.py --config=configs/fine_tune.py:WEIGHTS
  --config.data.corpus=CORPUS
WEIGHTS is a workdir by tools/convert_hf.py, whose model this is; CORPUS of chats, by
tools/prepare_chat.py. All parameters: --config.lora.rank=0 and a lower
--config.optimizer.peak_lr, such as 1e-5.
Hardware: one device, or all of a host in a ring.
Expected: the loss falls within 20 steps. It has run with small weights only; see
docs/fine-tuning.md.
"""

import json
from pathlib import Path

from ml_collections import ConfigDict

from configs import base

LORA = dict(
    lora=dict(rank=16, alpha=32.0),
    data=dict(rows="whole"),  # conversations
    optimizer=dict(peak_lr=2e-4, end_lr=2e-5, weight_decay=0.0, warmup_steps=10),
)
"""Fields of a config that trains adapters."""


def get_config(weights: str = "") -> ConfigDict:
    """Returns the config that trains adapters of the weights in a workdir.

    Raises:
      ValueError: there are none, or it is a published model, not imported.
    """
    config = base.changed(workdir="runs/fine_tune", attention="auto", **LORA)
    config.data.update(context_tokens=8192, batch_rows=4)
    # A tenth of whatever peak_lr is set to, unless it is set itself.
    config.optimizer.end_lr = config.optimizer.get_ref("peak_lr") / 10
    if weights:
        try:
            fields = json.loads(Path(weights, "config.json").read_text())
            for part in ("model", "rope_scaling"):
                config[part].update(fields[part])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{weights} holds no imported weights: import them with "
                "tools/convert_hf.py, and name the workdir that it wrote"
            ) from error
        config.init_from = weights
        config.workdir += f"/{Path(weights).name}"
    return config
