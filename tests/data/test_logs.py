"""Logs of a robot: episodes with rewards of their own, which end or are cut."""

import numpy as np
import pytest

from data.agents.episodes import BadEpisode, write_episode
from data.agents.logs import pack_logs
from tests.cases import pairs
from tests.small.episodes import made_up
from tools import pack_logs as program


def arrays(steps, **changes):
    rng = np.random.default_rng(steps)
    return {
        "observations": rng.normal(size=(steps, 2, 2)),
        "actions": rng.uniform(-1, 1, (steps, 3)).astype(np.float32),
        "rewards": rng.uniform(size=(steps, 1)),
        "notes": np.array(["not read"]),
    } | changes


def at(steps, *true):
    return np.isin(np.arange(steps), true)


def test_episodes_end_where_they_terminate_or_are_cut(tmp_path):
    long = arrays(9, terminations=at(9, 2, 5), truncations=at(9, 5, 6))
    np.savez(tmp_path / "a.npz", **long)
    last = arrays(4)
    last["observations"] = np.ones((5, 4))  # also of what follows the last action
    np.savez_compressed(tmp_path / "b.npz", **last)
    np.savez(tmp_path / "c.npz", **arrays(3, terminations=at(3, 2)))
    file = pack_logs(sorted(tmp_path.glob("*.npz")), tmp_path / "packed")
    assert file.lengths.tolist() == [3, 3, 1, 2, 4, 3]
    assert file.terminated.tolist() == [True, True, False, False, False, True]
    assert "; 3 terminated, 3 cut\n" in file.describe()
    steps = file.read(np.arange(9))
    np.testing.assert_allclose(steps[:, :4], long["observations"].reshape(9, 4))
    np.testing.assert_array_equal(steps[:, 4:7], long["actions"])
    np.testing.assert_allclose(steps[:, 7], long["rewards"][:, 0], rtol=1e-6)
    np.testing.assert_array_equal(file.read(np.arange(9, 13))[:, :4], 1)
    names = [source["file"] for source in file.index["sources"]]
    assert names == ["a.npz", "b.npz", "c.npz"]


def test_files_of_exorls_names_need_no_physics(tmp_path):
    episode = made_up(tmp_path / "episode_0_6.npz", "cartpole", 6)
    episode.discount[-1] = 0
    write_episode(episode)
    with np.load(episode.path) as archive:
        kept = {name: archive[name] for name in archive if name != "physics"}
    np.savez(episode.path, **kept)
    file = pack_logs([episode.path], tmp_path / "packed")
    steps = file.read(np.arange(6))
    np.testing.assert_array_equal(steps[:, :5], episode.observation[:-1])
    np.testing.assert_array_equal(steps[:, 5:6], episode.action[1:])
    np.testing.assert_array_equal(steps[:, 6:], episode.reward[1:])
    assert file.terminated.tolist() == [True]


CHANGES = {
    "one": {"actions": np.array(0.5)},
    "exorls": {"observation": np.zeros((7, 4))},
    "none": {"actions": np.zeros((0, 3))},
    "short": {"rewards": np.zeros(4)},
    "long": {"observations": np.zeros((7, 4))},
    "wide": {"rewards": np.zeros((5, 2))},
    "words": {"rewards": np.array(["a"] * 5)},
    "pickled": {"rewards": np.array([None] * 5)},
    "far": {"actions": np.full((5, 3), 2.0)},
    "nan": {"actions": np.full((5, 3), np.nan)},
    "endless": {"observations": np.full((5, 4), np.inf)},
}


@pytest.mark.parametrize(("name", "said"), pairs("agents.txt", "log"))
def test_what_is_no_log_is_named(tmp_path, name, said):
    path = tmp_path / "log.npz"
    changed = arrays(5) | CHANGES.get(name, {})
    changed.pop(name, None)
    np.savez(path, **changed)
    if name == "damaged":
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(BadEpisode) as caught:
        pack_logs([path], tmp_path / "packed")
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)
    assert not (tmp_path / "packed").exists()


def test_the_program_prints_how_to_train(tmp_path, capsys):
    (tmp_path / "logs" / "monday").mkdir(parents=True)
    out = tmp_path / "arm"
    words = [str(tmp_path / "logs"), "--output", str(out)]
    assert program.main(words) == 1
    assert f"no episodes were written to {out}" in capsys.readouterr().err
    np.savez(tmp_path / "logs/monday/1.npz", **arrays(7))
    np.savez(tmp_path / "logs/2.npz", **arrays(5))
    assert program.main(words) == 0
    printed = capsys.readouterr().out
    assert (
        "2 episodes of 5 to 7 steps, 12 steps" in printed and "0 terminated" in printed
    )
    words = "--config.agent.episode_steps=7 --config.data.context_tokens=32"
    assert f"--config.data.trajectories={out} \\\n    {words}" in printed
