"""Attention over parts of a sequence is that over the whole, whichever way its ranks meet."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.collectives.context import ContextRegion
from pangu.config.parallelism import context_kind
from pangu.layers import attention_blocks
from pangu.layers.attention_blocks import Lengths
from pangu.layers.biases import Alibi
from pangu.layers.builder import Builder
from pangu.layers.context_attention import attention_tiles, context_kernel
from pangu.layers.dropout import Dropout
from pangu.layers.kernels import QKV, MaskAndBias, Reference
from pangu.layers.masks import AttentionMask
from pangu.topology.context import ContextRank, by_rank, in_order
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from tests.configs import tiny
from tests.models.helpers import variant
from tests.threads import Ranks

CPU = torch.device("cpu")
HEADS = 4


def inputs(length: int, key_heads: int, dtype: torch.dtype) -> tuple[QKV, Tensor]:
    """Queries, keys and values, and the gradient of the output; numbers of bf16."""
    source = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 8) for heads in (HEADS, key_heads, key_heads, HEADS)]
    query, key, value, grad = (torch.randn(shape, generator=source).bfloat16().to(dtype) for shape in shapes)
    return QKV(query, key, value), grad


def mask_of(length: int, documents: bool, window: int | None) -> AttentionMask:
    """Documents that begin inside of chunks and at their edges; one is longer than a chunk."""
    if not documents:
        return AttentionMask(None, window)
    starts = torch.zeros(2, length, dtype=torch.int64)
    starts[0, [3, length // 2, length - 5]] = 1
    starts[1, [length // 4]] = 1
    begins = starts.clone()
    begins[:, 0] = 1
    bounds = torch.cat([begins.flatten().nonzero()[:, 0], torch.tensor([2 * length, 2 * length])]).int()
    return AttentionMask(starts.cumsum(1), window, bounds)


def terms_of(length: int, dtype: torch.dtype, setting: dict[str, Any]) -> MaskAndBias:
    mask = mask_of(length, setting.get("documents", False), setting.get("window"))
    bias = Alibi(Builder(PlacementTable()), HEADS)(length, dtype, CPU) if setting.get("alibi") else None
    return MaskAndBias(mask, bias, length, dtype, CPU)


def gradients(output: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def of_rank(rank: int, ranks: int, kind: str, length: int, key_heads: int, setting: dict[str, Any]) -> list[Tensor]:
    """What a rank finds for its part: output, and gradients of queries, keys and values. `kind`: maybe with the number
    of ranks in a block of a ring."""
    kind, ulysses = [*kind.split(), "1"][:2]
    region = ContextRegion.of(
        Mesh.connect(Layout(context=ranks), CPU),
        tiny(
            *(f"parallel.context={ranks}", f"parallel.context_kind={kind}", "model.sequence=64"),
            f"parallel.context_ulysses={ulysses}",
        ),
    )
    given, grad = inputs(length, key_heads, setting.get("dtype", torch.float64))
    parts = [region.cut(part, 2).requires_grad_() for part in given]
    terms = terms_of(length, given.query.dtype, setting)
    kernel = context_kernel(variant(), setting.get("kernel", "reference"), False, region)(terms)
    output, _ = kernel(QKV(*parts), Dropout(Builder(PlacementTable()), 0.0, "none"), None, None)
    return gradients(output, parts, region.cut(grad, 2))


def together(parts: list[list[Tensor]]) -> list[Tensor]:
    return [in_order(torch.stack(of_ranks)) for of_ranks in zip(*parts, strict=True)]


def alone(length: int, key_heads: int, setting: dict[str, Any]) -> list[Tensor]:
    given, grad = inputs(length, key_heads, setting.get("dtype", torch.float64))
    leaves = [part.requires_grad_() for part in given]
    kernel = Reference(terms_of(length, given.query.dtype, setting))
    output, _ = kernel(QKV(*leaves), Dropout(Builder(PlacementTable()), 0.0, "none"), None, None)
    return gradients(output, leaves, grad)


def test_parts_are_put_together_again() -> None:
    whole = torch.arange(48.0).view(2, 24, 1)
    parts = [ContextRank(rank, 3).cut(whole, 1) for rank in range(3)]
    assert parts[1][0, :, 0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert torch.equal(in_order(torch.stack(parts)), whole)
    assert torch.equal(by_rank(whole, 3), torch.stack(parts))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_has_as_many_scores_to_compute(ranks: int) -> None:
    """Of keys at or before a query, all ranks together meet each once."""
    length = 24 * ranks
    for kind, sources in (("gather", [None]), ("ring", list(range(ranks)))):
        work, seen = Counter[int](), Counter[tuple[int, int]]()
        for rank in range(ranks):
            region = ContextRegion(rank, ranks, kind=kind)
            for _, _, block in (visit for source in sources for visit in attention_tiles(region, length, None, source)):
                for query in range(block.query, block.query + block.queries):
                    for key in range(block.key, min(block.key + block.keys, query + 1)):
                        seen[query, key] += 1
                        work[rank] += 1
        assert len(set(work.values())) == 1
        assert set(seen.values()) == {1}
        assert len(seen) == length * (length + 1) // 2


SETTINGS: list[dict[str, Any]] = [
    {"kernel": "sdpa"},
    {"kernel": "sdpa", "documents": True},
    {"kernel": "sdpa", "window": 7},
    {"kernel": "sdpa", "documents": True, "window": 3},
    {"kernel": "sdpa", "alibi": True},
    {"kernel": "sdpa", "alibi": True, "window": 7},
    {"kernel": "sdpa", "alibi": True, "documents": True},
]


@pytest.mark.parametrize("kind", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_fused_blocks_equal_the_whole(kind: str, setting: dict[str, Any]) -> None:
    """fp64; 1e-12: sums of at most 32 products in another order."""
    for ranks, key_heads in ((2, 2), (4, 1)):
        found = together(Ranks().run(ranks, of_rank, kind, 32, key_heads, setting))
        for mine, theirs in zip(found, alone(32, key_heads, setting), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("ranks", "ulysses", "key_heads"), [(4, 2, 1), (4, 2, 4), (6, 2, 2), (8, 4, 2)])
def test_blocks_of_ranks_that_exchange_heads_form_a_ring(ranks: int, ulysses: int, key_heads: int) -> None:
    """1e-12: sums in another order."""
    for setting in ({"kernel": "sdpa", "documents": True, "window": 9}, {"alibi": True}):
        found = together(Ranks().run(ranks, of_rank, f"ring {ulysses}", 48, key_heads, setting))
        for mine, theirs in zip(found, alone(48, key_heads, setting), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_few_scores_at_a_time_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e-12: sums in another order."""
    monkeypatch.setattr(attention_blocks, "MOST_SCORES", 2 * HEADS * 32 * 3)
    setting = {"documents": True, "window": 9}
    found = together(Ranks().run(2, of_rank, kind, 32, 2, setting))
    for mine, theirs in zip(found, alone(32, 2, setting), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_bf16_rounds_as_one_process_does(kind: str) -> None:
    """Against fp64, at most twice the error of one process."""
    setting: dict[str, Any] = {"dtype": torch.bfloat16, "documents": True}
    found = together(Ranks().run(4, of_rank, kind, 64, 2, setting))
    exact = alone(64, 2, setting | {"dtype": torch.float64})
    for mine, one, true in zip(found, alone(64, 2, setting), exact, strict=True):
        assert float((mine.double() - true).norm()) <= 2 * float((one.double() - true).norm())


def flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """What torch's flash attention computes: documents of [tokens, heads, size] one by one, or rows, ends aligned."""
    bounds = [[0, query.shape[1]], [0, key.shape[1]]]
    if lengths.queries is not None and lengths.keys is not None:
        bounds = [lengths.queries.tolist(), lengths.keys.tolist()]
    along = query.dim() - 3
    outputs, log_sums = [], []
    for (begin, end), (first, last) in zip(*map(pairwise, bounds), strict=True):
        q = query.narrow(along, begin, end - begin).transpose(-3, -2)
        k, v = (x.narrow(along, first, last - first).transpose(-3, -2) for x in (key, value))
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        distance = torch.arange(end - begin)[:, None] + (last - first) - (end - begin) - torch.arange(last - first)
        allowed = distance >= (0 if options["is_causal"] or "window_size_left" in options else -(10**9))
        allowed &= distance <= options.get("window_size_left", 10**9)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
        log_sum = scores.logsumexp(-1)
        shares = (scores - log_sum.clamp(min=-1e300)[..., None]).exp()
        outputs.append((shares @ v).transpose(-3, -2))
        log_sums.append(torch.where(log_sum == -torch.inf, torch.inf, log_sum))  # as the kernel says it
    return torch.cat(outputs, along), torch.cat(log_sums, -1)


def flash_forward(qkv: Any, lengths: Lengths, share: float, options: dict[str, Any]) -> tuple[Tensor, ...]:
    return (*flash(*qkv, lengths=lengths, options=options), torch.zeros(2), torch.zeros(1))


def flash_backward(
    tensors: Any, lengths: Lengths, share: float, state: Any, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """With the log of sums over all keys, of which these are some."""
    grad, query, key, value, output, log_sum = tensors
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        part, part_sum = flash(*leaves, lengths=lengths, options=options)
        heads_last = log_sum.transpose(-2, -1)[..., None]
        own = part_sum.transpose(-2, -1)[..., None]
        seen = own.isfinite()
        ratio = torch.where(seen, (torch.where(seen, own, 0.0) - heads_last).exp(), 0.0)
        means = (grad * output).sum(-1, keepdim=True)
        # of log sums and outputs, each with the weight of this block
        loss = (grad * ratio.detach() * part).sum()
        of_sum = (ratio * ((grad * part).sum(-1, keepdim=True) - means)).detach()
        loss = loss + (of_sum * torch.where(seen, own, 0.0)).sum()
        return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("gather", {}),
        ("gather", {"documents": True}),
        ("gather", {"window": 7}),
        ("gather", {"documents": True, "window": 5}),
        ("ring", {}),
        ("ring", {"documents": True}),  # it takes no windows
    ],
)
def test_flash_blocks_ask_for_the_right_lengths(
    kind: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an operator that does on a CPU what torch's does on a GPU."""
    monkeypatch.setattr(attention_blocks, "flash_forward", flash_forward)
    monkeypatch.setattr(attention_blocks, "flash_backward", flash_backward)
    found = together(Ranks().run(2, of_rank, kind, 32, 2, setting | {"kernel": "flash"}))
    for mine, theirs in zip(found, alone(32, 2, setting), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        (["parallel.context=2"], "ulysses"),
        (["parallel.context=8"], "gather"),  # 4 heads
        (["model.kv_heads=1", "parallel.context=2"], "gather"),  # 6 of the keys are less than 12 of queries and keys
        (["model.kv_heads=1", "parallel.context=4"], "gather"),
        (["parallel.context=2", "parallel.context_kind=ring"], "ring"),
        (["model.kv_heads=1", "parallel.context=2", "model.attention=flex"], "ulysses"),
    ],
)
def test_auto_sends_least(keys: list[str], kind: str) -> None:
    assert context_kind(tiny("model.sequence=64", *keys)) == kind
