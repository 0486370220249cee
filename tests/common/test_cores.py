"""The processor time that control groups grant."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pangu.common.cores import cpu_quota


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/", {"cpu.max": "max 100000"}, math.inf),
        ("0::/slice/run", {"slice/cpu.max": "300000 100000", "slice/run/cpu.max": "max 100000"}, 3.0),
        ("0::/slice/run", {"slice/cpu.max": "300000 100000", "slice/run/cpu.max": "50000 100000"}, 0.5),
        ("0::/host/path/of/a/container", {"cpu.max": "200000 100000"}, 2.0),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"},
            1.5,
        ),
        ("2:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("nonsense", {"cpu.max": "200000 100000"}, math.inf),
        ("0::/", {"cpu.max": "1 0"}, math.inf),
    ],
)
def test_the_least_quota_on_the_way_up_counts(
    membership: str, files: dict[str, str], quota: float, tmp_path: Path
) -> None:
    for name, text in {"membership": membership, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cpu_quota(tmp_path, tmp_path / "membership") == quota


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "nowhere") == math.inf
