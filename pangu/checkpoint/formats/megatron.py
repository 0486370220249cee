"""Checkpoints of Megatron: the folder that its `--load` names, in either of its formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pangu.checkpoint.formats import megatron_dist, megatron_ranks
from pangu.checkpoint.formats.stored import Job, Source
from pangu.config.errors import UserError, shown

_TRACKER = "latest_checkpointed_iteration.txt"


def open_folder(path: Path) -> Source:
    """A folder for `--load`, or that of one iteration in it. Raises UserError."""
    tracker = path / _TRACKER
    if tracker.is_file():
        latest = tracker.read_bytes()[:20].strip()
        number = latest.isdigit() and int(latest)
        path = path / (f"iter_{number:07d}" if latest.isdigit() else "release")
        if not path.is_dir():
            raise UserError(
                f"{tracker}: says {shown(latest.decode(errors='replace'))}, and there is no folder {path.name}"
            )
    if (path / ".metadata").is_file():
        return megatron_dist.DistSource(path)
    if not any(folder.is_dir() for folder in path.glob("mp_rank_*")):
        raise UserError(
            f"{path}: no folder mp_rank_00 here, no .metadata, nor a latest_checkpointed_iteration.txt that names one"
        )
    return megatron_ranks.RankSource(path)


def _released(write: Callable[[Path, Job], None]) -> Callable[[Path, Job], None]:
    """Write a folder for `--load`, marked as a release."""

    def written(path: Path, job: Job) -> None:
        path.mkdir(parents=True)
        write(path / "release", job)
        (path / _TRACKER).write_text("release", encoding="utf-8")

    return written


write_ranks = _released(megatron_ranks.write)
write_dist = _released(megatron_dist.write)
