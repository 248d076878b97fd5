"""Optimizers: schedule and AdamW written out, updates of stacked layers, storage."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tasks import state
from tasks.state import abstract_state, state_shapes
from tasks.text import TextRun
from tests.small.families import FAMILIES
from tests.small.models import config_of, partition_of
from tests.small.runs import KINDS, assert_equal_bits
from training.saved.checkpoint import Checkpoints
from training.sharding.mesh import MeshShape
from training.step import initial_state, make_train_step
from training.update.optimizer import (
    OptimizerSettings,
    Storage,
    decayed,
    make_optimizer,
)

VOCAB, EMBED, HEADS, DEPTH, LAYERS = 32, 16, 4, 8, 3
AXES = {
    "embedding": ("vocab", "embed"),
    "layers": {
        "query": (None, "embed", "heads", None),
        "output": (None, "heads", None, "embed"),
        "norm": {"scale": (None, None)},
    },
}
SHAPES = {
    "embedding": jax.ShapeDtypeStruct((VOCAB, EMBED), jnp.float32),
    "layers": {
        "query": jax.ShapeDtypeStruct((LAYERS, EMBED, HEADS, DEPTH), jnp.float32),
        "output": jax.ShapeDtypeStruct((LAYERS, HEADS, DEPTH, EMBED), jnp.float32),
        "norm": {"scale": jax.ShapeDtypeStruct((LAYERS, EMBED), jnp.float32)},
    },
}
MODEL = SimpleNamespace(shapes=SHAPES, axes=AXES)
MATRICES = "query", "output"
RATE, STEPS = 4e-2, 60
ONE, CUBE = MeshShape(), MeshShape(fsdp=2, ring=2, tensor=2)

FAST = "adamw", "adafactor", "muon-float8", "all", "least"
"""Kinds that have parts of theirs; those of the others are slow tests."""
EVERY = pytest.mark.parametrize(
    "kind",
    [k if k in FAST else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)


def optimizer_of(kind: str, **fields: Any) -> Any:
    said = KINDS[kind]
    storage = Storage(**{n: said[n] for n in state.STORED if n in said}, seed=3)
    fields |= {"name": said.get("name", "adamw"), "storage": storage}
    settings = OptimizerSettings(RATE, RATE / 10, 0, STEPS, **fields)
    return make_optimizer(settings, SHAPES, AXES)[0]


def draw(rng: np.random.Generator, scale: float = 0.2) -> Any:
    return jax.tree.map(lambda x: np.float32(scale * rng.normal(size=x.shape)), SHAPES)


def loss_sum(params: Any, batch: Any) -> jax.Array:
    """A small language model without attention: a token's successor."""
    tokens, targets = batch
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)

    def layer(x, own):
        own = jax.device_put(own, jax.memory.Space.Device)  # as through_stack does
        y = x * own["norm"]["scale"]
        y = jnp.tanh(jnp.einsum("be,ehd->bhd", y, own["query"]))
        return x + jnp.einsum("bhd,hde->be", y, own["output"]), None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens], params["layers"])
    losses = -jax.nn.log_softmax(x @ params["embedding"].T)
    return jnp.take_along_axis(losses, targets[:, None], 1).sum()


def count(batch: Any) -> Any:
    size = jnp.float32(batch[0].size)
    return size, size, size


def batch_of(number: int) -> Any:
    """Tokens of a chain in which each has three successors."""
    rng = np.random.default_rng([5, number])
    tokens = rng.integers(0, VOCAB, 256)
    targets = (5 * tokens + rng.choice(3, 256, p=(0.8, 0.1, 0.1))) % VOCAB
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(targets, jnp.int32)


@functools.cache
def programs(kind: str, shape: MeshShape = ONE) -> Any:
    """The optimizer, the state as shapes, and a step that donates it."""
    optimizer = optimizer_of(kind)
    shapes = state_shapes(MODEL, optimizer)
    like = abstract_state(shapes, MODEL.axes, optimizer, partition_of(shape))
    placing = state.sharding_of(like)
    step = make_train_step(loss_sum, optimizer, count=count)
    step = jax.jit(step, out_shardings=(placing, placing.step), donate_argnums=0)
    return optimizer, like, step


def first(kind: str) -> Any:
    optimizer, like, _ = programs(kind)
    params = draw(np.random.default_rng(11))
    params["layers"]["norm"]["scale"] = np.ones((LAYERS, EMBED), np.float32)
    params = jax.tree.map(jnp.asarray, params)
    return jax.device_put(initial_state(params, optimizer), state.sharding_of(like))


def run(kind: str, state: Any, steps: range) -> Any:
    """The state after these steps, and their losses."""
    losses = []
    for number in steps:
        state, metrics = programs(kind)[2](state, batch_of(number))
        losses.append(float(metrics["loss"]))
    return state, losses


