"""Word segmentation identical to jieba's, several times faster: one pass over its dictionary and one over its HMM.

jieba cuts a run of Han characters, letters and digits along the likeliest path through the words of its dictionary;
adjacent single characters of that path are cut again by a hidden Markov model (HMM) of characters (the Viterbi
algorithm in both cases). Sums are computed in jieba's order, so that rounding breaks near ties as it does there.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from math import inf, log
from operator import add

SPACE, NEWLINE = "▂", "▃"
"""PanGu-α's substitutes for space and newline, which jieba and SentencePiece would lose (U+2582, U+2583)."""

_SHORT = 12  # maximum length of cached runs: English words, numbers, punctuation, frequent phrases
_REMEMBERED = 1 << 16  # maximum number of cached runs, some 15 MB
_ONE_BY_ONE = re.compile("\r\n|.", re.DOTALL)  # jieba's pieces of the text between the runs that it cuts into words

_BEGIN, _END, _INSIDE, _ALONE = range(4)  # states of a character, "BEMS" in jieba's tables


class Segmenter:
    """PanGu-α's text preparation: jieba's words joined by spaces, with `SPACE` and `NEWLINE` for the real ones."""

    def __init__(self) -> None:
        """Load jieba's dictionary and hidden Markov model."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old escapes and of setuptools
            import jieba  # noqa: PLC0415 - optional package
            from jieba import finalseg  # noqa: PLC0415 - optional package
        # jieba's `initialize` would load the dictionary from a cache in the folder for temporary files, where anyone
        # may have placed another one, and is no faster
        counts, total = jieba.Tokenizer.gen_pfdict(jieba.Tokenizer().get_dict_file())
        self._unknown = log(1) - log(total)
        # Log probability of each word; -inf for a string that is only a prefix of words
        self._weights = {word: log(count) - log(total) if count else -inf for word, count in counts.items()}
        self._runs: re.Pattern[str] = jieba.re_han_default
        self._characters = _CharacterModel(finalseg)
        self._remembered = lru_cache(_REMEMBERED)(self._cut)

    def __call__(self, text: str) -> str:
        """Return the prepared text."""
        remembered, cut = self._remembered, self._cut
        return " ".join([(remembered if len(run) <= _SHORT else cut)(run) for run in self._runs.split(text) if run])

    def _cut(self, run: str) -> str:
        """Return the prepared form of a run that jieba cuts into words, or of a run between those."""
        if self._runs.match(run):
            return " ".join(self._words(run))
        return " ".join(_ONE_BY_ONE.findall(run.replace(" ", SPACE))).replace("\n", NEWLINE)

    def _words(self, run: str) -> list[str]:
        words: list[str] = []
        ends = self._likeliest(run)
        begin = single = 0
        while begin < len(run):
            end = ends[begin]
            if end > begin + 1:
                if single < begin:
                    words += self._singles(run[single:begin])
                words.append(run[begin:end])
                single = end
            begin = end
        words += self._singles(run[single:])
        return words

    def _likeliest(self, run: str) -> list[int]:
        """Return the end of the word beginning at each position, on the likeliest path from there; ties: longest."""
        size, weight_of = len(run), self._weights.get
        scores, ends = [0.0] * (size + 1), [0] * size
        for begin in range(size - 1, -1, -1):
            best, stop = -inf, begin + 1
            weight = weight_of(run[begin])
            while weight is not None:
                score = weight + scores[stop]
                if score >= best:
                    best, ends[begin] = score, stop
                stop += 1
                if stop > size:
                    break
                weight = weight_of(run[begin:stop])
            if best == -inf:
                best, ends[begin] = self._unknown + scores[begin + 1], begin + 1
            scores[begin] = best
        return ends

    def _singles(self, characters: str) -> list[str]:
        if len(characters) > 1 and self._weights.get(characters, -inf) == -inf:
            return self._characters.words(characters)
        return list(characters)


class _CharacterModel:
    """Hidden Markov model of jieba: each Han character begins, ends, is inside, or is itself a word."""

    def __init__(self, finalseg: object) -> None:
        self._han: re.Pattern[str] = finalseg.re_han  # type: ignore[attr-defined]
        self._others: re.Pattern[str] = finalseg.re_skip  # type: ignore[attr-defined]
        start, steps = finalseg.start_P, finalseg.trans_P  # type: ignore[attr-defined]
        tables = [finalseg.emit_P[state] for state in "BEMS"]  # type: ignore[attr-defined]
        rare: float = finalseg.MIN_FLOAT  # type: ignore[attr-defined]
        self._emissions = {
            character: tuple(table.get(character, rare) for table in tables) for character in set().union(*tables)
        }
        self._rare = (rare,) * 4
        self._start = tuple(start[state] for state in "BEMS")
        self._steps = tuple(steps[a][b] for a, b in ("EB", "SB", "BE", "ME", "BM", "MM", "ES", "SS"))

    def words(self, characters: str) -> list[str]:
        words: list[str] = []
        for part in self._han.split(characters):
            if self._han.match(part):
                words += self._han_words(part)
            else:
                words += filter(None, self._others.split(part))
        return words

    def _han_words(self, part: str) -> list[str]:
        """Return the words; one begins at each character whose likeliest state is begin or alone."""
        came_from, state = self._likeliest(part)
        words, stop = [], len(part)
        for place in range(len(part) - 1, 0, -1):
            if state in (_BEGIN, _ALONE):
                words.append(part[place:stop])
                stop = place
            state = came_from[place - 1][state]
        words.append(part[:stop])
        return words[::-1]

    def _likeliest(self, part: str) -> tuple[list[tuple[int, int, int, int]], int]:
        """Return the likeliest previous state per state of each character but the first, and the last one's state."""
        # on ties jieba takes the later letter of BEMS
        end_begin, alone_begin, begin_end, inside_end, begin_inside, inside_inside, end_alone, alone_alone = self._steps
        came_from = []
        emissions, rare = self._emissions.get, self._rare
        begin, end, inside, alone = map(add, self._start, emissions(part[0], rare))
        for character in part[1:]:
            to_begin, to_end, to_inside, to_alone = emissions(character, rare)
            begin_1, begin_2 = end + end_begin + to_begin, alone + alone_begin + to_begin
            end_1, end_2 = begin + begin_end + to_end, inside + inside_end + to_end
            inside_1, inside_2 = begin + begin_inside + to_inside, inside + inside_inside + to_inside
            alone_1, alone_2 = end + end_alone + to_alone, alone + alone_alone + to_alone
            came_from.append(
                (
                    _ALONE if begin_2 >= begin_1 else _END,
                    _INSIDE if end_2 >= end_1 else _BEGIN,
                    _INSIDE if inside_2 >= inside_1 else _BEGIN,
                    _ALONE if alone_2 >= alone_1 else _END,
                )
            )
            begin, end = max(begin_1, begin_2), max(end_1, end_2)
            inside, alone = max(inside_1, inside_2), max(alone_1, alone_2)
        return came_from, _ALONE if alone >= end else _END
