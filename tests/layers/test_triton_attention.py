"""Our Triton kernels compute the reference's attention, drop what it drops, and have its gradients.

Triton's interpreter runs them here, on a CPU; what a GPU makes of them only one can show (tests/gpu/test_attention.py).
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.common.errors import LocalError
from pangu.config import attention as abilities
from pangu.layers import triton_attention
from pangu.layers.attention import AttentionCore
from pangu.layers.attention_blocks import ExplicitBlocks, Gradients, Output, Scores, Tile, TileDropout
from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.gpu_kernels import KERNELS
from pangu.layers.kernels import QKV, MaskAndBias
from pangu.layers.masks import AttentionMask
from pangu.layers.triton_attention import Tiles, TritonBlocks, VisibleRange, head_parts
from pangu.models import compiled
from pangu.topology.layout import Layout
from pangu.topology.placement import PlacementTable
from tests.parallel.harness import OVERRIDES, small_trainer, whole

pytest.importorskip("triton")
import triton
from triton.runtime.errors import OutOfResources

from pangu.layers import triton_kernels

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has what a GPU must show"),
    pytest.mark.skipif(
        tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9), reason="its interpreter takes no bounds of loops"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of infinities, whose exponentials are not used
]
CPU, LENGTH, HEADS = torch.device("cpu"), 60, 4
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 22 + [2] * 33, [0] * 37 + [1] * 23])
BOUNDS = torch.tensor([0, 5, 27, 60, 60, 97, 120, 120], dtype=torch.int32)
"""Of the documents, in both rows; two are empty."""
KEYS = DropoutKeys(1, 2, (3, 4))
CASES = [
    (None, None, HEADS, 16, 0.0),
    (None, None, HEADS // 2, 40, 0.3),
    (DOCUMENTS, None, HEADS, 80, 0.3),
    (None, 13, HEADS // 4, 24, 0.3),
    (DOCUMENTS, 20, HEADS, 8, 0.0),
    (DOCUMENTS, 2, HEADS // 2, 16, 0.6),
]
"""Documents, window, key heads, head size, dropout."""
NAMES = ["plain", "grouped", "documents", "window", "documents in windows", "all dropped of many"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several in a sequence, the last of them not full, and not as many queries as keys."""

    def tiles(kernel: str, size: int, instruction: str) -> Tiles:
        return Tiles(32 if kernel == "attend" else 16, 32, 4, 2)

    monkeypatch.setattr(triton_attention, "tiles_of", tiles)


def masked(documents: Tensor | None, window: int | None) -> AttentionMask:
    return AttentionMask(documents, window, None if documents is None else BOUNDS)


def heads(groups: int, size: int, dtype: torch.dtype = torch.float32) -> QKV:
    """As they come out of a projection: neighbouring tokens are far apart; values lie otherwise."""
    source = torch.Generator().manual_seed(0)
    widths = [n * size for n in (HEADS, groups, groups)]
    joined = torch.randn(LENGTH, 2, sum(widths), generator=source).to(dtype)
    query, key, value = (part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for part in joined.split(widths, -1))
    return QKV(query, key, value.contiguous())


