"""A small byte-level LLaMA on Python's own standard library, striped, anywhere.

Command: make train, or python train.py --config=configs/tiny.py
Hardware: none: 8 simulated CPU devices, fsdp 2 x ring 4.
Expected: validation loss below 2.3 nats per byte, from 5.6, in under 4 minutes on two
cores. Run it again: it resumes, and goes on.
"""

import ml_collections

from configs import base


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config().unlock()
    config.workdir = "runs/tiny"
    config.simulated_devices = 8

    config.model.hidden_size = 128
    config.model.feed_forward_size = 344
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.head_dim = 32
    config.compute_dtype = "float32"
    config.remat = "attention"

    config.mesh.fsdp = 2
    config.mesh.ring = 4

    config.data.context_tokens = 512
    config.data.batch_rows = 4

    config.optimizer.peak_lr = 3e-3
    config.optimizer.end_lr = 3e-4
    config.optimizer.warmup_steps = 30
    config.train.steps = 300
    config.train.extra_steps = 50
    config.train.log_every_steps = 10
    config.train.validate_every_steps = 100
    config.train.validation_batches = 4
    config.checkpoint.save_every_steps = 50
    return config.lock()
