"""Cross-entropy in chunks against all logits in float64, on one device and a mesh."""

import functools
import math
import re
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import Parts, cross_entropy
from tests.small.models import assert_same, partition_of
from training.sharding.mesh import MeshShape

ROWS, LENGTH, EMBED, VOCAB = 4, 18, 32, 46

ONE_DEVICE, EVERY_AXIS = MeshShape(), MeshShape(fsdp=2, ring=2, tensor=2)
each_mesh = pytest.mark.parametrize("mesh", [ONE_DEVICE, EVERY_AXIS], ids=str)


Problem = namedtuple("Problem", "hidden head targets weights")
Answer = namedtuple("Answer", "loss d_hidden d_head")


def random_problem(rng: np.random.Generator, scale: float = 1.0) -> Problem:
    """Hidden states that give logits of about `scale`; every third weight is 0."""
    shape = ROWS, LENGTH
    weights = rng.uniform(0.1, 2, shape) * (rng.integers(0, 3, shape) > 0)
    head = scale * EMBED**-0.5 * rng.standard_normal((EMBED, VOCAB))
    return Problem(
        jnp.asarray(rng.standard_normal((*shape, EMBED)), jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


@functools.cache
def program(mesh: MeshShape, chunk: int) -> jax.stages.Wrapped:
    """From the fields of a problem to loss and gradients."""
    product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    options = {"logits": product, "chunk": chunk, "partition": partition_of(mesh)}
    loss = functools.partial(cross_entropy, **options)
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def answer_of(problem: Problem, mesh: MeshShape, chunk: int) -> Answer:
    value, gradients = program(mesh, chunk)(*problem)
    return Answer(value, *gradients)


def oracle(problem: Problem) -> Answer:
    """All logits at once in float64, with the gradients written out."""
    hidden, head, weights = (
        np.asarray(x, np.float64)
        for x in (problem.hidden, problem.head, problem.weights)
    )
    logits = hidden @ head  # (B, T, V)
    logits -= logits.max(axis=-1, keepdims=True)
    sums = np.exp(logits).sum(axis=-1, keepdims=True)
    hit = np.asarray(problem.targets)[..., None] == np.arange(head.shape[1])
    losses = np.log(sums)[..., 0] - (logits * hit).sum(axis=-1)
    d_logits = weights[..., None] * (np.exp(logits) / sums - hit)
    d_head = np.einsum("bte,btv->ev", hidden, d_logits)
    return Answer((weights * losses).sum(), d_logits @ head.T, d_head)


def assert_answers(got: Answer, want: Answer, tolerance: float) -> None:
    assert_same(jax.tree.map(np.float64, got), want, tolerance)


@pytest.mark.thorough(quick=3)
@each_mesh
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_give_the_loss_and_gradients_of_all_logits(mesh, chunk, rng):
    problem = random_problem(rng)
    answer = answer_of(problem, mesh, chunk)
    assert answer.loss.shape == () and answer.loss.dtype == jnp.float32
    assert_answers(answer, oracle(problem), 1e-6)


@each_mesh
def test_logits_of_ten_thousand_neither_overflow_nor_lose_the_loss(mesh, rng):
    problem = random_problem(rng, scale=1e4)
    answer = answer_of(problem, mesh, 7)
    assert answer.loss > 1e4
    assert answer.loss == pytest.approx(oracle(problem).loss, rel=1e-6)
    assert all(np.isfinite(x).all() for x in answer)
    problem = problem._replace(weights=jnp.zeros_like(problem.weights))
    for x in answer_of(problem, mesh, 7):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("chunks", [1, 64])
def test_heads_gradient_in_bfloat16_is_as_exact_in_many_chunks_as_in_one(chunks, rng):
    """Its sum over chunks is in float32: in bfloat16 it would lose the last ones."""
    tokens, vocab = 2048, 64
    problem = Problem(
        jnp.asarray(rng.standard_normal((1, tokens, EMBED)), jnp.bfloat16),
        jnp.asarray(0.3 * rng.standard_normal((EMBED, vocab)), jnp.float32),
        jnp.asarray(rng.integers(0, vocab, (1, tokens)), jnp.int32),
        jnp.ones((1, tokens), jnp.float32),
    )
    answer = answer_of(problem, ONE_DEVICE, tokens // chunks)
    assert answer.d_head.dtype == jnp.float32
    # As the loss rounds it.
    rounded = problem.head.astype(jnp.bfloat16)
    assert_answers(answer, oracle(problem._replace(head=rounded)), 4e-3)


def array_sizes(program: str) -> list[int]:
    """Elements of every array that a compiled program mentions."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def compiled(mesh: MeshShape, chunk: int, *sizes: int) -> jax.stages.Compiled:
    """The gradient's program, with everything placed as in training.

    sizes: rows, tokens of a row, hidden size and vocabulary.
    """
    rows, length, embed, vocab = sizes
    partition = partition_of(mesh)

    def array(names, shape, dtype=jnp.float32):
        sharding = partition.sharding(names, shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    token, shape = ("batch", "sequence"), (rows, length)
    hidden = array((*token, None), (*shape, embed))
    head = array(("embed", "vocab"), (embed, vocab))
    problem = hidden, head, array(token, shape, jnp.int32), array(token, shape)
    return program(mesh, chunk).lower(*problem).compile()


def test_logits_of_all_tokens_never_exist():
    tokens, vocab = 4096, 2048
    program = compiled(ONE_DEVICE, 64, 1, tokens, 16, vocab)
    largest = max(array_sizes(program.as_text()))
    assert 64 * vocab <= largest < tokens * vocab / 16
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < 4 * tokens * vocab / 16


def collectives(program: str, kind: str) -> list[tuple[str, int]]:
    """(computation, elements of the result) of every such operation."""
    found, computation = [], ""
    for line in program.splitlines():
        if line and not line[0].isspace():
            computation = line.split()[0]
        operation = re.search(rf"= (.*?) {kind}(?:-start)?\(", line)
        if operation:
            found.append((computation, sum(array_sizes(operation[1]))))
    return found


def test_only_maxima_and_sums_of_chunks_are_sent_within_the_loops():
    program = compiled(EVERY_AXIS, 8, 4, 64, 16, 48).as_text()
    assert len(collectives(program, "while")) == 2  # loops over chunks, there and back
    for kind in ("all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        assert {where for where, _ in collectives(program, kind)} <= {"ENTRY"}
    inside = [n for where, n in collectives(program, "all-reduce") if where != "ENTRY"]
    assert inside and max(inside) == 8
    # The gradient is scattered before it is summed over data.
    program = compiled(MeshShape(data=2, fsdp=2, ring=2), 8, 4, 8, 16, 48).as_text()
    summed = [n for where, n in collectives(program, "all-reduce") if where == "ENTRY"]
    assert max(summed) == 16 * 48 // 4


def test_a_context_has_the_parts_that_it_reaches():
    names = "from_0", "from_256", "from_1024", "from_4096"
    for tokens, count in ((256, 1), (257, 2), (9000, 4)):
        assert Parts.by_position(tokens).names == names[:count]
    assert Parts.by_position(17, first=4).names == ("from_0", "from_4", "from_16")
    assert Parts.by_rank(3).names == ("rank_1", "rank_2", "rank_3")


@pytest.mark.parametrize("parts", [Parts.by_position(30, first=5), Parts.by_rank(9)])
def test_sums_are_those_of_the_tokens_between_bounds(parts, rng):
    places = rng.integers(0, 30, (3, 40)).astype(np.int32)
    places[0, :4] = 4, 5, 19, 20
    values = rng.standard_normal(places.shape).astype(np.float32)
    bounds = (0, *parts.bounds, 30)
    wanted = [
        values[(places >= low) & (places < high)].sum()
        for low, high in zip(bounds, bounds[1:], strict=False)
    ]
    got = parts.sums(jnp.asarray(values), jnp.asarray(places))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
