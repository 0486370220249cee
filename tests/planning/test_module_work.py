"""Where counts of modules are kept, and what of it is believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pangu.planning.module_work import _read, cache_folder


@pytest.mark.parametrize("content", ["", "[", "{}", "[1]", "[{}]", '[{"phases": {}}]', "\xff"])
def test_a_file_that_nobody_can_have_counted_is_not_read(content: str, tmp_path: Path) -> None:
    file = tmp_path / "modules.json"
    file.write_text(content, encoding="latin-1")
    assert _read(file) is None
    assert _read(tmp_path) is None


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/.cache/pangu")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder().is_absolute()
