"""Trackers that this package knows, and those of other packages: entry points of the group `pangu.trackers`.

Each works without a network where its package can: into `trackers/NAME` of the run folder.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from pangu.common.errors import ConfigError, Problem
from pangu.common.flat import flatten
from pangu.metrics.trackers import FINISH_SECONDS, START_SECONDS, Service, TrackedRun, Tracker

GROUP = "pangu.trackers"
"""Group of entry points: functions that take a `TrackedRun` and return a `Tracker`."""
ALERT_SECONDS = 60
"""Shortest time between two alerts of one kind at wandb."""
_PER_REQUEST = 100
"""Parameters of a configuration that MLflow takes at a time."""


class Connection(NamedTuple):
    """Tracker made of two functions."""

    log: Callable[[dict[str, float], int], object]
    finish: Callable[[int], object]
    alert: Callable[[str, str], object] | None = None


def service_of(name: str) -> Service:
    """Return the tracker of a name; raise ConfigError, with all names, if no installed package has it."""
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in SERVICES and name not in others:
        names = ", ".join(sorted({*SERVICES, *others}))
        rule = f"unknown tracker: no installed package has an entry point of that name in group {GROUP}"
        raise ConfigError([Problem("metrics.trackers", name, rule, f"use {names}, or install its package")])
    if name in others:
        entry = others[name]
        return Service(name, entry.module, lambda run: entry.load()(run))
    return SERVICES[name]


def logged_in() -> bool:
    """Return whether this machine holds a wandb key, in the environment or in the user's netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import requests.utils  # noqa: PLC0415 - comes with wandb, an optional package

    entry = requests.utils.get_netrc_auth(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    return bool(entry and entry[1])


def wandb_service(mode: str) -> Service:
    """Return Weights & Biases; `mode` auto is online if logged in, otherwise offline into the run folder."""
    return Service("wandb", "wandb", partial(_start_wandb, mode), _stop_wandb)


def _start_wandb(mode: Any, run: TrackedRun) -> Tracker:
    import wandb  # noqa: PLC0415 - optional package

    if mode == "auto":
        # Clusters without internet access commonly set WANDB_MODE for everyone.
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
    if mode == "online" and not logged_in():
        raise RuntimeError("not logged in: run `wandb login`, or set metrics.wandb=offline")
    options: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": START_SECONDS}
    if "finish_timeout" in wandb.Settings.model_fields:  # newer than the other settings
        options["finish_timeout"] = FINISH_SECONDS
    wandb.setup(settings=wandb.Settings(silent=True))  # suppresses a line that the login prints
    begun = wandb.init(
        project=run.project,
        name=run.name,
        group=run.group,
        tags=run.tags or None,
        dir=str(run.output),
        id=run.known_id("wandb") or run.keep_id("wandb", secrets.token_hex(4)),
        resume="allow",
        mode=mode,
        config=dict(run.config),
        settings=wandb.Settings(**options),
    )
    return Connection(
        lambda figures, step: begun.log(figures, step=step),
        lambda status: begun.finish(exit_code=status),
        lambda kind, message: begun.alert(kind, message, level="WARN", wait_duration=ALERT_SECONDS),
    )


def _stop_wandb() -> None:
    """Keep wandb from trying once more when the interpreter exits, where it would print a traceback."""
    import wandb  # noqa: PLC0415 - optional package

    wandb.teardown()


def _start_mlflow(run: TrackedRun) -> Tracker:
    import mlflow  # noqa: PLC0415 - optional package
    from mlflow.entities import Metric, Param, RunTag  # noqa: PLC0415 - optional package

    folder = run.folder("mlflow")
    folder.mkdir(parents=True, exist_ok=True)
    client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.resolve()}/mlflow.db")
    known = run.known_id("mlflow")
    if known is None:
        experiment = client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment else client.create_experiment(run.project)
        known = run.keep_id("mlflow", client.create_run(place, run_name=run.name).info.run_id)
        labels = ({"group": run.group} if run.group else {}) | dict.fromkeys(run.tags, "true")
        client.log_batch(known, tags=[RunTag(name, value) for name, value in labels.items()])
        params = [Param(name, str(value)[:500]) for name, value in flatten(run.config).items()]
        for start in range(0, len(params), _PER_REQUEST):
            client.log_batch(known, params=params[start : start + _PER_REQUEST])
    else:
        client.update_run(known, status="RUNNING")
    run_id = known

    def log(figures: dict[str, float], step: int) -> None:
        now = round(time.time() * 1000)
        names = {name: re.sub(r"[^\w\-. /]", "_", name) for name in figures}
        client.log_batch(run_id, metrics=[Metric(names[name], one, now, step) for name, one in figures.items()])

    return Connection(log, lambda status: client.set_terminated(run_id, "FAILED" if status else "FINISHED"))


def _start_comet(run: TrackedRun) -> Tracker:
    import comet_ml  # noqa: PLC0415 - optional package

    options = comet_ml.ExperimentConfig(
        offline_directory=str(run.folder("comet").resolve()),
        name=run.name,
        tags=[*run.tags, *filter(None, [run.group])],
        **dict.fromkeys(("auto_metric_logging", "auto_param_logging", "auto_output_logging", "parse_args"), False),
        **dict.fromkeys(("log_code", "log_git_metadata", "log_git_patch"), False),
        display_summary_level=0,
    )
    known, online = run.known_id("comet"), bool(comet_ml.get_config("comet.api_key"))
    experiment = comet_ml.start(
        project_name=run.project,
        experiment_key=known or run.keep_id("comet", secrets.token_hex(16)),
        mode="get" if known and online else "create",
        online=online,
        experiment_config=options,
    )
    if not known:
        experiment.log_parameters(flatten(run.config))
    return Connection(lambda figures, step: experiment.log_metrics(figures, step=step), lambda status: experiment.end())


def _start_aim(run: TrackedRun) -> Tracker:
    import aim  # noqa: PLC0415 - optional package

    folder = run.folder("aim")
    folder.mkdir(parents=True, exist_ok=True)
    begun = aim.Run(
        run_hash=run.known_id("aim"),
        repo=os.environ.get("AIM_REPO") or str(folder),
        experiment=run.project,
        system_tracking_interval=None,
        log_system_params=False,
        capture_terminal_logs=False,
    )
    if run.known_id("aim") is None:
        run.keep_id("aim", begun.hash)
        begun["config"] = dict(run.config)
        if run.name:
            begun.name = run.name
        for tag in (*run.tags, *filter(None, [run.group])):
            begun.add_tag(tag)
    return Connection(lambda figures, step: begun.track(figures, step=step), lambda status: begun.close())


def _start_swanlab(run: TrackedRun) -> Tracker:
    import swanlab  # noqa: PLC0415 - optional package

    folder = run.folder("swanlab")
    folder.mkdir(parents=True, exist_ok=True)
    begun = swanlab.init(
        project=run.project,
        name=run.name,
        group=run.group,
        tags=list(run.tags) or None,
        config=dict(run.config),
        log_dir=str(folder),
        mode=os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline"),
        id=run.known_id("swanlab") or run.keep_id("swanlab", secrets.token_hex(8)),
        resume="allow",
    )
    return Connection(
        lambda figures, step: begun.log(figures, step=step),
        lambda status: begun.finish("crashed" if status else "success"),
    )


SERVICES = {
    "mlflow": Service("mlflow", "mlflow", _start_mlflow),
    "comet": Service("comet", "comet_ml", _start_comet),
    "aim": Service("aim", "aim", _start_aim),
    "swanlab": Service("swanlab", "swanlab", _start_swanlab),
}
"""Trackers of `metrics.trackers` by name."""
