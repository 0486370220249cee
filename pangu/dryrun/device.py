"""Fake CUDA device that computes nothing, for any build of torch and on any machine.

Fake tensors (shapes without memory) can be put on a `cuda` device everywhere, but backward, streams and generators need
a device guard and hooks: a CPU build has none, and those of a CUDA build ask for a driver or open the real device.
device.cpp replaces them. It is compiled once per version of torch and must be loaded before torch is imported, so a
dry run needs its own process.
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
from typing import Any, NamedTuple

from pangu.dryrun.cache import cache_folder, is_usable

_SOURCE = Path(__file__).with_name("device.cpp")
_ENTRIES_PER_READ = 256
_FUSED = ("_fused_rms_norm", "silu_backward")
"""Operators with a kernel of their own on a GPU; torch takes them apart on a device that has none."""


class StreamEntry(NamedTuple):
    """Operation: 0 record event on stream, 1 stream waits for event; the host waits for 2 stream, 3 device, 4 event."""

    kind: int
    event: int
    stream: int


class FakeDevice:
    """Library with the device's guard and hooks, loaded into this process."""

    def __init__(self, library: Path) -> None:
        """Load the library, then import torch."""
        assert "torch" not in sys.modules, "torch asks for its hooks once, while it is imported"
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._entries = (ctypes.c_int64 * (3 * _ENTRIES_PER_READ))()
        self._library.pangu_current_stream.restype = self._library.pangu_stream_log.restype = ctypes.c_int64
        self._kernels = pretend_devices(1)
        self._library.pangu_register_guard()  # after the import, in which a CUDA build registers its own guard

    def current_stream(self) -> int:
        """Return the number of the calling thread's stream; 0 is the default one."""
        return self._library.pangu_current_stream()

    def log(self) -> Iterator[StreamEntry]:
        """Yield the operations on streams and events since the last call."""
        while number := self._library.pangu_stream_log(self._entries, ctypes.c_int64(_ENTRIES_PER_READ)):
            yield from (StreamEntry(*self._entries[3 * i : 3 * i + 3]) for i in range(number))


def load_device() -> FakeDevice | str:
    """Return the fake device, compiled if needed, or the reason why there is none."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return "torch is not installed"
    home, cache = Path(torch.submodule_search_locations[0]), cache_folder()
    if not is_usable(cache):  # never load a library that someone else may have written
        return f"{cache} is not a writable folder that you own alone; set XDG_CACHE_HOME to another folder"
    # the library links against this installation of torch, and several machines may share a home folder
    identity = f"{_SOURCE.read_text(encoding='utf-8')}{version('torch')}{home}{platform.machine()}"
    library = cache / f"device-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists() and (problem := _compile(home, library)):
        return problem
    try:
        return FakeDevice(library)
    except OSError as error:
        return f"{library} cannot be loaded ({error}); delete the file, and it is compiled again"


def _compile(home: Path, library: Path) -> str | None:
    """Compile device.cpp into the library; return an error message if that fails."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler found (install g++, or set CXX)"
    lib = home / "lib"
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [compiler, "-O0", "-w", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(_SOURCE)]
            command += ["-o", str(made), f"-L{lib}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{lib}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = next(iter(done.stderr.splitlines()), f"status {done.returncode}")
                return f"{compiler} cannot compile {_SOURCE.name} ({said}); set CXX to another compiler"
            made.replace(library)  # atomic: several processes may compile at once
    except OSError as error:
        return f"{library.parent} cannot be written ({error}); set XDG_CACHE_HOME to another folder"
    return None


def pretend_devices(count: int) -> Any:
    """Make torch's Python code see `count` CUDA devices without asking a driver or opening a real device.

    Returns:
        Library of kernels that a CPU build lacks, in force while somebody holds it; fake tensors never run them.
    """
    # this module is imported before torch, which must not be loaded before the library
    import torch._subclasses.fake_tensor  # noqa: PLC0415
    import torch.cuda  # noqa: PLC0415
    import torch.utils._triton  # noqa: PLC0415

    torch.utils._triton.has_triton = lambda: False  # type: ignore[assignment]  # it would look for the driver
    torch._subclasses.fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]  # it would allocate
    torch.cuda.is_current_stream_capturing = lambda: False  # before torch 2.13 optimizers ask in each step
    torch._library.simple_registry.find_torch_dispatch_rule = lambda *_: None  # there are none
    torch.cuda._lazy_init = lambda: None
    torch.cuda.is_available = lambda: count > 0
    torch.cuda.device_count = lambda: count
    kernels = torch.library.Library("aten", "IMPL")
    for name in _FUSED if count else ():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            kernels.impl(name, lambda *_: None, "CUDA")
    return kernels
