"""The file of configs/cluster/ that `tools/calibrate.py` makes of this device: what plans for it are made from."""

from __future__ import annotations

from benchmarks.gpu_suite.setting import Setting
from tools import calibrate


def measure(setting: Setting) -> None:
    """One row."""
    path = setting.output / "measured.yaml"
    with setting.row("calibration") as figures:
        status = calibrate.main(["--output", str(path), *(["--quick"] if setting.on_host else [])])
        if status:
            raise RuntimeError(f"tools/calibrate.py ended with status {status}")
        figures["file"] = path.name
