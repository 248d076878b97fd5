"""dm_control tasks of ExoRL, to compute rewards from physics and to roll out.

This is the only module that imports dm_control, and only when an `Environment` is
made: reading, packing and training on data that are packed do without it.
"""

import contextlib
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from data.agents.episodes import check_domain

INSTALL = "install what requirements/rl.txt pins (make venv ACCELERATOR=rl)"
# The dm_control suite's own, whose rewards follow from physics and control alone.
SUITE_TASKS = {
    "cartpole": ("swingup", "swingup_sparse", "balance", "balance_sparse"),
    "cheetah": ("run",),
    "point_mass": ("easy",),
    "walker": ("stand", "walk", "run"),
}
# Where the arm has to reach, in metres; in no observation.
JACO_TARGETS = {
    "reach_top_left": (-0.09, 0.09, 0.001),
    "reach_top_right": (0.09, 0.09, 0.001),
    "reach_bottom_left": (-0.09, -0.09, 0.001),
    "reach_bottom_right": (0.09, -0.09, 0.001),
}
JACO_SECONDS = 10.0
UNSEEN_IN_PHYSICS = "joints_torque"
"""A torque sensor shows what acted in the last step, which is in no state."""

GOAL_RADIUS, GOAL_MARGIN, FARTHEST_GOAL = 0.03, 0.07, 0.25
"""Metres, of a point mass between walls 0.3 from the middle."""
NEAR_GOAL, BRAKING = 0.1, 0.3
"""Metres from the goal at which the expert slows down, and seconds it looks ahead."""


def _goal_rewards(physics: Any, goals: np.ndarray) -> np.ndarray:
    position = physics.named.data.geom_xpos["pointmass", :2]
    far = np.linalg.norm(goals - position, axis=-1) - GOAL_RADIUS
    return np.clip(1 - far / GOAL_MARGIN, 0, 1)


def _way_to_goals(observations: np.ndarray, goals: np.ndarray) -> np.ndarray:
    positions, velocities = np.split(observations, 2, axis=-1)
    return np.clip((goals - positions - BRAKING * velocities) / NEAR_GOAL, -1, 1)


class Family(NamedTuple):
    """Tasks that differ in a target, which no observation shows.

    base: task of the suite that all else is of. largest: float (k,), targets are drawn
      evenly between these and their negatives.
    rewards: from the simulator and targets (W, k) to their rewards (W,).
    best: from observations (..., size) and targets (..., k) to good actions (..., A).
    """

    base: str
    largest: tuple[float, ...]
    rewards: Callable[[Any, np.ndarray], np.ndarray]
    best: Callable[[np.ndarray, np.ndarray], np.ndarray]


FAMILIES = {
    ("point_mass", "goals"): Family(
        "easy", (FARTHEST_GOAL,) * 2, _goal_rewards, _way_to_goals
    ),
}
"""Rewards fall from 1 to 0 with the distance from a goal."""


class Step(NamedTuple):
    """Result of a step: observation (size,), and whether its episode's time is over."""

    observation: np.ndarray
    reward: float
    last: bool


def tasks(domain: str) -> tuple[str, ...]:
    """Lists a domain's tasks that have environments; ValueError if it is unknown."""
    check_domain(domain)
    alone = tuple(JACO_TARGETS) if domain == "jaco" else SUITE_TASKS.get(domain, ())
    return *alone, *(task for of, task in FAMILIES if of == domain)


def versions() -> dict[str, str]:
    """Versions of the simulator, by package."""
    return {name: importlib.metadata.version(name) for name in ("dm_control", "mujoco")}


