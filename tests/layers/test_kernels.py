"""Every kernel computes the reference's function of its masks and biases, and is refused where it cannot run."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention.flex_attention import create_block_mask

from pangu.common.errors import UserError
from pangu.config.sparse import BigBirdSparsity, FixedSparsity, SparseConfig, StridedSparsity
from pangu.layers import gpu_kernels
from pangu.layers.attention import AttentionCore
from pangu.layers.biases import Alibi, Bias
from pangu.layers.block_pattern import BlockPattern
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.gpu_kernels import KERNELS
from pangu.layers.kernel_choice import attention_kernels, kernels_of
from pangu.layers.kernels import QKV, MaskAndBias
from pangu.layers.masks import AttentionMask
from pangu.topology.placement import PlacementTable
from pangu.training.determinism import deterministic
from tests.configs import config
from tests.models.helpers import variant

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTH, HEADS = 12, 6
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
BOUNDS = torch.tensor([0, 5, 12, 24, 24], dtype=torch.int32)
PATTERNS = (
    FixedSparsity("fixed", 2, 2, 1),
    StridedSparsity("strided", 1, 2, 3),
    BigBirdSparsity("bigbird", 2, 1, 1, 1, seed=3),
)
CASES = [
    *itertools.product([None, DOCUMENTS], [None, 1, 4], ["none", "alibi", "relative"], [HEADS, HEADS // 2], [None]),
    *itertools.product([None, DOCUMENTS], [None, 4], ["none", "alibi"], [HEADS // 2], PATTERNS),
]
"""Documents, window, bias, key heads, blocks that are seen."""


def heads(groups: int, dtype: torch.dtype) -> QKV:
    source = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, n, LENGTH, 16, dtype=dtype, generator=source) for n in (HEADS, groups, groups)]
    return QKV(*parts)


def bias_of(kind: str, dtype: torch.dtype) -> Bias | None:
    if kind == "alibi":
        return Alibi(Builder(PlacementTable()), HEADS)(LENGTH, dtype, CPU)
    values = torch.randn(LENGTH, HEADS, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return Bias(values) if kind == "relative" else None


def blocks_of(pattern: SparseConfig | None) -> BlockPattern | None:
    return None if pattern is None else BlockPattern.of(pattern, LENGTH, CPU)


def attend(kernel: str, given: QKV, mask: AttentionMask, bias: Bias | None) -> Tensor:
    core = AttentionCore(Builder(PlacementTable()), 0.0)
    return core(given, KERNELS[kernel](MaskAndBias(mask, bias, LENGTH, given.query.dtype, CPU)), None)[0]


def inputs_of(kind: str, groups: int) -> tuple[QKV, Bias | None, list[Tensor]]:
    """Heads and bias in fp64, and those of their tensors that have a gradient."""
    given = QKV(*(part.requires_grad_() for part in heads(groups, torch.float64)))
    bias = bias_of(kind, torch.float64)
    inputs: list[Tensor] = list(given)
    if kind == "relative":
        assert bias is not None
        inputs.append(bias.by_distance.requires_grad_())
    return given, bias, inputs


def results(kernel: str, case: tuple[Any, ...]) -> list[Tensor]:
    """Output, and gradients of queries, keys, values and a learned bias, in fp64."""
    documents, window, kind, groups, pattern = case
    given, bias, inputs = inputs_of(kind, groups)
    bounds = None if documents is None else BOUNDS
    output = attend(kernel, given, AttentionMask(documents, window, bounds, blocks_of(pattern)), bias)
    return [output, *torch.autograd.grad(output.pow(2).sum(), inputs)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sdpa_equals_reference(case: tuple[Any, ...]) -> None:
    """fp64; 1e-13: sums of at most 16 products in another order, 1.1e-16 each."""
    for mine, theirs in zip(results("sdpa", case), results("reference", case), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-13, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_flex_equals_reference_forward(case: tuple[Any, ...]) -> None:
    """fp32, 1e-6: sums of 16 products, 6e-8 each. Torch refuses its backward on a CPU: test_flex_dropout.py goes on
    from here, and tests/gpu."""
    documents, window, kind, groups, pattern = case
    given, bias = heads(groups, torch.float32), bias_of(kind, torch.float32)
    mask = AttentionMask(documents, window, sparse=blocks_of(pattern))
    mine, theirs = (attend(kernel, given, mask, bias) for kernel in ("flex", "reference"))
    torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("length", [128, 300, 700])
@pytest.mark.parametrize("case", [(None, None, None), (True, 200, None), (None, None, 0), (True, None, 2)], ids=str)
def test_tiles_are_those_that_torch_finds(length: int, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some queries at a time."""
    with_documents, window, number = case
    documents = torch.arange(2 * length).view(2, -1) // 130 if with_documents else None
    pattern = None if number is None else replace(PATTERNS[number], block=50)
    sparse = None if pattern is None else BlockPattern.of(pattern, length, CPU)
    mask = AttentionMask(documents, window, None, sparse)
    expected = create_block_mask(mask.rule(), 2 if with_documents else None, None, length, length, CPU)
    for pairs in (1, 1 << 26):
        monkeypatch.setattr(gpu_kernels, "MOST_PAIRS", pairs)
        found = gpu_kernels.block_mask(mask, length, CPU)
        assert found.seq_lengths == expected.seq_lengths
        for name in ("kv", "full_kv", "q", "full_q"):
            counts, theirs = (getattr(blocks, f"{name}_num_blocks") for blocks in (found, expected))
            assert torch.equal(counts, theirs)
            lists = [getattr(blocks, f"{name}_indices") for blocks in (found, expected)]
            used = torch.arange(lists[0].shape[-1]) < counts[..., None]
            assert torch.equal(*(each[used] for each in lists))


