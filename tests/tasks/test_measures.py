"""Measures of written answers, against values computed by hand."""

from __future__ import annotations

import pytest

from pangu.tasks.measures import begins_with, exact_match_and_f1, rouge, segments


def test_mixed_segmentation() -> None:
    """Chinese by characters, the rest by words; the evaluation's punctuation goes, ASCII commas stay."""
    assert segments("在1998年，NBA的 Michael-Jordan说: a,b。") == [
        *("在", "1998", "年", "nba", "的", "michaeljordan", "说", "a", ",", "b")
    ]


@pytest.mark.parametrize(
    ("written", "answers", "exact", "f1"),
    [
        ("北京。", ["北京"], 1.0, 1.0),
        # the longest common run is 北京: precision 2/3, recall 2/2
        ("在北京", ["北京"], 0.0, 0.8),
        # 北 and 京 both stand in it, but a run of one is all that is common: 1/3 and 1/2
        ("北和京", ["北京"], 0.0, 0.4),
        ("上海", ["北京"], 0.0, 0.0),
        ("", ["北京"], 0.0, 0.0),
        # the best of several answers: run of 3 of 4 and 3
        ("约1998年", ["九八年", "1998年"], 0.0, 0.8),
        ("NBA", ["nba"], 1.0, 1.0),
    ],
)
def test_exact_match_and_f1(written: str, answers: list[str], exact: float, f1: float) -> None:
    assert exact_match_and_f1(written, answers) == pytest.approx({"exact_match": exact, "f1": f1})


def test_rouge() -> None:
    """甲乙丙丁 against 丁乙丙: 3 of 4 and of 3 segments in common; 乙丙 is the longest common subsequence, 2 of 4 and
    of 3: 2.44 * (1/2 * 2/3) / (2/3 + 1.44 * 1/2) = 0.5865."""
    found = rouge("甲乙丙丁", ["戊", "丁乙丙"])
    assert found == pytest.approx({"rouge_1": 6 / 7, "rouge_l": 2.44 * (1 / 3) / (2 / 3 + 0.72)})
    assert rouge("", ["甲"]) == {"rouge_1": 0.0, "rouge_l": 0.0}


def test_what_fills_a_blank() -> None:
    assert begins_with("狐狸说", ["狐狸"]) == {"accuracy": 1.0}
    assert begins_with("小狐狸", ["狐狸"]) == {"accuracy": 0.0}
