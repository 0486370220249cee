"""Whole steps of models from 124M on, as large as fit: the trainer with torch's flash attention and with its own
kernels beside a plain loop, `transformers` and FSDP2, with measured peaks of memory against the dry run's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu_suite import forecast
from benchmarks.gpu_suite.setting import Setting, looped, make_trainer, quick_weights, seconds_of, tokens_of
from benchmarks.models import PlainGPT, loop
from benchmarks.train_step import transformers_gpt2
from benchmarks.zero import fully_sharded
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.metrics.devices import device_name, peak_tflops
from pangu.models import compiled
from pangu.models.size import num_parameters, training_flops_per_token

SIZES = (*forecast.SIZES, forecast.SLICE)
OWN = "pangu, own attention"
"""The trainer with its own attention kernels."""
Rounds = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""Peers and the sizes that each is measured with; what stands first is there even if time runs out."""
ROUNDS: Rounds = (
    (("pangu",), SIZES[1:]),
    (("plain", OWN, "fsdp2", "transformers"), ("pangu_350m", "gpt3_1_3b", "pangu_2_6b")),
    (("pangu", "plain", "transformers", "fsdp2"), SIZES[:1]),
)
BUDGET_S = 1.5
"""Seconds of timed steps."""
Step = Callable[[], float]


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process, which FSDP2 wants."""
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compiler_of(device: torch.device) -> str:
    """The backend of torch.compile: on a host one that makes no C++, which takes a minute."""
    torch.compiler.reset()  # what was compiled for other sizes
    return "aot_eager_decomp_partition" if device.type == "cpu" else "inductor"


def ours(values: Mapping[str, Any], device: torch.device) -> Step:
    """A step of the trainer, as its loop makes it."""
    with quick_weights(device), patch.object(compiled, "BACKEND", compiler_of(device)):
        return looped(make_trainer(values, device))


def peer_step(peer: str, config: RunConfig, device: torch.device) -> Step:
    """A step of a peer on the same sizes and numbers of tokens, with batches that come from the host. It ends with its
    loss on the host."""
    model, micro, precision = config.model, config.batch.micro_size, config.precision.compute
    shape = {key: getattr(model, key) for key in ("layers", "hidden", "heads", "sequence")}
    with device:
        if peer == "transformers":
            step = transformers_gpt2(precision, model.vocab, micro, shape)
        elif peer == "fsdp2":
            plain = PlainGPT(model.vocab, shape)
            step = fully_sharded(plain, precision, micro, init_device_mesh(device.type, (1,)))
        else:
            plain = PlainGPT(model.vocab, shape)
            compiled = torch.compile(plain, backend=compiler_of(device)) if peer == "plain compiled" else plain
            step = loop(plain, compiled, precision, micro)
    tokens = tokens_of(config)
    return lambda: step(tokens.to(device))


def make(peer: str, values: Mapping[str, Any], device: torch.device) -> Step:
    """The step of a peer."""
    if peer.startswith("pangu"):
        return ours(values, device)
    return peer_step(peer, build(RunConfig, values), device)


def measured(setting: Setting, peer: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Time and memory of steps, and what they come to."""
    config, device = build(RunConfig, values), setting.device
    setting.release()
    began = time.perf_counter()
    step = make(peer, values, device)
    setting.synchronize()
    built = time.perf_counter()
    losses = [step(), step()]
    setting.synchronize()
    warm = time.perf_counter()
    if not setting.on_host:  # a peak of what makes the model is none of steps
        torch.accelerator.reset_peak_memory_stats()
    taken = seconds_of(setting, lambda: losses.append(step()), BUDGET_S)
    seconds, tokens = median(taken), config.batch.global_size * config.model.sequence
    tflops = tokens * training_flops_per_token(config.model) / seconds / 1e12
    peak = peak_tflops(device_name(device), config.precision.compute)
    figures = {
        "parameters": num_parameters(config.model),
        "step_seconds": seconds,
        "all_seconds": taken,
        "tokens_per_s": tokens / seconds,
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
        "building_seconds": built - began,
        "first_two_steps_seconds": warm - built,
        "losses": [losses[1], losses[-1]],
    }
    if setting.on_host:
        return figures
    allocated, reserved = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
    return {**figures, "peak_bytes": allocated, "reserved_bytes": reserved}


def values_of(setting: Setting, size: str, peer: str, forecasts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The configuration of a row. Raises LookupError for the slice if no dry run said how many layers fit."""
    changes: dict[str, Any] = {"model.attention": "sdpa"}  # trials of all kernels would compile in every row
    if size == forecast.SLICE:
        if size not in forecasts:
            raise LookupError(f"forecast.json does not say how many layers of {size} fit: --parts forecast speed does")
        changes["model.layers"] = forecasts[size]["layers"]
    if "dropout" in peer:
        changes |= {"model.dropout": 0.1, "model.attention_dropout": 0.1, "model.attention": "auto"}
    if "in fp8" in peer:
        changes["precision.matmul"] = "fp8"
    if peer == OWN:
        changes["model.attention"] = "reference" if setting.on_host else "triton"
    changes["compile"] = peer.startswith("pangu compiled")
    return setting.values(size, changes)


def row_of(setting: Setting, size: str, peer: str, forecasts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of a size and peer; of a peer that has no room, or of blocks that cannot be compiled, why not."""
    try:
        figures = measured(setting, peer, values_of(setting, size, peer, forecasts))
    except Exception as error:
        if peer in ("pangu", "pangu with dropout"):
            raise
        return {"cannot": f"{type(error).__name__}: {error}"[:2000]}
    expected = forecasts.get(size, {}).get("peak_bytes")
    if peer != "pangu" or not expected or "peak_bytes" not in figures:
        return figures
    return {**figures, "dry_run_peak_bytes": expected, "peak_against_dry_run": figures["peak_bytes"] / expected}


def compare(setting: Setting, rounds: Rounds) -> None:
    """A row for each size and peer; on a CPU only for the first size of each round but the first."""
    forecasts = forecast.forecasts(setting)
    with one_rank(setting.device):
        for number, (peers, sizes) in enumerate(rounds):
            for size in sizes[: 1 if setting.on_host and number else None]:
                for peer in peers:
                    with setting.row(f"{size}, {peer}") as figures:
                        figures |= row_of(setting, size, peer, forecasts)


def measure(setting: Setting) -> None:
    """A row for each size and peer that nothing compiles."""
    compare(setting, ROUNDS)
