"""Episodes that agents play, one after the other, in contexts of all kinds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from data.agents.chains import ChainBatch, standardised
from data.agents.trajectory_file import TrajectoryFile
from tools.lib.exorl.agents import Actor, Policy, chance
from tools.lib.exorl.scenes import Scene, scene


@dataclass(frozen=True)
class Context:
    """Episodes in a context, in their order.

    scenes: each in a scene, with the seeds of its rows, int (E,).
    before: how many at the beginning are not asked for.
    drawn: how many at the beginning are of drawn actions.
    forgets: whether the context is emptied before every episode.
    """

    scenes: list[tuple[Scene, np.ndarray]]
    before: int = 0
    drawn: int = 0
    forgets: bool = False


def contexts(
    file: TrajectoryFile,
    worlds: np.ndarray,
    seeds: np.ndarray,
    random: Sequence[int] = (),
    asked: Sequence[str] | None = None,
    trusted: Sequence[str] = (),
) -> dict[str, Context]:
    """Returns contexts of rows that are of these worlds, int (n,), in turn, by name.

    seeds: (E, episodes). random: numbers of episodes of drawn actions in a context.
    asked: names of some; None for all. Those of drawn actions are there in any case.
    trusted: as of `scene`.

    Raises:
      ValueError: a name has no context, or no context is left; or as `scene`.
    """
    rows, episodes = seeds.shape
    own = scene(file, np.resize(worlds, rows), trusted)
    numbers = [(own, of_rows) for of_rows in seeds.T]
    found = {
        "own": Context(numbers),
        "empty": Context(numbers, forgets=True),
    }
    if len(worlds) > 1 and episodes > 1:
        other = scene(file, np.resize(np.roll(worlds, 1), rows), trusted)
        elsewhere = [(other, of_rows) for of_rows in seeds.T[:-1]]
        found["other"] = Context([*elsewhere, numbers[-1]], episodes - 1)
    for count in random:
        drawn = [numbers[number % episodes] for number in range(count)]
        found[f"random_{count}"] = Context([*drawn, numbers[-1]], count, count)
    if asked is None:
        return found
    chosen = {name: c for name, c in found.items() if c.drawn or name in asked}
    if {*asked} - found.keys() or not chosen:
        raise ValueError(
            f"--contexts {' '.join(asked)}: give some of {', '.join(found)}"
        )
    return chosen


@dataclass
class Play:
    """Episodes of E rows, one after the other, each row conditioned on a return.

    An episode begins in all rows at once, and ends in each when it is over there. Steps
    that rows wait for others are in no context.

    file: what the agent's observations are standardised by.
    targets: float (E,), the return that every episode of a row is conditioned on.
    window: episodes in a context at most, the last ones; None for all.
    policy: acts in the agent's place, if there is one.
    on_episode: called after each.
    """

    actor: Actor
    file: TrajectoryFile
    targets: np.ndarray
    window: int | None = None
    policy: Policy | None = None
    on_episode: Callable[[], object] = lambda: None
    _done: list[ChainBatch] = field(default_factory=list)

    def play(self, context: Context) -> np.ndarray:
        """Plays a context's episodes, and returns their returns: (E, episodes).

        A prompt of drawn actions is read at once; no window is for it.
        """
        self.actor.forget()
        self._done = []
        returns = []
        drawn = context.drawn
        drawing = chance(self.actor.choose)
        act = self.policy or self.actor.act
        slides = self.window and not (context.forgets or drawn)
        for played, (where, seeds) in enumerate(context.scenes):
            rank = played
            if slides and played >= self.window:
                self._drop_the_first()
                rank = self.window - 1
            if context.forgets:
                self.actor.forget()
            if drawn and rank == drawn:
                self.actor.read(self.steps())
            policy = drawing if rank < drawn else act
            returns.append(self._episode(policy, where, seeds, rank))
            self.on_episode()
        return np.stack(returns, axis=1)

    def steps(self) -> ChainBatch:
        """Returns the steps played since the context was begun, (E, S, …) each.

        Those of a row come first, in their order; others have a loss weight of 0.
        """
        steps = jax.tree.map(lambda *x: np.stack(x, axis=1), *self._done)
        order = np.argsort(steps.loss_weights == 0, axis=1, kind="stable")

        def sorted_(x: np.ndarray) -> np.ndarray:
            columns = order.reshape(order.shape + (1,) * (x.ndim - 2))
            return np.take_along_axis(x, columns, axis=1)

        positions = np.arange(len(self._done), dtype=np.int32)
        positions = np.broadcast_to(positions, order.shape)
        return jax.tree.map(sorted_, steps)._replace(positions=positions)

    def _drop_the_first(self) -> None:
        """Begins the context with all of its episodes but the first."""
        kept = [step for step in self._done if step.ranks[0]]
        self._done = [step._replace(ranks=step.ranks - 1) for step in kept]
        self.actor.forget()
        self.actor.read(self.steps())

    def _episode(
        self, policy: Policy, where: Scene, seeds: np.ndarray, rank: int
    ) -> np.ndarray:
        """Plays an episode of a scene, and returns the rows' returns (E,)."""
        observations, _ = where.reset(seed=seeds.tolist())
        total = np.zeros(len(observations))
        timestep = 0
        goes_on = np.ones(len(observations), bool)
        while goes_on.any():
            present = self._present(observations, total, timestep, rank, goes_on)
            actions = policy(present)
            observations, rewards, over, timed_out, _ = where.step(actions)
            rewards = np.where(goes_on, rewards, 0)
            ended = over | timed_out
            total += rewards
            done = present._replace(
                actions=actions.astype(np.float32),
                rewards=rewards.astype(np.float32),
                completions=((total >= self.targets) & ended).astype(np.float32),
            )
            self.actor.learn(done)
            self._done.append(done)
            goes_on = goes_on & ~ended
            timestep += 1
        return total

    def _present(
        self,
        observations: np.ndarray,
        total: np.ndarray,
        timestep: int,
        rank: int,
        goes_on: np.ndarray,
    ) -> ChainBatch:
        """Returns the steps before the action, with zeros for what comes of it."""
        zeros = np.zeros(len(total), np.float32)
        ones = np.ones(len(total), np.int32)
        actions = np.zeros((len(total), self.file.action_size), np.float32)
        return ChainBatch(
            returns_to_go=(self.targets - total).astype(np.float32),
            observations=standardised(self.file, observations).astype(np.float32),
            actions=actions,
            rewards=zeros,
            completions=zeros,
            targets=actions,
            timesteps=timestep * ones,
            ranks=rank * ones,
            positions=len(self._done) * ones,
            loss_weights=goes_on.astype(np.float32),
        )
