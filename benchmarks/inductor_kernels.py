"""Kernels that torch's Inductor generates for a compiled layer on an H100, counted without one.

    python -m benchmarks.inductor_kernels

Prints how many generated kernels the forward and backward pass of one layer of a preset launch, beside the operators
that Inductor leaves as they are: attention, and matmuls, which cast and scale by themselves in fp8. The layer has fake
tensors on the fake device of a dry run, so Inductor generates Triton code for compute capability 9.0; nothing is
compiled further or run. Needs Triton, and any build of torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pangu.dryrun.device import load_device

PLAIN = ("data=synthetic", "compile=true", "parallel.pipeline=1", "model.dropout=0", "model.attention_dropout=0")
LAYERS = {
    "pangu_350m": "+config=pangu_350m",
    "pangu_350m, dropout": "+config=pangu_350m model.dropout=0.1 model.attention_dropout=0.1",
    "pangu_350m, fp8": "+config=pangu_350m precision=fp8",
    "pangu_350m, selective recompute": "+config=pangu_350m memory.recompute=selective",
    "llama3_8b": "+config=llama3_8b parallel.tensor=1 parallel.sequence=false",
}
DEVICE = {
    **{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32},
    **{"total_memory": 80 << 30, "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048},
    **{"max_threads_per_block": 1024, "shared_memory_per_block": 49152, "gcnArchName": ""},
}


class _Generated(BaseException):
    """The code of both passes exists, and nothing can run it."""


@contextmanager
def generating() -> Iterator[dict[str, str]]:
    """Yield a dictionary for the code that Inductor generates, by pass. Running it raises `_Generated`."""
    import torch
    import torch.cuda
    from torch._functorch import config as autograd_config
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes import fuse_attention
    from torch._inductor.graph import GraphLowering

    from benchmarks.attention_kernels import pretending

    made: dict[str, str] = {}

    def run(_: object) -> None:
        raise _Generated

    def generate(self: GraphLowering) -> Any:
        made["backward" if self.is_backward else "forward"] = self.codegen()[0].value
        return SimpleNamespace(call=run, key="", __file__="")

    replaced: Any = {
        **{name: lambda *_: 0 for name in ("current_device", "_exchange_device", "set_rng_state")},
        **{"_maybe_exchange_device": lambda _: 0, "get_rng_state": lambda: torch.empty(0)},
        "_get_device_properties": lambda _: SimpleNamespace(**DEVICE),
    }
    # constants and patterns of attention would be computed with tensors that are not fake
    options = {"force_disable_caches": True, "compile_threads": 1, "joint_graph_constant_folding": False}
    with ExitStack() as stack:
        stack.enter_context(pretending(90))
        stack.enter_context(patch.multiple(torch.cuda, create=True, **replaced))
        stack.enter_context(patch.object(fuse_attention, "_sfdp_init", lambda *_: None))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", generate))
        stack.enter_context(inductor_config.patch(options))
        stack.enter_context(autograd_config.patch(force_non_lazy_backward_lowering=True))
        yield made


def counts(words: str) -> dict[str, int]:
    """Return the launches of generated kernels in each pass of a layer."""
    import torch

    from benchmarks.trainer import composed
    from pangu.config.build import build
    from pangu.config.schema import RunConfig
    from pangu.dryrun.run import on_fake_tensors
    from pangu.topology.layout import Layout
    from pangu.topology.mesh import Mesh
    from pangu.training.layer_timing import layer_trial

    config = build(RunConfig, composed(*PLAIN, *words.split()))
    torch.compiler.reset()
    with on_fake_tensors(0, 1), generating() as made, suppress(_Generated):
        layer_trial(config, Mesh(Layout(), 0, torch.device("cuda", 0)), "triton", compiled=True)()
    return {name: len(re.findall(r"\.run\(", code[code.index("def call(") :])) for name, code in made.items()}


def main() -> None:
    """Print the counts of each layer."""
    device = load_device()
    if isinstance(device, str):
        raise SystemExit(device)
    import torch.utils._triton as triton_utils

    triton_utils.has_triton = lambda: True  # before Inductor is imported
    for name, words in LAYERS.items():
        print(json.dumps({"layer": name, **counts(words)}), flush=True)


if __name__ == "__main__":
    main()
