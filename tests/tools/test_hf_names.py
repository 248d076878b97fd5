"""Layouts of tensors: parts of parameters are found in them.

Names, and what is transposed, are held by the logits of tests/tools/test_hf_logits.py.
"""

import numpy as np
import pytest

from tools.lib.hf.names import Weight

# Shape of one layer's parameter, that of its tensor, and a part of the former.
CASES = {
    "heads_out": ((1,), (6, 4, 10), (40, 6), np.s_[2:4, 1:3, :]),
    "heads_in": ((2,), (4, 10, 6), (6, 40), np.s_[2:4, 0:10, 3:]),
    "matrix": ((1,), (6, 8), (8, 6), np.s_[:, 4:8]),
    "bias_of_heads": ((0,), (4, 10), (40,), np.s_[1:3, :]),
    "as_it_is": ((1, False), (8, 6), (8, 6), np.s_[0:2, 3:6]),
    "adapter_of_heads": ((1, False), (2, 4, 5), (2, 20), np.s_[:2, 1:3, :5]),
    "scale": ((0,), (6,), (6,), np.s_[2:5,]),
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
        weight.stored_index((6, 4, 10), np.s_[:, :, 0:5])
