"""Autotuning: `auto` keys take the candidate that is fastest on this machine and these shapes, alike on all ranks.

A resumed run keeps its choices, because another candidate rounds differently.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from pangu.collectives.algorithms import RepeatedCollective
from pangu.collectives.reduce import gather_objects, largest_of
from pangu.common.errors import LocalError, writing
from pangu.common.files import write_atomically
from pangu.config.attention import ABILITIES
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.layers.builder import DTYPES
from pangu.layers.fp32_matmul import (
    MATMUL_TIE,
    MatmulShape,
    matmul_precision,
    matmul_precisions,
    matmul_trial,
    work_limit,
)
from pangu.layers.kernel_choice import AttentionShape, attention_trial, kernels_of
from pangu.layers.kernel_table import KERNELS
from pangu.metrics.devices import processor_name
from pangu.metrics.timing import Timer, Trial, fastest, one_thread, time_candidates
from pangu.models.compiled import ways
from pangu.models.size import layer_matrices
from pangu.topology.mesh import Mesh
from pangu.training.layer_timing import time_layers

log = logging.getLogger("pangu")

PRODUCTS_S, ATTENTION_S, FORMATS_S = 0.3, 0.3, 0.05
"""Time budgets for timing, in seconds."""
MESSAGE_BYTES = 2**20
"""Largest message that is timed, bytes."""
SLOW = 1.25
"""Slowdown over fp32 from which on a 16-bit format counts as unsupported by the processor."""


@dataclass(frozen=True)
class Choices:
    """Choices of implementation; they change results only by rounding."""

    attention: str
    """Attention kernel, a key of `ABILITIES`."""
    products: str
    """Precision of fp32 matmuls, a value of `torch.set_float32_matmul_precision`."""
    gather: str
    """All-gather algorithm, see `Algorithms.gather`."""
    scatter: str
    """Reduce-scatter algorithm, see `Algorithms.scatter`."""
    device: str
    """Device types of the run when it chose."""
    compute: str
    """Value of `precision.compute` when the run chose."""
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Measured times by choice and candidate, for a micro-batch (on a CPU: one thread) or a message; empty where there
    was only one candidate."""
    compile: str = "false"
    """Compile layers: `true` or `false`."""


def choose(config: RunConfig, mesh: Mesh, recorded: object = None, timer: Timer = time_candidates) -> Choices:
    """Time the candidates and log the choices with their reasons; keys set in `config` are taken as they are.

    All ranks of `mesh` call this together and get the same. `recorded`: choices in the checkpoint that the run
    continues from; None: a new run. Raises UserError if the requested attention kernel cannot train this model on this
    device.
    """
    compute, device = config.precision.compute, mesh.device
    kernels, shared = kernels_of(config, device), config.parallel.context > 1
    compiles = ["false"]
    if config.compile and not shared:
        compiles = ways(config.compile, device)
        kernels = [kernel for kernel in kernels if kernel != "flash_attn"]  # see `config.checks`
    precisions = matmul_precisions(config.precision.fp32_matmul, device, DTYPES[compute], _matmul(config, mesh)[0])
    of_ranks = gather_objects((processor_name(device), kernels, precisions, compiles), mesh.group("world"))
    processors, kernels_of_ranks, precisions_of_ranks, compiles_of_ranks = zip(*of_ranks, strict=True)
    device_kinds = ", ".join(sorted(set(processors)))
    collectives = _collectives(config, mesh) if mesh.groups else []
    gathers, scatters = ([one for one in collectives if one.kind == kind] for kind in ("gather", "scatter"))
    every = _common(kernels_of_ranks, "")
    candidates = {
        "attention": _affordable(config.model, every),
        "products": _common(precisions_of_ranks, ""),
        "gather": _common([gather.algorithms for gather in gathers], mesh.algorithms.gather),
        "scatter": _common([scatter.algorithms for scatter in scatters], mesh.algorithms.scatter),
        "compile": _common(compiles_of_ranks, ""),
    }
    if config.train.deterministic:  # times differ from start to start
        candidates = {key: names[:1] for key, names in candidates.items()}
    previous = _previous(config.model, recorded, candidates["attention"][0])
    recalled = _recall(candidates, previous, device_kinds, compute)
    seconds = {
        "products": _time_matmuls(config, mesh, candidates["products"], timer),
        "gather": _time_collectives(gathers, candidates["gather"], mesh, timer),
        "scatter": _time_collectives(scatters, candidates["scatter"], mesh, timer),
    }
    for times in seconds.values():  # the slowest rank decides
        times |= zip(times, largest_of(list(times.values()), mesh), strict=True)
    seconds["attention"] = _time_attention(config, mesh, candidates, every, timer)
    # a kernel's own matmuls depend on the precision too: what counts is both together, in a micro-batch
    both = {pair: time + seconds["products"][pair[1]] for pair, time in seconds["attention"].items()}
    attention, _ = fastest(both, device)
    recalled = [key for key in recalled if key != "attention" or attention == previous[key]]
    of_kernel = {p: time for (kernel, p), time in both.items() if kernel == attention}
    products = fastest(of_kernel, device, MATMUL_TIE)
    seconds["attention"] = {kernel: time for (kernel, p), time in seconds["attention"].items() if p == products}
    seconds["products"] = {p: min(t for (_, q), t in both.items() if q == p) for p in candidates["products"]}
    seconds["compile"] = dict.fromkeys(candidates["compile"], 0.0)
    if len(seconds["compile"]) > 1:
        seconds["compile"] = time_layers(config, mesh, attention, products, timer)
    saved = previous.get("milliseconds")
    milliseconds = {key: saved[key] for key in recalled if key in saved} if isinstance(saved, dict) else {}
    for key, times in seconds.items():
        if len(times) > 1:
            milliseconds[key] = {k: round(1000 * time, 3) for k, time in times.items() if math.isfinite(time)}
    gather, scatter, compiled = (fastest(seconds[key], device) for key in ("gather", "scatter", "compile"))
    choices = Choices(attention, products, gather, scatter, device_kinds, compute, milliseconds, compiled)
    _log_choices(config, choices, recalled, "" if device.type != "cpu" else " on one thread")
    return choices


