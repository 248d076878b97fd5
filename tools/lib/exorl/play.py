"""Episodes that agents play, one after the other, in contexts of all kinds."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import jax
import numpy as np

from data.agents.chains import ChainBatch, standardised
from data.agents.trajectory_file import TrajectoryFile
from tools.lib.exorl.agents import Actor, Chance
from tools.lib.exorl.scenes import Scene


@dataclass
class Play:
    """Episodes of E rows, one after the other, conditioned on a return.

    file: what the agent's observations are standardised by.
    target: the return that every episode is conditioned on.
    window: episodes in a context at most, the last ones; None for all.
    """

    actor: Actor
    file: TrajectoryFile
    target: float
    window: int | None = None
    _done: list[ChainBatch] = field(default_factory=list)

    def play(
        self,
        scenes: Iterable[tuple[Scene, int]],
        forgets: str = "nothing",
        prompt: int = 0,
    ) -> np.ndarray:
        """Plays episodes of scenes, and returns their returns: float64 (E, episodes).

        scenes: each episode by its number in its scene.
        forgets: before what the context is emptied: an "episode", a "step", "nothing".
        prompt: how many of the first episodes are of actions drawn evenly, and are read
          at once when they are over; no window is for these.
        """
        self.actor.forget()
        self._done, returns = [], []
        chance = Chance(self.actor.choose)
        slides = self.window and forgets == "nothing" and not prompt
        for played, (scene, number) in enumerate(scenes):
            rank = played
            if slides and played >= self.window:
                self._drop_the_first()
                rank = self.window - 1
            if forgets == "episode":
                self.actor.forget()
            actor = chance if rank < prompt else self.actor
            if prompt and rank == prompt:
                self.actor.read(self.steps())
            returns.append(self._episode(actor, (scene, number), rank, forgets))
        return np.stack(returns, axis=1)

    def steps(self) -> ChainBatch:
        """Returns the steps played since the context was begun, (E, S, …) each."""
        return jax.tree.map(lambda *x: np.stack(x, axis=1), *self._done)

    def _drop_the_first(self) -> None:
        """Begins the context anew with all of its episodes but the first."""
        kept = (step for step in self._done if step.ranks[0])
        self._done = [
            step._replace(
                ranks=step.ranks - 1, positions=np.full_like(step.positions, place)
            )
            for place, step in enumerate(kept)
        ]
        self.actor.forget()
        self.actor.read(self.steps())

    def _episode(
        self, actor: Actor, episode: tuple[Scene, int], rank: int, forgets: str
    ) -> np.ndarray:
        """Plays an episode of the scene, and returns the rows' returns (E,)."""
        scene, number = episode
        observations, last, timestep = scene.begin(number), False, 0
        total = np.zeros(len(observations))
        while not last:
            if forgets == "step":
                actor.forget()
            present = self._present(observations, self.target - total, timestep, rank)
            observations, actions, rewards, last = scene.step(actor.act(present))
            total += rewards
            done = present._replace(
                actions=actions.astype(np.float32),
                rewards=rewards.astype(np.float32),
                completions=((total >= self.target) & last).astype(np.float32),
                loss_weights=np.ones(len(rewards), np.float32),
            )
            actor.learn(done)
            self._done.append(done)
            timestep += 1
        return total

    def _present(
        self, observations: np.ndarray, left: np.ndarray, timestep: int, rank: int
    ) -> ChainBatch:
        """Returns the steps before the action, with zeros for what comes of it."""
        rows = len(observations)
        zeros, places = np.zeros(rows, np.float32), np.full(rows, 1, np.int32)
        actions = np.zeros((rows, self.file.action_size), np.float32)
        return ChainBatch(
            returns_to_go=left.astype(np.float32),
            observations=standardised(self.file, observations).astype(np.float32),
            actions=actions,
            rewards=zeros,
            completions=zeros,
            targets=actions,
            timesteps=timestep * places,
            ranks=rank * places,
            positions=len(self._done) * places,
            loss_weights=zeros,
        )
