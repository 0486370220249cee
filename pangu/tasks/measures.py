"""Measures that compare a generated answer with the accepted ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

Measure = Callable[[str, Sequence[str]], dict[str, float]]
"""Function from the generated text and the accepted answers to named figures in [0, 1]."""

_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》…·、「」（）－～『』")
"""Characters that CMRC 2018's evaluation ignores; ASCII commas and full stops are not among them."""
_BETA = 1.2
"""Weight of recall in Rouge-L, that of DuReader's evaluation (He et al. 2018)."""


def exact_match_and_f1(written: str, answers: Sequence[str]) -> dict[str, float]:
    """Return exact match and F1, best of all answers, as CMRC 2018's evaluation does (Cui et al. 2019).

    `exact_match`: equal up to case and punctuation. `f1`: of the longest common run of segments.
    """

    def longest_run(one: list[str], other: list[str]) -> int:
        return SequenceMatcher(None, one, other, autojunk=False).find_longest_match().size

    return {
        "exact_match": float(any(_plain(written) == _plain(answer) for answer in answers)),
        "f1": _best_f(longest_run, written, answers),
    }


def rouge(written: str, answers: Sequence[str]) -> dict[str, float]:
    """Return Rouge over segments, best of all answers.

    `rouge_1`: F1 of common segments in any order (the paper's figure for DuReader); `rouge_l`: F of the longest common
    subsequence, recall weighted by 1.2 (DuReader's own).
    """
    return {
        "rouge_1": _best_f(lambda one, other: (Counter(one) & Counter(other)).total(), written, answers),
        "rouge_l": _best_f(_longest_common, written, answers, _BETA),
    }


def begins_with(written: str, answers: Sequence[str]) -> dict[str, float]:
    """Return `accuracy`: 1 if the text for a blank begins with the right word; the rest continues the sentence."""
    return {"accuracy": float(any(_plain(written).startswith(_plain(answer)) for answer in answers))}


def segments(text: str) -> list[str]:
    """Return the mixed segmentation: Chinese characters, Latin words, numbers and ASCII signs; no punctuation."""
    signs = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return re.findall(r"[一-龥]|[^\W一-龥]+|[^\w\s]", signs)


def _plain(text: str) -> str:
    return "".join(character for character in text.lower().strip() if character not in _PUNCTUATION)


def _best_f(
    common: Callable[[list[str], list[str]], int], written: str, answers: Sequence[str], beta: float = 1.0
) -> float:
    """Return the best F-measure over the answers for their number of `common` segments; 0 without any."""
    text, best = segments(written), 0.0
    for reference in map(segments, answers):
        if length := common(text, reference):
            precision, recall = length / len(text), length / len(reference)
            best = max(best, (1 + beta**2) * precision * recall / (recall + beta**2 * precision))
    return best


def _longest_common(one: list[str], other: list[str]) -> int:
    row = [0] * (len(other) + 1)
    for word in one:
        before = row
        row = [0]
        for i, twin in enumerate(other):
            row.append(before[i] + 1 if word == twin else max(row[i], before[i + 1]))
    return row[-1]
