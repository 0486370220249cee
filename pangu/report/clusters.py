"""Cluster files: their names, contents, and the one for a device."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import yaml

from pangu.common.errors import UserError
from pangu.common.files import refuse_expanding
from pangu.config.cluster import ClusterConfig, cluster_in


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
