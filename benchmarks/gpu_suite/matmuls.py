"""Rates of the matmuls of the presets' layers and heads, in the format of training and in fp8."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_suite.setting import Setting
from pangu.calibration.clock import Clock
from pangu.calibration.kernels import matmul
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.metrics.devices import device_name, peak_tflops
from pangu.models.size import layer_matrices
from pangu.schedule.spans import Matmul

RANKS = {"gpt2_124m": 1, "pangu_350m": 1, "gpt3_1_3b": 1, "pangu_2_6b": 1, "pangu_13b": 8, "pangu_200b": 8}
"""Preset -> tensor-parallel ranks that its matrices are cut over."""


def shapes_of(config: RunConfig, ranks: int) -> Iterator[tuple[str, Matmul]]:
    """Yield the matmuls of a micro-batch: forward, and of the gradients of inputs and weights."""
    tokens = config.batch.micro_size * config.model.sequence
    matrices = dict(zip(("qkv", "output", "up", "down"), layer_matrices(config.model, ranks), strict=True))
    matrices["head"] = (config.model.hidden, -(-config.model.vocab // ranks))
    for name, (inputs, outputs) in matrices.items():
        yield f"{name} forward", Matmul(tokens, outputs, inputs)
        yield f"{name} input gradient", Matmul(tokens, inputs, outputs)
        yield f"{name} weight gradient", Matmul(inputs, outputs, tokens)


def fp8_matmul(shape: Matmul, pool: Tensor) -> Callable[[], object]:
    """Return a matmul like `kernels.matmul` in e4m3 with one scale per operand; the right one is column-major, as the
    hardware wants it."""
    sizes = shape.rows * shape.depth, shape.depth * shape.columns
    starts = itertools.cycle(range(0, max(1, len(pool) - sum(sizes)), 16 * (sum(sizes) // 16)))
    scale = torch.ones((), device=pool.device)

    def once() -> Tensor:
        left, right = pool.narrow(0, next(starts), sum(sizes)).split(sizes)
        return torch._scaled_mm(
            left.view(shape.rows, shape.depth),
            right.view(shape.columns, shape.depth).t(),
            scale_a=scale,
            scale_b=scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return once


def rounded(shape: Matmul) -> Matmul:
    """Return a matmul with sizes that fp8 kernels take."""
    return Matmul(*(-(-size // 16) * 16 for size in shape[:3]))


def measure(setting: Setting) -> None:
    """Add a row for each matmul."""
    clock = Clock(setting.device, quick=setting.on_host)
    dtype = torch.float32 if setting.on_host else torch.bfloat16
    peak = peak_tflops(device_name(setting.device), "bf16")
    normal = torch.randn(2**20 if setting.on_host else 2**30, device=setting.device)
    pools = {str(dtype).removeprefix("torch."): normal.to(dtype), "fp8": normal.to(torch.float8_e4m3fn)}
    del normal
    presets = list(RANKS.items())[: 2 if setting.on_host else None]
    for (name, ranks), (form, pool) in itertools.product(presets, pools.items()):
        config = build(RunConfig, setting.values(name))
        make, shape_of = (fp8_matmul, rounded) if form == "fp8" else (matmul, lambda shape: shape)
        for which, one in shapes_of(config, 1 if setting.on_host else ranks):
            shape, row = shape_of(one), f"{name}, {form}, {which}"
            try:
                seconds = clock.seconds(make(shape, pool))
            except RuntimeError as error:  # fp8 is not for every device
                setting.add(row, cannot=str(error).partition("\n")[0])
                break
            rate = shape.flops / seconds / 1e12
            share = None if peak is None else round(rate / peak, 4)
            setting.add(row, shape=list(shape[:3]), microseconds=1e6 * seconds, tflops=rate, of_bf16_peak=share)
