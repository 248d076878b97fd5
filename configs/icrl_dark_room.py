"""Agents that learn in context in Dark Room, whose goals are worlds, on two cores.

Command, with ROOM 10x10 (100 steps an episode) or 9x9 (20), and AGENT dpt
(Decision-Pretrained Transformer), ad (Algorithm Distillation), at (Agentic
Transformer), dt (Decision Transformer) or bc (behaviour cloning of the best 10 %):
  python -m tools.make_dark_room --room ROOM --recorded KIND \\
      --output trajectories/dark_room/ROOM/KIND
KIND is exploration for dpt, else learning:
  python train.py --config=configs/icrl_dark_room.py:ROOM/AGENT
(python train.py --config=configs/icrl_dark_room.py is 10x10/dpt), then
`tools.evaluate exorl`.
Hardware: none, a CPU.
Expected: see results/2026-11-25-in-context-worlds.md.
"""

import ml_collections

from configs.agents import AGENTS, learns_in_context

# room: (steps of an episode, episodes in a context, updates)
_ROOMS = {"10x10": (100, 6, 3000), "9x9": (20, 20, 1000)}
_NAMES = [f"{room}/{agent}" for room in _ROOMS for agent in AGENTS]


def get_config(name: str = _NAMES[0]) -> ml_collections.ConfigDict:
    """Returns the config of a room and agent.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in _NAMES:
        raise ValueError(f"{name!r} is not one of {', '.join(_NAMES)}")
    room, agent = name.split("/")
    steps, episodes, updates = _ROOMS[room]
    recorded = "exploration" if agent == "dpt" else "learning"
    config = learns_in_context(agent, steps, episodes)
    config.workdir = f"runs/icrl_dark_room/{name}"
    config.agent.action_kind = "discrete"
    config.agent.return_scale = float(steps)
    config.data.trajectories = f"trajectories/dark_room/{room}/{recorded}"
    if agent == "ad":
        # Else it falls back as soon as it has acted longer than its contexts were.
        config.data.latest_begin = 0.8
    config.train.steps = updates
    return config.lock()
