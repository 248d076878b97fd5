"""configs/line_retrieval.py: its stages."""

import pytest

from configs import line_retrieval

STAGES = 32, 160


def test_stages_are_one_model_and_each_begins_with_the_one_before():
    short, long = (line_retrieval.get_config(str(tokens)) for tokens in STAGES)
    assert short.model == long.model
    assert (short.init_from, long.init_from) == ("", short.workdir)
    assert [c.data.context_tokens for c in (short, long)] == [*STAGES]
    assert {c.data.rows for c in (short, long)} == {"whole"}
    with pytest.raises(KeyError, match="stage '65' is not one of 32, 160"):
        line_retrieval.get_config("65")
