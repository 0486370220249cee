"""ZeRO stages to consider in a search for a layout."""

from __future__ import annotations

from collections.abc import Collection

STAGES = (0, 1, 2, 3)
"""ZeRO stages, the values of `Sharding.stage`."""


def worth_trying(
    shared: bool, groups: Collection[int], stage: int | None, offload: Collection[str]
) -> list[tuple[int, int]]:
    """Return the ZeRO stages to consider, each with the number of replicas that share the states (0: all).

    Args:
        shared: True if several replicas could share the states.
        groups: Numbers of replicas to consider besides all that could share.
        stage: The only stage to consider; None: any.
        offload: Kinds of state in host memory.
    """
    if not shared:
        alone = 3 if "parameters" in offload else 0
        return [(alone if stage is None else stage, 0)]
    if stage == 0:
        return [(0, 0)]
    return [(one, group) for group in (0, *groups) for one in STAGES[1:] if stage in (None, one)]


def can_offload(what: str, stage: int) -> bool:
    """Return whether a kind of state can be in host memory at a stage; weights that stay gathered cannot."""
    return what == "optimizer" or (what == "parameters" and stage == 3)