class FakeFlashAttn(ModuleType):
    """What flash-attn's documentation says of its arguments, in plain lines. [batch, sequence, heads, size]."""

    def flash_attn_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        causal: bool,
        window_size: tuple[int, int],
        alibi_slopes: Tensor | None,
        deterministic: bool,
    ) -> Tensor:
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        assert dropout_p == 0.0
        assert causal
        left = window_size[0] if window_size[0] >= 0 else math.inf
        outputs = []
        for head in range(q.shape[2]):
            group = head * k.shape[2] // q.shape[2]
            scores = q[:, :, head] @ k[:, :, group].mT / math.sqrt(q.shape[-1])
            for i, j in itertools.product(range(q.shape[1]), repeat=2):
                if j > i or i - j > left:
                    scores[:, i, j] = -math.inf
                elif alibi_slopes is not None:
                    scores[:, i, j] -= alibi_slopes[head] * abs(i - j)
            outputs.append(scores.softmax(-1) @ v[:, :, group])
        return torch.stack(outputs, 2)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Tensor:
        assert cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        lengths = cu_seqlens_q.diff().tolist()
        assert max_seqlen_q == max_seqlen_k >= max(lengths)
        rows = zip(*(part.split(lengths) for part in (q, k, v)), strict=True)
        return torch.cat([self.flash_attn_func(*(part[None] for part in row), **options)[0] for row in rows])


@pytest.mark.parametrize("case", [case for case in CASES if case[2] != "relative" and case[4] is None], ids=str)
def test_flash_attn_is_called_as_its_documentation_says(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """fp64; slopes are fp32 but those of 6 heads are powers of two."""
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlashAttn("flash_attn"))
    for mine, theirs in zip(results("flash_attn", case), results("reference", case), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-13, rtol=1e-12)


