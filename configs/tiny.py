"""A small byte-level LLaMA on Python's own standard library, striped, anywhere.

Command: make train, or python train.py --config=configs/tiny.py
Hardware: none: 8 simulated CPU devices, fsdp 2 x ring 4.
Expected: validation loss below 2.3 nats per byte, from 5.6, in under 4 minutes on two
cores. Run it again: it resumes, or says that it is complete.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    return base.changed(
        workdir="runs/tiny",
        simulated_devices=8,
        model=dict(
            hidden_size=128,
            feed_forward_size=344,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
        ),
        compute_dtype="float32",
        mesh=dict(fsdp=2, ring=4),
        data=dict(context_tokens=512, batch_rows=4),
        optimizer=dict(peak_lr=3e-3, end_lr=3e-4, warmup_steps=30),
        train=dict(steps=300, validation_batches=4),
        checkpoint=dict(save_every_steps=50),
    )
