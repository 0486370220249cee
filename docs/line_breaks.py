"""Line breaks of Chinese text, which a browser would show as spaces."""

from __future__ import annotations

import re

_PUNCTUATION = "\u3001-\u3003\u3008-\u3011\u3014-\u301f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
_CHINESE = f"{_PUNCTUATION}\u3400-\u4dbf\u4e00-\u9fff“”‘’—…"
_TAGS = r"((?:</?[a-z][^>]*>)*)"
_BREAK = rf"{_TAGS}[ \t]*\n[ \t]*{_TAGS}"
_BETWEEN = [
    re.compile(rf"([{before}]){_BREAK}(?=[{after}])")
    for before, after in ((_CHINESE, _CHINESE), (_PUNCTUATION, r"^\s<"), (r"^\s>", _PUNCTUATION))
]
_CODE = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)


def join_lines(html: str) -> str:
    """Return HTML without the line breaks between two Chinese characters and beside full-width punctuation. Those
    between Chinese and Latin text stay: a space belongs there."""
    parts = _CODE.split(html)
    for place in range(0, len(parts), 2):
        for between in _BETWEEN:
            parts[place] = between.sub(r"\1\2\3", parts[place])
    return "".join(parts)