def save_choices(folder: Path, choices: Choices) -> None:
    """Write choices.json, for people: a resumed run reads its checkpoint instead. Raises UserError."""
    with writing(folder):
        write_atomically(folder / "choices.json", f"{json.dumps(asdict(choices), indent=1)}\n".encode())


def warn_of_slow_format(config: RunConfig, mesh: Mesh, timer: Timer = time_candidates) -> None:
    """Warn if matmuls of a 16-bit format are slower than fp32, which processors without such instructions emulate."""
    compute, device = config.precision.compute, mesh.device
    if compute not in ("bf16", "fp16") or not mesh.is_first:
        return
    size = round((work_limit(device) / 16) ** (1 / 3))  # a slow format shows in a short product too
    formats = {name: DTYPES[name] for name in ("fp32", "bf16", "fp16") if name in ("fp32", "bf16", compute)}
    trials = {name: matmul_trial(MatmulShape(size, size, size), dtype, device) for name, dtype in formats.items()}
    with one_thread(device):
        times = timer(trials, device, FORMATS_S)
    best = min(times, key=lambda name: times[name])
    if times[compute] > SLOW * times[best] and times[compute] > SLOW * times["fp32"]:
        log.warning(
            "precision.compute = %s: this processor has no fast instructions for it, matmuls take %.1f times as long "
            "as in %s; set precision=%s",
            compute,
            times[compute] / times[best],
            best,
            best,
        )


