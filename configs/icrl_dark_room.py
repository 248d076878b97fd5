"""Agents that learn in context in Dark Room, whose goals are worlds, on two cores.

Command, with ROOM 10x10 (100 steps an episode) or 9x9 (20), and AGENT dpt
(Decision-Pretrained Transformer), ad (Algorithm Distillation), at (Agentic
Transformer), dt (Decision Transformer) or bc (behaviour cloning of the best 10 %):
  python -m tools.make_dark_room --room ROOM --recorded KIND \\
      --output trajectories/dark_room/ROOM/KIND   # dpt: exploration, else history
  python train.py --config=configs/icrl_dark_room.py:ROOM/AGENT
(python train.py --config=configs/icrl_dark_room.py is 10x10/dpt), then
`tools.evaluate exorl`.
Hardware: none, a CPU.
Expected: see docs/in_context_rl.md.
"""

import ml_collections

from configs import base

# room: (steps of an episode, episodes in a context, best return, updates)
_ROOMS = {"10x10": (100, 6, 100.0, 4000), "9x9": (20, 20, 20.0, 1000)}
# agent: (recorded, order, predicted, reads returns, episodes, share of the steps)
_AGENTS = {
    "dpt": ("exploration", "drawn", "targets", False, None, 1.0),
    "ad": ("history", "learnt", "actions", False, None, 1.0),
    "at": ("history", "ascending", "actions", True, None, 1.0),
    "dt": ("history", "ascending", "actions", True, 1, 1.0),
    "bc": ("history", "ascending", "actions", False, 1, 0.1),
}
_NAMES = [f"{room}/{agent}" for room in _ROOMS for agent in _AGENTS]


def get_config(name: str = _NAMES[0]) -> ml_collections.ConfigDict:
    """Returns the config of a room and agent.

    Raises:
      ValueError: there is no such one.
    """
    if name not in _NAMES:
        raise ValueError(f"{name!r} is not one of {', '.join(_NAMES)}")
    room, agent = name.split("/")
    steps, episodes, best, updates = _ROOMS[room]
    recorded, order, predicted, reads_returns, own_episodes, share = _AGENTS[agent]
    episodes = own_episodes or episodes
    config = base.get_config().unlock()
    config.task = "exorl"
    config.workdir = f"runs/icrl_dark_room/{name}"
    config.simulated_devices = 1

    config.agent.method = "perceptron" if agent == "bc" else "transformer"
    config.agent.observation_size = 2
    config.agent.action_size = 5
    config.agent.episode_steps = steps
    config.agent.chain_length = episodes
    config.agent.return_scale = best
    config.agent.step_tokens = 1
    config.agent.action_kind = "discrete"
    config.agent.reads_returns = reads_returns
    config.agent.reads_positions = False
    config.model.hidden_size = 64
    config.model.feed_forward_size = 176
    config.model.num_layers = 4
    config.model.num_heads = 2
    config.model.num_kv_heads = 2
    config.model.head_dim = 32
    config.compute_dtype = "float32"
    config.remat = "everything"

    config.mesh.ring = 1

    config.data.trajectories = f"trajectories/dark_room/{room}/{recorded}"
    config.data.context_tokens = steps * episodes
    config.data.batch_rows = 16 * 600 // (steps * episodes)
    config.data.held_out_share = 0.2
    config.data.top_share = share
    config.data.chain_order = order
    config.data.predict = predicted

    config.optimizer.peak_lr = 2e-3
    config.optimizer.end_lr = 1e-4
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 1e-4
    config.optimizer.beta2 = 0.99
    config.train.steps = updates
    config.train.log_every_steps = 100
    config.train.validate_every_steps = 500
    config.train.validation_batches = 4
    config.checkpoint.save_every_steps = 250
    config.checkpoint.keep = 1
    return config.lock()
