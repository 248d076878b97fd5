"""Layouts of tensors: parts of parameters are found in them.

Names, and what is transposed, are held by the logits of tests/tools/test_hf_logits.py.
"""

import numpy as np
import pytest

from tools.lib.hf.names import Weight

# Shape of one layer's parameter, that of its tensor, and a part of the former.
CASES = {
    "heads_out": ((1,), (6, 4, 10), (40, 6), (slice(2, 4), slice(1, 3), slice(None))),
    "heads_in": (
        (2,),
        (4, 10, 6),
        (6, 40),
        (slice(2, 4), slice(0, 10), slice(3, None)),
    ),
    "matrix": ((1,), (6, 8), (8, 6), (slice(None), slice(4, 8))),
    "bias_of_heads": ((0,), (4, 10), (40,), (slice(1, 3), slice(None))),
    "as_it_is": ((1, False), (8, 6), (8, 6), (slice(0, 2), slice(3, 6))),
    "adapter_of_heads": (
        (1, False),
        (2, 4, 5),
        (2, 20),
        (slice(2), slice(1, 3), slice(5)),
    ),
    "scale": ((0,), (6,), (6,), (slice(2, 5),)),
}


@pytest.mark.parametrize(
    "layout, shape, stored_shape, index", CASES.values(), ids=CASES
)
def test_a_part_of_a_parameter_is_a_part_of_its_tensor(
    layout, shape, stored_shape, index
):
    weight = Weight(("any",), "any.weight", *layout)
    parameter = np.random.default_rng(4).standard_normal(shape)
    stored = weight.to_stored(parameter)
    assert stored.shape == weight.stored_shape(shape) == stored_shape
    assert stored.flags.c_contiguous
    part = stored[weight.stored_index(shape, index)]
    wanted = parameter[index]
    np.testing.assert_array_equal(weight.from_stored(part, wanted.shape), wanted)


def test_a_part_of_each_head_is_refused():
    weight = Weight(("any",), "any", 1)
    with pytest.raises(ValueError, match="not one piece"):
        weight.stored_index((6, 4, 10), (slice(None), slice(None), slice(0, 5)))
