"""Agentic Transformer of 304M parameters: 128 trajectories of 1000 steps in a context.

Command: python train.py --config=configs/exorl_at_128.py
  --config.data.trajectories=CACHE/walker/rnd/run
Hardware: 8 devices of 16 GiB or more; ring 8, striped by whole steps.
Expected: not run. 512,000 tokens a sequence, about 4e16 FLOPs forward and backward: on
8 devices this is a matter of minutes a step. As exorl_at_32.py otherwise.
"""

import ml_collections

from configs import exorl_at_32

TRAJECTORIES = 128


def get_config() -> ml_collections.ConfigDict:
    return exorl_at_32.agent(TRAJECTORIES, "exorl_at_128")
