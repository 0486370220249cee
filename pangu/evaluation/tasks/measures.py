"""How a generated answer is compared with those that are accepted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

Measure = Callable[[str, Sequence[str]], dict[str, float]]
"""From what a model wrote and the accepted answers to named figures, each in [0, 1]."""

_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》…·、「」（）－～『』")
"""What the evaluation of CMRC 2018 leaves out; ASCII commas and full stops are not among it."""
_BETA = 1.2
"""Weight of recall in Rouge-L, that of DuReader's evaluation (He et al. 2018)."""


def exact_match_and_f1(written: str, answers: Sequence[str]) -> dict[str, float]:
    """As the evaluation of CMRC 2018 (Cui et al. 2019) computes them, the best of all answers counts.

    `exact_match`: equal but for case and punctuation. `f1`: of the longest common run of segments.
    """
    text, references = segments(written), [segments(answer) for answer in answers]
    return {
        "exact_match": float(any(_plain(written) == _plain(answer) for answer in answers)),
        "f1": _best_f(_longest_run, text, references),
    }


def rouge(written: str, answers: Sequence[str]) -> dict[str, float]:
    """Over segments, the best of all answers counts. `rouge_1`: F1 of common segments, wherever they stand (the paper's
    figure for DuReader); `rouge_l`: F of the longest common subsequence, recall weighted by 1.2 (DuReader's own)."""
    text, references = segments(written), [segments(answer) for answer in answers]
    return {
        "rouge_1": _best_f(_num_common, text, references),
        "rouge_l": _best_f(_longest_common, text, references, _BETA),
    }


def begins_with(written: str, answers: Sequence[str]) -> dict[str, float]:
    """`accuracy`: the text that fills a blank begins with the word that stood there; what the model writes after it is
    the rest of the sentence."""
    return {"accuracy": float(any(_plain(written).startswith(_plain(answer)) for answer in answers))}


def segments(text: str) -> list[str]:
    """Mixed segmentation: every Chinese character, and every Latin word, number or ASCII sign; no punctuation marks."""
    signs = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return re.findall(r"[一-龥]|[^\W一-龥]+|[^\w\s]", signs)


def _plain(text: str) -> str:
    return "".join(character for character in text.lower().strip() if character not in _PUNCTUATION)


def _best_f(
    common: Callable[[list[str], list[str]], int], text: list[str], references: list[list[str]], beta: float = 1.0
) -> float:
    """The best F-measure over the references of so many `common` segments; 0 where there are none."""
    best = 0.0
    for reference in references:
        if length := common(text, reference):
            precision, recall = length / len(text), length / len(reference)
            best = max(best, (1 + beta**2) * precision * recall / (recall + beta**2 * precision))
    return best


def _num_common(one: list[str], other: list[str]) -> int:
    """Segments that both have, wherever they stand."""
    return (Counter(one) & Counter(other)).total()


def _longest_run(one: list[str], other: list[str]) -> int:
    """Length of the longest list that stands in both without a gap."""
    return SequenceMatcher(None, one, other, autojunk=False).find_longest_match().size


def _longest_common(one: list[str], other: list[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = row
        row = [0]
        for i, twin in enumerate(other):
            row.append(before[i] + 1 if word == twin else max(row[i], before[i + 1]))
    return row[-1]
