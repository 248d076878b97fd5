"""Agents that find out in context which cart-pole they act in, on two cores.

Which way the motor pushes, and how hard, the masses and the length differ from world to
world, and are in no observation.

Command, with AGENT dpt (Decision-Pretrained Transformer), ad (Algorithm Distillation),
at (Agentic Transformer), dt (Decision Transformer) or bc (behaviour cloning of the best
10 %):
  python -m tools.make_worlds --worlds 200 --episodes 12 --action-repeat 10 \\
      --output datasets
  python -m tools.pack_exorl --root datasets --domain cartpole --algorithm worlds \\
      --task swingup --action-repeat 10 --targets --cache trajectories
  python train.py --config=configs/icrl_cartpole.py:AGENT
(python train.py --config=configs/icrl_cartpole.py is dpt), then `tools.evaluate exorl`.
Hardware: none, a CPU.
Expected: see results/2026-11-25-in-context-worlds.md.
"""

import ml_collections

from configs.agents import AGENTS, learns_in_context


def get_config(name: str = "dpt") -> ml_collections.ConfigDict:
    """Returns the config of an agent.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in AGENTS:
        raise ValueError(f"{name!r} is not one of {', '.join(AGENTS)}")
    config = learns_in_context(name, steps=100, episodes=4)
    config.workdir = f"runs/icrl_cartpole/{name}"
    config.agent.observation_size = 5
    config.agent.action_size = 1
    if name != "dpt":
        # Who does what learners did has to explore as they did, and not as their mean.
        config.agent.action_kind = "binned"
    config.agent.return_scale = 1000.0
    config.data.trajectories = "trajectories/cartpole/worlds/swingup"
    config.train.steps = 1500
    return config.lock()
