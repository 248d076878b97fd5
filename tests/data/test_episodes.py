import pickle

import numpy as np
import pytest

from data.episodes import (
    DOMAINS,
    NAMES,
    BadEpisode,
    Buffer,
    digest,
    read_episode,
    steps_of,
    write_episode,
)
from tests.episodes import made_up

STEPS = 100


@pytest.fixture
def path(tmp_path):
    """A good file of a cart-pole."""
    path = tmp_path / f"episode_000007_{STEPS}.npz"
    write_episode(made_up(path, "cartpole", STEPS))
    return path


def rewrite(path, **changes):
    """Writes the file anew with some arrays changed; None leaves one out."""
    with np.load(path) as archive:
        arrays = dict(archive) | changes
    np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})


def array_of(path, name):
    with np.load(path) as archive:
        return archive[name]


def refusal(path, domain="cartpole"):
    """What `read_episode` says of a file, without the path in front."""
    with pytest.raises(BadEpisode) as caught:
        read_episode(path, domain)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert "pickle" not in message and "unsafe" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_episode_comes_back(tmp_path, domain):
    path = tmp_path / "episode_3_11.npz"
    written = made_up(path, domain, 11)
    write_episode(written)
    read = read_episode(path, domain)
    assert read.steps == 11
    for name in NAMES:
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
        assert getattr(read, name).dtype == getattr(written, name).dtype
    assert read.physics.dtype == np.float64 and read.action.dtype == np.float32


def test_other_arrays_of_the_file_are_left_alone(path):
    rewrite(path, skill=np.array([{"any": "object"}]), z=np.ones(3))
    assert read_episode(path, "cartpole").steps == STEPS


def test_truncated_file_is_refused(path):
    path.write_bytes(path.read_bytes()[:-100])
    assert refusal(path) == "unreadable npz (BadZipFile: File is not a zip file)"


def test_flipped_bit_is_refused(tmp_path):
    path = tmp_path / f"episode_0_{STEPS}.npz"
    episode = made_up(path, "cartpole", STEPS)
    # Stored as they are, so that the flipped bit is one of an action.
    np.savez(path, **{name: getattr(episode, name) for name in NAMES})
    content = bytearray(path.read_bytes())
    content[content.index(episode.action.tobytes()) + 9] ^= 1
    path.write_bytes(content)
    expected = "unreadable npz (BadZipFile: Bad CRC-32 for file 'action.npy')"
    assert refusal(path) == expected


def test_damage_anywhere_is_a_bad_episode_or_harmless(path):
    good = path.read_bytes()
    rng = np.random.default_rng(3)
    refused = 0
    for place in rng.integers(len(good), size=150):
        content = bytearray(good)
        content[place] ^= rng.integers(1, 256)
        path.write_bytes(content)
        try:
            read_episode(path, "cartpole")
        except BadEpisode as error:
            assert "pickle" not in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 100


def test_empty_file_is_refused(path):
    path.write_bytes(b"")
    assert refusal(path) == "unreadable npz (EOFError: No data left in file)"


@pytest.mark.parametrize("content", [b"some text", b"PK text", pickle.dumps([1])])
def test_file_that_is_no_archive_is_refused_without_advice_to_unpickle(path, content):
    path.write_bytes(content)
    assert refusal(path) == "unreadable npz (BadZipFile: File is not a zip file)"


def test_objects_are_refused_without_advice_to_unpickle(path):
    rewrite(path, reward=np.array([[0.0]] * (STEPS + 1), dtype=object))
    assert refusal(path) == "reward holds Python objects, not numbers"


def test_missing_file_and_directory_are_refused(path):
    path.unlink()
    assert refusal(path).startswith("unreadable npz (FileNotFoundError: ")
    path.mkdir()
    assert refusal(path).startswith("unreadable npz (IsADirectoryError: ")


def test_missing_array_is_named(path):
    rewrite(path, physics=None)
    has = "['action', 'discount', 'observation', 'reward']"
    assert refusal(path) == f"missing ['physics'], has {has}"


def test_length_of_the_name_must_be_that_of_the_arrays(path):
    path = path.rename(path.with_name(f"episode_7_{STEPS - 1}.npz"))
    expected = "observation has shape (101, 5), expected (100, 5)"
    assert refusal(path) == expected


