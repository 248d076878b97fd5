"""Small agents, which two cores train: what their configs have in common."""

import ml_collections

from configs import base

AGENTS = {
    "dpt": ("transformer", "drawn", "targets", False, 1.0),
    "ad": ("transformer", "learnt", "actions", False, 1.0),
    "at": ("transformer", "ascending", "actions", True, 1.0),
    "dt": ("transformer", "ascending", "actions", True, 1.0),
    "bc": ("perceptron", "ascending", "actions", False, 0.1),
}
"""Model, order of episodes, what is predicted, whether returns are read, and the share
of the steps, those of the best episodes. dt and bc read one episode."""


def get_small_agent(layers: int) -> ml_collections.ConfigDict:
    """Returns the config of an agent of width 64 with these layers, not locked."""
    config = base.get_config().unlock()
    config.task = "exorl"
    config.model.hidden_size = 64
    config.model.feed_forward_size = 176
    config.model.num_layers = layers
    config.model.num_heads = 2
    config.model.num_kv_heads = 2
    config.model.head_dim = 32
    config.compute_dtype = "float32"
    config.remat = "everything"
    config.optimizer.end_lr = 1e-4
    config.optimizer.weight_decay = 1e-4
    config.checkpoint.keep = 1
    return config


def learns_in_context(
    agent: str, steps: int, episodes: int
) -> ml_collections.ConfigDict:
    """Returns the config of one of AGENTS, not locked.

    A step is a token that says all that is known before the action, and nothing of its
    place in the context but the time in its episode; whole worlds are held out. An
    update reads 9,600 steps.

    steps: of an episode. episodes: in a context, where the agent reads several.
    """
    method, order, predicted, reads_returns, share = AGENTS[agent]
    episodes = 1 if agent in ("dt", "bc") else episodes
    config = get_small_agent(layers=4)
    # A core works on a half of the rows: 1.6 times the updates of one device's threads.
    config.simulated_devices = 2
    config.mesh.data = 2
    config.mesh.ring = 1
    config.agent.method = method
    config.agent.episode_steps = steps
    config.agent.chain_length = episodes
    config.agent.step_tokens = 1
    config.agent.reads_positions = False
    config.agent.reads_returns = reads_returns
    config.data.context_tokens = steps * episodes
    config.data.batch_rows = 9600 // (steps * episodes)
    config.data.held_out_share = 0.2
    config.data.top_share = share
    config.data.chain_order = order
    config.data.predict = predicted
    config.optimizer.peak_lr = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.beta2 = 0.99
    config.train.log_every_steps = 100
    config.train.validate_every_steps = 500
    config.train.validation_batches = 4
    config.checkpoint.save_every_steps = 250
    return config
