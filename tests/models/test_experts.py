"""Experts against all of them computed densely in float64, gradients too, and ties."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.experts import Experts, route
from models.grouped import check_platform
from models.layers import CLAMP, SHARPNESS
from models.lora import Lora
from models.memory import remat
from models.sizes import DecoderConfig
from tests.small.models import Run, assert_same, budget_gib, partition_of
from training.sharding.mesh import MeshShape, Partition

SIZES = DecoderConfig(16, 12, 2, 4, 2, 4, experts=6, experts_per_token=2)
SHARED = {"shared_expert_size": 8, "shared_expert_gate": True}
OSS = {"expert_bias": True, "activation": "clamped"}
CASES = {
    "chosen": ({}, MeshShape(ring=4), 0),
    "chunks": ({"lora": Lora(2, 8.0, "gate,down")}, MeshShape(fsdp=2, ring=2), 3),
    "all": ({"router": "all"}, MeshShape(data=2, ring=2), 5),
    "sigmoid": ({"router": "sigmoid"}, MeshShape(), 0),
    "oss": (OSS, MeshShape(ring=2, tensor=2), 7),
    "shared": (SHARED, MeshShape(ring=2, tensor=2), 4),
}
X, DY = np.random.default_rng(5).normal(size=(2, 2, 8, 16))
"""Tokens (B, T, E), and the gradients of what is added to them."""


def made(changes: dict[str, Any], partition: Partition, chunk: int = 0) -> Experts:
    config = dataclasses.replace(SIZES, **changes)
    module = Experts(config, partition, chunk, rngs=nnx.Rngs(1))
    rng = np.random.default_rng(3)
    for name, parameter in vars(module).items():
        if isinstance(parameter, nnx.Param):
            spread = 2.0 if name == "gate_bias" else 0.5
            values = rng.normal(size=parameter.shape, scale=spread)
            parameter[...] = jnp.asarray(values, jnp.float32)
    return module


def dense(
    p: dict[str, jax.Array], x: jax.Array, config: DecoderConfig
) -> tuple[jax.Array, jax.Array]:
    """All experts for each token of x (n, E), in the type of x, one by one."""
    logits = x @ p["router"]
    if config.router == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        ranked = scores + p["router_bias"]
    else:
        logits += p.get("router_bias", 0)
        ranked = scores = jax.nn.softmax(logits)
    least = jnp.sort(ranked)[:, -config.experts_per_token, None]
    weights = jnp.where(ranked >= least, scores, 0)  # (n, X)
    if config.router != "all":
        weights /= weights.sum(-1, keepdims=True)
    is_taken = (ranked >= least).astype(x.dtype)
    loads = is_taken.mean(0), (scores / scores.sum(-1, keepdims=True)).mean(0)

    def matrix(name: str, expert: int) -> jax.Array:
        added = 0
        if f"{name}_a" in p:
            added = config.lora.scale * p[f"{name}_a"][expert] @ p[f"{name}_b"][expert]
        return p[name][expert] + added

    y = 0
    for expert in range(config.experts):
        gate = x @ matrix("gate", expert) + p["gate_bias"][expert]
        up = x @ matrix("up", expert) + p["up_bias"][expert]
        if config.activation == "clamped":
            gate = jnp.minimum(gate, CLAMP)
            hidden = gate * jax.nn.sigmoid(SHARPNESS * gate)
            hidden *= jnp.clip(up, -CLAMP, CLAMP) + 1
        else:
            hidden = jax.nn.silu(gate) * up
        of_expert = hidden @ matrix("down", expert) + p["down_bias"][expert]
        y += weights[:, expert, None] * of_expert
    if "shared_up" in p:
        hidden = jax.nn.silu(x @ p["shared_gate"]) * (x @ p["shared_up"])
        y += jax.nn.sigmoid(x @ p["shared_weight"]) * (hidden @ p["shared_down"])
    balance = config.experts * (loads[0] * loads[1]).sum()
    busiest = config.experts * loads[0].max() / config.experts_per_token
    return y, jnp.stack([balance, busiest])


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize("case", CASES)
def test_experts_and_gradients_are_those_of_all_experts_in_float64(case):
    changes, shape, chunk = CASES[case]
    module = made(changes, partition_of(shape), chunk)
    config = module.config
    structure, parameters = nnx.split(module)

    def ours(parameters: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, loads = nnx.merge(structure, parameters)(x)
        return (y * DY.astype(np.float32)).sum() + 3 * loads[0], (y, loads)

    program = jax.jit(jax.grad(ours, (0, 1), has_aux=True))
    grads, results = jax.device_get(program(parameters, X.astype(np.float32)))
    got = {**nnx.to_pure_dict(grads[0]), "x": grads[1]}
    with jax.enable_x64(True):
        given = {
            n: np.asarray(v, float) for n, v in nnx.to_pure_dict(parameters).items()
        }
        absent = {f"{name}_bias": np.zeros(6) for name in ("gate", "up", "down")}

        def exact(p: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, Any]:
            y, loads = dense(absent | p, x.reshape(-1, 16), config)
            y = y.reshape(x.shape)
            return (y * DY).sum() + 3 * loads[0], (y, loads)

        program = jax.grad(exact, (0, 1), has_aux=True)
        grads, wanted = jax.device_get(program(given, X))
    assert_same(results, wanted, 1e-6)
    want = {**grads[0], "x": grads[1]}
    if config.router == "sigmoid":  # which only chooses
        assert not got.pop("router_bias").any() and not want.pop("router_bias").any()
    assert_same(got, want, 3e-6)


def test_adapters_are_drawn_in_one_order_on_all_hosts():
    lora = Lora(rank=2, gate_up_rank=3)
    config = dataclasses.replace(SIZES, lora=lora)
    module = Experts(config, partition_of(MeshShape()), 0, rngs=nnx.Rngs(1))
    shapes = {n: p.shape for n, p in vars(module).items() if n[-2:] in ("_a", "_b")}
    assert [*shapes] == ["gate_a", "gate_b", "up_b", "down_a", "down_b"]
    assert shapes["gate_a"] == (6, 16, 3) and shapes["up_b"] == (6, 3, 12)
    assert shapes["down_b"] == (6, 2, 16)


@pytest.mark.parametrize("router", ["chosen", "all", "sigmoid"])
def test_of_equal_experts_the_first_are_taken_and_gradients_are_finite(router):
    """Also by padding, whose logits are all equal."""
    logits = jnp.array([[0.0, 0, 0, 0], [1, 3, 3, 3], [2, 1, 2, 1]])
    routing = route(logits, None, router, 2)
    np.testing.assert_array_equal(routing.chosen, [[0, 1], [1, 2], [0, 2]])
    share = {"chosen": 0.5, "all": 0.25, "sigmoid": 0.5}[router]
    np.testing.assert_allclose(routing.weights[0], share, rtol=1e-6)
    np.testing.assert_array_equal(routing.loads[0], [2, 2, 2, 0])
    slopes = jax.grad(lambda z: (route(z, None, router, 2).weights ** 2).sum())(logits)
    assert np.isfinite(slopes).all()


def test_gpus_without_a_grouped_product_are_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_platform("tpu")
    with pytest.raises(ValueError, match="must have tokamax, got none"):
        check_platform("gpu")


@pytest.mark.thorough
def test_first_layers_without_experts_are_those_of_a_dense_model():
    """Where others have one expert: windows and bases of RoPE count from layer 0."""
    kinds = {"model__layer_pattern": "wwf", "model__window": 5, "model__num_layers": 5}
    kinds |= {"model__window_rope_theta": 100.0, "remat": "nothing"}
    plain = Run(MeshShape(), "vanilla", **kinds)
    width = plain.config.model.feed_forward_size
    parts = {"model__experts": 1, "model__experts_per_token": 1}
    parts |= {"model__dense_layers": 2, "model__dense_feed_forward_size": width}
    kept = Run(MeshShape(ring=4), "zigzag", **kinds, **parts).resolved.kept
    budget = budget_gib(kept, "nothing", 4)  # the second of the dense ones keeps more
    fields = kinds | parts | {"remat_budget_gib": budget}
    mixed = Run(MeshShape(ring=4), "zigzag", **fields)
    layers = plain.parameters["layers"]
    others = jax.tree.map(lambda x: x[2:], layers)
    matrices = {name: x[:, None] for name, x in others["feed_forward"].items()}
    router = np.zeros((3, plain.config.model.hidden_size, 1), np.float32)
    given = plain.parameters | {"dense_layers": jax.tree.map(lambda x: x[:2], layers)}
    given["layers"] = others | {"feed_forward": matrices | {"router": router}}
    mixed.parameters = jax.tree.map(
        lambda x, like: jax.device_put(np.asarray(x), like.sharding),
        given,
        mixed.parameters,
    )
    (loss, grads), (wanted, wanted_grads) = mixed.answer(), plain.answer()
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    own = grads["layers"]
    own["feed_forward"] = {n: own["feed_forward"][n][:, 0] for n in matrices}
    joined = jax.tree.map(
        lambda a, b: np.concatenate([a, b]), grads["dense_layers"], own
    )
    assert_same(joined, wanted_grads["layers"], 1e-5)
    # The balance loss, a mean over layers with experts, is 1 with one of them.
    losses = jax.jit(mixed.resolved.objective.loss_sum)
    figures = losses(mixed.parameters, mixed.batch()).figures
    weights = mixed.batch().loss_weights.sum()
    np.testing.assert_allclose(figures["experts_balance"], weights, rtol=1e-6)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_of_single_matrices_are_refused(name):
    run = Run(MeshShape(), "vanilla", "experts", optimizer__name=name).resolved
    with pytest.raises(ValueError, match="must be 'adamw' for a model with experts"):
        _ = run.optimizer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experts_per_token": 7}, "must be from 1 to experts=6"),
        ({"experts_per_token": 0}, "must be from 1 to experts=6"),
        ({"experts": 0, "experts_per_token": 0, "router": "all"}, "router='all' must"),
        ({"router": "last"}, "must be one of 'chosen', 'all', 'sigmoid'"),
        ({"shared_expert_size": -1}, "shared_expert_size=-1 must be at least 0"),
        ({"shared_expert_gate": True}, "must have shared_expert_size above 0"),
        ({"expert_scale": 0.0}, "expert_scale=0.0 must be a number above 0"),
        ({"dense_layers": 2}, "dense_layers=2 must be from 0 to 1: fewer than num_"),
        ({"dense_layers": 1}, "dense_feed_forward_size=0 must be 0 if .* at least 1"),
        ({"dense_feed_forward_size": 9}, "_size=9 must be 0 if dense_layers=0 is"),
        ({"dense_layers": 1, "activation": "clamped"}, "must be from 0 to 0: "),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SIZES, **changes)


def test_biases_of_experts_are_not_kept_for_the_backward():
    """The policy keeps products with parameters; these are as large as all rows."""
    module = made(OSS, partition_of(MeshShape()))
    structure, parameters = nnx.split(module)

    def added(parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, parameters)(x)[0]

    _, backward = jax.vjp(remat(added, "products"), parameters, X.astype(np.float32))
    kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
    assert kept.count((16, 6)) == 2  # the router, and its logits
    assert (32, 12) not in kept  # rows of gate or up
