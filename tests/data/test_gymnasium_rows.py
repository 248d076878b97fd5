"""Spaces of gymnasium as agents see them, and Minari's episodes, packed."""

from types import SimpleNamespace

import numpy as np
import pytest

from data.agents.gymnasium_rows import flat, of_agent, to_agent
from tools.pack_minari import pack

BOX = SimpleNamespace(
    low=np.array([[-2.0, 0.0]]),
    high=np.array([[2.0, 4.0]]),
    shape=(1, 2),
    dtype=np.dtype(np.float32),
)
DISCRETE = SimpleNamespace(n=3, start=1)


def test_actions_of_spaces_go_both_ways():
    actions = np.array([[[2.0, 1.0]], [[-2.0, 4.0]]], np.float32)
    agents = to_agent(actions, BOX)
    assert agents.tolist() == [[1, -0.5], [-1, 1]]
    np.testing.assert_array_equal(of_agent(agents, BOX), actions, strict=True)
    chosen = to_agent(np.array([1, 3]), DISCRETE)
    assert chosen.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert of_agent(chosen, DISCRETE).tolist() == [1, 3]
    with pytest.raises(ValueError, match="neither of a Box nor of a Discrete"):
        to_agent(actions, "a text")


def test_a_dataset_is_packed_with_flat_observations(tmp_path):
    """Episodes as Minari gives them: one more observation, of the end."""
    rng, episodes = np.random.default_rng(5), []
    for length in 4, 2:
        seen = {
            "z": rng.normal(size=(length + 1, 2, 2)),
            "a": rng.normal(size=length + 1),
        }
        rewards = rng.uniform(size=length)
        actions = rng.integers(1, 4, size=length)
        one = SimpleNamespace(observations=seen, actions=actions, rewards=rewards)
        episodes.append(one)
    dataset = SimpleNamespace(
        id="some/data-v0",
        env_spec=SimpleNamespace(to_json=lambda: "a description"),
        action_space=DISCRETE,
        iterate_episodes=lambda: iter(episodes),
    )
    file = pack(dataset, tmp_path / "packed")
    assert file.lengths.tolist() == [4, 2] and file.index["task"] == "some/data-v0"
    assert (file.observation_size, file.action_size) == (5, 3)
    assert file.index["environment"] == "a description"
    np.testing.assert_allclose(
        file.returns, [one.rewards.sum() for one in episodes], rtol=1e-6
    )
    last = file.read(np.arange(4, 6))
    seen = episodes[1].observations
    np.testing.assert_allclose(last[:, 0], seen["a"][:2], rtol=1e-6)
    np.testing.assert_allclose(last[:, 1:5], seen["z"][:2].reshape(2, 4), rtol=1e-6)
    assert (last[:, 5:8].argmax(axis=1) + 1 == episodes[1].actions).all()
    assert flat(seen).shape == (3, 5)
