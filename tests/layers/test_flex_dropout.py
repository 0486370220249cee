"""FlexAttention drops what the reference drops, in every layout, and has its gradients.

torch refuses its backward on a CPU before it looks at it; the formulas are there, in plain operations, and these tests
reach them. What the compiled kernel makes of them only a GPU can show (tests/gpu/test_attention.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn.attention import flex_attention as torchs

from pangu.collectives.regions import TensorRegion
from pangu.config import attention as abilities
from pangu.layers import gpu_kernels, kernel_choice
from pangu.layers.attention import AttentionCore
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.dropout_masks import dropout, is_kept, row_keys
from pangu.layers.gpu_kernels import KERNELS
from pangu.layers.kernels import QKV, MaskAndBias
from pangu.layers.masks import AttentionMask
from pangu.models import compiled
from pangu.topology.layout import Layout
from pangu.topology.placement import PlacementTable
from tests.layers.test_kernels import (
    BOUNDS,
    CPU,
    DOCUMENTS,
    HEADS,
    LENGTH,
    PATTERNS,
    bias_of,
    blocks_of,
    heads,
    inputs_of,
)
from tests.parallel.harness import OVERRIDES, small_trainer, whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.usefixtures("empty_compiler"),
]
KEYS = DropoutKeys(1, 2, (3, 4))
CASES = [
    (None, None, "none", HEADS, None),
    (DOCUMENTS, None, "relative", HEADS // 2, None),
    (None, 4, "alibi", HEADS // 3, None),
    (DOCUMENTS, None, "none", HEADS // 2, PATTERNS[1]),
]
"""Documents, window, bias, key heads, blocks that are seen."""


@pytest.fixture(autouse=True)
def backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchs, "_validate_device", lambda *tensors: None)


def results(kernel: str, case: tuple[Any, ...], recompute: bool = False, probability: float = 0.4) -> list[Tensor]:
    """Output, and gradients of queries, keys, values and a learned bias, in fp64."""
    documents, window, kind, groups, pattern = case
    given, bias, inputs = inputs_of(kind, groups)
    mask = AttentionMask(documents, window, None if documents is None else BOUNDS, blocks_of(pattern))
    made = KERNELS[kernel](MaskAndBias(mask, bias, LENGTH, torch.float64, CPU))
    core = AttentionCore(Builder(PlacementTable()), probability, recompute)
    output, _ = core(given, made, KEYS.on(torch.zeros(2, LENGTH)))
    weight = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return [output, *torch.autograd.grad(output, inputs, weight)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference_with_its_gradients(case: tuple[Any, ...]) -> None:
    """fp64; 1e-12: sums of at most 16 products, and exp of a difference of logarithms. A query of which all keys are
    dropped has output and gradients of 0."""
    expected, found = results("reference", case), results("flex", case)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    empty = expected[0].abs().amax(-1) == 0
    assert 0 < empty.sum() < empty.numel() // 2
    assert found[0][empty].unique().tolist() == found[1][empty].unique().tolist() == [0.0]


def test_a_recompute_drops_the_same() -> None:
    for mine, theirs in zip(results("flex", CASES[3]), results("flex", CASES[3], recompute=True), strict=True):
        assert torch.equal(mine, theirs)


def test_it_is_the_reference_as_a_gpu_traces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a recompute, with a learned bias. 1e-6 in fp64: torch takes the logarithms for fp32, 6e-8, as a GPU's
    kernels give them. Its compiler makes no backward of attention without a gradient of the output."""
    of_outputs: list[Any] = []

    def backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        target = torch.ops.higher_order.flex_attention_backward
        of_outputs.extend(node.args[5] for node in graph.graph.find_nodes(op="call_function", target=target))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=backward)
    traced = torch.compile(gpu_kernels.flex, backend=backend, fullgraph=True)
    monkeypatch.setattr(gpu_kernels, "_flex", lambda compiled: traced)
    expected, found = results("reference", CASES[1]), results("flex", CASES[1], recompute=True)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    assert len(of_outputs) == 2
    assert None not in of_outputs


