import errno
import pickle

import numpy as np
import pytest

from data.agents.episodes import (
    DOMAINS,
    NAMES,
    BadEpisode,
    Buffer,
    read_episode,
    steps_of,
    write_episode,
)
from tests.cases import pairs
from tests.small.episodes import made_up
from tests.support.fuzzing import damaged, fuzz

STEPS = 100


@pytest.fixture
def path(tmp_path):
    """A good file of a cart-pole."""
    path = tmp_path / f"episode_000007_{STEPS}.npz"
    write_episode(made_up(path, "cartpole", STEPS))
    return path


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
        found, wanted = getattr(read, name), getattr(written, name)
        np.testing.assert_array_equal(found, wanted, strict=True)
    assert read.physics.dtype == np.float64 and read.action.dtype == np.float32


@pytest.mark.parametrize(
    "attempts", [200, pytest.param(20_000, marks=pytest.mark.slow)]
)
def test_a_damaged_file_is_the_episode_or_refused(path, attempts):
    # Zip archives have bytes that nothing depends on: the times of their files.
    good, whole = path.read_bytes(), read_episode(path, "cartpole")
    directory = good.index(b"PK\1\2")

    def attempt(rng):
        cut = int(rng.integers(2)) * directory
        path.write_bytes(good[:cut] + damaged(good[cut:], rng))
        return read_episode(path, "cartpole")

    def check(episode):
        for name in NAMES:
            np.testing.assert_array_equal(getattr(episode, name), getattr(whole, name))

    counts = fuzz(attempts, attempt, check, most_bytes=4 << 20)
    assert counts["refused"] > attempts // 2


def test_a_file_that_is_not_an_archive_is_refused(path):
    good = path.read_bytes()
    for content in (good[:-100], b"some text", b"PK text", pickle.dumps([1]), b""):
        path.write_bytes(content)
        assert refusal(path) == "unreadable npz (BadZipFile: File is not a zip file)"
    path.unlink()
    assert refusal(path).startswith("unreadable npz (FileNotFoundError: ")
    path.mkdir()
    assert refusal(path).startswith("unreadable npz (IsADirectoryError: ")


FLOATS = "expected floating point of 16 to 64 bits"
CHANGES = {
    f"reward has type object, {FLOATS}": lambda a: a.astype(object),
    f"reward has type int64, {FLOATS}": lambda a: a.astype(int),
    "reward has shape (101,), expected (101, 1)": lambda a: a[:, 0],
    "observation has shape (100, 5), expected (101, 5)": lambda a: a[1:],
    "reward has 1 non-finite values, first at row 17": {17: np.nan},
    "physics has 2 non-finite values, first at row 5": {5: np.inf, 9: np.inf},
    "observation has 1 non-finite values, first at row 3": {3: 1e300},
    "action outside [-1, 1] (3.000)": {4: -3.0},
}
"""By what is said of an array: how it is changed, or numbers in rows of it."""


@pytest.mark.parametrize("said", CHANGES)
def test_arrays_of_no_episode_are_refused(path, said):
    with np.load(path) as archive:
        arrays = dict(archive)

    def save(**changes):
        np.savez_compressed(path, **arrays | changes)

    arrays["action"][-1] = 1  # which is still within
    save()
    assert read_episode(path, "cartpole").steps == STEPS
    name, change = said.split()[0], CHANGES[said]
    if callable(change):
        changed = change(arrays[name])
    else:
        changed = arrays[name].astype(np.float64)
        changed[[*change], -1] = [*change.values()]
    save(**{name: changed})
    assert refusal(path) == said
    save(action=np.roll(arrays["action"], 1))
    assert refusal(path) == "row 0 is not the dummy reset row (action[0] != 0)"
    del arrays["physics"]
    save()
    names = "['action', 'discount', 'observation', 'reward']"
    assert refusal(path) == f"missing ['physics'], has {names}"


def test_an_error_that_passes_is_no_damage(path, monkeypatch):
    def failing(*_, **__):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("numpy.lib.format.read_array", failing)
    with pytest.raises(OSError, match="Input/output error"):
        read_episode(path, "cartpole")


@pytest.mark.parametrize(("name", "expected"), pairs("agents.txt", "file"))
def test_names_promise_what_the_file_holds(path, name, expected):
    assert refusal(path.rename(path.with_name(name))) == expected


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
    with pytest.raises(ValueError, match="domain='hop' must be one of cartpole, "):
        Buffer(tmp_path, "hop", "r")
    # Without episodes it says what to do.
    match = r"no directory .*jaco/rnd/buffer: unzip .*make_exorl\.py"
    nothing = Buffer(tmp_path, "jaco", "rnd")
    with pytest.raises(FileNotFoundError, match=match):
        nothing.scan()
    (nothing.directory / "buffer").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"buffer holds no \.npz file: unzip"):
        nothing.scan()
