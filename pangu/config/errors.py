"""Errors that are the user's to mend, and the one form in which they are told."""

from __future__ import annotations

from dataclasses import dataclass


class UserError(Exception):
    """Something outside the program is wrong: a key, a file, the number of devices, the disk.

    The message is for a person: it names the key or file, the value, the rule and what would work. Commands print it
    without a traceback and end with a status that is not 0.
    """


@dataclass(frozen=True)
class Problem:
    """One contradiction in a configuration."""

    key: str
    """Dotted name of the key, or several joined by commas."""
    value: object
    """What the user gave."""
    rule: str
    """What a value has to fulfil."""
    works: str = ""
    """The nearest values that work."""

    def __str__(self) -> str:
        text = f"{self.key} = {self.value}: {self.rule}"
        return f"{text}; {self.works}" if self.works else text


class ConfigError(UserError):
    """All contradictions of one configuration, reported at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{count} in the configuration:\n{lines}")
