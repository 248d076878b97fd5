import numpy as np
import pytest

from data.agents.chains import (
    SPLITS,
    ChainBatch,
    Chains,
    of_step_before,
    split_episodes,
)
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from tests.small.corpora import assert_same_batch


def pack(directory, episodes):
    """Episodes of rewards and worlds: the observation is the step's number.

    Actions are a hundredth of it; targets, where there are many worlds, half of those.
    """
    with TrajectoryWriter(directory / "run", {}) as writer:
        number = 0
        for rewards, world in episodes:
            steps = np.arange(number, number + len(rewards), dtype=float)[:, None]
            target = None if world is None else steps / 200
            rewards, world = np.array(rewards, float), world or 0
            writer.write(steps, steps / 100, rewards, target=target, world=world)
            number += len(rewards)
    return TrajectoryFile.open(directory / "run")


@pytest.fixture
def file(tmp_path):
    """Thirty episodes of 6 steps."""
    rewards = np.random.default_rng(0).uniform(size=(30, 6))
    return pack(tmp_path, [(each, None) for each in rewards])


@pytest.fixture
def worlds(tmp_path):
    """Nine episodes of 4 steps in each of five worlds, in turn."""
    rewards = [np.arange(n, n + 4) / 50 for n in range(45)]
    return pack(tmp_path, [(each, n % 5) for n, each in enumerate(rewards)])


def make_chains(file, chain_length=3, **options):
    options = {"seed": 5} | options
    return Chains(file, np.arange(len(file.returns)), chain_length, **options)


def read_row(chains, row=0):
    return chains.read(row, np.arange(chains.length, dtype=np.int32))


