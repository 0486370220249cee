"""Dropout on an accelerator: the masks of a CPU, in one kernel."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import metrics
from torch.utils._triton import has_triton

from pangu.layers.builder import Builder
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.topology.launch import Launch, choose_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_is_that_of_a_cpu(dtype: torch.dtype) -> None:
    """In forward and backward, of hidden states and of probabilities, for keys that were not there when it was
    compiled."""
    device, dropout = choose_device("auto", Launch()), Dropout(Builder(), 0.1, "here")
    x, scores = torch.randn(33, 2, 96, dtype=dtype), torch.rand(2, 3, 33, 33, dtype=dtype)
    for step in (1, 2, 3):
        results = []
        for at in (torch.device("cpu"), device):
            keys = DropoutKeys(5, step, (2**31 + 7, 2**31 + 8)).on(torch.zeros(2, 33, device=at))
            hidden = x.to(at, copy=True).requires_grad_()
            y = dropout.hidden(hidden, keys, hidden.detach())
            (gradient,) = torch.autograd.grad(y, hidden, torch.ones_like(y))
            results.append([part.cpu() for part in (y.detach(), gradient, dropout.probabilities(scores.to(at), keys))])
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine == 0, theirs == 0)
            torch.testing.assert_close(mine, theirs)


@pytest.mark.skipif(not has_triton(), reason="without Triton it is several kernels")
def test_it_is_one_kernel_whatever_the_keys() -> None:
    device, dropout = choose_device("auto", Launch()), Dropout(Builder(), 0.3, "here")
    x = torch.randn(64, 2, 128, device=device, dtype=torch.bfloat16)
    metrics.reset()
    for step in (1, 2, 3):
        keys = DropoutKeys(5, step, (step, step + 1)).on(torch.zeros(2, 64, device=device))
        dropout.hidden(x, keys, x)
    assert metrics.generated_kernel_count == 2  # keys of the rows, and dropout
