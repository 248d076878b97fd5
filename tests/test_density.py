"""What `make lint` calls a folded assignment."""

import ast

import pytest

from tests.support.density import is_folded


@pytest.mark.parametrize(
    "statement, folded",
    [
        ("a, b = f(x), g(y)", True),
        ("a, b = x.size, y.size", True),
        ("a, b = x.size, 1", True),
        ("a, b = b, a", False),
        ("a, b = 1, None", False),
        ("a, b = x.size, x.shape", False),
        ("a, b = f(x)", False),
        ("a = f(x), g(y)", False),
    ],
)
def test_values_that_have_nothing_to_do_with_each_other_are_found(statement, folded):
    (node,) = ast.parse(statement).body
    assert isinstance(node, ast.Assign) and is_folded(node) == folded