def test_flash_attn_adds_up_in_one_order_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in looks whether it was told."""
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlashAttn("flash_attn"))
    with deterministic({}):
        for documents in (None, DOCUMENTS):
            results("flash_attn", (documents, None, "none", HEADS, None))


class FlashOperator:
    """torch's operator in plain lines, for a CPU: autograd's formula, which calls its backward, is torch's own.
    [tokens or batch, sequence, heads, size]. What it drops is a function of its generator's state."""

    def __init__(self, library: Library) -> None:
        library.impl("_flash_attention_forward", self.forward, "CPU")
        library.impl("_flash_attention_backward", self.backward, "CPU")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *options: Any, **window: int) -> tuple[Tensor, ...]:
        state = torch.tensor([torch.initial_seed() % 2**62, 0])
        *options_of_both, _debug = options
        output = self.attend((query, key, value), *options_of_both, state=state, **window)
        return output, output.new_zeros(1), state, output.new_zeros(1), output.new_zeros(0)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        *options: Any,
        **window: int,
    ) -> tuple[Tensor, ...]:
        *options_of_both, state, _unused = options

        def output(*parts: Tensor) -> Tensor:
            return self.attend(parts, *options_of_both, state=state, **window)

        gradients: tuple[Tensor, ...] = torch.func.vjp(output, query, key, value)[1](grad)
        return gradients

    def attend(
        self,
        parts: tuple[Tensor, ...],
        bounds: Tensor | None,
        bounds_of_keys: Tensor | None,
        longest: int,
        longest_of_keys: int,
        dropout: float,
        causal: bool,
        state: Tensor,
        window_size_left: int,
        window_size_right: int,
        scale: None = None,
    ) -> Tensor:
        assert bounds is bounds_of_keys
        assert longest == longest_of_keys == LENGTH
        assert (bounds is None) == (parts[0].dim() == 4)
        # as torch.nn.attention.varlen says what is causal
        assert causal == ((window_size_left, window_size_right) == (-1, 0))
        if bounds is None:
            sequences = list(zip(*parts, strict=True))
        else:
            lengths = bounds.diff().tolist()
            sequences = list(zip(*(part.split(lengths) for part in parts), strict=True))
        source = torch.Generator().manual_seed(int(state[0]))
        outputs = []
        for q, k, v in sequences:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
            distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
            seen = (distance >= 0) & (distance <= (window_size_left if window_size_left >= 0 else LENGTH))
            probabilities = scores.masked_fill(~seen, -math.inf).softmax(-1)
            keep_mask = torch.rand(scores.shape, generator=source) >= dropout
            outputs.append(torch.einsum("hqk,khd->qhd", probabilities * keep_mask / (1 - dropout), v))
        return torch.stack(outputs) if bounds is None else torch.cat(outputs)


@pytest.fixture
def flash_operator() -> Iterator[FlashOperator]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        yield FlashOperator(library)


@pytest.mark.parametrize("case", [case for case in CASES if case[2] == "none" and case[4] is None], ids=str)
def test_flash_equals_reference(case: tuple[Any, ...], flash_operator: FlashOperator) -> None:
    """fp64. That torch's kernel does what the operator's stand-in does is shown in tests/gpu."""
    for mine, theirs in zip(results("flash", case), results("reference", case), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-13, rtol=1e-12)


def test_flash_drops_the_same_again(flash_operator: FlashOperator) -> None:
    """Over documents: autograd's gradients are those of what its forward has dropped, which a recompute drops again."""
    given = QKV(*(part.requires_grad_() for part in heads(HEADS, torch.float64)))
    kernel = KERNELS["flash"](MaskAndBias(AttentionMask(DOCUMENTS, None, BOUNDS), None, LENGTH, torch.float64, CPU))
    keys = DropoutKeys(1, 2, (3, 4)).on(torch.zeros(2, LENGTH))
    runs = []
    for recompute in (False, True):
        torch.rand(17)
        output, _ = AttentionCore(Builder(PlacementTable()), 0.5, recompute)(given, kernel, keys)
        runs.append([output, *torch.autograd.grad(output.pow(2).sum(), given)])
    for first, again in zip(*runs, strict=True):
        assert torch.equal(first, again)
    # by hand: linear in the values, with the transpose of the same probabilities in backward
    ones = torch.ones_like(runs[0][0])
    output, _ = AttentionCore(Builder(PlacementTable()), 0.5)(given, kernel, keys)
    (gradient,) = torch.autograd.grad(output, given.value, ones)
    torch.testing.assert_close((gradient * given.value).sum(), output.sum())
    assert not torch.allclose(output, attend("flash", given, AttentionMask(DOCUMENTS, None, BOUNDS), None))


