"""Every further field of a config of task "exorl", and what small agents share.

In-context RL: an agent reads packed trajectories. Its config starts from here, and has
the fields of configs/base.py too.
"""

import ml_collections

from configs import base

AGENTS = {
    "dpt": ("drawn", "targets", False, 1.0),
    "ad": ("learnt", "actions", False, 1.0),
    "at": ("ascending", "actions", True, 1.0),
    "dt": ("ascending", "actions", True, 1.0),
    "bc": ("ascending", "actions", False, 0.1),
}
"""Order of episodes, what is predicted, whether returns are read, and the share of the
steps, those of the best episodes. dt reads one episode, and bc the present state."""


def get_config() -> ml_collections.ConfigDict:
    config = base.get_config().unlock()
    config.task = "exorl"

    # config.model has the sizes of the layers.
    config.agent = ml_collections.ConfigDict()
    # Columns of the trajectories; 0: as many as they have.
    config.agent.observation_size = 0
    config.agent.action_size = 0
    # The most steps of an episode.
    config.agent.episode_steps = 1000
    # Episodes in a context; 1: a Decision Transformer, or, where layers see a window of
    # one token (config.model.window), behaviour cloning from the present state.
    config.agent.chain_length = 4
    # Tokens of a step: 4, its return to go, state, action and reward; or 1, of all that
    # is known before the action: then action and reward are those of the step before.
    config.agent.step_tokens = 4
    # "continuous", in [-1, 1], of which the mean is predicted; "binned", the same, with
    # logits of action_bins values of each number; or "discrete", one of several.
    config.agent.action_kind = "continuous"
    config.agent.action_bins = 21
    # Whether the model reads the return-to-go.
    config.agent.reads_returns = True
    # Returns-to-go are divided by this number.
    config.agent.return_scale = 1000.0
    # Whether positions rotate queries and keys (RoPE). Without RoPE the order comes
    # from the causal mask and the time within an episode, contexts may be longer than
    # in training, and config.rope_scaling is ignored.
    config.agent.reads_positions = True

    # Directory made by tools/pack_exorl.py or make_dark_room.py.
    config.data.trajectories = ""
    # Share of its worlds (of one world, of its episodes) that are held out, a half for
    # validation and a half for the test, and the seed that draws them; then, the share
    # of the steps that is trained on, of the episodes of the highest returns.
    config.data.held_out_share = 0.05
    config.data.split_seed = 0
    config.data.top_share = 1.0
    # Order of a chain's episodes: "ascending" by return, randomly "drawn", or "learnt",
    # in the order of a learner's history.
    config.data.chain_order = "ascending"
    # For "learnt": every second chain starts at a random episode within
    # this fraction of the history; 0 disables.
    config.data.latest_begin = 0.0
    # Predicted: "actions", as they were taken; or "targets", the best actions instead.
    config.data.predict = "actions"
    # Of a chain, which is striped by whole steps.
    config.data.context_tokens = 16_000
    config.stripe_granule = 4
    return config.lock()


def small_agent(layers: int) -> ml_collections.ConfigDict:
    """Returns the config of an agent of width 64 with these layers, not locked."""
    config = get_config().unlock()
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


def set_agent(config: ml_collections.ConfigDict, agent: str, episodes: int) -> int:
    """Makes a config that of one of AGENTS; returns the episodes in its context.

    episodes: where the agent reads several.
    """
    order, predicted, reads_returns, share = AGENTS[agent]
    if agent == "bc":
        config.model.layer_pattern = "w"
        config.model.window = 1
    config.agent.chain_length = 1 if agent in ("dt", "bc") else episodes
    config.agent.reads_returns = reads_returns
    config.data.top_share = share
    config.data.chain_order = order
    config.data.predict = predicted
    return config.agent.chain_length


def learns_in_context(
    agent: str, steps: int, episodes: int
) -> ml_collections.ConfigDict:
    """Returns the config of one of AGENTS, not locked.

    A step is a token that says all that is known before the action (of bc it is four,
    so that the state's shows nothing else), and nothing of its place in the context but
    the time in its episode; whole worlds are held out. An update reads 9,600 steps.

    steps: of an episode. episodes: in a context, where the agent reads several.
    """
    config = small_agent(layers=4)
    episodes = set_agent(config, agent, episodes)
    tokens = 4 if agent == "bc" else 1
    # A core works on a half of the rows: 1.6 times the updates of one device's threads.
    config.simulated_devices = 2
    config.mesh.data = 2
    config.mesh.ring = 1
    config.agent.episode_steps = steps
    config.agent.step_tokens = tokens
    config.stripe_granule = tokens
    config.agent.reads_positions = False
    config.data.context_tokens = tokens * steps * episodes
    config.data.batch_rows = 9600 // (steps * episodes)
    config.data.held_out_share = 0.2
    config.optimizer.peak_lr = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.beta2 = 0.99
    config.train.log_every_steps = 100
    config.train.validate_every_steps = 500
    config.train.validation_batches = 4
    config.checkpoint.save_every_steps = 250
    return config
