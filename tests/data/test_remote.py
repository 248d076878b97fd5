"""Corpora and inputs in a bucket: an object store that speaks S3, on this machine."""

import numpy as np
import pytest

from data import remote
from data.batch import Block
from data.remote import as_path
from data.rows import InOrder, PackedRows, TextBatches
from data.text.corpus import prepare
from data.text.tokens import token_file
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile, TokenFileWriter
from data.text.tokens.tokenizer import ByteTokenizer
from kernels.layouts import Contiguous, Zigzag
from tests.data.test_parts import NAMES, content, make_inputs
from tests.data.test_tokenizer import make_hugging_face
from tests.support.stores import Store

pytestmark = pytest.mark.thorough
TOKENS = 1 << 20
"""Of a row."""


@pytest.fixture
def store(monkeypatch, request):
    import s3fs

    found = Store()
    request.addfinalizer(found.stop)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": found.address,
    }.items():
        monkeypatch.setenv(name, value)
    remote._fetch.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    return found


@pytest.fixture
def long_rows(tmp_path, monkeypatch, store):
    """A corpus in a bucket of six rows, and the same on a disk."""
    tokens = np.random.default_rng(1).integers(0, 256, 6 * TOKENS + 1)
    monkeypatch.chdir(tmp_path)
    for where in "s3://bucket/long", tmp_path / "long":
        with TokenFileWriter(where, ByteTokenizer()) as writer:
            for document in np.array_split(tokens, 97):
                writer.write("train", document)
    return "s3://bucket/long", tmp_path / "long"


def test_inputs_and_corpora_are_the_same_in_a_bucket(tmp_path, monkeypatch, store):
    """And nothing is left beside the program."""
    (tmp_path / "here").mkdir()
    (tmp_path / "in").mkdir()
    make_inputs(tmp_path / "in")
    make_hugging_face(tmp_path / "tokenizer.json")
    bucket = as_path("s3://bucket/some")
    remote.upload(tmp_path / "in", bucket / "in")
    remote.upload(tmp_path / "here", bucket)  # nothing
    bucket.fs.put_file(
        str(tmp_path / "tokenizer.json"), f"{bucket.path}/tokenizer.json"
    )
    monkeypatch.chdir(tmp_path / "here")
    store.fails_every = 10
    for root, out in (tmp_path, tmp_path / "out"), (bucket, bucket / "out"):
        inputs = [*(root / "in" / name for name in NAMES), root / "in" / "t"]
        tokenizer = open_tokenizer(str(root))
        prepare(inputs, out, tokenizer, workers=1)
    assert store.failed > 3 and not [*(tmp_path / "here").iterdir()]
    expected, found = content(tmp_path / "out"), content(bucket / "out")
    assert expected.keys() == found.keys()
    unlike = {name for name in expected if expected[name] != found[name]}
    assert unlike == {"sources.jsonl", "meta.json"}  # which have the paths
    digests = {
        token_file.identify(out)[0] for out in (bucket / "out", tmp_path / "out")
    }
    assert len(digests) == 1
    with pytest.raises(FileExistsError, match="^s3://bucket/some/out already exists"):
        prepare(inputs, bucket / "out", tokenizer, workers=1)


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
def test_each_host_fetches_what_it_holds(store, long_rows, layout):
    """Of rows of 1 Mi tokens, for two of four devices, of a server that fails."""
    there, here = (TokenFile.open(where, "train") for where in long_rows)
    blocks = [
        Block((0, 1), (at, at + TOKENS // 4)) for at in range(0, TOKENS, TOKENS // 4)
    ]
    store.sent.clear()
    store.fails_every = 10
    for host in range(2):
        held = blocks[2 * host :][:2]
        remote._fetch.cache_clear()  # each host has its own
        found, expected = (
            TextBatches(PackedRows(corpus, TOKENS), held, 1, layout, 4, InOrder())
            for corpus in (there, here)
        )
        assert len(found) == 6
        for step in range(6):
            for block, batch in expected[step].items():
                for one, two in zip(batch, found[step][block], strict=True):
                    np.testing.assert_array_equal(one, two)
    used = 6 * TOKENS * there.tokens.dtype.itemsize
    assert used < store.sent.total() < 1.1 * used and store.failed >= 2


def test_a_store_that_goes_away_is_named(store, long_rows, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    corpus = TokenFile.open(long_rows[0], "train")
    assert (
        corpus.tokens[:5].tolist()
        == TokenFile.open(long_rows[1], "train").tokens[:5].tolist()
    )
    store.stop()
    lost = "cannot be reached, after several tries .*see to the connection"
    with pytest.raises(OSError, match=f"^s3://bucket/long/train.tokens.bin {lost}"):
        corpus.tokens[TOKENS : TOKENS + 5]
    with pytest.raises(OSError, match=f"^s3://bucket/other {lost}"):
        TokenFile.open("s3://bucket/other", "train")


def test_an_object_that_is_replaced_is_not_read_as_the_other(store, long_rows):
    """Neither between its ranges, nor after its digest was compared."""
    import s3fs

    path = as_path(long_rows[0]) / "train.tokens.bin"
    assert path in [*path.parent.iterdir()]  # which the client keeps
    corpus = TokenFile.open(long_rows[0], "train")
    first = corpus.tokens[:5]
    token_file.identify(as_path(long_rows[0]))
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    other.pipe_file(path.path, other.cat_file(path.path)[::-1])
    np.testing.assert_array_equal(corpus.tokens[:5], first)  # of what is kept
    changed = f"^{path} was changed or replaced while it was used"
    with pytest.raises(OSError, match=changed):
        corpus.tokens[-5:]
    with pytest.raises(OSError, match=changed):
        TokenFile.open(long_rows[0], "train").tokens[7:12]


@pytest.mark.parametrize(
    "odd, says",
    [
        ("missing", r"\(.*(not exist|Not Found).*\)"),
        ("whole", r"\(of \d+ bytes it sends"),
    ],
)
def test_odd_answers_are_tried_again_and_named(
    store, long_rows, odd, says, monkeypatch
):
    waited = []
    monkeypatch.setattr(remote.time, "sleep", waited.append)
    there, here = (TokenFile.open(where, "train") for where in long_rows)
    store.odd = [odd] * 2
    np.testing.assert_array_equal(there.tokens[:99], here.tokens[:99])
    assert waited == [*remote.WAITS]
    store.odd = [odd] * 3
    with pytest.raises(OSError, match=f"^s3://bucket/long/train.tokens.bin .*{says}"):
        there.tokens[TOKENS : TOKENS + 99]
    assert waited == 2 * [*remote.WAITS] and not store.odd
