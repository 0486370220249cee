"""From what dry runs report of the chunks of a small model to what each kind of module does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import add, sub
from typing import Any, cast

from pangu.pipeline.spans import matmuls_of
from pangu.planning.workload import Axis, Collective, Matmul, ModuleWork, Work, Working, not_kept

Report = Mapping[str, Any]
"""What matters here of `RankReport`: `phases` and `update`."""
Modules = dict[str, ModuleWork]
"""`layer`; `embedding` and `head`, all that the first and the last chunk have besides layers (in some models the last
layer is special); `inner`, what other chunks have."""
_AXES: Mapping[str, Axis] = {
    "gather": "shard",
    "world": "data",
    "replicas": "data",
    "expert_gather": "expert_shard",
    "expert_replicas": "expert_data",
}
"""Axis of a process group -> what it is called here."""


_GRAIN = 2.0**16
"""Bytes by which two peaks differ that are one: what is allocated is rounded up."""


def modules_of(second: Report, first: Report) -> Modules:
    """The modules of a model from its second stage, which has a chunk of one layer and one of two, and from the first,
    where the chunks are the embedding and a layer, and a layer and the head."""
    alone, layer = inner(second)
    chunks = {"embedding": _module(first["phases"]["0"]), "inner": alone, "head": _module(first["phases"]["3"])}
    ends = {kind: _less(chunk, layer) for kind, chunk in chunks.items()}
    embedding = ends["embedding"]
    ends["embedding"] = replace(embedding, working=_before(layer, embedding.working))
    return {"layer": layer, **ends}


def _before(layer: ModuleWork, working: Working) -> Working:
    """Of a module that was counted with a layer behind it, which kept nothing yet, or no longer."""
    return Working(*map(add, working, not_kept(layer.saved_bytes, layer.deferred_bytes)))


def without_neighbours(modules: Modules, layer: ModuleWork) -> Modules:
    """The modules, of which embedding, head and `inner` work with nothing where the layer that each was counted with
    takes more: what a chunk holds while that layer computes is the layer's."""
    less = {kind: not_kept(module.saved_bytes, module.deferred_bytes) for kind, module in modules.items()}
    beside = {kind: Working(*map(sub, layer.working, less[kind])) for kind in ("head", "inner")}
    beside["embedding"] = _before(layer, layer.working)
    for kind, of_layer in beside.items():
        pairs = zip(modules[kind].working, of_layer, strict=True)
        working = Working(*(most if most > least + _GRAIN else 0.0 for most, least in pairs))
        modules = modules | {kind: replace(modules[kind], working=working)}
    return modules


def recomputed(second: Report, plain: ModuleWork) -> ModuleWork:
    """A layer that is computed again, as it is besides the same layer when all is kept."""
    _, layer = inner(second)
    recompute = _minus(layer.backward_input, plain.backward_input)
    return replace(layer, backward_input=plain.backward_input, recompute=recompute)


def inner(second: Report) -> tuple[ModuleWork, ModuleWork]:
    """A chunk of one layer between the first and the last, and what each further layer adds."""
    alone, two = (_module(second["phases"][chunk]) for chunk in "12")
    return alone, replace(_less(two, alone), working=alone.working)


def on_more_ranks(module: ModuleWork, fixed: ModuleWork, times: int) -> ModuleWork:
    """The module where so many times as many ranks share the experts: each computes as many rows, of fewer experts with
    more rows each.

    The bytes of `backward_weight` that do not depend on the tokens (those of `fixed`, the module for a micro-batch of
    none) are of experts' gradients, of which each rank has fewer. What else depends on the number of a rank's experts
    are masks of rows by experts, next to nothing beside the rows, and gradients of their matrices that are there for a
    moment: it works with less memory than is said here.
    """

    def shared(work: Work) -> Work:
        matmuls = tuple(_of_fewer(one, times) if one.grouped else one for one in work.matmuls)
        return replace(work, matmuls=matmuls)

    works = (module.forward, module.backward_input, module.backward_weight, module.recompute)
    forward, back, weight, recompute = map(shared, works)
    weight = replace(weight, bytes=weight.bytes - fixed.backward_weight.bytes * (1 - 1 / times))
    return replace(module, forward=forward, backward_input=back, backward_weight=weight, recompute=recompute)


