"""Where the fake device cannot be made, a dry run says why and does without."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.commands import command

SCRIPT = """
import os
import sys
from pangu.dryrun.device import load_device

folder = sys.argv[1]
for changed in ({"PATH": folder, "CXX": "g++"}, {"CXX": f"{folder}/c++"}, {"XDG_CACHE_HOME": f"{folder}/c++"}):
    os.environ |= {"XDG_CACHE_HOME": folder, **changed}
    print(load_device())
"""


def test_the_reason_is_told(tmp_path: Path) -> None:
    """No compiler; a library that cannot be loaded; a folder that cannot be written."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nothing > "$2"\n', encoding="utf-8")
    compiler.chmod(0o700)
    done = command("-c", SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    missing, broken, unwritable = done.stdout.splitlines()
    assert missing == "no C++ compiler is found (install g++, or name one in CXX)"
    assert broken.startswith(f"{tmp_path}/pangu/device-")
    assert "cannot be loaded" in broken
    assert f"{compiler}/pangu cannot be written" in unwritable
