"""Packed data: written whole or not at all, and read as written or refused by name."""

import errno
import hashlib
import json
import os
import shutil
import socket

import numpy as np
import pytest

from data import packed, remote
from data.agents.chains import top_episodes
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from data.agents.trajectory_file import identify as identify_steps
from data.files import refuse_existing
from data.packed import StoredArray
from data.text.tokens import token_file
from data.text.tokens.token_file import TokenFile, TokenFileWriter, identify
from data.text.tokens.tokenizer import ByteTokenizer
from tests.cases import table
from tests.support.fuzzing import set_field


def write(directory, size=4):
    """A corpus of one document with a loss mask, and one held out."""
    with TokenFileWriter(directory, ByteTokenizer(), has_loss_mask=True) as writer:
        for split in token_file.SPLITS:
            writer.write(split, np.arange(size) % 257, np.arange(size) % 2 == 1)
    return directory


def some_episodes(lengths):
    rng = np.random.default_rng(len(lengths))
    draws = [(rng.random((n, 5)) * 2 - 1, rng.random(n)) for n in lengths]
    draws = [[x.astype(np.float32) for x in both] for both in draws]
    return [(5 + 2 * x[:, :3], x[:, 3:], reward) for x, reward in draws]


def write_episodes(directory, episodes, about=None):
    with TrajectoryWriter(directory, about or {}) as writer:
        for episode in episodes:
            writer.write(*episode)
    return directory


def open_train(directory):
    return TokenFile.open(directory, "train")


def overwrite(path, place, values):
    with path.open("r+b") as file:
        file.seek(place)
        file.write(values.tobytes())


@pytest.mark.parametrize("size", [(5000,), (700, 3), (300, 2, 4)], ids=str)
@pytest.mark.parametrize("shape", [(1,), (40,), (900,), (20, 2), (0,), (3, 0)])
def test_any_places_are_read(tmp_path, monkeypatch, rng, size, shape):
    """Of an array behind 16 bytes, 512 at a time."""
    monkeypatch.setattr(packed, "_BYTES_AT_A_TIME", 512)
    values = rng.normal(size=size).astype("<f4")
    (tmp_path / "file").write_bytes(b"16 bytes of this" + values.tobytes())
    stored = StoredArray(tmp_path / "file", values.dtype, size, offset=16)
    drawn = rng.integers(0, len(values), shape)
    for places in drawn, np.sort(drawn, axis=None).reshape(shape):
        np.testing.assert_array_equal(stored.take(places), values[places])


@pytest.mark.parametrize("change", ["shorter", "other", "later", "moved"])
def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, change):
    """And no SIGBUS, which would end the process here. A new file is another one."""
    path = tmp_path / "file"
    path.write_bytes(bytes([7]) * 60_000)
    stored = StoredArray(path, np.dtype(np.uint16), (30_000,))
    number, nanoseconds = stored._reader._file, path.stat().st_mtime_ns
    assert stored.take(np.array([2047])).tolist() == [0x0707]
    if change == "shorter":
        os.truncate(path, 59_998)
    elif change == "moved":
        (tmp_path / "new").write_bytes(bytes([8]) * 60_000)
        (tmp_path / "new").rename(path)
    else:
        overwrite(path, 4094, np.array([8], "u1"))
    os.utime(path, ns=(0, nanoseconds + (change in ("other", "later"))))
    if change == "moved":
        assert stored.take(np.array([2047])).tolist() == [0x0707]
    else:
        with pytest.raises(OSError, match=f"^{path} was changed or replaced while"):
            stored.take(np.array([2047]))
    del stored
    with pytest.raises(OSError):  # it is closed when nobody has it
        os.fstat(number)
    with pytest.raises(OSError, match="file ends at byte 60000 and .*cut short while"):
        StoredArray(path, np.dtype(np.uint16), (31_000,))[30_000:31_000]


@pytest.mark.parametrize(
    "name", ["train.tokens.bin", "train.documents.bin", "steps.npy"]
)
def test_files_that_were_not_identified_are_not_read(tmp_path, monkeypatch, name):
    """What a run's record names are the files whose digests it compared."""
    open_file, identify_file = open_train, identify
    if name == "steps.npy":
        write_episodes(tmp_path / "data", some_episodes([7, 7]))
        open_file, identify_file = TrajectoryFile.open, identify_steps
    else:
        write(tmp_path / "data")

    def read():
        found = open_file(tmp_path / "data")
        return found.steps[:] if name == "steps.npy" else found.tokens[:]

    expected, path = read(), tmp_path / "data" / name
    identify_file(tmp_path / "data")
    np.testing.assert_array_equal(read(), expected)
    shutil.copy2(path, tmp_path / "copy")  # with its time
    (tmp_path / "copy").rename(path)
    with pytest.raises(OSError, match=f"^{path} was changed or replaced while"):
        read()
    identify_file(tmp_path / "data")
    np.testing.assert_array_equal(read(), expected)