def _of_fewer(product: Matmul, times: int) -> Matmul:
    batch, along = product.batch // times, product.grouped
    if along == "rows":
        return product._replace(batch=batch, rows=product.rows * times)
    return product._replace(batch=batch, depth=product.depth * times)


def _module(phases: Mapping[str, Any]) -> ModuleWork:
    """All that a chunk does."""
    forward, back, weight, both = (phases[kind] for kind in "FIWB")
    saved = forward["end"] - forward["start"]
    return ModuleWork(
        _work(forward),
        _work(back),
        _work(weight),
        saved_bytes=saved,
        deferred_bytes=saved + back["end"] - back["start"],
        working=Working(
            forward["peak"] - forward["end"], *(one["peak"] - one["start"] for one in (back, weight, both))
        ),
    )


def _less(whole: ModuleWork, part: ModuleWork) -> ModuleWork:
    """What is besides a part; it works with as much memory."""
    return ModuleWork(
        _minus(whole.forward, part.forward),
        _minus(whole.backward_input, part.backward_input),
        _minus(whole.backward_weight, part.backward_weight),
        saved_bytes=whole.saved_bytes - part.saved_bytes,
        deferred_bytes=whole.deferred_bytes - part.deferred_bytes,
        working=whole.working,
    )


def _minus(work: Work, other: Work) -> Work:
    return Work(
        _joined(work.matmuls, other.matmuls),
        work.bytes - other.bytes,
        work.launches - other.launches,
        _joined(work.collectives, other.collectives),
        waits=work.waits - other.waits,
    )


def _joined(entries: Iterable[Any], less: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Equal entries as one, with their calls added up; those of `less` are taken off."""
    calls: Counter[Any] = Counter()
    for sign, those in ((1, entries), (-1, less)):
        for entry in those:
            calls[entry._replace(calls=0)] += sign * entry.calls
    return tuple(entry._replace(calls=count) for entry, count in calls.items() if count)


def _work(phase: Mapping[str, Any]) -> Work:
    products = [
        matmul._replace(calls=matmul.calls * product["calls"])
        for product in phase["products"]
        for matmul in matmuls_of(product["operator"], product["shapes"], product["computed"])
    ]
    collectives = [
        Collective(cast(Any, kind), _AXES.get(axis, cast(Axis, axis)), nbytes / calls, calls, hidden, joined=joined)
        for axis, kinds in phase["collectives"].items()
        for kind, one in kinds.items()
        for hidden, joined, calls, nbytes in _by_exposure(one)
        if axis != "pipeline" and calls  # those are the schedule's
    ]
    moved, launches, waits = phase["memory_bound_bytes"], phase["launches"], phase["host_syncs"]
    return Work(_joined(products), moved, launches, _joined(collectives), waits=waits)


def _by_exposure(one: Mapping[str, int]) -> Iterator[tuple[float, float, int, int]]:
    """Collectives that a product hides, those that a gradient of weights would hide that is computed later, and the
    others: `Collective.hidden` and `joined`, calls, bytes."""
    calls, nbytes = one["calls"], one["bytes"]
    for hidden, name in ((1.0, "hidden"), (0.0, "postponed")):
        some, of_these = one.get(f"{name}_calls", 0), one.get(f"{name}_bytes", 0)
        yield hidden, 1.0, some, of_these
        calls, nbytes = calls - some, nbytes - of_these
    yield 0.0, 0.0, calls, nbytes


def at_size(size: int, one: Any, two: Any) -> Any:
    """What is `one` at 1 and `two` at 2, at `size`: each number lies on a line."""
    if isinstance(one, (str, bool)):
        return one
    if isinstance(one, (int, float)):
        return one + (size - 1) * (two - one)
    if isinstance(one, tuple):
        parts = [at_size(size, *both) for both in zip(one, two, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
    return replace(one, **{name: at_size(size, value, getattr(two, name)) for name, value in vars(one).items()})
