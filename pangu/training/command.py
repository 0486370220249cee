"""The command line around a run: Hydra composes, one process speaks, and a user's error is one message."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pangu.config.errors import INTERRUPTED, PATIENCE_SECONDS, UserError, exit_status
from pangu.topology.launch import Launch


def pretrain(configs: Path) -> None:
    """Compose the configuration from the command line and run it; ends the process with the status.

    Args:
        configs: absolute path of the folder with base.yaml.
    """
    first = Launch.from_environment().rank == 0
    real_stderr = sys.stderr
    if not first:
        # what Hydra says of a wrong key is the same on every process
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123

    def task(composed: DictConfig) -> None:
        from pangu.training.run import run  # all of the trainer, which those who only compose do without

        sys.stderr = real_stderr
        status = exit_status(lambda: run(_plain(composed)), "\nerror", first)
        if status == INTERRUPTED and first:
            print("\ninterrupted; the same command continues from the newest checkpoint", file=sys.stderr, flush=True)
        if status:
            sys.exit(status)

    try:
        hydra.main(version_base="1.3", config_path=str(configs), config_name="base")(task)()
    except SystemExit as end:
        if end.code and sys.stderr is not real_stderr:
            time.sleep(PATIENCE_SECONDS)
        raise


def compose(configs: Path, overrides: Sequence[str]) -> dict[str, object]:
    """What pretrain.py would run from, given these overrides. Raises UserError."""
    try:
        with hydra.initialize_config_dir(str(configs), version_base="1.3"):
            return _plain(hydra.compose("base", overrides=list(overrides)))
    except OverrideParseException as error:
        raise UserError(f"{error.override}: {error}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(str(error)) from error


def _plain(composed: DictConfig) -> dict[str, object]:
    """The composed configuration with its references resolved, as plain dictionaries."""
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