def test_all_may_be_dropped() -> None:
    """Nearly all are, most queries see nothing, and the rest is 100 times as large."""
    for mine, theirs in zip(*(results(kernel, CASES[0], False, 0.99) for kernel in ("flex", "reference")), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-12)


def attended(given: QKV, keys: DropoutKeys, region: TensorRegion) -> Tensor:
    kernel = KERNELS["flex"](MaskAndBias(AttentionMask(), None, LENGTH, torch.float64, CPU))
    core = AttentionCore(Builder(PlacementTable(), region=region), 0.4)
    return core(given, kernel, keys.on(torch.zeros(len(keys.samples), LENGTH)))[0]


def test_a_rank_and_a_micro_batch_drop_what_one_process_drops_in_their_part() -> None:
    given = heads(HEADS, torch.float64)
    expected = attended(given, KEYS, TensorRegion())
    ranks = [
        attended(QKV(*(part.chunk(2, 1)[rank] for part in given)), KEYS, TensorRegion(rank, 2)) for rank in range(2)
    ]
    rows = [
        attended(QKV(*(part[i : i + 1] for part in given)), replace(KEYS, samples=(3 + i,)), TensorRegion())
        for i in range(2)
    ]
    for parts, dim in ((ranks, 1), (rows, 0)):
        torch.testing.assert_close(torch.cat(parts, dim), expected, atol=1e-14, rtol=1e-13)


def test_one_element_is_kept_where_a_row_of_them_is() -> None:
    """And where a kernel counts columns in 32 or 64 bits."""
    rows, place = row_keys(torch.zeros(2, 3), 2**31, 5), 2**62 + 12345
    kept = dropout(torch.ones(3, 2, 40), None, rows, place, 0.3) > 0
    for dtype in (torch.int32, torch.int64):
        columns = torch.arange(40, dtype=dtype)
        assert torch.equal(is_kept((rows ^ place)[..., None], columns, 0.3), kept)
        assert all(bool(is_kept(rows[2, 1] ^ place, columns[i], 0.3)) == bool(kept[2, 1, i]) for i in range(40))


def test_layers_and_steps_share_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU's compiler: what a mask is made from is no constant of the code."""
    counter = CompileCounter()
    monkeypatch.setattr(
        gpu_kernels, "_flex", lambda compiled: torch.compile(gpu_kernels.flex, backend=counter, fullgraph=True)
    )
    bias = bias_of("alibi", torch.float64)
    outputs = []
    for step in range(3):
        for documents in (DOCUMENTS, DOCUMENTS.flip(0)):
            kernel = KERNELS["flex"](MaskAndBias(AttentionMask(documents), bias, LENGTH, torch.float64, CPU))
            for layer in "ab":
                core = AttentionCore(Builder(PlacementTable()).at(layer), 0.4)
                given = QKV(*(part.requires_grad_() for part in heads(HEADS, torch.float64)))
                keys = replace(KEYS, step=step).on(torch.zeros(2, LENGTH))
                outputs.append(core(given, kernel, keys)[0])
    assert counter.frame_count == 1
    assert not any(torch.equal(one, other) for i, one in enumerate(outputs) for other in outputs[:i])


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_layers_drop_the_same(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model, whose layers are one graph each."""
    known = replace(abilities.ABILITIES["flex"], devices=None, precisions=None, head_sizes=None)
    monkeypatch.setitem(abilities.ABILITIES, "flex", known)
    monkeypatch.setattr(kernel_choice, "missing", lambda *_: ())
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    found = []
    for words in (("flex", "true"), ("flex", "false"), ("reference", "false")):
        more = (f"model.attention={words[0]}", f"compile={words[1]}", f"memory.recompute={recompute}")
        trainer, batches = small_trainer(Layout(), *OVERRIDES, "precision=fp64", *more)
        trainer.forward_backward(batches)
        found.append(whole(trainer, of_gradients=True))
    for name, gradient in found[-1].items():
        for mine in found[:2]:
            torch.testing.assert_close(mine[name], gradient, rtol=1e-10, atol=1e-13, msg=name)