class Environment:
    """One task, with actions in [-1, 1] and flat float32 observations.

    targets: float (W, k), of a task of FAMILIES, and of no other. Steps have the
      rewards of the first.

    Raises:
      ValueError: the task is unknown, or targets are missing or too many.
      ImportError: dm_control is missing, or does not go with the mujoco there is.
    """

    def __init__(self, domain: str, task: str, targets: np.ndarray | None = None):
        domains = (*SUITE_TASKS, "jaco")
        known = [f"{name} {of}" for name in domains for of in tasks(name)]
        if f"{domain} {task}" not in known:
            raise ValueError(
                f"there is no environment for {domain} {task}: give one of "
                f"{', '.join(known)}"
            )
        family = FAMILIES.get((domain, task))
        if (family is None) != (targets is None):
            raise ValueError(f"{task=} of {domain}: {targets=} must be of a family")
        check_simulator()
        self.domain = domain
        self.task = task
        self.targets = targets
        self._family = family
        # Without a renderer: none is needed, and those that it would try may be broken.
        os.environ.setdefault("MUJOCO_GL", "disabled")
        with _quiet_models():
            if domain == "jaco":
                self._environment = _load_jaco(JACO_TARGETS[task])
                self._random = self._environment.random_state
            else:
                self._environment = _load_suite(domain, family.base if family else task)
                self._random = self._environment.task.random
        if family:
            self._environment.task.get_reward = lambda physics: self.rewards()[0]
        spec = self._environment.action_spec()
        self._lowest, self._highest = spec.minimum, spec.maximum
        seen = {}
        for name, value in self._environment.reset().observation.items():
            seen[name] = np.full(np.shape(value), UNSEEN_IN_PHYSICS not in name)
        self.recomputable = _flat(seen).astype(bool)

    def reset(self, seed: int) -> np.ndarray:
        """Begins an episode, the same one for the same seed; its first observation."""
        self._random.seed(seed)
        with _quiet_models():
            return _flat(self._environment.reset().observation)

    def step(self, action: np.ndarray, repeat: int = 1) -> Step:
        """Goes on by `repeat` steps, or to the end, and adds up their rewards.

        action: (action size,), in [-1, 1].
        """
        control = self._control(action)
        reward = 0.0
        for _ in range(repeat):
            result = self._environment.step(control)
            reward += float(result.reward)
            if result.last():
                break
        return Step(_flat(result.observation), reward, result.last())

    def physics(self) -> np.ndarray:
        """Returns the simulator's state, float64 (physics size,)."""
        return self._environment.physics.state().copy()

    def set_physics(self, state: np.ndarray) -> None:
        """Sets the simulator's state, and no control.

        Raises:
          ValueError: the simulator cannot be in that state.
        """
        physics = self._environment.physics
        try:
            with physics.reset_context():
                physics.set_state(state)
        # dm_control's PhysicsError, which is not imported here.
        except RuntimeError as error:
            raise ValueError(f"the simulator refuses the state ({error})") from error

    def set_control(self, action: np.ndarray) -> None:
        """Sets the control that `rewards` take for the last action, in [-1, 1]."""
        self._environment.physics.set_control(self._control(action))

    def rewards(self) -> np.ndarray:
        """Returns the task's reward, or each target's, for physics and control as set.

        float64 (W,), of a task alone (1,).
        """
        physics = self._environment.physics
        if self._family and self.targets is not None:
            return self._family.rewards(physics, self.targets)
        return np.array([self._environment.task.get_reward(physics)], np.float64)

    def observation(self) -> np.ndarray:
        """Returns the observation of physics as set, float32 (observation size,).

        Good where `recomputable`, bool (observation size,), is true.
        """
        task, physics = self._environment.task, self._environment.physics
        if self.domain != "jaco":
            return _flat(task.get_observation(physics))
        observables = task.observables.items()
        return _flat({name: o(physics) for name, o in observables if o.enabled})

    def _control(self, action: np.ndarray) -> np.ndarray:
        share = (np.asarray(action, np.float64) + 1) / 2
        return self._lowest + share * (self._highest - self._lowest)


def _flat(observation: Mapping[str, Any]) -> np.ndarray:
    parts = [np.ravel(value) for value in observation.values()]
    return np.concatenate(parts).astype(np.float32)


def check_simulator() -> None:
    """Raises ImportError if dm_control is missing, or does not go with mujoco."""
    try:
        mujoco = versions()["mujoco"]
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"relabelling and rollouts need {error.name}: {INSTALL}"
        ) from error
    if int(mujoco.split(".")[0]) > 3:
        raise ImportError(
            f"dm_control does not work with the mujoco {mujoco} there is: {INSTALL}"
        )


@contextlib.contextmanager
def _quiet_models() -> Iterator[None]:
    """Leaves out what dm_control warns of in its own models.

    And in the search for the Jaco arm's first pose, which restarts when it fails.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _load_suite(domain: str, task: str) -> Any:
    from dm_control import suite

    return suite.load(domain, task, task_kwargs={"random": 0})


def _load_jaco(target: tuple[float, float, float]) -> Any:
    """URLB's Jaco reach: the manipulation suite's, with a fixed, unobserved target."""
    # Importing composer makes all deprecation warnings of the process show.
    with warnings.catch_warnings():
        from dm_control import composer
        from dm_control.manipulation import reach
        from dm_control.manipulation.shared import observations

    # Private names, for which requirements/rl.txt pins dm_control.
    task: Any = reach._reach(obs_settings=observations.PERFECT_FEATURES, use_site=True)
    del task.task_observables["target_position"]
    position = np.array(target)
    task._target_placer = lambda random_state: position
    return composer.Environment(task, time_limit=JACO_SECONDS, random_state=0)
