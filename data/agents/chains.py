"""Chains of trajectories for in-context RL: many tries of one world, one after another.

The Agentic Transformer (2305.16554) reads n episodes sorted by return, each conditioned
on the return of the best; a Decision Transformer (2106.01345) chains of one. Algorithm
Distillation (2210.14215) reads a learner's history in its order, and a
Decision-Pretrained Transformer (2306.14892) any episodes, to predict the best action.

`Chains` is a `RowPlan` for `data.rows.TextBatches`: there, a row is a chain and a
column is a step of the environment, of which a model makes four tokens. A layout
assigns whole steps: `Striped()` of steps is `Striped(4)` of tokens. Besides the seed, a
chain depends on its number alone, so a run resumes by the number of the step alone.
"""

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from data.agents.trajectory_file import TrajectoryFile

ORDERS = ("ascending", "drawn", "learnt")
PREDICTED = ("actions", "targets")
INTEGERS = ("timesteps", "ranks", "positions")
"""Fields of a batch that are whole numbers."""
# Added to standard deviations, as the Decision Transformer does.
STD_FLOOR = 1e-6


class ChainBatch(NamedTuple):
    """Steps of chains, or a block of their columns; along S in layout order.

    All of it is 0 on padding, but for the positions.

    returns_to_go: float32 (B, S), the return that is left to reach before the step: the
      best of the chain, less what the trajectory has had. Not scaled.
    observations: float32 (B, S, observation size), standardised.
    actions: float32 (B, S, action size), in [-1, 1], that were taken.
    rewards: float32 (B, S), which the action gave.
    completions: float32 (B, S), 1 on the last step of a trajectory that reached the
      best return of the chain.
    targets: float32 (B, S, action size): what the model predicts.
    timesteps: int32 (B, S), place of the step in its trajectory, from 0.
    ranks: int32 (B, S), place of the trajectory in its chain, from 0.
    positions: int32 (B, S), place of the step in its chain, from 0; padding goes on.
    loss_weights: float32 (B, S), 0 where the action counts for nothing.
    """

    returns_to_go: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    completions: np.ndarray
    targets: np.ndarray
    timesteps: np.ndarray
    ranks: np.ndarray
    positions: np.ndarray
    loss_weights: np.ndarray


SPLITS = ("train", "validation", "test")


