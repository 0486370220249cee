"""Requirements of context parallelism on a model and its layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pangu.common.errors import Problem
from pangu.config.attention import ABILITIES
from pangu.config.schema import RunConfig
from pangu.config.suggest import any_of


def context_kind(config: RunConfig) -> str:
    """Return `parallel.context_kind` with `auto` resolved to the kind that sends fewest bytes."""
    parallel, model = config.parallel, config.model
    if parallel.context_kind != "auto":
        return parallel.context_kind
    heads, kv_heads = (max(1, n // parallel.tensor) for n in (model.heads, model.kv_heads or model.heads))
    if heads % parallel.context:
        return "gather"
    needs_all_keys = model.attention != "auto" and not ABILITIES[model.attention].blocks
    return "ulysses" if needs_all_keys or _exchanged(heads, kv_heads, parallel.context) < 6 * kv_heads else "gather"


def ulysses_size(config: RunConfig) -> int:
    """Return the number of neighboring ranks that exchange heads."""
    in_ring = config.parallel.context_ulysses
    return config.parallel.context if context_kind(config) == "ulysses" else in_ring


def _exchanged(heads: int, kv_heads: int, ranks: int) -> float:
    """Return the head vectors per token that a rank sends in forward and backward for Ulysses' all-to-alls.

    These are queries, outputs, keys and values. Gathering sends 6 per key head: keys and values in forward, the same in
    backward, and their gradients.
    """
    return 4 * (heads + math.lcm(kv_heads, ranks)) / ranks


def context_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of a context-parallel layout."""
    parallel, model = config.parallel, config.model
    ranks, length = parallel.context, model.sequence
    slices = parallel.tensor if parallel.sequence else 1
    if length % math.lcm(2 * ranks, ranks * slices):
        unit = "2 x parallel.context" if length % (2 * ranks) else "parallel.context x parallel.tensor"
        works = [count for count in range(1, length + 1) if length % math.lcm(2 * count, count * slices) == 0]
        near = sorted(sorted(works or [1], key=lambda count: (abs(count - ranks), count))[:3])
        rule = f"{unit} must divide model.sequence = {length}"
        yield Problem("parallel.context", ranks, rule, f"nearest valid values: {', '.join(map(str, near))}")
    kind, heads = context_kind(config), model.heads // parallel.tensor
    if kind == "ulysses" and heads % ranks:
        rule = f"parallel.context = {ranks} must divide the heads of a tensor-parallel rank, which number {heads}"
        yield Problem("parallel.context_kind", "ulysses", rule, "use gather or ring")
    ulysses, sizes = parallel.context_ulysses, [n for n in range(1, ranks) if ranks % n == 0 == heads % n]
    if ulysses > 1 and ulysses not in sizes:
        rule = (
            f"must divide parallel.context = {ranks}, be less, and divide the {heads} heads of a tensor-parallel rank"
        )
        near = sorted(sorted(sizes, key=lambda n: abs(n - ulysses))[:3])
        yield Problem("parallel.context_ulysses", ulysses, rule, any_of(near))
    if kind != "ulysses" and model.attention != "auto":
        yield from _kernel(model.attention, kind, model.window)


def _kernel(kernel: str, kind: str, window: int | None) -> Iterator[Problem]:
    key = f"with parallel.context_kind = {kind}"
    if not ABILITIES[kernel].blocks:
        rule = f"{key} needs one of {', '.join(name for name, can in ABILITIES.items() if can.blocks)}"
        yield Problem("model.attention", kernel, rule, "use auto, or set parallel.context_kind=ulysses")
    elif kernel == "flash" and kind == "ring" and window is not None:
        yield Problem("model.attention", kernel, f"does not support a window {key}", "set parallel.context_kind=gather")
