"""Agentic Transformer of 304M parameters: 32 or 128 trajectories of 1000 steps.

Command: python train.py --config=configs/exorl_at.py:TRAJECTORIES
  --config.data.trajectories=CACHE/walker/rnd/run
TRAJECTORIES is 32 (python train.py --config=configs/exorl_at.py), 128,000 tokens a
sequence and about 2.6e15 FLOPs forward and backward; or 128, 512,000 tokens and 4e16
FLOPs, minutes a step.
Hardware: 8 devices of 16 GiB or more; ring 8, striped by whole steps.
Expected: not run. The sizes are those of Ring Attention's table 5 ("350M": 24 layers,
1024, 16 heads), whose scores have no stated scale, so results cannot be compared.
"""

import ml_collections

from configs import agents

STEPS = 1000


def get_config(trajectories: str = "32") -> ml_collections.ConfigDict:
    """Returns the config of a context of this many trajectories.

    Raises:
      ValueError: it is neither 32 nor 128.
    """
    if trajectories not in ("32", "128"):
        raise ValueError(f"{trajectories!r} is not one of 32, 128")
    config = agents.get_config().unlock()
    config.workdir = f"runs/exorl_at/{trajectories}"
    config.remat = "nothing"
    config.attention_parts = 4  # all heads at once do not fit on a chip of 16 GiB

    config.agent.observation_size = 24  # a walker's
    config.agent.action_size = 6
    config.agent.episode_steps = STEPS
    config.agent.chain_length = int(trajectories)
    config.model.hidden_size = 1024
    config.model.feed_forward_size = 2736
    config.model.num_layers = 24
    config.model.num_heads = 16
    config.model.num_kv_heads = 16
    config.model.head_dim = 64
    config.mesh.ring = 8

    config.data.context_tokens = 4 * STEPS * int(trajectories)
    config.data.batch_rows = 1
    # Of a million steps, 1000 episodes: as many as a chain has, and more.
    config.data.held_out_share = 0.3

    config.optimizer.peak_lr = 1e-4
    config.optimizer.end_lr = 1e-5
    config.optimizer.warmup_steps = 1000
    config.optimizer.weight_decay = 1e-4
    config.optimizer.clip_norm = 0.25
    config.train.steps = 10_000
    config.train.validation_batches = 1
    return config.lock()
