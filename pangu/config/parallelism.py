"""Requirements of context and expert parallelism on a model and its layout, and the loads that experts can have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from pangu.common.errors import Problem
from pangu.config.attention import ABILITIES
from pangu.config.model import ModelConfig, RouterConfig
from pangu.config.schema import RunConfig
from pangu.config.suggest import any_of, divisors_near


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
    if ranks == 1:
        return
    slices = parallel.tensor if parallel.sequence else 1
    if length % math.lcm(2 * ranks, ranks * slices):
        unit = "2 x parallel.context" if length % (2 * ranks) else "parallel.context x parallel.tensor"
        works = [count for count in range(1, length + 1) if length % math.lcm(2 * count, count * slices) == 0]
        near = sorted(sorted(works or [1], key=lambda count: (abs(count - ranks), count))[:3])
        rule = f"{unit} must divide model.sequence = {length}"
        yield Problem("parallel.context", ranks, rule, f"nearest valid values: {', '.join(map(str, near))}")
    kind, heads = context_kind(config), model.heads // parallel.tensor
    if kind == "ulysses" and heads % ranks:
        rule = f"parallel.context = {ranks} must divide the {heads} heads of a tensor-parallel rank"
        yield Problem("parallel.context_kind", "ulysses", rule, "use gather or ring")
    ulysses, sizes = parallel.context_ulysses, [n for n in range(1, ranks) if ranks % n == 0 == heads % n]
    if ulysses > 1 and ulysses not in sizes:
        rule = f"must be below parallel.context = {ranks} and divide it and the {heads} heads of a tensor-parallel rank"
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


def expert_problems(config: RunConfig, replicas: int) -> Iterator[Problem]:
    """Yield all problems of `parallel.expert`, `expert_tensor` and `fixed_exchange` for a number of replicas."""
    model, parallel = config.model, config.parallel
    expert, tensor, expert_tensor = parallel.expert, parallel.tensor, parallel.expert_tensor
    if model.experts is None:
        return
    if expert_tensor not in (None, 1, tensor):
        rule, fix = f"must be 1 or parallel.tensor = {tensor}", f"use null, 1 or {tensor}"
        yield Problem("parallel.expert_tensor", expert_tensor, rule, fix if tensor > 1 else "use null or 1")
        return
    tensor_ranks = tensor // (expert_tensor or tensor)
    ranks = math.gcd(model.experts, replicas * tensor_ranks)
    if ranks % expert:
        devices = f"{replicas} replicas" + (f" x parallel.tensor = {tensor} ranks" if tensor_ranks > 1 else "")
        rule = f"must divide model.experts = {model.experts} and {devices}"
        yield Problem("parallel.expert", expert, rule, any_of(divisors_near(ranks, expert)))
    elif parallel.zero_group is not None and not holds_groups(parallel.zero_group * tensor_ranks, expert):
        rule = f"must be made of complete groups of parallel.expert = {expert} ranks, or divide one group evenly"
        yield Problem("parallel.zero_group", parallel.zero_group, rule, f"use {max(1, expert // tensor_ranks)} or null")


def balance_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problem of sequences that share a balance loss but are not computed at the same time."""
    parallel, size, micro = config.parallel, config.model.router.balance_sequences, math.gcd(*config.rows_at_once)
    repeats = same_sequences(parallel.expert_tensor, parallel.tensor, parallel.context)
    apart = parallel.expert % repeats or parallel.two_batch_overlap  # halves of other ranks are no neighbors
    together = micro * (1 if apart else parallel.expert // repeats)
    if together % size:
        ranks = f" x {together // micro} data-parallel ranks that share experts" if together > micro else ""
        half, multiple = ("half of ", 2 * size) if parallel.two_batch_overlap else ("", size)
        of = f"{half}batch.micro_size = {config.batch.micro_size}"
        rule = f"must divide {of}{ranks}{ranks and f' = {together}'}, which are computed together"
        fix = f"{any_of(divisors_near(together, size))}; or set batch.micro_size to a multiple of {multiple}"
        yield Problem("model.router.balance_sequences", size, rule, fix)


def same_sequences(expert_tensor: int | None, tensor: int, context: int) -> int:
    """Return the number of neighboring ranks of an expert-parallel group that compute the same sequences."""
    return context * (tensor // (expert_tensor or tensor))


def holds_groups(ranks: int, expert: int) -> bool:
    """Return whether `ranks` that share states form complete groups of `expert` ranks, or divide one evenly."""
    return max(ranks, expert) % min(ranks, expert) == 0


def least_data(expert: int, expert_tensor: int | None, tensor: int, context: int) -> int:
    """Return the smallest data-parallel size with which `expert` ranks can hold all experts together."""
    return expert // math.gcd(expert, same_sequences(expert_tensor, tensor, context))


def most_of_rank(router: RouterConfig, experts: int, count: int, ranks: int) -> int:
    """Return how many of a token's `count` experts can be on one of the `ranks` that hold all experts in equal shares.

    Example: of 8 experts in 4 groups, which each give a token one, on 2 ranks: 2.
    """
    held, size = experts // ranks, experts // router.groups
    limit = count // router.groups if router.selection == "each_group" else count
    groups = router.groups if router.groups_per_token is None else router.groups_per_token
    counts = (Counter(expert // size for expert in range(first, first + held)) for first in range(0, experts, held))
    most = (sorted((min(limit, number) for number in held.values()), reverse=True) for held in counts)
    return min(count, max(sum(numbers[:groups]) for numbers in most))


def peak_expert_load(model: ModelConfig, imbalance: float, ranks: int) -> float:
    """Return the rows that the fullest of `ranks` gets, over the mean: `imbalance`, or as many as there can be."""
    possible = ranks * most_of_rank(model.router, model.experts or 1, model.num_chosen, ranks) / model.num_chosen
    return min(imbalance, model.expert_capacity or math.inf, possible)
