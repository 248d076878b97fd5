"""Cross-entropy in chunks against all logits in float64, on one device and a mesh."""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.losses import Parts, cross_entropy
from tests.small_llama import partition_of
from training.mesh import MeshShape, Partition

ROWS, LENGTH, EMBED, VOCAB = 4, 18, 32, 46

ONE_DEVICE, EVERY_AXIS = MeshShape(), MeshShape(fsdp=2, ring=2, tensor=2)
each_mesh = pytest.mark.parametrize("mesh", [ONE_DEVICE, EVERY_AXIS], ids=str)


class Problem(NamedTuple):
    """What the loss is of."""

    hidden: jax.Array
    head: jax.Array
    targets: jax.Array
    weights: jax.Array


class Answer(NamedTuple):
    """The summed loss and its gradients."""

    loss: np.ndarray
    d_hidden: np.ndarray
    d_head: np.ndarray


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


product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)


@functools.cache
def compiled_loss(mesh: MeshShape, chunk: int):
    """Problem -> Answer."""
    loss = functools.partial(
        cross_entropy, logits=product, chunk=chunk, partition=partition_of(mesh)
    )
    value_and_grad = jax.value_and_grad(loss, (0, 1))

    @jax.jit
    def run(problem: Problem) -> Answer:
        value, grads = value_and_grad(*problem)
        return Answer(value, *grads)

    return run


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


def relative_error(got: jax.Array, want: np.ndarray) -> float:
    difference = np.asarray(got, np.float64) - want
    return np.linalg.norm(difference) / np.linalg.norm(want)


def assert_answers(got: Answer, want: Answer, tolerance: float) -> None:
    errors = [relative_error(*pair) for pair in zip(got, want, strict=True)]
    assert max(errors) < tolerance, errors


@pytest.mark.thorough(quick=3)
@each_mesh
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_give_the_loss_and_gradients_of_all_logits(mesh, chunk, rng):
    problem = random_problem(rng)
    answer = compiled_loss(mesh, chunk)(problem)
    assert answer.loss.shape == () and answer.loss.dtype == jnp.float32
    assert_answers(answer, oracle(problem), 1e-6)


@each_mesh
def test_logits_of_ten_thousand_neither_overflow_nor_lose_the_loss(mesh, rng):
    problem = random_problem(rng, scale=1e4)
    answer = compiled_loss(mesh, 7)(problem)
    assert answer.loss > 1e4
    assert relative_error(answer.loss, oracle(problem).loss) < 1e-6
    assert all(np.isfinite(x).all() for x in answer)


@each_mesh
def test_tokens_of_weight_zero_count_for_nothing(mesh, rng):
    problem, other = random_problem(rng), random_problem(rng, scale=1e3)
    zero = problem.weights == 0
    replaced = problem._replace(
        hidden=jnp.where(zero[..., None], other.hidden, problem.hidden),
        targets=jnp.where(zero, other.targets, problem.targets),
    )
    run = compiled_loss(mesh, 7)
    answer = run(problem)
    assert_answers(run(replaced), answer, 1e-6)
    assert zero.any() and not np.asarray(answer.d_hidden)[np.asarray(zero)].any()


@each_mesh
def test_weights_that_are_all_zero_give_a_loss_and_gradients_of_zero(mesh, rng):
    problem = random_problem(rng, scale=1e4)
    problem = problem._replace(weights=jnp.zeros_like(problem.weights))
    for x in compiled_loss(mesh, 7)(problem):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("chunks", [1, 8, 64])