def test_scores_are_added_and_passed_on_before_bias_and_mask() -> None:
    """He et al. 2021: the layer's own scores plus those below; the bias is not added up from layer to layer."""
    given = heads(HEADS, torch.float64)
    below = torch.randn(2, HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    bias = bias_of("alibi", torch.float64)
    assert bias is not None
    core = AttentionCore(Builder(PlacementTable()), 0.0, residual_scores=True)
    output, scores = core(
        given, KERNELS["reference"](MaskAndBias(AttentionMask(), bias, LENGTH, below.dtype, CPU)), None, below
    )
    expected = torch.einsum("bhqd,bhkd->bhqk", given.query, given.key) / 4 + below
    torch.testing.assert_close(scores, expected)
    hidden = torch.ones(LENGTH, LENGTH).triu(1).bool()
    probabilities = (expected + bias.dense()).masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(output, probabilities @ given.value)


def test_the_fused_kernel_draws_the_same_mask_again() -> None:
    given = heads(HEADS, torch.float32)
    core = AttentionCore(Builder(PlacementTable()), 0.5)
    kernel = KERNELS["sdpa"](MaskAndBias(AttentionMask(), None, LENGTH, torch.float32, CPU))
    tokens = torch.zeros(2, LENGTH)
    keys = DropoutKeys(1, 2, (3, 4)).on(tokens)
    first, _ = core(given, kernel, keys)
    torch.rand(17)
    assert torch.equal(first, core(given, kernel, keys)[0])
    assert not torch.equal(first, core(given, kernel, DropoutKeys(1, 3, (3, 4)).on(tokens))[0])


def test_auto_chooses_among_the_kernels_that_can_compute_it_whatever_the_processor() -> None:
    for precision in ("fp32", "bf16"):
        assert attention_kernels(variant(), precision, CPU) == ["sdpa", "reference"]
        assert attention_kernels(variant(positions="alibi"), precision, CPU) == ["sdpa", "reference"]
        assert attention_kernels(variant(residual_scores=True), precision, CUDA) == ["reference"]
    assert attention_kernels(variant(attention="sdpa", attention_dropout=0.1), "bf16", CPU) == ["sdpa"]


@pytest.mark.parametrize("flash", [True, False])
def test_documents_and_windows_do_not_cost_flash_attention(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "can_run", lambda kernel, device: flash and device.type == "cuda")
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlashAttn("flash_attn") if flash else None)
    lists = (["flash_attn"], ["flash"], ["cudnn"], ["triton"], ["flex"]) if flash else ([],) * 5
    package, flash_alone, cudnn, triton, flex = lists
    large = {"hidden": 64, "heads": 2}
    for model, documents in ((variant(**large), True), (variant(**large, window=5), False)):
        kernels = [*flash_alone, *triton, "sdpa", *flex, *cudnn, *package, "reference"]
        assert attention_kernels(model, "bf16", CUDA, documents) == kernels
        assert attention_kernels(model, "bf16", CPU, documents) == ["sdpa", "reference"]
        assert attention_kernels(model, "fp32", CUDA, documents) == ["sdpa", *flex, "reference"]
    biased = variant(**large, positions="alibi")
    assert attention_kernels(biased, "bf16", CUDA, True) == ["sdpa", *flex, *package, "reference"]
    blocks = variant(**large, sparse=PATTERNS[0])
    assert attention_kernels(blocks, "bf16", CUDA) == ["sdpa", *flex, *cudnn, "reference"]
    assert attention_kernels(blocks, "bf16", CPU) == ["sdpa", "reference"]
    plain = variant(**large)
    assert attention_kernels(plain, "bf16", CUDA) == [
        "sdpa",
        *flash_alone,
        *cudnn,
        *flex,
        *triton,
        *package,
        "reference",
    ]
    assert attention_kernels(plain, "fp32", CUDA) == ["sdpa", *flex, "reference"]


