"""Times of kernels: matmuls over the shapes of the presets, attention, memory, and the start of a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pangu.calibration.clock import Clock
from pangu.config.cluster import MatmulConfig
from pangu.schedule.spans import Matmul

_HIDDEN = {False: (2048, 2560, 4096, 5120, 8192, 12288), True: (256, 512, 1024)}
_TOKENS = {False: (1024, 2048, 4096, 8192), True: (128, 256, 512, 1024)}
_RANKS = {False: (1, 4), True: (1, 2, 4)}
"""Sizes of layers, tokens and tensor-parallel ranks, by whether the device is the host."""


def measure_matmuls(clock: Clock, base: MatmulConfig, dtype: torch.dtype, quick: bool) -> MatmulConfig:
    """Return the rates of matmuls, and the figures of the cost model fitted to them."""
    shapes = _shapes(clock.on_host, quick)
    pool = torch.randn(2**24, device=clock.device).to(dtype)  # more than a cache holds
    taken = clock.in_turns({shape: clock.computing(matmul(shape, pool)) for shape in shapes})
    rates = [shape.flops / taken[shape] for shape in shapes]
    # a host has no printed peak: its best matmul is
    peak = max(rates) / 1e12 if clock.on_host else max(base.tflops, max(rates) / 1e12)
    units = torch.get_num_threads() if clock.on_host else base.units
    losses = []
    for shape, rate in zip(shapes, rates, strict=True):
        tiles = max(1, -(-shape.rows // 128)) * max(1, -(-shape.columns // 128))
        losses.append((peak * 1e12 / rate, 1.0, 1.0 / shape.depth, units / tiles))
    table = np.array(losses)
    weights = 1 / table[:, :1]
    # time over ideal = (1 + depth/k + waves x units/tiles) / efficiency
    constant, depth, waves = np.linalg.lstsq(table[:, 1:] * weights, np.ones(len(table)), rcond=None)[0]
    constant = max(float(constant), 1.0)
    measured = tuple(
        (float(shape.rows), float(shape.columns), float(shape.depth), max(1e-4, round(rate / peak / 1e12, 4)))
        for shape, rate in zip(shapes, rates, strict=True)
    )
    return replace(
        base,
        tflops=peak,
        tflops_fp32=peak if dtype == torch.float32 else base.tflops_fp32,
        tflops_fp8=None if clock.on_host else base.tflops_fp8,
        efficiency=1 / constant,
        depth=max(0.0, float(depth) / constant),
        waves=max(0.0, float(waves) / constant),
        units=units,
        attention=measure_attention(clock, peak, dtype, quick),
        measured=measured,
    )


def _shapes(on_host: bool, quick: bool) -> list[Matmul]:
    """Return the matmuls of layers, forward and for gradients of inputs and weights, on several numbers of ranks."""
    shapes = []
    for hidden in _HIDDEN[on_host][: 1 if quick else None]:
        for tokens in _TOKENS[on_host][: 2 if quick else None]:
            for ranks in (1,) if quick else _RANKS[on_host]:
                for depth, columns in ((hidden, 3 * hidden // ranks), (4 * hidden // ranks, hidden)):
                    shapes += [
                        Matmul(tokens, columns, depth),
                        Matmul(tokens, depth, columns),
                        Matmul(depth, columns, tokens),
                    ]
    return list(dict.fromkeys(shapes))


def matmul(shape: Matmul, pool: Tensor) -> Callable[[], object]:
    """Return a function that multiplies the next elements of a pool: in a step, operands have not just been used."""
    sizes = shape.rows * shape.depth, shape.depth * shape.columns
    starts = itertools.cycle(range(0, max(1, len(pool) - sum(sizes)), sum(sizes)))

    def once() -> Tensor:
        left, right = pool.narrow(0, next(starts), sum(sizes)).split(sizes)
        return left.view(shape.rows, shape.depth) @ right.view(shape.depth, shape.columns)

    return once


def measure_attention(clock: Clock, peak: float, dtype: torch.dtype, quick: bool) -> float:
    """Return the share of the peak that causal attention reaches, forward and backward."""
    length = 256 if quick or clock.on_host else 4096
    heads, size = (4, 64) if clock.on_host else (16, 128)
    qkv = [torch.randn(1, heads, length, size, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def step() -> None:
        query, key, value = qkv
        scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    flops = 3.5 * 2 * 2 * length * length * size * heads / 2
    return min(1.0, flops / clock.seconds(step) / peak / 1e12)


def measure_memory(clock: Clock) -> float:
    """Return the bytes per second of an addition of tensors that no cache holds."""
    numbers = 2**24 if clock.on_host else 2**28
    a, b, c = (torch.zeros(numbers, device=clock.device) for _ in range(3))
    return 12.0 * numbers / clock.seconds(lambda: torch.add(a, b, out=c))


def measure_launch(clock: Clock) -> float:
    """Return the seconds of a kernel with nothing to do."""
    tiny = torch.zeros(8, device=clock.device)

    def chain() -> None:
        for _ in range(100):
            tiny.add_(1.0)

    return clock.seconds(chain) / 100