def test_values_that_are_not_finite_are_counted_and_placed(path):
    reward = array_of(path, "reward")
    reward[17] = np.nan
    rewrite(path, reward=reward)
    assert refusal(path) == "reward has 1 non-finite values, first at row 17"
    physics = array_of(path, "physics")
    physics[[5, 9], 2] = np.inf
    rewrite(path, physics=physics, reward=np.zeros_like(reward))
    assert refusal(path) == "physics has 2 non-finite values, first at row 5"


def test_actions_out_of_range_are_refused(path):
    action = array_of(path, "action")
    rewrite(path, action=action / np.abs(action).max() * 3)
    assert refusal(path) == "action outside [-1, 1] (3.000)"
    rewrite(path, action=action / np.abs(action).max())
    assert read_episode(path, "cartpole").steps == STEPS


def test_missing_reset_row_is_refused(path):
    rewrite(path, **{name: array_of(path, name)[1:] for name in NAMES})
    assert refusal(path) == "observation has shape (100, 5), expected (101, 5)"


def test_actions_shifted_by_one_are_refused(path):
    rewrite(path, action=np.roll(array_of(path, "action"), -1, axis=0))
    assert refusal(path) == "row 0 is not the dummy reset row (action[0] != 0)"


def test_other_domain_is_refused(path):
    expected = "observation has shape (101, 5), expected (101, 24)"
    assert refusal(path, "walker") == expected


def test_rewards_of_one_dimension_are_refused(path):
    rewrite(path, reward=array_of(path, "reward")[:, 0])
    assert refusal(path) == "reward has shape (101,), expected (101, 1)"


def test_whole_numbers_are_refused(path):
    rewrite(path, reward=np.zeros((STEPS + 1, 1), int))
    assert refusal(path) == "reward has type int64, expected floating point"


@pytest.mark.parametrize(
    "name",
    ["episode_7.npz", "7_100.npz", "episode_7_100.npz.part", "episode_x_100.npz"],
)
def test_odd_name_is_refused(path, name):
    path = path.rename(path.with_name(name))
    assert refusal(path) == "name is not episode_<index>_<length>.npz"


def test_episode_of_no_steps_is_refused(path):
    path = path.rename(path.with_name("episode_0_0.npz"))
    rewrite(path, **{name: array_of(path, name)[:1] for name in NAMES})
    assert refusal(path) == "its name promises 0 steps"


def test_unknown_domain_is_the_callers_fault(path):
    with pytest.raises(ValueError, match="domain='hopper' is not one of cartpole, "):
        read_episode(path, "hopper")
    with pytest.raises(ValueError, match="domain='hopper'"):
        Buffer(path, "hopper", "rnd")


def test_bad_episode_survives_a_process_boundary(path):
    error = pickle.loads(pickle.dumps(BadEpisode(path, "two\nlines")))
    assert (error.path, error.reason) == (path, "two lines")
    assert str(error) == f"{path}: two lines"


def test_files_are_sorted_by_their_numbers(tmp_path):
    buffer = Buffer(tmp_path, "walker", "rnd")
    folder = tmp_path / "walker" / "rnd" / "buffer"
    folder.mkdir(parents=True)
    names = ["episode_000010_1000.npz", "episode_9_1000.npz", "episode_1_250.npz"]
    names += ["20220207T101112_2_500.npz", "odd.npz", "readme.txt"]
    for name in names:
        (folder / name).touch()
    found = buffer.scan()
    expected = ["episode_1_250.npz", "20220207T101112_2_500.npz"]
    expected += ["episode_9_1000.npz", "episode_000010_1000.npz", "odd.npz"]
    assert [path.name for path in found] == expected
    assert [steps_of(path) for path in found[:-1]] == [250, 500, 1000, 1000]


def test_buffer_without_episodes_says_what_to_do(tmp_path):
    buffer = Buffer(tmp_path, "walker", "rnd")
    match = r"no directory .*walker/rnd/buffer: unzip .*make_exorl\.py"
    with pytest.raises(FileNotFoundError, match=match):
        buffer.scan()
    (tmp_path / "walker" / "rnd" / "buffer").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"buffer holds no \.npz file: unzip"):
        buffer.scan()


def test_digest_is_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert digest(tmp_path / "a").startswith("ba7816bf8f01cfea414140de5dae2223")
