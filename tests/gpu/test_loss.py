"""The loss on an accelerator: the numbers of a CPU, without passes of its own. Sums of gradients on any device."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch._inductor import metrics
from torch.utils._triton import has_triton

from pangu.collectives.regions import TensorRegion
from pangu.layers.vocab_parallel_loss import VocabParallelLoss
from pangu.topology.launch import Launch, choose_device
from pangu.zero.weight_gradients import GradientAccumulator, add_matmul

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_a_cpu(dtype: torch.dtype) -> None:
    """Sums of 1,000 exponentials in another order."""
    source, vocab, results = torch.Generator().manual_seed(0), 1000, []
    logits, labels = 5 * torch.randn(96, 1024, generator=source), torch.randint(vocab, (96,), generator=source)
    metrics.reset()
    for device in (torch.device("cpu"), choose_device("auto", Launch())):
        x = logits.to(device, dtype, copy=True).requires_grad_()
        losses = VocabParallelLoss.apply(x * 1.0, labels.to(device), TensorRegion(), vocab)
        losses.sum().backward()
        assert x.grad is not None
        results.append((losses.detach().cpu(), x.grad.cpu()))
    (here, slope), (there, other_slope) = results
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, other_slope)
    assert not slope[:, vocab:].any()
    assert not other_slope[:, vocab:].any()
    if has_triton():
        assert metrics.generated_kernel_count == 2  # one pass forward, one backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_added_to_a_view_in_fp32(dtype: torch.dtype) -> None:
    device = choose_device("auto", Launch())
    if dtype is not torch.float32 and device.type != "cuda":
        pytest.skip("made in its own format here, and then added")
    buffer = torch.full((8 + 64 * 48,), torch.nan, device=device)
    total = buffer[8:].view(64, 48)
    left, right = torch.randn(32, 64, device=device, dtype=dtype), torch.randn(32, 48, device=device, dtype=dtype)
    expected = left.double().t() @ right.double()
    add_matmul(total, left.t(), right, True)
    torch.testing.assert_close(total.double(), expected, rtol=1e-3, atol=1e-3)
    add_matmul(total, left.t(), right, False)
    torch.testing.assert_close(total.double(), 2 * expected, rtol=1e-3, atol=1e-3)
    assert buffer[:8].isnan().all()  # nothing else is touched


def test_rows_that_were_looked_up_get_their_gradients() -> None:
    """Into a view that held something else, as autograd adds them for each row; many are of one."""
    device, total = choose_device("auto", Launch()), torch.full((8, 64, 32), torch.nan)
    rows = torch.randint(64, (3, 128)).where(torch.rand(3, 128) < 0.5, 7)
    grad = torch.randn(3, 128, 32, dtype=torch.bfloat16)
    sums = Mock(sum_of=lambda _, cleared: (total[2].zero_(), cleared))
    total = total.to(device)
    GradientAccumulator(sums, Mock(embedding=None, turns=())).add_lookup(total[2], rows.to(device), grad.to(device))
    expected = torch.zeros(64, 32).index_add_(0, rows.flatten(), grad.flatten(0, 1).float())
    torch.testing.assert_close(total[2].cpu(), expected, rtol=0, atol=1e-4)  # fp32 sums of up to 220, in any order
    assert total[1].isnan().all()
    assert total[3].isnan().all()


def test_rows_that_were_looked_up_are_added_in_one_order() -> None:
    """On a CPU by several threads."""
    device, threads = choose_device("auto", Launch()), torch.get_num_threads()
    if device.type == "npu":
        pytest.skip("the order in which an NPU adds rows is not known; its stand-in takes the CPU's operator of none")
    rows, grad = torch.randint(50, (2, 4000), device=device), torch.randn(2, 4000, 256, device=device)
    sums = [torch.empty(100, 256, device=device) for _ in range(8)]
    torch.set_num_threads(2)
    try:
        for total in sums:
            products = GradientAccumulator(
                Mock(sum_of=lambda _, cleared, total=total: (total.zero_(), cleared)),
                Mock(embedding=None, turns=()),
            )
            products.add_lookup(total, rows, grad)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(total, sums[0]) for total in sums)
