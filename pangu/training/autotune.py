"""Autotuning: `auto` keys take the candidate that is fastest on this machine and these shapes, alike on all ranks.

A resumed run keeps its choices, because another candidate rounds differently.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pangu.collectives.reduce import gather_objects, largest_of
from pangu.common.errors import LocalError, writing
from pangu.common.files import write_atomically
from pangu.config.attention import ABILITIES
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.layers import apex
from pangu.layers.builder import DTYPES
from pangu.layers.cpu import precisions
from pangu.layers.kernel_choice import AttentionShape, attention_trial, kernels_of, random
from pangu.metrics.devices import processor_name
from pangu.metrics.timing import Timer, Trial, fastest, one_thread, time_candidates
from pangu.models.compiled import ways
from pangu.optim.build import make_optimizer
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement
from pangu.training.layer_timing import time_layers
from pangu.zero.weight_gradients import add_matmul

log = logging.getLogger("pangu")

ATTENTION_S, FORMATS_S, APEX_S = 0.3, 0.05, 0.1
"""Time budgets for timing, in seconds."""
LARGEST_TRIAL = 2**33
"""Multiplications of an attention trial, which take a few milliseconds."""
LARGEST_UPDATE = 2**26
"""Elements of a trial of the update, which takes about a millisecond."""
SLOW = 1.25
"""Slowdown over fp32 from which on a 16-bit format counts as unsupported by the processor."""


@dataclass(frozen=True)
class Choices:
    """Choices of implementation; they change results only by rounding."""

    attention: str
    """Attention kernel, a key of `ABILITIES`."""
    fp32_matmul: str
    """Precision of fp32 matmuls, a value of `torch.set_float32_matmul_precision`."""
    device: str
    """Device types of the run when it chose."""
    compute: str
    """Value of `precision.compute` when the run chose."""
    milliseconds: dict[str, dict[str, float]] = field(default_factory=dict)
    """Measured times of a micro-batch by choice and candidate, where there were several."""
    compile: str = "false"
    """Compilation of layers, `true` or `false`."""
    norm: str = "torch"
    """Kernels of norms, weight gradients and the update: values of `kernels`, `torch` or `apex`."""
    weight_gradient: str = "torch"
    optimizer: str = "torch"


def choose(config: RunConfig, mesh: Mesh, recorded: object = None, timer: Timer = time_candidates) -> Choices:
    """Time the candidates and log the choices with their reasons; keys set in `config` are taken as they are.

    All ranks of `mesh` call this together and get the same. `recorded`: choices in the checkpoint that the run
    continues from; None: a new run. Raises UserError if the requested attention kernel cannot train this model on this
    device.
    """
    compute, device = config.precision.compute, mesh.device
    kernels, compiles = kernels_of(config, device), ["false"]
    if config.compile:
        compiles = ways(config.compile, device)
    own = {"attention": kernels, "fp32_matmul": precisions(config.precision.fp32_matmul, compute, device)}
    own |= {"compile": compiles, **{use: apex.candidates(use, config, device) for use in apex.USES}}
    processors, offers = zip(*gather_objects((processor_name(device), own), mesh.group("world")), strict=True)
    candidates = {key: [one for one in offers[0][key] if all(one in names[key] for names in offers)] for key in own}
    device_kinds, every = ", ".join(sorted(set(processors))), candidates["attention"]
    candidates["attention"] = _affordable(config.model, every)
    if config.train.deterministic:  # times differ from start to start
        candidates = {key: names[:1] for key, names in candidates.items()}
    previous = _previous(config.model, recorded, candidates["attention"][0])
    recalled = _recall(candidates, previous, device_kinds, compute)
    seconds = {"attention": _time_attention(config, mesh, candidates["attention"], every, timer)}
    attention = fastest(seconds["attention"], device)
    recalled = [key for key in recalled if key != "attention" or attention == previous[key]]
    layer_times = dict.fromkeys(itertools.product(candidates["fp32_matmul"], candidates["compile"]), 0.0)
    if len(layer_times) > 1:
        layer_times = time_layers(config, mesh, attention, list(layer_times), timer)
    precision, compiled = fastest(layer_times, device)
    seconds["fp32_matmul"] = {one: layer_times[one, compiled] for one in candidates["fp32_matmul"]}
    seconds["compile"] = {one: layer_times[precision, one] for one in candidates["compile"]}
    seconds |= {use: time_uses(use, candidates[use], config, mesh, timer) for use in apex.USES}
    saved = previous.get("milliseconds")
    milliseconds = {key: saved[key] for key in recalled if key in saved} if isinstance(saved, dict) else {}
    for key, times in seconds.items():
        if len(times) > 1:
            milliseconds[key] = {k: round(1000 * time, 3) for k, time in times.items() if math.isfinite(time)}
    uses = {use: fastest(seconds[use], device) for use in apex.USES}
    choices = Choices(attention, precision, device_kinds, compute, milliseconds, compiled, **uses)
    _log_choices(config, choices, recalled)
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
    size = 160 if device.type == "cpu" else 800  # a slow format shows in a small matmul too
    trials: dict[str, Trial] = {}
    for name in dict.fromkeys(("fp32", "bf16", compute)):
        trials[name] = partial(operator.matmul, *random(device, DTYPES[name], (size, size), (size, size)))
    with one_thread(device):
        times = timer(trials, device, FORMATS_S)
    best = min(times, key=lambda name: times[name])
    if times[compute] > SLOW * times[best] and times[compute] > SLOW * times["fp32"]:
        log.warning(
            "precision.compute = %s: this processor has no fast instructions for it, so matmuls take %.1f times as "
            "long as in %s; set precision=%s",
            compute,
            times[compute] / times[best],
            best,
            best,
        )


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
        if key not in previous or names == [previous[key]]:
            continue
        if same and previous.get(key) in names:
            candidates[key] = [previous[key]]
            recalled.append(key)
        elif same:
            log.info("%-12s the checkpoint's %r is not available in this run: chosen again", key, previous.get(key))
        else:
            where = f"{previous.get('device')!r}, {previous.get('compute')!r}"
            log.info("%-12s the checkpoint's %r was chosen on %s: chosen again", key, previous.get(key), where)
    return recalled


def _previous(model: ModelConfig, recorded: object, preferred: str) -> Mapping[str, Any]:
    """Return the checkpoint's choices, without a kernel of layout-dependent dropout if `auto` has a better one."""
    previous = dict(recorded) if isinstance(recorded, dict) else {}
    if "products" in previous:  # checkpoints of earlier versions
        previous["fp32_matmul"] = previous.pop("products")
    kernel, is_free = previous.get("attention"), model.attention == "auto" and model.attention_dropout > 0
    if not is_free or kernel not in ABILITIES or ABILITIES[kernel].hashed or not ABILITIES[preferred].hashed:
        return previous
    message = "the checkpoint's %r drops different elements in each layout; set model.attention=%s to keep it"
    log.info(f"%-12s {message}", "attention", kernel, kernel)
    return {key: value for key, value in previous.items() if key != "attention"}


