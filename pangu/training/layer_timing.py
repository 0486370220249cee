"""Timing of a layer on a run's shapes, compiled and not, by fp32 matmul precision."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pangu.collectives.agreement import agree
from pangu.collectives.reduce import largest_of
from pangu.collectives.regions import TensorRegion
from pangu.common.errors import LocalError
from pangu.config.schema import RunConfig
from pangu.data.batch import make_batch
from pangu.layers.builder import DTYPES, Builder
from pangu.layers.cpu import matmul_precision
from pangu.layers.dropout import DropoutKeys
from pangu.layers.fp8 import Fp8Scales
from pangu.layers.fp8_blocks import BLOCKS, BlockScaledMatmuls
from pangu.layers.initial import replace_parameter
from pangu.layers.kernel_choice import random
from pangu.layers.weight_gradient_store import WeightGradientStore
from pangu.metrics.timing import Timer, Trial, time_candidates
from pangu.models.compiled import CompiledBlocks
from pangu.models.language_model import HiddenStates, Options, build_model
from pangu.models.parameters import ModelPart, logical_shapes
from pangu.pipeline.stages import plan_stages
from pangu.topology.mesh import Mesh
from pangu.zero.gradients import fuses_gradient_accumulation

log = logging.getLogger("pangu")
BUDGET_S = 2.0
"""Time budget in seconds; compilation comes on top."""


def time_layers(
    config: RunConfig, mesh: Mesh, kernel: str, ways: Sequence[tuple[str, str]], timer: Timer
) -> dict[tuple[str, str], float]:
    """Return the slowest rank's seconds per micro-batch of all layers by `ways`; inf: cannot compile.

    A way is an fp32 matmul precision, and "true" for compiled layers or "false". Nothing is communicated, which takes
    all the same time.
    """
    trials: dict[tuple[str, str], Trial] = {}
    for precision, compiled in ways:
        trial = matmul_precision(precision)(layer_trial(config, mesh, kernel, compiled == "true"))
        try:
            trial()
        except (RuntimeError, LocalError) as error:  # out of memory, or what compilers demand
            log.info("%-12s %s", "compile", " ".join(str(error).splitlines()[:2]))
        else:
            trials[precision, compiled] = trial
    times = timer(trials, mesh.device, BUDGET_S)
    seconds = [config.model.layers * times.get(way, math.inf) for way in ways]
    return dict(zip(ways, largest_of(seconds, mesh), strict=True))


def warm_up(config: RunConfig, mesh: Mesh, kernel: str, compiled: bool, timer: Timer = time_candidates) -> None:
    """Compute a layer on all ranks at once and meet, so that no collective of the first step waits for a compiler.

    Otherwise each pipeline stage would compile its kernels when the stage before has done so, and the collectives of
    all would wait for that, within `parallel.timeout_s`. A layer that cannot run here fails in the step, whose error
    says more.
    """
    began = time.perf_counter()

    def compute() -> None:
        with suppress(RuntimeError, LocalError):
            timer({"layer": layer_trial(config, mesh, kernel, compiled)}, mesh.device, 0.0)

    agree(mesh, compute, runs_here=True)
    log.info("%-12s %.1f s to compile and load the kernels of a layer", "warm-up", time.perf_counter() - began)


class _Discarded:
    """Sums that are only computed, to be timed."""

    def add(self, weight: Tensor, left: Tensor, right: Tensor, fp8: Any) -> None:
        if fp8 is None:
            left @ right
        else:
            fp8.weight_gradient(left, right, torch.promote_types(weight.dtype, torch.float32))

    def add_rows(self, bias: Tensor, grad: Tensor) -> None:
        grad.sum(0)


def layer_trial(config: RunConfig, mesh: Mesh, kernel: str, compiled: bool) -> Trial:
    """Return a function that computes one layer forward and backward, on the same tensors in each call."""
    region = replace(TensorRegion.of(mesh), sequence=False, group=None)
    store, part = None, ModelPart(range(1), last=config.model.query_layer == 0)  # the query table is in the last part
    scales: Fp8Scales | BlockScaledMatmuls | None = BLOCKS.get(config.precision.matmul)
    if fuses_gradient_accumulation(mesh.device):
        store = WeightGradientStore()
        store.sums = _Discarded()
    if config.precision.matmul == "fp8":
        scales = history = Fp8Scales(logical_shapes(config.model), mesh.device)
        history.known = True  # every step but the first
    build = Builder(region=region, layers_store=store, scales=scales)
    options = Options.of(config, kernel, plan_stages(config, mesh.layout).schedule.turns)
    model, table = build_model(config.model, options, build, [part])
    dtype, device = DTYPES[config.precision.compute], mesh.device
    model.balance_on(device)
    for name, shape in table.shapes.items():
        replace_parameter(model, name, random(device, dtype, tuple(shape))[0] * config.model.init_std)
    if compiled:
        model.compute = CompiledBlocks(model, config, kernel, splits_backward=False)
    micro, length = config.batch.micro_size, config.model.sequence // mesh.layout.context
    batch = make_batch(np.zeros((micro, length + 1), dtype=np.int64), range(micro), config.data.packing).to(device)
    (x,) = random(device, dtype, (length, micro, config.model.hidden))
    keys, given = DropoutKeys(config.train.seed, 0, batch.samples), [x.requires_grad_(), *model.parameters()]

    def once() -> object:
        hidden = model(part, HiddenStates(x), batch, keys).hidden
        return torch.autograd.grad(hidden.square().sum(), given, allow_unused=True)  # a given gradient loads SymPy

    return once
