"""The example in the documentation of the parallel layers."""

from __future__ import annotations

import doctest

from pangu.layers import linear


def test_the_worked_example_of_columns_and_rows() -> None:
    result = doctest.testmod(linear)
    assert result.attempted == 7
    assert result.failed == 0