def _time_attention(
    config: RunConfig, mesh: Mesh, candidates: list[str], every: list[str], timer: Timer
) -> dict[str, float]:
    """Return the kernels' times on the slowest rank; if no candidate runs on all ranks, those of others of `every`."""
    times: dict[str, float] = {}
    others = [kernel for kernel in _affordable(config.model, every) if kernel not in candidates]
    for kernels in filter(None, (candidates, others, every[-1:])):
        times = _time_kernels(config, mesh, kernels, timer)
        times |= zip(times, largest_of(list(times.values()), mesh), strict=True)
        if min(times.values()) < math.inf:
            break
    return times


def _time_kernels(config: RunConfig, mesh: Mesh, kernels: Sequence[str], timer: Timer) -> dict[str, float]:
    """Return the seconds of a micro-batch's attention by kernel; 0: no choice, inf: cannot run."""
    # with parts of sequences there is a choice only where the ranks share heads
    model, ranks = config.model, mesh.layout.tensor * mesh.layout.context
    is_sure = model.attention != "auto" or mesh.layout.context > 1 or ABILITIES[kernels[0]].devices is None
    if len(kernels) == 1 and is_sure:
        return {kernels[0]: 0.0}
    whole = AttentionShape(
        rows=config.rows_at_once[0],
        heads=model.heads // ranks,
        kv_heads=math.lcm((model.kv_heads or model.heads), ranks) // ranks,
        sequence=model.sequence,
        head_size=model.head_size,
        documents=config.data.packing.reset_mask,
        window=None,
        biased=model.positions in ("alibi", "relative"),
        sparse=model.sparse,
        dropout=model.attention_dropout,
        sinks=model.attention_sinks,
    )
    dtype, device = DTYPES[config.precision.compute], mesh.device
    total = dict.fromkeys(kernels, 0.0)
    for window, layers in Counter(model.window if model.has_window(n) else None for n in range(model.layers)).items():
        shape, repeats = replace(whole, window=window).cut(LARGEST_TRIAL)
        repeats *= config.batch.micro_size / whole.rows

        def trial(kernel: str, shape: AttentionShape = shape) -> Trial:
            return attention_trial(kernel, shape, dtype, device)

        trials = _runnable("attention", kernels, trial)
        times = timer(trials, device, ATTENTION_S) if trials and len(kernels) > 1 else dict.fromkeys(trials, 0.0)
        total = {kernel: total[kernel] + layers * repeats * times.get(kernel, math.inf) for kernel in kernels}
    return total


