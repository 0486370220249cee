"""The choices that `auto` stands for: among ways to the same result the one that is the fastest on this machine, on the
run's own shapes, the same on all ranks. A run that is resumed keeps them, because another way rounds differently."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from pangu.collectives.algorithms import (
    CollectiveShape,
    gather_algorithms,
    gather_trial,
    scatter_algorithms,
    scatter_trial,
)
from pangu.collectives.reduce import gather_objects, largest_of
from pangu.config.errors import writing
from pangu.config.files import write_atomically
from pangu.config.schema import RunConfig
from pangu.layers.formats import DTYPES
from pangu.layers.fp32_matmul import Matmul, matmul_precision, matmul_precisions, matmul_trial, work_limit
from pangu.layers.kernel_timing import AttentionShape, attention_trial
from pangu.layers.kernels import attention_kernels
from pangu.metrics.devices import processor_name
from pangu.metrics.timing import fastest, time_ways
from pangu.models.size import layer_matrices
from pangu.planning.activations import layer_activations
from pangu.topology.mesh import Mesh

log = logging.getLogger("pangu")

PRODUCTS_S, ATTENTION_S, FORMATS_S = 0.1, 0.15, 0.05
"""Seconds that timing may take."""
MESSAGE_BYTES = 2**20
"""Longest message that is timed."""
SLOW = 1.25
"""A format whose products take so many times as long as those of fp32 is one that the processor has no use for."""
KEYS = ("attention", "products", "gather", "scatter")


@dataclass(frozen=True)
class Choices:
    """How a run is computed; nothing of it changes what is computed beyond rounding."""

    attention: str
    """Kernel, a key of `KERNELS`."""
    products: str
    """Way to fp32 products, in the words of `torch.set_float32_matmul_precision`."""
    gather: str
    """`Algorithms.gather`."""
    scatter: str
    """`Algorithms.scatter`."""
    device: str
    """Kinds of device that the run was on when it chose."""
    compute: str
    """Its `precision.compute`."""
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Choice -> candidate -> time for a micro-batch, or for a message; empty where there was only one."""


class Timer(Protocol):
    """`time_ways`, or what stands in for it."""

    def __call__(
        self, ways: Mapping[Any, Callable[[], object]], device: torch.device, budget_s: float | None
    ) -> dict[Any, float]: ...


def choose(config: RunConfig, mesh: Mesh, recorded: object = None, timer: Timer = time_ways) -> Choices:
    """Choose, and say what was chosen and why.

    Args:
        config: the run. What it asks for by name is taken.
        mesh: live; all ranks call this together and get the same.
        recorded: what the checkpoint that the run continues from holds of the choices; None: a new run.
        timer: stops the time.

    Raises:
        UserError: if the attention kernel that is asked for cannot train this model on this device.
    """
    compute, device = config.precision.compute, mesh.device
    ways = matmul_precisions(config.precision.fp32_products, device, DTYPES[compute])
    answers = gather_objects((processor_name(device), ways), mesh.group("world"))
    kinds = ", ".join(sorted({kind for kind, _ in answers}))
    messages = _messages(config, mesh)
    candidates = {
        "attention": _affordable(config, attention_kernels(config.model, compute, device), device),
        "products": [way for way in ways if all(way in others for _, others in answers)],
        "gather": _common(
            [gather_algorithms(message.group) for message in messages if message.gathered], mesh.algorithms.gather
        ),
        "scatter": _common(
            [scatter_algorithms(message.group) for message in messages if message.summed], mesh.algorithms.scatter
        ),
    }
    old = recorded if isinstance(recorded, dict) else {}
    kept = _keep(candidates, old, kinds, compute)
    times = _times(config, mesh, candidates, messages, timer)
    chosen = {"gather": fastest(times.gather), "scatter": fastest(times.scatter)}
    chosen["attention"], chosen["products"] = fastest(times.together)
    figures = old.get("milliseconds")
    milliseconds = {key: figures[key] for key in kept if key in figures} if isinstance(figures, dict) else {}
    choices = Choices(**chosen, device=kinds, compute=compute, milliseconds=milliseconds | times.told(chosen))
    _tell(config, choices, kept, mesh)
    return choices


def save_choices(folder: Path, choices: Choices) -> None:
    """Write choices.json, for people: what a resumed run keeps is in its checkpoint. Raises UserError."""
    with writing(folder):
        write_atomically(folder / "choices.json", f"{json.dumps(asdict(choices), indent=1)}\n".encode())


