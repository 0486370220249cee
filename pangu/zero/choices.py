"""ZeRO stages among which a layout is chosen."""

from __future__ import annotations

from collections.abc import Collection

STAGES = (0, 1, 2, 3)
"""ZeRO stages (`Sharding.stage`)."""


def worth_trying(
    shared: bool, groups: Collection[int], stage: int | None, offload: Collection[str]
) -> list[tuple[int, int]]:
    """Return stages among which a layout is chosen, each with the replicas that share states (0: all).

    Args:
        shared: several replicas could share them.
        groups: fewer replicas than all that could.
        stage: the only one that is wanted; None: any.
        offload: what is in host memory.
    """
    if not shared:
        alone = 3 if "parameters" in offload else 0
        return [(alone if stage is None else stage, 0)]
    if stage == 0:
        return [(0, 0)]
    return [(one, group) for group in (0, *groups) for one in STAGES[1:] if stage in (None, one)]


def can_offload(what: str, stage: int) -> bool:
    """Return whether so much of the states can be in host memory: weights that last are needed all the time."""
    return what == "optimizer" or (what == "parameters" and stage == 3)