def results(
    kernel: str, case: tuple[Any, ...], dtype: torch.dtype = torch.float32, again: bool = False, wide: bool = False
) -> list[Tensor]:
    """Output, and gradients of queries, keys and values. `wide`: in fp32, of what is rounded to `dtype`."""
    documents, window, groups, size, dropout = case
    given = heads(groups, size, dtype)
    weight = torch.randn(given.query.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    if wide:
        given, weight, dtype = QKV(*(part.float() for part in given)), weight.float(), torch.float32
    given = QKV(*(part.detach().requires_grad_() for part in given))
    made = KERNELS[kernel](MaskAndBias(masked(documents, window), None, LENGTH, dtype, CPU))
    core = AttentionCore(Builder(PlacementTable()), dropout, recompute=again)
    output, _ = core(given, made, KEYS.on(torch.zeros(2, LENGTH)))
    return [output.detach(), *torch.autograd.grad(output, given, weight)]


@pytest.mark.parametrize("instruction", ["wgmma", "tcgen05"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_it_is_the_reference_with_its_gradients(
    case: tuple[Any, ...], instruction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32; 5e-6 of the largest: sums of up to 80 products, 6e-8 each. A query of which all keys are dropped has an
    output of 0, in both. Gradients of keys come from masked tiles first with wgmma, and last with tcgen05."""
    monkeypatch.setattr(triton_attention, "matmul_instruction", lambda device: instruction)
    expected, found = results("reference", case), results("triton", case)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-6 * float(theirs.abs().max()), rtol=0)
    assert torch.equal(found[0] == 0, expected[0] == 0)


def test_in_fp16_it_is_as_near_as_the_reference() -> None:
    """To what fp32 gives of the same numbers: not further than twice as far. (The interpreter has no bf16 products.)"""
    case = CASES[2]
    exact = results("reference", case, torch.float16, wide=True)
    found, expected = (results(name, case, torch.float16) for name in ("triton", "reference"))
    for mine, theirs, true in zip(found, expected, exact, strict=True):
        assert mine.dtype == torch.float16
        assert (mine.float() - true).norm() <= 2 * (theirs.float() - true).norm()


def test_a_recompute_gives_the_same_bits() -> None:
    first, again = results("triton", CASES[1]), results("triton", CASES[1], again=True)
    assert all(map(torch.equal, first, again))


def test_nan_is_never_dropped() -> None:
    """What has seen a nan is nan, as in the reference, whether or not dropout drops its probability."""
    query, key, value = heads(HEADS, 16)
    key[:, :, 7] = torch.nan
    for name in ("triton", "reference"):
        made = KERNELS[name](MaskAndBias(masked(None, None), None, LENGTH, torch.float32, CPU))
        core = AttentionCore(Builder(PlacementTable()), 0.6, recompute=False)
        output, _ = core(QKV(query, key, value), made, KEYS.on(torch.zeros(2, LENGTH)))
        assert output[:, :, 7:].isnan().all(), name


def test_nearly_all_may_be_dropped() -> None:
    case = (None, None, HEADS, 16, 0.99)
    for mine, theirs in zip(results("triton", case), results("reference", case), strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-6 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "several"])
@pytest.mark.parametrize("window", [None, 1, 7, 200])
def test_reach_is_what_the_mask_allows(documents: Tensor | None, window: int | None) -> None:
    """Of every query the keys from the oldest to its own, of every key the queries from its own to the newest."""
    mask = masked(documents, window)
    oldest, newest = VisibleRange.of(MaskAndBias(mask, None, LENGTH, torch.float32, CPU))
    if mask.is_plain_causal:
        assert oldest is newest is None
        return
    assert oldest is not None
    assert newest is not None
    queries, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = mask.dense(range(LENGTH), range(LENGTH), CPU)[:, 0]
    assert torch.equal((keys >= oldest[..., None]) & (keys <= queries), seen)
    assert torch.equal((queries <= newest[:, None]) & (keys <= queries), seen)


@pytest.mark.parametrize("size", [1, 8, 16, 24, 40, 64, 72, 80, 96, 112, 128, 160, 256])
def test_a_head_is_taken_in_powers_of_two_of_which_no_half_is_empty_up_to_128_columns(size: int) -> None:
    parts = head_parts(size)
    assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in parts)
    assert size <= sum(parts)
    assert size > 128 or sum(parts) < size + max(16, size / 2)


BLOCKS = [Tile(20, 20, 20, 20), Tile(20, 24, 0, 20), Tile(30, 14, 6, 38), Tile(37, 7, 5, 18)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("case", CASES[1:4], ids=NAMES[1:4])
def test_between_some_queries_and_some_keys(case: tuple[Any, ...], block: Tile) -> None:
    """Context parallelism's blocks: output, logarithms of sums and gradients are those of explicit scores. Some queries
    see nothing of a block."""
    documents, window, groups, size, probability = case
    terms = MaskAndBias(masked(documents, window), None, LENGTH, torch.float32, CPU)
    given = heads(groups, size)
    queries, keys = (slice(at, at + count) for at, count in (block[:2], block[2:]))
    part = QKV(given.query[:, :, queries], given.key[:, :, keys], given.value[:, :, keys])
    dropout = Dropout(Builder(PlacementTable()), probability, "x")
    drops = TileDropout(dropout, KEYS.on(torch.zeros(2, LENGTH))).rows(queries)
    grad = torch.randn(part.query.shape, generator=torch.Generator().manual_seed(7))
    whole_output = torch.randn(part.query.shape, generator=torch.Generator().manual_seed(8))
    found = []
    for blocks in (TritonBlocks(terms), ExplicitBlocks(terms)):
        output, log_sum, _ = blocks.forward(part, block, drops, Scores())
        more = torch.logaddexp(log_sum, torch.ones(()))  # of other keys
        into = Gradients(QKV(*(torch.zeros_like(x) for x in part)))
        blocks.backward(grad, part, block, drops, Scores(), Output(whole_output, more), into)
        found.append([output, log_sum, *into.of])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert torch.equal(found[0][1] == -math.inf, found[1][1] == -math.inf)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_layers_drop_the_same(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model over documents, whose layers are one graph each."""
    known = replace(abilities.ABILITIES["triton"], devices=None, precisions=None)
    monkeypatch.setitem(abilities.ABILITIES, "triton", known)
    monkeypatch.setattr("pangu.layers.kernel_choice.missing", lambda *_: ())
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    found = []
    for words in (("triton", "true"), ("triton", "false"), ("reference", "false")):
        more = (f"model.attention={words[0]}", f"compile={words[1]}", f"memory.recompute={recompute}")
        trainer, batches = small_trainer(Layout(), *OVERRIDES, *more)
        trainer.forward_backward(batches)
        found.append(whole(trainer, of_gradients=True))
    for name, gradient in found[-1].items():
        for mine in found[:2]:
            torch.testing.assert_close(mine[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_they_are_compiled_for_a_gpu() -> None:
    """Launched by a driver that runs nothing: with Hopper's products of matrices, and nearly all that a thread has in
    its registers, for heads of 80 columns."""
    code = (
        "from benchmarks.attention_kernels import compiled, needs\n"
        "for kernel in compiled(90, 80):\n"
        "    print(kernel.metadata.name, 'wgmma' in kernel.asm['ptx'], needs(kernel, 90)['spilled_bytes'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(name, wide) for name, wide, _ in lines] == [
        ("attend", "True"),
        ("query_gradients", "True"),
        ("key_gradients", "True"),
    ]
    assert all(int(spilled) <= 64 for *_, spilled in lines)


def test_a_gpu_that_is_too_small_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: object, **options: object) -> None:
                raise OutOfResources(131072, 101376, "shared memory")

            return launch

    monkeypatch.setattr(triton_kernels, "attend", Full())
    with pytest.raises(LocalError, match=r"triton cannot run on this device .* 101376.*set model.attention=reference"):
        results("triton", CASES[0])
