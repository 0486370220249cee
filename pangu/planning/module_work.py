"""What each kind of module does, from the operations of a real step: the input of a plan that computes no step.

Two stages are carried out by a schedule that splits backward, with one and with two layers on the first: a layer is
the difference, the embedding and the head are what remains of their stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pangu.planning.roles import run_jobs
from pangu.planning.workload import Axis, Collective, Matmul, ModuleWork, Work

Phase = Mapping[str, Any]
"""An entry of `RankReport.phases`."""
_AXES: Mapping[str, Axis] = {"gather": "shard", "world": "data"}
_ALONE = {
    "data": None,
    "zero": 0,
    "zero_group": None,
    "pipeline": 2,
    "virtual": 1,
    "schedule": "zb_h1",
    "allowed": (),
}
"""A layer's own work: of one replica."""


def profile_modules(values: Mapping[str, Any]) -> dict[str, ModuleWork]:
    """`embedding`, `layer`, `recomputed` (a layer that backward computes again; missing if the run has none) and `head`
    (with what is special of the last layer) of a run, for one micro-batch.

    Args:
        values: the composed configuration as plain dictionaries; of its layout only what cuts a layer counts.

    Raises:
        UserError: if it cannot be carried out.
    """
    plain = {**values, "memory": {**values["memory"], "recompute": "none", "offload": []}}
    asked = values["memory"]["recompute"]
    mode = "selective" if asked == "selective" else "full"
    again = {**values, "memory": {**values["memory"], "recompute": mode, "offload": []}}
    tensor = int(values["parallel"]["tensor"])
    jobs = [
        (_cut(plain, (1, 2)), 0),
        (_cut(plain, (2, 2)), 0),
        (_cut(plain, (1, 2)), tensor),
        (_cut(again, (1, 2)), 0),
        (_cut(again, (2, 2)), 0),
    ]
    one, two, last, again_one, again_two = (report["phases"] for report in run_jobs(jobs))
    layer, recomputed = _module(one, two), _module(again_one, again_two)
    modules = {
        "embedding": _module(None, one, layer, 1),
        "layer": layer,
        "head": _module(None, last, layer, 2),
    }
    if asked != "none":
        repeated = _minus(recomputed.backward_input, layer.backward_input)
        saved, working = recomputed.saved_bytes, recomputed.working_bytes
        parts = layer.forward, layer.backward_input, layer.backward_weight
        modules["recomputed"] = ModuleWork(*parts, repeated, saved, working)
    return modules


def _cut(values: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """The run on two stages of so many layers, with three micro-batches."""
    rows = values["batch"]["micro_size"]
    return {
        **values,
        "dry_run": True,
        "model": {**values["model"], "layers": sum(layers)},
        "parallel": {**values["parallel"], **_ALONE, "layers": list(layers)},
        "batch": {**values["batch"], "global_size": 3 * rows},
    }


def _module(
    fewer: Mapping[str, Phase] | None, more: Mapping[str, Phase], layer: ModuleWork | None = None, count: int = 0
) -> ModuleWork:
    """What one stage does more than another one, or than so many layers."""
    works = {kind: _work(more[kind]) for kind in "FIW"}
    saved = more["F"]["end"] - more["F"]["start"]
    if fewer is not None:
        works = {kind: _minus(works[kind], _work(fewer[kind])) for kind in "FIW"}
        saved -= fewer["F"]["end"] - fewer["F"]["start"]
    if layer is not None:
        parts = {"F": layer.forward, "I": layer.backward_input, "W": layer.backward_weight}
        works = {kind: _minus(works[kind], parts[kind], count) for kind in "FIW"}
        saved -= count * layer.saved_bytes
    single = more if fewer is None else fewer
    working = max(single["F"]["peak"] - single["F"]["end"], single["I"]["peak"] - single["I"]["start"])
    return ModuleWork(works["F"], works["I"], works["W"], saved_bytes=saved, working_bytes=working)


def _work(phase: Phase) -> Work:
    products = [matmul for product in phase["products"] for matmul in _matmuls(product)]
    collectives = [
        Collective(cast(Any, kind), _AXES.get(axis, cast(Axis, axis)), one["bytes"] / one["calls"], one["calls"])
        for axis, kinds in phase["collectives"].items()
        for kind, one in kinds.items()
        if axis != "pipeline"  # the schedule's
    ]
    return Work(_joined(products), phase["memory_bound_bytes"], phase["launches"], _joined(collectives))


def _matmuls(product: Mapping[str, Any]) -> list[Matmul]:
    """Of a product or of a fused attention kernel, forward or backward."""
    operator, shapes, calls = product["operator"], product["shapes"], product["calls"]
    if "attention" in operator:
        # shapes of the gradient, then of query, key and value; or of the latter
        (rows, heads, queries, width), (_, _, keys, _) = shapes[1:3] if "backward" in operator else shapes[:2]
        scores = Matmul(queries, keys, width, rows * heads, calls, fused=True)
        mixed = Matmul(queries, width, keys, rows * heads, calls, fused=True)
        # backward: the scores again, the gradients of probabilities, values, queries and keys
        return [scores, mixed] if "backward" not in operator else [scores, scores, mixed, mixed, mixed]
    first, second = shapes[-2:]
    batch = first[0] if len(first) == 3 else 1
    return [Matmul(first[-2], second[-1], first[-1], batch, calls)]


def _joined(entries: Sequence[Any], signs: Sequence[float] = ()) -> tuple[Any, ...]:
    """Equal entries as one, with their calls added up (taken off where the sign is negative)."""
    calls: dict[Any, float] = {}
    for place, entry in enumerate(entries):
        key = entry._replace(calls=0)
        calls[key] = calls.get(key, 0) + entry.calls * (signs[place] if signs else 1)
    return tuple(key._replace(calls=count) for key, count in calls.items() if count)


def _minus(work: Work, other: Work, times: int = 1) -> Work:
    def entries(some: Sequence[Any], less: Sequence[Any]) -> tuple[Any, ...]:
        return _joined([*some, *less], [1.0] * len(some) + [-float(times)] * len(less))

    return Work(
        entries(work.matmuls, other.matmuls),
        work.bytes - times * other.bytes,
        work.launches - times * other.launches,
        entries(work.collectives, other.collectives),
    )