def _collectives(config: RunConfig, mesh: Mesh) -> list[RepeatedCollective]:
    layout, model = mesh.layout, config.model
    weights = sum(inputs * outputs for inputs, outputs in layer_matrices(model, layout.tensor))
    compute = DTYPES[config.precision.compute]
    sums = torch.bfloat16 if config.precision.reduce == "bf16" else torch.promote_types(compute, torch.float32)
    states = model.sequence // layout.context * config.batch.micro_size * model.hidden
    keys = 2 * model.sequence * config.batch.micro_size * model.kv_size // layout.tensor
    whole, kinds = layout.zero == 0 and layout.replicas > 2, ("gather", "scatter")
    collectives = []
    for axis, used, numel, dtype, axis_kinds in (
        ("tensor", layout.sequence, states, compute, kinds),
        ("context", layout.context > 1, keys, compute, kinds),
        ("gather", layout.zero > 0, weights, compute, kinds[:1]),
        ("shard", layout.zero > 0, weights, sums, kinds[1:]),
        ("replicas", whole, weights, sums, kinds),
    ):
        group = mesh.group(axis) if used else None
        if group is not None:
            share = min(numel, MESSAGE_BYTES // dtype.itemsize) // mesh.layout.world + 1
            collectives += [RepeatedCollective(kind, group, share * mesh.layout.world, dtype) for kind in axis_kinds]
    return collectives


def _common(lists: Sequence[list[str]], default: str) -> list[str]:
    """Return the candidates that are in all lists, in the order of the first; `default` if there is no list."""
    return [name for name in lists[0] if all(name in names for names in lists)] if lists else [default]


def _affordable(model: ModelConfig, kernels: list[str]) -> list[str]:
    """Drop kernels that keep scores larger than half of a layer's activations: the speed is not worth that memory.

    Scores take 5as of 34h + 5as bytes per token (Korthikanti et al. 2022, table 2).
    """
    large = 5 * model.heads * model.sequence > 34 * model.hidden
    return [name for name in kernels if name == kernels[0] or not (large and ABILITIES[name].scores)]


def _recall(candidates: dict[str, list[str]], previous: Mapping[str, Any], device: str, compute: str) -> list[str]:
    """Narrow the candidates to the checkpoint's choices; return the names of the choices that are kept."""
    same = previous.get("device") == device and previous.get("compute") == compute
    recalled = []
    for key, names in candidates.items():
        if len(names) == 1 or key not in previous:
            continue
        if same and previous.get(key) in names:
            candidates[key] = [previous[key]]
            recalled.append(key)
        elif same:
            log.info("%-12s the checkpoint's %r is not available in this layout: timed again", key, previous.get(key))
        else:
            where = f"{previous.get('device')!r}, {previous.get('compute')!r}"
            log.info("%-12s the checkpoint's %r was chosen on %s: timed again", key, previous.get(key), where)
    return recalled


def _previous(model: ModelConfig, recorded: object, preferred: str) -> Mapping[str, Any]:
    """Return the checkpoint's choices, without a kernel of layout-dependent dropout if `auto` has a better one."""
    previous: Mapping[str, Any] = recorded if isinstance(recorded, dict) else {}
    kernel, is_free = previous.get("attention"), model.attention == "auto" and model.attention_dropout > 0
    if not is_free or kernel not in ABILITIES or ABILITIES[kernel].hashed or not ABILITIES[preferred].hashed:
        return previous
    message = "the checkpoint's %r drops other elements in each layout; set model.attention=%s to keep it"
    log.info(f"%-12s {message}", "attention", kernel, kernel)
    return {key: value for key, value in previous.items() if key != "attention"}


def _matmul(config: RunConfig, mesh: Mesh) -> tuple[MatmulShape, float]:
    """Return the largest matmul of a rank, cut to the timed size, and the number of them in a micro-batch's matmuls.

    Cut to one size, all hardly differ in shape, and kernels for each would stay in the process.
    """
    model, ranks = config.model, mesh.layout.tensor
    tokens = model.sequence // mesh.layout.context * config.batch.micro_size
    sizes = [size for layer in range(model.layers) for size in layer_matrices(model, ranks, layer)]
    head = (model.hidden, -(-model.vocab // ranks))
    multiplications = tokens * sum(math.prod(size) for size in (*sizes, head))
    largest = max(
        *((tokens, *size) for size in sizes), (min(tokens, config.loss_chunk or tokens), *head), key=math.prod
    )
    return MatmulShape(*largest, repeats=multiplications / math.prod(largest)).cut(work_limit(mesh.device))


def _time_matmuls(config: RunConfig, mesh: Mesh, precisions: Sequence[str], timer: Timer) -> dict[Any, float]:
    """Return the seconds of a micro-batch's matmuls per tensor-parallel rank, by precision; 0 without a choice."""
    if len(precisions) == 1:
        return dict.fromkeys(precisions, 0.0)
    with one_thread(mesh.device):
        matmul, repeats = _matmul(config, mesh)
        trial = matmul_trial(matmul, DTYPES[config.precision.compute], mesh.device)
        trials = {precision: matmul_precision(precision)(trial) for precision in precisions}
        times = timer(trials, mesh.device, PRODUCTS_S)
    return {precision: repeats * time for precision, time in times.items()}


def _time_attention(
    config: RunConfig, mesh: Mesh, candidates: Mapping[str, list[str]], every: list[str], timer: Timer
) -> dict[Any, float]:
    """Return the kernels' times on the slowest rank; if no candidate runs on all ranks, those of others of `every`."""
    times: dict[Any, float] = {}
    others = [kernel for kernel in _affordable(config.model, every) if kernel not in candidates["attention"]]
    for kernels in filter(None, (candidates["attention"], others, every[-1:])):
        with one_thread(mesh.device):
            times = _time_kernels(config, mesh, kernels, candidates["products"], timer)
        times |= zip(times, largest_of(list(times.values()), mesh), strict=True)
        if min(times.values()) < math.inf:
            break
    return times


def _time_kernels(
    config: RunConfig, mesh: Mesh, kernels: Sequence[str], precisions: Sequence[str], timer: Timer
) -> dict[Any, float]:
    """Return the seconds of a micro-batch's attention by kernel and precision; 0: no choice, inf: cannot run."""
    # with parts of sequences there is a choice only where the ranks share heads
    model, ranks = config.model, mesh.layout.tensor * mesh.layout.context
    pairs = list(itertools.product(kernels, precisions))
    is_sure = model.attention != "auto" or mesh.layout.context > 1 or kernels[0] in KERNELS
    if len(pairs) == 1 and is_sure:
        return dict.fromkeys(pairs, 0.0)
    whole = AttentionShape(
        rows=config.batch.micro_size,
        heads=model.heads // ranks,
        kv_heads=math.lcm((model.kv_heads or model.heads), ranks) // ranks,
        sequence=model.sequence,
        head_size=model.head_size,
        documents=config.data.packing.reset_mask,
        window=model.window,
        biased=model.positions in ("alibi", "relative"),
        sparse=model.sparse,
        dropout=model.attention_dropout,
    )
    shape, repeats = whole.cut(work_limit(mesh.device))
    dtype = DTYPES[config.precision.compute]
    trials: dict[Any, Trial] = {}
    for kernel in kernels:
        try:
            (trial := attention_trial(kernel, shape, dtype, mesh.device))()
        except (RuntimeError, LocalError) as error:  # what compilers and libraries demand, no table says
            log.info("%-12s %s cannot run here: %s", "attention", kernel, str(error).partition("\n")[0])
        else:
            trials |= {(kernel, precision): matmul_precision(precision)(trial) for precision in precisions}
    if len(pairs) == 1:
        return dict.fromkeys(pairs, 0.0 if trials else math.inf)
    times = timer(trials, mesh.device, ATTENTION_S) if trials else {}
    return {pair: model.layers * repeats * times.get(pair, math.inf) for pair in pairs}


def _time_collectives(
    collectives: Sequence[RepeatedCollective], algorithms: Sequence[str], mesh: Mesh, timer: Timer
) -> dict[Any, float]:
    seconds = dict.fromkeys(algorithms, 0.0)
    if len(algorithms) > 1:
        trials = {(name, i): one.trial(name) for name in algorithms for i, one in enumerate(collectives)}
        for (name, _), time in timer(trials, mesh.device, None).items():
            seconds[name] += time
    return seconds


def _log_choices(config: RunConfig, choices: Choices, recalled: Sequence[str], where: str) -> None:
    keys = {
        "attention": f"model.attention={config.model.attention}",
        "products": f"precision.fp32_matmul={config.precision.fp32_matmul}",
        **({"compile": f"compile={str(config.compile).lower()}"} if config.compile else {}),
    }
    for name in ("attention", "products", "gather", "scatter", "compile"):
        figures = choices.milliseconds.get(name, {})
        if name not in keys and not figures:
            continue
        reasons = [keys[name]] if name in keys else []
        reasons += ["kept from the checkpoint"] if name in recalled else []
        if figures:
            timed = "of a micro-batch" if name in keys else "of a message"
            timed += where if name in ("attention", "products") else ""
            reasons.append(
                f"ms {timed}: " + ", ".join(f"{candidate} {figure:.3g}" for candidate, figure in figures.items())
            )
        log.info("%-12s %s (%s)", name, getattr(choices, name), "; ".join(reasons))
