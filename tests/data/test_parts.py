"""Corpora made of parts: the same bytes for any units, by any number of processes."""

import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from data.chat.chat_template import open_template
from data.chat.corpus import ChatEncoder, prepare_chats
from data.text import corpus
from data.text.corpus import prepare
from data.text.reading import parts, units
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFileWriter
from data.text.tokens.tokenizer import ByteTokenizer
from tests.data.test_chat import rows as chats
from tests.data.test_corpus import fill
from tests.support import tables

NAMES = "rows.jsonl", "rows.parquet", "rows.feather", "rows.csv", "rows.jsonl.gz"
TEXTS = [f"text {number} ä" * (number % 7 + 1) for number in range(120)]


def make_inputs(root, changes=None):
    """Files of rows in several formats, whose texts differ, and texts; no two alike.

    changes: values of rows by name of the file and number.
    """
    for name in NAMES:
        rows = [{"text": f"{name} {text}", "n": 1} for text in TEXTS]
        for number, value in (changes or {}).get(name, {}).items():
            rows[number]["text"] = value
        tables.compress(root / name, tables.FORMATS[name](rows))
    return fill(root, {f"t/{n}.txt": text for n, text in enumerate(TEXTS[:40])})


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def inputs(tmp_path):
    root = tmp_path / "in"
    root.mkdir()
    make_inputs(root)
    return [*(root / name for name in NAMES), root / "t"]


def test_units_are_lines_row_groups_batches_and_small_files(inputs, monkeypatch):
    files = [units.InputFile(path, None, True) for path in inputs[:-1]]
    files += [units.InputFile(p, None, False) for p in sorted(inputs[-1].iterdir())]
    whole = [*units.units_of(files)]
    assert [len(unit.files) for unit in whole] == [len(files)]
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    found = [*units.units_of(files)]
    for path in inputs[:-1]:
        spans = [u.files[0].span for u in found if u.files[0].path == path]
        if path.name in ("rows.csv", "rows.jsonl.gz"):
            assert spans == [None]
            continue
        assert len(spans) >= 5 and spans[0].begin == spans[0].rows == 0
        assert all(one.end == two.begin for one, two in pairwise(spans))
        assert spans[-1].end == spans[0].size
    assert sum(unit.bytes for unit in found) == pytest.approx(whole[0].bytes, abs=99)


@pytest.mark.parametrize(
    "unit_bytes, workers, kind",
    [
        (1, 1, "bytes"),
        (700, 1, "bytes"),
        (5000, 1, "bytes"),
        pytest.param(3000, 2, "huggingface", marks=pytest.mark.quick),
        pytest.param(3000, 3, "huggingface", marks=pytest.mark.thorough),
        pytest.param(3000, 3, "sentencepiece", marks=pytest.mark.thorough),
    ],
)
def test_units_and_processes_change_no_byte(
    inputs, tmp_path, monkeypatch, specs, unit_bytes, workers, kind
):
    tokenizer = open_tokenizer(specs[kind])
    expected = prepare(inputs, tmp_path / "one", tokenizer, workers=1)
    monkeypatch.setattr(units, "UNIT_BYTES", unit_bytes)
    found = prepare(inputs, tmp_path / "other", tokenizer, workers=workers)
    assert content(tmp_path / "one") == content(tmp_path / "other")
    assert str(found).splitlines()[:-1] == str(expected).splitlines()[:-1]


@pytest.mark.thorough
def test_chats_are_the_same_bytes_by_processes(tmp_path, monkeypatch):
    source = tables.compress(tmp_path / "in.jsonl", tables.as_lines(chats(90)))
    for name, workers in ("one", 1), ("two", 2):
        encoder = ChatEncoder(
            open_template("vicuna", ByteTokenizer()), context_tokens=250
        )
        prepare_chats([source], tmp_path / name, encoder, workers=workers)
        monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    assert content(tmp_path / "one") == content(tmp_path / "two")


BAD = [("rows.jsonl", ":91", ":101"), ("rows.feather", "[90]", "[100]")]
BAD += [("rows.parquet", "[90]", "[100]")]


