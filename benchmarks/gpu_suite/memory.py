"""Operations bound by memory: an addition, norms, activations and the loss at a preset's sizes, copies between host and
device, and the floor of starting a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu_suite.apex import measure_apex
from benchmarks.gpu_suite.setting import Setting
from pangu.calibration.clock import Clock
from pangu.calibration.kernels import measure_launch, measure_memory
from pangu.config.build import build
from pangu.config.schema import RunConfig


def operations(
    tokens: int, hidden: int, vocab: int, device: torch.device
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes that it has to move at least, and the operation, in bf16 with [tokens, hidden]."""
    x, wide = (torch.randn(tokens, n * hidden, device=device).bfloat16() for n in (1, 4))
    weight, bias = torch.ones(hidden, device=device).bfloat16(), torch.zeros(hidden, device=device).bfloat16()
    logits = torch.randn(tokens, vocab, device=device).bfloat16()
    labels = torch.randint(0, vocab, (tokens,), device=device)
    total, part = torch.zeros(tokens * hidden, device=device), x.flatten()
    yield "layer norm", 2 * x.nbytes, lambda: F.layer_norm(x, (hidden,), weight, bias)
    yield "gelu", 2 * wide.nbytes, lambda: F.gelu(wide, approximate="tanh")
    yield "dropout and residual", 3 * x.nbytes, lambda: x + F.dropout(x, 0.1)
    yield "cross entropy", logits.nbytes, lambda: F.cross_entropy(logits, labels)
    yield "cross entropy in fp32", logits.nbytes, lambda: F.cross_entropy(logits.float(), labels)
    yield "gradient accumulation", 2 * total.nbytes + part.nbytes, lambda: total.add_(part)


def adam_step(count: int, device: torch.device) -> tuple[int, Callable[[], object]]:
    """Bytes of an update of fp32 parameters by torch's fused AdamW, and the update."""
    weights = torch.zeros(count, device=device, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], lr=1e-4, fused=True)
    return 7 * weights.nbytes, optimizer.step


def copies(nbytes: int, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Copies in both directions, of pinned and of pageable memory."""
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for word, here in (
        ("pageable", torch.zeros(nbytes, dtype=torch.uint8)),
        ("pinned", torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")),
    ):
        yield f"{word}, to the device", _copy(there, here)
        yield f"{word}, to the host", _copy(here, there)


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def measure(setting: Setting) -> None:
    """A row for each operation and copy."""
    clock = Clock(setting.device, quick=setting.on_host)
    setting.add("starting a kernel", microseconds=1e6 * measure_launch(clock))
    setting.add("addition, no cache", gb_s=measure_memory(clock) / 1e9)
    config = build(RunConfig, setting.values("pangu_2_6b"))
    tokens = config.batch.micro_size * config.model.sequence
    for name, nbytes, action in operations(tokens, config.model.hidden, config.model.vocab, setting.device):
        seconds = clock.seconds(action)
        setting.add(name, microseconds=1e6 * seconds, gb_s=nbytes / seconds / 1e9)
    nbytes, action = adam_step(2**18 if setting.on_host else 2**28, setting.device)
    setting.add("fused AdamW, fp32", gb_s=nbytes / clock.seconds(action) / 1e9)
    measure_apex(setting)
    for size in (2**16, 2**20) if setting.on_host else (2**16, 2**20, 2**24, 2**28):
        for name, action in copies(size, setting.device):
            setting.add(f"{size:,} bytes, {name}", gb_s=size / clock.seconds(action) / 1e9)
