"""Requirements of expert parallelism on a model and its layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pangu.common.errors import Problem
from pangu.config.nearest import any_of, divisors_near
from pangu.config.schema import RunConfig


def spread_problems(config: RunConfig, replicas: int) -> Iterator[Problem]:
    """Yield all problems of `parallel.expert` and `parallel.expert_tensor` for a number of replicas."""
    model, parallel = config.model, config.parallel
    expert, tensor, of_each = parallel.expert, parallel.tensor, parallel.expert_tensor
    if model.experts is None:
        key, value = ("expert", expert) if expert > 1 else ("expert_tensor", of_each)
        rule = "model.experts = null: there are none to share"
        yield Problem(f"parallel.{key}", value, rule, f"{1 if expert > 1 else 'null'} works, or a model with experts")
        return
    if of_each not in (None, 1, tensor):
        rule, works = f"must be 1 or parallel.tensor = {tensor}", f"null, 1 and {tensor} work"
        yield Problem("parallel.expert_tensor", of_each, rule, works if tensor > 1 else "null and 1 work")
        return
    whole = tensor // (of_each or tensor)
    ranks = math.gcd(model.experts, replicas * whole)
    if ranks % expert:
        of_devices = f"{replicas} replicas" + (f" x parallel.tensor = {tensor} ranks" if whole > 1 else "")
        rule = f"must divide model.experts = {model.experts} and {of_devices}"
        yield Problem("parallel.expert", expert, rule, any_of(divisors_near(ranks, expert)))
    elif parallel.zero_group is not None and not holds_groups(parallel.zero_group * whole, expert):
        rule = f"must hold whole groups of parallel.expert = {expert} ranks, or divide one"
        yield Problem("parallel.zero_group", parallel.zero_group, rule, f"{max(1, expert // whole)} works, or null")


def holds_groups(ranks: int, expert: int) -> bool:
    """Return whether `ranks` that share states form complete groups of `expert` ranks, or divide one evenly."""
    return max(ranks, expert) % min(ranks, expert) == 0


def least_data(expert: int, expert_tensor: int | None, tensor: int, context: int) -> int:
    """Return the smallest data-parallel size with which `expert` ranks can hold all experts together."""
    return expert // math.gcd(expert, context * (tensor // (expert_tensor or tensor)))
