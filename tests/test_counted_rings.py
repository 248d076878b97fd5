"""When a run's rings end where the documents of its batches do."""

from pathlib import Path

import numpy as np
import pytest

from data.text.token_file import TokenFileWriter
from data.text.tokenizer import ByteTokenizer
from tasks import corpora
from tasks.layout_advice import layout_line
from tasks.text import TextRun
from tests.cases import table
from tests.runs import small_config
from tests.small_llama import partition_of
from training.mesh import MeshShape


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora by the length of their longest document, 20 or 300 tokens."""
    found = tmp_path_factory.mktemp("corpora")
    for longest in (20, 300):
        with TokenFileWriter(found / str(longest), ByteTokenizer()) as writer:
            for length in (5, longest, 7):
                for split in ("train", "validation"):
                    writer.write(split, np.full(length, 65))
    return found


def test_the_longest_document_of_all_corpora_is_known(directory):
    config = small_config(directory / "20", "")
    assert corpora.longest_document(config) == 20
    config.data.corpus = f"{directory / '20'}:0.5,{directory / '300'}:0.5"
    assert corpora.longest_document(config) == 300
    for unknown in ("", str(directory / "missing")):
        config.data.corpus = unknown
        assert corpora.longest_document(config) is None


# Shards of 40 tokens: of 20, one hop in contiguous order, and one in zigzag's halves.
@pytest.mark.parametrize(
    "fields, mesh, is_counted",
    [
        ({"attention": "ring"}, MeshShape(ring=8), True),
        ({"attention": "zigzag"}, MeshShape(ring=8), True),
        ({"attention": "ring"}, MeshShape(ring=4, ulysses=2), True),
        ({"attention": "striped"}, MeshShape(ring=8), False),  # are on all devices
        ({"attention": "ring"}, MeshShape(fsdp=2, ring=4), True),
        ({"attention": "ring", "data__rows": "documents"}, MeshShape(ring=8), False),
        ({"attention": "zigzag"}, MeshShape(ring=2), False),  # sends more than it saves
        ({"attention": "vanilla"}, MeshShape(), False),
    ],
)
def test_rings_of_short_documents_are_counted(directory, fields, mesh, is_counted):
    fields = {"data__context_tokens": 320, **fields}
    for longest in (20, 300):
        config = small_config(directory / str(longest), "", **fields)
        wanted = is_counted and longest == 20
        assert TextRun(config, partition_of(mesh)).counts_steps() == wanted


@pytest.mark.parametrize("longest, fields, advised", table("runs.txt", "counted"))
def test_a_run_says_which_layout_suits_better(directory, longest, fields, advised):
    fields = {"data__context_tokens": 320, **fields}
    config = small_config(directory / str(longest), "", **fields)
    line = layout_line(TextRun(config, partition_of(MeshShape(ring=8))))
    assert line.startswith(f"layout: config.attention={advised} may") or not advised
    assert bool(line) == bool(advised)
    alone = small_config(directory / str(longest), "", **fields)
    assert layout_line(TextRun(alone, partition_of(MeshShape()))) == ""
