"""What the papers' formulas say of a schedule: its bubble and how many activations its stages hold."""

from __future__ import annotations


def bubble(
    name: str,
    stages: int,
    virtual: int,
    micro_batches: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
) -> float | None:
    """Idle share of a step, idle / (idle + busy), by formula; None where there is none for these numbers.

    The times are those of one chunk and one micro-batch, the same for all chunks; messages take no time. With m >= p:

    - gpipe, 1f1b: (p-1) / (m+p-1) (arXiv 2104.04473, 2.2, which gives idle / busy, (p-1)/m)
    - interleaved, breadth_first: (p-1) / (v m + p-1) (the same; arXiv 2211.05953)
    - zb_h1: idle (p-1)(F + I - W) (arXiv 2401.10241, table 2), if W <= F and W <= I
    - zb_v: idle (p-1) F, if F = I = W

    With m < p each round over the chunks (gpipe to breadth_first) takes p, not m; the zero-bubble schedules are as long
    as the way of the first micro-batch, and the others behind it, allows.
    """
    p, v, m = stages, virtual, micro_batches
    whole = forward + backward_input + backward_weight
    if name in ("gpipe", "1f1b", "interleaved", "breadth_first"):
        makespan = ((v - 1) * max(m, p) + m + p - 1) * whole
    elif name == "zb_h1" and backward_weight <= min(forward, backward_input):
        makespan = (p + m - 1) * (forward + backward_input) + max(1, m - p + 1) * backward_weight
    elif name == "zb_v" and forward == backward_input == backward_weight:
        makespan = max(4 * p - 1 + 2 * m, 3 * p - 1 + 4 * m, p - 1 + 6 * m) * forward
    else:
        return None
    return 1 - m * v * whole / makespan


def peak_live(name: str, stages: int, virtual: int, micro_batches: int) -> tuple[int, ...] | None:
    """Most activations that each stage holds (of one chunk and one micro-batch); None if there is no formula.

    Counted from forward to backward, or to the weight gradient where the backward is split (Timeline.peak_live).
    """
    p, v, m = stages, virtual, micro_batches
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