@functools.cache
def last_losses(kind: str) -> tuple[float, float]:
    """The mean of ten after a run, and the first."""
    _, losses = run(kind, first(kind), range(STEPS))
    return np.mean(losses[-10:]), losses[0]


def in_shards(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.sharding.memory_kind, x.sharding.spec), tree)


@pytest.mark.thorough(quick=1)
@EVERY
def test_a_run_that_is_stopped_and_goes_on_ends_with_the_same_bits(kind, tmp_path):
    whole, _ = run(kind, first(kind), range(6))
    state, _ = run(kind, first(kind), range(3))
    _, like, _ = programs(kind)
    with Checkpoints(tmp_path, keep=1, fingerprint={}) as saved:
        saved.save(3, state)
        restored, _ = saved.restore(like)
        other = "muon" if kind == "adamw" else "adamw"
        with pytest.raises(
            ValueError, match="does not fit the train state; .* optimiz"
        ):
            saved.restore(programs(other)[1])
    assert in_shards(restored) == in_shards(like)
    resumed, _ = run(kind, restored, range(3, 6))
    assert_equal_bits(resumed, whole)


@pytest.mark.thorough(quick=1)
@EVERY
def test_losses_reach_those_of_adamw(kind):
    """Of the last ten steps, to 5 %, at one rate; the chain's entropy is 0.64 nats."""
    (last, begin), (wanted, _) = last_losses(kind), last_losses("adamw")
    assert last < 1.05 * wanted < 0.25 * begin


@pytest.mark.thorough(quick=1)
@EVERY
def test_a_bad_step_changes_nothing(kind):
    optimizer, _, _ = programs(kind)
    state, _ = run(kind, first(kind), range(2))
    grads = jax.tree.map(
        lambda x: jax.device_put(jnp.full(x.shape, jnp.nan, x.dtype), x.sharding),
        state.params,
    )
    update = jax.jit(optimizer.update)
    new = update(grads, state.optimizer_state, state.params, jnp.bool(False))
    assert_equal_bits(new, (state.params, state.optimizer_state))


def assert_close(got: Any, want: Any) -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, got, want)


@functools.cache
def first_update(kind: str, **fields: Any) -> Any:
    optimizer = optimizer_of(kind, weight_decay=0.0, **fields)
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])


def moved(kind: str, grads: Any, params: Any, **fields: Any) -> Any:
    """The change of a first update, without decay."""
    new = first_update(kind, **fields)(grads, params)
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), new, params)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_each_layer_is_updated_as_if_it_were_alone(kind, rng):
    params, grads = draw(rng), draw(rng)
    whole = moved(kind, grads, params, clip_norm=np.inf)["layers"]
    for n in range(LAYERS):

        def of(tree, n=n):
            return tree | {
                "layers": jax.tree.map(lambda x: x[n : n + 1], tree["layers"])
            }

        one = moved(kind, of(grads), of(params), clip_norm=np.inf)["layers"]
        assert_close(of({"layers": whole})["layers"], one)


def test_updates_of_muon_are_orthogonal_in_each_layer(rng):
    params, grads = jax.tree.map(np.zeros_like, draw(rng)), draw(rng)
    change = moved("muon", grads, params)
    for name, inputs in ("query", EMBED), ("output", HEADS * DEPTH):
        matrices = change["layers"][name].reshape(LAYERS, inputs, -1)
        size = RATE * 0.2 * np.sqrt(max(matrices.shape[1:]))
        singular = np.linalg.svd(matrices / size, compute_uv=False)
        # Five iterations leave them around 1.
        assert 0.4 < singular.min() and singular.max() < 1.3, name
    adam = moved("adamw", grads, params)
    assert_close(change["embedding"], adam["embedding"])


def test_updates_of_float32_layers_are_those_of_all_at_once(rng):
    params, grads = draw(rng), draw(rng, 30.0)
    one, all_at_once = (moved(kind, grads, params) for kind in ("adamw-host", "adamw"))
    assert_close(one, all_at_once)


MATRIX_PARAMETERS = VOCAB * EMBED + 2 * LAYERS * EMBED * HEADS * DEPTH
# Blocks of 8-bit numbers: along heads, 32, and for the table along the embedding, 16.
SCALES = 2 * (2 * LAYERS * EMBED + VOCAB)

BYTES = {
    "adamw-host": 8 * MATRIX_PARAMETERS,
    "adamw-bfloat16": 4 * MATRIX_PARAMETERS,
    "adamw-float8": 2 * MATRIX_PARAMETERS + 4 * SCALES,
}
"""Of the matrices' moments; vectors have 8 of a parameter, and counts are int32."""


