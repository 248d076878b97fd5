"""Small agents on made trajectories, striped by whole steps over a ring of 4, anywhere.

Command, with METHOD at (Agentic Transformer, 4 episodes in a context), dt (Decision
Transformer) or bc (behaviour cloning of the best 10 %), and DOMAIN cartpole or walker:
  python -m tools.make_exorl --domain DOMAIN --output DATASETS --action-repeat 5
  python -m tools.pack_exorl --root DATASETS --domain DOMAIN --algorithm scripted \\
      --task TASK --action-repeat 5 --cache trajectories   # TASK: swingup, stand
  python train.py --config=configs/exorl_tiny.py:DOMAIN/METHOD
(python train.py --config=configs/exorl_tiny.py is cartpole/at), then
`tools.evaluate exorl`.
Hardware: none: 4 simulated CPU devices.
Expected: losses fall; returns stay low, as those of the data, which are noise.
"""

import ml_collections

from configs import base
from configs.agents import set_agent, small_agent

_TASKS = {"cartpole": "swingup", "walker": "stand"}
_NAMES = [f"{domain}/{method}" for domain in _TASKS for method in ("at", "dt", "bc")]


def get_config(name: str = _NAMES[0]) -> ml_collections.ConfigDict:
    """Returns the config of a domain and method.

    Raises:
      ValueError: the name is unknown.
    """
    base.check_name(name, _NAMES)
    domain, method = name.split("/")
    config = small_agent(layers=3)
    episodes = set_agent(config, method, episodes=4)
    config.workdir = f"runs/exorl_tiny/{name}"
    config.simulated_devices = 4

    config.agent.episode_steps = 200  # 1000 of the environment, five at a time
    config.mesh.ring = 4

    config.data.trajectories = f"trajectories/{domain}/scripted/{_TASKS[domain]}"
    config.data.context_tokens = 800 * episodes
    config.data.batch_rows = 8 // episodes

    config.optimizer.peak_lr = 1e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.beta2 = 0.999
    config.train.steps = 1000 if method == "bc" else 300
    config.train.log_every_steps = 10
    config.train.validate_every_steps = 100
    config.train.validation_batches = 2
    config.checkpoint.save_every_steps = 100
    return config.lock()
