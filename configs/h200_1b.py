"""LLaMA 1B at 32K tokens of context on one GPU, for MFU.

Command: python train.py --config=configs/h200_1b.py
Hardware: one H100 or H200; more with --config.mesh.ring=-1 and a longer context.
Expected: MFU 44.8 % and 27,800 tokens a second on one H100, measured at d687854.
"""

from ml_collections import ConfigDict

from configs import base, models


def get_config() -> ConfigDict:
    # The default corpus is bytes: its ids are a small part of the vocabulary.
    return base.changed(
        workdir="runs/h200_1b",
        attention="auto",
        model=models.fields_of("1b"),
        mesh=dict(ring=1),
        data=dict(context_tokens=32 * 1024, batch_rows=1),
        optimizer=dict(warmup_steps=10),
        train=dict(steps=50, log_every_steps=5, validation_batches=0),
    )