def test_where_probabilities_are_dropped_no_layout_changes_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those kernels are left whose masks are the same, so that any of them may be the fastest. That does not cost flash
    attention, nor do documents and windows, where ranks share sequences as well."""
    monkeypatch.setattr(gpu_kernels, "can_run", lambda kernel, device: True)
    drops = variant(attention_dropout=0.1, hidden=64, heads=2)
    for documents in (False, True):
        assert attention_kernels(drops, "bf16", CPU, documents) == ["reference"]
        assert attention_kernels(drops, "bf16", CUDA, documents) == ["triton", "flex", "reference"]
        for kind in ("gather", "ring"):
            windowed = replace(drops, window=5)
            assert attention_kernels(windowed, "bf16", CUDA, documents, kind) == ["triton"]
    assert attention_kernels(drops, "fp32", CUDA) == ["flex", "reference"]
    assert attention_kernels(replace(drops, positions="alibi"), "bf16", CUDA) == ["flex", "reference"]
    assert attention_kernels(replace(drops, sparse=PATTERNS[0]), "bf16", CUDA) == ["flex", "reference"]
    assert attention_kernels(drops, "bf16", torch.device("mps")) == ["sdpa"]  # reference would keep all scores
    for name in ("flex", "flash"):
        assert attention_kernels(replace(drops, attention=name), "bf16", CUDA, documents=True) == [name]


def test_what_adds_up_in_one_order_is_left_of_a_deterministic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "can_run", lambda kernel, device: True)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    words = "model.hidden=64", "model.heads=2", "precision=bf16", "train.deterministic=true"
    assert kernels_of(config(*words), CUDA) == ["flash", "triton", "sdpa", "reference"]
    assert kernels_of(config(*words, "model.attention_dropout=0.1"), CUDA) == ["triton", "reference"]
    # reference would keep all scores
    assert kernels_of(config(*words, "model.attention_dropout=0.1", "model.positions=alibi"), CUDA) == ["sdpa"]


@pytest.mark.parametrize(
    ("changes", "precision", "device", "expected"),
    [
        ({"attention": "flex"}, "fp32", CPU, "flex: needs a device of type cuda, got cpu"),
        ({"attention": "flash"}, "bf16", CUDA, "flash: needs a GPU of compute capability 8.0 or later"),
        ({"attention": "cudnn"}, "bf16", CUDA, "cudnn: needs a GPU of compute capability 8.0 or later"),
        ({"attention": "triton"}, "bf16", CUDA, "triton: needs a GPU of compute capability 8.0 or later"),
        ({"attention": "flash_attn"}, "bf16", CPU, "flash_attn: needs a device of type cuda, got cpu"),
        ({"attention": "flash_attn"}, "bf16", CUDA, "flash_attn: the package flash-attn cannot be imported"),
    ],
)
def test_a_kernel_that_cannot_run_here_is_refused(
    changes: dict[str, object], precision: str, device: torch.device, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # as if it were not installed, wherever this runs
    monkeypatch.setattr(gpu_kernels, "can_run", lambda kernel, device: False)
    with pytest.raises(UserError) as caught:
        attention_kernels(variant(hidden=64, **changes), precision, device)
    assert str(caught.value).startswith("1 problem")
    assert f"model.attention = {expected}" in str(caught.value)
    assert str(caught.value).endswith("set model.attention=auto")


def test_flash_attn_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", FakeFlashAttn("flash_attn"))
    assert attention_kernels(variant(attention="flash_attn"), "bf16", CUDA) == ["flash_attn"]