@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("name, first, second", BAD)
def test_bad_rows_are_named_in_whichever_unit(
    tmp_path, monkeypatch, name, first, second, workers
):
    """And the first one of the files ends a preparation, not what is found first."""
    (tmp_path / "in").mkdir()
    make_inputs(tmp_path / "in", {name: {90: None, 100: None}})
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    source, reported, options = tmp_path / "in" / name, [], {"workers": workers}
    match = re.escape(f"{source}{first}: field 'text' is NoneType, no text")
    with pytest.raises(ValueError, match=match):
        prepare([source], tmp_path / "out", ByteTokenizer(), **options)
    options["on_bad_row"] = reported.append
    found = prepare([source], tmp_path / "out", ByteTokenizer(), **options)
    assert [row.where for row in reported] == [f"{source}{w}" for w in (first, second)]
    assert found.skipped.counts == {"field 'text' is NoneType, no text": 2}
    assert found.rows == len(TEXTS) - 2


def test_finished_parts_are_taken_and_others_are_not(inputs, tmp_path, monkeypatch):
    expected = prepare(inputs, tmp_path / "one", ByteTokenizer())
    monkeypatch.setattr(units, "UNIT_BYTES", 3000)
    encoded = []

    def counting(tokenizer, texts):
        encoded.append(len(texts))
        if len(encoded) == 6:
            raise KeyboardInterrupt
        return encode_all(tokenizer, texts)

    encode_all = ByteTokenizer.encode_all
    monkeypatch.setattr(ByteTokenizer, "encode_all", counting)
    output, folder = tmp_path / "new", [*tmp_path.iterdir()]
    with pytest.raises(KeyboardInterrupt):
        prepare(inputs, output, ByteTokenizer(), workers=1)
    (left,) = {*tmp_path.iterdir()} - {*folder}
    assert left.name.startswith(".new.") and len([*left.glob("*.part")]) == 5
    assert left.stat().st_mode & 0o777 == 0o700
    # One is cut short, and one was not finished.
    names = sorted(left.glob("*.arrays"))
    os.truncate(names[0], 10)
    (left / "unfinished.1.new").write_text("x")
    taken = sum(encoded)
    found = prepare(inputs, output, ByteTokenizer(), workers=1)
    part = names[0].with_suffix(".part")
    assert f"made again: 1, damaged part of a preparation; first {part}" in str(found)
    assert content(output) == content(tmp_path / "one")
    assert taken < sum(encoded) < taken + expected.rows
    assert {*tmp_path.iterdir()} - {*folder} == {output}
    # Nothing is left where no part is finished.
    with pytest.raises(ValueError, match="no field 'n2'"):
        prepare(inputs[:1], tmp_path / "x", ByteTokenizer(), text_field="n2", workers=1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.fixture
def left(inputs, tmp_path, monkeypatch):
    """The folder of all parts of a corpus, whose preparation then was killed."""
    prepare(inputs, tmp_path / "one", ByteTokenizer())
    monkeypatch.setattr(units, "UNIT_BYTES", 3000)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(TokenFileWriter, "__enter__", mock.Mock(side_effect=stop))
        killed.setattr(parts.shutil, "rmtree", lambda folder: None)
        prepare(inputs, tmp_path / "new", ByteTokenizer(), workers=1)
    (folder,) = tmp_path.glob(".new.*.parts")
    return folder


def stop(*_):
    raise KeyboardInterrupt


class Planted:
    """What a pickle runs that holds it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("ending", ["arrays", "part"])
def test_a_flipped_bit_makes_its_part_again(inputs, tmp_path, left, ending, rng):
    """Wherever it is: in the digest, the figures, the marks, a header or an array."""
    damaged = sorted(left.glob(f"*.{ending}"))
    assert len(damaged) > 8
    for path in damaged:
        flipped = bytearray(path.read_bytes())
        flipped[rng.integers(len(flipped))] ^= 1 << rng.integers(8)
        path.write_bytes(flipped)
    found = prepare(inputs, tmp_path / "new", ByteTokenizer(), workers=1)
    assert content(tmp_path / "new") == content(tmp_path / "one")
    assert found.remade.total() == len(damaged)


def test_a_planted_pickle_never_runs(inputs, tmp_path, left):
    for path in left.iterdir():
        path.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    prepare(inputs, tmp_path / "new", ByteTokenizer(), workers=1)
    assert content(tmp_path / "new") == content(tmp_path / "one")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0])
def test_a_folder_that_others_own_or_may_write_is_refused(
    inputs, tmp_path, left, monkeypatch, mode
):
    """mode 0: it is another user's."""
    left.chmod(mode or 0o700)
    if not mode:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    wanted = "must be a folder of this user in which no other may write"
    with pytest.raises(ValueError, match=f"^{re.escape(str(left))} {wanted}, got .*"):
        prepare(inputs, tmp_path / "new", ByteTokenizer(), workers=1)
    assert left.exists() and not (tmp_path / "new").exists()
    # Nor is a link followed.
    monkeypatch.undo()
    left.chmod(0o700)
    moved = left.rename(tmp_path / "elsewhere")
    left.symlink_to(moved)
    with pytest.raises(ValueError, match=f"{wanted}, got owner .* mode l"):
        prepare(inputs, tmp_path / "new", ByteTokenizer(), workers=1)
    left.unlink()
    left.touch(0o600)
    with pytest.raises(ValueError, match=f"{wanted}, got owner .* mode -rw----"):
        prepare(inputs, tmp_path / "new", ByteTokenizer(), workers=1)


def test_a_part_that_cannot_be_written_is_named(tmp_path):
    """As on a full disk, with the cause."""
    (tmp_path / "in.txt").write_text("x" * (1 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    match = rf"\] File too large: '{tmp_path}/\.new\..*\.parts/.*\.arrays'"
    try:
        with pytest.raises(OSError, match=match):
            prepare([tmp_path / "in.txt"], tmp_path / "new", ByteTokenizer(), workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


KILLED = """
import os
import time
from pathlib import Path
from data.text.reading import units
from data.text.corpus import prepare
from data.text.tokens.tokenizer import ByteTokenizer

class Slow(ByteTokenizer):
    def encode_all(self, texts, **options):
        Path(__file__).with_name(f"{os.getpid()}.pid").touch()
        time.sleep(0.3)
        return super().encode_all(texts, **options)

def main(output, ray, *inputs):
    units.UNIT_BYTES = 1000
    prepare([*map(Path, inputs)], Path(output), Slow(), workers=ray or 2)
"""


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a preparation by two slow processes; of a Ray cluster, if one is named."""
    (tmp_path / "killed.py").write_text(KILLED)
    root = Path(corpus.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{tmp_path}")
    program = "import sys, killed; killed.main(*sys.argv[1:])"

    def starts(inputs, name, ray=""):
        command = [sys.executable, "-c", program, str(tmp_path / name), ray]
        command += map(str, inputs)
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    return starts


def finished(tmp_path):
    return [*tmp_path.glob(".new.*.parts/*.part")]


def at_work(tmp_path):
    """Processes that have begun with a part."""
    return [int(path.stem) for path in tmp_path.glob("*.pid")]


@pytest.mark.thorough
@pytest.mark.parametrize("killed", ["parent", "worker"])
def test_a_killed_preparation_goes_on(inputs, tmp_path, start, killed):
    prepare(inputs, tmp_path / "one", ByteTokenizer())
    first = start(inputs, "new")
    wait_for(lambda: len(finished(tmp_path)) >= 3)
    wait_for(lambda: len(at_work(tmp_path)) == 2)
    workers = at_work(tmp_path)
    os.kill(first.pid if killed == "parent" else workers[0], signal.SIGKILL)
    error = first.communicate()[1]
    assert ("a process of the preparation was killed" in error) == (killed == "worker")
    # Nobody goes on working.
    wait_for(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers))
    assert len(finished(tmp_path)) >= 3
    again = start(inputs, "new")
    assert "" == again.communicate()[1] and again.returncode == 0
    assert content(tmp_path / "new") == content(tmp_path / "one")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray then calls exec
def test_a_ray_cluster_loses_a_worker_and_a_node(inputs, tmp_path, start):
    from ray.cluster_utils import Cluster

    prepare(inputs, tmp_path / "one", ByteTokenizer())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        lost = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        run = start(inputs, "new", cluster.address)
        wait_for(lambda: len(finished(tmp_path)) >= 2 and len(at_work(tmp_path)) == 2)
        os.kill(at_work(tmp_path)[0], signal.SIGKILL)
        wait_for(lambda: len(finished(tmp_path)) >= 4 and len(at_work(tmp_path)) >= 3)
        cluster.remove_node(lost, allow_graceful=False)
        assert run.poll() is None
        assert run.communicate()[1] == "" and run.returncode == 0
    finally:
        cluster.shutdown()
    assert content(tmp_path / "new") == content(tmp_path / "one")


@pytest.mark.thorough
def test_where_no_ray_cluster_runs_it_is_said(inputs, tmp_path, start, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    error = start(inputs, "none", "auto").communicate()[1]
    assert "OSError: the Ray cluster auto cannot go on (Could not find" in error