def test_nothing_is_there_before_it_is_whole(tmp_path):
    directory = tmp_path / "deep" / "new"
    with TokenFileWriter(directory, ByteTokenizer()) as writer:
        writer.write("train", np.arange(4))
        assert not directory.exists()
    assert [path.name for path in directory.parent.iterdir()] == ["new"]
    assert directory.parent.stat().st_mode == directory.stat().st_mode
    assert open_train(directory).tokens.size == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_writer_leaves_nothing(tmp_path, error):
    new = tmp_path / "new"
    with pytest.raises(error), TokenFileWriter(new, ByteTokenizer()) as writer:
        writer.write("train", np.arange(4))
        raise error
    match = f"No space left on device: '{new}'"
    with pytest.raises(OSError, match=match), TokenFileWriter(new, ByteTokenizer()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    match = "no documents were written"
    with pytest.raises(ValueError, match=match), TokenFileWriter(new, ByteTokenizer()):
        pass
    with pytest.raises(ValueError, match="no episodes were written"):
        write_episodes(new, [])
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_left_as_it_is(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one").write_text("precious")
    (tmp_path / "file").write_text("precious")
    write(tmp_path / "old")
    for name in ("photos", "file", "old"):
        with pytest.raises(FileExistsError, match=f"{name} already exists and is left"):
            TokenFileWriter(tmp_path / name, ByteTokenizer()).__enter__()
    assert (tmp_path / "photos" / "one").read_text() == "precious"
    assert open_train(tmp_path / "old").tokens.size == 4
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / "empty").mkdir()
    refuse_existing(tmp_path / "empty")


def test_the_slower_of_two_writers_is_refused(tmp_path):
    new = tmp_path / "new"
    with pytest.raises(FileExistsError, match="new already exists and is left"):
        with TokenFileWriter(new, ByteTokenizer()) as slow:
            slow.write("train", np.arange(4))
            write(new, 6)
    assert open_train(new).tokens.size == 6
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_what_a_killed_writer_left_is_removed_and_what_a_live_one_has_is_not(tmp_path):
    host = socket.gethostname()
    others = {f".new2.{host}.0.partial", ".new.elsewhere.0.partial", f".new.{host}.0"}
    for name in (*others, f".new.{host}.0.partial"):
        (tmp_path / name).mkdir()
    new = tmp_path / "new"
    alive = TokenFileWriter(new, ByteTokenizer())
    with pytest.raises(KeyboardInterrupt), alive:
        write(new, 6)
        found = {path.name for path in tmp_path.iterdir()}
        assert found == {"new", alive._partial.name, *others}
        raise KeyboardInterrupt
    assert open_train(new).tokens.size == 6


def test_missing_files_are_named(tmp_path, monkeypatch):
    made = write(tmp_path / "corpus")
    match = f"^there is no corpus {tmp_path / 'nowhere'}: .*tools.prepare_text"
    with pytest.raises(FileNotFoundError, match=match):
        open_train(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"it has no meta\.json"):
        open_train(tmp_path)
    with pytest.raises(FileNotFoundError, match="no trajectory file .*pack_exorl"):
        TrajectoryFile.open(tmp_path / "nowhere")
    monkeypatch.setattr(remote, "BUCKETS", {"gs": "missing", "s3": "s3fs"})
    with pytest.raises(ImportError, match="^gs://a/b needs missing, .*nts/buckets.txt"):
        TrajectoryFile.open("gs://a/b")
    with pytest.raises(NotImplementedError, match="^ftp://a/b: .* gs:// or s3://"):
        TrajectoryFile.open("ftp://a/b")
    for name in ("documents", "tokens", "loss"):
        path = made / f"train.{name}.bin"
        path.rename(tmp_path / "moved")
        with pytest.raises(FileNotFoundError, match=f"{path} is missing: prepare"):
            open_train(made)
        assert TokenFile.open(made, "validation").tokens.size == 4
        (tmp_path / "moved").rename(path)


@pytest.mark.parametrize("name, size, says", table("data.txt", "size"))
def test_files_of_another_size_are_refused(tmp_path, name, size, says):
    is_steps = name == "steps.npy"
    write(tmp_path / "corpus")
    write_episodes(tmp_path / "run", some_episodes([7, 7]))
    path = tmp_path / ("run" if is_steps else "corpus") / name
    os.truncate(path, size)
    match = f"{path} has {size} bytes, but .*json says {says}: .*(cut short).*tools/"
    with pytest.raises(ValueError, match=match):
        TrajectoryFile.open(path.parent) if is_steps else open_train(path.parent)


def test_files_of_another_form_are_refused(tmp_path):
    directory = write_episodes(tmp_path / "run", some_episodes([7, 7]))
    np.save(directory / "steps.npy", np.zeros((7, 2, 6), np.float32))
    with pytest.raises(ValueError, match=r"steps\.npy does not begin as .*replaced"):
        TrajectoryFile.open(directory)
    for text in "{", "[" * 100_000, '{"a": 1, "a": 2}':
        (directory / "index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json is not JSON \(.*\): make "):
            TrajectoryFile.open(directory)


@pytest.mark.parametrize("name", ["tokens", "documents", "loss"])
def test_a_changed_byte_is_found_by_the_digests(tmp_path, name, monkeypatch):
    directory = write(tmp_path / "corpus")
    meta = json.loads((directory / "meta.json").read_text())
    files = {path.name for path in directory.iterdir()} - {"meta.json"}
    assert set(meta["files"]) == files and len(files) == 6
    for file, facts in meta["files"].items():
        content = (directory / file).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        assert facts == {"bytes": len(content), "sha256": sha256}
    digest, unread = identify(directory)
    assert len(digest) == 16 and unread == ""
    path = directory / f"train.{name}.bin"
    overwrite(path, 0, np.array([path.read_bytes()[0] ^ 1], "u1"))
    match = rf"train\.{name}\.bin is not what was written, by its digest: .*prepare"
    with pytest.raises(ValueError, match=match):
        identify(directory)
    monkeypatch.setattr(packed, "COMPARED_BYTES", 10)
    same, unread = identify(directory)
    assert same == digest and "not compared with their digests: config.data" in unread
    with pytest.raises(ValueError, match=match):
        identify(directory, compare=True)


@pytest.mark.parametrize("files, match", table("data.txt", "files"))
def test_files_that_are_described_wrong_are_refused(tmp_path, files, match):
    directory = write(tmp_path / "corpus")
    set_field(directory / "meta.json", "files", files)
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        identify(directory)


@pytest.mark.parametrize(
    "lengths, shape", [([7, 7], (2, 7, 6)), ([40, 9, 1], (50, 6)), ([5], (1, 5, 6))]
)
def test_episodes_come_back(tmp_path, lengths, shape):
    # Far from 0 and close together, where the difference of squares has no digits left.
    episodes = [(o + np.float32(1e4), a, r) for o, a, r in some_episodes(lengths)]
    directory = write_episodes(tmp_path / "run", episodes, {"task": "run"})
    assert np.load(directory / "steps.npy").shape == shape
    file = TrajectoryFile.open(directory)
    assert file.lengths.tolist() == lengths
    assert file.offsets.tolist() == [0, *np.cumsum(lengths)]
    assert (file.observation_size, file.action_size) == (3, 2)
    assert file.index["task"] == "run"
    assert file.steps.dtype == np.float32
    expected = np.concatenate([np.column_stack(episode) for episode in episodes])
    np.testing.assert_array_equal(file.steps[:], expected)
    returns = [reward.sum(dtype=np.float64) for *_, reward in episodes]
    np.testing.assert_allclose(file.returns, returns, rtol=1e-12)
    seen = expected[:, :3].astype(np.float64)
    np.testing.assert_allclose(file.observation_mean, seen.mean(0), rtol=1e-6)
    np.testing.assert_allclose(file.observation_std, seen.std(0), rtol=1e-6)


@pytest.mark.parametrize("lengths", [[7, 7], [40, 9, 1]])
def test_steps_of_many_worlds_are_written_once_and_read_for_each(
    tmp_path, lengths, rng
):
    """As a file that has them once for each world."""
    episodes = some_episodes(lengths)
    rewards = [rng.uniform(size=(3, steps)).astype(np.float32) for steps in lengths]
    shared = [(o, a, r) for (o, a, _), r in zip(episodes, rewards, strict=True)]
    once = TrajectoryFile.open(write_episodes(tmp_path / "once", shared))
    with TrajectoryWriter(tmp_path / "each", {}) as writer:
        for world in range(3):
            for observation, action, reward in shared:
                writer.write(observation, action, reward[world], world=world)
    each = TrajectoryFile.open(tmp_path / "each")
    assert once.steps.shape == (sum(lengths), 5) and each.steps.shape[0] == 3 * sum(
        lengths
    )
    places = rng.integers(3 * sum(lengths), size=(4, 30))
    np.testing.assert_array_equal(once.read(places), each.read(places))
    for name in ("offsets", "worlds", "lengths"):
        np.testing.assert_array_equal(getattr(once, name), getattr(each, name))
    for name in ("returns", "observation_mean", "observation_std"):
        np.testing.assert_allclose(getattr(once, name), getattr(each, name), rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"rewards of \(2, .* and W 3, as before: pack one"
    ):
        with TrajectoryWriter(tmp_path / "other", {}) as writer:
            for (observation, action, reward), count in zip(
                shared, (3, 2), strict=False
            ):
                writer.write(observation, action, reward[:count])


@pytest.mark.parametrize("shapes, match", table("data.txt", "shapes"))
def test_episodes_of_other_shapes_are_refused(tmp_path, shapes, match):
    names = "observation", "action", "reward", "target"
    named = zip(names, shapes, strict=False)
    episode = {name: np.full(shape, 0.25) for name, shape in named}
    writer = TrajectoryWriter(tmp_path / "run", {})
    with pytest.raises(ValueError, match=f"episode 1 of world=0 has .*{match}"), writer:
        writer.write(*some_episodes([3])[0])
        writer.write(**episode)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "match"),
    # The last is too large for Python to read in a table.
    [*table("data.txt", "index"), ("action_size", 10**400, "no header of 128 bytes")],
)
def test_index_of_another_form_is_refused(tmp_path, field, value, match):
    directory = write_episodes(tmp_path / "run", some_episodes([7, 7]))
    set_field(directory / "index.json", field, value)
    if value == []:
        set_field(directory / "index.json", "returns", [])
    with pytest.raises(ValueError, match=rf"index\.json.*{match}.*pack"):
        TrajectoryFile.open(directory)


