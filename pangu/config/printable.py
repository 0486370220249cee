"""Text of others on a terminal: nothing in it moves the cursor, changes a title or turns the direction of writing."""

from __future__ import annotations

import logging
import re

# control characters but for newline and tab, line separators, directions of writing, halves of surrogate pairs
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with each character that a terminal would obey instead of showing written as its escape, `\\x1b`."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class PrintableFormatter(logging.Formatter):
    """Log messages as they are, made printable: they quote names and values of files."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
