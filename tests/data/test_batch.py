import pytest

from data.batch import Block


@pytest.mark.parametrize("wrong", [(-1, 2), (2, 2), (3, 2)])
def test_block_refuses_an_empty_or_negative_range(wrong):
    with pytest.raises(ValueError, match=r"block rows=.* larger stop"):
        Block(wrong, (0, 1))
    with pytest.raises(ValueError, match=r"block columns="):
        Block((0, 1), wrong)