def test_values_of_a_chain_made_by_hand(tmp_path):
    rewards = [0.5, 1.0, 0.5], [0, 0.25], [1, 0, 1, 0]
    file = pack(tmp_path, [(each, None) for each in rewards])
    batch = read_row(make_chains(file, multiple=4))
    # Returns 2, 0.25 and 2: the second episode first, then the equal ones in order.
    wanted = {
        "returns_to_go": [2, 2, 2, 1.5, 0.5, 2, 1, 1, 0, 0, 0, 0],
        "rewards": [0, 0.25, 0.5, 1, 0.5, 1, 0, 1, 0, 0, 0, 0],
        "completions": [0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
        "timesteps": [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 0, 0],
        "ranks": [0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0],
        "positions": list(range(12)),
        "loss_weights": [1] * 9 + [0] * 3,
    }
    assert {name: getattr(batch, name).tolist() for name in wanted} == wanted
    steps = np.array([3, 4, 0, 1, 2, 5, 6, 7, 8])
    np.testing.assert_allclose(batch.actions[:9, 0], steps / 100, rtol=1e-6)
    standard = (steps - 4) / np.std(np.arange(9))
    np.testing.assert_allclose(batch.observations[:9, 0], standard, rtol=1e-5)
    assert not batch.observations[9:].any() and not batch.actions[9:].any()
    # Rows have room for the longest episodes, and padding in its place.
    some = make_chains(file, 2, multiple=4)
    sizes = {int(read_row(some, row).loss_weights.sum()) for row in range(20)}
    assert (some.length, sizes) == (8, {5, 6, 7})


def test_chains_are_of_different_episodes_from_bad_to_good(file, tmp_path):
    chains = make_chains(file, 8)
    drawn = [chains.chain(row) for row in range(200)]
    for chain in drawn:
        assert len(set(chain.tolist())) == 8
        assert (np.diff(file.returns[chain]) >= 0).all()
    assert len({tuple(chain) for chain in drawn}) == 200
    counts = np.bincount(np.concatenate(drawn), minlength=30)
    # 1600 draws over 30 episodes; the deviation of a count is below 7.
    assert abs(counts - 1600 / 30).max() < 30
    # Equal returns keep the order of the episodes.
    equal = pack(tmp_path / "equal", [([r], None) for r in (1.0, 0.5, 1.0, 0.5, 1.0)])
    for row in range(10):
        assert make_chains(equal, 5).chain(row).tolist() == [1, 3, 0, 2, 4]


def test_drawn_chains_are_in_no_order(file):
    drawn, ascending = make_chains(file, 8, order="drawn"), make_chains(file, 8)
    rising = 0
    for row in range(50):
        assert sorted(drawn.chain(row)) == sorted(ascending.chain(row))
        rising += (np.diff(file.returns[drawn.chain(row)]) > 0).sum()
    assert 120 < rising < 230  # of 350
    chain, batch = drawn.chain(0), read_row(drawn)
    assert batch.returns_to_go[0] == np.float32(file.returns[chain].max())
    best = int(np.argmax(file.returns[chain]))
    assert np.flatnonzero(batch.completions).tolist() == [6 * best + 5]


def test_a_twentieth_is_held_out_in_halves_one_at_least_and_never_all():
    one_world = np.zeros(200, int)
    found = split_episodes(one_world)
    assert [len(found[name]) for name in SPLITS] == [190, 5, 5]
    assert sorted(np.concatenate([*found.values()])) == list(range(200))
    for name, part in split_episodes(one_world).items():
        assert part.tolist() == sorted(part) == found[name].tolist()
    assert np.diff(found["test"]).max() > 1
    assert (split_episodes(one_world, seed=1)["test"] != found["test"]).any()
    for count, share, sizes in (3, 0.05, [1, 1, 1]), (4, 0.99, [1, 1, 2]):
        parts = split_episodes(one_world[:count], share).values()
        assert [len(part) for part in parts] == sizes
    for episodes, share in (2, 0.5), (10, 0), (10, 1), (10, 2):
        with pytest.raises(ValueError, match=f"share={share} of {episodes} episodes"):
            split_episodes(one_world[:episodes], share)


def test_of_many_worlds_whole_ones_are_held_out():
    worlds = np.random.default_rng(3).permutation(np.repeat(np.arange(20), 7))
    found = split_episodes(worlds, 0.2)
    assert sorted(np.concatenate([*found.values()])) == list(range(140))
    of_parts = [set(worlds[found[name]]) for name in SPLITS]
    assert [len(part) for part in of_parts] == [16, 2, 2]
    assert len(set.union(*of_parts)) == 20


def test_a_chain_is_of_one_world(worlds):
    chains = Chains(worlds, np.flatnonzero(worlds.worlds != 2), 3, seed=0)
    of_chains = [set(worlds.worlds[chains.chain(row)]) for row in range(60)]
    assert all(len(of_chain) == 1 for of_chain in of_chains)
    assert set.union(*of_chains) == {0, 1, 3, 4}
    for size, match in (10, "chain of 10 .* 9 different"), (0, "of 0 .*at least 1"):
        with pytest.raises(ValueError, match=match):
            make_chains(worlds, size)


def test_what_was_learnt_is_read_in_its_order_and_whole(worlds):
    chains = make_chains(worlds, 3, order="learnt")
    # Places in the world's history, (60, 3).
    places = np.stack([chains.chain(row) // 5 for row in range(60)])
    assert (places // 3 == [0, 1, 2]).all() and set(places.flat) == set(range(9))


def test_what_was_learnt_is_read_from_anywhere_to_the_end(tmp_path):
    file = pack(tmp_path, [([0.5], n % 2) for n in range(200)])
    chains = make_chains(file, 10, order="learnt", latest_begin=0.8)
    places = np.stack([chains.chain(row) // 2 for row in range(400)])
    # Half of the chains begin at the beginning, no chain in the last fifth.
    assert 0.5 < (places[:, 0] < 10).mean() < 0.65
    assert 60 < places[:, 0].max() < 0.8 * 90 + 10
    # All last to the end: the last of the ten parts is at most a tenth of the history.
    assert places[:, -1].min() >= 90
    assert (np.diff(places) > 0).all()


def test_tokens_of_whole_steps_have_what_came_of_the_step_before(worlds):
    plain, shifted = (
        make_chains(worlds, multiple=5, of_step_before=before) for before in (0, 1)
    )
    now, before = read_row(plain), read_row(shifted)
    real = now.loss_weights > 0
    # At the beginning nothing was before; the last reward of an episode is seen.
    for name in "actions", "rewards", "completions":
        happened, seen = getattr(now, name), getattr(before, name)
        assert not seen[0].any() and happened[real].any()
        np.testing.assert_array_equal(seen[1:][real[1:]], happened[:-1][real[1:]])
        assert not seen[~real].any()
    for name in ("observations", "targets", "returns_to_go", "loss_weights"):
        np.testing.assert_array_equal(getattr(before, name), getattr(now, name))
    # Targets, where they are predicted, stand in the place of actions.
    np.testing.assert_array_equal(now.targets, now.actions)
    best = read_row(make_chains(worlds, multiple=5, predict="targets"))
    np.testing.assert_array_equal(best.actions, now.actions)
    np.testing.assert_allclose(best.targets, best.actions / 2)
    # And any columns of it, in any order, are the same.
    index = np.array([5, 2, 9, 0], np.int32)
    assert_same_batch(shifted.read(0, index), ChainBatch(*(x[index] for x in before)))
    whole = ChainBatch(*(x[real][None] for x in now))
    wanted = ChainBatch(*(x[real][None] for x in before))
    assert_same_batch(of_step_before(whole), wanted)
