"""Latest metrics of a run as text for Prometheus, served over HTTP by a thread."""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pangu.metrics.record import StepRecord
from pangu.metrics.trackers import tracked

_log = logging.getLogger(__name__)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposed(record: StepRecord, seconds: float) -> str:
    """Return the metrics of a step at the time `seconds` in Prometheus's text format: gauges such as pangu_train_loss.

    Source: Prometheus documentation, exposition formats, version 0.0.4.
    """
    figures = {"step": float(record.step), "step_timestamp_seconds": seconds, **tracked(record)}
    lines = []
    for tag, value in figures.items():
        name = "pangu_" + re.sub(r"[^a-zA-Z0-9_]", "_", tag)
        lines += [f"# TYPE {name} gauge", f"{name} {float(value)!r}"]
    return "\n".join(lines) + "\n"


class PrometheusWriter:
    """Writer that serves the metrics of the last step at `/metrics`; without its port, it warns and does nothing."""

    def __init__(self, host: str, port: int) -> None:
        """Serve `host`:`port` until `close`."""
        self._text, self._server = "", None
        self._validated: dict[str, Any] = {}

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds that a client may take for its request

            def do_GET(handler) -> None:  # noqa: N805 - named by the library
                found = handler.path.partition("?")[0] == "/metrics"
                content = self._text.encode() if found else b"the metrics are at /metrics\n"
                handler.send_response(HTTPStatus.OK if found else HTTPStatus.NOT_FOUND)
                handler.send_header("Content-Type", CONTENT_TYPE)
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)

            def log_message(handler, *_: object) -> None:  # noqa: N805
                """Print no line per request."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            _log.warning(
                "no metrics for Prometheus at %s:%d (%s); set another metrics.prometheus_port", host, port, error
            )
            return
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int | None:
        """Port that is served, or None."""
        return None if self._server is None else self._server.server_port

    def write(self, record: StepRecord) -> None:
        """Serve the metrics of a step from now on, and the last scores, of which few steps have any."""
        figures = record.as_dict().items()
        self._validated |= {name: value for name, value in figures if name.startswith(("validation", "evaluation"))}
        self._text = exposed(replace(record, **self._validated), time.time())

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