def test_a_number_that_is_not_finite_is_neither_written_nor_read(tmp_path):
    (observation, action, reward), *_ = episodes = some_episodes([4, 5, 3])
    spoilt = observation.copy()
    spoilt[2, 1] = np.inf
    with pytest.raises(ValueError, match="episode 1 has .* not finite .* in step 2"):
        write_episodes(tmp_path / "run", [episodes[0], (spoilt, action, reward)])
    assert list(tmp_path.iterdir()) == []
    directory = write_episodes(tmp_path / "run", episodes)
    overwrite(directory / "steps.npy", 128 + (4 + 2) * 6 * 4, np.array(np.nan, "<f4"))
    file = TrajectoryFile.open(directory)
    assert file.read(np.array([[5, 0], [7, 11]])).shape == (2, 2, 6)
    match = r"steps\.npy has a number that is not finite in step 6 \(in episode 1\)"
    with pytest.raises(ValueError, match=match):
        file.read(np.array([5, 6, 7]))
    with pytest.raises(ValueError, match="not what was written, by its digest"):
        identify_steps(directory)


def test_best_episodes_hold_a_tenth_of_the_steps():
    returns, lengths = np.array([5.0, 9, 1, 7, 8]), np.array([10, 5, 60, 5, 20])
    assert top_episodes(returns, lengths).tolist() == [1]
    assert top_episodes(returns, lengths, 0.25).tolist() == [1, 4]
    assert top_episodes(returns, lengths, 0.3).tolist() == [1, 4, 3]
    assert top_episodes(returns, lengths, 0.01).tolist() == [1]
    assert top_episodes(returns, lengths, 1.0).tolist() == [1, 4, 3, 0, 2]
    for share in 0, -1, 1.5:
        with pytest.raises(ValueError, match=f"share={share} of the steps must be"):
            top_episodes(returns, lengths, share)
    equal = np.ones(20)
    assert top_episodes(equal, np.full(20, 1000)).tolist() == [19, 18]