def split_episodes(
    worlds: np.ndarray, share: float = 0.05, seed: int = 0
) -> dict[str, np.ndarray]:
    """Returns the numbers of the episodes of each of SPLITS, sorted.

    worlds: int (episodes,), the world of each. Whole worlds are held out; where there
      is one, episodes are. One half of them is for validation, and one for the test.

    At least one is in each. The seed is one of its own, so that runs with different
    seeds hold out the same.

    Raises:
      ValueError: there are not three, or the share is not between 0 and 1.
    """
    are_many = (worlds != worlds[:1]).any()
    groups = worlds if are_many else np.arange(len(worlds))
    distinct = np.unique(groups)
    if len(distinct) < len(SPLITS) or not 0 < share < 1:
        what = "worlds" if are_many else "episodes"
        raise ValueError(
            f"{share=} of {len(distinct)} {what} cannot be held out: have at least "
            f"{len(SPLITS)}, and a share between 0 and 1"
        )
    count = min(max(round(share * len(distinct)), 2), len(distinct) - 1)
    shuffled = np.random.default_rng(seed).permutation(distinct)
    parts = {
        "train": shuffled[count:],
        "validation": shuffled[: count // 2],
        "test": shuffled[count // 2 : count],
    }
    return {name: np.flatnonzero(np.isin(groups, part)) for name, part in parts.items()}


def top_episodes(
    returns: np.ndarray, lengths: np.ndarray, share: float = 0.1
) -> np.ndarray:
    """Returns the episodes of the highest returns, up to a share of all steps.

    At least one: what behaviour cloning of the best 10 % (BC-10%) is trained on in the
    Decision Transformer paper (2106.01345). Sorted from best to worst; of equal
    returns, the later episode comes first, as there.

    Raises:
      ValueError: the share is not above 0 and up to 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"{share=} of the steps must be above 0, and up to 1")
    best_first = np.argsort(returns, kind="stable")[::-1]
    within = np.cumsum(lengths[best_first]) <= share * np.sum(lengths)
    return best_first[: max(int(within.sum()), 1)]


@dataclass(frozen=True, eq=False)
class Chains:
    """Row k is a chain of distinct episodes of one world, drawn for every k, no end.

    trajectories: where the episodes are.
    episodes: int (m,), numbers of those that chains are made of, increasing.
    chain_length: episodes in a chain, n.
    seed: with k, of what is drawn.
    order: "ascending" by return, ties by the episode's number; as they were "drawn",
      for a model that must not learn that later is better; or as they were "learnt":
      one of each n-th of the world's episodes, in their order.
    latest_begin: every second chain that is "learnt" starts at a random episode, at
      most this share into the history (0 to 1, of the episodes that it can spare), as
      an agent that has acted for longer than a context sees no beginning.
    predict: the "actions" that were taken, or the "targets" in their place.
    of_step_before: whether actions, rewards and completions are those of the step
      before, across episodes, and 0 at the beginning of the chain: for agents whose
      token of a step says all that is known before they act.
    multiple: rows are padded at the end to a multiple of this many steps.

    Raises:
      ValueError: targets are not known, or there are too few episodes for a chain.
    """

    trajectories: TrajectoryFile
    episodes: np.ndarray
    chain_length: int
    seed: int
    order: str = "ascending"
    latest_begin: float = 0.0
    predict: str = "actions"
    of_step_before: bool = False
    multiple: int = 1

    def __post_init__(self):
        if self.predict == "targets" and not self.trajectories.has_targets:
            raise ValueError(
                f"{self.trajectories.directory} does not say which actions were best: "
                'predict="actions", or record trajectories that do'
            )
        fewest = min(map(len, self._of_worlds), default=0)
        if not 1 <= self.chain_length <= fewest:
            raise ValueError(
                f"a chain of {self.chain_length} episodes cannot be made of "
                f"{fewest} different ones of "
                f"{self.trajectories.directory}: shorten the chains (at least 1) or "
                "pack more episodes"
            )

    @cached_property
    def _of_worlds(self) -> list[np.ndarray]:
        """The episodes of each world, increasing."""
        worlds = self.trajectories.worlds[self.episodes]
        return [self.episodes[worlds == world] for world in np.unique(worlds)]

    @cached_property
    def length(self) -> int:
        """Steps in a row, padding included: those of n episodes of the longest."""
        longest = int(self.trajectories.lengths[self.episodes].max())
        return -(-self.chain_length * longest // self.multiple) * self.multiple

    @property
    def rows(self) -> int:
        return sys.maxsize // 2

    def chain(self, row: int) -> np.ndarray:
        """Returns a chain's episodes, int64 (n,), in the order of the chain."""
        rng = np.random.default_rng([self.seed, row])
        worlds = self._of_worlds
        of_world = worlds[rng.integers(len(worlds)) if len(worlds) > 1 else 0]
        if self.order == "learnt":
            begin = 0.0
            if self.latest_begin:
                # Half of these are below 0: such chains start at the first episode.
                drawn = rng.uniform(-self.latest_begin, self.latest_begin)
                begin = (len(of_world) - self.chain_length) * max(0, drawn)
            edges = np.linspace(begin, len(of_world), self.chain_length + 1).astype(int)
            return of_world[rng.integers(edges[:-1], edges[1:])]
        chain = rng.choice(of_world, self.chain_length, replace=False)
        if self.order == "ascending":
            chain = chain[np.lexsort((chain, self.trajectories.returns[chain]))]
        return chain

    def read(self, row: int, index: np.ndarray) -> ChainBatch:
        """Reads the chain's steps of numbers `index`, int32 (L,): arrays (L, …)."""
        chain = self.chain(row)
        real = index < self.trajectories.lengths[chain].sum()
        positions = np.where(real, index, 0)
        to_go = self.trajectories.returns[chain].max() - self._rewards_before(chain)
        batch = self._steps(chain, positions, to_go)
        if self.of_step_before:
            before = self._steps(chain, np.maximum(positions - 1, 0), to_go)
            for happened in before.actions, before.rewards, before.completions:
                happened[positions == 0] = 0
            batch = batch._replace(
                actions=before.actions,
                rewards=before.rewards,
                completions=before.completions,
            )
        return _padded(batch._replace(positions=index), real)

    def _steps(
        self, chain: np.ndarray, positions: np.ndarray, to_go: np.ndarray
    ) -> ChainBatch:
        """Reads steps of a chain of episodes by their positions in it, int (L,).

        to_go: float (steps,), the return that is left before each step of the chain.
        """
        file = self.trajectories
        size = file.observation_size
        returns = file.returns[chain]
        lengths = file.lengths[chain]
        ends = np.cumsum(lengths)
        ranks = np.searchsorted(ends, positions, side="right")
        timesteps = positions - (ends - lengths)[ranks]
        is_last = timesteps + 1 == lengths[ranks]
        steps = file.read(file.offsets[chain[ranks]] + timesteps)  # (L, columns)
        actions = steps[:, size : size + file.action_size]
        targets = steps[:, -1 - file.action_size : -1]
        return ChainBatch(
            returns_to_go=to_go[positions],
            observations=standardised(file, steps[:, :size]),
            actions=actions,
            rewards=steps[:, -1],
            completions=is_last & (returns[ranks] >= returns.max()),
            targets=targets if self.predict == "targets" else actions,
            timesteps=timesteps,
            ranks=ranks,
            positions=positions,
            loss_weights=np.ones(positions.size),
        )

    def _rewards_before(self, chain: np.ndarray) -> np.ndarray:
        """Sums the rewards before each step of a chain: float64 (steps,)."""
        offsets = self.trajectories.offsets
        before = []
        for episode in chain:
            steps = np.arange(offsets[episode], offsets[episode + 1])
            rewards = self.trajectories.read(steps)[:, -1].astype(np.float64)
            before.append(np.cumsum(rewards) - rewards)
        return np.concatenate(before)


def standardised(file: TrajectoryFile, observations: np.ndarray) -> np.ndarray:
    """Returns observations (..., size) less their mean, in standard deviations."""
    return (observations - file.observation_mean) / (file.observation_std + STD_FLOOR)


def of_step_before(batch: ChainBatch) -> ChainBatch:
    """Returns steps of chains (B, S) as `Chains` gives them for tokens of a whole step.

    Actions, rewards and completions are those of the step before, 0 at a beginning.
    """

    def moved(x: np.ndarray) -> np.ndarray:
        begins = batch.positions == 0
        begins = begins.reshape(*begins.shape, *[1] * (x.ndim - begins.ndim))
        return np.where(begins, 0, np.roll(x, 1, axis=1))

    return batch._replace(
        actions=moved(batch.actions),
        rewards=moved(batch.rewards),
        completions=moved(batch.completions),
    )


def _padded(batch: ChainBatch, real: np.ndarray) -> ChainBatch:
    """Casts a batch to its types; zeros padding, except in the positions."""
    arrays = {}
    for name, values in batch._asdict().items():
        arrays[name] = values.astype(np.int32 if name in INTEGERS else np.float32)
        if name != "positions":
            arrays[name][~real] = 0
    return ChainBatch(**arrays)