def _runnable(what: str, names: Sequence[str], make: Callable[[str], Trial]) -> dict[str, Trial]:
    """Return the trials that run once without an error; what compilers and libraries demand, no table says."""
    trials: dict[str, Trial] = {}
    for name in names:
        try:
            (trial := make(name))()
        except (RuntimeError, LocalError, TypeError, AttributeError) as error:  # or another version of a package
            log.info("%-12s %s cannot run here: %s", what, name, str(error).partition("\n")[0])
        else:
            trials[name] = trial
    return trials


def time_uses(use: str, names: Sequence[str], config: RunConfig, mesh: Mesh, timer: Timer) -> dict[str, float]:
    """Return the slowest rank's seconds by implementation of a key of `kernels`; 0: no choice, inf: cannot run."""
    if len(names) == 1:
        return {names[0]: 0.0}
    model, layout, dtype, size = config.model, mesh.layout, DTYPES[config.precision.compute], config.model.hidden
    rows = model.sequence // layout.context * config.rows_at_once[0]
    count = min(LARGEST_UPDATE, 12 * model.layers * size**2)

    def norm(name: str) -> Trial:
        x, grad, weight, bias = random(mesh.device, dtype, (rows, size), (rows, size), (size,), (size,))
        given = [x.requires_grad_(), weight.requires_grad_()]
        is_rms = model.norm == "rmsnorm"
        compute = partial(apex.NORMS[name][is_rms], x, x.shape[1:], weight, *[] if is_rms else [bias], model.norm_eps)
        return lambda: torch.autograd.grad(compute(), given, grad)

    def weight_gradient(name: str) -> Trial:
        width = model.ffn_size // layout.tensor
        x, grad = random(mesh.device, dtype, (rows, size), (rows, width))
        total = torch.zeros(width, size, device=mesh.device)
        return partial(add_matmul, total, grad.t(), x, False, name == "apex")

    def optimizer(name: str) -> Trial:
        weight, grad = random(mesh.device, torch.float32, (count,), (count,))
        weight.grad = grad
        update = make_optimizer(config.optimizer, [(Placement("matrix", (count, 1)), weight)], kernels=name)
        return lambda: (apex.UPDATES[name].norms([grad]), update.step())

    trials = _runnable(use, names, {"norm": norm, "weight_gradient": weight_gradient, "optimizer": optimizer}[use])
    times = timer(trials, mesh.device, APEX_S) if len(trials) > 1 else dict.fromkeys(trials, 0.0)
    return dict(zip(names, largest_of([times.get(name, math.inf) for name in names], mesh), strict=True))


def _log_choices(config: RunConfig, choices: Choices, recalled: Sequence[str]) -> None:
    keys = {
        "attention": f"model.attention={config.model.attention}",
        "fp32_matmul": f"precision.fp32_matmul={config.precision.fp32_matmul}",
        **({"compile": f"compile={str(config.compile).lower()}"} if config.compile else {}),
    }
    for use in apex.USES:
        if use in choices.milliseconds or getattr(choices, use) == "apex":
            keys[use] = f"kernels.{use}={getattr(config.kernels, use)}"
    for name, key in keys.items():
        figures = choices.milliseconds.get(name, {})
        reasons = [key] + ["kept from the checkpoint"] * (name in recalled)
        if times := ", ".join(f"{candidate} {figure:.3g}" for candidate, figure in figures.items()):
            what = "a micro-batch" if name not in apex.USES else f"one {name.replace('_', ' ')}"
            reasons.append(f"ms of {what}: {times}")
        log.info("%-12s %s (%s)", name.replace("_", " "), getattr(choices, name), "; ".join(reasons))