def warn_of_slow_format(config: RunConfig, mesh: Mesh, timer: Timer = time_ways) -> None:
    """Say if products of a 16-bit format take longer here than those of fp32: the processor has no instructions for it,
    and torch makes do with others. All ranks may call it; it says nothing on most."""
    asked, device = config.precision.compute, mesh.device
    if asked not in ("bf16", "fp16") or not mesh.is_first:
        return
    size = round((work_limit(device) / 2) ** (1 / 3))
    formats = {name: DTYPES[name] for name in ("fp32", "bf16", "fp16") if name in ("fp32", "bf16", asked)}
    passes = {name: matmul_trial(Matmul(size, size, size), dtype, device) for name, dtype in formats.items()}
    times = timer(passes, device, FORMATS_S)
    best = min(times, key=lambda name: times[name])
    if times[asked] > SLOW * times[best] and times[asked] > SLOW * times["fp32"]:
        log.warning(
            "precision.compute = %s: this processor has no fast instructions for it, products take %.1f times as long "
            "as in %s; precision=%s works",
            asked,
            times[asked] / times[best],
            best,
            best,
        )


def _messages(config: RunConfig, mesh: Mesh) -> list[CollectiveShape]:
    """The gathers and reduce-scatters of a layer."""
    layout, model = mesh.layout, config.model
    weights = sum(inputs * outputs for inputs, outputs in layer_matrices(model, layout.tensor))
    compute = DTYPES[config.precision.compute]
    sums = torch.bfloat16 if config.precision.reduce == "bf16" else torch.promote_types(compute, torch.float32)
    states = model.sequence * config.batch.micro_size * model.hidden
    found = []
    for axis, used, numel, dtype, gathered, summed in (
        ("tensor", layout.sequence, states, compute, True, True),
        ("gather", layout.zero > 0, weights, compute, True, False),
        ("shard", layout.zero > 0, weights, sums, False, True),
        ("data", layout.zero == 0 and layout.data > 2, weights, sums, True, True),
    ):
        group = mesh.group(axis) if used else None
        if group is not None:
            share = min(numel, MESSAGE_BYTES // dtype.itemsize) // mesh.layout.world + 1
            found.append(CollectiveShape(group, share * mesh.layout.world, dtype, gathered, summed))
    return found


def _common(ways: Sequence[list[str]], usual: str) -> list[str]:
    """The ways that all groups have."""
    return [way for way in ways[0] if all(way in others for others in ways)] if ways else [usual]


def _affordable(config: RunConfig, kernels: list[str], device: torch.device) -> list[str]:
    """Without kernels that keep more than twice as much of a layer for backward as the preferred one does: what
    explicit scores save in time on long sequences is not worth their memory."""
    kind: Literal["cpu", "cuda"] = "cpu" if device.type == "cpu" else "cuda"

    def kept(kernel: str) -> int:
        return sum(layer_activations(config, kernel, device=kind).values())

    return [kernel for kernel in kernels if kernel == kernels[0] or kept(kernel) <= 2 * kept(kernels[0])]


def _keep(candidates: dict[str, list[str]], old: Mapping[str, Any], kinds: str, compute: str) -> list[str]:
    """Narrow the candidates to what the checkpoint has chosen; returns the choices that are kept."""
    same = old.get("device") == kinds and old.get("compute") == compute
    kept = []
    for key, ways in candidates.items():
        if len(ways) == 1 or not old:
            continue
        if same and old.get(key) in ways:
            candidates[key] = [old[key]]
            kept.append(key)
        elif same:
            log.info("%-12s the checkpoint's, %r, cannot be had in this layout: timed anew", key, old.get(key))
        else:
            where = f"{old.get('device')!r}, {old.get('compute')!r}"
            log.info("%-12s the checkpoint's, %r, was chosen on %s: timed anew", key, old.get(key), where)
    return kept


@dataclass(frozen=True)
class _Times:
    """Seconds of every candidate, of the slowest rank; 0 where there is no choice."""

    attention: dict[tuple[str, str], float]
    """By kernel and way to products, on which a kernel's own depend."""
    products: dict[str, float]
    gather: dict[str, float]
    scatter: dict[str, float]

    @property
    def together(self) -> dict[tuple[str, str], float]:
        """Attention and products of a micro-batch."""
        return {pair: seconds + self.products[pair[1]] for pair, seconds in self.attention.items()}

    def told(self, chosen: Mapping[str, str]) -> dict[str, dict[str, float]]:
        """What there was to choose from, in milliseconds: kernels with the way that was chosen, ways with the kernel
        that is the fastest in them."""
        figures = {
            "attention": {kernel: s for (kernel, way), s in self.attention.items() if way == chosen["products"]},
            "products": {way: min(s for (_, w), s in self.together.items() if w == way) for way in self.products},
            "gather": self.gather,
            "scatter": self.scatter,
        }
        return {
            key: {way: round(1000 * s, 3) for way, s in times.items()}
            for key, times in figures.items()
            if len(times) > 1
        }


def _times(
    config: RunConfig,
    mesh: Mesh,
    candidates: Mapping[str, list[str]],
    messages: Sequence[CollectiveShape],
    timer: Timer,
) -> _Times:
    device, dtype, ways = mesh.device, DTYPES[config.precision.compute], candidates["products"]
    pairs = list(itertools.product(candidates["attention"], ways))
    times = _Times(
        dict.fromkeys(pairs, 0.0),
        dict.fromkeys(ways, 0.0),
        dict.fromkeys(candidates["gather"], 0.0),
        dict.fromkeys(candidates["scatter"], 0.0),
    )
    if len(ways) > 1:
        _time_products(times.products, _products(config, mesh.layout.tensor), device, dtype, timer)
    if len(pairs) > 1:
        shape, worth = _attention_shape(config, mesh.layout.tensor).cut(work_limit(device))
        once = {kernel: attention_trial(kernel, shape, dtype, device) for kernel in candidates["attention"]}
        passes = {(kernel, way): partial(_by, way, once[kernel]) for kernel, way in pairs}
        for pair, seconds in timer(passes, device, ATTENTION_S).items():
            times.attention[pair] = config.model.layers * worth * seconds
    for found, make, wanted in (
        (times.gather, gather_trial, [message for message in messages if message.gathered]),
        (times.scatter, scatter_trial, [message for message in messages if message.summed]),
    ):
        if len(found) > 1:
            numbered = list(itertools.product(found, range(len(wanted))))
            sends = {(way, i): make(wanted[i], way) for way, i in numbered}
            for (way, _), seconds in timer(sends, device, None).items():
                found[way] += seconds
    tables: list[dict[Any, float]] = [times.attention, times.products, times.gather, times.scatter]
    agreed = iter(largest_of([seconds for table in tables for seconds in table.values()], mesh))
    return _Times(*({name: next(agreed) for name in table} for table in tables))


def _by(way: str, once: Callable[[], object]) -> None:
    with matmul_precision(way):
        once()


def _products(config: RunConfig, ranks: int) -> list[Matmul]:
    """Those of a micro-batch, on a tensor-parallel rank."""
    model = config.model
    tokens = model.sequence * config.batch.micro_size
    some = min(tokens, config.loss.chunk or tokens)
    layers = [Matmul(tokens, inputs, outputs, model.layers) for inputs, outputs in layer_matrices(model, ranks)]
    return [*layers, Matmul(some, model.hidden, -(-model.vocab // ranks), -(-tokens // some))]


def _time_products(
    found: dict[str, float], products: Sequence[Matmul], device: torch.device, dtype: torch.dtype, timer: Timer
) -> None:
    passes: dict[tuple[str, int], Callable[[], object]] = {}
    worth = []
    for number, product in enumerate(products):
        smaller, times = product.cut(work_limit(device))
        worth.append(times)
        once = matmul_trial(smaller, dtype, device)
        passes |= {(way, number): partial(_by, way, once) for way in found}
    for (way, number), seconds in timer(passes, device, PRODUCTS_S).items():
        found[way] += worth[number] * seconds


def _attention_shape(config: RunConfig, ranks: int) -> AttentionShape:
    model = config.model
    return AttentionShape(
        rows=config.batch.micro_size,
        heads=model.heads // ranks,
        kv_heads=(model.kv_heads or model.heads) // ranks,
        sequence=model.sequence,
        head_size=model.head_size,
        documents=config.data.packing.reset_mask,
        window=model.window,
        biased=model.positions in ("alibi", "relative"),
    )


def _tell(config: RunConfig, choices: Choices, kept: Sequence[str], mesh: Mesh) -> None:
    """One line for each choice."""
    asked = {
        "attention": f"model.attention={config.model.attention}",
        "products": f"precision.fp32_products={config.precision.fp32_products}",
    }
    for key in KEYS:
        figures = choices.milliseconds.get(key, {})
        if key not in asked and not figures:
            continue
        words = [asked[key]] if key in asked else []
        words += ["kept from the checkpoint"] if key in kept else []
        if figures:
            timed = "of a micro-batch" if key in asked else "of a message"
            words.append(f"ms {timed}: " + ", ".join(f"{way} {figure:.3g}" for way, figure in figures.items()))
        log.info("%-12s %s (%s)", key, getattr(choices, key), "; ".join(words))
