"""What the papers' formulas say of the activations that the stages of a schedule hold."""

from __future__ import annotations


def peak_live(name: str, stages: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...] | None:
    """Most activations that each stage holds (of one chunk and one micro-batch); None if there is no formula.

    Counted from forward to backward, or to the weight gradient where the backward is split (Schedule.peak_live).
    """
    p, v, m = stages, virtual_stages, micro_batches
    match name:
        case "gpipe" | "breadth_first":
            return (v * m,) * p
        case "1f1b":
            return tuple(min(m, p - stage) for stage in range(p))
        case "interleaved":
            group = -(-m // max(1, m // p))  # micro-batches of the largest group; p if m is a multiple of p
            return tuple(min(v * m, 2 * (p - stage - 1) + (v - 1) * group + 1) for stage in range(p))
        case "zb_h1":
            return (min(m, p),) * p
        case "zb_v":
            return (2 * min(m, p),) * p
    return None
