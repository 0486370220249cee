"""Cluster files: their names, contents, and the one for a device."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from pangu.common.errors import UserError
from pangu.common.files import refuse_expanding
from pangu.config.cluster import ClusterConfig, cluster_in
from pangu.config.optimizer import PrecisionConfig

log = logging.getLogger(__name__)


def require_cluster(folder: Path, values: Mapping[str, Any], what: str) -> ClusterConfig:
    """Return the cluster of a configuration; raise UserError if it has none, naming `what` needs it."""
    if values.get("cluster") is None:
        raise UserError(
            f"{what} needs the description of a cluster: set cluster=NAME, where NAME is one of "
            f"{', '.join(cluster_names(folder))}, or measure this machine with "
            f"tools/calibrate.py --output {folder}/mine.yaml and set cluster=mine"
        )
    return cluster_in(values["cluster"])


def warn_of_format(cluster: ClusterConfig, precision: PrecisionConfig) -> None:
    """Warn if the matmuls are in bf16 and the cluster's devices have none."""
    if precision.compute == "bf16" and not cluster.matmul.bf16:
        rule = "has no bf16 (cluster.matmul.bf16 = false): these are its figures in fp16; set precision=fp16"
        log.warning("precision.compute = bf16: %s %s", cluster.name, rule)


def load_cluster(path: Path) -> ClusterConfig:
    """Return the cluster described by a file that has no defaults list.

    Raises:
        UserError: if the file cannot be read; ConfigError if it does not describe a cluster.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        refuse_expanding(values)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a cluster file: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a cluster file, which is a mapping of keys")
    return cluster_in({str(key): value for key, value in values.items()}, "")


def cluster_names(folder: Path, whole: bool = False) -> list[str]:
    """Return the names that `cluster=NAME` accepts.

    `folder` is configs/cluster/; `whole` skips files that describe another file's cluster in a different size.
    """
    paths = (path for path in sorted(folder.glob("*.yaml")) if path.stem != "none" and path.is_file())
    return [path.stem for path in paths if not whole or b"defaults:" not in path.read_bytes()]


def cluster_of_device(name: str, files: Collection[str]) -> str | None:
    """Return the cluster file that matches a device name such as `NVIDIA H100 80GB HBM3`, or None.

    A MIG slice (NVIDIA's name for a part of a device) counts as a different device.
    """
    words = re.split(r"[\s_-]+", name.lower())
    matching = [file for file in files if "mig" not in words and set(file.split("_")) <= {*words}]
    return max(matching, key=len, default=None)
