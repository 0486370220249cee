"""What torch's flash attention drops over documents, for which the operator has no CPU kernel; its compiled
FlexAttention; our own Triton kernels; what kernels are chosen by."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor
from torch.utils._triton import has_triton

from pangu.layers.attention import AttentionCore
from pangu.layers.biases import Bias
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.gpu_kernels import KERNELS, can_run
from pangu.layers.kernels import QKV, MaskAndBias
from pangu.layers.masks import AttentionMask
from pangu.metrics.timing import time_candidates
from pangu.topology.launch import Launch, choose_device
from pangu.topology.placement import PlacementTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not can_run("flash", torch.device("cuda")), reason="needs torch's flash attention"),
]


def test_what_is_dropped_over_documents() -> None:
    """One-hot values read the probabilities that were left, and a one-hot gradient of the output those of backward:
    they are the same, the reference's scaled by 1 / 0.7 where they are not zero, in a recompute as well."""
    device, length, heads = choose_device("auto", Launch()), 64, 4
    documents = torch.zeros(2, length, dtype=torch.int64, device=device)
    documents[0, 20:] = 1
    bounds = torch.tensor([0, 20, length, 2 * length, 2 * length], dtype=torch.int32, device=device)
    terms = MaskAndBias(AttentionMask(documents, None, bounds), None, length, torch.bfloat16, device)
    query, key = torch.randn(2, 2, heads, length, length, device=device, dtype=torch.bfloat16)
    one_hot = torch.eye(length, device=device, dtype=torch.bfloat16).expand(2, heads, -1, -1)
    value = one_hot.clone().requires_grad_()
    keys = DropoutKeys(1, 2, (3, 4)).on(torch.zeros(2, length, device=device))
    kernel, build = KERNELS["flash"](terms), Builder(PlacementTable())
    left, _ = AttentionCore(build, 0.3)(QKV(query, key, value), kernel, keys)
    (back,) = torch.autograd.grad(left, value, one_hot)
    torch.testing.assert_close(back.mT, left)
    again, _ = AttentionCore(build, 0.3, recompute=True)(QKV(query, key, value), kernel, keys)
    assert torch.equal(again, left)
    (back,) = torch.autograd.grad(again, value, one_hot)
    torch.testing.assert_close(back.mT, left)
    whole, _ = AttentionCore(build, 0.0)(QKV(query, key, one_hot), KERNELS["reference"](terms), None)
    kept = left != 0
    torch.testing.assert_close(left[kept], whole[kept] / 0.7, atol=0.01, rtol=0.02)
    assert float(kept[whole > 1e-3].float().mean()) == pytest.approx(0.7, abs=0.03)


def flex_and_reference(
    length: int, groups: int, kind: str, dtype: torch.dtype, values: Tensor, name: str = "flex"
) -> list[list[Tensor]]:
    """Output and gradients of the two, in a micro-batch of 2 rows; of the second of two steps. `name`: the first's."""
    device, heads, size = choose_device("auto", Launch()), 4, 64
    documents = None
    if kind == "documents":
        documents = (torch.arange(length, device=device) >= 20).long().expand(2, -1).contiguous()
    bias = None
    if kind == "bias":
        bias = Bias(torch.randn(length, heads, device=device).requires_grad_())
    parts = [torch.randn(2, n, length, size, device=device).to(dtype) for n in (heads, groups)]
    given = QKV(*(part.requires_grad_() for part in (*parts, values.to(device, dtype))))
    found = []
    for each in (name, "reference"):
        core = AttentionCore(Builder(PlacementTable()), 0.3)
        kernel = KERNELS[each](MaskAndBias(AttentionMask(documents), bias, length, dtype, device))
        for step in (1, 2):
            output, _ = core(given, kernel, DropoutKeys(1, step, (3, 4)).on(torch.zeros(2, length, device=device)))
        inputs = [*given, *([] if bias is None else [bias.by_distance])]
        found.append([output.detach(), *torch.autograd.grad(output.square().sum(), inputs)])
    return found


