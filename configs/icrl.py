"""Agents that find out in context which of many worlds they are in, on two cores.

No observation shows the world: a goal in Dark Room (10x10 with 100 steps an episode, or
9x9 with 20), or a goal of a point mass: tasks that share their exploratory steps, of
ExoRL's format, with rewards of their own.

Command, with WORLDS dark_room/10x10, dark_room/9x9 or point_mass/goals, and AGENT dpt
(Decision-Pretrained Transformer), ad (Algorithm Distillation; for rooms), at (Agentic
Transformer), dt (Decision Transformer) or bc (behaviour cloning of the best 10 %). For
rooms, with KIND exploration for dpt, else learning:
  python -m tools.make_dark_room --room ROOM --recorded KIND \\
      --output trajectories/dark_room/ROOM/KIND
For a point mass:
  python -m tools.make_exorl --domain point_mass --action-repeat 10 --episodes 600 \\
      --output datasets
  python -m tools.pack_exorl --root datasets --domain point_mass --algorithm scripted \\
      --task goals --worlds 300 --action-repeat 10 --piece 20 --cache trajectories
Then, and `tools.evaluate exorl` after it:
  python train.py --config=configs/icrl.py:WORLDS/AGENT
(python train.py --config=configs/icrl.py is point_mass/goals/dpt)
Hardware: none, a CPU.
Expected: see results/2026-11-28-in-context-tasks.md, 2026-11-25-in-context-worlds.md.
"""

import ml_collections

from configs import base
from configs.agents import AGENTS, learns_in_context

# worlds: (steps of an episode, episodes in a context, updates, agents)
_WORLDS = {
    "point_mass/goals": (20, 8, 1000, ("dpt", "at", "dt", "bc")),
    "dark_room/10x10": (100, 6, 3000, AGENTS),
    "dark_room/9x9": (20, 20, 1000, AGENTS),
}
_NAMES = [f"{worlds}/{agent}" for worlds, row in _WORLDS.items() for agent in row[-1]]


def get_config(name: str = _NAMES[0]) -> ml_collections.ConfigDict:
    """Returns the config of worlds and agent.

    Raises:
      ValueError: the name is unknown.
    """
    base.check_name(name, _NAMES)
    domain, task, agent = name.split("/")
    steps, episodes, updates, _ = _WORLDS[f"{domain}/{task}"]
    config = learns_in_context(agent, steps, episodes)
    config.workdir = f"runs/icrl/{name}"
    if domain == "dark_room":
        recorded = "exploration" if agent == "dpt" else "learning"
        config.data.trajectories = f"trajectories/dark_room/{task}/{recorded}"
        config.agent.action_kind = "discrete"
        config.agent.return_scale = float(steps)
    else:
        config.data.trajectories = f"trajectories/{domain}/scripted/{task}"
        # Who does what explorers did has to explore as they did, and not as their mean.
        config.agent.action_kind = "binned"
        config.model.num_layers = 2
    if agent == "ad":
        # Else it falls back as soon as it has acted longer than its contexts were.
        config.data.latest_begin = 0.8
    config.train.steps = updates
    return config.lock()
