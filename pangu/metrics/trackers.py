"""Writers for TensorBoard and for Weights & Biases; no failure of the latter stops or delays training."""

from __future__ import annotations

import logging
import netrc
import os
import queue
import secrets
import sys
import threading
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pangu.common.errors import writing
from pangu.common.files import open_regular, write_atomically
from pangu.metrics.record import StepRecord

_log = logging.getLogger(__name__)
_START_SECONDS = 20
_FINISH_SECONDS = 60
_GROUPS = {
    "train": (
        "loss",
        "mtp_loss",
        "max_attention_logit",
        "lr",
        "grad_norm",
        "tokens",
        "skipped",
        "loss_scale",
        "padding",
        "continued_from",
        "rollbacks",
        "failed_saves",
        "failed_uploads",
        "damaged_checkpoints",
    ),
    "speed": ("goodput", "step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "peak_memory_gib", "data_wait_s"),
    "validation": ("validation_loss", "validation_perplexity"),
}


def tracked(record: StepRecord) -> dict[str, float]:
    """Return metrics under the names by which TensorBoard and wandb group them, e.g. `train/loss`, without None."""
    figures = {
        f"{group}/{name.removeprefix('validation_')}": value
        for group, names in _GROUPS.items()
        for name in names
        if (value := getattr(record, name)) is not None
    }
    figures |= {
        f"validation/{name}/{kind}": figure
        for name, of_source in (record.validation_sources or {}).items()
        for kind, figure in of_source.items()
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


def logged_in() -> bool:
    """Return whether this machine holds a wandb key, in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    candidates = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in candidates:
        try:
            entry = netrc.netrc(Path(path).expanduser()).authenticators(host)
            if entry and entry[2]:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def run_id(output: Path, resumed_step: int) -> str:
    """Return the run's wandb id, kept in the run folder: resumed runs continue their curves, new ones start others."""
    path = output / "wandb" / "run-id"
    if resumed_step > 0 and path.exists():
        with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
            if known := file.read(100).strip():
                return known
    new = secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, new.encode())
    return new


class WandbWriter:
    """Writer that passes metrics to a thread that talks to wandb.

    Connecting, sending and finishing may fail or hang for minutes on a cluster without internet access, so only the
    thread waits. A failure becomes one warning, after which the metrics go to the other writers alone.
    """

    def __init__(
        self,
        output: Path,
        mode: Literal["auto", "online", "offline"],
        project: str,
        resumed_step: int,
        resolved_config: dict[str, Any],
    ) -> None:
        """Start the thread and return at once; `auto` is online if logged in, otherwise offline into `output`/wandb."""
        # What is left to send; an integer is the exit status and ends the thread.
        self._queue: queue.SimpleQueue[StepRecord | int] = queue.SimpleQueue()
        self._failed = False
        self._thread = threading.Thread(
            target=self._work, args=(output, mode, project, resumed_step, resolved_config), daemon=True
        )
        try:
            # Not in the thread: concurrent imports from two threads can see half-initialized modules.
            import wandb  # noqa: F401, PLC0415 - optional package
        except Exception as error:
            self._fail(error)
        else:
            self._thread.start()

    def write(self, record: StepRecord) -> None:
        """Queue the metrics of a step."""
        if not self._failed:
            self._queue.put(record)

    def close(self) -> None:
        """Send the queued metrics, giving up after about a minute."""
        if self._failed:
            return
        # While an exception passes through the caller's `finally`, the run is marked as failed.
        self._queue.put(0 if sys.exc_info()[0] is None else 1)
        self._thread.join(_START_SECONDS + _FINISH_SECONDS)
        if self._thread.is_alive():
            self._fail(TimeoutError(f"it did not finish within {_START_SECONDS + _FINISH_SECONDS} s"))

    def _fail(self, error: BaseException) -> None:
        if self._failed:  # one warning is enough
            return
        self._failed = True
        reason = (str(error).splitlines() or [""])[0][:200]
        _log.warning("wandb is disabled for the rest of this run (%s: %s)", type(error).__name__, reason)

    def _work(self, output: Path, mode: str, project: str, resumed_step: int, config: dict[str, Any]) -> None:
        import wandb  # noqa: PLC0415 - optional package

        try:
            run = _start(output, mode, project, resumed_step, config)
            while isinstance(item := self._queue.get(), StepRecord):
                run.log(tracked(item), step=item.step)
            run.finish(exit_code=item)
        except Exception as error:
            self._fail(error)
            # Otherwise wandb tries once more when the interpreter exits, and prints a traceback.
            try:
                wandb.teardown()
            except Exception:
                _log.debug("wandb could not be torn down", exc_info=True)


def _start(output: Path, mode: Any, project: str, resumed_step: int, config: dict[str, Any]) -> Any:
    """Start or resume the wandb run; raise any error of wandb."""
    import wandb  # noqa: PLC0415 - optional package

    if mode == "auto":
        # Clusters without internet access commonly set WANDB_MODE for everyone.
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    if mode == "online" and not logged_in():
        raise RuntimeError("not logged in: run `wandb login`, or set metrics.wandb=offline")
    options: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": _START_SECONDS}
    if "finish_timeout" in wandb.Settings.model_fields:  # newer than the other settings
        options["finish_timeout"] = _FINISH_SECONDS
    wandb.setup(settings=wandb.Settings(silent=True))  # suppresses a line that the login prints
    return wandb.init(
        project=project,
        dir=str(output),
        id=run_id(output, resumed_step),
        resume="allow",
        mode=mode,
        config=config,
        settings=wandb.Settings(**options),
    )
