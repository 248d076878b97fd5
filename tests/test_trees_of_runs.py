"""Chats and groups as trees: the losses and gradients of the same as documents."""

import functools
import re
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

from data.chat.chat_template import ChatTemplate
from data.chat.corpus import ChatEncoder, prepare_chats
from data.rows import InOrder, TextBatches
from data.text.tokens import prefix_tree
from data.text.tokens.tokenizer import ByteTokenizer
from tasks import corpora
from tasks.layout_choice import typical_rows
from tests.cases import table
from tests.small.models import Run as Small
from tests.small.models import assert_same, config_of
from training.sharding.feed import global_batch, host_blocks
from training.sharding.mesh import MeshShape

CONTEXT = 160
DROPS_THOUGHTS = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content if loop.last or m.role == "
    "'user' else m.content.split(']')[-1] }}{{ eos_token if m.role == 'assistant' }}"
    "{% endfor %}{{ 'a' if add_generation_prompt }}"
)
"""As Qwen 3's template: earlier replies are without their thoughts."""
ROWS = Path(__file__).parent / "cases/trees.jsonl"
"""A group, a chat, a tree of messages, and a row that is held out, by its digest."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Corpora of the same rows, as trees and as documents; and what was said."""
    directory = tmp_path_factory.mktemp("trees")
    template, found = ChatTemplate("x", DROPS_THOUGHTS, ByteTokenizer()), {}
    for name, apart in ("trees", False), ("apart", True):
        encoder = ChatEncoder(template, context_tokens=CONTEXT, apart=apart)
        output = directory / name
        with mock.patch.object(prefix_tree, "LEAST_SHARED", 2):
            said = prepare_chats([ROWS], output, encoder, validation_fraction=0.01)
        found[name] = output, str(said)
    return found


@functools.cache
def loss_and_gradients(corpus, shape, attention, **fields):
    """Of all rows of the train split, and how many there are."""
    fields |= {"data__corpus": str(corpus), "model__vocab_size": 264}
    fields |= {"data__rows": "whole", "data__context_tokens": CONTEXT}
    config = Small(shape, attention, **fields).config
    plan, _ = corpora.rows(config, "train", 264)
    small = Small(shape, attention, **fields | {"data__batch_rows": plan.rows})
    run = small.resolved
    blocks, ring_size = host_blocks(run.sharding, run.shape), run.partition.ring_size
    order = run.layout, ring_size, InOrder(), run.shape[1]
    (read,) = [*TextBatches(plan, blocks, plan.rows, *order)]
    batch = global_batch(read, run.sharding, run.shape)
    assert jax.tree.map(np.shape, batch) == jax.tree.map(
        lambda like: like.shape, run.batch_like
    )
    step = jax.jit(jax.value_and_grad(small.loss))
    parameters = jax.tree.map(lambda x: x / 4, small.parameters)  # for less rounding
    found = jax.device_get(step(parameters, batch, small.frozen))
    return *found, batch


@pytest.mark.thorough
@pytest.mark.parametrize("mesh, attention, fields", table("runs.txt", "of-trees"))
def test_trees_have_the_losses_and_gradients_of_documents(
    prepared, mesh, attention, fields
):
    (trees, said), (apart, _) = prepared["trees"], prepared["apart"]
    assert re.search(r"train +3 documents", said)  # all but the last row
    want = loss_and_gradients(apart, MeshShape(), "vanilla", **fields)
    got = loss_and_gradients(trees, MeshShape(**mesh), attention, **fields)
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert_same(got[1], want[1], 1e-5)
    assert want[2].k_start.ndim == 2 and got[2].k_start.shape[2] == 3


@pytest.mark.parametrize("fields, said", table("runs.txt", "trees"))
def test_trees_that_would_be_cut_or_seen_through_windows_are_refused(
    prepared, fields, said
):
    given = {"data__rows": "whole", "data__context_tokens": CONTEXT} | fields
    config = config_of("striped", data__corpus=str(prepared["trees"][0]), **given)
    with pytest.raises(ValueError, match=said):
        corpora.rows(config, "train", 264)
    if "data__rows" not in fields:
        with pytest.raises(ValueError, match="documents 9[+]2x3: prepare_chat --apart"):
            typical_rows(config, ("9+2x3",))


def test_a_summary_says_what_trees_save(prepared):
    said, apart = (said for _, said in prepared.values())
    sizes = [int(found) for found in re.findall(r"(\d+) tokens ", apart)]
    found = re.search(r"trees: (\d+) tokens in place of (\d+); a token sees up t", said)
    assert int(found[2]) == sum(sizes) > 1.9 * int(found[1])
    assert "trees: " not in apart
