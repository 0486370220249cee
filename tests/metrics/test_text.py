from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.metrics.text import compact, duration, quantity


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9.4, "9"),
        (950, "950"),
        (999.6, "1.0k"),
        (12_345, "12.3k"),
        (-12_345, "-12.3k"),
        (999_940, "999.9k"),
        (999_960, "1.0M"),
        (2.5e9, "2.5G"),
        (7e12, "7.0T"),
    ],
)
def test_compact(number: float, text: str) -> None:
    assert compact(number) == text


def test_a_count_and_its_noun_agree() -> None:
    assert quantity(1, "dry run") == "1 dry run"
    assert [quantity(2048, noun) for noun in ("rank", "micro-batch")] == ["2,048 ranks", "2,048 micro-batches"]


@given(st.floats(0, 1e14))
def test_compact_is_near_the_number_and_short(number: float) -> None:
    text = compact(number)
    unit = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
    digits = text.rstrip("kMGT")
    assert float(digits) < 1000
    assert abs(float(digits) * unit - number) <= (0.5 if unit == 1 else 0.0501 * unit)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (45, "45 s"),
        (59.6, "1 min 00 s"),
        (725, "12 min 05 s"),
        (11_220, "3 h 07 min"),
        (86_399.9, "1 d 00 h"),
        (190_000, "2 d 04 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
