"""Writers for TensorBoard and for experiment trackers; no failure of a tracker stops or delays training."""

from __future__ import annotations

import importlib
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pangu.common.errors import writing
from pangu.common.files import open_regular, write_atomically
from pangu.metrics.record import StepRecord

_log = logging.getLogger(__name__)
_root_log = logging.getLogger("pangu")
START_SECONDS = 20
FINISH_SECONDS = 60
"""Longest time in seconds that a tracker may take to start and to finish."""
_GROUPS = {
    "train": (
        *("loss", "mtp_loss", "max_attention_logit", "lr", "grad_norm", "tokens", "skipped", "loss_scale", "padding"),
        *("continued_from", "rollbacks", "failed_saves", "failed_copies", "failed_uploads", "damaged_checkpoints"),
    ),
    "speed": ("goodput", "step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "peak_memory_gib", "data_wait_s"),
    "copies": ("copies_gib", "copies_sent_gib"),
    "validation": ("validation_loss", "validation_perplexity"),
}


def tracked(record: StepRecord) -> dict[str, float]:
    """Return metrics under the names by which TensorBoard and trackers group them, e.g. `train/loss`, without None."""
    figures = {
        f"{group}/{name.removeprefix('validation_')}": value
        for group, names in _GROUPS.items()
        for name in names
        if (value := getattr(record, name)) is not None
    }
    figures |= {
        f"validation/{name}/{kind}": figure
        for name, source_figures in (record.validation_sources or {}).items()
        for kind, figure in source_figures.items()
    }
    figures |= {f"evaluation/{name}": figure for name, figure in (record.evaluation or {}).items()}
    figures |= {f"experts/{name}": figure for name, figure in (record.experts or {}).items()}
    figures |= {f"trust_ratio/{name}": ratio for name, ratio in (record.trust_ratios or {}).items()}
    return figures | {f"slow_rank/{rank}": factor for rank, factor in (record.slow_ranks or {}).items()}


class TensorBoardWriter:
    """Writer of TensorBoard event files, with the step on the x-axis."""

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        """Open `folder`, hiding its events after `resumed_step`; raise `UserError` if it is not writable."""
        # Imported late: it takes more than a second, and not every run needs it.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional package

        self._folder = folder
        with writing(folder):
            self._events = SummaryWriter(str(folder), purge_step=resumed_step + 1, flush_secs=30)

    def write(self, record: StepRecord) -> None:
        """Queue the metrics of a step; raise `UserError` if the disk is full."""
        with writing(self._folder):
            for tag, value in tracked(record).items():
                self._events.add_scalar(tag, value, record.step)

    def close(self) -> None:
        """Write the queued events and close the files."""
        with writing(self._folder):
            self._events.close()


@dataclass(frozen=True)
class TrackedRun:
    """Run as a tracker sees it."""

    output: Path
    """Run folder."""
    config: Mapping[str, Any]
    """Resolved configuration."""
    project: str
    name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    resumed_step: int = 0
    """Step of the checkpoint that the run continues from; 0: a new run."""

    def folder(self, tracker: str) -> Path:
        """Return the folder for the files of a tracker."""
        return self.output / tracker if tracker == "wandb" else self.output / "trackers" / tracker

    def known_id(self, tracker: str) -> str | None:
        """Return the id that a tracker gave to this run, or None for a new run: resumed runs continue their curves."""
        path = self.folder(tracker) / "run-id"
        if self.resumed_step > 0 and path.exists():
            with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
                return file.read(100).strip() or None
        return None

    def keep_id(self, tracker: str, new: str) -> str:
        """Write the id of the run at a tracker into the run folder, and return it."""
        path = self.folder(tracker) / "run-id"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, new.encode())
        return new


class Tracker(Protocol):
    """Connection to a tracker, used by one thread."""

    def log(self, figures: dict[str, float], step: int) -> object:
        """Send the metrics of a step, named as by `tracked`."""

    def finish(self, status: int) -> object:
        """Send what is left; `status` is 0 unless the run failed."""


class Alert(NamedTuple):
    """Log line that somebody should see now (`pangu.training.alerts`)."""

    kind: str
    message: str


class AlertHandler(logging.Handler):
    """Handler that passes the alerts of a log to a function."""

    def __init__(self, receive: Callable[[Alert], object]) -> None:
        """Pass the alerts to `receive`, once a logger has this handler."""
        super().__init__()
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a record that asks for an alert."""
        if kind := getattr(record, "alert", None):
            self._receive(Alert(kind, record.getMessage()))


class Service(NamedTuple):
    """Way to connect to a tracker."""

    name: str
    package: str
    """Python package that it needs."""
    start: Callable[[TrackedRun], Tracker]
    """Function that connects; it may raise any error."""
    give_up: Callable[[], object] = lambda: None
    """Function that is called after an error."""


class TrackerWriter:
    """Writer that passes metrics, and alerts of the log, to a thread that talks to a tracker.

    Alerts go to trackers with a method `alert(kind, message)`. Connecting, sending and finishing may fail or hang for
    minutes on a cluster without internet access, so only the thread waits. A failure becomes one warning, after which
    the metrics go to the other writers alone.
    """

    def __init__(self, service: Service, run: TrackedRun) -> None:
        """Start the thread and return at once."""
        # What is left to send; an integer is the exit status and ends the thread.
        self._queue: queue.SimpleQueue[StepRecord | Alert | int] = queue.SimpleQueue()
        self._service, self._failed = service, False
        self._alerts = AlertHandler(self._queue.put)
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        try:
            # Not in the thread: concurrent imports from two threads can see half-initialized modules.
            importlib.import_module(service.package)
        except Exception as error:
            self._fail(error)
        else:
            self._thread.start()
            _root_log.addHandler(self._alerts)

    def write(self, record: StepRecord) -> None:
        """Queue the metrics of a step."""
        if not self._failed:
            self._queue.put(record)

    def close(self) -> None:
        """Send the queued metrics, giving up after about a minute."""
        _root_log.removeHandler(self._alerts)
        if self._failed:
            return
        # While an exception passes through the caller's `finally`, the run is marked as failed.
        self._queue.put(0 if sys.exc_info()[0] is None else 1)
        self._thread.join(START_SECONDS + FINISH_SECONDS)
        if self._thread.is_alive():
            self._fail(TimeoutError(f"it did not finish within {START_SECONDS + FINISH_SECONDS} s"))

    def _fail(self, error: BaseException) -> None:
        if self._failed:  # one warning is enough
            return
        reason = (str(error).splitlines() or [""])[0][:200]
        name = self._service.name
        _log.warning("%s is disabled for the rest of this run (%s: %s)", name, type(error).__name__, reason)
        self._failed = True  # last, as `close` no longer waits for the thread then

    def _work(self, run: TrackedRun) -> None:
        try:
            tracker = self._service.start(run)
            alert = getattr(tracker, "alert", None)
            while not isinstance(item := self._queue.get(), int):
                if isinstance(item, StepRecord):
                    tracker.log(tracked(item), item.step)
                elif alert is not None:
                    alert(*item)
            tracker.finish(item)
        except Exception as error:
            self._fail(error)
            try:
                self._service.give_up()
            except Exception:
                _log.debug("%s could not be shut down", self._service.name, exc_info=True)
