"""Logits and tokens of all families are transformers', as are gpt-oss's layers."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels import masks
from kernels.layouts import permute, unpermute
from kernels.ring_attention import make_ring_attention
from models import experts
from models.attention import Attention
from models.memory import Execution
from models.rope import rotations
from models.sizes import DecoderConfig
from tasks.text import TextRun
from tests.cases.attention import LAYOUTS
from tests.small.models import partition_of
from tests.tools import hf_models
from tools.lib.hf.names import weight_at
from tools.lib.hf.rope import RopeKinds, read_rope
from tools.lib.hf.tensor_files import TensorFiles
from training.sharding.mesh import MeshShape

BOUND = 2e-5
"""Between float32 logits of up to 6, in layers of the same operations."""
SYSTEMS = "ring", "striped", "zigzag"
NAMES = hf_models.NAMES

# Each model on a ring; the slow tests have all the others.
FAST = {
    (name, (4, 8)[number % 2], SYSTEMS[number % 3]) for number, name in enumerate(NAMES)
}
ALL = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in itertools.product(NAMES, (4, 8), SYSTEMS)
]


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(("name", "ring", "attention"), ALL)
def test_logits_and_greedy_tokens_equal_transformers(name, ring, attention):
    """48 tokens, with windows of 7 and 8."""
    wide = {"stripe_granule": 3} if name.startswith("qwen3_5") else {}
    config = hf_models.run_config(name, attention=attention, **wide)
    partition = partition_of(MeshShape(ring=ring))
    model = TextRun(config, partition).model
    parameters = hf_models.loaded(name, model, partition)
    tokens, expected = hf_models.expected(name)
    logits = hf_models.logits(config, partition)(parameters, tokens)
    exact = hf_models.exact(name)
    if exact is None:
        np.testing.assert_allclose(logits, expected, atol=BOUND, rtol=0)
    else:  # chunks of states are summed in another order: no less exactly
        rounding = np.linalg.norm(expected - exact)
        assert np.linalg.norm(logits - exact) < 2 * rounding
    # Every token is the likeliest after those before it, as greedy decoding has it.
    followers = tokens[hf_models.PROMPT :]
    assert followers.size == 32
    best = logits.argmax(axis=-1)[hf_models.PROMPT - 1 : -1]
    np.testing.assert_array_equal(best, followers)


WITH_EXPERTS = [n for n in NAMES if "num_experts_per_tok" in hf_models.fields(n)]
NEAR = 1e-5
"""Between the scores of two experts, which rounding may then exchange."""


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_no_choice_of_experts_is_near_a_tie(name, monkeypatch):
    """So logits that differ from transformers' are errors, and no other choices."""
    gaps = []
    route = experts.route

    def watched(
        logits: jax.Array, bias: jax.Array | None, router: str, count: int
    ) -> experts.Routing:
        scores = jax.nn.sigmoid(logits) if router == "sigmoid" else logits
        best = jax.lax.top_k(scores if bias is None else scores + bias, count + 1)[0]
        jax.debug.callback(gaps.append, best[:, -2] - best[:, -1])  # (tokens,)
        return route(logits, bias, router, count)

    monkeypatch.setattr(experts, "route", watched)
    config = hf_models.run_config(name)
    partition = partition_of(MeshShape())
    model = TextRun(config, partition).model
    tokens, _ = hf_models.expected(name)
    parameters = hf_models.loaded(name, model, partition)
    hf_models.logits(config, partition)(parameters, tokens)
    jax.effects_barrier()
    assert len(gaps) == model.config.num_layers - model.config.dense_layers
    assert np.min(gaps) > NEAR


# The attention of gpt-oss as a layer: its sinks, windows, biases and YaRN.

GPT_OSS = "gpt_oss_attention"
WINDOWED, FULL = 0, 1
"""Layers of the fixture."""


def record() -> DecoderConfig:
    """The layers' sizes, from config.json, and parts, which gpt-oss always has."""
    fields = hf_models.fields(GPT_OSS)
    heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    parts = {"layer_pattern": "wf", "window": fields["sliding_window"]}
    parts |= dict.fromkeys(("attention_sinks", "qkv_bias", "output_bias"), True)
    sizes = fields["hidden_size"], 1, 2, *heads, fields["head_dim"]
    return DecoderConfig(*sizes, **parts, **read_rope(fields, RopeKinds(150_000.0)))


def output(config: DecoderConfig, layer: int, ring: int, layout_name: str) -> Any:
    """What a layer here makes of the fixture's input: (48, E)."""
    partition = partition_of(MeshShape(ring=ring))
    run = Execution(jnp.dtype("float32"), remat="everything")
    attention = Attention(config, run, partition, rngs=nnx.Rngs(0))
    with TensorFiles(hf_models.DIRECTORY / GPT_OSS) as files:
        for name, parameter in vars(attention).items():
            if isinstance(parameter, nnx.Param):
                weight = weight_at(("layers", "attention", name))
                name = weight.name.format(layer=layer)
                stored = files.read(name, (slice(None),) * len(files.shapes[name]))
                parameter[...] = weight.from_stored(stored, parameter[...].shape)
    layout, kind = LAYOUTS[layout_name], config.period[layer]
    visible = masks.causal()
    if kind.window:
        visible &= masks.window(kind.window)
    options = {"layout": layout, "implementation": "reference"}
    attend = make_ring_attention(partition.mesh, **options)
    attend = functools.partial(attend, visible=visible)

    @jax.jit
    def compute(x: jax.Array, positions: jax.Array) -> jax.Array:
        rotation = rotations(positions, config.head_dim, *kind.rope)
        return attention(x, None, rotation, attend)

    x = np.load(hf_models.DIRECTORY / GPT_OSS / "expected.npz")["input"][None]
    positions = np.arange(x.shape[1], dtype=np.int32)[None]
    placed = (permute(array, layout, ring, axis=1) for array in (x, positions))
    return np.asarray(unpermute(compute(*placed), layout, ring, axis=1))[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "ring", "layout"),
    [(WINDOWED, 4, "zigzag"), (FULL, 4, "striped")],
)
def test_the_layers_equal_transformers(layer, ring, layout):
    expected = np.load(hf_models.DIRECTORY / GPT_OSS / "expected.npz")["outputs"]
    found = output(record(), layer, ring, layout)
    np.testing.assert_allclose(found, expected[layer], atol=BOUND, rtol=0)