@pytest.mark.parametrize("kind", BYTES)
def test_bytes_of_the_states(kind):
    leaves = jax.tree.leaves(programs(kind)[1].optimizer_state)
    rest = 8 * LAYERS * EMBED + 4 * (1 + 2 + 2 * LAYERS)
    assert sum(x.size * x.dtype.itemsize for x in leaves) == BYTES[kind] + rest


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_sharded_as_parameters_are(kind):
    def check(path, leaf):
        name = jax.tree_util.keystr(path)
        shards = leaf.size // np.prod(leaf.sharding.shard_shape(leaf.shape))
        fields = {k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)}
        if "scale" in name.split("'") or not fields & {"mu", "nu"}:
            return
        # Not along the blocks' axis: heads', or the table's embedding.
        of_blocks = 2 if "embedding" in name else 4
        assert shards == (of_blocks if "scales" in fields else 8), name

    like = programs(kind, CUBE)[1]
    jax.tree_util.tree_map_with_path(check, like.optimizer_state)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(like.params["layers"])}
    is_far = KINDS[kind].get("placement") == "host_all"
    assert ("pinned_host" in kinds) == is_far and len(kinds) == 1


def test_adafactor_keeps_rows_and_columns(rng):
    state = optimizer_of("adafactor").init(draw(rng))
    found = optax.tree.get(state.layers, "v_row"), optax.tree.get(state.layers, "v_col")
    shapes = [jax.tree.map(jnp.shape, x)["layers"] for x in found]
    assert [shapes[0][n] for n in MATRICES] == [(LAYERS, EMBED)] * 2
    assert [shapes[1][n] for n in MATRICES] == [(LAYERS, HEADS * DEPTH)] * 2


SETTINGS = OptimizerSettings(
    peak_lr=1e-2, end_lr=1e-3, warmup_steps=10, total_steps=110, clip_norm=math.inf
)


def test_schedule_rises_linearly_then_falls_as_a_cosine_and_stays():
    _, schedule = make_optimizer(SETTINGS)
    quarter = 1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi / 4))
    expected = {0: 0.0, 5: 5e-3, 10: 1e-2, 35: quarter, 60: 5.5e-3}
    expected |= dict.fromkeys((110, 111, 10**6), 1e-3)
    for step, rate in expected.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-6, abs=1e-9)
    # Traced with the state's step.
    assert float(jax.jit(schedule)(jnp.int32(5))) == pytest.approx(5e-3, rel=1e-6)
    _, at_once = make_optimizer(dataclasses.replace(SETTINGS, warmup_steps=0))
    assert float(at_once(0)) == pytest.approx(1e-2, rel=1e-6)


def test_decayed_are_the_matrices_of_a_model_with_every_part():
    parts = FAMILIES["gpt_oss"] | FAMILIES["gemma3"]
    parts |= {"model__tied_embeddings": False}
    model = TextRun(config_of("striped", **parts), partition_of(MeshShape())).model
    found = set()

    def check(path, is_decayed, axes):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        # Every matrix has an axis of the hidden size, and another one.
        is_matrix = "embed" in axes and len(set(axes) - {None}) > 1
        assert is_decayed == is_matrix, (path, axes)
        found.add(name)

    jax.tree_util.tree_map_with_path(check, decayed(model.shapes), model.axes)
    assert {"sinks", "scale", "query_bias", "output_bias", "head", "gate"} <= found


def test_updates_follow_adamw_written_out():
    """Clipped by the norm over all leaves; a bias does not decay."""
    settings = OptimizerSettings(1e-2, 1e-3, warmup_steps=2, total_steps=9)
    adam = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}
    settings = dataclasses.replace(settings, weight_decay=0.2, clip_norm=0.5, **adam)
    optimizer, schedule = make_optimizer(settings)
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(4, 6))
    names = "matrix", "bias"
    decay = np.float64([[0.2], [0.2], [0], [0]])
    params = dict(zip(names, np.float32(np.split(weight, 2)), strict=True))
    state = optimizer.init(params)
    mean, square = np.zeros((4, 6)), np.zeros((4, 6))
    for count in range(5):
        grad = rng.normal(size=(4, 6))
        grads = dict(zip(names, np.float32(np.split(grad, 2)), strict=True))
        params, state = jax.jit(optimizer.update)(grads, state, params)
        clipped = grad * min(1.0, 0.5 / np.linalg.norm(grad))
        mean = 0.8 * mean + 0.2 * clipped
        square = 0.9 * square + 0.1 * clipped**2
        unbiased = mean / (1 - 0.8 ** (count + 1))
        root = np.sqrt(square / (1 - 0.9 ** (count + 1)))
        step = unbiased / (root + 1e-3) + decay * weight
        weight = weight - float(schedule(count)) * step
    found = np.concatenate([params[name] for name in names])
    np.testing.assert_allclose(found, weight, rtol=1e-5, atol=1e-6)
