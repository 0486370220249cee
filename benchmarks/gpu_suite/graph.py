"""Probe: one layer's forward and backward pass as a captured CUDA graph, against the same layer eager and compiled.

What a graph saves is host time. The trainer captures none: this says what it would bring, for a layer that waits for
the host (small micro-batches) and for one that does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.speed import compiler_of
from pangu.calibration.clock import Clock
from pangu.models import compiled
from pangu.pipeline.layouts import choose_layout
from pangu.topology.mesh import Mesh
from pangu.training.layer_timing import layer_trial

CASES = (("pangu_350m", 1), ("pangu_350m", 8), ("pangu_2_6b", 1), ("pangu_2_6b", 4))
"""Preset and sequences of a micro-batch."""
WARM_UP = 3
TOLERANCE = 1e-2
"""Relative error of a captured gradient against the eager one, in bf16."""
Once = Callable[[], Any]


def captured(once: Once, device: torch.device) -> tuple[Once, Any]:
    """Return a function that replays the graph of `once`, and its outputs. Raises RuntimeError without CUDA."""
    if device.type != "cuda":
        raise RuntimeError(f"a graph is captured on CUDA devices; this one is {device.type}")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries allocate what they need before the capture
        for _ in range(WARM_UP):
            once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = once()
    return graph.replay, result


def distance(found: Any, expected: Any) -> float:
    """Distance of the gradients, relative to the norm of all."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if isinstance(a, Tensor)]
    off = torch.stack([(a.float() - b.float()).norm() for a, b in pairs]).norm()
    return float(off / torch.stack([b.float().norm() for _, b in pairs]).norm())


def measure(setting: Setting) -> None:
    """A row for each case: microseconds of a layer in each way."""
    clock = Clock(setting.device, quick=setting.on_host)
    kernel = "sdpa" if setting.on_host else "cudnn"
    for name, size in CASES:
        with setting.row(f"{name}, micro-batches of {size}") as figures:
            values = setting.values(name, {"batch.micro_size": size, "batch.global_size": 2 * size})
            config, layout, _ = choose_layout(values, 1)
            mesh = Mesh.connect(layout, setting.device, config.parallel.timeout_s)
            eager = layer_trial(config, mesh, kernel, False)
            expected = eager()
            figures["eager_us"] = 1e6 * clock.seconds(eager)
            try:
                replay, result = captured(eager, setting.device)
                replay()
                figures["captured_us"] = 1e6 * clock.seconds(replay)
                figures["gradient is off by"] = distance(result, expected)
                if not figures["gradient is off by"] <= TOLERANCE:
                    raise ValueError(f"the captured gradient may be off by {TOLERANCE:g}")
                del replay, result
            except RuntimeError as error:
                figures["cannot capture"] = str(error).partition("\n")[0]
            with patch.object(compiled, "BACKEND", compiler_of(setting.device)):
                figures["compiled_us"] = 1e6 * clock.seconds(layer_trial(config, mesh, kernel, True))
            del eager, expected
        setting.release()
