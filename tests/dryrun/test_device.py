"""Where the fake device cannot be made, a dry run says why and does without."""

from __future__ import annotations

import os
from pathlib import Path

from tests.end_to_end.commands import command

SCRIPT = """
import os
import sys
import tempfile
from pangu.dryrun.device import load_device

folder = sys.argv[1]
file = f"{folder}/c++"
for cache, temporary, changed in (
    (folder, folder, {"PATH": folder, "CXX": "g++"}),
    (folder, folder, {"CXX": file}),
    (file, folder, {}),
    (file, file, {}),
):
    os.environ |= {"XDG_CACHE_HOME": cache, **changed}
    tempfile.tempdir = temporary
    print(load_device())
"""


def test_the_reason_is_told(tmp_path: Path) -> None:
    """No compiler; a library that cannot be loaded, in the temporary folder too; no folder that can be written."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nothing > "$2"\n', encoding="utf-8")
    compiler.chmod(0o700)
    done = command("-c", SCRIPT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    missing, broken, temporary, unwritable = done.stdout.splitlines()
    assert missing == "no C++ compiler found (install g++, or set CXX)"
    assert broken.startswith(f"{tmp_path}/pangu/device-")
    assert "cannot be loaded" in broken
    assert temporary.startswith(f"{tmp_path}/pangu-{os.getuid()}/device-")
    assert unwritable.startswith(f"{compiler}/pangu-{os.getuid()} is not a writable folder that you own")