@pytest.mark.usefixtures("empty_compiler")
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize("length", [64, 256, 300])
@pytest.mark.parametrize(("groups", "kind"), [(4, "plain"), (2, "documents"), (4, "bias")])
def test_flex_drops_what_the_reference_drops(length: int, groups: int, kind: str) -> None:
    """fp32: 1e-5 of the largest, sums of up to 600 products in another order, 6e-8 each. Short sequences have a kernel
    of their own; 300 is no multiple of its blocks. A query of which all keys are dropped, as the first one's often are,
    has zeros."""
    values = torch.randn(2, groups, length, 64)
    mine, theirs = flex_and_reference(length, groups, kind, torch.float32, values)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.abs().max()), rtol=0)
    assert torch.equal(mine[0] == 0, theirs[0] == 0)


@pytest.mark.usefixtures("empty_compiler")
@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_flex_drops_the_same_elements_in_bf16() -> None:
    """One-hot values read the probabilities that were left. A probability that rounds to 0 in one only is smaller than
    any here."""
    values = torch.eye(128).expand(2, 4, -1, -1).clone()
    mine, theirs = flex_and_reference(128, 4, "plain", torch.bfloat16, values)
    assert torch.equal(mine[0] == 0, theirs[0] == 0)
    torch.testing.assert_close(mine[0], theirs[0], atol=0.01, rtol=0.02)


def of_triton(case: tuple[int, int, int, str], name: str, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of a kernel in bf16, or in `dtype` of numbers rounded to bf16."""
    length, groups, size, kind = case
    device, heads = choose_device("auto", Launch()), 4
    source = torch.Generator(device).manual_seed(1)
    widths = [n * size for n in (heads, groups, groups)]
    joined = torch.randn(length, 2, sum(widths), device=device, generator=source).bfloat16().to(dtype).requires_grad_()
    given = QKV(*(part.unflatten(-1, (-1, size)).permute(1, 2, 0, 3) for part in joined.split(widths, -1)))
    mask = AttentionMask(None, 100 if kind == "window" else None)
    if kind == "documents":
        documents = (torch.arange(length, device=device) >= 70).long().expand(2, -1).contiguous()
        bounds = torch.tensor([0, 70, length, length + 70, 2 * length], dtype=torch.int32, device=device)
        mask = AttentionMask(documents, None, bounds)
    core = AttentionCore(Builder(PlacementTable()), 0.3)
    kernel = KERNELS[name](MaskAndBias(mask, None, length, dtype, device))
    output, _ = core(given, kernel, DropoutKeys(1, 2, (3, 4)).on(torch.zeros(2, length, device=device)))
    weight = torch.randn(output.shape, device=device, generator=source).bfloat16().to(dtype)
    return [output.detach(), *torch.autograd.grad(output, joined, weight)]


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize(
    "case",
    [
        (64, 4, 64, "plain"),
        (300, 4, 80, "documents"),
        (512, 2, 128, "window"),
        (513, 1, 256, "plain"),
        (200, 4, 8, "plain"),
    ],
    ids=str,
)
def test_triton_is_as_near_to_fp32_as_the_reference(case: tuple[int, int, int, str]) -> None:
    """In bf16, with the same elements dropped; not further than twice as far; the same bits again."""
    exact = of_triton(case, "reference", torch.float32)
    mine, again, theirs = (of_triton(case, name, torch.bfloat16) for name in ("triton", "triton", "reference"))
    assert all(map(torch.equal, mine, again))
    for one, other, true in zip(mine, theirs, exact, strict=True):
        assert float((one.float() - true).norm()) <= 2 * float((other.float() - true).norm())


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_triton_drops_the_same_elements() -> None:
    """One-hot values read the probabilities that were left."""
    values = torch.eye(64).expand(2, 4, -1, -1).clone()
    mine, theirs = flex_and_reference(64, 4, "plain", torch.bfloat16, values, "triton")
    assert torch.equal(mine[0] == 0, theirs[0] == 0)
    torch.testing.assert_close(mine[0], theirs[0], atol=0.01, rtol=0.02)


def test_a_candidate_is_timed_by_the_device() -> None:
    """Not by the host, which is busy for longer."""
    times = time_candidates({"host": lambda: time.sleep(1e-4)}, choose_device("auto", Launch()), 1.0)
    assert 0 <= times["host"] < 5e-5
