"""Writers of the metrics of a run, which exist on one process only."""

from __future__ import annotations

import logging
import math
import re
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from pangu.common.errors import UserError, writing
from pangu.common.files import flush, open_regular, write_atomically
from pangu.config.schema import MetricsConfig
from pangu.metrics.record import StepRecord, read_lines, to_json
from pangu.metrics.services import service_of, wandb_service
from pangu.metrics.text import compact, duration, figure
from pangu.metrics.trackers import TensorBoardWriter, TrackedRun, TrackerWriter, tracked

log = logging.getLogger("pangu")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Type of Prometheus's text format."""


class Writer(Protocol):
    """Destination of the metrics of each step."""

    def write(self, record: StepRecord) -> None:
        """Write the metrics of one step; steps come in ascending order."""

    def close(self) -> None:
        """Finish writing; no write follows."""


class ForecastWriter(Writer, Protocol):
    """Writer that compares the steps with a forecast of the dry run."""

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast, with the seconds of each part of a step as `terms_s`, and the measurements."""

    def set_profile(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Keep the seconds by category of a profiled step, of each rank in order, for the comparison."""


class ConsoleWriter:
    """Writer of progress lines: the first, every `every`-th and last step, and each validation and evaluation."""

    def __init__(self, every: int, total_steps: int, console: Console | None = None) -> None:
        """Print to `console`, or to standard output."""
        self._every, self._total_steps, self._first = every, total_steps, True
        self._recent_s: deque[float] = deque(maxlen=50)
        # rich omits colors when the output is a file or a pipe
        self._console = console or Console(highlight=False)

    def write(self, record: StepRecord) -> None:
        """Print the step's line if it is due."""
        self._recent_s.append(record.step_time_s)
        # the median of recent steps is robust against checkpoints and warm-up
        seconds_left = statistics.median(self._recent_s) * max(0, self._total_steps - record.step)
        measured = record.validation_loss is not None or record.evaluation is not None
        due = record.step % self._every == 0 or record.step == self._total_steps or measured
        if due or self._first:
            self._console.print(progress_line(record, self._total_steps, seconds_left), soft_wrap=True)
        self._first = False

    def close(self) -> None:
        """Do nothing, as no resource is held open."""


def progress_line(record: StepRecord, total_steps: int, seconds_left: float) -> Text:
    """Format `step 12/40 | loss 5.1234 | lr 1.00e-04 | grad norm 0.912 | 12.3k tokens/s | MFU 38.2 % | ...`."""
    parts = [
        (f"step {record.step:>{len(str(total_steps))}}/{total_steps}", ""),
        (f"loss {record.loss:.4f}", "bold" if math.isfinite(record.loss) else "bold red"),
        (f"lr {record.lr:.2e}", ""),
        (f"grad norm {record.grad_norm:.3f}", "" if math.isfinite(record.grad_norm) else "red"),
        (f"{compact(record.tokens_per_s)} tokens/s", ""),
        (f"MFU {'n/a' if record.mfu is None else f'{100 * record.mfu:.1f} %'}", ""),
        (f"{record.peak_memory_gib:.2f} GiB", ""),
        (f"left {duration(seconds_left)}", ""),
    ]
    if record.mtp_loss is not None:
        parts.append((f"mtp loss {record.mtp_loss:.4f}", ""))
    if record.max_attention_logit is not None:
        parts.append((f"max logit {record.max_attention_logit:.1f}", ""))
    if record.loss_scale is not None:
        parts.append((f"scale {record.loss_scale:g}", ""))
    if record.padding is not None:
        parts.append((f"padding {100 * record.padding:.1f} %", ""))
    if record.skipped:
        parts.append((f"skipped {record.skipped}", "yellow"))
    if record.validation_loss is not None and record.validation_perplexity is not None:
        text = f"validation loss {record.validation_loss:.4f} (perplexity {figure(record.validation_perplexity)})"
        parts.append((text, "bold cyan"))
    for name, figures in (record.validation_sources or {}).items():
        parts.append((f"{name} {figures['loss']:.4f} ({figure(figures['perplexity'])})", "cyan"))
    parts += [(f"{name} {figure(value)}", "cyan") for name, value in (record.evaluation or {}).items()]
    return Text(" | ").join(Text(text, style) for text, style in parts)


class JsonLinesWriter:
    """Writer of metrics.jsonl: one JSON object per step, readable at once, and on disk after a flush (checkpoints)."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Open the file, keeping its lines up to `resumed_step`; raise `UserError` if it cannot be written."""
        # Later lines, and a line cut short by a kill, are dropped, as those steps will be repeated.
        self._path = path
        with writing(path):
            lines = [line for line, fields in read_lines(path) if fields["step"] <= resumed_step]
            # Replaced atomically: a crash here must not lose the metrics so far.
            write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
            flush(path.parent)
            self._file = open_regular(path, "a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append the line of a step; raise `UserError` if the disk is full."""
        with writing(self._path):
            self._file.write(to_json(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


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

        class MetricsHandler(BaseHTTPRequestHandler):
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
            self._server = ThreadingHTTPServer((host, port), MetricsHandler)
        except OSError as error:
            log.warning(
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


def make_writers(
    config: MetricsConfig, output: Path, total_steps: int, resumed_step: int, resolved_config: dict[str, Any]
) -> list[Writer]:
    """Return the writers of a configuration, which write into the run folder `output`.

    The run continues from the checkpoint of `resumed_step`, 0 for a new run; trackers show `resolved_config` as its
    configuration. Raise `UserError` if the run folder cannot be written or a tracker is unknown.
    """
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    writers: list[Writer] = [
        JsonLinesWriter(output / "metrics.jsonl", resumed_step),
        ConsoleWriter(config.every, total_steps),
    ]
    if config.tensorboard:
        writers.append(TensorBoardWriter(output / "tensorboard", resumed_step))
    names = config.wandb_project, config.run_name, config.run_group, config.run_tags
    run = TrackedRun(output, resolved_config, *names, resumed_step)
    services = [wandb_service(config.wandb)] if config.wandb != "off" else []
    services += map(service_of, config.trackers)
    writers += [TrackerWriter(service, run) for service in services]
    if config.prometheus_port is not None:
        writers.append(PrometheusWriter(config.prometheus_host, config.prometheus_port))
    return writers


class Writers:
    """Writers of a run's metrics; a writer that fails is a warning, because the run matters more than its metrics."""

    def __init__(self) -> None:
        """Start without writers."""
        self._writers: list[Writer] = []
        self._failing: set[str] = set()
        """Kinds of writers that failed last time, for which no further warning is logged."""

    def open(self, writers: Sequence[Writer]) -> None:
        """Replace the writers."""
        self.close()
        self._writers = [*writers]

    def write(self, record: StepRecord) -> None:
        """Write the metrics of one step."""
        for writer in self._writers:
            self._try(writer, partial(writer.write, record))

    def close(self) -> None:
        """Close and forget all writers."""
        writers, self._writers = self._writers, []
        for writer in writers:
            self._try(writer, writer.close)

    def _try(self, writer: Writer, action: Callable[[], None]) -> None:
        name = type(writer).__name__
        try:
            action()
        except UserError as error:
            if name not in self._failing:
                log.warning("%s; the run continues without these metrics", error)
            self._failing.add(name)
        else:
            self._failing.discard(name)
