"""Jinja's own sandbox with the limits on time and memory that it lacks: chat templates may come from strangers."""

from __future__ import annotations

import ctypes
import json
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pangu.prepare.messages import BEGIN, END

SECONDS = 5.0
"""CPU time limit of a template for one chunk of conversations, in seconds."""
BYTES = 1 << 30
"""Memory limit of a template, in bytes beyond the memory that the process already has."""
_LARGEST = 4096  # maximum bits of a number that a template computes
_RENDERING = threading.RLock()  # held while a template runs, because the memory limit is per process

T = TypeVar("T")


class Allowance:
    """Remaining time of a template, in whichever thread it runs; a context manager."""

    def __init__(self, seconds: float | None = None) -> None:
        """Prepare a limit of `seconds` of CPU time; None means `SECONDS`."""
        self._limit = self._left = SECONDS if seconds is None else seconds
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._runs_since: float | None = None
        self._ended = False
        self._thread = threading.get_ident()
        # CPU time, so that other processes do not use up a template's time; macOS has no per-thread clock
        self._clock = time.pthread_getcpuclockid(self._thread) if hasattr(time, "pthread_getcpuclockid") else None
        self._watch = threading.Thread(target=self._watch_thread, name="template-time", daemon=True)

    def __enter__(self) -> Allowance:
        """Start the thread that watches the clock."""
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the watching thread."""
        self._closed.set()
        self._watch.join()

    def spend(self, action: Callable[[], T]) -> T:
        """Run `action`; raise TimeoutError if it exceeds the remaining time, MemoryError if it exceeds `BYTES`."""
        with _RENDERING, _bounded_memory():
            # the error of the watching thread may arrive at any bytecode in here, also when the action has just ended
            try:
                if self._left <= 0:
                    raise TimeoutError
                with self._lock:
                    self._runs_since = self._now()
                try:
                    return action()
                finally:
                    self._stop()
            except TimeoutError as error:
                limit = f"{self._limit:g} s for the conversations of one chunk"
                raise TimeoutError(f"it takes longer than {limit}") from error

    def _stop(self) -> None:
        with self._lock:
            if self._runs_since is not None:
                self._left -= self._now() - self._runs_since
            self._runs_since = None
        if self._ended:
            _raise_in_thread(self._thread, None)
            raise TimeoutError

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    def _watch_thread(self) -> None:
        while not self._closed.wait(0.02):
            with self._lock:
                since = self._runs_since
                if since is not None and self._now() - since > self._left:
                    self._left, self._runs_since, self._ended = 0.0, None, True
                    _raise_in_thread(self._thread, TimeoutError)


def _raise_in_thread(thread: int, error: type[BaseException] | None) -> None:
    """Make a thread raise an error at its next bytecode; None withdraws an error that is still pending."""
    # a signal would reach the main thread only
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error and ctypes.py_object(error))


@contextmanager
def _bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    limit = int(statm.read_text().split()[0]) * resource.getpagesize() + BYTES if statm.exists() else soft
    within = min((bound for bound in (limit, soft, hard) if bound != resource.RLIM_INFINITY), default=soft)
    resource.setrlimit(resource.RLIMIT_AS, (within, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment that chat templates are written for, equivalent to that of transformers."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Marked, "jinja2.ext.loopcontrols"])
    environment.filters |= {"tojson": _to_json, "round": _rounded}
    environment.globals["raise_exception"] = _refuse
    return environment


class _Marked(Extension):
    """Tags `{% generation %}` and `{% endgeneration %}` around a response, as in transformers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox that limits the size of numbers, because Python cannot be interrupted while it computes one."""

    intercepted_binops = frozenset({"*", "**", "/", "//", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length())
        return super().call_binop(context, operator, left, right)


def _check_size(bits: int) -> None:
    if bits > _LARGEST:
        raise SecurityError("it computes with numbers that are too large")


def _rounded(value: Any, precision: int = 0, method: str = "common") -> Any:
    """Apply Jinja's `round` after a size check, because it computes 10 to the power of `precision`."""
    _check_size(4 * abs(precision) + (value.bit_length() if isinstance(value, int) else 0))
    return FILTERS["round"](value, precision, method)


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _to_json(value: Any, **options: Any) -> str:
    """Serialize to JSON without the HTML escapes of Jinja's own filter."""
    allowed = {name: option for name, option in options.items() if name in ("indent", "separators", "sort_keys")}
    return json.dumps(value, ensure_ascii=False, **allowed)