def test_heads_gradient_in_bfloat16_is_as_exact_in_many_chunks_as_in_one(chunks, rng):
    """Its sum over the chunks is in float32: in bfloat16 it would lose the last ones.

    Against a head that is rounded as the loss rounds it.
    """
    tokens, vocab = 2048, 64
    problem = Problem(
        jnp.asarray(rng.standard_normal((1, tokens, EMBED)), jnp.bfloat16),
        jnp.asarray(0.3 * rng.standard_normal((EMBED, vocab)), jnp.float32),
        jnp.asarray(rng.integers(0, vocab, (1, tokens)), jnp.int32),
        jnp.ones((1, tokens), jnp.float32),
    )
    answer = compiled_loss(ONE_DEVICE, tokens // chunks)(problem)
    assert answer.d_head.dtype == jnp.float32
    rounded = problem.head.astype(jnp.bfloat16)
    assert_answers(answer, oracle(problem._replace(head=rounded)), 4e-3)
    assert relative_error(answer.d_head, oracle(problem).d_head) < 4e-3


def array_sizes(program: str) -> list[int]:
    """Elements of every array that a compiled program mentions."""
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", program)
    return [math.prod(map(int, shape.split(","))) for shape in shapes]


def lowered_gradient(partition: Partition, chunk: int, sizes: tuple[int, ...]):
    """The gradient's program, with everything placed as in training."""
    rows, length, embed, vocab = sizes

    def array(names, shape, dtype):
        sharding = partition.sharding(names, shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    token, shape = ("batch", "sequence"), (rows, length)
    problem = Problem(
        array((*token, None), (*shape, embed), jnp.float32),
        array(("embed", "vocab"), (embed, vocab), jnp.float32),
        array(token, shape, jnp.int32),
        array(token, shape, jnp.float32),
    )
    loss = functools.partial(
        cross_entropy, logits=product, chunk=chunk, partition=partition
    )
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*problem)


def test_logits_of_all_tokens_never_exist():
    tokens, vocab = 4096, 2048
    sizes = 1, tokens, 16, vocab
    compiled = lowered_gradient(partition_of(ONE_DEVICE), 64, sizes).compile()
    largest = max(array_sizes(compiled.as_text()))
    assert 64 * vocab <= largest < tokens * vocab / 16
    temporary = compiled.memory_analysis().temp_size_in_bytes
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


def test_every_device_gathers_the_head_once_and_scatters_its_gradient_once():
    """Over ring and fsdp one after the other, of 2 devices each."""
    sizes = (4, 64, 16, 48)
    partition = partition_of(EVERY_AXIS)
    program = lowered_gradient(partition, 8, sizes).compile().as_text()
    assert len(collectives(program, "while")) == 2  # loops over chunks, there and back
    head = 16 * 48 // 2  # its vocabulary stays sharded
    gathered = [("ENTRY", head // 2), ("ENTRY", head)]
    assert collectives(program, "all-gather") == gathered
    scattered = [("ENTRY", head // 2), ("ENTRY", head // 4)]
    assert collectives(program, "reduce-scatter") == scattered
    for kind in ("all-to-all", "collective-permute"):
        assert collectives(program, kind) == []
    # In the loops: the chunk's maxima and sums only.
    inside = [n for where, n in collectives(program, "all-reduce") if where != "ENTRY"]
    assert inside and max(inside) == 8


def test_gradient_is_scattered_before_it_is_summed_over_data():
    partition = partition_of(MeshShape(data=2, fsdp=2, ring=2))
    program = lowered_gradient(partition, 8, (4, 8, 16, 48)).compile().as_text()
    summed = [n for where, n in collectives(program, "all-reduce") if where == "ENTRY"]
    assert max(summed) == 16 * 48 // 4


def test_a_context_has_the_parts_that_it_reaches() -> None:
    names = ["from_0", "from_256", "from_1024", "from_4096"]
    for tokens, count in ((256, 1), (257, 2), (9000, 4)):
        assert Parts.by_position(tokens).names == tuple(names[:count])
    assert Parts.by_position(17, first=4).names == ("from_0", "from_4", "from_16")


def test_sums_are_those_of_the_tokens_between_bounds(rng: np.random.Generator) -> None:
    positions = rng.integers(0, 30, (3, 40)).astype(np.int32)
    positions[0, :4] = 9, 10, 19, 20
    values = rng.standard_normal(positions.shape).astype(np.float32)
    parts = Parts((10, 20), ("first", "second", "third"))
    sums = parts.sums(jnp.asarray(values), jnp.asarray(positions))
    wanted = [
        values[(positions >= low) & (positions < high)].sum()
        for low, high in ((0, 10), (10, 20), (20, 30))
    ]
    np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-5)
