"""Names and layouts: every parameter has its tensors, and parts are found in them."""

import jax
import numpy as np
import pytest
from flax import traverse_util

from tasks import base, text
from tests.runs import small_config
from tools.lib.hf.names import TIED_HEAD, WEIGHTS, Weight, is_derived


def test_every_parameter_of_the_model_has_a_name():
    config = small_config("", "")
    model = text.model(config, base.partition(config, jax.devices()))
    shapes = traverse_util.flatten_dict(model.shapes)
    assert sorted(weight.path for weight in WEIGHTS) == sorted(shapes)
    for weight in WEIGHTS:
        assert weight.is_stacked == (weight.path[0] == "layers")
    names = [name for weight in WEIGHTS for name in weight.names(3)]
    assert len(names) == len(set(names)) == 3 * 9 + 3
    assert "model.layers.2.self_attn.q_proj.weight" in names


# Shape of one layer's parameter, that of its tensor, and a part of the former.
CASES = {
    "heads_out": (1, (6, 4, 10), (40, 6), (slice(2, 4), slice(1, 3), slice(None))),
    "heads_in": (2, (4, 10, 6), (6, 40), (slice(2, 4), slice(0, 10), slice(3, None))),
    "matrix": (1, (6, 8), (8, 6), (slice(None), slice(4, 8))),
    "as_it_is": (0, (8, 6), (8, 6), (slice(0, 2), slice(3, 6))),
    "scale": (0, (6,), (6,), (slice(2, 5),)),
}


@pytest.mark.parametrize(
    "input_axes, shape, stored_shape, index", CASES.values(), ids=CASES
)
def test_a_part_of_a_parameter_is_a_part_of_its_tensor(
    input_axes, shape, stored_shape, index
):
    weight = Weight(("any",), "any.weight", input_axes)
    parameter = np.random.default_rng(4).standard_normal(shape)
    stored = weight.to_stored(parameter)
    assert stored.shape == weight.stored_shape(shape) == stored_shape
    assert stored.flags.c_contiguous
    part = stored[weight.stored_index(shape, index)]
    wanted = parameter[index]
    np.testing.assert_array_equal(weight.from_stored(part, wanted.shape), wanted)


def test_a_tensor_is_outputs_by_inputs():
    """x @ parameter is torch's linear(x, tensor) = x @ tensor.T, heads one by one."""
    rng = np.random.default_rng(6)
    x, query = rng.standard_normal((5, 6)), rng.standard_normal((6, 4, 10))
    tensor = Weight(("any",), "any", 1).to_stored(query)
    np.testing.assert_allclose(
        (x @ tensor.T).reshape(5, 4, 10), np.einsum("te,ehd->thd", x, query)
    )
    out, output = rng.standard_normal((5, 4, 10)), rng.standard_normal((4, 10, 6))
    tensor = Weight(("any",), "any", 2).to_stored(output)
    np.testing.assert_allclose(
        out.reshape(5, 40) @ tensor.T, np.einsum("thd,hde->te", out, output)
    )
    embedding = rng.standard_normal((8, 6))
    np.testing.assert_array_equal(TIED_HEAD.from_stored(embedding, (6, 8)), embedding.T)


def test_a_part_of_each_head_is_refused():
    weight = Weight(("any",), "any", 1)
    with pytest.raises(ValueError, match="not one piece"):
        weight.stored_index((6, 4, 10), (slice(None), slice(None), slice(0, 5)))


def test_frequencies_are_derived_and_matrices_are_not():
    assert is_derived("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not any(is_derived(weight.name) for weight in WEIGHTS)
