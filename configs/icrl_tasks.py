"""Agents that find out in context which of a family of tasks they are in, on two cores.

All tasks have the same exploratory steps, of ExoRL's format, with rewards of their own,
and no observation shows which it is: goals of a point mass, or speeds of a cheetah.

Command, with DOMAIN/TASK point_mass/goals or cheetah/speeds, and AGENT dpt
(Decision-Pretrained Transformer, of goals alone), ad (Algorithm Distillation, of the
episodes of a task from bad to good), at (Agentic Transformer), dt (Decision
Transformer) or bc (behaviour cloning of the best 10 %):
  python -m tools.make_exorl --domain DOMAIN --action-repeat 10 --episodes 600 \\
      --output datasets
  python -m tools.pack_exorl --root datasets --domain DOMAIN --algorithm scripted \\
      --task TASK --worlds 300 --action-repeat 10 --piece 20 --cache trajectories
  python train.py --config=configs/icrl_tasks.py:DOMAIN/TASK/AGENT
(python train.py --config=configs/icrl_tasks.py is point_mass/goals/dpt), then
`tools.evaluate exorl`.
Hardware: none, a CPU.
Expected: see results/2026-11-28-in-context-tasks.md.
"""

import ml_collections

from configs.agents import learns_in_context

_TASKS = ("point_mass/goals", "cheetah/speeds")
_NAMES = [f"{task}/{agent}" for task in _TASKS for agent in ("ad", "at", "dt", "bc")]
_NAMES.insert(0, "point_mass/goals/dpt")


def get_config(name: str = _NAMES[0]) -> ml_collections.ConfigDict:
    """Returns the config of a family of tasks and agent.

    Raises:
      ValueError: the name is unknown.
    """
    if name not in _NAMES:
        raise ValueError(f"{name!r} is not one of {', '.join(_NAMES)}")
    domain, task, agent = name.split("/")
    # 200 steps of the environment, ten at a time.
    config = learns_in_context(agent, steps=20, episodes=8)
    config.model.num_layers = 2
    config.workdir = f"runs/icrl_tasks/{name}"
    # Who does what explorers did has to explore as they did, and not as their mean.
    config.agent.action_kind = "binned"
    if agent == "ad":
        config.data.chain_order = "ranked"
    config.data.trajectories = f"trajectories/{domain}/scripted/{task}"
    config.train.steps = 1000
    return config.lock()
