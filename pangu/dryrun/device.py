"""A CUDA device that computes nothing, on a machine without one.

Fake tensors (shapes without memory) of a `cuda` device can be created by torch's build for CPUs, but backward, streams
and generators end the process: no guard of such a device is registered. device.cpp registers one. It is compiled once
for each version of torch, and must be loaded before torch is imported, so that a dry run is a process of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_SOURCE = Path(__file__).with_name("device.cpp")
_ROOM = 256
"""Entries of the log that are read at a time."""


class StreamEntry(NamedTuple):
    """What was done to a stream or an event."""

    kind: int
    """0: the event is recorded on the stream; 1: the stream waits for the event; 2 to 4: the host waits for the stream,
    for the device, for the event."""
    event: int
    stream: int


class FakeDevice:
    """The loaded library."""

    def __init__(self, library: Path) -> None:
        assert "torch" not in sys.modules, "torch reads once what devices there are"
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._entries = (ctypes.c_int64 * (3 * _ROOM))()
        self._library.pangu_current_stream.restype = self._library.pangu_stream_log.restype = ctypes.c_int64
        _let_torch_find_it()

    def current_stream(self) -> int:
        """Number of the calling thread's stream; 0: the default one."""
        return self._library.pangu_current_stream()

    def log(self) -> Iterator[StreamEntry]:
        """What was done to streams and events since this was last asked."""
        while number := self._library.pangu_stream_log(self._entries, ctypes.c_int64(_ROOM)):
            yield from (StreamEntry(*self._entries[3 * i : 3 * i + 3]) for i in range(number))


def load_device() -> FakeDevice | str:
    """The device, compiled if it has not been yet, or why there is none: then tensors are said to be a CPU's."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return "torch is not installed"
    home = Path(torch.submodule_search_locations[0])
    if any((home / "lib").glob("libtorch_cuda*")):
        return "this torch has a CUDA backend of its own"
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pangu"
    # it is linked to this very torch; homes are shared by machines
    made_for = f"{_SOURCE.read_text(encoding='utf-8')}{version('torch')}{home}{platform.machine()}"
    library = cache / f"device-{hashlib.sha256(made_for.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        if compiler is None:
            return "no C++ compiler is found (CXX names one)"
        problem = _compile(compiler, home, library)
        if problem:
            return problem
    try:
        return FakeDevice(library)
    except OSError as error:
        return f"{library} cannot be loaded ({error}); without that file it is made anew"


def _compile(compiler: str, home: Path, library: Path) -> str | None:
    """Make the library from device.cpp; what went wrong, if anything did."""
    lib = home / "lib"
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, "-O0", "-w", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(_SOURCE)]
            command += ["-o", str(made), f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{compiler} cannot compile {_SOURCE.name}: {next(iter(done.stderr.splitlines()), '')}"
            made.replace(library)  # at once, also where several do it at a time
    except OSError as error:
        return f"{library.parent} cannot be written ({error}); XDG_CACHE_HOME names another folder"
    return None


def _let_torch_find_it() -> None:
    """Answer what torch's Python asks its CUDA build before it believes that there is a device."""
    import torch.cuda
    import torch.utils._triton

    # where Triton is installed, it would look for the driver
    torch.utils._triton.has_triton = lambda: False  # type: ignore[assignment]
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
