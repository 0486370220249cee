"""Texts and files that several tests share."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pangu.data.indexed import IndexedTokens, open_indexed
from pangu.prepare.indexed_writer import IndexedWriter


def library_files(*names: str) -> list[Path]:
    """Files of the running Python's standard library."""
    return [Path(sysconfig.get_paths()["stdlib"]) / name for name in names]


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of a few files in place of the real one, so that it is prepared in no time."""
    root = tmp_path / "library"
    (root / "package" / "test").mkdir(parents=True)
    for source in library_files("bisect.py", "textwrap.py", "heapq.py", "queue.py", "shlex.py"):
        (root / source.name).write_bytes(source.read_bytes())
    (root / "package" / "code.py").write_text('"""Says a."""\n\n\ndef f():\n\t"""Says b."""\n', encoding="utf-8")
    (root / "package" / "test" / "test_code.py").write_text("left_out = True\n", encoding="utf-8")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return root


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[[str, int, Sequence[Sequence[int]]], IndexedTokens]:
    """Writes documents under a name and opens them."""

    def write(name: str, vocab: int, documents: Sequence[Sequence[int]]) -> IndexedTokens:
        with IndexedWriter(tmp_path / name, vocab) as writer:
            for document in documents:
                writer.add(document)
        return open_indexed(tmp_path / name)

    return write
